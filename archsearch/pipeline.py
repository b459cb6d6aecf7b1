"""The commands as functions: what the command line parses for and a notebook calls. Each does one job and returns plain data.

profile -> search -> finalists (train, measure) -> confirm -> export. Feedback between them passes through files.
"""

from __future__ import annotations

import random
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.hf_config import read_architecture
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.export import DRAFT_FILES, TOKENIZER_FILES, export, padded_head_cost, vllm_config
from archsearch.files import atomic_path, ensure_writable_dir, read_json, write_json
from archsearch.finalists import TrainedDraft, Workshop, choose_finalists, load_prompt_set, load_trained
from archsearch.hardware.device import Device
from archsearch.hardware.identify import check_claim, resolve_device
from archsearch.latency.model import LatencyModel
from archsearch.latency.roofline import RooflineLatency
from archsearch.profiles import Profile, current_stack, find_profile, stack_key
from archsearch.progress import ProgressLine
from archsearch.runs import Run, create_run, open_run, resume_run
from archsearch.search import study
from archsearch.search.objective import Score, Scorer
from archsearch.search.space import InvalidShape, Limits, SearchSpace, load_space
from archsearch.targets import TargetRef, resolve_target
from archsearch.workload import Workload, dtype_name

CHECK_MEDIAN_GOAL = 0.06
CHECK_WITHIN_12_GOAL = 0.80
TEXT_SHARE = 0.35  # of the time budget: the target writes; the rest trains
ENGINE_STAND_IN = Architecture(512, 1408, 4, 8, 8, 64, 32000)


# ------------------------------------------------------------------------------------------------------------------- profile


@dataclass(frozen=True)
class ProfileRequest:
    """What `archsearch profile` was asked: `dtypes` empty means the device's best first, then the other."""

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


def sample_space(space: SearchSpace, target: Architecture, count: int, seed: int = 0) -> list[Architecture]:
    """Up to `count` distinct valid shapes drawn at random: what a sweep covers and a check draws from."""
    rng = random.Random(seed)
    dimensions = space.dimensions(target)
    found: dict[Architecture, None] = {}
    for _ in range(200 * count):
        shape = space.build(tuple(rng.randrange(len(dimension.choices)) for dimension in dimensions), target)
        if not isinstance(shape, InvalidShape):
            found[shape] = None
            if len(found) >= count:
                break
    if not found:
        space.check(target)
    return list(found)


def device_dtypes(device: Device, asked: Sequence[str]) -> list[str]:
    """The dtypes to measure: those asked for, or the device's native one first."""
    if asked:
        return [dtype_name(name) for name in asked]
    return ["bfloat16", "float32"] if device.native_bf16 else ["float32", "bfloat16"]


def profile_device(request: ProfileRequest) -> dict[str, Any]:
    """Measure this device until the budget is spent or every planned row exists; continue where an earlier run stopped.

    Returns a summary: folder, rows, noise, what the latency model learnt per dtype, and the check's results.
    Raises ArchsearchError when the device is not the one claimed or is a GPU (kernels on GPUs are not measured yet).
    """
    device = check_claim(request.gpu, request.threads)
    if device.kind != "cpu":
        raise ArchsearchError(
            f"profiling on {device.name} is not built yet: only --gpu cpu can be measured; "
            f"`archsearch estimate --gpu {request.gpu}` answers from the datasheet"
        )
    stack = current_stack()
    folder = request.output or Path("profiles") / device.key / stack_key(stack)
    ensure_writable_dir(folder)

    import torch

    from archsearch.profiling import sweep as sweeps

    torch.set_num_threads(device.threads or 1)
    profile = Profile.open(folder, device.to_dict(), stack)
    bench = sweeps.CpuBench(profile, device.last_level_cache_bytes or (32 << 20))
    reference = request.target or ENGINE_STAND_IN
    drafts = sample_space(request.space, reference, 400, request.seed)
    dtypes = device_dtypes(device, request.dtypes)
    before = len(profile.rows)
    memory = float(device.memory_bytes)
    points = {
        dtype: sweeps.plan(drafts, request.target, dtype, batch=request.batch_size, memory_bytes=memory) for dtype in dtypes
    }
    with ProgressLine("profile") as line:
        sweeps.sweep(bench, points, budget_s=request.budget_s, progress=line)
    if request.engine and request.batch_size == 1:
        _measure_engine(bench, profile, request.target, dtypes, memory)
    learnt = {}
    for dtype in dtypes:
        try:
            learnt[dtype] = LatencyModel(profile, dtype).summary()
        except MissingDataError as error:
            learnt[dtype] = {"missing": str(error)}
    checks = {}
    if request.check:
        for dtype in dtypes:
            if "missing" not in learnt[dtype]:
                unseen = drafts_for_check(request, reference, profile)
                checks[dtype] = check_profile(bench, profile, unseen, request.target, dtype, request.check, memory)
    slowdowns = bench.slowdowns or [1.0]
    quantiles = statistics.quantiles(slowdowns, n=20) if len(slowdowns) > 1 else [1.0] * 19
    return {
        "folder": str(folder),
        "device": device.key,
        "rows": len(profile.rows),
        "new_rows": len(profile.rows) - before,
        "planned_rows": sum(len(p) for p in points.values()),
        "noisy_share": profile.noisy_share,
        "slowdown_p5": quantiles[0],
        "slowdown_median": quantiles[9],
        "slowdown_p95": quantiles[-1],
        "models": learnt,
        "checks": checks,
        "known_error": profile.known_error,
    }


