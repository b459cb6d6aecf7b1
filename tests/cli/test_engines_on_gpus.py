"""The engine that serves on a GPU: who is asked, which version, what sets two apart, what is warned
about and refused."""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from archsearch import files
from archsearch.engine_rounds import newest_version
from archsearch.errors import ArchsearchError
from archsearch.pipeline import SearchSession, serving
from archsearch.runs.run import open_run
from archsearch.workload import WorkloadRequest
from tests.cli.commands import call, files_in, last_json, refused

PAIR = (
    "--target",
    "qwen2.5-7b",
    "--draft",
    "qwen2.5-0.5b",
    "--gpu",
    "h100",
    "--alpha",
    "0.8",
    "--gamma",
    "4",
)
# What is asked here is about independent drafts; other families compete by default and run in other
# engines.
SEARCH = (
    "search",
    "--target",
    "llama-13b",
    "--gpu",
    "h100",
    "--trials",
    "6",
    "--top",
    "2",
    "--family",
    "independent",
    "--space",
    "space.yaml",
)
SPACE = """
dimensions:
  num_hidden_layers: [1, 2, 4, 8]
  hidden_size: [1024, 2048]
  ffn_ratio: [2.6875]
  num_key_value_heads: [4, 8]
  kv_group_size: [2]
  head_dim: [64, 128]
  draft_vocab_size: [8192, target]
  tie_word_embeddings: [false]
"""
NEWEST = newest_version("vllm")


