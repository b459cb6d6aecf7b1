"""Prompts, the text a target writes for them, and which tokens a draft should be able to propose.

A draft learns from what its target *writes* (on-policy text: in-domain distillation moved acceptance by +0.4 to +2.1 logit in
Online Speculative Decoding, arXiv 2310.07177). The text is kept with the target's final hidden states, one vector per written
token: the target's logits are `hidden @ head.T`, so a whole distillation needs no further pass of the target, at 2 bytes per
hidden channel and token instead of 2 bytes per vocabulary entry.

A cache is a folder of shards (safetensors) with the target's head beside them. Every shard is written atomically and belongs to
one target, one list of prompts and one group of settings: what was finished before a kill is used again, and a folder made for
another target is refused.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.files import atomic_path, read_json, write_json

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

FORMAT: Final = 1
PROMPT_FIELDS: Final = ("prompt", "messages", "conversations", "question", "instruction", "turns")
_SHAREGPT_ROLES: Final = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_SHARD_PROMPTS: Final = 384  # a kill loses at most one shard
_PREFILL_ROWS: Final = 48  # prompts per prefill pass: activations of more fall out of the processor's cache
_MAX_PROMPT_TOKENS: Final = 2048

Progress = Callable[[dict[str, Any]], None]


# ---------------------------------------------------------------------------------------------------------------- prompts


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request: chat messages as (role, content), the last one the user's; `id` is "" where the file gives none; `line` is
    where it stood in its file."""

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
    """Prompts from a file of JSON lines, blank lines skipped.

    Accepted: {"prompt"}, {"messages": [{"role", "content"}]} (OpenAI), {"conversations": [{"from", "value"}]} (ShareGPT),
    {"question"}, {"instruction"}, {"turns": [...]} (the first turn); each with an optional "category" and "id".

    Raises ArchsearchError with the line number for what is not JSON lines, has no known field or no text, or for an empty file.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise MissingDataError(f"prompt file not found: {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ArchsearchError(f"cannot read the prompt file {path}: {error}; it must be UTF-8 JSON lines") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"prompt file {path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ArchsearchError(
                f'{where}: not JSON ({error.msg}); each line must be one object such as {{"prompt": "..."}}'
            ) from None
        if not isinstance(row, dict):
            raise ArchsearchError(f'{where}: a {type(row).__name__}, not an object; write each line as {{"prompt": "..."}}')
        messages = _messages(row, where)
        # Two characters are the least that can be two tokens; encode_prompts() counts tokens for sure.
        if len(messages[-1][1].strip()) < 2:
            raise ArchsearchError(f"{where}: the prompt {messages[-1][1]!r} is shorter than two tokens; remove or extend it")
        identity = row.get("id", row.get("question_id", ""))
        prompts.append(Prompt(messages, str(row.get("category") or ""), str(identity), number))
    if not prompts:
        raise ArchsearchError(f'prompt file {path} holds no prompts; write JSON lines such as {{"prompt": "..."}}')
    return prompts


def _messages(row: dict[str, Any], where: str) -> tuple[tuple[str, str], ...]:
    field = next((name for name in PROMPT_FIELDS if row.get(name) is not None), None)
    if field is None:
        found = ", ".join(sorted(map(str, row))) or "nothing"
        known = ", ".join(PROMPT_FIELDS)
        raise ArchsearchError(f"{where}: none of the fields {known} (found {found}); rename the prompt's field")
    value = row[field]
    if field == "messages":
        messages = [(_text_of(turn, "role", where), _text_of(turn, "content", where)) for turn in _turns(value, field, where)]
    elif field == "conversations":
        messages = []
        for turn in _turns(value, field, where):
            role = _text_of(turn, "from", where)
            messages.append((_SHAREGPT_ROLES.get(role, role), _text_of(turn, "value", where)))
    elif field == "turns":
        first = _turns(value, field, where)[0]
        messages = [("user", first if isinstance(first, str) else _text_of(first, "content", where))]
    else:
        if not isinstance(value, str):
            raise ArchsearchError(f"{where}: {field!r} must be text, got {type(value).__name__}")
        messages = [("user", value)]
    # What the file says after the user's last turn was somebody else's answer; the target writes its own.
    users = [i for i, (role, _) in enumerate(messages) if role == "user"]
    if not users:
        raise ArchsearchError(f"{where}: {field!r} has no turn of the user")
    # Of a recorded conversation only the part before the first answer is the same for every model.
    last = users[0] if field == "conversations" else users[-1]
    return tuple(messages[: last + 1])


def _turns(value: Any, field: str, where: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ArchsearchError(f"{where}: {field!r} must be a list with at least one turn")
    return value


def _text_of(turn: Any, key: str, where: str) -> str:
    text = turn.get(key) if isinstance(turn, dict) else None
    if not isinstance(text, str):
        raise ArchsearchError(f"{where}: a turn without the text field {key!r}: {str(turn)[:60]}")
    return text


def encode_prompts(prompts: Sequence[Prompt], tokenizer: Any, *, max_tokens: int = _MAX_PROMPT_TOKENS) -> list[EncodedPrompt]:
    """Token ids of every prompt, with the tokenizer's chat template when it has one.

    Prompts of more than `max_tokens` tokens are left out (and counted in the log). Raises ArchsearchError for a prompt whose own
    text is shorter than two tokens, and when nothing is left.
    """
    encoded = []
    for prompt in prompts:
        if len(tokenizer(prompt.text, add_special_tokens=False)["input_ids"]) < 2:
            raise ArchsearchError(
                f"the prompt in line {prompt.line} ({prompt.text!r}) is shorter than two tokens; remove or extend it"
            )
        if tokenizer.chat_template:
            turns = [{"role": role, "content": content} for role, content in prompt.messages]
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = tokenizer("\n".join(content for _, content in prompt.messages))["input_ids"]
        if len(ids) <= max_tokens:
            encoded.append(EncodedPrompt(tuple(ids), prompt.category, prompt.id))
    if not encoded:
        raise ArchsearchError(f"none of the {len(prompts)} prompts fits into {max_tokens} tokens; shorten them")
    if len(encoded) < len(prompts):
        dropped = len(prompts) - len(encoded)
        logger.warning("%d of %d prompts are longer than %d tokens and left out", dropped, len(prompts), max_tokens)
    return encoded


# ------------------------------------------------------------------------------------------------------------------ cache


@dataclass(frozen=True, slots=True)
class CachedSequence:
    """One text with the target's view of it. With n written tokens (all but the prompt):

    `token_ids` [prompt_tokens + n] int; `hidden` [n, hidden_size]: the target's state that predicts each written token;
    `greedy_ids` [n]: the target's argmax there (equal to the written token in greedy text).
    """

    token_ids: torch.Tensor
    prompt_tokens: int
    hidden: torch.Tensor
    greedy_ids: torch.Tensor
    category: str
    id: str

    @property
    def written(self) -> torch.Tensor:
        """[n]: the tokens after the prompt."""
        return self.token_ids[self.prompt_tokens :]

    @property
    def greedy(self) -> torch.Tensor:
        """[n] bool: whether the written token is the target's most likely one."""
        return self.written == self.greedy_ids

    def __len__(self) -> int:
        return int(self.token_ids.shape[0])


