"""The best drafter of each family on a run's own text: trained ones as they were measured, lookup
replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from archsearch.acceptance.lookup import texts_of
from archsearch.drafters.drafter import Drafter
from archsearch.drafters.lookup import NGram
from archsearch.drafters.registry import family as family_class
from archsearch.drafts.heads import TrainedHead, head_folder, load_head, trained_heads
from archsearch.drafts.records import TrainedDraft, load_trained
from archsearch.drafts.trainer import DraftTrainer
from archsearch.engine_facts import engine_facts
from archsearch.errors import ArchsearchError
from archsearch.files import read_json
from archsearch.pipeline.chains import Replays
from archsearch.pipeline.families import family_row
from archsearch.pipeline.heads import head_score
from archsearch.pipeline.lookups import LOOKUPS, lookup_in, replayed
from archsearch.pipeline.session import SearchSession
from archsearch.runs.families import write_families
from archsearch.search.objective import Score


@dataclass(frozen=True)
class FamilyResult:
    """The best of one family on a run's held-out text. `seconds` of training, `states_s`: of
    reading the text's states besides, `note`: where the engine does not run it, or why there is
    nothing."""

    score: Score
    measured_on: str
    seconds: float = 0.0
    states_s: float = 0.0
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        return family_row(self.score) | {
            "trains": self.score.proposer.trains,
            "measured_on": self.measured_on,
            "seconds": self.seconds,
            "states_s": self.states_s,
            "note": self.note,
        }


def family_results(
    session: SearchSession, trainer: DraftTrainer, trained: Sequence[TrainedDraft]
) -> list[FamilyResult]:
    """The best of every family that was trained or needs no training, measured on the run's
    held-out text, fastest first."""
    found: list[FamilyResult] = []
    best = _best(session, trained)
    tokens = f"{trainer.texts.choosing().written_tokens:,} held-out tokens"
    if best is not None:
        score = session.scorer.measured(best.architecture, best.alpha, best.tau)
        rank = next(
            (each.rank for each in session.run.scores() if each.architecture == best.architecture),
            None,
        )
        replays = None
        if session.scorer.workload.batch_size == 1:  # chains run one request at a time
            replays = Replays.known(session.scorer, session.request.engine, best, trainer)
        note = replays.stopping_words if replays is not None else ""
        seconds = _seconds(best.folder)
        found.append(FamilyResult(replace(score, rank=rank), tokens, seconds, note=note))
        if replays is not None:
            found += _chain_result(replays, tokens)
    for name in trained_heads(session.run.path):
        found.append(_head_result(session, load_head(head_folder(session.run.path, name)), tokens))
    texts, engine = texts_of(trainer.texts.choosing().sequences), session.request.engine
    for lookup in (name for name in LOOKUPS if not _lacks(session, name)):
        try:
            known = replayed(texts, lookup_in(engine, lookup), session.scorer.gammas)
        except ArchsearchError:
            continue
        scorer = session.scorer.with_families({lookup: known})
        found.append(FamilyResult(scorer(_usual(lookup, session)), tokens))
    return sorted(found, key=lambda result: -result.score.speedup.value)


def _chain_result(replays: Replays, tokens: str) -> list[FamilyResult]:
    """The best chain of a draft; [] where nothing repeats."""
    try:
        best = replays.chain()
    except ArchsearchError:
        return []
    note = f"beside its draft's training; {replays.words(best)}"
    return [FamilyResult(replays.score(best), tokens, note=note)]


def _usual(lookup: str, session: SearchSession) -> Drafter:
    """The drafter of a lookup family in the form that was replayed."""
    target, shortest = session.scorer.target, engine_facts(session.request.engine).shortest_ngram
    if lookup == "ngram" and shortest is not None:
        return NGram(target, shortest)
    return family_class(lookup).usual(target)


def compare_families(path: Path) -> list[FamilyResult]:
    """The table of a run that has trained, made anew."""
    session = SearchSession.reopen(path)
    ranks = map(session.run.candidate, session.run.ranks())
    trained = [load_trained(each.architecture, each.folder) for each in ranks if each.has_weights]
    return write_family_table(session, session.trainer(), trained)


def write_family_table(
    session: SearchSession, trainer: DraftTrainer, trained: Sequence[TrainedDraft]
) -> list[FamilyResult]:
    """`family_results`, kept as families.json."""
    results = family_results(session, trainer, trained)
    write_families(session.run.path, [result.to_dict() for result in results])
    return results


def _head_result(session: SearchSession, head: TrainedHead, tokens: str) -> FamilyResult:
    score = head_score(session, head)
    lacks = _lacks(session, head.plan.family)
    note = f"its time is priced as if the engine ran it; {lacks}" if lacks else ""
    return FamilyResult(score, tokens, head.record.seconds, head.record.auxiliary_s, note)


def _lacks(session: SearchSession, name: str) -> str:
    return engine_facts(session.request.engine).lacks(name, session.source.version)


def _best(session: SearchSession, trained: Sequence[TrainedDraft]) -> TrainedDraft | None:
    gain = {
        draft.folder: (
            session.scorer.measured(draft.architecture, draft.alpha, draft.tau).speedup.value
        )
        for draft in trained
    }
    return max(trained, key=lambda draft: gain[draft.folder], default=None)


def _seconds(folder: Path) -> float:
    """Of training; 0 where nobody wrote it down (weights that were put there)."""
    if not (folder / "training.json").exists():
        return 0.0
    return float(read_json(folder / "training.json", "training record")["seconds"])
