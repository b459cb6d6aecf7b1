"""What `acceptance` prints."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, repeat
from typing import Any

from archsearch.report.terminal.layout import plus_minus, table

Result = Mapping[str, Any]
"""The answer of `acceptance`, as `pipeline.acceptance` makes it."""


def acceptance_text(result: Result) -> str:
    """What `acceptance` prints."""
    how = "temperature {temperature:g}, top-p {top_p:g}" if result["temperature"] else "greedy"
    how = how.format(**result)
    if "family" in result:
        return "\n".join(_untrained_lines(result, how))
    lines = ["Draft {draft} ({shape}) for {target}, {how}.".format(**result, how=how)]
    if "published" in result:
        words = "tau {tau:g} at gamma {gamma} is alpha".format(**result["published"])
        lines.append(f"{words} {plus_minus(result['alpha'], digits=3)}.")
    elif "alpha" in result:
        lines += _measured_lines(result)
    if "explanation" in result:
        lines += _explanation_lines(result["explanation"])
    return "\n".join(lines)


def _best_lines(result: Result, who: str, how: str) -> list[str]:
    """The best gamma; nothing where no device was named."""
    if "speedup" not in result:
        return []
    best = result["best_gamma"]
    never = f"{who} does not pay at any gamma: run the target alone."
    words = f"Speed-up modelled with the {how} tau; latency: {result['latency']}."
    return ["", f"{f'Best gamma {best}.' if best else never} {words}"]


def _interval(values: tuple[float, float] | None, digits: int = 3) -> str:
    return "-" if values is None else f"{values[0]:.{digits}f} to {values[1]:.{digits}f}"


def _measured_lines(result: Result) -> list[str]:
    sampled, whole = result["temperature"], result["intervals"]
    what = "mean overlap, sum of min(p, q)" if sampled else "share of tokens on which both agree"
    written = "{tokens} tokens of {prompts} answers that the target wrote, {dtype}"
    lines = [
        f"Measured on {written.format(**result)}.",
        "",
        f"alpha {plus_minus(result['alpha'], digits=3)} ({what})",
        "  90 % {}, 95 % {}, over prompts".format(*map(_interval, whole["alpha"].values())),
    ]
    if sampled:
        same = f"{result['argmax_agreement']:.3f} of the tokens"
        lines.append(f"  the most likely token is the same for {same}")
    gains, taus = result.get("speedup"), result["tau"]
    shares = chain((f"{share:.3f}" for share in result["accepted_by_position"]), repeat("-"))
    rows = [
        (
            str(gamma),
            plus_minus(tau),
            *(_interval(each, 2) for each in whole["tau"][gamma].values()),
            share,
            *((plus_minus(gains[gamma]),) if gains else ()),
        )
        for (gamma, tau), share in zip(taus.items(), shares, strict=False)
    ]
    more = " | speed-up" if gains else ""
    lines += ["", table(rows, f"gamma | tau | 90 % | 95 % | position accepted{more}")]
    lines += _best_lines(result, "The draft", "measured")
    if parts := result["by_category"]:
        rows = [
            (
                name,
                str(part["prompts"]),
                str(part["tokens"]),
                plus_minus(part["alpha"], digits=3),
                _interval(part["intervals"]["alpha"][95]),
                plus_minus(part["tau"].get(4)),
                *((str(part.get("best_gamma")),) if gains else ()),
            )
            for name, part in parts.items()
        ]
        more = " | best gamma" if gains else ""
        header = f"category | prompts | tokens | alpha | 95 % | tau, gamma 4{more}"
        lines += ["", table(rows, header)]
    lines += ["", *(f"Note: {note}." for note in result["notes"])]
    lines.append(
        "tau: tokens per round, bonus included. Position accepted: share of rounds, at gamma"
        f" {len(taus)}."
    )
    return lines


def _explanation_lines(explanation: Result) -> list[str]:
    terms = explanation["terms"]
    rows = [
        # The space keeps evidence that begins with a number from being set to the right as one.
        (row["term"], f"{row['contribution']:+.2f}", f"± {row['std']:.2f}", f" {row['evidence']}")
        for row in terms
        if abs(row["contribution"]) >= 0.005 or row["std"] >= 0.005
    ]
    silent = len(terms) - len(rows)
    more = f"({silent} more terms say nothing about this shape: --json has them.)"
    return [
        "",
        f"The prior expects alpha {plus_minus(explanation['alpha'])} for this shape. Its terms add"
        " up in logit(alpha):",
        "",
        table(rows, "term | logit | std |  evidence"),
        *([more] if silent else []),
    ]


def _untrained_lines(result: Result, how: str) -> list[str]:
    lines = ["{draft} for {target}, {how}.".format(**result, how=how)]
    notes = ["", *(f"Note: {note}." for note in result["notes"])]
    if "exits" in result:
        return [*lines, "", _exit_table(result["exits"]), *notes]
    written = "Replayed on {tokens} tokens of {prompts} answers that the target wrote."
    lines += [written.format(**result), ""]
    gains, intervals = result.get("speedup"), result["intervals"]["tau"]
    rows = [
        (
            str(gamma),
            plus_minus(result["drafts_share"][gamma]),
            f"{result['drafted'][gamma]:.1f}",
            f"{result['alpha_drafted'][gamma]:.3f}",
            plus_minus(tau),
            _interval(intervals[gamma][95], 2),
            *((plus_minus(gains[gamma]),) if gains else ()),
        )
        for gamma, tau in result["tau"].items()
    ]
    header = "gamma | rounds that draft | tokens then | accepted | tau | 95 %"
    lines += [table(rows, header + " | speed-up" * bool(gains))]
    lines += _best_lines(result, "It", "replayed")
    parts = [
        (name, str(part["prompts"]), plus_minus(part["tau"].get(4)))
        for name, part in result["by_category"].items()
    ]
    lines += ["", table(parts, "category | prompts | tau, gamma 4")] if parts else []
    what = "tau: tokens per round, over all rounds. Accepted: share of the drafted tokens that were"
    return [*lines, *notes, f"{what} judged."]


def _exit_table(exits: Mapping[int, Result]) -> str:
    rows = [
        (
            str(layer),
            plus_minus(part["alpha"], digits=3),
            plus_minus(part["tau"].get(4)),
            *(
                (plus_minus(part["speedup"]), str(part["best_gamma"]))
                if part.get("speedup")
                else ()
            ),
        )
        for layer, part in exits.items()
    ]
    priced = any(part.get("speedup") for part in exits.values())
    more = " | speed-up | best gamma" * priced
    return table(rows, f"exit after layer | alpha | tau, gamma 4{more}")
