"""gamma by batch size: best where it pays, 0 where drafting nothing is faster, and what an idle
draft costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from archsearch.acceptance.estimator import GivenAcceptance
from archsearch.architecture.architecture import Architecture
from archsearch.drafters.registry import as_drafter
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.hardware.identify import resolve_device
from archsearch.latency.draft_passes import LatencyOfRounds
from archsearch.pipeline.latency import choose_latency
from archsearch.pipeline.schedule import (
    ADAPTING_COSTS,
    _adaptive,
    adaptive_speedup,
    schedule_points,
    speedup_when_off,
)
from archsearch.report.terminal.run import Adaptive
from archsearch.schedule import GammaSchedule, schedule_from_points
from archsearch.search.objective import Scorer
from archsearch.speedup import tau
from archsearch.workload import Workload, WorkloadRequest

TARGET = Architecture(4096, 11008, 32, 32, 32, 128, 32000)
DRAFT = Architecture(1024, 2816, 2, 8, 8, 128, 32000)
ALPHA = Estimate(0.8, 0.02, "prior")
TAUS = {gamma: Estimate(tau(0.8, gamma), 0.02, "prior") for gamma in range(1, 9)}


@dataclass
class Made(LatencyOfRounds):
    """10 ms a target pass + `token_s` a token; 0.5 ms a draft pass; 1 ms a round; `idle_pass_s`
    where nothing is drafted."""

    token_s: float = 0.1e-3
    idle_pass_s: float = 0.0

    def decode_s(self, target, workload):  # noqa: ANN001, ANN201
        return self.verify_s(target, workload, 0)

    def verify_s(self, target, workload, gamma):  # noqa: ANN001, ANN201
        return Estimate(10e-3 + self.token_s * workload.batch_size * (gamma + 1), 0.0, "modelled")

    def draft_s(self, draft, workload, gamma):  # noqa: ANN001, ANN201
        return Estimate(0.5e-3 * gamma, 0.0, "modelled")

    def added_s(self, target, workload, gamma):  # noqa: ANN001, ANN201
        return Estimate(1e-3, 0.0, "measured")

    def idle_draft_s(self, draft, workload):  # noqa: ANN001, ANN201
        return Estimate(self.idle_pass_s, 0.1 * self.idle_pass_s, "modelled")


def points(latency: Made, batches: tuple[int, ...] = (256, 1, 16), device: str = "h100"):  # noqa: ANN201
    scorer = Scorer(TARGET, Workload(context_len=64), latency, GivenAcceptance(0.8))
    return schedule_points(scorer, DRAFT, ALPHA, TAUS, resolve_device(device), batches)


def test_gamma_falls_with_the_batch_and_ends_at_zero() -> None:
    found = points(Made(token_s=1e-3))
    assert [point.batch_size for point in found] == [1, 16, 256]
    gammas = [point.gamma for point in found]
    assert gammas[0] > gammas[-1] == 0 and gammas == sorted(gammas, reverse=True)
    first, last = found[0], found[-1]
    assert (
        first.speedup == max(first.by_gamma.values(), key=lambda value: value.value)
        and first.tau == TAUS[first.gamma]
    )
    assert last.speedup.value == last.tau.value == 1.0 and all(
        value.value < 1 for value in last.by_gamma.values()
    )
    assert set(last.by_gamma) == set(range(1, 9))


def test_an_idle_draft_makes_off_slower_than_no_draft() -> None:
    off = points(Made(token_s=1e-3, idle_pass_s=2e-3))[-1]
    alone = 10e-3 + 256e-3
    assert (
        off.gamma == 0
        and off.speedup.value == pytest.approx(alone / (alone + 2e-3))
        and off.speedup.std > 0
    )
    # Dear enough, it makes drafting the better way to lose.
    assert points(Made(token_s=1e-3, idle_pass_s=1.0))[-1].gamma > 0


def test_std_of_off_follows_the_idle_pass() -> None:
    scorer = Scorer(TARGET, Workload(), Made(idle_pass_s=2e-3), GivenAcceptance(0.8))
    off, step = speedup_when_off(scorer, DRAFT), 1e-7
    moved = speedup_when_off(scorer.with_latency(replace(Made(), idle_pass_s=2e-3 + step)), DRAFT)
    assert off.std == pytest.approx(abs(moved.value - off.value) / step * 0.2e-3, rel=1e-3)


def test_batches_that_do_not_fit_end_the_schedule() -> None:
    found = points(Made(), (1, 64, 10**7))
    assert [point.batch_size for point in found] == [1, 64]
    with pytest.raises(
        ArchsearchError, match="do not fit .* even at batch size 10000000; lower --context"
    ):
        points(Made(), (10**7,))


def test_adaptive_verification_loses_a_little_where_rows_are_free_and_gains_under_load() -> None:
    """Against the same gamma for all (vLLM pull request 52362: -5 to -8 % at 4 to 32 requests, +70 %
    at 256)."""
    found = {}
    for batch, token_s in ((1, 0.0), (256, 0.3e-3)):
        scorer = Scorer(TARGET, Workload(batch, 64), Made(token_s), GivenAcceptance(0.7))
        taus = {7: Estimate(tau(0.7, 7), 0.0, "given")}
        fixed = scorer.measured(DRAFT, Estimate(0.7, 0.0, "given"), taus, gammas=[7]).speedup
        found[batch] = adaptive_speedup(scorer, DRAFT, taus[7], 7).value / fixed.value - 1.0
    assert found[1] == pytest.approx(-ADAPTING_COSTS[0], abs=0.01)
    assert found[256] > 0.5


def adaptive(*gammas: int, **asked: Any) -> Adaptive | None:
    """What `schedule` says of adaptive verification in vLLM on an H100, under what is `asked`."""
    request = WorkloadRequest(gpu="h100", engine="vllm", **asked)
    source, work = choose_latency(request, TARGET)
    scorer = Scorer(TARGET, work, source.latency, GivenAcceptance(0.8)).with_gammas(gammas)
    found = schedule_points(scorer, DRAFT, ALPHA, TAUS, source.device, (1, 64))
    ranges = schedule_from_points([(point.batch_size, point.gamma) for point in found])
    about: Any = SimpleNamespace(engine="vllm", scorer=scorer, drafter=as_drafter(DRAFT))
    return _adaptive(about, DRAFT, TAUS, GammaSchedule(ranges, tuple(found), "vllm", ""))


def test_adaptive_verification_is_offered_at_the_gammas_that_the_table_was_priced_at() -> None:
    """Also where tau is known of others: the doubt of a gamma is that of the table."""
    found = adaptive(1, 8)
    assert found is not None and found.gamma in (1, 8)
    assert [point.batch_size for point in found.points] == [1, 64]
    assert "Use it, since the table has been seen to collapse under load" in found.words
    named = f'"num_speculative_tokens": {found.gamma} and "enable_adaptive_verification": true'
    assert named in found.words


@pytest.mark.parametrize(
    "asked",
    [
        {"engine_version": "0.31.0"},
        {"engine_options": ("VLLM_USE_V2_MODEL_RUNNER=0",)},
        {"engine_options": ("enforce_eager=1",)},
    ],
    ids=["older", "first-runner", "no-graphs"],
)
def test_what_vllm_refuses_at_start_is_not_advised(asked: dict[str, Any]) -> None:
    assert adaptive(4, **asked) is None
