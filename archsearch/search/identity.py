"""What a score depends on, so that searches that share a storage never take each other's scores for
their own.

Each question has a study of its own in a storage, named by a digest of its identity. The identity
lists what is known to matter and carries a witness: what the scorer says of the target and of two
plain shapes. Whatever else changes a score (coefficients of another version, a constant of an
engine) changes the witness, and with it the study.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from archsearch.acceptance.estimator import AcceptanceEstimator
from archsearch.architecture.architecture import Architecture
from archsearch.errors import ArchsearchError, InvalidShapeError
from archsearch.search.objective import Scorer
from archsearch.search.space import InvalidShape, SearchSpace, Value

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from optuna.study import Study

Direction = Literal["maximize", "minimize"]
ATTRIBUTE: Final = "archsearch"  # user attribute of a study: its identity
PLAIN_LAYERS: Final = (2, 4)  # of the plain shapes that bear witness
DIGITS: Final = 6  # of the witness: sums differ in the last digits from machine to machine


def identity_of(space: SearchSpace, scorer: Scorer, about: Mapping[str, Any]) -> dict[str, Any]:
    """Everything a score in this search depends on, as JSON. `about`: what the caller knows besides
    (profile, engine)."""
    context, witness = (
        scorer.context,
        _witness(space, scorer),
    )  # asked first: an estimator may learn its target by being asked
    data = {
        "space": {**space.to_dict(), "draft_ranks": space.draft_ranks, "longest": space.longest},
        "target": scorer.target.to_dict(),
        "workload": asdict(scorer.workload),
        "gammas": list(scorer.gammas),
        "acceptance": _state(scorer.acceptance),
        "domain": context.domain,
        "drafter": context.drafter,
        "trained_tokens": context.trained_tokens,
        **({} if context.pretrain_tokens is None else {"pretrain_tokens": context.pretrain_tokens}),
        "coverage": None if context.coverage is None else _digest(context.coverage.points),
        "limits": asdict(scorer.limits),
        "target_correlation": scorer.target_correlation,
        "about": dict(about),
        "witness": witness,
    }
    if context.budget is not None:  # what a score says that a drafter needs
        numbers = asdict(context.budget)
        data["budget"] = {
            name: f"{value:.3g}" for name, value in numbers.items() if name != "source"
        }
    return json.loads(json.dumps(data, default=str))  # as it will be read back: tuples are lists


def study_name(prefix: str, identity: Mapping[str, Any]) -> str:
    """The name of the study of an identity: `<prefix>-<8 hexadecimal digits>`."""
    return f"{prefix}-{_digest(identity)[:8]}"


def open_study(
    storage: str | BaseStorage,
    prefix: str,
    identity: Mapping[str, Any],
    *,
    directions: Sequence[Direction] = ("maximize",),
) -> Study:
    """The study of an identity in a storage, new where it is not there yet.

    Raises ArchsearchError for a study of another objective or another space.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    name = study_name(prefix, identity)
    study = optuna.create_study(
        storage=storage, study_name=name, directions=list(directions), load_if_exists=True
    )
    if [direction.name.lower() for direction in study.directions] != list(directions):
        raise ArchsearchError(
            f"study {name} in the storage has another objective; use another --storage"
        )
    found = study.user_attrs.get(ATTRIBUTE)
    if found is None:
        study.set_user_attr(ATTRIBUTE, dict(identity))
    elif found != identity:
        differs = ", ".join(
            sorted(key for key in {*found, *identity} if found.get(key) != identity.get(key))
        )
        raise ArchsearchError(
            f"study {name} in the storage is about another {differs}; use another --storage or"
            " --run"
        )
    return study


def _state(acceptance: AcceptanceEstimator) -> str:
    """An estimator's kind and what it has learnt."""
    kind = type(acceptance).__name__
    to_dict = getattr(acceptance, "to_dict", None)
    if to_dict is not None:
        return f"{kind} {_digest(to_dict())}"
    if is_dataclass(acceptance) and not isinstance(acceptance, type):
        return f"{kind} {_digest(asdict(acceptance))}"
    return kind  # the witness knows what it predicts


def _witness(space: SearchSpace, scorer: Scorer) -> list[str]:
    """Numbers of this scorer: the target's decode step, and the first plain shape's best gamma,
    alpha, times and speed-up."""
    numbers = [scorer.decode_s.value]
    for layers in PLAIN_LAYERS:
        shape = space.build(_plain_choices(space, scorer.target, layers), scorer.target)
        if isinstance(shape, InvalidShape):
            continue
        try:
            score = scorer(shape)
        except InvalidShapeError:
            continue
        estimates = (score.alpha, score.tau, score.draft_s, score.verify_s, score.speedup)
        numbers += [
            score.gamma,
            *(number for item in estimates for number in (item.value, item.std)),
        ]
    return [f"{number:.{DIGITS}g}" for number in numbers]


def _plain_choices(space: SearchSpace, target: Architecture, layers: int) -> tuple[int, ...]:
    """The choices nearest to `layers` of the target's own layers, with a quarter of its vocabulary
    in the head."""
    wanted: dict[str, Value] = {
        "num_hidden_layers": layers,
        "hidden_size": target.hidden_size,
        "ffn_ratio": target.intermediate_size / target.hidden_size,
        "num_key_value_heads": target.num_key_value_heads,
        "kv_group_size": target.kv_group_size,
        "head_dim": target.head_dim,
        "draft_vocab_size": max(target.vocab_size // 4, 1),
        "window": "L",
    }
    return space.nearest(wanted, target)


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()
