"""The regressors of logit(alpha): one list of terms, the same for rows of the published table, for this project's own
sketches and for the shapes of a search.

**Which size.** Parameters of the body: layers and final norm, without embedding and head, relative to the target's. The embedding
is a lookup (tokens it holds do not make the draft wiser) and the head's rows have their own term (trimmed vocabulary); counting
either would let a 49k-row head pass for capacity: in a 2-layer draft of a 135M target it holds four times the parameters of the
layers. Capped at the target's body.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Final

import numpy as np

from archsearch.acceptance.estimator import DOMAINS, DRAFTERS, TRAININGS, AcceptanceContext
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import body_parameters
from archsearch.errors import ArchsearchError

# Where each regressor is 0: 2 layers for a target whose body is 15 times larger, greedy, half a million tokens of distillation.
REFERENCE_LAYERS: Final = 2
REFERENCE_RATIO: Final = 1 / 15
REFERENCE_TOKENS: Final = 5e5
EARLY_TOKENS: Final = 2e5
# What size and depth bring comes with training: this share of it more per decade of tokens, all at REFERENCE_TOKENS. From 32k to
# 128k tokens drafts of 1, 2, 4 and 8 layers rose by 0.22, 0.28, 0.35 and 0.41 in logit; with shares of 0.6 to 0.7 the study of
# shapes gives size the slope of the published table (benchmarks/results/2026-11-22-shapes). Measured on one target, one text
# and one seed, and chosen with that study in sight; assumed of other targets.
CAPACITY_LEARNT: Final = 0.65
LEAST_LEARNT: Final = 0.05
# A single layer fell behind in no shape of that study, which ends here; published drafts and longer sketches show that it does.
SINGLE_LAYER_TOKENS: Final = 1.28e5
REFERENCE_TARGET: Final = 1e10
BLOCK_LAYERS: Final = 5
# The body of a target that the context does not name: that of the anchors.
UNKNOWN_TARGET: Final = 1.06e8
USUAL_TOKENS_MOST: Final = 4e8
# The gamma at which the alpha of a feature drafter (which sinks along the block) is meant.
REFERENCE_GAMMA: Final = 5

FEATURE_DRAFTERS: Final = tuple(name for name in DRAFTERS if name not in ("independent", "medusa", "mlp"))
# What a domain is made of: its own term is the difference from the mean of its parts.
DOMAIN_PARTS: Final[Mapping[str, tuple[str, ...]]] = {"mixed": ("chat", "code", "summarisation")}


@dataclass(frozen=True, slots=True)
class Term:
    """One coefficient in logit(alpha): what is believed before any table is read."""

    mean: float
    std: float


@dataclass(frozen=True, slots=True)
class PriorTerms:
    """What is believed without the table. Wide where the table decides (its rows are not counted twice), and the last word where
    no published study varied the term: then wide as well, for nobody knows."""

    # Greedy, chat, an independent draft distilled on half a million tokens. The table decides.
    intercept: Term = Term(0.5, 1.0)
    # Per decade of the draft's body / the target's. The table decides.
    size: Term = Term(0.3, 0.3)
    # Per decade of the target's body at the same ratio; with a coefficient as large as `size` only the draft's size would count.
    target_size: Term = Term(0.0, 0.2)
    # Per ln(layers) at equal size. The table decides, with few independent drafts.
    depth: Term = Term(0.15, 0.15)
    # A single layer that does not see the target's hidden states, beyond size and depth. One attention layer cannot copy what
    # followed earlier (that takes two), and arXiv 2402.01528 saw TAR fall "sharply" there without printing it. The table adds
    # KVShot and this project's sketches, whose minutes of training use depth less.
    single_layer: Term = Term(-0.35, 0.15)
    # Per ln(hidden / target's hidden), above it only. No draft of the table is wider than its target: no gain and no loss, but
    # doubt.
    overwide: Term = Term(0.0, 0.20)
    # Per ln(target's hidden / hidden), below it only, at equal size and depth. The table decides: every independent draft of a
    # known shape is narrower than its target.
    narrow: Term = Term(0.0, 0.30)
    # Per unit of temperature. The table decides.
    temperature: Term = Term(-0.2, 0.2)
    # Per decade of tokens above EARLY_TOKENS. Log-linear in tokens: Scylla (arXiv 2505.07858). The table decides.
    tokens: Term = Term(0.3, 0.15)
    # Per decade of tokens below EARLY_TOKENS. This project's learning curves: 34k to 100k tokens +0.54, 49k to 150k +0.55.
    early: Term = Term(1.0, 0.3)
    # Attention variants. No published ablation; what fewer KV heads lose in parameters is in `size`. Assumed to be small: the
    # table's drafts with fewer KV heads differ from the others in more than that.
    grouped: Term = Term(0.0, 0.10)
    single_kv_head: Term = Term(0.0, 0.10)
    # A window that cuts the context, per halving and share of sliding layers. Assumed: window drafters keep 86 to 94 % of their
    # proposals when 99 % of the cache is dropped.
    cut_by_window: Term = Term(-0.04, 0.06)
    # Any window, even one longer than the context.
    window: Term = Term(0.0, 0.05)
    # A drafter that reads the target's hidden states or cache instead of tokens only; its kind comes on top. The table decides.
    sees_target: Term = Term(0.0, 1.0)
    # Per ln(layers / BLOCK_LAYERS) of block drafters, which see the target's hidden states. The table decides.
    block_depth: Term = Term(0.15, 0.15)
    # A draft that went through the target's own training (same vendor, same data), at the tokens of the reference; and one that
    # was trained on something else. The table decides.
    shared_training: Term = Term(0.5, 0.7)
    other_training: Term = Term(-0.5, 0.7)


DOMAIN_PRIOR: Final = Term(0.0, 0.7)
# `mixed` is chat, code and documents by its definition: near the mean of their terms.
PARTED_DOMAIN_PRIOR: Final = Term(0.0, 0.2)
DRAFTER_PRIOR: Final = Term(0.0, 0.4)

SHAPE_TERMS: Final = tuple(field.name for field in fields(PriorTerms))
DOMAIN_TERMS: Final = tuple(f"domain {name}" for name in DOMAINS)
DRAFTER_TERMS: Final = tuple(f"drafter {name}" for name in DRAFTERS if name != "independent")
# Offset of a kind of drafts that were trained alike (study and lot of the table): of each training of independent drafts, and of
# every other kind.
LOT_TERMS: Final = (
    *(f"lot {training}" for training in TRAININGS),
    *(f"lot {name}" for name in DRAFTERS if name != "independent"),
)
# In the order of coefficients_ and covariance_.
COEFFICIENTS: Final = SHAPE_TERMS + DOMAIN_TERMS + DRAFTER_TERMS + LOT_TERMS


def prior_of(name: str) -> Term:
    """What is believed of a coefficient before the table."""
    if name == "domain chat":
        return Term(0.0, 1e-6)  # the other domains are counted from it
    if name.startswith("lot "):
        return Term(0.0, 0.0)  # nothing but the effects of study and lot
    if name.startswith("domain "):
        return PARTED_DOMAIN_PRIOR if name.removeprefix("domain ") in DOMAIN_PARTS else DOMAIN_PRIOR
    if name.startswith("drafter "):
        return DRAFTER_PRIOR
    term: Term = getattr(PriorTerms(), name)
    return term


# --- regressors ------------------------------------------------------------------------------------------------------------


def size_terms(body: float, target_body: float) -> dict[str, float]:
    """`size` and `target_size` of a body of parameters relative to the target's."""
    ratio = min(body / target_body, 1.0)
    return {"size": math.log10(ratio / REFERENCE_RATIO), "target_size": math.log10(target_body / REFERENCE_TARGET)}


