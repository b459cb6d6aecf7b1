"""What the target and the draft are asked to do: batch size, context, parallelism, precision,
sampling."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from archsearch.errors import ArchsearchError
from archsearch.records import Maybe

GGUF_DTYPES: Final = {
    "q8_0": 1.0,
    "q4_0": 18 / 32,
    "q4_1": 20 / 32,
    "q5_0": 22 / 32,
    "q5_1": 24 / 32,
    "q2_k": 84 / 256,
    "q3_k_s": 110 / 256,
    "q3_k_m": 110 / 256,
    "q3_k_l": 110 / 256,
    "q4_k_s": 144 / 256,
    "q4_k_m": 144 / 256,
    "q5_k_s": 176 / 256,
    "q5_k_m": 176 / 256,
    "q6_k": 210 / 256,
}
"""Bytes of a weight with its scales, of the formats in which nobody but llama.cpp computes: passes
are in them, all else (a KV cache, the model in Python) is not. Of a block of 32 or 256 (ggml; the
scales of Q8_0 are not counted); files of K-quants keep some matrices in wider ones."""
DTYPE_BYTES: Final[dict[str, float]] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    **GGUF_DTYPES,
}
"""Bytes of a number in a dtype."""
WEIGHT_BYTES: Final = {
    "float8_e4m3fn": 1.0,
    "int8": 1.0,
    "nvfp4": 0.5625,
    "nf4": 0.5625,
    "mxfp4": 0.53125,
    "int4": 0.52,
}
"""Bytes of a weight with its scales, of the formats that weights are kept in while all else of a
pass is in 16 bits. NVFP4: 4 bits and a scale of 8 for each 16; MXFP4: for each 32 (OCP MX 1.0);
int4: a scale of 16 bits and a zero of 4 for each 128 (AWQ, GPTQ); nf4: a scale of 32 bits for each
64 (bitsandbytes)."""
DTYPE_ALIASES: Final = {
    "fp32": "float32",
    "f32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "fp8": "float8_e4m3fn",
}
# of a device that weights, caches and activations may take (vLLM's gpu_memory_utilization)
MEMORY_FRACTION: Final = 0.9
Mode = Literal["eager", "graph"]
MODES: Final[tuple[Mode, ...]] = ("eager", "graph")


def dtype_name(text: str, formats: Collection[str] = ()) -> str:
    """The canonical (torch) name of a dtype, or one of `formats`; accepts `bf16`, `F16`, ... Raises
    ArchsearchError for an unknown one.

    >>> dtype_name("bf16"), dtype_name("Q4_K_M")
    ('bfloat16', 'q4_k_m')
    """
    name = DTYPE_ALIASES.get(text.lower(), text.lower())
    if name not in DTYPE_BYTES and name not in formats:
        known = ", ".join([*DTYPE_BYTES, *DTYPE_ALIASES, *formats])
        raise ArchsearchError(f"unknown dtype {text!r}; use one of {known}")
    return name


def served_name(text: str) -> str:
    """`dtype_name`, or the name of a format of weights alone (WEIGHT_BYTES): what `--dtype` of a
    target may be. Raises ArchsearchError for an unknown one.

    >>> served_name("nvfp4"), served_name("fp8")
    ('nvfp4', 'float8_e4m3fn')
    """
    return dtype_name(text, [name for name in WEIGHT_BYTES if name not in DTYPE_BYTES])


@dataclass(frozen=True, slots=True)
class Workload:
    """One decoding regime.

    `context_len`: tokens already in the KV cache; `mode`: `eager` (transformers) or `graph` (CUDA
    graphs). `draft_tensor_parallel`: devices that share the draft, 1 or all that share the target;
    None: as the engine does it. `cache_dtype`: of the KV caches, `draft_dtype`: of drafts that do
    not come with the target; None: `dtype`.
    """

    batch_size: int = 1
    context_len: int = 512
    tensor_parallel: int = 1
    dtype: str = "bfloat16"
    mode: str = "eager"
    temperature: float = 0.0
    draft_tensor_parallel: int | None = None
    memory_fraction: float = MEMORY_FRACTION
    cache_dtype: str | None = None
    draft_dtype: Maybe[str] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        if self.mode not in MODES:
            raise ArchsearchError(f"unknown mode {self.mode!r}; use one of {', '.join(MODES)}")
        if self.batch_size < 1 or self.context_len < 0 or self.tensor_parallel < 1:
            raise ArchsearchError(
                "batch_size and tensor_parallel must be at least 1 and context_len at least 0, got"
                f" {self.batch_size}, {self.tensor_parallel}, {self.context_len}"
            )
        if self.draft_tensor_parallel not in (None, 1, self.tensor_parallel):
            raise ArchsearchError(
                f"the draft runs on 1 device or on all {self.tensor_parallel} of the target, not on"
                f" {self.draft_tensor_parallel}"
            )
        if not 0.0 < self.memory_fraction <= 1.0:
            raise ArchsearchError(
                f"the memory fraction must lie between 0 and 1, got {self.memory_fraction}"
            )
        if not 0.0 <= self.temperature <= 5.0:
            raise ArchsearchError(f"temperature must lie between 0 and 5, got {self.temperature}")

    @property
    def dtype_bytes(self) -> float:
        """Bytes of one weight."""
        return DTYPE_BYTES[self.dtype]

    @property
    def draft_bytes(self) -> float:
        """Bytes of one weight of such a draft."""
        return DTYPE_BYTES[self.draft_dtype or self.dtype]

    @property
    def cache_bytes(self) -> int:
        """Bytes of one number in a KV cache; llama.cpp keeps 16 bits beside any weights."""
        usual = "float16" if self.dtype in GGUF_DTYPES else self.dtype
        return int(DTYPE_BYTES[self.cache_dtype or usual])


Objective = Literal["speedup", "tpot", "throughput", "tokens_per_device"]
OBJECTIVES: Final[tuple[Objective, ...]] = get_args(Objective)


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What was asked of a load besides the workload: a mix from a file, what is to be made best,
    and limits that must hold in every part of it (None: nothing asked, or as the file says)."""

    workload: Path | None = None
    objective: Objective | None = None
    max_tpot_ms: float | None = None
    max_ttft_ms: float | None = None
    max_memory_gib: float | None = None  # of the draft: weights and caches, over all ranks
    max_parameters: float | None = None

    @property
    def asks(self) -> bool:
        """Whether anything is asked but the usual objective."""
        return self not in (LoadRequest(), LoadRequest(objective="speedup"))


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """What was asked of a workload and of the machine that serves it; None: chosen from the profile
    and the target.

    A chosen dtype is the one in which the target decodes fastest (of equals: verifies cheapest), a
    chosen mode that of the device's usual engine, a chosen `tensor_parallel` the fewest devices
    that hold the target. `pipeline.latency.choose_latency` makes a `Workload` of it.
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
    draft_dtype: str | None = None  # None: as the engine keeps drafts (`serving.dtype_of_drafts`)
    mode: Mode | None = None
    engine: str | None = None  # who serves; None: vllm on a GPU, transformers on a CPU
    engine_version: str | None = None  # None: the newest that is known
    # the engine's switches that matter to a round, as NAME=VALUE
    engine_options: tuple[str, ...] = ()
    # how fast the engine's host is: slow, usual, fast, or a factor on its times
    host: str | None = None
    # how unevenly tokens choose experts, 0: evenly; None: as usual (`architecture.experts`)
    routing_skew: float | None = None
