"""What `schedule` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from archsearch.report.terminal.layout import plus_minus, table


def schedule_text(result: dict[str, Any], run: Path, rank: int) -> str:
    """What `schedule` prints."""
    adaptive = result.get("adaptive")
    beside = adaptive["points"] if adaptive else []
    rows: list[tuple[str, ...]] = [
        (
            str(point["batch_size"]),
            str(point["gamma"] or "off"),
            f"{point['tau']['value']:.2f}",
            plus_minus(
                point["speedup"]
                if point["gamma"]
                else max(point["by_gamma"].values(), key=lambda value: float(value["value"]))
            ),
        )
        for point in result["points"]
    ]
    heads = "batch size | gamma | tau | speed-up, predicted"
    if adaptive:
        rows = [(*row, plus_minus(each["speedup"])) for row, each in zip(rows, beside, strict=True)]
        heads += f" | adaptive, gamma {adaptive['gamma']}"
    spans = (f"{first}-{last}: {gamma or 'off'}" for first, last, gamma in result["ranges"])
    confirm = f"confirm {run} --rank {rank} --engine vllm --schedule"
    export = f"export {run} --family {result.get('family')} --output DIR"
    lines = [
        f"Draft {result['architecture']}, {result['engine']}. Latencies: {result['latency']}.",
        "",
        table(rows, heads),
        "",
        f"Gamma by batch size: {', '.join(spans)}. {result['note']}".rstrip(),
        f"{result['as_engine']}.",
        *([f"{adaptive['words']}."] if adaptive else []),
        *([f"WARNING: {result['warning']}."] if result.get("warning") else []),
        "",
        f"Next: archsearch {export if result.get('rank') is None else confirm}",
    ]
    return "\n".join(lines)
