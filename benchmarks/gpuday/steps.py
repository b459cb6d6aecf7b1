"""What each step of a day measures. Every function keeps to its deadline and returns plain data
(seconds, sizes, words)."""

from __future__ import annotations

import platform
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.ops import Attention
from archsearch.engines.engine import EnginePrompt, Sampling
from archsearch.engines.transformers.engine import TransformersEngine
from archsearch.hardware.identify import gpu_state, identify_cpu
from archsearch.pipeline.profile.gpu import profile_gpu
from archsearch.pipeline.profile.run import ProfileRequest
from archsearch.profiles import Measurement, Profile, current_stack
from archsearch.profiling import cuda, layers
from archsearch.profiling.layers import LeanDecoder, LeanRun
from archsearch.profiling.points import Point, measure_or_skip, unmeasured
from archsearch.profiling.timer import Timing
from archsearch.records import as_data
from gpuday.cycles import ROUND_STYLES, Cycle, launch_line, time_parts, time_round
from gpuday.day import (
    Day,
    cycle_drafts,
    depth_that_fits,
    launch_shape,
    measured_device,
    shard,
    visible_device,
)
from gpuday.runner import Deadline, Step

RATE = 0.7  # synthetic acceptance of each draft token in transformers, given those before
# of a profile step's budget that the sweep gets; the check and the fit take the rest
PROFILE_SHARE = 0.6
Item = tuple[str, Callable[[], Any]]


def steps(day: Day) -> list[Step]:
    """The steps of a day in their order, the quick ones first; together they stay below ten
    minutes."""
    made = [
        Step("identity", 20, partial(identity, day)),
        Step("host", 30, partial(host, day), ("identity",)),
        Step("cycles", 50, partial(cycles, day), ("identity",)),
        Step("attention", 25, partial(attention, day), ("identity",)),
        Step("paper-graph", 45, partial(paper, day, "graph"), ("identity",)),
        Step("profile-graph", 115, partial(profile, day, "graph"), ("identity",)),
        Step("profile-eager", 115, partial(profile, day, "eager"), ("identity",)),
        Step("paper-eager", 45, partial(paper, day, "eager"), ("identity",)),
        Step("transformers", 60, partial(transformers_rounds, day), ("identity",)),
    ]
    if day.engine is not None:
        made.append(Step(f"engine-{day.engine}", 600, partial(engine, day), ("profile-graph",)))
    return made


# -- small helpers
# -------------------------------------------------------------------------------------------------


def summary(timing: Timing) -> dict[str, Any]:
    """Median, quartiles and what the probe felt; the raw times beside them."""
    return times_summary(timing.times_s) | {"slowdown": timing.slowdown}


