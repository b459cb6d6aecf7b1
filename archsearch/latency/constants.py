"""`constants`: the numbers of constants.yaml, each with its source there."""

from functools import cache
from pathlib import Path
from typing import Any

from archsearch.files import shipped_yaml


@cache
def constants() -> Any:
    """What the tables do not hold."""
    return shipped_yaml(Path(__file__).with_suffix(".yaml"))
