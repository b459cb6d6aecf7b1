"""What further text is asked for, and what is dropped: by text and tokens alone."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from archsearch.text import supply
from archsearch.text.cache import CachedSequence
from archsearch.text.prompts import Prompt

CHAT = (
    "{% for m in messages %}{{ '<start> ' + m['role'] + ' ' + m['content'] + ' <end> ' }}{% endfor"
    " %}{% if add_generation_prompt %}<start> assistant{% endif %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    names = [
        "<unk>",
        "<start>",
        "<end>",
        "user",
        "assistant",
        "system",
        *(f"w{i}" for i in range(60)),
    ]
    raw = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", unk_token="<unk>")
    made.chat_template = CHAT
    return made


def prompt(text: str, category: str = "") -> Prompt:
    return Prompt((("user", text),), category, "", 1)


def sequence(ids: list[int], prompt_tokens: int, category: str = "") -> CachedSequence:
    written = len(ids) - prompt_tokens
    return CachedSequence(
        torch.tensor(ids),
        prompt_tokens,
        torch.zeros(written, 4),
        torch.tensor(ids[prompt_tokens:]),
        category,
        "",
    )


def test_an_asking_ends_where_the_user_speaks_behind_prompts_of_one_kind(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    users = [prompt(f"w{i} w{i + 1} w{i + 2}", "ab"[i % 2]) for i in range(12)] + [
        prompt("w1 " * 400, "a")
    ]
    asked = supply.askings(tokenizer, users, 20, seed=3)
    assert len(asked) == 20 and len({one.token_ids for one in asked}) > 10
    for one in asked:
        text = tokenizer.decode(one.token_ids)
        assert (
            text.endswith("<end> <start> user")
            and text.count("<start>") == 4
            and len(one.token_ids) < 60
        )
        kinds = {int(word[1:]) % 2 for word in text.split("user ")[1].split()[:1]}
        assert kinds == {"ab".index(one.category)}
    assert [one.token_ids for one in supply.askings(tokenizer, users, 20, seed=3)] == [
        one.token_ids for one in asked
    ]
    bare = supply.askings(tokenizer, [], 2)
    assert tokenizer.decode(bare[0].token_ids) == "<start> user"


def test_a_template_that_wants_turns_to_alternate_gets_no_examples(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{"
        " raise_exception('alternate') }}{% endif %}{{ '<start> ' + m['role'] + ' ' + m['content']"
        " + ' <end> ' }}{% endfor %}"
    )
    asked = supply.askings(tokenizer, [prompt("w1 w2"), prompt("w3 w4")], 2)
    assert [tokenizer.decode(one.token_ids) for one in asked] == ["<start> user"] * 2
    tokenizer.chat_template = None
    asked = supply.askings(tokenizer, [prompt("w1 w2"), prompt("w3 w4")], 1)
    assert set(tokenizer.decode(asked[0].token_ids).split()) == {"w1", "w2", "w3", "w4"}


def test_what_leaks_repeats_or_is_known_is_dropped_with_its_reason() -> None:
    users = [prompt("please write a short poem about the sea in winter")]
    apart = [
        prompt("how many apples does Tom have after he gives seven of them to his sister Ann"),
        prompt("translate cat"),
    ]
    texts = [
        ("tell me how a bicycle stays upright when it is ridden slowly", "x", True),
        ("Tell me how a bicycle stays upright when it is ridden slowly!", "x", True),
        ("Tom has many. How many apples does Tom have after he gives seven away", "x", True),
        ("Translate: cat", "x", True),
        ("Please write a short poem about the sea in summer", "x", True),
        ("one two three " * 10, "x", True),
        ("what is", "x", False),
        ("why", "x", True),
        ("", "x", True),
    ]
    found = supply.invented(texts, users, apart)
    assert [p.text for p in found.prompts] == [texts[0][0]] and found.prompts[0].category == "x"
    assert found.dropped == {
        "like another prompt": 2,
        "like a held-out prompt": 2,
        "repeats itself": 1,
        "unfinished": 1,
        "too short": 2,
    }
    again = supply.invented(texts, users, apart, before=found.prompts)
    assert not again.prompts
    system = Prompt((("system", "be brief"), ("user", "w1 w2 w3")))
    assert supply.invented(texts[:1], [system], []).prompts[0].messages[0] == ("system", "be brief")


def test_turns_end_with_the_turn_or_with_a_blank_line(tokenizer: PreTrainedTokenizerFast) -> None:
    assert supply.turns_of(
        [sequence([1, 3, 10, 11, 2], 2, "c"), sequence([1, 3, 10, 11], 2)], tokenizer, (2,)
    ) == [("w4 w5", "c", True), ("w4 w5", "", False)]
    tokenizer.chat_template = None
    tokenizer.decode = lambda ids, **_: "\n\nfirst line\n\nsecond"  # type: ignore[method-assign]
    assert supply.turns_of([sequence([1, 3, 10], 2)], tokenizer, (2,)) == [("first line", "", True)]


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ('Why is it so? Say "now." And then', ('Why is it so? Say "now."', True)),
        ("Is pi 3.14159", ("Is pi 3.14159", False)),
        ("One whole sentence.", ("One whole sentence.", False)),  # nobody knows that it ends there
    ],
)
def test_a_turn_that_was_cut_ends_with_its_last_whole_sentence(
    tokenizer: PreTrainedTokenizerFast, written: str, kept: tuple[str, bool]
) -> None:
    tokenizer.decode = lambda ids, **_: written  # type: ignore[method-assign]
    ((text, _, ended),) = supply.turns_of([sequence([1, 3, 10], 2)], tokenizer, (2,))
    assert (text, ended) == kept
