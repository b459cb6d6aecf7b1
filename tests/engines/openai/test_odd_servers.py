"""Whatever a server sends is an answer or a failed one, in bounded time; and its address keeps no
secret."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

import archsearch.engines.openai.client as connection
from archsearch.engines.openai.bench import Ask, drive, summary
from archsearch.engines.openai.client import Answer, Lost, OpenAIServer
from archsearch.errors import ArchsearchError, RunFailed

HEAD = b"HTTP/1.0 200 OK\r\n\r\n"
TEXT = b'data: {"choices": [{"text": "a", "token_ids": [1]}]}\n\n'
DONE = b"data: [DONE]\n\n"
Send = Callable[[bytes], None]


def good(send: Send) -> None:
    send(
        HEAD
        + 3 * TEXT
        + b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 8}}\n\n'
        + DONE
    )


@contextmanager
def server(*turns: Callable[[Send], None]) -> Iterator[tuple[str, list[bytes]]]:
    """Its address and the requests it got; request n is answered by turn n, later ones by the
    last."""
    listening = socket.create_server(("127.0.0.1", 0))
    asked: list[bytes] = []

    def one(line: socket.socket) -> None:
        with line, contextlib.suppress(OSError):
            request = line.recv(65536)
            while b"\r\n\r\n" not in request or (b"POST" in request and not request.endswith(b"}")):
                request += line.recv(65536)
            asked.append(request)
            if request.startswith(b"GET"):
                line.sendall(HEAD + json.dumps({"data": [{"id": "m"}]}).encode())
                return
            number = sum(each.startswith(b"POST") for each in asked)
            turns[min(number, len(turns)) - 1](line.sendall)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=one, args=(listening.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", asked
    finally:
        listening.close()


def complete(url: str, timeout_s: float = 20.0) -> Answer:
    return OpenAIServer(url, timeout_s).complete("m", "x", 8, 0.0, time.perf_counter())


ODD = [
    b'{"choices": [null]}',
    b'{"choices": "x"}',
    b'{"choices": 5}',
    b'{"usage": []}',
    b"null",
    b"5",
    b"{",
    b"[" * 100_000,
    b'{"usage": {"completion_tokens": "many"}}',
    b'{"usage": {"completion_tokens": Infinity}}',
    b'"\\ud800"',
    b"1" * 5_000,
    b'{"usage": {"completion_tokens": -5}}',
    b'{"usage": {"completion_tokens": 1000000000}}',
    b"\xff\xfe\x00",
    b'{"usage": {"completion_tokens": 0}}',
    b'{"usage": {"completion_tokens": true}}',
    b'{"error": {"message": "out of memory"}}',
    b'{"usage": {"completion_tokens": 8, "prompt_tokens": [1]}}',
]


@pytest.mark.parametrize("chunk", ODD, ids=lambda chunk: chunk[:50].decode("latin-1"))
def test_an_odd_chunk_is_a_failed_request(chunk: bytes) -> None:
    with server(lambda send: send(HEAD + TEXT + b"data: " + chunk + b"\n\n" + DONE)) as (url, _):
        answer = complete(url)
    assert answer.error and "\n" not in answer.error and answer.tokens == 0


@pytest.mark.parametrize("chunk", ODD[:8], ids=lambda chunk: chunk[:50].decode("latin-1"))
def test_an_odd_chunk_of_a_vllm_server_is_one_line(chunk: bytes) -> None:
    with server(lambda send: send(HEAD + TEXT + b"data: " + chunk + b"\n\n" + DONE)) as (url, _):
        with pytest.raises((RunFailed, Lost)):
            OpenAIServer(url, 20.0).tokens({"model": "m", "prompt": [1]})


def endless(piece: bytes) -> Callable[[Send], None]:
    def turn(send: Send) -> None:
        send(HEAD)
        while True:
            send(piece)
            time.sleep(0.01)

    return turn


def no_headers(send: Send) -> None:
    while True:
        send(b"H")
        time.sleep(0.05)


@pytest.mark.parametrize("turn", [endless(b": ping\n\n"), endless(TEXT), endless(b"x"), no_headers])
def test_a_request_has_an_end(turn: Callable[[Send], None]) -> None:
    with server(turn) as (url, _):
        began = time.monotonic()
        answer = complete(url, timeout_s=0.7)
    assert "no whole answer within 0.7 s" in answer.error or "lost" in answer.error
    assert time.monotonic() - began < 10.0


def test_a_line_without_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MOST_LINE_BYTES", 1000)
    with server(lambda send: send(HEAD + b"data: " + b"x" * 100_000)) as (url, _):
        assert "without end" in complete(url).error


def test_a_dropped_connection_is_one_failed_request() -> None:
    answers: list[Answer] = []
    with server(good, lambda send: send(HEAD + TEXT), good) as (url, _):
        drive(OpenAIServer(url), [Ask(None, "x", 8)] * 6, answers, in_flight=1)
    assert [bool(answer.error) for answer in answers] == [False, True, False, False, False, False]
    measured = summary(answers)
    assert (measured.requests, measured.failed, measured.output_tokens) == (6, 1, 8)


def test_the_key_is_sent_and_secrets_in_an_address_are_refused_unprinted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "topsecretpw")
    with server(good) as (url, asked):
        assert not complete(url).error
    assert b"Authorization: Bearer topsecretpw" in asked[0]
    for address in (
        "http://me:topsecretpw@127.0.0.1:1",
        "me:topsecretpw@host",
        "ftp://me:topsecretpw@host",
    ):
        with pytest.raises(ArchsearchError) as told:
            OpenAIServer(address, 1.0)
        assert "topsecretpw" not in str(told.value)
