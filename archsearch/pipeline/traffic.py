"""`archsearch traffic`: drafts under a load: a mix of work, a rate of requests, or a trace of
them. `archsearch bench-serve`: a running server under one, with a draft and without, beside what is
predicted of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np

from archsearch.engines.openai.bench import Ask, Measured, drive, named_model, summary
from archsearch.engines.openai.client import Answer, OpenAIServer
from archsearch.errors import ArchsearchError, RunFailed
from archsearch.pipeline.estimate import EstimateRequest, Priced, price_drafts
from archsearch.pipeline.serving import of_mix
from archsearch.progress import Progress
from archsearch.records import as_data, save
from archsearch.report.phrases import AskedPart
from archsearch.report.terminal.traffic import (
    Bench,
    Part,
    Predicted,
    Simulation,
    Traffic,
    UnderLoad,
)
from archsearch.runs.tables import pays_beside
from archsearch.search.objective import gain_of
from archsearch.text.prompts import read_prompts
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
    (`load.workload`), a trace, or rates with lengths. `load`: also the objective and further
    limits; `simulated`: requests of the simulation beside the closed form."""

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
    full = any(row.full for row in rows)
    judged: Objective = "throughput" if full else "tpot"
    worth = (objective_of(parts, judged, 1, plain=alone) for alone in (False, True))
    judged_gain = gain_of(judged, *worth)
    # what the server does at its best: a score is of one that drafts somewhere
    own: tuple[Objective, ...] = (scorer.mix.objective, "speedup")
    ranks = scorer.workload.tensor_parallel
    value, gain = (objective_of(parts, objective, ranks) for objective in own)
    better = item.entry.remedied
    return UnderLoad(
        draft=item.entry.draft,
        by=item.source.by,
        notes=(*item.entry.notes, *filter(None, [item.entry.no_room])),
        objective=value,
        plain_objective=mix.plain,
        speedup=judged_gain if full else gain,
        pays=pays_beside(judged_gain, better) and not mix.broken_limits,
        broken_limits=mix.broken_limits,
        parts=tuple(rows),
        remedied=better,
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


WORDS: Final = (
    "time people way water number day word part place year work name sound line home great small"
    " large world house school city river stone light paper letter morning question answer reason"
    " point story table window market garden winter summer"
).split()


@dataclass(frozen=True)
class BenchRequest:
    """What `archsearch bench-serve` was asked. `server_url`: with the draft; `baseline_url`: the
    same target without; one of a rate, a number in flight and a trace. `estimate`: the pair to
    predict, None: none. `output`: where results are kept."""

    server_url: str
    baseline_url: str | None = None
    estimate: EstimateRequest | None = None
    rate: float | None = None
    concurrency: int | None = None
    trace: Path | None = None
    requests: int = 100
    prompt_tokens: int = 512
    output_tokens: int = 128
    prompts: Path | None = None
    temperature: float = 0.0
    timeout_s: float = 600.0
    output: Path = Path("bench-serve.json")
    seed: int = 0


def bench_serve(request: BenchRequest, progress: Progress) -> Bench:
    """Measure the server, its baseline where one is named, and predict both. Raises ArchsearchError
    for a load that is none; RunFailed where a server stops answering: what was measured until then
    is in `request.output`."""
    asks, load = load_of(request)
    if request.output.parent != Path() and not request.output.parent.is_dir():
        raise ArchsearchError(
            f"--output {request.output}: the folder {request.output.parent} does not exist"
        )
    if request.estimate is not None:  # what cannot be is said before a server is driven for minutes
        _predicted(request, request.estimate, load)
    urls = {"without": request.baseline_url, "with_draft": request.server_url}
    servers = {name: OpenAIServer(url, request.timeout_s) for name, url in urls.items() if url}
    for server in servers.values():
        named_model(server)
    text = "made up" if request.prompts is None else str(request.prompts)
    seen = _Seen(request, asks, Bench(_load_words(request, asks), text))
    for name, server in servers.items():
        seen.drive(name, server, progress)
    figures = seen.figures()
    seen.keep(figures)
    if request.estimate is not None:
        found = seen.measured["with_draft"]
        prompt = round(found.prompt_tokens) or request.prompt_tokens
        written = max(1, round(found.output_tokens))
        load = replace(load, prompt=Lengths.of([prompt]), output=Lengths.of([written]))
        predicted = _predicted(request, request.estimate, load)
        errors = _errors(predicted, seen.measured)
        figures = replace(figures, predicted=predicted, relative_error=errors)
        seen.keep(figures)
    return replace(figures, output=request.output)


@dataclass
class _Seen:
    """What was measured so far: the answers of each server, and what they came to. `about`: the
    load."""

    request: BenchRequest
    asks: list[Ask]
    about: Bench
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    measured: dict[str, Measured] = field(default_factory=dict)

    def figures(self) -> Bench:
        found = replace(self.about, **self.measured)  # type: ignore[arg-type]
        if found.without is None or found.with_draft is None:
            return found
        gain = found.without.tpot_s / max(found.with_draft.tpot_s, 1e-12)
        return replace(found, speedup=gain)

    def keep(self, figures: Bench, **why: object) -> None:
        """`why`: why the figures are no more."""
        answers = {f"{name}_requests": found for name, found in self.answers.items()}
        save(self.request.output, as_data(figures) | why | answers)

    def drive(self, name: str, server: OpenAIServer, progress: Progress) -> None:
        """What is measured is kept every 20 answers, so that a killed run loses few, and where this
        ends early, whatever ends it."""
        request, asks, answers = self.request, self.asks, list[Answer]()
        self.answers[name] = answers

        def keep(**why: object) -> None:
            if why or len(answers) % 20 == 0:
                self.keep(self.figures(), **(why or {"unfinished": True}))

        try:
            drive(
                server,
                asks,
                answers,
                in_flight=request.concurrency,
                temperature=request.temperature,
                kept=keep,
                progress=progress,
            )
            self.measured[name] = summary(answers)
        except BaseException as error:
            words = str(error) or f"stopped by hand after {len(answers)} of {len(asks)} requests"
            keep(stopped=words)
            words = f"{words}; what was measured is kept in {request.output}"
            if isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt(f"{words}; the same command begins anew") from error
            if not isinstance(error, RunFailed):
                raise
            raise RunFailed(words) from error


def load_of(request: BenchRequest) -> tuple[list[Ask], LoadPart]:
    """The requests in order, and that load at their mean lengths. Raises ArchsearchError unless one
    is named."""
    only_one(
        {
            "--requests-per-second R": request.rate,
            "--concurrency N": request.concurrency,
            "--trace FILE": request.trace,
        }
    )
    read = request.prompts and read_prompts(request.prompts)
    texts = [prompt.text for prompt in read or ()]
    rng = np.random.default_rng(request.seed)

    def prompt(number: int, tokens: int) -> str:
        if texts:
            return texts[number % len(texts)]
        return f"{number}. {' '.join(map(str, rng.choice(WORDS, size=max(1, tokens - 3))))}"

    tokens = request.prompt_tokens, request.output_tokens
    count, rate = request.requests, request.rate
    lengths = Lengths.of(tokens[:1]), Lengths.of(tokens[1:])
    if request.trace is not None:
        trace = read_trace(request.trace)
        found, rate = list(trace.requests[:count]), trace.requests_per_s
        read, written = (
            round(sum(getattr(each, name) for each in found) / len(found))
            for name in ("prompt_tokens", "output_tokens")
        )
        lengths = Lengths.of([read]), Lengths.of([written])
    elif rate is not None:
        if not 0 < rate < math.inf:
            raise ArchsearchError(f"--requests-per-second must be positive, got {rate:g}")
        found = poisson(rate, count, *lengths, seed=request.seed)
    else:
        found = [Request(0.0, *tokens)] * count
    asks = [
        Ask(
            None if rate is None else each.arrival_s,
            prompt(i, each.prompt_tokens),
            each.output_tokens,
        )
        for i, each in enumerate(found)
    ]
    return asks, LoadPart("load", 1.0, *lengths, request.concurrency, rate)


def _load_words(request: BenchRequest, asks: list[Ask]) -> str:
    if request.concurrency is not None:
        return f"{len(asks)} requests, {request.concurrency} in flight"
    if request.trace is not None:
        return f"{len(asks)} requests of {request.trace}"
    return f"{len(asks)} requests, {request.rate:g} a second at random"


def _predicted(request: BenchRequest, estimate: EstimateRequest, part: LoadPart) -> Predicted:
    asked = replace(estimate, asked=replace(estimate.asked, temperature=request.temperature))
    (entry,) = drafts_under_load(TrafficRequest(asked, mix=Mix((part,)), simulated=0)).drafts
    (found,) = entry.parts
    served = found.served
    return Predicted(served.gamma, served.tau, served.speedup, entry.by.served, *found.runs)


def _errors(predicted: Predicted, measured: dict[str, Measured]) -> dict[str, dict[str, float]]:
    return {
        name: {
            what: getattr(getattr(predicted, name), what) / getattr(seen, what) - 1.0
            for what in ("tpot_s", "ttft_s", "tokens_per_s", "running")
            if getattr(seen, what) > 0
        }
        for name, seen in measured.items()
    }
