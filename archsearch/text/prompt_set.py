"""Prompts to train on and prompts kept apart to measure on; what is wrong with prompts or answers
that a draft is to learn from, in one sentence each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from archsearch.errors import ArchsearchError
from archsearch.paths import PACKAGE

if TYPE_CHECKING:
    from archsearch.text.cache import CachedSequence
    from archsearch.text.prompts import Prompt


HELDOUT_SHARE: Final = 0.05
LEAST_HELDOUT: Final = 32  # of a file, as long as that is no more than MOST_HELDOUT_SHARE of it
MOST_HELDOUT_SHARE: Final = 0.25
# Held-out prompts that choose, and as many that confirm: with fewer an interval says nothing.
LEAST_HALF: Final = 8

T = TypeVar("T")


@dataclass(frozen=True)
class PromptSet:
    """Of the held-out prompts half choose (acceptance of finalists, their order, the draft's
    vocabulary) and half confirm: a draft that was chosen on a prompt looks better on it than it is.
    """

    train: list[Prompt]
    heldout: list[Prompt]
    source: str

    @property
    def split(self) -> bool:
        """Whether there are enough held-out prompts to keep some unseen by every choice."""
        return len(self.heldout) >= 2 * LEAST_HALF

    @property
    def choosing(self) -> list[Prompt]:
        """The held-out prompts that choices are made on; all where there are too few to split."""
        return self._half(0)

    @property
    def confirming(self) -> list[Prompt]:
        """The held-out prompts that no choice has seen; all where too few to split."""
        return self._half(1)

    def _half(self, which: int) -> list[Prompt]:
        """Both halves have the same share of each category, and of long and short prompts: what
        answers a long one (a text to sum up, code to mend) is easier to draft."""
        if not self.split:
            return list(self.heldout)
        ranked = sorted(self.heldout, key=lambda p: (p.category, len(p.text)))
        chosen: list[Prompt] = []
        for number, (_, alike) in enumerate(groupby(ranked, key=lambda p: p.category)):
            # Neighbours in length apart: 0 1 1 0. Categories of one take turns.
            chosen += [p for i, p in enumerate(alike) if (number + (i + 1) // 2) % 2 == which]
        return chosen

    def seen_words(self, prompts: Sequence[Prompt]) -> str | None:
        """How many of `prompts` a draft was trained or chosen on; None for none."""
        known = {prompt.messages for prompt in (*self.train, *self.choosing)}
        count = sum(prompt.messages in known for prompt in prompts)
        of = f"{count} of these {len(prompts)} prompts"
        return f"the draft was trained or chosen on {of}, which flatters it" if count else None

    def check_apart(self) -> None:
        """Raise ArchsearchError where a prompt is on both sides: what is measured on it would
        flatter the draft."""
        train = {prompt.messages for prompt in self.train}
        both = {prompt.messages: prompt.text for prompt in self.heldout if prompt.messages in train}
        if both:
            raise ArchsearchError(
                f"{len(both)} prompts are in both the training and the held-out file (one:"
                f" {min(both.values())[:60]!r}); remove them from one"
            )


def load_prompt_set(
    prompts: Path | None, heldout: Path | None, least: int = LEAST_HELDOUT
) -> PromptSet:
    """The user's prompts, or the demo's own where none are given. Without a held-out file every
    20th prompt is held out, of a small file more: `least` prompts (0: as version 0.1.0 did), a
    quarter of it at most. Raises ArchsearchError where too few are left to train on."""
    from archsearch.text.prompts import read_prompts

    if prompts is None:
        folder = PACKAGE / "demo"
        return PromptSet(
            read_prompts(folder / "train_prompts.jsonl"),
            read_prompts(heldout or folder / "heldout_prompts.jsonl"),
            "the prompts that ship with archsearch (customer requests to a shop and a travel"
            " agency)",
        )
    written = read_prompts(prompts)
    if heldout is not None:
        apart, left_out = distinct(read_prompts(heldout))
        return PromptSet(written, apart, f"{prompts}, held out: {heldout}{left_out}")
    everything, left_out = distinct(written)
    step = max(2, round(1 / HELDOUT_SHARE))
    if least:
        step = min(step, max(round(1 / MOST_HELDOUT_SHARE), len(everything) // least))
    elif len(everything) < 2 * step:
        step = 4
    if len(everything) < 8:
        count = f"{len(written)} prompts"
        if left_out:
            count += f", {len(everything)} of them distinct"
        raise ArchsearchError(
            f"{prompts} has {count}: a draft would learn their answers by heart and be measured on"
            " nothing else; give at least 8, or a second file with --heldout"
        )
    kept = [prompt for number, prompt in enumerate(everything) if number % step]
    source = f"{prompts}, every {step}th prompt held out{left_out}"
    return PromptSet(kept, everything[::step], source)


def distinct(prompts: Sequence[Prompt]) -> tuple[list[Prompt], str]:
    """Each prompt once, and how many were left out, "" for none: a copy would be trained on and
    measured on, or narrow an interval."""
    found = list({prompt.messages: prompt for prompt in reversed(prompts)}.values())[::-1]
    copies = len(prompts) - len(found)
    return found, f", {copies} repeated prompts left out" if copies else ""


def spread(items: Sequence[T], count: int) -> list[T]:
    """`count` items at equal distances, so that every category of a sorted file is represented."""
    if len(items) <= count:
        return list(items)
    if count <= 1:
        return list(items[:1])
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


# Fewer held-out and training prompts than that leave alpha all but unknown for others.
FEW_PROMPTS: Final = 32
MOST: Final = 0.5  # of the answers: what is wrong with so many is said
SHORT: Final = 1  # tokens of an answer that has nothing to draft
LOOP_TOKENS: Final = 24  # answers shorter than that may repeat themselves and mean it
LOOP_RUN: Final = 4  # tokens of a run that is looked for again
LOOP_SHARE: Final = 0.5  # of an answer's runs that came before in it: a target that goes in circles


def shingles(found: Sequence[T], size: int) -> list[tuple[T, ...]]:
    """Runs of `size` words or tokens; of fewer the one run of all."""
    if len(found) <= size:
        return [tuple(found)] if found else []
    return [tuple(found[i : i + size]) for i in range(len(found) - size + 1)]


def loops(token_ids: Sequence[int]) -> bool:
    """Whether an answer goes in circles: half of its runs of four tokens came before."""
    if len(token_ids) < LOOP_TOKENS:
        return False
    runs = shingles(token_ids, LOOP_RUN)
    return len(set(runs)) < (1.0 - LOOP_SHARE) * len(runs)


def prompt_faults(prompts: Sequence[Prompt]) -> list[str]:
    """What is wrong with a set of prompts."""
    faults, distinct = [], len({prompt.messages for prompt in prompts})
    some = f"{len(prompts)} prompts, {distinct} of them distinct"
    if distinct < FEW_PROMPTS:
        alike = some if distinct < len(prompts) else f"only {len(prompts)} prompts"
        faults.append(
            f"{alike}: the draft learns their answers by heart, and nobody can say how it does on"
            " other prompts"
        )
    elif distinct < MOST * len(prompts):
        faults.append(f"{some}: held-out prompts that were trained on flatter the draft")
    return faults


def answer_faults(answers: Sequence[CachedSequence]) -> list[str]:
    """What is wrong with what the target wrote."""
    faults, count = [], len(answers)
    if not count:
        return ["the target wrote no answer: there is nothing to learn"]
    short = sum(len(answer.written) <= SHORT for answer in answers)
    if short > MOST * count:
        faults.append(
            f"{short} of {count} answers are one token long or empty: there is nothing to draft in"
            " them, and no draft makes them faster"
        )
    circles = sum(loops(answer.written.tolist()) for answer in answers)
    if circles > MOST * count:
        faults.append(
            f"the target repeats itself in {circles} of {count} answers: a draft learns to repeat"
            " too, and its alpha and speed-up hold for such answers only"
        )
    return faults
