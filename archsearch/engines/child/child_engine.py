"""What engines in a process of their own have in common: a worker in another interpreter, because
engines pin their own torch.

One JSON object a line goes in on the child's stdin, one comes back on its original stdout. The
worker's script imports nothing of archsearch. An answer is {"ok": {...}} or {"error": one line,
"kind": "user" | "memory" | "failed" | "bug", "trace": text}.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, ClassVar, Final

from archsearch.acceptance.lookup import Ngram
from archsearch.engine_facts import engine_facts
from archsearch.engines.engine import (
    Chained,
    EnginePrompt,
    EngineSettings,
    EngineStep,
    GenerationResult,
    ModelSource,
    Sampling,
    Tokenizer,
    check_family,
    same_vocabulary,
    text_of,
)
from archsearch.errors import ArchsearchError, MissingDataError, RunFailed
from archsearch.files import read_json
from archsearch.schedule import Ranges

_STOP_S: Final = 10.0
_KEPT_LINES: Final = 60
_LOOK_S: Final = 0.25  # how often to look whether the child is still there


class Child:
    """A worker process. `ask` sends one request and waits for its answer; `close` ends the process
    and all it started.

    Raises MissingDataError where the interpreter does not exist. A child that dies, hangs longer
    than `timeout_s` or answers with an error is closed (an error of kind `user` leaves it running)
    and ends in one line: ArchsearchError for what the user can mend, RunFailed for the rest.
    """

    def __init__(
        self,
        python: Path,
        script: Path,
        *,
        name: str,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.name, self.timeout_s = name, timeout_s
        self.log: deque[str] = deque(maxlen=_KEPT_LINES)  # the last lines of its stderr
        self._answers: queue.Queue[str | None] = queue.Queue()
        environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "ARCHSEARCH_PARENT": str(os.getpid()),
            # Weights in huge pages (where the kernel gives them on request): without, where small
            # pages happen to lie makes the same engine on a CPU up to 20 % slower from one start to
            # the next.
            "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),
            **(env or {}),
        }
        # Ours must not shadow the packages of the engine's environment.
        environment.pop("PYTHONPATH", None)
        try:
            self._process = subprocess.Popen(
                [str(python), str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                errors="replace",
                env=environment,
                # a process group of its own: workers that the engine starts die with it
                start_new_session=True,
            )
        except OSError as error:
            raise MissingDataError(
                f"cannot run {python}: {error.strerror or error}; name {name}'s interpreter with"
                f" --engine-python, or run: archsearch engine install {name}"
            ) from error
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._stdin = self._process.stdin
        self._readers = []
        for target, stream in (
            (self._read_answers, self._process.stdout),
            (self._read_log, self._process.stderr),
        ):
            self._readers.append(threading.Thread(target=target, args=(stream,), daemon=True))
            self._readers[-1].start()
        atexit.register(self.close)

    def _read_answers(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._answers.put(line)
        self._answers.put(None)

    def _read_log(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                if line.strip():
                    self.log.append(line.rstrip())

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: Mapping[str, object]) -> dict[str, Any]:
        """Send `request`, return what is under "ok" in the answer. Raises as the class says."""
        try:
            self._stdin.write(json.dumps(dict(request)) + "\n")
            self._stdin.flush()
            line = self._wait(self.timeout_s)
        except (BrokenPipeError, ValueError, OSError):
            line = None
        except queue.Empty:
            self.close(0.0)  # it hangs: nothing is gained by waiting for it
            raise RunFailed(
                f"{self.name} did not answer {request.get('do', '')!r} within"
                f" {self.timeout_s:.0f} s and was stopped; allow more time with --timeout, or ask"
                " for less"
            ) from None
        except BaseException:  # Ctrl-C: no process may stay behind
            self.close(0.0)
            raise
        if line is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
            self.close()
            code = self._process.returncode
            how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
            memory = " (out of memory?)" if code == -signal.SIGKILL else ""
            raise RunFailed(
                f"{self.name} {how}{memory} during {request.get('do', '')!r}{self._last_words()}"
            )
        try:
            answer = json.loads(line)
        except json.JSONDecodeError:
            self.close()
            raise RunFailed(
                f"{self.name} answered with something that is no JSON: {line.strip()[:200]!r}"
            ) from None
        if "ok" in answer:
            return dict(answer["ok"])
        kind, error = answer.get("kind", "bug"), str(answer.get("error", "unknown error"))
        if kind == "user":
            raise ArchsearchError(error)
        self.close()
        if kind == "memory":
            raise RunFailed(
                f"{self.name} is out of memory: {error}; lower --concurrency or --max-len, or use a"
                " smaller dtype"
            )
        trace = f"\n{answer['trace'].rstrip()}" if kind == "bug" and answer.get("trace") else ""
        raise RunFailed(f"{self.name} failed: {error}{trace}")

    def _wait(self, limit_s: float) -> str | None:
        """The next line of the child; None when it ended without one, also where a process that it
        started lives on and keeps its stdout open. Raises queue.Empty after `limit_s`."""
        deadline = time.monotonic() + limit_s
        while True:
            ended = not self.running
            left = deadline - time.monotonic()
            try:
                return self._answers.get(timeout=max(0.0, min(_LOOK_S, left)))
            except queue.Empty:
                if ended:  # before the wait: what it wrote last had time to come through
                    return None
                if left <= _LOOK_S:
                    raise

    def _last_words(self) -> str:
        telling = [line for line in self.log if "Error" in line or "error" in line]
        chosen = telling or self.log
        return f": {chosen[-1].strip()[:300]}" if chosen else ""

    def close(self, grace_s: float = _STOP_S) -> None:
        """End the child and its process group: closing stdin first, after `grace_s` SIGTERM, then
        SIGKILL. Safe to call twice."""
        atexit.unregister(self.close)
        with contextlib.suppress(OSError, ValueError):
            self._stdin.close()
        for number, wait_s in (
            (0, grace_s if self.running else 0.0),
            (signal.SIGTERM, _STOP_S),
            (signal.SIGKILL, _STOP_S),
        ):
            if number:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, number)
            try:
                self._process.wait(wait_s)
            except subprocess.TimeoutExpired:
                continue
            if number or not _group_alive(self._process.pid):
                break
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for reader in self._readers:
            reader.join(_STOP_S)


def _group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


class ChildEngine:
    """An engine whose `worker` runs in an interpreter of its own: `start` loads it, `stop` ends the
    process, which frees all.

    A subclass names itself (as in --engine), its worker and the settings that this is `told`, and
    fills in the hooks; what it can is in its EngineFacts.
    """

    name: ClassVar[str]
    worker: ClassVar[Path]
    environment: ClassVar[Mapping[str, str]] = {}
    told: ClassVar[tuple[str, ...]] = ()
    gamma = 0
    _child: Child | None = None
    _steps: tuple[EngineStep, ...] = ()
    _version: str | None = None

    def __init__(self, settings: EngineSettings, tokenizer: Tokenizer = None) -> None:
        self.settings, self.tokenizer = settings, tokenizer
        self.facts = engine_facts(self.name)
        self.title = self.facts.title

    # -- hooks

    def check(self, draft: ModelSource | None, gamma: int, schedule: Ranges) -> None:
        """Raise ArchsearchError for what this engine cannot be started with."""

    def check_prompts(self, prompts: Sequence[EnginePrompt], sampling: Sampling) -> None:
        """Raise ArchsearchError for what this engine, as it was started, cannot generate."""

    def request(self) -> dict[str, object]:
        """What this worker reads besides when it starts."""
        return {name: getattr(self.settings, name) for name in self.told}

    def prepared(self, sources: Sequence[str]) -> list[str]:
        """The models in the form that the worker loads, target first."""
        return list(sources)

    def known_cause(self, error: RunFailed) -> str:
        """What is known of an engine that does not come up with `error`, "" for nothing."""
        return ""

    def answered(self, answer: Mapping[str, object]) -> None:
        """Keep what else the worker answered to `generate`."""

    # -- the protocol

    @property
    def version(self) -> str:
        """Of the engine that would run. Raises ArchsearchError where there is none, or an old
        one."""
        if self._version is None:
            child = self._new_child([])
            try:
                self._version = str(child.ask({"do": "versions"})["version"])
            finally:
                child.close()
        return self._version

    def start(
        self,
        target: ModelSource,
        draft: ModelSource | None,
        gamma: int,
        *,
        synthetic: Sequence[float] = (),
        schedule: Ranges = (),
    ) -> None:
        """Raises ArchsearchError for a module in place of a folder, vocabularies that differ, and
        what the engine has not; RunFailed when it does not come up.
        """
        family = check_family(self.facts, draft, gamma, synthetic, schedule)
        self.check(draft, gamma, schedule)
        chain = draft if isinstance(draft, Chained) else None
        lookup = draft if chain is None else chain.lookup
        model = draft if chain is None else chain.draft
        models = [
            each for each in (target, model) if each is not None and not isinstance(each, Ngram)
        ]
        sources = [self._source(each) for each in models]
        check_vocabularies(sources)
        self.stop()
        sources = self.prepared(sources)
        child = self._new_child(sources)
        try:
            answer = child.ask(
                {
                    "do": "start",
                    "target": sources[0],
                    "draft": sources[1] if len(sources) > 1 else None,
                    "family": family,
                    "lookup": (
                        [lookup.shortest, lookup.longest] if isinstance(lookup, Ngram) else None
                    ),
                    "rule": None if chain is None else asdict(chain.rule),
                    "gamma": gamma,
                    "synthetic": list(synthetic),
                    "schedule": schedule,
                    "dtype": self.settings.dtype,
                    "concurrency": self.settings.concurrency,
                    "max_len": self.settings.max_len,
                    "dummy_weights": self.settings.dummy_weights,
                    **self.request(),
                }
            )
        except RunFailed as error:  # which has closed it
            if words := self.known_cause(error):
                raise RunFailed(f"{error}; {words}") from error
            raise
        except BaseException:
            child.close()
            raise
        self._child, self._version = child, str(answer["version"])
        self.gamma = gamma if draft is not None else 0

    def generate(
        self, prompts: Sequence[EnginePrompt], sampling: Sampling
    ) -> list[GenerationResult]:
        """All prompts together, `concurrency` at a time. Sampling is seeded by seed and prompt."""
        self._steps = ()
        if not prompts:
            return []
        child = self._started()
        self.check_prompts(prompts, sampling)
        answer = child.ask(
            {
                "do": "generate",
                "prompts": [
                    {"id": prompt.prompt_id, "token_ids": list(prompt.token_ids)}
                    for prompt in prompts
                ],
                **asdict(sampling),
            }
        )
        self._steps = tuple(EngineStep(**_tuples(fields)) for fields in answer["steps"])
        self.answered(answer)
        return [
            GenerationResult(text=text_of(self.tokenizer, fields["token_ids"]), **_tuples(fields))
            for fields in answer["results"]
        ]

    def token_logits(self, token_ids: Sequence[int], candidates: Sequence[int]) -> list[float]:
        answer = self._started().ask(
            {"do": "logits", "token_ids": list(token_ids), "candidates": list(candidates)}
        )
        return [float(value) for value in answer["logits"]]

    def steps(self) -> tuple[EngineStep, ...]:
        """The steps of the last `generate`. A step with newly admitted prompts beside running
        requests says `prefill`."""
        return self._steps

    def stop(self) -> None:
        if self._child is not None:
            self._child.close()
        self._child, self._steps, self.gamma = None, (), 0

    # -- inside

    def child_environment(self, sources: Sequence[str]) -> dict[str, str]:
        """Variables that must be there before the worker's interpreter starts.

        The hub is off limits when all models are folders, so a start does not wait for a network
        that is not there.
        """
        env = {**self.environment, **self.settings.environment}
        if self.settings.threads is not None:
            env["OMP_NUM_THREADS"] = str(self.settings.threads)
        if all(Path(source).is_dir() for source in sources):
            env["HF_HUB_OFFLINE"] = "1"
        return env

    def _new_child(self, sources: Sequence[str]) -> Child:
        env = self.child_environment(sources)
        return Child(
            self._interpreter(),
            self.worker,
            name=self.name,
            env=env,
            timeout_s=self.settings.timeout_s,
        )

    def _interpreter(self) -> Path:
        if self.settings.python is not None:
            return self.settings.python
        from archsearch.engines.environments.environment import find_python

        return find_python(self.name)

    def _started(self) -> Child:
        if self._child is None:
            raise RuntimeError("start the engine first")
        return self._child

    def _source(self, model: ModelSource) -> str:
        """A folder's absolute path or a hub id. Raises ArchsearchError for a module, or a folder
        that is not there."""
        if isinstance(model, str):
            return model
        if not isinstance(model, Path):
            raise ArchsearchError(
                f"{self.title} runs in a process of its own and needs a model folder, not a"
                f" {type(model).__name__}; save it first"
            )
        if not (model / "config.json").is_file():
            raise ArchsearchError(f"no config.json in {model}; {self.title} needs a model folder")
        return str(model.resolve())


def check_vocabularies(sources: Sequence[str]) -> None:
    """Raise ArchsearchError where target and draft are folders whose vocabularies differ (a hub id:
    the engine checks)."""
    if len(sources) < 2 or not all(Path(source).is_dir() for source in sources):
        return
    configs = [read_json(Path(source) / "config.json", "the model's config") for source in sources]
    # Of targets that see more than text; of the speculators form.
    nested = ("text_config", "transformer_layer_config")
    target, draft = (
        config.get("vocab_size")
        or next((config[name].get("vocab_size") for name in nested if name in config), None)
        for config in configs
    )
    same_vocabulary(draft, target)


def _tuples(fields: Mapping[str, object]) -> dict[str, Any]:
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
