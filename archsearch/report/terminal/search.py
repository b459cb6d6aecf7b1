"""What `search` prints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from archsearch.engine_facts import ENGINES, engine_title
from archsearch.progress import human_time
from archsearch.report.mixes import load_words, mix_lines, mix_words
from archsearch.report.pareto import pareto_rows
from archsearch.report.phrases import millions, shell_path
from archsearch.report.terminal.layout import plus_minus, table
from archsearch.report.terminal.summary import summary_text, wrap
from archsearch.runs.run import open_run
from archsearch.search.mixed import MixScore


def tie_lines(result: Mapping[str, Any]) -> list[str]:
    """The first group of ranks that the model cannot tell apart, with the cheapest of them."""
    groups, best = result.get("indistinguishable") or [[]], {score["rank"]: score for score in result["best"]}
    if len(groups[0]) < 2 or not result.get("cheapest"):
        return []
    cheapest = best[result["cheapest"][0]]
    ranks = ", ".join(map(str, groups[0]))
    return [f"ranks {ranks} cannot be told apart; the cheapest is rank {cheapest['rank']} ({millions(cheapest['parameters'])})"]


def pareto_lines(data: Mapping[str, Any] | None) -> list[str]:
    """The Pareto set as a table."""
    if data is None:
        return []
    rows, header = pareto_rows(data)
    of = f", of all shapes of {', '.join(data['exact'])}" if data["exact"] else ""
    return ["", f"Pareto set of {', '.join(data['goals'])}{of}:", table(rows, header)]


def _scored_words(spaces: Sequence[Mapping[str, Any]]) -> str:
    """Of which spaces the trials are the best of all shapes."""
    whole = [f"{space['shapes']:,} of {space['space']}" for space in spaces if space["exact"]]
    return f"; all shapes were scored: {', '.join(whole)}" if whole else ""


def regret_lines(regrets: Sequence[Mapping[str, Any]]) -> list[str]:
    """How far the best of each walk lies below the exact best of its space, or of the part of it that was scored in full."""
    none = [regret for regret in regrets if regret["regret"] < NO_REGRET]
    lines = [
        f"Regret: {regret['sampler']}'s best of {regret['space']} is {regret['regret']:.2%} below the exact best "
        f"({regret['exact_speedup']:.3f}x) of {_regret_of(regret)}."
        for regret in regrets
        if regret["regret"] >= NO_REGRET
    ]
    if none:
        told = ", ".join(f"{_regret_of(regret)} ({regret['space']})" for regret in none)
        lines.append(f"Regret: none; {none[0]['sampler']} found the exact best of {told}.")
    return lines


NO_REGRET = 5e-5  # what 0.00 % would say


def _regret_of(regret: Mapping[str, Any]) -> str:
    return f"all {regret['shapes']:,} shapes" if regret["whole"] else f"{regret['shapes']:,} shapes, a part of them"


def search_text(result: dict[str, Any]) -> str:
    """The workload, what each rung did, and the summary of the run folder."""
    workload, free = result["workload"], result["free_layers"]
    mix = result.get("mix")
    where = f"batch size {workload['batch_size']}, context {workload['context_len']}" if mix is None else mix_words(mix)
    lines = [
        f"Workload: {where}, tensor parallel {workload['tensor_parallel']}, {workload['dtype']}, {workload['mode']} mode, "
        f"temperature {workload['temperature']:g}, served by {result['served']}.",
        *([f"  {load_words(part)}." for part in mix["parts"]] if mix is not None else []),
        f"Latency: {result['latency']}.",
        f"Acceptance prior: {result['prior']}.",
        f"{result['trials']} trials in space {result['space']}{_scored_words(result.get('scored', []))}.",
        *(line for text in regret_lines(result.get("regrets", [])) for line in wrap(text, 110)),
        *(
            []
            if free is None
            else [f"Free layers: {free:.1f} (so deep may a draft of rank 1's kernel times be before the host decides)."]
        ),
        "",
    ]
    lines += [f"WARNING: {text}." for text in result["warnings"]] + [""] * bool(result["warnings"])
    lines += [f"Note: {note}." for note in result.get("notes", [])] + [""] * bool(result.get("notes"))
    lines += [f"Note: {text}." for text in result.get("left_out", [])]
    if len(result.get("families", [])) > 1:
        lines += [*family_lines(result), *([f"  {result['replayed']}."] if result.get("replayed") else []), ""]
    if result.get("rungs"):
        lines += [*rung_lines(result), ""]
    lines += [f"Note: {text}." for text in tie_lines(result)]
    why = [f"  {line}" for text in rival_lines(result) for line in wrap(text, 96)]
    lines += [summary_text(open_run(Path(result["run"]))), *(["", "Why rank 1 won:", *why] if why else [])]
    lines += [""] * (mix is not None) + mix_lines(
        [(f"Rank {score['rank']}", MixScore.from_dict(score["mix"])) for score in result["best"][:1] if score.get("mix")]
    )
    lines += pareto_lines(result.get("pareto"))
    return "\n".join([*lines, *next_lines(result)])


STEPS_TOLD = 2


def next_lines(result: dict[str, Any]) -> list[str]:
    """The measurements that teach most per minute: what each is expected to bring, and its command."""
    lines: list[str] = []
    for step in result.get("next", [])[:STEPS_TOLD]:
        after = f"{step['speedup']:.2f}x ± {step['std']:.2f} then becomes ± {step['std_after']:.2f}"
        gain = f", {step['gain']:+.1%} by changing the winner" if step["gain"] >= 0.001 else ""
        needs = f" Needs {step['needs']}." if step["needs"] else ""
        what = step["what"][0].upper() + step["what"][1:]
        text = f"{what}: about {max(step['minutes'], 1):.0f} min. Expected: {after}{gain}.{needs}"
        lines += [*(f"  {line}" for line in wrap(text, 96)), f"    {step['command']}"]
    return ["", "What to measure next (most per minute first):", *lines] if lines else []


def family_lines(result: dict[str, Any]) -> list[str]:
    """The best of each family, and whether somebody has to train it."""
    if any("measured_on" in item for item in result["families"]):
        return _measured_lines(result["families"], result)
    rows = [
        (
            item["family"], str(item["rank"]), f" {item['label']}", f"{item['parameters'] / 1e6:,.0f}M", str(item["gamma"]),
            plus_minus(item["alpha"]), plus_minus(item["tau"]),
            plus_minus(item["speedup"]) + ("*" if item.get("assumed") else " "), "yes" if item["trains"] else "no",
        )
        for item in result["families"]
    ]  # fmt: skip
    header = ("family", "rank", " best", "parameters", "gamma", "alpha", "tau", "speed-up", "to train")
    lines = ["The best of each family:", table(rows, header)]
    assumed = [item for item in result["families"] if item.get("assumed")]
    if assumed:
        why = "; ".join(f"{item['family']} ({item['assumed']}) by {item['speedup']['low']:.2f}x" for item in assumed)
        lines += [f"  {line}" for line in wrap(f"* assumed, so ranked by the lower end of its interval: {why}.", 96)]
    return lines


def _measured_lines(families: list[dict[str, Any]], result: dict[str, Any]) -> list[str]:
    """The best of each family after training, with what it cost."""
    rows = [
        (
            item["family"], str(item["rank"] or ""), f" {item['label']}", f"{item['parameters'] / 1e6:,.0f}M", str(item["gamma"]),
            plus_minus(item["tau"]), plus_minus(item["speedup"]), human_time(item["seconds"]) if item["seconds"] else "none",
            human_time(item["states_s"]) if item["states_s"] >= 1.0 else "",
        )
        for item in families
    ]  # fmt: skip
    header = ("family", "rank", " best", "parameters", "gamma", "tau", "speed-up", "training", "states")
    lines = [f"The best of each family, acceptance measured on {families[0]['measured_on']}, time predicted:"]
    lines.append(table(rows, header))
    if any(item["states_s"] >= 1.0 for item in families):
        lines.append("  states: reading the target's states of the text, once for all heads that read the same layers.")
    notes = (f"{item['family']}: {item['note']}." for item in families if item["note"])
    return [*lines, *(f"  {line}" for note in notes for line in wrap(note, 96)), *_untrained_rival(families, result)]


def _untrained_rival(families: list[dict[str, Any]], result: dict[str, Any]) -> list[str]:
    """Where a family that needs no training may be as fast as what was trained: how to measure the two side by side."""
    trained = [item for item in families if item["trains"]]
    engine = str(result.get("engine") or "transformers")
    confirms = ENGINES[engine].confirms if engine in ENGINES else ()
    free = [item for item in families if not item["trains"] and item["family"] in confirms]
    if not trained or not free or "run" not in result:
        return []
    best, rival = (max(found, key=lambda item: item["speedup"]["value"]) for found in (trained, free))
    doubt = math.hypot(best["speedup"]["std"], rival["speedup"]["std"])
    if rival["speedup"]["value"] <= 1.0 or rival["speedup"]["value"] < best["speedup"]["value"] - doubt:
        return []
    ours = f" --rank {best['rank']}" if best["family"] == "independent" and (best["rank"] or 1) > 1 else ""
    words = f"{rival['family']} needs no training and may be as fast; both in {engine_title(engine)}, prompt by prompt:"
    command = f"archsearch confirm {shell_path(Path(result['run']))}{ours} --family {best['family']} --family {rival['family']}"
    return [f"  {words}", f"    {command}"]


def rival_lines(result: dict[str, Any]) -> list[str]:
    """Rank 1 beside its best rival of another width and of another depth: what decides, and how many rows each term rests on."""
    lines: list[str] = []
    found = result.get("rivals", [])
    for number, rival in enumerate(found):
        if any(rival["label"] == earlier["label"] for earlier in found[:number]):
            continue
        gap = rival["tokens"] + rival["time"]
        names = {"hidden_size": "width", "num_hidden_layers": "depth"}
        what = " and of another ".join(names[each["dimension"]] for each in found if each["label"] == rival["label"])
        terms = ", ".join(_term_words(item) for item in rival["terms"])
        lines.append(
            f"Best of another {what}: {rival['label']}, gamma {rival['gamma']}, {rival['speedup']:.2f}x. Rank 1 has"
            f" {math.expm1(rival['tokens']):+.1%} tokens a round and {math.expm1(-rival['time']):+.1%} time for one: {gap:+.1%} ±"
            f" {rival['std']:.1%}" + (f"; logit(alpha): {terms}." if terms else ".")
        )
    return lines


def _term_words(item: dict[str, Any]) -> str:
    basis = f"{item['rows']} rows" if item["rows"] else "FR-Spec's rule" if item["term"] == "vocabulary" else "assumed"
    return f"{item['term']} {item['difference']:+.2f} ({basis})"


def rung_lines(result: dict[str, Any]) -> list[str]:
    """What each rung did: candidates, minutes, its best, what was dropped; and what was measured on which prompts."""
    rows = []
    for row in result["rungs"]:
        name = f"rung {row['rung']}, {row['what']}" + (f", round {row['round']}" if row["rung"] == 1 else "")
        tokens = f"{row['tokens'] / 1000:.0f}k" if row["tokens"] else ""
        dropped = ", ".join(item["label"] for item in row["dropped"][:2])
        more = f" and {len(row['dropped']) - 2} more" if len(row["dropped"]) > 2 else ""
        score, shapes = plus_minus(row["score"]), f"{row['candidates']}"
        rows.append((name, shapes, tokens, human_time(row["seconds"]), score, f" {row['best']}", f" {dropped}{more}"))
    lines = [table(rows, ("rung", "shapes", "tokens", "time", "speed-up", " best", " dropped"))]
    spent = human_time(result["seconds"])
    lines.append(f"{spent} of {human_time(result['plan']['budget_s'])}: " + ", ".join(
        f"{name} {human_time(seconds)}" for name, seconds in result["steps"].items()))  # fmt: skip
    lines += ["", f"Measured on {result['prompts']}:"]
    for item in result["measured"]:
        parts = ", ".join(f"{name} {plus_minus(value)}" for name, value in item["alpha_by_category"].items() if name)
        lines.append(
            f"  {item['label']}: alpha {plus_minus(item['alpha'])}" + (f" ({parts})" if parts else "")
            + f", tau {plus_minus(item['tau'])} at gamma {item['gamma']}, "
            + f"{item['head_rows']} head rows cover {item['coverage']:.1%}"
        )  # fmt: skip
    return lines
