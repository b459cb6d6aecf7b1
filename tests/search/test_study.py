"""The search: against full enumeration, resumed, interrupted, repeated."""

import os
import time

import optuna
import pytest

from archsearch.acceptance.estimator import GivenAcceptance, VocabularyCoverage
from archsearch.errors import ArchsearchError, InvalidShapeError
from archsearch.search.exact import rank_alone
from archsearch.search.objective import Scorer
from archsearch.search.space import Limits, SearchSpace, load_space
from archsearch.search.storage import identity_of, study_name
from archsearch.search.study import How, open_storage, search
from archsearch.workload import Workload


def _shapes(result):
    return [(s.architecture, s.speedup.value) for s in result.best]


def asked(*arguments, sampler="random", **keywords):
    """A search in which a sampler proposes, although the space could be scored whole."""
    return search(*arguments, how=How(sampler), **keywords)


LAUNCH_BOUND = {"layer_s": 3e-3, "bytes_per_s": 1e12}  # wide and shallow
MEMORY_BOUND = {"layer_s": 0.0, "bytes_per_s": 3e9}  # the head decides


@pytest.mark.parametrize(
    ("case", "seed"),
    [
        (LAUNCH_BOUND, 0),
        pytest.param(MEMORY_BOUND, 0, marks=pytest.mark.slow),
        *(
            pytest.param(case, seed, marks=pytest.mark.campaign)
            for case in ({}, LAUNCH_BOUND, MEMORY_BOUND)
            for seed in (1, 2, 3)
        ),
    ],
)
def test_within_one_percent_of_the_exact_best(make_scorer, smollm2, case, seed):
    space = load_space("demo")
    fewer = {
        "num_key_value_heads": (1, 2),
        "kv_group_size": (0, 2, 3),
        "draft_vocab_size": (0, 4),
    }
    space = space.part(
        {d.name: tuple(range(len(d.choices))) for d in space.dimensions(smollm2)} | fewer
    )
    scorer = make_scorer(limits=space.limits(smollm2), workload=Workload(context_len=1024), **case)
    exact = rank_alone(space, scorer).ranked[0][2]
    found = asked(space, scorer, trials=100, seed=seed, sampler="tpe").best[0]
    assert found.speedup.value >= 0.99 * exact.speedup.value
    assert found.speedup.value <= exact.speedup.value and found.rank == 1


@pytest.mark.slow(own=True)
def test_a_thousand_distinct_shapes_with_a_journal(make_scorer, smollm2, tmp_path):
    """Trials once repeated shapes: 2,000 of them took minutes and scored 607."""
    space = load_space("demo")
    result = asked(
        space,
        make_scorer(limits=space.limits(smollm2)),
        trials=1000,
        storage=tmp_path / "journal.log",
    )
    assert result.finished == 1000
    fields = (
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "draft_vocab_size",
        "window_pattern",
        "sliding_window",
        "tie_word_embeddings",
    )
    assert len({tuple(row[name] for name in fields) for row in result.trials}) == 1000


def test_a_shorter_search_is_the_beginning_of_a_longer_one(make_scorer, small_space):
    for how in (How(), How("tpe")):
        short, long = (
            search(small_space, make_scorer(), trials=trials, seed=2, how=how)
            for trials in (20, 35)
        )
        assert long.trials[:20] == short.trials


def test_a_space_of_few_shapes_is_scored_whole(make_scorer, smollm2, small_space):
    scorer = make_scorer()
    found = search(small_space, scorer, trials=5)
    everything = sorted(
        (scorer(shape).speedup.value for shape in small_space.enumerate(smollm2)), reverse=True
    )
    assert [s.speedup.value for s in found.best] == pytest.approx(everything[:5])
    assert [s.rank for s in found.best] == [1, 2, 3, 4, 5] and {
        row["origin"] for row in found.trials
    } == {"exact"}
    assert (
        found.spaces[0].exact and found.spaces[0].shapes == len(everything) and found.finished == 5
    )


def test_same_seed_same_search_and_other_seed_another(make_scorer, small_space):
    one, same, other = (
        asked(small_space, make_scorer(), trials=60, seed=seed) for seed in (3, 3, 4)
    )
    assert one.trials == same.trials
    assert one.trials != other.trials


