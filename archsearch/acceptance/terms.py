"""The regressors of logit(alpha): one list of terms, the same for rows of the published table, for
this project's own sketches and for the shapes of a search.

**Which size.** Parameters of the body: layers and final norm, without embedding and head, relative
to the target's, capped there. The embedding is a lookup and the head's rows have their own term
(trimmed vocabulary); counting either would let a 49k-row head pass for capacity: in a 2-layer draft
of a 135M target it holds four times the parameters of the layers.

What the table says of them is stored (published_fit.json, `load_fit`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np

from archsearch.acceptance.estimator import DOMAINS, DRAFTERS, TRAININGS, AcceptanceContext
from archsearch.acceptance.learnt import (
    PUBLISHED_HEAD_TOKENS,
    USUAL_PRETRAINING,
    Learning,
    head_terms,
    known_learning,
    tokens_behind,
)
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import body_parameters, pass_parameters
from archsearch.errors import ArchsearchError
from archsearch.files import read_json

# Where each regressor is 0: 2 layers for a target whose body is 15 times larger, greedy.
REFERENCE_LAYERS: Final = 2
REFERENCE_RATIO: Final = 1 / 15
REFERENCE_TOKENS: Final = 5e5
# What size and depth bring comes with training: this share of it more per decade of tokens, all at
# REFERENCE_TOKENS. From 32k to 128k tokens drafts of 1, 2, 4 and 8 layers rose by 0.22, 0.28, 0.35
# and 0.41 in logit; with shares of 0.6 to 0.7 the study of shapes gives size the slope of the
# published table (benchmarks/results/2026-11-22-shapes). Measured on one target, one text and one
# seed, and chosen with that study in sight; assumed of other targets.
CAPACITY_LEARNT: Final = 0.65
LEAST_LEARNT: Final = 0.05
# A single layer fell behind in no shape of that study, which ends here; published drafts and longer
# sketches show that it does.
SINGLE_LAYER_TOKENS: Final = 1.28e5
REFERENCE_TARGET: Final = 1e10
BLOCK_LAYERS: Final = 5
# The body of a target that the context does not name: that of the anchors.
UNKNOWN_TARGET: Final = 1.06e8
USUAL_TOKENS_MOST: Final = 4e8
# Windows were measured on texts of this many tokens; heads are trained on about as many as
# HEAD_CONTEXT.
WINDOW_CONTEXT: Final = 95
HEAD_CONTEXT: Final = 2048
# What a printed tau or rate is rounded and sampled to, logit.
READING_STD: Final = 0.03
# The gamma at which the alpha of a feature drafter (which sinks along the block) is meant.
REFERENCE_GAMMA: Final = 5

FEATURE_DRAFTERS: Final = tuple(
    name for name in DRAFTERS if name not in ("independent", "medusa", "mlp")
)
# Heads that lose where the context is longer than what they were trained on (MTP went through its
# target's training).
CONTEXT_BOUND: Final = ("eagle1", "eagle3", "block")
# What a domain is made of: its own term is the difference from the mean of its parts.
DOMAIN_PARTS: Final[Mapping[str, tuple[str, ...]]] = {"mixed": ("chat", "code", "summarisation")}


@dataclass(frozen=True, slots=True)
class Term:
    """What is believed of a coefficient in logit(alpha)."""

    mean: float
    std: float


SHAPE_TERMS: Final = tuple(
    "intercept learnt size target_size depth single_layer overwide narrow temperature early late"
    " tuned head_tokens grouped single_kv_head cut_by_window cut_far window long_context"
    " sees_target block_depth".split()
)
DOMAIN_TERMS: Final = tuple(f"domain {name}" for name in DOMAINS)
_SEEING: Final = [name for name in DRAFTERS if name != "independent"]
DRAFTER_TERMS: Final = tuple(f"drafter {name}" for name in _SEEING)
# Offset of a kind of drafts that were trained alike (study and lot of the table): of each training
# of independent drafts, and of every other kind.
LOT_TERMS: Final = tuple(f"lot {name}" for name in (*TRAININGS, *_SEEING))
# In the order of coefficients_ and covariance_.
COEFFICIENTS: Final = SHAPE_TERMS + DOMAIN_TERMS + DRAFTER_TERMS + LOT_TERMS


# --- regressors


def size_terms(body: float, target_body: float) -> dict[str, float]:
    """`size` and `target_size` of a body of parameters relative to the target's."""
    ratio = np.minimum(body / target_body, 1.0)
    return {
        "size": np.log10(ratio / REFERENCE_RATIO),
        "target_size": math.log10(target_body / REFERENCE_TARGET),
    }


