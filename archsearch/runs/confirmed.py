"""confirmed.json and load-<engine>.json: what a real engine did with a candidate, by prompt and
under load, beside what was predicted, and why that was off, term by term."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, Self

from archsearch.engine_facts import ENGINES
from archsearch.engines.measure.results import ByPrompt, ScheduleVerdict, UnderLoad
from archsearch.estimate import Estimate, number
from archsearch.records import Maybe, from_data
from archsearch.schedule import Ranges
from archsearch.search.objective import Score
from archsearch.speedup import RoundTerms, counting_doubt, error_by_term, is_disturbed

TERMS: Final = tuple(field.name for field in fields(RoundTerms))
REST: Final = "rest"
SCHEDULED: Final = "schedule"  # the name of the variant that follows the schedule


@dataclass(frozen=True)
class TermErrors:
    """The terms as predicted and as measured, and the part of each in ln(predicted / measured
    speed-up)."""

    predicted: RoundTerms
    measured: RoundTerms
    log_error: RoundTerms

    @classmethod
    def between(cls, predicted: RoundTerms, measured: RoundTerms) -> TermErrors:
        return cls(predicted, measured, error_by_term(predicted, measured))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TermErrors:
        """KeyError for a missing term, ValueError or TypeError for what is no number."""
        parts = [part.name for part in fields(cls)]
        return cls(
            *(RoundTerms(**{name: number(data[name][part]) for name in TERMS}) for part in parts)
        )

    def to_dict(self) -> dict[str, dict[str, float]]:
        """term -> predicted, measured, log_error."""
        return {
            name: {part.name: getattr(getattr(self, part.name), name) for part in fields(self)}
            for name in TERMS
        }

    def shares(self, relative_error: float) -> dict[str, float]:
        """What each term and the rest bring to `relative_error` of the speed-up (predicted /
        measured - 1); they add up to it.

        The parts of ln(predicted / measured) are scaled by one factor.
        """
        total = math.log1p(relative_error)
        logs = {name: float(getattr(self.log_error, name)) for name in TERMS}
        logs[REST] = total - math.fsum(logs.values())
        factor = relative_error / total if abs(total) > 1e-9 else 1.0
        return {name: factor * value for name, value in logs.items()}


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
        return cls(
            **vars(found),
            predicted_speedup=predicted,
            relative_error=None if predicted is None else predicted / value - 1.0,
            disturbed=is_disturbed(value, pooled, found.steady),
            undecided=counting_doubt(value, pooled, found.prompts, found.steady),
            **more,
        )

    @property
    def answer(self) -> str:
        """Whether speculation pays, by the whole interval."""
        if self.undecided:
            return f"Not decided: {self.undecided}. Confirm it again with nothing else running"
        low, high = self.interval
        if low > 1.0 or high < 1.0:
            return f"Speculation {'pays' if low > 1.0 else 'does not pay'}"
        return "Too close to call (1x lies within the error)"

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Self:
        """Raises one of WRONG_SHAPE."""
        row = from_data(cls, data)
        if "undecided" in data or not row.speedup_pooled:
            return row
        figures = row.speedup.value, row.speedup_pooled, row.prompts, row.steady
        return dataclasses.replace(row, undecided=counting_doubt(*figures))


def _trained_since(before: Estimate | None, alpha: Estimate) -> bool:
    # a continued search writes the prior's alpha again
    if before is None or alpha.source != "measured":
        return False
    return not math.isclose(before.value, alpha.value, rel_tol=1e-9)


class Paced:
    """What was measured at the machine's own pace, which is not the profile's."""

    slowdown: float | None

    @property
    def pace_words(self) -> list[str]:
        """One sentence about that pace; none where nobody looked."""
        if self.slowdown is None:
            return []
        words = (
            f"The machine ran {self.slowdown:.2f} times slower than the profile's reference, which"
            " predicted times are for: to part errors, measured times are divided by that; a"
            " speed-up does not feel it."
        )
        return [words]


@dataclass(frozen=True, kw_only=True)
class ConfirmedGamma(Judged, Paced):
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
        return _trained_since(self.predicted.alpha if self.predicted else None, alpha)


@dataclass(frozen=True, kw_only=True)
class Confirmed(ConfirmedGamma):
    """confirmed.json: its best gamma, and the `other_gammas` that ran. `prompts_seen`: why the
    prompts are not unseen ones; `prompts_file`: where they are not the run's held-out ones;
    `kept_earlier`: which earlier confirmation keeps its place.
    `stopping`: the same draft when it stops where unsure, where that gains by replay (by the share
    `stopping_gain` over its best gamma); else None."""

    rank: int | None = None
    prompts_seen: str | None = None
    prompts_file: Maybe[str] = None
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
        """The draft that stops where unsure, where that was measured and slower neither by the
        median prompt nor over all tokens; else None."""
        found = self.stopping
        if found is None or found.undecided is not None or found.gain.value < self.gain.value:
            return None
        return found if (found.speedup_pooled or 0.0) >= (self.speedup_pooled or 0.0) else None

    @property
    def padded_when_served(self) -> bool:
        """Whether it ran with the kept rows of a trimmed head where users load the full one."""
        trimmed = self.predicted is not None and self.predicted.architecture.trimmed
        facts = ENGINES.get(self.engine)
        return trimmed and facts is not None and facts.trimmed_head

    @property
    def prompts_words(self) -> str:
        """`24 held-out prompts`."""
        of = f" of {self.prompts_file}" if self.prompts_file else ""
        return f"{self.prompts}{'' if of else ' held-out'} prompts{of}"

    @property
    def identity_words(self) -> str:
        """One sentence about whether the output is the target's own."""
        identity, exact = self.identical_output, self.identical_output_float32
        dtype = self.dtype or "the run's dtype"
        gaps = [abs(each.logit_gap) for each in identity.differences if each.logit_gap is not None]
        words = "Output was sampled (temperature above 0): answers are not compared token by token"
        if identity.prompts:
            same = f"{identity.identical} of {identity.prompts} answers identical in {dtype}"
            words = f"Output with and without the draft: {same}"
        if gaps:
            most = f"{max(gaps):.3g}"
            words += f" (the others part where two tokens' logits differ by at most {most})"
        if exact and dtype != "float32":
            words += f"; {exact.words(' of ')} in float32"
        return words + "."


