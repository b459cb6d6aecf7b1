"""Rounds of many drafts at once: what `LatencyModel` and `RooflineLatency` say of each of a
`ShapeGrid`, without its std.

The same formulas as theirs over arrays (tests/search/test_grid.py holds the two together to 1e-9):
ops are priced once each (`grid_ops`), the Gaussian process over whole passes is factored into
widths, depth, head and tokens, so that its exponentials are taken once for all gammas. Who wants
the std of a shape asks the model itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.grid import BODY_FIELDS, ShapeGrid, Shapes
from archsearch.architecture.ops import AllReduce, Elementwise, Op, sample_op
from archsearch.engine_rounds import RoundCosts
from archsearch.estimate import Estimate
from archsearch.latency.composed import ComposedPass, constants, sync_waits
from archsearch.latency.engine_passes import EnginePasses
from archsearch.latency.grid_ops import Array, GridPart, GridSeconds, group_seconds, priced
from archsearch.latency.model import GROUPS, LatencyModel
from archsearch.latency.regression import Residual
from archsearch.latency.roofline import RooflineLatency
from archsearch.latency.rounds import Passes, _extra, _nothing_drafted, host_time
from archsearch.workload import Workload

NOTHING: Final = Estimate(0.0, 0.0, "given")
Pass = tuple[GridPart, bool]
"""What is read, and whether the weights come from memory."""


@dataclass(frozen=True)
class GridRound:
    """Rounds of `gamma` draft tokens, seconds, [bodies, layers, windows, heads] or what broadcasts
    to it."""

    gamma: int
    draft_s: Array
    round_s: Array


def can_price(latency: Any) -> bool:
    """Whether `GridLatency` knows the latency's formulas."""
    return type(latency) in (LatencyModel, RooflineLatency)


