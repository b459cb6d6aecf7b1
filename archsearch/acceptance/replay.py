"""Replay: one recorded trace answers every gamma.

Speculative decoding walks a text in rounds: up to gamma draft tokens are checked, the first one
that fails is replaced by the target's own token (when all pass, a bonus token is added), and the
next round starts after it. On greedy text the walk depends on the 0/1 agreement at every token
alone, so replaying it gives tau exactly as an engine counts it, without the independence behind
(1 - alpha^(gamma+1)) / (1 - alpha), which is a few per cent too high.

On sampled text the walk is random even when the text is known. Let p be the target's and q the
draft's distribution at a token of the text, x the token. The text of speculative decoding is
distributed as the target's own (arXiv 2211.17192, appendix A.1), and a checked position ends as "x
was drafted and kept" with probability q(x) min(1, p(x)/q(x)) = min(p(x), q(x)), as x in any way
with p(x). So given the text, x was an accepted draft token with chance a = min(1, q(x)/p(x)),
whatever happened before, and a round that starts at s writes 1 + k tokens with chance a[s] ...
a[s+k-1] (1 - a[s+k]). The chance that some round starts at each token follows by one pass over the
text, and with it the expected number of rounds. Greedy text is the case a = 0 or 1.

Which rounds count: as `engines.child.answers.drafting_rounds` has it, so that a cut does not look
like a rejection, nor is a short round near the end preferred to a long one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from archsearch.acceptance.measured import RESAMPLES, Resampled, Trace, resampled_ratio
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate


@dataclass(frozen=True, slots=True)
class Replay:
    """What speculative decoding with `gamma` does on a trace.

    `accepted_by_position` [gamma]: unconditional chance that position i is accepted; `rounds`: how
    many whole rounds that is (the expected number on sampled text); `resampled`: mean tokens per
    whole round, bonus token included, with its bootstrap over texts.
    """

    gamma: int
    accepted_by_position: tuple[float, ...]
    rounds: float
    resampled: Resampled = field(repr=False)

    @property
    def tau(self) -> float:
        """Mean tokens a round."""
        return self.resampled.value

    def estimate(self) -> Estimate:
        """tau, tokens a round, with the std over texts."""
        return self.resampled.estimate()


def expected_rounds(
    chances: np.ndarray, gamma: int, *, ended: bool = False, limit: int | None = None
) -> np.ndarray:
    """Expected number of whole rounds along one text that accept 0..gamma draft tokens: [gamma +
    1].

    `chances` [tokens]: chance that each token is accepted where a round asks for it (0 or 1 on
    greedy text). A drafter whose proposal depends on where the round began (a head on hidden
    states) has `chances` [tokens, at least gamma]: of the k-th draft token of a round that starts
    at each token, given that those before it were accepted. `ended`: the last token is the end of
    the text. `limit`: the most tokens the engine would have written, where that is more than the
    text has.
    """
    starts, lengths = walked(chances, gamma, ended=ended, limit=limit)
    return starts @ lengths


def walked(
    chances: np.ndarray, gamma: int, *, ended: bool = False, limit: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The walk behind `expected_rounds`: ([starts], the chance that a round starts at each token;
    [starts, gamma + 1], the chance that a round from there is whole and accepts 0..gamma
    tokens)."""
    chances = np.asarray(chances, dtype=np.float64)
    tokens = int(chances.shape[0])
    # Later rounds have no room for gamma + 1 tokens.
    room = tokens + gamma if ended and limit is None else max(limit or 0, tokens)
    starts = min(max(room - gamma, 0), tokens)
    # reach[s, k]: the first k draft tokens of a round that starts at s are accepted.
    if chances.ndim == 1:
        chances = ahead(chances, gamma) if gamma else np.zeros((tokens, 0))
    windows = chances[:starts, :gamma]
    reach = np.concatenate([np.ones((starts, 1)), np.cumprod(windows, axis=1)], axis=1)
    # [s, k]: exactly k accepted
    lengths = reach - np.concatenate([reach[:, 1:], np.zeros((starts, 1))], axis=1)
    start_at = np.zeros(tokens + gamma + 2)
    start_at[0] = 1.0
    for s in range(starts):
        if start_at[s]:
            start_at[s + 1 : s + gamma + 2] += start_at[s] * lengths[s]
    if ended:
        # without those that would reach to or over the end token
        ends = np.arange(starts)[:, None] + np.arange(1, gamma + 2)[None, :]
        lengths = np.where(ends < tokens, lengths, 0.0)
    return start_at[:starts], lengths


