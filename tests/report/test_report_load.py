"""What engines tell about their passes, load files and schedules in the report."""

from __future__ import annotations

import math
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from archsearch import report
from archsearch.estimate import Estimate
from archsearch.files import write_json
from archsearch.report.reading import read_run
from archsearch.runs.confirmed import TermErrors
from archsearch.runs.run import Run, open_run
from archsearch.speedup import RoundTerms
from tests.report.test_report import Page, keep, kept, make_run, page_of


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A small run in each state, made once; without trials.csv, whose pictures cost half a second a
    page."""
    made = {}
    for state in ("searched", "trained", "confirmed"):
        run = make_run(tmp_path_factory.mktemp(state), state, trials=12, keep=3)
        run.trials_file.unlink()
        made[state] = run.path
    return made


@pytest.fixture
def run_of(folders, tmp_path):
    """`run_of(state)`: a copy of its run that the test may change."""
    return lambda state: open_run(shutil.copytree(folders[state], tmp_path / state))


def terms_of(
    predicted: dict[str, float], measured: dict[str, float]
) -> dict[str, dict[str, float]]:
    """error_by_term as pipeline.confirm writes it."""
    return TermErrors.between(RoundTerms(**predicted), RoundTerms(**measured)).to_dict()


PREDICTED = {
    "tau": 2.4,
    "decode_s": 0.040,
    "draft_s": 0.010,
    "verify_s": 0.050,
    "overhead_s": 0.002,
}
MEASURED = {
    "tau": 2.3,
    "decode_s": 0.041,
    "draft_s": 0.0123,
    "verify_s": 0.0456,
    "overhead_s": 0.0037,
}


def tell_terms(run: Run, **changes) -> None:
    """Rank 1's confirmation as an engine that tells its passes leaves it."""
    row = {
        "engine": "openvino",
        "engine_version": "2026.1",
        "draft_s": 0.0123,
        "verify_s": 0.0456,
        "rest_s": 0.0037,
        "error_by_term": terms_of(PREDICTED, MEASURED),
        "relative_error": 0.031,
        "latency": "profile x",
        "seconds": 12.5,
    }
    keep(run, 1, {**kept(run), **row, **changes})


def write_load(
    run: Run,
    rank: int = 1,
    *,
    synthetic: bool = True,
    engine: str = "vllm",
    gain: float = 1.8,
    **changes,
) -> None:
    """load-<engine>.json with gammas 1 and 3 and a schedule at 1 and 4 requests in flight, as
    pipeline.confirm writes it."""
    rows = []
    for variant, gammas in (("gamma 1", (1, 1)), ("gamma 3", (3, 3)), ("schedule", (3, 0))):
        for concurrency, gamma in zip((1, 4), gammas, strict=True):
            speedup = (
                1.0
                if not gamma
                else gain * (2 / 3 if concurrency == 4 else 1.0) - 0.1 * (gamma == 1)
            )
            rows.append(
                {
                    "variant": variant,
                    "concurrency": concurrency,
                    "gamma": gamma,
                    "tau": 2.3 if gamma else 1.0,
                    "tokens_per_s": 71.7,
                    "baseline_tokens_per_s": 39.3,
                    "speedup": Estimate(speedup, 0.03, "measured").to_dict(),
                    "speedup_interval": [speedup - 0.05, speedup + 0.06],
                    "predicted_speedup": (
                        Estimate(1.1 * speedup if gamma else 1.0, 0.2, "prior").to_dict()
                    ),
                    "relative_error": 0.1 if gamma else None,
                    "relative_error_at_measured_tau": 0.08 if gamma else None,
                    "error_by_term": terms_of(PREDICTED, MEASURED) if gamma else None,
                }
            )
    fast, slow, off = (Estimate(value, 0.03, "measured").to_dict() for value in (gain, 1.35, 1.0))
    verdict = [
        {
            "concurrency": 1,
            "gamma": 3,
            "speedup": fast,
            "best_other": "gamma 3",
            "best_other_speedup": fast,
            "holds": True,
        },
        {
            "concurrency": 4,
            "gamma": 0,
            "speedup": off,
            "best_other": "gamma <1>",
            "best_other_speedup": slow,
            "holds": False,
        },
    ]
    data = {
        "engine": engine,
        "engine_version": "0.32.0",
        "rank": rank,
        "architecture": "",
        "dtype": "bfloat16",
        "synthetic": synthetic,
        "asked_acceptance_by_position": [0.62, 0.38, 0.24] if synthetic else None,
        "context": 160,
        "repeats": 5,
        "latency": "a profile of <this> device",
        "baseline": [],
        "rows": rows,
        "seconds": 99.0,
        "summary": {
            "cases": 5,
            "median_absolute_error": 0.1,
            "within_5_percent": 0.2,
            "within_10_percent": 0.6,
        },
        "schedule": {"ranges": [[1, 1, 3], [2, 4, 0]], "verdict": verdict},
        **changes,
    }
    write_json(run.best_dir(rank) / f"load-{engine}.json", data)


