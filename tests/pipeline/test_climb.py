"""The climb over made-up trainings: what is trained, for how long, what is dropped, and that it
goes on where it was killed."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from archsearch.acceptance.prior import PriorAcceptance
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import body_parameters
from archsearch.drafts.records import ShortTraining, TrainedDraft, read_curve
from archsearch.estimate import Estimate
from archsearch.latency.draft_passes import LatencyOfRounds
from archsearch.pipeline.climb import climb
from archsearch.pipeline.climb.belief import Belief
from archsearch.pipeline.climb.climb import Climb
from archsearch.pipeline.climb.plan import summary, trial_rows
from archsearch.pipeline.climb.race import HeadRungs
from archsearch.pipeline.climb.trainings import Trainings, work
from archsearch.records import save
from archsearch.runs.state import StateFile
from archsearch.search import rungs
from archsearch.search.objective import Scorer
from archsearch.search.space import SearchSpace
from archsearch.speedup import sigmoid, tau
from archsearch.training.curves import Supply, effective_tokens, text_after
from archsearch.workload import Workload

TARGET = Architecture(576, 1536, 30, 9, 3, 64, 49152, tie_word_embeddings=True)
SPACE = SearchSpace.from_dict(
    {
        "dimensions": {
            "num_hidden_layers": [1, 2, 3, 4, 6],
            "hidden_size": [384, 576],
            "ffn_ratio": [1, "target"],
            "num_key_value_heads": [1, 3],
            "kv_group_size": [3],
            "draft_vocab_size": [8192],
        }
    },
    "small",
)
SPEED = 2000.0
LEARNT = 8  # passes over the text, after which the made-up trainings stop
TEXTS = 40


class Latency(LatencyOfRounds):
    """Bytes and layers; the target takes 40 ms."""

    def decode_s(self, target, workload):
        return Estimate(0.040, 0.0004, "measured")

    def verify_s(self, target, workload, gamma):
        return Estimate(0.042 + 0.001 * gamma, 0.0004, "measured")

    def draft_s(self, draft, workload, gamma):
        return Estimate(
            gamma * (0.0006 * draft.num_hidden_layers + work(draft) / 8e9), 1e-5, "measured"
        )

    def added_s(self, target, workload, gamma):
        return Estimate(0.003, 0.0, "measured")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def true_logit(arch: Architecture, tokens: float) -> float:
    """The law that the made-up trainings follow: depth matters more than the prior believes, and
    what starts late catches up."""
    size = math.log10(body_parameters(arch) / 7e6)
    ahead = 0.3 * size + 0.55 * math.log(arch.num_hidden_layers)
    return -0.4 + rungs.catch_up(int(tokens))[0] * ahead + 0.40 * math.log(tokens / 64_000)


@dataclass
class MadeUpTrainer:
    """Trains by the law, on the clock; remembers every call. `die_after`: raise KeyboardInterrupt
    in that training."""

    folder: Path
    clock: Clock
    die_after: int | None = None
    calls: list[tuple[Architecture, int]] = field(default_factory=list)
    full: list[tuple[Architecture, float]] = field(default_factory=list)
    ended: list[tuple[Architecture, int]] = field(
        default_factory=list
    )  # every full training with its tokens
    speed: float = SPEED
    text: int = 10**9
    sources: list[Supply] = field(default_factory=list)
    slows: list[float] = field(default_factory=list)  # the machine's speed after each finalist

    def draft_folder(self, arch: Architecture) -> Path:
        name = f"{arch.num_hidden_layers}-{arch.hidden_size}-{arch.intermediate_size}-{arch.num_key_value_heads}-{arch.head_rows}"
        return self.folder / "finalists" / name

    def text_tokens(self) -> int:
        return self.text

    @property
    def texts(self) -> SimpleNamespace:
        return SimpleNamespace(growth=self)

    def supplies(self) -> list[Supply]:
        return self.sources

    def grow(self, budget_s: float) -> None:
        self.clock.now += budget_s
        self.text += int(text_after(budget_s, self.sources))
        self.sources = []

    def train_short(self, arch, tokens, seed=0, label="", *, limit_s=None):
        path = self.draft_folder(arch) / "curve.json"
        before = read_curve(path.parent)
        if before is not None and before.tokens >= tokens:
            return before
        if self.die_after is not None and len(self.calls) >= self.die_after:
            raise KeyboardInterrupt
        done = before.tokens if before else 0
        if limit_s is not None:
            tokens = min(tokens, int(limit_s * SPEED))
        self.calls.append((arch, tokens))
        wall = (tokens - done) / SPEED + 1.0
        self.clock.now += wall
        points = tuple(
            (n, sigmoid(true_logit(arch, n))) for n in (tokens // 4, tokens // 2, tokens)
        )
        hits = tuple(round(50 * points[-1][1] + 3 * math.sin(i)) for i in range(TEXTS))
        short = ShortTraining(
            arch, tokens, tokens / SPEED, SPEED, points, hits, (50,) * TEXTS, wall
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        save(path, short)
        return short

    def spent(self, arch):
        records = [self.draft_folder(arch) / name for name in ("curve.json", "training.json")]
        read = [json.loads(path.read_text()) for path in records if path.exists()]
        return max((r["tokens"] for r in read), default=0), max(
            (r["seconds"] for r in read), default=0.0
        )

    def train(self, arch, budget_s, seed=0, label="", *, tokens=None):
        before, seconds = self.spent(arch)
        more_s = max(0.0, budget_s - seconds)  # a longer training stays what it is
        if tokens is not None:
            more_s = min(more_s, max(0, tokens - before) / self.speed)
        stops = before + more_s * self.speed > LEARNT * self.text
        if stops:
            more_s = max(0.0, LEARNT * self.text - before) / self.speed
        self.clock.now += more_s
        tokens, seconds = before + round(more_s * self.speed), seconds + more_s
        self.full.append((arch, seconds))
        self.ended.append((arch, tokens))
        if self.slows and label.startswith("finalist"):
            self.speed = self.slows.pop(0)
        path = self.draft_folder(arch) / "training.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"seconds": seconds, "tokens": tokens}))
        alpha = sigmoid(true_logit(arch, effective_tokens(tokens, self.text)))
        taus = {gamma: Estimate(tau(alpha, gamma), 0.02, "measured") for gamma in range(1, 9)}
        known = Estimate(alpha, 0.01, "measured")
        points = tuple(
            (n, sigmoid(true_logit(arch, n)))
            for n in (tokens // 8, tokens // 4, tokens // 2, tokens * 3 // 4)
        )
        return TrainedDraft(
            arch,
            path.parent,
            known,
            {"": known},
            taus,
            {},
            tokens,
            points,
            "learnt" if stops else "",
        )


@pytest.fixture
def clock() -> Clock:
    return Clock()


PLAN = rungs.divide(1800.0, 0.0, prompt_s=5.0, fixed_s=10.0, prompts=24)
WITHOUT_ROUNDS = rungs.divide(1800.0, 0.0, prompt_s=5.0, fixed_s=10.0, prompts=24, rounds=False)


def make(folder: Path, clock: Clock, plan: rungs.Plan = PLAN, **trainer) -> Climb:
    """A climb over every shape of SPACE, as a process that starts now."""
    scorer = Scorer(
        TARGET, Workload(context_len=160), Latency(), PriorAcceptance(), domain="narrow"
    )
    path, times = folder / "rungs.json", {"clock": clock.monotonic, "climbs": plan.climbs}
    file = StateFile(path, plan.budget_s, clock.now, **times)
    ranked = sorted(SPACE.enumerate(TARGET), key=lambda shape: -scorer(shape).speedup.value)
    trainings = Trainings(MadeUpTrainer(folder, clock, **trainer), file)
    pool = dict.fromkeys(ranked)
    return Climb(SPACE, plan, trainings, Belief(scorer, []), pool, HeadRungs({}, None, None))


def by_law(tokens: float) -> dict[Architecture, float]:
    """The speed-up of every shape by the law."""
    scorer = Scorer(
        TARGET, Workload(context_len=160), Latency(), PriorAcceptance(), domain="narrow"
    )

    def value(arch: Architecture) -> float:
        alpha = sigmoid(true_logit(arch, tokens))
        taus = {gamma: Estimate(tau(alpha, gamma), 0.0, "given") for gamma in range(1, 9)}
        return scorer.measured(arch, Estimate(alpha, 0.0, "given"), taus).speedup.value

    return {arch: value(arch) for arch in SPACE.enumerate(TARGET)}


@dataclass(frozen=True)
class Whole:
    """A climb that came to its end: its folder, its drafts, and when it started and ended."""

    folder: Path
    ascent: Climb
    prior_best: Architecture
    drafts: list[TrainedDraft]
    start: float
    end: float


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder, clock = tmp_path_factory.mktemp("whole"), Clock()
    ascent = make(folder, clock)
    prior_best = max(ascent.pool, key=lambda arch: ascent.scorer(arch).speedup.value)
    start = clock.now
    return Whole(folder, ascent, prior_best, ascent.climb(), start, clock.now)


def test_the_climb_finds_what_the_prior_does_not_see(whole: Whole) -> None:
    values, measured = by_law(1e6), whole.ascent.measured
    chosen = max(whole.drafts, key=lambda draft: measured(draft).speedup.value).architecture
    assert values[chosen] > 0.95 * max(values.values()) > values[whole.prior_best]
    # All of it inside the budget: what is left is what confirming takes, and the margin.
    spent = whole.end - whole.start
    assert spent + PLAN.confirm_s == pytest.approx(
        (1 - rungs.MARGIN_SHARE) * PLAN.budget_s, rel=0.02
    )
    data = json.loads((whole.folder / "rungs.json").read_text())
    trained = {row["label"] for row in data["rungs"] if row["rung"] == 1}
    assert (
        len(trained) >= 6
        and len({row["shape"]["num_hidden_layers"] for row in data["rungs"] if row["rung"] == 1})
        >= 3
    )
    # Equal tokens for all shapes of a round, twice as many in the next.
    for entry in data["rounds"]:
        tokens = {
            row["tokens"]
            for row in data["rungs"]
            if row["rung"] == 1 and row["round"] == entry["round"]
        }
        assert tokens == {entry["tokens"]}
    assert all(b["tokens"] == 2 * a["tokens"] for a, b in pairwise(data["rounds"]))
    assert {row["state"] for row in data["rungs"]} <= {"kept", "pruned", "dropped", "trained"}
    assert all(row["why"] for row in data["rungs"] if row["state"] in ("pruned", "dropped"))
    assert {row["alpha"]["source"] for row in data["rungs"] if row["rung"] == 2} == {"measured"}


def test_over_a_mix_what_is_trained_is_chosen_by_its_objective() -> None:
    """It went by time per token, the ranking before and after it by throughput."""
    gain = Estimate(1.5, 0.1, "modelled")
    quick = SimpleNamespace(worth=1.1, speedup=gain, parameters=1)
    full = SimpleNamespace(worth=1.3, speedup=Estimate(1.2, 0.1, "modelled"), parameters=2)
    assert sorted([quick, full], key=climb._order) == [full, quick]


def test_what_size_has_yet_to_bring_parts_young_drafts_that_look_alike() -> None:
    """Two drafts of unlike size with equal acceptance after a short training: the larger one is
    foretold to end ahead."""
    small = next(
        arch
        for arch in SPACE.enumerate(TARGET)
        if arch.num_hidden_layers == 2 and arch.hidden_size == 576
    )
    large = small.replace(intermediate_size=4 * small.intermediate_size)
    scorer = Scorer(
        TARGET, Workload(context_len=160), Latency(), PriorAcceptance(), domain="narrow"
    )
    ahead = {}
    for tokens in (50_000, 400_000):
        points = ((tokens // 2, 0.30), (tokens, 0.35))
        shorts = {
            arch: ShortTraining(arch, tokens, 10.0, 1e4, points, (35,), (100,))
            for arch in (small, large)
        }
        belief = Belief(scorer, [], shorts, full_tokens=1_000_000)
        belief.learn()
        alphas = [
            belief.acceptance.predict(arch, belief.scorer.context).alpha.value
            for arch in (small, large)
        ]
        ahead[tokens] = alphas[1] - alphas[0]
    assert ahead[50_000] > 0.01 and ahead[50_000] > 2 * abs(ahead[400_000])


@pytest.mark.parametrize("die_after", [0, 9])
def test_a_killed_climb_trains_nothing_twice(
    tmp_path: Path, clock: Clock, whole: Whole, die_after: int
) -> None:
    dying = make(tmp_path / "a", clock, die_after=die_after)
    with pytest.raises(KeyboardInterrupt):
        dying.climb()
    again = make(tmp_path / "a", clock)
    drafts = again.climb()
    calls = [*dying.trainings.trainer.calls, *again.trainings.trainer.calls]
    assert len(set(calls)) == len(calls)  # no shape to the same tokens twice
    unbroken = whole.ascent.trainings.trainer
    assert [arch for arch, _ in calls] == [arch for arch, _ in unbroken.calls]
    assert drafts[0].architecture == unbroken.full[0][0]
    # Once more: everything is there, nothing is trained.
    done = make(tmp_path / "a", clock)
    before = clock.now
    assert done.climb()[0].architecture == drafts[0].architecture
    assert not done.trainings.trainer.calls and clock.now == before


def test_a_larger_budget_goes_on_from_there(tmp_path: Path, clock: Clock, whole: Whole) -> None:
    shutil.copytree(whole.folder, tmp_path, dirs_exist_ok=True)
    clock.now, small = whole.end, whole.ascent
    trained = {arch for arch, _ in small.trainings.trainer.calls}
    plan = rungs.divide(7200.0, 0.0, prompt_s=5.0, fixed_s=10.0, prompts=24)
    more = make(tmp_path, clock, plan)
    drafts = more.climb()
    assert more.file.elapsed_s() < 7200
    assert not {(arch, tokens) for arch, tokens in more.trainings.trainer.calls} & set(
        small.trainings.trainer.calls
    )
    assert trained and max(seconds for _, seconds in more.trainings.trainer.full) > max(
        seconds for _, seconds in small.trainings.trainer.full
    )
    assert drafts


def test_a_time_that_is_gone_trains_nothing_and_says_so(tmp_path: Path, clock: Clock) -> None:
    ascent = make(tmp_path, clock)
    clock.now += 1700.0
    assert ascent.climb() == []
    assert any("larger --time-budget" in note for note in ascent.state.notes)


def test_the_table_and_the_trials(whole: Whole) -> None:
    ascent = whole.ascent
    assert "heads" not in json.loads(ascent.file.path.read_text())
    table = summary(ascent.state)
    assert [row["rung"] for row in table] == [0, *[1] * len(ascent.state.rounds), 2]
    assert table[0]["candidates"] == len(ascent.pool) and table[-1]["score"].source == "measured"
    assert all(row["seconds"] > 0 for row in table[1:])
    shape = ascent.state.rounds[0].shapes[0].to_dict()
    rows = trial_rows(
        [{"number": 0, "state": "COMPLETE", **shape}, {"number": 1, "state": "PRUNED"}],
        ascent.state,
    )
    assert (
        rows[0]["rung"] >= 1
        and rows[0]["rung_1_1_alpha_source"] == "modelled"
        and 0 < rows[0]["rung_1_1_alpha"] < 1
    )
    assert rows[1] == {"number": 1, "state": "PRUNED"}


def test_a_climb_whose_full_training_fell_far_behind_its_plan_says_that_it_could_not_judge(
    tmp_path: Path, clock: Clock, whole: Whole
) -> None:
    ascent = make(tmp_path, clock, speed=SPEED / 20)  # the short trainings run at SPEED
    ascent.climb()
    for notes, times in ((ascent.state.notes, 1), (whole.ascent.state.notes, 0)):
        assert sum(note.startswith("could not judge") for note in notes) == times
    assert json.loads((tmp_path / "rungs.json").read_text())["notes"] == ascent.state.notes


def test_where_text_is_short_more_is_written_before_the_full_training(
    tmp_path: Path, clock: Clock
) -> None:
    poor = make(tmp_path / "poor", clock, text=40_000)
    start = clock.now
    drafts = poor.climb()
    assert any(
        "learnt what its text can teach" in note and "more prompts" in note
        for note in poor.state.notes
    )
    assert clock.now - start < 0.8 * PLAN.budget_s, "the time that nothing needs is given back"
    alone = max(draft.alpha.value for draft in drafts)

    rich = make(tmp_path / "rich", clock, text=40_000, sources=[Supply("answers", 400_000, 600.0)])
    start = clock.now
    drafts = rich.climb()
    text, *_ = rich.state.finalists.texts
    assert text.before == 40_000 and text.after > 100_000 and rich.state.finalists.writing is None
    assert max(draft.alpha.value for draft in drafts) > alone + 0.05
    assert clock.now - start + PLAN.confirm_s <= PLAN.budget_s
    data = json.loads((tmp_path / "rich" / "rungs.json").read_text())
    assert data["steps"]["more text"] > 100
    assert data["full_epoch"] > 100_000, "what is foretold counts on that text"
    # What was foretold for the winner, and what came.
    rows = [row for row in data["rungs"] if row["rung"] == 2]
    assert all(
        abs(row["predicted_alpha"]["value"] - row["alpha"]["value"])
        < 2.5 * row["predicted_alpha"]["std"]
        for row in rows
    )


def test_writing_that_was_killed_goes_on(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [Supply("answers", 400_000, 600.0)]
    dying = make(tmp_path, clock, text=40_000, sources=list(sources))

    def die(budget_s: float) -> None:
        clock.now += budget_s / 4
        dying.file.save()
        raise KeyboardInterrupt

    monkeypatch.setattr(dying.trainings.trainer, "grow", die)
    with pytest.raises(KeyboardInterrupt):
        dying.climb()
    assert dying.state.finalists.writing is not None
    again = make(tmp_path, clock, text=40_000, sources=list(sources))
    left = again.state.finalists.writing.ends_at_s - again.file.elapsed_s()
    before = clock.now
    grown = []
    whole = again.trainings.trainer.grow
    monkeypatch.setattr(
        again.trainings.trainer, "grow", lambda seconds: (grown.append(seconds), whole(seconds))
    )
    again.climb()
    assert grown[0] == pytest.approx(left, abs=1.0) and clock.now > before
    assert [text.after is not None for text in again.state.finalists.texts] == [True] * len(
        again.state.finalists.texts
    )
