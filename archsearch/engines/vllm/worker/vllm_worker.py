"""Runs vLLM for archsearch, inside vLLM's own environment. vLLM and torch are imported once a
request needs them.

What needs no vLLM is in the files beside this one, and is tested without it.
"""

from __future__ import annotations

import os
import sys
import time
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

# Where `loop` is; siblings are found beside the script.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "child"))

from counting import Counters, PassClock, Request, disagreement
from cpu_build import CHANCES, expands_rightly, mend_cpu_build
from installed_vllm import check_loads, checked_version, telling
from loop import Failed, Message, UserError, claim_stdout, end_tokens, serve
from model_config import (
    cache_gib,
    join_context_weights,
    keep_own_head,
    read_config,
    read_json,
    text_config,
)

_METHODS = {
    "independent": "draft_model",
    "pard": "draft_model",
    "eagle3": "eagle3",
    "peagle": "eagle3",
    "dflash": "dflash",
    "medusa": "medusa",
    "ngram": "ngram",
}
_ONE_PASS = ("pard", "peagle")  # vLLM knows of DFlash by itself
_COUNTERS = (
    "vllm:spec_decode_num_drafts",
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_per_pos",
)


class Worker:
    """One engine: started once, asked many times."""

    llm: Any = None
    gamma = room = calls = 0
    samples_rightly = True

    def __init__(self) -> None:
        self.ends: list[int] = []
        self.clock = PassClock()
        self.planned: list[Any] = []

    def versions(self, _: Message) -> Message:
        return {"version": checked_version()}

    @partial(telling, starting=True)
    def start(self, ask: Message) -> Message:
        version = checked_version()
        on_cpu = ask["device"] == "cpu"
        drafts = bool(ask.get("draft") or ask.get("lookup"))
        self.gamma = int(ask["gamma"]) if drafts else 0
        configs = [read_config(source) for source in (ask["target"], ask.get("draft")) if source]
        at_once = int(ask["concurrency"])
        # A round that begins inside max_len ends inside this.
        length = int(ask["max_len"]) + self.gamma + 2
        if on_cpu:
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            space = cache_gib(configs, ask["dtype"], at_once, length)
            os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(space)
            check_loads("torchvision", "torchaudio")
        from vllm import LLM
        from vllm.platforms import current_platform

        if bool(current_platform.is_cpu()) != on_cpu:
            has = "the CPU only" if current_platform.is_cpu() else "GPUs"
            raise UserError(
                f"device is {ask['device']}, but vLLM {version} of {sys.executable} is built for"
                f" {has}"
            )
        if on_cpu:
            mend_cpu_build(ask)
        keep_own_head(ask)
        join_context_weights(ask)
        positions = (text_config(config).get("max_position_embeddings") for config in configs)
        longest = min([length, *(most for most in positions if isinstance(most, int))])
        self.room = longest - (self.gamma + 2 if drafts else 0)
        limits: dict[str, object] = {}
        # vLLM's smallest default must hold one round of every request.
        round_tokens = at_once * (self.gamma + 2)
        if round_tokens > 2048:
            limits["max_num_batched_tokens"] = max(8192, round_tokens)
        if ask.get("memory_share"):
            limits["gpu_memory_utilization"] = float(ask["memory_share"])
        if ask.get("quantization") and "quantization_config" not in configs[0]:
            limits["quantization"] = ask["quantization"]
        # one kind of KV cache in a draft (validate_same_kv_cache_group)
        if len({*(text_config(configs[-1]).get("layer_types") or ())}) > 1 and ask.get("draft"):
            limits["disable_hybrid_kv_cache_manager"] = True
        self.llm = LLM(
            model=ask["target"],
            skip_tokenizer_init=True,
            dtype=ask["dtype"],
            max_model_len=longest,
            max_num_seqs=at_once,
            enforce_eager=ask["mode"] == "eager",
            tensor_parallel_size=int(ask["tensor_parallel"]),
            load_format="dummy" if ask.get("dummy_weights") else "auto",
            speculative_config=speculative_config(ask) if drafts else None,
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
        self.ends = end_tokens(generation, text_config(configs[0]), configs[0])
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        plan = scheduler.schedule

        def schedule(*args: object, **kwargs: Any) -> Any:
            output = plan(*args, **kwargs)
            self.planned.append(output)
            return output

        scheduler.schedule = schedule
        if on_cpu:
            self.clock.attach(_model_runner(self.llm))
            self.samples_rightly = not drafts or expands_rightly(ask)
        if drafts:
            self._counters()  # absent metrics are reported now, not after the run
        return {"version": version}

    def _counters(self) -> Counters:
        metrics = {metric.name: metric for metric in self.llm.get_metrics()}
        absent = [name for name in _COUNTERS if name not in metrics]
        if absent:
            raise Failed(
                f"vLLM does not tell {', '.join(absent)}, so accepted tokens cannot be counted; use"
                " another version"
            )
        rounds, drafted, accepted = (metrics[name] for name in _COUNTERS)
        return Counters(
            int(rounds.value), int(drafted.value), [int(value) for value in accepted.values]
        )

    def _preemptions(self) -> int:
        return sum(
            int(metric.value)
            for metric in self.llm.get_metrics()
            if metric.name == "vllm:num_preemptions"
        )

    @telling
    def generate(self, ask: Message) -> Message:
        temperature, limit = float(ask["temperature"]), int(ask["max_new_tokens"])
        if temperature > 0 and self.gamma and not self.samples_rightly:
            raise UserError(
                "this build of vLLM divides logits by uninitialised memory when it samples with a"
                " draft, and the mend did not take; use temperature 0, or another version"
            )
        for prompt in ask["prompts"]:
            if len(prompt["token_ids"]) + limit > self.room:
                raise UserError(
                    f"prompt {prompt['id']!r} of {len(prompt['token_ids'])} tokens and {limit} new"
                    f" ones exceed the {self.room} tokens there is room for; shorten them or raise"
                    " --max-len (the models' own limit counts too)"
                )
        import torch
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        CHANCES.begin(int(ask["seed"]))
        # The draft's own sampling and synthetic acceptance take no seed of a request.
        torch.manual_seed(int(ask["seed"]))
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
            given = {"prompt_token_ids": list(prompt["token_ids"])}
            names[self.llm.llm_engine.add_request(key, given, params)] = key
        steps = self._run(requests, names)
        counted = self._counters().minus(before) if self.gamma else Counters()
        if wrong := disagreement(list(requests.values()), counted):
            raise Failed(
                f"{wrong}; the counts of this run cannot be trusted, please report it with the"
                " version of vLLM"
            )
        return {
            "results": [request.result(self.gamma) for request in requests.values()],
            "steps": steps,
            "preempted": self._preemptions() - put_back,
        }

    def _run(self, requests: Mapping[str, Request], names: Mapping[str, str]) -> list[Message]:
        """Step until every request is answered. Fields of archsearch's EngineStep, one for each
        step that ran the target."""
        engine = self.llm.llm_engine
        steps: list[Message] = []
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
            prefill = any(
                tokens < requests[names[inner]].prompt_tokens for inner, tokens in computed.items()
            )
            written = 0
            for output in outputs:
                answer = output.outputs[0]
                if not answer.token_ids:
                    continue
                drafts = by_key.get(output.request_id, [])
                written += len(answer.token_ids)
                requests[output.request_id].hand_over(
                    list(answer.token_ids),
                    len(drafts),
                    bool(drafts) and drafts[0] < 0,
                    answer.finish_reason == "stop",
                    ended,
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

    @telling
    def logits(self, ask: Message) -> Message:
        """The target's raw logits of `candidates` after `token_ids`: those of the step that
        processes the prompt."""
        from vllm import SamplingParams

        token_ids, candidates = list(ask["token_ids"]), [int(token) for token in ask["candidates"]]
        if len(token_ids) >= self.room:
            raise UserError(
                f"a text of {len(token_ids)} tokens exceeds the {self.room - 1} there is room for;"
                " raise --max-len"
            )
        engine = self.llm.llm_engine
        self.calls += 1
        # Named tokens (logprob_token_ids) break vLLM 0.32's rejection sampler, which every step
        # goes through when drafting is on.
        params = SamplingParams(
            max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=-1, detokenize=False
        )
        engine.add_request(f"{self.calls}-logits", {"prompt_token_ids": token_ids}, params)
        found: dict[int, float] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.outputs[0].logprobs:
                    found = {
                        token: value.logprob
                        for token, value in output.outputs[0].logprobs[0].items()
                    }
        unknown = [token for token in candidates if token not in found]
        if unknown:
            raise UserError(f"tokens {unknown} are not in the target's vocabulary of {len(found)}")
        return {"logits": [float(found[token]) for token in candidates]}


def prompt_seed(seed: int, prompt_id: str) -> int:
    """A seed of its own for each prompt: one seed for all would sample, and accept, in step."""
    return (seed * 1_000_003 + zlib.crc32(prompt_id.encode())) & 0x7FFFFFFF


def speculative_config(ask: Message) -> dict[str, Any]:
    """vLLM's `speculative_config`. Drafts are sampled at the request's temperature, as in the other
    engines, where they can be: Medusa heads and lookup know one token only, and of one pass all
    tokens are the most likely ones."""
    family = ask.get("family") or "independent"
    config: dict[str, Any] = {
        "method": _METHODS[family],
        "num_speculative_tokens": int(ask["gamma"]),
    }
    if ask.get("lookup"):
        low, high = map(int, ask["lookup"])
        config |= {"prompt_lookup_min": low, "prompt_lookup_max": high}
    else:
        # vLLM wants as many ranks as the target's
        config |= {"model": ask["draft"], "draft_tensor_parallel_size": int(ask["tensor_parallel"])}
        if ask.get("draft_quantization"):  # not inherited from the target
            config["quantization"] = ask["draft_quantization"]
    if family in ("independent", "eagle3"):
        config["draft_sample_method"] = "probabilistic"
    if family in _ONE_PASS:
        config["parallel_drafting"] = True
    if ask.get("synthetic"):
        config |= {
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [float(x) for x in ask["synthetic"]],
        }
    if ask.get("schedule"):
        config["num_speculative_tokens_per_batch_size"] = ask["schedule"]
    return config


def _model_runner(llm: Any) -> object:
    """vLLM's model runner where it is in this process, else None."""
    wrapper = getattr(llm.llm_engine.model_executor, "driver_worker", None)
    return getattr(getattr(wrapper, "worker", None), "model_runner", None)


if __name__ == "__main__":
    serve(Worker(), claim_stdout())
