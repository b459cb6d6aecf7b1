"""How models are made and run quickly and quietly: dtypes, initialisation, memory allocator; and
weights that are what their config says: none missing, none of another shape, none that is no
number."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from archsearch.errors import MissingDataError, first_line
from archsearch.workload import GGUF_DTYPES, dtype_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel


log = logging.getLogger(__name__)


def torch_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A torch dtype from one or from a name such as `bf16`; float32 for those of GGUF files, in
    which torch does not compute."""
    if isinstance(dtype, torch.dtype):
        return dtype
    name = dtype_name(dtype)
    return torch.float32 if name in GGUF_DTYPES else getattr(torch, name)


def native_bf16(device: torch.device) -> bool:
    """Whether bfloat16 matrix products are faster than float32 ones on `device`."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        checks = (
            getattr(torch.cpu, name, None)
            for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        )
        return any(check is not None and check() for check in checks)
    return False


def causal_mask(
    tokens: int, keys: int, window: int | None, device: torch.device, groups: int = 1
) -> torch.Tensor:
    """[groups * tokens, keys], True where token i sees key j: keys - tokens + i - window < j <=
    keys - tokens + i, for each group of queries."""
    last = torch.arange(keys - tokens, keys, device=device).repeat(groups)[:, None]
    at = torch.arange(keys, device=device)[None]
    seen = at <= last
    return seen if window is None else seen & (at > last - window)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no advice from transformers: what a user must know is said here in one
    line."""
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    hub_log = logging.getLogger("huggingface_hub")  # it names every retry of a hub twice
    hub_level = hub_log.level
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    hub_log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        hub_log.setLevel(hub_level)
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def cheap_initialisation() -> Iterator[None]:
    """Skip the random initialisation of modules: the caller fills every weight."""
    names = ("normal_", "uniform_", "trunc_normal_", "kaiming_uniform_", "xavier_uniform_")
    saved = {name: getattr(nn.init, name) for name in names}
    try:
        for name in names:
            setattr(nn.init, name, lambda tensor, *args, **kwargs: tensor)
        yield
    finally:
        for name, function in saved.items():
            setattr(nn.init, name, function)


@contextlib.contextmanager
def hooked(hooks: Sequence[Any]) -> Iterator[None]:
    """Hooks on modules (what registering one returns) that are gone when the block ends."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def tune_malloc() -> None:
    """Let glibc keep large freed blocks instead of returning them to the kernel.

    Large [tokens, vocab] temporaries otherwise page-fault every step (training ran 1.3 times
    faster). No-op without glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    m_trim_threshold, m_top_pad, m_mmap_threshold = -1, -2, -3  # glibc malloc.h
    mallopt(m_trim_threshold, 2**31 - 1)
    mallopt(m_top_pad, 256 * 2**20)
    # Some glibc versions refuse a mmap threshold above half of the largest heap (32 MiB).
    _ = mallopt(m_mmap_threshold, 2**30) or mallopt(m_mmap_threshold, 32 * 2**20)


_NO_LOSS: Final = re.compile(
    r"inv_freq$|attn\.(masked_)?bias$|attention\.(masked_)?bias$|_scale$|scale_inv$"
    r"|(^|\.)(mtp|vision|visual|image|audio|speech|multi_modal)"
)
_LAYER: Final = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def load_checked(
    source: Path | str, what: str, dtype: torch.dtype, **options: Any
) -> PreTrainedModel:
    """The causal language model in the folder or of the hub id `source`; `what` names it in
    messages.

    transformers fills what a checkpoint lacks with random numbers and only warns, and leaves out
    tensors beyond the model's: a config with too few layers would run a part of the checkpoint.
    Raises MissingDataError with the first tensor's name where one is
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
            raise MissingDataError(
                f"cannot load the weights of {what} from {source}: {first_line(error)}"
            ) from error
    reshaped = [key[0] for key in info["mismatched_keys"]]
    beyond = [name for name in info["unexpected_keys"] if not harmless(name, model)]
    faults = {
        "are missing": info["missing_keys"],
        "have another shape than its config says": reshaped,
        "are of no part that its config names": beyond,
        "hold NaN or infinity": not_finite(model),
    }
    for how, found in faults.items():
        if found:
            raise MissingDataError(
                f"the weights of {what} in {source} are broken: {len(found)} of its tensors {how},"
                f" {min(map(str, found))} for one; get the checkpoint again"
            )
    return model


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
