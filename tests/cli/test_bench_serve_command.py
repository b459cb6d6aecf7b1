"""`bench-serve` against small servers: what it measures, what it lays beside it, what it keeps when
a server dies."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.cli.commands import call, last_json, refused
from tests.doubles.openai_server import openai_server

FEW = ("--requests", "12", "--output-tokens", "21", "--prompt-tokens", "40")


def test_with_a_draft_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with openai_server(step_s=0.03, per_piece=3) as drafting, openai_server(step_s=0.03) as plain:
        servers = ("bench-serve", "--server-url", drafting, "--baseline-url", f"{plain}/v1")
        result = last_json(call(*servers, "--concurrency", "4", *FEW, "--json"))
    # 20 tokens after the first: 7 pieces against 20, 30 ms each and what a busy machine adds
    plain_s, drafting_s = result["without"]["tpot_s"], result["with_draft"]["tpot_s"]
    assert plain_s >= 0.03 and drafting_s >= 0.03 * 7 / 20
    assert result["speedup"] == pytest.approx(plain_s / drafting_s) and result["speedup"] > 1.2
    assert result["with_draft"]["tokens_per_piece"] == pytest.approx(20 / 7, rel=0.05)
    assert result["with_draft"]["failed"] == 0 and result["with_draft"]["output_tokens"] == 21
    assert result["with_draft"]["running"] < 4.0
    kept = json.loads(Path("bench-serve.json").read_text())
    assert len(kept["with_draft_requests"]) == len(kept["without_requests"]) == 12


def test_beside_a_prediction(tmp_path: Path) -> None:
    pair = (
        "--target",
        "llama-13b",
        "--draft",
        "wide-796m",
        "--gpu",
        "a100",
        "--alpha",
        "0.7",
        "--gamma",
        "3",
    )
    with openai_server() as url:
        arguments = (
            "bench-serve",
            "--server-url",
            url,
            "--requests-per-second",
            "40",
            *FEW,
            "--output",
            str(tmp_path / "r.json"),
        )
        text = call(*arguments, *pair).stdout
        result = last_json(call(*arguments, *pair, "--json"))
    assert "predicted" in text and "gamma 3" in text and "made up" in text
    assert result["predicted"]["gamma"] == 3 and set(result["relative_error"]) == {"with_draft"}
    assert result["predicted"]["with_draft"]["tpot_s"] > 0


def test_a_server_that_stops_answering(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    with openai_server(dies_after=5) as url:
        words = refused(
            "bench-serve",
            "--server-url",
            url,
            "--concurrency",
            "1",
            *FEW,
            "--output",
            str(path),
            "--json",
            code=1,
        )
    assert "stopped answering after 5 of 12 requests" in words and str(path) in words
    kept = json.loads(path.read_text())
    failed = [bool(request["error"]) for request in kept["with_draft_requests"]]
    assert failed == [False] * 5 + [True] * 5 and "stopped answering" in kept["stopped"]


def test_ctrl_c_in_the_middle(tmp_path: Path) -> None:
    """A server that leaves requests hanging: nobody waits for them, and what had come is kept."""
    output, stalled = tmp_path / "kept.json", threading.Event()
    own = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from"
        " archsearch.cli import main; main()"
    )
    with openai_server(stalls_after=5, stalled=stalled) as url:
        asked = (
            "bench-serve",
            "--server-url",
            url,
            "--concurrency",
            "1",
            *FEW,
            "--output",
            str(output),
        )
        process = subprocess.Popen(
            [sys.executable, "-c", own, *asked],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert stalled.wait(300.0), "five requests are answered, the sixth hangs"
            process.send_signal(signal.SIGINT)
            told, said = process.communicate(timeout=300.0)  # a request may take ten minutes
        finally:
            process.kill()
            process.communicate()
    assert process.returncode == 130 and not told and "Traceback" not in said
    last = said.strip().splitlines()[-1]
    assert last.startswith("Stopped by hand after 5 of 12 requests") and str(output) in last
    kept = json.loads(output.read_text())
    assert len(kept["with_draft_requests"]) == 5 and kept["stopped"].startswith("stopped by hand")


def test_servers_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    nobody = ("bench-serve", "--server-url", "http://127.0.0.1:9", "--json")
    assert "no server answers" in refused(*nobody, "--concurrency", "2", code=1)
    with openai_server(refuses=True) as url:
        words = refused(
            "bench-serve", "--server-url", url, "--concurrency", "2", *FEW, "--json", code=1
        )
    assert "refuses requests: status 400" in words and "max_tokens is too large" in words
    for url in ("ftp://x", "http://127.0.0.1:port", "http://127.0.0.1:99999"):
        assert "is no server address" in refused(
            "bench-serve", "--server-url", url, "--concurrency", "2", "--json"
        )
    assert "give one of" in refused(*nobody)
    assert "must be positive" in refused(*nobody, "--requests-per-second", "-2")
    assert "give both --target and --draft" in refused(
        *nobody, "--concurrency", "2", "--target", "llama-13b"
    )


def test_what_cannot_be_measured_or_predicted_is_said_before_a_server_is_driven(
    tmp_path: Path,
) -> None:
    path = tmp_path / "kept.json"
    with openai_server() as url:
        asked = (
            "bench-serve",
            "--server-url",
            url,
            "--concurrency",
            "2",
            *FEW,
            "--output",
            str(path),
            "--json",
        )
        pair = ("--target", "llama-13b", "--gpu", "a100")
        assert "'wide-796'" in refused(*asked, *pair, "--draft", "wide-796")
        assert "does not divide" in refused(
            *asked, *pair, "--draft", "wide-796m", "--tensor-parallel", "3"
        )
        assert "nothing to draft" in refused(
            *asked, *pair, "--draft", "wide-796m", "--output-tokens", "1"
        )
        assert "no server answers" in refused(
            *asked, "--baseline-url", "http://127.0.0.1:9", code=1
        )
        with openai_server(refuses=True) as other:
            baseline = ("--baseline-url", url)
            few = ("--server-url", other, "--requests", "3")
            assert not path.exists()
            words = refused(*asked, *baseline, *few, code=1)
    assert "none of 3 requests was answered" in words and str(path) in words
    kept = json.loads(path.read_text())
    assert len(kept["without_requests"]) == 3 and kept["without"]["failed"] == 0, (
        "the baseline was measured, and is kept"
    )
