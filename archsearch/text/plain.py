"""Plain text with the target's states, from one forward pass."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.files import write_json
from archsearch.text.cache import CachedSequence, TextCache, digest, open_folder, save_shard, shard_complete, target_fingerprint
from archsearch.text.generate import _SHARD_PROMPTS, Progress, plain_head
from archsearch.text.prompts import EncodedPrompt

if TYPE_CHECKING:
    pass


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
    head = plain_head(target)
    fingerprint = {
        "target": target_fingerprint(target),
        "prompts": digest(json.dumps([p.token_ids for p in pieces])),
        "settings": {"kind": "plain", "max_tokens": max_tokens, "shard_prompts": _SHARD_PROMPTS, "dtype": str(head.dtype)},
    }
    folder = Path(cache_dir)
    meta = open_folder(folder, fingerprint, head)
    done = tokens = 0
    complete = True
    for index, start in enumerate(range(0, len(pieces), _SHARD_PROMPTS)):
        path = folder / f"shard-{index:05d}.safetensors"
        shard = sorted(pieces[start : start + _SHARD_PROMPTS], key=lambda p: len(p.token_ids))
        if shard_complete(path):
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
        save_shard(path, sequences, True)
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
