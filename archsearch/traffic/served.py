"""One drafter under one load: the best gamma there, beside the same server without a draft."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from archsearch.acceptance.estimator import AcceptanceContext
from archsearch.architecture.grid import ShapeGrid
from archsearch.drafters.drafter import Drafter
from archsearch.errors import InvalidShapeError
from archsearch.estimate import Numbers
from archsearch.records import encoded
from archsearch.search.objective import Scorer
from archsearch.traffic.mix import LoadPart, Mix
from archsearch.traffic.steady import (
    MOST_RUNNING,
    RoundTokens,
    Service,
    Steady,
    at_rate,
    chosen,
    crossing_rate,
    in_flight,
    together,
)
from archsearch.traffic.times import RoundTimes, ladder, prefill_s, service_of, times_over_batches
from archsearch.workload import Objective, Workload


@dataclass(frozen=True)
class ServedPart:
    """One part of a load, of one drafter or (arrays) of each of a grid. `gamma` 0: without a draft
    it is faster. `off`: with the draft loaded and idle. `times`: its rounds by
    batch size; `gamma_drafting`: the best gamma that drafts; `servers`: by gamma, 0: without a
    draft."""

    part: LoadPart
    gamma: int
    drafting: Steady
    plain: Steady
    off: Steady
    tau: float
    alpha: float
    context: int
    servers: Mapping[int, Service]
    times: RoundTimes
    gamma_drafting: int

    @property
    def services(self) -> tuple[Service, Service]:
        """Drafting at the best gamma that drafts, and without a draft."""
        return self.servers[self.gamma_drafting], self.servers[0]

    @property
    def best(self) -> Steady:
        """What a server with the draft loaded does at its best: drafting, or not."""
        return self.drafting.where(np.greater(self.gamma, 0), self.off)

    @property
    def speedup(self) -> float:
        """Seconds per output token without the draft over those with it."""
        return self.plain.tpot_s / self.best.tpot_s

    @cached_property
    def off_rate(self) -> float | None:
        """The `crossing_rate` of its gammas; None also where no rate was asked."""
        if self.part.requests_per_second is None:
            return None
        drafting = [server for gamma, server in self.servers.items() if gamma]
        return crossing_rate(self.servers[0], drafting)

    def to_dict(self) -> dict[str, object]:
        part, load = self.part, "name weight concurrency requests_per_second".split()
        found = {name: getattr(part, name) for name in load}
        found |= {"prompt_tokens": part.prompt.mean, "output_tokens": part.output.mean}
        own = "context gamma alpha tau speedup drafting plain off off_rate".split()
        return found | {name: encoded(getattr(self, name)) for name in own}


TokensOf = Callable[[int], RoundTokens | None]
"""Tokens of a round at a gamma, None where nothing is known of it."""


@dataclass(frozen=True)
class Load:
    """How a part of a load is priced. `held`: requests that memory holds with the draft and
    without; `sizes`: batch sizes at which rounds are priced."""

    held: tuple[int, int]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, part: LoadPart, held: Sequence[Numbers | None], largest_batch: int | None) -> Load:
        limits = [MOST_RUNNING if most is None else int(np.min(most)) for most in held]
        most = [each or MOST_RUNNING for each in (limits[1], largest_batch, part.concurrency)]
        largest = max(1, min(MOST_RUNNING, *most))
        rungs = ladder(largest)
        if not part.refill:  # fewer and fewer
            rungs = tuple(rung for rung in rungs if rung == largest or not rung & rung - 1)
        elif part.concurrency == largest <= min(limits):  # all are held
            rungs = (largest,)
        elif part.concurrency is not None:
            # memory may hold fewer than are in flight: from the last rung below that
            below = max((rung for rung in rungs if rung <= min(limits)), default=1)
            rungs = tuple(rung for rung in rungs if 1.2 * rung >= min(below, *rungs[-2:]))
        return cls((limits[0], limits[1]), rungs)

    def check(self, part: LoadPart) -> None:
        """Raise InvalidShapeError where memory holds not one request, or answers leave nothing to
        draft."""
        if max(part.output.values) < 2:
            raise InvalidShapeError(
                f"the load {part.name} writes 1 token to each prompt, which the prompt's own pass"
                " does: there is nothing to draft; give longer output tokens"
            )
        if min(self.held) < 1:
            raise InvalidShapeError(
                f"the load {part.name} fits no batch: memory holds not one request of"
                f" {part.context:,} tokens; raise --tensor-parallel or --memory-fraction"
            )


def serve_part(
    scorer: Scorer,
    drafter: Drafter,
    part: LoadPart,
    held: Sequence[Numbers | None] = (None, None),
    *,
    tokens_of: TokensOf | None = None,
) -> ServedPart:
    """The drafter under `part`; `held`: as of `Load`. `tokens_of`: what was measured, instead of
    what the scorer predicts.

    Raises InvalidShapeError where not one request fits.
    """
    load = Load.of(part, held, scorer.latency.largest_batch)
    load.check(part)
    workload = replace(scorer.workload, context_len=part.context)
    alpha, drift, share = _accepted(scorer, drafter, part)
    latency: Any = scorer.latency
    drafter = drafter.with_share(share)
    times = times_over_batches(latency, scorer.target, drafter, workload, scorer.gammas, load.sizes)
    # tokens of a prompt that are not in the cache already; requests that decode while it is read
    new = round(part.prompt.mean * (1.0 - part.prefix_cache_hit))
    busy = replace(workload, batch_size=max(1, min(load.sizes[-1], part.concurrency or 8)))
    both_s, alone_s = (
        prefill_s(latency, scorer.target, each, busy, new) for each in (drafter, None)
    )
    rounds = scorer.latency.rounds  # of an engine that expands batches: prompts alone in a step
    shares = rounds is None or not rounds.costs.expands

    def server(gamma: int | None, tokens: RoundTokens) -> Service:
        prompt_s, most = (alone_s, held[1]) if gamma is None else (both_s, held[0])
        more = {"output_cv2": part.output.cv2, "lengths": part.output.quantiles}
        return service_of(
            times, gamma, tokens, prompt_s, part.output.mean, most, shares_steps=shares, **more
        )

    plain, idle = server(None, RoundTokens()), server(0, RoundTokens())
    # chances of the longest round; those of a shorter one are its beginning
    most = RoundTokens.of(alpha, drift, max(times.gammas), share)
    servers, off = {}, steady(idle, part)
    # of a grid all of these become arrays, [shapes]: each draft has its own best gamma
    best, tau, gamma = None, 1.0, 0
    for each in times.gammas:
        tokens = RoundTokens(most.reach[:each]) if tokens_of is None else tokens_of(each)
        if tokens is None:
            continue
        servers[each] = server(each, tokens)
        point = steady(servers[each], part)
        better = np.bool_(True) if best is None else _better(point, best)
        best = point if best is None else point.where(better, best)
        gamma, tau = chosen(better, each, gamma), chosen(better, tokens.tau, tau)
    assert best is not None
    drafts = _better(best, off) | (len(scorer.gammas) == 1)  # one that was asked for is priced
    return ServedPart(
        part=part,
        gamma=chosen(drafts, gamma, 0),
        drafting=best,
        plain=steady(plain, part),
        off=off,
        tau=tau,
        alpha=alpha,
        context=part.context,
        servers={**servers, 0: plain},
        times=times,
        gamma_drafting=gamma,
    )


def _accepted(scorer: Scorer, drafter: Drafter, part: LoadPart) -> tuple[Any, float, float]:
    """alpha under a part (of each draft of a grid), its drift, and the share of rounds that
    draft."""
    if isinstance(drafter.architecture, ShapeGrid):
        estimator: Any = scorer.acceptance
        alpha, drift = estimator.alphas(drafter.architecture, context_of(scorer, part))
        return np.broadcast_to(alpha, drafter.architecture.shape), drift, 1.0
    known = scorer.predicted_acceptance(drafter, context_of(scorer, part))
    return known.acceptance.alpha.value, known.acceptance.drift.value, known.drafting


def _better(first: Steady, second: Steady) -> NDArray[np.bool_]:
    """Whether `first` is the better server: one that keeps up before one that does not, then by
    seconds per token (where it stays once it has fallen behind, if it may), or tokens per second of
    two that do not."""
    cost, other = (
        np.where(
            each.full,
            -each.tokens_per_s,
            each.tpot_s * np.maximum(each.fallen / np.maximum(each.running, 1e-9), 1.0),
        )
        for each in (first, second)
    )
    return np.asarray(np.where(np.equal(first.full, second.full), cost < other, second.full))


def steady(server: Service, part: LoadPart) -> Steady:
    """The server under the part's load."""
    if part.concurrency is not None:
        return (in_flight if part.refill else together)(server, part.concurrency)
    assert part.requests_per_second is not None
    return at_rate(server, part.requests_per_second)