@pytest.fixture(autouse=True)
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "installed", lambda engine: None)


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ranked run for SGLang and one for the default engine."""
    folder = tmp_path_factory.mktemp("gpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "installed", lambda engine: None)
        patch.chdir(folder)
        Path("space.yaml").write_text(SPACE)
        for name, extra in (("sglang", ("--engine", "sglang")), ("default", ())):
            result = last_json(call(*SEARCH, *extra, "--run", f"runs/{name}", "--json"))
            (folder / f"{name}.json").write_text(json.dumps(result))
    return folder


@pytest.fixture
def runs(ranked: Path, tmp_path: Path) -> Path:
    shutil.copytree(ranked, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_engines_side_by_side(tmp_path: Path) -> None:
    arguments = ("estimate", *PAIR, "--engine", "vllm", "--engine", "sglang")
    result = last_json(call(*arguments, "--json"))
    first, second = result["drafts"]
    assert first["speedup"]["value"] > 1.0 > second["speedup"]["value"], (
        "24 layers launched one by one do not pay on an H100"
    )
    assert (first["engine"], second["engine"]) == ("sglang", "vllm") and result[
        "engine"
    ] == "sglang"
    assert (
        first["engine_version"] == newest_version("sglang") and second["engine_version"] == NEWEST
    )
    assert (
        first["engine_class"] == "draft steps in one CUDA graph"
        and "no CUDA graph" in second["engine_class"]
    )
    assert first["bound"] == "gpu" and first["free_layers"] is None
    assert second["bound"] == "host" and 0 < second["free_layers"] < 24
    # the mean of the larger of two uncertain times lies above the host's, which decides
    assert (
        second["host_s"]["value"] <= second["round_s"]["value"] <= 1.1 * second["host_s"]["value"]
    )
    (apart,) = result["differences"]
    assert (apart["engine"], apart["other"], apart["term"]) == ("sglang", "vllm", "overhead_s")
    host = (
        f"the host's {1e3 * second['host_s']['value']:.1f} ms to launch 24 layers 4 times; the"
        " kernels take"
    )
    assert (
        f"{first['speedup']['value']:.2f}x, vllm {second['speedup']['value']:.2f}x: in vllm {host}"
        in apart["words"]
    )
    text = call(*arguments, "--explain").stdout
    assert (
        apart["words"] in text
        and f"Served by vllm {NEWEST} (the newest known), no CUDA graph for the draft." in text
    )
    assert "free layers" in text and "WARNING: vllm" in text


def test_two_versions_of_one_engine_and_a_switch_for_one_of_two(tmp_path: Path) -> None:
    versions = ("--engine-version", "vllm=0.16.0", "--engine-version", "vllm=0.30.0")
    result = last_json(call("estimate", *PAIR, *versions, "--json"))
    assert [row["engine_version"] for row in result["drafts"]] == ["0.30.0", "0.16.0"]
    assert (
        "vllm 0.30.0" in result["differences"][0]["words"]
        and "vllm 0.16.0" in result["differences"][0]["words"]
    )
    (warning,) = result["warnings"]
    gains = [f"{row['speedup']['value']:.2f}x" for row in result["drafts"]]
    assert f"use vllm 0.30.0, which would bring {gains[0]} instead of {gains[1]}" in warning
    switch = (
        "--engine",
        "vllm",
        "--engine",
        "sglang",
        "--engine-option",
        "VLLM_USE_V2_MODEL_RUNNER=0",
    )
    mended = last_json(call("estimate", *PAIR, *switch, "--json"))
    served = {row["engine"]: row for row in mended["drafts"]}
    assert served["vllm"]["engine_class"] == result["drafts"][0]["engine_class"]
    assert (
        "VLLM_USE_V2_MODEL_RUNNER=0" in served["vllm"]["served"]
        and "(the newest known)" in served["sglang"]["served"]
    )
    assert mended["warnings"] == []


def test_one_engine_warns_and_what_it_promises_is_what_comes(tmp_path: Path) -> None:
    warned = last_json(call("estimate", *PAIR, "--json"))
    assert warned["engine"] == "vllm" and warned["drafts"][0]["engine_version"] == NEWEST
    (warning,) = warned["warnings"]
    assert (
        f"vllm {NEWEST} runs independent drafts without CUDA graphs" in warning
        and "set VLLM_USE_V2_MODEL_RUNNER=0" in warning
    )
    option = ("--engine-option", "VLLM_USE_V2_MODEL_RUNNER=0")
    mended = last_json(call("estimate", *PAIR, *option, "--json"))["drafts"][0]
    assert (
        f"which would bring {mended['speedup']['value']:.2f}x instead of"
        f" {warned['drafts'][0]['speedup']['value']:.2f}x" in warning
    )
    text = call("estimate", *PAIR, "--explain").stdout
    assert (
        f"WARNING: {warning}." in text
        and "bound by the host's" in text
        and "layers are free" in text
    )
    assert "break-even alpha" in text, "the columns of one engine stay"


HEAD = ("--target", "llama-3.1-8b", "--gpu", "h100")


@pytest.mark.parametrize(
    ("draft", "gamma", "batch", "rows"),
    [("eagle3", 4, 103, 1024), ("eagle3", 1, 600, 2048), ("dflash", 7, 65, 1024)],
)
def test_rows_beyond_the_largest_graph_are_warned_about(
    tmp_path: Path, draft: str, gamma: int, batch: int, rows: int
) -> None:
    asked = ("estimate", *HEAD, "--draft", draft, "--alpha", "0.7", "--gamma", str(gamma))
    assert (
        last_json(call(*asked, "--batch-size", str(512 // (gamma + 1)), "--json"))["warnings"] == []
    )
    asked += ("--batch-size", str(batch))
    cut = last_json(call(*asked, "--json"))
    (warning,) = cut["warnings"]
    option = f"max_cudagraph_capture_size={rows}"
    whole = last_json(call(*asked, "--engine-option", option, "--json"))
    assert whole["warnings"] == []
    scores = [each["drafts"][0] for each in (whole, cut)]
    gains = " instead of ".join(f"{score['speedup']['value']:.2f}x" for score in scores)
    assert "no CUDA graph of more than 512 rows" in warning
    assert f"set {option}, which would bring {gains}" in warning
    rates = [f"{batch / score['decode_s']['value']:,.0f}" for score in scores]
    alone = f", over {rates[0]} tokens/s without a draft instead of {rates[1]}"
    assert warning.endswith(alone) == (batch > 512)


def test_what_a_draft_gains_over_a_server_that_is_slow_too_is_no_gain(tmp_path: Path) -> None:
    """Beyond the graphs: the switch makes the target alone faster than the draft is without."""
    asked = (*HEAD, "--draft", "eagle3")
    parts = [{"name": "a", "weight": 1, "concurrency": 600, "prompt_tokens": 256}]
    parts[0]["output_tokens"] = 128
    Path("load.yaml").write_text(yaml.safe_dump({"parts": parts}))
    loads = {"estimate": ("--batch-size", "600"), "traffic": ("--workload", "load.yaml")}
    for command, load in loads.items():
        (entry,) = last_json(call(command, *asked, *load, "--json"))["drafts"]
        better = entry["remedied"]
        assert better["alone"] > 1.1 and better["switches"] == "max_cudagraph_capture_size=2048"
        gain = entry["speedup"] if command == "traffic" else entry["speedup"]["value"]
        rates = gain, better["alone"] * better["speedup"]["value"]
        assert entry["pays"] == (max(rates) > better["alone"]) and gain > 1.0
        text = " ".join(call(command, *asked, *load).stdout.split())
        words = f"With {better['switches']}: gamma {better['gamma']}, "
        assert words in text and f"the target alone {better['alone']:.2f}x as fast." in text
        assert command == "traffic" or text.startswith("Speculation probably does not pay")
    (entry,) = last_json(call("estimate", *asked, "--batch-size", "8", "--json"))["drafts"]
    assert "remedied" not in entry and entry["pays"]


@pytest.mark.parametrize(("batch", "served"), [(300, True), (600, False)])
def test_a_search_serves_with_the_graphs_that_pay(tmp_path: Path, batch: int, served: bool) -> None:
    found = call("search", *HEAD, "--family", "eagle3", "--batch-size", str(batch), "--trials", "6")
    text = " ".join(found.stdout.split())
    option = f"max_cudagraph_capture_size={1024 if batch == 300 else 2048}"
    assert f"With {option}: eagle3: " in text and "WARNING: vllm" in text
    # beyond the graphs a plain server is slow too, and what a draft gains over that is no gain
    assert ("--max-cudagraph-capture-size 1024" in text) == ("Try it today" in text) == served
    verdict = f"Speculation {'may pay' if served else 'probably does not pay'}"  # as it is served
    assert text.startswith(verdict)
    assert ("; the target alone is " in text) != served
    (run,) = Path("runs").iterdir()
    again = " ".join(call("report", str(run)).stdout.split())
    title = f"h100-sxm5-80gb. With {option} the target alone is "
    assert (title in again) != served and again.startswith(verdict)
    assert ("--max-cudagraph-capture-size 1024" in again) == served


def test_a_search_above_temperature_0_serves_drafts_that_sample(tmp_path: Path) -> None:
    asked = ("--temperature", "1", "--family", "eagle3", "--family", "ngram", "--trials", "4")
    answer = call("search", *HEAD, *asked, "--run", "run").stdout
    sampled = '"draft_sample_method": "probabilistic"'
    assert sampled in " ".join(answer.split())
    call("schedule", "run", "--rank", "1")
    run = open_run(Path("run"))
    for rank in run.ranks():
        config = (run.best_dir(rank) / "speculative_config.json").read_text()
        assert (sampled in config) == (run.score(rank).family == "eagle3")


def test_drafts_are_sampled_where_the_version_can_and_any_of_the_load_asks(tmp_path: Path) -> None:
    asked = ("search", *HEAD, "--family", "eagle3", "--trials", "2")
    old = call(*asked, "--temperature", "1", "--engine-version", "0.20.0", "--run", "old").stdout
    assert "Try it today" in old and "draft_sample_method" not in old
    config = Path("old/best/1/speculative_config.json")
    assert "draft_sample_method" not in config.read_text()
    call("schedule", "old", "--rank", "1")
    assert "draft_sample_method" not in config.read_text()
    part = {"weight": 1, "concurrency": 2, "prompt_tokens": 64, "output_tokens": 64}
    parts = [{"name": "a", **part}, {"name": "b", **part, "temperature": 0.7}]
    Path("load.yaml").write_text(yaml.safe_dump({"parts": parts}))
    assert "draft_sample_method" in call(*asked, "--workload", "load.yaml", "--run", "load").stdout
    assert "draft_sample_method" in Path("load/best/1/speculative_config.json").read_text()


def test_a_schedule_beyond_the_usual_batch_sizes_is_not_stretched(tmp_path: Path) -> None:
    """Past the graphs' 512 rows gammas turn more than once: off, then 2, then 1."""
    call(
        "search", *HEAD, "--family", "eagle3", "--trials", "2", "--batch-size", "600", "--run", "r"
    )
    ranges = last_json(call("schedule", "r", "--json"))["ranges"]
    assert ranges[-1][1] == 600 and 0 in [gamma for first, _, gamma in ranges if first > 256]


