"""What a drafter has learnt: the tokens that shaped its weights, and the alpha that goes with them.

    e = A / N^a + B / D^b - (A / Nt^a + B / Dt^b)        excess loss over the target's, nats a token
    D = pretraining + 1.9 distillation + 1e7 [layers from the target] + .037 parent's [pruned]
    odds(alpha) = 1.4 (e + .25)^-.87                       `speedup.alpha_of_divergence`

A, a, B, b: Epoch AI's refit (arXiv 2404.10102) of the scaling law of Hoffmann et al. (2203.15556);
N, Nt: parameters in the bodies of draft and target, D, Dt their tokens. The excess loss, and .25 by
which models that are equally good still differ (chosen: .1 to .3 are alike), stand in for the
divergence of draft and target. What a distilled token and a parent are worth was fitted to
published drafts, to factors of 4 to 5; what the target's layers are, to a factor of 10: the curve
of this project's own drafts goes on without a break after its first million tokens.

A drafter that reads the target's hidden states lacks no N of its own, and learns as much from a
token as a blind draft from HEAD_WORTH: DSpark heads of an 8B
(swiss-ai/apertus-speculative-decoding) reached alpha .68 after 6e7 tokens and .82 after 5.4e8,
which is this curve's slope, at 76 and 89; an EAGLE-3 layer on foreign text (2604.26412) 11; sanity
runs of DFlash on 5,000 samples 2.

How a draft that exists was trained is read off its name, its shape or its folder (`training_of`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from archsearch.acceptance.estimator import AcceptanceContext
from archsearch.architecture import catalogue
from archsearch.architecture.architecture import Architecture
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.files import csv_rows, read_json, read_yaml
from archsearch.models.targets import TargetRef
from archsearch.records import WRONG_SHAPE
from archsearch.speedup import DIVERGENCE_ODDS, DIVERGENCE_POWER

SIZE_LOSS, SIZE_POWER = 482.0, 0.348
TOKEN_LOSS, TOKEN_POWER = 2085.4, 0.366
EQUALS_DIFFER: Final = 0.25
DISTILLED_WORTH: Final = 1.9
LAYERS_WORTH: Final = 1e7
PARENT_WORTH: Final = 0.037
HEAD_WORTH: Final = 20.0
# Tokens behind a model of which nobody says it; of heads that are published without saying it: 100k
# to 1M dialogues.
USUAL_PRETRAINING: Final = 1e12
USUAL_TARGET_TOKENS: Final = 1e13
PUBLISHED_HEAD_TOKENS: Final = 3e8
# The table knows heads after 2.5e7 tokens and more; below, a slope beyond the law is not followed.
FEWEST_HEAD_TOKENS: Final = 2.5e7
# A pretrained draft that is tuned on what its target writes gains .16 to .58 logit a decade between
# 1e4 and 2.4e6 tokens, more than so few add to billions (curves of arXiv 2310.07177); what more of
# them bring nobody printed.
TUNED_FROM: Final = 1e4
TUNED_TO: Final = 2.5e6
# A draft cut from its target adapts in its first million tokens: this project's own curves.
EARLY_TOKENS: Final = 1e6
# Below, 1.3 to 3 logit a decade go, thrice as much as above (curves of this project's down to 1,400
# tokens); the table's drafts of that kind saw more.
FEWEST_TOKENS: Final = 1e4
FEWER_FALL: Final = 2.0
MODELS_FILE: Final = Path(__file__).parent / "pretraining.csv"


@dataclass(frozen=True, slots=True)
class Learning:
    """How a draft came to be; tokens may be arrays. `parent_tokens`: of the model it was pruned
    from; `on_policy`: whether its target wrote what it was distilled on."""

    init: str
    pretrain_tokens: float = 0.0
    distill_tokens: float = 0.0
    parent_tokens: float = 0.0
    on_policy: bool = True

    @property
    def tokens(self) -> float:
        """All that shaped its weights, in tokens of plain text from scratch."""
        cut = LAYERS_WORTH if self.init == "target_layers" else 0.0
        own = self.pretrain_tokens + DISTILLED_WORTH * self.distill_tokens
        return own + PARENT_WORTH * self.parent_tokens + cut

    def terms(self, body: float, target_body: float, target_tokens: float) -> dict[str, float]:
        """The regressors `learnt`, `early`, `late` and `tuned` of a draft that sees tokens only,
        with `body` parameters in its layers."""
        body = np.minimum(body, target_body)
        lacking = SIZE_LOSS * (body**-SIZE_POWER - target_body**-SIZE_POWER)
        found = {"learnt": _logit(lacking + _token_loss(self.tokens) - _token_loss(target_tokens))}
        seen = self.distill_tokens
        if self.init == "target_layers":
            seen = np.maximum(seen, 1e2)
            young = FEWER_FALL * np.log10(np.minimum(seen, FEWEST_TOKENS) / FEWEST_TOKENS)
            found["early"] = young + np.log10(np.minimum(seen, EARLY_TOKENS) / EARLY_TOKENS)
            found["late"] = np.log10(np.maximum(seen, EARLY_TOKENS) / EARLY_TOKENS)
        elif self.init == "pretrained" and self.on_policy:
            found["tuned"] = np.log10(1.0 + np.minimum(seen, TUNED_TO) / TUNED_FROM)
        return found


def head_terms(tokens: float, target_tokens: float) -> dict[str, float]:
    """The regressors `learnt`, `early` and `head_tokens` of a drafter that reads the target's
    hidden states, after `tokens`. What it reads is worth no less than layers of the target."""
    seen = np.maximum(tokens, 1e3)
    excess = _token_loss(HEAD_WORTH * seen + LAYERS_WORTH) - _token_loss(target_tokens)
    early = np.log10(np.minimum(seen, EARLY_TOKENS) / EARLY_TOKENS)
    usual = np.log10(np.maximum(seen, FEWEST_HEAD_TOKENS) / PUBLISHED_HEAD_TOKENS)
    return {"learnt": _logit(excess), "early": early, "head_tokens": usual}


def _token_loss(tokens: float) -> float:
    return TOKEN_LOSS * np.maximum(tokens, 1e3) ** -TOKEN_POWER


def _logit(excess: float) -> float:
    divergence = np.maximum(excess, 0.0) + EQUALS_DIFFER
    return math.log(DIVERGENCE_ODDS) - DIVERGENCE_POWER * np.log(divergence)


@cache
def _models() -> dict[str, tuple[float, float]]:
    """(tokens, parent's tokens) by catalogue name."""
    try:
        return {
            row["name"]: (float(row["tokens"]), float(row["parent_tokens"] or 0.0))
            for row in csv_rows(MODELS_FILE)
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ArchsearchError(f"{MODELS_FILE}: a row is broken: {error}") from error


@lru_cache(maxsize=512)
def known_learning(shape: Architecture) -> Learning | None:
    """How a model of the catalogue with this shape came to be; None where its tokens are not
    known."""
    models = _models()
    for entry in catalogue.alike(shape):
        if entry.name in models:
            tokens, parent = models[entry.name]
            return Learning("pruned" if parent else "pretrained", tokens, parent_tokens=parent)
    return None


def tokens_behind(target: Architecture | None) -> float:
    """Tokens that a target was trained on; USUAL_TARGET_TOKENS where nobody says."""
    known = known_learning(target) if target is not None else None
    return USUAL_TARGET_TOKENS if known is None else float(known.pretrain_tokens)


# Training tokens of a head that nobody says anything of: from 3,000 samples (whose heads have tau
# 1.33 to 1.52 where published ones have 1.6 to 2.1) to what published ones saw. Decades are the
# std.
HEAD_GUESS: Final = 3e7
HEAD_GUESS_DECADES: Final = 1.0


def training_of(draft: TargetRef, target: TargetRef) -> tuple[str, str]:
    """(one of TRAININGS, a note for the user where that is a guess, else ""): of one family
    `shared`, of two `other`, as the catalogue has them by name, hub id or shape; a folder that
    holds a training record of ours `target`."""
    if draft.folder is not None and (draft.folder / "training.json").is_file():
        return "target", ""
    known = (
        catalogue.named(each.name) or next(iter(catalogue.alike(each.architecture)), None)
        for each in (draft, target)
    )
    first, second = (entry.family if entry else "" for entry in known)
    if not first or not second:
        guess = "nobody says how it was trained, taken as made for this target"
        return "target", f"{guess} (else --training shared or other)"
    return ("shared" if first == second else "other"), ""


def trained_as(
    context: AcceptanceContext, draft: TargetRef | None, training: str, tokens: float | None = None
) -> AcceptanceContext:
    """The context of a draft that exists, trained as `training` says, on `tokens` of the target's
    text where they are known: a model of the catalogue that was made for its target began as what
    it is known as, and was tuned. `draft` None: a drafter that is no model of its own."""
    known = (
        known_learning(draft.architecture) if draft is not None and draft.folder is None else None
    )
    before = known.tokens if training == "target" and known is not None else None
    return replace(context, training=training, pretrain_tokens=before, trained_tokens=tokens)


def recorded_tokens(folder: Path | None) -> float | None:
    """How many tokens of the target's text a draft of ours saw, by its training.json; None where
    nobody wrote it down."""
    record = folder / "training.json" if folder is not None else None
    if record is None or not record.is_file():
        return None
    data = read_json(record, "training record")
    tokens = data.get("tokens") if isinstance(data, dict) else None
    return float(tokens) if isinstance(tokens, int | float) and tokens > 0 else None


def run_of(folder: Path) -> Any:
    """run.yaml of the run that a draft's folder is of, or was exported from. Raises one of
    WRONG_SHAPE for none."""
    if (marker := folder / "export.json").is_file():
        return read_json(marker, "the export's marker")["provenance"]["run"]
    return read_yaml(folder.parents[1] / "run.yaml", "the run's file")


def measured_alpha(folder: Path, target: TargetRef, temperature: float) -> Estimate | None:
    """alpha of a draft as its run measured it with this target at this temperature; None where
    nobody did."""
    try:
        asked, score = run_of(folder)["arguments"], read_json(folder / "score.json", "score")
        alpha = Estimate.from_dict(score["alpha"])
        own = asked["target"] in (target.name, target.place)
        same = own and asked.get("temperature", 0.0) == temperature
    except WRONG_SHAPE:
        return None
    return alpha if same and alpha.source == "measured" else None
