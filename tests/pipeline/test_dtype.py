"""Which dtype is taken where nobody names one: the fastest; of those that a profile cannot tell
apart, what verifies cheapest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from archsearch.estimate import Estimate
from archsearch.pipeline.latency import _fastest_dtype
from archsearch.workload import Workload
from tests.doubles.world import TINY


@dataclass(frozen=True)
class Passes:
    """A latency model by milliseconds of passes over 1, 2, .. tokens."""

    ms: tuple[float, ...]

    def verify_s(self, target: Any, workload: Workload, gamma: int) -> Estimate:
        return Estimate(self.ms[gamma] / 1e3, 0.0, "measured")


@pytest.mark.parametrize(
    ("float32", "bfloat16", "chosen"),
    [
        ((85, 90, 96, 130, 160), (88, 88, 87, 89, 90), "bfloat16"),  # a Xeon with AMX, one thread
        (
            (59, 90, 112, 78, 69),
            (36, 40, 42, 43, 45),
            "bfloat16",
        ),  # an EPYC with AVX512 in bf16, two threads
        (
            (60, 62, 64, 66, 68),
            (75, 75, 75, 75, 75),
            "float32",
        ),  # no units for bfloat16: a flat slow one is no baseline
        ((60, 62, 64, 66, 68), (62, 70, 78, 86, 94), "float32"),
    ],
)
def test_the_fastest_dtype_and_of_equals_the_one_that_verifies_cheapest(
    float32: tuple[float, ...], bfloat16: tuple[float, ...], chosen: str
) -> None:
    for names in (("float32", "bfloat16"), ("bfloat16", "float32")):
        models: Any = {name: Passes(float32 if name == "float32" else bfloat16) for name in names}
        workloads = {name: Workload(batch_size=1, context_len=128, dtype=name) for name in names}
        step_s = {name: models[name].ms[0] / 1e3 for name in names}
        assert _fastest_dtype(models, TINY, workloads, step_s) == chosen
