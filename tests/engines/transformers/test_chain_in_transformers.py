"""A chain in transformers does, prompt by prompt and round by round, what the joint replay says."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache

import pytest
import torch
from transformers.generation import candidate_generator

from archsearch.acceptance.chain import ChainRule, replay_chain
from archsearch.acceptance.lookup import LookupText, Ngram, Suffix, finds
from archsearch.acceptance.measured import Trace
from archsearch.architecture.architecture import Architecture
from archsearch.engines.engine import Chained, EnginePrompt, Sampling
from archsearch.engines.transformers import engine as engine_module
from archsearch.engines.transformers.engine import TransformersEngine
from archsearch.errors import ArchsearchError
from archsearch.models.drafts import build_draft

TOKENS = 36
LONG = Sampling(TOKENS)
NEVER = 1000
SHAPE = Architecture(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=50,
)
PROMPTS = [
    EnginePrompt(f"p{i}", tuple((7 * i + j * j) % 50 for j in range(4 + i))) for i in range(3)
]


def sharp(noise: float) -> torch.nn.Module:
    """Random weights large enough for clear argmaxes, with noise; its end token is never
    written."""
    model = build_draft(SHAPE, seed=0)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = NEVER, 0
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0)
                parameter.add_(
                    noise * parameter.std() * torch.randn(parameter.shape, generator=generator)
                )
    return model


@pytest.fixture(scope="module")
def target() -> torch.nn.Module:
    return sharp(0.0)


@pytest.fixture(scope="module")
def near() -> torch.nn.Module:
    """A draft that agrees often but not always."""
    return sharp(0.12)


def traced(prompts, answers, draft, ended) -> Trace:
    """The draft beside the answers: one pass over each, as `agreement_trace` makes it."""
    agreements, sure = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([[*prompt.token_ids, *answer]])
        with torch.no_grad():
            logits = draft(ids).logits[0, len(prompt.token_ids) - 1 : -1]
        agreements.append((logits.argmax(-1) == torch.tensor(answer)).numpy())
        sure.append(logits.softmax(-1).max(-1).values.numpy())
    names = tuple(prompt.prompt_id for prompt in prompts)
    return Trace(
        tuple(agreements), ("",) * len(names), names, (ended,) * len(names), confidences=tuple(sure)
    )


def served(target, draft, gamma: int, sampling=LONG, prompts=PROMPTS):
    engine = TransformersEngine()
    engine.start(target, draft, gamma)
    results = []
    for prompt in prompts:
        results += engine.generate([prompt], sampling)
        results[-1] = (results[-1], engine.steps())
    return results


def check_rows(results, texts, trace, rule, found) -> None:
    """Every prompt's rounds, what they accept and who drafted them, as replayed."""
    for index, (result, steps) in enumerate(results):
        own = replay_chain(
            trace.pick([index]), rule, found[index : index + 1], first=0, limit=TOKENS
        )
        assert result.token_ids == texts[index].answer
        assert result.rounds == pytest.approx(own.rounds)
        for place, count in enumerate(result.accepted_by_position):
            assert count / result.rounds == pytest.approx(own.accepted_by_position[place])
        assert sum(result.round_lengths) / result.rounds == pytest.approx(own.tau.value)
        looked_up = [step for step in steps[: result.rounds] if not step.draft_s]
        assert len(looked_up) == pytest.approx(sum(own.found))
        if not rule.least:  # what a draft adds behind a token that fails is known of no text
            sizes = sum(
                n * count for counts in (own.found, own.drafted) for n, count in enumerate(counts)
            )
            assert result.drafted == pytest.approx(sizes)


def replayable(target, draft, prompts=PROMPTS, sampling=LONG, ended=False):
    engine = TransformersEngine()
    engine.start(target, None, 0)
    answers = [result.token_ids for result in engine.generate(prompts, sampling)]
    texts = [LookupText(p.token_ids, a, ended) for p, a in zip(prompts, answers, strict=True)]
    return texts, traced(prompts, answers, draft, ended)


kept = cache(replayable)


