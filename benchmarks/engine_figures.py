"""Predicted against measured speed-up over the cases of one or more load files (`archsearch confirm
... --concurrency`).

python benchmarks/engine_figures.py runs/a/best/2/load-vllm.json runs/b/best/1/load-openvino.json
python benchmarks/engine_figures.py --again benchmarks/results/2026-11-21-engines/load-*.json

Prints a line a case and, for each engine, the median absolute error and the share of cases within
10 %: with the tau that was predicted and, second, with the tau that was counted, which leaves the
error of the times alone.

--again: the times are predicted anew by today's latency model, from the engines' rows as committed
(`ROWS`): no engine is needed, and a change of the model shows in the figures.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from archsearch.architecture import catalogue
from archsearch.architecture.architecture import Architecture
from archsearch.latency.model import LatencyModel
from archsearch.profiles import Measurement, Profile
from archsearch.workload import Workload

RESULTS: Final = Path(__file__).parent / "results"
ROWS: Final = RESULTS / "2026-11-21-engines" / "engine-rows.jsonl"
REST: Final = RESULTS / "2026-11-21-epyc-2c"
"""A profile of the same processor: a model is fitted to its passes too, though an engine's own rows
answer all that is asked."""
TARGET: Final = "smollm2-135m"
LABEL: Final = re.compile(r"(\d+)x(\d+) ffn(\d+) (\d+)h/(\d+)kv(\d+) head(\d+)$")


@dataclass(frozen=True)
class Case:
    """One case of a load file. `predicted`, `at_measured_tau`: the speed-up as it was predicted,
    and as it would have been with the tau that was counted."""

    engine: str
    draft: str
    context: int
    concurrency: int
    gamma: int
    tau: float
    predicted_tau: float
    measured: float
    measured_std: float
    predicted: float
    at_measured_tau: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1.0

    @property
    def error_at_measured_tau(self) -> float:
        return self.at_measured_tau / self.measured - 1.0


def cases(path: Path) -> list[Case]:
    """The rows of a load file that have a prediction, and what was measured."""
    data = json.loads(path.read_text(encoding="utf-8"))
    rows = [
        row
        for row in data["rows"]
        if row["relative_error"] is not None and row["variant"] != "schedule"
    ]
    return [
        Case(
            engine=f"{data['engine']} {data['engine_version']}",
            draft=data["architecture"],
            context=data["context"],
            concurrency=row["concurrency"],
            gamma=row["gamma"],
            tau=row["tau"],
            predicted_tau=row["error_by_term"]["tau"]["predicted"],
            measured=row["speedup"]["value"],
            measured_std=row["speedup"]["std"],
            predicted=row["predicted_speedup"]["value"],
            at_measured_tau=row["speedup"]["value"] * (1.0 + row["relative_error_at_measured_tau"]),
        )
        for row in rows
    ]


def shape(label: str, vocab_size: int) -> Architecture:
    """The draft of `Architecture.label`."""
    found = LABEL.match(label)
    if found is None:
        raise SystemExit(f"no shape in {label!r}")
    layers, hidden, ffn, heads, kv_heads, head_dim, rows = map(int, found.groups())
    return Architecture(hidden, ffn, layers, heads, kv_heads, head_dim, vocab_size, rows)


@cache
def model(engine: str, dtype: str) -> LatencyModel:
    """Today's model of the committed rows."""
    profile = Profile.load(REST)
    lines = ROWS.read_text(encoding="utf-8").splitlines()
    profile.add(Measurement.from_dict(json.loads(line)) for line in lines)
    return LatencyModel(profile, dtype, "eager", engine)


def step_by_round(case: Case, dtype: str = "bfloat16") -> float:
    """Seconds of a plain step over those of a round, by today's model: a speed-up is tau times
    it."""
    latency, target = model(case.engine.split()[0], dtype), catalogue.load(TARGET).architecture
    workload = Workload(case.concurrency, case.context, dtype=dtype, mode="eager")
    draft = shape(case.draft, target.vocab_size)
    round_s = latency.round(target, draft, workload, case.gamma).round_s.value
    return latency.decode_s(target, workload).value / round_s


def again(case: Case) -> tuple[float, float]:
    """Relative errors of the speed-up by today's model: with the tau that was predicted, and with
    the one that was counted."""
    share = step_by_round(case)
    return case.predicted_tau * share / case.measured - 1.0, case.tau * share / case.measured - 1.0


def figures(errors: Sequence[float]) -> str:
    """Median absolute error, the share within 10 % and the bias."""
    within = statistics.fmean(abs(error) <= 0.10 for error in errors)
    median = statistics.median(abs(error) for error in errors)
    return (
        f"median error {median:.1%}, {within:.0%} within 10 %, median signed"
        f" {statistics.median(errors):+.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument(
        "--again", action="store_true", help="predict the times anew from the committed rows"
    )
    arguments = parser.parse_args()
    found = [case for path in arguments.files for case in cases(path)]
    today = {case: again(case) for case in found if arguments.again}
    for case in found:
        now = "; today {:+.1%}, at measured tau {:+.1%}".format(*today[case]) if today else ""
        print(
            f"{case.engine:18s} {case.draft:38s} {case.concurrency} in flight, gamma {case.gamma},"
            f" tau {case.tau:.2f}: measured {case.measured:.2f} ± {case.measured_std:.2f},"
            f" predicted {case.predicted:.2f} ({case.error:+.1%}; at measured tau"
            f" {case.error_at_measured_tau:+.1%}{now})"
        )
    for engine in dict.fromkeys(case.engine for case in found):
        own = [case for case in found if case.engine == engine]
        lines = {
            "": [case.error for case in own],
            "at measured tau: ": [case.error_at_measured_tau for case in own],
        }
        if today:
            lines |= {
                "today: ": [today[case][0] for case in own],
                "today at measured tau: ": [today[case][1] for case in own],
            }
        print(
            f"{engine}: {len(own)} cases, "
            + "; ".join(f"{name}{figures(errors)}" for name, errors in lines.items())
        )


if __name__ == "__main__":
    main()
