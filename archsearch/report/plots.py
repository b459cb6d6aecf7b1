"""Pictures of the search: all shapes, what depth and width cost, learning curves, gammas, acceptance by position."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from archsearch.report.figures import INK, MARK, SERIES, STYLE, canvas, shade, svg_text
from archsearch.report.learning import plot_learning, trained
from archsearch.report.reading import Reading, Shown, complete_trials
from archsearch.runs.confirmed import Confirmed
from archsearch.runs.run import Run
from archsearch.speedup import accepted_by_position

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def section_plots(run: Run, reading: Reading, lead: Shown | None) -> str:
    """All pictures of the search; "" where there is nothing to draw."""
    import matplotlib

    found, trials = reading.candidates, _plotted_trials(run)
    figures: list[tuple[Figure, str] | None] = []
    with matplotlib.rc_context(STYLE):
        if trials:
            figures += [_plot_trials(trials, found), _plot_latency(trials)]
        figures.append(plot_learning(trained(reading)))
        confirmed = next((item for item in (lead, *found) if item is not None and item.confirmed is not None), None)
        if confirmed is not None and confirmed.confirmed is not None and confirmed.confirmed.other_gammas:
            figures.append(_plot_gammas(confirmed.rank, confirmed.confirmed))
        positions = confirmed or next((item for item in found if item.replayed), None)
        if positions is not None:
            figures.append(_plot_positions(positions))
        pictures = [f"<figure>{svg_text(figure, f'p{number}', caption)}<figcaption>{html.escape(caption)}</figcaption></figure>"
                    for number, (figure, caption) in enumerate([f for f in figures if f is not None], start=1)]  # fmt: skip
    return f'<h2>Pictures</h2><div class="plots">{"".join(pictures)}</div>' if pictures else ""


@dataclass(frozen=True)
class _Trial:
    """What a plot needs of a row of trials.csv."""

    layers: int
    hidden: int
    parameters: int
    draft_step_s: float
    speedup: float
    feasible: bool


def _plotted_trials(run: Run) -> list[_Trial]:
    """Scored trials, each shape once (a repeated shape is the same point)."""
    found: dict[_Trial, None] = {}
    for row in complete_trials(run):
        try:
            step_s = float(row["draft_s"]) / int(row["gamma"])
            sizes = (int(row["num_hidden_layers"]), int(row["hidden_size"]), int(row["parameters"]))
            trial = _Trial(*sizes, step_s, float(row["speedup"]), row.get("feasible") != "False")
        except (KeyError, ValueError):  # a row without a score
            continue
        found[trial] = None
    return list(found)


def _coloured(
    axes: Axes,
    trials: Sequence[_Trial],
    across: str,
    up: str,
    scale: tuple[float, float],
    by: str,
    name: str,
    spread: float = 0.0,
) -> None:
    """Scatter with one colour and one legend line per value of `by`; `spread`: width over which the values stand side by side."""
    values = sorted({getattr(trial, by) for trial in trials})
    for number, value in enumerate(values):
        members = [trial for trial in trials if getattr(trial, by) == value]
        for feasible in (True, False):
            position = number / max(len(values) - 1, 1)
            shift = spread * (position - 0.5)
            shown = [trial for trial in members if trial.feasible == feasible]
            points = [(scale[0] * getattr(trial, across) + shift, scale[1] * getattr(trial, up)) for trial in shown]
            if points:
                colour = shade(position)
                axes.scatter([x for x, _ in points], [y for _, y in points], s=22 if feasible else 18, color=colour,
                             alpha=0.8 if feasible else 0.4, marker="o" if feasible else "x", linewidths=0 if feasible else 0.8,
                             label=f"{value}" if feasible or all(not t.feasible for t in members) else None)  # fmt: skip
    axes.legend(title=name, loc="upper left", bbox_to_anchor=(1.0, 1.0), handletextpad=0.2, borderaxespad=0.2, title_fontsize=8.5)


def _plot_trials(trials: Sequence[_Trial], found: Sequence[Shown]) -> tuple[Figure, str]:
    figure, axes = canvas()
    _coloured(axes, trials, "parameters", "speedup", (1e-6, 1.0), "layers", "layers")
    axes.axhline(1.0, color=INK, linewidth=1.0, linestyle=(0, (4, 3)))
    confirmed = False
    for item in found[:5]:
        score, seen = item.score, item.measured_speedup
        place = (score.parameters / 1e6, score.speedup.value)
        spread = score.speedup.std if item.rank == 1 else None
        axes.errorbar(*place, yerr=spread, marker="o", markersize=8, markerfacecolor="none", markeredgecolor=INK, ecolor=INK,
                      elinewidth=0.8, capsize=2)  # fmt: skip
        if item.rank == 1:
            axes.annotate("rank 1", place, (8, 5), textcoords="offset points", fontsize=9)
        if seen is not None and item.undecided is None:
            confirmed = True
            axes.errorbar(place[0], seen.value, yerr=seen.std, marker="D", markersize=6, color=MARK, elinewidth=1, capsize=2)
    sizes = [trial.parameters for trial in trials]
    if max(sizes) > 10 * min(sizes):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="parameters of the draft, millions", ylabel="speed-up, x")
    caption = f"Every shape that was scored ({len(trials)}): speed-up as the search predicted it (trials.csv), by layers. "
    caption += "Circles: the best ranks, as last scored (rank 1 with one standard deviation). " if found else ""
    caption += "Red diamond: measured in the engine. " if confirmed else ""
    caption += "Crosses: over a memory or parameter limit. " if any(not trial.feasible for trial in trials) else ""
    return figure, caption + "Dashed: no gain."


def _plot_latency(trials: Sequence[_Trial]) -> tuple[Figure, str]:
    figure, axes = canvas()
    _coloured(axes, trials, "layers", "draft_step_s", (1.0, 1e3), "hidden", "hidden size", spread=0.5)
    axes.set(xlabel="layers of the draft", ylabel="one draft step, ms")
    axes.set_ylim(bottom=0)
    axes.set_xticks(sorted({trial.layers for trial in trials}))
    return figure, ("What depth and width cost: predicted time of one draft token (draft time / gamma, trials.csv) against "
                    "layers, hidden sizes side by side. The spread of one colour comes from the other choices: ffn, heads, rows "
                    "of the head.")  # fmt: skip


def _plot_gammas(rank: int, confirmed: Confirmed) -> tuple[Figure, str]:
    rows = sorted([confirmed, *confirmed.other_gammas], key=lambda row: row.gamma)
    gammas = [row.gamma for row in rows]
    seen = [row.speedup for row in rows]
    expected = [(row.gamma, row.predicted_speedup.value) for row in rows if row.predicted_speedup is not None]
    spread = [estimate.std for estimate in seen]
    figure, axes = canvas()
    axes.errorbar(gammas, [e.value for e in seen], yerr=spread, color=MARK, marker="D", capsize=3, label="measured ± one std")
    if expected:
        axes.plot(*zip(*expected, strict=True), color=SERIES[0], marker="o", linestyle="--", label="predicted")
    axes.axhline(1.0, color=INK, linewidth=1.0, linestyle=(0, (4, 3)))
    axes.set(xlabel="gamma, draft tokens per verification", ylabel="speed-up, x", xticks=gammas)
    axes.legend(loc="best")
    return figure, f"Speed-up against gamma for rank {rank}: only the gammas that were run in the engine."


def _plot_positions(item: Shown) -> tuple[Figure, str]:
    figure, axes = canvas()
    measured = list(item.confirmed.accepted_by_position) if item.confirmed is not None else []
    alpha = item.confirmed.alpha.value if measured and item.confirmed is not None else item.score.alpha.value
    closed = accepted_by_position([alpha] * max(len(measured), len(item.replayed)))
    for shares, name, colour, marker, line in (
        (measured, "measured in the engine", MARK, "D", "-"),
        (list(item.replayed), "replay of held-out text (measured)", SERIES[3], "s", "-"),
        (closed, f"closed form alpha^i, alpha {alpha:.2f}", SERIES[0], "o", "--"),
    ):  # fmt: skip
        if shares:
            axes.plot(range(1, len(shares) + 1), shares, color=colour, marker=marker, linestyle=line, markersize=5, label=name)
    axes.set(xlabel="position in the block of draft tokens", ylabel="share of rounds accepted", xticks=range(1, len(closed) + 1))
    axes.set_ylim(0, 1)
    axes.legend(loc="upper right")
    source = "the engine's count" if measured else "held-out text"
    return figure, (f"Acceptance by position, rank {item.rank}, gamma {len(closed)}. Above the dashed curve: acceptances come in "
                    f"runs, a block that began well goes on well. Alpha of the closed form: {source}.")  # fmt: skip
