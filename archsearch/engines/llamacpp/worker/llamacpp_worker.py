"""Runs llama.cpp's server for archsearch.

The server comes from the package `xllamacpp` (in this very process), or is a llama-server of the
user's own; both are spoken to over HTTP. Needs nothing but Python beside the server."""

from __future__ import annotations

import http.client
import importlib.metadata
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# where `loop` is; siblings beside the script
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "child"))

from loop import Failed, Message, UserError, claim_stdout, serve
from passes import PassClock
from stream import Told, steps_of, streamed

PACKAGE = "xllamacpp"
SHORTEST_CONTEXT = 256
"""Tokens that a server holds at the least: the probe of the machine's pace asks for more than a
short answer."""
START_S = 600.0
"""Longest time that a server takes to load its models."""
PARAMETERS = {
    "--model": "model.path",
    "-np": "n_parallel",
    "--cache-ram": "cache_ram_mib",
    "-c": "n_ctx",
    "-ctk": "cache_type_k",
    "-ctv": "cache_type_v",
    "-fa": "flash_attn_type",
    "-t": "cpuparams.n_threads",
    "-tb": "cpuparams_batch.n_threads",
    "-ctkd": "speculative.draft.cache_type_k",
    "-ctvd": "speculative.draft.cache_type_v",
    "-td": "speculative.draft.cpuparams.n_threads",
    "-tbd": "speculative.draft.cpuparams_batch.n_threads",
    "--spec-type": "speculative.types",
    "--spec-synth-rates": "speculative.synth_rates",
    "--spec-draft-model": "speculative.draft.mparams.path",
    "--spec-draft-n-max": "speculative.draft.n_max",
    "--spec-draft-n-min": "speculative.draft.n_min",
    "--spec-draft-p-min": "speculative.draft.p_min",
    "--spec-ngram-simple-size-n": "speculative.ngram_simple.size_n",
    "--spec-ngram-simple-size-m": "speculative.ngram_simple.size_m",
    "--spec-ngram-simple-min-hits": "speculative.ngram_simple.min_hits",
}
"""What the package calls each flag."""
GREEDY: dict[str, Any] = {"temperature": 0, "top_k": 1, "samplers": ["top_k"]}
MANY = 512
"""Most likely tokens that are asked for with their probability."""


