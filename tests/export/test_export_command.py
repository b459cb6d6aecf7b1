"""`archsearch export` on a run folder written by hand: what it refuses, and what ends up in the
folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner, Result
from transformers import GenerationMixin, TemperatureLogitsWarper

from archsearch.architecture.hf_config import to_hf_config
from archsearch.cli import main
from archsearch.drafters.forms import vllm_config
from archsearch.estimate import Estimate
from archsearch.models.drafts import build_draft, save_draft
from archsearch.runs.run import Run, create_run
from archsearch.search.objective import Score
from tests.doubles.world import TINY, make_model_folder

SHAPE = TINY.replace(num_hidden_layers=1, draft_vocab_size=None)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Rank 1 trained, rank 2 a shape."""
    target = make_model_folder(tmp_path / "target")
    opened = create_run(
        tmp_path / "runs",
        {"target": str(target), "gpu": "cpu", "tensor_parallel": None, "seed": 0},
        space={},
        device={"key": "cpu-x", "kind": "cpu", "name": "some CPU"},
        profile={"hash": "abc", "dtype": "float32"},
        path=tmp_path / "runs" / "a",
    )
    one = Estimate(1.5, 0.1, "modelled")
    for rank in (1, 2):
        shape = SHAPE.replace(intermediate_size=SHAPE.intermediate_size + 32 * rank)
        score = Score(
            rank,
            shape,
            100,
            3,
            Estimate(0.5, 0.1, "prior"),
            one,
            one,
            one,
            one,
            one,
            one,
            768,
            None,
        )
        folder = opened.write_best(score, to_hf_config(shape), vllm_config("independent", "x", 3))
        if rank == 1:
            save_draft(build_draft(shape, torch.float32), folder, gamma=3)
    return opened


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["export", "runs/a", *arguments])


def good(*arguments: str) -> dict[str, Any]:
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(*arguments: str) -> str:
    result = call(*arguments)
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
    return result.output


def test_by_default_everything_that_is_text(run: Run) -> None:
    result = good("--output", "out")
    assert (
        result["engines"] == ["transformers", "vllm", "sglang", "tensorrt-llm"]
        and result["gamma"] == 3
        and result["trained"]
    )
    names = {path.name for path in Path("out").iterdir()}
    assert {
        "model.safetensors",
        "tokenizer.json",
        "speculative_config.json",
        "tensorrt-llm.yaml",
        "README.md",
    } <= names
    assert "draft.gguf" not in names
    text = call("--output", "out").output
    assert "exported to" in text and "README.md" in text


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_all_that_is_written_samples_at_the_temperature_of_the_run(
    run: Run, temperature: float, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {**run.info, "arguments": {**run.arguments, "temperature": temperature}}
    (run.path / "run.yaml").write_text(yaml.safe_dump(asked))
    good("--output", "out")
    config = json.loads(Path("out/speculative_config.json").read_text())
    assert ("draft_sample_method" in config) == (temperature > 0)
    card = Path("out/README.md").read_text()
    assert ("do_sample=False" in card) != (f"TemperatureLogitsWarper({temperature})" in card)
    asked_for: list[Any] = []
    sample = GenerationMixin._assisted_decoding

    def seen(self: Any, *given: Any, **more: Any) -> Any:
        asked_for.append((more["generation_config"], [type(e) for e in more["logits_processor"]]))
        return sample(self, *given, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GenerationMixin, "_assisted_decoding", seen)
        exec(card.split("```python\n")[1].split("```")[0], {})
    ((settings, processors),) = asked_for
    assert capsys.readouterr().out and settings.do_sample == (temperature > 0)
    if temperature:  # once, in the target and so in the draft
        assert settings.temperature == 1.0 and not settings.top_k and settings.top_p == 1.0
        assert processors == [TemperatureLogitsWarper]


def test_schedule_of_the_rank_of_a_file_and_of_the_user(run: Run) -> None:
    schedule = {
        "ranges": [[1, 2, 5], [3, 16, 1]],
        "points": [{"batch_size": 1, "gamma": 5, "speedup": 1.4}],
    }
    (run.best_dir(1) / "schedule.json").write_text(json.dumps(schedule))
    result = good("--output", "out")
    assert result["gamma"] == 5 and result["schedule"] == schedule["ranges"]
    assert json.loads(Path("out/generation_config.json").read_text())["num_assistant_tokens"] == 5
    Path("mine.json").write_text(json.dumps({"ranges": [[1, 8, 2], [9, 16, 0]]}))
    result = good("--output", "out", "--schedule", "mine.json", "--gamma", "4")
    assert result["gamma"] == 4 and result["schedule"] == [[1, 8, 2], [9, 16, 0]]
    config = json.loads(Path("out/speculative_config.json").read_text())
    assert (
        config["num_speculative_tokens"] == 2
        and config["num_speculative_tokens_per_batch_size"] == result["schedule"]
    )
    Path("mine.json").write_text(json.dumps({"ranges": [[2, 8, 2]]}))
    assert "start at batch size 1" in refused("--output", "out", "--schedule", "mine.json")
    assert "schedule not found: no.json" in refused("--output", "out", "--schedule", "no.json")


def test_a_shape_is_exported_only_when_asked_for(run: Run) -> None:
    text = refused("--rank", "2", "--output", "out")
    assert (
        "archsearch train runs/a --rank 2" in text
        and "--allow-untrained" in text
        and not Path("out").exists()
    )
    result = good("--rank", "2", "--output", "out", "--allow-untrained")
    assert not result["trained"] and "without weights" in result["note"]
    assert "a shape, not a trained draft" in Path("out/README.md").read_text()
    assert "llama.cpp needs weights" in refused(
        "--rank", "2", "--output", "new", "--allow-untrained", "--for", "llama.cpp"
    )
    assert not Path("new").exists()


def test_engines(run: Run) -> None:
    text = refused("--output", "out", "--for", "ollama")
    assert all(
        name in text
        for name in ("transformers", "vllm", "sglang", "tensorrt-llm", "llama.cpp", "speculators")
    )
    assert (
        "--for vllm" in refused("--output", "out", "--for", "speculators")
        and not Path("out").exists()
    )
    result = good("--output", "out", "--for", "llama.cpp", "--for", "transformers")
    assert result["engines"] == ["transformers", "llama.cpp"] and Path("out/draft.gguf").is_file()
    assert not Path("out/speculative_config.json").exists()
    assert "add --for llama.cpp" in refused("--output", "other", "--draft-dtype", "q8_0")


def test_a_folder_in_use_is_left_alone(run: Run) -> None:
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("mine")
    assert "not empty" in refused("--output", "mine") and [
        path.name for path in Path("mine").iterdir()
    ] == ["thesis.txt"]
