"""vLLM's errors as one line each, of the kind that the parent prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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
    text = str(error).lower()
    words = (
        "out of memory",
        "not enough memory",
        "cannot allocate memory",
        "can't allocate memory",
        "no available memory",
    )
    if (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or any(word in text for word in words)
    ):
        return True
    return "kv cache" in text and ("larger than" in text or "memory" in text)


def telling(
    call: Callable[[Mapping[str, Any]], dict[str, Any]], *, starting: bool = False
) -> Callable[..., dict[str, Any]]:
    """`call` with vLLM's errors turned into those that the parent prints in one line; a bug of ours
    stays what it is.

    While `starting`, ValueError and OSError are vLLM's checks of what it was asked for.
    """

    def reported(request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return call(request)
        except (UserError, Failed):
            raise
        except Exception as error:
            text = one_line(error)
            if is_memory(error):
                raise MemoryError(text) from error
            if starting and isinstance(error, ValueError | OSError):
                raise UserError(f"vLLM refuses: {text}") from error
            if type(error).__module__.split(".")[0] in (
                "vllm",
                "pydantic_core",
                "pydantic",
                "torch",
            ):
                raise Failed(f"{type(error).__name__}: {text}") from error
            raise

    return reported
