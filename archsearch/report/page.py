"""report.html: one page that needs no other file and no network, of the sections of a run."""

from __future__ import annotations

import html
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

from archsearch import files
from archsearch.errors import ArchsearchError
from archsearch.profiles import draft_step_errors, header_of
from archsearch.report.answer import sentences, serve_today, unit_of
from archsearch.report.best import section_best, section_mix
from archsearch.report.chart_page import scripts, web_file
from archsearch.report.compare import Comparison, compare_section
from archsearch.report.confirmed import section_confirmed
from archsearch.report.costs import section_costs
from archsearch.report.engines import section_engines, whole_headline
from archsearch.report.families import section_families
from archsearch.report.headline import Headline
from archsearch.report.learning import section_ladder, section_learning, section_rungs
from archsearch.report.load import section_load, section_schedule
from archsearch.report.phrases import search_command, shell_path
from archsearch.report.plots import section_plots
from archsearch.report.predicted import section_batch, section_elsewhere, section_time, section_why
from archsearch.report.reading import Reading, read_run
from archsearch.report.section import Section, Table, charts_of, text_cell
from archsearch.runs.run import WORKLOAD_FILE, Run


@dataclass(frozen=True)
class Opening:
    """What is above the sections: `number` is the speed-up and how sure it is, "" for none."""

    kicker: str
    title: str
    number: tuple[str, str] | None
    answer: Section
    serve: Section


def write_html(run: Run) -> Path:
    """Write report.html; its path."""
    files.write_text(run.report_file, page_of(run)[0])
    return run.report_file


def write_figures(run: Run) -> list[Path]:
    """Write figures/ of a run: see `chart_files.write_files`."""
    from archsearch.report.chart_files import write_files

    return write_files(run.path / "figures", page_of(run)[1])


def page_of(run: Run) -> tuple[str, list[Section]]:
    """(the page, its sections). A run that has not finished, or of an older version, has fewer, and
    the page says so."""
    reading = read_run(run)
    head = whole_headline(run, reading)
    sections = [section for section in sections_of(run, reading, head) if section]
    opening = _opening(run, head, reading)
    title = f"archsearch: {run.arguments.get('target', '')} on {run.device}"
    return html_page(title, sections, opening), sections


def sections_of(run: Run, reading: Reading, head: Headline) -> list[Section]:
    """What there is to say of a run, in the order of the page; empty where its file is missing."""
    found, unit = reading.candidates, unit_of(run.device)
    parts = [
        Section(
            "Files that could not be read",
            words=reading.problems,
            notes=["Their part of this report is missing."] if reading.problems else [],
        ),
        section_costs(reading.budgets, unit),
        section_batch(reading.curves),
        section_best(found, unit),
        section_mix(found),
        section_families(reading.families, reading.compared),
        section_engines(reading, run.dtype),
        section_time(reading.curves),
        section_elsewhere(reading.curves),
        section_why(reading.curves),
    ]
    for item in found:
        ran = [item.confirmed, *item.elsewhere] if item.confirmed is not None else item.elsewhere
        known = (item.rank, item.score.label(), item.score.alpha)
        parts += [section_confirmed(each, *known, item.replayed) for each in ran]
        parts += [section_load(load, *known) for load in item.loads]
        parts += [section_schedule(item.rank, item.schedule)] if item.schedule is not None else []
    trials = run.trial_rows("COMPLETE")
    return [
        *parts,
        section_ladder(reading, trials),
        section_rungs(reading.climb),
        section_learning(reading),
        section_plots(reading, trials, head.lead),
        compare_section(reading.comparison) if reading.comparison is not None else Section(),
        _section_missing(run, reading),
        _section_provenance(run, len(trials)),
        section_reproduce(run),
        Section("What to do next", commands=head.next),
    ]


def write_comparison(path: Path, found: Comparison) -> None:
    """A comparison as a page of its own."""
    title = f"archsearch: {', '.join(found.runs)}"
    files.write_text(path, html_page(title, [compare_section(found)]))