def drafts_for_check(request: ProfileRequest, reference: Architecture, profile: Profile) -> list[Architecture]:
    """Shapes for a check, drawn with a seed that moves on with every check, so that no check repeats the last one's shapes."""
    done = sum(entry.get("checks", 0) for entry in profile.known_error.values())
    return sample_space(request.space, reference, 400, 1_000_003 + request.seed + done)


def _measure_engine(bench: Any, profile: Profile, target: Architecture | None, dtypes: list[str], memory: float) -> None:
    """Engine rows for each dtype that has none yet for this vocabulary."""
    from archsearch.architecture.counts import weight_bytes_per_pass
    from archsearch.engines.overhead import measure_overhead

    subject = target
    if subject is None or weight_bytes_per_pass(subject, 4) > min(2 << 30, memory / 4):
        subject = ENGINE_STAND_IN if subject is None else ENGINE_STAND_IN.replace(vocab_size=subject.vocab_size)
    for dtype in dtypes:
        known = {row.sizes()["vocab_size"] for row in profile.select("engine", dtype, "eager")}
        if subject.vocab_size not in known:
            with ProgressLine(f"what transformers adds, {dtype}") as line:
                for row in measure_overhead(bench, subject, dtype, progress=line):
                    profile.record(row)


def check_profile(
    bench: Any,
    profile: Profile,
    drafts: list[Architecture],
    target: Architecture | None,
    dtype: str,
    count: int,
    memory: float,
) -> dict[str, Any]:
    """Measure whole drafts (and verification passes) that the profile has not seen and compare; store it as the known error."""
    from archsearch.profiling.sweep import check_points, measure_points

    model = LatencyModel(profile, dtype)
    before = profile.known_error.get(dtype, {})
    points = check_points(drafts, target, profile, dtype, count, seed=before.get("checks", 0), memory_bytes=memory)
    rows: list[dict[str, Any]] = []
    with ProgressLine(f"check {dtype}") as line:
        measured = list(measure_points(bench, points, dtype, progress=line))
    for point, row in measured:
        assert point.arch is not None
        predicted = model.forward_s(
            point.arch, batch=point.batch, tokens=point.tokens, context=point.context, cold=point.cache == "cold"
        )
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
    groups = {what: _error_summary([row for row in rows if row["what"].startswith(what)]) for what in ("draft step", "verify")}
    result = {"checks": before.get("checks", 0) + 1, **{what: summary for what, summary in groups.items() if summary}}
    profile.known_error[dtype] = result
    profile.save_header()
    write_json(Path(str(profile.folder)) / f"check-{dtype}.json", {"dtype": dtype, **result, "rows": rows})
    return {**result, "rows": rows}


