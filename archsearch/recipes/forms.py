"""The drafter's config.json and the training's settings, each in its library's own form."""

from __future__ import annotations

import json
from typing import Final

from archsearch.architecture.hf_fields import Config
from archsearch.drafters.forms import (
    auxiliary_layers,
    drafter_config,
    proposals,
    speculators_config,
    transformer_layers,
)
from archsearch.drafters.heads import DFlash, FeatureDrafter, PEagle
from archsearch.engine_facts import ENGINES
from archsearch.errors import ArchsearchError
from archsearch.recipes.plan import CHECKPOINTS, LONGEST, Recipe

DATA: Final = "data/train.jsonl"
PREPARED: Final = "data/prepared"
CHECKPOINT_FOLDER: Final = "checkpoints"
MAPPING: Final = "drafter/vocab_mapping.pt"
PORT: Final = 8000


def check_shape(recipe: Recipe) -> None:
    """Raise ArchsearchError for a shape that the library cannot train."""
    library, shape = recipe.library, recipe.drafter.architecture
    wide = recipe.target.hidden_size
    why = ENGINES["vllm"].lacks(recipe.family, target=recipe.target.model_type)
    if why and library.name != "archsearch":
        raise ArchsearchError(f"a recipe's scripts run vLLM: {why}")
    trains = f"{library.title} {library.version} trains"
    if library.whole_width and shape.hidden_size != wide:
        raise ArchsearchError(
            f"{trains} heads as wide as their target ({wide}), this one has {shape.hidden_size};"
            " choose another --rank, or --with archsearch"
        )
    if recipe.family in library.one_layer and shape.num_hidden_layers > 1:
        raise ArchsearchError(
            f"{trains} {recipe.family} heads of one layer, this one has {shape.num_hidden_layers};"
            " use --with speculators"
        )


def drafter_form(recipe: Recipe) -> dict[str, object]:
    """config.json of the drafter as the library reads it."""
    drafter, target = recipe.drafter, recipe.target
    if recipe.library.name == "trl":
        # transformers has no head of fewer rows: engines compute the padded one, and GKD compares
        # whole vocabularies.
        drafter = type(drafter)(drafter.architecture.replace(draft_vocab_size=None))
    config = drafter_config(drafter, target)
    assert config is not None, f"no form for {recipe.family}"
    if recipe.library.name != "speculators":
        return config
    if isinstance(drafter, DFlash):
        return _speculators_dflash(drafter, recipe, config)
    form = speculators_config(config, recipe.gamma, recipe.target_name)
    form |= {"speculators_version": recipe.library.version}
    if isinstance(drafter, PEagle):
        form |= {
            "architectures": ["PEagleSpeculator"],
            "speculators_model_type": "peagle",
            "mask_token_id": config["ptd_token_id"],
            "embed_requires_grad": True,
        }
        form["speculators_config"]["algorithm"] = "peagle"
    return form


def _speculators_dflash(drafter: DFlash, recipe: Recipe, config: Config) -> dict[str, object]:
    """A DFlash config as speculators reads it: its layers are named by their inputs, as EAGLE-3's
    are."""
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": recipe.library.version,
        "draft_vocab_size": config["draft_vocab_size"],
        "block_size": drafter.block,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": list(layers_read(recipe)),
        "mask_token_id": config["dflash_config"]["mask_token_id"],
        "transformer_layer_config": transformer_layers(config),
        "speculators_config": proposals("dflash", drafter.block - 1, recipe.target_name, []),
    }


def layers_read(recipe: Recipe) -> tuple[int, ...]:
    """The target's layers whose inputs the drafter reads; () where it reads none."""
    drafter = recipe.drafter
    if not isinstance(drafter, FeatureDrafter) or drafter.states < 2:
        return ()
    return auxiliary_layers(recipe.target.num_hidden_layers, drafter.states)


def extraction(recipe: Recipe) -> dict[str, str]:
    """vLLM's options for a target that hands its hidden states to speculators: what its own
    launch_vllm.py writes (repository vllm-project/speculators), the last layer besides those that
    the drafter reads."""
    layers = [*layers_read(recipe), recipe.target.num_hidden_layers]
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
    }
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": "data/hidden_states"},
    }
    return {
        "--speculative-config": json.dumps(speculative),
        "--kv-transfer-config": json.dumps(transfer),
    }


