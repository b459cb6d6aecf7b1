"""Text that a target writes for prompts, with its hidden states."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from archsearch.errors import ArchsearchError
from archsearch.files import write_json
from archsearch.text.cache import CachedSequence, TextCache, digest, open_folder, save_shard, shard_complete, target_fingerprint
from archsearch.text.growing_cache import GrowingCache
from archsearch.text.prompts import EncodedPrompt, Prompt, encode_prompts

if TYPE_CHECKING:
    import torch


_SHARD_PROMPTS: Final = 384  # a kill loses at most one shard


_PREFILL_ROWS: Final = 48  # prompts per prefill pass: activations of more fall out of the processor's cache


Progress = Callable[[dict[str, Any]], None]


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

    from archsearch.models.runtime import tune_malloc

    tune_malloc()
    begin = time.monotonic()
    encoded = encode_prompts(prompts, tokenizer)
    eos = eos_ids(target, tokenizer)
    head = plain_head(target)
    fingerprint = {
        "target": target_fingerprint(target),
        "prompts": digest(json.dumps([p.token_ids for p in encoded])),
        "settings": {"kind": "written", "max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed,
                     "shard_prompts": _SHARD_PROMPTS, "dtype": str(head.dtype)},
    }  # fmt: skip
    folder = Path(cache_dir)
    meta = open_folder(folder, fingerprint, head)
    deadline = None if budget_s is None else begin + budget_s
    done = tokens = 0
    spent = 0.0
    complete = True
    for index, start in enumerate(range(0, len(encoded), _SHARD_PROMPTS)):
        shard = encoded[start : start + _SHARD_PROMPTS]
        path = folder / f"shard-{index:05d}.safetensors"
        if shard_complete(path):
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
            save_shard(path, sequences, finished)
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


def plain_head(target: Any) -> torch.Tensor:
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
