"""Prompt files: what they may hold, and a prompt as the target's token ids."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from archsearch.errors import ArchsearchError
from archsearch.text.prompt_files import PROMPT_FIELDS, Faulty, all_faults, rows_of, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


# by field: the names of a turn's role and text, and roles that are called otherwise there
_TURNS: Final[dict[str, tuple[str, str, dict[str, str]]]] = {
    "messages": ("role", "content", {}),
    "conversations": ("from", "value", {"human": "user", "gpt": "assistant"}),
}
MAX_PROMPT_TOKENS: Final = 2048  # longer prompts are left out: one of them takes the room of dozens


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request: chat messages as (role, content), the last one the user's; `id` is "" where the
    file gives none; `line` is where it stood in its file."""

    messages: tuple[tuple[str, str], ...]
    category: str = ""
    id: str = ""
    line: int = 0

    @property
    def text(self) -> str:
        """The user's last message."""
        return self.messages[-1][1]


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as the target's token ids, chat template applied."""

    token_ids: tuple[int, ...]
    category: str
    id: str


def read_prompts(path: Path | str) -> list[Prompt]:
    """Prompts from a file, in any of the forms that docs/files.md lists.

    Raises ArchsearchError with the numbers of all rows that are no object, have no known field or
    no text, or for an empty file.
    """
    path = Path(path)
    prompts, faults = [], []
    for place, number, row in rows_of(path):
        try:
            if isinstance(row, Faulty):
                raise row
            prompts.append(_prompt(row, number))
        except Faulty as fault:
            faults.append((place, number, fault))
    if faults:
        raise all_faults(path, faults, len(prompts) + len(faults))
    if not prompts:
        raise ArchsearchError(
            f'prompt file {path} holds no prompts; write JSON lines such as {{"prompt": "..."}}'
        )
    return prompts


def _prompt(row: dict[str, Any], number: int) -> Prompt:
    """The prompt of a row. Raises Faulty."""
    identity = row.get("id", row.get("question_id", row.get("custom_id", "")))
    category = str(row.get("category") or "")
    if isinstance(row.get("body"), dict):
        row = row["body"]
    messages = _messages(row)
    # Two characters are the least that can be two tokens; encode_prompts() counts tokens for sure.
    if len(messages[-1][1].strip()) < 2:
        raise Faulty(
            f"the prompt {messages[-1][1]!r} is shorter than two tokens; remove or extend it"
        )
    return Prompt(messages, category, str(identity), number)


def _messages(row: dict[str, object]) -> tuple[tuple[str, str], ...]:
    field = next((name for name in PROMPT_FIELDS if row.get(name) is not None), None)
    if field is None:
        found = ", ".join(sorted(map(str, row))) or "nothing"
        known = ", ".join(PROMPT_FIELDS)
        if empty := [name for name in PROMPT_FIELDS if name in row]:
            raise Faulty(f"{empty[0]!r} is null; remove the row or write its prompt")
        raise Faulty(f"none of the fields {known} (found {found}); rename the prompt's field")
    value = row[field]
    if field in _TURNS:
        role, text, known_as = _TURNS[field]
        said = [(text_of(turn, role), text_of(turn, text)) for turn in _turns(value, field)]
        messages = [(known_as.get(who, who), what) for who, what in said]
    elif field == "turns":
        first = _turns(value, field)[0]
        messages = [("user", first if isinstance(first, str) else text_of(first, "content"))]
    else:
        if not isinstance(value, str):
            raise Faulty(f"{field!r} must be text, got {type(value).__name__}")
        messages = [("user", value)]
    # What the file says after the user's last turn was somebody else's answer; the target writes
    # its own.
    users = [i for i, (role, _) in enumerate(messages) if role == "user"]
    if not users:
        raise Faulty(f"{field!r} has no turn of the user")
    # Of a recorded conversation only the part before the first answer is the same for every model.
    last = users[0] if field == "conversations" else users[-1]
    return tuple(messages[: last + 1])


def _turns(value: object, field: str) -> list[object]:
    if not isinstance(value, list) or not value:
        raise Faulty(f"{field!r} must be a list with at least one turn")
    return value


def prompt_limit(config: Any, answer_tokens: int) -> int:
    """Most tokens of a prompt: MAX_PROMPT_TOKENS, and such that a whole answer fits behind it into
    the target's context, where its Hugging Face config says how long that is.

    Raises ArchsearchError where no answer fits.
    """
    context = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if not context:
        return MAX_PROMPT_TOKENS
    if context <= answer_tokens:
        raise ArchsearchError(
            f"answers of {answer_tokens} tokens do not fit into the target's context of {context};"
            " lower --answer-tokens"
        )
    return min(MAX_PROMPT_TOKENS, int(context) - answer_tokens)


def encode_prompts(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int = MAX_PROMPT_TOKENS,
) -> list[EncodedPrompt]:
    """Token ids of every prompt, with the tokenizer's chat template when it has one.

    Prompts of more than `max_tokens` tokens are left out, which is said once. Raises
    ArchsearchError for a prompt whose own text is shorter than two tokens, and when nothing is
    left.
    """
    encoded, lengths = [], []
    for prompt in prompts:
        ids = _prompt_ids(prompt, tokenizer)
        lengths.append(len(ids))
        if len(ids) <= max_tokens:
            encoded.append(EncodedPrompt(tuple(ids), prompt.category, prompt.id))
    if not encoded:
        raise ArchsearchError(
            f"none of the {len(prompts)} prompts fits into {max_tokens} tokens; shorten them"
        )
    if len(encoded) < len(prompts):
        _say_left_out(len(prompts) - len(encoded), len(prompts), max_tokens, max(lengths))
    return encoded


@functools.cache  # the same prompts are encoded for several texts of a run
def _say_left_out(*counts: int) -> None:
    """`counts`: left out, of how many, the most tokens, those of the longest."""
    words = "%d of %d prompts are longer than %d tokens (the longest has %d) and are left out"
    logger.warning(words, *counts)


def _prompt_ids(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    where = f"the prompt in line {prompt.line}"
    if len(tokenizer(prompt.text, add_special_tokens=False)["input_ids"]) < 2:
        raise ArchsearchError(
            f"{where} ({prompt.text!r}) is shorter than two tokens; remove or extend it"
        )
    if not tokenizer.chat_template:
        return list(tokenizer("\n".join(content for _, content in prompt.messages))["input_ids"])
    turns = [{"role": role, "content": content} for role, content in prompt.messages]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is code of the target's: it may raise anything
        roles = ", ".join(role for role, _ in prompt.messages)
        said = " ".join(str(error).split())[:200]
        raise ArchsearchError(
            f"the target's chat template refuses {where} (turns: {roles}):"
            f" {said or type(error).__name__}; leave out or reorder its turns"
        ) from error
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if not ids:  # writing after nothing would not end
        raise ArchsearchError(
            f"the target's chat template makes no text of {where}; mend the template"
        )
    return ids
