"""Exported heads on hidden states: the folder that engines load, the speculators form beside it, each engine's command line.

Formats and commands as in November 2026: vLLM 0.32 (config/speculative.py, models/llama_eagle3.py, models/medusa.py), SGLang
0.5.23 (server_args.py), TensorRT-LLM 1.3/1.4rc (llmapi/llm_args.py), speculators 0.7 (models/eagle3/config.py).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import archsearch
from archsearch.drafters.registry import family as family_class
from archsearch.errors import ArchsearchError
from archsearch.export.drafters import VLLM
from archsearch.export.engines import Serving
from archsearch.export.folder import MARKER, building, check_output
from archsearch.export.schedule import last_drafting, sglang_schedule, tensorrt_schedule
from archsearch.files import read_json, write_json, write_text
from archsearch.models.drafters import HeadFamily
from archsearch.models.files import TOKENIZER_FILES, WEIGHTS_FILE
from archsearch.schedule import Ranges, largest_gamma

ADAPTIVE_FILE: Final = "sglang-adaptive.json"
SPECULATORS_FILE: Final = "speculators_config.json"
TRANSFORMER_FIELDS: Final = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings", "hidden_act", "attention_bias", "mlp_bias",
    "rope_theta", "rope_parameters", "rope_scaling", "tie_word_embeddings",
)  # fmt: skip


@dataclass(frozen=True)
class HeadExport:
    """A head's `folder`, its family, the gamma it is served with, its target (folder or hub id), its training.json, and gamma by
    batch size where that was planned."""

    folder: Path
    family: HeadFamily
    gamma: int
    target: str
    record: Mapping[str, Any]
    schedule: Ranges = ()


def export_head(source: HeadExport, output: Path) -> dict[str, Any]:
    """Write `source` to `output`; returns what was written. Raises ArchsearchError where `output` holds anything but an earlier
    export, or cannot be written."""
    output = output.expanduser().absolute()
    check_output(source.folder, output)
    served = serving_heads(source, output)
    with building(output) as folder:
        for name in ("config.json", WEIGHTS_FILE, *TOKENIZER_FILES):
            if (source.folder / name).is_file():
                shutil.copyfile(source.folder / name, folder / name)
        if source.family == "eagle3":
            config = read_json(source.folder / "config.json", "the head's config")
            write_json(folder / SPECULATORS_FILE, speculators_config(config, source.gamma, source.target))
        config = vllm_config(source.family, str(output), source.gamma, source.schedule)
        write_json(folder / "speculative_config.json", config)
        for each in served:
            for name, text in each.files.items():
                write_text(folder / name, text)
        write_text(folder / "README.md", _card(source, served))
        write_json(
            folder / MARKER,
            {
                "archsearch": archsearch.__version__,
                "family": source.family,
                "gamma": source.gamma,
                "schedule": [list(entry) for entry in source.schedule],
                "target": source.target,
                "commands": {each.engine: list(each.command) for each in served},
                "training": {key: value for key, value in source.record.items() if key not in ("curve", "loss_curve")},
            },
        )
    return {"output": str(output), "engines": [each.engine for each in served]}


def vllm_config(family: HeadFamily, model: str, gamma: int, schedule: Ranges = ()) -> dict[str, Any]:
    """vLLM's --speculative-config: `gamma`, or with a schedule its largest gamma and the ranges."""
    most = largest_gamma(schedule, gamma)
    config: dict[str, Any] = {**VLLM[family], "model": model, "num_speculative_tokens": most}
    if any(entry[2] != most for entry in schedule):
        config["num_speculative_tokens_per_batch_size"] = [list(entry) for entry in schedule]
    return config


def serving_heads(source: HeadExport, folder: Path) -> tuple[Serving, ...]:
    """How each engine that runs the family is told to use the head."""
    target, gamma = source.target, source.gamma
    schedule, most = source.schedule, largest_gamma(source.schedule, gamma)
    config = json.dumps(vllm_config(source.family, str(folder), gamma, schedule))
    vllm = Serving("vllm", ("vllm", "serve", target, "--speculative-config", config), notes=_vllm_notes(source.family))
    if source.family in ("medusa", "peagle"):
        return (vllm,)
    sglang = Serving(
        "sglang",
        (
            *("python", "-m", "sglang.launch_server", "--model-path", target, "--speculative-algorithm", "EAGLE3"),
            *("--speculative-draft-model-path", str(folder), "--speculative-num-steps", str(most)),
            *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(most + 1)),
            *(("--speculative-adaptive", "--speculative-adaptive-config", str(folder / ADAPTIVE_FILE)) if schedule else ()),
        ),
        {ADAPTIVE_FILE: json.dumps(sglang_schedule(schedule), indent=1) + "\n"} if schedule else {},
        notes=(
            f"SGLang counts the target's own token: {most + 1} draft tokens are gamma {most}.",
            *((f"`{ADAPTIVE_FILE}`: one candidate from each batch size on; 0 is off.",) if schedule else ()),
        ),
    )
    planned = f", {words}" if (words := tensorrt_words(schedule)) else ""
    tensorrt = Serving(
        "tensorrt-llm",
        ("trtllm-serve", target, "--extra_llm_api_options", "eagle3.yaml"),
        notes=(
            f"In eagle3.yaml: `speculative_config: {{decoding_type: Eagle3, max_draft_len: {_tensorrt_gamma(source)}, "
            f"speculative_model: {folder}, eagle3_layers_to_capture: {_layers(source.folder)}{planned}}}`.",
        ),
    )
    return vllm, sglang, tensorrt


