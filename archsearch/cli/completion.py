"""What a shell offers for the values of options and for RUN: names that archsearch knows, and files
where a folder does as well.

Names are looked up when the shell asks, so that nothing heavy is imported before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from archsearch.architecture.catalogue import stems

Names = Callable[[], Iterable[str]]


def devices() -> Iterable[str]:
    """cpu, aliases and keys."""
    from archsearch.hardware.device import devices as known

    return ["cpu", *(name for device in known().values() for name in (*device.aliases, device.key))]


def spaces() -> Iterable[str]:
    """Shipped, and in search_spaces/."""
    from archsearch.search.space import list_spaces

    return list_spaces()


def families() -> Iterable[str]:
    """Kinds of drafters."""
    from archsearch.drafters.registry import FAMILIES

    return FAMILIES


def drafts() -> Iterable[str]:
    """Families, and what the catalogue has."""
    return [*families(), *stems()]


def items(names: Iterable[str], paths: bool, incomplete: str) -> list[CompletionItem]:
    """The names that begin so, and, where a path does as well, the files."""
    found = [
        CompletionItem(name)
        for name in dict.fromkeys(names)
        if name.lower().startswith(incomplete.lower())
    ]
    return [*found, CompletionItem(incomplete, type="file")] if paths else found


class RunPath(click.Path):
    """The type of RUN: a folder; a shell offers those with a run.yaml in runs/, newest first, none
    of which is read."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, file_okay=False)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        files = Path("runs").glob("*/run.yaml")
        found = sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)
        return items((str(file.parent) for file in found), True, incomplete)
