"""What an interpreter has, found out by importing it there."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any, Final

from archsearch.engines.environments.processes import clean_environment, process_group
from archsearch.engines.environments.recipes import recipe
from archsearch.errors import ArchsearchError, RunFailed

CHECK_TIMEOUT_S: Final = 300.0  # the first import of vLLM on a slow disk
_IMPORT: Final = """
import importlib, importlib.metadata, json, os, sys, time
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
begun = time.monotonic()
module = importlib.import_module(sys.argv[1])
getattr(module, sys.argv[2])
packages = {}
for name in sys.argv[3:]:
    try:
        packages[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
version = str(getattr(module, "__version__", "") or next(iter(packages.values()), ""))
python_version = ".".join(map(str, sys.version_info[:3]))
out.write(json.dumps({"version": version, "python_version": python_version, "packages": packages,
                      "seconds": time.monotonic() - begun}))
out.flush()
"""


def import_facts(engine: str, inside: Path, where: str) -> dict[str, Any]:
    """What importing `engine` with `inside` shows: version, python_version, packages, seconds.
    RunFailed when it fails.

    Raises ArchsearchError where the interpreter has no such engine.
    """
    known = recipe(engine)
    names = dict.fromkeys(
        package.split("==")[0] for packages in known.packages.values() for package in packages
    )
    command = [
        str(inside),
        "-c",
        _IMPORT,
        known.module,
        known.name,
        *names,
        "torch",
        "transformers",
    ]
    environment = clean_environment({**known.environment, "HF_HUB_OFFLINE": "1"})
    with process_group(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        try:
            output, errors = process.communicate(timeout=CHECK_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise RunFailed(
                f"importing {known.module} with {inside} took more than {CHECK_TIMEOUT_S:.0f}"
                f" s{where}"
            ) from None
        status = process.returncode
    if status:
        lines = [line for line in errors.splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else f"exit status {status}"
        if f"No module named '{known.module}'" in reason:
            raise ArchsearchError(
                f"{inside} has no {known.title} (no module {known.module}); run: archsearch engine"
                f" install {engine}, or name an interpreter that has it with --engine-python"
            )
        raise RunFailed(f"importing {known.module} with {inside} failed: {reason}{where}")
    facts: dict[str, Any] = json.loads(output)
    # Without the build (2026.4.1.0-3072-..., +cpu), which the packages name.
    return {**facts, "version": facts["version"].split("+")[0].split("-")[0]}


def is_broken(inside: Path, package: str) -> bool:
    """Whether a package is installed but does not import."""
    program = (
        f"import importlib.util as u, sys; sys.exit(0 if u.find_spec({package!r}) is None else"
        f" __import__({package!r}) is None)"
    )
    answer = subprocess.run(
        [str(inside), "-c", program],
        capture_output=True,
        timeout=CHECK_TIMEOUT_S,
        env=clean_environment(),
    )
    return answer.returncode != 0


def release_numbers(version: str) -> tuple[int, ...]:
    """Release numbers for comparison: 0.32.0 -> (0, 32, 0); what follows (rc1, .post2, +cpu) does
    not count."""
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = tuple(int(part) for part in match.group().split(".")) if match else ()
    while numbers and numbers[-1] == 0:
        numbers = numbers[:-1]
    return numbers
