"""Further text of a run, source by source, where the greedy answers to its prompts are not enough.

    answers/        greedy answers to training prompts that the first text did not reach
    more/, more-N/  sampled answers to the training prompts
    invented-N/     greedy answers to prompts that the target wrote (asked-N/) in the user's style

Runs of earlier versions may hold longer/ and followed/ too: they are read.

Everything resumes: a folder that was begun goes on, and what a kill left is used. Prompts whose
answers are kept out to compare drafts on, and held-out prompts, get no further text and none like
them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

from archsearch.files import read_json, write_json
from archsearch.progress import ProgressLine
from archsearch.text.settings import Writing
from archsearch.training.data_plan import Supply
from archsearch.training.settings import HELDOUT_SEQUENCES

if TYPE_CHECKING:
    from archsearch.drafts.texts import RunTexts
    from archsearch.text.cache import TextCache
    from archsearch.text.prompts import EncodedPrompt, Prompt

SourceName = Literal["answers", "sampled", "invented"]

# What a written token of a source is worth, in tokens of greedy answers to the user's own prompts;
# tried in this order. Measured: sampled, 0.14 with a band of -0.2 to 0.6 (benchmarks/results/
# 2026-11-22-supply). Invented: assumed, not measured.
WORTH: Final[dict[SourceName, float]] = {"answers": 1.0, "sampled": 0.15, "invented": 0.15}
SAMPLED_TEMPERATURE: Final = 0.7  # near what the target writes greedily, yet not the same again
SAMPLED_ROUNDS: Final = 4  # answers to one prompt beside the greedy one
ASKED: Final = 192  # prompts that are asked for at once
MOST_INVENTED: Final = 20_000  # prompts; nobody has waited for so many
BARREN_ROUNDS: Final = 2  # of asking without one usable prompt: the target cannot
FIRST_YIELD: Final = 0.5  # usable prompts of those asked for, before any were
READ_COST: Final = 0.35  # of a token that is read, in tokens that are written (SmolLM2 on a CPU)
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


class Growth:
    """What further text there can be for a run, and the writing of it."""

    def __init__(self, texts: RunTexts) -> None:
        self.texts = texts

    # -- what there is
    # ----------------------------------------------------------------------------------------------

    def folders(self) -> list[str]:
        """Names of the folders of further text that hold some."""
        path = self.texts.folder
        names = [
            "answers",
            "longer",
            "followed",
            "more",
            *(f"more-{n}" for n in range(2, SAMPLED_ROUNDS + 1)),
        ]
        names += sorted(found.name for found in path.glob("invented-*"))
        return [name for name in names if any((path / name).glob("shard-*.safetensors"))]

    def speed(self) -> Speed:
        path = self.texts.folder / "writing.json"
        return Speed(**read_json(path, "speed of writing")) if path.exists() else Speed()

    def supplies(self) -> list[Supply]:
        """What each source can still give, best first; [] before anything was written, since nobody
        knows how fast it goes."""
        rate, base = self.speed().tokens_per_s, self.texts.training()
        if rate <= 0 or not base.sequences:
            return []
        answer = base.written_tokens / len(base.sequences)
        own_share = base.written_tokens / sum(len(s) for s in base.sequences)
        found = []
        for name in WORTH:
            prompts, extra_s = self._outlook(name, answer, rate)
            tokens = sum(prompts) + len(prompts) * answer
            if not prompts:
                continue
            seconds = (READ_COST * sum(prompts) + len(prompts) * answer) / rate + extra_s
            written_share = len(prompts) * answer / tokens
            found.append(
                Supply(name, tokens, tokens / seconds, WORTH[name] * written_share / own_share)
            )
        return found

    def _outlook(self, name: SourceName, answer: float, rate: float) -> tuple[Sequence[int], float]:
        """(length of each prompt that a source has still to answer, seconds that finding the
        prompts takes)."""
        if name == "sampled":
            rounds = SAMPLED_ROUNDS - sum(
                self._complete(folder) for folder in self._sampled_folders()
            )
            return [len(p.token_ids) for p in self._asked_prompts()] * rounds, 0.0
        if name == "invented":
            mean = sum(len(p.token_ids) for p in self._asked_prompts()) / max(
                len(self._asked_prompts()), 1
            )
            asked, kept, barren = self._yield()
            if barren >= BARREN_ROUNDS or kept >= MOST_INVENTED or not self._asked_prompts():
                return (), 0.0
            share = (kept + 1) / (asked + 2) if asked else FIRST_YIELD
            count = MOST_INVENTED - kept
            return [round(mean)] * count, count * (READ_COST * 3 * mean + mean) / share / rate
        if self._complete(name):
            return (), 0.0
        return [len(p.token_ids) for p in self._unanswered()], 0.0

    def _yield(self) -> tuple[int, int, int]:
        """(prompts asked for, usable ones, rounds at the end without one)."""
        asked = kept = barren = 0
        for path in sorted(self.texts.folder.glob("asked-*/prompts.json")):
            row = read_json(path, "invented prompts")
            asked, kept = asked + int(row["asked"]), kept + len(row["prompts"])
            barren = 0 if row["prompts"] else barren + 1
        return asked, kept, barren

    def _complete(self, name: str) -> bool:
        path = self.texts.folder / name / "cache.json"
        return path.exists() and bool(read_json(path, "text cache").get("complete"))

    # -- writing
    # ----------------------------------------------------------------------------------------------

    def grow(self, budget_s: float) -> dict[str, int]:
        """Write further text for about `budget_s`, the best source that has some left first.
        Returns the written tokens that came from each source. Never runs on without gain: a source
        that gives nothing is not asked again in this call."""
        deadline = time.monotonic() + budget_s
        gained: dict[str, int] = {}
        doers: dict[SourceName, Callable[[float], int]] = {
            "answers": self._write_answers,
            "sampled": self._write_sampled,
            "invented": self._write_invented,
        }
        for name, write in doers.items():
            while (left := deadline - time.monotonic()) > LEAST_S:
                tokens = write(left)
                gained[name] = gained.get(name, 0) + tokens
                if not tokens:
                    break
        return {name: tokens for name, tokens in gained.items() if tokens}

    def _write_answers(self, budget_s: float) -> int:
        prompts = self._unanswered()
        return (
            self._write("answers", prompts, budget_s)
            if prompts and not self._complete("answers")
            else 0
        )

    def _write_sampled(self, budget_s: float) -> int:
        """The next round of sampled answers, one to each prompt."""
        for number, folder in enumerate(self._sampled_folders(), start=1):
            if not self._complete(folder):
                prompts = self._asked_prompts()
                return (
                    self._write(folder, prompts, budget_s, SAMPLED_TEMPERATURE, seed=number)
                    if prompts
                    else 0
                )
        return 0

    def _write_invented(self, budget_s: float) -> int:
        """The next round: prompts asked for, the usable ones answered. Rounds that gave no usable
        prompt end after a few."""
        begin = time.monotonic()
        while (left := budget_s - (time.monotonic() - begin)) > LEAST_S:
            asked, kept, barren = self._yield()
            if barren >= BARREN_ROUNDS or kept >= MOST_INVENTED:
                return 0
            number = 0
            while self._complete(f"invented-{number:03d}") or self._prompts_of(number) == []:
                number += 1
            prompts = self._prompts_of(number)
            if prompts is None:
                prompts = self._ask(number, ASKING_SHARE * left)
            if prompts:
                left = budget_s - (time.monotonic() - begin)
                return self._write(
                    f"invented-{number:03d}", self.texts.encode(prompts), max(left, LEAST_S)
                )
        return 0

    def _ask(self, number: int, budget_s: float) -> list[Prompt]:
        """Let the target write prompts, and keep the usable ones in asked-N/prompts.json."""
        from archsearch.text import supply
        from archsearch.text.generate import eos_ids

        target, tokenizer = self.texts.writer(), self.texts.target.tokenizer
        ends = eos_ids(target, tokenizer)
        train, before = (
            self._training_prompts(),
            [p for n in range(number) for p in self._prompts_of(n) or []],
        )
        openings = supply.askings(tokenizer, train, ASKED, seed=number)
        folder, (temperature, top_p) = f"asked-{number:03d}", supply.INVENTING
        if openings:
            writing = Writing(supply.PROMPT_TOKENS, temperature, top_p, seed=number + 1)
            turns = self._cached(folder, openings, writing, budget_s).sequences
        else:
            turns = []
        apart = [*self.texts.prompts.heldout, *self._kept_out()]
        found = supply.invented(supply.turns_of(turns, tokenizer, ends), train, apart, before)
        row = {
            "asked": len(turns),
            "dropped": found.dropped,
            "prompts": [
                {"messages": p.messages, "category": p.category, "id": p.id} for p in found.prompts
            ],
        }
        write_json(self.texts.folder / folder / "prompts.json", row)
        return list(found.prompts)

    def _prompts_of(self, number: int) -> list[Prompt] | None:
        """The usable prompts of a round that was asked; None where it was not."""
        from archsearch.text.prompts import Prompt

        path = self.texts.folder / f"asked-{number:03d}" / "prompts.json"
        if not path.exists():
            return None
        rows = read_json(path, "invented prompts")["prompts"]
        return [
            Prompt(tuple((r, t) for r, t in row["messages"]), row["category"], row["id"])
            for row in rows
        ]

    def _write(
        self,
        folder: str,
        prompts: Sequence[EncodedPrompt],
        budget_s: float,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> int:
        """Written tokens that came to a folder."""
        before = self.tokens(folder)[0]
        cache = self._cached(
            folder, prompts, Writing(self.texts.answer_tokens, temperature, seed=seed), budget_s
        )
        self.texts.forget(folder)
        return cache.written_tokens - before

    def _cached(
        self, folder: str, prompts: Sequence[EncodedPrompt], writing: Writing, budget_s: float
    ) -> TextCache:
        from archsearch.text.generate import write_answers

        begin, before = time.monotonic(), self.tokens(folder)
        with ProgressLine("target writes more training text") as line:
            cache = write_answers(
                self.texts.writer(),
                self.texts.target.tokenizer,
                prompts,
                cache_dir=self.texts.folder / folder,
                writing=writing,
                budget_s=budget_s,
                progress=line,
            )
        self.timed(before, self.tokens(folder), time.monotonic() - begin)
        return cache

    def tokens(self, folder: str) -> tuple[int, int]:
        """(written tokens, tokens of their prompts) that lie in a folder."""
        from archsearch.text.cache import TextCache

        path = self.texts.folder / folder
        if not any(path.glob("shard-*.safetensors")):
            return 0, 0
        sequences = TextCache.load(path).sequences
        return sum(len(s.written) for s in sequences), sum(s.prompt_tokens for s in sequences)

    def timed(self, before: tuple[int, int], after: tuple[int, int], seconds: float) -> None:
        """Keep what writing took, for the outlook. Of answers that went on after a cut the prompt
        counts once only."""
        speed, (written, read) = (
            self.speed(),
            (now - then for now, then in zip(after, before, strict=True)),
        )
        if written > 0:
            row = {
                "written": speed.written + written,
                "read": speed.read + read,
                "seconds": speed.seconds + seconds,
            }
            write_json(self.texts.folder / "writing.json", row)

    # -- which prompts
    # ----------------------------------------------------------------------------------------------

    def _sampled_folders(self) -> list[str]:
        return ["more", *(f"more-{number}" for number in range(2, SAMPLED_ROUNDS + 1))]

    def _kept_out_ids(self) -> set[tuple[int, ...]]:
        from archsearch.training.batches import split_heldout

        kept = split_heldout(self.texts.training().sequences, HELDOUT_SEQUENCES)[1]
        return {tuple(s.token_ids[: s.prompt_tokens].tolist()) for s in kept}

    def _numbered(self) -> list[tuple[Prompt, EncodedPrompt]]:
        """Every training prompt that leaves room for an answer, with its tokens."""
        numbered = [
            replace(prompt, id=str(number))
            for number, prompt in enumerate(self.texts.prompts.train)
        ]
        by_id = {prompt.id: prompt for prompt in numbered}
        return [(by_id[encoded.id], encoded) for encoded in self.texts.encode(numbered)]

    def _training_prompts(self) -> list[Prompt]:
        kept = self._kept_out_ids()
        return [prompt for prompt, encoded in self._numbered() if encoded.token_ids not in kept]

    def _kept_out(self) -> list[Prompt]:
        kept = self._kept_out_ids()
        return [prompt for prompt, encoded in self._numbered() if encoded.token_ids in kept]

    def _asked_prompts(self) -> list[EncodedPrompt]:
        kept = self._kept_out_ids()
        return [encoded for _, encoded in self._numbered() if encoded.token_ids not in kept]

    def _unanswered(self) -> list[EncodedPrompt]:
        """Training prompts that the first text has no answer to."""
        answered = {
            tuple(s.token_ids[: s.prompt_tokens].tolist()) for s in self.texts.training().sequences
        }
        return [encoded for encoded in self._asked_prompts() if encoded.token_ids not in answered]
