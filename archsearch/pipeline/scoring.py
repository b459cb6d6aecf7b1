"""Rung 0: every family's space is scored, nothing is trained."""

from __future__ import annotations

from collections.abc import Callable, Collection

from archsearch.pipeline.families import INDEPENDENT, OTHER_TRIALS
from archsearch.pipeline.session import SearchSession
from archsearch.progress import ProgressLine
from archsearch.search import study
from archsearch.search.objective import Score
from archsearch.search.space import SearchSpace


def score_spaces(session: SearchSession) -> study.SearchResult:
    """The studies over all shapes of each family as one result; beside whoever scores along."""
    with ProgressLine("search") as line:

        def scored(space: SearchSpace) -> study.SearchResult:
            name = "" if space.family == INDEPENDENT else f"{space.family}, "

            def progress(p: study.SearchProgress) -> None:
                words = f"{name}best {p.best.speedup.value:.2f}x" if p.best else name
                line(words, float(p.done), float(p.total))

            return _scored(session, space, kept=True, progress=progress)

        return study.merged([scored(space) for space in session.families.spaces])


def scored_alone(session: SearchSession, families: Collection[str]) -> list[Score]:
    """The scores of some families, of which nothing is kept."""
    spaces = [space for space in session.families.spaces if space.family in families]
    return [score for space in spaces for score in _scored(session, space, kept=False).best]


def _scored(
    session: SearchSession,
    space: SearchSpace,
    *,
    kept: bool,
    progress: Callable[[study.SearchProgress], None] | None = None,
) -> study.SearchResult:
    """The study over one space; `kept`: in the run's storage."""
    request = session.request
    most = request.trials if space.family == INDEPENDENT else min(request.trials, OTHER_TRIALS)
    how = study.How(request.sampler, shared=request.workers > 0, regret=True, goals=request.pareto)
    return study.search(
        space,
        session.scorer,
        trials=most,
        seed=request.seed,
        storage=(request.storage or session.run.storage_file) if kept else None,
        about=session.about(),
        progress=progress,
        how=how if kept else study.How(request.sampler),
    )
