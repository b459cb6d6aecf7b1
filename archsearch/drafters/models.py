"""Drafters that are models: an independent draft, one that writes its block in one pass (PARD), the
target's own first layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from archsearch.architecture import catalogue
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import kv_cache_bytes, parameters, weight_bytes
from archsearch.architecture.ops import Part, PassOps, model_pass
from archsearch.architecture.published_drafters import PublishedDrafter
from archsearch.drafters.drafter import Chosen, Drafter, Family, RoundPlan, RoundRows
from archsearch.errors import InvalidShapeError
from archsearch.workload import Workload

USUAL_LAYERS = 4
USUAL_EXIT = 3  # of how many parts of the target's layers the first one drafts
# of a training of 8 tokens at once; dropped rows make it 3 times cheaper (AMD-AGI/PARD)
PARALLEL_ROWS = 8 / 3


@dataclass(frozen=True)
class OwnModel(Drafter):
    """A model of its own, with a tokenizer like the target's."""

    is_model = True

    @classmethod
    def usual(cls, target: Architecture) -> Self:
        """Four layers like the target's."""
        return cls(target.replace(num_hidden_layers=USUAL_LAYERS))

    @classmethod
    def of(cls, target: Architecture, decoder: Architecture | None, chosen: Chosen) -> Self:
        cls.only(chosen)
        if decoder is None:
            raise InvalidShapeError(f"the {cls.title} needs the dimensions of its layers")
        return cls(decoder)

    @classmethod
    def published(cls, row: PublishedDrafter, target: Architecture) -> Self:
        return cls(catalogue.load(row.shape).architecture)

    def parameters(self) -> int:
        return parameters(self.architecture)

    def weight_bytes(self, dtype_bytes: float) -> int:
        return weight_bytes(self.architecture, dtype_bytes)

    def label(self) -> str:
        return self.architecture.label()


@dataclass(frozen=True)
class Independent(OwnModel):
    """A small language model of its own."""

    family: ClassVar[Family] = "independent"
    title = "independent draft"
    rounds = "draft_model"
    acceptance = "independent"

    @property
    def model(self) -> Architecture | None:
        return self.architecture

    def plan(self, rows: RoundRows) -> RoundPlan:
        """As vLLM runs it: gamma + 2 tokens, then a token at a time. Latency models ask `model`
        instead."""
        layers = self.architecture.num_hidden_layers
        first, step = (
            _whole_pass(self.architecture, rows, tokens, 1) for tokens in (rows.gamma + 2, 1)
        )
        return RoundPlan(first, step, rows.gamma - 1, rows.batch * rows.gamma, layers, rows.gamma)

    def bytes(self, workload: Workload, batch: int, context: int) -> int:
        """As of every drafter; layers with a window keep no more than that."""
        cache = kv_cache_bytes(self.architecture, context, workload.cache_bytes, batch)
        return self.weight_bytes(workload.draft_bytes) + cache


@dataclass(frozen=True)
class Pard(OwnModel):
    """PARD: an independent draft that writes its block in one pass, a mask token for each token
    after the first. `most`: tokens that it drafts well enough to be asked for: published ones were
    trained on 8 (`para_num` of AMD-AGI/PARD, config/train), share one mask token and are run with
    12 (`draft_k` there, and AMD's settings for vLLM)."""

    most: int = 12

    family = "pard"
    title = "parallel draft (PARD)"
    rounds = "parallel_draft"
    acceptance = "parallel_draft"
    training_rows = PARALLEL_ROWS

    def plan(self, rows: RoundRows) -> RoundPlan:
        """One pass of 2 gamma + 1 tokens a sequence, gamma rows of logits (vLLM,
        parallel_drafting)."""
        whole = _whole_pass(self.architecture, rows, 2 * rows.gamma + 1, rows.gamma)
        return RoundPlan(whole, None, 0, rows.batch * rows.gamma, whole.layers, 1)


@dataclass(frozen=True)
class EarlyExit(Drafter):
    """The target's own first layers with its norm and head (transformers, `assistant_early_exit`).

    No weights are added. The cut has a KV cache of its own, and verification runs all layers again:
    transformers shares neither.
    """

    target_layers: int = 0

    family = "early_exit"
    title = "early exit"
    rounds = "draft_model"
    acceptance = "early_exit"
    has_layers = False
    trains = False
    choices = {"exit_layer": ("0.25x", "0.5x", "0.75x")}

    @classmethod
    def usual(cls, target: Architecture) -> Self:
        return cls.of(target, None, {})

    @classmethod
    def of(cls, target: Architecture, decoder: Architecture | None, chosen: Chosen) -> Self:
        cls.only(chosen)
        layers = int(chosen.get("exit_layer", max(1, target.num_hidden_layers // USUAL_EXIT)))
        count = target.num_hidden_layers
        if not 1 <= layers < count:
            raise InvalidShapeError(
                f"a target of {count} layers has no exit after layer {layers}; use 1 to {count - 1}"
            )
        return cls(target.replace(num_hidden_layers=layers), target.num_hidden_layers)

    @property
    def model(self) -> Architecture | None:
        return self.architecture

    def plan(self, rows: RoundRows) -> RoundPlan:
        return Independent(self.architecture).plan(rows)

    def parameters(self) -> int:
        return 0

    def weight_bytes(self, dtype_bytes: float) -> int:
        return 0

    def label(self) -> str:
        return f"exit after layer {self.architecture.num_hidden_layers} of {self.target_layers}"


@dataclass(frozen=True)
class Chain(Independent):
    """n-grams of `min_n` to `max_n` tokens are looked up, at most `found` tokens drafted; where
    nothing is found a small model drafts `gamma`, until a token has a probability below `least`.
    `pipeline.chains` replays both and prices their rounds; by itself it is its model."""

    min_n: int = 2
    max_n: int = 5
    found: int = 4
    gamma: int = 4
    least: float = 0.0

    family = "chain"
    title = "chain"

    @classmethod
    def lacking(cls, target: Architecture) -> str:
        return "a run's trained draft is part of it (archsearch confirm RUN --family chain)"

    def label(self) -> str:
        lengths = f"{self.min_n} to {self.max_n}" if self.min_n < self.max_n else str(self.min_n)
        stops = f", stops below {self.least:g}" if self.least else ""
        return (
            f"n-gram of {lengths}, {self.found} tokens; else {self.architecture.label()}, gamma"
            f" {self.gamma}{stops}"
        )


def _whole_pass(model: Architecture, rows: RoundRows, tokens: int, logits: int) -> PassOps:
    """A pass of a whole model over `tokens` rows a sequence, the logits of `logits` of them and the
    choice of tokens included."""
    part = Part(rows.batch, tokens, rows.context, logits)
    return model_pass(model, [part], ranks=rows.ranks, fused=rows.fused)
