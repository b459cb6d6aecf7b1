"""What `confirm` under load prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from archsearch.progress import human_time
from archsearch.report.terminal.layout import plus_minus, table


def load_text(result: dict[str, Any], run: Path, rank: int) -> str:
    """What `confirm` under load says."""
    rows = []
    for row in result["rows"]:
        predicted, error = row["predicted_speedup"], row["relative_error"]
        rows.append(
            (
                str(row["concurrency"]),
                row["variant"],
                f"{row['tau']:.2f}",
                f"{row['baseline_tokens_per_s']:.1f}",
                f"{row['tokens_per_s']:.1f}",
                plus_minus(row["speedup"]),
                plus_minus(predicted) if row["gamma"] else "off",
                "" if error is None else f"{100 * error:+.1f}",
                _biggest_share(row["error_by_term"]),
            )
        )
    how = "synthetic acceptance at the predicted rates" if result["synthetic"] else "real drafts"
    header = (
        "in flight", "variant", "tau", "alone tok/s", "with draft", "speed-up", "predicted", "error %", "error by term, %"
    )  # fmt: skip
    lines = [
        f"{result['engine']} {result['engine_version']}, {result['dtype']}, {how}, draft {result['architecture']}, "
        f"{result['repeats']} interleaved repeats, {human_time(result['seconds'])}.",
        f"Predicted from {result['latency']}.",
        "",
        table(rows, header),
        "",
    ]
    summary = result["summary"]
    if summary["cases"]:
        lines.append(
            f"Predicted against measured: {summary['cases']} {'case' if summary['cases'] == 1 else 'cases'}, median error "
            f"{summary['median_absolute_error']:.1%}, {summary['within_10_percent']:.0%} within 10 %."
        )
    if "schedule" in result:
        lines.append(f"Schedule (first batch size, last, gamma): {', '.join(map(str, result['schedule']['ranges']))}.")
        for row in result["schedule"]["verdict"]:
            verdict = f"not shown to be worse (it may lose up to {row['margin']:.2f}x unseen)" if row["holds"] else "WORSE"
            other = "always off" if row["best_other"] == "off" else f"fixed {row['best_other']}"
            lines.append(
                f"  {row['concurrency']} in flight: schedule {plus_minus(row['speedup'])} (gamma {row['gamma']}), best other "
                f"{plus_minus(row['best_other_speedup'])} ({other}): {verdict}."
            )
        overall = sorted(result["schedule"]["overall"].items(), key=lambda item: -item[1])
        lines.append(f"Over these loads (geometric mean): {', '.join(f'{name} {value:.2f}' for name, value in overall)}.")
    if result.get("slowdown") is not None:
        lines.append(
            f"The machine ran {result['slowdown']:.2f} times slower than the profile's reference; that is taken out of the terms."
        )
    if result["synthetic"]:
        lines.append("The text is not the target's: times are real, acceptance is what was predicted.")
        lines += ["", f"Next: archsearch train {run} --rank {rank} --budget 30m"]
    else:
        lines += ["", f"Next: archsearch export {run} --rank {rank} --output my-draft"]
    return "\n".join(lines)


def _biggest_share(terms: dict[str, Any] | None) -> str:
    """The terms that bring at least a percent of the error, largest first: `draft +3.1, verify -1.2`."""
    if terms is None:
        return ""
    names = {"tau": "tau", "decode_s": "decode", "draft_s": "draft", "verify_s": "verify", "overhead_s": "overhead"}
    shares = sorted(((abs(value["log_error"]), name) for name, value in terms.items()), reverse=True)
    return ", ".join(f"{names[name]} {100 * terms[name]['log_error']:+.1f}" for size, name in shares if size >= 0.01)
