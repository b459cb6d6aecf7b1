"""`archsearch confirm --family`: drafters of several kinds beside one another in a real engine,
prompt by prompt, each back to back with the target alone.

Beside each measured speed-up stands the predicted one. A head's acceptance is checked against
held-out text: an engine that reads other layers than the head was trained on says nothing and
accepts less.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from archsearch.drafts.heads import TrainedHead, run_head
from archsearch.drafts.records import TrainedDraft, acceptance_of
from archsearch.engine_facts import engine_facts, engine_title
from archsearch.engines.engine import ExitAfter
from archsearch.engines.measure.figures import by_prompt
from archsearch.engines.measure.results import ByPrompt
from archsearch.errors import ArchsearchError, RunFailed
from archsearch.export.engines import chained
from archsearch.models.targets import resolve_drafter
from archsearch.pipeline.candidates import write_report
from archsearch.pipeline.chains import CHAIN, Replays
from archsearch.pipeline.confirm import (
    USUAL_COUNT,
    answers_of,
    check_tokenizer,
    confirming_prompts,
    trained_of,
)
from archsearch.pipeline.engine_ways import write_engines
from archsearch.pipeline.heads import USUAL_GAMMA, head_score
from archsearch.pipeline.in_engine import (
    Bench,
    EngineChoice,
    check_choice,
    mid_answer,
    profile_first,
)
from archsearch.pipeline.session import SearchSession, check_weights
from archsearch.pipeline.untrained import (
    Untrained,
    drafter_of,
    exit_shape,
    lookup_in,
    replayed,
    texts_at_hand,
)
from archsearch.records import as_data, save
from archsearch.report.phrases import shell_path
from archsearch.runs.confirmed import Exact
from archsearch.runs.tables import (
    BESIDE_FILE,
    COMPARISON_FILE,
    EngineComparison,
    Order,
    Rival,
    Silent,
    Swap,
)
from archsearch.search.objective import Score, Scorer

# of the predicted acceptance at position 1, besides what counting few rounds leaves open
NEAR: Final = 0.05


@dataclass(frozen=True)
class FamilyRequest:
    """What runs: `families` (as `EngineFacts.confirms`); `gammas`: the one for all of them (none:
    what each was scored or trained for); `rank`: the independent draft, which a chain has too;
    `count` held-out prompts, or those of a file; `exact`: so many of them in float32 besides.
    ArchsearchError for several gammas."""

    families: tuple[str, ...]
    gammas: tuple[int, ...] = ()
    rank: int = 1
    count: int = USUAL_COUNT
    prompts: Path | None = None
    exact: int = 8

    def __post_init__(self) -> None:
        if len(self.gammas) > 1:
            raise ArchsearchError(
                f"families are compared at one gamma each, got {list(self.gammas)}; run them one"
                " after the other"
            )

    @property
    def gamma(self) -> int | None:
        return next(iter(self.gammas), None)


@dataclass(frozen=True)
class _Candidate:
    """One drafter: what the engine takes, its gamma, its predicted score by a scorer, and its
    acceptance by position on held-out text (() for none)."""

    family: str
    source: object
    gamma: int
    score_by: Callable[[Scorer], Score | None]
    by_position: tuple[float, ...] = ()
    note: str = ""
    rank: int | None = None

    def score(self, scorer: Scorer) -> Score | None:
        """None where there is no held-out text, or none long enough for such a round."""
        try:
            return self.score_by(scorer)
        except (ArchsearchError, KeyError):
            return None


def confirm_families(
    session: SearchSession, request: FamilyRequest, choice: EngineChoice
) -> EngineComparison:
    """Run the target alone and every drafter in one engine; write
    heads/<family>/confirmed-<engine>.json and heads/comparison-<engine>.json. Identity is checked
    in float32 besides. Raises ArchsearchError or MissingDataError, before anything runs, for a
    family that the engine is not started with, a head or draft that is not trained or not of this
    target, a gamma beyond a head's."""
    bench = Bench(session, choice)
    name, dtype = bench.name, bench.dtype
    check_weights(session.target)
    facts = engine_facts(name)
    for family in request.families:  # before an engine is asked to be installed
        if family not in facts.confirms:
            raise ArchsearchError(
                f"{engine_title(name)} is not started with {family} drafters here, only with"
                f" {', '.join(facts.confirms)}; name another --engine or --family"
            )
    check_choice(choice, name)
    if choice.server_url:
        raise ArchsearchError(
            "a running server has one drafter; leave --server-url or --family out"
        )
    candidates = [_candidate(bench, family, request) for family in dict.fromkeys(request.families)]
    for candidate in candidates:
        model = getattr(candidate.source, "draft", candidate.source)  # of a chain
        if isinstance(model, Path):
            check_tokenizer(bench.trainer.tokenizer, model)
    asked = confirming_prompts(bench.trainer, request.prompts, request.count)
    sampling = answers_of(session)
    drafters = {each.family: (each.source, each.gamma) for each in candidates}
    found = bench.by_prompt(drafters, asked, sampling, by_prompt)
    exact: dict[str, Exact] = {}
    if dtype == "float32":
        same = {family: each.identical_output for family, each in found.items()}
        exact = {family: Exact(each.prompts, each.identical) for family, each in same.items()}
    elif not sampling.temperature:
        with suppress(RunFailed):  # what was measured holds without it
            tokens = min(64, sampling.max_new_tokens)
            exact = bench.exactness(drafters, asked[: request.exact], tokens)
    scorer = bench.scorer.at_context(mid_answer(asked, sampling.max_new_tokens))
    rows = [
        _row(
            candidate,
            candidate.score(scorer),
            found.get(candidate.family),
            exact.get(candidate.family),
        )
        for candidate in candidates
    ]
    ran = [row for row in rows if isinstance(row, Rival)]
    compared = EngineComparison(
        run=str(session.run.path),
        engine=name,
        dtype=dtype,
        prompts=len(asked),
        prompts_file=str(request.prompts) if request.prompts else None,
        threads=session.source.threads,
        baseline_tokens_per_s=ran[0].baseline_tokens_per_s if ran else None,
        rows=tuple(rows),
        order=order_of(ran),
        latency=bench.latency_words,
        profile_first=profile_first(session, scorer, name, dtype),
    )
    path, where = session.run.path, bench.file_name
    shared = ("dtype", "profile_first", "prompts_file")
    more = {name: value for name in shared if (value := getattr(compared, name)) is not None}
    for row in rows:
        if row.family != "independent":
            save(path / BESIDE_FILE.format(family=row.family, engine=where), as_data(row) | more)
    save(path / COMPARISON_FILE.format(engine=where), compared)
    write_engines(session)
    write_report(session.run)
    return compared


