"""README.md of an export: what the draft is, how to serve it, what it should bring, what was measured, where it comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import archsearch
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import parameters
from archsearch.engine_facts import ENGINES, engine_title
from archsearch.export.engines import Serving
from archsearch.export.source import DraftRecord, ExportSource, HeadCost
from archsearch.schedule import GammaSchedule

_SCORE_ROWS = (  # (field of score.json, words, factor, digits)
    ("alpha", "alpha (chance that the next draft token is accepted)", 1.0, 3),
    ("tau", "tau (tokens a round)", 1.0, 2),
    ("speedup", "speed-up", 1.0, 2),
    ("break_even_alpha", "alpha below which it does not pay", 1.0, 3),
    ("decode_s", "target step, ms", 1e3, 1),
    ("draft_s", "drafting a round, ms", 1e3, 1),
    ("verify_s", "verifying a round, ms", 1e3, 1),
    ("tpot_s", "time per token, ms", 1e3, 1),
)


@dataclass(frozen=True)
class ExportPlan:
    """An export that was checked. `output`: where it will lie; `dtype`: what engines compute in; `served`: how each engine that
    has a server is told; `trained`: it has weights; `head`: of a trimmed head."""

    source: ExportSource
    output: Path
    architecture: Architecture
    dtype: str
    engines: tuple[str, ...]
    served: tuple[Serving, ...] = ()
    trained: bool = True
    head: HeadCost | None = None

    @property
    def copied(self) -> bool:
        """Whether the weights are written a second time, as GGUF."""
        return any(ENGINES[name].gguf for name in self.engines)

    @property
    def in_transformers(self) -> bool:
        """Whether an engine was asked for that takes the draft folder as it is."""
        return any(ENGINES[name].draft_folder for name in self.engines)


def model_card(made: ExportPlan) -> str:
    """The text of README.md. What is not known is left out; every number says whether it was predicted or measured."""
    source, record = made.source, made.source.record
    lines = _what_it_is(made)
    lines += _numbers(record, source.gamma, _padded_speedup(made))
    lines += _schedule(source.schedule)
    lines += _loads(record.loads)
    lines += ["## Serve it", "", "Other engines have other times: a speed-up above holds for the engine and device it names.", ""]
    if made.in_transformers:
        lines += _transformers(made)
    for each in made.served:
        lines += [f"### {engine_title(each.engine)}", "", "```bash", each.shell(), "```", "", " ".join(each.notes), ""]
    lines += _acceptance(record.confirmed)
    lines += _head(made)
    lines += _provenance(record)
    return "\n".join(lines).rstrip() + "\n"


def _padded_speedup(made: ExportPlan) -> float | None:
    """Predicted speed-up with the full head, where the draft's is trimmed."""
    return made.source.full_head.speedup if made.head is not None and made.source.full_head is not None else None


def _what_it_is(made: ExportPlan) -> list[str]:
    arch, target = made.architecture, made.source.target.name or "TARGET"
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [speculative-decoding, draft-model, archsearch]",
        "---",
        "",
        f"# Draft model {arch.label()}",
        "",
        f"A draft for speculative decoding with `{target}`: {arch.num_hidden_layers} layer{'s'[: arch.num_hidden_layers > 1]}, "
        f"hidden size {arch.hidden_size}, FFN {arch.intermediate_size}, {arch.attention_kind} ({arch.num_attention_heads} heads, "
        f"{arch.num_key_value_heads} KV), {parameters(arch) / 1e6:.1f} M parameters. It proposes {made.source.gamma} tokens a "
        "round; the target checks them, so its greedy output stays the same (up to ties of its own rounding).",
        "",
    ]
    if not made.trained:
        lines += [
            "**This folder holds a shape, not a trained draft:** there is no `model.safetensors`. An engine can time it with "
            "random weights; it drafts nothing useful until it is trained (`archsearch train`) and exported again.",
            "",
        ]
    return lines


def _estimate(entry: Any, factor: float = 1.0, digits: int = 2) -> str | None:
    """`2.53 ± 0.15`, or the bare number; None where it is not an estimate."""
    if isinstance(entry, Mapping) and isinstance(entry.get("value"), int | float):
        std = f" ± {factor * entry['std']:.{digits}f}" if entry.get("std") else ""
        return f"{factor * entry['value']:.{digits}f}{std}"
    if isinstance(entry, int | float) and not isinstance(entry, bool):
        return f"{factor * entry:.{digits}f}"
    return None


def _source(entry: Any) -> str:
    return str(entry["source"]) if isinstance(entry, Mapping) and entry.get("source") else ""


