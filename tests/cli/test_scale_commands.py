"""Workers, Pareto sets: commands that docs/scale.md shows are understood, a worker joins a search,
bad names are told."""

from __future__ import annotations

import csv
import re
import shlex
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from archsearch import pipeline
from archsearch.acceptance.estimator import VocabularyCoverage
from archsearch.cli import main
from archsearch.errors import ArchsearchError
from archsearch.pipeline.scoring import score_spaces
from archsearch.pipeline.session import SearchSession
from archsearch.pipeline.shared_work import Job, SharedWork
from archsearch.pipeline.workers import announce, announced, join
from archsearch.records import as_data
from archsearch.workload import WorkloadRequest
from tests.cli.commands import call, last_json, refused

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"


def commands() -> list[list[str]]:
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    lines = [
        line.split(" | ")[0]
        for block in blocks
        for line in block.splitlines()
        if "archsearch " in line
    ]
    return [shlex.split(line[line.rindex("archsearch ") :], comments=True)[1:] for line in lines]


@pytest.mark.parametrize("command", commands(), ids=lambda command: " ".join(command[:3]))
def test_the_pages_commands_are_understood(command: list[str]) -> None:
    name, *rest = command
    assert main.commands[name].make_context(name, rest, help_option_names=["-h", "--help"]).params


def request(run: Path, **changes: object) -> pipeline.SearchRequest:
    asked = WorkloadRequest("l4", engine="vllm", mode="graph")  # a datasheet: no profile to fit
    known = {
        "trials": 24,
        "alpha": "0.7",
        "families": ("independent",),
        "sampler": "random",
        **changes,
    }
    return pipeline.SearchRequest("llama-3.2-1b", asked=asked, run=run, **known)  # type: ignore[arg-type]


def test_a_worker_joins_and_its_scores_are_the_searchs(tmp_path: Path) -> None:
    storage = str(tmp_path / "shared.log")
    session = SearchSession.start(request(tmp_path / "a", storage=storage, workers=1))
    assert announce(session, storage) == "a" == announce(session, storage)
    helped = join(storage, "a")
    assert helped["scored_here"] == 24 and helped["trials"] == 24
    found = pipeline.search(request(tmp_path / "a", storage=storage, workers=1))
    assert found.trials == 24 and found.best
    rows = list(csv.DictReader((tmp_path / "a" / "trials.csv").read_text().splitlines()))
    alone = SearchSession.start(request(tmp_path / "alone")).scorer
    best = found.best[0]
    assert float(rows[0]["speedup"]) <= best.speedup.value == alone(best.architecture).speedup.value
    assert join(storage, "a")["scored_here"] == 0
    with pytest.raises(ArchsearchError, match="another search called a"):
        announce(
            SearchSession.start(
                request(tmp_path / "b" / "a", storage=storage, workers=1, alpha="0.5")
            ),
            storage,
        )
    with pytest.raises(ArchsearchError, match=r"no search called c is announced in .*\(there: a\)"):
        announced(storage, "c")
    assert "is the name of a run folder, not a path" in refused(
        "worker", "--storage", storage, "--run", "../a"
    )
    assert (
        last_json(call("worker", "--storage", storage, "--run", "a", "--json"))["scored_here"] == 0
    )
    before = announced(
        storage, "a"
    ).studies  # by shape alone; with text the same run asks on, and is no other search
    covered = VocabularyCoverage(((8192, 0.9), (128256, 1.0)))
    session = replace(session, scorer=session.scorer.with_coverage(covered))
    assert announce(session, storage) == "a" and announced(storage, "a").studies != before


@pytest.mark.parametrize(
    "where", ["sqlite:///{}/no.db", "sqlite:///{}/no.db?timeout=9", "{}/no.log"]
)
def test_a_worker_makes_no_storage_of_a_name_that_was_mistyped(tmp_path: Path, where: str) -> None:
    storage = where.format(tmp_path)
    line = refused("worker", "--storage", storage, "--run", "a")
    assert f"storage {tmp_path}" in line.replace("sqlite:///", "") and "does not exist" in line
    assert not list(tmp_path.iterdir())


