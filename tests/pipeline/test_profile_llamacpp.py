"""`profile --engine llama.cpp` and what `estimate` says with and without it, on an engine that is
made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from archsearch.architecture.counts import parameters
from archsearch.capacity import memory_bytes
from archsearch.engine_facts import engine_facts
from archsearch.engines import registry
from archsearch.engines.engine import EngineStep
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.latency.model import LatencyModel
from archsearch.models.targets import resolve_target
from archsearch.pipeline.latency import choose_latency
from archsearch.pipeline.profile import cpu, profile_device
from archsearch.pipeline.profile import engine as in_engine
from archsearch.pipeline.profile.run import ProfileRequest
from archsearch.pipeline.serving import dtype_of_drafts
from archsearch.profiles import PassShape, Profile
from archsearch.report.phrases import latency_warning
from archsearch.search.space import load_space
from archsearch.workload import Workload, WorkloadRequest
from tests.doubles.made_up_engine import MadeUpEngine
from tests.doubles.world import write_profile
from tests.latency.test_engine_passes import DRAFTS

TARGET = resolve_target("smollm2-135m")


class LlamaCpp(MadeUpEngine):
    """A pass of the draft over what was verified, besides those that draft, and passes of the
    target for comparison, over one token and over eight `slower` in all engines but the first."""

    slower, runs = (1.0, 1.0), 0

    def start(self, *args: Any, **options: Any) -> None:
        super().start(*args, **options)
        type(self).runs += 1

    def steps(self) -> tuple[EngineStep, ...]:
        def caught_up(number: int, step: EngineStep) -> EngineStep:
            slower = self.slower[number % 2] if self.runs > 1 else 1.0
            tokens, seconds = ((1, 0.011), (8, 0.018))[number % 2]
            step = replace(step, compared=(tokens, seconds * slower))
            if not step.gamma:
                return step
            return replace(
                step,
                draft_tokens=(step.gamma + 1, *(1,) * step.gamma),
                draft_s=(2e-4, *(1e-4,) * step.gamma),
            )

        return tuple(caught_up(*each) for each in enumerate(super().steps()))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The settings of every engine that was made; no target is loaded, no draft written."""
    kept: list[Any] = []
    monkeypatch.setattr(LlamaCpp, "runs", 0)

    def make(name: str, settings: Any, tokenizer: Any = None) -> LlamaCpp:
        kept.append(settings)
        return LlamaCpp(name=name, schedules=False)

    monkeypatch.setattr(registry, "make_engine", make)
    monkeypatch.setattr(in_engine, "check_interpreter_choice", lambda *args: None)
    monkeypatch.setattr(in_engine, "can_run", lambda *args: True)
    monkeypatch.setattr(in_engine, "engine_target", lambda *args: "target")
    monkeypatch.setattr(in_engine, "random_draft", lambda arch, dtype, base: base / arch.label())
    return kept


def request(folder: Path, **more: Any) -> ProfileRequest:
    known = {"engine_name": "llama.cpp", "target_ref": TARGET, "threads": 1, "output": folder}
    return ProfileRequest("cpu", TARGET.architecture, load_space("demo"), **known | more)


