"""Drafters that are no model: they look the next tokens up in what was read and written before.

- `Ngram`: the tokens that followed an earlier occurrence of the last n tokens of prompt and answer;
  the longest n that occurs, and of its occurrences the first, as vLLM's `ngram` finds them
  (`v1/spec_decode/ngram_proposer.py`: Knuth-Morris-Pratt from the end, the position farthest from
  it wins).
- `Suffix`: suffix decoding (arXiv 2411.04975) as Arctic Inference does it for vLLM's `suffix`:
`suffix_tree.py`.

What they draft depends on the text alone, so a text that a target wrote, walked round by round,
says *exactly* which rounds draft, how many tokens, and how many of these are accepted. Of sampled
text too: the drafted token has all the mass of its distribution, so it is accepted with the chance
that the target writes it, which is what the text shows.

The first token of an answer comes out of the prefill; rounds start after it. Which rounds count: as
in `replay.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from archsearch.acceptance.measured import Resampled, resampled_ratio
from archsearch.acceptance.replay import at_least, walked
from archsearch.acceptance.suffix_tree import SuffixReader, SuffixTree
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate

if TYPE_CHECKING:
    from archsearch.text.cache import CachedSequence

Proposals = dict[int, list[int]]
"""gamma -> tokens drafted, at most gamma of them; [] for a round that drafts nothing"""


@dataclass(frozen=True, slots=True)
class LookupText:
    """A prompt and what the target wrote for it, as token ids. `ended`: with its end token, not cut
    at a length."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    ended: bool = False
    category: str = ""


@dataclass(frozen=True, slots=True)
class Ngram:
    """Prompt lookup with n-grams of `shortest` to `longest` tokens: vLLM's `prompt_lookup_min` and
    `prompt_lookup_max`. `starts` returns what opens an answer, given its prompt; one such opener
    serves one list of texts, in their order."""

    shortest: int = 2
    longest: int = 5

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ArchsearchError(
                f"n-grams need 1 <= shortest <= longest, got {self.shortest} and {self.longest}"
            )

    def starts(self) -> Opener:
        return lambda prompt: _NgramReader(self, prompt)


