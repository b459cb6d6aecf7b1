"""What a run found, for people: `summary_text` for the terminal, `write_html` for one self-contained page.

Both read the run folder and nothing else. A number that is not in the files is not shown; what is worked out here from numbers
that are (overhead, which candidates cannot be told apart, rounding steps) says so where it stands.
"""

from __future__ import annotations

import html
import io
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from archsearch import files
from archsearch.architecture.architecture import Architecture
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.progress import human_time
from archsearch.runs import RUNGS_FILE, Run
from archsearch.search.objective import Score, indistinguishable
from archsearch.speedup import accepted_by_position

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BEST_SHOWN: Final = 12
# What the sources of an Estimate mean to a reader.
SOURCES: Final = {
    "measured": "counted or timed on this draft",
    "modelled": "from a model fitted to measurements of this device",
    "prior": "expected from published drafts of like shape; not measured here",
    "roofline": "from the device's datasheet; not measured here",
    "published": "from a publication",
    "given": "given on the command line",
}
# Bits after the leading one: the spacing of neighbouring numbers is 2^(exponent - bits).
MANTISSA_BITS: Final = {"bfloat16": 7, "float16": 10, "float32": 23}


# ------------------------------------------------------------------------------------------------------------- reading the run


@dataclass(frozen=True)
class Candidate:
    """One rank of a run with what lies in its folder.

    `training`: training.json, None where it was not trained; `confirmed`: confirmed.json; `stale`: trained further after it was
    confirmed; `replayed`: acceptance by position from the trace on held-out text at the score's gamma; `group`: candidates with
    the same number cannot be told apart from the best of that group.
    """

    score: Score
    folder: Path
    training: dict[str, Any] | None
    confirmed: dict[str, Any] | None
    stale: bool
    replayed: tuple[float, ...]
    group: int = 0

    @property
    def rank(self) -> int:
        assert self.score.rank is not None
        return self.score.rank

    @property
    def trained(self) -> bool:
        return (self.folder / "model.safetensors").is_file()

    @property
    def stage(self) -> str:
        if self.confirmed is not None:
            return "retrained" if self.stale else "confirmed"
        return "trained" if self.trained else "searched"

    @property
    def measured_speedup(self) -> Estimate | None:
        return None if self.confirmed is None or self.stale else _as_estimate(self.confirmed["speedup"])


@dataclass(frozen=True)
class Verdict:
    """The headline: `title` is one sentence; `lines` say which draft, how sure and what was confirmed; `next`: what to do, as
    (why, command)."""

    title: str
    lines: list[str]
    next: list[tuple[str, str]]
    lead: Candidate | None


def candidates(run: Run) -> list[Candidate]:
    """Every rank, ascending, with its group of indistinguishable ones."""
    found = []
    for score in run.scores():
        assert score.rank is not None
        folder = run.best_dir(score.rank)
        confirmed = run.confirmed(score.rank)
        training = folder / "training.json"
        record = files.read_json(training, "training record") if training.is_file() else None
        found.append(Candidate(score, folder, record, confirmed, _is_stale(score, confirmed), _replayed(folder, score.gamma)))
    groups = _groups(run, [item.score for item in found])
    return [Candidate(**{**vars(item), "group": groups[item.rank]}) for item in found]


def _is_stale(score: Score, confirmed: Mapping[str, Any] | None) -> bool:
    """Whether the draft's alpha on held-out text has changed since the confirmation predicted from it."""
    before = ((confirmed or {}).get("predicted") or {}).get("alpha")
    if before is None or score.alpha.source != "measured":  # a search that was continued writes the prior's alpha again
        return False
    return not math.isclose(_as_estimate(before).value, score.alpha.value, rel_tol=1e-9)


def _replayed(folder: Path, gamma: int) -> tuple[float, ...]:
    from archsearch.acceptance.measured import Trace
    from archsearch.acceptance.replay import replay_tau

    if not (folder / "trace.npz").is_file():
        return ()
    try:
        return replay_tau(Trace.load(folder / "trace.npz"), gamma, resamples=0).accepted_by_position
    except ArchsearchError:  # texts too short for this gamma, or a broken trace: the rest of the report stands
        return ()


class _Gaps:
    """Std of the difference of two drafts' logit(alpha): the prior's own where both alphas come from it, else both stds added."""

    def __init__(self, scores: Sequence[Score]) -> None:
        from archsearch.acceptance.prior import PriorAcceptance

        self.alphas = {score.architecture: score.alpha for score in scores}
        self.prior = PriorAcceptance()

    def difference_std(self, first: Architecture, second: Architecture, context: Any) -> float:
        pair = (self.alphas[first], self.alphas[second])
        if all(alpha.source == "prior" for alpha in pair):
            return self.prior.difference_std(first, second, context)
        return math.hypot(*(alpha.std / max(alpha.value * (1.0 - alpha.value), 1e-9) for alpha in pair))


def _groups(run: Run, scores: Sequence[Score]) -> dict[int, int]:
    """Rank -> number of the group of scores that the error bars cannot tell apart, 1 for the fastest."""
    from archsearch.acceptance.estimator import AcceptanceContext
    from archsearch.targets import resolve_target

    target = str(run.arguments.get("target", ""))
    try:  # the prior caps what size brings at the target's size; a hub id is not looked up for a report
        shape = resolve_target(target).architecture if "/" not in target or Path(target).is_dir() else None
    except ArchsearchError:
        shape = None
    asked = run.arguments
    context = AcceptanceContext(
        shape, float(asked.get("temperature", 0.0)), int(asked.get("context", 512)), str(asked.get("domain", "narrow"))
    )
    gaps: Any = _Gaps(scores)
    found = indistinguishable(scores, gaps, context)
    return {score.rank or 0: number for number, group in enumerate(found, start=1) for score in group}