def context_of(scorer: Scorer, part: LoadPart) -> AcceptanceContext:
    """Where acceptance is asked for: the part's context, temperature and kind of text."""
    known = {"temperature": part.temperature, "domain": part.domain}
    said: dict[str, Any] = {name: value for name, value in known.items() if value is not None}
    return replace(scorer.context, context_len=part.context, **said)


def drafting_somewhere(parts: Sequence[ServedPart]) -> list[ServedPart]:
    """What a drafter (each of a grid) is judged by: where it is off in every part drafting, or one
    that never drafts would lose nothing."""
    off = np.all([np.equal(each.gamma, 0) for each in parts], axis=0)
    return [replace(each, gamma=chosen(off, each.gamma_drafting, each.gamma)) for each in parts]


def objective_of(
    parts: Sequence[ServedPart], objective: Objective, ranks: int, *, plain: bool = False
) -> float:
    """The objective over a mix: larger is better but for `tpot` (seconds). Weights are shares of
    the tokens served."""
    points = [(each.part.weight, each.plain if plain else each.best) for each in parts]
    tpot = sum(weight * point.tpot_s for weight, point in points)
    if objective == "tpot":
        return tpot
    if objective == "speedup":
        return sum(each.part.weight * each.plain.tpot_s for each in parts) / tpot
    # tokens are shared out by weight, so seconds per token add up and rates do not
    throughput = 1.0 / sum(weight / point.tokens_per_s for weight, point in points)
    return throughput / ranks if objective == "tokens_per_device" else throughput