def test_every_precision_is_measured_and_priced(made: list[Any], tmp_path: Path) -> None:
    summary = profile_device(request(tmp_path))
    assert summary.measured.planned_rows == 0 and set(summary.models) == {"float16", "q8_0"}
    profile = Profile.load(tmp_path)
    assert {row.kind for row in profile.rows.values()} == {"pass", "rest"}
    passes = [PassShape.of(row) for row in profile.select("pass", "q8_0", "eager")]
    assert {shape.tokens for shape in passes if shape.role == "target"} == set(range(1, 10))
    assert len({shape.architecture for shape in passes if shape.role == "draft"}) == 6
    assert any(settings.time_passes for settings in made) and {
        settings.dtype for settings in made
    } == {"float16", "q8_0"}
    assert profile_device(request(tmp_path)).new_rows == 0  # what is known is not measured again
    for dtype, taken in ((None, "float16"), ("q8_0", "q8_0")):
        asked = WorkloadRequest(profile=tmp_path, engine="llama.cpp", dtype=dtype)
        source, workload = choose_latency(asked, TARGET.architecture)
        assert (
            source.dtype == workload.dtype == taken
            and "passes as llama.cpp ran them" in source.words
        )
        assert workload.cache_bytes == 2
        round_s = source.latency.round(
            TARGET.architecture, passes[-1].architecture, workload, 4
        ).round_s.value
        assert round_s == pytest.approx(
            15e-3 + 0.2e-3 + 0.4e-3 + 3.2e-3 + 0.8e-3 + 5 * 0.2e-3, rel=0.4
        )
    # drafts in another: passes of theirs, in memory of theirs
    mixed, work = choose_latency(replace(asked, draft_dtype="float16"), TARGET.architecture)
    assert mixed.words == f"{source.words}; drafts in float16" and work.dtype == "q8_0"
    draft, one = passes[-1].architecture, Workload(context_len=256)
    wide = LatencyModel(profile, "float16", "eager", "llama.cpp")
    assert mixed.latency.draft_passes(draft, one, 4) == wide.draft_passes(draft, one, 4)
    taken = [memory_bytes(TARGET.architecture, draft, each) for each in (workload, work)]
    assert taken[1].draft_weight_bytes == 2 * taken[0].draft_weight_bytes
    assert taken[1].target_weight_bytes == taken[0].target_weight_bytes
    assert dtype_of_drafts(None, engine_facts("llama.cpp"), source.device, "q4_k_m") == "q8_0"
    with pytest.raises(MissingDataError, match="of llama.cpp in q4_0; it has float16, q8_0"):
        choose_latency(replace(asked, draft_dtype="q4_0"), TARGET.architecture)
    with pytest.raises(ArchsearchError, match="runs drafts on a CPU in the target's precision"):
        dtype_of_drafts("float16", engine_facts("vllm"), source.device, "float32")


def test_how_slow_the_machine_was_is_said_by_the_engines_own_steps(
    made: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaCpp, "slower", (1.5, 2.0))
    summary = profile_device(request(tmp_path, quick=True, dtypes=("q8_0",)))
    assert 1.5 <= summary.measured.slowdown_median < 2.0
    profile = Profile.load(tmp_path)
    references = {"llama.cpp q8_0 pass of 1": 0.011, "llama.cpp q8_0 pass of 8": 0.018}
    assert profile.probe_reference_s == references
    rows = profile.select("pass", "q8_0", "eager")
    passes = {PassShape.of(row).tokens: row for row in rows if PassShape.of(row).role == "target"}
    # the first call ran at the reference; the seconds of others are divided
    assert passes[1].median_s == pytest.approx(11e-3)
    # memory was 1.5 times slower and eight tokens 2: a straight line between them
    assert passes[2].median_s == pytest.approx(12e-3 / ((6 * 16.5 + 36) / (6 * 11 + 18)), abs=1e-6)


