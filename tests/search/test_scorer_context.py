"""What a scorer keeps when something of it changes, and what target times have in common."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from archsearch.acceptance.estimator import VocabularyCoverage
from archsearch.acceptance.prior import PriorAcceptance
from archsearch.architecture.architecture import Architecture
from archsearch.hardware.identify import resolve_device
from archsearch.latency.model import LatencyModel
from archsearch.latency.roofline import RooflineLatency
from archsearch.latency.rounds import PACE_CORRELATION
from archsearch.profiles import Profile, find_profile
from archsearch.search.objective import Scorer
from archsearch.workload import Workload

FULL = Architecture(384, 1024, 2, 6, 6, 64, 49152)


def test_acceptance_is_asked_at_the_end_of_the_answers_whatever_else_changes(smollm2, roofline):
    workload = Workload(context_len=256)
    scorer = Scorer(smollm2, workload, roofline(), PriorAcceptance())
    scorer = scorer.with_acceptance(
        scorer.acceptance, replace(scorer.context, context_len=352, training="shared")
    )
    coverage = VocabularyCoverage(((8192, 0.9), (49152, 1.0)))
    assert scorer.with_coverage(coverage).context == replace(scorer.context, coverage=coverage)
    assert (
        scorer.at_batch(4).context == scorer.context
        and scorer.with_latency(roofline()).context == scorer.context
    )
    assert (
        scorer.at_context(1024).context.context_len == 1120
        and scorer.at_context(1024).workload.context_len == 1024
    )
    # A window that holds the context, but not the answer, costs alpha and saves nothing: it never
    # beats full attention.
    window = FULL.replace(window_pattern="S", sliding_window=320)
    one, other = scorer.with_coverage(coverage)(window), scorer.with_coverage(coverage)(FULL)
    assert one.alpha.value < other.alpha.value and one.round_s.value == other.round_s.value
    assert one.speedup.value < other.speedup.value


def test_errors_of_a_step_and_of_its_verification_go_together_where_passes_are_composed(
    smollm2, roofline
):
    composed = LatencyModel(
        Profile.load(find_profile("a100-sxm4-80gb", None)), "bfloat16", "graph", "vllm"
    )
    datasheet = RooflineLatency(resolve_device("l40s"), "bfloat16", "graph", "vllm")
    assert composed.target_correlation == datasheet.target_correlation == PACE_CORRELATION
    assert roofline().target_correlation == 0.0
    scorer = Scorer(smollm2, Workload(mode="graph"), datasheet, PriorAcceptance(), gammas=(3,))
    assert scorer.target_correlation == PACE_CORRELATION == scorer.at_batch(2).target_correlation
    independent = copy.copy(datasheet)
    independent.target_correlation = 0.0
    apart = scorer.with_latency(independent)(FULL)
    together = scorer(FULL)
    assert together.speedup.std < apart.speedup.std and together.speedup.value == pytest.approx(
        apart.speedup.value
    )
