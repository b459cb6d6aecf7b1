"""What `train` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from archsearch.progress import human_time
from archsearch.report.terminal.layout import plus_minus


def train_text(result: dict[str, Any], run: Path, rank: int) -> str:
    """alpha and speed-up before and after, and how long it took."""
    before, after, training = result["before"], result["after"], result["training"]
    categories = ", ".join(f"{name} {plus_minus(value)}" for name, value in result["alpha_by_category"].items() if name)
    return "\n".join(
        [
            f"Rank {rank}: alpha {plus_minus(before['alpha'], digits=3)} ({before['alpha']['source']}) -> "
            f"{plus_minus(after['alpha'], digits=3)} "
            f"(measured on held-out text{'; ' + categories if categories else ''}).",
            f"Trained {human_time(training['seconds'])} in all, {training['tokens']:,} tokens at "
            f"{training['tokens_per_s']:,.0f} tokens/s.",
            *(
                [f"Ended before its budget: {training['stopped']}; more text is what helps now."]
                if training.get("stopped")
                else []
            ),
            f"Modeled speed-up {plus_minus(before['speedup'])} -> {plus_minus(after['speedup'])} at gamma {after['gamma']}.",
            *([f"Text: {result['text']['words']}"] if result.get("text") else []),
            "",
            f"Next: archsearch confirm {run} --rank {rank}",
        ]
    )
