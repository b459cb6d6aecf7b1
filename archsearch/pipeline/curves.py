"""What drafts are worth over a range of batch sizes, contexts, gammas or acceptances: `archsearch
estimate --sweep`, and what a report draws of a run, with where the time goes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from archsearch.acceptance.estimator import Acceptance
from archsearch.acceptance.families import FamilyAcceptance
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.ops import head_ops, layer_ops, sample_op
from archsearch.capacity import cut_context, fits, memory_plan
from archsearch.drafts.records import acceptance_of
from archsearch.engine_facts import engine_facts
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.files import write_text
from archsearch.hardware.device import Device
from archsearch.latency.model import LatencyModel
from archsearch.latency.roofline import RooflineLatency
from archsearch.pipeline.estimate import EstimateRequest, Priced, price_drafts, switch_warnings
from archsearch.pipeline.rounds_explained import remedied
from archsearch.pipeline.schedule import usual_batches
from archsearch.pipeline.serving import check_batch
from archsearch.pipeline.session import SearchSession
from archsearch.records import WRONG_SHAPE, load_or_note, save
from archsearch.report.terminal.curves import DraftCurve, Memory, Swept
from archsearch.runs.run import Run
from archsearch.runs.tables import CURVES_FILE, SWEPT, Bar, Curve, Curves, Point, state_of
from archsearch.search.objective import Score, Scorer
from archsearch.search.ranking import best_of_each, rivals, size_of
from archsearch.traffic.curve import Axis, Sweep, at, curve, sweep_of
from archsearch.traffic.times import held_by
from archsearch.workload import Workload

OpsPriced = LatencyModel | RooflineLatency
COLUMNS: Final = (
    "draft engine engine_version x gamma alpha tau speedup speedup_low speedup_high speedup_off"
    " ideal tpot_ms plain_tpot_ms tokens_per_s plain_tokens_per_s running plain_running"
    " throughput_gain pays"
).split()


def estimate_curves(request: EstimateRequest, axis: str, span: str | None = None) -> Swept:
    """The drafts of `request` over `axis`; `span`: `LOW:HIGH` or `LOW:HIGH:POINTS`.

    Raises ArchsearchError for what is no range, or an engine that does not run what it asks for.
    """
    sweep_of(axis, span, 2)  # what is no range is refused before anything is priced
    priced, asked = price_drafts(request)
    shapes = [priced[0].scorer.target, *(item.score.architecture for item in priced)]
    reach = min(arch.max_position_embeddings for arch in shapes)
    sweep = sweep_of(axis, span, max(reach, 256))
    if sweep.axis == "batch":
        for item in priced:
            check_batch(engine_facts(item.source.engine), item.source.device, int(sweep.values[-1]))
    curves = tuple(_swept_draft(item, sweep) for item in priced)
    if sweep.axis == "batch":  # a switch may bring more at some of them alone
        asked = replace(asked, warnings=switch_warnings(priced, sweep.values))
    return Swept(**vars(asked), sweep=sweep.axis, gamma=request.gamma, curves=curves)


def _swept_draft(item: Priced, sweep: Sweep) -> DraftCurve:
    facts, scorer, device = engine_facts(item.source.engine), item.scorer, item.source.device
    if item.entry.other_tokenizer:
        raise ArchsearchError(f"{item.entry.draft} has another tokenizer than the target")
    found = curve(
        scorer,
        item.score.proposer,
        sweep,
        lambda workload, drafter: held_by(facts, scorer.target, device, workload, drafter),
    )
    notes, largest = list(item.entry.notes), scorer.latency.largest_batch
    if largest is not None:
        notes.append(
            f"passes were measured up to batch size {largest}; beyond twice that the curve is a"
            " guess"
        )
    longest = sweep.values[-1] if sweep.axis == "context" else scorer.workload.context_len
    memory = _memory(item, int(longest))
    return DraftCurve(item.entry.draft, item.source.by, tuple(notes), memory, found)


def _memory(item: Priced, context: int) -> Memory | None:
    """What the fullest device holds with the draft and without, for requests of `context` tokens;
    None on a CPU."""
    device, scorer = item.source.device, item.scorer
    if device.is_cpu:
        return None
    ranks = engine_facts(item.source.engine).ranks_of_draft(scorer.workload)
    served = replace(scorer.workload, draft_tensor_parallel=ranks, context_len=context)
    with_draft, alone = (
        memory_plan(scorer.target, each, served, device) for each in (item.score.proposer, None)
    )
    return Memory(with_draft, alone, ranks, context)


def write_curves(result: Swept, path: Path) -> None:
    """The points of all curves as CSV, a row each, by COLUMNS."""
    import pandas as pd

    found = []
    for item in result.curves:
        for point in item.curve.points:
            values = {
                "draft": item.draft,
                **vars(item.by),
                "speedup_low": point.speedup.low,
                "speedup_high": point.speedup.high,
                "tpot_ms": 1e3 * point.tpot_s.value,
                "plain_tpot_ms": 1e3 * point.plain_tpot_s.value,
            }
            for name in COLUMNS:
                value = values[name] if name in values else getattr(point, name)
                values[name] = value.value if isinstance(value, Estimate) else value
            found.append(values)
    rows = pd.DataFrame(found, columns=COLUMNS)
    write_text(path, rows.to_csv(index=False, lineterminator="\n", float_format="%.6g"))


DRAWN: Final = 6
"""Drafters along each quantity: the best of each family."""
SHAPES_DRAWN: Final = 3
"""Where there is one family: shapes of unlike depth or width."""
CONTEXTS: Final = (128, 512, 1024, 2048, 4096, 8192, 16384, 32768)
ALPHAS: Final = tuple(round(0.05 * step, 2) for step in range(1, 20))


def renew_curves(run: Run, session: SearchSession | None = None) -> None:
    """curves.json of a run, where a `session` is at hand, its scores have changed since, or there
    is none. A run that cannot be reopened here gets a file that says why nothing is drawn. Raises
    nothing but OSError."""
    try:
        state = state_of(run.scores())
    except WRONG_SHAPE:
        state = "unreadable"
    known = load_or_note(run.path / CURVES_FILE, "curves", Curves, [])
    whole = known is not None and known.state == state and known.sweeps.get("batch")
    if not run.ranks() or session is None and whole:
        return
    try:
        curves = curves_of(session or SearchSession.reopen(run.path), state)
    except WRONG_SHAPE as error:
        known_error = isinstance(error, ArchsearchError)
        words = " ".join(str(error).split()) if known_error else f"{type(error).__name__}: {error}"
        what = "Speed-up along batch, context, alpha and gamma, and where the time goes"
        curves = Curves(state, {}, {}, notes=(f"{what}: {words}",))
    save(run.path / CURVES_FILE, curves)


def curves_of(session: SearchSession, state: str) -> Curves:
    """The curves of the best ranks of a run; the bars of its first."""
    scorer, notes = session.scorer, list[str]()
    drawn = [(rank, *_known(session, rank)) for rank in _drawn(session.run)]
    sweeps: dict[str, tuple[Curve, ...]] = {
        axis: tuple(
            Curve(rank, score.label(), _swept(knows, session.source.device, axis, score, notes))
            for rank, score, knows in drawn
        )
        for axis in SWEPT
    }
    lead = drawn[0][1]
    bars = _bars(scorer, lead)
    if not bars[1]:
        notes.append(
            f"Layers and terms of the draft: {lead.proposer.title} is priced as a whole, not layer"
            " by layer."
        )
    workload = scorer.workload
    at = {"batch_size": workload.batch_size, "context": workload.context_len, "gamma": lead.gamma}
    at["tensor_parallel"] = workload.tensor_parallel
    scores = session.run.scores()
    why = tuple(rivals(scorer, scores))
    tied = tuple(tuple(score.rank or 0 for score in group) for group in session.groups(scores))
    ranks = engine_facts(session.source.engine).ranks_of_draft(workload)
    served, cut = replace(workload, draft_tensor_parallel=ranks), dict[str, int]()
    for score in scores:
        found = cut_context(scorer.target, score.proposer, served, session.source.device)
        cut |= {str(score.rank): found} if found is not None else {}
    better = [remedied(session.source.rounds, session.scorer_of(score), score) for score in scores]
    said = tuple(dict.fromkeys(notes))
    return Curves(state, at, sweeps, *bars, why, said, tied, cut, tuple(filter(None, better)))


def _drawn(run: Run) -> list[int]:
    """The ranks whose curves are drawn: the best of each family; of one family alone shapes that
    differ in depth or width: others lie on top of each other."""
    scores = [run.candidate(rank).score for rank in run.ranks()]
    best, most = best_of_each(scores), DRAWN
    if len(best) == 1:
        best, most = best_of_each(scores, size_of), SHAPES_DRAWN
    return [score.rank or 0 for score in best[:most]]


def _known(session: SearchSession, rank: int) -> tuple[Score, Scorer]:
    """A ranked draft, and the scorer that knows its acceptance."""
    score, scorer = session.run.score(rank), session.scorer
    alpha, taus, _ = acceptance_of(scorer, score, session.run.best_dir(rank))
    drift = scorer.predicted_acceptance(score.proposer).acceptance.drift
    known = FamilyAcceptance(Acceptance(alpha, drift), taus=dict(sorted(taus.items())))
    return score, scorer.with_families({score.family: known})


def _swept(
    scorer: Scorer, device: Device, axis: Axis, score: Score, notes: list[str]
) -> tuple[Point, ...]:
    """The points as far as memory holds them and the latency model answers; where it stops is
    said. Along alpha it counts as known: the band is that of the times."""
    points: list[Point] = []
    try:
        for x in _values(scorer, device, axis, score):
            found = at(scorer, score.proposer, axis, x)(score.proposer)
            points.append(Point(x, found.gamma, found.speedup))
    except ArchsearchError as error:
        notes.append(f"Speed-up along {axis} of {score.label()}: {' '.join(str(error).split())}")
    return tuple(points)


def _values(scorer: Scorer, device: Device, axis: Axis, score: Score) -> Iterator[int | float]:
    asked, draft = scorer.workload, score.proposer
    if axis == "alpha":
        yield from ALPHAS
    elif axis == "gamma":
        taus = scorer.predicted_acceptance(draft).taus or {}
        yield from (gamma for gamma in taus if gamma in scorer.gammas)
    else:
        batch, longest = axis == "batch", scorer.target.max_position_embeddings
        usual = usual_batches(scorer, device) if batch else [x for x in CONTEXTS if x < longest]
        own = asked.batch_size if batch else asked.context_len
        for x in usual if batch and len(usual) == 1 else sorted({*usual, own}):
            there = replace(asked, batch_size=x) if batch else replace(asked, context_len=x)
            if not fits(scorer.target, draft, there, device):
                return
            yield x


def _bars(scorer: Scorer, score: Score) -> tuple[tuple[Bar, ...], tuple[Bar, ...], tuple[Bar, ...]]:
    """(passes, one layer each, a round beside plain steps) of the draft and the target."""
    latency: Any = scorer.latency
    target, workload, gamma = scorer.target, scorer.workload, score.gamma
    decode, verify = scorer.decode_s, latency.verify_s(target, workload, gamma)
    check = f"target, verification of {gamma + 1}"
    passes = [
        _pass_bar(latency, "target, plain step", target, workload, 1, decode),
        _pass_bar(latency, check, target, workload, gamma + 1, verify),
    ]
    layers: list[Bar] = []
    if score.drafter is None and isinstance(latency, LatencyModel | RooflineLatency):
        draft = score.architecture
        first, later = latency.draft_passes(draft, workload, gamma)
        shared = latency.facts.ranks_of_draft(workload)
        ranks = replace(workload, tensor_parallel=shared, draft_tensor_parallel=None)
        served, step = latency.facts.served_draft(draft), later if gamma > 1 else first
        passes.insert(0, _pass_bar(latency.drafts, "draft, one token", served, ranks, 1, step))
        if latency.prices_ops:
            layers = [
                _layer_bar(latency.drafts, "draft", draft, ranks),
                _layer_bar(latency, "target", target, workload),
            ]
    time = latency.round(target, score.drafter or score.architecture, workload, gamma, verify)
    tau = score.tau.value
    plain = decode.times(tau)
    spent = {
        "draft": time.draft_s.value,
        "verification": time.verify_s.value,
        "what the engine adds": time.overhead_s.value,
    }
    alone = {"plain steps of the target": plain.value}
    rounds = (
        Bar(f"{tau:.2f} tokens, target alone", alone, plain),
        Bar(f"{tau:.2f} tokens, one round", spent, time.round_s),
    )
    return tuple(passes), tuple(layers), rounds


def _pass_bar(
    latency: OpsPriced,
    name: str,
    arch: Architecture,
    workload: Workload,
    tokens: int,
    total: Estimate,
) -> Bar:
    """By term: its ops as the profile prices each alone; beyond them its launches and the rest."""
    if not latency.prices_ops:
        return Bar(name, {"the whole pass": total.value}, total)
    terms: dict[str, float] = {}
    windows = arch.windows()
    for window in set(windows):
        for term, seconds in _layer_terms(latency, arch, workload, tokens, window).items():
            terms[term] = terms.get(term, 0.0) + windows.count(window) * seconds
    batch = workload.batch_size
    head = [
        *head_ops(arch, batch=batch, tokens=tokens, ranks=workload.tensor_parallel),
        sample_op(arch, batch=batch, tokens=tokens),
    ]
    terms["head and choice of tokens"] = math.fsum(map(latency.op_s, head))
    together = math.fsum(terms.values())
    if together > total.value:  # ops overlap
        terms = {term: seconds * total.value / together for term, seconds in terms.items()}
    else:
        terms["launches and the rest"] = total.value - together
    return Bar(name, terms, total)


def _layer_bar(latency: OpsPriced, name: str, arch: Architecture, workload: Workload) -> Bar:
    terms = _layer_terms(latency, arch, workload, 1, arch.windows()[0])
    return Bar(f"{name}, one layer", terms, Estimate(math.fsum(terms.values()), 0.0, "modelled"))


def _layer_terms(
    latency: OpsPriced, arch: Architecture, workload: Workload, tokens: int, window: int | None
) -> dict[str, float]:
    """Seconds of the ops of one layer, each alone. GEMMs up to the first one after attention are
    its projections."""
    batch, context, ranks = workload.batch_size, workload.context_len, workload.tensor_parallel
    fused = latency.mode == "graph"
    terms: dict[str, float] = {}
    behind, projected = False, False
    for op in layer_ops(
        arch, batch=batch, tokens=tokens, context=context, window=window, ranks=ranks, fused=fused
    ):
        if op.kind == "attention":
            term, behind = "attention over the context", True
        elif op.kind in ("elementwise", "all_reduce"):
            term = "norms, rope, activation" if op.kind == "elementwise" else "all-reduce"
        elif not projected:
            term, projected = "projections of attention", behind
        else:
            term = "feed-forward"
        terms[term] = terms.get(term, 0.0) + latency.op_s(op)
    return terms
