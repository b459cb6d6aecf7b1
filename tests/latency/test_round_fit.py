"""What an engine adds to its rounds, recovered from made-up rounds with noise: host-bound,
GPU-bound, and only one of the two."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from archsearch.engine_rounds import COSTS, EngineRounds, engine_rounds
from archsearch.estimate import Estimate
from archsearch.latency.drafted import NOTHING_S
from archsearch.latency.round_fit import (
    RoundFit,
    RoundRow,
    carried_over,
    fit_rounds,
    prior_covariance,
)
from archsearch.latency.rounds import Passes, host_s, plain_step, round_time

NOISE = 0.003
LAYERS, GAMMAS = (2, 8, 24), (1, 6)


def prior(name: str = "vllm", version: str = "0.20.0") -> EngineRounds:
    found = engine_rounds(name, version)
    assert found is not None
    return found


def machine(base: EngineRounds, **changes: float) -> EngineRounds:
    """The engine on another machine: costs in ms that differ from what is published."""
    costs = {
        f"{name}_s": Estimate(1e-3 * value, 0.0, "measured") for name, value in changes.items()
    }
    return replace(base, costs=replace(base.costs, **costs).certain())


def passes(
    layers: int, gamma: int, verify_ms: float, layer_ms: float = 0.03, kernel_std: float = 0.05
) -> Passes:
    """Modelled kernels, with the std that a model gives them."""
    step = 1e-3 * (0.25 + layer_ms * layers)
    verify = 1e-3 * verify_ms
    draft = Estimate(step, kernel_std * step, "modelled")
    return Passes(
        Estimate(verify, kernel_std * verify, "modelled"), draft, draft, gamma, 1, layers, 32
    )


def measured(
    truth: EngineRounds,
    made_of: Sequence[Passes],
    seed: int = 0,
    target: float = 1.0,
    draft: float = 1.0,
) -> list[RoundRow]:
    """Rounds of `truth`, whose kernels really take `target` and `draft` times what was modelled."""
    rng, rows = random.Random(seed), []
    for case in made_of:
        real = replace(
            case,
            verify_s=Estimate(target * case.verify_s.value, 0.0, "measured"),
            first_s=Estimate(draft * case.first_s.value, 0.0, "measured"),
            later_s=Estimate(draft * case.later_s.value, 0.0, "measured"),
        )
        seconds = round_time(truth.costs, real).round_s.value
        noisy = seconds * (1.0 + rng.gauss(0.0, NOISE))
        rows.append(
            RoundRow(
                Estimate(noisy, NOISE * seconds, "measured"), case, f"{case.draft_layers} layers"
            )
        )
    return rows


def plain(truth: EngineRounds, verify_ms: float, target: float = 1.0) -> list[RoundRow]:
    kernels = Estimate(1e-3 * verify_ms, 0.05e-3 * verify_ms, "modelled")
    real = Estimate(target * kernels.value, 0.0, "measured")
    seconds = plain_step(truth, real, 32, 1).value
    passes = Passes(kernels, NOTHING_S, NOTHING_S, 0, 1, 0, 32)
    return [RoundRow(Estimate(seconds, NOISE * seconds, "measured"), passes)]


def value(fit: RoundFit | EngineRounds, name: str) -> float:
    rounds = fit.rounds if isinstance(fit, RoundFit) else fit
    return 1e3 * getattr(rounds.costs, f"{name}_s").value


GRID = [(layers, gamma) for layers in LAYERS for gamma in GAMMAS]
SLOW = {"round": 0.9, "token": 0.25, "host_round": 3.4, "host_token": 0.65, "host_layer": 0.55}
FAST = {"round": 0.5, "token": 0.05, "host_round": 1.2, "host_token": 0.6, "host_layer": 0.2}


@pytest.mark.parametrize("truth", [SLOW, FAST], ids=["slow machine", "fast machine"])
@pytest.mark.parametrize("seed", range(3))
def test_both_sides_are_recovered(truth: dict[str, float], seed: int) -> None:
    """A 7B target: the deep drafts are bound by the host, the shallow ones at gamma 1 by the
    GPU."""
    base, real = prior(), machine(prior(), **truth)
    made_of = [passes(layers, gamma, 6.0) for layers, gamma in GRID]
    bounds = {round_time(real.costs, case).bound for case in made_of}
    assert bounds == {"gpu", "host"}
    fit = fit_rounds(base, measured(real, made_of, seed) + plain(real, 6.0))
    assert value(fit, "host_layer") == pytest.approx(truth["host_layer"], rel=0.08)
    assert "host_layer" in fit.identified and fit.rounds.measured == len(GRID)
    assert max(abs(error) for error in fit.errors) < 0.02
    # Rounds that it has not seen: other depths and gammas, nearer than the prior and inside its
    # band.
    unseen = [passes(layers, gamma, 6.0) for layers in (4, 16) for gamma in (2, 4)]
    for case in unseen:
        real_s = round_time(real.costs, case).round_s.value
        found, before = (round_time(rounds.costs, case).round_s for rounds in (fit.rounds, base))
        assert found.value == pytest.approx(real_s, rel=0.05)
        assert abs(found.value - real_s) < 3 * found.std and found.std < before.std


def test_a_host_that_never_decides_stays_at_its_prior() -> None:
    """A large target: every round is the GPU's. The host keeps mean and std, the rest is found."""
    base = prior()
    real = machine(base, round=1.0, token=0.3)
    made_of = [passes(layers, gamma, 120.0, kernel_std=0.01) for layers, gamma in GRID]
    assert all(round_time(real.costs, case).bound == "gpu" for case in made_of)
    fit = fit_rounds(base, measured(real, made_of) + plain(real, 120.0))
    before = prior_covariance(base.costs)
    after = np.array(fit.rounds.costs.covariance)
    for number, name in enumerate(COSTS):
        if name.startswith("host"):
            assert value(fit, name) == pytest.approx(value(base, name), rel=1e-3)
            assert after[number, number] == pytest.approx(before[number, number], rel=1e-3)
            assert (
                getattr(fit.rounds.costs, f"{name}_s").source == "published"
                and name not in fit.identified
            )
    case = made_of[-1]
    assert host_s(fit.rounds.costs, case)[1] == pytest.approx(host_s(base.costs, case)[1], rel=1e-3)


