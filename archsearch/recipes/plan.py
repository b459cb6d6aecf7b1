"""What a recipe says: the tokens and hours of each stage, the alpha expected there, who gets which
GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from archsearch.architecture.architecture import Architecture
from archsearch.drafters.drafter import Drafter
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.needs import Needs
from archsearch.recipes.libraries import Library
from archsearch.records import as_data

CHECKPOINTS: Final = 10
"""Checkpoints of a training, evenly over its tokens: each stage has one."""
STAGES: Final = (0.1, 0.2, 0.5, 1.0)
LONGEST: Final = 4096
"""Tokens of prompt and answer that a drafter learns from at most; assumed."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the training: after `tokens` of the target's text and `gpu_hours` in all (text,
    teacher, drafter), `alpha` is expected; None where the answer rests on weights that exist, whose
    curve is not known."""

    tokens: float
    gpu_hours: float
    alpha: Estimate | None


@dataclass(frozen=True, slots=True)
class Gpus:
    """Who gets which GPU. `ranks`: that hold one copy of the target; `teacher`, `trainer`: numbers
    of GPUs."""

    ranks: int
    teacher: tuple[int, ...]
    trainer: tuple[int, ...]

    @property
    def shared(self) -> bool:
        """Whether the target and the trainer sit on the same GPU."""
        return bool(set(self.teacher) & set(self.trainer))

    @property
    def writers(self) -> list[tuple[int, ...]]:
        """The GPUs of each copy of the target that writes answers."""
        every = sorted({*self.teacher, *self.trainer})
        copies = len(every) // self.ranks
        return [tuple(every[self.ranks * each : self.ranks * (each + 1)]) for each in range(copies)]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A training as it will be written. `target`: its shape; `target_name`: folder or hub id;
    `shape`: the layers of the drafter; `hub_start`: of an independent draft, the published weights
    that it begins with, "" for those that archsearch makes; `temperature`: of the answers;
    `prompts`: the user's file; `run`, `rank`: whose answer this is; `vllm`: its version."""

    library: Library
    drafter: Drafter
    target: Architecture
    target_name: str
    gamma: int
    needs: Needs
    epochs: float
    stages: tuple[Stage, ...]
    gpus: Gpus
    vllm: str
    run: str
    rank: int
    device: str
    prompts: str = "prompts.jsonl"
    temperature: float = 0.0
    hub_start: str = ""
    dtype: str = "bfloat16"

    @property
    def family(self) -> str:
        """Of the drafter."""
        return self.drafter.family

    @property
    def text_tokens(self) -> int:
        """Tokens that the target writes: those seen, less the repeats."""
        assert self.needs.tokens is not None
        return round(self.needs.tokens / self.epochs)

    @property
    def longest(self) -> int:
        """Tokens of a prompt and its answer."""
        return min(LONGEST, self.target.max_position_embeddings or LONGEST)

    @property
    def hours(self) -> float:
        """By the clock, where all GPUs are busy."""
        return self.needs.gpu_hours / (len(self.gpus.writers) * self.gpus.ranks)

    @property
    def initialised(self) -> bool:
        """Whether archsearch makes its first weights out of the target's layers."""
        own = self.family in ("independent", "eagle3", "peagle") and not self.hub_start
        return own and self.library.name != "archsearch"

    def to_dict(self) -> dict[str, Any]:
        """What recipe.json holds."""
        library, gpus = self.library, self.gpus
        own = "family gamma text_tokens epochs vllm temperature run rank device".split()
        return {
            "library": library.name,
            "version": library.version,
            "settings_from": library.source,
            "settings": dict(library.families[self.family]),
            **{name: getattr(self, name) for name in own},
            "drafter": self.drafter.label(),
            "architecture": self.drafter.architecture.to_dict(),
            "target": self.target_name,
            "tokens": self.needs.tokens,
            "needs": self.needs.to_dict(),
            "stages": [as_data(stage) for stage in self.stages],
            "gpus": {"target_ranks": gpus.ranks, "teacher": gpus.teacher, "trainer": gpus.trainer},
        }


def share_gpus(count: int, ranks: int, needs: Needs, *, online: bool) -> Gpus:
    """GPUs for the target and for the trainer. `ranks`: what one copy of the target takes;
    `online`: the target runs beside the trainer, which gets its share of the hours; else the
    trainer has all of them.

    Raises ArchsearchError for fewer GPUs than the target takes, or takes with a trainer beside it.
    """
    if count < ranks:
        raise ArchsearchError(
            f"the target takes {ranks} GPUs (as the run serves it), got --gpus {count}; use {ranks}"
            " or more"
        )
    every = tuple(range(count))
    if not online:
        return Gpus(ranks, every, every)
    if count == 1:
        return Gpus(1, every, every)
    if count == ranks:
        raise ArchsearchError(
            f"the target takes {ranks} GPUs and the trainer runs beside it, got --gpus {count}; use"
            f" {ranks + 1} or more"
        )
    hours = needs.teacher_hours + needs.training_hours
    wanted = count * needs.teacher_hours / hours if hours > 0 else count / 2
    copies = max(1, min(round(wanted / ranks), (count - 1) // ranks))
    return Gpus(ranks, every[: copies * ranks], every[copies * ranks :])
