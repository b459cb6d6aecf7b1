"""What `archsearch profile` was asked, the profile that comes of it, and its known error: the
latency model against drafts that the profile has not seen."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from archsearch.architecture.architecture import Architecture
from archsearch.engine_facts import engine_facts
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.files import ensure_writable_dir
from archsearch.hardware.device import Device
from archsearch.latency.model import LatencyModel
from archsearch.models.targets import TargetRef
from archsearch.pipeline.latency import engine_tables
from archsearch.profiles import ForwardShape, Profile, stack_key
from archsearch.progress import ProgressLine
from archsearch.records import as_data, save
from archsearch.report.terminal.profile import (
    Check,
    CheckErrors,
    CheckRow,
    CpuPace,
    GpuSweeps,
    NoModel,
    Profiled,
)
from archsearch.search.space import SearchSpace

if TYPE_CHECKING:
    from archsearch.profiling.points import Bench


ENGINE_STAND_IN = Architecture(512, 1408, 4, 8, 8, 64, 32000)
"""Used for a target where none was named, or where it is too large to run whole."""


@dataclass(frozen=True)
class ProfileRequest:
    """What `archsearch profile` was asked: `dtypes` empty: the device's best first, then the
    other."""

    gpu: str
    target: Architecture | None
    space: SearchSpace
    dtypes: tuple[str, ...] = ()
    budget_s: float = 300.0
    check: int = 0
    threads: int | None = None
    output: Path | None = None
    batch_size: int = 1
    engine: bool = True
    seed: int = 0
    modes: tuple[str, ...] = ()
    tensor_parallel: int = 1
    allow_busy: bool = False
    engine_name: str = "transformers"
    engine_python: Path | None = None
    target_ref: TargetRef | None = None
    quick: bool = False

    def target_in_engine(self) -> TargetRef:
        """What the engine is profiled with. ArchsearchError where no target was named."""
        if self.target_ref is None:
            raise ArchsearchError(
                f"profiling {self.engine_name} runs a target in it; name one with --target"
            )
        return self.target_ref


# What a check is to reach: median error, a margin, and the share of cases within it.
CPU_GOAL = (0.06, 0.12, 0.80)
GPU_GOAL = (0.05, 0.10, 0.90)


class ProfileRun:
    """A profile that is being measured. Raises ArchsearchError for a profile of another device, or
    a folder that cannot be written."""

    def __init__(self, request: ProfileRequest, device: Device, stack: dict[str, str]) -> None:
        self.request, self.device = request, device
        self.folder = request.output or Path("profiles") / device.key / stack_key(stack)
        ensure_writable_dir(self.folder)
        self.profile = Profile.open(self.folder, device.to_dict(), stack)
        self.before = len(self.profile.rows)
        self.reference = request.target or ENGINE_STAND_IN
        self.drafts = request.space.sample(self.reference, 400, request.seed)
        self.memory = float(device.memory_bytes)
        self.learnt: dict[str, LatencyModel | NoModel] = {}
        self.checks: dict[str, Check] = {}

    def learn(self, bench: Bench, dtype: str, mode: str) -> None:
        """What the latency model makes of the rows of a dtype and mode, and its check."""
        name = dtype if self.device.is_cpu else f"{dtype} {mode}"
        request, engine = self.request, engine_facts(self.request.engine_name)
        try:
            tables = engine_tables(self.profile, self.device, dtype, mode, request.engine_name)
            model = LatencyModel(self.profile, dtype, mode, request.engine_name, None, tables)
        except MissingDataError as error:
            self.learnt[name] = NoModel(str(error))
            return
        self.learnt[name] = model
        if request.check and not engine.gguf:
            self.checks[name] = self._check(bench, name, dtype, mode)

    def _check(self, bench: Bench, name: str, dtype: str, mode: str) -> Check:
        """Measure whole drafts and verification passes that the profile has not seen and
        compare."""
        from archsearch.profiling.cpu_sweep import check_points, measure_points

        request, profile = self.request, self.profile
        # drawn with a seed that moves on, so that no check repeats the last one's shapes
        done = sum(entry.get("checks", 0) for entry in profile.known_error.values())
        unseen = request.space.sample(self.reference, 400, 1_000_003 + request.seed + done)
        model = LatencyModel(profile, dtype, mode)
        before = profile.known_error.get(name, {}).get("checks", 0)
        points = check_points(
            unseen,
            request.target,
            profile,
            dtype,
            request.check,
            seed=before,
            memory_bytes=self.memory,
            mode=mode,
        )
        with ProgressLine(f"check {name}") as line:
            measured = list(measure_points(bench, points, dtype, progress=line))
        rows = []
        for point, row in measured:
            assert point.arch is not None
            shape = ForwardShape(point.arch, point.batch, point.tokens, point.context)
            predicted = model.measured_pass_s(shape, point.cache == "cold")
            rows.append(
                CheckRow(
                    what="verify" if point.arch == request.target else f"draft step, {point.cache}",
                    architecture=point.arch.label(),
                    tokens=point.tokens,
                    context=point.context,
                    measured_s=row.median_s,
                    predicted_s=predicted.value,
                    predicted_std_s=predicted.std,
                    relative_error=predicted.value / row.median_s - 1,
                    noisy=row.noisy,
                )
            )
        goal = CPU_GOAL if self.device.is_cpu else GPU_GOAL
        drafts, passes = (
            _error_summary([row for row in rows if row.what.startswith(what)], goal)
            for what in ("draft step", "verify")
        )
        check = Check(before + 1, drafts, passes, rows)
        known = as_data(check)
        file = self.folder / f"check-{name.replace(' ', '-')}.json"
        save(file, {"dtype": dtype, "mode": mode, **known})
        known.pop("rows")
        profile.known_error[name] = known
        profile.save_header()
        return check

    def summary(self, measured: CpuPace | GpuSweeps) -> Profiled:
        """What `profile_device` returns, with what was `measured` of one kind of device."""
        profile = self.profile
        return Profiled(
            str(self.folder),
            self.device.key,
            len(profile.rows),
            len(profile.rows) - self.before,
            profile.noisy_share,
            measured,
            self.learnt,
            self.checks,
            profile.known_error,
        )


def _error_summary(
    rows: Sequence[CheckRow], goal: tuple[float, float, float]
) -> CheckErrors | None:
    """Over `rows`, and whether `goal` is reached; None of none."""
    if not rows:
        return None
    errors = [abs(row.relative_error) for row in rows]
    within_std = [abs(row.predicted_s - row.measured_s) <= 2 * row.predicted_std_s for row in rows]
    median = statistics.median(errors)
    most, margin, share = goal
    return CheckErrors(
        len(rows),
        median,
        within_10_percent=statistics.fmean(e <= 0.10 for e in errors),
        within_12_percent=statistics.fmean(e <= 0.12 for e in errors),
        within_two_std=statistics.fmean(within_std),
        bias=statistics.median(row.relative_error for row in rows),
        reached=median <= most and statistics.fmean(e <= margin for e in errors) >= share,
    )
