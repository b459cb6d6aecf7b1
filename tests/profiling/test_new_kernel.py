"""A new kernel is one module and one row of OP_KINDS: measured, stored, read, fitted and priced
without another change."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.op_kinds import OP_KINDS, OpKind
from archsearch.hardware.device import load_device
from archsearch.latency.ops import OpModel
from archsearch.latency.roofline import RooflineLatency
from archsearch.profiles import Measurement
from archsearch.profiling.cpu_sweep import CpuBench, sweep
from archsearch.profiling.points import Point
from archsearch.profiling.timer import WeightPool
from tests.doubles.world import write_profile

# -- the module of the kernel: a prefix sum along rows
# ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scan:
    rows: int
    columns: int
    kind = "scan"


def scan(op: Scan, pool: WeightPool, working_set_bytes: int):  # noqa: ANN201
    (x,) = pool.matrices(op.rows, op.columns, 1)
    return lambda: x.cumsum(dim=-1)


# -- and its row
# --------------------------------------------------------------------------------------------------

ROW = OpKind(
    Scan,
    base=lambda op: [1.0, float(op.rows * op.columns)],
    place=lambda op: [math.log(op.rows), math.log(op.columns)],
    elements=lambda op: 2 * op.rows * op.columns,
    flops=lambda op: op.rows * op.columns,
    kernel=f"{__name__}:scan",
)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OP_KINDS, "scan", ROW)


def test_a_new_kernel_needs_one_file_and_one_row(registered: None) -> None:
    drafts = [
        Architecture(32 * i, 128 * i, 1 + i % 3, i, i // 2 if i % 2 == 0 else i, 32, 512)
        for i in range(2, 14)
    ]
    profile = write_profile(None, drafts, None)
    bench = CpuBench(profile, 8 << 20)
    points = [
        Point("scan", "warm", Scan(rows, columns))
        for rows in (64, 256, 1024)
        for columns in (128, 512, 2048)
    ]
    assert sweep(bench, {"float32": points}, budget_s=60.0) == len(points)
    rows = profile.select("scan", "float32", "eager")
    assert [Measurement.from_dict(row.to_dict()).sizes() for row in rows][0] == {
        "rows": 64,
        "columns": 128,
    }
    model = OpModel(profile, "float32", "eager")
    seconds, std = model.op_s(Scan(512, 1024), False)
    times = [row.median_s for row in rows]
    assert min(times) < seconds < max(times) and std > 0  # another size, among those measured
    assert model.op_s(Scan(1024, 2048), False)[0] > 4 * model.op_s(Scan(64, 256), False)[0]
    assert (
        RooflineLatency(load_device("a100"), "float32", "eager").op_s(Scan(1 << 14, 1 << 14)) > 1e-3
    )


def test_an_unknown_kernel_is_refused() -> None:
    row = {
        "kind": "scan",
        "shape": {"rows": 1},
        "dtype": "float32",
        "mode": "eager",
        "cache": "warm",
        "times_s": [1.0],
    }
    with pytest.raises(ValueError, match="unknown kind 'scan'"):
        Measurement.from_dict(row)
