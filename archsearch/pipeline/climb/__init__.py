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
