"""OpenVINO GenAI: fast and exact on CPUs, in its own environment and process."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from archsearch.engines.child import Child
from archsearch.engines.engine import (
    EnginePrompt,
    EngineSettings,
    EngineStep,
    GenerationResult,
    ModelSource,
    Sampling,
    Schedule,
    check_start,
)
from archsearch.errors import ArchsearchError
from archsearch.files import read_json
from archsearch.paths import cache_dir

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

WORKER: Final = Path(__file__).parent / "workers" / "openvino_worker.py"


class OpenVinoEngine:
    """OpenVINO GenAI in a child process. Folders are converted once and kept in the cache, by content.

    Greedy answers are the target's. With a temperature above 0 and a draft OpenVINO GenAI does not sample from the target
    (it accepts by the probabilities of two different tokens), so that is refused. One request at a time tells the seconds of
    every pass of target and draft; several at once those of the target. With a draft, `first_s` ends with the first round,
    because the draft reads the prompt in it. `precision` says what was computed in, after `start`.
    """

    name = "openvino"
    concurrent = True
    synthesises = False
    schedules = False

    def __init__(self, settings: EngineSettings, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """`tokenizer` turns tokens into the results' text (without one the text is empty)."""
        self.settings = settings
        self.tokenizer = tokenizer
        self.gamma = 0
        self.precision: dict[str, Any] = {}
        self._child: Child | None = None
        self._steps: tuple[EngineStep, ...] = ()
        self._version: str | None = None

    @property
    def version(self) -> str:
        """Of the OpenVINO GenAI that would run. Raises ArchsearchError where there is none."""
        if self._version is None:
            child = self._new_child({})
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
        schedule: Schedule = (),
    ) -> None:
        """Raises ArchsearchError for a module in place of a folder, vocabularies that differ, and what OpenVINO GenAI has not;
        RunFailed when a folder cannot be converted or loaded.
        """
        check_start(gamma, draft, synthetic, schedule)
        if synthetic:
            raise ArchsearchError("OpenVINO GenAI has no synthetic acceptance; use --engine vllm or transformers")
        if schedule:
            raise ArchsearchError("OpenVINO GenAI takes one gamma for all batch sizes; use --engine vllm for a schedule")
        settings = self.settings
        if settings.device != "cpu" or settings.tensor_parallel != 1 or settings.server_url is not None:
            raise ArchsearchError(
                "archsearch runs OpenVINO GenAI on one CPU in a process of its own, without a server; got device "
                f"{settings.device!r}, tensor_parallel {settings.tensor_parallel}; use --engine vllm"
            )
        sources = [_source(model) for model in (target, draft) if model is not None]
        _check_vocabularies(sources)
        self.stop()
        child = self._new_child(worker_environment(settings, sources))
        try:
            told = child.ask(
                {
                    "do": "start",
                    "target": sources[0],
                    "draft": sources[1] if draft is not None else None,
                    "gamma": gamma,
                    "dtype": settings.dtype,
                    "concurrency": settings.concurrency,
                    "max_len": settings.max_len,
                    "threads": settings.threads,
                    "dummy_weights": settings.dummy_weights,
                    "cache": str((cache_dir() / "openvino").absolute()),
                }
            )
        except BaseException:
            child.close()
            raise
        self._child, self._version = child, str(told["version"])
        self.precision = {name: told[name] for name in ("weights", "inference_precision", "kv_cache_precision")}
        self.gamma = gamma if draft is not None else 0

    def _new_child(self, env: Mapping[str, str]) -> Child:
        python = self.settings.python
        if python is None:
            from archsearch.engines.environments import find_python

            python = find_python("openvino")
        return Child(python, WORKER, name="openvino", env=dict(env), timeout_s=self.settings.timeout_s)

    def _started(self) -> Child:
        if self._child is None:
            raise RuntimeError("start the engine first")
        return self._child

    def generate(self, prompts: Sequence[EnginePrompt], sampling: Sampling) -> list[GenerationResult]:
        """The prompts together, `concurrency` at a time. Sampling is seeded per prompt.

        Raises ArchsearchError for a temperature above 0 with a draft and for prompts that are too long for `max_len`.
        """
        child = self._started()
        self._steps = ()
        if not prompts:
            return []
        if sampling.temperature > 0 and self.gamma:
            raise ArchsearchError(
                f"OpenVINO GenAI does not sample from the target when a draft helps, so temperature {sampling.temperature:g} is "
                "possible without a draft only: use temperature 0, or --engine vllm or transformers"
            )
        for prompt in prompts:
            needed = len(prompt.token_ids) + sampling.max_new_tokens
            if needed > self.settings.max_len:
                raise ArchsearchError(
                    f"prompt {prompt.prompt_id!r} and its answer need {needed} tokens, max_len is {self.settings.max_len}; "
                    "raise it or ask for fewer tokens"
                )
        if len({prompt.prompt_id for prompt in prompts}) < len(prompts):
            raise ArchsearchError("two prompts have the same id; give each its own")
        told = child.ask(
            {
                "do": "generate",
                "prompts": [{"id": prompt.prompt_id, "token_ids": list(prompt.token_ids)} for prompt in prompts],
                "max_new_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                "seed": sampling.seed,
                "ignore_end": sampling.ignore_end,
            }
        )
        self._steps = tuple(EngineStep(**_tuples(fields)) for fields in told["steps"])
        return [self._result(fields) for fields in told["results"]]

    def _result(self, fields: Mapping[str, Any]) -> GenerationResult:
        text = "" if self.tokenizer is None else str(self.tokenizer.decode(list(fields["token_ids"]), skip_special_tokens=True))
        return GenerationResult(**{**_tuples(fields), "text": text})

    def token_logits(self, token_ids: Sequence[int], candidates: Sequence[int]) -> list[float]:
        """The target's logits after `token_ids`, from one pass of the same weights at the same precision."""
        told = self._started().ask({"do": "logits", "token_ids": list(token_ids), "candidates": list(candidates)})
        return [float(value) for value in told["logits"]]

    def steps(self) -> tuple[EngineStep, ...]:
        """The steps of the last `generate`. A draft reads a prompt in the request's second step, so that says `prefill` too."""
        return self._steps

    def stop(self) -> None:
        if self._child is not None:
            self._child.close()
        self._child, self._steps, self.gamma = None, (), 0


