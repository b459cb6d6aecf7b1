"""The command line: parse, call one function of `archsearch.pipeline`, print. Heavy imports wait
inside the commands."""

from archsearch.cli import (  # noqa: F401  (they register their commands)
    acceptance,
    bench_serve,
    compare,
    confirm,
    dashboard,
    demo,
    doctor,
    engine,
    estimate,
    export,
    listing,
    profile,
    recipe,
    report,
    schedule,
    search,
    traffic,
    train,
    worker,
)
from archsearch.cli.app import main

__all__ = ["main"]
