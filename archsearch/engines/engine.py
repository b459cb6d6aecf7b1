"""What every speculative decoding engine is asked and answers, in archsearch's words.

Answers are counts and raw times, never ratios: add first, divide last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from archsearch.acceptance.chain import ChainRule
from archsearch.acceptance.lookup import Ngram, Suffix
from archsearch.drafters.read import family_of_config
from archsearch.engine_facts import EngineFacts, names_of
from archsearch.errors import ArchsearchError
from archsearch.files import read_json
from archsearch.schedule import Ranges, check_schedule, largest_gamma

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokenizer: TypeAlias = "PreTrainedTokenizerBase | None"
"""Of an engine: it turns tokens into the results' text, which without one is empty."""
ModelSource = Path | str | Any
"""A model folder, a hub id, or (engines that run in this process) a module that is already loaded.
In the place of a draft also a folder with heads on the target's hidden states (`models.files`),
or no model: `acceptance.lookup.Ngram`, `ExitAfter`; or a draft with more to it: `Chained`."""


@dataclass(frozen=True, slots=True)
class ExitAfter:
    """In the place of a draft: the target's own first `layers` layers, with its norm and head."""

    layers: int


@dataclass(frozen=True, slots=True)
class Chained:
    """In the place of a draft: a draft model whose rounds are those of `rule`, behind a lookup
    where there is one (None: the draft stops where it is unsure, and that is all). The gamma that
    it is started with is `rule.longest`."""

    draft: ModelSource
    rule: ChainRule
    lookup: Ngram | Suffix | None = None

    def __post_init__(self) -> None:
        if (self.lookup is None) != (self.rule.found == 0):
            raise ArchsearchError(
                "a chain has a lookup and says how many tokens that drafts, or neither"
            )
        if self.lookup is None and not self.rule.least:
            raise ArchsearchError(
                "a chain of one drafter is that drafter: name a lookup beside the draft, or the"
                " draft alone"
            )


@dataclass(frozen=True, slots=True)
class EnginePrompt:
    """A prompt as the target sees it: `token_ids` with the chat template applied. `category` groups
    results."""

    prompt_id: str
    token_ids: tuple[int, ...]
    category: str | None = None

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ArchsearchError(
                f"prompt {self.prompt_id!r} has no tokens; remove it from the prompt file"
            )


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to generate: greedy when `temperature` is 0; at most `max_new_tokens`, and just so many
    with `ignore_end`."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    ignore_end: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.temperature < 0:
            raise ArchsearchError(
                "max_new_tokens must be at least 1 and temperature at least 0, got"
                f" {self.max_new_tokens} and {self.temperature}"
            )


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """One answer.

    `seconds`: the whole request; `first_s`: until its first tokens arrived (prefill of target and
    draft, and the first round); `decode_seconds`: from then to the last tokens, in which
    `decode_tokens` were written. Speculation (all zero or empty without a draft), over whole rounds
    only: a round cut by max_new_tokens or by the end of the text is in the text and the times but
    not in the counts. `rounds`; `drafted` = gamma * rounds (a lookup or a chain: what it proposed
    in them); `accepted_by_position[i]`: rounds in which draft token i was accepted (so all before
    it were too); `round_lengths`: tokens each round wrote, accepted + 1; `unrefused`: rounds that
    drafted fewer than gamma tokens and had all of them accepted. `gaps_s`: seconds between
    successive hand-overs of tokens (rounds, or single tokens without a draft).
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
    unrefused: int = 0

    @property
    def accepted(self) -> int:
        return sum(self.accepted_by_position)

    @property
    def rejected(self) -> int:
        """Draft tokens that were judged and refused: one in each round that was not accepted
        whole."""
        whole = self.accepted_by_position[-1] if self.accepted_by_position else 0
        return self.rounds - whole - self.unrefused


@dataclass(frozen=True, slots=True)
class EngineStep:
    """One pass of the target as the engine ran it: a plain decode step, or a whole round.

    `batch`: requests in it; `written`: tokens it handed over, all requests together; `seconds`: the
    whole step; `gamma`: draft tokens per request, 0 without a draft. `target_tokens`: tokens in the
    target's pass, all requests (batch * (gamma + 1)), and `target_s` its seconds with the head,
    None where the engine does not tell. `draft_s`: seconds of each pass of the draft, and
    `draft_tokens` the tokens in each, all requests; () where there was none or the engine does not
    tell. `prefill`: prompts were processed in it. `context`: mean tokens in the KV cache of a
    request before it. `compared`: a pass of the target beside these, always the same, where the
    engine runs one for comparison: tokens in it, its seconds.
    """

    batch: int
    written: int
    seconds: float
    gamma: int = 0
    target_tokens: int = 0
    target_s: float | None = None
    draft_s: tuple[float, ...] = ()
    draft_tokens: tuple[int, ...] = ()
    prefill: bool = False
    context: float = 0.0
    compared: tuple[int, float] | None = None

    @property
    def other_s(self) -> float | None:
        """What is neither the target's pass nor the draft's: sampling, scheduling, hand-over."""
        return None if self.target_s is None else self.seconds - self.target_s - sum(self.draft_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """How an engine is reached. `python`: interpreter of its own environment (None: the one
    `archsearch engine install` made); `path`: a server of the user's own to start; `server_url`,
    `baseline_url`: running servers, with the draft and without; `timeout_s`: for one answer of a
    child process or server; `draft_dtype`: of the draft (None: as the engine does it)."""

    python: Path | None = None
    path: Path | None = None
    server_url: str | None = None
    baseline_url: str | None = None
    timeout_s: float = 600.0
    draft_dtype: str | None = None


@dataclass(frozen=True, slots=True)
class EngineSettings(Reached):
    """How an engine is run.

    `concurrency`: most requests in flight; `max_len`: longest prompt + answer, in tokens;
    `threads`: of a CPU (None: the engine's choice); `dummy_weights`: random weights for both
    models, whose folders then need a config.json only; `environment`: variables for a child
    process; `memory_share`: of a GPU's memory that it may take (None: the engine's choice);
    `time_passes`: steps tell what each pass takes, also where that costs a second run of it.
    """

    dtype: str = "bfloat16"
    concurrency: int = 1
    max_len: int = 2048
    mode: str = "eager"
    tensor_parallel: int = 1
    threads: int | None = None
    device: str = "cpu"
    dummy_weights: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    memory_share: float | None = None
    time_passes: bool = False


@runtime_checkable
class Engine(Protocol):
    """One way to run speculative decoding for real. `name` and `version` identify the engine in
    results, `facts` say what it can."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def facts(self) -> EngineFacts: ...

    def start(
        self,
        target: ModelSource,
        draft: ModelSource | None,
        gamma: int,
        *,
        synthetic: Sequence[float] = (),
        schedule: Ranges = (),
    ) -> None:
        """Get ready to generate with `target`, helped by `draft` with exactly `gamma` draft tokens
        a round (where it finds that many: lookup may find fewer, or none), or alone.

        `synthetic` [gamma]: draft tokens are accepted by chance, position i in a share synthetic[i]
        of the rounds (unconditional, not increasing); times are real, the text is not the target's.
        `schedule`: gamma by batch size; `gamma` is the largest. Raises ArchsearchError where the
        engine cannot do what is asked.
        """
        ...

    def generate(
        self, prompts: Sequence[EnginePrompt], sampling: Sampling
    ) -> list[GenerationResult]:
        """Answers in the order of `prompts`."""
        ...

    def token_logits(self, token_ids: Sequence[int], candidates: Sequence[int]) -> list[float]:
        """The target's logits for `candidates` as the next token after `token_ids`, up to one
        number that all of them share (some engines tell log-probabilities)."""
        ...

    def steps(self) -> tuple[EngineStep, ...]:
        """What the last `generate` did, step by step; () where the engine does not tell."""
        ...

    def stop(self) -> None:
        """Release what `start` took. An engine can be started again."""
        ...


