"""Everything that can be imported says what it is, and what it raises; the examples in docstrings
run."""

from __future__ import annotations

import ast
import doctest
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import archsearch
from tests.test_rooms import tree_of

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "archsearch"
# Classes a user of the Python API holds in hand: each of their public methods and properties speaks
# for itself.
HELD = {
    *(name for name in archsearch.__all__ if name[0].isupper()),
    "Acceptance",
    "Confirmed",
    "Dimension",
    "GivenAcceptance",
    "Limits",
    "MemoryUse",
    "Ranking",
    "Regret",
    "Replay",
    "RoundTerms",
    "Run",
    "Scored",
    "SearchRequest",
    "SearchResult",
    "Trace",
    "TrainingRecord",
}
Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def public_nodes() -> Iterator[tuple[str, Node]]:
    """(where and what, its definition) of every public function and class, and of the members of
    HELD."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in tree_of(path).body:
            if not isinstance(node, Node) or node.name.startswith("_"):
                continue
            yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node
            for member in node.body if isinstance(node, ast.ClassDef) and node.name in HELD else ():
                if isinstance(member, Node) and not member.name.startswith("_"):
                    yield (
                        f"{path.relative_to(ROOT)}:{member.lineno} {node.name}.{member.name}",
                        member,
                    )


def test_every_public_name_has_a_docstring() -> None:
    nodes = list(public_nodes())
    assert len(nodes) > 1000
    assert [where for where, node in nodes if not ast.get_docstring(node)] == []


def test_what_can_go_wrong_is_said_where_it_is_raised() -> None:
    """A public function that raises an error itself says so: archsearch's own, and those of wrong
    numbers."""
    silent = []
    for where, node in public_nodes():
        if isinstance(node, ast.ClassDef) or where.startswith(
            "archsearch/cli/"
        ):  # the help of commands is for who types them
            continue
        if "/worker/" in where:  # scripts in an engine's interpreter: they raise to their own loop
            continue
        calls = (
            n.exc for n in _own(node) if isinstance(n, ast.Raise) and isinstance(n.exc, ast.Call)
        )
        raised = {call.func.id for call in calls if isinstance(call.func, ast.Name)} - {
            "AssertionError",
            "NotImplementedError",
        }
        if raised and not any(
            word in (ast.get_docstring(node) or "")
            for word in ("Error", "Raises", "refuse", "Refuse")
        ):
            silent.append(f"{where}: {', '.join(sorted(raised))}")
    assert silent == []


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions inside it."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, Node):
            yield from _own(child)


def modules_with_examples() -> list[str]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if ">>> " in path.read_text(encoding="utf-8"):
            found.append(".".join(path.relative_to(ROOT).with_suffix("").parts))
    return found


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_in_docstrings_run(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0 and result.failed == 0