SWITCH = "VLLM_USE_V2_MODEL_RUNNER=0"


@pytest.fixture(scope="module")
def switched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run whose answer is a switch of the engine, and what its search printed."""
    folder = tmp_path_factory.mktemp("switched")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "installed", lambda engine: None)
        patch.chdir(folder)
        return folder, call("search", *HEAD, *FEW, "--run", "run").stdout


FEW = ("--family", "independent", "--trials", "6")


@pytest.fixture
def answered(switched: tuple[Path, str], tmp_path: Path) -> tuple[dict[str, Any], str]:
    """The rank that the answer serves, with its switch, as the run keeps it; what was printed."""
    shutil.copytree(switched[0], tmp_path, dirs_exist_ok=True)
    kept = json.loads((tmp_path / "run/curves.json").read_text())["remedied"]
    return max(kept, key=lambda each: float(each["speedup"]["value"])), switched[1]


def test_a_report_answers_and_serves_as_its_search(answered: tuple[dict[str, Any], str]) -> None:
    """With the same switch at the same gamma, in the page, in the terminal and in best/."""
    best, said = answered
    gamma, gain = best["gamma"], f"{best['speedup']['value']:.2f}x"
    assert gamma != json.loads(Path(f"run/best/{best['rank']}/score.json").read_text())["gamma"]
    (command,) = re.findall(rf"  {SWITCH} vllm serve.*?}}'", said, re.S)
    page, text = Path("run/report.html").read_text(), call("report", "run").stdout
    assert f"<b>{gain}</b>" in page and f"predicted with {SWITCH}" in page
    page = html.unescape(re.sub("<[^>]+>", "", page))
    for shown in (" ".join(each.split()) for each in (page, text)):
        assert f"With {SWITCH}, rank {best['rank']} at gamma {gamma}: {gain}." in shown
        assert " ".join(command.split()) in shown
    (training,) = re.findall(r"Training for 24 GPU-hours is not[^:]*", said)
    assert training in page and "With 24 GPU-hours of training" not in page
    config = json.loads(Path(f"run/best/{best['rank']}/speculative_config.json").read_text())
    assert config["num_speculative_tokens"] == gamma and f'": {gamma}}}' in command


def test_a_run_that_keeps_no_switch_loads_and_a_search_adds_it(
    answered: tuple[dict[str, Any], str],
) -> None:
    """Of an earlier version: its report knows none, a search that is continued does."""
    path = Path("run/curves.json")
    kept = json.loads(path.read_text())
    files.write_json(path, {name: kept[name] for name in kept if name != "remedied"})
    assert SWITCH not in call("report", "run").stdout and "remedied" not in path.read_text()
    again = call("search", *HEAD, *FEW, "--run", "run")
    assert again.stdout == answered[1] and SWITCH in call("report", "run").stdout
    assert json.loads(path.read_text())["remedied"] == kept["remedied"]


def test_a_schedule_names_the_switch_that_brings_more(
    answered: tuple[dict[str, Any], str],
) -> None:
    asked = ("schedule", "run", "--rank", str(answered[0]["rank"]), "--batch-size", "1")
    found = last_json(call(*asked, "--json"))
    (warning,) = found["warnings"]
    gains = (answered[0]["speedup"], found["points"][0]["speedup"])
    words = " instead of ".join(f"{gain['value']:.2f}x" for gain in gains)
    assert f"set {SWITCH}, which would bring {words}, at gamma {answered[0]['gamma']}" in warning
    assert f"WARNING: {warning}." in call(*asked).stdout


@pytest.mark.parametrize(
    "load", [("--sweep", "context", "--range", "128:256:2"), ("--requests-per-second", "20")]
)
def test_a_curve_and_a_load_warn_as_an_estimate(tmp_path: Path, load: tuple[str, ...]) -> None:
    command = "estimate" if "--sweep" in load else "traffic"
    asked = (command, *HEAD, "--draft", "llama-3.2-1b", *load)
    (warning,) = last_json(call(*asked, "--json"))["warnings"]
    one = last_json(call("estimate", *HEAD, "--draft", "llama-3.2-1b", "--json"))["warnings"]
    if command == "estimate":
        assert one == [warning]
    assert f"set {SWITCH}, which would bring 1." in warning
    assert f"WARNING: {warning}." in " ".join(call(*asked).stdout.split())
    mended = last_json(call(*asked, "--engine-option", SWITCH, "--json"))
    assert mended["warnings"] == []


def test_a_sweep_over_batch_sizes_names_the_one_that_gains_most(tmp_path: Path) -> None:
    asked = ("estimate", *HEAD, "--draft", "eagle3", "--alpha", "0.7", "--gamma", "4")
    (warning,) = last_json(call(*asked, "--sweep", "batch", "--range", "1:110:3", "--json"))[
        "warnings"
    ]
    assert "set max_cudagraph_capture_size=1024, which would bring eagle3 at batch size" in warning
    assert (
        last_json(call(*asked, "--sweep", "batch", "--range", "1:8:2", "--json"))["warnings"] == []
    )


def test_a_context_beyond_the_targets_positions_is_said_by_search_too(tmp_path: Path) -> None:
    asked = (*HEAD, "--context", "200000")
    words = "200,000 tokens are more than the target's 131,072 positions"
    (entry,) = last_json(call("estimate", *asked, "--draft", "llama-3.2-1b", "--json"))["drafts"]
    assert words in entry["notes"]
    found = call("search", *asked, "--family", "ngram", "--trials", "2").stdout
    assert f"WARNING: {words}." in found
    within = call("search", *HEAD, "--context", "131072", "--family", "ngram", "--trials", "2")
    assert "positions" not in within.stdout


def test_a_draft_inside_the_free_layers_is_not_warned_about(tmp_path: Path) -> None:
    pair = (
        "estimate",
        "--target",
        "llama-65b",
        "--draft",
        "wide-290m",
        "--gpu",
        "a100",
        "--tensor-parallel",
        "4",
        "--alpha",
        "0.7",
    )
    assert (
        last_json(call(*pair, "--json"))["warnings"] == []
    )  # no graphs, and no harm: nothing to warn of
    (warning,) = last_json(call(*pair, "--draft", "sheared-llama-1.3b", "--json"))["warnings"]
    assert "which would bring sheared-llama-1.3b " in warning, (
        "of several drafts the one that would gain most"
    )


def test_the_version_that_is_installed_is_the_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from archsearch.engines.environments.environment import Installed

    here = Installed("vllm", Path("python"), "0.28.1+cu129", "gpu", (), 1.0, 1)
    monkeypatch.setattr(serving, "installed", lambda engine: here if engine == "vllm" else None)
    result = last_json(call("estimate", *PAIR, "--json"))
    assert result["served"] == "vllm 0.28.1 (installed here), a CUDA graph per layer of the draft"
    monkeypatch.setattr(
        serving,
        "installed",
        lambda engine: Installed("vllm", Path("python"), "0.28.1", "cpu", (), 1.0, 1),
    )
    assert "the newest known" in last_json(call("estimate", *PAIR, "--json"))["served"], (
        "a build for CPUs serves on no GPU"
    )
    eager = last_json(call("estimate", *PAIR, "--engine", "transformers", "--json"))
    assert "(installed here)" in eager["served"] and eager["drafts"][0]["bound"] == "host"


def test_a_version_that_nobody_knows_is_the_nearest_and_says_so(tmp_path: Path) -> None:
    result = last_json(call("estimate", *PAIR, "--engine-version", "0.99.0", "--json"))
    assert any(
        "vllm 0.99.0 is newer than what is known here" in warning for warning in result["warnings"]
    )
    assert (
        "WARNING: vllm 0.99.0 is newer"
        in call("estimate", *PAIR, "--engine-version", "0.99.0").stdout
    )


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (
            ("--engine", "warp"),
            "unknown engine 'warp'; choose one of transformers, vllm, openvino, sglang",
        ),
        (("--engine", "vllm", "--engine", "warp"), "unknown engine 'warp'"),
        (("--engine", "speculators"), "unknown engine 'speculators'"),
        (
            ("--engine-version", "soon"),
            "'soon' is no version of vllm; write it as in --engine-version",
        ),
        (
            ("--engine-version", "0.12.0"),
            "runs independent drafts from 0.15 on, before that EAGLE heads",
        ),
        (
            ("--engine", "vllm", "--engine", "sglang", "--engine-version", "0.16.0"),
            "of which engine? write vllm=0.16.0",
        ),
        (("--engine-version", "warp=1"), "unknown engine 'warp'"),
        (("--engine-option", "graphs=1"), "vllm has no switch 'graphs'"),
        (("--engine-option", "async_scheduling=2"), "async_scheduling is 0 or 1"),
        (("--engine", "openvino"), "OpenVINO GenAI cannot be priced on h100"),
        (
            ("--engine", "transformers", "--batch-size", "2"),
            "transformers runs one request at a time, not --batch-size 2",
        ),
        (
            ("--engine", "transformers", "--mode", "graph"),
            "transformers runs without CUDA graphs on a GPU",
        ),
        (("--engine", "vllm", "--mode", "eager"), "vLLM runs with CUDA graphs on a GPU"),
        (
            ("--engine", "vllm", "--tensor-parallel", "4"),
            "cannot run in vllm, which shards it over 4 devices",
        ),
    ],
    ids=lambda value: "-".join(value[-2:]) if isinstance(value, tuple) else "",
)
def test_what_is_refused(tmp_path: Path, extra: tuple[str, ...], words: str) -> None:
    assert words in refused("estimate", *PAIR, *extra)


@pytest.mark.parametrize(
    "option", [("--engine-version", "0.30.0"), ("--engine-option", "enforce_eager=1")]
)
def test_on_a_cpu_the_engine_is_measured(world: Path, option: tuple[str, ...]) -> None:
    line = refused("estimate", "--target", "target", "--draft", "target", "--gpu", "cpu", *option)
    assert f"{option[0]} is for GPUs" in line


def test_a_search_names_who_serves(runs: Path) -> None:
    default, other = (
        json.loads((runs / f"{name}.json").read_text()) for name in ("default", "sglang")
    )
    assert (default["engine"], default["engine_version"]) == (
        "vllm",
        NEWEST,
    ) and "no CUDA graph" in default["engine_class"]
    assert default["free_layers"] > 0 and all(
        "VLLM_USE_V2_MODEL_RUNNER=0" in text for text in default["warnings"]
    )
    assert {"round_s", "host_s", "bound", "engine", "engine_version"} <= set(default["best"][0])
    assert other["engine"] == "sglang" and other["free_layers"] is None and other["warnings"] == []
    info = yaml.safe_load((runs / "runs/default/run.yaml").read_text())
    assert (
        info["profile"]["served"] == default["served"]
        and info["arguments"]["engine_version"] == NEWEST
    )
    assert "round_s,round_s_std" in (runs / "runs/default/trials.csv").read_text().splitlines()[0]
    page = (runs / "runs/default/report.html").read_text()
    assert default["served"] in page and "round, ms" in page
    text = call(*SEARCH, "--run", "runs/default", "--explain").stdout
    assert f"may be up to {default['free_layers']:.1f} layers deep before launching it" in text
    assert f"served by {default['served']}." in text and all(
        f"WARNING: {warning}." in text for warning in default["warnings"]
    )
    words = " ".join(call("report", "runs/default").stdout.split())
    assert f"Predicted for {default['served']}. A round takes" in words


def test_an_engine_that_archsearch_does_not_run_ranks_and_says_who_confirms(runs: Path) -> None:
    line = refused(*SEARCH, "--engine", "sglang", "--confirm", "1")
    assert (
        "does not run SGLang: it ranks drafts for it and exports them; confirm with --engine"
        " transformers or vllm" in line
    )
    assert "rank 1 exists" in refused("confirm", "runs/sglang", "--synthetic")
    result = last_json(
        call(*SEARCH, "--engine", "sglang", "--time-budget", "15m", "--run", "runs/more", "--json")
    )
    assert any("does not run SGLang" in text for text in result["warnings"])


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_a_schedule_for_another_engine(runs: Path, engine: str) -> None:
    result = last_json(
        call("schedule", "runs/sglang", "--engine", engine, "--batch-size", "8", "--json")
    )
    assert (
        result["engine"] == engine
        and f"rounds of {engine} " in result["latency"]
        and len(result["points"]) == 2
    )


def test_tensorrt_llm_is_for_nvidia() -> None:
    asked = ("estimate", *PAIR, "--engine", "tensorrt-llm", "--gpu", "mi300x")
    assert "TensorRT-LLM cannot be priced on mi300x" in refused(*asked)


def test_a_schedule_for_an_engine_that_runs_one_request(runs: Path) -> None:
    result = last_json(call("schedule", "runs/default", "--engine", "transformers", "--json"))
    assert [point["batch_size"] for point in result["points"]] == [
        1
    ] and "one request at a time" in result["note"]
    assert "not --batch-size 8" in refused(
        "schedule", "runs/default", "--engine", "transformers", "--batch-size", "8"
    )
    assert "cannot be priced on h100" in refused("schedule", "runs/default", "--engine", "openvino")


def test_a_run_of_0_1_0_for_transformers_in_graph_mode_reopens(runs: Path) -> None:
    """What 0.1.0 wrote for a GPU: transformers under CUDA graphs, which no search is for any
    more."""
    run = runs / "runs/default"
    info = yaml.safe_load((run / "run.yaml").read_text())
    for name in ("engine_version", "engine_options"):
        del info["arguments"][name]
    info["arguments"] |= {"engine": "transformers", "mode": "graph"}
    del info["profile"]["served"]
    (run / "run.yaml").write_text(yaml.safe_dump(info))
    for path in run.glob("best/*/score.json"):
        score = json.loads(path.read_text())
        path.write_text(
            json.dumps(
                {
                    name: score[name]
                    for name in list(score)
                    if name
                    not in (
                        "round_s",
                        "host_s",
                        "bound",
                        "engine",
                        "engine_version",
                        "needs",
                    )
                }
            )
        )
    before = files_in(run)
    assert "Speculation" in call("report", "runs/default").stdout
    assert "gamma" in call("schedule", "runs/default").stdout
    assert "gamma" in call("schedule", "runs/default", "--engine", "vllm").stdout
    call("export", "runs/default", "--rank", "1", "--output", "exported", "--allow-untrained")
    session = SearchSession.reopen(run)  # what train and confirm begin with
    assert (session.request.engine, session.source.mode) == ("transformers", "graph")
    assert "has no weights" in refused("confirm", "runs/default")
    assert "engine was 'transformers', now 'vllm'" in refused(*SEARCH, "--run", "runs/default")
    assert before <= files_in(run)


@pytest.mark.parametrize(
    ("engine", "advice"),
    [
        ("vllm", "or --engine-option enforce_eager=1"),
        ("sglang", "or --engine-option disable_cuda_graph=1"),
        ("tensorrt-llm", "use --engine transformers"),
    ],
)
def test_a_mode_that_contradicts_the_engine_is_refused_with_a_switch_that_it_has(
    engine: str, advice: str
) -> None:
    with pytest.raises(ArchsearchError) as error:
        serving.with_engine(WorkloadRequest(gpu="h100", mode="eager", engine=engine))
    assert str(error.value).endswith(advice)


def test_a_version_without_draft_models_is_searched_for_the_rest() -> None:
    """vLLM 0.14 runs EAGLE heads and no independent drafts: the whole search was refused."""
    asked = ("search", "--target", "llama-13b", "--gpu", "h100", "--engine-version", "0.14.0")
    found = last_json(call(*asked, "--trials", "2", "--json"))
    assert {"eagle3", "ngram"} <= {row["family"] for row in found["families"]}
    (why,) = found["left_out"]
    assert why.startswith("independent is left out: vllm 0.14.0 does not run such drafts")
    assert "vllm 0.14.0 does not run" in refused(*asked, "--family", "independent")


def test_heads_that_the_engine_has_no_interface_for_are_left_out() -> None:
    """vLLM's Gemma 3 hands out no hidden states: 24 GPU-hours were advised for an EAGLE-3 head that
    vLLM refuses at its start."""
    search = ("search", "--gpu", "h100", "--target")
    found = last_json(call(*search, "gemma-3-27b", "--trials", "2", "--json"))
    families = {row["family"] for row in found["families"]}
    assert {"independent", "ngram"} <= families and "eagle" not in families
    why, of_eagle = found["left_out"]
    assert of_eagle.endswith("no library of `archsearch recipe` trains EAGLE-1 heads")
    assert why.startswith(
        "eagle3, peagle, dflash are left out: vLLM's class of gemma3_text targets (as of "
    )
    assert why.endswith("; use independent drafts or n-grams, or eagle3 in SGLang")
    assert "of opt targets" in refused(*search, "opt-30b", "--family", "eagle3")


def test_an_estimate_by_name_is_refused_where_the_engine_has_no_interface() -> None:
    asked = ("--gpu", "h100", "--target", "mixtral-8x7b", "--draft")
    for draft in ("eagle3", "peagle", "dflash"):
        line = refused("estimate", *asked, draft)
        assert "vLLM's class of mixtral targets (as of 0.32.0) has no interface for" in line
        assert line.endswith("; use independent drafts or n-grams"), "SGLang runs none either"
    call("estimate", *asked, "eagle", "--draft", "medusa")
    line = refused("traffic", *asked, "eagle3", "--requests-per-second", "8")
    assert "vLLM's class of mixtral targets (as of 0.32.0) has no interface for" in line
    both = ("--engine", "sglang", "--engine", "vllm")
    gemma = ("estimate", "--gpu", "h100", "--target", "gemma-3-27b", "--draft", "eagle3")
    call(*gemma, "--engine", "sglang")
    assert "vLLM's class of gemma3_text" in call(*gemma, *both).stdout, "said beside SGLang's"


def test_no_class_of_another_drafter_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ("--target", "llama-3.1-8b", "--gpu", "h100")
    drafts = ("--draft", "eagle3", "--draft", "llama-3.2-1b")
    call("search", *asked, "--family", "eagle3", "--trials", "5", "--run", "run")
    schedule = call("schedule", "run").stdout
    for text in (schedule, call("estimate", *asked, *drafts, "--sweep", "batch").stdout):
        assert f"rounds of vllm {NEWEST} (published)" in " ".join(text.split())
        assert "CUDA graph for the draft" not in text
    assert "A range may lose 1 %." in schedule


@pytest.mark.parametrize(
    ("engine", "version", "greedy"),
    [
        ("tensorrt-llm", None, True),
        ("llama.cpp", None, True),
        ("vllm", "0.20.0", True),
        ("vllm", None, False),
    ],
)
def test_an_engine_that_does_not_sample_drafts_is_named(
    tmp_path: Path, engine: str, version: str | None, greedy: bool
) -> None:
    asked = (*HEAD, "--engine", engine, *(["--engine-version", version] if version else []))
    words = f"{engine} drafts greedily: above temperature 0 it accepts less than predicted"
    drafts = ("--draft", "llama-3.2-1b", "--draft", "ngram")
    found = last_json(call("estimate", *asked, *drafts, "--temperature", "0.8", "--json"))["drafts"]
    said = {entry["draft"]: any(words in note for note in entry["notes"]) for entry in found}
    assert said == {"llama-3.2-1b": greedy, "ngram": False}
    (entry,) = last_json(call("estimate", *asked, "--draft", "llama-3.2-1b", "--json"))["drafts"]
    assert not any(words in note for note in entry["notes"])
    if version is None:
        few = ("--family", "independent", "--trials", "2")
        text = call("search", *asked, *few, "--temperature", "0.8").stdout
        assert (words in text) == greedy


def test_an_engine_that_cannot_run_a_draft_leaves_the_others_their_answer(tmp_path: Path) -> None:
    pair = ("estimate", "--target", "gemma-3-27b", "--draft", "eagle3", "--gpu", "h100")
    found = last_json(call(*pair, "--engine", "vllm", "--engine", "sglang", "--json"))
    assert [entry["engine"] for entry in found["drafts"]] == ["sglang"]
    (why,) = [text for text in found["warnings"] if "has no interface for eagle3" in text]
    assert why in refused(*pair, "--engine", "vllm")
    both = ("--draft", "ngram", "--engine", "vllm", "--engine", "sglang", "--json")
    found = last_json(call(*pair, *both))["drafts"]
    priced = {(entry["draft"], entry["engine"]) for entry in found}
    assert priced == {("eagle3", "sglang"), ("ngram", "vllm"), ("ngram", "sglang")}
