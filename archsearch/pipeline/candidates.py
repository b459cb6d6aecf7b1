"""What is done with one ranked candidate: train it further, confirm it in the engine, export it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from archsearch.architecture.architecture import Architecture
from archsearch.drafts.records import TrainedDraft, load_trained
from archsearch.engine_facts import engine_facts
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.export import (
    DEFAULT_ENGINES,
    DraftRecord,
    ExportSource,
    ExportTarget,
    FullHead,
    check_engines,
    export,
    padded_head_cost,
    vllm_config,
)
from archsearch.export.drafters import drafter_config, vllm_drafter_config
from archsearch.files import atomic_path, read_json, write_json
from archsearch.models.files import (
    DRAFT_FILES,
    TOKENIZER_FILES,
    WEIGHTS_FILE,
    gamma_settings,
    has_tokenizer,
)
from archsearch.models.targets import TargetRef, resolve_target
from archsearch.needs import Needs
from archsearch.pipeline.families import INDEPENDENT, check_independent
from archsearch.pipeline.session import SearchSession, check_weights
from archsearch.pipeline.text_verdict import text_verdict
from archsearch.runs.candidate import Candidate
from archsearch.runs.run import Run, open_run
from archsearch.runs.schedule_file import SCHEDULE_FILE, read_schedule
from archsearch.schedule import gamma_at
from archsearch.search.objective import Score
from archsearch.search.rungs import TEXT_SHARE_ALONE


def write_best(
    session: SearchSession, ranked: Sequence[Score], trained: Mapping[Architecture, TrainedDraft]
) -> None:
    """best/<rank>/: score, config, vLLM's speculative_config and, for trained drafts, the whole
    draft folder."""
    from archsearch.architecture.hf_config import to_hf_config

    run = session.run
    stale = run.ranks()
    for score in ranked:
        assert score.rank is not None
        place = str(run.best_dir(score.rank))
        if score.drafter is None:
            folder = run.write_best(
                score,
                to_hf_config(score.architecture),
                vllm_config(INDEPENDENT, place, score.gamma),
            )
        else:
            config = drafter_config(score.drafter, session.scorer.target)
            folder = run.write_best(
                score, config, vllm_drafter_config(score.drafter, place, score.gamma) or None
            )
        draft = trained.get(score.architecture) if score.drafter is None else None
        if draft is not None:
            copy_draft(draft.folder, folder)
            set_gamma(folder, score.gamma)
    for rank in stale:
        if rank > len(ranked):
            run.drop_rank(rank)


COPIED_TO_RANK = (
    *DRAFT_FILES,
    *TOKENIZER_FILES,
    "generation_config.json",
    "trace.npz",
    "training.json",
)


def copy_draft(source: Path, destination: Path) -> None:
    """Copy the files of a draft folder, each by rename; weights last, so that a folder with weights
    is whole."""
    (destination / WEIGHTS_FILE).unlink(missing_ok=True)
    for name in sorted(COPIED_TO_RANK, key=lambda name: name == WEIGHTS_FILE):
        if (source / name).is_file():
            with atomic_path(destination / name) as temporary:
                shutil.copyfile(source / name, temporary)


def set_gamma(folder: Path, gamma: int) -> None:
    """Write gamma where transformers reads it: the draft's generation_config.json."""
    path = folder / "generation_config.json"
    current = read_json(path, "generation config") if path.exists() else {}
    write_json(path, {**current, **gamma_settings(gamma)})


def train_rank(path: Path, rank: int, budget_s: float) -> dict[str, Any]:
    """Distil one candidate for `budget_s` seconds more, measure it and score it again. Continues
    its checkpoint."""
    session = SearchSession.reopen(path)
    score = session.run.score(rank)
    check_independent(score, "training", path)
    check_weights(session.target)
    trainer = session.trainer()
    try:
        trainer.texts.training()
    except MissingDataError:
        trainer.texts.write_training(TEXT_SHARE_ALONE * budget_s)
        budget_s *= 1 - TEXT_SHARE_ALONE
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
    text = text_verdict(session, trainer, draft)
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


def export_rank(
    path: Path,
    rank: int,
    output: Path,
    *,
    engines: Sequence[str] = DEFAULT_ENGINES,
    gamma: int | None = None,
    schedule: Path | None = None,
    allow_untrained: bool = False,
) -> dict[str, Any]:
    """Export a candidate for `engines`; says what engines pay that compute the padded head.

    `schedule`: a JSON file with gamma by batch size (default: the rank's own schedule.json, where
    there is one). `gamma`: draft tokens a round for engines without a schedule (default: the
    schedule's at the batch size that the run was asked for, else the confirmed one, else the
    score's). An untrained candidate is refused unless `allow_untrained`, which exports its shape.
    """
    engines = check_engines(engines)
    run = open_run(path)
    candidate = run.candidate(rank)
    check_independent(candidate.score, "exporting", path)
    if not candidate.has_weights and not allow_untrained:
        raise MissingDataError(
            f"rank {rank} of {path} has no weights; train it first: archsearch train {path} --rank"
            f" {rank} (or export its shape: --allow-untrained)"
        )
    if schedule is not None and not schedule.is_file():
        raise ArchsearchError(f"gamma schedule not found: {schedule}")
    planned = read_schedule(schedule or candidate.folder / SCHEDULE_FILE)
    record = _draft_record(run, candidate)
    scheduled = gamma_at(planned.ranges, int(run.arguments.get("batch_size") or 1))
    gamma = (
        gamma or scheduled or int((record.confirmed or {}).get("gamma") or candidate.score.gamma)
    )
    dtype = str(run.info["profile"].get("dtype") or record.confirmed_dtype or "bfloat16")
    full_head = _full_head(run, candidate, gamma, scheduled=bool(planned.ranges))
    written = export(
        ExportSource(
            candidate.folder,
            gamma,
            schedule=planned,
            target=_export_target(
                run, candidate, gguf=any(engine_facts(name).gguf for name in engines)
            ),
            record=record,
            full_head=full_head,
            dtype=dtype,
            tensor_parallel=serving_ranks(run),
        ),
        output,
        engines,
        allow_untrained=allow_untrained,
    )
    note = _head_note(candidate, dtype, full_head)
    if not candidate.has_weights:
        note = (
            f"It holds a shape without weights; to train it: archsearch train {path} --rank {rank}."
            f" {note}"
        )
    return {
        "output": str(written),
        "gamma": gamma,
        "rank": rank,
        "engines": list(engines),
        "schedule": [list(entry) for entry in planned.ranges],
        "trained": candidate.has_weights,
        "note": note,
        "padded_speedup": full_head.speedup if full_head is not None else None,
        "better_gamma": (
            full_head.better_gamma[0]
            if full_head is not None and full_head.better_gamma is not None
            else None
        ),
    }


