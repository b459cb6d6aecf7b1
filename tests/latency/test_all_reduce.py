"""All-reduces of a profile with rows, with rows of other rank counts, with none; and which shipped
table stands in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from archsearch.architecture.ops import AllReduce
from archsearch.errors import MissingDataError
from archsearch.hardware.device import load_device
from archsearch.latency.all_reduce import LIKE_STD, LINK_STD, AllReduces, shipped_table
from archsearch.profiles import Measurement, freeze_shape

H100 = 4.5e11


def rows(ranks: int, factor: float = 1.0) -> list[Measurement]:
    """10 us and 1 us a million elements, times `factor`."""
    return [
        Measurement(
            "all_reduce",
            freeze_shape({"elements": e, "ranks": ranks}),
            "bfloat16",
            "graph",
            "cold",
            (factor * (1e-5 + 1e-12 * e),),
        )
        for e in (1 << 10, 1 << 15, 1 << 20, 1 << 25)
    ]


def on(
    device: str,
    found: list[Measurement],
    dtype: str = "bfloat16",
    mode: str = "graph",
    **changes: Any,
) -> AllReduces:
    return AllReduces(found, load_device(device).to_dict() | changes, dtype, mode, 0.05)


def test_rows_of_as_many_ranks_answer_first() -> None:
    seconds, std = on("h200", rows(4))(AllReduce(1 << 15, 4))
    assert seconds == pytest.approx(1e-5 + 1e-12 * (1 << 15)) and std == 0.05
    assert on("h200", rows(4))(AllReduce(0, 4)) == on("h200", rows(4))(
        AllReduce(1 << 10, 4)
    )  # a pass without logits gathers none


def test_rows_of_nccl_are_not_what_an_engine_runs() -> None:
    own = [replace(row, kernel="NCCL") for row in rows(4)]
    seconds, std = on("h200", own)(AllReduce(1 << 15, 4))
    assert seconds == pytest.approx(1e-5 + 1e-12 * (1 << 15)) and std == LIKE_STD


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_a_card_of_its_own_is_priced_by_the_table_of_its_link(ranks: int, mode: str) -> None:
    """An H200 under another key takes a table of 450 GB/s links (the H100's); the datasheet's speed
    alone says too little."""
    table = shipped_table("h100-sxm5-80gb", "NVIDIA", H100, mode)
    assert table is not None
    op = AllReduce(8192 * 32, ranks)
    seconds, std = on("h200", [], mode=mode, key="elsewhere")(op)
    assert seconds == table.seconds(ranks, op.elements) and std == LIKE_STD
    own = shipped_table("h200-sxm-141gb", "NVIDIA", H100, mode)
    assert own is not None and on("h200", [], mode=mode)(op)[0] == own.seconds(ranks, op.elements)
    assert seconds == pytest.approx(own.seconds(ranks, op.elements), rel=0.15)


def test_two_gpus_scale_the_table_of_eight() -> None:
    """Rows of two ranks, twice as slow as the table's, make eight twice as slow."""
    table = shipped_table("h100-sxm5-80gb", "NVIDIA", H100, "graph")
    assert table is not None
    sizes = (1 << 12, 1 << 17, 1 << 20)
    slow = [
        Measurement(
            "all_reduce",
            freeze_shape({"elements": e, "ranks": 2}),
            "bfloat16",
            "graph",
            "cold",
            (2 * table.seconds(2, e),),
        )
        for e in sizes
    ]
    for elements in sizes:
        seconds, std = on("h100", slow)(AllReduce(elements, 8))
        assert seconds == pytest.approx(2 * table.seconds(8, elements)) and 0.25 < std < 0.3


def test_where_no_table_is_like_it() -> None:
    """Bridges, other vendors and wider numbers take the ring and the link's speed."""
    op = AllReduce(1 << 20, 4)
    by_link = 2 * 0.75 * 2 * (1 << 20) / 3e11 + 5e-6
    assert on("h100-nvl-94gb", [])(op) == (
        pytest.approx(by_link),
        LINK_STD,
    )  # the speed of its link is not verified
    assert on("h200", [], vendor="AMD")(op)[1] == LINK_STD
    assert on("h200", [], dtype="float32")(op) == (
        pytest.approx(2 * 0.75 * 4 * (1 << 20) / H100 + 5e-6),
        LINK_STD,
    )
    ring = on("h100-nvl-94gb", rows(2))(op)[0]
    assert ring == pytest.approx((1e-5 + 1e-12 * (1 << 20)) * 0.75 / 0.5)


def test_a_cpu_has_none() -> None:
    with pytest.raises(MissingDataError, match="needs a GPU profile"):
        AllReduces(rows(2), {"kind": "cpu"}, "float32", "eager", 0.05)(AllReduce(64, 2))
