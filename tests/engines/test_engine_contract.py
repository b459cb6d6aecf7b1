"""What every engine must do: the same answers as the target alone, counts that add up, gamma exactly as asked. A new engine is
one more line in ENGINES."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from archsearch.architecture.architecture import Architecture
from archsearch.engines.engine import Engine, EnginePrompt, Sampling
from archsearch.engines.transformers import TransformersEngine
from archsearch.errors import ArchsearchError
from archsearch.models import build_draft

ENGINES: dict[str, Callable[[], Engine]] = {"transformers": lambda: TransformersEngine(dtype=torch.float32)}
TARGET = Architecture(32, 64, 2, 4, 2, 8, 50)
DRAFT = TARGET.replace(num_hidden_layers=1)
PROMPTS = [EnginePrompt(f"p{i}", tuple((11 * i + j) % 49 + 1 for j in range(3 + i))) for i in range(3)]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    return ENGINES[request.param]()


def model(arch: Architecture, seed: int = 0) -> torch.nn.Module:
    built = build_draft(arch, seed=seed)
    built.generation_config.eos_token_id = 1000
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0)
    return built


def test_it_is_an_engine_and_says_which(engine: Engine) -> None:
    assert isinstance(engine, Engine) and engine.name in ENGINES and engine.version


@pytest.mark.parametrize("gamma", [1, 4])
@pytest.mark.parametrize("trimmed", [None, 20])
def test_greedy_answers_are_the_target_s_and_counts_add_up(engine: Engine, gamma: int, trimmed: int | None) -> None:
    target, sampling = model(TARGET), Sampling(max_new_tokens=20)
    engine.start(target, None, 0)
    alone = engine.generate(PROMPTS, sampling)
    engine.stop()
    engine.start(target, model(DRAFT.replace(draft_vocab_size=trimmed)), gamma)
    helped = engine.generate(PROMPTS, sampling)
    engine.stop()
    assert [result.prompt_id for result in helped] == [prompt.prompt_id for prompt in PROMPTS]
    for base, result in zip(alone, helped, strict=True):
        assert base.token_ids == result.token_ids and len(result.token_ids) == 20
        assert (base.rounds, base.drafted, base.accepted) == (0, 0, 0)
        assert result.rounds == len(result.round_lengths) > 0 and result.drafted == gamma * result.rounds
        assert len(result.accepted_by_position) == gamma
        assert result.accepted + result.rounds == sum(result.round_lengths)
        assert 0 < result.decode_seconds <= result.seconds and 0 < result.first_s <= result.seconds


def test_the_target_as_draft_is_accepted_whole(engine: Engine) -> None:
    target = model(TARGET)
    engine.start(target, target, 3)
    for result in engine.generate(PROMPTS, Sampling(max_new_tokens=20)):
        assert set(result.round_lengths) == {4} and result.rejected == 0
    engine.stop()


def test_sampling_repeats_with_its_seed(engine: Engine) -> None:
    engine.start(model(TARGET), model(DRAFT), 2)
    first, again, other = (engine.generate(PROMPTS, Sampling(16, temperature=1.0, seed=seed)) for seed in (1, 1, 2))
    engine.stop()
    assert [r.token_ids for r in first] == [r.token_ids for r in again] != [r.token_ids for r in other]


def test_token_logits_are_the_target_s(engine: Engine) -> None:
    target = model(TARGET)
    engine.start(target, None, 0)
    ids = [3, 1, 4, 1, 5]
    with torch.no_grad():
        expected = target(torch.tensor([ids])).logits[0, -1]
    assert engine.token_logits(ids, [7, 2]) == pytest.approx([float(expected[7]), float(expected[2])], abs=1e-4)
    engine.stop()


def test_steps_account_for_the_time(engine: Engine) -> None:
    engine.start(model(TARGET), model(DRAFT), 3)
    (result,) = engine.generate(PROMPTS[:1], Sampling(max_new_tokens=20, ignore_end=True))
    steps = engine.steps()
    engine.stop()
    assert sum(step.written for step in steps) == len(result.token_ids) == 20
    assert steps[0].prefill and not any(step.prefill for step in steps[1:])
    whole = [step for step in steps if not step.prefill and step.target_tokens == 4]
    assert whole
    for step in whole:
        assert step.batch == 1 and step.gamma == 3 and len(step.draft_s) == len(step.draft_tokens) == 3
        assert step.target_s and step.other_s is not None and step.other_s > 0
    assert steps[1].context == len(PROMPTS[0].token_ids) + steps[0].written


@pytest.mark.parametrize("rates", [(0.8, 0.4, 0.3), (1.0, 1.0, 1.0), (0.0, 0.0, 0.0)])
def test_synthetic_acceptance_is_what_was_asked(engine: Engine, rates: tuple[float, ...]) -> None:
    engine.start(model(TARGET), model(DRAFT), 3, synthetic=rates)
    results = engine.generate(PROMPTS, Sampling(max_new_tokens=250, ignore_end=True))
    engine.stop()
    rounds = sum(result.rounds for result in results)
    for position, rate in enumerate(rates):
        seen = sum(result.accepted_by_position[position] for result in results) / rounds
        assert abs(seen - rate) <= 4.5 * (rate * (1 - rate) / rounds) ** 0.5
    assert all(len(result.token_ids) == 250 for result in results)


def test_what_contradicts_itself_is_refused(engine: Engine) -> None:
    target, draft = model(TARGET), model(DRAFT)
    with pytest.raises(ArchsearchError, match="2 rates"):
        engine.start(target, draft, 2, synthetic=(0.5, 0.6))
    with pytest.raises(ArchsearchError, match="need a draft"):
        engine.start(target, None, 0, synthetic=(0.5,))
    with pytest.raises(ArchsearchError, match="schedule"):
        engine.start(target, draft, 2, schedule=((2, 4, 2),))


def test_it_can_be_started_again_and_refuses_what_cannot_be(engine: Engine) -> None:
    target = model(TARGET)
    for _ in range(2):
        engine.start(target, None, 0)
        assert len(engine.generate(PROMPTS[:1], Sampling(max_new_tokens=4))[0].token_ids) == 4
        engine.stop()
    with pytest.raises(ArchsearchError, match="vocabulary"):
        engine.start(target, model(DRAFT.replace(vocab_size=51)), 2)
    with pytest.raises(ArchsearchError, match="gamma"):
        engine.start(target, model(DRAFT), 0)
