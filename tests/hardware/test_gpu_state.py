"""What a GPU is doing, what hides it, MIG slices, busy devices: from a fake NVML; devices that a
user adds."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from archsearch.errors import ArchsearchError
from archsearch.hardware import device as device_module
from archsearch.hardware import identify
from archsearch.hardware.device import load_device
from archsearch.records import as_data

A100, A100_40, H100 = "NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-40GB", "NVIDIA H100 80GB HBM3"
MIB = {
    A100: 81920,
    A100_40: 40960,
    H100: 81559,
    "NVIDIA A100-SXM4-80GB MIG 1g.10gb": 9728,
    "NVIDIA X1": 12288,
}


class NVMLError(Exception):
    def __init__(self, value: int = 3) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class FakeNvml:
    """Cards by name, each with `state`; what a state does not name is not supported."""

    NVMLError = NVMLError
    (
        NVML_ERROR_LIBRARY_NOT_FOUND,
        NVML_ERROR_DRIVER_NOT_LOADED,
        NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    ) = 12, 9, 18

    def __init__(
        self,
        *names: str,
        fails: int | None = None,
        slices: dict[int, list[str]] | None = None,
        **state: Any,
    ) -> None:
        self.names, self.fails, self.slices, self.state = names, fails, slices or {}, state
        self.open = 0

    def nvmlInit(self) -> None:
        if self.fails is not None:
            raise NVMLError(self.fails)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def _told(self, name: str) -> Any:
        assert self.open
        if name not in self.state:
            raise NVMLError()
        value = self.state[name]
        return value

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"570.1"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> tuple[int, int | None]:
        return (index, None)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> tuple[int, int | None]:
        kind, _, rest = uuid.partition("-")
        index, _, part = rest.partition("/")
        return (int(index), int(part) if kind == "MIG" else None)

    def _name(self, handle: tuple[int, int | None]) -> str:
        return self.names[handle[0]] if handle[1] is None else self.slices[handle[0]][handle[1]]

    def nvmlDeviceGetName(self, handle: tuple[int, int | None]) -> str:
        return self._name(handle)

    def nvmlDeviceGetUUID(self, handle: tuple[int, int | None]) -> str:
        return f"GPU-{handle[0]}" if handle[1] is None else f"MIG-{handle[0]}/{handle[1]}"

    def nvmlDeviceGetMemoryInfo(self, handle: tuple[int, int | None]) -> Any:
        return SimpleNamespace(
            total=MIB[self._name(handle)] * 2**20, used=self.state.get("used", 0)
        )

    def nvmlDeviceGetMigMode(self, handle: tuple[int, int | None]) -> list[int]:
        if handle[0] not in self.slices:
            raise NVMLError()
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(
        self, handle: tuple[int, int | None], number: int
    ) -> tuple[int, int]:
        if number >= len(self.slices[handle[0]]):
            raise NVMLError()
        return (handle[0], number)

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int) -> int:
        return self._told("clocks")[kind]

    def nvmlDeviceGetMaxClockInfo(self, handle: Any, kind: int) -> int:
        return self._told("max_clocks")[kind]

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Any) -> int:
        return self._told("limit_mw")

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:
        return self._told("draw_mw")

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int:
        return self._told("temperature")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any) -> int:
        return self._told("reasons")

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        rates = self._told("rates")  # a list: one reading after the other
        return SimpleNamespace(gpu=rates.pop(0) if isinstance(rates, list) else rates)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: tuple[int, int | None]) -> list[Any]:
        return self._told("processes")[handle[0]]

    def nvmlSystemGetProcessName(self, pid: int) -> bytes:
        return b"/usr/bin/python3"


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)

    def put(*names: str, **state: Any) -> FakeNvml:
        fake = FakeNvml(*names, **state)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return put


def process(pid: int) -> Any:
    return SimpleNamespace(pid=pid, usedGpuMemory=3 * 2**30)


# -- what is missing
# -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (12, "no NVIDIA driver"),
        (9, "not loaded"),
        (18, "different versions"),
        (999, "does not answer"),
    ],
)
def test_what_nvml_lacks_is_said_in_one_line(show, error: int, words: str) -> None:
    show(fails=error)
    problem = identify.gpu_problem()
    assert problem is not None and words in problem and "\n" not in problem
    with pytest.raises(ArchsearchError, match=words) as raised:
        identify.check_claim("h100")
    assert "--gpu cpu" in str(raised.value) and "\n" not in str(raised.value)


def test_without_the_python_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "pip install nvidia-ml-py" in (identify.gpu_problem() or "")


def test_a_driver_without_gpus(show) -> None:
    show()
    assert identify.gpu_problem() == "the NVIDIA driver shows no GPU"
    assert show(A100).open == 0 and identify.gpu_problem() is None


# -- which GPUs are visible
# ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ("1", [1]),
        ("1,0", [1, 0]),
        ("", []),
        ("-1", []),
        ("0,7,1", [0]),
        ("GPU-1", [1]),
        ("GPU-9", []),
        ("0,0", [0]),
    ],
)
def test_cuda_visible_devices(
    show, monkeypatch: pytest.MonkeyPatch, visible: str, indices: list[int]
) -> None:
    show(A100, A100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.index for gpu in identify.visible_gpus()] == indices
    if not indices:
        assert "CUDA_VISIBLE_DEVICES" in (identify.gpu_problem() or "")


def test_numbers_in_a_mixed_machine_are_nvml_s_only_in_pci_order(
    show, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default CUDA sorts by speed, so number 1 may be either card: neither is hidden, the bench
    finds its own by UUID."""
    show(A100_40, H100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert len(identify.visible_gpus()) == 2
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert [gpu.name for gpu in identify.visible_gpus()] == [H100]


def test_several_identical_gpus(show) -> None:
    fake = show(A100, A100, A100)
    assert identify.check_claim("a100").key == "a100-sxm4-80gb" and fake.open == 0


def test_a_mig_slice_is_named_and_not_guessed(show) -> None:
    show(A100, slices={0: ["NVIDIA A100-SXM4-80GB MIG 1g.10gb"]})
    (gpu,) = identify.visible_gpus()
    assert gpu.mig == "1g.10gb" and gpu.uuid == "MIG-0/0" and gpu.memory_bytes == 9728 * 2**20
    with pytest.raises(
        ArchsearchError, match=r"MIG slice \(1g\.10gb\).*nothing here guesses"
    ) as raised:
        identify.check_claim("a100")
    assert (
        "nvidia-smi -mig 0" in str(raised.value)
        and "devices/" in str(raised.value)
        and "\n" not in str(raised.value)
    )


def test_a_card_in_mig_mode_is_not_the_card(show) -> None:
    """NVML shows the whole card's name and memory although no CUDA program can use it."""
    show(A100, slices={0: []})
    with pytest.raises(ArchsearchError, match="not cut into slices"):
        identify.check_claim("a100")


def test_an_unknown_gpu_says_how_to_add_it(show) -> None:
    show("NVIDIA X1")
    with pytest.raises(ArchsearchError) as raised:
        identify.check_claim("a100")
    message = str(raised.value)
    for part in (
        "not in the device table",
        "devices/nvidia-x1.yaml",
        "name: NVIDIA X1",
        f"memory_bytes: {12288 * 2**20}",
    ):
        assert part in message
    assert "\n" not in message


# -- what it is doing
# ----------------------------------------------------------------------------------------

FULL = {
    "used": 5 * 2**30,
    "clocks": {1: 1410, 2: 1593},
    "max_clocks": {1: 1410, 2: 1593},
    "limit_mw": 400_000,
    "draw_mw": 61_500,
    "temperature": 34,
    "reasons": 0x4 | 0x40 | 0x1,
    "rates": 3,
}


def test_state(show) -> None:
    fake = show(A100, **FULL, processes=[[process(os.getpid()), process(4_000_000)]])
    state = identify.gpu_state(identify.visible_gpus()[0])
    assert (state.sm_clock_mhz, state.memory_clock_mhz, state.max_sm_clock_mhz) == (
        1410,
        1593,
        1410,
    )
    assert (state.power_limit_w, state.power_draw_w, state.temperature_c, state.utilisation) == (
        400.0,
        61.5,
        34,
        0.03,
    )
    assert state.throttle_reasons == (
        "power cap",
        "hardware thermal slowdown",
    )  # idle is no throttling
    assert [other.pid for other in state.processes] == [4_000_000] and state.busy
    assert "python3 (pid 4000000, 3.0 GiB)" in state.busy_words()
    assert state.memory_used_bytes == 5 * 2**30 and fake.open == 0
    data = as_data(state)
    assert data["name"] == A100 and data["driver"] == "570.1" and data["power_limit_w"] == 400.0


def test_what_the_driver_does_not_tell_is_none(show) -> None:
    show(A100)
    state = identify.gpu_state(identify.visible_gpus()[0])
    assert (
        state.sm_clock_mhz is None
        and state.power_limit_w is None
        and state.utilisation is None
        and not state.busy
    )
    assert state.processes == () and state.throttle_reasons == ()


def test_clock_reader(show) -> None:
    show(A100, **FULL)
    read = identify.sm_clock_reader(identify.visible_gpus()[0])
    assert read() == 1410
    show(A100)
    assert identify.sm_clock_reader(identify.visible_gpus()[0])() is None


# -- busy devices
# --------------------------------------------------------------------------------------------


def test_a_busy_device_is_refused_by_name(show) -> None:
    show(A100, **FULL, processes=[[process(4_000_000)]])
    device = load_device("a100")
    with pytest.raises(ArchsearchError, match=r"python3 \(pid 4000000.*--allow-busy"):
        identify.idle_gpu(device, sleep=lambda s: None)
    assert identify.idle_gpu(device, allow_busy=True).busy


def test_the_idle_one_of_several_is_taken(show) -> None:
    show(A100, A100, **FULL, processes=[[process(4_000_000)], []])
    assert identify.idle_gpu(load_device("a100")).gpu.index == 1


def test_utilisation_is_given_time_to_fall(show) -> None:
    waits: list[float] = []
    show(A100, **{**FULL, "rates": [60, 40, 2]}, processes=[[]])
    assert identify.idle_gpu(load_device("a100"), sleep=waits.append).utilisation == 0.02
    assert len(waits) == 2
    show(A100, **{**FULL, "rates": 60}, processes=[[]])
    with pytest.raises(ArchsearchError, match="60% utilised"):
        identify.idle_gpu(load_device("a100"), sleep=waits.append)
    assert sum(waits[2:]) == pytest.approx(2.0)


def test_no_such_device_here(show) -> None:
    show(A100_40)
    with pytest.raises(ArchsearchError, match="no NVIDIA A100-SXM4-80GB is visible here"):
        identify.idle_gpu(load_device("a100"))


# -- devices a user adds
# -------------------------------------------------------------------------------------

X1 = {
    "key": "nvidia-x1",
    "name": "NVIDIA X1",
    "memory_bytes": 12288 * 2**20,
    "bandwidth_bytes_per_s": 5e11,
    "flops_per_s": {"float16": 4e13},
}


@pytest.fixture
def added(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """Write devices/x1.yaml into a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "devices").mkdir()
    device_module.devices.cache_clear()
    yield lambda data: (tmp_path / "devices" / "x1.yaml").write_text(
        data if isinstance(data, str) else yaml.safe_dump(data)
    )
    device_module.devices.cache_clear()


def test_a_device_of_the_user_s_own(added, show) -> None:
    added(X1)
    show("NVIDIA X1")
    assert identify.check_claim("nvidia-x1").bandwidth_bytes_per_s == 5e11
    assert load_device("a100").key == "a100-sxm4-80gb"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bandwidth_bytes_per_s": "fast"}, "bandwidth_bytes_per_s"),
        ({"memory_bytes": -1}, "memory_bytes"),
        ({"flops_per_s": {}}, "at least one dtype"),
        ({"flops_per_s": {"bf16": 1e14}}, "unknown dtypes bf16"),
        ({"key": "a100-sxm4-80gb"}, "exists already"),
        ({"colour": "green"}, "colour"),
    ],
)
def test_a_wrong_device_file_is_named(added, change: dict[str, Any], words: str) -> None:
    added(X1 | change)
    with pytest.raises(ArchsearchError, match=words) as raised:
        load_device("a100")
    assert "x1.yaml" in str(raised.value)


def test_a_missing_field_a_broken_file_and_one_that_is_not_ours(added) -> None:
    added({"key": "x"})
    with pytest.raises(ArchsearchError, match="x1.yaml"):
        load_device("a100")
    device_module.devices.cache_clear()
    added("key: [")
    with pytest.raises(ArchsearchError, match="does not describe a device"):
        load_device("a100")
    device_module.devices.cache_clear()
    added("services: {}")
    assert load_device("a100").key == "a100-sxm4-80gb"
