"""GPUs that nobody profiled: answered from a relative's kernels or the datasheet, each said so; a
user's own profile wins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from archsearch.architecture.catalogue import load
from archsearch.architecture.hf_config import to_hf_config
from archsearch.errors import ArchsearchError
from archsearch.files import write_json
from archsearch.hardware.device import devices, load_device
from archsearch.latency.model import LatencyModel
from archsearch.latency.roofline import RooflineLatency
from archsearch.pipeline.latency import choose_latency, tables_of
from archsearch.pipeline.serving import with_engine
from archsearch.profiles import Profile, find_profile, profiles_of
from archsearch.workload import Workload, WorkloadRequest
from tests.cli.commands import call, last_json, refused

CARRIED = {
    "a100-sxm4-40gb": "a100-sxm4-80gb",
    "a100-pcie-40gb": "a100-sxm4-80gb",
    "a100-pcie-80gb": "a100-sxm4-80gb",
    "h100-pcie-80gb": "h100-sxm5-80gb",
    "h100-nvl-94gb": "h100-sxm5-80gb",
    "h100-sxm5-94gb": "h100-sxm5-80gb",
    "gb200-nvl72": "b200-sxm",
    "b300-sxm": "b200-sxm",
    "gb300-nvl72": "b200-sxm",
    "a800-sxm4-80gb": "a100-sxm4-80gb",
    "h800-sxm5-80gb": "h100-sxm5-80gb",
    "h20-sxm-96gb": "h100-sxm5-80gb",
    "gh200-96gb": "h100-sxm5-80gb",
}


@pytest.mark.parametrize("key", devices())
def test_who_answers_for_a_device(key: str) -> None:
    device = load_device(key)
    profile = tables_of(device, "bfloat16") if "bfloat16" in device.flops_per_s else None
    if key in CARRIED:
        assert profile is not None and profile.device["key"] == CARRIED[key]
    elif profiles_of(key):
        assert profile is not None and profile.device["key"] == key
    else:
        assert profile is None


def test_estimate_says_whose_kernels_answer() -> None:
    arguments = (
        "estimate",
        "--target",
        "llama-3.1-8b",
        "--draft",
        "llama-3.2-1b",
        "--gpu",
        "h100-pcie",
        "--alpha",
        "0.8",
    )
    text = " ".join(call(*arguments).stdout.split())
    assert "kernels of h100-sxm5-80gb carried over to h100-pcie-80gb by the datasheets" in text
    assert "error seen between measured GPUs" in text and "roofline" not in text
    entry = last_json(call(*arguments, "--json"))["drafts"][0]
    assert entry["draft_s"]["source"] == entry["verify_s"]["source"] == "modelled"
    fast = last_json(call(*(*arguments[:-3], "h100", *arguments[-2:]), "--json"))["drafts"][0]
    assert 1.4 < entry["decode_s"]["value"] / fast["decode_s"]["value"] < 3.35 / 2.0
    assert (
        entry["decode_s"]["std"] / entry["decode_s"]["value"]
        > fast["decode_s"]["std"] / fast["decode_s"]["value"]
    )


@pytest.mark.parametrize("key", devices())
def test_all_targets_and_ranks_give_an_answer_or_one_clear_line(key: str) -> None:
    if load_device(key).key in ("a100-sxm4-80gb", "h100-sxm5-80gb", "h200-sxm-141gb", "b200-sxm"):
        return  # profiles that ship have tests of their own
    targets = {
        name: load(name).architecture for name in ("llama-3.1-8b", "qwen3-32b", "llama-3.1-70b")
    }
    try:
        source, _ = choose_latency(with_engine(WorkloadRequest(gpu=key)), targets["llama-3.1-8b"])
    except ArchsearchError as error:
        assert str(error) and "\n" not in str(error)
        return
    assert source.device.key == key and source.rounds is not None
    assert source.words.startswith("kernels of" if key in CARRIED else "datasheet roofline")
    for target in targets.values():
        times = {
            ranks: source.latency.decode_s(target, Workload(1, 256, ranks, source.dtype, "graph"))
            for ranks in (1, 2, 4, 8)
        }
        for ranks, step in times.items():
            assert 1e-3 < step.value < 1.0 and 0.03 < step.relative_std < 0.5
            assert step.source == ("modelled" if key in CARRIED else "roofline")
            assert step.value > 0.9 * times[1].value / ranks
        if (
            source.device.link_bytes_per_s and source.device.link_ranks is None
        ):  # a switch: more devices are faster
            assert times[8].value < times[4].value < times[2].value < times[1].value


def test_a_dtype_without_measured_kernels_stays_on_the_datasheet() -> None:
    """float32 is in no table; fp8 has been since the tables of experts came, and is carried over
    like bfloat16."""
    target = load("llama-3.1-8b").architecture
    carried, _ = choose_latency(
        with_engine(WorkloadRequest(gpu="h100-pcie", dtype="float8_e4m3fn")), target
    )
    assert not isinstance(carried.latency, RooflineLatency)
    source, _ = choose_latency(
        with_engine(WorkloadRequest(gpu="h100-pcie", dtype="float32")), target
    )
    assert isinstance(source.latency, RooflineLatency) and source.words.startswith(
        "datasheet roofline"
    )


def test_a_profile_of_one_s_own_sets_the_pace_of_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's rows of a relative lose to tables that ship; those of the device itself say how long
    its GEMMs take, and keep the attention of engines: torch's is another."""
    asked, target = with_engine(WorkloadRequest(gpu="h100-pcie")), load("llama-3.1-8b").architecture
    shipped = find_profile("h100-sxm5-80gb")
    monkeypatch.chdir(tmp_path)
    carried, workload = choose_latency(asked, target)
    own = Profile.load(shipped)
    slower = 2.5  # of rows of a GPU with 1.7 times the bandwidth

    def measured_as(key: str) -> Path:
        own.device, own.folder = load_device(key).to_dict(), tmp_path / "profiles" / key / "mine"
        own.provenance, own.origin = {"driver": "600"}, "mine"
        own.folder.mkdir(parents=True)
        for row in Profile.load(shipped).select("gemm", "bfloat16", "graph")[:300]:
            own.record(replace(row, times_s=tuple(slower * time for time in row.times_s)))
        own.save_header()
        return own.folder

    own.rows = {}
    measured_as("h100-sxm5-80gb")
    source, _ = choose_latency(asked, target)
    assert source.profile["carried_from"] == str(shipped)
    folder = measured_as("h100-pcie-80gb")
    source, _ = choose_latency(asked, target)
    assert isinstance(source.latency, LatencyModel) and source.profile["folder"] == str(folder)
    assert source.latency.carried_to is not None and "GEMMs took" in source.words
    before, after = (each.latency.decode_s(target, workload) for each in (carried, source))
    assert 1.3 < after.value / before.value < 1.7


def test_a_dtype_by_its_short_name_from_python() -> None:
    asked = WorkloadRequest("l40s", dtype="fp8", engine="vllm")
    source, workload = choose_latency(asked, load("llama-3.1-8b").architecture)
    assert source.dtype == workload.dtype == "float8_e4m3fn"


def test_profiling_a_gpu_that_is_not_here_names_the_profile_that_ships() -> None:
    line = refused("profile", "--gpu", "a100")
    assert (
        "no NVIDIA GPU is visible here" in line
        and "archsearch search --target T --gpu a100" in line
    )
    assert "is here already" not in refused("profile", "--gpu", "l4")


def test_a_command_to_serve_names_only_what_an_engine_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of a folder is no hub id: no command is better than one that fails."""
    monkeypatch.chdir(tmp_path)
    write_json(tmp_path / "mine" / "config.json", to_hf_config(load("llama-3.1-8b").architecture))
    asked = ("search", "--gpu", "h100", "--trials", "5", "--family", "ngram", "--target")
    assert "vllm serve meta-llama/" in call(*asked, "llama-3.1-8b", "--run", "a").output
    assert "vllm serve" not in call(*asked, "mine", "--run", "b").output