def _error_summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median absolute error, share within 12 %, share within two std; empty for no rows."""
    if not rows:
        return {}
    errors = [abs(row["relative_error"]) for row in rows]
    within_std = [abs(row["predicted_s"] - row["measured_s"]) <= 2 * row["predicted_std_s"] for row in rows]
    median, near = statistics.median(errors), statistics.fmean(e <= 0.12 for e in errors)
    return {
        "cases": len(rows),
        "median_absolute_error": median,
        "within_12_percent": near,
        "within_two_std": statistics.fmean(within_std),
        "bias": statistics.median(row["relative_error"] for row in rows),
        "reached": median <= CHECK_MEDIAN_GOAL and near >= CHECK_WITHIN_12_GOAL,
    }


# ----------------------------------------------------------------------------------------------------- latency to score with


@dataclass(frozen=True)
class LatencySource:
    """A latency model and where it comes from, in words and as data for run.yaml."""

    latency: Any
    device: Device
    dtype: str
    threads: int | None
    profile: dict[str, Any]
    words: str


def choose_latency(
    gpu: str | None,
    profile_folder: Path | None,
    target: Architecture,
    *,
    dtype: str | None,
    mode: str,
    engine: str,
    batch_size: int = 1,
    context_len: int = 256,
) -> LatencySource:
    """The profile named, or the device's profile, or, where nobody profiled it, the datasheet roofline (marked).

    Without a dtype: the one in which the profile says that the target decodes fastest; a speed-up over a slower dtype is none.
    """
    profile: Profile | None = None
    if profile_folder is not None:
        profile = Profile.load(profile_folder)
        device = Device.from_dict(profile.device)
    else:
        device = resolve_device(gpu or "cpu")
        try:
            profile = Profile.load(find_profile(device.key, current_stack() if device.kind == "cpu" else None))
        except MissingDataError:
            if device.kind == "cpu":
                raise
    if profile is None:
        name = dtype or next(d for d in ("bfloat16", "float16", "float32") if d in device.flops_per_s)
        words = (
            f"datasheet roofline of {device.name}: nobody has profiled it here; "
            "expect errors of 15-25 % on large layers and 25-50 % on small ones"
        )
        return LatencySource(
            RooflineLatency(device, name, mode), device, name, None, {"hash": None, "source": "roofline", "dtype": name}, words
        )
    names = [dtype] if dtype else [name for name, found in profile.combinations() if found == mode]
    models = {}
    for name in names:
        try:
            models[name] = LatencyModel(profile, name, mode, engine)
        except MissingDataError:
            if dtype or len(names) == 1:
                raise
    if not models:
        raise MissingDataError(f"profile {profile.folder} has no usable rows in {mode} mode; run archsearch profile longer")
    workloads = {name: Workload(batch_size, context_len, dtype=name, mode=mode) for name in models}
    best = min(models, key=lambda name: models[name].decode_s(target, workloads[name]).value)
    stale = [
        f"{name} {profile.stack.get(name)} there, {version} here"
        for name, version in current_stack().items()
        if device.kind == "cpu" and name != "python" and profile.stack.get(name) != version
    ]
    words = f"profile {profile.folder} ({len(profile.rows)} rows, {best})" + (
        f"; WARNING: made with {', '.join(stale)}" if stale else ""
    )
    if best in profile.known_error and "draft step" in profile.known_error[best]:
        words += f", known error of a draft step {profile.known_error[best]['draft step']['median_absolute_error']:.1%}"
    elif not profile.known_error:
        words += ", never checked (archsearch profile --check 20)"
    return LatencySource(
        models[best],
        device,
        best,
        device.threads,
        {"folder": str(profile.folder), "hash": profile.fingerprint(), "dtype": best},
        words,
    )


def acceptance_for(choice: str) -> Any:
    """The estimator that `--alpha` names: prior (also under `distilled`, which trains afterwards) or a number."""
    from archsearch.acceptance.estimator import GivenAcceptance
    from archsearch.acceptance.prior import PriorAcceptance

    return PriorAcceptance() if choice in ("prior", "distilled") else GivenAcceptance(float(choice))


# -------------------------------------------------------------------------------------------------------------------- estimate


def estimate_drafts(
    target: str,
    drafts: Sequence[str],
    *,
    gpu: str | None,
    profile_folder: Path | None,
    alpha: str,
    gamma: int | None,
    batch_size: int,
    context_len: int,
    tensor_parallel: int,
    temperature: float,
    dtype: str | None,
    mode: str,
    engine: str,
    domain: str,
) -> dict[str, Any]:
    """Price drafts that exist: a Score each, best first, and which of them the error bars cannot tell apart.

    Raises ArchsearchError for a draft of another vocabulary size, or one that does not fit the device beside the target.
    """
    from archsearch.capacity import fits, memory_bytes, usable_bytes

    ref = resolve_target(target)
    source = choose_latency(
        gpu,
        profile_folder,
        ref.architecture,
        dtype=dtype,
        mode=mode,
        engine=engine,
        batch_size=batch_size,
        context_len=context_len,
    )
    workload = Workload(batch_size, context_len, tensor_parallel, source.dtype, mode, temperature)
    scorer = Scorer(
        ref.architecture, workload, source.latency, acceptance_for(alpha), gammas=[gamma] if gamma else None, domain=domain
    )
    priced = []
    for name in drafts:
        draft = resolve_target(name)
        notes = []
        if draft.architecture.vocab_size != ref.architecture.vocab_size:
            notes.append(
                f"vocabulary {draft.architecture.vocab_size}, target {ref.architecture.vocab_size}: "
                "engines need the same tokenizer"
            )
        if not fits(ref.architecture, draft.architecture, workload, source.device):
            need = memory_bytes(ref.architecture, draft.architecture, workload).total_bytes
            notes.append(
                f"needs {need / 2**30:.1f} GiB on one device, {usable_bytes(source.device) / 2**30:.1f} usable: "
                "raise --tensor-parallel"
            )
        priced.append((name, scorer(draft.architecture), notes))
    priced.sort(key=lambda item: -item[1].speedup.value)
    groups = scorer.indistinguishable([score for _, score, _ in priced])
    return {
        "target": ref.name,
        "device": source.device.key,
        "latency": source.words,
        "workload": asdict(workload),
        "alpha": alpha,
        "drafts": [
            {
                "draft": name,
                "notes": notes,
                "pays": score.pays,
                "group": next(i for i, group in enumerate(groups, start=1) if score in group),
                **score.to_dict(),
            }
            for name, score, notes in priced
        ],
    }


# ---------------------------------------------------------------------------------------------------------------------- search


@dataclass(frozen=True)
class SearchRequest:
    """What `archsearch search` was asked. `confirm`: how many of the best to run in the engine, after `finalists` drafts were
    trained; 0 ends with the ranking."""

    target: str
    gpu: str | None = None
    profile: Path | None = None
    space: str | None = None
    batch_size: int = 1
    context: int = 256
    temperature: float = 0.0
    tensor_parallel: int = 1
    dtype: str | None = None
    mode: str = "eager"
    trials: int = 300
    alpha: str = "prior"
    domain: str = "narrow"
    prompts: Path | None = None
    heldout: Path | None = None
    text: Path | None = None
    answer_tokens: int = 96
    confirm: int = 0
    finalists: int = 3
    confirm_prompts: int = 24
    time_budget_s: float = 780.0
    engine: str = "transformers"
    storage: str | None = None
    run: Path | None = None
    seed: int = 0
    top: int = 5
    max_gamma: int = 8

    def arguments(self) -> dict[str, Any]:
        """What run.yaml keeps and a continued run must repeat."""
        free = ("run", "storage", "profile")
        return {
            name: value if isinstance(value, int | float | str | bool) or value is None else str(value)
            for name, value in asdict(self).items()
            if name not in free
        }


FREE_ARGUMENTS = ("trials", "confirm", "finalists", "confirm_prompts", "top", "gpu")


@dataclass
class SearchSession:
    """A search in progress or reopened: everything later steps (train, confirm, report) need, built from the request."""

    request: SearchRequest
    target: TargetRef
    source: LatencySource
    space: SearchSpace
    scorer: Scorer
    run: Run

    @classmethod
    def start(cls, request: SearchRequest, run: Run | None = None) -> SearchSession:
        """Resolve names, load the profile and open or create the run folder: everything that can be wrong, before any work.

        `run`: an opened run to go on with, whatever profile it was searched with.
        """
        target = resolve_target(request.target)
        if request.engine != "transformers":
            raise ArchsearchError(f"engine {request.engine!r} is not built yet; use --engine transformers")
        if request.confirm:
            check_weights(target)
            load_prompt_set(request.prompts, request.heldout)
            if request.text is not None and not request.text.is_file():
                raise MissingDataError(f"text file not found: {request.text}")
        space = load_space(request.space or default_space(target.architecture))
        space.check(target.architecture)
        source = choose_latency(
            request.gpu,
            request.profile,
            target.architecture,
            dtype=request.dtype,
            mode=request.mode,
            engine=request.engine,
            batch_size=request.batch_size,
            context_len=request.context,
        )
        workload = Workload(
            request.batch_size, request.context, request.tensor_parallel, source.dtype, request.mode, request.temperature
        )
        scorer = Scorer(
            target.architecture,
            workload,
            source.latency,
            acceptance_for(request.alpha),
            max_gamma=request.max_gamma,
            domain=request.domain,
            limits=memory_limits(space, target.architecture, workload, source.device),
        )
        arguments = request.arguments()
        described: dict[str, Any] = {"space": space.to_dict(), "seed": request.seed, "profile": source.profile}
        if run is not None:
            pass
        elif request.run is not None and (request.run / "run.yaml").exists():
            run = resume_run(request.run, arguments, free=FREE_ARGUMENTS, **described)
        else:
            ensure_writable_dir(request.run or Path("runs"))
            run = create_run(Path("runs"), arguments, device=source.device.to_dict(), path=request.run, **described)
        return cls(request, target, source, space, scorer, run)

    @classmethod
    def reopen(cls, path: Path) -> SearchSession:
        """The session of an existing run folder, with the arguments it was made with."""
        run = open_run(path)
        known = {name: value for name, value in run.arguments.items() if name in SearchRequest.__dataclass_fields__}
        for name in ("prompts", "heldout", "text"):
            known[name] = Path(known[name]) if known.get(name) else None
        folder = run.info["profile"].get("folder")
        known["dtype"] = run.info["profile"].get("dtype", known.get("dtype"))
        named = Path(folder) if folder and Path(folder).is_dir() else None
        return cls.start(SearchRequest(**{**known, "confirm": 0}, run=path, profile=named), run)

    def workshop(self) -> Workshop:
        """Where this run's drafts are trained."""
        prompts = load_prompt_set(self.request.prompts, self.request.heldout)
        return Workshop(
            self.target,
            self.source.dtype,
            prompts,
            self.run.path,
            answer_tokens=self.request.answer_tokens,
            plain_text=self.request.text,
            threads=self.source.threads,
        )


