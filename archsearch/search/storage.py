"""Where studies are kept: a journal file, a database, Optuna's gRPC proxy; what goes wrong there in
one line; which study a search has there.

The journal file outlives a SIGKILL. Optuna's own lock is a symbolic link, which a killed process
leaves behind: its owner is waited for for 30 s, and where the journal was named by a relative path
for ever. The lock here is the kernel's (`files.locked`).

Each question has a study of its own, named by a digest of its identity, so that searches that share
a storage never take each other's scores for their own. The identity lists what is known to matter
and a witness: what the scorer says of the target and of two plain shapes, which whatever else
changes a score (coefficients of another version, a constant of an engine) changes too.
"""

from __future__ import annotations

import json
import os
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from archsearch.acceptance.estimator import AcceptanceEstimator
from archsearch.errors import ArchsearchError, InvalidShapeError
from archsearch.files import digest, locked, writing
from archsearch.records import as_data
from archsearch.search.objective import Scorer
from archsearch.search.space import SearchSpace, numeric_values

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from optuna.study import Study


GRPC: Final = "grpc://"
GRPC_PORT: Final = 13000
GRPC_TIMEOUT_S: Final = 20.0
MAKING_TRIES: Final = 10
MAKING_S: Final = 0.5


@contextmanager
def alone(path: str) -> Iterator[None]:
    """A block during which no other process writes the journal file."""
    with open(path, "ab") as handle:  # closing it unlocks
        locked(handle, wait=True)
        yield


def without_password(storage: str | None) -> str | None:
    """A storage's URL as it may be written down: `mysql://me:secret@host/db?password=secret`
    without the secrets. Of a query only names are kept: drivers call a password `password`,
    `passwd`, `sslkey`, ..."""
    if storage is None or "://" not in storage:
        return storage
    masked = re.sub(r"(://[^:/@]*):.*@", r"\1:***@", storage)
    place, mark, query = masked.partition("?")
    return place + mark + re.sub(r"(^|[&;])([^=&;]*)=[^&;]*", r"\1\2=***", query)


@contextmanager
def storage_errors(storage: object) -> Iterator[None]:
    """What a storage raises as one line: it cannot be reached, its driver is missing, it has
    another schema.

    Raises ArchsearchError with that line.
    """
    name = without_password(str(storage))
    try:
        yield
    except ArchsearchError:
        raise
    except OSError as error:
        raise ArchsearchError(
            f"cannot open storage {name}: {error.strerror or error}; choose another --storage"
        ) from error
    except ImportError as error:
        missing = {"grpc": "grpcio"}.get(error.name or "", error.name or str(error))
        raise ArchsearchError(
            f"storage {name} needs the Python package {missing}; install it (pip install {missing})"
        ) from error
    except Exception as error:
        if (reason := _reason(error)) is None:
            raise
        raise ArchsearchError(f"storage {name} {reason}") from error


def _reason(error: Exception) -> str | None:
    """What is wrong with a storage; None for an error that is none of a storage's."""
    kinds = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    said = " ".join(str(getattr(error, "orig", None) or error).split())
    said = re.sub(r"\S+://\S+", lambda found: without_password(found[0]) or "", said)[:200]
    if "no longer compatible" in said or "alembic" in said or "schema" in said.lower():
        return (
            "has the schema of another version of Optuna; make a new one, or: optuna storage"
            " upgrade --storage URL"
        )
    if "grpc" in kinds:
        return (
            "does not answer: is `optuna.storages.run_grpc_proxy_server` running there, and its"
            " port open?"
        )
    lacking = "no such table" in said or "no such column" in said
    if lacking or ("does not exist" in said and "relation" in said):
        return f"is a database of something else ({said}); name an empty one"
    if "sqlalchemy" in kinds or "optuna" in kinds:
        return f"cannot be used ({said}); is it running, and are name and password right?"
    return None


def open_storage(where: str | Path, *, new: bool = True) -> BaseStorage:
    """An Optuna storage: of a URL (`sqlite:///x.db`, `postgresql+psycopg2://...`),
    `grpc://host:port` of Optuna's proxy, anything else the path of a journal file. Raises
    ArchsearchError where it cannot be used, in one line; where it is a file that is not there, too,
    unless it may be `new`."""
    import optuna

    # what it does with its studies is not this command's output
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    text = str(where)
    file = re.sub(r"^sqlite[^:]*:///([^?]+).*", r"\1", text)
    if not new and "://" not in file and not Path(file.removeprefix("file:")).is_file():
        name = without_password(text)
        raise ArchsearchError(f"storage {name} does not exist; name the one of the search")
    if "://" in text:
        with storage_errors(text):
            return _grpc(text) if text.startswith(GRPC) else _database(text)
    from optuna.storages import JournalStorage

    with writing(text, "choose a folder you can write to"):
        Path(text).parent.mkdir(parents=True, exist_ok=True)
        drop_torn_line(text)
        return JournalStorage(journal_backend(text))


def _database(url: str) -> BaseStorage:
    """A database's storage. Of several processes that open an empty one together, all but the first
    find its tables half made."""
    from optuna.storages import RDBStorage
    from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError

    for attempt in range(MAKING_TRIES):
        try:
            return RDBStorage(url)
        except (IntegrityError, OperationalError, ProgrammingError) as error:
            if "already exists" not in str(error) or attempt + 1 == MAKING_TRIES:
                raise
            time.sleep(MAKING_S)
    raise AssertionError("not reached")


