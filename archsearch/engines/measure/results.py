"""The results of a plan, as the files of a run hold them. Import stays light: reports read it."""

from __future__ import annotations

from dataclasses import dataclass, field

from archsearch.estimate import Estimate
from archsearch.speedup import RoundTerms


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token at which target alone and target + draft disagree on a prompt, and what the
    target thinks of both.

    `logit_gap`: logit(alone) - logit(with draft) in a single pass over the common prefix. About the
    rounding error of the dtype: a tie that a 1-token and a (gamma + 1)-token pass break
    differently. Large: something is wrong.
    """

    prompt_id: str
    position: int
    alone_token: int | None = None
    draft_token: int | None = None
    alone_logit: float | None = None
    draft_logit: float | None = None
    logit_gap: float | None = None


@dataclass(frozen=True, slots=True)
class Identity:
    """How many answers are the same token by token, and where the others part. None of it applies
    to sampling. `alpha`: of the runs that were compared, where a check of its own made them."""

    prompts: int
    identical: int
    differences: tuple[Difference, ...] = ()
    alpha: float | None = None


@dataclass(frozen=True, slots=True)
class CategoryResult:
    """The same figures for the prompts of one category."""

    prompts: int
    alpha: float
    tau: float
    speedup: float


@dataclass(frozen=True, slots=True)
class BestOf:
    """What it costs to report the best of several gammas that ran on the same prompts.

    `optimism`: by how much the best one's median speed-up is too high because it was picked for it;
    `share`: of the bootstrap's draws in which it was the best again.
    """

    gammas: tuple[int, ...]
    optimism: float
    share: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One way to serve beside the target alone. Figures that have a default are not in every file
    of an older version.

    `speedup`: its std and 5-95 % `speedup_interval` by bootstrap; None for the target alone.
    `accepted_by_position`: share of whole rounds in which position i was accepted (unconditional).
    `draft_s`, `rest_s`: median seconds of all passes of the draft in a round, and of what is
    neither that nor the target's pass; None where the engine does not report them.
    """

    engine_version: str = ""
    gamma: int
    tokens_per_s: float
    accepted_by_position: tuple[float, ...] = ()
    speedup: Estimate | None = None
    speedup_interval: tuple[float, float] | None = None
    draft_s: float | None = None
    rest_s: float | None = None

    @property
    def gain(self) -> Estimate:
        """The speed-up of what is not the target alone."""
        assert self.speedup is not None
        return self.speedup

    @property
    def interval(self) -> tuple[float, float]:
        """5-95 % of the speed-up."""
        return self.speedup_interval or self.gain.interval

    def round_terms(
        self, tau: float, decode_s: float | None, target_s: float | None
    ) -> RoundTerms | None:
        """What a round is made of, seconds (`decode_s`: of a plain step, `target_s`: of the
        target's pass); None where the engine reports no part of it, or nothing was accepted or
        timed."""
        if self.draft_s is None or target_s is None or self.rest_s is None:
            return None
        if not decode_s or tau <= 0:
            return None
        return RoundTerms(tau, decode_s, self.draft_s, target_s, self.rest_s)


@dataclass(frozen=True, kw_only=True)
class ByPrompt(Measured):
    """What one drafter at one gamma did, prompt by prompt.

    `alpha`: accepted / (accepted + rejected), std by bootstrap over prompts. `tau`: tokens per
    round, bonus included, whole rounds only.
    `speedup`: median over prompts of (time per token alone / with the drafter), both after the
    first tokens arrived; `speedup_pooled`: all tokens over all seconds, the same window;
    `speedup_end_to_end`: pooled with prefill. `speedup_interval` covers both ways of counting: the
    same draws of prompts give a median and a pooled speed-up each, and it reaches from the lower
    5 % quantile of the two to the higher 95 %. `best_of`: only for the best of several gammas; its
    interval's lower end bears the optimism of the choice.
    `tokens_per_s`, `baseline_tokens_per_s`: pooled over the decode window; `decode_s`: median
    seconds a token alone; `round_s`: median seconds a round; `verify_s`: of the target's pass in a
    whole round. `tokens_per_step`: tokens a pass of the target after a request's first, whether it
    verified drafts or not, and `drafting_share`: whole rounds among those passes; both matter for
    drafters that do not always propose.
    """

    engine: str
    engine_version: str = field()
    prompts: int
    tokens: int | None = None
    rounds: int | None = None
    alpha: Estimate
    accepted_by_position: tuple[float, ...] = field()
    tau: Estimate
    baseline_tokens_per_s: float
    speedup: Estimate = field()
    speedup_pooled: float | None = None
    speedup_end_to_end: float | None = None
    decode_s: float | None = None
    round_s: float | None = None
    identical_output: Identity
    categories: dict[str, CategoryResult] = field(default_factory=dict)
    per_prompt_speedup: tuple[float, ...] = ()
    verify_s: float | None = None
    best_of: BestOf | None = None
    tokens_per_step: float | None = None
    drafting_share: float | None = None

    @property
    def terms(self) -> RoundTerms | None:
        return self.round_terms(self.tau.value, self.decode_s, self.verify_s)

    @property
    def steady(self) -> float | None:
        """The speed-up by tokens a pass and median times; None where these are not known."""
        if not (self.tokens_per_step and self.decode_s and self.round_s):
            return None
        return self.tokens_per_step * self.decode_s / self.round_s


@dataclass(frozen=True, kw_only=True)
class UnderLoad(Measured):
    """One variant at one concurrency.

    `speedup`: median over repeats of (tokens/s of this variant / of the target alone in the same
    repeat). `tokens_per_s`: median over repeats, all requests together. `tau`: tokens per round and
    request, over the rounds that were timed. `step_s`, `target_s`: median seconds of a step, and of
    the target's pass. `batch_steps`: steps timed. `repeats_s`: seconds per token of each repeat.
    """

    variant: str
    concurrency: int
    repeats: int = 0
    batch_steps: int = 0
    tau: float
    alpha: float | None = None
    step_s: float = 0.0
    target_s: float | None = None
    repeats_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ScheduleVerdict:
    """The schedule at one concurrency against the best of always off (1.0) and every fixed gamma.

    `holds`: it is not shown to be worse, which is less than being as good: it may lose up to
    `margin`, two std of the difference, unseen (None in files of before that field).
    """

    concurrency: int
    gamma: int
    speedup: Estimate
    best_other: str
    best_other_speedup: Estimate
    margin: float | None = None
    holds: bool = False
