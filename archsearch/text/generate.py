"""Text that a target writes for prompts, with its hidden states."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from archsearch.errors import ArchsearchError
from archsearch.progress import Progress, silent
from archsearch.text.batch import BatchWriter, Report
from archsearch.text.cache import CachedSequence, TextCache
from archsearch.text.prompts import (
    EncodedPrompt,
    Prompt,
    context_tokens,
    encode_prompts,
    prompt_limit,
)
from archsearch.text.settings import Writing
from archsearch.text.shards import CacheJob, Store, Work, make_cache

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULTS: Final = Writing()


def generate_text(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    cache_dir: Path | str,
    writing: Writing = DEFAULTS,
    budget_s: float | None = None,
    progress: Progress = silent,
) -> TextCache:
    """Text that `target` writes for `prompts`, with its hidden states, in `cache_dir`.

    Prompts that leave no room for an answer in the target's context are left out, and that is said.
    The rest: `write_answers`.
    """
    limit = prompt_limit(context_tokens(target.config), writing.max_new_tokens)
    return write_answers(
        target,
        tokenizer,
        encode_prompts(prompts, tokenizer, max_tokens=limit),
        cache_dir=cache_dir,
        writing=writing,
        budget_s=budget_s,
        progress=progress,
    )


def write_answers(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    encoded: Sequence[EncodedPrompt],
    *,
    cache_dir: Path | str,
    writing: Writing = DEFAULTS,
    budget_s: float | None = None,
    progress: Progress = silent,
) -> TextCache:
    """Text that `target` writes behind the tokens of each prompt, with its hidden states, in
    `cache_dir`.

    Stops after `budget_s` seconds with what is there: answers under way are cut, prompts that were
    not reached have none. Called again, it uses the finished answers and goes on with those that
    were cut. `progress` is called after every pass of the target. Raises ArchsearchError when
    `cache_dir` was made for another target, other prompts or settings.
    """
    from archsearch.models.runtime import tune_malloc

    tune_malloc()
    begin = time.monotonic()
    head, ends = plain_head(target), eos_ids(target, tokenizer)
    writer = BatchWriter(target, head, ends, writing)

    def write(work: Sequence[Work], deadline: float | None, report: Report, store: Store) -> bool:
        seed = writing.seed * 1_000_003
        rows = {writer.row(w.text, seed + w.shard, w.place, w.begun): w.number for w in work}
        finished = writer.write_rows(
            list(rows), report, deadline, lambda row: store(rows[row], row.sequence(), True)
        )
        for row, number in rows.items():
            if row.ids and not row.ended:
                store(number, row.sequence(), False)
        return finished

    def ended(sequence: CachedSequence) -> bool:
        return (
            len(sequence.written) >= writing.max_new_tokens or int(sequence.token_ids[-1]) in ends
        )

    settings = {"kind": "written", **writing.to_dict()}
    job = CacheJob(Path(cache_dir), target, head, encoded, settings, write, ended)
    return make_cache(job, begin, budget_s, progress)


def eos_ids(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Token ids that end an answer: the generation config's and the tokenizer's."""
    found: set[int] = set()
    configs = (getattr(target, "generation_config", None), target.config, tokenizer)
    for value in (getattr(config, "eos_token_id", None) for config in configs):
        found.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return tuple(sorted(found))


def plain_head(target: PreTrainedModel) -> torch.Tensor:
    """The head's weight [vocab, hidden]; only heads whose logits are exactly hidden @ weight.T can
    be rebuilt later.

    Raises ArchsearchError for the others.
    """
    module, config = target.get_output_embeddings(), target.config
    for name in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if (value := getattr(config, name, None)) not in (None, 1, 1.0):
            raise ArchsearchError(
                f"the target's {name}={value} changes its logits; such targets are not"
                " supported yet"
            )
    if getattr(module, "bias", None) is not None:
        raise ArchsearchError(
            "the target's language-model head has a bias; such targets are not supported yet"
        )
    weight: torch.Tensor = module.weight.detach()
    return weight
