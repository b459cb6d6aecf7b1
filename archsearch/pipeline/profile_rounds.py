"""What an engine adds to its rounds on the user's GPU, measured by running it; what is published is
the prior."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from archsearch.engine_facts import engine_facts
from archsearch.engine_rounds import engine_rounds, version_in
from archsearch.engines.engine import Engine, EngineSettings
from archsearch.engines.registry import make_engine
from archsearch.errors import ArchsearchError
from archsearch.hardware.device import Device
from archsearch.pipeline.in_engine import write_shape
from archsearch.pipeline.profile_request import ProfileRequest
from archsearch.profiles import Profile
from archsearch.progress import ProgressLine

RUNNERS: Final = "VLLM_USE_V2_MODEL_RUNNER"
RECORDED: Final = {"vllm": {"async_scheduling": "0"}}
"""Switches that archsearch sets when it runs an engine, which every row names."""
FREE_SHARE: Final = 0.9  # of the GPU's free memory that the engine may take


def profile_rounds(
    request: ProfileRequest,
    profile: Profile,
    device: Device,
    dtype: str,
    *,
    budget_s: float | None = None,
) -> dict[str, Any]:
    """Run `request.engine_name` on the GPU with random weights and record its rounds; what is known
    is not measured again.

    Both of vLLM's model runners are measured where the version has two that run drafts differently.
    Returns `new_rows`, `left` (cases beyond the budget) and `failed`. Raises ArchsearchError
    without a target, or for an engine that cannot make up weights.
    """
    from archsearch.engines.measure.rounds import BUDGET_S, RoundRequest, measure_rounds

    name, ref = request.engine_name, request.target_ref
    if ref is None:
        raise ArchsearchError(f"profiling {name} runs a target in it; name one with --target")
    if not engine_facts(name).dummy_weights:
        raise ArchsearchError(
            f"{name} cannot make up weights, so its rounds on a GPU are not measured; use --engine"
            " vllm"
        )
    share = free_share(device)

    def engine(options: Mapping[str, str]) -> Engine:
        settings = EngineSettings(
            dtype=dtype,
            max_len=1024,
            mode="graph",
            tensor_parallel=request.tensor_parallel,
            device="gpu",
            python=request.engine_python,
            dummy_weights=True,
            environment={key: value for key, value in options.items() if key.isupper()},
            memory_share=share,
        )
        return make_engine(name, settings)

    with tempfile.TemporaryDirectory(dir=profile.folder, prefix=".engine-") as temporary:
        base = Path(temporary)
        target = write_shape(ref.architecture, base / "target")
        asked = RoundRequest(
            target=target,
            architecture=ref.architecture,
            engine=engine,
            folder_of=lambda arch: write_shape(
                arch, base / arch.label().replace(" ", "_").replace("/", "-")
            ),
            dtype=dtype,
            mode="graph",
            variants=variants(name, engine({}).version),
            recorded=RECORDED.get(name, {}),
            tensor_parallel=request.tensor_parallel,
            budget_s=budget_s or BUDGET_S,
            known=frozenset(row.shape for row in profile.select("round", dtype, "graph")),
        )
        with ProgressLine(f"rounds of {name}") as line:
            found = measure_rounds(asked, record=profile.record, progress=line)
    return {"new_rows": len(found.rows), "left": list(found.left), "failed": dict(found.failed)}


def variants(engine: str, version: str) -> list[dict[str, str]]:
    """Switches to measure an engine with: as it comes, and with vLLM's other runner where that runs
    drafts in another way."""
    if engine != "vllm":
        return [{}]
    ways: dict[str, dict[str, str]] = {}
    for value in ("1", "0"):
        try:
            known = engine_rounds(engine, version_in(version), {**RECORDED[engine], RUNNERS: value})
        except (
            ArchsearchError
        ):  # a version that runs no independent drafts, which the engine will say
            return [{}]
        assert known is not None
        ways.setdefault(known.costs.name, {RUNNERS: value})
    return list(ways.values()) if len(ways) > 1 else [{}]


def free_share(device: Device) -> float:
    """The share of the GPU's memory that an engine in a process of its own may take beside this
    one."""
    import torch

    if not torch.cuda.is_available():
        return FREE_SHARE
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return round(FREE_SHARE * free / total, 3)
