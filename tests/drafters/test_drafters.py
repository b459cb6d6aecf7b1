"""Drafters as values: what each runs in a round, what it holds, how it is written down and read
back."""

from __future__ import annotations

import json

import pytest

from archsearch.architecture import catalogue
from archsearch.architecture.ops import Attention, Gemm, PassOps
from archsearch.drafters.drafter import FAMILY_NAMES, Drafter, RoundRows
from archsearch.drafters.heads import DFlash, Eagle3, Medusa, PEagle
from archsearch.drafters.lookup import NGram
from archsearch.drafters.models import EarlyExit, Independent, Pard
from archsearch.drafters.registry import FAMILIES, as_drafter, family, read_drafter
from archsearch.engine_facts import ENGINES, engine_facts
from archsearch.errors import ArchsearchError, InvalidShapeError

TARGET = catalogue.load("llama-3.1-8b").architecture
ROWS = RoundRows(batch=2, context=500, gamma=4)


def usual() -> list[Drafter]:
    return [each.usual(TARGET) for each in FAMILIES.values()]


def gemm_rows(ops: PassOps | None) -> set[int]:
    assert ops is not None
    return {op.m for op in (*ops.in_layers, *ops.outside) if isinstance(op, Gemm)}


def test_every_family_is_listed_and_may_be_written_with_a_hyphen() -> None:
    assert tuple(FAMILIES) == tuple(each.family for each in FAMILIES.values())
    assert set(FAMILIES) == set(FAMILY_NAMES)
    assert family("EAGLE-3") is Eagle3 and family("early-exit") is EarlyExit
    with pytest.raises(
        ArchsearchError, match="unknown family of drafters 'egale3'.*did you mean eagle3"
    ):
        family("egale3")


@pytest.mark.parametrize("drafter", usual(), ids=lambda drafter: drafter.family)
def test_it_reads_back_as_it_was_written(drafter: Drafter) -> None:
    text = json.loads(json.dumps(drafter.to_dict()))
    assert read_drafter(drafter.architecture, text) == drafter
    assert text["label"] == drafter.label() and text["family"] == drafter.family


def test_a_bare_shape_is_an_independent_draft() -> None:
    assert as_drafter(TARGET) == Independent(TARGET) == read_drafter(TARGET, None)


@pytest.mark.parametrize("drafter", usual(), ids=lambda drafter: drafter.family)
def test_a_round_grows_with_gamma(drafter: Drafter) -> None:
    one, four = (drafter.plan(RoundRows(1, 500, gamma)) for gamma in (1, 4))
    assert one.steps == 0 or drafter.model is None
    assert four.head_rows == 4 * one.head_rows
    assert four.launched >= one.launched


def test_an_eagle_3_head_of_llama_31_8b_by_hand() -> None:
    """fc on the gamma + 1 verified rows once a round, the head on the last row of each pass, 32,000
    rows."""
    head = Eagle3.usual(TARGET)
    plan = head.plan(ROWS)
    assert plan.first is not None and plan.step is not None
    assert (plan.steps, plan.head_rows, plan.layers, plan.launched) == (3, 2 * 4, 1, 4)
    assert (
        plan.first.outside[Gemm(10, 4096, 3 * 4096)] == 1
        and not plan.step.outside[Gemm(2, 4096, 3 * 4096)]
    )
    assert plan.step.outside[Gemm(2, 32_000, 4096)] == 1
    assert head.parameters() == 424_689_664
    assert head.kv_bytes_per_token(2) == 2 * 8 * 128 * 2


def test_parallel_drafters_take_one_pass() -> None:
    """P-EAGLE: gamma + 1 verified rows and gamma - 1 masks; PARD one row more; DFlash its block.
    Heads on gamma rows."""
    rows = {"peagle": 2 * 8, "pard": 2 * 9, "dflash": 2 * 5}
    for each in (PEagle, Pard, DFlash):
        plan = each.usual(TARGET).plan(ROWS)
        assert (plan.step, plan.steps, plan.launched) == (None, 0, 1)
        attention = next(op for op in plan.first.in_layers if isinstance(op, Attention))  # type: ignore[union-attr]
        assert attention.batch * attention.tokens == rows[each.family]
        assert 2 * 4 in gemm_rows(plan.first)
    assert max(PEagle.usual(TARGET).gammas(range(1, 17))) == 8
    assert max(DFlash.usual(TARGET).gammas(range(1, 17))) == 15