def _draft_record(run: Run, candidate: Candidate) -> DraftRecord:
    """What the files of the run say of a candidate."""
    training = candidate.training() if candidate.has_weights else None
    confirmed = run.confirmed(candidate.rank)
    loads = sorted(candidate.folder.glob("load-*.json"))
    return DraftRecord(
        score=candidate.score.to_dict(),
        confirmed=confirmed,
        training=training.to_dict() if training is not None else None,
        loads=tuple(read_json(path, "run under load") for path in loads),
        provenance={"run": run.info, "rank": candidate.rank, "confirmed": confirmed},
    )


def _full_head(run: Run, candidate: Candidate, gamma: int, *, scheduled: bool) -> FullHead | None:
    """What engines get that compute the full head of a trained draft; None where its head is full,
    or it has no weights.

    The padding rows never win, so acceptance is the trimmed head's; only the time changes.
    `scheduled`: gamma goes by batch size, so no other one is proposed. Raises ArchsearchError for a
    gamma that was not measured on held-out text.
    """
    if not candidate.architecture.trimmed or not candidate.has_weights:
        return None
    scorer = SearchSession.reopen(run.path).scorer
    known = load_trained(candidate.architecture, candidate.folder)
    if gamma not in known.tau:
        raise ArchsearchError(
            f"gamma {gamma} was not measured on held-out text (1 to {max(known.tau)}); use a"
            " smaller one"
        )
    full = candidate.architecture.replace(draft_vocab_size=None)
    here, best = (
        scorer.measured(full, known.alpha, known.tau, gammas=gammas) for gammas in ([gamma], None)
    )
    better = (best.gamma, best.speedup.value) if best.gamma != gamma and not scheduled else None
    return FullHead(here.speedup.value, better)


def _head_note(candidate: Candidate, dtype: str, full_head: FullHead | None) -> str:
    """One sentence about what a trimmed head costs engines that compute it in full."""
    arch = candidate.architecture
    if not arch.trimmed:
        return "The head holds the full vocabulary."
    predicted, advice = "", ""
    if full_head is not None:
        own = candidate.score.speedup.value
        predicted = f" (predicted speed-up {full_head.speedup:.2f} instead of {own:.2f})"
        if full_head.better_gamma is not None:
            gamma, speedup = full_head.better_gamma
            advice = (
                f" For those engines gamma {gamma} is better (predicted {speedup:.2f}): --gamma"
                f" {gamma}."
            )
    return (
        f"The head proposes {arch.head_rows:,} of {arch.vocab_size:,} tokens. Engines that need a"
        f" full head load the padded one and read {padded_head_cost(arch, dtype).ratio:.1f} times"
        f" the weights per draft token{predicted}; archsearch.models.load_draft keeps it"
        f" trimmed.{advice}"
    )


def _export_target(run: Run, candidate: Candidate, *, gguf: bool) -> ExportTarget:
    """The run's target. `gguf`: an engine takes the target's own GGUF."""
    ref = resolve_target(run.arguments["target"])
    return ExportTarget(
        str(ref.folder or ref.hub_id or ref.name),
        None if has_tokenizer(candidate.folder) else _target_tokenizer(ref),
        _target_gguf(ref) if gguf else None,
    )


def _target_tokenizer(ref: TargetRef) -> Any:
    """The target's tokenizer, None where it cannot be had: engines then take the target's own."""
    from archsearch.models.load import load_tokenizer

    try:
        return load_tokenizer(ref)
    except MissingDataError:
        return None


def _target_gguf(ref: TargetRef) -> Path | None:
    """The target's own GGUF, where it comes in one."""
    from archsearch.models.gguf import packaged_gguf

    return packaged_gguf(ref.name, ref.weights) if ref.folder is None and ref.weights else None


def serving_ranks(run: Run) -> int:
    """Devices the target is served on: as asked, else the fewest that hold it."""
    asked = run.arguments.get("tensor_parallel")
    if asked:
        return int(asked)
    return (
        1
        if run.info["device"].get("kind") == "cpu"
        else SearchSession.reopen(run.path).scorer.workload.tensor_parallel
    )


def write_report(run: Run, session: SearchSession | None = None) -> Path:
    """report.html of a run, and curves.json, which it draws, where its scores have changed.
    `session`: the run's own, where there is one at hand."""
    from archsearch.pipeline.report_curves import renew_curves
    from archsearch.report import write_html

    renew_curves(run, session)
    return write_html(run)
