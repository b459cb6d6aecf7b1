"""The list of kernels agrees with the parameter count, and splits and windows as it should."""

import pytest

import archsearch.architecture.catalogue as catalogue
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import (
    attention_params,
    body_parameters,
    layer_params,
    norm_params,
    parameters,
)
from archsearch.architecture.experts import busiest_rank, expert_layout, popularity
from archsearch.architecture.ops import (
    AllReduce,
    Attention,
    Elementwise,
    Experts,
    Gemm,
    LatentAttention,
    check_shards,
    forward_ops,
    head_ops,
    layer_ops,
    sample_op,
)
from archsearch.capacity import shard
from archsearch.errors import InvalidShapeError

GQA = Architecture(512, 1408, 6, 8, 4, 64, 1000)
OPT = Architecture(
    512,
    2048,
    4,
    8,
    8,
    64,
    1000,
    tie_word_embeddings=True,
    gated_mlp=False,
    rms_norm=False,
    learned_positions=130,
)


def gemms(ops):
    return [op for op in ops if isinstance(op, Gemm)]


def total(counts, kind, what):
    return sum(count * getattr(op, what)() for op, count in counts.items() if isinstance(op, kind))


@pytest.mark.parametrize(
    "arch", [GQA, OPT, GQA.replace(num_key_value_heads=1, head_dim=128)], ids=["gqa", "opt", "mqa"]
)
@pytest.mark.parametrize("fused", [False, True])
def test_gemms_hold_every_weight_and_cost_two_flops_each(arch, fused):
    counts = forward_ops(arch, batch=2, tokens=3, context=50, fused=fused)
    layers = arch.num_hidden_layers
    weights = (
        layers * (layer_params(arch) - 2 * norm_params(arch)) + arch.head_rows * arch.hidden_size
    )
    assert total(counts, Gemm, "weight_elements") == weights
    assert total(counts, Gemm, "flops") == 2 * 6 * weights


def test_fusing_joins_qkv_and_gate_up():
    plain, fused = (
        gemms(layer_ops(GQA, batch=1, tokens=1, context=9, window=None, fused=flag))
        for flag in (False, True)
    )
    assert len(plain) == 7 and len(fused) == 4
    assert fused[0] == Gemm(1, 8 * 64 + 2 * 4 * 64, 512)
    assert Gemm(1, 2 * 1408, 512) in fused


def test_opt_has_a_plain_mlp_and_no_rope():
    ops = layer_ops(OPT, batch=1, tokens=1, context=9, window=None)
    assert len(gemms(ops)) == 6
    assert not any(isinstance(op, Elementwise) and op.name == "rope" for op in ops)


def test_a_trimmed_head_is_smaller():
    assert gemms(head_ops(GQA.replace(draft_vocab_size=100), batch=2, tokens=5)) == [
        Gemm(10, 100, 512)
    ]


@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallel_splits_the_work(ranks):
    whole, part = (
        layer_ops(GQA, batch=1, tokens=4, context=64, window=None, ranks=n) for n in (1, ranks)
    )
    whole_flops, part_flops = (
        sum(op.flops() for op in ops if hasattr(op, "flops")) for ops in (whole, part)
    )
    assert part_flops * ranks == whole_flops
    assert [op for op in part if isinstance(op, AllReduce)] == [AllReduce(4 * 512, ranks)] * 2
    assert not any(isinstance(op, AllReduce) for op in whole)


def test_kv_heads_are_replicated_beyond_their_number():
    ops = layer_ops(GQA, batch=1, tokens=1, context=64, window=None, ranks=8)
    attention = next(op for op in ops if isinstance(op, Attention))
    assert (attention.q_heads, attention.kv_heads) == (1, 1)


def test_tensor_parallel_that_does_not_divide():
    with pytest.raises(InvalidShapeError, match="num_attention_heads"):
        forward_ops(GQA, batch=1, tokens=1, context=1, ranks=3)


