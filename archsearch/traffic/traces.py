"""Traces of requests: when each arrived, how long its prompt and its answer were; and lengths as
distributions (`Lengths`): a few values, each with its share. The usual forms of traces load: FORMS.
Requests without an answer (0 tokens: they failed) are left out, which the note says.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Any, Final

import numpy as np

from archsearch.errors import ArchsearchError
from archsearch.estimate import number

POINTS: Final = 16
LONGEST: Final = 10_000_000


@dataclass(frozen=True)
class Lengths:
    """`values` tokens, each with its share of requests (`weights` add up to 1)."""

    values: tuple[int, ...]
    weights: tuple[float, ...]

    @classmethod
    def of(
        cls, counts: Sequence[float], weights: Sequence[float] | None = None, what: str = "lengths"
    ) -> Lengths:
        """From values with their weights (default: alike). Raises ArchsearchError for negative
        lengths, or weights of nothing."""
        shares = [1.0] * len(counts) if weights is None else [*map(number, weights)]
        if not counts or len(shares) != len(counts):
            raise ArchsearchError(
                f"{what}: {len(counts)} values and {len(shares)} weights; there must be as many, at"
                " least one"
            )
        if not all(0 <= value <= LONGEST for value in counts):
            raise ArchsearchError(
                f"{what}: a length must lie between 0 and {LONGEST}, got {min(counts)} to"
                f" {max(counts)}"
            )
        total = math.fsum(shares)
        if min(shares) < 0 or not 0 < total < math.inf:
            raise ArchsearchError(
                f"{what}: weights must be numbers, none negative, not all 0, got {shares}"
            )
        return cls(tuple(map(round, counts)), tuple(share / total for share in shares))

    @classmethod
    def read(cls, data: object, what: str) -> Lengths:
        """A number; `{mean, std}` (log-normal); `{low, high}` (even); `{values, weights}`.
        ArchsearchError for anything else."""
        if isinstance(data, int | float) and not isinstance(data, bool):
            return cls.of([data], what=what)
        if isinstance(data, Mapping):
            names = set(data)
            try:
                if names == {"mean", "std"}:
                    return cls._log_normal(number(data["mean"]), number(data["std"]), what)
                if names == {"low", "high"}:
                    low, high = number(data["low"]), number(data["high"])
                    if not low <= high:
                        raise ArchsearchError(f"{what}: low {low:g} lies above high {high:g}")
                    steps = (np.arange(POINTS) + 0.5) / POINTS
                    return cls.of((low + (high - low) * steps).tolist(), what=what)
                if names in ({"values"}, {"values", "weights"}):
                    return cls.of([*map(number, data["values"])], data.get("weights"), what)
            except (TypeError, ValueError, OverflowError) as error:
                if isinstance(error, ArchsearchError):
                    raise
                raise ArchsearchError(f"{what}: {data!r} holds what is no number") from None
        raise ArchsearchError(
            f"{what}: {data!r} is neither a number, {{mean, std}}, {{low, high}} nor {{values,"
            " weights}"
        )

    def quantiles(self, shares: np.ndarray) -> np.ndarray:
        """Of shares of the requests, in any shape, over the mean."""
        flat = shares.ravel()  # all that numpy takes with weights
        found = np.quantile(self.values, flat, weights=self.weights, method="inverted_cdf")
        return found.reshape(shares.shape) / self.mean

    @classmethod
    def _log_normal(cls, mean: float, std: float, what: str) -> Lengths:
        if not 0 < mean < math.inf or not 0 <= std < math.inf:
            raise ArchsearchError(
                f"{what}: mean must be positive and std not negative, got {mean:g} and {std:g}"
            )
        if std == 0:
            return cls.of([mean], what=what)
        spread = math.sqrt(math.log1p((std / mean) ** 2))
        normal = [NormalDist().inv_cdf((step + 0.5) / POINTS) for step in range(POINTS)]
        values = np.exp(spread * np.array(normal))
        return cls.of((values * mean / values.mean()).tolist(), what=what)

    @property
    def cv2(self) -> float:
        """Squared coefficient of variation; 0 where all are alike."""
        return max(0.0, self.mean_square / self.mean**2 - 1.0) if self.mean else 0.0

    @property
    def mean(self) -> float:
        return self._moment(1)

    @property
    def mean_square(self) -> float:
        return self._moment(2)

    def _moment(self, power: int) -> float:
        both = zip(self.values, self.weights, strict=True)
        return math.fsum(value**power * weight for value, weight in both)

    def sample(self, rng: np.random.Generator, count: int) -> list[int]:
        """`count` lengths by chance."""
        return rng.choice(self.values, size=count, p=self.weights).tolist()


def mean_context(prompt: Lengths, output: Lengths) -> int:
    """Tokens in the cache of a request that decodes, on the mean over time: long answers are seen
    for longer."""
    written = output.mean
    return round(prompt.mean + (output.mean_square / (2.0 * written) if written else 0.0))


FORMS: Final = (
    "vLLM's bench serve JSON, Mooncake's JSON lines (timestamp, input_length, output_length) or"
    " BurstGPT's CSV"
)
BINS: Final = 64


@dataclass(frozen=True, slots=True)
class Request:
    """One request: seconds after the first, tokens of its prompt, tokens that were written."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Trace:
    """Requests by arrival; `note`: what a reader must know of how they were read."""

    requests: tuple[Request, ...]
    note: str = ""

    @property
    def requests_per_s(self) -> float:
        """Mean rate between the first and the last arrival."""
        span = self.requests[-1].arrival_s
        return (len(self.requests) - 1) / span if span > 0 else math.inf

    @property
    def prompt(self) -> Lengths:
        """Lengths of the prompts, tokens."""
        return _binned([each.prompt_tokens for each in self.requests], "prompts of the trace")

    @property
    def output(self) -> Lengths:
        """Lengths of the answers, tokens."""
        return _binned([each.output_tokens for each in self.requests], "answers of the trace")