class TextCache:
    """Texts with the target's hidden states: a folder of shards and the target's head. Made by generate_text or encode_text."""

    def __init__(self, folder: Path, meta: dict[str, Any], sequences: list[CachedSequence], head: torch.Tensor) -> None:
        self.folder = folder
        self.meta = meta
        self.sequences = sequences
        self.head = head

    @property
    def fingerprint(self) -> str:
        """Identity of target, prompts and settings; the number of finished shards is not part of it."""
        return _digest(json.dumps(self.meta["fingerprint"], sort_keys=True))

    @property
    def target_fingerprint(self) -> str:
        return str(self.meta["fingerprint"]["target"])

    @property
    def vocab_size(self) -> int:
        return int(self.head.shape[0])

    @property
    def hidden_size(self) -> int:
        return int(self.head.shape[1])

    @property
    def written_tokens(self) -> int:
        return sum(int(s.greedy_ids.shape[0]) for s in self.sequences)

    @property
    def complete(self) -> bool:
        """Whether every prompt was answered to its end (the budget was long enough)."""
        return bool(self.meta.get("complete"))

    @classmethod
    def load(cls, folder: Path | str) -> TextCache:
        """Read a finished or partly finished cache."""
        from safetensors.torch import load_file

        folder = Path(folder)
        meta = read_json(folder / "cache.json", "text cache")
        if meta.get("format") != FORMAT:
            raise ArchsearchError(f"{folder} was written by another version of archsearch; delete it and run again")
        head = load_file(folder / "head.safetensors")["head"]
        sequences = [s for path in sorted(folder.glob("shard-*.safetensors")) for s in _load_shard(path)]
        if not sequences:
            raise MissingDataError(f"the text cache {folder} is still empty; run again with a longer budget")
        return cls(folder, meta, sequences, head)