def complete_trials(run: Run) -> list[dict[str, str]]:
    return [row for row in run.trials() if row.get("state") == "COMPLETE"]


def verdict(run: Run, found: Sequence[Candidate]) -> Verdict:
    """Does speculation pay, with which draft, how much, how sure; and what to do next."""
    target, device = str(run.arguments.get("target", "the target")), str(run.info["device"].get("key", "this device"))
    if not found:
        return _unfinished(run, target, device)
    measured = [item for item in found if item.measured_speedup is not None]
    if measured:
        lead = max(measured, key=lambda item: item.measured_speedup.value if item.measured_speedup else 0.0)
        return _confirmed_verdict(run, found, lead, target, device)
    lead = found[0]
    score, gain = lead.score, lead.score.speedup
    clear = abs(gain.value - 1.0) > 2 * gain.std
    where = f"for {target} on {device}"
    if gain.value > 1.0:
        answer = f"Speculation {'should pay' if clear else 'may pay'} {where}: {gain.value:.2f}x predicted"
    else:
        answer = f"Speculation {'does not' if clear else 'probably does not'} pay {where}: {gain.value:.2f}x predicted at best"
    alpha = score.alpha
    lines = [
        _draft_words(lead, score.gamma),
        f"How sure: {gain.value:.2f}x ± {gain.std:.2f} (one standard deviation)"
        + ("" if clear else "; 1x, no gain, lies within two of them")
        + f". Weakest part: {gain.source} ({SOURCES[gain.source]}).",
        f"Acceptance: alpha {alpha.value:.2f} ± {alpha.std:.2f} ({alpha.source}); {_break_even(score)}.",
    ]
    if lead.stage == "retrained":
        lines.append("Not confirmed: this draft was trained further after its confirmation. Confirm it again.")
    elif lead.trained:
        lines.append("Not confirmed: the draft has weights, and alpha was measured on held-out text, but no engine has run it.")
    else:
        lines.append("Not confirmed: no draft has weights yet; all of this is prediction from shapes.")
    ties = [str(item.rank) for item in found if item.group == lead.group and item is not lead]
    if ties:
        lines.append(f"Cannot be told apart from it: rank {', '.join(ties)}. Choose by size, or train and confirm more than one.")
    return Verdict(answer + ".", lines, _next(run, lead, gain.value > 1.0), lead)


def _confirmed_verdict(run: Run, found: Sequence[Candidate], lead: Candidate, target: str, device: str) -> Verdict:
    data, gain = lead.confirmed or {}, lead.measured_speedup
    assert gain is not None
    interval = data.get("speedup_interval") or [gain.value - 1.645 * gain.std, gain.value + 1.645 * gain.std]
    where = f"for {target} on {device}"
    if interval[0] > 1.0:
        answer = f"Speculation pays {where}: {gain.value:.2f}x, measured"
    elif interval[1] < 1.0:
        answer = f"Speculation does not pay {where}: {gain.value:.2f}x, measured"
    else:
        answer = f"Too close to call {where}: {gain.value:.2f}x, measured, and 1x lies within the error"
    rates = f"{data['baseline_tokens_per_s']:.1f} tokens/s alone, {data['tokens_per_s']:.1f} with the draft"
    lines = [
        _draft_words(lead, data["gamma"]),
        f"Confirmed in {data['engine']} {data['engine_version']} on {data['prompts']} held-out prompts, interleaved: {rates}.",
        f"How sure: 5-95 % of the bootstrap over prompts lie between {interval[0]:.2f}x and {interval[1]:.2f}x.",
    ]
    if data.get("disturbed"):
        lines.append(
            f"WARNING: the machine was disturbed: all tokens over all seconds give {data['speedup_pooled']:.2f}x, the median "
            f"over prompts {gain.value:.2f}x. Stop other work and confirm again."
        )
    if data.get("relative_error") is not None:
        expected = _as_estimate(data["predicted_speedup"]).value
        lines.append(f"It had been predicted at {expected:.2f}x, {data['relative_error']:+.1%} off.")
    lines.append(_identity_words(data))
    faster = [item for item in found if item.measured_speedup is None and item.score.speedup.value > gain.value]
    if faster:
        gains = [(item.rank, item.score.speedup) for item in faster[:3]]
        names = ", ".join(f"rank {rank} ({predicted.value:.2f}x ± {predicted.std:.2f})" for rank, predicted in gains)
        lines.append(f"Predicted above that but not confirmed: {names}.")
    return Verdict(answer + ".", lines, _next(run, lead, gain.value > 1.0), lead)


def _unfinished(run: Run, target: str, device: str) -> Verdict:
    trials = complete_trials(run)
    asked = run.arguments.get("trials")
    lines = ["Nothing is ranked yet: best/ is empty, so there is no answer to show."]
    if trials:
        lines.append(f"{len(trials)} scored trials are in trials.csv.")
    elif run.storage_file.is_file():
        lines.append("journal.log holds the trials that were finished" + (f" (of {asked} asked for)." if asked else "."))
    trained = len(list(run.path.glob("finalists/*/training.json")))
    if trained:
        lines.append(f"{trained} finalists have been trained (finalists/).")
    given = [name for name in ("target", "gpu", "space") if run.arguments.get(name)]
    options = " ".join(f"--{name} {shlex.quote(str(run.arguments[name]))}" for name in given)
    command = f"archsearch search {options} --run {_path(run.path)}"
    why = "Continue the search with the arguments it was started with (run.yaml lists them all)"
    return Verdict(f"This search for {target} on {device} has not finished.", lines, [(why, command)], None)


