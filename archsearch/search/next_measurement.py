"""What a measurement would teach about a ranking, before it is made.

The candidates' ln(speed-up) are jointly normal: what acceptance leaves open (the estimator's
covariance of logit(alpha), times its slope in tau), what all share of the times (the target's step,
its verification, what the engine adds) and each draft's own time. A measurement observes a linear
function of the same with an error of its own, so that

    covariance after = C - c V^-1 c'  mean after ~ N(mean, c V^-1 c')
    c = Cov(candidates, observed), V = Var(observed)

which says how sure the answer will be, and what is won by changing to another winner (expected
value of information; Raiffa and Schlaifer 1961). To first order: errors of alpha near 0 and 1 are
not normal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from archsearch import speedup as speculation
from archsearch.acceptance.estimator import AcceptanceContext, AcceptanceEstimator
from archsearch.acceptance.families import (
    Asked,
    FamilyAcceptance,
    acceptance_of,
    gap_std,
    table_row,
)
from archsearch.acceptance.prior import PriorAcceptance
from archsearch.architecture.architecture import Architecture
from archsearch.estimate import Array, Estimate
from archsearch.search.objective import Score, Scorer
from archsearch.search.ranking import best_of_each
from archsearch.search.rungs import draws_of

MOST: Final = 24  # of the best candidates that are looked at
# kinds of drafters of which the table knows the doubt too
IN_TABLE: Final = ("independent", "eagle1", "eagle3", "mtp", "block", "medusa")
_DRAWS: Final = 4096
AMONG: Final = 6  # of which two are trained for short

Draft = tuple[Architecture, AcceptanceContext]


@dataclass(frozen=True)
class Observation:
    """What a measurement sees, k numbers: `cross` [n, k], their covariance with the candidates'
    ln(speed-up), and `own` [k, k], their variance, error included."""

    cross: Array
    own: Array


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is expected after a measurement. `std`, `std_after`: of ln(speed-up) of the winner,
    whichever then wins; `gain`: expected gain in ln(speed-up) by changing to another winner;
    `changes`: chance that another one wins."""

    std: float
    std_after: float
    gain: float
    changes: float

    @property
    def value(self) -> float:
        """What is won: the narrowing and the gain, both in ln(speed-up)."""
        return self.std - self.std_after + self.gain


class Belief:
    """What is known of the best `scores` of a search together.

    `mean` [n] and `covariance` [n, n] of ln(speed-up); `slopes` [n]: d ln(speed-up) / d
    logit(alpha); `logits` [n, n]: covariance of logit(alpha); `shared` [3, n]: how one std of each
    part of the times that all have in common moves each (the target's step, its verification, what
    the engine adds); `drafts` [n]: std of ln(speed-up) from each draft's own time.
    """

    def __init__(
        self,
        scorer: Scorer,
        scores: Sequence[Score],
        context_of: Callable[[Score], AcceptanceContext] | None = None,
    ) -> None:
        """`context_of`: where acceptance was asked for of a score, as of drafters that exist; None:
        the scorer's for all."""
        self.scores = best_of_each(scores, _but_heads)[:MOST]
        self.scorer = scorer
        self.mean = np.log([score.speedup.value for score in self.scores])
        self.drafters = [
            (score.proposer, context_of(score) if context_of else scorer.context)
            for score in self.scores
        ]
        self.logits = logit_covariance(scorer.acceptance, self.drafters)
        known = (scorer.predicted_acceptance(*each) for each in self.drafters)
        parts = [_parts(*each) for each in zip(known, self.scores, strict=True)]
        self.slopes, drift, share, decode, verify, self.drafts, added = np.array(parts).T
        rho = scorer.target_correlation
        # decode and verify as two independent causes: decode, what of verify goes its own way
        self.shared = np.array([decode - rho * verify, -math.sqrt(1.0 - rho**2) * verify, -added])
        kinds = [score.proposer.acceptance for score in self.scores]
        alike = np.array([[float(a == b) for b in kinds] for a in kinds])
        learnt = self.slopes[:, None] * self.logits * self.slopes
        self.covariance = learnt + self.times + np.outer(drift, drift) * alike + np.diag(share**2)

    @property
    def lead(self) -> int:
        """The candidate with the highest predicted speed-up."""
        return int(self.mean.argmax())

    @property
    def times(self) -> Array:
        """[n, n]: the part of the covariance that seconds bring."""
        return self.shared.T @ self.shared + np.diag(self.drafts**2)

    def outlook(self, seen: Observation) -> Outlook:
        """What is expected after `seen`."""
        learnt = seen.cross @ np.linalg.solve(seen.own, seen.cross.T)
        after = np.sqrt(np.clip(np.diag(self.covariance) - np.diag(learnt), 0.0, None))
        draws = draws_of(self.mean, learnt, draws=_DRAWS)
        winner = draws.argmax(axis=1)
        lead = self.lead
        return Outlook(
            math.sqrt(float(self.covariance[lead, lead])),
            float(after[winner].mean()),
            # paired: the lead's own draws have its mean
            float(np.mean(draws.max(axis=1) - draws[:, lead])),
            float(np.mean(winner != lead)),
        )

    # --- measurements

    def acceptance_of(self, draft: Draft, logit_std: float) -> Observation | None:
        """alpha of an independent draft that exists, with an error of `logit_std`; None where the
        estimator cannot relate it to the candidates."""
        prior = self.scorer.acceptance
        if not isinstance(prior, PriorAcceptance):
            return None
        known = [score.proposer.acceptance in IN_TABLE for score in self.scores]
        asked = [table_row(*each) for each, yes in zip(self.drafters, known, strict=True) if yes]
        joint = prior.joint([*asked, draft])
        cross = np.zeros((len(self.scores), 1))
        cross[known] = self.slopes[known][:, None] * joint[:-1, -1:]
        return Observation(cross, joint[-1:, -1:] + logit_std**2)

    def trainings_of(self, chosen: Sequence[int], common_std: float, own_std: float) -> Observation:
        """alpha of some candidates after short trainings: where each will stand with an error of
        `own_std`, and how high all stand with one of `common_std` (logit)."""
        own = self.logits[np.ix_(chosen, chosen)] + common_std**2 + np.eye(len(chosen)) * own_std**2
        return Observation(self.slopes[:, None] * self.logits[:, list(chosen)], own)

    def round_of(self, index: int, relative_std: float) -> Observation:
        """Target and target + draft run at a given acceptance: the times of one candidate with an
        error of `relative_std`."""
        return Observation(
            self.times[:, [index]], self.times[[index], [index]][None] + relative_std**2
        )

    def profile(self, relative_std: float) -> Observation:
        """Every pass measured on the device: the target's step, its verification and each draft,
        each with an error of `relative_std` of its own seconds. What the engine adds stays as it
        is."""
        n = len(self.scores)
        loads = np.concatenate([self.shared[:2], np.diag(self.drafts)])  # [2 + n, n] of unit causes
        decode = self.scorer.decode_s.relative_std
        rho = self.scorer.target_correlation
        verify = float(np.mean([score.verify_s.relative_std for score in self.scores]))
        own = [score.draft_s.relative_std for score in self.scores]
        seen = np.zeros((2 + n, 2 + n))  # [numbers seen, causes]
        seen[0, 0] = decode
        seen[1, :2] = rho * verify, math.sqrt(1.0 - rho**2) * verify
        seen[2:, 2:] = np.diag(own)
        return Observation(loads.T @ seen.T, seen @ seen.T + np.eye(2 + n) * relative_std**2)