def target_fingerprint(target: Any) -> str:
    """Identity of a target: its shape and samples of its weights (rows spread over every matrix)."""
    import torch

    parts = [json.dumps({k: v for k, v in sorted(target.config.to_dict().items()) if k in _SHAPE_KEYS}, default=str)]
    for name, parameter in target.named_parameters():
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 64)][:64].to(torch.float32).cpu()
        parts.append(f"{name}{tuple(parameter.shape)}{hashlib.sha256(sample.numpy().tobytes()).hexdigest()}")
    return _digest("".join(parts))


_SHAPE_KEYS: Final = frozenset({"model_type", "hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads"})


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _open_folder(folder: Path, fingerprint: dict[str, Any], head: torch.Tensor) -> dict[str, Any]:
    """Create the cache folder, or check that what lies there was made for the same thing."""
    from safetensors.torch import save

    meta_path = folder / "cache.json"
    if meta_path.exists():
        meta = read_json(meta_path, "text cache")
        old = meta.get("fingerprint", {})
        changed = [key for key, value in fingerprint.items() if old.get(key) != value]
        if meta.get("format") != FORMAT or changed:
            what = {"target": "another target", "prompts": "other prompts", "settings": "other settings"}
            made_for = " and ".join(what.get(key, key) for key in changed) or "another version of archsearch"
            raise ArchsearchError(f"the text cache {folder} was made for {made_for}; delete it or name another folder")
        return dict(meta)
    meta = {"format": FORMAT, "fingerprint": fingerprint, "complete": False}
    with atomic_path(folder / "head.safetensors") as temporary:
        temporary.write_bytes(save({"head": head.detach().to("cpu").contiguous().clone()}))
    write_json(meta_path, meta)
    return meta


def _save_shard(path: Path, sequences: Sequence[CachedSequence], complete: bool) -> None:
    import torch
    from safetensors.torch import save

    tensors = {
        "token_ids": torch.cat([s.token_ids.to(torch.int32) for s in sequences]),
        "lengths": torch.tensor([len(s) for s in sequences], dtype=torch.int32),
        "prompt_tokens": torch.tensor([s.prompt_tokens for s in sequences], dtype=torch.int32),
        "hidden": torch.cat([s.hidden for s in sequences]).cpu(),
        "greedy_ids": torch.cat([s.greedy_ids.to(torch.int32) for s in sequences]),
    }
    notes = {"rows": json.dumps([[s.category, s.id] for s in sequences]), "complete": json.dumps(complete)}
    with atomic_path(path) as temporary:
        # By bytes: on a full disk safetensors and torch raise errors of their own, a plain write an OSError.
        temporary.write_bytes(save(tensors, metadata=notes))


def _shard_complete(path: Path) -> bool:
    from safetensors import safe_open

    if not path.exists():
        return False
    with safe_open(path, framework="pt") as shard:
        return bool(json.loads(shard.metadata()["complete"]))


