"""Mixtures of experts: how ranks share the experts, and how many of them a pass reads.

A pass reads the weights of every expert that at least one of its tokens is routed to, so its time
grows with the number of distinct experts, and verifying gamma + 1 tokens reads more of them than a
plain step does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Final

from archsearch.architecture.architecture import Architecture
from archsearch.errors import InvalidShapeError
from archsearch.speedup import rising_root

ROUTING_SKEW: Final = 0.7
"""Exponent of the popularity of experts that is taken where nobody says: the r-th most popular is
chosen in proportion to r^-0.7. It makes 0.94, 0.90, 0.85, 0.83 and 0.86 of the distinct experts of
uniform routing at 4, 8, 16, 32 and 64 sequences of gpt-oss-120b, whose servers show 0.93, 0.89,
0.86, 0.83 and 0.91 (composed steps solved for it: upper bounds, as prefill and host are in them).
16 consecutive tokens of one text of Qwen3-Coder-30B show about 1 (DFlash, arXiv 2602.06036), as a
skew of 0."""
# columns of one scale in fp8 blocks: a narrower shard of an expert cannot be stored
BLOCK: Final = 128


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """How ranks share the experts: each expert's columns over `tensor_ranks`, the experts over
    `expert_ranks`."""

    tensor_ranks: int = 1
    expert_ranks: int = 1


def expert_layout(arch: Architecture, ranks: int) -> ExpertLayout:
    """Experts of `arch` over `ranks` devices: split by columns; whole experts where columns do not
    divide (of weights served in fp8 blocks, into whole BLOCKs) or `arch.expert_parallel` says so.
    Raises InvalidShapeError where neither divides.
    """
    columns, remainder = divmod(arch.moe_intermediate_size, ranks)
    blocks = arch.served_dtype == "float8_e4m3fn"
    whole = arch.expert_parallel and not arch.num_experts % ranks
    if not (remainder or whole or (blocks and ranks > 1 and columns % BLOCK)):
        return ExpertLayout(tensor_ranks=ranks)
    if arch.num_experts % ranks == 0:
        return ExpertLayout(expert_ranks=ranks)
    raise InvalidShapeError(
        f"neither moe_intermediate_size ({arch.moe_intermediate_size}) nor num_experts"
        f" ({arch.num_experts}) divides by tensor_parallel={ranks}"
    )


@lru_cache(maxsize=4096)
def popularity(experts: int, per_token: int, skew: float) -> tuple[float, ...]:
    """The chance of each expert to be among the `per_token` that a token is routed to; they sum to
    `per_token`.

    Experts are drawn without replacement in proportion to rank^-skew: 1 - exp(-c rank^-skew), with
    c so that the sum is right (exponential races, Efraimidis and Spirakis 2006). Raises
    InvalidShapeError for a negative skew.
    """
    if skew < 0:
        raise InvalidShapeError(f"routing skew must be 0 (uniform) or more, got {skew}")
    if per_token >= experts or not skew:
        return (min(per_token / experts, 1.0),) * experts
    weights = [rank**-skew for rank in range(1, experts + 1)]

    def chosen(pace: float) -> list[float]:
        return [-math.expm1(-pace * weight) for weight in weights]

    high = 1.0
    while sum(chosen(high)) < per_token:
        high *= 2.0
    return tuple(chosen(rising_root(lambda pace: sum(chosen(pace)), per_token, 0.0, high)))


@lru_cache(maxsize=65536)
def busiest_rank(experts: int, per_token: int, tokens: int, ranks: int, skew: float) -> float:
    """Distinct experts that `tokens` tokens are expected to touch, of the rank that holds most of
    them, with the popular ones dealt out to all ranks in turn.

    Of one rank the sum over experts of 1 - (1 - p)^tokens: tokens are taken to choose
    independently. Ranks differ by chance: the largest of r normal draws lies Phi^-1((r - 3/8) / (r
    + 1/4)) stds above their mean (Blom 1958), of one draw none.
    """
    hit = [
        1.0 - (1.0 - chance) ** tokens
        for chance in popularity(experts, per_token, float(skew))[::ranks]
    ]
    above = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    spread = above * math.sqrt(sum(share * (1.0 - share) for share in hit))
    return min(float(len(hit)), float(tokens * per_token), sum(hit) + spread)
