"""Text that a target writes for prompts, with its hidden states; and the one place where a text
cache is made shard by shard: resumed, stopped by a budget and reported."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from archsearch.errors import ArchsearchError
from archsearch.files import digest
from archsearch.progress import Progress, silent
from archsearch.records import save
from archsearch.text.auxiliary import MOST_KEPT_BYTES, ShardStates
from archsearch.text.batch import BatchWriter, Report
from archsearch.text.cache import (
    META_FILE,
    SHARD_PROMPTS,
    CachedSequence,
    Fingerprint,
    TextCache,
    load_shard,
    open_folder,
    save_shard,
    shard_complete,
    target_fingerprint,
)
from archsearch.text.prompts import EncodedPrompt, Prompt, encode_prompts, prompt_limit
from archsearch.text.settings import Writing

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
    progress: Progress = silent,
) -> TextCache:
    """`write_answers` to `prompts`; those that leave no room for an answer in the target's context
    are left out, and that is said."""
    limit = prompt_limit(target.config, writing.max_new_tokens)
    encoded = encode_prompts(prompts, tokenizer, max_tokens=limit)
    return write_answers(
        target, tokenizer, encoded, cache_dir=cache_dir, writing=writing, progress=progress
    )


def write_answers(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    encoded: Sequence[EncodedPrompt],
    *,
    cache_dir: Path | str,
    writing: Writing,
    budget_s: float | None = None,
    progress: Progress = silent,
) -> TextCache:
    """Text that `target` writes behind the tokens of each prompt, with its hidden states, in
    `cache_dir`.

    Stops after `budget_s` seconds with what is there: answers under way are cut, prompts that were
    not reached have none. Called again, it goes on with these. `progress` is called after every
    pass of the target. Raises as `open_folder`.
    """
    from archsearch.models.runtime import tune_malloc

    tune_malloc()
    begin = time.monotonic()
    head, ends = plain_head(target), eos_ids(target, tokenizer)
    writer = BatchWriter(target, head, ends, writing)

    def write(work: Sequence[Work], deadline: float | None, report: Report, store: Store) -> bool:
        rows = {}
        for one in work:
            shard, place = divmod(one.number, SHARD_PROMPTS)
            seed = writing.seed * 1_000_003 + shard
            rows[writer.row(one.text, seed, place, one.begun)] = one.number
        finished = writer.write_rows(
            list(rows), report, deadline, lambda row: store(rows[row], row.sequence(), True)
        )
        for row, number in rows.items():
            if row.ids and not row.ended:
                store(number, row.sequence(), False)
        return finished

    settings = {"kind": "written", **writing.to_dict()}
    ended = partial(CachedSequence.ended, most=writing.max_new_tokens, ends=ends)
    job = CacheJob(Path(cache_dir), target, head, encoded, settings, write, ended, writing.layers)
    return make_cache(job, begin, budget_s, progress)


def eos_ids(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> tuple[int, ...]:
    """Token ids that end an answer: the generation config's and the tokenizer's."""
    found: set[int] = set()
    configs = (getattr(target, "generation_config", None), target.config, tokenizer)
    for value in (getattr(config, "eos_token_id", None) for config in configs):
        found.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return tuple(sorted(found))


def check_logits(config: object, whose: str) -> None:
    """Raise ArchsearchError where a model's logits are more than its states times its head."""
    for name in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if (value := getattr(config, name, None)) not in (None, 1, 1.0):
            raise ArchsearchError(
                f"the {whose}'s {name}={value} changes its logits; such {whose}s are not supported"
                " yet"
            )


def plain_head(target: PreTrainedModel) -> torch.Tensor:
    """The head's weight [vocab, hidden]; only heads whose logits are exactly hidden @ weight.T can
    be rebuilt later.

    Raises ArchsearchError for the others.
    """
    check_logits(target.config, "target")
    module = target.get_output_embeddings()
    if getattr(module, "bias", None) is not None:
        raise ArchsearchError(
            "the target's language-model head has a bias; such targets are not supported yet"
        )
    return module.weight.detach()


SAVE_EVERY_S: Final = 60.0  # a kill loses at most what was written since


@dataclass(frozen=True, slots=True)
class Work:
    """One text still to be made: its number among all, and what of it was made before a cut."""

    number: int
    text: EncodedPrompt
    begun: CachedSequence | None = None


# (number of the text, what was made of it, whether it came to its end)
Store = Callable[[int, CachedSequence, bool], None]
# (texts to be made, deadline, report, store) -> whether all of them came to their end
Write = Callable[[Sequence[Work], float | None, Report, Store], bool]