def test_what_was_stopped_goes_on_from_what_is_there(make_scorer, small_space, tmp_path):
    class Stop(Exception):
        pass

    def stop(done, total, best):
        if done == 25:
            raise Stop

    path = tmp_path / "journal.log"
    with pytest.raises(Stop):
        asked(small_space, make_scorer(), trials=60, seed=5, storage=path, progress=stop)
    calls, counting = [], Counting(make_scorer())
    continued = asked(
        small_space,
        counting,
        trials=60,
        seed=5,
        storage=path,
        progress=lambda *seen: calls.append(seen),
    )
    first = asked(small_space, make_scorer(), trials=25, seed=5)
    assert continued.trials[:25] == first.trials and continued.finished == 60
    assert len(counting.seen) == 35 + 2  # and the witness
    assert (calls[0][0], *calls[-1]) == (1, 60, 60, continued.best[0].worth)
    again = asked(small_space, make_scorer(), trials=60, seed=5, storage=path)
    assert again.trials == continued.trials and _shapes(again) == _shapes(continued)


def test_a_space_that_is_scored_whole_answers_the_same_whatever_the_storage_holds(
    make_scorer, small_space, tmp_path
):
    path = tmp_path / "j.log"
    asked(small_space, make_scorer(), trials=40, seed=1, storage=path)
    stored = search(small_space, make_scorer(), trials=30, storage=path)
    assert _shapes(stored) == _shapes(search(small_space, make_scorer(), trials=30))


def test_interrupt_loses_the_trial_in_flight_only(make_scorer, small_space, tmp_path):
    scorer = make_scorer()
    calls = []

    class Interrupted:
        def __getattr__(self, name):
            return getattr(scorer, name)

        def __call__(self, draft, best=None):
            calls.append(draft)
            if (
                len(calls) == 2 + 10
            ):  # two plain shapes are the witness of what the storage's study is about
                raise KeyboardInterrupt
            return scorer(draft)

    path = tmp_path / "journal.log"
    with pytest.raises(KeyboardInterrupt):
        asked(small_space, Interrupted(), trials=40, storage=path)
    (stored,) = optuna.get_all_study_summaries(open_storage(path))
    trials = optuna.load_study(study_name=stored.study_name, storage=open_storage(path)).trials
    states = [t.state.name for t in trials if t.state.name != "FAIL"]  # those are of no valid shape
    assert states == ["COMPLETE"] * 9 + ["RUNNING"]
    assert asked(small_space, scorer, trials=40, storage=path).finished == 40
    states = [
        t.state.name
        for t in optuna.load_study(study_name=stored.study_name, storage=open_storage(path)).trials
    ]
    assert "RUNNING" not in states


def test_a_trial_that_was_killed_as_it_ended_is_not_feasible_for_that(
    make_scorer, small_space, tmp_path, monkeypatch
):
    """Its score was written, its end was not: the next search closes it, the one after reads it."""
    path, scorer = tmp_path / "journal.log", make_scorer(limits=Limits(max_parameters=30_000_000))
    write = optuna.Trial.set_user_attr

    def killed(trial, name, value):
        write(trial, name, value)
        if name == "score" and value["parameters"] > 30_000_000:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(optuna.Trial, "set_user_attr", killed)
        asked(small_space, scorer, trials=40, storage=path)
    asked(small_space, scorer, trials=41, storage=path)
    best = asked(small_space, scorer, trials=42, storage=path).best
    assert best and all(score.parameters <= 30_000_000 for score in best)


class Counting:
    """A scorer that remembers what it was asked."""

    def __init__(self, scorer):
        self.scorer, self.seen = scorer, []

    def __getattr__(self, name):
        return getattr(self.scorer, name)

    def __call__(self, draft, best=None):
        self.seen.append(draft)
        return self.scorer(draft, best)


@pytest.mark.parametrize("sampler", ["tpe", "nsga2", "random"])
def test_a_shape_is_scored_once(make_scorer, small_space, sampler):
    counting = Counting(make_scorer())
    asked(small_space, counting, trials=30, sampler=sampler)
    assert len(counting.seen) == len(set(counting.seen)) == 30


