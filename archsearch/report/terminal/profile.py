"""What `profile` prints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from archsearch.report.terminal.layout import table

CHECKED: Final = (
    "what | architecture | tokens | context | measured ms | predicted | ± std | error %"
)


def import_text(result: dict[str, Any]) -> str:
    """What `profile --from` prints."""
    provenance = result["provenance"]
    lines = [
        f"Profile {result['folder']}: {result['rows']} rows for {result['device']}.",
        f"{result['origin']}.",
        f"Licence of the tables: {provenance['licence']}, {provenance['copyright']}.",
    ]
    if provenance.get("not_in_tables"):
        lines.append(f"Not in the tables, so modelled: {'; '.join(provenance['not_in_tables'])}.")
    lines += ["", f"Next: archsearch search --target llama-65b --profile {result['folder']}"]
    return "\n".join(lines)


def cpu_lines(result: dict[str, Any]) -> list[str]:
    """How quiet the machine was, of a CPU's profile."""
    lines = [
        f"Machine: {result['slowdown_median']:.2f} times the quiet reference (5-95 %:"
        f" {result['slowdown_p5']:.2f} to {result['slowdown_p95']:.2f}); divided out of every"
        " repeat."
    ]
    if result["slowdown_p95"] > 1.5 * result["slowdown_p5"] or result["noisy_share"] > 0.25:
        lines.append(
            "WARNING: this machine is busy or throttles: stop other work and run the command again,"
            " or trust the numbers less."
        )
    return lines


def gpu_lines(result: dict[str, Any]) -> list[str]:
    """What each sweep of a GPU measured, and whether its clock dropped."""
    lines = []
    for name, sweep in result["sweeps"].items():
        std = sweep["relative_std"] or 0.0
        sure = f", a step is predicted to ± {std:.1%} (std of the median pass)" if std else ""
        lines.append(f"{name}: {sweep['new_rows']} new rows; stopped: {sweep['stopped']}{sure}.")
    if result["throttled_share"]:
        lines.append(
            f"WARNING: the clock dropped by more than 10 % during {result['throttled_share']:.0%}"
            " of the rows: check cooling and power limit, then run the command again."
        )
    for point in result["skipped"]:
        lines.append(f"Skipped, out of memory: {point}")
    for name, measured in result.get("rounds", {}).items():
        lines.append(f"{name}: {measured['new_rows']} rounds measured in the engine.")
        if measured["left"]:
            lines.append(
                f"Left for want of time (the same command goes on): {'; '.join(measured['left'])}"
            )
        lines += [f"Not measured: {case}: {words}" for case, words in measured["failed"].items()]
    return lines


def rounds_words(fitted: dict[str, Any]) -> str:
    """Costs fitted to the rounds of an engine, in ms; those that no row determines in brackets."""
    words = []
    for name, cost in fitted["costs"].items():
        if cost["value"] or cost["std"]:
            text = f"{name.replace('_', ' ')} {1e3 * cost['value']:.2f} ± {1e3 * cost['std']:.2f}"
            words.append(text if name in fitted["identified"] else f"({text})")
    return (
        f"rounds of class {fitted['class']}, {fitted['rows']} measured, median error of the law"
        f" {fitted['median_absolute_error']:.1%}; ms, those not determined in brackets:"
        f" {', '.join(words)}."
    )


def _learnt_words(learnt: dict[str, Any]) -> Iterator[str]:
    """How right the model of one dtype is, and what engines add."""
    if "missing" in learnt:
        yield f"no model yet: {learnt['missing']}"
        return
    if learnt.get("leave_one_out_median") is not None:
        yield (
            "whole passes left out one at a time: median error"
            f" {learnt['leave_one_out_median']:.1%},"
            f" {learnt['leave_one_out_within_12_percent']:.0%} within 12 %."
        )
    if own := learnt.get("engine_passes"):
        plain, rounds, token = (
            f"{1e3 * own['rest'].get(name, 0):.2f}" for name in ("plain_s", "round_s", "token_s")
        )
        yield (
            f"passes as {own['engine']} ran them: {own['rows']} rows, left out one at a time:"
            f" median error {own['leave_one_out_median']:.1%},"
            f" {own['leave_one_out_within_10_percent']:.0%} within 10 %; beside them it"
            f" takes {plain} ms a plain step, {rounds} ms a round and"
            f" {token} ms a draft token (measured)."
        )
    if fitted := learnt.get("rounds"):
        yield rounds_words(fitted)
    for engine, parts in learnt["engines"].items():
        yield (
            f"{engine} adds {1e3 * parts['plain_s']:.2f} ms per plain token,"
            f" {1e3 * parts['round_s']:.2f} ms per round, {1e3 * parts['token_s']:.2f} ms per draft"
            f" token and {1e3 * parts['layer_s']:.3f} ms per layer of it (measured)."
        )


def profile_text(result: dict[str, Any]) -> str:
    """What `profile` prints."""
    lines = [
        f"Profile {result['folder']}: {result['rows']} rows, {result['new_rows']} new,"
        f" {result['noisy_share']:.0%} noisy.",
        *(gpu_lines(result) if "sweeps" in result else cpu_lines(result)),
    ]
    for dtype, learnt in result["models"].items():
        lines += [f"{dtype}: {words}" for words in _learnt_words(learnt)]
    for dtype, check in result["checks"].items():
        rows = [
            (
                row["what"],
                row["architecture"],
                str(row["tokens"]),
                str(row["context"]),
                f"{1e3 * row['measured_s']:.2f}",
                f"{1e3 * row['predicted_s']:.2f}",
                f"{1e3 * row['predicted_std_s']:.2f}",
                f"{100 * row['relative_error']:+.1f}",
            )
            for row in check["rows"]
        ]
        lines += [
            "",
            f"Check {dtype}: shapes the profile has not seen",
            table(rows, CHECKED),
        ]
        for what in ("draft step", "verify"):
            if what in check:
                part = check[what]
                lines.append(
                    f"{what}: {part['cases']} cases, median absolute error"
                    f" {part['median_absolute_error']:.1%}, {part['within_12_percent']:.0%} within"
                    f" 12 %, {part['within_two_std']:.0%} within two std, bias {part['bias']:+.1%}"
                )
    lines += ["", f"Next: archsearch search --target T --profile {result['folder']}"]
    return "\n".join(lines)
