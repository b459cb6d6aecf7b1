"""Acceptance measured: a draft beside the text its target wrote.

One teacher-forced pass of the draft over cached text records where its greedy token is the target's (a trace). The share of ones
is alpha at temperature 0; the sequence of ones and zeros, replayed (`replay.py`), is tau for every gamma. Drafts are compared on
the same texts: the spread over prompts is larger than the differences between drafts, and pairing removes it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.estimate import Estimate
from archsearch.files import atomic_path

if TYPE_CHECKING:
    from archsearch.training.data import CachedSequence, TextCache

RESAMPLES: Final = 500


@dataclass(frozen=True, slots=True)
class Trace:
    """Where a draft agrees with its target: one [tokens] bool array per text, with the text's category and id."""

    agreements: tuple[np.ndarray, ...]
    categories: tuple[str, ...]
    ids: tuple[str, ...]

    def __post_init__(self) -> None:
        if not len(self.agreements) == len(self.categories) == len(self.ids):
            raise ValueError("a trace needs one category and one id per text")

    @property
    def tokens(self) -> int:
        return sum(int(a.shape[0]) for a in self.agreements)

    def of_category(self, category: str) -> Trace:
        """The texts of one category."""
        chosen = [i for i, name in enumerate(self.categories) if name == category]
        return Trace(tuple(self.agreements[i] for i in chosen), (category,) * len(chosen), tuple(self.ids[i] for i in chosen))

    def save(self, path: Path | str) -> None:
        """Write the trace as .npz (atomically)."""
        lengths = np.array([a.shape[0] for a in self.agreements], dtype=np.int64)
        flat = np.concatenate(self.agreements) if self.agreements else np.zeros(0, dtype=bool)
        labels = np.array(json.dumps([self.categories, self.ids]))
        with atomic_path(Path(path)) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, agreement=np.packbits(flat), lengths=lengths, labels=labels)

    @classmethod
    def load(cls, path: Path | str) -> Trace:
        """Read a trace that `save` wrote."""
        try:
            with np.load(path, allow_pickle=False) as data:
                lengths = data["lengths"]
                flat = np.unpackbits(data["agreement"], count=int(lengths.sum())).astype(bool)
                categories, ids = json.loads(str(data["labels"]))
        except FileNotFoundError:
            raise MissingDataError(f"agreement trace not found: {path}") from None
        except (OSError, ValueError, KeyError) as error:
            raise ArchsearchError(f"{path} is not an agreement trace ({error}); measure the draft again") from error
        pieces = np.split(flat, np.cumsum(lengths)[:-1]) if len(lengths) else []
        return cls(tuple(pieces), tuple(categories), tuple(ids))


def agreement_trace(draft: Any, texts: TextCache | Sequence[CachedSequence]) -> Trace:
    """One teacher-forced pass of `draft` over the target's texts (greedy ones, for a trace that means tau)."""
    from archsearch.training.distill import greedy_matches

    sequences: list[CachedSequence] = list(texts.sequences if hasattr(texts, "sequences") else texts)
    if not sequences:
        raise ArchsearchError("there is no text to measure acceptance on; generate some first")
    matches = greedy_matches(draft, sequences)
    return Trace(tuple(matches), tuple(s.category for s in sequences), tuple(s.id for s in sequences))


def alpha(trace: Trace, *, resamples: int = RESAMPLES, seed: int = 0) -> Estimate:
    """Share of agreements, with its bootstrap std over texts (tokens of one text are not independent of each other)."""
    counts = np.array([[a.sum(), a.shape[0]] for a in trace.agreements], dtype=np.float64).reshape(-1, 2)
    total = counts.sum(axis=0) if len(counts) else np.zeros(2)
    if total[1] == 0:
        raise ArchsearchError("the trace holds no tokens; measure on more text")
    value = float(total[0] / total[1])
    if len(counts) < 2:
        # One text says nothing about the spread over texts: the widest a share can have.
        return Estimate(value, float(np.sqrt(value * (1 - value))), "measured")
    picks = np.random.default_rng(seed).integers(len(counts), size=(resamples, len(counts)))
    sums = counts[picks].sum(axis=1)
    return Estimate(value, float(np.std(sums[:, 0] / np.maximum(sums[:, 1], 1), ddof=1)), "measured")


def alpha_by_category(trace: Trace, *, resamples: int = RESAMPLES, seed: int = 0) -> dict[str, Estimate]:
    """alpha of every category, in the order of first appearance."""
    return {name: alpha(trace.of_category(name), resamples=resamples, seed=seed) for name in dict.fromkeys(trace.categories)}


def paired_difference(first: Trace, second: Trace, *, resamples: int = RESAMPLES, seed: int = 0) -> Estimate:
    """alpha(first) - alpha(second) on the same texts, with the bootstrap std of the difference (half of the unpaired one)."""
    lengths = [a.shape for a in first.agreements]
    if first.ids != second.ids or lengths != [a.shape for a in second.agreements]:
        raise ArchsearchError("the two traces are not of the same texts; measure both drafts on one cache")
    counts = np.array([[a.sum() - float(b.sum()), a.shape[0]] for a, b in zip(first.agreements, second.agreements, strict=True)])
    if counts.size == 0 or counts[:, 1].sum() == 0:
        raise ArchsearchError("the traces hold no tokens; measure on more text")
    picks = np.random.default_rng(seed).integers(len(counts), size=(resamples, len(counts)))
    sums = counts[picks].sum(axis=1)
    std = float(np.std(sums[:, 0] / np.maximum(sums[:, 1], 1), ddof=1)) if len(counts) > 1 else 1.0
    return Estimate(float(counts[:, 0].sum() / counts[:, 1].sum()), std, "measured")
