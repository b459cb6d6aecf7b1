"""What a day measures and on what: sizes, the device, its benches and models with random
weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.catalogue import load
from archsearch.architecture.counts import weight_bytes_per_pass
from archsearch.architecture.ops import Gemm
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.hardware.device import Device, devices
from archsearch.hardware.identify import VisibleGpu, gpu_problem, how_to_add, matches, visible_gpus
from archsearch.pipeline.profile.gpu import gpu_dtypes
from archsearch.profiles import Profile, current_stack
from archsearch.profiling import cuda, kernels
from archsearch.profiling.cuda import CudaBench, GpuTimer
from archsearch.profiling.fused import Fused
from archsearch.search.space import SearchSpace, load_space
from archsearch.workload import DTYPE_BYTES
from gpuday.cycles import Clocks, LaunchRunner
from gpuday.runner import data_of

TARGET_SHARE = 0.35
"""Of the memory that the weights of a target may take: one target, its drafts, operand pools and
graphs fit beside it."""


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    `targets`: the first that fits is taken; `paper`: the target of the paper and the devices it is
    split over; `host_shapes`: (layers, hidden size) of the drafts whose launch is timed;
    `patience`: factor on the time that each timing gets.
    """

    targets: Mapping[str, Architecture]
    paper: tuple[str, Architecture, int]
    paper_drafts: Mapping[str, Architecture]
    attention_heads: tuple[tuple[int, int, int], ...] = ((32, 8, 128), (64, 8, 128), (16, 16, 128))
    attention_batches: tuple[int, ...] = (1, 8)
    attention_tokens: tuple[int, ...] = (1, 2, 3, 5, 9, 17)
    contexts: tuple[int, ...] = (512, 2048, 8192)
    context: int = 512
    gammas: tuple[int, ...] = (2, 6)
    host_shapes: tuple[tuple[int, int], ...] = (
        (2, 1024),
        (8, 1024),
        (24, 1024),
        (2, 2048),
        (8, 2048),
    )
    answer_tokens: int = 64
    patience: float = 1.0
    space: SearchSpace = field(default_factory=lambda: load_space("default"))


def real_sizes() -> Sizes:
    """What a GPU is measured with; the drafts of the paper are those of
    benchmarks/paper_llama65b.py."""
    targets = {
        name: load(name).architecture
        for name in ("llama-3.1-8b", "llama-3.2-3b", "llama-3.2-1b", "smollm2-135m")
    }
    names = ("sheared-llama-1.3b", "wide-1.3b", "wide-796m", "wide-543m", "wide-290m", "llama-68m")
    drafts = {name: load(name).architecture for name in names}
    return Sizes(targets, ("llama-65b", load("llama-65b").architecture, 4), drafts)


