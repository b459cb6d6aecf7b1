"""Requests at random (Poisson) in vLLM on this CPU, with a draft and without, beside what
`archsearch traffic` foretells.

    archsearch engine install vllm
    archsearch profile --gpu cpu --target smollm2-135m --engine vllm
    python benchmarks/poisson.py --output benchmarks/results/DATE-poisson

A draft with random weights, accepted by chance (vLLM's synthetic acceptance, .7 of each token given
those before), gamma 3. Rates: shares of what the server without the draft is foretold to serve at
most. Arrivals, prompts and answers are alike for both. Predicted: the closed form at each rate, and
the event-by-event simulation of the very arrivals, by the profile's passes. A machine that others
use changes: before and after each load plain steps of the target alone, in another process, say how
slow it is beside the profile's reference (`slow`), and `then` is what is predicted with all times
longer by that; no round of the load went into it. `own`: the simulation with the rounds and prompts
that the run itself took, by batch size, which tells a wrong time of a round from an error of the
load's theory. Wanted: time per token and throughput within 10 % at each rate.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from archsearch.acceptance.estimator import GivenAcceptance
from archsearch.architecture.architecture import Architecture
from archsearch.drafters.models import Independent
from archsearch.engines.engine import EngineSettings
from archsearch.engines.environments.environment import find_python
from archsearch.engines.measure.rows import PlainSteps
from archsearch.engines.registry import make_engine
from archsearch.engines.vllm.engine import WORKER, VllmEngine
from archsearch.latency.model import LatencyModel
from archsearch.models.load import weights_source
from archsearch.models.targets import resolve_target
from archsearch.pipeline.in_engine import random_draft
from archsearch.pipeline.latency import choose_latency
from archsearch.search.objective import Scorer
from archsearch.traffic.mix import LoadPart
from archsearch.traffic.served import ServedPart, serve_part
from archsearch.traffic.simulation import poisson, simulate
from archsearch.traffic.steady import Service
from archsearch.traffic.traces import Lengths, Request
from archsearch.workload import WorkloadRequest

RATE: Final = 0.7  # of each draft token, given those before
SHARES: Final = (0.3, 0.5, 0.7)  # of what the server without a draft is foretold to serve
DRAFT: Final = Architecture(384, 1024, 2, 6, 2, 64, 49152, tie_word_embeddings=True)


@dataclass(frozen=True)
class Row:
    """One server at one rate: `closed` and `simulated` are predicted; seconds."""

    server: str
    requests_per_s: float
    requests: int
    tpot_s: float
    tpot_closed_s: float
    tpot_simulated_s: float
    tokens_per_s: float
    tokens_per_s_closed: float
    tokens_per_s_simulated: float
    ttft_s: float
    ttft_closed_s: float
    running: float
    running_closed: float
    tpot_own_s: float
    tokens_per_s_own: float
    passes: float  # decode steps as the profile has them over those of the run, mean over the run's
    slowdown: float = 1.0  # plain steps before and after the load over the profile's
    tpot_closed_then_s: float = math.nan  # predictions at that speed
    tpot_simulated_then_s: float = math.nan
    tokens_per_s_then: float = math.nan  # simulated

    def errors(self) -> dict[str, float]:
        """Predicted over measured, less 1."""
        return {
            "tpot_closed": self.tpot_closed_s / self.tpot_s - 1.0,
            "tpot_simulated": self.tpot_simulated_s / self.tpot_s - 1.0,
            "throughput_closed": self.tokens_per_s_closed / self.tokens_per_s - 1.0,
            "throughput_simulated": self.tokens_per_s_simulated / self.tokens_per_s - 1.0,
            "tpot_own": self.tpot_own_s / self.tpot_s - 1.0,
            "throughput_own": self.tokens_per_s_own / self.tokens_per_s - 1.0,
            "ttft_closed": self.ttft_closed_s / self.ttft_s - 1.0,
            "tpot_closed_then": self.tpot_closed_then_s / self.tpot_s - 1.0,
            "tpot_simulated_then": self.tpot_simulated_then_s / self.tpot_s - 1.0,
            "throughput_then": self.tokens_per_s_then / self.tokens_per_s - 1.0,
        }


class Setting:
    """Target, draft and profile, and what is foretold of them."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.ref = resolve_target(asked.target)
        self.prompt, self.output = (
            Lengths.of([asked.prompt_tokens]),
            Lengths.of([asked.output_tokens]),
        )
        self.gamma, self.flight = asked.gamma, asked.in_flight
        part = LoadPart("load", 1.0, self.prompt, self.output, requests_per_second=1.0)
        request = WorkloadRequest("cpu", asked.profile, context_len=part.context, engine="vllm")
        self.source, workload = choose_latency(request, self.ref.architecture)
        self.scorer = Scorer(
            self.ref.architecture,
            workload,
            self.source.latency,
            GivenAcceptance(RATE),
            gammas=[self.gamma],
        )

    def served(self, rate: float) -> ServedPart:
        """Both servers at a rate."""
        part = LoadPart("load", 1.0, self.prompt, self.output, requests_per_second=rate)
        return serve_part(self.scorer, Independent(DRAFT), part, (self.flight, self.flight))

    def start(self, draft: Path | None) -> dict[str, Any]:
        """What the worker is started with."""
        length = round(self.prompt.mean + self.output.mean) + 8
        told = {
            "target": str(weights_source(self.ref)),
            "dtype": self.source.dtype,
            "mode": "eager",
            "tensor_parallel": 1,
            "device": "cpu",
            "gamma": self.gamma if draft else 0,
            "max_len": length,
            "concurrency": self.flight,
            "draft": None if draft is None else str(draft),
            "family": "independent",
            "lookup": None,
            "dummy_weights": False,
            "synthetic": [],
            "schedule": [],
        }
        return told | (
            {"synthetic": [RATE ** (place + 1) for place in range(self.gamma)]} if draft else {}
        )


