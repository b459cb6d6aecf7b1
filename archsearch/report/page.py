"""report.html: one page that needs no other file, no script and no network."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from archsearch import files
from archsearch.errors import ArchsearchError
from archsearch.progress import human_time
from archsearch.report.confirmed import section_confirmed
from archsearch.report.headline import Headline, headline, with_text
from archsearch.report.learning import section_learning
from archsearch.report.load import section_load
from archsearch.report.phrases import SOURCES, launches, millions
from archsearch.report.plots import section_plots
from archsearch.report.reading import Shown, complete_trials, read_run
from archsearch.report.schedule import section_schedule
from archsearch.report.tables import Cell, html_note, html_table, text_cell, value_cell
from archsearch.runs.fields import as_estimate
from archsearch.runs.run import Run
from archsearch.search.objective import Score


def write_html(run: Run) -> Path:
    """report.html: one page that needs no other file, no script and no network; the path."""
    reading = read_run(run)
    found = reading.candidates
    head = with_text(headline(run, found), reading.text)
    parts = [_section_head(run, head), _section_problems(reading.problems)]
    if found:
        parts.append(_section_best(found))
    for item in found:
        if item.confirmed is not None:
            parts.append(section_confirmed(item))
        for other in item.elsewhere:
            parts.append(section_confirmed(replace(item, confirmed=other)))
        parts += [section_load(item, load) for load in item.loads]
        if item.schedule is not None:
            parts.append(section_schedule(item, item.schedule))
    parts.append(_section_rungs(reading.climb))
    parts.append(section_learning(reading))
    parts.append(section_plots(run, reading, head.lead))
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
th, td { padding: .32rem .9rem .32rem 0; text-align: right; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
td span { white-space: nowrap; }
td.text:has(small) { min-width: 9.5rem; }
th.text, td.text { text-align: left; }
td.wrap { overflow-wrap: anywhere; max-width: 46rem; }
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


def _section_head(run: Run, head: Headline) -> str:
    info = run.info
    trials = len(complete_trials(run))
    searched = f"{trials} scored trials" if trials else "no trials written yet"
    about = ("archsearch report", info["arguments"].get("target", ""), info["device"].get("key", "device unknown"), searched)
    kicker = " · ".join(map(str, about))
    lines = "".join(f"<p>{html.escape(line)}</p>" for line in head.lines)
    return f'<p class="kicker">{html.escape(kicker)}</p><h1>{html.escape(head.title)}</h1><div class="answer">{lines}</div>'


def _section_problems(problems: Sequence[str]) -> str:
    if not problems:
        return ""
    lines = "".join(f"<p>{html.escape(problem)}</p>" for problem in problems)
    return f"<h2>Files that could not be read</h2>{html_note('Their part of this report is missing.')}{lines}"


def _kind_words(item: Shown) -> str:
    kind = item.score.architecture.attention_kind if item.score.drafter is None else item.score.family
    return f"{kind}, {item.stage}"


def _section_best(found: Sequence[Shown]) -> str:
    rows: list[list[Cell | str]] = []
    for item in found:
        score = item.score
        rows.append([
            str(item.rank), text_cell(score.label(), _kind_words(item)),
            millions(score.parameters), str(score.gamma), value_cell(score.speedup, 2, unit="x"),
            _measured_cell(item), str(item.group), value_cell(score.alpha), value_cell(score.tau),
            value_cell(score.draft_s, 2, 1e3), value_cell(score.verify_s, 1, 1e3), _round_cell(score),
            value_cell(score.break_even_alpha),
            f"{score.kv_bytes_per_token:,}",
        ])  # fmt: skip
    header = ("rank", "shape", "parameters", "gamma", "speed-up, predicted", "measured", "group", "alpha", "tau, tokens",
              "draft, ms", "verify, ms", "round, ms", "break-even alpha", "KV, bytes/token")  # fmt: skip
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
        "<h2>The best candidates</h2>", html_table(header, rows, lead),
        html_note(f"Cannot be told apart (same group): {apart}. In a group each is slower than its first by less than one "
                  "standard deviation of the difference; errors that both share, such as the target's own times, cancel. Worked "
                  "out here from the scores."),
        html_note("Shape: layers x hidden size, ffn width, query heads / KV heads and head size, rows of the language-model head "
                  "(t: tied). draft: all gamma tokens. round: drafting, verification and what the "
                  "engine adds. tau: mean tokens per verification, the target's own included. ± one "
                  f"standard deviation. Sources: {legend}. A combined number bears the weakest source of its parts."),
    ])  # fmt: skip


def _round_cell(score: Score) -> Cell:
    """A round's time, and below it what decides it."""
    if score.round_s is None:
        return Cell("-")
    cell = value_cell(score.round_s, 1, 1e3)
    if score.bound == "host":
        return Cell(cell.text, f"bound by the host: {launches(score)}")
    return cell if score.bound is None else Cell(cell.text, "bound by the GPU")


