"""An engine whose rounds take what a law says, on a clock that moves where it starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from archsearch.architecture.architecture import Architecture
from archsearch.engine_facts import engine_facts
from archsearch.engines.engine import EnginePrompt, GenerationResult, Sampling
from archsearch.errors import RunFailed

START_S = 50.0
Seconds = Callable[[Architecture | None, int], float]


class Clock:
    """Seconds that pass only where an engine starts."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class LawfulEngine:
    """Rounds take `seconds(draft, gamma)`; a start takes START_S; drafts under `refuses` do not
    run."""

    name, facts = "vllm", engine_facts("vllm")

    def __init__(
        self,
        seconds: Seconds,
        clock: Clock,
        folders: Mapping[Path, Architecture],
        refuses: bool = False,
    ) -> None:
        self.seconds, self.clock, self.folders, self.refuses = seconds, clock, folders, refuses
        self.version = "0.32.0"
        self.started: list[tuple[Any, int, tuple[float, ...]]] = []

    def start(
        self,
        target: Any,
        draft: Path | None,
        gamma: int,
        *,
        synthetic: Sequence[float] = (),
        schedule: Any = (),
    ) -> None:
        self.clock.now += START_S
        if draft is not None and self.refuses:
            raise RunFailed("vLLM does not run draft_model under its second runner")
        self.draft, self.gamma = None if draft is None else self.folders[draft], gamma
        self.started.append((self.draft, gamma, tuple(synthetic)))

    def generate(
        self, prompts: Sequence[EnginePrompt], sampling: Sampling
    ) -> list[GenerationResult]:
        each = self.seconds(self.draft, self.gamma)
        lengths: list[int] = []
        while sum(lengths) < sampling.max_new_tokens - 1:
            lengths.append(1 + self.gamma // 2)
        gaps = [each * (1.0 + 0.002 * (-1) ** number) for number in range(len(lengths))]
        gaps[-1] = 0.1 * each  # the last round is cut short
        rounds = len(lengths) if self.gamma else 0
        return [
            GenerationResult(
                "round",
                "",
                (),
                1.0,
                0.1,
                0.9,
                sum(lengths),
                rounds,
                0,
                (),
                tuple(lengths[:rounds]),
                tuple(gaps),
            )
        ]

    def token_logits(self, token_ids: Any, candidates: Any) -> list[float]:
        raise NotImplementedError

    def steps(self) -> tuple:
        return ()

    def stop(self) -> None:
        pass
