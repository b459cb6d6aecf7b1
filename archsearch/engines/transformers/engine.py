"""Hugging Face assisted generation, asked for exactly gamma draft tokens a round. Batch 1, this
process. Besides drafts: prompt lookup (`prompt_lookup_num_tokens`), early exit
(`assistant_early_exit`), whose layers have a cache of their own, and chains (`ChainGenerator`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
)
from transformers.generation.candidate_generator import AssistedCandidateGenerator
from transformers.generation.streamers import BaseStreamer

from archsearch.acceptance.chain import ChainRule
from archsearch.acceptance.lookup import Ngram, Reader
from archsearch.engine_facts import engine_facts
from archsearch.engines.child.answers import answer_of, drafting_rounds
from archsearch.engines.engine import (
    Chained,
    EnginePrompt,
    EngineSettings,
    EngineStep,
    ExitAfter,
    GenerationResult,
    ModelSource,
    Sampling,
    Tokenizer,
    check_family,
    same_vocabulary,
    text_of,
)
from archsearch.errors import ArchsearchError
from archsearch.models.drafts import load_draft
from archsearch.models.files import gamma_settings
from archsearch.models.runtime import hooked, load_checked, quiet_transformers, torch_dtype
from archsearch.schedule import Ranges

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ChainGenerator(AssistedCandidateGenerator):
    """A lookup drafts where it finds something, else the draft model, which stops where it is
    unsure: behind that token, or before it.

    transformers' own generator changes its confidence threshold as it goes where scikit-learn is
    installed (`AssistedCandidateGenerator.update_candidate_strategy`); in a class derived from it
    the threshold stays what was asked for. `reader`: the lookup in the course of this answer, which
    has read the prompt; None: the draft alone. `rule`: what both draft; gamma and threshold are in
    the draft's own settings as well. `drafted`: draft tokens of every round so far."""

    def __init__(
        self, reader: Reader | None, rule: ChainRule, input_ids: Any, **arguments: Any
    ) -> None:
        super().__init__(input_ids=input_ids, **arguments)
        self.reader, self.rule = reader, rule
        self.assistant_kwargs.pop("position_ids", None)  # the prompt's; they follow from the mask
        self.read = int(input_ids.shape[1])
        self.drafted: list[int] = []

    def get_candidates(self, input_ids: Any, **arguments: Any) -> Any:
        # In every round: what the draft added and the target refused leaves the draft's cache while
        # it is the end of it. Tokens of the lookup are read with the draft's next pass.
        self._update_past_and_masks(input_ids)
        # also before it has a cache
        self.assistant_kwargs["attention_mask"] = torch.ones_like(input_ids)
        self.write(input_ids)
        tokens = self._found()
        if tokens:
            more = torch.tensor([tokens], dtype=input_ids.dtype, device=input_ids.device)
            candidates, logits = torch.cat([input_ids, more], dim=1), None
        else:
            candidates, logits = super().get_candidates(input_ids, **arguments)
            if (
                not self.rule.with_last
                and logits is not None
                and logits[0, -1].softmax(-1)[candidates[0, -1]] < self.rule.least
            ):
                candidates, logits = candidates[:, :-1], logits[:, :-1]
                logits = None if logits.shape[1] == 0 else logits
        self.drafted.append(int(candidates.shape[1] - input_ids.shape[1]))
        return candidates, logits

    def write(self, input_ids: Tensor) -> None:
        """The lookup reads the answer so far; after the last round too, where later answers are
        looked up in it."""
        if self.reader is not None:
            for token in input_ids[0, self.read :].tolist():
                self.reader.write(token)
        self.read = int(input_ids.shape[1])

    def _found(self) -> list[int]:
        room = min(self.rule.found, self.main_model_max_length - self.read - 1)
        return self.reader.propose([room])[room] if self.reader is not None and room > 0 else []


@contextmanager
def chained(
    target: PreTrainedModel, reader: Callable[[], Reader] | None, rule: ChainRule
) -> Iterator[list[ChainGenerator]]:
    """For one call of `target.generate` candidates come from a ChainGenerator, which is then in the
    list."""
    made: list[ChainGenerator] = []

    def generator(**arguments: object) -> ChainGenerator:
        for name in ("target_tokenizer", "assistant_tokenizer"):
            arguments.pop(name, None)
        made.append(ChainGenerator(reader() if reader is not None else None, rule, **arguments))
        return made[-1]

    target._get_candidate_generator = generator  # type: ignore[assignment]
    try:
        yield made
    finally:
        del target._get_candidate_generator


