"""The export itself: a folder built beside its place and renamed, so that it is never half-written."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import archsearch
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import weight_bytes_per_pass
from archsearch.architecture.hf_config import read_architecture
from archsearch.engine_facts import ENGINES
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.export.card import model_card
from archsearch.export.engines import DEFAULT_ENGINES, GGUF_FILE, Serving, Setup, check_engines, serving
from archsearch.export.schedule import check_schedule
from archsearch.files import read_json, write_json, write_text
from archsearch.models.files import DRAFT_FILES, TOKENIZER_FILES, gamma_settings, has_tokenizer, has_weights
from archsearch.workload import DTYPE_BYTES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARKER: Final = "export.json"
"""Written into every export; a folder that holds it may be replaced by the next one."""


def export(
    draft_folder: Path,
    output: Path,
    *,
    gamma: int,
    engines: Sequence[str] = DEFAULT_ENGINES,
    schedule: Sequence[Sequence[int]] = (),
    points: Sequence[Mapping[str, Any]] = (),
    schedule_words: str = "",
    loads: Sequence[Mapping[str, Any]] = (),
    score: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
    target: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    target_gguf: Path | None = None,
    confirmed: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
    padded_speedup: float | None = None,
    better_gamma: tuple[int, float] | None = None,
    dtype: str | None = None,
    tensor_parallel: int = 1,
    allow_untrained: bool = False,
) -> Path:
    """Write the draft of `draft_folder` to `output`, ready to serve with `gamma` draft tokens a round; returns `output`.

    `engines`: names of ENGINES to say commands and write files for. `schedule`: (first batch, last batch, gamma), inclusive;
    `points`, `schedule_words`: what was found at single batch sizes, and how. `loads`: runs at several concurrencies
    (load-<engine>.json). `target`: folder or hub id in the commands; `tokenizer`: the
    target's, used where the draft folder has none; `target_gguf`: the target's own GGUF. `dtype`: what the engines compute in
    (default: the confirmation's, else the weights'). `allow_untrained`: without weights the folder holds the shape only and says
    so.
    Into the model card go `score` (score.json), `confirmed` (confirmed.json), `training` (training.json), `provenance` (`run`:
    what run.yaml holds), and of engines that compute the full head the `padded_speedup` (predicted) and `better_gamma` (gamma
    and predicted speed-up, where another gamma suits them better).
    The folder is built beside `output` and renamed. Raises MissingDataError without weights, ArchsearchError for a bad gamma,
    engine or schedule, where an engine cannot take this draft, or when `output` holds anything but an earlier export or cannot
    be written.
    """
    if gamma < 1:
        raise ArchsearchError(f"gamma must be at least 1, got {gamma}")
    engines = check_engines(engines)
    ranges = check_schedule(schedule)
    arch = read_architecture(draft_folder)
    trained = has_weights(draft_folder)
    if not trained and not allow_untrained:
        raise MissingDataError(f"no model.safetensors in {draft_folder}; train the draft before exporting it")
    copied = [name for name in engines if ENGINES[name].gguf]
    if not trained and copied:
        raise MissingDataError(f"no model.safetensors in {draft_folder}; {copied[0]} needs weights: train the draft first")
    output = output.expanduser().absolute()
    _check_output(draft_folder, output)
    dtype = dtype or (str(confirmed["dtype"]) if confirmed and confirmed.get("dtype") else _dtype(draft_folder))
    setup = Setup(
        folder=output,
        target=target or "TARGET",
        gamma=gamma,
        dtype=dtype,
        schedule=ranges,
        tensor_parallel=tensor_parallel,
        target_gguf=str(target_gguf) if target_gguf else "TARGET.gguf",
    )
    served = tuple(serving(name, setup) for name in engines if not ENGINES[name].draft_folder)
    cost = padded_head_cost(arch, dtype) if arch.trimmed else None
    card = model_card(
        arch,
        output,
        gamma=gamma,
        score=score,
        dtype=dtype,
        target=target,
        confirmed=confirmed,
        padded_speedup=padded_speedup,
        better_gamma=better_gamma,
        training=training,
        provenance=provenance,
        schedule=ranges,
        points=points,
        schedule_words=schedule_words,
        loads=loads,
        transformers=any(ENGINES[name].draft_folder for name in engines),
        served=served,
        head_cost=cost,
        trained=trained,
    )
    marker = {
        "archsearch": archsearch.__version__,
        "gamma": gamma,
        "schedule": [list(entry) for entry in ranges],
        "target": target,
        "trained": trained,
        "dtype": dtype,
        "engines": list(engines),
        "commands": {each.engine: list(each.command) for each in served},
        "architecture": arch.to_dict(),
        "training": {key: value for key, value in (training or {}).items() if not key.endswith("_curve")} or None,
        "provenance": dict(provenance or {}),
    }
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}."))
    except OSError as error:
        raise ArchsearchError(f"cannot write {output}: {error.strerror or error}; choose a folder you can write to") from error
    try:
        contents = _Contents(card, marker, served, dict(score) if score is not None else None)
        _build(draft_folder, building, gamma, tokenizer, contents)
        if copied:
            _write_gguf(building, dtype, target_gguf)
        building.chmod(0o755)
        _swap(building, output)
    except OSError as error:
        raise ArchsearchError(f"cannot write {output}: {error.strerror or error}; free space or choose another folder") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return output


@dataclass(frozen=True)
class _Contents:
    card: str
    marker: dict[str, Any]
    served: tuple[Serving, ...]
    score: dict[str, Any] | None


def _check_output(draft_folder: Path, output: Path) -> None:
    if output.resolve() == draft_folder.resolve():
        raise ArchsearchError(f"output {output} is the draft's own folder; choose another one")
    if output.exists() and not output.is_dir():
        raise ArchsearchError(f"output {output} is a file; choose a folder")
    if output.is_dir() and any(output.iterdir()) and not (output / MARKER).is_file():
        raise ArchsearchError(f"output folder {output} is not empty and not an earlier export; empty it or choose another one")


def _build(draft_folder: Path, folder: Path, gamma: int, tokenizer: PreTrainedTokenizerBase | None, contents: _Contents) -> None:
    for name in (*DRAFT_FILES, *TOKENIZER_FILES):
        if (draft_folder / name).is_file():
            shutil.copyfile(draft_folder / name, folder / name)
    if tokenizer is not None and not has_tokenizer(folder):
        from archsearch.models.drafts import save_tokenizer

        save_tokenizer(tokenizer, folder)
    source = draft_folder / "generation_config.json"
    generation = read_json(source, "generation config") if source.is_file() else {}
    write_json(folder / "generation_config.json", {**generation, **gamma_settings(gamma)})
    for each in contents.served:
        for name, text in each.files.items():
            write_text(folder / name, text)
    if contents.score is not None:
        write_json(folder / "score.json", contents.score)
    write_text(folder / "README.md", contents.card)
    write_json(folder / MARKER, contents.marker)


def _write_gguf(folder: Path, dtype: str, target_gguf: Path | None) -> None:
    from archsearch.export.gguf_file import write_gguf

    # float16 for both 16-bit types: llama.cpp computes it quickly on every device, bfloat16 not.
    write_gguf(folder, folder / GGUF_FILE, dtype="float32" if dtype == "float32" else "float16", tokenizer_gguf=target_gguf)


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
    dtype = read_json(draft_folder / "config.json", "model config").get("dtype")
    return dtype if dtype in DTYPE_BYTES else "float32"


def padded_head_cost(arch: Architecture, dtype: str) -> dict[str, float]:
    """What an engine pays that computes the full head of a draft trained with a trimmed one.

    `padded_bytes` and `trimmed_bytes`: weights read per draft token; `ratio` between them, about the ratio of the times where
    reading weights is what takes time. Equal where the head is not trimmed.
    """
    trimmed = weight_bytes_per_pass(arch, DTYPE_BYTES[dtype])
    padded = weight_bytes_per_pass(arch.replace(draft_vocab_size=None), DTYPE_BYTES[dtype])
    return {"trimmed_bytes": trimmed, "padded_bytes": padded, "ratio": padded / trimmed}
