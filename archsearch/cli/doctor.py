"""`archsearch doctor`."""

from __future__ import annotations

import click

from archsearch.cli.app import main
from archsearch.cli.options import json_option
from archsearch.cli.output import emit


@main.command()
@json_option
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Look at this machine: versions, device, profile, engines, disk, memory, load; each finding
    with what mends it.

    Exit status 0 also where there is something to mend, 1 only where nothing can run.

    \b
    archsearch doctor
    archsearch doctor --json
    """
    from archsearch.pipeline.doctor import doctor as examine
    from archsearch.report.terminal.doctor import doctor_text

    result = examine()
    emit(result, doctor_text(result), as_json)
    if not result["runs"]:
        context.exit(1)
