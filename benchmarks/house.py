"""What the code is made of: sizes, functions, types, import circles.

    python benchmarks/house.py [FOLDER ...]

FOLDER: of the package (default: archsearch/); several are shown side by side, such as those of two
commits. An import circle is a set of modules each of which imports, directly or by others, every
other one; imports inside functions count, those for type checkers alone do not.
"""

from __future__ import annotations

import argparse
import ast
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
MOST_PARAMETERS: Final = 7
NUMERICAL: Final = ("latency", "acceptance", "traffic", "speedup.py", "training", "profiling")


def measured(folder: Path) -> dict[str, str]:
    """The counts of a package by what they are called."""
    files = {path: path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in files.items()}
    lines = [text.count("\n") for text in files.values()]
    found = [node for tree in trees.values() for node in ast.walk(tree)]
    functions = [node for node in found if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    sizes = sorted((node.end_lineno or node.lineno) - node.lineno + 1 for node in functions)
    parameters = [_parameters(node) for node in functions]
    numerical = [
        text for path, text in files.items() if path.relative_to(folder).parts[0] in NUMERICAL
    ]
    return {
        "files": str(len(files)),
        "lines": f"{sum(lines):,}",
        "megabytes": f"{sum(len(text.encode()) for text in files.values()) / 1e6:.3f}",
        "lines over 100 columns": (
            f"{sum(len(line) > 100 for text in files.values() for line in text.splitlines()):,}"
        ),
        "file: median, longest": f"{statistics.median(lines):.0f}, {max(lines)}",
        "functions": f"{len(functions):,}",
        "function: median, p99, longest": (
            f"{sizes[len(sizes) // 2]}, {sizes[int(0.99 * len(sizes))]}, {sizes[-1]}"
        ),
        f"functions over {MOST_PARAMETERS} parameters": str(
            sum(n > MOST_PARAMETERS for n in parameters)
        ),
        "Any": f"{sum(isinstance(node, ast.Name) and node.id == 'Any' for node in found):,}",
        "string subscripts": f"{sum(_by_name(node) for node in found):,}",
        "comment lines of numerical files": f"{_comments(numerical):.1%}",
        "import circles (modules)": "; ".join(map(str, map(len, circles(folder, trees)))) or "none",
    }


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return sum(each.arg not in ("self", "cls") for each in every)


def _by_name(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Constant)
        and isinstance(node.slice.value, str)
    )


def _comments(texts: list[str]) -> float:
    """Share of lines that hold a comment, beside those that a tool reads."""
    lines = [line for text in texts for line in text.splitlines() if line.strip()]
    said = [
        line
        for line in lines
        if "# " in line and not any(f"# {tool}" in line for tool in ("fmt:", "type:", "noqa"))
    ]
    return len(said) / max(1, len(lines))


def circles(folder: Path, trees: dict[Path, ast.Module]) -> list[list[str]]:
    """Modules that import each other, largest circle first."""
    names = {path: _module(folder, path) for path in trees}
    known = set(names.values())
    graph = {names[path]: {*_imported(tree, known)} - {names[path]} for path, tree in trees.items()}
    reach = {name: _reached(graph, name) for name in graph}
    left, found = set(graph), []
    for name in sorted(graph):
        if name in left:
            circle = sorted(other for other in reach[name] if name in reach[other])
            left -= {name, *circle}
            if circle:
                found.append(sorted({name, *circle}))
    return sorted(found, key=len, reverse=True)


def _module(folder: Path, path: Path) -> str:
    parts = (folder.name, *path.relative_to(folder).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(tree: ast.AST, known: set[str]) -> Iterator[str]:
    """Modules of the package that a file imports when it is loaded or when its functions run."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{name.name}" for name in node.names}
            yield from inside & known or {node.module} & known
        elif isinstance(node, ast.Import):
            yield from {name.name for name in node.names} & known
        yield from _imported(node, known)


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    seen, waiting = set(), [start]
    while waiting:
        for name in graph[waiting.pop()] - seen:
            seen.add(name)
            waiting.append(name)
    return seen - {start} if start not in seen else seen


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=Path, default=[ROOT / "archsearch"])
    columns = [measured(folder.resolve()) for folder in parser.parse_args().folders]
    for name in columns[0]:
        print(f"{name:<36}" + "".join(f"{column[name]:>18}" for column in columns))


if __name__ == "__main__":
    main()
