"""A server that speaks OpenAI's completions: pieces of `per_piece` tokens, `step_s` apart, after
`first_s`; dies or stalls on request."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def openai_server(
    *,
    first_s: float = 0.02,
    step_s: float = 0.005,
    per_piece: int = 1,
    dies_after: int | None = None,
    refuses: bool = False,
    stalls_after: int | None = None,
    stalled: threading.Event | None = None,
) -> Iterator[str]:
    """Its address, while it runs. The request after the first `stalls_after` sets `stalled`; it and
    later ones get one token, no more."""
    over = threading.Event()
    seen, lock = [0], threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:  # noqa: N802
            self._json(200, {"data": [{"id": "made-up"}]})

        def do_POST(self) -> None:  # noqa: N802
            data = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                seen[0] += 1
                number = seen[0]
            if refuses:
                self._json(400, {"error": "max_tokens is too large"})
                return
            if dies_after is not None and number > dies_after:
                self.connection.close()
                return
            self.send_response(200)
            self.end_headers()
            time.sleep(first_s)
            left, first = int(data["max_tokens"]), True
            while left > 0:
                count = 1 if first else min(per_piece, left)
                if not first:
                    time.sleep(step_s)
                left, first = left - count, False
                self._event({"choices": [{"text": "a " * count}]})
                if stalls_after is not None and number > stalls_after:
                    if stalled is not None:
                        stalled.set()
                    over.wait()
                    return
            usage = {
                "prompt_tokens": len(data["prompt"].split()),
                "completion_tokens": int(data["max_tokens"]),
            }
            self._event({"choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")

        def _event(self, data: dict[str, Any]) -> None:
            self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())
            self.wfile.flush()

        def _json(self, status: int, data: dict[str, Any]) -> None:
            body = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        over.set()
        server.shutdown()
        server.server_close()
        thread.join(timeout=5.0)
