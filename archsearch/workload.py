"""What the target and the draft are asked to do: batch size, context, parallelism, precision, sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

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
MODES: Final = ("eager", "graph")


def dtype_name(text: str) -> str:
    """The canonical (torch) name of a dtype; accepts `bf16`, `fp32`, ..."""
    name = DTYPE_ALIASES.get(text, text)
    if name not in DTYPE_BYTES:
        raise ArchsearchError(f"unknown dtype {text!r}; use one of {', '.join([*DTYPE_BYTES, *DTYPE_ALIASES])}")
    return name


@dataclass(frozen=True, slots=True)
class Workload:
    """One decoding regime.

    `context_len`: tokens already in the KV cache; `mode`: `eager` (transformers) or `graph` (CUDA graphs).
    """

    batch_size: int = 1
    context_len: int = 512
    tensor_parallel: int = 1
    dtype: str = "bfloat16"
    mode: str = "eager"
    temperature: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        if self.mode not in MODES:
            raise ArchsearchError(f"unknown mode {self.mode!r}; use one of {', '.join(MODES)}")
        if self.batch_size < 1 or self.context_len < 0 or self.tensor_parallel < 1:
            raise ArchsearchError(
                f"batch_size and tensor_parallel must be at least 1 and context_len at least 0, got "
                f"{self.batch_size}, {self.tensor_parallel}, {self.context_len}"
            )
        if not 0.0 <= self.temperature <= 5.0:
            raise ArchsearchError(f"temperature must lie between 0 and 5, got {self.temperature}")

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]
