"""What `confirm` by prompt prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from archsearch.progress import human_time
from archsearch.report.phrases import unprofiled_words
from archsearch.report.terminal.layout import plus_minus, table


def confirm_text(result: dict[str, Any], run: Path, rank: int) -> str:
    """What `confirm` prints."""
    rows = []
    for row in sorted([result, *result["other_gammas"]], key=lambda row: row["gamma"]):
        rows.append(
            (
                str(row["gamma"]),
                plus_minus(row["alpha"], digits=3),
                plus_minus(row["tau"]),
                f"{row['baseline_tokens_per_s']:.1f}",
                f"{row['tokens_per_s']:.1f}",
                plus_minus(row["speedup"]),
                f"{row['speedup_pooled']:.2f}",
                f"{row['predicted_speedup']:.2f}",
                f"{100 * row['relative_error']:+.1f}",
                f"{100 * row['relative_error_at_measured_tau']:+.1f}",
                f"{1e3 * row['round_s']:.1f}",
                f"{1e3 * row['predicted_round_s']:.1f}",
            )
        )
    same, exact = result["identical_output"], result["identical_output_float32"]
    remarks = []
    if result.get("slowdown") is not None:
        slower = f"{result['slowdown']:.2f} times slower than the profile's reference"
        remarks.append(
            f"The machine ran {slower}, which predicted times are for; a speed-up does not feel it."
        )
    if unprofiled_words(result):
        remarks.append(f"WARNING: {unprofiled_words(result)}")
    if result.get("identical_output_unchecked"):
        remarks.append(
            f"WARNING: identity in float32 was not checked: {result['identical_output_unchecked']}"
        )
    doubtful = [row for row in [result, *result["other_gammas"]] if row["undecided"]]
    remarks += [
        f"NOT DECIDED at gamma {row['gamma']}: {row['undecided']}. Confirm again with nothing else"
        " running."
        for row in doubtful
    ]
    remarks += [result["kept_earlier"]] if result.get("kept_earlier") else []
    lines = [
        (
            f"{result['engine']} {result['engine_version']}, {result['dtype']}, {result['prompts']}"
            f" held-out prompts, draft {result['architecture']}, {human_time(result['seconds'])}."
        ),
        "",
        table(
            rows,
            (
                "gamma",
                "alpha",
                "tau",
                "alone tok/s",
                "with draft",
                "speed-up",
                "pooled",
                "predicted",
                "error %",
                "error % at measured tau",
                "round ms",
                "predicted",
            ),
        ),
        "",
        *remarks,
        f"Same output as the target alone: {same['identical']} of {same['prompts']} in"
        f" {result['dtype']}"
        + (
            " (largest gap of the two logits where they part:"
            f" {max(abs(d['logit_gap'] or 0) for d in same['differences']):.3f})"
            if same["differences"]
            else ""
        )
        + (
            f", {exact['identical']} of {exact['prompts']} in float32."
            if exact and result["dtype"] != "float32"
            else "."
        ),
        "",
        _next_of_confirm(result, run, rank),
    ]
    return "\n".join(lines)


def _next_of_confirm(result: dict[str, Any], run: Path, rank: int) -> str:
    """What to do after a confirmation: it pays only where its whole interval lies above 1."""
    if result["undecided"]:
        again = (
            f"archsearch confirm {run} --rank {rank} --gamma {result['gamma']} --engine"
            f" {result['engine']}"
        )
        return f"Next, with nothing else running: {again}"
    if result["speedup_interval"][0] > 1:
        return f"Next: archsearch export {run} --rank {rank} --output my-draft"
    answer = (
        "Speculation does not pay here"
        if result["speedup_interval"][1] < 1
        else "Too close to call: 1x lies within the error"
    )
    return f"{answer}. More training may help: archsearch train {run} --rank {rank} --budget 30m"
