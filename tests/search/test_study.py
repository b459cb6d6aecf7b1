"""The search: against full enumeration, resumed, interrupted, repeated."""

import os
import time

import optuna
import pytest

from archsearch.errors import ArchsearchError
from archsearch.search.space import Limits, SearchSpace, load_space
from archsearch.search.study import ClimbStudy, enumerate_best, open_storage, search
from archsearch.workload import Workload


def _shapes(result):
    return [(s.architecture, s.speedup.value) for s in result.best]


LAUNCH_BOUND = {"layer_s": 3e-3, "bytes_per_s": 1e12}  # wide and shallow
MEMORY_BOUND = {"layer_s": 0.0, "bytes_per_s": 3e9}  # the head decides


@pytest.mark.parametrize(
    ("case", "seed"),
    [
        (LAUNCH_BOUND, 0),
        pytest.param(MEMORY_BOUND, 0, marks=pytest.mark.slow),
        *(pytest.param(case, seed, marks=pytest.mark.slow) for case in ({}, LAUNCH_BOUND, MEMORY_BOUND) for seed in (1, 2, 3)),
    ],
)
def test_within_one_percent_of_the_exact_best(make_scorer, smollm2, case, seed):
    space = load_space("demo")
    scorer = make_scorer(limits=space.limits(smollm2), workload=Workload(context_len=1024), **case)
    exact = enumerate_best(space, scorer, top=1)[0]
    found = search(space, scorer, trials=300, seed=seed).best[0]
    assert found.speedup.value >= 0.99 * exact.speedup.value
    assert found.speedup.value <= exact.speedup.value and found.rank == 1


def test_three_hundred_trials_with_a_journal_are_quick(make_scorer, smollm2, tmp_path):
    space = load_space("demo")
    start = time.process_time()
    result = search(space, make_scorer(limits=space.limits(smollm2)), trials=300, storage=tmp_path / "journal.log")
    assert time.process_time() - start < 15
    assert result.finished == 300


def test_enumeration_is_exact(make_scorer, smollm2, small_space):
    scorer = make_scorer()
    best = enumerate_best(small_space, scorer, top=5)
    everything = sorted((scorer(shape).speedup.value for shape in small_space.enumerate(smollm2)), reverse=True)
    assert [s.speedup.value for s in best] == pytest.approx(everything[:5])
    assert [s.rank for s in best] == [1, 2, 3, 4, 5]


def test_same_seed_same_search_and_other_seed_another(make_scorer, small_space):
    one, same, other = (search(small_space, make_scorer(), trials=60, seed=seed) for seed in (3, 3, 4))
    assert one.trials == same.trials
    assert one.trials != other.trials


def test_stopped_and_continued_equals_uninterrupted(make_scorer, small_space, tmp_path):
    class Stop(Exception):
        pass

    def stop(progress):
        if progress.done == 25:
            raise Stop

    path = tmp_path / "journal.log"
    with pytest.raises(Stop):
        search(small_space, make_scorer(), trials=60, seed=5, storage=path, progress=stop)
    calls = []
    continued = search(small_space, make_scorer(), trials=60, seed=5, storage=path, progress=calls.append)
    whole = search(small_space, make_scorer(), trials=60, seed=5)
    assert continued.trials == whole.trials and _shapes(continued) == _shapes(whole)
    assert (calls[0].done, calls[-1].done, calls[-1].total) == (26, 60, 60) or calls[0].done == 25
    again = search(small_space, make_scorer(), trials=60, seed=5, storage=path)
    assert again.finished == 60 and _shapes(again) == _shapes(whole)


def test_interrupt_loses_the_trial_in_flight_only(make_scorer, small_space, tmp_path):
    scorer = make_scorer()
    calls = []

    class Interrupted:
        def __getattr__(self, name):
            return getattr(scorer, name)

        def __call__(self, draft):
            calls.append(draft)
            if len(calls) == 10:
                raise KeyboardInterrupt
            return scorer(draft)

    path = tmp_path / "journal.log"
    with pytest.raises(KeyboardInterrupt):
        search(small_space, Interrupted(), trials=40, storage=path)
    stored = optuna.load_study(study_name="archsearch", storage=optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(path))))  # fmt: skip
    assert [t.state.name for t in stored.trials if t.state.name != "PRUNED"] == ["COMPLETE"] * 9
    assert search(small_space, scorer, trials=40, storage=path).finished == 40


def test_a_shape_is_scored_once(make_scorer, small_space):
    scorer = make_scorer()
    seen = []

    class Counting:
        def __getattr__(self, name):
            return getattr(scorer, name)

        def __call__(self, draft):
            seen.append(draft)
            return scorer(draft)

    result = search(small_space, Counting(), trials=120, neighbours=False)
    assert len(seen) == len(set(seen)) == 120 - result.cached and result.cached > 0


