"""What a sampler missed of the exact best, of the whole space or of a part that holds the best that
it found."""

import doctest

import pytest

from archsearch.records import as_data, from_data
from archsearch.search import samplers as regret_module
from archsearch.search.exact import rank_alone
from archsearch.search.objective import Score
from archsearch.search.samplers import Regret, regret_of, through
from archsearch.search.space import Limits, SearchSpace, load_space
from archsearch.search.study import How, merged, search


def test_the_examples_of_its_functions() -> None:
    assert (
        doctest.testmod(regret_module).failed == 0 and doctest.testmod(regret_module).attempted > 0
    )


@pytest.mark.slow(own=True)
def test_regret_is_that_of_the_enumeration(make_scorer, small_space, monkeypatch) -> None:
    monkeypatch.setattr(regret_module, "ALONE_POINTS", 100_000)
    scorer = make_scorer()
    exact = rank_alone(small_space, scorer).ranked[0][2].speedup.value
    found = search(small_space, scorer, trials=5, seed=1, how=How("random", regret=True))
    (regret,) = found.regrets
    assert (
        regret.whole
        and regret.sampler == "random"
        and regret.exact == pytest.approx(exact, rel=1e-12)
    )
    assert (
        regret.regret == pytest.approx(1.0 - found.best[0].speedup.value / exact)
        and regret.found <= regret.exact
    )
    assert [score.regret for score in found.best] == [
        pytest.approx(max(0.0, 1.0 - score.speedup.value / exact)) for score in found.best
    ]
    assert Score.from_dict(found.best[0].to_dict()) == found.best[0]
    assert merged([found, found]).regrets == (regret, regret)
    assert (
        search(small_space, scorer, trials=5, seed=1, how=How("random")).regrets == ()
    )  # only where it is asked for
    whole = search(small_space, scorer, trials=10_000, how=How("random", regret=True))
    assert whole.spaces[0].exact and whole.regrets == () and "regret" not in whole.best[0].to_dict()


def test_a_part_holds_the_best_that_was_found(make_scorer, smollm2) -> None:
    space = load_space("demo")
    dimensions = space.dimensions(smollm2)
    indices = tuple(len(dimension.choices) - 1 for dimension in dimensions)
    kept = through(space, smollm2, indices, 100)
    part = space.part(kept)
    assert part.size(smollm2) <= 100 < space.size(smollm2)
    for dimension, index in zip(dimensions, indices, strict=True):
        assert index in kept[dimension.name] and list(kept[dimension.name]) == sorted(
            set(kept[dimension.name])
        )
    shapes = set(space.enumerate(smollm2))
    assert set(part.enumerate(smollm2)) < shapes
    result = search(
        space,
        make_scorer(limits=space.limits(smollm2)),
        trials=30,
        seed=0,
        how=How("tpe", regret=True),
    )
    (regret,) = (
        result.regrets
    )  # this scorer has no formulas over arrays, so a part is scored one by one
    assert not regret.whole and 1 <= regret.shapes <= 100 and 0.0 <= regret.regret < 0.5
    text = from_data(Regret, as_data(regret)).words()
    assert "Regret: " in text and "a part of them" in text


def test_limits_count_in_the_exact_best_too(make_scorer, small_space, smollm2, monkeypatch) -> None:
    monkeypatch.setattr(regret_module, "ALONE_POINTS", 100_000)
    scorer = make_scorer(limits=Limits(max_parameters=80_000_000))
    found = search(small_space, scorer, trials=5, seed=1, how=How("random", regret=True))
    assert found.regrets[0].exact == pytest.approx(
        rank_alone(small_space, scorer).ranked[0][2].speedup.value
    )
    tiny = make_scorer(limits=Limits(max_parameters=1))
    best = found.best[0]
    assert (
        regret_of(small_space, tiny, best, (0,) * len(small_space.dimensions(smollm2)), "tpe")
        is None
    )


def test_a_part_of_a_space_is_no_other_file(smollm2) -> None:
    data = {"dimensions": {"num_hidden_layers": [1, 2], "hidden_size": [256, 384, 576]}}
    space = SearchSpace.from_dict(data, "x")
    part = space.part({d.name: tuple(range(len(d.choices)))[:2] for d in space.dimensions(smollm2)})
    assert part.to_dict() == space.to_dict() and part.dimensions(smollm2)[1].choices == (256, 384)