def _load_shard(path: Path) -> Iterator[CachedSequence]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as shard:
        rows = json.loads(shard.metadata()["rows"])
        tensors = {name: shard.get_tensor(name) for name in shard.keys()}
    start = written = 0
    for (category, identity), length, prompt in zip(
        rows, tensors["lengths"].tolist(), tensors["prompt_tokens"].tolist(), strict=True
    ):
        count = length - prompt
        yield CachedSequence(
            tensors["token_ids"][start : start + length].long(), prompt, tensors["hidden"][written : written + count],
            tensors["greedy_ids"][written : written + count].long(), category, identity,
        )  # fmt: skip
        start, written = start + length, written + count


# ------------------------------------------------------------------------------------------------------------- generation


def generate_text(
    target: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    cache_dir: Path | str,
    max_new_tokens: int = 128,
    batch_size: int = 384,
    temperature: float = 0.0,
    seed: int = 0,
    budget_s: float | None = None,
    progress: Progress | None = None,
) -> TextCache:
    """Text that `target` writes for `prompts`, with its hidden states, in `cache_dir`.

    Greedy at temperature 0, sampled otherwise. Stops after `budget_s` seconds with what is there (answers under way are cut);
    called again, it uses the finished shards and goes on. `progress` gets {"done", "total" (prompts), "tokens", "tokens_per_s",
    "seconds"} every few steps. Raises ArchsearchError when `cache_dir` was made for another target, other prompts or settings.
    """
    import torch

    from archsearch.models import tune_malloc

    tune_malloc()
    begin = time.monotonic()
    encoded = encode_prompts(prompts, tokenizer)
    eos = eos_ids(target, tokenizer)
    head = _plain_head(target)
    fingerprint = {
        "target": target_fingerprint(target),
        "prompts": _digest(json.dumps([p.token_ids for p in encoded])),
        "settings": {"kind": "written", "max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed,
                     "shard_prompts": _SHARD_PROMPTS, "dtype": str(head.dtype)},
    }  # fmt: skip
    folder = Path(cache_dir)
    meta = _open_folder(folder, fingerprint, head)
    deadline = None if budget_s is None else begin + budget_s
    done = tokens = 0
    spent = 0.0
    complete = True
    for index, start in enumerate(range(0, len(encoded), _SHARD_PROMPTS)):
        shard = encoded[start : start + _SHARD_PROMPTS]
        path = folder / f"shard-{index:05d}.safetensors"
        if _shard_complete(path):
            done += len(shard)
            continue
        if deadline is not None and time.monotonic() >= deadline:
            complete = False
            break
        sequences: list[CachedSequence] = []
        # Neighbours in length share a batch, so little is padded; only inside a shard, so that a short budget sees all lengths.
        order = sorted(range(len(shard)), key=lambda i, shard=shard: len(shard[i].token_ids))  # type: ignore[misc]
        finished = True
        for first in range(0, len(order), batch_size):
            batch = [shard[i] for i in order[first : first + batch_size]]
            batch_start = time.monotonic()

            report = _reporter(progress, len(encoded), done, tokens, batch_start - spent)

            generator = torch.Generator().manual_seed(seed * 1_000_003 + index * 1009 + first)
            written, ended = _write_batch(target, head, batch, eos, max_new_tokens, temperature, generator, deadline, report)
            sequences += written
            done += len(batch)
            tokens += sum(int(s.greedy_ids.shape[0]) for s in written)
            spent += time.monotonic() - batch_start
            if not ended:
                finished = False
                break
        if sequences:
            _save_shard(path, sequences, finished)
        if not finished:
            complete = False
            break
    if meta.get("complete") != complete:
        write_json(folder / "cache.json", {**meta, "complete": complete})
    return TextCache.load(folder)


def _reporter(progress: Progress | None, total: int, done: int, tokens: int, since: float) -> Callable[[int, int], None]:
    """Turns (rows ended, tokens written) of one batch into progress of the whole run."""

    def report(ended: int, written: int) -> None:
        if progress is not None:
            seconds = time.monotonic() - since
            progress({"done": done + ended, "total": total, "tokens": tokens + written,
                      "tokens_per_s": (tokens + written) / max(seconds, 1e-9), "seconds": seconds})  # fmt: skip

    return report


