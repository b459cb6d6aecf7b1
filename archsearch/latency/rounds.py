"""One speculative round: drafting, verification and what the engine adds.

Engines that overlap launch the draft's passes while the GPU still verifies; they wait for the
slower of the two:

    gpu = verify + draft passes + round_s + gamma (token_s + layers gap_s)
          + batch (sequence_s + (gamma + 1) row_s)
    host = host_round_s + gamma (host_token_s + layers host_layer_s)
           + target layers host_target_layer_s
    round = the mean of the larger of gpu and host, both uncertain (Clark 1961)

Serial engines launch a pass, wait for it and launch the next: every pass takes the longer of GPU
and host. The numbers are `engine_rounds.RoundCosts`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Final, Literal

import numpy as np

from archsearch.engine_rounds import EngineRounds, RoundCosts
from archsearch.estimate import Array, Estimate, Many, Numbers, weakest_source
from archsearch.latency.constants import constants
from archsearch.speedup import rising_root

Bound = Literal["gpu", "host"]

PACE_CORRELATION: Final[float] = constants()["graph"]["pace_correlation"]


@dataclass(frozen=True, slots=True)
class RoundTime:
    """Seconds of one round. `round_s` = `draft_s` + `verify_s` + `overhead_s`; where the host
    decides, `overhead_s` is its lead.

    `host_s`: what the host needs to launch the round, None where the engine's host is not
    modelled. `bound`: which of the two decides. The std of `round_s` is that of the larger of two
    uncertain times.
    """

    draft_s: Estimate
    verify_s: Estimate
    overhead_s: Estimate
    round_s: Estimate
    host_s: Estimate | None = None
    bound: Bound | None = None


@dataclass(frozen=True, slots=True)
class Passes:
    """A round's passes on the GPU: the target's over gamma + 1 tokens, the draft's first and each
    later one, and their shapes."""

    verify_s: Estimate
    first_s: Estimate
    later_s: Estimate
    gamma: int
    batch: int
    draft_layers: float  # of drafts of many depths an array, and so their all-reduces
    target_layers: int
    draft_all_reduces: float = 0
    context: int = 0  # tokens in each sequence's cache
    # the draft's head is trimmed, and its logits are written into rows of the whole vocabulary
    scattered: bool = False
    catches_up: bool = False  # one more pass of the draft than tokens (`EngineFacts.catches_up`)
    verified: float | None = None  # tokens of a sequence in the target's pass; None: gamma + 1

    @property
    def rows(self) -> Any:
        """Tokens in the target's pass, all sequences."""
        return self.batch * (self.gamma + 1 if self.verified is None else self.verified)

    @property
    def draft_s(self) -> Estimate:
        """All draft passes."""
        return in_a_row(self.first_s, self.later_s, self.gamma - 1 + self.catches_up)


def in_a_row(first: Estimate, later: Estimate, more: float) -> Estimate:
    """A pass and `more` later ones; one model prices them, so their errors are shared."""
    std = first.std + more * later.std
    return Estimate(first.value + more * later.value, std, first.source)


def summed(draft_s: Estimate, verify_s: Estimate, overhead_s: Estimate) -> RoundTime:
    """A round whose parts follow one another, with independent errors."""
    parts = (draft_s, verify_s, overhead_s)
    # an overhead of 0 says nothing about where the result came from
    sources = [part.source for part in parts if part.value or part.std]
    total = Estimate(
        math.fsum(part.value for part in parts),
        math.hypot(*(part.std for part in parts)),
        weakest_source(*sources),
    )
    return RoundTime(draft_s, verify_s, overhead_s, total)


def round_time(costs: RoundCosts, passes: Passes) -> RoundTime:
    """The round of an engine of class `costs`."""
    costs = costs.launching(passes.rows)
    draft, verify = passes.draft_s, passes.verify_s
    extra, extra_std = extra_s(costs, passes)
    host = Estimate(*host_s(costs, passes), costs.rests_on)
    gpu_s = draft.value + verify.value + extra
    source = weakest_source(verify.source, draft.source)
    bound: Bound
    if costs.order == "overlapped":
        gpu = Estimate(gpu_s, math.hypot(draft.std, verify.std, extra_std), source)
        bound = "host" if host.value > gpu_s else "gpu"
        sure = Estimate(gpu_s, math.hypot(verify.std, extra_std), source)
        total = Estimate(larger(sure, host).value, larger(gpu, host).std, source)
        if host.value > gpu_s - 3.0 * host.std:  # a slow host may decide
            total = total.between(larger_interval(gpu, host))
        added_s = total.value - draft.value - verify.value
        added_std = total.std if bound == "host" else extra_std
    else:
        of_gpu = (passes.first_s.value, passes.later_s.value, verify.value)
        waits = float(waits_s(costs, passes, of_gpu))
        # A pass that was priced without graphs takes the host's time already.
        hosted = launch_s(costs, passes) > 0.99 * passes.later_s.value
        bound = "host" if waits > 0.5 * (gpu_s + waits) or hosted else "gpu"
        wait_std = host.std * waits / host.value if waits and host.value else 0.0
        added_s, added_std = extra + waits, math.hypot(extra_std, wait_std)
        std = math.hypot(draft.std, verify.std, extra_std, wait_std)
        total = Estimate(gpu_s + waits, std, source)
    return RoundTime(draft, verify, Estimate(added_s, added_std, "published"), total, host, bound)