def _parts(known: FamilyAcceptance, score: Score) -> tuple[float, ...]:
    """Of one score, in ln(speed-up): the slope in logit(alpha), and one std of the drift, of how
    often it drafts, of the target's step, its verification, the draft's time and the rest of a
    round."""
    alpha, drift, gamma = score.alpha.value, known.acceptance.drift, score.gamma
    sure = replace(known, share=None if known.share is None else replace(known.share, std=0.0))

    def moved(alpha_std: float, drift_std: float) -> float:
        tau = speculation.tau_estimate(
            Estimate(alpha, alpha_std, "given"), gamma, Estimate(drift.value, drift_std, "given")
        )
        return sure.tau(tau).relative_std

    slope, by_drift = moved(max(alpha * (1.0 - alpha), 0.0), 0.0), moved(0.0, drift.std)
    by_alpha = slope * speculation.logit_std(score.alpha)
    left = max(score.tau.relative_std**2 - by_alpha**2 - by_drift**2, 0.0)
    share = 0.0 if known.share is None else math.sqrt(left)
    by_token = score.tpot_s.value * score.tau.value
    round_s = score.round_s or Estimate(by_token, 0.0, score.tpot_s.source)
    verify, draft = score.verify_s.std / round_s.value, score.draft_s.std / round_s.value
    added = math.sqrt(max(round_s.relative_std**2 - verify**2 - draft**2, 0.0))
    return slope, by_drift, share, score.decode_s.relative_std, verify, draft, added


def _but_heads(score: Score) -> object:
    """What scores share that differ by heads alone: what no term explains of twins is alike, and
    counting them as several draws would promise a gain that nobody can have."""
    arch = score.architecture
    sizes = arch.hidden_size, arch.intermediate_size, arch.head_rows
    return score.family, arch.num_hidden_layers, sizes


def logit_covariance(acceptance: AcceptanceEstimator, drafters: Sequence[Asked]) -> Array:
    """[n, n] covariance of logit(alpha) of drafters, each asked for in its own context: the
    estimator's own where it knows all of them, else what the stds and those of the differences
    say."""
    known = all(drafter.acceptance in IN_TABLE for drafter, _ in drafters)
    if isinstance(acceptance, PriorAcceptance) and known:
        return acceptance.joint([table_row(*each) for each in drafters])
    found = (acceptance_of(each, acceptance, context) for each, context in drafters)
    own = np.array([speculation.logit_std(each.acceptance.alpha) ** 2 for each in found])
    gaps = np.array(
        [[gap_std(a, b, acceptance) ** 2 if a != b else 0.0 for b in drafters] for a in drafters]
    )
    return 0.5 * (own[:, None] + own[None, :] - gaps)


def climbs(score: Score) -> bool:
    """Whether a search with short trainings would train it: an independent draft of its space."""
    needs = score.needs
    return score.drafter is None and (needs is None or (needs.kind != "exists" and not needs.init))


def best_pair(
    belief: Belief, common_std: float, own_std: float
) -> tuple[tuple[int, int], Outlook] | None:
    """The two of the best AMONG independent drafts whose short trainings teach most; None where
    there are no two."""
    trained = [i for i, score in enumerate(belief.scores) if climbs(score)][:AMONG]
    seen = [
        (pair, belief.outlook(belief.trainings_of(pair, common_std, own_std)))
        for pair in itertools.combinations(trained, 2)
    ]
    return max(seen, key=lambda item: item[1].value, default=None)
