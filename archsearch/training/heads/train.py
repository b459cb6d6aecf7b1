"""Training of heads: the loop, schedule, checkpoints and pace of distillation, with chains in place
of single tokens.

An EAGLE-3 head first learns the token after next alone, then chains as long as the round that will
run (`unroll`): without these it accepts next to nothing from the second draft token on, because it
never saw its own states. A P-EAGLE head, which reads none of its own, learns whole rounds from the
start, as Medusa heads do. What stood best on held-out text is kept, by tokens a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from archsearch.errors import ArchsearchError
from archsearch.progress import Progress, say, silent
from archsearch.records import as_data, from_data
from archsearch.text.cache import TextCache
from archsearch.training.batches import Batch, autocast
from archsearch.training.distill import TrainingRun, distill_loss
from archsearch.training.heads.chains import (
    ChainCounts,
    Head,
    HeadBatch,
    chain_matches,
    count_chains,
    head_batch,
    step_logits,
)
from archsearch.training.heads.eagle3 import Eagle3Head
from archsearch.training.pace import Pace
from archsearch.training.settings import DistillConfig, DistillResult

# Of the run, at its beginning: an EAGLE-3 head learns single tokens, three times as fast.
SINGLE_SHARE: Final = 0.5
# Of each further token of a chain (SafeAILab/EAGLE, traineagle3; Medusa's 0.8^j).
STEP_WEIGHT: Final = 0.8

# Of the seconds given, what looks at held-out text may take: gamma passes along all of it, and the
# best weights kept on disk. Ten took 120 of an EAGLE-3 head's 156 seconds on a crowded CPU, which
# left nine steps (benchmarks/results/2026-11-22-heads).
LOOK_SHARE: Final = 0.25


def head_config(budget_s: float | None = None, **changes: object) -> DistillConfig:
    """How heads are trained unless something else is said: what ran on SmolLM2-135M (learning rate
    1e-3, anneal over the last 30 %, about 570 rows of answers a step), no feature loss."""
    usual: dict[str, Any] = {
        "lr": 1e-3,
        "batch_tokens": 1024,
        "warmup_tokens": 20_000,
        "anneal": 0.3,
        "feature_weight": 0.0,
        "keep_best": True,
    }
    return DistillConfig(budget_s, **usual | changes)


@dataclass(frozen=True, slots=True)
class HeadPoint:
    """What a head could do on the held-out texts after so many steps, tokens and seconds. `counts`:
    of chains of gamma tokens; `weights`: as of a CurvePoint."""

    step: int
    tokens: int
    seconds: float
    weights: str
    counts: ChainCounts

    def to_dict(self) -> dict[str, object]:
        return as_data(self) | {
            "conditional": list(self.counts.conditional),
            "tokens_a_round": self.counts.tokens_a_round,
        }


@dataclass(frozen=True, slots=True)
class HeadResult:
    """What a run did. `curve`: held-out chains on the way, a point for each of the alpha curve
    (whose values are accepted / drafted here); `best`: the point whose weights the head now has."""

    run: DistillResult
    curve: tuple[HeadPoint, ...]
    best: HeadPoint


def train_head(
    head: Head,
    caches: Sequence[TextCache],
    gamma: int,
    config: DistillConfig,
    *,
    checkpoint_dir: Path | None = None,
    progress: Progress = silent,
) -> HeadResult:
    """Train `head` (in place) to draft `gamma` tokens on what the target of `caches` wrote.

    Texts held out, budget, resuming, errors as in `distill`. Raises ArchsearchError for an EAGLE-3
    head of texts without auxiliary states, or of other layers, and texts too short to draft in.
    """
    for layers in (cache.layers for cache in caches):
        if isinstance(head, Eagle3Head) and layers != head.aux_layers:
            have = f"those of layers {list(layers)}" if layers else "none"
            raise ArchsearchError(
                f"the head reads the inputs of layers {list(head.aux_layers)}, the texts come with"
                f" {have}"
            )
    usable = [
        cache.part([s for s in cache.sequences if s.greedy_ids.shape[0] > 1]) for cache in caches
    ]
    if not usable[0].sequences:
        raise ArchsearchError(
            "every text has a single written token; a head needs longer answers to learn from"
        )
    with HeadRun(head, usable, config, checkpoint_dir, progress, gamma=gamma) as run:
        done = run.train()
        best = run.curve[done.alpha_curve.index(done.kept)]
        return HeadResult(done, tuple(run.curve), best)


class HeadRun(TrainingRun):
    """A training run of a head."""

    said = "accepted"

    def __init__(self, head: Head, caches: list[TextCache], *args: Any, gamma: int) -> None:
        self.gamma, self.unrolled = gamma, False
        self.curve: list[HeadPoint] = []
        super().__init__(head, caches, *args)

    def _identity(self, caches: list[TextCache]) -> dict[str, object]:
        identity = super()._identity(caches)
        mask = " parallel" if getattr(self.draft, "parallel", False) else ""
        layers = list(getattr(self.draft, "aux_layers", ()))
        return identity | {"draft": f"{identity['draft']} {layers}{mask}"}

    def _batch(self, indices: Sequence[int]) -> Batch:
        return head_batch([self.sequences[i] for i in indices]).to(self.device)

    def _loss(self, batch: Batch) -> torch.Tensor:
        """Mean over steps, each weighing STEP_WEIGHT of the one before, of the mean loss over
        chains."""
        assert isinstance(batch, HeadBatch)
        steps = self._steps()
        teacher = self.teacher.logits(batch.hidden)
        losses, weights = [], []
        with autocast(self.weight, self.config.autocast):
            for step, logits in enumerate(step_logits(self.draft, batch, steps)):
                places = batch.chains(step)[2]
                if len(places):
                    losses.append(STEP_WEIGHT**step * distill_loss(logits, teacher[places]))
                    weights.append(STEP_WEIGHT**step)
        # a step that none of the texts reaches has no weight either
        return torch.stack(losses).sum() / sum(weights)

    def _due(self) -> bool:
        """As for a draft; where seconds are given, looks wait until steps have had their part of
        them."""
        looked = self.place.seconds - self.place.step_seconds
        waits = self.config.budget_s is not None and looked > LOOK_SHARE * self.place.seconds
        return not waits and super()._due()

    def _steps(self) -> int:
        if not isinstance(self.draft, Eagle3Head) or self.draft.parallel or self.unrolled:
            return self.gamma
        if self.place.fraction(self.config) < SINGLE_SHARE:
            return 1
        self.unrolled = True
        self.mean.forget()  # it is of weights that know single tokens only
        self.pace.close()
        # Steps are longer from here on.
        self.pace = Pace(torch.get_num_threads(), torch.set_num_threads, say)
        return self.gamma

    def _matches(self) -> list[np.ndarray]:
        """Which draft tokens of every chain would be accepted, per text."""
        matches = chain_matches(self.draft, self.heldout, self.gamma)
        place, counts = self.place, count_chains(matches)
        self.curve.append(
            HeadPoint(place.step, place.tokens, place.seconds, self._weights(), counts)
        )
        return [np.logical_and.accumulate(rows, axis=1).ravel() for rows in matches]

    def _extra(self) -> dict[str, object]:
        return {"unrolled": self.unrolled, "curve": [point.to_dict() for point in self.curve]}

    def _take_extra(self, extra: dict[str, Any]) -> None:
        self.unrolled = extra["unrolled"]
        self.curve = [from_data(HeadPoint, point) for point in extra["curve"]]
