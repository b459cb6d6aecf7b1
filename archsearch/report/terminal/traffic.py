"""What `traffic` prints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from archsearch.report.mixes import UNITS, load_words
from archsearch.report.phrases import dtype_words
from archsearch.report.terminal.layout import table

MEANS: Final = (
    "Predicted means. running: requests that decode at once. A first token holds its prompt and its"
    " waiting."
)
MANY: Final = 256
"""Requests that engines run at once at most by default (vLLM's max_num_seqs); memory may hold
fewer."""


def traffic_text(result: Mapping[str, Any]) -> str:
    """What `traffic` prints."""
    workload = result["workload"]
    lines = [
        f"Target {result['target']} on {result['device']}, {dtype_words(result)}, tensor"
        f" parallel {workload['tensor_parallel']}.",
        f"Latency: {result['latency']}.",
        *(f"Load {load_words(part)}." for part in result["load"]),
    ]
    if result["trace_note"]:
        lines.append(f"Note: {result['trace_note']}.")
    for entry in result["drafts"]:
        lines += ["", *_one(entry, result["objective"])]
    return "\n".join([*lines, "", MEANS])


def _one(entry: Mapping[str, Any], objective: str) -> list[str]:
    header = (
        "load | gamma | tau | running | without | ms a token | without | first token ms | without |"
        " tokens/s | without | speed-up"
    )
    rows = [
        (
            part["name"],
            str(part["gamma"]) if part["gamma"] else "off",
            f"{part['tau']:.2f}" if part["gamma"] else "1.00",
            *(f"{run['running']:.1f}" for run in _best_and_plain(part)),
            *(_ms(run["tpot_s"]) for run in _best_and_plain(part)),
            *(_ms(run["ttft_s"], 0) for run in _best_and_plain(part)),
            *(f"{run['tokens_per_s']:,.0f}" for run in _best_and_plain(part)),
            f"{part['speedup']:.2f}",
        )
        for part in entry["parts"]
    ]
    lines = [f"{entry['draft']}, served by {entry['served']}", table(rows, header)]
    for part in entry["parts"]:
        lines += _checks(part)
    unit = UNITS[objective]
    if any(part["drafting"]["full"] or part["plain"]["full"] for part in entry["parts"]):
        lines += [_full(part) for part in entry["parts"]]
    lines.append(
        f"{objective}: {entry['objective']:.4g}{unit}, {entry['plain_objective']:.4g}{unit} without"
        " the draft."
        if objective != "speedup"
        else f"Speed-up over the load: {entry['objective']:.2f}x."
    )
    lines += [f"Breaks a limit: {text}." for text in entry["broken_limits"]]
    return lines + [f"Note: {note}" for note in entry["notes"]]


def _best_and_plain(part: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    return (part["drafting"] if part["gamma"] else part["off"]), part["plain"]


def _full(part: Mapping[str, Any]) -> str:
    """What counts where a server is full: the tokens it gives; a token's time is of as many as
    run."""
    best, plain = _best_and_plain(part)
    given, alone = best["tokens_per_s"], plain["tokens_per_s"]
    return (
        f"{part['name']}: throughput {given:,.0f} tokens/s with the draft, {alone:,.0f} without"
        f" ({given / alone:.2f}x); time per token is of {best['running']:.1f} running against"
        f" {plain['running']:.1f}."
    )


def _checks(part: Mapping[str, Any]) -> list[str]:
    """The simulation beside the closed form, and from which rate on speculation should be off."""
    lines, seen = [], part["simulated"]
    if seen is not None:
        words = f"with the draft {_run(seen['drafting'])}; without {_run(seen['plain'])}"
        lines.append(f"simulated ({seen['requests']} requests): {words}")
    late = [run["ttft_p99_s"] for run in _best_and_plain(part)]
    if None not in late:
        lines.append(
            f"99 % have a first token within {_ms(late[0], 0)} ms, without the draft"
            f" {_ms(late[1], 0)}"
        )
    held = [part[name] for name in ("held", "held_alone")]
    if None not in held and min(held) < max(part["concurrency"] or 0, MANY):
        with_draft = f"{held[0]:,} requests at once with the draft"
        lines.append(f"memory holds {with_draft}, {held[1]:,} without")
    for name, who in (("drafting", "With"), ("plain", "Without")):
        if part[name]["full"]:
            most = f"{part[name]['requests_per_s']:.3g} requests a second"
            lines.append(f"{who} the draft the server is full at {most}")
    if part["requests_per_second"] is not None:
        rate = part["off_rate"]
        lines.append(
            "drafting pays at every rate that the server keeps up with"
            if rate is None
            else f"speculation should be off above {rate:.3g} requests a second"
            if rate
            else "drafting pays at no rate"
        )
    return [f"{part['name']}: {line}." for line in lines]


def _run(run: Mapping[str, Any]) -> str:
    if run["full"]:
        return "does not keep up"
    first = f"{_ms(run['ttft_s'], 0)} ms (99 %: {_ms(run['ttft_p99_s'], 0)})"
    return f"{_ms(run['tpot_s'])} ms a token, first token {first}"


def _ms(seconds: float, digits: int = 2) -> str:
    return "no end" if math.isinf(seconds) else f"{1e3 * seconds:.{digits}f}"
