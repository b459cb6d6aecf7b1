"""The command that makes a run again, and what it must find to give the same numbers."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from archsearch.report.section import Section
from archsearch.runs.run import WORKLOAD_FILE, Run
from archsearch.workload import MEMORY_FRACTION

# The defaults of `search`, in the order of its command; None: nothing.
USUAL: Final[dict[str, Any]] = {
    **dict.fromkeys(("target", "gpu", "profile", "workload")),
    **{"batch_size": 1, "context": 256, "temperature": 0.0, "draft_tensor_parallel": None},
    **{"memory_fraction": MEMORY_FRACTION, "routing_skew": None, "tensor_parallel": None},
    **dict.fromkeys(("dtype", "mode", "engine", "engine_version", "domain", "space")),
    **dict.fromkeys(("prompts", "heldout", "text")),
    **{"answer_tokens": 96, "seed": 0, "trials": 300, "top": 5, "sampler": "auto"},
    **{"alpha": "prior", "confirm": 0, "finalists": 3, "confirm_prompts": 24},
}
# Arguments whose options have another name; None: those that are none, or follow from the rest.
OPTIONS: Final[dict[str, str | None]] = {
    "time_budget_s": "time-budget",
    "training_budget_s": "training-budget",
    "families": "family",
    "engine_options": "engine-option",
    "storage": None,
    "max_gamma": None,
}
_SEVERAL: Final = ("families", "engine_options")


def search_command(arguments: Mapping[str, Any], workload: Path | None = None) -> str:
    """`archsearch search ...` with every option that differs from its default; `workload`: where
    the mix of the search lies, where it was given one."""
    asked = {name: arguments[name] for name in USUAL if name in arguments} | dict(arguments)
    usual = USUAL | {"domain": "narrow" if asked.get("prompts") else "chat"}
    if asked.get("workload"):  # whose parts say batch and context
        asked |= {"workload": workload, "batch_size": None, "context": None}
    if not asked.get("confirm"):
        asked["time_budget_s"] = None
    words = ["archsearch", "search"]
    for name, value in asked.items():
        option = OPTIONS.get(name, name.replace("_", "-"))
        if option is None or value is None or value == usual.get(name):
            continue
        for each in str(value).split() if name in _SEVERAL else [value]:
            seconds = name.endswith("budget_s")
            words += [f"--{option}", f"{value:g}s" if seconds else str(each)]
    return shlex.join(words)


def section_reproduce(run: Run) -> Section:
    """The command of the search, the versions and the profile it needs."""
    info = run.info
    packages = " ".join(
        f"{name}=={version}"
        for name, version in info["packages"].items()
        if name != "python" and "+" not in str(version)
    )
    commit = info["code"].get("commit")
    lines = [f"git checkout {commit}"] if commit else []
    lines += [f"pip install {packages}"] if packages else []
    lines.append(search_command(run.arguments, run.path / WORKLOAD_FILE))
    profile = info["profile"].get("hash")
    needs = f"It needs the profile with hash {profile}. " if profile else ""
    words = (
        f"{needs}The ranking is the same with the same seed, versions and profile; what is timed"
        " and trained is measured anew. The numbers of the figures: archsearch report RUN"
        " --figures (SVG, PNG, CSV)."
    )
    return Section("How to reproduce this", notes=[words], commands=[("", "\n".join(lines))])
