"""budgets.json: what is written is read back, and what is none is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.needs import NOTHING, Needs
from archsearch.records import load, save
from archsearch.runs.tables import BUDGETS_FILE, BudgetDrafter, BudgetRow, Budgets

LOOKUP = BudgetDrafter(
    "ngram", "n-gram", NOTHING, 5, Estimate(0.45, 0.1, "prior"), Estimate(1.5, 0.2, "modelled")
)
TRAINED = BudgetDrafter(
    "eagle3",
    "1x4096",
    Needs(
        "training",
        tokens=1e8,
        text_hours=3.0,
        teacher_hours=1.0,
        training_hours=0.5,
        source="modelled",
    ),
    4,
    Estimate(0.64, 0.1, "prior"),
    Estimate(1.96, 0.3, "modelled"),
)
FOUND = BudgetDrafter(
    "eagle3", "1x4096", Needs("exists", "org/head"), 4, Estimate(0.6, 0.1, "prior"), TRAINED.speedup
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    budgets = Budgets(
        "h100", (BudgetRow(0.0, (FOUND, LOOKUP)), BudgetRow(10.0, (TRAINED, FOUND, LOOKUP)))
    )
    save(tmp_path / BUDGETS_FILE, budgets)
    assert load(tmp_path / BUDGETS_FILE, "budgets", Budgets) == budgets


def test_a_broken_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / BUDGETS_FILE).write_text(
        '{"device": "h100", "rows": [{"gpu_hours": 1}]}', encoding="utf-8"
    )
    with pytest.raises(
        ArchsearchError, match=r"budgets.json .* rows\[0\].drafters: is missing"
    ) as error:
        load(tmp_path / BUDGETS_FILE, "budgets", Budgets)
    assert "\n" not in str(error.value)