def measure(setting: Setting, draft: Path | None, loads: list[list[Request]]) -> dict[str, Any]:
    """All loads in one server, one after the other."""
    ask = {
        "worker": str(WORKER.parent),
        "start": setting.start(draft),
        "seed": 0,
        "loads": [[asdict(request) for request in load] for load in loads],
    }
    threads = setting.source.threads or os.cpu_count() or 1
    environment = {**os.environ, **VllmEngine.environment, "OMP_NUM_THREADS": str(threads)}
    environment.setdefault(
        "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"
    )  # as archsearch starts its engines
    environment.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory() as folder:
        asked, told = Path(folder) / "ask.json", Path(folder) / "answers.json"
        asked.write_text(json.dumps(ask), encoding="utf-8")
        script = Path(__file__).with_name("poisson_worker.py")
        subprocess.run(
            [str(find_python("vllm")), str(script), str(asked), str(told)],
            env=environment,
            check=True,
        )
        found: dict[str, Any] = json.loads(told.read_text(encoding="utf-8"))
    return found


def plain_steps(setting: Setting) -> PlainSteps:
    """What says how slow the machine is beside the profile."""
    settings = EngineSettings(
        dtype=setting.source.dtype, max_len=128, threads=setting.source.threads
    )
    latency = setting.source.latency
    assert isinstance(latency, LatencyModel)
    known = latency.profile.probe_reference_s.get(f"vllm {setting.source.dtype}")
    if known is None:
        print("the profile has no reference of plain steps: `slow` is 1 at the start of this run")
    vocabulary = setting.ref.architecture.vocab_size
    return PlainSteps(
        lambda: make_engine("vllm", settings),
        weights_source(setting.ref),
        vocabulary,
        reference_s=known,
    )


def measure_probed(
    setting: Setting, draft: Path | None, loads: list[list[Request]], probe: PlainSteps
) -> dict[str, Any]:
    """Each load in a server of its own, with the machine's slowdown around it."""
    found: dict[str, Any] = {"loads": []}
    for load in loads:
        before = statistics.fmean(probe.now() for _ in range(5))
        told = measure(setting, draft, [load])
        after = statistics.fmean(probe.now() for _ in range(5))
        found |= {"version": told["version"]}
        found["loads"].append({**told["loads"][0], "slowdowns": [before, after]})
    return found


