"""What every worker does: read requests, answer them, die with its parent. Standard library
only."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any, TextIO

Message = dict[str, Any]
"""A request or an answer, or a part of one, as JSON holds it."""


class UserError(Exception):
    """Something the user can mend; its text is one line."""

    kind = "user"


class Failed(Exception):
    """The engine could not do it; its text is one line."""

    kind = "failed"


def claim_stdout() -> TextIO:
    """The original stdout for answers; whatever engines print goes to stderr from now on. Call
    before importing the engine."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def die_with_parent() -> None:
    """End this process group once the parent is gone, however it went (a killed parent closes
    nothing while we compute)."""
    parent = int(os.environ.get("ARCHSEARCH_PARENT", "0") or 0)
    if not parent:
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        end_group()

    threading.Thread(target=watch, daemon=True).start()


def end_group() -> None:
    """End this process and all that it started."""
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def serve(worker: object, answers: TextIO) -> None:
    """Answer one request a line until stdin closes, then end the process group: by what the
    `worker` has under the request's "do"."""
    die_with_parent()
    for line in sys.stdin:
        if not line.strip():
            continue
        try:
            request = json.loads(line)
            answer: Message = {"ok": getattr(worker, request["do"])(request)}
        except (UserError, Failed) as error:
            answer = {"error": str(error), "kind": error.kind}
        except MemoryError as error:
            answer = {"error": str(error) or "not enough memory", "kind": "memory"}
        except Exception as error:
            text = str(error).strip().splitlines() or [type(error).__name__]
            short = ("out of memory", "can't allocate memory")
            memory = any(words in str(error).lower() for words in short)
            answer = {
                "error": f"{type(error).__name__}: {text[0]}"[:500],
                "kind": "memory" if memory else "bug",
                "trace": traceback.format_exc(),
            }
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    if os.environ.get("ARCHSEARCH_PARENT"):
        end_group()


def end_tokens(*configs: Mapping[str, Any]) -> list[int]:
    """The tokens that end a text: of the first of a model's configs that names any."""
    for config in configs:
        ends = config.get("eos_token_id")
        if ends is not None:
            return [int(end) for end in (ends if isinstance(ends, list) else [ends])]
    return []
