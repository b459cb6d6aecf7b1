"""Plain torch in place of kernels where vLLM's CPU build falls short, and synthetic acceptance,
which its forms of the rejection kernels lack: tokens are accepted by chance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from loop import UserError

if TYPE_CHECKING:
    from torch import Tensor


def accept_by_chance(
    output: Tensor,
    cu_num_tokens: Tensor,
    draft_ids: Tensor,
    instead_ids: Tensor,
    bonus_ids: Tensor,
    uniform: Tensor,
    rates: Tensor,
    mine: Tensor | None,
) -> None:
    """vLLM's synthetic acceptance: draft token i is accepted where its uniform number is below
    rates[i].

    output [batch, gamma + 1] is filled up to the first refused token, whose place takes
    `instead_ids` (the target's choice), or with `bonus_ids` [batch] after the last. `draft_ids`,
    `instead_ids`, `uniform`: [tokens]; `rates` [gamma] are conditional on all before being
    accepted. Rows that are not `mine` [batch] (None: all are) stay untouched; draft token -1 is
    padding.
    """
    import torch

    drafts, instead, chances = draft_ids.tolist(), instead_ids.tolist(), uniform.tolist()
    limits, bonus = rates.tolist(), bonus_ids.flatten().tolist()
    start = 0
    for row, end in enumerate(cu_num_tokens.tolist()):
        if mine is None or bool(mine[row]):
            tokens: list[int] = []
            for position in range(end - start):
                draft = drafts[start + position]
                if draft < 0 or chances[start + position] >= limits[position]:
                    tokens.append(instead[start + position])
                    break
                tokens.append(draft)
            else:
                tokens.append(bonus[row])
            output[row, : len(tokens)] = torch.tensor(tokens, dtype=output.dtype)
        start = end


class EvenChances:
    """Numbers between 0 and 1 for synthetic acceptance, spread evenly (steps of the golden ratio)
    and not drawn.

    The asked rates are met after tens of rounds, where independent draws need thousands; a round's
    time does not depend on it.
    """

    STEP = 0.6180339887498949

    def __init__(self) -> None:
        self.place = 0.0

    def begin(self, seed: int) -> None:
        """Start a call: the same seed gives the same chances."""
        self.place = seed * 0.7548776662466927 % 1.0

    def like(self, uniform: Tensor, cu_num_tokens: Tensor, rates: Tensor) -> Tensor:
        """Conditional chances [tokens] such that one number u a round decides it: position i is
        accepted where u < the product of rates[0..i]."""
        values: list[float] = []
        start, limits = 0, rates.tolist()
        for end in cu_num_tokens.tolist():
            self.place = (self.place + self.STEP) % 1.0
            reach = 1.0
            for position in range(end - start):
                values.append(self.place / reach if reach > 0.0 else 1.0)
                reach *= limits[position]
            start = end
        return uniform.new_tensor(values)


CHANCES = EvenChances()


GREEDY = (
    "output_token_ids cu_num_draft_tokens draft_token_ids target_argmax bonus_token_ids is_greedy"
    " max_spec_len uniform_probs synthetic_conditional_rates SYNTHETIC_MODE"
)
"""The arguments of rejection_greedy_sample_kernel, in order."""
RANDOM = (
    "output_token_ids cu_num_draft_tokens draft_token_ids draft_probs target_probs bonus_token_ids"
    " recovered_token_ids uniform_probs is_greedy max_spec_len vocab_size"
    " synthetic_conditional_rates NO_DRAFT_PROBS SYNTHETIC_MODE"
)
"""Those of rejection_random_sample_kernel."""


def by_chance(plain: Callable[..., None], names: str) -> Callable[..., None]:
    """`plain`, vLLM's CPU form of the kernel with the arguments `names`, with synthetic acceptance
    added."""

    def sample(*args: Any, **kwargs: Any) -> None:
        given = {**dict(zip(names.split(), args)), **kwargs}  # noqa: B905 - the last have defaults
        if not given.get("SYNTHETIC_MODE"):
            plain(*args, **kwargs)
            return
        greedy, rates = given["is_greedy"], given["synthetic_conditional_rates"]
        drafted = given["cu_num_draft_tokens"]
        accept_by_chance(
            given["output_token_ids"],
            drafted,
            given["draft_token_ids"],
            given["target_argmax" if names == GREEDY else "recovered_token_ids"],
            given["bonus_token_ids"],
            CHANCES.like(given["uniform_probs"], drafted, rates),
            rates,
            greedy if names == GREEDY else ~greedy,
        )

    return sample


def expand_values(
    output: Tensor,
    values: Tensor,
    cu_num_tokens: Tensor,
    replace_from: float,
    replace_to: float,
    longest: object = None,
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


def mend_cpu_build(ask: Mapping[str, Any]) -> None:
    """Put plain torch where the CPU build falls short.

    Its fallbacks for Triton kernels lack synthetic acceptance, and the one that expands
    temperatures may write into an integer copy. Worker processes (tensor parallel) do not see the
    replacement.
    """
    synthetic = bool(ask.get("synthetic"))
    import torch
    from vllm.triton_utils import HAS_TRITON

    # Its attention uses AMX tiles and leaves asking Linux for them to the first large product of
    # bfloat16: where a model has none, the first tile is an illegal instruction.
    torch.cpu._init_amx()

    if HAS_TRITON:  # Triton's CPU backend runs the kernels themselves
        return
    if int(ask["tensor_parallel"]) > 1:
        if synthetic:
            raise UserError(
                "synthetic acceptance with tensor_parallel above 1 needs a GPU; use"
                " --tensor-parallel 1"
            )
        return
    import vllm._custom_ops  # noqa: F401 - loads the compiled kernels the fallbacks call
    from vllm.utils import cpu_triton_utils as fallbacks

    if not expand_works(fallbacks._expand_kernel_impl):
        fallbacks._expand_kernel_impl = expand_values
    if synthetic:
        for kind, names in (("greedy", GREEDY), ("random", RANDOM)):
            name = f"_rejection_{kind}_sample_kernel_impl"
            setattr(fallbacks, name, by_chance(getattr(fallbacks, name), names))


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
