"""The search itself: Optuna suggests, the scorer answers. Knows no models.

A search of N trials has three parts, and every trial says in `origin` which one it came from:
`start`: two plain shapes (2 and 4 layers as wide as the target), then random valid ones; `tpe`: Optuna's multivariate TPE;
`neighbour`: in the last third, and after TPE has repeated itself, unvisited shapes one step from the best so far. In small
discrete spaces TPE finds the region and then keeps sampling what it knows; the steps find the top
(`benchmarks/search_speed.py` measures both).

Sampling happens on a study in memory; each finished trial is then written to the storage as one record. That is ten times faster
than asking through a journal file, and a storage never holds a half-finished trial: Ctrl-C and kill lose the trial in flight
only. The sampler is seeded anew for every trial, so a search that was stopped and continued ends as if it had never stopped.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from archsearch.architecture.architecture import Architecture
from archsearch.errors import ArchsearchError
from archsearch.search.objective import Score, Scorer
from archsearch.search.space import InvalidShape, SearchSpace

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

STARTUP_TRIALS: Final = 40
# Invalid shapes do not count as trials; after this many asks per trial the search ends with what it has.
ASKS_PER_TRIAL: Final = 20
START_LAYERS: Final = (2, 4)


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """Passed to the progress callback after every trial."""

    done: int
    total: int
    best: Score | None


@dataclass(frozen=True)
class SearchResult:
    """What a search found. `best`: distinct feasible scores, best first, ranked; `trials`: one row per trial, as in
    trials.csv."""

    best: list[Score]
    trials: list[dict[str, Any]]

    @property
    def finished(self) -> int:
        return sum(row["state"] == "COMPLETE" for row in self.trials)

    @property
    def cached(self) -> int:
        """Trials answered without scoring: their shape had been scored before."""
        return sum(bool(row["cached"]) for row in self.trials)

    @property
    def invalid(self) -> int:
        return sum(row["state"] == "PRUNED" for row in self.trials)


def open_storage(where: str | Path) -> str | BaseStorage:
    """An Optuna storage: a URL as it is (`sqlite:///x.db`), anything else the path of a journal file."""
    text = str(where)
    if "://" in text:
        return text
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    from archsearch.search.storage import FileLock, drop_torn_line

    try:
        Path(text).parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(text)
        drop_torn_line(text, lock)
        return JournalStorage(JournalFileBackend(text, lock))  # type: ignore[arg-type]  # acquire and release are all it asks
    except OSError as error:
        raise ArchsearchError(f"cannot write {text}: {error.strerror or error}; choose a folder you can write to") from error


class _Search:
    """One search in progress."""

    def __init__(self, space: SearchSpace, scorer: Scorer, trials: int, seed: int, neighbours: bool) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.space, self.scorer, self.target = space, scorer, scorer.target
        self.total, self.seed, self.use_neighbours = trials, seed, neighbours
        self.dimensions = space.dimensions(self.target)
        self.study: Study = optuna.create_study(direction="maximize", sampler=self._sampler(0))
        self.scores: dict[Architecture, Score] = {}
        self.feasible: dict[Architecture, bool] = {}
        self.tried: set[tuple[int, ...]] = set()
        self.where: dict[Architecture, tuple[int, ...]] = {}
        self.asked = self.done = 0
        self.repeated = False
        self.best: Score | None = None

    def _sampler(self, number: int) -> Any:
        from optuna.samplers import TPESampler

        startup = min(STARTUP_TRIALS, self.total // 4)
        return TPESampler(seed=self.seed * 1_000_003 + number, multivariate=True, n_startup_trials=startup)

    # -- what has happened ------------------------------------------------------------------------------------------------------

    def indices_of(self, params: dict[str, Any]) -> tuple[int, ...]:
        return tuple(d.decode(params[d.parameter]) if d.parameter in params else 0 for d in self.dimensions)

    def recall(self, trial: FrozenTrial) -> None:
        """Take a finished trial, from this process or from the storage, into account."""
        self.asked += 1
        indices = self.indices_of(trial.params)
        self.tried.add(indices)
        data = trial.user_attrs.get("score")
        if data is None:
            self.repeated = False
            return
        self.done += 1
        score = Score.from_dict(data)
        shape = score.architecture
        self.repeated = bool(trial.user_attrs.get("cached"))
        self.scores[shape], self.where[shape] = score, indices
        self.feasible[shape] = all(value <= 0 for value in trial.constraints.values())
        if self.feasible[shape] and (self.best is None or _order(score) < _order(self.best)):
            self.best = score

    # -- what to ask next -------------------------------------------------------------------------------------------------------

    def next_indices(self) -> tuple[tuple[int, ...] | None, str]:
        """Choices to try (None: let the sampler choose) and the origin."""
        if self.asked < len(START_LAYERS):
            for layers in START_LAYERS[self.asked :]:
                indices = self._plain(layers)
                if indices not in self.tried and not isinstance(self.space.build(indices, self.target), InvalidShape):
                    return indices, "start"
        if self.done < min(STARTUP_TRIALS, self.total // 4):
            generator = random.Random(self.seed * 1_000_003 + self.asked)
            for _ in range(1000):
                indices = tuple(generator.randrange(len(dimension.choices)) for dimension in self.dimensions)
                if indices not in self.tried and not isinstance(self.space.build(indices, self.target), InvalidShape):
                    return indices, "start"
        elif self.use_neighbours and (self.repeated or 3 * self.done >= 2 * self.total):
            for indices in self._unvisited():
                return indices, "neighbour"
        return None, "tpe"

    def _plain(self, layers: int) -> tuple[int, ...]:
        target = self.target
        return self.space.nearest(
            {
                "num_hidden_layers": layers,
                "hidden_size": target.hidden_size,
                "ffn_ratio": target.intermediate_size / target.hidden_size,
                "num_key_value_heads": target.num_key_value_heads,
                "kv_group_size": target.kv_group_size,
                "head_dim": target.head_dim,
                "draft_vocab_size": max(target.vocab_size // 4, 1),
                "window": "L",
            },
            target,
        )

    def _unvisited(self) -> Iterator[tuple[int, ...]]:
        """Valid shapes not yet scored next to the best, then next to the second best, ..."""
        ranked = sorted((s for shape, s in self.scores.items() if self.feasible[shape]), key=_order)
        for score in ranked[:20]:
            for indices in self.space.neighbours(self.where[score.architecture], self.target):
                if indices in self.tried:
                    continue
                shape = self.space.build(indices, self.target)
                if not isinstance(shape, InvalidShape) and shape not in self.scores:
                    yield indices

    def run_one(self) -> FrozenTrial:
        """Ask, score, tell."""
        from optuna.trial import TrialState

        indices, origin = self.next_indices()
        if indices is not None:
            pairs = zip(self.dimensions, indices, strict=True)
            self.study.enqueue_trial({d.parameter: d.encode(i) for d, i in pairs if len(d.choices) > 1})
        self.study.sampler = self._sampler(self.asked)
        trial = self.study.ask()
        shape = self.space.suggest(trial, self.target)
        trial.set_user_attr("origin", origin)
        if isinstance(shape, InvalidShape):
            trial.set_user_attr("invalid", shape.reason)
            return self.study.tell(trial, state=TrialState.PRUNED)
        known = self.scores.get(shape)
        score = known or self.scorer(shape)
        trial.set_user_attr("cached", known is not None)
        trial.set_user_attr("score", score.to_dict())
        for name, value in self.scorer.constraints(shape).items():
            trial.set_constraint(name, value)
        return self.study.tell(trial, score.speedup.value)


def _order(score: Score) -> tuple[float, int, int]:
    """Fastest first; of equals the smaller, then the one with fewer windows."""
    return (-score.speedup.value, score.parameters, score.architecture.window_pattern.count("S"))


def _distinct(ranked: Sequence[Score]) -> list[Score]:
    """Without shapes that differ from a better-ranked one by windows alone that change no number (longer than the context)."""
    seen: set[tuple[Architecture, float]] = set()
    kept = []
    for score in ranked:
        key = (score.architecture.replace(window_pattern="L", sliding_window=None), score.speedup.value)
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
    study_name: str = "archsearch",
    progress: Callable[[SearchProgress], None] | None = None,
    neighbours: bool = True,
) -> SearchResult:
    """Search `space` for the fastest draft of the scorer's target.

    `storage`: a journal file or an Optuna URL; finished trials found there count towards `trials`, and a study of another space
    or target is refused. One process at a time. `neighbours=False` leaves all to TPE (to measure what the steps bring). Ends
    early when every valid shape of a small space has been scored. Raises ArchsearchError where no shape is valid or none is
    feasible.
    """
    import optuna
    from optuna.trial import TrialState

    if trials < 1:
        raise ArchsearchError(f"trials must be at least 1, got {trials}")
    space.check(scorer.target)
    state = _Search(space, scorer, trials, seed, neighbours)
    stored: Study | None = None
    if storage is not None:
        try:
            stored = optuna.create_study(
                storage=open_storage(storage), study_name=study_name, direction="maximize", load_if_exists=True
            )
        except OSError as error:
            reason = error.strerror or error
            raise ArchsearchError(f"cannot open storage {storage}: {reason}; choose another --storage") from error
        _claim(stored, space, scorer, str(storage))
        for trial in stored.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)):
            state.study.add_trial(trial)
            state.recall(trial)
    shapes = None
    if space.size(scorer.target) <= 20 * trials:
        shapes = sum(1 for _ in space.enumerate(scorer.target))
    while state.done < trials and state.asked < ASKS_PER_TRIAL * trials:
        if shapes is not None and len(state.scores) >= shapes:
            break
        trial = state.run_one()
        if stored is not None:
            stored.add_trial(trial)
        state.recall(trial)
        if progress is not None:
            progress(SearchProgress(state.done, trials, state.best))
    if state.best is None:
        limits = scorer.limits
        raise ArchsearchError(
            f"none of {state.done} shapes of space {space.name} keeps within max_parameters={limits.max_parameters} and "
            f"max_memory={limits.max_memory_bytes} bytes; raise the limit or add smaller shapes"
        )
    ranked = _distinct(sorted((s for shape, s in state.scores.items() if state.feasible[shape]), key=_order))
    rows = [trial_row(trial) for trial in state.study.get_trials(deepcopy=False)]
    return SearchResult([score.with_rank(rank) for rank, score in enumerate(ranked, start=1)], rows)


def _claim(stored: Study, space: SearchSpace, scorer: Scorer, where: str) -> None:
    """Write down what the storage's study is about, or check that it is about the same."""
    identity = {"space": space.to_dict(), "target": scorer.target.to_dict()}
    found = stored.user_attrs.get("archsearch")
    if found is None:
        stored.set_user_attr("archsearch", identity)
    elif found != identity:
        differs = " and ".join(key for key in identity if found.get(key) != identity[key])
        raise ArchsearchError(f"the study in {where} is about another {differs}; use another run or storage")


