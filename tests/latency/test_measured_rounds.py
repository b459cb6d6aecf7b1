"""Rounds that a profile holds change what a search on that GPU is told: those of the class that is
asked for, or its launches."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.catalogue import load
from archsearch.engine_rounds import engine_rounds
from archsearch.engines.measure.rounds import round_drafts
from archsearch.estimate import Estimate
from archsearch.hardware.device import load_device
from archsearch.latency import stored
from archsearch.latency.roofline import RooflineLatency
from archsearch.latency.round_fit import measured_version, rounds_of_row, with_measured_rounds
from archsearch.latency.rounds import round_time
from archsearch.pipeline.latency import choose_latency
from archsearch.pipeline.profile.gpu import variants
from archsearch.profiles import Measurement, Profile, RoundShape, find_profile, freeze_shape
from archsearch.workload import Workload, WorkloadRequest

TARGET = load("llama-3.1-8b").architecture
DRAFTS = round_drafts(TARGET)
CONTEXT = 512
PIECEWISE = (("VLLM_USE_V2_MODEL_RUNNER", "0"), ("async_scheduling", "0"))


def latency(version: str, options: dict[str, str] | None = None) -> RooflineLatency:
    return RooflineLatency(
        load_device("h200"), "bfloat16", "graph", "vllm", engine_rounds("vllm", version, options)
    )


def shape(
    draft: Architecture | None, gamma: int, version: str, options: Any = PIECEWISE
) -> RoundShape:
    return RoundShape("vllm", version, options, TARGET, draft, gamma, 1, CONTEXT)


def profile_of(version: str, options: Any, **changes: float) -> Profile:
    """Rounds of a machine whose costs, in ms, are `changes`."""
    found = Profile({"kind": "gpu"}, {})
    model = latency(version, dict(options))
    assert model.rounds is not None
    truth = replace(
        model.rounds.costs,
        **{f"{name}_s": Estimate(1e-3 * v, 0.0, "measured") for name, v in changes.items()},
    )
    work = Workload(1, CONTEXT, 1, "bfloat16", "graph")
    for draft in DRAFTS:
        for gamma in (1, 6):
            passes = model.round_passes(
                TARGET, draft, work, gamma, model.verify_s(TARGET, work, gamma)
            )
            seconds = round_time(truth, passes).round_s.value
            times = tuple(seconds * factor for factor in (0.998, 0.999, 1.0, 1.001, 1.002))
            row = freeze_shape(shape(draft, gamma, version, options).to_dict())
            found.record(Measurement("round", row, "bfloat16", "graph", "warm", times))
    seconds = model.decode_s(TARGET, work).value
    plain = freeze_shape(shape(None, 0, version, options).to_dict())
    found.record(Measurement("round", plain, "bfloat16", "graph", "warm", (seconds,)))
    return found


def test_rounds_of_the_same_class_are_taken_whatever_the_version() -> None:
    profile = profile_of("0.32.0", PIECEWISE, host_round=2.0, host_layer=0.2, round=1.0)
    model = latency("0.33.0", dict(PIECEWISE))
    rounds, fit = with_measured_rounds(model, profile)
    assert (
        rounds is not None
        and fit is not None
        and rounds.measured == 6
        and rounds.version == "0.33.0"
    )
    assert 1e3 * rounds.costs.host_layer_s.value == pytest.approx(0.2, rel=0.1)
    assert rounds.costs.host_layer_s.source == "measured" and max(map(abs, fit.errors)) < 0.03


def test_another_class_lends_what_launching_a_layer_takes_where_it_launches_alike() -> None:
    profile = profile_of("0.32.0", PIECEWISE, host_layer=0.2)
    alike = latency("0.33.0", {"VLLM_USE_V2_MODEL_RUNNER": "0"})  # asynchronous, graphs as measured
    rounds, fit = with_measured_rounds(alike, profile)
    assert (
        rounds is not None and fit is not None and not rounds.measured and alike.rounds is not None
    )
    assert 1e3 * rounds.costs.host_layer_s.value == pytest.approx(0.2, rel=0.1)
    assert rounds.costs.round_s == alike.rounds.costs.round_s
    other = latency("0.33.0")  # the second runner has no graphs: nothing was measured of that
    assert with_measured_rounds(other, profile) == (other.rounds, None)


def test_the_second_runner_measured_without_async_scheduling_lends_its_launches_to_the_usual_one() -> (
    None
):
    """archsearch runs vLLM with asynchronous scheduling off; people serve with it on."""
    profile = profile_of(
        "0.33.0",
        (("VLLM_USE_V2_MODEL_RUNNER", "1"), ("async_scheduling", "0")),
        host_layer=0.3,
        round=0.9,
    )
    usual = latency("0.33.0")
    rounds, fit = with_measured_rounds(usual, profile)
    assert (
        rounds is not None
        and fit is not None
        and usual.rounds is not None
        and rounds.costs.name == "vllm-none-async"
    )
    assert 1e3 * rounds.costs.host_layer_s.value == pytest.approx(0.3, rel=0.1)
    assert (
        rounds.costs.round_s == usual.rounds.costs.round_s
    )  # what synchronising costs is not what was asked


def test_without_rows_nothing_changes() -> None:
    model = latency("0.33.0")
    assert with_measured_rounds(model, Profile({"kind": "gpu"}, {})) == (model.rounds, None)
    model.rounds = None
    assert with_measured_rounds(model, Profile({"kind": "gpu"}, {})) == (None, None)
    only_steps = Profile({"kind": "gpu"}, {})
    only_steps.record(
        Measurement(
            "round",
            freeze_shape(shape(None, 0, "0.32.0").to_dict()),
            "bfloat16",
            "graph",
            "warm",
            (6e-3,),
        )
    )
    model = latency("0.33.0", dict(PIECEWISE))
    assert with_measured_rounds(model, only_steps) == (model.rounds, None)


def test_what_was_measured_comes_before_what_is_newest(tmp_path: Path) -> None:
    """A search on a profile that holds rounds is for the version that was measured, and says so."""
    theirs = Profile.load(find_profile("h200-sxm-141gb"))
    mine = Profile(
        theirs.device, theirs.stack, folder=tmp_path
    )  # kernels of the tables, as if measured here
    mine.save_header()
    shutil.copy(find_profile("h200-sxm-141gb") / stored.FILE, tmp_path)
    for row in [
        *theirs.rows.values(),
        *profile_of("0.30.0", (("async_scheduling", "0"),), host_layer=0.2).rows.values(),
    ]:
        mine.rows[row.key] = row
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row.to_dict()) + "\n" for row in mine.rows.values())
    )
    assert measured_version(mine, "vllm") == "0.30.0" and measured_version(mine, "sglang") is None
    asked = WorkloadRequest(
        None,
        profile=tmp_path,
        engine="vllm",
        engine_options=("async_scheduling=0",),
        context_len=CONTEXT,
    )
    source, _ = choose_latency(asked, TARGET)
    assert source.rounds is not None and source.rounds.version == "0.30.0"
    assert (
        source.rounds.costs.host_layer_s.source == "measured" and "6 measured here" in source.words
    )
    other, _ = choose_latency(replace(asked, engine_version="0.20.0"), TARGET)
    assert (
        other.rounds is not None and other.rounds.version == "0.20.0" and "published" in other.words
    )


def test_rows_of_versions_that_nobody_knows_are_left_out() -> None:
    assert rounds_of_row(shape(DRAFTS[0], 6, "0.14.1")) is None  # no independent drafts in that one
    known = rounds_of_row(shape(DRAFTS[0], 6, "0.32.0+cu129"))
    assert known is not None and known.costs.graph == "piecewise"


@pytest.mark.parametrize(
    "version, runners",
    [("0.20.0", [None]), ("0.30.0", [None]), ("0.33.0", ["1", "0"]), ("0.14.0", [None])],
)
def test_both_runners_are_measured_where_they_differ(
    version: str, runners: list[str | None]
) -> None:
    assert [found.get("VLLM_USE_V2_MODEL_RUNNER") for found in variants("vllm", version)] == runners
