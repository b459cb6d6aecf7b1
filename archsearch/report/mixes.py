"""What was asked, as every answer repeats it; a mix of work in words, and what a draft does in each
of its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from archsearch.report.section import columns
from archsearch.search.mixed import MixScore
from archsearch.traffic.traces import Lengths
from archsearch.workload import Workload

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


@dataclass(frozen=True)
class AskedPart:
    """A kind of request of a load, as `LoadPart.to_dict` or `traffic` has it."""

    name: str
    weight: float
    prompt_tokens: Lengths | float
    output_tokens: Lengths | float
    concurrency: int | None = None
    requests_per_second: float | None = None
    prefix_cache_hit: float | None = None

    def words(self) -> str:
        """`chat (70% of tokens): 4 in flight, prompts of 600 tokens, answers of 250`."""
        rate = self.requests_per_second or 0.0
        how = (
            f"{self.concurrency} in flight" if self.concurrency else f"{rate:.3g} requests a second"
        )
        cached = self.prefix_cache_hit
        hit = f", {cached:.0%} of prompts cached" if cached else ""
        prompt, output = (
            each.mean if isinstance(each, Lengths) else each
            for each in (self.prompt_tokens, self.output_tokens)
        )
        return (
            f"{self.name} ({self.weight:.0%} of tokens): {how}, prompts of {prompt:,.0f} tokens,"
            f" answers of {output:,.0f}{hit}"
        )


@dataclass(frozen=True)
class AskedMix:
    """A mix of work, as `Mix.to_dict` has it."""

    objective: str
    limits: Mapping[str, float]
    parts: tuple[AskedPart, ...]

    def words(self) -> str:
        """`2 kinds of requests, 8 in flight at most; best by throughput; tpot_ms at most 40`"""
        limits = "".join(f"; {name} at most {value:g}" for name, value in self.limits.items())
        kinds = len(self.parts)
        return f"{kinds} kind{'s' * (kinds > 1)} of requests, best by {self.objective}{limits}"

    def whole_words(self) -> str:
        """`words` and every part, in one line."""
        return "; ".join([self.words(), *(part.words() for part in self.parts)])


@dataclass(frozen=True)
class AskedBudget:
    """The device-hours that drafters to be trained are given."""

    gpu_hours: float


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What an answer of `estimate`, `traffic` or `search` repeats of its question. `latency`: where
    times come from, in words; `weights`: their dtype where it is another than the workload's."""

    target: str
    device: str
    latency: str
    workload: Workload
    weights: str | None = None
    mix: AskedMix | None = None
    training_budget: AskedBudget | None = None
    warnings: tuple[str, ...] = ()

    @property
    def dtype(self) -> str:
        """The dtype of a pass, and of its weights where they are in another: `bfloat16 with weights
        in int4`."""
        dtype = self.workload.dtype
        return dtype if self.weights in (None, dtype) else f"{dtype} with weights in {self.weights}"

    def words(self) -> str:
        """What is predicted for: `Batch 1, context 256, bfloat16, 2 devices`; the mix, where there
        is one."""
        work, ranks = self.workload, self.workload.tensor_parallel
        one = f"Batch {work.batch_size}, context {work.context_len}"
        devices = f", {ranks} devices" if ranks > 1 else ""
        return f"{one if self.mix is None else self.mix.words()}, {self.dtype}{devices}"


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
