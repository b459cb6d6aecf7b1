"""What the prior is given that it cannot use: one line that names the value."""

from __future__ import annotations

import csv
import json

import pytest

from archsearch.acceptance.estimator import AcceptanceContext
from archsearch.acceptance.prior import PriorAcceptance
from archsearch.acceptance.table import PUBLISHED_FILE, load_published
from archsearch.acceptance.terms import FIT_FILE, load_fit
from archsearch.architecture.architecture import Architecture
from archsearch.errors import ArchsearchError

DRAFT = Architecture(576, 1536, 2, 9, 3, 64, 49152)


@pytest.mark.parametrize(
    ("field", "value"), [("domain", "poems"), ("training", "tuned"), ("drafter", "oracle")]
)
def test_an_unknown_domain_training_or_kind_is_named(field, value):
    with pytest.raises(ArchsearchError, match=f"unknown .*{value}.*use one of") as error:
        PriorAcceptance().predict(DRAFT, AcceptanceContext(**{field: value}))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("alpha", "1.2", "alpha 1.2 lies outside"),
        ("alpha", "much", "could not convert string to float: 'much'"),
        ("training", "tuned", "training 'tuned' is none of target, shared, other"),
        ("family", "oracle", "family 'oracle' is none of"),
        ("level", "maybe", "'maybe' is no value"),
    ],
)
def test_a_broken_row_of_the_table_is_named_with_what_is_wrong(tmp_path, column, value, words):
    lines = [
        line
        for line in PUBLISHED_FILE.read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
    ]
    rows = list(csv.DictReader(lines))[:3]
    rows[1][column] = value
    path = tmp_path / "table.csv"
    with path.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    with pytest.raises(ArchsearchError) as error:
        load_published(path)
    assert (
        words in str(error.value)
        and repr(rows[1]["id"]) in str(error.value)
        and "\n" not in str(error.value)
    )


@pytest.mark.parametrize(
    "change", [{"coefficients": ["size"]}, {"drift": 3}, {"covariance_upper": [1.0]}, None]
)
def test_a_fit_of_another_version_says_how_to_make_it_anew(tmp_path, change):
    data = {} if change is None else {**json.loads(FIT_FILE.read_text()), **change}
    (tmp_path / "fit.json").write_text(json.dumps(data))
    with pytest.raises(
        ArchsearchError, match="another version; run: python benchmarks/acceptance_fit.py"
    ):
        load_fit(tmp_path / "fit.json")


@pytest.mark.parametrize(
    "data", [{}, {"coefficients": "x"}, {"names": ["poetry"]}, {"observations": None}]
)
def test_the_prior_of_a_run_of_another_version_says_so(data):
    whole = PriorAcceptance().to_dict()
    wrong = data if not data else {**whole, **data}
    with pytest.raises(ArchsearchError, match="another version of archsearch; use another --run"):
        PriorAcceptance.from_dict(wrong)
    assert PriorAcceptance.from_dict(whole).predict(
        DRAFT, AcceptanceContext()
    ) == PriorAcceptance().predict(DRAFT, AcceptanceContext())
