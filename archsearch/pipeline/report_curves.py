"""What a report draws and only a latency model can say: speed-up along batch, context, alpha and
gamma; where the time goes."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.ops import Op, head_ops, layer_ops, sample_op
from archsearch.capacity import memory_bytes, usable_bytes
from archsearch.engine_facts import engine_facts
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.hardware.device import Device
from archsearch.latency.model import LatencyModel
from archsearch.latency.roofline import RooflineLatency
from archsearch.pipeline.schedule import BATCH_SIZES, acceptance_of
from archsearch.pipeline.session import SearchSession
from archsearch.runs.curves import CURVES_FILE, Bar, Curve, Curves, Point, Swept, write_curves
from archsearch.runs.fields import WRONG_SHAPE, read_or_tell
from archsearch.runs.run import Run
from archsearch.search.objective import Score, Scorer
from archsearch.search.why import rivals
from archsearch.speedup import tau_estimate
from archsearch.workload import Workload

DRAWN: Final = 6
"""Drafters along each quantity: the best of each family."""
SHAPES_DRAWN: Final = 3
"""Where there is one family: shapes of unlike depth or width."""
CONTEXTS: Final = (128, 512, 1024, 2048, 4096, 8192, 16384, 32768)
ALPHAS: Final = tuple(round(0.05 * step, 2) for step in range(1, 20))


def renew_curves(run: Run, session: SearchSession | None = None) -> None:
    """curves.json of a run, where its scores have changed since, or there is none.

    A run that cannot be reopened here (its profile or target lies elsewhere) gets a file that says
    why nothing is drawn. Raises nothing but OSError.
    """
    state = state_of(run)
    known = read_or_tell(run.path / CURVES_FILE, "curves", Curves.from_dict, [])
    if not run.ranks() or known is not None and known.state == state and known.sweeps.get("batch"):
        return
    try:
        curves = curves_of(session or SearchSession.reopen(run.path), state)
    except WRONG_SHAPE as error:
        words = (
            " ".join(str(error).split())
            if isinstance(error, ArchsearchError)
            else f"{type(error).__name__}: {error}"
        )
        curves = Curves(
            state,
            {},
            {},
            notes=(
                f"Speed-up along batch, context, alpha and gamma, and where the time goes: {words}",
            ),
        )
    write_curves(run, curves)


def state_of(run: Run) -> str:
    """A digest of all scores of a run: another one, and its curves are of before."""
    try:
        scores = [score.to_dict() for score in run.scores()]
    except WRONG_SHAPE:
        return "unreadable"
    return hashlib.sha256(json.dumps(scores, sort_keys=True).encode()).hexdigest()[:16]


def curves_of(session: SearchSession, state: str = "") -> Curves:
    """The curves of the best ranks of a run; the bars of its first."""
    run, scorer, device = session.run, session.scorer, session.source.device
    drawn = [(rank, _Candidate.of(session, rank)) for rank in _drawn(run)]
    notes: list[str] = []
    sweeps: dict[Swept, tuple[Curve, ...]] = {
        name: tuple(
            Curve(
                rank,
                item.score.label(),
                tuple(_told(name, item, sweep(scorer, item, device), notes)),
            )
            for rank, item in drawn
        )
        for name, sweep in _SWEEPS.items()
    }
    lead = drawn[0][1].score
    passes, layers, rounds = _bars(scorer, lead)
    if not layers:
        notes.append(
            f"Layers and terms of the draft: {lead.proposer.title} is priced as a whole, not layer"
            " by layer."
        )
    workload = scorer.workload
    at = {"batch_size": workload.batch_size, "context": workload.context_len, "gamma": lead.gamma}
    at["tensor_parallel"] = workload.tensor_parallel
    why = tuple(rival.to_dict() for rival in rivals(scorer, run.scores()))
    return Curves(state, at, sweeps, passes, layers, rounds, why, tuple(dict.fromkeys(notes)))


def _drawn(run: Run) -> list[int]:
    """The ranks whose curves are drawn: the best of each family; of one family alone shapes that
    differ in depth or width, as those of other head counts lie on top of each other."""
    families: dict[str, int] = {}
    shapes: dict[tuple[int, int], int] = {}
    for rank, score in zip(run.ranks(), run.scores(), strict=True):
        families.setdefault(score.family, rank)
        shapes.setdefault(
            (score.architecture.num_hidden_layers, score.architecture.hidden_size), rank
        )
    if len(families) > 1:
        return sorted(families.values())[:DRAWN]
    return sorted(shapes.values())[:SHAPES_DRAWN]


class _Candidate:
    """A ranked draft with its acceptance, which along batch and context stays what it is."""

    def __init__(
        self, score: Score, alpha: Estimate, taus: dict[int, Estimate], drift: Estimate
    ) -> None:
        self.score, self.alpha, self.taus, self.drift = score, alpha, taus, drift

    @classmethod
    def of(cls, session: SearchSession, rank: int) -> _Candidate:
        score = session.run.score(rank)
        alpha, taus, _ = acceptance_of(session.scorer, score, session.run.best_dir(rank))
        return cls(score, alpha, taus, session.scorer.believed(score.proposer).acceptance.drift)

    def point(self, scorer: Scorer, x: float, gammas: Sequence[int] | None = None) -> Point:
        """The score at `x`, which `scorer` stands for."""
        found = scorer.measured(self.score.proposer, self.alpha, self.taus, gammas=gammas)
        return Point(x, found.gamma, found.speedup)


def _told(
    name: str, item: _Candidate, points: Iterator[Point], notes: list[str]
) -> Iterator[Point]:
    """The points as far as the latency model answers; where it stops is said."""
    try:
        yield from points
    except ArchsearchError as error:
        notes.append(
            f"Speed-up along {name} of {item.score.label()}: {' '.join(str(error).split())}"
        )


def _along_batch(scorer: Scorer, item: _Candidate, device: Device) -> Iterator[Point]:
    largest = scorer.latency.largest_batch
    sizes = {size for size in BATCH_SIZES if largest is None or size <= 2 * largest} | {
        scorer.workload.batch_size
    }
    one_by_one = device.kind == "gpu" and not engine_facts(scorer.latency.engine).batches
    for batch in [1] if one_by_one else sorted(sizes):
        local = scorer.at_batch(batch)
        if not _fits(local, item, device):
            return
        yield item.point(local, batch)


def _along_context(scorer: Scorer, item: _Candidate, device: Device) -> Iterator[Point]:
    longest = scorer.target.max_position_embeddings
    for context in sorted(
        {size for size in CONTEXTS if size < longest} | {scorer.workload.context_len}
    ):
        local = scorer.at_context(context)
        if not _fits(local, item, device):
            return
        yield item.point(local, context)


def _along_alpha(scorer: Scorer, item: _Candidate, device: Device) -> Iterator[Point]:
    """At the best gamma of each alpha; alpha counts as known there, so the band is that of the
    times."""
    gammas = sorted(item.taus)
    for alpha in ALPHAS:
        given = Estimate(alpha, 0.0, "given")
        sure = replace(item.drift, std=0.0)
        known = _Candidate(
            item.score, given, {gamma: tau_estimate(given, gamma, sure) for gamma in gammas}, sure
        )
        yield known.point(scorer, alpha)


def _along_gamma(scorer: Scorer, item: _Candidate, device: Device) -> Iterator[Point]:
    for gamma in sorted(item.taus):
        if gamma in scorer.gammas:
            yield item.point(scorer, gamma, [gamma])


_SWEEPS: Final[dict[Swept, Callable[[Scorer, _Candidate, Device], Iterator[Point]]]] = {
    "batch": _along_batch,
    "context": _along_context,
    "alpha": _along_alpha,
    "gamma": _along_gamma,
}


def _fits(scorer: Scorer, item: _Candidate, device: Device) -> bool:
    draft = item.score.drafter or item.score.architecture
    return memory_bytes(scorer.target, draft, scorer.workload).total_bytes <= usable_bytes(device)


# -- where the time goes
# --------------------------------------------------------------------------------------------------


def _bars(scorer: Scorer, score: Score) -> tuple[tuple[Bar, ...], tuple[Bar, ...], tuple[Bar, ...]]:
    """(passes, one layer each, a round beside plain steps) of the draft and the target."""
    latency, target, workload, gamma = scorer.latency, scorer.target, scorer.workload, score.gamma
    decode, verify = scorer.decode_s, latency.verify_s(target, workload, gamma)
    draft = score.architecture if score.drafter is None else None
    passes = [
        _pass_bar(latency, "target, plain step", target, workload, 1, decode),
        _pass_bar(
            latency, f"target, verification of {gamma + 1}", target, workload, gamma + 1, verify
        ),
    ]
    layers: list[Bar] = []
    if draft is not None and isinstance(latency, LatencyModel | RooflineLatency):
        first, later = latency.draft_passes(draft, workload, gamma)
        shared = latency.facts.ranks_of_draft(workload)
        ranks = replace(workload, tensor_parallel=shared, draft_tensor_parallel=None)
        step = later if gamma > 1 else first
        passes.insert(
            0,
            _pass_bar(
                latency, "draft, one token", latency.facts.served_draft(draft), ranks, 1, step
            ),
        )
        if _prices_ops(latency):
            layers = [
                _layer_bar(latency, "draft", draft, ranks),
                _layer_bar(latency, "target", target, workload),
            ]
    time = latency.round(target, score.drafter or score.architecture, workload, gamma, verify)
    tau = score.tau.value
    plain = Estimate(tau * decode.value, tau * decode.std, decode.source)
    rounds = (
        Bar(f"{tau:.2f} tokens, target alone", {"plain steps of the target": plain.value}, plain),
        Bar(
            f"{tau:.2f} tokens, one round",
            {
                "draft": time.draft_s.value,
                "verification": time.verify_s.value,
                "what the engine adds": time.overhead_s.value,
            },
            time.round_s,
        ),
    )
    return tuple(passes), tuple(layers), rounds


def _prices_ops(latency: Any) -> bool:
    """Whether single ops have a price: not where only the engine's whole passes were measured."""
    return (
        not isinstance(latency, LatencyModel)
        or latency.composed_ is not None
        or hasattr(latency, "ops")
    )


