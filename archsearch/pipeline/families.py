"""Which families of drafters a search looks at, each in its own space; its candidates besides:
drafters that exist, and what is soon made of those: a tuned sibling, the first layers of the
target."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from archsearch.acceptance.estimator import (
    Acceptance,
    AcceptanceContext,
    AcceptanceEstimator,
    GivenAcceptance,
)
from archsearch.acceptance.learnt import (
    DISTILLED_WORTH,
    PARENT_WORTH,
    tokens_behind,
    trained_as,
    training_of,
)
from archsearch.architecture.architecture import Architecture
from archsearch.drafters.drafter import Drafter, RoundKind
from archsearch.drafters.models import Independent
from archsearch.drafters.registry import Found, family, found_as, found_for
from archsearch.drafts.heads import trained_heads
from archsearch.engine_facts import EngineFacts, engine_facts, shared_by
from archsearch.engine_rounds import EngineRounds
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.models.files import HEAD_FAMILIES
from archsearch.models.targets import TargetRef, model_of
from archsearch.needs import Needs
from archsearch.pipeline.serving import reach_of
from archsearch.report.phrases import shell_path
from archsearch.runs.run import open_run
from archsearch.runs.tables import RankedFamily
from archsearch.search.objective import Score, Scorer
from archsearch.search.ranking import best_of_each
from archsearch.search.space import SearchSpace
from archsearch.speedup import moved

if TYPE_CHECKING:
    from archsearch.pipeline.session import SearchSession

INDEPENDENT: Final = Independent.family
OTHER_TRIALS: Final = 48
"""Recorded shapes of a family other than independent drafts: all of their spaces are scored, fewer
of their dimensions matter."""


@dataclass(frozen=True)
class FamilySpaces:
    """The space of each family of a search, in order; `left_out`: those without one for this
    target, and why."""

    spaces: tuple[SearchSpace, ...]
    left_out: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(space.family for space in self.spaces)


def kind_of(kinds: Sequence[RoundKind]) -> RoundKind:
    """The kind of drafter by which an engine's version is judged: a draft model's where one, or
    nothing, is asked for; else the first's."""
    return "draft_model" if not kinds or "draft_model" in kinds else kinds[0]


def choose_families(
    asked: Sequence[str],
    facts: EngineFacts,
    version: str | None,
    target: TargetRef,
    *,
    trains: bool,
) -> tuple[str, ...]:
    """The families that a search ranks: those that were named, else all that the engine runs and
    the target can have; where something is trained independent drafts (heads that were named are
    trained beside them). Raises ArchsearchError for one that the engine does not run, the target
    cannot have, or a search does not train."""
    if trains:
        others = [name for name in asked if name not in (INDEPENDENT, *HEAD_FAMILIES)]
        if others:
            raise ArchsearchError(
                f"a search trains independent drafts and {', '.join(HEAD_FAMILIES)} heads, not"
                f" {', '.join(others)}: leave out --family, or rank only (--no-confirm)"
            )
        if asked and INDEPENDENT not in asked:
            raise ArchsearchError(
                "a search that trains climbs by independent drafts and trains heads beside them:"
                f" add --family {INDEPENDENT}, or train a head alone (archsearch train RUN"
                " --family)"
            )
    for name in asked:
        if why := facts.lacks(name, version, target.architecture.model_type):
            raise ArchsearchError(why)
        if why := family(name).lacking(target.architecture):
            raise ArchsearchError(
                f"{target.name} cannot be served with {name}: {why}; leave out --family {name}"
            )
    if trains:
        return (INDEPENDENT,)
    if asked:
        return tuple(sorted(asked, key=lambda name: name != INDEPENDENT))
    known = [name for name in facts.families if not facts.lacks(name, version)]
    return tuple(name for name in known if not family(name).lacking(target.architecture))


