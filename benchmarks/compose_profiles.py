"""Rebuild the profiles that ship for GPUs nobody here owns, out of the kernel tables of
aiconfigurator-core 0.12.0.

    python benchmarks/compose_profiles.py [DEVICE ...] [--tables DIR] [--output profiles]
    [--held-out] [--json FILE]

Needs `pip install "archsearch[aiconfigurator]"` (or --tables, the package's systems/data folder,
and pyarrow). Without DEVICE: A100-SXM, H100-SXM, H200 and B200. Writes
profiles/<device>/aiconfigurator-<version>-<framework>-<version>/; `--held-out` writes nothing and
prints how well kept rows tell others by plain interpolation: rows chosen from one random half of
the table, errors on the other half.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from archsearch.architecture.ops import Attention, Gemm
from archsearch.errors import ArchsearchError
from archsearch.estimate import Array
from archsearch.hardware.device import load_device
from archsearch.importers.aiconfigurator import import_profile, import_tables
from archsearch.importers.compact import (
    COMPACT_ROWS,
    NOISE,
    Candidates,
    Key,
    compress,
    in_range,
    kernel,
)
from archsearch.latency.regression import nonnegative_fit
from archsearch.profiles import Profile
from archsearch.progress import ProgressLine
from archsearch.records import as_data

SHIPPED = ("a100-sxm4-80gb", "h100-sxm5-80gb", "h200-sxm-141gb", "b200-sxm")


def tables(profile: Profile) -> dict[str, dict[Key, float]]:
    """The rows of a complete profile by kind of the compact one."""
    found: dict[str, dict[Key, float]] = {kind: {} for kind in COMPACT_ROWS}
    for row in profile.rows.values():
        if row.kind == "gemm":
            found["gemm"][Gemm(**row.sizes()), row.mode] = row.median_s
        elif row.kind == "attention":
            op = Attention(**row.sizes())
            found["decode" if op.tokens == 1 else "context"][op, row.mode] = row.median_s
    return found


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of predicted rows: the median, and the 90th percentile."""

    rows: int
    median_error: float
    p90_error: float


def errors(known: Mapping[Key, float], asked: Mapping[Key, float]) -> dict[str, Errors]:
    """Relative errors of `predict` from `known` on `asked`, by group; {} for nothing asked."""
    if not asked:
        return {}
    error = np.abs(
        predict(Candidates.of(known), Candidates.of(asked)) / np.array(list(asked.values())) - 1.0
    )
    groups = {"all": np.ones(len(asked), dtype=bool)}
    ops = [op for op, _ in asked]
    if isinstance(ops[0], Gemm):
        small = np.array([isinstance(op, Gemm) and op.m <= 32 for op in ops])
        large = np.array([isinstance(op, Gemm) and op.weight_elements() > 4e6 for op in ops])
        groups = {"m up to 32, over 4M weights": small & large, "m up to 32": small} | groups
    return {
        name: Errors(
            int(mask.sum()),
            round(float(np.median(error[mask])), 4),
            round(float(np.quantile(error[mask], 0.9)), 4),
        )
        for name, mask in groups.items()
        if mask.any()
    }


def predict(known: Candidates, asked: Candidates) -> Array:
    """Seconds of the rows in `asked`, interpolated from `known`. [len(asked)]."""
    coefficients = nonnegative_fit(known.features, known.times_s)
    target = np.log(known.times_s / (known.features @ coefficients))
    level = float(np.mean(target))
    covariance = kernel(known.inputs, known.inputs) + NOISE * np.eye(len(target))
    weights = np.linalg.solve(covariance, target - level)
    logs = np.concatenate(
        [
            kernel(part, known.inputs) @ weights
            for part in np.array_split(asked.inputs, max(1, len(asked.inputs) // 2000))
        ]
    )
    result: Array = asked.features @ coefficients * np.exp(level + logs)
    return result


def held_out(device: str, data: Path | None, seed: int) -> dict[str, Any]:
    """Errors on the half of the rows in range that the choice never saw."""
    complete = import_tables(load_device(device), data=data, compact=False)
    result = {}
    for kind, times in tables(complete).items():
        keys = [key for key in times if in_range(key[0])]
        random.Random(seed).shuffle(keys)
        seen, unseen = keys[: len(keys) // 2], keys[len(keys) // 2 :]
        kept = compress({key: times[key] for key in seen}, COMPACT_ROWS[kind])
        found = errors(kept, {key: times[key] for key in unseen})
        result[kind] = {group: as_data(error) for group, error in found.items()}
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "devices", nargs="*", metavar="DEVICE", help=f"default: {' '.join(SHIPPED)}"
    )
    parser.add_argument(
        "--tables", type=Path, help="folder systems/data; default: the installed package"
    )
    parser.add_argument("--output", type=Path, default=Path("profiles"))
    parser.add_argument(
        "--held-out", action="store_true", help="print errors on unseen rows; write nothing"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random halves of --held-out")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    try:
        for name in args.devices or SHIPPED:
            device = load_device(name)
            if args.held_out:
                figures[device.key] = held_out(name, args.tables, args.seed)
            else:
                with ProgressLine(device.key) as progress:
                    dtypes = (
                        ("bfloat16", "float8_e4m3fn")
                        if "float8_e4m3fn" in device.flops_per_s
                        else ("bfloat16",)
                    )
                    profile = import_profile(
                        name, data=args.tables, dtypes=dtypes, root=args.output, progress=progress
                    )
                folder = profile.folder or args.output
                size = sum(path.stat().st_size for path in folder.iterdir())
                print(f"{device.key}: {len(profile.rows)} rows, {size / 1e3:.0f} kB in {folder}")
            for kind, groups in figures.get(device.key, {}).items():
                for group, error in groups.items():
                    print(
                        f"  {kind:8s} {group:28s} {error['rows']:6d} rows  median"
                        f" {100 * error['median_error']:4.1f} %  90th percentile"
                        f" {100 * error['p90_error']:4.1f} %",
                        flush=True,
                    )
    except ArchsearchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
