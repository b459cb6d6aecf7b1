"""What curves.json says: the gain at other batch sizes, contexts, alphas and gammas; where time
goes; why this one won."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from archsearch.report.charts import Chart, colour, gain_chart, line
from archsearch.report.section import Rows, Section, Table, columns, text_cell
from archsearch.runs.tables import SWEPT, Bar, Curve, Curves, Swept
from archsearch.search.ranking import Rival

_AXES: Final[dict[Swept, tuple[str, str]]] = {  # title, axis
    "batch": ("Speed-up of each family against batch size", "sequences in a batch"),
    "context": ("Speed-up against context", "tokens in the KV cache"),
    "alpha": ("Speed-up against alpha", "alpha, chance that a draft token is accepted"),
    "gamma": ("Speed-up against gamma", "gamma, draft tokens per verification"),
}
_COUNTED: Final = ("batch", "gamma")  # whole numbers: the last one at which it pays


def section_elsewhere(curves: Curves | None) -> Section:
    """How the best would do at other contexts, alphas and gammas, and where speculation stops
    paying; says what is missing."""
    if curves is None:
        return Section()
    swept = {name: curves.sweeps.get(name, ()) for name in SWEPT}
    words = [line for name in SWEPT if (line := stops_words(name, swept[name]))]
    stops = Section("Where speculation stops paying (rank 1, predicted)", words)
    drawn = [_sweep_chart(name, swept[name]) for name in SWEPT if name != "batch"]
    return Section(
        "At other contexts, alphas and gammas",
        charts=list(filter(None, drawn)),
        notes=[f"Missing. {note}" for note in curves.notes],
        parts=[stops],
    )


def section_batch(curves: Curves | None) -> Section:
    """The drafters of the ranking over batch size; empty without curves."""
    drawn = curves.sweeps.get("batch", ()) if curves is not None else ()
    chart, stops = _sweep_chart("batch", drawn), stops_words("batch", drawn).partition(": ")[2]
    notes = [f"Rank 1, predicted: {stops}"] if stops else []
    return Section("Over batch size", charts=[chart], notes=notes) if chart else Section()


def stops_words(name: Swept, curves: Sequence[Curve]) -> str:
    """Along one quantity, where the first rank stops (or, along alpha, starts) paying; "" without
    points."""
    points = curves[0].points if curves else ()
    if not points:
        return ""
    what = _AXES[name][0].partition(" against ")[2]
    at, first, last = curves[0].passes_one(), points[0], points[-1]
    if at is None:
        pays, span = last.speedup.value > 1.0, (_place(name, first.x), _place(name, last.x))
        how = "pays" if pays else "does not pay"
        text = f"it {how} anywhere from {span[0]} to {span[1]}; not computed beyond."
    else:
        pays = first.speedup.value >= 1.0
        up_to, on = (
            f"up to {_place(name, at, math.floor)}.",
            f"from {_place(name, at, math.ceil)} on.",
        )
        text = f"it pays {up_to if pays else on}"
    return f"{what}: {text}{_edge_words(name, curves[0]) if pays else ''}"


def _edge_words(name: Swept, curve: Curve) -> str:
    """Where a curve that pays at its start stops doing so by the lower end of its interval; ""
    where that is not before."""
    edge, first = curve.passes_one(edge=True), curve.points[0].speedup
    if first.bounds[0] < 1.0:
        return " Nowhere for sure: the lower edge of its interval lies below 1x from the start."
    if edge is None:
        return ""
    return f" The lower edge of its interval falls below 1x at {_place(name, edge, math.ceil)}."


def _place(name: Swept, x: float, whole: Callable[[float], float] | None = None) -> str:
    x = whole(x) if whole is not None and name in _COUNTED else x
    return {
        "batch": f"a batch of {x:.0f}",
        "context": f"{x:,.0f} tokens",
        "alpha": f"alpha {x:.2f}",
        "gamma": f"gamma {x:.0f}",
    }[name]


def _sweep_chart(name: Swept, curves: Sequence[Curve]) -> Chart | None:
    series = []
    for number, curve in enumerate(curve for curve in curves if curve.points):
        places = [(point.x, point.speedup) for point in curve.points]
        notes = tuple(
            f"{curve.label}<br>{_place(name, x)}: {gain.words('x')}, gamma {point.gamma}"
            for point, (x, gain) in zip(curve.points, places, strict=True)
        )
        look = {"colour": colour(number), "band": True, "notes": notes}
        label = f"rank {curve.rank}: {curve.label}"
        series.append(line(label, places, "" if number else "bounds", **look))
    if not series:
        return None
    title, axis = _AXES[name]
    caption = {
        "batch": "Requests share one pass of the target, so drafting saves less the more of them"
        " there are. ",
        "context": "A longer cache makes every pass of the target slower, the draft's too. ",
        "alpha": "Alpha counts as known here: the band is that of the times alone. ",
        "gamma": "A larger gamma pays where most of the block is accepted. ",
    }[name]
    best = "At each point the best gamma. " if name != "gamma" else ""
    quantiles = "5 to 95 %, or one standard deviation where that is all that is known"
    band = "one standard deviation" if name == "alpha" else quantiles
    text = f"{caption}{best}Predicted; band of the first rank: {band}. Dashed across: no gain."
    logs = name in ("batch", "context")
    ticks = tuple(point.x for point in curves[0].points) if logs else ()
    look = {"x_scale": "log2" if logs else "linear", "ticks": ticks}
    return gain_chart(f"by-{name}", title, text, axis, series, **look)


def section_time(curves: Curves | None) -> Section:
    """Where the time of a round, of its passes and of one layer goes, draft beside target."""
    if curves is None or not curves.rounds:
        return Section()
    at = curves.at
    where = f"batch size {at['batch_size']}, context {at['context']}, gamma {at['gamma']}"
    alone = "Ops as the profile prices each alone, weights out of memory. "
    captions = (
        f"As many tokens ({where}): plain steps of the target, or one round of the first rank."
        " Predicted.",
        f"{alone}“Launches and the rest” is what whole passes take beyond their ops; where a pass"
        f" takes less than they do, all are shrunk to it ({where}).",
        f"{alone}Width and feed-forward decide a layer, not the number of layers ({where}).",
    )
    charts = [
        _bars_chart("round", "A round beside plain decoding", curves.rounds, captions[0]),
        _bars_chart("passes", "One pass by term", curves.passes, captions[1]),
        _bars_chart("layers", "One layer by term", curves.layers, captions[2]),
    ]
    rows: Rows = []
    for bar in (*curves.rounds, *curves.passes, *curves.layers):
        for term, seconds in bar.terms.items():
            share = f"{seconds / bar.total.value:.0%}" if bar.total.value else "-"
            rows.append([text_cell(bar.name), text_cell(term), f"{1e3 * seconds:.3f}", share])
    table = Table(("what", "term", "ms", "share"), rows)
    folded = Section("The same as a table", tables=[table], folded=True)
    return Section("Where the time goes", charts=list(filter(None, charts)), parts=[folded])


def _bars_chart(key: str, title: str, bars: Sequence[Bar], caption: str) -> Chart | None:
    if not bars:
        return None
    terms = list(dict.fromkeys(term for bar in bars for term in bar.terms))
    series = tuple(
        line(
            term,
            [(bar.name, 1e3 * bar.terms.get(term, 0.0)) for bar in bars],
            kind="bar",
            colour=colour(number),
        )
        for number, term in enumerate(terms)
    )
    return Chart(f"time-{key}", title, caption, "", "ms", series, stacked=True, y_from_zero=True)


def section_why(curves: Curves | None) -> Section:
    """What the first rank wins by, against the best of another width and of another depth; empty
    where there is no rival."""
    rivals = curves.rivals if curves is not None else ()
    if not rivals:
        return Section()
    roles: dict[str, list[str]] = {}
    for rival in rivals:
        roles.setdefault(rival.label, []).append(_DIMENSIONS.get(rival.dimension, ""))
    once = {rival.label: rival for rival in rivals}.values()
    rows: Rows = [
        [
            text_cell(rival.label, f"best of another {' and '.join(roles[rival.label])}"),
            f"{rival.speedup:.2f}x",
            *map(_percent, (rival.tokens, rival.time, rival.tokens + rival.time)),
            f"± {100 * rival.std:.1f} %",
            text_cell(_terms(rival), wrap=True),
        ]
        for rival in once
    ]
    slower = any(rival.tokens + rival.time < 0.0 for rival in once)
    header = (
        "rival | its speed-up | by tokens a round | by a round's time | together | one std |"
        " why alpha differs"
    )
    note = (
        "What rank 1 gains over the best draft of another width and of another depth: more tokens"
        " accepted in a round, or less time for it. Less than one std: the error bars cannot tell"
        " them apart."
    )
    if slower:
        note += (
            " Below zero: the rival is predicted to be faster; rank 1 comes first because it was"
            " trained or run."
        )
    table = Table(header, rows, brief=columns(header)[:-1])
    return Section("Why this one won", tables=[table], notes=[note])


_DIMENSIONS: Final = {"hidden_size": "width", "num_hidden_layers": "depth"}


def _percent(log_ratio: float) -> str:
    return f"{100 * (math.exp(log_ratio) - 1):+.1f} %"


def _terms(rival: Rival) -> str:
    terms = [f"{each.term} {each.difference:+.2f} ({each.rows} rows)" for each in rival.terms]
    return ", ".join(terms) + (" in logit(alpha)" if terms else "-")
