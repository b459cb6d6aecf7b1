"""Model folders converted once to OpenVINO's own format (IR), and kept in a cache by content; its
errors as one line each."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from loop import Failed, UserError


def last_line(error: BaseException) -> str:
    """The line of an error that says most: OpenVINO writes where it was thrown first and what is
    wrong last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]


@contextlib.contextmanager
def openvino_errors(what: str) -> Iterator[None]:
    """OpenVINO throws RuntimeErrors of many lines; the last one says what is wrong."""
    try:
        yield
    except RuntimeError as error:
        line = last_line(error)
        if "allocate" in str(error).lower() or "out of memory" in str(error).lower():
            raise MemoryError(line) from error
        raise Failed(f"{what}: {line}") from error


CONVERTER = 1
"""Part of the cache key: raise it when the same folder must be converted again."""
EAGLE3_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")


def precision(dtype: str, capabilities: Sequence[str]) -> tuple[str, str]:
    """(weights in the IR, INFERENCE_PRECISION_HINT) for `dtype` on a device that can do
    `capabilities`; docs/engines.md says why."""
    if dtype == "float32":
        return "fp32", "f32"
    native = {"bfloat16": ("BF16", "FP16"), "float16": ("FP16", "BF16")}.get(dtype)
    if native is None:
        raise UserError(f"OpenVINO GenAI runs bfloat16, float16 or float32, got dtype {dtype!r}")
    names = {"BF16": "bf16", "FP16": "f16"}
    return "fp16", next((names[kind] for kind in native if kind in capabilities), "f32")


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder."""
    return dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def weight_files(folder: Path) -> list[Path]:
    """The weights of a model folder, sorted by name."""
    return sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")])


def content_key(folder: Path, weights: str, dummy: bool) -> str:
    """A name for what the conversion of `folder` gives: its config, its weights, their format and
    the converter's version."""
    digest = hashlib.blake2b(digest_size=16)
    versions = [version_of(package) for package in ("openvino", "optimum-intel")]
    digest.update(json.dumps([CONVERTER, weights, dummy, versions]).encode())
    for file in [folder / "config.json", *([] if dummy else weight_files(folder))]:
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def version_of(package: str) -> str | None:
    """Of a package of this interpreter; None where it is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def converted(folder: Path, cache: Path, weights: str, dummy: bool) -> Path:
    """The IR of `folder`, made in `cache` unless it is there. It appears by rename, so what is
    there is whole."""
    target = cache / f"{content_key(folder, weights, dummy)}-{weights}"
    if (target / "openvino_model.xml").is_file():
        return target
    for module in ("optimum.intel", "torch"):
        with contextlib.suppress(ModuleNotFoundError):
            if importlib.util.find_spec(module) is not None:
                continue
        raise UserError(
            f"{sys.executable} has no {module}, which converts models for OpenVINO; run: archsearch"
            " engine install openvino"
        )
    try:
        cache.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=cache, prefix=".building."))
    except OSError as error:
        raise UserError(
            f"cannot write the cache {cache}: {error.strerror or error}; set ARCHSEARCH_CACHE to"
            " another folder"
        ) from error
    try:
        _convert(folder, work / "source", work / "ir", weights, dummy)
        stub_tokenizer(work / "ir")
        try:
            (work / "ir").rename(target)
        except OSError:  # another process was first: its copy is as good
            if not (target / "openvino_model.xml").is_file():
                raise
    except (UserError, Failed, MemoryError):
        raise
    except Exception as error:
        kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
        words = f"cannot convert {folder} for OpenVINO: {kind}{last_line(error)}"
        raise Failed(words) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _convert(folder: Path, source: Path, ir: Path, weights: str, dummy: bool) -> None:
    """optimum-intel's export of config and weights alone: tokenizers and generation defaults of a
    folder must not matter."""
    # A torchvision built for another torch (pip picks one for optimum-intel) breaks the import;
    # language models need none.
    sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig

    source.mkdir()
    if dummy:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.float32
        ).save_pretrained(source)
    else:
        files = weight_files(folder)
        if not files:
            raise UserError(
                f"no weights in {folder}; train the model first, or give a folder with"
                " model.safetensors"
            )
        indices = [
            file for file in folder.glob("*.index.json") if not file.name.startswith("openvino")
        ]
        if (read_config(folder).get("architectures") or [""])[0] in EAGLE3_ARCHITECTURES:
            _convert_eagle3(folder, files, ir, weights)
            return
        for file in [folder / "config.json", *files, *indices]:
            (source / file.name).symlink_to(file.resolve())
    main_export(
        str(source),
        str(ir),
        task="text-generation-with-past",
        ov_config=OVConfig(dtype=weights),
        convert_tokenizer=False,
        local_files_only=True,
        library_name="transformers",
        stateful=True,
    )


def check_layers(head: Path, target: Path) -> None:
    """Raise UserError where an EAGLE-3 head does not read what OpenVINO GenAI hands over: the
    inputs of layers 2, n / 2, n - 3.

    It takes others in C++ only (`hidden_layers_list` must be a vector of int32, which Python cannot
    make).
    """
    config, whole = read_config(head), read_config(target)
    ids = list((config.get("eagle_config") or config).get("eagle_aux_hidden_state_layer_ids") or [])
    layers = int(whole["num_hidden_layers"])
    handed = [2, layers // 2, layers - 3]
    if layers < 10 or ids != handed:
        raise UserError(
            f"OpenVINO GenAI hands the states of layers {handed} of a target of 10 layers and more"
            f" to an EAGLE-3 head; this one has {layers} and the head reads {ids}: use --engine"
            " vllm"
        )


def _convert_eagle3(folder: Path, files: Sequence[Path], ir: Path, weights: str) -> None:
    """An EAGLE-3 head through optimum-intel's class for it, loaded here: main_export would ask for
    packages it has no use for.

    Its embedding is the target's, which OpenVINO GenAI shares: zeros stand for it.
    """
    import torch
    from optimum.exporters.openvino.convert import export_from_model
    from optimum.exporters.openvino.model_patcher import LlamaEagle3ForCausalLM
    from optimum.intel import OVConfig
    from safetensors.torch import load_file
    from transformers import LlamaConfig

    kept = read_config(folder)
    no_shape = ("archsearch", "auto_map", "model_type")
    config = LlamaConfig(**{name: kept[name] for name in kept if name not in no_shape})
    # The exporter identifies a library by the module of a class, and knows none of its own.
    named_class = type(
        "LlamaEagle3ForCausalLM", (LlamaEagle3ForCausalLM,), {"__module__": LlamaConfig.__module__}
    )
    model = named_class(config).float().eval()
    named = {
        f"model.{name.replace('layers.0.', 'midlayer.')}": tensor
        for file in files
        for name, tensor in load_file(file).items()
    }
    sizes = ("draft_vocab_size", "vocab_size", "hidden_size")
    rows, vocabulary, width = (int(kept[name]) for name in sizes)
    named.setdefault("model.d2t", torch.zeros(rows, dtype=torch.long))
    named.setdefault("model.t2d", torch.ones(vocabulary, dtype=torch.bool))
    named.setdefault("model.embed_tokens.weight", torch.zeros(vocabulary, width))
    try:
        model.load_state_dict(named)
    except RuntimeError as error:
        raise UserError(
            f"the weights in {folder} are not those of an EAGLE-3 head of one layer:"
            f" {last_line(error)}"
        ) from error
    export_from_model(
        model,
        ir,
        task="text-generation-with-past",
        stateful=True,
        ov_config=OVConfig(dtype=weights),
    )


def stub_tokenizer(folder: Path) -> None:
    """A tokenizer that answers token 0 to everything. OpenVINO GenAI insists on one, and on equal
    ones for target and draft; all that is asked here is token ids."""
    import numpy as np
    import openvino as ov
    from openvino import opset13 as op

    text = op.parameter([-1], ov.Type.string, name="text")
    shape = op.concat(
        [op.shape_of(text, output_type="i64"), op.constant(np.array([1], np.int64))], 0
    )
    ids = op.broadcast(op.constant(np.array(0, np.int64)), shape)
    mask = op.broadcast(op.constant(np.array(1, np.int64)), shape)
    ids.output(0).set_names({"input_ids"})
    mask.output(0).set_names({"attention_mask"})
    model = ov.Model([op.result(ids), op.result(mask)], [text], "tokenizer")
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        model.set_rt_info(0, name)
    ov.save_model(model, str(folder / "openvino_tokenizer.xml"))


def model_folder(source: str) -> Path:
    """`source` as a folder: itself, or the hub's copy of a model id."""
    if Path(source).is_dir():
        return Path(source)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(source, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:
        raise UserError(
            f"no folder {source}, and the hub does not give it: {last_line(error)}"
        ) from error