class GridLatency:
    """Rounds of all drafts of `grid` beside one target, for some gammas. Pricing the ops is done
    when it is made."""

    def __init__(
        self,
        latency: Any,
        target: Architecture,
        grid: ShapeGrid,
        workload: Workload,
        gammas: Sequence[int],
    ) -> None:
        if not can_price(latency):
            raise TypeError(f"no formulas over arrays for {type(latency).__name__}")
        self.latency, self.target, self.workload, self.gammas = (
            latency,
            target,
            workload,
            tuple(gammas),
        )
        self.grid = grid if latency.facts.trimmed_head else grid.with_full_heads()
        self.ranks = latency.facts.ranks_of_draft(workload)
        self._firsts = {gamma: self._first(gamma) for gamma in self.gammas}
        self._later: Pass = (replace(self._firsts[self.gammas[0]][0], tokens=1), False)
        self._passes = list(dict.fromkeys([*self._firsts.values(), self._later]))
        self._seconds = _prices(latency, self.grid, self.ranks, self._passes)
        self._verified = {gamma: latency.verify_s(target, workload, gamma) for gamma in self.gammas}
        self._decode_s = latency.decode_s(target, workload).value
        self._idle: Evaluate | None = None

    def _first(self, gamma: int) -> Pass:
        latency, batch, context = self.latency, self.workload.batch_size, self.workload.context_len
        all_rows = isinstance(latency, RooflineLatency) or latency.engine_ is not None
        return GridPart(batch, latency.first_tokens(gamma), context, None if all_rows else 1), True

    def rounds(self, bodies: slice) -> Iterator[GridRound]:
        """Rounds of the drafts of some bodies, by gamma."""
        seconds = dict(zip(self._passes, self._seconds(bodies), strict=True))
        later = seconds[self._later]
        layers = np.array(self.grid.layers)[None, :, None, None]
        for gamma in self.gammas:
            first = seconds[self._firsts[gamma]]
            more = self.latency.facts.draft_passes(gamma) - 1
            draft = first + more * later if more else first
            if self.latency.rounds is not None:
                whole = self._launched(gamma, first, later, draft, layers)
            else:
                if isinstance(self.latency, LatencyModel):
                    draft = draft + gamma * layers * self.latency.added_layer_s(self.grid.like)
                added = self.latency.added_s(self.target, self.workload, gamma).value
                whole = draft + self._verified[gamma].value + added
            yield GridRound(gamma, draft, whole)

    def idle(self, bodies: slice) -> Any:
        """`LatencyOfRounds.idle_s` of the drafts of some bodies: what they cost a step that drafts
        nothing."""
        latency, facts = self.latency, self.latency.facts
        if latency.rounds is not None and facts.idle_round:
            return _extra(latency.rounds.costs, _nothing_drafted(self.workload)).value
        if not facts.idle_pass:
            return 0.0
        if self._idle is None:
            headless = replace(
                self.grid, heads=tuple(replace(head, rows=1) for head in self.grid.heads)
            )
            part = GridPart(self.workload.batch_size, 2, self.workload.context_len)
            self._idle = _prices(latency, headless, self.ranks, [(part, True)])
        (idle,) = self._idle(bodies)
        if latency.rounds is None:
            return idle
        costs = replace(
            latency.rounds.costs, round_s=replace(latency.rounds.costs.round_s, value=0.0)
        )
        verify = latency.verify_s(self.target, self.workload, 0)
        layers = np.array(self.grid.layers)[None, :, None, None]
        longer = self._launched(1, idle, idle, idle, layers, (costs, verify)) - self._decode_s
        return np.where(longer <= idle, idle, longer)

    def _launched(
        self,
        gamma: int,
        first: Array,
        later: Array,
        draft: Array,
        layers: Any,
        own: tuple[RoundCosts, Estimate] | None = None,
    ) -> Array:
        """`rounds.round_time` of an engine whose host is told apart; `own`: other costs, and
        another verification."""
        costs, read = own or (self.latency.rounds.costs, self._verified[gamma])
        verify, more = read.value, gamma - 1
        batch, context, target_layers = (
            self.workload.batch_size,
            self.workload.context_len,
            self.target.num_hidden_layers,
        )
        costs = costs.launching(batch * (gamma + 1))
        passes = Passes(NOTHING, NOTHING, NOTHING, gamma, batch, 0, target_layers, context=context)
        added = _extra(costs, passes)
        extra = added.value
        sharded = int(self.ranks > 1)
        reduces = (2 * layers + 1) * sharded * (costs.graph != "full")
        launch = (
            costs.host_token_s.value
            + layers * costs.host_layer_s.value
            + reduces * costs.host_all_reduce_s.value
        )
        target_host = target_layers * costs.host_target_layer_s.value
        if costs.order == "overlapped":
            std = math.hypot(read.std, added.std)
            hosts = [
                host_time(
                    costs,
                    replace(
                        passes, draft_layers=depth, draft_all_reduces=sharded * (2 * depth + 1)
                    ),
                )
                for depth in self.grid.layers
            ]
            means, stds = (
                np.array(column).reshape(layers.shape)
                for column in zip(*((h.value, h.std) for h in hosts), strict=True)
            )
            return larger_of_arrays(draft + verify + extra, std, means, stds)
        waits = (
            np.maximum(0.0, launch - first)
            + more * np.maximum(0.0, launch - later)
            + max(0.0, target_host - verify)
        )
        return np.asarray(draft + verify + extra + waits)


def larger_of_arrays(first: Array, std: float, second: Array, second_std: Array) -> Array:
    """Means of `rounds.larger_of`."""
    from scipy.special import erf

    theta = np.hypot(std, second_std)
    gap = (first - second) / np.maximum(theta, 1e-300)
    below = 0.5 * (1.0 + erf(gap / math.sqrt(2.0)))
    density = np.exp(-0.5 * np.minimum(gap * gap, 1400.0)) / math.sqrt(2.0 * math.pi)
    mean = first * below + second * (1.0 - below) + theta * density
    return np.asarray(np.where(theta > 0.0, mean, np.maximum(first, second)))


def prompt_seconds(
    latency: Any, grid: ShapeGrid, ranks: int, tokens: int
) -> Callable[[slice], Any]:
    """Seconds in which each draft reads a prompt of `tokens` tokens, for some bodies; `grid`: as
    the engine computes them."""
    if tokens < 1:
        return lambda bodies: 0.0
    cold = getattr(latency, "engine_", None) is not None  # as `traffic.services` asks
    prices = _prices(latency, grid, ranks, [(GridPart(1, tokens, 0), cold)])
    return lambda bodies: prices(bodies)[0]


# -- passes
# --------------------------------------------------------------------------------------------------

Evaluate = Callable[[slice], list[Array]]
"""Seconds of each pass for some bodies."""


