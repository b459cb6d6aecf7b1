"""confirm under load, schedule and profile --engine, end to end: an engine with made-up times in
the place of vLLM."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from archsearch.engine_facts import EngineFacts, engine_facts
from archsearch.engines import registry
from archsearch.engines.environments.environment import Place
from archsearch.engines.measure.results import UnderLoad
from archsearch.engines.measure.turns import Variant
from archsearch.errors import ArchsearchError, MissingDataError, RunFailed
from archsearch.estimate import Estimate
from archsearch.hardware.identify import identify_cpu
from archsearch.models.targets import resolve_target
from archsearch.pipeline import (
    EngineChoice,
    LoadRequest,
    ProfileRequest,
    SearchRequest,
    SearchSession,
    confirm,
    confirm_load,
    confirm_rank,
    engine_ways,
    in_engine,
    schedule_rank,
    search,
)
from archsearch.pipeline.in_engine import Bench, serving_scorer
from archsearch.pipeline.profile.engine import profile_engine
from archsearch.profiles import Profile
from archsearch.records import as_data, from_data
from archsearch.report import summary_text
from archsearch.report.terminal.run import confirm_text, engines_text
from archsearch.runs import confirmed
from archsearch.runs.confirmed import Confirmed, ErrorSummary, LoadRecord
from archsearch.runs.tables import EngineWays
from archsearch.search.objective import Score, Scorer
from archsearch.search.space import load_space
from archsearch.speedup import MAX_GAMMA, accepted_by_position
from archsearch.workload import WorkloadRequest
from tests.doubles.made_up_engine import MadeUpEngine
from tests.doubles.world import TINY, give_weights, make_world, tiny_drafts

HERE = EngineChoice("vllm", python=Path(sys.executable))
SERVER = {"server_url": "http://a", "baseline_url": "http://b"}
SHORT = LoadRequest(concurrencies=(1, 3, 6), synthetic=True, repeats=9, tokens=96)
LAW = {  # of MadeUpEngine, by batch and gamma
    "decode_s": lambda batch, gamma: 10.5e-3 + 1e-3 * batch,
    "draft_s": lambda batch, gamma: gamma * 1e-3 + 0.2e-3 * batch * (2 * gamma + 1),
    "verify_s": lambda batch, gamma: 10e-3 + 1e-3 * batch * (gamma + 1),
    "overhead_s": lambda batch, gamma: 2e-3 + 0.3e-3 * gamma,
}
Made = list[MadeUpEngine]


def profile_folder() -> Path:
    (header,) = Path("profiles").glob("*/*/profile.json")
    return header.parent


def engine_profile(ref: Any, drafts: Sequence[Any], **changes: Any) -> int:
    """`archsearch profile --engine vllm` without the sweep, into the world's profile."""
    request = ProfileRequest(
        "cpu", ref.architecture, load_space("tiny.yaml"), engine_name="vllm", target_ref=ref
    )
    profile = Profile.load(profile_folder())
    before = len(profile.rows)
    run: Any = SimpleNamespace(request=replace(request, **changes), profile=profile, drafts=drafts)
    run.device, run.memory = identify_cpu(), identify_cpu().memory_bytes
    profile_engine(run, "float32")
    return len(profile.rows) - before


