"""The prior against published drafts, and the traps it must not fall into."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from archsearch.acceptance.estimator import (
    DOMAINS,
    DRAFTERS,
    AcceptanceContext,
    AcceptanceObservation,
    GivenAcceptance,
    VocabularyCoverage,
)
from archsearch.acceptance.prior import PriorAcceptance, assumed_coverage, trimmed_alpha
from archsearch.acceptance.terms import COEFFICIENTS, REFERENCE_GAMMA, load_fit, usual_tokens
from archsearch.architecture import catalogue
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import body_parameters
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.speedup import (
    alpha_from_tau,
    drifting_positions,
    logit,
    sigmoid,
    tau,
    tau_from_positions,
)
from published_table import load_anchors

SMOLLM2 = Architecture(576, 1536, 30, 9, 3, 64, 49152, tie_word_embeddings=True)
LLAMA_65B = Architecture(8192, 22016, 80, 64, 64, 128, 32000)
TWO_LAYERS = Architecture(576, 1536, 2, 9, 3, 64, 49152)
SMOL = AcceptanceContext(target=SMOLLM2)
LLAMA = AcceptanceContext(target=LLAMA_65B)
STRANGER = AcceptanceContext(
    target=SMOLLM2.replace(hidden_size=640, head_dim=80)
)  # the table has neither it nor its family


def logit_std(alpha: Estimate) -> float:
    return alpha.std / (alpha.value * (1 - alpha.value))


def test_anchors_are_met_within_the_doubt_about_a_new_text():
    """Of their target the sketches' study and lot are known; the text they were measured on says
    nothing about another."""
    reference, anchors = load_anchors()
    assert reference == TWO_LAYERS and body_parameters(reference) == pytest.approx(7.08e6, rel=0.01)
    prior = PriorAcceptance()
    gaps = []
    for anchor in anchors:
        context = AcceptanceContext(
            target=SMOLLM2, domain=anchor.domain, trained_tokens=anchor.tokens
        )
        predicted = prior.predict(anchor.architecture, context).alpha
        gaps.append(abs(logit(predicted.value) - logit(anchor.alpha)))
        assert gaps[-1] < logit_std(predicted)
    assert np.mean(gaps) < 0.4


def test_sketches_of_a_small_target_say_nothing_of_the_level_of_another():
    """Two minutes of training a 135M target's drafts on mixed text gave alpha 0.3: other targets
    are not pulled there."""
    shape = Architecture(1024, 2816, 4, 8, 8, 128, 152064)
    other = Architecture(3584, 18944, 28, 28, 4, 128, 152064)
    alpha = {
        d: PriorAcceptance().predict(shape, AcceptanceContext(other, domain=d)).alpha.value
        for d in ("chat", "mixed")
    }
    assert alpha["mixed"] == pytest.approx(alpha["chat"], abs=0.05)


@pytest.mark.parametrize(
    ("shape", "alpha"),
    [
        (
            dict(
                hidden_size=4096,
                intermediate_size=11008,
                num_hidden_layers=5,
                num_attention_heads=32,
            ),
            0.771,
        ),  # Wide-796M
        (
            dict(
                hidden_size=2560,
                intermediate_size=9280,
                num_hidden_layers=12,
                num_attention_heads=20,
            ),
            0.750,
        ),
        (
            dict(
                hidden_size=2048,
                intermediate_size=5504,
                num_hidden_layers=24,
                num_attention_heads=16,
            ),
            0.760,
        ),
    ],
)
def test_published_drafts_of_llama_65b_lie_within_the_band(shape, alpha):
    """arXiv 2402.01528, 0.4B tokens: three rows of the table, a hundred times larger than the
    anchors."""
    draft = Architecture(
        **shape, num_key_value_heads=shape["num_attention_heads"], head_dim=128, vocab_size=32000
    )
    for domain in ("mixed", "chat"):
        asked = AcceptanceContext(target=LLAMA_65B, domain=domain, training="shared")
        predicted = PriorAcceptance().predict(draft, asked).alpha
        assert abs(logit(predicted.value) - logit(alpha)) < 0.4
        assert logit_std(predicted) < 0.72
    # without the parent's tokens behind it a draft of so many tokens accepts less, and less is
    # known
    other = (
        PriorAcceptance()
        .predict(draft, AcceptanceContext(target=LLAMA_65B, trained_tokens=4e8))
        .alpha
    )
    assert logit_std(other) > 0.5 and other.value < predicted.value - 0.05


def test_wide_and_deep_1_3b_differ_as_published():
    wide = Architecture(2560, 9280, 12, 20, 20, 128, 32000)
    deep = Architecture(2048, 5504, 24, 16, 16, 128, 32000)
    prior = PriorAcceptance()
    gap = logit(prior.predict(wide, LLAMA).alpha.value) - logit(
        prior.predict(deep, LLAMA).alpha.value
    )
    assert gap == pytest.approx(-0.05, abs=2 * prior.difference_std(wide, deep, LLAMA))
    assert prior.difference_std(wide, deep, LLAMA) < 0.2


def test_std_absolute_and_of_differences():
    prior = PriorAcceptance()
    predicted = prior.predict(TWO_LAYERS, SMOL).alpha
    assert predicted.source == "prior"
    of_stranger = logit_std(prior.predict(TWO_LAYERS, STRANGER).alpha)
    assert of_stranger == pytest.approx(0.6, abs=0.1) and 0.3 < logit_std(predicted) < of_stranger
    assert prior.difference_std(
        TWO_LAYERS, TWO_LAYERS.replace(num_hidden_layers=4), SMOL
    ) == pytest.approx(0.15, abs=0.05)
    assert prior.difference_std(TWO_LAYERS, TWO_LAYERS, SMOL) == 0.0


def test_every_domain_has_its_level():
    prior = PriorAcceptance()
    alpha = {
        d: prior.predict(TWO_LAYERS, AcceptanceContext(SMOLLM2, domain=d)).alpha.value
        for d in DOMAINS
    }
    assert alpha["code"] > alpha["chat"] and alpha["math"] > alpha["chat"] > alpha["mixed"]
    assert alpha["narrow"] > alpha["mixed"] + 0.1  # of this target both were measured


def test_more_training_helps_less_and_less():
    prior = PriorAcceptance()
    tokens = [2e4, 2e5, 2e6, 2e7, 2e8]
    levels = [
        logit(prior.predict(TWO_LAYERS, AcceptanceContext(SMOLLM2, trained_tokens=t)).alpha.value)
        for t in tokens
    ]
    gains = np.diff(levels)
    # The first decades bring most; what the study of shapes gained from 32k to 128k is 0.4 to 0.7 a
    # decade.
    assert (gains > 0.05).all() and gains[0] > gains[1] > gains[2:].max() and 0.35 < gains[0] < 0.8
    assert usual_tokens(SMOLLM2) == pytest.approx(5e5, rel=0.01) and usual_tokens(
        LLAMA_65B
    ) == pytest.approx(3e8, rel=0.05)
    said = prior.predict(
        TWO_LAYERS, AcceptanceContext(SMOLLM2, trained_tokens=usual_tokens(SMOLLM2))
    )
    assert prior.predict(TWO_LAYERS, SMOL) == said


def test_what_size_and_depth_bring_comes_with_training():
    """Shapes of the study: from 32k to 128k tokens 8 layers gained 0.41, one layer 0.22; two layers
    were no better than one."""
    prior = PriorAcceptance()
    deep = TWO_LAYERS.replace(num_hidden_layers=8)
    one = TWO_LAYERS.replace(num_hidden_layers=1)

    def gap(first: Architecture, second: Architecture, tokens: float) -> float:
        context = AcceptanceContext(SMOLLM2, domain="narrow", trained_tokens=tokens)
        return logit(prior.predict(first, context).alpha.value) - logit(
            prior.predict(second, context).alpha.value
        )

    early, usual, late = (gap(deep, TWO_LAYERS, tokens) for tokens in (3.2e4, 5e5, 5e7))
    assert 0 < early < 0.7 * usual and usual <= late
    assert abs(gap(one, TWO_LAYERS, 6.4e4)) < 0.12 and gap(one, TWO_LAYERS, 5e5) < -0.2


def test_drafters_that_see_the_target_sink_along_the_block():
    prior = PriorAcceptance()
    for drafter in DRAFTERS:
        found = prior.predict(
            TWO_LAYERS,
            AcceptanceContext(SMOLLM2, domain="chat", trained_tokens=3e8, drafter=drafter),
        )
        assert (found.drift.value < -0.01) == (drafter not in ("independent", "medusa", "mlp"))
    eagle = AcceptanceContext(SMOLLM2, domain="chat", trained_tokens=3e8, drafter="eagle3")
    first = prior.predict(TWO_LAYERS, eagle)
    # EAGLE-3 on MT-Bench, greedy chains of five (arXiv 2602.23881 and others): mostly .60 to .77
    assert 0.6 < alpha_from_tau(first.tau(REFERENCE_GAMMA).value, REFERENCE_GAMMA) < 0.77
    # their layer has the target's width, so the shape of a draft says nothing
    assert first == prior.predict(TWO_LAYERS.replace(num_hidden_layers=8), eagle)
    with pytest.raises(ArchsearchError, match="kind of drafter 'hydra'.*eagle3"):
        prior.predict(TWO_LAYERS, AcceptanceContext(drafter="hydra"))


def test_first_alpha_undoes_the_drift():
    for drift in (-0.2, 0.0, 0.1):
        value = tau_from_positions(drifting_positions(0.7, drift, 6))
        assert alpha_from_tau(value, 6, drift) == pytest.approx(0.7, abs=1e-9)
    assert alpha_from_tau(7.0, 6, -0.1) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="between 1"):
        alpha_from_tau(8.0, 6, -0.1)


def test_one_layer_does_not_win_by_ignorance_where_depth_is_cheap():
    """Equal parameters in one wide layer or in three: nobody measured the wide one, so it may not
    lead."""
    prior = PriorAcceptance()
    wide = TWO_LAYERS.replace(num_hidden_layers=1, intermediate_size=6600)
    three = TWO_LAYERS.replace(num_hidden_layers=3, intermediate_size=1860)
    assert body_parameters(wide) == pytest.approx(body_parameters(three), rel=0.03)
    gap = logit(prior.predict(three, SMOL).alpha.value) - logit(
        prior.predict(wide, SMOL).alpha.value
    )
    assert gap > 0.2
    assert prior.difference_std(wide, three, SMOL) > 0.15


def test_one_layer_does_not_win_where_width_is_free():
    """arXiv 2402.01528's stack: 0.55 ms a layer at any width, 60 ms a pass of LLaMA-65B. Its best
    draft had 5 layers, and TAR fell sharply at 3 and 1."""
    prior = PriorAcceptance()

    def throughput(layers: int) -> float:
        draft = Architecture(4096, 11008, layers, 32, 32, 128, 32000)
        alpha = prior.predict(draft, LLAMA).alpha.value
        return max(tau(alpha, gamma) / (0.55e-3 * layers * gamma + 60e-3) for gamma in range(1, 13))

    best = max(range(1, 25), key=throughput)
    assert 2 <= best <= 12
    assert throughput(1) < 0.9 * throughput(best)
    assert throughput(5) > 0.9 * throughput(best) > throughput(16)


def test_off_the_shelf_drafts_are_not_taken_for_distilled_ones():
    """arXiv 2310.07177, llama-160m for Vicuna-7B: as it is .28, .38 on code, .58 maths, .57
    questions; distilled .65 to .76."""
    vicuna, draft = (catalogue.load(name).architecture for name in ("vicuna-7b", "llama-160m"))

    def alpha(domain: str, training: str) -> Estimate:
        tuned = {"trained_tokens": 3e6, "pretrain_tokens": 1.5e10} if training == "target" else {}
        context = AcceptanceContext(vicuna, domain=domain, training=training, **tuned)
        return PriorAcceptance().predict(draft, context).alpha

    for domain, published in (("code", 0.38), ("math", 0.58), ("qa", 0.57)):
        found = alpha(domain, "other")
        assert abs(logit(found.value) - logit(published)) < 2 * logit_std(found)
        assert alpha(domain, "target").value > found.value + 0.1
    with pytest.raises(ArchsearchError, match="training 'mine'.*target, shared, other"):
        alpha("code", "mine")


def test_width_beyond_the_target_brings_doubt_and_no_endless_gain():
    prior = PriorAcceptance()
    wide = Architecture(4096, 16384, 2, 64, 64, 64, 49152)
    target_body = SMOLLM2.replace(num_hidden_layers=2, intermediate_size=30000)
    wider = Architecture(8192, 32768, 2, 128, 128, 64, 49152)
    # Hidden states seven and fourteen times the target's: no more apart than the study of shapes
    # saw at twice (0.1 logit).
    gap = logit(prior.predict(wider, SMOL).alpha.value) - logit(
        prior.predict(wide, SMOL).alpha.value
    )
    assert abs(gap) < 0.1
    assert (
        prior.difference_std(wide, TWO_LAYERS, SMOL)
        > prior.difference_std(target_body, TWO_LAYERS, SMOL) * 1.2
    )


def test_what_width_does_at_equal_size_is_small_and_less_sure():
    """Drafts of the table are up to eight times narrower than their targets, and alpha does not
    follow: the term is near 0."""
    prior = PriorAcceptance()
    narrow = Architecture(256, 1024, 3, 4, 2, 64, 49152)
    same_size = TWO_LAYERS.replace(
        num_hidden_layers=3, intermediate_size=200, num_attention_heads=6, num_key_value_heads=3
    )
    assert body_parameters(same_size) == pytest.approx(body_parameters(narrow), rel=0.05)
    assert prior.predict(narrow, SMOL).alpha.value == pytest.approx(
        prior.predict(same_size, SMOL).alpha.value, abs=0.05
    )
    assert prior.difference_std(narrow, TWO_LAYERS, SMOL) > prior.difference_std(
        same_size, TWO_LAYERS, SMOL
    )


def test_temperature_and_windows():
    prior = PriorAcceptance()
    greedy = logit(prior.predict(TWO_LAYERS, SMOL).alpha.value)
    sampled = logit(
        prior.predict(TWO_LAYERS, AcceptanceContext(target=SMOLLM2, temperature=1.0)).alpha.value
    )
    assert sampled - greedy == pytest.approx(
        -0.22, abs=0.06
    )  # LK -0.19, EAGLE-1 -0.15, DFlash -0.23, Leviathan -0.25
    window = TWO_LAYERS.replace(window_pattern="S", sliding_window=512)
    # A window that cuts nothing: its term is what shapes of the study leave over, and small beside
    # what no term explains.
    assert logit(prior.predict(window, SMOL).alpha.value) == pytest.approx(greedy, abs=0.1)
    long = AcceptanceContext(target=SMOLLM2, context_len=8192)
    # One that cuts: of the 95 tokens that were measured nothing; beyond, a loss and a doubt that
    # grows.
    gap = logit(prior.predict(window, long).alpha.value) - logit(
        prior.predict(window, SMOL).alpha.value
    )
    assert gap == pytest.approx(-0.04 * 4, abs=0.01)  # four halvings
    assert (
        prior.difference_std(window, TWO_LAYERS, long)
        > prior.difference_std(window, TWO_LAYERS, SMOL) + 0.05
    )


def test_acceptance_of_heads_falls_where_the_context_grows() -> None:
    """EAGLE-3: tau 2.30, 1.69, 1.09 at 2k, 8k, 16k (speculators pull request 684); a window stops
    it."""
    prior, target = PriorAcceptance(), catalogue.load("qwen3-8b").architecture
    head = target.replace(num_hidden_layers=1)

    def tau_at(context_len: int, shape: Architecture = head) -> Estimate:
        asked = AcceptanceContext(target, context_len=context_len, drafter="eagle3")
        return prior.predict(shape, asked).tau(3)

    short, middle, long = (tau_at(context) for context in (2048, 8192, 16384))
    assert short.value > middle.value > long.value and long.std > short.std
    windowed = head.replace(window_pattern="S", sliding_window=2048)
    assert tau_at(16384, windowed).value == pytest.approx(short.value)
    # so do drafts that are distilled on such texts, not models that were made for more
    for training, falls in (("target", True), ("shared", False)):
        asked = AcceptanceContext(target, context_len=2048, training=training)
        near, far = (
            prior.predict(head, replace(asked, context_len=length)).alpha for length in (2048, 8192)
        )
        assert (
            (logit(near.value) - logit(far.value) > 0.3)
            == falls
            == (logit_std(far) > logit_std(near) + 0.1)
        )


def test_heads_learn_from_tokens_and_a_guess_of_them_is_doubt() -> None:
    prior, target = PriorAcceptance(), catalogue.load("llama-3.1-8b").architecture
    head = target.replace(num_hidden_layers=1)

    def asked(**more: Any) -> Estimate:
        return prior.predict(head, AcceptanceContext(target, drafter="eagle3", **more)).alpha

    few, many = asked(trained_tokens=1e7), asked(trained_tokens=1e10)
    assert logit(many.value) - logit(few.value) > 1.0
    guessed = asked(trained_tokens=3e7, tokens_std=1.0)
    assert logit_std(guessed) > logit_std(asked(trained_tokens=3e7)) + 0.2


def test_a_blind_layer_never_beats_a_head_and_eagle1_never_eagle3() -> None:
    """Studies that ran both: KVShot (arXiv 2604.26412), vLLM issue 20780."""
    for name in ("llama-3.1-8b", "llama-3.3-70b", "vicuna-33b", "qwen3-32b", "opt-13b"):
        prior, target = PriorAcceptance(), catalogue.load(name).architecture
        layer = target.replace(num_hidden_layers=1)
        for tokens in (3e5, 1e7, 1e9, 1e10):
            blind, eagle1, eagle3 = (
                prior.predict(layer, AcceptanceContext(target, trained_tokens=tokens, drafter=kind))
                .tau(5)
                .value
                for kind in ("independent", "eagle1", "eagle3")
            )
            assert max(blind, eagle1) < eagle3


def test_what_a_draft_of_two_layers_learns() -> None:
    """The law: .2 to .45 after 33M tokens, .5 to .67 after 3B, for Llama-3.1-8B."""
    draft = Architecture(1536, 7680, 2, 12, 4, 128, 128256)
    target = catalogue.load("llama-3.1-8b").architecture
    few, many = (
        PriorAcceptance().predict(draft, AcceptanceContext(target, trained_tokens=t)).alpha
        for t in (33e6, 3e9)
    )
    assert 0.2 <= few.value <= 0.45 and 0.5 <= many.value <= 0.67


def test_a_small_draft_accepts_less_of_a_larger_target() -> None:
    """vicuna-68m in Spec-Bench: 2.28, 2.18, 2.01 for Vicuna 7B, 13B, 33B."""
    draft = catalogue.load("llama-68m").architecture
    taus = [
        PriorAcceptance()
        .predict(
            draft,
            AcceptanceContext(catalogue.load(name).architecture, domain="mixed", training="other"),
        )
        .tau(5)
        .value
        for name in ("vicuna-7b", "vicuna-13b", "vicuna-33b")
    ]
    assert taus == sorted(taus, reverse=True)


def test_attention_variant_counts_through_size_only():
    prior = PriorAcceptance()
    mqa = TWO_LAYERS.replace(num_key_value_heads=1)
    shrunk = TWO_LAYERS.replace(intermediate_size=1536 - 2 * 2 * 64 // 3 - 1)
    # one sketch of a hundred rows has a single KV head: what it says stays within the doubt about
    # it
    gap = logit(prior.predict(mqa, SMOL).alpha.value) - logit(
        prior.predict(shrunk, SMOL).alpha.value
    )
    assert abs(gap) < 0.1 < prior.difference_std(mqa, shrunk, SMOL)


@pytest.mark.parametrize(("halvings", "kept"), [(1, 0.977), (2, 0.933), (3, 0.874), (4, 0.805)])
def test_trimmed_vocabulary_follows_fr_spec(halvings, kept):
    full = alpha_from_tau(3.89, 6)
    assert tau(trimmed_alpha(full, assumed_coverage(halvings)), 6) / 3.89 == pytest.approx(
        kept, abs=0.01
    )


def test_known_coverage_replaces_the_rule():
    # a sketch: 8192 of 49152 rows cover 93 % of the text; .301 stayed .301 and .821 became .788
    assert trimmed_alpha(0.301, 0.93) == pytest.approx(0.301, abs=0.005)
    assert trimmed_alpha(0.821, 0.93) == pytest.approx(0.788, abs=0.005)
    assert trimmed_alpha(1.0, 0.93) == pytest.approx(0.93)
    prior = PriorAcceptance()
    small = TWO_LAYERS.replace(draft_vocab_size=8192)
    known = AcceptanceContext(
        target=SMOLLM2, coverage=VocabularyCoverage(((4096, 0.97), (8192, 0.999)))
    )
    full = prior.predict(TWO_LAYERS, SMOL).alpha.value
    assert prior.predict(small, SMOL).alpha.value < prior.predict(small, known).alpha.value < full
    assert prior.predict(small, known).alpha.value == pytest.approx(full, abs=0.001)


def test_coverage_between_its_points():
    coverage = VocabularyCoverage(((1, 0.5), (2, 0.8), (4, 1.0)))
    assert coverage.share(3) == pytest.approx(0.8 + 0.2 * math.log2(1.5))
    assert coverage.share(1) == 0.5 and coverage.share(400) == 1.0
    with pytest.raises(ArchsearchError, match="rising"):
        VocabularyCoverage(((8, 0.5), (4, 0.9)))


def test_one_measurement_shifts_the_intercept_and_shrinks_the_std():
    prior = PriorAcceptance()
    before = prior.predict(TWO_LAYERS.replace(num_hidden_layers=4), STRANGER).alpha
    prior.fit([AcceptanceObservation(TWO_LAYERS, Estimate(0.80, 0.01, "measured"), STRANGER)])
    measured = prior.predict(TWO_LAYERS, STRANGER).alpha
    neighbour = prior.predict(TWO_LAYERS.replace(num_hidden_layers=4), STRANGER).alpha
    assert measured.value == pytest.approx(0.80, abs=0.02) and measured.source == "modelled"
    assert neighbour.value > measured.value > before.value
    assert logit_std(measured) < 0.17 and logit_std(neighbour) < 0.2
    assert prior.difference_std(
        TWO_LAYERS, TWO_LAYERS.replace(num_hidden_layers=4), STRANGER
    ) == pytest.approx(0.14, abs=0.04)
    again = PriorAcceptance().fit([])
    assert again.predict(TWO_LAYERS, STRANGER) == PriorAcceptance().predict(TWO_LAYERS, STRANGER)


def test_two_minutes_of_training_do_not_speak_for_ten_hours():
    short = AcceptanceContext(SMOLLM2, trained_tokens=3e5)
    long = AcceptanceContext(SMOLLM2, trained_tokens=1e8)
    prior = PriorAcceptance().fit(
        [AcceptanceObservation(TWO_LAYERS, Estimate(0.5, 0.01, "measured"), short)]
    )
    now, later = prior.predict(TWO_LAYERS, short).alpha, prior.predict(TWO_LAYERS, long).alpha
    assert now.value == pytest.approx(0.5, abs=0.02) and logit(later.value) - logit(now.value) > 0.3
    assert logit_std(later) > 1.3 * logit_std(now)
    # and the other way: a draft trained for hours does not promise its alpha to one trained for
    # minutes
    prior.fit([AcceptanceObservation(TWO_LAYERS, Estimate(0.7, 0.01, "measured"), long)])
    assert prior.predict(TWO_LAYERS, short).alpha.value < 0.6


def test_a_draft_that_learnt_a_text_does_not_promise_its_alpha_to_a_handful_of_tokens():
    """The demo's draft: .74 after a million tokens, .14 after 1,421, .50 after 31,819."""
    shape = Architecture(512, 1024, 1, 8, 4, 64, 49152)

    def at(tokens):
        return AcceptanceContext(SMOLLM2, domain="narrow", trained_tokens=tokens)

    prior = PriorAcceptance()
    prior.fit([AcceptanceObservation(shape, Estimate(0.744, 0.026, "measured"), at(1.2e6))])
    tokens = (22.0, 1421.0, 4135.0, 3.18e4, 1.2e6)
    found = [prior.predict(shape, at(each)).alpha for each in tokens]
    assert sorted(each.value for each in found) == [each.value for each in found]
    assert found[0].value < 0.15 and found[0].interval[1] < 0.25
    assert found[1].value < 0.35 and found[3].value > 0.45
    assert logit_std(found[0]) > 1.5 * logit_std(found[3])


