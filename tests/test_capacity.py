"""Memory on known cases: the paper's two drafts, and models whose fit on known GPUs is well
known."""

from dataclasses import replace

import pytest

import archsearch.capacity as capacity
from archsearch.architecture.catalogue import load
from archsearch.architecture.counts import parameters
from archsearch.errors import InvalidShapeError
from archsearch.hardware.device import load_device
from archsearch.workload import Workload

AT_1024 = Workload(context_len=1024, dtype="float16")
A100 = load_device("a100")
L4 = load_device("l4")
LLAMA_65B, LLAMA_7B, LLAMA_70B = (
    load(name).architecture for name in ("llama-65b", "llama-7b", "llama-2-70b")
)
WIDE, DEEP = (load(name).architecture for name in ("wide-1.3b", "sheared-llama-1.3b"))


def test_kv_of_the_papers_drafts():
    assert capacity.memory_bytes(LLAMA_65B, WIDE, AT_1024).draft_kv_bytes == 120 * 2**20
    assert capacity.memory_bytes(LLAMA_65B, DEEP, AT_1024).draft_kv_bytes == 192 * 2**20


def test_parts_add_up():
    use = capacity.memory_bytes(LLAMA_7B, WIDE, replace(AT_1024, batch_size=3))
    assert use.target_weight_bytes == 2 * 6_738_415_616
    assert use.target_kv_bytes == 3 * 512 * 2**20  # 0.5 MiB per token
    assert use.draft_weight_bytes == 2 * parameters(WIDE)
    assert use.total_bytes == use.weight_bytes + use.kv_bytes
    alone = capacity.memory_bytes(LLAMA_7B, None, AT_1024)
    assert alone.draft_weight_bytes == alone.draft_kv_bytes == 0


def test_tensor_parallel_splits_the_target_and_not_the_draft():
    one, four = (
        capacity.memory_bytes(LLAMA_65B, WIDE, replace(AT_1024, tensor_parallel=n)) for n in (1, 4)
    )
    norms = 161 * 8192 * 2  # stay whole on every rank
    assert 4 * (four.target_weight_bytes - norms) == one.target_weight_bytes - norms
    assert 4 * four.target_kv_bytes == one.target_kv_bytes
    assert four.draft_weight_bytes == one.draft_weight_bytes


def test_kv_heads_are_replicated_beyond_their_number():
    use = {
        n: capacity.memory_bytes(
            LLAMA_70B, None, replace(AT_1024, tensor_parallel=n)
        ).target_kv_bytes
        for n in (1, 8, 16)
    }
    assert use[1] == 8 * use[8] == 8 * use[16]


def test_tensor_parallel_must_divide():
    with pytest.raises(InvalidShapeError, match="num_attention_heads"):
        capacity.memory_bytes(LLAMA_65B, None, replace(AT_1024, tensor_parallel=3))
    with pytest.raises(InvalidShapeError, match="num_key_value_heads"):
        capacity.shard(
            LLAMA_70B.replace(num_key_value_heads=32, num_attention_heads=96, intermediate_size=96),
            24,
        )


def test_what_is_known_to_fit():
    assert not capacity.fits(LLAMA_65B, WIDE, AT_1024, A100)
    assert not capacity.fits(
        LLAMA_65B, WIDE, replace(AT_1024, tensor_parallel=1), load_device("h100")
    )
    assert capacity.fits(
        LLAMA_65B, WIDE, replace(AT_1024, tensor_parallel=4), A100
    )  # the paper's set-up
    assert capacity.fits(LLAMA_7B, None, AT_1024, L4)
    assert not capacity.fits(LLAMA_7B, None, replace(AT_1024, dtype="float32"), L4)


def test_less_kv_leaves_room_for_more_sequences():
    assert capacity.held_requests(LLAMA_7B, WIDE, AT_1024, A100) > capacity.held_requests(
        LLAMA_7B, DEEP, AT_1024, A100
    )


def test_nothing_fits():
    assert capacity.held_requests(LLAMA_65B, WIDE, AT_1024, A100) == 0


def test_no_context_is_counted_as_one_token():
    assert capacity.held_requests(LLAMA_7B, None, replace(AT_1024, context_len=0), A100) > 10_000


def test_a_context_is_cut_where_memory_ends_before_the_models_do():
    target, draft = load("llama-3.1-8b").architecture, load("llama-3.2-1b").architecture
    work = Workload(8, 256, mode="graph")
    card = load_device("rtx4090")
    alone, with_draft = (capacity.cut_context(target, each, work, card) for each in (None, draft))
    # 21.6 GiB less 15.0 of weights and 1.1 of activations at 128 KiB a token, an eighth less
    assert alone is not None and with_draft is not None and 38_000 < alone < 40_000
    assert with_draft < alone - 10_000 and alone % 256 == with_draft % 256 == 0
    assert capacity.cut_context(target, None, work, load_device("h100")) is None
    # beyond the draft's positions engines stop
    short = draft.replace(max_position_embeddings=2048)
    assert capacity.cut_context(target, short, work, load_device("h100")) == 2048
    # what was asked is served where memory just holds it
    long = replace(work, batch_size=1, context_len=alone + 2_000)
    assert capacity.cut_context(target, None, long, card) == alone + 2_000
    assert capacity.cut_context(LLAMA_65B, None, work, L4) is None  # nothing fits: said elsewhere