def row(
    name: str,
    rate: float,
    load: dict[str, Any],
    service: Service,
    closed: Any,
    then: Any,
    requests: list[Request],
) -> Row:
    """What was measured of one load beside what was foretold. The first tenth of the requests is
    not counted, as in the simulation; throughput is over the time from its end to the last
    token."""
    answers = load["requests"][len(load["requests"]) // 10 :]
    seen = simulate(service, requests)
    own, passes = own_service(load, service)
    run = simulate(own, requests)
    slow = slowdown(load)
    slowed = replace(service, round_s=service.round_s * slow, prefill_s=service.prefill_s * slow)
    at_speed = simulate(slowed, requests)
    begin, end = answers[0]["arrival_s"], max(each["done_s"] for each in answers)
    span = max(each["done_s"] for each in load["requests"])
    return Row(
        server=name,
        requests_per_s=rate,
        requests=len(requests),
        tpot_s=statistics.fmean(
            (each["done_s"] - each["first_s"]) / (each["tokens"] - 1) for each in answers
        ),
        tpot_closed_s=closed.tpot_s,
        tpot_simulated_s=seen.tpot_s,
        tokens_per_s=sum(each["tokens"] for each in answers) / (end - begin),
        tokens_per_s_closed=closed.tokens_per_s,
        tokens_per_s_simulated=seen.tokens_per_s,
        ttft_s=statistics.fmean(each["first_s"] - each["arrival_s"] for each in answers),
        ttft_closed_s=closed.ttft_s,
        running=sum(each["done_s"] - each["first_s"] for each in load["requests"]) / span,
        running_closed=closed.running,
        tpot_own_s=run.tpot_s,
        tokens_per_s_own=run.tokens_per_s,
        passes=passes,
        slowdown=slow,
        tpot_closed_then_s=then.tpot_s * slow,
        tpot_simulated_then_s=at_speed.tpot_s,
        tokens_per_s_then=at_speed.tokens_per_s,
    )


def slowdown(load: dict[str, Any]) -> float:
    """How slow the machine was around a load; 1 where nobody asked."""
    return statistics.fmean(load.get("slowdowns") or [1.0])


def own_service(load: dict[str, Any], service: Service) -> tuple[Service, float]:
    """The server with the median rounds that the run took by batch size, and what a prompt added to
    a step; and how long the profile's rounds are beside the run's."""
    plain: dict[int, list[float]] = {}
    for start, end, batch, _, new, _ in load["steps"]:
        if not new:
            plain.setdefault(int(batch), []).append(end - start)
    usual = {
        batch: statistics.median(times) for batch, times in sorted(plain.items()) if len(times) >= 3
    }
    sizes = np.array(list(usual), dtype=float)
    rounds = np.maximum.accumulate(
        list(usual.values())
    )  # a larger batch takes no less: what differs is the machine's
    added = [
        (end - start - float(np.interp(batch - new, sizes, rounds)) * (batch > new)) / new
        for start, end, batch, _, new, _ in load["steps"]
        if new
    ]
    own = replace(service, at=sizes, round_s=rounds, prefill_s=max(statistics.median(added), 0.0))
    ratios = [service.round_at(batch) / seconds for batch, seconds in usual.items()]
    return own, float(np.average(ratios, weights=[len(plain[batch]) for batch in usual]))


def even(requests: list[Request], rate: float) -> list[Request]:
    """The arrivals stretched so that they come at the asked rate on the mean: few of them miss it
    by chance."""
    scale = (len(requests) - 1) / rate / requests[-1].arrival_s
    return [replace(request, arrival_s=request.arrival_s * scale) for request in requests]


def text(rows: list[Row]) -> str:
    lines = [
        f"{'server':10} {'requests/s':>10} {'running':>8} {'predicted':>9} {'ms a token':>11}"
        f" {'closed':>16} {'simulated':>16} {'tokens/s':>9} {'closed':>16} {'simulated':>16}"
        f" {'first ms':>9} {'closed':>7} {'own tpot':>9} {'tokens/s':>9} {'passes':>7} {'slow':>5}"
        f" {'then: closed':>12} {'simulated':>9} {'tokens/s':>9}"
    ]
    for each in rows:
        off = each.errors()
        lines.append(
            f"{each.server:10} {each.requests_per_s:10.2f} {each.running:8.2f}"
            f" {each.running_closed:9.2f} {1e3 * each.tpot_s:11.2f} {1e3 * each.tpot_closed_s:7.2f}"
            f" ({off['tpot_closed']:+6.1%}) {1e3 * each.tpot_simulated_s:7.2f}"
            f" ({off['tpot_simulated']:+6.1%}) {each.tokens_per_s:9.1f}"
            f" {each.tokens_per_s_closed:7.1f} ({off['throughput_closed']:+6.1%})"
            f" {each.tokens_per_s_simulated:7.1f} ({off['throughput_simulated']:+6.1%})"
            f" {1e3 * each.ttft_s:9.0f} {1e3 * each.ttft_closed_s:7.0f} {off['tpot_own']:+9.1%}"
            f" {off['throughput_own']:+9.1%} {each.passes:7.2f} {each.slowdown:5.2f}"
            f" {off['tpot_closed_then']:+12.1%} {off['tpot_simulated_then']:+9.1%}"
            f" {off['throughput_then']:+9.1%}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument(
        "--profile",
        type=Path,
        help="folder of a profile with vLLM's passes (default: this machine's)",
    )
    parser.add_argument("--prompt-tokens", type=int, default=96)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument(
        "--in-flight", type=int, default=16, help="most requests that vLLM runs at once"
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="of arrivals, for each rate and server"
    )
    parser.add_argument(
        "--rates", type=float, nargs="*", help="requests a second (default: shares of the most)"
    )
    parser.add_argument(
        "--work", type=Path, default=Path("runs/poisson"), help="where the draft is kept"
    )
    parser.add_argument("--raw", type=Path, help="raw.json of a run: foretell it anew, run nothing")
    parser.add_argument("--dry", action="store_true", help="print what is foretold, run nothing")
    parser.add_argument("--output", type=Path, help="folder for rows.json, raw.json and rows.txt")
    asked = parser.parse_args()
    setting = Setting(asked)
    most = setting.served(1.0).services[1].most_requests_per_s
    rates = asked.rates or [round(share * most, 2) for share in SHARES]
    print(f"{setting.source.words}\nwithout a draft at most {most:.2f} requests/s", flush=True)
    loads = [
        even(
            poisson(rate, max(10, round(rate * asked.seconds)), setting.prompt, setting.output, 1),
            rate,
        )
        for rate in rates
    ]
    if asked.dry:
        for rate in rates:
            told = setting.served(rate)
            print(
                rate,
                "plain",
                told.plain,
                "\n     drafting",
                told.drafting,
                "prefill",
                told.services[1].prefill_s,
            )
        return
    raw: dict[str, Any] = {"rates": rates}
    if asked.raw:
        raw = json.loads(asked.raw.read_text(encoding="utf-8"))
        rates = raw["rates"]
        fields = ("arrival_s", "prompt_tokens", "output_tokens")
        loads = [
            [Request(*(each[name] for name in fields)) for each in load["requests"]]
            for load in raw["without"]["loads"]
        ]
    else:
        asked.work.mkdir(parents=True, exist_ok=True)
        draft = random_draft(DRAFT, setting.source.dtype, asked.work)
        probe = plain_steps(setting)
        try:
            for name, folder in (("without", None), ("with draft", draft)):
                raw[name] = measure_probed(setting, folder, loads, probe)
                if asked.output:
                    asked.output.mkdir(parents=True, exist_ok=True)
                    (asked.output / "raw.json").write_text(json.dumps(raw) + "\n", encoding="utf-8")
        finally:
            probe.stop()
    rows = []
    for name in ("without", "with draft"):
        found = raw[name]
        for rate, load, requests in zip(rates, found["loads"], loads, strict=True):
            told = setting.served(rate)
            service, closed = (
                (told.services[1], told.plain)
                if name == "without"
                else (told.services[0], told.drafting)
            )
            # Times longer by a factor at one rate are the same load as the rate higher by it, seen
            # slower.
            slower = setting.served(rate * slowdown(load))
            then = slower.plain if name == "without" else slower.drafting
            rows.append(row(name, rate, load, service, closed, then, requests))
    print(text(rows))
    if asked.output:
        asked.output.mkdir(parents=True, exist_ok=True)
        data = [asdict(each) | {"errors": each.errors()} for each in rows]
        (asked.output / "rows.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        (asked.output / "rows.txt").write_text(text(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
