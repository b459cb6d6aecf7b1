"""`search`: the run folder it writes, continued, killed, with drafts trained and confirmed."""

from __future__ import annotations

import html
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from archsearch.estimate import Estimate
from archsearch.hardware.identify import identify_cpu
from archsearch.models.files import has_weights
from archsearch.speedup import logit, logit_std
from tests.cli.commands import CONFIRM, SEARCH, call, files_in, last_json, refused
from tests.doubles.world import make_prompts


def test_search_writes_a_complete_run_folder(world: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    text = call(*SEARCH, "--run", "runs/a").stdout
    assert len(text.splitlines()) <= 25 and max(map(len, text.splitlines())) <= 100
    text = call(*SEARCH, "--run", "runs/a", "--explain").stdout
    assert "Latency: profile" in text and "24 trials in space tiny" in text
    run = world / "runs" / "a"
    info = yaml.safe_load((run / "run.yaml").read_text())
    assert info["arguments"]["target"] == "target" and info["seed"] == 0 and info["profile"]["hash"]
    assert info["device"]["key"] == identify_cpu().key and info["space"]["dimensions"][
        "hidden_size"
    ] == [32, 64]
    assert (run / "trials.csv").read_text().count("\n") >= 25
    assert {"score.json", "config.json", "speculative_config.json"} <= files_in(run / "best" / "1")
    assert "<html" in (run / "report.html").read_text()
    score = json.loads((run / "best" / "1" / "score.json").read_text())
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(run / "best" / "1"))
    assert (
        sum(p.numel() for p in model.parameters()) >= score["parameters"]
    )  # a trimmed head is padded for other engines
    assert model.config.hidden_size == score["architecture"]["hidden_size"]
    again = call("report", "runs/a").stdout
    assert f"{score['speedup']['value']:.2f}" in again


def test_search_again_continues(world: Path) -> None:
    call(*SEARCH, "--run", "runs/a")
    first = (world / "runs" / "a" / "trials.csv").read_text().splitlines()
    result = last_json(call(*SEARCH[:-1], "40", "--run", "runs/a", "--json"))
    second = (world / "runs" / "a" / "trials.csv").read_text().splitlines()
    assert second[: len(first)] == first and result["trials"] >= 24 and len(second) > len(first)


def test_search_json_and_a_run_folder_of_its_own(world: Path) -> None:
    result = last_json(call(*SEARCH, "--json", "--top", "3"))
    assert [entry["rank"] for entry in result["best"]] == [1, 2, 3]
    speedups = [entry["speedup"]["value"] for entry in result["best"]]
    assert speedups == sorted(speedups, reverse=True)
    assert Path(result["run"]).parent.name == "runs" and Path(result["report"]).is_file()


def test_continuing_with_other_arguments_is_refused(world: Path) -> None:
    call(*SEARCH, "--run", "runs/a")
    before = {
        name: (world / "runs" / "a" / name).read_bytes() for name in files_in(world / "runs" / "a")
    }
    assert "context was 64, now 128" in refused(*SEARCH[:8], "128", *SEARCH[9:], "--run", "runs/a")
    assert before == {
        name: (world / "runs" / "a" / name).read_bytes() for name in files_in(world / "runs" / "a")
    }