def _candidate(bench: Bench, family: str, request: FamilyRequest) -> _Candidate:
    session = bench.session
    if family == "ngram":
        found = lookup_in(bench.name, family)
        ranked = _ranked(session, family)
        gamma = request.gamma or (ranked.gamma if ranked else USUAL_GAMMA)

        def replay(scorer: Scorer) -> Score:
            texts = texts_at_hand(session)
            if ranked is not None and not texts:
                alpha, taus, _ = acceptance_of(scorer, ranked)
                return scorer.measured(ranked.proposer, alpha, taus, gammas=[gamma])
            known = replayed(texts, found, [gamma])
            assert known.share is not None and known.taus is not None
            drafter = drafter_of(found, scorer.target).with_share(known.share.value)
            return scorer.measured(drafter, known.acceptance.alpha, known.taus, gammas=[gamma])

        return _Candidate(family, found, gamma, replay)
    if family == "early_exit":
        best = _exit(session)
        gamma, layers = request.gamma or best.gamma, best.architecture.num_hidden_layers
        known = best if best.gamma == gamma else None
        return _Candidate(family, ExitAfter(layers), gamma, lambda scorer: known)
    if family in ("independent", CHAIN):
        named = f"{shell_path(session.run.path)} --rank {request.rank}"
        draft = trained_of(session, request.rank, f"train it first: archsearch train {named}")
        if family == CHAIN:
            return _chain(bench, request, draft)
        gamma = request.gamma or session.run.score(request.rank).gamma
        return _Candidate(
            family,
            draft.folder,
            gamma,
            lambda by: by.measured(draft.architecture, draft.alpha, draft.tau, gammas=[gamma]),
            rank=request.rank,
        )
    return _head(bench, request, run_head(session.run.path, family))


def _ranked(session: SearchSession, family: str) -> Score | None:
    return next((score for score in session.run.scores() if score.family == family), None)


