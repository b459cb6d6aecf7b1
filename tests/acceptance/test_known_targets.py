"""Targets that the table knows: what their published drafts say about a new one."""

from __future__ import annotations

import math

import numpy as np
import pytest

from archsearch.acceptance.estimator import AcceptanceContext
from archsearch.acceptance.known_targets import known_target
from archsearch.acceptance.learnt import training_of
from archsearch.acceptance.prior import PriorAcceptance
from archsearch.acceptance.published import Levels, Query, Spread, coefficients_for, design
from archsearch.acceptance.terms import COEFFICIENTS, load_fit
from archsearch.architecture import catalogue
from archsearch.architecture.architecture import Architecture
from archsearch.models.targets import TargetRef, resolve_target
from archsearch.speedup import logit, logit_std
from benchmarks.acceptance_fit import Fitted, where


def shape(name: str) -> Architecture:
    return catalogue.load(name).architecture


@pytest.fixture(scope="module")
def levels() -> Levels:
    fit = load_fit()
    return Levels(design(drifts=fit.drift), Spread(**fit.spread))


def test_a_target_is_known_by_its_shape_and_named() -> None:
    known = known_target(shape("llama-65b"))
    assert known is not None and known.words.startswith("3 published drafts of LLaMA-65B")
    fine_tune = shape("qwen3-8b").replace(rope_theta=5e6)
    assert known_target(fine_tune) is not None and "Qwen3-8B" in known_target(fine_tune).words
    assert known_target(shape("llama-3.1-405b")).words.startswith("those of")  # its family only
    assert (
        known_target(shape("opt-13b")) is None
        and known_target(Architecture(640, 1536, 30, 8, 8, 80, 49152)) is None
    )


def test_nothing_known_is_the_stored_fit(levels: Levels) -> None:
    stored = load_fit()
    mean, covariance = coefficients_for(levels, Query())
    assert mean == pytest.approx(stored.mean, abs=1e-4) and covariance == pytest.approx(
        stored.covariance, abs=1e-4
    )


@pytest.mark.parametrize("name", ["llama-65b", "llama-3.1-8b", "qwen3-32b", "smollm2-135m"])
def test_knowing_more_is_never_less_sure(name: str) -> None:
    stored, known = load_fit(), known_target(shape(name))
    for term in ("intercept", "domain chat", "lot target", "lot shared", "lot eagle3"):
        number = COEFFICIENTS.index(term)
        assert known.covariance[number, number] <= stored.covariance[number, number] + 1e-6
    assert (np.linalg.eigvalsh(known.covariance) > -1e-9).all()


def test_drafts_of_one_family_move_its_other_sizes_and_no_stranger() -> None:
    draft = Architecture(1024, 3072, 4, 16, 8, 64, 151936)
    stds = {}
    for name in ("qwen3-8b", "qwen2.5-7b"):
        alpha = PriorAcceptance().predict(draft, AcceptanceContext(shape(name))).alpha
        stds[name] = logit_std(alpha)
    assert stds["qwen3-8b"] < stds["qwen2.5-7b"] - 0.05


def test_a_left_out_draft_of_llama_65b_is_predicted_from_the_others(levels: Levels) -> None:
    """The paper's two 1.3B drafts, one from the other and from everything else."""
    rows = levels.rows
    for start in ("Sheared-LLaMA-1.3B-style", "Wide-Sheared-LLaMA-1.3B"):
        out = np.array(
            [label.rpartition("|")[2].startswith(start) for label in rows.groups["draft"]]
        )
        assert out.sum() == 1
        mean, std = Fitted(where(rows, ~out), levels.spread).predict(where(rows, out))
        assert abs(mean[0] - rows.y[out][0]) < 0.1 and std[0] < 0.3


def test_who_trained_a_draft() -> None:
    def said(draft: str, target: str) -> str:
        return training_of(resolve_target(draft), resolve_target(target))[0]

    assert (
        said("llama-3.2-1b", "llama-3.1-70b") == "shared"
        and said("wide-796m", "llama-65b") == "shared"
    )
    assert (
        said("llama-160m", "vicuna-7b") == "other" and said("qwen3-0.6b", "qwen2.5-72b") == "other"
    )
    unknown = TargetRef("mine", Architecture(512, 1408, 4, 8, 8, 64, 32000))
    training, doubt = training_of(unknown, resolve_target("llama-65b"))
    assert training == "target" and "--training" in doubt


def test_a_draft_of_ours_was_made_for_its_target(tmp_path) -> None:
    (tmp_path / "training.json").write_text("{}")
    ours = TargetRef("ours", shape("llama-160m"), folder=tmp_path)
    assert training_of(ours, resolve_target("vicuna-7b")) == ("target", "")


def test_published_pairs_as_they_come() -> None:
    """Pairs of the table, asked as a user would; within two std of what was published."""
    cases = [
        ("qwen3-32b", "qwen3-1.7b", "shared", "code", 0.0, 0.714),
        ("llama-3.3-70b", "llama-3.2-1b", "shared", "code", 0.0, 0.884),
        ("vicuna-7b", "llama-160m", "other", "math", 0.5, 0.58),
    ]
    for target, draft, training, domain, temperature, published in cases:
        context = AcceptanceContext(shape(target), temperature, domain=domain, training=training)
        alpha = PriorAcceptance().predict(shape(draft), context).alpha
        assert abs(logit(alpha.value) - logit(published)) < 2 * logit_std(alpha)
        assert math.isfinite(alpha.std)
