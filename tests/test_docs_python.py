"""Docs that run: the examples of docs/python.md, and every command line of README and docs as far
as it can be parsed."""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path

import click
import pytest

from archsearch.cli import main

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"^(?:[A-Z_0-9]+=\S+ )*archsearch (?!\.\.\.)[a-z].*$", re.MULTILINE)


@pytest.mark.slow  # fits an H100's kernel tables and searches
def test_the_examples_of_the_python_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    text = "\n".join(re.findall(r"```pycon\n(.*?)```", page, re.DOTALL))
    test = doctest.DocTestParser().get_doctest(text, {}, "python.md", "docs/python.md", 0)
    assert len(test.examples) > 20
    said: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert result.failed == 0, "".join(said)


def command_lines() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        blocks = re.findall(
            r"^```\w*\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        )
        found += [(page.name, line) for block in blocks for line in COMMAND.findall(block)]
    return found


def test_commands_are_found() -> None:
    assert len(command_lines()) > 50


@pytest.mark.parametrize(
    ("page", "line"), command_lines(), ids=lambda text: text.replace("/", "|")[:60]
)
def test_every_documented_command_is_one(page: str, line: str) -> None:
    """Its options exist and take such values; `...` stands for what a reader fills in."""
    words = shlex.split(line, comments=True)
    words = words[words.index("archsearch") + 1 :]
    words = words[: words.index("|")] if "|" in words else words  # what another command reads
    command: click.Command = main
    # With the group's own settings: a command keeps the help option of the first context that asks
    # it.
    context = click.Context(main, info_name="archsearch", **main.context_settings)
    while isinstance(command, click.Group) and words:
        name = words.pop(0)
        assert name in command.commands, f"{page}: no command {name!r} in: {line}"
        command = command.commands[name]
        context = click.Context(command, info_name=name, parent=context)
    words = [word for word in words if word not in ("...", "[OPTIONS]")]
    try:
        values, _, _ = command.make_parser(context).parse_args(args=list(words))
    except click.UsageError as error:
        if "Missing argument" not in error.format_message():
            raise AssertionError(f"{page}: {error.format_message()} in: {line}") from error
        return
    for parameter in command.params:
        if isinstance(parameter, click.Option) and values.get(parameter.name or "") is not None:
            parameter.type_cast_value(context, values[parameter.name or ""])
