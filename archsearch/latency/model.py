"""Predict the latency of any op and any forward pass from a Profile, with a standard deviation.
Never touches a device.

Three layers, each learnt from rows of its kind:

1. ops: base(op) = constant + slope x bytes, times a Gaussian process in log sizes (utilisation is
   not a constant: kernels change with the shape, and for small m it is not even monotone);
2. a pass: coefficients >= 0 on {1, layers, GEMMs, head, attention, elementwise, trimmed head}
   fitted to whole layers and whole models, which adds what single ops miss (launches, host time,
   cost per pass);
3. what is left: a Gaussian process over the shape, whose leave-one-out errors are the model's own
account of its precision.

Weights of a small draft stay in the last-level cache from its second token on, and every
verification pass pushes them out. So ops are measured warm and cold, a pass in a loop lies between
the two by how much of its weights fit the cache, and draft_s(gamma) = cold + (gamma - 1) * steady.

A GPU profile that holds kernels but no whole passes (an imported table) has nothing to fit 2 and 3
to: its passes are composed of their ops and of stated constants (`archsearch.latency.composed`);
`summary()["pass"]` says which of the two it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

import numpy as np

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.grid import Pass, ShapeGrid, priced
from archsearch.architecture.ops import AllReduce, Op, Part, PassOps, model_pass, sample_op
from archsearch.capacity import shard
from archsearch.drafters.drafter import Drafter, RoundPlan, RoundRows
from archsearch.engine_facts import engine_facts
from archsearch.engine_rounds import EngineRounds, engine_rounds
from archsearch.errors import MissingDataError
from archsearch.estimate import Array, Estimate, Numbers
from archsearch.hardware.device import Device
from archsearch.latency.added import AddedFit, fit_overheads
from archsearch.latency.attention import serving_attention
from archsearch.latency.composed import ComposedPass, all_reduce_wait, composable, pace, sync_waits
from archsearch.latency.constants import constants
from archsearch.latency.draft_passes import DraftPasses
from archsearch.latency.engine_passes import (
    SEVERAL_TOKENS,
    EnginePasses,
    known_engines,
    several_tokens,
)
from archsearch.latency.fitted_passes import GROUPS, MIN_ROWS, FittedPasses, asked_pass
from archsearch.latency.ops import OpModel
from archsearch.latency.round_fit import RoundFit, with_measured_rounds
from archsearch.latency.rounds import PACE_CORRELATION, verified_rows
from archsearch.profiles import ForwardShape, Profile
from archsearch.workload import DTYPE_BYTES, Workload


class LatencyModel(FittedPasses, DraftPasses):
    """Latency of forward passes from a Profile, for one dtype and mode; with `engine`, what that
    engine adds (see `round`).

    `rounds`: how the engine's version runs rounds on a GPU (default: the newest known); it plays no
    part on a CPU, where what an engine adds is measured with the profile. `tables`: kernels that
    compose passes in place of the profile's own, of this GPU or a relative (then carried over:
    `archsearch.latency.transfer`), at the pace of the profile's own GEMMs. `target_dtype`: of the
    target that this one prices drafts beside, whose cache is theirs. `composed_` puts the passes of
    a composed model together; None of a fitted one. Raises MissingDataError where the profile holds
    too few rows.
    """

    def __init__(
        self,
        profile: Profile,
        dtype: str,
        mode: str = "eager",
        engine: str | None = None,
        rounds: EngineRounds | None = None,
        tables: Profile | None = None,
        target_dtype: str | None = None,
    ) -> None:
        self.profile, self.tables = profile, tables or profile
        other = self.tables.device["key"] != profile.device["key"]
        self.rows_ = len(self.tables.rows)
        self.carried_to = Device.from_dict(profile.device) if other else None
        self.engine, self.facts = engine, engine_facts(engine)
        self.dtype = dtype
        self.mode = mode
        self.dtype_bytes = DTYPE_BYTES[dtype]
        self._parts = {}
        self._passes: dict[tuple[object, ...], Estimate] = {}
        self.composed_: ComposedPass | None = None
        self.engine_: EnginePasses | None = None
        if engine is not None and engine in known_engines(profile, dtype, mode):
            self.engine_ = EnginePasses(profile, dtype, mode, engine)
        # whole passes are fitted where there are enough of them: they hold what kernels do not
        whole = len(profile.select("forward", dtype, mode))
        if tables or whole < MIN_ROWS["forward"] and composable(profile, dtype):
            self.composed_ = self._composed()
            self.target_correlation = PACE_CORRELATION
        elif self.engine_ is None or not self.facts.gguf:
            self.ops = OpModel(profile, dtype, mode)
            self._fit()
        self.added_ = fit_overheads(profile.select("engine", dtype, mode))
        measured = self.engine_ is not None or any(name == engine for name, _ in self.added_)
        # Rows of what an engine adds to its passes hold the choice of tokens; without them a GPU's
        # pass is charged with it.
        self._chooses = profile.device.get("kind") == "gpu" and not measured
        # Under CUDA graphs the rows are torch's attention; an engine in a process of its own runs
        # another.
        foreign = (
            self._chooses and mode == "graph" and engine is not None and not self.facts.in_process
        )
        capability = profile.device.get("compute_capability")
        self._attention_std = serving_attention(capability).std if foreign else 0.0
        self.round_fit_: RoundFit | None = None
        self.wait, self.cache_dtype, self.quantise_s = all_reduce_wait(None, None), dtype, 0.0
        self.target_dtype = target_dtype or dtype
        if self._chooses and engine is not None:
            self.rounds = rounds or engine_rounds(engine)
            self._take_wait()
            self.rounds, self.round_fit_ = with_measured_rounds(self, profile)

    def _engine_costs(self, vocab_size: int) -> AddedFit | None:
        """The engine's costs at the measured vocabulary nearest to `vocab_size`; None where the
        profile holds no rows of it."""
        known = [key for key in self.added_ if key[0] == self.engine]
        nearest = min(known, key=lambda key: abs(math.log(key[1] / vocab_size)), default=None)
        return None if nearest is None else self.added_[nearest]

    # --- answers

    def pass_s(self, arch: Architecture, asked: Pass, ranks: int) -> Estimate:
        """`forward_s` of a part, and whether its weights come from memory."""
        part, cold = asked
        key = (arch, part, ranks, cold)
        if (found := self._passes.get(key)) is not None:
            return found
        # the tables' weights always come from memory: cold or not is the same
        if self.composed_ is not None:
            return self._remember(key, self.composed_.step_s(arch, [part], ranks))
        # fitted on one device, so asked at what one rank runs
        step = self._device_s(shard(arch, ranks), part, cold)
        step = step.plus(Estimate(*self._on_top(arch, part, ranks), "modelled"))
        if self._attention_std:
            step = step.plus(self._other_attention(shard(arch, ranks), part, cold))
        return self._remember(key, step)

    def prepare(self, wanted: Iterable[tuple[Architecture, Part, int]]) -> None:
        """Price many passes (architecture, part, ranks) in one go: much quicker than one by one
        where passes are composed of kernels; `pass_s` then answers from memory."""
        if self.composed_ is None:
            return
        missing = (key for key in wanted if (*key, False) not in self._passes)
        new = {key: self.composed_.pass_ops(key[0], [key[1]], key[2]) for key in missing}
        self.composed_.prepare(new.values())
        for (arch, part, ranks), ops in new.items():
            found = self.composed_.ops_s(ops)
            for cold in (False, True):
                self._remember((arch, part, ranks, cold), found)

    def measured_pass_s(self, shape: ForwardShape, cold: bool) -> Estimate:
        """What a row of kind `forward` would say: a pass on one device that ends with the
        logits."""
        arch, part = asked_pass(shape)
        if self.composed_ is not None:
            return self.composed_.step_s(arch, [part], choose=False)
        return self._device_s(arch, part, cold)

    def _on_top(self, arch: Architecture, part: Part, ranks: int) -> tuple[float, float]:
        """Seconds and std of what comes on top of a fitted pass: the sums between ranks, and the
        choice of a token after each position whose logits are computed. Of a grid without std."""
        value, std = self._between_ranks(arch, part, ranks) if ranks > 1 else (0.0, 0.0)
        if self._chooses:
            wanted = part.tokens if part.logits is None else part.logits
            op = sample_op(arch, batch=part.batch, tokens=wanted)
            seconds = priced(op, lambda ops: [self.ops.op_s(each, True)[0] for each in ops])
            own = 0.0 if np.ndim(seconds) else self.ops.op_s(op, True)[1] * seconds
            value, std = value + seconds, (std**2 + own**2) ** 0.5
        return value, std

    def _between_ranks(self, arch: Architecture, part: Part, ranks: int) -> tuple[float, float]:
        """Seconds and std of the all-reduces of a pass, and in a graph how long ranks wait for one
        another (as in composed passes).

        Their errors are the table's and so add up. Raises MissingDataError on a CPU.
        """
        ops = model_pass(arch, [part], ranks=ranks)
        value, std = 0.0, 0.0
        for op, count in (*ops.in_layers.items(), *ops.outside.items()):
            if isinstance(op, AllReduce):
                seconds = priced(op, self._reduces_s)
                value = value + count * seconds
                std = std if ops.of_grid else std + count * seconds * self.ops.op_s(op, True)[1]
        if self.mode != "graph":
            return value, std
        waits = sync_waits(ops.all_reduces(), ranks)
        return value + self.wait.value * waits, (std**2 + (self.wait.std * waits) ** 2) ** 0.5

    def _reduces_s(self, ops: Sequence[Op]) -> list[float]:
        """Seconds of all-reduces; in eager mode the host launches each."""
        self.ops.prepare(ops, True)
        launch = float(constants()["eager"]["all_reduce_s"]) if self.mode == "eager" else 0.0
        return [
            max(self.ops.op_s(op, True)[0], launch if self.ops.source(op) != "measured" else 0.0)
            for op in ops
        ]

    def _other_attention(self, arch: Architecture, part: Part, cold: bool) -> Estimate:
        """No time, but how unsure the attention of a pass is where the engine does not run the
        kernels that were measured."""
        # as much of the pass as the fit gives to attention, [GROUPS]
        shares = self._features(arch, part, cold, self.cache_)
        seconds = float(shares[GROUPS.index("attention")] * self.coefficients_["attention"])
        return Estimate(0.0, self._attention_std * seconds, "modelled")

    def grid_s(self, grid: ShapeGrid, passes: Sequence[Pass], ranks: int) -> list[Numbers]:
        """Seconds of each pass of each shape of a grid, as of one but without std."""
        if self.engine_ is not None:
            return self.engine_.grid_s(grid, passes)
        if self.composed_ is not None:
            parts = (self.composed_.pass_ops(grid, [part], ranks) for part, _ in passes)
            return [self.composed_.mean_s(each) for each in parts]
        asked = [self._single(each) for each in passes]
        found = self._grid_device_s(shard(grid, ranks), asked)  # type: ignore[arg-type]
        for i, (part, _) in enumerate(passes):
            if asked[i] != passes[i]:
                found[i] = found[i] * several_tokens(grid, part)[0]
            found[i] = found[i] + self._on_top(grid, part, ranks)[0]
        return found

    @property
    def prices_ops(self) -> bool:
        """Whether single ops have a price: not where only the engine's whole passes were
        measured."""
        return self.composed_ is not None or hasattr(self, "ops")

    def op_s(self, op: Op) -> float:
        """Seconds of one op, weights out of memory."""
        found = self.composed_.op_s(op) if self.composed_ else self.ops.op_s(op, True)
        return float(found[0])

    def ops_s(self, ops: PassOps, cold: bool = True) -> Estimate:
        """Seconds of one pass given by its ops: what is not a whole model, such as a head on a
        target's hidden states.

        On a GPU it is composed of its kernels, also where whole models were measured, whose
        coefficients say nothing of it. On a CPU the coefficients of whole passes price it, those of
        the engine's own where they were measured; `cold` as in `pass_s`. Raises MissingDataError
        for a measured GPU in eager mode: what the host adds is in no kernel's row.
        """
        if self.kernels is not None:
            return self.kernels.ops_s(ops)
        if self.engine_ is not None:
            return self.engine_.ops_s(ops, cold)
        if self.profile.device.get("kind") == "cpu":
            return self._fitted_ops_s(ops, cold)
        raise MissingDataError(
            "a pass given by its ops is composed of GPU kernels in CUDA graphs; this profile is"
            f" fitted to whole models in {self.mode} mode (--gpu h100 --mode graph prices such a"
            " drafter on a shipped profile)"
        )

    def added_layer_s(self, target: Architecture) -> float:
        """As measured; 0 where it was not."""
        costs = self._engine_costs(target.vocab_size)
        return costs.layer_s if costs is not None else 0.0

    @cached_property
    def kernels(self) -> ComposedPass | None:  # type: ignore[override]
        """What composes a pass of its ops, where this profile has such rows."""
        if self.composed_ is None and self.mode == "graph" and composable(self.profile, self.dtype):
            return self._serving(self._composed())
        return self.composed_

    @property
    def pace(self) -> float:
        """How long kernels take here, in what the tables say."""
        return self.composed_.pace if self.composed_ is not None else 1.0

    def _composed(self) -> ComposedPass:
        found = ComposedPass(self.tables, self.dtype, self.mode, self.carried_to, self.engine)
        if self.tables is not self.profile:
            found.pace = pace(self.profile, found, self.dtype)
        return found

    def _take_wait(self) -> None:
        device = self.carried_to
        known = self.profile.device.get("compute_capability")
        wait = all_reduce_wait(self.rounds, device.compute_capability if device else known)
        cache = self.dtype if self.rounds is None else self.rounds.cache_dtype(self.target_dtype)
        quantise = self.rounds.quantise_s.value if self.rounds is not None else 0.0
        # passes that were priced stay unless one of these changed
        taken = (wait, cache, quantise)
        if taken == (self.wait, self.cache_dtype, self.quantise_s):
            return
        self.wait, self.cache_dtype, self.quantise_s = taken
        if self.composed_ is not None:
            self.composed_ = self._serving(self.composed_)
        self._passes = {}
        self.__dict__.pop("kernels", None)

    def _serving(self, passes: ComposedPass) -> ComposedPass:
        narrow = min(self.dtype, self.target_dtype, key=lambda name: DTYPE_BYTES[name])
        return passes.serving(self.rounds, narrow, self.wait, self.cache_dtype)

    def _remember(self, key: tuple[object, ...], estimate: Estimate) -> Estimate:
        if len(self._passes) > 200_000:
            self._passes.clear()
        self._passes[key] = estimate
        return estimate

    def decode_s(self, target: Architecture, workload: Workload) -> Estimate:
        """One plain decode step of the target, with what the engine adds per token."""
        costs = self._engine_costs(target.vocab_size)
        if self.engine_ is not None:
            own = self.engine_.rest_.plain_s(workload.batch_size)
        elif costs is not None:
            own = costs.plain_s()
        else:
            return super().decode_s(target, workload)
        return self.verify_s(target, workload, 0).plus(own)

    def verify_s(self, target: Architecture, workload: Workload, gamma: int) -> Estimate:
        """One target pass over gamma + 1 tokens per sequence."""
        found = super().verify_s(target, workload, gamma)
        batch, tokens = verified_rows(self.rounds, workload.batch_size, gamma)
        if self.composed_ is None or self.engine_ is not None or tokens == 1:
            return found
        # More tokens take no less. Tables of two kernels may say so: DeepSeek-V3's attention on a
        # B200, for one token and four.
        part = Part(batch, 1, workload.context_len)
        one = self.model_pass_s(target, (part, False), workload.tensor_parallel, is_target=True)
        return found if found.value >= one.value else Estimate(one.value, found.std, found.source)

    def first_tokens(self, gamma: int) -> int:
        """As measured in the engine, where it was."""
        measured = self.engine_ and self.engine_.first_pass.tokens(gamma)
        return measured or super().first_tokens(gamma)

    @property
    def draft_logits(self) -> int | None:  # type: ignore[override]
        """One token per sequence needs logits; an engine's own passes say nothing of them."""
        return None if self.engine_ is not None else 1

    def model_pass_s(
        self, arch: Architecture, asked: Pass, ranks: int, *, is_target: bool = False
    ) -> Estimate:
        """As the engine was measured where it was; where llama.cpp was not, whose kernels for
        several tokens are not torch's, its passes over them are a prior on those over one."""
        part, cold = asked
        if self.engine_ is not None:
            return self.engine_.forward_s(arch, part, cold=cold or is_target, is_target=is_target)
        single = self._single(asked)
        found = super().model_pass_s(arch, single, ranks, is_target=is_target)
        if single == asked:
            return found
        factor, std = several_tokens(arch, part)
        std = math.hypot(factor * found.std, std * found.value)
        return Estimate(factor * found.value, std, SEVERAL_TOKENS.source)

    def _single(self, asked: Pass) -> Pass:
        """The pass over one token from which one over several is guessed; where nothing is guessed
        the pass itself."""
        part, cold = asked
        own = not self.facts.gguf or self.engine_ is not None
        guessed = not own and self.profile.device.get("kind") == "cpu"
        return (replace(part, tokens=1), cold) if guessed else asked

    def added_s(self, target: Architecture, workload: Workload, gamma: int) -> Estimate:
        """As measured where it was."""
        if self.engine_ is not None:
            return self.engine_.rest_.round_s(gamma, workload.batch_size)
        known = self._engine_costs(target.vocab_size)
        return known.round_s(gamma) if known else super().added_s(target, workload, gamma)

    def drafted_s(
        self, drafter: Drafter, rows: RoundRows, plan: RoundPlan
    ) -> tuple[Estimate, Estimate] | None:
        """As the engine was measured with such drafters; None where it was not."""
        if self.engine_ is None:
            return None
        return self.engine_.drafted_.round_s(drafter, rows, plan, self.engine_.plan_s(plan))

    def _in(self, dtype: str) -> LatencyModel:
        tables = None if self.tables is self.profile else self.tables
        own = (self.profile, dtype, self.mode, self.engine, self.rounds, tables)
        # an engine's own passes stand beside its own only
        measured = self.engine_ or (self.facts.gguf and not self.composed_)
        with suppress(MissingDataError):
            found = LatencyModel(*own, self.dtype)
            if not measured or (self.engine_ and found.engine_):
                return found
        lacking = self.dtype if measured and not self.engine_ else dtype
        known = dict.fromkeys(
            name
            for name, mode in self.tables.combinations()
            if not measured or self.engine in known_engines(self.profile, name, mode)
        )
        raise MissingDataError(
            f"the profile holds no passes{f' of {self.engine}' if measured else ''} in {lacking};"
            f" it has {', '.join(known) or 'none'}"
        )

    def with_rounds(self, rounds: EngineRounds) -> LatencyModel:
        """The same latency with another version of its engine, or other switches: as measured where
        the profile holds such."""
        changed = super().with_rounds(rounds)
        changed.rounds, changed.round_fit_ = with_measured_rounds(changed, changed.profile)
        return changed

    @property
    def largest_batch(self) -> int | None:
        """The largest batch of a pass that was measured on a CPU, where larger ones are guesses;
        None on GPUs, whose op rows span the batches."""
        if self.profile.device.get("kind") != "cpu":
            return None
        if self.engine_ is not None:
            return self.engine_.largest_batch
        rows = self.profile.select("forward", self.dtype, self.mode)
        return max((ForwardShape.of(row).batch for row in rows), default=1)

    def summary(self) -> dict[str, object]:
        """What was learnt, for reports: `pass` is `fitted` (to whole passes: coefficients, cache,
        leave-one-out errors) or `composed` (of kernels and stated constants)."""
        known: dict[str, object] = {"dtype": self.dtype, "mode": self.mode, "rows": self.rows_}
        known["pass"] = "composed" if self.composed_ else "fitted"
        known["engines"] = {
            f"{name} (vocabulary {size})": costs.to_dict()
            for (name, size), costs in self.added_.items()
        }
        if self.round_fit_ is not None:
            known["rounds"] = self.round_fit_.to_dict()
        if self.engine_ is not None:
            known["engine_passes"] = self.engine_.to_dict()
        if self.composed_ is not None:
            words = self.rounds.costs.source if self.rounds is not None else None
            carried = {} if self.carried_to is None else {"carried_to": self.carried_to.key}
            return known | carried | {"constants": constants()[self.mode], "engine": words}
        errors = self.left_out_
        if errors is None:
            return known | {"pass": "engine"}
        return known | {
            "coefficients": self.coefficients_,
            "cache_half_bytes": self.cache_.half_bytes,
            "cache_steepness": self.cache_.steepness,
            "leave_one_out_median": float(np.median(errors)),
            "leave_one_out_within_12_percent": float(np.mean(errors <= 0.12)),
        }

    to_dict = summary

    @property
    def left_out_(self) -> Array | None:
        """|relative error| of whole passes left out one at a time; None where none are fitted."""
        return np.abs(self.loo_) if self.composed_ is None and hasattr(self, "ops") else None
