"""The vLLM engine: what it refuses before a process starts, and (slow, in vLLM's own environment)
what it does."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from archsearch.architecture.architecture import Architecture
from archsearch.engines.engine import (
    EnginePrompt,
    EngineSettings,
    EngineStep,
    GenerationResult,
    Sampling,
)
from archsearch.engines.environments.environment import find_python
from archsearch.engines.vllm.engine import VllmEngine
from archsearch.errors import ArchsearchError, MissingDataError, RunFailed
from archsearch.models.drafts import build_draft, save_draft

GAMMA = 3
PROMPT = (5, 6, 7, 8)


def _folder(path: Path, seed: int, **changes: Any) -> Path:
    """A tiny LLaMA with pronounced logits, so that greedy choices have no ties."""
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    shape |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 64, **changes}
    model = build_draft(Architecture(**shape), seed=seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4)
    path.mkdir(parents=True)
    save_draft(model, path)
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Target and draft."""
    base = tmp_path_factory.mktemp("models")
    return _folder(base / "target", 0), _folder(base / "draft", 1, num_hidden_layers=1)


def _settings(**changes: object) -> EngineSettings:
    return EngineSettings(
        **{"dtype": "float32", "concurrency": 2, "max_len": 256, "threads": 1, **changes}
    )


# ---------------------------------------------------------------------------------------------
# without a vLLM


def test_the_hub_is_off_limits_only_for_folders(tmp_path: Path) -> None:
    env = VllmEngine(_settings(threads=3)).child_environment([str(tmp_path)])
    assert env["OMP_NUM_THREADS"] == "3" and env["HF_HUB_OFFLINE"] == "1"
    env = VllmEngine(_settings(threads=None)).child_environment([str(tmp_path), "org/model"])
    assert "OMP_NUM_THREADS" not in env and "HF_HUB_OFFLINE" not in env


