"""What run folders measured of drafts, without reading all of them at every search.

Beside the runs lies `.known.json`: of each run what it was asked and what its drafts were measured
at, with a stamp of the files this was read from. A run whose files have changed is read again; the
index itself can be deleted at any time.
"""

from __future__ import annotations

import json
import logging
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from archsearch.acceptance.measured import Trace, alpha
from archsearch.architecture.architecture import Architecture
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.files import read_json, read_yaml, write_text
from archsearch.records import Misfit, as_data, from_data
from archsearch.text.likeness import SKETCH_FILE, TextSketch, load_sketch

log = logging.getLogger(__name__)
FORMAT: Final = 3
INDEX: Final = ".known.json"
# what an observation's context needs
ARGUMENTS: Final = ("target", "prompts", "heldout", "context", "domain", "temperature")
_STAMPED: Final = (
    "run.yaml",
    SKETCH_FILE,
    "finalists/*/training.json",
    "finalists/*/trace.npz",
    "best/*/confirmed.json",
    "best/*/score.json",
    "best/*/training.json",
)


@dataclass(frozen=True, slots=True)
class DraftFact:
    """What one folder of a run says of a draft. `greedy`: measured by a greedy trace, not at the
    run's temperature; `coverage`: share of the text that its head's rows cover, where known."""

    architecture: Architecture
    alpha: Estimate
    greedy: bool
    trained_tokens: float | None
    coverage: float | None


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a run was asked (ARGUMENTS), its drafts, the sketch of its prompts, None where it kept
    none, and which of its folders could not be read, with the reason."""

    arguments: dict[str, object]
    drafts: tuple[DraftFact, ...]
    text: TextSketch | None = None
    broken: tuple[str, ...] = ()


def runs_under(root: Path) -> dict[Path, RunFacts]:
    """The facts of every run folder under `root`, by folder, in the order of their names."""
    known, found, fresh = _load(root / INDEX), {}, {}
    for run_file in sorted(root.glob("*/run.yaml")):
        run = run_file.parent
        stamp, entry = _stamp(run), known.get(run.name)
        facts = _stored(entry) if entry is not None and entry.get("stamp") == stamp else None
        found[run] = facts if facts is not None else read_run(run)
        for words in found[run].broken:
            log.warning("an earlier run cannot be read and is left out: %s/%s", run, words)
        fresh[run.name] = {"stamp": stamp, **as_data(found[run])}
    if fresh != known:
        try:
            # In one line: the indented form of hundreds of runs takes longer to write and to read
            # than the runs' stamps.
            write_text(
                root / INDEX,
                json.dumps({"format": FORMAT, "runs": fresh}, ensure_ascii=False) + "\n",
            )
        except ArchsearchError:
            pass  # a folder that cannot be written to is read the long way next time
    return found


def read_run(run: Path) -> RunFacts:
    """Read a run folder. What is broken or of another version is left out and named."""
    drafts, broken = [], []
    try:
        arguments = _arguments(run / "run.yaml")
    except ArchsearchError as error:
        arguments, broken = {}, [f"run.yaml ({error})"]
    for read, pattern in (
        (_finalist, "finalists/*/training.json"),
        (_confirmed, "best/[0-9]*/confirmed.json"),
    ):
        for path in sorted(run.glob(pattern)):
            try:
                drafts.append(read(path.parent))
            except (ArchsearchError, KeyError, TypeError, ValueError, AttributeError, OSError) as e:
                name = path.parent.relative_to(run).as_posix()
                broken.append(f"{name} ({Misfit.at('', e)})")
    sketch = load_sketch(run) if drafts else None
    return RunFacts(arguments, tuple(drafts), sketch, tuple(broken))


def _load(path: Path) -> dict[str, Any]:
    try:
        data = read_json(path, "index of the runs")
        runs = data["runs"] if data["format"] == FORMAT else {}
    except (ArchsearchError, KeyError, TypeError):
        return {}
    return runs if isinstance(runs, dict) else {}


def _stored(entry: Mapping[str, object]) -> RunFacts | None:
    try:
        return from_data(RunFacts, entry)
    except ArchsearchError:
        return None


def _stamp(run: Path) -> list[list[object]]:
    """[name, time of the last change, bytes] of every file that is read; comes back from JSON as it
    is."""
    stamp = []
    for pattern in _STAMPED:
        for path in sorted(run.glob(pattern)):
            status = path.stat()
            stamp.append([path.relative_to(run).as_posix(), status.st_mtime_ns, status.st_size])
    return stamp


def _arguments(run_file: Path) -> dict[str, object]:
    info = read_yaml(run_file, "the run's file")
    arguments = info.get("arguments") if isinstance(info, dict) else None
    return {name: arguments.get(name) for name in ARGUMENTS} if isinstance(arguments, dict) else {}


def _fact(
    arch: Architecture, alpha: Estimate, training: Mapping[str, Any], *, greedy: bool
) -> DraftFact:
    share = training.get("vocabulary_coverage")
    coverage = min(float(share), 1.0) if arch.trimmed and share is not None else None
    tokens = float(training["tokens"]) if training.get("tokens") else None
    return DraftFact(arch, alpha, greedy, tokens, coverage)


def _finalist(folder: Path) -> DraftFact:
    """alpha of a trained finalist: greedy agreement on the held-out text."""
    training = read_json(folder / "training.json", "training record")
    arch = Architecture.from_dict(training["architecture"])
    trace = folder / "trace.npz"
    if not zipfile.is_zipfile(trace):  # numpy leaks the open file of half an archive
        raise ArchsearchError(f"{trace} is missing or broken; measure the draft again")
    return _fact(arch, alpha(Trace.load(trace)), training, greedy=True)


def _confirmed(folder: Path) -> DraftFact:
    """alpha that the engine counted, at the run's temperature."""
    confirmed = read_json(folder / "confirmed.json", "confirmation")
    arch = Architecture.from_dict(read_json(folder / "score.json", "score")["architecture"])
    record = folder / "training.json"
    training = read_json(record, "training record") if record.is_file() else {}
    value, std = (float(confirmed["alpha"][name]) for name in ("value", "std"))
    return _fact(arch, Estimate(value, std, "measured"), training, greedy=False)
