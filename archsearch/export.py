"""A draft as a folder that engines load: transformers, vLLM, and archsearch itself."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import archsearch
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import parameters, weight_bytes_per_pass
from archsearch.architecture.hf_config import read_architecture
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.files import read_json, write_json, write_text
from archsearch.workload import DTYPE_BYTES

MARKER: Final = "export.json"
"""Written into every export; a folder that holds it may be replaced by the next one."""

DRAFT_FILES: Final = ("config.json", "model.safetensors", "draft_vocab.json")
TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def export(
    draft_folder: Path,
    output: Path,
    *,
    gamma: int,
    score: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
    target: str | None = None,
    confirmed: Mapping[str, Any] | None = None,
    padded_speedup: float | None = None,
) -> Path:
    """Write the draft of `draft_folder` to `output`, ready to serve with `gamma` draft tokens a round; returns `output`.

    The folder is built beside `output` and renamed, so it is never half-written. `score` (score.json) and `provenance` (what made
    the draft) are kept in it; `target` names the target in the commands of the README; `confirmed` (confirmed.json) and
    `padded_speedup` (predicted, for engines that compute the full head) go into the README.
    Raises MissingDataError without weights, ArchsearchError when `output` holds anything but an earlier export or cannot be
    written.
    """
    if gamma < 1:
        raise ArchsearchError(f"gamma must be at least 1, got {gamma}")
    arch = read_architecture(draft_folder)
    if not (draft_folder / "model.safetensors").is_file():
        raise MissingDataError(f"no model.safetensors in {draft_folder}; train the draft before exporting it")
    output = output.expanduser().absolute()
    _check_output(draft_folder, output)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}."))
    except OSError as error:
        raise ArchsearchError(f"cannot write {output}: {error.strerror or error}; choose a folder you can write to") from error
    try:
        _build(draft_folder, building, output, arch, gamma, score, provenance, target, confirmed, padded_speedup)
        building.chmod(0o755)
        _swap(building, output)
    except OSError as error:
        raise ArchsearchError(f"cannot write {output}: {error.strerror or error}; free space or choose another folder") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return output


def _check_output(draft_folder: Path, output: Path) -> None:
    if output.resolve() == draft_folder.resolve():
        raise ArchsearchError(f"output {output} is the draft's own folder; choose another one")
    if output.exists() and not output.is_dir():
        raise ArchsearchError(f"output {output} is a file; choose a folder")
    if output.is_dir() and any(output.iterdir()) and not (output / MARKER).is_file():
        raise ArchsearchError(f"output folder {output} is not empty and not an earlier export; empty it or choose another one")


def _build(
    draft_folder: Path,
    folder: Path,
    output: Path,
    arch: Architecture,
    gamma: int,
    score: Mapping[str, Any] | None,
    provenance: Mapping[str, Any] | None,
    target: str | None,
    confirmed: Mapping[str, Any] | None,
    padded_speedup: float | None,
) -> None:
    for name in (*DRAFT_FILES, *TOKENIZER_FILES):
        if (draft_folder / name).is_file():
            shutil.copyfile(draft_folder / name, folder / name)
    source = draft_folder / "generation_config.json"
    generation = read_json(source, "generation config") if source.is_file() else {}
    settings = {"num_assistant_tokens": gamma, "num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
    write_json(folder / "generation_config.json", {**generation, **settings})
    write_json(folder / "speculative_config.json", vllm_config(str(output), gamma))
    if score is not None:
        write_json(folder / "score.json", dict(score))
    dtype = str(confirmed["dtype"]) if confirmed else _dtype(draft_folder)
    card = model_card(
        arch, output, gamma=gamma, score=score, dtype=dtype, target=target, confirmed=confirmed, padded_speedup=padded_speedup
    )
    write_text(folder / "README.md", card)
    write_json(
        folder / MARKER,
        {
            "archsearch": archsearch.__version__,
            "gamma": gamma,
            "target": target,
            "architecture": arch.to_dict(),
            "provenance": dict(provenance or {}),
        },
    )


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


def vllm_config(model: str, gamma: int) -> dict[str, Any]:
    """vLLM's --speculative-config for a draft model."""
    return {"method": "draft_model", "model": model, "num_speculative_tokens": gamma}


def padded_head_cost(arch: Architecture, dtype: str) -> dict[str, float]:
    """What an engine pays that computes the full head of a draft trained with a trimmed one.

    `padded_bytes` and `trimmed_bytes`: weights read per draft token; `ratio` between them, about the ratio of the times where
    reading weights is what takes time. Equal where the head is not trimmed.
    """
    trimmed = weight_bytes_per_pass(arch, DTYPE_BYTES[dtype])
    padded = weight_bytes_per_pass(arch.replace(draft_vocab_size=None), DTYPE_BYTES[dtype])
    return {"trimmed_bytes": trimmed, "padded_bytes": padded, "ratio": padded / trimmed}


