"""The climb: from the prior over short trainings to finalists, inside a time budget (successive
halving).

    climb.py       the idea: rounds of short trainings, who is dropped after each
    belief.py      what is known of acceptance after them, and how sure that is
    budget.py      the plan of the minutes, what a training and a confirmation cost
    families.py    heads beside drafts: short trainings, and which family gets the rest
    finalists.py   who is trained in full, and the record of it
    tables.py      columns of trials.csv, rows of the report

`archsearch.search.rungs` decides (numbers in, choices out), `archsearch.drafts.trainer` trains,
`archsearch.runs.state` remembers.
"""

from archsearch.pipeline.climb.budget import (
    COMPARISON_COST,
    affordable_prompts,
    confirm_seconds,
    make_plan,
    plan_text,
    work,
)
from archsearch.pipeline.climb.climb import Climb, start_climb, write_texts
from archsearch.pipeline.climb.families import HeadRungs
from archsearch.pipeline.climb.tables import measured_row, summary, trial_rows

__all__ = [
    "COMPARISON_COST",
    "Climb",
    "HeadRungs",
    "affordable_prompts",
    "confirm_seconds",
    "make_plan",
    "measured_row",
    "plan_text",
    "start_climb",
    "summary",
    "trial_rows",
    "work",
    "write_texts",
]
