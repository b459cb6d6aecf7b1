"""The machine's slowness by plain steps of the target alone: PlainSteps, and `profile_engine` with
it."""

from __future__ import annotations

import pytest

from archsearch.engines.measure.rows import FRESH_S, PlainSteps
from tests.doubles.made_up_engine import MadeUpEngine


class SlowingEngine(MadeUpEngine):
    """Its steps take `slow` times as long."""

    slow = 1.0

    def steps(self):  # noqa: ANN201
        return tuple(
            step.__class__(**{**_fields(step), "seconds": step.seconds * self.slow})
            for step in super().steps()
        )


def _fields(step) -> dict:  # noqa: ANN001
    return {name: getattr(step, name) for name in step.__dataclass_fields__}


def test_a_step_now_over_one_at_the_start() -> None:
    engine, now = SlowingEngine(), [0.0]
    probe = PlainSteps(lambda: engine, "target", 320, clock=lambda: now[0])
    assert engine.log == [], "nothing is started before it is asked"
    assert probe() == pytest.approx(1.0) and probe.reference_s == pytest.approx(11.5e-3)
    engine.slow = 2.0
    assert probe() == pytest.approx(1.0), "an answer this young is given again"
    now[0] += 2 * FRESH_S
    assert probe() == pytest.approx(2.0)
    probe.stop()
    assert engine.log == ["start 0", "stop"]


def test_a_reference_of_before_is_kept() -> None:
    engine = SlowingEngine()
    probe = PlainSteps(lambda: engine, "target", 320, reference_s=23e-3)
    assert probe() == pytest.approx(0.5) and probe.reference_s == 23e-3


def test_an_engine_that_does_not_tell_its_steps_is_not_asked_again() -> None:
    engine = MadeUpEngine(tells_steps=False)
    probe = PlainSteps(lambda: engine, "target", 320, otherwise=lambda: 1.3)
    assert probe() == probe() == 1.3
    assert engine.log == ["start 0", "stop"]