def verified_rows(rounds: EngineRounds | None, batch: int, gamma: int) -> tuple[int, int]:
    """Sequences of a verification pass and tokens of each: an engine that expands the batch reads
    every token by itself."""
    if rounds is not None and rounds.costs.expands:
        return batch * (gamma + 1), 1
    return batch, gamma + 1


def plain_step(rounds: EngineRounds, step_s: Estimate, target_layers: int, batch: int) -> Estimate:
    """A plain step of the target whose kernels take `step_s`: with what the engine adds, no faster
    than the host launches it."""
    gpu = step_s.plus(rounds.plain.at(batch))
    costs = rounds.costs.launching(batch)
    launched = target_layers * costs.host_target_layer_s.value
    if launched <= 0.0:
        return gpu
    value = costs.host_round_s.value + launched
    own = (costs.machine_std * value, target_layers * costs.host_target_layer_s.std)
    return larger(gpu, Estimate(value, math.hypot(*own), "published"))


def host_s(costs: RoundCosts, passes: Passes) -> tuple[float, float]:
    """Seconds the host needs to launch and sample a round, and their std, of which the machine's
    speed is part; of drafts of many depths arrays."""
    counts = {"host_round": 1.0, "host_target_layer": float(passes.target_layers)}
    counts |= {name: passes.gamma * count for name, count in _launched(costs, passes).items()}
    value, own = _total([(n, getattr(costs, f"{name}_s")) for name, n in counts.items()])
    std = costs.std_of(**counts)
    return value, ((costs.machine_std * value) ** 2 + own**2) ** 0.5 if std is None else std


def launch_s(costs: RoundCosts, passes: Passes) -> float:
    """Seconds in which the host launches and samples one draft pass."""
    counts = _launched(costs, passes).items()
    return _total([(count, getattr(costs, f"{name}_s")) for name, count in counts])[0]


def _launched(costs: RoundCosts, passes: Passes) -> dict[str, float]:
    """How often each cost of the host comes in one draft pass."""
    return {
        "host_token": 1.0,
        "host_layer": passes.draft_layers,
        "host_all_reduce": 0 if costs.graph == "full" else passes.draft_all_reduces,
        "host_scatter": passes.scattered,
    }


def _total(parts: Iterable[tuple[float, Estimate]]) -> tuple[float, float]:
    """Seconds and std of so many of each cost, numbers or arrays; each errs by itself."""
    value, square = 0.0, 0.0
    for count, cost in parts:
        value, square = value + count * cost.value, square + (count * cost.std) ** 2
    return value, square**0.5


def waits_s(costs: RoundCosts, passes: Passes, of_gpu: tuple[Numbers, Numbers, float]) -> Numbers:
    """Seconds that the GPU waits for the host of a serial engine, beside its passes `of_gpu`: the
    draft's first, each later one and the target's. float or arrays of many drafts."""
    launch = launch_s(costs, passes)
    hosts = (launch, launch, passes.target_layers * costs.host_target_layer_s.value)
    first, later, verify = (
        np.maximum(0.0, host - gpu) for host, gpu in zip(hosts, of_gpu, strict=True)
    )
    return first + (passes.gamma - 1) * later + verify


def free_layers(costs: RoundCosts, passes: Passes) -> float:
    """Layers a draft of these passes' kernel times may have before the host decides the round; inf
    where layers cost it nothing.

    0 where the host decides whatever the draft. Serial engines have none: every layer costs the
    host's time or the GPU's.
    """
    if costs.order == "serial":
        return 0.0
    per_layer = costs.host_layer_s.value - costs.gap_s.value
    if costs.graph != "full" and passes.draft_layers:
        per_layer += costs.host_all_reduce_s.value * passes.draft_all_reduces / passes.draft_layers
    if per_layer <= 0.0:
        return math.inf
    gaps = passes.gamma * passes.draft_layers * costs.gap_s.value
    gpu = passes.verify_s.value + passes.draft_s.value + extra_s(costs, passes)[0] - gaps
    fixed = costs.host_round_s.value + passes.target_layers * costs.host_target_layer_s.value
    return max(0.0, ((gpu - fixed) / passes.gamma - costs.host_token_s.value) / per_layer)


