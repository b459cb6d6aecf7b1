"""The score: its arithmetic, its fields, its speed."""

import json
import math

import pytest

from archsearch import speedup
from archsearch.acceptance.estimator import GivenAcceptance
from archsearch.acceptance.prior import PriorAcceptance
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import parameters
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.latency.draft_passes import LatencyOfRounds
from archsearch.search.objective import Score, Scorer, draft_bytes, grouped, score
from archsearch.search.space import Limits
from archsearch.workload import Workload

DRAFT = Architecture(576, 1536, 2, 9, 3, 64, 49152, draft_vocab_size=8192)
FIELDS = (
    "rank architecture parameters gamma alpha tau draft_s decode_s verify_s speedup tpot_s"
    " kv_bytes_per_token break_even_alpha round_s host_s bound engine engine_version family drafter"
    " assumed mix"
).split()


class PaperLatency(LatencyOfRounds):
    """LLaMA-65B on 4 A100: 60 ms a pass; the draft's step is given."""

    def __init__(self, draft_step_s):
        self.draft_step_s = draft_step_s

    def decode_s(self, target, workload):
        return Estimate(60e-3, 0.0, "published")

    def verify_s(self, target, workload, gamma):
        return Estimate(60e-3, 0.0, "published")

    def draft_s(self, draft, workload, gamma):
        return Estimate(gamma * self.draft_step_s, 0.0, "published")

    def added_s(self, target, workload, gamma):
        return Estimate(0.0, 0.0, "given")


@pytest.mark.parametrize(
    ("tau", "step_s", "throughput"), [(3.70, 6.69e-3, 32.6), (3.81, 13.13e-3, 23.1)]
)
def test_the_paper_rows(smollm2, tau, step_s, throughput):
    alpha = speedup.alpha_from_tau(tau, 8)
    result = Scorer(smollm2, Workload(), PaperLatency(step_s), GivenAcceptance(alpha), gammas=(8,))(
        DRAFT
    )
    assert 1 / result.tpot_s.value == pytest.approx(throughput, abs=0.05)
    assert result.speedup.value == pytest.approx(throughput * 60e-3, abs=0.005)
    assert result.speedup.source == "published"


def test_fields_and_round_trip(make_scorer):
    result = make_scorer()(DRAFT).with_rank(1)
    data = result.to_dict()
    assert list(data) == FIELDS
    assert (
        set(data["draft_s"]) == {"value", "std", "source"}
        and data["architecture"]["hidden_size"] == 576
    )
    for name in (
        "alpha",
        "tau",
        "speedup",
    ):  # where the doubt leans, its 5 and 95 % stand beside the std
        assert set(data[name]) == {"value", "std", "source", "low", "high"}
        assert data[name]["low"] < data[name]["value"] < data[name]["high"]
    assert Score.from_dict(json.loads(json.dumps(data))) == result
    with pytest.raises(ArchsearchError, match="tau: is missing"):
        Score.from_dict({key: value for key, value in data.items() if key != "tau"})
    with pytest.raises(ArchsearchError, match="speedup: must be above 0"):  # ranks are by its log
        Score.from_dict(data | {"speedup": 0})
    mixed = {"objective": "tpot", "value": 0, "plain": 1.0, "parts": []}
    with pytest.raises(ArchsearchError, match=r"mix\.value: must be above 0"):
        Score.from_dict(data | {"mix": mixed})


def test_numbers_hang_together(make_scorer, roofline):
    result = make_scorer(overhead=1e-3)(DRAFT)
    assert result.parameters == parameters(DRAFT)
    assert result.kv_bytes_per_token == 2 * 2 * 3 * 64 * 2
    round_s = result.draft_s.value + result.verify_s.value + 1e-3
    assert result.tau.value == pytest.approx(speedup.tau(result.alpha.value, result.gamma))
    assert result.speedup.value == pytest.approx(result.tau.value * result.decode_s.value / round_s)
    assert result.tpot_s.value == pytest.approx(round_s / result.tau.value)
    even = speedup.tau(result.break_even_alpha.value, result.gamma)
    assert even * result.decode_s.value / round_s == pytest.approx(1.0)
    assert 0.1 < result.speedup.relative_std < 0.5 and result.speedup.source == "roofline"


def test_gamma_is_the_best_of_all(make_scorer):
    scorer = make_scorer()
    each = []
    for gamma in scorer.gammas:
        one = Scorer(
            scorer.target, scorer.workload, scorer.latency, scorer.acceptance, gammas=(gamma,)
        )(DRAFT)
        each.append((one.speedup.value, gamma))
    assert (scorer(DRAFT).speedup.value, scorer(DRAFT).gamma) == max(each)


