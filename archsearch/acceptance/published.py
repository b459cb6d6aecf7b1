"""The spreads of published acceptance (published.csv), as `benchmarks/acceptance_fit.py` finds
them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

# What a printed tau or rate is rounded and sampled to, logit.
READING_STD: Final = 0.03
ALIKE_TEXTS: Final = ("chat", "code")
ALIKE_DATASETS: Final = ("chat",)


@dataclass(frozen=True, slots=True)
class Spread:
    """Std in logit of each effect, and of what is left; `slope`: how far the terms of SLOPES differ
    from study to study, as a share of each one's prior std."""

    family: float = 0.2
    family_domain: float = 0.2
    target: float = 0.2
    study: float = 0.2
    lot: float = 0.2
    domain: float = 0.2
    text: float = 0.2
    loose_text: float = 0.3
    dataset: float = 0.2
    loose_dataset: float = 0.2
    draft: float = 0.1
    residual: float = 0.1
    slope: float = 0.5

    def of_text(self, domain: str) -> float:
        """Std of a new text of a domain: its data set's and its own effect together."""
        text = self.text if domain in ALIKE_TEXTS else self.loose_text
        dataset = self.dataset if domain in ALIKE_DATASETS else self.loose_dataset
        return math.hypot(text, dataset)
