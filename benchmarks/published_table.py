"""The tables that the prior rests on: published measurements (published.csv) and this project's own
drafts: sketches (anchors.yaml) and the study of shapes (shape_study.csv)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from archsearch.acceptance.estimator import DOMAINS, DRAFTERS, TRAININGS
from archsearch.architecture.architecture import Architecture
from archsearch.errors import ArchsearchError
from archsearch.files import csv_rows, read_yaml

HERE: Final = Path(__file__).parent / "data"
ANCHORS_FILE: Final = HERE / "anchors.yaml"
PUBLISHED_FILE: Final = HERE / "published.csv"
STUDY_FILE: Final = HERE / "shape_study.csv"
OWN_STUDY: Final = "archsearch sketches"
OWN_LOT: Final = f"{OWN_STUDY}, distilled for minutes"
STUDY_LOT: Final = f"{OWN_STUDY}, one pass over the same texts"
INITS: Final = ("random", "target_layers", "pruned", "pretrained")
STUDY_SHAPE: Final = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


@dataclass(frozen=True, slots=True)
class Published:
    """A row of published.csv; None where the source does not say. Columns are explained at the head
    of the file."""

    id: str
    study: str
    source_title: str
    source_ref: str
    family: str
    draft: str
    target: str
    target_key: str
    target_family: str
    target_params_b: float | None
    target_hidden_size: int | None
    body_params_m: float | None
    layers: int | None
    hidden_size: int | None
    heads: int | None
    kv_heads: int | None
    draft_vocab: int | None
    training: str
    recipe: str
    init: str
    pretrain_tokens: float | None
    parent_tokens: float | None
    distill_tokens: float | None
    on_policy: bool | None
    target_tokens: float | None
    domain: str
    dataset: str
    temperature: float | None
    gamma: int | None
    metric: str
    conversion: str
    tau: float | None
    positions: tuple[float, ...]
    alpha: float
    alpha_std: float | None
    level: bool
    sweep: str
    note: str


def _number(text: str) -> float | None:
    return float(text) if text else None


def _whole(text: str) -> int | None:
    return round(float(text)) if text else None


_YES_NO: Final = {"yes": True, "no": False}
_CELLS: Final[dict[str, Callable[[str], Any]]] = {
    "str": str,
    "float": float,
    "float | None": _number,
    "int | None": _whole,
    "bool": _YES_NO.__getitem__,
    "bool | None": {**_YES_NO, "": None}.__getitem__,
    "tuple[float, ...]": lambda text: tuple(map(float, text.split())),
}
"""How a column's cells are read, by the type of its field."""


def _wrong(row: Published) -> str:
    """What no row may say; "" for a good one."""
    if not 0.0 < row.alpha < 1.0:
        return f"alpha {row.alpha:g} lies outside 0 to 1"
    for name, value, known in (
        ("family", row.family, DRAFTERS),
        ("training", row.training, TRAININGS),
        ("init", row.init, INITS),
    ):
        if value not in known:
            return f"{name} {value!r} is none of {', '.join(known)}"
    if row.family == "independent" and row.pretrain_tokens is row.distill_tokens is None:
        return "an independent draft needs pretrain_tokens or distill_tokens"
    if row.level and row.domain not in DOMAINS:
        return f"domain {row.domain!r} is none of {', '.join(DOMAINS)}"
    return ""


@cache
def load_published(path: Path = PUBLISHED_FILE) -> tuple[Published, ...]:
    """The rows of the table. Raises ArchsearchError naming the line that is broken."""
    columns = {name: _CELLS[str(kind)] for name, kind in Published.__annotations__.items()}
    rows = []
    for row in csv_rows(path):
        wrong = ""
        try:
            item = Published(**{name: read(row[name]) for name, read in columns.items()})
            wrong = _wrong(item)
        except KeyError as error:
            wrong = f"{error} is no value of a column, or none of the columns"
        except (TypeError, ValueError) as error:
            wrong = str(error)
        if wrong:
            raise ArchsearchError(
                f"{path}: row {row.get('id')!r} is broken: {wrong}; columns are explained at the"
                " head of the file"
            )
        rows.append(item)
    return tuple(rows)


@dataclass(frozen=True, slots=True)
class Anchor:
    """A draft of this project that was trained and measured: alpha in a domain after so many
    tokens, as with a full head.

    `std`: of logit(alpha) beside what a draft of its own explains; of a sketch 0.08: one seed, 80
    texts, two runs of one differed by this much. `context_len`: tokens before the measured ones, on
    average. `lot`: drafts trained alike.
    """

    domain: str
    alpha: float
    architecture: Architecture
    tokens: float
    target: str
    source: str
    std: float = 0.08
    context_len: int = 512
    lot: str = OWN_LOT


@cache
def load_anchors() -> tuple[Architecture, tuple[Anchor, ...]]:
    """The reference shape and the anchors."""
    data: Any = read_yaml(ANCHORS_FILE, "anchors")
    reference = Architecture(**data["reference"])
    return reference, tuple(
        Anchor(
            row["domain"],
            float(row["alpha"]),
            reference.replace(**row["shape"]),
            float(row["tokens"]),
            row["target"],
            row["source"],
        )
        for row in data["anchors"]
    )


@cache
def load_shape_study(path: Path = STUDY_FILE) -> tuple[Anchor, ...]:
    """Drafts of many shapes trained alike (benchmarks/shape_study.py). Raises ArchsearchError
    naming the line that is broken."""
    reference = load_anchors()[0]
    found = []
    for number, row in enumerate(csv_rows(path), start=1):
        try:
            shape = {name: int(row[name]) for name in STUDY_SHAPE}
            window = {
                "window_pattern": row["window_pattern"],
                "sliding_window": _whole(row["sliding_window"]),
            }
            found.append(
                Anchor(
                    row["domain"],
                    float(row["alpha"]),
                    reference.replace(**shape, **window),
                    float(row["tokens"]),
                    row["target"],
                    f"study of shapes, seed {row['seed']}",
                    float(row["std"]),
                    int(row["context_len"]),
                    STUDY_LOT,
                )
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ArchsearchError(
                f"{path}: row {number} is broken: {error}; columns are explained at the head of the"
                " file"
            ) from error
    return tuple(found)


def own_drafts() -> tuple[Anchor, ...]:
    """Everything that this project trained and measured for the prior."""
    return (*load_anchors()[1], *load_shape_study())
