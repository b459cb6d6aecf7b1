"""Known answers: the paper's rows (arXiv 2402.01528), its public log, and limits that hold for any
speculation."""

import dataclasses
import math
import random

import numpy as np
import pytest

from archsearch import speedup as sp
from archsearch.estimate import Estimate
from archsearch.speedup import Tree, tau, tokens_by_budget

LOG = (
    0.2723,
    0.1580,
    0.0947,
    0.0673,
    0.4077,
)  # P(1..5 tokens per round), Wide-796M for LLaMA-65B on HellaSwag, gamma 4


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.9, 0.999999])
@pytest.mark.parametrize("gamma", [0, 1, 4, 8])
def test_tau_is_the_closed_form(alpha, gamma):
    assert sp.tau(alpha, gamma) == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha))


def test_tau_limits():
    assert sp.tau(1.0, 7) == 8.0
    assert sp.tau(0.0, 7) == 1.0
    assert sp.tau(1 - 1e-12, 7) == pytest.approx(8.0)


@pytest.mark.parametrize("alpha", [0.0, 0.05, 0.557, 0.97, 1.0])
def test_alpha_from_tau_inverts_tau(alpha):
    assert sp.alpha_from_tau(sp.tau(alpha, 6), 6) == pytest.approx(alpha, abs=1e-9)


@pytest.mark.parametrize(("value", "gamma"), [(0.9, 4), (5.1, 4), (1.0, 0)])
def test_alpha_from_tau_refuses_impossible(value, gamma):
    with pytest.raises(ValueError, match="tau must lie"):
        sp.alpha_from_tau(value, gamma)


def test_alpha_outside_0_1_is_refused():
    with pytest.raises(ValueError, match="alpha must lie"):
        sp.tau(1.2, 4)


def test_rounds_simulated_token_by_token_agree_with_tau():
    generator = random.Random(1)
    tokens = 0
    for _ in range(40_000):
        accepted = 0
        while accepted < 5 and generator.random() < 0.7:
            accepted += 1
        tokens += accepted + 1
    assert tokens / 40_000 == pytest.approx(sp.tau(0.7, 5), rel=0.01)


def test_speedup_is_tokens_over_the_round():
    times = (Estimate(value, 0.0, "given") for value in (3.0, 0.02, 0.036))
    assert sp.speedup_estimate(*times).value == pytest.approx(3.0 * 0.02 / 0.036)


def test_break_even():
    # facts of the literature: v = 1.12, c = 0.05, gamma 5 needs alpha of about 0.27; c = 0.15 about
    # 0.47
    assert sp.break_even_alpha(5, 1.0, 0.25 + 1.12) == pytest.approx(0.27, abs=0.01)
    assert sp.break_even_alpha(5, 1.0, 0.75 + 1.12) == pytest.approx(0.47, abs=0.01)
    assert sp.tau(sp.break_even_alpha(3, 1.0, 1.75), 3) == pytest.approx(1.75)
    assert sp.break_even_alpha(3, 1.0, 6.0) == math.inf
    assert sp.break_even_alpha(3, 1.0, 0.9) == 0.0


def _spread(function, draws=40_000):
    generator = random.Random(7)
    values = [function(generator) for _ in range(draws)]
    mean = sum(values) / draws
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / draws)


def _sum(*parts):
    return Estimate(
        sum(part.value for part in parts), math.hypot(*(part.std for part in parts)), "modelled"
    )


def test_speedup_std_agrees_with_sampling():
    alpha, drift = Estimate(0.7, 0.01, "prior"), Estimate(0.05, 0.01, "prior")
    tau = sp.tau_estimate(alpha, 4, drift)
    decode, verify = Estimate(0.030, 0.0006, "modelled"), Estimate(0.036, 0.0009, "modelled")
    draft, overhead = Estimate(0.012, 0.0008, "modelled"), Estimate(0.002, 0.0003, "measured")
    predicted = sp.speedup_estimate(tau, decode, _sum(draft, verify, overhead), verify)

    def draw(generator):
        def one(estimate):
            return generator.gauss(estimate.value, estimate.std)

        tokens = sp.tau_from_positions(sp.drifting_positions(one(alpha), one(drift), 4))
        return tokens * one(decode) / (one(draft) + one(verify) + one(overhead))

    mean, std = _spread(draw)
    assert predicted.value == pytest.approx(mean, rel=0.005)
    assert predicted.std == pytest.approx(std, rel=0.05)
    assert predicted.source == "prior"


