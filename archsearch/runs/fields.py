"""How a file of a run is read: its fields checked one by one, and a file that is broken told in one
line.

A type of this room is written by its `to_dict` and read by its `from_dict`, side by side in one
module. `from_dict` may raise any of WRONG_SHAPE; `read_or_raise` makes an error of the user's out
of it, `read_or_tell` a line beside the other files' content.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from archsearch import files
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate, number

# What a file of another shape than expected raises while it is read.
WRONG_SHAPE: Final = (
    ArchsearchError,
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    IndexError,
    OverflowError,
)

_T = TypeVar("_T")


def read_or_raise(path: Path, what: str, make: Callable[[Any], _T]) -> _T | None:
    """`make` of the JSON in `path`; None where it is missing. ArchsearchError (one line, names
    `path`) where it is broken."""
    if not path.is_file():
        return None
    try:
        return make(files.read_json(path, what))
    except ArchsearchError as error:
        raise (
            error if str(path) in str(error) else ArchsearchError(f"{what} {path}: {error}")
        ) from error
    except WRONG_SHAPE as error:
        raise ArchsearchError(
            f"{what} {path} is not what archsearch writes ({type(error).__name__}: {error})"
        ) from error


def read_or_tell(
    path: Path, what: str, make: Callable[[Any], _T], problems: list[str]
) -> _T | None:
    """As `read_or_raise`, but a broken file is None and one line more in `problems`: the other
    files are shown all the same."""
    try:
        return read_or_raise(path, what, make)
    except ArchsearchError as error:
        problems.append(str(error))
        return None


def optional_number(value: Any) -> float | None:
    """`number`, None for None."""
    return None if value is None else number(value)


def as_estimate(value: Any) -> Estimate:
    """An Estimate out of its dict, or out of a bare number (std unknown counts as 0)."""
    return (
        Estimate.from_dict(dict(value))
        if isinstance(value, Mapping)
        else Estimate(number(value), 0.0, "measured")
    )
