"""`archsearch export`: one ranked candidate of a run, or a head of a family, as engines load it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from archsearch.drafts.heads import run_head
from archsearch.drafts.records import load_trained
from archsearch.engine_facts import engine_facts
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.export.card import (
    DraftRecord,
    ExportSource,
    ExportTarget,
    FullHead,
    padded_head_cost,
)
from archsearch.export.engines import DEFAULT_ENGINES, check_engines
from archsearch.export.folder import export
from archsearch.models.files import has_tokenizer, head_family_of
from archsearch.models.gguf_file import read_gguf
from archsearch.models.targets import resolve_drafter, resolve_target
from archsearch.pipeline.families import INDEPENDENT, check_independent
from archsearch.pipeline.heads import served_gamma
from archsearch.pipeline.session import SearchSession
from archsearch.records import as_data, load_or_note
from archsearch.report.phrases import gguf_dtype, shell_path
from archsearch.runs.candidate import Candidate
from archsearch.runs.confirmed import LOAD_FILES, Confirmed, LoadRecord
from archsearch.runs.run import Run, open_run
from archsearch.runs.tables import SCHEDULE_FILE, longest_of, read_schedule
from archsearch.schedule import GammaSchedule, gamma_at, largest_gamma
from archsearch.workload import GGUF_DTYPES


def export_rank(
    path: Path,
    rank: int,
    output: Path,
    *,
    engines: Sequence[str] = DEFAULT_ENGINES,
    gamma: int | None = None,
    schedule: Path | None = None,
    allow_untrained: bool = False,
    draft_dtype: str | None = None,
) -> dict[str, object]:
    """Export a candidate for `engines`; says what engines pay that compute the padded head.

    `schedule`: a JSON file with gamma by batch size (default: the rank's own schedule.json).
    `gamma`: for engines without a schedule (default: the schedule's at the run's batch size, else
    the one confirmed in the one engine of `engines`, else in the run's, else the score's). An
    untrained candidate is refused unless `allow_untrained`, which exports its shape. `draft_dtype`:
    of a GGUF (None: as it was confirmed last, else float16).
    """
    engines = check_engines(engines)
    run = open_run(path)
    candidate = run.candidate(rank)
    check_independent(candidate.score, "export", path, f" --output {shell_path(output)}")
    train = f"archsearch train {shell_path(path)} --rank {rank}"
    if not candidate.has_weights and not allow_untrained:
        raise MissingDataError(
            f"rank {rank} of {path} has no weights; train it first: {train} (or export its shape:"
            " --allow-untrained)"
        )
    planned = _schedule(schedule, candidate.folder)
    draft_dtype = draft_dtype or run.draft_dtype
    ran = _confirmed_in(candidate, draft_dtype)
    found = ran.get(engines[0]) if len(engines) == 1 else None
    as_gguf = next((each for each in ran.values() if engine_facts(each.engine).gguf), None)
    if as_gguf is not None:
        draft_dtype = gguf_dtype(as_gguf)
    record = _draft_record(run, candidate, found or run.confirmed(rank))
    stops = {
        engine: (row.gamma, row.stops_below)
        for engine, known in ran.items()
        if not (gamma or known.padded_when_served) and (row := known.stops) is not None
    }
    scheduled = gamma_at(planned.ranges, int(run.arguments.get("batch_size") or 1))
    gamma = gamma or scheduled or (record.confirmed or candidate.score).gamma
    full_head = _full_head(run, candidate, gamma, scheduled=bool(planned.ranges))
    draft = ExportSource(
        candidate.folder, gamma, planned, record=record, full_head=full_head, stops=stops
    )
    ran_in = as_gguf.dtype if as_gguf is not None else run.dtype
    source = _beside_target(draft, run, engines, draft_dtype, ran_in)
    note = _head_note(candidate, source.dtype, full_head)
    if not candidate.has_weights:
        note = f"It holds a shape without weights; to train it: {train}. {note}"
    better = full_head.better_gamma if full_head is not None else None
    return {
        "output": str(export(source, output, engines, allow_untrained=allow_untrained)),
        "gamma": gamma,
        "rank": rank,
        "engines": list(engines),
        "stops": {engine: list(found) for engine, found in stops.items()},
        "schedule": [list(entry) for entry in planned.ranges],
        "trained": candidate.has_weights,
        "note": note,
        "padded_speedup": full_head.speedup if full_head is not None else None,
        "better_gamma": better[0] if better is not None else None,
    }


def _schedule(asked: Path | None, folder: Path) -> GammaSchedule:
    """The one that was asked for, else the drafter's own, empty where it has none."""
    if asked is not None and not asked.is_file():
        raise ArchsearchError(f"gamma schedule not found: {asked}")
    return read_schedule(asked or folder / SCHEDULE_FILE)


def _beside_target(
    draft: ExportSource,
    run: Run,
    engines: Sequence[str],
    draft_dtype: str | None,
    ran_in: str,
) -> ExportSource:
    """`ran_in`: the precision in which an engine on GGUF files measured it, or the run's."""
    from archsearch.models.load import load_tokenizer, packaged_gguf

    ref = resolve_target(run.arguments["target"])
    gguf = any(engine_facts(engine).gguf for engine in engines)
    file = None
    if gguf and ref.folder is None and ref.weights:  # it comes in one, or is one
        file = packaged_gguf(ref.name, ref.weights)
        if ran_in in GGUF_DTYPES and read_gguf(file).dtype != ran_in:
            file = None  # another model than the one that was measured
    # a head's GGUF holds the target's tokenizer
    asks, tokenizer = gguf if draft.family != INDEPENDENT else not has_tokenizer(draft.draft), None
    if asks:
        with suppress(MissingDataError):  # engines then take the target's own
            tokenizer = load_tokenizer(ref)
    # as asked, else the fewest that hold the target
    ranks = int(run.arguments.get("tensor_parallel") or run.on_cpu)
    return replace(
        draft,
        target=ExportTarget(ref.place or ref.name, tokenizer, file),
        dtype=run.dtype or "bfloat16",
        tensor_parallel=ranks or SearchSession.reopen(run.path).scorer.workload.tensor_parallel,
        longest=longest_of(run.path, draft.record.score.rank if draft.record.score else None),
        gguf_dtype=draft_dtype or run.draft_dtype or draft.gguf_dtype,
        **run.priced_as,
    )


def _draft_record(run: Run, candidate: Candidate, found: Confirmed | None) -> DraftRecord:
    training = candidate.training() if candidate.has_weights else None
    files = sorted(candidate.folder.glob(LOAD_FILES))
    read = (load_or_note(path, "measurement under load", LoadRecord, []) for path in files)
    loads = tuple(each for each in read if each and not each.is_stale(candidate.score.alpha))
    confirmed = None if found is None else as_data(found)
    provenance = {"run": run.info, "rank": candidate.rank, "confirmed": confirmed}
    return DraftRecord(candidate.score, found, training, loads, provenance)


def _confirmed_in(candidate: Candidate, draft_dtype: str | None) -> dict[str, Confirmed]:
    """By engine the last confirmation of these weights, as GGUF in `draft_dtype` where one is
    asked for."""
    found = {}
    paths = candidate.folder.glob("confirmed-*.json")
    for path in sorted(paths, key=lambda path: path.stat().st_mtime):
        known = load_or_note(path, "confirmation", Confirmed, [])
        if known is None or known.is_stale(candidate.score.alpha):
            continue
        if not engine_facts(known.engine).gguf or draft_dtype in (None, gguf_dtype(known)):
            found[known.engine] = known
    return found


def _full_head(run: Run, candidate: Candidate, gamma: int, *, scheduled: bool) -> FullHead | None:
    """What engines get that compute the full head of a trained draft; None where its head is full,
    or it has no weights. Padding rows never win, so only the time changes. `scheduled`: gamma goes
    by batch size, so no other one is proposed. Raises ArchsearchError for a gamma that was not
    measured on held-out text."""
    if not candidate.architecture.trimmed or not candidate.has_weights:
        return None
    scorer = SearchSession.reopen(run.path).scorer
    known = load_trained(candidate.architecture, candidate.folder)
    known.check_gammas([gamma])
    full = candidate.architecture.replace(draft_vocab_size=None)
    kept, here, best = (
        scorer.measured(shape, known.alpha, known.tau, gammas=gammas)
        for shape, gammas in ((candidate.architecture, [gamma]), (full, [gamma]), (full, None))
    )
    better = (best.gamma, best.speedup.value) if best.gamma != gamma and not scheduled else None
    return FullHead(here.speedup.value, better, kept.speedup.value)


def _head_note(candidate: Candidate, dtype: str, full_head: FullHead | None) -> str:
    arch = candidate.architecture
    if not arch.trimmed:
        return "The head holds the full vocabulary."
    predicted, advice = "", ""
    if full_head is not None:
        both = f"{full_head.speedup:.2f} instead of {full_head.kept_rows:.2f}"
        predicted = f" (predicted speed-up {both})"
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


def export_family(
    path: Path,
    name: str,
    output: Path,
    *,
    engines: Sequence[str] = DEFAULT_ENGINES,
    gamma: int | None = None,
    schedule: Path | None = None,
    draft_dtype: str | None = None,
) -> dict[str, Any]:
    """Export a trained head of a run for those of `engines` that run it. `draft_dtype`: of a GGUF
    (None: float16); `schedule`: gamma by batch size; without one the head's own schedule.json,
    where no `gamma` is asked for. Raises ArchsearchError for a gamma that the head was not trained
    for, and where none of the engines runs it."""
    family = head_family_of(name)
    able = check_engines(engines, family)
    if not able:
        raise ArchsearchError(
            f"{family} heads are not exported for {', '.join(engines)}; leave --for out"
        )
    run = open_run(path)
    trained = run_head(path, family)
    ref = resolve_target(run.arguments["target"])
    resolve_drafter(str(trained.folder), ref)  # of another target it raises
    wanted, most = gamma or served_gamma(path, trained), trained.plan.gamma
    if wanted > most:
        raise ArchsearchError(
            f"the head was trained for {most} draft tokens a round and accepts little beyond; got"
            f" gamma {wanted}"
        )
    asked = gamma is None or schedule is not None
    planned = _schedule(schedule, trained.folder).ranges if asked else ()
    if planned and (why := engine_facts("vllm").unscheduled_words(family)):
        if schedule is not None:
            raise ArchsearchError(f"{why}; leave --schedule out")
        planned = ()
    if largest_gamma(planned, 0) > most:
        raise ArchsearchError(
            f"the schedule drafts up to {largest_gamma(planned, 0)} tokens, the head was trained"
            f" for {wanted}"
        )
    record = DraftRecord(training=trained.record, provenance={"run": run.info})
    schedules = GammaSchedule(planned)
    head = ExportSource(trained.folder, wanted, schedules, record=record, family=family)
    made = str(export(_beside_target(head, run, able, draft_dtype, run.dtype), output, able))
    what = {"run": str(path), "family": family, "gamma": wanted}
    return {**what, "output": made, "engines": list(able)}
