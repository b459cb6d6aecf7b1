"""What is exported: a draft folder, how it is to be served, and what its run knows of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import weight_bytes_per_pass
from archsearch.drafters.models import Independent
from archsearch.schedule import GammaSchedule
from archsearch.workload import DTYPE_BYTES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class HeadCost:
    """Weight bytes read per draft token: with the kept rows of the head, and with a full one as
    most engines compute it."""

    trimmed_bytes: float
    padded_bytes: float

    @property
    def ratio(self) -> float:
        """About the ratio of the times, where reading weights is what takes time; 1 where the head
        is not trimmed."""
        return self.padded_bytes / self.trimmed_bytes


def padded_head_cost(arch: Architecture, dtype: str) -> HeadCost:
    """What an engine pays that computes the full head of a draft trained with a trimmed one."""
    full = arch.replace(draft_vocab_size=None)
    return HeadCost(
        weight_bytes_per_pass(arch, DTYPE_BYTES[dtype]),
        weight_bytes_per_pass(full, DTYPE_BYTES[dtype]),
    )


@dataclass(frozen=True)
class FullHead:
    """Predicted speed-up in engines that compute the full head, and the gamma (with its predicted
    speed-up) that suits them better than the export's; None where none does."""

    speedup: float
    better_gamma: tuple[int, float] | None = None


@dataclass(frozen=True)
class ExportTarget:
    """The target beside which the draft is served. `name`: folder or hub id in the commands;
    `tokenizer`: used where the draft folder has none; `gguf`: the target's own GGUF."""

    name: str | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    gguf: Path | None = None


@dataclass(frozen=True)
class DraftRecord:
    """What is known of a draft, as the files of its run hold it: score.json, confirmed.json,
    training.json, every load-<engine>.json. `provenance`: `run` is what run.yaml holds."""

    score: Mapping[str, Any] | None = None
    confirmed: Mapping[str, Any] | None = None
    training: Mapping[str, Any] | None = None
    loads: tuple[Mapping[str, Any], ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def confirmed_dtype(self) -> str | None:
        """What the engine computed in when the draft was confirmed."""
        found = (self.confirmed or {}).get("dtype")
        return str(found) if found else None


@dataclass(frozen=True)
class ExportSource:
    """A draft folder, or that of a head of `family`, to export with `gamma` draft tokens a round.

    `stops`: by engine, gamma and the probability below which the draft stops, where that was
    measured there. `schedule`: gamma by batch size, for engines that take one. `dtype`: what
    engines compute in (None: as confirmed, else as the weights are stored). `tensor_parallel`:
    devices the target is served on. `full_head`: of a trained draft with a trimmed head.
    `gguf_dtype`: of a GGUF, float16 whatever the run's dtype was: llama.cpp computes it quickly on
    every device (bfloat16 not), and a float32 draft reads twice the bytes for the same acceptance
    (10.6 against 5.2 ms a pass on one CPU core).
    """

    draft: Path
    gamma: int
    schedule: GammaSchedule = GammaSchedule()
    target: ExportTarget = ExportTarget()
    record: DraftRecord = DraftRecord()
    full_head: FullHead | None = None
    dtype: str | None = None
    tensor_parallel: int = 1
    family: str = Independent.family
    stops: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    gguf_dtype: str = "float16"
