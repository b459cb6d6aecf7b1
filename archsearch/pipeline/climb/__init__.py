"""A search that trains, inside a time budget: from the prior over short trainings to finalists
(successive halving), or, by a plan without rounds, the prior's best at once.

    plan.py       the minutes of every step, the text that comes first, and what came of it as rows
    climb.py      the order of the steps: who is trained, who is dropped
    belief.py     what is known of acceptance after them, and how sure that is
    trainings.py  drafts trained short and in full, what that takes
    race.py       heads beside drafts: which family gets the rest

`archsearch.search.rungs` decides (numbers in, choices out), `archsearch.drafts.trainer` trains,
`archsearch.runs.state` remembers.
"""

from archsearch.pipeline.climb.climb import Climb
from archsearch.pipeline.climb.plan import (
    COMPARISON_COST,
    affordable_prompts,
    confirm_seconds,
    make_plan,
    measured_draft,
    plan_text,
    summary,
    trial_rows,
    write_texts,
)
from archsearch.pipeline.climb.race import HeadRungs
from archsearch.pipeline.climb.trainings import Trainings, work

__all__ = [
    "COMPARISON_COST",
    "Climb",
    "HeadRungs",
    "Trainings",
    "affordable_prompts",
    "confirm_seconds",
    "make_plan",
    "measured_draft",
    "plan_text",
    "summary",
    "trial_rows",
    "work",
    "write_texts",
]
