"""Does it fit: weights and KV caches of a target and its draft on a device, also under tensor
parallelism.

Counted is the fullest device. It holds one shard of the target, and the whole draft where that runs
on one rank (the default; `Workload.draft_tensor_parallel` says otherwise). Every rank keeps the
same tokens in its cache, so a draft on one rank of four takes room from that of the other three.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any, Final

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import kv_cache_bytes, weight_bytes
from archsearch.architecture.experts import ExpertLayout, expert_layout
from archsearch.architecture.ops import shard_kv_heads, shard_size
from archsearch.drafters.drafter import Draft, Drafter
from archsearch.hardware.device import Device
from archsearch.workload import Workload

# vLLM's max_num_batched_tokens for servers on large GPUs; a step reads no more of prompts
STEP_TOKENS: Final = 8192
SEQUENCES: Final = 256  # of them sampled at once: vLLM's max_num_seqs


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes on the fullest device. The `_kv_bytes` are for the workload's batch and context."""

    target_weight_bytes: int
    draft_weight_bytes: int
    target_kv_bytes: int
    draft_kv_bytes: int

    @property
    def weight_bytes(self) -> int:
        """Weights of target and draft on one device, bytes."""
        return self.target_weight_bytes + self.draft_weight_bytes

    @property
    def kv_bytes(self) -> int:
        """KV caches of target and draft on one device, bytes."""
        return self.target_kv_bytes + self.draft_kv_bytes

    @property
    def total_bytes(self) -> int:
        """Weights and caches, bytes."""
        return self.weight_bytes + self.kv_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What the fullest device holds, in bytes, and how much that leaves for requests.

    `token_bytes` and `draft_token_bytes`: caches of one token of one request on that device (before
    windows cut them); `cached_tokens`: tokens that all caches hold together; `requests`: of the
    workload's context at once; `longest`: the longest context at the workload's batch size, at most
    what the models have positions for. 0: does not fit.
    """

    usable_bytes: float
    target_weight_bytes: int
    draft_weight_bytes: int
    activation_bytes: int
    token_bytes: int
    draft_token_bytes: int
    cached_tokens: int
    requests: int
    longest: int


def shard(arch: Architecture, ranks: int) -> Architecture:
    """What one rank of `ranks` holds: its heads, FFN columns and vocabulary rows; KV heads fewer
    than the ranks are replicated.

    Norms, positions and output biases stay whole. Raises InvalidShapeError when heads or FFN do not
    divide.
    """
    if ranks == 1:
        return arch
    heads = shard_size(arch.num_attention_heads, ranks, "num_attention_heads")
    ffn = -(-arch.intermediate_size // ranks)
    if not arch.num_experts or arch.moe_layers < arch.num_hidden_layers:
        ffn = shard_size(arch.intermediate_size, ranks, "intermediate_size")
    kv_heads = shard_kv_heads(arch.num_key_value_heads, ranks)
    layout = expert_layout(arch, ranks) if arch.num_experts else ExpertLayout()
    local = arch.num_experts // layout.expert_ranks
    return arch.replace(
        num_attention_heads=heads,
        intermediate_size=ffn,
        num_key_value_heads=kv_heads,
        num_experts=local,
        num_experts_per_tok=min(arch.num_experts_per_tok, local),
        moe_intermediate_size=arch.moe_intermediate_size // layout.tensor_ranks,
        shared_expert_size=shard_size(arch.shared_expert_size, ranks, "shared_expert_size"),
        vocab_size=-(-arch.vocab_size // ranks),
        draft_vocab_size=None
        if arch.draft_vocab_size is None
        else -(-arch.draft_vocab_size // ranks),
    )


def memory_bytes(target: Architecture, draft: Draft | None, workload: Workload) -> MemoryUse:
    """Bytes of weights and KV cache on the fullest device; `draft` None prices the target alone."""
    part = shard(target, workload.tensor_parallel)
    size, context, batch = workload.dtype_bytes, workload.context_len, workload.batch_size
    ranks = workload.draft_tensor_parallel or 1
    draft = draft.model or draft if isinstance(draft, Drafter) else draft
    weights, cache = 0, 0
    # not a model: shared evenly, its few whole parts counted as shared too
    if isinstance(draft, Drafter):
        weights = -(-draft.bytes(workload, batch, 0) // ranks)
        cache = -(-draft.bytes(workload, batch, context) // ranks) - weights
    elif draft is not None:
        draft = shard(draft, ranks)
        weights = weight_bytes(draft, workload.draft_bytes)
        cache = kv_cache_bytes(draft, context, workload.cache_bytes, batch)
    return MemoryUse(
        target_weight_bytes=weight_bytes(part, size),
        draft_weight_bytes=weights,
        target_kv_bytes=kv_cache_bytes(part, context, workload.cache_bytes, batch),
        draft_kv_bytes=cache,
    )


def activation_bytes(target: Architecture, workload: Workload) -> int:
    """The most that one step of STEP_TOKENS tokens, SEQUENCES of which are sampled, keeps beside
    weights and caches on one rank.

    Of a layer: its input, the residual, and the larger of attention's and the feed-forward
    network's tensors; at the end logits of the sampled tokens in float32, with two copies
    (probabilities, sorted). Engines measure it as they start.
    """
    part = shard(target, workload.tensor_parallel)
    attention = part.q_size * 2 + 2 * part.kv_size
    network = (3 if target.gated_mlp else 2) * part.intermediate_size
    layer = STEP_TOKENS * (2 * target.hidden_size + max(attention, network)) * workload.dtype_bytes
    return max(int(layer), 0) + 3 * 4 * SEQUENCES * target.vocab_size


def memory_plan(
    target: Architecture, draft: Draft | None, workload: Workload, device: Device
) -> MemoryPlan:
    """What fits on `workload.tensor_parallel` devices, with the activations of a serving engine's
    steps; of a CPU's memory without them. At a context of 0 a cache of one token a request is
    counted."""
    use, activations, room = _room(target, draft, replace(workload, context_len=1), device)
    lengths = range(1, _positions(target, draft) + 1)

    def too_long(length: int) -> bool:
        return memory_bytes(target, draft, replace(workload, context_len=length)).kv_bytes > room

    return MemoryPlan(
        usable_bytes=usable_bytes(device, workload),
        target_weight_bytes=use.target_weight_bytes,
        draft_weight_bytes=use.draft_weight_bytes,
        activation_bytes=activations,
        token_bytes=use.target_kv_bytes,
        draft_token_bytes=use.draft_kv_bytes,
        cached_tokens=max(0, int(room // max(use.kv_bytes, 1))),
        requests=held_requests(target, draft, workload, device),
        longest=bisect_left(lengths, True, key=too_long) if room > 0 else 0,
    )


def _positions(target: Architecture, draft: Draft | None) -> int:
    """Of the model that has fewer."""
    shapes = (target, draft.architecture if isinstance(draft, Drafter) else draft)
    return min(arch.max_position_embeddings for arch in shapes if arch is not None)


def cut_context(
    target: Architecture, draft: Draft | None, workload: Workload, device: Device
) -> int | None:
    """What one request's context is to be cut to where a GPU's memory holds less than the models
    have positions for, which engines refuse to serve, or the draft's end before the target's,
    beyond which they stop; None where neither is so, or nothing fits.

    An eighth is left to CUDA graphs and the GPU's own context, which are not counted.
    """
    if device.is_cpu:
        return None
    longest = memory_plan(target, draft, replace(workload, batch_size=1), device).longest
    cut = both = _positions(target, draft)
    if longest < both:
        cut = longest * 7 // 8
        cut = max(cut // 256 * 256 or cut, min(longest, workload.context_len))
    return cut if 0 < cut < target.max_position_embeddings else None


def held_requests(
    target: Architecture, draft: Draft | None, workload: Workload, device: Device
) -> Any:
    """How many requests of the workload's context fit at once beside weights and activations; of
    each draft of a grid an array."""
    import numpy as np

    use, _, room = _room(target, draft, workload, device)
    held = np.maximum(0, room // np.maximum(use.kv_bytes, 1)).astype(np.int64)
    return held if np.ndim(held) else int(held)


def _room(
    target: Architecture, draft: Draft | None, workload: Workload, device: Device
) -> tuple[MemoryUse, int, float]:
    """What one request of the workload's context takes, the activations of a GPU, and the bytes
    that weights and these leave."""
    one = replace(workload, batch_size=1, context_len=max(1, workload.context_len))
    use = memory_bytes(target, draft, one)
    activations = 0 if device.is_cpu else activation_bytes(target, workload)
    return use, activations, usable_bytes(device, workload) - use.weight_bytes - activations


def usable_bytes(device: Device, workload: Workload) -> float:
    """Memory of `device` that weights and caches may take."""
    return device.memory_bytes * workload.memory_fraction


def fits(target: Architecture, draft: Draft | None, workload: Workload, device: Device) -> bool:
    """Whether weights and caches fit into the usable part of the device's memory."""
    return memory_bytes(target, draft, workload).total_bytes <= usable_bytes(device, workload)