def put(monkeypatch: pytest.MonkeyPatch, make: Callable[[], MadeUpEngine]) -> Made:
    """Made-up engines instead of real ones; the list grows with each that is made."""
    made: Made = []

    def make_engine(name: str, settings: Any, tokenizer: Any = None) -> MadeUpEngine:
        engine = make()
        engine.name, engine.settings = name, settings  # type: ignore[attr-defined]
        made.append(engine)
        return engine

    monkeypatch.setattr(registry, "make_engine", make_engine)
    return made


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The tiny world, whose profile has the passes of the made-up engine, and a run of it; rank 2
    has weights and a trace."""
    folder, before = make_world(tmp_path_factory.mktemp("world")), Path.cwd()
    patch = pytest.MonkeyPatch()
    patch.chdir(folder)
    patch.setenv("ARCHSEARCH_CACHE", str(folder / "cache"))
    put(patch, MadeUpEngine)
    try:
        assert engine_profile(resolve_target("target"), tiny_drafts()) > 40
        search(
            SearchRequest(
                "target",
                WorkloadRequest("cpu", context_len=64, engine="vllm"),
                space="tiny.yaml",
                trials=24,
                prompts=Path("prompts.jsonl"),
                run=Path("runs/a"),
                answer_tokens=32,
                alpha="0.8",
            )
        )
        give_weights(Path("runs/a"), 2, alpha=0.6)
    finally:
        patch.undo()
        os.chdir(before)
    yield folder


@pytest.fixture(scope="module")
def opened(built: Path) -> SearchSession:
    """The session of the run, which names its folder from wherever one is."""
    with chdir(built):
        return SearchSession.reopen(Path("runs/a"))


@pytest.fixture
def session(opened: SearchSession, built: Path, tmp_path: Path) -> SearchSession:
    """The same in a copy of the world that is the working directory."""
    shutil.copytree(built, tmp_path, dirs_exist_ok=True)
    return opened


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    return put(monkeypatch, MadeUpEngine)


def read(path: str) -> Any:
    return json.loads(Path(path).read_text())


# --------------------------------------------------------------------------------------------------
# under load


def test_an_untrained_candidate_is_predicted_as_the_engine_runs_it(
    session: SearchSession, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Profile and confirmation speak of the same seconds: units, batches, context, the draft's
    first pass."""
    monkeypatch.setattr(in_engine, "machine_slowdown", lambda source: 1.0)
    data = as_data(confirm_load(session, SHORT, HERE))
    assert data["slowdown"] == 1.0 and data["alpha"]["value"] == pytest.approx(0.8)
    assert json.loads(json.dumps(data)) == read("runs/a/best/1/load-vllm.json")
    assert json.loads(json.dumps(as_data(from_data(LoadRecord, data)))) == read(
        "runs/a/best/1/load-vllm.json"
    )
    assert (
        data["synthetic"]
        and data["engine"] == "vllm"
        and data["engine_version"] == "1"
        and data["rank"] == 1
    )
    assert (
        data["architecture"] == session.run.score(1).architecture.label()
        and data["dtype"] == "float32"
    )
    assert (
        "passes as vllm ran them" in data["latency"]
        and data["repeats"] == 9
        and data["seconds"] > 0
    )
    assert data["asked_acceptance_by_position"] == pytest.approx(
        accepted_by_position([0.8] * max(r["gamma"] for r in data["rows"]))
    )
    assert [row["concurrency"] for row in data["baseline"]] == [1, 3, 6] and all(
        row["tau"] == 1 for row in data["baseline"]
    )
    assert {row["concurrency"] for row in data["rows"]} == {1, 3, 6}
    for row in data["rows"]:
        batch, gamma = row["concurrency"], row["gamma"]
        assert row["variant"] == f"gamma {gamma}" and row["batch_steps"] > 20
        # 3 and 6 requests were never profiled: 1, 2, 4 and 8 were.
        assert abs(row["relative_error_at_measured_tau"]) < 0.06
        assert row["relative_error"] == pytest.approx(
            row["predicted_speedup"]["value"] / row["speedup"]["value"] - 1
        )
        told = row["error_by_term"]
        for term, law in LAW.items():
            assert told[term]["measured"] == pytest.approx(law(batch, gamma), rel=1e-6)
            assert told[term]["predicted"] == pytest.approx(law(batch, gamma), rel=0.1)
        shares = sum(term["log_error"] for term in told.values())
        assert shares == pytest.approx(
            math.log(row["predicted_speedup"]["value"] / row["speedup"]["value"]), abs=0.04
        )
        assert told["tau"]["predicted"] == pytest.approx(row["tau"], rel=0.12)
    summary = data["summary"]
    assert summary["cases"] == len(data["rows"]) and summary["median_absolute_error"] < 0.06
    assert len(made) >= 2 and all(engine.log[-1] == "stop" for engine in made)
    settings = made[0].settings  # type: ignore[attr-defined]
    assert (settings.dtype, settings.concurrency, settings.device, settings.mode) == (
        "float32",
        6,
        "cpu",
        "eager",
    )
    assert settings.max_len == data["context"] + 96 - 96 // 2 and settings.python == Path(
        sys.executable
    )


def test_a_trained_candidate_is_run_with_its_own_acceptance(
    session: SearchSession, made: Made
) -> None:
    request = LoadRequest(2, gammas=(2, 4), concurrencies=(1, 2), repeats=3, tokens=96)
    data = as_data(confirm_load(session, request, HERE))
    assert not data["synthetic"] and data["asked_acceptance_by_position"] is None
    assert [(row["gamma"], row["concurrency"]) for row in data["rows"]] == [
        (2, 1),
        (2, 2),
        (4, 1),
        (4, 2),
    ]
    for row in data["rows"]:
        terms = row["error_by_term"]
        assert (
            terms["tau"]["measured"] == row["tau"]
            and abs(row["relative_error_at_measured_tau"]) < 0.06
        )
        # The trace foretells alpha 0.6; the engine accepts all or nothing, by the toss of a coin.
        assert terms["tau"]["predicted"] == pytest.approx(
            1 + sum(0.6**i for i in range(1, row["gamma"] + 1)), rel=0.1
        )
        assert (
            row["tau"] == pytest.approx(1 + row["gamma"] / 2, rel=0.3) and row["alpha"] is not None
        )
        assert row["batch_steps"] > 0 and row["accepted_by_position"][0] == pytest.approx(
            row["accepted_by_position"][-1]
        )
    drafts = {str(engine.draft) for engine in made if engine.draft is not None}
    assert drafts == {str(session.run.best_dir(2))}


