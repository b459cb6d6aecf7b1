"""What each request wrote, and whether vLLM's own counts of it agree. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from answers import answer_of


@dataclass
class Counters:
    """vLLM's own counts of speculation: rounds, drafted tokens, and by position the rounds in which
    it was accepted."""

    rounds: int = 0
    drafted: int = 0
    accepted: list[int] = field(default_factory=list)

    def minus(self, earlier: Counters) -> Counters:
        before = earlier.accepted + [0] * (len(self.accepted) - len(earlier.accepted))
        return Counters(
            self.rounds - earlier.rounds,
            self.drafted - earlier.drafted,
            [now - then for now, then in zip(self.accepted, before, strict=True)],
        )


@dataclass
class Request:
    """One prompt on its way: what was handed over, when, and which rounds wrote it. Times are
    time.perf_counter() seconds."""

    prompt_id: str
    prompt_tokens: int
    max_new_tokens: int
    started: float | None = None
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    whole: list[tuple[int, int]] = field(default_factory=list)  # (draft tokens, tokens written)
    cut: list[tuple[int, int]] = field(default_factory=list)
    padded: list[int] = field(default_factory=list)  # rounds of placeholders, which vLLM counts

    def hand_over(
        self, new: Sequence[int], drafts: int, padding: bool, stopped: bool, now: float
    ) -> None:
        """Note the tokens of one step. `drafts`: draft tokens judged in it; `stopped`: it ended at
        the end of the text.

        A round counts as whole when drafts + 1 tokens had room: vLLM drafts gamma tokens up to the
        last round and cuts what it writes, at max_new_tokens or after the end token.
        """
        room = self.max_new_tokens - len(self.tokens)
        if drafts and padding:
            self.padded.append(drafts)
        elif drafts:
            (self.whole if room >= drafts + 1 and not stopped else self.cut).append(
                (drafts, len(new))
            )
        self.tokens.extend(new)
        self.times.append(now)
        self.lengths.append(len(new))

    def result(self, gamma: int) -> dict[str, Any]:
        """The fields of archsearch's GenerationResult but the text. `gamma`: the largest."""
        assert self.started is not None and self.times
        seconds, handed = self.times[-1] - self.started, (self.times, self.lengths)
        return answer_of(self.prompt_id, self.tokens, seconds, handed, self.whole, gamma)


def disagreement(requests: Sequence[Request], counted: Counters) -> str | None:
    """What in vLLM's counters does not fit the rounds seen, in one line; None when all fits.

    vLLM counts what was accepted before it cuts, so a cut round may have accepted more than it
    handed over, and no less.
    """
    whole = [pair for request in requests for pair in request.whole]
    cut = [pair for request in requests for pair in request.cut]
    padded = [drafts for request in requests for drafts in request.padded]
    rounds, drafted = len(whole + cut) + len(padded), sum(d for d, _ in whole + cut) + sum(padded)
    if counted.rounds != rounds:
        return f"vLLM counted {counted.rounds} rounds, {rounds} were seen"
    if counted.drafted != drafted:
        return f"vLLM counted {counted.drafted} draft tokens, {drafted} were seen"
    for position, accepted in enumerate(counted.accepted):
        low = sum(length - 1 > position for _, length in whole + cut)
        high = low + sum(length - 1 <= position < drafts for drafts, length in cut)
        if not low <= accepted <= high:
            seen = str(low) if low == high else f"{low} to {high}"
            return (
                f"vLLM counted {accepted} rounds in which draft token {position + 1} was accepted,"
                f" {seen} were seen"
            )
    return None
