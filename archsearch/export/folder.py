"""The export itself: a folder built beside its place and renamed, so that it is never
half-written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Final

import archsearch
from archsearch.architecture.hf_config import read_architecture
from archsearch.drafters.forms import speculators_config
from archsearch.drafters.read import layer_ids
from archsearch.engine_facts import ENGINES
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.export.card import ExportPlan, ExportSource, model_card, padded_head_cost
from archsearch.export.engines import (
    ADAPTIVE_FILE,
    DEFAULT_ENGINES,
    GGUF_FILE,
    INDEPENDENT,
    TENSORRT_FILE,
    Priced,
    Setup,
    check_engines,
    serving,
)
from archsearch.files import (
    OLD,
    left_behind,
    read_json,
    scratch_dir,
    take_place,
    write_json,
    write_text,
    writing,
)
from archsearch.models.files import (
    DRAFT_FILES,
    TOKENIZER_FILES,
    gamma_settings,
    has_tokenizer,
    has_weights,
)
from archsearch.models.gguf_file import check_written, write_gguf
from archsearch.records import encoded
from archsearch.schedule import check_schedule

MARKER: Final = "export.json"
"""Written into every export, with the names of its files; the next export may replace those and
nothing else."""
SPECULATORS_FILE: Final = "speculators_config.json"
UNLISTED: Final = (
    *DRAFT_FILES,
    *TOKENIZER_FILES,
    MARKER,
    GGUF_FILE,
    TENSORRT_FILE,
    "README.md",
    "score.json",
    "generation_config.json",
    "speculative_config.json",
    SPECULATORS_FILE,
    ADAPTIVE_FILE,
)
"""What exports of earlier versions may hold, whose markers list no files."""


def export(
    source: ExportSource,
    output: Path,
    engines: Sequence[str] = DEFAULT_ENGINES,
    *,
    allow_untrained: bool = False,
) -> Path:
    """Write the draft of `source` to `output`, ready to serve in `engines` (names of ENGINES);
    returns `output`.

    `allow_untrained`: without weights the folder holds the shape only and says so. Raises
    MissingDataError without weights, ArchsearchError for a bad gamma, engine or schedule, where an
    engine cannot take this draft, or when `output` holds anything but an earlier export or cannot
    be written.
    """
    made = plan(source, output, engines, allow_untrained=allow_untrained)
    check_output(source.draft, made.output)
    with building(made.output) as folder:
        _build(made, folder)
        if any(ENGINES[name].gguf for name in made.engines):
            file, dtype = folder / GGUF_FILE, source.gguf_dtype
            write_gguf(folder, file, dtype=dtype, tokenizer_gguf=source.target.gguf)
    return made.output


def plan(
    source: ExportSource, output: Path, engines: Sequence[str], *, allow_untrained: bool = False
) -> ExportPlan:
    """What an export will hold, with everything checked that can be wrong before a file is written.

    Raises ArchsearchError for what cannot be exported.
    """
    if source.gamma < 1:
        raise ArchsearchError(f"gamma must be at least 1, got {source.gamma}")
    whole = source.family == INDEPENDENT
    names = check_engines(engines, source.family)
    ranges = check_schedule(source.schedule.ranges)
    arch = read_architecture(source.draft) if whole else None
    trained = has_weights(source.draft)
    copied = [name for name in names if ENGINES[name].gguf]
    check_written(source.gguf_dtype)
    if not trained and (copied or not allow_untrained):
        why = f"{copied[0]} needs weights: train the draft first" if allow_untrained else ""
        why = why or "train the draft before exporting it"
        raise MissingDataError(f"no model.safetensors in {source.draft}; {why}")
    output = output.expanduser().absolute()
    setup = Setup(
        folder=output,
        target=source.target.name or "TARGET",
        gamma=source.gamma,
        dtype=source.dtype,
        schedule=ranges,
        target_gguf=str(source.target.gguf) if source.target.gguf else "TARGET.gguf",
        layers=() if whole else layer_ids(read_json(source.draft / "config.json", "head's config")),
        mixed=arch is not None and arch.mixed,
        **{each.name: getattr(source, each.name) for each in fields(Priced)},
    )
    served = tuple(serving(name, setup) for name in names if not ENGINES[name].draft_folder)
    cost = padded_head_cost(arch, source.dtype) if arch is not None and arch.trimmed else None
    return ExportPlan(source, output, arch, names, served, trained, cost)


def _marker(made: ExportPlan) -> dict[str, object]:
    source, record = made.source, made.source.record
    training = encoded(record.training) if record.training is not None else {}
    return {
        "archsearch": archsearch.__version__,
        "family": source.family,
        "gamma": source.gamma,
        "stops": dict(source.stops),
        "schedule": source.schedule.ranges,
        "target": source.target.name,
        "trained": made.trained,
        "dtype": source.dtype,
        "engines": made.engines,
        "commands": {each.engine: each.command for each in made.served},
        "architecture": made.architecture.to_dict() if made.architecture is not None else None,
        "training": (
            {key: value for key, value in training.items() if not key.endswith("curve")} or None
        ),
        "provenance": dict(record.provenance),
    }


@contextmanager
def building(output: Path) -> Iterator[Path]:
    """A folder beside `output` that takes its place when the block ends well, and is removed when
    it does not. Its marker lists its files. What a killed export moved away and could not replace
    comes back first.

    Raises ArchsearchError for a folder that cannot be written.
    """
    with writing(output):
        left = [each / OLD for each in left_behind(output) if (each / OLD).is_dir()]
        if left and not output.exists():
            os.replace(left[0], output)
        with scratch_dir(output) as scratch:
            folder = scratch / "new"
            folder.mkdir()
            yield folder
            marker = read_json(folder / MARKER, "the export's marker")
            files = sorted({path.name for path in folder.iterdir()} | {MARKER})
            write_json(folder / MARKER, {**marker, "files": files})
            take_place(folder, output, scratch)


def check_output(draft_folder: Path, output: Path) -> None:
    """Raise ArchsearchError where an export may not be written to `output`: it replaces nothing but
    an earlier export, and only where nobody put a file of their own into that."""
    if output.resolve() == draft_folder.resolve():
        raise ArchsearchError(f"output {output} is the draft's own folder; choose another one")
    if output.exists() and not output.is_dir():
        raise ArchsearchError(f"output {output} is a file; choose a folder")
    if not output.is_dir() or not any(output.iterdir()):
        return
    marker = (
        read_json(output / MARKER, "the export's marker") if (output / MARKER).is_file() else None
    )
    if not isinstance(marker, dict) or not {"archsearch", "commands"} <= set(marker):
        raise ArchsearchError(
            f"output folder {output} is not empty and not an earlier export; empty it or choose"
            " another one"
        )
    listed = marker.get("files")
    known = set(listed) if isinstance(listed, list) else set(UNLISTED)
    foreign = sorted(path.name for path in output.iterdir() if path.name not in known)
    if foreign:
        raise ArchsearchError(
            f"output folder {output} is an earlier export with files that archsearch did not write "
            f"({', '.join(foreign[:3])}); move them, or choose another folder"
        )


def _build(made: ExportPlan, folder: Path) -> None:
    """Every file of the export but the GGUF."""
    source = made.source
    for name in (*DRAFT_FILES, *TOKENIZER_FILES):
        if (source.draft / name).is_file():
            shutil.copyfile(source.draft / name, folder / name)
    if source.target.tokenizer is not None and not has_tokenizer(folder):
        from archsearch.models.drafts import save_tokenizer

        save_tokenizer(source.target.tokenizer, folder)
    if made.architecture is not None:
        settings = source.draft / "generation_config.json"
        generation = read_json(settings, "generation config") if settings.is_file() else {}
        gamma, least = source.stops.get("transformers", (source.gamma, 0.0))
        write_json(folder / settings.name, {**generation, **gamma_settings(gamma, least)})
    if source.family == "eagle3":
        config = read_json(source.draft / "config.json", "the head's config")
        other = speculators_config(config, source.gamma, source.target.name or "TARGET")
        write_json(folder / SPECULATORS_FILE, other)
    for each in made.served:
        for name, text in each.files.items():
            write_text(folder / name, text)
    if source.record.score is not None:
        write_json(folder / "score.json", source.record.score.to_dict())
    write_text(folder / "README.md", model_card(made))
    write_json(folder / MARKER, _marker(made))