def _pass_bar(
    latency: Any, name: str, arch: Architecture, workload: Workload, tokens: int, total: Estimate
) -> Bar:
    """A pass by term: its ops as the profile prices each alone; what the pass takes beyond them is
    its launches and the rest."""
    if not _prices_ops(latency):
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
    terms["head and choice of tokens"] = math.fsum(_op_s(latency, op) for op in head)
    return Bar(name, _scaled(terms, total.value), total)


def _layer_bar(latency: Any, name: str, arch: Architecture, workload: Workload) -> Bar:
    terms = _layer_terms(latency, arch, workload, 1, arch.windows()[0])
    return Bar(f"{name}, one layer", terms, Estimate(math.fsum(terms.values()), 0.0, "modelled"))


def _layer_terms(
    latency: Any, arch: Architecture, workload: Workload, tokens: int, window: int | None
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
        terms[term] = terms.get(term, 0.0) + _op_s(latency, op)
    return terms


def _op_s(latency: Any, op: Op) -> float:
    """Seconds of one op by whatever prices ops in this latency model, weights out of memory."""
    if isinstance(latency, RooflineLatency):
        return latency.op_s(op)
    if latency.composed_ is not None:
        return float(latency.composed_.op_s(op)[0])
    return float(latency.ops.op_s(op, True)[0])


def _scaled(terms: dict[str, float], total: float) -> dict[str, float]:
    """The terms so that they add up to the pass: with what it takes beyond its ops, or shrunk where
    ops overlap in it."""
    together = math.fsum(terms.values())
    if together > total:
        return {name: value * total / together for name, value in terms.items()}
    return {**terms, "launches and the rest": total - together}