@pytest.mark.parametrize(
    ("kv_heads", "ranks", "each"), [(4, 2, 2), (4, 4, 1), (4, 8, 1), (1, 8, 1)]
)
def test_kv_heads_of_a_rank(kv_heads, ranks, each):
    ops = layer_ops(
        GQA.replace(num_key_value_heads=kv_heads),
        batch=1,
        tokens=1,
        context=9,
        window=None,
        ranks=ranks,
    )
    assert {op.kv_heads for op in ops if isinstance(op, Attention)} == {each}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks"), [(12, 6, 4), (24, 12, 8), (12, 4, 6), (24, 3, 2)]
)
def test_kv_heads_and_ranks_that_do_not_divide_one_another(heads, kv_heads, ranks):
    arch = GQA.replace(
        num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=1536
    )
    with pytest.raises(
        InvalidShapeError, match=f"num_key_value_heads .{kv_heads}. and tensor_parallel={ranks}"
    ):
        layer_ops(arch, batch=1, tokens=1, context=9, window=None, ranks=ranks)
    with pytest.raises(InvalidShapeError):  # the memory model says the same
        shard(arch, ranks)


def test_an_engine_adds_the_residual_inside_the_norm():
    plain, fused = (
        layer_ops(GQA, batch=2, tokens=3, context=9, window=None, fused=flag)
        for flag in (False, True)
    )
    names = [[op.name for op in ops if isinstance(op, Elementwise)] for ops in (plain, fused)]
    assert names == [["norm", "rope", "add", "norm", "act", "add"], ["norm", "rope", "norm", "act"]]


