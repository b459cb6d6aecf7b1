"""One drafter under one load: the best gamma there, beside the same server without a draft."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from archsearch.acceptance.estimator import AcceptanceContext
from archsearch.acceptance.families import FamilyAcceptance, acceptance_of
from archsearch.acceptance.terms import usual_tokens
from archsearch.drafters.drafter import Drafter
from archsearch.errors import ArchsearchError
from archsearch.search.objective import Scorer
from archsearch.traffic.mix import LoadPart, Mix
from archsearch.traffic.services import (
    batch_ladder,
    drafting_service,
    plain_service,
    prefill_s,
    times_over_batches,
)
from archsearch.traffic.steady import (
    MOST_RUNNING,
    RoundTokens,
    Service,
    Steady,
    at_rate,
    crossing_rate,
    in_flight,
)
from archsearch.traffic.times import RoundTimes
from archsearch.workload import Objective, Workload

MOST_PRICED: Final = 512


@dataclass(frozen=True)
class ServedPart:
    """One part of a load. `gamma` 0: without a draft it is faster. `off`: with the draft loaded and
    idle. `off_rate`: requests a second above which a token takes no longer without drafting (only
    where a rate was asked; 0: never pays, None: always). `times`: its rounds by batch size;
    `gamma_drafting`: the best gamma that drafts."""

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
    times: RoundTimes
    gamma_drafting: int

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


TokensOf = Callable[[int], RoundTokens | None]
"""Tokens of a round at a gamma, None where nothing is known of it."""


@dataclass(frozen=True)
class Load:
    """How a part of a load is priced. `held`: requests that memory holds with the draft and
    without; `largest`: of the batch sizes that are priced; `exact`: all are held, so only the
    part's own number in flight is priced; `rate`: how many run follows from a rate, so all sizes
    are."""

    held: tuple[int, int]
    largest: int
    exact: bool
    rate: bool

    @classmethod
    def of(cls, part: LoadPart, held: Sequence[int | None], largest_batch: int | None) -> Load:
        limits = [MOST_RUNNING if most is None else most for most in held]
        largest = min(MOST_PRICED, max(limits[1], 1), largest_batch or MOST_PRICED)
        if part.concurrency is not None:
            largest = max(1, min(largest, part.concurrency))
        exact = part.concurrency == largest and min(limits) >= largest
        return cls((limits[0], limits[1]), largest, exact, part.concurrency is None)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Batch sizes at which rounds are priced: with so many in flight, from the last below what
        memory holds."""
        if self.exact:
            return (self.largest,)
        rungs = batch_ladder(self.largest)
        if self.rate:
            return rungs
        below = max((rung for rung in rungs if rung <= min(self.held)), default=1)
        return tuple(rung for rung in rungs if rung >= min(below, rungs[max(len(rungs) - 2, 0)]))

    def check(self, part: LoadPart) -> None:
        """Raise ArchsearchError where memory holds not one request, or answers leave nothing to
        draft."""
        if max(part.output.values) < 2:
            raise ArchsearchError(
                f"the load {part.name} writes 1 token to each prompt, which the prompt's own pass"
                " does: there is nothing to draft; give longer output tokens"
            )
        if min(self.held) < 1:
            raise ArchsearchError(
                f"the load {part.name} fits no batch: memory holds not one request of"
                f" {part.context:,} tokens; raise --tensor-parallel or --memory-fraction"
            )


