"""`Drafter`: whatever proposes tokens to a target, as a value.

A drafter knows its family, its network, and what it costs: `plan` says what one round runs,
`parameters` and `kv_bytes_per_token` what it holds. Latency models price a plan, the acceptance
table answers for `acceptance`, `engine_rounds` for `rounds`: none of them asks for the family. A
family is one class, listed in `archsearch.drafters.registry`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, Self, get_args

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import pass_parameters
from archsearch.architecture.hf_fields import check_types
from archsearch.architecture.ops import PassOps
from archsearch.architecture.published_drafters import PublishedDrafter
from archsearch.errors import InvalidShapeError
from archsearch.workload import Workload

Family = Literal[
    "independent",
    "eagle3",
    "eagle",
    "mtp",
    "medusa",
    "ngram",
    "suffix",
    "peagle",
    "pard",
    "dflash",
    "early_exit",
    "chain",
]
FAMILY_NAMES: Final[tuple[str, ...]] = get_args(Family)
RoundKind = Literal[
    "draft_model", "feature_head", "parallel_head", "parallel_draft", "block", "medusa", "lookup"
]
"""How an engine runs the drafter's part of a round: the `drafter` of engine_rounds.yaml."""

Choice = int | float | str | bool
Chosen = Mapping[str, Choice]


