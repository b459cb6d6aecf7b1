"""Finalists are compared on equal tokens, whatever the machine does meanwhile."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from archsearch.drafts.trainer import choose_finalists
from archsearch.pipeline.climb.plan import write_texts
from archsearch.pipeline.climb.trainings import equal_tokens
from archsearch.runs.state import StateFile
from archsearch.search import rungs
from archsearch.search.rungs import Plan
from tests.pipeline.test_climb import PLAN, SPEED, WITHOUT_ROUNDS, Clock, by_law, make


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.mark.parametrize("slows", [[], [SPEED / 2, SPEED], [SPEED * 2, SPEED / 1.5]])
def test_a_machine_that_changes_its_speed_gives_all_finalists_equal_tokens(
    tmp_path: Path, clock: Clock, slows: list[float]
) -> None:
    made = make(tmp_path, clock, WITHOUT_ROUNDS, slows=list(slows))
    trainer, start = made.trainings.trainer, clock.now
    drafts = made.climb()
    level = {tokens for _, tokens in trainer.ended[:3]}
    assert len(drafts) == 3 and max(level) - min(level) <= 1
    assert clock.now - start <= 1.01 * rungs.training_s(1800.0, 0.0, WITHOUT_ROUNDS.confirm_s)
    # The best of them by the law, at those tokens, goes on.
    law = by_law(max(level))
    assert trainer.ended[3][0] == max(
        (arch for arch, _ in trainer.ended[:3]), key=lambda arch: law[arch]
    )
    assert trainer.ended[3][1] > 1.2 * max(level)


def test_a_finalist_that_time_cut_short_is_not_beaten_for_that(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make(tmp_path, clock, WITHOUT_ROUNDS, slows=[SPEED, SPEED / 20])
    law, trainer = by_law(100_000), made.trainings.trainer
    chosen = choose_finalists([made.judge(shape) for shape in made.pool], 3)
    shapes = sorted((score.architecture for score in chosen), key=lambda shape: law[shape])
    made.pool = dict.fromkeys(shapes)  # the best by the law is trained last
    made.climb()
    assert "tokens when its time was over" in capsys.readouterr().err
    assert trainer.ended[2][1] < 0.7 * trainer.ended[0][1]
    assert trainer.ended[3][0] == trainer.ended[2][0]


@pytest.mark.parametrize("plan", [PLAN, WITHOUT_ROUNDS])
@pytest.mark.parametrize("heldout_s", [5.0, 1000.0])
def test_the_time_of_held_out_text_counts_in_its_share(
    tmp_path: Path, clock: Clock, plan: Plan, heldout_s: float
) -> None:
    """Without rounds the training text got all of the share once more (4:20 where 2:22 were
    planned)."""
    file = StateFile(tmp_path / "rungs.json", 1800.0, clock.now, clock=clock.monotonic)
    given = []

    def written(seconds: float) -> SimpleNamespace:
        clock.now += seconds
        return SimpleNamespace(written_tokens=1)

    def heldout(budget_s: float | None = None) -> SimpleNamespace:
        return written(0.0 if budget_s is None else min(heldout_s, budget_s))

    def write_training(budget_s: float) -> None:
        given.append(budget_s)
        written(budget_s)

    growth = SimpleNamespace(grow=lambda seconds: {})
    texts = SimpleNamespace(heldout=heldout, write_training_once=write_training, growth=growth)
    texts.all_training = lambda: [written(0.0)]
    start = clock.now
    write_texts(SimpleNamespace(texts=texts, folder=tmp_path), file, plan)
    assert clock.now - start == pytest.approx(plan.text_s)
    assert given == [pytest.approx(plan.text_s - min(heldout_s, 0.5 * plan.text_s))]


def test_a_killed_training_goes_on_with_the_same_choices(tmp_path: Path, clock: Clock) -> None:
    first = make(tmp_path, clock, WITHOUT_ROUNDS)
    first.climb()
    before, again = clock.now, make(tmp_path, clock, WITHOUT_ROUNDS)
    drafts = again.climb()
    assert clock.now == before and not again.trainings.trainer.calls
    ended = first.trainings.trainer.ended
    assert [draft.architecture for draft in drafts] == [arch for arch, _ in ended[:3]]
    data = json.loads((tmp_path / "rungs.json").read_text())
    assert [row["rung"] for row in data["rungs"]] == [0, 0, 0, 2, 2, 2]
    assert again.trainings.shorts == {}, "nothing is trained again to learn the speed"


def test_tokens_are_shared_so_that_all_end_level() -> None:
    assert equal_tokens(300.0, [1000.0, 1000.0, 500.0], [0, 0, 0]) == 75_000
    assert equal_tokens(10.0, [1000.0, 1000.0], [6_000, 0]) == 8_000
    assert equal_tokens(1.0, [1000.0, 1000.0], [50_000, 0]) == 55_000


def test_a_draft_that_saw_less_than_half_of_what_was_foreseen_is_not_judged(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet = make(tmp_path / "quiet", clock, WITHOUT_ROUNDS)
    quiet.climb()
    assert quiet.state.notes == []
    busy = make(tmp_path / "busy", clock, WITHOUT_ROUNDS, slows=[SPEED / 8, SPEED / 8, SPEED / 8])
    busy.climb()
    (note,) = busy.state.notes
    assert note.startswith("could not judge") and "because the machine was busy" in note
    assert capsys.readouterr().err.count(note) == 1


def test_a_climb_that_goes_on_without_rounds_plans_anew(tmp_path: Path, clock: Clock) -> None:
    climbed = make(tmp_path, clock)
    climbed.climb()
    climbed.state.plan = climbed.plan
    climbed.file.save()
    path = tmp_path / "rungs.json"
    again = StateFile(path, climbed.plan.budget_s, clock.now, clock=clock.monotonic)
    assert again.state.finalists is not None
    other = StateFile(path, climbed.plan.budget_s, clock.now, climbs=False, clock=clock.monotonic)
    assert other.state.plan is None and other.state.finalists is None
