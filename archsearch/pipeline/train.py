"""`archsearch train`: one ranked candidate, or a head of a family, for some minutes more; and the
verdict on a run's text: what it brought, what more of it would bring, and at which speed-up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Final

from archsearch.drafters.forms import vllm_config
from archsearch.drafts.heads import HeadPlan, HeadTrainer, find_head
from archsearch.drafts.records import TrainedDraft
from archsearch.drafts.trainer import DraftTrainer
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.estimate import Estimate
from archsearch.files import read_json
from archsearch.needs import Needs
from archsearch.pipeline.candidates import copy_draft, set_gamma, write_report
from archsearch.pipeline.families import INDEPENDENT, check_independent
from archsearch.pipeline.heads import compare_families
from archsearch.pipeline.session import SearchSession, check_weights
from archsearch.records import save
from archsearch.report.terminal.run import HeadAnswer, Trained
from archsearch.runs.candidate import TRAINING_FILE, TrainingRecord
from archsearch.runs.tables import FAMILIES_FILE, TEXT_VERDICT_FILE, TextStand, TextVerdict
from archsearch.search.objective import Scorer
from archsearch.speedup import clamped, logit, logit_std, moved, tau_estimate
from archsearch.text.prompt_set import answer_faults, prompt_faults
from archsearch.training.curves import AlphaPoint, promise


def train_rank(path: Path, rank: int, budget_s: float) -> Trained:
    """Distil one candidate for `budget_s` seconds more, measure it and score it again. Continues
    its checkpoint."""
    session = SearchSession.reopen(path)
    score = session.run.score(rank)
    check_independent(score, "training", path)
    check_weights(session.target)
    trainer = session.trainer()
    budget_s = _left_after_text(trainer, budget_s)
    before = trainer.spent(score.architecture)[1]
    draft = trainer.train(
        score.architecture, before + budget_s, session.request.seed, f"rank {rank}"
    )
    scored = draft.score(session.scorer).with_rank(rank)
    renewed = replace(scored, needs=Needs("exists", str(draft.folder)))
    session.run.write_best(
        renewed, None, vllm_config(INDEPENDENT, str(session.run.best_dir(rank)), renewed.gamma)
    )
    copy_draft(draft.folder, session.run.best_dir(rank))
    set_gamma(session.run.best_dir(rank), renewed.gamma)
    text = text_verdict(session.scorer, trainer, draft)
    write_report(session.run, session)
    training = TrainingRecord.from_dict(read_json(draft.folder / TRAINING_FILE, "training record"))
    return Trained(text, path, rank, score, renewed, training, draft.alpha_by_category)


def _left_after_text(trainer: DraftTrainer, budget_s: float) -> float:
    """What is left of `budget_s` for training: where the run has no text yet, the target writes it
    first, within its usual share."""
    try:
        trainer.texts.training()
    except MissingDataError:
        trainer.texts.write_training(TEXT_SHARE * budget_s)
        return (1 - TEXT_SHARE) * budget_s
    return budget_s


def train_family(path: Path, plan: HeadPlan, budget_s: float) -> HeadAnswer:
    """Train a head of a run for `budget_s` seconds more, on the texts that its drafts learn from;
    continues its checkpoint."""
    session = SearchSession.reopen(path)
    check_weights(session.target)
    trainer = session.trainer()
    heads = HeadTrainer(trainer)
    heads.keep_states(plan)
    budget_s = _left_after_text(trainer, budget_s)
    spent = _spent(path, plan)
    trained = heads.train(plan, spent + budget_s, session.request.seed)
    if (path / FAMILIES_FILE).is_file():  # with the head as it is now
        compare_families(path)
    write_report(session.run, session)
    own = (path, plan.family, trained.plan.gamma, trained.folder)
    kept = (getattr(trained.record, each.name) for each in fields(HeadAnswer)[len(own) :])
    return HeadAnswer(*own, *kept)


def _spent(path: Path, plan: HeadPlan) -> float:
    """Seconds that the run's head of this family was trained for. ArchsearchError where it is
    another head than `plan`."""
    if (before := find_head(path, plan.family)) is None:
        return 0.0
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
    record = TrainingRecord.from_dict(read_json(draft.folder / TRAINING_FILE, "training record"))
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
        (
            *prompt_faults([prompt.text for prompt in (*prompts.train, *prompts.heldout)]),
            *answer_faults(answers),
        ),
    )
    save(trainer.folder / TEXT_VERDICT_FILE, verdict)
    return verdict


def predicted(
    scorer: Scorer, draft: TrainedDraft, record: TrainingRecord, now: TextStand
) -> tuple[TextStand | None, TextStand | None]:
    """(what the text would bring learnt in full, None where it is; what TIMES_MORE the prompts
    would bring), by the draft's curve; None without one. The curve says by how much logit(alpha)
    rises, from what was measured on held-out text."""
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
        found = promise(
            rising,
            epoch,
            prompts=now.prompts,
            distinct_tokens=now.distinct_tokens,
            more_prompts=prompts,
        )
        rise = max(logit(clamped(found.alpha.value)) - logit(clamped(kept.alpha)), 0.0)
        alpha = replace(moved(now.alpha, rise, logit_std(found.alpha)), source="modelled")
        speedup = speedup_at(scorer, draft, alpha)
        if speedup is None:
            return None
        return TextStand(prompts, found.distinct_tokens, alpha, speedup)

    learnt = None if record.stopped else stand(now.prompts)
    if learnt is not None and learnt.alpha.value < now.alpha.value + LEAST_UNLEARNT:
        learnt = None
    return learnt, stand(rounded(TIMES_MORE * now.prompts))


def speedup_at(scorer: Scorer, draft: TrainedDraft, alpha: Estimate) -> Estimate | None:
    """The speed-up of a trained draft were its alpha another one: tau by gamma in proportion to the
    closed form's."""
    taus = {gamma: _tau_at(tau, gamma, draft.alpha, alpha) for gamma, tau in draft.tau.items()}
    try:
        return scorer.measured(draft.architecture, alpha, taus).speedup
    except ArchsearchError:
        return None


def _tau_at(measured: Estimate, gamma: int, was: Estimate, now: Estimate) -> Estimate:
    before, after = tau_estimate(was, gamma), tau_estimate(now, gamma)
    value = min(measured.value * after.value / before.value, gamma + 1.0)
    return Estimate(value, math.hypot(measured.std, after.std), "modelled")


def narrowest(draft: TrainedDraft) -> tuple[str, Estimate | None]:
    """The category whose alpha lies clearly above that of all; ("", None) where none does."""
    found: Mapping[str, Estimate] = {
        name: alpha for name, alpha in draft.alpha_by_category.items() if name
    }
    if len(found) < 2:
        return "", None
    name, alpha = max(found.items(), key=lambda item: item[1].value - item[1].std)
    if alpha.value - alpha.std < draft.alpha.value + NARROW_ABOVE:
        return "", None
    return name, alpha


def rounded(count: int) -> int:
    """317 x 10 as people say it: 3,000; one leading digit, rounded."""
    size: int = 10 ** max(len(str(count)) - 1, 0)
    return max(round(count / size), 1) * size
