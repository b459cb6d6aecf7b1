"""The small kernels and the attention between GEMMs as serving engines run them: one launch each,
on a static KV cache.

They are written in Triton; where that is missing or cannot compile (no C compiler), torch's own
take their place, several launches each, and `Fused.compiled` says so.
Attention runs FlashAttention, which sits inside torch, on a cache laid
out [batch, keys, heads, head_dim], its causal mask aligned to the last key: tokens to verify see
the cache and each other.
"""

from __future__ import annotations

import logging
import subprocess
from contextlib import AbstractContextManager
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from archsearch.architecture.ops import Attention
from archsearch.models.runtime import causal_mask

log = logging.getLogger(__name__)


class Fused:
    """The kernels, compiled (`triton`: the module archsearch.profiling.triton_kernels) or plain
    (None)."""

    def __init__(self, triton: Any = None) -> None:
        self._triton = triton

    @property
    def compiled(self) -> bool:
        return self._triton is not None

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> Tensor:
        """RMS norm of x [rows, width]; with `residual`, x is first added into it in place and the
        sum is normed."""
        if self._triton is not None:
            return self._triton.rms_norm(x, residual, weight, eps)
        if residual is not None:
            x = residual.add_(x)
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)

    def rope_(self, x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> None:
        """Rotate the first `heads` heads of each row of x [rows, width] in place, as Llama; cos,
        sin float32 [rows, half]."""
        if self._triton is not None:
            self._triton.rope_(x, cos, sin, heads)
            return
        half = cos.shape[1]
        rotated = x[:, : heads * 2 * half].unflatten(-1, (heads, 2, half))
        first, second = rotated.float().unbind(2)
        cos, sin = cos[:, None], sin[:, None]
        rotated.copy_(torch.stack([first * cos - second * sin, second * cos + first * sin], dim=2))

    def silu_mul(self, x: Tensor) -> Tensor:
        """silu(gate) * up of x = [gate | up], [rows, 2 * width] -> [rows, width]."""
        if self._triton is not None:
            return self._triton.silu_mul(x)
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate) * up


@cache
def fused_for(device: torch.device, dtype: torch.dtype) -> Fused:
    """The best kernels that run on `device`: each compiled one is tried once and must agree with
    the plain one."""
    plain = Fused()
    if device.type != "cuda":
        return plain
    try:
        from archsearch.profiling import triton_kernels

        compiled = Fused(triton_kernels)
        if agree(compiled, plain, device, dtype):
            return compiled
        log.warning(
            "the Triton kernels compute something else than torch's on %s: torch's are timed"
            " instead",
            device,
        )
    except ImportError:  # no Triton
        pass
    except Exception as error:
        # No C compiler or headers for Triton's launchers, or a card it does not know. Anything else
        # is a bug.
        ours = (RuntimeError, OSError, ValueError, subprocess.SubprocessError)
        if not isinstance(error, ours) and not type(error).__module__.startswith("triton"):
            raise
        log.warning(
            "Triton cannot compile here (%s): torch's kernels are timed instead",
            str(error).partition("\n")[0],
        )
    return plain


def agree(one: Fused, other: Fused, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether two sets of kernels compute the same, within what rounding in `dtype` allows."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    x, residual, weight = numbers(3, 96), numbers(3, 96), numbers(96)
    rows, gate_up = numbers(3, 5 * 32), numbers(3, 200)
    angle = torch.rand(3, 16, generator=generator).to(device)
    results = []
    for kernels in (one, other):
        added, rotated = residual.clone(), rows.clone()
        kernels.rope_(rotated, angle.cos(), angle.sin(), 4)
        normed = kernels.rms_norm(x, weight, 1e-6), kernels.rms_norm(x, weight, 1e-6, added)
        results.append([*normed, added, rotated, kernels.silu_mul(gate_up)])
    tolerance = max(4 * torch.finfo(dtype).eps, 1e-5)
    return all(
        torch.allclose(a.float(), b.float(), rtol=tolerance, atol=tolerance)
        for a, b in zip(*results, strict=True)
    )


def flash_usable(query: Tensor) -> bool:
    """Whether torch's FlashAttention takes these heads: half precision on a CUDA device of
    capability 8.0 or newer."""
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] <= 256
        and query.shape[-1] % 8 == 0
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def attention_kernel(op: Attention, mode: str, like: Tensor) -> str:
    """The kernel that torch runs for `op` on the device and in the dtype of `like`, as the profiler
    calls it in `mode`.

    torch is asked, with tensors of one sequence: it chooses by device, dtype, heads, mask and what
    it was built with.
    """

    def tensor(tokens: int, heads: int) -> Tensor:
        return like.new_empty(1, tokens, heads, op.head_dim)

    query, key = tensor(op.tokens, op.q_heads), tensor(op.keys(), op.kv_heads).transpose(1, 2)
    groups = op.q_heads // op.kv_heads if mode == "graph" else 1
    mask = None
    if op.tokens > 1:
        mask = lower_right_mask(op.tokens, op.keys(), None, like.device, groups)
    if mode == "eager":
        return sdpa_name(query.transpose(1, 2), key, mask)
    if flash_usable(query):
        return flash_name()
    with graph_backends():
        return sdpa_name(pack_groups(query, op.kv_heads), key, mask)


