"""`archsearch doctor`: every finding with what mends it; status 1 only where nothing can run."""

from __future__ import annotations

import json
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from archsearch.hardware.device import devices
from archsearch.hardware.identify import VisibleGpu, identify_cpu
from archsearch.pipeline import doctor
from archsearch.profiles import cpu_stack, stack_key
from tests.cli.commands import call, invoke, last_json

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without a GPU, not busy, with room; tests change one thing each."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ARCHSEARCH_CACHE", str(tmp_path / "cache"))
    for name in ("ARCHSEARCH_VLLM_PYTHON", "ARCHSEARCH_OPENVINO_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "visible_gpus", lambda: [])
    monkeypatch.setattr(
        doctor,
        "gpu_problem",
        lambda: "no NVIDIA driver is installed here (libnvidia-ml is missing)",
    )
    monkeypatch.setattr(doctor, "_busy_share", lambda: 0.02)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Usage(10**12, 0, 50 * 10**9))


def found(topic: str) -> list[dict]:
    return [
        finding
        for finding in last_json(call("doctor", "--json"))["findings"]
        if finding["topic"] == topic
    ]


def make_profile(key: str, stack: str, **header: object) -> None:
    folder = Path("profiles") / key / stack
    folder.mkdir(parents=True)
    (folder / "profile.json").write_text(json.dumps({"device": {}, "stack": {}, **header}))
    (folder / "rows.jsonl").write_text("x\n" * 100)


def test_text_names_every_topic_and_what_mends_it() -> None:
    text = call("doctor").stdout
    for word in (
        "versions",
        "device",
        "profile",
        "engines",
        "disk",
        "memory",
        "load",
        "$ archsearch engine install vllm",
    ):
        assert word in text
    assert "archsearch runs here" in text.splitlines()[-1]
    assert max(map(len, text.splitlines())) < 260  # wrapped; commands and paths stay whole


def test_a_missing_profile_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor, "identify_cpu", lambda: replace(identify_cpu(), key="cpu-nobodys-2t")
    )
    (finding,) = found("profile")
    assert finding["level"] == "mend" and "cpu-nobodys-2t has no profile" in finding["text"]
    assert finding["command"] == "archsearch profile --gpu cpu"


def test_profiles_of_other_software_and_unchecked_ones_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        doctor, "identify_cpu", lambda: replace(identify_cpu(), key="cpu-nobodys-2t")
    )
    make_profile("cpu-nobodys-2t", "torch-1.0-transformers-1.0", known_error={"float32": {}})
    (finding,) = found("profile")
    assert (
        finding["level"] == "mend"
        and "other software (torch-1.0-transformers-1.0)" in finding["text"]
    )
    make_profile("cpu-nobodys-2t", stack_key(cpu_stack()))
    (finding,) = found("profile")
    assert (finding["level"], finding["command"]) == (
        "note",
        "archsearch profile --gpu cpu --check 20",
    )


def test_gpus_known_imported_and_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    h100 = devices()["h100-sxm5-80gb"]
    gpus = [
        VisibleGpu(0, h100.name, h100.memory_bytes, "580.1"),
        VisibleGpu(1, "NVIDIA Zeta", 2**34, "580.1"),
    ]
    monkeypatch.setattr(doctor, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(
        doctor, "gpu_state", lambda gpu: (_ for _ in ()).throw(ValueError("no state"))
    )
    texts = [finding["text"] for finding in found("device")]
    assert any("(--gpu h100-sxm5-80gb)" in text for text in texts)
    assert any("NVIDIA Zeta" in text and "devices/nvidia-zeta.yaml" in text for text in texts)
    imported = [
        finding for finding in found("profile") if "imported kernel tables" in finding["text"]
    ]
    assert [finding["command"] for finding in imported] == [
        "archsearch profile --gpu h100-sxm5-80gb"
    ]
    assert [finding["text"] for finding in found("load")][
        -1
    ] == "no state"  # costs its own part only


def test_an_engine_without_graphs_for_drafts_names_its_switch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    h100 = devices()["h100-sxm5-80gb"]
    monkeypatch.setattr(
        doctor, "visible_gpus", lambda: [VisibleGpu(0, h100.name, h100.memory_bytes, "580.1")]
    )
    monkeypatch.setattr(
        doctor, "gpu_state", lambda gpu: (_ for _ in ()).throw(ValueError("no state"))
    )
    told = [
        finding for finding in found("engines") if "on a GPU runs a draft model" in finding["text"]
    ]
    vllm = next(finding for finding in told if finding["text"].startswith("vLLM"))
    assert vllm["level"] == "mend" and vllm["command"] == "export VLLM_USE_V2_MODEL_RUNNER=0"
    sglang = next(finding for finding in told if finding["text"].startswith("SGLang"))
    assert sglang["level"] == "ok"
    monkeypatch.setattr(doctor, "visible_gpus", list)
    assert {"note", "ok"} == {
        finding["level"] for finding in found("engines") if "on a GPU" in finding["text"]
    }


def test_a_full_disk_a_busy_machine_and_little_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Usage(10**12, 0, 10**9))
    monkeypatch.setattr(doctor, "_busy_share", lambda: 0.97)
    assert all(
        finding["level"] == "mend" and "1.0 GB free" in finding["text"] for finding in found("disk")
    )
    assert "others use 97% of the CPU" in found("load")[0]["text"]
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 8388608 kB\nMemAvailable:    1048576 kB\n")
    (finding,) = doctor._memory(meminfo)
    assert finding.level == "mend" and finding.text.startswith("1.0 of")


def test_status_1_only_where_nothing_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor, "_requirements", lambda: ["optuna>=99", 'x-y-z>=1; extra == "never"']
    )
    data = last_json(call("doctor", "--json"))  # too old: to mend, but it may run
    assert data["runs"] and "optuna>=99" in data["findings"][0]["command"]
    monkeypatch.setattr(doctor, "_requirements", lambda: ["no-such-package-of-anyone>=1"])
    result = invoke("doctor", "--json")
    assert result.exit_code == 1 and not last_json(result)["runs"]
    assert "no-such-package-of-anyone is not installed" in result.stdout


def test_how_busy_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 100 800 0 0 0 0 0 0\n")
    monkeypatch.undo()
    monkeypatch.setattr(
        doctor.time, "sleep", lambda s: stat.write_text("cpu  160 0 100 840 0 0 0 0 0 0\n")
    )
    assert doctor._busy_share(stat, 0.0) == pytest.approx(0.6)
    assert doctor._busy_share(tmp_path / "none") is None


def test_what_the_cache_holds_is_said() -> None:
    """Targets brought into GGUF are kept there: 9 GB after a day of trying precisions."""
    with_file = Path("cache/llama.cpp")
    with_file.mkdir(parents=True)
    with (with_file / "a.gguf").open("wb") as file:
        file.truncate(3 * 10**9)
    texts = [finding["text"] for finding in found("disk")]
    assert any("3.0 GB in it, all of which can be made again" in text for text in texts)
