"""vLLM as a server that runs already: its OpenAI API for the answers, its Prometheus metrics for
the counts.

Every streamed chunk carries the tokens that the engine handed over since the last one: one
round, as long as this process reads faster than the server writes, which `spec_decode_num_drafts`
on /metrics before and after shows. If so, each result has the whole rounds of its own chunks;
rounds cut by max_new_tokens or by the end of the text are left out, as everywhere. If chunks were
merged, the counts are the server's: exact for each prompt at concurrency 1; at a higher one exact
for the whole call, and dealt to the results in proportion to the tokens they wrote, with
`round_lengths` empty. These include rounds that max_new_tokens cut, whose draft tokens were all
judged.
"""

from __future__ import annotations

import heapq
import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from archsearch.engine_facts import engine_facts
from archsearch.engines.child.answers import answer_of, drafting_rounds, round_statistics
from archsearch.engines.engine import (
    EnginePrompt,
    EngineSettings,
    EngineStep,
    GenerationResult,
    ModelSource,
    Sampling,
    Tokenizer,
    check_start,
    text_of,
)
from archsearch.engines.openai.client import Lost, OpenAIServer, Stream, refusal
from archsearch.errors import ArchsearchError, RunFailed
from archsearch.files import read_json
from archsearch.schedule import Ranges


@dataclass(frozen=True, slots=True)
class Counters:
    """What /metrics has counted since the server started, all its engines together.

    `speculative`: it runs with a draft. `accepted` [gamma]: accepted draft tokens by position;
    `generated`: tokens written; `in_flight`: requests that run or wait.
    """

    speculative: bool
    drafts: int
    drafted: int
    accepted: tuple[int, ...]
    generated: int
    in_flight: int

    def since(self, before: Counters) -> Counters:
        """What was counted between `before` and now; `in_flight` is now's."""
        return replace(
            self,
            drafts=self.drafts - before.drafts,
            drafted=self.drafted - before.drafted,
            accepted=tuple(a - b for a, b in zip(self.accepted, before.accepted, strict=True)),
            generated=self.generated - before.generated,
        )


def parse_metrics(text: str) -> Counters | None:
    """Counters out of Prometheus text; None where it has none of vLLM's (a server started with
    --disable-log-stats)."""
    sums: defaultdict[str, float] = defaultdict(float)
    accepted: defaultdict[int, float] = defaultdict(float)
    for name, labels, value in re.findall(r"^vllm:(\w+)(?:\{(.*)\})? (\S+)$", text, re.MULTILINE):
        position = re.search(r'position="(\d+)"', labels)
        if name == "spec_decode_num_accepted_tokens_per_pos_total" and position:
            accepted[int(position[1])] += float(value)
        else:
            sums[name] += float(value)
    if "generation_tokens_total" not in sums:
        return None
    return Counters(
        speculative="spec_decode_num_drafts_total" in sums,
        drafts=round(sums["spec_decode_num_drafts_total"]),
        drafted=round(sums["spec_decode_num_draft_tokens_total"]),
        accepted=tuple(round(accepted[position]) for position in sorted(accepted)),
        generated=round(sums["generation_tokens_total"]),
        in_flight=round(sums["num_requests_running"] + sums["num_requests_waiting"]),
    )


def deal(lengths: Sequence[int], weights: Sequence[int]) -> list[list[int]]:
    """Round lengths [n] dealt to results in proportion to `weights`: each gets its share of every
    length, within one round.

    All of them are dealt, so sums over the results are the sums of `lengths`.
    """
    hands: list[list[int]] = [[] for _ in weights]
    heap = [(0.5 / max(weight, 1e-9), index) for index, weight in enumerate(weights)]
    heapq.heapify(heap)
    for length in sorted(lengths, reverse=True):
        due, index = heap[0]
        hands[index].append(length)
        heapq.heapreplace(heap, (due + 1.0 / max(weights[index], 1e-9), index))
    return hands


# the metrics follow the last token by a few milliseconds; a busy server takes longer
SETTLE_S: Final = 5.0


