"""`archsearch list`."""

from __future__ import annotations

from typing import Any

import click

from archsearch.cli.app import main
from archsearch.cli.options import json_option
from archsearch.cli.output import emit


@main.command("list")
@click.argument("what", type=click.Choice(["targets", "devices", "profiles", "spaces", "runs"]))
@json_option
def list_command(what: str, as_json: bool) -> None:
    """What there is: targets and published drafts, devices, profiles, search spaces, runs.

    \b
    archsearch list targets
    archsearch list profiles --json
    archsearch list devices --json     every datasheet figure with its source
    """
    from archsearch.listing import LISTINGS, device_facts
    from archsearch.report.terminal.layout import table

    header, rows = LISTINGS[what]()
    text = table(rows, header) if rows else f"no {what} yet"
    data: dict[str, Any] = {what: [dict(zip(header, row, strict=True)) for row in rows]}
    if what == "devices":
        data["facts"] = device_facts()
        text += (
            "\n\nThe source of every figure: archsearch list devices --json. Of your own:"
            " devices/NAME.yaml."
        )
    emit(data, text, as_json)
