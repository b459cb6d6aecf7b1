"""OpenVINO GenAI: fast and exact on CPUs, in its own environment and process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from archsearch.drafters.read import layer_ids
from archsearch.engines.child.child_engine import ChildEngine
from archsearch.engines.engine import EnginePrompt, ModelSource, Sampling, drafter_family
from archsearch.errors import ArchsearchError, RunFailed
from archsearch.files import read_json
from archsearch.paths import cache_dir
from archsearch.schedule import Ranges

WORKER: Final = Path(__file__).parent / "worker" / "openvino_worker.py"


class OpenVinoEngine(ChildEngine):
    """OpenVINO GenAI in a child process (docs/engines.md).

    With a draft a temperature above 0 is refused: OpenVINO GenAI then accepts by the probabilities
    of two different tokens, so it does not sample from the target. `first_s` ends with the first
    round then: the draft reads the prompt in it, in the request's second step, which is marked
    `prefill` too. Lookup tries n-grams of one token and more, whatever the shortest is that was
    asked for.
    """

    name = "openvino"
    worker = WORKER
    told = ("threads",)
    environment = {"OPENVINO_TELEMETRY_OPT_OUT": "1"}

    def check(self, draft: ModelSource | None, gamma: int, schedule: Ranges) -> None:
        limits = self.facts.head_limits.get(drafter_family(draft))
        if isinstance(draft, Path) and limits is not None:
            self._check_head(draft, *limits)
        settings = self.settings
        if (settings.device, settings.tensor_parallel, settings.server_url) != ("cpu", 1, None):
            raise ArchsearchError(
                "archsearch runs OpenVINO GenAI on one CPU in a process of its own, without a"
                f" server; got device {settings.device!r}, tensor_parallel"
                f" {settings.tensor_parallel}; use --engine vllm"
            )

    def known_cause(self, error: RunFailed) -> str:
        # Seen in 2026.4 on a CPU with AMX: one thread or one CPU divides by zero in bfloat16, not
        # in float32, not on two.
        if "signal 8" not in str(error) or self.settings.dtype != "bfloat16":
            return ""
        return (
            "OpenVINO GenAI divides by zero in bfloat16 on one thread: give it two CPUs, with a"
            " profile of two threads (archsearch profile --threads 2), or float32 (--dtype float32)"
        )

    def _check_head(self, folder: Path, most_layers: int, states: int | None) -> None:
        config = read_json(folder / "config.json", "the head's config")
        layers = int(config.get("num_hidden_layers") or 1)
        read = len(layer_ids(config))
        if layers > most_layers:
            raise ArchsearchError(
                f"{self.title} runs EAGLE-3 heads of {most_layers} layer, this one has {layers}:"
                " use --engine vllm"
            )
        if states is not None and read != states:
            raise ArchsearchError(
                f"{self.title} hands {states} states to an EAGLE-3 head, this one reads {read}: use"
                f" --engine vllm, or train one with {states} auxiliary layers"
            )

    def check_prompts(self, prompts: Sequence[EnginePrompt], sampling: Sampling) -> None:
        if sampling.temperature > 0 and self.gamma:
            raise ArchsearchError(
                "OpenVINO GenAI does not sample from the target when a draft helps, so temperature"
                f" {sampling.temperature:g} is possible without a draft only: use temperature 0, or"
                " --engine vllm or transformers"
            )
        for prompt in prompts:
            needed = len(prompt.token_ids) + sampling.max_new_tokens
            if needed > self.settings.max_len:
                raise ArchsearchError(
                    f"prompt {prompt.prompt_id!r} and its answer need {needed} tokens, max_len is"
                    f" {self.settings.max_len}; raise it or ask for fewer tokens"
                )
        if len({prompt.prompt_id for prompt in prompts}) < len(prompts):
            raise ArchsearchError("two prompts have the same id; give each its own")

    def request(self) -> dict[str, object]:
        return super().request() | {"cache": str((cache_dir() / "openvino").absolute())}
