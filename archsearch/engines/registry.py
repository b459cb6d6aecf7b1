"""The engines by name: what `--engine` takes. A new engine is one line here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from archsearch.engines.engine import Engine, EngineSettings
from archsearch.errors import ArchsearchError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENGINES = ("transformers", "vllm", "openvino")
IN_PROCESS = ("transformers",)
"""Engines that run in this process and take loaded modules."""

# What the engine classes say of themselves, known before anything is loaded.
BATCHING = ("vllm", "openvino")
"""Engines that run several requests at once."""
SYNTHESISING = ("transformers", "vllm")
"""Engines that can accept draft tokens by chance (a running server cannot)."""
SCHEDULING = ("vllm",)
"""Engines that take gamma by batch size (a running server cannot)."""
DUMMY_ENGINES = ("vllm",)
"""Engines that can make up weights for folders that hold a config.json only."""


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


def check_interpreter_choice(name: str, python: Path | None) -> None:
    """Raise ArchsearchError where the engine's interpreter (`python`, or the installed one) cannot be run; MissingDataError, with
    the install command, where there is none."""
    from archsearch.engines.environments import check_interpreter, find_python

    check_engine(name)
    if name in IN_PROCESS:
        if python is not None:
            others = ", ".join(other for other in ENGINES if other not in IN_PROCESS)
            raise ArchsearchError(
                f"{name} runs in archsearch's own interpreter; leave --engine-python out, or name another --engine ({others})"
            )
    elif python is not None:
        check_interpreter(python, "--engine-python names")
    else:
        find_python(name)


def check_engine(name: str) -> str:
    """`name`, or ArchsearchError with the names there are."""
    if name not in ENGINES:
        raise ArchsearchError(f"unknown engine {name!r}; choose one of {', '.join(ENGINES)}")
    return name
