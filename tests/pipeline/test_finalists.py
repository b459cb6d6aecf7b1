"""Finalists are compared on equal tokens, whatever the machine does meanwhile."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from archsearch.pipeline import finalists
from archsearch.search.objective import Scorer
from archsearch.workload import Workload
from tests.pipeline.test_climb import (
    SPACE,
    SPEED,
    TARGET,
    Clock,
    Latency,
    MadeUpTrainer,
    PriorAcceptance,
    by_law,
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(finalists, "time", found)
    return found


def session_in(folder: Path) -> SimpleNamespace:
    scorer = Scorer(TARGET, Workload(context_len=160), Latency(), PriorAcceptance())
    request = SimpleNamespace(seed=0, finalists=3, time_budget_s=1200.0)
    return SimpleNamespace(scorer=scorer, request=request, run=SimpleNamespace(path=folder))


def ranked(scorer: Scorer) -> list:
    return sorted(
        (scorer(shape) for shape in SPACE.enumerate(TARGET)), key=lambda score: -score.speedup.value
    )


@pytest.mark.parametrize("slows", [[], [SPEED / 2, SPEED], [SPEED * 2, SPEED / 1.5]])
def test_a_machine_that_changes_its_speed_gives_all_finalists_equal_tokens(
    tmp_path: Path, clock: Clock, slows: list[float]
) -> None:
    session, trainer = session_in(tmp_path), MadeUpTrainer(tmp_path, clock, slows=list(slows))
    start = clock.now
    drafts = finalists.train_finalists(session, trainer, ranked(session.scorer))
    level = {tokens for _, tokens in trainer.ended[:3]}
    assert len(drafts) == 3 and max(level) - min(level) <= 1
    assert (
        clock.now - start <= 1.01 * (1 - finalists.TEXT_SHARE_ALONE) * session.request.time_budget_s
    )
    # The best of them by the law, at those tokens, goes on.
    law = by_law(max(level))
    assert trainer.ended[3][0] == max(
        (arch for arch, _ in trainer.ended[:3]), key=lambda arch: law[arch]
    )
    assert trainer.ended[3][1] > 1.2 * max(level)


def test_a_finalist_that_time_cut_short_is_not_beaten_for_that(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    session = session_in(tmp_path)
    scores = ranked(session.scorer)
    law = by_law(100_000)
    shapes = [score.architecture for score in finalists.choose_finalists(scores, 3)]
    scores = sorted(
        scores, key=lambda score: law[score.architecture] if score.architecture in shapes else 9.0
    )
    scores = [
        score for score in scores if score.architecture in shapes
    ]  # the best by the law is trained last
    trainer = MadeUpTrainer(tmp_path, clock, slows=[SPEED, SPEED / 20])
    finalists.train_finalists(session, trainer, scores)
    assert "machine has become slower" in capsys.readouterr().err
    assert trainer.ended[2][1] < 0.7 * trainer.ended[0][1]
    assert trainer.ended[3][0] == trainer.ended[2][0]


def test_a_killed_training_goes_on_with_the_same_choices(tmp_path: Path, clock: Clock) -> None:
    session, trainer = session_in(tmp_path), MadeUpTrainer(tmp_path, clock)
    finalists.train_finalists(session, trainer, ranked(session.scorer))
    before, again = clock.now, MadeUpTrainer(tmp_path, clock)
    drafts = finalists.train_finalists(session, again, ranked(session.scorer))
    assert clock.now == before and not again.calls
    assert [draft.architecture for draft in drafts] == [arch for arch, _ in trainer.ended[:3]]


def test_tokens_are_shared_so_that_all_end_level() -> None:
    assert finalists.equal_tokens(300.0, [1000.0, 1000.0, 500.0], [0, 0, 0]) == 75_000
    assert finalists.equal_tokens(10.0, [1000.0, 1000.0], [6_000, 0]) == 8_000
    assert finalists.equal_tokens(1.0, [1000.0, 1000.0], [50_000, 0]) == 55_000


def test_a_draft_that_saw_less_than_half_of_what_was_foreseen_is_not_judged(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    session = session_in(tmp_path)
    finalists.train_finalists(
        session, MadeUpTrainer(tmp_path / "quiet", clock), ranked(session.scorer)
    )
    assert finalists.finalist_notes(session) == []
    (tmp_path / "busy").mkdir()
    session = session_in(tmp_path / "busy")
    trainer = MadeUpTrainer(tmp_path / "busy", clock, slows=[SPEED / 8, SPEED / 8, SPEED / 8])
    finalists.train_finalists(session, trainer, ranked(session.scorer))
    (note,) = finalists.finalist_notes(session)
    assert note.startswith("could not judge") and "because the machine was busy" in note
    assert capsys.readouterr().err.count(note) == 1
