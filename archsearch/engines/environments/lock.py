"""One install or removal of an engine at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from archsearch.engines.environments.recipes import environment_dir, recipe
from archsearch.errors import ArchsearchError


@contextmanager
def lock_of(engine: str) -> Iterator[int | None]:
    """One install or removal of an engine at a time, over processes; a killed one leaves nothing
    locked.

    Raises ArchsearchError where another install is running.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield None
        return
    with open(environment_dir(engine).parent / f".{engine}.lock", "w", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ArchsearchError(
                f"another install of {recipe(engine).title} is running; wait for it, then try again"
            ) from None
        yield handle.fileno()
