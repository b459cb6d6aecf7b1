"""Several processes do one search: `--workers N` here, `archsearch worker` from any machine that
reaches the storage.

Who starts a search announces it: a study of its own in the storage holds the arguments, the prior
that it began with and what the user's text covers. A worker reads that, makes the same scorer and
asks the same Optuna studies for shapes (`search.samplers`). A machine that prices shapes otherwise
(another profile, another version) is refused. Where the search trains and its folder is reached,
the worker then claims trainings and confirmations (`pipeline.shared_work`), whose files lie in that
folder.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from archsearch.acceptance.estimator import VocabularyCoverage
from archsearch.drafts.trainer import DraftTrainer
from archsearch.errors import ArchsearchError
from archsearch.files import read_json, write_json
from archsearch.hardware.identify import check_claim, visible_gpus
from archsearch.pipeline.executors import make_executor
from archsearch.pipeline.session import PRIOR_FILE, SearchRequest, SearchSession
from archsearch.pipeline.shared_work import Job, JobKind, SharedWork, train_job
from archsearch.progress import say
from archsearch.runs.run import open_run
from archsearch.search.identity import identity_of, study_name
from archsearch.search.storage import open_storage, storage_errors, without_password
from archsearch.search.study import STUDY, SearchResult
from archsearch.text.prompt_set import load_prompt_set

ANNOUNCED: Final = "archsearch-run-{name}"
MOST_WORKERS: Final = 256


def studies_of(session: SearchSession) -> list[str]:
    """Names of the studies of a session's spaces: the same on every machine that scores alike."""
    scorer, about = session.scorer, session.about()
    return [
        study_name(STUDY, identity_of(space, scorer, about)) for space in session.families.spaces
    ]


def announce(session: SearchSession, storage: str) -> str:
    """Write down what a worker needs to join; the name under which it is found.

    Raises ArchsearchError where another search has that name in the storage.
    """
    import optuna

    name = session.run.path.name
    prior, coverage, profile = (
        session.run.path / PRIOR_FILE,
        session.scorer.context.coverage,
        session.request.asked.profile,
    )
    told: dict[str, Any] = {
        "arguments": session.request.arguments(),
        "prior": read_json(prior, "prior of the run") if prior.exists() else None,
        "coverage": None if coverage is None else [list(point) for point in coverage.points],
        "profile": None if profile is None else str(profile.resolve()),
        "studies": studies_of(session),
        "created": session.run.info["created"],
        "home": f"{session.run.path.resolve()} {session.run.info['created']}",
        **_work_of(session),
    }
    with storage_errors(storage):
        study = optuna.create_study(
            storage=open_storage(storage),
            study_name=ANNOUNCED.format(name=name),
            load_if_exists=True,
        )
        before = study.user_attrs.get("studies")
        # The same run may ask on with another question: it ranked before it had text, and now
        # trains.
        mine = study.user_attrs.get("home") == told["home"]
        if before is not None and not mine and not set(before) & set(told["studies"]):
            raise ArchsearchError(
                f"the storage holds another search called {name} (another space, target, workload"
                " or profile); choose another --run or --storage"
            )
        for key, value in told.items():
            study.set_user_attr(key, value)
    return name


def _work_of(session: SearchSession) -> dict[str, Any]:
    """Where the trainings of a search happen; nothing where it only ranks."""
    request = session.request
    if not request.confirm:
        return {"folder": None}
    files = {"prompts": request.prompts, "heldout": request.heldout, "text": request.text}
    return {
        "folder": str(session.run.path.resolve()),
        "files": {
            name: None if path is None else str(path.resolve()) for name, path in files.items()
        },
    }


def announced(storage: str, name: str) -> dict[str, Any]:
    """What was announced under a name; ArchsearchError names those there are."""
    import optuna

    if Path(name).name != name:
        raise ArchsearchError(
            f"--run {name!r} is the name of a run folder, not a path: its last part"
        )
    with storage_errors(storage):
        opened = open_storage(storage)
        known = {
            summary.study_name: summary.user_attrs
            for summary in optuna.get_all_study_summaries(opened)
        }
    found = known.get(ANNOUNCED.format(name=name))
    if found is None or "studies" not in found:
        prefix = ANNOUNCED.format(name="")
        names = (
            ", ".join(sorted(key.removeprefix(prefix) for key in known if key.startswith(prefix)))
            or "none"
        )
        raise ArchsearchError(
            f"no search called {name} is announced in {without_password(storage)} (there: {names});"
            " start it with: archsearch search ... --storage URL --workers 1"
        )
    return found


