"""text_verdict.json of a run: what its text brought, what more text of the kind would bring, and
what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from archsearch.estimate import Estimate
from archsearch.records import as_data

TEXT_VERDICT_FILE: Final = "text_verdict.json"
LITTLE: Final = 0.02  # of the speed-up: what more text must bring to be asked for


@dataclass(frozen=True, slots=True)
class TextStand:
    """`distinct_tokens` that the target wrote for `prompts`, alpha of the draft that learns them,
    and its speed-up."""

    prompts: int
    distinct_tokens: int
    alpha: Estimate
    speedup: Estimate

    def words(self) -> str:
        """`0.30 ± 0.02 (1.09x)`"""
        return f"{self.alpha.value:.2f} ± {self.alpha.std:.2f} ({self.speedup.value:.2f}x)"


@dataclass(frozen=True, slots=True)
class TextVerdict:
    """What the text of a run decides.

    `label`: of the draft; `asked`: prompts to train on, answered or not; `now`: what the draft
    reached; `learnt`: what its text would bring were it learnt in full, None where it is; `more`:
    what more prompts of the kind would bring, None where no curve shows it; `narrow`: the category
    whose alpha is well above that of all, "" for none; `faults`: what is wrong with prompts or
    answers.
    """

    label: str
    asked: int
    now: TextStand
    learnt: TextStand | None = None
    more: TextStand | None = None
    narrow: str = ""
    narrow_alpha: Estimate | None = None
    faults: tuple[str, ...] = ()

    def words(self) -> str:
        """`24k distinct tokens from 317 prompts: alpha 0.30 ± 0.02 (1.09x). 3,000 prompts like
        these would bring about ...`"""
        now, count = self.now, self.now.distinct_tokens
        of_all = "" if now.prompts >= self.asked else f" of {self.asked:,}"
        tokens = f"{count / 1000:.0f}k" if count >= 2000 else f"{count}"
        text = f"{tokens} distinct tokens from {now.prompts:,}{of_all} prompts: alpha {now.words()}"
        if self.learnt is not None:
            text += f"; learnt in full, this text would bring about {self.learnt.words()}"
        text += f". {self._more_words()}"
        if self.narrow and self.narrow_alpha is not None:
            text += (
                f"; or narrow the domain: {self.narrow!r} alone has alpha"
                f" {self.narrow_alpha.value:.2f}"
            )
        elif self.more is not None and self._brings() > LITTLE:
            text += "; or narrow the domain"
        return f"{text.strip()}."

    def _brings(self) -> float:
        """By how much more prompts raise the speed-up, as a share of it."""
        return 0.0 if self.more is None else self.more.speedup.value / self.now.speedup.value - 1.0

    def _more_words(self) -> str:
        more = self.more
        if more is None:
            return (
                "What more prompts would bring is not known: nothing was looked at while it was"
                " trained"
            )
        what = f"{more.prompts:,} prompts like these"
        if self._brings() <= LITTLE:
            return f"More would bring little: {what} about {more.words()}"
        return f"{what} would bring about {more.words()}"

    def to_dict(self) -> dict[str, Any]:
        return as_data(self) | {"words": self.words()}