def eos_ids(target: Any, tokenizer: Any) -> tuple[int, ...]:
    """Token ids that end an answer: the generation config's and the tokenizer's."""
    found: set[int] = set()
    for value in (getattr(target.generation_config, "eos_token_id", None), target.config.eos_token_id, tokenizer.eos_token_id):
        found.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return tuple(sorted(found))


def _plain_head(target: Any) -> torch.Tensor:
    """The head's weight [vocab, hidden]; only heads whose logits are exactly hidden @ weight.T can be rebuilt later."""
    module = target.get_output_embeddings()
    config = target.config
    for name in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            value = getattr(config, name)
            raise ArchsearchError(f"the target's {name}={value} changes its logits; such targets are not supported yet")
    if getattr(module, "bias", None) is not None:
        raise ArchsearchError("the target's language-model head has a bias; such targets are not supported yet")
    return module.weight.detach()


def _write_batch(
    target: Any,
    head: torch.Tensor,
    batch: Sequence[EncodedPrompt],
    eos: tuple[int, ...],
    max_new_tokens: int,
    temperature: float,
    generator: torch.Generator,
    deadline: float | None,
    report: Callable[[int, int], None],
) -> tuple[list[CachedSequence], bool]:
    """Answers for one batch, and whether all of them ended by themselves or by max_new_tokens (not by the deadline).

    The prompts' common beginning (system message, frame) goes through the target once for all rows; padding stands between it and
    the rest of the shorter prompts. Rows that ended leave the batch as soon as a quarter of it is idle.
    """
    import torch
    import torch.nn.functional as functional

    device = head.device
    rows = [list(p.token_ids) for p in batch]
    shared = _common_prefix(rows)
    width = max(len(r) for r in rows)
    pads = [width - len(r) for r in rows]
    ids = torch.tensor([r[:shared] + [0] * pad + r[shared:] for r, pad in zip(rows, pads, strict=True)], device=device)
    seen = [[1] * shared + [0] * pad + [1] * (len(r) - shared) for r, pad in zip(rows, pads, strict=True)]
    mask = torch.tensor(seen, device=device)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    base = target.base_model
    kv = GrowingCache(target.config, reserve=width + 48)
    alive = list(range(len(rows)))
    ended = [False] * len(rows)
    out_ids: list[list[int]] = [[] for _ in rows]
    out_greedy: list[list[int]] = [[] for _ in rows]
    out_hidden: list[list[torch.Tensor]] = [[] for _ in rows]
    written = 0
    cut = False
    with torch.inference_mode():
        if shared > 0:
            base(input_ids=ids[:1, :shared], past_key_values=kv.cache, use_cache=True)
            kv.expand(len(rows))
        # Without a shared beginning the cache has no memory yet that parts could write into.
        chunk = _PREFILL_ROWS if shared > 0 else len(rows)
        tails = []
        for a in range(0, len(rows), chunk):
            b = min(a + chunk, len(rows))
            part = kv.part(a, b) if shared > 0 else kv.cache
            states = base(
                input_ids=ids[a:b, shared:], attention_mask=mask[a:b], position_ids=positions[a:b, shared:], past_key_values=part,
                use_cache=True,
            ).last_hidden_state  # fmt: skip
            tails.append(states[:, -1].clone())
        kv.advance(width)
        tail = torch.cat(tails)
        position = positions[:, -1:] + 1
        for step in range(max_new_tokens):
            logits = functional.linear(tail, head)
            greedy = logits.argmax(-1)
            if temperature > 0:
                probs = (logits.float() / temperature).softmax(-1).cpu()
                chosen = torch.multinomial(probs, 1, generator=generator)[:, 0].to(device)
            else:
                chosen = greedy
            for slot, (row, token, best) in enumerate(zip(alive, chosen.tolist(), greedy.tolist(), strict=True)):
                if not ended[row]:
                    out_ids[row].append(token)
                    out_greedy[row].append(best)
                    out_hidden[row].append(tail[slot])
                    ended[row] = token in eos
                    written += 1
            live = [slot for slot, row in enumerate(alive) if not ended[row]]
            if step % 8 == 0:
                report(sum(ended), written)
            if not live or step == max_new_tokens - 1:
                break
            if deadline is not None and time.monotonic() >= deadline:
                cut = True
                break
            if len(live) <= 0.75 * len(alive):
                keep = torch.tensor(live, device=device)
                kv.select(keep)
                mask, position, chosen = mask[keep], position[keep], chosen[keep]
                alive = [alive[slot] for slot in live]
            mask = torch.cat([mask, mask.new_ones(len(alive), 1)], dim=1)
            tail = base(
                input_ids=chosen[:, None], attention_mask=mask, position_ids=position, past_key_values=kv.cache, use_cache=True
            ).last_hidden_state[:, -1]
            position = position + 1
    report(len(rows), written)
    sequences = [
        CachedSequence(
            torch.tensor(rows[i] + out_ids[i]), len(rows[i]), torch.stack(out_hidden[i]).cpu(), torch.tensor(out_greedy[i]),
            batch[i].category, batch[i].id,
        )
        for i in range(len(rows))
    ]  # fmt: skip
    return sequences, not cut


