"""The prior against published drafts, and the traps it must not fall into."""

import math

import pytest

from archsearch.acceptance.estimator import (
    AcceptanceContext,
    AcceptanceObservation,
    GivenAcceptance,
    VocabularyCoverage,
)
from archsearch.acceptance.prior import PriorAcceptance, assumed_coverage, load_anchors, trimmed_alpha
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import body_parameters
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.speedup import alpha_from_tau, logit, sigmoid, tau

SMOLLM2 = Architecture(576, 1536, 30, 9, 3, 64, 49152, tie_word_embeddings=True)
LLAMA_65B = Architecture(8192, 22016, 80, 64, 64, 128, 32000)
TWO_LAYERS = Architecture(576, 1536, 2, 9, 3, 64, 49152)
SMOL = AcceptanceContext(target=SMOLLM2)
LLAMA = AcceptanceContext(target=LLAMA_65B)


def test_anchors_are_met_within_the_differences():
    reference, anchors = load_anchors()
    assert reference == TWO_LAYERS and body_parameters(reference) == pytest.approx(7.08e6, rel=0.01)
    prior = PriorAcceptance()
    for anchor in anchors:
        context = AcceptanceContext(target=SMOLLM2, domain=anchor.domain)
        predicted = prior.predict(anchor.architecture, context).alpha
        assert abs(predicted.value - anchor.alpha) < predicted.std
    narrow = [prior.predict(a.architecture, SMOL).alpha.value for a in anchors if a.domain == "narrow"]
    assert narrow == pytest.approx([0.557, 0.658], abs=0.03)


@pytest.mark.parametrize(
    ("shape", "alpha"),
    [
        (dict(hidden_size=4096, intermediate_size=11008, num_hidden_layers=5, num_attention_heads=32), 0.771),  # Wide-796M
        (dict(hidden_size=2560, intermediate_size=9280, num_hidden_layers=12, num_attention_heads=20), 0.750),
        (dict(hidden_size=2048, intermediate_size=5504, num_hidden_layers=24, num_attention_heads=16), 0.760),
    ],
)
def test_published_drafts_of_llama_65b_lie_within_the_band(shape, alpha):
    """arXiv 2402.01528: not used to set anything here, a hundred times larger than the anchors."""
    draft = Architecture(**shape, num_key_value_heads=shape["num_attention_heads"], head_dim=128, vocab_size=32000)
    predicted = PriorAcceptance().predict(draft, LLAMA).alpha
    assert abs(logit(predicted.value) - logit(alpha)) < 0.4
    assert predicted.std / (predicted.value * (1 - predicted.value)) == pytest.approx(0.6, abs=0.15)


def test_wide_and_deep_1_3b_differ_as_published():
    wide = Architecture(2560, 9280, 12, 20, 20, 128, 32000)
    deep = Architecture(2048, 5504, 24, 16, 16, 128, 32000)
    prior = PriorAcceptance()
    gap = logit(prior.predict(wide, LLAMA).alpha.value) - logit(prior.predict(deep, LLAMA).alpha.value)
    assert gap == pytest.approx(-0.05, abs=2 * prior.difference_std(wide, deep, LLAMA))
    assert prior.difference_std(wide, deep, LLAMA) < 0.2


def test_std_absolute_and_of_differences():
    prior = PriorAcceptance()
    predicted = prior.predict(TWO_LAYERS, SMOL).alpha
    assert predicted.source == "prior"
    assert predicted.std / (predicted.value * (1 - predicted.value)) == pytest.approx(0.6, abs=0.05)
    assert prior.difference_std(TWO_LAYERS, TWO_LAYERS.replace(num_hidden_layers=4), SMOL) == pytest.approx(0.15, abs=0.05)
    assert prior.difference_std(TWO_LAYERS, TWO_LAYERS, SMOL) == 0.0


