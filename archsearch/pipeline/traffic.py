"""`archsearch traffic`: drafts under a load: a mix of work, a rate of requests, or a trace of
them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from archsearch.engine_facts import engine_facts
from archsearch.errors import ArchsearchError
from archsearch.pipeline.estimate import EstimateRequest, Priced, price_drafts
from archsearch.pipeline.mixes import check_flight, request_of, with_limits
from archsearch.pipeline.rounds_explained import engine_data
from archsearch.traffic.held import held_by
from archsearch.traffic.lengths import Lengths
from archsearch.traffic.mix import LoadPart, Mix, read_mix
from archsearch.traffic.served import (
    ServedPart,
    broken_limits,
    objective_of,
    serve_part,
    training_tokens,
)
from archsearch.traffic.simulation import Simulated, poisson, simulate
from archsearch.traffic.steady import Service
from archsearch.traffic.traces import Request, Trace, read_trace
from archsearch.workload import MEMORY_FRACTION, OBJECTIVES, LoadRequest, Objective

SIMULATED: Final = 800
"""Requests of a simulation where arrivals are made up, and the most that are taken of a trace."""
MOST_OF_TRACE: Final = 5000


@dataclass(frozen=True)
class TrafficRequest:
    """What `archsearch traffic` was asked: the drafts as in `estimate`, and one of a workload file,
    a trace, or rates with lengths. `simulated`: requests of the simulation beside the closed form;
    0: none."""

    estimate: EstimateRequest
    workload: Path | None = None
    trace: Path | None = None
    rates: tuple[float, ...] = ()
    prompt_tokens: int = 512
    output_tokens: int = 256
    objective: Objective | None = None
    load: LoadRequest = LoadRequest()  # limits besides those of the workload
    simulated: int = SIMULATED
    mix: Mix | None = None  # instead of a file


def drafts_under_load(request: TrafficRequest) -> dict[str, Any]:
    """Each draft under the load, best by the objective first, those that break a limit last.

    Raises ArchsearchError for a load that is none, that fits no batch, or that the engine does not
    serve.
    """
    mix, trace = _mix(request)
    asked = request.estimate.asked
    if request.workload is None or asked.memory_fraction != MEMORY_FRACTION:
        mix = replace(mix, memory_fraction=asked.memory_fraction)
    asked = replace(request_of(mix, asked), batch_size=1, context_len=mix.longest)
    priced, about = price_drafts(replace(request.estimate, asked=asked))
    for item in priced:
        check_flight(mix, engine_facts(item.source.engine), item.source.device)
    found = [_served(item, mix, trace, request.simulated) for item in priced]
    better = 1.0 if mix.objective == "tpot" else -1.0
    found.sort(key=lambda entry: (bool(entry["broken_limits"]), better * entry["objective"]))
    return {
        **about,
        "objective": mix.objective,
        "load": [
            {
                "name": part.name,
                "weight": part.weight,
                "concurrency": part.concurrency,
                "context": part.context,
                "requests_per_second": part.requests_per_second,
                "prompt_tokens": part.prompt.mean,
                "output_tokens": part.output.mean,
                "prefix_cache_hit": part.prefix_cache_hit,
            }
            for part in mix.parts
        ],
        "trace_note": trace.note if trace is not None else "",
        "drafts": found,
    }


def _mix(request: TrafficRequest) -> tuple[Mix, Trace | None]:
    if request.mix is not None:
        return request.mix, None
    given = [
        name
        for name, value in (("--workload", request.workload), ("--trace", request.trace))
        if value is not None
    ]
    given += ["--requests-per-second"] if request.rates else []
    if len(given) != 1:
        raise ArchsearchError(
            "give one of --workload FILE, --trace FILE and --requests-per-second R, got"
            f" {' and '.join(given) or 'none'}"
        )
    trace = None
    if request.workload is not None:
        mix = read_mix(request.workload)
    elif request.trace is not None:
        trace = read_trace(request.trace)
        mix = Mix(
            (
                LoadPart(
                    request.trace.name,
                    1.0,
                    trace.prompt,
                    trace.output,
                    requests_per_second=trace.requests_per_s,
                ),
            )
        )
    else:
        prompt, output = (
            Lengths.read(request.prompt_tokens, "prompt"),
            Lengths.read(request.output_tokens, "answer"),
        )
        share = 1.0 / len(request.rates)
        mix = Mix(
            tuple(
                LoadPart(f"{rate:g} requests/s", share, prompt, output, requests_per_second=rate)
                for rate in request.rates
            )
        )
    if request.objective is not None:
        if request.objective not in OBJECTIVES:
            raise ArchsearchError(
                f"--objective {request.objective}: choose one of {', '.join(OBJECTIVES)}"
            )
        mix = replace(mix, objective=request.objective)
    return with_limits(mix, request.load), trace


def _served(item: Priced, mix: Mix, trace: Trace | None, simulated: int) -> dict[str, Any]:
    scorer, drafter, facts = item.scorer, item.score.proposer, engine_facts(item.source.engine)
    parts, told = [], []
    for part in mix.parts:
        workload = replace(scorer.workload, context_len=part.context)
        held = [
            held_by(facts, scorer.target, item.source.device, workload, each)
            for each in (drafter, None)
        ]
        served = serve_part(scorer, drafter, part, held)
        parts.append(served)
        seen = (
            _simulated(item, served, trace, simulated)
            if part.requests_per_second is not None and simulated
            else None
        )
        told.append({**served.to_dict(), "held": held[0], "held_alone": held[1], "simulated": seen})
    ranks = scorer.workload.tensor_parallel
    tokens = training_tokens(scorer.context, drafter.parameters())
    broken = broken_limits(parts, mix, drafter, scorer.workload, tokens)
    return {
        "draft": item.name,
        **engine_data(item.source),
        "notes": item.notes,
        "objective": objective_of(parts, mix.objective, ranks),
        "plain_objective": objective_of(parts, mix.objective, ranks, plain=True),
        "speedup": objective_of(parts, "speedup", ranks),
        "pays": objective_of(parts, "tpot", ranks) < objective_of(parts, "tpot", ranks, plain=True),
        "broken_limits": broken,
        "parts": told,
    }


def _simulated(item: Priced, served: ServedPart, trace: Trace | None, count: int) -> dict[str, Any]:
    """The server with the draft (at the best gamma that drafts) and without, event by event."""
    part = served.part
    if trace is not None:
        requests: list[Request] = list(trace.requests[:MOST_OF_TRACE])
    else:
        assert part.requests_per_second is not None
        requests = poisson(part.requests_per_second, count, part.prompt, part.output)
    drafting, plain = served.services
    return {
        "drafting": asdict(_run(drafting, requests, part)),
        "plain": asdict(_run(plain, requests, part)),
        "requests": len(requests),
    }


def _run(server: Service, requests: list[Request], part: LoadPart) -> Simulated:
    """Prompts add seconds in proportion to their tokens: what they cost beyond that (attention over
    themselves) is small beside the products with the weights."""
    mean = max(part.prompt.mean, 1.0)
    return simulate(server, requests, read_s=lambda tokens: server.prefill_s * tokens / mean)