class Worker:
    """One started server and its answers."""

    server: Any = None
    process: subprocess.Popen[bytes] | None = None
    address: tuple[str, int] | None = None
    lookup: list[int] | None = None
    clock: PassClock | None = None
    gamma, slots, ragged = 0, 1, False

    def __init__(self) -> None:
        self.own = os.environ.get("ARCHSEARCH_LLAMA_SERVER", "")  # a llama-server of the user's own

    def versions(self, request: Message) -> Message:
        if self.own:
            ran = subprocess.run(
                [self.own, "--version"], capture_output=True, text=True, timeout=60, check=False
            )
            found = re.search(r"version: *(\S+)", ran.stdout + ran.stderr)
            if found is None:
                raise UserError(f"{self.own} --version names no version; is it a llama-server?")
            return {"version": found[1]}
        try:
            return {"version": importlib.metadata.version(PACKAGE)}
        except importlib.metadata.PackageNotFoundError:
            raise UserError(
                f"{sys.executable} has no {PACKAGE}; run: archsearch engine install llama.cpp"
            ) from None

    def start(self, request: Message) -> Message:
        known = self.versions(request)
        self.lookup = request["lookup"]
        self.ragged, self.slots = bool(self.lookup or request.get("rule")), request["concurrency"]
        drafts = self.lookup or request["draft"] is not None
        self.gamma = request["gamma"] if drafts else 0
        if self.own:
            self.start_own(request)
        else:
            self.start_packaged(request)
        if request.get("time_passes"):
            self.time_passes(request)
        return known

    def time_passes(self, request: Message) -> None:
        """Have the passes of this server's rounds timed."""
        import xllamacpp as llama

        shared = next(Path(llama.__file__).parent.glob("xllamacpp*.so"), None)
        if shared is None:
            raise UserError(
                "passes of llama.cpp are timed on Linux only: its package has no shared object here"
            )
        self.clock = PassClock()
        self.clock.ask(
            "load",
            library=str(shared),
            target=request["target"],
            draft=request["draft"],
            room=self.context(request),
            threads=request.get("threads") or os.cpu_count() or 1,
        )

    def context(self, request: Message) -> int:
        """Tokens in a slot's KV cache: the longest prompt with its answer, and what a last round
        drafts beyond it."""
        return max(request["max_len"] + self.gamma + 1, SHORTEST_CONTEXT)

    def settings(self, request: Message) -> dict[str, Any]:
        """How the server is started, as flags of llama-server."""
        exact, threads = request["dtype"] == "float32", request.get("threads")
        rule, draft = request.get("rule") or {}, request["draft"]
        given: dict[str, Any] = {"--model": request["target"], "--cache-ram": 0}
        given |= {"-np": self.slots, "-c": self.slots * self.context(request)}
        given |= {"-ctk": "f32", "-ctv": "f32", "-fa": "off"} if exact else {}  # -fa rounds to 16
        given |= {"-t": threads, "-tb": threads} if threads else {}
        kinds = ["ngram-simple"] * bool(self.lookup)  # a chain asks its lookup first
        if self.lookup:
            given["--spec-ngram-simple-size-n"] = self.lookup[1]
            given["--spec-ngram-simple-size-m"] = rule.get("found", self.gamma)
            given["--spec-ngram-simple-min-hits"] = 1
        if draft:
            kinds.append("draft-eagle3" if request["family"] == "eagle3" else "draft-simple")
            given["--spec-draft-model"] = draft
            given["--spec-draft-n-max"] = rule.get("gamma", self.gamma)
            given |= {"--spec-draft-n-min": 0, "--spec-draft-p-min": rule.get("least", 0.0)}
            given |= {"-ctkd": "f32", "-ctvd": "f32"} if exact else {}
            given |= {"-td": threads, "-tbd": threads} if threads else {}
        if kinds:
            given["--spec-type"] = ",".join(kinds)
        if request["synthetic"]:
            given["--spec-synth-rates"] = ",".join(str(rate) for rate in request["synthetic"])
        return given

    def start_packaged(self, request: Message) -> None:
        """The package's server, on a free port of this machine."""
        import xllamacpp as llama

        params = llama.CommonParams()
        params.port, params.endpoint_metrics = 0, True
        kinds = llama.common_speculative_type
        named = {
            "f32": llama.ggml_type.GGML_TYPE_F32,
            "off": llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED,
        }
        for flag, value in self.settings(request).items():
            if flag == "--spec-type":
                names = (name.replace("-", "_").upper() for name in value.split(","))
                value = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{name}") for name in names]
            elif flag == "--spec-synth-rates":
                value = request["synthetic"]
            *path, last = PARAMETERS[flag].split(".")
            part = params
            for name in path:
                part = getattr(part, name)
            setattr(part, last, named.get(value, value) if isinstance(value, str) else value)
        try:
            self.server = llama.Server(params)
        except RuntimeError as error:
            last = str(error).strip().rpartition("\n")[2]
            raise Failed(f"the server does not load the models: {last[:300]}") from error
        host, port = self.server.listening_address.split("//")[-1].rsplit(":", 1)
        self.address = (host, int(port))

    def start_own(self, request: Message) -> None:
        """A llama-server of the user's own."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        given = self.settings(request) | {"--host": "127.0.0.1", "--port": port}
        flags = [str(part) for pair in given.items() for part in pair]
        command = [self.own, "--metrics", *flags]
        log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
        self.address = ("127.0.0.1", port)
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                log.seek(0)
                said = log.read().decode("utf-8", "replace").strip().splitlines() or [""]
                raise UserError(
                    f"{self.own} ended with status {self.process.returncode} while loading:"
                    f" {said[-1][:300]}"
                )
            try:
                if self.ask("GET", "/health").status == 200:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise Failed(f"{self.own} was not ready after {START_S:.0f} s")

    def ask(self, method: str, path: str, body: object = None) -> http.client.HTTPResponse:
        if self.address is None:
            raise Failed("start the engine first")
        connection = http.client.HTTPConnection(*self.address, timeout=START_S)
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, {"Content-Type": "application/json"})
        return connection.getresponse()

    def complete(self, prompt: list[int], **settings: object) -> http.client.HTTPResponse:
        """POST /completion; raises Failed, with the server's own words, where it refuses."""
        body = {"prompt": prompt, "cache_prompt": False, "return_tokens": True, **settings}
        try:
            response = self.ask("POST", "/completion", body)
        except OSError as error:
            raise Failed(f"the server is gone: {error}") from error
        if response.status != 200:
            words = response.read().decode("utf-8", "replace")
            found = re.search(r'"message": *"([^"]+)"', words)
            raise Failed(
                f"the server answered {response.status}: {found[1] if found else words[:200]}"
            )
        return response

    def generate(self, request: Message) -> Message:
        """As many prompts at a time as the server has slots."""
        prompts, clock = request["prompts"], self.clock
        with ThreadPoolExecutor(self.slots) as slots:
            told = list(slots.map(lambda number: self.answer(number, request), range(len(prompts))))
        steps = steps_of(told) if clock is None else []
        if clock is not None:  # one after the other
            for prompt, one in zip(prompts, told, strict=True):
                steps += clock.added(steps_of([one]), prompt["token_ids"])
        return {"results": [one.answer for one in told], "steps": steps}

    def answer(self, number: int, request: Message) -> Told:
        """What the server writes for the `number`th prompt of a request."""
        prompt, limit = request["prompts"][number], request["max_new_tokens"]
        sampling = GREEDY
        if (temperature := request["temperature"]) > 0:
            sampling = {"temperature": temperature, "top_k": 0, "samplers": ["temperature"]}
        started = time.perf_counter()
        response = self.complete(
            prompt["token_ids"],
            **sampling,
            top_p=1.0,
            min_p=0.0,
            seed=(request["seed"] * 1_000_003 + number) % 2**31,
            n_predict=limit,
            ignore_eos=request["ignore_end"],
            stream=True,
            timings_per_token=True,
        )
        events = []
        try:
            for line in response:
                if line.startswith(b"data: "):
                    events.append(json.loads(line[6:]))
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise Failed(
                f"the server broke off in the answer to prompt {prompt['id']!r}: {error}"
            ) from error
        clock = (started, time.perf_counter() - started)
        return streamed(prompt, events, clock, self.gamma, limit, self.ragged)

    def logits(self, request: Message) -> Message:
        """Log-probabilities, which differ from logits by one number for all tokens; those outside
        the most likely ones have the last one's."""
        response = self.complete(request["token_ids"], **GREEDY, n_predict=1, n_probs=MANY)
        answer = json.loads(response.read())
        top = {
            row["id"]: row["logprob"]
            for row in answer["completion_probabilities"][0]["top_logprobs"]
        }
        least = min(top.values())
        return {"logits": [top.get(token, least) for token in request["candidates"]]}


if __name__ == "__main__":
    serve(Worker(), claim_stdout())
