"""What the target and the draft are asked to do: batch size, context, parallelism, precision, sampling."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from archsearch.errors import ArchsearchError

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
DTYPE_ALIASES: Final = {
    "fp32": "float32",
    "f32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp8": "float8_e4m3fn",
}
MEMORY_FRACTION: Final = 0.9  # of a device that weights, caches and activations may take (vLLM's gpu_memory_utilization)
Mode = Literal["eager", "graph"]
MODES: Final[tuple[Mode, ...]] = ("eager", "graph")


def dtype_name(text: str) -> str:
    """The canonical (torch) name of a dtype; accepts `bf16`, `fp32`, ... Raises ArchsearchError for an unknown one.

    >>> dtype_name("bf16")
    'bfloat16'
    """
    name = DTYPE_ALIASES.get(text, text)
    if name not in DTYPE_BYTES:
        raise ArchsearchError(f"unknown dtype {text!r}; use one of {', '.join([*DTYPE_BYTES, *DTYPE_ALIASES])}")
    return name


@dataclass(frozen=True, slots=True)
class Workload:
    """One decoding regime.

    `context_len`: tokens already in the KV cache; `mode`: `eager` (transformers) or `graph` (CUDA graphs).
    `draft_tensor_parallel`: devices that share the draft, 1 or all that share the target; None: as the engine does it.
    """

    batch_size: int = 1
    context_len: int = 512
    tensor_parallel: int = 1
    dtype: str = "bfloat16"
    mode: str = "eager"
    temperature: float = 0.0
    draft_tensor_parallel: int | None = None
    memory_fraction: float = MEMORY_FRACTION

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        if self.mode not in MODES:
            raise ArchsearchError(f"unknown mode {self.mode!r}; use one of {', '.join(MODES)}")
        if self.batch_size < 1 or self.context_len < 0 or self.tensor_parallel < 1:
            raise ArchsearchError(
                f"batch_size and tensor_parallel must be at least 1 and context_len at least 0, got "
                f"{self.batch_size}, {self.tensor_parallel}, {self.context_len}"
            )
        if self.draft_tensor_parallel not in (None, 1, self.tensor_parallel):
            raise ArchsearchError(
                f"the draft runs on 1 device or on all {self.tensor_parallel} of the target, not on {self.draft_tensor_parallel}"
            )
        if not 0.0 < self.memory_fraction <= 1.0:
            raise ArchsearchError(f"the memory fraction must lie between 0 and 1, got {self.memory_fraction}")
        if not 0.0 <= self.temperature <= 5.0:
            raise ArchsearchError(f"temperature must lie between 0 and 5, got {self.temperature}")

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one weight."""
        return DTYPE_BYTES[self.dtype]


Objective = Literal["speedup", "tpot", "throughput", "tokens_per_device"]
OBJECTIVES: Final[tuple[Objective, ...]] = get_args(Objective)


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What was asked of a load besides the workload: a mix from a file, what is to be made best, and limits that must hold in
    every part of it (None: nothing asked, or as the file says)."""

    workload: Path | None = None
    objective: Objective | None = None
    max_tpot_ms: float | None = None
    max_ttft_ms: float | None = None
    max_memory_gib: float | None = None  # of the draft: weights and caches, over all ranks
    max_parameters: float | None = None
    max_training_exaflop: float | None = None

    @property
    def asks(self) -> bool:
        """Whether anything is asked."""
        return self != LoadRequest()


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """What was asked of a workload and of the machine that serves it; None: chosen from the profile and the target.

    A chosen dtype is the one in which the target decodes fastest (of equals: verifies cheapest), a chosen mode that of the
    device's usual engine, a chosen `tensor_parallel` the fewest devices that hold the target. `pipeline.latency.choose_latency`
    makes a `Workload` of it.
    """

    gpu: str | None = None  # an alias or key of a device; None: cpu, or the device of `profile`
    profile: Path | None = None  # a profile folder, instead of the device's own
    batch_size: int = 1
    context_len: int = 256  # tokens in the KV cache
    temperature: float = 0.0
    tensor_parallel: int | None = None
    draft_tensor_parallel: int | None = None  # None: as the engine does it
    memory_fraction: float = MEMORY_FRACTION  # of each device, for weights, caches and activations
    dtype: str | None = None
    mode: Mode | None = None
    engine: str | None = None  # who serves; None: vllm on a GPU, transformers on a CPU
    engine_version: str | None = None  # None: the newest that is known
    engine_options: tuple[str, ...] = ()  # the engine's switches that matter to a round, as NAME=VALUE
    routing_skew: float | None = None  # how unevenly tokens choose experts, 0: evenly; None: as usual (`architecture.experts`)