def speculators_training(recipe: Recipe) -> dict[str, object]:
    """train.yaml of `speculators train --config`."""
    chosen = recipe.settings
    drafter = recipe.drafter
    scheduled = {"scheduler_type": chosen.pop("scheduler_type")}
    optimizer = {name: chosen.pop(name) for name in ("optimizer", "lr", "weight_decay")}
    length = chosen.pop("total_seq_len")
    data: dict[str, object] = {
        "data_path": PREPARED,
        "total_seq_len": length,
        "train_data_ratio": 0.99,
    }
    if "max_anchors" in chosen:
        data["max_anchors"] = chosen.pop("max_anchors")
    loss: dict[str, object] = {"loss_fn": chosen.pop("loss_fn")}
    if recipe.family == "eagle3":
        loss["ttt_steps"] = recipe.gamma
    own: dict[str, dict[str, object]] = {}
    if isinstance(drafter, PEagle):
        own["peagle"] = {"num_depths": drafter.most, **chosen}
    elif isinstance(drafter, DFlash):
        own["dflash"] = {"block_size": drafter.block, **chosen}
    trimmed = drafter.architecture.trimmed
    maps = (
        {"d2t_path": "drafter/d2t.npy", "t2d_path": "drafter/t2d.npy"}
        if trimmed and recipe.initialised
        else {}
    )
    rows = {"draft_vocab_size": drafter.architecture.head_rows} if trimmed else {}
    return {
        "train": {
            "speculator_type": recipe.family,
            "seed": 0,
            "verifier": {"verifier_name_or_path": recipe.target_name},
            "draft": {"from_pretrained": "drafter", **rows, **maps},
            "data": data,
            "generation": {
                "vllm_endpoint": f"http://localhost:{PORT}/v1",
                "on_missing": "generate",
            },
            "loss": loss,
            "optimizer": optimizer,
            "scheduler": scheduled,
            "trainer": {
                "epochs": max(1, round(recipe.epochs)),
                "checkpoint_freq": 1 / CHECKPOINTS,
                "save_path": CHECKPOINT_FOLDER,
            },
            **own,
        }
    }


def specforge_training(recipe: Recipe) -> dict[str, object]:
    """train.yaml of `specforge train --config`: a stack of its own on one machine
    (managed_local)."""
    chosen = recipe.settings
    length = chosen.pop("max_length")
    devices = [str(each) for each in recipe.gpus.trainer]
    ranks = recipe.gpus.ranks
    servers = [
        {
            "port": 30000 + 10 * number,
            "cuda_visible_devices": [
                str(each) for each in recipe.gpus.teacher[number * ranks : (number + 1) * ranks]
            ],
            "tp_size": ranks,
            "mem_fraction_static": recipe.gpus.memory,
        }
        for number in range(len(recipe.gpus.teacher) // ranks)
    ]
    model: dict[str, object] = {
        "target_model_path": recipe.target_name,
        "draft_model_config": "drafter/config.json",
        "target_backend": "sglang",
        "torch_dtype": "bfloat16",
    }
    if how := ENGINES["sglang"].quantises.get(recipe.quantise):
        model["sglang_quantization"] = how
    if recipe.initialised:
        model["draft_checkpoint_path"] = "drafter"
    if recipe.drafter.architecture.trimmed:
        model["vocab_mapping_path"] = MAPPING
    if recipe.target.tie_word_embeddings:
        model["lm_head_key"] = "model.embed_tokens.weight"
    return {
        "model": model,
        "data": {"prompts_path": DATA, "max_length": min(length, LONGEST)},
        "training": {
            "strategy": recipe.family,
            "num_epochs": max(1, round(recipe.epochs)),
            **chosen,
            "save_interval": 1000,
            "log_interval": 50,
            "seed": 0,
        },
        "run_id": f"{recipe.family}-rank-{recipe.rank}",
        "output_dir": CHECKPOINT_FOLDER,
        "deployment": {
            "mode": "disaggregated",
            "trainer": {"nnodes": 1, "nproc_per_node": len(devices)},
            "disaggregated": {
                "control_dir": f"{CHECKPOINT_FOLDER}/control",
                "backend": "mooncake",
                "managed_local": {
                    "trainer_cuda_visible_devices": devices,
                    "capture_servers": servers,
                },
            },
        },
    }


def trl_training(recipe: Recipe) -> dict[str, object]:
    """train.json: arguments of TRL's GKDConfig."""
    return {
        **recipe.settings,
        "num_train_epochs": max(1.0, recipe.epochs),
        "max_length": recipe.longest,
        "save_strategy": "steps",
        "save_steps": 1 / CHECKPOINTS,
        "logging_steps": 10,
        "bf16": True,
        "seed": 0,
        "report_to": "none",
        "output_dir": CHECKPOINT_FOLDER,
    }


def accelerate_form(recipe: Recipe) -> dict[str, object]:
    """accelerate.yaml: a copy of both models on every GPU, or shards of them where one may not hold
    the target in 16 bits."""
    form: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if len(recipe.gpus.trainer) > 1 else "NO",
        "mixed_precision": "bf16",
        "num_machines": 1,
        "num_processes": len(recipe.gpus.trainer),
    }
    if recipe.gpus.ranks > 1 or (recipe.quantise and len(recipe.gpus.trainer) > 1):
        form |= {
            "distributed_type": "FSDP",
            "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
        }
    return form