def serve_part(
    scorer: Scorer,
    drafter: Drafter,
    part: LoadPart,
    held: Sequence[int | None] = (None, None),
    *,
    tokens_of: TokensOf | None = None,
    with_rates: bool = True,
) -> ServedPart:
    """The drafter under `part`; `held`: requests that memory holds with the draft and without.
    `tokens_of`: what was measured, instead of what the scorer believes; `with_rates`: look for the
    rate above which speculation should be off.

    Raises ArchsearchError where not one request fits.
    """
    load = Load.of(part, held, scorer.latency.largest_batch)
    load.check(part)
    workload = replace(scorer.workload, context_len=part.context)
    known = believed(scorer, drafter, part)
    share = known.share.value if known.share is not None else 1.0
    drafter, acceptance = drafter.with_share(share), known.acceptance
    times = times_over_batches(
        scorer.latency, scorer.target, drafter, workload, scorer.gammas, sizes=load.sizes
    )
    new, busy = new_tokens(part), busy_workload(workload, part, load)
    alone_s, both_s = (
        prefill_s(scorer.latency, scorer.target, each, busy, new) for each in (None, drafter)
    )
    written = part.output.mean
    shares = shares_steps(scorer.latency)

    def loaded(service: Service) -> Service:
        return replace(service, shares_steps=shares, output_cv2=part.output.cv2)

    plain = loaded(plain_service(times, alone_s, written, load.held[1]))
    servers = {}
    for gamma in times.gammas:
        tokens = RoundTokens.of(acceptance.alpha.value, acceptance.drift.value, gamma, share)
        counted = tokens if tokens_of is None else tokens_of(gamma)
        if counted is not None:
            servers[gamma] = loaded(
                drafting_service(times, gamma, counted, both_s, written, load.held[0])
            )
    idle = loaded(drafting_service(times, 0, RoundTokens(), both_s, written, load.held[0]))
    points = {gamma: steady(server, part) for gamma, server in servers.items()}
    best = min(points, key=lambda gamma: _cost(points[gamma]))
    off, asked = (
        steady(idle, part),
        len(scorer.gammas) == 1,
    )  # one gamma that was asked for is priced
    rate = None
    if with_rates and part.requests_per_second is not None:
        rate = crossing_rate(plain, list(servers.values()))
    return ServedPart(
        part=part,
        gamma=best if asked or _cost(points[best]) < _cost(off) else 0,
        drafting=points[best],
        plain=steady(plain, part),
        off=off,
        tau=servers[best].tokens.tau,
        alpha=acceptance.alpha.value,
        context=part.context,
        services=(servers[best], plain),
        off_rate=rate,
        times=times,
        gamma_drafting=best,
    )


def new_tokens(part: LoadPart) -> int:
    """Tokens of a prompt that are read: not in the cache already."""
    return round(part.prompt.mean * (1.0 - part.prefix_cache_hit))


def busy_workload(workload: Workload, part: LoadPart, load: Load) -> Workload:
    """The requests that decode while a prompt is read."""
    return replace(workload, batch_size=max(1, min(load.largest, part.concurrency or 8)))


def shares_steps(latency: Any) -> bool:
    """Whether prompts are read in the steps of those that decode."""
    return not (latency.rounds is not None and latency.rounds.costs.expands)


def _cost(steady: Steady) -> tuple[bool, float]:
    """What is to be small: a server that keeps up before one that does not, then seconds per
    token."""
    return steady.full, steady.tpot_s if not steady.full else -steady.tokens_per_s


def steady(server: Service, part: LoadPart) -> Steady:
    """The server under the part's load."""
    if part.concurrency is not None:
        return in_flight(server, part.concurrency)
    assert part.requests_per_second is not None
    return at_rate(server, part.requests_per_second)


def context_of(scorer: Scorer, part: LoadPart) -> AcceptanceContext:
    """Where acceptance is asked for: the part's context, temperature and kind of text."""
    context = replace(scorer.context, context_len=part.context)
    if part.temperature is not None:
        context = replace(context, temperature=part.temperature)
    return context if part.domain is None else replace(context, domain=part.domain)


def believed(scorer: Scorer, drafter: Drafter, part: LoadPart) -> FamilyAcceptance:
    """What is known of the drafter's acceptance under a part."""
    known = scorer.known_families.get(drafter.family)
    return (
        known
        if known is not None
        else acceptance_of(drafter, scorer.acceptance, context_of(scorer, part))
    )


