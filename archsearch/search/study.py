"""The search itself: every shape of a space is scored where that can be done, else Optuna's
samplers propose which.

`--trials` counts distinct shapes that are recorded. Every trial says in `origin` how its shape came
up: `exact`, as one of a space of which all shapes were scored (`search.exact`), or by a `sampler`
of Optuna's (`search.samplers`).

The record is a study in Optuna's storage, and each finished trial is written at once: Ctrl-C and
kill lose the shape in flight only. A storage changes no answer of a space that is scored in full.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from archsearch.architecture.architecture import Architecture
from archsearch.drafters.drafter import Draft
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.needs import Needs
from archsearch.search.exact import ALONE_POINTS, Report, exact_grid, order, rank_all, rank_alone
from archsearch.search.objective import MixScore, Score, Scorer
from archsearch.search.pareto import GOALS
from archsearch.search.ranking import best_of_each
from archsearch.search.samplers import AUTO, Record, Regret, Sampler, make_sampler, regret_of
from archsearch.search.space import Indices, SearchSpace
from archsearch.search.storage import (
    Direction,
    identity_of,
    open_storage,
    open_study,
    storage_errors,
)

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from optuna.study import Study
    from optuna.trial import FrozenTrial


@dataclass(frozen=True, slots=True)
class How:
    """How a space is searched. `sampler`: `auto` scores all of it where that is possible; elsewhere
    it is TPE, with `goals` (of `search.pareto`) NSGA-II. `shared`: other processes may ask the same
    study. `regret`: where not all was scored, say what was missed of the exact best
    (`samplers.Regret`). `about`: what scores depend on besides the space and the scorer."""

    sampler: Sampler = AUTO
    shared: bool = False
    regret: bool = False
    goals: tuple[str, ...] = ()
    about: Mapping[str, object] = field(default_factory=dict)

    @property
    def proposes(self) -> str:
        """The sampler that proposes shapes where not all are scored."""
        return self.sampler if self.sampler != AUTO else "nsga2" if self.goals else "tpe"


@dataclass(frozen=True, slots=True)
class Scored:
    """How many shapes of a space were scored. `exact`: all there are, so that the best of them is
    the best of the space, and the trials are some of them."""

    space: str
    shapes: int
    exact: bool


@dataclass(frozen=True)
class SearchResult:
    """What a search found. `best`: distinct feasible scores, best first, ranked, none where no
    shape keeps within the limits; `trials`: one row per trial, as in trials.csv; `spaces`: how much
    of each space was scored; `scored_here`: trials that this process scored, where several do;
    `regrets`: of each space that was not scored in full, what its search missed of the exact
    best."""

    best: list[Score]
    trials: list[dict[str, object]]
    spaces: tuple[Scored, ...] = ()
    scored_here: int = 0
    regrets: tuple[Regret, ...] = ()

    @property
    def finished(self) -> int:
        """Trials that have a score."""
        return sum(row["state"] == "COMPLETE" for row in self.trials)

    @property
    def invalid(self) -> int:
        """Trials of shapes of which nothing can be said."""
        return sum(row["state"] == "PRUNED" for row in self.trials)


def _but_windows(score: Score) -> object:
    """What shapes share that differ by windows alone that change no number (longer than the
    context)."""
    shape = score.architecture.replace(window_pattern="L", sliding_window=None)
    return score.drafter, shape, score.worth


def search(
    space: SearchSpace,
    scorer: Scorer,
    *,
    trials: int = 300,
    seed: int = 0,
    storage: str | Path | BaseStorage | None = None,
    progress: Report | None = None,
    how: How = How(),
) -> SearchResult:
    """Search `space` for the fastest draft of the scorer's target; `trials` distinct shapes are
    recorded, of a space that is scored in full those that say most.

    `storage`: a journal file, an Optuna URL or what is open, with any number of searches in it
    (`search.storage`); scores found there are not computed again. Ends early when every valid shape
    has been scored. Raises ArchsearchError where no shape is valid.
    """
    if trials < 1:
        raise ArchsearchError(f"trials must be at least 1, got {trials}")
    space.check(scorer.target)
    whole = how.sampler == AUTO
    grid = exact_grid(space, scorer) if whole else None
    whole = grid is not None or (whole and space.size(scorer.target) <= ALONE_POINTS)
    goals = () if whole else how.goals
    about = dict(how.about) | ({"goals": list(goals)} if goals else {})
    study = _study(space, scorer, storage, about, goals)
    record = Record(space, scorer, study, goals)
    found: Iterator[FrozenTrial]
    if grid is not None:
        ranking = rank_all(scorer, grid, trials, progress)
        scored = ranking.size
        found = (
            record.add(grid.indices(at), grid.grid.at(at), gamma) for at, gamma in ranking.places()
        )
    elif whole:
        alone = rank_alone(space, scorer, progress)
        scored = alone.shapes
        both: list[tuple[Indices, Draft, Score | str]] = [*alone.ranked, *alone.invalid]
        found = (record.add(*each) for each in both)
    else:
        scored = 0
        found = _asked(record, how, seed, trials)
    rows: list[dict[str, object]] = []
    feasible: list[Score] = []
    best: Score | None = None
    best_at: tuple[int, ...] = ()
    done = 0
    for trial in found:
        data = trial.user_attrs.get("score")
        score = None if data is None else Score.from_dict(data)
        rows.append(trial_row(len(rows), trial, score))
        if score is None:
            continue
        done += 1
        if all(over <= 0.0 for over in trial.constraints.values()):
            feasible.append(score)
            if best is None or order(score) < order(best):
                best, best_at = score, record.indices(trial)
        if progress is not None:
            progress(done, trials, best.worth if best is not None else 0.0)
        if whole and done >= trials:
            break
    exhausted = whole or done < trials
    scored = scored or done
    ranked = best_of_each(sorted(feasible, key=order), _but_windows)
    regrets: tuple[Regret, ...] = ()
    if how.regret and not exhausted and best is not None:
        regrets = tuple(filter(None, [regret_of(space, scorer, best, best_at, how.proposes)]))
    for regret in regrets:
        ranked = [
            replace(each, regret=max(0.0, 1.0 - each.worth / regret.exact)) for each in ranked
        ]
    best_ranked = [score.with_rank(rank) for rank, score in enumerate(ranked, start=1)]
    counted = Scored(space.name, scored, exhausted)
    return SearchResult(best_ranked, rows, (counted,), record.here, regrets)


def _study(
    space: SearchSpace,
    scorer: Scorer,
    storage: str | Path | BaseStorage | None,
    about: Mapping[str, object],
    goals: Sequence[str],
) -> Study:
    import optuna

    signs: list[Direction] = ["maximize" if GOALS[name].more else "minimize" for name in goals]
    directions = signs or ["maximize"]
    if storage is None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        return optuna.create_study(directions=directions)
    identity = identity_of(space, scorer, about)
    with storage_errors(storage):
        opened = open_storage(storage) if isinstance(storage, str | Path) else storage
        return open_study(opened, identity, directions)


def _asked(record: Record, how: How, seed: int, trials: int) -> Iterator[FrozenTrial]:
    """Trials of distinct shapes: all that the study holds, then what its sampler proposes until
    `trials` have a score; beside others who ask it too."""
    from optuna.trial import TrialState

    study = record.study
    before = len(study.get_trials(deepcopy=False))
    study.sampler = make_sampler(how.proposes, random.Random(f"{seed} {before}").getrandbits(31))
    if how.shared:
        study.sampler.reseed_rng()  # or all processes would propose the same
    else:
        for left in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            study.tell(left.number, state=TrialState.FAIL)  # what a killed process was at
    yield from sorted(record.known.values(), key=lambda trial: trial.number)
    while record.scored < trials and (trial := record.ask()) is not None:
        yield trial
        if how.shared:
            yield from record.read()


def merged(results: Sequence[SearchResult]) -> SearchResult:
    """Searches of several spaces with one scorer as one: all scores ranked together, the trials one
    after the other.

    A family whose acceptance is assumed is ranked by the lower end of its speed-up: it does not win
    by an assumption.
    """
    if len(results) == 1:
        return results[0]
    rows = [row for result in results for row in result.trials]
    ranked = sorted(
        (score for result in results for score in result.best),
        key=lambda score: (-score.ranked_by, order(score)),
    )
    best = [score.with_rank(rank) for rank, score in enumerate(ranked, start=1)]
    trials = [{**row, "number": number} for number, row in enumerate(rows)]
    here = sum(result.scored_here for result in results)
    spaces = tuple(space for result in results for space in result.spaces)
    regrets = tuple(regret for result in results for regret in result.regrets)
    return SearchResult(best, trials, spaces, here, regrets)


def trial_row(number: int, trial: FrozenTrial, score: Score | None) -> dict[str, object]:
    """A row of trials.csv: the trial, its shape, and the score's numbers (value and std apart)."""
    done = trial.state.name == "COMPLETE"
    row: dict[str, object] = {
        "number": number,
        "state": trial.state.name,
        "origin": trial.user_attrs.get("origin", ""),
        "feasible": done and all(value <= 0 for value in trial.constraints.values()),
        "invalid": trial.user_attrs.get("invalid", ""),
    }
    if score is None:
        return row
    for each in fields(score):
        name, value = each.name, getattr(score, each.name)
        if name == "drafter":
            row[name] = score.proposer.label()
        elif isinstance(value, Architecture):
            row |= value.to_dict()
        elif isinstance(value, Estimate):
            row |= {name: value.value, f"{name}_std": value.std}
        elif isinstance(value, MixScore):
            row["mix_speedup" if value.objective == "speedup" else value.objective] = value.value
        elif isinstance(value, Needs):
            row |= {name: value.kind, "gpu_hours": value.gpu_hours}
        elif name != "rank" and not (value is None and name in ("mix", "regret", "needs")):
            row[name] = value
    return row
