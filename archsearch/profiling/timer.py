"""The timer: repeats from a time budget, each bracketed by a reference probe, so that a shared
machine can be measured (docs/decisions/003). Times are as they would have been at the probe's
reference speed, which the profile stores.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final

import torch

from archsearch.engine_rounds import HOSTS

Run = Callable[[], object]
MIN_REPEATS = 5
MAX_REPEATS = 25
MIN_REPEAT_S = 0.002


ALIGNMENT = 512
"""Elements to whose multiples a view of the pool is aligned."""


def copies_of(weight_bytes: int, working_set_bytes: int) -> int:
    """Copies of a weight that together hold at least `working_set_bytes`, one at least.

    Rounded up: a cycle over less than the working set finds part of each weight in a cache that
    does not evict strictly the oldest line, and a cold GEMM would look too fast.
    """
    return max(1, -(-working_set_bytes // max(1, weight_bytes)))


class WeightPool:
    """One block of random numbers, larger than the last-level cache, from which weight matrices are
    cut as views.

    Rotating over views at different offsets makes a kernel read its weights from memory, as a large
    model does; a few views that fit the cache, warm, as a small draft from its second token on.
    """

    def __init__(
        self, size_bytes: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0
    ) -> None:
        itemsize = torch.empty(0, dtype=dtype).element_size()
        generator = torch.Generator().manual_seed(seed)
        block = torch.randn(1 << 20, generator=generator).mul_(0.05).to(dtype)
        count = -(-size_bytes // (itemsize * block.numel()))
        self.flat = block.to(device).repeat(count)
        self.itemsize = itemsize
        self._next = 0

    def matrices(self, rows: int, columns: int, working_set_bytes: int) -> list[torch.Tensor]:
        """Distinct [rows, columns] matrices that together hold at least `working_set_bytes`: views
        of the pool where it is large enough, else of a block of their own."""
        size = rows * columns
        aligned = -(-size // ALIGNMENT) * ALIGNMENT
        copies = copies_of(size * self.itemsize, working_set_bytes)
        block = self.flat
        if copies * aligned > block.numel():
            block = self.flat.new_empty(copies * aligned)
            self.fill(block)
        return [block[i * aligned : i * aligned + size].view(rows, columns) for i in range(copies)]

    def fill(self, parameter: torch.Tensor) -> None:
        """Write real numbers into a contiguous weight (untouched pages are all one physical page
        and time falsely), cheaply: no second copy of it is made, also where it is larger than the
        pool."""
        flat, available = parameter.detach().view(-1), self.flat.numel()
        # Halves, so that neighbours differ.
        piece = len(flat) if len(flat) <= available else max(1, available // 2)
        for start in range(0, len(flat), piece):
            part = flat[start : start + piece]
            offset = self._next % max(1, available - len(part))
            self._next += len(part) // 3 + 7919
            part.copy_(self.flat[offset : offset + len(part)])


class Probe:
    """A fixed piece of work that feels what slows a decode step of its dtype: weights from memory,
    arithmetic, small kernels (why one per dtype: docs/decisions/003)."""

    def __init__(self, pool: WeightPool) -> None:
        self._weights = pool.matrices(1024, 640, 96 << 20)
        self._inputs = [torch.randn(1, tokens, 640).to(pool.flat.dtype) for tokens in (1, 5, 1, 5)]
        self._small = torch.randn(1, 640)
        self._at = 0

    def __call__(self) -> float:
        """Run once; seconds."""
        start = time.perf_counter()
        small = self._small
        for x in self._inputs:
            torch.nn.functional.linear(x, self._weights[self._at % len(self._weights)])
            self._at += 1
            for _ in range(6):
                small = small * 1.0001
        return time.perf_counter() - start

    def reference_s(self, runs: int = 200) -> float:
        """The probe's speed on this machine when little disturbs it: the lower quartile of many
        runs."""
        return statistics.quantiles([self() for _ in range(runs)], n=4)[0]


def plan(
    estimate_s: float, alone: bool, calls: int | None, budget_s: float, each_s: float = 0.0
) -> tuple[int, int]:
    """Calls per repeat (`calls`, else one where each is timed `alone`, else as many as fill
    MIN_REPEAT_S) and repeats within `budget_s`; `each_s`: what a repeat takes besides."""
    calls = calls or (1 if alone else max(1, round(MIN_REPEAT_S / estimate_s)))
    repeats = budget_s / (calls * estimate_s + each_s)
    return calls, int(min(MAX_REPEATS, max(MIN_REPEATS, repeats)))


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per call of each repeat, corrected to the probe's reference speed, and the median
    slowdown that was divided out."""

    times_s: tuple[float, ...]
    slowdown: float


