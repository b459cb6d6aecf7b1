"""Making a text cache shard by shard: the one loop in which all texts are made, resumed, stopped by a budget and reported."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archsearch.files import write_json
from archsearch.text.batch import Report
from archsearch.text.cache import (
    SHARD_PROMPTS,
    CachedSequence,
    TextCache,
    digest,
    open_folder,
    save_shard,
    shard_complete,
    target_fingerprint,
)
from archsearch.text.prompts import EncodedPrompt
from archsearch.text.settings import Progress

if TYPE_CHECKING:
    import torch

# (texts of the shard, the shard's number, deadline, report) -> (sequences, whether all of them came to their end)
WriteShard = Callable[[Sequence[EncodedPrompt], int, float | None, Report], tuple[list[CachedSequence], bool]]


@dataclass(frozen=True)
class CacheJob:
    """What a cache is made of: `texts` in shards of SHARD_PROMPTS, each by `write`; `settings` go into its fingerprint."""

    folder: Path
    target: Any
    head: torch.Tensor
    texts: Sequence[EncodedPrompt]
    settings: dict[str, Any]
    write: WriteShard

    def fingerprint(self) -> dict[str, Any]:
        """What a cache must have been made for to be continued."""
        return {
            "target": target_fingerprint(self.target),
            "prompts": digest(json.dumps([text.token_ids for text in self.texts])),
            "settings": {**self.settings, "shard_prompts": SHARD_PROMPTS, "dtype": str(self.head.dtype)},
        }


def make_cache(job: CacheJob, begin: float, budget_s: float | None, progress: Progress | None) -> TextCache:
    """Write the shards that are not there yet, until `budget_s` seconds after `begin`; finished ones are used as they are.

    Raises ArchsearchError when the folder was made for another target, other texts or settings.
    """
    meta = open_folder(job.folder, job.fingerprint(), job.head)
    deadline = None if budget_s is None else begin + budget_s
    done = tokens = 0
    complete = True
    for index, start in enumerate(range(0, len(job.texts), SHARD_PROMPTS)):
        shard = job.texts[start : start + SHARD_PROMPTS]
        path = job.folder / f"shard-{index:05d}.safetensors"
        if shard_complete(path):
            done += len(shard)
            continue
        if deadline is not None and done and time.monotonic() >= deadline:
            complete = False
            break
        sequences, complete = job.write(shard, index, deadline, _reporter(progress, len(job.texts), done, tokens, begin))
        if sequences:
            save_shard(path, sequences, complete)
        if not complete:
            break
        done += len(shard)
        tokens += sum(int(s.greedy_ids.shape[0]) for s in sequences)
    if meta.get("complete") != complete:
        write_json(job.folder / "cache.json", {**meta, "complete": complete})
    return TextCache.load(job.folder)


def _reporter(progress: Progress | None, total: int, done: int, tokens: int, begin: float) -> Report:
    """Turns what one shard reports into progress of the whole."""

    def report(what: str, ended: int, written: int) -> None:
        if progress is not None:
            seconds = time.monotonic() - begin
            progress({"what": what, "done": done + ended, "total": total, "tokens": tokens + written,
                      "tokens_per_s": (tokens + written) / max(seconds, 1e-9), "seconds": seconds})  # fmt: skip

    return report
