"""One ranked candidate of a run: best/<rank>/ with its score, and its weights, trace and training record once it was trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from archsearch.architecture.architecture import Architecture
from archsearch.models.files import has_weights
from archsearch.runs.fields import read_or_raise
from archsearch.search.objective import Score

if TYPE_CHECKING:
    from archsearch.acceptance.measured import Trace

SCORE_FILE: Final = "score.json"
TRAINING_FILE: Final = "training.json"
TRACE_FILE: Final = "trace.npz"


@dataclass(frozen=True)
class TrainingRecord:
    """training.json: how long a draft was trained (seconds, tokens with prompts) and on what. `record`: the whole file, which
    export copies; `alpha_curve`: (seconds, alpha) on a slice of the training text that is not trained on."""

    architecture: Architecture
    tokens: int
    seconds: float
    alpha_curve: tuple[tuple[float, float], ...]
    record: dict[str, Any] = field(repr=False, compare=False)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TrainingRecord:
        curve = tuple((float(seconds), float(alpha)) for seconds, alpha in data.get("alpha_curve") or () if alpha is not None)
        shape = Architecture.from_dict(data["architecture"])
        return cls(shape, int(data.get("tokens") or 0), float(data["seconds"]), curve, dict(data))

    def to_dict(self) -> dict[str, Any]:
        return dict(self.record)

    def without_curves(self) -> dict[str, Any]:
        """The file's content less its long lists: what an export keeps of it."""
        return {key: value for key, value in self.record.items() if not key.endswith("_curve")}


def read_training(folder: Path) -> TrainingRecord | None:
    """training.json of a draft folder, None where it was not trained. Raises ArchsearchError where it is broken."""
    return read_or_raise(folder / TRAINING_FILE, "training record", TrainingRecord.from_dict)


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
        """Whether it was trained: weights are written last, so a folder that holds them is whole."""
        return has_weights(self.folder)

    def training(self) -> TrainingRecord | None:
        return read_training(self.folder)

    def trace(self) -> Trace | None:
        """At which tokens of the held-out texts its greedy token was the target's; None where that was not measured."""
        from archsearch.acceptance.measured import Trace

        path = self.folder / TRACE_FILE
        return Trace.load(path) if path.is_file() else None
