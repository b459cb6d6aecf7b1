"""The run folder: what is written can be read, resumed, and refused with reasons."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from archsearch import __version__
from archsearch.architecture.architecture import Architecture
from archsearch.cli import main
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.records import load, save
from archsearch.runs.confirmed import CONFIRMED_FILE, Confirmed
from archsearch.runs.run import (
    create_run,
    git_commit,
    list_runs,
    open_run,
    resume_run,
)
from archsearch.search.objective import Score

CONFIRMED = (
    Path(__file__).parents[1] / "fixtures" / "run-0.2.0" / "run" / "best" / "1" / "confirmed.json"
)

ARGUMENTS = {
    "target": "smollm2-135m",
    "gpu": "cpu",
    "space": "demo",
    "trials": 300,
    "seed": 0,
    "prompts": Path("p.jsonl"),
}
SPACE = {"dimensions": {"hidden_size": [256, "target"], "num_hidden_layers": [1, 2]}}
PROFILE = {"folder": "profiles/cpu/x", "hash": "abc"}


def _score(rank=1, layers=2):
    one = Estimate(1.5, 0.1, "modelled")
    shape = Architecture(576, 1536, layers, 9, 3, 64, 49152)
    return Score(
        rank, shape, 100, 3, Estimate(0.5, 0.1, "prior"), one, one, one, one, one, one, 768, None
    )


def _run(base, **changes):
    return create_run(
        base,
        {**ARGUMENTS, **changes},
        space=SPACE,
        device={"key": "cpu-x"},
        profile=PROFILE,
    )


def test_create_and_open(tmp_path):
    run = _run(tmp_path)
    again = open_run(run.path)
    assert again.info == run.info and again.arguments["prompts"] == "p.jsonl"
    data = yaml.safe_load((run.path / "run.yaml").read_text())
    assert (
        data["space"] == SPACE
        and data["profile"] == PROFILE
        and data["seed"] == 0
        and data["device"] == {"key": "cpu-x"}
    )
    assert (
        data["code"]["version"]
        and data["packages"]["python"].count(".") == 2
        and "optuna" in data["packages"]
    )
    assert run.path.name.endswith("smollm2-135m") and run.trials().empty and run.ranks() == []


def test_runs_of_the_same_second_do_not_collide(tmp_path):
    paths = {_run(tmp_path).path for _ in range(3)}
    assert len(paths) == 3
    assert {run.path for run in list_runs(tmp_path)} == paths


def test_a_named_folder_is_not_overwritten(tmp_path):
    folder = tmp_path / "mine"
    create_run(tmp_path, ARGUMENTS, space=SPACE, path=folder)
    with pytest.raises(ArchsearchError, match="already holds a run"):
        create_run(tmp_path, ARGUMENTS, space=SPACE, path=folder)


def test_resume_with_the_same_or_free_arguments(tmp_path):
    run = _run(tmp_path)
    resumed = resume_run(
        run.path,
        {**ARGUMENTS, "trials": 500, "top": 3, "gpu": "cpu-x"},
        space=SPACE,
        profile={**PROFILE, "folder": "elsewhere"},
    )
    assert resumed.path == run.path


@pytest.mark.parametrize(
    ("arguments", "other", "words"),
    [
        ({"space": "wide-shallow"}, {}, "space was 'demo', now 'wide-shallow'"),
        ({"batch_size": 4}, {}, "batch_size was None, now 4"),
        ({"seed": 1}, {}, "seed was 0, now 1"),
        ({}, {"space": {"dimensions": {}}}, "search space's file has changed"),
        ({}, {"profile": {"hash": "zzz"}}, "profile's hash was abc, now zzz"),
    ],
)
def test_resume_with_other_arguments_says_which_differ(tmp_path, arguments, other, words):
    run = _run(tmp_path)
    keywords = {"space": SPACE, "profile": PROFILE, **other}
    with pytest.raises(ArchsearchError, match=words):
        resume_run(run.path, {**ARGUMENTS, **arguments}, **keywords)


def test_trials_csv(tmp_path):
    run = _run(tmp_path)
    rows = [
        {"number": 0, "invalid": "a, b", "gamma": None},
        {"number": 1, "speedup": 1.1 + 2.2, "gamma": 3, "ok": True},
    ]
    run.write_trials(rows)
    text = 'number,invalid,gamma,speedup,ok\n0,"a, b",,,\n1,,3,3.3000000000000003,True\n'
    assert run.trials_file.read_text() == text
    table = run.trials()
    assert (
        list(table["number"]) == [0, 1]
        and table["speedup"][1] == 1.1 + 2.2
        and table["speedup"].isna()[0]
    )
    assert table["invalid"][0] == "a, b" and run.summary_row()
    run.write_trials([])
    assert run.trials().empty


def test_best_and_confirmed(tmp_path):
    run = _run(tmp_path)
    run.write_best(_score(1), {"model_type": "llama"}, {"num_speculative_tokens": 3})
    run.write_best(_score(2, layers=4))
    assert run.ranks() == [1, 2] and run.score(2) == _score(2, layers=4) and len(run.scores()) == 2
    assert sorted(p.name for p in run.best_dir(1).iterdir()) == [
        "config.json",
        "score.json",
        "speculative_config.json",
    ]
    assert run.confirmed(1) is None
    confirmed = load(CONFIRMED, "confirmation", Confirmed)
    assert confirmed is not None
    save(run.best_dir(1) / CONFIRMED_FILE, confirmed)
    assert run.confirmed(1) == confirmed and run.summary_row()[-1] != "no"
    assert confirmed.predicted is not None
    for alpha, known in ((confirmed.predicted.alpha, confirmed), (0.1, None)):
        told = alpha if known else Estimate(alpha, 0.1, "measured")
        run.write_best(replace(_score(1), alpha=told))
        assert run.confirmed(1) == known, "trained further: these figures are of other weights"
    assert run.decided(1) is None and run.summary_row()[-1] == "no"
    with pytest.raises(ArchsearchError, match="no rank 7; ranks: 1, 2"):
        run.score(7)


def test_another_shape_at_a_rank_sets_the_old_one_aside(tmp_path):
    run = _run(tmp_path)
    folder = run.write_best(_score(1))
    (folder / "model.safetensors").write_text("trained")
    run.write_best(_score(1))
    assert (folder / "model.safetensors").exists()
    run.write_best(_score(1, layers=3))
    assert not (folder / "model.safetensors").exists() and run.ranks() == [1]
    assert (run.path / "best" / "replaced-1" / "model.safetensors").read_text() == "trained"


def test_missing_and_broken_runs(tmp_path):
    run = _run(tmp_path)
    with pytest.raises(ArchsearchError, match=f"nope does not exist; runs in .*{run.path.name}"):
        open_run(tmp_path / "nope")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArchsearchError, match="is no run folder"):
        open_run(tmp_path / "empty")
    broken = tmp_path / "broken"
    broken.mkdir()
    for text, words in (
        ("a: [", "is not YAML"),
        ("- 1", "is broken"),
        ("schema_version: 1", "created.* missing"),
    ):
        (broken / "run.yaml").write_text(text)
        with pytest.raises(ArchsearchError, match=words) as caught:
            open_run(broken)
        assert "\n" not in str(caught.value)
    data = yaml.safe_load((run.path / "run.yaml").read_text())
    (broken / "run.yaml").write_text(yaml.safe_dump({**data, "schema_version": 99}))
    with pytest.raises(
        ArchsearchError, match=f"schema version 99, written by archsearch {re.escape(__version__)}"
    ):
        open_run(broken)
    for section, name, value in (
        ("arguments", "batch_size", "x"),
        ("arguments", "batch_size", math.nan),
        ("device", "memory_bytes", "x"),
    ):
        changed = {**data, section: {**data[section], name: value}}
        (broken / "run.yaml").write_text(yaml.safe_dump(changed))
        with pytest.raises(ArchsearchError, match=f"{section}: {name} is no number"):
            open_run(broken)
    assert [r.path for r in list_runs(tmp_path)] == [run.path]
    assert list_runs(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"code": {"version": "0.9.1", "commit": None}},
            "schema version 2, written by archsearch 0.9.1; archsearch",
        ),
        ({"code": None}, "written by archsearch of an unknown version"),
        ({"code": "x", "arguments": None}, "use the version that wrote it, or start a new run"),
    ],
)
def test_a_run_of_an_unknown_version_says_which_version_wrote_it(tmp_path, changes, words):
    run = _run(tmp_path)
    data = {**yaml.safe_load((run.path / "run.yaml").read_text()), "schema_version": 2, **changes}
    # A later version may leave fields out: its version is told all the same, not what is missing.
    (run.path / "run.yaml").write_text(
        yaml.safe_dump({key: value for key, value in data.items() if key != "packages"})
    )
    with pytest.raises(ArchsearchError, match=words) as caught:
        open_run(run.path)
    assert "\n" not in str(caught.value) and "missing" not in str(caught.value)
    assert __version__ in str(caught.value)
    result = CliRunner().invoke(main, ["report", str(run.path)])
    assert result.exit_code == 2 and words in result.stderr and result.stderr.count("\n") == 1


def test_unwritable_base(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArchsearchError, match="cannot write .*; choose a folder"):
        _run(tmp_path / "file")


def test_the_commit():
    commit = git_commit()
    assert commit is None or len(commit.removesuffix("+changes")) == 40