def _exit(session: SearchSession) -> Score:
    """Of the run's ranks where one is among them, else the best exit that the search would look at,
    by the prior."""
    if ranked := _ranked(session, "early_exit"):
        return ranked
    target = session.scorer.target
    exits = Untrained("early_exit").layers(target.num_hidden_layers)
    found = [session.scorer(exit_shape(target, layers)) for layers in exits]
    return max(found, key=lambda score: score.speedup.value)


def _chain(bench: Bench, request: FamilyRequest, draft: TrainedDraft) -> _Candidate:
    replays = Replays.of(bench.scorer, bench.name, draft, bench.trainer)
    best = replays.chain(request.gamma)
    note = f"{replays.score(best).proposer.label()}; {replays.words(best)}"
    if engine_facts(bench.name).gguf and best.lookup is not None:
        rule = best.rule
        note += f"; served by `{chained(best.lookup.longest, rule.found, rule.gamma, rule.least)}`"
    score_by = partial(replays.score, best)
    source, longest = best.source(draft.folder), best.rule.longest
    return _Candidate(CHAIN, source, longest, score_by, note=note, rank=request.rank)


def _head(bench: Bench, request: FamilyRequest, head: TrainedHead) -> _Candidate:
    session, family = bench.session, head.plan.family
    resolve_drafter(str(head.folder), session.target)  # of another target it raises
    gamma = request.gamma or head_score(session, head, scorer=bench.scorer).gamma
    if gamma > head.plan.gamma:
        raise ArchsearchError(
            f"the {family} head was trained for gamma {head.plan.gamma}, got gamma {gamma}"
        )
    known = head.replays.get(gamma)
    return _Candidate(
        family,
        head.folder,
        gamma,
        lambda scorer: head_score(session, head, {gamma: head.taus[gamma]}, scorer),
        known.accepted_by_position if known else (),
    )


def order_of(rows: Sequence[Rival]) -> Order | None:
    """The drafters by speed-up as predicted and as measured, and the pairs that came out the other
    way round; None of fewer than two."""
    predictions = {row.family: row.predicted for row in rows if row.predicted is not None}
    if len(predictions) < 2:
        return None
    seen = {row.family: row.speedup for row in rows if row.family in predictions}
    both, swapped = (predictions, seen), []
    for pair in itertools.combinations(predictions, 2):
        first, second = ([found[family] for family in pair] for found in both)
        gaps = [one.value - other.value for one, other in (first, second)]
        if gaps[0] * gaps[1] < 0:
            bands = [math.hypot(one.std, other.std) for one, other in (first, second)]
            inside = any(abs(gap) <= band for gap, band in zip(gaps, bands, strict=True))
            swapped.append(Swap(pair, inside))
    order = [tuple(sorted(found, key=lambda family: -found[family].value)) for found in both]
    return Order(order[0], order[1], tuple(swapped))


def _row(
    candidate: _Candidate, score: Score | None, found: ByPrompt | None, exact: Exact | None
) -> Rival | Silent:
    own: dict[str, Any] = {
        "family": candidate.family,
        "rank": candidate.rank,
        "foretold_by_position": candidate.by_position,
        "predicted_tau": score and score.tau,
        "predicted_std": score and score.speedup.std,
    }
    if found is None:
        return Silent(gamma=candidate.gamma, **own)
    return Rival.of(
        found,
        None if score is None else score.speedup.value,
        identical_output_float32=exact,
        warning=suspicious(candidate.by_position, found.accepted_by_position, found.rounds or 0),
        note=candidate.note,
        **own,
    )


def suspicious(predicted: Sequence[float], counted: Sequence[float], rounds: int) -> str | None:
    """Why an engine's acceptance at position 1 does not fit what held-out text predicts; None where
    it does, or nothing did. Counting leaves open two standard deviations of a share of `rounds`,
    twice as wide as for independent ones."""
    if not predicted or not counted:
        return None
    expected, seen = predicted[0], counted[0]
    open_ = NEAR + 4.0 * math.sqrt(max(expected * (1 - expected), 0.01) / max(rounds, 1))
    if seen >= expected - open_:
        return None
    return (
        f"the engine accepts {seen:.2f} at position 1 where held-out text predicted {expected:.2f}:"
        " it may read other layers than the head was trained on"
        " (eagle_aux_hidden_state_layer_ids), or norm in another order (norm_before_residual)"
    )