def test_ends_when_every_shape_is_scored(make_scorer, smollm2):
    space = SearchSpace.from_dict(
        {
            "dimensions": {
                "num_hidden_layers": [1, 2, 3],
                "hidden_size": [256, 576],
                "num_key_value_heads": [1],
                "kv_group_size": [4],
            }
        },
        "tiny",
    )
    result = search(space, make_scorer(), trials=100)
    assert len(result.best) == 6 and result.finished < 100


def test_infeasible_shapes_never_rank(make_scorer, smollm2, small_space):
    limits = Limits(max_parameters=30_000_000)
    result = search(small_space, make_scorer(limits=limits), trials=80)
    assert all(s.parameters <= 30_000_000 for s in result.best)
    assert any(row["state"] == "COMPLETE" and not row["feasible"] for row in result.trials)
    with pytest.raises(ArchsearchError, match="none of .* shapes of space small keeps within max_parameters=1000"):
        search(small_space, make_scorer(limits=Limits(max_parameters=1000)), trials=20)


def test_rows_hold_the_trial(make_scorer, small_space):
    result = search(small_space, make_scorer(), trials=90)
    row = next(row for row in result.trials if row["state"] == "COMPLETE")
    assert row["speedup"] > 0 and row["speedup_std"] > 0 and row["hidden_size"] in (256, 384, 576, 768)
    assert {row["origin"] for row in result.trials} == {"start", "tpe", "neighbour"}
    assert [s.rank for s in result.best] == list(range(1, len(result.best) + 1))


def test_storage_of_another_space_is_refused(make_scorer, small_space, tmp_path):
    search(small_space, make_scorer(), trials=5, storage=tmp_path / "j.log")
    with pytest.raises(ArchsearchError, match="about another space"):
        search(load_space("demo"), make_scorer(), trials=5, storage=tmp_path / "j.log")


def test_bad_requests(make_scorer, small_space, tmp_path):
    with pytest.raises(ArchsearchError, match="trials must be at least 1"):
        search(small_space, make_scorer(), trials=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(ArchsearchError, match="cannot write"):
        search(small_space, make_scorer(), trials=5, storage=tmp_path / "file" / "j.log")


# -- the journal ----------------------------------------------------------------------------------------------------------------


def test_a_stale_lock_of_a_killed_process_is_not_waited_for(make_scorer, small_space, tmp_path, monkeypatch):
    """Optuna's own lock by a relative path would be waited for for ever: its link points nowhere."""
    monkeypatch.chdir(tmp_path)
    search(small_space, make_scorer(), trials=3, storage="runs/a/journal.log")
    os.symlink("runs/a/journal.log", "runs/a/journal.log.lock")
    start = time.monotonic()
    assert search(small_space, make_scorer(), trials=6, storage="runs/a/journal.log").finished == 6
    assert time.monotonic() - start < 20


def test_a_torn_last_line_is_dropped(make_scorer, small_space, tmp_path):
    path = tmp_path / "journal.log"
    search(small_space, make_scorer(), trials=3, storage=path)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"op_code":4,"worker')
    open_storage(path)
    assert path.read_bytes() == whole
    assert search(small_space, make_scorer(), trials=5, storage=path).finished == 5


# -- the climb's study ----------------------------------------------------------------------------------------------------------


def test_the_climbs_study_goes_on_and_says_things_once(make_scorer, small_space, smollm2, tmp_path):
    shapes = list(small_space.enumerate(smollm2))[:3]
    alpha = {"value": 0.5, "std": 0.1, "source": "modelled"}

    def opened():
        return ClimbStudy(small_space, make_scorer(), tmp_path / "journal.log", 1.5)

    first = opened()
    for shape, score in zip(shapes, (2.0, 1.95, 1.0), strict=True):
        first.report(shape, 1, score, 0.02, alpha)
    assert [first.should_prune(shape) for shape in shapes] == [False, False, True]
    first.finish(shapes[2], "cannot win")
    again = opened()  # another process, which says the same and then more
    again.report(shapes[0], 1, 7.0, 0.02, alpha)
    again.report(shapes[0], 2, 2.1, 0.01, alpha)
    again.finish(shapes[2], "cannot win, again")
    again.report(shapes[2], 2, 9.0, 0.01, alpha)
    again.finish(shapes[0], "finalist", 2.2)
    again.finish(shapes[1], "dropped")
    trials = again.study.get_trials()
    assert [t.state.name for t in trials] == ["COMPLETE", "PRUNED", "PRUNED"]
    assert trials[0].intermediate_values == {1: 2.0, 2: 2.1} and trials[0].value == 2.2
    assert trials[2].intermediate_values == {1: 1.0} and trials[2].user_attrs["why"] == "cannot win"
    assert trials[0].user_attrs["alpha"]["2"] == alpha
    with pytest.raises(ArchsearchError, match="about another space"):
        ClimbStudy(load_space("demo"), make_scorer(), tmp_path / "journal.log", 1.5)