def _prices(latency: Any, grid: ShapeGrid, ranks: int, passes: Sequence[Pass]) -> Evaluate:
    """What answers the seconds of `passes`, as the latency's `forward_s` does for one shape."""
    if isinstance(latency, RooflineLatency):
        return _roofline(latency, grid, ranks, passes)
    if latency.engine_ is not None:
        return _engine_passes(latency.engine_, grid, passes)
    if latency.composed_ is not None:
        return _composed(latency.composed_, grid, ranks, passes)
    return _fitted(latency, grid, ranks, passes)


def _roofline(
    latency: RooflineLatency, grid: ShapeGrid, ranks: int, passes: Sequence[Pass]
) -> Evaluate:
    def price(ops: Sequence[Op]) -> Array:
        return np.array([latency.op_s(op) for op in ops])

    graph = latency.mode == "graph"
    known = [group_seconds(grid, part, price, ranks=ranks, fused=graph) for part, _ in passes]
    layers = np.array(grid.layers)[None, :, None, None]

    def seconds(bodies: slice) -> list[Array]:
        found = []
        for part in known:
            value = part.layers_s(grid, bodies) + part.ends_s(bodies)
            reduces = layers * part.reduces + part.reduces_ends
            if graph:
                value = value + latency.wait.value * sync_waits(reduces, ranks)
            elif latency.device.kind == "gpu":
                value = np.maximum(value, latency._host_s(layers, reduces))
            found.append(value)
        return found

    return seconds


def _composed(model: ComposedPass, grid: ShapeGrid, ranks: int, passes: Sequence[Pass]) -> Evaluate:
    def answer(table: Any, ops: Sequence[Op]) -> Array:
        table.prepare(ops, True)
        return np.array([table.op_s(op, True)[0] for op in ops])

    def price(ops: Sequence[Op]) -> Array:
        return answer(model._model_of(ops[0]), ops)

    def outside(ops: Sequence[Op]) -> Array:
        return answer(model._rest, ops)

    graph = model.mode == "graph"
    known = [
        group_seconds(grid, part, price, ranks=ranks, fused=graph, outside=outside)
        for part, _ in passes
    ]
    samples = [priced(_sample(grid, part), outside) for part, _ in passes]  # [heads]
    eager = [_eager_reduces(model, grid, part, ranks) for part, _ in passes]
    layers = np.array(grid.layers)[None, :, None, None]

    def seconds(bodies: slice) -> list[Array]:
        found = []
        for part, sample, reduce_s in zip(known, samples, eager, strict=True):
            inside, ends = part.layers_s(grid, bodies), part.ends_s(bodies) + sample
            reduces = layers * part.reduces + part.reduces_ends
            if graph:
                own = constants()["graph"]
                step = (
                    own["pass_s"]
                    + layers * own["layer_s"]
                    + model.wait.value * sync_waits(reduces, ranks)
                )
            else:
                own = constants()["eager"]
                host = layers * (own["layer_s"] + reduce_s[bodies, None, None, None])
                rest = own["pass_s"] + (ranks > 1) * 2 * own["all_reduce_s"]
                step = np.maximum(0.0, host - inside) + np.maximum(0.0, rest - ends)
            found.append(inside + ends + step)
        return found

    return seconds


def _sample(grid: ShapeGrid, part: GridPart) -> Elementwise:
    """The choice of tokens, of each head."""
    heads: Any = Shapes(grid.like, {"draft_vocab_size": grid.head_rows()})
    return sample_op(
        heads, batch=part.batch, tokens=part.tokens if part.logits is None else part.logits
    )


def _eager_reduces(model: ComposedPass, grid: ShapeGrid, part: GridPart, ranks: int) -> Array:
    """Seconds of a layer's all-reduces that the host launches, [bodies]."""
    if ranks == 1 or model.mode == "graph":
        return np.zeros(len(grid.hidden_size))

    def price(ops: Sequence[Any]) -> Array:
        return np.array([model._eager_reduce_s(op) for op in ops])

    return 2.0 * priced(AllReduce(part.batch * part.tokens * grid.hidden_size, ranks), price)  # type: ignore[arg-type]


