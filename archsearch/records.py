"""Records: frozen dataclasses and the JSON-ready dicts of the same fields, by their type hints.

    @dataclass(frozen=True)
    class Row:
        gamma: Annotated[int, Stored(low=1)]                # at least 1
        speedup: Estimate                                   # a bare number is one of std 0
        seconds: Maybe[float] = None                        # left out of a file where None
        stopped: Annotated[str, Stored(name="why")] = ""    # as files call it

    as_data(row)                        # a dict of dicts, lists, numbers and text
    from_data(Row, data)                # the inverse
    load(path, "rows", tuple[Row, ...])

Fields may be numbers, text, Literals, paths, optional, tuples, lists, mappings, dataclasses and
whatever has a `to_dict` and a `from_dict` of its own, which go before its fields. What a class
names in ALSO (properties, methods without arguments) is shown and not read back. A field that a
file lacks has its default, and so has one that is null where None does not belong; fields that are
not known are passed over. What else does not fit is one line with the field's place and its value.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import repeat
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from archsearch import files
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate, is_number, number

_T = TypeVar("_T")
# What data of another shape than expected raises while it is read; ArchsearchError is a ValueError.
WRONG_SHAPE: Final = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """How a field is kept: under which `name` ("": its own); `omit`: left out where it equals its
    default; `inline`: its fields, none of None, stand among those of the record around it; `low`
    (or `above`) to `high`: what its number, or the value of its estimate, may be."""

    name: str = ""
    omit: bool = False
    inline: bool = False
    low: float | None = None
    high: float | None = None
    above: float | None = None


Inline = Annotated[_T, Stored(inline=True)]
Maybe = Annotated[_T | None, Stored(omit=True)]
Share = Annotated[float, Stored(low=0.0, high=1.0)]


class Misfit(ArchsearchError):
    """A value that is not `what` its field holds; `place`: the fields down to it."""

    def __init__(self, what: str, place: str = "") -> None:
        super().__init__(f"{place}: {what}" if place else what)
        self.what, self.place = what, place

    @classmethod
    def at(cls, place: str, error: Exception) -> Misfit:
        """`error`, which came up in the field or the item `place`."""
        inner = error.place if isinstance(error, cls) else ""
        what = error.what if isinstance(error, cls) else str(error)
        if isinstance(error, KeyError):
            what = f"{what} is missing"
        dot = "." if place and inner and not inner.startswith("[") else ""
        return cls(what, f"{place}{dot}{inner}")


class _Field(NamedTuple):
    name: str
    key: str
    kind: object
    stored: Stored
    default: object


def as_data(record: Any) -> dict[str, Any]:
    """The fields of a record as JSON holds them."""
    data: dict[str, Any] = {}
    for field in _fields(type(record)):  # type: ignore[arg-type]
        value = getattr(record, field.name)
        if not field.stored.omit or value != field.default:
            own = encoded(value)
            data |= own or {} if field.stored.inline else {field.key: own}
    for name in getattr(record, "ALSO", ()):
        value = getattr(record, name)
        data[name] = encoded(value() if callable(value) else value)
    return data


def from_data(kind: Callable[..., _T], data: Any, *, known_only: bool = False) -> _T:
    """The `kind` (a dataclass, or any other type that a field may have) that `data` holds. Raises
    ArchsearchError with the field and its value for what is none, and for fields that are not known
    where `known_only`."""
    try:
        fields = _is_record(kind) and kind is not Estimate
        return _of_fields(kind, data, known_only) if fields else _decode(kind, data)
    except WRONG_SHAPE as error:
        raise Misfit.at("", error) from error


def save(path: Path, record: object) -> None:
    """Write a record, or a sequence or mapping of them, as JSON."""
    files.write_json(path, encoded(record))


def load(path: Path, what: str, kind: Callable[..., _T]) -> _T | None:
    """The `kind` (a type, or a function of the content) in the JSON file `path`, called `what`;
    None where there is no file. ArchsearchError, one line, where it is broken."""
    if not path.is_file():
        return None
    try:
        data = files.read_json(path, what)
        function = isinstance(kind, types.MethodType | types.FunctionType)
        return kind(data) if function else _decode(kind, data)
    except ArchsearchError as error:
        if str(path) in str(error):
            raise
        misfit = " is not what archsearch writes" if isinstance(error, Misfit) else ""
        raise ArchsearchError(f"{what} {path}{misfit}: {error}") from error
    except WRONG_SHAPE as error:
        words = f"{type(error).__name__}: {error}"
        raise ArchsearchError(f"{what} {path} is not what archsearch writes ({words})") from error


def load_or_note(path: Path, what: str, kind: Callable[..., _T], problems: list[str]) -> _T | None:
    """As `load`, but a broken file is None and one line more in `problems`."""
    try:
        return load(path, what, kind)
    except ArchsearchError as error:
        problems.append(str(error))
        return None


def _is_record(kind: object) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


@cache
def _fields(kind: Any) -> tuple[_Field, ...]:
    """The fields of a dataclass that its constructor takes."""
    hints = get_type_hints(kind, include_extras=True)
    found = []
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        extras = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        stored = next((each for each in extras if isinstance(each, Stored)), Stored())
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        if field.init:
            key = stored.name or field.name
            found.append(_Field(field.name, key, hint, stored, default))
    return tuple(found)


def encoded(value: object) -> Any:
    """What JSON holds of a value: of records, and of what holds them, their fields."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if _is_record(type(value)):
        return as_data(value)
    if isinstance(value, Mapping):
        return {str(key): encoded(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [encoded(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no infinity
    return str(value) if isinstance(value, Path) else value


def _of_fields(kind: Any, data: Any, known_only: bool = False) -> Any:
    values, fields, rest = {}, _fields(kind), _object(data)
    inline = any(field.stored.inline for field in fields)
    if inline or known_only:
        own = {field.key for field in fields}
        rest = {name: value for name, value in data.items() if name not in own}
        if rest and not inline:
            raise Misfit("is not known", str(next(iter(rest))))
    for field in fields:
        given = rest if field.stored.inline else data.get(field.key)
        if given is None and (field.key not in data or not _takes_none(field.kind)):
            if field.default is dataclasses.MISSING:
                raise Misfit("is missing", field.key)
            continue  # the constructor's default, which a factory makes anew
        values[field.name] = _at("" if field.stored.inline else field.key, field.kind, given)
    return kind(**values)


def _decode(kind: object, data: object) -> Any:
    """A value of the type `kind` out of JSON. Raises one of WRONG_SHAPE."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is None:
        return _decode_plain(kind, data)
    if origin is Annotated:
        value = _decode(args[0], data)
        for each in args[1:]:
            if isinstance(each, Stored) and value is not None:
                _check_bounds(value, each)
        return value
    if origin in (Union, types.UnionType):
        return None if data is None and _takes_none(kind) else _decode_any(args, data)
    if origin is Literal:
        if not any(data == value and type(data) is type(value) for value in args):
            raise _misfit(f"one of {', '.join(map(str, args))}", data)
        return data
    if issubclass(origin, Mapping):
        key = int if args[0] is int else partial(_decode, args[0])
        return {key(name): _at(name, args[1], each) for name, each in _object(data).items()}
    fixed = origin is tuple and args[-1] is not ...
    if not isinstance(data, list | tuple) or (fixed and len(data) != len(args)):
        raise _misfit(f"a list of {len(args)}" if fixed else "a list", data)
    kinds = args if fixed else repeat(args[0])
    made = (_at(f"[{n}]", each, data[n]) for n, each in zip(range(len(data)), kinds, strict=False))
    return list(made) if origin is list else tuple(made)


def _decode_plain(kind: Any, data: Any) -> Any:
    if dataclasses.is_dataclass(data) and isinstance(data, kind):
        return data  # made already
    if kind is Estimate and not isinstance(data, Mapping):
        return Estimate(number(data), 0.0, "measured")
    if hasattr(kind, "from_dict"):
        return kind.from_dict(_object(data))
    if _is_record(kind):
        return _of_fields(kind, data)
    wanted, fits = _PLAIN[kind]
    if not fits(data):
        raise _misfit(wanted, data)
    return kind(data) if kind in (float, Path) else data


def _decode_any(kinds: Sequence[object], data: object) -> object:
    *others, last = [kind for kind in kinds if kind is not type(None)]
    for kind in others:
        try:
            return _decode(kind, data)
        except WRONG_SHAPE:
            continue
    return _decode(last, data)


def _takes_none(kind: object) -> bool:
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    return kind in (Any, object) or type(None) in get_args(kind)


def _at(place: str, kind: object, data: object) -> object:
    try:
        return _decode(kind, data)
    except WRONG_SHAPE as error:
        raise Misfit.at(place, error) from error


def _object(data: object) -> Mapping[str, object]:
    if not isinstance(data, Mapping):
        raise _misfit("an object", data)
    return data


def _check_bounds(value: Any, stored: Stored) -> None:
    value = value.value if isinstance(value, Estimate) else value
    if stored.low is not None and value < stored.low:
        raise _misfit(f"at least {stored.low:g}", value)
    if stored.above is not None and not value > stored.above:
        raise _misfit(f"above {stored.above:g}", value)
    if stored.high is not None and value > stored.high:
        raise _misfit(f"at most {stored.high:g}", value)


def _misfit(wanted: str, value: object) -> Misfit:
    text = repr(value)
    return Misfit(f"must be {wanted}, got {text if len(text) <= 60 else text[:40] + '...'}")


_PLAIN: Final[Mapping[object, tuple[str, Callable[[object], bool]]]] = {
    bool: ("true or false", lambda data: isinstance(data, bool)),
    int: ("a whole number", lambda data: type(data) is int),
    float: ("a finite number", is_number),
    str: ("text", lambda data: isinstance(data, str)),
    Path: ("a path", lambda data: isinstance(data, str)),
    dict: ("an object", lambda data: isinstance(data, dict)),
    Any: ("", lambda data: True),
    object: ("", lambda data: True),
}
