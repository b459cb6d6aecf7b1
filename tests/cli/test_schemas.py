"""The schemas in docs/schemas hold for runs: one made here, confirmed in an engine, and one of
version 0.1.0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.commands import call

jsonschema = pytest.importorskip(
    "jsonschema", reason="jsonschema is not installed (pip install jsonschema)"
)

ROOT = Path(__file__).resolve().parent.parent.parent
OLD = ROOT / "tests" / "fixtures" / "run-0.1.0"
FILES = {
    "run": "run.yaml",
    "score": "best/*/score.json",
    "curves": "curves.json",
    "training": "best/*/training.json",
    "confirmed": "best/*/confirmed.json",
    "schedule": "best/*/schedule.json",
    "budgets": "budgets.json",
}


def schema(name: str) -> Any:
    return json.loads((ROOT / "docs" / "schemas" / f"{name}.schema.json").read_text())


def checked(run: Path, name: str) -> int:
    """How many files of the run hold to the schema; a file that does not fails the test."""
    found = sorted(run.glob(FILES[name]))
    validator = jsonschema.Draft202012Validator(schema(name))
    for path in found:
        text = path.read_text()
        data = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
        faults = [
            f"{path.name} {'/'.join(map(str, fault.path))}: {fault.message[:150]}"
            for fault in validator.iter_errors(data)
        ]
        assert not faults, faults[:3]
    return len(found)


@pytest.mark.parametrize("name", FILES)
def test_schemas_are_schemas(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(schema(name))


def test_a_run_made_now(with_ranks: Path) -> None:
    run = Path("runs/a")
    call("report", str(run))
    call("schedule", str(run), "--batch-size", "1")
    counts = {
        name: checked(run, name) for name in ("run", "score", "curves", "schedule", "budgets")
    }
    assert (
        counts["run"] == counts["curves"] == counts["schedule"] == counts["budgets"] == 1
        and counts["score"] > 1
    )


def test_a_confirmed_run(with_run: Path) -> None:
    counts = {name: checked(Path("runs/a"), name) for name in FILES}
    assert all(counts[name] for name in ("run", "score", "curves", "training", "confirmed"))


@pytest.mark.parametrize("run", ["run", "climb"])
def test_a_run_of_the_first_version(run: str) -> None:
    assert checked(OLD / run, "run") == 1 and checked(OLD / run, "score") >= 1
    assert checked(OLD / run, "training") >= 1 or run == "run"


def test_a_schema_refuses_what_is_wrong() -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"ranges": [[1, 2]]}, schema("schedule"))
