"""What was learnt from the kernel tables of a shipped profile, stored beside its rows
(kernel_fit.json).

Learning a GPU's tables takes seconds; reading them back takes milliseconds. The fit of a table is
found by the digest of the rows that it was learnt from, so a profile with other rows is learnt as
before. `benchmarks/kernel_fit.py` writes the files; a test holds them fresh.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from archsearch.architecture.ops import Op
from archsearch.errors import ArchsearchError
from archsearch.estimate import Array
from archsearch.files import read_json
from archsearch.latency.regression import Kriging

FILE: Final = "kernel_fit.json"
FORMAT: Final = 1
Fit = tuple[Array, Kriging]
"""coefficients of the base [columns], correction of a table"""


def digest_of(ops: Sequence[Op], times_s: Array, multiprocessors: int) -> str:
    """Names the rows of a table: the same ops with the same seconds on as many multiprocessors.

    Of an op counts what is not its default: a field that ops gain later changes no digest.
    """
    usual = [(field.name, field.default) for field in fields(ops[0])]
    rows = "\n".join(
        f"{[(name, value) for name, default in usual if (value := getattr(op, name)) != default]}"
        f" {s!r}"
        for op, s in zip(ops, times_s.tolist(), strict=True)
    )
    return hashlib.sha256(f"{multiprocessors}\n{rows}".encode()).hexdigest()[:16]


def stored_fit(
    folder: Path | None, digest: str, log_ratio_of: Callable[[Array], Array], place: Array
) -> Fit | None:
    """The fit in `folder` of the rows that `digest` names; None where there is none.

    `place` [rows, features] and `log_ratio_of` (coefficients -> [rows]) are those of the rows.
    """
    # another digest: the rows changed since, and the tables are learnt anew
    data = None if folder is None else _tables(folder).get(digest)
    if data is None:
        return None
    coefficients, lengths, row_noise = (
        _array(data[name]) for name in ("coefficients", "lengths", "row_noise")
    )
    noise = float(data["noise"])
    if not len(row_noise):  # all rows count alike
        row_noise = np.full(len(place), noise)
    scale = (float(data["amplitude"]), noise, float(data["calibration"]))
    return coefficients, Kriging(
        place / lengths, log_ratio_of(coefficients), row_noise, lengths, *scale
    )


@lru_cache(maxsize=8)
def _tables(folder: Path) -> Mapping[str, Any]:
    """By digest; {} where nothing that this version reads is stored: then tables are learnt."""
    try:
        data = read_json(folder / FILE, "stored fit")
    except ArchsearchError:
        return {}
    known = isinstance(data, dict) and data.get("format") == FORMAT
    return data["tables"] if known else {}


def _array(text: str) -> Array:
    return np.frombuffer(base64.b64decode(text), dtype="<f8").astype(np.float64)