def test_medusa_runs_as_many_heads_as_tokens() -> None:
    """K (h^2 + h) and, where heads are their own, K V h; one go on the last accepted row of each
    sequence."""
    own, shared = Medusa.usual(TARGET), Medusa(TARGET, shared_head=True)
    assert own.parameters() - shared.parameters() == 4 * 4096 * 128_256
    assert shared.parameters() == 4 * (4096 * 4096 + 4096)
    plan = own.plan(RoundRows(2, 500, 3))
    assert plan.first is not None and plan.first.weight_elements() == 3 * (
        4096 * 4096 + 4096 * 128_256
    )
    assert gemm_rows(plan.first) == {2} and own.kv_bytes_per_token(2) == 0
    assert own.gammas(range(1, 17)) == (1, 2, 3, 4)


def test_lookups_run_nothing_on_the_device() -> None:
    plan = NGram.usual(TARGET).plan(ROWS)
    assert plan.first is None and plan.step is None and 0 < plan.host_s < 1e-3
    assert NGram.usual(TARGET).with_share(0.4).drafts_share == 0.4
    with pytest.raises(InvalidShapeError, match="between 0 and 1, got 1.5"):
        NGram(TARGET, share=1.5)
    with pytest.raises(InvalidShapeError, match="1 <= min_n <= max_n"):
        NGram(TARGET, 4, 3)


def test_an_early_exit_holds_no_weights_but_a_cache() -> None:
    cut = EarlyExit.of(TARGET, None, {"exit_layer": 8})
    assert cut.parameters() == 0 and cut.kv_bytes_per_token(2) == 8 * 2 * 8 * 128 * 2
    assert cut.model == TARGET.replace(num_hidden_layers=8)
    with pytest.raises(InvalidShapeError, match="no exit after layer 32"):
        EarlyExit.of(TARGET, None, {"exit_layer": 32})


def test_a_head_of_another_target_is_refused() -> None:
    head = Eagle3.usual(TARGET)
    with pytest.raises(InvalidShapeError, match="width 4096, the target's have 8192"):
        head.check(catalogue.load("llama-3.1-70b").architecture)
    with pytest.raises(InvalidShapeError, match="vocabulary of 128256, the target one of 151936"):
        head.check(catalogue.load("qwen3-8b").architecture)
    head.check(TARGET)


def test_a_choice_that_a_family_does_not_have_is_refused() -> None:
    with pytest.raises(InvalidShapeError, match="medusa has no states; it has heads"):
        Medusa.of(TARGET, None, {"states": 3})


@pytest.mark.parametrize(
    ("engine", "name", "version", "words"),
    [
        ("openvino", "medusa", None, "OpenVINO GenAI does not run medusa drafters; use vLLM"),
        ("sglang", "peagle", None, "SGLang does not run peagle drafters"),
        (
            "vllm",
            "peagle",
            "0.15.0",
            "vLLM 0.15.0 is not known to run peagle drafters: use --engine-version 0.16",
        ),
        ("transformers", "eagle3", None, "transformers does not run eagle3"),
    ],
)
def test_an_engine_without_the_family_says_so(
    engine: str, name: str, version: str | None, words: str
) -> None:
    with pytest.raises(ArchsearchError, match=words):
        engine_facts(engine).check_drafter(FAMILIES[name].usual(TARGET), 1, version)


def test_engines_name_known_families_and_the_limits_of_heads() -> None:
    for row in ENGINES.values():
        assert set(row.families) <= set(FAMILIES) and row.unscheduled <= set(row.families)
    two = Eagle3.of(
        TARGET,
        TARGET.replace(num_hidden_layers=2, draft_vocab_size=8192, tie_word_embeddings=False),
        {},
    )
    engine_facts("vllm").check_drafter(two, 1)
    with pytest.raises(InvalidShapeError, match="EAGLE-3 head of 1 layer, not of 2"):
        engine_facts("openvino").check_drafter(two, 1)
    with pytest.raises(InvalidShapeError, match="does not divide"):
        engine_facts("vllm").check_drafter(two, 3)
