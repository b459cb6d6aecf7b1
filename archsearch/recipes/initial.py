"""First weights of a recipe's drafter, by archsearch's own initialisation: cut out of the target's
layers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from archsearch.architecture.architecture import Architecture
from archsearch.errors import MissingDataError
from archsearch.files import atomic_path, read_json, write_json
from archsearch.models.targets import resolve_target

if TYPE_CHECKING:
    import torch

RECIPE_FILE: Final = "recipe.json"
DRAFTER: Final = "drafter"
CALIBRATION: Final = 32  # answers on which the target's channels are weighed


def initial_weights(folder: Path, target: str | None = None, answers: Sequence[Path] = ()) -> Path:
    """Write model.safetensors into `folder`/drafter, in the form of the library of
    `folder`/recipe.json; its path.

    `target`: folder or hub id of the target's weights (None: as the recipe names it). `answers`:
    the target's own text, lines with `input_ids` and `loss_mask`: a trimmed head keeps the tokens
    that it writes most. Raises MissingDataError for a trimmed head without text, ArchsearchError
    for a target without weights or of a kind that cannot be cut.
    """
    import torch

    from archsearch.models.load import load_target
    from archsearch.training.heads.folder import head_maps, write_weights

    recipe = read_json(folder / RECIPE_FILE, "recipe")
    shape = Architecture.from_dict(recipe["architecture"])
    rows = _rows(answers)
    if shape.trimmed and recipe["family"] != "independent" and not rows:
        raise MissingDataError(
            f"the head keeps {shape.head_rows:,} of {shape.vocab_size:,} tokens, those that the"
            " target writes most: let it write first (answers.py)"
        )
    model, tokenizer = load_target(resolve_target(target or recipe["target"]), "float32", "cpu")
    out = folder / DRAFTER
    if recipe["family"] == "independent":
        from archsearch.models.drafts import save_draft
        from archsearch.training.initialise import initialise_draft

        # ids [answers, tokens] of equal length
        ids: list[list[int]] = [row["input_ids"] for row in rows[:CALIBRATION]]
        shortest = min(map(len, ids), default=0)
        text = torch.tensor([each[:shortest] for each in ids]) if shortest > 1 else None
        draft = initialise_draft(model, shape.replace(draft_vocab_size=None), calibration_ids=text)
        draft = draft.to(torch.bfloat16)  # type: ignore[arg-type]
        save_draft(draft, out, tokenizer=tokenizer, gamma=recipe["gamma"])
        return out / "model.safetensors"
    kept = _kept(rows, shape, tokenizer)
    maps = head_maps(torch.tensor(kept), shape.vocab_size)
    tensors = _head(model, shape, recipe, kept) | maps
    # layers that come from the target turn their keys as it does
    config = read_json(out / "config.json", "the drafter's config")
    rope = dict(model.config.rope_parameters)
    layers = config.get("transformer_layer_config", config)
    layers |= {"rope_parameters": rope, "rope_theta": rope["rope_theta"]}
    write_json(out / "config.json", config)
    _write_maps(out, kept, maps)
    write_weights(out, tensors)
    return out / "model.safetensors"


def _rows(answers: Sequence[Path]) -> list[Mapping[str, Any]]:
    return [
        json.loads(line)
        for path in answers
        for line in path.read_text(encoding="utf-8").splitlines()
        if line
    ]


def _kept(
    rows: Sequence[Mapping[str, Any]], shape: Architecture, tokenizer: Any
) -> tuple[int, ...]:
    import numpy as np

    from archsearch.text.vocabulary import TokenFrequencies, choose_draft_vocab

    if not shape.trimmed:
        return tuple(range(shape.vocab_size))
    counts = TokenFrequencies(*np.zeros((2, shape.vocab_size), np.int64))
    for row in rows:
        ids, mask = np.array(row["input_ids"]), np.array(row["loss_mask"], dtype=bool)
        np.add.at(counts.written, ids[mask], 1)
        np.add.at(counts.text, ids[~mask], 1)
    return choose_draft_vocab(counts, shape.head_rows, tokenizer).token_ids


def _head(
    model: object, shape: Architecture, recipe: Mapping[str, Any], kept: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Tensors of an EAGLE-3 or P-EAGLE head, with the names that speculators, SpecForge and vLLM
    read."""
    from archsearch.training.heads.eagle3 import initialise_eagle3
    from archsearch.training.heads.folder import eagle3_config

    mask = recipe.get("mask_token_id")
    head = initialise_eagle3(
        model, eagle3_config(shape, model), recipe["layers_read"], kept, 0, mask
    )
    # float32: libraries load the dtype of the file, and train in it.
    tensors = {name: value.detach().float() for name, value in head.saved().items()}
    if recipe["library"] == "specforge":  # its one layer is called midlayer
        tensors = {name.replace("layers.0.", "midlayer."): value for name, value in tensors.items()}
    else:  # speculators leaves an embedding that its file does not hold at zeros
        tensors["embed_tokens.weight"] = head.embedding.weight.detach().clone()
    return tensors


def _write_maps(out: Path, kept: Sequence[int], maps: Mapping[str, torch.Tensor]) -> None:
    """The rows of the head as each library reads them: speculators two arrays, SpecForge one file
    of torch."""
    import numpy as np
    import torch

    for name, values in maps.items():
        with atomic_path(out / f"{name}.npy") as temporary, open(temporary, "wb") as file:
            np.save(file, values.numpy())
    if maps:
        with atomic_path(out / "vocab_mapping.pt") as temporary:
            torch.save(maps, temporary)
        write_json(out / "kept.json", {"draft_token_ids": list(kept)})
