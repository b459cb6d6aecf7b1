"""Batches of prompts of very different length: equal to one by one, within memory and time, never silent."""

from __future__ import annotations

import time

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from archsearch.errors import ArchsearchError
from archsearch.text.batch import READS, BatchWriter, common_prefix
from archsearch.text.cache import CachedSequence
from archsearch.text.growing_cache import GrowingCache
from archsearch.text.prompts import EncodedPrompt, prompt_limit
from archsearch.text.sampling import draw
from archsearch.text.settings import BatchLimits, Writing, kv_bytes_per_token, kv_tokens

VOCAB = 64
END = 1


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=2048, eos_token_id=END, bos_token_id=None, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def make_prompts(lengths: list[int], shared: int = 3) -> list[EncodedPrompt]:
    generator = torch.Generator().manual_seed(0)
    frame = [2] * shared
    return [
        EncodedPrompt((*frame, *torch.randint(3, VOCAB, (n - shared,), generator=generator).tolist()), "", str(i))
        for i, n in enumerate(lengths)
    ]


def writer_of(target: LlamaForCausalLM, limits: BatchLimits, tokens: int = 20, **more: float) -> BatchWriter:
    return BatchWriter(target, target.lm_head.weight.detach(), (END, 7, 9), Writing(tokens, limits=limits, **more))  # type: ignore[arg-type]


def quiet(what: str, done: int, written: int) -> None:
    pass


