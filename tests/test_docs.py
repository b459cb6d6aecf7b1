"""The documentation says what the code does: generated help is fresh, links lead somewhere,
documented fields exist."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from dataclasses import MISSING
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from archsearch.architecture.op_kinds import OP_KINDS
from archsearch.profiles import WHOLE_KINDS
from archsearch.runs.confirmed import Confirmed
from archsearch.search.objective import Score
from archsearch.search.space import CONSTRAINTS, DIMENSIONS, SearchSpace
from tests.test_rooms import FLOORS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md")) + [ROOT / "README.md", ROOT / "CHANGELOG.md"]


def generator(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def text(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def test_cli_page_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "53")  # a terminal's width must not matter
    assert text("cli.md") == generator("generate_cli").cli_markdown(), (
        "docs/cli.md is stale; refresh it with: make docs"
    )


def test_engines_page_has_the_table_of_rounds() -> None:
    page = text("engine-rounds.md")
    assert page == generator("generate_engines").page(page), (
        "docs/engine-rounds.md is stale; refresh it with: make docs"
    )
    assert "| vllm | draft | 0.6.3 to before 0.8 |  | `vllm-first-engine` |  |" in page
    assert (
        "| vllm | draft | 0.31 on |  | `vllm-none-async` | `VLLM_USE_V2_MODEL_RUNNER=0` |" in page
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in link and not link.startswith("#"):
            assert (page.parent / link.split("#")[0]).exists(), (
                f"{page.name} links to {link}, which does not exist"
            )


def test_files_page_names_every_field() -> None:
    page = text("files.md")
    fields = [field.name for field in dataclasses.fields(Score)]
    for name in (
        *fields,
        *(each.name for each in dataclasses.fields(Confirmed) if each.default is MISSING),
        *DIMENSIONS,
        *CONSTRAINTS,
        "ffn_multiple",
        "description",
    ):
        assert f"`{name}`" in page, f"docs/files.md does not explain {name}"


def test_the_map_names_every_room_on_its_floor() -> None:
    rows = re.findall(r"^\| (\d+) \| ((?:`\w+` ?)+)\|", text("architecture.md"), re.MULTILINE)
    assert [set(re.findall(r"`(\w+)`", rooms)) for _, rooms in rows] == [
        set(floor) for floor in FLOORS
    ]


def test_profiles_page_names_every_kind_of_row() -> None:
    for kind in (*OP_KINDS, *WHOLE_KINDS):
        assert f"`{kind}`" in text("profiles.md"), f"docs/profiles.md does not explain {kind} rows"


def test_the_search_space_of_files_page_is_valid() -> None:
    examples = re.findall(r"```yaml\n(.*?)```", text("files.md"), re.DOTALL)
    spaces = [data for data in map(yaml.safe_load, examples) if "dimensions" in data]
    assert spaces, "docs/files.md shows no search space"
    for data in spaces:
        SearchSpace.from_dict(data, "documented")


def test_the_container_file_copies_what_is_there() -> None:
    """It cannot be built in a test; what it copies exists, is part of its context, and is all that
    the wheel is made of."""
    text = (ROOT / "Containerfile").read_text(encoding="utf-8")
    copied = [
        word
        for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE)
        for word in line.split()[:-1]
    ]
    context = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert len(copied) >= 6 and all(
        (ROOT / name).exists() and f"!{name}" in context for name in copied
    )
    built_on = re.findall(
        r'"(\w+)" = "archsearch/_data', (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    )
    assert set(built_on) <= set(copied)