def test_bad_arguments_are_refused_before_a_process_starts(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    target, draft = folders
    engine = VllmEngine(
        _settings(python=tmp_path / "absent")
    )  # a process would fail with another message
    other = _folder(tmp_path / "other", 2, vocab_size=96)
    with pytest.raises(
        ArchsearchError, match="the draft's vocabulary has 96 tokens, the target's 64"
    ):
        engine.start(target, other, GAMMA)
    with pytest.raises(ArchsearchError, match="needs a model folder, not a Linear"):
        engine.start(torch.nn.Linear(1, 1), None, 0)
    with pytest.raises(ArchsearchError, match="no config.json in"):
        engine.start(tmp_path / "nowhere", None, 0)
    with pytest.raises(ArchsearchError, match="gamma must be at least 1"):
        engine.start(target, draft, 0)
    with pytest.raises(ArchsearchError, match="at most 128 tokens a round, got gamma 129"):
        engine.start(target, draft, 129)
    with pytest.raises(ArchsearchError, match="3 rates between 0 and 1"):
        engine.start(target, draft, GAMMA, synthetic=(0.5, 0.6, 0.1))
    with pytest.raises(ArchsearchError, match="the schedule's largest is 2"):
        engine.start(target, draft, GAMMA, schedule=((1, 4, 2),))
    with pytest.raises(MissingDataError, match="cannot run .*absent"):
        engine.start(target, draft, GAMMA)


def test_an_interpreter_without_vllm_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"  # this one, without its site packages
    python.write_text(f'#!/bin/sh\nexec {shutil.which("python3") or "python3"} -I -S "$@"\n')
    python.chmod(0o755)
    script = tmp_path / "vllm_worker.py"
    from archsearch.engines.vllm import engine as vllm

    script.write_text(
        f"import sys; sys.path.insert(0, {str(vllm.WORKER.parent)!r})\nimport vllm_worker;"
        " vllm_worker.serve(vllm_worker.Worker(), vllm_worker.claim_stdout())\n"
    )
    monkeypatch.setattr(VllmEngine, "worker", script)
    with pytest.raises(
        ArchsearchError, match="there is no vLLM for .*archsearch engine install vllm"
    ):
        _ = VllmEngine(_settings(python=python)).version


def test_stopping_and_steps_need_no_start() -> None:
    engine = VllmEngine(_settings())
    engine.stop()
    assert engine.steps() == () and engine.generate([], Sampling()) == []
    with pytest.raises(RuntimeError, match="start the engine first"):
        engine.token_logits([1], [1])


# ------------------------------------------------------------------------------------------- in
# vLLM's environment


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return find_python("vllm")
    except ArchsearchError as error:
        pytest.skip(f"{error}")


@pytest.fixture
def engine(python: Path, request: pytest.FixtureRequest) -> Iterator[VllmEngine]:
    made = VllmEngine(_settings(python=python, **getattr(request, "param", {})))
    yield made
    made.stop()


def _prompts(count: int) -> list[EnginePrompt]:
    return [EnginePrompt(f"p{index}", (*PROMPT, *range(9, 9 + index))) for index in range(count)]


def _consistent(results: list[GenerationResult], steps: tuple[EngineStep, ...], limit: int) -> None:
    """Every token was handed over in a step, and rounds add up (the worker compares them with
    vLLM's own counters)."""
    assert sum(step.written for step in steps) == sum(len(result.token_ids) for result in results)
    for result in results:
        assert len(result.token_ids) == limit and len(result.gaps_s) >= 1
        assert 0 < result.first_s < result.seconds and result.decode_seconds == pytest.approx(
            sum(result.gaps_s)
        )
        assert (
            result.rounds == len(result.round_lengths)
            and sum(result.round_lengths) == result.accepted + result.rounds
        )


@pytest.mark.slow
def test_a_draft_with_windows_in_some_layers_runs(
    engine: VllmEngine, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    windows = {"num_hidden_layers": 2, "window_pattern": "SL", "sliding_window": 16}
    draft = _folder(tmp_path / "windows", 1, **windows)
    sampling = Sampling(40, ignore_end=True)
    engine.start(folders[0], None, 0)
    plain = engine.generate(_prompts(2), sampling)
    engine.start(folders[0], draft, GAMMA)
    spoken = engine.generate(_prompts(2), sampling)
    assert [result.token_ids for result in spoken] == [result.token_ids for result in plain]


@pytest.mark.slow
def test_greedy_text_with_a_draft_is_the_targets_own(
    engine: VllmEngine, folders: tuple[Path, Path]
) -> None:
    target, draft = folders
    prompts = [
        *_prompts(3),
        EnginePrompt("one", (9,)),
    ]  # three run at most together; a prompt of one token among them
    sampling = Sampling(40, ignore_end=True)
    engine.start(target, None, 0)
    plain = engine.generate(prompts, sampling)
    steps = engine.steps()
    _consistent(plain, steps, 40)
    assert (
        all(step.gamma == 0 and step.draft_s == () and step.target_s for step in steps)
        and max(s.batch for s in steps) == 2
    )
    model = _hugging_face(target)
    for prompt, result in zip(prompts, plain, strict=True):
        assert list(result.token_ids) == _greedy(model, prompt.token_ids, 40)
        assert result.rounds == 0 and result.accepted_by_position == ()

    engine.start(target, draft, GAMMA)
    spoken = engine.generate(prompts, sampling)
    assert [result.token_ids for result in spoken] == [result.token_ids for result in plain]
    _consistent(spoken, engine.steps(), 40)
    for step in engine.steps():
        assert step.target_s is not None and 0 < step.target_s + sum(step.draft_s) < step.seconds
        assert len(step.draft_s) == len(step.draft_tokens) == GAMMA
        assert step.draft_tokens == (
            step.target_tokens + step.batch,
            *[step.batch] * (GAMMA - 1),
        )  # the first sees it all again
        if not step.prefill:
            assert step.gamma == GAMMA and step.target_tokens == step.batch * (GAMMA + 1)
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT])).logits[0, -1, [3, 1, 3]]
    assert engine.token_logits(PROMPT, [3, 1, 3]) == pytest.approx(logits.tolist(), abs=1e-4)
    with pytest.raises(
        ArchsearchError, match=r"tokens \[64\] are not in the target's vocabulary of 64"
    ):
        engine.token_logits(PROMPT, [64])
    with pytest.raises(
        ArchsearchError, match="prompt 'p0' of 4 tokens and 300 new ones exceed the 256 tokens"
    ):
        engine.generate(prompts, Sampling(300))
    assert (
        engine.generate(prompts[:1], sampling)[0].token_ids == plain[0].token_ids
    )  # a refusal leaves it running


