"""Finalists: half of the training time goes to all of them alike, half to the one that stands best
after it.

"Alike" is in tokens: how many seconds a draft had says how busy the machine was. Everything decided
is written down before it is done, so that a run which was killed goes on with the same choices.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from archsearch import speedup as speculation
from archsearch.architecture.architecture import Architecture
from archsearch.drafts.records import ShortTraining, TrainedDraft
from archsearch.drafts.trainer import choose_finalists
from archsearch.estimate import Estimate
from archsearch.files import read_json, write_json
from archsearch.pipeline.session import SearchSession
from archsearch.pipeline.shared_work import Job, SharedWork, train_job
from archsearch.progress import say
from archsearch.search.objective import Score, Scorer
from archsearch.search.rungs import TEXT_SHARE_ALONE

ALL_SHARE: Final = 0.5  # of the training time; the rest goes to the best
PROBE_TOKENS: Final = 4_000  # to learn how fast each draft trains; they count as its first tokens
PROBE_SHARE: Final = 0.05  # of the training time, at most, for each of these
SAME_TOKENS: Final = 0.02  # apart by less than this share, two trainings count as equally long
LEAST_TRAINING_S: Final = 0.5
# of the tokens that were foreseen: with less, a training does not show what its shape can do
LEAST_SEEN: Final = 0.5


class Trainer(Protocol):
    """What trains finalists; `archsearch.drafts.trainer` has the real one."""

    def spent(self, arch: Architecture) -> tuple[int, float]:
        """(tokens, seconds) that a draft was trained for so far."""
        ...

    def train_short(
        self,
        arch: Architecture,
        tokens: int,
        seed: int = 0,
        label: str = "",
        *,
        limit_s: float | None = None,
    ) -> ShortTraining: ...

    def train(
        self,
        arch: Architecture,
        budget_s: float,
        seed: int = 0,
        label: str = "",
        *,
        tokens: int | None = None,
    ) -> TrainedDraft: ...


def equal_tokens(seconds: float, speeds: Sequence[float], done: Sequence[int]) -> int:
    """The tokens that all drafts reach when `seconds` of training are shared so that they end
    level.

    `speeds`: tokens/s; `done`: tokens each has behind it. Never less than a tenth more than the
    furthest has: what is over cannot be taken back.
    """
    behind_s = sum(tokens / speed for tokens, speed in zip(done, speeds, strict=True))
    level = (seconds + behind_s) / sum(1.0 / speed for speed in speeds)
    return max(1, int(level), max(done) * 11 // 10)


def train_alike(
    trainer: Trainer,
    shapes: Sequence[Architecture],
    tokens: int,
    left_s: Callable[[], float],
    seed: int,
    shared: SharedWork | None = None,
) -> list[TrainedDraft]:
    """Train every shape to `tokens` in all; `shared`: together with others.

    Where the machine has slowed down since the plan was made, the time that was meant for the best
    one pays for it; a draft gets its part of what `left_s` says is left and no more, so it may end
    short of `tokens` all the same: `best_of` knows.
    """
    drafts = []
    if shared is not None and len(shapes) > 1:
        limits = [trainer.spent(shape)[1] + max(left_s(), LEAST_TRAINING_S) for shape in shapes]
        jobs = [
            Job("full", shape, tokens, seed, limit_s)
            for shape, limit_s in zip(shapes, limits, strict=True)
        ]
        shared.finish(jobs, lambda job: train_job(job, trainer))
    for place, shape in enumerate(
        shapes, start=1
    ):  # what is trained as far is measured, not trained again
        limit_s = trainer.spent(shape)[1] + max(
            left_s() / (len(shapes) - place + 1), LEAST_TRAINING_S
        )
        drafts.append(
            trainer.train(shape, limit_s, seed, f"finalist {place}/{len(shapes)}", tokens=tokens)
        )
        if (
            drafts[-1].tokens
            and drafts[-1].tokens < (1.0 - SAME_TOKENS) * tokens
            and not drafts[-1].stopped
        ):
            say(
                f"{shape.label()} had {drafts[-1].tokens} of {tokens} tokens when its time was"
                " over: the machine has become slower; finalists are compared where all of them"
                " have been"
            )
    return drafts


def foreseen_tokens(level: int, longer_s: float, speeds: Sequence[float]) -> tuple[int, ...]:
    """The tokens that each draft would end at if it were the best one: `level` of all alike, then
    `longer_s` seconds alone."""
    return tuple(level + int(longer_s * speed) for speed in speeds)


def not_judged(draft: TrainedDraft, foreseen: int) -> str:
    """Why the best draft's figures decide nothing about its shape; "" where they do. `foreseen`: at
    the speed measured first."""
    if not draft.tokens or draft.tokens >= LEAST_SEEN * foreseen or draft.stopped:
        return ""
    return (
        f"could not judge {draft.architecture.label()}: it was trained on {draft.tokens} tokens of"
        f" the {foreseen} that its plan foresaw, because the machine was busy; go on with the same"
        " --run and a larger --time-budget when the machine is quiet"
    )


def best_of(drafts: Sequence[TrainedDraft], scorer: Scorer) -> int:
    """The index of the draft with the largest speed-up, compared on equal tokens.

    Drafts that ended at unlike tokens are compared by their curves before the anneal, at the last
    tokens that all of these reach; one that has learnt what its text can teach is complete,
    whatever its tokens.
    """
    most = max(draft.tokens for draft in drafts)
    level = all(draft.stopped or most - draft.tokens <= SAME_TOKENS * most for draft in drafts)
    if level or not all(draft.points for draft in drafts):
        values = [
            scorer.measured(draft.architecture, draft.alpha, draft.tau).speedup.value
            for draft in drafts
        ]
    else:
        common = min(draft.points[-1][0] for draft in drafts)
        values = [_score_at(draft, common, scorer).speedup.value for draft in drafts]
    return max(range(len(drafts)), key=lambda i: values[i])


def _score_at(draft: TrainedDraft, tokens: int, scorer: Scorer) -> Score:
    """The score of a draft as it was after `tokens` tokens, by its learning curve."""
    import numpy as np

    xs = [math.log(point[0]) for point in draft.points]
    alpha = Estimate(
        float(np.interp(math.log(tokens), xs, [point[1] for point in draft.points])),
        0.0,
        "modelled",
    )
    taus = {gamma: speculation.tau_estimate(alpha, gamma) for gamma in draft.tau}
    return scorer.measured(draft.architecture, alpha, taus)


def train_finalists(
    session: SearchSession,
    trainer: Trainer,
    ranked: Sequence[Score],
    shared: SharedWork | None = None,
) -> list[TrainedDraft]:
    """The prior's best `finalists`, trained without short trainings before them. What is finished
    is used again when the run is continued; the choices, and notes on what could not be judged, are
    in the run's finalists.json."""
    request = session.request
    path = session.run.path / "finalists.json"
    state: dict[str, Any] = read_json(path, "finalists") if path.exists() else {}
    if not state:
        state["shapes"] = [
            score.architecture.to_dict() for score in choose_finalists(ranked, request.finalists)
        ]
        write_json(path, state)
    shapes = [Architecture.from_dict(shape) for shape in state["shapes"]]
    training_s = (1.0 - TEXT_SHARE_ALONE) * request.time_budget_s
    if len(shapes) == 1:
        return [trainer.train(shapes[0], training_s, request.seed, "finalist 1/1")]
    start = time.monotonic() - sum(trainer.spent(shape)[1] for shape in shapes)

    def left_s() -> float:
        return max(0.0, start + training_s - time.monotonic())

    if "tokens" not in state:
        probes = [
            trainer.train_short(
                shape,
                PROBE_TOKENS,
                request.seed,
                f"{shape.label()}: speed",
                limit_s=PROBE_SHARE * training_s,
            )
            for shape in shapes
        ]
        all_s = max(ALL_SHARE * training_s - (training_s - left_s()), 0.0)
        speeds = [probe.tokens_per_s for probe in probes]
        state["tokens"] = equal_tokens(all_s, speeds, [probe.tokens for probe in probes])
        state["foreseen"] = foreseen_tokens(state["tokens"], (1.0 - ALL_SHARE) * training_s, speeds)
        write_json(path, state)
    drafts = train_alike(trainer, shapes, state["tokens"], left_s, request.seed, shared)
    if "longer" not in state:
        best = best_of(drafts, session.scorer)
        state["longer"] = {"index": best, "seconds": trainer.spent(shapes[best])[1] + left_s()}
        write_json(path, state)
    best = state["longer"]["index"]
    drafts[best] = trainer.train(
        shapes[best], state["longer"]["seconds"], request.seed, "the best finalist"
    )
    why = not_judged(drafts[best], state["foreseen"][best]) if "foreseen" in state else ""
    state["notes"] = [why] if why else []
    if why:
        say(why)
    write_json(path, state)
    return drafts


def finalist_notes(session: SearchSession) -> list[str]:
    """What finalists.json notes; [] without one."""
    path = session.run.path / "finalists.json"
    return list(read_json(path, "finalists").get("notes", [])) if path.exists() else []
