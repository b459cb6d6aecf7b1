"""How text is written: settings, how much of it goes through the target at once, and how a token
is sampled: temperature, nucleus, and a draw from what they leave."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from archsearch.errors import ArchsearchError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


ROWS: Final = 384  # answers under way together
# Of prompts in one pass, which bounds the activations and how long nothing is said: some seconds of
# a small target on one core.
PREFILL_TOKENS: Final = {"cpu": 1024, "cuda": 8192}
MOST_KV_BYTES: Final = 4 << 30  # on a CPU
KV_SHARE: Final = {"cpu": 0.125, "cuda": 0.25}  # of a machine's memory; of a GPU's free memory


@dataclass(frozen=True, slots=True)
class Writing:
    """How a target writes: greedily at temperature 0, else sampled from its nucleus of `top_p`. A
    prompt's sampled answer depends on `seed` and the prompt's place only, not on what is written
    beside it. `layers`: whose inputs are kept on the way, for heads (`auxiliary`)."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    layers: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """What makes two texts different: the fingerprint's part. Without a nucleus `top_p` is left
        out."""
        nucleus = {"top_p": self.top_p} if self.temperature > 0 and self.top_p < 1.0 else {}
        return {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            **nucleus,
            "seed": self.seed,
        }


def kv_tokens(target: PreTrainedModel) -> int:
    """How many tokens' keys and values may be held at once: rows x (prompt + answer) columns."""
    if target.device.type == "cuda":
        import torch

        room = KV_SHARE["cuda"] * torch.cuda.mem_get_info(target.device)[0]
    else:
        # Of all memory, not of the free: the same batches each time.
        room = min(
            MOST_KV_BYTES,
            KV_SHARE["cpu"] * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        )
    text: Any = target.config.get_text_config(decoder=True)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    each = 2 * text.num_hidden_layers * kv_heads * head_dim * target.dtype.itemsize
    return max(1, int(room) // each)


def prefill_tokens(target: PreTrainedModel) -> int:
    """Tokens of prompts in one pass."""
    return PREFILL_TOKENS.get(target.device.type, PREFILL_TOKENS["cuda"])


def side_by_side(order: Iterable[int], lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Neighbours of `order` (places in `lengths`) in groups of at most `most` tokens when padded to
    their longest, one at least."""
    group: list[int] = []
    widest = 0
    for place in order:
        widest = max(widest, lengths[place])
        if group and (len(group) + 1) * widest > most:
            yield group
            group, widest = [], lengths[place]
        group.append(place)
    if group:
        yield group


def by_length(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """`side_by_side`, the shortest first."""
    return side_by_side(sorted(range(len(lengths)), key=lengths.__getitem__), lengths, most)


GROUP: Final = 256  # neighbours in the vocabulary that are summed, or compared, as one


def warped_probs(logits: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """Probabilities [n, vocab] (float32) after temperature and nucleus, in the order in which
    engines apply them.

    A token stays while the tokens more likely than it hold less than `top_p` together (at least the
    best one stays), as in transformers' TopPLogitsWarper.
    """
    import torch

    probs = torch.softmax(logits.float() / temperature, dim=-1)
    if top_p >= 1.0:
        return probs
    width, count = probs.shape[-1], 64
    while True:
        # The nucleus is short: look at a few best tokens first and at more only where they do not
        # reach top_p.
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
    """One token [n] per row of `probs` [n, vocab]: where the running sum passes `noise` [n],
    uniform in 0..1."""
    import torch

    def passed(sums: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        # Strictly above: a token of probability 0 is never drawn, however small the noise.
        return torch.searchsorted(sums, wanted[:, None], right=True)[:, 0]

    if probs.shape[-1] <= 4 * GROUP:
        total = probs.double().cumsum(-1)  # [n, vocab]
        return passed(total, noise.to(total) * total[:, -1])
    # A running sum over the vocabulary in float64 costs more than the softmax: over groups first,
    # then within the one.
    short = -probs.shape[-1] % GROUP
    # [n, groups, GROUP]
    groups = torch.nn.functional.pad(probs, (0, short)).unflatten(-1, (-1, GROUP))
    total = groups.sum(-1, dtype=torch.float64).cumsum(-1)  # [n, groups]
    wanted = noise.to(total) * total[:, -1]
    group = passed(total, wanted).clamp_max(groups.shape[1] - 1)
    rows = torch.arange(len(probs), device=probs.device)
    before = torch.where(group > 0, total[rows, (group - 1).clamp_min(0)], 0.0)
    inside = groups[rows, group].double().cumsum(-1)  # [n, GROUP]
    # Rounding may put the wanted sum at or above the group's own: then its last token that can be
    # drawn.
    wanted = torch.minimum(wanted - before, inside[:, -1] * (1 - 1e-12))
    return group * GROUP + passed(inside, wanted)


def best_tokens(logits: torch.Tensor) -> torch.Tensor:
    """[n]: the first of the largest of each row of `logits` [n, vocab].

    torch's argmax takes ten times as long on a CPU as the largest value alone, which is looked for
    in groups.
    """
    import torch

    count = logits.shape[-1] // GROUP * GROUP
    if logits.device.type != "cpu" or count < 4 * GROUP:
        return logits.argmax(-1)
    groups = logits[:, :count].unflatten(-1, (-1, GROUP))  # [n, groups, GROUP]
    highest, rows = groups.amax(-1), torch.arange(len(logits))
    group = highest.argmax(-1)
    best = group * GROUP + groups[rows, group].argmax(-1)
    if count == logits.shape[-1]:
        return best
    rest, place = logits[:, count:].max(-1)
    return torch.where(rest > highest[rows, group], count + place, best)


def check_sampling(temperature: float, top_p: float) -> None:
    """Raise ArchsearchError for settings that no engine takes."""
    if not 0 <= temperature < 100:
        raise ArchsearchError(
            f"temperature must be at least 0 (greedy) and finite, got {temperature}"
        )
    if not 0 < top_p <= 1:
        raise ArchsearchError(f"top_p must lie above 0 and at most at 1 (no cut), got {top_p}")
