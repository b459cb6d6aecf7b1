"""`archsearch train`: one ranked candidate, or a head of a family, for some minutes more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from archsearch.drafts.heads import (
    HeadPlan,
    HeadTrainer,
    TrainedHead,
    head_folder,
    load_head,
    trained_heads,
)
from archsearch.drafts.trainer import DraftTrainer
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.export import vllm_config
from archsearch.files import read_json
from archsearch.needs import Needs
from archsearch.pipeline.candidates import copy_draft, set_gamma, write_report
from archsearch.pipeline.families import INDEPENDENT, check_independent
from archsearch.pipeline.family_table import compare_families
from archsearch.pipeline.session import SearchSession, check_weights
from archsearch.pipeline.text_verdict import text_verdict
from archsearch.records import as_data
from archsearch.runs.families import FAMILIES_FILE
from archsearch.search.rungs import TEXT_SHARE_ALONE


def train_rank(path: Path, rank: int, budget_s: float) -> dict[str, Any]:
    """Distil one candidate for `budget_s` seconds more, measure it and score it again. Continues
    its checkpoint."""
    session = SearchSession.reopen(path)
    score = session.run.score(rank)
    check_independent(score, "training", path)
    check_weights(session.target)
    trainer = session.trainer()
    budget_s = _left_after_text(trainer, budget_s)
    training = trainer.draft_folder(score.architecture) / "training.json"
    before = float(read_json(training, "training record")["seconds"]) if training.exists() else 0.0
    draft = trainer.train(
        score.architecture, before + budget_s, session.request.seed, f"rank {rank}"
    )
    scored = session.scorer.measured(draft.architecture, draft.alpha, draft.tau).with_rank(rank)
    renewed = replace(scored, needs=Needs("exists", str(draft.folder)))
    session.run.write_best(
        renewed, None, vllm_config(INDEPENDENT, str(session.run.best_dir(rank)), renewed.gamma)
    )
    copy_draft(draft.folder, session.run.best_dir(rank))
    set_gamma(session.run.best_dir(rank), renewed.gamma)
    text = text_verdict(session.scorer, trainer, draft)
    write_report(session.run, session)
    return {
        "text": text.to_dict(),
        "run": str(path),
        "rank": rank,
        "before": score.to_dict(),
        "after": renewed.to_dict(),
        "training": read_json(training, "training record"),
        "alpha_by_category": {
            name: value.to_dict() for name, value in draft.alpha_by_category.items()
        },
    }


def _left_after_text(trainer: DraftTrainer, budget_s: float) -> float:
    """What is left of `budget_s` for training: where the run has no text yet, the target writes it
    first, within its usual share."""
    try:
        trainer.texts.training()
    except MissingDataError:
        trainer.texts.write_training(TEXT_SHARE_ALONE * budget_s)
        return (1 - TEXT_SHARE_ALONE) * budget_s
    return budget_s


def train_family(path: Path, plan: HeadPlan, budget_s: float) -> dict[str, Any]:
    """Train a head of a run for `budget_s` seconds more, on the texts that its drafts learn from;
    continues its checkpoint."""
    session = SearchSession.reopen(path)
    check_weights(session.target)
    trainer = session.trainer()
    heads = HeadTrainer(trainer)
    heads.check(plan)
    budget_s = _left_after_text(trainer, budget_s)
    spent = _spent(path, plan)
    trained = heads.train(plan, spent + budget_s, session.request.seed)
    if (path / FAMILIES_FILE).is_file():  # with the head as it is now
        compare_families(path)
    write_report(session.run, session)
    return described(path, trained)


def _spent(path: Path, plan: HeadPlan) -> float:
    """Seconds that the run's head of this family was trained for. ArchsearchError where it is
    another head than `plan`."""
    if plan.family not in trained_heads(path):
        return 0.0
    before = load_head(head_folder(path, plan.family))
    if before.plan != plan:
        raise ArchsearchError(
            f"{before.folder} holds another head (gamma {before.plan.gamma}, {before.plan.layers}"
            f" layers, {before.record.rows} tokens, auxiliary layers"
            f" {list(before.plan.aux_layers) or 'the usual'}); name the same, or delete it"
        )
    return before.record.seconds


def described(path: Path, trained: TrainedHead) -> dict[str, Any]:
    """A head as plain data, for --json and the report."""
    record = as_data(trained.record)
    keys = "plan rows seconds tokens tokens_per_s auxiliary_s vocabulary_coverage heldout best"
    return {
        "run": str(path),
        "family": trained.plan.family,
        "gamma": trained.plan.gamma,
        "folder": str(trained.folder),
        **{key: record[key] for key in keys.split()},
    }
