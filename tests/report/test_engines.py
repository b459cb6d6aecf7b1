"""The verdict over engines: the fastest way to run the target, measured before predicted, at one
precision."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from archsearch.engines.measure.results import Identity
from archsearch.estimate import Estimate
from archsearch.report.engines import fastest_lines, section_engines, ways_of
from archsearch.runs.tables import EngineWays, Way


def ran(engine: str, alone: float, drafted: float, dtype: str = "float32", **more: Any) -> Any:
    fields = {
        "engine": engine,
        "baseline_tokens_per_s": alone,
        "tokens_per_s": drafted,
        "speedup": Estimate(drafted / alone, 0.1, "measured"),
        "undecided": None,
        "dtype": dtype,
        "draft_dtype": "",
        "gamma": 3,
        "identical_output": Identity(12, 11),
        "is_stale": lambda alpha: False,
        "stops": None,
    }
    return SimpleNamespace(**fields | more)


def reading(*confirmed: Any, predicted: tuple[Way, ...] = ()) -> Any:
    """A run whose first rank was confirmed so."""
    first, *others = confirmed or (None,)
    item = SimpleNamespace(
        rank=1, confirmed=first, elsewhere=others, score=SimpleNamespace(alpha=None)
    )
    return SimpleNamespace(candidates=[item], compared=(), engines=EngineWays("float32", predicted))


def lines(*confirmed: Any, predicted: tuple[Way, ...] = ()) -> list[str]:
    return fastest_lines(reading(*confirmed, predicted=predicted), "float32")


SLOW, QUICK = ran("transformers", 16.7, 22.6), ran("llama.cpp", 38.6, 30.3)
VLLM = Way(engine="vllm", dtype="float32", tokens_per_s=Estimate(99.0, 9.0, "modelled"))


def test_the_fastest_way_may_be_without_a_draft() -> None:
    line, others = lines(SLOW, QUICK)
    assert line == "No draft is faster than none in float32 here: llama.cpp alone: 38.6 tokens/s."
    assert others == (
        "Others: llama.cpp with rank 1 at gamma 3: 30.3, transformers with rank 1 at gamma 3: 22.6,"
        " transformers alone: 16.7."
    )
    line, _ = lines(SLOW, ran("vllm", 20.0, 41.0))
    assert line.startswith(
        "Fastest measured in float32 here: vLLM with rank 1 at gamma 3: 41.0 tokens/s, 11 of 12"
        " answers the target's own."
    )


def test_a_draft_whose_error_holds_the_next_way_is_not_called_the_fastest() -> None:
    line, others = lines(ran("transformers", 17.6, 18.5), predicted=(VLLM,))
    assert line.startswith(
        "Too close to call in float32 here: transformers with rank 1 at gamma 3: 18.5 tokens/s"
    )
    assert "transformers alone: 17.6" in others


def test_another_precision_is_another_model_and_named_where_it_is_faster() -> None:
    """The only engine in the run's precision too: what is thrice as fast is worth a line."""
    line, others = lines(SLOW, ran("llama.cpp", 60.0, 40.0, "q8_0"))
    assert line.startswith("Fastest measured in float32 here: transformers with rank 1")
    assert others == (
        "Others: transformers alone: 16.7. In q8_0, another model, llama.cpp alone: 60.0."
    )
    _, others = lines(SLOW, QUICK, ran("llama.cpp", 86.0, 40.0, "q4_0"))
    assert others.endswith("alone: 16.7. In q4_0, another model, llama.cpp alone: 86.0.")
    _, others = lines(SLOW, QUICK, ran("llama.cpp", 30.0, 20.0, "q4_0"))
    assert others.endswith("alone: 16.7.")


def test_a_draft_in_another_precision_than_the_target_says_so() -> None:
    line, _ = lines(SLOW, ran("llama.cpp", 38.6, 50.3, draft_dtype="q8_0"))
    assert "llama.cpp with rank 1 in q8_0 at gamma 3: 50.3" in line


