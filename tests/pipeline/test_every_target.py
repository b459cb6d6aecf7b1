"""A search never dies on a shape: it ends in an answer or in one line that the user can act on."""

from __future__ import annotations

import itertools
from functools import cache

import pytest

from archsearch import pipeline
from archsearch.acceptance.prior import PriorAcceptance
from archsearch.architecture import catalogue
from archsearch.architecture.ops import check_shards
from archsearch.engine_facts import engine_facts
from archsearch.errors import ArchsearchError, InvalidShapeError
from archsearch.hardware.device import Device
from archsearch.latency.model import LatencyModel
from archsearch.pipeline.estimate import EstimateRequest
from archsearch.pipeline.session import memory_limits
from archsearch.profiles import Profile, find_profile
from archsearch.search.objective import Scorer
from archsearch.search.space import list_spaces, load_space
from archsearch.search.study import search
from archsearch.workload import Workload, WorkloadRequest

ENGINES = ("transformers", "vllm")
RANKS = (1, 2, 4, 8)
BATCHES = (1, 64)
EVERY_CASE = list(itertools.product(list_spaces(), catalogue.names(), RANKS, ENGINES, BATCHES))


@cache
def h200() -> Profile:
    return Profile.load(find_profile("h200-sxm-141gb"))


@cache
def model(engine: str) -> LatencyModel:
    return LatencyModel(h200(), "bfloat16", "graph", engine)


def answer(case: tuple[str, str, int, str, int]) -> str:
    """ "" for an answer, else the one line."""
    space_name, target_name, ranks, engine, batch = case
    target = catalogue.load(target_name).architecture
    workload = Workload(batch, 256, ranks, "bfloat16", "graph")
    try:
        space = load_space_once(space_name).served(
            engine_facts(engine).draft_ranks(workload.tensor_parallel), 352
        )
        limits = memory_limits(space, target, workload, Device.from_dict(h200().device))
        scorer = Scorer(target, workload, model(engine), PriorAcceptance()).with_limits(limits)
        best = search(space, scorer, trials=6).best[0]
    except ArchsearchError as error:
        assert "\n" not in str(error)
        return str(error)
    check_shards(best.architecture, engine_facts(engine).draft_ranks(workload.tensor_parallel))
    assert best.speedup.value > 0
    return ""


load_space_once = cache(load_space)


def fails(cases: list[tuple[str, str, int, str, int]]) -> dict[str, int]:
    """How often each line came; an exception that is none for users is the test's failure."""
    lines = [answer(case) for case in cases]
    return {line: lines.count(line) for line in sorted(set(lines))}


SOME_CASES = EVERY_CASE[::83]  # 83 is prime to every dimension: all spaces and targets come up


def test_the_cases_are_of_every_space_and_target():
    assert {case[0] for case in SOME_CASES} == set(list_spaces())
    assert {case[1] for case in SOME_CASES} == set(catalogue.names())


@pytest.mark.slow
@pytest.mark.parametrize("space", list_spaces())
def test_one_case_in_eighty_ends_in_an_answer_or_one_line(space):
    cases = [case for case in SOME_CASES if case[0] == space]
    assert fails(cases)[""] >= len(cases) // 2


@pytest.mark.campaign
@pytest.mark.parametrize("space", list_spaces())
def test_every_target_ends_in_an_answer_or_one_line(space):
    cases = [case for case in EVERY_CASE if case[0] == space]
    found = fails(cases)
    assert found[""] >= len(cases) // 2


@pytest.mark.parametrize(
    ("target", "gpu", "ranks"),
    [
        pytest.param("llama-3.1-405b", "h200", None, marks=pytest.mark.slow),
        ("llama-65b", "a100", 8),
    ],
)
def test_drafts_that_vllm_shards_divide_by_the_devices(tmp_path, monkeypatch, target, gpu, ranks):
    """Twenty KV heads over eight devices once ended the search."""
    monkeypatch.chdir(tmp_path)
    asked = WorkloadRequest(gpu, context_len=2048, tensor_parallel=ranks, engine="vllm")
    request = pipeline.SearchRequest(target, asked=asked, trials=20, families=("independent",))
    found = pipeline.search(request)
    assert found.workload.tensor_parallel == 8
    for best in found.best:
        heads = (best.architecture.num_attention_heads, best.architecture.intermediate_size)
        assert all(size % 8 == 0 for size in heads)


def test_an_existing_draft_that_vllm_cannot_shard_is_one_line():
    def asked(engine: str) -> EstimateRequest:
        return EstimateRequest(
            "llama-65b",
            ("llama-160m",),
            WorkloadRequest("h100", tensor_parallel=8, engine=engine),
            "0.7",
            4,
        )

    with pytest.raises(
        InvalidShapeError, match=r"draft llama-160m cannot run in vllm, .* 8 devices: .*12"
    ):
        pipeline.estimate_drafts(asked("vllm"))
    assert pipeline.estimate_drafts(asked("transformers")).drafts
