"""report.html: one page that needs no other file and no network."""

from __future__ import annotations

import html
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from archsearch import files
from archsearch.errors import ArchsearchError
from archsearch.progress import human_time
from archsearch.report.chart_page import scripts, web_file
from archsearch.report.charts import Chart, Figures
from archsearch.report.compare import compare_section
from archsearch.report.confirmed import section_confirmed
from archsearch.report.families import section_families, with_heads
from archsearch.report.foretold import section_elsewhere, section_time, section_why
from archsearch.report.headline import Headline, headline, with_text
from archsearch.report.ladder import section_ladder
from archsearch.report.learning import section_learning
from archsearch.report.load import section_load
from archsearch.report.mixes import PART_HEADER, objective_words, part_rows
from archsearch.report.phrases import SOURCES, launches, millions, shell_path
from archsearch.report.plots import section_plots
from archsearch.report.reading import Reading, Shown, complete_trials, read_run
from archsearch.report.reproduce import section_reproduce
from archsearch.report.schedule import section_schedule
from archsearch.report.tables import Cell, html_command, html_note, html_table, text_cell, value_cell
from archsearch.runs.fields import as_estimate
from archsearch.runs.run import Run
from archsearch.search.objective import Score


def write_html(run: Run) -> Path:
    """report.html: one page that needs no other file and no network; the path."""
    files.write_text(run.report_file, page_of(run)[0])
    return run.report_file


def write_figures(run: Run) -> list[Path]:
    """figures/ of a run: every chart of its report as SVG, PNG and CSV, every table as CSV; the paths."""
    from archsearch.report.chart_files import write_files

    page, charts = page_of(run)
    return write_files(run.path / "figures", charts, page)


def page_of(run: Run) -> tuple[str, list[Chart]]:
    """(the page, the charts in it). A run that has not finished, or of an older version, has fewer parts, and says so."""
    reading, figures = read_run(run), Figures()
    found = reading.candidates
    head = with_text(headline(run, found), reading.text)
    head = with_heads(head, run, reading.families, reading.compared)
    parts = [_section_head(run, head), _section_problems(reading.problems)]
    if found:
        parts.append(_section_best(found))
        parts.append(_section_mix(found))
    parts.append(section_families(reading.families, reading.compared, figures))
    parts += [section_time(reading.curves, figures), section_elsewhere(reading.curves, figures), section_why(reading.curves)]
    for item in found:
        if item.confirmed is not None:
            parts.append(section_confirmed(item))
        for other in item.elsewhere:
            parts.append(section_confirmed(replace(item, confirmed=other)))
        parts += [section_load(item, load, figures) for load in item.loads]
        if item.schedule is not None:
            parts.append(section_schedule(item, item.schedule, figures))
    parts.append(section_ladder(reading, complete_trials(run), figures))
    parts.append(_section_rungs(reading.climb))
    parts.append(section_learning(reading))
    parts.append(section_plots(run, reading, head.lead, figures))
    if reading.comparison is not None:
        parts.append(compare_section(reading.comparison, figures))
    parts.append(_section_missing(run, reading))
    parts.append(_section_provenance(run))
    parts.append(section_reproduce(run))
    parts.append(_section_next(head))
    title = html.escape(f"archsearch: {run.arguments.get('target', '')} on {run.info['device'].get('key', '')}")
    return html_page(title, "\n".join(part for part in parts if part), figures.charts), figures.charts


def write_comparison(path: Path, data: Mapping[str, Any]) -> None:
    """What `Comparison.to_dict` says as a page of its own."""
    figures = Figures()
    body = compare_section(data, figures)
    files.write_text(path, html_page(f"archsearch: {html.escape(', '.join(data['runs']))}", body, figures.charts))


def html_page(title: str, body: str, charts: Sequence[Chart]) -> str:
    """The page around `body`; a browser that holds to its policy runs nothing but the page's own scripts, and asks nobody."""
    nonce = secrets.token_hex(12)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'; img-src data: blob:"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="color-scheme" content="light dark"><title>{title}</title>
<style>
{web_file("page.css")}</style></head><body>
<main>
{body}
</main>
{_WITHOUT_SCRIPTS if charts else ""}{scripts(charts, nonce)}
</body></html>
"""


_WITHOUT_SCRIPTS: Final = (
    '<noscript><p class="note">The figures need JavaScript, which is off here; their numbers: archsearch report --figures.</p>'
    "</noscript>\n"
)


def _section_missing(run: Run, reading: Reading) -> str:
    """What a finished run of this version would show and this one does not, and what brings it."""
    shown, path = reading.candidates, shell_path(run.path)
    missing: list[tuple[str, str]] = []
    if not run.trials_file.is_file():
        missing.append(("All shapes that were scored: trials.csv is not there (the search has not finished).", ""))
    if shown and reading.curves is None:
        missing.append(("Speed-up along batch, context, alpha and gamma, and where the time goes: curves.json is not there.",
                        f"archsearch report {path}"))  # fmt: skip
    if shown and not any(item.has_weights for item in shown) and any(item.score.drafter is None for item in shown):
        missing.append(("Learning curves and measured acceptance: no draft of this run has weights.", ""))
    if shown and not any(item.confirmed is not None for item in shown):
        missing.append(("Speed-up as measured: nothing was confirmed in an engine.", ""))
    if not missing:
        return ""
    lines = "".join(
        f"<li>{html.escape(text)}" + (f" <code>{html.escape(command)}</code>" if command else "") + "</li>"
        for text, command in missing
    )
    return f"<h2>What this report does not show</h2><ul>{lines}</ul>"


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


def _section_mix(found: Sequence[Shown]) -> str:
    """What rank 1 does in each part of the mix that was searched for; "" where there was none."""
    mix = found[0].score.mix
    if mix is None:
        return ""
    note = (
        "Speed-up and time per token are over the mix; gamma, alpha and the times of a round above are of its heaviest part. "
        "Seconds hold the prompts that are read in between."
    )
    words = html.escape(f"Rank {found[0].rank}: {objective_words(mix)}.")
    return f"<h2>Over the mix of work</h2><p>{words}</p>{html_table(PART_HEADER, part_rows(mix))}{html_note(note)}"


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
    steps = "".join(f"<p>{html.escape(why)}:</p>{html_command(command)}" for why, command in head.next)
    return f"<h2>What to do next</h2>{steps}"
