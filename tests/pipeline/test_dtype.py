"""Which dtype is taken where nobody names one: the fastest; of those that a profile cannot tell
apart, what verifies cheapest."""

from __future__ import annotations

import pytest

from archsearch.pipeline.latency import fastest_dtype


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
    ms = {"float32": float32, "bfloat16": bfloat16}
    for names in (("float32", "bfloat16"), ("bfloat16", "float32")):
        step_s = {name: ms[name][0] / 1e3 for name in names}
        assert fastest_dtype(step_s, lambda name, gamma: ms[name][gamma] / 1e3) == chosen
