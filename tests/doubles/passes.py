"""One pass of a model by its sizes, as tests ask for it."""

from __future__ import annotations

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.ops import Part
from archsearch.estimate import Estimate
from archsearch.latency.draft_passes import DraftPasses


def forward_s(
    model: DraftPasses,
    arch: Architecture,
    *,
    batch: int = 1,
    tokens: int = 1,
    context: int = 256,
    ranks: int = 1,
    cold: bool = False,
    logits: int | None = None,
) -> Estimate:
    """`pass_s` of `tokens` new tokens per sequence against `context` cached ones."""
    return model.pass_s(arch, (Part(batch, tokens, context, logits), cold), ranks)
