"""Further text of a run, source by source, where the greedy answers to its prompts are not enough.

Folders (docs/files.md) that were begun go on, and those of earlier versions are read. Prompts whose
answers are kept out to compare drafts on, and held-out prompts, get no further text and none like
them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal

from archsearch.records import load, save
from archsearch.text.prompts import EncodedPrompt, Prompt
from archsearch.text.settings import Writing
from archsearch.training.curves import Supply

if TYPE_CHECKING:
    from archsearch.drafts.texts import RunTexts
    from archsearch.text.cache import CachedSequence, TextCache

SourceName = Literal["answers", "invented"]

# What a written token of a source is worth, in tokens of greedy answers to the user's own prompts;
# tried in this order. Measured: invented, 0.7 with a band of 0.3 to 1 (benchmarks/results/
# 2026-11-26-invented), taken for less.
WORTH: Final[dict[SourceName, float]] = {"answers": 1.0, "invented": 0.5}
ASKED: Final = 192  # prompts that are asked for at once
MOST_INVENTED: Final = 20_000  # prompts; nobody has waited for so many
BARREN_ROUNDS: Final = 2  # of asking without one usable prompt: the target cannot
FIRST_YIELD: Final = 0.5  # usable prompts of those asked for, before any were
READ_COST: Final = 0.35  # of a token that is read, in tokens that are written (SmolLM2 on a CPU)
SPEED_FILE: Final = "writing.json"
ASKING_SHARE: Final = 0.4  # of the time, until there are prompts to answer
LEAST_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Speed:
    """What writing took so far in this run."""

    written: int = 0
    read: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Written tokens a second, each read one counted as READ_COST of one; 0 before anything was
        written."""
        return (self.written + READ_COST * self.read) / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Asked:
    """asked-N/prompts.json: how many prompts the target was asked for in a round, the usable ones,
    and why others were dropped."""

    asked: int
    prompts: tuple[Prompt, ...] = ()
    dropped: dict[str, int] = field(default_factory=dict)


