"""An engine whose times and acceptance are made up, so that every figure is known. It batches,
synthesises and schedules."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

from archsearch.engines.engine import (
    EnginePrompt,
    EngineStep,
    GenerationResult,
    Sampling,
    check_start,
)


@dataclass
class MadeUpEngine:
    """A target's pass takes 10 ms + 1 ms a token; a draft's 1 ms + 0.2 ms a token; a plain step
    adds 0.5 ms, a round 2 ms + 0.3 ms a draft token. `drift`: everything takes that much longer
    with every call. `tells`: whether passes are told apart."""

    name: str = "made-up"
    version: str = "1"
    synthesises: bool = True
    schedules: bool = True
    tells: bool = True
    tells_steps: bool = True
    drift: float = 0.0
    free_draft: bool = False
    calls: int = 0
    log: list[str] = field(default_factory=list)

    @property
    def facts(self) -> SimpleNamespace:
        return SimpleNamespace(synthesises=self.synthesises, schedules=self.schedules)

    def start(self, target, draft, gamma, *, synthetic=(), schedule=()) -> None:  # noqa: ANN001
        check_start(gamma, draft, synthetic, schedule)
        self.draft, self.gamma, self.rates, self.ranges = (
            draft,
            gamma if draft is not None else 0,
            synthetic,
            schedule,
        )
        self.log.append(f"start {self.gamma}{' schedule' if schedule else ''}")

    def stop(self) -> None:
        self.log.append("stop")

    def token_logits(self, token_ids, candidates) -> list[float]:  # noqa: ANN001
        return [0.0 for _ in candidates]

    def steps(self) -> tuple[EngineStep, ...]:
        return tuple(self._steps) if self.tells_steps else ()

    def gamma_at(self, batch: int) -> int:
        return next(
            (gamma for first, last, gamma in self.ranges if first <= batch <= last), self.gamma
        )

    def generate(
        self, prompts: Sequence[EnginePrompt], sampling: Sampling
    ) -> list[GenerationResult]:
        self.calls += 1
        slow = 1.0 + self.drift * self.calls
        rng = random.Random(sampling.seed * 1000 + self.calls)
        written = [1] * len(prompts)
        lengths: list[list[int]] = [[] for _ in prompts]
        whole: list[list[int]] = [[] for _ in prompts]
        length = len(prompts[0].token_ids)
        reading_s = 0.09 if self.tells else None
        self._steps = [
            EngineStep(
                len(prompts),
                len(prompts),
                0.1 * slow,
                0,
                length * len(prompts),
                reading_s,
                prefill=True,
            )
        ]
        clock = [0.0] * len(prompts)
        while alive := [i for i in range(len(prompts)) if written[i] < sampling.max_new_tokens]:
            batch = len(alive)
            gamma = self.gamma_at(batch) if self.draft is not None else 0
            tokens = batch * (gamma + 1)
            target_s = (10e-3 + 1e-3 * tokens) * slow
            per_token = 0.0 if self.free_draft else 0.2e-3
            draft_tokens = [batch * (gamma + 2), *[batch] * (gamma - 1)] if gamma else []
            draft_s = [(1e-3 + per_token * count) * slow for count in draft_tokens]
            rest_s = ((2e-3 + 0.3e-3 * gamma) if gamma else 0.5e-3) * slow
            seconds = target_s + sum(draft_s) + rest_s
            context = sum(length + written[i] for i in alive) / batch
            handed = 0
            for i in alive:
                drawn = rng.random()
                accepted = sum(drawn < rate for rate in (self.rates or (0.5,) * gamma)[:gamma])
                room = sampling.max_new_tokens - written[i]
                if room >= gamma + 1 and gamma:
                    whole[i].append(accepted + 1)
                new = min(accepted + 1, room)
                written[i] += new
                lengths[i].append(new)
                handed += new
                clock[i] += seconds
            told = self.tells
            self._steps.append(
                EngineStep(
                    batch,
                    handed,
                    seconds,
                    gamma,
                    tokens,
                    target_s if told else None,
                    tuple(draft_s) if told else (),
                    tuple(draft_tokens) if told else (),
                    False,
                    context,
                )
            )
        return [
            GenerationResult(
                prompt.prompt_id,
                "",
                tuple(range(written[i])),
                0.1 + clock[i],
                0.1,
                clock[i],
                written[i] - 1,
                len(whole[i]),
                sum(self.gamma for _ in whole[i]),
                tuple(sum(n - 1 > position for n in whole[i]) for position in range(self.gamma)),
                tuple(whole[i]),
            )
            for i, prompt in enumerate(prompts)
        ]
