"""The files of a worker's folder, imported as the engine's interpreter finds them: by their own
names, beside `loop`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from archsearch.engines.child import child_engine


@contextmanager
def worker_modules(script: Path) -> Iterator[SimpleNamespace]:
    """Every module of `script`'s folder, and `loop`, by name; gone from sys.modules afterwards."""
    folders = [script.parent, Path(child_engine.__file__).parent]
    names = ["loop", *(path.stem for path in script.parent.glob("*.py") if path.stem != "__init__")]
    before = list(sys.path)
    sys.path[:0] = map(str, folders)
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path[:] = before
        for name in names:
            sys.modules.pop(name, None)
