"""`train`, `export`, `report` and `schedule`: what is done with a run that was searched."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from archsearch.files import read_json, write_json
from archsearch.pipeline import SearchSession, schedule_rank
from archsearch.report import headline
from archsearch.report.reading import read_run
from archsearch.runs.run import open_run
from tests.cli.commands import CONFIRM, SEARCH, call, files_in, last_json, refused


@pytest.mark.slow(own=True)
def test_train_resumes(with_run: Path) -> None:
    before = json.loads((with_run / "runs/a/best/1/training.json").read_text())
    result = last_json(call("train", "runs/a", "--budget", "2s", "--json"))
    after = json.loads((with_run / "runs/a/best/1/training.json").read_text())
    # It goes on from where the anneal began (not anew: its first step is the first run's, to the
    # second at which it was). How many steps two seconds hold is the machine's.
    assert after["loss_curve"][0] == before["loss_curve"][0]
    # A draft whose acceptance no longer rises is not trained on; on fast machines this one is there
    # by now.
    assert after["stopped"] or 1.5 < result["training"]["seconds"] - before["seconds"] < 60
    assert result["after"]["alpha"]["source"] == "measured"
    assert json.loads((with_run / "runs/a/best/1/score.json").read_text()) == result["after"]
    text = call("train", "runs/a", "--budget", "1s").stdout
    assert "Next: archsearch confirm runs/a --rank 1" in text
    stopped = json.loads((with_run / "runs/a/best/1/training.json").read_text())["stopped"]
    assert ("Ended before its budget: held-out acceptance no longer rises" in text) == bool(stopped)


def test_train_a_rank_that_has_no_weights(with_run: Path) -> None:
    assert not (with_run / "runs/a/best/2/model.safetensors").exists()
    result = last_json(call("train", "runs/a", "--rank", "2", "--budget", "1s", "--json"))
    assert (
        result["before"]["alpha"]["source"] == "prior"
        and result["after"]["alpha"]["source"] == "measured"
    )
    assert (with_run / "runs/a/best/2/model.safetensors").exists()


def test_what_another_trainer_made_comes_back(with_run: Path) -> None:
    from archsearch.models.drafts import build_draft, save_draft

    shape = open_run(Path("runs/a")).score(2).architecture
    shape = shape.replace(draft_vocab_size=None)  # a library trains the whole head
    save_draft(build_draft(shape, seed=1), Path("trained"))
    other = shape.replace(num_hidden_layers=shape.num_hidden_layers + 1)
    save_draft(build_draft(other, seed=1), Path("other"))
    # what else a line holds is the trainer's own, and no JSON at times
    looks = [{"loss": math.nan, "tokens": 900, "alpha": 0.2}, {"tokens": 1800, "alpha": 0.3}]
    Path("alpha.jsonl").write_text("".join(json.dumps(look) + "\n" for look in looks))
    own = ("train", "runs/a", "--rank", "2")
    taken = (*own, "--weights", "trained", "--prompts", "prompts.jsonl", "--curve", "alpha.jsonl")
    result = call(*taken, "--json")
    data, text = last_json(result), call(*taken).stdout
    assert "Weights of trained. Its curve ends at 0.300 after 1,800 tokens; the law expects" in text
    assert data["after"]["alpha"]["source"] == "measured" and "text" not in data
    assert 0.0 < data["expected"]["value"] < 1.0
    record = json.loads(Path("runs/a/best/2/training.json").read_text())
    assert (record["taken_from"], record["tokens"]) == ("trained", 1800)
    assert [look["alpha"] for look in record["looks"]] == [0.2, 0.3]
    found = last_json(call("confirm", "runs/a", "--rank", "2", "--count", "2", "--json"))
    assert "perhaps on these prompts" in found["prompts_seen"]
    kept = ("--prompts", "prompts.jsonl")
    found = last_json(call("confirm", "runs/a", "--rank", "2", "--count", "2", *kept, "--json"))
    assert found["prompts_seen"] is None
    call("report", "runs/a")
    run = open_run(Path("runs/a"))
    shown = next(each for each in read_run(run).candidates if each.rank == 2)
    for each in (shown, replace(shown, confirmed=None)):  # `train` would refuse it
        steps = " ".join(command for _, command in headline._next(run, each, pays=False))
        assert "train" not in steps and "--rank 2 --prompts prompts.jsonl" in steps
    # what cannot be
    assert "trained elsewhere (trained)" in refused(*own, "--budget", "1s")
    assert "go together" in refused(*own, "--weights", "trained")
    assert "--budget without" in refused(*taken, "--budget", "1s")
    assert "go together" in refused(*own, "--curve", "alpha.jsonl")
    assert "leave --family out" in refused(*own, "--weights", "trained", "--family", "medusa")
    assert "measures any draft" in refused(*own, "--weights", "other", *kept)
    assert "no weights" in refused(*own, "--weights", "empty", *kept)
    Path("alpha.jsonl").write_text('{"tokens": 3, "alpha": 2}')
    assert "alpha of 0 to 1" in refused(*taken)
    Path("alpha.jsonl").write_text("[]")
    assert "alpha.jsonl is no learning curve" in refused(*taken)


def test_export_loads_in_transformers_and_here(with_run: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from archsearch.models.drafts import load_draft

    result = last_json(call("export", "runs/a", "--output", "out/draft", "--json"))
    folder = with_run / "out" / "draft"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.generation_config.num_assistant_tokens == result["gamma"]
    assert (
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).config.vocab_size
        == 320
    )
    assert AutoTokenizer.from_pretrained(folder)("red shoes")["input_ids"]
    ids = torch.tensor([[5, 6, 7]])
    assert torch.isfinite(model(ids).logits).all() and load_draft(folder)(ids).logits.shape == (
        1,
        3,
        320,
    )
    assert (
        json.loads((folder / "speculative_config.json").read_text())["num_speculative_tokens"]
        == result["gamma"]
    )
    call("export", "runs/a", "--output", "out/draft")  # again over its own


def test_report_after_confirmation(with_run: Path) -> None:
    (with_run / "runs/a/report.html").unlink()
    result = last_json(call("report", "runs/a", "--json"))
    assert Path(result["report"]).is_file()


def test_a_search_says_last_that_the_prompts_were_seen(with_run: Path) -> None:
    text = call(*CONFIRM, "--run", "runs/a").stdout
    assert "Not on unseen prompts: the 12 held-out prompts are too few" in text


def test_schedule_command(with_ranks: Path) -> None:
    text = call("schedule", "runs/a", "--batch-size", "1", "--batch-size", "4").stdout
    assert "Gamma by batch size: 1-" in text
    assert "serve it without a draft" in text and "Next:" not in text, "nothing to confirm"
    openvino = ("schedule", "runs/a", "--engine", "openvino", "--batch-size", "2")
    data = last_json(call(*openvino, "--json"))
    assert [point["batch_size"] for point in data["points"]] == [1, 2] and data[
        "engine"
    ] == "openvino"
    assert "no rank 9" in refused("schedule", "runs/a", "--rank", "9")
    assert "unknown engine" in refused("schedule", "runs/a", "--engine", "warp")
    assert "runs/x" in refused("schedule", "runs/x")


def test_what_comes_after_a_schedule_that_drafts(with_ranks: Path) -> None:
    Path("runs/a").rename("runs/my run")
    session = SearchSession.reopen(Path("runs/my run"))
    for engine, options in (("transformers", "vllm --schedule"), ("openvino", "openvino")):
        found = schedule_rank(session, 1, engine, [1])
        found = replace(found, schedule=replace(found.schedule, ranges=((1, 1, 2),)))
        after = f"Next: archsearch confirm 'runs/my run' --rank 1 --engine {options}"
        assert str(found).splitlines()[-1] == after  # openvino takes one gamma


def test_a_run_that_was_moved_keeps_its_profile_or_is_refused(with_ranks: Path) -> None:
    (profile,) = Path("profiles").glob("*/*")
    run = Path("runs/a/run.yaml")
    info = yaml.safe_load(run.read_text())
    info["profile"]["folder"] = f"/elsewhere/profiles/{profile.parent.name}/{profile.name}"
    run.write_text(yaml.safe_dump(info))
    assert SearchSession.reopen(Path("runs/a")).source.profile["folder"] == str(profile.resolve())
    info["device"]["key"] = "cpu-of-another-machine-2t"
    run.write_text(yaml.safe_dump(info))
    line = refused("schedule", "runs/a")
    assert f"no profile of cpu-of-another-machine-2t/{profile.name}" in line
    assert f"copy the run's to profiles/cpu-of-another-machine-2t/{profile.name}" in line
    header = read_json(profile / "profile.json", "profile")
    header["device"]["key"] = "cpu-of-another-machine-2t"
    moved = Path("profiles/cpu-of-another-machine-2t") / profile.name
    shutil.copytree(profile, moved)
    write_json(moved / "profile.json", header)
    session = SearchSession.reopen(Path("runs/a"))
    assert session.source.device.key == "cpu-of-another-machine-2t"


def test_runs_that_are_none(world: Path) -> None:
    for command in (
        ("train", "runs/x"),
        ("confirm", "runs/x"),
        ("report", "runs/x"),
        ("export", "runs/x", "--output", "o"),
    ):
        assert "runs/x" in refused(*command)
    (world / "runs" / "x").mkdir(parents=True)
    (world / "runs" / "x" / "run.yaml").write_text("a: [")
    for command in (
        ("train", "runs/x"),
        ("confirm", "runs/x"),
        ("report", "runs/x"),
        ("export", "runs/x", "--output", "o"),
    ):
        assert "run.yaml" in refused(*command)


def test_ranks_and_gammas_that_are_none(with_run: Path) -> None:
    assert "no rank 77" in refused("confirm", "runs/a", "--rank", "77")
    refused("confirm", "runs/a", "--gamma", "17")
    refused("confirm", "runs/a", "--engine", "warp")
    assert "train" in refused("confirm", "runs/a", "--rank", "2")


def test_an_output_folder_that_cannot_be(with_run: Path) -> None:
    (with_run / "file").write_text("mine")
    assert "file/sub" in refused("export", "runs/a", "--output", "file/sub")
    assert "is a file" in refused("export", "runs/a", "--output", "file")
    assert "file/run" in refused(*SEARCH, "--run", "file/run")
    assert "file/p" in refused(
        "profile", "--gpu", "cpu", "--target", "target", "--budget", "1s", "--output", "file/p"
    )
    (with_run / "full").mkdir()
    (with_run / "full" / "precious.txt").write_text("mine")
    assert "not empty" in refused("export", "runs/a", "--output", "full")
    assert (
        files_in(with_run / "full") == {"precious.txt"}
        and (with_run / "file").read_text() == "mine"
    )


def test_a_full_disk(with_run: Path, full_disk: list[str]) -> None:
    before = files_in(with_run)
    assert "No space left" in refused(*SEARCH, "--run", "runs/new")
    assert "No space left" in refused("export", "runs/a", "--output", "out")
    assert "No space left" in refused("report", "runs/a")
    assert "No space left" in refused("profile", "--gpu", "cpu", "--budget", "1s", "--output", "p")
    assert full_disk and files_in(with_run) == before
    assert not (with_run / "out").exists()
