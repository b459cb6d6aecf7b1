"""Which measured servers are compared, and which are named and left out."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

import moe_figures as figures

SERVER = {
    "silicon_data_source": "x; silicon_concurrency=4; measured=2026-03-27T08:01:51Z",
    "backend": "vllm",
    "backend_version": "0.18.0",
    "model_path": "openai/gpt-oss-120b",
    "system": "h100_sxm",
    "precision": "fp4",
    "mode": "agg",
    "isl": "1024",
    "osl": "1024",
    "gemm_quant_mode": "nvfp4",
    "moe_quant_mode": "nvfp4",
    "batch_size": "4",
    "tp_size": "2.0",
    "pp_size": "1",
    "attention_dp_size": "1.0",
    "moe_tp_size": "2.0",
    "moe_ep_size": "1.0",
    "silicon_tpot_ms": "5.0",
}


def write(path: Path, *changes: dict[str, str]) -> Path:
    """silicon_sample.csv with one server for each of `changes`."""
    rows = [{"id": str(number), **SERVER, **change} for number, change in enumerate(changes)]
    with path.open("w", encoding="utf-8", newline="") as handle:
        writer = csv.DictWriter(handle, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"attention_dp_size": "4"}, "data parallel"),
        ({"tp_size": "16", "moe_tp_size": "4", "moe_ep_size": "4"}, "a product of the two"),
        ({"tp_size": "8"}, "parallelism of experts and of the rest differ"),
        ({"silicon_data_source": "silicon_concurrency=64"}, "contradicts"),
        ({"system": "gb300"}, "another GPU"),
    ],
)
def test_rows_left_out_are_named(tmp_path: Path, change: dict[str, str], reason: str) -> None:
    kept, left = figures.read_group(
        write(tmp_path / "s.csv", {}, {**change, "silicon_tpot_ms": "6.0"}), "gpt-oss"
    )
    assert [row.id for row in kept] == ["0"] and [
        count for name, count in left.items() if reason in name
    ] == [1]


def test_twins_and_servers_that_get_quicker_with_load(tmp_path: Path) -> None:
    loaded = {
        "batch_size": "64",
        "silicon_data_source": "silicon_concurrency=64",
        "silicon_tpot_ms": "3.0",
    }
    kept, left = figures.read_group(write(tmp_path / "s.csv", {}, {}, loaded), "gpt-oss")
    assert (
        len(kept) == 1
        and left["a twin of another row"] == 1
        and left["quicker than at a quarter of the concurrency"] == 1
    )


@pytest.mark.parametrize(
    ("change", "fused"),
    [
        ({}, True),
        ({"backend_version": "0.15.1"}, False),
        ({"backend_version": "0.15.1", "system": "b200_sxm"}, True),  # by its recipe
        ({"backend_version": ""}, False),
        ({"backend": "trtllm", "backend_version": "1.0.0rc3"}, True),
    ],
)
def test_which_servers_run_all_reduce_and_norm_as_one_kernel(
    tmp_path: Path, change: dict[str, str], fused: bool
) -> None:
    (row,), _ = figures.read_group(write(tmp_path / "s.csv", change), "gpt-oss")
    assert row.fuses is fused and row.on_blackwell is (row.system == "b200_sxm")


def test_a_row_knows_its_layout(tmp_path: Path) -> None:
    (row,), _ = figures.read_group(
        write(tmp_path / "s.csv", {"moe_tp_size": "1", "moe_ep_size": "2"}), "gpt-oss"
    )
    assert (
        row.fuses
        and row.arch.expert_parallel
        and row.arch.expert_format == "mxfp4"
        and row.dtype == "bfloat16"
    )
    assert (row.concurrency, row.ranks, row.device) == (4, 2, "h100-sxm5-80gb")
