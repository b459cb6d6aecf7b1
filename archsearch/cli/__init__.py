"""The command line: parse, call one function of `archsearch.pipeline`, print. Heavy imports wait inside the commands."""

from archsearch.cli import acceptance, candidates, demo, engine, estimate, listing, profile, search  # noqa: F401  (they register their commands)
from archsearch.cli.app import main

__all__ = ["main"]