def default_space(target: Architecture) -> str:
    """The space that suits a target's size."""
    from archsearch.architecture.counts import parameters

    return "demo" if parameters(target) < 400e6 else "wide-shallow" if parameters(target) > 5e9 else "default"


def memory_limits(space: SearchSpace, target: Architecture, workload: Workload, device: Device) -> Limits:
    """The space's own limits, and what the target leaves free on the device."""
    from archsearch.capacity import memory_bytes, usable_bytes

    limits = space.limits(target)
    free = usable_bytes(device) - memory_bytes(target, None, workload).total_bytes
    if free <= 0:
        raise ArchsearchError(
            f"the target alone needs {memory_bytes(target, None, workload).total_bytes / 2**30:.1f} GiB per device and "
            f"{device.key} has {usable_bytes(device) / 2**30:.1f} usable; raise --tensor-parallel or lower --batch-size/--context"
        )
    most = free if limits.max_memory_bytes is None else min(free, limits.max_memory_bytes)
    return Limits(limits.max_parameters, int(most))


def check_weights(target: TargetRef) -> None:
    """Raise MissingDataError before long work where a target's weights cannot be had here (a hub is asked later, by loading)."""
    from archsearch.models import WEIGHT_FILES, packaged_gguf

    if target.folder is not None:
        if not any((target.folder / name).is_file() for name in WEIGHT_FILES):
            raise MissingDataError(f"no weights in {target.folder}; put model.safetensors there, or search without --confirm")
    elif target.weights:
        packaged_gguf(target.name, target.weights)
    elif target.hub_id is None:
        raise MissingDataError(
            f"target {target.name!r} is known by its shape only; give a folder with its weights, or search without --confirm"
        )


