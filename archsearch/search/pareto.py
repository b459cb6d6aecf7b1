"""Several goals at once: the drafts that no other beats in all of them, and which of these are
tied.

Goals are numbers of a draft that cost nothing to know (GOALS). Of a space that was scored in full
the set is the exact one; else it is the set of what was scored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from archsearch.architecture.counts import pass_parameters
from archsearch.drafters.drafter import Drafter
from archsearch.drafters.models import Independent
from archsearch.errors import ArchsearchError
from archsearch.estimate import Array, Estimate, Numbers
from archsearch.search.exact import SpaceGrid
from archsearch.search.objective import GridScores, Place, Score, Scorer, draft_bytes, grouped


@dataclass(frozen=True)
class Goal:
    """One goal. `of`: its value of a drafter and what was found of it (a score, or of a grid the
    scores of all); `more`: whether more is better. `unit`, `words`: for people."""

    of: Callable[[Score | GridScores, Drafter, Scorer], Numbers]
    unit: str
    words: str
    more: bool = False

    def to_dict(self) -> dict[str, object]:
        return {"unit": self.unit, "words": self.words, "more": self.more}


def _number(found: Estimate | Array) -> Numbers:
    return found.value if isinstance(found, Estimate) else found


MOST_PLACES: Final = 512
GOALS: Final[Mapping[str, Goal]] = {
    "speedup": Goal(lambda found, *_: _number(found.speedup), "x", "predicted speed-up", more=True),
    "training_cost": Goal(
        lambda _, drafter, __: (
            6.0 * pass_parameters(drafter.architecture) if drafter.trains else 0.0
        ),
        "FLOPs/token",
        "FLOPs of training on one token: 6 per weight of layers and head (arXiv 2001.08361); 0 for"
        " what is not trained",
    ),
    "parameters": Goal(lambda _, drafter, __: drafter.parameters(), "", "parameters of the draft"),
    "kv_bytes": Goal(
        lambda _, drafter, scorer: drafter.kv_bytes_per_token(scorer.workload.cache_bytes),
        "B/token",
        "bytes of the draft's KV cache for one token",
    ),
    "memory": Goal(
        lambda _, drafter, scorer: draft_bytes(drafter, scorer.workload),
        "B",
        "the draft's weights and KV caches",
    ),
    "draft_s": Goal(
        lambda found, *_: _number(found.draft_s), "s", "seconds of drafting in a round"
    ),
}


def goals_of(score: Score, scorer: Scorer, goals: Iterable[str]) -> dict[str, float]:
    """The values of `goals` of a score."""
    return {name: float(GOALS[name].of(score, score.proposer, scorer)) for name in goals}


@dataclass(frozen=True)
class Member:
    """A draft that no other beats in all goals. `values`: by goal; `group`: the number of the group
    of drafts whose speed-ups are tied; `cheapest`: whether it has the fewest parameters
    of that group; `measured`: its confirmed speed-up, None where it was not confirmed."""

    score: Score
    values: Mapping[str, float]
    group: int
    cheapest: bool
    measured: float | None = None
    ALSO: ClassVar = ("label", "confirmed")

    @property
    def label(self) -> str:
        return self.score.label()

    @property
    def confirmed(self) -> bool:
        return self.measured is not None


def check_goals(goals: Sequence[str]) -> tuple[str, ...]:
    """The goals, each once; ArchsearchError for an unknown one or fewer than two."""
    found = tuple(dict.fromkeys(goals))
    unknown = [name for name in found if name not in GOALS]
    if unknown:
        raise ArchsearchError(
            f"unknown goal {', '.join(unknown)}; use two or more of {', '.join(GOALS)}"
        )
    if len(found) < 2:
        raise ArchsearchError(
            f"a Pareto set needs two goals or more, got {', '.join(found) or 'none'}: one of"
            f" {', '.join(GOALS)}"
        )
    return found


def undominated(costs: Array) -> NDArray[np.bool_]:
    """Which rows of `costs` [points, goals] (less is better) no other row beats: nowhere worse,
    somewhere better. Equals stay."""
    keep = np.ones(len(costs), dtype=bool)
    front: list[int] = []
    for i in np.lexsort(costs.T[::-1]):  # who beats a row comes before it in this order
        if _beats(costs[front], costs[i]).any():
            keep[i] = False
        else:
            front.append(i)
    return keep


def _beats(some: Array, others: Array) -> NDArray[np.bool_]:
    """Of rows of costs, one of which may be a single row: nowhere more, somewhere less."""
    return np.asarray((some <= others).all(axis=1) & (some < others).any(axis=1))


def pareto_places(scorer: Scorer, grid: SpaceGrid, goals: Sequence[str]) -> list[Place]:
    """The exact set of a space that was scored in full, fastest first; of more than
    MOST_PLACES the fastest."""
    costs, places = np.zeros((0, len(goals))), np.zeros((0, 4), dtype=np.int64)
    for scores in scorer.over_grid(grid.grid):
        some = grid.grid.part(slice(scores.start, scores.start + len(scores.speedup)))
        columns = (_signed(name, scores, Independent(some), scorer) for name in goals)
        fits = np.flatnonzero(scores.feasible.ravel())
        new = np.stack([np.broadcast_to(x, some.shape).ravel()[fits] for x in columns], axis=1)
        fits, new = _thinned(fits, new, costs)
        where = np.array([scores.found(int(i))[0] for i in fits], dtype=np.int64).reshape(-1, 4)
        costs, places = np.concatenate([costs, new]), np.concatenate([places, where])
        keep = undominated(costs)
        costs, places = costs[keep], places[keep]
    first = list(goals).index("speedup") if "speedup" in goals else 0
    order = np.argsort(costs[:, first], kind="stable")[:MOST_PLACES]
    return [(a, b, c, d) for a, b, c, d in places[order].tolist()]


def _thinned(
    where: NDArray[np.int64], costs: Array, front: Array
) -> tuple[NDArray[np.int64], Array]:
    """Without what is beaten by a few strong points, which most are: the rest is small enough to
    compare each with each."""
    if not len(costs):
        return where, costs
    low, high, goals = costs.min(0), costs.max(0), costs.shape[1]
    scaled = (costs - low) / np.maximum(high - low, 1e-300)
    weighed = [*np.eye(goals), *np.random.default_rng(0).dirichlet(np.ones(goals), 48)]
    best = [(scaled @ weights + 1e-9 * scaled.sum(1)).argmin() for weights in weighed]
    keep = np.ones(len(costs), dtype=bool)
    for guard in [*front, *costs[best]]:
        keep &= ~_beats(guard, costs)
    return where[keep], costs[keep]


def _signed(name: str, found: Score | GridScores, drafter: Drafter, scorer: Scorer) -> Array:
    """A goal's value, less is better."""
    values = np.asarray(GOALS[name].of(found, drafter, scorer), dtype=float)
    return values * (-1.0 if GOALS[name].more else 1.0)


def pareto(
    scorer: Scorer,
    scores: Sequence[Score],
    goals: Sequence[str],
    measured: Callable[[Score], float | None],
) -> list[Member]:
    """The set among scores, fastest first, in groups whose speed-ups lie within each other's
    error."""
    if not scores:
        return []
    costs = np.array(
        [[_signed(name, each, each.proposer, scorer) for name in goals] for each in scores]
    )
    kept = [scores[i] for i in np.flatnonzero(undominated(costs)).tolist()]
    kept.sort(key=lambda score: -score.speedup.value)
    groups = grouped(kept, scorer.acceptance, lambda score: scorer.context)
    number = {id(score): n for n, group in enumerate(groups, start=1) for score in group}
    cheapest = {id(min(group, key=lambda score: score.parameters)) for group in groups}
    return [
        Member(
            score,
            goals_of(score, scorer, goals),
            number[id(score)],
            id(score) in cheapest,
            measured(score),
        )
        for score in kept
    ]
