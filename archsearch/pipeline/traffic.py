"""`archsearch traffic`: drafts under a load: a mix of work, a rate of requests, or a trace of
them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from archsearch.errors import ArchsearchError
from archsearch.pipeline.estimate import EstimateRequest, Priced, price_drafts
from archsearch.pipeline.rounds_explained import served_by
from archsearch.pipeline.serving import of_mix
from archsearch.report.phrases import AskedPart
from archsearch.report.terminal.traffic import Part, Simulation, Traffic, UnderLoad
from archsearch.search.objective import gain_of
from archsearch.traffic.mix import LoadPart, Mix, read_mix
from archsearch.traffic.mix_scorer import MixScorer
from archsearch.traffic.served import ServedPart, objective_of
from archsearch.traffic.simulation import poisson, simulate
from archsearch.traffic.traces import Lengths, Request, Trace, read_trace
from archsearch.workload import LoadRequest, Objective

SIMULATED: Final = 800
"""Requests of a simulation where arrivals are made up, and the most that are taken of a trace."""
MOST_OF_TRACE: Final = 5000


@dataclass(frozen=True)
class TrafficRequest:
    """What `archsearch traffic` was asked: the drafts as in `estimate`, and one of a workload file
    (`load.workload`), a trace, or rates with lengths. `load`: also the objective, and limits
    besides the file's; `simulated`: requests of the simulation beside the closed form; 0: none."""

    estimate: EstimateRequest
    trace: Path | None = None
    rates: tuple[float, ...] = ()
    prompt_tokens: int = 512
    output_tokens: int = 256
    load: LoadRequest = LoadRequest()
    simulated: int = SIMULATED
    mix: Mix | None = None  # instead of a file


def drafts_under_load(request: TrafficRequest) -> Traffic:
    """Each draft under the load, best by the objective first, those that break a limit last.

    Raises ArchsearchError for a load that is none, that fits no batch, or that the engine does not
    serve.
    """
    mix, trace = _mix(request)
    mix, asked = of_mix(mix, request.load, request.estimate.asked)
    priced, answer = price_drafts(replace(request.estimate, asked=asked, mix=mix))
    found = [_served(item, trace, request.simulated) for item in priced]
    better = 1.0 if mix.objective == "tpot" else -1.0
    found.sort(key=lambda entry: (bool(entry.broken_limits), better * entry.objective))
    return Traffic(
        **vars(answer),
        objective=mix.objective,
        alternatives=len(request.rates) > 1 or None,
        load=tuple(AskedPart.of(part) for part in mix.parts),
        trace_note=trace.note if trace is not None else "",
        drafts=tuple(found),
    )


def only_one(given: Mapping[str, object]) -> None:
    """Raise ArchsearchError unless one of these options, each with what it takes, has a value."""
    named = [flag.split()[0] for flag, value in given.items() if value not in (None, ())]
    if len(named) != 1:
        *others, last = given
        raise ArchsearchError(
            f"give one of {', '.join(others)} and {last}, got {' and '.join(named) or 'none'}"
        )


def _mix(request: TrafficRequest) -> tuple[Mix, Trace | None]:
    if request.mix is not None:
        return request.mix, None
    file, trace = request.load.workload, None
    only_one(
        {
            "--workload FILE": file,
            "--trace FILE": request.trace,
            "--requests-per-second R": request.rates,
        }
    )
    if file is not None:
        mix = read_mix(file)
    elif request.trace is not None:
        trace = read_trace(request.trace)
        lengths, rate = (trace.prompt, trace.output), trace.requests_per_s
        mix = Mix((LoadPart(request.trace.name, 1.0, *lengths, requests_per_second=rate),))
    else:
        prompt = Lengths.read(request.prompt_tokens, "prompt")
        output = Lengths.read(request.output_tokens, "answer")
        share = 1.0 / len(request.rates)
        mix = Mix(
            tuple(
                LoadPart(f"{rate:g} requests/s", share, prompt, output, requests_per_second=rate)
                for rate in request.rates
            )
        )
    return mix, trace


def _served(item: Priced, trace: Trace | None, simulated: int) -> UnderLoad:
    scorer, drafter, mix = item.scorer, item.score.proposer, item.score.mix
    assert isinstance(scorer, MixScorer) and mix is not None
    parts, rows = scorer.served(drafter), []
    for served in parts:
        comes = served.part.requests_per_second is not None and simulated
        seen = _simulated(served, trace, simulated) if comes else None
        rows.append(Part(served, *scorer.held(drafter, served.part), seen))
    # a full server is judged by the tokens that it gives: a token's time is of as many as run
    judged: Objective = "throughput" if any(row.full for row in rows) else "tpot"
    worth = (objective_of(parts, judged, 1, plain=alone) for alone in (False, True))
    # what the server does at its best: a score is of one that drafts somewhere
    own: tuple[Objective, ...] = (scorer.mix.objective, "speedup")
    ranks = scorer.workload.tensor_parallel
    value, gain = (objective_of(parts, objective, ranks) for objective in own)
    return UnderLoad(
        draft=item.entry.draft,
        by=served_by(item.source),
        notes=item.entry.notes,
        objective=value,
        plain_objective=mix.plain,
        speedup=gain,
        pays=gain_of(judged, *worth) > 1.0 and not mix.broken_limits,
        broken_limits=mix.broken_limits,
        parts=tuple(rows),
    )


def _simulated(served: ServedPart, trace: Trace | None, count: int) -> Simulation:
    """The server with the draft (at the best gamma that drafts) and without, event by event."""
    part = served.part
    if trace is not None:
        requests: list[Request] = list(trace.requests[:MOST_OF_TRACE])
    else:
        assert part.requests_per_second is not None
        requests = poisson(part.requests_per_second, count, part.prompt, part.output)
    runs = []
    for server, point in zip(served.services, (served.drafting, served.plain), strict=True):
        run = simulate(server, requests, max(part.prompt.mean, 1.0))
        # which may seem to keep up where so few requests come
        runs.append(replace(run, full=run.full or point.full))
    return Simulation(runs[0], runs[1], len(requests))
