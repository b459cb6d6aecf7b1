"""Device-hours of a training: what must hold of any cost model, and the published costs within the
factor that is said."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from archsearch.architecture import catalogue
from archsearch.hardware.device import load_device
from archsearch.latency.roofline import RooflineLatency
from archsearch.pipeline.training_budget import training_budget
from archsearch.workload import Workload


def budget(target: str, gpu: str, hours: float = 24.0):
    shape, device = catalogue.load(target).architecture, load_device(gpu)
    latency = RooflineLatency(device, "bfloat16", "graph", "vllm")
    return training_budget(latency, shape, device, Workload(1, 256, 1, "bfloat16", "graph"), hours)


def test_a_larger_target_and_a_slower_device_buy_fewer_tokens():
    small, large = budget("llama-3.1-8b", "h100"), budget("llama-3.1-70b", "h100")
    assert small.tokens(5e8) > 4 * large.tokens(
        5e8
    )  # 8.8 times the weights, on as many GPUs as are cheapest
    assert small.tokens(5e8) > 1.5 * budget("llama-3.1-8b", "a100").tokens(5e8)
    assert budget("llama-3.1-8b", "h100", 48.0).tokens(5e8) == pytest.approx(2 * small.tokens(5e8))


def test_writing_costs_more_than_reading():
    for target in ("llama-3.1-8b", "llama-3.1-70b", "gpt-oss-20b"):
        found = budget(target, "h100")
        assert found.text_hours_per_token > found.teacher_hours_per_token > 0


def test_a_token_read_takes_two_operations_a_parameter_at_the_least():
    """No pass is faster than the datasheet's peak."""
    found, device = budget("llama-3.1-8b", "h100"), load_device("h100")
    least = 2 * 7.5e9 / device.peak_flops_per_s("bfloat16") / 3600
    assert least < found.teacher_hours_per_token < 4 * least


def test_published_trainings_that_fitted_nothing_lie_within_the_factor_that_is_said():
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
    try:
        import training_costs
    finally:
        sys.path.pop(0)
    held_out = [case for case in training_costs.CASES if not case.fitted]
    assert len(held_out) >= 4
    for case in held_out:
        hours = sum(training_costs.predicted(case))
        if case.low is None:
            assert hours < case.high
        else:
            assert abs(math.log(hours / math.sqrt(case.low * case.high))) < math.log(2.0), case.name
