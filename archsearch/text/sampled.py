"""Text that a target samples, with a nucleus where one is asked for."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from archsearch.text.cache import CachedSequence, TextCache, digest, open_folder, save_shard, shard_complete, target_fingerprint
from archsearch.text.generate import eos_ids, generate_text, plain_head
from archsearch.text.prompts import encode_prompts

if TYPE_CHECKING:
    from archsearch.text.cache import CachedSequence, TextCache
    from archsearch.text.generate import Progress
    from archsearch.text.prompts import EncodedPrompt, Prompt

_SHARD_PROMPTS: Final = 64  # a kill loses at most one shard


def sample_text(
    target: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    cache_dir: Path | str,
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    batch_size: int = 32,
    progress: Progress | None = None,
) -> TextCache:
    """Text that `target` samples at `temperature` from its nucleus of `top_p`, with its hidden states, in `cache_dir`.

    Resumes and refuses as `archsearch.text.generate.generate_text`, which writes it where there is no nucleus (`top_p` 1) or
    nothing is sampled (`temperature` 0).
    """
    if temperature == 0 or top_p >= 1.0:
        return generate_text(
            target, tokenizer, prompts, cache_dir=cache_dir, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed,
            progress=progress,
        )  # fmt: skip
    from archsearch.files import write_json

    begin = time.monotonic()
    encoded = encode_prompts(prompts, tokenizer)
    ends = eos_ids(target, tokenizer)
    head = plain_head(target)
    fingerprint = {
        "target": target_fingerprint(target),
        "prompts": digest(json.dumps([p.token_ids for p in encoded])),
        "settings": {"kind": "written", "max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p,
                     "seed": seed, "shard_prompts": _SHARD_PROMPTS, "dtype": str(head.dtype)},
    }  # fmt: skip
    folder = Path(cache_dir)
    meta = open_folder(folder, fingerprint, head)
    done = tokens = 0
    for index, start in enumerate(range(0, len(encoded), _SHARD_PROMPTS)):
        path = folder / f"shard-{index:05d}.safetensors"
        shard = sorted(encoded[start : start + _SHARD_PROMPTS], key=lambda p: len(p.token_ids))
        if shard_complete(path):
            done += len(shard)
            continue
        sequences: list[CachedSequence] = []
        for first in range(0, len(shard), batch_size):
            batch = shard[first : first + batch_size]
            written = _sample_batch(
                target, batch, ends, max_new_tokens, temperature, top_p, seed * 1_000_003 + index * 1009 + first
            )
            sequences += with_states(target, batch, written)
            done += len(batch)
            tokens += sum(map(len, written))
            if progress is not None:
                seconds = time.monotonic() - begin
                progress({"done": done, "total": len(encoded), "tokens": tokens, "tokens_per_s": tokens / max(seconds, 1e-9),
                          "seconds": seconds})  # fmt: skip
        save_shard(path, sequences, True)
    write_json(folder / "cache.json", {**meta, "complete": True})
    return TextCache.load(folder)


def _sample_batch(
    target: Any,
    batch: Sequence[EncodedPrompt],
    ends: tuple[int, ...],
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
) -> list[list[int]]:
    """The written tokens of every prompt, the end token included."""
    import torch
    from transformers import GenerationConfig

    from archsearch.models.runtime import quiet_transformers

    rows = [list(p.token_ids) for p in batch]
    width = max(map(len, rows))
    filler = ends[0] if ends else 0
    ids = torch.tensor([[filler] * (width - len(r)) + r for r in rows], device=target.device)
    mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows], device=target.device)
    config = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=True, temperature=temperature, top_k=0, top_p=top_p, repetition_penalty=1.0,
        eos_token_id=list(ends) or None, pad_token_id=filler, bos_token_id=target.generation_config.bos_token_id, num_beams=1,
    )  # fmt: skip
    with torch.inference_mode(), torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(seed)
        output = target.generate(ids, attention_mask=mask, generation_config=config)[:, width:].tolist()
    written = []
    for row in output:
        length = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        written.append(row[:length])
    return written


def with_states(target: Any, batch: Sequence[EncodedPrompt], written: Sequence[Sequence[int]]) -> list[CachedSequence]:
    """Texts `written` by whomever with the target's state and argmax at every written token, from one pass over each."""
    import torch
    from torch.nn import functional

    head = plain_head(target)
    sequences = []
    for prompt, tokens in zip(batch, written, strict=True):
        ids = torch.tensor([*prompt.token_ids, *tokens])
        start = len(prompt.token_ids)
        with torch.inference_mode():
            states = target.base_model(input_ids=ids[None, :-1].to(head.device), use_cache=False).last_hidden_state[
                0, start - 1 :
            ]
            greedy = functional.linear(states, head).argmax(-1).cpu()
        sequences.append(CachedSequence(ids, start, states.cpu().clone(), greedy, prompt.category, prompt.id))
    return sequences
