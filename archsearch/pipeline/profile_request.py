"""What `archsearch profile` was asked, and the shapes that it covers."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from archsearch.architecture.architecture import Architecture
from archsearch.models.targets import TargetRef
from archsearch.search.space import InvalidShape, SearchSpace

ENGINE_STAND_IN = Architecture(512, 1408, 4, 8, 8, 64, 32000)
"""Used for a target where none was named, or where it is too large to run whole."""


@dataclass(frozen=True)
class ProfileRequest:
    """What `archsearch profile` was asked: `dtypes` empty means the device's best first, then the
    other."""

    gpu: str
    target: Architecture | None
    space: SearchSpace
    dtypes: tuple[str, ...] = ()
    budget_s: float = 300.0
    check: int = 0
    threads: int | None = None
    output: Path | None = None
    batch_size: int = 1
    engine: bool = True
    seed: int = 0
    modes: tuple[str, ...] = ()
    tensor_parallel: int = 1
    allow_busy: bool = False
    engine_name: str = "transformers"
    engine_python: Path | None = None
    target_ref: TargetRef | None = None
    quick: bool = False


def sample_space(
    space: SearchSpace, target: Architecture, count: int, seed: int = 0
) -> list[Architecture]:
    """Up to `count` distinct valid shapes drawn at random: what a sweep covers and a check draws
    from."""
    rng = random.Random(seed)
    dimensions = space.dimensions(target)
    found: dict[Architecture, None] = {}
    for _ in range(200 * count):
        shape = space.shape(
            tuple(rng.randrange(len(dimension.choices)) for dimension in dimensions), target
        )
        if not isinstance(shape, InvalidShape):
            found[shape] = None
            if len(found) >= count:
                break
    if not found:
        space.check(target)
    return list(found)
