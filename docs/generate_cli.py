"""Writes docs/cli.md from the commands' own --help.

python docs/generate_cli.py            (or: make docs)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from archsearch.cli import main
from archsearch.files import write_text

FILE = Path(__file__).with_name("cli.md")
WIDTH = 100
INTRODUCTION = """\
<!-- Written by docs/generate_cli.py from the commands' --help. Do not edit; run `make docs`. -->

# Commands

Every command takes `--json`: the last line of stdout is then one JSON object with the same data.
Progress goes to stderr. Exit status: 0 done, 1 a run that failed, 2 something you can mend (one
line says what), 130 stopped with Ctrl-C. Stopping loses at most the measurement, trial, shard of
text or checkpoint interval in flight; the same command continues.

Durations are written `90s`, `10m`, `1.5h`, or as a number of seconds.
"""


def commands(
    command: click.Command, name: str = "archsearch"
) -> Iterator[tuple[str, click.Command]]:
    """(full name, command) of a group and everything below it, in the order of --help."""
    yield name, command
    if isinstance(command, click.Group):
        for child in command.list_commands(click.Context(command)):
            yield from commands(command.commands[child], f"{name} {child}")


def help_text(name: str, command: click.Command) -> str:
    """--help at a fixed width, whatever the terminal."""
    context = click.Context(
        command,
        info_name=name,
        terminal_width=WIDTH,
        max_content_width=WIDTH,
        help_option_names=["-h", "--help"],
    )
    lines = (line.rstrip() for line in command.get_help(context).splitlines())
    return "\n".join(lines).strip()


def cli_markdown() -> str:
    """The whole of docs/cli.md."""
    parts = [INTRODUCTION]
    for name, command in commands(main):
        parts.append(f"## {name}\n\n```\n{help_text(name, command)}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    write_text(FILE, cli_markdown())
