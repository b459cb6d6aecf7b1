"""Does it fit: weights and KV caches of a target and its draft on a device, also under tensor parallelism.

Counted is the fullest device: it holds one shard of the target and the whole draft, which engines run on one rank
(`draft_tensor_parallel_size` 1) unless told otherwise. vLLM 0.32 shards the draft as well: there this counts a little too much.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import kv_cache_bytes, parameters
from archsearch.architecture.ops import shard_kv_heads, shard_size
from archsearch.drafters.drafter import Draft, Drafter
from archsearch.hardware.device import Device
from archsearch.workload import Workload

# The rest: activations, workspaces, fragmentation, the runtime itself (vLLM's gpu_memory_utilization).
USABLE_FRACTION: Final = 0.9


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes on the fullest device. The `_kv_bytes` are for the workload's batch and context."""

    target_weight_bytes: int
    draft_weight_bytes: int
    target_kv_bytes: int
    draft_kv_bytes: int

    @property
    def weight_bytes(self) -> int:
        return self.target_weight_bytes + self.draft_weight_bytes

    @property
    def kv_bytes(self) -> int:
        return self.target_kv_bytes + self.draft_kv_bytes

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes


def shard(arch: Architecture, ranks: int) -> Architecture:
    """What one rank of `ranks` holds: its heads, FFN columns and vocabulary rows; KV heads fewer than the ranks are replicated.

    Norms, positions and output biases stay whole. Raises InvalidShapeError when heads or FFN do not divide.
    """
    if ranks == 1:
        return arch
    return arch.replace(
        num_attention_heads=shard_size(arch.num_attention_heads, ranks, "num_attention_heads"),
        intermediate_size=shard_size(arch.intermediate_size, ranks, "intermediate_size"),
        num_key_value_heads=shard_kv_heads(arch.num_key_value_heads, ranks),
        vocab_size=-(-arch.vocab_size // ranks),
        draft_vocab_size=None if arch.draft_vocab_size is None else -(-arch.draft_vocab_size // ranks),
    )


def memory_bytes(target: Architecture, draft: Draft | None, workload: Workload) -> MemoryUse:
    """Bytes of weights and KV cache on the fullest device; `draft` None prices the target alone."""
    part = shard(target, workload.tensor_parallel)
    size, context, batch = workload.dtype_bytes, workload.context_len, workload.batch_size
    weights, cache = 0, 0
    if isinstance(draft, Drafter):
        weights = draft.bytes(size, batch, 0)
        cache = draft.bytes(size, batch, context) - weights
    elif draft is not None:
        weights, cache = parameters(draft) * size, kv_cache_bytes(draft, context, size, batch)
    return MemoryUse(
        target_weight_bytes=parameters(part) * size,
        draft_weight_bytes=weights,
        target_kv_bytes=kv_cache_bytes(part, context, size, batch),
        draft_kv_bytes=cache,
    )


def usable_bytes(device: Device, usable_fraction: float = USABLE_FRACTION) -> float:
    """Memory of `device` that weights and caches may take."""
    return device.memory_bytes * usable_fraction


def fits(
    target: Architecture, draft: Draft | None, workload: Workload, device: Device, usable_fraction: float = USABLE_FRACTION
) -> bool:
    """Whether weights and caches fit into the usable part of the device's memory."""
    return memory_bytes(target, draft, workload).total_bytes <= usable_bytes(device, usable_fraction)


def max_batch_size(
    target: Architecture, draft: Draft | None, workload: Workload, device: Device, usable_fraction: float = USABLE_FRACTION
) -> int:
    """The most sequences of `workload.context_len` tokens that fit; 0 when not even one does. The workload's batch is ignored.

    At a context of 0 the cache takes nothing and every batch fits: one token per sequence is counted instead.
    """
    one = replace(workload, batch_size=1, context_len=max(1, workload.context_len))
    use = memory_bytes(target, draft, one)
    return max(0, int((usable_bytes(device, usable_fraction) - use.weight_bytes) // use.kv_bytes))


def max_context_len(
    target: Architecture, draft: Draft | None, workload: Workload, device: Device, usable_fraction: float = USABLE_FRACTION
) -> int:
    """The longest context at `workload.batch_size` that fits, at most what both models have positions for; 0 when none fits."""
    drafting = draft.architecture if isinstance(draft, Drafter) else draft
    longest = min(arch.max_position_embeddings for arch in (target, drafting) if arch)
    return _largest(longest, lambda length: fits(target, draft, replace(workload, context_len=length), device, usable_fraction))


def _largest(limit: int, allowed: Callable[[int], bool]) -> int:
    """The largest value in 0..limit that is allowed, where everything below an allowed value is; 0 when none is."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if allowed(middle) else (low, middle - 1)
    return low
