"""`archsearch confirm`: a trained candidate in a real engine, one request at a time, beside its
prediction, term by term.

Every prompt runs with and without the draft, back to back.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from archsearch.drafts.records import TrainedDraft, load_trained
from archsearch.drafts.trainer import DraftTrainer
from archsearch.engine_facts import engine_facts
from archsearch.engines.engine import EnginePrompt, Sampling
from archsearch.errors import ArchsearchError, MissingDataError, RunFailed
from archsearch.files import write_json
from archsearch.models.files import has_tokenizer, has_weights
from archsearch.pipeline.candidates import write_report
from archsearch.pipeline.comparison import explain, measured_terms, predicted_terms
from archsearch.pipeline.engine_choice import (
    PARTIAL_FILE,
    EngineChoice,
    check_choice,
    engine_settings,
    engine_target,
    keep_partial,
    profile_first,
    serving_scorer,
    take_turns,
)
from archsearch.pipeline.families import check_independent
from archsearch.pipeline.latency import machine_slowdown
from archsearch.pipeline.session import SearchSession, check_weights
from archsearch.progress import ProgressLine
from archsearch.runs.confirmed import Confirmed
from archsearch.runs.fields import read_or_raise
from archsearch.search.objective import Score, Scorer
from archsearch.speedup import DISTURBED_GAP, counting_doubt
from archsearch.text.prompt_set import LEAST_HALF, PromptSet, spread_prompts

if TYPE_CHECKING:
    from archsearch.engines.engine import Engine, ModelSource
    from archsearch.engines.measure.results import Confirmation

UNDECIDED_FILE: Final = "undecided-{engine}.json"


@dataclass(frozen=True)
class _Case:
    """One confirmation: the candidate, the engine, the prompts and what the measurement stands
    beside."""

    session: SearchSession
    trainer: DraftTrainer
    choice: EngineChoice
    engine: str
    score: Score
    folder: Path
    trained: TrainedDraft
    scorer: Scorer
    latency_words: str
    asked: list[EnginePrompt]
    sampling: Sampling
    gammas: list[int]

    @property
    def inside(self) -> bool:
        """Whether the engine runs in this process and takes modules, not folders."""
        return engine_facts(self.engine).in_process

    @property
    def context(self) -> int:
        """Tokens in the KV cache in mid-answer, of the mean prompt."""
        return round(
            statistics.fmean(len(item.token_ids) for item in self.asked)
            + self.sampling.max_new_tokens / 2
        )

    def factory(self, dtype: str) -> Callable[[object], Engine]:
        from archsearch.engines.registry import make_engine

        longest = max(len(prompt.token_ids) for prompt in self.asked) + self.sampling.max_new_tokens
        settings = engine_settings(
            self.session, self.choice, concurrency=1, max_len=longest, dtype=dtype
        )
        return lambda _: make_engine(self.engine, settings, self.trainer.tokenizer)

    def models(self, dtype: str) -> tuple[ModelSource, ModelSource]:
        """Target and draft as the engine takes them."""
        from archsearch.models.drafts import load_draft

        if self.inside:
            return self.trainer.model(dtype), load_draft(self.folder, dtype)
        return engine_target(self.session.target), self.folder


def confirm_rank(
    session: SearchSession,
    rank: int,
    *,
    gammas: Sequence[int] = (),
    prompt_count: int | None = None,
    prompts: Path | None = None,
    trainer: DraftTrainer | None = None,
    choice: EngineChoice | None = None,
) -> dict[str, Any]:
    """Run target alone and target + draft in the engine, interleaved, on held-out prompts; write
    confirmed.json.

    The prediction beside it is the score's: latency from the profile, tau from the trace on
    held-out text; and once more with the tau that the engine counted, which leaves only the
    latency's error. Returns what confirmed.json holds (times in seconds). Raises MissingDataError
    for a rank without weights.
    """
    run, choice = session.run, choice or EngineChoice()
    name = choice.name or session.request.engine
    score, folder = run.score(rank), run.best_dir(rank)
    check_independent(score, "confirming", run.path)
    if not has_weights(folder):
        raise MissingDataError(
            f"rank {rank} of {run.path} has no weights; train it (archsearch train {run.path}"
            f" --rank {rank}), or prove its shape without (archsearch confirm {run.path} --rank"
            f" {rank} --synthetic)"
        )
    check_weights(session.target)
    check_choice(choice, name)
    trained = load_trained(score.architecture, folder)
    trainer = trainer or session.trainer()
    check_tokenizer(trainer.tokenizer, folder)
    scorer, words = serving_scorer(session, name)
    engine_facts(name).check_draft(score.architecture, scorer.workload.tensor_parallel)
    asked = confirming_prompts(trainer, prompts, prompt_count or session.request.confirm_prompts)
    sampling = Sampling(
        session.request.answer_tokens,
        temperature=session.request.temperature,
        seed=session.request.seed,
    )
    wanted = _known_gammas(gammas or [score.gamma], trained)
    case = _Case(
        session,
        trainer,
        choice,
        name,
        score,
        folder,
        trained,
        scorer,
        words,
        asked,
        sampling,
        wanted,
    )
    started = time.monotonic()
    results, slowdown = _measure(case)
    exact, unchecked = _exactness(case)
    rows = [_row(case, outcome, slowdown) for outcome in results.values()]
    best = max(rows, key=lambda row: row["speedup"]["value"])
    result = {
        **best,
        "rank": rank,
        "prompts_seen": None if prompts else seen_words(trainer.prompts, folder),
        "architecture": score.architecture.label(),
        "identical_output_float32": exact,
        "identical_output_unchecked": unchecked,
        "other_gammas": [row for row in rows if row is not best],
        "seconds": time.monotonic() - started,
    }
    result = _write(case, rank, result)
    write_report(run)
    return result


def _write(case: _Case, rank: int, result: dict[str, Any]) -> dict[str, Any]:
    """Write the confirmation where it belongs and return it; with `kept_earlier` where an earlier
    one keeps its place.

    What decides nothing does not take the place of a decided one of the same weights in the same
    engine: it stands beside it.
    """
    run, name, folder = case.session.run, case.engine, case.folder
    own, beside = folder / f"confirmed-{name}.json", folder / UNDECIDED_FILE.format(engine=name)
    before = run.confirmed(rank)
    if result["undecided"] is not None:
        same = before if before is not None and before.get("engine") == name else None
        earlier = read_or_raise(own, "confirmation", Confirmed.from_dict) or (
            same and Confirmed.from_dict(same)
        )
        if earlier and earlier.undecided is None and not earlier.is_stale(case.trained.alpha):
            words = (
                f"The earlier confirmation in {name} decides ({earlier.speedup.value:.2f}x at gamma"
                f" {earlier.gamma}) and stays in {own.name}; this one is in {beside.name}."
            )
            write_json(beside, {**result, "kept_earlier": words})
            return {**result, "kept_earlier": words}
    if name == case.session.request.engine or before is None or before.get("engine") == name:
        run.write_confirmed(rank, result)  # the engine that the run predicts for keeps this place
    write_json(own, result)
    beside.unlink(missing_ok=True)
    return result


def confirming_prompts(trainer: DraftTrainer, file: Path | None, count: int) -> list[EnginePrompt]:
    """`count` prompts of `file`, or of the run's held-out ones, as an engine takes them."""
    from archsearch.text.prompts import read_prompts

    chosen = read_prompts(file) if file else trainer.prompts.confirming
    encoded = spread_prompts(trainer.texts.encode(chosen), count)
    return [
        EnginePrompt(item.id or str(number), item.token_ids, item.category or None)
        for number, item in enumerate(encoded)
    ]


