"""Seconds and tokens of every pass of target and draft in one step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any


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

    def _timed(self, call: Callable[..., Any], add: Callable[[float], None]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
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

    def _draft_enters(self, module: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        tokens = kwargs.get("positions")
        self.draft_tokens.append(int(tokens.shape[-1]) if tokens is not None else 0)
        self._entered = time.perf_counter()

    def _draft_leaves(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        self.draft_s.append(time.perf_counter() - self._entered)
