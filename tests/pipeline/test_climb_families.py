"""Heads in a climb: short trainings, who is dropped, equal minutes, and who has the rest; over
made-up trainings."""

from __future__ import annotations

import importlib
import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from archsearch.drafts.heads import HeadAcceptance, HeadPlan, HeadRecord
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.pipeline.climb.climb import Climb
from archsearch.pipeline.climb.race import HEAD_RUNG, HeadRungs
from archsearch.pipeline.side_by_side import FamilyRequest
from archsearch.runs.state import ClimbState, StateFile
from archsearch.search import rungs
from archsearch.speedup import sigmoid, tau
from archsearch.training.curves import Supply
from tests.pipeline.test_climb import PLAN, TARGET, WITHOUT_ROUNDS, Clock, make

SPEED = 1000.0
search = importlib.import_module(
    "archsearch.pipeline.search"
)  # its name in the package is the function's
race_module = importlib.import_module("archsearch.pipeline.climb.race")


@dataclass
class MadeUpHeads:
    """Heads whose acceptance is `level` in logit after 100 s and rises by .4 an e-fold; `fails`:
    cannot be trained."""

    clock: Clock
    level: dict[str, float]
    fails: tuple[str, ...] = ()
    learnt_s: float = math.inf  # after so many seconds its text has taught all that it can
    die_after: int | None = None
    calls: list[tuple[str, float]] = field(default_factory=list)
    spent: dict[str, float] = field(default_factory=dict)

    def train(self, plan: HeadPlan, seconds: float) -> SimpleNamespace:
        if plan.family in self.fails:
            raise ArchsearchError("this target has no such states")
        if self.die_after is not None and len(self.calls) >= self.die_after:
            raise KeyboardInterrupt
        self.calls.append((plan.family, seconds))
        more = max(0.0, min(seconds, self.learnt_s) - self.spent.get(plan.family, 0.0))
        self.clock.now += more
        total = self.spent[plan.family] = self.spent.get(plan.family, 0.0) + more
        alpha = sigmoid(self.level[plan.family] + 0.4 * math.log(total / 100.0))
        taus = {
            gamma: Estimate(tau(alpha, gamma), 0.02, "measured")
            for gamma in range(1, plan.gamma + 1)
        }
        replays = {
            gamma: SimpleNamespace(estimate=lambda value=value: value)
            for gamma, value in taus.items()
        }
        record = HeadRecord(
            plan,
            total,
            int(SPEED * total),
            HeadAcceptance((alpha,) * plan.gamma),
            tokens_per_s=SPEED,
            epoch_tokens=10**9,
            stopped="it no longer rises" if total >= self.learnt_s else "",
        )
        return SimpleNamespace(
            plan=plan, conditional=(alpha,) * plan.gamma, replays=replays, record=record
        )

    def of(self, scorer) -> HeadRungs:  # noqa: ANN001
        """Heads that cost as much as a small draft."""
        shape = TARGET.replace(num_hidden_layers=1, draft_vocab_size=2048)

        def score(head, taus):  # noqa: ANN001, ANN202
            own = taus or {gamma: replay.estimate() for gamma, replay in head.replays.items()}
            return scorer.measured(shape, Estimate(head.conditional[0], 0.01, "measured"), own)

        return HeadRungs(dict.fromkeys(self.level, 3), self.train, score)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def with_heads(folder: Path, clock: Clock, heads: MadeUpHeads) -> Climb:
    made = make(folder, clock)
    made.heads = heads.of(made.scorer)
    return made


def saved(folder: Path) -> ClimbState:
    return ClimbState.from_dict(json.loads((folder / "rungs.json").read_text()))


