"""What `archsearch recipe` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from archsearch.report.terminal.layout import plus_minus, table


def recipe_text(made: Mapping[str, Any]) -> str:
    """The recipe's stages, and how it is run."""
    version = f" {made['version']}" if made["version"] else ""
    rows = [
        (
            f"{stage['tokens']:,.0f}",
            f"{stage['gpu_hours']:.1f}",
            "not known" if stage["alpha"] is None else plus_minus(stage["alpha"]),
        )
        for stage in made["stages"]
    ]
    first = "train.sh" if made["library"] == "archsearch" else "environments.sh"
    lines = [
        f"Recipe for rank {made['rank']} of {made['run']} with {made['library']}{version}:"
        f" {made['output']}",
        f"{made['family']}: {made['drafter']}, gamma {made['gamma']}; target {made['target']}.",
        f"About {made['hours']:.1f} hours on these GPUs.",
        "",
        table(rows, "tokens | GPU-hours | alpha"),
        "",
        f"Next: read {made['output']}/README.md, then bash {made['output']}/{first}",
    ]
    return "\n".join(lines)