def _known_gammas(wanted: Sequence[int], trained: TrainedDraft) -> list[int]:
    unknown = [gamma for gamma in wanted if gamma not in trained.tau]
    if unknown:
        raise ArchsearchError(
            f"gamma {unknown[0]} was not measured on held-out text (1 to {max(trained.tau)}); use a"
            " smaller gamma"
        )
    return list(wanted)


def _measure(case: _Case) -> tuple[dict[int, Confirmation], float | None]:
    """What came out for each gamma, and the machine's mean slowdown against its profile (None: not
    known)."""
    from archsearch.engines.measure.by_prompt import best_of_gammas
    from archsearch.engines.measure.turns import Plan, Variant, run_plan

    session, dtype = case.session, case.session.source.dtype
    own_process = not case.inside and case.choice.server_url is None
    slowdowns = [machine_slowdown(session.source)]
    try:
        with ProgressLine(f"confirm in {case.engine}") as line:
            target, draft = case.models(dtype)
            apart = own_process and take_turns(
                session, case.score.architecture, len(case.gammas) + 1, 1
            )
            variants = [
                Variant(f"gamma {gamma}", draft, gamma) for gamma in sorted(set(case.gammas))
            ]
            plan = Plan(target, variants, case.asked, case.sampling, apart=apart)
            results = run_plan(case.factory(dtype), plan, best_of_gammas, progress=line)
    except RunFailed as error:
        raise keep_partial(
            error,
            case.folder / PARTIAL_FILE.format(what="confirmed", engine=case.engine),
            "prompts",
        ) from error
    slowdowns.append(machine_slowdown(session.source))
    known = [value for value in slowdowns if value is not None]
    return {found.gamma: found for found in results.values()}, (
        statistics.fmean(known) if known else None
    )


