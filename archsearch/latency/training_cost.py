"""What training a drafter takes on a device: the target writes the text, passes over it once more
for its probabilities or hidden states, and the drafter's own passes.

Writing and the teacher's pass are priced by the latency model (of an engine that serves), the
training by its operations. Checked against what publications say in docs/choose-a-draft.md and
benchmarks/training_costs.py: within a factor of 2 in either direction for most.
"""

from __future__ import annotations

import math
from typing import Final

from archsearch.architecture.architecture import Architecture
from archsearch.capacity import memory_bytes, usable_bytes
from archsearch.errors import InvalidShapeError
from archsearch.hardware.device import Device
from archsearch.latency.draft_passes import LatencyOfRounds
from archsearch.needs import TrainingBudget
from archsearch.workload import Workload

WRITING_BATCH: Final = 512  # sequences in flight (Apertus' runs, training_costs of DSpark)
WRITING_CONTEXT: Final = 1024  # tokens in the cache in mid-answer: assumed
# Tokens/s of a writing run / those of decode steps alone: prompts are read, batches fill and drain.
# Apertus-8B on GH200: 25, 27 and 35 GPU-hours a 1e9 tokens, 15.8 by decode steps of an H200.
WRITING_SHARE: Final = 0.55
TEACHER_TOKENS: Final = 2048  # in a pass of the teacher
# Of the device's peak that a training reaches: AMD-135M .18 of an MI250, TinyLlama-1.1B .51 of an
# A100 (their tokens and hours, 6 operations a parameter and token).
TRAINING_SHARE: Final = 0.3
RANKS: Final = (1, 2, 4, 8)
DTYPES: Final = ("bfloat16", "float16", "float32")  # that drafts are trained in


def training_budget(
    latency: LatencyOfRounds, target: Architecture, device: Device, workload: Workload, hours: float
) -> TrainingBudget:
    """What `hours` device-hours of `device` buy, for drafters of `target`.

    The target is served on as many devices as make a token cheapest, of those that hold it;
    `workload` says the dtype and mode, and how many devices hold it where no number of RANKS does.
    """
    write, teach = min(
        (_per_token(latency, target, each) for each in _served(target, device, workload)),
        key=sum,
    )
    return TrainingBudget(
        hours,
        text_hours_per_token=write / 3600.0,
        teacher_hours_per_token=teach / 3600.0,
        hours_per_parameter_token=6.0 / (TRAINING_SHARE * training_peak(device)) / 3600.0,
    )


def training_peak(device: Device) -> float:
    """Operations a second of the dtype that a drafter is trained in."""
    known = [device.flops_per_s[name] for name in DTYPES if name in device.flops_per_s]
    if known and device.kind != "cpu":
        return known[0]
    # A profile without peaks: as slow as its memory, an operation a byte.
    return max(device.flops_per_s.values(), default=device.bandwidth_bytes_per_s)


def _served(target: Architecture, device: Device, workload: Workload) -> list[Workload]:
    """The target on 1, 2, ... devices with the largest batch that memory holds."""
    found = []
    for ranks in RANKS if device.kind != "cpu" else (1,):
        batch = WRITING_BATCH
        while batch > 1 and not _holds(target, device, workload, ranks, batch):
            batch //= 2
        if _holds(target, device, workload, ranks, batch):
            found.append(_at(workload, ranks, batch))
    return found or [_at(workload, workload.tensor_parallel, workload.batch_size)]


def _at(workload: Workload, ranks: int, batch: int) -> Workload:
    return Workload(batch, WRITING_CONTEXT, ranks, workload.dtype, workload.mode)


def _holds(
    target: Architecture, device: Device, workload: Workload, ranks: int, batch: int
) -> bool:
    try:
        need = memory_bytes(target, None, _at(workload, ranks, batch)).total_bytes
    except InvalidShapeError:  # heads do not divide
        return False
    return need <= usable_bytes(device)


def _per_token(
    latency: LatencyOfRounds, target: Architecture, served: Workload
) -> tuple[float, float]:
    """Device-seconds of writing a token, and of the teacher's pass over one."""
    most = latency.largest_batch
    batch = served.batch_size if most is None else max(1, min(served.batch_size, most))
    writing = _at(served, served.tensor_parallel, batch)
    ranks = served.tensor_parallel
    write = ranks * latency.decode_s(target, writing).value / (batch * WRITING_SHARE)
    reading = Workload(1, 0, ranks, served.dtype, served.mode)
    whole = latency.verify_s(target, reading, TEACHER_TOKENS - 1).value
    teach = ranks * whole / TEACHER_TOKENS
    return write, min(teach, write) if math.isfinite(teach) else write
