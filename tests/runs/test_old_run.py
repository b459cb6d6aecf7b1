"""Run folders and exports of earlier versions load: report, list, export, estimate, schedule, and a
search that goes on."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from archsearch.cli import main
from archsearch.engines import registry
from archsearch.report.reading import read_run
from archsearch.runs.run import list_runs, open_run
from tests.doubles.made_up_engine import MadeUpEngine
from tests.doubles.world import make_world

FIXTURES = Path(__file__).parents[1] / "fixtures"
SEARCH = (
    "search",
    "--target",
    "target",
    "--gpu",
    "cpu",
    "--space",
    "small.yaml",
    "--context",
    "64",
    "--trials",
    "12",
    "--top",
    "3",
    "--prompts",
    "prompts.jsonl",
    "--answer-tokens",
    "32",
    "--run",
    "runs/a",
)


def build(folder: Path, version: str) -> Path:
    """The tiny world with the runs of a version in runs/, and its export."""
    old = FIXTURES / f"run-{version}"
    world = make_world(folder)
    for name, run in (("run", "a"), ("climb", "climb"), ("gpu", "gpu")):
        if (old / name).is_dir():
            shutil.copytree(old / name, world / "runs" / run)
    info = yaml.safe_load((old / "run" / "run.yaml").read_text())
    (profile,) = (world / "profiles").glob("*/*")  # as if copied from where the run was made
    moved = world / "profiles" / info["device"]["key"] / Path(info["profile"]["folder"]).name
    if not moved.exists():
        shutil.copytree(profile, moved)
    shutil.copytree(old / "export", world / "export")
    shutil.copyfile(
        old / "run" / "best" / "1" / "model.safetensors", world / "export" / "model.safetensors"
    )
    shutil.copyfile(old / "small.yaml", world / "small.yaml")
    return world


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The world of each version."""
    return {
        version: build(tmp_path_factory.mktemp("old"), version) for version in ("0.1.0", "0.2.0")
    }


