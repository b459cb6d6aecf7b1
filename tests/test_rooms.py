"""The house keeps its order: who may import whom, what `--help` may load, what every module must
hold to."""

from __future__ import annotations

import ast
import json
import subprocess
import symtable
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import pytest

import archsearch
from benchmarks.house import circles

PACKAGE = Path(archsearch.__file__).resolve().parent
HEAVIEST = 2_803_935

# Floors from the ground up. A room (a module or a folder of the package) imports itself and rooms
# on floors below its own.
FLOORS = (
    ("errors", "estimate", "paths", "progress", "threads"),
    ("files",),
    ("records",),
    ("needs", "workload", "speedup", "schedule"),
    ("hardware", "architecture"),
    ("drafters",),
    ("capacity", "engine_facts", "engine_rounds", "profiles"),
    ("models",),
    ("text", "latency"),
    ("training",),
    ("profiling", "acceptance", "importers"),
    ("search", "engines"),
    ("runs", "drafts", "traffic"),
    ("export",),
    ("recipes",),
    ("report",),
    ("pipeline",),
    ("demo",),
    ("cli",),
)
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
GROUND = [
    room for rooms in FLOORS[:5] for room in rooms
]  # what everything else stands on: explained without exception
HEAVY = ("torch", "transformers", "optuna", "sklearn", "scipy", "pandas", "matplotlib", "numpy")

MODULES = sorted(path for path in PACKAGE.rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    """A module of the package, parsed once for all tests and only where one asks."""
    return ast.parse(path.read_text(encoding="utf-8"))


def room_of(path: Path) -> str:
    """The room of a file: its folder under archsearch/, or its own name. "" for
    archsearch/__init__.py."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def imported_rooms(tree: ast.Module) -> set[tuple[str, int]]:
    """(room, line) of every archsearch import anywhere in a module: lazy ones and those for type
    checkers count too."""
    found = set()
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            # `archsearch.__version__` and the like are the package itself, below all floors.
            if parts[0] == "archsearch" and len(parts) > 1 and not parts[1].startswith("__"):
                found.add((parts[1], node.lineno))
    return found


def wrong_imports(room: str, tree: ast.Module) -> list[str]:
    """What a module of `room` imports from its own floor or above, other than its own room."""
    return [
        f"line {line}: {room} (floor {FLOOR_OF[room]}) imports {other} (floor {FLOOR_OF[other]})"
        for other, line in sorted(imported_rooms(tree), key=lambda item: item[1])
        if other != room and FLOOR_OF[other] >= FLOOR_OF[room]
    ]


def test_every_room_has_a_floor() -> None:
    assert {room_of(path) for path in MODULES} - {""} == set(FLOOR_OF)


def of_all(modules: Iterable[Path], wrong: Callable[[Path], list[str]]) -> list[str]:
    """What is wrong in each of `modules`, with its name."""
    return [f"{path.relative_to(PACKAGE)}: {text}" for path in modules for text in wrong(path)]


def test_a_room_imports_only_rooms_below_it() -> None:
    def wrong(path: Path) -> list[str]:
        if room := room_of(path):
            return wrong_imports(room, tree_of(path))
        return [
            f"{other}: the package itself imports no room"
            for other, _ in imported_rooms(tree_of(path))
        ]

    assert not of_all(MODULES, wrong)


def test_no_modules_import_each_other_in_a_circle(tmp_path: Path) -> None:
    assert not circles(PACKAGE, {path: tree_of(path) for path in MODULES})
    ring = {
        tmp_path / f"{name}.py": f"from {tmp_path.name} import {other}\n"
        for name, other in ("ab", "bc", "ca")
    }
    names = [f"{tmp_path.name}.{name}" for name in "abc"]
    assert circles(tmp_path, {path: ast.parse(text) for path, text in ring.items()}) == [names]


def test_the_check_sees_lazy_and_aliased_imports() -> None:
    bad = (
        "from archsearch import cli as c\ndef f():\n    import archsearch.pipeline\n    from"
        " archsearch.report import x\n"
    )
    assert [
        text.split(" imports ")[1].split()[0] for text in wrong_imports("search", ast.parse(bad))
    ] == [
        "cli",
        "pipeline",
        "report",
    ]
    good = "from archsearch import __version__, files\nfrom archsearch.search.space import Limits\n"
    assert not wrong_imports("search", ast.parse(good))
    assert wrong_imports("runs", ast.parse("from archsearch.drafts.trainer import DraftTrainer")), (
        "the same floor is not below"
    )


def missing_imports(path: Path) -> list[str]:
    """Names that a file imports from the package, at its head or in a function, and that are not
    there."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("archsearch"):
            continue
        place = PACKAGE.joinpath(*str(node.module).split(".")[1:])
        module = place.with_suffix(".py")  # catalogue.py has a folder of data beside it
        if not module.is_file():
            module = place / "__init__.py"
        known = {"*"} | {each.stem for each in place.glob("*")}
        if module.is_file():
            table = symtable.symtable(module.read_text(encoding="utf-8"), module.name, "exec")
            known |= set(table.get_identifiers())
        if module.is_file() and "__getattr__" in known:  # names that load on first use
            known |= {alias.name for alias in node.names if alias.name in module.read_text()}
        missing = [alias.name for alias in node.names if alias.name not in known]
        found += [f"{path.name}:{node.lineno}: {node.module} has no {name}" for name in missing]
    return found


def test_the_package_gets_no_heavier() -> None:
    assert sum(path.stat().st_size for path in PACKAGE.rglob("*.py")) <= HEAVIEST


def test_what_benchmarks_and_examples_import_is_there(tmp_path: Path) -> None:
    """No other test runs most of them, and nobody types them."""
    here = PACKAGE.parent
    scripts = [*here.glob("benchmarks/**/*.py"), *here.glob("examples/*.py")]
    assert len(scripts) > 40
    assert not [text for path in scripts for text in missing_imports(path)]
    gone = tmp_path / "gone.py"
    gone.write_text("def f():\n    from archsearch.speedup import tau, head_for\n")
    assert missing_imports(gone) == ["gone.py:2: archsearch.speedup has no head_for"]
    gone.write_text("from archsearch.nowhere import x\n")
    assert missing_imports(gone) == ["gone.py:1: archsearch.nowhere has no x"]


def relative_imports_and_prints(path: Path) -> list[str]:
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.level:
            found.append(f"line {node.lineno}: relative import; write it from archsearch down")
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "print"
        ):
            found.append(f"line {node.lineno}: print; return text, or use click.echo in cli.py")
    return found


