"""`python -m archsearch.latency.refit`: learn the kernel tables of all shipped profiles anew and
store the fits beside them."""

from __future__ import annotations

from pathlib import Path

from archsearch.architecture.op_kinds import OP_KINDS
from archsearch.latency import stored
from archsearch.latency.ops import OpModel
from archsearch.paths import data_dir
from archsearch.profiles import Profile


def fits_of(profile: Profile) -> dict[str, dict[str, object]]:
    """All tables of a GPU profile under CUDA graphs, learnt from its rows: what is stored, by
    digest."""
    profile.folder = None  # nothing stored is taken
    found: dict[str, dict[str, object]] = {}
    for dtype, mode in profile.combinations():
        if mode == "graph" and profile.select("gemm", dtype, mode):
            found |= OpModel(profile, dtype, mode).fits(OP_KINDS)
    return found


def shipped() -> list[Path]:
    """Folders of the GPU profiles that come with archsearch as imported tables."""
    folders = sorted(header.parent for header in data_dir("profiles").glob("*/*/profile.json"))
    return [folder for folder in folders if Profile.load(folder).imported]


if __name__ == "__main__":
    for path in shipped():
        stored.save(path, fits_of(Profile.load(path)))