def objective_of(
    parts: Sequence[ServedPart], objective: Objective, ranks: int, *, plain: bool = False
) -> float:
    """The objective over a mix: larger is better but for `tpot` (seconds). Weights are shares of
    the tokens served."""
    points = [(each.part.weight, each.plain if plain else each.best) for each in parts]
    tpot = math.fsum(weight * point.tpot_s for weight, point in points)
    if objective == "tpot":
        return tpot
    if objective == "speedup":
        return math.fsum(each.part.weight * each.plain.tpot_s for each in parts) / tpot
    throughput = 1.0 / math.fsum(weight / point.tokens_per_s for weight, point in points)
    return throughput / ranks if objective == "tokens_per_device" else throughput


@dataclass(frozen=True, slots=True)
class Over:
    """A limit and how far a drafter is over it, relative to it: kept where `over` is at most 0."""

    name: str
    over: float
    words: str


MOST_OVER: Final = 1e9  # where waiting has no end


def overs(
    parts: Sequence[ServedPart], mix: Mix, drafter: Drafter, workload: Workload, tokens: float
) -> list[Over]:
    """Each limit of the mix with how far the drafter is over it."""
    limits, found = mix.limits, []
    for each in parts:
        point, name = each.best, each.part.name
        if limits.tpot_ms is not None:
            words = f"{name}: {1e3 * point.tpot_s:.1f} ms a token, at most {limits.tpot_ms:g}"
            found.append(Over(f"{name} tpot", 1e3 * point.tpot_s / limits.tpot_ms - 1.0, words))
        if limits.ttft_ms is not None:
            first = (
                "no end of waiting"
                if math.isinf(point.ttft_s)
                else f"{1e3 * point.ttft_s:.0f} ms to the first token in the mean"
            )
            over = min(1e3 * point.ttft_s / limits.ttft_ms - 1.0, MOST_OVER)
            found.append(
                Over(f"{name} ttft", over, f"{name}: {first} (mean), at most {limits.ttft_ms:g}")
            )
        if limits.ttft_p99_ms is not None and point.ttft_p99_s is not None:
            first = (
                "no end of waiting"
                if point.full
                else f"99 % within {1e3 * point.ttft_p99_s:.0f} ms to the first token"
            )
            over = min(1e3 * point.ttft_p99_s / limits.ttft_p99_ms - 1.0, MOST_OVER)
            found.append(
                Over(
                    f"{name} ttft 99 %", over, f"{name}: {first}, at most {limits.ttft_p99_ms:g} ms"
                )
            )
        if limits.memory_gib is not None:
            used = (
                drafter.bytes(workload.dtype_bytes, max(1, round(point.running)), each.context)
                / 2**30
            )
            words = f"{name}: the draft takes {used:.1f} GiB, at most {limits.memory_gib:g}"
            found.append(Over(f"{name} memory", used / limits.memory_gib - 1.0, words))
    if limits.parameters is not None:
        words = (
            f"{drafter.parameters() / 1e6:,.0f}M parameters, at most"
            f" {limits.parameters / 1e6:,.0f}M"
        )
        found.append(Over("parameters", drafter.parameters() / limits.parameters - 1.0, words))
    if limits.training_exaflop is not None:
        cost = training_exaflop(drafter.parameters(), tokens) if drafter.trains else 0.0
        words = f"training takes {cost:,.3g} exaFLOP, at most {limits.training_exaflop:g}"
        found.append(Over("training", cost / limits.training_exaflop - 1.0, words))
    return found


def training_tokens(context: AcceptanceContext, parameters: Any) -> Any:
    """Tokens that drafters of `parameters` (a number or an array) are taken to be trained on: those
    that the training budget buys, without one what is usual for the target."""
    return (
        usual_tokens(context.target)
        if context.budget is None
        else context.budget.tokens(parameters)
    )


def training_exaflop(parameters: Any, tokens: Any) -> Any:
    """6 FLOPs a parameter and token."""
    return 6.0 * parameters * tokens / 1e18


def broken_limits(
    parts: Sequence[ServedPart], mix: Mix, drafter: Drafter, workload: Workload, tokens: float
) -> list[str]:
    """In words, each limit of the mix that the drafter breaks."""
    return [each.words for each in overs(parts, mix, drafter, workload, tokens) if each.over > 0]
