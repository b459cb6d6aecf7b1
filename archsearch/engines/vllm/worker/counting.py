"""What each request wrote, whether vLLM's own counts of it agree, and the seconds and tokens of
every pass of target and draft in one step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
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

    def result(self, gamma: int) -> dict[str, object]:
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


class PassClock:
    """Times the target's and the draft's passes of one step, where the model runner is in this
    process and on the CPU.

    A pass of the draft is the model's call and the choice of the draft token (head, sampling); what
    the loop does between (inputs, attention metadata) is not in it. Drafters that propose all
    tokens in one go (Medusa heads, lookup) have one pass, the whole proposal.
    """

    def __init__(self) -> None:
        self.on = False
        self.clear()

    def clear(self) -> None:
        self.target_s = 0.0
        self.draft_s: list[float] = []
        self.draft_tokens: list[int] = []
        self._entered = 0.0

    def attach(self, runner: Any) -> None:
        """Wrap the parts of vLLM's first model runner; another runner (the second, a worker
        process) stays untimed."""
        if not (
            hasattr(runner, "_model_forward")
            and hasattr(getattr(runner, "model", None), "compute_logits")
        ):
            return
        drafter = getattr(runner, "drafter", None)
        if drafter is not None and not hasattr(drafter, "_sample_draft_tokens"):
            if not hasattr(drafter, "propose"):
                return
            drafter.propose = self._timed(drafter.propose, self._add_proposal)
        elif drafter is not None:
            if not hasattr(drafter, "model"):
                return
            drafter.model.register_forward_pre_hook(self._draft_enters, with_kwargs=True)
            drafter.model.register_forward_hook(self._draft_leaves, with_kwargs=True)
            drafter._sample_draft_tokens = self._timed(
                drafter._sample_draft_tokens, self._add_to_draft
            )
        runner._model_forward = self._timed(runner._model_forward, self._add_to_target)
        runner.model.compute_logits = self._timed(runner.model.compute_logits, self._add_to_target)
        self.on = True

    def _timed(
        self, call: Callable[..., object], add: Callable[[float], None]
    ) -> Callable[..., object]:
        def timed(*args: object, **kwargs: object) -> object:
            started = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                add(time.perf_counter() - started)

        return timed

    def _add_to_target(self, seconds: float) -> None:
        self.target_s += seconds

    def _add_to_draft(self, seconds: float) -> None:
        if self.draft_s:
            self.draft_s[-1] += seconds

    def _add_proposal(self, seconds: float) -> None:
        self.draft_s.append(seconds)
        self.draft_tokens.append(0)  # rows are its own affair

    def _draft_enters(self, module: object, args: object, kwargs: Mapping[str, Any]) -> None:
        tokens = kwargs.get("positions")
        self.draft_tokens.append(int(tokens.shape[-1]) if tokens is not None else 0)
        self._entered = time.perf_counter()

    def _draft_leaves(self, module: object, args: object, kwargs: object, output: object) -> None:
        self.draft_s.append(time.perf_counter() - self._entered)