def test_a_good_head_has_the_minutes_and_a_bad_one_is_dropped(tmp_path: Path, clock: Clock) -> None:
    heads = MadeUpHeads(clock, {"eagle3": 2.0, "medusa": -2.5})
    made = with_heads(tmp_path, clock, heads)
    drafts = made.climb()
    state = saved(tmp_path)
    eagle3, medusa = state.heads
    assert medusa.state == "pruned" and "cannot win" in medusa.why
    assert heads.spent["medusa"] == pytest.approx(HEAD_RUNG * state.rung_s)
    assert eagle3.state == "trained" and state.race.winner == "eagle3" and drafts
    best = max(seconds for shape, seconds in made.trainings.trainer.full)
    assert state.race.seconds == pytest.approx(best, rel=0.2)  # compared at equal minutes
    assert heads.spent["eagle3"] > 1.8 * state.race.seconds
    assert "families after" in " ".join(state.notes) and "went to eagle3" in " ".join(state.notes)
    assert clock.now - 100.0 <= PLAN.budget_s - PLAN.confirm_s + 30.0


def test_a_head_that_has_learnt_its_text_gives_its_minutes_to_more_of_it_or_back(
    tmp_path: Path, clock: Clock
) -> None:
    heads = MadeUpHeads(clock, {"eagle3": 2.0}, learnt_s=100.0)
    with_heads(tmp_path / "back", clock, heads).climb()
    state = saved(tmp_path / "back")
    assert state.race.winner == "eagle3" and heads.spent["eagle3"] == 100.0
    assert clock.now - 100.0 < 0.8 * PLAN.budget_s, "nothing is left to be learnt"
    assert any("the eagle3 head had learnt what its text can teach" in n for n in state.notes)

    heads = MadeUpHeads(clock, {"eagle3": 2.0}, learnt_s=100.0)
    made = with_heads(tmp_path / "more", clock, heads)
    trainer = made.trainings.trainer

    def train(plan: HeadPlan, seconds: float) -> SimpleNamespace:
        head = heads.train(plan, seconds)
        if head.record.stopped and heads.learnt_s == 100.0:
            trainer.text, trainer.sources = 20_000, [Supply("answers", 10**6, 2000.0)]
            heads.learnt_s = 200.0  # with more text
        return head

    made.heads = replace(made.heads, train=train)
    made.climb()
    state = saved(tmp_path / "more")
    assert heads.spent["eagle3"] == 200.0 and state.finalists.texts[-1].before == 20_000
    assert state.finalists.texts[-1].after > 20_000


def test_where_the_draft_stands_best_it_goes_on(tmp_path: Path, clock: Clock) -> None:
    heads = MadeUpHeads(clock, {"eagle3": 0.35})
    made = with_heads(tmp_path, clock, heads)
    drafts = made.climb()
    state = saved(tmp_path)
    entry = state.heads[0]
    if (
        entry.state == "pruned"
    ):  # it may be told after the short training already: then all is the drafts'
        assert state.race is None
    else:
        assert state.race.winner == "independent" and entry.seconds == pytest.approx(
            state.race.seconds, rel=0.05
        )
        assert made.trainings.trainer.full[-1][1] > 1.5 * state.race.seconds
    assert made.measured(drafts[0]).speedup.value > entry.measured.value


def test_one_that_cannot_be_trained_costs_nothing(tmp_path: Path, clock: Clock) -> None:
    heads = MadeUpHeads(clock, {"eagle3": 1.0}, fails=("eagle3",))
    made = with_heads(tmp_path, clock, heads)
    assert made.climb()
    state = saved(tmp_path)
    assert (
        not state.heads
        and state.race is None
        and "no eagle3 head: this target has no such states" in state.notes
    )


def test_a_killed_climb_goes_on_with_its_heads(tmp_path: Path, clock: Clock) -> None:
    heads = MadeUpHeads(clock, {"eagle3": 2.0, "medusa": 1.8}, die_after=2)
    with pytest.raises(KeyboardInterrupt):
        with_heads(tmp_path, clock, heads).climb()
    assert len(saved(tmp_path).heads) == 2
    again = MadeUpHeads(clock, heads.level, spent=dict(heads.spent))
    with_heads(tmp_path, clock, again).climb()
    state = saved(tmp_path)
    assert state.race.winner in ("eagle3", "medusa") and again.calls[0][1] == pytest.approx(
        state.race.seconds
    )
    assert clock.now - 100.0 <= PLAN.budget_s + 30.0