@pytest.mark.slow(own=True)
def test_no_more_requests_are_in_flight_than_was_said(
    session: SearchSession, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: set[int] = set()
    generate = MadeUpEngine.generate

    def watched(self: MadeUpEngine, prompts: Any, sampling: Any) -> Any:
        if sampling.max_new_tokens > 16:  # not a warm-up
            sizes.add(len(prompts))
        return generate(self, prompts, sampling)

    monkeypatch.setattr(MadeUpEngine, "generate", watched)
    confirm_load(
        session, LoadRequest(2, gammas=(2,), concurrencies=(1, 4), repeats=2, tokens=48), HERE
    )
    assert sizes == {1, 4}


def test_a_schedule_is_run_against_off_and_every_fixed_gamma(
    session: SearchSession, made: Made
) -> None:
    record = confirm_load(
        session, replace(SHORT, concurrencies=(2, 4), schedule=True, repeats=5, tokens=400), HERE
    )
    data = as_data(record)
    found = data["schedule"]
    assert (
        found["ranges"][0][0] == 1 and found["ranges"][-1][1] == 4
    )  # from batch size 1 on, although 2 was asked for
    assert [row["concurrency"] for row in found["verdict"]] == [2, 4] and all(
        row["holds"] for row in found["verdict"]
    )
    assert {row["variant"] for row in data["rows"]} >= {"schedule"}
    assert any("schedule" in entry for engine in made for entry in engine.log)


def test_a_schedule_that_is_off_is_predicted_with_the_idle_pass(
    session: SearchSession, made: Made, built: Path
) -> None:
    scorer, _ = serving_scorer(session, "vllm")
    arch, alone = session.run.score(1).architecture, 11.5e-3
    result = UnderLoad(
        variant="schedule",
        concurrency=1,
        gamma=0,
        tokens_per_s=80.0,
        tau=1.0,
        speedup=Estimate(0.9, 0.01, "measured"),
        step_s=alone,
    )
    rows = {("schedule", 1): result, ("alone", 1): replace(result, variant="alone", speedup=None)}
    off = Variant("schedule", "draft", 3, schedule=((1, 1, 0), (2, 4, 3)))
    score = session.run.score(1)
    known = confirm._Acceptance(score.alpha, {}, {}, synthetic=True)
    row = confirm._load_row(scorer.at_context(64), arch, known, off, rows, 1.0)
    idle = scorer.at_context(64).latency.idle_draft_s(arch, scorer.workload).value
    decode = scorer.at_context(64).decode_s.value
    assert 0 < idle < decode and row.predicted_speedup.value == pytest.approx(
        decode / (decode + idle)
    )
    assert ErrorSummary.of([row]) == ErrorSummary(0)  # no draft tokens: no case of the prediction


@pytest.mark.parametrize(
    ("request_", "choice", "words"),
    [
        (replace(SHORT, concurrencies=(1, 10**9)), HERE, "do not fit cpu-"),
        (replace(SHORT, gammas=(20,)), HERE, "acceptance is known for gamma 1 to 16, not for 20"),
        (
            replace(SHORT, concurrencies=(1, 2)),
            EngineChoice("transformers"),
            "one request at a time, so 2 in flight",
        ),
        (
            replace(SHORT, schedule=True),
            EngineChoice("openvino"),
            "openvino takes one gamma for all batch sizes",
        ),
        (
            replace(SHORT, concurrencies=(1,), schedule=True),
            EngineChoice("transformers"),
            "transformers takes one gamma",
        ),
        (LoadRequest(), EngineChoice("openvino"), "openvino cannot accept by chance"),
        (SHORT, EngineChoice("vllm", **SERVER), "server cannot take synthetic"),
        (LoadRequest(2, schedule=True), EngineChoice("vllm", **SERVER), "keeps the schedule"),
        (LoadRequest(2), EngineChoice("openvino", **SERVER), "vLLM server, not for openvino"),
        (SHORT, EngineChoice("vllm"), "vLLM is not installed; run: archsearch engine install vllm"),
        (
            SHORT,
            EngineChoice("vllm", python=Path("nowhere/python")),
            "--engine-python names .*nowhere/python, which is no file",
        ),
        (SHORT, EngineChoice("warp"), "unknown engine 'warp'"),
    ],
)
def test_what_cannot_be_confirmed_is_refused_before_anything_is_loaded(
    session: SearchSession,
    monkeypatch: pytest.MonkeyPatch,
    made: Made,
    request_: LoadRequest,
    choice: EngineChoice,
    words: str,
) -> None:
    monkeypatch.delenv("ARCHSEARCH_VLLM_PYTHON", raising=False)
    with pytest.raises(ArchsearchError, match=words):
        confirm_load(session, request_, choice)
    assert (
        not made
        and not (session.run.path / "engine").exists()
        and not list(session.run.path.rglob("load-*.json"))
    )


class Stops(MadeUpEngine):
    """Fails in its fifth call."""

    error: BaseException = KeyboardInterrupt()

    def generate(self, prompts: Any, sampling: Any) -> Any:
        if self.calls >= 4:
            raise self.error
        return super().generate(prompts, sampling)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RunFailed("vllm was killed by signal 9")])
