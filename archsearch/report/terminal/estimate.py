"""What `estimate` prints."""

from __future__ import annotations

from typing import Any

from archsearch.estimate import Estimate
from archsearch.needs import Needs
from archsearch.records import from_data
from archsearch.report.answer import SCREEN, gain_words, hours_words, needs_words
from archsearch.report.mixes import asked_words, load_words, mix_lines, mix_words
from archsearch.report.phrases import dtype_words, latency_warning, round_words, verdict
from archsearch.report.terminal.layout import plus_minus, table, wrapped
from archsearch.search.mixed import MixScore
from archsearch.search.objective import Score

PAYS = {"should pay": "yes", "may pay": "may", "does not pay": "no"}
OVER_MIX = (
    "Speed-up, time per token: over the mix; the other numbers of the first table: of its heaviest"
    " part"
)
NEXT = "measure alpha with your own text (archsearch search --confirm 1), or give it with --alpha"
TIES = (
    "Drafts of one group cannot be told apart by these error bars. draft ms: all gamma tokens of a"
    " round."
)


def estimate_text(result: dict[str, Any], *, explain: bool = False) -> str:
    """The answer in at most SCREEN lines of 100 columns; with `explain` all that it rests on behind
    it."""
    entries = result["drafts"]
    engines = list(dict.fromkeys(entry["served"] for entry in entries))
    gains = [Estimate.from_dict(entry["speedup"]) for entry in entries]
    best, gain = max(zip(entries, gains, strict=True), key=lambda pair: pair[1].value)
    budget = result.get("training_budget")
    unit = "CPU" if str(result["device"]).startswith("cpu") else "GPU"
    hours = "" if budget is None else hours_words(budget["gpu_hours"], unit)
    given = f" Drafters to be trained are given {hours}." if hours else ""
    several = len(engines) > 1
    above = [
        f"Speculation {verdict(gain)} for {result['target']} on {result['device']}: best"
        f" {best['draft']}{' in ' + best['served'] if several else ''}, gamma {best['gamma']},"
        f" {gain_words(gain)}.",
        f"{asked_words(result)}, {' and '.join(engines)}.{given}",
    ]
    rows = [
        (
            entry["draft"],
            *([_engine(entry)] if several else []),
            _needs(entry, unit),
            str(entry["gamma"]),
            f"{entry['alpha']['value']:.2f}",
            f"{1e3 * entry['tpot_s']['value']:.2f}",
            gain_words(each),
            PAYS[verdict(each)],
        )
        for entry, each in zip(entries, gains, strict=True)
    ]
    header = (
        f"draft{' | engine' * several} | needs (tokens) | gamma | alpha | ms a token |"
        " speed-up, 5-95 % | pays"
    )
    below = [
        "Acceptance on your text: archsearch acceptance; give it with --alpha or --tau. More:"
        " --explain."
    ]
    lines = [*wrapped(above), "", *table(rows, header).splitlines(), ""]
    room = SCREEN - len(lines) - len(below)
    for text in _said(result):
        said = wrapped([text])
        lines, room = (lines + said, room - len(said)) if len(said) <= room else (lines, room)
    text = "\n".join([*lines, *below])
    return f"{text}\n\n{explained_text(result)}" if explain else text


def _said(result: dict[str, Any]) -> list[str]:
    """What changes how the numbers are to be read, most important first."""
    said = [f"WARNING: {text}." for text in (latency_warning(result), *result["warnings"]) if text]
    said += _prompts(result)
    unsure = any(words in result["latency"] for words in ("carried over", "weights in"))
    if unsure or any(entry["draft_s"]["source"] == "roofline" for entry in result["drafts"]):
        said.append(f"Latency: {result['latency']}.")
    said += dict.fromkeys(
        f"Note: {entry['draft']}: {note}" for entry in result["drafts"] for note in entry["notes"]
    )
    return said + [f"{row['words']}." for row in result["differences"]]


def _prompts(result: dict[str, Any]) -> list[str]:
    """That prompts are left out, and what they change."""
    served = result.get("with_prompts")
    if not served:
        return []
    return [
        f"Decoding only. With prompts of {served['prompt_tokens']:,} tokens and answers of"
        f" {served['output_tokens']}, {served['concurrency']} in flight, {served['draft']} gives"
        f" {served['gain']:.2f}x the tokens/s (others: --workload FILE)."
    ]


def _engine(entry: dict[str, Any]) -> str:
    return f"{entry['engine']} {entry['engine_version'] or ''}".rstrip()


def _needs(entry: dict[str, Any], unit: str) -> str:
    needs = entry.get("needs")
    return needs_words(None if needs is None else Needs.from_dict(needs), unit)


