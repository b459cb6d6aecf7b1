"""What can go wrong, sorted by who can mend it.

`ArchsearchError` (exit status 2) is for what the user can mend: one line that says what is wrong,
with the value, and what to do. `RunFailed` (exit status 1) is a run that was set up correctly and
failed. Everything else is a bug and keeps its traceback.
"""

from __future__ import annotations

from typing import Any


class ArchsearchError(ValueError):
    """Something the user can mend. The message is one line: what is wrong, the value, what to
    do."""

    exit_code = 2


class MissingDataError(ArchsearchError):
    """A measurement, file or weight that is needed is not there."""


class InvalidShapeError(ArchsearchError):
    """An architecture whose numbers contradict each other."""


class RunFailed(ArchsearchError):
    """A well-formed run that failed (an engine died, a loss became NaN). `results`: what it had
    come to before, if anything."""

    exit_code = 1
    results: Any = None


class Stopped(KeyboardInterrupt):
    """Somebody ended a run that had come to `results`."""

    results: Any = None


def first_line(error: Exception) -> str:
    """What an error of a library says, in one line; its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


OF_TORCH = "torch transformers accelerate gguf safetensors tokenizers huggingface_hub".split()
"""What the extra `torch` installs."""


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """What to install where a package of an extra is missing, in one line; None for any other
    module, which is a bug."""
    package = (error.name or "").partition(".")[0]
    if package not in OF_TORCH:
        return None
    return f'this needs {package}, which is not installed; run: pip install "archsearch[torch]"'