def test_what_was_confirmed_before_is_kept(
    session: SearchSession, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    put(monkeypatch, MadeUpEngine)
    confirm_load(session, SHORT, HERE)
    before = {path: path.read_bytes() for path in session.run.path.rglob("*") if path.is_file()}
    made = put(monkeypatch, Stops)
    monkeypatch.setattr(Stops, "error", error)
    with pytest.raises(type(error)):
        confirm_load(session, replace(SHORT, repeats=9), HERE)
    after = {path: path.read_bytes() for path in session.run.path.rglob("*") if path.is_file()}
    partial = after.pop(session.run.best_dir(1) / "partial-load-vllm.json", None)
    assert after == before
    assert partial is not None  # whole repeats before the end are kept apart
    kept = json.loads(partial)
    assert kept["stopped"] == (str(error) or "stopped")
    assert {entry["repeats"] for entry in kept["results"]} == {1}
    assert made and all(engine.log[-1] == "stop" for engine in made)


# ------------------------------------------------------------------------------------- targets that
# are only a shape, folders


def test_a_target_without_weights_is_made_up_where_the_engine_can(
    session: SearchSession, made: Made
) -> None:
    Path("target/model.safetensors").unlink()
    session = SearchSession.reopen(Path("runs/a"))  # whose target is the copy
    confirm_load(session, replace(SHORT, concurrencies=(1,)), HERE)
    settings = made[0].settings  # type: ignore[attr-defined]
    assert settings.dummy_weights and sorted(os.listdir("runs/a/engine/target")) == ["config.json"]
    with pytest.raises(
        MissingDataError, match="transformers needs them; give a folder .* --engine vllm"
    ):
        confirm_load(session, replace(SHORT, concurrencies=(1,)), EngineChoice("transformers"))


@pytest.mark.slow(own=True)
def test_random_drafts_are_made_once(session: SearchSession, made: Made) -> None:
    confirm_load(session, replace(SHORT, concurrencies=(1,)), HERE)
    (weights,) = Path("runs/a/engine").glob("*/model.safetensors")
    stamp = weights.stat().st_mtime_ns
    confirm_load(session, replace(SHORT, concurrencies=(1,)), HERE)
    assert [
        path.stat().st_mtime_ns for path in Path("runs/a/engine").glob("*/model.safetensors")
    ] == [stamp]


# --------------------------------------------------------------------------------------------------
# by prompt


def confirmed_data(*asked: Any, **options: Any) -> dict[str, Any]:
    """What `confirm --json` prints."""
    return as_data(confirm_rank(*asked, **options))


def test_confirm_by_prompt_in_an_engine_of_its_own(
    session: SearchSession, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_engine, "machine_slowdown", lambda source: 1.25)
    data = confirmed_data(session, 2, gammas=(2, 3), prompt_count=6, choice=HERE)
    assert json.loads(json.dumps(data)) == read("runs/a/best/2/confirmed.json")
    assert (
        data["engine"] == "vllm"
        and data["prompts"] == 6
        and data["slowdown"] == 1.25
        and "vllm ran them" in data["latency"]
    )
    assert data["identical_output_float32"].items() >= {"prompts": 6, "identical": 6}.items()
    for row in (data, *data["other_gammas"]):
        gamma = row["gamma"]
        assert (
            abs(row["relative_error_at_measured_tau"]) < 0.08
        )  # few rounds: the median prompt is not the mean one
        for term, law in LAW.items():
            if term != "decode_s":
                # the machine's slowdown is taken out of what was measured
                assert row["error_by_term"][term]["measured"] == pytest.approx(
                    law(1, gamma) / 1.25, rel=1e-6
                )
            assert row["error_by_term"][term]["predicted"] == pytest.approx(law(1, gamma), rel=0.06)
        assert row["decode_s"] == pytest.approx(LAW["decode_s"](1, 0))
    assert {engine.settings.dtype for engine in made} == {"float32"}  # type: ignore[attr-defined]
    assert Path("runs/a/report.html").is_file() and data["profile_first"] is None
    assert (
        "12 held-out prompts are too few to split (at least 16)" in data["prompts_seen"]
    )  # said, not refused
    assert "too few to split" in Path("runs/a/report.html").read_text()
    assert data["best_of"]["gammas"] == [2, 3] or data["best_of"]["gammas"] == (2, 3)


def test_gammas_that_are_predicted_almost_as_fast_run_beside_the_score_s_own(
    session: SearchSession, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ran(close: bool) -> dict[int, float]:
        data = confirmed_data(session, 2, close=close, prompt_count=4, choice=HERE)
        return {row["gamma"]: row["predicted_speedup"] for row in (data, *data["other_gammas"])}

    own = session.run.score(2).gamma
    assert set(ran(False)) == {own}
    monkeypatch.setattr(confirm, "CLOSE", 0.5)
    found = ran(True)
    assert own in found and len(found) == 3
    monkeypatch.setattr(confirm, "CLOSE", 0.0)
    assert all(gain >= found[own] for gain in ran(True).values())


def test_a_profile_of_another_machine_is_said_where_it_is_confirmed_here(
    session: SearchSession, made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    device = replace(session.source.device, key="cpu-of-another-machine-1t")
    source = replace(session.source, device=device)
    elsewhere = replace(session, setting=replace(session.setting, source=source))
    data = confirmed_data(elsewhere, 2, gammas=(2,), prompt_count=4, choice=HERE)
    words = f"'{device.key}' is not this CPU ({identify_cpu().key})"
    assert f"WARNING: predicted for another machine: {words}.\n" in capsys.readouterr().err
    assert data["latency"].endswith(f"; predicted for another machine: {words}")


def test_an_engine_that_was_never_profiled_says_so_beside_its_prediction(
    session: SearchSession, made: Made
) -> None:
    data = confirmed_data(
        session,
        2,
        gammas=(2,),
        prompt_count=4,
        choice=EngineChoice("openvino", python=Path(sys.executable)),
    )
    command = "archsearch profile --gpu cpu --target target --engine openvino --dtype float32"
    assert data["profile_first"] == command == read("runs/a/best/2/confirmed.json")["profile_first"]
    for shown in (
        confirm_text(from_data(Confirmed, data), Path("runs/a"), 2),
        Path("runs/a/report.html").read_text(),
        summary_text(session.run),
    ):
        assert "own passes, which were never profiled" in " ".join(
            shown.split()
        ) and command in " ".join(shown.split())


@pytest.mark.slow(own=True)
def test_another_engine_does_not_take_the_place_of_the_run_s_own(
    session: SearchSession, made: Made
) -> None:
    asked = replace(session.request.asked, engine="transformers")
    session = replace(session, request=replace(session.request, asked=asked))
    confirm_rank(session, 2, gammas=(2,), prompt_count=4, choice=HERE)
    assert read("runs/a/best/2/confirmed.json")["engine"] == "vllm"  # the only one so far
    own = {**read("runs/a/best/2/confirmed.json"), "engine": session.request.engine}
    Path("runs/a/best/2/confirmed.json").write_text(json.dumps(own))
    again = confirmed_data(session, 2, gammas=(3,), prompt_count=4, choice=HERE)
    assert read("runs/a/best/2/confirmed.json") == own and read(
        "runs/a/best/2/confirmed-vllm.json"
    ) == json.loads(json.dumps(again))
    assert "vllm 1" in Path("runs/a/report.html").read_text()


@pytest.mark.slow(own=True)
def test_a_slower_gamma_does_not_replace_a_faster_one(session: SearchSession, made: Made) -> None:
    """`--gamma 3` threw away gamma 1, which was faster, with the stopping rule beside it."""
    confirm_rank(session, 2, gammas=(2,), prompt_count=4, choice=HERE)
    path = Path("runs/a/best/2/confirmed-vllm.json")
    own = read(str(path))
    path.write_text(json.dumps({**own, "speedup": {**own["speedup"], "value": 99.0}}))
    kept = read(str(path))
    other = confirmed_data(session, 2, gammas=(3,), prompt_count=4, choice=HERE)
    assert "is faster (99.00x at gamma 2) and stays" in other["kept_earlier"]
    assert read(str(path)) == kept and read("runs/a/best/2/slower-vllm.json")["gamma"] == 3
    confirm_rank(session, 2, gammas=(2,), prompt_count=4, choice=HERE)  # the same gamma again
    assert read(str(path)) != kept and not Path("runs/a/best/2/slower-vllm.json").exists()


@pytest.mark.slow(own=True)
def test_what_decides_nothing_does_not_replace_what_decides(
    session: SearchSession, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    disturbed = "the machine was disturbed"
    files = ("confirmed.json", "confirmed-vllm.json")

    def run_again(undecided: str | None) -> dict[str, Any]:
        monkeypatch.setattr(confirmed, "counting_doubt", lambda *figures: undecided)
        return confirmed_data(session, 2, gammas=(2,), prompt_count=4, choice=HERE)

    beside = Path("runs/a/best/2/undecided-vllm.json")
    first = run_again(disturbed)
    assert (
        "kept_earlier" not in first and read("runs/a/best/2/confirmed.json")["undecided"]
    )  # nothing to keep yet
    decided = run_again(None)
    shown = [read(f"runs/a/best/2/{name}") for name in files]
    assert shown[0] == shown[1] and shown[0]["undecided"] is None and not beside.exists()
    again = run_again(disturbed)
    assert [read(f"runs/a/best/2/{name}") for name in files] == shown and read(str(beside))[
        "undecided"
    ] == again["undecided"]
    text = " ".join(confirm_text(from_data(Confirmed, again), Path("runs/a"), 2).split())
    assert (
        "stays in confirmed-vllm.json; this one is in undecided-vllm.json." in text
        and "Not decided: the machine was disturbed" in text
    )
    assert f"{decided['speedup']['value']:.2f}x" in again["kept_earlier"]
    give_weights(
        Path("runs/a"), 2, alpha=0.7
    )  # other weights: the earlier confirmation is not of these
    assert (
        "kept_earlier" not in run_again(disturbed)
        and read("runs/a/best/2/confirmed.json")["undecided"]
    )


def test_a_rank_without_weights_is_told_both_ways(session: SearchSession, made: Made) -> None:
    with pytest.raises(
        MissingDataError, match=r"archsearch train .*--rank 1\).*--rank 1 --synthetic"
    ) as caught:
        confirm_rank(session, 1, choice=HERE)
    assert "\n" not in str(caught.value) and not made
    shutil.copytree("runs/a", "my runs/a")
    moved = replace(session, run=replace(session.run, path=Path("my runs/a")))
    with pytest.raises(MissingDataError, match=r"archsearch train 'my runs/a' --rank 1\)"):
        confirm_rank(moved, 1, choice=HERE)


# --------------------------------------------------------------------------------------------------
# schedule


def test_the_schedule_of_a_rank(session: SearchSession) -> None:
    usual = schedule_rank(session, 1, "vllm")  # the profile holds passes up to batch 8
    assert [point.batch_size for point in usual.schedule.points] == [1, 2, 4, 8, 16]
    assert "up to batch size 8" in usual.note
    data = schedule_rank(session, 1, "vllm", (1, 2, 4, 8, 16, 32, 64, 128, 256))
    config = read("runs/a/best/1/speculative_config.json")
    ranges = data.schedule.ranges
    assert config["num_speculative_tokens_per_batch_size"] == [list(each) for each in ranges]
    assert config["num_speculative_tokens"] == max(gamma for _, _, gamma in ranges)
    kept = read("runs/a/best/1/schedule.json")
    assert (
        kept["ranges"] == [list(each) for each in ranges]
        and kept["engine"] == "vllm"
        and kept["latency"] == data.schedule.latency
    )
    assert [point["batch_size"] for point in kept["points"]] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    slow = [str(point["batch_size"]) for point in kept["points"] if point["speedup"]["value"] < 1]
    assert slow and data.note.endswith(
        f"Without the draft loaded a server is faster at batch size {', '.join(slow)}."
    )
    gammas = [point["gamma"] for point in kept["points"]]
    assert gammas[0] >= 2 and gammas == sorted(gammas, reverse=True)
    for point in kept["points"]:
        best = max(value["value"] for value in point["by_gamma"].values())
        assert set(point["by_gamma"]) == {str(gamma) for gamma in range(1, MAX_GAMMA + 1)}
        if point["gamma"]:
            assert (
                point["speedup"]["value"] == best == point["by_gamma"][str(point["gamma"])]["value"]
            )
        else:  # vLLM runs the draft all the same
            assert best <= point["speedup"]["value"] < 1 and point["tau"]["value"] == 1
    first, last = kept["ranges"][0], kept["ranges"][-1]
    assert first[0] == 1 and first[2] == gammas[0] and last[1] == 256 and last[2] == gammas[-1]


def test_a_schedule_begins_at_batch_size_1(session: SearchSession) -> None:
    data = schedule_rank(session, 1, "vllm", (4, 16))
    assert [point.batch_size for point in data.schedule.points] == [1, 4, 16]
    assert data.schedule.ranges[0][0] == 1


# --------------------------------------------------------------------------------------------------
# profile --engine


def starts(made: Made) -> list[str]:
    return [entry for engine in made for entry in engine.log if entry.startswith("start")]


def test_a_killed_engine_profile_goes_on_where_it_stopped(
    session: SearchSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ref, drafts = profile_folder(), resolve_target("target"), tiny_drafts()
    complete, keys = folder / "rows.jsonl", set(Profile.load(folder).rows)
    own = [line for line in complete.read_text().splitlines() if '"engine": "vllm"' in line]
    made = put(monkeypatch, MadeUpEngine)
    assert engine_profile(ref, drafts) == 0 and not made  # all is known
    # Killed after the target and two drafts, in the middle of the third one's rows.
    marks = [
        i
        for i, line in enumerate(own)
        if '"role": "draft"' in line and '"batch": 1,' in line and '"cold"' in line
    ]
    lines = [line for line in complete.read_text().splitlines() if '"engine": "vllm"' not in line]
    complete.write_text("\n".join([*lines, *own[: marks[2]]]) + "\n")
    left = len(Profile.load(folder).rows)
    assert engine_profile(ref, drafts) == len(keys) - left
    # Four of drafts, then two of each family whose rounds are measured.
    families = {"eagle3", "peagle", "medusa", "ngram"} & set(engine_facts("vllm").confirms)
    # The one plain start is of the engine that says how slow the machine is; the target alone is
    # not measured again.
    assert len(starts(made)) == 4 + 2 * len(families) + 1 and starts(made).count("start 0") == 1
    # so every draft had the gammas that it has without a kill
    same = set(Profile.load(folder).rows) == keys
    assert same
    assert not list(folder.glob(".engine-*"))


def test_rows_of_another_target_do_not_stand_for_this_one(
    session: SearchSession, made: Made
) -> None:
    other = replace(resolve_target("target"), architecture=TINY.replace(num_hidden_layers=3))
    assert engine_profile(other, tiny_drafts()) > 0
    assert "start 0" in starts(made)


def test_a_profile_of_a_target_that_is_only_a_shape(session: SearchSession, made: Made) -> None:
    Path("target/model.safetensors").unlink()
    ref = resolve_target("target")
    other = replace(ref, architecture=TINY.replace(num_hidden_layers=3))
    assert engine_profile(other, tiny_drafts()[:1]) > 0
    assert made[0].settings.dummy_weights  # type: ignore[attr-defined]
    with pytest.raises(MissingDataError, match="openvino needs them; .*--engine vllm"):
        engine_profile(ref, tiny_drafts(), engine_name="openvino")


# --------------------------------------------------------------------------------------------------
# engines beside one another


def test_engines_that_are_installed_are_compared_in_tokens_per_second(
    session: SearchSession, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("transformers", "vllm", "openvino", "llama.cpp")
    here = [Place(name, name != "llama.cpp") for name in names]
    monkeypatch.setattr(engine_ways, "overview", lambda: here)
    confirm_rank(session, 2, gammas=(2,), prompt_count=4, choice=HERE)
    data = from_data(EngineWays, read("runs/a/engines.json"))
    alone = {way.engine: way for way in data.ways if not way.drafter and way.dtype == data.dtype}
    drafted = {way.engine: way for way in data.ways if way.drafter and way.dtype == data.dtype}
    assert set(alone) == set(drafted) == {"transformers", "vllm", "openvino"}
    assert alone["vllm"].tokens_per_s.value == pytest.approx(1.0 / LAW["decode_s"](1, 0), rel=0.1)
    assert alone["vllm"].profile_first is None and drafted["vllm"].gamma >= 1
    command = "archsearch profile --gpu cpu --target target --engine openvino --dtype float32"
    assert alone["openvino"].profile_first == command
    said = engines_text(Path("runs/a"))
    assert " in float32 here: vLLM " in said and command in said
    assert "transformers alone" in said and "(predicted)" in said
    page = " ".join(Path("runs/a/report.html").read_text().split())
    assert "Engines on this machine" in page and "in float32 here: vLLM" in page
    assert "in float32 here: vLLM" in " ".join(summary_text(session.run).split())


def test_drafts_may_be_in_another_precision_that_was_measured(
    session: SearchSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = session.scorer.with_gammas((1,))  # stands for drafts in q8_0

    def scored(scorer: Scorer, score: Score, folder: Path) -> Score:
        return replace(score, speedup=replace(score.speedup, value=2.0 if scorer is quick else 1.0))

    def scorer_of(session: SearchSession, engine: str, dtype: str, drafts: str) -> Any:
        return quick if drafts == "q8_0" else session.scorer, ""

    monkeypatch.setattr(engine_ways, "serving_scorer", scorer_of)
    monkeypatch.setattr(engine_ways, "scored_by", scored)
    alone, drafted = engine_ways._ways(session, "llama.cpp", "float16", ["float16", "q8_0"])
    assert (alone.drafter, alone.dtype) == ("", "float16")
    assert drafted.drafter.endswith(" in q8_0") and drafted.dtype == "float16"
    _, drafted = engine_ways._ways(session, "llama.cpp", "float16", ["float16"])
    assert " in " not in drafted.drafter
    monkeypatch.setattr(EngineFacts, "lacks", lambda *asked, **of: True)  # runs none of the ranks
    (only,) = engine_ways._ways(session, "llama.cpp", "float16", ["float16"])
    assert (only.drafter, only.tokens_per_s) == ("", alone.tokens_per_s)


def test_another_precision_is_kept_beside_the_run_s_own(session: SearchSession, made: Made) -> None:
    confirm_rank(session, 2, gammas=(2,), prompt_count=4, choice=HERE)
    first = read("runs/a/best/2/confirmed.json")
    other = replace(HERE, dtype="bfloat16")
    try:
        data = confirmed_data(session, 2, gammas=(2,), prompt_count=4, choice=other)
    except MissingDataError as error:  # a profile of one precision
        assert "bfloat16" in str(error)
        return
    assert data["dtype"] == "bfloat16" and read("runs/a/best/2/confirmed.json") == first
    assert read("runs/a/best/2/confirmed-vllm-bfloat16.json") == json.loads(json.dumps(data))
    with pytest.raises(ArchsearchError, match="a format of GGUF files, in which vLLM"):
        confirm_rank(session, 2, choice=replace(HERE, dtype="q8_0"))
    for option, more in (
        ("draft-dtype", {"draft_dtype": "q8_0"}),
        ("engine-path", {"path": Path()}),
    ):
        with pytest.raises(ArchsearchError, match=f"--{option} is for --engine llama.cpp, not for"):
            confirm_rank(session, 2, choice=replace(HERE, **more))
    with pytest.raises(ArchsearchError, match="a draft's GGUF is written in .*, not in q4_k_m"):
        confirm_rank(session, 2, choice=replace(HERE, name="llama.cpp", draft_dtype="q4_k_m"))


def test_a_draft_of_another_precision_is_kept_beside_the_run_s_own(
    session: SearchSession, made: Made
) -> None:
    mixed = replace(HERE, name="llama.cpp", draft_dtype="q8_0")
    data = confirmed_data(session, 2, gammas=(2,), prompt_count=4, choice=mixed)
    own = f"{data['dtype']}-q8_0"
    assert read(f"runs/a/best/2/confirmed-llama.cpp-{own}.json")["draft_dtype"] == "q8_0"
    # the target's passes were not measured there either, in its own precision
    unmeasured = "drafts priced in float32: the profile holds no passes of llama.cpp in float32"
    assert unmeasured in data["latency"]
    assert not Path("runs/a/best/2/confirmed.json").exists()
    assert all(each.settings.draft_dtype == "q8_0" for each in made)  # type: ignore[attr-defined]
    # what a search in llama.cpp was asked for is what it runs, exports and calls its own
    run = replace(session.run, info=deepcopy(session.run.info))
    run.arguments.update(engine="llama.cpp", draft_dtype="q8_0")
    bench = Bench(replace(session, run=run), replace(mixed, draft_dtype=None))
    assert (bench.draft_dtype, bench.file_name) == ("q8_0", "llama.cpp")
    other = replace(bench, choice=HERE)
    assert other.draft_dtype is None and other.own_dtype
    # where an engine quantises a draft as it loads it, the run's format is the one that runs
    run.arguments.update(engine="vllm", draft_dtype="float8_e4m3fn")
    assert (other.name, other.draft_dtype, other.own_dtype) == ("vllm", "float8_e4m3fn", True)
    assert bench.draft_dtype is None
    # beside another dtype of all else (exactness asks in float32) vLLM would refuse 8 bits
    asked = [other._settings(dtype=dtype).draft_dtype for dtype in (other.dtype, "float16")]
    assert asked == ["float8_e4m3fn", None]


def test_a_dense_target_of_a_hub_is_made_up_where_the_engine_can() -> None:
    dense, experts = map(resolve_target, ("llama-3.1-8b", "gpt-oss-120b"))
    assert not in_engine.can_run("vllm", dense) and in_engine.can_run("transformers", dense)
    assert in_engine.can_run("vllm", experts)
