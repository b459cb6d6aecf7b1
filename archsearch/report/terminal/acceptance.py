"""What `acceptance` prints."""

from __future__ import annotations

from itertools import chain, repeat
from typing import Any

from archsearch.report.terminal.layout import plus_minus, table


def acceptance_text(result: dict[str, Any]) -> str:
    """What `acceptance` prints."""
    how = (
        "greedy"
        if result["temperature"] == 0
        else f"temperature {result['temperature']:g}, top-p {result['top_p']:g}"
    )
    if "family" in result:
        return "\n".join(_untrained_lines(result, how))
    lines = [f"Draft {result['draft']} ({result['shape']}) for {result['target']}, {how}."]
    if "published" in result:
        given = result["published"]
        lines.append(
            f"tau {given['tau']:g} at gamma {given['gamma']} is alpha"
            f" {plus_minus(result['alpha'], digits=3)}."
        )
    elif "alpha" in result:
        lines += _measured_lines(result)
    if "explanation" in result:
        lines += _explanation_lines(result["explanation"])
    return "\n".join(lines)


def _interval(values: Any, digits: int = 3) -> str:
    return "-" if values is None else f"{values[0]:.{digits}f} to {values[1]:.{digits}f}"


def _measured_lines(result: dict[str, Any]) -> list[str]:
    intervals = result["intervals"]
    what = (
        "share of tokens on which both agree"
        if result["temperature"] == 0
        else "mean overlap, sum of min(p, q)"
    )
    lines = [
        f"Measured on {result['tokens']} tokens of {result['prompts']} answers that the target"
        f" wrote, {result['dtype']}.",
        "",
        f"alpha {plus_minus(result['alpha'], digits=3)} ({what})",
        f"  90 % {_interval(intervals['alpha']['90'])}, 95 %"
        f" {_interval(intervals['alpha']['95'])}, over prompts",
    ]
    if result["temperature"] > 0:
        lines.append(
            f"  the most likely token is the same for {result['argmax_agreement']:.3f} of the"
            " tokens"
        )
    gains = result.get("speedup", {})
    shares = [f"{share:.3f}" for share in result["accepted_by_position"]]
    rows = [
        (
            gamma,
            plus_minus(tau),
            *(_interval(intervals["tau"][gamma][level], 2) for level in ("90", "95")),
            share,
            *((plus_minus(gains[gamma]),) if gains else ()),
        )
        for (gamma, tau), share in zip(
            result["tau"].items(), chain(shares, repeat("-")), strict=False
        )
    ]
    more = " | speed-up" if gains else ""
    lines += ["", table(rows, f"gamma | tau | 90 % | 95 % | position accepted{more}")]
    lines += _best_lines(result, "The draft", "measured")
    if result["by_category"]:
        lines += ["", _category_table(result)]
    lines += ["", *(f"Note: {note}." for note in result["notes"])]
    lines.append(
        "tau: tokens per round, bonus included. Position accepted: share of rounds, at gamma"
        f" {len(result['tau'])}."
    )
    return lines


def _best_lines(result: dict[str, Any], who: str, how: str) -> list[str]:
    """The best gamma; nothing where no device was named."""
    if not result.get("speedup"):
        return []
    best = result["best_gamma"]
    never = f"{who} does not pay at any gamma: run the target alone."
    words = f"Speed-up modelled with the {how} tau; latency: {result['latency']}."
    return ["", f"{f'Best gamma {best}.' if best else never} {words}"]


def _category_table(result: dict[str, Any]) -> str:
    priced = "speedup" in result
    rows = [
        (
            name,
            str(part["prompts"]),
            str(part["tokens"]),
            plus_minus(part["alpha"], digits=3),
            _interval(part["intervals"]["alpha"]["95"]),
            plus_minus(part["tau"].get("4")),
            *((str(part.get("best_gamma")),) if priced else ()),
        )
        for name, part in result["by_category"].items()
    ]
    more = " | best gamma" if priced else ""
    return table(rows, f"category | prompts | tokens | alpha | 95 % | tau, gamma 4{more}")


def _explanation_lines(explanation: dict[str, Any]) -> list[str]:
    rows = [
        # The space keeps evidence that begins with a number from being set to the right as one.
        (row["term"], f"{row['contribution']:+.2f}", f"± {row['std']:.2f}", f" {row['evidence']}")
        for row in explanation["terms"]
        if abs(row["contribution"]) >= 0.005 or row["std"] >= 0.005
    ]
    silent = len(explanation["terms"]) - len(rows)
    more = f"({silent} more terms say nothing about this shape: --json has them.)"
    return [
        "",
        f"The prior expects alpha {plus_minus(explanation['alpha'])} for this shape. Its terms add"
        " up in logit(alpha):",
        "",
        table(rows, "term | logit | std |  evidence"),
        *([more] if silent else []),
    ]


def _untrained_lines(result: dict[str, Any], how: str) -> list[str]:
    lines = [f"{result['draft']} for {result['target']}, {how}."]
    notes = ["", *(f"Note: {note}." for note in result["notes"])]
    if "exits" in result:
        return [*lines, "", _exit_table(result), *notes]
    lines += [
        f"Replayed on {result['tokens']} tokens of {result['prompts']} answers that the target"
        " wrote.",
        "",
    ]
    gains = result.get("speedup", {})
    rows = [
        (
            gamma,
            plus_minus(result["drafts_share"][gamma]),
            f"{result['drafted'][gamma]:.1f}",
            f"{result['alpha_drafted'][gamma]:.3f}",
            plus_minus(tau),
            _interval(result["intervals"]["tau"][gamma]["95"], 2),
            *((plus_minus(gains[gamma]),) if gains else ()),
        )
        for gamma, tau in result["tau"].items()
    ]
    header = "gamma | rounds that draft | tokens then | accepted | tau | 95 %"
    lines += [table(rows, header + " | speed-up" * bool(gains))]
    lines += _best_lines(result, "It", "replayed")
    parts = [
        (name, str(part["prompts"]), plus_minus(part["tau"].get("4")))
        for name, part in result["by_category"].items()
    ]
    lines += ["", table(parts, "category | prompts | tau, gamma 4")] if parts else []
    what = "tau: tokens per round, over all rounds. Accepted: share of the drafted tokens that were"
    return [*lines, *notes, f"{what} judged."]


def _exit_table(result: dict[str, Any]) -> str:
    rows = [
        (
            layer,
            plus_minus(part["alpha"], digits=3),
            plus_minus(part["tau"].get("4")),
            *((plus_minus(part["speedup"]), str(part["best_gamma"])) if "speedup" in part else ()),
        )
        for layer, part in result["exits"].items()
    ]
    priced = any("speedup" in part for part in result["exits"].values())
    more = " | speed-up | best gamma" if priced else ""
    return table(rows, f"exit after layer | alpha | tau, gamma 4{more}")
