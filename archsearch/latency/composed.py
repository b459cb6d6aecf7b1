"""A whole pass put together from kernel tables, for GPUs of which no whole pass was measured.

graph mode: step = its kernels + what a replay costs + what ranks wait for one another; what an
engine adds between two steps is in `latency.rounds`. eager mode: the host launches every kernel, so
the layers take the longer of device time and host time. The host time is in no table; it is a
published constant (constants.yaml) with a wide std, of that published stack, not of this machine.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Final, Self

import numpy as np

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.grid import priced
from archsearch.architecture.op_kinds import OP_KINDS
from archsearch.architecture.ops import (
    AllReduce,
    Attention,
    Experts,
    Gemm,
    LatentAttention,
    Op,
    Part,
    PassOps,
    model_pass,
)
from archsearch.engine_rounds import EngineRounds
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate, Numbers
from archsearch.hardware.device import Device
from archsearch.latency.all_reduce import ReduceTable
from archsearch.latency.attention import UnpackedQueries, unpacks
from archsearch.latency.constants import constants
from archsearch.latency.ops import OpModel, op_of, steady
from archsearch.latency.transfer import CarriedOps
from archsearch.profiles import Profile
from archsearch.workload import DTYPE_BYTES

# share of an op's error variance that all ops of its kind in a table have in common
SHARED: Final = 0.5
SUSTAINED: Final = constants()["graph"]["sustained_flops_per_s"]
PACE_ROWS: Final = 8  # GEMMs that a GPU's own pace takes at least; assumed
# compute capabilities on which engines have one kernel for an all-reduce and the norm after it
FUSES_ON: Final = ("9", "10")
Ops = OpModel | CarriedOps | UnpackedQueries
GROUPS: Final = ("gemm", "attention", "experts", "elementwise", "all_reduce", "head", "step")


def composable(profile: Profile, dtype: str) -> bool:
    """Whether a pass may be composed from this profile: kernel rows of a GPU under CUDA graphs."""
    return profile.device.get("kind") == "gpu" and bool(
        profile.select("gemm", table_dtype(profile, dtype), "graph", "cold")
    )


def table_dtype(profile: Profile, dtype: str) -> str:
    """The dtype whose rows price `dtype`: float16 runs the kernels of bfloat16 at the same
    speed."""
    if dtype == "float16" and not profile.select("gemm", dtype, "graph"):
        return "bfloat16"
    return dtype


# Op models by profile and dtype: several engines on one device, and versions of one, are priced
# from the same kernels.
_FITTED: Final[dict[tuple[str, str], OpModel]] = {}


def _op_model(profile: Profile, dtype: str) -> OpModel:
    """The op model of a profile's graph rows, fitted once (about two seconds for a table)."""
    key = (profile.fingerprint(), dtype)
    if key not in _FITTED:
        if len(_FITTED) >= 16:
            _FITTED.clear()
        _FITTED[key] = OpModel(profile, dtype, "graph")
    return _FITTED[key]


