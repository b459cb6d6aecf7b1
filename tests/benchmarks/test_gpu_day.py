"""A GPU day without a GPU: its steps and how they resume, what is watched, its arithmetic, and
every step on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gpu_day
import paper_llama65b
from archsearch.architecture.catalogue import load
from archsearch.architecture.counts import weight_bytes_per_pass
from archsearch.architecture.ops import Part
from archsearch.engine_rounds import engine_rounds
from archsearch.errors import ArchsearchError, MissingDataError, RunFailed
from archsearch.estimate import Estimate
from archsearch.files import write_json
from archsearch.hardware.device import load_device
from archsearch.latency.roofline import RooflineLatency
from archsearch.profiles import Measurement, Profile, RoundShape, freeze_shape
from archsearch.profiling import cuda
from archsearch.report.terminal.profile import SweepEnd
from archsearch.workload import DTYPE_BYTES, Workload
from gpuday import compare, day, rehearsal, runner, steps
from gpuday.compare import Case
from gpuday.day import Day
from gpuday.runner import Deadline, Step

GPU_DAY = Path(gpu_day.__file__)


# -- steps
# --------------------------------------------------------------------------------------------------


def made(
    ran: list[str],
    name: str,
    budget_s: float = 10.0,
    raises: BaseException | None = None,
    after: Any = (),
) -> Step:
    def run(deadline: Deadline) -> dict[str, Any]:
        ran.append(name)
        if raises is not None:
            raise raises
        return {"name": name, "budget_s": deadline.budget_s}

    return Step(name, budget_s, run, after)


def test_steps_leave_a_file_each_and_are_skipped_where_it_is(tmp_path: Path) -> None:
    ran: list[str] = []
    todo = [made(ran, "one"), made(ran, "two")]
    write_json(tmp_path / "one.json", {"step": "one", "status": "done", "data": {"kept": True}})
    assert runner.run_steps(todo, tmp_path, Deadline(100)) == []
    assert ran == ["two"]
    result = runner.result_of(tmp_path, "two")
    assert (
        result is not None
        and result["status"] == "done"
        and result["seconds"] >= 0
        and result["data"]["budget_s"] == 10.0
    )
    assert (
        runner.data_of(tmp_path, "one") == {"kept": True}
        and not (tmp_path / runner.RUNNING).exists()
    )


def test_what_a_profile_brings_is_written(tmp_path: Path) -> None:
    """Records among its numbers: on the first GPU the summaries of both profiles were lost."""
    ended = SweepEnd(3, 0.1, "budget")
    step = Step("profile", 1.0, lambda deadline: {"sweeps": {"graph": ended}})
    assert runner.run_steps([step], tmp_path, Deadline(9)) == []
    assert runner.data_of(tmp_path, "profile")["sweeps"]["graph"]["new_rows"] == 3


def test_a_failure_is_recorded_and_the_day_goes_on(tmp_path: Path) -> None:
    ran: list[str] = []
    todo = [
        made(ran, "bad", raises=RuntimeError("CUDA error: an illegal thing\nmore")),
        made(ran, "full", raises=torch.OutOfMemoryError("no 7 EiB")),
        made(ran, "needy", after=("bad",)),
        made(ran, "good"),
    ]
    assert (
        runner.run_steps(todo, tmp_path, Deadline(100), memory_errors=(torch.OutOfMemoryError,))
        == []
    )
    found = {name: runner.result_of(tmp_path, name) for name in ("bad", "full", "needy", "good")}
    assert [entry["status"] for entry in found.values() if entry] == [
        "failed",
        "out of memory",
        "failed",
        "done",
    ]
    assert found["bad"]["error"] == "RuntimeError: CUDA error: an illegal thing"  # type: ignore[index]
    assert "needs what step bad" in found["needy"]["error"] and "needy" not in ran  # type: ignore[index]
    assert runner.data_of(tmp_path, "bad") == {}
    assert runner.forget_failed(found, tmp_path) == ["bad", "full", "needy"]
    assert runner.open_steps(found, tmp_path) == ["bad", "full", "needy"]


def test_a_broken_device_ends_the_process_for_a_new_one(tmp_path: Path) -> None:
    ran: list[str] = []
    todo = [made(ran, "bad", raises=RuntimeError("sticky")), made(ran, "good")]
    with pytest.raises(SystemExit) as left:
        runner.run_steps(todo, tmp_path, Deadline(100), recover=lambda: False)
    assert left.value.code == runner.BROKEN and runner.open_steps(["bad", "good"], tmp_path) == [
        "good"
    ]


def test_time_that_is_left_decides_what_begins(tmp_path: Path) -> None:
    now = [0.0]
    ran: list[str] = []

    def slow(deadline: Deadline) -> dict[str, Any]:
        now[0] += 30.0
        return {"left": deadline.left_s}

    clock = lambda: now[0]  # noqa: E731
    todo = [Step("slow", 20.0, slow), made(ran, "fits", 18.0), made(ran, "long", 60.0)]
    assert runner.run_steps(todo, tmp_path, Deadline(40.0, clock)) == ["long"]
    assert ran == ["fits"] and runner.data_of(tmp_path, "fits")["budget_s"] == pytest.approx(
        10.0
    )  # all that was left
    assert runner.run_steps(todo, tmp_path, Deadline(100.0, clock)) == [] and ran == [
        "fits",
        "long",
    ]


def test_a_child_whose_parent_is_gone_stops_between_steps(tmp_path: Path) -> None:
    ran: list[str] = []
    asked = iter([True, False])
    todo = [made(ran, "one"), made(ran, "two")]
    assert runner.run_steps(todo, tmp_path, Deadline(100), wanted=lambda: next(asked)) == [
        "two"
    ] and ran == ["one"]
    assert runner.same_parent()()


# -- watching
# --------------------------------------------------------------------------------------------------


CHILD = """
import os, sys, time
sys.path[:0] = {path!r}
from pathlib import Path
from gpuday import runner
from gpuday.runner import Deadline, Step, run_steps
runner.OVER_S = {over}
def die(deadline):
    os._exit(9)
