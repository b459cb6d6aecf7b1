"""How alike two sets of prompts are, by their words alone: no model runs, and no text is kept.

A sketch counts pairs of neighbouring words (digits as one, every prompt with the same weight) in
BUCKETS numbers with random signs (a count sketch: what falls together by chance cancels on
average). It is made of each half of the prompts apart: two halves of one set say how alike samples
of one source are, so that few and varied prompts are not taken for unlike ones:

    likeness = mean(a_i . b_j) / sqrt((a_1 . a_2) (b_1 . b_2))
    1: drawn from one source; 0: nothing in common

On eleven kinds of prompts, single words put maths problems and chat at 0.9, pairs at 0.7, and two
samples of one kind at 1.0 (benchmarks/text_likeness.py). Where a language writes no spaces, each of
its characters is a word.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from archsearch import records
from archsearch.errors import ArchsearchError
from archsearch.text.prompt_set import PromptSet, spread

if TYPE_CHECKING:
    from archsearch.text.prompts import Prompt


BUCKETS: Final = 2048
MOST_PROMPTS: Final = 2000  # more say nothing new; a sketch is made in a second
MOST_WORDS: Final = 400  # of a prompt
_SCRIPTS: Final = r"\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff"  # without spaces: kana, Chinese, Thai
# A character of such a script, a word, a number, or a sign.
_WORD: Final = re.compile(rf"[{_SCRIPTS}]|[^\W\d_{_SCRIPTS}]+|\d+|[^\w\s]")


def sketch_of(prompts: Sequence[Prompt]) -> TextSketch:
    """The sketch of a set of prompts. Raises ArchsearchError for none."""
    if not prompts:
        raise ArchsearchError("no prompts to compare")
    whole = sorted(repr(prompt.messages) for prompt in prompts)
    digest = hashlib.blake2b("\n".join(whole).encode(), digest_size=16).hexdigest()
    chosen = spread(prompts, MOST_PROMPTS)
    halves = [_counted(prompt.text for prompt in chosen[which::2]) for which in (0, 1)]
    return TextSketch(digest, len(prompts), (_packed(halves[0]), _packed(halves[1])))


def sketch_of_set(prompts: PromptSet) -> TextSketch:
    """Of all prompts of a run, those held out among them."""
    return sketch_of([*prompts.train, *prompts.heldout])


def likeness(first: TextSketch, second: TextSketch) -> float:
    """0 to 1: the same prompts are 1. Prompts too few or too varied to be alike among themselves
    are compared as they are."""
    if first.digest == second.digest:
        return 1.0
    # [2, BUCKETS]
    a, b = (np.stack([_unpacked(half) for half in sketch.halves]) for sketch in (first, second))
    within = float(a[0] @ a[1]), float(b[0] @ b[1])
    if min(within) <= 0.0:
        a, b = a.sum(0, keepdims=True), b.sum(0, keepdims=True)
        within = float(a[0] @ a[0]), float(b[0] @ b[0])
    size = float(np.sqrt(within[0] * within[1]))
    return min(max(float((a @ b.T).mean()) / size, 0.0), 1.0) if size > 0 else 0.0


def words_of(text: str) -> list[str]:
    """Lower-case words of a text, numbers as "0", signs on their own."""
    return ["0" if word.isdigit() else word for word in _WORD.findall(text.lower())][:MOST_WORDS]


def _counted(texts: Iterable[str]) -> np.ndarray:
    """[BUCKETS] the mean over texts of the share of each word pair, hashed with signs."""
    result, count = np.zeros(BUCKETS), 0
    for text in texts:
        words = ["", *words_of(text)]  # a first word follows nothing
        pairs = Counter(pairwise(words))
        total = sum(pairs.values())
        count += 1
        for pair, times in pairs.items():
            bucket, sign = _place(*pair)
            result[bucket] += sign * times / total
    return result / max(count, 1)


@functools.lru_cache(maxsize=200_000)
def _place(first: str, second: str) -> tuple[int, int]:
    """(bucket, sign) of a pair of words: the same on every machine."""
    number = int.from_bytes(
        hashlib.blake2b(f"{first}\n{second}".encode(), digest_size=8).digest(), "little"
    )
    return number % BUCKETS, 1 if (number >> 32) & 1 else -1


def _packed(counts: np.ndarray) -> str:
    """The root spends the few bits on rare pairs too; the scale of a half cancels in `likeness`."""
    most = float(np.abs(counts).max()) or 1.0
    levels = np.round(127 * np.sign(counts) * np.sqrt(np.abs(counts) / most)).astype(np.int8)
    return base64.b64encode(levels.tobytes()).decode("ascii")


def _unpacked(half: str) -> np.ndarray:
    """[BUCKETS] of unit length, or zero."""
    levels = np.frombuffer(base64.b64decode(half), dtype=np.int8).astype(np.float64)
    counts = np.sign(levels) * levels**2
    length = float(np.linalg.norm(counts))
    return counts / length if length > 0 else counts


SKETCH_FILE: Final = "text_sketch.json"


@dataclass(frozen=True, slots=True)
class TextSketch:
    """text_sketch.json of a run: what is kept of its prompts, so that later runs can tell how alike
    theirs are. `digest`: of the prompts, whatever their order; `halves`:
    [BUCKETS] signed bytes each, as base64: sign and square root of the share of word pairs, the
    largest being 127."""

    digest: str
    prompts: int
    halves: tuple[str, str]
    format: Literal[1] = 1


def load_sketch(folder: Path) -> TextSketch | None:
    """The sketch that lies in a run folder; None where there is none that can be read."""
    return records.load_or_note(folder / SKETCH_FILE, "sketch of the prompts", TextSketch, [])
