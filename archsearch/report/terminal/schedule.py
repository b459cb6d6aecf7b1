"""What `schedule` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from archsearch.report.terminal.layout import plus_minus, table


def schedule_text(result: dict[str, Any], run: Path, rank: int) -> str:
    """What `schedule` prints."""
    rows = []
    for point in result["points"]:
        best = max(point["by_gamma"].values(), key=lambda value: float(value["value"]))
        rows.append(
            (
                str(point["batch_size"]),
                str(point["gamma"]) if point["gamma"] else "off",
                f"{point['tau']['value']:.2f}",
                plus_minus(point["speedup"] if point["gamma"] else best),
            )
        )
    ranges = ", ".join(
        f"{first}-{last}: {gamma or 'off'}" for first, last, gamma in result["ranges"]
    )
    return "\n".join(
        [
            f"Draft {result['architecture']}, {result['engine']}. Latencies: {result['latency']}.",
            "",
            table(rows, ("batch size", "gamma", "tau", "speed-up, predicted")),
            "",
            f"Gamma by batch size: {ranges}. {result['note']}".rstrip(),
            f"{result['as_engine']}.",
            *([f"WARNING: {result['warning']}."] if result.get("warning") else []),
            "",
            f"Next: archsearch confirm {run} --rank {rank} --engine vllm --schedule"
            if result.get("rank") is not None
            else f"Next: archsearch export {run} --family {result['family']} --output DIR",
        ]
    )