class _NgramReader:
    """`_first`: for every n-gram that has a token after it, the index of that token at the n-gram's
    first occurrence."""

    def __init__(self, rule: Ngram, prompt: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._sizes = range(rule.longest, rule.shortest - 1, -1)
        self._first: dict[tuple[int, ...], int] = {}
        for token in prompt:
            self.write(token)

    def write(self, token: int) -> None:
        end = len(self._tokens)  # what ends here is followed by `token` from now on
        for size in self._sizes:
            if size <= end:
                self._first.setdefault(tuple(self._tokens[end - size :]), end)
        self._tokens.append(token)

    def propose(self, gammas: Sequence[int]) -> Proposals:
        end = len(self._tokens)
        for size in self._sizes:
            at = self._first.get(tuple(self._tokens[end - size :])) if size <= end else None
            if at is not None:
                return {gamma: self._tokens[at : at + gamma] for gamma in gammas}
        return {gamma: [] for gamma in gammas}


@dataclass(frozen=True, slots=True)
class NewestNgram(Ngram):
    """llama.cpp's `ngram-simple` (common/ngram-map.cpp): n-grams of `longest` tokens only, of whose
    occurrences the newest drafts; nothing where it has fewer than `longest` tokens behind it."""

    def starts(self) -> Opener:
        return lambda prompt: _NewestReader(self.longest, prompt)


class _NewestReader:
    def __init__(self, size: int, prompt: Sequence[int]) -> None:
        self._size, self._tokens = size, list(prompt)

    def write(self, token: int) -> None:
        self._tokens.append(token)

    def propose(self, gammas: Sequence[int]) -> Proposals:
        # The last token is not in the history that is searched yet.
        tokens, size, end = self._tokens, self._size, len(self._tokens) - 1
        pattern = tokens[end + 1 - size :]
        starts = range(end - size - 1, 0, -1)
        at = next((start for start in starts if tokens[start : start + size] == pattern), 0) + size
        found = tokens[at:end] if size < at <= end - size else []
        return {gamma: found[:gamma] if size <= gamma < end - size - 1 else [] for gamma in gammas}


Reader = _NgramReader | _NewestReader | SuffixReader
"""A drafter in the course of one answer: told each token, it says what it would draft now."""
Opener = Callable[[Sequence[int]], Reader]


@dataclass(frozen=True, slots=True)
class Suffix:
    """Suffix decoding with vLLM's defaults. Answers of earlier requests are looked up as well, in
    the order of the texts, one request after the other (vLLM keeps 10,000)."""

    def starts(self) -> Opener:
        return partial(SuffixReader, SuffixTree())


# --- replay


@dataclass(frozen=True, slots=True)
class LookupReplay:
    """What rounds with a looked-up draft of at most `gamma` tokens do on a list of texts.

    `rounds`; `drafts_share`: of them draft at all, the others are plain steps of the target. Of
    those that draft: `drafted` tokens in the mean, `drafted_by_position` [gamma]: in how many
    position i is drafted, `accepted_by_position` [gamma]: in how many it is accepted. `tau`: mean
    tokens over all rounds, `1 + drafts_share * sum(accepted_by_position)`. The stds are bootstrap
    ones over texts.
    """

    gamma: int
    rounds: int
    drafts_share: Estimate
    drafted: float
    drafted_by_position: tuple[float, ...]
    accepted_by_position: tuple[float, ...]
    tau: Estimate
    resampled: Resampled = field(repr=False, compare=False)

    @property
    def alpha(self) -> float:
        """Share of the drafted tokens that were judged (all before them accepted) which are
        accepted; 0 without any."""
        accepted = float(sum(self.accepted_by_position))
        reached = (1.0, *self.accepted_by_position[:-1])
        judged = sum(min(a, b) for a, b in zip(self.drafted_by_position, reached, strict=True))
        return accepted / judged if judged else 0.0


@dataclass(frozen=True, slots=True)
class Finds:
    """A lookup along one text [tokens]: how many tokens it would draft where a round starts there,
    and how many of them the text goes on with."""

    drafted: np.ndarray
    accepted: np.ndarray


def finds(
    lookup: Ngram | Suffix, texts: Sequence[LookupText], lengths: Sequence[int]
) -> dict[int, list[Finds]]:
    """What `lookup` would draft at every token of `texts`, at most so many tokens, by length."""
    opener = lookup.starts()
    found: dict[int, list[Finds]] = {length: [] for length in lengths}
    for text in texts:
        reader, answer = opener(text.prompt), text.answer
        rows = {length: np.zeros((2, len(answer)), dtype=np.int64) for length in lengths}
        for at, token in enumerate(answer):
            for length, tokens in reader.propose(lengths).items():
                accepted = 0
                for drafted, written in zip(tokens, answer[at:], strict=False):
                    if drafted != written:
                        break
                    accepted += 1
                rows[length][:, at] = len(tokens), accepted
            reader.write(token)
        for length in lengths:
            found[length].append(Finds(*rows[length]))
    return found


def replay(
    drafter: Ngram | Suffix, texts: Sequence[LookupText], gammas: Sequence[int]
) -> dict[int, LookupReplay]:
    """What `drafter` does on `texts` for each of `gammas` (those for which some text is long enough
    for a whole round).

    Raises ArchsearchError where no text is long enough for any.
    """
    if not gammas or min(gammas) < 1:
        raise ValueError(f"gamma must be at least 1, got {list(gammas)}")
    found = {}
    for gamma, rows in finds(drafter, texts, gammas).items():
        counts = np.array([_walk(*each, gamma) for each in zip(rows, texts, strict=True)])
        if counts.sum():
            found[gamma] = _summed(gamma, *np.moveaxis(counts, 1, 0))
    if not found:
        raise ArchsearchError(
            f"no text is long enough for a whole round of gamma {min(gammas)}; measure on more or"
            " longer text"
        )
    return found


def _walk(found: Finds, text: LookupText, gamma: int) -> np.ndarray:
    """The whole rounds of a text [2, gamma + 1]: by how many tokens they drafted, and those that
    drafted any by how many were accepted."""
    reach = np.arange(gamma) < found.accepted[1:, None]
    starts, lengths = walked(reach, gamma, ended=text.ended)
    outcomes = starts[:, None] * lengths
    drafted = found.drafted[1:][: len(starts)]
    by_drafts = np.bincount(drafted, outcomes.sum(axis=1), gamma + 1)
    return np.stack([by_drafts, outcomes[drafted > 0].sum(axis=0)]).astype(np.int64)


def _summed(gamma: int, drafts: np.ndarray, accepts: np.ndarray) -> LookupReplay:
    """Rounds of texts [texts, gamma + 1] by what they drafted, and by what was accepted."""
    drafted, accepted = drafts.sum(axis=0), accepts.sum(axis=0)
    rounds, drafting = int(drafted.sum()), int(drafted[1:].sum())
    written = drafts[:, 0] + accepts @ np.arange(1, gamma + 2)
    per_text = np.stack([written, drafts[:, 1:].sum(axis=1), drafts.sum(axis=1)], axis=1)
    tau = resampled_ratio(per_text[:, [0, 2]], fallback_std=1.0)
    share = resampled_ratio(per_text[:, [1, 2]], fallback_std=0.5)

    mean = float(drafted @ np.arange(gamma + 1) / drafting) if drafting else 0.0
    reached = at_least(np.append(0, drafted[1:])), at_least(accepted)
    return LookupReplay(gamma, rounds, share.estimate(), mean, *reached, tau.estimate(), tau)


# --- texts


def texts_of(sequences: Sequence[CachedSequence], end_ids: Sequence[int] = ()) -> list[LookupText]:
    """The texts of a cache. `end_ids`: tokens that end an answer."""
    ends = set(end_ids)
    found = []
    for each in sequences:
        ids, start = tuple(each.token_ids.tolist()), each.prompt_tokens
        ended = len(ids) > start and ids[-1] in ends
        found.append(LookupText(ids[:start], ids[start:], ended, each.category))
    return found
