"""What the headline says of a run's best head beside its draft."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from archsearch.engines.measure.results import Identity
from archsearch.estimate import Estimate
from archsearch.records import as_data, load, save
from archsearch.report.families import led_by_rival, with_heads
from archsearch.report.headline import Headline
from archsearch.report.reading import Shown, beside
from archsearch.runs.run import Run
from archsearch.runs.tables import EngineComparison, FamilyRow, Rival, forget
from archsearch.search.objective import Score


def row(family: str, speedup: float) -> FamilyRow:
    gain = Estimate(speedup, 0.1, "modelled")
    return FamilyRow(
        family=family,
        label=f"a {family}",
        rank=1,
        gamma=3,
        tau=Estimate(2.0, 0.1, "measured"),
        speedup=gain,
        measured_on="9 held-out tokens",
        seconds=60.0,
    )


def ran(engine: str, prompts: int, **speedups: float) -> EngineComparison:
    tau = Estimate(2.0, 0.1, "measured")
    rows = tuple(
        Rival(
            family=family,
            engine=engine,
            engine_version="1",
            prompts=prompts,
            gamma=3,
            alpha=tau,
            accepted_by_position=(),
            tau=tau,
            baseline_tokens_per_s=30.0,
            tokens_per_s=50.0,
            speedup=Estimate(speedup, 0.2, "measured"),
            predicted_speedup=None,
            relative_error=None,
            identical_output=Identity(prompts, prompts),
        )
        for family, speedup in speedups.items()
    )
    return EngineComparison(engine=engine, dtype="float32", prompts=prompts, rows=rows)


@pytest.mark.parametrize("head", [1.5, 2.5])
def test_the_best_head_is_named_once_and_what_engines_measured_follows(head: float) -> None:
    run = cast(Run, SimpleNamespace(path=Path("runs/a"), arguments={"engine": "vllm"}))
    before = Headline(
        "Speculation pays.",
        ["Draft: rank 1."],
        [("Train", "archsearch train runs/a --rank 1")],
        None,
    )
    rows = [row("independent", 2.0), row("eagle3", head)]
    engines = [ran("vllm", 8, eagle3=1.63, independent=1.92), ran("openvino", 5, medusa=1.2)]
    found = with_heads(before, run, rows, engines)
    (line,) = found.lines[1:]
    assert (
        line.count("The best head: EAGLE-3") == 1
        and f"{head:.2f}x ± 0.10 predicted" in line
        and "draft 2.00x" in line
    )
    assert (
        line.count("In vLLM 1.63x ± 0.20 (gamma 3) beside 1.92x ± 0.20 (gamma 3), 8 prompts.") == 1
        and "OpenVINO" not in line
    )
    # A head that leads comes first in what to do next; that both ran already is not asked for
    # again.
    commands = [command for _, command in found.next]
    assert (len(commands) > 1) == (head > 2) and not any(
        "confirm" in command for command in commands
    )
    alone = with_heads(before, run, rows, [])
    assert any("confirm" in command for _, command in alone.next) == (head > 2)


@pytest.mark.parametrize(
    ("family", "gain", "rank", "own", "leads"),
    [
        ("eagle3", 1.5, None, 1.2, True),
        ("eagle3", 1.5, None, 1.6, False),  # the rank alone brought more
        ("eagle3", 1.5, None, None, True),  # no rank was measured
        ("eagle3", 1.2, None, None, False),  # 5 % of it lie below 1x
        ("chain", 1.5, 2, 1.2, True),
    ],
)
def test_what_ran_beside_the_target_leads_where_it_brought_more(
    family: str, gain: float, rank: int | None, own: float | None, leads: bool
) -> None:
    """The report of a run whose chain was measured at 1.28x began with its draft's 1.00x."""
    arguments = {"engine": "llama.cpp", "target": "t"}
    where = {"device": {"key": "d"}}
    run = SimpleNamespace(path=Path("runs/a"), arguments=arguments, dtype="float32", info=where)
    own_gain = Estimate(own or 0.0, 0.1, "measured")
    lead = SimpleNamespace(rank=1, measured=own is not None, gain=own_gain)
    before = Headline("Too close.", ["Draft."], [("Train", "archsearch train")], cast(Shown, lead))
    item = ran("llama.cpp", 8, **{family: gain, "independent": 1.1})
    rows = tuple(replace(row, rank=rank, note="served by `X`") for row in item.rivals)
    found = led_by_rival(before, cast(Run, run), [replace(item, rows=rows)])
    if not leads:
        assert found == before
        return
    assert found.title.startswith(f"Speculation pays for t on d: {gain:.2f}x, measured")
    assert "served by `X`" in found.lines[1] and found.lines[2] == "Without it, rank 1: Too close."
    which = f"--rank {rank} --output chain" if rank else "--family eagle3 --output head-eagle3"
    assert found.next[0][1] == f"archsearch export runs/a {which} --for llama.cpp"
    other = led_by_rival(before, cast(Run, run), [replace(item, rows=rows, dtype="bfloat16")])
    assert other == before


@pytest.mark.parametrize(
    ("family", "kind", "seen"),
    [
        ("ngram", "nothing", True),
        ("early_exit", "nothing", False),
        ("ngram", "training", False),
    ],
)
def test_what_needs_no_weights_is_confirmed_beside_the_target(
    tmp_path: Path, family: str, kind: str, seen: bool
) -> None:
    """`confirm --family ngram` had measured it, and `report` went on with what was predicted."""
    run = cast(Run, SimpleNamespace(path=tmp_path, arguments={"engine": "vllm"}))
    for name, value in (("openvino", 1.1), ("vllm", 1.3)):
        (row,) = ran(name, 8, ngram=value).rivals
        save(tmp_path / f"heads/ngram/confirmed-{name}.json", as_data(row) | {"dtype": "float32"})
    score = cast(Score, SimpleNamespace(family=family, rank=2, needs=SimpleNamespace(kind=kind)))
    found = beside(run, score)
    assert (found is not None) == seen
    if found is not None:
        assert (found.speedup.value, found.prompts) == (1.3, 8)
        assert (found.engine, found.dtype, found.undecided) == ("vllm", "float32", None)


def test_what_was_measured_of_other_weights_is_dropped(tmp_path: Path) -> None:
    """After `train` the report still led with tokens per second of the weights before."""
    save(tmp_path / "heads/comparison-vllm.json", ran("vllm", 8, independent=1.4, ngram=1.1))
    save(tmp_path / "heads/eagle3/confirmed-vllm.json", {})
    forget(tmp_path, "independent", "chain")
    left = load(tmp_path / "heads/comparison-vllm.json", "comparison", EngineComparison)
    assert left is not None and [row.family for row in left.rows] == ["ngram"]
    assert (tmp_path / "heads/eagle3/confirmed-vllm.json").is_file()
    forget(tmp_path, "eagle3")
    assert not (tmp_path / "heads/eagle3/confirmed-vllm.json").is_file()
