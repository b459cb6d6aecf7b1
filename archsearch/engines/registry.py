"""The engines that archsearch runs, made by name."""

from __future__ import annotations

from pathlib import Path

from archsearch.engine_facts import engines_that, load, runnable_engine
from archsearch.engines.engine import Engine, EngineSettings, Tokenizer
from archsearch.errors import ArchsearchError


def make_engine(name: str, settings: EngineSettings, tokenizer: Tokenizer = None) -> Engine:
    """The engine called `name`. Raises ArchsearchError for an unknown one, MissingDataError where
    its environment is missing."""
    engine: Engine = load(runnable_engine(name).make)(settings, tokenizer)
    return engine


def check_interpreter_choice(name: str, python: Path | None) -> None:
    """Raise ArchsearchError where the engine's interpreter (`python`, or the installed one) cannot
    be run; MissingDataError, with the install command, where there is none."""
    from archsearch.engines.environments.environment import find_python

    if runnable_engine(name).in_process:
        if python is not None:
            others = ", ".join(engines_that(lambda row: not row.in_process))
            raise ArchsearchError(
                f"{name} runs in archsearch's own interpreter; leave --engine-python out, or name"
                f" another --engine ({others})"
            )
    else:
        find_python(name, python)