def test_a_draft_that_stops_when_unsure_is_a_way_of_its_own() -> None:
    """It is what an export serves, where it was measured and not slower."""
    stops = ran("llama.cpp", 38.6, 60.0, gamma=9, stops_below=0.3)
    line, _ = lines(SLOW, ran("llama.cpp", 38.6, 50.3, stops=stops))
    assert "with rank 1, which stops below 0.3, at gamma 9: 60.0" in line


def test_a_busy_day_does_not_make_an_engine_slow() -> None:
    """A drafter that came later, on a machine three times slower, brings what it brought."""
    later = ran("llama.cpp", 12.0, 9.6, gamma=2)
    ways = ways_of(reading(SLOW, QUICK, later))
    found = [way.tokens_per_s.value for way in ways if way.engine == "llama.cpp"]
    assert found == pytest.approx([38.6, 0.8 * 38.6]) and [way.gamma for way in ways][:2] == [0, 2]


def test_one_engine_and_what_decides_nothing_make_no_verdict() -> None:
    assert lines(SLOW) == []
    assert lines(SLOW, ran("llama.cpp", 60.0, 40.0, undecided="noise")) == []
    stale = ran("llama.cpp", 60.0, 40.0, is_stale=lambda alpha: True)
    assert lines(SLOW, stale) == []


def test_a_prediction_never_leads_a_measurement_and_says_what_it_lacks() -> None:
    first = "archsearch profile --gpu cpu --target T --engine vllm"
    line, others = lines(SLOW, predicted=(replace(VLLM, profile_first=first),))
    assert "transformers with rank 1" in line and "99.0" not in others
    assert others.endswith(f"Not compared, not profiled in float32 here (vLLM: {first}).")
    drafted = replace(VLLM, drafter="rank 1", gamma=2)
    line, _ = lines(QUICK, predicted=(drafted,))  # a draft may yet be faster than the quickest run
    assert line == "Fastest measured in float32 here: llama.cpp alone: 38.6 tokens/s."
    own = ran("vllm", 15.0, 14.0)  # what was measured takes its place
    assert "99.0" not in " ".join(lines(SLOW, own, predicted=(VLLM,)))
    line, _ = lines(predicted=(VLLM, replace(VLLM, engine="transformers")))
    assert "(predicted) tokens/s" in line


def test_a_slow_day_is_said_beside_predictions_for_a_quiet_one() -> None:
    _, others = lines(ran("transformers", 16.7, 22.6, slowdown=1.85), predicted=(VLLM,))
    assert others.endswith("what was measured ran on one 1.9 times slower.")
    for predicted, slowdown in (((VLLM,), 1.05), ((), 1.85)):
        quiet = ran("transformers", 16.7, 22.6, slowdown=slowdown)
        assert "slower" not in " ".join(lines(quiet, QUICK, predicted=predicted))


def test_the_report_draws_every_engine() -> None:
    found = section_engines(reading(SLOW, ran("llama.cpp", 60.0, 40.0, "q8_0")), "float32")
    assert len(found.tables[0].rows) == 4 and found.words
    bars = {
        series.name: dict(zip(series.x, series.y, strict=True)) for series in found.charts[0].series
    }
    assert bars["alone"] == {"llama.cpp, q8_0": 60.0, "transformers, float32": 16.7}
    assert not section_engines(reading(SLOW), "float32")


def test_an_engine_that_nothing_prices_is_named_with_its_command() -> None:
    """After `profile --engine llama.cpp` alone the others were left out unsaid."""
    alone = reading(QUICK)
    alone.engines = EngineWays("float32", (), {"vllm": "archsearch profile --engine vllm"})
    words = "Not compared, not profiled in float32 here (vLLM: archsearch profile --engine vllm)."
    alone_line = "No draft is faster than none in float32 here: llama.cpp alone: 38.6 tokens/s."
    assert fastest_lines(alone, "float32") == [
        alone_line,
        f"Others: llama.cpp with rank 1 at gamma 3: 30.3. {words}",
    ]
    both = reading(SLOW, QUICK)
    both.engines = alone.engines
    first, others = lines(SLOW, QUICK)
    assert fastest_lines(both, "float32") == [first, f"{others} {words}"]
