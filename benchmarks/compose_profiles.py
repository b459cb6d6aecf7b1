"""Rebuild the profiles that ship for GPUs nobody here owns, out of the kernel tables of
aiconfigurator-core 0.12.0.

    python benchmarks/compose_profiles.py [DEVICE ...] [--tables DIR] [--output profiles]
    [--held-out] [--json FILE]

Needs `pip install "archsearch[aiconfigurator]"` (or --tables, the package's systems/data folder,
and pyarrow). Without DEVICE: A100-SXM, H100-SXM, H200 and B200. Writes
profiles/<device>/aiconfigurator-<version>-<framework>-<version>/ and prints how well the kept rows
tell the rest of the table by plain interpolation. That choice looked at the rows it is judged on;
`--held-out` writes nothing and prints the honest figure instead: rows chosen from one random half
of the table, errors on the other half.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from archsearch.errors import ArchsearchError
from archsearch.hardware.device import load_device
from archsearch.importers.aiconfigurator import import_profile, import_tables
from archsearch.importers.compact import COMPACT_ROWS, Key, compress, errors, in_range
from archsearch.profiles import Profile
from archsearch.progress import ProgressLine
from archsearch.records import as_data

SHIPPED = ("a100-sxm4-80gb", "h100-sxm5-80gb", "h200-sxm-141gb", "b200-sxm")


def tables(profile: Profile) -> dict[str, dict[Key, float]]:
    """The rows of a complete profile by kind of the compact one."""
    from archsearch.architecture.ops import Attention, Gemm

    found: dict[str, dict[Key, float]] = {kind: {} for kind in COMPACT_ROWS}
    for row in profile.rows.values():
        if row.kind == "gemm":
            found["gemm"][Gemm(**row.sizes()), row.mode] = row.median_s
        elif row.kind == "attention":
            op = Attention(**row.sizes())
            found["decode" if op.tokens == 1 else "context"][op, row.mode] = row.median_s
    return found


def held_out(device: str, data: Path | None, seed: int) -> dict[str, Any]:
    """Errors on the half of the rows in range that the choice never saw."""
    complete = import_tables(load_device(device), data=data, compact=False)
    result = {}
    for kind, times in tables(complete).items():
        keys = [key for key in times if in_range(key[0])]
        random.Random(seed).shuffle(keys)
        seen, unseen = keys[: len(keys) // 2], keys[len(keys) // 2 :]
        kept, _ = compress(kind, {key: times[key] for key in seen})
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
                told = held_out(name, args.tables, args.seed)
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
                told = profile.provenance["told_from_kept_rows"]
            figures[device.key] = told
            for kind, groups in told.items():
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
