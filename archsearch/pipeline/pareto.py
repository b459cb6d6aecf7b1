"""`--pareto`: the set of drafts that no other beats in all goals, written into the run folder as
numbers and drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from archsearch.files import write_json
from archsearch.pipeline.session import SearchSession
from archsearch.records import WRONG_SHAPE
from archsearch.report.chart_files import drawn, write_picture
from archsearch.report.pareto import pareto_chart
from archsearch.runs.confirmed import Confirmed
from archsearch.search.exact import can_rank_alone, exact_grid, rank_alone
from archsearch.search.objective import Score
from archsearch.search.pareto import GOALS, check_goals, pareto, pareto_places
from archsearch.search.samplers import AUTO

PARETO_FILE = "pareto.json"
PICTURE_FILE = "pareto.svg"


def write_pareto(session: SearchSession, scores: Sequence[Score]) -> dict[str, Any]:
    """pareto.json and pareto.svg of the run; what the first holds. `scores`: those of the search,
    which stand for spaces that were not scored in full."""
    goals, scorer = check_goals(session.request.pareto), session.scorer
    found: list[Score] = []
    whole = []
    for space in session.families.spaces:
        if session.request.sampler != AUTO:
            found += [score for score in scores if score.family == space.family]
            continue
        grid = exact_grid(space, scorer)
        if grid is not None:
            found += [scorer(grid.grid.at(place)) for place in pareto_places(scorer, grid, goals)]
        elif can_rank_alone(space, scorer.target):
            found += [score for *_, score in rank_alone(space, scorer).ranked]
        else:
            found += [score for score in scores if score.family == space.family]
            continue
        whole.append(space.name)
    members = pareto(scorer, found, goals, _measured(session))
    data = {
        "goals": {
            name: {"unit": GOALS[name].unit, "words": GOALS[name].words, "more": GOALS[name].more}
            for name in goals
        },
        "exact": whole,
        "members": [member.to_dict() for member in members],
    }
    write_json(session.run.path / PARETO_FILE, data)
    write_picture(session.run.path / PICTURE_FILE, drawn(pareto_chart(data)))
    return data


def _measured(session: SearchSession) -> Any:
    """The confirmed speed-up of a score's draft in this run; None where it was not confirmed, or
    that decides nothing."""
    known = {}
    for rank in session.run.ranks():
        try:
            data = session.run.confirmed(rank)
            confirmed = None if data is None else Confirmed.from_dict(data)
        except WRONG_SHAPE:
            continue
        if confirmed is not None and not confirmed.undecided:
            known[session.run.score(rank).proposer] = confirmed.speedup.value
    return lambda score: known.get(score.proposer)
