"""Passes of llama.cpp with a clock around each: the rounds that its server ran, run again by the
package's own library.

The server times whole rounds. The library exports `llama_decode`, so their passes are run once
more, in the server's order and against as many cached tokens: gamma draft passes of one token, the
target's over gamma + 1 with the head for every row, and the draft's over the same gamma + 1
(`common_speculative_process`).

They run in a process of their own, this script: beside the server's threads on all of two cores
they took 22 to 60 ms for 11 (Q4_0). libgomp's threads wait by sleeping where a process has more of
them than cores (gomp_throttled_spin_count_var in its source).
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "child"))  # where `loop` is

from loop import Failed, Message, claim_stdout, serve

PARAMETER_WORDS = 128
"""Room for llama.h's parameter structs, which grow from build to build (about 40 words in 2026);
they are passed by value."""
COMPARED, COMPARED_AT = (1, 8), 16
"""Tokens in the target's passes for comparison, and tokens behind which they are run."""
DEFAULTS = [512, 2048, 512, 1]
"""n_ctx, n_batch, n_ubatch, n_seq_max: the first words of llama_context_params, which say that the
layout is the known one."""


class Parameters(ctypes.Structure):
    """llama_model_params or llama_context_params, as words."""

    _fields_ = [("words", ctypes.c_uint32 * PARAMETER_WORDS)]


