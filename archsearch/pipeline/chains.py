"""Chains of a run, an n-gram lookup before its trained draft, and the draft that stops when unsure:
chosen by the joint replay of both on held-out text (`acceptance.chain`), priced round by round.

A round in which the lookup drafts n tokens is a lookup's over n + 1 rows, any other is the draft's
own of as many tokens as it drafts there. The lookup always comes first: a draft has something to
propose everywhere, so that the other order is the draft alone.
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
from archsearch.acceptance.chain import ChainReplay, ChainRule, Finds, finds, replay_chain
from archsearch.acceptance.lookup import LookupText, NewestNgram, Ngram, texts_of
from archsearch.acceptance.measured import Resampled, Trace
from archsearch.architecture.architecture import Architecture
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
"""Standard errors by which a draft must gain by stopping before it is served so: the best of many
thresholds gains by chance."""
_NOTHING: Final = Estimate(0.0, 0.0, "modelled")


@dataclass(frozen=True)
class Replayed:
    """A chain, its draft or its lookup alone, on held-out text. `rate`: predicted tokens a second
    over the texts."""

    replay: ChainReplay
    lookup: Ngram | None
    rate: Resampled

    @property
    def rule(self) -> ChainRule:
        return self.replay.rule

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
    """What rules make of one draft on texts of its trace, in an engine that `scorer` prices."""

    scorer: Scorer
    engine: str
    draft: TrainedDraft
    trace: Trace
    texts: Sequence[LookupText]

    @classmethod
    def of(cls, scorer: Scorer, engine: str, draft: TrainedDraft, trainer: DraftTrainer) -> Replays:
        """With the run's held-out text, one request at a time. Raises ArchsearchError where the
        trace is of another text."""
        trace, texts = Trace.load(draft.folder / "trace.npz"), trainer.texts
        if (texts.folder / "heldout" / "done.json").exists():
            for cache in (texts.choosing(), texts.heldout()):
                if tuple(each.id for each in cache.sequences) == trace.ids:
                    one = scorer.at_batch(1)
                    return cls(one, engine, draft, trace, texts_of(cache.sequences))
        raise ArchsearchError(
            f"the trace in {draft.folder} is not of the run's held-out text; train the draft for a"
            " moment (archsearch train), which measures it again"
        )

    @classmethod
    def known(
        cls, scorer: Scorer, engine: str, draft: TrainedDraft, trainer: DraftTrainer
    ) -> Replays | None:
        """As `of`; None where the engine takes neither chains nor thresholds, a mix is scored, or
        the trace is of another text."""
        if CHAIN not in engine_facts(engine).confirms or type(scorer) is not Scorer:
            return None
        try:
            return cls.of(scorer, engine, draft, trainer)
        except ArchsearchError:
            return None

    @cached_property
    def stopping(self) -> Replayed | None:
        """The draft that stops when unsure, at its best threshold and gamma; None where that does
        not gain SURE standard errors over its best fixed gamma, on enough greedy texts."""
        if not self.trace.confidences or len(self.texts) < LEAST_HALF:
            return None
        gammas = self.scorer.gammas
        best = _best(self._alone(gamma, least) for least in THRESHOLDS for gamma in gammas)
        gain = best.gain(self.fixed)
        return best if gain.value > SURE * gain.std else None

    @property
    def stopping_words(self) -> str:
        """What the draft gains by stopping when unsure; "" for nothing."""
        if (stops := self.stopping) is None:
            return ""
        gain = stops.gain(self.fixed)
        return (
            f"stopping below {stops.rule.least:g}, gamma at most {stops.rule.gamma}, gains"
            f" {gain.value:.1%} ± {gain.std:.1%} by replay: archsearch confirm measures it"
        )

    @cached_property
    def fixed(self) -> Replayed:
        """The draft at its best fixed gamma."""
        return _best(self._alone(gamma) for gamma in self.scorer.gammas)

    def chain(self, gamma: int | None = None) -> Replayed:
        """The best chain, or the best whose draft drafts `gamma` tokens. Raises ArchsearchError
        where no lookup finds anything."""
        stops = self.stopping
        leasts = {0.0} | ({stops.rule.least} if stops is not None else set())
        rules = [
            self._rule(found, drafted, least)
            for found in FOUND
            for drafted in ([gamma] if gamma else self.scorer.gammas)
            for least in sorted(leasts)
        ]
        known = [
            self._replayed(rule, lookup, found[rule.found])
            for lookup, found in self._finds.items()
            if any(each.drafted.any() for each in found[max(FOUND)])
            for rule in rules
        ]
        if not known:
            raise ArchsearchError(
                f"nothing repeats in the run's held-out text ({self.trace.tokens:,} tokens): no"
                " lookup finds anything there, so a chain is its draft alone (--family"
                " independent)"
            )
        return _best(known)

    def half(self) -> tuple[str, Replayed]:
        """The faster half of a chain, by its family: the draft alone, or the engine's own lookup
        alone."""
        lookup = lookup_in(self.engine, "ngram")
        assert isinstance(lookup, Ngram)
        blank = tuple(np.zeros_like(each) for each in self.trace.agreements)
        never = replace(self.trace, agreements=blank, chances=blank, overlaps=blank)
        alone = _best(
            self._replayed(ChainRule(most, 1), lookup, self._finds[lookup][most], never)
            for most in FOUND
        )
        draft = self.stopping or self.fixed
        halves = {"independent": draft, "ngram": alone}
        name = max(halves, key=lambda each: halves[each].rate.value)
        return name, halves[name]

    def words(self, chain: Replayed) -> str:
        """What a chain gains over its better half, by replay."""
        name, half = self.half()
        gain, share = chain.gain(half), chain.replay.found_share
        verdict = "" if gain.value > gain.std else "no gain: "
        return (
            f"{verdict}{gain.value:+.1%} ± {gain.std:.1%} over {name} alone by replay; the lookup"
            f" drafts in {share:.0%} of the rounds"
        )

    def score(self, found: Replayed, scorer: Scorer | None = None) -> Score:
        """The score of a rule, by another scorer than that which chose it where one is given. The
        std of its speed-up holds the spread of its rate over texts."""
        local = replace(self, scorer=scorer or self.scorer)
        times, shares = local._rounds(found.rule, found.replay), found.replay.shares
        scorer, tau = local.scorer, found.replay.tau
        draft_s, verify_s, round_s = (
            _mean(shares, [getattr(each, name) for each in times])
            for name in ("draft_s", "verify_s", "round_s")
        )
        shape, longest = self.draft.architecture, found.rule.longest
        drafter = shape if found.lookup is None else _drafter(shape, found)
        base = scorer.measured(drafter, self.draft.alpha, {longest: tau}, gammas=[longest])
        spread = Estimate(tau.value, tau.value * found.rate.std / found.rate.value, tau.source)
        gain = speculation.speedup_estimate(
            spread, scorer.decode_s, round_s, verify_s, scorer.target_correlation
        )
        return replace(
            base,
            draft_s=draft_s,
            verify_s=verify_s,
            round_s=round_s,
            speedup=gain,
            tpot_s=speculation.tpot_estimate(spread, round_s),
            break_even_alpha=None,
            host_s=None,
            bound=None,
        )

    # --- inside

    def _rule(self, found: int, gamma: int, least: float) -> ChainRule:
        return ChainRule(found, gamma, least, not engine_facts(self.engine).drops_unsure)

    @cached_property
    def _finds(self) -> dict[Ngram, dict[int, list[Finds]]]:
        """What each lookup that the engine can put before a draft finds, by its most tokens."""
        own = lookup_in(self.engine, "ngram")
        assert isinstance(own, Ngram)
        newest = isinstance(own, NewestNgram)
        others = [NewestNgram(n, n) if newest else Ngram(n, own.longest) for n in SHORTEST]
        return {each: finds(each, self.texts, FOUND) for each in dict.fromkeys([own, *others])}

    def _alone(self, gamma: int, least: float = 0.0) -> Replayed:
        return self._replayed(self._rule(0, gamma, least), None, ())

    def _replayed(
        self,
        rule: ChainRule,
        lookup: Ngram | None,
        found: Sequence[Finds],
        trace: Trace | None = None,
    ) -> Replayed:
        """`trace`: of a draft that is never right, whose rounds are then plain steps."""
        first = 0 if engine_facts(self.engine).in_process else 1  # see `replay_chain`
        replay = replay_chain(trace or self.trace, rule, found, first=first)
        times = self._rounds(rule, replay)
        if trace is not None:
            times[-2:] = [self._plain] * 2
        return Replayed(replay, lookup, replay.rate([each.round_s.value for each in times]))

    @property
    def _plain(self) -> RoundTime:
        """A plain step, where nothing is drafted."""
        return summed(_NOTHING, self.scorer.decode_s, _NOTHING)

    def _rounds(self, rule: ChainRule, replay: ChainReplay) -> list[RoundTime]:
        """The time of each kind of round, in the order of `ChainReplay.shares`."""
        scorer, shape, facts = self.scorer, self.draft.architecture, engine_facts(self.engine)
        latency, workload, target = scorer.latency, scorer.workload, scorer.target
        lookup = NGram(target, share=1.0)

        def read_s(tokens: int) -> Estimate:
            """The draft's pass over so many tokens."""
            return latency.verify_s(shape, workload, tokens - 1)

        def found(count: int) -> RoundTime:
            if not count:
                return self._plain
            time = latency.round(target, lookup, workload, count)
            return _with_draft(time, read_s(count + 1)) if facts.catches_up else time

        # What the lookup's rounds wrote is read with the draft's next pass.
        behind = 0 if facts.catches_up else round(replay.unseen)
        more = max(0.0, read_s(1 + behind).value - read_s(1).value) if behind else 0.0

        def drafted(count: int) -> RoundTime:
            time = latency.round(target, shape, workload, count) if count else self._plain
            if not rule.with_last and count < rule.gamma:  # the pass whose token is dropped
                longer = latency.round(target, shape, workload, count + 1).draft_s
                time = _with_draft(time, replace(longer, value=longer.value - time.draft_s.value))
            return _with_draft(time, Estimate(more, more / 4, "modelled")) if more else time

        return [
            *(found(count) for count in range(rule.found + 1)),
            *(drafted(count) for count in range(rule.gamma + 1)),
        ]


def _drafter(shape: Architecture, found: Replayed) -> Chain:
    rule, lookup = found.rule, found.lookup
    assert lookup is not None
    return Chain(shape, lookup.shortest, lookup.longest, rule.found, rule.gamma, rule.least)


def _best(known: Iterable[Replayed]) -> Replayed:
    return max(known, key=lambda each: each.rate.value)


def _mean(shares: np.ndarray, parts: Sequence[Estimate]) -> Estimate:
    """The mean over rounds; their errors are one model's, so they add up."""
    value, std = (
        float(shares @ [getattr(each, name) for each in parts]) for name in ("value", "std")
    )
    return Estimate(value, std, parts[-1].source)


def _with_draft(time: RoundTime, more: Estimate) -> RoundTime:
    """A round whose draft takes `more`."""

    def longer(part: Estimate) -> Estimate:
        return Estimate(part.value + more.value, math.hypot(part.std, more.std), part.source)

    return replace(time, draft_s=longer(time.draft_s), round_s=longer(time.round_s))
