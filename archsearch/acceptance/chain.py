"""Joint replay: a lookup drafts where it finds something, a draft model where it does not, each for
so many tokens; and a draft that stops where it is unsure.

One walk over held-out text answers for both, as `replay.py` does for one: what a lookup would draft
at a token depends on the text alone (`lookup.py`), what the draft would, on its trace
(`measured.py`). A round that starts where the lookup finds something is the lookup's, every other
one the draft's, as in llama.cpp (`--spec-type ngram-simple,draft-simple`) and archsearch's
candidate generator for transformers.

A draft stops when unsure at the first token that it gives less than a threshold: behind it in
transformers and OpenVINO (ConfidenceCriteria; Sampler::register_new_token), before it in llama.cpp
(`--spec-draft-p-min`). Rounds, and what they accept, are exact. How sure a draft is after a token
that fails depends on text that nobody wrote: it is taken to be as sure as on the text's own next
tokens, which moves the draft's seconds, not what is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from archsearch.acceptance.lookup import Finds
from archsearch.acceptance.measured import Resampled, Trace, resampled_ratio
from archsearch.acceptance.replay import ahead, at_least, walked
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate


@dataclass(frozen=True, slots=True)
class ChainRule:
    """`found`: tokens that the lookup drafts at most (0: there is none); `gamma`: tokens of the
    draft's rounds at most; `least`: the probability below which the draft stops (0: never), with
    the token that is below it where `with_last`."""

    found: int
    gamma: int
    least: float = 0.0
    with_last: bool = True

    def __post_init__(self) -> None:
        if self.found < 0 or self.gamma < 1:
            raise ArchsearchError(
                f"a chain drafts at least one token in each of its parts, got {self.found} found "
                f"and {self.gamma} drafted"
            )
        if not 0.0 <= self.least < 1.0:
            words = "the probability below which a draft stops lies between 0 and 1"
            raise ArchsearchError(f"{words}, got {self.least:g}")

    @property
    def longest(self) -> int:
        """Draft tokens of its longest round."""
        return max(self.found, self.gamma)


@dataclass(frozen=True, slots=True)
class ChainReplay:
    """What a chain does on texts. `rounds`: how many; of them `found` [rule.found + 1] are the
    lookup's that drafted 0, 1, ... tokens (none drafts 0), and `drafted` [rule.gamma + 1] the
    draft's. `unseen`: tokens written in rounds of the lookup for each round of the draft, which
    the draft has to read before it goes on. `accepted_by_position` [rule.longest]: of all rounds.
    `tau`: mean tokens a round, with its bootstrap std over texts. `by_text` [texts, 1 +
    rule.found + 1 + rule.gamma + 1]: tokens written, then `found` and `drafted` of each text.
    """

    rule: ChainRule
    rounds: float
    found: tuple[float, ...]
    drafted: tuple[float, ...]
    unseen: float
    accepted_by_position: tuple[float, ...]
    tau: Estimate
    by_text: np.ndarray = field(repr=False, compare=False)

    @property
    def shares(self) -> np.ndarray:
        """Of all rounds [rule.found + 1 + rule.gamma + 1]: by who drafts and how many tokens."""
        return np.array([*self.found, *self.drafted]) / self.rounds

    def rate(self, seconds: Sequence[float]) -> Resampled:
        """Tokens a second, where each of those rounds takes so many `seconds`; the draws over texts
        are the same for every rule, so that their differences are paired."""
        spent = self.by_text[:, 1:] @ np.asarray(seconds, dtype=np.float64)
        totals = np.stack([self.by_text[:, 0], spent], axis=1)
        return resampled_ratio(totals, fallback_std=totals[:, 0].sum() / spent.sum())


def replay_chain(
    trace: Trace,
    rule: ChainRule,
    found: Sequence[Finds] = (),
    *,
    first: int = 1,
    limit: int | None = None,
) -> ChainReplay:
    """One walk over the texts of `trace`, whose lookup is `found` (of `rule.found` tokens; none
    where the draft runs alone).

    `first`: the token that the first round begins at: 1 where the prompt's pass writes the first
    token, 0 where that pass verifies a round already (transformers). `limit`: as for `replay_tau`.
    Raises ArchsearchError where no text holds a whole round, for a threshold on a trace without
    confidences (of sampled text, or of an earlier version), and for a lookup of other texts.
    """
    if rule.least and not trace.confidences:
        raise ArchsearchError(
            "where a draft stops when unsure is replayed on greedy text whose trace holds its "
            "confidence; measure the draft again, at temperature 0"
        )
    longest = rule.longest
    by_text = np.zeros((len(trace.accepted), 1 + rule.found + 1 + rule.gamma + 1))
    accepted, unseen = np.zeros(longest + 1), 0.0
    written = np.arange(1, longest + 2)
    for index, chances in enumerate(trace.accepted):
        sure = trace.confidences[index] if rule.least else None
        rows, drafted = _draft_rows(chances, sure, rule)
        by_lookup = np.zeros(len(rows), dtype=bool)
        if rule.found:
            if found[index].drafted.shape != chances.shape:
                raise ArchsearchError("a chain's lookup and draft were replayed on different texts")
            by_lookup = found[index].drafted > 0
            of_find = np.arange(longest) < found[index].accepted[:, None]
            rows = np.where(by_lookup[:, None], of_find, rows)
            drafted = np.where(by_lookup, found[index].drafted, drafted)
        room = None if limit is None else limit - first
        starts, lengths = walked(rows[first:], longest, ended=trace.ends(index), limit=room)
        outcomes = starts[:, None] * lengths
        of_start = outcomes.sum(axis=1)
        mine, sizes = by_lookup[first:][: len(starts)], drafted[first:][: len(starts)]
        unseen += float(outcomes[mine].sum(axis=0) @ written)
        accepted += outcomes.sum(axis=0)
        by_text[index] = (
            outcomes.sum(axis=0) @ written,
            *np.bincount(sizes[mine], of_start[mine], rule.found + 1),
            *np.bincount(sizes[~mine], of_start[~mine], rule.gamma + 1),
        )
    rounds = float(accepted.sum())
    if rounds <= 0:
        raise ArchsearchError(
            f"no text is long enough for a whole round of {longest} tokens; measure on more or"
            " longer text"
        )
    totals = np.stack([by_text[:, 0], by_text[:, 1:].sum(axis=1)], axis=1)
    tau = resampled_ratio(totals, fallback_std=1.0)
    by_find, by_draft = np.split(by_text[:, 1:].sum(axis=0), [rule.found + 1])
    both = tuple(by_find.tolist()), tuple(by_draft.tolist())
    unread = unseen / by_draft.sum() if by_draft.any() else 0.0
    by_position = at_least(accepted)
    return ChainReplay(rule, rounds, *both, unread, by_position, tau.estimate(), by_text)


def _draft_rows(
    chances: np.ndarray, sure: np.ndarray | None, rule: ChainRule
) -> tuple[np.ndarray, np.ndarray]:
    """([tokens, rule.longest] the chance of each draft token of a round of the draft from there,
    [tokens] how many it drafts)."""
    gamma, tokens = rule.gamma, len(chances)
    rows = np.zeros((tokens, rule.longest))
    rows[:, :gamma] = ahead(chances, gamma)
    if sure is None:
        return rows, np.full(tokens, gamma)
    unsure = ahead(sure < rule.least, gamma)
    before = np.where(unsure.any(axis=1), unsure.argmax(axis=1) + rule.with_last, gamma)
    drafted = np.minimum(before, gamma)
    rows[np.arange(rule.longest) >= drafted[:, None]] = 0.0
    return rows, drafted