class Batch(ctypes.Structure):
    """llama_batch."""

    _fields_ = [
        ("count", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embedding", ctypes.c_void_p),
        ("position", ctypes.POINTER(ctypes.c_int32)),
        ("sequences", ctypes.POINTER(ctypes.c_int32)),
        ("sequence", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "llama_model_default_params": (Parameters, []),
    "llama_context_default_params": (Parameters, []),
    "llama_model_load_from_file": (ctypes.c_void_p, [ctypes.c_char_p, Parameters]),
    "llama_init_from_model": (ctypes.c_void_p, [ctypes.c_void_p, Parameters]),
    "llama_set_n_threads": (None, [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32]),
    "llama_get_memory": (ctypes.c_void_p, [ctypes.c_void_p]),
    "llama_memory_seq_rm": (
        ctypes.c_bool,
        [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32],
    ),
    "llama_batch_init": (Batch, [ctypes.c_int32, ctypes.c_int32, ctypes.c_int32]),
    "llama_decode": (ctypes.c_int32, [ctypes.c_void_p, Batch]),
    "llama_synchronize": (None, [ctypes.c_void_p]),
}


def library(path: str) -> ctypes.CDLL:
    """The functions of SIGNATURES in the shared object at `path`. Raises Failed where it has them
    not, or laid out otherwise."""
    found = ctypes.CDLL(path)
    for name, (result, arguments) in SIGNATURES.items():
        if not hasattr(found, name):
            raise Failed(
                f"{path} has no {name}, so llama.cpp's passes cannot be timed; run: archsearch"
                " engine install llama.cpp"
            )
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    words = list(found.llama_context_default_params().words[: len(DEFAULTS)])
    if words != DEFAULTS:
        raise Failed(
            f"llama_context_params of {path} begins with {words}, not {DEFAULTS}: this build is not"
            " known here"
        )
    return found


class Model:
    """A model with a context of `room` tokens; `weights`: those of another one of the same file."""

    def __init__(
        self, functions: Any, path: str, room: int, threads: int, weights: Any = None
    ) -> None:
        self.functions, self.cached = functions, 0
        self.weights = weights or functions.llama_model_load_from_file(
            path.encode(), functions.llama_model_default_params()
        )
        parameters = functions.llama_context_default_params()
        parameters.words[0] = room
        self.context = (
            functions.llama_init_from_model(self.weights, parameters) if self.weights else None
        )
        if not self.context:
            raise Failed(f"llama.cpp does not load {path}")
        functions.llama_set_n_threads(self.context, threads, threads)
        self.memory = functions.llama_get_memory(self.context)
        self.batch = functions.llama_batch_init(DEFAULTS[2], 0, 1)

    def pass_s(self, token_ids: Sequence[int], at: int, every: bool) -> float:
        """Seconds of a pass over `token_ids` behind `at` cached tokens; the head for its last row,
        or for `every` one."""
        if self.cached > at:
            self.functions.llama_memory_seq_rm(self.memory, 0, at, -1)
        batch = self.batch
        batch.count = len(token_ids)
        for row, token in enumerate(token_ids):
            batch.token[row], batch.position[row] = token, at + row
            batch.sequences[row], batch.sequence[row][0] = 1, 0
            batch.logits[row] = every or row == len(token_ids) - 1
        started = time.perf_counter()
        failed = self.functions.llama_decode(self.context, batch)
        self.functions.llama_synchronize(self.context)
        seconds = time.perf_counter() - started
        if failed:
            raise Failed(f"llama_decode over {len(token_ids)} tokens behind {at} answered {failed}")
        self.cached = at + len(token_ids)
        return seconds

    def fill(self, token_ids: Sequence[int], count: int) -> None:
        """Bring `count` tokens into the cache, repeating `token_ids`; those that are there already
        stay."""
        while self.cached < count:
            more = min(count - self.cached, DEFAULTS[2])
            self.pass_s(
                [token_ids[(self.cached + row) % len(token_ids)] for row in range(more)],
                self.cached,
                False,
            )


class Passes:
    """The passes of one server's rounds: models of its files (their pages are shared), each with a
    context of `room` tokens; `plain`: the target once more, for those for comparison
    (docs/profiles.md)."""

    target: Any = None
    draft: Any = None
    plain: Any = None

    def load(self, request: Message) -> Message:
        functions = library(request["library"])
        size = (request["room"], request["threads"])
        self.target = Model(functions, request["target"], *size)
        self.plain = Model(functions, request["target"], *size, self.target.weights)
        self.draft = Model(functions, request["draft"], *size) if request["draft"] else None
        return {}

    def add(self, request: Message) -> Message:
        """Fill in `compared`, `target_s`, `draft_s` and `draft_tokens` of the steps behind the
        prompt `token_ids`.

        The draft's pass over what was verified comes first: it is the first that its weights come
        from memory for, and the passes of one token of the next round follow it.
        """
        steps, token_ids = request["steps"], request["token_ids"]
        for number, step in enumerate(step for step in steps if not step.get("prefill")):
            at, gamma = int(step["context"]), step["gamma"]
            rows = [token_ids[row % len(token_ids)] for row in range(gamma + 1)]
            singles = []
            if self.draft is not None and gamma:
                self.draft.fill(token_ids, at)
                singles = [
                    self.draft.pass_s(rows[row : row + 1], at + row, True) for row in range(gamma)
                ]
            self.plain.fill(token_ids, COMPARED_AT)
            tokens = COMPARED[number % len(COMPARED)]
            same = [token_ids[row % len(token_ids)] for row in range(tokens)]
            step["compared"] = [tokens, self.plain.pass_s(same, COMPARED_AT, True)]
            self.target.fill(token_ids, at)
            step["target_s"] = self.target.pass_s(rows, at, True)
            if singles:
                step["draft_s"] = [self.draft.pass_s(rows, at, False), *singles]
                step["draft_tokens"] = [gamma + 1, *[1] * gamma]
        return {"steps": steps}


class PassClock:
    """Adds what each pass takes to the steps that a server reported, by a process of its own."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "ARCHSEARCH_PARENT": str(os.getpid())},
        )

    def ask(self, do: str, **request: object) -> Message:
        """One request of that process. Raises Failed where it cannot answer."""
        said, heard = self.process.stdin, self.process.stdout
        assert said is not None and heard is not None
        try:
            said.write(json.dumps({"do": do, **request}).encode() + b"\n")
            said.flush()
            answer = json.loads(heard.readline())
        except (OSError, ValueError) as error:
            raise Failed("the process that times llama.cpp's passes is gone") from error
        if "ok" not in answer:
            raise Failed(answer["error"])
        return answer["ok"]

    def added(self, steps: Sequence[Message], token_ids: Sequence[int]) -> Any:
        """The steps behind the prompt `token_ids` with the seconds of their passes."""
        return self.ask("add", steps=steps, token_ids=token_ids)["steps"]


if __name__ == "__main__":
    serve(Passes(), claim_stdout())
