"""The search itself: a walk proposes shapes, the scorer answers, Optuna keeps the record. Knows no models.

`--trials` counts distinct shapes. Every trial says in `origin` how its shape came up: `exact`, as one of a space of which all
shapes were scored (`archsearch.search.exact`), or on a walk (`archsearch.search.walk`): at the `start`, as a `neighbour` of one
that was good, at `random`, or as one of the `rest` of a small space.

The record is a memory, nothing else: a search that was stopped and continued walks the same way again, takes from the record what
was scored before and scores the rest. So it ends as if it had never stopped, and a storage never changes an answer. Each finished
trial is written at once: Ctrl-C and kill lose the shape in flight only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from archsearch.architecture.architecture import Architecture
from archsearch.errors import ArchsearchError, InvalidShapeError
from archsearch.search.claims import GRACE_S, Claims, Task
from archsearch.search.exact import Ranking, exact_grid, rank_all
from archsearch.search.identity import identity_of, open_study
from archsearch.search.objective import Score, Scorer
from archsearch.search.regret import Regret, regret_of
from archsearch.search.samplers import AUTO, Sampler, walk_of
from archsearch.search.space import SearchSpace
from archsearch.search.storage import open_storage, storage_errors
from archsearch.search.walk import Candidate, Walk

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

STUDY: Final = "archsearch"  # studies of searches and of climbs, each with the digest of what it is about
CLIMB_STUDY: Final = "archsearch-climb"
EXACT_GENERATION: Final = 64  # shapes of a ranking that are scored one by one together


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """Passed to the progress callback after every shape."""

    done: int
    total: int
    best: Score | None


@dataclass(frozen=True, slots=True)
class How:
    """How a space is searched. `sampler`: `auto` scores all of it where that is possible and walks elsewhere. `shared`: other
    processes may search along in the same storage (`search.claims`), one that is silent for `grace_s` is taken for dead.
    `regret`: of a walk, say what it missed of the exact best (`search.regret`)."""

    sampler: Sampler = AUTO
    shared: bool = False
    grace_s: float = GRACE_S
    regret: bool = False


@dataclass(frozen=True, slots=True)
class Scored:
    """How many shapes of a space were scored. `exact`: all there are, so that the best of them is the best of the space, and the
    trials are some of them."""

    space: str
    shapes: int
    exact: bool

    def to_dict(self) -> dict[str, Any]:
        """As `search --json` has it."""
        return {"space": self.space, "shapes": self.shapes, "exact": self.exact}

    def words(self) -> str:
        """`all 98,640 shapes of space wide-shallow scored`"""
        return f"{'all ' if self.exact else ''}{self.shapes:,} shapes of space {self.space} scored"


@dataclass(frozen=True)
class SearchResult:
    """What a search found. `best`: distinct feasible scores, best first, ranked; `trials`: one row per trial, as in
    trials.csv; `spaces`: how much of each space was scored; `scored_here`: trials that this process scored, where
    several do; `regrets`: of each space that was not scored in full, what its search missed of the exact best."""

    best: list[Score]
    trials: list[dict[str, Any]]
    spaces: tuple[Scored, ...] = ()
    scored_here: int = 0
    regrets: tuple[Regret, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether every shape of every space was scored."""
        return bool(self.spaces) and all(space.exact for space in self.spaces)

    @property
    def finished(self) -> int:
        """Trials that have a score."""
        return sum(row["state"] == "COMPLETE" for row in self.trials)

    @property
    def invalid(self) -> int:
        """Trials of shapes of which nothing can be told."""
        return sum(row["state"] == "PRUNED" for row in self.trials)


