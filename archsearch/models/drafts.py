"""Drafts: built from a shape, with a trimmed head where the shape has one; saved and loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.hf_config import from_hf_config, read_architecture, to_hf_config
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.files import (
    atomic_path,
    plain_os_errors,
    read_json,
    scratch_dir,
    write_json,
    writing,
)
from archsearch.models.files import DRAFT_VOCAB_FILE, WEIGHTS_FILE, gamma_settings, has_weights
from archsearch.models.runtime import load_checked, quiet_transformers, torch_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class TrimmedHead(nn.Module):
    """A language-model head that has rows for `draft_token_ids` only and answers -inf for every
    other token.

    forward: [..., hidden] -> [..., vocab]. Raises ArchsearchError for ids that are not distinct or
    lie outside the vocabulary.
    """

    draft_token_ids: Tensor

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        draft_token_ids: Sequence[int],
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        ids = sorted(int(token) for token in draft_token_ids)
        distinct = len(set(ids))
        if not ids or ids[0] < 0 or ids[-1] >= vocab_size or distinct != len(ids):
            span = f"{ids[0]} to {ids[-1]}, {distinct} distinct of {len(ids)}" if ids else "none"
            raise ArchsearchError(
                f"draft token ids must be distinct and lie between 0 and {vocab_size - 1}, got"
                f" {span}"
            )
        self.in_features, self.out_features = hidden_size, vocab_size
        self.weight = nn.Parameter(torch.empty(len(ids), hidden_size, dtype=dtype))
        self.register_buffer("draft_token_ids", torch.tensor(ids, dtype=torch.long))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, hidden: Tensor) -> Tensor:
        kept = functional.linear(hidden, self.weight)
        logits = kept.new_full((*kept.shape[:-1], self.out_features), float("-inf"))
        return logits.index_copy_(-1, self.draft_token_ids, kept)


def head_token_ids(model: nn.Module) -> Tensor | None:
    """The ids [kept] (sorted) that a trimmed head proposes, None for a full head."""
    return getattr(model.lm_head, "draft_token_ids", None)


def build_draft(
    arch: Architecture,
    dtype: torch.dtype | str = torch.float32,
    draft_token_ids: Sequence[int] | None = None,
    seed: int = 0,
    **config_fields: object,
) -> PreTrainedModel:
    """The Hugging Face module of `arch` with random weights, in eval mode; the caller's random
    state is left alone.

    `draft_token_ids`: the tokens a trimmed head keeps (default 0..n-1). `config_fields` (token ids,
    rms_norm_eps, rope_parameters) go into the config. Raises ArchsearchError where token ids and
    head rows differ in number.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if draft_token_ids is not None and len(draft_token_ids) != arch.head_rows:
        raise ArchsearchError(
            f"the draft's head has {arch.head_rows} rows, but {len(draft_token_ids)} token ids were"
            " given"
        )
    fields = to_hf_config(arch, **config_fields)
    # While it is built, a trimmed model ties its head: no [vocab, hidden] matrix is made only to be
    # thrown away.
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
    model.lm_head = head
    model.config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}


def padding_row(kept_rows: Tensor, mean_hidden: Tensor | None) -> Tensor:
    """The row [hidden] that every dropped token gets in a padded head, float32.

    `kept_rows` [kept, hidden]; `mean_hidden` [hidden]: mean of the final, normalised hidden state.
    The row is -s * mean / |mean|^2, so the padded logit at hidden state h is -s times h's share of
    the mean (1 at the mean itself), with s = 2 * max |kept logit at the mean|. Where h points away
    from the mean a padded token may win (docs/decisions/004). Without a mean the row is zero (logit
    0).
    """
    if mean_hidden is None:
        return torch.zeros(kept_rows.shape[1], dtype=torch.float32)
    mean = mean_hidden.detach().float()
    scale = 2.0 * (kept_rows.detach().float() @ mean).abs().max()
    return -scale * mean / mean.square().sum().clamp_min(1e-12)


