"""What is scored before anything is trained: every family's space, whether training can pay at all,
and `--pareto`: the drafts that no other beats in all goals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from archsearch.engine_facts import engine_title, engines_that
from archsearch.errors import ArchsearchError
from archsearch.models.files import HEAD_FAMILIES
from archsearch.pipeline.families import INDEPENDENT, OTHER_TRIALS
from archsearch.pipeline.session import SearchSession
from archsearch.progress import ProgressLine
from archsearch.records import save
from archsearch.report.chart_files import drawn, write_picture
from archsearch.report.costs import ParetoSet, pareto_chart
from archsearch.runs.run import RUNGS_FILE
from archsearch.search import study
from archsearch.search.exact import ALONE_POINTS, Report, exact_grid, rank_alone
from archsearch.search.objective import Score
from archsearch.search.pareto import GOALS, check_goals, pareto, pareto_places
from archsearch.search.samplers import AUTO
from archsearch.search.space import SearchSpace
from archsearch.search.storage import open_storage, storage_errors

if TYPE_CHECKING:
    from optuna.storages import BaseStorage


def score_spaces(session: SearchSession) -> study.SearchResult:
    """The studies over all shapes of each family as one result. Raises ArchsearchError where no
    shape of any family keeps within the limits."""
    spaces, where = session.families.spaces, session.request.storage or session.run.storage_file
    with ProgressLine("search") as line, storage_errors(where):
        storage = open_storage(where)

        def scored(before: int, space: SearchSpace) -> study.SearchResult:
            def progress(done: int, total: int, best: float) -> None:
                words = f", best {best:.2f}x" if best else ""
                line(space.family + words, before + done / max(total, 1), len(spaces))

            return _scored(session, space, storage, progress)

        found = study.merged([scored(*each) for each in enumerate(spaces)])
    return _within_limits(session, found)


def _within_limits(session: SearchSession, found: study.SearchResult) -> study.SearchResult:
    if not found.best:
        why = none_within(session, found.spaces)
        raise ArchsearchError(f"{why}; raise the limit or add smaller shapes")
    return found


def none_within(session: SearchSession, spaces: Sequence[study.Scored]) -> str:
    """That no shape of these spaces keeps within the limits."""
    names = ", ".join(f"{each.space} ({each.shapes:,})" for each in spaces)
    return f"no shape of space {names} keeps within {session.scorer.limit_words()}"


def _scored(
    session: SearchSession,
    space: SearchSpace,
    storage: BaseStorage | None = None,
    progress: Report | None = None,
) -> study.SearchResult:
    """The study over one space; without a storage nothing of it is kept."""
    request = session.request
    most = request.trials if space.family == INDEPENDENT else min(request.trials, OTHER_TRIALS)
    how = study.How(request.sampler, about=session.about())
    if storage is not None:
        shared, goals = request.workers > 0, request.pareto
        how = replace(how, shared=shared, regret=True, goals=goals)
    return study.search(
        space,
        session.scorer,
        trials=most,
        seed=request.seed,
        storage=storage,
        progress=progress,
        how=how,
    )


def hopeless(session: SearchSession) -> str:
    """Why nothing that the search would train can be expected to pay: of no shape the 5 to 95 % of
    the predicted speed-up reach 1x. "" where one does, and where the run has begun to train."""
    if (session.run.path / RUNGS_FILE).is_file() or (session.run.path / "finalists").is_dir():
        return ""
    trained = (INDEPENDENT, *HEAD_FAMILIES)
    spaces = [space for space in session.families.spaces if space.family in trained]
    found = _within_limits(session, study.merged([_scored(session, space) for space in spaces]))
    best = max(found.best, key=lambda score: score.speedup.interval[1])
    low, high = best.speedup.interval
    if high >= 1.0:
        return ""
    request, workload = session.request, session.scorer.workload
    alpha, needed = best.alpha, best.break_even_alpha
    pays = (
        "no alpha would make it pay"
        if needed is None
        else f"it would need an alpha above {needed.value:.2f}"
    )
    others = [
        name for name in engines_that(lambda row: row.make is not None) if name != request.engine
    ]
    batch = (
        f", a smaller --batch-size than {workload.batch_size}" if workload.batch_size > 1 else ""
    )
    return (
        f"no draft is expected to pay for {session.target.name} on {session.source.device.key} in"
        f" {engine_title(request.engine)}, {workload.dtype}: the best, {best.label()} at gamma"
        f" {best.gamma}, is predicted at {best.speedup.value:.2f}x (5 to 95 %: {low:.2f}x to"
        f" {high:.2f}x) with alpha {alpha.words()}, and {pays}. What may change"
        f" that: another engine (--engine {', '.join(others)}), another --dtype{batch}. The ranking"
        " is written; to train all the same: --anyway"
    )


def write_pareto(session: SearchSession, scores: Sequence[Score]) -> ParetoSet:
    """pareto.json and pareto.svg of the run. `scores`: those of the search, which stand for spaces
    that were not scored in full."""
    goals, scorer, run = check_goals(session.request.pareto), session.scorer, session.run
    found: list[Score] = []
    whole, auto = [], session.request.sampler == AUTO
    for space in session.families.spaces:
        if auto and (grid := exact_grid(space, scorer)) is not None:
            found += [scorer(grid.grid.at(place)) for place in pareto_places(scorer, grid, goals)]
        elif auto and space.size(scorer.target) <= ALONE_POINTS:
            found += [score for *_, score in rank_alone(space, scorer).ranked]
        else:
            found += [score for score in scores if score.family == space.family]
            continue
        whole.append(space.name)
    decided = {rank: run.decided(rank) for rank in run.ranks()}
    known = {run.score(rank).proposer: found for rank, found in decided.items() if found}
    members = pareto(scorer, found, goals, lambda score: known.get(score.proposer))
    pareto_set = ParetoSet({name: GOALS[name] for name in goals}, tuple(whole), tuple(members))
    save(run.path / "pareto.json", pareto_set)
    write_picture(run.path / "pareto.svg", drawn(pareto_chart(pareto_set)))
    return pareto_set
