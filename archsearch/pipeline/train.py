"""`archsearch train`: one ranked candidate, or a head of a family, for some minutes more; and the
verdict on a run's text: what it brought, what more of it would bring, and at which speed-up."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from archsearch.architecture.grid import BODY_FIELDS as BODY
from archsearch.drafts.heads import HeadPlan, HeadTrainer, find_head
from archsearch.drafts.records import TrainedDraft, trained_draft
from archsearch.drafts.trainer import DraftTrainer
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.estimate import Estimate
from archsearch.files import write_json
from archsearch.models.files import HEAD_FAMILIES, has_weights, head_family_of
from archsearch.models.targets import resolve_drafter
from archsearch.needs import Needs
from archsearch.pipeline.acceptance import AcceptanceRequest, find_draft, record, written_text
from archsearch.pipeline.candidates import copy_draft, served, write_report
from archsearch.pipeline.chains import CHAIN
from archsearch.pipeline.confirm import check_tokenizer
from archsearch.pipeline.families import INDEPENDENT, check_independent
from archsearch.pipeline.heads import HEAD_GAMMA, compare_families
from archsearch.pipeline.session import SearchSession, check_weights
from archsearch.records import WRONG_SHAPE, as_data, save
from archsearch.report.terminal.run import HeadAnswer, Trained
from archsearch.runs.candidate import (
    TRACE_FILE,
    TRAINING_FILE,
    TrainingLook,
    TrainingRecord,
    read_training,
)
from archsearch.runs.tables import FAMILIES_FILE, TEXT_VERDICT_FILE, TextStand, TextVerdict, forget
from archsearch.search.objective import Score, Scorer
from archsearch.speedup import logit, logit_std, moved, tau_estimate
from archsearch.text.prompt_set import answer_faults, prompt_faults
from archsearch.text.prompts import read_prompts
from archsearch.training.curves import (
    LEARNT_EPOCHS,
    MEASURED,
    AlphaPoint,
    effective_tokens,
    extrapolate,
    growth,
)


@dataclass(frozen=True)
class Taken:
    """What another trainer made of a rank: a folder with config.json and weights, `prompts` that
    nothing of it was trained on, and its learning curve (JSON lines of tokens and alpha)."""

    weights: Path
    prompts: Path
    curve: Path | None = None

    @property
    def said(self) -> dict[str, str]:
        """What a training record keeps of it."""
        return {"taken_from": str(self.weights), "prompts": str(self.prompts)}


def train_rank(path: Path, rank: int, budget_s: float, taken: Taken | None = None) -> Trained:
    """Distil one candidate for `budget_s` seconds more, measure it and score it again. `taken`:
    measure and keep what was trained elsewhere instead; MissingDataError where that has no
    weights."""
    session = SearchSession.reopen(path)
    score = session.run.score(rank)
    heads = taken is not None and score.family in HEAD_FAMILIES
    if not heads:
        check_independent(score, "train", path)
    check_weights(session.target)
    trainer = session.trainer()
    text, expected = None, None
    if taken is not None:
        if not has_weights(taken.weights):
            raise MissingDataError(f"no weights in {taken.weights}; name the folder that has them")
        looks = read_looks(taken.curve)
        if looks:
            seen = replace(session.scorer.context, trained_tokens=float(looks[-1].tokens))
            expected = session.scorer.predicted_acceptance(score.proposer, seen).acceptance.alpha
        if heads:
            return _take_head(session, trainer, score.with_rank(rank), taken, looks, expected)
        draft = _take(session, trainer, score, taken, looks)
    else:
        folder = trainer.draft_folder(score.architecture)
        if (known := read_training(folder)) is not None and known.taken_from:
            raise ArchsearchError(
                f"the weights of rank {rank} were trained elsewhere ({known.taken_from}); train"
                f" them there, or delete {folder} to begin anew"
            )
        budget_s = _left_after_text(trainer, budget_s)
        before = trainer.spent(score.architecture)[1]
        draft = trainer.train(
            score.architecture, before + budget_s, session.request.seed, f"rank {rank}"
        )
        text = text_verdict(session.scorer, trainer, draft)
    scored = draft.score(session.scorer).with_rank(rank)
    renewed = replace(scored, needs=Needs("exists", str(draft.folder)))
    best = session.run.best_dir(rank)
    session.run.write_best(renewed, None, served(session, renewed, str(best)))
    copy_draft(draft.folder, best, renewed.gamma)
    forget(path, INDEPENDENT, CHAIN)
    write_report(session.run, session)
    training = read_training(draft.folder)
    assert training is not None
    kinds = draft.alpha_by_category
    return Trained(path, rank, score, renewed, training, kinds, text, expected)


def _take(
    session: SearchSession,
    trainer: DraftTrainer,
    score: Score,
    taken: Taken,
    looks: Sequence[TrainingLook],
) -> TrainedDraft:
    """The draft of another trainer, measured on prompts that it held out and kept in float32. It
    may compute more rows of logits than the rank; another shape otherwise raises
    ArchsearchError."""
    from archsearch.models.drafts import load_draft, save_draft

    found, like = find_draft(str(taken.weights)), score.architecture
    arch = found.architecture
    if any(getattr(arch, name) != getattr(like, name) for name in ("num_hidden_layers", *BODY)):
        raise ArchsearchError(
            f"{taken.weights} holds {arch.label()}, not {like.label()}; `archsearch acceptance"
            f" --draft {taken.weights}` measures any draft"
        )
    folder = trainer.draft_folder(arch)
    draft = load_draft(taken.weights)  # what cannot be loaded ends before the target writes
    trace = record(_asked(session, taken), session.target, found)[0]
    save_draft(draft, folder, tokenizer=trainer.tokenizer)
    trace.save(folder / TRACE_FILE)
    write_json(
        folder / TRAINING_FILE,
        {
            "architecture": arch.to_dict(),
            "seconds": 0.0,
            "tokens": looks[-1].tokens if looks else 0,
            **taken.said,
            "looks": [as_data(look) for look in looks],
        },
    )
    return trained_draft(arch, folder, trace)


def _take_head(
    session: SearchSession,
    trainer: DraftTrainer,
    score: Score,
    taken: Taken,
    looks: Sequence[TrainingLook],
    expected: Estimate | None,
) -> Trained:
    """The same of an EAGLE-3 or P-EAGLE head: it becomes the run's head of its family."""
    from archsearch.training.heads.folder import read_eagle3

    run, rank, like = session.run, score.rank, score.proposer
    assert rank is not None
    drafter = resolve_drafter(str(taken.weights), session.target).drafter
    shape, family = drafter.architecture, drafter.family
    same = (shape.label(), drafter.states_read) == (like.architecture.label(), like.states_read)
    if family not in ("eagle3", "peagle") or family != like.family or not same:
        raise ArchsearchError(
            f"{taken.weights} holds {drafter.title} {drafter.label()}, rank {rank} is {like.title}"
            f" {like.label()}: only EAGLE-3 and P-EAGLE heads of the rank's shape come back"
        )
    kind = head_family_of(family)
    before = find_head(run.path, kind)
    if before is not None and not before.record.taken_from:
        raise ArchsearchError(
            f"{before.folder} holds a head that was trained here; delete it, or take this one into"
            " another run"
        )
    tokenizer, source = trainer.tokenizer, trainer.source_of_weights()
    body: Any = source.base_model
    check_tokenizer(tokenizer, taken.weights)
    made = read_eagle3(taken.weights, body.embed_tokens.weight.detach())
    gamma, layers = max(score.gamma, HEAD_GAMMA), shape.num_hidden_layers
    plan = HeadPlan(kind, gamma, shape.head_rows, layers, made.aux_layers)
    prompts = read_prompts(taken.prompts)
    texts = written_text(_asked(session, taken), session.target, tokenizer, prompts)[0]
    said, tokens = taken.said, looks[-1].tokens if looks else 0
    head = HeadTrainer(trainer).take(made, plan, texts, tokens=tokens, **said)
    renewed = session.scorer.measured(like, head.alpha, head.taus).with_rank(rank)
    renewed = replace(renewed, needs=Needs("exists", str(head.folder)))
    run.write_best(renewed, None, served(session, renewed, str(head.folder)))
    if (run.path / FAMILIES_FILE).is_file():
        compare_families(run.path)
    forget(run.path, family)
    write_report(run, session)
    training = TrainingRecord(
        shape, tokens, 0.0, said | {"tokens": tokens}, tuple(looks), taken_from=said["taken_from"]
    )
    return Trained(run.path, rank, score, renewed, training, {}, None, expected)


