"""Chains of a run, an n-gram lookup before its trained draft, and the draft that stops when unsure:
chosen by the joint replay of both on held-out text (`acceptance.chain`).

A round in which the lookup drafts n tokens is priced as a lookup's over n + 1 rows, any other as
the draft's own. In the other order the draft would always have something to propose.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np

from archsearch import speedup as speculation
from archsearch.acceptance.chain import ChainReplay, ChainRule, replay_chain
from archsearch.acceptance.lookup import Finds, LookupText, NewestNgram, Ngram, finds, texts_of
from archsearch.acceptance.measured import Resampled, Trace
from archsearch.drafters.lookup import NGram
from archsearch.drafters.models import Chain
from archsearch.drafts.records import TrainedDraft
from archsearch.drafts.trainer import DraftTrainer
from archsearch.engine_facts import engine_facts
from archsearch.engines.engine import Chained
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.latency.rounds import RoundTime, summed
from archsearch.pipeline.untrained import lookup_in
from archsearch.search.objective import Score, Scorer
from archsearch.text.prompt_set import LEAST_HALF

CHAIN: Final = Chain.family
THRESHOLDS: Final = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
FOUND: Final = (2, 3, 4, 6, 8)
"""Tokens that a lookup drafts at most."""
SHORTEST: Final = (2, 3, 4)
"""Tokens of the shortest n-gram that a chain looks up, besides the engine's own."""
SURE: Final = 2.0
"""Standard errors that stopping must gain: the best of many thresholds gains by chance."""
_NOTHING: Final = Estimate(0.0, 0.0, "modelled")


@dataclass(frozen=True)
class Replayed:
    """A chain, or one half of it, on held-out text. `rate`: predicted tokens a second."""

    rule: ChainRule
    lookup: Ngram | None
    replay: ChainReplay
    rate: Resampled

    def gain(self, other: Replayed) -> Estimate:
        """By which share it is faster than `other`; the std is paired over the texts."""
        draws = self.rate.draws / other.rate.draws
        std = float(np.std(draws, ddof=1)) if len(draws) > 1 else math.inf
        return Estimate(self.rate.value / other.rate.value - 1.0, std, "modelled")

    def source(self, draft: Path) -> Chained:
        """What an engine is started with."""
        return Chained(draft, self.rule, self.lookup)