def search(request: SearchRequest) -> dict[str, Any]:
    """Score, rank and, with `confirm`, train the finalists, run the best in the engine and write everything into the run folder.

    With `confirm` the target writes its text first, so that the search knows how much of it a trimmed head covers.
    """
    session = SearchSession.start(request)
    run, scorer = session.run, session.scorer
    shop = None
    if request.confirm:
        shop = session.workshop()
        written = run.path / "text" / "done.json"
        if not written.exists():  # a text that stopped at its budget is finished all the same: drafts must share it
            shop.write_text(TEXT_SHARE * request.time_budget_s)
            write_json(written, {"tokens": shop.text().written_tokens})
        scorer = session.scorer = scorer.with_coverage(shop.coverage())
    with ProgressLine("search") as line:
        result = study.search(
            session.space,
            scorer,
            trials=request.trials,
            seed=request.seed,
            storage=request.storage or run.storage_file,
            study_name="archsearch" if shop is None else "archsearch-coverage",  # scores that know the coverage stand apart
            progress=lambda p: line(f"best {p.best.speedup.value:.2f}x" if p.best else "", float(p.done), float(p.total)),
        )
    run.write_trials(result.trials)
    ranked = result.best
    trained: list[TrainedDraft] = []
    if shop is not None:
        trained = train_finalists(session, shop, ranked)
        measured = sorted(
            (scorer.measured(draft.architecture, draft.alpha, draft.tau) for draft in trained), key=lambda s: -s.speedup.value
        )
        shapes = {score.architecture for score in measured}
        ranked = [*measured, *(score for score in ranked if score.architecture not in shapes)]
    ranked = [score.with_rank(rank) for rank, score in enumerate(ranked[: max(request.top, len(trained))], start=1)]
    write_best(session, ranked, {draft.architecture: draft for draft in trained})
    confirmed = [confirm_rank(session, rank, shop=shop) for rank in range(1, min(request.confirm, len(trained)) + 1)]
    report = write_report(run)
    groups = scorer.indistinguishable(ranked)
    return {
        "run": str(run.path),
        "target": session.target.name,
        "device": session.source.device.key,
        "latency": session.source.words,
        "dtype": session.source.dtype,
        "space": session.space.name,
        "trials": result.finished,
        "invalid": result.invalid,
        "best": [score.to_dict() for score in ranked],
        "indistinguishable": [[s.rank for s in group] for group in groups],
        "confirmed": confirmed,
        "report": str(report),
    }