def _fitted(model: LatencyModel, grid: ShapeGrid, ranks: int, passes: Sequence[Pass]) -> Evaluate:
    """Passes by the coefficients of whole ones and the Gaussian process over what they miss."""
    own = grid.sharded(ranks)

    def table(cold: bool) -> Callable[[Sequence[Op]], Array]:
        def price(ops: Sequence[Op]) -> Array:
            model.ops.prepare(ops, cold)
            return np.array([model.ops.op_s(op, cold)[0] for op in ops])

        return price

    parts = list(dict.fromkeys(part for part, _ in passes))
    fused = model.mode == "graph"
    known = {
        (part, cold): group_seconds(own, part, table(cold), fused=fused)
        for part in parts
        for cold in (False, True)
    }
    extras = {part: _on_top(model, grid, part, ranks, table(True)) for part in parts}
    places = [
        (2.0 * math.log(p.batch * p.tokens), 0.5 * math.log(p.context + 64), float(cold))
        for p, cold in passes
    ]
    means = _means(model._residual, own, (5,), 6, np.array(places))

    def seconds(bodies: slice) -> list[Array]:
        bytes_ = own.part(bodies).weight_bytes_per_pass(model.dtype_bytes)
        share = 1.0 / (1.0 + (model.cache_.half_bytes / bytes_) ** model.cache_.steepness)
        factors = np.exp(means(bodies, np.log(bytes_)))
        found = []
        for number, (part, cold) in enumerate(passes):
            base = _base(model, own, part, known[part, True], bodies)
            if not cold:
                warm = _base(model, own, part, known[part, False], bodies)
                base = warm + share * (base - warm)
            found.append(base * factors[..., number][:, :, None, :] + extras[part](bodies))
        return found

    return seconds


def _base(
    model: LatencyModel, grid: ShapeGrid, part: GridPart, seconds: GridSeconds, bodies: slice
) -> Array:
    """GROUPS times their coefficients."""
    c = dict(zip(GROUPS, model._coefficients.tolist(), strict=True))
    value = c["pass"] + c["layers"] * np.array(grid.layers)[None, :, None, None]
    value = value + c["gemm"] * seconds.depth(seconds.gemm, grid, bodies)
    value = value + c["elementwise"] * (
        seconds.depth(seconds.elementwise, grid, bodies) + seconds.ends[bodies, None, None, None]
    )
    value = (
        value
        + c["attention"] * seconds.attention_s(grid, bodies)
        + c["head"] * seconds.head[bodies, None, None, :]
    )
    return np.asarray(value + c["scatter"] * part.batch * part.tokens * grid.trimmed())


