"""llama.cpp's passes: a server's rounds run again pass by pass, on a library that is made up; and
once for real."""

from __future__ import annotations

import ctypes
import ctypes.util
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from archsearch.architecture.architecture import Architecture
from archsearch.engines.engine import EnginePrompt, EngineSettings, Sampling
from archsearch.engines.environments.environment import find_python
from archsearch.engines.llamacpp.engine import SERVER_VARIABLE, WORKER, LlamaCppEngine
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.models.drafts import build_draft, save_draft
from tests.doubles.worker_modules import worker_modules

TARGET = Architecture(64, 128, 2, 2, 2, 32, 96)

with worker_modules(WORKER) as worker:  # its functions; llama.cpp itself is not loaded
    pass


class Library:
    """llama.h as far as passes need it: what was decoded (rows, at, rows with logits), what was cut
    off the cache."""

    def __init__(self, answers: int = 0) -> None:
        self.decoded: list[tuple[int, int, int]] = []
        self.removed: list[int] = []
        self.answers = answers
        self.kept: list[Any] = []

    def llama_model_default_params(self) -> Any:
        return worker.passes.Parameters()

    llama_context_default_params = llama_model_default_params

    def llama_model_load_from_file(self, path: bytes, parameters: Any) -> int:
        return 0 if path == b"missing" else 1

    def llama_init_from_model(self, model: int, parameters: Any) -> int:
        self.room = parameters.words[0]
        return 2

    def llama_set_n_threads(self, context: int, threads: int, batch_threads: int) -> None:
        assert threads == batch_threads == 3

    def llama_get_memory(self, context: int) -> int:
        return 4

    def llama_memory_seq_rm(self, memory: int, sequence: int, first: int, last: int) -> bool:
        self.removed.append(first)
        return True

    def llama_batch_init(self, count: int, embeddings: int, sequences: int) -> Any:
        one = (ctypes.c_int32 * 1)()
        token, position, sizes = ((ctypes.c_int32 * count)() for _ in range(3))
        ids = (ctypes.POINTER(ctypes.c_int32) * count)(
            *[ctypes.cast(one, ctypes.POINTER(ctypes.c_int32))] * count
        )
        logits = (ctypes.c_int8 * count)()
        self.kept += [one, token, position, sizes, ids, logits]

        def at(array: Any, kind: Any) -> Any:
            return ctypes.cast(array, ctypes.POINTER(kind))

        numbers = [at(array, ctypes.c_int32) for array in (token, position, sizes)]
        rows = at(ids, ctypes.POINTER(ctypes.c_int32))
        return worker.passes.Batch(
            0, numbers[0], None, numbers[1], numbers[2], rows, at(logits, ctypes.c_int8)
        )

    def llama_decode(self, context: int, batch: Any) -> int:
        heads = sum(batch.logits[row] for row in range(batch.count))
        self.decoded.append((batch.count, batch.position[0], heads))
        return self.answers

    def llama_synchronize(self, context: int) -> None:
        pass


def test_a_round_is_run_again_as_the_server_runs_it() -> None:
    target, draft = Library(), Library()
    passes = worker.passes.Passes()
    plain = Library()
    passes.target, passes.draft, passes.plain = (
        worker.passes.Model(made, "file", 128, 3) for made in (target, draft, plain)
    )
    steps = [
        {"prefill": True, "context": 0.0, "gamma": 0},
        {"context": 11.0, "gamma": 3},
        {"context": 13.0, "gamma": 3},
    ]
    passes.add({"steps": steps, "token_ids": range(10)})
    # the prompt, then the verification with the head for every row; what was refused leaves the
    # cache
    assert (
        target.decoded == [(11, 0, 1), (4, 11, 4), (4, 13, 4)]
        and target.removed == [13]
        and target.room == 128
    )
    # tokens one by one, then what was verified with the head for its last row
    rounds = [[(1, at, 1), (1, at + 1, 1), (1, at + 2, 1), (4, at, 1)] for at in (11, 13)]
    assert draft.decoded == [(11, 0, 1), *rounds[0], *rounds[1]] and draft.removed == [11, 13, 13]
    assert "target_s" not in steps[0] and steps[1]["target_s"] > 0
    # beside each round the target's pass over one token or several, always behind as many
    assert plain.decoded == [(16, 0, 1), (1, 16, 1), (8, 16, 8)] and plain.removed == [16]
    assert "compared" not in steps[0] and [step["compared"][0] for step in steps[1:]] == [1, 8]
    assert all(step["compared"][1] > 0 for step in steps[1:])
    assert steps[1]["draft_tokens"] == [4, 1, 1, 1] and len(steps[1]["draft_s"]) == 4


