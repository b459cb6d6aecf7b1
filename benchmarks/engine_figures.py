"""Predicted against measured speed-up over the cases of one or more load files (`archsearch confirm ... --concurrency`).

python benchmarks/engine_figures.py runs/a/best/2/load-vllm.json runs/b/best/1/load-openvino.json

Prints a line a case and, for each engine, the median absolute error and the share of cases within 10 %: with the tau that was
predicted and, second, with the tau that was counted, which leaves the error of the times alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any


def cases(path: Path) -> list[dict[str, Any]]:
    """The rows of a load file that have a prediction, with engine and draft."""
    data = json.loads(path.read_text(encoding="utf-8"))
    facts = {"engine": f"{data['engine']} {data['engine_version']}", "draft": data["architecture"]}
    return [{**facts, **row} for row in data["rows"] if row["relative_error"] is not None and row["variant"] != "schedule"]


def figures(rows: list[dict[str, Any]], field: str) -> str:
    """Median absolute error, the share within 10 % and the bias of `field`."""
    errors = [row[field] for row in rows]
    within = statistics.fmean(abs(error) <= 0.10 for error in errors)
    median = statistics.median(abs(error) for error in errors)
    return f"median error {median:.1%}, {within:.0%} within 10 %, median signed {statistics.median(errors):+.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    rows = [row for path in parser.parse_args().files for row in cases(path)]
    for row in rows:
        measured, predicted = row["speedup"], row["predicted_speedup"]["value"]
        print(
            f"{row['engine']:18s} {row['draft']:38s} {row['concurrency']} in flight, gamma {row['gamma']}, tau {row['tau']:.2f}: "
            f"measured {measured['value']:.2f} ± {measured['std']:.2f}, predicted {predicted:.2f} "
            f"({row['relative_error']:+.1%}; at measured tau {row['relative_error_at_measured_tau']:+.1%})"
        )
    for engine in dict.fromkeys(row["engine"] for row in rows):
        own = [row for row in rows if row["engine"] == engine]
        print(f"{engine}: {len(own)} cases, {figures(own, 'relative_error')}; at measured tau: "
              f"{figures(own, 'relative_error_at_measured_tau')}")  # fmt: skip


if __name__ == "__main__":
    main()
