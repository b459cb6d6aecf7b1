"""Early exit measured: what the target's own first layers would draft, beside the text that the
whole target wrote.

The draft is the first k layers with the target's final norm and head, as transformers'
`assistant_early_exit` runs them. One pass of the target over its text gives the states after every
layer, so all exits are measured at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from archsearch.acceptance.measured import Trace, text_labels
from archsearch.errors import ArchsearchError
from archsearch.progress import Progress, silent

if TYPE_CHECKING:
    from archsearch.text.cache import CachedSequence

BATCH_TOKENS = 2048  # the states after all layers are held at once


def exit_traces(
    target: Any,
    sequences: Sequence[CachedSequence],
    layers: Sequence[int],
    *,
    end_ids: Collection[int],
    progress: Progress = silent,
) -> dict[int, Trace]:
    """Where an exit after each of `layers` agrees with the whole target along its greedy text: a
    trace for each.

    Raises ArchsearchError for a model whose final norm is not found.
    """
    import torch
    from torch.nn import functional

    from archsearch.training.batches import batches_of

    base = target.base_model
    norm = getattr(base, "norm", None)
    if norm is None:
        raise ArchsearchError(
            f"early exit needs a model with a final `norm`; {type(base).__name__} has none by that"
            " name"
        )
    weight = target.get_output_embeddings().weight
    found: dict[int, list[np.ndarray]] = {
        layer: [np.zeros(0, bool)] * len(sequences) for layer in layers
    }
    done = 0
    for chosen, batch in batches_of(sequences, BATCH_TOKENS, weight.device):
        with torch.inference_mode():
            states = base(
                input_ids=batch.input_ids, use_cache=False, output_hidden_states=True
            ).hidden_states
            for layer in layers:  # hidden_states[0] is the embedding
                rows = norm(states[layer].reshape(-1, states[layer].shape[-1])[batch.positions])
                hits = (functional.linear(rows, weight).argmax(-1) == batch.greedy_ids).cpu()
                for i, part in zip(chosen, batch.by_text(hits), strict=True):
                    found[layer][i] = part.numpy()
        done += len(chosen)
        progress("exits", done, len(sequences))
    labels = text_labels(sequences, set(end_ids))
    return {layer: Trace(tuple(hits), *labels) for layer, hits in found.items()}
