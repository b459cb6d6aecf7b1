"""The precision of drafts: engines keep them in 16 bits beside a target in 8, unless their config or
`--draft-dtype` says otherwise; every later command prices them so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from archsearch.architecture import catalogue
from archsearch.architecture.counts import body_parameters
from archsearch.capacity import memory_bytes
from archsearch.drafters.drafter import Draft, Drafter
from archsearch.drafters.heads import Eagle3, Mtp
from archsearch.drafters.lookup import NGram
from archsearch.drafters.models import EarlyExit, Independent
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.files import read_json
from archsearch.latency.model import LatencyModel
from archsearch.pipeline.latency import LatencySource, choose_latency
from archsearch.pipeline.session import SearchSession
from archsearch.traffic.times import prefill_s
from archsearch.workload import Workload, WorkloadRequest
from tests.cli.commands import call, last_json, refused

FP8 = "float8_e4m3fn"
H100_BYTES_PER_S = 3.35e12
TARGET = catalogue.load("llama-3.1-8b").architecture
SMALL = catalogue.load("llama-3.2-1b").architecture
HEAD = Eagle3.usual(TARGET)


def priced(dtype: str = FP8, **asked: object) -> tuple[LatencySource, Workload]:
    request = WorkloadRequest(gpu="h100", dtype=dtype, engine="vllm", tensor_parallel=1)
    return choose_latency(replace(request, **asked), TARGET)  # type: ignore[arg-type]


def round_s(found: tuple[LatencySource, Workload], draft: Draft, gamma: int = 4) -> float:
    return found[0].latency.round(TARGET, draft, found[1], gamma).draft_s.value


@pytest.mark.parametrize("draft", [HEAD, Independent(SMALL)])
def test_a_draft_in_16_bits_reads_twice_the_bytes(draft: Drafter) -> None:
    own, narrow = priced(), priced(draft_dtype="fp8")
    assert "drafts in bfloat16" in own[0].words and "drafts in" not in narrow[0].words
    target_s = [each[0].latency.verify_s(TARGET, each[1], 4) for each in (own, narrow)]
    assert target_s[0] == target_s[1]
    # of each of four passes the layers, a byte a weight more; layer 0 of the head has q, k and v
    # twice, fc and the rows of logits are in 16 bits beside any layers
    layers = draft.architecture
    twice = layers.hidden_size * (layers.q_size + 2 * layers.kv_size) if draft is HEAD else 0
    least = 4 * (body_parameters(layers) + twice) / H100_BYTES_PER_S
    more = round_s(own, draft) - round_s(narrow, draft)
    assert least < more < 1.25 * least
    idle_s = [each[0].latency.idle_s(TARGET, draft, each[1]).value for each in (own, narrow)]
    assert idle_s[0] > idle_s[1]


def test_it_is_that_of_a_target_in_16_bits_and_takes_as_much_memory() -> None:
    own, wide, narrow = priced(), priced("bfloat16"), priced(draft_dtype=FP8)
    for draft in (HEAD, Independent(SMALL)):
        assert round_s(own, draft) == pytest.approx(round_s(wide, draft), rel=1e-12)
        taken = [memory_bytes(TARGET, draft, each[1]) for each in (own, wide, narrow)]
        assert taken[0].draft_weight_bytes == taken[1].draft_weight_bytes
        assert taken[0].target_weight_bytes == taken[2].target_weight_bytes
        assert 1.5 < taken[0].draft_weight_bytes / taken[2].draft_weight_bytes <= 2.01
        assert taken[0].draft_kv_bytes == taken[2].draft_kv_bytes  # one cache for both
        added = [
            prefill_s(each[0].latency, TARGET, draft, each[1], 900)  # type: ignore[arg-type]
            - prefill_s(each[0].latency, TARGET, None, each[1], 900)  # type: ignore[arg-type]
            for each in (own, wide, narrow)
        ]
        assert added[0] == pytest.approx(added[1], rel=1e-6) and added[0] > added[2]


def test_what_comes_with_the_target_has_its_precision() -> None:
    own, narrow = priced(), priced(draft_dtype=FP8)
    for draft in (Mtp.usual(TARGET), NGram.usual(TARGET)):
        assert round_s(own, draft) == round_s(narrow, draft)
    own, narrow = (
        priced(engine="transformers", mode="eager", draft_dtype=name, batch_size=1024)
        for name in (None, FP8)
    )
    exit_, same = EarlyExit.usual(TARGET), Independent(EarlyExit.usual(TARGET).architecture)
    assert round_s(own, exit_) == round_s(narrow, exit_) == round_s(narrow, same)
    assert round_s(own, same) > round_s(own, exit_)


def test_a_config_in_8_bits_and_a_cache_in_8_bits_are_kept() -> None:
    own, narrow = priced(), priced(draft_dtype=FP8)
    in_8_bits = replace(HEAD, architecture=HEAD.architecture.in_format(FP8))
    assert round_s(own, in_8_bits) == pytest.approx(round_s(narrow, HEAD), rel=1e-9)
    cached = {"engine_options": ("kv_cache_dtype=fp8",), "context_len": 32768, "batch_size": 8}
    wide, small = priced(batch_size=8, context_len=32768), priced(**cached)
    read = 8 * 32768 * 2 * SMALL.num_hidden_layers * SMALL.kv_size  # a byte a number less
    less = round_s(wide, SMALL) - round_s(small, SMALL)
    assert less == pytest.approx(4 * read / H100_BYTES_PER_S, rel=0.3)


@pytest.mark.parametrize(
    ("gpu", "engine", "cache"),
    [("h100", "vllm", "fp8"), ("h100", "sglang", "fp8_e4m3"), ("l40s", "vllm", "fp8")],
)
def test_a_cache_in_8_bits_beside_16_bit_weights_is_read_in_half_the_time(
    gpu: str, engine: str, cache: str
) -> None:
    asked = {"gpu": gpu, "engine": engine, "batch_size": 8, "context_len": 32000}
    options = {"engine_options": (f"kv_cache_dtype={cache}",)}
    wide, small = (priced("bfloat16", **asked, **more) for more in ({}, options))
    decode_s = [each[0].latency.decode_s(TARGET, each[1]).value for each in (wide, small)]
    read = 8 * 32000 * 2 * TARGET.num_hidden_layers * TARGET.kv_size  # a byte a number less
    rate = wide[0].device.bandwidth_bytes_per_s
    assert 0.9 * read / rate < decode_s[0] - decode_s[1] < 1.3 * read / rate
    held = [memory_bytes(TARGET, None, each[1]).target_kv_bytes for each in (wide, small)]
    assert held[0] == 2 * held[1]
    many = asked | {"batch_size": 24, "tensor_parallel": None}
    ranks = [priced("bfloat16", **many, **more)[1].tensor_parallel for more in ({}, options)]
    assert ranks[0] > ranks[1], "an auto-chosen number of devices knows it too"


def test_a_cache_that_no_table_holds_is_refused() -> None:
    with pytest.raises(ArchsearchError, match="was measured here: leave out kv_cache_dtype"):
        priced("bfloat16", gpu="a100", engine_options=("kv_cache_dtype=fp8",))


def test_where_16_bits_were_not_measured_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(self: object, dtype: str) -> object:
        raise MissingDataError(f"the profile holds no passes in {dtype}; it has {FP8}")

    narrow = priced(draft_dtype=FP8)
    monkeypatch.setattr(LatencyModel, "_in", lacking)
    own = priced()
    assert f"; drafts priced in {FP8}: the profile holds no passes in bfloat16" in own[0].words
    assert round_s(own, HEAD) == round_s(narrow, HEAD) and own[1] == narrow[1]


def test_a_search_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = "search --target llama-3.1-8b --gpu h100 --dtype fp8 --family independent".split()
    gains, shape = [], None
    for name, more in (("wide", ()), ("narrow", ("--draft-dtype", "fp8"))):
        call(*asked, "--trials", "30", "--run", name, *more)
        session = SearchSession.reopen(Path(name))
        score = session.run.score(1)
        again = session.scorer_of(score).with_gammas((score.gamma,))(score.proposer)
        assert again.speedup.value == pytest.approx(score.speedup.value, rel=1e-9)
        assert session.scorer.workload.draft_dtype == ("bfloat16" if name == "wide" else None)
        shape = shape or score.proposer
        gains.append(session.scorer(shape).speedup.value)
    assert gains[0] < gains[1]
    kept = yaml.safe_load(Path("narrow/run.yaml").read_text())["arguments"]
    assert kept["draft_dtype"] == FP8
    for name, how in (("wide", None), ("narrow", "fp8_per_tensor")):
        call("export", name, "--output", f"{name}/out", "--allow-untrained")
        config = read_json(Path(name) / "out" / "speculative_config.json", "config")
        assert config.get("quantization") == how
        card = (Path(name) / "out" / "README.md").read_text()
        assert card.count('", dtype="bfloat16")') == 2, "transformers computes in no 8 bits"
        rank = next(s.rank for s in session.run.scores() if s.needs and s.needs.kind == "training")
        call("recipe", name, "--rank", str(rank), "--output", f"{name}-recipe")
        assert ('"quantization"' in Path(f"{name}-recipe/serve.sh").read_text()) == bool(how)
    call(*(word.replace("fp8", "int4") for word in asked), "--trials", "30", "--run", "int4")
    session = SearchSession.reopen(Path("int4"))
    score = session.run.score(1)
    again = session.scorer_of(score).with_gammas((score.gamma,))(score.proposer)
    assert again.speedup.value == pytest.approx(score.speedup.value, rel=1e-9)
    call("recipe", "int4", "--rank", str(rank), "--output", "int4-recipe")
    assert "name its weights in int4.\nset -euo" in Path("int4-recipe/serve.sh").read_text()
    assert "draft_dtype was 'float8_e4m3fn'" in refused(*asked, "--trials", "30", "--run", "narrow")
    assert "drafts in bfloat16" in last_json(call("schedule", "wide", "--json"))["latency"]


def test_of_several_the_search_takes_the_one_whose_best_is_fastest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = "search --target llama-3.1-8b --gpu h100 --dtype fp8 --family independent".split()
    best = {}
    for name in ("bfloat16", FP8):
        call(*asked, "--trials", "30", "--run", name, "--draft-dtype", name)
        best[name] = SearchSession.reopen(Path(name)).run.score(1).speedup.value
    both = (*asked, "--trials", "30", "--run", "both", "--draft-dtype", "bf16,fp8")
    said = call(*both).stderr
    each = ", ".join(f"{gain:.2f}x in {name}" for name, gain in best.items())
    assert f"Precision of drafts: {FP8} (the best: {each}; acceptance taken" in said
    run = SearchSession.reopen(Path("both")).run
    assert run.arguments["draft_dtype"] == FP8
    assert run.score(1).speedup.value == best[FP8]
    assert "Precision of drafts" not in call(*both).stderr  # the run's own
    line = "--draft-dtype float8_e4m3fn,bfloat16: only `search` chooses; name one here"
    few = ("estimate", "--target", "llama-3.1-8b", "--draft", "eagle3", "--gpu", "h100")
    assert line in refused(*few, "--draft-dtype", "fp8,bf16,fp8")


@pytest.mark.parametrize(
    ("changes", "dtype", "words"),
    [
        ({}, FP8, FP8),
        ({}, "bfloat16", ""),
        ({"served_dtype": FP8}, FP8, ""),
        ({"served_dtype": FP8}, "bfloat16", f"bfloat16 (published: {FP8})"),
        ({"served_dtype": "nvfp4"}, FP8, f"{FP8} (published: nvfp4)"),
        ({"num_experts": 8, "expert_format": "mxfp4"}, "bfloat16", ""),
        ({"num_experts": 8, "expert_format": "mxfp4"}, FP8, f"{FP8} (published: mxfp4)"),
        ({"num_experts": 8, "expert_format": "int4", "weight_format": "int4"}, "bfloat16", "int4"),
    ],
)
def test_only_weights_in_16_bits_are_brought_into_a_format(
    changes: dict[str, object], dtype: str, words: str
) -> None:
    """vLLM and SGLang end at --quantization beside a checkpoint that is quantised otherwise."""
    more = {"num_experts_per_tok": 2, "moe_intermediate_size": 4096} if len(changes) > 1 else {}
    request = WorkloadRequest(gpu="h100", dtype=dtype, engine="vllm", tensor_parallel=8)
    found = choose_latency(request, TARGET.replace(**changes, **more))[0]
    assert found.profile["quantise"] == words


@pytest.mark.parametrize(
    ("device", "dtype", "line"),
    [
        (
            "h100",
            "float32",
            "the profile holds no passes in float32; it has bfloat16, float8_e4m3fn",
        ),
        (
            "h100",
            "q8_0",
            "q8_0 is priced on a CPU only, not on h100-sxm5-80gb; --draft-dtype float16",
        ),
        ("h100", "int3", "unknown dtype 'int3'; use one of"),
        ("a100", "fp8", "the profile holds no passes in float8_e4m3fn; it has bfloat16"),
        ("rtx-3090", "fp8", "does not compute in float8_e4m3fn; use one of"),
    ],
)
def test_what_nobody_measured_is_refused(device: str, dtype: str, line: str) -> None:
    asked = ("estimate", "--target", "llama-3.1-8b", "--draft", "eagle3", "--gpu", device)
    assert line in refused(*asked, "--draft-dtype", dtype)


def test_estimate_prices_a_draft_with_weights_in_4_bits() -> None:
    asked = ("--target", "llama-3.1-8b", "--gpu", "h100", "--engine", "sglang", "--gamma", "4")

    def found(*more: str) -> dict:
        (entry,) = last_json(call("estimate", *asked, *more, "--json"))["drafts"]
        return entry

    wide, narrow = (
        found("--draft", "llama-3.2-1b", *each) for each in ((), ("--draft-dtype=int4",))
    )
    # of the layers' GEMMs 0.52 of 2 bytes, at 65 % of the bandwidth; head and attention stay
    assert 0.52 / 2 / 0.65 < narrow["draft_s"]["value"] / wide["draft_s"]["value"] < 0.75
    assert narrow["draft"] == "llama-3.2-1b in int4"
    assert any("0.52 bytes a weight" in note for note in narrow["notes"])
    spread = [each["draft_s"]["std"] / each["draft_s"]["value"] for each in (wide, narrow)]
    assert spread[0] < spread[1]
    head = ("--draft", "eagle3", "--draft-dtype", "int4")
    assert "independent drafts on a GPU" in refused("estimate", *asked, *head)
    one = ("--draft", "llama-3.2-1b", "--draft-dtype", "int4")
    assert "in llama.cpp" in refused("estimate", *asked[:4], "--engine", "llama.cpp", *one)
    for command in (("search",), ("estimate", "--draft", "llama-3.2-1b")):
        given = ("--draft-dtype", "int4,bfloat16")
        assert "--draft-dtype int4" in refused(*command, *asked[:4], *given)
