"""A target that is loaded when it is first needed, once per dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from archsearch.models.targets import TargetRef

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LoadedTarget:
    """Model and tokenizer of one target, each loaded on first use and kept."""

    def __init__(self, ref: TargetRef, dtype: str) -> None:
        self.ref, self.dtype = ref, dtype
        self._models: dict[str, Any] = {}
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def model(self, dtype: str | None = None) -> Any:
        """The target in `dtype` (the run's by default)."""
        from archsearch.models.load import load_target

        name = dtype or self.dtype
        if name not in self._models:
            self._models[name], self._tokenizer = load_target(self.ref, name)
        return self._models[name]

    @property
    def config(self) -> Any:
        """The target's Hugging Face config; read without the weights where no model is loaded."""
        if self._models:
            return next(iter(self._models.values())).config
        from transformers import AutoConfig

        from archsearch.models.load import weights_source

        return AutoConfig.from_pretrained(weights_source(self.ref, weights=False))

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer; read without the weights where only it is needed."""
        if self._tokenizer is None:
            from archsearch.models.load import load_tokenizer

            self._tokenizer = load_tokenizer(self.ref)
        return self._tokenizer
