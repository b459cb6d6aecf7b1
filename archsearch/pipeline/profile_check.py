"""The latency model against whole drafts that the profile has not seen: its known error."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archsearch.architecture.architecture import Architecture
from archsearch.files import write_json
from archsearch.latency.model import LatencyModel
from archsearch.profiles import ForwardShape, Profile
from archsearch.progress import ProgressLine

if TYPE_CHECKING:
    from archsearch.profiling.points import Bench


# What a check is to reach: median error, a margin, and the share of cases within it.
CPU_GOAL = (0.06, 0.12, 0.80)
GPU_GOAL = (0.05, 0.10, 0.90)
GPU_CHECK_MODEL_BYTES = 32 << 30


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
    wide: dict[str, Any] = (
        {"contexts": (192, 768, 1536), "model_limit_bytes": GPU_CHECK_MODEL_BYTES} if gpu else {}
    )
    points = check_points(
        drafts,
        target,
        profile,
        dtype,
        count,
        seed=before.get("checks", 0),
        memory_bytes=memory,
        mode=mode,
        **wide,
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