def check_alone(target: LlamaForCausalLM, sequence: CachedSequence, prompt: EncodedPrompt, tokens: int) -> None:
    ids = torch.tensor([prompt.token_ids])
    expected = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False,
                               eos_token_id=[END, 7, 9])[0]  # fmt: skip
    assert sequence.token_ids.tolist() == expected.tolist()
    with torch.no_grad():
        hidden = target.model(expected[None]).last_hidden_state[0, len(prompt.token_ids) - 1 : -1]
    torch.testing.assert_close(sequence.hidden, hidden, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("shared", [0, 3])
@pytest.mark.parametrize(
    "limits", [BatchLimits(), BatchLimits(rows=3), BatchLimits(kv_tokens=600, prefill_tokens=64), BatchLimits(5, 2200, 300)]
)
def test_refilled_batches_write_what_each_prompt_gets_alone(target: LlamaForCausalLM, limits: BatchLimits, shared: int) -> None:
    prompts = make_prompts([5, 1700, 12, 300, 8, 40, 41, 5, 900, 60, 13, 7, 22, 150, 9, 33], shared)
    sequences, finished = writer_of(target, limits).write(prompts, quiet)
    assert finished and [s.id for s in sequences] == [p.id for p in prompts]
    for sequence, prompt in zip(sequences, prompts, strict=True):
        check_alone(target, sequence, prompt, 20)
    lengths = {len(s.written) for s in sequences}
    assert len(lengths) > 2, f"the case tests nothing: all answers have the lengths {lengths}"


def test_memory_and_passes_stay_within_their_limits(target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[tuple[int, int]] = []
    refills: list[tuple[int, int]] = []
    real = GrowingCache.exchange

    def spy(self: GrowingCache, keep, added, shared, columns, capacity) -> None:
        real(self, keep, added, shared, columns, capacity)
        rows = self.cache.layers[0].keys.shape[0]
        held.append((rows, rows * capacity))
        refills.append((len(keep), rows - len(keep)))

    monkeypatch.setattr(GrowingCache, "exchange", spy)
    passes: list[int] = []
    hook = target.model.register_forward_pre_hook(
        lambda module, args, kwargs: passes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    try:
        prompts = make_prompts([5 + 7 * i for i in range(60)] + [1700, 1500])
        _, finished = writer_of(target, BatchLimits(rows=16, kv_tokens=4000, prefill_tokens=256)).write(prompts, quiet)
    finally:
        hook.remove()
    assert finished
    assert max(rows for rows, _ in held) == 16
    assert max(tokens for _, tokens in held) <= 4000
    assert max(passes) <= 256
    assert any(kept and new for kept, new in refills), "no row was refilled beside answers under way"


def test_one_prompt_larger_than_the_memory_bound_still_goes_through(target: LlamaForCausalLM) -> None:
    sequences, finished = writer_of(target, BatchLimits(kv_tokens=50, prefill_tokens=16)).write(make_prompts([5, 200]), quiet)
    assert finished and len(sequences) == 2


def test_a_deadline_in_the_middle_of_prefill_ends_it_with_what_is_there(
    target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    reads: list[int] = []

    def report(what: str, done: int, written: int) -> None:
        clock[0] += 1.0
        reads.append(what == READS)

    prompts = make_prompts([100 + i for i in range(40)])
    sequences, finished = writer_of(target, BatchLimits(prefill_tokens=110)).write(prompts, report, deadline=5.0)
    assert not finished
    assert 0 < len(sequences) < 8 and all(len(s.written) == 1 for s in sequences)
    assert sum(reads) <= 6, "passes went on after the deadline"
    # One prompt in many passes, behind answers under way, is given up too.
    clock[0] = 0.0
    sequences, finished = writer_of(target, BatchLimits(rows=2, prefill_tokens=16)).write(
        make_prompts([5, 8, 1700]), report, deadline=60.0
    )
    assert not finished and [len(s.token_ids) < 40 for s in sequences] == [True, True] and clock[0] <= 62


def test_a_deadline_that_is_past_still_leaves_the_first_answers_begun(target: LlamaForCausalLM) -> None:
    sequences, finished = writer_of(target, BatchLimits(prefill_tokens=64)).write(make_prompts([5, 9, 500]), quiet, deadline=0.0)
    assert not finished and [len(s.written) for s in sequences] == [1, 1]


def test_no_more_than_two_passes_go_by_in_silence(target: LlamaForCausalLM) -> None:
    passes, reports = [0], []
    hook = target.model.register_forward_hook(lambda *_: passes.__setitem__(0, passes[0] + 1))

    def report(what: str, done: int, written: int) -> None:
        reports.append((passes[0], what, done, written))

    try:
        writer_of(target, BatchLimits(rows=4, prefill_tokens=128)).write(make_prompts([5, 1700, 700, 90, 30, 31]), report)
    finally:
        hook.remove()
    seen = [count for count, *_ in reports]
    assert max(b - a for a, b in zip([0, *seen], seen, strict=False)) <= 2  # a step, then the first of a refill
    assert sum(what == READS for _, what, *_ in reports) >= 1700 // 128 + 700 // 128
    assert reports[-1][2] == 6


def test_sampled_answers_do_not_depend_on_their_neighbours(target: LlamaForCausalLM) -> None:
    prompts = make_prompts([5, 80, 12, 30, 8, 41])
    several, _ = writer_of(target, BatchLimits(), temperature=1.5, top_p=0.9).write(prompts, quiet, seed=3)
    alone, _ = writer_of(target, BatchLimits(rows=1), temperature=1.5, top_p=0.9).write(prompts, quiet, seed=3)
    other, _ = writer_of(target, BatchLimits(), temperature=1.5, top_p=0.9).write(prompts, quiet, seed=4)
    assert [s.token_ids.tolist() for s in several] == [s.token_ids.tolist() for s in alone]
    assert [s.token_ids.tolist() for s in several] != [s.token_ids.tolist() for s in other]


def test_draws_follow_the_probabilities_and_never_take_an_impossible_token() -> None:
    probs = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    noise = torch.linspace(0, 1 - 1e-9, 4001, dtype=torch.float64)
    found = draw(probs.expand(len(noise), -1), noise).bincount(minlength=5) / len(noise)
    assert found.tolist() == pytest.approx(probs.tolist(), abs=1e-3)
    assert found[[0, 2, 4]].sum() == 0


def test_limits_of_a_prompt() -> None:
    assert prompt_limit(None, 96) == prompt_limit(8192, 96) == 2048
    assert prompt_limit(1024, 96) == 928
    with pytest.raises(ArchsearchError, match="context of 64; lower --answer-tokens"):
        prompt_limit(64, 96)


def test_bytes_per_token_and_the_share_of_memory(target: LlamaForCausalLM) -> None:
    assert kv_bytes_per_token(target.config, 4) == 2 * 2 * 2 * 8 * 4  # keys and values x layers x KV heads x head_dim x bytes
    assert 0 < kv_tokens(target, BatchLimits()) * kv_bytes_per_token(target.config, 4) <= 4 << 30
    assert kv_tokens(target, BatchLimits(kv_tokens=7)) == 7


def test_common_prefix_leaves_the_last_token() -> None:
    assert common_prefix([(1, 2, 3), (1, 2, 4, 5)]) == 2
    assert common_prefix([(1, 2), (1, 2)]) == 1
    assert common_prefix([(1, 2), (3, 4)]) == 0
