"""Weights that are what their config says: none missing, none of another shape, none that is no
number."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import torch

from archsearch.errors import MissingDataError
from archsearch.models.runtime import quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NO_LOSS: Final = re.compile(
    r"inv_freq$|attn\.(masked_)?bias$|attention\.(masked_)?bias$|_scale$|scale_inv$|(^|\.)(mtp|vision|visual|image|audio|speech|multi_modal)"
)
_LAYER: Final = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def load_checked(
    source: Path | str, what: str, dtype: torch.dtype, **options: Any
) -> PreTrainedModel:
    """The causal language model in the folder or of the hub id `source`; `what` names it in
    messages.

    transformers fills what a checkpoint lacks with random numbers and only warns; hours would be
    trained on that. Tensors beyond the model's it leaves out: a config with too few layers would
    run a part of the checkpoint. Raises MissingDataError with the first tensor's name where one is
    missing, has another shape, is more than the model has (but `harmless`), or holds NaN or
    infinity, and for what cannot be read.
    """
    from pickle import UnpicklingError

    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    with quiet_transformers():
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source,
                dtype=dtype,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **options,
            )
            model, info = loaded
        except (
            OSError,
            ValueError,
            SafetensorError,
            UnpicklingError,
            RuntimeError,
            KeyError,
            TypeError,
        ) as error:
            # absent, unreadable, cut short, an index without a map, or with code of its own
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise MissingDataError(
                f"cannot load the weights of {what} from {source}: {first}"
            ) from error
    wrong = [
        f"{len(found)} of its tensors {how}, {min(map(str, found))} for one"
        for how, found in (
            ("are missing", info["missing_keys"]),
            (
                "have another shape than its config says",
                [key[0] for key in info["mismatched_keys"]],
            ),
            (
                "are of no part that its config names",
                [name for name in info["unexpected_keys"] if not harmless(name, model)],
            ),
            ("hold NaN or infinity", not_finite(model)),
        )
        if found
    ]
    if wrong:
        raise MissingDataError(
            f"the weights of {what} in {source} are broken: {wrong[0]}; get the checkpoint again"
        )
    return cast("PreTrainedModel", model)


def harmless(name: str, model: PreTrainedModel) -> bool:
    """Whether a tensor that the model lacks is no loss: a buffer or scale that is computed or not
    used here, another sense than text, a layer for prediction further ahead (MTP)."""
    if _NO_LOSS.search(name) or getattr(model.config, "quantization_config", None) is not None:
        return True
    text = model.config.get_text_config(decoder=True)
    ahead = getattr(text, "num_nextn_predict_layers", None) or 0
    layer = _LAYER.search(name)
    first = getattr(text, "num_hidden_layers", 0)
    return layer is not None and first <= int(layer[1]) < first + ahead


def not_finite(model: PreTrainedModel) -> list[str]:
    """Names of parameters that hold NaN or infinity. One pass over the weights: both bounds of a
    tensor show either, without a copy of it."""
    with torch.no_grad():
        return [
            name
            for name, value in model.named_parameters()
            if value.is_floating_point()
            and value.element_size() > 1
            and value.device.type != "meta"
            and value.numel()
            and not all(bool(bound.isfinite()) for bound in torch.aminmax(value))
        ]
