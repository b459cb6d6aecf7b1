"""vLLM, in its own environment and process."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from archsearch.engines.child.child_engine import ChildEngine
from archsearch.engines.engine import Engine, EngineSettings, ModelSource, Tokenizer, drafter_family
from archsearch.errors import ArchsearchError
from archsearch.files import read_json
from archsearch.schedule import Ranges

log = logging.getLogger(__name__)

WORKER: Final = Path(__file__).parent / "worker" / "vllm_worker.py"
LONGEST_DRAFT: Final = 128
"""vLLM's own limit on gamma."""


class VllmEngine(ChildEngine):
    """vLLM in a child process (docs/engines.md).

    On a GPU reading the times of passes would hold it up, so only whole steps are timed. `seconds`
    of a result begins when the request was first scheduled: waiting behind `concurrency` others is
    not in it. `generate` raises RunFailed where vLLM's own counters and the rounds seen disagree.
    """

    name = "vllm"
    worker = WORKER
    told = ("mode", "tensor_parallel", "device", "memory_share")
    environment = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }

    def check(self, draft: ModelSource | None, gamma: int, schedule: Ranges) -> None:
        if gamma > LONGEST_DRAFT and draft is not None:
            raise ArchsearchError(
                f"vLLM drafts at most {LONGEST_DRAFT} tokens a round, got gamma {gamma}"
            )
        family = drafter_family(draft)
        if schedule and family in self.facts.unscheduled:
            raise ArchsearchError(
                f"vLLM runs {family} drafters with one gamma for all batch sizes; leave the"
                " schedule out"
            )
        if isinstance(draft, Path) and family == "medusa":
            heads = int(read_json(draft / "config.json", "the heads' config")["num_heads"])
            if gamma > heads:
                raise ArchsearchError(
                    f"{draft} has {heads} Medusa heads, so gamma is at most {heads}, got {gamma}"
                )

    def request(self) -> dict[str, object]:
        settings, formats = self.settings, self.facts.quantises
        quantised = formats.get(settings.draft_dtype or "")
        asked = super().request() | {"draft_quantization": quantised}
        if settings.dtype in formats:  # of the weights; all else is in 16 bits
            asked |= {"dtype": "bfloat16", "quantization": formats[settings.dtype]}
        return asked

    def answered(self, answer: Mapping[str, Any]) -> None:
        if answer["preempted"]:
            log.warning(
                "vLLM put %d requests back for lack of KV cache; lower --concurrency or --max-len",
                answer["preempted"],
            )


def make(settings: EngineSettings, tokenizer: Tokenizer = None) -> Engine:
    """vLLM as `settings` want it: a server that runs already, or a process of its own."""
    if settings.server_url is None:
        return VllmEngine(settings, tokenizer)
    from archsearch.engines.vllm.server import VllmServerEngine

    return VllmServerEngine(settings, tokenizer)
