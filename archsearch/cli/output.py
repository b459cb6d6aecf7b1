"""How a command answers: text for people, or one JSON object."""

from __future__ import annotations

import json
from typing import Any

import click


def emit(data: dict[str, Any], text: str, as_json: bool) -> None:
    """The human text, or the JSON object alone on the last line."""
    click.echo(json.dumps(data) if as_json else text)
