"""Which engine a command runs, with what settings, and the latencies that foretell it."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from archsearch.architecture.architecture import Architecture
from archsearch.engine_facts import engine_facts, engine_title, engines_that, runnable_engine
from archsearch.errors import ArchsearchError, RunFailed
from archsearch.files import write_json
from archsearch.models.targets import TargetRef
from archsearch.pipeline.latency import asked_dtype, choose_latency
from archsearch.pipeline.serving import check_engine, default_mode
from archsearch.pipeline.session import SearchSession
from archsearch.search.objective import Scorer

if TYPE_CHECKING:
    from archsearch.engines.engine import EngineSettings

PARTIAL_FILE: Final = "partial-{what}-{engine}.json"


@dataclass(frozen=True)
class EngineChoice:
    """Which engine runs and how it is reached; None and empty mean the run's own and the defaults.

    `python`: interpreter of the engine's environment; `server_url`, `baseline_url`: running servers
    with and without the draft.
    """

    name: str | None = None
    python: Path | None = None
    server_url: str | None = None
    baseline_url: str | None = None
    timeout_s: float = 600.0


def check_choice(
    choice: EngineChoice,
    name: str,
    *,
    synthetic: bool = False,
    schedule: bool = False,
    concurrency: int = 1,
) -> None:
    """Raise ArchsearchError, before anything is loaded, for an engine that is not there or cannot
    do what is asked."""
    from archsearch.engines.registry import check_interpreter_choice

    facts = runnable_engine(name)
    if choice.server_url is not None:
        if not facts.server:
            servers = " or ".join(
                engine_title(other) for other in engines_that(lambda row: row.server)
            )
            raise ArchsearchError(
                f"--server-url is for a running {servers} server, not for {name}; leave one of the"
                " two out"
            )
        if synthetic:
            raise ArchsearchError(
                "a running server cannot take synthetic acceptance; leave --server-url out, or"
                " train the draft first"
            )
        if schedule:
            raise ArchsearchError(
                "a running server keeps the schedule it was started with; leave --schedule or"
                " --server-url out"
            )
        return
    if concurrency > 1 and not facts.batches:
        raise ArchsearchError(
            f"{name} runs one request at a time, so {concurrency} in flight cannot be confirmed in"
            " it; use --concurrency 1, or --engine"
            f" {' or '.join(engines_that(lambda row: row.batches))}"
        )
    if schedule and not facts.schedules:
        others = " or ".join(engines_that(lambda row: row.schedules))
        raise ArchsearchError(
            f"{name} takes one gamma for all batch sizes; use --engine {others} for --schedule"
        )
    if synthetic and not facts.synthesises:
        raise ArchsearchError(
            f"{name} cannot accept by chance, which a draft without weights needs; train the draft"
            f" first, or use --engine {' or '.join(engines_that(lambda row: row.synthesises))} with"
            " --synthetic"
        )
    check_interpreter_choice(name, choice.python)


def serving_scorer(session: SearchSession, engine: str) -> tuple[Scorer, str]:
    """The session's scorer with the latencies of `engine`, and where those come from in words."""
    if engine == session.request.engine:
        return session.scorer, session.source.words
    folder, chosen = session.source.profile.get("folder"), session.source
    check_engine(engine_facts(engine), chosen.device)
    asked = replace(
        session.request.asked,
        profile=Path(folder) if folder else None,
        dtype=chosen.dtype,
        mode=chosen.mode if chosen.device.kind == "cpu" else default_mode(chosen.device, engine),
        # those asked for are of the run's own engine
        engine=engine,
        engine_version=None,
        engine_options=(),
    )
    source, _ = choose_latency(asked, session.target.architecture)
    return session.scorer.with_latency(source.latency), source.words


def profile_first(session: SearchSession, scorer: Scorer, engine: str) -> str | None:
    """The command that measures the engine's own passes, where the prediction of `scorer` does
    without them; None where it has them. A profile's passes are those of transformers."""
    if engine == "transformers" or getattr(scorer.latency, "engine_", None) is not None:
        return None
    gpu, target = session.request.asked.gpu or session.source.device.key, session.request.target
    dtype = asked_dtype(engine, session.source.dtype)
    return (
        f"archsearch profile --gpu {shlex.quote(gpu)} --target {shlex.quote(target)} --engine"
        f" {engine}{dtype}"
    )


def engine_settings(
    session: SearchSession, choice: EngineChoice, *, concurrency: int, max_len: int, dtype: str
) -> EngineSettings:
    """How the session's device, dtype and ranks are told to an engine. Raises ArchsearchError where
    the device is a GPU and this machine has none: nothing measured here would be that GPU's."""
    from archsearch.engines.engine import EngineSettings

    device = session.source.device
    if device.kind != "cpu" and choice.server_url is None and not has_gpu():
        raise ArchsearchError(
            f"confirming on {device.key} takes a machine with that GPU, and this one has none; copy"
            " the run there, or name a running server (--server-url)"
        )

    return EngineSettings(
        dtype=dtype,
        concurrency=concurrency,
        max_len=max_len,
        mode=session.source.mode,
        tensor_parallel=session.scorer.workload.tensor_parallel,
        threads=session.source.threads,
        device="cpu" if device.kind == "cpu" else "gpu",
        python=choice.python,
        timeout_s=choice.timeout_s,
        server_url=choice.server_url,
        baseline_url=choice.baseline_url,
    )


def has_gpu() -> bool:
    """Whether torch finds a GPU here."""
    import torch

    return bool(torch.cuda.is_available())


def engine_target(ref: TargetRef) -> Path | str:
    """What an engine outside this process loads as the target: a folder or a hub id."""
    from archsearch.models.load import weights_source

    return weights_source(ref)


def take_turns(session: SearchSession, draft: Architecture, engines: int, concurrency: int) -> bool:
    """Whether the engines must take turns in memory: together they would need more than the device
    has."""
    from archsearch.capacity import memory_bytes, usable_bytes

    workload = replace(session.scorer.workload, batch_size=concurrency)
    each = memory_bytes(session.target.architecture, draft, workload).total_bytes
    fixed = (
        2 << 30 if session.source.device.kind == "cpu" else 0
    )  # an engine's own libraries and buffers
    return (
        engines * (each + fixed) > usable_bytes(session.source.device)
        or session.source.device.kind != "cpu"
    )


def keep_partial(error: RunFailed, path: Path, what: str) -> RunFailed:
    """The same failure; where it had come to something, that is in `path` and the message says
    so."""
    if not error.results:
        return error
    found = [asdict(result) for result in error.results.values()]
    write_json(path, {"stopped": str(error), "results": found})
    whole = max(int(result.get("prompts") or result.get("repeats") or 0) for result in found)
    return RunFailed(f"{error}; the {whole} {what} before it are kept in {path}")