@pytest.fixture(params=["0.1.0", "0.2.0"])
def any_old(
    request: pytest.FixtureRequest,
    built: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """A copy of a version's world as the working directory; its version."""
    shutil.copytree(built[request.param], tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return str(request.param)


@pytest.fixture
def old(built: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the world of 0.1.0 as the working directory."""
    shutil.copytree(built["0.1.0"], tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*arguments: str) -> str:
    """Standard output of a command that must succeed."""
    result = CliRunner().invoke(main, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.stderr
    return result.stdout


def refused(*arguments: str) -> str:
    """The one line with which a command is refused."""
    result = CliRunner().invoke(main, list(arguments))
    assert isinstance(result.exception, SystemExit) and result.exit_code == 2, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    return line


def read(path: str) -> Any:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def test_every_file_of_the_run_is_read(old: Path) -> None:
    for name in ("a", "climb"):
        reading = read_run(open_run(Path("runs") / name))
        assert not reading.problems
        assert [item.rank for item in reading.candidates] == ([1, 2, 3] if name == "a" else [1])
    first, second, _ = read_run(open_run(Path("runs/a"))).candidates
    assert (
        first.stage == "confirmed"
        and first.has_weights
        and not first.stale
        and second.stage == "searched"
    )
    assert first.measured_speedup is not None
    assert first.measured_speedup.value == pytest.approx(
        read("runs/a/best/1/confirmed.json")["speedup"]["value"]
    )
    assert [load.engine for load in first.loads] == ["vllm"] and len(first.loads[0].rows) == 8
    assert first.schedule is not None and first.schedule.ranges == ((1, 4, 1),)


def test_every_file_of_the_runs_of_0_2_0_is_read(built: dict[str, Path]) -> None:
    runs = {
        name: read_run(open_run(built["0.2.0"] / "runs" / name)) for name in ("a", "climb", "gpu")
    }
    assert not any(run.problems for run in runs.values())
    first, _, third = runs["a"].candidates
    assert first.stage == "confirmed" and third.stage == "searched"
    assert [load.engine for load in first.loads] == ["vllm"] and first.schedule is not None
    assert runs["climb"].climb and runs["climb"].candidates[0].stage == "confirmed"
    assert {item.score.family for item in runs["gpu"].candidates} >= {
        "independent",
        "eagle3",
        "ngram",
        "medusa",
        "dflash",
    }


def test_report(any_old: str) -> None:
    for name in sorted(path.name for path in Path("runs").iterdir() if path.is_dir()):
        call("report", f"runs/{name}")
        page = Path(f"runs/{name}/report.html").read_text(encoding="utf-8")
        assert f"archsearch {any_old}" in page and "is not what archsearch writes" not in page
        assert ("vllm" if name == "gpu" else "transformers") in page.lower()


def test_report_of_the_climb_shows_its_rungs(old: Path) -> None:
    climb = read_run(open_run(Path("runs/climb"))).climb
    assert climb
    call("report", "runs/climb")
    assert "rung" in Path("runs/climb/report.html").read_text(encoding="utf-8").lower()


def test_list_runs(old: Path) -> None:
    assert {run.path.name for run in list_runs()} == {"a", "climb"}
    lines = call("list", "runs").splitlines()
    rows = [line for line in lines if line.startswith("runs/")]
    assert len(rows) == 2 and all("target" in row for row in rows) and "broken" not in "".join(rows)
    # three prompts each: 1.44x in one, 0.94x (pooled 1.03x) in the other
    assert {row.rsplit("  ", 1)[1].strip() for row in rows} == {"not decided"}


def test_export_writes_what_it_wrote_before(any_old: str) -> None:
    call("export", "runs/a", "--rank", "1", "--output", "again")
    before, now = read("export/export.json"), read("again/export.json")
    assert set(before) <= set(now)
    for key in ("gamma", "schedule", "trained", "dtype", "engines", "architecture", "training"):
        assert now[key] == before[key], key
    names = {path.name for path in Path("export").iterdir()}
    assert names == {path.name for path in Path("again").iterdir()}
    same = ("config.json", "generation_config.json", "draft_vocab.json", "tokenizer.json")
    assert all(read(f"again/{name}") == read(f"export/{name}") for name in same)
    assert call(
        "export", "runs/a", "--rank", "1", "--output", "export"
    )  # over the old export, which it knows as one


def test_the_old_export_loads_and_is_priced(any_old: str) -> None:
    import torch

    from archsearch.models.drafts import TrimmedHead, load_draft

    draft = load_draft(Path("export"))
    assert isinstance(draft.lm_head, TrimmedHead) and draft.lm_head.weight.shape == (128, 32)
    assert draft(torch.tensor([[5, 6, 7]])).logits.shape == (1, 3, 320)
    priced = json.loads(
        call(
            "estimate", "--target", "target", "--draft", "export", "--gpu", "cpu", "--json"
        ).splitlines()[-1]
    )
    assert priced["drafts"][0]["architecture"]["draft_vocab_size"] == 128


def test_schedule_and_confirmation_of_the_old_rank(
    any_old: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        registry, "make_engine", lambda name, settings, tokenizer=None: MadeUpEngine(name=name)
    )
    call("schedule", "runs/a", "--batch-size", "1", "--batch-size", "2")
    arguments = (
        "--engine",
        "vllm",
        "--engine-python",
        sys.executable,
        "--concurrency",
        "1",
        "--gamma",
        "2",
        "--repeats",
        "2",
    )
    call("confirm", "runs/a", "--rank", "1", *arguments)
    assert {row["gamma"] for row in read("runs/a/best/1/load-vllm.json")["rows"]} == {2}


def test_a_search_with_other_arguments_says_what_differs(old: Path) -> None:
    line = refused(*SEARCH, "--seed", "7")
    assert "run runs/a cannot be continued: seed was 0, now 7" in line


def test_a_search_goes_on_where_0_1_0_left_it(old: Path) -> None:
    # Another machine has another profile: the hash is made that of the profile found here, as if it
    # had been searched with it.
    (found,) = call(*SEARCH[:-1], "runs/new", "--json").splitlines()[-1:]
    profile = yaml.safe_load(
        Path(json.loads(found)["run"], "run.yaml").read_text(encoding="utf-8")
    )["profile"]
    path = Path("runs/a/run.yaml")
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    data["profile"]["hash"] = profile["hash"]
    path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    result = json.loads(call(*SEARCH, "--json").splitlines()[-1])
    assert result["trials"] >= 12 and result["run"] == "runs/a" and result["best"]
