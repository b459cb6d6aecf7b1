"""The run folder: what was asked, by which code, and what came out; docs/files.md lists its files.

Every file is written atomically, so a killed process leaves the previous version or the new one."""

from __future__ import annotations

import csv
import itertools
import math
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from archsearch import __version__, files
from archsearch.engine_facts import engine_facts
from archsearch.errors import ArchsearchError
from archsearch.paths import PACKAGE, shown
from archsearch.profiles import installed
from archsearch.records import WRONG_SHAPE, encoded, load
from archsearch.runs.candidate import SCORE_FILE, Candidate
from archsearch.runs.confirmed import CONFIRMED_FILE, Confirmed
from archsearch.search.objective import Score
from archsearch.text.prompt_set import LEAST_HELDOUT

if TYPE_CHECKING:
    from pandas import DataFrame

SCHEMA_VERSION: Final = 1
PACKAGES: Final = ("numpy", "optuna", "scikit-learn", "torch", "transformers", "vllm")
WORKLOAD_FILE: Final = "workload.json"  # the mix, as --workload takes it (JSON is YAML)
COMPARE_FILE: Final = "compare.json"  # this run beside others: `compare --report` writes it
# what a climb decided and learnt: runs.state writes it, report reads it
RUNGS_FILE: Final = "rungs.json"
# Arguments that a continued run may change: they say how far to go, not what is searched.
FREE_ARGUMENTS: Final = "trials confirm finalists confirm_prompts time_budget_s top gpu".split()
# Arguments that run folders of earlier versions do not record: nobody can say what they were.
UNRECORDED: Final = ("storage", "sampler", "memory_fraction", "training_budget_s")
_SECTIONS: Final = ("arguments", "code", "packages", "device", "profile", "space")
_NUMBERS: Final = {  # or nothing
    "arguments": ("batch_size", "max_gamma", "temperature", "tensor_parallel", "trials"),
    "device": ("memory_bytes", "threads"),
}
_REQUIRED: Final = ("schema_version", "created", *_SECTIONS, "seed")