class ComposedPass:
    """Seconds and std of whole steps from the kernel rows of a GPU profile; with `device`, carried
    over to that relative; with `engine`, as its attention runs there."""

    def __init__(
        self,
        profile: Profile,
        dtype: str,
        mode: str,
        device: Device | None = None,
        engine: str | None = None,
    ) -> None:
        self.mode = mode
        there = device or Device.from_dict(profile.device)

        def ops(name: str) -> Ops:
            measured = _op_model(profile, name)
            found = measured if device is None else CarriedOps(measured, device)
            if not unpacks(profile.device.get("compute_capability"), engine, name):
                return found
            return UnpackedQueries(found, there.multiprocessors or 108)

        self._gemm = ops(dtype)
        # with 8-bit weights and an 8-bit cache the rest, the head among it, runs in 16 bits
        self._rest = ops("bfloat16") if dtype == "float8_e4m3fn" else self._gemm
        self._formats = {dtype: self._gemm}
        self._ops_in = lambda name: (
            ops(name) if name in DTYPE_BYTES and composable(profile, name) else self._rest
        )
        self._eager_reduce = ReduceTable.of(profile.select("all_reduce", "bfloat16", "eager"))
        self.wait = all_reduce_wait(None, None)
        self._cache = self._gemm  # prices attention
        self._known: dict[tuple[Op, bool], tuple[float, float]] = {}  # by op, and where it runs
        # a table of the engine's own holds it
        self._fused = "sglang" not in profile.stack
        self._quantise: tuple[float, float] = (0.0, 0.0)  # seconds before a GEMM in fp8, their std
        self.pace = 1.0  # what kernels take there in those of the tables
        reached = SUSTAINED.get(there.compute_capability or "") if profile.imported else None
        # operations a second
        self._most = min(reached, there.flops_per_s["bfloat16"]) if reached else math.inf

    def serving(self, rounds: EngineRounds | None, dtype: str, wait: Estimate, cache: str) -> Self:
        """The same as the engine of `rounds` runs it: its KV cache in `cache`, how its activations
        are quantised, and how long its ranks wait. Raises ArchsearchError where no attention on
        such a cache was measured."""
        changed = copy.copy(self)
        changed.wait, changed._known = wait, {}
        known = {"bfloat16": self._rest, **self._formats}
        changed._cache = known.get(cache) or self._ops_in(cache)
        if changed._cache is self._rest and cache not in known:
            raise ArchsearchError(
                f"no attention on a KV cache in {cache} was measured here: leave out kv_cache_dtype"
            )
        if rounds is not None and self._fused and dtype == "float8_e4m3fn":
            changed._quantise = (rounds.quantise_s.value, rounds.quantise_s.relative_std)
        return changed

    def op_s(self, op: Op) -> tuple[float, float]:
        """Seconds and relative std of one kernel on the device."""
        return self._model_of(op).op_s(op, True)

    def _model_of(self, op: Op, outside: bool = False) -> Ops:
        """Whose rows price `op`: weights in the pass's dtype, but those of a format of their own;
        the rest in 16 bits. `outside` the layers (embedding and head) 8-bit checkpoints keep 16."""
        if outside:
            return self._rest
        if isinstance(op, Gemm) and op.format:
            if op.format not in self._formats:
                self._formats[op.format] = self._ops_in(op.format)
            return self._formats[op.format]
        if isinstance(op, Attention):
            return self._cache
        narrow = isinstance(op, LatentAttention) or (
            isinstance(op, Gemm | Experts) and not op.format
        )
        return self._gemm if narrow else self._rest

    def _in_8_bits(self, model: Ops) -> bool:
        return model is self._formats.get("float8_e4m3fn") and model is not self._rest

    def prepare(self, passes: Iterable[PassOps]) -> None:
        """Price the kernels of many passes in one go: much quicker than one by one."""
        passes = list(passes)
        # Of rows that are equally near, which ones count depends on the ops that are priced
        # together: first all outside the layers, then all in them, as recorded scores were.
        for outside in (True, False):
            wanted: dict[int, tuple[Ops, list[Op]]] = {}
            for op in (op for ops in passes for op in (ops.outside if outside else ops.in_layers)):
                if (op, outside) not in self._known:
                    model = self._model_of(op, outside)
                    wanted.setdefault(id(model), (model, []))[1].append(op)
            for model, its in wanted.values():
                model.prepare(its, True)

    def _answer(self, op: Op, ops: PassOps, outside: bool = False) -> tuple[float, float]:
        """Seconds and relative std of one kernel of `ops`; of a grid's arrays, without std."""
        found = self._known.get((op, outside))
        if found is None and ops.of_grid:
            model = self._model_of(op, outside)

            def price(ops: Sequence[Op]) -> list[float]:
                model.prepare(ops, True)
                return [self._sustained(model, each)[0] for each in ops]

            found = priced(op, price), 0.0
            if 0 < np.ndim(found[0]) < 2:  # of gammas: other drafters run the same
                self._known[op, outside] = found
        if found is None:
            self.prepare([ops])  # its other kernels with it
            found = self._sustained(self._model_of(op, outside), op)
            self._known[op, outside] = found
        return found

    def _sustained(self, model: Ops, op: Op) -> tuple[float, float]:
        """Seconds and relative std of one kernel among others, which share the GPU's power."""
        seconds, std = model.op_s(op, True)
        if not isinstance(op, Gemm) or self._in_8_bits(model):
            return seconds, std
        return max(seconds, OP_KINDS["gemm"].flops(op) / self._most), std

    def pass_ops(
        self, arch: Architecture, parts: Sequence[Part], ranks: int = 1, *, choose: bool = True
    ) -> PassOps:
        """The `model_pass` of `arch`, its experts chosen as so many texts choose them."""
        if arch.num_experts and arch.routing_skew is None:
            total = sum(part.batch * part.tokens for part in parts)
            if total > 1 and sum(part.batch for part in parts) == 1:
                # tokens of one text choose evenly (`experts.ROUTING_SKEW`)
                arch = arch.replace(routing_skew=0.0)
        return model_pass(arch, parts, ranks=ranks, fused=self.mode == "graph", choose=choose)

    def step_s(
        self, arch: Architecture, parts: Sequence[Part], ranks: int = 1, *, choose: bool = True
    ) -> Estimate:
        """Seconds of one step of `arch` over all `parts`."""
        return self.ops_s(self.pass_ops(arch, parts, ranks, choose=choose))

    def ops_terms(self, ops: PassOps) -> dict[str, tuple[float, float]]:
        """Seconds and std by GROUPS; their sum is the pass. Under eager mode the host is in `step`
        as far as it is not hidden. Of a grid's pass arrays, without std."""
        sums: dict[str, list[tuple[float, float]]] = {name: [] for name in GROUPS}
        for op, count in ops.in_layers.items():
            seconds, std = self._answer(op, ops)
            sums["attention" if isinstance(op, LatentAttention) else op.kind].append(
                (count * seconds, std)
            )
            # activations are quantised by a kernel before each GEMM with 8-bit weights
            if self._quantise[0] and isinstance(op, Gemm) and self._in_8_bits(self._model_of(op)):
                sums["elementwise"].append((count * self._quantise[0], self._quantise[1]))
        for op, count in ops.outside.items():
            seconds, std = self._answer(op, ops, outside=True)
            sums["head"].append((count * seconds, std))
        result = {name: _add(items, self.pace, ops.of_grid) for name, items in sums.items()}
        result["step"] = (
            self._graph_step(ops) if self.mode == "graph" else self._eager_step(ops, result)
        )
        return result

    def ops_s(self, ops: PassOps) -> Estimate:
        """Seconds of one pass of any network.

        Kinds of ops err independently of one another; on top comes what whole steps were seen to be
        off by (constants.yaml).
        """
        terms = self.ops_terms(ops).values()
        value = float(sum(value for value, _ in terms))
        whole = constants()["graph"]["relative_std"] * value if self.mode == "graph" else 0.0
        return Estimate(value, math.hypot(whole, *(std for _, std in terms)), "modelled")

    def mean_s(self, ops: PassOps) -> Numbers:
        """`ops_s` without std, also of arrays."""
        return sum(value for value, _ in self.ops_terms(ops).values())

    def _graph_step(self, ops: PassOps) -> tuple[float, float]:
        known = constants()["graph"]
        waits = sync_waits(ops.all_reduces(), ops.ranks)
        value = known["pass_s"] + ops.layers * known["layer_s"] + self.wait.value * waits
        stds = (known["pass_std_s"], ops.layers * known["layer_std_s"], self.wait.std * waits)
        return value, sum(std**2 for std in stds) ** 0.5

    def _eager_step(
        self, ops: PassOps, device: dict[str, tuple[float, float]]
    ) -> tuple[float, float]:
        """What the host takes beyond the device, layers and the rest apart."""
        known = constants()["eager"]
        # an all-reduce launched by the host: measured where the table has eager rows
        table, constant = self._eager_reduce, float(known["all_reduce_s"])
        reduce_s = sum(
            count * (table.seconds(op.ranks, op.elements) if op.ranks in table.lines else constant)
            for op, count in ops.in_layers.items()
            if isinstance(op, AllReduce)
        )
        host_layers = ops.layers * known["layer_s"] + reduce_s
        host_rest = known["pass_s"] + (ops.all_reduces() > 0) * 2 * known["all_reduce_s"]
        # what the device takes for the layers hides as much of the host's time
        on_layers = sum(device[name][0] for name in GROUPS[: GROUPS.index("head")])
        beyond = np.maximum(0.0, host_layers - on_layers)
        beyond = beyond + np.maximum(0.0, host_rest - device["head"][0])
        return beyond, known["relative_std"] * (host_layers + host_rest) * (beyond > 0)


