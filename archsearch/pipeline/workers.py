"""Several processes do one search: `--workers N` here, `archsearch worker` from any machine that
reaches the storage.

Who starts a search announces it in a study of its own (`Announced`). A worker reads that, makes the
same scorer, asks the same Optuna studies for shapes and, where it reaches the folder of a search
that trains, claims trainings and confirmations (`pipeline.shared_work`).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from archsearch.acceptance.estimator import VocabularyCoverage
from archsearch.drafts.trainer import DraftTrainer
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.files import read_json, write_json
from archsearch.hardware.identify import check_claim, visible_gpus
from archsearch.paths import STORAGE_VARIABLE
from archsearch.pipeline.confirm import confirm_rank
from archsearch.pipeline.scoring import score_spaces
from archsearch.pipeline.session import PRIOR_FILE, SearchRequest, SearchSession
from archsearch.pipeline.shared_work import Job, JobKind, SharedWork, make_executor, train_job
from archsearch.progress import say
from archsearch.records import as_data, from_data
from archsearch.runs.run import open_run
from archsearch.search.storage import (
    identity_of,
    open_storage,
    storage_errors,
    study_name,
    without_password,
)

ANNOUNCED: Final = "archsearch-run-{name}"
MOST_WORKERS: Final = 256


def studies_of(session: SearchSession) -> list[str]:
    """Names of the studies of a session's spaces: the same on every machine that scores alike."""
    scorer, about = session.scorer, session.about()
    return [study_name(identity_of(space, scorer, about)) for space in session.families.spaces]


@dataclass(frozen=True)
class Announced:
    """What a worker needs to join: user attributes of a study. `prior`: what scores begin with;
    `coverage`: of the user's text; `studies`: those of the search; `created`, `home`: which run it
    is; `folder`: where it trains, None where it only ranks, `files`: what it trains on."""

    arguments: dict[str, object]
    prior: dict[str, object] | None
    coverage: tuple[tuple[int, float], ...] | None
    profile: Path | None
    studies: tuple[str, ...]
    created: str
    home: str
    folder: Path | None = None
    files: Mapping[str, Path | None] = field(default_factory=dict)

    @classmethod
    def of(cls, session: SearchSession) -> Announced:
        request, folder = session.request, session.run.path.resolve()
        created = session.run.info["created"]
        prior, coverage = session.run.path / PRIOR_FILE, session.scorer.context.coverage
        profile, trains = request.asked.profile, request.confirm > 0
        files = {"prompts": request.prompts, "heldout": request.heldout, "text": request.text}
        return cls(
            session.setting.recorded(request),
            read_json(prior, "prior of the run") if prior.exists() else None,
            None if coverage is None else tuple(coverage.points),
            profile and profile.resolve(),
            tuple(studies_of(session)),
            created,
            f"{folder} {created}",
            folder if trains else None,
            {name: path and path.resolve() for name, path in files.items()} if trains else {},
        )


def announce(session: SearchSession, storage: str) -> str:
    """Write an `Announced`; the name under which it is found. Raises ArchsearchError where another
    search has that name in the storage."""
    import optuna

    name, notice = session.run.path.name, Announced.of(session)
    with storage_errors(storage):
        study = optuna.create_study(
            storage=open_storage(storage),
            study_name=ANNOUNCED.format(name=name),
            load_if_exists=True,
        )
        before = study.user_attrs.get("studies")
        # The same run may ask on with another question: it ranked before it had text, and now
        # trains.
        mine = study.user_attrs.get("home") == notice.home
        if before is not None and not mine and not set(before) & set(notice.studies):
            raise ArchsearchError(
                f"the storage holds another search called {name} (another space, target, workload"
                " or profile); choose another --run or --storage"
            )
        for key, value in as_data(notice).items():
            study.set_user_attr(key, value)
    return name