def train_finalists(session: SearchSession, shop: Workshop, ranked: Sequence[Score]) -> list[TrainedDraft]:
    """Half of the training time goes to all finalists alike, half to the one that stands best after it (successive halving).

    What is finished is used again when the run is continued.
    """
    request = session.request
    state_file = session.run.path / "finalists.json"
    if not state_file.exists():
        write_json(
            state_file, {"shapes": [score.architecture.to_dict() for score in choose_finalists(ranked, request.finalists)]}
        )
    shapes = [Architecture.from_dict(shape) for shape in read_json(state_file, "finalists")["shapes"]]
    training_s = (1 - TEXT_SHARE) * request.time_budget_s
    alone = len(shapes) == 1
    first_s = training_s if alone else 0.5 * training_s / len(shapes)
    drafts = [
        shop.train(shape, first_s, request.seed, f"finalist {number}/{len(shapes)}")
        for number, shape in enumerate(shapes, start=1)
    ]
    if alone:
        return drafts
    best = max(drafts, key=lambda draft: session.scorer.measured(draft.architecture, draft.alpha, draft.tau).speedup.value)
    longer = shop.train(best.architecture, first_s + 0.5 * training_s, request.seed, "the best finalist")
    return [longer if draft is best else draft for draft in drafts]


def write_best(session: SearchSession, ranked: Sequence[Score], trained: Mapping[Architecture, TrainedDraft]) -> None:
    """best/<rank>/: score, config, vLLM's speculative_config and, for trained drafts, the whole draft folder."""
    from archsearch.architecture.hf_config import to_hf_config

    run = session.run
    stale = run.ranks()
    for score in ranked:
        assert score.rank is not None
        config = to_hf_config(score.architecture)
        folder = run.write_best(score, config, vllm_config(str(run.best_dir(score.rank)), score.gamma))
        draft = trained.get(score.architecture)
        if draft is not None:
            copy_draft(draft.folder, folder)
            set_gamma(folder, score.gamma)
    for rank in stale:
        if rank > len(ranked):
            shutil.rmtree(run.best_dir(rank))


COPIED_TO_RANK = (*DRAFT_FILES, *TOKENIZER_FILES, "generation_config.json", "trace.npz", "training.json")


def copy_draft(source: Path, destination: Path) -> None:
    """Copy the files of a draft folder, each by rename; weights last, so that a folder with weights is whole."""
    (destination / "model.safetensors").unlink(missing_ok=True)
    for name in sorted(COPIED_TO_RANK, key=lambda name: name == "model.safetensors"):
        if (source / name).is_file():
            with atomic_path(destination / name) as temporary:
                shutil.copyfile(source / name, temporary)


def set_gamma(folder: Path, gamma: int) -> None:
    """Write gamma where transformers reads it: the draft's generation_config.json."""
    from archsearch.models import gamma_settings

    path = folder / "generation_config.json"
    current = read_json(path, "generation config") if path.exists() else {}
    write_json(path, {**current, **gamma_settings(gamma)})


# ------------------------------------------------------------------------------------------- train, confirm, export, report


