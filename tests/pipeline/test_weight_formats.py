"""`estimate` prices a quantised checkpoint in its own width, and says so or refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from archsearch.errors import ArchsearchError
from archsearch.pipeline.estimate import EstimateRequest, estimate_drafts
from archsearch.report.terminal.estimate import Estimated
from archsearch.workload import WorkloadRequest
from tests.architecture.test_quantisation import IN_USE, LLAMA

CASES = {name: config for name, config, _ in IN_USE}


def estimated(target: str, gpu: str, draft: str = "eagle3", **asked: Any) -> Estimated:
    request = WorkloadRequest(gpu=gpu, engine="vllm", context_len=1024, **asked)
    return estimate_drafts(
        EstimateRequest(target=target, drafts=(draft,), asked=request, alpha="0.7", gamma=3)
    )


def folder(place: Path, quantisation: dict[str, Any] | None) -> str:
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(
        json.dumps(LLAMA | ({"quantization_config": quantisation} if quantisation else {}))
    )
    return str(place)


def decode_s(found: Estimated) -> float:
    return found.drafts[0].score.decode_s.value


@pytest.mark.slow(own=True)
def test_quantised_checkpoints_take_less_time_and_fewer_gpus(tmp_path: Path) -> None:
    plain = estimated(folder(tmp_path / "plain", None), "h100")
    fp8 = estimated(folder(tmp_path / "fp8", CASES["RedHat fp8"]), "h100")
    awq = estimated(folder(tmp_path / "awq", CASES["AutoAWQ"]), "h100")
    assert [each.workload.tensor_parallel for each in (plain, fp8, awq)] == [4, 2, 1]
    assert fp8.workload.dtype == "float8_e4m3fn"  # from the table's fp8 rows
    assert (
        "weights in int4" in awq.latency
        and "modelled" in awq.latency
        and "weights in" not in plain.latency
    )
    whole = estimated("llama-3.3-70b", "h100", tensor_parallel=4)
    narrow = estimated("llama-3.3-70b", "h100", tensor_parallel=4, dtype="int4")
    assert 0.3 < decode_s(narrow) / decode_s(whole) < 0.8
    assert decode_s(whole) == pytest.approx(
        decode_s(estimated(str(tmp_path / "awq"), "h100", tensor_parallel=4, dtype="bfloat16"))
    )
    doubt = [each.drafts[0].score.decode_s.std / decode_s(each) for each in (whole, narrow)]
    assert doubt[1] > 2 * doubt[0]


def test_fp8_weights_on_a_gpu_without_fp8_are_weights_alone(tmp_path: Path) -> None:
    found = estimated(folder(tmp_path / "fp8", CASES["fp8 in blocks"]), "a100", tensor_parallel=4)
    plain = estimated(folder(tmp_path / "plain", None), "a100", tensor_parallel=4)
    assert found.workload.dtype == "bfloat16" and "weights in float8_e4m3fn" in found.latency
    assert 0.5 < decode_s(found) / decode_s(plain) < 0.95


def test_a_quantised_draft_is_priced_in_its_own_width(tmp_path: Path) -> None:
    small = {
        **LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
    }
    found = {}
    for name in ("plain", "awq"):
        (tmp_path / name).mkdir()
        quantisation = {} if name == "plain" else {"quantization_config": CASES["AutoAWQ"]}
        (tmp_path / name / "config.json").write_text(json.dumps(small | quantisation))
        answer = estimated("llama-3.3-70b", "h100", str(tmp_path / name), tensor_parallel=4)
        found[name] = answer.drafts[0].score.draft_s.value
    assert 0.4 < found["awq"] / found["plain"] < 0.95


def test_what_nobody_prices_is_refused_by_name(tmp_path: Path) -> None:
    hqq = folder(tmp_path / "hqq", {"quant_method": "hqq"})
    with pytest.raises(ArchsearchError, match="'hqq'.*not priced.*--dtype"):
        estimated(hqq, "h100")
    assert decode_s(estimated(hqq, "h100", dtype="int4"))
    with pytest.raises(ArchsearchError, match="draft .*'hqq'"):
        estimated("llama-3.3-70b", "h100", hqq)
    with pytest.raises(ArchsearchError, match="not priced on a CPU"):
        estimate_drafts(
            EstimateRequest(
                target=folder(tmp_path / "awq", CASES["AutoAWQ"]),
                drafts=("eagle3",),
                asked=WorkloadRequest(gpu="cpu"),
            )
        )
