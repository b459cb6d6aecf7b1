"""How a token is sampled: temperature, nucleus, and a draw from what they leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

from archsearch.errors import ArchsearchError

if TYPE_CHECKING:
    import torch


def warped_probs(logits: torch.Tensor, temperature: float, top_p: float = 1.0) -> torch.Tensor:
    """Probabilities [n, vocab] (float32) after temperature and nucleus, in the order in which engines apply them.

    A token stays while the tokens more likely than it hold less than `top_p` together (at least the best one stays), which is
    transformers' TopPLogitsWarper; the rest share what is left in proportion.
    """
    import torch

    probs = torch.softmax(logits.float() / temperature, dim=-1)
    if top_p >= 1.0:
        return probs
    width, count = probs.shape[-1], 64
    while True:
        # The nucleus is short: look at a few best tokens first and at more only where they do not reach top_p.
        count = min(count, width)
        best, order = probs.topk(count, dim=-1)
        below = best.cumsum(-1) - best
        if count == width or bool((below[:, -1] + best[:, -1] >= top_p).all()):
            break
        count *= 8
    kept = torch.where(below < top_p, best, 0.0)
    kept[:, 0] = best[:, 0]
    return torch.zeros_like(probs).scatter_(-1, order, kept / kept.sum(-1, keepdim=True))


def draw(probs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """One token [n] per row of `probs` [n, vocab]: where the running sum passes `noise` [n], uniform in 0..1."""
    import torch

    total = probs.double().cumsum(-1)  # [n, vocab]
    # Strictly above: a token of probability 0 is never drawn, however small the noise.
    return torch.searchsorted(total, (noise.to(total) * total[:, -1])[:, None], right=True)[:, 0]


def check_sampling(temperature: float, top_p: float) -> None:
    """Raise ArchsearchError for settings that no engine takes."""
    if not 0 <= temperature < 100:
        raise ArchsearchError(f"temperature must be at least 0 (greedy) and finite, got {temperature}")
    if not 0 < top_p <= 1:
        raise ArchsearchError(f"top_p must lie above 0 and at most at 1 (no cut), got {top_p}")