def width_terms(hidden: float, target_hidden: float) -> dict[str, float]:
    """`narrow` and `overwide` of a hidden size beside the target's."""
    ratio = math.log(hidden / target_hidden)
    return {"narrow": max(0.0, -ratio), "overwide": max(0.0, ratio)}


def depth_terms(layers: int, drafter: str) -> dict[str, float]:
    """What layers say: of drafts of their own, of drafters that see the target's cache, and of block drafters."""
    if drafter in ("independent", "kv"):
        return {"depth": math.log(layers / REFERENCE_LAYERS), "single_layer": float(layers == 1)}
    return {"block_depth": math.log(layers / BLOCK_LAYERS)} if drafter == "block" else {}


def while_young(terms: Mapping[str, Any], tokens: float) -> dict[str, Any]:
    """Terms (numbers or arrays) of an independent draft that its target's text has taught so far: all that size and depth say
    from REFERENCE_TOKENS on, less before (`CAPACITY_LEARNT`), of a single layer nothing at first."""
    seen = max(float(tokens), 1e3)
    learnt = min(max(1.0 + CAPACITY_LEARNT * math.log10(seen / REFERENCE_TOKENS), LEAST_LEARNT), 1.0)
    late = math.log(seen / SINGLE_LAYER_TOKENS) / math.log(REFERENCE_TOKENS / SINGLE_LAYER_TOKENS)
    shares = {"size": learnt, "depth": learnt, "single_layer": min(max(late, 0.0), 1.0)}
    return {name: value * shares.get(name, 1.0) for name, value in terms.items()}