def _numbers(record: DraftRecord, gamma: int, padded_speedup: float | None) -> list[str]:
    """The score's numbers beside what the engine measured."""
    score, confirmed = record.score, record.confirmed
    held = confirmed or {}
    measured: dict[str, str] = {}
    for name, _, factor, digits in _SCORE_ROWS:
        entry = held.get(name)
        shown = _estimate(entry, factor, digits)
        if shown is not None:
            other = _source(entry)
            measured[name] = shown + (f" ({other})" if other not in ("", "measured") else "")
    interval = held.get("speedup_interval")
    if interval and "speedup" in measured:
        measured["speedup"] = f"{measured['speedup'].split(' ')[0]} (5-95 %: {interval[0]:.2f} to {interval[1]:.2f})"
    if held.get("speedup_pooled") is not None and "speedup" in measured:
        measured["speedup"] += f"; all tokens over all seconds {held['speedup_pooled']:.2f}"
    rows = []
    for name, words, factor, digits in _SCORE_ROWS:
        entry = (score or {}).get(name)
        shown = _estimate(entry, factor, digits)
        if shown is not None or name in measured:
            rows.append(f"| {words} | {shown or ''} | {_source(entry)} | {measured.get(name, '')} |")
    if padded_speedup:
        words = f"speed-up at gamma {gamma} in engines that compute the full head (all below)"
        rows.append(f"| {words} | {padded_speedup:.2f} | modelled | |")
    if not rows:
        return []
    ours, theirs = (f", gamma {each['gamma']}" if each.get("gamma") else "" for each in (score or {}, held))
    lines = ["## Numbers", "", f"| | archsearch's score{ours} | source | in the engine{theirs} |", "|---|---|---|---|", *rows, ""]
    if confirmed:
        lines += [_confirmed_words(confirmed, trimmed=padded_speedup is not None), ""]
    else:
        lines += ["Nothing was measured in an engine yet: `archsearch confirm` does it.", ""]
    return lines


def _confirmed_words(confirmed: Mapping[str, Any], *, trimmed: bool) -> str:
    parts = [f"In the engine: {confirmed.get('engine', '?')} {confirmed.get('engine_version', '')}".rstrip()]
    if confirmed.get("dtype"):
        parts[0] += f", {confirmed['dtype']}"
    if confirmed.get("prompts"):
        parts[0] += f", {confirmed['prompts']} held-out prompts"
    if confirmed.get("gamma"):
        parts[0] += f", gamma {confirmed['gamma']}"
    parts[0] += "."
    engine = ENGINES.get(str(confirmed.get("engine")))
    if trimmed and engine is not None and engine.trimmed_head:
        parts.append("archsearch ran it with the kept rows of the head only (see The head).")
    alone, together = (
        _estimate(confirmed.get("baseline_tokens_per_s"), digits=1),
        _estimate(confirmed.get("tokens_per_s"), digits=1),
    )
    if alone and together:
        parts.append(f"{alone} tokens/s alone, {together} with the draft.")
    if confirmed.get("undecided"):
        parts.append(f"NOT DECIDED: {confirmed['undecided']}. `archsearch confirm` it again with nothing else running.")
    predicted, error = confirmed.get("predicted_speedup"), confirmed.get("relative_error")
    if isinstance(predicted, int | float):
        parts.append(f"Predicted for this run: {predicted:.2f}" + (f" ({100 * error:+.1f} % off)." if error is not None else "."))
    exact = confirmed.get("identical_output_float32")
    if exact:
        parts.append(f"Same text as the target alone in float32: {exact['identical']} of {exact['prompts']} prompts.")
    return " ".join(parts)


def _acceptance(confirmed: Mapping[str, Any] | None) -> list[str]:
    """alpha by category and by position."""
    categories = {name: row for name, row in ((confirmed or {}).get("categories") or {}).items() if name}
    positions = (confirmed or {}).get("accepted_by_position")
    if not categories and not positions:
        return []
    lines = ["## Acceptance", ""]
    if categories:
        lines += ["| prompts | how many | alpha | tau | speed-up |", "|---|---|---|---|---|"]
        for name, row in categories.items():
            cells = (_estimate(row.get(key), digits=digits) or "" for key, digits in (("alpha", 3), ("tau", 2), ("speedup", 2)))
            lines.append(f"| {name} | {row.get('prompts', '')} | {' | '.join(cells)} |")
        lines.append("")
    if positions:
        shown = ", ".join(f"{float(value):.2f}" for value in positions)
        lines += [f"Drafts accepted at position 1 to {len(positions)}: {shown} (share of rounds, measured).", ""]
    return lines


def _schedule(schedule: GammaSchedule) -> list[str]:
    if not schedule.ranges:
        return []
    lines = ["## Gamma by batch size", "", "| batch size | gamma |", "|---|---|"]
    for first, last, gamma in schedule.ranges:
        lines.append(f"| {first if first == last else f'{first} to {last}'} | {gamma or '0 (no drafts)'} |")
    lines.append("")
    if schedule.points:
        words = "; ".join(name for name in (schedule.engine, schedule.latency) if name)
        lines += [f"What it is made of ({words}):" if words else "What it is made of:", ""]
        lines += ["| batch size | gamma | tau | speed-up | source |", "|---|---|---|---|---|"]
        for point in schedule.points:
            tau, speedup = (value and _estimate(value.to_dict()) for value in (point.tau, point.speedup))
            source = point.speedup.source if point.speedup else "-"
            lines.append(f"| {point.batch_size} | {point.gamma} | {tau or '-'} | {speedup or '-'} | {source} |")
        lines.append("")
    return lines


