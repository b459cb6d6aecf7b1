"""Which device is this: CPUs from written-down /proc and /sys trees, GPUs from a fake NVML."""

import sys
from types import SimpleNamespace

import pytest

from archsearch.errors import ArchsearchError
from archsearch.hardware import identify
from archsearch.hardware.device import load_device

EPYC = """processor	: 0
vendor_id	: AuthenticAMD
cpu family	: 25
model		: 17
model name	: AMD EPYC
cpu MHz		: 2596.134
bogomips	: 5192.26
flags		: fpu avx2 avx512f avx512_bf16

processor	: 1
model name	: another
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A file system of two cores that share an L3; eight threads are available to this process."""

    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    write("proc/cpuinfo", EPYC)
    write("proc/meminfo", "MemTotal:       8388608 kB\nMemFree: 1 kB\n")
    for cpu in (0, 1):
        own = [
            ("1", "Data", "32K", cpu),
            ("1", "Instruction", "32K", cpu),
            ("2", "Unified", "1024K", cpu),
        ]
        for index, (level, kind, size, shared) in enumerate(
            [*own, ("3", "Unified", "32768K", "0-1")]
        ):
            folder = f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
            for name, value in (
                ("level", level),
                ("type", kind),
                ("size", size),
                ("shared_cpu_list", str(shared)),
            ):
                write(f"{folder}/{name}", value + "\n")
    monkeypatch.setattr(identify, "available_threads", lambda root=None: 8)
    return SimpleNamespace(root=tmp_path, write=write)


def test_cpu(machine):
    cpu = identify.identify_cpu(2, machine.root)
    assert cpu.key == "cpu-amd-epyc-f25m17-2t"
    assert (
        cpu.kind == "cpu" and cpu.threads == 2 and cpu.native_bf16 and cpu.vendor == "AuthenticAMD"
    )
    assert cpu.last_level_cache_bytes == 32 * 2**20
    assert cpu.memory_bytes == 8 * 2**30
    assert cpu.unverified == ("flops_per_s", "bandwidth_bytes_per_s")
    assert cpu == identify.identify_cpu(2, machine.root)
    assert identify.identify_cpu(None, machine.root).threads == 8


def test_two_l3_slices_add_up(machine):
    for cpu in (0, 1):
        machine.write(f"sys/devices/system/cpu/cpu{cpu}/cache/index3/shared_cpu_list", f"{cpu}\n")
    assert identify.identify_cpu(2, machine.root).last_level_cache_bytes == 64 * 2**20


def test_a_container_limits_memory(machine):
    machine.write("sys/fs/cgroup/memory.max", f"{2**30}\n")
    assert identify.identify_cpu(1, machine.root).memory_bytes == 2**30
    machine.write("sys/fs/cgroup/memory.max", "max\n")
    assert identify.identify_cpu(1, machine.root).memory_bytes == 8 * 2**30


@pytest.mark.parametrize(
    ("limit", "threads"), [("100000 100000", 1), ("50000 100000", 1), ("max 100000", None)]
)
def test_a_container_limits_threads(tmp_path, limit, threads):
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text(limit + "\n")
    unlimited = identify.available_threads(tmp_path / "none")
    assert identify.available_threads(tmp_path) == (threads or unlimited)


def test_bf16_is_read_from_the_flags(machine):
    machine.write("proc/cpuinfo", EPYC.replace(" avx512_bf16", ""))
    plain = identify.identify_cpu(2, machine.root)
    assert not plain.native_bf16 and plain.flops_per_s["bfloat16"] == plain.flops_per_s["float32"]
    machine.write("proc/cpuinfo", EPYC.replace("avx512_bf16", "amx_bf16"))
    assert identify.identify_cpu(2, machine.root).native_bf16


@pytest.mark.parametrize(
    ("model", "slug"),
    [
        ("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "intel-xeon-platinum-8481c"),
        ("AMD EPYC 7763 64-Core Processor", "amd-epyc-7763"),
        ("Intel(R) Core(TM) i7-9750H CPU @ 2.60GHz", "intel-core-i7-9750h"),
        ("Apple M2", "apple-m2"),
    ],
)
def test_slugs(machine, model, slug):
    machine.write("proc/cpuinfo", EPYC.replace("AMD EPYC", model))
    assert identify.identify_cpu(4, machine.root).key == f"cpu-{slug}-f25m17-4t"


def test_arm(machine):
    fields = {
        "processor": "0",
        "BogoMIPS": "243.75",
        "Features": "fp asimd bf16",
        "CPU implementer": "0x41",
        "CPU part": "0xd40",
    }
    machine.write("proc/cpuinfo", "".join(f"{key}\t: {value}\n" for key, value in fields.items()))
    cpu = identify.identify_cpu(2, machine.root)
    assert cpu.key.endswith("-i41pd40-2t") and cpu.native_bf16
    assert cpu.flops_per_s["float32"] > 1e10  # ARM's bogomips is no clock


def test_without_proc(tmp_path):
    cpu = identify.identify_cpu(1, tmp_path)
    assert cpu.key.startswith("cpu-") and cpu.key.endswith("-1t")
    assert {"last_level_cache_bytes", "memory_bytes"} <= set(cpu.unverified)
    assert cpu.last_level_cache_bytes > 0 and cpu.memory_bytes > 0


def test_this_machine():
    cpu = identify.identify_cpu(1)
    assert cpu.memory_bytes > 2**28 and cpu.last_level_cache_bytes >= 2**18


@pytest.mark.parametrize("threads", [0, -1, 9])
def test_impossible_threads(machine, threads):
    with pytest.raises(ArchsearchError, match="between 1 and 8"):
        identify.identify_cpu(threads, machine.root)


class NVMLError(Exception):
    pass


def fake_nvml(gpus, *, error=False, as_bytes=False):
    def init():
        if error:
            raise NVMLError("driver not loaded")

    def text(value):
        return value.encode() if as_bytes else value

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: text("570.1"),
        nvmlDeviceGetCount=lambda: len(gpus),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: text(gpus[handle][0]),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=gpus[handle][1] * 2**20),
    )


