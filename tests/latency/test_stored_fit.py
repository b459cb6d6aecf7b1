"""The fits stored beside shipped profiles are those of their rows."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from archsearch.architecture.op_kinds import OP_KINDS
from archsearch.architecture.ops import Attention, Gemm
from archsearch.latency import regression, stored
from archsearch.latency.ops import OpModel
from archsearch.profiles import Profile
from benchmarks.kernel_fit import fits, fits_of, shipped

SHIPPED = shipped()
ASKED = [Gemm(m, n, k) for m in (1, 5, 48) for n in (1536, 7000) for k in (2048, 8191)]
ASKED += [Attention(b, t, c, 32, 8, 128) for b in (1, 7) for t in (1, 6) for c in (300, 5000)]


def answers(profile: Profile) -> np.ndarray:
    """Seconds and relative stds of ASKED."""
    model = OpModel(profile, "bfloat16", "graph")
    return np.array([model.op_s(op, True) for op in ASKED])


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.parent.name)
def test_every_shipped_table_is_stored_and_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def learn(*_: object, **__: object) -> None:
        raise AssertionError("run: python benchmarks/kernel_fit.py")

    monkeypatch.setattr(regression.Kriging, "fit", learn)
    profile = Profile.load(folder)
    found: set[str] = set()
    for dtype, mode in profile.combinations():
        if mode == "graph":
            found |= fits(OpModel(profile, dtype, mode), OP_KINDS).keys()
    assert found == stored._tables(folder).keys()


def test_a_stored_fit_answers_as_learning_does() -> None:
    [folder] = [folder for folder in SHIPPED if folder.parent.name.startswith("a100")]
    quick, learnt = Profile.load(folder), Profile.load(folder)
    learnt.folder = None
    # learning ends where an optimiser stops: BLAS libraries and threads differ by 5e-6
    np.testing.assert_allclose(answers(quick), answers(learnt), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.parent.name)
def test_all_stored_fits_are_those_of_the_rows(folder: Path) -> None:
    known = stored._tables(folder)
    for digest, fit in fits_of(Profile.load(folder)).items():
        assert fit["amplitude"] == pytest.approx(known[digest]["amplitude"], rel=1e-6)
        # leaving rows out solves ill-conditioned systems: processors differ by up to 2e-2 (seen
        # in one table of 40, by the code that wrote it), and it only scales the std
        assert fit["calibration"] == pytest.approx(known[digest]["calibration"], rel=3e-2)


def test_other_rows_and_broken_files_are_learnt_anew(tmp_path: Path) -> None:
    [folder] = [folder for folder in SHIPPED if folder.parent.name.startswith("a100")]
    shutil.copytree(folder, tmp_path / "own")
    rows = (tmp_path / "own" / "rows.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "own" / "rows.jsonl").write_text("".join(rows[::6]))
    half = Profile.load(tmp_path / "own")
    before = answers(half)
    (tmp_path / "own" / stored.FILE).write_text("{ broken")
    stored._tables.cache_clear()
    np.testing.assert_array_equal(answers(half), before)
    assert not np.allclose(before, answers(Profile.load(folder)), rtol=1e-9)