def _draft_words(lead: Candidate, gamma: int) -> str:
    score = lead.score
    return f"Draft: rank {lead.rank}, {score.architecture.label()}, {_millions(score.parameters)} parameters, gamma {gamma}."


def _next(run: Run, lead: Candidate, pays: bool) -> list[tuple[str, str]]:
    path, rank = _path(run.path), f"--rank {lead.rank}"
    train = f"archsearch train {path} {rank} --budget 30m"
    confirm = f"archsearch confirm {path} {rank}"
    export = f"archsearch export {path} {rank} --output draft-rank-{lead.rank}"
    then_export = ("Then write a folder that engines load", export)
    if not lead.trained:
        device = run.info["device"].get("key", "the device")
        steps = [(f"Give the draft weights, distilled from the target (needs the target's weights; on {device})", train)]
        return steps + ([("Then measure it in the engine", confirm), then_export] if pays else [])
    if lead.measured_speedup is None:
        steps = [("Measure it in the engine", confirm)]
        return steps + [then_export if pays else ("Or train it further; alpha may rise", train)]
    steps = [("Write a folder that engines load", export)] if pays else []
    return steps + [("Train it further; alpha may rise", train), ("Then measure it again", confirm)]


def _break_even(score: Score) -> str:
    needed = score.break_even_alpha
    if needed is None:
        return f"no alpha makes this draft pay at gamma {score.gamma}"
    if needed.value <= 0:
        return "it pays at any alpha"
    return f"it pays above alpha {needed.value:.2f} ± {needed.std:.2f} ({needed.source})"


def _identity_words(data: Mapping[str, Any]) -> str:
    """One sentence about whether the output is the target's own."""
    identity, exact = data.get("identical_output"), data.get("identical_output_float32")
    dtype = data.get("dtype", "the run's dtype")
    if not isinstance(identity, Mapping):
        words = f"Identical output: {identity}"
    elif not identity["prompts"]:
        words = "Output was sampled (temperature above 0), so answers are not compared token by token"
    else:
        same, asked = identity["identical"], identity["prompts"]
        words = f"Output with and without the draft: {same} of {asked} answers identical in {dtype}"
        if identity.get("differences"):
            gaps = [abs(item["logit_gap"]) for item in identity["differences"] if item.get("logit_gap") is not None]
            words += f" (the others part where two tokens' logits differ by at most {max(gaps):.3g})" if gaps else ""
    if isinstance(exact, Mapping):
        words += f"; {exact['identical']} of {exact['prompts']} in float32"
    return words + "."


def _path(path: Path) -> str:
    """Relative to the working directory where that is shorter, quoted for a shell."""
    try:
        path = path.resolve().relative_to(Path.cwd().resolve())
    except ValueError:
        pass
    return shlex.quote(str(path))


def _as_estimate(value: Any) -> Estimate:
    """An Estimate out of its dict, or out of a bare number (std unknown counts as 0)."""
    return Estimate.from_dict(dict(value)) if isinstance(value, Mapping) else Estimate(float(value), 0.0, "measured")


def _millions(count: int) -> str:
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.0f}M" if count >= 1e7 else f"{count / 1e6:.1f}M"


# -------------------------------------------------------------------------------------------------------------------- terminal


def summary_text(run: Run) -> str:
    """The headline, a table of the best and what to do next, for a terminal of 100 columns."""
    found = candidates(run)
    head = verdict(run, found)
    lines = [head.title, *(f"  {line}" for text in head.lines for line in _wrap(text, 96)), ""]
    if found:
        tied = sum(item.group == found[0].group for item in found[:BEST_SHOWN]) > 1
        columns: dict[str, list[str]] = {"#": [], "shape": [], "params": [], "gamma": [], "alpha": [], "draft ms": [],
                                         "predicted": [], "measured": [], "": []}  # fmt: skip
        for item in found[:BEST_SHOWN]:
            score, gain = item.score, item.measured_speedup
            cells = (
                str(item.rank), score.architecture.label(), _millions(score.parameters), str(score.gamma),
                f"{score.alpha.value:.2f}±{score.alpha.std:.2f}", f"{1e3 * score.draft_s.value:.2f}",
                f"{score.speedup.value:.2f}x±{score.speedup.std:.2f}", f"{gain.value:.2f}x±{gain.std:.2f}" if gain else "-",
                "=" if tied and item.group == found[0].group else "",
            )  # fmt: skip
            for column, cell in zip(columns.values(), cells, strict=True):
                column.append(cell)
        if all(cell == "-" for cell in columns["measured"]):
            del columns["measured"]
        lines += _aligned(columns)
        if len(found) > BEST_SHOWN:
            lines.append(f"... and {len(found) - BEST_SHOWN} more in {_path(run.path / 'best')}")
        if tied:
            lines.append("= : the error bars cannot tell these apart.")
        sources = ", ".join(dict.fromkeys(item.score.alpha.source for item in found))
        times = "; draft ms: all gamma tokens" if any("draft ms" in line for line in lines) else ""
        lines.append(f"± one standard deviation{times}. Alpha from: {sources}.")
        lines.append("")
    lines.append("Next:")
    for why, command in head.next:
        lines += [f"  {why}:", f"    {command}"]
    return "\n".join(lines)


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


