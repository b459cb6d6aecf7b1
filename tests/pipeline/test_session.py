"""What a search decides by itself, and what run.yaml keeps of what was asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from archsearch.pipeline import SearchRequest, session
from archsearch.workload import WorkloadRequest

ASKED = WorkloadRequest("cpu", context_len=64, engine="vllm", tensor_parallel=2)


@pytest.fixture(autouse=True)
def weights_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        session,
        "cannot_train",
        lambda target, gpu, engine: "" if target == "here" else f"no weights of {target}",
    )


@pytest.mark.parametrize(
    ("asked", "confirm", "climb"),
    [
        ({}, 0, False),
        ({"time_budget_s": 60.0}, 1, True),
        ({"time_budget_s": 60.0, "alpha": "0.7"}, 0, False),
        ({"time_budget_s": 60.0, "confirm": 0}, 0, False),
        ({"time_budget_s": 60.0, "finalists": 4}, 1, False),
        ({"confirm": 2}, 2, True),
        ({"confirm": 2, "alpha": "prior"}, 2, False),
    ],
    ids=str,
)
def test_whether_to_train_and_to_climb(asked: dict, confirm: int, climb: bool) -> None:
    request, note = SearchRequest.decide("here", ASKED, **asked)
    assert (request.confirm, request.climb, note) == (confirm, climb, "")


def test_a_time_budget_without_weights_ranks_and_says_why() -> None:
    request, note = SearchRequest.decide("elsewhere", ASKED, time_budget_s=60.0)
    assert (request.confirm, request.climb, note) == (0, False, "no weights of elsewhere")
    wanted, note = SearchRequest.decide(
        "elsewhere", ASKED, confirm=1
    )  # asked for in so many words: refused later, in one line
    assert (wanted.confirm, note) == (1, "")


def test_as_many_finalists_as_are_confirmed() -> None:
    assert SearchRequest.decide("here", ASKED, confirm=5, finalists=2)[0].finalists == 5


def test_arguments_are_flat_and_come_back() -> None:
    request = SearchRequest("here", ASKED, space="tiny.yaml", prompts=Path("mine.jsonl"), trials=7)
    arguments = request.arguments()
    assert {
        "context": 64,
        "gpu": "cpu",
        "engine": "vllm",
        "tensor_parallel": 2,
        "batch_size": 1,
        "dtype": None,
    }.items() <= (arguments.items())
    assert not {"asked", "context_len", "profile", "run", "climb"} & set(arguments)
    again = SearchRequest.from_arguments({**arguments, "of a later version": 1})
    assert again == request and replace(again, trials=8) != request


def test_which_text_a_search_is_about(tmp_path: Path) -> None:
    """`chat` where nobody says; `narrow` where prompts of one kind decide; a run goes on as it
    began, one of 0.1.0 too."""
    assert SearchRequest("here", ASKED).settled().domain == "chat"
    assert (
        SearchRequest("here", ASKED, prompts=tmp_path / "mine.jsonl").settled().domain == "narrow"
    )
    assert SearchRequest("here", ASKED, confirm=1).settled().domain == "narrow"
    assert SearchRequest("here", ASKED, confirm=1, domain="code").settled().domain == "code"
    old = Path(__file__).parents[1] / "fixtures" / "run-0.1.0" / "run"
    again = SearchRequest("here", ASKED, run=old).settled()
    assert (again.domain, again.max_gamma) == ("narrow", 8)
    assert (
        SearchRequest("here", ASKED).settled().max_gamma,
        SearchRequest("here", ASKED, max_gamma=4).settled().max_gamma,
    ) == (
        16,
        4,
    )
