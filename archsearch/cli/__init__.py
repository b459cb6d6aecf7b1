"""The command line: parse, call one function of `archsearch.pipeline`, print. Heavy imports wait
inside the commands."""

from archsearch.cli import (  # noqa: F401  (they register their commands)
    drafts,
    listing,
    machine,
    price,
    results,
    search,
)
from archsearch.cli.app import main

__all__ = ["main"]