def worker_environment(settings: EngineSettings, sources: Sequence[str]) -> dict[str, str]:
    """Environment variables that must be there before the worker's interpreter starts."""
    env = {"OPENVINO_TELEMETRY_OPT_OUT": "1"}
    if settings.threads is not None:
        env["OMP_NUM_THREADS"] = str(settings.threads)
    if all(Path(source).is_dir() for source in sources):
        env["HF_HUB_OFFLINE"] = "1"
    return env


def _source(model: ModelSource) -> str:
    """A folder's absolute path or a hub id. Raises ArchsearchError for a module, or a folder that is not there."""
    if isinstance(model, str):
        return model
    if not isinstance(model, Path):
        raise ArchsearchError(
            f"OpenVINO GenAI runs in its own process and loads model folders, got a {type(model).__name__}; save it first"
        )
    if not (model / "config.json").is_file():
        raise ArchsearchError(f"no config.json in {model}; OpenVINO GenAI needs a model folder")
    return str(model.resolve())


def _check_vocabularies(sources: Sequence[str]) -> None:
    sizes = []
    for source in sources:
        if not Path(source).is_dir():
            return  # a hub id: its config is not here yet
        sizes.append(read_json(Path(source) / "config.json", "the model's config").get("vocab_size"))
    if len(sizes) == 2 and sizes[0] != sizes[1]:
        raise ArchsearchError(f"the draft's vocabulary has {sizes[1]} tokens, the target's {sizes[0]}; they must be the same")


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