def hang(deadline):
    time.sleep(600)
todo = [Step("one", 1, lambda d: {{"pid": os.getpid()}}), Step("dies", 1, die), Step("hangs", 0.01, hang),
        Step("two", 1, lambda d: {{"pid": os.getpid()}})]
run_steps(todo, Path({folder!r}), Deadline(100))
"""
NAMES = ["one", "dies", "hangs", "two"]


def test_a_step_that_kills_its_process_or_hangs_is_recorded_and_the_rest_is_done(
    tmp_path: Path,
) -> None:
    code = CHILD.format(path=sys.path, folder=str(tmp_path), over=1.0)
    assert (
        runner.supervise(
            lambda left: [sys.executable, "-c", code], NAMES, tmp_path, Deadline(120), poll_s=0.05
        )
        == []
    )
    found = {name: runner.result_of(tmp_path, name) for name in NAMES}
    assert [entry["status"] for entry in found.values() if entry] == [
        "done",
        "failed",
        "failed",
        "done",
    ]
    assert found["dies"]["error"] == "its process ended with status 9"  # type: ignore[index]
    assert found["hangs"]["error"] == "killed after 1 s"  # type: ignore[index]
    assert found["one"]["data"]["pid"] != found["two"]["data"]["pid"]  # type: ignore[index]


def test_the_deadline_takes_the_child_along_and_its_step_begins_anew(tmp_path: Path) -> None:
    code = CHILD.format(path=sys.path, folder=str(tmp_path), over=60.0).replace(
        "os._exit(9)", "time.sleep(600)"
    )
    started = time.monotonic()
    deadline = Deadline(4.0)
    left = runner.supervise(
        lambda left: [sys.executable, "-c", code], NAMES, tmp_path, deadline, poll_s=0.05
    )
    assert left[-3:] == ["dies", "hangs", "two"] and time.monotonic() - started < 300
    assert not (tmp_path / runner.RUNNING).exists()


class Ended:
    """A process that has ended."""

    def __init__(self, returncode: int) -> None:
        self.returncode = returncode

    def poll(self) -> int:
        return self.returncode

    def wait(self) -> int:
        return self.returncode


def test_processes_that_end_between_steps(tmp_path: Path) -> None:
    def supervised(returncode: int) -> list[str]:
        spawn: Any = lambda command: Ended(returncode)  # noqa: E731
        return runner.supervise(lambda left: [], ["one"], tmp_path, Deadline(100), spawn=spawn)

    with pytest.raises(ArchsearchError):  # it has said itself what the user can mend
        supervised(2)
    with pytest.raises(RunFailed, match="died twice between steps"):
        supervised(-11)
    assert supervised(0) == ["one"]  # it stopped for want of time


# -- sizes and arithmetic
# -------------------------------------------------------------------------------------------


def test_the_paper_s_shapes_are_those_of_its_benchmark() -> None:
    sizes = day.real_sizes()
    assert tuple(sizes.paper_drafts) == paper_llama65b.DRAFTS
    assert (sizes.paper[0], sizes.paper[2]) == (paper_llama65b.TARGET, paper_llama65b.RANKS)
    assert (
        sum(step.budget_s for step in steps.steps(Day(Path(), sizes))) < 570
    )  # ten minutes, starts and comparison included


def test_a_shard_is_a_rank_s_share_of_a_layer() -> None:
    whole = load("llama-65b").architecture
    part = day.shard(whole, 4)
    one, four = (
        weight_bytes_per_pass(arch.replace(num_hidden_layers=3, vocab_size=1), 2)
        for arch in (part, whole)
    )
    assert one / four == pytest.approx(0.25, rel=0.01)
    assert day.depth_that_fits(part, "bfloat16", 80e9) == 80
    depth = day.depth_that_fits(part, "bfloat16", 20e9)
    used, more = (
        weight_bytes_per_pass(part.replace(num_hidden_layers=n), 2) for n in (depth, depth + 1)
    )
    assert used <= 20e9 < more and day.depth_that_fits(part, "bfloat16", 1.0) == 1


@pytest.mark.parametrize(
    "gigabytes, expected",
    [(141, "llama-3.1-8b"), (24, "llama-3.2-3b"), (11, "llama-3.2-1b"), (2, "smollm2-135m")],
)
def test_the_target_fits_the_device(tmp_path: Path, gigabytes: float, expected: str) -> None:
    device = replace(load_device("h200"), memory_bytes=int(1e9 * gigabytes))
    write_json(tmp_path / "identity.json", {"status": "done", "data": {"device": device.to_dict()}})
    found, arch = Day(tmp_path, day.real_sizes()).target
    assert (
        found == expected
        and weight_bytes_per_pass(arch, DTYPE_BYTES["bfloat16"]) < 0.35 * device.memory_bytes
    )
    for draft in day.cycle_drafts(arch).values():
        assert draft.vocab_size == arch.vocab_size
        assert weight_bytes_per_pass(draft, 2) < 0.5 * weight_bytes_per_pass(arch, 2)


def test_a_device_of_no_table_is_measured() -> None:
    gpu = SimpleNamespace(name="NVIDIA X9000 Ultra", memory_bytes=8 << 30)
    bare = day.placeholder(gpu)  # type: ignore[arg-type]
    assert bare.key == "nvidia-x9000-ultra" and "devices/" in bare.note
    profile = Profile(bare.to_dict(), {}, {"bfloat16": 1e-6, "float16": 1e-6})
    bench = rehearsal.CpuStandIn(
        profile, bare, runner=rehearsal.CpuRunner(), last_level_cache_bytes=1 << 20
    )
    found = day.with_measured_speed(
        bare, bench, ["bfloat16"], size=64, copy_bytes=1 << 20, native_bf16=True
    )
    assert set(found.flops_per_s) == {"bfloat16"} and found.bandwidth_bytes_per_s > 1e6
    assert found.unverified == ("bandwidth_bytes_per_s", "flops_per_s") and found.sources[
        "flops"
    ].startswith("a GEMM of 64")


def test_what_is_read_of_a_device_of_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = SimpleNamespace(major=8, minor=6, L2_cache_size=6 << 20, multi_processor_count=84)
    real, opened = day.with_measured_speed, []

    def open_bench(device: Any, profile: Profile, **options: Any) -> Any:
        opened.append(options)
        profile.probe_reference_s = {"bfloat16": 1e-6, "float16": 1e-6}
        return rehearsal.CpuStandIn(
            profile, device, runner=rehearsal.CpuRunner(), last_level_cache_bytes=1 << 20
        )

    monkeypatch.setattr(cuda, "open_bench", open_bench)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: seen)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(day, "with_measured_speed", partial(real, size=64, copy_bytes=1 << 20))
    gpu: Any = SimpleNamespace(name="NVIDIA GeForce RTX 3090", memory_bytes=24 << 30)
    found = day.measured_device(gpu, allow_busy=True)
    assert (found.key, found.architecture, found.compute_capability) == (
        "nvidia-geforce-rtx-3090",
        "sm_86",
        "8.6",
    )
    assert found.multiprocessors == 84 and found.last_level_cache_bytes == 6 << 20
    assert set(found.flops_per_s) == {"bfloat16", "float16"} and opened[0]["allow_busy"] is True
    assert type(found).from_dict(found.to_dict()) == found


def test_the_line_of_each_style_keeps_to_one_width() -> None:
    def row(style: str, layers: int, hidden: int, seconds: float) -> dict[str, Any]:
        return {
            "style": style,
            "layers": layers,
            "hidden_size": hidden,
            "host": {"median_s": seconds},
        }

    rows = [row("kernels", n, 1024, 1e-4 + n * 5e-5) for n in (2, 8, 24)] + [
        row("kernels", 2, 2048, 1.0),
        row("graph", 2, 1024, 1e-5),
    ]
    lines = steps.launch_lines(rows)
    assert set(lines) == {
        "kernels"
    }  # one depth of a graph makes no line, and other widths are kept out of it
    assert lines["kernels"]["layer_s"] == pytest.approx(5e-5) and lines["kernels"][
        "pass_s"
    ] == pytest.approx(1e-4)


class Law:
    """A model that prices a pass by a formula."""

    def pass_s(self, arch: Any, asked: Any, ranks: int) -> Estimate:
        part, cold = asked
        value = 1e-3 * arch.num_hidden_layers + 1e-4 * part.tokens + 5e-4 + (2e-3 if cold else 0.0)
        return Estimate(value, 0.1 * value, "modelled")


def test_rounds_layers_and_laws_are_put_together_as_they_run() -> None:
    target, draft = rehearsal.TINY.replace(num_hidden_layers=8), rehearsal.TINY
    data = {"target_architecture": target.to_dict(), "context": 16}
    row = {"draft": "wide", "gamma": 3, "architecture": draft.to_dict()}
    found = compare.round_estimate(Law(), data, row)
    verify, first, later = 8e-3 + 4e-4 + 5e-4, 2e-3 + 1e-4 + 5e-4 + 2e-3, 2e-3 + 1e-4 + 5e-4
    assert found.value == pytest.approx(verify + first + 2 * later)
    assert found.std == pytest.approx(0.1 * (verify**2 + (first + 2 * later) ** 2) ** 0.5)
    assert compare.layer_s(Law(), target, batch=1, tokens=9, context=16).value == pytest.approx(
        1e-3
    )
    parts = {
        "verify": 5.0,
        "drafting": 2.0,
        "decode": 4.0,
        "launch verify graph": 0.1,
        "launch drafting": 9.0,
    }
    rounds = {
        "one graph": 7.0,
        "graph per pass": 7.0,
        "draft eager": 10.0,
        "draft eager, serial": 14.0,
        "eager": 7.0,
    }
    measured = {"parts": parts | {"launch whole": 3.0}, "rounds": rounds}
    told = {
        key: {name: {"median_s": seconds} for name, seconds in values.items()}
        for key, values in measured.items()
    }
    cases = compare.law_cases({"rows": [{**row, **told}]})
    assert [case.predicted_s for case in cases] == pytest.approx([7.0, 7.0, 9.1, 14.0, 7.0])


def test_rounds_of_an_engine_are_compared_with_what_is_published() -> None:
    """A row exactly as the roofline and the published terms say has no error."""
    device = replace(load_device("h200"), key="nobody-s")
    target, draft = load("llama-3.1-8b").architecture, load("llama-3.2-1b").architecture
    rounds = engine_rounds("vllm", "0.20.0")
    model, work = (
        RooflineLatency(device, "bfloat16", "graph", "vllm", rounds),
        Workload(1, 512, 1, "bfloat16", "graph"),
    )
    profile = Profile({"kind": "gpu"}, {})
    for drafter, gamma in ((None, 0), (draft, 4)):
        seconds = (
            model.round(target, draft, work, 4).round_s if gamma else model.decode_s(target, work)
        )
        shape = RoundShape("vllm", "0.20.1", (), target, drafter, gamma, 1, 512)
        profile.record(
            Measurement(
                "round",
                freeze_shape(shape.to_dict()),
                "bfloat16",
                "graph",
                "warm",
                (seconds.value,),
            )
        )
    cases = compare.engine_cases(profile, device, "bfloat16", "roofline")
    assert [case.name for case in cases] == ["target alone", "16 layers, gamma 4"]
    assert all(
        case.group == "engine: vllm 0.20.1, vllm-none-sync" and abs(case.error) < 1e-9
        for case in cases
    )
    assert (
        compare.published_launches()["transformers"]
        > compare.published_launches()["vllm-piecewise-sync"]
    )


def test_groups_tell_median_worst_and_coverage() -> None:
    cases = [
        Case("a", str(n), "m", 1.0, 1.0 + error, 0.1) for n, error in enumerate((0.1, -0.3, 0.15))
    ]
    (row,) = compare.groups(cases)
    assert (row["cases"], row["worst_case"]) == (3, "1")
    assert row["median_absolute_error"] == pytest.approx(0.15) and row["worst"] == pytest.approx(
        -0.3
    )
    assert row["bias"] == pytest.approx(0.1) and row["within_two_std"] == pytest.approx(2 / 3)
    assert compare.groups([Case("law", "x", "m", 1.0, 1.2, 0.0)])[0]["within_two_std"] is None


def test_a_device_without_tables_is_compared_with_its_roofline() -> None:
    words, models = compare.shipped_models(replace(load_device("h200"), key="nobody-s"), "bfloat16")
    assert words == "roofline of its datasheet"
    assert models["graph"].pass_s(rehearsal.TINY, (Part(1, 1, 256), False), 1).source == "roofline"


# -- the command
# --------------------------------------------------------------------------------------------------


def test_without_cuda_it_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        cuda, "cuda_problem", lambda: "torch is built without CUDA; install a CUDA build"
    )
    assert gpu_day.main([]) == 2
    out, err = capsys.readouterr()
    assert (
        out == ""
        and err
        == "Error: a GPU day needs CUDA: torch is built without CUDA; install a CUDA build\n"
    )
    assert not list(Path().iterdir())


def test_comparing_a_folder_without_a_day(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_day.main(["--compare-only", "--output", str(tmp_path)]) == 2
    assert "holds no day" in capsys.readouterr().err
    with pytest.raises(MissingDataError):
        compare.compare(tmp_path)


def test_every_step_but_the_profiles_runs_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real steps with their real models at tiny sizes; then the comparison of what they left,
    with a roofline (the whole rehearsal below has the tables, which take longer to fit)."""
    monkeypatch.setattr(compare, "list_profiles", list)
    here = Day(tmp_path, rehearsal.tiny_sizes(), rehearsal=True)
    with rehearsal.rehearsing():
        todo = [step for step in steps.steps(here) if not step.name.startswith("profile")]
        assert runner.run_steps(todo, tmp_path, Deadline(600)) == []
    results = {step.name: runner.result_of(tmp_path, step.name) for step in todo}
    assert {name: entry.get("error") for name, entry in results.items() if entry} == dict.fromkeys(
        results
    )
    data = {name: runner.data_of(tmp_path, name) for name in results}
    assert len(data["attention"]["rows"]) == 4 and not data["attention"]["left"]
    assert {row["what"] for row in data["paper-graph"]["rows"]} == {
        "deep",
        "wide",
        "layers of tiny target",
        "tiny target over 2",
    }
    assert len(data["paper-eager"]["rows"]) == len(data["paper-graph"]["rows"]) == 8
    assert {(row["style"], row["layers"]) for row in data["host"]["rows"]} >= {
        ("kernels", 2),
        ("transformers", 1),
        ("graph", 2),
    }
    assert [row["gamma"] for row in data["cycles"]["rows"]] == [1, 2, 1, 2] and len(
        data["cycles"]["rows"][0]["rounds"]
    ) == 5
    assert [row["gamma"] for row in data["transformers"]["rows"]] == [0, 1, 2, 1, 2]
    result = compare.compare(tmp_path)
    assert result["prediction"] == "roofline of its datasheet"
    found = {row["group"] for row in result["groups"]}
    assert {
        "kernels: attention, decode",
        "paper: draft token, graph",
        "round: one graph",
        "law: eager",
    } <= found
    assert {"round: transformers", "plain token: transformers"} <= found
    words = compare.text(result, [entry for entry in results.values() if entry])
    assert "REHEARSAL" in words and "host time to launch" in words