def explained_text(result: dict[str, Any]) -> str:
    """Everything that an estimate rests on."""
    workload, entries, mix = result["workload"], result["drafts"], result.get("mix")
    engines = list(dict.fromkeys(entry["served"] for entry in entries))
    given = result["prior"] if "given" in result["prior"] else f"the prior ({result['prior']})"
    one = len(engines) == 1
    where = [
        f"Target {result['target']} on {result['device']}",
        dtype_words(result),
        *([f"{workload['mode']} mode"] if one else []),
        *([] if mix else [f"batch size {workload['batch_size']}"]),
        *([] if mix else [f"context {workload['context_len']}"]),
        f"tensor parallel {workload['tensor_parallel']}",
        *([f"served by {engines[0]}"] if one else []),
    ]
    step = f" Target decode step {1e3 * entries[0]['decode_s']['value']:.2f} ms."
    lines = [
        f"{', '.join(where)}.",
        *([] if one else [f"Served by {engine}." for engine in engines]),
        *([f"Load: {mix_words(mix)}."] if mix else []),
        *(f"  {load_words(part)}." for part in (mix or {"parts": ()})["parts"]),
        f"Latency: {result['latency']}.",
        f"Acceptance: {given}.{step if one and not mix else ''}",
        "",
        *(_one_engine(entries) if one else _side_by_side(entries)),
        "",
    ]
    scored = [
        (f"{entry['draft']} in {entry['served']}", from_data(MixScore, entry["mix"]))
        for entry in entries
        if entry["mix"]
    ]
    if scored:
        lines += mix_lines(scored)
        lines += [f"{OVER_MIX}.", ""]
    lines += [f"{row['words']}." for row in result["differences"]]
    lines += _prompts(result)
    lines += [f"WARNING: {text}." for text in result["warnings"]]
    notes = dict.fromkeys((entry["draft"], note) for entry in entries for note in entry["notes"])
    lines += [f"Note: {draft}: {note}" for draft, note in notes]
    return "\n".join([*lines, f"Next: {NEXT}."])


def _one_engine(entries: list[dict[str, Any]]) -> list[str]:
    header = (
        "draft | parameters | gamma | alpha | tau | draft ms | verify ms | break-even alpha |"
        " speed-up | pays | group"
    )
    rows = [
        (
            entry["draft"],
            f"{entry['parameters'] / 1e6:,.0f}M",
            str(entry["gamma"]),
            plus_minus(entry["alpha"]),
            plus_minus(entry["tau"]),
            plus_minus(entry["draft_s"], 1e3),
            plus_minus(entry["verify_s"], 1e3),
            plus_minus(entry["break_even_alpha"]),
            plus_minus(entry["speedup"]),
            "yes" if entry["pays"] else "no",
            str(entry["group"]),
        )
        for entry in entries
    ]
    lines = [table(rows, header), "", TIES]
    alike = len({entry["engine_class"] for entry in entries}) < 2
    return lines + [f"{entry['draft']}: {_round(entry, alike)}." for entry in entries]


def _round(entry: dict[str, Any], alike: bool) -> str:
    """What decides the draft's round, how deep it could be, and, where the engine does not run all
    drafters `alike`, how it runs this one."""
    known = {name: value for name, value in entry.items() if name in Score.__dataclass_fields__}
    free, how = entry["free_layers"], entry["engine_class"]
    parts = [
        round_words(Score.from_dict(known)),
        *([] if free is None else [f"{free:.1f} layers are free"]),
        *([how] if how and not alike else []),
    ]
    return "; ".join(parts)


def _free(entry: dict[str, Any]) -> str:
    if entry["free_layers"] is not None:
        return f"{entry['free_layers']:.1f}"
    return "-" if entry["host_s"] is None else "all"


def _side_by_side(entries: list[dict[str, Any]]) -> list[str]:
    header = (
        "draft | engine | gamma | alpha | round ms | host ms | bound | free layers | ms a token |"
        " speed-up | pays"
    )
    rows = [
        (
            entry["draft"],
            _engine(entry),
            str(entry["gamma"]),
            plus_minus(entry["alpha"]),
            plus_minus(entry["round_s"], 1e3),
            plus_minus(entry["host_s"], 1e3),
            entry["bound"] or "-",
            _free(entry),
            f"{1e3 * entry['tpot_s']['value']:.2f}",
            plus_minus(entry["speedup"]),
            "yes" if entry["pays"] else "no",
        )
        for entry in entries
    ]
    return [
        table(rows, header),
        "",
        (
            "free layers: how many a draft of these kernel times may have before the host decides"
            " the round. A speed-up is against"
        ),
        "the same engine without a draft.",
    ]
