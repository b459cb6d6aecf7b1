import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from archsearch.errors import ArchsearchError
from archsearch.text.batch import BatchWriter, Row
from archsearch.text.cache import TextCache, save_shard, shard_complete
from archsearch.text.encode import encode_text
from archsearch.text.generate import generate_text, write_answers
from archsearch.text.prompt_files import read_texts
from archsearch.text.prompts import Prompt, encode_prompts, read_prompts
from archsearch.text.settings import Writing
from archsearch.text.vocabulary import TokenFrequencies, choose_draft_vocab, token_frequencies

VOCAB = 64
WORDS = [
    "the",
    "cat",
    "dog",
    "ran",
    "sat",
    "on",
    "mat",
    "a",
    "big",
    "red",
    "why",
    "who",
    "when",
    "is",
    "it",
    "me",
]


@pytest.fixture(scope="module")
def tokenizer():
    vocab = {"<pad>": 0, "<eos>": 1, "<unk>": 2, "user": 3, "system": 4, "assistant": 5}
    vocab |= {word: 6 + i for i, word in enumerate(WORDS)}
    vocab |= {f"w{i}": i for i in range(len(vocab), VOCAB)}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<eos>", unk_token="<unk>", pad_token="<pad>"
    )
    wrapped.chat_template = (
        "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' ' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    return wrapped


def make_target(seed=0, kv_heads=2):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=256,
        eos_token_id=1,
        bos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture
def prompts():
    texts = [
        "the cat sat on the mat",
        "who is it",
        "the big red dog ran",
        "why me",
        "the cat ran",
        "when is it on the mat the dog sat",
    ]
    return [Prompt((("user", text),), f"c{i % 2}", f"p{i}", i + 1) for i, text in enumerate(texts)]


def write(tmp_path, *rows):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


# ---- prompts


def test_all_forms_of_prompt_files_are_read(tmp_path):
    path = write(
        tmp_path,
        {"prompt": "Hello there", "category": "greeting", "id": "a"},
        {
            "messages": [
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": "Hi you"},
                {"role": "assistant", "content": "no"},
            ]
        },
        "",
        {
            "conversations": [
                {"from": "human", "value": "First one"},
                {"from": "gpt", "value": "x"},
                {"from": "human", "value": "later"},
            ]
        },
        {"question": "Why not?"},
        {"instruction": "Do it now"},
        {"turns": ["Turn one", "Turn two"], "question_id": 81},
    )
    prompts = read_prompts(path)
    assert [p.text for p in prompts] == [
        "Hello there",
        "Hi you",
        "First one",
        "Why not?",
        "Do it now",
        "Turn one",
    ]
    assert (prompts[0].category, prompts[0].id, prompts[0].line) == ("greeting", "a", 1)
    assert prompts[1].messages == (("system", "Be kind."), ("user", "Hi you"))
    assert prompts[2].messages == (("user", "First one"),)
    assert prompts[2].line == 4 and prompts[5].id == "81"


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "holds no prompts"),
        (["", "  "], "holds no prompts"),
        (['{"prompt": "ok then"}', "no json"], "line 2: not JSON"),
        (["[1, 2]"], "line 1: a list, not an object"),
        (['{"text": "abc"}'], "line 1: none of the fields"),
        (['{"prompt": 7}'], "line 1: 'prompt' must be text"),
        (['{"prompt": " "}'], "line 1: the prompt ' ' is shorter than two tokens"),
        (['{"turns": []}'], "line 1: 'turns' must be a list"),
        (['{"messages": [{"role": "user"}]}'], "line 1: a turn without the text field 'content'"),
        (['{"messages": [{"role": "assistant", "content": "hello"}]}'], "no turn of the user"),
    ],
)
def test_bad_prompt_files_are_one_clear_line(tmp_path, rows, says):
    with pytest.raises(ArchsearchError, match=says.replace("[", r"\[")) as caught:
        read_prompts(write(tmp_path, *rows))
    assert "\n" not in str(caught.value)


def test_missing_and_binary_prompt_files(tmp_path):
    with pytest.raises(ArchsearchError, match="not found"):
        read_prompts(tmp_path / "none.jsonl")
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ArchsearchError, match="UTF-8"):
        read_prompts(tmp_path / "b.jsonl")