class Timer:
    """Times a callable against the probe. `reference_s` comes from the profile, so that all its
    rows share one scale."""

    def __init__(self, probe: Callable[[], float], reference_s: float) -> None:
        self.probe, self.reference_s = probe, reference_s
        self.slowdowns: list[float] = []

    def time(
        self,
        run: Run,
        *,
        before: Run | None = None,
        budget_s: float = 0.06,
        calls: int | None = None,
    ) -> Timing:
        """Time `run` within about `budget_s`.

        before: runs untimed ahead of every repeat (to empty the cache).
        calls: calls per repeat; by default enough to fill MIN_REPEAT_S (one when `before` is
        given).
        """
        run()  # first-call costs: allocations, kernel selection
        # emptying a cache of 100 MB takes longer than most passes: it counts towards the budget
        ahead_s = 0.0
        if before is not None:
            start = time.perf_counter()
            before()
            ahead_s = time.perf_counter() - start
        start = time.perf_counter()
        run()
        estimate = max(time.perf_counter() - start, 1e-7)
        each_s = ahead_s + 2 * self.reference_s
        calls, repeats = plan(estimate, before is not None, calls, budget_s, each_s)
        times, slowdowns = [], []
        for _ in range(repeats):
            # the machine's speed may change within a repeat: the mean of just before and just after
            probe_before = self.probe()
            if before is not None:
                before()
            start = time.perf_counter()
            for _ in range(calls):
                run()
            elapsed = (time.perf_counter() - start) / calls
            probe_after = self.probe()
            slowdown = 0.5 * (probe_before + probe_after) / self.reference_s
            slowdowns.append(slowdown)
            times.append(elapsed / slowdown)
        slowdown = statistics.median(slowdowns)
        self.slowdowns.append(slowdown)
        return Timing(tuple(times), slowdown)


# Seconds of a layer launched kernel by kernel that the constants of engine_rounds.yaml stand for
# (published: arXiv 2402.01528, 24 and 12 layers, DeepSpeed and transformers of 2023).
REFERENCE_S: Final = 5.367e-4
LAYERS: Final = 12
WARM_UP: Final = 3
BURST: Final = 20  # passes between pauses


@dataclass(frozen=True, slots=True)
class HostSpeed:
    """Seconds in which the host launches a decoder layer: median and quartiles over `repeats`
    passes of LAYERS layers. `device`: where the kernels ran."""

    ALSO: ClassVar = ("factor", "host", "source", "words")
    source: ClassVar = "measured"
    layer_s: float
    low_s: float
    high_s: float
    repeats: int
    device: str

    @property
    def factor(self) -> float:
        """On the host times of engine_rounds.yaml, as `--host` takes it."""
        return self.layer_s / REFERENCE_S

    @property
    def host(self) -> str:
        """The name of HOSTS that is nearest."""
        return min(HOSTS, key=lambda each: abs(math.log(HOSTS[each][0] / self.factor)))

    @property
    def words(self) -> str:
        where = "on the GPU" if self.device == "cuda" else "no GPU here: kernels run on the thread"
        return (
            f"This host launches a decoder layer in {1e3 * self.layer_s:.2f} ms (quartiles "
            f"{1e3 * self.low_s:.2f} to {1e3 * self.high_s:.2f}, {self.repeats} passes, {where}); "
            f"published: {1e3 * REFERENCE_S:.2f}.\n"
            f"Nearest: --host {self.host}; as measured: --host {self.factor:.2f}"
        )


def measure_host(budget_s: float = 60.0) -> HostSpeed:
    """How fast this machine's host launches kernels, what a draft without CUDA graphs waits for:
    decoder layers for up to `budget_s` seconds, with pauses: a virtual machine may be slower by
    half for a second or more (vLLM on an H200, benchmarks/results/2026-11-26-gpu).

    Layers of transformers, so narrow that a kernel is over before the next is launched, run one
    token after another; what a layer takes the thread is Python, the dispatcher and, on a GPU, the
    launch; without one the kernels run on the thread, a microsecond or two each. Thread time is
    counted, which other processes slow down little. Raises ImportError without transformers.
    """
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaModel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=128,
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = LlamaModel(config).eval().to(device)
        token = torch.zeros((1, 1), dtype=torch.long, device=device)
        found: list[float] = []
        end = time.perf_counter() + budget_s
        with torch.inference_mode():
            while len(found) <= WARM_UP or (
                len(found) < WARM_UP + 200 and time.perf_counter() < end
            ):
                start = time.thread_time()
                model(token, use_cache=False)
                found.append((time.thread_time() - start) / LAYERS)
                if device == "cuda":
                    torch.cuda.synchronize()
                if len(found) % BURST == 0:
                    time.sleep(min(1.0, 0.05 * budget_s))
    finally:
        torch.set_num_threads(threads)
    kept = sorted(found[WARM_UP:])
    low, high = kept[len(kept) // 4], kept[(3 * len(kept)) // 4]
    return HostSpeed(statistics.median(kept), low, high, len(kept), device)