def width_terms(hidden: float, target_hidden: float) -> dict[str, float]:
    """`narrow` and `overwide` of a hidden size beside the target's."""
    ratio = np.log(hidden / target_hidden)
    return {"narrow": np.maximum(0.0, -ratio), "overwide": np.maximum(0.0, ratio)}


def depth_terms(layers: float, drafter: str) -> dict[str, float]:
    """What layers say: of drafts of their own, of drafters that see the target's cache, and of
    block drafters."""
    if drafter in ("independent", "kv"):
        return {"depth": np.log(layers / REFERENCE_LAYERS), "single_layer": 1.0 * (layers < 2)}
    return {"block_depth": np.log(layers / BLOCK_LAYERS)} if drafter == "block" else {}


def while_young(terms: Mapping[str, float], learning: Learning) -> dict[str, float]:
    """Terms of an independent draft. Of one cut from its target: all that size
    and depth say from REFERENCE_TOKENS on, less before (`CAPACITY_LEARNT`), of a single layer
    nothing at first."""
    if learning.init != "target_layers":
        return dict(terms)
    seen = np.maximum(learning.distill_tokens, 1e3)
    learnt = np.clip(1.0 + CAPACITY_LEARNT * np.log10(seen / REFERENCE_TOKENS), LEAST_LEARNT, 1.0)
    late = np.log(seen / SINGLE_LAYER_TOKENS) / math.log(REFERENCE_TOKENS / SINGLE_LAYER_TOKENS)
    shares = {"size": learnt, "depth": learnt, "single_layer": np.clip(late, 0.0, 1.0)}
    return {name: value * shares.get(name, 1.0) for name, value in terms.items()}


def attention_terms(heads: float, kv_heads: float) -> dict[str, float]:
    """`grouped` and `single_kv_head`."""
    return {
        "grouped": 1.0 * (kv_heads < heads),
        "single_kv_head": 1.0 * (kv_heads < 2) * (heads > 1),
    }


def domain_terms(domain: str) -> dict[str, float]:
    """The domain's own term, and of one that is made of others their mean."""
    parts = DOMAIN_PARTS.get(domain, ())
    shares = {f"domain {part}": 1.0 / len(parts) for part in parts if part != "chat"}
    return {f"domain {domain}": 1.0, **shares}


def drafter_terms(drafter: str) -> dict[str, float]:
    """What the kind of a drafter that sees its target says."""
    base = {"drafter eagle3": 1.0} if drafter == "eagle1" else {}
    return {"sees_target": 1.0, **base, f"drafter {drafter}": 1.0}


def lot_term(drafter: str, training: str) -> str:
    """Which of LOT_TERMS a draft has."""
    return f"lot {training if drafter == 'independent' else drafter}"


def usual_tokens(target: Architecture | None) -> float:
    """Tokens that a draft is assumed to be distilled on where nobody says: in proportion to the
    target's body, from half a million for 100M parameters (minutes on a CPU) to the 400 million of
    published drafts. Assumed."""
    return min(REFERENCE_TOKENS * max(target_body(target) / UNKNOWN_TARGET, 1.0), USUAL_TOKENS_MOST)


def target_body(target: Architecture | None) -> float:
    """Parameters in the target's layers; UNKNOWN_TARGET where it is not named."""
    return float(body_parameters(target)) if target else UNKNOWN_TARGET


def tokens_of(context: AcceptanceContext, parameters: float) -> float:
    """Tokens of the target's text that a draft with `parameters` in a pass (a number or an array)
    learns from in this context."""
    given = context.trained_tokens
    return training_tokens(context, parameters) if given is None else given


def training_tokens(context: AcceptanceContext, parameters: float) -> float:
    """Tokens that drafters of `parameters` (a number or an array) are taken to be trained on: those
    that the training budget buys, without one what is usual for the target."""
    if context.budget is not None:
        return context.budget.tokens(parameters)
    return usual_tokens(context.target)


def learning_of(arch: Architecture, context: AcceptanceContext, tokens: float) -> Learning:
    """How a draft of this shape came to be: cut from its target and distilled on `tokens`; where
    `pretrain_tokens` says so a pretrained one tuned on them; of drafts that were not made for the
    target what is known of a model of that shape."""
    if context.training != "target":
        return known_learning(arch) or Learning(
            "pretrained", context.pretrain_tokens or USUAL_PRETRAINING
        )
    if context.pretrain_tokens:
        return Learning("pretrained", context.pretrain_tokens, tokens)
    return Learning("target_layers", 0.0, tokens)


