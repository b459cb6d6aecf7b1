"""Seeded mutations of every file that is read: does each end in an answer or in one line?

    python benchmarks/fuzz.py [--mutations 5000] [--seed 0] [--only config] [--output FOLDER]

The tiny world of the tests. Of each kind of file (configs of ten families, the rows and header of a
profile, a run's files, neighbours in runs/, prompts, a mix of work, a space, a GPU's file) one is
mutated: bytes flipped, cut, doubled; JSON and YAML values replaced by what has another type or lies
outside all bounds; keys dropped and renamed. The command that reads it runs in a process of its own
with a limit on time and memory. Outcomes: `refused` (exit status 2, one line), `same` and `changed`
(exit status 0), and the faults: `traceback`, `hang` (10 s of the processor, or waiting without
end), `silent` (a number that is kept changed type or left its bounds, and the answer changed
without a word on stderr).
"""

from __future__ import annotations

import argparse
import collections
import copy
import csv
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the tiny world of the tests

LIMIT_S: Final = 10
MEMORY: Final = 6 * 2**30  # above what imports have mapped
FAULTS: Final = ("traceback", "hang", "silent")
HF_FAMILIES: Final = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mistral",
    "mixtral",
    "gemma3_text",
    "gpt_oss",
    "opt",
    "phi3",
    "glm4_moe",
)
SEARCH: Final = (
    "search",
    "--target",
    "target",
    "--gpu",
    "cpu",
    "--space",
    "tiny.yaml",
    "--context",
    "64",
    "--trials",
    "8",
    "--alpha",
    "0.8",
)
ESTIMATE: Final = (
    "estimate",
    "--target",
    "target",
    "--gpu",
    "cpu",
    "--draft",
    "draft",
    "--alpha",
    "0.8",
)
WRONG: Final[tuple[Any, ...]] = (
    None,
    True,
    "",
    "x",
    "12",
    [],
    [1],
    {},
    {"a": 1},
    -1,
    0,
    -5,
    1e308,
    float("nan"),
    float("inf"),
    10**9,
    10**18,
    10**400,
    0.5,
    "\ud800",
    "x" * 5000,
    [[[[]]]],
)
MIX: Final = """objective: throughput
memory_fraction: 0.9
limits: {tpot_ms: 400, ttft_ms: 8000}
parts:
  - {name: chat, weight: 70, concurrency: 1, prompt_tokens: {mean: 60, std: 40}, output_tokens: 25,
     temperature: 0.7, domain: chat, prefix_cache_hit: 0.5}
  - {name: code, weight: 30, concurrency: 1, prompt_tokens: 50, output_tokens: {low: 10, high: 50}}
"""


@dataclass(frozen=True)
class Case:
    """A kind of file: which are mutated (patterns from the world's folder) and what reads them."""

    name: str
    files: tuple[str, ...]
    command: Callable[[Path], tuple[str, ...]]


def _estimate(config: Path) -> tuple[str, ...]:
    return ("estimate", "--target", str(config.parent), "--draft", "ngram", "--gpu", "h100")


CASES: Final = (
    Case("config", ("configs/*/config.json",), _estimate),
    Case(
        "profile",
        ("profiles/*/*/rows.jsonl", "profiles/*/*/profile.json"),
        lambda _: (*ESTIMATE, "--context", "64"),
    ),
    Case(
        "run",
        ("runs/a/*.json", "runs/a/run.yaml", "runs/a/trials.csv", "runs/a/best/*/*.json"),
        lambda _: ("report", "runs/a", "--json"),
    ),
    Case(
        "neighbour",
        ("runs/a/run.yaml", "runs/a/best/*/*.json"),
        lambda _: (*SEARCH[:-2], "--run", "runs/new"),
    ),
    Case(
        "prompts",
        ("prompts.jsonl",),
        lambda _: (*SEARCH, "--prompts", "prompts.jsonl", "--run", "runs/new"),
    ),
    Case("mix", ("mix.yaml",), lambda _: (*ESTIMATE, "--workload", "mix.yaml")),
    Case("space", ("tiny.yaml",), lambda _: (*SEARCH, "--run", "runs/new")),
)


@dataclass(frozen=True)
class Row:
    """One mutation and how it ended."""

    case: str
    file: str
    number: int
    mutation: str
    outcome: str
    line: str


# -- mutations ----------------------------------------------------------------------------------