def test_a_measurement_in_one_domain_says_less_about_another():
    code = AcceptanceContext(SMOLLM2, domain="code")
    prior = PriorAcceptance()
    before = prior.predict(TWO_LAYERS, code).alpha
    prior.fit(
        [
            AcceptanceObservation(
                TWO_LAYERS,
                Estimate(0.8, 0.01, "measured"),
                AcceptanceContext(SMOLLM2, domain="chat"),
            )
        ]
    )
    after = prior.predict(TWO_LAYERS, code).alpha
    chat = prior.predict(TWO_LAYERS, AcceptanceContext(SMOLLM2, domain="chat")).alpha
    assert before.value + 0.05 < after.value < 0.8
    # another domain's own level and text stay open: half a logit
    assert 3 * logit_std(chat) < logit_std(after) < logit_std(before) - 0.04


def test_fit_recovers_a_steeper_depth_and_starts_afresh():
    layers = [1, 2, 3, 4, 6, 8]
    rows = [
        AcceptanceObservation(
            TWO_LAYERS.replace(num_hidden_layers=n),
            Estimate(sigmoid(0.1 + 0.5 * math.log(n)), 0.005, "measured"),
            SMOL,
        )
        for n in layers
    ]
    prior = PriorAcceptance().fit(rows)
    errors = [
        abs(prior.predict(row.architecture, SMOL).alpha.value - row.alpha.value) for row in rows
    ]
    assert max(errors) < 0.05
    once = prior.coefficients_.copy()
    assert (prior.fit(rows).coefficients_ == once).all()