def test_a_shape_that_nothing_can_be_told_of_is_pruned(make_scorer, small_space, tmp_path):
    scorer = make_scorer()

    class Odd(Counting):
        def __call__(self, draft, best=None):
            if draft.num_hidden_layers == 3:
                raise InvalidShapeError("three layers are one too many")
            return super().__call__(draft, best)

    result = asked(small_space, Odd(scorer), trials=30, storage=tmp_path / "j.log")
    assert result.finished == 30 and result.invalid > 0
    whole = search(small_space, Odd(scorer), trials=10_000)
    assert whole.invalid > 0 and whole.finished + whole.invalid == whole.spaces[0].shapes
    assert all(score.architecture.num_hidden_layers != 3 for score in result.best)
    assert {row["invalid"] for row in result.trials if row["state"] == "PRUNED"} == {
        "three layers are one too many"
    }


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
    for sampler in ("auto", "random", "tpe"):
        result = asked(space, make_scorer(), trials=100, sampler=sampler)
        assert len(result.best) == 6 and result.finished < 100 and result.spaces[0].exact


def test_infeasible_shapes_never_rank(make_scorer, smollm2, small_space):
    limits = Limits(max_parameters=30_000_000)
    result = asked(small_space, make_scorer(limits=limits), trials=80)
    assert all(s.parameters <= 30_000_000 for s in result.best)
    assert any(row["state"] == "COMPLETE" and not row["feasible"] for row in result.trials)
    assert not asked(small_space, make_scorer(limits=Limits(max_parameters=1000)), trials=20).best


def test_rows_hold_the_trial(make_scorer, small_space):
    result = asked(small_space, make_scorer(), trials=90)
    row = next(row for row in result.trials if row["state"] == "COMPLETE")
    assert (
        row["speedup"] > 0 and row["speedup_std"] > 0 and row["hidden_size"] in (256, 384, 576, 768)
    )
    assert {row["origin"] for row in result.trials} == {"sampler"}
    assert [s.rank for s in result.best] == list(range(1, len(result.best) + 1))


# -- one storage, many searches
# -------------------------------------------------------------------------------------------------

QUESTIONS = {
    "batch": {"workload": Workload(batch_size=64)},
    "context": {"workload": Workload(context_len=2048)},
    "temperature": {"workload": Workload(temperature=1.0)},
    "limits": {"limits": Limits(max_parameters=40_000_000)},
    "device": {"bytes_per_s": 50e9},  # of which only the witness knows
}


def test_searches_in_one_storage_do_not_see_each_other(make_scorer, small_space, tmp_path):
    """Another workload or device on the same storage once got the first one's scores."""
    path = tmp_path / "shared.log"
    asked(small_space, make_scorer(), trials=10, storage=path)
    for number, (question, asked_for) in enumerate(QUESTIONS.items(), start=2):
        other = make_scorer(**asked_for)
        shared = asked(small_space, other, trials=10, storage=path)
        assert shared.trials == asked(small_space, other, trials=10).trials, question
        assert len(optuna.get_all_study_summaries(open_storage(path))) == number


def test_what_a_score_depends_on_names_the_study(make_scorer, small_space, smollm2):
    scorer = make_scorer()
    coverage = VocabularyCoverage(((4096, 0.9), (49152, 1.0)))
    others = [
        scorer.with_coverage(coverage),
        Scorer(smollm2, Workload(), scorer.latency, scorer.acceptance, max_gamma=4),
        Scorer(
            smollm2, Workload(), scorer.latency, scorer.acceptance, domain="code"
        ),  # chat is the default
        Scorer(smollm2, Workload(), scorer.latency, GivenAcceptance(0.75)),
        Scorer(smollm2, Workload(mode="graph"), scorer.latency, scorer.acceptance),
    ]
    names = [study_name(identity_of(small_space, item, {})) for item in (scorer, *others)]
    names += [study_name(identity_of(small_space, scorer, {"profile": "a"}))]
    names += [study_name(identity_of(small_space.served(2), scorer, {}))]
    assert len(set(names)) == len(names)
    assert study_name(identity_of(small_space, make_scorer(), {})) == names[0]


def test_a_study_of_the_previous_version_is_left_alone(make_scorer, small_space, smollm2, tmp_path):
    """Its identity was space and target alone: nobody knows what its scores were for."""
    path = tmp_path / "j.log"
    old = optuna.create_study(
        storage=open_storage(path), study_name="archsearch", direction="maximize"
    )
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


# -- the journal
# --------------------------------------------------------------------------------------------------


def test_a_stale_lock_of_a_killed_process_is_not_waited_for(
    make_scorer, small_space, tmp_path, monkeypatch
):
    """Optuna's own lock by a relative path would be waited for for ever: its link points
    nowhere."""
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
