"""What `estimate --sweep` prints, and its picture: speed-up and throughput of several drafts over
one axis."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from archsearch.capacity import MemoryPlan
from archsearch.errors import ArchsearchError
from archsearch.records import Inline
from archsearch.report.charts import Chart, Scale, Series, colour, gain_chart, line
from archsearch.report.phrases import PAYS, Asked, ServedBy, verdict
from archsearch.report.terminal.layout import plus_minus, table, wrapped
from archsearch.text.prompt_set import spread
from archsearch.traffic.curve import Axis, Curve

LEGEND: Final = (
    "±: one standard deviation. ideal: every draft token accepted. tokens/s: all requests that fit."
)
ROWS: Final = 14
"""Rows of a table; CSV and JSON hold all points."""
WORDS: Final = {"batch": "batch size", "context": "context", "gamma": "gamma", "alpha": "alpha"}
FORMATS: Final = (".svg", ".png", ".pdf")
LABELS: Final = {
    "batch": "requests in flight",
    "context": "tokens in the KV cache",
    "gamma": "gamma, draft tokens a round",
    "alpha": "alpha, acceptance",
}


@dataclass(frozen=True)
class Memory:
    """What the fullest device holds, of requests of `context` tokens; the draft on
    `draft_ranks`."""

    with_draft: MemoryPlan
    alone: MemoryPlan
    draft_ranks: int
    context: int


@dataclass(frozen=True)
class DraftCurve:
    """One draft in one engine over the axis."""

    draft: str
    by: Inline[ServedBy]
    notes: tuple[str, ...]
    memory: Memory | None
    curve: Inline[Curve]


@dataclass(frozen=True, kw_only=True)
class Swept(Asked):
    """The answer of `estimate --sweep`."""

    sweep: Axis
    gamma: int | None
    curves: tuple[DraftCurve, ...]

    @property
    def names(self) -> list[str]:
        """Of the curves: the draft, with its engine where there are several."""
        engines = [f"{each.by.engine} {each.by.engine_version or ''}" for each in self.curves]
        drafts = [each.draft for each in self.curves]
        if len(set(engines)) < 2:
            return drafts
        return [f"{draft}, {by}".rstrip() for draft, by in zip(drafts, engines, strict=True)]

    def __str__(self) -> str:
        work, axis = self.workload, self.sweep
        fixed = [
            f"batch size {work.batch_size}" if axis != "batch" else "",
            f"context {work.context_len}" if axis != "context" else "",
            f"gamma {self.gamma}" if self.gamma and axis != "gamma" else "",
            f"tensor parallel {work.tensor_parallel}",
        ]
        named = zip(self.names, self.curves, strict=True)
        given = "given" if self.prior == "given" else f"the prior ({self.prior})"
        lines = wrapped(
            [
                *(f"{name}: {_verdict(item, axis)}" for name, item in named),
                f"Target {self.target} on {self.device}, {self.dtype_words},"
                f" {', '.join(filter(None, fixed))}; over {WORDS[axis]}.",
            ]
        )
        for item in self.curves:
            lines += ["", *_one(item, axis)]
        rests_on = f"Latency: {self.latency}."
        accepts = f"Acceptance: {'swept' if axis == 'alpha' else given}."
        return "\n".join([*lines, "", *wrapped([LEGEND, rests_on, accepts, *self.warned])])


def _one(item: DraftCurve, axis: Axis) -> list[str]:
    header = (
        f"{WORDS[axis]}{' | gamma' * (axis != 'gamma')} | tau | speed-up | ideal | ms a token |"
        " without | tokens/s | without | pays"
    )
    points = item.curve.points
    shown = spread(points, ROWS if len(points) > ROWS + 2 else len(points))
    rows = [
        [
            f"{point.x:.2f}" if axis == "alpha" else f"{point.x:,.0f}",
            *([] if axis == "gamma" else [str(point.gamma)]),
            f"{point.tau.value:.2f}",
            plus_minus(point.speedup),
            f"{point.ideal:.2f}",
            f"{1e3 * point.tpot_s.value:.2f}",
            f"{1e3 * point.plain_tpot_s.value:.2f}",
            f"{point.tokens_per_s.value:,.0f}",
            f"{point.plain_tokens_per_s.value:,.0f}",
            PAYS[verdict(point.speedup)],
        ]
        for point in shown
    ]
    lines = [f"{item.draft}, served by {item.by.served}", table(rows, header)]
    return [*lines, *wrapped([*_memory(item), *(f"Note: {note}" for note in item.notes)])]


def _verdict(item: DraftCurve, axis: Axis) -> str:
    curve, name, found = item.curve, WORDS[axis], []
    if curve.starts is not None and axis in ("alpha", "gamma"):
        found.append(f"Pays from {name} {_number(curve.starts, axis)} on.")
    if curve.stops is not None:
        low, high = curve.stops_between
        ends = [_number(end, axis) if end is not None else None for end in (low, high)]
        span = f" (5 to 95 %: {ends[0] or 'before'} to {ends[1] or 'beyond'})"
        between, again = span if low != high else "", ""
        if curve.starts is not None and curve.starts >= curve.stops:
            again = f", and would pay again from {_number(curve.starts, axis)} on"
        found.append(f"Stops paying at {name} {_number(curve.stops, axis)}{between}{again}.")
    elif all(point.pays for point in curve.points):
        found.append("Pays over the whole range, by the mean.")
    elif not any(point.pays for point in curve.points):
        found.append("Pays nowhere in the range.")
    if curve.ideal_stops is not None:
        found.append(
            f"With every token accepted it would stop at {_number(curve.ideal_stops, axis)}."
        )
    memory = item.memory
    if axis == "context" and memory and (most := memory.with_draft.longest) < memory.context:
        found.append(f"It serves contexts up to {most:,}.")
    return " ".join(found)


def _memory(item: DraftCurve) -> list[str]:
    memory = item.memory
    if memory is None:
        return []
    plan, where = (
        memory.with_draft,
        "shared by all ranks" if memory.draft_ranks > 1 else "on one device",
    )
    weights = (plan.target_weight_bytes + plan.draft_weight_bytes) / 2**30
    if not plan.requests:
        return [
            f"Memory: {weights:.1f} GiB of weights a device leave no room for one request of"
            f" {memory.context:,} tokens: raise --tensor-parallel."
        ]
    lines = [
        f"Memory: weights {weights:.1f} GiB a device (draft {where}), activations"
        f" {plan.activation_bytes / 2**30:.1f}; holds {plan.requests:,} requests"
        f" of {memory.context:,} tokens at once, {memory.alone.requests:,} without the draft;"
        f" longest context {plan.longest:,}."
    ]
    if item.curve.memory_stops is not None:
        lines.append(
            f"From batch size {_number(item.curve.memory_stops, 'batch')} on, requests wait for"
            " memory with the draft loaded."
        )
    return lines


def _number(value: float, axis: Axis) -> str:
    return f"{value:.2f}" if axis == "alpha" else f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def check_plot(path: Path) -> None:
    """Raise ArchsearchError for a file name that names no kind of picture."""
    if path.suffix.lower() not in FORMATS:
        raise ArchsearchError(f"--plot {path}: the name must end with {', '.join(FORMATS)}")


def plot_curves(result: Swept, path: Path) -> None:
    """Write the picture: speed-up above, throughput below."""
    from archsearch.report.chart_files import drawn, write_picture

    check_plot(path)
    gains: list[Series] = []
    rates: list[Series] = []
    for number, (name, item) in enumerate(zip(result.names, result.curves, strict=True)):
        look = {"colour": colour(number), "symbol": None}
        points = item.curve.points
        mark = {"symbol": "circle" if len(points) < 40 else None, "size": 4.0, "band": True}
        unnamed = {**look, "dashed": True, "named": False}
        gain = [(point.x, point.speedup) for point in points]
        gains.append(line(name, gain, "bounds", **{**look, **mark}))
        gains.append(line(name, [(point.x, point.ideal) for point in points], **unnamed))
        rates.append(line(name, [(point.x, point.tokens_per_s) for point in points], **look))
        plain = [(point.x, point.plain_tokens_per_s) for point in points]
        rates.append(line(name, plain, **unnamed))
    axis = result.sweep
    scale: Scale = "log2" if axis in ("batch", "context") else "linear"
    title = f"{result.target} on {result.device}"
    names = "band: 5 to 95 %; dashed: every token accepted", "dashed: without a draft"
    above = gain_chart(
        "speedup", title, "", LABELS[axis], gains, x_scale=scale, legend_title=names[0]
    )
    rate = "tokens per second, all requests"
    below = Chart(
        "throughput", "", "", LABELS[axis], rate, tuple(rates), scale, legend_title=names[1]
    )
    write_picture(path, drawn(above, below, size=(7.0, 8.4)))