def model_card(
    arch: Architecture,
    folder: Path,
    *,
    gamma: int,
    score: Mapping[str, Any] | None = None,
    dtype: str = "bfloat16",
    target: str | None = None,
    confirmed: Mapping[str, Any] | None = None,
    padded_speedup: float | None = None,
) -> str:
    """README.md of an export: what it is, how to run it, what it should bring and what was measured."""
    target = target or "TARGET"
    speculative = json.dumps(vllm_config(str(folder), gamma))
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [speculative-decoding, draft-model, archsearch]",
        "---",
        "",
        f"# Draft model {arch.label()}",
        "",
        f"A draft for speculative decoding with {target}: {arch.num_hidden_layers} layers, hidden size {arch.hidden_size}, FFN "
        f"{arch.intermediate_size}, {arch.attention_kind} ({arch.num_attention_heads} heads, {arch.num_key_value_heads} KV), "
        f"{parameters(arch) / 1e6:.1f} M parameters, {dtype}. Made by archsearch {archsearch.__version__}. It proposes {gamma} "
        "tokens a round; the target's greedy output stays the same.",
        "",
    ]
    lines += _score_table(score)
    if confirmed:
        low, high = confirmed["speedup_interval"]
        where = (
            f"{confirmed['engine']} {confirmed['engine_version']}, {confirmed['dtype']}, {confirmed['prompts']} held-out prompts"
        )
        lines += [
            "## Measured",
            "",
            f"{where}, gamma {confirmed['gamma']}: {confirmed['speedup']['value']:.2f} times faster than the target alone "
            f"(5-95 %: {low:.2f} to {high:.2f}), with the trimmed head; alpha {confirmed['alpha']['value']:.3f}, tau "
            f"{confirmed['tau']['value']:.2f}.",
            "",
        ]
    lines += [
        "## transformers",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'target = AutoModelForCausalLM.from_pretrained("{target}", dtype="{dtype}")',
        f'draft = AutoModelForCausalLM.from_pretrained("{folder}", dtype="{dtype}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{target}")',
        'inputs = tokenizer("Once upon a time", return_tensors="pt")',
        "print(tokenizer.decode(target.generate(**inputs, assistant_model=draft, do_sample=False, max_new_tokens=64)[0]))",
        "```",
        "",
        f"`generation_config.json` holds gamma = {gamma} (constant, no confidence threshold): transformers reads it there.",
        "",
        "## vLLM",
        "",
        "```bash",
        f"vllm serve {target} --speculative-config '{speculative}'",
        "```",
        "",
        "The same object is in `speculative_config.json`; change `model` in it when the folder moves.",
        "",
    ]
    if arch.trimmed:
        cost = padded_head_cost(arch, dtype)
        lines += [
            "## The head",
            "",
            f"Trained with {arch.head_rows} of {arch.vocab_size} head rows (`draft_vocab.json`). `model.safetensors` holds a "
            "full head so that every engine can load it; rows of the other tokens point away from the mean hidden state and are "
            "not proposed.",
            f"An engine that computes the full head reads {cost['padded_bytes'] / 2**20:.1f} MiB of weights per draft token "
            f"instead of {cost['trimmed_bytes'] / 2**20:.1f}: {cost['ratio']:.1f} times as much."
            + (f" Predicted speed-up with the full head: {padded_speedup:.2f}." if padded_speedup else ""),
            "For the fast path:",
            "",
            "```python",
            "from pathlib import Path",
            "from archsearch.models import load_draft",
            f'draft = load_draft(Path("{folder}"), "{dtype}")  # computes the kept rows only',
            "```",
            "",
        ]
    return "\n".join(lines)


def _score_table(score: Mapping[str, Any] | None) -> list[str]:
    """alpha, tau, speedup and the times, where the score has them."""
    if not score:
        return []
    rows = []
    for name in ("alpha", "tau", "speedup", "draft_s", "decode_s", "verify_s", "tpot_s", "break_even_alpha"):
        entry = score.get(name)
        if isinstance(entry, Mapping):
            rows.append(f"| {name} | {entry['value']:.4g} | {entry['std']:.2g} | {entry['source']} |")
        elif isinstance(entry, int | float):
            rows.append(f"| {name} | {entry:.4g} | | |")
    return ["## Expected", "", "| | value | std | source |", "|---|---|---|---|", *rows, ""] if rows else []