def _common_prefix(rows: Sequence[Sequence[int]]) -> int:
    """Length of the beginning that all rows share, at most one less than the shortest row (its last token must be run)."""
    shortest = min(len(r) for r in rows)
    shared = 0
    while shared < shortest - 1 and all(r[shared] == rows[0][shared] for r in rows):
        shared += 1
    return shared


class GrowingCache:
    """A KV cache that writes into reserved memory: HF's DynamicCache copies every key and value at every step instead.

    `cache` is what a Hugging Face model takes as past_key_values; memory grows by half when the reserve is used up.
    """

    def __init__(self, config: Any, reserve: int) -> None:
        from transformers.cache_utils import Cache

        layer = _growing_layer()
        self.cache: Any = Cache(layers=[layer(reserve) for _ in range(config.get_text_config(decoder=True).num_hidden_layers)])

    def expand(self, rows: int) -> None:
        """One row becomes `rows` equal rows."""
        import torch

        for layer in self.cache.layers:
            layer.take(torch.zeros(rows, dtype=torch.long, device=layer.keys.device))

    def part(self, start: int, stop: int) -> Any:
        """A cache of rows start..stop that writes into the same memory (which must not have to grow meanwhile)."""
        from transformers.cache_utils import Cache

        return Cache(layers=[layer.part(start, stop) for layer in self.cache.layers])

    def advance(self, tokens: int) -> None:
        """Tell the cache that parts of it have filled its first `tokens` columns."""
        for layer in self.cache.layers:
            layer.show(tokens)

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows, in this order."""
        for layer in self.cache.layers:
            layer.take(rows)


_layer_classes: list[type] = []


def _growing_layer() -> type:
    """The cache layer's class, defined on first use because transformers is slow to import."""
    if _layer_classes:
        return _layer_classes[0]
    from transformers.cache_utils import DynamicLayer

    class GrowingLayer(DynamicLayer):
        """Keys and values [rows, kv heads, tokens, head_dim] as views of a reserve [rows, kv heads, capacity, head_dim]."""

        def __init__(self, reserve: int) -> None:
            super().__init__()
            self.reserve = reserve
            self.keys: Any
            self.values: Any

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            used = self.keys.shape[2] if self.is_initialized else 0
            if not self.is_initialized:
                self.dtype, self.device = key_states.dtype, key_states.device
                self.is_initialized = True
                self.buffers = [self._room(key_states, self.reserve), self._room(value_states, self.reserve)]
            total = used + key_states.shape[2]
            if total > self.buffers[0].shape[2]:
                grown = max(total, self.buffers[0].shape[2] * 3 // 2)
                self.buffers = [self._copy(b[:, :, :used], grown) for b in self.buffers]
            for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
                buffer[:, :, used:total] = states
            self.show(total)
            return self.keys, self.values

        def show(self, tokens: int) -> None:
            self.keys, self.values = (b[:, :, :tokens] for b in self.buffers)

        def part(self, start: int, stop: int) -> GrowingLayer:
            layer = GrowingLayer(self.reserve)
            layer.dtype, layer.device, layer.is_initialized = self.dtype, self.device, True
            layer.buffers = [b[start:stop] for b in self.buffers]
            layer.show(self.keys.shape[2])
            return layer

        def take(self, rows: torch.Tensor) -> None:
            used, capacity = self.keys.shape[2], self.buffers[0].shape[2]
            self.buffers = [self._copy(b[:, :, :used], capacity, rows) for b in self.buffers]
            self.show(used)

        @staticmethod
        def _room(like: torch.Tensor, capacity: int, rows: int | None = None) -> torch.Tensor:
            return like.new_empty((like.shape[0] if rows is None else rows, like.shape[1], capacity, like.shape[3]))

        def _copy(self, states: torch.Tensor, capacity: int, rows: torch.Tensor | None = None) -> torch.Tensor:
            room = self._room(states, capacity, None if rows is None else int(rows.shape[0]))
            room[:, :, : states.shape[2]] = states if rows is None else states.index_select(0, rows)
            return room

    _layer_classes.append(GrowingLayer)
    return GrowingLayer


# ------------------------------------------------------------------------------------------------------------- plain text


def encode_text(
    target: Any,
    tokenizer: Any,
    texts: Path | str | Sequence[str],
    *,
    cache_dir: Path | str,
    max_tokens: int = 256,
    batch_tokens: int = 4096,
    budget_s: float | None = None,
    progress: Progress | None = None,
) -> TextCache:
    """Plain text with the target's states, from one forward pass: every token after the first counts as written.

    `texts`: strings, or a file (paragraphs between blank lines; .jsonl lines with a "text" field). Longer texts are cut into
    pieces of `max_tokens`. Budget, resuming, refusal as in generate_text.
    """
    import torch
    import torch.nn.functional as functional

    begin = time.monotonic()
    strings = _read_texts(Path(texts)) if isinstance(texts, str | Path) else list(texts)
    pieces: list[EncodedPrompt] = []
    for number, text in enumerate(strings):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        for part, start in enumerate(range(0, len(ids), max_tokens)):
            if len(ids) - start >= 2:
                pieces.append(EncodedPrompt(tuple(ids[start : start + max_tokens]), "plain", f"text-{number}-{part}"))
    if not pieces:
        raise ArchsearchError("the plain text holds no piece of two tokens or more; give more text")
    head = _plain_head(target)
    fingerprint = {
        "target": target_fingerprint(target),
        "prompts": _digest(json.dumps([p.token_ids for p in pieces])),
        "settings": {"kind": "plain", "max_tokens": max_tokens, "shard_prompts": _SHARD_PROMPTS, "dtype": str(head.dtype)},
    }
    folder = Path(cache_dir)
    meta = _open_folder(folder, fingerprint, head)
    done = tokens = 0
    complete = True
    for index, start in enumerate(range(0, len(pieces), _SHARD_PROMPTS)):
        path = folder / f"shard-{index:05d}.safetensors"
        shard = sorted(pieces[start : start + _SHARD_PROMPTS], key=lambda p: len(p.token_ids))
        if _shard_complete(path):
            done += len(shard)
            continue
        if budget_s is not None and done and time.monotonic() - begin >= budget_s:
            complete = False
            break
        sequences = []
        position = 0
        while position < len(shard):
            count = max(1, batch_tokens // len(shard[min(position + 63, len(shard) - 1)].token_ids))
            batch = [list(p.token_ids) for p in shard[position : position + count]]
            width = max(len(r) for r in batch)
            # Padding on the right needs no mask: a causal model never looks there.
            ids = torch.tensor([r + [0] * (width - len(r)) for r in batch], device=head.device)
            with torch.inference_mode():
                states = target.base_model(input_ids=ids, use_cache=False).last_hidden_state
                for row, (tokens_of_row, piece) in enumerate(zip(batch, shard[position : position + count], strict=True)):
                    hidden = states[row, : len(tokens_of_row) - 1]
                    greedy = functional.linear(hidden, head).argmax(-1).cpu()
                    sequences.append(
                        CachedSequence(torch.tensor(tokens_of_row), 1, hidden.cpu().clone(), greedy, piece.category, piece.id)
                    )
                    tokens += len(tokens_of_row) - 1
            position += len(batch)
            if progress is not None:
                seconds = time.monotonic() - begin
                progress({"done": done + position, "total": len(pieces), "tokens": tokens,
                          "tokens_per_s": tokens / max(seconds, 1e-9), "seconds": seconds})  # fmt: skip
        done += len(shard)
        _save_shard(path, sequences, True)
    if meta.get("complete") != complete:
        write_json(folder / "cache.json", {**meta, "complete": complete})
    return TextCache.load(folder)


def _read_texts(path: Path) -> list[str]:
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise MissingDataError(f"text file not found: {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ArchsearchError(f"cannot read the text file {path}: {error}; it must be UTF-8") from error
    if path.suffix != ".jsonl":
        return [part for part in content.split("\n\n") if part.strip()]
    texts = []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ArchsearchError(f"text file {path}, line {number}: not JSON ({error.msg})") from None
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise ArchsearchError(f'text file {path}, line {number}: no text field; write {{"text": "..."}}')
        texts.append(row["text"])
    return texts


# ------------------------------------------------------------------------------------------------------- draft vocabulary


@dataclass(frozen=True, slots=True)
class TokenFrequencies:
    """How often every token of the vocabulary [vocab_size] was written by the target, and stood in prompts or plain text."""

    written: np.ndarray
    text: np.ndarray


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """The tokens a draft can propose (sorted ids) and the share of the target's written tokens that they cover."""

    token_ids: tuple[int, ...]
    coverage: float


def token_frequencies(cache: TextCache, *others: TextCache) -> TokenFrequencies:
    """Counts over one or several caches; plain text counts as text, never as written."""
    written = np.zeros(cache.vocab_size, dtype=np.int64)
    text = np.zeros(cache.vocab_size, dtype=np.int64)
    for one in (cache, *others):
        plain = one.meta["fingerprint"]["settings"]["kind"] == "plain"
        for sequence in one.sequences:
            ids = sequence.token_ids.numpy()
            np.add.at(text, ids if plain else ids[: sequence.prompt_tokens], 1)
            if not plain:
                np.add.at(written, ids[sequence.prompt_tokens :], 1)
    return TokenFrequencies(written, text)


def choose_draft_vocab(frequencies: TokenFrequencies, size: int, tokenizer: Any) -> DraftVocabulary:
    """The `size` tokens a draft should keep: special tokens and the end of text always, then what the target writes most, then
    what prompts and plain text hold most, then the lowest ids (byte-pair merges are numbered by frequency). After FR-Spec
    (arXiv 2502.14856), which ranks by the frequency in a corpus only.
    """
    vocab_size = int(frequencies.written.shape[0])
    if not 0 < size <= vocab_size:
        raise ArchsearchError(f"a draft vocabulary must hold between 1 and {vocab_size} tokens, got {size}")
    always = {int(i) for i in tokenizer.all_special_ids if 0 <= int(i) < vocab_size}
    if tokenizer.eos_token_id is not None:
        always.add(int(tokenizer.eos_token_id))
    if size < len(always):
        raise ArchsearchError(f"a draft vocabulary of {size} tokens cannot hold the {len(always)} special tokens; choose more")
    special = np.zeros(vocab_size, dtype=bool)
    special[sorted(always)] = True
    # lexsort: the last key is the first criterion.
    order = np.lexsort((np.arange(vocab_size), -frequencies.text, -frequencies.written, ~special))
    kept = np.sort(order[:size])
    total = int(frequencies.written.sum())
    coverage = float(frequencies.written[kept].sum() / total) if total else 0.0
    return DraftVocabulary(tuple(int(i) for i in kept), coverage)