@dataclass(frozen=True, slots=True)
class Over:
    """A limit of the mix, of one of its `part`s or ("") of the drafter, and what the drafter (each
    of a grid) needs. `said` and `most`: both in words."""

    part: str
    name: str
    value: float
    limit: float
    said: str
    most: str

    @property
    def over(self) -> float:
        """How far it is beyond the limit, relative to it: kept where this is at most 0."""
        return np.minimum(self.value / self.limit - 1.0, MOST_OVER)

    @property
    def words(self) -> str:
        """Of one drafter."""
        said = "no end of waiting" if math.isinf(self.value) else self.said.format(self.value)
        words = f"{said}{self.most.format(self.limit)}"
        return f"{self.part}: {words}" if self.part else words


MOST_OVER: Final = 1e9  # where waiting has no end


def overs(
    parts: Sequence[ServedPart], mix: Mix, drafter: Drafter, workload: Workload, tokens: float
) -> list[Over]:
    """Each limit of the mix with how far the drafter is over it."""
    limits, most = mix.limits, ", at most {:g}"
    rows: list[tuple[str, str, float, float | None, str, str]] = []
    for each in parts:
        point, part = each.best, each.part.name
        mean = "{:.0f} ms to the first token"
        late = "99 % within {:.0f} ms to the first token"
        rows += [
            (part, "tpot", 1e3 * point.tpot_s, limits.tpot_ms, "{:.1f} ms a token", most),
            (part, "ttft", 1e3 * point.ttft_s, limits.ttft_ms, mean, f" (mean){most}"),
        ]
        if point.ttft_p99_s is not None:
            value = 1e3 * point.ttft_p99_s
            rows.append((part, "ttft 99 %", value, limits.ttft_p99_ms, late, f"{most} ms"))
        running: Any = np.maximum(1, np.rint(point.running))
        used = drafter.bytes(workload, running, each.context) / 2**30
        rows.append((part, "memory", used, limits.memory_gib, "the draft takes {:.1f} GiB", most))
    count = drafter.parameters()
    allowed = None if limits.parameters is None else limits.parameters / 1e6
    rows.append(
        ("", "parameters", count / 1e6, allowed, "{:,.0f}M parameters", ", at most {:,.0f}M")
    )
    said = "training takes {:,.3g} exaFLOP"
    cost = 6.0 * count * tokens / 1e18 if drafter.trains else 0.0  # FLOPs a parameter and token
    rows.append(("", "training", cost, limits.training_exaflop, said, most))
    return [
        Over(part, f"{part} {name}".strip(), value, limit, said, words)
        for part, name, value, limit, said, words in rows
        if limit is not None
    ]
