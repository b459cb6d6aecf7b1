"""Optuna's samplers, where a space is too large to score all of it: asked for a shape, then given
what it is worth; and what such a search missed, its best beside the exact best of the space, or of
a part of it."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast

from archsearch.architecture.architecture import Architecture
from archsearch.drafters.drafter import Draft
from archsearch.errors import ArchsearchError, InvalidShapeError
from archsearch.records import Stored
from archsearch.search.exact import exact_grid, rank_all, rank_alone
from archsearch.search.objective import Score, Scorer
from archsearch.search.pareto import goals_of
from archsearch.search.space import Indices, SearchSpace

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial


Sampler = Literal["auto", "tpe", "nsga2", "random"]
AUTO: Final = "auto"
START: Final = 20  # random shapes before a sampler that learns is asked
VAIN: Final = 25  # proposals of known or invalid shapes, until one is drawn at random
DRAWS: Final = 200  # random draws in vain, until the space is gone through in order


def make_sampler(name: str, seed: int) -> BaseSampler:
    """Optuna's sampler of a name (`Sampler`, not `auto`); ArchsearchError for an unknown one."""
    from optuna import samplers

    if name == "tpe":
        return samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=START)
    if name == "nsga2":
        return samplers.NSGAIISampler(seed=seed, population_size=START)
    if name == "random":
        return samplers.RandomSampler(seed=seed)
    raise ArchsearchError(f"unknown sampler {name!r}; use one of auto, tpe, nsga2, random")


class Record:
    """The scored shapes of one search as trials of an Optuna study, each shape once.

    `known`: shape -> its first finished trial, by number. `here`: trials that this process scored.
    `goals`: what the study maximises or minimises, one value each; none: `Score.worth`.
    """

    def __init__(
        self, space: SearchSpace, scorer: Scorer, study: Study, goals: Sequence[str] = ()
    ) -> None:
        self.space, self.scorer, self.study, self.goals = space, scorer, study, tuple(goals)
        self.dimensions = space.dimensions(scorer.target)
        self.distributions = {
            d.parameter: d.distribution() for d in self.dimensions if len(d.choices) > 1
        }
        self.known: dict[Draft, FrozenTrial] = {}
        self.here = 0
        self.read()

    def read(self) -> list[FrozenTrial]:
        """Take in what the study holds; the trials of shapes that were not known before."""
        new = []
        for trial in self.study.get_trials(deepcopy=False):
            if not {"score", "invalid"} & set(trial.user_attrs) or not trial.state.is_finished():
                continue
            shape = self.space.build(self.indices(trial), self.scorer.target)
            if not isinstance(shape, InvalidShapeError) and shape not in self.known:
                self.known[shape] = trial
                new.append(trial)
        return new

    @property
    def scored(self) -> int:
        return sum("score" in trial.user_attrs for trial in self.known.values())

    def indices(self, trial: Any) -> Indices:
        """The choices of a trial, live or frozen."""
        return tuple(
            d.decode(trial.params[d.parameter]) if d.parameter in trial.params else 0
            for d in self.dimensions
        )

    def _params(self, indices: Indices) -> dict[str, object]:
        pairs = zip(self.dimensions, indices, strict=True)
        return {d.parameter: d.encode(index) for d, index in pairs if len(d.choices) > 1}

    def add(self, indices: Indices, shape: Draft, score: Score | str | int) -> FrozenTrial:
        """The trial of a shape of which all were scored: the known one, else a new one. `score`: or
        why it has none; a gamma: it is scored now, at that."""
        from optuna.trial import TrialState, create_trial

        if shape in self.known:
            return self.known[shape]
        score = self._score(shape, score) if isinstance(score, int) else score
        outcome: dict[str, Any] = (
            {"state": TrialState.PRUNED}
            if isinstance(score, str)
            else {"values": self._values(score), "constraints": self.scorer.constraints(shape)}
        )
        outcome |= {"params": self._params(indices), "distributions": self.distributions}
        trial = create_trial(user_attrs={"origin": "exact"} | _attributes(score), **outcome)
        self.study.add_trial(trial)
        self.known[shape] = trial
        self.here += 1
        return trial

    def ask(self) -> FrozenTrial | None:
        """A shape that the study's sampler proposes, scored; None when every valid shape of the
        space is known."""
        from optuna.trial import TrialState

        attempt = 0
        while True:
            attempt += 1
            if attempt % VAIN == 0:
                unknown = self._unknown()
                if unknown is None:
                    return None
                self.study.enqueue_trial(self._params(unknown))
            trial = self.study.ask(cast(Any, self.distributions))
            shape = self.space.build(self.indices(trial), self.scorer.target)
            if isinstance(shape, InvalidShapeError):
                self.study.tell(trial, state=TrialState.FAIL)
                continue
            before = self.known.get(shape)
            if before is not None:  # it may learn from that again
                self.study.tell(trial, before.values, state=before.state)
                continue
            # The last resort is scored: a killed process leaves its trial running.
            if attempt % VAIN and self._is_others(trial):
                self.study.tell(trial, state=TrialState.FAIL)
                continue
            score = self._score(shape)
            told: dict[str, Any] = {"state": TrialState.PRUNED}
            if not isinstance(score, str):
                told = {"values": self._values(score)}
                # before the score: a killed process leaves what it wrote
                for name, over in self.scorer.constraints(shape).items():
                    trial.set_constraint(name, over)
            for name, value in ({"origin": "sampler"} | _attributes(score)).items():
                trial.set_user_attr(name, value)
            found = self.study.tell(trial, **told)
            self.known[shape] = found
            self.here += 1
            return found

    def _is_others(self, trial: Trial) -> bool:
        """Whether another process scores the same, or has since `read`. Of two that ask at once the
        later sees it."""
        return bool(trial.params) and any(
            other.params == trial.params and other.number != trial.number
            for other in self.study.get_trials(deepcopy=False)
            if other.state.name != "FAIL"
        )

    def _unknown(self) -> Indices | None:
        """Choices of a valid shape that is not known: drawn at random, else the next in order."""
        space, target = self.space, self.scorer.target
        at_random = space.random_combinations(target, random.Random(len(self.known)), DRAWS)
        for indices in itertools.chain(at_random, space.combinations(target)):
            shape = space.build(indices, target)
            if not isinstance(shape, InvalidShapeError) and shape not in self.known:
                return indices
        return None

    def _score(self, shape: Draft, gamma: int | None = None) -> Score | str:
        try:
            return self.scorer(shape, gamma)
        except InvalidShapeError as error:
            return str(error)

    def _values(self, score: Score) -> list[float]:
        return list(goals_of(score, self.scorer, self.goals).values()) or [score.worth]


