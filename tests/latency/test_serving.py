"""How engines run a draft: its head, its devices, and what it costs while a schedule says 0."""

from __future__ import annotations

import pytest

from archsearch.architecture.architecture import Architecture
from archsearch.engines.registry import BATCHING, DUMMY_ENGINES, ENGINES, IN_PROCESS, SCHEDULING, SYNTHESISING
from archsearch.hardware.identify import resolve_device
from archsearch.latency.roofline import RooflineLatency
from archsearch.latency.serving import draft_ranks, served_draft
from archsearch.workload import Workload

DRAFT = Architecture(256, 512, 2, 4, 4, 64, 32000, draft_vocab_size=8000)


@pytest.mark.parametrize(("engine", "rows"), [(None, 8000), ("transformers", 8000), ("vllm", 32000), ("openvino", 32000)])
def test_only_some_engines_know_a_trimmed_head(engine: str | None, rows: int) -> None:
    assert served_draft(DRAFT, engine).head_rows == rows


def test_who_shares_the_draft() -> None:
    workload = Workload(tensor_parallel=4)
    assert draft_ranks("vllm", workload) == 4
    assert draft_ranks("openvino", workload) == draft_ranks(None, workload) == 1


def test_only_vllm_runs_an_idle_draft() -> None:
    device, workload = resolve_device("a100"), Workload(batch_size=8)
    costs = {name: RooflineLatency(device, "bfloat16", "graph", name) for name in ENGINES}
    idle = {name: latency.idle_draft_s(DRAFT, workload).value for name, latency in costs.items()}
    assert idle["transformers"] == idle["openvino"] == 0 < idle["vllm"] < costs["vllm"].draft_s(DRAFT, workload, 2).value


def test_what_is_said_of_the_engines_is_what_their_classes_say() -> None:
    from archsearch.engines.openvino import OpenVinoEngine
    from archsearch.engines.transformers import TransformersEngine
    from archsearch.engines.vllm import VllmEngine

    for engine in (OpenVinoEngine, TransformersEngine, VllmEngine):
        assert (engine.name in BATCHING, engine.name in SYNTHESISING, engine.name in SCHEDULING) == (
            engine.concurrent,
            engine.synthesises,
            engine.schedules,
        )
    assert set(DUMMY_ENGINES) | set(BATCHING) | set(IN_PROCESS) <= set(ENGINES)