def write_plan(run: Run, rank: int = 1) -> None:
    """schedule.json as pipeline.schedule writes it."""
    points = []
    for batch, gamma in ((1, 4), (8, 2), (64, 0)):
        by_gamma = {
            str(g): (
                Estimate(
                    (2.0 - 0.01 * (g - gamma) ** 2) if gamma else 0.9, 0.1, "modelled"
                ).to_dict()
            )
            for g in (2, 4)
        }
        speedup = by_gamma[str(gamma)] if gamma else Estimate(0.97, 0.01, "modelled").to_dict()
        tau = Estimate(2.5, 0.1, "measured").to_dict()
        points.append(
            {
                "batch_size": batch,
                "gamma": gamma,
                "tau": tau,
                "speedup": speedup,
                "by_gamma": by_gamma,
            }
        )
    plan = {
        "engine": "vllm",
        "latency": "a profile",
        "ranges": [[1, 2, 4], [3, 22, 2], [23, 64, 0]],
        "points": points,
    }
    write_json(run.best_dir(rank) / "schedule.json", plan)


def flat(page: Page) -> str:
    """The words of a page, cells of a table apart."""
    return " ".join(page.spaced.split())


def test_terms_the_engine_told_are_shown_with_what_each_brings(run_of):
    run = run_of("confirmed")
    before = flat(page_of(run))
    untold = "draft, verify and overhead have no measured value of their own"
    assert untold in before and "part of the speed-up's error" not in before
    tell_terms(run)
    page = page_of(run)
    text = flat(page)
    assert (
        untold not in text
        and "measured draft, verify, overhead are medians over whole rounds" in text
    )
    assert "12.30 measured" in text and "45.60 measured" in text and "3.70 measured" in text
    section = text[text.index("part of the speed-up's error") :]
    shares = TermErrors.from_dict(kept(run)["error_by_term"]).shares(0.031)
    assert sum(shares.values()) == pytest.approx(0.031, abs=1e-12)
    for name, share in shares.items():
        assert f"{share:+.1%}" in section, name
    assert "rest" in section and "+3.1%" in section
    tell_terms(run, verify_s=None, rest_s=None, error_by_term=None)
    part = flat(page_of(run))
    assert (
        "measured draft are medians" in part
        and "It did not report verify, overhead" in part
        and "12.30 measured" in part
    )
    assert "part of the speed-up's error" not in part


def test_shares_of_the_error_add_up_and_keep_their_signs():
    terms = TermErrors.from_dict(terms_of(PREDICTED, MEASURED))
    exact = math.expm1(math.fsum(asdict(terms.log_error).values()))
    shares = terms.shares(exact)
    assert shares["rest"] == pytest.approx(0.0, abs=1e-12) and math.fsum(
        shares.values()
    ) == pytest.approx(exact)
    assert (
        shares["tau"] > 0
        and shares["decode_s"] < 0
        and shares["draft_s"] > 0
        and shares["verify_s"] < 0
    )
    assert math.fsum(terms.shares(0.0).values()) == pytest.approx(0.0, abs=1e-12)


def test_a_shape_measured_before_training_is_told_and_not_called_confirmed(run_of):
    run = run_of("searched")
    write_load(run)
    head, text = report.summary_text(run).split("\n\n")[0], flat(page_of(run))
    said = " ".join(head.split())
    assert (
        "Not trained yet; in vLLM 0.32.0 with synthetic acceptance at the predicted alpha" in said
    )
    assert (
        "1.80x at 1 request in flight (gamma 3, predicted 1.98x), 1.20x at 4 (gamma 3, predicted"
        " 1.32x)" in said
    )
    assert (
        "Not confirmed: this draft has no weights yet" in said
        and "Confirmed" not in said
        and "predicted" in head.splitlines()[0]
    )
    for words in (
        "Under load in vLLM 0.32.0: rank 1",
        "Acceptance was synthetic",
        "0.62, 0.38, 0.24 by position",
        "the text is not the target's",
        "1.75x to 1.86x",
        "+10.0%",
        "5 cases: median absolute error 10.0%, 20% within 5 %, 60% within 10 %",
        "Schedule that was run: 1: 3, 2-4: off.",
        "gamma <1>",
        "NO",
        "a profile of <this> device",
        "synthetic acceptance takes out",
    ):
        assert words in text, words
    page = page_of(run)
    assert page.charts == 1 and len(page.ids) == len(set(page.ids))
    assert all(
        ref[1:] in page.ids for ref in page.refs
    ) and "<this>" not in run.report_file.read_text(encoding="utf-8")
    assert read_run(run).candidates[0].stage == "searched" and all(
        len(line) <= 100 for line in head.splitlines()
    )


