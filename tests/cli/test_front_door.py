"""The front door: keys and types of every command's `--json` and of every file of a run, as 0.2.0
had them.

`front_door.json` holds what scripts rely on; new keys are welcome, lost ones and other types are
not. A change on purpose is recorded by running this file with ARCHSEARCH_FRONT_DOOR=write, and said
in CHANGELOG.md.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
from pathlib import Path
from typing import Any

import yaml

from archsearch.cli import main
from tests.cli.commands import call, last_json

GOLDEN = Path(__file__).with_name("front_door.json")
GPU = ("--target", "llama-3.1-8b", "--gpu", "h100")
LOAD = ("--requests-per-second", "1", "--prompt-tokens", "512", "--output-tokens", "128")
COMMANDS: dict[str, tuple[str, ...]] = {
    "estimate": (
        "estimate",
        *GPU,
        "--draft",
        "llama-3.2-1b",
        "--draft",
        "eagle3",
        "--draft",
        "ngram",
    ),
    "estimate --sweep": ("estimate", *GPU, "--draft", "eagle3", "--sweep", "batch"),
    "traffic": ("traffic", *GPU, "--draft", "eagle3", *LOAD),
    "schedule": ("schedule", "runs/gpu"),
    "compare": ("compare", "runs/gpu", "runs/a"),
    "report": ("report", "runs/a"),
    "export": ("export", "runs/a", "--output", "out"),
    "doctor": ("doctor",),
    **{
        f"list {what}": ("list", what)
        for what in ("targets", "devices", "profiles", "spaces", "runs")
    },
}


def skeleton(value: Any) -> Any:
    """Keys and types: of a list the union over its items, of a number "number", whatever it is;
    keys that are numbers are "*"."""
    if isinstance(value, dict):
        if {"value", "std", "source"} <= set(value):
            return "estimate"
        result: dict[str, Any] = {}
        for key, item in value.items():
            name = "*" if str(key).isdigit() else str(key)
            result[name] = merged(result.get(name), skeleton(item))
        return result
    if isinstance(value, list):
        union: Any = None
        for item in value:
            union = merged(union, skeleton(item))
        return [] if union is None else [union]
    if value is None:
        return None
    return {bool: "boolean", int: "number", float: "number", str: "text"}[type(value)]


def merged(first: Any, second: Any) -> Any:
    """What two skeletons say together; where they differ in type the first one's."""
    if isinstance(first, dict) and isinstance(second, dict):
        return first | {key: merged(first.get(key), item) for key, item in second.items()}
    if isinstance(first, list) and isinstance(second, list):
        return [merged(first[0], second[0])] if first and second else first or second
    return second if first is None else first


def lost(before: Any, now: Any, where: str) -> list[str]:
    """What `before` has and `now` has not, or has with another type; an unknown (None, an empty
    list) is anything."""
    if before is None or now is None or before == [] or now == []:
        return []
    if isinstance(before, dict) and isinstance(now, dict):
        gone = [f"{where}.{key}" for key in before if key not in now]
        return gone + [
            text
            for key in before
            if key in now
            for text in lost(before[key], now[key], f"{where}.{key}")
        ]
    if isinstance(before, list) and isinstance(now, list):
        return lost(before[0], now[0], f"{where}[]")
    return [] if before == now else [f"{where}: {before} is now {now}"]


def read(path: Path) -> Any:
    """The skeleton of a file of a run."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".csv":
        return {name: "column" for name in next(csv.reader(text.splitlines()))}
    return skeleton(yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text))


def files(folder: Path) -> dict[str, Any]:
    """Skeletons of the files of a run or export, by path; ranks and finalists are one."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        parts = list(path.relative_to(folder).parts)
        if len(parts) > 2 and parts[0] in ("best", "finalists"):
            parts[1] = "*"
        name = "/".join(parts)
        if path.name.startswith("tokenizer") or name.startswith(("text/", "heldout/")):
            continue
        if path.is_file() and path.suffix in (".json", ".yaml", ".csv"):
            try:
                found[name] = merged(found.get(name), read(path))
            except (ValueError, StopIteration):
                continue
        elif path.is_file() and path.suffix in (".safetensors", ".npz", ".html", ".md"):
            found[name] = None
    return {name: value for name, value in found.items() if "checkpoint" not in name}


def options() -> dict[str, list[str]]:
    """The options of each command."""
    commands = dict(main.commands)  # type: ignore[attr-defined]
    return {
        name: sorted(o for parameter in command.params for o in parameter.opts)
        for name, command in commands.items()
    }


def seen(searched: Path) -> dict[str, Any]:
    """Everything, in a working directory with a confirmed run in runs/a; `searched`: one for a
    GPU."""
    shutil.copytree(searched / "runs", "runs", dirs_exist_ok=True)
    results: dict[str, Any] = {"search": json.loads((searched / "result.json").read_text())}
    for name, arguments in COMMANDS.items():
        if name == "schedule":  # vLLM has one for some families, rank 1 may be of another
            rank = next(
                each["rank"]
                for each in results["search"]["best"]
                if each["family"] == "independent"
            )
            arguments = (*arguments, "--rank", str(rank))
        results[name] = last_json(call(*arguments, "--json"))
    answers = {name: skeleton(result) for name, result in results.items()}
    answers["search --confirm"] = skeleton(json.loads(Path("result.json").read_text()))
    folders = {
        "run": files(Path("runs/a")),
        "run on a GPU": files(Path("runs/gpu")),
        "export": files(Path("out")),
    }
    return {"json": answers, "files": folders, "options": options()}


def test_nothing_that_scripts_rely_on_is_lost(with_run: Path, searched: Path) -> None:
    now = seen(searched)
    if os.environ.get("ARCHSEARCH_FRONT_DOOR") == "write":
        GOLDEN.write_text(json.dumps(now, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    before = json.loads(GOLDEN.read_text(encoding="utf-8"))
    gone = lost(before["json"], now["json"], "--json") + lost(
        before["files"], now["files"], "files"
    )
    gone += [
        f"{name} {o}"
        for name, known in before["options"].items()
        for o in known
        if o not in now["options"].get(name, [])
    ]
    assert not gone, "\n".join(gone)


def test_a_loss_is_seen() -> None:
    before = {"a": [{"b": "number", "c": "text"}], "d": None}
    assert (
        lost(before, {"a": [{"b": "number", "c": "text", "e": "text"}], "d": "number"}, "x") == []
    )
    assert lost(before, {"a": [{"b": "text"}]}, "x") == [
        "x.d",
        "x.a[].c",
        "x.a[].b: number is now text",
    ]