@dataclass(frozen=True)
class Replays:
    """What rules make of one draft on the texts of its trace, in an engine that `scorer` prices,
    one request at a time."""

    scorer: Scorer
    engine: str
    draft: TrainedDraft
    trace: Trace
    texts: Sequence[LookupText]

    @classmethod
    def of(cls, scorer: Scorer, engine: str, draft: TrainedDraft, trainer: DraftTrainer) -> Replays:
        """On the run's held-out text. Raises ArchsearchError where the engine takes no chain, a mix
        is scored, or the trace is of another text."""
        if CHAIN not in engine_facts(engine).confirms or type(scorer) is not Scorer:
            raise ArchsearchError(f"no chains are replayed for {engine} or a mix of work")
        trace = Trace.load(draft.folder / "trace.npz")
        if (known := trainer.texts.traced(trace)) is not None:
            return cls(scorer.at_batch(1), engine, draft, trace, texts_of(known.sequences))
        raise ArchsearchError(
            f"the trace in {draft.folder} is not of the run's held-out text; train the draft for a"
            " moment (archsearch train), which measures it again"
        )

    @cached_property
    def fixed(self) -> Replayed:
        """The draft at its best fixed gamma."""
        return _best(self._replayed(0, gamma) for gamma in self.scorer.gammas)

    @cached_property
    def stopping(self) -> Replayed | None:
        """The draft that stops when unsure, at its best threshold and gamma; None where that does
        not gain SURE standard errors over its best fixed gamma, on enough greedy texts."""
        if not self.trace.confidences or len(self.texts) < LEAST_HALF:
            return None
        gammas = self.scorer.gammas
        best = _best(self._replayed(0, gamma, least) for least in THRESHOLDS for gamma in gammas)
        gain = best.gain(self.fixed)
        return best if gain.value > SURE * gain.std else None

    def stopping_words(self) -> str:
        """What the draft gains by stopping when unsure; "" for nothing. Chosen on the same text: an
        upper end, until an engine measures it."""
        if (stops := self.stopping) is None:
            return ""
        gain = stops.gain(self.fixed)
        return (
            f"stopping below {stops.rule.least:g}, gamma at most {stops.rule.gamma}, gains"
            f" {gain.value:.1%} ± {gain.std:.1%} by replay of the text that chose it: archsearch"
            " confirm measures it"
        )

    def chain(self, gamma: int | None = None) -> Replayed:
        """The best chain, or the best whose draft drafts `gamma` tokens. Raises ArchsearchError
        where no lookup finds anything."""
        leasts = {0.0, self.stopping.rule.least if self.stopping is not None else 0.0}
        known = [
            self._replayed(found, drafted, least, lookup)
            for lookup, rows in self._finds.items()
            if any(each.drafted.any() for each in rows[max(FOUND)])
            for found in FOUND
            for drafted in ([gamma] if gamma else self.scorer.gammas)
            for least in sorted(leasts)
        ]
        if not known:
            raise ArchsearchError(
                f"nothing repeats in the run's held-out text ({self.trace.tokens:,} tokens): no"
                " lookup finds anything there, so a chain is its draft alone (--family"
                " independent)"
            )
        return _best(known)

    def half(self) -> tuple[str, Replayed]:
        """The faster half of a chain, by its family: the draft, or the engine's own lookup."""
        blank = tuple(np.zeros_like(each) for each in self.trace.agreements)
        never = replace(self.trace, agreements=blank, chances=blank, overlaps=blank)
        own = next(iter(self._finds))
        halves = {
            "independent": self.stopping or self.fixed,
            "ngram": _best(self._replayed(found, 1, 0.0, own, never) for found in FOUND),
        }
        name = max(halves, key=lambda each: halves[each].rate.value)
        return name, halves[name]

    def words(self, chain: Replayed) -> str:
        """What a chain gains over its better half, by the same replay."""
        name, half = self.half()
        gain, share = chain.gain(half), sum(chain.replay.found) / chain.replay.rounds
        return (
            f"{'' if gain.value > gain.std else 'no gain: '}{gain.value:+.1%} ± {gain.std:.1%} over"
            f" {name} alone by replay; the lookup drafts in {share:.0%} of the"
            " rounds; both chosen on that text"
        )

    def score(self, found: Replayed, scorer: Scorer | None = None) -> Score:
        """The score of a rule, by the scorer that chose it or another. The std of its speed-up
        holds the spread of its rate over texts."""
        scorer, rule, tau = scorer or self.scorer, found.rule, found.replay.tau
        times = replace(self, scorer=scorer)._rounds(rule, found.replay)
        shape, longest, lookup = self.draft.architecture, rule.longest, found.lookup
        own = (rule.found, rule.gamma, rule.least)
        drafter = shape if lookup is None else Chain(shape, lookup.shortest, lookup.longest, *own)
        draft_s, verify_s, round_s = (
            _mean(found.replay.shares, [getattr(each, name) for each in times])
            for name in ("draft_s", "verify_s", "round_s")
        )
        spread = replace(tau, std=tau.value * found.rate.std / found.rate.value)
        parts = (scorer.decode_s, round_s, verify_s, scorer.target_correlation)
        return replace(
            scorer.measured(drafter, self.draft.alpha, {longest: tau}, gammas=[longest]),
            draft_s=draft_s,
            verify_s=verify_s,
            round_s=round_s,
            speedup=speculation.speedup_estimate(spread, *parts),
            tpot_s=speculation.tpot_estimate(spread, round_s),
            break_even_alpha=None,
            host_s=None,
            bound=None,
        )

    @cached_property
    def _finds(self) -> dict[Ngram, dict[int, list[Finds]]]:
        """What each lookup that the engine can put before a draft finds, by its most tokens; the
        engine's own first."""
        own = lookup_in(self.engine, "ngram")
        assert isinstance(own, Ngram)
        newest = isinstance(own, NewestNgram)
        others = [NewestNgram(n, n) if newest else Ngram(n, own.longest) for n in SHORTEST]
        return {each: finds(each, self.texts, FOUND) for each in dict.fromkeys([own, *others])}

    def _replayed(
        self,
        found: int,
        gamma: int,
        least: float = 0.0,
        lookup: Ngram | None = None,
        never: Trace | None = None,
    ) -> Replayed:
        """`never`: the trace of a draft that is never right, whose rounds are plain steps."""
        facts = engine_facts(self.engine)
        rule = ChainRule(found, gamma, least, not facts.drops_unsure)
        rows = () if lookup is None else self._finds[lookup][found]
        first = 0 if facts.in_process else 1  # transformers verifies with the prompt's pass
        replay = replay_chain(never or self.trace, rule, rows, first=first)
        times = self._rounds(rule, replay)
        times[-2:] = [self._plain] * 2 if never is not None else times[-2:]
        return Replayed(rule, lookup, replay, replay.rate([each.round_s.value for each in times]))

    @property
    def _plain(self) -> RoundTime:
        return summed(_NOTHING, self.scorer.decode_s, _NOTHING)

    def _rounds(self, rule: ChainRule, replay: ChainReplay) -> list[RoundTime]:
        """The time of each kind of round, in the order of `ChainReplay.shares`."""
        scorer, shape, facts = self.scorer, self.draft.architecture, engine_facts(self.engine)
        latency, workload, target = scorer.latency, scorer.workload, scorer.target
        lookup = NGram(target, share=1.0)

        def read_s(tokens: int) -> float:
            return latency.verify_s(shape, workload, tokens - 1).value

        def found(count: int) -> RoundTime:
            time = latency.round(target, lookup, workload, count) if count else self._plain
            return _longer(time, read_s(count + 1)) if count and facts.catches_up else time

        # What the lookup's rounds wrote is read with the draft's next pass.
        behind = 0 if facts.catches_up else round(replay.unseen)
        more = max(0.0, read_s(1 + behind) - read_s(1)) if behind else 0.0

        def drafted(count: int) -> RoundTime:
            time = latency.round(target, shape, workload, count) if count else self._plain
            if not rule.with_last and count < rule.gamma:  # the pass whose token is dropped
                dropped = latency.round(target, shape, workload, count + 1).draft_s
                time = _longer(time, dropped.value - time.draft_s.value)
            return _longer(time, more)

        finding, drafting = range(rule.found + 1), range(rule.gamma + 1)
        return [*map(found, finding), *map(drafted, drafting)]


def _best(known: Iterable[Replayed]) -> Replayed:
    return max(known, key=lambda each: each.rate.value)


def _mean(shares: np.ndarray, parts: Sequence[Estimate]) -> Estimate:
    """The mean over rounds; their errors are one model's, so they add up."""
    value, std = (shares @ [getattr(each, name) for each in parts] for name in ("value", "std"))
    return Estimate(float(value), float(std), parts[-1].source)


def _longer(time: RoundTime, seconds: float) -> RoundTime:
    draft, whole = (replace(e, value=e.value + seconds) for e in (time.draft_s, time.round_s))
    return replace(time, draft_s=draft, round_s=whole)