def train_rank(path: Path, rank: int, budget_s: float) -> dict[str, Any]:
    """Distil one candidate for `budget_s` seconds more, measure it and score it again. Continues its checkpoint."""
    session = SearchSession.reopen(path)
    check_weights(session.target)
    score = session.run.score(rank)
    shop = session.workshop()
    try:
        shop.text()
    except MissingDataError:
        shop.write_text(TEXT_SHARE * budget_s)
        budget_s *= 1 - TEXT_SHARE
    training = shop.draft_folder(score.architecture) / "training.json"
    before = float(read_json(training, "training record")["seconds"]) if training.exists() else 0.0
    draft = shop.train(score.architecture, before + budget_s, session.request.seed, f"rank {rank}")
    renewed = session.scorer.measured(draft.architecture, draft.alpha, draft.tau).with_rank(rank)
    session.run.write_best(renewed, None, vllm_config(str(session.run.best_dir(rank)), renewed.gamma))
    copy_draft(draft.folder, session.run.best_dir(rank))
    set_gamma(session.run.best_dir(rank), renewed.gamma)
    write_report(session.run)
    return {
        "run": str(path),
        "rank": rank,
        "before": score.to_dict(),
        "after": renewed.to_dict(),
        "training": read_json(training, "training record"),
        "alpha_by_category": {name: value.to_dict() for name, value in draft.alpha_by_category.items()},
    }


def confirm_rank(
    session: SearchSession,
    rank: int,
    *,
    gammas: Sequence[int] = (),
    prompt_count: int | None = None,
    prompts: Path | None = None,
    shop: Workshop | None = None,
) -> dict[str, Any]:
    """Run target alone and target + draft in the engine, interleaved, on held-out prompts; write confirmed.json.

    The prediction beside it is the score's: latency from the profile, tau from the trace on held-out text; and once more with the
    tau that the engine counted, which leaves only the latency's error.
    """
    import gc

    from archsearch.engines.confirm import confirm, exactness_check
    from archsearch.engines.engine import EnginePrompt, Sampling
    from archsearch.engines.transformers import TransformersEngine
    from archsearch.models import load_draft
    from archsearch.training.data import encode_prompts, read_prompts

    run, scorer = session.run, session.scorer
    check_weights(session.target)
    score = run.score(rank)
    folder = run.best_dir(rank)
    trained = load_trained(score.architecture, folder)
    shop = shop or session.workshop()
    check_tokenizer(shop.tokenizer, folder)
    chosen = read_prompts(prompts) if prompts else shop.prompts.heldout
    count = prompt_count or session.request.confirm_prompts
    encoded = encode_prompts(spread_prompts(chosen, count), shop.tokenizer)
    asked = [EnginePrompt(item.id or str(number), item.token_ids, item.category or None) for number, item in enumerate(encoded)]
    sampling = Sampling(
        max_new_tokens=session.request.answer_tokens, temperature=session.request.temperature, seed=session.request.seed
    )
    draft = load_draft(folder, session.source.dtype)
    wanted = list(gammas) or [score.gamma]
    slowdowns = [machine_slowdown(session.source)]
    with ProgressLine("confirm") as line:
        results = confirm(
            lambda: TransformersEngine(shop.tokenizer, session.source.dtype),
            shop.model(),
            draft,
            wanted,
            asked,
            sampling,
            progress=line,
        )
    slowdowns.append(machine_slowdown(session.source))
    known_slowdowns = [value for value in slowdowns if value is not None]
    exact = None
    if session.request.temperature == 0:
        gc.collect()
        with ProgressLine("identical output in float32") as line:
            exact = exactness_check(
                lambda: TransformersEngine(shop.tokenizer, "float32"),
                shop.model("float32"),
                load_draft(folder, "float32"),
                wanted[0],
                asked[:4],
                progress=line,
            )
    context = round(statistics.fmean(len(item.token_ids) for item in encoded) + session.request.answer_tokens / 2)
    local = scorer.at_context(context)
    rows = []
    for gamma, outcome in results.items():
        if gamma not in trained.tau:
            raise ArchsearchError(
                f"gamma {gamma} was not measured on held-out text (1 to {max(trained.tau)}); use a smaller gamma"
            )
        predicted = local.measured(score.architecture, trained.alpha, trained.tau, gammas=[gamma])
        counted = local.measured(score.architecture, outcome.alpha, {gamma: outcome.tau}, gammas=[gamma])
        row = outcome.to_dict(predicted.speedup.value)
        overhead = local.latency.overhead_s(local.target, local.workload, gamma)
        row |= {
            "predicted": predicted.to_dict(),
            "predicted_at_measured_tau": counted.speedup.value,
            "relative_error_at_measured_tau": counted.speedup.value / outcome.speedup.value - 1.0,
            "predicted_round_s": predicted.draft_s.value + predicted.verify_s.value + overhead.value,
            "overhead_s": overhead.to_dict(),
            "context": context,
            "slowdown": statistics.fmean(known_slowdowns) if known_slowdowns else None,
            "dtype": session.source.dtype,
        }
        rows.append(row)
    best = max(rows, key=lambda row: row["speedup"]["value"])
    identical = {"prompts": exact.prompts, "identical": exact.identical} if exact is not None else None
    best = {
        **best,
        "rank": rank,
        "architecture": score.architecture.label(),
        "identical_output_float32": identical,
        "other_gammas": [row for row in rows if row is not best],
    }
    run.write_confirmed(rank, best)
    write_report(run)
    return best


