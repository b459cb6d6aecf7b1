"""Rounds of a drafter whose proposals depend on where a round begins."""

from __future__ import annotations

import numpy as np
import pytest

from archsearch.acceptance.measured import Trace
from archsearch.acceptance.replay import replay_chains, replay_tau


def test_chains_of_a_plain_draft_give_what_its_trace_gives() -> None:
    rng = np.random.default_rng(0)
    texts = tuple(rng.random(50) < 0.7 for _ in range(6))
    chains = [
        np.stack([np.append(text, np.zeros(4, bool))[k : k + 50] for k in range(4)], 1)
        for text in texts
    ]
    trace = Trace(texts, ("",) * 6, tuple("abcdef"))
    for gamma in (1, 2, 4):
        plain, ours = replay_tau(trace, gamma), replay_chains(chains, gamma)
        assert ours.tau == pytest.approx(plain.tau) and ours.accepted_by_position == pytest.approx(
            plain.accepted_by_position
        )


def test_rounds_begin_where_the_last_one_ended() -> None:
    # From token 0 two are right, so the next round begins at 3: what stands at 1 and 2 never runs.
    rows = np.array([[1, 1], [0, 0], [0, 0], [1, 0], [0, 0], [0, 1], [1, 1], [1, 1]], dtype=bool)
    replay = replay_chains([rows], 2)
    assert replay.rounds == pytest.approx(3) and replay.tau == pytest.approx((3 + 2 + 1) / 3)
    assert replay.accepted_by_position == pytest.approx((2 / 3, 1 / 3))
    with pytest.raises(ValueError, match="gamma is 3"):
        replay_chains([rows], 3)