class VllmServerEngine:
    """vLLM servers that run already (see `Reached`). Without a tokenizer the text is the server's.

    dtype, mode, threads, tensor_parallel and max_len of `settings` are the server's own business.
    Answers are timed here, with the network in between. `finished` has the results of the last
    `generate` so far, also when it failed.
    """

    name = "vllm"
    # A running server takes no orders; `schedule` says with which it was started.
    facts = replace(engine_facts(name), synthesises=False, schedules=False)
    version = "a server that is not asked yet"
    _server: OpenAIServer | None = None
    _gamma = _max_len = _calls = 0
    _scheduled = False
    _model = ""
    _vocab_size: int | None = None

    def __init__(self, settings: EngineSettings, tokenizer: Tokenizer = None) -> None:
        self.settings, self.tokenizer = settings, tokenizer
        self.finished: list[GenerationResult] = []

    def start(
        self,
        target: ModelSource,
        draft: ModelSource | None,
        gamma: int,
        *,
        synthetic: Sequence[float] = (),
        schedule: Ranges = (),
    ) -> None:
        """Ask the server what it is. With a draft: it must speculate with `gamma` tokens; alone: it
        must not speculate at all.

        Which model the draft is, and a schedule's ranges, a server does not tell: only the
        schedule's largest gamma is checked. Raises ArchsearchError when no vLLM server answers,
        when it is another one than asked for, or for `synthetic`.
        """
        self.stop()
        check_start(gamma, draft, synthetic, schedule)
        if synthetic:
            raise ArchsearchError(
                "a running server's acceptance cannot be set; leave out --server-url, archsearch"
                " then starts vLLM itself"
            )
        if not isinstance(target, Path | str):
            raise ArchsearchError(
                "a server is given a model folder or a hub id, not a loaded model"
            )
        option = "--server-url" if draft is not None else "--baseline-url"
        url = self.settings.server_url
        if draft is None:
            url = self.settings.baseline_url or url
        if url is None:
            raise ArchsearchError(
                f"no server is named; give its address with {option}, as in {option}"
                " http://127.0.0.1:8000"
            )
        server = OpenAIServer(url, self.settings.timeout_s)
        try:
            self._meet(server)
            counters = self._counters(server)
        except Lost as error:
            raise ArchsearchError(
                f"no vLLM server answers at {server.url} ({error}); start it, or correct {option}"
            ) from error
        served = len(counters.accepted)
        if draft is None and counters.speculative:
            raise ArchsearchError(
                f"the server at {server.url} speculates with {served} draft tokens; a baseline"
                " needs a server of the same target without a draft: name it with --baseline-url"
            )
        if draft is not None and not counters.speculative:
            raise ArchsearchError(
                f"the server at {server.url} runs without a draft (it has no spec_decode metrics);"
                f" start it with --speculative-config and num_speculative_tokens {gamma}"
            )
        if draft is not None and served != gamma:
            raise ArchsearchError(
                f"the server at {server.url} drafts {served} tokens a round, not {gamma}; ask for"
                f" gamma {served}, or start it with num_speculative_tokens {gamma}"
            )
        config = Path(target) / "config.json"
        self._vocab_size = (
            read_json(config, "the target's config").get("vocab_size") if config.is_file() else None
        )
        self._gamma, self._scheduled = (0 if draft is None else gamma), bool(schedule)
        self._server = server

    def _meet(self, server: OpenAIServer) -> None:
        status, body = server.ask("GET", "/version")
        try:
            version = json.loads(body)["version"] if status == 200 else None
        except (ValueError, KeyError, TypeError):
            version = None
        if version is None:
            raise ArchsearchError(
                f"what answers at {server.url} is no vLLM server (GET /version: {status}); correct"
                " the address"
            )
        status, body = server.ask("GET", "/v1/models")
        if status != 200:
            raise refusal(server.url, status, body)
        try:
            # Adapters are listed beside the model they belong to.
            model = next(entry for entry in json.loads(body)["data"] if not entry.get("parent"))
            self._model, self._max_len = str(model["id"]), int(model["max_model_len"])
        except (ValueError, KeyError, TypeError, StopIteration) as error:
            raise ArchsearchError(
                f"the server at {server.url} names no model on /v1/models; is it a vLLM server?"
            ) from error
        self.version = str(version)

    def _counters(self, server: OpenAIServer) -> Counters:
        status, body = server.ask("GET", "/metrics")
        counters = parse_metrics(body) if status == 200 else None
        if counters is None:
            raise ArchsearchError(
                f"the server at {server.url} shows no vLLM metrics on /metrics ({status}); start it"
                " without --disable-log-stats"
            )
        return counters

    def stop(self) -> None:
        """Forget the server; it runs on."""
        self._server = None
        self._gamma = 0

    def steps(self) -> tuple[EngineStep, ...]:
        """A server does not tell its steps."""
        return ()

    def token_logits(self, token_ids: Sequence[int], candidates: Sequence[int]) -> list[float]:
        """Log-probabilities: the logits less one constant, so that differences are the logits'. One
        short request for each."""
        server = self._started()
        logits = []
        for candidate in candidates:
            # The token is forced; its log-probability is taken before that (vLLM's logprobs_mode
            # raw_logprobs, the default).
            data = {
                "model": self._model,
                "prompt": list(token_ids),
                "max_tokens": 1,
                "temperature": 0.0,
                "logprobs": 1,
            }
            data |= {"allowed_token_ids": [candidate], "return_tokens_as_token_ids": True}
            try:
                status, body = server.ask("POST", "/v1/completions", data, self.settings.timeout_s)
            except Lost as error:
                raise RunFailed(f"the server at {server.url} does not answer ({error})") from error
            if status != 200:
                raise refusal(server.url, status, body)
            logprobs = json.loads(body)["choices"][0]["logprobs"]
            if logprobs["tokens"] != [f"token_id:{candidate}"]:
                raise RunFailed(
                    f"the server at {server.url} answered {logprobs['tokens']} when only token"
                    f" {candidate} was allowed"
                )
            logits.append(float(logprobs["token_logprobs"][0]))
        return logits

    def generate(
        self, prompts: Sequence[EnginePrompt], sampling: Sampling
    ) -> list[GenerationResult]:
        """Up to `settings.concurrency` requests in flight; at 1 each prompt has its own counts from
        the server.

        Raises ArchsearchError for what the server refuses, and when it serves others meanwhile (the
        counts would be theirs too); RunFailed when it dies or is too slow: the message says how
        many prompts were done.
        """
        server = self._started()
        self.finished = []
        self._check(prompts, sampling)
        self._calls += 1
        groups = [list(prompts)] if self.settings.concurrency > 1 else [[one] for one in prompts]
        results: list[GenerationResult] = []
        server.listen_again()
        try:
            for group in groups:
                before = self._counters(server)
                if before.in_flight:
                    raise ArchsearchError(
                        f"the server at {server.url} is busy with {before.in_flight} other"
                        " requests; measure on one that is idle"
                    )
                streams = self._run(server, group, sampling)
                counted = self._settled(
                    server, before, sum(len(chunk) for stream in streams for chunk in stream.chunks)
                )
                results += self._results(server, group, streams, counted, sampling)
                self.finished = list(results)
        except (Lost, RunFailed) as error:
            lost = f"the server at {server.url} was lost: " if isinstance(error, Lost) else ""
            done = f"{len(self.finished)} of {len(prompts)} prompts were done"
            raise RunFailed(f"{lost}{error}; {done}") from error
        return results

    def _started(self) -> OpenAIServer:
        if self._server is None:
            raise RuntimeError("start the engine first")
        return self._server

    def _check(self, prompts: Sequence[EnginePrompt], sampling: Sampling) -> None:
        for prompt in prompts:
            if len(prompt.token_ids) + sampling.max_new_tokens > self._max_len:
                raise ArchsearchError(
                    f"prompt {prompt.prompt_id!r} has {len(prompt.token_ids)} tokens, with"
                    f" {sampling.max_new_tokens} new ones that is more than the server's"
                    f" max_model_len {self._max_len}; shorten it, or start the server with more"
                )
            if self._vocab_size is not None and max(prompt.token_ids) >= self._vocab_size:
                raise ArchsearchError(
                    f"prompt {prompt.prompt_id!r} has token {max(prompt.token_ids)}, the target's"
                    f" vocabulary ends at {self._vocab_size - 1}; use the target's own tokenizer"
                )
        if self._gamma and sampling.temperature > 0 and self.settings.device == "cpu":
            raise ArchsearchError(
                f"vLLM's CPU build (here {self.version}) divides the target's logits by"
                " uninitialised memory when it samples with a draft; use --temperature 0, or a"
                " server on a GPU"
            )

    def _run(
        self, server: OpenAIServer, prompts: Sequence[EnginePrompt], sampling: Sampling
    ) -> list[Stream]:
        """One stream for each prompt, in their order. The first failure ends the others."""
        streams: dict[int, Stream] = {}
        with ThreadPoolExecutor(
            max_workers=max(1, min(self.settings.concurrency, len(prompts)))
        ) as pool:
            futures = {
                pool.submit(server.tokens, self._request(prompt, sampling)): index
                for index, prompt in enumerate(prompts)
            }
            try:
                for future in as_completed(futures):
                    index = futures[future]
                    streams[index] = future.result()
                    self.finished.append(self._result(prompts[index], streams[index], sampling))
            except BaseException:
                for future in futures:
                    future.cancel()
                server.hang_up()
                raise
        return [streams[index] for index in range(len(prompts))]

    def _request(self, prompt: EnginePrompt, sampling: Sampling) -> dict[str, object]:
        return {
            "model": self._model,
            "prompt": list(prompt.token_ids),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
            "ignore_eos": sampling.ignore_end,
            # What the target's generation_config would fill in otherwise. (min_p is refused with a
            # draft.)
            "top_p": 1.0,
            "top_k": 0,
            "repetition_penalty": 1.0,
            "stream": True,
            "return_token_ids": True,
            # A prompt that comes again must not find its prefill in the prefix cache.
            "cache_salt": f"archsearch-{os.getpid()}-{id(self)}-{self._calls}-{prompt.prompt_id}",
        }

    def _result(self, prompt: EnginePrompt, stream: Stream, sampling: Sampling) -> GenerationResult:
        """One answer, with the counts of its own chunks where they can be rounds."""
        token_ids = tuple(token for chunk in stream.chunks for token in chunk)
        if not token_ids:
            raise RunFailed(f"the server answered prompt {prompt.prompt_id!r} with no token")
        if self._vocab_size is not None and max(token_ids) >= self._vocab_size:
            raise ArchsearchError(
                f"the server answered with token {max(token_ids)}, the target's vocabulary ends at"
                f" {self._vocab_size - 1}; it serves another model ({self._model})"
            )
        lengths = [len(chunk) for chunk in stream.chunks]
        text = stream.text if self.tokenizer is None else text_of(self.tokenizer, token_ids)
        whole: list[tuple[int, int]] = []
        gamma = self._gamma if self._gamma and self._chunks_may_be_rounds(lengths) else 0
        if gamma:
            # the first chunk is the prompt's own token, no round
            room, ended = sampling.max_new_tokens - lengths[0], stream.finish == "stop"
            whole = drafting_rounds(lengths[1:], [gamma] * len(lengths), room, ended)
        seconds, handed = stream.times[-1] - stream.started, (stream.times, lengths)
        fields = answer_of(prompt.prompt_id, token_ids, seconds, handed, whole, gamma)
        return GenerationResult(text=text, **fields)

    def _chunks_may_be_rounds(self, lengths: Sequence[int]) -> bool:
        return lengths[0] == 1 and max(lengths) <= self._gamma + 1

    def _settled(self, server: OpenAIServer, before: Counters, written: int) -> Counters:
        deadline = time.monotonic() + SETTLE_S
        while True:
            counted = self._counters(server).since(before)
            if counted.generated > written:
                raise ArchsearchError(
                    f"the server at {server.url} wrote {counted.generated - written} tokens for"
                    " others meanwhile; measure on one that is idle"
                )
            if counted.generated == written and not counted.in_flight:
                return counted
            if time.monotonic() > deadline:
                raise RunFailed(
                    f"the metrics of {server.url} count {counted.generated} of the {written} tokens"
                    " it wrote; they are of no use"
                )
            time.sleep(0.02)

    def _results(
        self,
        server: OpenAIServer,
        prompts: Sequence[EnginePrompt],
        streams: Sequence[Stream],
        counted: Counters,
        sampling: Sampling,
    ) -> list[GenerationResult]:
        results = [
            self._result(prompt, stream, sampling)
            for prompt, stream in zip(prompts, streams, strict=True)
        ]
        if not self._gamma:
            if counted.drafts:
                raise ArchsearchError(
                    f"the server at {server.url} drafted tokens; a baseline needs a server without"
                    " a draft"
                )
            return results
        chunks = [[len(chunk) for chunk in stream.chunks] for stream in streams]
        mean = counted.drafted / counted.drafts if counted.drafts else float(self._gamma)
        # A draft is shorter where max_model_len or a full batch cuts it; that is rare.
        if not self._scheduled and not self._gamma - 0.5 < mean <= self._gamma:
            raise ArchsearchError(
                f"the server at {server.url} drafted {mean:.2f} tokens a round, not {self._gamma};"
                " it changes gamma by batch size"
            )
        if counted.drafts == sum(len(lengths) - 1 for lengths in chunks) and all(
            map(self._chunks_may_be_rounds, chunks)
        ):
            if not self._scheduled:
                return results
            return [replace(result, drafted=round(mean * result.rounds)) for result in results]
        lengths = [1] * (counted.drafts - counted.accepted[0])
        for position, accepted in enumerate(counted.accepted):
            after = counted.accepted[position + 1] if position + 1 < self._gamma else 0
            lengths += [position + 2] * (accepted - after)
        dealt = deal(lengths, [result.decode_tokens for result in results])
        return [
            replace(
                result,
                rounds=len(share),
                drafted=round(mean * len(share)),
                accepted_by_position=round_statistics(share, self._gamma),
                round_lengths=(),
            )
            for result, share in zip(results, dealt, strict=True)
        ]
