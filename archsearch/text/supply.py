"""Prompts that a target writes in the user's style, where the user's own are few: what is asked,
and what is good enough to be answered.

The user's prompts come before the one to be written (Self-Instruct, arXiv 2212.10560); the chat
template opens the turn that the target writes (Magpie, arXiv 2406.08464). Nothing may leak: a
prompt that shares a run of words with a held-out one is dropped.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from archsearch.text.prompt_set import shingles
from archsearch.text.prompts import EncodedPrompt, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from archsearch.text.cache import CachedSequence

EXAMPLES: Final = 3  # of the user's prompts before one to be invented
EXAMPLE_TOKENS: Final = 160  # longer prompts are no examples
PROMPT_TOKENS: Final = 160  # of an invented prompt; one that is longer has lost its thread
INVENTING: Final = (1.0, 0.95)  # temperature and nucleus: greedy ones would all be the same
SHINGLE: Final = 3  # words
LEAK: Final = 8  # words in a row shared with a held-out prompt: the same prompt in part
ALIKE: Final = 0.5  # of a prompt's shingles that one other prompt has too: near-duplicates
_MARK: Final = "archsearch-user-turn"


@dataclass(frozen=True, slots=True)
class Invented:
    """Prompts that the target wrote, and why the others were left out, by reason."""

    prompts: tuple[Prompt, ...]
    dropped: dict[str, int]


# -- what is asked


def opening(
    tokenizer: PreTrainedTokenizerBase, before: Sequence[tuple[str, str]] = ()
) -> tuple[int, ...]:
    """Token ids that end where the user's turn begins. `before`: messages (role, text) that stand
    before it.

    Without a chat template: the texts of `before`, a blank line behind each. Raises ValueError
    where a template takes no such conversation (two turns of the user behind each other).
    """
    if not tokenizer.chat_template:
        text = "".join(f"{content}\n\n" for _, content in before)
        return tuple(tokenizer(text)["input_ids"])
    turns = [{"role": role, "content": content} for role, content in [*before, ("user", _MARK)]]
    try:
        text = str(tokenizer.apply_chat_template(turns, tokenize=False))
    except Exception as error:  # a template raises what it likes (jinja2's TemplateError mostly)
        raise ValueError(str(error)) from error
    head, found, _ = text.partition(_MARK)
    if not found:
        raise ValueError("the chat template changes what the user says")
    return tuple(tokenizer(head, add_special_tokens=False)["input_ids"])


def askings(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], count: int, seed: int = 0
) -> list[EncodedPrompt]:
    """`count` openings for prompts to be invented, each behind EXAMPLES prompts of the user of one
    category, drawn anew; behind none where the template takes no several turns of the user."""
    short = [
        p
        for p in prompts
        if len(tokenizer(p.text, add_special_tokens=False)["input_ids"]) <= EXAMPLE_TOKENS
    ]
    rng = random.Random(f"askings {seed}")
    made = []
    for number in range(count):
        before: list[tuple[str, str]] = []
        category = ""
        if short:
            first = rng.choice(short)
            category = first.category
            others = [p for p in short if p.category == category and p is not first]
            chosen = [first, *rng.sample(others, min(EXAMPLES - 1, len(others)))]
            system = [m for m in first.messages[:1] if m[0] == "system"]
            before = [*system, *(("user", p.text) for p in chosen)]
        try:
            ids = opening(tokenizer, before)
        except ValueError:
            ids = opening(tokenizer)
        if ids:
            made.append(EncodedPrompt(ids, category, f"asked-{seed}-{number}"))
    return made


# -- what is good enough


def words(text: str) -> list[str]:
    """The words of a text in lower case."""
    return re.findall(r"\w+", text.lower())


def repeats(text: str) -> bool:
    """Whether more than a third of a text's runs of SHINGLE words occurred in it before."""
    found = shingles(words(text), SHINGLE)
    return len(found) >= 6 and len(set(found)) < 2 / 3 * len(found)


class Seen:
    """Texts by their runs of words, so that near-duplicates of any of them are found without
    comparing all."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._by_shingle: dict[tuple[str, ...], list[int]] = {}
        self._count = 0
        for text in texts:
            self.add(text)

    def add(self, text: str) -> None:
        for shingle in set(shingles(words(text), SHINGLE)):
            self._by_shingle.setdefault(shingle, []).append(self._count)
        self._count += 1

    def alike(self, text: str) -> bool:
        """Whether some text has ALIKE of this one's runs of words."""
        own = set(shingles(words(text), SHINGLE))
        shared = Counter(each for shingle in own for each in self._by_shingle.get(shingle, ()))
        return bool(own) and max(shared.values(), default=0) >= ALIKE * len(own)


def invented(
    texts: Sequence[tuple[str, str, bool]],
    prompts: Sequence[Prompt],
    kept_apart: Sequence[Prompt],
    before: Sequence[Prompt] = (),
) -> Invented:
    """The prompts among `texts` (text, category, whether it came to its end) that are worth an
    answer. `before`: invented earlier; whatever is like a prompt `kept_apart` is dropped."""
    seen, apart = Seen(p.text for p in (*prompts, *before)), Seen(p.text for p in kept_apart)
    secret = {shingle for p in kept_apart for shingle in shingles(words(p.text), LEAK)}
    system = next((p.messages[:1] for p in prompts if p.messages[0][0] == "system"), ())
    chosen: list[Prompt] = []
    dropped: Counter[str] = Counter()
    for text, category, ended in texts:
        text = text.strip()
        found = words(text)
        faults = {
            "unfinished": not ended,
            "too short": len(found) < 2,
            "repeats itself": repeats(text),
            "like a held-out prompt": apart.alike(text)
            or not secret.isdisjoint(shingles(found, LEAK)),
            "like another prompt": seen.alike(text),
        }
        if why := next((fault for fault, true in faults.items() if true), ""):
            dropped[why] += 1
            continue
        seen.add(text)
        name = f"invented-{len(before) + len(chosen)}"
        chosen.append(Prompt((*system, ("user", text)), category, name))
    return Invented(tuple(chosen), dict(dropped))


def turns_of(
    sequences: Sequence[CachedSequence], tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]
) -> list[tuple[str, str, bool]]:
    """What the target wrote as the user's turns: (text, category, whether it came to an end).

    A turn that was cut ends with its last whole sentence, where it has one. Without a chat template
    the first paragraph counts, and a blank line is its end.
    """
    made = []
    for sequence in sequences:
        text = str(tokenizer.decode(sequence.written.tolist(), skip_special_tokens=True))
        ended = int(sequence.token_ids[-1]) in ends
        if not tokenizer.chat_template:
            text, blank, _ = text.lstrip("\n").partition("\n\n")
            ended = ended or bool(blank)
        if not ended and (whole := re.match(r".*[.!?][\"')\]]*(?=\s)", text, re.DOTALL)):
            text, ended = whole[0], True
        made.append((text, sequence.category, ended))
    return made
