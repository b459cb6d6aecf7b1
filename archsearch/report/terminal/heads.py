"""What `train --family` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from archsearch.drafters.registry import family as family_class
from archsearch.progress import human_time
from archsearch.report.terminal.layout import plus_minus


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
