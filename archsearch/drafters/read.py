"""A drafter's config.json as a drafter: EAGLE-1 and -3 (SafeAILab, SpecForge, speculators),
P-EAGLE, PARD, DFlash, Medusa.

Only shapes are read, never weights. What engines make of the same files: docs/families.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.hf_config import from_hf_config
from archsearch.architecture.hf_fields import Config, check_fields
from archsearch.drafters.drafter import Drafter
from archsearch.drafters.heads import DFlash, Eagle, Eagle3, FeatureDrafter, Medusa, PEagle
from archsearch.drafters.models import Pard
from archsearch.errors import ArchsearchError, InvalidShapeError

FAMILY_OF: Final = {  # by architectures[0] or speculators_model_type
    **{name: name for name in ("eagle3", "eagle", "peagle", "dflash", "medusa")},
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3LlamaForCausalLM": "eagle3",
    "Eagle3Speculator": "eagle3",
    "EagleLlamaForCausalLM": "eagle",
    "EagleSpeculator": "eagle",
    "PEagleSpeculator": "peagle",
    "DFlashDraftModel": "dflash",
    "DFlashSpeculator": "dflash",
    "MedusaModel": "medusa",
}
MASK_FIELDS: Final = ("ptd_token_id", "pard_token", "mask_token_id")
"""Fields of the id of a mask token (vLLM 0.32, `_init_parallel_drafting_params`): such a drafter
fills its block at once."""
NO_IDS: Final = (
    "its config names no eagle_aux_hidden_state_layer_ids: engines guess which layers it reads;"
    " write them"
)


def family_of_config(config: Config) -> str:
    """The family of a drafter's config.json; "" for one of a model that drafts token by token."""
    named = (
        *(config.get("architectures") or ()),
        config.get("speculators_model_type"),
        config.get("model_type"),
    )
    found = next(
        (FAMILY_OF[name] for name in named if isinstance(name, str) and name in FAMILY_OF), ""
    )
    if found == "eagle3" and any(config.get(name) is not None for name in MASK_FIELDS):
        return "peagle"
    return "pard" if not found and config.get("pard_token") is not None else found


def drafter_of_config(
    config: Config, target: Architecture, family: str = ""
) -> tuple[Drafter, list[str]]:
    """The drafter of a head's config for `target`, and a note on it. `family`: what the user
    says it is, "" for what its config says.

    Raises ArchsearchError: of another family, fields that are missing, width, vocabulary or layers
    of another target.
    """
    found = family_of_config(config)
    if family and found and found != family:
        raise ArchsearchError(f"its config.json is of the family {found}, not {family}")
    if (family or found) not in _READERS:
        raise ArchsearchError(
            f"no config of a {family or 'drafting'} head can be read; known are"
            f" {', '.join(_READERS)}"
        )
    check_fields(config)
    try:
        drafter = _READERS[family or found](config, target)
    except ArchsearchError:
        raise
    except (TypeError, ValueError, KeyError) as error:  # a field of another kind than expected
        raise ArchsearchError(f"its config.json cannot be read ({error})") from error
    drafter.check(target)
    ids = layer_ids(config)
    if len(set(ids)) < len(ids):
        raise InvalidShapeError(
            f"this {drafter.title} reads layers {', '.join(map(str, ids))}: name each layer once"
        )
    if ids and not (min(ids) >= 0 and max(ids) < target.num_hidden_layers):
        raise InvalidShapeError(
            f"this {drafter.title} reads layers {', '.join(map(str, ids))}, the target has layers 0"
            f" to {target.num_hidden_layers - 1}: it was made for another target"
        )
    return drafter, [] if ids or drafter.states_read < 2 else [NO_IDS]


def _decoder(config: Config) -> Architecture:
    nested = config.get("transformer_layer_config")
    layers = dict(nested if isinstance(nested, Mapping) else config)
    layers.setdefault("model_type", "llama")
    if "quantization_config" in config:
        layers.setdefault("quantization_config", config["quantization_config"])
    decoder = from_hf_config(layers).replace(tie_word_embeddings=False)
    rows = config.get("draft_vocab_size") or layers.get("draft_vocab_size")
    trimmed = isinstance(rows, int) and rows != decoder.vocab_size
    return decoder.replace(draft_vocab_size=rows if trimmed else None)


def layer_ids(config: Config) -> tuple[int, ...]:
    """The target's layers that it reads, where the config says so; InvalidShapeError for others."""
    places = (config, config.get("eagle_config"), config.get("dflash_config"))
    names = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids")
    known = [place for place in places if isinstance(place, Mapping)]
    given = ((name, place.get(name)) for place in known for name in names)
    name, ids = next((each for each in given if each[1]), ("", ()))
    if not isinstance(ids, list | tuple) or not all(type(each) is int for each in ids):
        raise InvalidShapeError(
            f"{name} must be a list of numbers of the target's layers, got {ids!r}"
        )
    return tuple(ids)


def _feature(made: type[FeatureDrafter]) -> Callable[[Config, Architecture], Drafter]:
    def read(config: Config, target: Architecture) -> Drafter:
        decoder = _decoder(config)
        width = int(config.get("target_hidden_size") or decoder.hidden_size)
        states = len(layer_ids(config)) or made.usual_states()
        return made(decoder, width, states, decoder.hidden_size != width)

    return read


def _medusa(config: Config, target: Architecture) -> Drafter:
    width = int(config.get("hidden_size") or target.hidden_size)
    rows = int(config.get("vocab_size") or target.vocab_size)
    if width != target.hidden_size:
        raise InvalidShapeError(
            f"these Medusa heads read hidden states of width {width}, the target's have"
            f" {target.hidden_size}: they were made for another target"
        )
    heads = config.get("num_heads") or config.get("medusa_num_heads")
    if not isinstance(heads, int) or heads < 1:
        raise ArchsearchError("its config.json needs num_heads, how many Medusa heads there are")
    residual = int(config.get("num_hidden_layers") or config.get("medusa_num_layers") or 1)
    shared = bool(config.get("original_lm_head", False))
    return Medusa(target.replace(vocab_size=rows), heads, residual, shared)


_READERS: Final[Mapping[str, Callable[[Config, Architecture], Drafter]]] = {
    "eagle3": _feature(Eagle3),
    "eagle": _feature(Eagle),
    "peagle": _feature(PEagle),
    "dflash": _feature(DFlash),
    "medusa": _medusa,
    "pard": lambda config, _: Pard(from_hf_config(config)),
}
