"""Triton kernels of `archsearch.profiling.fused`. Import only where Triton is installed (it comes
with CUDA builds of torch)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, weight_ptr, out_ptr, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(x_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual_ptr + row * width + at, x.to(residual_ptr.dtype.element_ty), mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / width + eps)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out_ptr + row * width + at, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside
    )


@triton.jit
def _rope(  # type: ignore[no-untyped-def]
    x_ptr, cos_ptr, sin_ptr, row_stride, half, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    start = x_ptr + row * row_stride + tl.program_id(1) * half * 2
    at = tl.arange(0, BLOCK)
    inside = at < half
    first = tl.load(start + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(start + half + at, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + row * half + at, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + row * half + at, mask=inside, other=0.0)
    tl.store(start + at, (first * cos - second * sin).to(x_ptr.dtype.element_ty), mask=inside)
    tl.store(
        start + half + at, (second * cos + first * sin).to(x_ptr.dtype.element_ty), mask=inside
    )


@triton.jit
def _silu_mul(x_ptr, out_ptr, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(x_ptr + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out_ptr + row * width + at,
        (gate * up / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty),
        mask=inside,
    )


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """x [rows, width] (contiguous), added into `residual` in place first where there is one; RMS
    norm times `weight` [width]."""
    rows, width = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    how = {"ADD": residual is not None, "BLOCK": block, "num_warps": min(16, max(1, block // 256))}
    _rms_norm[(rows,)](x, x if residual is None else residual, weight, out, width, eps, **how)
    return out


def rope_(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> None:
    """Rotate the first `heads` heads of every row of x [rows, >= heads * 2 * half] in place; cos,
    sin float32 [rows, half]."""
    half = cos.shape[1]
    _rope[(x.shape[0], heads)](
        x, cos, sin, x.stride(0), half, BLOCK=triton.next_power_of_2(half), num_warps=1
    )


def silu_mul(x: Tensor) -> Tensor:
    """silu(first half) * second half of every row of x [rows, 2 * width] (contiguous)."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, width)
    _silu_mul[(rows, triton.cdiv(width, 1024))](x, out, width, BLOCK=1024)
    return out
