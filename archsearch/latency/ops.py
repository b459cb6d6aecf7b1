"""The time of single ops, learnt from the rows of a Profile: seconds and a relative std. Never
touches a device.

A table is a physical base (constant + slopes x work, never negative) times what a Gaussian process
says about utilisation.

- CPU rows are measured warm and cold (weights in the last-level cache, or from memory), a table for
each: smooth, `Residual`.
- GPU rows are GEMMs and attention of CUDA graphs or of eager mode. Kernels are chosen from a
  library by shape and fill the multiprocessors in waves, so their times jump: `Kriging`, with wave
  counts among the inputs. What no row covers (norms, verification attention, other rank counts) is
  modelled here, with its source and a wide std beside it.

What was measured is looked up, what was not is interpolated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from archsearch.architecture.op_kinds import OP_KINDS
from archsearch.architecture.ops import (
    AllReduce,
    Attention,
    Elementwise,
    Experts,
    Gemm,
    LatentAttention,
    Op,
)
from archsearch.errors import MissingDataError
from archsearch.estimate import Array
from archsearch.hardware.device import Device
from archsearch.latency.all_reduce import AllReduces
from archsearch.latency.constants import constants
from archsearch.latency.datasheet import BANDWIDTH_SHARE, FORMAT_STD, datasheet_s
from archsearch.latency.regression import Kriging, Residual, nonnegative_fit
from archsearch.latency.stored import digest_of, stored_fit
from archsearch.profiles import Measurement, Profile
from archsearch.workload import DTYPE_BYTES

Answer = tuple[float, float]
"""seconds, relative std"""

# Kinds that are lines in their size, and so need no table.
LINES: Final = ("elementwise", "all_reduce")
# Kinds whose tables are fitted when a target needs them: most do not.
WHEN_ASKED: Final = ("experts", "latent_attention")
# Relative std of a row of one time (imported tables) whose profile does not say: two vLLM and
# TRT-LLM campaigns on the same GPU and GEMM lie 2 to 4 % apart (median).
MEASURED_STD: Final = {"gemm": 0.03, "attention": 0.03, "elementwise": 0.05, "all_reduce": 0.05}
OTHER_STD: Final = 0.05
STAND_IN_STD: Final = 0.01  # float16 asked, bfloat16 measured: the same kernels at the same speed

PEAK_SHARE: Final = 0.5
_SMALL: Final = constants()["elementwise"]
ELEMENTWISE_S: Final[dict[str, tuple[float, float, float]]] = _SMALL["kernels"]
ELEMENTWISE_STD: Final[float] = _SMALL["relative_std"]
UNKNOWN_ELEMENTWISE_S: Final[tuple[float, float, float]] = _SMALL["unknown"]
VERIFY_STD: Final = 0.25
SHORT: Final = 16  # tokens of context that cost next to nothing
# Of kernels priced by others that move as much: grouped GEMMs reach 50 to 96 % of the bandwidth
# that plain ones reach.
STAND_INS_STD: Final = 0.30


def plain_sizes(ops: Sequence[Op], multiprocessors: int = 0) -> tuple[Array, Array]:
    """Base [ops, columns] and place [ops, log sizes] by the row of OP_KINDS alone."""
    kind = OP_KINDS[ops[0].kind]
    return np.array([kind.base(op) for op in ops]), np.array([kind.place(op) for op in ops])


# --- CPU: smooth tables


@dataclass(frozen=True)
class OpTable:
    """The model of one op kind in one cache state on a CPU."""

    coefficients: Array
    residual: Residual

    @classmethod
    def fit(cls, ops: Sequence[Op], times_s: Array) -> OpTable:
        features, place = plain_sizes(ops)
        coefficients = nonnegative_fit(features, times_s)
        log_ratio = np.log(times_s / (features @ coefficients))
        return cls(coefficients, Residual.fit(place, log_ratio, bounds=(0.3, 12.0)))

    def predict(self, op: Op) -> Answer:
        """Seconds and relative std."""
        (base,), (place,) = plain_sizes([op])
        mean, std = self.residual.predict(place)
        return float(base @ self.coefficients) * math.exp(mean), std


# --- GPU: rough tables

TILE_ROWS: Final = 128
RAGGED_STD: Final[float] = constants()["graph"]["ragged_relative_std"]


def _waves(blocks: Array, multiprocessors: int) -> Array:
    """`blocks` thread blocks, one per multiprocessor, rounded up to whole waves."""
    return np.ceil(blocks / multiprocessors) * multiprocessors


def _idle(blocks: Array, multiprocessors: int) -> Array:
    """log(multiprocessors that the waves hold / blocks there are): 0 when the last wave is full.
    Cut at 0.7: with less than half a wave libraries split k instead."""
    return np.minimum(np.log(_waves(blocks, multiprocessors) / blocks), 0.7)


def gpu_gemm_sizes(ops: Sequence[Gemm], multiprocessors: int) -> tuple[Array, Array]:
    """What the base of a GEMM is linear in, [ops, 7], and where it lies among the others, [ops, 5].

    Base: 1, weights, activations read and written, the length of the sum (k), the weights with n
    rounded up to whole waves of 64 and of 128 wide tiles, arithmetic. Place: log m, n, k and how
    empty the last of these waves is.
    """
    m, n, k = np.array([(op.m, op.n, op.k) for op in ops], dtype=np.float64).T
    tiles = (np.ceil(n / 64), np.ceil(n / 128))
    waves = [
        _waves(count, multiprocessors) * width * k
        for count, width in zip(tiles, (64, 128), strict=True)
    ]
    features = np.stack([np.ones_like(m), n * k, m * (n + k), k, *waves, m * n * k], axis=1)
    idle = [_idle(count, multiprocessors) for count in tiles]
    place = np.stack([np.log(m), np.log(n), np.log(k), *idle], axis=1)
    return features, place


def seen_pairs(op: Attention) -> float:
    """Pairs of a query and a key it sees, per sequence and head: causal, and no further back than
    the window."""
    window = op.window or op.context + op.tokens
    # queries that do not see a whole window yet
    rising = min(op.tokens, max(0, window - op.context))
    return rising * op.context + rising * (rising + 1) / 2 + (op.tokens - rising) * window


def gpu_attention_sizes(ops: Sequence[Attention], multiprocessors: int) -> tuple[Array, Array]:
    """What the base of an attention is linear in, [ops, 7], and where it lies among the others,
    [ops, 9].

    Base: 1, the KV cache, arithmetic, queries, keys (one block walks over them), KV heads, and the
    KV cache with the heads rounded up to whole waves. Place: logs of what the kernel is split over,
    and how empty the last wave is.
    """
    columns = [
        (op.batch, op.tokens, op.keys(), op.q_heads, op.kv_heads, op.head_dim, seen_pairs(op))
        for op in ops
    ]
    batch, tokens, keys, q_heads, kv_heads, head_dim, pairs = np.array(columns, dtype=np.float64).T
    heads = batch * kv_heads
    kv = heads * keys * head_dim
    work = batch * q_heads * pairs * head_dim
    queries = batch * q_heads * tokens * head_dim
    waves = _waves(heads, multiprocessors) * keys * head_dim
    features = np.stack([np.ones_like(kv), kv, work, queries, keys, heads, waves], axis=1)
    sizes = (heads, batch, keys, q_heads / kv_heads, head_dim, tokens, pairs / (tokens * keys), kv)
    place = np.stack([*map(np.log, sizes), _idle(heads, multiprocessors)], axis=1)
    return features, place


Sizes = Callable[[Sequence[Any], int], tuple[Array, Array]]
GPU_SIZES: Final[dict[str, Sizes]] = {"gemm": gpu_gemm_sizes, "attention": gpu_attention_sizes}


@dataclass(frozen=True)
class GpuTable:
    """The model of one op kind on a GPU."""

    sizes: Sizes
    multiprocessors: int
    coefficients: Array
    residual: Kriging
    digest: str  # of its rows

    @classmethod
    def fit(
        cls,
        ops: Sequence[Op],
        times_s: Array,
        *,
        sizes: Sizes,
        multiprocessors: int,
        like: GpuTable | None = None,
        folder: Path | None = None,
    ) -> GpuTable:
        """Learn from `ops` and their times; with `like` the hyper-parameters of that table are kept
        (much quicker).

        `folder`: of the profile, where the fit of these very rows may be stored (`latency.stored`).
        """
        features, place = sizes(ops, multiprocessors)
        digest = digest_of(ops, times_s, multiprocessors)
        known = stored_fit(folder, digest, lambda base: np.log(times_s / (features @ base)), place)
        if known is not None:
            return cls(sizes, multiprocessors, *known, digest)
        coefficients = nonnegative_fit(features, times_s)
        log_ratio = np.log(times_s / (features @ coefficients))
        residual = Kriging.fit(place, log_ratio, like=None if like is None else like.residual)
        return cls(sizes, multiprocessors, coefficients, residual, digest)

    def predict_all(self, ops: Sequence[Op]) -> tuple[Array, Array]:
        """Seconds and relative stds, each [ops]."""
        features, place = self.sizes(ops, self.multiprocessors)
        mean, std = self.residual.predict(place)
        return features @ self.coefficients * np.exp(mean), std

    @property
    def row_std(self) -> float:
        """How far a row lies from what its neighbours agree on: the error of one row, as the table
        itself sees it."""
        return self.residual.calibration * math.sqrt(self.residual.noise)


# --- all ops of a profile


def stand_ins(op: Experts | LatentAttention) -> list[Gemm | Attention]:
    """Plain kernels that read the weights and the cache of `op` once and compute as much.

    Experts: one GEMM as wide as all that are touched, for the tokens that one of them sees. Latent
    attention: its projections, and attention of one KV head whose keys and values are together as
    wide as the latent.
    """
    if isinstance(op, Experts):
        # in experts of 16 bits
        touched = max(1, round(op.weight_elements() / (3 * op.hidden * op.inter)))
        m = max(1, round(op.pairs / max(op.touched, 1.0)))
        return [Gemm(m, 2 * op.inter * touched, op.hidden), Gemm(m, op.hidden, op.inter * touched)]
    m, rank = op.batch * op.tokens, op.latent - op.rope
    down = Gemm(m, op.q_rank + op.latent, op.hidden)
    queries = Gemm(m, op.heads * op.head_dim, op.q_rank or op.hidden)
    absorbed = [Gemm(m, op.heads * width, rank) for width in (op.head_dim - op.rope, op.v_dim)]
    seen = Attention(op.batch, op.tokens, op.context, op.heads, 1, op.latent // 2)
    return [down, queries, *absorbed, seen, Gemm(m, op.hidden, op.heads * op.v_dim)]


def steady(rows: list[Measurement]) -> list[Measurement]:
    """The rows that nothing disturbed; all of them where too few would be left."""
    kept = [row for row in rows if not row.grossly_noisy]
    return kept if len(kept) >= 0.6 * len(rows) else rows


def op_of(row: Measurement) -> Op:
    """The op that a row of a single op measured."""
    return OP_KINDS[row.kind].op(**row.sizes())


def _regime(op: Op) -> str:
    """Which table of a GPU prices the op: attention of one token, of some against a cache and of a
    whole prompt are different."""
    if isinstance(op, Gemm) and op.format:
        return f"gemm {op.format}"
    if not isinstance(op, Attention | LatentAttention):
        return op.kind
    regime = "prefill" if not op.context else "decode" if op.tokens == 1 else "verify"
    return regime if isinstance(op, Attention) else f"latent_{regime}"


class OpModel:
    """All ops of one (dtype, mode): seconds per call, with the weights cold (from memory) or warm
    (in the last-level cache).

    GPU tables seldom hold both states. A row that was measured in one state then answers for the
    other too; where both were measured, their ratio relates warm to cold. `prepare` prices
    many ops at once (0.1 ms each on a GPU table, most of it saved on the second ask); asking one by
    one takes about ten times as long.

    `like`: a model of nearly the same rows, whose hyper-parameters are kept: that takes a fraction
    of a first fit.
    Raises MissingDataError where GEMM, decode attention or (on a CPU) elementwise rows are too few.
    """

    def __init__(
        self, profile: Profile, dtype: str, mode: str, *, like: OpModel | None = None
    ) -> None:
        self.profile, self.dtype, self.mode = profile, dtype, mode
        self._device = profile.device
        self._gpu = self._device.get("kind") == "gpu"
        self._row_std = profile.provenance.get("row_relative_std", {}) if self._gpu else {}
        self._rows_dtype = self._dtype_of_rows()
        self._extra_std = STAND_IN_STD if self._rows_dtype != dtype else 0.0
        self._tables: dict[tuple[str, str], Any] = {}  # OpTable of a CPU, GpuTable
        self._measured: dict[tuple[Op, bool], Answer] = {}
        self._seen: dict[tuple[Op, bool], Answer] = {}
        self._like = like
        for kind in OP_KINDS:
            if kind not in LINES and kind not in WHEN_ASKED:
                self._fit_tables(kind)
        self._unfitted = set(WHEN_ASKED)
        self._elementwise = self._fit_elementwise()
        std = self._row_std.get("all_reduce", MEASURED_STD["all_reduce"]) + self._extra_std
        self._all_reduce = AllReduces(self._rows("all_reduce"), self._device, dtype, mode, std)
        self._require()

    # --- fitting

    def _dtype_of_rows(self) -> str:
        """On GPUs float16 and bfloat16 replace each other; no other dtype has a replacement."""
        pair = {"float16": "bfloat16", "bfloat16": "float16"}.get(self.dtype)
        if not self._gpu or pair is None or self.profile.select("gemm", self.dtype, self.mode):
            return self.dtype
        return pair if self.profile.select("gemm", pair, self.mode) else self.dtype

    def _rows(self, kind: str, cache: str | None = None) -> list[Measurement]:
        return steady(self.profile.select(kind, self._rows_dtype, self.mode, cache))

    def _std_of(self, row: Measurement) -> float:
        """How far a repeat of the row would lie from it."""
        if len(row.times_s) > 1 or not self._gpu:
            return max(row.relative_std, 0.01)
        return float(self._row_std.get(row.kind, MEASURED_STD.get(row.kind, OTHER_STD)))

    def _fit_tables(self, kind: str) -> None:
        warm, cold = (
            {op_of(row): row for row in self._rows(kind, cache)} for cache in ("warm", "cold")
        )
        if self._gpu or not cold:  # what was measured in one state only answers for both
            both = warm.keys() & cold.keys()
            cold = warm | cold
            warm = warm if len(both) >= OP_KINDS[kind].min_rows else {}
        for cache, rows in (("cold", cold), ("warm", warm)):
            regimes: dict[str, list[Op]] = {}
            for op in rows:
                regimes.setdefault(_regime(op) if self._gpu else kind, []).append(op)
            for regime, ops in regimes.items():
                table: OpTable | GpuTable | None = None
                if len(ops) >= OP_KINDS[kind].min_rows:
                    times_s = np.array([rows[op].median_s for op in ops])
                    if self._gpu:
                        known = self._like._tables.get((regime, cache)) if self._like else None
                        table = GpuTable.fit(
                            ops,
                            times_s,
                            sizes=GPU_SIZES.get(kind, plain_sizes),
                            multiprocessors=self._device.get("multiprocessors") or 128,
                            like=known,
                            folder=self.profile.folder if known is None else None,
                        )
                    else:
                        table = OpTable.fit(ops, times_s)
                    self._tables[regime, cache] = table
                for op in ops:
                    std = self._std_of(rows[op])
                    if isinstance(table, GpuTable):  # frameworks disagree by more than a row is off
                        std = max(0.01, min(std, table.row_std))
                    self._measured[op, cache == "cold"] = (rows[op].median_s, std + self._extra_std)

    def _fit_elementwise(self) -> dict[str, Answer]:
        """Constant and slope in elements, by name."""
        names: dict[str, list[Measurement]] = {}
        for row in self.profile.select("elementwise", self._rows_dtype, self.mode):
            names.setdefault(row.sizes()["name"], []).append(row)
        found = {}
        for name, rows in names.items():
            features = np.array([[1.0, float(row.sizes()["elements"])] for row in rows])
            constant, slope = nonnegative_fit(features, np.array([row.median_s for row in rows]))
            found[name] = (float(constant), float(slope))
        return found

    def _require(self) -> None:
        needed = {"gemm": "gemm", "decode" if self._gpu else "attention": "attention"}
        missing = [kind for name, kind in needed.items() if (name, "cold") not in self._tables]
        if not self._elementwise and not self._gpu:
            missing.append("elementwise")
        if not missing:
            return
        mend = "run archsearch profile longer (--budget 5m)"
        if self._gpu:
            mend = "import tables that hold them or measure with archsearch profile"
        raise MissingDataError(
            f"the profile has too few {', '.join(missing)} rows for {self.dtype} in {self.mode}"
            f" mode; {mend} or pass another --dtype"
        )

    # --- answers

    def op_s(self, op: Op, cold: bool) -> Answer:
        """Seconds and relative std of one op."""
        found = self._seen.get((op, cold))
        if found is None:
            self.prepare([op], cold)
            found = self._seen[op, cold]
        return found

    def prepare(self, ops: Iterable[Op], cold: bool) -> None:
        """Price many ops at once; `op_s` then answers from memory."""
        wanted = [op for op in dict.fromkeys(ops) if (op, cold) not in self._seen]
        for kind in {op.kind for op in wanted} & self._unfitted:
            self._unfitted.discard(kind)
            self._fit_tables(kind)
        tables: list[Op] = []
        for op in wanted:
            # Rows of experts scatter by 5 to 10 % (one run of each). Where all experts are read,
            # others of as many tokens are asked of the table, and a pass of as many as a row has
            # would stand out from its neighbours: so is it.
            smoothed = self._gpu and isinstance(op, Experts) and op.touched > op.experts - 0.5
            known = None if smoothed else self._measured.get((op, cold))
            # rows of some kinds do not tell warm from cold
            if (
                not known
                and not smoothed
                and self._gpu
                and (_regime(op), "warm") not in self._tables
            ):
                known = self._measured.get((op, not cold))
            if isinstance(op, Elementwise):
                self._seen[op, cold] = known or self._elementwise_s(op)
            elif isinstance(op, AllReduce):
                self._seen[op, cold] = self._all_reduce(op)
            elif known:
                self._seen[op, cold] = known
            else:
                tables.append(op)
        if self._gpu:
            groups: dict[str, list[Op]] = {}
            for op in tables:
                groups.setdefault(_regime(op), []).append(op)
            for regime, group in groups.items():
                for op, found in zip(group, self._gpu_s(regime, group, cold), strict=True):
                    self._seen[op, cold] = found
        else:
            for op in tables:
                self._seen[op, cold] = self._cpu_s(op, cold)

    def source(self, op: Op) -> str:
        """`measured` where the op itself (or, for elementwise and all-reduce, ops of its kind) has
        rows, else `modelled`."""
        if isinstance(op, Elementwise):
            return "measured" if op.name in self._elementwise else "modelled"
        if isinstance(op, AllReduce):
            return "measured" if self._all_reduce.measured(op.ranks) else "modelled"
        return "measured" if (op, True) in self._measured else "modelled"

    def _too_few(self, kind: str, op: Op) -> MissingDataError:
        return MissingDataError(
            f"the profile has too few {kind} rows to price {op}; measure more of them"
        )

    def _cpu_s(self, op: Op, cold: bool) -> Answer:
        table = self._tables.get((op.kind, "cold"))
        if table is None:
            if isinstance(op, Experts | LatentAttention):
                return self._as_others(op, cold)
            raise self._too_few(op.kind, op)
        seconds, std = self._measured.get((op, True)) or table.predict(op)
        warm = self._tables.get((op.kind, "warm"))
        if not cold and warm is not None:
            other, other_std = warm.predict(op)
            # warm rows exist for one or two tokens only: keep their ratio to cold
            if isinstance(op, Gemm) and op.m > 2:
                small = Gemm(1, op.n, op.k)
                ratio = warm.predict(small)[0] / table.predict(small)[0]
                other, other_std = seconds * min(1.0, ratio), math.hypot(std, other_std)
            if other < seconds:
                return other, other_std
        return seconds, std

    def _gpu_s(self, regime: str, ops: Sequence[Any], cold: bool) -> list[Answer]:
        """Seconds and stds of ops of one regime that were not measured."""
        table = self._tables.get((regime, "cold"))
        if table is None:
            if regime.startswith("gemm "):
                return self._narrow_s(ops, cold)
            if regime == "latent_verify" and ("latent_decode", "cold") in self._tables:
                return [self._latent_s(op, cold) for op in ops]
            if regime == "experts" or regime.startswith("latent"):
                return [self._as_others(op, cold) for op in ops]
            if regime not in ("verify", "prefill"):
                raise self._too_few(regime, ops[0])
            # together: much quicker
            self.prepare([other for op in ops for other in self._packed(op)], cold)
            return [self._attention_s(op, cold) for op in ops]
        seconds, stds = table.predict_all(ops)
        warm = self._tables.get((regime, "warm"))
        if not cold and warm is not None:
            warm_s, warm_stds = warm.predict_all(ops)
            quicker = warm_s < seconds
            seconds, stds = np.where(quicker, warm_s, seconds), np.where(quicker, warm_stds, stds)
        # Imported tables hold none of these; whoever measures has them among the rows.
        if regime.startswith("gemm") and self.profile.imported:
            ragged = np.array([op.m > TILE_ROWS and op.m % TILE_ROWS > 0 for op in ops])
            stds = np.where(ragged, np.hypot(stds, RAGGED_STD), stds)
        return [
            (float(s), float(std) + self._extra_std) for s, std in zip(seconds, stds, strict=True)
        ]

    def _narrow_s(self, ops: Sequence[Gemm], cold: bool) -> list[Answer]:
        """GEMMs with weights in a format of which there are no rows: the 16-bit kernel of the
        same shape, by the datasheet's ratio of the two with the share of the bandwidth that such
        kernels reach (`datasheet.FORMAT_SHARE`); of the rows' own dtype as they are."""
        plain = [replace(op, format="") for op in ops]
        self.prepare(plain, cold)
        device = Device.from_dict(self._device)
        found = []
        for op, whole in zip(ops, plain, strict=True):
            seconds, std = self._seen[whole, cold]
            if op.format != self._rows_dtype:
                own, wide = (datasheet_s(device, each, self._rows_dtype) for each in (op, whole))
                seconds, std = seconds * own / wide, math.hypot(std, FORMAT_STD[op.format])
            found.append((seconds, std))
        return found

    def _as_others(self, op: Experts | LatentAttention, cold: bool) -> Answer:
        """A kernel of which there are no rows, from those that move as many bytes and compute as
        much."""
        parts = [self.op_s(part, cold) for part in stand_ins(op)]
        total = sum(seconds for seconds, _ in parts)
        std = sum(seconds * std for seconds, std in parts) / total
        return total, math.hypot(std, STAND_INS_STD)

    def _latent_s(self, op: LatentAttention, cold: bool) -> Answer:
        """Latent attention of several tokens, of which nobody has rows.

        The cache is read once, since all heads and tokens share one latent; projections take what
        they take for as many sequences of hardly any context; arithmetic takes over where it is
        more than the cache's time.
        """
        last = op.keys() - 1
        cases = ((op.batch, last), (op.batch, SHORT), (op.batch * op.tokens, SHORT))
        full, near, many = (
            self.op_s(replace(op, batch=batch, tokens=1, context=context), cold)
            for batch, context in cases
        )
        peak = float((self._device.get("flops_per_s") or {}).get("bfloat16") or math.inf)
        on_cache = max(0.0, full[0] - near[0])
        computed = max(0.0, op.attention_flops() / (PEAK_SHARE * peak) - on_cache)
        return full[0] + max(0.0, many[0] - near[0]) + computed, math.hypot(full[1], VERIFY_STD)

    def _attention_s(self, op: Attention, cold: bool) -> Answer:
        """Attention of several tokens of which there are no rows: as flash decoding runs it, or
        bound by arithmetic.

        Flash decoding packs all queries that share a KV head into one block, so `tokens` of them
        cost about one token of a model with `tokens` times the query heads: the cache is read once.
        With many tokens arithmetic decides: the speed at which the prefill rows
        compute the same keys (PEAK_SHARE of the datasheet's without such rows), for the share of
        query-key pairs under the causal mask.
        """
        keys, (one, *whole_prompt) = op.keys(), self._packed(op)
        packed, std = self.op_s(one, cold)
        pairs = seen_pairs(op)
        if whole_prompt:
            whole, whole_std = self.op_s(whole_prompt[0], cold)
            computed = whole * pairs / (keys * (keys + 1) / 2)
            computed_std = math.hypot(whole_std, VERIFY_STD)
        else:
            flops = 4.0 * op.batch * pairs * op.q_heads * op.head_dim
            peak = (self._device.get("flops_per_s") or {}).get(self.dtype)
            computed, computed_std = (flops / (PEAK_SHARE * peak) if peak else 0.0), VERIFY_STD
        if computed > packed:
            return computed, computed_std
        return packed, math.hypot(std, VERIFY_STD)

    def _packed(self, op: Attention) -> list[Attention]:
        """What attention of several tokens is priced by: one token of a model with more heads and,
        where prefill was measured, the whole prompt."""
        keys = op.keys()
        one = Attention(
            op.batch, 1, max(1, keys - 1), op.q_heads * op.tokens, op.kv_heads, op.head_dim
        )
        if ("prefill", "cold") not in self._tables or not op.context:
            return [one]
        return [one, Attention(op.batch, keys, 0, op.q_heads, op.kv_heads, op.head_dim)]

    def _elementwise_s(self, op: Elementwise) -> Answer:
        """From rows of the same name; on a GPU without them from ELEMENTWISE_S."""
        if op.name in self._elementwise or not self._gpu:
            constant, slope = self._elementwise.get(op.name, (0.0, 0.0))
            return constant + slope * op.elements, 0.15
        in_graph, alone, moved = ELEMENTWISE_S.get(op.name, UNKNOWN_ELEMENTWISE_S)
        bandwidth = BANDWIDTH_SHARE * float(self._device["bandwidth_bytes_per_s"])
        moved_s = moved * op.elements * DTYPE_BYTES[self.dtype] / bandwidth
        return (in_graph if self.mode == "graph" else alone) + moved_s, ELEMENTWISE_STD
