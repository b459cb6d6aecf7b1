"""How text is written, and how much of it goes through the target at once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREFILL_TOKENS: Final = {
    "cpu": 1024,
    "cuda": 8192,
}  # per pass: some seconds of a small target on one core
MOST_KV_BYTES: Final = 4 << 30  # on a CPU
KV_SHARE: Final = {"cpu": 0.125, "cuda": 0.25}  # of a machine's memory; of a GPU's free memory


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What may be in memory at once. None: chosen by the device (see `kv_tokens`).

    `rows`: answers under way together; `kv_tokens`: their rows x (prompt + answer) columns;
    `prefill_tokens`: tokens of prompts in one pass, which bounds the activations and how long
    nothing is said.
    """

    rows: int = 384
    kv_tokens: int | None = None
    prefill_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Writing:
    """How a target writes: greedily at temperature 0, else sampled from its nucleus of `top_p`. A
    prompt's sampled answer depends on `seed` and the prompt's place only, not on what is written
    beside it."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    limits: BatchLimits = BatchLimits()

    @property
    def nucleus(self) -> bool:
        return self.temperature > 0 and self.top_p < 1.0

    def to_dict(self) -> dict[str, Any]:
        """What makes two texts different: the fingerprint's part. Without a nucleus `top_p` is left
        out."""
        nucleus = {"top_p": self.top_p} if self.nucleus else {}
        return {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            **nucleus,
            "seed": self.seed,
        }


def kv_bytes_per_token(config: Any, bytes_per_value: int) -> int:
    """Bytes of keys and values per token of one row, from a Hugging Face config."""
    text = config.get_text_config(decoder=True)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return int(2 * text.num_hidden_layers * kv_heads * head_dim * bytes_per_value)


def kv_tokens(target: PreTrainedModel, limits: BatchLimits) -> int:
    """How many tokens' keys and values may be held at once."""
    if limits.kv_tokens is not None:
        return limits.kv_tokens
    if target.device.type == "cuda":
        import torch

        room = KV_SHARE["cuda"] * torch.cuda.mem_get_info(target.device)[0]
    else:
        # Of all memory, not of the free: the same batches each time.
        room = min(
            MOST_KV_BYTES,
            KV_SHARE["cpu"] * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        )
    return max(1, int(room) // kv_bytes_per_token(target.config, target.dtype.itemsize))


def prefill_tokens(target: PreTrainedModel, limits: BatchLimits) -> int:
    """Tokens of prompts in one pass."""
    return limits.prefill_tokens or PREFILL_TOKENS.get(target.device.type, PREFILL_TOKENS["cuda"])