@dataclass(frozen=True)
class CacheJob:
    """What a cache is made of: `texts`, made by `write`; `settings` go into its fingerprint.
    `ended`: whether a text that was found in an unfinished shard needs no more; `layers`: whose
    inputs come with the texts."""

    folder: Path
    target: PreTrainedModel
    head: torch.Tensor
    texts: Sequence[EncodedPrompt]
    settings: dict[str, object]
    write: Write
    ended: Callable[[CachedSequence], bool] = lambda sequence: True
    layers: tuple[int, ...] = ()

    def fingerprint(self) -> Fingerprint:
        """What a cache must have been made for to be continued."""
        prompts = digest([text.token_ids for text in self.texts])[:16]
        own = {"shard_prompts": SHARD_PROMPTS, "dtype": str(self.head.dtype)}
        return Fingerprint(target_fingerprint(self.target), prompts, {**self.settings, **own})


def make_cache(
    job: CacheJob, begin: float, budget_s: float | None, progress: Progress
) -> TextCache:
    """Make the texts that are missing, until `budget_s` seconds after `begin`; cut ones go on.
    `progress` is in seconds of the budget, in texts where there is none. Raises as
    `open_folder`."""
    meta = open_folder(job.folder, job.fingerprint(), job.head)
    deadline = None if budget_s is None else begin + budget_s
    shards = [_Shard.find(job, index) for index in range(-(-len(job.texts) // SHARD_PROMPTS))]
    work = [work for shard in shards for work in shard.left()]
    done = len(job.texts) - len(work)
    if work and not (deadline is not None and done and time.monotonic() >= deadline):

        def report(what: str, ended: int, written: int) -> None:
            seconds, ready, total = time.monotonic() - begin, done + ended, len(job.texts)
            rate = written / max(seconds, 1e-9)
            words = f"{what}: {ready} of {total} answered, {written} tokens, {rate:.0f}/s"
            progress(words, *((ready, total) if budget_s is None else (seconds, budget_s)))

        def store(number: int, text: CachedSequence, ended: bool) -> None:
            shards[number // SHARD_PROMPTS].take(number, text, ended)

        try:
            complete = job.write(work, deadline, report, store)
        finally:  # what was written before Ctrl-C is kept
            for shard in shards:
                shard.save()
    else:
        complete = not work
    if meta.complete != complete:
        save(job.folder / META_FILE, replace(meta, complete=complete))
    return TextCache.load(job.folder)


@dataclass
class _Shard:
    """SHARD_PROMPTS texts that share a file. `found`: what was made of each, by its number;
    `ended`: those that need no more; `kept`: bytes of states that came with them."""

    job: CacheJob
    path: Path
    numbers: range
    found: dict[int, CachedSequence] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    saved_at: float = field(default_factory=time.monotonic)
    changed: bool = False
    kept: int = 0

    @classmethod
    def find(cls, job: CacheJob, index: int) -> _Shard:
        numbers = range(index * SHARD_PROMPTS, min((index + 1) * SHARD_PROMPTS, len(job.texts)))
        shard = cls(job, job.folder / f"shard-{index:05d}.safetensors", numbers)
        if shard_complete(shard.path):
            shard.ended = set(numbers)
        elif shard.path.exists():
            shard._find_begun()
        return shard

    def _states(self, sequences: Sequence[CachedSequence]) -> ShardStates:
        job = self.job
        return ShardStates(self.path, job.layers, target_fingerprint(job.target), tuple(sequences))

    def _find_begun(self) -> None:
        """Which texts the sequences of an unfinished shard are: those with the same prompt, in
        their order."""
        job, waiting = self.job, dict[tuple[int, ...], list[int]]()
        for number in reversed(self.numbers):
            waiting.setdefault(tuple(job.texts[number].token_ids), []).append(number)
        whole = job.settings.get("kind") != "written"  # a piece of plain text is its own prompt
        for sequence in self._states(list(load_shard(self.path))).known():
            prompt = sequence.token_ids if whole else sequence.token_ids[: sequence.prompt_tokens]
            if numbers := waiting.get(tuple(prompt.tolist())):
                number = numbers.pop()
                self.found[number] = sequence
                if job.ended(sequence):
                    self.ended.add(number)

    def left(self) -> list[Work]:
        numbers = (number for number in self.numbers if number not in self.ended)
        return [Work(n, self.job.texts[n], self.found.get(n)) for n in numbers]

    def take(self, number: int, sequence: CachedSequence, ended: bool) -> None:
        """Keep a text; the file is written once all of the shard ended, and once in a while
        before."""
        self.kept += 0 if sequence.states is None else sequence.states.nbytes
        if self.kept > MOST_KEPT_BYTES:
            sequence = replace(sequence, states=None)
        self.found[number] = sequence
        self.changed = True
        if ended:
            self.ended.add(number)
        if len(self.ended) == len(self.numbers) or time.monotonic() - self.saved_at >= SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        if not self.changed:
            return
        sequences = [self.found[n] for n in sorted(self.found)]
        save_shard(self.path, sequences, len(self.ended) == len(self.numbers))
        if self.job.layers:
            self._states(sequences).keep()
        self.changed, self.saved_at = False, time.monotonic()
        if len(self.ended) == len(self.numbers):
            self.found = {}
