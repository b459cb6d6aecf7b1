"""What `estimate` prints."""

from __future__ import annotations

from typing import Any

from archsearch.report.terminal.layout import plus_minus, table


def estimate_text(result: dict[str, Any]) -> str:
    rows = []
    for entry in result["drafts"]:
        rows.append(
            (
                entry["draft"],
                f"{entry['parameters'] / 1e6:,.0f}M",
                str(entry["gamma"]),
                plus_minus(entry["alpha"]),
                plus_minus(entry["tau"]),
                plus_minus(entry["draft_s"], 1e3),
                plus_minus(entry["verify_s"], 1e3),
                plus_minus(entry["break_even_alpha"]),
                plus_minus(entry["speedup"]),
                "yes" if entry["pays"] else "no",
                str(entry["group"]),
            )
        )
    workload = result["workload"]
    first = result["drafts"][0]
    lines = [
        f"Target {result['target']} on {result['device']}, {workload['dtype']}, {workload['mode']} mode, "
        f"batch size {workload['batch_size']}, context {workload['context_len']}, tensor parallel {workload['tensor_parallel']}.",
        f"Latency: {result['latency']}.",
        "Acceptance: " + ("given" if result["prior"] == "given" else f"the prior ({result['prior']})") + ". "
        f"Target decode step {1e3 * first['decode_s']['value']:.2f} ms.",
        "",
        table(
            rows,
            (
                "draft",
                "parameters",
                "gamma",
                "alpha",
                "tau",
                "draft ms",
                "verify ms",
                "break-even alpha",
                "speed-up",
                "pays",
                "group",
            ),
        ),
    ]
    lines += [f"Note: {entry['draft']}: {note}" for entry in result["drafts"] for note in entry["notes"]]
    lines += [
        "",
        "Drafts of one group cannot be told apart by these error bars. draft ms: all gamma tokens of a round.",
        "Next: measure alpha with your own text (archsearch search --confirm 1), or give it with --alpha.",
    ]
    return "\n".join(lines)
