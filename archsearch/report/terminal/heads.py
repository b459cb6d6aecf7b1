"""What `train --family` and `confirm --family` print."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from archsearch.drafters.registry import family as family_class
from archsearch.progress import human_time
from archsearch.report.terminal.layout import plus_minus, table


def head_text(result: dict[str, Any], run: Path) -> str:
    """How long it was trained, how far its draft tokens are right, and tokens a round by gamma."""
    held, family = result["heldout"], result["family"]
    made = (
        f"; auxiliary states in {human_time(result['auxiliary_s'])} before"
        if result["auxiliary_s"] > 1
        else ""
    )
    shares = "  ".join(f"{share:.2f}" for share in held["conditional"])
    taus = "  ".join(f"{gamma}: {plus_minus(value)}" for gamma, value in held["tau"].items())
    return "\n".join(
        [
            (
                f"{family_class(family).title} for gamma {result['gamma']}, {result['rows']:,}"
                f" tokens of the vocabulary ({result['vocabulary_coverage']:.1%} of what the target"
                f" writes): {result['folder']}"
            ),
            (
                f"Trained {human_time(result['seconds'])} in all, {result['tokens']:,} tokens at "
                f"{result['tokens_per_s']:,.0f} tokens/s{made}."
            ),
            f"Draft tokens right on held-out text, given those before: {shares}",
            f"Tokens a round, predicted by gamma: {taus}",
            "",
            f"Next: archsearch confirm {run} --family {family} --engine vllm",
            f"      archsearch export {run} --family {family} --output DIR",
        ]
    )


def families_text(result: dict[str, Any], run: Path) -> str:
    """The target alone and every drafter, one line each."""
    header = (
        "drafter",
        "gamma",
        "tokens/step",
        "accepted by position",
        "round",
        "tokens/s",
        "speed-up",
        "predicted",
        "identical",
    )
    alone = result["baseline_tokens_per_s"]
    cells = [("target alone", "-", "1", "-", "-", f"{alone:.1f}" if alone else "-", "1", "-", "-")]
    notes = []
    for row in result["rows"]:
        title = family_class(row["family"]).title
        if "tau" not in row:
            notes.append(f"{title}: {row['note']}.")
            continue
        exact = row["identical_output_float32"]
        per_step = row.get("tokens_per_step") or row["tau"]["value"]
        cells.append(
            (
                title,
                str(row["gamma"]),
                f"{per_step:.2f}",
                " ".join(f"{share:.2f}" for share in row["accepted_by_position"]),
                f"{1e3 * row['round_s']:.1f} ms",
                f"{row['tokens_per_s']:.1f}",
                plus_minus(row["speedup"]),
                plus_minus(_predicted(row)),
                f"{exact['identical']}/{exact['prompts']}" if exact else "-",
            )
        )
        if row["family"] == "ngram" and row["drafting_share"] is not None:
            notes.append(
                f"{title} proposed in {row['drafting_share']:.0%} of the steps; acceptance is of"
                " those."
            )
        if row["warning"]:
            notes.append(f"{title}: {row['warning']}.")
    notes += _order_lines(result.get("order"))
    head = (
        f"{result['prompts']} prompts in {result['engine']}, {result['dtype']}, each with every"
        " drafter in turn:"
    )
    return "\n".join([head, "", table(cells, header), *notes, "", f"Kept in {run / 'heads'}."])


def _predicted(row: dict[str, Any]) -> dict[str, Any] | None:
    value = row.get("predicted_speedup")
    return None if value is None else {"value": value, "std": row["predicted_std"]}


def _order_lines(order: dict[str, Any] | None) -> list[str]:
    """Whether the drafters came out in the order foretold."""
    if order is None:
        return []
    names = [family_class(family).title for family in order["predicted"]]
    if not order["swapped"]:
        return [f"They came out in the order foretold: {', '.join(names)}."]
    lines = [f"Foretold order: {', '.join(names)}."]
    for swap in order["swapped"]:
        pair = " and ".join(family_class(family).title for family in swap["pair"])
        lines.append(
            f"{pair} came out the other way round, {'inside' if swap['inside'] else 'OUTSIDE'}"
            " their error bars."
        )
    return lines