def mutated(path: Path, rng: random.Random) -> tuple[bytes, str, bool]:
    """(new content, what was done, whether a number was replaced by what is none or has no
    bounds)."""
    data = path.read_bytes()
    if rng.random() < 0.75:
        found = _structured(path, data, rng)
        if found is not None:
            return found
    kind = rng.choice(("flip", "cut", "double", "insert", "empty"))
    at = rng.randrange(max(len(data), 1))
    if kind == "flip":
        changed = bytes([data[at] ^ (1 << rng.randrange(8))]) if data else b""
        return data[:at] + changed + data[at + 1 :], f"flip a bit at {at}", False
    if kind == "cut":
        return data[:at], f"cut at {at}", False
    if kind == "double":
        end = min(len(data), at + rng.randrange(1, 200))
        return data[:end] + data[at:], f"double {at} to {end}", False
    if kind == "insert":
        what = rng.choice(
            (b"\xff\xfe", b"\x00", "\u2028".encode(), b"[" * 5000, b"9" * 5000, b"\n\n", b"&a *a")
        )
        return data[:at] + what + data[at:], f"insert {what[:8]!r} at {at}", False
    return b"", "empty", False


def _structured(path: Path, data: bytes, rng: random.Random) -> tuple[bytes, str, bool] | None:
    """A value replaced, or a key dropped or renamed; None where the file has no such form."""
    import yaml

    lines = data.decode(errors="replace").split("\n")
    number = rng.randrange(len(lines)) if path.suffix == ".jsonl" else 0
    text = lines[number] if path.suffix == ".jsonl" else data.decode(errors="replace")
    try:
        tree = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
    except (ValueError, yaml.YAMLError):
        return None
    places = list(_places(tree))
    if not places:
        return None
    way = rng.choice(places)
    tree = copy.deepcopy(tree)
    holder = tree
    for step in way[:-1]:
        holder = holder[step]
    old = holder[way[-1]]
    number_lost, name = False, "/".join(map(str, way))
    action = rng.random()
    if action < 0.1 and isinstance(holder, dict):
        del holder[way[-1]]
        done = f"drop {name}"
    elif action < 0.15 and isinstance(holder, dict):
        holder[f"{way[-1]}_x"] = holder.pop(way[-1])
        done = f"rename {name}"
    else:
        new = rng.choice(WRONG)
        holder[way[-1]] = new
        done = f"{name} = {str(new)[:30]} (was {str(old)[:30]})"
        number_lost = _is_number(old) and (
            not _is_number(new) or not abs(new) <= sys.float_info.max or new < 0 <= old
        )
    if path.suffix == ".yaml":
        return (
            yaml.safe_dump(tree, allow_unicode=True).encode(errors="surrogatepass"),
            done,
            number_lost,
        )
    said = json.dumps(tree)
    lines[number] = said
    return ("\n".join(lines) if path.suffix == ".jsonl" else said).encode(), done, number_lost


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _places(tree: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Ways to every value of a tree."""
    inside = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, value in inside:
        yield (*way, key)
        yield from _places(value, (*way, key))


# -- a command in a process of its own ----------------------------------------------------------


def run(folder: Path, command: tuple[str, ...]) -> tuple[int, str, str]:
    """(exit status, or -signal; stdout; stderr) of a command in `folder`."""
    process = os.fork()
    if not process:
        _child(folder, command)
    _, status = os.waitpid(process, 0)
    said = [(folder / name).read_text(errors="replace") for name in ("out.txt", "err.txt")]
    return os.waitstatus_to_exitcode(status), said[0], said[1]


def _child(folder: Path, command: tuple[str, ...]) -> None:
    code = 1
    try:
        os.chdir(folder)
        for stream, name in ((1, "out.txt"), (2, "err.txt")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
        sys.stdout, sys.stderr = (
            os.fdopen(1, "w"),
            os.fdopen(2, "w"),
        )  # pytest has put its own in place
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))  # busy without end
        signal.alarm(30 * LIMIT_S)  # waiting without end; long, for a busy machine
        from archsearch.cli import main

        main(list(command), standalone_mode=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def outcome_of(code: int, out: str, err: str, base: tuple[str, str], number_lost: bool) -> str:
    if "Traceback (most recent call last)" in out + err:
        return "traceback"
    if code < 0:
        return "hang" if -code in (signal.SIGXCPU, signal.SIGALRM, signal.SIGKILL) else "traceback"
    if code:
        return (
            "refused"
            if code == 2 and err.strip() and len(err.strip().splitlines()[-1]) < 2000
            else "traceback"
        )
    if plain(out) == plain(base[0]):
        return "same"
    words = set(err.splitlines()) - set(base[1].splitlines())
    return "silent" if number_lost and not words else "changed"


def plain(text: str) -> str:
    """Without what differs between two runs of the same: dates, seconds, temporary names."""
    return re.sub(r"\d{4}-\d\d-\d\d\S*|/tmp/\S+|[\d.]+ s\b", "", text)


# -- the campaign -------------------------------------------------------------------------------


def make_world(folder: Path) -> Path:
    """The tests' tiny world with a finished run, a draft's folder, a mix and configs of
    families."""
    from tests.doubles.world import make_world as tiny_world

    world = tiny_world(folder / "world")
    code, _, err = run(world, (*SEARCH, "--prompts", "prompts.jsonl", "--run", "runs/a"))
    assert code == 0, err
    shutil.copytree(world / "runs" / "a" / "best" / "1", world / "draft")
    (world / "mix.yaml").write_text(MIX)
    from transformers import AutoConfig

    for name in HF_FAMILIES:
        path = world / "configs" / name / "config.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(AutoConfig.for_model(name).to_dict(), default=str))
    return world


def fuzz(
    mutations: int,
    seed: int,
    folder: Path,
    *,
    only: tuple[str, ...] = (),
    begin: int = 0,
    note: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """`mutations` over all kinds of files (or `only` some), from number `begin` on, in `folder`."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    for name in (
        "archsearch.cli",
        "archsearch.pipeline.search",
        "archsearch.pipeline.estimate",
        "archsearch.report.page",
        "optuna",
        "sklearn.gaussian_process",
        "pandas",
        "transformers",
        "archsearch.text.prompts",
    ):
        __import__(name)
    world, rows = make_world(folder), []
    cases = [case for case in CASES if not only or case.name in only]
    for number in range(begin, mutations):
        case = cases[number % len(cases)]
        rng = random.Random(f"{seed} {case.name} {number}")
        files = sorted(path for pattern in case.files for path in world.glob(pattern))
        row = _one(case, rng.choice(files), world, number, rng)
        rows.append(row)
        note(row)
    return rows