def check_start(
    gamma: int, draft: ModelSource | None, synthetic: Sequence[float], schedule: Ranges
) -> None:
    """Raise ArchsearchError where the arguments of `Engine.start` contradict each other."""
    if draft is None:
        if synthetic or schedule:
            raise ArchsearchError("synthetic acceptance and schedules need a draft")
        return
    if gamma < 1:
        raise ArchsearchError(f"gamma must be at least 1 with a draft, got {gamma}")
    if synthetic:
        falls = all(a >= b for a, b in pairwise(synthetic))
        if len(synthetic) != gamma or not falls or not all(0 <= rate <= 1 for rate in synthetic):
            raise ArchsearchError(
                f"synthetic acceptance needs {gamma} rates between 0 and 1 that do not rise, got"
                f" {list(synthetic)}"
            )
    if schedule:
        largest = largest_gamma(check_schedule(schedule), 0)
        if largest != gamma:
            raise ArchsearchError(
                f"gamma is {gamma}, the schedule's largest is {largest}; they must be the same"
            )


def same_vocabulary(draft: int | None, target: int | None) -> None:
    """Raise ArchsearchError where target and draft have other numbers of tokens."""
    if draft != target:
        raise ArchsearchError(
            f"the draft's vocabulary has {draft} tokens, the target's {target}; they must be the"
            " same"
        )


def text_of(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The text of an answer, "" without a tokenizer."""
    if tokenizer is None:
        return ""
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))


def drafter_family(draft: ModelSource | None) -> str:
    """The family of what is given as a draft; a hub id and a module are independent drafts."""
    if isinstance(draft, Ngram):
        return "ngram"
    if isinstance(draft, ExitAfter):
        return "early_exit"
    if isinstance(draft, Chained):
        return "chain"
    if isinstance(draft, Path) and (draft / "config.json").is_file():
        found = family_of_config(read_json(draft / "config.json", "the drafter's config"))
        return found or "independent"
    return "independent"


def check_family(
    facts: EngineFacts,
    draft: ModelSource | None,
    gamma: int,
    synthetic: Sequence[float],
    schedule: Ranges,
) -> str:
    """`check_start`, then the family of `draft`. Raises ArchsearchError where archsearch does not
    start the engine with it, and for synthetic acceptance and schedules that the engine has not."""
    check_start(gamma, draft, synthetic, schedule)
    if synthetic and not facts.synthesises:
        raise ArchsearchError(
            f"{facts.title} has no synthetic acceptance; use --engine vllm or transformers"
        )
    if schedule and not facts.schedules:
        raise ArchsearchError(
            f"{facts.title} takes one gamma for all batch sizes; use --engine vllm for a schedule"
        )
    family = drafter_family(draft)
    if family not in facts.confirms:
        others = names_of(lambda row: family in row.confirms) or "another drafter"
        raise ArchsearchError(
            f"{facts.title} is not started with {family} drafters here, only with"
            f" {', '.join(facts.confirms)}; use {others}"
        )
    return family