@pytest.mark.parametrize(
    ("lookup", "rule"),
    [
        (Ngram(1, 3), ChainRule(4, 2)),
        (Ngram(3, 4), ChainRule(2, 5)),
        (Suffix(), ChainRule(4, 3)),
        (Suffix(), ChainRule(3, 4, 0.4)),
        (Ngram(2, 3), ChainRule(3, 4, 0.6, with_last=False)),
    ],
)
def test_a_chain_does_what_was_replayed(target, near, lookup, rule) -> None:
    texts, trace = kept(target, near)
    found = finds(lookup, texts, [rule.found])[rule.found]
    both = replay_chain(trace, rule, found, first=0, limit=TOKENS)
    assert 0.05 < sum(both.found) / both.rounds < 0.95 and both.unseen > 0, (
        "a case in which both draft"
    )
    check_rows(served(target, Chained(near, rule, lookup), rule.longest), texts, trace, rule, found)


def test_a_chain_ends_where_the_target_ends(target, near) -> None:
    """An end token that the prompts hold as well: a lookup proposes it, and what would follow
    it."""
    end = served(target, None, 0)[0][0].token_ids[11]
    prompts = [EnginePrompt(p.prompt_id, (*p.token_ids, end, 3, 5, end, 3)) for p in PROMPTS]
    target.generation_config.eos_token_id = end
    rule, lookup, sampling = ChainRule(3, 3), Ngram(1, 3), Sampling(TOKENS)
    try:
        texts, trace = replayable(target, near, prompts, sampling)
        ended = tuple(text.answer[-1] == end for text in texts)
        texts = [LookupText(t.prompt, t.answer, e) for t, e in zip(texts, ended, strict=True)]
        trace = Trace(
            trace.agreements, trace.categories, trace.ids, ended, confidences=trace.confidences
        )
        assert any(ended) and not all(ended)
        results = served(target, Chained(near, rule, lookup), 3, sampling, prompts)
    finally:
        target.generation_config.eos_token_id = NEVER
    found = finds(lookup, texts, [3])[3]
    for index, (result, _) in enumerate(results):
        assert result.token_ids == texts[index].answer
        if not result.rounds:
            continue
        own = replay_chain(
            trace.pick([index]), rule, found[index : index + 1], first=0, limit=TOKENS
        )
        assert result.rounds == pytest.approx(own.rounds)
        assert sum(result.round_lengths) / result.rounds == pytest.approx(own.tau.value)


@pytest.mark.parametrize("least", [0.3, 0.7])
def test_a_draft_that_stops_when_unsure_does_what_was_replayed(
    target, near, least, monkeypatch
) -> None:
    """In archsearch's generator, and in transformers' own without scikit-learn (with it the
    threshold moves)."""
    rule = ChainRule(0, 5, least)
    texts, trace = kept(target, near)
    check_rows(ours := served(target, Chained(near, rule), 5), texts, trace, rule, [])
    assert (
        0 < sum(result.drafted for result, _ in ours) < 5 * sum(result.rounds for result, _ in ours)
    )
    monkeypatch.setattr(candidate_generator, "is_sklearn_available", lambda: False)
    monkeypatch.setattr(engine_module, "chained", lambda *_: nullcontext([]))
    theirs = served(target, Chained(near, rule), 5)
    assert [result.round_lengths for result, _ in theirs] == [
        result.round_lengths for result, _ in ours
    ]


def test_a_chain_may_sample(target, near) -> None:
    sampling = Sampling(TOKENS, temperature=1.0, seed=1)
    results = served(target, Chained(near, ChainRule(3, 3), Ngram(1, 3)), 3, sampling)
    assert all(len(result.token_ids) == TOKENS and result.rounds > 5 for result, _ in results)
    assert "_get_candidate_generator" not in vars(target)


def test_chains_that_are_none(near, target) -> None:
    with pytest.raises(ArchsearchError, match="a chain of one"):
        Chained(near, ChainRule(0, 3))
    with pytest.raises(ArchsearchError, match="or neither"):
        Chained(near, ChainRule(0, 3), Ngram())
    with pytest.raises(ValueError, match="longest round, 4, got 3"):
        TransformersEngine().start(target, Chained(near, ChainRule(4, 3), Ngram()), 3)