def join(
    storage: str,
    name: str,
    search: Callable[[SearchSession], SearchResult],
    profile: Path | None = None,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Score along until the search is through (`search`: `pipeline.search.score_spaces`), then
    train along in the run's folder (`folder`: where this machine sees it) until it ends; how much
    of it was done here. Raises ArchsearchError where this machine would score otherwise than who
    began, or where `folder` holds another run."""
    told = announced(storage, name)
    with tempfile.TemporaryDirectory(prefix="archsearch-worker-") as base:
        session = _session(told, storage, Path(base) / name, profile)
        if studies_of(session) != told["studies"]:
            raise ArchsearchError(
                f"this machine scores otherwise than the one that began {name}: another profile"
                f" ({session.source.words}), or another version of archsearch; pass the same"
                " --profile"
            )
        shared = _shared_folder(told, folder)
        result = search(session)
        trained = 0 if shared is None else _train_along(told, storage, session, shared, name)
    return {
        "run": name,
        "folder": None if shared is None else str(shared),
        "trained_here": trained,
        "storage": without_password(storage),
        "trials": result.finished,
        "scored_here": result.scored_here,
        "scored": [space.to_dict() for space in result.spaces],
    }


def _shared_folder(told: dict[str, Any], folder: Path | None) -> Path | None:
    """The search's run folder as this machine sees it; None where it trains nothing, or where
    nobody named a folder and the search's own is not to be seen from here."""
    if told.get("folder") is None:
        return None
    path = folder or Path(told["folder"])
    if not (path / "run.yaml").is_file() and folder is None:
        return None
    if open_run(path).info["created"] != told["created"]:
        raise ArchsearchError(
            f"{path} is another run than the one that was announced; name its folder with --folder"
        )
    return path


def _train_along(
    told: dict[str, Any], storage: str, session: SearchSession, folder: Path, name: str
) -> int:
    """Claim trainings of the search, and confirmations where this is the device that it is for; how
    many jobs were done."""
    files = {name: None if path is None else Path(path) for name, path in told["files"].items()}
    least = int(open_run(folder).info.get("heldout_least", 0))
    asked = int(os.environ.get("OMP_NUM_THREADS") or 0)
    known = session.source.threads
    trainer = DraftTrainer(
        session.target,
        session.source.dtype,
        load_prompt_set(files["prompts"], files["heldout"], least),
        folder,
        answer_tokens=session.request.answer_tokens,
        plain_text=files["text"],
        threads=min(known, asked) if known and asked else known,
    )

    def train(job: Job) -> float:
        trainer.texts.reread()  # more may have been written since the last one
        return train_job(job, trainer)

    able: dict[JobKind, Callable[[Job], float]] = {"short": train, "full": train}
    if can_confirm_beside(session):
        able["confirm"] = lambda job: confirm_job(SearchSession.reopen(folder), job, trainer)
    work = SharedWork(storage, name, told["created"])
    return work.help_along(able)


def confirm_job(session: SearchSession, job: Job, trainer: DraftTrainer) -> float:
    """Run a rank of the search in the engine; its measured speed-up."""
    from archsearch.pipeline.confirm_prompts import confirm_rank

    return float(
        confirm_rank(session, job.rank, trainer=trainer, prompt_count=job.prompts)["speedup"][
            "value"
        ]
    )


def can_confirm_beside(session: SearchSession) -> bool:
    """Whether confirmations may run beside others: each on a GPU of its own of the kind that the
    search is for. On one CPU they would slow each other, and on another they would measure another
    machine."""
    if session.source.device.kind == "cpu":
        return False
    try:
        check_claim(session.source.device.key)
    except ArchsearchError:
        return False
    return True


def _session(
    told: dict[str, Any], storage: str, folder: Path, profile: Path | None
) -> SearchSession:
    known = told["profile"]
    named = profile or (Path(known) if known is not None and Path(known).is_dir() else None)
    request = SearchRequest.from_arguments(
        told["arguments"],
        confirm=0,
        run=folder,
        storage=storage,
        workers=1,
        prompts=None,
        heldout=None,
        text=None,
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
def workers_beside(session: SearchSession) -> Iterator[SharedWork | None]:
    """The search announced, and `workers` - 1 more processes that score and train along; they end
    with the block. What the block gets shares trainings with them; None where nobody was asked to
    help, or nothing is trained.

    Raises ArchsearchError for more workers than a machine should have, and for an executor that is
    not there.
    """
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
    storage = (
        storage if "://" in storage else str(Path(storage).resolve())
    )  # workers may begin in another folder
    gpu = session.source.device.kind != "cpu" and request.confirm > 0  # scoring needs none
    executor = make_executor(
        request.executor, gpu
    )  # what is wrong with it is said before anything is announced
    name = announce(session, storage)
    with ExitStack() as stack:
        shared = None
        if request.confirm:
            shared = SharedWork(storage, name, session.run.info["created"])
            stack.enter_context(shared.held())
        try:
            for number in range(1, request.workers):
                environment = {"OMP_NUM_THREADS": "1", **own_gpu(session, number)}
                executor.start(["worker", "--storage", storage, "--run", name], environment)
            yield shared
        finally:
            for words in executor.stop():
                say(f"a worker ended early: {words}")


def own_gpu(session: SearchSession, number: int) -> dict[str, str]:
    """The environment that gives worker `number` a GPU of its own, where the search is for one and
    this machine has several; the first stays with who began."""
    if session.source.device.kind == "cpu":
        return {}
    gpus = [gpu.uuid for gpu in visible_gpus() if gpu.uuid]
    return {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} if len(gpus) > 1 else {}
