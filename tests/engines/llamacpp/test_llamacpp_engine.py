"""llama.cpp: rounds out of its stream of tokens, GGUF files in the cache, what it is not started
with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf
import pytest

from archsearch.architecture.architecture import Architecture
from archsearch.engines.engine import EnginePrompt, EngineSettings, Sampling
from archsearch.engines.llamacpp.engine import SERVER_VARIABLE, WORKER, LlamaCppEngine, gguf_of
from archsearch.errors import ArchsearchError, RunFailed
from archsearch.models.drafts import build_draft, save_draft
from tests.doubles.worker_modules import worker_modules

ARCH = Architecture(64, 128, 1, 2, 2, 32, 96)

with worker_modules(WORKER) as worker:  # its functions; llama.cpp itself is not loaded
    pass


def event(tokens: list[int], at_ms: float, drafted: int = 0, **more: Any) -> dict[str, Any]:
    return {"tokens": tokens, "timings": {"predicted_ms": at_ms, "draft_n": drafted}, **more}


STREAM = [
    event([5], 0.001),
    *(
        event([token], 40.0, 3) for token in (6, 7, 8)
    ),  # two of three accepted, and the target's own
    event([9], 70.0, 6),  # none accepted
    *(event([token], 110.0, 8) for token in (1, 2)),  # room for two only
    event([], 110.0, 8, stop=True, stop_type="limit"),
]


def told(
    events: list[dict[str, Any]], limit: int = 7, clock: tuple[float, float] = (0.0, 0.2)
) -> Any:
    """A request of ten tokens; `clock`: when it was sent, and its seconds."""
    prompt = {"id": "p", "token_ids": list(range(10))}
    return worker.stream.streamed(prompt, events, clock, 3, limit)


def test_tokens_of_one_round_carry_the_same_clock() -> None:
    one = told(STREAM)
    found = one.answer
    assert found["token_ids"] == (5, 6, 7, 8, 9, 1, 2) and one.written == [3, 1, 2]
    assert found["gaps_s"] == pytest.approx([0.039999, 0.03, 0.04]) and found["decode_tokens"] == 6
    assert found["seconds"] == pytest.approx(found["first_s"] + found["decode_seconds"])
    steps = worker.stream.steps_of([one])
    assert [step["written"] for step in steps] == [1, 3, 1, 2] and [
        s["target_tokens"] for s in steps
    ] == [10, 4, 4, 3]
    assert [s["context"] for s in steps] == [0, 11, 14, 15] and steps[0]["prefill"]


def test_slots_write_in_one_step_and_a_prompt_read_beside_them_is_said() -> None:
    # sent in the first one's first round, read in its second, and running on behind it
    stream = [event([5], 0.001), event([6], 40.0, 3), event([7], 80.0, 6), STREAM[-1]]
    steps = worker.stream.steps_of([told(STREAM), told(stream, 64, (0.1, 0.14))])
    assert [s["batch"] for s in steps] == [1, 1, 2, 2, 1]
    assert [s["written"] for s in steps] == [1, 3, 2, 3, 1]
    assert [s["prefill"] for s in steps] == [True, True, True, False, False]
    assert [s["seconds"] for s in steps] == pytest.approx([0.09, 0.04, 0.03, 0.04, 0.04], abs=1e-5)
    assert steps[3]["target_tokens"] == 3 + 4 and steps[3]["context"] == (15 + 11) / 2


def test_a_short_prompt_behind_a_long_round_is_a_step_of_its_own() -> None:
    steps = worker.stream.steps_of([told(STREAM), told(STREAM, clock=(0.201, 0.115))])
    assert [s["batch"] for s in steps] == [1] * 8 and steps[4]["seconds"] < 0.006


def test_rounds_that_the_limit_cut_are_not_counted() -> None:
    found = told(STREAM).answer
    assert (
        found["round_lengths"] == (3,)
        and found["drafted"] == 3
        and found["accepted_by_position"] == (1, 1, 0)
    )
    assert told(STREAM, 64).answer["round_lengths"] == (3, 1, 2)


@pytest.mark.parametrize(
    ("events", "words"),
    [([], "no token was written"), ([{"error": {"message": "out of slots"}}], "out of slots")],
)
def test_an_answer_that_breaks_off_is_a_failure(events: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(Exception, match=words):
        told(events)


@pytest.mark.parametrize(
    ("dtype", "kind"), [("float16", "F16"), ("q8_0", "Q8_0"), ("q4_0", "Q4_0"), ("q4_1", "Q4_1")]
)
def test_a_folder_is_written_once_in_each_precision(
    dtype: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARCHSEARCH_CACHE", str(tmp_path / "cache"))
    save_draft(build_draft(ARCH), tmp_path / "draft")
    path = gguf_of(tmp_path / "draft", dtype)
    written = path.stat().st_mtime_ns
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert kinds["blk.0.ffn_up.weight"] == kind and kinds["output_norm.weight"] == "F32"
    assert kinds["token_embd.weight"] == ("Q8_0" if kind.startswith("Q") else kind)
    assert gguf_of(tmp_path / "draft", dtype) == path and path.stat().st_mtime_ns == written
    assert gguf_of(path, dtype) == path and [item.name for item in path.parent.iterdir()] == [
        path.name
    ]


def test_a_given_file_runs_as_it_is_beside_a_draft_in_its_own_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARCHSEARCH_CACHE", str(tmp_path / "cache"))
    save_draft(build_draft(ARCH), tmp_path / "draft")
    target = gguf_of(tmp_path / "draft", "q4_1", into=tmp_path)

    def kinds(dtype: str, draft_dtype: str | None) -> str:
        engine = LlamaCppEngine(EngineSettings(dtype=dtype, draft_dtype=draft_dtype))
        first, second = engine.prepared([engine._source(target), str(tmp_path / "draft")])
        assert first == str(target)
        tensors = gguf.GGUFReader(second).tensors
        return next(t.tensor_type.name for t in tensors if t.name == "blk.0.ffn_up.weight")

    assert kinds("q4_1", None) == "Q4_1" and kinds("q4_1", "float16") == "F16"
    assert kinds("q4_k_m", None) == "Q8_0"  # K-quants are taken, not written
    with pytest.raises(ArchsearchError, match="archsearch writes no GGUF in q4_k_m: give a GGUF"):
        kinds("q4_k_m", "q4_k_m")
    save_draft(build_draft(ARCH.replace(vocab_size=64)), tmp_path / "small")
    with pytest.raises(ArchsearchError, match="holds 96 tokens, the draft needs 64"):
        gguf_of(tmp_path / "small", "q8_0", like=target)


def test_what_it_is_not_started_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(**changes: Any) -> None:
        settings = EngineSettings(**{"dtype": "float16", **changes.pop("settings", {})})
        LlamaCppEngine(settings).start(tmp_path, tmp_path, 2, **changes)

    with pytest.raises(ArchsearchError, match="one gamma for all batch sizes"):
        start(schedule=((1, 4, 2),))
    with pytest.raises(ArchsearchError, match="got dtype 'float8_e4m3fn'"):
        start(settings={"dtype": "float8_e4m3fn"})
    with pytest.raises(ArchsearchError, match="on weights"):
        start(settings={"dummy_weights": True})
    with pytest.raises(ArchsearchError, match="neither"):
        gguf_of(tmp_path, "float16")
    with pytest.raises(ArchsearchError, match=f"--engine-path names {tmp_path}, which cannot be"):
        start(settings={"path": tmp_path})
    monkeypatch.setenv(SERVER_VARIABLE, str(tmp_path / "nothing"))
    with pytest.raises(ArchsearchError, match="cannot be run; name a llama-server"):
        start()


SERVER = """#!{python}
import http.server, json, os, sys
if "--version" in sys.argv:
    sys.exit(print("version: 11549 (abc)"))
