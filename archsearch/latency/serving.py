"""How engines run a draft where they differ from each other: its head, and on how many devices."""

from __future__ import annotations

from typing import Final

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.ops import check_shards
from archsearch.errors import InvalidShapeError
from archsearch.workload import Workload

TRIMMED_HEAD_ENGINES: Final = (None, "transformers")
"""Engines that compute a draft's trimmed head; the others load the padded one and pay for all its rows."""

SHARDED_DRAFT_ENGINES: Final = ("vllm",)
"""Engines that shard the draft as they shard the target (vLLM 0.32 wants equal tensor_parallel_size); elsewhere it runs on one
device."""

IDLE_PASS_ENGINES: Final = ("vllm",)
"""Engines whose draft runs a pass even where a schedule says gamma 0 (vLLM 0.32)."""


def served_draft(draft: Architecture, engine: str | None) -> Architecture:
    """The draft as `engine` computes it: with the full head where it knows no trimmed one."""
    return draft if engine in TRIMMED_HEAD_ENGINES else draft.replace(draft_vocab_size=None)


def draft_ranks(engine: str | None, workload: Workload) -> int:
    """Devices that share the draft's passes."""
    return workload.tensor_parallel if engine in SHARDED_DRAFT_ENGINES else 1


def check_served(draft: Architecture, engine: str | None, workload: Workload, name: str = "") -> None:
    """Raise InvalidShapeError, with what to do, where `engine` shards the draft and its heads or FFN do not divide."""
    ranks = draft_ranks(engine, workload)
    try:
        check_shards(draft, ranks)
    except InvalidShapeError as error:
        raise InvalidShapeError(
            f"draft {name or draft.label()} cannot run in {engine}, which shards it over {ranks} devices: {error}; lower "
            "--tensor-parallel, or use an engine that keeps the draft on one device"
        ) from error
