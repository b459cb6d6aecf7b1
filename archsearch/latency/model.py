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

Weights of a small draft stay in the last-level cache from its second token on, and are pushed out
by every verification pass. So ops are measured warm and cold, a pass in a loop lies between the two
by how much of its weights fit the cache, and the first draft token of a round is priced cold:
draft_s(gamma) = cold + (gamma - 1) * steady.

A GPU profile that holds kernels but no whole passes (an imported table) has nothing to fit 2 and 3
to: its passes are composed of their ops and of stated constants (`archsearch.latency.composed`);
`summary()["pass"]` says which of the two it is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.ops import (
    AllReduce,
    PassOps,
    head_ops,
    layer_ops,
    sample_op,
)
from archsearch.capacity import shard
from archsearch.drafters.drafter import Drafter, RoundPlan, RoundRows
from archsearch.engine_facts import engine_facts
from archsearch.engine_rounds import EngineRounds, engine_rounds
from archsearch.errors import MissingDataError
from archsearch.estimate import Estimate
from archsearch.hardware.device import Device
from archsearch.latency.added import AddedFit, fit_overheads
from archsearch.latency.attention import serving_attention
from archsearch.latency.composed import (
    ComposedPass,
    Part,
    all_reduce_wait,
    composable,
    constants,
    sync_waits,
)
from archsearch.latency.engine_passes import EnginePasses, known_engines
from archsearch.latency.fitted_passes import GROUPS, MIN_ROWS, Array, FittedPasses, asked_pass
from archsearch.latency.measured_rounds import with_measured_rounds
from archsearch.latency.ops import OpModel
from archsearch.latency.round_fit import RoundFit
from archsearch.latency.rounds import PACE_CORRELATION, LatencyOfRounds, plain_step, verified_rows
from archsearch.latency.transfer import kernels_of
from archsearch.profiles import ForwardShape, Measurement, Profile
from archsearch.workload import DTYPE_BYTES, Workload


