"""How fast this machine's host launches kernels: what a draft without CUDA graphs waits for.

Decoder layers of transformers, so narrow that a kernel is over before the next is launched, run one
token after another; what a layer takes the thread is Python, the dispatcher and, on a GPU, the
launch. On a machine without a GPU the kernels run on the thread itself, a microsecond or two each.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Final

REFERENCE_S: Final = 5.367e-4
"""Seconds of a layer launched kernel by kernel that the constants of engine_rounds.yaml stand for
(published: arXiv 2402.01528, 24 and 12 layers, DeepSpeed and transformers of 2023)."""
LAYERS: Final = 12
WARM_UP: Final = 3


@dataclass(frozen=True, slots=True)
class HostSpeed:
    """Seconds in which the host launches a decoder layer: median and quartiles over `repeats`
    passes of LAYERS layers. `device`: where the kernels ran."""

    layer_s: float
    low_s: float
    high_s: float
    repeats: int
    device: str

    @property
    def factor(self) -> float:
        """On the host times of engine_rounds.yaml, as `--host` takes it."""
        return self.layer_s / REFERENCE_S


def measure_host(budget_s: float = 60.0) -> HostSpeed:
    """Launch decoder layers for up to `budget_s` seconds (a few suffice where nothing disturbs).

    Thread time is counted, so other processes do not slow the figure down much. Raises ImportError
    without torch and transformers.
    """
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaModel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=128,
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = LlamaModel(config).eval().to(device)
        token = torch.zeros((1, 1), dtype=torch.long, device=device)
        found: list[float] = []
        end = time.perf_counter() + budget_s
        with torch.inference_mode():
            while len(found) < WARM_UP + 200 and (
                len(found) <= WARM_UP or time.perf_counter() < end
            ):
                start = time.thread_time()
                model(token, use_cache=False)
                found.append((time.thread_time() - start) / LAYERS)
                if device == "cuda":
                    torch.cuda.synchronize()
    finally:
        torch.set_num_threads(threads)
    kept = sorted(found[WARM_UP:])
    low, high = kept[len(kept) // 4], kept[(3 * len(kept)) // 4]
    return HostSpeed(statistics.median(kept), low, high, len(kept), device)
