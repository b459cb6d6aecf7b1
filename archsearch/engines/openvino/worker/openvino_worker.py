"""Runs OpenVINO GenAI for archsearch, in OpenVINO's own environment.

What needs no OpenVINO is in the files beside this one, and is tested without it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

# Where `loop` is; siblings are found beside the script.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "child"))

from answers import answer_of, drafting_rounds
from convert import check_layers, converted, model_folder, openvino_errors, precision, version_of
from loop import Failed, Message, UserError, claim_stdout, end_tokens, serve

NO_TOKEN = 2**31 - 1
"""An id that no vocabulary has."""
KV_BLOCK = 32
"""Tokens in one block of the KV cache on a CPU."""


def ends_of(folder: Path) -> list[int]:
    """The tokens that end a text: generation_config.json first, then config.json."""
    found: list[Message] = []
    for name in ("generation_config.json", "config.json"):
        with contextlib.suppress(OSError, ValueError):
            found.append(json.loads((folder / name).read_text(encoding="utf-8")))
    return end_tokens(*found)


# Rounds and passes, out of what OpenVINO GenAI counts by step: pure.


def asked(written: int, gamma: int, max_new_tokens: int) -> int:
    """Draft tokens that OpenVINO GenAI asks for in the round after `written` tokens: the last token
    is always the target's."""
    return max(0, min(gamma, max_new_tokens - written - 1))


def draft_passes(
    durations: Sequence[float], lengths: Sequence[int], gamma: int, max_new_tokens: int
) -> list[list[float]] | None:
    """The draft's passes by hand-over, out of all of them one after the other; None where they do
    not add up.

    Each step notes one entry at least: an empty one where nothing was drafted (the first step, and
    a round for the last token).
    """
    split: list[list[float]] = []
    position = written = 0
    for index, length in enumerate(lengths):
        count = asked(written, gamma, max_new_tokens) if index else 0
        split.append(list(durations[position : position + count]))
        position += max(count, 1)
        written += length
    return split if position == len(durations) else None


def draft_pass_tokens(passes: int, first: bool, prompt: int, previous_whole: bool) -> list[int]:
    """Tokens in each pass of one request's draft. The first pass of a round also takes what the
    draft has not seen: the prompt in the first round, its own last token after a round that was
    accepted whole."""
    if not passes:
        return []
    return [prompt + 1 if first else 2 if previous_whole else 1] + [1] * (passes - 1)


def trimmed(lengths: Sequence[int], total: int) -> list[int]:
    """`lengths` cut so that they add up to `total`: tokens that the engine counted behind the end
    of the text are dropped."""
    kept: list[int] = []
    left = total
    for length in lengths:
        if left <= 0:
            break
        kept.append(min(length, left))
        left -= kept[-1]
    return kept


class Request:
    """One prompt on its way: its tokens and the steps in which they came. Times are
    time.perf_counter() seconds."""

    def __init__(self, prompt: Message, handle: Any, admitted: float) -> None:
        self.prompt_id, self.prompt = prompt["id"], len(prompt["token_ids"])
        self.handle, self.admitted = handle, admitted
        self.token_ids: list[int] = []
        self.lengths: list[int] = []
        self.times: list[float] = []
        self.steps: list[int] = []

    def step(self, gamma: int, limit: int) -> Message:
        """What its next step takes. The draft reads the prompt in its first round."""
        number, written = len(self.lengths), sum(self.lengths)
        wanted = asked(written, gamma, limit) if number else 0
        return {
            "gamma": wanted,
            "target_tokens": wanted + 1 if number else self.prompt,
            "prefill": number == 0 or (number == 1 and gamma > 0),
            "context": float(self.prompt + written) if number else 0.0,
        }


