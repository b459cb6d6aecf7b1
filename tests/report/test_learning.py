"""The learning curve of a report: what was kept, how often the text was seen, and files of older
versions."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from archsearch.files import read_json, write_json
from archsearch.report import summary_text, write_html
from archsearch.report.learning import (
    curve_words,
    plot_learning,
    section_learning,
    trained,
)
from archsearch.report.phrases import count_words
from archsearch.report.reading import read_run
from archsearch.runs.candidate import TrainingRecord
from archsearch.runs.run import Run, open_run

OLD = Path(__file__).parents[1] / "fixtures" / "run-0.1.0" / "run"


def look(tokens: int, alpha: float, loss: float | None = 1.0) -> dict[str, Any]:
    return {
        "tokens": tokens,
        "seconds": tokens / 2000,
        "epochs": tokens / 50_000,
        "alpha": alpha,
        "loss": loss,
        "weights": "average",
    }


@pytest.fixture
def run(tmp_path: Path) -> Run:
    folder = tmp_path / "run"
    shutil.copytree(OLD, folder)
    return open_run(folder)


def learn(run: Run, **fields: Any) -> TrainingRecord:
    path = run.best_dir(1) / "training.json"
    write_json(path, {**read_json(path, "record"), **fields})
    return TrainingRecord.from_dict(read_json(path, "record"))


def test_a_training_that_went_on_too_long_keeps_its_best_weights(run: Run) -> None:
    looks = [look(8_000, 0.2, 2.2), look(560_000, 0.327, 0.9), look(5_800_000, 0.302, 0.18)]
    record = learn(
        run,
        tokens=5_800_000,
        distinct_tokens=24_000,
        epoch_tokens=50_000,
        looks=looks,
        kept=looks[1],
        stopped="held-out acceptance no longer rises",
    )
    assert record.epochs == 116 and record.kept is not None and record.kept.alpha == 0.327
    assert (
        curve_words(record)
        == "24k distinct tokens, 5.8M seen (116 epochs); training loss 2.20 -> 0.18; held-out alpha"
        " 0.327 at 560k tokens, whose weights are kept (0.302 at the end); stopped: held-out"
        " acceptance no longer rises"
    )
    said = " ".join(summary_text(run).split())
    assert "Learning curve:" in said and "24k distinct tokens, 5.8M seen (116 epochs)" in said
    page = write_html(run).read_text()
    assert (
        '<h2 id="part-learning-curve">Learning curve</h2>' in page
        and "weights that were kept" in page
        and "epochs" in page
    )


def test_what_was_learnt_by_heart_is_said_where_the_last_weights_were_kept(run: Run) -> None:
    looks = [look(8_000, 0.2, 2.2), look(560_000, 0.327, 0.9), look(5_800_000, 0.302, 0.18)]
    text = curve_words(learn(run, tokens=5_800_000, looks=looks))
    assert (
        "held-out alpha 0.302 at the end, 0.327 at 560k tokens: the rest was learnt by heart"
        in text
    )
    near = [
        look(8_000, 0.2),
        look(560_000, 0.309),
        look(5_800_000, 0.302),
    ]  # within what two looks differ by
    assert "by heart" not in curve_words(learn(run, tokens=5_800_000, looks=near))


def test_a_run_of_the_first_version_has_a_curve(run: Run) -> None:
    (record,) = trained(read_run(run))[:1]
    assert [each.tokens for each in record.looks] == [0, 225, 489] and record.looks[0].loss is None
    assert (
        record.looks[-1].loss == pytest.approx(0.289, abs=1e-3)
        and record.kept is None
        and record.epochs is None
    )
    assert "135 distinct tokens, 539 seen; " in curve_words(record)
    assert section_learning(read_run(run)).title == "Learning curve"
    assert plot_learning([record]) is not None and plot_learning([]) is None


def test_looks_without_loss_or_alpha(run: Run) -> None:
    record = learn(
        run,
        tokens=1_000,
        looks=[look(0, 0.1, None), {**look(500, 0.2), "alpha": None}, look(1_000, 0.2, None)],
    )
    assert len(record.looks) == 2 and "loss" not in curve_words(record)
    assert plot_learning([record]) is not None
    assert (
        curve_words(learn(run, looks=[], tokens=0, distinct_tokens=None, text_tokens=None))
        == "0 seen"
    )


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0"), (950, "950"), (1234, "1.2k"), (24_000, "24k"), (999_900, "1.0M"), (5.8e6, "5.8M")],
)
def test_counts_read_well(count: float, words: str) -> None:
    assert count_words(count) == words
