"""A new engine is one file and one row of facts: with them alone it is chosen, refused, priced,
run, named and exported for."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from archsearch.architecture.architecture import Architecture
from archsearch.cli import main
from archsearch.engine_facts import ENGINES, engine_title
from archsearch.engines.engine import Engine, EnginePrompt, EngineSettings, Sampling
from archsearch.engines.registry import make_engine
from archsearch.errors import ArchsearchError
from archsearch.export.engines import Setup, check_engines, serving
from archsearch.hardware.identify import resolve_device
from archsearch.latency.roofline import RooflineLatency
from archsearch.pipeline.in_engine import EngineChoice, check_choice
from archsearch.workload import Workload
from tests.doubles.toy_engine import ROW


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, ROW.name, ROW)


def test_it_runs() -> None:
    engine = make_engine("toy", EngineSettings())
    assert (
        isinstance(engine, Engine) and engine.name == "toy" and engine_title("toy") == "Toy Serve"
    )
    engine.start("target", "draft", 2)
    assert len(engine.generate([EnginePrompt("a", (1, 2, 3))], Sampling(max_new_tokens=8))) == 1


def test_it_is_asked_for_what_it_can_only() -> None:
    check_choice(EngineChoice(), "toy", synthetic=True, concurrency=8)
    with pytest.raises(
        ArchsearchError, match="toy takes one gamma for all batch sizes; use --engine vllm"
    ):
        check_choice(EngineChoice(), "toy", schedule=True)
    with pytest.raises(ArchsearchError, match="running vLLM server, not for toy"):
        check_choice(EngineChoice(server_url="http://127.0.0.1:9"), "toy")
    with pytest.raises(ArchsearchError, match="toy runs in archsearch's own interpreter"):
        check_choice(EngineChoice(python=Path("python")), "toy")
    # Others are told of it where it can help.
    with pytest.raises(
        ArchsearchError,
        match="use --concurrency 1, or --engine vllm or openvino or llama.cpp or toy",
    ):
        check_choice(EngineChoice(), "transformers", concurrency=2)


def test_it_is_priced_by_how_it_runs_a_draft() -> None:
    draft, workload = (
        Architecture(256, 512, 2, 4, 4, 64, 32000, draft_vocab_size=8000),
        Workload(tensor_parallel=2),
    )
    device = resolve_device("a100")
    toy, plain = (RooflineLatency(device, "bfloat16", "graph", name) for name in ("toy", None))
    assert (
        toy.draft_s(draft, workload, 2).value > plain.draft_s(draft, workload, 2).value
    )  # it pads the trimmed head
    assert toy.idle_draft_s(draft, workload).value == 0


def test_it_is_exported_for() -> None:
    assert check_engines(["toy", "vllm"]) == ("vllm", "toy")
    served = serving("toy", Setup(folder=Path("out"), target="T", gamma=2, dtype="bfloat16"))
    assert served.shell() == "toy-serve T \\\n  --draft out"


def test_the_command_line_takes_it() -> None:
    refused = CliRunner().invoke(
        main, ["search", "--target", "no-such-target", "--gpu", "a100", "--engine", "toy"]
    )
    assert (
        refused.exit_code == 2
        and "no-such-target" in refused.stderr
        and "toy" not in refused.stderr
    )
    assert (
        "Toy" not in refused.stdout
        and '"engine": "toy"' in CliRunner().invoke(main, ["engine", "list", "--json"]).stdout
    )
    assert (
        "unknown engine 'toys'"
        in CliRunner().invoke(main, ["search", "--target", "x", "--engine", "toys"]).stderr
    )