@dataclass(frozen=True)
class Run:
    """A run folder that exists. `info` is what run.yaml holds."""

    path: Path
    info: dict[str, Any] = field(repr=False)

    @property
    def arguments(self) -> dict[str, Any]:
        """What the search was asked, by option."""
        return self.info["arguments"]

    @property
    def device(self) -> str:
        """Key of the searched device; "" where that is not written down."""
        return str(self.info["device"].get("key", ""))

    @property
    def on_cpu(self) -> bool:
        """Whether that is a CPU."""
        return self.info["device"].get("kind") == "cpu"

    @property
    def profile(self) -> dict[str, Any]:
        """Where its latencies come from: `folder`, `hash`, `dtype`, ..."""
        return self.info["profile"]

    @property
    def dtype(self) -> str:
        """Its precision; "" where that is not written down."""
        return str(self.profile.get("dtype") or "")

    @property
    def priced_as(self) -> dict[str, Any]:
        """How its engine is to run, as `export.engines.Priced` says it; "" for nothing."""
        asked, found = self.arguments, {"quantise": self.profile.get("quantise")}
        found |= {"drafts": asked.get("draft_dtype"), "switches": asked.get("engine_options")}
        words = {name: value or "" for name, value in found.items()}
        samples = engine_facts(asked.get("engine")).samples(asked.get("engine_version"))
        return {**words, "temperature": self.temperature, "samples": samples}

    @property
    def temperature(self) -> float:
        """Of its requests; of a mix the highest of its parts."""
        mix, asked = self.path / WORKLOAD_FILE, [self.arguments]
        if mix.is_file():
            asked += files.read_json(mix, "workload")["parts"]
        return max(float(each.get("temperature") or 0.0) for each in asked)

    @property
    def draft_dtype(self) -> str | None:
        """The precision of drafts that was asked for in an engine on GGUF files."""
        gguf = engine_facts(self.arguments.get("engine")).gguf
        return self.arguments.get("draft_dtype") if gguf else None

    @property
    def trials_file(self) -> Path:
        """trials.csv."""
        return self.path / "trials.csv"

    @property
    def storage_file(self) -> Path:
        """The journal of its studies."""
        return self.path / "journal.log"

    @property
    def report_file(self) -> Path:
        """report.html."""
        return self.path / "report.html"

    def best_dir(self, rank: int) -> Path:
        """The folder of a rank, there or not."""
        return self.path / "best" / str(rank)

    def ranks(self) -> list[int]:
        """Ranks that hold a score, ascending."""
        folder = self.path / "best"
        names = (entry.name for entry in folder.iterdir()) if folder.is_dir() else ()
        return sorted(
            int(name) for name in names if name.isdigit() and (folder / name / SCORE_FILE).is_file()
        )

    # -- writing

    def write_trials(self, rows: Sequence[Mapping[str, object]]) -> None:
        """trials.csv; its columns: those of all rows, in the order in which they appear."""
        text = StringIO()
        columns = dict.fromkeys(name for row in rows for name in row)
        table = csv.DictWriter(text, columns, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
        files.write_text(self.trials_file, text.getvalue())

    def write_best(
        self,
        score: Score,
        config: Mapping[str, object] | None = None,
        speculative_config: Mapping[str, object] | None = None,
    ) -> Path:
        """best/<rank>/ of a ranked score; the folder.

        Where another shape held this rank before, its folder is renamed to best/replaced-<n>:
        weights and measurements of one shape must neither be lost nor pass for another's. Raises
        ValueError for a score without a rank.
        """
        if score.rank is None:
            raise ValueError("the score has no rank")
        folder = self.best_dir(score.rank)
        if (folder / SCORE_FILE).is_file():
            before = Score.from_dict(files.read_json(folder / SCORE_FILE, "score"))
            if (before.architecture, before.family) != (score.architecture, score.family):
                _set_aside(folder)
        files.write_json(folder / SCORE_FILE, score.to_dict())
        if config is not None:
            files.write_json(folder / "config.json", config)
        if speculative_config is not None:
            files.write_json(folder / "speculative_config.json", speculative_config)
        return folder

    def drop_rank(self, rank: int) -> None:
        """Remove best/<rank>/; one that holds weights or measurements is renamed to
        best/replaced-<n>."""
        folder = self.best_dir(rank)
        written = {SCORE_FILE, "config.json", "speculative_config.json"}
        if {path.name for path in folder.iterdir()} <= written:
            shutil.rmtree(folder)
        else:
            _set_aside(folder)

    # -- reading

    def score(self, rank: int) -> Score:
        """The score at `rank`; ArchsearchError names the ranks that exist."""
        path = self.best_dir(rank) / SCORE_FILE
        if not path.is_file():
            there = ", ".join(map(str, self.ranks())) or "none yet: the search has not finished"
            raise ArchsearchError(f"run {self.path} has no rank {rank}; ranks: {there}")
        return Score.from_dict(files.read_json(path, "score"))

    def candidate(self, rank: int) -> Candidate:
        """The candidate at `rank`; raises as `score`."""
        return Candidate(replace(self.score(rank), rank=rank), self.best_dir(rank))

    def scores(self) -> list[Score]:
        """The scores of all ranks, best first. Raises ArchsearchError for a file that cannot be
        read."""
        return [self.score(rank) for rank in self.ranks()]

    def confirmed(self, rank: int) -> Confirmed | None:
        """confirmed.json of a rank; None where it has not been confirmed, or was trained further
        since. Raises ArchsearchError for a broken file."""
        found = load(self.best_dir(rank) / CONFIRMED_FILE, "confirmation", Confirmed)
        return None if found is None or found.is_stale(self.score(rank).alpha) else found

    def decided(self, rank: int) -> float | None:
        """The confirmed speed-up of a rank; None where it was not confirmed, that decides nothing,
        or its file is broken."""
        try:
            found = self.confirmed(rank)
        except WRONG_SHAPE:
            return None
        return None if found is None or found.undecided else found.speedup.value

    def trial_rows(self, state: str = "") -> list[dict[str, str | None]]:
        """trials.csv as written, of one `state` where asked; None where a row has no value. Raises
        ArchsearchError for a file that is no table."""
        if not self.trials_file.is_file():
            return []
        try:
            rows = [
                {k: v or None for k, v in row.items()} for row in files.csv_rows(self.trials_file)
            ]
        except (csv.Error, ValueError) as error:
            raise ArchsearchError(f"{self.trials_file} is no table of trials: {error}") from error
        return [row for row in rows if not state or row.get("state") == state]

    def trials(self) -> DataFrame:
        """trials.csv as a table, its columns as in docs/files.md; empty before the first write."""
        import pandas as pd

        return pd.read_csv(self.trials_file) if self.trial_rows() else pd.DataFrame({"state": []})

    def summary_row(self) -> tuple[str, ...]:
        """A line of `archsearch list runs`: path, target, device, complete trials, best predicted
        and confirmed speed-up."""
        target, complete = self.arguments.get("target", ""), len(self.trial_rows("COMPLETE"))
        asked = (str(shown(self.path)), str(target), self.device, str(complete))
        try:
            best = max((score.speedup.value for score in self.scores()), default=None)
            ran = [each for each in map(self.confirmed, self.ranks()) if each is not None]
        except WRONG_SHAPE:  # one damaged file must not hide the other runs
            return (*asked, "broken", "broken")
        found = [each.speedup.value for each in ran if each.undecided is None]
        measured = f"{max(found):.2f}x" if found else "not decided" if ran else "no"
        return (*asked, "none yet" if best is None else f"{best:.2f}x", measured)


def create_run(
    base: Path,
    arguments: Mapping[str, object],
    *,
    space: Mapping[str, object],
    device: Mapping[str, object] | None = None,
    profile: Mapping[str, object] | None = None,
    path: Path | None = None,
) -> Run:
    """A new run folder with its run.yaml.

    `path`: the folder itself (--run); otherwise <base>/<UTC time>-<target>. `profile`: {"folder",
    "hash"}. Values must be plain (text, numbers, lists, mappings); Paths become text. Raises
    ArchsearchError where a run is there already, or the folder cannot be made.
    """
    import yaml

    if path is not None and (path / "run.yaml").exists():
        raise ArchsearchError(
            f"{path} already holds a run; continue it with the same arguments or choose another"
            " --run"
        )
    target = Path(str(arguments.get("target", ""))).name
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", target).strip("-.") or "run"
    folder = path or _new_folder(base, f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{slug}")
    info = {
        "schema_version": SCHEMA_VERSION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "arguments": encoded(arguments),
        "code": {"version": __version__, "commit": git_commit()},
        "packages": {
            "python": platform.python_version(),
            **{name: version for name in PACKAGES if (version := installed(name))},
        },
        "device": encoded(device or {}),
        "profile": encoded(profile or {}),
        "space": encoded(space),
        "seed": arguments.get("seed", 0),
        "heldout_least": LEAST_HELDOUT,  # the rule by which prompts were kept apart
    }
    files.write_text(folder / "run.yaml", yaml.safe_dump(info, sort_keys=False, allow_unicode=True))
    return Run(folder, info)


def _new_folder(base: Path, name: str) -> Path:
    for number in itertools.count(1):
        folder = base / (name if number == 1 else f"{name}-{number}")
        with files.writing(folder, "choose a folder you can write to"), suppress(FileExistsError):
            folder.mkdir(parents=True)
            break
    return folder


def open_run(path: Path) -> Run:
    """The run in `path`. ArchsearchError where there is none (names those beside it) or its
    run.yaml is broken."""
    run_file = path / "run.yaml"
    if not run_file.is_file():
        found = [run.path.name for run in list_runs(path.parent)]
        beside = (
            f"runs in {path.parent}: {', '.join(found[:5])}"
            if found
            else "make one with: archsearch search"
        )
        what = "is no run folder (run.yaml is missing)" if path.is_dir() else "does not exist"
        raise ArchsearchError(f"run {path} {what}; {beside}")
    try:
        info = files.read_yaml(run_file, "the run's file")
    except ArchsearchError as error:
        raise ArchsearchError(f"{error}; restore it or start a new run") from error
    if not isinstance(info, dict):
        raise _broken(run_file, "it holds no fields")
    schema = info.get("schema_version")
    if schema not in (SCHEMA_VERSION, None):  # before anything else of it is used
        code = info.get("code")
        version = code.get("version") if isinstance(code, Mapping) else None
        raise ArchsearchError(
            f"{run_file} has schema version {schema}, written by archsearch"
            f" {version or 'of an unknown version'}; archsearch {__version__} reads schema version"
            f" {SCHEMA_VERSION}: use the version that wrote it, or start a new run"
        )
    if missing := [key for key in _REQUIRED if key not in info]:
        raise _broken(run_file, f"{', '.join(missing)} missing")
    if wrong := [key for key in _SECTIONS if not isinstance(info[key], dict)]:
        raise _broken(run_file, f"{wrong[0]} holds no fields")
    for section, names in _NUMBERS.items():
        for name in names:
            value = info[section].get(name)
            if not (value is None or (isinstance(value, float | int) and math.isfinite(value))):
                raise _broken(run_file, f"{section}: {name} is no number")
    return Run(path, info)


def _broken(run_file: Path, why: str) -> ArchsearchError:
    return ArchsearchError(f"{run_file} is broken: {why}; restore it or start a new run")


def resume_run(
    path: Path,
    arguments: Mapping[str, object],
    *,
    space: Mapping[str, object],
    profile: Mapping[str, object] | None = None,
) -> Run:
    """Open the run in `path` to continue it; refused, with what differs, where it was asked
    something else.

    FREE_ARGUMENTS may differ, and so may where the profile lies; its hash and the space may not.
    """
    run = open_run(path)
    before, now = run.arguments, encoded(arguments)
    differences = [
        f"{name} was {before.get(name)!r}, now {now.get(name)!r}"
        for name in dict.fromkeys((*before, *now))
        if name not in FREE_ARGUMENTS
        and before.get(name) != now.get(name)
        and (name in before or name not in UNRECORDED)
    ]
    if run.info["space"] != encoded(space):
        differences.append("the search space's file has changed")
    was, current = run.profile.get("hash"), (profile or {}).get("hash")
    if was != current:
        differences.append(f"the profile's hash was {was}, now {current}")
    if differences:
        reasons = "; ".join(differences)
        raise ArchsearchError(
            f"run {path} cannot be continued: {reasons}; use the same arguments or another --run"
        )
    return run


def list_runs(base: Path = Path("runs")) -> list[Run]:
    """Runs in `base`, newest first; folders that are none, and broken ones, are left out."""
    runs = []
    for run_file in base.glob("*/run.yaml"):
        with suppress(ArchsearchError):
            runs.append(open_run(run_file.parent))
    return sorted(runs, key=lambda run: (str(run.info["created"]), run.path.name), reverse=True)


def git_commit() -> str | None:
    """The commit of the checkout this package runs from, "+changes" where it was edited; None
    outside a checkout."""
    root = PACKAGE.parent
    if not (root / ".git").exists():
        return None
    # no tag matches, so the whole hash
    asked = "describe --always --abbrev=40 --exclude=* --dirty=+changes".split()
    command, own = ["git", "-C", str(root), *asked], os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, env=own)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if said.returncode else said.stdout.strip()


def _set_aside(folder: Path) -> None:
    names = (folder.parent / f"replaced-{number}" for number in itertools.count(1))
    folder.rename(next(name for name in names if not name.exists()))