def test_a_worker_trains_along_in_the_runs_folder(world: Path) -> None:
    """What a worker does once shapes are scored: posted trainings, on the texts of the run, until
    the search ends."""
    asked = WorkloadRequest("cpu", context_len=64)
    files = {"prompts": Path("prompts.jsonl"), "run": Path("runs/a")}
    known = pipeline.SearchRequest(
        "target", asked, "tiny.yaml", trials=8, answer_tokens=16, confirm=1, workers=1, **files
    )
    session = SearchSession.start(known)
    trainer = session.trainer()
    trainer.texts.write_training_once(2.0)
    session = replace(session, scorer=session.scorer.with_coverage(trainer.texts.coverage()))
    storage = str(session.run.storage_file.resolve())
    name = announce(session, storage)
    ranked = score_spaces(session).best
    jobs = [Job("short", score.architecture, 200) for score in ranked[:2]]
    work = SharedWork(storage, name, session.run.info["created"])
    joined: list[dict[str, object]] = []
    with work.held():
        posted = [*jobs, Job("confirm", ranked[0].architecture, rank=1)]
        work.claims.post({job.key: {"job": as_data(job)} for job in posted})
        thread = threading.Thread(target=lambda: joined.append(join(storage, name)))
        thread.start()
        while (
            thread.is_alive()
            and sum(trial.state.name == "COMPLETE" for trial in work.study.trials) < 2
        ):
            time.sleep(0.1)
    thread.join()
    assert joined[0]["trained_here"] == 2 and joined[0]["folder"] == str(session.run.path.resolve())
    for job in jobs:
        assert (
            trainer.train_short(job.shape, job.tokens).tokens >= 200
        )  # read, not trained: the folder has its curve
    assert not [trial for trial in work.study.trials if not trial.state.is_finished()]


def test_all_shapes_are_scored_and_said(tmp_path: Path) -> None:
    command = (
        "search",
        "--target",
        "llama-3.2-1b",
        "--gpu",
        "l4",
        "--engine",
        "vllm",
        "--alpha",
        "0.7",
        "--trials",
        "20",
    )
    run = str(tmp_path / "run")
    goals = "speedup,training_cost,kv_bytes"
    result = call(*command, "--family", "independent", "--run", run, "--pareto", goals, "--json")
    data = last_json(result)
    (scored,) = data["scored"]
    assert scored["exact"] and scored["shapes"] > 5_000 and data["trials"] == 20
    members = data["pareto"]["members"]
    assert (
        members
        and data["pareto"]["exact"] == [scored["space"]]
        and (tmp_path / "run" / "pareto.svg").is_file()
    )
    assert members[0]["score"]["speedup"]["value"] >= data["best"][0]["speedup"]["value"] - 1e-12
    text = call(
        *command, "--family", "independent", "--run", run, "--pareto", goals, "--explain"
    ).stdout
    assert (
        f"all shapes were scored: {scored['shapes']:,} of {scored['space']}" in text
        and "Pareto set of speedup" in text
    )
    assert "unknown goal beauty" in refused(*command, "--pareto", "speedup,beauty")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--storage", "sqlite:///no/such/folder/x.db"), "cannot be used"),
        (("--storage", "nonsense://x"), "cannot be used"),
        (("--executor", "ray"), "--executor ray is for workers; add --workers N"),
    ],
)
def test_a_search_that_cannot_be_shared_as_asked_leaves_no_run(
    tmp_path: Path, monkeypatch, options, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    search = (
        "search",
        "--target",
        "llama-3.1-8b",
        "--gpu",
        "h100",
        "--family",
        "independent",
        "--trials",
        "4",
        "--run",
        "runs/x",
    )
    assert words in refused(*search, *options)
    assert not Path("runs/x").exists()
