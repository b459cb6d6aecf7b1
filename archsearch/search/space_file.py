"""What a search space's file may say: checks of its values, each refused in one line with the key
and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from archsearch.errors import ArchsearchError
from archsearch.estimate import is_number

# Order matters: choices are given as indices in this order.
NUMERIC: Final = tuple(
    "num_hidden_layers hidden_size ffn_ratio num_key_value_heads kv_group_size head_dim"
    " draft_vocab_size".split()
)
MEMORY_UNITS: Final = {"MB": 10**6, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}
_FRACTION: Final = re.compile(r"^(\d+(?:\.\d+)?)x$")
_MEMORY: Final = re.compile(r"^(\d+(?:\.\d+)?)\s*(MB|GB|MiB|GiB)$")

Value = int | float | str | bool
MOST_CHOICES: Final = 4096  # of one dimension
LARGEST: Final[Mapping[str, int]] = {"num_hidden_layers": 1024, "": 10_000_000}


def check_keys(
    data: object, allowed: tuple[str, ...], where: str, what: str, name: str = ""
) -> None:
    """Raise ArchsearchError where the part `name` of a file is no mapping, or has a key (`what`)
    that is not allowed."""
    if not isinstance(data, Mapping):
        raise ArchsearchError(
            f"{where}: {name} must be a mapping (key: value), got {type(data).__name__}"
        )
    for key in data:
        if key not in allowed:
            raise ArchsearchError(
                f"{where}: unknown {what} {key!r}; allowed are {', '.join(allowed)}"
            )


def fraction(text: str) -> float:
    """0.5 of `0.5x`; 1 of any other text."""
    match = _FRACTION.match(text)
    return float(match.group(1)) if match else 1.0


def _refused(label: str, value: object, allowed: str) -> ArchsearchError:
    return ArchsearchError(f"{label}: {value!r} is not allowed; use {allowed}")


def is_whole(value: object) -> bool:
    """Whether it is a positive whole number."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_relative(value: object) -> bool:
    return value == "target" or is_fraction(value)


def _is_positive(value: Any) -> bool:
    return is_number(value) and value > 0


Rule = tuple[Callable[[Any], bool], str]
"""Whether a value is allowed, and what is, in words."""
RULES: Final[Mapping[str, Rule]] = {
    "window_pattern": (
        lambda value: isinstance(value, str) and bool(value) and set(value) <= {"L", "S"},
        "text made of L and S",
    ),
    "tie_word_embeddings": (
        lambda value: isinstance(value, bool) or value == "target",
        "true, false or target",
    ),
    "sliding_window": (is_whole, "a positive number of tokens"),
    "ffn_ratio": (
        lambda value: _is_positive(value) or _is_relative(value),
        "a positive number, a fraction such as 0.5x, or target",
    ),
}
WHOLE: Final[Rule] = (
    lambda value: (_is_positive(value) and float(value).is_integer()) or _is_relative(value),
    "a positive whole number, a fraction such as 0.5x, or target",
)
# of a dimension that only one family has; fractions are of the target's layers
EXTRA: Final[Rule] = (
    lambda value: isinstance(value, bool) or is_whole(value) or is_fraction(value),
    "whole numbers, true or false, or a fraction such as 0.5x",
)


def choices(key: str, raw: Any, where: str) -> tuple[Value, ...]:
    """The choices of one dimension, still relative where they are.

    Raises ArchsearchError for what is no list of choices, or too long.
    """
    label, advice = f"{where}: dimensions.{key}", ""
    if isinstance(raw, Mapping):
        if key not in NUMERIC:
            raise ArchsearchError(f"{label} must be a list of choices, got {dict(raw)}")
        check_keys(raw, ("min", "max", "step"), label, "key")
        ends: list[Any] = [raw.get("min"), raw.get("max"), raw.get("step", 1)]
        low, high, step = ends
        if not all(map(is_whole, ends)) or low > high:
            raise ArchsearchError(
                f"{label} needs whole numbers 0 < min <= max and step > 0, got {dict(raw)}"
            )
        raw, advice = range(low, high + 1, step), "; give a larger step"
    raw = raw if isinstance(raw, list | range) else [raw]
    if len(raw) > MOST_CHOICES:
        raise ArchsearchError(
            f"{label} has {len(raw):,} choices, at most {MOST_CHOICES:,} are allowed{advice}"
        )
    largest = LARGEST.get(key, LARGEST[""])
    for value in raw:
        if is_number(value) and value > largest:
            raise ArchsearchError(f"{label}: {value} is too large; at most {largest:,}")
    return allowed([*raw], RULES.get(key, WHOLE), label)


def allowed(raw: object, rule: Rule, label: str) -> tuple[Value, ...]:
    """A choice or a list of them. Raises ArchsearchError for one that `rule` does not allow."""
    values = raw if isinstance(raw, list) else [raw]
    if not values:
        raise ArchsearchError(f"{label} is empty; give at least one choice")
    for value in values:
        if not rule[0](value):
            raise _refused(label, value, rule[1])
    return tuple(values)


def is_fraction(value: object) -> bool:
    """Whether it is a positive fraction such as `0.5x`."""
    return isinstance(value, str) and bool(_FRACTION.match(value)) and fraction(value) > 0


def constraint(key: str, raw: Any, where: str) -> object:
    """A constraint's value, checked; memory in bytes. Raises ArchsearchError for what it cannot
    be."""
    label = f"{where}: constraints.{key}"
    if key == "max_parameters":
        if (is_number(raw) and raw >= 1) or is_fraction(raw):
            return raw
        raise _refused(label, raw, "a number or a fraction of the target's such as 0.5x")
    if key == "max_memory":
        match = _MEMORY.match(raw) if isinstance(raw, str) else None
        if match:
            return int(float(match.group(1)) * MEMORY_UNITS[match.group(2)])
        if _is_positive(raw):
            return int(raw)
        raise _refused(label, raw, f"bytes or a number with {', '.join(MEMORY_UNITS)}")
    pair = isinstance(raw, list | tuple) and len(raw) == 2 and all(is_number(x) for x in raw)
    if pair and 0 <= raw[0] <= raw[1]:
        return (float(raw[0]), float(raw[1]))
    raise _refused(label, raw, "[lowest, highest] query width / hidden_size")