class _Record:
    """Scored shapes of one search as Optuna trials: those the storage holds, and the place where new ones go."""

    def __init__(self, space: SearchSpace, scorer: Scorer, study: Study | None, how: How) -> None:
        self.scorer, self.study = scorer, study
        if how.shared and study is None:
            raise ArchsearchError("a search that several processes share needs a storage")
        self._claims = Claims(study, grace_s=how.grace_s) if how.shared and study is not None else None
        self.dimensions = space.dimensions(scorer.target)
        self.distributions = {d.parameter: d.distribution() for d in self.dimensions if len(d.choices) > 1}
        self._known: dict[tuple[int, ...], FrozenTrial] = {}
        if study is not None:
            for trial in study.get_trials(deepcopy=False):
                if trial.state.name in ("COMPLETE", "PRUNED"):
                    self._known[self._choices_of(trial)] = trial

    def _choices_of(self, trial: FrozenTrial) -> tuple[int, ...]:
        return tuple(d.decode(trial.params[d.parameter]) if d.parameter in trial.params else 0 for d in self.dimensions)

    def share(self, candidates: Sequence[Candidate]) -> None:
        """Score the candidates together with whoever searches along; nothing where nobody does."""
        if self._claims is not None:
            new = [candidate for candidate in candidates if candidate.indices not in self._known]
            tasks = {candidate.indices: self._task(candidate) for candidate in new}
            found = self._claims.finish(tasks.values())
            self._known |= {indices: found[task.key] for indices, task in tasks.items()}

    @property
    def here(self) -> int:
        """Trials that this process scored for others to see."""
        return 0 if self._claims is None else self._claims.done

    def end(self) -> None:
        """Close what others left."""
        if self._claims is not None:
            self._claims.close_left()

    def _task(self, candidate: Candidate) -> Task:
        key = ",".join(map(str, candidate.indices))
        return Task(
            key, self._params(candidate), self.distributions, lambda: self._score(candidate), {"origin": candidate.origin}
        )

    def _params(self, candidate: Candidate) -> dict[str, Any]:
        pairs = zip(self.dimensions, candidate.indices, strict=True)
        return {d.parameter: d.encode(index) for d, index in pairs if len(d.choices) > 1}

    def trial(self, candidate: Candidate) -> FrozenTrial:
        """The candidate's trial: from the storage, else scored now and written there."""
        if candidate.indices not in self._known:
            self.share([candidate])
        found = self._known.get(candidate.indices)
        if found is None:
            found = self._score(candidate)
            if self.study is not None:
                self.study.add_trial(found)
        return found

    def _score(self, candidate: Candidate) -> FrozenTrial:
        """A complete trial; a pruned one where latency or acceptance cannot tell anything of such a shape."""
        from optuna.trial import TrialState, create_trial

        params = self._params(candidate)
        attributes: dict[str, Any] = {"origin": candidate.origin}
        try:
            score = self.scorer(candidate.shape)
        except InvalidShapeError as error:
            attributes["invalid"] = str(error)
            return create_trial(state=TrialState.PRUNED, params=params, distributions=self.distributions, user_attrs=attributes)
        return create_trial(
            value=score.worth,
            params=params,
            distributions=self.distributions,
            user_attrs={**attributes, "score": score.to_dict()},
            constraints=self.scorer.constraints(candidate.shape),
        )


def _order(score: Score) -> tuple[float, float, float]:
    """Fastest first; of equals the smaller, then the one with fewer windows."""
    return (-score.worth, score.parameters, score.architecture.window_pattern.count("S"))


def _distinct(ranked: Sequence[Score]) -> list[Score]:
    """Without shapes that differ from a better-ranked one by windows alone that change no number (longer than the context)."""
    seen: set[tuple[Any, ...]] = set()
    kept = []
    for score in ranked:
        key = (score.drafter, score.architecture.replace(window_pattern="L", sliding_window=None), score.worth)
        if key not in seen:
            kept.append(score)
        seen.add(key)
    return kept