def test_short_trainings_of_heads_fit_into_the_rungs(tmp_path: Path, clock: Clock) -> None:
    alone, beside = (
        make(tmp_path / "a", clock),
        with_heads(tmp_path / "b", clock, MadeUpHeads(clock, {"eagle3": 1.0})),
    )
    rest = beside.left_s()
    assert beside._rung_time(rest) == pytest.approx(rungs.rung_share(rest) / 1.25)
    assert alone._rung_time(rest) == pytest.approx(rungs.rung_share(rest))


def test_the_best_head_runs_beside_the_best_draft_where_there_is_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, also after a kill; an engine that fails costs no search; without time a note says with
    which command."""
    asked: list[FamilyRequest] = []

    def confirm(session, request, choice) -> None:  # noqa: ANN001
        asked.append(request)
        if len(asked) > 1:
            raise ArchsearchError("vLLM stopped")

    monkeypatch.setattr(search, "confirm_families", confirm)
    monkeypatch.setattr(search, "affordable_prompts", lambda *args: 6)

    def confirming(compares: bool) -> search.Confirming:
        session = SimpleNamespace(
            run=SimpleNamespace(path=tmp_path), request=SimpleNamespace(engine="vllm")
        )
        file = StateFile(tmp_path / f"rungs-{len(asked)}-{compares}.json", 60.0, 0.0)
        return search.Confirming(session, None, file, replace(PLAN, compares=compares))

    names = ("ngram", "peagle", "independent", "eagle3")
    assert search.best_head(names, "vllm") == "peagle"
    assert search.best_head(names, "transformers") == ""
    assert search.best_head(names, "openvino") == "eagle3", (
        "the best of those that the engine is started with"
    )
    first = confirming(True)
    first.best_head("peagle")
    first.best_head("peagle")
    assert [request.families for request in asked] == [("peagle", "independent")]
    assert asked[0].count == 6
    assert ClimbState.from_dict(json.loads(first.file.path.read_text())).compared
    second = confirming(True)
    second.best_head("peagle")
    assert "vLLM stopped" in second.file.state.notes[0]
    third = confirming(False)
    third.best_head("peagle")
    assert "--family peagle --family independent" in third.file.state.notes[0] and len(asked) == 2


@pytest.mark.parametrize("level", [2.0, 0.1])
def test_without_rounds_heads_have_the_minutes_of_the_best_draft_and_the_best_has_the_rest(
    tmp_path: Path, clock: Clock, level: float
) -> None:
    heads = MadeUpHeads(clock, {"eagle3": level, "medusa": -2.0}, fails=("medusa",))
    made = make(tmp_path, clock, WITHOUT_ROUNDS)
    made.heads = heads.of(made.scorer)
    drafts = made.climb()
    eagle3, medusa = saved(tmp_path).heads
    race = saved(tmp_path).race
    assert eagle3.state == "trained" and medusa.state == "dropped" and drafts
    assert heads.calls[0] == ("eagle3", race.seconds) and race.winner
    assert (eagle3.seconds > race.seconds) == (race.winner == "eagle3") == (level > 1.0)
    left_s = rungs.training_s(1800.0, 0.0, WITHOUT_ROUNDS.confirm_s)
    assert clock.now - 100.0 == pytest.approx(left_s, rel=0.02)


def test_a_head_that_has_hardly_seen_anything_is_not_dropped(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow machine a short training ends while the learning rate still rises; what it says
    then is nothing."""
    monkeypatch.setattr(race_module, "LEAST_JUDGED", 10**9)
    made = with_heads(tmp_path, clock, MadeUpHeads(clock, {"medusa": -2.5}))
    made.climb()
    entry = saved(tmp_path).heads[0]
    assert entry.state == "trained" and entry.measured is not None, (
        "it had its equal minutes, which it did not win"
    )
    assert saved(tmp_path).race.winner == "independent"
