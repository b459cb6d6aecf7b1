"""How models are made and run quickly and quietly: dtypes, initialisation, memory allocator."""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Iterator

import torch
from torch import nn

from archsearch.workload import GGUF_DTYPES, dtype_name

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


def tune_malloc() -> bool:
    """Let glibc keep large freed blocks instead of returning them to the kernel; True where it took
    effect.

    Large [tokens, vocab] temporaries otherwise page-fault every step (training ran 1.3 times
    faster). No-op without glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    m_trim_threshold, m_top_pad, m_mmap_threshold = -1, -2, -3  # glibc malloc.h
    took = bool(mallopt(m_trim_threshold, 2**31 - 1)) and bool(mallopt(m_top_pad, 256 * 2**20))
    # Some glibc versions refuse a mmap threshold above half of the largest heap (32 MiB).
    return took and bool(mallopt(m_mmap_threshold, 2**30) or mallopt(m_mmap_threshold, 32 * 2**20))
