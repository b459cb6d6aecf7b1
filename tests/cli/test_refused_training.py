"""Nothing is trained where nothing that would be trained can be expected to pay, unless
--anyway."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from archsearch.estimate import Estimate
from archsearch.pipeline import scoring as asked
from archsearch.pipeline.session import SearchSession
from tests.cli.commands import CONFIRM, invoke


@pytest.fixture
def refused(world: Path) -> str:
    command = [word for word in CONFIRM if word != "--anyway"]
    result = invoke(*command, "--run", "runs/a", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout.splitlines()[-1])["refused"] in result.stderr
    return result.stderr.splitlines()[-1]


def test_a_search_that_cannot_pay_only_ranks_and_says_what_it_would_take(refused: str) -> None:
    assert refused.startswith("Error: no draft is expected to pay for target on ")
    assert (
        "5 to 95 %" in refused
        and "alpha" in refused
        and "--engine" in refused
        and "--dtype" in refused
    )
    assert "--batch-size" not in refused, "one request at a time is the smallest batch"
    run = Path("runs/a")
    assert (run / "best/1/score.json").is_file() and (run / "report.html").is_file()
    assert not list(run.glob("**/model.safetensors")) and not (run / "rungs.json").exists(), (
        "nothing was trained"
    )


def test_one_shape_that_may_pay_is_enough_and_what_has_begun_goes_on(
    refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = SearchSession.reopen(Path("runs/a"))
    score = session.run.score(1)
    for high, said in ((0.99, True), (1.01, False)):
        doubtful = replace(score, speedup=Estimate(0.7, 0.2, "prior", 0.5, high))
        found = SimpleNamespace(best=[doubtful])
        monkeypatch.setattr(asked, "_scored", lambda *_, found=found: found)
        assert bool(asked.hopeless(session)) is said
    sure = replace(score, speedup=Estimate(0.7, 0.0, "prior", 0.6, 0.8))
    monkeypatch.setattr(asked, "_scored", lambda *_: SimpleNamespace(best=[sure]))
    (session.run.path / "finalists").mkdir()
    assert asked.hopeless(session) == ""
