"""A draft as a folder that engines load: transformers, vLLM, SGLang, TensorRT-LLM, llama.cpp, and archsearch itself."""

from __future__ import annotations

from archsearch.export.card import model_card
from archsearch.export.engines import DEFAULT_ENGINES, ENGINES, check_engines, vllm_config
from archsearch.export.folder import MARKER, export, padded_head_cost
from archsearch.export.schedule import GammaSchedule, Ranges, check_schedule, read_schedule

__all__ = [
    "DEFAULT_ENGINES",
    "ENGINES",
    "GammaSchedule",
    "MARKER",
    "Ranges",
    "check_engines",
    "check_schedule",
    "export",
    "model_card",
    "padded_head_cost",
    "read_schedule",
    "vllm_config",
]
