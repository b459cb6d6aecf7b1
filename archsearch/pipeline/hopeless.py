"""Whether training a draft can pay at all: asked in a search's first seconds, before hours go into
it."""

from __future__ import annotations

from archsearch.engine_facts import engine_title, engines_that
from archsearch.models.files import HEAD_FAMILIES
from archsearch.pipeline.families import INDEPENDENT
from archsearch.pipeline.scoring import scored_alone
from archsearch.pipeline.session import SearchSession
from archsearch.report.phrases import interval
from archsearch.runs.run import RUNGS_FILE
from archsearch.search.objective import Score


def hopeless(session: SearchSession) -> str:
    """Why nothing that the search would train can be expected to pay: of no shape the 5 to 95 % of
    the predicted speed-up reach 1x, whatever alpha and times within them turn out to be. "" where
    one does, and where the run has begun to train."""
    if (session.run.path / RUNGS_FILE).is_file() or (session.run.path / "finalists").is_dir():
        return ""
    best = _highest(session)
    if best is None or interval(best.speedup)[1] >= 1.0:
        return ""
    request, workload = session.request, session.scorer.workload
    low, high = interval(best.speedup)
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
        f" {high:.2f}x) with alpha {alpha.value:.2f} ± {alpha.std:.2f}, and {pays}. What may change"
        f" that: another engine (--engine {', '.join(others)}), another --dtype{batch}. The ranking"
        " is written; to train all the same: --anyway"
    )


def _highest(session: SearchSession) -> Score | None:
    """Of what the search would train, the score whose interval reaches highest."""
    found = scored_alone(session, (INDEPENDENT, *HEAD_FAMILIES))
    return max(found, key=lambda score: interval(score.speedup)[1], default=None)