class RoundClock(BaseStreamer):
    """Notes when `generate` hands over tokens: once for the prompt, then once a round (assisted) or
    once a token (alone)."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.lengths: list[int] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())
        self.lengths.append(value.numel())

    def end(self) -> None:
        pass


class PassClock:
    """Seconds and tokens of every pass of target and draft, by forward hooks.

    `rows`: tokens of each pass of the target; on a GPU, where a pass returns before it is done,
    nothing else is kept. `exit_layers`: passes of the target that stop there are drafts.
    """

    def __init__(
        self, target: PreTrainedModel, draft: PreTrainedModel | None, exit_layers: int = 0
    ) -> None:
        self.passes: list[tuple[str, float, float, int]] = []  # whose, start, end, tokens
        self.rows: list[int] = []
        self._exit, self._timed = exit_layers, target.device.type == "cpu"
        self._started = 0.0
        self.hooks: list[object] = []
        models = {"target": target}
        if draft is not None and draft is not target:
            models["draft"] = draft
        for name, model in models.items():
            after = partial(self._after, name)
            self.hooks.append(model.register_forward_pre_hook(self._before))
            self.hooks.append(model.register_forward_hook(after, with_kwargs=True))

    def _before(self, module: object, args: object) -> None:
        self._started = time.perf_counter()

    def _after(self, name: str, module: Any, args: Any, kwargs: Any, output: object) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        tokens = 0 if ids is None else ids.shape[-1]
        if self._exit and module.config.num_hidden_layers == self._exit:
            name = "draft"
        if name == "target":
            self.rows.append(tokens)
        if self._timed:
            self.passes.append((name, self._started, time.perf_counter(), tokens))


class SyntheticAcceptance(LogitsProcessor):
    """Makes the target accept draft tokens by chance. transformers hands its processors to the
    draft too, so both can be steered: the draft always proposes one token, the target agrees for as
    many positions as were drawn and then says another."""

    def __init__(self, rates: Sequence[float], proposed: int, refused: int, seed: int) -> None:
        self.rates, self.proposed, self.refused = tuple(rates), proposed, refused
        self._place = random.Random(seed).random()
        self._verifying, self._position, self._accepted = False, 0, 0

    def target_begins(self, *_: object) -> None:
        """Before a pass of the target: how many of this round's tokens will be accepted.

        Steps of the golden ratio spread evenly: the rates are met after tens of rounds, where draws
        need thousands.
        """
        self._place = (self._place + 0.6180339887498949) % 1.0
        # They do not rise: all before an accepted one are.
        self._accepted = sum(self._place < rate for rate in self.rates)
        self._verifying, self._position = True, 0

    def draft_begins(self, *_: object) -> None:
        self._verifying = False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token = self.proposed
        if self._verifying:
            token = self.proposed if self._position < self._accepted else self.refused
            self._position += 1
        steered = torch.full_like(scores, float("-inf"))
        steered[:, token] = 0.0
        return steered


class TransformersEngine:
    """`generate(assistant_model=...)`. Several engines may share loaded modules: gamma is set on
    the draft for each call only. `dtype` and `device` apply to folders given to `start`; a draft
    goes where its target is.
    """

    name = "transformers"
    facts = engine_facts(name)
    target: PreTrainedModel | None = None
    draft: PreTrainedModel | None = None
    lookup: Ngram | None = None
    chain: Chained | None = None
    readers: Callable[[Sequence[int]], Reader] | None = None
    synthetic: tuple[float, ...] = ()
    gamma = exit_layers = 0

    def __init__(
        self,
        tokenizer: Tokenizer = None,
        dtype: torch.dtype | str = torch.bfloat16,
        device: str = "cpu",
    ) -> None:
        self.version = version("transformers")
        self.tokenizer = tokenizer
        self.dtype, self.device = torch_dtype(dtype), device
        self._steps: list[EngineStep] = []

    def start(
        self,
        target: ModelSource,
        draft: ModelSource | None,
        gamma: int,
        *,
        synthetic: Sequence[float] = (),
        schedule: Ranges = (),
    ) -> None:
        """An `Ngram` is looked up from its longest down to single tokens, whatever its shortest:
        transformers knows no other way; that of a chain is archsearch's own. One start serves one
        list of texts to a suffix tree.

        Raises ArchsearchError when the vocabularies differ, the target has no such exit, gamma is
        below 1 (with a draft), or a schedule, another family, or synthetic acceptance of what is no
        model is asked for.
        """
        family = check_family(self.facts, draft, gamma, synthetic, schedule)
        if synthetic and family != "independent":
            raise ArchsearchError(
                f"transformers accepts by chance from draft models only, not from {family}; use"
                " --engine vllm"
            )
        self.synthetic = tuple(synthetic)
        self.target = self._module(target, is_draft=False)
        self.lookup = draft if isinstance(draft, Ngram) else None
        self.exit_layers = draft.layers if isinstance(draft, ExitAfter) else 0
        count = self.target.config.num_hidden_layers
        if isinstance(draft, ExitAfter) and not 1 <= draft.layers < count:
            raise ArchsearchError(
                f"a target of {count} layers has no exit after layer {draft.layers}"
            )
        self.chain = draft if isinstance(draft, Chained) else None
        if self.chain is not None:
            if gamma != self.chain.rule.longest:
                raise ValueError(
                    f"gamma must be that of the chain's longest round, {self.chain.rule.longest},"
                    f" got {gamma}"
                )
            self.readers = self.chain.lookup.starts() if self.chain.lookup is not None else None
            draft, family = self.chain.draft, "independent"
        self.draft = (
            None if draft is None or family != "independent" else self._module(draft, is_draft=True)
        )
        self.gamma = 0 if draft is None else gamma
        if self.draft is not None:
            self.draft.to(self.target.device)  # type: ignore[arg-type]
            same_vocabulary(self.draft.config.vocab_size, self.target.config.vocab_size)

    def _module(self, source: ModelSource, *, is_draft: bool) -> PreTrainedModel:
        if not isinstance(source, Path | str):
            return source.eval()
        if is_draft and isinstance(source, Path):
            return load_draft(source, self.dtype)
        model = load_checked(source, f"model {str(source)!r}", self.dtype)
        return model.to(self.device).eval()  # type: ignore[arg-type]

    def stop(self) -> None:
        self.target = self.draft = self.lookup = self.chain = self.readers = None
        self.gamma = self.exit_layers = 0

    def generate(
        self, prompts: Sequence[EnginePrompt], sampling: Sampling
    ) -> list[GenerationResult]:
        """One request after the other. Sampling is seeded per prompt, so a prompt's answer does not
        depend on its neighbours."""
        self._steps = []
        return [self._generate_one(prompt, sampling) for prompt in prompts]

    def steps(self) -> tuple[EngineStep, ...]:
        return tuple(self._steps)

    def token_logits(self, token_ids: Sequence[int], candidates: Sequence[int]) -> list[float]:
        target = self._started()
        with torch.inference_mode():
            ids = torch.tensor([list(token_ids)], device=target.device)
            logits = target(ids, use_cache=False, logits_to_keep=1).logits[0, -1].float()
        return [float(logits[token]) for token in candidates]

    def _started(self) -> PreTrainedModel:
        if self.target is None:
            raise RuntimeError("start the engine first")
        return self.target

    def _generate_one(self, prompt: EnginePrompt, sampling: Sampling) -> GenerationResult:
        target = self._started()
        input_ids = torch.tensor([prompt.token_ids], device=target.device)
        config = _generation_config(target, sampling)
        if self.lookup is not None:
            config.prompt_lookup_num_tokens = self.gamma
            config.max_matching_ngram_size = self.lookup.longest
        elif self.exit_layers:
            config.assistant_early_exit = self.exit_layers
        clock = RoundClock()
        rule = self.chain.rule if self.chain is not None else None
        own = gamma_settings(max(self.gamma, 1))
        if rule is not None:
            own = gamma_settings(rule.gamma, rule.least)
        defaults = _own_defaults(target, target if self.exit_layers else self.draft, own)
        readers, ids = self.readers, prompt.token_ids
        opened = (lambda: readers(ids)) if readers is not None else None
        generator: AbstractContextManager[list[ChainGenerator]] = nullcontext([])
        if rule is not None:
            generator = chained(target, opened, rule)
        processors, hooks = self._processors(sampling, config, prompt)
        passes = PassClock(target, self.draft, self.exit_layers)
        with (
            hooked([*passes.hooks, *hooks]),
            torch.inference_mode(),
            torch.random.fork_rng(devices=[]),
            quiet_transformers(),
            defaults,
            generator as made,
        ):
            torch.manual_seed(sampling.seed)
            started = time.perf_counter()
            output = target.generate(  # type: ignore[operator]
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                generation_config=config,
                assistant_model=self.draft,
                logits_processor=processors,
                streamer=clock,
            )
            seconds = time.perf_counter() - started
        token_ids = tuple(output[0, input_ids.shape[1] :].tolist())
        times, lengths = clock.times[1:], clock.lengths[1:]  # the first is the prompt
        room = sampling.max_new_tokens
        ended = bool(token_ids) and token_ids[-1] in (config.eos_token_id or ())
        drafted = [self.gamma] * len(lengths)
        if self.lookup is not None:
            drafted = [
                rows - 1 - (number == 0) * (len(prompt.token_ids) - 1)
                for number, rows in enumerate(passes.rows)
            ]
        whole = drafting_rounds(lengths, drafted, room, ended)
        if made:  # a chain: what was proposed, in the rounds that had room for its longest
            drafted = made[0].drafted
            made[0].write(output)
            whole = [(drafts, n) for drafts, (_, n) in zip(drafted, whole, strict=False)]
        self._steps += _steps_of(
            passes.passes, [started, *times], lengths, drafted, len(prompt.token_ids)
        )
        fields = answer_of(
            prompt.prompt_id, token_ids, seconds, (times, lengths), whole, self.gamma
        )
        return GenerationResult(text=text_of(self.tokenizer, token_ids), **fields)

    def _processors(
        self, sampling: Sampling, config: GenerationConfig, prompt: EnginePrompt
    ) -> tuple[LogitsProcessorList, list[Any]]:
        """The processors of one call, and the hooks that go with them.

        The temperature is a processor and not in the config: transformers 5.23 hands the target's
        processors to the draft and then adds those of the config once more, so the draft would be
        sampled at the temperature squared and lose acceptance.
        """
        if not self.synthetic:
            own = LogitsProcessorList()
            if sampling.temperature not in (0.0, 1.0):
                own.append(TemperatureLogitsWarper(sampling.temperature))
            return own, []
        target, draft = self._started(), self.draft
        assert draft is not None
        ends = config.eos_token_id or ()
        proposed, refused = [token for token in range(len(ends) + 2) if token not in ends][:2]
        chance = SyntheticAcceptance(
            self.synthetic, proposed, refused, hash((sampling.seed, prompt.token_ids))
        )
        hooks = [
            target.register_forward_pre_hook(chance.target_begins),
            draft.register_forward_pre_hook(chance.draft_begins),
        ]
        return LogitsProcessorList([chance]), hooks


def _steps_of(
    passes: Sequence[tuple[str, float, float, int]],
    times: Sequence[float],
    lengths: Sequence[int],
    drafted: Sequence[int],
    prompt: int,
) -> list[EngineStep]:
    """The steps of one request: `times` [steps + 1] bound them, `passes` are (whose, start, end,
    tokens); `drafted` [steps]."""
    steps, written = [], 0
    for number, ((begin, end), length, gamma) in enumerate(
        zip(pairwise(times), lengths, drafted, strict=False)
    ):
        inside = [item for item in passes if begin <= item[1] < end]
        target = [item for item in inside if item[0] == "target"]
        draft = [item for item in inside if item[0] == "draft"]
        steps.append(
            EngineStep(
                batch=1,
                written=length,
                seconds=end - begin,
                gamma=gamma,
                target_tokens=sum(item[3] for item in target),
                target_s=sum(item[2] - item[1] for item in target) if target else None,
                draft_s=tuple(item[2] - item[1] for item in draft),
                draft_tokens=tuple(item[3] for item in draft),
                prefill=number == 0,
                context=float(prompt + written),
            )
        )
        written += length
    return steps


def _generation_config(target: PreTrainedModel, sampling: Sampling) -> GenerationConfig:
    """Greedy or plain sampling: nothing of the target's own defaults (top_p, penalties) but its
    special tokens."""
    special = target.generation_config
    eos = special.eos_token_id if special.eos_token_id is not None else target.config.eos_token_id
    eos_list = eos if isinstance(eos, list) or eos is None else [eos]
    if sampling.ignore_end:
        eos_list = None
    config = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        do_sample=sampling.temperature > 0,
        bos_token_id=special.bos_token_id,
        eos_token_id=eos_list,
        # Nothing is padded at batch 1, but transformers hides tokens equal to pad_token_id from the
        # draft (and only from it) unless that is an end token too: a prompt or answer with such a
        # token would lose acceptance.
        pad_token_id=eos_list[0] if eos_list else None,
        repetition_penalty=1.0,
        num_beams=1,
        use_cache=True,
    )
    if sampling.temperature > 0:
        config.temperature, config.top_k, config.top_p = 1.0, 0, 1.0
    return config


@contextmanager
def _own_defaults(
    target: PreTrainedModel, draft: PreTrainedModel | None, own: dict[str, object]
) -> Iterator[None]:
    """For one call, nothing comes from the models' own generation_config but `own`
    (`gamma_settings`), which transformers reads from the draft's. Where the target exits early it
    is its own draft.

    transformers fills what a call leaves out (None) from there: a text that is to go on after the
    end token would stop at the model's own.
    """
    saved = [(model, model.generation_config) for model in (target, draft) if model is not None]
    try:
        target.generation_config = GenerationConfig()
        if draft is not None:
            draft.generation_config = GenerationConfig(**own)
        yield
    finally:
        for model, config in saved:
            model.generation_config = config


def make(settings: EngineSettings, tokenizer: Tokenizer = None) -> TransformersEngine:
    """transformers as `settings` want it: their dtype and kind of device count here."""
    return TransformersEngine(
        tokenizer, settings.dtype, "cpu" if settings.device == "cpu" else "cuda"
    )
