"""A mix of work in words, and what a draft does in each of its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from archsearch.report.phrases import dtype_words
from archsearch.report.section import columns
from archsearch.search.mixed import MixScore

UNITS: Final = {
    "speedup": "x",
    "tpot": " s a token",
    "throughput": " tokens/s",
    "tokens_per_device": " tokens/s a device",
}
PART_HEADER: Final = columns(
    "part | share | context | running | gamma | alpha | ms a token | without | first token ms |"
    " tokens/s | without | speed-up"
)


def load_words(part: Mapping[str, Any]) -> str:
    """`chat (70% of tokens): 4 in flight, prompts of 600 tokens, answers of 250`; a part as
    `LoadPart.to_dict` has it."""
    rate = part.get("requests_per_second") or 0.0
    flight = part.get("concurrency")
    how = f"{flight} in flight" if flight else f"{rate:.3g} requests a second"
    cached = part.get("prefix_cache_hit")
    hit = f", {cached:.0%} of prompts cached" if cached else ""
    prompt, output = (_mean(part[name]) for name in ("prompt_tokens", "output_tokens"))
    return (
        f"{part['name']} ({part['weight']:.0%} of tokens): {how}, prompts of {prompt:,.0f} tokens,"
        f" answers of {output:,.0f}{hit}"
    )


def _mean(lengths: Any) -> float:
    if not isinstance(lengths, Mapping):
        return float(lengths)
    return float(sum(v * w for v, w in zip(lengths["values"], lengths["weights"], strict=True)))


def mix_words(mix: Mapping[str, Any]) -> str:
    """`2 kinds of requests, 8 in flight at most; best by throughput; tpot_ms at most 40`"""
    limits = "".join(f"; {name} at most {value:g}" for name, value in mix["limits"].items())
    kinds = len(mix["parts"])
    return f"{kinds} kind{'s' if kinds > 1 else ''} of requests, best by {mix['objective']}{limits}"


def asked_words(result: Mapping[str, Any]) -> str:
    """What is predicted for: `Batch 1, context 256, bfloat16, 2 devices`; the mix, where there is
    one."""
    workload, mix = result["workload"], result.get("mix")
    one = f"Batch {workload['batch_size']}, context {workload['context_len']}"
    ranks = workload["tensor_parallel"]
    devices = f", {ranks} devices" if ranks > 1 else ""
    return f"{one if mix is None else mix_words(mix)}, {dtype_words(result)}{devices}"


def full_words(mix: Mapping[str, Any]) -> str:
    """`mix_words` and every part, in one line."""
    return "; ".join([mix_words(mix), *(load_words(part) for part in mix["parts"])])


def part_rows(mix: MixScore) -> list[tuple[str, ...]]:
    """The parts of a score, by PART_HEADER."""
    return [
        (
            part.name,
            f"{part.weight:.0%}",
            f"{part.context:,}",
            f"{part.running:.1f}",
            str(part.gamma) if part.gamma else "off",
            f"{part.alpha:.2f}",
            f"{1e3 * part.tpot_s:.2f}",
            f"{1e3 * part.plain_tpot_s:.2f}",
            "no end" if part.ttft_s == float("inf") else f"{1e3 * part.ttft_s:.0f}",
            f"{part.tokens_per_s:,.0f}",
            f"{part.plain_tokens_per_s:,.0f}",
            f"{part.speedup:.2f}x",
        )
        for part in mix.parts
    ]


def objective_words(mix: MixScore) -> str:
    """`throughput 6,373 tokens/s, 5,704 tokens/s without the draft`; limits that are broken after
    it."""
    unit = UNITS[mix.objective]
    own = "" if mix.objective == "speedup" else f", {mix.plain:,.4g}{unit} without the draft"
    return f"{mix.objective} over the mix {mix.value:,.4g}{unit}{own}" + "".join(
        f"; breaks {text}" for text in mix.broken_limits
    )


def mix_lines(mixes: Sequence[tuple[str, MixScore]]) -> list[str]:
    """For each draft a line and the table of its parts."""
    from archsearch.report.terminal.layout import table

    lines: list[str] = []
    for name, mix in mixes:
        lines += [f"{name}: {objective_words(mix)}", table(part_rows(mix), PART_HEADER), ""]
    return lines
