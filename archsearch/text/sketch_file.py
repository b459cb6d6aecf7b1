"""text_sketch.json of a run: what it keeps of its prompts, so that later runs can tell how alike
theirs are (`likeness.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from archsearch import records

SKETCH_FILE: Final = "text_sketch.json"


@dataclass(frozen=True, slots=True)
class TextSketch:
    """What is kept of a set of prompts. `digest`: of the prompts, whatever their order; `halves`:
    [BUCKETS] signed bytes each, as base64: sign and square root of the share of word pairs, the
    largest being 127."""

    digest: str
    prompts: int
    halves: tuple[str, str]
    format: Literal[1] = 1


def save_sketch(sketch: TextSketch, folder: Path) -> None:
    """Write the sketch of a text into a run folder."""
    records.save(folder / SKETCH_FILE, sketch)


def load_sketch(folder: Path) -> TextSketch | None:
    """The sketch that lies in a run folder; None where there is none that can be read."""
    return records.load_or_note(folder / SKETCH_FILE, "sketch of the prompts", TextSketch, [])
