"""A made-up machine with two cores and a neighbour who comes and goes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from archsearch.training.pace import Pace, waited_s


@dataclass
class Machine:
    """`busy`: whether another process runs. Two threads beside it wait for one another; one has a
    core for itself."""

    now: float = 0.0
    cpu: float = 0.0
    waited: float = 0.0
    threads: int = 2
    busy: bool = False

    def rate(self) -> float:
        return (600.0 if self.busy else 2900.0) if self.threads == 2 else 1600.0

    def run(self, pace: Pace, seconds: float) -> int:
        end, done = self.now + seconds, 0
        while self.now < end:
            took = 512 / self.rate()
            self.now += took
            self.cpu += took * (1.2 if self.busy and self.threads == 2 else self.threads)
            self.waited += took * (0.5 if self.busy and self.threads == 2 else 0.0)
            pace.step(512)
            done += 512
        return done

    def use(self, threads: int) -> None:
        self.threads = threads


def pace_of(machine: Machine, said: list[str]) -> Pace:
    return Pace(
        machine.threads,
        machine.use,
        said.append,
        clock=lambda: machine.now,
        cpu_clock=lambda: machine.cpu,
        wait_clock=lambda: machine.waited,
    )


def test_a_quiet_machine_is_left_alone() -> None:
    machine, said = Machine(), []
    pace = pace_of(machine, said)
    machine.run(pace, 600)
    assert machine.threads == 2 and not said and not pace.slowdowns


def test_beside_a_busy_process_fewer_threads_are_used_and_said_once() -> None:
    machine, said = Machine(), []
    pace = pace_of(machine, said)
    quiet = machine.run(pace, 300)
    machine.busy = True
    disturbed = machine.run(pace, 300)
    assert machine.threads == 1 and disturbed > 0.5 * quiet
    assert (
        len(said) == 1
        and "fell to" in said[0]
        and "other processes hold the cores: 1.2 CPU seconds a second, 2.0" in said[0]
    )
    assert pace.slowdowns[0].threads == 1 and pace.slowdowns[0].now_tokens_per_s < 700
    machine.busy = False  # alone again: all threads after the next trial
    machine.run(pace, 300)
    assert machine.threads == 2 and len(said) == 1
    machine.busy = True
    machine.run(pace, 300)
    assert machine.threads == 1 and len(said) == 1
    pace.close()
    assert machine.threads == 2


def test_fewer_threads_that_do_not_help_are_given_up() -> None:
    machine, said = Machine(), []
    machine.rate = lambda: 2900.0 if not machine.busy else 1000.0 if machine.threads == 2 else 700.0  # type: ignore[method-assign]
    pace = pace_of(machine, said)
    machine.run(pace, 120)
    machine.busy = True
    machine.run(pace, 600)
    assert machine.threads == 2 and len(said) == 1 and len(pace.slowdowns) <= 4


def test_a_machine_that_is_busy_from_the_start_is_noticed_and_said_once() -> None:
    machine, said = Machine(busy=True), []
    pace = pace_of(machine, said)
    machine.run(pace, 300)
    assert machine.threads == 1  # measured to be faster than two that wait for one another
    assert len(said) == 1 and "busy since this training began" in said[0] and "29%" in said[0]
    assert pace.slowdowns[0].waiting > 0.2 and pace.slowdowns[0].threads == 1
    machine.busy = False
    machine.run(pace, 300)
    assert machine.threads == 2 and len(said) == 1


def test_time_without_a_core_is_summed_over_threads(tmp_path: Path) -> None:
    for name, text in (("1", "900 1500000000 7\n"), ("2", "900 500000000 7\n"), ("3", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "schedstat").write_text(text, encoding="ascii")
    assert waited_s(tmp_path) == 2.0 and waited_s(tmp_path / "none") == 0.0
