"""A GPU that nobody profiled, answered from a relative's kernels: the ratio by hand, what is no
relative, links."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.ops import AllReduce, Attention, Elementwise, Gemm, Op
from archsearch.hardware.device import devices, load_device
from archsearch.latency import composed
from archsearch.latency.datasheet import all_reduce_s, datasheet_s, over_link
from archsearch.latency.model import LatencyModel
from archsearch.latency.transfer import PCIE_STD, CarriedOps, distance, same_generation
from archsearch.profiles import Measurement, Profile, freeze_shape
from tests.doubles.passes import forward_s

H100, PCIE, BLADE = (load_device(name) for name in ("h100", "h100-pcie", "h100-94gb"))


class Measured:
    """Stands in for OpModel: every op takes 10 us, std 5 %."""

    dtype = "bfloat16"

    def __init__(
        self, profile: Profile | None = None, dtype: str = "bfloat16", mode: str = "graph"
    ) -> None:
        self.profile = Profile(H100.to_dict(), {"vllm": "0"})

    def op_s(self, op: Op, cold: bool) -> tuple[float, float]:
        return 10e-6, 0.05

    def prepare(self, ops: Iterable[Op], cold: bool) -> None:
        pass


def test_a_large_gemm_follows_the_bandwidth_and_a_small_one_stays() -> None:
    carried = CarriedOps(Measured(), PCIE)
    large, small = Gemm(1, 1536, 4096), Gemm(1, 64, 64)
    moved = 2 * (1536 * 4096 + 1536 + 4096) / 0.85
    rest = 10e-6 - moved / 3.35e12  # launched, filled and drained as fast on both
    slower = moved / 2.0e12 + rest
    assert (
        carried.op_s(large, True)[0] == pytest.approx(slower)
        and 11e-6 < slower < 10e-6 * 3.35 / 2.0
    )
    cached = Gemm(
        1, 28672, 8192
    )  # 10 us are less than its memory's least: no more than that scales
    assert carried.op_s(cached, True)[0] == pytest.approx(10e-6 * 3.35 / 2.0)
    assert carried.op_s(small, True)[0] == pytest.approx(10e-6, rel=0.01)  # next to no memory


def test_on_ampere_slower_memory_overlaps_with_what_a_kernel_does_beyond_it() -> None:
    """An A100 40 GB: between one after the other and at once."""
    measured = Measured()
    measured.profile = Profile(load_device("a100").to_dict(), {"vllm": "0"})
    carried = CarriedOps(measured, load_device("a100-40gb"))
    op = Gemm(1, 1536, 4096)
    moved = 2 * (1536 * 4096 + 1536 + 4096) / 0.85
    there, here = moved / 2.039e12, moved / 1.555e12
    serial, at_once = 10e-6 + here - there, max(10e-6, here)
    assert carried.op_s(op, True)[0] == pytest.approx((serial + at_once) / 2, rel=0.01)


def test_a_prompt_follows_the_peak() -> None:
    seconds, _ = CarriedOps(Measured(), PCIE).op_s(Gemm(16384, 28672, 8192), True)
    assert seconds == pytest.approx(10e-6 * 989.4 / 756.5, rel=1e-3)


@pytest.mark.parametrize(
    "op", [Gemm(1, 4096, 4096), Attention(1, 1, 500, 32, 8, 128), Elementwise("norm", 4096)]
)
def test_what_is_carried_over_is_less_sure(op: Op) -> None:
    for device in (PCIE, BLADE):
        assert CarriedOps(Measured(), device).op_s(op, True)[1] > 0.09


def test_all_reduces_go_over_the_device_s_own_link() -> None:
    same, bridge = CarriedOps(Measured(), BLADE), CarriedOps(Measured(), PCIE)
    op = AllReduce(8192, 2)
    assert same.op_s(op, True)[0] == pytest.approx(10e-6)  # the same NVLink: the measured time
    moved = 8192 * 2
    assert bridge.op_s(op, True)[0] == pytest.approx(
        10e-6 * (moved / 300e9 + 5e-6) / (moved / 450e9 + 5e-6)
    )


def test_a_bridge_joins_two_cards_and_more_go_over_pcie() -> None:
    assert over_link(PCIE, 2) and not over_link(PCIE, 4) and over_link(H100, 8)
    seconds, std = CarriedOps(Measured(), PCIE).op_s(AllReduce(8192, 4), True)
    # NCCL's LL over PCIe 5: 6.6 us, six steps of 1 us, 1.5 x 16 KiB at half of 48 GB/s
    assert seconds == pytest.approx(6.6e-6 + 6e-6 + 1.5 * 8192 * 2 / 24e9) and std == PCIE_STD
    # 256 MiB: Simple moves no flags. 8.4 us, six steps of 5.7 us, the whole bandwidth
    assert all_reduce_s(PCIE, AllReduce(1 << 27, 4), 2) == pytest.approx(
        8.4e-6 + 34.2e-6 + 1.5 * (1 << 28) / 48e9
    )
    without = replace(PCIE, link_bytes_per_s=0.0)
    assert all_reduce_s(without, AllReduce(8192, 2), 2) > all_reduce_s(PCIE, AllReduce(8192, 2), 2)


def test_relatives_are_of_one_generation() -> None:
    def relatives(name: str) -> set[str]:
        return {
            key for key, device in devices().items() if same_generation(load_device(name), device)
        }

    hopper = {
        "h100-sxm5-80gb",
        "h100-sxm5-94gb",
        "h100-pcie-80gb",
        "h100-nvl-94gb",
        "h200-sxm-141gb",
    }
    assert relatives("h100") == hopper | {"gh200-96gb", "h20-sxm-96gb", "h800-sxm5-80gb"}
    assert relatives("b200") == {"b200-sxm", "b300-sxm", "gb200-nvl72", "gb300-nvl72"}
    # a GA102 runs other kernels
    assert relatives("a100") == {key for key in devices() if key.startswith("a100-")} | {
        "a800-sxm4-80gb"
    }
    assert "rtx5090" not in relatives("b200") and relatives("l4") == {
        "l4",
        "l20",
        "l40",
        "l40s",
        "rtx4090",
    }
    assert relatives("mi300x") == set()
    assert distance(PCIE, H100, "bfloat16") < distance(PCIE, load_device("h200"), "bfloat16")


def test_every_op_is_priced_on_every_device_of_a_generation() -> None:
    ops = [
        Gemm(5, 4096, 4096),
        Attention(1, 5, 500, 32, 8, 128),
        Elementwise("sample", 32000),
        AllReduce(4096, 8),
    ]
    for device in devices().values():
        if "bfloat16" in device.flops_per_s:
            assert all(0 < datasheet_s(device, op, "bfloat16") < 1e-3 for op in ops)


def test_a_pass_and_its_summary_say_to_whom_it_was_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composed, "OpModel", Measured)
    monkeypatch.setattr(composed, "_FITTED", {})
    arch = Architecture(4096, 14336, 4, 32, 8, 128, 128256)
    profile = Profile(H100.to_dict(), {"vllm": "0"})
    gemm = Measurement(
        "gemm", freeze_shape({"m": 1, "n": 64, "k": 64}), "bfloat16", "graph", "cold", (3e-6,)
    )
    # what an engine was measured to add on the relative's machine is not this GPU's
    added = Measurement(
        "engine",
        freeze_shape({"engine": "vllm", "gamma": 0, "draft_layers": 1, "vocab_size": 32000}),
        "bfloat16",
        "graph",
        "warm",
        (1e-3, 1e-3, 1e-3),
    )
    profile.add([gemm, added])
    own, carried = (
        LatencyModel(Profile(device.to_dict(), {}), "bfloat16", "graph", tables=profile)
        for device in (H100, BLADE)
    )
    assert forward_s(carried, arch).value > forward_s(own, arch).value
    assert forward_s(carried, arch).relative_std > forward_s(own, arch).relative_std
    assert forward_s(carried, arch).source == "modelled"
    assert (
        carried.summary()["carried_to"] == "h100-sxm5-94gb"
        and carried.summary()["pass"] == "composed"
    )
    assert not carried.added_
