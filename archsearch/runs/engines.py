"""engines.json: what each engine installed here is predicted to write per second, alone and with
its best drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from archsearch.estimate import Estimate
from archsearch.runs.confirmed import Exact

ENGINES_FILE: Final = "engines.json"


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to run the target: in `engine` at precision `dtype`, alone (`drafter` "", gamma 0) or
    with a drafter, one request at a time. `same`: answers that are the target's own, None where
    nobody looked; `profile_first`: the command that measures what a prediction does without."""

    engine: str
    dtype: str
    tokens_per_s: Estimate
    drafter: str = ""
    gamma: int = 0
    same: Exact | None = None
    profile_first: str | None = None

    @property
    def measured(self) -> bool:
        return self.tokens_per_s.source == "measured"


@dataclass(frozen=True)
class EngineWays:
    """engines.json. `dtype`: the run's precision."""

    dtype: str
    ways: tuple[Way, ...]
