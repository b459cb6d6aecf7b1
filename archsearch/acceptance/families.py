"""The predicted acceptance of a drafter of any family: alpha at the first position, its drift along
the block, and how often it drafts.

The estimator has terms for independent drafts and for heads. What the others are taken to accept
(drafting in parallel, lookup, early exit) is here, with where each figure is from.

Of a head of another size than usual HEAD_SIZE is assumed. An alpha that the user gave holds for
every family. ASSUMED: families of which too little was published to rank them by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from archsearch.acceptance.estimator import (
    Acceptance,
    AcceptanceContext,
    AcceptanceEstimator,
    GivenAcceptance,
)
from archsearch.acceptance.prior import PriorAcceptance
from archsearch.acceptance.terms import beyond_training
from archsearch.architecture.architecture import Architecture
from archsearch.drafters.drafter import Drafter
from archsearch.drafters.heads import ChainHead
from archsearch.estimate import QUANTILE_95, Estimate
from archsearch.speedup import (
    Tree,
    accepted_by_position,
    alpha_estimate,
    alpha_from_tau,
    drifting_positions,
    logit,
    logit_std,
    moved,
    sigmoid,
    tau_estimate,
    tau_interval,
)

# Logit per position of P-EAGLE heads: fitted as those of the table's kinds are to five
# sweeps of three targets (one study a target), benchmarks/results/2026-11-22-families/parallel.csv.
PARALLEL_HEAD_DRIFT: Final = Estimate(-0.17, 0.14, "prior")
# The same of PARD: its paper's first and fourth position of one draft, .93 -> .90 and .88 -> .85.
PARALLEL_DRIFT: Final = Estimate(-0.11, 0.15, "prior")
_IN_PARALLEL: Final = {"parallel_head": PARALLEL_HEAD_DRIFT, "parallel_draft": PARALLEL_DRIFT}
# logit: what drafting in parallel costs at the first position. Nobody varied it at equal training;
# one P-EAGLE head is 0.2 to 0.6 above another's EAGLE-3 head of the same target.
PARALLEL_STD: Final = 0.3
# The same per doubling of the context beyond HEAD_CONTEXT, of a PARD of another target too: its
# tuning saw 512 tokens (config/train of AMD-AGI/PARD). Taken to be as of heads (`long_context`).
PARALLEL_CONTEXT: Final = Estimate(-0.35, 0.35, "prior")
# Lookup: what followed once goes on once it has begun. Conditional acceptance by position of n-gram
# drafts of a Llama of 8B in vLLM (pull request 24344): .81 .91 .95 .97 .97 on code edits, .69 .83
# .88 .90 .93 on InstructCoder: +0.65 and +0.45 a position.
LOOKUP_DRIFT: Final = Estimate(0.5, 0.2, "prior")
TREE_STD: Final = 0.1  # of the tokens that a tree brings: one head was published with several
LOOKUP_STD: Final = 0.6  # logit of the first position, between texts
SHARE_STD: Final = 0.15
LOOKUP_TOKENS: Final = 10  # as prompt lookup drafted in the studies below
# Tokens beyond the first, suffix trees / n-gram: 1.11 to 1.17 times its speed-up on Spec-Bench
# (arXiv 2411.04975); converted.
SUFFIX_GAIN: Final = 1.2


# logit(alpha) per decade of a head's body against the usual one's: what the table has for
# independent drafts, roughly. Nobody varied it for heads at equal training: as unsure as it is
# large.
HEAD_SIZE: Final = Estimate(0.3, 0.3, "prior")


@dataclass(frozen=True)
class LookupFigures:
    """Of one kind of text: acceptance of the first token of a match (assumed, between a chat and an
    edit), and tau over all rounds of prompt lookup with `tokens` (means over four targets of
    Spec-Bench's sets, batch 1, temperature 0)."""

    first: float
    tau: float
    tokens: int = LOOKUP_TOKENS


LOOKUPS: Final[Mapping[str, LookupFigures]] = {
    "chat": LookupFigures(0.45, 1.58),  # MT-Bench 1.55, Spec-Bench's conversations and rest 1.67
    "code": LookupFigures(0.55, 1.77),  # HumanEval
    # InstructCoder (vLLM pull request 24344), 5 tokens; a Blazedit .81, 2.96
    "editing": LookupFigures(0.69, 1.95, 5),
    "math": LookupFigures(0.45, 1.63),  # GSM8K
    "qa": LookupFigures(0.40, 1.24),  # Natural Questions
    "summarisation": LookupFigures(0.60, 2.05),  # CNN/DM
    "translation": LookupFigures(0.40, 1.24),  # as qa: assumed
    "completion": LookupFigures(0.45, 1.58),  # as chat: assumed
    "mixed": LookupFigures(0.50, 1.67),  # all of Spec-Bench
    "narrow": LookupFigures(0.50, 1.67),  # as mixed: assumed
}
# logit(alpha) of the first `share` of a target's layers, without training: 5 % accepted at 8 of 30
# layers, 46 % at 24 of 30.
EXIT_LEVEL: Final = (logit(0.05), logit(0.46))
EXIT_SHARES: Final = (8 / 30, 24 / 30)
EXIT_STD: Final = 0.8


# Kinds of acceptance of which less than three targets were published (rows of the table), or
# nothing of the user's text: why they are assumed.
ASSUMED: Final[Mapping[str, str]] = {
    "parallel_head": "published heads of three targets, none beside an EAGLE-3 head trained alike",
    "parallel_draft": "positions of one published draft",
    "medusa": "6 published rows of one target",
    "ngram": "published by kind of text, not replayed on yours",
    "suffix": "published by kind of text, not replayed on yours",
    "early_exit": "two untrained cuts of one target",
}


@dataclass(frozen=True)
class FamilyAcceptance:
    """Acceptance in rounds that draft, and `share`, how many do: None where all do. `assumed`: why
    it is no more than a belief, "" where enough was published, measured or given."""

    acceptance: Acceptance
    share: Estimate | None = None
    assumed: str = ""
    # over all rounds, by gamma, where they were counted: no curve then
    taus: Mapping[int, Estimate] | None = None

    @property
    def drafting(self) -> float:
        """The share of rounds that draft."""
        return 1.0 if self.share is None else self.share.value

    def tau_at(self, gamma: int) -> Estimate:
        """tau over all rounds at a gamma, with its interval."""
        alpha, drift = self.acceptance.alpha, self.acceptance.drift
        tau = tau_estimate(alpha, gamma, drift)
        return self.tau(tau.between(tau_interval(alpha, gamma, drift)))

    def tau(self, tau: Estimate) -> Estimate:
        """tau over all rounds from that of rounds that draft."""
        if self.share is None:
            return tau
        more, share = tau.value - 1.0, self.share.value
        value, unsure = 1.0 + share * more, self.share.std
        found = Estimate(value, math.hypot(share * tau.std, more * unsure), tau.source)
        if tau.low is None or tau.high is None:
            return found
        down, up = (
            math.hypot(share * (end - tau.value), QUANTILE_95 * more * unsure)
            for end in (tau.low, tau.high)
        )
        return found.between((max(1.0, value - down), value + up))


def acceptance_of(
    drafter: Drafter, estimator: AcceptanceEstimator, context: AcceptanceContext
) -> FamilyAcceptance:
    """Predicted acceptance of `drafter` in `context`, whose own `drafter` field is set here."""
    found = _predicted(drafter, estimator, context)
    if isinstance(drafter, ChainHead) and drafter.tree is not None:
        found = _of_tree(drafter.tree, found.acceptance, estimator)
    if isinstance(estimator, GivenAcceptance):
        return found
    return replace(found, assumed=ASSUMED.get(drafter.acceptance, ""))


def _of_tree(tree: Tree, chain: Acceptance, estimator: AcceptanceEstimator) -> FamilyAcceptance:
    """Tokens a round of a tree whose likeliest branch accepts as `chain`; a tau that was given is
    the tree's own."""
    if isinstance(estimator, GivenAcceptance) and estimator.rounds is not None:
        tau, alpha = estimator.rounds[0], tree.alpha(estimator.rounds[0])
        given = Acceptance(Estimate(alpha, 0.0, "given"))
        return FamilyAcceptance(given, taus={tree.steps: Estimate(tau, 0.0, "given")})
    level, spread = logit(chain.alpha.value), logit_std(chain.alpha)

    def tau_at(stds: float) -> float:
        alpha = sigmoid(level + stds * spread)
        return tree.tau(drifting_positions(alpha, chain.drift.value, tree.steps))

    low, middle, high = (tau_at(stds) for stds in (-QUANTILE_95, 0.0, QUANTILE_95))
    doubt = TREE_STD * (middle - 1.0)
    std = math.hypot((high - low) / (2.0 * QUANTILE_95), doubt)
    found = Estimate(middle, std, chain.alpha.source)
    if std:
        ends = [math.hypot(end - middle, QUANTILE_95 * doubt) for end in (low, high)]
        found = found.between((max(1.0, middle - ends[0]), middle + ends[1]))
    return FamilyAcceptance(chain, taus={tree.steps: found})


def _predicted(
    drafter: Drafter, estimator: AcceptanceEstimator, context: AcceptanceContext
) -> FamilyAcceptance:
    kind, shape = drafter.acceptance, drafter.architecture
    given = estimator if isinstance(estimator, GivenAcceptance) else None
    if kind in _OWN:
        own = _OWN[kind](drafter, context)
        if given is None:
            return own
        if given.rounds is not None and own.share is not None:
            return _drafting_in(own, *given.rounds)
        return replace(own, acceptance=given.predict(shape, context))
    place = (_bought if kind == "parallel_draft" else context_for)(drafter, context)
    found = estimator.predict(shape, place)
    if given is None and kind in _IN_PARALLEL:
        far = beyond_training(shape, context.context_len) if kind == "parallel_draft" else 0.0
        far *= place.training != "target"  # of those the table has it
        loss = far * PARALLEL_CONTEXT.value, math.hypot(PARALLEL_STD, far * PARALLEL_CONTEXT.std)
        found = Acceptance(moved(found.alpha, *loss), _IN_PARALLEL[kind])
    if given is None and (decades := _decades(drafter, context)):
        size = HEAD_SIZE.value * decades, HEAD_SIZE.std * decades
        found = replace(found, alpha=moved(found.alpha, *size))
    return FamilyAcceptance(found)


def _decades(drafter: Drafter, context: AcceptanceContext) -> float:
    """log10 of a head's body over that of the usual head of its family for the target."""
    body = drafter.body_parameters()
    if context.target is None or not body:
        return 0.0
    return math.log10(body / type(drafter).usual(context.target).body_parameters())


def context_for(drafter: Drafter, context: AcceptanceContext) -> AcceptanceContext:
    """The context in which the table is asked about a drafter: of its kind, made for its target, on
    the tokens that the budget buys for it. What comes with its target (MTP) accepts as published
    ones do, whatever the budget."""
    kind = {"parallel_head": "eagle3"}.get(drafter.acceptance, drafter.acceptance)
    if kind in ("independent", "parallel_draft", *_OWN):
        return context
    if kind == "mtp":
        return replace(context, drafter=kind, training="target", trained_tokens=None, budget=None)
    bought = _bought(drafter, replace(context, training="target"))
    return replace(bought, drafter=kind, budget=None)


def _bought(drafter: Drafter, context: AcceptanceContext) -> AcceptanceContext:
    """The context with the tokens that its budget buys, where a training may run several rows a
    token."""
    if context.budget is None or context.trained_tokens is not None or context.training != "target":
        return context
    tokens = context.budget.tokens(drafter.training_parameters)
    return replace(context, trained_tokens=float(tokens))


Asked = tuple[Drafter, AcceptanceContext]
"""A drafter, and where its acceptance is asked about."""


def table_row(
    drafter: Drafter, context: AcceptanceContext
) -> tuple[Architecture, AcceptanceContext]:
    """What the table is asked for of a drafter."""
    return drafter.architecture, context_for(drafter, context)


def gap_std(first: Asked, second: Asked, estimator: AcceptanceEstimator) -> float:
    """Std of logit(alpha of first) - logit(alpha of second).

    Between families, and drafts made in different ways, what the table knows of both is correlated:
    a study's target, domain and temperature are the same.
    """
    (one, context), (other, others) = first, second
    if isinstance(estimator, GivenAcceptance):
        return estimator.difference_std(one.architecture, other.architecture, context)
    if one.family == other.family and context == others:
        shape, place = table_row(one, context)
        alike = estimator.difference_std(shape, other.architecture, place)
        decades = _decades(one, context) - _decades(other, context)
        return math.hypot(alike, HEAD_SIZE.std * decades)
    kinds = {one.acceptance, other.acceptance}
    if isinstance(estimator, PriorAcceptance) and kinds.isdisjoint(_OWN):
        return estimator.gap_std(table_row(*first), table_row(*second))
    both = (acceptance_of(each, estimator, where).acceptance for each, where in (first, second))
    return math.hypot(*(logit_std(found.alpha) for found in both))


def _lookup(drafter: Drafter, context: AcceptanceContext) -> FamilyAcceptance:
    text = LOOKUPS[context.domain]
    alpha = alpha_estimate(logit(text.first), LOOKUP_STD, "prior")
    reached = math.fsum(
        accepted_by_position(drifting_positions(text.first, LOOKUP_DRIFT.value, text.tokens))
    )
    share = min(1.0, (text.tau - 1.0) / reached)
    if drafter.acceptance == "suffix":
        share = min(1.0, SUFFIX_GAIN * share)
    return FamilyAcceptance(Acceptance(alpha, LOOKUP_DRIFT), Estimate(share, SHARE_STD, "prior"))


def _drafting_in(found: FamilyAcceptance, tau: float, gamma: int) -> FamilyAcceptance:
    """Where tau over all rounds was given: a match goes on as is usual, and so many rounds have
    one; where all would not be enough, all have and more is accepted."""
    share = (tau - 1.0) / (found.acceptance.tau(gamma).value - 1.0)
    if share > 1.0:
        return FamilyAcceptance(
            Acceptance(Estimate(alpha_from_tau(tau, gamma), 0.0, "given")),
            Estimate(1.0, 0.0, "given"),
        )
    known = found.acceptance.alpha, found.acceptance.drift
    sure = Acceptance(*(replace(each, std=0.0, source="given") for each in known))
    return FamilyAcceptance(sure, Estimate(share, 0.0, "given"))


def _exit(drafter: Drafter, context: AcceptanceContext) -> FamilyAcceptance:
    layers = drafter.architecture.num_hidden_layers
    share = layers / (context.target.num_hidden_layers if context.target else 2 * layers)
    (low, high), (first, last) = EXIT_LEVEL, EXIT_SHARES
    level = low + (high - low) * (share - first) / (last - first)
    alpha = alpha_estimate(level, EXIT_STD, "prior")
    return FamilyAcceptance(Acceptance(alpha, Estimate(0.0, 0.05, "prior")))


_OWN: Final[Mapping[str, Callable[[Drafter, AcceptanceContext], FamilyAcceptance]]] = {
    "ngram": _lookup,
    "suffix": _lookup,
    "early_exit": _exit,
}
