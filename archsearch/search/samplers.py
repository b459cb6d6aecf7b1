"""Who says which shapes to score next, where a space is too large to score all of it.

`walk` is this project's own (`search.walk`); the others are Optuna's samplers behind the same two methods. They are told what was
scored and nothing else, so that a search that is continued goes the same way again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from archsearch.architecture.architecture import Architecture
from archsearch.errors import ArchsearchError
from archsearch.search.space import SearchSpace
from archsearch.search.walk import Candidate, Rank, Walk

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

Sampler = Literal["auto", "walk", "tpe", "nsga2", "gp", "cmaes", "random"]
AUTO: Final = "auto"
VAIN: Final = 25  # proposals of shapes that were scored before or cannot be, until one is drawn at random
START: Final = 20  # random shapes before a sampler that learns is asked
OVER: Final = 10.0  # what being over a limit costs, in times the limit, of the value that a sampler is told


def _tpe(seed: int) -> BaseSampler:
    from optuna.samplers import TPESampler

    return TPESampler(seed=seed, multivariate=True, n_startup_trials=START)


def _nsga2(seed: int) -> BaseSampler:
    from optuna.samplers import NSGAIISampler

    return NSGAIISampler(seed=seed, population_size=START)


def _gp(seed: int) -> BaseSampler:
    from optuna.samplers import GPSampler

    return GPSampler(seed=seed, n_startup_trials=START, deterministic_objective=True)


def _cmaes(seed: int) -> BaseSampler:
    from optuna.samplers import CmaEsSampler

    try:
        import cmaes  # noqa: F401
    except ImportError:
        raise ArchsearchError(
            "--sampler cmaes needs the Python package cmaes; install it (pip install 'archsearch[cmaes]')"
        ) from None
    return CmaEsSampler(seed=seed, n_startup_trials=START, warn_independent_sampling=False)


def _random(seed: int) -> BaseSampler:
    from optuna.samplers import RandomSampler

    return RandomSampler(seed=seed)


SAMPLERS: Final[Mapping[str, Callable[[int], BaseSampler]]] = {
    "tpe": _tpe, "nsga2": _nsga2, "gp": _gp, "cmaes": _cmaes, "random": _random,
}  # fmt: skip


def walk_of(sampler: Sampler, space: SearchSpace, target: Architecture, seed: int) -> Walk:
    """What proposes shapes; raises ArchsearchError for an unknown sampler, or one whose package is missing."""
    if sampler in (AUTO, "walk"):
        return Walk(space, target, seed)
    if sampler not in SAMPLERS:
        raise ArchsearchError(f"unknown sampler {sampler!r}; use one of auto, walk, {', '.join(SAMPLERS)}")
    return SampledWalk(space, target, seed, SAMPLERS[sampler](seed))


class SampledWalk(Walk):
    """Shapes that a sampler of Optuna's proposes, one at a time; random ones where it has nothing new."""

    def __init__(self, space: SearchSpace, target: Architecture, seed: int, sampler: BaseSampler) -> None:
        import optuna

        super().__init__(space, target, seed)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._dimensions = space.dimensions(target)
        self._distributions = {d.parameter: d.distribution() for d in self._dimensions if len(d.choices) > 1}
        self._asked: dict[tuple[int, ...], Any] = {}
        self._values: dict[tuple[int, ...], float] = {}

    def tell(self, candidate: Candidate, rank: Rank) -> None:
        """What a candidate reached: its speed-up, less where it is over a limit."""
        from optuna.trial import create_trial

        value = -rank[1] - OVER * rank[0]
        self._values[candidate.indices] = value
        trial = self._asked.pop(candidate.indices, None)
        if trial is not None:
            self._study.tell(trial, value)
            return
        pairs = zip(self._dimensions, candidate.indices, strict=True)
        params = {d.parameter: d.encode(index) for d, index in pairs if len(d.choices) > 1}
        self._study.add_trial(create_trial(value=value, params=params, distributions=self._distributions))

    def generation(self) -> list[Candidate]:
        """One candidate; none when every valid shape was given."""
        from optuna.trial import TrialState

        for _ in range(VAIN):
            trial = self._study.ask(cast(Any, self._distributions))
            indices = tuple(d.decode(trial.params[d.parameter]) if d.parameter in trial.params else 0 for d in self._dimensions)
            candidate = self._visit(indices, "sampler")
            if candidate is not None:
                self._asked[indices] = trial
                return [candidate]
            known = self._values.get(indices)
            if known is None:
                self._study.tell(trial, state=TrialState.FAIL)
            else:  # it may learn from that again
                self._study.tell(trial, known)
        return self._draw(1, "random") or self._remaining()
