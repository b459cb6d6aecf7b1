"""Scores of drafts over a mix of work: what `search` and `estimate` rank by where a workload is a
mix.

Each part is priced as `traffic` prices it (`served.serve_part`), so that a search and `archsearch
traffic` say the same of a draft. `Score.speedup` and `tpot_s` are over the mix, the other numbers
are of its heaviest part, `Score.mix` holds the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from archsearch import speedup as speculation
from archsearch.acceptance.terms import training_tokens
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.grid import ShapeGrid
from archsearch.drafters.drafter import Draft, Drafter
from archsearch.drafters.models import Independent
from archsearch.drafters.registry import as_drafter
from archsearch.engine_facts import engine_facts
from archsearch.estimate import Estimate
from archsearch.hardware.device import Device
from archsearch.latency.draft_passes import LatencyOfRounds
from archsearch.records import as_data
from archsearch.search.objective import GridScores, MixScore, PartScore, Score, Scorer, gain_of
from archsearch.traffic.mix import LoadPart, Mix
from archsearch.traffic.served import (
    Load,
    Over,
    ServedPart,
    TokensOf,
    context_of,
    drafting_somewhere,
    objective_of,
    overs,
    serve_part,
)
from archsearch.traffic.steady import MOST_RUNNING, RoundTokens
from archsearch.traffic.times import held_by
from archsearch.workload import Workload


class MixScorer(Scorer):
    """A `Scorer` whose scores are over `mix`. `workload`: of the heaviest part; a scorer at another
    batch size or context, made by `at_batch` or `at_context`, is a plain one."""

    def __init__(self, scorer: Scorer, mix: Mix, device: Device) -> None:
        """`scorer`: what is asked besides the mix. Raises ArchsearchError where not one request of
        a part fits the target."""
        heat, domain = scorer.workload.temperature, scorer.context.domain
        # what is asked elsewhere where a part says nothing
        parts = (
            replace(part, temperature=heat) if part.temperature is None else part
            for part in mix.parts
        )
        filled = tuple(replace(part, domain=part.domain or domain) for part in parts)
        self.mix = replace(mix, parts=filled)
        self.device = device
        mix, self.main = self.mix, self.mix.main
        base = replace(scorer.workload, memory_fraction=mix.memory_fraction)
        self._held_alone = held_alone(mix, scorer.target, base, scorer.latency, device)
        most = self._held_alone[self.main] or MOST_RUNNING
        batch, temperature = min(self.main.concurrency or 1, most), self.main.temperature or 0.0
        workload = replace(_at(base, self.main), batch_size=max(1, batch), temperature=temperature)
        super().__init__(
            scorer.target, workload, scorer.latency, scorer.acceptance, gammas=scorer.gammas
        )
        self.limits = scorer.limits
        self.context = context_of(scorer, self.main)
        self.known_families = scorer.known_families
        self._base = scorer
        self._served: tuple[object, list[ServedPart]] | None = None

    # --- one draft

    def __call__(self, draft: Draft, best: int | None = None) -> Score:
        # each part has a best gamma of its own, whatever `best`
        drafter = as_drafter(draft)
        if self.predicted_acceptance(drafter).taus is not None:
            return super().__call__(drafter)  # which asks `measured`
        served = self.served(drafter)
        return self._over(Scorer.__call__(self._single(served), drafter), served)

    def measured(
        self,
        draft: Draft,
        alpha: Estimate,
        taus: Mapping[int, Estimate],
        *,
        gammas: Sequence[int] | None = None,
    ) -> Score:
        """The score of a draft whose tau was measured; taken to be the same in all parts."""
        allowed = [gamma for gamma in gammas or self.gammas if gamma in taus]
        if not allowed:
            return super().measured(draft, alpha, taus, gammas=gammas)  # which says so

        def tokens_of(gamma: int) -> RoundTokens | None:
            if gamma not in allowed:
                return None
            return RoundTokens.of(speculation.alpha_from_tau(taus[gamma].value, gamma), 0.0, gamma)

        served = self._serve(as_drafter(draft), tokens_of)
        single = self._single(served)
        score = Scorer.measured(single, draft, alpha, taus, gammas=single.gammas)
        return self._over(score, [replace(each, alpha=alpha.value) for each in served], taus)

    def served(self, drafter: Drafter) -> list[ServedPart]:
        """The drafter under each part. Raises InvalidShapeError where memory does not hold one
        request with it."""
        asked = (drafter, self.acceptance, self.context, self.known_families)
        if self._served is None or self._served[0] != asked:
            self._served = asked, self._serve(drafter, None)
        return self._served[1]

    def _serve(self, drafter: Drafter, tokens_of: TokensOf | None) -> list[ServedPart]:
        return [
            serve_part(self, drafter, part, self.held(drafter, part), tokens_of=tokens_of)
            for part in self.mix.parts
        ]

    def held(self, drafter: Drafter, part: LoadPart) -> tuple[Any, int | None]:
        """Requests of a part that memory holds with the draft (each of a grid), and without."""
        facts, work = engine_facts(self.latency.engine), _at(self.workload, part)
        most = held_by(facts, self.target, self.device, work, drafter)
        return most, self._held_alone[part]

    def _single(self, served: Sequence[ServedPart]) -> Scorer:
        """The heaviest part alone, at the gamma that is best there."""
        single = Scorer.__new__(Scorer)
        single.__dict__.update(self.__dict__)
        gamma = next(each.gamma_drafting for each in served if each.part == self.main)
        return Scorer.with_gammas(single, (gamma,))

    def _over(
        self, score: Score, served: Sequence[ServedPart], taus: Mapping[int, Estimate] | None = None
    ) -> Score:
        ranks, objective = self.workload.tensor_parallel, self.mix.objective
        parts = tuple(_part_score(each) for each in served)
        over = tuple(each.words for each in self._overs(score.proposer, served) if each.over > 0)
        served = drafting_somewhere(served)
        gain, tpot = objective_of(served, "speedup", ranks), objective_of(served, "tpot", ranks)
        shares = [each.part.weight * each.best.tpot_s / tpot for each in served]
        bands = [self._band(score.proposer, each, taus) for each in served]
        std, down, up = (
            math.fsum(share * band[i] for share, band in zip(shares, bands, strict=True))
            for i in range(3)
        )
        speedup = Estimate(gain, gain * std, score.speedup.source).between(
            (gain * math.exp(-down), gain * math.exp(up))
        )
        value, plain = (objective_of(served, objective, ranks, plain=off) for off in (False, True))
        mix = MixScore(objective, value, plain, parts, over)
        tpot_s = Estimate(tpot, tpot * std, score.tpot_s.source)
        return replace(score, speedup=speedup, tpot_s=tpot_s, mix=mix)

    def _band(
        self, drafter: Drafter, each: ServedPart, taus: Mapping[int, Estimate] | None
    ) -> tuple[float, float, float]:
        """Of a part's speed-up: relative std, and how far down and up its interval goes in the
        logarithm."""
        gamma, at = each.gamma_drafting, each.times.at
        near = int(at[abs(at - max(each.drafting.running, 1.0)).argmin()])
        workload = replace(self.workload, context_len=each.part.context, batch_size=near)
        known = self.predicted_acceptance(drafter, context_of(self, each.part))
        drafter = drafter.with_share(known.drafting)
        tau = known.tau_at(gamma) if taus is None else taus[gamma]
        time = self.latency.round(self.target, drafter, workload, gamma)
        decode_s = self.latency.decode_s(self.target, workload)
        gain = speculation.speedup_estimate(
            tau, decode_s, time.round_s, time.verify_s, self.target_correlation
        )
        down = up = speculation.QUANTILE_95 * gain.relative_std
        if tau.low is not None or time.round_s.low is not None:
            low, high = speculation.speedup_interval(gain, tau, gamma, time.round_s)
            down, up = math.log(gain.value / low), math.log(high / gain.value)
        if each.gamma:
            return gain.relative_std, down, up
        # Off is the better choice by the mean; where more is accepted drafting is, by what is left
        # of its band.
        left = max(0.0, up - math.log(each.drafting.tpot_s / each.off.tpot_s))
        return left / speculation.QUANTILE_95 / 2.0, 0.0, left

    # --- a grid of drafts

    @property
    def grid_numbers(self) -> int:
        # of rounds at each batch size and gamma; in few parts, since each prices its passes anew
        most = self.latency.largest_batch
        loads = (Load.of(part, (held, held), most) for part, held in self._held_alone.items())
        return max(1, max(len(load.sizes) for load in loads) * len(self.gammas) // 64)

    def grid_scores(self, grid: ShapeGrid, start: int) -> GridScores:
        drafter, ranks = Independent(grid), self.workload.tensor_parallel
        held = [self.held(drafter, part) for part in self.mix.parts]
        served = [
            serve_part(self, drafter, part, (None if mine is None else np.maximum(mine, 1), alone))
            for part, (mine, alone) in zip(self.mix.parts, held, strict=True)
        ]
        limits = {each.name: each.over for each in self._overs(drafter, served)}
        fits = self._within(super().constraints(grid) | limits, grid)
        for mine, _ in held:
            fits &= True if mine is None else mine >= 1
        served = drafting_somewhere(served)
        main = served[self.mix.parts.index(self.main)]
        row = int(np.abs(main.times.at - self.workload.batch_size).argmin())
        gamma = np.broadcast_to(main.gamma_drafting, grid.shape)
        column = np.searchsorted(main.times.gammas, gamma)[None]
        draft_s = np.take_along_axis(main.times.draft[row], column, 0)[0]
        asked = self.mix.objective
        value, plain = (objective_of(served, asked, ranks, plain=alone) for alone in (False, True))
        gains = (objective_of(served, "speedup", ranks), gain_of(asked, value, plain))
        found: Any = (*gains, gamma, draft_s, fits)
        return GridScores(start, *found)

    # --- limits

    def constraints(self, draft: Draft) -> dict[str, float]:
        found, drafter, limits = super().constraints(draft), as_drafter(draft), self.mix.limits
        times = (limits.tpot_ms, limits.ttft_ms, limits.ttft_p99_ms, limits.memory_gib)
        served = [] if all(each is None for each in times) else self.served(drafter)
        return found | {each.name: float(each.over) for each in self._overs(drafter, served)}

    def _overs(self, drafter: Drafter, served: Sequence[ServedPart]) -> list[Over]:
        tokens = training_tokens(self.context, drafter.training_parameters)
        return overs(served, self.mix, drafter, self.workload, tokens)

    def limit_words(self) -> str:
        asked = as_data(self.mix.limits).items()
        return ", ".join(f"{name}={value:g}" for name, value in asked) or super().limit_words()

    # --- the same, changed

    def with_latency(self, latency: LatencyOfRounds) -> Scorer:
        return self._again(self._base.with_latency(latency))

    def _again(self, base: Scorer) -> Scorer:
        changed = MixScorer(base.with_acceptance(self.acceptance), self.mix, self.device)
        changed.context = self.context
        changed.known_families = self.known_families
        return changed

    def with_gammas(self, gammas: Sequence[int]) -> Scorer:
        return self._again(self._base.with_gammas(gammas))


def held_alone(
    mix: Mix, target: Architecture, workload: Workload, latency: LatencyOfRounds, device: Device
) -> dict[LoadPart, int | None]:
    """Requests of each part that the target holds without a draft (`held_by`).

    Raises ArchsearchError where that is not one, or a part leaves nothing to draft.
    """
    served, found = replace(workload, memory_fraction=mix.memory_fraction), {}
    facts = engine_facts(latency.engine)
    for part in mix.parts:
        held = found[part] = held_by(facts, target, device, _at(served, part), None)
        Load.of(part, (held, held), latency.largest_batch).check(part)
    return found


def _at(workload: Workload, part: LoadPart) -> Workload:
    return replace(workload, context_len=part.context)


def _part_score(each: ServedPart) -> PartScore:
    best, plain = each.best, each.plain
    return PartScore(
        name=each.part.name,
        weight=each.part.weight,
        context=each.context,
        running=best.running,
        gamma=each.gamma,
        alpha=each.alpha,
        tau=each.tau if each.gamma else 1.0,
        speedup=each.speedup,
        tpot_s=best.tpot_s,
        plain_tpot_s=plain.tpot_s,
        ttft_s=best.ttft_s if math.isfinite(best.ttft_s) else None,
        tokens_per_s=best.tokens_per_s,
        plain_tokens_per_s=plain.tokens_per_s,
    )
