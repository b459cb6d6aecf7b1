"""text_verdict.json of a run: what its text brought, what more text of the kind would bring, and
what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from archsearch.estimate import Estimate

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

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompts": self.prompts,
            "distinct_tokens": self.distinct_tokens,
            "alpha": self.alpha.to_dict(),
            "speedup": self.speedup.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        alpha, speedup = Estimate.from_dict(data["alpha"]), Estimate.from_dict(data["speedup"])
        return cls(int(data["prompts"]), int(data["distinct_tokens"]), alpha, speedup)


@dataclass(frozen=True, slots=True)
class TextVerdict:
    """What the text of a run decides.

    `label`: of the draft; `asked`: prompts to train on, answered or not; `now`: what the draft
    reached; `learnt`: what its text would bring were it learnt in full, None where it is; `more`:
    what more prompts of the kind would bring, None where no curve tells; `narrow`: the category
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
        now = self.now
        prompts = (
            f"{now.prompts:,} prompts"
            if now.prompts >= self.asked
            else f"{now.prompts:,} of {self.asked:,} prompts"
        )
        tokens = (
            f"{now.distinct_tokens / 1000:.0f}k"
            if now.distinct_tokens >= 2000
            else f"{now.distinct_tokens}"
        )
        text = (
            f"{tokens} distinct tokens from {prompts}: alpha {_alpha(now.alpha)}"
            f" ({now.speedup.value:.2f}x)"
        )
        if self.learnt is not None:
            text += (
                f"; learnt in full, this text would bring about {_alpha(self.learnt.alpha)}"
                f" ({self.learnt.speedup.value:.2f}x)"
            )
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
            return (
                f"More would bring little: {what} about {_alpha(more.alpha)}"
                f" ({more.speedup.value:.2f}x)"
            )
        return f"{what} would bring about {_alpha(more.alpha)} ({more.speedup.value:.2f}x)"

    def to_dict(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "asked": self.asked,
            "now": self.now.to_dict(),
            "learnt": None if self.learnt is None else self.learnt.to_dict(),
            "more": None if self.more is None else self.more.to_dict(),
            "narrow": self.narrow,
            "narrow_alpha": None if self.narrow_alpha is None else self.narrow_alpha.to_dict(),
            "faults": list(self.faults),
            "words": self.words(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        def stand(name: str) -> TextStand | None:
            return TextStand.from_dict(data[name]) if data.get(name) else None

        alpha = data.get("narrow_alpha")
        return cls(
            str(data["label"]),
            int(data["asked"]),
            TextStand.from_dict(data["now"]),
            stand("learnt"),
            stand("more"),
            str(data.get("narrow") or ""),
            Estimate.from_dict(alpha) if alpha else None,
            tuple(str(fault) for fault in data.get("faults") or ()),
        )


def _alpha(alpha: Estimate) -> str:
    return f"{alpha.value:.2f} ± {alpha.std:.2f}"
