"""vLLM, the engine people serve with: in its own environment and process, many requests at once (continuous batching)."""

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

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

WORKER: Final = Path(__file__).parent / "workers" / "vllm_worker.py"
LONGEST_DRAFT: Final = 128
"""vLLM's own limit on gamma."""


class VllmEngine:
    """vLLM in a child process: `start` loads it, `stop` ends the process, which frees all it took.

    Draft tokens are sampled at the request's temperature, as in the other engines (vLLM's own default is a greedy draft, which
    accepts less when the temperature is above 0). Step times of target and draft are known on a CPU with tensor_parallel 1; on a
    GPU reading them would hold the GPU up, so only whole steps are timed. `seconds` of a result begins when the request was
    first scheduled: waiting behind `concurrency` others is not in it.
    """

    name = "vllm"
    concurrent = True
    synthesises = True
    schedules = True

    def __init__(self, settings: EngineSettings, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """`tokenizer` turns tokens into the results' text (without one the text is empty)."""
        self.settings = settings
        self.tokenizer = tokenizer
        self.gamma = 0
        self.counters: dict[str, Any] = {}
        self._child: Child | None = None
        self._steps: tuple[EngineStep, ...] = ()
        self._version: str | None = None

    @property
    def version(self) -> str:
        """Of the vLLM that would run. Raises ArchsearchError where there is none, or an old one."""
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
        """Raises ArchsearchError for a module in place of a folder, vocabularies that differ, and what vLLM refuses; RunFailed
        when it does not come up.
        """
        check_start(gamma, draft, synthetic, schedule)
        if gamma > LONGEST_DRAFT and draft is not None:
            raise ArchsearchError(f"vLLM drafts at most {LONGEST_DRAFT} tokens a round, got gamma {gamma}")
        sources = [_source(model) for model in (target, draft) if model is not None]
        _check_vocabularies(sources)
        self.stop()
        settings = self.settings
        child = self._new_child(worker_environment(settings, sources))
        try:
            told = child.ask(
                {
                    "do": "start",
                    "target": sources[0],
                    "draft": sources[1] if draft is not None else None,
                    "gamma": gamma,
                    "synthetic": list(synthetic),
                    "schedule": [list(entry) for entry in schedule],
                    "dtype": settings.dtype,
                    "concurrency": settings.concurrency,
                    "max_len": settings.max_len,
                    "mode": settings.mode,
                    "tensor_parallel": settings.tensor_parallel,
                    "dummy_weights": settings.dummy_weights,
                    "device": settings.device,
                }
            )
        except BaseException:
            child.close()
            raise
        self._child, self._version = child, str(told["version"])
        self.gamma = gamma if draft is not None else 0

    def _new_child(self, env: Mapping[str, str]) -> Child:
        python = self.settings.python
        if python is None:
            from archsearch.engines.environments import find_python

            python = find_python("vllm")
        return Child(python, WORKER, name="vllm", env=dict(env), timeout_s=self.settings.timeout_s)

    def _started(self) -> Child:
        if self._child is None:
            raise RuntimeError("start the engine first")
        return self._child

    def generate(self, prompts: Sequence[EnginePrompt], sampling: Sampling) -> list[GenerationResult]:
        """All prompts together, `concurrency` at a time. Sampling is seeded by seed and prompt.

        Raises RunFailed where vLLM's own counters and the rounds seen disagree.
        """
        if not prompts:
            return []
        self._steps, self.counters = (), {}
        told = self._started().ask(
            {
                "do": "generate",
                "prompts": [{"id": prompt.prompt_id, "token_ids": list(prompt.token_ids)} for prompt in prompts],
                "max_new_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                "seed": sampling.seed,
                "ignore_end": sampling.ignore_end,
            }
        )
        self.counters = dict(told["counters"])
        if told["preempted"]:
            log.warning("vLLM put %d requests back for lack of KV cache; lower --concurrency or --max-len", told["preempted"])
        self._steps = tuple(_step(fields) for fields in told["steps"])
        return [self._result(fields) for fields in told["results"]]

    def _result(self, fields: Mapping[str, Any]) -> GenerationResult:
        lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        text = "" if self.tokenizer is None else str(self.tokenizer.decode(list(fields["token_ids"]), skip_special_tokens=True))
        return GenerationResult(**{**fields, **lists, "text": text})

    def token_logits(self, token_ids: Sequence[int], candidates: Sequence[int]) -> list[float]:
        """The target's raw logits, as vLLM's own pass over `token_ids` gives them."""
        told = self._started().ask({"do": "logits", "token_ids": list(token_ids), "candidates": list(candidates)})
        return [float(value) for value in told["logits"]]

    def steps(self) -> tuple[EngineStep, ...]:
        """The steps of the last `generate`. A step with newly admitted prompts beside running requests says `prefill`."""
        return self._steps

    def stop(self) -> None:
        if self._child is not None:
            self._child.close()
        self._child, self._steps, self.gamma = None, (), 0


def worker_environment(settings: EngineSettings, sources: Sequence[str]) -> dict[str, str]:
    """Environment variables that must be there before the worker's interpreter starts.

    The hub is off limits when all models are folders, so a start does not wait for a network that is not there.
    """
    env = {"VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
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
            f"vLLM runs in a process of its own and needs a model folder, not a {type(model).__name__}; save it first"
        )
    if not (model / "config.json").is_file():
        raise ArchsearchError(f"no config.json in {model}; vLLM needs a model folder")
    return str(model.resolve())


def _check_vocabularies(sources: Sequence[str]) -> None:
    sizes = []
    for source in sources:
        if not Path(source).is_dir():
            return  # a hub id: vLLM checks for itself
        config = read_json(Path(source) / "config.json", "the model's config")
        sizes.append(config.get("vocab_size") or config.get("text_config", {}).get("vocab_size"))
    if len(sizes) == 2 and sizes[0] != sizes[1]:
        raise ArchsearchError(f"the draft's vocabulary has {sizes[1]} tokens, the target's {sizes[0]}; they must be the same")


def _step(fields: Mapping[str, Any]) -> EngineStep:
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    return EngineStep(**values)