def _wrap(text: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


# ------------------------------------------------------------------------------------------------------------------------ page


def write_html(run: Run) -> Path:
    """report.html: one page that needs no other file, no script and no network; the path."""
    found = candidates(run)
    head = verdict(run, found)
    parts = [_section_head(run, found, head)]
    if found:
        parts.append(_section_best(found))
    parts += [_section_confirmed(item) for item in found if item.confirmed is not None]
    parts.append(_section_rungs(run))
    parts.append(_section_plots(run, found, head.lead))
    parts.append(_section_provenance(run))
    parts.append(_section_next(head))
    title = html.escape(f"archsearch: {run.arguments.get('target', '')} on {run.info['device'].get('key', '')}")
    page = _PAGE.replace("%TITLE%", title).replace("%BODY%", "\n".join(part for part in parts if part))
    files.write_text(run.report_file, page)
    return run.report_file


_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>%TITLE%</title>
<style>
:root { color-scheme: light dark; --text: #1d2430; --soft: #5b6675; --line: #d5dae1; --page: #ffffff; --card: #f5f7f9;
  --accent: #1f6f8b; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e4e8ee; --soft: #9aa6b5; --line: #39424f; --page: #14181e; --card: #1d232b; --accent: #6cc0d8; }
}
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem; background: var(--page); color: var(--text);
  font: 16px/1.55 system-ui, "Segoe UI", "Helvetica Neue", Arial, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: .2rem 0 1rem; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .6rem; border-bottom: 1px solid var(--line); padding-bottom: .25rem; }
h3 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
.kicker, .note, figcaption { color: var(--soft); font-size: .875rem; }
.answer { background: var(--card); border-left: 4px solid var(--accent); padding: .6rem 1.1rem; border-radius: 4px; }
.answer p { margin: .35rem 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .32rem .9rem .32rem 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap;
  vertical-align: top; }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; white-space: normal; }
th.text, td.text { text-align: left; }
td.wrap { white-space: normal; overflow-wrap: anywhere; max-width: 46rem; }
td small { color: var(--soft); display: block; font-size: .75rem; }
tr.lead td { font-weight: 600; } tr.lead td small { font-weight: 400; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1.4rem; }
figure { margin: 0; } figure svg { width: 100%; height: auto; display: block; }
pre { background: var(--card); padding: .6rem .9rem; border-radius: 4px; overflow-x: auto; font-size: .875rem;
  margin: .3rem 0 .9rem; }
code { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
details summary { cursor: pointer; color: var(--accent); }
</style></head><body>
%BODY%
</body></html>
"""


@dataclass(frozen=True)
class _Cell:
    """A table cell: text, a smaller line below, and whether it is text (left) or a number (right)."""

    text: str
    below: str = ""
    left: bool = False
    wrap: bool = False

    def html(self) -> str:
        kind = " ".join(name for name, on in (("text", self.left), ("wrap", self.wrap)) if on)
        below = f"<small>{html.escape(self.below)}</small>" if self.below else ""
        opening = f'<td class="{kind}">' if kind else "<td>"
        return f"{opening}{html.escape(self.text)}{below}</td>"


def _text(value: Any, below: str = "", wrap: bool = False) -> _Cell:
    return _Cell(str(value), below, left=True, wrap=wrap)


def _value(estimate: Estimate | None, digits: int = 2, scale: float = 1.0, unit: str = "") -> _Cell:
    if estimate is None:
        return _Cell("-")
    spread = f" ± {scale * estimate.std:.{digits}f}" if estimate.std else ""
    return _Cell(f"{scale * estimate.value:.{digits}f}{unit}{spread}", estimate.source)


def _table(header: Sequence[str], rows: Sequence[Sequence[_Cell | str]], lead: int | None = None) -> str:
    """Columns whose first row is text are left-aligned; `lead` is the row to stress."""
    cells = [[cell if isinstance(cell, _Cell) else _Cell(cell) for cell in row] for row in rows]
    left = [bool(cells) and cells[0][column].left for column in range(len(header))]
    heads = ['<th class="text">' if side else "<th>" for side in left]
    top = "".join(f"{head}{html.escape(name)}</th>" for head, name in zip(heads, header, strict=True))
    lines = ["".join(cell.html() for cell in row) for row in cells]
    rows_html = [f'<tr class="lead">{line}</tr>' if number == lead else f"<tr>{line}</tr>" for number, line in enumerate(lines)]
    body = "\n".join(rows_html)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>\n{body}</tbody></table></div>'


def _note(text: str) -> str:
    return f'<p class="note">{html.escape(text)}</p>'


def _section_head(run: Run, found: Sequence[Candidate], head: Verdict) -> str:
    info = run.info
    trials = len(complete_trials(run))
    searched = f"{trials} scored trials" if trials else "no trials written yet"
    about = ("archsearch report", info["arguments"].get("target", ""), info["device"].get("key", "device unknown"), searched)
    kicker = " · ".join(map(str, about))
    lines = "".join(f"<p>{html.escape(line)}</p>" for line in head.lines)
    return f'<p class="kicker">{html.escape(kicker)}</p><h1>{html.escape(head.title)}</h1><div class="answer">{lines}</div>'


def _section_best(found: Sequence[Candidate]) -> str:
    rows: list[list[_Cell | str]] = []
    for item in found:
        score = item.score
        rows.append([
            str(item.rank), _text(score.architecture.label(), f"{score.architecture.attention_kind}, {item.stage}"),
            _millions(score.parameters), str(score.gamma), _value(score.speedup, 2, unit="x"),
            _value(item.measured_speedup, 2, unit="x"), str(item.group), _value(score.alpha), _value(score.tau),
            _value(score.draft_s, 2, 1e3), _value(score.verify_s, 1, 1e3), _value(score.break_even_alpha),
            f"{score.kv_bytes_per_token:,}",
        ])  # fmt: skip
    header = ("rank", "shape", "parameters", "gamma", "speed-up, predicted", "measured", "group", "alpha", "tau, tokens",
              "draft, ms", "verify, ms", "break-even alpha", "KV, bytes/token")  # fmt: skip
    scores = [item.score for item in found]
    used = dict.fromkeys(e.source for score in scores for e in (score.alpha, score.draft_s, score.verify_s, score.speedup))
    legend = "; ".join(f"{name}: {SOURCES[name]}" for name in used)
    groups: dict[int, list[str]] = {}
    for item in found:
        groups.setdefault(item.group, []).append(str(item.rank))
    same = [ranks for ranks in groups.values() if len(ranks) > 1]
    apart = "; ".join(f"ranks {', '.join(ranks)}" for ranks in same) or "none"
    lead = next((number for number, item in enumerate(found) if item.rank == 1), None)
    return "\n".join([
        "<h2>The best candidates</h2>", _table(header, rows, lead),
        _note(f"Cannot be told apart (same group): {apart}. In a group each is slower than its first by less than one standard "
              "deviation of the difference; errors that both share, such as the target's own times, cancel. Worked out here from "
              "the scores."),
        _note("Shape: layers x hidden size, ffn width, query heads / KV heads and head size, rows of the language-model head (t: "
              "tied). draft: all gamma tokens. tau: mean tokens per verification, the target's own included. ± one standard "
              "deviation. "
              f"Sources: {legend}. A combined number bears the weakest source of its parts."),
    ])  # fmt: skip


def _overhead(score: Score) -> Estimate | None:
    """What the engine adds to a round, from the score's own numbers: tpot * tau = draft + verify + overhead."""
    rest = score.tpot_s.value * score.tau.value - score.draft_s.value - score.verify_s.value
    return Estimate(rest, 0.0, score.verify_s.source) if rest > 1e-7 else None


_TERMS: Final = (
    "Relative error: predicted / measured - 1. In std: (predicted - measured) / both standard deviations added in squares. The "
    "engine times whole rounds, so draft, verify and overhead have no measured value of their own. tau predicted: replay of the "
    "held-out text. Decode window only: times after the first tokens of a request have arrived. Speed-up measured: median over "
    "prompts."
)


def _section_confirmed(item: Candidate) -> str:
    data = item.confirmed or {}
    gains = f"gamma {data['gamma']}, {data['engine']} {data['engine_version']}, {data.get('dtype', '')}"
    counted = ", ".join(f"{data[key]:,} {key}" for key in ("prompts", "tokens", "rounds") if isinstance(data.get(key), int))
    label = item.score.architecture.label()
    parts = [f"<h2>Predicted beside measured: rank {item.rank}</h2>", _note(f"{label}; {gains}; {counted}.")]
    if item.stale:
        stale = "The draft was trained further after this confirmation; the figures are of the weights before."
        parts.append(f"<p><strong>{stale}</strong></p>")
    parts += [_term_table(data), _note(_TERMS)]
    if data.get("slowdown") is not None:
        slower = f"{data['slowdown']:.2f} times slower than the profile's reference"
        parts.append(_note(f"The machine ran {slower}, which predicted times are for; a speed-up does not feel it."))
    if data.get("speedup_pooled") is not None:
        pooled, whole = data["speedup_pooled"], data["speedup_end_to_end"]
        parts.append(_note(f"Other ways to count the speed-up, measured: all tokens over all seconds {pooled:.2f}x; "
                           f"with prefill {whole:.2f}x."))  # fmt: skip
    parts.append(_position_table(item, data))
    categories = data.get("categories") or {}
    if categories:
        rows: list[list[_Cell | str]] = [
            [_text(name), str(row["prompts"]), f"{row['alpha']:.2f}", f"{row['tau']:.2f}", f"{row['speedup']:.2f}x"]
            for name, row in categories.items()
        ]
        header = ("category", "prompts", "alpha", "tau, tokens", "speed-up, median")
        parts += ["<h3>By category of prompts, measured</h3>", _table(header, rows)]
    others = [row for row in data.get("other_gammas") or []]
    if others:
        rows = [
            [str(row["gamma"]), _value(_as_estimate(row["speedup"]), 2, unit="x"),
             f"{_as_estimate(row['predicted_speedup']).value:.2f}x", f"{row['relative_error']:+.1%}",
             _value(_as_estimate(row["tau"])), f"{row['tokens_per_s']:.1f}"]
            for row in sorted([data, *others], key=lambda row: row["gamma"]) if row.get("relative_error") is not None
        ]  # fmt: skip
        measures = ("gamma", "measured speed-up", "predicted", "relative error", "tau measured, tokens", "tokens/s measured")
        parts += ["<h3>Other gammas, same prompts</h3>", _table(measures, rows)]
    parts.append(_identity_part(data))
    return "\n".join(part for part in parts if part)


def _term_table(data: Mapping[str, Any]) -> str:
    raw = data.get("predicted")
    predicted = Score.from_dict({**raw}) if isinstance(raw, Mapping) else None
    terms: list[tuple[str, Estimate | None, Estimate | None, float, int]] = []

    def timed(name: str) -> Estimate | None:
        value = data.get(name)
        return Estimate(float(value), 0.0, "measured") if value is not None and math.isfinite(value) else None

    if predicted is not None:
        overhead = _as_estimate(data["overhead_s"]) if data.get("overhead_s") is not None else _overhead(predicted)
        total = data.get("predicted_round_s")
        parts = [predicted.draft_s, predicted.verify_s, *([overhead] if overhead else [])]
        spread = math.hypot(*(part.std for part in parts))
        whole = Estimate(total, spread, predicted.verify_s.source) if total is not None else None
        terms += [
            ("target alone, ms/token (decode)", predicted.decode_s, timed("decode_s"), 1e3, 2),
            ("draft, ms for all gamma tokens", predicted.draft_s, None, 1e3, 2),
            ("verify, ms", predicted.verify_s, None, 1e3, 2),
            ("overhead of the engine, ms", overhead, None, 1e3, 2),
            ("round, ms (draft + verify + overhead)", whole, timed("round_s"), 1e3, 2),
            ("alpha", predicted.alpha, _as_estimate(data["alpha"]), 1.0, 3),
            ("tau, tokens per round", predicted.tau, _as_estimate(data["tau"]), 1.0, 2),
        ]
    gain = _as_estimate(data["speedup"])
    if predicted is not None:
        terms.append(("speed-up, x", predicted.speedup, gain, 1.0, 2))
    elif data.get("predicted_speedup") is not None:
        bare = Estimate(_as_estimate(data["predicted_speedup"]).value, 0.0, "modelled")
        terms.append(("speed-up, x", bare, gain, 1.0, 2))
    if data.get("predicted_at_measured_tau") is not None:
        times_only = Estimate(data["predicted_at_measured_tau"], 0.0, "modelled")
        terms.append(("speed-up, x, with the tau the engine counted", times_only, gain, 1.0, 2))
    rows: list[list[_Cell | str]] = []
    for name, expected, seen, scale, digits in terms:
        error, sigmas = "", ""
        if expected is not None and seen is not None and seen.value:
            error = f"{expected.value / seen.value - 1:+.1%}"
            spread = math.hypot(expected.std, seen.std)
            sigmas = f"{(expected.value - seen.value) / spread:+.1f}" if expected.std and spread else ""
        rows.append([_text(name), _value(expected, digits, scale), _value(seen, digits, scale), error, sigmas])
    rates = f"{data['baseline_tokens_per_s']:.1f}, {data['tokens_per_s']:.1f}"
    rows.append([_text("tokens/s: target alone, with draft"), "", _Cell(rates, "measured"), "", ""])
    return _table(("term", "predicted", "measured", "relative error", "in std"), rows)


def _position_table(item: Candidate, data: Mapping[str, Any]) -> str:
    measured = data.get("accepted_by_position")
    if not isinstance(measured, list | tuple) or not measured:
        return ""
    alpha = _as_estimate(data["alpha"]).value
    closed = accepted_by_position([alpha] * len(measured))
    header = ["acceptance by position", *(str(i) for i in range(1, len(measured) + 1))]
    rows: list[list[_Cell | str]] = [[_text("measured in the engine"), *(f"{share:.3f}" for share in measured)]]
    if len(item.replayed) == len(measured):
        rows.append([_text("replay of held-out text"), *(f"{share:.3f}" for share in item.replayed)])
    rows.append([_text(f"closed form, alpha^i with alpha {alpha:.3f}"), *(f"{share:.3f}" for share in closed)])
    return (
        "<h3>Acceptance by position in the block</h3>"
        + _table(header, rows)
        + _note("Share of rounds in which position i was accepted (all before it were too).")
    )


_GAPS: Final = (
    "Logit gap: the target's logit of the token it chose alone, minus that of the token chosen with the draft, in one pass over "
    "the common text. A gap of a few rounding steps of the number format is a tie that passes of 1 and of gamma + 1 tokens break "
    "differently; a large gap would be an error."
)


def _identity_part(data: Mapping[str, Any]) -> str:
    identity = data.get("identical_output")
    parts = ["<h3>Is the output the target's own?</h3>", f"<p>{html.escape(_identity_words(data))}</p>"]
    differences = identity.get("differences") if isinstance(identity, Mapping) else None
    if differences:
        bits = MANTISSA_BITS.get(str(data.get("dtype")))
        rows: list[list[_Cell | str]] = []
        for row in differences:
            gap, logit_alone = row.get("logit_gap"), row.get("alone_logit")
            steps = ""
            if gap is not None and bits and logit_alone:
                steps = f"{abs(gap) / 2.0 ** (math.floor(math.log2(abs(logit_alone))) - bits):.1f}"
            rows.append([_text(row["prompt_id"]), str(row["position"]), str(row["alone_token"]), str(row["draft_token"]),
                         "-" if gap is None else f"{gap:+.4f}", steps])  # fmt: skip
        header = ("prompt", "first different token", "token alone", "token with draft", "logit gap", "in rounding steps")
        parts += [_table(header, rows), _note(_GAPS)]
    return "\n".join(parts)


def _section_rungs(run: Run) -> str:
    """What a climb trained, round by round, and what it believed after each; "" for runs that did not climb."""
    path = run.path / RUNGS_FILE
    state = files.read_json(path, "state of the climb") if path.is_file() else {}
    records = [record for record in state.get("rungs", []) if record["rung"] > 0]
    if not records:
        return ""
    rows: list[list[_Cell | str]] = []
    for record in records:
        name = f"short training {record['round']}" if record["rung"] == 1 else "full training"
        measured = record.get("measured") or {}
        alpha = f"{measured['alpha']:.3f}" if measured.get("alpha") is not None else "-"
        fate = f"{record['state']}: {record['why']}" if record["why"] else record["state"]
        rows.append([
            _text(name), _text(record["label"]), f"{record['tokens'] / 1e3:,.0f}k", human_time(record["seconds"]), _Cell(alpha),
            _value(_as_estimate(record["alpha"])), _value(_as_estimate(record["score"]), 2, unit="x"), _text(fate, wrap=True),
        ])  # fmt: skip
    header = ("round", "shape", "tokens", "time", "alpha then", "alpha at the end", "speed-up at the end", "outcome")
    spent = ", ".join(f"{name} {human_time(seconds)}" for name, seconds in state.get("steps", {}).items())
    words = f"Time budget {human_time(state['budget_s'])}; spent: {spent}. " + " ".join(f"{note}." for note in state["notes"])
    return "\n".join([
        "<h2>The climb</h2>", _table(header, rows),
        _note("alpha then: measured after that many tokens, on answers kept out of training, the same for all shapes. At the "
              "end: expected after the full training. " + words),
    ])  # fmt: skip


def _section_provenance(run: Run) -> str:
    info = run.info
    device, profile = info["device"], info["profile"]
    rows: list[tuple[str, str]] = [("run folder", str(run.path)), ("started", str(info["created"])),
                                   ("report written", datetime.now(UTC).isoformat(timespec="seconds"))]  # fmt: skip
    commit = info["code"].get("commit") or "unknown (not run from a checkout)"
    rows.append(("code", f"archsearch {info['code'].get('version')}, commit {commit}"))
    rows.append(("packages", ", ".join(f"{name} {version}" for name, version in info["packages"].items())))
    facts = [device.get("name") or "", f"{device['threads']} threads" if device.get("threads") else "",
             f"{device['memory_bytes'] / 2**30:.1f} GiB" if device.get("memory_bytes") else ""]  # fmt: skip
    rows.append(("device", " · ".join([str(device.get("key", "unknown")), *(fact for fact in facts if fact)])))
    if profile.get("hash"):
        rows.append(("profile", f"{profile.get('folder')}, hash {profile['hash']}{_known_error(profile)}"))
    else:
        rows.append(("profile", f"none: latencies from the {profile.get('source', 'unknown')}" if profile else "not recorded"))
    rows.append(("seed", str(info["seed"])))
    arguments = [(name, value) for name, value in info["arguments"].items() if value is not None]
    rows.append(("arguments", ", ".join(f"{name} {value}" for name, value in arguments)))
    space = html.escape(json.dumps(info["space"], indent=2))
    invalid = sum(row.get("state") == "PRUNED" for row in run.trials())
    if invalid:
        rows.append(("trials", f"{len(complete_trials(run))} scored, {invalid} invalid shapes"))
    table = _table(("what", "value"), [[_text(name), _text(value, wrap=True)] for name, value in rows])
    details = f"<details><summary>Search space</summary><pre><code>{space}</code></pre></details>"
    return f"<h2>Where this comes from</h2>{table}{details}"


def _known_error(profile: Mapping[str, Any]) -> str:
    """The profile's checked error, where its folder is at hand."""
    path = Path(str(profile.get("folder"))) / "profile.json"
    if not path.is_file():
        return ""
    known = files.read_json(path, "profile").get("known_error") or {}
    checked = {dtype: part["draft step"]["median_absolute_error"] for dtype, part in known.items() if "draft step" in part}
    parts = [f"{dtype} {error:.1%}" for dtype, error in checked.items()]
    return f"; known error of a draft step as checked: {', '.join(parts)}" if parts else "; never checked"


def _section_next(head: Verdict) -> str:
    steps = "".join(f"<p>{html.escape(why)}:</p><pre><code>{html.escape(command)}</code></pre>" for why, command in head.next)
    return f"<h2>What to do next</h2>{steps}"


# ----------------------------------------------------------------------------------------------------------------------- plots

INK: Final = "#7f7f01"  # stands for the page's text colour: replaced by currentColor once the picture is text
MARK: Final = "#d1495b"
SERIES: Final = ("#2f86b5", "#d1495b", "#d99022", "#3f9a6b", "#9a6fb8", "#8a8f98")
STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 10.0, "text.color": INK, "axes.labelcolor": INK,
    "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True,
    "grid.color": INK, "grid.alpha": 0.15, "legend.frameon": False, "legend.fontsize": 8.5, "axes.linewidth": 0.8,
}  # fmt: skip


