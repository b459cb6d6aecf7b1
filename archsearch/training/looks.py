"""Looks at held-out text while a draft is trained: when one is due, what was seen, and the weights
that were best; and checkpoints on disk: written whole or not at all, read with one clear line where
they are broken."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from archsearch.errors import ArchsearchError, first_line
from archsearch.text.cache import write_bytes
from archsearch.training.settings import CurvePoint, DistillConfig

NO_RISE: Final = "held-out acceptance no longer rises"
_FIRST_LOOK: Final = 8_000  # tokens, of `look_ratio`
_ANNEAL_LOOKS: Final = 3

Weights = Mapping[str, Tensor]


@dataclass(slots=True)
class Place:
    """How far a run is, over all the processes that it took. `trained_tokens`, `step_seconds`: of
    steps alone, anneals that were gone back from included."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    step_seconds: float = 0.0
    trained_tokens: int = 0

    def fraction(self, config: DistillConfig) -> float:
        """How much of the run is done, 0 to 1, by whichever limit is nearest."""
        pairs = (
            (self.seconds, config.budget_s),
            (self.step, config.max_steps),
            (self.tokens, config.max_tokens),
        )
        return min(1.0, max(done / limit for done, limit in pairs if limit is not None))

    @property
    def tokens_per_s(self) -> float:
        return self.trained_tokens / max(self.step_seconds, 1e-9)


class Looks:
    """The looks of one run, in `points`. `best`: the best one, `best_weights`: as they were looked
    at; `stopped`: why the run ends before its limits."""

    def __init__(self, config: DistillConfig) -> None:
        self.config = config
        self.points: list[CurvePoint] = []
        self.best: CurvePoint | None = None
        self.best_weights: dict[str, Tensor] = {}
        self.stopped = ""
        self.last_at = 0.0  # fraction of the run

    def due(self, place: Place, annealing: bool) -> bool:
        """Whether alpha is to be looked at now; the end of the run is looked at anyhow."""
        config, done = self.config, place.fraction(self.config)
        since = self.points[-1].tokens if self.points else 0
        if done >= 1:
            return False
        if config.evaluate_at:
            return not annealing and any(
                since < mark <= place.tokens for mark in config.evaluate_at
            )
        if config.look_ratio is not None and not annealing:
            return place.tokens >= max(_FIRST_LOOK, config.look_ratio * since)
        return bool(config.evaluations) and done >= self._next_at()

    def _next_at(self) -> float:
        """The next of equally spaced fractions; a longer budget spaces them anew."""
        parts = self.config.evaluations + 1
        if self.config.look_ratio is not None:  # of the anneal
            parts = max(parts, math.ceil((_ANNEAL_LOOKS + 1) / max(self.config.anneal, 0.01)))
        return (math.floor(self.last_at * parts + 1e-9) + 1) / parts

    def add(self, point: CurvePoint, weights: Weights) -> bool:
        """Whether `point`, seen with `weights`, is the best so far and its weights were kept."""
        self.points.append(point)
        kept = self.config.keep_best and (self.best is None or point.value >= self.best.value)
        if kept:
            self.best = point
            self.best_weights = {name: p.to("cpu", copy=True) for name, p in weights.items()}
        return kept

    def stop_where_flat(self, place: Place) -> None:
        """End the trunk where the best look lies far enough back."""
        patience, best = self.config.patience, self.best
        if patience is None or best is None or best.tokens == 0:
            return
        later = sum(point.tokens > best.tokens for point in self.points)
        if later >= 2 and place.tokens >= patience * best.tokens:
            self.stopped = NO_RISE


class RunningMean:
    """The mean of a trunk's weights by a power of the step (Karras et al., arXiv 2312.02696,
    section 3.1); empty before the first `add`."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.parameters = parameters
        self.forget()

    def forget(self) -> None:
        self.values: dict[str, Tensor] = {}
        self.count = 0

    def add(self, power: float) -> None:
        self.count += 1
        now = {name: p.detach() for name, p in self.parameters.items()}
        if not self.values:
            self.values = {name: p.clone() for name, p in now.items()}
            return
        share = 1.0 - (1.0 - 1.0 / self.count) ** (power + 1.0)
        torch._foreach_lerp_(list(self.values.values()), list(now.values()), share)

    def swap(self) -> None:
        """Exchange the weights of the parameters and their mean."""
        for name, parameter in self.parameters.items():
            parameter.data, self.values[name] = self.values[name], parameter.data


def copy_into(parameters: Mapping[str, torch.nn.Parameter], weights: Weights) -> None:
    """Set parameters to `weights`, by name."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])


def save_state(path: Path, state: dict[str, object]) -> None:
    """Write a checkpoint atomically, its tensors in the CPU's memory: any machine can go on from
    it."""
    buffer = io.BytesIO()
    torch.save(tree_map_only(Tensor, Tensor.cpu, state), buffer)
    write_bytes(path, buffer.getbuffer())


def load_state(path: Path) -> dict[str, Any]:
    """A checkpoint of `save_state`. Raises ArchsearchError for a file that is none."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError, KeyError) as error:
        raise ArchsearchError(
            f"cannot read the checkpoint {path}: {first_line(error)}; delete it"
        ) from error
