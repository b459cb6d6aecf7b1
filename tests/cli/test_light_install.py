"""Without torch and transformers: what answers, answers; what needs them says so in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import archsearch

REFUSE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in ("torch", "transformers", "accelerate", "gguf", "safetensors", "tokenizers",
                   "huggingface_hub"):
            raise ModuleNotFoundError(f"No module named {top!r}", name=name)

sys.meta_path.insert(0, Missing())
import json
from archsearch.cli import main
from click.testing import CliRunner
results = (CliRunner().invoke(main, command) for command in json.loads(sys.argv[1]))
print(json.dumps([(result.exit_code, result.stderr) for result in results]))
"""


def light(commands: Sequence[Sequence[str]], where: Path) -> list[tuple[int, str]]:
    """Exit status and standard error of each command, one after the other in one process."""
    root = str(Path(archsearch.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", REFUSE, json.dumps(commands)],
        cwd=where,
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return [(status, said) for status, said in json.loads(done.stdout)]


@pytest.mark.slow(own=True)
def test_answers_need_no_torch(tmp_path: Path) -> None:
    question = ("--target", "llama-3.1-8b", "--gpu", "h100")
    commands = [
        ("estimate", *question, "--draft", "eagle3", "--draft", "llama-3.2-1b"),
        ("search", *question, "--trials", "4", "--family", "independent"),
        ("report",),
        ("schedule",),
        ("list", "runs"),
        ("doctor",),
    ]
    for command, (status, said) in zip(commands, light(commands, tmp_path), strict=True):
        assert status == 0, (command, said)


def test_what_runs_models_names_its_extra(tmp_path: Path) -> None:
    commands = [
        ("profile", "--gpu", "cpu", "--target", "smollm2-135m"),
        ("estimate", "--target", "some-org/some-model", "--draft", "eagle3", "--gpu", "h100"),
        ("search", "--target", "smollm2-135m", "--gpu", "h100", "--alpha", "distilled"),
    ]
    for command, (status, said) in zip(commands, light(commands, tmp_path), strict=True):
        assert status == 2 and said.count("\n") == 1, command
        assert said.startswith("Error: this needs t"), command
        assert said.endswith('run: pip install "archsearch[torch]"\n'), command
    assert not list(tmp_path.iterdir()), "nothing half-written"