def _section_plots(run: Run, found: Sequence[Candidate], lead: Candidate | None) -> str:
    import matplotlib

    trials = _plotted_trials(run)
    figures = []
    with matplotlib.rc_context(STYLE):
        if trials:
            figures += [_plot_trials(trials, found), _plot_latency(trials)]
        curves = _learning_curves(run)
        if curves:
            figures.append(_plot_learning(curves))
        confirmed = next((item for item in (lead, *found) if item is not None and item.confirmed is not None), None)
        if confirmed is not None and (confirmed.confirmed or {}).get("other_gammas"):
            figures.append(_plot_gammas(confirmed))
        positions = confirmed or next((item for item in found if item.replayed), None)
        if positions is not None:
            figures.append(_plot_positions(positions))
        pictures = [f"<figure>{_svg(figure, f'p{number}', caption)}<figcaption>{html.escape(caption)}</figcaption></figure>"
                    for number, (figure, caption) in enumerate([f for f in figures if f is not None], start=1)]  # fmt: skip
    return f'<h2>Pictures</h2><div class="plots">{"".join(pictures)}</div>' if pictures else ""


def _canvas() -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0, 4.2), layout="constrained")
    return figure, figure.add_subplot()


def _svg(figure: Figure, prefix: str, label: str) -> str:
    """The figure as an inline <svg>: ids made unique in the page, text in the page's colour, nothing that points elsewhere."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": prefix}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', text)
    text = text.replace('href="#', f'href="#{prefix}-').replace("url(#", f"url(#{prefix}-").replace("xlink:href", "href")
    text = text.replace(INK, "currentColor")
    text = re.sub(r'(<svg\b[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg\b[^>]*?) width="[^"]*"', r"\1", text, count=1)
    return text.replace("<svg", f'<svg role="img" aria-label="{html.escape(label, quote=True)}"', 1)


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


def _shade(position: float) -> Any:
    """0..1 -> a colour that reads on white and on black."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("depth", ["#2f86b5", "#2f9d8f", "#d99022", "#d1495b", "#9a4fa0"])(position)


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
                colour = _shade(position)
                axes.scatter([x for x, _ in points], [y for _, y in points], s=22 if feasible else 18, color=colour,
                             alpha=0.8 if feasible else 0.4, marker="o" if feasible else "x", linewidths=0 if feasible else 0.8,
                             label=f"{value}" if feasible or all(not t.feasible for t in members) else None)  # fmt: skip
    axes.legend(title=name, loc="upper left", bbox_to_anchor=(1.0, 1.0), handletextpad=0.2, borderaxespad=0.2, title_fontsize=8.5)


