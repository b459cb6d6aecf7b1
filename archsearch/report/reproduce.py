"""The command that makes a run again, and what it must find to give the same numbers."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, Final

from archsearch.report.section import Section
from archsearch.runs.run import Run

# What `search` takes unless told otherwise: not repeated.
DEFAULTS: Final[dict[str, Any]] = {
    "trials": 300,
    "alpha": "prior",
    "answer_tokens": 96,
    "confirm": 0,
    "finalists": 3,
    "confirm_prompts": 24,
    "seed": 0,
    "top": 5,
    "max_gamma": 16,
    "batch_size": 1,
    "context": 256,
    "temperature": 0.0,
}
# Arguments whose options have another name; None: those that are none, or follow from the rest.
OPTIONS: Final[dict[str, str | None]] = {
    "time_budget_s": "time-budget",
    "storage": None,
    "families": "family",
    "engine_options": "engine-option",
    "max_gamma": None,
    "engine_version": None,
}
_SEVERAL: Final = ("families", "engine_options")


def search_command(arguments: Mapping[str, Any]) -> str:
    """`archsearch search ...` with every option that differs from its default."""
    words = ["archsearch", "search"]
    trains = bool(arguments.get("confirm"))
    for name, value in arguments.items():
        option = OPTIONS.get(name, name.replace("_", "-"))
        if (
            option is None
            or value is None
            or value == DEFAULTS.get(name)
            or (name == "time_budget_s" and not trains)
        ):
            continue
        for each in str(value).split() if name in _SEVERAL else [value]:
            words += [f"--{option}", f"{value:g}s" if name == "time_budget_s" else str(each)]
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
    lines.append(search_command(run.arguments))
    profile = info["profile"].get("hash")
    needs = f"It needs the profile with hash {profile}. " if profile else ""
    words = (
        f"{needs}The ranking is the same with the same seed, versions and profile; what is timed"
        " and trained is measured anew. The numbers of the figures: archsearch report RUN"
        " --figures (SVG, PNG, CSV)."
    )
    return Section("How to reproduce this", notes=[words], commands=[("", "\n".join(lines))])
