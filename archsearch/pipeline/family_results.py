"""What drafters of other families reach on a run's own text: lookup replayed, heads trained for the
minutes of the best draft.

In a climb heads compete for its minutes (`pipeline.climb.families`). A search without one trains
them after its finalists, one of each family, for as long as the draft that won, so that the last
table compares families at equal minutes; lookup needs none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from archsearch.acceptance.estimator import Acceptance, GivenAcceptance
from archsearch.acceptance.families import FamilyAcceptance
from archsearch.acceptance.lookup import LookupReplay, LookupText, Ngram, Suffix, replay, texts_of
from archsearch.drafters.drafter import Drafter
from archsearch.drafters.lookup import NGram
from archsearch.drafters.registry import family as family_class
from archsearch.drafts.heads import (
    HeadPlan,
    HeadTrainer,
    TrainedHead,
    head_folder,
    load_head,
    trained_heads,
)
from archsearch.drafts.records import TrainedDraft, load_trained
from archsearch.drafts.trainer import DraftTrainer
from archsearch.engine_facts import engine_facts
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.estimate import Estimate
from archsearch.files import read_json
from archsearch.models.drafters import HEAD_FAMILIES, HeadFamily
from archsearch.models.named_drafters import resolve_drafter
from archsearch.pipeline.session import SearchSession
from archsearch.progress import human_time, say
from archsearch.runs.families import write_families
from archsearch.search.objective import Score, Scorer
from archsearch.speedup import tau_estimate

if TYPE_CHECKING:
    from archsearch.pipeline.climb.families import HeadRungs

LOOKUPS: Final[Mapping[str, Ngram | Suffix]] = {"ngram": Ngram(), "suffix": Suffix()}
HEAD_SHARE: Final[Mapping[HeadFamily, float]] = {"eagle3": 0.4, "medusa": 0.2, "peagle": 0.4}
"""Of a search's minutes without a climb, kept for a head of the family: its training, and of
EAGLE-3 the states of the text."""
HEAD_GAMMA: Final = 5
"""The longest round that a search trains heads for."""
HOPED: Final = 0.8
"""Acceptance of a head that turned out well, by which the round that it is trained for is chosen: a
head runs shorter rounds than it was trained for, and accepts little in longer ones. Trained here:
.70 to .75 after 300 seconds (docs/families.md)."""
LEAST_HEAD_S: Final = 20.0


# ---- lookup
# --------------------------------------------------------------------------------------------------


def lookup_in(engine: str, name: str) -> Ngram | Suffix:
    """The lookup of the family `name` (a key of LOOKUPS) as `engine` does it."""
    shortest = engine_facts(engine).shortest_ngram
    return Ngram(shortest) if name == "ngram" and shortest is not None else LOOKUPS[name]


def replayed(
    texts: Sequence[LookupText], lookup: Ngram | Suffix, gammas: Sequence[int]
) -> FamilyAcceptance:
    """What a lookup drafter does on `texts`. ArchsearchError where these are too short."""
    found = replay(lookup, texts, gammas)
    middle = found[sorted(found)[len(found) // 2]]
    taus = {gamma: each.tau for gamma, each in found.items()}
    return FamilyAcceptance(
        Acceptance(_alpha(middle), Estimate(0.0, 0.0, "measured")), middle.drafts_share, taus=taus
    )


def _alpha(found: LookupReplay) -> Estimate:
    """Of the tokens that were judged; the std is that of counting rounds that draft."""
    counted = max(found.rounds * found.drafts_share.value, 1.0)
    return Estimate(
        found.alpha, math.sqrt(max(found.alpha * (1.0 - found.alpha), 0.01) / counted), "measured"
    )


def replayed_families(
    session: SearchSession, texts: Sequence[LookupText]
) -> dict[str, FamilyAcceptance]:
    """The lookup families that the search looks at, in the one shape that was replayed; those with
    other shapes are left out."""
    found = {}
    for space in session.families.spaces:
        if space.family in LOOKUPS and space.size(session.scorer.target) == 1:
            try:
                found[space.family] = replayed(
                    texts, lookup_in(session.request.engine, space.family), session.scorer.gammas
                )
            except ArchsearchError:  # no text is long enough for a round
                continue
    return found


def texts_at_hand(session: SearchSession) -> list[LookupText]:
    """What the run's target has written for held-out prompts, else the user's own texts (`--text`);
    [] where there is none, or no tokenizer to read them."""
    folder = session.run.path / "heldout"
    if (folder / "done.json").exists():
        from archsearch.text.cache import TextCache

        return texts_of(TextCache.load(folder).sequences)
    if session.request.text is None:
        return []
    from archsearch.models.load import (
        load_tokenizer,
    )  # torch: seconds that a search without texts need not wait
    from archsearch.text.encode import read_texts

    try:
        tokenizer = load_tokenizer(session.target)
    except MissingDataError:
        return []
    ids = [
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in read_texts(session.request.text)
    ]
    return [LookupText((), tuple(each)) for each in ids if len(each) > 1]


def with_replays(session: SearchSession) -> str:
    """Let the session's scorer know what lookup does on the text at hand; what was replayed, in
    words, "" for nothing. An alpha that the user gave holds for every family."""
    given = isinstance(session.scorer.acceptance, GivenAcceptance)
    if given or not any(space.family in LOOKUPS for space in session.families.spaces):
        return ""
    texts = texts_at_hand(session)
    known = replayed_families(session, texts) if texts else {}
    if not known:
        return ""
    session.scorer = session.scorer.with_families(known)
    return f"{' and '.join(known)} replayed on {_size(texts)} of your text"


def _size(texts: Iterable[LookupText]) -> str:
    tokens = sum(len(text.answer) for text in texts)
    return f"{tokens / 1000:.0f}k tokens" if tokens >= 2000 else f"{tokens} tokens"


# ---- the table after a search that trained
# ----------------------------------------------------------------------------------


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
        score = self.score
        return {
            "family": score.family,
            "rank": score.rank,
            "label": score.proposer.label(),
            "parameters": score.parameters,
            "gamma": score.gamma,
            "alpha": score.alpha.to_dict(),
            "tau": score.tau.to_dict(),
            "speedup": score.speedup.to_dict(),
            "trains": score.proposer.trains,
            "assumed": score.assumed,
            "measured_on": self.measured_on,
            "seconds": self.seconds,
            "states_s": self.states_s,
            "note": self.note,
        }


def asked_heads(families: Sequence[str]) -> tuple[HeadFamily, ...]:
    """The families of heads among those that were named."""
    return tuple(name for name in HEAD_FAMILIES if name in families)


def climbing_share(families: Sequence[str]) -> float:
    """The share of a search's minutes, without a climb, that is left to independent drafts beside
    the heads asked for."""
    return 1.0 / (1.0 + sum(HEAD_SHARE[name] for name in asked_heads(families)))


def train_heads(
    session: SearchSession, trainer: DraftTrainer, trained: Sequence[TrainedDraft], ends_at: float
) -> list[str]:
    """One head of each asked family, for as long as the best draft was trained, inside what is left
    until `ends_at` (monotonic seconds). What went wrong, one line each: a head is no reason to lose
    a search."""
    notes: list[str] = []
    names = asked_heads(session.request.families)
    best = _best(session, trained)
    if best is None:
        return [f"no draft was trained, so no {name} head either" for name in names]
    seconds = _seconds(best.folder)
    for place, name in enumerate(names):
        left = (ends_at - time.monotonic()) / (len(names) - place)
        budget = max(LEAST_HEAD_S, min(seconds, left))
        gamma = gamma_to_train(session, name)
        say(
            f"a head of the family {name} for {human_time(budget)}; the best draft was trained for"
            f" {human_time(seconds)}"
        )
        try:
            if name not in trained_heads(session.run.path):
                HeadTrainer(trainer).train(
                    HeadPlan.usual(name, gamma), budget, session.request.seed
                )
        except ArchsearchError as error:
            notes.append(f"no {name} head: {error}")
    return notes


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
        found.append(FamilyResult(replace(score, rank=rank), tokens, _seconds(best.folder)))
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


def _usual(lookup: str, session: SearchSession) -> Drafter:
    """The drafter of a lookup family in the form that was replayed."""
    target, shortest = session.scorer.target, engine_facts(session.request.engine).shortest_ngram
    if lookup == "ngram" and shortest is not None:
        return NGram(target, shortest)
    return family_class(lookup).usual(target)


def compare_families(path: Path) -> list[FamilyResult]:
    """`family_results` of a run that has trained."""
    session = SearchSession.reopen(path)
    candidates = [
        session.run.candidate(score.rank)
        for score in session.run.scores()
        if score.rank is not None
    ]
    trained = [
        load_trained(each.architecture, each.folder) for each in candidates if each.has_weights
    ]
    results = family_results(session, session.trainer(), trained)
    write_families(path, [result.to_dict() for result in results])
    return results


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
    std = math.sqrt(
        first * (1.0 - first) / max(float(head.record["heldout"].get("chains", 0) or 1000), 1.0)
    )
    known = dict(taus) if taus is not None else measured
    return (scorer or session.scorer).measured(drafter, Estimate(first, std, "measured"), known)


def head_rungs(session: SearchSession, trainer: DraftTrainer) -> HeadRungs | None:
    """The heads that compete in a climb; None where none was asked for."""
    from archsearch.pipeline.climb.families import HeadRungs

    families = asked_heads(session.request.families)
    if not families:
        return None
    heads, seed = HeadTrainer(trainer), session.request.seed

    def train(plan: HeadPlan, seconds: float) -> TrainedHead:
        folder = head_folder(session.run.path, plan.family)
        if plan.family in trained_heads(session.run.path):
            known = load_head(folder)
            if known.plan == plan and float(known.record["seconds"]) >= seconds - 1.0:
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


def _head_result(session: SearchSession, head: TrainedHead, tokens: str) -> FamilyResult:
    score = head_score(session, head)
    lacks = _lacks(session, head.plan.family)
    note = f"its time is priced as if the engine ran it; {lacks}" if lacks else ""
    return FamilyResult(
        score, tokens, float(head.record["seconds"]), float(head.record["auxiliary_s"]), note
    )


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
