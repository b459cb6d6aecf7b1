"""The device table: complete, consistent, found by key and alias."""

import json
import pickle

import pytest

from archsearch.errors import ArchsearchError
from archsearch.hardware.device import Device, devices, load_device


@pytest.mark.parametrize("key", sorted(devices()))
def test_row(key):
    device = load_device(key)
    assert device.key == key and device.kind == "gpu" and device.name and device.sources["name"]
    assert 10 * 2**30 < device.memory_bytes < 300 * 2**30
    assert 2e11 < device.bandwidth_bytes_per_s < 1e13
    assert device.native_bf16 == ("bfloat16" in device.flops_per_s)
    assert all(1e12 < peak < 1e16 for peak in device.flops_per_s.values())
    assert device.flops_per_s.get("float8_e4m3fn", 1e16) >= 1.9 * device.flops_per_s["float16"]
    # A sustained figure above the peak would mean that the peak is wrong; one above 2x would be the
    # sparse one.
    for dtype, sustained in device.sustained_flops_per_s.items():
        assert 0.4 * device.flops_per_s[dtype] < sustained < device.flops_per_s[dtype]
    assert device.last_level_cache_bytes is None or 2**20 < device.last_level_cache_bytes < 2**30


def test_keys_names_and_aliases_are_unique():
    labels = [label for device in devices().values() for label in (device.key, *device.aliases)]
    assert len(labels) == len(set(labels))
    assert len({device.name for device in devices().values()}) == len(devices())


@pytest.mark.parametrize(
    ("alias", "key"),
    [
        ("a100", "a100-sxm4-80gb"),
        ("A100", "a100-sxm4-80gb"),
        ("h100", "h100-sxm5-80gb"),
        ("h100-sxm-80gb", "h100-sxm5-80gb"),
        ("h200", "h200-sxm-141gb"),
        ("b200", "b200-sxm"),
        ("l40s", "l40s"),
        ("4090", "rtx4090"),
        ("h20", "h20-sxm-96gb"),
        ("h800", "h800-sxm5-80gb"),
        ("a800", "a800-sxm4-80gb"),
        ("gh200", "gh200-96gb"),
        ("gb10", "gb10"),
        ("gb300", "gb300-nvl72"),
        ("a6000", "rtx-a6000"),
    ],
)
def test_aliases(alias, key):
    assert load_device(alias).key == key


def test_known_figures():
    a100 = load_device("a100")
    assert a100.name == "NVIDIA A100-SXM4-80GB"
    assert a100.flops_per_s["bfloat16"] == 312e12 and a100.bandwidth_bytes_per_s == 2039e9
    assert load_device("h200").bandwidth_bytes_per_s == 4.8e12
    assert load_device("t4").name == "Tesla T4" and "bfloat16" not in load_device("t4").flops_per_s
    assert "bandwidth_bytes_per_s" in load_device("h100-nvl").unverified


@pytest.mark.parametrize(
    ("name", "hint"), [("a100-sxmm", "a100"), ("h10", "h100"), ("????", "list devices")]
)
def test_unknown_devices(name, hint):
    with pytest.raises(ArchsearchError, match=hint):
        load_device(name)


def test_peaks_by_any_name_of_a_dtype():
    a100 = load_device("a100")
    assert a100.peak_flops_per_s("bf16") == a100.peak_flops_per_s("fp16") == pytest.approx(312e12)
    with pytest.raises(ArchsearchError, match="float8"):
        a100.peak_flops_per_s("fp8")


def test_a_device_travels():
    device = load_device("h100")
    assert Device.from_dict(json.loads(json.dumps(device.to_dict()))) == device
    assert pickle.loads(pickle.dumps(device)) == device
    assert len({device, load_device("h200")}) == 2


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("nvidia h100 80gb hbm3", "h100-sxm5-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
        ("A100 80GB", "a100-sxm4-80gb"),
        ("A10", "a10"),
        ("Tesla T4", "t4"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_names_as_they_are_written_and_as_the_driver_prints_them(name, key):
    assert load_device(name).key == key


def test_devices_are_suggested_by_what_they_are_listed_as():
    with pytest.raises(ArchsearchError, match="did you mean rtx4090, rtx5090"):
        load_device("RTX 4080")
