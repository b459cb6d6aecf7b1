"""A target that is loaded when it is first needed, once per dtype and device."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from archsearch.architecture.counts import parameters
from archsearch.models.targets import TargetRef

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# of a machine's memory: a second copy of the target, to write text faster, may take so much
COPY_SHARE: Final = 0.125


class LoadedTarget:
    """Model and tokenizer of one target, each loaded on first use and kept. `dtype`, `device`:
    where it runs as the run asks."""

    def __init__(self, ref: TargetRef, dtype: str, device: str = "cpu") -> None:
        self.ref, self.dtype, self.device = ref, dtype, device
        self._models: dict[tuple[str, str], PreTrainedModel] = {}
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def model(self, dtype: str | None = None, device: str | None = None) -> PreTrainedModel:
        """The target in `dtype` on `device` (the run's by default)."""
        from archsearch.models.load import load_target

        name = dtype or self.dtype, device or self.device
        if name not in self._models:
            self._models[name], tokenizer = load_target(self.ref, *name)
            self._tokenizer = self._tokenizer or tokenizer
        return self._models[name]

    def fast_dtype(self) -> str:
        """The dtype in which much text is written: bfloat16 instead of float32 where the device
        multiplies faster in it and memory has room for a second copy of the weights, else the run's
        own."""
        import torch

        from archsearch.models.runtime import native_bf16

        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        fits = 2 * parameters(self.ref.architecture) <= COPY_SHARE * memory
        faster = self.dtype == "float32" and native_bf16(torch.device(self.device))
        return "bfloat16" if fits and faster else self.dtype

    @property
    def config(self) -> Any:
        """The target's Hugging Face config; read without the weights where no model is loaded."""
        if self._models:
            return next(iter(self._models.values())).config
        from transformers import AutoConfig

        from archsearch.models.load import weights_source

        return AutoConfig.from_pretrained(
            weights_source(self.ref, weights=False), trust_remote_code=False
        )

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer; read without the weights where only it is needed."""
        if self._tokenizer is None:
            from archsearch.models.load import load_tokenizer

            self._tokenizer = load_tokenizer(self.ref)
        return self._tokenizer