_bases: dict[tuple[str, ...], tuple[str, str]] = {}


def _one(case: Case, path: Path, world: Path, number: int, rng: random.Random) -> Row:
    """One mutation; the file is as it was afterwards."""
    name = path.relative_to(world)
    command = case.command(name)
    if command not in _bases:
        code, out, err = run(world, command)
        assert code == 0, (command, err)
        _bases[command] = out, err
        shutil.rmtree(world / "runs" / "new", ignore_errors=True)
    before = path.read_bytes()
    after, done, number_lost = mutated(path, rng)
    kept = (
        {each: each.read_bytes() for each in world.glob("runs/a/**/*") if each.is_file()}
        if case.name == "run"
        else {}
    )
    path.write_bytes(after)
    code, out, err = run(world, command)
    outcome = outcome_of(code, out, err, _bases[command], number_lost)
    shutil.rmtree(world / "runs" / "new", ignore_errors=True)
    path.write_bytes(before)
    for each, content in kept.items():
        if not each.exists() or each.read_bytes() != content:
            each.write_bytes(content)
    said = err.strip().splitlines()
    return Row(case.name, str(name), number, done, outcome, said[-1][:300] if said else "")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mutations", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", action="append", default=[], choices=[case.name for case in CASES]
    )
    parser.add_argument("--output", type=Path, help="where mutations.csv goes; a begun one goes on")
    arguments = parser.parse_args()
    path = arguments.output / "mutations.csv" if arguments.output else None
    known = _known(path) if path is not None and path.exists() else []

    def note(row: Row) -> None:
        if row.outcome in FAULTS:
            print(
                f"{row.outcome}: {row.file} ({row.number}): {row.mutation!a}: {row.line!a}",
                flush=True,
            )
        if row.number % 100 == 99:
            print(f"{row.number + 1} of {arguments.mutations}", flush=True)
        if path is not None:
            _keep(path, row)

    with tempfile.TemporaryDirectory(prefix="archsearch-fuzz-") as folder:
        rows = known + fuzz(
            arguments.mutations,
            arguments.seed,
            Path(folder),
            only=tuple(arguments.only),
            begin=known[-1].number + 1 if known else 0,
            note=note,
        )
    for name in dict.fromkeys(row.case for row in rows):
        counts = collections.Counter(row.outcome for row in rows if row.case == name)
        print(
            f"{name}: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
        )


def _keep(path: Path, row: Row) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8", newline="") as handle:
        writer = csv.DictWriter(handle, list(Row.__dataclass_fields__), lineterminator="\n")
        if not handle.tell():
            writer.writeheader()
        fields = asdict(row).items()
        writer.writerow(
            {key: str(value).encode(errors="replace").decode() for key, value in fields}
        )


def _known(path: Path) -> list[Row]:
    with path.open(encoding="utf-8", newline="") as handle:
        return [Row(**{**row, "number": int(row["number"])}) for row in csv.DictReader(handle)]


if __name__ == "__main__":
    main()