def times_summary(times: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles of seconds, and the seconds themselves."""
    low, _, high = (
        statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else (times[0],) * 3
    )
    return {"median_s": statistics.median(times), "q1_s": low, "q3_s": high, "times_s": list(times)}


def row_dict(row: Measurement) -> dict[str, Any]:
    """A row of a profile with its median in front."""
    return {"median_s": row.median_s, "iqr_s": row.iqr_s, **row.to_dict()}


def each(items: Iterable[Item], deadline: Deadline, day: Day) -> dict[str, Any]:
    """`results` by name; `left`: names the deadline cut off; `failed`: what did not fit the memory,
    with its words."""
    results: dict[str, Any] = {}
    left: list[str] = []
    failed: dict[str, str] = {}
    with torch.inference_mode():
        for name, measure in items:
            if deadline.over:
                left.append(name)
                continue
            try:
                results[name] = measure()
            except torch.OutOfMemoryError as error:
                failed[name] = str(error).partition(". ")[0]
            if name in failed:  # outside the handler, so that the traceback holds no tensors
                day.bench("graph").release()
    return {"results": results, "left": left, "failed": failed}


# -- steps
# --------------------------------------------------------------------------------------------------


def identity(day: Day, deadline: Deadline) -> dict[str, Any]:
    """Device, driver, clocks, torch, CPU. The device is opened first: whoever else is on it shows
    before CUDA starts here."""
    gpu, device = visible_device()
    before = gpu_state(gpu)
    known = device is not None
    device = device or measured_device(gpu, day.allow_busy)
    bench = cuda.open_bench(
        device, Profile(device.to_dict(), {}), mode="graph", allow_busy=day.allow_busy
    )
    facts: dict[str, Any] = {}
    if bench.runner.device.type == "cuda":
        facts = {
            "capability": list(torch.cuda.get_device_capability(bench.runner.device)),
            "l2_bytes": int(
                getattr(torch.cuda.get_device_properties(bench.runner.device), "L2_cache_size", 0)
            ),
            "cudnn": torch.backends.cudnn.version(),
            "devices": torch.cuda.device_count(),
        }
    return {
        "device": device.to_dict(),
        "in_device_table": known,
        "rehearsal": day.rehearsal,
        "state": as_data(before),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "stack": current_stack(),
        "platform": platform.platform(),
        "cpu": identify_cpu().to_dict(),
        **facts,
    }


def profile(day: Day, mode: str, deadline: Deadline) -> dict[str, Any]:
    """`archsearch profile` in one mode, with its check, into the day's profile folder."""
    name, target = day.target
    request = ProfileRequest(
        day.device.key,
        target,
        day.sizes.space,
        dtypes=(day.dtype,),
        budget_s=PROFILE_SHARE * deadline.left_s,
        check=day.check,
        output=day.profile_folder,
        engine=False,
        modes=(mode,),
        allow_busy=day.allow_busy,
    )
    day.forget_benches()
    return {"target": name, **profile_gpu(request, day.device)}


def attention(day: Day, deadline: Deadline) -> dict[str, Any]:
    """Decode and verification attention from memory, also as rows of the day's profile; few tokens
    against a long cache."""
    sizes, bench = day.sizes, day.bench("graph")
    points = [
        Point("attention", "cold", Attention(batch, tokens, context, *heads))
        for context in sizes.contexts
        for heads in sizes.attention_heads
        for batch in sizes.attention_batches
        for tokens in sizes.attention_tokens
    ]
    open_points = unmeasured(bench, points, day.dtype)
    skipped = len(bench.skipped)
    items = [
        (point.describe(), partial(measure_or_skip, bench, point, day.dtype, {}))
        for point in open_points
    ]
    found = each(items, deadline, day)
    bench.profile.save_header()
    rows = [row_dict(row) for row in found["results"].values() if row is not None]
    return {
        "dtype": day.dtype,
        "rows": rows,
        "left": found["left"],
        "skipped": bench.skipped[skipped:],
    }


def paper(day: Day, mode: str, deadline: Deadline) -> dict[str, Any]:
    """The paper's drafts (equal parameters, half the depth), a stack of its target's layers, and as
    much of the shard that one device holds as fits. None of it goes into the profile, so that a
    prediction from there has not seen it."""
    bench, sizes = day.bench(mode), day.sizes
    name, target, ranks = sizes.paper
    cache: dict[Architecture, Any] = {}
    rows: list[dict[str, Any]] = []

    def measure(what: str, point: Point) -> None:
        assert point.arch is not None
        row = bench.measure_again_if_noisy(point, day.dtype, cache)
        rows.append(
            {
                "what": what,
                "architecture": point.arch.to_dict(),
                "layers": point.arch.num_hidden_layers,
                **row_dict(row),
            }
        )

    items: list[Item] = []
    for draft, arch in sizes.paper_drafts.items():
        for state in ("warm", "cold"):
            point = Point("forward", state, arch=arch, context=sizes.context)
            items.append((f"{draft}, {state}", partial(measure, draft, point)))
    part = shard(target, ranks)
    for tokens in (1, 9):
        stack = Point(
            "layer",
            "cold",
            arch=target.replace(num_hidden_layers=3),
            tokens=tokens,
            context=sizes.context,
        )
        items.append(
            (f"layers of {name}, {tokens} tokens", partial(measure, f"layers of {name}", stack))
        )

    def measure_shard(tokens: int) -> None:
        depth = (
            depth_that_fits(part, day.dtype, 0.7 * day.free_bytes())
            if part not in shards
            else shards[part]
        )
        shards[part] = depth
        arch = part.replace(num_hidden_layers=depth)
        measure(
            f"{name} over {ranks}",
            Point("forward", "warm", arch=arch, tokens=tokens, context=sizes.context),
        )

    shards: dict[Architecture, int] = {}
    items += [
        (f"{name} over {ranks}, {tokens} tokens", partial(measure_shard, tokens))
        for tokens in (1, 9)
    ]
    found = each(items, deadline, day)
    cache.clear()
    bench.release()
    return {
        "dtype": day.dtype,
        "mode": mode,
        "rows": rows,
        "left": found["left"],
        "failed": found["failed"],
    }


def host(day: Day, deadline: Deadline) -> dict[str, Any]:
    """Host time to launch one pass of a draft: kernel by kernel as engines do without graphs, as
    transformers does, as a graph.

    `lines`: host seconds of a pass = pass_s + layers * layer_s, at the first hidden size; `total_s`
    beside it also waits for the device.
    """
    clocks, pool, sizes = day.clocks(), day.bench("eager").pool(day.dtype), day.sizes
    rows: list[dict[str, Any]] = []

    def measure(layers_count: int, hidden: int, style: str) -> None:
        arch = launch_shape(layers_count, hidden)
        if style == "transformers":
            run = layers.ForwardRun(
                layers.build_model(arch, pool), batch=1, context=sizes.context
            ).step(1)
        else:
            lean = LeanDecoder.random(arch, pool, day.fused())
            run = LeanRun(lean, batch=1, capacity=sizes.context + 1, pool=pool).step(
                1, sizes.context
            )
            run = clocks.graphs.capture([run]) if style == "graph" else run
        launch, total = (
            clock.time(run, calls=1, budget_s=0.25 * sizes.patience)
            for clock in (clocks.launch, clocks.eager)
        )
        rows.append(
            {
                "style": style,
                "layers": layers_count,
                "hidden_size": hidden,
                "host": summary(launch),
                "total": summary(total),
            }
        )

    items = [
        (f"{style} {count} x {hidden}", partial(measure, count, hidden, style))
        for count, hidden in sizes.host_shapes
        for style in ("kernels", "transformers", "graph")
    ]
    found = each(items, deadline, day)
    return {
        "dtype": day.dtype,
        "rows": rows,
        "lines": launch_lines(rows),
        "left": found["left"],
        "failed": found["failed"],
    }


def launch_lines(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By style the line of host seconds over depth, at the hidden size that has most depths."""
    lines = {}
    for style in dict.fromkeys(row["style"] for row in rows):
        by_size: dict[int, list[tuple[int, float]]] = {}
        for row in rows:
            if row["style"] == style:
                by_size.setdefault(row["hidden_size"], []).append(
                    (row["layers"], row["host"]["median_s"])
                )
        points = max(by_size.values(), key=len)
        if len(points) > 1:
            lines[style] = asdict(launch_line(points))
    return lines


def cycles(day: Day, deadline: Deadline) -> dict[str, Any]:
    """Whole rounds of target and draft, in every style, beside the passes and the launches they are
    made of."""
    (name, target), sizes, clocks = day.target, day.sizes, day.clocks()
    pool, fused = day.bench("graph").pool(day.dtype), day.fused()
    capacity = sizes.context + max(sizes.gammas) + 2
    rows: list[dict[str, Any]] = []
    built: dict[str, LeanRun] = {}

    def run_of(key: str, arch: Architecture) -> LeanRun:
        if key not in built:
            for other in [known for known in built if known != "target"]:
                del built[other]
            built[key] = LeanRun(
                LeanDecoder.random(arch, pool, fused), batch=1, capacity=capacity, pool=pool
            )
        return built[key]

    def measure(key: str, draft: Architecture, gamma: int) -> None:
        cycle = Cycle(
            run_of("target", target), run_of(key, draft), gamma=gamma, context=sizes.context
        )
        parts = {
            part: summary(timing)
            for part, timing in time_parts(cycle, clocks, 0.2 * sizes.patience).items()
        }
        rounds = {
            style: summary(time_round(cycle, style, clocks, 0.3 * sizes.patience))
            for style in ROUND_STYLES
        }
        rows.append(
            {
                "draft": key,
                "architecture": draft.to_dict(),
                "gamma": gamma,
                "parts": parts,
                "rounds": rounds,
            }
        )

    items = [
        (f"{key} draft, gamma {gamma}", partial(measure, key, draft, gamma))
        for key, draft in cycle_drafts(target).items()
        for gamma in sizes.gammas
    ]
    found = each(items, deadline, day)
    return {
        "dtype": day.dtype,
        "target": name,
        "target_architecture": target.to_dict(),
        "context": sizes.context,
        "rows": rows,
        "left": found["left"],
        "failed": found["failed"],
    }


def transformers_rounds(day: Day, deadline: Deadline) -> dict[str, Any]:
    """The same target and drafts in transformers, acceptance by chance: seconds of plain tokens and
    of rounds."""
    (name, target), sizes, bench = day.target, day.sizes, day.bench("eager")
    pool = bench.pool(day.dtype)
    rng = random.Random(0)
    length = sizes.context - sizes.answer_tokens // 2
    prompt = EnginePrompt(
        "day", tuple(rng.randrange(min(1000, target.vocab_size)) for _ in range(length))
    )
    rows: list[dict[str, Any]] = []
    built: dict[str, Any] = {}

    def model(key: str, arch: Architecture) -> Any:
        if key not in built:
            built[key] = layers.build_model(arch, pool)
        return built[key]

    def measure(key: str, draft: Architecture | None, gamma: int) -> None:
        for other in [known for known in built if known not in ("target", key)]:
            del built[other]
        started = TransformersEngine(dtype=day.dtype)
        rates = tuple(RATE ** (position + 1) for position in range(gamma))
        started.start(
            model("target", target),
            None if draft is None else model(key, draft),
            gamma,
            synthetic=rates,
        )
        sampling = Sampling(max_new_tokens=sizes.answer_tokens, ignore_end=True)
        started.generate(
            [prompt], Sampling(max_new_tokens=8 + gamma, ignore_end=True)
        )  # kernels are loaded, caches allocated
        result = started.generate([prompt], sampling)[0]
        gaps = result.gaps_s[: max(1, result.rounds - 1)] if gamma else result.gaps_s
        rows.append(
            {
                "draft": key if draft is not None else None,
                "architecture": None if draft is None else draft.to_dict(),
                "gamma": gamma,
                "tau": statistics.fmean(result.round_lengths) if result.round_lengths else 1.0,
                **times_summary(gaps),
            }
        )

    items: list[Item] = [("target alone", partial(measure, "target", None, 0))]
    for key, draft in cycle_drafts(target).items():
        items += [
            (f"{key} draft, gamma {gamma}", partial(measure, key, draft, gamma))
            for gamma in sizes.gammas
        ]
    found = each(items, deadline, day)
    built.clear()
    bench.release()
    return {
        "dtype": day.dtype,
        "target": name,
        "target_architecture": target.to_dict(),
        "context": sizes.context,
        "rows": rows,
        "left": found["left"],
        "failed": found["failed"],
    }


def engine(day: Day, deadline: Deadline) -> dict[str, Any]:
    """Rounds of an engine itself with random drafts, into the day's profile."""
    from archsearch.models.targets import resolve_target
    from archsearch.pipeline.profile.engine import check_engine_request
    from archsearch.pipeline.profile.gpu import profile_rounds
    from archsearch.pipeline.profile.run import ProfileRun

    assert day.engine is not None
    name, target = day.target
    request = ProfileRequest(
        day.device.key,
        target,
        day.sizes.space,
        output=day.profile_folder,
        engine_name=day.engine,
        engine_python=day.engine_python,
        target_ref=resolve_target(name),
    )
    check_engine_request(request)
    day.forget_benches()  # the engine takes what memory is left
    run = ProfileRun(request, day.device, current_stack())
    found = run.profile
    before = set(found.rows)
    told = profile_rounds(run, day.dtype)
    return as_data(told) | {
        "rows": [row_dict(row) for key, row in found.rows.items() if key not in before]
    }
