"""What one way to serve did under load, and a schedule against the other ways. Import stays light: reports read these."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from archsearch.estimate import Estimate


@dataclass(frozen=True, slots=True)
class LoadResult:
    """One variant at one concurrency.

    `speedup`: median over repeats of (tokens/s of this variant / of the target alone in the same repeat), std and 5-95 %
    `speedup_interval` by bootstrap over repeats; None for the target alone. `tokens_per_s`: median over repeats, all requests
    together. `tau`: tokens per round and request, over the rounds that were timed; `accepted_by_position`: unconditional, whole
    rounds. `step_s`, `target_s`, `draft_s`, `rest_s`: median seconds of a step, of the target's pass, of all passes of the draft,
    and of what is neither; None where the engine does not tell. `batch_steps`: steps timed. `repeats_s`: seconds per token of
    each repeat.
    """

    variant: str
    concurrency: int
    gamma: int
    engine_version: str
    repeats: int
    batch_steps: int
    tokens_per_s: float
    tau: float
    alpha: float | None
    accepted_by_position: tuple[float, ...]
    speedup: Estimate | None
    speedup_interval: tuple[float, float] | None
    step_s: float
    target_s: float | None
    draft_s: float | None
    rest_s: float | None
    repeats_s: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class ScheduleVerdict:
    """The schedule at one concurrency against the best of always off (1.0) and every fixed gamma.

    `holds`: it is not shown to be worse, which is less than being as good: it may lose up to `margin`, two std of the difference,
    unseen (None in files of before that field).
    """

    concurrency: int
    gamma: int
    speedup: Estimate
    best_other: str
    best_other_speedup: Estimate
    margin: float | None
    holds: bool

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
