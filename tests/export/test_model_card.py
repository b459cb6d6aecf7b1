from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import parameters
from archsearch.engines.measure.results import CategoryResult, Difference, Identity
from archsearch.estimate import Estimate
from archsearch.export.card import (
    DraftRecord,
    ExportPlan,
    ExportSource,
    ExportTarget,
    FullHead,
    HeadCost,
    model_card,
)
from archsearch.export.engines import Serving, Setup, serving
from archsearch.runs.candidate import TrainingRecord
from archsearch.runs.confirmed import Confirmed, Exact, LoadRecord, LoadRow
from archsearch.schedule import GammaSchedule, SchedulePoint
from archsearch.search.objective import Score

ARCH = Architecture(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=2,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    vocab_size=49152,
)
TRIMMED = ARCH.replace(draft_vocab_size=8192)
COST = HeadCost(trimmed_bytes=40e6, padded_bytes=80e6)


def card_of(
    arch: Architecture,
    *,
    head: HeadCost | None = None,
    served: Sequence[Serving] = (),
    **source: Any,
) -> str:
    """The card of an export to /x for transformers and what is `served`."""
    made = ExportSource(Path("/draft"), dtype="bfloat16", **source)
    return model_card(
        ExportPlan(made, Path("/x"), arch, ("transformers",), tuple(served), head=head)
    )


SCORE = Score(
    rank=1,
    architecture=ARCH,
    parameters=parameters(ARCH),
    gamma=5,
    alpha=Estimate(0.8, 0.02, "measured"),
    tau=Estimate(3.7, 0.2, "measured"),
    speedup=Estimate(2.5, 0.15, "modelled"),
    draft_s=Estimate(0.0114, 0.0003, "modelled"),
    decode_s=Estimate(0.058, 0.001, "modelled"),
    verify_s=Estimate(0.06, 0.001, "modelled"),
    tpot_s=Estimate(0.023, 0.001, "modelled"),
    kv_bytes_per_token=768,
    break_even_alpha=None,
)
CONFIRMED = Confirmed(
    engine="transformers",
    engine_version="5.23.0",
    gamma=6,
    prompts=24,
    dtype="bfloat16",
    alpha=Estimate(0.794, 0.021, "measured"),
    tau=Estimate(3.73, 0.2, "measured"),
    speedup=Estimate(2.42, 0.16, "measured"),
    speedup_interval=(2.19, 2.64),
    accepted_by_position=(0.72, 0.57),
    baseline_tokens_per_s=17.1,
    tokens_per_s=39.6,
    decode_s=0.0581,
    predicted=replace(SCORE, architecture=TRIMMED),
    predicted_speedup=2.5,
    relative_error=0.032,
    identical_output=Identity(24, 24),
    identical_output_float32=Exact(4, 4),
    categories={
        "new": CategoryResult(10, 0.75, 3.35, 2.19),
        "": CategoryResult(1, 0.8, 3.5, 2.3),
    },
)


def test_what_is_known_is_said_with_its_source() -> None:
    card = card_of(
        TRIMMED, gamma=6, record=DraftRecord(SCORE, CONFIRMED), head=COST, full_head=FullHead(1.7)
    )
    assert "| speed-up | 2.50 ± 0.15 | modelled | 2.42 (5-95 %: 2.19 to 2.64) |" in card
    assert "| drafting a round, ms | 11.4 ± 0.3 | modelled |  |" in card
    assert "| target step, ms | 58.0 ± 1.0 | modelled | 58.1 |" in card
    assert "score, gamma 5 |" in card and "does not pay" not in card
    assert (
        "| speed-up at gamma 6 in engines that compute the full head (all below) | 1.70 | modelled"
        " |  |" in card
    )
    assert "with the kept rows of the head only" in card and "in the engine, gamma 6 |" in card
    assert "transformers 5.23.0, bfloat16, 24 held-out prompts, gamma 6" in card
    assert (
        "| new | 10 | 0.750 | 3.35 | 2.19 |" in card
        and "| 1 | 0.800 |" not in card
        and "position 1 to 2: 0.72, 0.57" in card
    )
    assert "24 of 24 answers identical in bfloat16; 4 of 4 in float32." in card
    assert "+3.2 % off" in card and "Speculation pays." in card
    slow = replace(CONFIRMED, slowdown=1.8)
    assert "The machine ran" not in card
    assert "The machine ran 1.80 times slower" in card_of(
        TRIMMED, gamma=6, record=DraftRecord(SCORE, slow), head=COST
    )


def test_what_speaks_against_a_draft_is_said_too() -> None:
    """The serving command is in bfloat16: 4 of 4 in float32 alone would mislead."""
    part = Difference("7", 39, 12185, 28, 24.0, 23.875, 0.125)
    close = replace(
        CONFIRMED,
        gamma=1,
        speedup=Estimate(1.15, 0.09, "measured"),
        speedup_interval=(0.94, 1.22),
        accepted_by_position=(0.67,),
        identical_output=Identity(8, 4, (part,)),
    )
    trained = TrainingRecord(ARCH, 4868, 75.0, {})
    card = card_of(ARCH, gamma=1, record=DraftRecord(None, close, trained))
    assert "4 of 8 answers identical in bfloat16" in card and "4 of 4 in float32." in card
    assert "differ by at most 0.125" in card and "Too close to call" in card
    assert "Speculation pays" not in card
    assert "proposes 1 token a round" in card and "accepted at position 1: 0.67" in card
    assert "4,868 tokens in 75 s" in card
    undecided = replace(close, undecided="the machine was disturbed")
    card = card_of(ARCH, gamma=1, record=DraftRecord(None, undecided))
    assert (
        "Not decided: the machine was disturbed. Confirm it again" in card
        and "Too close to call" not in card
    )