def test_rows_of_a_machine_that_others_had_are_left_out(
    made: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Dividing by 14 gave passes of 135 MB in 0.7 ms, and a speed-up of 0.04 where 0.86 was
    measured, 17 of its standard deviations away."""
    asked = request(tmp_path, quick=True, dtypes=("q8_0",))
    for slowdown, drafts in ((14.0, 0), (1.0, 3)):
        monkeypatch.setattr(LlamaCpp, "slower", (slowdown, slowdown))
        profile_device(asked)
        rows = Profile.load(tmp_path).select("pass", "q8_0", "eager")
        shapes = {PassShape.of(row).architecture for row in rows}
        assert len(shapes - {TARGET.architecture}) == drafts
        said = capsys.readouterr().err
        assert ("left out: the machine was 14 times slower" in said) != bool(drafts)


def test_quick_is_one_precision_and_three_drafts(made: list[Any], tmp_path: Path) -> None:
    profile_device(request(tmp_path, quick=True, dtypes=("q8_0",)))
    rows = list(Profile.load(tmp_path).rows.values())
    assert {row.dtype for row in rows} == {"q8_0"}
    shapes = [PassShape.of(row) for row in rows if row.kind == "pass"]
    assert len({shape.architecture for shape in shapes if shape.role == "draft"}) == 3
    assert {shape.tokens for shape in shapes if shape.role == "target"} == set(range(1, 7))


def test_a_given_file_is_measured_and_priced_in_its_own_precision(
    made: list[Any], tmp_path: Path
) -> None:
    given = replace(TARGET, weights={"gguf": "mine.gguf", "dtype": "q4_k_m"})
    profile_device(request(tmp_path, target_ref=given))
    rows = Profile.load(tmp_path).rows.values()
    assert {row.dtype for row in rows} == {"q4_k_m"}
    asked = WorkloadRequest(profile=tmp_path, engine="llama.cpp", dtype=given.file_dtype)
    source, workload = choose_latency(asked, TARGET.architecture)
    assert "passes as llama.cpp ran them" in source.words and workload.cache_bytes == 2
    taken = memory_bytes(TARGET.architecture, TARGET.architecture, workload)
    assert taken.target_weight_bytes == int(parameters(TARGET.architecture) * 0.5625)
    assert taken.draft_kv_bytes == taken.target_kv_bytes


def test_what_is_refused(made: list[Any], tmp_path: Path) -> None:
    with pytest.raises(
        ArchsearchError, match="--quick is for --engine llama.cpp; give the time with --budget"
    ):
        profile_device(request(tmp_path, quick=True, engine_name="openvino"))
    with pytest.raises(
        ArchsearchError, match="in which vLLM does not compute; add --engine llama.cpp"
    ):
        cpu.device_dtypes(None, ("q8_0",), engine_facts("vllm"))  # type: ignore[arg-type]
    with pytest.raises(
        ArchsearchError, match="q8_0 is priced on a CPU only, not on h100.*; --dtype float16"
    ):
        choose_latency(
            WorkloadRequest(gpu="h100", engine="llama.cpp", dtype="q8_0"), TARGET.architecture
        )
    write_profile(tmp_path, DRAFTS, None)
    for engine, words in (
        ("vllm", "is a format of GGUF files"),
        ("llama.cpp", "--engine llama.cpp --dtype q8_0"),
    ):
        with pytest.raises(ArchsearchError, match=words):
            choose_latency(
                WorkloadRequest(profile=tmp_path, engine=engine, dtype="q8_0"), TARGET.architecture
            )
    rows = tmp_path / "rows.jsonl"
    rows.write_text(rows.read_text().replace('"float32"', '"q8_0"'))
    with pytest.raises(ArchsearchError, match="in which transformers does not compute; add"):
        choose_latency(WorkloadRequest(profile=tmp_path), TARGET.architecture)


def test_a_prediction_without_its_passes_names_the_command(tmp_path: Path) -> None:
    write_profile(tmp_path, DRAFTS, None)
    asked = WorkloadRequest(profile=tmp_path, engine="llama.cpp", dtype="float32")
    words = choose_latency(asked, TARGET.architecture)[0].words
    assert "llama.cpp's own kernels were not measured" in words
    assert "archsearch profile --gpu cpu --target T --engine llama.cpp --dtype float32" in words
    said = latency_warning(words, "my model")
    assert said.endswith(
        "(archsearch profile --gpu cpu --target 'my model' --engine llama.cpp --dtype float32)"
    )
    with pytest.raises(
        MissingDataError,
        match="no passes of llama.cpp in bfloat16; measure them: archsearch profile",
    ):
        choose_latency(replace(asked, dtype="bfloat16"), TARGET.architecture)
