"""Where shipped data lies (checkout or wheel) and where caches go."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

STORAGE_VARIABLE: Final = "ARCHSEARCH_STORAGE"  # the storage's URL, where others must not see it
PACKAGE: Final = Path(__file__).resolve().parent


def data_dir(name: str) -> Path:
    """The shipped folder `name` (profiles, search_spaces): inside the wheel, or beside the package
    in a checkout."""
    installed = PACKAGE / "_data" / name
    return installed if installed.is_dir() else PACKAGE.parent / name


def shown(path: Path) -> Path:
    """Relative to the working directory where it lies in that."""
    whole, here = path.resolve(), Path.cwd().resolve()
    return whole.relative_to(here) if whole.is_relative_to(here) else path


def cache_dir() -> Path:
    """Converted targets and other things that can be made again; $ARCHSEARCH_CACHE overrides
    ~/.cache/archsearch."""
    override = os.environ.get("ARCHSEARCH_CACHE")
    if override:
        return Path(override).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "archsearch"
