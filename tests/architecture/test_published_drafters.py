"""The table of published drafters: every row can be made into a drafter of each of its targets, and
is found for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from archsearch.architecture import catalogue
from archsearch.architecture.published_drafters import (
    published_as,
    published_drafters,
    published_for,
)
from archsearch.drafters.drafter import FAMILY_NAMES
from archsearch.drafters.registry import family, found_as, found_for
from archsearch.errors import ArchsearchError


@pytest.mark.parametrize("row", published_drafters(), ids=lambda row: f"{row.family}-{row.hub_id}")
def test_each_row_is_a_drafter_of_its_targets(row: object) -> None:
    for name in row.targets:  # type: ignore[attr-defined]
        target = catalogue.load(name).architecture
        drafter = family(row.family).published(row, target)  # type: ignore[attr-defined]
        drafter.check(target)
        assert drafter.parameters() < 0.8 * catalogue.load(name).parameters
        changes = dict(row.changes)  # type: ignore[attr-defined]
        for field, value in changes.items():
            assert getattr(drafter, field, getattr(drafter.architecture, field, None)) == value
        assert found_as(row.hub_id, name, target) is not None  # type: ignore[attr-defined]


def test_the_papers_drafts_of_llama_65b_exist() -> None:
    found = {
        item.row.hub_id
        for item in found_for("llama-65b", catalogue.load("llama-65b").architecture, FAMILY_NAMES)
    }
    assert {
        f"minghaoyan/Wide-Sheared-LLaMA-{size}" for size in ("796M", "543M", "290M", "1.3B")
    } <= found
    assert {"princeton-nlp/Sheared-LLaMA-1.3B", "princeton-nlp/Sheared-LLaMA-2.7B"} <= found


def test_a_fine_tune_finds_what_its_shape_has() -> None:
    shape = catalogue.load("llama-3.3-70b").architecture
    folder = {row.hub_id for row in published_for("my-finetune", shape)}
    assert (
        "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B" in folder
        and "meta-llama/Llama-3.2-1B-Instruct" in folder
    )
    named = {
        row.hub_id for row in published_for("llama-3.1-70b", shape)
    }  # whose name says that it is not 3.3
    assert "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B" not in named


def test_what_runs_the_same_is_one_candidate() -> None:
    shape = catalogue.load("llama-3.1-8b").architecture
    heads = [item for item in found_for("llama-3.1-8b", shape, ("eagle3",))]
    assert (
        len(heads) == 1
        and len([row for row in published_for("llama-3.1-8b", shape) if row.family == "eagle3"])
        == 3
    )


def test_a_head_of_another_target_or_family_is_refused() -> None:
    shape = catalogue.load("llama-3.1-8b").architecture
    with pytest.raises(ArchsearchError, match="was made for llama-3.3-70b, not for llama-3.1-8b"):
        found_as("yuhuili/EAGLE3-LLaMA3.3-Instruct-70B", "llama-3.1-8b", shape, "eagle3")
    with pytest.raises(ArchsearchError, match="of the family dflash, not eagle3"):
        found_as(
            "z-lab/Qwen3-8B-DFlash-b16",
            "qwen3-8b",
            catalogue.load("qwen3-8b").architecture,
            "eagle3",
        )
    assert (
        published_as("nobody/nothing") == ()
        and found_as("nobody/nothing", "llama-3.1-8b", shape) is None
    )


def test_a_broken_row_is_named(tmp_path: Path) -> None:
    head = "family,hub_id,targets,made_for,shape,changes,own_embedding,dimensions,made,source\n"
    for line, words in (
        ("eagle3,a/b,llama-9,,,,,known,,x", "llama-9"),
        ("eagle3,a/b,llama-7b,,,layers=one,,known,,x", "'a/b' is broken"),
        ("eagle3,a/b,llama-7b,,,,,known,,", "lacks a column"),
    ):
        (tmp_path / "table.csv").write_text(head + line + "\n", encoding="utf-8")
        published_drafters.cache_clear()
        with pytest.raises(ArchsearchError, match=words):
            published_drafters(tmp_path / "table.csv")


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/llama-3.1-8b", "llama-3.1-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("someone/llama-3.1-8b", None),
        ("meta-llama/Llama-9", None),
        ("a/b/c", None),
    ],
)
def test_names_of_the_catalogue(name: str, entry: str | None) -> None:
    found = catalogue.named(name)
    assert (found.name if found else None) == entry


def test_a_head_whose_positions_end_before_the_context_is_passed_over() -> None:
    shape = catalogue.load("llama-3.1-8b").architecture
    near, far = (
        [item.row.hub_id for item in found_for("llama-3.1-8b", shape, ("eagle3",), length)]
        for length in (2048, 2049)
    )
    assert near[0] == "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"
    assert far[0] == "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3"
    # beyond the target's own positions nothing tells them apart
    assert found_for("vicuna-13b", catalogue.load("vicuna-13b").architecture, ("eagle3",), 9999)