def _plot_trials(trials: Sequence[_Trial], found: Sequence[Candidate]) -> tuple[Figure, str]:
    figure, axes = _canvas()
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
        if seen is not None:
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
    figure, axes = _canvas()
    _coloured(axes, trials, "layers", "draft_step_s", (1.0, 1e3), "hidden", "hidden size", spread=0.5)
    axes.set(xlabel="layers of the draft", ylabel="one draft step, ms")
    axes.set_ylim(bottom=0)
    axes.set_xticks(sorted({trial.layers for trial in trials}))
    return figure, ("What depth and width cost: predicted time of one draft token (draft time / gamma, trials.csv) against "
                    "layers, hidden sizes side by side. The spread of one colour comes from the other choices: ffn, heads, rows "
                    "of the head.")  # fmt: skip


def _learning_curves(run: Run) -> dict[str, list[tuple[float, float]]]:
    """Alpha against seconds of training, by shape; of the ranked candidates and of finalists that are not ranked."""
    curves: dict[str, list[tuple[float, float]]] = {}
    ranked = [run.best_dir(rank) / "training.json" for rank in run.ranks()]
    for path in (*filter(Path.is_file, ranked), *sorted(run.path.glob("finalists/*/training.json"))):
        record = files.read_json(path, "training record")
        points = [(float(seconds), float(alpha)) for seconds, alpha in record.get("alpha_curve") or [] if alpha is not None]
        if points:
            curves.setdefault(Architecture.from_dict(record["architecture"]).label(), points)
    return curves