def test_what_does_not_shrink_with_the_ranks():
    assert not any(isinstance(op, AllReduce) for op in head_ops(GQA, batch=2, tokens=3))
    ops = head_ops(GQA, batch=2, tokens=3, ranks=8)
    assert [op for op in ops if isinstance(op, AllReduce)] == [
        AllReduce(6 * 512, 8),
        AllReduce(6 * 1000 // 2, 8),
    ]
    assert gemms(ops) == [Gemm(6, 125, 512)]


def test_a_prefill_needs_the_logits_of_its_last_token():
    ops = head_ops(GQA, batch=2, tokens=300, head_tokens=1)
    assert gemms(ops) == [Gemm(2, 1000, 512)] and Elementwise("embed", 600 * 512) in ops


def test_sampling_reads_every_logit():
    assert sample_op(GQA.replace(draft_vocab_size=100), batch=3, tokens=2) == Elementwise(
        "sample", 600, width=100
    )


def test_windows_cut_what_attention_reads():
    assert Attention(1, 1, 99, 8, 4, 64).keys() == 100
    assert (
        Attention(1, 1, 99, 8, 4, 64, window=16).keys() == 16
    )  # the new token and the 15 before it
    assert (
        Attention(1, 5, 99, 8, 4, 64, window=16).keys() == 20
    )  # 5 queries see overlapping windows of 16
    assert Attention(1, 1, 3, 8, 4, 64, window=16).keys() == 4
    assert Attention(2, 1, 99, 8, 4, 64).kv_elements() == 2 * 2 * 100 * 4 * 64
    assert Attention(2, 3, 97, 8, 4, 64).flops() == 4 * 2 * 3 * 100 * 8 * 64


def test_layers_are_counted_by_window():
    arch = GQA.replace(window_pattern="SSL", sliding_window=16)
    counts = forward_ops(arch, batch=1, tokens=1, context=99)
    by_window = {op.window: count for op, count in counts.items() if isinstance(op, Attention)}
    assert by_window == {16: 4, None: 2}
    plain = forward_ops(GQA, batch=1, tokens=1, context=99)
    assert total(counts, Gemm, "flops") == total(plain, Gemm, "flops")
    assert total(counts, Attention, "flops") < total(plain, Attention, "flops")
    assert parameters(arch) == parameters(GQA)


def test_a_pass_reads_the_experts_that_its_tokens_touch():
    arch = catalogue.load("qwen3-30b-a3b").architecture.replace(routing_skew=0.0)
    one, many = (
        next(
            op for op in forward_ops(arch, batch=1, tokens=n, context=99) if isinstance(op, Experts)
        )
        for n in (1, 8)
    )
    assert one.touched == 8 and many.touched == pytest.approx(
        128 * (1 - (1 - 8 / 128) ** 8), abs=0.01
    )
    assert (many.pairs, many.inter, many.experts) == (64, 768, 128)
    skewed = arch.replace(routing_skew=1.0)
    assert (
        next(
            op
            for op in forward_ops(skewed, batch=1, tokens=8, context=9)
            if isinstance(op, Experts)
        ).touched
        < many.touched
    )


def test_skew_lowers_the_experts_touched_and_never_below_a_tokens_share():
    assert busiest_rank(128, 4, 1, 1, 0.7) == pytest.approx(4)
    for tokens in (2, 8, 64):
        touched = [busiest_rank(128, 4, tokens, 1, skew) for skew in (0.0, 0.3, 0.6, 1.2)]
        assert touched == sorted(touched, reverse=True)
        assert 4 - 1e-6 <= touched[-1] and touched[0] <= min(128, 4 * tokens) + 1e-9
    assert sum(popularity(64, 6, 0.8)) == pytest.approx(6)


def test_dense_first_layers_have_no_experts():
    counts = forward_ops(
        catalogue.load("deepseek-v3").architecture,
        batch=1,
        tokens=1,
        context=99,
        ranks=8,
        fused=True,
    )
    assert sum(n for op, n in counts.items() if isinstance(op, Experts)) == 58
    assert sum(n for op, n in counts.items() if isinstance(op, LatentAttention)) == 61
    assert counts[Gemm(1, 2 * 18432 // 8, 7168)] == 3


@pytest.mark.parametrize(
    ("name", "ranks", "layout"), [("qwen3-235b-a22b", 4, (4, 1)), ("mixtral-8x7b", 8, (8, 1))]
)
def test_experts_are_split_over_the_ranks(name, ranks, layout):
    found = expert_layout(catalogue.load(name).architecture, ranks)
    assert (found.tensor_ranks, found.expert_ranks) == layout
    blocks = expert_layout(
        catalogue.load("qwen3-30b-a3b").architecture.replace(served_dtype="float8_e4m3fn"), 4
    )
    assert (blocks.tensor_ranks, blocks.expert_ranks) == (
        1,
        4,
    )  # 192 columns are no whole blocks of 128


def test_ranks_that_divide_neither_experts_nor_their_columns():
    with pytest.raises(
        InvalidShapeError, match="neither moe_intermediate_size .768. nor num_experts .128."
    ):
        check_shards(
            catalogue.load("qwen3-30b-a3b").architecture.replace(
                num_attention_heads=40, num_key_value_heads=20
            ),
            5,
        )
    with pytest.raises(
        InvalidShapeError, match="num_attention_heads .32. does not divide by tensor_parallel=3"
    ):
        check_shards(catalogue.load("qwen3-30b-a3b").architecture, 3)


def test_every_weight_of_an_expert_model_is_counted_once_where_all_are_touched():
    arch = catalogue.load("mixtral-8x7b").architecture
    counts = forward_ops(arch, batch=512, tokens=1, context=9)
    weights = sum(
        n * op.weight_elements() for op, n in counts.items() if isinstance(op, Gemm | Experts)
    )
    assert weights == pytest.approx(
        body_parameters(arch) + arch.vocab_size * arch.hidden_size, rel=1e-3
    )


def test_a_latent_block_holds_the_weights_of_the_module():
    arch = catalogue.load("deepseek-v3").architecture
    op = next(
        op
        for op in forward_ops(arch, batch=1, tokens=1, context=9)
        if isinstance(op, LatentAttention)
    )
    assert op.weight_elements() == attention_params(arch) - 1536 - 512  # all but the two norms
    assert op.cache_elements() == 10 * 576