def shape_terms(arch: Architecture, context: AcceptanceContext) -> dict[str, float]:
    """Regressor of every term that is not 0, for a shape in a context; of a grid arrays. Raises
    ArchsearchError on an unknown domain, drafter or training."""
    for what, value, known in (
        ("domain", context.domain, sorted(DOMAINS)),
        ("kind of drafter", context.drafter, DRAFTERS),
        ("training", context.training, TRAININGS),
    ):
        if value not in known:
            raise ArchsearchError(f"unknown {what} {value!r}; use one of {', '.join(known)}")
    result = {"intercept": 1.0, **domain_terms(context.domain), "temperature": context.temperature}
    behind = tokens_behind(context.target)
    if context.drafter != "independent":
        # Their layers have the target's width, and what they see of it outweighs their own size:
        # kind and depth say it all.
        tokens = PUBLISHED_HEAD_TOKENS if context.trained_tokens is None else context.trained_tokens
        result |= {**drafter_terms(context.drafter), **head_terms(tokens, behind)}
        if context.drafter in CONTEXT_BOUND:
            result["long_context"] = beyond_training(arch, context.context_len)
        return result | depth_terms(arch.num_hidden_layers, context.drafter)
    tokens = tokens_of(context, pass_parameters(arch))
    learning = learning_of(arch, context, tokens)
    target, body, beside = context.target, body_parameters(arch), target_body(context.target)
    of_body = {
        **size_terms(body, beside),
        **width_terms(arch.hidden_size, target.hidden_size if target else arch.hidden_size),
        **depth_terms(arch.num_hidden_layers, "independent"),
        **attention_terms(arch.num_attention_heads, arch.num_key_value_heads),
    }
    result |= while_young(of_body, learning) | learning.terms(body, beside, behind)
    sliding, cut, far = arch.num_hidden_layers * 0, 0.0, 0.0
    length, near = context.context_len, min(context.context_len, WINDOW_CONTEXT)
    for window, count in arch.layers_by_window().items():
        if window:
            sliding = sliding + count
            cut = cut + count * max(0.0, math.log2(max(near, 1) / window))
            if length:
                far = far + count * max(0.0, math.log2(length / max(near, window, 1)))
    layers = arch.num_hidden_layers
    return result | {
        "cut_by_window": cut / layers,
        "cut_far": far / layers,
        "window": 1.0 * (sliding > 0),
        # distilled on texts as long as those of heads: assumed to lose alike
        "long_context": beyond_training(arch, length) if context.training == "target" else 0.0,
    }


def beyond_training(arch: Architecture, context: int) -> float:
    """Doublings from HEAD_CONTEXT to the tokens that the layers see of a context."""
    seen = max((min(window or context, context) for window in arch.layers_by_window()), default=0)
    return max(0.0, math.log2(max(seen, 1) / HEAD_CONTEXT))


def regressors(terms: Mapping[str, float], names: Sequence[str] = COEFFICIENTS) -> np.ndarray:
    """[len(names)] in the order of `names`."""
    return np.array([terms.get(name, 0.0) for name in names])


FIT_FILE: Final = Path(__file__).parent / "published_fit.json"


@dataclass(frozen=True)
class PublishedFit:
    """Coefficients for a new target, from the table: `mean` [n] and `covariance` [n, n] in the
    order of COEFFICIENTS.

    `rows`: how many table rows say something about each term; `spread`: std of each random effect
    and of what is left; `drift`: logit per position from the first one, by kind of drafter;
    `inputs`: hash of the files it came from.
    """

    mean: np.ndarray
    covariance: np.ndarray
    rows: Mapping[str, int]
    spread: Mapping[str, float]
    drift: Mapping[str, Term]
    inputs: str


def symmetric(upper: Sequence[float] | np.ndarray) -> np.ndarray:
    """The matrix over COEFFICIENTS whose upper half is `upper`."""
    matrix = np.zeros((len(COEFFICIENTS), len(COEFFICIENTS)))
    matrix[np.triu_indices(len(COEFFICIENTS))] = upper
    return matrix + np.triu(matrix, 1).T


@cache
def load_fit(path: Path = FIT_FILE) -> PublishedFit:
    """The stored outcome of benchmarks/acceptance_fit.py. Fast: no table is read."""
    data = read_json(path, "fit of the published measurements")
    other = ArchsearchError(
        f"{path} was made by another version; run: python benchmarks/acceptance_fit.py"
    )
    size = len(COEFFICIENTS)
    try:
        upper = len(data["covariance_upper"])
        if tuple(data["coefficients"]) != COEFFICIENTS or upper != size * (size + 1) // 2:
            raise other
        covariance = symmetric(data["covariance_upper"])
        drift = {name: Term(*value) for name, value in data["drift"].items()}
        return PublishedFit(
            np.array(data["mean"]), covariance, data["rows"], data["spread"], drift, data["inputs"]
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise other from error
