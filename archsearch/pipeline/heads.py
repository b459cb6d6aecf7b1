"""Heads of a run: trained on its texts, exported. What they do in an engine is in
`confirm_families`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from archsearch.drafts.heads import (
    HEAD_LAYERS,
    HeadPlan,
    HeadTrainer,
    TrainedHead,
    head_folder,
    load_head,
    trained_heads,
)
from archsearch.engine_facts import engine_facts
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.export import DraftRecord, ExportSource, ExportTarget, check_engines, export
from archsearch.export.engines import DEFAULT_ENGINES
from archsearch.models.drafters import head_family_of
from archsearch.pipeline.candidates import serving_ranks, write_report
from archsearch.pipeline.family_results import compare_families
from archsearch.pipeline.session import SearchSession, check_weights
from archsearch.runs.families import FAMILIES_FILE, gamma_of_family
from archsearch.runs.run import open_run
from archsearch.runs.schedule_file import SCHEDULE_FILE, read_schedule
from archsearch.schedule import GammaSchedule, largest_gamma
from archsearch.search.rungs import TEXT_SHARE_ALONE

USUAL_GAMMA: Final = 3


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


def train_family(path: Path, plan: HeadPlan, budget_s: float) -> dict[str, Any]:
    """Train a head of a run for `budget_s` seconds more, on the texts that its drafts learn from;
    continues its checkpoint.

    Where the run has no text yet, the target writes it first, within its usual share of the budget.
    """
    session = SearchSession.reopen(path)
    check_weights(session.target)
    trainer = session.trainer()
    heads = HeadTrainer(trainer)
    heads.check(plan)
    try:
        trainer.texts.training()
    except MissingDataError:
        trainer.texts.write_training(TEXT_SHARE_ALONE * budget_s)
        budget_s *= 1 - TEXT_SHARE_ALONE
    spent = _spent(path, plan)
    trained = heads.train(plan, spent + budget_s, session.request.seed)
    if (
        path / FAMILIES_FILE
    ).is_file():  # what the run knew of its families, with the head as it is now
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
            f" layers, {before.record['rows']} tokens, auxiliary layers"
            f" {list(before.plan.aux_layers) or 'the usual'}); name the same, or delete it"
        )
    return float(before.record["seconds"])


def served_gamma(path: Path, head: TrainedHead) -> int:
    """Draft tokens a round that a run's head is served with unless something else is asked: what
    the run's last table of families found best, else all that it was trained for."""
    return min(gamma_of_family(path, head.plan.family) or head.plan.gamma, head.plan.gamma)


def described(path: Path, trained: TrainedHead) -> dict[str, Any]:
    """A head as plain data, for --json and the report."""
    keys = (
        "plan",
        "rows",
        "seconds",
        "tokens",
        "tokens_per_s",
        "auxiliary_s",
        "vocabulary_coverage",
        "heldout",
        "best",
    )
    record = {key: trained.record[key] for key in keys}
    return {
        "run": str(path),
        "family": trained.plan.family,
        "gamma": trained.plan.gamma,
        "folder": str(trained.folder),
        **record,
    }


def export_family(
    path: Path, name: str, output: Path, *, gamma: int | None = None, schedule: Path | None = None
) -> dict[str, Any]:
    """Export a trained head of a run, ready to serve beside its target. `schedule`: gamma by batch
    size; without one the head's own schedule.json, where no `gamma` is asked for.

    Raises ArchsearchError for a gamma that the head was not trained for.
    """
    from archsearch.training.heads.folder import TargetFacts, check_head

    family = head_family_of(name)
    run = open_run(path)
    if family not in trained_heads(path):
        raise MissingDataError(
            f"{path} has no trained {family} head; train it first: archsearch train {path} --family"
            f" {family}"
        )
    trained = load_head(head_folder(path, family))
    from archsearch.models.targets import resolve_target

    ref = resolve_target(run.arguments["target"])
    check_head(trained.folder, TargetFacts.of(ref.architecture, ref.name))
    wanted = gamma or served_gamma(path, trained)
    if wanted > trained.plan.gamma:
        raise ArchsearchError(
            f"the head was trained for {trained.plan.gamma} draft tokens a round and accepts little"
            f" beyond; got gamma {wanted}"
        )
    target = str(ref.folder or ref.hub_id or ref.name)
    planned = (
        read_schedule(schedule or trained.folder / SCHEDULE_FILE).ranges
        if gamma is None or schedule
        else ()
    )
    if planned and (why := engine_facts("vllm").unscheduled_words(family)):
        if schedule is not None:
            raise ArchsearchError(f"{why}; leave --schedule out")
        planned = ()
    if largest_gamma(planned, 0) > trained.plan.gamma:
        raise ArchsearchError(
            f"the schedule drafts up to {largest_gamma(planned, 0)} tokens, the head was trained"
            f" for {wanted}"
        )
    source = ExportSource(
        trained.folder,
        wanted,
        GammaSchedule(planned),
        ExportTarget(target),
        DraftRecord(training=trained.record, provenance={"run": run.info}),
        dtype=str(run.info["profile"].get("dtype") or "bfloat16"),
        tensor_parallel=serving_ranks(run),
        family=family,
    )
    made = export(source, output)
    engines = list(check_engines(DEFAULT_ENGINES, family))
    return {
        "run": str(path),
        "family": family,
        "gamma": wanted,
        "output": str(made),
        "engines": engines,
    }
