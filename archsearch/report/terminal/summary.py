"""The summary of a run for a terminal of 100 columns."""

from __future__ import annotations

import textwrap
from typing import Final

from archsearch.report.families import with_heads
from archsearch.report.headline import headline, with_text
from archsearch.report.learning import learning_lines
from archsearch.report.phrases import millions, shell_path
from archsearch.report.reading import Shown, read_run
from archsearch.runs.run import Run

BEST_SHOWN: Final = 12


def summary_text(run: Run) -> str:
    """The headline, a table of the best and what to do next, for a terminal of 100 columns."""
    reading = read_run(run)
    found = reading.candidates
    head = with_text(headline(run, found), reading.text)
    head = with_heads(head, run, reading.families, reading.compared)
    lines = [head.title, *(f"  {line}" for text in head.lines for line in wrap(text, 96))]
    lines += [f"  {line}" for problem in reading.problems for line in wrap(f"WARNING: {problem}", 96)]
    lines.append("")
    if found:
        tied = sum(item.group == found[0].group for item in found[:BEST_SHOWN]) > 1
        columns: dict[str, list[str]] = {"#": [], "shape": [], "params": [], "gamma": [], "alpha": [], "draft ms": [],
                                         "predicted": [], "measured": [], "": []}  # fmt: skip
        for item in found[:BEST_SHOWN]:
            score = item.score
            cells = (
                str(item.rank), score.label(), millions(score.parameters), str(score.gamma),
                f"{score.alpha.value:.2f}±{score.alpha.std:.2f}", f"{1e3 * score.draft_s.value:.2f}",
                f"{score.speedup.value:.2f}x±{score.speedup.std:.2f}", _measured(item),
                "=" if tied and item.group == found[0].group else "",
            )  # fmt: skip
            for column, cell in zip(columns.values(), cells, strict=True):
                column.append(cell)
        if all(cell == "-" for cell in columns["measured"]):
            del columns["measured"]
        lines += _aligned(columns)
        if len(found) > BEST_SHOWN:
            lines.append(f"... and {len(found) - BEST_SHOWN} more in {shell_path(run.path / 'best')}")
        if any("/" in cell for cell in columns.get("measured", [])):
            lines.append(
                "measured: median over prompts / all tokens over all seconds"
                + ("; ?: decides nothing, confirm again." if any(cell.endswith("?") for cell in columns["measured"]) else ".")
            )
        if tied:
            lines.append("= : the error bars cannot tell these apart.")
        sources = ", ".join(dict.fromkeys(item.score.alpha.source for item in found))
        times = "; draft ms: all gamma tokens" if any("draft ms" in line for line in lines) else ""
        lines.append(f"± one standard deviation{times}. Alpha from: {sources}.")
        lines.append("")
    learnt = learning_lines(reading)
    if learnt:
        lines += ["Learning curve:", *(f"  {line}" for text in learnt for line in wrap(text, 96)), ""]
    lines.append("Next:")
    for why, command in head.next:
        lines += [f"  {why}:", f"    {command}"]
    return "\n".join(lines)


def _measured(item: Shown) -> str:
    """The measured speed-up: median over prompts, and "/" all tokens over all seconds; "?" where it decides nothing."""
    gain, pooled = item.measured_speedup, item.confirmed.pooled if item.confirmed is not None else None
    if gain is None:
        return "-"
    both = f"{gain.value:.2f}x±{gain.std:.2f}" + (f"/{pooled:.2f}x" if pooled is not None else "")
    return both + ("?" if item.undecided is not None else "")


def _aligned(columns: dict[str, list[str]]) -> list[str]:
    """Lines of a table, shapes to the left and numbers to the right; narrower than 100 columns where leaving out two helps."""
    widths = {name: max(map(len, (name, *cells))) for name, cells in columns.items()}
    for name in ("draft ms", "params"):
        if sum(widths.values()) + 2 * len(widths) - 2 > 100:
            del widths[name]
    lines = ["  ".join(name.ljust(width) if name == "shape" else name.rjust(width) for name, width in widths.items()).rstrip()]
    lines.append("  ".join("-" * width for name, width in widths.items() if name))
    for number in range(len(columns["shape"])):
        cells = [(name, columns[name][number], width) for name, width in widths.items()]
        padded = [cell.ljust(width) if name == "shape" else cell.rjust(width) for name, cell, width in cells]
        lines.append("  ".join(padded).rstrip())
    return lines


def wrap(text: str, width: int) -> list[str]:
    """Lines of at most `width` characters, the later ones indented."""
    return textwrap.wrap(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