def test_chat_template_is_applied_and_short_or_long_prompts_are_told(tokenizer, prompts, caplog):
    encoded = encode_prompts(prompts, tokenizer)
    assert tokenizer.decode(encoded[1].token_ids) == "user who is it assistant"
    with pytest.raises(ArchsearchError, match="line 9 .'cat'. is shorter than two tokens"):
        encode_prompts([Prompt((("user", "cat"),), "", "", 9)], tokenizer)
    with caplog.at_level("WARNING"):
        assert len(encode_prompts(prompts, tokenizer, max_tokens=8)) == 5
    assert "1 of 6 prompts" in caplog.text
    with pytest.raises(ArchsearchError, match="none of the 6 prompts fits"):
        encode_prompts(prompts, tokenizer, max_tokens=2)


# ---- generation


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_greedy_text_is_what_generate_writes_and_states_give_its_logits(
    tmp_path, tokenizer, prompts, kv_heads, monkeypatch
):
    monkeypatch.setattr("archsearch.text.batch.ROWS", 4)
    target = make_target(seed=3, kv_heads=kv_heads)
    cache = generate_text(target, tokenizer, prompts, cache_dir=tmp_path / "c", writing=Writing(24))
    assert cache.complete and len(cache.sequences) == len(prompts)
    by_id = {s.id: s for s in cache.sequences}
    for encoded in encode_prompts(prompts, tokenizer):
        sequence = by_id[encoded.id]
        ids = torch.tensor([encoded.token_ids])
        expected = target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
        )[0]
        assert sequence.token_ids.tolist() == expected.tolist()
        assert (
            sequence.prompt_tokens == len(encoded.token_ids)
            and sequence.category == encoded.category
        )
        assert torch.equal(sequence.written, sequence.greedy_ids)
        with torch.no_grad():
            logits = target(expected[None]).logits[0, sequence.prompt_tokens - 1 : -1]
        torch.testing.assert_close(sequence.hidden @ cache.head.T, logits, atol=2e-4, rtol=1e-4)


def test_rows_that_end_leave_the_batch_without_changing_the_others(
    tmp_path, tokenizer, monkeypatch
):
    # Answers of very different lengths: the batch is compacted several times on the way.
    target = make_target(seed=5)
    prompts = [Prompt((("user", f"the w{i} w{60 - i} sat"),), "", str(i), i) for i in range(22, 34)]
    made = []
    for n in (12, 1):
        monkeypatch.setattr("archsearch.text.batch.ROWS", n)
        made.append(
            generate_text(
                target, tokenizer, prompts, cache_dir=tmp_path / f"{n}", writing=Writing(60)
            )
        )
    together, alone = made
    left = {s.id: s.token_ids.tolist() for s in together.sequences}
    right = {s.id: s.token_ids.tolist() for s in alone.sequences}
    assert left == right
    lengths = {s.greedy_ids.shape[0] for s in together.sequences}
    assert len(lengths) > 2, f"the case tests nothing: all answers have the lengths {lengths}"