def test_explain_adds_up():
    prior = PriorAcceptance()
    draft = TWO_LAYERS.replace(num_hidden_layers=1, draft_vocab_size=8192)
    parts = {part.term: part.contribution for part in prior.parts(draft, SMOL)}
    assert math.fsum(parts.values()) == pytest.approx(logit(prior.predict(draft, SMOL).alpha.value))
    assert parts["single_layer"] < -0.1 and parts["vocabulary"] < 0
    assert all(part.std >= 0 for part in prior.parts(draft, SMOL))
    said = {part.term: part.evidence for part in prior.parts(draft, SMOL)}
    assert said.keys() == parts.keys() and all(said.values())
    assert (
        all("own rows" in said[name] for name in ("overwide", "size", "window"))
        and "FR-Spec" in said["vocabulary"]
    )
    assert sum(name.startswith("domain ") for name in parts) == 1
    prior.fit([AcceptanceObservation(TWO_LAYERS, Estimate(0.8, 0.01, "measured"), SMOL)])
    assert (
        "1 measured for this target"
        in {part.term: part.evidence for part in prior.parts(draft, SMOL)}["intercept"]
    )


def test_unknown_domain_names_the_known_ones():
    with pytest.raises(ArchsearchError, match="poetry.*chat, code.*mixed, narrow"):
        PriorAcceptance().predict(TWO_LAYERS, AcceptanceContext(domain="poetry"))


