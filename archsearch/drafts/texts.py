"""The texts of a run: what the target wrote for its prompts, in folders of the run (docs/files.md),
of which `drafts.growth` fills those of further text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from archsearch.drafts.growth import Growth
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.files import write_json
from archsearch.progress import ProgressLine, say
from archsearch.records import load, save
from archsearch.text.prompt_files import read_texts
from archsearch.text.prompt_set import PromptSet, answer_faults, prompt_faults
from archsearch.text.prompts import EncodedPrompt, Prompt, encode_prompts, prompt_limit
from archsearch.text.settings import Writing
from archsearch.training.settings import HELDOUT_SEQUENCES

if TYPE_CHECKING:
    from archsearch.acceptance.estimator import VocabularyCoverage
    from archsearch.acceptance.measured import Trace
    from archsearch.models.load import LoadedTarget
    from archsearch.text.cache import CachedSequence, TextCache
    from archsearch.text.vocabulary import DraftVocabulary

# Of the time to write: plain text is read much faster than answers are written.
PLAIN_SHARE: Final = 0.3
COVERAGE_SIZES: Final = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


class RunTexts:
    """Writes the texts of one run, or finds them written; every draft of the run learns from and is
    measured on the same. `layers`: of the target, whose inputs are kept on the way for heads."""

    layers: tuple[int, ...] = ()

    def __init__(
        self,
        target: LoadedTarget,
        prompts: PromptSet,
        folder: Path,
        answer_tokens: int,
        plain_text: Path | None = None,
    ) -> None:
        self.target, self.prompts, self.folder = target, prompts, folder
        self.answer_tokens, self.plain_text = answer_tokens, plain_text
        self._caches: dict[str, TextCache] = {}
        self._heldout_done = folder / "heldout" / "done.json"
        self.growth = Growth(self)

    def writer(self) -> Any:
        """The target as it writes what drafts learn from: in the dtype in which this run's text was
        begun, at first in the fastest (`LoadedTarget.fast_dtype`). Held-out text is written in the
        run's own, as the user decodes."""
        from archsearch.text.cache import read_meta

        if (meta := read_meta(self.folder / "text")) is None:
            return self.target.model(self.target.fast_dtype())
        dtype = str(meta.fingerprint.settings["dtype"])
        return self.target.model(dtype.removeprefix("torch."))

    def write_training(self, budget_s: float) -> None:
        """The training text, written within about `budget_s`; a finished or interrupted cache is
        used and continued."""
        from archsearch.text.encode import encode_text

        self.prompts.check_apart()
        prompts, writing = self.encode(self.prompts.train), Writing(self.answer_tokens)
        cache = self._caches["text"] = self.growth.timed("text", prompts, writing, budget_s)
        for fault in (*prompt_faults(self.prompts.train), *answer_faults(cache.sequences)):
            say(fault)
        if self.plain_text is not None:
            with ProgressLine("target reads plain text") as line:
                self._caches["plain"] = encode_text(
                    self.writer(),
                    self.target.tokenizer,
                    read_texts(self.plain_text),
                    cache_dir=self.folder / "plain",
                    budget_s=PLAIN_SHARE * budget_s,
                    progress=line,
                )

    def answers(
        self,
        folder: str,
        prompts: Sequence[EncodedPrompt],
        writing: Writing,
        budget_s: float | None,
    ) -> TextCache:
        """What the target writes for `prompts`, in a folder of the run."""
        from archsearch.text.generate import write_answers

        what = {"text": "training", "heldout": "held-out"}.get(folder, "more training")
        if not folder.startswith("asked"):  # prompts, from which nothing learns
            writing = replace(writing, layers=self.layers)
        with ProgressLine(f"target writes {what} text") as line:
            return write_answers(
                self.target.model() if folder == "heldout" else self.writer(),
                self.target.tokenizer,
                prompts,
                cache_dir=self.folder / folder,
                writing=writing,
                budget_s=budget_s,
                progress=line,
            )

    def write_training_once(self, budget_s: float) -> None:
        """As `write_training`, but a text that stopped at its budget is finished all the same:
        drafts of a run must share it."""
        done = self.folder / "text" / "done.json"
        if not done.exists():
            self.write_training(budget_s)
            write_json(done, {"tokens": self.training().written_tokens})

    def forget(self, *folders: str) -> None:
        """Folders have changed (none named: any may have): read them again when next asked for."""
        for folder in folders or tuple(self._caches):
            self._caches.pop(folder, None)

    def _read(self, name: str) -> TextCache:
        from archsearch.text.cache import TextCache

        if name not in self._caches:
            self._caches[name] = TextCache.load(self.folder / name)
        return self._caches[name]

    def parted(self) -> tuple[list[CachedSequence], list[CachedSequence]]:
        """(answers to training prompts that drafts are trained on, those that none is)."""
        from archsearch.training.batches import split_heldout

        return split_heldout(self.training().sequences, HELDOUT_SEQUENCES)

    def training(self) -> TextCache:
        """The training text written before. Raises MissingDataError where there is none."""
        if "text" not in self._caches and not (self.folder / "text" / "cache.json").exists():
            raise MissingDataError(
                f"{self.folder} has no training text; run the search with --confirm, or"
                " archsearch train"
            )
        return self._read("text")

    def all_training(self) -> list[TextCache]:
        """Everything that drafts are trained on: the training text first, then plain text and
        further answers."""
        plain = ["plain"] if any((self.folder / "plain").glob("shard-*.safetensors")) else []
        return [self.training(), *(self._read(name) for name in plain + self.growth.folders())]

    def heldout(self, budget_s: float | None = None) -> TextCache:
        """What the target writes, greedily, for the held-out prompts: half of it chooses
        (`choosing`).

        Written within `budget_s` where one is given; what is there then is all there will be, so
        that drafts share it.
        """
        from archsearch.text.generate import eos_ids

        if "heldout" not in self._caches and not self._heldout_done.exists():
            prompts, writing = self.encode(self.prompts.heldout), Writing(self.answer_tokens)
            cache = self.answers("heldout", prompts, writing, budget_s)
            write_json(self._heldout_done, {"tokens": cache.written_tokens})
            self._caches["heldout"] = cache
            ends = eos_ids(self.target.model(), self.target.tokenizer)
            cut = sum(not s.ended(self.answer_tokens, ends) for s in cache.sequences)
            if 2 * cut > len(cache.sequences):
                say(
                    f"time cut {cut} of {len(cache.sequences)} held-out answers short: alpha,"
                    " of beginnings, is mostly too high; search anew with a larger --time-budget"
                )
        return self._read("heldout")

    def check_prompts(self) -> None:
        """Raise ArchsearchError where held-out text was written for other prompts than are held out
        now: the file has changed, and drafts may have been trained on these."""
        if not self._heldout_done.exists():
            return
        now = {prompt.token_ids for prompt in self.encode(self.prompts.heldout)}
        if any(s.prompt_ids not in now for s in self.heldout().sequences):
            raise ArchsearchError(
                f"the texts of {self.folder} were written for other prompts than are held out now:"
                " bring their file back, or search anew with another --run"
            )

    def choosing(self) -> TextCache:
        """The part of the held-out text that drafts are compared and chosen on; the other prompts
        confirm."""
        cache = self.heldout()
        if not self.prompts.split:
            return cache
        asked = {prompt.token_ids for prompt in self.encode(self.prompts.choosing)}
        chosen = [s for s in cache.sequences if s.prompt_ids in asked]
        return cache.part(chosen) if chosen else cache

    def traced(self, trace: Trace) -> TextCache | None:
        """The held-out text of a trace: what chooses, or all (0.1.0); None where it is
        another, or none was written."""
        traced = list(zip(trace.ids, map(len, trace.agreements), strict=True))  # ids may be empty
        if self._heldout_done.exists():
            for cache in (self.choosing(), self.heldout()):
                if traced == [(text.id, len(text.greedy_ids)) for text in cache.sequences]:
                    return cache
        return None

    def vocabulary(self, folder: Path, rows: int) -> DraftVocabulary:
        """The `rows` tokens that the drafter in `folder` keeps, by their frequency in the training
        texts when it was first asked for: texts that have grown since would choose others, and a
        checkpoint would not fit."""
        from archsearch.text.vocabulary import (
            DraftVocabulary,
            choose_draft_vocab,
            token_frequencies,
        )

        file = folder / "vocabulary.json"
        if (stored := load(file, "draft vocabulary", DraftVocabulary)) is not None:
            return stored
        frequencies = token_frequencies(*self.all_training())
        chosen = choose_draft_vocab(frequencies, rows, self.target.tokenizer)
        save(file, chosen)
        return chosen

    def encode(self, prompts: Sequence[Prompt]) -> list[EncodedPrompt]:
        """Token ids of prompts; those that leave no room for an answer in the target's context are
        left out."""
        limit = prompt_limit(self.target.config, self.answer_tokens)
        return encode_prompts(prompts, self.target.tokenizer, max_tokens=limit)

    def coverage(self) -> VocabularyCoverage:
        """Which share of the held-out text the most frequent tokens of the training text cover, by
        head size."""
        from archsearch.acceptance.estimator import VocabularyCoverage
        from archsearch.text.vocabulary import choose_draft_vocab, token_frequencies

        frequencies = token_frequencies(self.training())
        heldout = token_frequencies(self.choosing()).written
        shares, best = [], 0.0
        for size in (size for size in COVERAGE_SIZES if size < len(heldout)):
            kept = list(choose_draft_vocab(frequencies, size, self.target.tokenizer).token_ids)
            best = max(best, float(heldout[kept].sum() / heldout.sum()))
            shares.append((size, best))
        return VocabularyCoverage((*shares, (len(heldout), 1.0)))