def sdpa_name(query: Tensor, key: Tensor, mask: Tensor | None) -> str:
    """What scaled_dot_product_attention chooses for query [batch, heads, tokens, head_dim] and key;
    KV heads are repeated under a mask and grouped without one, as transformers does."""
    grouped = query.shape[1] != key.shape[1]
    if grouped and mask is not None:
        key, grouped = key.repeat_interleave(query.shape[1] // key.shape[1], 1), False
    choose = getattr(torch, "_fused_sdp_choice", None)  # what the function itself asks; not public
    if choose is None:
        return "torch's choice"
    # torch.nn.attention.SDPBackend.
    names = {1: flash_name(), 2: "memory-efficient attention", 3: "cuDNN attention"}
    return names.get(
        int(choose(query, key, key, attn_mask=mask, enable_gqa=grouped)), "math attention"
    )


def flash_name() -> str:
    """FlashAttention in the version that torch runs: 2, unless another one was activated."""
    from torch.nn import attention

    active = getattr(attention, "current_flash_attention_impl", lambda: None)()
    return f"FlashAttention {str(active).removeprefix('FA')}" if active else "FlashAttention 2"


def graph_backends() -> AbstractContextManager[None]:
    """Where FlashAttention cannot run: what torch may choose among. cuDNN's attention is none of
    those that engines run."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    )


def attend(query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
    """Causal attention of the last tokens of a sequence: query [batch, tokens, heads, head_dim],
    key and value [batch, keys, kv_heads, head_dim] with the new tokens' own at the end -> [batch,
    tokens, heads, head_dim].

    Token i of `tokens` sees the keys up to keys - tokens + i, of those the last `window` where
    there is one.
    """
    tokens, keys = query.shape[1], key.shape[1]
    # needs CUDA; the `gpu` tests compare it with the line below
    if flash_usable(query):  # pragma: no cover
        left, right = (-1, -1) if window is None else (window - 1, 0)
        causal = tokens > 1
        sides = {"window_size_left": left, "window_size_right": 0 if causal else right}
        sizes = (None, None, tokens, keys, 0.0, causal, False)
        return torch.ops.aten._flash_attention_forward(query, key, value, *sizes, **sides)[0]
    groups, mask = query.shape[2] // key.shape[2], None
    if tokens > 1 or (window is not None and keys > window):
        mask = lower_right_mask(tokens, keys, window, query.device, groups)
    packed = pack_groups(query, key.shape[2])
    output = functional.scaled_dot_product_attention(
        packed, key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask
    )
    return output.unflatten(2, (groups, tokens)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def pack_groups(query: Tensor, kv_heads: int) -> Tensor:
    """query [batch, tokens, heads, head_dim] -> [batch, kv_heads, groups * tokens, head_dim].

    All queries of a KV head stand in one block, as flash decoding packs them: the cache is read
    once and never repeated. Grouped heads under a mask would fall back to torch's math kernel on
    CUDA.
    """
    groups = query.shape[2] // kv_heads
    return query.unflatten(2, (kv_heads, groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)


lower_right_mask = lru_cache(maxsize=64)(causal_mask)
