"""Heads of a run: what is trained of each family, how they score, how they are served; and the best
drafter of each family on the run's own text, heads among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from archsearch.acceptance.lookup import texts_of
from archsearch.drafters.drafter import Drafter
from archsearch.drafters.registry import family as family_class
from archsearch.drafts.heads import (
    HEAD_LAYERS,
    HeadPlan,
    HeadTrainer,
    TrainedHead,
    find_head,
    head_folder,
    load_head,
    trained_heads,
)
from archsearch.drafts.records import TrainedDraft, load_trained
from archsearch.drafts.trainer import DraftTrainer
from archsearch.engine_facts import engine_facts
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.estimate import Estimate
from archsearch.models.files import HEAD_FAMILIES, HeadFamily, head_family_of
from archsearch.models.targets import resolve_drafter
from archsearch.pipeline.chains import Replays
from archsearch.pipeline.climb.race import HeadRungs
from archsearch.pipeline.session import SearchSession
from archsearch.pipeline.untrained import LOOKUPS, drafter_of, lookup_in, replayed
from archsearch.records import save
from archsearch.runs.candidate import read_training
from archsearch.runs.tables import FAMILIES_FILE, FamilyRow
from archsearch.search.objective import Score, Scorer
from archsearch.speedup import tau_estimate

USUAL_GAMMA: Final = 3
HEAD_GAMMA: Final = 5
"""The longest round that a search trains heads for."""
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
    *,
    run: Path,
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
    if gamma is None and (head := find_head(run, known)) is not None:
        gamma = head.plan.gamma
    return HeadPlan(known, gamma or USUAL_GAMMA, head_rows, layers or HEAD_LAYERS[known], ids)


def keep_states(session: SearchSession, trainer: DraftTrainer) -> None:
    """What the heads of a search read is kept while its texts are written."""
    for family in _head_families(session):
        with suppress(ArchsearchError):  # of a target whose heads cannot be trained
            HeadTrainer(trainer).keep_states(HeadPlan.usual(family, 1))


def head_rungs(session: SearchSession, trainer: DraftTrainer) -> HeadRungs:
    """The heads among the candidates of a search."""
    heads, seed = HeadTrainer(trainer), session.request.seed

    def train(plan: HeadPlan, seconds: float) -> TrainedHead:
        known = find_head(session.run.path, plan.family)
        if known is not None and known.plan == plan and known.record.seconds >= seconds - 1.0:
            return known
        return heads.train(plan, seconds, seed)

    gammas = {family: gamma_to_train(session, family) for family in _head_families(session)}
    return HeadRungs(gammas, train, lambda head, taus: head_score(session, head, taus))


def _head_families(session: SearchSession) -> list[HeadFamily]:
    return [name for name in HEAD_FAMILIES if name in session.request.families]


def gamma_to_train(session: SearchSession, family: HeadFamily) -> int:
    """Draft tokens a round that a head of this search is trained for: those of the run's head,
    where there is one; else what is best for the family's usual head here, if it turns out well
    (HOPED)."""
    if (head := find_head(session.run.path, family)) is not None:
        return head.plan.gamma
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
    """The score of a trained head by what was measured of it, or at other `taus`, or by another
    scorer."""
    drafter: Drafter = resolve_drafter(str(head.folder), session.target).drafter
    known = head.taus if taus is None else taus
    return (scorer or session.scorer).measured(drafter, head.alpha, dict(known))


def served_gamma(path: Path, head: TrainedHead) -> int:
    """Draft tokens a round that a run's head is served with: the best by held-out text in the run's
    engine; where its profile is gone all that it was trained for."""
    try:
        return head_score(SearchSession.reopen(path), head).gamma
    except MissingDataError:
        return head.plan.gamma


def write_family_table(
    session: SearchSession, trainer: DraftTrainer, trained: Sequence[TrainedDraft]
) -> list[FamilyRow]:
    """The best of every family that was trained or needs no training, on the run's held-out text,
    fastest first; kept as families.json."""
    scorer, run, engine = session.scorer, session.run, session.request.engine
    tokens = f"{trainer.texts.choosing().written_tokens:,} held-out tokens"
    found: list[FamilyRow] = []
    if trained:
        draft = max(trained, key=lambda draft: draft.score(scorer).speedup.value)
        ranks = {score.architecture: score.rank for score in run.scores()}
        score = replace(draft.score(scorer), rank=ranks.get(draft.architecture))
        record = read_training(draft.folder)  # None: weights that were put there
        seconds = record.seconds if record is not None else 0.0
        found.append(FamilyRow.of(score, measured_on=tokens, seconds=seconds))
        if scorer.workload.batch_size == 1:  # chains run one request at a time
            with suppress(ArchsearchError):  # none can be replayed, nothing repeats
                replays = Replays.of(scorer, engine, draft, trainer)
                found[0] = replace(found[0], note=replays.stopping_words())
                best = replays.chain()
                score, note = replays.score(best), replays.words(best)
                # its training is its draft's
                found.append(FamilyRow.of(score, measured_on=tokens, seconds=seconds, note=note))
    for name in trained_heads(run.path):
        head, lacks = load_head(head_folder(run.path, name)), _lacks(session, name)
        found.append(
            FamilyRow.of(
                head_score(session, head),
                measured_on=tokens,
                seconds=head.record.seconds,
                states_s=head.record.auxiliary_s,
                note=f"its time is priced as if the engine ran it; {lacks}" if lacks else "",
            )
        )
    texts = texts_of(trainer.texts.choosing().sequences)
    for lookup in (name for name in LOOKUPS if not _lacks(session, name)):
        with suppress(ArchsearchError):  # no text is long enough
            own_way = lookup_in(engine, lookup)
            known = replayed(texts, own_way, scorer.gammas)
            score = scorer.with_families({lookup: known})(drafter_of(own_way, scorer.target))
            found.append(FamilyRow.of(score, measured_on=tokens))
    found.sort(key=lambda row: -row.speedup.value)
    save(run.path / FAMILIES_FILE, {"families": found})
    return found


def compare_families(path: Path) -> list[FamilyRow]:
    """The table of a run that has trained, made anew."""
    session = SearchSession.reopen(path)
    ranks = map(session.run.candidate, session.run.ranks())
    trained = [load_trained(each.architecture, each.folder) for each in ranks if each.has_weights]
    return write_family_table(session, session.trainer(), trained)


def _lacks(session: SearchSession, name: str) -> str:
    facts, kind = engine_facts(session.request.engine), session.target.architecture.model_type
    return facts.lacks(name, session.source.version, kind)
