"""OpenVINO's errors as one line each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from loop import Failed


def last_line(error: BaseException) -> str:
    """The line of an error that says most: OpenVINO writes where it was thrown first and what is
    wrong last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]


@contextlib.contextmanager
def openvino_errors(what: str) -> Iterator[None]:
    """OpenVINO throws RuntimeErrors of many lines; the last one says what is wrong."""
    try:
        yield
    except RuntimeError as error:
        line = last_line(error)
        if "allocate" in str(error).lower() or "out of memory" in str(error).lower():
            raise MemoryError(line) from error
        raise Failed(f"{what}: {line}") from error
