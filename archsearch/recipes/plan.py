"""What a recipe says: the tokens and hours of each stage, the alpha expected there, who gets which
GPU, and the library that trains, with its settings.

Settings were read in the libraries' own source, of the version that is pinned: speculators 0.9.0
(train/config/schema.py, cli/prepare_data.py, models/*/config.py), SpecForge 0.2.0
(config/schema.py, algorithms/, cli.py; its examples and patches are in the repository at
SPECFORGE_COMMIT, not on PyPI), TRL 1.16.0 (experimental/gkd, experimental/utils.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from archsearch.architecture.architecture import Architecture
from archsearch.drafters.drafter import Drafter
from archsearch.drafters.registry import family as family_class
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.files import shipped_yaml
from archsearch.needs import Needs
from archsearch.records import as_data

SPECFORGE_COMMIT: Final = "a6b6b0230009d15ec2a97a57384e6f53f0f96946"
# GPT-3, arXiv 2005.14165, table 2.1: (at most so many parameters, learning rate)
GPT3_RATES: Final = ((2e8, 6e-4), (5e8, 3e-4), (1e9, 2.5e-4), (2e9, 2e-4), (5e9, 1.6e-4))


@dataclass(frozen=True, slots=True)
class Library:
    """A library that trains drafters. `version`: the one that recipes are written for and pin, ""
    for archsearch itself; `families`: what it trains, with its settings for each (names are the
    library's); `source`: where they are from; `files`: templates of the recipe besides those that
    every one has (name in the folder -> template)."""

    name: str
    title: str
    version: str
    families: Mapping[str, Mapping[str, Any]]
    source: str
    files: Mapping[str, str]
    whole_width: bool = False
    one_layer: Sequence[str] = ()

    @property
    def requirement(self) -> str:
        """As pip takes it."""
        return f"{self.name}=={self.version}"


LIBRARIES: Final[Mapping[str, Library]] = {
    name: Library(name, **row)
    for name, row in shipped_yaml(Path(__file__).with_name("libraries.yaml")).items()
}


def choose_library(name: str | None, family: str) -> Library:
    """The library called `name`, or the first that trains drafters of `family`.

    Raises ArchsearchError where it does not train them, with those that do.
    """
    able = [row for row in LIBRARIES.values() if family in row.families]
    title = family_class(family).title
    if not able:
        raise ArchsearchError(
            f"no library of {', '.join(LIBRARIES)} trains a drafter of the family {family}"
            f" ({title}); choose another --rank"
        )
    if name is None:
        return able[0]
    if name not in LIBRARIES:
        raise ArchsearchError(f"unknown library {name!r}; --with takes {', '.join(LIBRARIES)}")
    if family not in LIBRARIES[name].families:
        raise ArchsearchError(
            f"{name} trains {', '.join(LIBRARIES[name].families)}, no drafter of the family"
            f" {family} ({title}); use --with {' or '.join(row.name for row in able)}"
        )
    return LIBRARIES[name]


def learning_rate(parameters: float) -> float:
    """The learning rate that GPT-3 was trained with at this size."""
    return next((rate for most, rate in GPT3_RATES if parameters <= most), GPT3_RATES[-1][1])


CHECKPOINTS: Final = 10
"""Checkpoints of a training, evenly over its tokens: each stage has one."""
STAGES: Final = (0.1, 0.2, 0.5, 1.0)
LEAST_STEPS: Final = 1000
"""Of TRL, in batches of LARGEST_BATCH answers where the text is long enough: 19 steps of 8 answers
left a draft of SmolLM2-135M at alpha 0.15, 150 of one at 0.35, by the same 29,000 tokens.
speculators has AdamW where its steps are fewer (docs/recipe.md); where Muon is better is
assumed."""
LARGEST_BATCH: Final = 8
ANSWER: Final = 250  # tokens that an answer is taken to have
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


SHARED_MEMORY: Final = 0.5  # of a GPU that the target shares with the trainer


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
    def memory(self) -> float:
        """The share of a GPU's memory that the target takes while the drafter learns."""
        return SHARED_MEMORY if self.shared else 0.85

    @property
    def writers(self) -> list[tuple[int, ...]]:
        """The GPUs of each copy of the target that writes answers."""
        every = sorted({*self.teacher, *self.trainer})
        copies = len(every) // self.ranks
        return [tuple(every[self.ranks * each : self.ranks * (each + 1)]) for each in range(copies)]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A training as it will be written. `target`: its shape; `target_name`: folder or hub id;
    `hub_start`: of an independent draft, the published weights that it begins with, "" for those
    that archsearch makes; `temperature`: of the answers; `prompts`: the user's file; `run`, `rank`:
    whose answer this is; `vllm`: its version; `held`: `longest` of `export.engines.Priced`, which
    says `samples`, `quantise`, `drafts` and `switches`;
    `beyond`: what to expect where requests are longer than the text, "" where no less."""

    library: Library
    drafter: Drafter
    target: Architecture
    target_name: str
    gamma: int
    needs: Needs
    stages: tuple[Stage, ...]
    gpus: Gpus
    vllm: str
    run: str
    rank: int
    device: str
    prompts: str = "prompts.jsonl"
    temperature: float = 0.0
    samples: bool = True
    hub_start: str = ""
    dtype: str = "bfloat16"
    quantise: str = ""
    drafts: str = ""
    switches: str = ""
    held: int | None = None
    beyond: str = ""

    @property
    def family(self) -> str:
        return self.drafter.family

    @property
    def epochs(self) -> float:
        return self.needs.epochs

    @property
    def text_tokens(self) -> int:
        """Tokens that the target writes: those seen, less the repeats."""
        assert self.needs.tokens is not None
        return round(self.needs.tokens / self.epochs)

    @property
    def settings(self) -> dict[str, Any]:
        """Of the library's trainer: its own, but for what few steps ask for."""
        chosen = dict(self.library.families[self.family])
        assert self.needs.tokens is not None
        each = self.needs.tokens / (len(self.gpus.trainer) * LEAST_STEPS)  # tokens of a step
        if self.library.name == "trl":
            chosen["per_device_train_batch_size"] = int(min(max(each / ANSWER, 1), LARGEST_BATCH))
            chosen["learning_rate"] = learning_rate(self.drafter.parameters())
        if each < chosen.get("total_seq_len", 0):
            chosen |= {"optimizer": "adamw", "weight_decay": 0.0}
        return chosen

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

    def to_dict(self) -> dict[str, object]:
        """What recipe.json holds."""
        library, gpus = self.library, self.gpus
        own = "family gamma text_tokens epochs vllm temperature run rank device beyond".split()
        return {
            "library": library.name,
            "version": library.version,
            "settings_from": library.source,
            "settings": self.settings,
            **{name: getattr(self, name) for name in own},
            "drafter": self.drafter.label(),
            "architecture": self.drafter.architecture.to_dict(),
            "target": self.target_name,
            "tokens": self.needs.tokens,
            "needs": self.needs.to_dict(),
            "stages": [as_data(stage) for stage in self.stages],
            "gpus": {"target_ranks": gpus.ranks, "teacher": gpus.teacher, "trainer": gpus.trainer},
        }


def share_gpus(count: int, ranks: int, needs: Needs, *, online: bool, halves: bool) -> Gpus:
    """GPUs for the target and for the trainer. `ranks`: what one copy of the target takes;
    `online`: the target runs beside the trainer, which gets its share of the hours; else the
    trainer has all of them; `halves`: SHARED_MEMORY of one GPU holds the target.

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
    if count == 1 and halves:
        return Gpus(1, every, every)
    if count == ranks:
        raise ArchsearchError(
            f"the target takes {f'{ranks} GPUs' if ranks > 1 else 'more than half of a GPU'} and"
            f" the trainer runs beside it, got --gpus {count}; use {ranks + 1} or more"
        )
    hours = needs.teacher_hours + needs.training_hours
    wanted = count * needs.teacher_hours / hours if hours > 0 else count / 2
    copies = max(1, min(round(wanted / ranks), (count - 1) // ranks))
    return Gpus(ranks, every[: copies * ranks], every[copies * ranks :])