def test_sampled_text_records_where_it_left_the_greedy_path(tmp_path, tokenizer, target, prompts):
    made = [
        generate_text(
            target,
            tokenizer,
            prompts,
            cache_dir=tmp_path / name,
            writing=Writing(16, 2.0, seed=seed),
        )
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    texts = [[s.token_ids.tolist() for s in cache.sequences] for cache in made]
    assert texts[0] == texts[1] != texts[2]
    flags = torch.cat([s.written == s.greedy_ids for s in made[0].sequences])
    assert 0 < int(flags.sum()) < len(flags)
    one = made[0].sequences[0]
    assert torch.equal((one.hidden @ made[0].head.T).argmax(-1), one.greedy_ids)


def test_a_killed_run_is_resumed_and_a_finished_shard_is_not_made_again(
    tmp_path, tokenizer, target, prompts, monkeypatch
):
    monkeypatch.setattr("archsearch.text.generate.SHARD_PROMPTS", 2)
    whole = generate_text(
        target, tokenizer, prompts, cache_dir=tmp_path / "whole", writing=Writing(8)
    )
    real = Row.sequence
    made = []

    def dies_at_the_fifth_answer(row):
        made.append(row.prompt.id)
        if len(made) == 5:
            raise KeyboardInterrupt
        return real(row)

    monkeypatch.setattr(Row, "sequence", dies_at_the_fifth_answer)
    # One at a time: all of one batch may come to their end in the same step.
    monkeypatch.setattr("archsearch.text.batch.ROWS", 1)
    one = Writing(8)
    with pytest.raises(KeyboardInterrupt):
        generate_text(target, tokenizer, prompts, cache_dir=tmp_path / "cut", writing=one)
    assert len(TextCache.load(tmp_path / "cut").sequences) == 4
    resumed = generate_text(target, tokenizer, prompts, cache_dir=tmp_path / "cut", writing=one)
    assert made[5:] == [p.id for p in prompts[4:]], (
        "only the third shard should have been made again"
    )
    assert resumed.complete and resumed.fingerprint == whole.fingerprint
    assert [s.token_ids.tolist() for s in resumed.sequences] == [
        s.token_ids.tolist() for s in whole.sequences
    ]


def test_answers_that_a_deadline_cut_go_on_where_they_stopped(
    tmp_path, tokenizer, prompts, monkeypatch
):
    target = make_target(seed=5)
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    passes = []

    def report(what, done, total):
        clock[0] += 1.0
        passes.append(what)

    monkeypatch.setattr("archsearch.text.batch.ROWS", 4)
    for temperature in (0.0, 1.5):
        writing = Writing(30, temperature)
        whole = generate_text(
            target, tokenizer, prompts, cache_dir=tmp_path / f"whole{temperature}", writing=writing
        )
        folder = tmp_path / f"cut{temperature}"
        for budget in (6.0, 6.0, None):
            before = len(passes)
            cache = write_answers(
                target,
                tokenizer,
                encode_prompts(prompts, tokenizer),
                cache_dir=folder,
                writing=writing,
                budget_s=budget,
                progress=report,
            )
            assert budget is None or (not cache.complete and len(passes) - before <= 8)
        assert cache.complete
        assert [s.token_ids.tolist() for s in cache.sequences] == [
            s.token_ids.tolist() for s in whole.sequences
        ]
        for ours, other in zip(cache.sequences, whole.sequences, strict=True):
            torch.testing.assert_close(ours.hidden, other.hidden, atol=2e-4, rtol=1e-4)


def test_rows_are_refilled_across_shards(tmp_path, tokenizer, target, prompts, monkeypatch):
    monkeypatch.setattr("archsearch.text.generate.SHARD_PROMPTS", 2)
    batches = []
    real = BatchWriter.write_rows
    monkeypatch.setattr(
        BatchWriter,
        "write_rows",
        lambda self, rows, *rest: batches.append(len(rows)) or real(self, rows, *rest),
    )
    cache = generate_text(target, tokenizer, prompts, cache_dir=tmp_path, writing=Writing(8))
    assert batches == [6] and len(list(tmp_path.glob("shard-*.safetensors"))) == 3
    assert [s.id for s in cache.sequences] == [p.id for p in prompts]


def test_the_budget_stops_with_what_is_there_and_a_later_call_goes_on(
    tmp_path, tokenizer, target, prompts, monkeypatch
):
    monkeypatch.setattr("archsearch.text.generate.SHARD_PROMPTS", 3)
    cut = write_answers(
        target,
        tokenizer,
        encode_prompts(prompts, tokenizer),
        cache_dir=tmp_path,
        writing=Writing(50),
        budget_s=1e-6 + 0.05,
    )
    if not cut.complete:
        assert 0 < len(cut.sequences) <= 6
    done = generate_text(target, tokenizer, prompts, cache_dir=tmp_path, writing=Writing(50))
    assert done.complete and len(done.sequences) == 6


def test_answers_cut_by_the_deadline_are_kept_and_marked_unfinished(
    tmp_path, tokenizer, target, prompts
):
    encoded = encode_prompts(prompts, tokenizer)
    head = target.lm_head.weight.detach()
    writer = BatchWriter(target, head, (), Writing(40))
    rows = [writer.row(prompt, 0, place) for place, prompt in enumerate(encoded)]
    finished = writer.write_rows(rows, lambda *_: None, deadline=0.0)
    sequences = [row.sequence() for row in rows]
    assert not finished
    assert [s.greedy_ids.shape[0] for s in sequences] == [1] * 6
    save_shard(tmp_path / "shard-00000.safetensors", sequences, finished)
    assert not shard_complete(tmp_path / "shard-00000.safetensors")


def test_a_cache_made_for_something_else_is_refused_with_words(
    tmp_path, tokenizer, target, prompts
):
    generate_text(target, tokenizer, prompts, cache_dir=tmp_path, writing=Writing(4))
    with pytest.raises(ArchsearchError, match="made for another target;"):
        generate_text(
            make_target(seed=9), tokenizer, prompts, cache_dir=tmp_path, writing=Writing(4)
        )
    with pytest.raises(ArchsearchError, match="made for other prompts;"):
        generate_text(target, tokenizer, prompts[:2], cache_dir=tmp_path, writing=Writing(4))
    with pytest.raises(ArchsearchError, match="made for other settings;"):
        generate_text(target, tokenizer, prompts, cache_dir=tmp_path, writing=Writing(5))


def test_progress_ends_at_the_total(tmp_path, tokenizer, target, prompts):
    seen = []
    cache = generate_text(
        target,
        tokenizer,
        prompts,
        cache_dir=tmp_path,
        writing=Writing(8),
        progress=lambda *said: seen.append(said),
    )
    assert seen[-1][1:] == (6, 6)
    tokens = [int(re.search(r"(\d+) tokens", what)[1]) for what, _, _ in seen]
    assert tokens[-1] == cache.written_tokens and tokens == sorted(tokens)


def test_plain_text_has_the_states_of_one_forward_pass(tmp_path, tokenizer, target):
    texts = ["the cat sat on the mat", "why", "who is it on the big red mat"]
    cache = encode_text(target, tokenizer, texts, cache_dir=tmp_path / "c", max_tokens=6)
    assert sorted(s.id for s in cache.sequences) == ["text-0-0", "text-2-0", "text-2-1"]
    for sequence in cache.sequences:
        assert sequence.prompt_tokens == 1
        with torch.no_grad():
            logits = target(sequence.token_ids[None]).logits[0, :-1]
        torch.testing.assert_close(sequence.hidden @ cache.head.T, logits, atol=1e-4, rtol=1e-4)
        assert torch.equal(logits.argmax(-1), sequence.greedy_ids)
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(texts))
    assert (
        encode_text(
            target, tokenizer, read_texts(path), cache_dir=tmp_path / "c", max_tokens=6
        ).fingerprint
        == cache.fingerprint
    )
    with pytest.raises(ArchsearchError, match="no piece of two tokens"):
        encode_text(target, tokenizer, ["why"], cache_dir=tmp_path / "d")