def _loads(loads: Sequence[Mapping[str, Any]]) -> list[str]:
    """Measured beside predicted at several concurrencies, an engine a table."""
    lines = []
    for load in loads:
        rows = [row for row in load.get("rows") or () if isinstance(row, Mapping)]
        if not rows:
            continue
        how = (
            "accepting by chance at the predicted rates: times are real, the text is not"
            if load.get("synthetic")
            else "real text"
        )
        lines += [
            f"## Under load in {load.get('engine', '?')} {load.get('engine_version', '')}".rstrip(),
            "",
            f"{load.get('dtype', '?')}, medians of {load.get('repeats', '?')} runs in turns with the target alone; {how}.",
            "",
            "| requests at once | way | gamma | tau | speed-up | predicted |",
            "|---|---|---|---|---|---|",
        ]
        for row in rows:
            cells = (_estimate(row.get(name)) or "" for name in ("tau", "speedup", "predicted_speedup"))
            lines.append(f"| {row.get('concurrency')} | {row.get('variant')} | {row.get('gamma')} | {' | '.join(cells)} |")
        lines.append("")
    return lines


def _transformers(made: ExportPlan) -> list[str]:
    target, folder, dtype = made.source.target.name or "TARGET", made.output, made.dtype
    return [
        "### transformers",
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
        f"`generation_config.json` holds gamma {made.source.gamma} (constant, no confidence threshold). One sequence at a time.",
        "",
    ]


def _head(made: ExportPlan) -> list[str]:
    """What the trimmed head costs engines that compute it in full; nothing for a full head."""
    if made.head is None:
        return []
    arch, cost, full = made.architecture, made.head, made.source.full_head
    predicted = f" Predicted speed-up with the full head: {full.speedup:.2f}." if full is not None else ""
    if full is not None and full.better_gamma is not None:
        other, speedup = full.better_gamma
        predicted += f" For it gamma {other} is better: {speedup:.2f} (`archsearch export ... --gamma {other}`)."
    return [
        "## The head",
        "",
        f"Trained with {arch.head_rows:,} of {arch.vocab_size:,} head rows (`draft_vocab.json`). The weights hold a full "
        "head, so that every engine loads them; rows of the other tokens point away from the mean hidden state and are not "
        "proposed.",
        f"All engines above compute the full head: {cost.padded_bytes / 2**20:.1f} MiB of weights per draft token instead of "
        f"{cost.trimmed_bytes / 2**20:.1f}, {cost.ratio:.1f} times as much.{predicted} archsearch itself computes the kept "
        "rows only:",
        "",
        "```python",
        "from pathlib import Path",
        "from archsearch.models import load_draft",
        f'draft = load_draft(Path("{made.output}"), "{made.dtype}")',
        "```",
        "",
    ]


def _provenance(record: DraftRecord) -> list[str]:
    """Where the draft comes from, one line each."""
    run, training = record.provenance.get("run") or {}, record.training
    arguments, code, device = (run.get(name) or {} for name in ("arguments", "code", "device"))
    profile, packages = (run.get(name) or {} for name in ("profile", "packages"))
    rows = []
    if code:
        commit = f" ({code['commit'][:12]})" if code.get("commit") else ""
        rows.append(
            f"Searched by archsearch {code.get('version', '?')}{commit} on {str(run.get('created', '?'))[:10]}, seed "
            f"{run.get('seed')}, {arguments.get('trials', '?')} trials at batch size {arguments.get('batch_size', '?')}, context "
            f"{arguments.get('context', '?')}, temperature {arguments.get('temperature', '?')}."
        )
    if device:
        rows.append(
            f"Device: {device.get('name')} (`{device.get('key')}`). Times: {profile.get('origin', 'unknown')}, "
            f"{profile.get('dtype', '?')}, {profile.get('mode', '?')}, profile {profile.get('hash', '?')}."
        )
    if training:
        rows.append(
            f"Trained by distillation on the target's own text: {training['tokens']:,} tokens in {training['seconds'] / 60:.0f} "
            f"minutes, seed {training.get('seed')}. Prompts: {training.get('prompts', 'not recorded')}."
        )
    if packages:
        shown = ", ".join(f"{name} {value}" for name, value in packages.items() if name in ("python", "torch", "transformers"))
        rows.append(f"Made with {shown}; exported by archsearch {archsearch.__version__}.")
    else:
        rows.append(f"Exported by archsearch {archsearch.__version__}.")
    return ["## Where it comes from", "", *(f"- {row}" for row in rows), "", "`export.json` holds all of it.", ""]
