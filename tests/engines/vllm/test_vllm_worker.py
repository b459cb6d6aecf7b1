"""The vLLM worker's own arithmetic, without vLLM: rounds, the check against counters, plain torch
in place of kernels."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from archsearch.engines.engine import EngineSettings
from archsearch.engines.vllm.engine import WORKER, VllmEngine
from tests.doubles.worker_modules import worker_modules


@pytest.fixture(scope="module")
def worker() -> Iterator[SimpleNamespace]:
    """The modules of the worker's folder, by name."""
    with worker_modules(WORKER) as modules:
        yield modules


def _request(
    worker: SimpleNamespace, handed: list[tuple[int, int]], limit: int = 10, stopped: bool = False
):
    """A request of (draft tokens, tokens written) by step; the last one `stopped`."""
    request = worker.counting.Request("p", 4, limit, started=1.0)
    for index, (drafts, written) in enumerate(handed):
        request.hand_over(
            [7] * written, drafts, False, stopped and index == len(handed) - 1, 2.0 + index
        )
    return request


# --------------------------------------------------------------------------------------------------
# made-up weights


def test_a_made_up_eagle_head_keeps_its_own_rows(
    worker: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM shares the target's head with one whose file brought none, and a made-up one has no
    file."""

    class SupportsEagleBase:
        has_own_lm_head = False

    interfaces = SimpleNamespace(SupportsEagleBase=SupportsEagleBase)
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.models"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.model_executor.models.interfaces", interfaces)  # type: ignore[arg-type]
    keep = worker.model_config.keep_own_head
    for family, made_up, own in (
        ("eagle3", False, False),
        ("dflash", True, False),  # it shares by design
        ("peagle", True, True),
    ):
        keep({"family": family, "dummy_weights": made_up})
        assert SupportsEagleBase.has_own_lm_head == own


# --------------------------------------------------------------------------------------------------
# rounds


def test_a_round_is_whole_when_gamma_and_one_tokens_had_room(worker: SimpleNamespace) -> None:
    # 1 by the prompt's step, then 9 to go: 4 + 2 leave 3, too few for gamma 3 + 1, though that
    # round wrote 1 only
    request = _request(worker, [(0, 1), (3, 4), (3, 2), (3, 1), (3, 2)])
    assert request.whole == [(3, 4), (3, 2)] and request.cut == [(3, 1), (3, 2)]


def test_a_round_that_fills_the_limit_exactly_is_whole(worker: SimpleNamespace) -> None:
    assert _request(worker, [(0, 1), (3, 4)], limit=5).whole == [(3, 4)]


def test_the_round_with_the_end_token_is_cut(worker: SimpleNamespace) -> None:
    request = _request(worker, [(0, 1), (3, 4), (3, 2)], limit=100, stopped=True)
    assert request.whole == [(3, 4)] and request.cut == [(3, 2)]


def test_a_result_counts_whole_rounds_and_times_all(worker: SimpleNamespace) -> None:
    result = _request(worker, [(0, 1), (3, 4), (3, 1), (3, 2), (3, 2)]).result(3)
    assert result["round_lengths"] == (4, 1, 2) and result["rounds"] == 3 and result["drafted"] == 9
    assert result["accepted_by_position"] == (2, 1, 1)
    assert len(result["token_ids"]) == 10 and result["decode_tokens"] == 9
    assert (result["seconds"], result["first_s"], result["decode_seconds"]) == (5.0, 1.0, 4.0)
    assert result["gaps_s"] == (1.0,) * 4


def test_rounds_of_a_schedule_draft_what_their_step_drafted(worker: SimpleNamespace) -> None:
    result = _request(worker, [(0, 1), (3, 4), (1, 2), (0, 1)], limit=100).result(3)
    assert (
        result["rounds"] == 2
        and result["drafted"] == 4
        and result["accepted_by_position"] == (2, 1, 1)
    )


# --------------------------------------------------------------------------------------------------
# counters


def test_counters_that_fit_are_no_disagreement(worker: SimpleNamespace) -> None:
    request = _request(worker, [(0, 1), (3, 4), (3, 1)], limit=100)
    assert (
        worker.counting.disagreement([request], worker.counting.Counters(2, 6, [1, 1, 1])) is None
    )


@pytest.mark.parametrize(
    "counted", [(1, 6, [1, 1, 1]), (2, 5, [1, 1, 1]), (2, 6, [2, 1, 1]), (2, 6, [1, 1, 0])]
)
def test_counters_that_do_not_fit_are_told(
    worker: SimpleNamespace, counted: tuple[int, int, list[int]]
) -> None:
    request = _request(worker, [(0, 1), (3, 4), (3, 1)], limit=100)
    assert "were seen" in worker.counting.disagreement(
        [request], worker.counting.Counters(*counted)
    )


@pytest.mark.parametrize(
    ("accepted", "fits"),
    [([2, 1, 1], True), ([2, 2, 2], True), ([1, 1, 1], False), ([3, 2, 2], False)],
)
def test_a_cut_round_may_have_accepted_more_than_it_wrote(
    worker: SimpleNamespace, accepted: list[int], fits: bool
) -> None:
    request = _request(worker, [(0, 1), (3, 4), (3, 2)], limit=7)
    assert request.cut == [(3, 2)]
    assert (
        worker.counting.disagreement([request], worker.counting.Counters(2, 6, accepted)) is None
    ) == fits


def test_placeholders_count_as_rounds_of_the_engine_only(worker: SimpleNamespace) -> None:
    request = worker.counting.Request("p", 1, 10)
    request.hand_over([7], 3, True, False, 1.0)
    assert (
        not request.whole
        and worker.counting.disagreement([request], worker.counting.Counters(1, 3, [0, 0, 0]))
        is None
    )


def test_counters_subtract(worker: SimpleNamespace) -> None:
    assert worker.counting.Counters(5, 10, [4, 2]).minus(
        worker.counting.Counters(2, 4, [1])
    ) == worker.counting.Counters(3, 6, [3, 2])


# --------------------------------------------------------------------------------------------------
# plain torch


def test_values_are_repeated_for_each_draft_token(worker: SimpleNamespace) -> None:
    output = torch.full((4,), -1.0)
    worker.cpu_build.expand_values(
        output, torch.tensor([0.7, 0.0, 1.3]), torch.tensor([1, 3, 4], dtype=torch.int32), 0, 1, 128
    )
    assert output.tolist() == pytest.approx([0.7, 1.0, 1.0, 1.3])


def test_requests_without_draft_tokens_are_left_out(worker: SimpleNamespace) -> None:
    output = torch.zeros(2, dtype=torch.int32)
    worker.cpu_build.expand_values(
        output, torch.tensor([5, 6, 7], dtype=torch.int32), torch.tensor([1, 1, 2]), 0, 0
    )
    assert output.tolist() == [5, 7]


def test_an_expansion_through_integers_is_found_out(worker: SimpleNamespace) -> None:
    def through_integers(
        output: Tensor, values: Tensor, cu: Tensor, old: float, new: float
    ) -> None:
        worker.cpu_build.expand_values(
            output.to(torch.int64), values.to(torch.int64), cu, old, new
        )  # the copy is lost

    def truncated(output: Tensor, values: Tensor, cu: Tensor, old: float, new: float) -> None:
        worker.cpu_build.expand_values(output, values.to(torch.int64), cu, old, new)

    assert worker.cpu_build.expand_works(worker.cpu_build.expand_values)
    assert not worker.cpu_build.expand_works(
        through_integers
    ) and not worker.cpu_build.expand_works(truncated)


def _by_chance(
    worker: SimpleNamespace, uniform: list[float], drafts: list[int], mine: Tensor | None = None
) -> list[list[int]]:
    """Two requests, of 2 and 1 draft tokens, rates 0.5 and 0.5; the target says 90, 91, 92 and the
    bonus is 80, 81."""
    output = torch.full((2, 3), -1, dtype=torch.int32)
    worker.cpu_build.accept_by_chance(
        output,
        torch.tensor([2, 3]),
        torch.tensor(drafts),
        torch.tensor([90, 91, 92]),
        torch.tensor([[80], [81]]),
        torch.tensor(uniform),
        torch.tensor([0.5, 0.5]),
        mine,
    )
    return output.tolist()


def test_chance_accepts_up_to_the_first_refusal(worker: SimpleNamespace) -> None:
    assert _by_chance(worker, [0.1, 0.2, 0.9], [1, 2, 3]) == [[1, 2, 80], [92, -1, -1]]
    assert _by_chance(worker, [0.1, 0.7, 0.0], [1, 2, 3]) == [[1, 91, -1], [3, 81, -1]]
    assert _by_chance(worker, [0.5, 0.0, 0.0], [1, 2, 3])[0] == [90, -1, -1]


def test_chance_refuses_padding_and_leaves_others_alone(worker: SimpleNamespace) -> None:
    assert _by_chance(worker, [0.0, 0.0, 0.0], [-1, 2, 3])[0] == [90, -1, -1]
    assert _by_chance(worker, [0.0, 0.0, 0.0], [1, 2, 3], torch.tensor([False, True])) == [
        [-1, -1, -1],
        [3, 81, -1],
    ]


def test_without_chance_the_engines_own_kernels_run(worker: SimpleNamespace) -> None:
    seen: list[tuple[object, ...]] = []
    for names, count in ((worker.cpu_build.GREEDY, 7), (worker.cpu_build.RANDOM, 11)):
        worker.cpu_build.by_chance(lambda *args: seen.append(args), names)(*range(count))
    assert seen == [tuple(range(7)), tuple(range(11))]


def test_chance_accepts_at_the_asked_rates(worker: SimpleNamespace) -> None:
    rounds, rates = 4000, torch.tensor([0.8, 0.5, 0.25])  # conditional
    generator = torch.Generator().manual_seed(1)
    output = torch.full((rounds, 4), -1, dtype=torch.int32)
    worker.cpu_build.by_chance(lambda *args: None, worker.cpu_build.GREEDY)(
        output,
        torch.arange(3, 3 * rounds + 1, 3),
        torch.arange(3 * rounds),
        torch.zeros(3 * rounds, dtype=torch.int64),
        torch.zeros(rounds, 1, dtype=torch.int64),
        None,
        3,
        torch.rand(3 * rounds, generator=generator, dtype=torch.float64),
        rates,
        True,
    )
    lengths = (output >= 0).sum(1)
    for position, expected in enumerate([0.8, 0.4, 0.1]):
        share = float((lengths - 1 > position).float().mean())
        assert abs(share - expected) < 4 * (expected * (1 - expected) / rounds) ** 0.5


def test_sampling_with_a_draft_is_refused_where_the_mend_did_not_take(
    worker: SimpleNamespace,
) -> None:
    running = worker.vllm_worker.Worker()
    running.gamma, running.samples_rightly = 3, False
    with pytest.raises(worker.loop.UserError, match="uninitialised memory .* use temperature 0"):
        running.generate({"prompts": [], "max_new_tokens": 1, "temperature": 0.7, "seed": 0})


# --------------------------------------------------------------------------------------------------
# configs, errors


def test_absent_metrics_are_named(worker: SimpleNamespace) -> None:
    running = worker.vllm_worker.Worker()
    some = SimpleNamespace(name="vllm:spec_decode_num_drafts", value=3)
    running.llm = SimpleNamespace(get_metrics=lambda: [some])
    with pytest.raises(
        worker.loop.Failed, match="does not tell vllm:spec_decode_num_draft_tokens, .*_per_pos"
    ):
        running._counters()


def test_cache_size_and_end_tokens_come_from_the_config(worker: SimpleNamespace) -> None:
    folder = worker.model_config
    config = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 128,
        "eos_token_id": 2,
    }
    assert folder.cache_bytes_per_token([config], 2) == 2 * 2 * 2 * 32 * 2
    wide = {"text_config": {**config, "head_dim": 64, "num_hidden_layers": 3}}
    assert folder.cache_bytes_per_token([config, wide], 4) == 5 * 2 * 2 * 64 * 4
    assert folder.cache_gib([config], "bfloat16", 1, 100) == 1
    assert (
        folder.cache_gib([config], "bfloat16", 2**15, 100) == 3
    )  # 2 GiB and a tenth: 100 tokens take a block of 128
    ends = worker.loop.end_tokens
    assert ends({}, config) == [2] and ends({"eos_token_id": [3, 4]}, config) == [3, 4]
    assert ends({}, folder.text_config({"text_config": config})) == [2] and ends({}, {}) == []


def test_prompts_do_not_share_a_seed(worker: SimpleNamespace) -> None:
    seeds = {
        worker.vllm_worker.prompt_seed(seed, prompt)
        for seed in range(3)
        for prompt in ("a", "b", "c")
    }
    assert len(seeds) == 9 and all(0 <= seed < 2**31 for seed in seeds)


def test_errors_of_vllm_become_a_line(worker: SimpleNamespace) -> None:
    loop, telling = worker.loop, worker.installed_vllm.telling
    heading = (
        "1 validation error for SpeculativeConfig\n  Value error, vocabularies differ."
        " [type=value_error, input_value=1]\n"
    )

    def raising(error: Exception):
        def call(request: dict) -> dict:
            raise error

        return call

    with pytest.raises(loop.UserError, match="^vLLM refuses: vocabularies differ.$"):
        telling(raising(ValueError(heading)), starting=True)({})
    with pytest.raises(ValueError):
        telling(raising(ValueError("ours")))({})
    with pytest.raises(MemoryError, match="not enough memory"):
        telling(
            raising(RuntimeError("DefaultCPUAllocator: not enough memory: you tried")),
            starting=True,
        )({})
    with pytest.raises(MemoryError):
        telling(
            raising(ValueError("2.0 GiB KV cache is needed, which is larger than the available")),
            starting=True,
        )({})


def test_an_old_or_absent_vllm_names_what_is_needed(
    worker: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = worker.loop
    monkeypatch.setattr(worker.installed_vllm, "installed_version", lambda: "0.9.2")
    with pytest.raises(loop.UserError, match="0.9.2 is too old: 0.32 or newer is needed"):
        worker.installed_vllm.checked_version()
    for version in ("0.32.0", "0.33.1+cpu", "1.0rc1"):
        monkeypatch.setattr(
            worker.installed_vllm, "installed_version", lambda version=version: version
        )
        assert worker.installed_vllm.checked_version() == version


def test_a_package_that_does_not_load_is_named(
    worker: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "brokenvision.py").write_text("raise RuntimeError('operator nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        worker.loop.UserError,
        match="brokenvision .*operator nms.*pip uninstall -y absent brokenvision",
    ):
        worker.installed_vllm.check_loads("absent", "brokenvision")
    worker.installed_vllm.check_loads("absent", "json")


def test_even_chances_meet_the_asked_rates_soon(worker: SimpleNamespace) -> None:
    rates, rounds = (0.8, 0.5, 0.2), 60
    conditional = torch.tensor([0.8, 0.5 / 0.8, 0.2 / 0.5])
    chances = worker.cpu_build.EvenChances()
    chances.begin(3)
    drafted = torch.arange(3).repeat(2, 1).flatten()
    counts = [0, 0, 0]
    for _ in range(rounds // 2):  # two requests of three draft tokens a call
        uniform = chances.like(
            torch.rand(6, dtype=torch.float64), torch.tensor([3, 6]), conditional
        )
        output = torch.full((2, 4), -1)
        worker.cpu_build.accept_by_chance(
            output,
            torch.tensor([3, 6]),
            drafted,
            torch.full((6,), 9),
            torch.tensor([8, 8]),
            uniform,
            conditional,
            None,
        )
        for row in output.tolist():
            accepted = next(i for i, token in enumerate(row) if token in (8, 9))
            for position in range(accepted):
                counts[position] += 1
    # Independent draws would be off by 0.06 on average here.
    assert all(
        abs(count / rounds - rate) <= 0.035 for count, rate in zip(counts, rates, strict=True)
    )
    first = [
        chances.like(torch.rand(3), torch.tensor([3]), conditional).tolist()
        for _ in range(2)
        if chances.begin(5) is None
    ]
    assert first[0] == pytest.approx(first[1])


# --------------------------------------------------------------------------------------------------
# families


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (
            {"draft": "D"},
            {"method": "draft_model", "model": "D", "draft_sample_method": "probabilistic"},
        ),
        (
            {"draft": "D", "family": "eagle3"},
            {"method": "eagle3", "model": "D", "draft_sample_method": "probabilistic"},
        ),
        ({"draft": "D", "family": "medusa"}, {"method": "medusa", "model": "D"}),
        (
            {"draft": "D", "family": "peagle"},
            {"method": "eagle3", "model": "D", "parallel_drafting": True},
        ),
        (
            {"draft": "D", "family": "pard"},
            {"method": "draft_model", "model": "D", "parallel_drafting": True},
        ),
        ({"draft": "D", "family": "dflash"}, {"method": "dflash", "model": "D"}),
        (
            {"lookup": [2, 4], "family": "ngram"},
            {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4},
        ),
    ],
)
def test_every_family_has_its_method(worker: SimpleNamespace, ask: dict, expected: dict) -> None:
    config = worker.vllm_worker.speculative_config({"gamma": 3, "tensor_parallel": 1, **ask})
    ranks = {} if "lookup" in ask else {"draft_tensor_parallel_size": 1}
    assert config == {"num_speculative_tokens": 3, **ranks, **expected}


def test_a_draft_is_quantised_where_that_was_asked_for(worker: SimpleNamespace) -> None:
    fp8 = "float8_e4m3fn"
    asked = VllmEngine(EngineSettings(dtype=fp8, draft_dtype=fp8)).request()
    assert (asked["dtype"], asked["quantization"]) == ("bfloat16", "fp8_per_tensor")
    draft = {"gamma": 3, "draft": "D", "family": "eagle3"}
    config = worker.vllm_worker.speculative_config({**draft, **asked})
    assert config["quantization"] == "fp8_per_tensor"
    plain = VllmEngine(EngineSettings(draft_dtype="bfloat16")).request()
    assert not {"dtype", "quantization"} & set(plain)
    assert "quantization" not in worker.vllm_worker.speculative_config({**draft, **plain})


def test_medusa_heads_take_no_cache(worker: SimpleNamespace) -> None:
    config = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 128,
    }
    heads = {
        "model_type": "medusa",
        "hidden_size": 128,
        "vocab_size": 100,
        "num_heads": 3,
        "num_hidden_layers": 1,
    }
    folder = worker.model_config
    assert folder.cache_bytes_per_token([config, heads], 2) == folder.cache_bytes_per_token(
        [config], 2
    )


def test_a_proposal_in_one_go_is_one_pass(worker: SimpleNamespace) -> None:
    runner = SimpleNamespace(
        _model_forward=lambda: None,
        model=SimpleNamespace(compute_logits=lambda: None),
        drafter=SimpleNamespace(propose=lambda: [1]),
    )
    clock = worker.counting.PassClock()
    clock.attach(runner)
    assert clock.on and runner.drafter.propose() == [1]
    assert len(clock.draft_s) == len(clock.draft_tokens) == 1