def _attributes(score: Score | str) -> dict[str, object]:
    return {"invalid": score} if isinstance(score, str) else {"score": score.to_dict()}


# combinations of choices that are scored in full at once: some seconds of one core
GRID_POINTS: Final = 1_000_000
ALONE_POINTS: Final = 100  # and where shapes are scored one by one: about a second


@dataclass(frozen=True, slots=True)
class Regret:
    """The exact best of `shapes` shapes of a space, and the best that the search found; both as
    drafts are ranked: speed-ups, over a mix of work gains in its objective (`Score.worth`).

    `whole`: those are all shapes of the space. Else they are a part of it that holds the search's
    own best: as many choices of every dimension as fit, at even distances. What was missed of the
    whole space is then `regret` or more.
    """

    space: str
    sampler: str
    shapes: int
    whole: bool
    exact: Annotated[float, Stored("exact_speedup")]
    found: Annotated[float, Stored("found_speedup")]
    ALSO = ("regret",)

    @property
    def regret(self) -> float:
        """By which share the search's best lies below the exact one, 0 where it is that one."""
        return max(0.0, 1.0 - self.found / self.exact)

    def words(self) -> str:
        """How far the best that was found lies below the exact one."""
        shapes = f"{self.shapes:,} shapes"
        where = f"all {shapes}" if self.whole else f"{shapes}, a part of them"
        return (
            f"Regret: {self.sampler}'s best of {self.space} is {self.regret:.2%} below the exact"
            f" best ({self.exact:.3f}x) of {where}."
        )


def regret_of(
    space: SearchSpace, scorer: Scorer, best: Score, indices: tuple[int, ...], sampler: str
) -> Regret | None:
    """How far `best`, at the choices `indices` of the space, lies below the exact best of the space
    or of a part of it.

    Up to GRID_POINTS combinations are scored where formulas over arrays say all, else ALONE_POINTS
    one by one. None where no shape of them keeps within the limits.
    """
    for points in (GRID_POINTS, ALONE_POINTS):
        part = space.part(through(space, scorer.target, indices, points))
        grid = exact_grid(part, scorer, points)
        if grid is not None:
            ranking = rank_all(scorer, grid, 1)
            shapes, gains = ranking.size, [gain for gain, *_ in ranking.best]
        elif points == ALONE_POINTS:
            alone = rank_alone(part, scorer)
            shapes, gains = alone.shapes, [score.worth for *_, score in alone.ranked]
        else:
            continue
        whole = part.size(scorer.target) == space.size(scorer.target)
        return Regret(space.name, sampler, shapes, whole, max(gains), best.worth) if gains else None
    return None


def through(
    space: SearchSpace, target: Architecture, indices: Sequence[int], points: int
) -> dict[str, tuple[int, ...]]:
    """By dimension which of its choices make a part of at most `points` combinations that holds the
    ones at `indices`.

    The longest dimension gives first. What stays is spread evenly and has both ends where two or
    more stay.
    """
    dimensions = space.dimensions(target)
    counts = [len(each.choices) for each in dimensions]
    while math.prod(counts) > points and max(counts) > 1:
        counts[counts.index(max(counts))] -= 1
    return {
        each.name: spread(len(each.choices), count, index)
        for each, count, index in zip(dimensions, counts, indices, strict=True)
    }


def spread(length: int, count: int, fixed: int) -> tuple[int, ...]:
    """`count` of the numbers below `length`, ascending, at even distances; the one nearest to
    `fixed` becomes it.

    >>> spread(9, 3, 4), spread(9, 3, 5), spread(4, 4, 2), spread(5, 1, 3)
    ((0, 4, 8), (0, 5, 8), (0, 1, 2, 3), (3,))
    """
    step = (length - 1) / max(count - 1, 1)
    places = [round(step * number) for number in range(count)]
    nearest = min(range(count), key=lambda number: abs(places[number] - fixed))
    places[nearest] = fixed
    return tuple(sorted(places))