def extra_s(costs: RoundCosts, passes: Passes) -> tuple[float, float]:
    """What a round adds on the GPU's side: synchronisation, sampling, copies; seconds and std, of
    drafts of many depths arrays."""
    gamma, batch, context = passes.gamma, passes.batch, passes.context
    row, more = costs.row_s, costs.row_token_s  # which err alike
    row = Estimate(row.value + context * more.value, row.std + context * more.std, row.source)
    parts = [(1.0, costs.round_s), (gamma, costs.token_s), (batch, costs.sequence_s)]
    gaps = gamma * passes.draft_layers
    value, own = _total([*parts, (gaps, costs.gap_s), (passes.rows, row)])
    std = costs.std_of(round=1.0, token=gamma, sequence=batch)
    return value, (own if std is None else std) * costs.band(batch)


def in_one(estimates: Iterable[Estimate]) -> Any:
    """Some estimates as `Many`."""
    return Many(*np.array([(each.value, each.std) for each in estimates]).T)


def mean_rounds(costs: RoundCosts, passes: Passes) -> Array:
    """Seconds of `round_time`, without std, where `passes` holds arrays: of many drafts, or
    gammas."""
    rows, largest = passes.rows, costs.largest_graph
    if largest is None or np.all(rows <= largest):
        return _graphed_rounds(costs, passes)
    beyond = _graphed_rounds(costs.launching(largest + 1), passes)
    if np.all(rows > largest):
        return beyond
    return np.where(rows <= largest, _graphed_rounds(costs, passes), beyond)


def _graphed_rounds(costs: RoundCosts, passes: Passes) -> Array:
    """The same with `costs` as they are `launching`."""
    read, (extra, std) = passes.verify_s, extra_s(costs, passes)
    more = passes.gamma - 1 + passes.catches_up
    gpu = passes.first_s.value + more * passes.later_s.value + read.value + extra
    if costs.order == "overlapped":
        return larger_means(gpu, np.hypot(read.std, std), *host_s(costs, passes))
    of_gpu = (passes.first_s.value, passes.later_s.value, read.value)
    return np.asarray(gpu + waits_s(costs, passes, of_gpu))


def larger(first: Estimate, second: Estimate) -> Estimate:
    """Mean and std of the larger of two independent normal times (Clark 1961, eq. 2 and 3)."""
    one, other, theta = first.value, second.value, math.hypot(first.std, second.std)
    if theta == 0.0:
        return Estimate(max(one, other), 0.0, first.source)
    gap = (one - other) / theta
    below = 0.5 * (1.0 + math.erf(gap / math.sqrt(2.0)))
    density = math.exp(-0.5 * gap * gap) / math.sqrt(2.0 * math.pi)
    mean = one * below + other * (1.0 - below) + theta * density
    square = (one**2 + first.std**2) * below + (other**2 + second.std**2) * (1.0 - below)
    square += (one + other) * theta * density
    return Estimate(mean, math.sqrt(max(square - mean * mean, 0.0)), first.source)


# numpy has none, and scipy.special takes longer to start than all that is asked of it
_erf: Final = np.vectorize(math.erf, otypes=[float])


def larger_means(first: Numbers, std: Numbers, second: Numbers, second_std: Numbers) -> Array:
    """Means of `larger` of many at once."""
    theta = np.hypot(std, second_std)
    gap = (first - second) / np.maximum(theta, 1e-300)
    below = 0.5 * (1.0 + _erf(gap / math.sqrt(2.0)))
    density = np.exp(-0.5 * np.minimum(gap * gap, 1400.0)) / math.sqrt(2.0 * math.pi)
    mean = first * below + second * (1.0 - below) + theta * density
    return np.asarray(np.where(theta > 0.0, mean, np.maximum(first, second)))


def larger_interval(gpu: Estimate, host: Estimate) -> tuple[float, float]:
    """5 and 95 % of the larger of the GPU's time, normal, and the host's, normal in its logarithm:
    hosts differ by factors."""
    gpus = NormalDist(gpu.value, max(gpu.std, 1e-9))
    hosts = NormalDist(math.log(host.value), max(host.relative_std, 1e-9))

    def done(seconds: float) -> float:
        return gpus.cdf(seconds) * hosts.cdf(math.log(seconds))

    def at(chance: float) -> float:
        # At the first end one of the two is done with this chance at most, at the other each with
        # its root.
        ends = (
            max(gpus.inv_cdf(each), math.exp(hosts.inv_cdf(each)))
            for each in (chance, math.sqrt(chance))
        )
        return rising_root(done, chance, *ends)

    return at(0.05), at(0.95)