def test_one_layer_does_not_win_where_width_is_free():
    """arXiv 2402.01528's stack: 0.55 ms a layer at any width, 60 ms a pass of LLaMA-65B. Its best draft had 5 layers, and TAR
    fell sharply at 3 and 1."""
    prior = PriorAcceptance()

    def throughput(layers: int) -> float:
        draft = Architecture(4096, 11008, layers, 32, 32, 128, 32000)
        alpha = prior.predict(draft, LLAMA).alpha.value
        return max(tau(alpha, gamma) / (0.55e-3 * layers * gamma + 60e-3) for gamma in range(1, 13))

    best = max(range(1, 25), key=throughput)
    assert 3 <= best <= 12
    assert throughput(1) < 0.9 * throughput(best)


def test_width_beyond_the_target_brings_doubt_and_no_endless_gain():
    prior = PriorAcceptance()
    wide = Architecture(4096, 16384, 2, 64, 64, 64, 49152)
    target_body = SMOLLM2.replace(num_hidden_layers=2, intermediate_size=30000)
    wider = Architecture(8192, 32768, 2, 128, 128, 64, 49152)
    assert prior.predict(wider, SMOL).alpha.value == pytest.approx(prior.predict(wide, SMOL).alpha.value)
    assert prior.difference_std(wide, TWO_LAYERS, SMOL) > prior.difference_std(target_body, TWO_LAYERS, SMOL) * 1.2


def test_a_narrow_draft_loses_more_than_its_size_and_is_less_sure():
    prior = PriorAcceptance()
    narrow = Architecture(256, 1024, 3, 4, 2, 64, 49152)
    same_size = TWO_LAYERS.replace(num_hidden_layers=3, intermediate_size=200, num_attention_heads=6, num_key_value_heads=3)
    assert body_parameters(same_size) == pytest.approx(body_parameters(narrow), rel=0.05)
    assert prior.predict(narrow, SMOL).alpha.value < prior.predict(same_size, SMOL).alpha.value - 0.02
    assert prior.difference_std(narrow, TWO_LAYERS, SMOL) > prior.difference_std(same_size, TWO_LAYERS, SMOL)


def test_temperature_and_windows():
    prior = PriorAcceptance()
    greedy = logit(prior.predict(TWO_LAYERS, SMOL).alpha.value)
    sampled = logit(prior.predict(TWO_LAYERS, AcceptanceContext(target=SMOLLM2, temperature=1.0)).alpha.value)
    assert sampled - greedy == pytest.approx(-0.20)
    window = TWO_LAYERS.replace(window_pattern="S", sliding_window=512)
    assert logit(prior.predict(window, SMOL).alpha.value) == pytest.approx(greedy)
    long = AcceptanceContext(target=SMOLLM2, context_len=8192)
    assert prior.predict(window, long).alpha.value < prior.predict(window, SMOL).alpha.value