def attention_terms(heads: int, kv_heads: int) -> dict[str, float]:
    """`grouped` and `single_kv_head`."""
    return {"grouped": float(kv_heads < heads), "single_kv_head": float(kv_heads == 1 < heads)}


def domain_terms(domain: str) -> dict[str, float]:
    """The domain's own term, and of one that is made of others their mean."""
    parts = DOMAIN_PARTS.get(domain, ())
    return {f"domain {domain}": 1.0, **{f"domain {part}": 1.0 / len(parts) for part in parts if part != "chat"}}


def lot_term(drafter: str, training: str) -> str:
    """Which of LOT_TERMS a draft has."""
    return f"lot {training if drafter == 'independent' else drafter}"


def training_terms(training: str, tokens: float) -> dict[str, float]:
    """How a draft was trained: for this target, on so many tokens, or not for it."""
    return token_terms(tokens) if training == "target" else {f"{training}_training": 1.0}


def usual_tokens(target: Architecture | None) -> float:
    """Tokens that a draft is assumed to be distilled on where nobody says: in proportion to the target's body, from half a
    million for 100M parameters (minutes on a CPU) to the 400 million of published drafts. Assumed."""
    body = body_parameters(target) if target else UNKNOWN_TARGET
    return min(REFERENCE_TOKENS * max(body / UNKNOWN_TARGET, 1.0), USUAL_TOKENS_MOST)


def tokens_of(context: AcceptanceContext) -> float:
    """Training tokens of a draft in this context."""
    return usual_tokens(context.target) if context.trained_tokens is None else context.trained_tokens


def token_terms(tokens: float) -> dict[str, float]:
    """`tokens` and `early`; both 0 at REFERENCE_TOKENS."""
    seen = max(float(tokens), 1e3)
    late = math.log10(max(seen, EARLY_TOKENS) / REFERENCE_TOKENS)
    return {"tokens": late, "early": math.log10(min(seen, EARLY_TOKENS) / EARLY_TOKENS)}


def shape_terms(arch: Architecture, context: AcceptanceContext) -> dict[str, float]:
    """Regressor of every term that is not 0, for a shape in a context. Raises ArchsearchError on an unknown domain, drafter or
    training."""
    for what, value, known in (
        ("domain", context.domain, sorted(DOMAINS)),
        ("kind of drafter", context.drafter, DRAFTERS),
        ("training", context.training, TRAININGS),
    ):
        if value not in known:
            raise ArchsearchError(f"unknown {what} {value!r}; use one of {', '.join(known)}")
    result = {"intercept": 1.0, **domain_terms(context.domain), "temperature": context.temperature}
    tokens = tokens_of(context)
    result |= training_terms(context.training, tokens)
    if context.drafter != "independent":
        # Their layers have the target's width, and what they see of it outweighs their own size: kind and depth say it all.
        result |= {"sees_target": 1.0, f"drafter {context.drafter}": 1.0}
        return result | depth_terms(arch.num_hidden_layers, context.drafter)
    body = _body_terms(arch, context.target)
    result |= while_young(body, tokens) if context.training == "target" else body
    sliding, cut = 0.0, 0.0
    if "S" in arch.window_pattern:
        for window in arch.windows():
            if window:
                sliding = 1.0
                cut += max(0.0, math.log2(max(context.context_len, 1) / window))
    return result | {"cut_by_window": cut / arch.num_hidden_layers, "window": sliding}


@lru_cache(maxsize=4096)
def _body_terms(arch: Architecture, target: Architecture | None) -> Mapping[str, float]:
    return {
        **size_terms(body_parameters(arch), body_parameters(target) if target else UNKNOWN_TARGET),
        **width_terms(arch.hidden_size, target.hidden_size if target else arch.hidden_size),
        **depth_terms(arch.num_hidden_layers, "independent"),
        **attention_terms(arch.num_attention_heads, arch.num_key_value_heads),
    }


def regressors(terms: Mapping[str, float], names: Sequence[str] = COEFFICIENTS) -> np.ndarray:
    """[len(names)] in the order of `names`."""
    return np.array([terms.get(name, 0.0) for name in names])