def test_a_gpu_side_that_never_decides_stays_at_its_prior() -> None:
    """A tiny target and deep drafts: every round is the host's. What the GPU's side adds keeps mean
    and std."""
    base = prior()
    real = machine(base, host_round=2.0, host_token=0.6, host_layer=0.5)
    made_of = [passes(layers, gamma, 0.5) for layers in (8, 16, 24) for gamma in (2, 6)]
    assert all(round_time(real.costs, case).bound == "host" for case in made_of)
    fit = fit_rounds(base, measured(real, made_of))
    for name in ("round", "token", "sequence"):
        assert value(fit, name) == pytest.approx(value(base, name), rel=1e-3, abs=1e-6)
        assert getattr(fit.rounds.costs, f"{name}_s").std == pytest.approx(
            getattr(base.costs, f"{name}_s").std, rel=1e-3
        )
    assert value(fit, "host_layer") == pytest.approx(0.5, rel=0.05)
    assert (
        {"host_layer"} <= set(fit.identified) <= {name for name in COSTS if name.startswith("host")}
    )


@pytest.mark.parametrize("scale", [0.4, 2.0])
def test_the_wrong_side_of_the_maximum_is_left(scale: float) -> None:
    """The prior's host would decide nothing (or everything); the machine's is far from it and does
    (or does not)."""
    base = prior()
    host = {name: scale * value(base, name) for name in ("host_round", "host_token", "host_layer")}
    real = machine(base, **host)
    made_of = [passes(layers, gamma, 14.0) for layers, gamma in GRID]
    fit = fit_rounds(base, measured(real, made_of) + plain(real, 14.0))
    for case in made_of:
        assert round_time(fit.rounds.costs, case).round_s.value == pytest.approx(
            round_time(real.costs, case).round_s.value, rel=0.04
        )


