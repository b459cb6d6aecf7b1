"""One drafter under one load: the best gamma there, beside the same server without a draft."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from archsearch.acceptance.families import FamilyAcceptance, acceptance_of
from archsearch.drafters.drafter import Drafter
from archsearch.errors import ArchsearchError
from archsearch.search.objective import Scorer
from archsearch.traffic.mix import LoadPart, Mix, Objective
from archsearch.traffic.services import drafting_service, plain_service, prefill_s, times_over_batches
from archsearch.traffic.steady import MOST_RUNNING, RoundTokens, Service, Steady, at_rate, crossing_rate, in_flight
from archsearch.workload import Workload

MOST_PRICED = 512


@dataclass(frozen=True)
class ServedPart:
    """One part of a load. `gamma` 0: without a draft it is faster. `off`: with the draft loaded and idle. `off_rate`: requests a
    second above which a token takes no longer without drafting (only where a rate was asked; 0: never pays, None: always)."""

    part: LoadPart
    gamma: int
    drafting: Steady
    plain: Steady
    off: Steady
    tau: float
    alpha: float
    context: int
    services: tuple[Service, Service]  # drafting at the best gamma that drafts, plain
    off_rate: float | None

    @property
    def best(self) -> Steady:
        """What a server with the draft loaded does at its best: drafting, or not."""
        return self.drafting if self.gamma else self.off

    @property
    def speedup(self) -> float:
        """Seconds per output token without the draft over those with it."""
        return self.plain.tpot_s / self.best.tpot_s

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.part.name,
            "weight": self.part.weight,
            "concurrency": self.part.concurrency,
            "requests_per_second": self.part.requests_per_second,
            "prompt_tokens": self.part.prompt.mean,
            "output_tokens": self.part.output.mean,
            "context": self.context,
            "gamma": self.gamma,
            "alpha": self.alpha,
            "tau": self.tau,
            "speedup": self.speedup,
            "drafting": asdict(self.drafting),
            "plain": asdict(self.plain),
            "off": asdict(self.off),
            "off_rate": self.off_rate,
        }


def serve_part(scorer: Scorer, drafter: Drafter, part: LoadPart, held: Sequence[int | None] = (None, None)) -> ServedPart:
    """The drafter under `part`; `held`: requests that memory holds with the draft and without.

    Raises ArchsearchError where not one request fits.
    """
    limits = [MOST_RUNNING if most is None else most for most in held]
    if limits[1] < 1 or limits[0] < 1:
        raise ArchsearchError(
            f"the load {part.name} fits no batch: memory holds not one request of {part.context:,} tokens; raise "
            "--tensor-parallel or --memory-fraction"
        )
    workload = replace(scorer.workload, context_len=part.context)
    known = _believed(scorer, drafter, part)
    share = known.share.value if known.share is not None else 1.0
    drafter = drafter.with_share(share)
    largest = min(MOST_PRICED, max(limits), scorer.latency.largest_batch or MOST_PRICED)
    if part.concurrency is not None:
        largest = max(1, min(largest, part.concurrency))
    times = times_over_batches(scorer.latency, scorer.target, drafter, workload, scorer.gammas, largest)
    new = round(part.prompt.mean * (1.0 - part.prefix_cache_hit))
    busy = replace(workload, batch_size=max(1, min(largest, part.concurrency or 8)))
    alone_s, both_s = (prefill_s(scorer.latency, scorer.target, each, busy, new) for each in (None, drafter))
    shares = not (scorer.latency.rounds is not None and scorer.latency.rounds.costs.expands)
    written = part.output.mean
    plain = replace(plain_service(times, alone_s, written, limits[1]), shares_steps=shares)
    acceptance = known.acceptance
    servers = {}
    for gamma in times.gammas:
        tokens = RoundTokens.of(acceptance.alpha.value, acceptance.drift.value, gamma, share)
        servers[gamma] = replace(drafting_service(times, gamma, tokens, both_s, written, limits[0]), shares_steps=shares)
    idle = replace(drafting_service(times, 0, RoundTokens(), both_s, written, limits[0]), shares_steps=shares)
    points = {gamma: _steady(server, part) for gamma, server in servers.items()}
    best = min(points, key=lambda gamma: _cost(points[gamma]))
    off = _steady(idle, part)
    rate = crossing_rate(plain, list(servers.values())) if part.requests_per_second is not None else None
    return ServedPart(
        part=part, gamma=best if _cost(points[best]) < _cost(off) else 0, drafting=points[best], plain=_steady(plain, part),
        off=off, tau=servers[best].tokens.tau, alpha=acceptance.alpha.value, context=part.context,
        services=(servers[best], plain), off_rate=rate,
    )  # fmt: skip


def _cost(steady: Steady) -> tuple[bool, float]:
    """What is to be small: a server that keeps up before one that does not, then seconds per token."""
    return steady.full, steady.tpot_s if not steady.full else -steady.tokens_per_s


def _steady(server: Service, part: LoadPart) -> Steady:
    if part.concurrency is not None:
        return in_flight(server, part.concurrency)
    assert part.requests_per_second is not None
    return at_rate(server, part.requests_per_second)


def _believed(scorer: Scorer, drafter: Drafter, part: LoadPart) -> FamilyAcceptance:
    known = scorer.known_families.get(drafter.family)
    if known is not None:
        return known
    context = replace(scorer.context, context_len=part.context)
    if part.temperature is not None:
        context = replace(context, temperature=part.temperature)
    if part.domain is not None:
        context = replace(context, domain=part.domain)
    return acceptance_of(drafter, scorer.acceptance, context)


def objective_of(parts: Sequence[ServedPart], objective: Objective, ranks: int, *, plain: bool = False) -> float:
    """The objective over a mix: larger is better but for `tpot` (seconds). Weights are shares of the tokens served."""
    points = [(each.part.weight, each.plain if plain else each.best) for each in parts]
    tpot = math.fsum(weight * point.tpot_s for weight, point in points)
    if objective == "tpot":
        return tpot
    if objective == "speedup":
        return math.fsum(each.part.weight * each.plain.tpot_s for each in parts) / tpot
    throughput = 1.0 / math.fsum(weight / point.tokens_per_s for weight, point in points)
    return throughput / ranks if objective == "tokens_per_device" else throughput


def broken_limits(
    parts: Sequence[ServedPart], mix: Mix, drafter: Drafter, workload: Workload, training_tokens: float
) -> list[str]:
    """In words, each limit of the mix that the drafter breaks."""
    limits, found = mix.limits, []
    for each in parts:
        point = each.best
        if limits.tpot_ms is not None and 1e3 * point.tpot_s > limits.tpot_ms:
            found.append(f"{each.part.name}: {1e3 * point.tpot_s:.1f} ms a token, at most {limits.tpot_ms:g}")
        if limits.ttft_ms is not None and 1e3 * point.ttft_s > limits.ttft_ms:
            first = "no end of waiting" if math.isinf(point.ttft_s) else f"{1e3 * point.ttft_s:.0f} ms to the first token"
            found.append(f"{each.part.name}: {first}, at most {limits.ttft_ms:g} ms")
        if limits.memory_gib is not None:
            used = drafter.bytes(workload.dtype_bytes, max(1, round(point.running)), each.context) / 2**30
            if used > limits.memory_gib:
                found.append(f"{each.part.name}: the draft takes {used:.1f} GiB, at most {limits.memory_gib:g}")
    if limits.parameters is not None and drafter.parameters() > limits.parameters:
        found.append(f"{drafter.parameters() / 1e6:,.0f}M parameters, at most {limits.parameters / 1e6:,.0f}M")
    cost = 6.0 * drafter.parameters() * training_tokens / 1e18 if drafter.trains else 0.0
    if limits.training_exaflop is not None and cost > limits.training_exaflop:
        found.append(f"training takes {cost:,.0f} exaFLOP, at most {limits.training_exaflop:g}")
    return found