def read_trace(path: Path) -> Trace:
    """Raises ArchsearchError for a file of none of the forms, arrivals out of order, negative
    lengths, or fewer than two requests."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # spreadsheets begin with a mark
    except OSError as error:
        raise ArchsearchError(f"cannot read the trace {path}: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise _bad(path, f" is no text; it must be {FORMS}") from None
    rows, note = _rows(text, path)
    return _checked(rows, path, note)


def _bad(path: Path, words: str) -> ArchsearchError:
    return ArchsearchError(f"the trace {path}{words}")


def _rows(text: str, path: Path) -> tuple[list[tuple[float, float, float]], str]:
    start = text.lstrip()[:1]
    if start == "{":
        try:
            whole = json.loads(text)
        except (ValueError, RecursionError):
            whole = None
        if isinstance(whole, dict) and "input_lens" in whole:
            return _vllm(whole, path)
        return _mooncake(text.splitlines(), path), ""
    if start and "," in text.partition("\n")[0]:
        try:
            return _burst(text.splitlines(), path), ""
        except csv.Error as error:
            raise _bad(path, f" is no CSV ({error}); it must be {FORMS}") from None
    raise _bad(path, f" is none that is known here; it must be {FORMS}")


def _vllm(data: Mapping[str, object], path: Path) -> tuple[list[tuple[float, float, float]], str]:
    prompts, answers = _numbers(data, "input_lens", path), _numbers(data, "output_lens", path)
    starts, note = _numbers(data, "start_times", path), ""
    if not starts:
        (duration,) = _numbers({"duration": [data.get("duration", 0.0)]}, "duration", path)
        if not 0 < duration < math.inf:
            words = "it has neither start_times nor a duration (seconds)"
            raise _bad(path, f" does not say when requests arrived: {words}")
        starts = [duration * i / max(len(prompts), 1) for i in range(len(prompts))]
        note = (
            f"{path.name} does not say when requests arrived: spread evenly over its {duration:g} s"
        )
    if not len(prompts) == len(answers) == len(starts):
        raise _bad(
            path, f": {len(starts)} arrivals, {len(prompts)} prompts and {len(answers)} answers"
        )
    # they came as they ended; a benchmark's clock is its own
    return sorted(zip(starts, prompts, answers, strict=True)), note


def _numbers(data: Mapping[str, Any], name: str, path: Path) -> list[float]:
    """A list of numbers of a JSON object, empty where it has none of the name."""
    try:
        return [float(value) for value in data.get(name) or []]
    except (TypeError, ValueError, OverflowError):
        raise _bad(path, f": {name} must be numbers, a list of one a request") from None


def _mooncake(lines: Iterable[str], path: Path) -> list[tuple[float, float, float]]:
    rows = []
    for count, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            names = ("timestamp", "input_length", "output_length")
            at, prompt, answer = (float(data[name]) for name in names)
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
            raise _bad(
                path,
                f", line {count}: no timestamp, input_length and output_length; it must be {FORMS}",
            ) from None
        rows.append((at / 1e3, prompt, answer))
    return rows


def _burst(lines: list[str], path: Path) -> list[tuple[float, float, float]]:
    rows = []
    names = {name.strip().lower(): name for name in next(csv.reader(lines[:1]))}
    wanted = [names.get(name) for name in ("timestamp", "request tokens", "response tokens")]
    if None in wanted:
        raise _bad(path, f" has the columns {', '.join(names)}; it must be {FORMS}")
    for count, line in enumerate(csv.DictReader(lines), start=2):
        try:
            at, prompt, answer = (float(line[str(name)]) for name in wanted)
        except (TypeError, ValueError):
            raise _bad(path, f", line {count}: a number is missing") from None
        rows.append((at, prompt, answer))
    return rows


def _checked(read: list[tuple[float, float, float]], path: Path, note: str) -> Trace:
    rows = [(count, *row) for count, row in enumerate(read, start=1) if row[2] != 0]
    if failed := len(read) - len(rows):
        words = f"{failed} requests without an answer were left out"
        note = f"{note}; {words}" if note else words
    if len(rows) < 2:
        raise _bad(path, f" holds {len(rows)} requests with an answer; at least 2 are needed")
    began = before = rows[0][1]
    requests: list[Request] = []
    for count, *row in rows:
        arrival, prompt, output = row
        if not all(map(math.isfinite, row)) or prompt < 0 or output < 1:
            raise _bad(
                path,
                f", request {count}: it arrived at {arrival:g} s with {prompt:g}"
                f" prompt tokens and {output:g} written ones; neither may be negative, and all must"
                " be numbers",
            )
        if arrival < before:
            words = f"request {count} arrived at {arrival:g} s, the one before it at {before:g} s"
            raise _bad(path, f" is out of order: {words}; sort it by arrival")
        requests.append(Request(arrival - began, int(prompt), int(output)))
        before = arrival
    if requests[-1].arrival_s <= 0:
        raise ArchsearchError(
            f"all {len(requests)} requests of the trace {path} arrive at once: it has no rate"
        )
    return Trace(tuple(requests), note)


def _binned(values: list[int], what: str) -> Lengths:
    """At most BINS values: the means of equal shares of the sorted lengths."""
    ordered = sorted(values)
    if len(ordered) <= BINS:
        return Lengths.of(ordered, what=what)
    edges = [round(i * len(ordered) / BINS) for i in range(BINS + 1)]
    parts = [ordered[start:end] for start, end in pairwise(edges)]
    return Lengths.of([sum(part) / len(part) for part in parts], [*map(len, parts)], what)
