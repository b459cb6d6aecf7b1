"""What engines in a process of their own have in common: a worker that is started, asked and ended,
and folders as models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from archsearch.acceptance.lookup import Ngram
from archsearch.engine_facts import engine_facts
from archsearch.engines.child.child import Child
from archsearch.engines.engine import (
    Chained,
    EnginePrompt,
    EngineSettings,
    EngineStep,
    GenerationResult,
    ModelSource,
    Sampling,
    check_family,
    check_start,
    text_of,
)
from archsearch.errors import ArchsearchError
from archsearch.files import read_json
from archsearch.schedule import Ranges

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChildEngine:
    """An engine whose `worker` runs in an interpreter of its own: `start` loads it, `stop` ends the
    process, which frees all.

    A subclass names itself (as in --engine) and its worker, and fills in the hooks; what it can is
    in its EngineFacts.
    """

    name: ClassVar[str]
    worker: ClassVar[Path]
    environment: ClassVar[Mapping[str, str]] = {}

    def __init__(
        self, settings: EngineSettings, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        """`tokenizer` turns tokens into the results' text (without one the text is empty)."""
        self.settings = settings
        self.tokenizer = tokenizer
        self.facts = engine_facts(self.name)
        self.title = self.facts.title
        self.concurrent = self.facts.batches
        self.synthesises = self.facts.synthesises
        self.schedules = self.facts.schedules
        self.gamma = 0
        self._child: Child | None = None
        self._steps: tuple[EngineStep, ...] = ()
        self._version: str | None = None

    # -- hooks

    def check(self, draft: ModelSource | None, gamma: int, schedule: Ranges) -> None:
        """Raise ArchsearchError for what this engine cannot be started with."""

    def check_prompts(self, prompts: Sequence[EnginePrompt], sampling: Sampling) -> None:
        """Raise ArchsearchError for what this engine, as it was started, cannot generate."""

    def request(self) -> dict[str, object]:
        """What the worker reads of the settings when it starts."""
        return {}

    def prepared(self, sources: Sequence[str]) -> list[str]:
        """The models in the form that the worker loads, target first."""
        return list(sources)

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
        check_start(gamma, draft, synthetic, schedule)
        family = check_family(self.facts, draft, synthetic, schedule)
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
                    "schedule": [list(entry) for entry in schedule],
                    "dtype": self.settings.dtype,
                    "concurrency": self.settings.concurrency,
                    "max_len": self.settings.max_len,
                    "dummy_weights": self.settings.dummy_weights,
                    **self.request(),
                }
            )
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
        """The target's logits after `token_ids`, from a pass of the engine."""
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
    if target != draft:
        raise ArchsearchError(
            f"the draft's vocabulary has {draft} tokens, the target's {target}; they must be the"
            " same"
        )


def _tuples(fields: Mapping[str, object]) -> dict[str, Any]:
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