class LatencyModel(FittedPasses, LatencyOfRounds):
    """Latency of forward passes from a Profile, for one dtype and mode; with `engine`, what that
    engine adds (see `round`).

    `rounds`: how the engine's version runs rounds on a GPU (default: the newest known); it plays no
    part on a CPU, where what an engine adds is measured with the profile. `carried_to`: a GPU that
    nobody measured, answered from this profile's kernels (`archsearch.latency.transfer`). After
    construction of a fitted model `coefficients_` (by GROUPS), `cache_` and `loo_` (leave-one-out
    relative errors of whole passes) hold what was learnt; of a composed one `composed_` is what
    puts its passes together, and None otherwise. Raises MissingDataError where the profile holds
    too few rows.
    """

    def __init__(
        self,
        profile: Profile,
        dtype: str,
        mode: str = "eager",
        engine: str | None = None,
        rounds: EngineRounds | None = None,
        carried_to: Device | None = None,
    ) -> None:
        self.profile, self.carried_to = (
            profile if carried_to is None else kernels_of(profile),
            carried_to,
        )
        profile = self.profile
        self.engine, self.facts = engine, engine_facts(engine)
        self.dtype = dtype
        self.mode = mode
        self.dtype_bytes = DTYPE_BYTES[dtype]
        self._parts: dict[tuple[Any, ...], tuple[Array, Array]] = {}
        self._passes: dict[tuple[Any, ...], Estimate] = {}
        self.outliers_: list[Measurement] = []
        self.composed_: ComposedPass | None = None
        self.engine_: EnginePasses | None = None
        if engine is not None and engine in known_engines(profile, dtype, mode):
            self.engine_ = EnginePasses(profile, dtype, mode, engine)
        whole = len(profile.select("forward", dtype, mode))
        if whole < MIN_ROWS["forward"] and composable(profile, dtype):
            self.composed_ = ComposedPass(profile, dtype, mode, carried_to, engine)
            self.target_correlation = PACE_CORRELATION
        elif self.engine_ is None or not self.facts.gguf:
            self.ops = OpModel(profile, dtype, mode)
            self._fit()
        self._engine = fit_overheads(profile.select("engine", dtype, mode))
        measured = self.engine_ is not None or any(name == engine for name, _ in self._engine)
        # Rows of what an engine adds to its passes hold the choice of tokens; without them a GPU's
        # pass is charged with it.
        self._chooses = profile.device.get("kind") == "gpu" and not measured
        # Under CUDA graphs the rows are torch's attention; an engine in a process of its own runs
        # another.
        foreign = (
            self._chooses and mode == "graph" and engine is not None and not self.facts.in_process
        )
        self._attention_std = serving_attention(profile).std if foreign else 0.0
        self.round_fit_: RoundFit | None = None
        self.wait, self.cache_dtype = all_reduce_wait(None, None), dtype
        if profile.device.get("kind") == "gpu" and engine is not None and not measured:
            self.rounds = rounds or engine_rounds(engine)
            self._take_wait()
            self.rounds, self.round_fit_ = with_measured_rounds(self, profile)

    def _engine_costs(self, vocab_size: int) -> AddedFit | None:
        """The engine's costs at the measured vocabulary nearest to `vocab_size`; None where the
        profile holds no rows of it."""
        sizes = [size for name, size in self._engine if name == self.engine]
        if self.engine is None or not sizes:
            return None
        return self._engine[
            self.engine, min(sizes, key=lambda size: abs(math.log(size / vocab_size)))
        ]

    # -- answers
    # ----------------------------------------------------------------------------------------------

    def forward_s(
        self,
        arch: Architecture,
        *,
        batch: int = 1,
        tokens: int = 1,
        context: int = 256,
        ranks: int = 1,
        cold: bool = False,
        logits: int | None = None,
    ) -> Estimate:
        """Seconds of one forward pass of `tokens` new tokens per sequence against `context` cached
        ones, on a GPU with the choice of the next tokens (on a CPU that is part of what an engine
        adds).

        cold: weights come from memory (the first draft token after a verification); otherwise the
        pass runs in a loop.
        logits: tokens per sequence whose logits are computed; None means all.
        """
        part = Part(batch, tokens, context, logits)
        key = (arch, part, ranks, cold)
        found = self._passes.get(key)
        if found is not None:
            return found
        if (
            self.composed_ is not None
        ):  # the tables' weights always come from memory: cold or not is the same
            return self._remember(key, self.composed_.step_s(arch, [part], ranks))
        step = self._device_s(
            shard(arch, ranks), part, cold
        )  # fitted on one device, so asked at what one rank runs
        if ranks > 1:
            step = _sum(step, self._between_ranks(arch, part, ranks))
        if self._chooses:
            step = _sum(step, self._choice(arch, part))
        if self._attention_std:
            step = _sum(step, self._other_attention(shard(arch, ranks), part, cold))
        return self._remember(key, step)

    def prepare(
        self, wanted: Iterable[tuple[Architecture, Part, int]], passes: Iterable[PassOps] = ()
    ) -> None:
        """Price many passes (architecture, part, ranks) in one go, and the kernels of `passes`:
        much quicker than one by one where passes are composed of kernels; `forward_s` and `ops_s`
        then answer from memory."""
        if self.composed_ is None:
            return
        new = {
            key: self.composed_.pass_ops(key[0], [key[1]], key[2])
            for key in wanted
            if (*key, False) not in self._passes
        }
        self.composed_.prepare([*new.values(), *passes])
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

    def _between_ranks(self, arch: Architecture, part: Part, ranks: int) -> Estimate:
        """The all-reduces of a pass, and in a graph how long ranks wait for one another (as in
        composed passes).

        Their errors are the table's and so add up. Raises MissingDataError on a CPU.
        """
        ops = (
            layer_ops(
                arch, batch=part.batch, tokens=part.tokens, context=0, window=None, ranks=ranks
            )
            * arch.num_hidden_layers
        )
        ops += head_ops(
            arch, batch=part.batch, tokens=part.tokens, ranks=ranks, head_tokens=part.logits
        )
        reduces = Counter(op for op in ops if isinstance(op, AllReduce))
        value, std = 0.0, 0.0
        for op, count in reduces.items():
            seconds, relative = self.ops.op_s(op, True)
            if self.mode == "eager" and self.ops.source(op) != "measured":  # the host launches each
                seconds = max(seconds, float(constants()["eager"]["all_reduce_s"]))
            value, std = value + count * seconds, std + count * seconds * relative
        if self.mode != "graph":
            return Estimate(value, std, "modelled")
        waits = sync_waits(sum(reduces.values()), ranks)
        return Estimate(
            value + self.wait.value * waits, math.hypot(std, self.wait.std * waits), "modelled"
        )

    def _other_attention(self, arch: Architecture, part: Part, cold: bool) -> Estimate:
        """No time, but how unsure the attention of a pass is where the engine does not run the
        kernels that were measured."""
        at = GROUPS.index("attention")
        seconds = float(self._features(arch, part, cold, self.cache_)[at] * self._coefficients[at])
        return Estimate(0.0, self._attention_std * seconds, "modelled")

    def _choice(self, arch: Architecture, part: Part) -> Estimate:
        """Choosing a token after each position of a pass whose logits are computed."""
        wanted = part.tokens if part.logits is None else part.logits
        seconds, relative = self.ops.op_s(sample_op(arch, batch=part.batch, tokens=wanted), True)
        return Estimate(seconds, relative * seconds, "modelled")

    def ops_s(self, ops: PassOps, cold: bool = True) -> Estimate:
        """Seconds of one pass given by its ops: what is not a whole model, such as a head on a
        target's hidden states.

        On a GPU it is composed of its kernels, also where whole models were measured, whose
        coefficients say nothing of it. On a CPU the coefficients of whole passes price it, those of
        the engine's own where they were measured; `cold` as in `forward_s`. Raises MissingDataError
        for a measured GPU in eager mode: what the host adds is in no kernel's row.
        """
        if self._kernels is not None:
            return self._kernels.ops_s(ops)
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
        """Seconds that the engine adds to each layer of a draft pass, where that was measured."""
        costs = self._engine_costs(target.vocab_size)
        return costs.layer_s if costs is not None else 0.0

    @cached_property
    def _kernels(self) -> ComposedPass | None:
        """What composes a pass of its ops, where this profile has such rows."""
        if self.composed_ is None and self.mode == "graph" and composable(self.profile, self.dtype):
            own = (self.profile, self.dtype, self.mode, self.carried_to, self.engine)
            return ComposedPass(*own).serving(self.rounds, self.dtype, self.wait)
        return self.composed_

    def _take_wait(self) -> None:
        wait = all_reduce_wait(self.rounds, self._compute_capability)
        cache = self.rounds.cache_dtype(self.dtype) if self.rounds is not None else self.dtype
        if (wait, cache) == (self.wait, self.cache_dtype):
            return
        self.wait, self.cache_dtype = wait, cache
        if self.composed_ is not None:
            self.composed_ = self.composed_.serving(self.rounds, self.dtype, wait)
        self._passes = {}
        for kept in ("_kernels", "_later_steps"):
            self.__dict__.pop(kept, None)

    @property
    def _compute_capability(self) -> str | None:
        device = self.carried_to
        return (
            device.compute_capability
            if device is not None
            else self.profile.device.get("compute_capability")
        )

    def _remember(self, key: tuple[Any, ...], estimate: Estimate) -> Estimate:
        if len(self._passes) > 200_000:
            self._passes.clear()
        self._passes[key] = estimate
        return estimate

    def decode_s(self, target: Architecture, workload: Workload) -> Estimate:
        """One plain decode step of the target, with what the engine adds per token."""
        if self.engine_ is not None:
            own = self.engine_
            step = own.forward_s(
                target,
                batch=workload.batch_size,
                context=workload.context_len,
                cold=True,
                is_target=True,
            )
            return _sum(step, own.plain_s(workload.batch_size))
        step = self.forward_s(
            target,
            batch=workload.batch_size,
            tokens=1,
            context=workload.context_len,
            ranks=workload.tensor_parallel,
        )
        costs = self._engine_costs(target.vocab_size)
        if costs is not None:
            return _sum(step, costs.plain_s())
        return (
            step
            if self.rounds is None
            else plain_step(self.rounds, step, target.num_hidden_layers, workload.batch_size)
        )

    def verify_s(self, target: Architecture, workload: Workload, gamma: int) -> Estimate:
        """One target pass over gamma + 1 tokens per sequence."""
        if self.engine_ is not None:
            return self.engine_.forward_s(
                target,
                batch=workload.batch_size,
                tokens=gamma + 1,
                context=workload.context_len,
                cold=True,
                is_target=True,
            )
        batch, tokens = verified_rows(self.rounds, workload.batch_size, gamma)
        context, ranks = workload.context_len, workload.tensor_parallel
        found = self.forward_s(target, batch=batch, tokens=tokens, context=context, ranks=ranks)
        if self.composed_ is None or tokens == 1:
            return found
        # More tokens take no less. Tables of two kernels may say so: DeepSeek-V3's attention on a
        # B200, for one token and four.
        one = self.forward_s(target, batch=batch, tokens=1, context=context, ranks=ranks)
        return found if found.value >= one.value else Estimate(one.value, found.std, found.source)

    def first_tokens(self, gamma: int) -> int:
        """Tokens per sequence in the first pass of a draft in a round: as measured in the engine,
        where it was."""
        return (
            self.engine_.first_pass.tokens(gamma)
            if self.engine_ is not None
            else super().first_tokens(gamma)
        )

    def draft_passes(
        self, draft: Architecture, workload: Workload, gamma: int
    ) -> tuple[Estimate, Estimate]:
        """(the first pass of a round, with its weights out of the cache; each later one, in a
        loop)."""
        batch, context = workload.batch_size, workload.context_len
        draft = self.facts.served_draft(draft)
        ranks = self.facts.ranks_of_draft(workload)
        if self.engine_ is not None:
            first = self.engine_.forward_s(
                draft, batch=batch, tokens=self.first_tokens(gamma), context=context, cold=True
            )
            return first, self.engine_.forward_s(draft, batch=batch, context=context)
        tokens = self.first_tokens(gamma)
        first = self.forward_s(
            draft, batch=batch, tokens=tokens, context=context, ranks=ranks, cold=True, logits=1
        )
        if self.facts.draft_passes(gamma) == 1:
            return first, first
        return first, self.forward_s(draft, batch=batch, context=context, ranks=ranks, logits=1)

    def draft_s(self, draft: Architecture, workload: Workload, gamma: int) -> Estimate:
        """The draft's time for gamma tokens, and what the engine adds to each of its layers (what
        it adds to a token whatever the draft is in `added_s`)."""
        costs = self._engine_costs(draft.vocab_size)
        extra = gamma * draft.num_hidden_layers * costs.layer_s if costs else 0.0
        first, later = self.draft_passes(draft, workload, gamma)
        more = self.facts.draft_passes(gamma) - 1
        if more <= 0:
            return Estimate(first.value + extra, first.std, first.source)
        value = first.value + more * later.value + extra
        return Estimate(value, first.std + more * later.std, first.source)

    def idle_draft_s(self, draft: Architecture, workload: Workload) -> Estimate:
        """What a draft costs in a round that drafts nothing, per round: vLLM keeps its cache in
        step with a pass without the head (of two tokens per sequence), other engines leave it
        alone."""
        if not self.facts.idle_pass:
            return Estimate(0.0, 0.0, "modelled")
        headless = draft.replace(draft_vocab_size=1)
        batch, context = workload.batch_size, workload.context_len
        if self.engine_ is not None:
            return self.engine_.forward_s(
                headless, batch=batch, tokens=2, context=context, cold=True
            )
        return self.forward_s(
            headless,
            batch=batch,
            tokens=2,
            context=context,
            ranks=self.facts.ranks_of_draft(workload),
            cold=True,
        )

    def added_s(self, target: Architecture, workload: Workload, gamma: int) -> Estimate:
        """What the engine was measured to add to a round of gamma draft tokens; 0 where nothing is
        known of it."""
        if self.engine_ is not None:
            return self.engine_.round_s(gamma, workload.batch_size)
        known = self._engine_costs(target.vocab_size)
        return known.round_s(gamma) if known is not None else Estimate(0.0, 0.0, "modelled")

    def drafted_s(
        self, drafter: Drafter, rows: RoundRows, plan: RoundPlan
    ) -> tuple[Estimate, Estimate] | None:
        """(a drafter's kernels, all else of a round beside the target's pass) as the engine was
        measured with such drafters; None where it was not."""
        if self.engine_ is None:
            return None
        return self.engine_.drafted_.round_s(drafter, rows, plan, self.engine_.plan_s(plan))

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

    @property
    def engines(self) -> tuple[str, ...]:
        """Engines whose overhead or own passes the profile holds."""
        own = known_engines(self.profile, self.dtype, self.mode)
        return tuple(dict.fromkeys([*(name for name, _ in self._engine), *own]))

    def summary(self) -> dict[str, Any]:
        """What was learnt, for reports: `pass` is `fitted` (to whole passes: coefficients, cache,
        leave-one-out errors) or `composed` (of kernels and stated constants); `engines` by name and
        vocabulary of the measurement."""
        known: dict[str, Any] = {
            "dtype": self.dtype,
            "mode": self.mode,
            "rows": len(self.profile.rows),
            "pass": "composed" if self.composed_ else "fitted",
            "engines": {
                f"{name} (vocabulary {size})": costs.to_dict()
                for (name, size), costs in self._engine.items()
            },
        }
        if self.round_fit_ is not None:
            known["rounds"] = self.round_fit_.to_dict()
        if self.engine_ is not None:
            known["engine_passes"] = {"engine": self.engine, **self.engine_.summary()}
        if self.composed_ is None and not hasattr(
            self, "ops"
        ):  # the engine's own passes are all there is
            return known | {"pass": "engine"}
        if self.composed_ is not None:
            words = self.rounds.costs.source if self.rounds is not None else None
            carried = {} if self.carried_to is None else {"carried_to": self.carried_to.key}
            return known | carried | {"constants": constants()[self.mode], "engine": words}
        errors = np.abs(self.loo_)
        return known | {
            "coefficients": self.coefficients_,
            "cache_half_bytes": self.cache_.half_bytes,
            "cache_steepness": self.cache_.steepness,
            "leave_one_out_median": float(np.median(errors)),
            "leave_one_out_within_12_percent": float(np.mean(errors <= 0.12)),
        }


def _sum(step: Estimate, extra: Estimate) -> Estimate:
    """A step and what comes on top of it; their errors are independent."""
    return Estimate(step.value + extra.value, math.hypot(step.std, extra.std), step.source)
