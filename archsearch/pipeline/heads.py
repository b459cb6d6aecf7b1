"""Heads of a run: what is trained of each family, how they score, how they are served."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from archsearch.drafters.drafter import Drafter
from archsearch.drafters.registry import family as family_class
from archsearch.drafts.heads import (
    HEAD_LAYERS,
    HeadPlan,
    HeadTrainer,
    TrainedHead,
    head_folder,
    load_head,
    trained_heads,
)
from archsearch.drafts.trainer import DraftTrainer
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.models.files import HEAD_FAMILIES, HeadFamily, head_family_of
from archsearch.models.targets import resolve_drafter
from archsearch.pipeline.climb.race import HeadRungs
from archsearch.pipeline.session import SearchSession
from archsearch.runs.families import gamma_of_family
from archsearch.search.objective import Score, Scorer
from archsearch.speedup import tau_estimate

USUAL_GAMMA: Final = 3
HEAD_GAMMA: Final = 5
"""The longest round that a search trains heads for."""
CHAINS: Final = 1000  # what a head's first token is taken to be judged on, for its std
HOPED: Final = 0.8
"""Acceptance of a head that turned out well, by which the round that it is trained for is chosen: a
head runs shorter rounds than it was trained for, and accepts little in longer ones. Trained here:
.70 to .75 after 300 seconds (docs/families.md)."""


def head_plan(
    family: str,
    gamma: int | None = None,
    head_rows: int | None = None,
    layers: int | None = None,
    aux_layers: str | None = None,
    run: Path | None = None,
) -> HeadPlan:
    """What the options of `archsearch train` ask for; a head that `run` has goes on with its own
    gamma.

    Raises ArchsearchError for a family that cannot be trained, layers of Medusa heads, and
    auxiliary layers that are no numbers.
    """
    known = head_family_of(family)
    if known == "medusa" and (layers or aux_layers):
        raise ArchsearchError(
            "Medusa heads read the target's last state and have no layers; leave --layers and"
            " --aux-layers out"
        )
    try:
        ids = tuple(int(word) for word in (aux_layers or "").replace(",", " ").split())
    except ValueError:
        raise ArchsearchError(
            f"--aux-layers takes numbers of layers, as in 2,15,27; got {aux_layers!r}"
        ) from None
    if gamma is None and run is not None and known in trained_heads(run):
        gamma = load_head(head_folder(run, known)).plan.gamma
    return HeadPlan(known, gamma or USUAL_GAMMA, head_rows, layers or HEAD_LAYERS[known], ids)


def head_rungs(session: SearchSession, trainer: DraftTrainer) -> HeadRungs | None:
    """The heads among the candidates of a search; None where none was asked for."""
    asked = session.request.families
    families: list[HeadFamily] = [name for name in HEAD_FAMILIES if name in asked]
    if not families:
        return None
    heads, seed = HeadTrainer(trainer), session.request.seed

    def train(plan: HeadPlan, seconds: float) -> TrainedHead:
        folder = head_folder(session.run.path, plan.family)
        if plan.family in trained_heads(session.run.path):
            known = load_head(folder)
            if known.plan == plan and known.record.seconds >= seconds - 1.0:
                return known
        return heads.train(plan, seconds, seed)

    gammas = {family: gamma_to_train(session, family) for family in families}
    return HeadRungs(gammas, train, lambda head, taus: head_score(session, head, taus))


def gamma_to_train(session: SearchSession, family: HeadFamily) -> int:
    """Draft tokens a round that a head of this search is trained for: those of the run's head,
    where there is one; else what is best for the family's usual head on this device and load, if it
    turns out well (HOPED)."""
    if family in trained_heads(session.run.path):
        return load_head(head_folder(session.run.path, family)).plan.gamma
    drafter = _as_trained(session, family)
    asked = [gamma for gamma in session.scorer.gammas if gamma <= HEAD_GAMMA] or [
        min(session.scorer.gammas)
    ]
    hoped = Estimate(HOPED, 0.0, "given")
    taus = {gamma: tau_estimate(hoped, gamma) for gamma in drafter.gammas(asked)}
    return session.scorer.measured(drafter, hoped, taus).gamma


def _as_trained(session: SearchSession, name: HeadFamily) -> Drafter:
    """The family's usual drafter, with the layers and rows that a head trained here has."""
    kind, target = family_class(name), session.scorer.target
    usual = kind.usual(target)
    if not kind.has_layers:
        return usual
    plan = HeadPlan.usual(name, 1)
    rows = plan.head_rows(target.vocab_size)
    return kind.of(
        target, usual.architecture.replace(num_hidden_layers=plan.layers, draft_vocab_size=rows), {}
    )


def head_score(
    session: SearchSession,
    head: TrainedHead,
    taus: Mapping[int, Estimate] | None = None,
    scorer: Scorer | None = None,
) -> Score:
    """The score of a trained head by what was measured of it, or at other `taus`; by another scorer
    than the session's."""
    drafter: Drafter = resolve_drafter(str(head.folder), session.target).drafter
    measured = {gamma: each.estimate() for gamma, each in head.replays.items()}
    first = head.conditional[0]
    std = math.sqrt(first * (1.0 - first) / CHAINS)
    known = dict(taus) if taus is not None else measured
    return (scorer or session.scorer).measured(drafter, Estimate(first, std, "measured"), known)


def served_gamma(path: Path, head: TrainedHead) -> int:
    """Draft tokens a round that a run's head is served with unless something else is asked: what
    the run's last table of families found best, else all that it was trained for."""
    return min(gamma_of_family(path, head.plan.family) or head.plan.gamma, head.plan.gamma)
