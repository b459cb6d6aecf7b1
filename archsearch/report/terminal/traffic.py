"""What `traffic` and `bench-serve` print: drafts under a load, as predicted and as a server did
it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from archsearch.engines.openai.bench import Measured
from archsearch.records import Inline, Maybe
from archsearch.report.answer import switched_words
from archsearch.report.phrases import UNITS, Asked, AskedPart, ServedBy
from archsearch.report.terminal.layout import table, wrapped
from archsearch.runs.tables import Remedied
from archsearch.traffic.served import ServedPart
from archsearch.traffic.simulation import Simulated
from archsearch.traffic.steady import Steady

MEANS: Final = (
    "Predicted means. running: requests that decode at once. A first token holds its prompt and its"
    " waiting."
)
MANY: Final = 256
"""Requests that engines run at once at most by default (vLLM's max_num_seqs); memory may hold
fewer."""
ROWS: Final = (
    ("tpot_s", "ms a token, mean", 1e3, 2),
    ("tpot_median_s", "ms a token, median", 1e3, 2),
    ("ttft_s", "first token ms, mean", 1e3, 0),
    ("ttft_median_s", "first token ms, median", 1e3, 0),
    ("ttft_p99_s", "first token ms, 99 %", 1e3, 0),
    ("tokens_per_s", "tokens/s", 1.0, 1),
    ("running", "requests decoding", 1.0, 2),
    ("tokens_per_piece", "tokens a piece", 1.0, 2),
    ("failed", "failed", 1.0, 0),
)


@dataclass(frozen=True)
class Simulation:
    """`requests` through the server with the draft and without, event by event."""

    drafting: Simulated
    plain: Simulated
    requests: int


@dataclass(frozen=True)
class Part:
    """A draft in one part of the load; `held`, `held_alone`: as of `traffic.served.Load`."""

    ALSO: ClassVar = ("speedup",)
    served: Inline[ServedPart]
    held: int | None
    held_alone: int | None
    simulated: Simulation | None

    @property
    def name(self) -> str:
        return self.served.part.name

    @property
    def runs(self) -> tuple[Steady, Steady]:
        """The server at its best with the draft loaded, and without a draft."""
        return self.served.best, self.served.plain

    @property
    def full(self) -> bool:
        return any(run.full for run in self.runs)

    @property
    def speedup(self) -> float:
        """With the draft over without: by seconds per token, in tokens a second where either
        server is full."""
        best, plain = self.runs
        return best.tokens_per_s / plain.tokens_per_s if self.full else self.served.speedup

    @property
    def gain(self) -> str:
        """`speedup` in words."""
        return f"{self.speedup:.2f}{' in tokens/s' if self.full else ''}"

    def cells(self) -> tuple[str, ...]:
        runs, gamma = self.runs, self.served.gamma
        return (
            self.name,
            str(gamma or "off"),
            f"{self.served.tau:.2f}" if gamma else "1.00",
            *(f"{run.running:.1f}" for run in runs),
            *(_ms(run.tpot_s) for run in runs),
            *(_ms(run.ttft_s, 0) for run in runs),
            *(f"{run.tokens_per_s:,.0f}" for run in runs),
            self.gain,
        )

    def checks(self) -> list[str]:
        """The simulation beside the closed form, and from which rate on speculation should be
        off."""
        lines, part = [], self.served.part
        if (seen := self.simulated) is not None:
            words = f"with the draft {_simulated(seen.drafting)}; without {_simulated(seen.plain)}"
            lines.append(f"simulated ({seen.requests} requests): {words}")
        ends = [] if self.full else self.runs
        late = [run.ttft_p99_s for run in ends if run.ttft_p99_s is not None]
        if len(late) == 2:
            lines.append(
                f"99 % have a first token within {_ms(late[0], 0)} ms, without the draft"
                f" {_ms(late[1], 0)}"
            )
        if self.held is not None and self.held_alone is not None:
            if min(self.held, self.held_alone) < max(part.concurrency or 0, MANY):
                with_draft = f"{self.held:,} requests at once with the draft"
                lines.append(f"memory holds {with_draft}, {self.held_alone:,} without")
        for run, who in ((self.served.drafting, "With"), (self.served.plain, "Without")):
            if run.full:
                most = f"{run.requests_per_s:.3g} requests a second"
                lines.append(f"{who} the draft the server is full at {most}")
            if run.fallen > 1.2 * run.running:
                most = f"{run.fallen:.0f} requests run, not {run.running:.0f}"
                lines.append(f"{who} the draft the server may tip over: fallen behind, {most}")
        if part.requests_per_second is not None:
            rate = self.served.off_rate
            lines.append(
                "drafting pays at every rate that the server keeps up with"
                if rate is None
                else f"speculation should be off above {rate:.3g} requests a second"
                if rate
                else "drafting pays at no rate"
            )
        return [f"{self.name}: {line}." for line in lines]


@dataclass(frozen=True)
class UnderLoad:
    """A draft under the whole load."""

    draft: str
    by: Inline[ServedBy]
    notes: tuple[str, ...]
    objective: float
    plain_objective: float
    speedup: float
    pays: bool
    broken_limits: tuple[str, ...]
    parts: tuple[Part, ...]
    remedied: Maybe[Remedied] = None


@dataclass(frozen=True, kw_only=True)
class Traffic(Asked):
    """The answer of `traffic`. `alternatives`: the parts of `load` are rates of which each is a
    load of its own."""

    alternatives: Maybe[bool] = None
    load: tuple[AskedPart, ...]
    objective: str
    trace_note: str
    drafts: tuple[UnderLoad, ...]

    def __str__(self) -> str:
        lines = wrapped(
            [
                *(
                    f"{entry.draft}: {_answer(entry, self)}{switched_words(entry.remedied)}"
                    for entry in self.drafts
                ),
                f"Target {self.target} on {self.device}, {self.dtype_words}, tensor"
                f" parallel {self.workload.tensor_parallel}.",
                *(f"Load {part.words(shared=not self.alternatives)}." for part in self.load),
                *["Each load is by itself on the device."]
                * (len(self.load) > 1 and not self.alternatives),
                *([f"Note: {self.trace_note}."] if self.trace_note else []),
            ]
        )
        for entry in self.drafts:
            lines += ["", *_one(entry)]
        return "\n".join([*lines, "", *wrapped([MEANS, f"Latency: {self.latency}.", *self.warned])])


def _answer(entry: UnderLoad, result: Traffic) -> str:
    objective, parts = result.objective, entry.parts
    full = objective == "speedup" and any(part.full for part in parts)
    if result.alternatives or full:
        return f"speed-up {', '.join(f'{part.gain} at {part.name}' for part in parts)}."
    if objective == "speedup":
        return f"speed-up over the load {entry.objective:.2f}x."
    unit = UNITS[objective]
    plain = f"{entry.plain_objective:.4g}{unit} without the draft"
    return f"{objective} {entry.objective:.4g}{unit}, {plain}."


def _one(entry: UnderLoad) -> list[str]:
    header = (
        "load | gamma | tau | running | without | ms a token | without | first token ms | without |"
        " tokens/s | without | speed-up"
    )
    rows = [part.cells() for part in entry.parts]
    lines = [f"{entry.draft}, served by {entry.by.served}", table(rows, header)]
    for part in entry.parts:
        lines += part.checks()
    lines += [f"Breaks a limit: {text}." for text in entry.broken_limits]
    return lines + [f"Note: {note}" for note in entry.notes]


def _simulated(run: Simulated) -> str:
    if run.full:
        return "does not keep up"
    first = f"{_ms(run.ttft_s, 0)} ms (99 %: {_ms(run.ttft_p99_s, 0)})"
    return f"{_ms(run.tpot_s)} ms a token, first token {first}"


def _ms(seconds: float, digits: int = 2) -> str:
    return "no end" if math.isinf(seconds) else f"{1e3 * seconds:.{digits}f}"


@dataclass(frozen=True)
class Predicted:
    """The load of `bench-serve` as predicted."""

    gamma: int
    tau: float
    speedup: float
    served: str
    with_draft: Steady
    without: Steady


@dataclass(frozen=True)
class Bench:
    """The answer of `bench-serve`, as far as it was measured. `relative_error`: predicted over
    measured, less 1, by server and quantity; `output`: where every request is kept."""

    load: str
    text: str
    without: Maybe[Measured] = None
    with_draft: Maybe[Measured] = None
    speedup: Maybe[float] = None
    predicted: Maybe[Predicted] = None
    relative_error: Maybe[Mapping[str, Mapping[str, float]]] = None
    output: Maybe[Path] = None

    def __str__(self) -> str:
        predicted = self.predicted
        header = [""]
        rows = [[title] for _, title, _, _ in ROWS]
        for name, title in (("with_draft", "with the draft"), ("without", "without")):
            if (measured := getattr(self, name)) is None:
                continue
            columns = [(title, measured)]
            columns += [("predicted", getattr(predicted, name))] if predicted is not None else []
            for title, values in columns:
                header.append(title)
                for row, (key, _, scale, digits) in zip(rows, ROWS, strict=True):
                    value = getattr(values, key, None)
                    shown = "-" if value is None else f"{scale * value:,.{digits}f}"
                    endless = value is not None and not math.isfinite(value)
                    row.append("no end" if endless else shown)
        lines = [f"{self.load}; text {self.text}.", "", table(rows, header), ""]
        if self.speedup is not None:
            beside = f", predicted {predicted.speedup:.2f}x" if predicted is not None else ""
            lines.append(f"Speed-up by time per token: {self.speedup:.2f}x{beside}.")
        if predicted is not None:
            at = f"gamma {predicted.gamma}, tau {predicted.tau:.2f}"
            lines.append(f"Predicted for {predicted.served}, {at}.")
        if self.text == "made up":
            lines.append(
                "Note: acceptance depends on the text, and this one was made up: give yours with"
                " --prompts."
            )
        return "\n".join([*lines, f"Every request: {self.output}."])
