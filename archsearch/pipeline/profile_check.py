"""The latency model against whole drafts that the profile has not seen: its known error."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archsearch.architecture.architecture import Architecture
from archsearch.engine_facts import engine_facts
from archsearch.errors import MissingDataError
from archsearch.files import ensure_writable_dir, write_json
from archsearch.hardware.device import Device
from archsearch.latency.model import LatencyModel
from archsearch.pipeline.profile_request import ENGINE_STAND_IN, ProfileRequest, sample_space
from archsearch.profiles import ForwardShape, Profile, stack_key
from archsearch.progress import ProgressLine

if TYPE_CHECKING:
    from archsearch.profiling.points import Bench


# What a check is to reach: median error, a margin, and the share of cases within it.
CPU_GOAL = (0.06, 0.12, 0.80)
GPU_GOAL = (0.05, 0.10, 0.90)


class ProfileRun:
    """A profile that is being measured: what is asked, the drafts that it covers, and what comes of
    it. Raises ArchsearchError for a profile of another device, or a folder that cannot be
    written."""

    def __init__(self, request: ProfileRequest, device: Device, stack: dict[str, str]) -> None:
        self.request, self.device = request, device
        self.folder = request.output or Path("profiles") / device.key / stack_key(stack)
        ensure_writable_dir(self.folder)
        self.profile = Profile.open(self.folder, device.to_dict(), stack)
        self.before = len(self.profile.rows)
        self.reference = request.target or ENGINE_STAND_IN
        self.drafts = sample_space(request.space, self.reference, 400, request.seed)
        self.memory = float(device.memory_bytes)
        self.learnt: dict[str, Any] = {}
        self.checks: dict[str, Any] = {}

    def learn(self, bench: Bench, dtype: str, mode: str) -> None:
        """What the latency model makes of the rows of a dtype and mode, and its check."""
        name = f"{dtype} {mode}" if self.device.kind == "gpu" else dtype
        request, engine = self.request, engine_facts(self.request.engine_name)
        try:
            model = LatencyModel(self.profile, dtype, mode, request.engine_name)
        except MissingDataError as error:
            self.learnt[name] = {"missing": str(error)}
            return
        self.learnt[name] = model.summary()
        if request.check and not engine.gguf:
            # drawn with a seed that moves on, so that no check repeats the last one's shapes
            done = sum(entry.get("checks", 0) for entry in self.profile.known_error.values())
            seed = 1_000_003 + request.seed + done
            unseen = sample_space(request.space, self.reference, 400, seed)
            target, count = request.target, request.check
            self.checks[name] = check_profile(
                bench, self.profile, unseen, target, dtype, count, self.memory, mode=mode
            )

    def summary(self, **more: Any) -> dict[str, Any]:
        """What `profile_device` returns, with `more` of one kind of device."""
        return {
            "folder": str(self.folder),
            "device": self.device.key,
            "rows": len(self.profile.rows),
            "new_rows": len(self.profile.rows) - self.before,
            "noisy_share": self.profile.noisy_share,
            **more,
            "models": self.learnt,
            "checks": self.checks,
            "known_error": self.profile.known_error,
        }


def check_profile(
    bench: Bench,
    profile: Profile,
    drafts: list[Architecture],
    target: Architecture | None,
    dtype: str,
    count: int,
    memory: float,
    *,
    mode: str = "eager",
) -> dict[str, Any]:
    """Measure whole drafts (and verification passes) that the profile has not seen and compare;
    store it as the known error."""
    from archsearch.profiling.cpu_sweep import check_points, measure_points

    gpu = profile.device.get("kind") == "gpu"
    name = f"{dtype} {mode}" if gpu else dtype
    model = LatencyModel(profile, dtype, mode)
    before = profile.known_error.get(name, {})
    points = check_points(
        drafts,
        target,
        profile,
        dtype,
        count,
        seed=before.get("checks", 0),
        memory_bytes=memory,
        mode=mode,
    )
    rows: list[dict[str, Any]] = []
    with ProgressLine(f"check {name}") as line:
        measured = list(measure_points(bench, points, dtype, progress=line))
    for point, row in measured:
        assert point.arch is not None
        shape = ForwardShape(point.arch, point.batch, point.tokens, point.context)
        predicted = model.measured_pass_s(shape, point.cache == "cold")
        rows.append(
            {
                "what": "verify" if point.arch == target else f"draft step, {point.cache}",
                "architecture": point.arch.label(),
                "tokens": point.tokens,
                "context": point.context,
                "measured_s": row.median_s,
                "predicted_s": predicted.value,
                "predicted_std_s": predicted.std,
                "relative_error": predicted.value / row.median_s - 1,
                "noisy": row.noisy,
            }
        )
    goal = GPU_GOAL if gpu else CPU_GOAL
    groups = {
        what: _error_summary([row for row in rows if row["what"].startswith(what)], goal)
        for what in ("draft step", "verify")
    }
    result = {
        "checks": before.get("checks", 0) + 1,
        **{what: summary for what, summary in groups.items() if summary},
    }
    profile.known_error[name] = result
    profile.save_header()
    file = Path(str(profile.folder)) / f"check-{name.replace(' ', '-')}.json"
    write_json(file, {"dtype": dtype, "mode": mode, **result, "rows": rows})
    return {**result, "rows": rows}


def _error_summary(rows: list[dict[str, Any]], goal: tuple[float, float, float]) -> dict[str, Any]:
    """Median absolute error, shares within 10 %, 12 % and two std, whether `goal` is reached; empty
    for no rows."""
    if not rows:
        return {}
    errors = [abs(row["relative_error"]) for row in rows]
    within_std = [
        abs(row["predicted_s"] - row["measured_s"]) <= 2 * row["predicted_std_s"] for row in rows
    ]
    median = statistics.median(errors)
    most, margin, share = goal
    return {
        "cases": len(rows),
        "median_absolute_error": median,
        "within_10_percent": statistics.fmean(e <= 0.10 for e in errors),
        "within_12_percent": statistics.fmean(e <= 0.12 for e in errors),
        "within_two_std": statistics.fmean(within_std),
        "bias": statistics.median(row["relative_error"] for row in rows),
        "reached": median <= most and statistics.fmean(e <= margin for e in errors) >= share,
    }
