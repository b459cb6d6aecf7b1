"""What measurements of earlier runs did to the answer: which were used, on which text, and how far
they moved alpha."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from archsearch.acceptance.estimator import AcceptanceContext
from archsearch.acceptance.known import AskedText, KnownDraft, Match
from archsearch.acceptance.prior import PriorAcceptance
from archsearch.acceptance.terms import REFERENCE_LAYERS
from archsearch.architecture.architecture import Architecture
from archsearch.estimate import Estimate

TEXTS_SHOWN: Final = 3
RUNS_TOLD: Final = 2


@dataclass(frozen=True, slots=True)
class EarlierText:
    """One text of earlier runs: the runs, how many drafts were measured on it, how alike it is to
    the asked one (0 to 1; `match` says how that is known), and alpha of the reference draft with
    these measurements alone."""

    runs: tuple[str, ...]
    drafts: int
    match: Match
    likeness: float
    alpha: Estimate

    def words(self) -> str:
        more = f" and {len(self.runs) - RUNS_TOLD} more" if len(self.runs) > RUNS_TOLD else ""
        runs = f"run{'s' if len(self.runs) > 1 else ''} {', '.join(self.runs[:RUNS_TOLD])}{more}"
        text = {
            "same": "the same prompts",
            "other": f"other text (likeness {self.likeness:.2f})",
            "unknown": "text that could not be compared",
        }[self.match]
        return f"{self.drafts} draft{'s' if self.drafts > 1 else ''} of {runs} on {text}"


@dataclass(frozen=True, slots=True)
class Earlier:
    """What all earlier runs did to alpha of a reference draft, a shape of `layers` layers: `before`
    any of them, `after` all."""

    layers: int
    before: Estimate
    after: Estimate
    texts: tuple[EarlierText, ...]

    def words(self) -> str:
        """One line for people."""
        shown = [
            f"{text.words()} {_moved(self.before, text.alpha, self.layers if not number else None)}"
            for number, text in enumerate(self.texts[:TEXTS_SHOWN])
        ]
        more = len(self.texts) - TEXTS_SHOWN
        rest = f"; {more} more text{'s' if more > 1 else ''}" if more > 0 else ""
        together = f"; together to {self.after.value:.2f}" if len(self.texts) > 1 else ""
        return f"earlier runs: {'; '.join(shown)}{rest}{together}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "layers": self.layers,
            "alpha_before": self.before.to_dict(),
            "alpha_after": self.after.to_dict(),
            "texts": [
                {**asdict(text), "runs": list(text.runs), "alpha": text.alpha.to_dict()}
                for text in self.texts
            ],
        }


def earlier(
    target: Architecture, known: Sequence[KnownDraft], asked: AskedText, temperature: float
) -> Earlier | None:
    """What `known` did to alpha of a draft of the target's width with two layers, on the asked
    text; None where nothing is known.

    The texts that are most alike come first.
    """
    if not known:
        return None
    shape = target.replace(num_hidden_layers=min(REFERENCE_LAYERS, target.num_hidden_layers))
    context = AcceptanceContext(target, temperature, domain=asked.domain or "chat")
    by_text: dict[str, list[KnownDraft]] = {}
    for draft in known:
        by_text.setdefault(draft.observation.text, []).append(draft)

    def alpha(drafts: Sequence[KnownDraft]) -> Estimate:
        prior = PriorAcceptance().about(target).fit([draft.observation for draft in drafts])
        return prior.predict(shape, context).alpha

    texts = [
        EarlierText(
            tuple(dict.fromkeys(draft.run.name for draft in drafts)),
            len(drafts),
            drafts[0].match,
            drafts[0].observation.likeness,
            alpha(drafts),
        )
        for drafts in by_text.values()
    ]
    texts.sort(key=lambda text: (-text.likeness, text.match == "unknown", text.runs))
    return Earlier(shape.num_hidden_layers, alpha([]), alpha(known), tuple(texts))


def _moved(before: Estimate, after: Estimate, layers: int | None) -> str:
    what = f"alpha of a {layers}-layer draft " if layers is not None else ""
    if abs(after.value - before.value) < 0.005:
        return f"left {what or 'it '}at {before.value:.2f}"
    return f"moved {what or 'it '}from {before.value:.2f} to {after.value:.2f}"
