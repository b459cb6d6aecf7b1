"""What to measure next: in a made-up world whose truth is known, measurements bring what was
foretold."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from archsearch import speedup as sp
from archsearch.acceptance.estimator import AcceptanceObservation, GivenAcceptance
from archsearch.acceptance.families import acceptance_of
from archsearch.acceptance.prior import SHAPE_NOISE_STD, PriorAcceptance, _row
from archsearch.acceptance.short_training import ExtrapolatedAcceptance
from archsearch.acceptance.terms import COEFFICIENTS
from archsearch.architecture.architecture import Architecture
from archsearch.drafters.lookup import NGram
from archsearch.drafters.models import Independent
from archsearch.drafters.registry import family
from archsearch.estimate import Estimate
from archsearch.hardware.identify import resolve_device
from archsearch.latency.roofline import RooflineLatency
from archsearch.search.next_measurement import Belief, best_pair, logit_covariance
from archsearch.search.objective import Scorer
from archsearch.workload import Workload

SHAPES = [
    Architecture(width, 2 * width, layers, width // 64, width // 64, 64, 49152)
    for width in (256, 384, 576)
    for layers in (1, 2, 4)
]
EXISTING = Architecture(512, 1536, 3, 8, 8, 64, 49152)
DRAWS = 250


def ranked(scorer):
    return sorted(map(scorer, SHAPES), key=lambda score: -score.speedup.value)


class World:
    """A truth drawn from what the scorer believes: logits by shape and context, and errors of the
    times."""

    def __init__(self, scorer, relative_std, rng):
        prior = scorer.acceptance
        self.scorer, self.rng = scorer, rng
        self.coefficients = rng.multivariate_normal(
            prior.coefficients_, prior.covariance_, check_valid="ignore"
        )
        self.drift = rng.normal(0.0, 0.05)
        self.own: dict = {}
        rho = scorer.target_correlation
        decode = rng.normal()
        verify = rho * decode + math.sqrt(1.0 - rho**2) * rng.normal()
        self.decode, self.verify = relative_std * decode, relative_std * verify
        self.drafts = {shape: relative_std * rng.normal() for shape in SHAPES}

    def logit(self, shape, context):
        own = self.own.setdefault((shape, context.training), self.rng.normal(0.0, SHAPE_NOISE_STD))
        return float(_row(shape, context, COEFFICIENTS) @ self.coefficients) + own

    def round_s(self, score):
        draft = score.draft_s.value * (1.0 + self.drafts[score.architecture])
        return draft + score.verify_s.value * (1.0 + self.verify)

    def decode_s(self, score):
        return score.decode_s.value * (1.0 + self.decode)

    def ln_speedup(self, score):
        alpha = sp.sigmoid(self.logit(score.architecture, self.scorer.context))
        tokens = sp.tau_from_positions(sp.drifting_positions(alpha, self.drift, score.gamma))
        return math.log(tokens * self.decode_s(score) / self.round_s(score))


@pytest.fixture
def scorer(smollm2, roofline):
    latency = roofline(relative_std=0.06)
    latency.target_correlation = 0.5
    return Scorer(smollm2, Workload(), latency, PriorAcceptance(), gammas=(3,))


def test_belief_has_the_stds_of_the_scores_and_of_their_differences(scorer):
    scores = ranked(scorer)
    belief = Belief(scorer, scores)
    for i, score in enumerate(belief.scores):
        assert math.sqrt(belief.covariance[i, i]) == pytest.approx(
            score.speedup.relative_std, rel=0.02
        )
    for i in (0, 3):
        gap = math.sqrt(belief.logits[i, i] + belief.logits[5, 5] - 2 * belief.logits[i, 5])
        wanted = scorer.acceptance.difference_std(
            scores[i].architecture, scores[5].architecture, scorer.context
        )
        assert gap == pytest.approx(wanted, rel=1e-6)


def test_what_the_table_does_not_know_of_a_drafter_stays_in_its_doubt(scorer):
    """A head that drafts in one pass is in the table by its kind alone."""
    context, kinds = scorer.context, ("eagle3", "peagle")
    asked = [(family(kind).usual(scorer.target), context) for kind in kinds]
    own = [acceptance_of(each, scorer.acceptance, at).acceptance.alpha for each, at in asked]
    stds = np.sqrt(np.diag(logit_covariance(scorer.acceptance, asked)))
    assert stds == pytest.approx([sp.logit_std(alpha) for alpha in own], rel=1e-6)
    assert stds[1] > 1.1 * stds[0]


def test_a_draft_that_exists_teaches_what_was_foretold(scorer):
    scores = ranked(scorer)
    belief, rng = Belief(scorer, scores), np.random.default_rng(1)
    context = replace(scorer.context, training="shared")
    foretold = belief.outlook(belief.acceptance_of((EXISTING, context), 0.08))
    stds, errors, before = [], [], []
    for _ in range(DRAWS):
        world = World(scorer, 0.06, rng)
        measured = sp.alpha_estimate(
            world.logit(EXISTING, context) + rng.normal(0.0, 0.08), 0.08, "measured"
        )
        fitted = PriorAcceptance().fit([AcceptanceObservation(EXISTING, measured, context)])
        found = ranked(scorer.with_acceptance(fitted))
        stds.append(found[0].speedup.relative_std)
        errors.append(world.ln_speedup(found[0]) - math.log(found[0].speedup.value))
        before.append(world.ln_speedup(scores[0]) - math.log(scores[0].speedup.value))
    assert foretold.std_after < 0.9 * foretold.std
    assert np.mean(stds) == pytest.approx(foretold.std_after, rel=0.15)
    assert np.sqrt(np.mean(np.square(before))) == pytest.approx(foretold.std, rel=0.15)
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(foretold.std_after, rel=0.15)


def test_two_short_trainings_teach_what_was_foretold_and_change_the_winner_for_the_better(scorer):
    scores = ranked(scorer)
    belief, rng = Belief(scorer, scores), np.random.default_rng(2)
    pair, foretold = best_pair(belief, 0.0, 0.05)
    stds, errors, gains = [], [], []
    for _ in range(DRAWS):
        world = World(scorer, 0.06, rng)
        shapes = [belief.scores[i].architecture for i in pair]
        levels = {
            shape: (world.logit(shape, scorer.context) + rng.normal(0.0, 0.05), 0.05)
            for shape in shapes
        }
        trained = ExtrapolatedAcceptance(levels, Estimate(0.0, 0.0, "given"), scorer.context)
        found = ranked(scorer.with_acceptance(trained))
        stds.append(found[0].speedup.relative_std)
        errors.append(world.ln_speedup(found[0]) - math.log(found[0].speedup.value))
        gains.append(world.ln_speedup(found[0]) - world.ln_speedup(scores[0]))
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(foretold.std_after, rel=0.15)
    assert np.mean(stds) == pytest.approx(foretold.std_after, rel=0.15)
    assert np.mean(gains) == pytest.approx(foretold.gain, abs=3 * np.std(gains) / math.sqrt(DRAWS))
    assert foretold.gain > 0.0


@pytest.mark.parametrize("kind", ["synthetic", "profile"])
def test_measured_times_teach_what_was_foretold(scorer, kind):
    scores = ranked(scorer)
    belief, rng = Belief(scorer, scores), np.random.default_rng(3)
    error_std = 0.025
    seen = belief.round_of(0, error_std) if kind == "synthetic" else belief.profile(error_std)
    foretold, gain = belief.outlook(seen), seen.cross @ np.linalg.inv(seen.own)
    before, errors = [], []
    for _ in range(4 * DRAWS):
        world = World(scorer, 0.06, rng)
        if kind == "synthetic":
            lead = belief.scores[0]
            at_predicted = math.log(lead.tau.value * world.decode_s(lead) / world.round_s(lead))
            surprise = [at_predicted - belief.mean[0] + rng.normal(0.0, error_std)]
        else:
            drafts = [world.drafts[score.architecture] for score in belief.scores]
            surprise = np.array([world.decode, world.verify, *drafts]) + rng.normal(
                0.0, error_std, 2 + len(drafts)
            )
        mean = belief.mean + gain @ np.array(surprise)
        winner = int(mean.argmax())
        truth = [world.ln_speedup(belief.scores[i]) for i in (0, winner)]
        before.append(truth[0] - belief.mean[0])
        errors.append(truth[1] - mean[winner])
    learnt = np.mean(np.square(before)) - np.mean(np.square(errors))
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(foretold.std_after, rel=0.15)
    assert learnt == pytest.approx(foretold.std**2 - foretold.std_after**2, rel=0.35)


def test_nothing_is_learnt_where_nothing_was_open_and_more_from_less_error(
    scorer, smollm2, roofline
):
    belief = Belief(scorer, ranked(scorer))
    stds = [
        belief.outlook(belief.round_of(0, error)).std_after for error in (0.001, 0.03, 0.3, 30.0)
    ]
    assert stds == sorted(stds) and stds[-1] == pytest.approx(
        belief.outlook(belief.round_of(0, 30.0)).std, rel=1e-3
    )
    given = Scorer(
        smollm2, Workload(), roofline(relative_std=0.06), GivenAcceptance(0.7), gammas=(3,)
    )
    known = Belief(given, ranked(given))
    assert known.acceptance_of((EXISTING, given.context), 0.1) is None
    assert not logit_covariance(
        given.acceptance, [(Independent(shape), given.context) for shape in SHAPES]
    ).any()
    assert known.outlook(known.trainings_of((0, 1), 0.0, 0.05)).value == pytest.approx(
        0.0, abs=1e-9
    )


def test_twins_are_one_candidate(scorer):
    scores = [
        scorer(shape) for shape in (SHAPES[0], SHAPES[0].replace(num_key_value_heads=1), SHAPES[1])
    ]
    kept = Belief(scorer, scores).scores
    assert [score.architecture for score in kept] == [SHAPES[0], SHAPES[1]]
    assert best_pair(Belief(scorer, scores[:1]), 0.0, 0.05) is None


def test_drafters_of_several_families_stand_beside_each_other(smollm2):
    latency = RooflineLatency(resolve_device("l40s"), "bfloat16", "graph", "vllm")
    scorer = Scorer(smollm2, Workload(mode="graph"), latency, PriorAcceptance(), gammas=(3,))
    lookup = scorer(NGram(smollm2))
    scores = sorted([*map(scorer, SHAPES[:4]), lookup], key=lambda score: -score.speedup.value)
    belief = Belief(scorer, scores)
    at = [score.family for score in belief.scores].index("ngram")
    assert math.sqrt(belief.covariance[at, at]) == pytest.approx(
        lookup.speedup.relative_std, rel=0.02
    )
    seen = belief.acceptance_of((EXISTING, scorer.context), 0.05)
    assert seen.cross[at, 0] == 0.0 and seen.cross[1 - min(at, 1), 0] > 0.0
    assert at not in best_pair(belief, 0.0, 0.05)[0]
