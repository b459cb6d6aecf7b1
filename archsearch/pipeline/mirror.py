"""A run folder and its copy in an object store: what changed here goes up, what changed there comes down.

For workers that see no shared file system: the search puts its files up before it posts trainings and takes results down after
them, a worker takes files down before a training and puts the draft up after it. Each training is claimed (`search.claims`), so
no two processes write one draft's files at once. What was last seen of both sides is kept in the folder (STAMPS): a search that
was killed takes down what others did meanwhile. Reached through fsspec: s3, gs, az, sftp, hdfs, file, memory and others.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from archsearch.errors import ArchsearchError
from archsearch.files import atomic_path, read_json, write_json
from archsearch.search.storage import without_password

LOCAL: Final = (".lock", "journal.log", "journal.log.lock")  # of the process here, of the storage: not of the trainings
STAMPS: Final = ".mirror.json"
INPUTS: Final = "inputs"  # files from outside the run folder that trainings read, beside the run's own


class Mirror:
    """`folder` here and the same files under `url`. Raises ArchsearchError where the store cannot be reached or written."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        known = read_json(folder / STAMPS, "list of shared files") if (folder / STAMPS).exists() else {}
        self._here: dict[str, str] = known.get("here", {})
        self._there: dict[str, str] = known.get("there", {})
        self.fs, self.root = self._reached(lambda: _opened(url))
        self._reached(lambda: self.fs.makedirs(self.root, exist_ok=True))

    def push(self) -> list[str]:
        """Put up what changed here since it was last put up or taken down; their names."""
        sent = []
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            if path.is_file() and not _stays(path) and self._here.get(name) != _stamp(path):
                self._put(path, name)
                sent.append(name)
        self._keep()
        return sent

    def pull(self) -> list[str]:
        """Take down what changed there since it was last taken down or put up; their names. What was written here and is not put
        up yet stays as it is."""
        found = self._reached(lambda: self.fs.find(self.root, detail=True))
        taken = []
        for key, about in sorted(found.items()):
            name = key.removeprefix(self.root).lstrip("/")
            stamp = _stamp_there(about)
            if self._there.get(name) == stamp or not name or ".." in name.split("/"):
                continue
            path = self.folder / name
            if path.exists() and self._here.get(name) != _stamp(path):
                continue
            with atomic_path(path) as temporary:
                self._reached(partial(self.fs.get_file, key, str(temporary)))
            self._here[name], self._there[name] = _stamp(path), stamp
            taken.append(name)
        self._keep()
        return taken

    def take_in(self, path: Path | None, kind: str) -> str | None:
        """Put up a file from outside the folder; where it then lies in a copy of the folder."""
        if path is None:
            return None
        name = f"{INPUTS}/{kind}{path.suffix}"
        self._put(path, name)
        self._keep()
        return name

    def _keep(self) -> None:
        write_json(self.folder / STAMPS, {"here": self._here, "there": self._there})

    def _put(self, path: Path, name: str) -> None:
        key, before = f"{self.root}/{name}", _stamp(path)  # what is written while it goes up goes up again
        self._reached(lambda: self.fs.makedirs(key.rpartition("/")[0], exist_ok=True))
        self._reached(lambda: self.fs.put_file(str(path), key))
        self.fs.invalidate_cache()
        self._here[name], self._there[name] = before, _stamp_there(self._reached(lambda: self.fs.info(key)))

    def _reached(self, do: Callable[[], Any]) -> Any:
        try:
            return do()
        except ArchsearchError:
            raise
        except Exception as error:  # each store has exceptions of its own
            said = " ".join(str(error).split())[:200] or type(error).__name__
            raise ArchsearchError(f"--share {without_password(self.url)} cannot be used: {said}") from error


def _opened(url: str) -> tuple[Any, str]:
    """(file system, path in it); where listings are kept they would be of before."""
    from fsspec.core import url_to_fs

    fs, root = url_to_fs(url, use_listings_cache=False)
    return fs, str(root).rstrip("/")


def _stays(path: Path) -> bool:
    """Whether a file is of this machine alone: locks, journals, what is just being written."""
    return path.name in LOCAL or path.name.startswith(".")


def _stamp(path: Path) -> str:
    about = path.stat()
    return f"{about.st_size} {about.st_mtime_ns}"


def _stamp_there(about: dict[str, Any]) -> str:
    """What tells a version of a file in a store from others: its size, and its tag or else its time (listings and single looks
    tell that in different types)."""
    names = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "updated", "created")
    found = next((about[name] for name in names if about.get(name) is not None), None)
    return f"{about.get('size')} {found.timestamp() if isinstance(found, datetime) else found}"
