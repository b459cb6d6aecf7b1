"""Training of heads: the loop, schedule, checkpoints and pace of distillation, with chains in place
of single tokens.

An EAGLE-3 head first learns the token after next alone, then chains as long as the round that will
run (`unroll`): trained on single tokens only, it accepts next to nothing from the second draft
token on, because it never saw its own states. A P-EAGLE head, which reads none of its own, learns
whole rounds from the start, as Medusa heads do. What is kept in the end is what stood best on
held-out text, by tokens a round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.nn import functional

from archsearch.errors import ArchsearchError
from archsearch.models.runtime import tune_malloc
from archsearch.progress import say
from archsearch.text.auxiliary import AuxiliaryStates
from archsearch.text.cache import CachedSequence, TextCache
from archsearch.training.batches import Batch, autocast
from archsearch.training.distill import _Run, distill_loss
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

SINGLE_SHARE: Final = (
    0.5  # of the run, at its beginning: an EAGLE-3 head learns single tokens, three times as fast
)
STEP_WEIGHT: Final = (
    0.8  # of each further token of a chain (SafeAILab/EAGLE, traineagle3; Medusa's 0.8^j)
)

LOOK_SHARE: Final = 0.25
"""Of the seconds given, what looks at held-out text may take: gamma passes along all of it, and the
best weights kept on disk. Ten took 120 of an EAGLE-3 head's 156 seconds on a crowded CPU, which
left nine steps (benchmarks/results/2026-11-22-heads)."""

Progress = Callable[[dict[str, Any]], None]


def head_config(
    budget_s: float | None = None, max_tokens: int | None = None, seed: int = 0, **changes: Any
) -> DistillConfig:
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
    return DistillConfig(
        budget_s=budget_s, max_tokens=max_tokens, seed=seed, **{**usual, **changes}
    )


@dataclass(frozen=True, slots=True)
class HeadPoint:
    """What a head could do on the held-out texts after so many steps, tokens and seconds. `counts`:
    of chains of gamma tokens; `weights`: as of a CurvePoint."""

    step: int
    tokens: int
    seconds: float
    weights: str
    counts: ChainCounts

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "conditional": list(self.counts.conditional),
            "tokens_a_round": self.counts.tokens_a_round,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> HeadPoint:
        counts = ChainCounts(tuple(data["counts"]["judged"]), tuple(data["counts"]["right"]))
        return cls(data["step"], data["tokens"], data["seconds"], data["weights"], counts)


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
    auxiliary: AuxiliaryStates | None = None,
    heldout: Sequence[CachedSequence] | None = None,
    checkpoint_dir: Path | None = None,
    progress: Progress | None = None,
) -> HeadResult:
    """Train `head` (in place) to draft `gamma` tokens on what the target of `caches` wrote.

    `auxiliary`: of all these texts, for an EAGLE-3 head. Texts held out, budget, resuming, errors
    as in `distill`. Raises ArchsearchError for an EAGLE-3 head without auxiliary states, or of
    other layers, and texts too short to draft in.
    """
    if isinstance(head, Eagle3Head) and (auxiliary is None or auxiliary.layers != head.aux_layers):
        have = "none" if auxiliary is None else f"those of layers {list(auxiliary.layers)}"
        raise ArchsearchError(
            f"the head reads the inputs of layers {list(head.aux_layers)}, the texts come with"
            f" {have}"
        )
    tune_malloc()
    usable = [
        cache.part([s for s in cache.sequences if s.greedy_ids.shape[0] > 1]) for cache in caches
    ]
    if not usable[0].sequences:
        raise ArchsearchError(
            "every text has a single written token; a head needs longer answers to learn from"
        )
    run = HeadRun(
        head, usable, config, checkpoint_dir, progress, heldout, gamma=gamma, auxiliary=auxiliary
    )
    try:
        done = run.train()
        place = done.alpha_curve.index(done.kept) if done.kept is not None else -1
        return HeadResult(done, tuple(run.curve), run.curve[place])
    finally:
        run.close()


class HeadRun(_Run):
    """A training run of a head."""

    def __init__(self, *args: Any, gamma: int, auxiliary: AuxiliaryStates | None) -> None:
        self.gamma, self.auxiliary = gamma, auxiliary
        self.unrolled = False
        self.curve: list[HeadPoint] = []
        super().__init__(*args)

    def _identity(self, caches: list[TextCache]) -> dict[str, Any]:
        identity = super()._identity(caches)
        mask = " parallel" if getattr(self.draft, "parallel", False) else ""
        return identity | {
            "draft": f"{identity['draft']} {list(getattr(self.draft, 'aux_layers', ()))}{mask}"
        }

    def _batch(self, indices: Sequence[int]) -> Batch:
        return head_batch([self.sequences[i] for i in indices], self.auxiliary).to(self.device)

    def _loss(self, batch: Batch) -> torch.Tensor:
        """Mean over steps, each weighing STEP_WEIGHT of the one before, of the mean loss over
        chains."""
        assert isinstance(batch, HeadBatch)
        steps = self._steps()
        with torch.no_grad():
            teacher = functional.linear(batch.hidden.to(self.teacher_head.dtype), self.teacher_head)
        greedy = self.index_of[batch.greedy_ids]
        losses, weights = [], []
        with autocast(self.weight, self.config.autocast):
            for step, logits in enumerate(step_logits(self.draft, batch, steps)):
                places = batch.chains(step)[2]
                if len(places):
                    losses.append(
                        STEP_WEIGHT**step
                        * distill_loss(logits, teacher[places], greedy[places], self.config)
                    )
                    weights.append(STEP_WEIGHT**step)
        return torch.stack(losses).sum() / sum(weights)

    def _due(self) -> bool:
        """As for a draft; where seconds are given, looks wait until steps have had their part of
        them."""
        looked = self.seconds - self.step_seconds
        return super()._due() and (
            self.config.budget_s is None or looked <= LOOK_SHARE * self.seconds
        )

    def _steps(self) -> int:
        if not isinstance(self.draft, Eagle3Head) or self.draft.parallel or self.unrolled:
            return self.gamma
        if self.fraction() < SINGLE_SHARE:
            return 1
        self.unrolled = True
        self.average, self.averaged = (
            {},
            0,
        )  # the mean so far is of weights that know single tokens only
        self.pace.close()
        self.pace = Pace(
            torch.get_num_threads(), torch.set_num_threads, say
        )  # steps are longer from here on
        return self.gamma

    def _matches(self) -> list[np.ndarray]:
        """Which draft tokens of every chain would be accepted, per text."""
        matches = chain_matches(self.draft, self.heldout, self.gamma, self.auxiliary)
        counts = count_chains(matches)
        weights = (
            "annealed"
            if self.annealing
            else "average"
            if self.average
            else "trunk"
            if self.step
            else "start"
        )
        self.curve.append(HeadPoint(self.step, self.tokens, self.seconds, weights, counts))
        return [np.logical_and.accumulate(rows, axis=1).ravel() for rows in matches]

    # ---- checkpoints

    def _extra(self) -> dict[str, Any]:
        return {"unrolled": self.unrolled, "curve": [point.to_dict() for point in self.curve]}

    def _take_extra(self, extra: dict[str, Any]) -> None:
        self.unrolled = extra["unrolled"]
        self.curve = [HeadPoint.from_dict(point) for point in extra["curve"]]
