"""What `search` prints."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from archsearch.engine_facts import ENGINES, engine_title
from archsearch.report.answer import (
    MOST_ROWS,
    SCREEN,
    Option,
    first,
    hours_words,
    rows_text,
    sentences,
    serve_command,
)
from archsearch.report.best import section_mix
from archsearch.report.engines import fastest_lines, run_dtype, ways_of, whole_headline
from archsearch.report.families import found_section
from archsearch.report.headline import headline
from archsearch.report.ladder import section_rungs
from archsearch.report.mixes import asked_words, load_words, mix_words
from archsearch.report.pareto import pareto_section
from archsearch.report.phrases import dtype_words, hub_name, interval, latency_warning, shell_path
from archsearch.report.predicted import section_why
from archsearch.report.reading import Reading, read_run
from archsearch.report.terminal.layout import plus_minus, section_lines, table, wrap, wrapped
from archsearch.report.terminal.summary import summary_text
from archsearch.runs.families import families_of
from archsearch.runs.run import Run, open_run


def _scored_words(spaces: Sequence[Mapping[str, Any]]) -> str:
    """Of which spaces the trials are the best of all shapes."""
    whole = [f"{space['shapes']:,} of {space['space']}" for space in spaces if space["exact"]]
    return f"; all shapes were scored: {', '.join(whole)}" if whole else ""


def regret_lines(regrets: Sequence[Mapping[str, Any]]) -> list[str]:
    """How far the best that a sampler found lies below the exact best of its space, or of a part
    that was scored in full."""
    return [
        f"Regret: {regret['sampler']}'s best of {regret['space']} is {regret['regret']:.2%} below"
        f" the exact best ({regret['exact_speedup']:.3f}x) of {_regret_of(regret)}."
        for regret in regrets
        if regret["regret"] >= NO_REGRET
    ]


NO_REGRET = 5e-5  # what 0.00 % would say


def _regret_of(regret: Mapping[str, Any]) -> str:
    shapes = f"{regret['shapes']:,} shapes"
    return f"all {shapes}" if regret["whole"] else f"{shapes}, a part of them"


LEAST_ROWS = 3


def search_text(result: dict[str, Any], *, explain: bool = False) -> str:
    """The first screen: the answer in at most SCREEN lines of 100 columns; with `explain` all that
    it rests on behind it."""
    run = open_run(Path(result["run"]))
    reading = read_run(run)  # once: what is shown of a run is what its files say
    options = [Option.of(item) for item in reading.candidates]
    if not options:
        return explained_text(result, run, reading)
    head = headline(run, reading.candidates)
    budget = result.get("training_budget")
    unit = "GPU" if run.info["device"].get("kind") == "gpu" else "CPU"
    where = f"for {result['target']} on {result['device']}"
    where += "" if result.get("mix") is None else " over the mix of work"
    if any(option.weights for option in options):
        whole = whole_headline(run, reading)
        above = [whole.title, *whole.lines[:HEADLINE_LINES]]
    else:
        above = sentences(options, where, unit, budget and budget["gpu_hours"])
        above[1:1] = [" ".join(fastest_lines(ways_of(reading), run_dtype(run))[:2])]
    above = [above[0], _assumed_words(result, budget, unit), *above[1:]]
    unprofiled = latency_warning(result)
    warnings = [*([unprofiled] if unprofiled else []), *result["warnings"], *reading.problems]
    above += [f"WARNING: {text}." for text in warnings[:1]]
    why, command = _next_step(result, options, head.next)
    below = [
        *wrapped([f"{why}:"]),
        *f"  {command}".splitlines(),
        f"More: --explain, or archsearch report {shell_path(run.path)}",
    ]
    lines = wrapped(above)
    room = SCREEN - len(lines) - len(below) - 5  # blank lines, header, rule and marks of the table
    table_lines = rows_text(options, unit, max(LEAST_ROWS, min(MOST_ROWS, room)))
    text = "\n".join([*lines, "", *table_lines, "", *below])
    return f"{text}\n\n{explained_text(result, run, reading)}" if explain else text


HEADLINE_LINES = 5
SWITCH = re.compile(r"\bset ([A-Z][A-Z0-9_]+=\w+)")


def _assumed_words(result: Mapping[str, Any], budget: Mapping[str, Any] | None, unit: str) -> str:
    """What is predicted for, and the training that every alpha of a drafter to be trained
    assumes."""
    words = f"{asked_words(result)}, {result['served']}."
    if budget is None:
        return words
    hours = hours_words(budget["gpu_hours"], unit)
    return f"{words} Drafters to be trained are given {hours} (--training-budget)."


def _next_step(
    result: Mapping[str, Any], options: Sequence[Option], steps: Sequence[tuple[str, str]]
) -> tuple[str, str]:
    """The one step that is worth most now: serving what one can have today, else the headline's
    first."""
    today = first(option for option in options if option.at_hand and not option.weights)
    trained = any(option.weights for option in options)
    if today is not None and not trained and interval(today.gain)[1] > 1.0:
        target, ranks = hub_name(str(result["target"])), result["workload"]["tensor_parallel"]
        command = serve_command(today, target, str(result["engine"]), ranks)
        # The warning is of the first rank: what it says to set belongs into the command.
        wanted = SWITCH.search(" ".join(result["warnings"])) if today is options[0] else None
        if command is not None:
            return "Try it today", f"{wanted[1]} {command}" if wanted is not None else command
    whole = ("See the whole run", f"archsearch report {shell_path(Path(result['run']))}")
    return steps[0] if steps else whole


def explained_text(result: dict[str, Any], run: Run, reading: Reading) -> str:
    """The workload, what each rung did, and the summary of the run folder."""
    workload, free, mix = result["workload"], result["free_layers"], result.get("mix")
    where = (
        f"batch size {workload['batch_size']}, context {workload['context_len']}"
        if mix is None
        else mix_words(mix)
    )
    scored = _scored_words(result.get("scored", []))
    lines = [
        f"Workload: {where}, tensor parallel {workload['tensor_parallel']}, {dtype_words(result)},"
        f" {workload['mode']} mode, temperature {workload['temperature']:g}, served by"
        f" {result['served']}.",
        *([f"  {load_words(part)}." for part in mix["parts"]] if mix is not None else []),
        f"Latency: {result['latency']}.",
        f"Acceptance prior: {result['prior']}.",
        f"{result['trials']} trials in space {result['space']}{scored}.",
        *wrapped(regret_lines(result.get("regrets", []))),
    ]
    if free is not None:
        lines.append(
            f"A draft as wide as rank 1 may be up to {free:.1f} layers deep before launching it,"
            " not running it, takes the time."
        )
    said = [f"WARNING: {text}." for text in result["warnings"]]
    said += [f"Note: {note}." for note in (*result.get("notes", []), *result.get("left_out", []))]
    lines += ["", *said, *([""] if said else [])]
    if len(result.get("families", [])) > 1:
        replayed = [f"  {result['replayed']}."] if result.get("replayed") else []
        lines += [*family_lines(result), *replayed, ""]
    if result.get("rungs"):
        lines += [*section_lines(section_rungs(reading.climb)), *_measured_lines(result), ""]
    lines += [summary_text(run, reading), ""]
    lines += section_lines(section_why(reading.curves)) if result.get("rivals") else []
    lines += section_lines(section_mix(reading.candidates))
    lines += section_lines(pareto_section(result["pareto"])) if result.get("pareto") else []
    return "\n".join([*lines[:-1], *next_lines(result)])


STEPS_TOLD = 2


def next_lines(result: dict[str, Any]) -> list[str]:
    """The measurements that teach most per minute: what each is expected to bring, and its
    command."""
    lines: list[str] = []
    for step in result.get("next", [])[:STEPS_TOLD]:
        after = f"narrows {step['speedup']:.2f}x ± {step['std']:.2f} to ± {step['std_after']:.2f}"
        likely = f"; likely gain from a better choice {step['gain']:.1%}"
        gain = likely if step["gain"] >= 0.001 else ""
        needs = f" Needs {step['needs']}." if step["needs"] else ""
        what = step["what"][0].upper() + step["what"][1:]
        text = f"{what}: about {max(step['minutes'], 1):.0f} min; {after}{gain}.{needs}"
        lines += [*(f"  {line}" for line in wrap(text, 96)), f"    {step['command']}"]
    return ["", "What to measure next (most per minute first):", *lines] if lines else []


def family_lines(result: dict[str, Any]) -> list[str]:
    """The best of each family, and whether somebody has to train it."""
    if any("measured_on" in item for item in result["families"]):
        found = section_lines(found_section(families_of(result)))[:-1]
        return [*found, *_untrained_rival(result["families"], result)]
    rows = [
        (
            item["family"],
            str(item["rank"]),
            f" {item['label']}",
            f"{item['parameters'] / 1e6:,.0f}M",
            str(item["gamma"]),
            plus_minus(item["alpha"]),
            plus_minus(item["tau"]),
            plus_minus(item["speedup"]) + ("*" if item.get("assumed") else " "),
            "yes" if item["trains"] else "no",
        )
        for item in result["families"]
    ]
    header = "family | rank |  best | parameters | gamma | alpha | tau | speed-up | to train"
    lines = ["The best of each family:", table(rows, header)]
    why = "; ".join(
        f"{item['family']} ({item['assumed']}) by {item['speedup']['low']:.2f}x"
        for item in result["families"]
        if item.get("assumed")
    )
    text = f"* assumed, so ranked by the lower end of its interval: {why}."
    return lines + ([f"  {line}" for line in wrap(text, 96)] if why else [])


def _untrained_rival(families: list[dict[str, Any]], result: dict[str, Any]) -> list[str]:
    """Where a family that needs no training may be as fast as what was trained: how to measure the
    two side by side."""
    trained = [item for item in families if item["trains"]]
    engine = str(result.get("engine") or "transformers")
    confirms = ENGINES[engine].confirms if engine in ENGINES else ()
    free = [item for item in families if not item["trains"] and item["family"] in confirms]
    if not trained or not free or "run" not in result:
        return []
    best, rival = (
        max(found, key=lambda item: item["speedup"]["value"]) for found in (trained, free)
    )
    ours, theirs = best["speedup"], rival["speedup"]
    if theirs["value"] < max(1.0, ours["value"] - math.hypot(ours["std"], theirs["std"])):
        return []
    ranked = best["family"] == "independent" and (best["rank"] or 1) > 1
    rank = f" --rank {best['rank']}" if ranked else ""
    words = (
        f"{rival['family']} needs no training and may be as fast; both in {engine_title(engine)},"
        " prompt by prompt:"
    )
    command = (
        f"archsearch confirm {shell_path(Path(result['run']))}{rank} --family {best['family']}"
        f" --family {rival['family']}"
    )
    return [f"  {words}", f"    {command}"]


def _measured_lines(result: dict[str, Any]) -> list[str]:
    """What was measured of each draft that was trained in full, and on which prompts."""
    lines = [f"Measured on {result['prompts']}:"]
    for item in result["measured"]:
        parts = ", ".join(
            f"{name} {plus_minus(value)}"
            for name, value in item["alpha_by_category"].items()
            if name
        )
        by_kind = f" ({parts})" if parts else ""
        lines.append(
            f"  {item['label']}: alpha {plus_minus(item['alpha'])}{by_kind}, tau"
            f" {plus_minus(item['tau'])} at gamma {item['gamma']}, {item['head_rows']} head rows"
            f" cover {item['coverage']:.1%}"
        )
    return lines