given = dict(zip(sys.argv[2::2], sys.argv[3::2]))
if given.get("--spec-type") == "draft-simple" and "{fault}" != "dies":
    sys.exit("error: {fault}")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        self.send_response(200); self.end_headers()
        event = dict(tokens=[5], timings=dict(predicted_ms=1.0, draft_n=0))
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n"); self.wfile.flush()
        os._exit(9)
    def log_message(self, *words): pass
http.server.HTTPServer(("127.0.0.1", int(given["--port"])), Handler).serve_forever()
"""


def own_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> LlamaCppEngine:
    """An engine on a llama-server that is made up and goes wrong; a draft beside it."""
    script = tmp_path / "llama-server"
    script.write_text(SERVER.format(python=sys.executable, fault=fault))
    script.chmod(0o755)
    monkeypatch.setenv("ARCHSEARCH_CACHE", str(tmp_path / "cache"))
    save_draft(build_draft(ARCH), tmp_path / "draft")
    return LlamaCppEngine(EngineSettings(dtype="float16", max_len=32, path=script))


def test_a_server_that_dies_in_mid_answer_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = own_server(tmp_path, monkeypatch, "dies")
    engine.start(tmp_path / "draft", tmp_path / "draft", 2)
    assert engine.version == "11549"
    with pytest.raises(RunFailed, match="broke off in the answer to prompt 'p'") as told:
        engine.generate([EnginePrompt("p", (1, 2))], Sampling(4))
    assert "\n" not in str(told.value)
    engine.stop()


@pytest.mark.parametrize("fault", ["unknown speculative type: draft-simple", "port is in use"])
def test_a_server_that_does_not_come_up_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    engine = own_server(tmp_path, monkeypatch, fault)
    with pytest.raises(ArchsearchError, match=f"status 1 while loading: error: {fault}") as told:
        engine.start(tmp_path / "draft", tmp_path / "draft", 2)
    assert "\n" not in str(told.value) and not isinstance(told.value, RunFailed)  # exit status 2