@pytest.mark.slow
def test_a_draft_that_is_the_target_is_accepted_whole_and_the_end_is_kept(
    engine: VllmEngine, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    target, _ = folders
    text = _greedy(_hugging_face(target), PROMPT, 40)
    end = next(
        token for index, token in enumerate(text) if index > 10 and text.index(token) == index
    )
    ending = tmp_path / "ending"
    shutil.copytree(target, ending)
    (ending / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    engine.start(ending, target, GAMMA)
    [whole] = engine.generate(_prompts(1), Sampling(1 + 5 * (GAMMA + 1), ignore_end=True))
    assert whole.round_lengths == (GAMMA + 1,) * 5 and whole.accepted_by_position == (5,) * GAMMA
    [cut] = engine.generate(_prompts(1), Sampling(40))
    assert list(cut.token_ids) == text[: text.index(end) + 1]
    assert cut.rounds == (text.index(end) - 1) // (GAMMA + 1)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [{"concurrency": 8}], indirect=True)
def test_synthetic_acceptance_is_what_was_asked(
    engine: VllmEngine, folders: tuple[Path, Path]
) -> None:
    target, draft = folders
    rates = (0.8, 0.5, 0.2)
    engine.start(target, draft, GAMMA, synthetic=rates)
    for temperature in (0.0, 0.7):
        results = engine.generate(_prompts(24), Sampling(200, temperature, seed=4, ignore_end=True))
        rounds = sum(result.rounds for result in results)
        assert rounds > 1500
        for position, rate in enumerate(rates):
            share = sum(result.accepted_by_position[position] for result in results) / rounds
            assert abs(share - rate) < 4 * math.sqrt(rate * (1 - rate) / rounds)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [{"concurrency": 4}], indirect=True)
def test_a_schedule_is_obeyed(engine: VllmEngine, folders: tuple[Path, Path]) -> None:
    target, draft = folders
    engine.start(target, draft, GAMMA, schedule=((1, 1, GAMMA), (2, 3, 1), (4, 4, 0)))
    for count, gamma in ((1, GAMMA), (3, 1), (4, 0)):
        results = engine.generate(_prompts(count), Sampling(24, ignore_end=True))
        steady = [step for step in engine.steps() if step.batch == count and not step.prefill]
        assert len(steady) >= 5 and {step.gamma for step in steady} == {gamma}
        assert {step.target_tokens for step in steady} == {count * (gamma + 1)}
        if gamma == 0:
            assert sum(result.rounds for result in results) == 0 and {
                len(step.draft_s) for step in steady
            } == {1}
        assert all(len(result.accepted_by_position) == GAMMA for result in results)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [{"concurrency": 64}], indirect=True)
def test_sampled_text_with_a_draft_has_the_targets_distribution(
    engine: VllmEngine, folders: tuple[Path, Path]
) -> None:
    """Tokens 2 and 3 come out of rounds: their distribution against the target's, at temperature
    0.7."""
    target, draft = folders
    count, temperature = 3000, 0.7
    engine.start(target, draft, GAMMA)
    prompts = [EnginePrompt(f"p{index}", PROMPT) for index in range(count)]
    results = engine.generate(prompts, Sampling(GAMMA + 2, temperature, seed=11, ignore_end=True))
    accepted, rounds = (
        sum(result.accepted for result in results),
        sum(result.rounds for result in results),
    )
    assert (
        rounds == count and 0.1 < accepted / (rounds * GAMMA) < 0.9
    )  # accepted, replaced and bonus tokens all occur
    model = _hugging_face(target)
    first = _probabilities(model, torch.tensor([PROMPT]), temperature)[0]  # [vocabulary]
    prefixes = torch.cat([torch.tensor([PROMPT]).expand(64, -1), torch.arange(64)[:, None]], 1)
    second_given = _probabilities(model, prefixes, temperature)  # [first, second]
    pairs = torch.cat([prefixes.repeat_interleave(64, 0), torch.arange(64).repeat(64)[:, None]], 1)
    third_given = _probabilities(model, pairs, temperature).view(64, 64, 64)
    joint = first[:, None] * second_given
    for index, expected in enumerate(
        (first, joint.sum(0), (joint[..., None] * third_given).sum((0, 1)))
    ):
        observed = torch.bincount(
            torch.tensor([result.token_ids[index] for result in results]), minlength=64
        )
        assert _chi_square_deviations(observed, expected * count) < 4, f"token {index + 1}"
    moments = torch.bincount(
        torch.tensor([r.token_ids[0] * 64 + r.token_ids[1] for r in results]), minlength=64 * 64
    )
    assert _chi_square_deviations(moments, joint.flatten() * count) < 4, "tokens 1 and 2 together"