def _on_top(
    model: LatencyModel,
    grid: ShapeGrid,
    part: GridPart,
    ranks: int,
    price: Callable[[Sequence[Op]], Array],
) -> Callable[[slice], Any]:
    """What a pass takes beside what was fitted: ranks that wait for one another, the choice of
    tokens."""
    layers = np.array(grid.layers)[None, :, None, None]
    chosen = priced(_sample(grid, part), price) if model._chooses else np.zeros(len(grid.heads))
    if ranks == 1:
        return lambda bodies: chosen

    def reduce(ops: Sequence[Op]) -> Array:
        floor = float(constants()["eager"]["all_reduce_s"])
        plain = price(ops)
        slow = [model.mode == "eager" and model.ops.source(op) != "measured" for op in ops]
        return np.where(slow, np.maximum(plain, floor), plain)

    m = part.batch * part.tokens
    head_m = m if part.logits is None else part.batch * part.logits
    inside = priced(AllReduce(m * grid.hidden_size, ranks), reduce)  # type: ignore[arg-type]
    outside = priced(AllReduce(head_m * grid.head_rows() // 2, ranks), reduce)  # type: ignore[arg-type]
    waiting = model.wait.value * sync_waits(2 * layers + 2, ranks) if model.mode == "graph" else 0.0
    return lambda bodies: (
        (2 * layers + 1) * inside[bodies, None, None, None] + outside + waiting + chosen
    )


def _means(
    residual: Residual, grid: ShapeGrid, heads_at: tuple[int, ...], joint_at: int, places: Array
) -> Callable[[slice, Array], Array]:
    """Means of a Gaussian process over `LatencyModel._inputs` (or the engine's), [bodies, layers,
    heads, passes].

    Inputs 0, 1, 3, 4 are the body's, 2 the depth, `heads_at` the head's rows, `joint_at` the log of
    the weights (given to the function that is returned, [bodies, layers, 1, heads]), the last
    columns those of `places` [passes, columns].
    """
    z, scales = residual.inputs, residual.scales

    def near(column: int, values: Any) -> Array:
        """exp(-d^2 / 2) of one input, [..., rows]."""
        return np.asarray(
            np.exp(
                -0.5
                * (z[:, column] - np.asarray(values, dtype=float)[..., None] / scales[column]) ** 2
            )
        )

    sizes = {name: getattr(grid, name).astype(float) for name in BODY_FIELDS}
    q, kv = (
        sizes[name] * sizes["head_dim"] for name in ("num_attention_heads", "num_key_value_heads")
    )
    body = near(0, np.log(sizes["hidden_size"])) * near(1, np.log(sizes["intermediate_size"]))
    body = body * near(3, 0.5 * np.log(q)) * near(4, 0.5 * np.log(kv))  # [bodies, rows]
    depth = near(2, np.log(np.array(grid.layers)))  # [layers, rows]
    head = np.ones((len(grid.heads), len(z)))
    for column in heads_at:
        head = head * near(column, 0.5 * np.log(grid.head_rows()))
    last = z.shape[1] - places.shape[1]
    passes = (
        residual.amplitude
        * residual.weights
        * np.prod([near(last + i, column) for i, column in enumerate(places.T)], axis=0)
    )

    def means(bodies: slice, log_weights: Array) -> Array:
        kernel = near(joint_at, log_weights[:, :, 0, :])  # [bodies, layers, heads, rows]
        kernel *= body[bodies, None, None, :]
        kernel *= depth[None, :, None, :]
        kernel *= head[None, None, :, :]
        return np.asarray(kernel @ passes.T)

    return means


def _engine_passes(own: EnginePasses, grid: ShapeGrid, passes: Sequence[Pass]) -> Evaluate:
    """Passes as the engine itself ran them."""
    columns = [
        (2.0 * math.log(p.batch * p.tokens), 0.5 * math.log(p.context + 64), float(cold), 0.0)
        for p, cold in passes
    ]
    means = _means(own._residual, grid, (), 5, np.array(columns))
    layers = np.array(grid.layers)[None, :, None, None]

    def seconds(bodies: slice) -> list[Array]:
        some = grid.part(bodies)
        body = some.body_parameters().astype(float)
        head = (some.hidden_size[:, None, None, None] * grid.head_rows()).astype(float)
        factors = means(bodies, np.log(body + head))
        found = []
        for number, (part, cold) in enumerate(passes):
            base = _engine_base(own, some, part, cold, (body, head, layers))
            mean = factors[..., number][:, :, None, :]
            mean = _own_rows(own, some, part, cold, np.broadcast_to(mean, some.shape))
            found.append(base * np.exp(mean))
        return found

    return seconds


def _engine_base(
    own: EnginePasses, grid: ShapeGrid, part: GridPart, cold: bool, sizes: tuple[Array, Array, Any]
) -> Array:
    """`EnginePasses._features` of a draft times the coefficients."""
    body, head, layers = sizes
    width, rows = own.dtype_bytes, float(part.batch * part.tokens)
    bytes_ = body * width
    share = 1.0 if cold else 1.0 / (1.0 + (own._half / (bytes_ + head * width)) ** own._steepness)
    cache = grid.kv_cache_bytes(part.context + part.tokens, width, part.batch)
    features = (
        1.0,
        layers,
        share * bytes_,
        (1.0 - share) * bytes_,
        head * width,
        2.0 * body * rows,
        2.0 * head * float(part.batch),
        cache,
        rows,
        rows * layers,
    )
    return np.asarray(
        sum(c * feature for c, feature in zip(own._coefficients.tolist(), features, strict=True))
    )


def _own_rows(own: EnginePasses, grid: ShapeGrid, part: GridPart, cold: bool, mean: Array) -> Array:
    """The means with those of shapes whose own pass was measured, as `EnginePasses.forward_s`
    weighs them."""
    measured = [key for key in own._own if key[1:] == (part.batch, part.tokens, cold, False)]
    if not measured:
        return mean
    changed = mean.copy()
    for key in measured:
        for place in _places(grid, key[0]):
            _, ratio, error = min(own._own[key], key=lambda row: abs(row[0] - part.context))
            structure = own._residual.noise
            changed[place] += structure / (structure + error**2) * (ratio - changed[place])
    return changed


def _places(grid: ShapeGrid, arch: Architecture) -> list[tuple[int, int, int, int]]:
    """Where a shape stands in the grid."""
    alike = np.all([getattr(grid, name) == getattr(arch, name) for name in BODY_FIELDS], axis=0)
    whole = (
        (int(body), depth, window, head)
        for body in np.flatnonzero(alike)
        for depth, window, head in np.ndindex(grid.shape[1:])
    )
    return [place for place in whole if grid.at(place) == arch]