def test_a_step_out_of_time_says_what_is_left(tmp_path: Path) -> None:
    here = Day(tmp_path, rehearsal.tiny_sizes(), rehearsal=True)
    with rehearsal.rehearsing():
        todo = {step.name: step for step in steps.steps(here)}
        runner.run_steps([todo["identity"]], tmp_path, Deadline(600))
        spent = Deadline(0.0)
        found = todo["paper-graph"].run(spent)
        assert not found["rows"] and len(found["left"]) == 8


def test_what_does_not_fit_is_named_and_the_step_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Day(tmp_path, rehearsal.tiny_sizes(), rehearsal=True)
    real = steps.time_round
    calls = []

    def full(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 EiB.")
        return real(*arguments)

    with rehearsal.rehearsing():
        runner.run_steps([steps.steps(here)[0]], tmp_path, Deadline(600))
        monkeypatch.setattr(steps, "time_round", full)
        found = steps.cycles(here, Deadline(600))
    assert (
        found["failed"] == {"deep draft, gamma 1": "CUDA out of memory"} and len(found["rows"]) == 3
    )


@pytest.mark.campaign
def test_a_whole_rehearsal_is_killed_and_goes_on(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(GPU_DAY),
        "--dry-run",
        "--output",
        str(tmp_path),
        "--check",
        "2",
        "--json",
    ]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 120
    while not (tmp_path / "identity.json").exists() and time.monotonic() < end:
        time.sleep(0.2)
    first.terminate()
    first.communicate(timeout=300)
    before = (tmp_path / "identity.json").read_bytes()
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["rehearsal"] and (tmp_path / "identity.json").read_bytes() == before
    found = {row["group"] for row in result["groups"]}
    assert (
        any(group.startswith("check: draft step") for group in found) and "kernels: gemm" in found
    )
    assert (tmp_path / "compare.txt").read_text().startswith("h200-sxm-141gb")
    assert "kernel tables" in result["prediction"]  # of the H200 that the rehearsal plays
