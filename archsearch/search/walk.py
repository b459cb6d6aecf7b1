"""Which shapes next: the walk of a search through its space. Knows choices and ranks, never a score's meaning.

A walk goes in generations. The first: two plain shapes (2 and 4 layers as wide as the target) and random valid ones. Then each
time the unvisited shapes one step from the best whose steps were not taken yet, and some random ones, so that one hill does not
hold the walk. In a discrete space the steps find the top quickly, and going on from the second best, the third and so on maps the
plateau around it (benchmarks/search_speed.py measures both). No shape comes twice; when random draws find nothing new the rest of
the space follows in its own order, so that a space of fewer shapes than trials is searched in full.

The walk is a function of the space, the target, the seed and what `tell` said, and of nothing else: told the same again, it goes
the same way, and a shorter search is the beginning of a longer one.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from archsearch.architecture.architecture import Architecture
from archsearch.drafters.drafter import Draft
from archsearch.search.space import InvalidShape, SearchSpace, Value

Origin = Literal["start", "neighbour", "random", "rest", "exact", "sampler"]
Rank = tuple[float, ...]  # lower is better; all of one length

START_LAYERS: Final = (2, 4)
START_SHAPES: Final = 40
RANDOM_SHARE: Final = 0.25  # random shapes per neighbour, after the start
DRAWS_PER_SHAPE: Final = 200  # in vain, before the space is taken to be as good as exhausted
REST_SHAPES: Final = 64  # of a generation out of the rest


@dataclass(frozen=True, slots=True)
class Candidate:
    """A shape to score: its choices (indices into the space's dimensions) and what brought it up."""

    indices: tuple[int, ...]
    shape: Draft
    origin: Origin


class Walk:
    """Generations of candidates; `tell` ranks each before the next generation is asked for."""

    def __init__(self, space: SearchSpace, target: Architecture, seed: int) -> None:
        self.space, self.target = space, target
        self._choices = [len(dimension.choices) for dimension in space.dimensions(target)]
        self._random = random.Random(seed)
        self._seen: set[Draft] = set()
        self._tried: set[tuple[int, ...]] = set()
        # Shapes whose neighbours were not given yet, best first. The count keeps equals in the order they came.
        self._open: list[tuple[Rank, int, tuple[int, ...]]] = []
        self._told = 0
        self._rest: Iterator[tuple[int, ...]] | None = None
        self.exhausted = False  # every valid shape of the space was given

    def tell(self, candidate: Candidate, rank: Rank) -> None:
        """How a candidate ranks; one that is not told has no steps taken from it."""
        self._told += 1
        heapq.heappush(self._open, (rank, self._told, candidate.indices))

    def generation(self) -> list[Candidate]:
        """The next candidates, in the order to score them; empty when every valid shape of the space was given."""
        if not self._tried:
            start = [self._visit(plain_choices(self.space, self.target, layers), "start") for layers in START_LAYERS]
            plain = [candidate for candidate in start if candidate is not None]
            return [*plain, *self._draw(START_SHAPES - len(plain), "start")] or self._remaining()
        near: list[Candidate] = []
        while self._open and not near:
            _, _, indices = heapq.heappop(self._open)
            steps = (self._visit(step, "neighbour") for step in self.space.neighbours(indices, self.target))
            near = [candidate for candidate in steps if candidate is not None]
        wanted = max(1, round(RANDOM_SHARE * len(near)))
        return [*near, *self._draw(wanted, "random")] or self._remaining()

    def _visit(self, indices: tuple[int, ...], origin: Origin) -> Candidate | None:
        """The candidate of these choices; None where they make no valid shape or one that was given before."""
        if indices in self._tried:
            return None
        self._tried.add(indices)
        shape = self.space.build(indices, self.target)
        if isinstance(shape, InvalidShape) or shape in self._seen:  # several choices may make one shape
            return None
        self._seen.add(shape)
        return Candidate(indices, shape, origin)

    def _draw(self, count: int, origin: Origin) -> list[Candidate]:
        """Up to `count` random candidates; fewer where draws come up with nothing new."""
        found: list[Candidate] = []
        vain = 0
        while len(found) < count and vain < DRAWS_PER_SHAPE:
            candidate = self._visit(tuple(self._random.randrange(choices) for choices in self._choices), origin)
            if candidate is None:
                vain += 1
            else:
                found.append(candidate)
                vain = 0
        return found

    def _remaining(self) -> list[Candidate]:
        """What neither steps nor draws have found, in the order of the file."""
        if self._rest is None:
            self._rest = itertools.product(*map(range, self._choices))
        left = (self._visit(indices, "rest") for indices in self._rest)
        found = list(itertools.islice((candidate for candidate in left if candidate is not None), REST_SHAPES))
        self.exhausted = not found
        return found


def plain_choices(space: SearchSpace, target: Architecture, layers: int) -> tuple[int, ...]:
    """The choices nearest to `layers` of the target's own layers, with a quarter of its vocabulary in the head."""
    wanted: dict[str, Value] = {
        "num_hidden_layers": layers,
        "hidden_size": target.hidden_size,
        "ffn_ratio": target.intermediate_size / target.hidden_size,
        "num_key_value_heads": target.num_key_value_heads,
        "kv_group_size": target.kv_group_size,
        "head_dim": target.head_dim,
        "draft_vocab_size": max(target.vocab_size // 4, 1),
        "window": "L",
    }
    return space.nearest(wanted, target)
