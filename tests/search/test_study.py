"""The search: against full enumeration, resumed, interrupted, repeated."""

import os
import time

import optuna
import pytest

from archsearch.acceptance.estimator import GivenAcceptance, VocabularyCoverage
from archsearch.errors import ArchsearchError, InvalidShapeError
from archsearch.search.identity import identity_of, study_name
from archsearch.search.objective import Scorer
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


def test_two_thousand_distinct_shapes_with_a_journal_are_quick(make_scorer, smollm2, tmp_path):
    """Trials once repeated shapes: 2,000 of them took minutes and scored 607."""
    space = load_space("demo")
    start = time.process_time()
    result = search(space, make_scorer(limits=space.limits(smollm2)), trials=2000, storage=tmp_path / "journal.log")
    assert time.process_time() - start < 15
    assert result.finished == 2000
    fields = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
              "draft_vocab_size", "window_pattern", "sliding_window", "tie_word_embeddings")  # fmt: skip
    assert len({tuple(row[name] for name in fields) for row in result.trials}) == 2000


def test_a_shorter_search_is_the_beginning_of_a_longer_one(make_scorer, small_space):
    short, long = (search(small_space, make_scorer(), trials=trials, seed=2) for trials in (50, 200))
    assert long.trials[:50] == short.trials


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
    assert (calls[0].done, calls[-1].done, calls[-1].total) == (1, 60, 60)
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
            if len(calls) == 2 + 10:  # two plain shapes are the witness of what the storage's study is about
                raise KeyboardInterrupt
            return scorer(draft)

    path = tmp_path / "journal.log"
    with pytest.raises(KeyboardInterrupt):
        search(small_space, Interrupted(), trials=40, storage=path)
    (stored,) = optuna.get_all_study_summaries(open_storage(path))
    trials = optuna.load_study(study_name=stored.study_name, storage=open_storage(path)).trials
    assert [t.state.name for t in trials] == ["COMPLETE"] * 9
    assert search(small_space, scorer, trials=40, storage=path).finished == 40


class Counting:
    """A scorer that remembers what it was asked."""

    def __init__(self, scorer):
        self.scorer, self.seen = scorer, []

    def __getattr__(self, name):
        return getattr(self.scorer, name)

    def __call__(self, draft):
        self.seen.append(draft)
        return self.scorer(draft)


def test_a_shape_is_scored_once(make_scorer, small_space, tmp_path):
    counting = Counting(make_scorer())
    search(small_space, counting, trials=120)
    assert len(counting.seen) == len(set(counting.seen)) == 120
    counting.seen.clear()
    search(small_space, counting, trials=60, storage=tmp_path / "j.log")
    first = set(counting.seen)
    counting.seen.clear()
    search(small_space, counting, trials=120, storage=tmp_path / "j.log")
    assert len(set(counting.seen) - first) == 60


def test_a_shape_that_nothing_can_be_told_of_is_pruned(make_scorer, small_space, tmp_path):
    scorer = make_scorer()

    class Odd(Counting):
        def __call__(self, draft):
            if draft.num_hidden_layers == 3:
                raise InvalidShapeError("three layers are one too many")
            return super().__call__(draft)

    result = search(small_space, Odd(scorer), trials=80, storage=tmp_path / "j.log")
    assert result.finished == 80 and result.invalid > 0
    assert all(score.architecture.num_hidden_layers != 3 for score in result.best)
    assert {row["invalid"] for row in result.trials if row["state"] == "PRUNED"} == {"three layers are one too many"}


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
    assert {row["origin"] for row in result.trials} == {"start", "random", "neighbour"}
    assert [s.rank for s in result.best] == list(range(1, len(result.best) + 1))


# -- one storage, many searches -------------------------------------------------------------------------------------------------

QUESTIONS = {
    "batch": {"workload": Workload(batch_size=64)},
    "context": {"workload": Workload(context_len=2048)},
    "temperature": {"workload": Workload(temperature=1.0)},
    "limits": {"limits": Limits(max_parameters=40_000_000)},
    "device": {"bytes_per_s": 50e9},  # of which only the witness knows
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_searches_in_one_storage_do_not_see_each_other(make_scorer, small_space, tmp_path, question):
    """Another workload or device on the same storage once got the first one's scores."""
    path = tmp_path / "shared.log"
    search(small_space, make_scorer(), trials=30, storage=path)
    other = make_scorer(**QUESTIONS[question])
    shared = search(small_space, other, trials=30, storage=path)
    assert shared.trials == search(small_space, other, trials=30).trials
    assert len(optuna.get_all_study_summaries(open_storage(path))) == 2


def test_what_a_score_depends_on_names_the_study(make_scorer, small_space, smollm2):
    scorer = make_scorer()
    coverage = VocabularyCoverage(((4096, 0.9), (49152, 1.0)))
    others = [
        scorer.with_coverage(coverage),
        Scorer(smollm2, Workload(), scorer.latency, scorer.acceptance, max_gamma=4),
        Scorer(smollm2, Workload(), scorer.latency, scorer.acceptance, domain="code"),  # chat is the default
        Scorer(smollm2, Workload(), scorer.latency, GivenAcceptance(0.75)),
        Scorer(smollm2, Workload(mode="graph"), scorer.latency, scorer.acceptance),
    ]
    names = [study_name("s", identity_of(small_space, item, {})) for item in (scorer, *others)]
    names += [study_name("s", identity_of(small_space, scorer, {"profile": "a"}))]
    names += [study_name("s", identity_of(small_space.served(2), scorer, {}))]
    assert len(set(names)) == len(names)
    assert study_name("s", identity_of(small_space, make_scorer(), {})) == names[0]


def test_a_storage_of_another_seed_spares_scoring_and_changes_nothing(make_scorer, small_space, tmp_path):
    path, counting = tmp_path / "j.log", Counting(make_scorer())
    search(small_space, make_scorer(), trials=100, seed=0, storage=path)
    again = search(small_space, counting, trials=100, seed=1, storage=path)
    assert again.trials == search(small_space, make_scorer(), trials=100, seed=1).trials
    assert len(counting.seen) < 100


def test_a_study_of_the_previous_version_is_left_alone(make_scorer, small_space, smollm2, tmp_path):
    """Its identity was space and target alone: nobody knows what its scores were for."""
    path = tmp_path / "j.log"
    old = optuna.create_study(storage=open_storage(path), study_name="archsearch", direction="maximize")
    old.set_user_attr("archsearch", {"space": small_space.to_dict(), "target": smollm2.to_dict()})
    old.add_trial(optuna.trial.create_trial(value=99.0))
    result = search(small_space, make_scorer(), trials=20, storage=path)
    assert result.finished == 20 and result.best[0].speedup.value < 99


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
    assert time.monotonic() - start < 300


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
    another = ClimbStudy(small_space, make_scorer(), tmp_path / "journal.log", 1.5, {"run": "another"})
    assert another.study.get_trials() == []