def test_given_alpha_is_the_same_for_all():
    given = GivenAcceptance(0.75)
    assert given.fit([]).predict(TWO_LAYERS, SMOL).alpha == Estimate(0.75, 0.0, "given")
    assert given.predict(TWO_LAYERS, SMOL).tau(4).value == pytest.approx(tau(0.75, 4))
    with pytest.raises(ArchsearchError, match="between 0 and 1"):
        GivenAcceptance(1.5).predict(TWO_LAYERS, SMOL)


def test_the_stored_fit_is_small_and_needs_no_scikit_learn():
    fit = load_fit()
    assert fit.mean.shape == (len(COEFFICIENTS),) and (np.linalg.eigvalsh(fit.covariance) > 0).all()
    code = (
        "import sys; import archsearch.acceptance.prior as p; p.PriorAcceptance();print(any(name in"
        " sys.modules for name in ('sklearn', 'scipy', 'pandas', 'torch', 'yaml')))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert answer == ["False"]


def test_a_fit_of_another_version_is_refused(tmp_path):
    broken = tmp_path / "fit.json"
    broken.write_text('{"coefficients": ["size"]}')
    with pytest.raises(
        ArchsearchError, match="another version.*python benchmarks/acceptance_fit.py"
    ):
        load_fit(broken)


def test_what_a_search_began_with_can_be_kept() -> None:
    context = AcceptanceContext(target=None)
    shape = Architecture(576, 1536, 3, 9, 3, 64, 49152)
    known = [AcceptanceObservation(shape, Estimate(0.9, 0.01, "measured"), context)]
    prior = PriorAcceptance().fit(known)
    again = PriorAcceptance.from_dict(json.loads(json.dumps(prior.to_dict())))
    assert again.predict(shape, context) == prior.predict(shape, context)
    assert again.predict(shape, context) != PriorAcceptance().predict(shape, context)
    with pytest.raises(ArchsearchError, match="another version"):
        PriorAcceptance.from_dict({**prior.to_dict(), "coefficients": [1.0]})


def test_a_prior_of_when_random_text_was_a_domain_is_read() -> None:
    data: dict[str, Any] = PriorAcceptance().to_dict()
    names = [*data["names"], "domain random"]
    width = len(names)
    covariance = np.zeros((width, width))
    covariance[:-1, :-1] = data["covariance"]
    old = {**data, "names": names, "covariance": covariance.tolist()}
    old["coefficients"] = [*data["coefficients"], 0.0]
    again = PriorAcceptance.from_dict(json.loads(json.dumps(old)))
    same = PriorAcceptance.from_dict(data).predict(TWO_LAYERS, SMOL)
    assert again.predict(TWO_LAYERS, SMOL) == same
