"""What it takes to have a drafter, and what a training budget buys."""

import pytest

from archsearch.errors import ArchsearchError
from archsearch.needs import NOTHING, Needs, TrainingBudget

BUDGET = TrainingBudget(
    24.0, text_hours_per_token=30e-9, teacher_hours_per_token=11e-9, hours_per_parameter_token=4e-18
)


def test_a_budget_is_spent_whole_and_its_parts_add_up():
    needs = BUDGET.needs(280e6)
    assert needs.gpu_hours == pytest.approx(24.0)
    assert needs.tokens == pytest.approx(BUDGET.tokens(280e6))
    assert needs.text_hours > needs.teacher_hours > needs.training_hours


def test_a_larger_draft_sees_fewer_tokens_and_reading_twice_more():
    twice = TrainingBudget(24.0, 30e-9, 11e-9, 4e-18, epochs=2.0)
    assert BUDGET.tokens(3e9) < BUDGET.tokens(1e8) < twice.tokens(1e8)


@pytest.mark.parametrize(
    "needs", [NOTHING, Needs("exists", "org/head"), BUDGET.needs(1e8)], ids=lambda needs: needs.kind
)
def test_what_is_written_is_read_back(needs):
    assert Needs.from_dict(needs.to_dict()) == needs


@pytest.mark.parametrize(
    "data", [{"kind": "luck"}, {"kind": "exists"}, {}, [], {"kind": "training", "text_hours": -1.0}]
)
def test_what_is_no_need_is_refused(data):
    with pytest.raises(ArchsearchError, match="needs"):
        Needs.from_dict(data)
