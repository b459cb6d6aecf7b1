"""How many requests memory holds at once: of one drafter, or of many drafts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.grid import ShapeGrid
from archsearch.capacity import activation_bytes, memory_bytes, memory_plan, usable_bytes
from archsearch.drafters.drafter import Drafter
from archsearch.engine_facts import EngineFacts
from archsearch.hardware.device import Device
from archsearch.workload import Workload


def held_by(
    facts: EngineFacts,
    target: Architecture,
    device: Device,
    workload: Workload,
    drafter: Drafter | None,
) -> int | None:
    """How many requests of the workload's context memory holds at once; None on a CPU, whose memory
    is not the engine's alone."""
    if device.kind == "cpu":
        return None
    served = replace(workload, draft_tensor_parallel=facts.ranks_of_draft(workload))
    return memory_plan(target, drafter, served, device).requests


def held_by_grid(
    facts: EngineFacts, target: Architecture, device: Device, workload: Workload, grid: ShapeGrid
) -> NDArray[np.int64] | None:
    """`held_by` of every draft of the grid, [bodies, layers, windows, heads]."""
    if device.kind == "cpu":
        return None
    one = replace(workload, batch_size=1, context_len=max(1, workload.context_len))
    size, mine = workload.dtype_bytes, grid.sharded(facts.ranks_of_draft(workload))
    alone = memory_bytes(target, None, one)
    empty = usable_bytes(device, workload.memory_fraction) - activation_bytes(target, one)
    room = empty - alone.weight_bytes - mine.parameters() * size
    per_request = alone.kv_bytes + mine.kv_cache_bytes(one.context_len, size)
    return np.maximum(0, room // np.maximum(per_request, 1)).astype(np.int64)