def check_tokenizer(ours: Any, folder: Path) -> None:
    """Raise ArchsearchError where the draft in `folder` has a tokenizer and it is not the target's: its ids mean other tokens."""
    from archsearch.models import TOKENIZER_FILES, load_tokenizer, tokenizers_differ

    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return
    theirs = load_tokenizer(TargetRef(folder.name, read_architecture(folder), folder=folder))
    differences = tokenizers_differ(ours, theirs, limit=2)
    if differences:
        raise ArchsearchError(
            f"the tokenizer in {folder} differs from the target's ({'; '.join(differences)}); use a draft made for this target"
        )


def machine_slowdown(source: LatencySource, runs: int = 60) -> float | None:
    """How much slower this CPU is now than when its profile was started, by the profile's own probe; None where there is none.

    Predicted times are at the profile's reference speed. A busy machine slows target and draft alike, so speed-ups keep.
    """
    profile = getattr(source.latency, "profile", None)
    reference = profile.probe_reference_s.get(source.dtype) if profile is not None and source.device.kind == "cpu" else None
    if reference is None:
        return None
    import torch

    from archsearch.profiling.timer import Probe, WeightPool

    with torch.inference_mode():
        probe = Probe(WeightPool(96 << 20, getattr(torch, source.dtype)))
        return statistics.median(probe() for _ in range(runs)) / reference


def spread_prompts(prompts: Sequence[Any], count: int) -> list[Any]:
    """`count` prompts at equal distances, so that every category of a sorted file is represented."""
    if len(prompts) <= count:
        return list(prompts)
    return [prompts[round(i * (len(prompts) - 1) / (count - 1))] for i in range(count)] if count > 1 else list(prompts[:1])


def export_rank(path: Path, rank: int, output: Path) -> dict[str, Any]:
    """Export a trained candidate; says what engines pay that compute the padded head."""
    run = open_run(path)
    score = run.score(rank)
    folder = run.best_dir(rank)
    if not (folder / "model.safetensors").is_file():
        raise MissingDataError(f"rank {rank} of {path} has no weights; train it first: archsearch train {path} --rank {rank}")
    confirmed = run.confirmed(rank)
    gamma = confirmed["gamma"] if confirmed else score.gamma
    note, padded = "The head holds the full vocabulary.", None
    ref = resolve_target(run.arguments["target"])
    if score.architecture.trimmed:
        session = SearchSession.reopen(path)
        full = score.architecture.replace(draft_vocab_size=None)
        trained = load_trained(score.architecture, folder)
        # The padding rows never win, so acceptance is the trimmed head's; only the time changes.
        padded = session.scorer.measured(full, trained.alpha, trained.tau, gammas=[gamma]).speedup.value
        cost = padded_head_cost(score.architecture, session.source.dtype)
        note = (
            f"The head proposes {score.architecture.head_rows:,} of {score.architecture.vocab_size:,} tokens. Engines that need "
            f"a full head load the padded one and read {cost['ratio']:.1f} times the weights per draft token (predicted speed-up "
            f"{padded:.2f} instead of {score.speedup.value:.2f}); archsearch.models.load_draft keeps it trimmed."
        )
    written = export(
        folder,
        output,
        gamma=gamma,
        score=score.to_dict(),
        provenance={"run": run.info, "confirmed": confirmed},
        target=str(ref.folder or ref.hub_id or ref.name),
        confirmed=confirmed,
        padded_speedup=padded,
    )
    return {"output": str(written), "gamma": gamma, "rank": rank, "note": note, "padded_speedup": padded}


def write_report(run: Run) -> Path:
    """report.html of a run."""
    from archsearch.report import write_html

    return write_html(run)