def test_no_relative_imports_and_no_print() -> None:
    assert not of_all(MODULES, relative_imports_and_prints)


def without_docstring(path: Path) -> list[str]:
    tree = tree_of(path)
    public = (ast.FunctionDef, ast.ClassDef)
    named = [n for n in tree.body if isinstance(n, public) and not n.name.startswith("_")]
    missing = [f"{node.name} has no docstring" for node in named if not ast.get_docstring(node)]
    if path.name != "__init__.py" and not ast.get_docstring(tree):
        missing.append("the module has no docstring")
    return missing


def test_ground_floors_explain_themselves() -> None:
    assert not of_all([path for path in MODULES if room_of(path) in GROUND], without_docstring)


@pytest.mark.parametrize(
    "code",
    [
        "import archsearch",
        "import archsearch.cli",
        (
            "from click.testing import CliRunner; from archsearch.cli import main; "
            "assert CliRunner().invoke(main, ['--help']).exit_code == 0; "
            "assert CliRunner().invoke(main, ['search', '--help']).exit_code == 0"
        ),
    ],
    ids=["package", "cli", "help"],
)
def test_nothing_heavy_is_imported_on_the_way_to_help(code: str) -> None:
    program = f"import json, sys; {code}; print(json.dumps(sorted(sys.modules)))"
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = set(json.loads(answer.stdout.splitlines()[-1]))
    assert not loaded & set(HEAVY)


def test_public_names_of_the_package_exist() -> None:
    # In a process of its own: they load torch-free modules only, but numpy and yaml come along.
    program = (
        "import archsearch; [getattr(archsearch, name) for name in archsearch.__all__]; import sys;"
        " print('torch' in sys.modules)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert answer.stdout.strip() == "False"