def ahead(values: np.ndarray, count: int) -> np.ndarray:
    """[tokens, count]: `values` [tokens] of each token and those behind it, 0 beyond the end."""
    padded = np.concatenate([values, np.zeros(count, values.dtype)])
    return np.lib.stride_tricks.sliding_window_view(padded, count)[: len(values)]


def at_least(counts: np.ndarray) -> tuple[float, ...]:
    """The shares that reach 1, 2, ... tokens, of `counts` that reach 0, 1, ... and no more."""
    whole = counts.sum()
    return tuple(float(counts[k:].sum() / whole) if whole else 0.0 for k in range(1, len(counts)))


def replay_tau(
    trace: Trace, gamma: int, *, limit: int | None = None, resamples: int = RESAMPLES
) -> Replay:
    """tau and acceptance by position for `gamma` draft tokens a round, greedy or sampled as the
    trace is.

    `limit`: the engine's max_new_tokens, which only matters for texts that ended close before it.
    Raises ArchsearchError when no text is long enough for a whole round, ValueError for a negative
    gamma.
    """
    if gamma < 0:
        raise ValueError(f"gamma must be at least 0, got {gamma}")
    per_text = [
        expected_rounds(chances, gamma, ended=trace.ends(i), limit=limit)
        for i, chances in enumerate(trace.accepted)
    ]
    return _summed(per_text, gamma, resamples)


def replay_chains(chains: Sequence[np.ndarray], gamma: int) -> Replay:
    """`replay_tau` for a drafter whose proposals depend on where a round begins. `chains`: one
    array [tokens, at least gamma] a text, as `expected_rounds` takes them.

    The first token of an answer comes out of the prefill: give the chains from the second token on.
    Raises ValueError for chains shorter than gamma.
    """
    if any(rows.shape[1] < gamma for rows in chains):
        raise ValueError(
            f"the chains are {min(rows.shape[1] for rows in chains)} tokens long, gamma is {gamma}"
        )
    return _summed([expected_rounds(rows, gamma) for rows in chains], gamma)


def replays(most: int, replay: Callable[[int], Replay]) -> dict[int, Replay]:
    """`replay` of gamma 1 to `most`, as far as some text is long enough for a round."""
    found: dict[int, Replay] = {}
    with suppress(ArchsearchError):
        for gamma in range(1, most + 1):
            found[gamma] = replay(gamma)
    return found


def _summed(per_text: Sequence[np.ndarray], gamma: int, resamples: int = RESAMPLES) -> Replay:
    """Rounds by how many draft tokens they accept [gamma + 1], text by text, as one Replay."""
    outcomes = np.array(per_text, dtype=np.float64).reshape(-1, gamma + 1)
    counts = outcomes.sum(axis=0)
    rounds = float(counts.sum())
    if rounds <= 0:
        raise ArchsearchError(
            f"the trace holds no whole round of gamma {gamma}; measure on more or longer text"
        )
    written = np.arange(1, gamma + 2)
    totals = np.stack([outcomes @ written, outcomes.sum(axis=1)], axis=1)
    tau = float(counts @ written) / rounds
    # One text says nothing about the spread over texts: the spread of its rounds, as if it were a
    # single one.
    spread = float(np.sqrt(max(counts @ (written - tau) ** 2 / rounds, 0.0)))
    resampled = resampled_ratio(
        totals, resamples=resamples, fallback_std=spread if resamples >= 2 else 0.0
    )
    return Replay(gamma, at_least(counts), rounds, resampled)