@pytest.mark.slow
@pytest.mark.parametrize("engine", [{"dummy_weights": True, "dtype": "bfloat16"}], indirect=True)
def test_dummy_weights_need_configs_only(
    engine: VllmEngine, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    shapes = []
    for folder in folders:
        shapes.append(tmp_path / folder.name)
        shapes[-1].mkdir()
        shutil.copy(folder / "config.json", shapes[-1])
    engine.start(shapes[0], shapes[1], GAMMA, synthetic=(1.0, 1.0, 0.0))
    [result] = engine.generate(_prompts(1), Sampling(31, ignore_end=True))
    assert result.round_lengths == (3,) * 9 and result.accepted_by_position == (9, 9, 0)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [{"mode": "graph"}, {"tensor_parallel": 2}], indirect=True)
def test_other_ways_to_run_give_the_same_text(
    engine: VllmEngine, folders: tuple[Path, Path]
) -> None:
    target, draft = folders
    engine.start(target, draft, GAMMA)
    results = engine.generate(_prompts(2), Sampling(24, ignore_end=True))
    model = _hugging_face(target)
    assert [list(result.token_ids) for result in results] == [
        _greedy(model, prompt.token_ids, 24) for prompt in _prompts(2)
    ]
    _consistent(results, engine.steps(), 24)
    in_process = engine.settings.tensor_parallel == 1
    assert all((step.target_s is not None) == in_process for step in engine.steps())
    if not in_process:  # worker processes keep the kernels of the build, which sample wrongly
        with pytest.raises(ArchsearchError, match="uninitialised memory"):
            engine.generate(_prompts(1), Sampling(4, 0.7))


@pytest.mark.slow
def test_what_vllm_cannot_run_ends_in_one_line_and_no_process(
    python: Path, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    target, draft = folders
    strange = tmp_path / "strange"
    shutil.copytree(target, strange)
    config = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(
        json.dumps({**config, "architectures": ["NoSuchForCausalLM"], "model_type": "nosuch"})
    )
    engine = VllmEngine(_settings(python=python))
    with pytest.raises(ArchsearchError, match="nosuch|NoSuch") as told:
        engine.start(strange, None, 0)
    assert "\n" not in str(told.value) and engine._child is None
    _longer(target, tmp_path / "long", 10**7)
    engine = VllmEngine(
        _settings(python=python, concurrency=4096, max_len=10**7 - 10)
    )  # 40 TB of keys and values
    with pytest.raises(
        RunFailed, match="^vllm is out of memory: .*; lower --concurrency or --max-len"
    ) as told:
        engine.start(tmp_path / "long", None, 0)
    assert "\n" not in str(told.value) and engine._child is None


def _longer(source: Path, folder: Path, positions: int) -> None:
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "max_position_embeddings": positions})
    )


def _hugging_face(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _greedy(model: torch.nn.Module, prompt: tuple[int, ...], count: int) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def _probabilities(
    model: torch.nn.Module, prefixes: torch.Tensor, temperature: float
) -> torch.Tensor:
    """[prefixes, vocabulary]"""
    with torch.inference_mode():
        return (model(prefixes).logits[:, -1].double() / temperature).softmax(-1)


def _chi_square_deviations(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """How many standard deviations chi-square lies above its mean; tokens expected fewer than 5
    times are taken together."""
    rare = expected < 5
    seen = torch.cat([observed[~rare].double(), observed[rare].sum()[None].double()])
    hoped = torch.cat([expected[~rare], expected[rare].sum()[None]])
    if hoped[-1] < 5:
        seen, hoped = seen[:-1], hoped[:-1]
    freedom = len(seen) - 1
    return float((((seen - hoped) ** 2 / hoped).sum() - freedom) / math.sqrt(2 * freedom))
