"""confirmed.json: what a real engine did with a candidate, prompt by prompt, and whether that
decides anything."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from archsearch.estimate import Estimate, number
from archsearch.runs.fields import as_estimate, optional_number
from archsearch.runs.terms import TermErrors, optional_terms
from archsearch.search.objective import Score
from archsearch.speedup import counting_doubt

CONFIRMED_FIELDS: Final = (
    "engine",
    "engine_version",
    "prompts",
    "gamma",
    "alpha",
    "accepted_by_position",
    "tau",
    "baseline_tokens_per_s",
    "tokens_per_s",
    "speedup",
    "predicted_speedup",
    "relative_error",
    "identical_output",
)


@dataclass(frozen=True)
class Confirmed:
    """The confirmation of one gamma.

    `speedup`: median over prompts; `pooled`: all tokens over all seconds, None in files that lack
    it; `undecided`: why it decides nothing, None where it does (a file of before that field is
    judged by its own figures). `predicted`: the score that stood beside it, None where the file
    lacks it; `interval`: 5-95 % of the speed-up, of a normal distribution where the file lacks it;
    `error_by_term`: None where the engine did not tell every term; `other_gammas`: the others that
    ran. `record`: the whole file.
    """

    engine: str
    engine_version: str
    gamma: int
    alpha: Estimate
    tau: Estimate
    accepted_by_position: tuple[float, ...]
    baseline_tokens_per_s: float
    tokens_per_s: float
    speedup: Estimate
    interval: tuple[float, float]
    pooled: float | None
    undecided: str | None
    predicted: Score | None
    predicted_speedup: Estimate | None
    relative_error: float | None
    error_by_term: TermErrors | None
    other_gammas: tuple[Confirmed, ...]
    record: dict[str, Any] = field(repr=False, compare=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Confirmed:
        """KeyError for a missing field, ValueError or TypeError for what is no number."""
        missing = [name for name in CONFIRMED_FIELDS if name not in data]
        if missing:
            raise KeyError(", ".join(missing))
        predicted = None if data.get("predicted") is None else Score.from_dict(data["predicted"])
        speedup, pooled = as_estimate(data["speedup"]), optional_number(data.get("speedup_pooled"))
        known = (
            data["undecided"]
            if "undecided" in data
            else pooled and counting_doubt(speedup.value, pooled)
        )
        spread, expected = 1.645 * speedup.std, data["predicted_speedup"]
        low, high = data.get("speedup_interval") or (speedup.value - spread, speedup.value + spread)
        return cls(
            str(data["engine"]),
            str(data["engine_version"]),
            int(data["gamma"]),
            as_estimate(data["alpha"]),
            as_estimate(data["tau"]),
            tuple(number(share) for share in data["accepted_by_position"] or ()),
            number(data["baseline_tokens_per_s"]),
            number(data["tokens_per_s"]),
            speedup,
            (number(low), number(high)),
            pooled,
            str(known) if known else None,
            predicted,
            None if expected is None else as_estimate(expected),
            optional_number(data["relative_error"]),
            optional_terms(data.get("error_by_term")),
            tuple(cls.from_dict(row) for row in data.get("other_gammas") or ()),
            dict(data),
        )

    def is_stale(self, alpha: Estimate) -> bool:
        """Whether the draft's alpha on held-out text is another than the one this confirmation
        predicted from."""
        if (
            self.predicted is None or alpha.source != "measured"
        ):  # a continued search writes the prior's alpha again
            return False
        return not math.isclose(self.predicted.alpha.value, alpha.value, rel_tol=1e-9)

    def to_dict(self) -> dict[str, Any]:
        """confirmed.json as it was read."""
        return dict(self.record)