def _asked(session: SearchSession, taken: Taken) -> AcceptanceRequest:
    """What the target is asked to write for the prompts of `taken`."""
    return AcceptanceRequest(
        session.request.target,
        str(taken.weights),
        prompts=taken.prompts,
        answer_tokens=session.request.answer_tokens,
        dtype="float32" if session.source.device.is_cpu else "bfloat16",
    )


def read_looks(path: Path | None) -> list[TrainingLook]:
    """A learning curve of another trainer, by tokens. Raises ArchsearchError for what is none."""
    if path is None:
        return []
    try:
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
        looks = [TrainingLook(int(row["tokens"]), 0.0, float(row["alpha"])) for row in rows]
    except (OSError, *WRONG_SHAPE) as error:
        raise ArchsearchError(
            f"{path} is no learning curve ({error}): JSON lines of tokens and alpha"
        ) from error
    if not looks or any(look.tokens < 1 or not 0.0 <= look.alpha <= 1.0 for look in looks):
        raise ArchsearchError(f"{path}: tokens from 1 and alpha of 0 to 1 are asked for")
    return sorted(looks, key=lambda look: look.tokens)


def _left_after_text(trainer: DraftTrainer, budget_s: float) -> float:
    """What is left of `budget_s` for training: where the run has no text yet, the target writes it
    first."""
    trainer.texts.check_prompts()
    try:
        trainer.texts.training()
    except MissingDataError:
        trainer.texts.write_training(TEXT_SHARE * budget_s)
        return (1 - TEXT_SHARE) * budget_s
    return budget_s


