"""A search that trains, inside a time budget: from the prior over short trainings to finalists
(successive halving), or, by a plan without rounds, the prior's best at once.

`archsearch.search.rungs` decides (numbers in, choices out), `archsearch.drafts.trainer` trains,
`archsearch.runs.state` remembers.
"""
