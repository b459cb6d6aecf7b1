"""The kernel tables of all shipped profiles, learnt anew: kernel_fit.json beside their rows.

python benchmarks/kernel_fit.py
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from archsearch.architecture.op_kinds import OP_KINDS
from archsearch.estimate import Array
from archsearch.files import write_json
from archsearch.latency import stored
from archsearch.latency.ops import OpModel
from archsearch.latency.regression import Kriging
from archsearch.paths import data_dir
from archsearch.profiles import Profile


def _text(values: Array) -> str:
    return base64.b64encode(np.asarray(values, dtype="<f8").tobytes()).decode("ascii")


def to_dict(coefficients: Array, learnt: Kriging) -> dict[str, object]:
    """A table's fit as it is stored: all but what its rows say anew."""
    alike = bool(np.all(learnt.row_noise == learnt.noise))
    return {
        "amplitude": learnt.amplitude,
        "noise": learnt.noise,
        "calibration": learnt.calibration,
        "coefficients": _text(coefficients),
        "lengths": _text(learnt.lengths),
        "row_noise": _text(np.empty(0) if alike else learnt.row_noise),
    }


def fits(model: OpModel, kinds: Iterable[str]) -> dict[str, dict[str, object]]:
    """The tables of `kinds` of ops as `latency.stored` keeps them, by the digest of their
    rows."""
    for kind in model._unfitted.intersection(kinds):
        model._unfitted.discard(kind)
        model._fit_tables(kind)
    tables = model._tables.values()
    return {table.digest: to_dict(table.coefficients, table.residual) for table in tables}


def fits_of(profile: Profile) -> dict[str, dict[str, object]]:
    """All tables of a GPU profile under CUDA graphs, learnt from its rows: what is stored, by
    digest."""
    profile.folder = None  # nothing stored is taken
    found: dict[str, dict[str, object]] = {}
    for dtype, mode in profile.combinations():
        if mode == "graph" and profile.select("gemm", dtype, mode):
            found |= fits(OpModel(profile, dtype, mode), OP_KINDS)
    return found


def shipped() -> list[Path]:
    """Folders of the GPU profiles that come with archsearch as imported tables."""
    folders = sorted(header.parent for header in data_dir("profiles").glob("*/*/profile.json"))
    return [folder for folder in folders if Profile.load(folder).imported]


def save(folder: Path, tables: Mapping[str, dict[str, object]]) -> None:
    """Write the fits of a profile, by digest."""
    write_json(
        folder / stored.FILE, {"format": stored.FORMAT, "tables": dict(sorted(tables.items()))}
    )
    stored._tables.cache_clear()


if __name__ == "__main__":
    for path in shipped():
        save(path, fits_of(Profile.load(path)))