class Worker:
    """One started engine and its answers."""

    pipeline: Any = None
    logits_model: Any = None
    gamma = lookup = request_number = 0

    def __init__(self) -> None:
        self.ends: list[int] = []

    def versions(self, _: Message) -> Message:
        version = version_of("openvino-genai")
        if version is None:
            raise UserError(
                f"{sys.executable} has no openvino-genai; run: archsearch engine install openvino"
            )
        return {"version": version}

    def start(self, request: Message) -> Message:
        known = self.versions(request)
        import openvino as ov
        import openvino_genai as genai

        core = ov.Core()
        weights, hint = precision(
            request["dtype"], core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        )
        cache, dummy = Path(request["cache"]), request["dummy_weights"]
        target = model_folder(request["target"])
        sources = [target] if request["draft"] is None else [target, model_folder(request["draft"])]
        if request.get("family") == "eagle3":
            check_layers(sources[1], target)
        folders = [str(converted(folder, cache, weights, dummy)) for folder in sources]
        self.lookup = int(request["lookup"][1]) if request.get("lookup") else 0
        self.gamma = request["gamma"] if len(sources) == 2 or self.lookup else 0
        self.ends = ends_of(target)
        # The KV cache holds the same type as the computation: OpenVINO's own default is 8 bits,
        # which changes the text.
        properties: dict[str, Any] = {"INFERENCE_PRECISION_HINT": hint, "KV_CACHE_PRECISION": hint}
        if request.get("threads"):
            properties["INFERENCE_NUM_THREADS"] = int(request["threads"])
        self.concurrency, self.max_len = request["concurrency"], request["max_len"]
        scheduler = genai.SchedulerConfig()
        longest = self.max_len + self.gamma + 1
        scheduler.cache_size = 0
        scheduler.num_kv_blocks = self.concurrency * (longest // KV_BLOCK + 2)
        # No prompt is cut into pieces.
        scheduler.max_num_batched_tokens = self.concurrency * longest
        scheduler.max_num_seqs = max(self.concurrency, 1)
        scheduler.enable_prefix_caching = False
        helped: dict[str, object] = {}
        if self.lookup:
            helped["prompt_lookup"] = True
        elif self.gamma:
            helped["draft_model"] = genai.draft_model(folders[1], "CPU", **properties)
        with openvino_errors("cannot load the models"):
            self.pipeline = genai.ContinuousBatchingPipeline(
                folders[0], scheduler, "CPU", {**properties, **helped}
            )
            self.core, self.properties = core, properties
            self.target_ir = folders[0]
            # The first steps are slow, and the draft's counters only begin to note empty steps
            # after a first one.
            few = self.gamma + 3
            self.single({"id": "", "token_ids": [0, 0]}, self.config(few, 0.0, 0, []), few, True)
        return known

    def config(
        self, max_new_tokens: int, temperature: float, seed: int, ends: Sequence[int]
    ) -> object:
        import openvino_genai as genai

        config = genai.GenerationConfig()
        config.max_new_tokens = max_new_tokens
        config.do_sample = temperature > 0
        config.rng_seed = seed % 2**63
        if temperature > 0:
            config.temperature = temperature
        config.ignore_eos = not ends
        # Where nothing is set the model's own end token is taken, and the draft would stop at it
        # whatever ignore_eos says.
        config.stop_token_ids = set(ends or [NO_TOKEN])
        config.eos_token_id = (ends or [NO_TOKEN])[0]
        if self.gamma:
            config.num_assistant_tokens = self.gamma
            # above 0 the draft would decide for itself when to stop
            config.assistant_confidence_threshold = 0.0
        if self.lookup:
            config.max_ngram_size = self.lookup
        return config

    def generate(self, request: Message) -> Message:
        limit = request["max_new_tokens"]
        arguments = (limit, request["temperature"], request["seed"])
        prompts, ignore_end = request["prompts"], request["ignore_end"] or not self.ends
        with openvino_errors("generation failed"):
            if self.concurrency == 1 or len(prompts) == 1:
                pairs = [
                    self.single(prompt, self.config(*arguments, []), limit, ignore_end)
                    for prompt in prompts
                ]
                return {
                    "results": [pair[0] for pair in pairs],
                    "steps": [step for pair in pairs for step in pair[1]],
                }
            return self.together(
                prompts, self.config(*arguments, [] if ignore_end else self.ends), limit
            )

    def stopper(self) -> Any:
        """A streamer that stops a request at an end token and keeps what it saw in `written`."""
        import openvino_genai as genai

        ends, status = frozenset(self.ends), genai.StreamingStatus

        class Stopper(genai.StreamerBase):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.written: list[int] = []

            def write(self, token: Any) -> object:
                tokens = token if isinstance(token, list) else [token]
                self.written += tokens
                return status.STOP if any(one in ends for one in tokens) else status.RUNNING

            def end(self) -> None:
                pass

        return Stopper()

    def tensor(self, token_ids: Sequence[int]) -> object:
        import numpy as np
        import openvino as ov

        return ov.Tensor(np.array([list(token_ids)], np.int64))

    def single(
        self, prompt: Message, config: object, limit: int, ignore_end: bool
    ) -> tuple[Message, list[Message]]:
        """One request through `generate`, whose metrics tell the seconds of every pass of target
        and draft.

        The engine does not know the end tokens: a draft that proposes one would stop drafting
        there, and gamma would not be what was asked. A streamer stops the request instead.
        """
        tensor = self.tensor(prompt["token_ids"])
        streamer = None if ignore_end else self.stopper()
        started = time.perf_counter()
        (answer,) = self.pipeline.generate([tensor], [config], streamer)
        seconds = time.perf_counter() - started
        written = list(answer.m_generation_ids[0]) if answer.m_generation_ids else []
        if streamer is not None and streamer.written[: len(written)] == written:
            written = streamer.written  # a stopped answer lacks its last tokens
        if not written:
            raise Failed(
                f"no token was written for prompt {prompt['id']!r} of {len(prompt['token_ids'])}"
                " tokens (KV cache full?)"
            )
        raw = (answer.extended_perf_metrics if self.gamma else answer.perf_metrics).raw_metrics
        sizes, times = list(raw.m_batch_sizes), [time_ms / 1e3 for time_ms in raw.m_new_token_times]
        end = (
            0
            if ignore_end
            else next((n for n, token in enumerate(written, 1) if token in self.ends), 0)
        )
        if (sum(sizes) < end if end else sum(sizes) != len(written)) or len(times) != len(sizes):
            raise Failed(
                f"OpenVINO GenAI counted {sum(sizes)} tokens in {len(times)} steps but wrote"
                f" {len(written)}"
            )
        request = Request(prompt, None, started)
        request.token_ids = written[:end] if end else written
        lengths = trimmed(sizes, len(request.token_ids))
        request.times = arrivals = times[: len(lengths)]
        # Rounds behind the end, until it was noticed, are no part of the answer.
        seconds -= times[-1] - arrivals[-1]
        first = seconds - (arrivals[-1] - arrivals[0])
        walls = [first, *(b - a for a, b in pairwise(arrivals))]
        if self.gamma:
            metrics = answer.extended_perf_metrics
            targets = [value / 1e6 for value in metrics.main_model_metrics.raw_metrics.m_durations]
            drafts = [value / 1e6 for value in metrics.draft_model_metrics.raw_metrics.m_durations]
            passes = draft_passes(drafts, sizes, self.gamma, limit)
        else:
            forwards = list(raw.token_infer_durations)
            targets = [value / 1e6 for value in forwards] if len(forwards) >= len(lengths) else []
            passes = None
        steps: list[Message] = []
        for index, length in enumerate(lengths):
            row = passes[index] if passes is not None else []
            whole = index > 1 and lengths[index - 1] == self.gamma + 1
            steps.append(
                {
                    "batch": 1,
                    "written": length,
                    "seconds": walls[index],
                    **request.step(self.gamma, limit),
                    "target_s": targets[index] if index < len(targets) else None,
                    "draft_s": row,
                    "draft_tokens": draft_pass_tokens(len(row), index == 1, request.prompt, whole),
                }
            )
            request.lengths.append(length)
        return self.result(request, seconds, limit, end > 0), steps

    def result(self, request: Request, seconds: float, limit: int, ended: bool) -> Message:
        """With a draft the first hand-over ends with the first round: the draft reads the prompt in
        it."""
        lengths, gamma = request.lengths, self.gamma
        merged = 2 if gamma and len(lengths) > 1 else 1
        later = lengths[1:]
        whole = drafting_rounds(later, [gamma] * len(later), limit - lengths[0], ended)
        handed = (request.times[merged - 1 :], [sum(lengths[:merged]), *lengths[merged:]])
        return answer_of(request.prompt_id, request.token_ids, seconds, handed, whole, gamma)

    def together(self, prompts: Sequence[Message], config: Any, limit: int) -> Message:
        """Many requests at once, step by step: which request wrote how many tokens in which step,
        and how long the step took.

        Here the engine knows the end tokens, so that a request leaves the batch at once. A draft
        that proposes one stops drafting there, which changes nothing that is written.
        """
        waiting = list(prompts)
        active: list[Request] = []
        done: list[Request] = []
        steps: list[Message] = []
        while waiting or active:
            while waiting and len(active) < self.concurrency:
                prompt = waiting.pop(0)
                self.request_number += 1
                admitted = time.perf_counter()
                handle = self.pipeline.add_request(
                    self.request_number, self.tensor(prompt["token_ids"]), config
                )
                active.append(Request(prompt, handle, admitted))
            before = time.perf_counter()
            self.pipeline.step()
            after = time.perf_counter()
            step: Message = {"batch": 0, "written": 0, "seconds": after - before, "gamma": 0}
            step |= {"target_tokens": 0, "prefill": False, "context": 0.0}
            for request in active:
                new: list[int] = []
                while request.handle.can_read():
                    for output in request.handle.read().values():
                        new += output.generated_ids
                if not new:
                    continue
                own = request.step(self.gamma, limit)
                step["batch"] += 1
                step["written"] += len(new)
                step["gamma"] = max(step["gamma"], own["gamma"])
                step["prefill"] |= own["prefill"]
                for name in ("target_tokens", "context"):
                    step[name] += own[name]
                request.token_ids += new
                request.lengths.append(len(new))
                request.times.append(after)
                request.steps.append(len(steps))
            if not step["batch"]:
                raise Failed(
                    f"a step of {len(active)} requests wrote nothing (KV cache full?); lower"
                    " --concurrency or --max-len"
                )
            step["context"] /= step["batch"]
            steps.append(step)
            running = [
                request
                for request in active
                if str(request.handle.get_status()).endswith("RUNNING")
            ]
            done += [request for request in active if request not in running]
            active = running
        results = {}
        for request in done:
            self.target_seconds(request, steps)
            ended = request.token_ids[-1] in config.stop_token_ids
            seconds = request.times[-1] - request.admitted
            results[request.prompt_id] = self.result(request, seconds, limit, ended)
        return {"results": [results[prompt["id"]] for prompt in prompts], "steps": steps}

    def target_seconds(self, request: Request, steps: list[Message]) -> None:
        """Note the seconds of the target's passes that a finished request knows: each token has its
        share of its pass."""
        raw = request.handle.get_perf_metrics().raw_metrics
        sizes, shares = list(raw.m_batch_sizes), list(raw.token_infer_durations)
        if sum(sizes) != len(shares) or len(sizes) < len(request.steps):
            return
        position = 0
        for index, size in zip(request.steps, sizes, strict=False):
            steps[index]["target_s"] = sum(shares[position : position + size]) / 1e6
            position += size

    def logits(self, request: Message) -> Message:
        """The target's logits after `token_ids`: one pass of the same weights at the same
        precision, outside the pipeline."""
        import numpy as np

        if self.logits_model is None:
            path = self.target_ir + "/openvino_model.xml"
            compiled = self.core.compile_model(path, "CPU", dict(self.properties))
            self.logits_model = compiled.create_infer_request()
        ids = np.array([request["token_ids"]], np.int64)
        inputs = {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "position_ids": np.arange(ids.shape[1], dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        self.logits_model.reset_state()
        with openvino_errors("the target's pass failed"):
            output = self.logits_model.infer(inputs)
        row = next(iter(output.values()))[0, -1]
        return {"logits": [float(row[token]) for token in request["candidates"]]}


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    serve(Worker(), claim_stdout())
