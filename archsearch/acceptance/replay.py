"""Replay: one recorded agreement trace answers every gamma.

Speculative decoding walks a text in rounds: up to gamma draft tokens are checked, the first one that disagrees is replaced by
the target's own token (or, when all agree, one bonus token is added), and the next round starts after it. On greedy text the
walk depends on nothing but the 0/1 agreement at every token, so replaying it gives tau exactly as an engine would count it,
without the assumption of independent acceptances behind (1 - alpha^(gamma+1)) / (1 - alpha), which is a few per cent too high.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from archsearch.acceptance.measured import Trace
from archsearch.errors import ArchsearchError


@dataclass(frozen=True, slots=True)
class Replay:
    """What speculative decoding with `gamma` does on a trace.

    `tau`: mean tokens per round, bonus token included, over rounds that the end of a text does not cut short; `tau_std`: its
    bootstrap standard deviation over texts; `accepted_by_position` [gamma]: unconditional chance that position i is accepted;
    `rounds`: how many rounds that is.
    """

    gamma: int
    tau: float
    tau_std: float
    accepted_by_position: tuple[float, ...]
    rounds: int


def accepted_runs(agreement: np.ndarray, gamma: int) -> list[int]:
    """Accepted draft tokens of each whole round along one text, `agreement` [tokens] bool.

    A round at position i accepts the run of agreements from i, at most gamma, then takes one token of the target. The last round
    is left out when the text ends before it is decided, so that the end of a text does not look like a rejection.
    """
    runs: list[int] = []
    position, end = 0, int(agreement.shape[0])
    while position < end:
        run = 0
        while run < gamma and position + run < end and agreement[position + run]:
            run += 1
        if run < gamma and position + run >= end:
            break
        runs.append(run)
        position += run + 1
    return runs


def replay_tau(trace: Trace, gamma: int, *, resamples: int = 200, seed: int = 0) -> Replay:
    """tau and acceptance by position for `gamma` draft tokens a round. Raises ArchsearchError when no text is long enough."""
    if gamma < 0:
        raise ValueError(f"gamma must be at least 0, got {gamma}")
    per_text = [np.asarray(accepted_runs(agreement, gamma), dtype=np.int64) for agreement in trace.agreements]
    totals = np.array([[int(runs.sum()) + runs.size, runs.size] for runs in per_text], dtype=np.float64).reshape(-1, 2)
    rounds = int(totals[:, 1].sum()) if len(totals) else 0
    if rounds == 0:
        raise ArchsearchError(f"the trace holds no whole round of gamma {gamma}; measure on more or longer text")
    runs = np.concatenate(per_text)
    by_position = tuple(float((runs > i).mean()) for i in range(gamma))
    return Replay(gamma, float(runs.mean()) + 1.0, _ratio_std(totals, resamples, seed), by_position, rounds)


def best_gamma(trace: Trace, gammas: Sequence[int], round_s: Sequence[float]) -> int:
    """The gamma with the most tokens per second; `round_s` [len(gammas)]: seconds of one round (draft, verify, overhead)."""
    rates = [replay_tau(trace, gamma, resamples=0).tau / seconds for gamma, seconds in zip(gammas, round_s, strict=True)]
    return gammas[int(np.argmax(rates))]


def _ratio_std(totals: np.ndarray, resamples: int, seed: int) -> float:
    """Bootstrap std over rows of sum(totals[:, 0]) / sum(totals[:, 1])."""
    if resamples < 2 or len(totals) < 2:
        return 0.0
    picks = np.random.default_rng(seed).integers(len(totals), size=(resamples, len(totals)))
    sums = totals[picks].sum(axis=1)
    return float(np.std(sums[:, 0] / np.maximum(sums[:, 1], 1.0), ddof=1))
