"""The SqueezeBits study of speculation under load, predicted from shapes, the shipped A100 profile
and its acceptance alone.

    python benchmarks/squeezebits.py
    python benchmarks/squeezebits.py --json --output benchmarks/results/2026-11-22-serving

"[vLLM vs TensorRT-LLM] #11: speculative decoding" (SqueezeBits, 2024-12-09): Llama-3.1-70B in
bfloat16 on four A100, drafts on one of them, prompts of 1K and 2K tokens, 128 output tokens, 1 to
64 requests in flight; vLLM 0.6.3 and TensorRT-LLM 0.14. Throughput there has the prompts in it, so
rounds are put between prefills (`traffic.steady`): a draft reads every prompt too. Its acceptance
is accepted tokens over drafted ones; alpha is what gives it at gamma 4. What engines add comes from
other sources (engine_rounds.yaml); nothing is fitted to this study.

TensorRT-LLM 0.14 drafts for one request at a time: the others wait.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from archsearch.architecture import catalogue
from archsearch.capacity import memory_plan
from archsearch.engine_rounds import MACHINE_STD, RoundCosts
from archsearch.estimate import Estimate
from archsearch.hardware.device import load_device
from archsearch.pipeline.latency import choose_latency
from archsearch.speedup import alpha_from_tau
from archsearch.traffic.steady import RoundTokens, Service, in_flight
from archsearch.traffic.times import (
    ladder,
    prefill_s,
    service_of,
    times_over_batches,
)
from archsearch.workload import WorkloadRequest

TARGET: Final = "llama-3.1-70b"
SMALL, LARGE = "qwama-0.5b", "llama-3.1-8b"
FLIGHTS: Final = (1, 2, 4, 8, 16, 32, 64, 128)
GAMMAS: Final = (1, 2, 3, 4, 5, 6, 7, 8)
OUTPUT: Final = 128
ENGINES: Final = {"vllm 0.6.3": ("vllm", "0.6.3"), "tensorrt-llm 0.14": ("tensorrt-llm", "0.20.0")}
"""As they are known here: the first engine of vLLM; of TensorRT-LLM the oldest two-model loop."""


@dataclass(frozen=True)
class Published:
    """What the study says. `ratio`: accepted over drafted tokens at gamma 4."""

    prompt: int
    draft: str
    ratio: float
    stops: float | None


PUBLISHED: Final = (
    Published(1024, SMALL, 0.540, 32.0),
    Published(2048, SMALL, 0.509, 16.0),
    Published(1024, LARGE, 0.765, None),
)


@dataclass(frozen=True)
class Case:
    """One draft at one prompt length in one engine: the server without it, with it, and with every
    token accepted."""

    published: Published
    alpha: float
    plain: Service
    by_gamma: dict[int, Service]
    ideal: Service
    terms: dict[str, Any]

    def gain(self, flight: int, gamma: int = 4) -> float:
        """Throughput with the draft over that without."""
        return (
            in_flight(self.by_gamma[gamma], flight).tokens_per_s
            / in_flight(self.plain, flight).tokens_per_s
        )

    def ideal_gain(self, flight: int) -> float:
        return (
            in_flight(self.ideal, flight).tokens_per_s / in_flight(self.plain, flight).tokens_per_s
        )

    def best_gamma(self, flight: int) -> int:
        return max(self.by_gamma, key=lambda gamma: self.gain(flight, gamma))


def paced(costs: RoundCosts, pace: float) -> RoundCosts:
    """The costs on a host that takes `pace` times as long."""
    names = ("round_s", "token_s", "row_s", "row_token_s", "sequence_s")
    scaled = {
        name: Estimate(pace * getattr(costs, name).value, getattr(costs, name).std, "published")
        for name in names
    }
    return replace(costs, **scaled)


def case(engine: str, published: Published, pace: float = 1.0) -> Case:
    """Everything of one case, from shapes and the profile; `pace`: of the host against those that
    the costs were taken from."""
    name, version = ENGINES[engine]
    target, draft = (
        catalogue.load(TARGET).architecture,
        catalogue.load(published.draft).architecture,
    )
    context = published.prompt + OUTPUT // 2
    asked = WorkloadRequest(
        gpu="a100",
        context_len=context,
        tensor_parallel=4,
        draft_tensor_parallel=1,
        engine=name,
        engine_version=version,
        dtype="bfloat16",
    )
    source, workload = choose_latency(asked, target)
    assert source.rounds is not None
    latency, device = copy.copy(source.latency), load_device("a100")
    latency.rounds = replace(source.rounds, costs=paced(source.rounds.costs, pace))
    times = times_over_batches(latency, target, draft, workload, GAMMAS, ladder(256))
    held, held_alone = (
        memory_plan(target, each, workload, device).requests for each in (draft, None)
    )
    if name == "tensorrt-llm":
        held = 1
    tau = 1.0 + 4 * published.ratio
    alpha = alpha_from_tau(tau, 4)
    alone, both = (
        prefill_s(latency, target, each, workload, published.prompt) for each in (None, draft)
    )

    def drafting(gamma: int, chance: float) -> Service:
        return service_of(times, gamma, RoundTokens.of(chance, 0.0, gamma), both, OUTPUT, held)

    def parts_s(flight: int) -> tuple[float, ...]:
        """A plain step, the draft's passes, the target's and the round, at gamma 4."""
        work = replace(workload, batch_size=flight)
        time = latency.round(target, draft, work, 4)
        each = (latency.decode_s(target, work), time.draft_s, time.verify_s, time.round_s)
        return tuple(found.value for found in each)

    return Case(
        published,
        alpha,
        service_of(times, None, RoundTokens(), alone, OUTPUT, held_alone),
        {gamma: drafting(gamma, alpha) for gamma in GAMMAS},
        drafting(4, 1.0),
        {
            "prefill_s": alone,
            "draft_prefill_s": both - alone,
            "held": held,
            "held_alone": held_alone,
            "rounds": [(n, *parts_s(n)) for n in FLIGHTS if n in times.at],
        },
    )


def stops(found: Case, ideal: bool = False) -> float:
    """The requests in flight at which throughput with the draft falls to that without; inf where it
    does not below 512."""
    before = None
    for flight in (round(2 ** (i / 8)) for i in range(73)):
        gain = found.ideal_gain(flight) if ideal else found.gain(flight)
        if gain <= 1.0:
            if before is None:
                return 1.0
            share = math.log(before[1]) / (math.log(before[1]) - math.log(gain))
            return float(
                math.exp(math.log(before[0]) + share * (math.log(flight) - math.log(before[0])))
            )
        before = (flight, gain)
    return math.inf


def run() -> dict[str, Any]:
    result: dict[str, Any] = {}
    for engine in ENGINES:
        found = [case(engine, published) for published in PUBLISHED]
        paces = {
            pace: [stops(case(engine, published, pace)) for published in PUBLISHED]
            for pace in (1 - MACHINE_STD, 1 + MACHINE_STD)
        }
        result[engine] = {
            f"{each.published.draft}, {each.published.prompt} tokens": {
                "alpha": each.alpha,
                "published_stops": each.published.stops,
                "stops": stops(each),
                "stops_by_host": {f"{pace:.1f}": times[number] for pace, times in paces.items()},
                "ideal_stops": stops(each, ideal=True),
                "best_gamma": {flight: each.best_gamma(flight) for flight in FLIGHTS},
                "gain": {flight: each.gain(flight) for flight in FLIGHTS},
                "ideal_gain": {flight: each.ideal_gain(flight) for flight in FLIGHTS},
                "tokens_per_s": {
                    flight: in_flight(each.by_gamma[4], flight).tokens_per_s for flight in FLIGHTS
                },
                "plain_tokens_per_s": {
                    flight: in_flight(each.plain, flight).tokens_per_s for flight in FLIGHTS
                },
                "tpot_ms": {
                    flight: 1e3 * in_flight(each.by_gamma[4], flight).tpot_s for flight in FLIGHTS
                },
                "plain_tpot_ms": {
                    flight: 1e3 * in_flight(each.plain, flight).tpot_s for flight in FLIGHTS
                },
                **each.terms,
            }
            for number, each in enumerate(found)
        }
    return result


def _row(name: str, values: dict[int, float], form: str) -> str:
    return f"  {name:34s}" + "".join(f"{format(values[flight], form):>8s}" for flight in FLIGHTS)


def text(result: dict[str, Any]) -> str:
    lines = []
    for engine, cases in result.items():
        lines += [
            engine,
            f"  {'requests in flight':34s}" + "".join(f"{flight:8d}" for flight in FLIGHTS),
        ]
        for name, found in cases.items():
            lines += [
                (
                    f"  {name}: alpha {found['alpha']:.3f}; prefill {found['prefill_s']:.3f} s +"
                    f" {found['draft_prefill_s']:.3f} s of the draft; memory holds {found['held']}"
                    f" requests, {found['held_alone']} without the draft"
                ),
                _row("throughput gain at gamma 4", found["gain"], ".2f"),
                _row("every token accepted", found["ideal_gain"], ".2f"),
                _row("best gamma", found["best_gamma"], "d"),
                _row("tokens/s", found["tokens_per_s"], ".0f"),
                _row("tokens/s without", found["plain_tokens_per_s"], ".0f"),
            ]
        lines.append("")
    lines += [*verdict(result)]
    return "\n".join(lines)


def verdict(result: dict[str, Any]) -> list[str]:
    """Each finding beside the prediction."""
    vllm, other = (result[engine] for engine in ENGINES)
    small, longer, large = vllm.values()
    lines = [f"{'finding (vLLM)':52s} {'published':>12s} {'predicted':>12s}"]
    for found, prompt in ((small, "1K"), (longer, "2K")):
        factor = found["stops"] / found["published_stops"]
        ok = "within" if 1 / 1.5 <= factor <= 1.5 else "MISSES"
        name = f"stops paying at, {prompt} prompts"
        by_host = ", ".join(
            f"{value:.0f} on a host {pace} times as slow"
            for pace, value in found["stops_by_host"].items()
        )
        lines.append(
            f"{name:52s} {found['published_stops']:12.0f} {found['stops']:12.0f}   {ok} a factor"
            f" 1.5; {by_host}"
        )
    best = sorted({small["best_gamma"][flight] for flight in (1, 2, 4, 8, 16)})
    lines.append(
        f"{'best gamma, 1 to 16 in flight':52s} {'3 to 5':>12s} {f'{best[0]} to {best[-1]}':>12s}"
    )
    order = all(small["gain"][flight] > large["gain"][flight] for flight in FLIGHTS[:7])
    lines.append(
        f"{'the 0.5B draft beats the 8B one, 1 to 64 in flight':52s} {'yes':>12s}"
        f" {'yes' if order else 'NO':>12s}"
    )
    falling = all(
        a > b
        for a, b in zip(
            list(small["ideal_gain"].values()), list(small["ideal_gain"].values())[1:], strict=False
        )
    )
    lines.append(
        f"{'ideal curve falls with the load':52s} {'yes':>12s} {'yes' if falling else 'NO':>12s}"
    )
    lines.append(f"{'ideal curve at 64 in flight':52s} {1.0:12.2f} {small['ideal_gain'][64]:12.2f}")
    one = next(iter(other.values()))
    lines.append(
        f"{'TensorRT-LLM: gains at 1 in flight, not at 4':52s} {'yes':>12s} "
        f"{'yes' if one['gain'][1] > 1.0 >= one['gain'][4] else 'NO':>12s}"
    )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--output", type=Path, help="folder for squeezebits.json and squeezebits.txt"
    )
    options = parser.parse_args()
    result = run()
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "squeezebits.json").write_text(
            json.dumps(result, indent=1), encoding="utf-8"
        )
        (options.output / "squeezebits.txt").write_text(text(result) + "\n", encoding="utf-8")
    print(json.dumps(result) if options.json else text(result))


if __name__ == "__main__":
    main()
