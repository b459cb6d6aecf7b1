"""Several processes score one search: `--workers N` here, `archsearch worker` from any machine that reaches the storage.

Who starts a search announces it: a study of its own in the storage holds the arguments, the prior that it began with and what the
user's text covers. A worker reads that, makes the same scorer, walks the same way and claims shapes (`search.claims`); it writes
into no run folder. A machine that prices shapes otherwise (another profile, another version) is refused.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from archsearch.acceptance.estimator import VocabularyCoverage
from archsearch.errors import ArchsearchError
from archsearch.files import read_json, write_json
from archsearch.pipeline.session import PRIOR_FILE, SearchRequest, SearchSession
from archsearch.search.identity import identity_of, study_name
from archsearch.search.storage import open_storage, storage_errors, without_password
from archsearch.search.study import STUDY, SearchResult

ANNOUNCED: Final = "archsearch-run-{name}"
MOST_WORKERS: Final = 256


def studies_of(session: SearchSession) -> list[str]:
    """Names of the studies of a session's spaces: the same on every machine that scores alike."""
    scorer, about = session.scorer, session.about()
    return [study_name(STUDY, identity_of(space, scorer, about)) for space in session.families.spaces]


def announce(session: SearchSession, storage: str) -> str:
    """Write down what a worker needs to join; the name under which it is found. Raises ArchsearchError where another search has
    that name in the storage."""
    import optuna

    name = session.run.path.name
    prior, coverage, profile = session.run.path / PRIOR_FILE, session.scorer.context.coverage, session.request.asked.profile
    told: dict[str, Any] = {
        "arguments": session.request.arguments(),
        "prior": read_json(prior, "prior of the run") if prior.exists() else None,
        "coverage": None if coverage is None else [list(point) for point in coverage.points],
        "profile": None if profile is None else str(profile.resolve()),
        "studies": studies_of(session),
    }
    with storage_errors(storage):
        study = optuna.create_study(storage=open_storage(storage), study_name=ANNOUNCED.format(name=name), load_if_exists=True)
        before = study.user_attrs.get("studies")
        if before is not None and before != told["studies"] and not set(before) & set(told["studies"]):
            raise ArchsearchError(
                f"the storage holds another search called {name} (another space, target, workload or profile); choose another "
                "--run or --storage"
            )
        for key, value in told.items():
            study.set_user_attr(key, value)
    return name


def announced(storage: str, name: str) -> dict[str, Any]:
    """What was announced under a name; ArchsearchError names those there are."""
    import optuna

    if Path(name).name != name:
        raise ArchsearchError(f"--run {name!r} is the name of a run folder, not a path: its last part")
    with storage_errors(storage):
        opened = open_storage(storage)
        known = {summary.study_name: summary.user_attrs for summary in optuna.get_all_study_summaries(opened)}
    found = known.get(ANNOUNCED.format(name=name))
    if found is None or "studies" not in found:
        prefix = ANNOUNCED.format(name="")
        names = ", ".join(sorted(key.removeprefix(prefix) for key in known if key.startswith(prefix))) or "none"
        raise ArchsearchError(
            f"no search called {name} is announced in {without_password(storage)} (there: {names}); start it with: archsearch "
            "search ... --storage URL --workers 1"
        )
    return found


def join(storage: str, name: str, search: Callable[[SearchSession], SearchResult], profile: Path | None = None) -> dict[str, Any]:
    """Score along until the search is through (`search`: `pipeline.search.score_spaces`); how much of it was done here. Raises
    ArchsearchError where this machine would score otherwise than who began."""
    told = announced(storage, name)
    with tempfile.TemporaryDirectory(prefix="archsearch-worker-") as base:
        folder = Path(base) / name
        session = _session(told, storage, folder, profile)
        if studies_of(session) != told["studies"]:
            raise ArchsearchError(
                f"this machine scores otherwise than the one that began {name}: another profile ({session.source.words}), or "
                "another version of archsearch; pass the same --profile"
            )
        result = search(session)
    return {
        "run": name,
        "storage": without_password(storage),
        "trials": result.finished,
        "scored_here": result.scored_here,
        "scored": [space.to_dict() for space in result.spaces],
    }


def _session(told: dict[str, Any], storage: str, folder: Path, profile: Path | None) -> SearchSession:
    known = told["profile"]
    named = profile or (Path(known) if known is not None and Path(known).is_dir() else None)
    request = SearchRequest.from_arguments(
        told["arguments"], confirm=0, run=folder, storage=storage, workers=1, prompts=None, heldout=None, text=None
    )
    if told["prior"] is not None:
        folder.mkdir(parents=True)
        write_json(folder / PRIOR_FILE, told["prior"])
    session = SearchSession.start(replace(request, asked=replace(request.asked, profile=named)))
    if told["coverage"] is not None:
        points = tuple((int(rows), float(share)) for rows, share in told["coverage"])
        session.scorer = session.scorer.with_coverage(VocabularyCoverage(points))
    return session


@contextmanager
def workers_beside(session: SearchSession, storage: str) -> Iterator[None]:
    """The search announced, and `workers` - 1 more processes that score along; they end with the block.

    Raises ArchsearchError for more workers than a machine should have.
    """
    request = session.request
    if request.workers < 1:
        yield
        return
    if request.workers > MOST_WORKERS:
        raise ArchsearchError(f"--workers {request.workers} is more than {MOST_WORKERS} on one machine; start them on several")
    name = announce(session, storage)
    command = [sys.executable, "-m", "archsearch.cli", "worker", "--storage", storage, "--run", name]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(request.workers - 1):
            started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment))
        yield
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()
