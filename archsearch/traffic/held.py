"""How many requests memory holds at once: of one drafter, or of each of a grid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from archsearch.architecture.architecture import Architecture
from archsearch.capacity import held_requests
from archsearch.drafters.drafter import Draft
from archsearch.engine_facts import EngineFacts
from archsearch.hardware.device import Device
from archsearch.workload import Workload


def held_by(
    facts: EngineFacts,
    target: Architecture,
    device: Device,
    workload: Workload,
    draft: Draft | None,
) -> Any:
    """How many requests of the workload's context memory holds at once; None on a CPU, whose memory
    is not the engine's alone."""
    if device.kind == "cpu":
        return None
    served = replace(workload, draft_tensor_parallel=facts.ranks_of_draft(workload))
    return held_requests(target, draft, served, device)