def test_a_full_disk_is_one_line_and_leaves_no_half_shard(
    tmp_path, tokenizer, target, prompts, monkeypatch
):
    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(ArchsearchError, match="No space left on device"):
        generate_text(target, tokenizer, prompts, cache_dir=tmp_path / "c", writing=Writing(4))
    assert list((tmp_path / "c").iterdir()) == []


def test_a_head_that_changes_logits_is_refused(tmp_path, tokenizer, prompts):
    target = make_target()
    target.config.final_logit_softcapping = 30.0
    with pytest.raises(ArchsearchError, match="final_logit_softcapping=30.0"):
        generate_text(target, tokenizer, prompts, cache_dir=tmp_path)


# ---- vocabulary


def test_kept_tokens_are_special_then_written_then_text_then_lowest_ids(tokenizer):
    written, text = np.zeros(VOCAB, dtype=np.int64), np.zeros(VOCAB, dtype=np.int64)
    written[[40, 50]] = 6, 3
    text[[30, 50]] = 9, 1
    written[60] = 1
    frequencies = TokenFrequencies(written, text)
    special = set(tokenizer.all_special_ids)
    assert special == {0, 1, 2}
    five = choose_draft_vocab(frequencies, 5, tokenizer)
    assert set(five.token_ids) == special | {40, 50} and five.coverage == pytest.approx(0.9)
    nine = choose_draft_vocab(frequencies, 9, tokenizer)
    assert nine.token_ids == (0, 1, 2, 3, 4, 30, 40, 50, 60) and nine.coverage == 1.0
    with pytest.raises(ArchsearchError, match="3 special tokens"):
        choose_draft_vocab(frequencies, 2, tokenizer)
    with pytest.raises(ArchsearchError, match="between 1 and 64"):
        choose_draft_vocab(frequencies, 65, tokenizer)


def test_frequencies_tell_written_from_prompt_and_plain_text(tmp_path, tokenizer, target, prompts):
    cache = generate_text(target, tokenizer, prompts, cache_dir=tmp_path / "w", writing=Writing(8))
    plain = encode_text(target, tokenizer, ["dog dog dog"], cache_dir=tmp_path / "p")
    frequencies = token_frequencies(cache, plain)
    assert frequencies.written.sum() == cache.written_tokens
    prompt_tokens = sum(s.prompt_tokens for s in cache.sequences)
    assert frequencies.text.sum() == prompt_tokens + 3
    assert token_frequencies(cache).text[8] + 3 == frequencies.text[8]  # "dog"


def test_line_separators_inside_a_prompt_and_a_byte_order_mark_are_no_trouble(
    tmp_path: Path,
) -> None:
    file = tmp_path / "prompts.jsonl"
    text = "one\u2028two\u0085three"
    file.write_bytes(
        "\ufeff".encode() + json.dumps({"prompt": text}, ensure_ascii=False).encode() + b"\r\n"
    )
    (prompt,) = read_prompts(file)
    assert prompt.messages[-1][1] == text
