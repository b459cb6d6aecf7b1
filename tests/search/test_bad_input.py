"""What a user can get wrong with spaces and storages: each is one clear line."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest

from archsearch.architecture.architecture import Architecture
from archsearch.errors import ArchsearchError
from archsearch.search import storage as storages
from archsearch.search.objective import Scorer
from archsearch.search.samplers import make_sampler
from archsearch.search.space import SearchSpace, load_space
from archsearch.search.storage import identity_of, study_name
from archsearch.search.study import How, search

TARGET = Architecture(576, 1536, 30, 9, 3, 64, 49152, tie_word_embeddings=True)
BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)
)
SELF = "dimensions: &d {num_hidden_layers: [1], hidden_size: *d}\n"
FILES = {
    "an unknown key": (
        "dimensions: {num_hidden_layers: [1], hidden_size: [64]}\ncolour: red\n",
        "unknown key 'colour'",
    ),
    "a wrong type": (
        "dimensions: {num_hidden_layers: [one], hidden_size: [64]}\n",
        "num_hidden_layers: 'one' is not allowed",
    ),
    "an empty list": (
        "dimensions: {num_hidden_layers: [], hidden_size: [64]}\n",
        "num_hidden_layers is empty",
    ),
    "an empty range": (
        "dimensions: {num_hidden_layers: {min: 4, max: 2}, hidden_size: [64]}\n",
        "0 < min <= max",
    ),
    "a range of billions": (
        "dimensions: {num_hidden_layers: {min: 1, max: 4000000000}, hidden_size: [64]}\n",
        "4,000,000,000",
    ),
    "a number that no model has": (
        "dimensions: {num_hidden_layers: [100000], hidden_size: [64]}\n",
        "100000 is too large",
    ),
    "aliases that explode": (BOMB, "once its aliases are written out"),
    "an alias to itself": (SELF, "once its aliases are written out"),
    "a python tag": (
        "dimensions: !!python/object/apply:os.system ['touch owned']\n",
        "is not YAML",
    ),
    "no mapping": ("- 1\n", "must be a mapping"),
    "binary": ("\x00\x01", "is not YAML"),
}


@pytest.mark.parametrize("what", FILES)
def test_a_file_that_is_no_space(what: str, tmp_path: Path) -> None:
    text, said = FILES[what]
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    start = time.monotonic()
    with pytest.raises(ArchsearchError, match=said) as error:
        load_space(path)
    assert (
        len(str(error.value)) < 400
        and "\n" not in str(error.value)
        and "mine.yaml" in str(error.value)
    )
    assert time.monotonic() - start < 120 and not Path("owned").exists()


def test_a_file_that_is_too_large(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("#" * 2_000_000)
    with pytest.raises(ArchsearchError, match="2,000,000 bytes"):
        load_space(path)


def _billions(**more: object) -> SearchSpace:
    numbers = {
        "num_hidden_layers": {"min": 1, "max": 64},
        "hidden_size": {"min": 64, "max": 4096, "step": 32},
        "ffn_ratio": [0.5, 1, 1.5, 2, 3, 4, 5, 6],
        "num_key_value_heads": {"min": 1, "max": 32},
        "kv_group_size": {"min": 1, "max": 32},
        "head_dim": [32, 64, 128],
        "draft_vocab_size": {"min": 1000, "max": 49000, "step": 1000},
    }
    return SearchSpace.from_dict({"dimensions": numbers, **more}, "billions")


def test_billions_of_points_are_sampled_and_a_hopeless_space_is_refused(
    make_scorer: Callable[..., Scorer],
) -> None:
    space = _billions()
    assert space.size(TARGET) > 10**9
    found = search(space, make_scorer(), trials=12)
    assert found.finished == 12 and not found.spaces[0].exact


@pytest.mark.slow
def test_a_hopeless_space_of_billions_is_refused_in_a_minute() -> None:
    with pytest.raises(ArchsearchError, match="allows no valid shape"):
        _billions(constraints={"max_parameters": 1000}).check(TARGET)


def test_samplers(make_scorer: Callable[..., Scorer], small_space: SearchSpace) -> None:
    for sampler in ("tpe", "nsga2", "random"):
        how = How(sampler=sampler)  # type: ignore[arg-type]
        one, again = (
            search(small_space, make_scorer(), trials=30, seed=1, how=how) for _ in range(2)
        )
        assert one.trials == again.trials and one.finished == 30
        assert (
            len(
                {
                    tuple(
                        row[name]
                        for name in (
                            "num_hidden_layers",
                            "hidden_size",
                            "intermediate_size",
                            "num_attention_heads",
                            "num_key_value_heads",
                            "draft_vocab_size",
                            "window_pattern",
                        )
                    )
                    for row in one.trials
                }
            )
            == 30
        )
        assert {row["origin"] for row in one.trials} == {"sampler"}
    assert How().proposes == "tpe" and How(goals=("speedup", "parameters")).proposes == "nsga2"
    with pytest.raises(ArchsearchError, match="unknown sampler 'walk'"):
        make_sampler("walk", 0)


def test_several_goals_are_searched_by_nsga2(
    make_scorer: Callable[..., Scorer], tmp_path: Path
) -> None:
    how = How(goals=("speedup", "parameters"))
    found = search(_billions(), make_scorer(), trials=60, how=how, storage=tmp_path / "j.log")
    (summary,) = optuna.get_all_study_summaries(storages.open_storage(tmp_path / "j.log"))
    assert [direction.name for direction in summary.directions] == ["MAXIMIZE", "MINIMIZE"]
    assert found.finished == 60 and found.best[0].worth == max(score.worth for score in found.best)


# -- storages --------------------------------------------------------------------------------


def _refused(scorer: Scorer, space: SearchSpace, storage: str) -> str:
    with pytest.raises(ArchsearchError) as error:
        search(space, scorer, trials=2, storage=storage)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_storages_that_cannot_be_used(
    make_scorer: Callable[..., Scorer],
    small_space: SearchSpace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storages, "GRPC_TIMEOUT_S", 0.5)
    scorer = make_scorer()
    (tmp_path / "text.db").write_text(
        "this is no database, but long enough to be looked at as one " * 20
    )
    other = sqlite3.connect(tmp_path / "other.db")
    other.execute("create table studies (name text)")
    other.commit()
    other.close()
    said = {
        f"sqlite:///{tmp_path}/missing/x.db": "unable to open",
        f"sqlite:///{tmp_path}/text.db": "cannot be used|not a database",
        f"sqlite:///{tmp_path}/other.db": "something else|cannot be used",
        "postgresql+nosuchdriver://me:secret@localhost/x": (
            "cannot be used|needs the Python package"
        ),
        "redis://localhost": "",
        "grpc://": "grpc://host:13000",
        "grpc://127.0.0.1:1": "does not answer|needs the Python package",
    }
    for storage, words in said.items():
        line = _refused(scorer, small_space, storage)
        assert "secret" not in line
        assert any(word in line for word in words.split("|")), (storage, line)


def test_a_database_of_another_version_of_optuna(
    make_scorer: Callable[..., Scorer], small_space: SearchSpace, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/old.db"
    search(small_space, make_scorer(), trials=2, storage=url)
    database = sqlite3.connect(tmp_path / "old.db")
    database.execute("update alembic_version set version_num = 'v0.9.0.a'")
    database.commit()
    database.close()
    assert "schema of another version of Optuna" in _refused(make_scorer(), small_space, url)


def test_a_study_of_another_space_under_the_same_name(
    make_scorer: Callable[..., Scorer], small_space: SearchSpace, tmp_path: Path
) -> None:
    scorer = make_scorer()
    identity = identity_of(small_space, scorer, {})
    study = optuna.create_study(
        storage=storages.open_storage(tmp_path / "a.log"), study_name=study_name(identity)
    )
    study.set_user_attr("archsearch", {**identity, "space": "another"})
    assert "is about another space" in _refused(scorer, small_space, str(tmp_path / "a.log"))
