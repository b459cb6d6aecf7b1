"""Parameters, bytes and FLOPs against hand arithmetic and the paper."""

import pytest

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import (
    body_parameters,
    embedding_params,
    head_params,
    kv_cache_bytes,
    layer_params,
    parameters,
    weight_bytes_per_pass,
)
from benchmarks.search_speed import flops_per_token

WIDE = Architecture(2560, 9280, 12, 20, 20, 128, 32000)
DEEP = Architecture(2048, 5504, 24, 16, 16, 128, 32000)
TINY = Architecture(8, 16, 3, 4, 2, 4, 10)


def test_layer_by_hand():
    # q 8x16, k and v 8x8, o 16x8; three 8x16 matrices; two norms of 8
    assert layer_params(TINY) == 8 * 16 + 2 * 8 * 8 + 16 * 8 + 3 * 8 * 16 + 2 * 8
    assert parameters(TINY) == 3 * layer_params(TINY) + 8 + 2 * 80


def test_biases_and_norms_by_hand():
    plain = layer_params(TINY)
    assert layer_params(TINY.replace(attention_bias=True)) - plain == 16 + 8 + 8
    assert layer_params(TINY.replace(attention_output_bias=True)) - plain == 8
    assert layer_params(TINY.replace(mlp_bias=True)) - plain == 16 + 16 + 8
    assert layer_params(TINY.replace(qk_norm=True)) - plain == 2 * 4
    assert layer_params(TINY.replace(rms_norm=False)) - plain == 2 * 8
    assert layer_params(TINY.replace(gated_mlp=False)) - plain == -8 * 16


def test_head():
    assert head_params(TINY) == 80
    assert head_params(TINY.replace(tie_word_embeddings=True)) == 0
    assert head_params(TINY.replace(draft_vocab_size=4)) == 32
    assert embedding_params(TINY.replace(draft_vocab_size=4)) == 80
    assert embedding_params(TINY.replace(learned_positions=6)) == 128


def test_the_papers_two_1_3b_shapes():
    """arXiv 2402.01528: equal parameters, half the depth, 37.5 % less KV cache."""
    assert parameters(WIDE) == pytest.approx(1.334e9, rel=1e-3)
    assert parameters(DEEP) == pytest.approx(1.345e9, rel=1e-3)
    assert kv_cache_bytes(WIDE, 1024, 2) == 120 * 2**20
    assert kv_cache_bytes(DEEP, 1024, 2) == 192 * 2**20


def test_windows_cap_the_cache():
    slid = DEEP.replace(window_pattern="SSSL", sliding_window=128)
    assert kv_cache_bytes(slid, 1024, 2) == 192 * 2**20 * (18 * 128 + 6 * 1024) // (24 * 1024)
    assert kv_cache_bytes(slid, 100, 2) == kv_cache_bytes(DEEP, 100, 2)
    assert kv_cache_bytes(DEEP, 1024, 2, batch_size=3) == 3 * 192 * 2**20


def test_gqa_divides_the_cache():
    assert kv_cache_bytes(DEEP.replace(num_key_value_heads=4), 1024, 2) == 48 * 2**20


def test_a_trimmed_head_reads_less_though_tied():
    full = weight_bytes_per_pass(TINY, 2)
    assert full == 2 * (body_parameters(TINY) + 80)
    assert weight_bytes_per_pass(TINY.replace(tie_word_embeddings=True), 2) == full
    assert full - weight_bytes_per_pass(TINY.replace(draft_vocab_size=4), 2) == 2 * 6 * 8


def test_flops():
    assert flops_per_token(TINY, 0) == 2 * (body_parameters(TINY) + 80)
    assert flops_per_token(TINY, 100) - flops_per_token(TINY, 0) == 4 * 100 * 16 * 3
