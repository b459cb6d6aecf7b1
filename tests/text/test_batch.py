"""Batches of prompts of very different length: equal to one by one, within memory and time, never
silent."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PretrainedConfig,
)

from archsearch.errors import ArchsearchError
from archsearch.text.batch import READS, WRITES, BatchWriter, Report, common_prefix
from archsearch.text.blocks import Passes, takes_blocks
from archsearch.text.cache import CachedSequence
from archsearch.text.prompts import EncodedPrompt, prompt_limit
from archsearch.text.settings import (
    Writing,
    best_tokens,
    draw,
    kv_tokens,
)

VOCAB = 64
END = 1


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        eos_token_id=END,
        bos_token_id=None,
        pad_token_id=0,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def make_prompts(lengths: list[int], shared: int = 3) -> list[EncodedPrompt]:
    generator = torch.Generator().manual_seed(0)
    frame = [2] * shared
    return [
        EncodedPrompt(
            (*frame, *torch.randint(3, VOCAB, (n - shared,), generator=generator).tolist()),
            "",
            str(i),
        )
        for i, n in enumerate(lengths)
    ]


class Writer(BatchWriter):
    def write(
        self,
        prompts: Sequence[EncodedPrompt],
        report: Report,
        deadline: float | None = None,
        seed: int = 0,
    ) -> tuple[list[CachedSequence], bool]:
        """Answers in the order of `prompts`, and whether all ended before the `deadline`."""
        rows = [self.row(prompt, seed, place) for place, prompt in enumerate(prompts)]
        finished = self.write_rows(rows, report, deadline)
        return [row.sequence() for row in rows if row.ids], finished


def writer_of(
    target: LlamaForCausalLM,
    limits: dict[str, int],
    tokens: int = 20,
    ends: tuple[int, ...] = (END, 7, 9),
    **more: float,
) -> Writer:
    """A writer with `limits` of its own: most_rows, most_tokens, pass_tokens."""
    writer = Writer(target, target.lm_head.weight.detach(), ends, Writing(tokens, **more))  # type: ignore[arg-type]
    vars(writer).update(limits)
    return writer


def quiet(what: str, done: int, written: int) -> None:
    pass


def ticking(monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], list[str], Report]:
    """A clock that goes on by a second with every report, what was reported, and the report to hand
    over."""
    clock, kinds = [0.0], list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def report(what: str, done: int, written: int) -> None:
        clock[0] += 1.0
        kinds.append(what)

    return clock, kinds, report


@cache
def alone(
    target: LlamaForCausalLM, prompt: tuple[int, ...], tokens: int
) -> tuple[list[int], torch.Tensor]:
    """What the target writes for one prompt, and its hidden states."""
    ids = torch.tensor([prompt])
    expected = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=[END, 7, 9],
    )[0]
    with torch.no_grad():
        hidden = target.model(expected[None]).last_hidden_state[0, len(prompt) - 1 : -1]
    return expected.tolist(), hidden


def check_alone(
    target: LlamaForCausalLM, sequence: CachedSequence, prompt: EncodedPrompt, tokens: int
) -> None:
    expected, hidden = alone(target, prompt.token_ids, tokens)
    assert sequence.token_ids.tolist() == expected
    torch.testing.assert_close(sequence.hidden, hidden, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("limits", "shared"),
    [
        ({}, 0),
        ({}, 3),
        ({"most_rows": 3}, 3),
        ({"most_tokens": 600, "pass_tokens": 64}, 0),
        ({"most_rows": 5, "most_tokens": 2200, "pass_tokens": 300}, 3),
    ],
)
def test_refilled_batches_write_what_each_prompt_gets_alone(
    target: LlamaForCausalLM, limits: dict[str, int], shared: int
) -> None:
    prompts = make_prompts([5, 1700, 12, 300, 8, 40, 41, 5, 900, 60, 13, 7, 22, 150, 9, 33], shared)
    sequences, finished = writer_of(target, limits).write(prompts, quiet)
    assert finished and [s.id for s in sequences] == [p.id for p in prompts]
    for sequence, prompt in zip(sequences, prompts, strict=True):
        check_alone(target, sequence, prompt, 20)
    lengths = {len(s.written) for s in sequences}
    assert len(lengths) > 2, f"the case tests nothing: all answers have the lengths {lengths}"


def test_cut_answers_of_any_length_go_on_side_by_side(target: LlamaForCausalLM) -> None:
    prompts = make_prompts([9, 9, 9, 9])
    writer = writer_of(target, {}, ends=())
    whole, _ = writer.write(prompts, quiet)
    rows = []
    for place, (prompt, text, n) in enumerate(zip(prompts, whole, (18, 1, 7, 19), strict=True)):
        cut = replace(
            text,
            token_ids=text.token_ids[: text.prompt_tokens + n],
            hidden=text.hidden[:n],
            greedy_ids=text.greedy_ids[:n],
        )
        rows.append(writer.row(prompt, 0, place, cut))
    assert writer.write_rows(rows, quiet)
    for row, text in zip(rows, whole, strict=True):
        assert row.sequence().token_ids.tolist() == text.token_ids.tolist()
        torch.testing.assert_close(row.sequence().hidden, text.hidden, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("together", [True, False])
def test_targets_that_take_no_blocks_write_the_same(
    target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    assert takes_blocks(target)
    monkeypatch.setattr("archsearch.text.blocks.takes_blocks", lambda target: together)
    prompts = make_prompts([5, 300, 12, 150, 8, 40, 41, 5, 60, 13], 3)
    sequences, finished = writer_of(
        target, {"most_rows": 4, "most_tokens": 2200, "pass_tokens": 100}
    ).write(prompts, quiet)
    assert finished and target.config._attn_implementation == "sdpa"
    for sequence, prompt in zip(sequences, prompts, strict=True):
        check_alone(target, sequence, prompt, 20)


def test_a_sliding_window_is_kept_in_reading_and_in_writing() -> None:
    torch.manual_seed(3)
    config = MistralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=END,
        bos_token_id=None,
        pad_token_id=0,
        initializer_range=0.3,
        sliding_window=16,
    )
    windowed = MistralForCausalLM(config).eval()
    assert takes_blocks(windowed)
    prompts = make_prompts([5, 40, 12, 90, 15])
    sequences, _ = writer_of(windowed, {"pass_tokens": 32}, ends=()).write(prompts, quiet)
    for sequence in sequences:
        start = sequence.prompt_tokens
        with torch.no_grad():
            hidden = windowed.model(sequence.token_ids[None]).last_hidden_state[0, start - 1 : -1]
        torch.testing.assert_close(sequence.hidden, hidden, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("grouped", [True, False])
def test_sixteen_bits_are_attended_right_in_either_form(
    target: LlamaForCausalLM, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(
        "archsearch.text.blocks._grouped_is_quicker", lambda *kind: asked.append(kind) or grouped
    )
    halves = copy.deepcopy(target).to(torch.bfloat16)
    sequences, _ = Writer(halves, halves.lm_head.weight.detach(), (), Writing(20)).write(
        make_prompts([5, 40, 12]), quiet
    )
    assert set(asked) == {(torch.bfloat16, 4, 2, 8)}
    for sequence in sequences:
        with torch.no_grad():
            hidden = halves.model(sequence.token_ids[None]).last_hidden_state[
                0, sequence.prompt_tokens - 1 : -1
            ]
        error = (sequence.hidden.float() - hidden.float()).norm() / hidden.float().norm()
        assert error < 0.05


def test_attention_of_another_kind_is_found_out_and_left_to_the_target(
    target: LlamaForCausalLM,
) -> None:
    torch.manual_seed(5)
    other = LlamaForCausalLM(target.config).eval()
    first = other.model.layers[0].self_attn
    own = first.forward

    def louder(*args, **kwargs):  # noqa: ANN002, ANN003, ANN202
        found, weights = own(*args, **kwargs)
        return (found if kwargs["past_key_values"] is None else 1.5 * found), weights

    first.forward = louder
    assert not takes_blocks(other)


def test_memory_and_passes_stay_within_their_limits(
    target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[tuple[int, int]] = []
    refills: list[tuple[int, int]] = []
    real = Passes.step

    def spy(self: Passes, blocks, tokens):  # noqa: ANN001, ANN202
        held.append((len(tokens), sum(block.tokens for block in blocks)))
        refills.append(
            (
                sum(b.capacity - b.columns < 20 for b in blocks),
                sum(b.capacity - b.columns == 20 for b in blocks),
            )
        )
        return real(self, blocks, tokens)

    monkeypatch.setattr(Passes, "step", spy)
    passes: list[int] = []
    hook = target.model.register_forward_pre_hook(
        lambda module, args, kwargs: passes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    try:
        prompts = make_prompts([5 + 7 * i for i in range(60)] + [1700, 1500])
        _, finished = writer_of(
            target, {"most_rows": 16, "most_tokens": 4000, "pass_tokens": 256}
        ).write(prompts, quiet)
    finally:
        hook.remove()
    assert finished
    assert max(rows for rows, _ in held) == 16
    assert max(tokens for _, tokens in held) <= 4000
    assert max(passes) <= 256
    assert any(kept and new for kept, new in refills), (
        "no row was refilled beside answers under way"
    )


def test_blocks_pad_little_and_small_ones_join(
    target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[tuple[int, float]] = []
    real = Passes.step

    def spy(self: Passes, blocks, tokens):  # noqa: ANN001, ANN202
        counts.append(
            (
                len(blocks),
                sum(sum(b.spans) for b in blocks) / sum(b.rows * b.columns for b in blocks),
            )
        )
        return real(self, blocks, tokens)

    monkeypatch.setattr(Passes, "step", spy)
    lengths = [20] * 30 + [60] * 30 + [400] * 12
    writer_of(target, {}).write(make_prompts(lengths), quiet)
    assert counts[0][0] == 3 and counts[0][1] == 1.0
    assert min(share for _, share in counts) > 0.5


def test_one_prompt_larger_than_the_memory_bound_still_goes_through(
    target: LlamaForCausalLM,
) -> None:
    sequences, finished = writer_of(target, {"most_tokens": 50, "pass_tokens": 16}).write(
        make_prompts([5, 200]), quiet
    )
    assert finished and len(sequences) == 2


def test_a_deadline_in_the_middle_of_prefill_ends_it_with_what_is_there(
    target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, kinds, report = ticking(monkeypatch)
    prompts = make_prompts([100 + i for i in range(40)])
    sequences, finished = writer_of(target, {"pass_tokens": 110}).write(
        prompts, report, deadline=5.0
    )
    assert not finished
    # A third of the time goes into reading, the rest into writing: before, all went into reading
    # and answers had one token.
    assert 0 < len(sequences) < 4 and max(len(s.written) for s in sequences) >= 2
    assert len(kinds) <= 6, "passes went on after the deadline"
    # One prompt in many passes, behind answers under way, is given up too.
    clock[0] = 0.0
    sequences, finished = writer_of(target, {"most_rows": 2, "pass_tokens": 16}).write(
        make_prompts([5, 8, 1700]), report, deadline=60.0
    )
    assert (
        not finished
        and [len(s.token_ids) < 40 for s in sequences] == [True, True]
        and clock[0] <= 62
    )


def test_reading_that_was_cut_short_is_not_begun_again_before_answers_are_written(
    target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its third of the time it took a third of the rest, token by token, until nothing was
    left to write in."""
    clock, kinds, report = ticking(monkeypatch)
    prompts = make_prompts([100 + i for i in range(40)])
    sequences, finished = writer_of(target, {"pass_tokens": 110}, tokens=30).write(
        prompts, report, deadline=30.0
    )
    assert not finished
    assert (
        kinds.count(READS) <= 13
        and min(len(s.written) for s in sequences if 1 not in s.written) > 5
    )
    # Answers that ended make room for more reading again.
    clock[0] = 0.0
    kinds.clear()
    writer_of(target, {"pass_tokens": 110}, tokens=4).write(prompts, report, deadline=30.0)
    assert kinds.index(READS, kinds.index(WRITES)) > kinds.index(WRITES) + 2


