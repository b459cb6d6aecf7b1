"""Every command of README and docs that needs no more than a CPU is run as it stands, with small
models and budgets."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import click
import pytest
import yaml
from click.shell_completion import get_completion_class

from archsearch.cli import main
from tests.cli.commands import invoke, single_threaded
from tests.doubles.once import made_once
from tests.doubles.world import TINY, make_model_folder, make_prompts, make_world
from tests.test_docs_commands import PAGES, ROOT, Line, lines_of

PREPARED = {"scale.md": ("a", "b"), "families.md": ("demo",)}  # runs that a page takes for granted
BUDGETS = {"--time-budget": "4s", "--budget": "1s", "--check": "1", "--workers": "1"}
ON_CPU = {
    "search": "--space tiny.yaml --context 64 --trials 8",
    "profile": "--space tiny.yaml --dtype float32 --no-engine --budget 2s",
    "acceptance": "--answer-tokens 16 --max-prompts 8",
}
ON_GPU = {"search": "--space small.yaml --trials 8"}
WHOLE = ("recipe.md",)  # its ranks are those of the search as a reader runs it
SMALL = {
    "num_hidden_layers": [1, 2, 3],
    "hidden_size": [2048],
    "ffn_ratio": [2, 3],
    "num_key_value_heads": [8],
}
SMALL |= {"kv_group_size": [4], "head_dim": [64], "draft_vocab_size": [32768, "target"]}
HEAD = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
}


def make_home(folder: Path) -> None:
    """What the pages call one's own: a target, a draft, prompts, a mix of work, a trace, a head;
    all of them tiny."""
    make_world(folder)
    (folder / "target").rename(folder / "my-model")
    make_model_folder(folder / "a-draft", TINY.replace(num_hidden_layers=1), seed=1)
    for name in ("my.jsonl", "my-prompts.jsonl"):
        make_prompts(folder / name, 24)
    (folder / "small.yaml").write_text(
        yaml.safe_dump({"description": "a few", "dimensions": SMALL})
    )
    examples = re.findall(
        r"```yaml\n(.*?)```", (ROOT / "docs" / "serving.md").read_text(encoding="utf-8"), re.DOTALL
    )
    (folder / "mix.yaml").write_text(next(text for text in examples if "parts:" in text))
    rows = [
        {"timestamp": 400 * number, "input_length": 300, "output_length": 60}
        for number in range(40)
    ]
    (folder / "mooncake.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my-head").mkdir()
    (folder / "my-head" / "config.json").write_text(json.dumps(HEAD))


def run(words: list[str]) -> tuple[int, str]:
    """(exit status, what went wrong) of a command, in this process, or by the program that the
    environment's ARCHSEARCH_PROGRAM names: the one of an installed wheel."""
    if program := os.environ.get("ARCHSEARCH_PROGRAM"):
        done = subprocess.run([program, *words], capture_output=True, text=True, check=False)
        return done.returncode, done.stderr[-300:]
    result = invoke(*words)
    return result.exit_code, result.stderr[-300:] or repr(result.exception)


def words_of(line: Line, before: list[str]) -> list[str]:
    """The words of a command as it is run here: small budgets, spaces and targets.

    `before`: those of the command above it, which stand for a `...` of their own.
    """
    text = line.text[line.text.index("archsearch ") :].replace("smollm2-135m", "./my-model")
    words = shlex.split(text, comments=True)[1:]
    if "..." in words:
        kept = before[: before.index("--requests-per-second")]
        words = [word for part in words for word in (kept[1:] if part == "..." else [part])]
    for option, value in BUDGETS.items():
        if option in words:
            words[words.index(option) + 1] = value
    mine = "./my-model" in words
    on_gpu = ON_GPU if "--target" in words and line.page not in WHOLE else {}
    words += (ON_CPU if mine else on_gpu).get(words[0], "").split()
    if words[0] == "search" and "--prompts" in words:
        words += ["--answer-tokens", "32"]
    if "--time-budget" in words:  # too little to climb: what is said to be trained and confirmed is
        words += ["--finalists", "1", "--confirm", "1", "--anyway"]
    if words[0] == "confirm":
        words += ["--count", "2"]
    return words


def prepare(page: str) -> None:
    """The runs that a page takes for granted."""
    for name in PREPARED.get(page, ()):
        own = ["--prompts", "my.jsonl", "--answer-tokens", "32", "--run", f"runs/{name}"]
        run(["search", "--target", "./my-model", "--gpu", "cpu", *ON_CPU["search"].split(), *own])


def commands() -> dict[Path, list[list[str]]]:
    """The words of every command by its page; of those that leave nothing behind each once."""
    found: dict[Path, list[list[str]]] = {}
    words: list[str] = []
    for page in PAGES:
        for line in lines_of(page):
            if line.text.startswith("archsearch ") and not line.needs:
                words = words_of(line, words)
                before = (known for page in found.values() for known in page)
                if words[0] not in ("estimate", "doctor", "traffic") or words not in before:
                    found.setdefault(page, []).append(words)
    return found


COMMANDS = commands()


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "home", make_home)


def test_most_pages_have_commands_that_a_cpu_runs() -> None:
    assert sum(map(len, COMMANDS.values())) > 35


@pytest.mark.slow
@pytest.mark.parametrize("page", COMMANDS, ids=lambda page: page.name)
def test_commands_that_need_a_cpu_alone_run(
    page: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(home, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(click, "launch", lambda address: 0)
    failed = []
    with single_threaded():
        prepare(page.name)
        for words in COMMANDS[page]:
            if words[0] == "export":
                shutil.rmtree("my-draft", ignore_errors=True)
                if "my-head" in words:
                    shutil.rmtree("my-head", ignore_errors=True)
            code, said = run(words)
            if code and not (words[0] == "doctor" and code == 1):  # 1: something is to be mended
                failed.append(f"{shlex.join(words)}\n    {said}")
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shells_of_the_install_page_complete(shell: str) -> None:
    assert f"_ARCHSEARCH_COMPLETE={shell}_source archsearch" in (
        ROOT / "docs" / "install.md"
    ).read_text(encoding="utf-8")
    kind = get_completion_class(shell)
    assert kind is not None
    completion = kind(main, {}, "archsearch", "_ARCHSEARCH_COMPLETE")
    assert f"%(complete_var)s={shell}_complete" in completion.source_template
    assert "search" in {item.value for item in completion.get_completions([], "sea")}
    assert "--workers" in {item.value for item in completion.get_completions(["search"], "--work")}
