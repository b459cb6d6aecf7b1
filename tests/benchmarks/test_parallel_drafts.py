"""The constants of parallel drafters are those that their published rows give."""

from __future__ import annotations

import pytest

from archsearch.acceptance.families import PARALLEL_HEAD_DRIFT
from parallel_drafts import fitted_drift, read_sweeps


def test_the_drift_of_p_eagle_heads_is_the_fitted_one() -> None:
    found = fitted_drift(read_sweeps())
    assert found.mean == pytest.approx(PARALLEL_HEAD_DRIFT.value, abs=0.005)
    assert found.std == pytest.approx(PARALLEL_HEAD_DRIFT.std, abs=0.005)
