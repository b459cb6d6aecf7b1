"""vLLM as a running server: a fake one speaks its API with made-up rounds and fails in every way;
then a real one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from archsearch.architecture.architecture import Architecture
from archsearch.engines.engine import Engine, EnginePrompt, EngineSettings, Sampling
from archsearch.engines.environments.environment import find_python
from archsearch.engines.openai.client import refusal
from archsearch.engines.vllm import server as server_module
from archsearch.engines.vllm.server import VllmServerEngine, deal, parse_metrics
from archsearch.errors import ArchsearchError, MissingDataError, RunFailed
from tests.doubles.world import make_model_folder

VOCABULARY = 50
PROMPTS = [EnginePrompt(f"p{i}", tuple(range(1, 4 + i))) for i in range(4)]
ROUNDS = (3, 1, 2, 3, 3, 1)  # tokens that the fake's rounds write, over and over; gamma 2


@dataclass
class Fake:
    """What the fake server is and does. `merge`: rounds it puts into one chunk; `dies_after`:
    prompts before it breaks off."""

    gamma: int = 2
    merge: int = 1
    metrics: bool = True
    max_len: int = 64
    others: int = 0
    in_flight: int = 0
    dies_after: int | None = None
    hangs: bool = False
    over: threading.Event = field(default_factory=threading.Event)
    drafts_less: bool = False
    refuses: tuple[int, str] | None = None
    error_chunk: str | None = None
    answer: Callable[[int], int] = field(default=lambda position: (7 * position) % VOCABULARY)
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    guard: threading.Lock = field(default_factory=threading.Lock)
    waits_for: int = 1
    most_at_once: int = 0
    at_once: int = 0

    def count(self, name: str, amount: int) -> None:
        with self.guard:
            self.counts[name] = self.counts.get(name, 0) + amount

    def page(self) -> str:
        """Two engines behind one server, as data parallelism shows them."""
        if not self.metrics:
            return "# HELP python_info\npython_info 1.0\n"
        label = 'model_name="tiny"'
        lines = [f'vllm:num_requests_running{{engine="0",{label}}} {float(self.in_flight)}']
        lines.append(
            f'vllm:num_requests_waiting_by_reason{{engine="0",{label},reason="capacity"}} 9.0'
        )
        names = ["generation_tokens"]
        names += ["spec_decode_num_drafts", "spec_decode_num_draft_tokens"] if self.gamma else []
        for name in names:
            for engine, value in enumerate((self.counts.get(name, 0), 5)):
                lines.append(f'vllm:{name}_total{{engine="{engine}",{label}}} {float(value)}')
            lines.append(f'vllm:{name}_created{{engine="0",{label}}} 1.7e+09')
        for position in range(self.gamma):
            value = float(self.counts.get(f"accepted{position}", 0))
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines.append(f'{name}{{engine="0",{label},position="{position}"}} {value}')
        return "\n".join(lines) + "\n"

    def chunks(self, request: dict[str, Any]) -> list[list[int]]:
        """The answer in chunks: the prompt's token, then rounds, the last of them cut; counted as
        vLLM counts."""
        text = [
            self.answer(len(request["prompt"]) + position)
            for position in range(request["max_tokens"])
        ]
        if not self.gamma:
            self.count("generation_tokens", len(text))
            return [[token] for token in text]
        lengths, turn = [1], 0
        while sum(lengths) < len(text):
            length = ROUNDS[turn % len(ROUNDS)]
            lengths.append(length)
            turn += 1
            self.count("spec_decode_num_drafts", 1)
            self.count("spec_decode_num_draft_tokens", self.gamma - self.drafts_less)
            for position in range(length - 1):
                self.count(f"accepted{position}", 1)
        self.count("generation_tokens", len(text) + self.others)
        rounds = [text[sum(lengths[:i]) : sum(lengths[: i + 1])] for i in range(len(lengths))]
        later = [sum(rounds[i : i + self.merge], []) for i in range(1, len(rounds), self.merge)]
        return [rounds[0], *later]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: Fake

    def log_message(self, *arguments: object) -> None:
        pass

    def reply(self, data: str, status: int = 200) -> None:
        body = data.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        pages = {
            "/version": '{"version": "0.32.0"}',
            "/v1/models": json.dumps(
                {
                    "data": [
                        {"id": "lora", "parent": "tiny"},
                        {"id": "tiny", "parent": None, "max_model_len": self.fake.max_len},
                    ]
                }
            ),
            "/metrics": self.fake.page(),
        }
        self.reply(pages.get(self.path, "no such page"), 200 if self.path in pages else 404)

    def do_POST(self) -> None:
        fake = self.fake
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with fake.guard:
            fake.asked.append({**request, "authorization": self.headers.get("Authorization")})
            number = len(fake.asked)
            fake.at_once += 1
            fake.most_at_once = max(fake.most_at_once, fake.at_once)
        deadline = time.monotonic() + 5
        while fake.most_at_once < fake.waits_for and time.monotonic() < deadline:
            time.sleep(0.005)
        try:
            if fake.refuses is not None:
                self.reply(fake.refuses[1], fake.refuses[0])
            elif not request.get("stream"):
                token = request["allowed_token_ids"][0]
                self.reply(
                    json.dumps(
                        {
                            "choices": [
                                {
                                    "logprobs": {
                                        "tokens": [f"token_id:{token}"],
                                        "token_logprobs": [-token],
                                    }
                                }
                            ]
                        }
                    )
                )
            else:
                self.stream(
                    fake.chunks(request),
                    dies=fake.dies_after is not None and number > fake.dies_after,
                )
        except (BrokenPipeError, ConnectionResetError):
            pass

    def stream(self, chunks: list[list[int]], dies: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for index, tokens in enumerate(chunks):
            if index == 2 and self.fake.hangs:
                self.fake.over.wait(600.0)
            if index == 2 and dies:
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            if index == 2 and self.fake.error_chunk:
                self.event(json.dumps({"error": {"message": self.fake.error_chunk, "code": 500}}))
            last = index == len(chunks) - 1
            choice = {
                "index": 0,
                "text": "x" * len(tokens),
                "token_ids": tokens,
                "finish_reason": "length" if last else None,
            }
            self.event(json.dumps({"choices": [choice]}))
            time.sleep(0.002)
        with self.fake.guard:  # before the client knows, who asks again at once
            self.fake.at_once -= 1
        self.event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def event(self, text: str) -> None:
        data = f"data: {text}\n\n".encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@contextmanager
def serving(**what: Any) -> Iterator[Fake]:
    fake = Fake(**what)
    handler = type("Handler", (Handler,), {"fake": fake})
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    http.daemon_threads = True
    fake.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield fake
    finally:
        fake.over.set()
        http.shutdown()
        http.server_close()
        thread.join()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    return folder


def started(
    fake: Fake, target: Path, *, concurrency: int = 1, draft: bool = True, **settings: Any
) -> VllmServerEngine:
    key = "server_url" if draft else "baseline_url"
    engine = VllmServerEngine(
        EngineSettings(concurrency=concurrency, **{key: fake.url}, **settings)
    )
    engine.start(target, Path("draft") if draft else None, 2 if draft else 0)
    return engine


def test_it_is_an_engine() -> None:
    engine = VllmServerEngine(EngineSettings(concurrency=4))
    assert isinstance(engine, Engine) and engine.name == "vllm" and engine.version
    assert engine.steps() == ()


@pytest.mark.parametrize("concurrency", [1, 3])
def test_each_chunk_is_a_round_and_the_cut_one_is_left_out(target: Path, concurrency: int) -> None:
    with serving(waits_for=concurrency) as fake:
        engine = started(fake, target, concurrency=concurrency)
        assert engine.version == "0.32.0"
        results = engine.generate(PROMPTS, Sampling(max_new_tokens=12, ignore_end=True))
    assert [result.prompt_id for result in results] == ["p0", "p1", "p2", "p3"]
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.token_ids == tuple(fake.answer(len(prompt.token_ids) + i) for i in range(12))
        # 1 + 3 + 1 + 2 + 3 = 10 are written when the round of 3 comes: two of its tokens fit, so it
        # does not count.
        assert result.round_lengths == (3, 1, 2, 3)
        assert (result.rounds, result.drafted, result.accepted_by_position) == (4, 8, (3, 2))
        assert result.decode_tokens == 11 and len(result.gaps_s) == 5 and result.text == "x" * 12
        assert 0 < result.first_s < result.seconds and 0 < result.decode_seconds < result.seconds
    assert fake.most_at_once == concurrency
    sent = min(fake.asked, key=lambda row: len(row["prompt"]))
    expected = {
        "prompt": [1, 2, 3],
        "temperature": 0.0,
        "seed": 0,
        "max_tokens": 12,
        "ignore_eos": True,
        "model": "tiny",
    }
    assert (
        expected.items() <= sent.items()
        and sent["return_token_ids"]
        and sent["top_p"] == 1.0
        and sent["top_k"] == 0
    )
    assert len({row["cache_salt"] for row in fake.asked}) == 4


def test_merged_chunks_take_the_server_s_counts(target: Path) -> None:
    with serving(merge=2) as fake:
        alone = started(fake, target).generate(PROMPTS, Sampling(max_new_tokens=12))
    for result in alone:  # exact for each prompt, the cut round too: rounds of 3, 1, 2, 3, 3
        assert (result.rounds, result.drafted, result.accepted_by_position) == (5, 10, (4, 3))
        assert result.round_lengths == () and len(result.gaps_s) == 3
    with serving(merge=2) as fake:
        together = started(fake, target, concurrency=4).generate(
            PROMPTS, Sampling(max_new_tokens=12)
        )
    assert (
        sum(result.rounds for result in together) == 20
        and sum(result.drafted for result in together) == 40
    )
    assert [sum(result.accepted_by_position[i] for result in together) for i in range(2)] == [
        16,
        12,
    ]
    assert all(result.rounds == 5 for result in together)


def test_a_baseline_is_a_server_without_a_draft(target: Path) -> None:
    with serving(gamma=0) as plain, serving() as helped:
        results = started(plain, target, draft=False).generate(PROMPTS, Sampling(max_new_tokens=6))
        assert all(
            (r.rounds, r.drafted, r.accepted, r.decode_tokens) == (0, 0, 0, 5) for r in results
        )
        assert [r.token_ids for r in results] == [
            r.token_ids
            for r in started(helped, target).generate(PROMPTS, Sampling(max_new_tokens=6))
        ]
        with pytest.raises(
            ArchsearchError, match="speculates with 2 draft tokens; .* --baseline-url"
        ):
            started(helped, target, draft=False)
        with pytest.raises(
            ArchsearchError, match="runs without a draft .* num_speculative_tokens 2"
        ):
            started(plain, target)
        # Without an address of its own the baseline looks at the server, and finds that it
        # speculates.
        with pytest.raises(ArchsearchError, match="--baseline-url"):
            VllmServerEngine(EngineSettings(server_url=helped.url)).start(target, None, 0)
        with pytest.raises(
            ArchsearchError, match="no server is named; give its address with --server-url"
        ):
            VllmServerEngine(EngineSettings(baseline_url=plain.url)).start(target, Path("draft"), 2)


def test_another_gamma_is_refused(target: Path) -> None:
    with (
        serving(gamma=3) as fake,
        pytest.raises(ArchsearchError, match="drafts 3 tokens a round, not 2; ask for gamma 3"),
    ):
        started(fake, target)
    with serving(drafts_less=True) as fake:
        engine = started(fake, target)
        with pytest.raises(ArchsearchError, match="drafted 1.00 tokens a round, not 2"):
            engine.generate(PROMPTS, Sampling(max_new_tokens=12))
        engine.start(target, Path("draft"), 2, schedule=[(1, 4, 2), (5, 8, 1)])
        assert all(
            result.drafted == result.rounds
            for result in engine.generate(PROMPTS, Sampling(max_new_tokens=12))
        )
        with pytest.raises(ArchsearchError, match="acceptance cannot be set"):
            engine.start(target, Path("draft"), 2, synthetic=(0.8, 0.6))


def test_no_server_is_one_line(target: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(
        ArchsearchError, match=f"no vLLM server answers at {url} .*refused.*--server-url"
    ) as caught:
        started(Fake(url=url), target)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    for address in ("ftp://127.0.0.1:8000", "http://", "http://127.0.0.1:99999"):
        with pytest.raises(ArchsearchError, match="is no server address; write it as"):
            started(Fake(url=address), target)
    with pytest.raises(ArchsearchError, match="VLLM_API_KEY") as caught:
        started(Fake(url="http://me:secret@127.0.0.1:8000"), target)
    assert "secret" not in str(caught.value)


def test_what_answers_is_no_vllm_or_has_no_metrics(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        serving(metrics=False) as fake,
        pytest.raises(ArchsearchError, match="start it without --disable-log-stats"),
    ):
        started(fake, target)
    with serving() as fake:
        fake.url += "/elsewhere"
        with pytest.raises(ArchsearchError, match="is no vLLM server .GET /version: 404"):
            started(fake, target)


def test_the_address_of_the_api_and_a_key_are_understood(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    with serving() as fake:
        fake.url += "/v1/"
        started(fake, target).generate(PROMPTS[:1], Sampling(max_new_tokens=4))
    assert fake.asked[0]["authorization"] == "Bearer sesame"


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_server_that_dies_half_way(target: Path, concurrency: int) -> None:
    with serving(dies_after=2) as fake:
        engine = started(fake, target, concurrency=concurrency)
        with pytest.raises(
            RunFailed,
            match="closed the connection in the middle of an answer; [12] of 4 prompts were done",
        ):
            engine.generate(PROMPTS, Sampling(max_new_tokens=12))
        assert 1 <= len(engine.finished) <= 2 and all(
            len(result.token_ids) == 12 for result in engine.finished
        )
        fake.dies_after = None
        assert len(engine.generate(PROMPTS, Sampling(max_new_tokens=12))) == 4, (
            "the engine can go on with a server that is back"
        )


def test_a_server_that_hangs(target: Path) -> None:
    with serving(hangs=True) as fake:
        engine = started(fake, target, concurrency=4, timeout_s=0.2)
        begun = time.monotonic()
        with pytest.raises(
            RunFailed, match="no (whole )?answer within 0.2 s; 0 of 4 prompts were done"
        ):
            engine.generate(PROMPTS, Sampling(max_new_tokens=12))
        assert time.monotonic() - begun < 300, "the other requests are ended with the first"


def test_errors_of_the_server_carry_its_words(target: Path) -> None:
    said = json.dumps({"error": {"message": "Token id 49 is out of vocabulary", "code": 400}})
    with serving(refuses=(400, said)) as fake:
        with pytest.raises(
            ArchsearchError, match=r"refused the request \(400\): Token id 49 is out of vocabulary"
        ) as caught:
            started(fake, target).generate(PROMPTS, Sampling(max_new_tokens=4))
        assert caught.value.exit_code == 2
        fake.refuses = (500, '{"message": "out of memory"}')
        with pytest.raises(RunFailed, match=r"\(500\): out of memory; 0 of 4 prompts were done"):
            started(fake, target).generate(PROMPTS, Sampling(max_new_tokens=4))
        fake.refuses = (401, '{"error": "Unauthorized"}')
        with pytest.raises(
            ArchsearchError, match="wants a key .401: Unauthorized.; put it into VLLM_API_KEY"
        ):
            started(fake, target).generate(PROMPTS, Sampling(max_new_tokens=4))
    with (
        serving(error_chunk="EngineCore died") as fake,
        pytest.raises(RunFailed, match="failed: EngineCore died; 0 of 4"),
    ):
        started(fake, target).generate(PROMPTS, Sampling(max_new_tokens=12))
    assert "<html>" in str(refusal("u", 502, "<html>\n bad gateway")) and "Not Found" in str(
        refusal("u", 404, "")
    )


def test_other_requests_would_spoil_the_counts(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "SETTLE_S", 0.1)
    with (
        serving(in_flight=3) as fake,
        pytest.raises(ArchsearchError, match="busy with 3 other requests"),
    ):
        started(fake, target).generate(PROMPTS, Sampling(max_new_tokens=4))
    with (
        serving(others=9) as fake,
        pytest.raises(ArchsearchError, match="wrote 9 tokens for others meanwhile"),
    ):
        started(fake, target).generate(PROMPTS, Sampling(max_new_tokens=4))
    with serving(others=-2) as fake, pytest.raises(RunFailed, match="count 2 of the 4 tokens"):
        started(fake, target).generate(PROMPTS, Sampling(max_new_tokens=4))


def test_ids_and_lengths_that_do_not_fit(target: Path) -> None:
    with serving(max_len=20) as fake:
        engine = started(fake, target)
        with pytest.raises(
            ArchsearchError, match="'p0' has token 50, the target's vocabulary ends at 49"
        ):
            engine.generate([EnginePrompt("p0", (3, 50))], Sampling(max_new_tokens=4))
        with pytest.raises(ArchsearchError, match="more than the server's max_model_len 20"):
            engine.generate(PROMPTS, Sampling(max_new_tokens=18))
        with pytest.raises(ArchsearchError, match="CPU build .* --temperature 0"):
            engine.generate(PROMPTS, Sampling(max_new_tokens=4, temperature=0.7))
        assert not fake.asked, "nothing was sent"
        fake.answer = lambda position: 1000
        with pytest.raises(
            ArchsearchError, match="answered with token 1000, .* serves another model"
        ):
            engine.generate(PROMPTS, Sampling(max_new_tokens=4))
        on_gpu = started(fake, target, device="gpu")
        fake.answer = lambda position: 1
        on_gpu.generate(PROMPTS[:1], Sampling(max_new_tokens=4, temperature=0.7, seed=3))
        assert {"temperature": 0.7, "seed": 3}.items() <= fake.asked[-1].items()


def test_token_logits_force_each_candidate(target: Path) -> None:
    with serving() as fake:
        assert started(fake, target).token_logits((1, 2), (7, 3)) == [-7.0, -3.0]
    assert [row["allowed_token_ids"] for row in fake.asked] == [[7], [3]] and fake.asked[0][
        "prompt"
    ] == [1, 2]


def test_dealing() -> None:
    hands = deal([1, 1, 1, 2, 2, 3, 3, 3, 3], [10, 20, 0])
    assert sorted(sum(hands, [])) == [1, 1, 1, 2, 2, 3, 3, 3, 3] and [
        len(hand) for hand in hands
    ] == [3, 6, 0]
    assert parse_metrics("python_info 1\n") is None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def real_server(python: Path, model: Path, log: Path, *options: str) -> Iterator[str]:
    """`vllm serve` on the CPU, as a process group that is gone afterwards."""
    port = free_port()
    cpu = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    # Not `vllm serve`: the command of vllm-cpu 0.32 looks up a distribution called vllm and fails.
    command = [
        str(python),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        "--host",
        "127.0.0.1",
    ]
    command += [
        "--port",
        str(port),
        "--enforce-eager",
        "--dtype",
        "float32",
        "--max-model-len",
        "256",
        *options,
    ]
    with open(log, "w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **cpu, "VLLM_NO_USAGE_STATS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + 240
            while True:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()[
                    -2000:
                ]
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                pass
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
    with pytest.raises(ProcessLookupError):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.05)


@pytest.mark.slow
def test_against_a_real_server(tmp_path: Path) -> None:
    try:
        python = find_python("vllm")
    except MissingDataError as error:
        pytest.skip(str(error))
    shape = Architecture(64, 128, 2, 2, 2, 32, 512)
    target = make_model_folder(tmp_path / "target", shape)
    other = make_model_folder(tmp_path / "other", shape.replace(num_hidden_layers=1), seed=0)
    prompts = [
        EnginePrompt(f"p{i}", tuple((11 * i + j) % 400 + 1 for j in range(5 + i))) for i in range(6)
    ]
    sampling = Sampling(max_new_tokens=40, ignore_end=True)
    with real_server(python, target, tmp_path / "plain.log") as plain:
        engine = VllmServerEngine(EngineSettings(baseline_url=plain))
        engine.start(target, None, 0)
        alone = engine.generate(prompts, sampling)
        free = engine.generate(prompts, Sampling(max_new_tokens=40))
        logits = engine.token_logits(prompts[0].token_ids, [alone[0].token_ids[0], 7])
    assert logits[0] > logits[1], "the greedy token has the larger logit"
    for draft, concurrency in ((target, 1), (other, 4)):
        config = json.dumps(
            {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
        )
        with real_server(
            python, target, tmp_path / "helped.log", "--speculative-config", config
        ) as helped:
            engine = VllmServerEngine(EngineSettings(server_url=helped, concurrency=concurrency))
            engine.start(target, draft, 2)
            results = engine.generate(prompts, sampling)
            again = engine.generate(prompts, Sampling(max_new_tokens=40))
        assert [r.token_ids for r in results] == [r.token_ids for r in alone]
        assert [r.token_ids for r in again] == [r.token_ids for r in free]
        assert all(
            len(r.token_ids) == 40 and r.rounds > 0 and r.drafted == 2 * r.rounds for r in results
        )
        if draft is target:
            # No lengths where this busy machine read two rounds at once: the server's own counts
            # stand then.
            assert [
                (set(r.round_lengths) <= {3}, r.rejected, r.rounds in (12, 13)) for r in results
            ] == [(True, 0, True)] * 6
        with pytest.raises(RunFailed, match="was lost"):
            engine.generate(prompts, sampling)
