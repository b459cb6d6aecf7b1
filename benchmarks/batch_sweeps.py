"""Speed-up over the batch size: published sweeps of vLLM and SGLang against predictions that did
not see their source.

    python benchmarks/batch_sweeps.py
    python benchmarks/batch_sweeps.py --json --output benchmarks/results/2026-11-22-serving

A sweep is one pair, machine and gamma at three or more batch sizes of `data/engine_rounds.csv`.
Speed-ups are tau x plain step / round with the source's own tau; what engines add is fitted to the
other sources (`engine_rounds.fit`). Where a measured sweep falls below 1, the batch size at which
it does is told beside the predicted one, for which the last measured tau is kept.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from archsearch.engine_rounds import round_costs
from archsearch.errors import ArchsearchError
from archsearch.speedup import crossing, levels
from engine_rounds import Predicted, Row, constants_for, fit, passes_of, predict, read_rows

LEAST: Final = 3  # batch sizes of a sweep
FACTOR: Final = 1.5
BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 256, 320, 384, 512)


def sweeps(rows: Sequence[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """Rows of one pair, machine and gamma with a speed-up, by ascending batch size."""
    found: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if row.tau is not None and row.plain_s is not None:
            found[
                row.source, row.klass, row.device, row.ranks, row.target, row.draft, row.gamma
            ].append(row)
    whole = {key: sorted(group, key=lambda row: row.batch) for key, group in found.items()}
    return {
        key: group for key, group in whole.items() if len({row.batch for row in group}) >= LEAST
    }


def told(row: Row, ms: Mapping[str, float]) -> Predicted:
    """A row's prediction by constants `ms`."""
    return predict(
        row,
        passes_of(row, round_costs(row.klass).first_pass_tokens(row.gamma)),
        constants_for(row.klass, ms),
    )


def run() -> dict[str, Any]:
    rows, _ = read_rows()
    priced = []
    for row in rows:
        try:
            priced.append(
                (row, passes_of(row, round_costs(row.klass).first_pass_tokens(row.gamma)))
            )
        except ArchsearchError:
            continue
    groups = sweeps([row for row, _ in priced])
    without = {
        source: {
            name: value
            for name, (value, _) in fit(
                [pair for pair in priced if pair[0].source != source]
            ).items()
        }
        for source in {key[0] for key in groups}
    }
    result = []
    for (source, klass, device, ranks, target, draft, gamma), group in sorted(
        groups.items(), key=str
    ):
        found = [told(row, without[source]) for row in group]
        pairs = [(item.row.batch, item.measured_speedup, item.speedup) for item in found]
        measured = crossing(
            [batch for batch, _, _ in pairs], levels([seen for _, seen, _ in pairs])
        )
        predicted = None
        if measured is not None:
            far = [
                (batch, told(replace(group[-1], batch=batch), without[source]).speedup)
                for batch in BATCHES
            ]
            predicted = crossing([batch for batch, _ in far], levels([gain for _, gain in far]))
        result.append(
            {
                "source": source,
                "class": klass,
                "device": device,
                "ranks": ranks,
                "target": target,
                "draft": draft,
                "gamma": gamma,
                "points": pairs,
                "stops": measured,
                "predicted_stops": predicted,
            }
        )
    errors = [told / seen - 1.0 for item in result for _, seen, told in item["points"]]
    large = [
        told / seen - 1.0 for item in result for batch, seen, told in item["points"] if batch >= 32
    ]
    crossings = [item for item in result if item["stops"] is not None]
    factors = [
        item["predicted_stops"] / item["stops"] if item["predicted_stops"] else math.inf
        for item in crossings
    ]
    return {
        "sweeps": result,
        "points": len(errors),
        "median_error": statistics.median(map(abs, errors)),
        "bias": statistics.median(errors),
        "batch_32_and_more": {
            "points": len(large),
            "median_error": statistics.median(map(abs, large)),
            "bias": statistics.median(large),
        },
        "crossings": len(crossings),
        "crossings_within_factor": sum(1 / FACTOR <= factor <= FACTOR for factor in factors),
    }


def text(result: dict[str, Any]) -> str:
    lines = []
    for item in result["sweeps"]:
        points = "  ".join(
            f"{batch}: {seen:.2f}/{told:.2f}" for batch, seen, told in item["points"]
        )
        stops = ""
        if item["stops"] is not None:
            end = f"{item['predicted_stops']:.0f}" if item["predicted_stops"] else "beyond 512"
            stops = f"; falls to 1 at {item['stops']:.0f}, predicted {end}"
        lines.append(
            f"{item['target']} + {item['draft']} ({item['class']}, {item['device']}), gamma"
            f" {item['gamma']}: {points}{stops}"
        )
    large = result["batch_32_and_more"]
    lines += [
        "",
        "batch: measured/predicted speed-up, sources left out of the fit",
        (
            f"{len(result['sweeps'])} sweeps, {result['points']} points: median error"
            f" {result['median_error']:.1%}, bias {result['bias']:+.1%}; batch 32 and more"
            f" ({large['points']}): {large['median_error']:.1%}, {large['bias']:+.1%}"
        ),
        (
            f"falls to 1 within a factor {FACTOR:g} in {result['crossings_within_factor']} of"
            f" {result['crossings']} sweeps that do"
        ),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--output", type=Path, help="folder for batch_sweeps.json and batch_sweeps.txt"
    )
    options = parser.parse_args()
    result = run()
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "batch_sweeps.json").write_text(
            json.dumps(result, indent=1), encoding="utf-8"
        )
        (options.output / "batch_sweeps.txt").write_text(text(result) + "\n", encoding="utf-8")
    print(json.dumps(result) if options.json else text(result))


if __name__ == "__main__":
    main()
