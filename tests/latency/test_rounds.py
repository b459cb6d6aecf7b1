"""The time of a round from its passes: overlapped and serial engines, the layers that are free, and
the doubt."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from archsearch.architecture.architecture import Architecture
from archsearch.engine_rounds import (
    BEYOND,
    HOSTS,
    MACHINE_STD,
    RoundCosts,
    engine_rounds,
    round_costs,
)
from archsearch.estimate import Estimate
from archsearch.hardware.identify import resolve_device
from archsearch.latency.constants import constants
from archsearch.latency.draft_passes import LatencyOfRounds
from archsearch.latency.roofline import RooflineLatency
from archsearch.latency.rounds import (
    Passes,
    free_layers,
    host_s,
    larger,
    plain_step,
    round_time,
    summed,
)
from archsearch.workload import Workload

TARGET = Architecture(4096, 14336, 32, 32, 8, 128, 128256)
DRAFT = Architecture(2048, 8192, 16, 32, 8, 64, 128256)


def ms(value: float, std: float = 0.0) -> Estimate:
    return Estimate(1e-3 * value, 1e-3 * std, "modelled")


def passes(
    layers: int = 12, gamma: int = 4, batch: int = 1, verify: float = 6.0, step: float = 0.5
) -> Passes:
    return Passes(ms(verify, 0.2), ms(step + 0.1, 0.02), ms(step, 0.02), gamma, batch, layers, 32)


NONE, PIECEWISE, FULL, SERIAL = map(
    round_costs, ("vllm-none-sync", "vllm-piecewise-async", "vllm-head-full", "transformers")
)


def test_a_longer_verification_never_lowers_what_a_slow_host_makes_of_a_round() -> None:
    rounds = [round_time(NONE, passes(24, verify=each)).round_s for each in range(4, 130, 2)]
    highs = [each.interval[1] for each in rounds]
    # a quantile is known to 1e-12, beyond the host's reach it is the GPU's alone
    assert all(later > 0.999 * before for before, later in zip(highs, highs[1:], strict=False))
    assert highs[0] > 1.5 * rounds[0].value and rounds[-1].high is None


@pytest.mark.parametrize("costs", [NONE, PIECEWISE, FULL], ids=lambda costs: costs.name)
@pytest.mark.parametrize("layers", [1, 8, 40])
def test_an_overlapped_round_takes_the_longer_of_gpu_and_host(
    costs: RoundCosts, layers: int
) -> None:
    case = passes(layers)
    gpu = (
        6.0
        + 0.6
        + 3 * 0.5
        + 1e3 * (costs.round_s.value + 4 * costs.token_s.value + costs.sequence_s.value)
    )
    host = 1e3 * (
        costs.host_round_s.value
        + 4 * (costs.host_token_s.value + layers * costs.host_layer_s.value)
    )
    time = round_time(costs, case)
    assert time.host_s is not None and 1e3 * time.host_s.value == pytest.approx(host)
    # the mean of the larger of two uncertain times: no less than either, at most 0.4 stds above
    # where they meet
    spread = math.hypot(1e3 * time.host_s.std, 2.0)
    assert max(gpu, host) <= 1e3 * time.round_s.value * (1 + 1e-9) <= max(gpu, host) + 0.4 * spread
    assert 1e3 * time.host_s.value == pytest.approx(host)
    assert time.bound == ("host" if host > gpu else "gpu")
    parts = time.draft_s.value + time.verify_s.value + time.overhead_s.value
    assert time.round_s.value == pytest.approx(parts), "what waits for the host is overhead"


def test_a_serial_round_takes_the_longer_of_gpu_and_host_in_every_pass() -> None:
    case = passes(
        layers=2, verify=30.0, step=5.0
    )  # the GPU is slower in every pass: nothing to wait for
    time = round_time(SERIAL, case)
    assert 1e3 * time.round_s.value == pytest.approx(
        30.0 + 5.1 + 3 * 5.0 + 1e3 * SERIAL.round_s.value + 4 * 0.0
    )
    assert time.bound == "gpu"
    deep = round_time(SERIAL, passes(layers=24))
    launch = 1e3 * (SERIAL.host_token_s.value + 24 * SERIAL.host_layer_s.value)
    target = 32e3 * SERIAL.host_target_layer_s.value
    assert 1e3 * deep.round_s.value == pytest.approx(
        target + 4 * launch + 1e3 * SERIAL.round_s.value
    )
    assert deep.bound == "host"


def test_a_pass_priced_without_graphs_is_the_hosts() -> None:
    """An eager pass takes the host's time already: the round waits no longer, and the host decides
    it all the same."""
    launch = 1e3 * (SERIAL.host_token_s.value + 24 * SERIAL.host_layer_s.value)
    case = replace(passes(layers=24, verify=40.0), first_s=ms(launch), later_s=ms(launch))
    time = round_time(SERIAL, case)
    assert time.bound == "host" and 1e3 * time.round_s.value == pytest.approx(
        40.0 + 4 * launch + 1e3 * SERIAL.round_s.value
    )


@pytest.mark.parametrize("costs", [NONE, PIECEWISE], ids=lambda costs: costs.name)
@pytest.mark.parametrize("gamma", [1, 3, 6])
def test_free_layers_are_the_depth_at_which_the_host_takes_over(
    costs: RoundCosts, gamma: int
) -> None:
    case = passes(gamma=gamma, verify=20.0)
    free = free_layers(costs, case)
    assert 0.0 < free < math.inf
    below, above = (replace(case, draft_layers=max(1, math.floor(free) + more)) for more in (0, 1))
    assert round_time(costs, below).bound == "gpu" and round_time(costs, above).bound == "host"


def test_a_draft_of_more_layers_idles_between_their_graphs_and_a_head_hardly() -> None:
    """The GPU waits for the next layer's graph: 28 layers' worth a token in piecewise graphs, none
    in one graph."""
    deep, flat = (passes(layers=layers, gamma=4, verify=20.0) for layers in (28, 1))
    for costs, gap in ((PIECEWISE, PIECEWISE.gap_s.value), (FULL, 0.0)):
        far, near = (round_time(costs.certain(), each).overhead_s for each in (deep, flat))
        assert far.value - near.value == pytest.approx(4 * 27 * gap)


def test_free_layers_at_the_ends() -> None:
    assert free_layers(FULL, passes()) == math.inf, "one graph: layers cost the host nothing"
    assert free_layers(NONE, passes(verify=0.1, step=0.05)) == 0.0, (
        "the host decides whatever the draft"
    )
    assert free_layers(SERIAL, passes()) == 0.0, "every layer costs the host's time or the GPU's"
    reduced = replace(passes(), draft_all_reduces=25)
    assert free_layers(NONE, reduced) < free_layers(NONE, passes()), (
        "the host launches the all-reduces too"
    )


def test_a_graph_holds_its_all_reduces() -> None:
    with_reduces = replace(passes(), draft_all_reduces=25)
    assert host_s(FULL, with_reduces) == host_s(FULL, passes())
    more = host_s(NONE, with_reduces)[0] - host_s(NONE, passes())[0]
    assert more == pytest.approx(4 * 25 * NONE.host_all_reduce_s.value)


def test_the_host_is_as_unsure_as_the_machine() -> None:
    host, std = host_s(NONE, passes(layers=24))
    assert std > MACHINE_STD * host


@pytest.mark.parametrize(
    ("first", "second"),
    [((10, 1), (10, 3)), ((10, 0.5), (12, 4)), ((10, 2), (2, 1)), ((3, 0.1), (9, 2))],
)
def test_the_doubt_of_the_larger_of_two_times(
    first: tuple[float, float], second: tuple[float, float]
) -> None:
    random.seed(0)
    drawn = [max(random.gauss(*first), random.gauss(*second)) for _ in range(60_000)]
    mean = sum(drawn) / len(drawn)
    std = math.sqrt(sum((value - mean) ** 2 for value in drawn) / len(drawn))
    found = larger(ms(*first), ms(*second))
    assert (found.value, found.std) == pytest.approx((1e-3 * mean, 1e-3 * std), rel=0.02)


def test_one_of_two_certain_times_has_no_doubt() -> None:
    found = larger(ms(3), ms(4))
    assert (found.value, found.std) == (pytest.approx(4e-3), 0.0)


def test_the_doubt_grows_beyond_the_largest_batch() -> None:
    inside, at, beyond = (
        round_time(FULL, replace(passes(verify=60.0), batch=batch)).overhead_s.std
        for batch in (1, FULL.largest_batch, 512)
    )
    assert inside < at < beyond
    own = math.hypot(FULL.round_s.std, 4 * FULL.token_s.std, 512 * FULL.sequence_s.std)
    assert beyond == pytest.approx(own * BEYOND)


def test_parts_that_follow_one_another_add_up() -> None:
    time = summed(ms(2, 0.3), ms(6, 0.4), ms(0))
    assert (time.round_s.value, time.round_s.std) == pytest.approx((8e-3, 0.5e-3))
    assert time.host_s is None and time.bound is None


def test_a_plain_step_takes_what_the_engine_adds_and_no_less_than_the_host() -> None:
    vllm, hugging = engine_rounds("vllm"), engine_rounds("transformers")
    assert vllm is not None and hugging is not None
    assert plain_step(vllm, ms(6, 0.1), 32, 1).value == pytest.approx(6e-3 + vllm.plain.at(1).value)
    launched = 32 * hugging.costs.host_target_layer_s.value
    assert (
        launched < plain_step(hugging, ms(6, 0.1), 32, 1).value < 1.1 * launched and launched > 6e-3
    )
    assert plain_step(hugging, ms(90, 0.1), 32, 1).value == pytest.approx(90e-3, rel=1e-3)


def test_a_pass_beyond_the_largest_graph_is_launched_layer_by_layer() -> None:
    within, unbound = (
        engine_rounds("vllm"),
        engine_rounds("vllm", options={"max_cudagraph_capture_size": "1024"}),
    )
    assert within is not None and unbound is not None and within.costs.largest_graph == 512
    step = ms(6, 0.1)
    assert plain_step(within, step, 32, 512) == plain_step(unbound, step, 32, 512)
    launched = 32 * within.costs.ungraphed_layer_s.value
    assert (
        plain_step(within, step, 32, 513).value
        > launched
        > plain_step(unbound, step, 32, 513).value
    )


def test_a_round_costs_a_sequence_no_less_than_a_plain_step() -> None:
    for engine, version in (
        ("vllm", "0.12.0"),
        ("vllm", "0.33.0"),
        ("sglang", "0.5.5"),
        ("sglang", None),
    ):
        rounds = engine_rounds(engine, version, drafter="feature_head")
        assert rounds is not None and rounds.costs.sequence_s.value >= rounds.plain.sequence_s.value


def test_a_host_scales_what_it_launches_and_says_how_sure_it_is() -> None:
    slow, usual, unsaid = (
        engine_rounds("vllm", "0.25.1", {"host": host} if host else {})
        for host in ("slow", "usual", "")
    )
    assert slow is not None and usual is not None and unsaid is not None
    times = [host_s(rounds.costs, passes(layers=24)) for rounds in (slow, usual, unsaid)]
    assert times[0][0] == pytest.approx(HOSTS["slow"][0] * times[1][0])
    assert times[1][0] == times[2][0]
    assert times[1][1] < times[2][1]
    remedied = slow.remedied()  # the advice is sized by the same host
    assert remedied is not None and remedied.options["host"] == "slow"


def test_the_interval_of_a_round_leans_where_the_host_decides() -> None:
    time = round_time(NONE, passes(layers=40))
    assert time.round_s.low is not None and time.round_s.high is not None
    random.seed(1)
    gpu = [
        random.gauss(1e3 * (time.draft_s.value + time.verify_s.value), 0.1) for _ in range(20_000)
    ]
    assert time.host_s is not None
    hosts = [
        random.lognormvariate(math.log(1e3 * time.host_s.value), time.host_s.relative_std)
        for _ in gpu
    ]
    drawn = sorted(max(pair) for pair in zip(gpu, hosts, strict=True))
    assert 1e3 * time.round_s.high == pytest.approx(drawn[19_000], rel=0.05)
    assert time.round_s.high - time.round_s.value > time.round_s.value - time.round_s.low


def latency(
    version: str | None = None, ranks: int = 1, engine: str = "vllm"
) -> tuple[LatencyOfRounds, Workload]:
    workload = Workload(1, 256, ranks, "bfloat16", "graph")
    rounds = engine_rounds(engine, version)
    return RooflineLatency(resolve_device("h100"), "bfloat16", "graph", engine, rounds), workload


def test_a_latency_answers_rounds_and_free_layers_of_its_engine() -> None:
    model, workload = latency("0.16.0")
    time = model.round(TARGET, DRAFT, workload, 3)
    free = model.free_layers(TARGET, DRAFT, workload, 3)
    assert free is not None and (free < DRAFT.num_hidden_layers) == (time.bound == "host")
    assert model.engine_version == "0.16.0"
    mended = model.with_rounds(engine_rounds("vllm", "0.30.0"))
    assert mended.engine_version == "0.30.0" and model.engine_version == "0.16.0"
    assert mended.round(TARGET, DRAFT, workload, 3).round_s.value < time.round_s.value
    assert mended.free_layers(TARGET, DRAFT, workload, 3) > free


def test_a_sharded_draft_pays_its_all_reduces() -> None:
    one, four = latency("0.16.0"), latency("0.16.0", ranks=4)
    found = [
        model.round_passes(TARGET, DRAFT, workload, 3, ms(6)) for model, workload in (one, four)
    ]
    assert [case.draft_all_reduces for case in found] == [0, 33]
    alone, workload = latency(ranks=4, engine="llama.cpp")
    assert alone.round_passes(TARGET, DRAFT, workload, 3, ms(6)).draft_all_reduces == 0, (
        "its draft runs on one device"
    )


def test_a_trimmed_heads_logits_cost_the_host_launches_of_their_own() -> None:
    costs = round_costs("vllm-head-serial")
    whole, trimmed = (
        replace(passes(1, gamma=5, step=0.2), scattered=each) for each in (False, True)
    )
    extra = round_time(costs, trimmed).round_s.value - round_time(costs, whole).round_s.value
    assert (
        extra == pytest.approx(5 * costs.host_scatter_s.value) and extra > 0
    )  # the host decides every pass there
    full = round_costs("vllm-head-full")
    assert round_time(full, trimmed) == round_time(full, whole)


@pytest.mark.parametrize(
    ("device", "waits_less"), [("h100", True), ("b200", True), ("a100", False)]
)
def test_ranks_wait_less_where_norms_are_in_the_all_reduce(device: str, waits_less: bool) -> None:
    model = RooflineLatency(
        resolve_device(device), "bfloat16", "graph", "vllm", engine_rounds("vllm", "0.16.0")
    )
    newer = model.with_rounds(engine_rounds("vllm", "0.30.0"))
    workload = Workload(1, 256, 4, "bfloat16", "graph")
    known = constants()["graph"]
    less = (2 * 32 + 2) * 3 / 4 * (known["sync_s"] - known["fused_sync_s"]) * waits_less
    one, other = (each.verify_s(TARGET, workload, 0).value for each in (model, newer))
    assert one - other == pytest.approx(less, abs=1e-9)
    assert (
        newer.with_rounds(engine_rounds("vllm", "0.16.0")).verify_s(TARGET, workload, 0).value
        == one
    )


def test_without_an_engine_nothing_is_told_apart() -> None:
    model = RooflineLatency(resolve_device("h100"), "bfloat16", "graph")
    workload = Workload(1, 256, 1, "bfloat16", "graph")
    time = model.round(TARGET, DRAFT, workload, 3)
    assert time.host_s is None and time.bound is None and model.engine_version is None
    assert model.free_layers(TARGET, DRAFT, workload, 3) is None


def test_drafting_nothing_is_as_unsure_as_what_the_engine_adds_to_it() -> None:
    latency = RooflineLatency(
        resolve_device("h100"), "bfloat16", "graph", "vllm", engine_rounds("vllm", "0.16.0")
    )
    one = Architecture(1024, 5120, 1, 4, 2, 128, 16384)
    for batch in (1, 64, 256):
        work = Workload(batch, 256, 1, "bfloat16", "graph")
        idle, own = latency.idle_s(TARGET, one, work), latency.idle_draft_s(one, work)
        costs = latency.rounds.costs  # type: ignore[union-attr]
        added = math.hypot(
            costs.round_s.std, costs.token_s.std, costs.gap_s.std, batch * costs.sequence_s.std
        ) * costs.band(batch)
        assert idle.value > own.value and math.isclose(idle.std, math.hypot(own.std, added))
