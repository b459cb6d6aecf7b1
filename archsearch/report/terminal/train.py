"""What `train` prints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from archsearch.drafters.registry import family as family_class
from archsearch.estimate import Estimate
from archsearch.progress import human_time
from archsearch.report.terminal.layout import plus_minus
from archsearch.speedup import DIVERGENCE_RANGE, DIVERGENCE_STD, clamped, logit, logit_std


def _divergence_lines(divergence: dict[str, float] | None, alpha: dict[str, Any]) -> list[str]:
    """What alpha the divergence from the target on held-out text says; a warning where the measured
    one is far from it."""
    if divergence is None:
        return []
    expected, measured = divergence["alpha"], Estimate.from_dict(alpha)
    low, high = DIVERGENCE_RANGE
    if not low <= divergence["nats"] <= high:
        return [
            f"Its divergence from the target there: {divergence['nats']:.2f} nats a token (from "
            f"{low:g} to {high:g} it also says alpha)."
        ]
    text = (
        f"Its divergence from the target there, {divergence['nats']:.2f} nats a token, says alpha"
        f" {expected:.2f}"
    )
    gap = logit(clamped(expected)) - logit(clamped(measured.value))
    if abs(gap) > 2.0 * math.hypot(DIVERGENCE_STD, logit_std(measured)):
        return [f"{text}: far from the measured one. Check the text and the tokenizer."]
    return [f"{text}."]


def train_text(result: dict[str, Any], run: Path, rank: int) -> str:
    """alpha and speed-up before and after, and how long it took."""
    before, after, training = result["before"], result["after"], result["training"]
    kinds = [
        f"{name} {plus_minus(value)}" for name, value in result["alpha_by_category"].items() if name
    ]
    heldout = f"measured on held-out text{'; ' if kinds else ''}{', '.join(kinds)}"
    stopped = f"Ended before its budget: {training.get('stopped')}; more text is what helps now."
    lines = [
        f"Rank {rank}: alpha {plus_minus(before['alpha'], digits=3)} ({before['alpha']['source']})"
        f" -> {plus_minus(after['alpha'], digits=3)} ({heldout}).",
        f"Trained {human_time(training['seconds'])} in all, {training['tokens']:,} tokens at"
        f" {training['tokens_per_s']:,.0f} tokens/s.",
        *_divergence_lines(training.get("divergence"), after["alpha"]),
        *([stopped] if training.get("stopped") else []),
        f"Modeled speed-up {plus_minus(before['speedup'])} -> {plus_minus(after['speedup'])} at"
        f" gamma {after['gamma']}.",
        *([f"Text: {result['text']['words']}"] if result.get("text") else []),
    ]
    return "\n".join([*lines, "", f"Next: archsearch confirm {run} --rank {rank}"])


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