def killed_search(world: Path, until, shipped: Path) -> None:
    """Start a long search in a process of its own, SIGKILL it when `until()` holds."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    code = (  # a process sees nothing of the tests' patches
        "import pathlib, sys; from archsearch import profiles; from archsearch.cli import main;"
        " shipped = pathlib.Path(sys.argv.pop(1)); profiles.data_dir = lambda name: shipped; main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(shipped), *SEARCH[:-1], "4000", "--run", "runs/a"],
        cwd=world,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while not until() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert process.poll() is None, "the search ended before it could be killed"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def test_a_killed_search_continues(world: Path, shipped_profiles: Path) -> None:
    journal = world / "runs" / "a" / "journal.log"
    killed_search(
        world, lambda: journal.exists() and journal.stat().st_size > 40_000, shipped_profiles
    )
    assert not (world / "runs" / "a" / "trials.csv").exists()  # killed half-way
    assert "none yet" in call("list", "runs").stdout
    assert "search has not finished" in refused("export", "runs/a", "--output", "out")
    command = call("report", "runs/a").stdout.splitlines()[-3].strip()
    assert command.startswith("archsearch search ") and command.endswith(" --run runs/a")
    result = last_json(call(*shlex.split(command)[1:], "--trials", "24", "--json"))
    assert result["trials"] >= 24 and result["best"]
    text = (world / "runs" / "a" / "trials.csv").read_text()
    assert "RUNNING" not in text
    hidden = {name for name in files_in(world / "runs") if "/." in name}
    assert hidden <= {"a/.lock"}  # no temporary files


def test_what_was_measured_for_a_target_shifts_the_next_search(with_run: Path) -> None:
    """On the same prompts wholly; who asks without prompts asks about other text, which it hardly
    speaks for."""
    same = (*SEARCH, "--prompts", "prompts.jsonl", "--json")
    learnt = last_json(call(*same, "--run", "runs/b"))
    assert learnt["prior"].startswith(
        "earlier runs: 1 draft of run a on the same prompts moved alpha of a 2-layer draft from 0."
    )
    (text,) = learnt["earlier"]["texts"]
    assert text["match"] == "same" and text["likeness"] == 1.0 and text["runs"] == ["a"]
    assert {entry["alpha"]["source"] for entry in learnt["best"]} == {"modelled"}
    other = last_json(call(*SEARCH, "--domain", "narrow", "--run", "runs/other", "--json"))
    assert other["earlier"]["texts"][0]["match"] == "unknown"
    moved, little = (
        abs(logit(told["alpha_after"]["value"]) - logit(told["alpha_before"]["value"]))
        for told in (learnt["earlier"], other["earlier"])
    )
    # A made-up target like no published one: most of what its draft says is about the target, on
    # any text.
    assert little < 0.8 * moved
    shutil.rmtree(
        with_run / "runs" / "a"
    )  # what it began with is kept: continued, it scores as before
    again = last_json(call(*same, "--run", "runs/b"))
    assert (
        again["best"] == learnt["best"]
        and again["prior"] == learnt["prior"]
        and again["earlier"] == learnt["earlier"]
    )
    fresh = last_json(call(*same, "--run", "runs/c"))
    assert (
        fresh["prior"] == "nothing was measured for this target before" and fresh["earlier"] is None
    )
    # in logit: the best of the two searches differ in alpha, and near 1/2 a std of alpha looks
    # wider
    before, after = (
        logit_std(Estimate.from_dict(result["best"][0]["alpha"])) for result in (fresh, learnt)
    )
    # and slopes far from every published target are less sure than they were, so that other shapes
    # gain less
    assert before > 1.25 * after


def test_search_confirm_end_to_end(confirmed: Path) -> None:
    run = confirmed / "runs" / "a"
    result = json.loads((confirmed / "result.json").read_text())
    data = json.loads((run / "best" / "1" / "confirmed.json").read_text())
    assert data == result["confirmed"][0]
    assert (
        data["identical_output"]["prompts"]
        == data["prompts"]
        == data["identical_output"]["identical"]
    )
    # Of 48 prompts 12 are held out since small files keep more apart; four of them are compared in
    # float32.
    assert (
        data["identical_output_float32"]["identical"]
        == data["identical_output_float32"]["prompts"]
        == 4
    )
    assert 0 <= data["alpha"]["value"] <= 1 <= data["tau"]["value"] <= data["gamma"] + 1
    assert data["relative_error"] == pytest.approx(
        data["predicted_speedup"] / data["speedup"]["value"] - 1
    )
    score = result["best"][0]
    assert (
        score["alpha"]["source"] == "measured" and result["best"][1]["alpha"]["source"] == "prior"
    )
    assert {"model.safetensors", "trace.npz", "training.json", "tokenizer.json"} <= files_in(
        run / "best" / "1"
    )
    page = (run / "report.html").read_text()
    assert "confirmed" in page.lower() and "Learning curve</h2>" in page
    assert (
        result["text"]["words"] in " ".join(html.unescape(page).split())
        and result["text"]["now"]["prompts"] > 0
    )
    assert json.loads((run / "text_sketch.json").read_text())["prompts"] == 48


def test_search_confirm_again_uses_what_is_there(with_run: Path) -> None:
    before = (with_run / "runs/a/best/1/model.safetensors").read_bytes()
    steps = {
        path: json.loads(path.read_text())["steps"]
        for path in with_run.glob("runs/a/finalists/*/training.json")
    }
    text = (with_run / "runs/a/text/cache.json").stat().st_mtime_ns
    result = last_json(call(*CONFIRM, "--run", "runs/a", "--json"))
    assert result["confirmed"]
    # Trained as long as asked, written as much as asked: nothing added.
    assert (with_run / "runs/a/best/1/model.safetensors").read_bytes() == before
    assert steps and {path: json.loads(path.read_text())["steps"] for path in steps} == steps
    assert (with_run / "runs/a/text/cache.json").stat().st_mtime_ns == text


def test_prompts_of_the_user_train(world: Path) -> None:
    """make_prompts is what the other tests rely on: enough prompts, two categories."""
    rows = [json.loads(line) for line in make_prompts(world / "p.jsonl").read_text().splitlines()]
    assert len(rows) == 48 and {row["category"] for row in rows} == {"orders", "travel"}


def test_search_confirm_in_an_engine_that_is_not_there(with_ranks: Path) -> None:
    before = files_in(with_ranks)
    line = refused(*CONFIRM, "--engine", "vllm", "--run", "runs/v")
    assert "run: archsearch engine install vllm" in line and files_in(with_ranks) == before


@pytest.mark.slow(own=True)
def test_search_confirms_in_the_engine_of_the_search(
    with_ranks: Path, made_up: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARCHSEARCH_VLLM_PYTHON", sys.executable)
    monkeypatch.setattr("archsearch.pipeline.climb.race.LEAST_HEAD_S", 1.0)
    named = [
        word for family in ("independent", "eagle3", "medusa") for word in ("--family", family)
    ]
    result = last_json(call(*CONFIRM, "--engine", "vllm", *named, "--run", "runs/v", "--json"))
    (confirmation,) = result["confirmed"]
    assert confirmation["engine"] == "vllm" and confirmation["engine_version"] == "1"
    assert json.loads(Path("runs/v/best/1/confirmed.json").read_text())["engine"] == "vllm"
    # Heads that were named are trained beside the draft, lookup is replayed: one table, all
    # measured. A slow machine writes too little text for a head in seconds; that is said and costs
    # no search.
    found = {item["family"]: item for item in result["families"]}
    assert found["independent"]["rank"] == 1 and all(
        item["tau"]["source"] == "measured" for item in found.values()
    )
    assert {"ngram", "suffix"} <= set(found) and found["ngram"]["seconds"] == 0
    for head in ("eagle3", "medusa"):
        assert (head in found) != any(f"no {head} head: " in note for note in result["notes"])
        assert (head in found) == has_weights(Path("runs/v/heads") / head)