def test_a_hopeless_draft_is_scored_not_refused(smollm2, roofline):
    slow = DRAFT.replace(num_hidden_layers=60)
    result = score(slow, smollm2, Workload(), roofline(), GivenAcceptance(0.1))
    assert not result.pays and result.speedup.value < 1 and result.gamma == 1
    slower = slow.replace(num_hidden_layers=200)
    assert (
        score(slower, smollm2, Workload(), roofline(), GivenAcceptance(0.1)).break_even_alpha
        is None
    )


def test_target_times_are_asked_once(smollm2, roofline):
    latency = roofline()
    scorer = Scorer(smollm2, Workload(), latency, PriorAcceptance(), max_gamma=4)
    for layers in range(1, 9):
        scorer(DRAFT.replace(num_hidden_layers=layers))
    assert sorted(latency.target_calls) == [
        "decode",
        "verify 1",
        "verify 2",
        "verify 3",
        "verify 4",
    ]


def test_constraints_are_values(make_scorer):
    scorer = make_scorer(limits=Limits(parameters(DRAFT), draft_bytes(DRAFT, Workload()) // 2))
    values = scorer.constraints(DRAFT)
    assert values["max_parameters"] == 0.0
    assert values["max_memory"] == pytest.approx(1.0, rel=1e-3)
    assert scorer(DRAFT).speedup.value > 0
    assert make_scorer().constraints(DRAFT) == {}


def test_draft_bytes_counts_weights_and_cache():
    workload = Workload(batch_size=4, context_len=1000, dtype="fp16")
    assert draft_bytes(DRAFT, workload) == 2 * parameters(DRAFT) + 4 * 1000 * (2 * 2 * 3 * 64 * 2)


def test_indistinguishable_groups(make_scorer):
    scorer = make_scorer(relative_std=0.01)
    near, nearer, far = (
        DRAFT,
        DRAFT.replace(intermediate_size=1472),
        DRAFT.replace(num_hidden_layers=20),
    )
    groups = grouped(
        [scorer(far), scorer(near), scorer(nearer)], scorer.acceptance, lambda score: scorer.context
    )
    assert [{s.architecture for s in group} for group in groups] == [{near, nearer}, {far}]
    assert groups[0][0].speedup.value >= groups[0][1].speedup.value


def test_given_alpha_with_sure_times_tells_all_apart(smollm2, roofline):
    scorer = Scorer(smollm2, Workload(), roofline(relative_std=0.0), GivenAcceptance(0.6))
    scores = [scorer(DRAFT.replace(num_hidden_layers=n)) for n in (1, 2, 3)]
    assert [
        len(group) for group in grouped(scores, scorer.acceptance, lambda score: scorer.context)
    ] == [1, 1, 1]


def test_gamma_below_one_is_refused(smollm2, roofline):
    with pytest.raises(ArchsearchError, match="gamma must be at least 1"):
        Scorer(smollm2, Workload(), roofline(), GivenAcceptance(0.6), max_gamma=0)


def test_wide_and_shallow_wins_where_launches_decide_but_not_with_one_layer(roofline):
    """Eager mode on a fast GPU: a layer costs 0.55 ms at any width (arXiv 2402.01528)."""
    target = Architecture(8192, 22016, 80, 64, 64, 128, 32000)
    latency = roofline(bytes_per_s=8e12, flops_per_s=1e15, layer_s=0.55e-3)
    scorer = Scorer(target, Workload(dtype="fp16"), latency, PriorAcceptance(), max_gamma=12)

    def shape(layers, hidden):
        return Architecture(
            hidden, hidden * 11 // 4, layers, hidden // 128, hidden // 128, 128, 32000
        )

    best = max(
        (scorer(shape(n, h)) for n in range(1, 25) for h in (1024, 2048, 4096)),
        key=lambda s: s.speedup.value,
    )
    assert best.architecture.hidden_size == 4096 and 2 <= best.architecture.num_hidden_layers <= 8
    assert math.isfinite(best.speedup.std)


def test_another_batch_is_another_workload_of_the_same_scorer(make_scorer):
    scorer = make_scorer(workload=Workload(context_len=128))
    other = scorer.at_batch(16)
    assert (
        other.workload == Workload(batch_size=16, context_len=128)
        and scorer.workload.batch_size == 1
    )
    assert (
        other.gammas == scorer.gammas
        and other.acceptance is scorer.acceptance
        and other.latency is scorer.latency
    )
    assert other.decode_s.value > scorer.decode_s.value  # asked anew, not remembered
    assert other.at_batch(1)(DRAFT) == scorer(DRAFT)


def test_another_engine_s_latency_keeps_the_rest(make_scorer, roofline):
    scorer = make_scorer(limits=Limits(parameters(DRAFT), None))
    slower = scorer.with_latency(roofline(bytes_per_s=6e9))
    assert slower.decode_s.value > scorer.decode_s.value and slower.limits == scorer.limits
    assert slower.workload == scorer.workload and slower.context == scorer.context
    assert slower(DRAFT).alpha == scorer(DRAFT).alpha
