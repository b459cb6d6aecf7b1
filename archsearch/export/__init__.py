"""A draft as a folder that engines load: transformers, vLLM, SGLang, TensorRT-LLM, llama.cpp, and
archsearch itself."""

from __future__ import annotations

from archsearch.export.card import (
    DraftRecord,
    ExportPlan,
    ExportSource,
    ExportTarget,
    FullHead,
    HeadCost,
    model_card,
    padded_head_cost,
)
from archsearch.export.drafters import vllm_config
from archsearch.export.engines import DEFAULT_ENGINES, check_engines, export_names
from archsearch.export.folder import MARKER, export, plan

__all__ = [
    "DEFAULT_ENGINES",
    "DraftRecord",
    "ExportPlan",
    "ExportSource",
    "ExportTarget",
    "FullHead",
    "HeadCost",
    "MARKER",
    "check_engines",
    "export",
    "export_names",
    "model_card",
    "padded_head_cost",
    "plan",
    "vllm_config",
]