def family_spaces(
    spaces: Iterable[SearchSpace],
    facts: EngineFacts,
    target: Architecture,
    rounds: EngineRounds | None = None,
    *,
    optional: bool,
) -> FamilySpaces:
    """The space of each family within what the engine runs; `rounds`: those of its version.
    `optional`: nobody named the families, so one without a valid shape, or that the version does
    not run, is left out and named. Raises ArchsearchError where none is left."""
    found: list[SearchSpace] = []
    left: dict[str, list[str]] = {}
    for space in spaces:
        name = space.family
        layers, states = facts.head_limits.get(name, (None, None))
        space = space.within(layers, states, facts.ngram_sizes)
        try:
            if why := facts.lacks(name, target=target.model_type):
                raise ArchsearchError(why)
            if optional and name == "eagle" and facts.lacks("eagle3", target=target.model_type):
                raise ArchsearchError("no library of `archsearch recipe` trains EAGLE-1 heads")
            space.check(target)
            if rounds is not None:
                rounds.running(family(name).rounds)
        except ArchsearchError as error:
            if not optional:
                raise
            left.setdefault(str(error), []).append(name)
            continue
        found.append(space)
    said = tuple(
        f"{', '.join(names)} {'are' if names[1:] else 'is'} left out: {why}"
        for why, names in left.items()
    )
    if not found:
        raise ArchsearchError("; ".join(said))
    return FamilySpaces(tuple(found), said)


def family_rows(ranked: Sequence[Score]) -> list[RankedFamily]:
    """The best of each family, with what it takes to have it."""
    found = []
    for score in best_of_each(ranked):
        kind = score.needs_kind
        trains = kind == "training" if kind else score.proposer.trains
        found.append(RankedFamily.of(score, needs=score.needs, trains=trains))
    return found


def check_independent(score: Score, command: str, run: Path, more: str = "") -> None:
    """Raise ArchsearchError where a command (train, confirm or export) is not done by rank for a
    rank's family, with the one that can be run next: it with `more`, or the training of a head
    without weights."""
    what = f"{command}ing"
    if score.needs is not None and score.is_found:
        raise ArchsearchError(
            f"rank {score.rank} exists, {score.needs.hub_id}: download it and name it where a draft"
            f" is asked for (archsearch estimate --draft {score.needs.hub_id}); {what} is for"
            " drafts of this run"
        )
    if score.family == INDEPENDENT:
        return
    name = f"rank {score.rank} is of the family {score.family} ({score.proposer.label()})"
    if score.family in HEAD_FAMILIES or (score.family == "ngram" and command == "confirm"):
        lacks = score.family != "ngram" and score.family not in trained_heads(run)
        if lacks or command == "train":
            command, more = "train", f" --gamma {score.gamma}"
        raise ArchsearchError(
            f"{name}: such drafters are named by their family, not by rank"
            f"{', and this one has no weights yet' * lacks}: archsearch {command}"
            f" {shell_path(run)} --family {score.family}{more}"
        )
    own = [each for each in open_run(run).scores() if each.family == INDEPENDENT]
    other = f"; rank {own[0].rank} is one: --rank {own[0].rank}" if own else ""
    raise ArchsearchError(
        f"{name}: {what} is done for independent drafts, EAGLE-3, P-EAGLE and Medusa heads"
        f" only{other}"
    )


EXISTING: Final = 6
"""Drafters that exist which a ranking keeps, however far behind they are."""
TUNING_TOKENS: Final = 1e7
"""Of the target's answers, for a draft that is tuned: people use 1e6 to 1e8."""
TUNING: Final = Estimate(0.23, 0.2, "prior")
"""logit(alpha) that tuning on the target's answers adds to a draft of its family (one term, fitted
over 15 studies of independent drafts; narrow text brought OSD .24 to .45 a decade). The law of what
a draft has learnt would add .9 to a draft of LLaMA-65B that was pruned, which no published tuning
shows on mixed text."""
TUNED: Final = "tuned drafts were published for narrow kinds of text, 23k to 3M tokens"
CUT: Final = "drafts that were pruned from a parent were published for one target"
PRUNING_TOKENS: Final = 4e8
"""As the drafts of LLaMA-65B that were pruned from LLaMA-7B took (arXiv 2402.01528)."""


def _tuned(untuned: AcceptanceEstimator) -> Any:
    """What an estimator predicts of drafts after they were tuned on the target's answers."""

    def predict(architecture: Architecture, context: AcceptanceContext) -> Acceptance:
        found = untuned.predict(architecture, context)
        return replace(found, alpha=moved(found.alpha, TUNING.value, TUNING.std))

    return SimpleNamespace(predict=predict)