def all_reduce_wait(rounds: EngineRounds | None, compute_capability: str | None) -> Estimate:
    """Seconds that ranks wait at an all-reduce of a graph, as the engine of `rounds` runs it on
    such a GPU; see `sync_waits`.

    Less where the norm after it is in the same kernel, which runs on Hopper and Blackwell of data
    centres.
    """
    known, major = constants()["graph"], (compute_capability or "").partition(".")[0]
    if rounds is not None and rounds.fuses_reduces and major in FUSES_ON:
        return Estimate(known["fused_sync_s"], known["fused_sync_std_s"], "published")
    return Estimate(known["sync_s"], known["sync_relative_std"] * known["sync_s"], "published")


def sync_waits(all_reduces: float, ranks: int) -> float:
    """How often a pass pays for ranks that wait for the slowest: all-reduces x (1 - 1 / ranks)."""
    return all_reduces * (1.0 - 1.0 / ranks)


def pace(measured: Profile, tables: ComposedPass, dtype: str) -> float:
    """What GEMMs were measured to take on a GPU, in what `tables` say of them: the median; 1 where
    fewer than PACE_ROWS were."""
    rows = measured.select("gemm", table_dtype(measured, dtype), "graph", "cold")
    ratios = [row.median_s / tables.op_s(op_of(row))[0] for row in steady(rows)]
    return statistics.median(ratios) if len(ratios) >= PACE_ROWS else 1.0


def _add(items: list[tuple[float, float]], pace: float, of_grid: bool) -> tuple[float, float]:
    """Sum and std of (seconds, relative std): part of each error is the table's and does not
    average out. Of a grid's arrays without std."""
    if not items:
        return 0.0, 0.0
    value = sum(pace * seconds for seconds, _ in items)
    if of_grid:
        return value, 0.0
    errors = [pace * seconds * std for seconds, std in items]
    together, apart = sum(errors), sum(error**2 for error in errors)
    return value, (SHARED * together**2 + (1.0 - SHARED) * apart) ** 0.5
