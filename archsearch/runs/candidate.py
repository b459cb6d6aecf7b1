"""One ranked candidate of a run: best/<rank>/ with its score, and its weights, trace and training
record once it was trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from archsearch.architecture.architecture import Architecture
from archsearch.models.files import has_weights
from archsearch.records import from_data, load
from archsearch.search.objective import Score

SCORE_FILE: Final = "score.json"
TRAINING_FILE: Final = "training.json"
TRACE_FILE: Final = "trace.npz"


@dataclass(frozen=True, slots=True)
class TrainingLook:
    """A look at a draft while it was trained: alpha on texts that it is not trained on, and the
    mean training loss before it.

    `tokens`, `seconds`: of training so far; `epochs`: times that it has seen all of its text;
    `loss` None and `epochs` None where that is not known.
    """

    tokens: int
    seconds: float
    alpha: float
    loss: float | None = None
    epochs: float | None = None


@dataclass(frozen=True)
class Divergence:
    """Of a draft from the target on held-out text, in nats a token, and the alpha that it says."""

    nats: float
    alpha: float


@dataclass(frozen=True)
class TrainingRecord:
    """training.json: how long a draft was trained (seconds, tokens with prompts) and on what.
    `record`: the whole file, which export copies; `looks`: its learning curve; `kept`: the look
    whose weights stayed, `stopped`: why training ended before its time, `distinct_tokens`: that the
    target wrote for it, `taken_from`: the folder of another trainer; None, "" where the file does
    not say."""

    architecture: Architecture
    tokens: int
    seconds: float
    record: dict[str, Any] = field(repr=False, compare=False)
    looks: tuple[TrainingLook, ...] = ()
    kept: TrainingLook | None = None
    stopped: str = ""
    distinct_tokens: int | None = None
    tokens_per_s: float = 0.0
    divergence: Divergence | None = None
    taken_from: str = ""

    @property
    def epochs(self) -> float | None:
        """How often it has seen all of its text."""
        if self.record.get("epoch_tokens"):
            return self.tokens / float(self.record["epoch_tokens"])
        return self.looks[-1].epochs if self.looks else None

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TrainingRecord:
        """Read training.json, of this version or an older one. Raises one of WRONG_SHAPE."""
        looks = data.get("looks")
        if looks is None:
            looks = _looks_of_curves(data)
        else:
            looks = [look for look in looks if look.get("alpha") is not None]
        own = {"record": dict(data), "tokens": data.get("tokens") or 0, "looks": looks}
        own["distinct_tokens"] = data.get("distinct_tokens") or data.get("text_tokens") or None
        return from_data(cls, data | own)

    def to_dict(self) -> dict[str, object]:
        """training.json as it was read."""
        return dict(self.record)


def _looks_of_curves(data: Mapping[str, Any]) -> tuple[TrainingLook, ...]:
    """Looks of a file that has curves over seconds only: tokens in proportion to them, the loss
    noted last before each."""
    tokens, seconds = data.get("tokens") or 0, float(data["seconds"])
    losses = [
        (float(at), float(loss)) for at, loss in data.get("loss_curve") or () if loss is not None
    ]
    looks = []
    for at, alpha in data.get("alpha_curve") or ():
        if alpha is not None:
            before = [loss for when, loss in losses if when <= float(at)]
            seen = round(tokens * float(at) / seconds) if seconds > 0 else 0
            looks.append(
                TrainingLook(seen, float(at), float(alpha), before[-1] if before else None)
            )
    return tuple(looks)


def read_training(folder: Path) -> TrainingRecord | None:
    """training.json of a draft folder, None where it was not trained. Raises ArchsearchError where
    it is broken."""
    return load(folder / TRAINING_FILE, "training record", TrainingRecord.from_dict)


@dataclass(frozen=True)
class Candidate:
    """A rank of a run: its score and the folder that holds everything else of it."""

    score: Score
    folder: Path

    @property
    def rank(self) -> int:
        assert self.score.rank is not None
        return self.score.rank

    @property
    def architecture(self) -> Architecture:
        return self.score.architecture

    @property
    def has_weights(self) -> bool:
        """Whether it was trained."""
        return has_weights(self.folder)

    def training(self) -> TrainingRecord | None:
        return read_training(self.folder)
