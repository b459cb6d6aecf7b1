"""The engines by name: what `--engine` takes. A new engine is one line here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from archsearch.engines.engine import Engine, EngineSettings
from archsearch.errors import ArchsearchError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENGINES = ("transformers", "vllm", "openvino")
IN_PROCESS = ("transformers",)
"""Engines that run in this process and take loaded modules."""


def make_engine(name: str, settings: EngineSettings, tokenizer: PreTrainedTokenizerBase | Any = None) -> Engine:
    """The engine called `name`. Raises ArchsearchError for an unknown one, MissingDataError where its environment is missing."""
    check_engine(name)
    if name == "transformers":
        from archsearch.engines.transformers import TransformersEngine

        return TransformersEngine(tokenizer, settings.dtype)
    if name == "openvino":
        from archsearch.engines.openvino import OpenVinoEngine

        return OpenVinoEngine(settings, tokenizer)
    if settings.server_url is not None:
        from archsearch.engines.server import VllmServerEngine

        return VllmServerEngine(settings, tokenizer)
    from archsearch.engines.vllm import VllmEngine

    return VllmEngine(settings, tokenizer)


def check_engine(name: str) -> str:
    """`name`, or ArchsearchError with the names there are."""
    if name not in ENGINES:
        raise ArchsearchError(f"unknown engine {name!r}; choose one of {', '.join(ENGINES)}")
    return name
