"""kill -9 at random moments over profile, search, worker, climb, train, confirm and export: does
every one resume, is anything half-written, lost, left over or done twice?

    python benchmarks/faults.py [--kills 60] [--seed 0] [--output
    benchmarks/results/2026-11-22-faults]

A tiny random target, a made-up profile of this CPU, everything else as users run it. Each command
runs in a process of its own (a fork, so that importing takes no part in it) and is killed at a
random moment, begun again, killed again, and so on; at the end it runs to its end. After every kill
all files are read; after every end what was recorded before the kills must still be there. One row
a kill goes to kills.csv, one a command to commands.json. All seconds are the process's own on the
processor, its time budgets too: on a busy machine it comes as far as on an idle one. (Linux, where
another process's clock can be read.)
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the tiny world of the tests

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
)
PROMPTS: Final = ("--prompts", "prompts.jsonl", "--answer-tokens", "32")
RANK: Final = (*SEARCH, *PROMPTS, "--trials", "24", "--run", "runs/a")
APPENDED: Final = (
    ".jsonl",
    ".log",
)  # a line at a time: the last may be cut, and is dropped when it is read
EVENTS: Final = "events.jsonl"
IMPORTED: Final = (  # once, before the forks
    "archsearch.cli",
    "archsearch.pipeline.search",
    "archsearch.training.distill",
    "archsearch.engines.transformers.engine",
    "archsearch.pipeline.confirm",
    "optuna",
    "sklearn.ensemble",
)


@dataclass(frozen=True)
class Stage:
    """A command that is killed. `before`: what runs to its end first, once: a command, or what a
    process of its own calls in the folder."""

    name: str
    command: tuple[str, ...]
    before: tuple[tuple[str, ...] | Callable[[], None], ...] = ()


def announced_search() -> None:
    """A search that waits for workers: announced in its storage, nothing scored."""
    from archsearch.pipeline.search import SearchRequest, SearchSession
    from archsearch.pipeline.workers import announce
    from archsearch.workload import WorkloadRequest

    request = SearchRequest(
        "target",
        WorkloadRequest("cpu", context_len=64),
        "tiny.yaml",
        trials=150,
        sampler="random",
        alpha="0.8",
        run=Path("runs/a"),
        workers=1,
    )
    session = SearchSession.start(request)
    announce(session, str(session.run.storage_file))


STAGES: Final = (
    Stage(
        "profile",
        (
            "profile",
            "--gpu",
            "cpu",
            "--space",
            "tiny.yaml",
            "--dtype",
            "float32",
            "--budget",
            "8s",
            "--no-engine",
            "--output",
            "p",
        ),
    ),
    Stage(
        "search",
        (*SEARCH, "--trials", "150", "--sampler", "random", "--alpha", "0.8", "--run", "runs/a"),
    ),
    Stage(
        "worker", ("worker", "--storage", "runs/a/journal.log", "--run", "a"), (announced_search,)
    ),
    Stage(
        "climb",
        (
            *SEARCH,
            *PROMPTS,
            "--trials",
            "24",
            "--confirm",
            "1",
            "--time-budget",
            "60s",
            "--anyway",
            "--run",
            "runs/a",
        ),
    ),
    Stage("train", ("train", "runs/a", "--budget", "6s"), (RANK,)),
    Stage(
        "confirm",
        ("confirm", "runs/a", "--count", "24"),
        (RANK, ("train", "runs/a", "--budget", "3s")),
    ),
    Stage(
        "export",
        ("export", "runs/a", "--output", "p"),
        (RANK, ("train", "runs/a", "--budget", "3s")),
    ),
)


@dataclass
class Kill:
    """One kill. `moment_s`: on the processor after the command began; `written`: files that were
    read; `half`: those that were broken; `newest`: what had been written last."""

    stage: str
    life: int
    number: int
    moment_s: float
    written: int
    half: list[str]
    newest: str


@dataclass
class Outcome:
    """A command after all its kills. `lost`: what was there before a kill and not at the end;
    `twice`: what was done again though it had been finished; `left`: temporary files that stayed;
    `differs`: answers that are not those of the run without a kill."""

    stage: str
    kills: int = 0
    lives: int = 0
    resumed: int = 0
    whole_s: float = 0.0
    half: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (
            self.half or self.lost or self.twice or self.left or self.differs or self.failed
        )


# -- a command in a process of its own
# -------------------------------------------------------------------------------------


def started(folder: Path, command: tuple[str, ...] | Callable[[], None]) -> int:
    """The process of a command, or a call, in `folder`: a fork that has imported everything."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        os.chdir(folder)
        said = os.open(folder / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(said, 1)
        os.dup2(said, 2)
        watch_trainings(folder / EVENTS)
        count_processor_time()
        from archsearch.cli import main

        if callable(command):
            command()
        else:
            main(list(command), standalone_mode=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def count_processor_time() -> None:
    """Let this process's clocks, and with them its time budgets, go only while it has the
    processor."""
    from archsearch.runs.state import StateFile

    time.monotonic = time.perf_counter = time.process_time
    StateFile.__init__.__kwdefaults__["clock"] = time.process_time


def watch_trainings(path: Path) -> None:
    """Write down every training that ends: which, how far, and how many steps of it were made in
    this process."""
    from archsearch.training import distill

    whole, update, counted = distill.distill, distill.TrainingRun._update, [0]

    def counting(run: Any, *rest: Any) -> float:
        counted[0] += 1
        return update(run, *rest)

    def watched(draft: Any, cache: Any, config: Any, **options: Any) -> Any:
        before = counted[0]
        result = whole(draft, cache, config, **options)
        row = {
            "draft": Path(options["checkpoint_dir"]).parent.name,
            "tokens": config.max_tokens,
            "seconds": config.budget_s,
            "reached": result.tokens,
            "steps": counted[0] - before,
            "stopped": result.stopped,
            "spent": result.seconds,
        }
        with path.open("a", encoding="utf-8") as handle:
            handle.write("\n" + json.dumps(row) + "\n")
        return result

    distill.TrainingRun._update = counting  # type: ignore[method-assign]
    distill.distill = watched


def ended(process: int, limit_s: float | None) -> tuple[int | None, float]:
    """(exit status of a process, None where it was killed after `limit_s` on the processor; those
    seconds)."""
    while os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if limit_s is not None and processor_s(process) >= limit_s:
            os.kill(process, signal.SIGKILL)
            break
        time.sleep(0.002)
    _, status, usage = os.wait4(process, 0)
    code = os.waitstatus_to_exitcode(status)
    return None if code == -signal.SIGKILL else code, usage.ru_utime + usage.ru_stime


def processor_s(process: int) -> float:
    """Seconds that another process has had on the processor."""
    return time.clock_gettime(
        (~process << 3) | 2
    )  # Linux's name for its CPU clock: clock_getcpuclockid(3)


# -- what lies in a folder
# ------------------------------------------------------------------------------------------------


def files_of(folder: Path) -> list[Path]:
    """What commands have written: not the world that they began with, nor what this script
    writes."""
    roots = (folder / "runs", folder / "p")
    return [path for root in roots for path in sorted(root.rglob("*")) if path.is_file()]


def half_written(path: Path) -> bool:
    """Whether a file cannot be read as what its name says."""
    reader = READERS.get(path.suffix)
    if reader is None:
        return path.stat().st_size == 0
    try:
        reader(path)
    except Exception:  # noqa: BLE001 - whatever a reader raises
        return True
    return False


def _lines(path: Path) -> list[Any]:
    """JSON lines, without a last one that was cut."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _table(path: Path) -> None:
    with path.open(encoding="utf-8", newline="") as handle:
        rows = list(csv.reader(handle))
    if len({len(row) for row in rows}) != 1 or not path.read_text(encoding="utf-8").endswith("\n"):
        raise ValueError("rows of unlike length")


def _ends(words: str) -> Callable[[Path], None]:
    def check(path: Path) -> None:
        if not path.read_text(encoding="utf-8").rstrip().endswith(words):
            raise ValueError("cut")

    return check


def _tensors(path: Path) -> None:
    from safetensors.torch import load_file

    load_file(path)


def _state(path: Path) -> None:
    import torch

    torch.load(path, map_location="cpu", weights_only=True)


def _arrays(path: Path) -> None:
    import numpy as np

    with np.load(path) as data:
        for name in data.files:
            data[name]


def _yaml(path: Path) -> None:
    import yaml

    if not isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict):
        raise ValueError("no fields")


READERS: Final[dict[str, Callable[[Path], Any]]] = {
    ".json": lambda path: json.loads(path.read_text(encoding="utf-8")),
    ".jsonl": _lines,
    ".log": _lines,
    ".csv": _table,
    ".html": _ends("</html>"),
    ".svg": _ends("</svg>"),
    ".safetensors": _tensors,
    ".pt": _state,
    ".npz": _arrays,
    ".yaml": _yaml,
}


def is_temporary(path: Path) -> bool:
    names = (
        path.name,
        *(each.name for each in path.parents),
    )  # a file, or a folder that is made aside
    return any(
        re.match(r"\..*-\d+-\w{8}", name) for name in names
    )  # as archsearch.files names them


def records(folder: Path) -> set[str]:
    """What must not get lost: rows of the profile, scored trials, drafts that were trained,
    confirmations."""
    found = set()
    for path in folder.glob("p/rows.jsonl"):
        found |= {json.dumps(row, sort_keys=True) for row in _lines(path)}
    for path in folder.glob("runs/*/journal.log"):
        rows = [
            row for row in _lines(path) if row.get("op_code") == 4 and row.get("state") == 1
        ]  # a finished trial
        found |= {
            json.dumps([row.get("params"), row.get("value"), row.get("values")], sort_keys=True)
            for row in rows
        }
    for path in folder.glob("runs/*/finalists/*/curve.json"):
        found.add(f"{path.parent.name} was trained a little")
    for path in folder.glob("runs/*/finalists/*/training.json"):
        found.add(f"{path.parent.name} was trained")
    for path in folder.glob("runs/*/best/*/confirmed*.json"):
        found.add(f"{path.relative_to(folder)}")
    return found


def _trainings(path: Path) -> list[dict[str, Any]]:
    """What `watch_trainings` wrote, without lines that a kill cut."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def done_twice(folder: Path) -> list[str]:
    """Rows and trials that are there twice, and trainings that went on although they had reached
    their end before."""
    from archsearch.profiles import Measurement

    found = []
    for path in folder.glob("p/rows.jsonl"):  # one that something disturbed is measured again
        rows = map(Measurement.from_dict, _lines(path))
        keys = [row.key for row in rows if not (row.grossly_noisy or row.throttled)]
        found += [f"row {key}" for key in set(keys) if keys.count(key) > 1]
    for path in folder.glob("runs/*/trials.csv"):
        with path.open(encoding="utf-8", newline="") as handle:
            numbers = [row["number"] for row in csv.DictReader(handle)]
        found += [f"trial {number}" for number in {n for n in numbers if numbers.count(n) > 1}]
    finished: dict[tuple[str, Any], dict[str, Any]] = {}
    for row in _trainings(folder / EVENTS):
        key = (row["draft"], row["tokens"] if row["tokens"] is not None else f"{row['seconds']} s")
        if key in finished and row["steps"] and row["reached"] <= finished[key]["reached"]:
            found.append(f"{row['draft']} to {key[1]}: {row['steps']} steps more")
        reached = row["tokens"] is not None and row["reached"] >= row["tokens"]
        if reached or (row["tokens"] is None and row["spent"] >= row["seconds"]) or row["stopped"]:
            finished[key] = row
    return found


# -- kills
# --------------------------------------------------------------------------------------------------


def run_whole(folder: Path, command: tuple[str, ...] | Callable[[], None]) -> float:
    """Run a command to its end; its seconds on the processor. RuntimeError, with what it said,
    where it fails."""
    code, seconds = ended(started(folder, command), None)
    if code != 0:
        said = (
            (folder / "said.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        )
        raise RuntimeError(f"exit status {code}: {said[-1] if said else ''}")
    return seconds


def answer_of(folder: Path) -> Any:
    """The shapes that a search of its whole space found, with their scores: the same however often
    it was killed.

    Their order is not: a sampler that is started again draws anew.
    """
    path = folder / "runs" / "a" / "trials.csv"
    if not path.exists():
        return None
    with path.open(encoding="utf-8", newline="") as handle:
        rows = [sorted((row | {"number": ""}).items()) for row in csv.DictReader(handle)]
    return sorted(rows)


def torture(
    stage: Stage, world: Path, kills: int, rng: random.Random, note: Callable[[Kill], None]
) -> Outcome:
    """Kill a stage's command `kills` times, in as many lives as that takes; a life goes on until
    its command has ended."""
    outcome = Outcome(stage.name)
    base, whole = world.parent / f"{stage.name}-base", world.parent / f"{stage.name}-whole"
    shutil.copytree(world, base)
    for command in stage.before:
        run_whole(base, command)
    shutil.copytree(base, whole)
    outcome.whole_s = run_whole(whole, stage.command)
    while outcome.kills < kills:
        outcome.lives += 1
        folder = world.parent / f"{stage.name}-{outcome.lives}"
        shutil.copytree(base, folder)
        known = _life(stage, folder, kills, rng, outcome, note)
        outcome.lost += sorted(known - records(folder))
        outcome.twice += done_twice(folder)
        outcome.left += [
            str(path.relative_to(folder)) for path in folder.rglob("*") if is_temporary(path)
        ]
        if stage.name == "search" and answer_of(folder) != answer_of(whole):
            outcome.differs.append(f"life {outcome.lives}: trials.csv")
        if stage.name == "worker" and records(folder) != records(whole):
            outcome.differs.append(f"life {outcome.lives}: shapes in the journal")
        shutil.rmtree(folder)
    shutil.rmtree(base)
    shutil.rmtree(whole)
    return outcome


def _life(
    stage: Stage,
    folder: Path,
    kills: int,
    rng: random.Random,
    outcome: Outcome,
    note: Callable[[Kill], None],
) -> set[str]:
    """One life of a stage; what was recorded before its kills."""
    known: set[str] = set()
    while outcome.kills < kills:
        moment = rng.uniform(0.0, 0.6 * outcome.whole_s)
        code, _ = ended(started(folder, stage.command), moment)
        if code is not None:
            break
        outcome.kills += 1
        written = [path for path in files_of(folder) if not is_temporary(path)]
        half = [
            str(path.relative_to(folder))
            for path in written
            if path.name != ".lock" and half_written(path)
        ]
        outcome.half += half
        known |= records(folder)
        newest = max(written, key=lambda path: path.stat().st_mtime, default=None)
        said = "" if newest is None else str(newest.relative_to(folder))
        note(
            Kill(
                stage.name, outcome.lives, outcome.kills, round(moment, 3), len(written), half, said
            )
        )
    else:
        code = None
    try:
        if code is None:
            run_whole(folder, stage.command)
        elif code:
            raise RuntimeError(
                f"exit status {code}:"
                f" {(folder / 'said.txt').read_text(errors='replace').strip()[-300:]}"
            )
        outcome.resumed += 1
    except RuntimeError as error:
        outcome.failed.append(f"life {outcome.lives}: {error}")
    return known


def faults(
    kills: int,
    seed: int,
    folder: Path,
    *,
    only: tuple[str, ...] = (),
    note: Callable[[Kill], None] = lambda kill: None,
) -> list[Outcome]:
    """`kills` kills over all stages (or `only` some), in `folder`."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    from tests.doubles.world import make_world

    for name in IMPORTED:
        __import__(name)
    stages = [stage for stage in STAGES if not only or stage.name in only]
    world = make_world(folder / "world")
    shares = [
        kills // len(stages) + (number < kills % len(stages)) for number in range(len(stages))
    ]
    return [
        torture(stage, world, share, random.Random(f"{seed} {stage.name}"), note)
        for stage, share in zip(stages, shares, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", action="append", default=[], choices=[stage.name for stage in STAGES]
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks" / "results" / "2026-11-24-faults"
    )
    arguments = parser.parse_args()
    rows: list[Kill] = []

    def note(kill: Kill) -> None:
        rows.append(kill)
        print(
            f"{kill.stage:8} life {kill.life}, kill {kill.number} after {kill.moment_s:6.2f} s;"
            f" last written {kill.newest}",
            flush=True,
        )

    with tempfile.TemporaryDirectory(prefix="archsearch-faults-") as folder:
        outcomes = faults(
            arguments.kills, arguments.seed, Path(folder), only=tuple(arguments.only), note=note
        )
    arguments.output.mkdir(parents=True, exist_ok=True)
    with (arguments.output / "kills.csv").open("w", encoding="utf-8", newline="") as handle:
        writer = csv.DictWriter(handle, list(Kill.__dataclass_fields__), lineterminator="\n")
        writer.writeheader()
        writer.writerows({**asdict(kill), "half": " ".join(kill.half)} for kill in rows)
    (arguments.output / "commands.json").write_text(
        json.dumps([asdict(outcome) for outcome in outcomes], indent=2) + "\n"
    )
    for outcome in outcomes:
        print(
            f"{outcome.stage}: {outcome.kills} kills in {outcome.lives} lives, {outcome.resumed}"
            f" resumed; {'clean' if outcome.clean else asdict(outcome)}"
        )


if __name__ == "__main__":
    main()
