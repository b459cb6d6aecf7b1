"""A disk that fills: files under a folder take so many bytes, then every write fails as the
kernel's would."""

from __future__ import annotations

import builtins
import errno
import io
import os
from pathlib import Path
from typing import Any

import pytest


class Disk:
    """Counts what is written under `folder` through Python's files; more than `limit` bytes do not
    fit."""

    def __init__(self, folder: Path, limit: float = float("inf")) -> None:
        self.folder, self.limit, self.written = os.path.abspath(folder), limit, 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Disk:
        opened = io.open

        def open_(file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
            handle = opened(file, mode, *rest, **options)
            inside = isinstance(file, str | os.PathLike) and os.path.abspath(
                os.fspath(file)
            ).startswith(self.folder + os.sep)
            return _Handle(handle, self) if inside and set(mode) & set("wax+") else handle

        monkeypatch.setattr(builtins, "open", open_)
        monkeypatch.setattr(io, "open", open_)
        return self

    def take(self, size: int) -> int:
        """How many of `size` bytes still fit."""
        fits = int(max(0, min(size, self.limit - self.written)))
        self.written += fits
        return fits


class _Handle:
    """A file on the disk."""

    def __init__(self, handle: Any, disk: Disk) -> None:
        self._handle, self._disk = handle, disk

    def write(self, data: Any) -> int:
        fits = self._disk.take(len(data))
        if fits < len(data):
            self._handle.write(data[:fits])  # half of it, as on a real one
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return int(self._handle.write(data))

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __enter__(self) -> _Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.close()

    def __iter__(self) -> Any:
        return iter(self._handle)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)