def html_page(title: str, sections: Sequence[Section], opening: Opening | None = None) -> str:
    """The page; a browser that holds to its policy runs nothing but the page's own scripts, and
    asks nobody. Whatever comes out of files is escaped by the template."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {
        # where a column must be narrow, a value and its std take two lines
        "whole": partial(_unbroken, r"([^ ]+(?: (?!±)[^ ]+)+)"),
        "options": partial(_unbroken, r"(?<= )(--[a-z-]+)"),
    }
    nonce = secrets.token_hex(12)
    return environment.from_string(web_file("page.html")).render(
        title=title,
        opening=opening,
        sections=list(zip(anchors(sections), sections, strict=True)),
        nonce=nonce,
        style=Markup(web_file("page.css")),
        scripts=Markup(scripts(charts_of(sections), nonce)),
    )


def _unbroken(pattern: str, text: str) -> object:
    """`text`, whose lines do not break within what fits `pattern`."""
    from markupsafe import Markup

    return Markup(re.sub(pattern, r"<span>\1</span>", html.escape(text)))


def anchors(sections: Sequence[Section]) -> list[str]:
    """A name for each section by its title's words; one that was given before gets a number."""
    names: list[str] = []
    for section in sections:
        stem = "part-" + (re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-") or "x")
        names.append(stem if stem not in names else f"{stem}-{len(names)}")
    return names


def _section_missing(run: Run, reading: Reading) -> Section:
    shown = reading.candidates
    curveless = bool(shown) and reading.curves is None
    drafts = any(item.score.drafter is None for item in shown)
    untrained = drafts and not any(item.has_weights for item in shown)
    unconfirmed = bool(shown) and not any(item.confirmed is not None for item in shown)
    words = {
        "All shapes that were scored: trials.csv is not there (the search has not finished).": (
            not run.trials_file.is_file()
        ),
        "Speed-up along batch, context, alpha and gamma, and where the time goes: curves.json is"
        " not there.": curveless,
        "Learning curves and measured acceptance: no draft of this run has weights.": untrained,
        "Speed-up as measured: nothing was confirmed in an engine.": unconfirmed,
    }
    missing = [text for text, lacks in words.items() if lacks]
    again = [("The curves", f"archsearch report {shell_path(run.path)}")] if curveless else []
    return Section("What this report does not show", words=missing, commands=again)


def _opening(run: Run, head: Headline, reading: Reading) -> Opening:
    trials = len(run.trial_rows("COMPLETE"))
    searched = f"{trials} scored trials" if trials else "no trials written yet"
    device = run.device or "device unknown"
    about = ("archsearch report", run.arguments.get("target", ""), device, searched)
    above, number, serve = head.lines[:1], None, Section()
    if (option := head.lead) is not None:
        gain, how = option.gain, "measured" if option.measured else "predicted"
        if (better := head.switched) is not None:
            gain, how = better.speedup, f"predicted with {better.switches}"
        low, high = gain.interval
        # else the title's number is of a run under load
        if f"{gain.value:.2f}x" in head.title:
            number = (f"{gain.value:.2f}x", f"{low:.2f}x to {high:.2f}x (5 to 95 %), {how}")
        options, unit = reading.candidates, unit_of(run.device)
        if not any(each.has_weights for each in options):
            above = [*head.lines[:1], *sentences(options, "", unit, reading.remedied)[1:]]
        serve = Section(commands=serve_today(run, reading))
    more = Section("How sure, and what it rests on", words=head.lines[1:], folded=True)
    answer = Section(words=above, parts=[more])
    return Opening(" · ".join(map(str, about)), head.title, number, answer, serve)


def _section_provenance(run: Run, scored: int) -> Section:
    info = run.info
    device, profile, code = info["device"], run.profile, info["code"]
    facts = [
        str(device.get("key", "unknown")),
        device.get("name") or "",
        f"{device['threads']} threads" if device.get("threads") else "",
        f"{device['memory_bytes'] / 2**30:.1f} GiB" if device.get("memory_bytes") else "",
    ]
    latency = (
        f"none: latencies from the {profile.get('source', 'unknown')}"
        if profile
        else "not recorded"
    )
    if profile.get("hash"):
        folder = profile.get("folder") or f"{profile.get('carried_from')} ({profile.get('source')})"
        latency = f"{folder}, hash {profile['hash']}{_known_error(profile)}"
    invalid = len(run.trial_rows("PRUNED"))
    commit = code.get("commit") or "unknown (not run from a checkout)"
    arguments = [f"{name} {value}" for name, value in run.arguments.items() if value is not None]
    rows: Final = {
        "run folder": run.path,
        "started": info["created"],
        "report written": datetime.now(UTC).isoformat(timespec="seconds"),
        "code": f"archsearch {code.get('version')}, commit {commit}",
        "packages": ", ".join(f"{name} {version}" for name, version in info["packages"].items()),
        "device": " · ".join(filter(None, facts)),
        "profile": latency,
        "engine": profile.get("served"),
        "seed": info["seed"],
        "arguments": ", ".join(arguments),
        "trials": f"{scored} scored, {invalid} invalid shapes" if invalid else None,
    }
    cells = [
        [text_cell(name), text_cell(value, wrap=True)]
        for name, value in rows.items()
        if value is not None
    ]
    space = Section(
        "Search space", commands=[("", json.dumps(info["space"], indent=2))], folded=True
    )
    return Section("Where this comes from", tables=[Table(("what", "value"), cells)], parts=[space])


def _known_error(profile: Mapping[str, object]) -> str:
    folder = Path(str(profile.get("folder")))
    if not (folder / "profile.json").is_file() or "tables" in profile:  # which were not checked
        return ""
    try:
        known = header_of(folder).get("known_error") or {}
    except ArchsearchError:  # the profile is not part of the run
        return "; profile.json cannot be read"
    if parts := [f"{name} {error:.1%}" for name, error in draft_step_errors(known).items()]:
        return f"; known error of a draft step as checked: {', '.join(parts)}"
    return "; never checked"


def section_reproduce(run: Run) -> Section:
    """The command of the search, the versions and the profile it needs."""
    info = run.info
    packages = " ".join(
        f"{name}=={version}"
        for name, version in info["packages"].items()
        if name != "python" and "+" not in str(version)
    )
    commit = info["code"].get("commit")
    lines = [f"git checkout {commit}"] if commit else []
    lines += [f"pip install {packages}"] if packages else []
    lines.append(search_command(run.arguments, run.path / WORKLOAD_FILE))
    profile = run.profile.get("hash")
    needs = f"It needs the profile with hash {profile}. " if profile else ""
    words = (
        f"{needs}The ranking is the same with the same seed, versions and profile; what is timed"
        " and trained is measured anew. The numbers of the figures: archsearch report RUN"
        " --figures (SVG, PNG, CSV)."
    )
    return Section("How to reproduce this", notes=[words], commands=[("", "\n".join(lines))])