def _plot_learning(curves: Mapping[str, Sequence[tuple[float, float]]]) -> tuple[Figure, str]:
    figure, axes = _canvas()
    for number, (name, points) in enumerate(curves.items()):
        axes.plot(*zip(*points, strict=True), color=SERIES[number % len(SERIES)], linewidth=1.8, marker="o", markersize=3,
                  linestyle="-" if number < len(SERIES) else "--", label=name)  # fmt: skip
    axes.set(xlabel="training time, seconds", ylabel="alpha during training")
    axes.legend(loc="lower right")
    return figure, ("Learning curves: alpha as training saw it (measured; training.json) against seconds of training. The alpha "
                    "in the tables is measured afterwards on held-out text.")  # fmt: skip


def _plot_gammas(item: Candidate) -> tuple[Figure, str]:
    data = item.confirmed or {}
    rows = sorted([data, *data["other_gammas"]], key=lambda row: row["gamma"])
    gammas = [row["gamma"] for row in rows]
    seen = [_as_estimate(row["speedup"]) for row in rows]
    priced = [row for row in rows if row.get("predicted_speedup") is not None]
    expected = [(row["gamma"], _as_estimate(row["predicted_speedup"]).value) for row in priced]
    spread = [estimate.std for estimate in seen]
    figure, axes = _canvas()
    axes.errorbar(gammas, [e.value for e in seen], yerr=spread, color=MARK, marker="D", capsize=3, label="measured ± one std")
    if expected:
        axes.plot(*zip(*expected, strict=True), color=SERIES[0], marker="o", linestyle="--", label="predicted")
    axes.axhline(1.0, color=INK, linewidth=1.0, linestyle=(0, (4, 3)))
    axes.set(xlabel="gamma, draft tokens per verification", ylabel="speed-up, x", xticks=gammas)
    axes.legend(loc="best")
    return figure, f"Speed-up against gamma for rank {item.rank}: only the gammas that were run in the engine."


def _plot_positions(item: Candidate) -> tuple[Figure, str]:
    figure, axes = _canvas()
    measured = list((item.confirmed or {}).get("accepted_by_position") or [])
    alpha = _as_estimate((item.confirmed or {})["alpha"]).value if measured else item.score.alpha.value
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