def train_family(path: Path, plan: HeadPlan, budget_s: float) -> HeadAnswer:
    """Train a head of a run for `budget_s` seconds more, on the texts of its drafts."""
    session = SearchSession.reopen(path)
    check_weights(session.target)
    trainer = session.trainer()
    heads = HeadTrainer(trainer)
    heads.keep_states(plan)
    budget_s = _left_after_text(trainer, budget_s)
    spent = _spent(path, plan)
    trained = heads.train(plan, spent + budget_s, session.request.seed)
    forget(path, plan.family)
    if (path / FAMILIES_FILE).is_file():  # with the head as it is now
        compare_families(path)
    write_report(session.run, session)
    own = (path, plan.family, trained.plan.gamma, trained.folder)
    kept = (getattr(trained.record, each.name) for each in fields(HeadAnswer)[len(own) :])
    return HeadAnswer(*own, *kept)


def _spent(path: Path, plan: HeadPlan) -> float:
    """ArchsearchError where the run's head of this family is another than `plan`."""
    if (before := find_head(path, plan.family)) is None:
        return 0.0
    if before.record.taken_from:
        raise ArchsearchError(
            f"{before.folder} holds a head that was trained elsewhere ({before.record.taken_from});"
            " train it there, or delete it to begin anew"
        )
    if before.plan != plan:
        raise ArchsearchError(
            f"{before.folder} holds another head (gamma {before.plan.gamma}, {before.plan.layers}"
            f" layers, {before.record.rows} tokens, auxiliary layers"
            f" {list(before.plan.aux_layers) or 'the usual'}); name the same, or delete it"
        )
    return before.record.seconds


TIMES_MORE: Final = 10  # prompts that are asked about, as a multiple of those there are
TEXT_SHARE: Final = 0.35  # of a training's minutes, where the run has no text yet
LEAST_UNLEARNT: Final = 0.01  # of alpha: what training on must promise to be said
# of alpha: how far a category must lie above all to be worth a draft of its own
NARROW_ABOVE: Final = 0.10