def search(
    space: SearchSpace,
    scorer: Scorer,
    *,
    trials: int = 300,
    seed: int = 0,
    storage: str | Path | None = None,
    about: Mapping[str, Any] | None = None,
    progress: Callable[[SearchProgress], None] | None = None,
    how: How | None = None,
) -> SearchResult:
    """Search `space` for the fastest draft of the scorer's target; `trials` distinct shapes are scored and recorded.

    A space that can be scored in full is (`search.exact`): the trials are then those of all its shapes that say most. `how`: who
    walks elsewhere, and whether other processes search along in the storage.

    `storage`: a journal file or an Optuna URL. It may hold any number of searches: each has a study of its own, named by
    everything its scores depend on (`search.identity`); `about`: what the caller knows of that besides the space and the scorer.
    Scores found there are not computed again, and change nothing else. Ends early when every valid shape of a small space has
    been scored. Raises ArchsearchError where no shape is valid or none is feasible.
    """
    if trials < 1:
        raise ArchsearchError(f"trials must be at least 1, got {trials}")
    space.check(scorer.target)
    how = how or How()
    stored = None
    if storage is not None:
        with storage_errors(storage):
            stored = open_study(open_storage(storage), STUDY, identity_of(space, scorer, about or {}))
    record = _Record(space, scorer, stored, how)
    walk = walk_of(how.sampler, space, scorer.target, seed)
    rows: list[dict[str, Any]] = []
    feasible: list[Score] = []
    best: Score | None = None
    best_at: tuple[int, ...] = ()
    done = 0
    grid = exact_grid(space, scorer) if how.sampler == AUTO else None
    ranking = None if grid is None else rank_all(scorer, grid, trials, _all_progress(progress))
    for generation in _generations(space, scorer, ranking, walk):
        if done >= trials:
            break
        record.share(generation[: trials - done])
        for candidate in generation:
            if done >= trials:
                break
            trial = record.trial(candidate)
            rows.append(trial_row(len(rows), candidate, trial))
            data = trial.user_attrs.get("score")
            if data is None:
                continue
            done += 1
            score = Score.from_dict(data)
            over = max(0.0, *trial.constraints.values()) if trial.constraints else 0.0
            walk.tell(candidate, (over, *_order(score)))  # those over a limit last, the least over it first
            if over <= 0.0:
                feasible.append(score)
                if best is None or _order(score) < _order(best):
                    best, best_at = score, candidate.indices
            if progress is not None:
                progress(SearchProgress(done, trials, best))
    record.end()
    scored = done if ranking is None else ranking.size
    if best is None:
        raise ArchsearchError(
            f"none of {scored} shapes of space {space.name} keeps within {scorer.limit_words()}; raise the limit or add smaller "
            "shapes"
        )
    ranked = _distinct(sorted(feasible, key=_order))
    counted = Scored(space.name, scored, ranking is not None or walk.exhausted)
    name = "walk" if how.sampler == AUTO else how.sampler
    regret = regret_of(space, scorer, best, best_at, name) if how.regret and not counted.exact else None
    if regret is not None:
        ranked = [replace(score, regret=max(0.0, 1.0 - score.worth / regret.exact)) for score in ranked]
    best_ranked = [score.with_rank(rank) for rank, score in enumerate(ranked, start=1)]
    return SearchResult(best_ranked, rows, (counted,), record.here, () if regret is None else (regret,))


def _generations(space: SearchSpace, scorer: Scorer, ranking: Ranking | None, walk: Walk) -> Iterator[list[Candidate]]:
    """What to record: of a space that was scored in full its ranking, else where the walk goes."""
    if ranking is None:
        while generation := walk.generation():
            yield generation
        return
    places = ranking.places()
    while some := list(itertools.islice(places, EXACT_GENERATION)):
        yield [Candidate(ranking.grid.indices(place), ranking.grid.grid.at(place), "exact") for place in some]


def _all_progress(progress: Callable[[SearchProgress], None] | None) -> Callable[[int, int, float], None] | None:
    """Progress of scoring everything, for a callback of trials."""
    return None if progress is None else lambda scored, total, _: progress(SearchProgress(scored, total, None))


def merged(results: Sequence[SearchResult]) -> SearchResult:
    """Searches of several spaces with one scorer as one: all scores ranked together, the trials one after the other.

    A family whose acceptance is assumed is ranked by the lower end of its speed-up: it does not win by an assumption.
    """
    if len(results) == 1:
        return results[0]
    rows = [row for result in results for row in result.trials]
    ranked = sorted((score for result in results for score in result.best), key=lambda score: (-score.ranked_by, _order(score)))
    best = [score.with_rank(rank) for rank, score in enumerate(ranked, start=1)]
    trials = [{**row, "number": number} for number, row in enumerate(rows)]
    here = sum(result.scored_here for result in results)
    spaces = tuple(space for result in results for space in result.spaces)
    return SearchResult(best, trials, spaces, here, tuple(regret for result in results for regret in result.regrets))


def trial_row(number: int, candidate: Candidate, trial: FrozenTrial) -> dict[str, Any]:
    """A row of trials.csv: the trial, its shape, and the score's numbers (value and std apart)."""
    row: dict[str, Any] = {
        "number": number,
        "state": trial.state.name,
        "origin": candidate.origin,
        "feasible": trial.state.name == "COMPLETE" and all(value <= 0 for value in trial.constraints.values()),
        "invalid": trial.user_attrs.get("invalid", ""),
    }
    for name, value in trial.user_attrs.get("score", {}).items():
        if name == "architecture":
            row.update(value)
        elif name == "drafter":
            row[name] = value["label"]
        elif name == "mix":
            if value is not None:
                row[value["objective"] if value["objective"] != "speedup" else "mix_speedup"] = value["value"]
        elif isinstance(value, dict):
            row[name], row[f"{name}_std"] = value["value"], value["std"]
        elif name != "rank":
            row[name] = value
    return row


