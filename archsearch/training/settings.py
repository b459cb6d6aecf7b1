"""How a distillation is asked for, and what it did."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

from archsearch.errors import ArchsearchError
from archsearch.training.pace import Slowdown

HELDOUT_SEQUENCES: Final = 64  # answers that are kept out to compare drafts on, at most
# Settings of earlier versions, in which nothing else brought acceptance (docs/log): their
# checkpoints say them.
FIXED: Final = {
    **{"kl_weight": 1.0, "ce_weight": 0.0, "tv_weight": 0.0},
    **{"teacher_temperature": 1.0, "train_embedding": False},
}


@dataclass(frozen=True, slots=True)
class DistillConfig:
    """How long and how to train. Give `budget_s`, `max_steps` or `max_tokens` (several: whichever
    ends first).

    `batch_tokens`: tokens per step, prompts included. `warmup_tokens`: tokens until the full
    learning rate. `anneal`: share of the run, at its end; 0 leaves the running mean of the weights
    in the draft instead. `average_power`: that mean weighs step t by t^power (mean age: 1 / (power
    + 2) of the run so far); None keeps none. `evaluate_at`: tokens at which the trunk's alpha is
    looked at, or `look_ratio`: every so many times more tokens, instead of `evaluations` equally
    spaced points. `keep_best`: leave the weights in the draft that were best on held-out text, not
    the last ones. `patience`: stop where the trunk has seen so many times the tokens of its best
    look, and looked at least twice since; None never stops before the limits. `feature_weight`: of
    the relative squared error of the final hidden state (left out where draft and target differ in
    width), beside the Kullback-Leibler divergence from the target. `shortlist`: tokens that a head
    of more than 16,384 rows is trained on per step, besides those of the batch and random ones.
    `autocast`: bfloat16 arithmetic; None asks the machine.
    """

    budget_s: float | None = None
    max_steps: int | None = None
    max_tokens: int | None = None
    lr: float = 1.5e-3
    batch_tokens: int = 512
    warmup_tokens: int = 10_000
    anneal: float = 0.25
    average_power: float | None = 6.0
    clip: float = 1.0
    feature_weight: float = 0.3
    weight_decay: float = 0.0
    shortlist: int = 8192
    heldout_sequences: int = HELDOUT_SEQUENCES
    evaluations: int = 8
    evaluate_at: tuple[int, ...] = ()
    look_ratio: float | None = None
    keep_best: bool = False
    patience: float | None = None
    checkpoint_every_s: float = 30.0
    autocast: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        limits = (self.budget_s, self.max_steps, self.max_tokens)
        given = [limit for limit in limits if limit is not None]
        if not given or min(given) <= 0:
            raise ArchsearchError(
                f"training needs a positive budget_s, max_steps or max_tokens, got {limits}"
            )
        if any(ratio is not None and ratio <= 1 for ratio in (self.patience, self.look_ratio)):
            raise ArchsearchError(
                f"patience and look_ratio are ratios above 1, got {self.patience} and"
                f" {self.look_ratio}"
            )
        fits = {
            "lr": 0 < self.lr < 1,
            "batch_tokens": self.batch_tokens >= 2,
            "warmup_tokens": self.warmup_tokens >= 0,
            "anneal": 0 <= self.anneal <= 1,
            "average_power": self.average_power is None or self.average_power > 0,
        }
        if not all(fits.values()):
            values = ", ".join(f"{name}={getattr(self, name)}" for name in fits)
            raise ArchsearchError(f"training settings out of range: {values}")

    def identity(self) -> dict[str, object]:
        """What a checkpoint must agree with: all but the run's length, its end and how it is
        watched."""
        ends = "budget_s max_steps max_tokens anneal patience"
        watched = "keep_best checkpoint_every_s evaluations evaluate_at look_ratio"
        free = f"{ends} {watched}".split()
        values = {key: v for key, v in dataclasses.asdict(self).items() if key not in free}
        return values | FIXED


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """`value` (a loss or an alpha) after so many steps, tokens (prompts included) and seconds.

    An alpha's `weights`: "start", "average" (running mean of the trunk), "trunk" (as they are) or
    "annealed" (at the end of the anneal, or on its way there). `hits`: agreed tokens of each
    held-out text, so that drafts can be compared in pairs.
    """

    step: int
    tokens: int
    seconds: float
    value: float
    weights: str = ""
    hits: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DistillResult:
    """What a run did. `tokens_per_s`: input tokens per second of training steps alone;
    `alpha_curve`: greedy agreement on the held-out texts, before training first, after it last;
    `heldout_tokens`: length of each of those texts; `slowdowns`: when this call fell far below the
    speed it began with; `kept`: the look at the weights that are in the draft now; `stopped`: why
    it ended before its limits, "" where it did not; `epoch_tokens`: input tokens of one pass over
    the text."""

    loss_curve: tuple[CurvePoint, ...]
    alpha_curve: tuple[CurvePoint, ...]
    steps: int
    tokens: int
    seconds: float
    tokens_per_s: float
    heldout_tokens: tuple[int, ...]
    slowdowns: tuple[Slowdown, ...]
    kept: CurvePoint
    stopped: str
    epoch_tokens: int

    @property
    def trunk(self) -> list[CurvePoint]:
        """The looks at the running mean."""
        return [point for point in self.alpha_curve if point.weights == "average"]
