"""text_sketch.json of a run: what it keeps of its prompts, so that later runs can tell how alike
theirs are (`likeness.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

from archsearch.errors import ArchsearchError
from archsearch.files import read_json, write_json

SKETCH_FILE: Final = "text_sketch.json"
FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class TextSketch:
    """What is kept of a set of prompts. `digest`: of the prompts, whatever their order; `halves`:
    [BUCKETS] signed bytes each, as base64: sign and square root of the share of word pairs, the
    largest being 127."""

    digest: str
    prompts: int
    halves: tuple[str, str]

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self), "halves": list(self.halves)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Raises ArchsearchError for another format, KeyError, TypeError or ValueError for what is
        no sketch."""
        if data["format"] != FORMAT:
            raise ArchsearchError(
                f"a sketch of format {data['format']}, this version reads {FORMAT}"
            )
        first, second = (str(half) for half in data["halves"])
        return cls(str(data["digest"]), int(data["prompts"]), (first, second))


def save_sketch(sketch: TextSketch, folder: Path) -> None:
    """Write the sketch of a text into a run folder."""
    write_json(folder / SKETCH_FILE, sketch.to_dict())


def load_sketch(folder: Path) -> TextSketch | None:
    """The sketch that lies in a run folder; None where there is none that can be read."""
    try:
        return TextSketch.from_dict(read_json(folder / SKETCH_FILE, "sketch of the prompts"))
    except (ArchsearchError, KeyError, TypeError, ValueError):
        return None
