"""confirmed.json: what a real engine did with a candidate, prompt by prompt, beside its prediction,
and whether that decides anything."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from archsearch.engines.measure.results import ByPrompt
from archsearch.estimate import Estimate
from archsearch.records import Maybe, from_data
from archsearch.runs.terms import TermErrors
from archsearch.search.objective import Score
from archsearch.speedup import DISTURBED_GAP, counting_doubt


@dataclass(frozen=True)
class Exact:
    """How many answers in float32 are the target's own, and alpha of these runs."""

    prompts: int
    identical: int
    alpha: Maybe[float] = None

    def words(self, of: str = "/") -> str:
        """`7/8`."""
        return f"{self.identical}{of}{self.prompts}"


@dataclass(frozen=True, kw_only=True)
class Judged(ByPrompt):
    """A drafter at one gamma, prompt by prompt, beside its prediction. `undecided`: why it decides
    nothing, None where it does (a file of before that field is judged by its own figures);
    `disturbed`: the machine was; `relative_error`: predicted / measured - 1."""

    predicted_speedup: float | None
    relative_error: float | None
    disturbed: bool = False
    undecided: str | None = None

    @classmethod
    def of(cls, found: ByPrompt, predicted: float | None, /, **more: Any) -> Self:
        """`found` beside the speed-up that was predicted, with fields of the class besides."""
        value, pooled = found.speedup.value, found.speedup_pooled or found.speedup.value
        own = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
        return cls(
            **own,
            predicted_speedup=predicted,
            relative_error=None if predicted is None else predicted / value - 1.0,
            disturbed=abs(pooled / value - 1.0) > DISTURBED_GAP,
            undecided=counting_doubt(value, pooled),
            **more,
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Raises one of WRONG_SHAPE."""
        row = from_data(cls, data)
        if "undecided" in data or not row.speedup_pooled:
            return row
        doubt = counting_doubt(row.speedup.value, row.speedup_pooled)
        return dataclasses.replace(row, undecided=doubt)


@dataclass(frozen=True, kw_only=True)
class ConfirmedGamma(Judged):
    """One gamma of confirmed.json. `predicted`: the score that stood beside it, with the tau of
    held-out text; `..._at_measured_tau`: with the one that the engine counted, which leaves the
    error of the times; `predicted_round_s` holds `overhead_s`, what the engine adds; `context`:
    tokens in the KV cache in mid-answer; `slowdown`: of the machine against the profile, taken out
    of the measured times of `error_by_term`; `draft_dtype`: of the draft, where it was another than
    the target's; `latency`: where predicted times come from; `stops_below`: the probability below
    which the draft stops, 0 for never."""

    predicted: Score | None = None
    predicted_at_measured_tau: float | None = None
    relative_error_at_measured_tau: float | None = None
    predicted_round_s: float | None = None
    overhead_s: Estimate | None = None
    error_by_term: TermErrors | None = None
    context: int | None = None
    slowdown: float | None = None
    dtype: str = ""
    draft_dtype: str = ""
    latency: str = ""
    profile_first: str | None = None
    stops_below: float = 0.0

    def is_stale(self, alpha: Estimate) -> bool:
        """Whether the draft's alpha on held-out text is another than the one this confirmation
        predicted from."""
        if (
            self.predicted is None or alpha.source != "measured"
        ):  # a continued search writes the prior's alpha again
            return False
        return not math.isclose(self.predicted.alpha.value, alpha.value, rel_tol=1e-9)


@dataclass(frozen=True, kw_only=True)
class Confirmed(ConfirmedGamma):
    """confirmed.json: its best gamma, and the `other_gammas` that ran. `prompts_seen`: why the
    prompts are not unseen ones; `kept_earlier`: which earlier confirmation keeps its place.
    `stopping`: the same draft when it stops where unsure, where that gains by replay (by the share
    `stopping_gain` over its best gamma); else None."""

    rank: int | None = None
    prompts_seen: str | None = None
    architecture: str = ""
    identical_output_float32: Exact | None = None
    identical_output_unchecked: str | None = None
    other_gammas: tuple[ConfirmedGamma, ...] = ()
    stopping: ConfirmedGamma | None = None
    stopping_gain: Maybe[Estimate] = None
    seconds: float = 0.0
    kept_earlier: Maybe[str] = None

    @property
    def stops(self) -> ConfirmedGamma | None:
        """The draft that stops where unsure, where that was measured and not slower; else None."""
        found = self.stopping
        better = found is not None and found.gain.value >= self.gain.value
        return found if better and found is not None and found.undecided is None else None


CONFIRMED_FIELDS: Final = tuple(
    field.name
    for field in dataclasses.fields(Confirmed)
    if field.default is field.default_factory is dataclasses.MISSING
)
"""What every confirmed.json holds."""