class ClimbStudy:
    """The climb as a study in the same storage: a trial per candidate, which reports its score at every rung it reaches.

    `RungPruner` says who cannot win any more. A mirror of what the climb decides, and not its memory: what was said before may be
    said again and changes nothing, so that a climb that was killed between two writes is whole again.
    """

    def __init__(
        self, space: SearchSpace, scorer: Scorer, storage: str | Path, k_std: float, about: Mapping[str, Any] | None = None
    ) -> None:
        """`about`: what tells this climb from others in the storage besides space and scorer (its run)."""
        import optuna

        from archsearch.search.pruner import RungPruner

        opened = optuna.storages.get_storage(open_storage(storage))
        self.storage = opened
        self.study: Study = open_study(
            opened,
            CLIMB_STUDY,
            identity_of(space, scorer, about or {}),
            pruner=RungPruner(k_std),
            sampler=optuna.samplers.RandomSampler(seed=0),
        )
        self.numbers: dict[Architecture, int] = {
            Architecture.from_dict(trial.user_attrs["architecture"]): trial.number
            for trial in self.study.get_trials(deepcopy=False)
            if "architecture" in trial.user_attrs
        }

    def _trial(self, shape: Architecture) -> Trial:
        import optuna

        if shape not in self.numbers:
            trial = self.study.ask()
            trial.set_user_attr("architecture", shape.to_dict())
            trial.set_user_attr("origin", "climb")
            self.numbers[shape] = trial.number
        return optuna.trial.Trial(self.study, self._id(shape))

    def _id(self, shape: Architecture) -> int:
        study_id = self.storage.get_study_id_from_name(self.study.study_name)
        return self.storage.get_trial_id_from_study_id_trial_number(study_id, self.numbers[shape])

    def _frozen(self, shape: Architecture) -> FrozenTrial:
        return self.storage.get_trial(self._id(shape))

    def report(self, shape: Architecture, rung: int, score: float, relative_std: float, alpha: dict[str, Any]) -> None:
        """The score of a candidate at a rung, with the std that is its own. What was reported before stays as it is."""
        trial = self._trial(shape)
        frozen = self._frozen(shape)
        if frozen.state.is_finished() or rung in frozen.intermediate_values:
            return
        trial.set_user_attr("relative_std", {**frozen.user_attrs.get("relative_std", {}), str(rung): relative_std})
        trial.set_user_attr("alpha", {**frozen.user_attrs.get("alpha", {}), str(rung): alpha})
        trial.report(score, rung)

    def should_prune(self, shape: Architecture) -> bool:
        """Whether `RungPruner` sees no way left for it to win."""
        return self._trial(shape).should_prune()

    def finish(self, shape: Architecture, why: str, score: float | None = None) -> None:
        """End a candidate's trial: complete with its `score`, or pruned."""
        from optuna.trial import TrialState

        trial = self._trial(shape)
        if self._frozen(shape).state.is_finished():
            return
        trial.set_user_attr("why", why)
        if score is None:
            self.study.tell(trial, state=TrialState.PRUNED)
        else:
            self.study.tell(trial, score)


def enumerate_best(
    space: SearchSpace,
    scorer: Scorer,
    *,
    top: int = 10,
    progress: Callable[[int, int], None] | None = None,
) -> list[Score]:
    """The exact best `top` feasible shapes, ranked, by scoring every shape of the space: what the sampler is checked against.

    `progress` is called with (scored, combinations at most) every 256 shapes.
    """
    space.check(scorer.target)
    total = space.size(scorer.target)
    best: list[Score] = []
    for count, shape in enumerate(space.enumerate(scorer.target), start=1):
        if any(value > 0 for value in scorer.constraints(shape).values()):
            continue
        best.append(scorer(shape))
        if len(best) >= 4 * top + 64:
            best = _distinct(sorted(best, key=_order))[:top]
        if progress is not None and count % 256 == 0:
            progress(count, total)
    return [score.with_rank(rank) for rank, score in enumerate(_distinct(sorted(best, key=_order))[:top], start=1)]