def padded_head(head: TrimmedHead, mean_hidden: Tensor | None) -> Tensor:
    """The full head [vocab, hidden] of a trimmed one in its dtype: kept rows as they are, padding
    rows elsewhere."""
    weight = head.weight.detach()
    full = padding_row(weight, mean_hidden).to(weight.dtype).expand(head.out_features, -1).clone()
    full[head.draft_token_ids] = weight
    return full


def save_draft(
    model: PreTrainedModel,
    folder: Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    gamma: int | None = None,
    mean_hidden: Tensor | None = None,
) -> None:
    """Write `model` as a draft folder, weights last; other files in `folder` stay.

    `gamma` goes to generation_config.json (transformers obeys it there); `mean_hidden` shapes the
    padding rows. Kept rows survive a round trip exactly in the model's dtype.
    """
    from safetensors.torch import save_file

    arch = from_hf_config(model.config.to_dict())
    ids = head_token_ids(model)
    state = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    if ids is not None:
        del state["lm_head.draft_token_ids"]
        state["lm_head.weight"] = padded_head(model.lm_head, mean_hidden)
    elif model.config.tie_word_embeddings:
        # safetensors refuses two names for one memory; the loader ties again.
        del state["lm_head.weight"]
    config = model.config.to_diff_dict()
    config["architectures"] = [type(model).__name__]
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    # Readers older than transformers 5 look here, not in rope_parameters.
    config.setdefault("rope_theta", arch.rope_theta)
    config["archsearch"] = {**config.get("archsearch", {}), "architecture": arch.to_dict()}
    generation = model.generation_config.to_dict()
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(tokenizer, key, None)
        for values in (config, generation):
            # A list (several end tokens) knows more.
            if value is not None and not isinstance(values.get(key), list):
                values[key] = value
    if gamma is not None:
        generation |= gamma_settings(gamma)
    if ids is not None:
        kept = {"target_vocab_size": arch.vocab_size, "draft_token_ids": ids.tolist()}
        write_json(folder / DRAFT_VOCAB_FILE, kept)
    else:
        (folder / DRAFT_VOCAB_FILE).unlink(missing_ok=True)
    write_json(folder / "config.json", config)
    said = {key: value for key, value in generation.items() if value is not None}
    write_json(folder / "generation_config.json", said)
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)
    with atomic_path(folder / WEIGHTS_FILE) as temporary, plain_os_errors():
        save_file(state, temporary, metadata={"format": "pt"})


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the tokenizer's files into `folder`, each by rename.

    Raises ArchsearchError where the folder cannot be written.
    """
    with (
        writing(f"the tokenizer to {folder}", "choose another folder"),
        scratch_dir(folder / "tokenizer") as temporary,
        plain_os_errors(),
    ):
        tokenizer.save_pretrained(temporary)
        for file in temporary.iterdir():
            os.replace(file, folder / file.name)


def load_draft(folder: Path, dtype: torch.dtype | str = torch.float32) -> PreTrainedModel:
    """The draft of `folder` in eval mode; where the folder names kept rows, its head computes those
    only.

    Raises ArchsearchError without config.json, MissingDataError without weights.
    """
    arch = read_architecture(folder)
    if not has_weights(folder):
        raise MissingDataError(
            f"no weights in {folder}; train the draft first, or give a folder with"
            " model.safetensors"
        )
    model = load_checked(folder, f"draft {folder.name!r}", torch_dtype(dtype))
    vocab_file = folder / DRAFT_VOCAB_FILE
    if vocab_file.is_file():
        data = read_json(vocab_file, "draft vocabulary")
        if (
            not isinstance(data, dict)
            or data.get("target_vocab_size") != arch.vocab_size
            or "draft_token_ids" not in data
        ):
            raise ArchsearchError(
                f"{vocab_file} must hold draft_token_ids and target_vocab_size={arch.vocab_size};"
                " export the draft again"
            )
        full = model.lm_head.weight.detach()
        trimmed = TrimmedHead(
            arch.hidden_size, arch.vocab_size, data["draft_token_ids"], full.dtype
        )
        with torch.no_grad():
            trimmed.weight.copy_(full[trimmed.draft_token_ids])
        _set_head(model, trimmed)
    return model.eval()
