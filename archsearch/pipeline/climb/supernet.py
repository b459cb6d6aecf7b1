"""The rung between prior and short trainings: one draft with shared weights, whose slices rank the candidates.

Only where it is asked for by name: on its own it has to rank better than the prior first (`acceptance.supernet.check`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from archsearch.acceptance.prior import PriorAcceptance
from archsearch.acceptance.supernet import check
from archsearch.architecture.architecture import Architecture
from archsearch.errors import ArchsearchError
from archsearch.progress import say
from archsearch.runs.state import SupernetEntry
from archsearch.search import rungs
from archsearch.search.objective import Score

if TYPE_CHECKING:
    from archsearch.pipeline.climb.climb import Climb

MOST_SHAPES: Final = 12


def train_supernet(climb: Climb, scores: Sequence[Score], seconds: float) -> None:
    """Train one draft with shared weights over candidates with one head: its slices rank them before the short trainings."""
    entry = climb.state.supernet
    if entry is not None and entry.slices is not None:
        return
    if entry is None:
        entry = climb.state.supernet = SupernetEntry(_shapes(climb, scores))
        climb.file.save()
    start = climb.file.clock()
    entry.slices = tuple(climb.trainer.train_supernet(entry.shapes, seconds, climb.session.request.seed))
    climb.belief.slices = dict(zip(entry.shapes, entry.slices, strict=True))
    climb.file.step("supernet", climb.file.clock() - start)
    say(f"supernet: alpha of {len(entry.shapes)} slices from {min(entry.slices):.3f} to {max(entry.slices):.3f}")


def judge_supernet(climb: Climb) -> None:
    """Note whether the supernet ranked the shapes that were trained alone better than the prior did."""
    belief = climb.belief
    if belief.slices is not None:
        prior = PriorAcceptance().fit(belief.known)
        alone = {shape: short.points[-1][1] for shape, short in belief.shorts.items() if short.points}
        believed = {shape: prior.predict(shape, belief.scorer.context).alpha.value for shape in alone}
        climb.file.note(check(belief.slices, believed, alone).reason)


def _shapes(climb: Climb, scores: Sequence[Score]) -> tuple[Architecture, ...]:
    """Candidates that are slices of one draft, those that are worth knowing most."""
    from archsearch.training.supernet import covers

    fitting = [score for score in scores if covers(climb.scorer.target, score.architecture)]
    same = [score for score in fitting if _head(score.architecture) == _head(fitting[0].architecture)]
    if len(same) < 2:
        raise ArchsearchError(
            "--alpha supernet needs two candidates that are slices of one draft (no wider than the target, its head_dim, "
            f"no window, one head); of {len(scores)} that could win {len(same)} are; use --alpha distilled"
        )
    picks = rungs.best_set(climb.belief.draws(same), [0.0] * len(same), 1.0, most=MOST_SHAPES, least=2)
    return tuple(same[pick.index].architecture for pick in picks)


def _head(shape: Architecture) -> tuple[Any, ...]:
    return (shape.draft_vocab_size, shape.tie_word_embeddings, shape.head_dim, shape.model_type)