def test_kernels_that_are_modelled_wrongly_are_not_taken_for_the_engine() -> None:
    """The target's kernels take 8 % more than modelled, the drafts' 6 % less: the plain step and
    the depths tell them apart."""
    base, real = prior(), machine(prior(), **FAST)
    made_of = [
        passes(layers, gamma, 25.0, layer_ms=0.08, kernel_std=0.08) for layers, gamma in GRID
    ]
    fit = fit_rounds(
        base, measured(real, made_of, target=1.08, draft=0.94) + plain(real, 25.0, target=1.08)
    )
    assert fit.kernels[""].value == pytest.approx(1.08, abs=0.015)
    assert value(fit, "round") == pytest.approx(FAST["round"], abs=0.35)
    assert all(abs(error) < 0.02 for error in fit.errors)


def test_serial_engines_and_full_graphs_fit_too() -> None:
    base = prior("transformers", "5.23.0")
    real = machine(base, round=2.0, host_token=0.3, host_layer=0.35, host_target_layer=0.4)
    made_of = [passes(layers, gamma, 6.0) for layers, gamma in GRID]
    fit = fit_rounds(base, measured(real, made_of) + plain(real, 6.0))
    assert value(fit, "host_layer") == pytest.approx(0.35, rel=0.1)
    graph = prior("tensorrt-llm", "1.3.0")
    real = machine(graph, round=0.8)
    fit = fit_rounds(graph, measured(real, made_of) + plain(real, 6.0))
    assert value(fit, "round") == pytest.approx(0.8, abs=0.25) and value(fit, "host_layer") == 0.0


def test_the_measured_host_is_surer_than_its_parts() -> None:
    """Only sums were measured: the parts' errors cancel in the sum, and the machine's doubt is gone
    from it."""
    base, real = prior(), machine(prior(), **SLOW)
    made_of = [passes(24, 6, 1.0), passes(24, 5, 1.0)]
    fit = fit_rounds(base, measured(real, made_of))
    std = host_s(fit.rounds.costs, made_of[0])[1]
    loose = [
        1.0 * fit.rounds.costs.host_round_s.std,
        6 * fit.rounds.costs.host_token_s.std,
        144 * fit.rounds.costs.host_layer_s.std,
    ]
    assert std < 0.02 * host_s(real.costs, made_of[0])[0] and 2.0 * std < math.hypot(*loose)
    assert fit.rounds.costs.rests_on == "measured"
    summary = fit.to_dict()
    assert (
        summary["rows"] == 2
        and summary["class"] == base.costs.name
        and set(summary["costs"]) == set(COSTS)
    )


def test_nothing_measured_is_nothing_to_fit() -> None:
    with pytest.raises(ValueError, match="no round was measured"):
        fit_rounds(prior(), [])


def test_launching_a_layer_is_carried_over_to_the_class_with_other_scheduling() -> None:
    sync, real = prior(), machine(prior(), **SLOW)
    fit = fit_rounds(
        sync,
        measured(real, [passes(layers, gamma, 6.0) for layers, gamma in GRID]) + plain(real, 6.0),
    )
    other = prior("vllm", "0.33.0")
    assert other.costs.name != sync.costs.name and other.costs.graph == sync.costs.graph
    found = carried_over(other, fit.rounds)
    assert value(found, "host_layer") == pytest.approx(0.55, rel=0.08)
    assert found.costs.round_s == other.costs.round_s and not found.costs.covariance
    assert carried_over(other, sync) is other  # nothing measured, nothing carried