def _grpc(text: str) -> BaseStorage:
    host, _, port = text.removeprefix(GRPC).strip("/").partition(":")
    if not host or (port and not port.isdigit()):
        raise ArchsearchError(
            f"storage {text} is no address of a proxy; write grpc://host:{GRPC_PORT}"
        )
    from optuna.storages import GrpcStorageProxy

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna calls it experimental
        proxy = GrpcStorageProxy(host=host, port=int(port or GRPC_PORT))
    proxy.wait_server_ready(timeout=GRPC_TIMEOUT_S)
    return proxy


def journal_backend(path: str) -> Any:
    """Optuna's journal file, without its fsync at every record: what a process wrote outlives its
    being killed, and a search of 2,000 shapes spent most of its time in them. A crash of the whole
    machine may cost the last records, which a continued search scores again."""
    from optuna.storages.journal import JournalFileBackend

    class Journal(JournalFileBackend):
        def append_logs(self, logs: list[dict[str, object]]) -> None:
            lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
            with alone(path):
                size = os.path.getsize(path)
                try:
                    with open(path, "ab") as journal:
                        journal.write(lines.encode())
                except OSError:  # a full disk: no half record may stay for others to stumble over
                    os.truncate(path, size)
                    raise

    return Journal(path)


def drop_torn_line(path: str) -> None:
    """Cut a last line without its end off the journal: what a killed process or a full disk left of
    a record."""
    if os.path.exists(path):
        with alone(path), open(path, "rb+") as journal:
            journal.truncate(journal.read().rfind(b"\n") + 1)


Direction = Literal["maximize", "minimize"]
STUDY: Final = "archsearch"  # what the name of a search's study begins with
ATTRIBUTE: Final = "archsearch"  # user attribute of a study: its identity
# of the plain shapes that bear witness: the target's own layers, a quarter of its vocabulary
PLAIN_LAYERS: Final = (2, 4)
DIGITS: Final = 6  # of the witness: sums differ in the last digits from machine to machine


def identity_of(
    space: SearchSpace, scorer: Scorer, about: Mapping[str, object]
) -> dict[str, object]:
    """Everything a score in this search depends on, as JSON. `about`: what the caller knows besides
    (profile, engine)."""
    # asked first: an estimator may learn its target by being asked
    context, witness = scorer.context, _witness(space, scorer)
    data = {
        "space": {**space.to_dict(), "draft_ranks": space.draft_ranks, "longest": space.longest},
        "target": scorer.target.to_dict(),
        "workload": as_data(scorer.workload),
        "gammas": list(scorer.gammas),
        "acceptance": _state(scorer.acceptance),
        "domain": context.domain,
        "drafter": context.drafter,
        "trained_tokens": context.trained_tokens,
        **({} if context.pretrain_tokens is None else {"pretrain_tokens": context.pretrain_tokens}),
        "coverage": None if context.coverage is None else digest(context.coverage.points),
        "limits": asdict(scorer.limits),
        "target_correlation": scorer.target_correlation,
        "about": dict(about),
        "witness": witness,
    }
    if context.budget is not None:  # what a score says that a drafter needs
        numbers = asdict(context.budget)
        del numbers["source"]
        data["budget"] = {name: f"{value:.3g}" for name, value in numbers.items()}
    return json.loads(json.dumps(data, default=str))  # as it will be read back: tuples are lists


def study_name(identity: Mapping[str, object]) -> str:
    """The name of the study of an identity: `archsearch-<8 hexadecimal digits>`."""
    return f"{STUDY}-{digest(identity)[:8]}"


def open_study(
    storage: BaseStorage, identity: Mapping[str, object], directions: Sequence[Direction]
) -> Study:
    """The study of an identity in a storage, new where it is not there yet.

    Raises ArchsearchError for a study of another space.
    """
    import optuna

    name = study_name(identity)
    study = optuna.create_study(
        storage=storage, study_name=name, directions=list(directions), load_if_exists=True
    )
    found = study.user_attrs.get(ATTRIBUTE)
    if found is None:
        study.set_user_attr(ATTRIBUTE, dict(identity))
    elif found != identity:
        keys = sorted(key for key in {*found, *identity} if found.get(key) != identity.get(key))
        raise ArchsearchError(
            f"study {name} in the storage is about another {', '.join(keys)}; use another --storage"
            " or --run"
        )
    return study


def _state(acceptance: AcceptanceEstimator) -> str:
    kind = type(acceptance).__name__
    to_dict = getattr(acceptance, "to_dict", None)
    if to_dict is not None:
        return f"{kind} {digest(to_dict())}"
    if is_dataclass(acceptance) and not isinstance(acceptance, type):
        return f"{kind} {digest(asdict(acceptance))}"
    return kind  # the witness knows what it predicts


def _witness(space: SearchSpace, scorer: Scorer) -> list[str]:
    """Numbers of this scorer: the target's decode step, and the first plain shape's best gamma,
    alpha, times and speed-up."""
    numbers, target = [scorer.decode_s.value], scorer.target
    rows = max(target.vocab_size // 4, 1)
    plain: dict[str, Any] = {**numeric_values(target), "draft_vocab_size": rows, "window": "L"}
    for layers in PLAIN_LAYERS:
        nearest = space.nearest({**plain, "num_hidden_layers": layers}, target)
        shape = space.build(nearest, target)
        if isinstance(shape, InvalidShapeError):
            continue
        with suppress(InvalidShapeError):
            score = scorer(shape)
            estimates = (score.alpha, score.tau, score.draft_s, score.verify_s, score.speedup)
            numbers.append(score.gamma)
            numbers += [number for item in estimates for number in (item.value, item.std)]
    return [f"{number:.{DIGITS}g}" for number in numbers]