def trial_row(trial: FrozenTrial) -> dict[str, Any]:
    """A row of trials.csv: the trial, its shape, and the score's numbers (value and std apart)."""
    row: dict[str, Any] = {
        "number": trial.number,
        "state": trial.state.name,
        "origin": trial.user_attrs.get("origin", ""),
        "cached": bool(trial.user_attrs.get("cached", False)),
        "feasible": trial.state.name == "COMPLETE" and all(value <= 0 for value in trial.constraints.values()),
        "invalid": trial.user_attrs.get("invalid", ""),
    }
    for name, value in trial.user_attrs.get("score", {}).items():
        if name == "architecture":
            row.update(value)
        elif isinstance(value, dict):
            row[name], row[f"{name}_std"] = value["value"], value["std"]
        elif name != "rank":
            row[name] = value
    return row


class ClimbStudy:
    """The climb as a study in the same storage: a trial per candidate, which reports its score at every rung it reaches.

    `RungPruner` says who cannot win any more. A mirror of what the climb decides: `sync` may be called again with what was said
    before, so that a climb that was killed between two writes is whole again.
    """

    NAME: Final = "archsearch-climb"

    def __init__(self, space: SearchSpace, scorer: Scorer, storage: str | Path, k_std: float) -> None:
        import optuna

        from archsearch.search.pruner import RungPruner

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.space, self.target = space, scorer.target
        self.study: Study = optuna.create_study(
            storage=open_storage(storage),
            study_name=self.NAME,
            direction="maximize",
            load_if_exists=True,
            pruner=RungPruner(k_std),
            sampler=optuna.samplers.RandomSampler(seed=0),
        )
        _claim(self.study, space, scorer, str(storage))
        self.ids: dict[Architecture, int] = {
            Architecture.from_dict(trial.user_attrs["architecture"]): trial._trial_id
            for trial in self.study.get_trials(deepcopy=False)
            if "architecture" in trial.user_attrs
        }

    def _trial(self, shape: Architecture) -> Trial:
        import optuna

        if shape not in self.ids:
            trial = self.study.ask()
            trial.set_user_attr("architecture", shape.to_dict())
            trial.set_user_attr("origin", "climb")
            self.ids[shape] = trial._trial_id
        return optuna.trial.Trial(self.study, self.ids[shape])

    def _frozen(self, shape: Architecture) -> FrozenTrial:
        return self.study._storage.get_trial(self.ids[shape])

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