class Growth:
    """What further text there can be for a run, and the writing of it."""

    def __init__(self, texts: RunTexts) -> None:
        self.texts = texts

    # -- what there is

    def folders(self) -> list[str]:
        """Names of the folders of further text that hold some."""
        path, names = self.texts.folder, ["answers", "longer", "followed"]
        for kind in ("more*", "invented-*"):
            names += sorted(found.name for found in path.glob(kind))
        return [name for name in names if any((path / name).glob("shard-*.safetensors"))]

    def speed(self) -> Speed:
        return load(self.texts.folder / SPEED_FILE, "speed of writing", Speed) or Speed()

    def supplies(self) -> list[Supply]:
        """What each source can still give, best first; [] before anything was written, since nobody
        knows how fast it goes."""
        rate, base = self.speed().tokens_per_s, self.texts.training()
        if rate <= 0 or not base.sequences:
            return []
        answer = base.written_tokens / len(base.sequences)
        own_share = base.written_tokens / sum(len(s) for s in base.sequences)
        found = []
        for name, worth in WORTH.items():
            prompts, extra_s = self._outlook(name, rate)
            if not prompts:
                continue
            written = len(prompts) * answer
            tokens = sum(prompts) + written
            seconds = (READ_COST * sum(prompts) + written) / rate + extra_s
            found.append(
                Supply(name, tokens, tokens / seconds, worth * written / tokens / own_share)
            )
        return found

    def _outlook(self, name: SourceName, rate: float) -> tuple[Sequence[int], float]:
        """(length of each prompt that a source has still to answer, seconds that finding the
        prompts takes)."""
        own = [len(p.token_ids) for _, p in self._prompts()]
        if name == "answers":
            return [len(p.token_ids) for p in self._unanswered()], 0.0
        rounds = self._rounds()
        if not own or self._exhausted(rounds):
            return (), 0.0
        asked, kept = sum(r.asked for r in rounds), sum(len(r.prompts) for r in rounds)
        share = (kept + 1) / (asked + 2) if asked else FIRST_YIELD
        count, mean = MOST_INVENTED - kept, sum(own) / len(own)
        return [round(mean)] * count, count * (READ_COST * 3 * mean + mean) / share / rate

    def _rounds(self) -> list[Asked]:
        paths = sorted(self.texts.folder.glob("asked-*/prompts.json"))
        return [found for path in paths if (found := load(path, "invented prompts", Asked))]

    def _exhausted(self, rounds: Sequence[Asked]) -> bool:
        last = rounds[-BARREN_ROUNDS:]
        barren = len(last) == BARREN_ROUNDS and not any(r.prompts for r in last)
        return barren or sum(len(r.prompts) for r in rounds) >= MOST_INVENTED

    def _complete(self, name: str) -> bool:
        from archsearch.text.cache import read_meta

        meta = read_meta(self.texts.folder / name)
        return meta is not None and meta.complete

    # -- writing

    def grow(self, budget_s: float) -> dict[str, int]:
        """Write further text for about `budget_s`, the best source that has some left first.
        Returns the written tokens that came from each. Never runs on without gain: a source that
        gives nothing is not asked again in this call."""
        deadline = time.monotonic() + budget_s
        gained: dict[str, int] = {}
        for name, write in (("answers", self._write_answers), ("invented", self._write_invented)):
            while (left := deadline - time.monotonic()) > LEAST_S and (tokens := write(left)):
                gained[name] = gained.get(name, 0) + tokens
        return gained

    def _write_answers(self, budget_s: float) -> int:
        return self._write("answers", self._unanswered(), budget_s)

    def _write_invented(self, budget_s: float) -> int:
        """The next round: prompts asked for, the usable ones answered. Rounds that gave no usable
        prompt end after a few."""
        deadline = time.monotonic() + budget_s
        while (left := deadline - time.monotonic()) > LEAST_S:
            rounds = self._rounds()
            if self._exhausted(rounds):
                return 0
            for number, done in enumerate(rounds):
                if done.prompts and not self._complete(f"invented-{number:03d}"):
                    break
            else:
                number, done = len(rounds), self._ask(rounds, ASKING_SHARE * left)
            if done.prompts:
                left = max(deadline - time.monotonic(), LEAST_S)
                return self._write(f"invented-{number:03d}", self.texts.encode(done.prompts), left)
        return 0

    def _ask(self, rounds: Sequence[Asked], budget_s: float) -> Asked:
        """Let the target write prompts, and keep the usable ones in asked-N/prompts.json."""
        from archsearch.text import supply
        from archsearch.text.generate import eos_ids

        tokenizer, number = self.texts.target.tokenizer, len(rounds)
        train = [prompt for prompt, _ in self._prompts()]
        openings = supply.askings(tokenizer, train, ASKED, seed=number)
        folder, (temperature, top_p) = f"asked-{number:03d}", supply.INVENTING
        turns: Sequence[CachedSequence] = ()
        if openings:
            writing = Writing(supply.PROMPT_TOKENS, temperature, top_p, seed=number + 1)
            turns = self.timed(folder, openings, writing, budget_s).sequences
        ends = eos_ids(self.texts.writer(), tokenizer)
        apart = [*self.texts.prompts.heldout, *(p for p, _ in self._prompts(kept_out=True))]
        before = [p for done in rounds for p in done.prompts]
        found = supply.invented(supply.turns_of(turns, tokenizer, ends), train, apart, before)
        asked = Asked(len(turns), found.prompts, found.dropped)
        save(self.texts.folder / folder / "prompts.json", asked)
        return asked

    def _write(self, folder: str, prompts: Sequence[EncodedPrompt], budget_s: float) -> int:
        """Written tokens that came to a folder."""
        if not prompts:
            return 0
        before = self.tokens(folder)[0]
        cache = self.timed(folder, prompts, Writing(self.texts.answer_tokens), budget_s)
        self.texts.forget(folder)
        return cache.written_tokens - before

    def timed(
        self, folder: str, prompts: Sequence[EncodedPrompt], writing: Writing, budget_s: float
    ) -> TextCache:
        """`RunTexts.answers`; what writing took is kept, for the outlook. Of answers that went on
        after a cut the prompt counts once only."""
        begin, before, was = time.monotonic(), self.tokens(folder), self.speed()
        cache = self.texts.answers(folder, prompts, writing, budget_s)
        after, seconds = self.tokens(folder), time.monotonic() - begin
        written, read = (now - then for now, then in zip(after, before, strict=True))
        if written > 0:
            speed = Speed(was.written + written, was.read + read, was.seconds + seconds)
            save(self.texts.folder / SPEED_FILE, speed)
        return cache

    def tokens(self, folder: str) -> tuple[int, int]:
        """(written tokens, tokens of their prompts) that lie in a folder."""
        from archsearch.text.cache import TextCache

        path = self.texts.folder / folder
        if not any(path.glob("shard-*.safetensors")):
            return 0, 0
        sequences = TextCache.load(path).sequences
        return sum(len(s.written) for s in sequences), sum(s.prompt_tokens for s in sequences)

    # -- which prompts

    def _prompts(self, kept_out: bool = False) -> list[tuple[Prompt, EncodedPrompt]]:
        """The training prompts that leave room for an answer, with their tokens: those that drafts
        are trained on, or those whose answers are `kept_out` to compare drafts on."""
        apart = {s.prompt_ids for s in self.texts.parted()[1]}
        prompts = self.texts.prompts.train
        numbered = [replace(prompt, id=str(number)) for number, prompt in enumerate(prompts)]
        return [
            (numbered[int(encoded.id)], encoded)
            for encoded in self.texts.encode(numbered)
            if (encoded.token_ids in apart) == kept_out
        ]

    def _unanswered(self) -> list[EncodedPrompt]:
        """Prompts that the first text left unanswered; none once answers/ is whole."""
        if self._complete("answers"):
            return []
        answered = {s.prompt_ids for s in self.texts.training().sequences}
        return [encoded for _, encoded in self._prompts() if encoded.token_ids not in answered]
