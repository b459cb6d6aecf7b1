"""What `estimate` prints."""

from __future__ import annotations

from typing import Any

from archsearch.report.mixes import load_words, mix_lines, mix_words
from archsearch.report.phrases import round_words
from archsearch.report.terminal.layout import plus_minus, table
from archsearch.search.mixed import MixScore
from archsearch.search.objective import Score


def estimate_text(result: dict[str, Any]) -> str:
    """What `estimate` prints."""
    workload, entries, mix = result["workload"], result["drafts"], result.get("mix")
    engines = list(dict.fromkeys(entry["served"] for entry in entries))
    given = "given" if result["prior"] == "given" else f"the prior ({result['prior']})"
    lines = [
        f"Target {result['target']} on {result['device']}, {workload['dtype']}, "
        + (f"{workload['mode']} mode, " if len(engines) == 1 else "")
        + ("" if mix else f"batch size {workload['batch_size']}, context {workload['context_len']}, ")
        + f"tensor parallel {workload['tensor_parallel']}"
        + (f", served by {engines[0]}." if len(engines) == 1 else "."),
        *(f"Served by {engine}." for engine in engines if len(engines) > 1),
        *([f"Load: {mix_words(mix)}."] + [f"  {load_words(part)}." for part in mix["parts"]] if mix else []),
        f"Latency: {result['latency']}.",
        f"Acceptance: {given}."
        + (f" Target decode step {1e3 * entries[0]['decode_s']['value']:.2f} ms." if len(engines) == 1 and not mix else ""),
        "",
        *(_one_engine(entries) if len(engines) == 1 else _side_by_side(entries)),
        "",
    ]
    scored = [(f"{entry['draft']} in {entry['served']}", MixScore.from_dict(entry["mix"])) for entry in entries if entry["mix"]]
    if scored:
        lines += mix_lines(scored)
        lines += ["Speed-up, time per token: over the mix; the other numbers of the first table: of its heaviest part.", ""]
    lines += [f"{row['words']}." for row in result["differences"]]
    lines += [f"WARNING: {text}." for text in result["warnings"]]
    notes = dict.fromkeys((entry["draft"], note) for entry in entries for note in entry["notes"])
    lines += [f"Note: {draft}: {note}" for draft, note in notes]
    return "\n".join([*lines, "Next: measure alpha with your own text (archsearch search --confirm 1), or give it with --alpha."])


def _one_engine(entries: list[dict[str, Any]]) -> list[str]:
    header = (
        "draft", "parameters", "gamma", "alpha", "tau", "draft ms", "verify ms", "break-even alpha", "speed-up", "pays", "group",
    )  # fmt: skip
    rows = [
        (
            entry["draft"], f"{entry['parameters'] / 1e6:,.0f}M", str(entry["gamma"]), plus_minus(entry["alpha"]),
            plus_minus(entry["tau"]), plus_minus(entry["draft_s"], 1e3), plus_minus(entry["verify_s"], 1e3),
            plus_minus(entry["break_even_alpha"]), plus_minus(entry["speedup"]), "yes" if entry["pays"] else "no",
            str(entry["group"]),
        )
        for entry in entries
    ]  # fmt: skip
    lines = [
        table(rows, header),
        "",
        "Drafts of one group cannot be told apart by these error bars. draft ms: all gamma tokens of a round.",
    ]
    mixed = len({entry["engine_class"] for entry in entries}) > 1
    return lines + [f"{entry['draft']}: {_round(entry)}{_how(entry) if mixed else ''}." for entry in entries]


def _how(entry: dict[str, Any]) -> str:
    """How the engine runs a drafter, where it does not run all alike."""
    return f"; {entry['engine_class']}" if entry["engine_class"] else ""


def _round(entry: dict[str, Any]) -> str:
    """What decides the draft's round, and how deep it could be."""
    score = Score.from_dict({name: value for name, value in entry.items() if name in Score.__dataclass_fields__})
    return round_words(score) + ("" if entry["free_layers"] is None else f"; {entry['free_layers']:.1f} layers are free")


def _free(entry: dict[str, Any]) -> str:
    if entry["free_layers"] is not None:
        return f"{entry['free_layers']:.1f}"
    return "-" if entry["host_s"] is None else "all"


def _side_by_side(entries: list[dict[str, Any]]) -> list[str]:
    header = (
        "draft", "engine", "gamma", "alpha", "round ms", "host ms", "bound", "free layers", "ms a token", "speed-up", "pays",
    )  # fmt: skip
    rows = [
        (
            entry["draft"], f"{entry['engine']} {entry['engine_version'] or ''}".rstrip(), str(entry["gamma"]),
            plus_minus(entry["alpha"]), plus_minus(entry["round_s"], 1e3), plus_minus(entry["host_s"], 1e3),
            entry["bound"] or "-", _free(entry),
            f"{1e3 * entry['tpot_s']['value']:.2f}", plus_minus(entry["speedup"]), "yes" if entry["pays"] else "no",
        )
        for entry in entries
    ]  # fmt: skip
    return [
        table(rows, header),
        "",
        "free layers: how many a draft of these kernel times may have before the host decides the round. A speed-up is against",
        "the same engine without a draft.",
    ]