def text_verdict(scorer: Scorer, trainer: DraftTrainer, draft: TrainedDraft) -> TextVerdict:
    """The verdict on the text that `draft` learnt; kept in the run folder for the report."""
    record = read_training(draft.folder)
    assert record is not None
    answers = trainer.texts.training().sequences
    prompts = trainer.prompts
    stand = TextStand(
        len(answers), record.distinct_tokens or 0, draft.alpha, draft.score(scorer).speedup
    )
    learnt, more = predicted(scorer, draft, record, stand)
    name, alpha = narrowest(draft)
    verdict = TextVerdict(
        draft.architecture.label(),
        len(prompts.train),
        stand,
        learnt,
        more,
        name,
        alpha,
        (*prompt_faults([*prompts.train, *prompts.heldout]), *answer_faults(answers)),
    )
    save(trainer.folder / TEXT_VERDICT_FILE, verdict)
    return verdict


def predicted(
    scorer: Scorer, draft: TrainedDraft, record: TrainingRecord, now: TextStand
) -> tuple[TextStand | None, TextStand | None]:
    """(what the text would bring learnt in full, None where it is; what TIMES_MORE the prompts
    would bring), by the draft's curve; None without one. Curves of other studies hold a steep start
    back."""
    epoch = int(record.record.get("epoch_tokens") or 0)
    looks = draft.points or tuple((look.tokens, look.alpha) for look in record.looks)
    points = [
        AlphaPoint(tokens, alpha, epoch_tokens=epoch) for tokens, alpha in looks if tokens > 0
    ]
    if not points or not epoch or not now.prompts:
        return None, None
    kept = max(points, key=lambda point: point.alpha)
    # what came after was learnt by heart
    rising = [point for point in points if point.tokens <= kept.tokens]

    def stand(prompts: int) -> TextStand | None:
        share = prompts / now.prompts
        text = max(1, round(epoch * share))  # in tokens, with its prompts
        learnt = round(LEARNT_EPOCHS * text)
        found = extrapolate(rising, learnt, annealed=False, epoch_tokens=text)
        seen = effective_tokens(kept.tokens, epoch), effective_tokens(learnt, text)
        usual, std = growth(MEASURED, *seen), logit_std(found)
        weight = 1.0 / (1.0 + (std / usual.std) ** 2)  # of the curve, by their variances
        rise = weight * (logit(found.value) - logit(kept.alpha)) + (1.0 - weight) * usual.value
        found = moved(now.alpha, max(rise, 0.0), std * math.sqrt(weight))
        alpha = replace(found, source="modelled")
        speedup = speedup_at(scorer, draft, alpha)
        if speedup is None:
            return None
        return TextStand(prompts, round(now.distinct_tokens * share), alpha, speedup)

    learnt = None if record.stopped else stand(now.prompts)
    if learnt is not None and learnt.alpha.value < now.alpha.value + LEAST_UNLEARNT:
        learnt = None
    return learnt, stand(rounded(TIMES_MORE * now.prompts))


def speedup_at(scorer: Scorer, draft: TrainedDraft, alpha: Estimate) -> Estimate | None:
    """The speed-up of a trained draft at another alpha: tau by gamma in proportion to the closed
    form's."""

    def tau_at(measured: Estimate, gamma: int) -> Estimate:
        before, after = tau_estimate(draft.alpha, gamma), tau_estimate(alpha, gamma)
        value = min(measured.value * after.value / before.value, gamma + 1.0)
        return Estimate(value, math.hypot(measured.std, after.std), "modelled")

    taus = {gamma: tau_at(tau, gamma) for gamma, tau in draft.tau.items()}
    try:
        return scorer.measured(draft.architecture, alpha, taus).speedup
    except ArchsearchError:
        return None


def narrowest(draft: TrainedDraft) -> tuple[str, Estimate | None]:
    """The category whose alpha lies clearly above that of all; ("", None) where none does."""
    found = [(name, alpha) for name, alpha in draft.alpha_by_category.items() if name]
    if len(found) > 1:
        name, alpha = max(found, key=lambda item: item[1].value - item[1].std)
        if alpha.value - alpha.std >= draft.alpha.value + NARROW_ABOVE:
            return name, alpha
    return "", None


def rounded(count: int) -> int:
    """317 x 10 as people say it: 3,000; one leading digit, rounded."""
    return int(float(f"{count:.0e}"))
