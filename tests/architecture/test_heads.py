"""Heads on hidden states: their ops hold the weights that the published files hold."""

from __future__ import annotations

from collections import Counter

import pytest

from archsearch.architecture import catalogue
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import norm_params
from archsearch.architecture.ops import AllReduce, Attention, Elementwise, Gemm, PassOps
from archsearch.drafters.heads import Eagle, Eagle3, Mtp
from archsearch.errors import ArchsearchError, InvalidShapeError
from tests.doubles.published_heads import first_pass, head_for, later_step, usual_head

SMALL = Architecture(512, 1408, 12, 8, 4, 64, 32000, qk_norm=True)


def kinds(ops: PassOps, kind: type) -> Counter:
    return Counter(
        {op: count for op, count in (ops.in_layers + ops.outside).items() if isinstance(op, kind)}
    )


def gemm(ops: PassOps) -> Counter:
    return kinds(ops, Gemm)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("vicuna-7b", 0.24e9),
        ("vicuna-13b", 0.37e9),
        ("vicuna-33b", 0.56e9),
        ("llama-2-7b", 0.24e9),
        ("llama-2-13b", 0.37e9),
        ("llama-2-70b", 0.99e9),
        ("llama-3-8b", 0.25e9),
    ],
)
def test_eagle_1_has_the_parameters_of_its_readme(target: str, said: float) -> None:
    """The table of SafeAILab/EAGLE's README, in its two digits."""
    assert abs(head_for(target, "eagle").head.parameters() - said) <= 0.5e7


def test_eagle_3_of_qwen3_32b_is_as_long_as_the_published_file() -> None:
    """model.safetensors of RedHatAI/Qwen3-32B-speculator.eagle3 has 3,121,274,856 bytes; 1.6 kB of
    them are its header."""
    published = head_for("qwen3-32b", "eagle3")
    # a copy of the embedding; int64 d2t, bool t2d
    tables = 151_936 * 5120 * 2 + 32_000 * 8 + 151_936
    assert 0 < 3_121_274_856 - (2 * published.head.parameters() + tables) < 4096


def test_eagle_3_of_llama_33_70b_is_as_long_as_the_published_file() -> None:
    """3.15 GB, with its own embedding: it is narrower than its target."""
    head = head_for("llama-3.3-70b", "eagle3").head
    assert head.architecture.hidden_size == 6144 and head.target_hidden_size == 8192
    assert 2 * head.parameters() == pytest.approx(3.15e9, rel=0.002)


def test_eagle_3_of_qwen3_4b_has_the_exact_count_of_its_card() -> None:
    """A SpecForge head for Qwen3-4B (32 heads of 80): 202,700,416 numbers, the maps d2t and t2d
    counted among them."""
    decoder = usual_head(catalogue.load("qwen3-4b").architecture, "eagle3").architecture.replace(
        head_dim=80
    )
    assert Eagle3(decoder, 2560, 3).parameters() + 32_000 + 151_936 == 202_700_416


def test_the_ops_of_eagle_3_hold_its_parameters() -> None:
    """By hand for Llama-3.1-8B: fc 50.3M, layer 243.3M, head 131.1M, four norms."""
    head = head_for("llama-3.1-8b", "eagle3").head
    first = first_pass(head, 1, 3, 500)
    assert head.parameters() == 424_689_664 == first.weight_elements() + 4 * 4096
    step = later_step(head, 1, 500)
    assert (
        first.weight_elements() - step.weight_elements() == 3 * 4096 * 4096
    )  # fc runs on the target's rows only
    assert gemm(step) == {
        Gemm(1, 6144, 8192): 1,
        Gemm(1, 4096, 4096): 1,
        Gemm(1, 28672, 4096): 1,
        Gemm(1, 4096, 14336): 1,
        Gemm(1, 32000, 4096): 1,
    }
    assert (
        gemm(first)[Gemm(4, 4096, 3 * 4096)] == 1 and gemm(first)[Gemm(1, 32000, 4096)] == 1
    )  # the head on the last row


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp", "dflash"])
@pytest.mark.parametrize("fused", [False, True])
def test_the_ops_of_a_first_pass_hold_every_weight(kind: str, fused: bool) -> None:
    head = usual_head(SMALL.replace(vocab_size=40000), kind)
    ops = first_pass(head, 2, 4, 90, fused=fused)
    shared_head = 0 if kind == "eagle3" else 40000 * 512
    layers = head.architecture.num_hidden_layers
    norms = {"eagle": 1, "eagle3": 4, "mtp": 5, "dflash": 2 * layers + 2}[kind] * norm_params(
        head.architecture
    )
    qk_norms = 2 * 64 * layers if head.architecture.qk_norm else 0
    # k and v also run on the target's rows
    repeated = 2 * layers * 4 * 64 * 512 if kind == "dflash" else 0
    assert ops.weight_elements() == head.parameters() + shared_head + repeated - norms - qk_norms
    assert ops.layers == layers and ops.all_reduces() == 0


