"""Plain torch in place of kernels where vLLM's CPU build falls short."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from loop import UserError
from synthetic import GREEDY, RANDOM, by_chance


def expand_values(
    output: Any,
    values: Any,
    cu_num_tokens: Any,
    replace_from: float,
    replace_to: float,
    longest: Any = None,
) -> None:
    """output [tokens] = values [batch], each repeated for its request's draft tokens;
    `replace_from` becomes `replace_to`.

    vLLM's `expand_kernel`. `cu_num_tokens` [batch]: draft tokens up to and with each request.
    """
    import torch

    counts = torch.diff(
        cu_num_tokens.to(torch.int64), prepend=cu_num_tokens.new_zeros(1, dtype=torch.int64)
    )
    replaced = torch.where(values == replace_from, torch.full_like(values, replace_to), values)
    output.copy_(torch.repeat_interleave(replaced, counts).to(output.dtype))


def expand_works(expand: Callable[..., None]) -> bool:
    """Whether an implementation of `expand_kernel` keeps floats: temperatures pass through it."""
    import torch

    output = torch.full((3,), -1.0)
    expand(output, torch.tensor([0.5, 1.25]), torch.tensor([1, 3], dtype=torch.int32), 0, 1)
    return output.tolist() == [0.5, 1.25, 1.25]


def mend_cpu_build(ask: Mapping[str, Any]) -> bool:
    """Put plain torch where the CPU build falls short; True where something was replaced.

    Its fallbacks for Triton kernels lack synthetic acceptance, and the one that expands
    temperatures may write into an integer copy. Worker processes (tensor parallel) do not see the
    replacement.
    """
    synthetic = bool(ask.get("synthetic"))
    from vllm.triton_utils import HAS_TRITON

    if HAS_TRITON:  # Triton's CPU backend runs the kernels themselves
        return False
    if int(ask["tensor_parallel"]) > 1:
        if synthetic:
            raise UserError(
                "synthetic acceptance with tensor_parallel above 1 needs a GPU; use"
                " --tensor-parallel 1"
            )
        return False
    import vllm._custom_ops  # noqa: F401 - loads the compiled kernels the fallbacks call
    from vllm.utils import cpu_triton_utils as fallbacks

    replaced = False
    if not expand_works(fallbacks._expand_kernel_impl):
        fallbacks._expand_kernel_impl = expand_values
        replaced = True
    if synthetic:
        for kind, names in (("greedy", GREEDY), ("random", RANDOM)):
            name = f"_rejection_{kind}_sample_kernel_impl"
            setattr(fallbacks, name, by_chance(getattr(fallbacks, name), names))
        replaced = True
    return replaced


def expands_rightly(ask: Mapping[str, Any]) -> bool:
    """Whether temperatures arrive whole, by the way vLLM itself takes: a mend that did not take
    shows here."""
    import torch
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    if int(ask["tensor_parallel"]) > 1:
        from vllm.utils import cpu_triton_utils as fallbacks

        return expand_works(fallbacks._expand_kernel_impl)
    expanded = expand_batch_to_tokens(
        torch.tensor([0.5, 1.25]), torch.tensor([1, 3], dtype=torch.int32), 3, 0, 1
    )
    return bool(expanded.tolist() == [0.5, 1.25, 1.25])
