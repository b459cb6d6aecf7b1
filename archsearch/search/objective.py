"""Where latency, acceptance and memory meet: the score of a draft. Pure: the same arguments give
the same Score.

`Scorer` holds what all candidates of one search share (the target's decode, verify and overhead
times are asked once per gamma); `score` is the same for one draft.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray

from archsearch import speedup as speculation
from archsearch.acceptance.estimator import (
    AcceptanceContext,
    AcceptanceEstimator,
    VocabularyCoverage,
)
from archsearch.acceptance.families import FamilyAcceptance, acceptance_of, gap_std
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.grid import ShapeGrid
from archsearch.drafters.drafter import Draft, Drafter
from archsearch.drafters.models import Independent
from archsearch.drafters.registry import as_drafter, read_drafter
from archsearch.engine_facts import engine_facts
from archsearch.errors import ArchsearchError
from archsearch.estimate import Array, Estimate, N
from archsearch.latency.draft_passes import LatencyOfRounds
from archsearch.latency.grid import GridLatency
from archsearch.latency.rounds import Bound, RoundTime
from archsearch.needs import NOTHING, Needs
from archsearch.records import Maybe, Stored, as_data, from_data
from archsearch.search.space import Limits
from archsearch.speedup import RoundTerms
from archsearch.workload import Workload

Positive = Annotated[Estimate, Stored(low=0.0)]
Chance = Annotated[Estimate, Stored(low=0.0, high=1.0)]


@dataclass(frozen=True, slots=True)
class PartScore:
    """One kind of request. `gamma` 0: none is faster than drafting nothing there. `running`:
    requests that decode at once; seconds, with the prompts that are read in between. `ttft_s`
    None: more arrive than are served."""

    name: str
    weight: float
    context: int
    running: float
    gamma: int
    alpha: float
    tau: float
    speedup: float
    tpot_s: float
    plain_tpot_s: float
    ttft_s: float | None
    tokens_per_s: float
    plain_tokens_per_s: float


def gain_of(objective: str, value: N, plain: N) -> N:
    """With the draft over without; larger is better."""
    return plain / value if objective == "tpot" else value / plain


@dataclass(frozen=True, slots=True)
class MixScore:
    """The objective over a mix: its `value` with the draft and without (`plain`), and each part.
    `broken_limits`: in words."""

    objective: str
    value: Annotated[float, Stored(above=0.0)]
    plain: Annotated[float, Stored(above=0.0)]
    parts: tuple[PartScore, ...]
    broken_limits: tuple[str, ...] = ()

    @property
    def gain(self) -> float:
        return gain_of(self.objective, self.value, self.plain)


@dataclass(frozen=True, slots=True)
class Score:
    """What is predicted for a draft at its best gamma; the fields of score.json.

    `gamma` is the best of 1..max_gamma even where `speedup` stays below 1 (`pays` is False then:
    run the target alone). `kv_bytes_per_token`: of the draft. `break_even_alpha`: None where no
    alpha would make the draft pay. Times in seconds. `round_s`: one round. `host_s`: what the
    engine's host needs to launch it, `bound`: which of GPU and host decides it; both None where the
    host is not modelled (CPUs, engines of which nothing is known). `family` and `drafter`: what
    drafts; `drafter` None: an independent draft of that `architecture`. Of a drafter that does not
    draft in every round tau is over all rounds and alpha of those that draft. `assumed`: why its
    acceptance is no more than a belief (`acceptance.families.ASSUMED`). `mix`: what it is worth
    over a mix of work; `speedup` and `tpot_s` are then over the mix, the rest is of its heaviest
    part. `regret`: by which share its `worth` lies below the exact best of (a part of) the space,
    where a search did not score all of it (`samplers.Regret`). `needs`: what it takes to have this
    drafter; None in files of earlier versions.
    """

    rank: Annotated[int | None, Stored(low=1, high=1e6)]
    architecture: Architecture
    parameters: Annotated[int, Stored(low=0, high=1e13)]
    gamma: Annotated[int, Stored(low=0, high=1000)]
    alpha: Chance
    tau: Annotated[Estimate, Stored(low=1.0, high=1001.0)]
    draft_s: Positive
    decode_s: Positive
    verify_s: Positive
    speedup: Annotated[Estimate, Stored(above=0.0)]
    tpot_s: Positive
    kv_bytes_per_token: Annotated[int, Stored(low=0, high=1e10)]
    break_even_alpha: Chance | None
    round_s: Positive | None = None
    host_s: Positive | None = None
    bound: Bound | None = None
    engine: str | None = None
    engine_version: str | None = None
    family: str = "independent"
    drafter: Drafter | None = None
    assumed: str = ""
    mix: MixScore | None = None
    regret: Annotated[float | None, Stored(omit=True, low=0.0, high=1.0)] = None
    needs: Maybe[Needs] = None

    @property
    def worth(self) -> float:
        """What drafts are ranked by: the speed-up, or over a mix the gain in its objective."""
        return self.speedup.value if self.mix is None else self.mix.gain

    @property
    def ranked_by(self) -> float:
        """Its worth among other families: where acceptance is assumed by the lower end of its
        speed-up's interval, but above what is known not to pay where it may."""
        if not self.assumed:
            return self.worth
        low = self.worth * self.speedup.interval[0] / self.speedup.value
        return max(low, min(self.worth, 1.0))

    @property
    def sort_key(self) -> tuple[float, float]:
        """What drafters are sorted by, best first."""
        return -self.ranked_by, -self.worth

    @property
    def is_found(self) -> bool:
        """Whether it is there to be downloaded: what a run trained is there too, and measured."""
        return self.needs_kind == "exists" and self.alpha.source != "measured"

    @property
    def needs_kind(self) -> str:
        """The kind of its `needs`; "" where they are not known."""
        return "" if self.needs is None else self.needs.kind

    @property
    def broken_limits(self) -> tuple[str, ...]:
        """The limits of its mix that it breaks, in words."""
        return self.mix.broken_limits if self.mix else ()

    @property
    def proposer(self) -> Drafter:
        """What drafts."""
        return self.drafter or Independent(self.architecture)

    def loaded_from(self, folder: Path, weights: bool) -> str:
        """What engines load: the folder, or, where that has no `weights`, the hub id of what
        exists."""
        hub_id = None if weights or self.needs is None else self.needs.hub_id
        return str(folder) if hub_id is None else hub_id

    def label(self) -> str:
        """What drafts, in short: its dimensions, and its family where it is no independent
        draft."""
        if self.drafter is None:
            return self.architecture.label()
        return f"{self.drafter.title}: {self.drafter.label()}"

    @property
    def pays(self) -> bool:
        """Whether the draft is predicted to be faster than the target alone."""
        return self.speedup.value > 1.0

    @property
    def slope(self) -> float:
        """d ln(speed-up) / d logit(alpha) at its gamma."""
        alpha = self.alpha.value
        return speculation.tau_slope(alpha, self.gamma) * alpha * (1.0 - alpha) / self.tau.value

    @property
    def terms(self) -> RoundTerms:
        """What the speed-up is made of; files of earlier versions do not tell the round, but the
        time per token does."""
        tau, draft, verify = self.tau.value, self.draft_s.value, self.verify_s.value
        whole = self.tpot_s.value * tau if self.round_s is None else self.round_s.value
        return RoundTerms(tau, self.decode_s.value, draft, verify, whole - draft - verify)

    def with_rank(self, rank: int) -> Score:
        """The same at a place of a ranking."""
        return replace(self, rank=rank)

    def to_dict(self) -> dict[str, object]:
        """score.json: uncertain numbers as {"value", "std", "source"}; alpha, tau and the speed-up
        with "low" and "high" too."""
        return as_data(self) | {"drafter": self.proposer.to_dict()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Score:
        """Read back `to_dict`; ArchsearchError names a field that is missing, unknown or out of
        bounds."""
        drafter = None
        if data.get("family", Independent.family) != Independent.family:
            drafter = read_drafter(Architecture.from_dict(data["architecture"]), data["drafter"])
        return from_data(cls, {**data, "drafter": drafter}, known_only=True)


MOST_KEPT: Final = 2000  # drafts whose rounds are remembered
CHUNK: Final = 1 << 17
"""Numbers that are scored together: their arrays stay in the processor's cache."""
Place = tuple[int, int, int, int]
"""The indices of a shape in a grid: body, depth, window, head."""


@dataclass(frozen=True)
class GridScores:
    """What a score says, of shapes as one array each, [bodies, layers, windows, heads]; `start`:
    the first body's number.

    `feasible`: within the scorer's limits; `ranked_by`: `Score.worth` of each.
    """

    start: int
    speedup: Array
    ranked_by: Array
    gamma: Array
    draft_s: Array
    feasible: NDArray[np.bool_]

    def found(self, flat: int) -> tuple[Place, int]:
        """The place in the grid of index `flat` of the flattened arrays, and its best gamma."""
        body, depth, window, head = (int(i) for i in np.unravel_index(flat, self.speedup.shape))
        return (self.start + body, depth, window, head), int(self.gamma.flat[flat])


class Scorer:
    """Scores drafts of one target under one workload; remembers their times."""

    def __init__(
        self,
        target: Architecture,
        workload: Workload,
        latency: LatencyOfRounds,
        acceptance: AcceptanceEstimator,
        *,
        max_gamma: int = speculation.MAX_GAMMA,
        gammas: Sequence[int] | None = None,
        domain: str = "chat",
    ) -> None:
        """`gammas`: the ones to choose from (default 1..max_gamma); `domain`: which text acceptance
        is asked for."""
        self.gammas = tuple(range(1, max_gamma + 1) if gammas is None else gammas)
        if not self.gammas or min(self.gammas) < 1:
            raise ArchsearchError(f"gamma must be at least 1, got {list(self.gammas)}")
        self.target, self.workload = target, workload
        self.latency, self.acceptance = latency, acceptance
        self.limits = Limits()
        self.known_families: Mapping[str, FamilyAcceptance] = {}
        self.context = AcceptanceContext(target, workload.temperature, workload.context_len, domain)
        self.decode_s = latency.decode_s(target, workload)
        self._verify_s = {gamma: latency.verify_s(target, workload, gamma) for gamma in self.gammas}
        self._rounds: dict[Draft, dict[int, RoundTime]] = {}
        self._means: dict[object, Array | None] = {}

    @property
    def target_correlation(self) -> float:
        """See `speedup.speedup_estimate`."""
        return self.latency.target_correlation

    def __call__(self, draft: Draft, best: int | None = None) -> Score:
        """The score of a draft; `best`: its gamma, where that is known."""
        if best is not None:
            return self.with_gammas((best,))(draft)
        drafter = as_drafter(draft)
        known = self.predicted_acceptance(drafter)
        if known.taus is not None:
            counted = drafter.with_share(known.share.value) if known.share is not None else drafter
            return self.measured(counted, known.acceptance.alpha, known.taus)
        alpha, drift = known.acceptance.alpha, known.acceptance.drift
        positions = speculation.drifting_positions(alpha.value, drift.value, max(self.gammas))
        reach = speculation.accepted_by_position(positions)

        return self._best(
            drafter.with_share(known.drafting),
            alpha,
            lambda gamma: 1.0 + known.drafting * math.fsum(reach[:gamma]),
            known.tau_at,
            assumed=known.assumed,
        )

    def predicted_acceptance(
        self, drafter: Drafter, context: AcceptanceContext | None = None
    ) -> FamilyAcceptance:
        """alpha of a drafter, its drift, and how often it drafts: as `known_families` has it, else
        as the estimator says of `context` (None: the scorer's)."""
        found = self.known_families.get(drafter.family)
        return found or acceptance_of(drafter, self.acceptance, context or self.context)

    def measured(
        self,
        draft: Draft,
        alpha: Estimate,
        taus: Mapping[int, Estimate],
        *,
        gammas: Sequence[int] | None = None,
    ) -> Score:
        """The score of a draft whose tau was measured for each gamma (a replayed trace, an engine's
        counts): no closed form.

        `gammas`: the ones to choose from (default: all of this scorer's that were measured).
        Raises ArchsearchError where tau was measured for none of the gammas.
        """
        known = [gamma for gamma in gammas or self.gammas if gamma in taus]
        if not known:
            raise ArchsearchError(
                f"tau was measured for gamma {sorted(taus)}, not for any of"
                f" {list(gammas or self.gammas)}"
            )
        tau_of = taus.__getitem__
        return self._best(as_drafter(draft), alpha, lambda each: tau_of(each).value, tau_of, known)

    def over_grid(self, grid: ShapeGrid) -> Iterator[GridScores]:
        """Scores of all shapes of a grid, as of one but without std, some bodies at a time."""
        size = max(1, CHUNK // (self.grid_numbers * math.prod(grid.shape[1:])))
        for start in range(0, grid.shape[0], size):
            yield self.grid_scores(grid.part(slice(start, start + size)), start)

    @property
    def grid_numbers(self) -> int:
        """Numbers that a shape of a grid takes while it is scored."""
        return 1

    def grid_scores(self, grid: ShapeGrid, start: int) -> GridScores:
        """Scores of all shapes of a part of a grid that starts at the body `start`."""
        acceptance: Any = self.acceptance
        alpha, drift = acceptance.alphas(grid, self.context)
        positions = speculation.drifting_positions(alpha, drift, max(self.gammas))
        reach = speculation.accepted_by_position(positions)
        tokens = list(itertools.accumulate(reach, initial=1.0))
        best = [np.full(grid.shape, -np.inf), np.zeros(grid.shape), np.zeros(grid.shape)]
        latency = GridLatency(self.latency, self.target, grid, self.workload, self.gammas)
        for gamma, time in zip(self.gammas, latency.rounds(), strict=True):
            found = tokens[gamma] * self.decode_s.value / time.round_s.value
            better = found > best[0]
            for array, value in zip(best, (found, gamma, time.draft_s.value), strict=True):
                np.copyto(array, value, where=better)
        fits = self._within(self.constraints(grid), grid)
        gain, at, draft_s = best
        return GridScores(start, gain, gain, at, draft_s, fits)

    @staticmethod
    def _within(constraints: Mapping[str, Any], grid: ShapeGrid) -> NDArray[np.bool_]:
        fits = np.ones(grid.shape, dtype=bool)
        for over in constraints.values():
            fits &= over <= 0.0
        return fits

    def at_context(self, context_len: int) -> Scorer:
        """The same scorer with another number of tokens in the KV cache."""
        return self._priced(replace(self.workload, context_len=context_len), self.latency)

    def at_batch(self, batch_size: int) -> Scorer:
        """The same scorer with another number of sequences in a pass."""
        return self._priced(replace(self.workload, batch_size=batch_size), self.latency)

    def with_latency(self, latency: LatencyOfRounds) -> Scorer:
        """The same scorer with another latency model: of another engine."""
        return self._priced(self.workload, latency)

    def _with(self, **changes: object) -> Scorer:
        changed = copy.copy(self)
        changed.__dict__.update(changes)
        return changed

    def with_gammas(self, gammas: Sequence[int]) -> Scorer:
        """The same scorer with these gammas to choose from."""
        return self._with(gammas=tuple(gammas))

    def with_limits(self, limits: Limits) -> Scorer:
        """The same scorer, for drafts that take no more."""
        return self._with(limits=limits)

    def with_coverage(self, coverage: VocabularyCoverage) -> Scorer:
        """The same scorer, knowing how much of the user's text a trimmed head covers."""
        return self.with_acceptance(self.acceptance, replace(self.context, coverage=coverage))

    def with_acceptance(
        self, acceptance: AcceptanceEstimator, context: AcceptanceContext | None = None
    ) -> Scorer:
        """The same scorer with another estimator, asked in `context` (None: the same). The target's
        times are kept."""
        return self._with(acceptance=acceptance, context=context or self.context)

    def with_families(self, known: Mapping[str, FamilyAcceptance]) -> Scorer:
        """The same scorer, knowing what was measured of whole families (a replayed n-gram) instead
        of asking the estimator."""
        return self._with(known_families={**self.known_families, **known})

    def _priced(self, workload: Workload, latency: LatencyOfRounds) -> Scorer:
        """The same scorer with the target's times of another workload or latency model."""
        changed = Scorer(self.target, workload, latency, self.acceptance, gammas=self.gammas)
        changed.limits = self.limits
        # What is asked of acceptance may reach beyond the cache that is priced: to the end of the
        # answers.
        beyond = self.context.context_len - self.workload.context_len
        changed.context = replace(self.context, context_len=workload.context_len + beyond)
        changed.known_families = self.known_families
        return changed

    def _best(
        self,
        drafter: Drafter,
        alpha: Estimate,
        tokens_of: Callable[[int], float],
        tau_of: Callable[[int], Estimate],
        gammas: Sequence[int] | None = None,
        assumed: str = "",
    ) -> Score:
        """The Score at the gamma with the highest speed-up; `tokens_of` is the cheap mean of
        `tau_of`."""
        decode_s = self.decode_s.value
        best_gain, gamma, best = -math.inf, 0, None
        allowed = engine_facts(self.latency.engine).gammas(drafter, gammas or self.gammas)
        asked = drafter.model or drafter  # a model's rounds are asked for by its shape
        latency: Any = self.latency.beside(drafter)
        if len(self._rounds) > MOST_KEPT:
            self._rounds.clear()
            self._means.clear()
        # another alpha, another budget: the same rounds
        rounds = self._rounds.setdefault(asked, {})
        for each in allowed:
            if each not in self._verify_s:
                self._verify_s[each] = self.latency.verify_s(self.target, self.workload, each)
        verify_s = {each: self._verify_s[each] for each in allowed}
        if len(allowed) > 1 and not rounds.keys() >= verify_s.keys():
            key = asked, tuple(allowed)
            if key not in self._means:
                self._means[key] = latency.means_s(self.target, asked, self.workload, verify_s)
            if (means_s := self._means[key]) is not None:
                gains = [tokens_of(each) for each in allowed] / means_s
                allowed = allowed[gains.argmax() :][:1]
        for each in allowed:
            if each not in rounds:
                known = (self.workload, each, verify_s[each])
                rounds[each] = latency.round(self.target, asked, *known)
            time = rounds[each]
            found = tokens_of(each) * decode_s / time.round_s.value
            if found > best_gain:
                best_gain, gamma, best = found, each, time
        assert best is not None
        tau, round_s = tau_of(gamma), best.round_s
        drafting = self._drafting(round_s, drafter)
        gain = speculation.speedup_estimate(
            tau, self.decode_s, round_s, best.verify_s, self.target_correlation
        )
        if tau.low is not None or round_s.low is not None:  # given acceptance has no bounds
            gain = gain.between(speculation.speedup_interval(gain, tau, gamma, round_s))
        return Score(
            rank=None,
            architecture=drafter.architecture,
            parameters=drafter.parameters(),
            gamma=gamma,
            alpha=alpha.between(speculation.alpha_interval(alpha)),
            tau=tau,
            draft_s=best.draft_s,
            decode_s=self.decode_s,
            verify_s=best.verify_s,
            speedup=gain,
            tpot_s=speculation.tpot_estimate(tau, round_s),
            kv_bytes_per_token=drafter.kv_bytes_per_token(self.workload.cache_bytes),
            break_even_alpha=speculation.break_even_estimate(gamma, self.decode_s, drafting),
            round_s=round_s,
            host_s=best.host_s,
            bound=best.bound,
            engine=self.latency.engine,
            engine_version=self.latency.engine_version,
            family=drafter.family,
            drafter=None if drafter.family == Independent.family else drafter,
            assumed=assumed,
            needs=self.needs(drafter),
        )

    def needs(self, drafter: Drafter) -> Needs | None:
        """What it takes to have a drafter that nobody has published: nothing, or the whole training
        budget of the context; None where there is neither."""
        if not drafter.trains:
            return NOTHING
        budget = self.context.budget
        return None if budget is None else budget.needs(drafter.training_parameters)

    def _drafting(self, round_s: Estimate, drafter: Drafter) -> Estimate:
        """The round that a drafter would have to pay for if it proposed in every one: what rounds
        cost beyond a plain step is earned by those that draft."""
        share = drafter.drafts_share
        if share >= 1.0 or share <= 0.0:
            return round_s
        decode = self.decode_s.value
        # a round that is no longer than a plain step pays at any alpha
        beyond = max(round_s.value - decode, 0.0)
        return Estimate(decode + beyond / share, round_s.std / share, round_s.source)

    def constraints(self, draft: Draft) -> dict[str, Any]:
        """How far the draft is over each limit, relative to it; feasible where all are <= 0
        (Optuna's convention). Of a grid arrays."""
        result, limits = {}, self.limits
        if limits.max_parameters is not None:
            result["max_parameters"] = as_drafter(draft).parameters() / limits.max_parameters - 1.0
        if limits.max_memory_bytes is not None:
            result["max_memory"] = draft_bytes(draft, self.workload) / limits.max_memory_bytes - 1.0
        return result

    def feasible(self, draft: Draft) -> bool:
        """Whether the draft keeps within them."""
        return all(over <= 0.0 for over in self.constraints(draft).values())

    def limit_words(self) -> str:
        """The limits, for whoever keeps within none."""
        most, room = self.limits.max_parameters, self.limits.max_memory_bytes
        return f"max_parameters={most} and max_memory={room} bytes"


def draft_bytes(draft: Draft, workload: Workload) -> int:
    """Memory of the draft: weights, and KV cache of batch_size sequences of context_len tokens,
    over all ranks."""
    return as_drafter(draft).bytes(workload, workload.batch_size, workload.context_len)


def score(
    draft: Draft,
    target: Architecture,
    workload: Workload,
    latency: LatencyOfRounds,
    acceptance: AcceptanceEstimator,
    *,
    max_gamma: int = speculation.MAX_GAMMA,
    domain: str = "chat",
) -> Score:
    """The score of one draft at its best gamma. For many drafts of one target, or gammas of one's
    own, make a `Scorer` once."""
    return Scorer(target, workload, latency, acceptance, max_gamma=max_gamma, domain=domain)(draft)


Contexts = Callable[[Score], AcceptanceContext]
"""Where acceptance was asked about each score."""


def difference_std(
    first: Score, second: Score, acceptance: AcceptanceEstimator, contexts: Contexts
) -> float:
    """Std of ln(speedup of first / speedup of second).

    The gap of their logits of alpha is what the estimator says of both, each in its own context,
    or, where one was measured, by their own stds. To it comes the error of each draft's own time
    (taken as independent, which is cautious: one latency model prices both).
    """
    both = first, second
    if any(score.alpha.source == "measured" for score in both):
        gap = math.hypot(*(speculation.logit_std(score.alpha) for score in both))
    else:
        one, other = ((score.proposer, contexts(score)) for score in both)
        gap = gap_std(one, other, acceptance)
    variance = sum((item.draft_s.std / item.terms.round_s) ** 2 for item in both)
    return math.sqrt(variance + (gap * sum(item.slope for item in both) / 2) ** 2)


def best_first(scores: Iterable[Score]) -> list[Score]:
    """By `Score.sort_key`."""
    return sorted(scores, key=lambda score: score.sort_key)


def grouped(
    scores: Sequence[Score], acceptance: AcceptanceEstimator, contexts: Contexts
) -> list[list[Score]]:
    """Groups, best first: each is led by the best score left and holds all that are not worse than
    it by more than `difference_std`. Inside a group the model cannot say which is faster: choose by
    memory, or measure.
    """
    rest = best_first(scores)
    groups = []
    while rest:
        leader, *others = rest
        group, rest = [leader], []
        for item in others:
            gap = math.log(leader.worth / item.worth)
            std = difference_std(leader, item, acceptance, contexts)
            (group if gap < std else rest).append(item)
        groups.append(group)
    return groups