def test_attention_variant_counts_through_size_only():
    prior = PriorAcceptance()
    mqa = TWO_LAYERS.replace(num_key_value_heads=1)
    shrunk = TWO_LAYERS.replace(intermediate_size=1536 - 2 * 2 * 64 // 3 - 1)
    assert prior.predict(mqa, SMOL).alpha.value == pytest.approx(prior.predict(shrunk, SMOL).alpha.value, abs=0.002)


@pytest.mark.parametrize(("halvings", "kept"), [(1, 0.977), (2, 0.933), (3, 0.874), (4, 0.805)])
def test_trimmed_vocabulary_follows_fr_spec(halvings, kept):
    full = alpha_from_tau(3.89, 6)
    assert tau(trimmed_alpha(full, assumed_coverage(halvings)), 6) / 3.89 == pytest.approx(kept, abs=0.01)


def test_known_coverage_replaces_the_rule():
    # a sketch: 8192 of 49152 rows cover 93 % of the text; .301 stayed .301 and .821 became .788
    assert trimmed_alpha(0.301, 0.93) == pytest.approx(0.301, abs=0.005)
    assert trimmed_alpha(0.821, 0.93) == pytest.approx(0.788, abs=0.005)
    assert trimmed_alpha(1.0, 0.93) == pytest.approx(0.93)
    prior = PriorAcceptance()
    small = TWO_LAYERS.replace(draft_vocab_size=8192)
    known = AcceptanceContext(target=SMOLLM2, coverage=VocabularyCoverage(((4096, 0.97), (8192, 0.999))))
    full = prior.predict(TWO_LAYERS, SMOL).alpha.value
    assert prior.predict(small, SMOL).alpha.value < prior.predict(small, known).alpha.value < full
    assert prior.predict(small, known).alpha.value == pytest.approx(full, abs=0.001)


def test_coverage_from_counts():
    coverage = VocabularyCoverage.from_counts({7: 50, 3: 30, 9: 15, 1: 5}, [1, 2, 4])
    assert coverage.points == ((1, 0.5), (2, 0.8), (4, 1.0))
    assert coverage.share(3) == pytest.approx(0.8 + 0.2 * math.log2(1.5))
    assert coverage.share(1) == 0.5 and coverage.share(400) == 1.0
    with pytest.raises(ArchsearchError, match="rising"):
        VocabularyCoverage(((8, 0.5), (4, 0.9)))
    with pytest.raises(ArchsearchError, match="no tokens"):
        VocabularyCoverage.from_counts({}, [8])


def test_one_measurement_shifts_the_intercept_and_shrinks_the_std():
    prior = PriorAcceptance()
    before = prior.predict(TWO_LAYERS.replace(num_hidden_layers=4), SMOL).alpha
    prior.fit([AcceptanceObservation(TWO_LAYERS, Estimate(0.80, 0.01, "measured"), SMOL)])
    measured = prior.predict(TWO_LAYERS, SMOL).alpha
    neighbour = prior.predict(TWO_LAYERS.replace(num_hidden_layers=4), SMOL).alpha
    assert measured.value == pytest.approx(0.80, abs=0.01)
    assert neighbour.value > measured.value > before.value
    assert neighbour.std / (neighbour.value * (1 - neighbour.value)) < 0.25
    again = PriorAcceptance().fit([])
    assert again.predict(TWO_LAYERS, SMOL) == PriorAcceptance().predict(TWO_LAYERS, SMOL)


def test_fit_recovers_a_steeper_depth_and_starts_afresh():
    layers = [1, 2, 3, 4, 6, 8]
    rows = [
        AcceptanceObservation(
            TWO_LAYERS.replace(num_hidden_layers=n), Estimate(sigmoid(0.1 + 0.5 * math.log(n)), 0.005, "measured"), SMOL
        )
        for n in layers
    ]
    prior = PriorAcceptance().fit(rows)
    errors = [abs(prior.predict(row.architecture, SMOL).alpha.value - row.alpha.value) for row in rows]
    assert max(errors) < 0.05
    once = prior.coefficients_.copy()
    assert (prior.fit(rows).coefficients_ == once).all()


def test_explain_adds_up():
    prior = PriorAcceptance()
    draft = TWO_LAYERS.replace(num_hidden_layers=1, draft_vocab_size=8192)
    parts = prior.explain(draft, SMOL)
    assert math.fsum(parts.values()) == pytest.approx(logit(prior.predict(draft, SMOL).alpha.value))
    assert parts["single_layer"] == -0.35 and parts["vocabulary"] < 0


def test_unknown_domain_names_the_known_ones():
    with pytest.raises(ArchsearchError, match="poetry.*mixed, narrow"):
        PriorAcceptance().predict(TWO_LAYERS, AcceptanceContext(domain="poetry"))


def test_given_alpha_is_the_same_for_all():
    given = GivenAcceptance(0.75)
    assert given.fit([]).predict(TWO_LAYERS, SMOL).alpha == Estimate(0.75, 0.0, "given")
    assert given.predict(TWO_LAYERS, SMOL).tau(4).value == pytest.approx(tau(0.75, 4))
    with pytest.raises(ArchsearchError, match="between 0 and 1"):
        GivenAcceptance(1.5).predict(TWO_LAYERS, SMOL)
