"""Traces of requests: when each arrived, how long its prompt and its answer were. The usual forms
load:

| form | file | fields |
|---|---|---|
| vLLM's `bench serve --save-detailed` | JSON | lengths, `start_times` or `duration` |
| Mooncake | JSON lines | `timestamp` (ms), `input_length`, `output_length` |
| BurstGPT | CSV | `Timestamp` (s), `Request tokens`, `Response tokens` |

Requests without an answer (0 tokens: they failed) are left out, which the note says.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from archsearch.errors import ArchsearchError
from archsearch.traffic.lengths import Lengths

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
        return _binned([request.prompt_tokens for request in self.requests], "prompts of the trace")

    @property
    def output(self) -> Lengths:
        """Lengths of the answers, tokens."""
        return _binned([request.output_tokens for request in self.requests], "answers of the trace")


def read_trace(path: Path) -> Trace:
    """Raises ArchsearchError for a file of none of the forms, arrivals out of order, negative
    lengths, or fewer than two requests."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # spreadsheets begin with a mark
    except OSError as error:
        raise ArchsearchError(f"cannot read the trace {path}: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise ArchsearchError(f"the trace {path} is no text; it must be {FORMS}") from None
    rows, note = _rows(text, path)
    return _checked(rows, path, note)


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
            return _burst(text.splitlines(), path)
        except csv.Error as error:
            raise ArchsearchError(
                f"the trace {path} is no CSV ({error}); it must be {FORMS}"
            ) from None
    raise ArchsearchError(f"the trace {path} is none that is known here; it must be {FORMS}")


def _vllm(data: Mapping[str, Any], path: Path) -> tuple[list[tuple[float, float, float]], str]:
    prompts, answers = _numbers(data, "input_lens", path), _numbers(data, "output_lens", path)
    starts, note = _numbers(data, "start_times", path), ""
    if not starts:
        (duration,) = _numbers({"duration": [data.get("duration", 0.0)]}, "duration", path)
        if not 0 < duration < math.inf:
            raise ArchsearchError(
                f"the trace {path} does not say when requests arrived: it has neither start_times"
                " nor a duration (seconds)"
            )
        starts = [duration * i / max(len(prompts), 1) for i in range(len(prompts))]
        note = (
            f"{path.name} does not say when requests arrived: spread evenly over its {duration:g} s"
        )
    if not len(prompts) == len(answers) == len(starts):
        raise ArchsearchError(
            f"the trace {path}: {len(starts)} arrivals, {len(prompts)} prompts and {len(answers)}"
            " answers"
        )
    rows = sorted(
        zip(starts, prompts, answers, strict=True)
    )  # they came as they ended; a benchmark's clock is its own
    return rows, note


def _numbers(data: Mapping[str, Any], name: str, path: Path) -> list[float]:
    """A list of numbers of a JSON object, empty where it has none of the name."""
    try:
        return [float(value) for value in data.get(name) or []]
    except (TypeError, ValueError, OverflowError):
        raise ArchsearchError(
            f"the trace {path}: {name} must be numbers, a list of one a request"
        ) from None


def _mooncake(lines: Iterable[str], path: Path) -> list[tuple[float, float, float]]:
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            rows.append(
                (
                    float(data["timestamp"]) / 1e3,
                    float(data["input_length"]),
                    float(data["output_length"]),
                )
            )
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
            raise ArchsearchError(
                f"the trace {path}, line {number}: no timestamp, input_length and output_length; it"
                f" must be {FORMS}"
            ) from None
    return rows


def _burst(lines: list[str], path: Path) -> tuple[list[tuple[float, float, float]], str]:
    rows = []
    names = {name.strip().lower(): name for name in next(csv.reader(lines[:1]))}
    wanted = [names.get(name) for name in ("timestamp", "request tokens", "response tokens")]
    if None in wanted:
        raise ArchsearchError(
            f"the trace {path} has the columns {', '.join(names)}; it must be {FORMS}"
        )
    for number, line in enumerate(csv.DictReader(lines), start=2):
        try:
            row = tuple(float(line[str(name)]) for name in wanted)
        except (TypeError, ValueError):
            raise ArchsearchError(f"the trace {path}, line {number}: a number is missing") from None
        rows.append((row[0], row[1], row[2]))
    return rows, ""


def _checked(read: list[tuple[float, float, float]], path: Path, note: str) -> Trace:
    rows = [(number, *row) for number, row in enumerate(read, start=1) if row[2] != 0]
    if failed := len(read) - len(rows):
        note = "; ".join(
            [*([note] if note else []), f"{failed} requests without an answer were left out"]
        )
    if len(rows) < 2:
        raise ArchsearchError(
            f"the trace {path} holds {len(rows)} requests with an answer; at least 2 are needed"
        )
    began, before = rows[0][1], rows[0][1]
    requests: list[Request] = []
    for number, arrival, prompt, output in rows:
        if (
            not all(math.isfinite(value) for value in (arrival, prompt, output))
            or prompt < 0
            or output < 1
        ):
            raise ArchsearchError(
                f"the trace {path}, request {number}: it arrived at {arrival:g} s with {prompt:g}"
                f" prompt tokens and {output:g} written ones; neither may be negative, and all must"
                " be numbers"
            )
        if arrival < before:
            raise ArchsearchError(
                f"the trace {path} is out of order: request {number} arrived at {arrival:g} s, the"
                f" one before it at {before:g} s; sort it by arrival"
            )
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
        return Lengths.of([float(value) for value in ordered], what=what)
    edges = [round(i * len(ordered) / BINS) for i in range(BINS + 1)]
    parts = [ordered[start:end] for start, end in zip(edges, edges[1:], strict=False)]
    return Lengths.of(
        [sum(part) / len(part) for part in parts], [len(part) for part in parts], what
    )
