"""What each engine installed here is predicted to write per second, for the verdict over
engines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from archsearch.drafts.records import scored_by
from archsearch.engine_facts import engine_facts
from archsearch.engines.environments.environment import overview
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.estimate import Estimate
from archsearch.latency.engine_passes import known_engines
from archsearch.models.files import has_weights
from archsearch.pipeline.in_engine import (
    profile_command,
    profile_first,
    served_dtype,
    serving_scorer,
)
from archsearch.pipeline.session import SearchSession
from archsearch.profiles import Profile
from archsearch.records import save
from archsearch.runs.tables import ENGINES_FILE, EngineWays, Way


def write_engines(session: SearchSession) -> None:
    """engines.json of a run: every engine that is installed, at the run's precision and at those of
    its own measured passes. Nothing on a GPU, over a mix, at several requests at once, or where one
    engine is all there is."""
    source, request = session.source, session.request
    here = [row.engine for row in overview() if row.installed]
    apart = request.mix is not None or session.scorer.workload.batch_size > 1
    if not source.device.is_cpu or apart or len(here) < 2:
        return
    profile = Profile.load(Path(source.profile["folder"]))
    pairs, missing = profile.combinations(), dict[str, str]()
    ways: list[Way] = []
    lacking: set[str] = set()
    for engine in here:
        before = len(ways)
        own = sorted({name for name, mode in pairs if engine in known_engines(profile, name, mode)})
        for dtype in dict.fromkeys([source.dtype, *own]):
            drafts = [dtype, *own] if engine_facts(engine).gguf else [dtype]
            try:
                ways += _ways(session, engine, dtype, dict.fromkeys(drafts))
            except MissingDataError:  # no passes of that precision
                lacking.add(engine)
            except ArchsearchError:  # weights it does not run
                continue
        if len(ways) == before and engine in lacking:
            missing[engine] = profile_command(session, engine, served_dtype(session, engine))
    save(session.run.path / ENGINES_FILE, EngineWays(source.dtype, tuple(ways), missing))


def _ways(session: SearchSession, engine: str, dtype: str, drafts: Iterable[str]) -> list[Way]:
    """The engine alone and with the best of the run's ranks that it runs, in the best precision of
    `drafts`."""
    scorers = {each: serving_scorer(session, engine, dtype, each)[0] for each in drafts}
    scorer = scorers[dtype]
    facts, kind = engine_facts(engine), session.target.architecture.model_type
    scores = [row for row in session.run.scores() if not facts.lacks(row.family, target=kind)]
    trained = [score for score in scores if has_weights(session.run.best_dir(score.rank or 0))]
    found = [
        (
            f"rank {score.rank}" + (f" in {each}" if each != dtype else ""),
            scored_by(by, score, session.run.best_dir(score.rank or 0)),
        )
        for each, by in scorers.items()
        for score in trained or scores
    ]
    first = profile_first(session, scorer, engine, dtype)
    alone = Way(
        engine=engine, dtype=dtype, tokens_per_s=_rate(scorer.decode_s), profile_first=first
    )
    if not found:
        return [alone]
    drafter, best = max(found, key=lambda pair: pair[1].ranked_by)
    drafted = replace(alone, tokens_per_s=_rate(best.tpot_s), drafter=drafter, gamma=best.gamma)
    return [alone, drafted]


def _rate(seconds: Estimate) -> Estimate:
    """Tokens per second of so many seconds a token."""
    rate = 1.0 / seconds.value
    return Estimate(rate, rate * seconds.std / seconds.value, "modelled")