CONFIRMED_FILE: Final = "confirmed.json"
LOAD_FILE: Final = "load-{engine}.json"
LOAD_FILES: Final = "load-*.json"


@dataclass(frozen=True, kw_only=True)
class LoadRow(UnderLoad):
    """One way to serve at one concurrency, the target alone beside it (`decode_s`: seconds of one
    of its steps), and the speed-up that was predicted, None where nothing was priced."""

    speedup: Estimate = field()
    baseline_tokens_per_s: float
    decode_s: float | None = None
    predicted_speedup: Estimate | None = None
    relative_error: float | None = None
    relative_error_at_measured_tau: float | None = None
    error_by_term: TermErrors | None = None

    def __post_init__(self) -> None:
        if self.concurrency < 1 or self.speedup.value <= 0:
            raise ValueError(f"concurrency {self.concurrency}, speed-up {self.speedup}")


@dataclass(frozen=True)
class ScheduleRun:
    """The schedule that was run: its `ranges`, the verdict at each concurrency, and for each
    setting (`off`, `schedule`, a fixed gamma) the geometric mean of its speed-ups over all of
    them."""

    ranges: Ranges = ()
    verdict: tuple[ScheduleVerdict, ...] = ()
    overall: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ErrorSummary:
    """Over the rows with a draft: the median absolute error of the predicted speed-up, and the
    shares within 5 and 10 %."""

    cases: int = 0
    median_absolute_error: Maybe[float] = None
    within_5_percent: Maybe[float] = None
    within_10_percent: Maybe[float] = None

    @classmethod
    def of(cls, rows: Sequence[LoadRow]) -> ErrorSummary:
        errors = [
            abs(row.relative_error) for row in rows if row.gamma and row.relative_error is not None
        ]
        if not errors:
            return cls()
        within = (statistics.fmean(error <= most for error in errors) for most in (0.05, 0.10))
        return cls(len(errors), statistics.median(errors), *within)


@dataclass(frozen=True, kw_only=True)
class LoadRecord(Paced):
    """load-<engine>.json.

    `synthetic`: draft tokens were accepted by chance, at `asked_acceptance_by_position`; `alpha`:
    what acceptance was predicted from, where the file says it; `context`, `slowdown`, `latency`: as
    of `ConfirmedGamma`; `baseline`: the target alone at each concurrency; `schedule`: None where
    none was run; `seconds`: what all of it took.
    """

    engine: str
    engine_version: str = ""
    rank: int | None = None
    architecture: str = ""
    dtype: str = ""
    synthetic: bool
    alpha: Estimate | None = None
    asked_acceptance_by_position: tuple[float, ...] | None = None
    context: int | None = None
    slowdown: float | None = None
    repeats: int | None = None
    latency: str = ""
    baseline: tuple[UnderLoad, ...] = ()
    rows: tuple[LoadRow, ...]
    summary: ErrorSummary = ErrorSummary()
    seconds: float = 0.0
    schedule: Maybe[ScheduleRun] = None

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError("no rows")

    @property
    def concurrencies(self) -> list[int]:
        return sorted({row.concurrency for row in self.rows})

    @property
    def variants(self) -> list[str]:
        return list(dict.fromkeys(row.variant for row in self.rows))

    def best(self, concurrency: int) -> LoadRow:
        """The fastest row at a concurrency, as measured."""
        return max(
            (row for row in self.rows if row.concurrency == concurrency),
            key=lambda row: row.speedup.value,
        )

    def headline(self, concurrency: int = 1) -> LoadRow:
        """The fastest row at the concurrency nearest to the one asked for."""

        def distance(number: int) -> tuple[float, int]:
            return abs(math.log(number / concurrency)), number

        return self.best(min(self.concurrencies, key=distance))

    def is_stale(self, alpha: Estimate) -> bool:
        """Whether alpha was measured anew after this was predicted from another one; False where
        the file does not tell."""
        return _trained_since(self.alpha, alpha)