@dataclass(frozen=True)
class Alternative:
    """A candidate besides those of the spaces, and the context that acceptance was asked in."""

    score: Score
    context: AcceptanceContext


def alternatives(session: SearchSession) -> list[Alternative]:
    """Those of the families that are searched, that the engine runs and that keep the limits; best
    first."""
    names, scorer, target = session.families.names, session.scorer, session.target
    exist: list[Alternative] = []
    reach = reach_of(session.request.asked, session.request.mix)
    for found in found_for(target.name, target.architecture, names, reach):
        context = published_context(scorer.context, found, target)
        needs = Needs("exists", found.row.hub_id)
        exist += _scored(session, scorer, found.drafter, context, needs=needs)
    own = [each for each in exist if each.score.family == INDEPENDENT]
    trained = [] if isinstance(scorer.acceptance, GivenAcceptance) else _trained(session, own)
    return sorted([*exist, *trained], key=lambda each: each.score.sort_key)


def within_budget(session: SearchSession, score: Score) -> bool:
    """Whether a drafter takes no more than the training budget."""
    budget, needs = session.scorer.context.budget, score.needs
    return budget is None or needs is None or needs.gpu_hours <= budget.hours * (1.0 + 1e-9)


def published_context(
    context: AcceptanceContext, found: Found, target: TargetRef
) -> AcceptanceContext:
    """Where acceptance is asked for of a drafter that exists: made as it was, on no budget."""
    made, model = replace(context, budget=None), model_of(found)
    return made if model is None else trained_as(made, model, training_of(model, target)[0])


def context_of(context: AcceptanceContext, score: Score, target: TargetRef) -> AcceptanceContext:
    """The same of a score of a run: `context`, or made as it was where it exists."""
    if score.needs is None or not score.needs.hub_id:
        return context
    found = found_as(score.needs.hub_id, target.name, target.architecture, score.family)
    return context if found is None else published_context(context, found, target)


def _trained(session: SearchSession, siblings: Sequence[Alternative]) -> list[Alternative]:
    """What is soon made of something that exists, at its own cost, whatever the budget."""
    scorer, budget = session.scorer, session.scorer.context.budget
    if budget is None or INDEPENDENT not in session.families.names:
        return []
    found: list[Alternative] = []
    best = max(siblings, key=lambda each: each.score.ranked_by, default=None)
    if best is not None and best.context.training == "shared" and best.score.needs is not None:
        drafter, hub_id = best.score.proposer, best.score.needs.hub_id or ""
        tuned = scorer.with_acceptance(_tuned(scorer.acceptance), best.context)
        needs = replace(budget.cost(drafter.training_parameters, TUNING_TOKENS), init=hub_id)
        found += _scored(session, tuned, drafter, best.context, needs=needs, assumed=TUNED)
    target = session.target.architecture
    if not target.num_experts:
        # A parent that lends its layers, and what they learn after, in tokens from scratch.
        learnt = PARENT_WORTH * tokens_behind(target) + DISTILLED_WORTH * PRUNING_TOKENS
        first = Independent.usual(target)
        context = replace(scorer.context, budget=None, training="shared", pretrain_tokens=learnt)
        init = f"the target's first {first.architecture.num_hidden_layers} layers"
        needs = replace(budget.cost(first.training_parameters, PRUNING_TOKENS), init=init)
        found += _scored(session, scorer, first, context, needs=needs, assumed=CUT)
    return found


def _scored(
    session: SearchSession,
    scorer: Scorer,
    drafter: Drafter,
    context: AcceptanceContext,
    **known: Any,
) -> list[Alternative]:
    """The drafter scored in a context, with fields that are `known`; [] where the engine does not
    run it or it is over a limit."""
    facts, source = engine_facts(session.request.engine), session.source
    with suppress(ArchsearchError):  # cannot be sharded, drafts no gamma that is asked for
        facts.check_drafter(drafter, shared_by(scorer.workload), source.version)
        if scorer.feasible(drafter):
            score = scorer.with_acceptance(scorer.acceptance, context)(drafter)
            return [Alternative(replace(score, **known), context)]
    return []