def test_eagle_1_runs_fc_on_every_row_and_has_one_norm_less() -> None:
    head = usual_head(SMALL, "eagle")
    first, step = (
        first_pass(head, 3, 3, 90),
        later_step(head, 3, 94),
    )
    assert gemm(first)[Gemm(12, 512, 1024)] == 1 and gemm(step)[Gemm(3, 512, 1024)] == 1
    assert gemm(first)[Gemm(3, 32000, 512)] == 1
    assert kinds(step, Elementwise)[Elementwise("norm", 3 * 512)] == 1
    assert kinds(first, Attention) == {Attention(3, 4, 90, 8, 4, 64): 1}


def test_further_layers_of_eagle_3_are_plain() -> None:
    one = usual_head(SMALL, "eagle3")
    two = Eagle3(one.architecture.replace(num_hidden_layers=2), 512, 3)
    step = gemm(later_step(two, 1, 90))
    assert step[Gemm(1, 1024, 1024)] == 1 and step[Gemm(1, 1024, 512)] == 1


def test_a_trimmed_head_is_scattered_where_the_engine_does_so() -> None:
    head = usual_head(SMALL.replace(vocab_size=128_000), "eagle3")
    samples = [
        {
            op
            for op in kinds(later_step(head, 2, 9, scattered=flag), Elementwise)
            if op.name == "sample"
        }
        for flag in (False, True)
    ]
    assert samples == [
        {Elementwise("sample", 64_000, 32_000)},
        {Elementwise("sample", 256_000, 128_000)},
    ]


def test_ranks_split_layers_and_head_but_not_fc() -> None:
    head = usual_head(SMALL, "eagle3")
    first = first_pass(head, 1, 3, 90, ranks=4)
    assert gemm(first)[Gemm(4, 512, 3 * 512)] == 1 and gemm(first)[Gemm(1, 8000, 512)] == 1
    assert first.all_reduces() == 2 + 2 and first.ranks == 4  # two a layer, embedding, logits
    assert kinds(first, AllReduce) == {AllReduce(4 * 512, 4): 3, AllReduce(16_000, 4): 1}
    with pytest.raises(InvalidShapeError, match="does not divide by tensor_parallel=3"):
        later_step(head, 1, 9, ranks=3)


def test_a_block_drafter_writes_its_block_in_one_pass() -> None:
    head = usual_head(SMALL, "dflash")
    ops = first_pass(head, 2, 7, 90)
    assert gemm(ops)[Gemm(16, 512, 5 * 512)] == 1  # fc
    assert gemm(ops)[Gemm(16, 5 * 2 * 256, 512)] == 1  # keys and values of five layers at once
    assert gemm(ops)[Gemm(14, 32000, 512)] == 1  # seven tokens a sequence
    assert kinds(ops, Attention) == {Attention(2, 8, 98, 8, 4, 64): 5}


def test_heads_that_cannot_be() -> None:
    with pytest.raises(InvalidShapeError, match="cannot share embedding or head"):
        Eagle(SMALL, 1024)
    with pytest.raises(InvalidShapeError, match="cannot share embedding or head"):
        Eagle3(SMALL, 1024, 3)
    with pytest.raises(InvalidShapeError, match="one hidden state"):
        Mtp(SMALL, 512, 3)
    with pytest.raises(InvalidShapeError, match="at least one hidden state"):
        Eagle3(SMALL, 512, 0)


def test_every_published_head_names_its_source() -> None:
    for target, kind in (
        ("llama-3.1-8b", "eagle3"),
        ("vicuna-33b", "eagle"),
        ("qwen3-4b", "dflash"),
    ):
        published = head_for(target, kind)
        assert published.hub_id and published.source and published.head.family == kind
    assert head_for("llama-65b", "eagle3").hub_id is None
    assert head_for("Qwen3-32B", "eagle3").target == "qwen3-32b"
    with pytest.raises(ArchsearchError, match="no model called"):
        head_for("llama-9", "eagle")