def announced(storage: str, name: str) -> Announced:
    """What was announced under a name; ArchsearchError names those there are."""
    import optuna

    if Path(name).name != name:
        raise ArchsearchError(
            f"--run {name!r} is the name of a run folder, not a path: its last part"
        )
    with storage_errors(storage):
        summaries = optuna.get_all_study_summaries(open_storage(storage, new=False))
    prefix = ANNOUNCED.format(name="")
    known = {
        each.study_name.removeprefix(prefix): each.user_attrs
        for each in summaries
        if each.study_name.startswith(prefix)
    }
    if "studies" not in known.get(name, {}):
        raise ArchsearchError(
            f"no search called {name} is announced in {without_password(storage)} (there:"
            f" {', '.join(sorted(known)) or 'none'}); start it with: archsearch search ..."
            " --storage URL --workers 1"
        )
    return from_data(Announced, known[name])


def join(
    storage: str, name: str, profile: Path | None = None, folder: Path | None = None
) -> dict[str, object]:
    """Score along until the search is through, then train along in the run's folder (`folder`: as
    this machine sees it); how much was done here. Raises ArchsearchError where this machine would
    score otherwise than who began, or `folder` holds another run."""
    notice = announced(storage, name)
    with tempfile.TemporaryDirectory(prefix="archsearch-worker-") as base:
        session = _session(notice, storage, Path(base) / name, profile)
        if tuple(studies_of(session)) != notice.studies:
            raise ArchsearchError(
                f"this machine scores otherwise than the one that began {name}: another profile"
                f" ({session.source.words}), or another version of archsearch; pass the same"
                " --profile"
            )
        shared = _shared_folder(notice, folder)
        result = score_spaces(session)
        trained = 0 if shared is None else _train_along(notice, storage, session, shared, name)
    return {
        "run": name,
        "folder": None if shared is None else str(shared),
        "trained_here": trained,
        "storage": without_password(storage),
        "trials": result.finished,
        "scored_here": result.scored_here,
        "scored": result.spaces,
    }


def _shared_folder(notice: Announced, folder: Path | None) -> Path | None:
    """The search's run folder as this machine sees it; None where it trains nothing, or nobody
    named a folder and the search's own is not to be seen from here."""
    if notice.folder is None:
        return None
    path = folder or notice.folder
    if not (path / "run.yaml").is_file() and folder is None:
        return None
    if open_run(path).info["created"] != notice.created:
        raise ArchsearchError(
            f"{path} is another run than the one that was announced; name its folder with --folder"
        )
    return path


def _train_along(
    notice: Announced, storage: str, session: SearchSession, folder: Path, name: str
) -> int:
    """How many trainings were done here, and confirmations where this is the device that it is
    for."""
    asked, cores = int(os.environ.get("OMP_NUM_THREADS") or 0), session.source.threads
    request = replace(session.request, **dict[str, Any](notice.files))
    there = replace(session, request=request, run=open_run(folder))
    trainer = there.trainer(min(cores, asked) if cores and asked else cores)

    def train(job: Job) -> float:
        trainer.texts.forget()  # more may have been written since the last one
        return train_job(job, trainer)

    able: dict[JobKind, Callable[[Job], float]] = {"short": train, "full": train}
    if can_confirm_beside(session):
        able["confirm"] = lambda job: confirm_job(SearchSession.reopen(folder), job, trainer)
    return SharedWork(storage, name, notice.created).help_along(able)


def confirm_job(session: SearchSession, job: Job, trainer: DraftTrainer) -> float:
    """Run a rank of the search in the engine; its measured speed-up."""
    found = confirm_rank(session, job.rank, trainer=trainer, prompt_count=job.prompts)
    return found.speedup.value


def can_confirm_beside(session: SearchSession) -> bool:
    """Whether confirmations may run beside others: each on a GPU of its own of the searched kind.
    On one CPU they would slow each other."""
    device = session.source.device
    with suppress(ArchsearchError):
        return not device.is_cpu and check_claim(device.key) is not None
    return False


