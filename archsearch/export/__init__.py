"""A draft as a folder that engines load: transformers, vLLM, SGLang, TensorRT-LLM, llama.cpp, and
archsearch itself."""

from __future__ import annotations

from archsearch.drafters.forms import vllm_config
from archsearch.export.card import (
    DraftRecord,
    ExportSource,
    ExportTarget,
    FullHead,
    padded_head_cost,
)
from archsearch.export.engines import DEFAULT_ENGINES, check_engines
from archsearch.export.folder import MARKER, export

__all__ = [
    "DEFAULT_ENGINES",
    "DraftRecord",
    "ExportSource",
    "ExportTarget",
    "FullHead",
    "MARKER",
    "check_engines",
    "export",
    "padded_head_cost",
    "vllm_config",
]