def test_what_is_not_known_is_left_out() -> None:
    card = card_of(ARCH, gamma=2)
    for heading in (
        "## Numbers",
        "## Acceptance",
        "## Gamma by batch size",
        "## The head",
        "None",
        "nan",
    ):
        assert heading not in card
    assert "TARGET" in card and "Exported by archsearch" in card
    unconfirmed = card_of(ARCH, gamma=2, record=DraftRecord(SCORE))
    assert "Nothing was measured in an engine yet" in unconfirmed


def test_a_confirmation_with_synthetic_acceptance_is_not_called_measured() -> None:
    synthetic = replace(
        CONFIRMED,
        engine="vllm",
        gamma=2,
        alpha=Estimate(0.7, 0.0, "given"),
        speedup=Estimate(1.4, 0.1, "measured"),
        speedup_interval=None,
    )
    card = card_of(ARCH, gamma=2, record=DraftRecord(confirmed=synthetic))
    assert "| 0.700 (given) |" in card and "| 1.40 ± 0.10 |" in card and "kept rows" not in card


def test_the_head() -> None:
    card = card_of(TRIMMED, gamma=2, head=COST, full_head=FullHead(1.7, (4, 1.8)))
    assert (
        "8,192 of 49,152" in card
        and "2.0 times as much" in card
        and "gamma 4 is better: 1.80" in card
    )
    assert "The head" not in card_of(ARCH, gamma=2)


def test_the_schedule_and_its_points() -> None:
    points = (SchedulePoint(1, 4, Estimate(3.1, 0.0, "measured"), Estimate(1.8, 0.1, "measured")),)
    card = card_of(ARCH, gamma=4, schedule=GammaSchedule(((1, 1, 4), (2, 8, 0)), points))
    assert (
        "| 1 | 4 |\n| 2 to 8 | 0 (no drafts) |" in card
        and "| 1 | 4 | 3.10 | 1.80 ± 0.10 | measured |" in card
    )


def test_runs_under_load() -> None:
    row = LoadRow(
        variant="gamma 2",
        concurrency=4,
        gamma=2,
        tau=2.1,
        tokens_per_s=120.0,
        baseline_tokens_per_s=92.0,
        speedup=Estimate(1.3, 0.05, "measured"),
    )
    predicted = Estimate(1.0, 0.0, "modelled")
    off = replace(
        row, variant="schedule", concurrency=8, gamma=0, tau=1.0, predicted_speedup=predicted
    )
    load = LoadRecord(
        engine="vllm",
        engine_version="0.32.0",
        dtype="bfloat16",
        repeats=5,
        rows=(row, off),
        synthetic=True,
    )
    card = card_of(ARCH, gamma=2, record=DraftRecord(loads=(load,)))
    assert (
        card.count("## Under load") == 1
        and "## Under load in vllm 0.32.0" in card
        and "by chance" in card
    )
    assert (
        "| 4 | gamma 2 | 2 | 2.10 | 1.30 ± 0.05 |  |" in card
        and "| 8 | schedule | 0 | 1.00 | 1.30 ± 0.05 | 1.00 |" in card
    )


def test_commands_and_provenance() -> None:
    served = [
        serving(name, Setup(Path("/x"), "org/t", 4, "bfloat16"))
        for name in ("vllm", "sglang", "tensorrt-llm", "llama.cpp")
    ]
    run = {
        "created": "2026-11-21T15:20:45+00:00",
        "seed": 3,
        "arguments": {"trials": 300, "batch_size": 1, "context": 160, "temperature": 0.0},
        "code": {"version": "0.1.0", "commit": "8ccca3b5fc9f9ae9"},
        "device": {"name": "AMD EPYC", "key": "cpu-x"},
        "profile": {
            "origin": "measured on this device",
            "dtype": "bfloat16",
            "mode": "eager",
            "hash": "a19b",
        },
        "packages": {"python": "3.11.7", "torch": "2.13.0", "numpy": "2.4.6"},
    }
    told = {"seed": 0, "prompts": "the shipped ones"}
    training = TrainingRecord(ARCH, 4868774, 1154.0, told)
    card = card_of(
        ARCH,
        gamma=4,
        target=ExportTarget("org/t"),
        served=served,
        record=DraftRecord(training=training, provenance={"run": run}),
    )
    for each in served:
        assert each.shell() in card
    for words in (
        "8ccca3b5fc9f)",
        "2026-11-21",
        "seed 3",
        "AMD EPYC (`cpu-x`)",
        "profile a19b",
        "4,868,774 tokens in 19 min 14 s",
    ):
        assert words in card
    assert "the shipped ones" in card and "torch 2.13.0" in card and "—" not in card