@pytest.mark.parametrize(("gain", "answer"), [(1.8, "pay"), (0.6, "does not pay")])
def test_the_run_s_own_engine_overrules_the_prediction(run_of, gain, answer):
    run = run_of("searched")
    write_load(run, engine="transformers", gain=gain)
    title = report.summary_text(run).splitlines()[0]
    assert f"{gain:.2f}x with synthetic acceptance" in title and answer in title
    assert ("does not" in title) == (gain < 1)
    write_load(
        run, engine="transformers", gain=gain, synthetic=False
    )  # says real, but there are no weights: not believed
    assert "x predicted" in report.summary_text(run).splitlines()[0]


def test_load_of_a_trained_draft_and_alpha_measured_since(run_of):
    run = run_of("trained")
    write_load(run, synthetic=False, alpha=run.score(1).alpha.to_dict())
    said, text = " ".join(report.summary_text(run).split()), flat(page_of(run))
    assert (
        "Under load in vLLM 0.32.0, with the draft's own acceptance: 1.80x" in said
        and "measured anew" not in said
    )
    assert (
        "Acceptance was real" in text
        and "synthetic" not in text
        and "no engine has run it" not in text
    )
    write_load(run, synthetic=False, alpha=0.3)
    assert "measured anew since" in " ".join(
        report.summary_text(run).split()
    ) and "has changed since" in flat(page_of(run))
    write_load(run, synthetic=True)
    assert "not the draft's own: 1.80x" in " ".join(report.summary_text(run).split())


def test_gamma_by_batch_size(run_of):
    run = run_of("searched")
    write_plan(run)
    page = page_of(run)
    text = flat(page)
    assert (
        "Gamma by batch size, predicted for vLLM: rank 1" in text
        and "Schedule: 1-2: 4, 3-22: 2, 23-64: off." in text
    )
    assert (
        "64 off - 0.97x ± 0.01 modelled" in text
        and "1 4 2.50 ± 0.10 measured 2.00x ± 0.10 modelled" in text
    )
    assert page.charts == 1
    assert "Gamma by batch size, predicted for vLLM: 1-2: 4, 3-22: 2, 23-64: off." in " ".join(
        report.summary_text(run).split()
    )


@pytest.mark.parametrize(
    "name", ["score", "confirmed", "training", "load-vllm", "schedule", "rungs"]
)
@pytest.mark.parametrize(
    "content", ['{"rows": [', '{"engine": "vllm", "rows": [], "rungs": [{"rung": 1}]}']
)
def test_a_broken_file_costs_its_own_part_only(run_of, name, content):
    run = run_of("confirmed")
    write_load(run, 2)
    write_plan(run)
    folder = {"load-vllm": run.best_dir(2), "rungs": run.path}.get(name, run.best_dir(1))
    (folder / f"{name}.json").write_text(content)
    said, text = " ".join(report.summary_text(run).split()), flat(page_of(run))
    assert said.count("WARNING:") == 1 and f"{name}.json" in said
    assert "Files that could not be read" in text and f"{name}.json" in text
    kept = {
        "score": "rank 2",
        "confirmed": "Predicted beside measured",
        "load-vllm": "Under load in",
        "schedule": "Gamma by batch size, predicted",
    }
    gone = {"score": ("confirmed", "schedule")}.get(name, (name,))
    for part, words in kept.items():
        assert (words in text) == (part not in gone), part


def test_what_is_not_a_number_is_not_drawn(run_of):
    run = run_of("searched")
    write_load(run, context=float("nan"))
    assert "load-vllm.json is not what archsearch writes" in flat(
        page_of(run)
    ) and "Under load" not in flat(page_of(run))