def _measured_cell(item: Shown) -> Cell | str:
    """The median over prompts with, below it, the pooled speed-up, and whether they decide anything."""
    gain, pooled = item.measured_speedup, item.confirmed.pooled if item.confirmed is not None else None
    if gain is None or pooled is None:
        return value_cell(gain, 2, unit="x")
    below = f"pooled {pooled:.2f}x" + ("; not decided" if item.undecided is not None else "")
    return Cell(f"{gain.value:.2f}x ± {gain.std:.2f}", below)


def _section_rungs(state: Mapping[str, Any]) -> str:
    """What a climb trained, round by round, and what it believed after each; "" for runs that did not climb."""
    records = [record for record in state.get("rungs", []) if record["rung"] > 0]
    if not records:
        return ""
    rows: list[list[Cell | str]] = []
    for record in records:
        name = f"short training {record['round']}" if record["rung"] == 1 else "full training"
        measured = record.get("measured") or {}
        alpha = f"{measured['alpha']:.3f}" if measured.get("alpha") is not None else "-"
        fate = f"{record['state']}: {record['why']}" if record["why"] else record["state"]
        rows.append([
            text_cell(name), text_cell(record["label"]), f"{record['tokens'] / 1e3:,.0f}k", human_time(record["seconds"]),
            Cell(alpha), value_cell(as_estimate(record["alpha"])), value_cell(as_estimate(record["score"]), 2, unit="x"),
            text_cell(fate, wrap=True),
        ])  # fmt: skip
    header = ("round", "shape", "tokens", "time", "alpha then", "alpha at the end", "speed-up at the end", "outcome")
    spent = ", ".join(f"{name} {human_time(seconds)}" for name, seconds in state.get("steps", {}).items())
    words = f"Time budget {human_time(state['budget_s'])}; spent: {spent}. " + " ".join(f"{note}." for note in state["notes"])
    return "\n".join([
        "<h2>The climb</h2>", html_table(header, rows),
        html_note("alpha then: measured after that many tokens, on answers kept out of training, the same for all shapes. At the "
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
        folder = profile.get("folder") or f"{profile.get('carried_from')} ({profile.get('source')})"
        rows.append(("profile", f"{folder}, hash {profile['hash']}{_known_error(profile)}"))
    else:
        rows.append(("profile", f"none: latencies from the {profile.get('source', 'unknown')}" if profile else "not recorded"))
    if profile.get("served"):
        rows.append(("engine", str(profile["served"])))
    rows.append(("seed", str(info["seed"])))
    arguments = [(name, value) for name, value in info["arguments"].items() if value is not None]
    rows.append(("arguments", ", ".join(f"{name} {value}" for name, value in arguments)))
    space = html.escape(json.dumps(info["space"], indent=2))
    invalid = sum(row.get("state") == "PRUNED" for row in run.trials())
    if invalid:
        rows.append(("trials", f"{len(complete_trials(run))} scored, {invalid} invalid shapes"))
    table = html_table(("what", "value"), [[text_cell(name), text_cell(value, wrap=True)] for name, value in rows])
    details = f"<details><summary>Search space</summary><pre><code>{space}</code></pre></details>"
    return f"<h2>Where this comes from</h2>{table}{details}"


def _known_error(profile: Mapping[str, Any]) -> str:
    """The profile's checked error, where its folder is at hand."""
    path = Path(str(profile.get("folder"))) / "profile.json"
    if not path.is_file():
        return ""
    try:
        known = files.read_json(path, "profile").get("known_error") or {}
    except ArchsearchError:  # the profile is not part of the run
        return "; profile.json cannot be read"
    checked = {dtype: part["draft step"]["median_absolute_error"] for dtype, part in known.items() if "draft step" in part}
    parts = [f"{dtype} {error:.1%}" for dtype, error in checked.items()]
    return f"; known error of a draft step as checked: {', '.join(parts)}" if parts else "; never checked"


def _section_next(head: Headline) -> str:
    steps = "".join(f"<p>{html.escape(why)}:</p><pre><code>{html.escape(command)}</code></pre>" for why, command in head.next)
    return f"<h2>What to do next</h2>{steps}"
