"""The export itself: a folder built beside its place and renamed, so that it is never half-written."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import archsearch
from archsearch.architecture.hf_config import read_architecture
from archsearch.engine_facts import ENGINES
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.export.card import ExportPlan, model_card
from archsearch.export.engines import DEFAULT_ENGINES, GGUF_FILE, Setup, check_engines, serving
from archsearch.export.source import ExportSource, padded_head_cost
from archsearch.files import read_json, write_json, write_text
from archsearch.models.files import DRAFT_FILES, TOKENIZER_FILES, gamma_settings, has_tokenizer, has_weights
from archsearch.schedule import check_schedule
from archsearch.workload import DTYPE_BYTES

MARKER: Final = "export.json"
"""Written into every export; a folder that holds it may be replaced by the next one."""


def export(
    source: ExportSource, output: Path, engines: Sequence[str] = DEFAULT_ENGINES, *, allow_untrained: bool = False
) -> Path:
    """Write the draft of `source` to `output`, ready to serve in `engines` (names of ENGINES); returns `output`.

    `allow_untrained`: without weights the folder holds the shape only and says so. The folder is built beside `output` and
    renamed. Raises MissingDataError without weights, ArchsearchError for a bad gamma, engine or schedule, where an engine cannot
    take this draft, or when `output` holds anything but an earlier export or cannot be written.
    """
    made = plan(source, output, engines, allow_untrained=allow_untrained)
    check_output(source.draft, made.output)
    with building(made.output) as folder:
        _build(made, folder)
        if made.copied:
            from archsearch.export.gguf_file import write_gguf

            # float16 for both 16-bit types: llama.cpp computes it quickly on every device, bfloat16 not.
            dtype = "float32" if made.dtype == "float32" else "float16"
            write_gguf(folder, folder / GGUF_FILE, dtype=dtype, tokenizer_gguf=source.target.gguf)
    return made.output


def plan(source: ExportSource, output: Path, engines: Sequence[str], *, allow_untrained: bool = False) -> ExportPlan:
    """What an export will hold, with everything checked that can be wrong before a file is written.

    Raises ArchsearchError for what cannot be exported.
    """
    if source.gamma < 1:
        raise ArchsearchError(f"gamma must be at least 1, got {source.gamma}")
    names = check_engines(engines)
    ranges = check_schedule(source.schedule.ranges)
    arch = read_architecture(source.draft)
    trained = has_weights(source.draft)
    copied = [name for name in names if ENGINES[name].gguf]
    if not trained and not allow_untrained:
        raise MissingDataError(f"no model.safetensors in {source.draft}; train the draft before exporting it")
    if not trained and copied:
        raise MissingDataError(f"no model.safetensors in {source.draft}; {copied[0]} needs weights: train the draft first")
    output = output.expanduser().absolute()
    dtype = source.dtype or source.record.confirmed_dtype or _dtype(source.draft)
    setup = Setup(
        folder=output,
        target=source.target.name or "TARGET",
        gamma=source.gamma,
        dtype=dtype,
        schedule=ranges,
        tensor_parallel=source.tensor_parallel,
        target_gguf=str(source.target.gguf) if source.target.gguf else "TARGET.gguf",
    )
    served = tuple(serving(name, setup) for name in names if not ENGINES[name].draft_folder)
    cost = padded_head_cost(arch, dtype) if arch.trimmed else None
    return ExportPlan(source, output, arch, dtype, names, served, trained, cost)


def _marker(made: ExportPlan) -> dict[str, Any]:
    """The content of export.json."""
    source, training = made.source, made.source.record.training or {}
    return {
        "archsearch": archsearch.__version__,
        "gamma": source.gamma,
        "schedule": [list(entry) for entry in source.schedule.ranges],
        "target": source.target.name,
        "trained": made.trained,
        "dtype": made.dtype,
        "engines": list(made.engines),
        "commands": {each.engine: list(each.command) for each in made.served},
        "architecture": made.architecture.to_dict(),
        "training": {key: value for key, value in training.items() if not key.endswith("_curve")} or None,
        "provenance": dict(source.record.provenance),
    }


@contextmanager
def building(output: Path) -> Iterator[Path]:
    """A folder beside `output` that takes its place when the block ends well, and is removed when it does not.

    Raises ArchsearchError for a folder that cannot be written.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}."))
    except OSError as error:
        raise ArchsearchError(f"cannot write {output}: {error.strerror or error}; choose a folder you can write to") from error
    try:
        yield folder
        folder.chmod(0o755)
        _swap(folder, output)
    except OSError as error:
        raise ArchsearchError(f"cannot write {output}: {error.strerror or error}; free space or choose another folder") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_output(draft_folder: Path, output: Path) -> None:
    """Raise ArchsearchError where an export may not be written to `output`."""
    if output.resolve() == draft_folder.resolve():
        raise ArchsearchError(f"output {output} is the draft's own folder; choose another one")
    if output.exists() and not output.is_dir():
        raise ArchsearchError(f"output {output} is a file; choose a folder")
    if output.is_dir() and any(output.iterdir()) and not (output / MARKER).is_file():
        raise ArchsearchError(f"output folder {output} is not empty and not an earlier export; empty it or choose another one")


def _build(made: ExportPlan, folder: Path) -> None:
    """Every file of the export but the GGUF."""
    source = made.source
    for name in (*DRAFT_FILES, *TOKENIZER_FILES):
        if (source.draft / name).is_file():
            shutil.copyfile(source.draft / name, folder / name)
    if source.target.tokenizer is not None and not has_tokenizer(folder):
        from archsearch.models.drafts import save_tokenizer

        save_tokenizer(source.target.tokenizer, folder)
    settings = source.draft / "generation_config.json"
    generation = read_json(settings, "generation config") if settings.is_file() else {}
    write_json(folder / "generation_config.json", {**generation, **gamma_settings(source.gamma)})
    for each in made.served:
        for name, text in each.files.items():
            write_text(folder / name, text)
    if source.record.score is not None:
        write_json(folder / "score.json", dict(source.record.score))
    write_text(folder / "README.md", model_card(made))
    write_json(folder / MARKER, _marker(made))


def _swap(building: Path, output: Path) -> None:
    """Put `building` where `output` is; the old export goes only once the new one stands."""
    if not output.exists():
        building.rename(output)
        return
    old = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}.old."))
    os.replace(output, old / "export")
    try:
        building.rename(output)
    except OSError:
        os.replace(old / "export", output)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _dtype(draft_folder: Path) -> str:
    """What the weights are stored in, as their config says it."""
    dtype = read_json(draft_folder / "config.json", "model config").get("dtype")
    return dtype if dtype in DTYPE_BYTES else "float32"