def _session(notice: Announced, storage: str, folder: Path, profile: Path | None) -> SearchSession:
    named = profile or (notice.profile if notice.profile and notice.profile.is_dir() else None)
    request = SearchRequest.from_arguments(
        notice.arguments,
        confirm=0,
        run=folder,
        storage=storage,
        workers=1,
        prompts=None,
        heldout=None,
        text=None,
    )
    if notice.prior is not None:
        folder.mkdir(parents=True)
        write_json(folder / PRIOR_FILE, notice.prior)
    session = SearchSession.start(replace(request, asked=replace(request.asked, profile=named)))
    if notice.coverage is None:
        return session
    covered = VocabularyCoverage(notice.coverage)
    return replace(session, scorer=session.scorer.with_coverage(covered))


@contextmanager
def workers_beside(session: SearchSession) -> Iterator[SharedWork | None]:
    """The search announced, and `workers` - 1 more processes that score and train along until the
    block ends. It gets what shares trainings with them; None where nobody helps or nothing is
    trained. Raises ArchsearchError for more than MOST_WORKERS, and for an executor that is not
    there."""
    request = session.request
    if request.workers < 1:
        yield None
        return
    if request.workers > MOST_WORKERS:
        raise ArchsearchError(
            f"--workers {request.workers} is more than {MOST_WORKERS} on one machine; start them on"
            " several"
        )
    storage = request.storage or str(session.run.storage_file)
    # workers may begin in another folder
    storage = storage if "://" in storage else str(Path(storage).resolve())
    on_cpu = session.source.device.is_cpu
    # what is wrong with it is said before anything is announced; scoring needs no GPU
    executor = make_executor(request.executor, not on_cpu and request.confirm > 0)
    name = announce(session, storage)
    with ExitStack() as stack:
        shared = None
        if request.confirm:
            shared = SharedWork(storage, name, session.run.info["created"])
            stack.enter_context(shared.held())
        try:
            gpus = [] if on_cpu else [gpu.uuid for gpu in visible_gpus() if gpu.uuid]
            for number in range(1, request.workers):
                environment = {STORAGE_VARIABLE: storage, "OMP_NUM_THREADS": "1"}
                if len(gpus) > 1:  # one each; the first stays with who began
                    environment["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
                executor.start(["worker", "--run", name], environment)
            yield shared
        finally:
            for words in executor.stop():
                say(f"a worker ended early: {words}")


def serve_dashboard(
    path: Path, port: int, ready: Callable[[str], None], storage: str | None
) -> None:
    """Serve the dashboard of a run until it is stopped; `ready` is called with its address once it
    answers. `storage`: the Optuna URL that the search was given: run.yaml keeps no password. Port
    0: any. Raises MissingDataError without optuna-dashboard or a study, ArchsearchError for a port
    that is taken."""
    from wsgiref.simple_server import WSGIRequestHandler, make_server

    run = open_run(path)
    try:
        from optuna_dashboard import wsgi
    except ImportError:
        raise MissingDataError(
            'optuna-dashboard is not installed; run: pip install "archsearch[dashboard]"'
        ) from None
    where = storage or (run.storage_file if run.storage_file.is_file() else None)
    if where is None:
        asked = run.arguments.get("storage")
        used = f"its search used {asked}: name it with --storage"
        why = used if asked else "the search has not started"
        raise MissingDataError(f"{path} holds no journal.log; {why}")

    class Quiet(WSGIRequestHandler):
        def log_message(self, *_: object) -> None:
            """No line a request."""

    try:
        served = wsgi(open_storage(where, new=False))
        server = make_server("127.0.0.1", port, served, handler_class=Quiet)
    except OSError as error:
        raise ArchsearchError(
            f"port {port} cannot be used ({error.strerror}); choose another --port"
        ) from error
    with server:
        ready(f"http://127.0.0.1:{server.server_port}/dashboard/")
        server.serve_forever()