def _tensorrt_gamma(source: HeadExport) -> int:
    """max_draft_len: the schedule's largest gamma where TensorRT-LLM can say the schedule."""
    return largest_gamma(source.schedule, source.gamma) if tensorrt_schedule(source.schedule) else source.gamma


def tensorrt_words(schedule: Ranges) -> str:
    """The schedule among TensorRT-LLM's options, or where it stops drafting; "" where neither can be said."""
    told, most = tensorrt_schedule(schedule), last_drafting(schedule)
    if told is not None:
        return f"draft_len_schedule: {told}"
    return f"max_concurrency: {most}" if most is not None else ""


def _vllm_notes(family: HeadFamily) -> tuple[str, ...]:
    if family == "medusa":
        return (
            "All rows of the vocabulary are in the file, those of dropped tokens so that they never win: vLLM 0.32 refuses a "
            "truncated head.",
            "vLLM runs Medusa with one gamma for all batch sizes.",
        )
    if family == "peagle":
        return ("All draft tokens come from one pass (`parallel_drafting`); vLLM runs it with one gamma for all batch sizes.",)
    return (
        'For a temperature above 0 add `"draft_sample_method": "probabilistic"`: else vLLM drafts greedily and accepts less.',
        f"`{SPECULATORS_FILE}` is the same head's config in the form of speculators: to load it so, use it as config.json.",
    )


def _layers(folder: Path) -> list[int]:
    config = read_json(folder / "config.json", "the head's config")
    return list(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])


def speculators_config(config: Mapping[str, Any], gamma: int, target: str) -> dict[str, Any]:
    """The speculators form of an EAGLE-3 head's config. `norm_before_residual` is always there: vLLM takes its absence for true
    in this form, and for false in the other."""
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.7.0",
        "draft_vocab_size": config["draft_vocab_size"],
        "norm_before_residual": bool(config["norm_before_residual"]),
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "target_hidden_size": None if config["target_hidden_size"] == config["hidden_size"] else config["target_hidden_size"],
        "eagle_aux_hidden_state_layer_ids": list(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]),
        "transformer_layer_config": {name: config[name] for name in TRANSFORMER_FIELDS if name in config},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": gamma, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": target, "architectures": ["LlamaForCausalLM"]},
        },
    }


def _card(source: HeadExport, served: tuple[Serving, ...]) -> str:
    """README.md: what it is, how good it is on held-out text, how it is served."""
    record = source.record
    held = record["heldout"]
    tau = held["tau"].get(str(source.gamma)) or held["tau"].get(source.gamma)
    if tau is None:
        raise ArchsearchError(f"the head was not measured at gamma {source.gamma}; train it again")
    title = family_class(source.family).title
    shares = ", ".join(f"{share:.2f}" for share in held["conditional"][: source.gamma])
    lines = [
        f"# {title} for {source.target}",
        "",
        f"Trained by archsearch {archsearch.__version__} on {record['text_tokens']:,} tokens that the target wrote; keeps "
        f"{record['rows']:,} tokens of the vocabulary ({record['vocabulary_coverage']:.1%} of what it wrote).",
        "",
        f"On held-out text {tau['value']:.2f} tokens a round at gamma {source.gamma}; draft tokens right, given those before: "
        f"{shares}. Check after the first start that the engine's acceptance at position 1 is near "
        f"{_walk(held, source.gamma):.2f}: an engine that reads other layers, or norms in another order, says nothing and "
        "accepts less.",
        "",
    ]
    for each in served:
        lines += [f"## {each.engine}", "", "```", each.shell(), "```", "", *(f"- {note}" for note in each.notes), ""]
    return "\n".join(lines)


def _walk(held: Mapping[str, Any], gamma: int) -> float:
    found = held["accepted_by_position"]
    return float((found.get(str(gamma)) or found[gamma])[0])
