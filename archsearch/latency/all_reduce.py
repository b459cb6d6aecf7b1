"""The time of an all-reduce over the ranks of a GPU profile: from its rows, a shipped table, or the
speed of the link.

A machine with one GPU measures none, and one with two says nothing of eight. What takes their
place, the surest first:

1. rows of as many ranks: straight lines between them in log elements;
2. the table that ships of a device with the same link between GPUs, of as many ranks. Where the
   profile has rows of another rank count, it is scaled by how they compare with the table's there;
3. rows of another rank count, by what a ring moves: 2 (r - 1) / r of the numbers per rank;
4. bytes over the link's datasheet speed, and a constant.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from archsearch.architecture.ops import AllReduce
from archsearch.errors import MissingDataError
from archsearch.estimate import Array, N
from archsearch.files import read_json
from archsearch.latency.constants import constants
from archsearch.latency.datasheet import LINK_LATENCY_S
from archsearch.paths import data_dir
from archsearch.profiles import Measurement
from archsearch.workload import DTYPE_BYTES

Answer = tuple[float, float]
"""seconds, relative std"""

RANKS_STD: Final = 0.25
LIKE_STD: Final[float] = constants()["graph"]["same_link_relative_std"]
LINK_STD: Final = 0.40
PCIE_BYTES_PER_S: Final = 16e9  # no link known: PCIe 4 x8
SAME_LINK: Final = 0.1  # relative difference of the datasheets' speeds
TABLE_DTYPES: Final = ("bfloat16", "float16")  # a sum of 16-bit numbers takes what another takes


@dataclass(frozen=True)
class ReduceTable:
    """All-reduce times of one device, dtype and mode: log elements and log seconds in rising order,
    by rank count."""

    lines: Mapping[int, tuple[Array, Array]]

    @classmethod
    def of(cls, rows: Iterable[Measurement]) -> ReduceTable:
        """From all-reduce rows."""
        by_ranks: dict[int, list[tuple[float, float]]] = {}
        for row in rows:
            sizes, seconds = row.sizes(), math.log(row.median_s)
            by_ranks.setdefault(sizes["ranks"], []).append((math.log(sizes["elements"]), seconds))
        columns = {ranks: np.array(sorted(found)).T for ranks, found in by_ranks.items()}
        return cls({ranks: (both[0], both[1]) for ranks, both in columns.items()})

    def seconds(self, ranks: int, elements: N) -> N:
        """On straight lines between the rows of that rank count; beyond the largest in proportion
        to the elements (a number or an array)."""
        sizes, times = self.lines[ranks]
        asked = np.log(np.maximum(1, elements))
        found: N = np.exp(np.interp(asked, sizes, times) + np.maximum(0.0, asked - sizes[-1]))
        return found

    def nearest(self, ranks: int) -> int:
        """The rank count with rows that is nearest to `ranks`, the smaller of two."""
        return min(self.lines, key=lambda known: (abs(math.log(known / ranks)), known))


class AllReduces:
    """All-reduces of one profile in one dtype and mode. `row_std`: relative std of one of its
    rows."""

    def __init__(
        self,
        rows: Sequence[Measurement],
        device: Mapping[str, Any],
        dtype: str,
        mode: str,
        row_std: float,
    ) -> None:
        self._own = ReduceTable.of(rows)
        self._device, self._dtype, self._mode = device, dtype, mode
        self._link = float(device.get("link_bytes_per_s") or 0.0)
        # archsearch measures NCCL; for small messages serving engines have kernels of their own
        ours = any(row.kernel == "NCCL" for row in rows)
        self._row_std = max(row_std, LIKE_STD) if ours else row_std

    def measured(self, ranks: int) -> bool:
        """Whether there are rows of that rank count."""
        return ranks in self._own.lines

    def __call__(self, op: AllReduce) -> Answer:
        """Seconds and relative std. Raises MissingDataError on a CPU, of which a pass is never
        split."""
        if self._device.get("kind") != "gpu":
            raise MissingDataError(
                "the profile has no all_reduce rows: tensor parallelism needs a GPU profile"
            )
        if self.measured(op.ranks):
            return self._own.seconds(op.ranks, op.elements), self._row_std
        known = self._own.nearest(op.ranks) if self._own.lines else None
        table, std = self._like(), math.hypot(self._row_std, RANKS_STD)
        if table is not None and op.ranks in table.lines:
            seconds = table.seconds(op.ranks, op.elements)
            if known is None or known not in table.lines:
                return seconds, LIKE_STD
            # the profile's own rows say how much slower this machine is than the table's
            scale = self._own.seconds(known, op.elements) / table.seconds(known, op.elements)
            return seconds * scale, std
        if known is not None:
            # a ring moves 2 (r - 1) / r of the numbers
            moved = ((op.ranks - 1) / op.ranks) / ((known - 1) / known)
            return self._own.seconds(known, op.elements) * moved, std
        moved_bytes = 2 * (op.ranks - 1) / op.ranks * op.elements * DTYPE_BYTES[self._dtype]
        return moved_bytes / (self._link or PCIE_BYTES_PER_S) + LINK_LATENCY_S, LINK_STD

    def _like(self) -> ReduceTable | None:
        """The shipped table used instead, in this mode; None where no device of this link ships,
        or the numbers are wider.

        A link that the datasheet leaves open (bridges between two PCIe cards) is like no other.
        """
        known = self._link > 0 and "link_bytes_per_s" not in (self._device.get("unverified") or ())
        if not known or DTYPE_BYTES[self._dtype] != DTYPE_BYTES[TABLE_DTYPES[0]]:
            return None
        key, vendor = (str(self._device.get(name)) for name in ("key", "vendor"))
        return shipped_table(key, vendor, self._link, self._mode)


@cache
def shipped_table(
    device_key: str, vendor: str, link_bytes_per_s: float, mode: str
) -> ReduceTable | None:
    """All-reduces of the shipped profile of this device, else of the vendor's first with as fast a
    link; None without one."""
    found: list[tuple[bool, float, Path]] = []
    for header in sorted(data_dir("profiles").glob("*/*/profile.json")):
        data = read_json(header, "profile")
        device = data["device"]
        if "package" not in (data.get("provenance") or {}) or device.get("vendor") != vendor:
            continue
        off = abs(float(device.get("link_bytes_per_s") or 0.0) / link_bytes_per_s - 1.0)
        if off <= SAME_LINK:
            found.append((device["key"] != device_key, off, header.parent))
    tables = (_read_table(folder / "rows.jsonl", mode) for *_, folder in sorted(found))
    return next((table for table in tables if table.lines), None)


def _read_table(path: Path, mode: str) -> ReduceTable:
    """The all-reduce rows of one file; the thousands of others are not parsed."""
    lines = path.read_text(encoding="utf-8").splitlines()
    ours = (json.loads(line) for line in lines if '"all_reduce"' in line)
    rows = map(Measurement.from_dict, ours)
    return ReduceTable.of(row for row in rows if row.mode == mode and row.dtype in TABLE_DTYPES)