def test_tau_std_without_drift_is_the_slope():
    tau = sp.tau_estimate(Estimate(0.6, 0.02, "measured"), 5)
    step = 1e-6
    slope = (sp.tau(0.6 + step, 5) - sp.tau(0.6 - step, 5)) / (2 * step)
    assert tau.std == pytest.approx(0.02 * slope, rel=1e-6)
    same = sp.tau_estimate(Estimate(0.6, 0.02, "measured"), 5, Estimate(0.0, 0.0, "given"))
    assert same.value == pytest.approx(tau.value) and same.std == pytest.approx(tau.std)


def test_shared_target_error_cancels():
    one = Estimate(1.0, 0.0, "measured")
    decode, verify, free = (
        Estimate(1.0, 0.1, "modelled"),
        Estimate(1.0, 0.1, "modelled"),
        Estimate(0.0, 0.0, "modelled"),
    )
    round_s = _sum(free, verify)
    assert sp.speedup_estimate(
        one, decode, round_s, verify, target_correlation=1.0
    ).std == pytest.approx(0.0, abs=1e-9)
    assert sp.speedup_estimate(one, decode, round_s, verify).std == pytest.approx(0.1 * 2**0.5)


def test_break_even_estimate():
    decode, draft, verify = (
        Estimate(1.0, 0.02, "modelled"),
        Estimate(0.25, 0.02, "modelled"),
        Estimate(1.12, 0.03, "measured"),
    )
    estimate = sp.break_even_estimate(5, decode, _sum(draft, verify))
    assert estimate.value == pytest.approx(sp.break_even_alpha(5, 1.0, 0.25 + 1.12))

    def draw(generator):
        times = [max(generator.gauss(e.value, e.std), 1e-9) for e in (decode, draft, verify)]
        return sp.break_even_alpha(5, times[0], sum(times[1:]))

    assert estimate.std == pytest.approx(_spread(draw, 4000)[1], rel=0.1)
    assert sp.break_even_estimate(2, decode, _sum(Estimate(4.0, 0.0, "modelled"), verify)) is None


def test_error_by_term_adds_up_to_the_error():
    measured = sp.RoundTerms(2.5, 0.020, 0.006, 0.022, 0.003)
    predicted = sp.RoundTerms(2.7, 0.021, 0.004, 0.025, 0.003)
    shares = sp.error_by_term(predicted, measured)
    gains = [terms.tau * terms.decode_s / terms.round_s for terms in (predicted, measured)]
    assert sum(dataclasses.astuple(shares)) == pytest.approx(math.log(gains[0] / gains[1]))
    assert shares.tau == pytest.approx(math.log(2.7 / 2.5)) and shares.decode_s == pytest.approx(
        math.log(21 / 20)
    )
    assert (
        shares.draft_s > 0 > shares.verify_s and shares.overhead_s == 0
    )  # too fast a draft flatters, too slow a check not
    assert set(dataclasses.astuple(sp.error_by_term(measured, measured))) == {0.0}


def test_error_by_term_where_the_rounds_agree_but_their_parts_do_not():
    measured = sp.RoundTerms(2.0, 0.02, 0.006, 0.020, 0.004)
    shares = sp.error_by_term(
        dataclasses.replace(measured, draft_s=0.010, verify_s=0.016), measured
    )
    assert shares.draft_s == pytest.approx(-0.004 / 0.030) and shares.verify_s == pytest.approx(
        0.004 / 0.030
    )


