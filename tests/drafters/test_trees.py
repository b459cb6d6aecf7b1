"""Heads that draft trees: what a round runs, what it accepts, who refuses them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from archsearch.drafters.drafter import RoundRows
from archsearch.drafters.heads import Eagle3
from archsearch.drafters.registry import read_drafter
from archsearch.errors import ArchsearchError
from archsearch.models.targets import resolve_target
from archsearch.pipeline.curves import estimate_curves
from archsearch.pipeline.estimate import EstimateRequest, estimate_drafts, price_drafts
from archsearch.speedup import Tree
from archsearch.workload import WorkloadRequest

TREE = Tree(4, 5, 8)
SGLANG = WorkloadRequest(gpu="h100", engine="sglang", engine_version="0.5.3")


def _head() -> Eagle3:
    return Eagle3.usual(resolve_target("llama-3.1-8b").architecture)


def test_a_tree_verifies_its_tokens_and_its_steps_are_as_wide_as_its_top_k() -> None:
    rows = RoundRows(2, 300, TREE.steps)
    chain, tree = _head().plan(rows), replace(_head(), tree=TREE).plan(rows)
    assert (chain.verified, tree.verified, tree.steps) == (None, 8, chain.steps)
    assert tree.step == _head().plan(replace(rows, batch=8)).step != chain.step
    assert replace(_head(), tree=TREE).gammas([1, 2, 3]) == (5,)


def test_a_tree_is_read_back_and_a_chain_says_nothing_of_trees() -> None:
    made = replace(_head(), tree=TREE)
    assert read_drafter(made.architecture, made.to_dict()) == made
    assert "tree" not in _head().to_dict()


def test_a_tree_accepts_more_than_its_chain_and_a_tau_is_its_own() -> None:
    request = EstimateRequest("llama-3.1-8b", ("eagle3",), SGLANG)
    chain = price_drafts(replace(request, gamma=5))[0][0].score
    tree = price_drafts(replace(request, tree="4,5,16"))[0][0].score
    assert tree.tau.value > chain.tau.value and tree.round_s.value > chain.round_s.value
    assert tree.tau.low < tree.tau.value < tree.tau.high
    given = price_drafts(replace(request, tree="4,5,16", tau=3.0))[0][0].score
    assert given.tau.value == 3.0 and given.alpha.value < tree.alpha.value + 0.2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tree": "4,5"}, "a tree is top-k, steps, tokens"),
        ({"tree": "4,5,2"}, "verifies 6 to"),
        ({"tree": "4,5,8", "gamma": 3}, "leave out --gamma"),
        ({"tree": "4,5,8", "drafts": ("ngram",)}, "only heads"),
        ({"tree": "4,5,8", "asked": replace(SGLANG, engine="vllm", engine_version=None)}, "trees"),
    ],
)
def test_what_cannot_draft_that_tree_is_refused_in_one_line(changes: dict, words: str) -> None:
    with pytest.raises(ArchsearchError, match=words) as refused:
        price_drafts(replace(EstimateRequest("llama-3.1-8b", ("eagle3",), SGLANG), **changes))
    assert "\n" not in str(refused.value)


def test_along_alpha_a_tree_keeps_what_a_tree_accepts() -> None:
    asked = WorkloadRequest(gpu="h100", engine="sglang")
    request = EstimateRequest("llama-3.1-8b", ("eagle3",), tree="4,5,32", asked=asked)
    (swept,) = estimate_curves(request, "alpha", "0.6:0.8:3").curves
    one = estimate_drafts(replace(request, alpha="0.6")).drafts[0].score
    assert swept.curve.points[0].tau.value == pytest.approx(one.tau.value)
