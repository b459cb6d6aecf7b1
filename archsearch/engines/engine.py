"""What every speculative decoding engine is asked and answers, in archsearch's words.

An engine is started with a target, a draft or none, and gamma; it generates; it is stopped. Answers are counts and raw times,
never ratios: add first, divide last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from archsearch.errors import ArchsearchError

ModelSource = Path | Any
"""A model folder, or (engines that run in this process) a module that is already loaded."""


@dataclass(frozen=True, slots=True)
class EnginePrompt:
    """A prompt as the target sees it: `token_ids` with the chat template applied. `category` groups results."""

    prompt_id: str
    token_ids: tuple[int, ...]
    category: str | None = None

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ArchsearchError(f"prompt {self.prompt_id!r} has no tokens; remove it from the prompt file")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to generate: greedy when `temperature` is 0; at most `max_new_tokens`."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.temperature < 0:
            raise ArchsearchError(
                f"max_new_tokens must be at least 1 and temperature at least 0, got {self.max_new_tokens} and {self.temperature}"
            )


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """One answer.

    `seconds`: the whole request; `first_s`: until its first tokens arrived (prefill of target and draft, and the first round);
    `decode_seconds`: from then to the last tokens, in which `decode_tokens` were written.
    Speculation (all zero or empty without a draft), over whole rounds only: a round cut by max_new_tokens or by the end of the
    text is in the text and the times but not in the counts. `rounds`; `drafted` = gamma * rounds; `accepted_by_position[i]`:
    rounds in which draft token i was accepted (so all before it were too); `round_lengths`: tokens each round wrote,
    accepted + 1. `gaps_s`: seconds between successive hand-overs of tokens (rounds, or single tokens without a draft).
    """

    prompt_id: str
    text: str
    token_ids: tuple[int, ...]
    seconds: float
    first_s: float
    decode_seconds: float
    decode_tokens: int
    rounds: int = 0
    drafted: int = 0
    accepted_by_position: tuple[int, ...] = ()
    round_lengths: tuple[int, ...] = ()
    gaps_s: tuple[float, ...] = ()

    @property
    def accepted(self) -> int:
        return sum(self.accepted_by_position)

    @property
    def rejected(self) -> int:
        """Draft tokens that were judged and refused: one in each round that was not accepted whole."""
        return self.rounds - (self.accepted_by_position[-1] if self.accepted_by_position else 0)


@runtime_checkable
class Engine(Protocol):
    """One way to run speculative decoding for real. `name` and `version` identify the engine in results."""

    name: str
    version: str

    def start(self, target: ModelSource, draft: ModelSource | None, gamma: int) -> None:
        """Get ready to generate with `target`, helped by `draft` with exactly `gamma` draft tokens a round, or alone."""
        ...

    def generate(self, prompts: Sequence[EnginePrompt], sampling: Sampling) -> list[GenerationResult]:
        """Answers in the order of `prompts`."""
        ...

    def token_logits(self, token_ids: Sequence[int], candidates: Sequence[int]) -> list[float]:
        """The target's logits for `candidates` as the next token after `token_ids`."""
        ...

    def stop(self) -> None:
        """Release what `start` took. An engine can be started again."""
        ...


def round_statistics(round_lengths: Sequence[int], gamma: int) -> tuple[int, ...]:
    """`accepted_by_position` [gamma] out of the lengths (accepted + 1) of whole rounds."""
    if any(not 1 <= length <= gamma + 1 for length in round_lengths):
        raise ValueError(f"a round of gamma {gamma} writes 1 to {gamma + 1} tokens, got {sorted(set(round_lengths))}")
    return tuple(sum(length - 1 > position for length in round_lengths) for position in range(gamma))