@pytest.fixture
def show(monkeypatch):
    return lambda *gpus, **kwargs: monkeypatch.setitem(
        sys.modules, "pynvml", fake_nvml(gpus, **kwargs)
    )


A100 = ("NVIDIA A100-SXM4-80GB", 81920)  # what NVML prints; CUDA reports 81251 MiB
A100_40 = ("NVIDIA A100-SXM4-40GB", 40960)


def test_no_driver_no_gpus(show, monkeypatch):
    show(error=True)
    assert identify.visible_gpus() == []
    monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it fails
    assert identify.visible_gpus() == []


@pytest.mark.parametrize("as_bytes", [False, True])
def test_visible_gpus(show, as_bytes):
    show(A100, A100_40, as_bytes=as_bytes)
    gpus = identify.visible_gpus()
    assert [gpu.name for gpu in gpus] == [A100[0], A100_40[0]]
    assert gpus[1] == identify.VisibleGpu(1, "NVIDIA A100-SXM4-40GB", 40960 * 2**20, "570.1")


@pytest.mark.parametrize("claim", ["a100", "a100-sxm4-80gb", "A100-80GB"])
def test_a_true_claim(show, claim):
    show(A100)
    assert identify.check_claim(claim) is load_device("a100-sxm4-80gb")


# Total memory as nvidia-smi is known to print it for these cards; the table mostly holds CUDA's
# slightly smaller figure.
SMI_MIB = {
    "a100-sxm4-40gb": 40960,
    "h100-sxm5-80gb": 81559,
    "h200-sxm-141gb": 143771,
    "h100-nvl-94gb": 95830,
    "b200-sxm": 183359,
    "l4": 23034,
    "l40s": 46068,
    "a10": 23028,
    "a10g": 23028,
    "t4": 15360,
    "v100-sxm2-16gb": 16384,
    "v100-sxm2-32gb": 32768,
    "rtx3090": 24576,
    "rtx4090": 24564,
}


@pytest.mark.parametrize(("key", "mib"), SMI_MIB.items())
def test_memory_as_nvidia_smi_prints_it_is_recognised(show, key, mib):
    show((load_device(key).name, mib))
    assert identify.check_claim(key).key == key


def test_a_false_claim_says_what_is_here_and_what_fits(show):
    show(A100_40)
    with pytest.raises(ArchsearchError) as error:
        identify.check_claim("a100")
    message = str(error.value)
    assert "NVIDIA A100-SXM4-80GB" in message and "NVIDIA A100-SXM4-40GB with 40960 MiB" in message
    assert "--gpu a100-sxm4-40gb" in message and "\n" not in message


@pytest.mark.parametrize(
    "gpu",
    [
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 81920),
        ("NVIDIA A100-SXM4-80GB", 9728),
        ("NVIDIA A100-SXM4", 81920),
    ],
    ids=["name longer", "memory of a slice", "name shorter"],
)
def test_never_by_substring_or_by_name_alone(show, gpu):
    show(gpu)
    with pytest.raises(ArchsearchError, match="not in the device table"):
        identify.check_claim("a100")


def test_claims_without_a_gpu(show, machine):
    show(error=True)
    with pytest.raises(ArchsearchError, match="--gpu cpu"):
        identify.check_claim("h100")
    cpu = identify.check_claim("cpu", threads=1)
    assert cpu.kind == "cpu" and identify.check_claim(cpu.key) == cpu
    with pytest.raises(ArchsearchError, match=cpu.key[:12]):
        identify.check_claim("cpu-z80-1t")
    with pytest.raises(ArchsearchError, match="a100"):
        identify.check_claim("a101")


def test_a_search_needs_no_gpu(show):
    show(error=True)
    assert identify.resolve_device("b200").key == "b200-sxm"
    assert identify.resolve_device("cpu").kind == "cpu"
