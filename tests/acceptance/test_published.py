"""The table of published measurements, the regression over it, and drift along the block."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from archsearch.acceptance.estimator import DRAFTERS
from archsearch.acceptance.published import (
    EFFECTS,
    Design,
    Spread,
    design,
    level_alpha,
)
from archsearch.acceptance.table import (
    OWN_STUDY,
    PUBLISHED_FILE,
    STUDY_FILE,
    load_published,
    load_shape_study,
)
from archsearch.acceptance.terms import COEFFICIENTS, Term, load_fit, prior_of
from archsearch.errors import ArchsearchError
from archsearch.speedup import alpha_from_tau, drifting_positions, sigmoid, tau, tau_from_positions
from benchmarks.acceptance_fit import (
    Fitted,
    Sweep,
    best_spread,
    fit_all,
    inputs_hash,
    learn_drifts,
    sweep_errors,
    sweeps,
    where,
)


@pytest.fixture(scope="module")
def rows():
    return load_published()


def test_every_row_has_its_source(rows) -> None:
    assert len(rows) > 700 and len({row.id for row in rows}) == len(rows)
    for row in rows:
        assert row.source_title and row.source_ref and row.conversion and row.metric, row.id
        assert row.draft and row.target and row.family in DRAFTERS
        assert 0 < row.alpha < 1
    levels = [row for row in rows if row.level]
    assert len(levels) > 450 and len({row.study for row in levels}) > 18
    assert sum(row.family == "independent" for row in levels) > 40
    assert all(row.domain for row in levels)


def test_conversions_are_those_of_the_definition(rows) -> None:
    """alpha of a row whose tau was inverted gives that tau back."""
    checked = 0
    for row in rows:
        if row.tau and row.gamma and "inverted" in row.conversion and "tree" not in row.conversion:
            assert tau(row.alpha, row.gamma) == pytest.approx(row.tau, rel=2e-3), row.id
            checked += 1
    assert checked > 500


@pytest.mark.parametrize(
    ("id", "alpha", "training", "study"),
    [
        (
            "obs0001",
            0.75,
            "shared",
            "arXiv:2211.17192",
        ),  # Leviathan et al., table 3: T5-small, English to German, greedy
        (
            "obs0051",
            0.76,
            "target",
            "arXiv:2310.07177",
        ),  # Online Speculative Decoding: llama-160m distilled, Spider
        ("nemo-1.7b-t1-4", alpha_from_tau(1 + 4 * 0.5587, 4), "shared", "NVIDIA-NeMo/RL#2059"),
    ],
)
def test_known_rows(rows, id, alpha, training, study) -> None:
    row = next(row for row in rows if row.id == id)
    assert (
        row.alpha == pytest.approx(alpha, abs=1e-4)
        and row.training == training
        and row.study == study
    )


def test_a_broken_row_is_named(tmp_path) -> None:
    lines = PUBLISHED_FILE.read_text().splitlines(keepends=True)
    body = [line for line in lines if not line.startswith("#")]
    path = tmp_path / "table.csv"
    path.write_text("".join([body[0], body[1].replace(",0.75,", ",seven,")]))
    with pytest.raises(ArchsearchError, match="obs0001.*head of the file"):
        load_published(path)


def test_a_row_says_how_its_draft_came_to_be(rows, tmp_path) -> None:
    header, first = [
        line
        for line in PUBLISHED_FILE.read_text().splitlines(keepends=True)
        if not line.startswith("#")
    ][:2]
    path = tmp_path / "table.csv"
    path.write_text(header + first.replace(",pretrained,", ",,"))
    with pytest.raises(
        ArchsearchError, match="'obs0001' is broken: init '' is none of random, target_layers"
    ):
        load_published(path)
    path.write_text(header + first.replace(",pretrained,1e+12,,0,", ",pretrained,,,,"))
    with pytest.raises(ArchsearchError, match="pretrain_tokens or distill_tokens"):
        load_published(path)
    by_id = {row.id: row for row in rows}
    assert by_id["obs0903"].training == "target" and by_id["obs0903"].distill_tokens == 1.26e8
    assert by_id["obs0051"].pretrain_tokens == 1.5e10 and by_id["obs0051"].temperature == 0.0
    assert by_id["obs0044"].init == "pruned" and by_id["obs0044"].parent_tokens == 1e12


def test_the_study_of_shapes_is_read_and_a_broken_row_is_named(tmp_path) -> None:
    study = load_shape_study()
    assert len({anchor.architecture for anchor in study}) >= 45
    assert all(
        0 < anchor.alpha < 1 and anchor.std > 0 and anchor.target == "smollm2-135m"
        for anchor in study
    )
    lines = [
        line
        for line in STUDY_FILE.read_text().splitlines(keepends=True)
        if not line.startswith("#")
    ]
    path = tmp_path / "study.csv"
    path.write_text(lines[0] + lines[1].rstrip("\n").rpartition(",")[0] + ",wide\n")
    with pytest.raises(ArchsearchError, match="row 1.*head of the file"):
        load_shape_study(path)


def test_feature_drafters_are_brought_to_one_gamma(rows) -> None:
    drifts = {
        "feature": Term(-0.15, 0.1),
        "block": Term(-0.05, 0.1),
        "greedy": Term(0, 0.1),
        "sampled": Term(0, 0.1),
    }
    positions = drifting_positions(0.8, -0.15, 7)
    row = next(
        row
        for row in rows
        if row.family == "eagle3"
        and row.gamma == 7
        and row.temperature == 0.0
        and not row.positions
    )
    at = {g: tau_from_positions(positions[:g]) for g in (3, 5, 7)}
    found = [
        level_alpha(replace(row, gamma=g, tau=t, alpha=alpha_from_tau(t, g)), drifts)
        for g, t in at.items()
    ]
    assert found == pytest.approx([found[1]] * 3, abs=1e-6)
    alone = replace(row, family="independent", alpha=0.6)
    assert level_alpha(alone, drifts) == 0.6


def test_the_stored_fit_is_that_of_the_table() -> None:
    """published_fit.json, made again from published.csv and anchors.yaml."""
    stored = load_fit()
    assert stored.inputs == inputs_hash(), "the table changed: python benchmarks/acceptance_fit.py"
    again = fit_all(Spread(**stored.spread))
    assert again.mean == pytest.approx(stored.mean, abs=5e-3)
    assert np.sqrt(np.diag(again.covariance)) == pytest.approx(
        np.sqrt(np.diag(stored.covariance)), abs=5e-3
    )
    assert {k: v.mean for k, v in again.drift.items()} == pytest.approx(
        {k: v.mean for k, v in stored.drift.items()}, abs=1e-3
    )


def made_up(slope: float, seed: int = 0, studies: int = 12) -> Design:
    """Studies with random levels whose drafts differ in size by `slope` per decade."""
    rng = np.random.default_rng(seed)
    x, y, study, draft = [], [], [], []
    for s in range(studies):
        level = 0.5 + 0.5 * rng.standard_normal()
        for d in range(5):
            terms = np.zeros(len(COEFFICIENTS))
            terms[COEFFICIENTS.index("intercept")] = terms[COEFFICIENTS.index("domain chat")] = 1.0
            terms[COEFFICIENTS.index("size")] = size = rng.uniform(-1.5, 1.5)
            x.append(terms)
            y.append(level + slope * size + 0.05 * rng.standard_normal())
            study.append(f"s{s}")
            draft.append(f"s{s}d{d}")
    labels = tuple(study)
    groups = dict.fromkeys(EFFECTS, ("",) * len(y)) | {"study": labels, "draft": tuple(draft)}
    return Design(np.array(x), np.array(y), np.full(len(y), 0.03), groups)


@pytest.mark.parametrize("slope", [0.1, 0.6])
def test_the_regression_finds_a_planted_slope_and_the_spread_of_studies(slope: float) -> None:
    rows = made_up(slope)
    spread = best_spread(rows)
    levels = Fitted(rows, spread)
    index = COEFFICIENTS.index("size")
    std = math.sqrt(levels.covariance[index, index])
    assert abs(levels.mean[index] - slope) < 2 * std and std < 0.05
    assert 0.3 < spread.study < 0.8
    assert math.hypot(spread.residual, spread.draft) < 0.15
    # a term that no row varies keeps its prior
    window = COEFFICIENTS.index("cut_by_window")
    assert levels.mean[window] == pytest.approx(-0.04) and levels.covariance[
        window, window
    ] == pytest.approx(0.06**2)


def test_one_large_study_does_not_bind_all_others() -> None:
    """Forty drafts of one study agree about a slope: another study's may still differ as much as
    studies do."""
    rows = made_up(0.6, studies=8)
    one = replace(rows, groups={**rows.groups, "study": ("s0",) * len(rows)})
    index = COEFFICIENTS.index("size")
    found = {
        slope: Fitted(one, Spread(study=0.5, draft=0.05, residual=0.05, slope=slope))
        for slope in (1e-6, 0.5)
    }
    bound, free = (math.sqrt(levels.covariance[index, index]) for levels in found.values())
    assert bound < 0.06 < free
    of_size = prior_of("size").std
    assert free == pytest.approx(
        math.sqrt(1 / (1 / of_size**2 + 1 / (0.5 * of_size) ** 2)), rel=0.1
    )
    # Within that study itself it is as sure as before.
    at = where(one, [True, *([False] * (len(one) - 1))])
    far = replace(at, x=at.x * np.where(np.arange(len(COEFFICIENTS)) == index, 3.0, 1.0))
    assert found[0.5].predict(far)[1][0] == pytest.approx(found[1e-6].predict(far)[1][0], rel=0.3)


def test_the_posterior_is_that_of_generalised_least_squares() -> None:
    """Against ridge on columns scaled by their prior std, every study and draft a column of its
    own."""
    rows, spread = (
        made_up(0.3, seed=1, studies=4),
        Spread(study=0.5, draft=0.15, residual=0.1, slope=0.0),
    )
    levels = Fitted(rows, spread)
    terms = [prior_of(name) for name in COEFFICIENTS]
    columns = [rows.x * np.array([term.std for term in terms])]
    for name in ("study", "draft"):
        known = sorted(set(rows.groups[name]))
        columns.append(
            spread.effect(name)
            * np.array(
                [[label == one for one in known] for label in rows.groups[name]], dtype=float
            )
        )
    noise = np.sqrt(spread.residual**2 + rows.noise**2)[:, None]
    y = (rows.y - rows.x @ np.array([term.mean for term in terms])) / noise[:, 0]
    z = np.hstack(columns) / noise
    covariance = np.linalg.inv(z.T @ z + np.eye(z.shape[1]))
    size = len(COEFFICIENTS)
    scale = np.array([term.std for term in terms])
    assert levels.mean == pytest.approx(
        np.array([t.mean for t in terms]) + scale * (covariance @ z.T @ y)[:size], abs=1e-8
    )
    assert levels.covariance == pytest.approx(
        scale[:, None] * covariance[:size, :size] * scale, abs=1e-8
    )
    # a fitted row asked again: what it shares with the others is known, its own noise is not
    mean, std = levels.predict(rows)
    assert np.abs(mean - rows.y).mean() < 0.1 and std.max() < 0.3


def test_own_anchors_are_a_study_of_their_own() -> None:
    drifts = load_fit().drift
    with_anchors, without = design(drifts=drifts), design(drifts=drifts, anchors=False)
    assert len(with_anchors) - len(without) == 8 + len(load_shape_study())
    assert OWN_STUDY in with_anchors.study and OWN_STUDY not in without.study
    assert (
        with_anchors.x.shape[1] == len(COEFFICIENTS)
        and COEFFICIENTS[: len(COEFFICIENTS)] == COEFFICIENTS
    )


def chain(
    name: str,
    study: str,
    family: str,
    temperature: float,
    alpha: float,
    drift: float,
    gammas=range(1, 9),
) -> Sweep:
    positions = drifting_positions(alpha, drift, max(gammas))
    return Sweep(
        name, study, family, temperature, {g: tau_from_positions(positions[:g]) for g in gammas}
    )


def test_drift_is_learnt_and_predicts_larger_gammas() -> None:
    alphas = {"a": 0.6, "b": 0.7, "c": 0.75, "d": 0.8, "e": 0.65, "f": 0.7}
    learnt = learn_drifts(
        [chain(name, name, "eagle3", 0.0, alpha, -0.2) for name, alpha in alphas.items()]
    )
    assert -0.22 < learnt["feature"].mean < -0.15 and learnt["feature"].std > 0.1
    assert learnt["sampled"].mean == pytest.approx(0.0, abs=1e-9)  # nothing was seen of it
    new = chain("n", "n", "eagle1", 1.0, 0.72, -0.2)
    learnt_error, closed = sweep_errors(new, learnt["feature"].mean), sweep_errors(new, 0.0)
    assert np.abs(learnt_error).max() < 0.03 < np.abs(closed).max()
    assert sweep_errors(new, -0.2) == pytest.approx(np.zeros(7), abs=1e-6)


def test_one_study_alone_does_not_settle_the_drift() -> None:
    one = learn_drifts([chain("a", "a", "independent", 0.0, 0.6, 0.3)])["greedy"]
    many = learn_drifts([chain(f"a{i}", "a", "independent", 0.0, 0.6, 0.3) for i in range(20)])[
        "greedy"
    ]
    assert 0.05 < one.mean < 0.25
    assert (many.mean, many.std) == pytest.approx((one.mean, one.std))


def test_sweeps_of_the_table() -> None:
    found = {sweep.name: sweep for sweep in sweeps()}
    nemo = found["nemo-1.7b-t1"]
    assert nemo.kind == "sampled" and nemo.taus == pytest.approx(
        {1: 1.7904, 2: 2.4186, 4: 3.2348, 7: 4.0044, 10: 4.329}
    )
    log = found[
        "dsd-log"
    ]  # arXiv 2402.01528's demo: TAR 3.18 at gamma 4, acceptance rising along the block
    assert (
        log.kind == "greedy"
        and log.taus[4] == pytest.approx(3.18, abs=0.01)
        and log.taus[1] == pytest.approx(1.728, abs=0.01)
    )
    assert {sweep.kind for sweep in found.values()} == {"greedy", "sampled", "feature", "block"}
    assert sigmoid(0) == 0.5  # the closed form is the case of no drift
    flat = Sweep("x", "x", "independent", 1.0, {1: 1.7, 4: tau(0.7, 4)})
    assert sweep_errors(flat, 0.0) == pytest.approx([0.0], abs=1e-9)