@pytest.mark.parametrize(
    ("step_s", "row_s", "most"),
    # by rows as a processor without bfloat16 takes them; by steps as memory allows; both
    [(0.0, 0.02, 25), (0.2, 0.0, 60), (0.1, 0.01, 40)],
)
def test_answers_that_cannot_end_in_time_are_not_begun(
    target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, step_s, row_s, most
) -> None:
    """All rows that fit were cut in the middle before, and only beginnings were written."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    writer = writer_of(target, {}, ends=())

    def report(what: str, done: int, written: int) -> None:
        clock[0] += step_s + row_s * len(writer.alive) if what == WRITES else 0.01

    sequences, _ = writer.write(make_prompts([9] * 60), report, deadline=10.0)
    ended = sum(len(s.written) == 20 for s in sequences)
    assert 0.7 * most <= ended <= most and len(sequences) - ended <= 1


def test_a_deadline_that_is_past_still_leaves_the_first_answers_begun(
    target: LlamaForCausalLM,
) -> None:
    sequences, finished = writer_of(target, {"pass_tokens": 64}).write(
        make_prompts([5, 9, 500]), quiet, deadline=0.0
    )
    assert not finished and [len(s.written) for s in sequences] == [1, 1]


def test_no_more_than_two_passes_go_by_in_silence(target: LlamaForCausalLM) -> None:
    passes, reports = [0], []
    hook = target.model.register_forward_hook(lambda *_: passes.__setitem__(0, passes[0] + 1))

    def report(what: str, done: int, written: int) -> None:
        reports.append((passes[0], what, done, written))

    try:
        writer_of(target, {"most_rows": 4, "pass_tokens": 128}).write(
            make_prompts([5, 1700, 700, 90, 30, 31]), report
        )
    finally:
        hook.remove()
    seen = [count for count, *_ in reports]
    assert (
        max(b - a for a, b in zip([0, *seen], seen, strict=False)) <= 2
    )  # a step, then the first of a refill
    assert sum(what == READS for _, what, *_ in reports) >= 1700 // 128 + 700 // 128
    assert reports[-1][2] == 6


def test_sampled_answers_do_not_depend_on_their_neighbours(target: LlamaForCausalLM) -> None:
    prompts = make_prompts([5, 80, 12, 30, 8, 41])
    several, _ = writer_of(target, {}, temperature=1.5, top_p=0.9).write(prompts, quiet, seed=3)
    alone, _ = writer_of(target, {"most_rows": 1}, temperature=1.5, top_p=0.9).write(
        prompts, quiet, seed=3
    )
    other, _ = writer_of(target, {}, temperature=1.5, top_p=0.9).write(prompts, quiet, seed=4)
    assert [s.token_ids.tolist() for s in several] == [s.token_ids.tolist() for s in alone]
    assert [s.token_ids.tolist() for s in several] != [s.token_ids.tolist() for s in other]


def test_draws_follow_the_probabilities_and_never_take_an_impossible_token() -> None:
    probs = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    noise = torch.linspace(0, 1 - 1e-9, 4001, dtype=torch.float64)
    found = draw(probs.expand(len(noise), -1), noise).bincount(minlength=5) / len(noise)
    assert found.tolist() == pytest.approx(probs.tolist(), abs=1e-3)
    assert found[[0, 2, 4]].sum() == 0


def test_limits_of_a_prompt() -> None:
    def limit(context: int | None) -> int:
        return prompt_limit(PretrainedConfig(max_position_embeddings=context), 96)

    assert limit(None) == limit(8192) == 2048
    assert limit(1024) == 928
    with pytest.raises(ArchsearchError, match="context of 64; lower --answer-tokens"):
        limit(64)


def test_bytes_per_token_and_the_share_of_memory(target: LlamaForCausalLM) -> None:
    token_bytes = 2 * 2 * 2 * 8 * 4  # keys and values x layers x KV heads x head_dim x bytes
    most = kv_tokens(target) * token_bytes
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert most == pytest.approx(min(4 << 30, 0.125 * memory), rel=1e-3)


def test_the_best_token_is_the_first_of_the_largest_for_any_vocabulary() -> None:
    generator = torch.Generator().manual_seed(0)
    for vocab in (60, 1024, 5000, 5001, 49152):
        for dtype in (torch.float32, torch.bfloat16):
            logits = torch.randn(7, vocab, generator=generator).to(dtype)  # bfloat16 has ties
            assert best_tokens(logits).tolist() == logits.float().argmax(-1).tolist()
    logits = torch.zeros(3, 5001)
    logits[1, 5000] = logits[2, 4999] = 1.0
    assert best_tokens(logits).tolist() == [0, 5000, 4999]


def test_draws_over_a_large_vocabulary_are_those_of_one_running_sum() -> None:
    generator = torch.Generator().manual_seed(1)
    probs = torch.softmax(3 * torch.randn(50, 5001, generator=generator), -1)
    probs[:, 256:512] = 0.0
    noise = torch.rand(50, dtype=torch.float64, generator=generator)
    noise[:3] = torch.tensor([0.0, 1 - 1e-16, 1 - 1e-9])
    total = probs.double().cumsum(-1)
    expected = torch.searchsorted(total, (noise * total[:, -1])[:, None], right=True)[:, 0]
    found = draw(probs, noise)
    assert (probs[torch.arange(50), found] > 0).all()
    assert (found == expected)[3:].all()


def test_common_prefix_leaves_the_last_token() -> None:
    assert common_prefix([(1, 2, 3), (1, 2, 4, 5)]) == 2
    assert common_prefix([(1, 2), (1, 2)]) == 1
    assert common_prefix([(1, 2), (3, 4)]) == 0