@pytest.mark.parametrize(
    ("alpha", "std", "gamma", "drift"),
    [(0.79, 0.07, 8, 0.05), (0.5, 0.15, 4, 0.0), (0.9, 0.04, 12, 0.1)],
)
def test_intervals_agree_with_sampling(alpha, std, gamma, drift):
    """5 and 95 % of alpha, tau and the speed-up against 40,000 draws; tau leans to the high side
    where alpha is high."""
    rng = np.random.default_rng(0)
    count = 40_000
    known, along = Estimate(alpha, std, "prior"), Estimate(-0.05, drift, "prior")
    level = sp.logit(alpha) + sp.logit_std(known) * rng.standard_normal(count)
    slope = along.value + along.std * rng.standard_normal(count)
    chances = 1.0 / (1.0 + np.exp(-(level[:, None] + slope[:, None] * np.arange(gamma))))
    taus = 1.0 + np.cumprod(chances, axis=1).sum(axis=1)
    times = [Estimate(0.04, 0.002, "modelled"), Estimate(0.057, 0.003, "modelled")]
    decode, rounds = (item.value + item.std * rng.standard_normal(count) for item in times)

    def close(found, drawn, tolerance):
        assert found == pytest.approx(np.quantile(drawn, [0.05, 0.95]), rel=tolerance)

    close(sp.alpha_interval(known), chances[:, 0], 0.01)
    middle = sp.tau_estimate(known, gamma, along)
    bounds = sp.tau_interval(known, gamma, along)
    close(bounds, taus, 0.02)
    gain = sp.speedup_estimate(middle, *times)
    close(sp.speedup_interval(gain, middle.between(bounds), gamma), taus * decode / rounds, 0.03)


def test_intervals_of_what_is_known_are_points():
    sure = Estimate(0.8, 0.0, "given")
    value = sp.tau(0.8, 4)
    assert sp.alpha_interval(sure) == pytest.approx((0.8, 0.8))
    assert sp.tau_interval(sure, 4) == pytest.approx((value, value)) and sp.tau_interval(
        sure, 0
    ) == (1.0, 1.0)
    known = Estimate(value, 0.0, "given")
    assert sp.speedup_interval(Estimate(2.0, 0.0, "given"), known, 4) == (2.0, 2.0)
    # an unsure host: 1.6 tokens a round are at most 1.6 times as fast, unless a plain step is the
    # longer of the two
    low, high = sp.speedup_interval(Estimate(1.2, 0.8, "modelled"), Estimate(1.6, 0.0, "given"), 1)
    assert low < 0.6 and high == 1.6
    high = sp.speedup_interval(Estimate(2.0, 1.0, "modelled"), Estimate(1.6, 0.0, "given"), 1)[1]
    assert high == pytest.approx(2.5)
    low, high = sp.alpha_interval(Estimate(0.0, 0.01, "measured"))
    assert low == 0.0 and 0.0 < high < 0.1


def test_a_tree_of_one_branch_is_a_chain_and_further_branches_bring_tokens() -> None:
    chain = [0.7, 0.6, 0.5]
    assert Tree(1, 3, 4).tau(chain) == pytest.approx(sp.tau_from_positions(chain))
    wide = [Tree(4, 3, tokens).tau(chain) for tokens in (4, 8, 16, 32)]
    assert wide == sorted(wide)
    assert wide[-1] < 4.0
    assert Tree(4, 3, 8).alpha(Tree(4, 3, 8).tau([0.6] * 3)) == pytest.approx(0.6)


@pytest.mark.parametrize("tree", [(4, 5, 5), (0, 1, 2), (1, 3, 5), (2, 40, 50)])
def test_what_is_no_tree_is_refused(tree: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="tree"):
        Tree(*tree)


def test_trees_published_of_one_head_are_within_ten_percent() -> None:
    """Tokens a round of an EAGLE-3 head of Qwen3-8B in SGLang 0.5.3 (gpustack)."""
    for tree, published in (((4, 2, 16), 2.47), ((4, 4, 16), 2.95), ((4, 8, 16), 3.26)):
        made = Tree(*tree)
        assert made.tau([0.64] * made.steps) == pytest.approx(published, rel=0.1)


def test_tokens_by_budget_are_the_likeliest_first() -> None:
    """Alike requests fill position after position; forecasts bring more of the same tokens sooner."""
    alike, told = (tokens_by_budget(0.7, 4, known, requests=100) for known in (0.0, 0.4))
    for verified in range(5):
        assert alike[100 * verified] == pytest.approx(tau(0.7, verified))
    assert told[0] == 1.0 and told[-1] == pytest.approx(tau(0.7, 4))
    assert (told[1:-1] > alike[1:-1]).all() and (told[1:] >= told[:-1]).all()