def cycle_drafts(target: Architecture) -> dict[str, Architecture]:
    """A deep draft, as one takes off the shelf, and a wide one, with the target's vocabulary: 24 x
    896 and 3 x 2048, smaller where the target is."""
    if target.hidden_size < 1024:
        size = target.hidden_size // 2
        head = min(64, size)
        wide = Architecture(size, 2 * size, 2, size // head, size // head, head, target.vocab_size)
        return {"deep": wide.replace(num_hidden_layers=8), "wide": wide}
    return {
        "deep": load("qwen2.5-0.5b").architecture.replace(vocab_size=target.vocab_size),
        "wide": Architecture(2048, 5504, 3, 16, 16, 128, target.vocab_size),
    }


def launch_shape(layers: int, hidden: int, vocab_size: int = 32000) -> Architecture:
    """A Llama-shaped draft whose launch is timed."""
    head = 128 if hidden >= 512 else 16
    ffn, heads = 64 * max(1, round(2.6875 * hidden / 64)), hidden // head
    return Architecture(hidden, ffn, layers, heads, heads, head, vocab_size)


def shard(arch: Architecture, ranks: int) -> Architecture:
    """What one of `ranks` devices computes of a layer of `arch`, as a shape of its own; embedding
    and head stay whole."""
    return arch.replace(
        num_attention_heads=arch.num_attention_heads // ranks,
        num_key_value_heads=arch.num_key_value_heads // ranks,
        intermediate_size=arch.intermediate_size // ranks,
    )


def depth_that_fits(arch: Architecture, dtype: str, free_bytes: float) -> int:
    """Layers of `arch` whose weights take at most `free_bytes`, head included; at most its own, at
    least 1."""
    width = DTYPE_BYTES[dtype]
    one, two = (
        weight_bytes_per_pass(arch.replace(num_hidden_layers=layers), width) for layers in (1, 2)
    )
    layers = 1 + int((free_bytes - one) // (two - one))
    return max(1, min(arch.num_hidden_layers, layers))


def visible_device() -> tuple[VisibleGpu, Device | None]:
    """The first GPU that NVML shows and its row of the device table, None where it has none.

    Raises MissingDataError, one line, where no GPU can be used.
    """
    problem = cuda.cuda_problem() or gpu_problem()
    if problem is not None:
        raise MissingDataError(f"a GPU day needs CUDA: {problem}")
    gpus = visible_gpus()
    for gpu in gpus:
        for device in devices().values():
            if matches(device, gpu):
                return gpu, device
    return gpus[0], None


def placeholder(gpu: VisibleGpu) -> Device:
    """A device that nobody has described, before its speed is measured."""
    key = "".join(letter if letter.isalnum() else "-" for letter in gpu.name.lower())
    return Device(
        key,
        gpu.name,
        "gpu",
        "",
        gpu.memory_bytes,
        1e12,
        {"bfloat16": 1e14, "float16": 1e14},
        note=how_to_add(gpu),
    )


def measured_device(gpu: VisibleGpu, allow_busy: bool) -> Device:
    """A row for a GPU of no device table: its bandwidth and peak as a copy of 1 GiB and a GEMM of
    8192 show them, so its roofline needs no share of a datasheet's peak."""
    bare = placeholder(gpu)
    bench = cuda.open_bench(
        bare, Profile(bare.to_dict(), {}), mode="graph", dtype="float16", allow_busy=allow_busy
    )
    found = torch.cuda.get_device_properties(bench.runner.device)
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    names = ["bfloat16", "float16"] if native else ["float16"]
    return with_measured_speed(
        bare,
        bench,
        names,
        architecture=f"sm_{found.major}{found.minor}",
        last_level_cache_bytes=int(getattr(found, "L2_cache_size", 0)) or None,
        multiprocessors=found.multi_processor_count,
        compute_capability=f"{found.major}.{found.minor}",
        native_bf16=native,
    )


def with_measured_speed(
    device: Device,
    bench: CudaBench,
    dtypes: list[str],
    size: int = 8192,
    copy_bytes: int = 1 << 30,
    **facts: Any,
) -> Device:
    """`device` with the bandwidth and the peak that `bench` sees, over the shares of them that a
    roofline takes."""
    from archsearch.latency.datasheet import BANDWIDTH_SHARE, PEAK_SHARE

    source = torch.empty(copy_bytes, dtype=torch.uint8, device=bench.runner.device)
    copy = torch.empty_like(source)
    timer = bench.timer(dtypes[0])
    copied = timer.time(bench.runner.capture([lambda: copy.copy_(source)]), budget_s=0.3)
    bandwidth = 2 * copy_bytes / min(copied.times_s)
    peaks = {}
    for name in dtypes:
        calls = kernels.graph_calls(Gemm(size, size, size), bench.pool(name), 1, Fused())[:1]
        timed = bench.timer(name).time(bench.runner.capture(calls), budget_s=0.5)
        peaks[name] = 2 * size**3 / min(timed.times_s) / PEAK_SHARE
    sources = {
        "bandwidth": "a device-to-device copy timed here",
        "flops": f"a GEMM of {size} cubed timed here",
    }
    values = device.to_dict() | {
        "bandwidth_bytes_per_s": bandwidth / BANDWIDTH_SHARE,
        "flops_per_s": peaks,
        "sources": sources,
        "unverified": ["bandwidth_bytes_per_s", "flops_per_s"],
    }
    return Device.from_dict(values | facts)


@dataclass
class Day:
    """One process's view of a day: folder, sizes, device (from the identity step), benches that
    share the day's profile."""

    folder: Path
    sizes: Sizes
    check: int = 20
    allow_busy: bool = False
    rehearsal: bool = False
    engine: str | None = None
    engine_python: Path | None = None
    _benches: dict[str, CudaBench] = field(default_factory=dict)

    @cached_property
    def device(self) -> Device:
        """As the identity step wrote it."""
        found = data_of(self.folder, "identity")
        if not found:
            raise ArchsearchError(
                f"{self.folder} has no identity yet; run the day without --compare-only first"
            )
        return Device.from_dict(found["device"])

    @property
    def profile_folder(self) -> Path:
        return self.folder / "profile"

    @cached_property
    def dtype(self) -> str:
        return gpu_dtypes(self.device, "graph", ())[0]

    @cached_property
    def target(self) -> tuple[str, Architecture]:
        """The largest of `sizes.targets` that leaves room; the last one where none does."""
        limit, width = TARGET_SHARE * self.device.memory_bytes, DTYPE_BYTES[self.dtype]
        known = list(self.sizes.targets.items())
        return next(
            (item for item in known if weight_bytes_per_pass(item[1], width) <= limit), known[-1]
        )

    def bench(self, mode: str) -> CudaBench:
        """The bench of a mode. Rows that a step records go to the day's profile."""
        if mode not in self._benches:
            for known in self._benches.values():
                profile = known.profile
                break
            else:
                profile = Profile.open(self.profile_folder, self.device.to_dict(), current_stack())
            self._benches[mode] = cuda.open_bench(
                self.device, profile, mode=mode, dtype=self.dtype, allow_busy=self.allow_busy
            )
        return self._benches[mode]

    def clocks(self) -> Clocks:
        """The three timers of the day's dtype."""
        graph, eager = self.bench("graph"), self.bench("eager")
        timer = eager.timer(self.dtype)
        launch = GpuTimer(LaunchRunner(eager.runner), timer.probe, timer.reference_s)
        return Clocks(graph.timer(self.dtype), timer, launch, graph.runner)

    def fused(self) -> Fused:
        """The small kernels as engines fuse them, where they can be compiled here."""
        from archsearch.profiling.fused import fused_for

        return fused_for(self.bench("graph").runner.device, getattr(torch, self.dtype))

    def free_bytes(self) -> float:
        """What the device has left for a model; in a rehearsal a little."""
        runner = self.bench("graph").runner
        runner.release()
        if runner.device.type != "cuda":
            return 64e6
        return float(torch.cuda.mem_get_info(runner.device)[0])

    def forget_benches(self) -> None:
        """Give their memory back. Rows that others write meanwhile are read when the next bench is
        asked for."""
        while self._benches:
            self._benches.popitem()[1].release()