def test_without_a_draft_only_the_target_runs() -> None:
    target = Library()
    steps = [{"context": 600.0, "gamma": 0}]
    passes = worker.passes.Passes()
    passes.target = worker.passes.Model(target, "file", 1024, 3)
    passes.plain = worker.passes.Model(Library(), "file", 1024, 3, passes.target.weights)
    passes.add({"steps": steps, "token_ids": [5]})
    assert target.decoded == [
        (512, 0, 1),
        (88, 512, 1),
        (1, 600, 1),
    ]  # prompts are read in blocks that the context takes
    assert steps[0]["target_s"] > 0 and "draft_s" not in steps[0]


def test_a_library_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Function:
        def __init__(self, answer: Any) -> None:
            self.answer = answer

        def __call__(self) -> Any:
            return self.answer

    def made(words: list[int], without: str = "") -> Any:
        found = worker.passes.Parameters()
        found.words[: len(words)] = words
        functions = {name: Function(found) for name in worker.passes.SIGNATURES if name != without}
        return type("Shared", (), functions)()

    for shared, words in (
        (made([1, 2, 3, 4]), r"begins with \[1, 2, 3, 4\]"),
        (made(worker.passes.DEFAULTS, "llama_decode"), "no llama_decode"),
    ):
        monkeypatch.setattr(worker.passes.ctypes, "CDLL", lambda path, shared=shared: shared)
        with pytest.raises(Exception, match=words):
            worker.passes.library("here.so")
    monkeypatch.setattr(worker.passes.ctypes, "CDLL", lambda path: made(worker.passes.DEFAULTS))
    assert worker.passes.library("here.so") is not None
    with pytest.raises(Exception, match="does not load missing"):
        worker.passes.Model(Library(), "missing", 64, 3)
    with pytest.raises(Exception, match="over 2 tokens behind 0 answered 1"):
        worker.passes.Model(Library(answers=1), "file", 64, 3).pass_s([1, 2], 0, True)


def test_a_process_of_passes_that_cannot_load_or_is_gone_says_so(tmp_path: Path) -> None:
    clock = worker.passes.PassClock()
    with pytest.raises(worker.passes.Failed, match="cannot open shared object"):
        clock.ask("load", library=str(tmp_path / "no.so"))
    with pytest.raises(worker.passes.Failed, match="has no llama_model_default_params"):
        clock.ask("load", library=ctypes.util.find_library("m"))
    clock.process.kill()
    clock.process.communicate()  # closes its pipes
    with pytest.raises(worker.passes.Failed, match="passes is gone"):
        clock.added([], [1])


def test_a_server_of_one_s_own_tells_no_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = tmp_path / "llama-server"
    server.touch(0o755)
    monkeypatch.setenv(SERVER_VARIABLE, str(server))
    with pytest.raises(ArchsearchError, match=f"not in {server}; unset {SERVER_VARIABLE}"):
        LlamaCppEngine(EngineSettings(dtype="float16", time_passes=True)).start(tmp_path, None, 0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "q8_0"])
def test_the_real_library_times_the_passes_of_the_real_server(dtype: str, tmp_path: Path) -> None:
    try:
        find_python("llama.cpp")
    except MissingDataError:
        pytest.skip("llama.cpp is not installed: archsearch engine install llama.cpp")
    save_draft(build_draft(TARGET), tmp_path / "target")
    save_draft(build_draft(TARGET.replace(num_hidden_layers=1)), tmp_path / "draft")
    engine = LlamaCppEngine(EngineSettings(dtype=dtype, max_len=128, threads=1, time_passes=True))
    try:
        engine.start(tmp_path / "target", tmp_path / "draft", 3, synthetic=(0.7, 0.5, 0.3))
        engine.generate([EnginePrompt("p", tuple(range(1, 40)))], Sampling(48, ignore_end=True))
        rounds = [step for step in engine.steps() if step.gamma == 3]
    finally:
        engine.stop()
    assert len(rounds) > 8 and (tmp_path / "draft" / f"{dtype}.gguf").is_file()
    for step in rounds:
        assert step.draft_tokens == (4, 1, 1, 1) and len(step.draft_s) == 4
        assert (
            step.target_s is not None
            and 0 < step.target_s < 1
            and all(0 < seconds < 1 for seconds in step.draft_s)
        )
    passes = [step.compared for step in rounds if step.compared is not None]
    one, several = ([s for tokens, s in passes if tokens == size] for size in (1, 8))
    assert len(one) + len(several) == len(rounds) and median(one) < median(several)
