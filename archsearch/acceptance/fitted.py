"""What the table said, as it is stored: coefficients for a target that nobody measured
(published_fit.json)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np

from archsearch.acceptance.terms import COEFFICIENTS, Term
from archsearch.errors import ArchsearchError
from archsearch.files import read_json

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


@cache
def load_fit(path: Path = FIT_FILE) -> PublishedFit:
    """The stored outcome of `published.fit_all`. Fast: no table is read."""
    data = read_json(path, "fit of the published measurements")
    other = ArchsearchError(
        f"{path} was made by another version; run: python -m archsearch.acceptance.published"
    )
    size = len(COEFFICIENTS)
    try:
        if (
            tuple(data["coefficients"]) != COEFFICIENTS
            or len(data["covariance_upper"]) != size * (size + 1) // 2
        ):
            raise other
        upper = np.zeros((size, size))
        upper[np.triu_indices(size)] = data["covariance_upper"]
        covariance = upper + np.triu(upper, 1).T
        drift = {name: Term(*value) for name, value in data["drift"].items()}
        return PublishedFit(
            np.array(data["mean"]), covariance, data["rows"], data["spread"], drift, data["inputs"]
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise other from error