def _exactness(case: _Case) -> tuple[dict[str, Any] | None, str | None]:
    """Whether greedy output is the target's own in float32, or why that was not checked; None, None
    when sampling."""
    from archsearch.engines.measure.by_prompt import identities
    from archsearch.engines.measure.turns import Plan, Variant, run_plan

    if case.sampling.temperature != 0 or case.choice.server_url is not None:
        return None, None
    gc.collect()
    few = (
        case.asked[:4] if case.inside else case.asked
    )  # an engine of its own loads as quickly for all
    tokens = 32 if case.inside else 64
    try:
        with ProgressLine("identical output in float32") as line:
            target, draft = case.models("float32")
            plan = Plan(
                target,
                [Variant("draft", draft, case.gammas[0])],
                few,
                Sampling(tokens),
                apart=True,
                starts=1,
            )
            exact = run_plan(case.factory("float32"), plan, identities, progress=line)["draft"]
    except RunFailed as error:  # what was measured stands without it
        return None, str(error)
    return {"prompts": exact.prompts, "identical": exact.identical, "alpha": exact.alpha}, None


def _row(case: _Case, outcome: Confirmation, slowdown: float | None) -> dict[str, Any]:
    """One gamma: measured beside predicted, as it stands in confirmed.json."""
    gamma, arch, local = (
        outcome.gamma,
        case.score.architecture,
        case.scorer.at_context(case.context),
    )
    predicted = local.measured(arch, case.trained.alpha, case.trained.tau, gammas=[gamma])
    counted = local.measured(arch, outcome.alpha, {gamma: outcome.tau}, gammas=[gamma])
    overhead = local.latency.round(local.target, arch, local.workload, gamma).overhead_s
    told = measured_terms(
        outcome.tau.value, outcome.decode_s, outcome.draft_s, outcome.verify_s, outcome.rest_s
    )
    explained = explain(predicted_terms(predicted, overhead), told, slowdown or 1.0)
    return outcome_row(outcome, predicted.speedup.value) | {
        "predicted": predicted.to_dict(),
        "predicted_at_measured_tau": counted.speedup.value,
        "relative_error_at_measured_tau": counted.speedup.value / outcome.speedup.value - 1.0,
        "predicted_round_s": predicted.draft_s.value + predicted.verify_s.value + overhead.value,
        "overhead_s": overhead.to_dict(),
        "error_by_term": explained.to_dict() if explained is not None else None,
        "context": case.context,
        "slowdown": slowdown,
        "dtype": case.session.source.dtype,
        "latency": case.latency_words,
        "profile_first": profile_first(case.session, case.scorer, case.engine),
    }


def outcome_row(outcome: Confirmation, predicted: float | None) -> dict[str, Any]:
    """What was measured, as it stands in confirmed.json; `relative_error`: predicted / measured -
    1."""
    value, pooled = outcome.speedup.value, outcome.speedup_pooled or outcome.speedup.value
    estimates = {name: getattr(outcome, name).to_dict() for name in ("alpha", "tau", "speedup")}
    return (
        dataclasses.asdict(outcome)
        | estimates
        | {
            "disturbed": abs(pooled / value - 1.0) > DISTURBED_GAP,
            "undecided": counting_doubt(value, pooled),
            "predicted_speedup": predicted,
            "relative_error": None if predicted is None else predicted / value - 1.0,
        }
    )


def seen_words(prompts: PromptSet, folder: Path) -> str | None:
    """Why the prompts that confirm were seen when the draft in `folder` was chosen; None where no
    choice has seen them."""
    from archsearch.acceptance.measured import Trace

    if not prompts.split:
        return (
            f"the {len(prompts.heldout)} held-out prompts are too few to split (at least"
            f" {2 * LEAST_HALF}): the same ones chose the draft, which flatters it"
        )
    if len(Trace.load(folder / "trace.npz").agreements) > len(prompts.choosing):
        return (
            "the draft was chosen on these prompts too (an earlier version measured it on all that"
            " are held out)"
        )
    return None


def check_tokenizer(ours: Any, folder: Path) -> None:
    """Raise ArchsearchError where the draft in `folder` has a tokenizer and it is not the target's:
    its ids mean other tokens."""
    from archsearch.models.load import read_tokenizer, tokenizers_differ

    if not has_tokenizer(folder):
        return
    theirs = read_tokenizer(folder, folder.name)
    differences = tokenizers_differ(ours, theirs, limit=2)
    if differences:
        raise ArchsearchError(
            f"the tokenizer in {folder} differs from the target's ({'; '.join(differences)}); use a"
            " draft made for this target"
        )
