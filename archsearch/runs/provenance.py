"""The code that made a run: version, git commit, versions of the packages it depends on."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from typing import Final

from archsearch.paths import package_dir

PACKAGES: Final = ("numpy", "optuna", "scikit-learn", "torch", "transformers", "vllm")


def package_versions(names: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Versions of python and of what is installed of `names`, without importing them."""
    versions = {"python": platform.python_version()}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def git_commit() -> str | None:
    """The commit of the checkout this package runs from, "+changes" where it was edited; None
    outside a checkout."""
    root = package_dir().parent
    if not (root / ".git").exists():
        return None
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        answers = [
            subprocess.run(
                ["git", "-C", str(root), *command],
                capture_output=True,
                text=True,
                timeout=10,
                env=environment,
            )
            for command in (
                ["rev-parse", "HEAD"],
                ["status", "--porcelain", "--untracked-files=no"],
            )
        ]
    except (OSError, subprocess.TimeoutExpired):
        return None
    if answers[0].returncode:
        return None
    return answers[0].stdout.strip() + ("+changes" if answers[1].stdout.strip() else "")