@dataclass(frozen=True, slots=True)
class RoundRows:
    """One round as an engine runs it: `gamma` draft tokens for each of `batch` sequences with
    `context` tokens in the cache.

    `ranks`: devices that share the drafter. `fused`: as in `layer_ops`. `scattered`: a trimmed
    head's logits go into a row of the whole vocabulary before the token is chosen (`compute_logits`
    in vLLM's `llama_eagle3.py`); others, and vLLM with `use_local_argmax_reduction`, choose among
    the trimmed rows.
    """

    batch: int
    context: int
    gamma: int
    ranks: int = 1
    fused: bool = True
    scattered: bool = True


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What a drafter runs in one round: `first` over the target's rows, then `steps` times `step`;
    `host_s` without the device.

    `head_rows`: rows of logits that it computes in the round. `launched`: passes that the host
    launches, each of `layers` layers.
    """

    first: PassOps | None
    step: PassOps | None
    steps: int
    head_rows: int
    layers: int
    launched: int
    host_s: float = 0.0
    verified: int | None = None  # tokens of a sequence that the target reads; None: gamma + 1


@dataclass(frozen=True)
class Drafter(ABC):
    """A drafter of one family for one target.

    `architecture`: the layers that it runs, with its width, vocabulary and head; of a drafter
    without layers (Medusa, n-gram, suffix) the target's, whose width and vocabulary are its own.
    """

    architecture: Architecture

    family: ClassVar[Family]
    title: ClassVar[str]  # as people write it
    rounds: ClassVar[RoundKind]
    # which rows of the acceptance table predict it; `archsearch.acceptance.families`
    acceptance: ClassVar[str]
    is_model: ClassVar[bool] = False  # a model by itself, by whose shape it is named
    has_layers: ClassVar[bool] = True  # the dimensions of a decoder may be searched
    trains: ClassVar[bool] = True  # somebody has to train it
    # what else may be searched, with the usual choices
    choices: ClassVar[Mapping[str, tuple[Choice, ...]]] = {}
    # rows of its layers that a training runs for each token of text
    training_rows: ClassVar[float] = 1.0

    @classmethod
    def usual(cls, target: Architecture) -> Self:
        """The drafter of this family that is usual for `target`."""
        return cls(target)

    @classmethod
    @abstractmethod
    def of(cls, target: Architecture, decoder: Architecture | None, chosen: Chosen) -> Self:
        """The drafter for `target` with these layers (None where it has none) and `chosen` of
        `choices`.

        Raises InvalidShapeError for a combination that cannot be.
        """

    @classmethod
    def only(cls, chosen: Chosen) -> None:
        """Raise InvalidShapeError for a choice that the family does not have."""
        for name in chosen:
            if name not in cls.choices:
                has = ", ".join(cls.choices) or "nothing to choose"
                raise InvalidShapeError(f"{cls.family} has no {name}; it has {has}")

    @classmethod
    def published(cls, row: PublishedDrafter, target: Architecture) -> Self:
        """The drafter of a row of the table of published ones, of this family, for `target`."""
        raise InvalidShapeError(f"no {cls.title} is published by itself: {row.hub_id}")

    @classmethod
    def lacking(cls, target: Architecture) -> str:
        """Why `target` cannot have such a drafter at all; "" where nothing speaks against it."""
        return ""

    @property
    def model(self) -> Architecture | None:
        """The model that drafts, where rounds are those of a draft model of that shape; None where
        `plan` says what runs."""
        return None

    @property
    def sharded(self) -> Architecture | None:
        """The layers that an engine shards over the ranks; None where it has none."""
        return self.architecture

    @property
    def states_read(self) -> int:
        """How many of the target's hidden states it reads for a token."""
        return 0

    @property
    def drafts_share(self) -> float:
        """Share of rounds in which it has anything to propose."""
        return 1.0

    def with_share(self, share: float) -> Self:
        """The same drafter with what became known of `drafts_share`; one that always proposes is
        unchanged."""
        return self

    @abstractmethod
    def plan(self, rows: RoundRows) -> RoundPlan:
        """What it runs in a round."""

    def idle(self, rows: RoundRows) -> PassOps | None:
        """What an engine runs in a round that drafts nothing, to keep the drafter's cache in step;
        None: nothing."""
        return None

    @abstractmethod
    def parameters(self) -> int:
        """Parameters that it adds to its target; tables shared with the target do not count."""

    def weight_bytes(self, dtype_bytes: float) -> int:
        """Bytes of those parameters, each of `dtype_bytes` unless they are kept in a format of
        their own."""
        return int(self.parameters() * dtype_bytes)

    @property
    def training_parameters(self) -> float:
        """Parameters whose passes are paid for each token of a training."""
        whole = pass_parameters(self.architecture) if self.is_model else self.parameters()
        return self.training_rows * whole

    def body_parameters(self) -> int:
        """Parameters of its layers and what feeds them, without embedding and head; 0 where it has
        no layers that learn."""
        return 0

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of its own KV cache for one token of one sequence."""
        layers = self.sharded
        cached = 0 if layers is None else layers.num_hidden_layers * layers.kv_size
        return 2 * cached * dtype_bytes

    def bytes(self, workload: Workload, batch: int, context: int) -> int:
        """Memory of weights and KV cache of `batch` sequences, in the precisions of a workload."""
        cache = batch * context * self.kv_bytes_per_token(workload.cache_bytes)
        own = workload.draft_bytes if self.trains else workload.dtype_bytes
        return self.weight_bytes(own) + cache

    @property
    def most(self) -> int | None:
        """Tokens that it can draft in a round; None: any number."""
        return None

    def gammas(self, asked: Sequence[int]) -> tuple[int, ...]:
        """Those of `asked` that it can draft."""
        return tuple(gamma for gamma in asked if self.most is None or gamma <= self.most)

    @abstractmethod
    def label(self) -> str:
        """A short human name with its dimensions."""

    def check(self, target: Architecture) -> None:
        """Raise InvalidShapeError where it was made for another target."""
        if self.architecture.vocab_size != target.vocab_size:
            raise InvalidShapeError(
                f"this {self.title} has a vocabulary of {self.architecture.vocab_size}, the target"
                f" one of {target.vocab_size}: it was made for another target"
            )

    def to_dict(self) -> dict[str, object]:
        """Family, label and everything besides `architecture`, as JSON."""
        own = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "architecture"
        }
        return {"family": self.family, "label": self.label(), **own}

    @classmethod
    def from_fields(cls, architecture: Architecture, data: Mapping[str, object]) -> Self:
        """Read back what `to_dict` wrote; fields that this version does not know are left out."""
        types = {field.name: str(field.type) for field in dataclasses.fields(cls)}
        given = {
            name: value for name, value in data.items() if name in types and name != "architecture"
        }
        check_types(types, given)
        return cls(architecture, **given)


Draft = Architecture | Drafter
"""What drafts: a bare shape is an independent draft's."""
