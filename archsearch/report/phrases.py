"""How numbers, paths and states read; what was asked, as every answer repeats it; a mix of work."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from archsearch.architecture import catalogue
from archsearch.engine_facts import ENGINES, engine_title
from archsearch.estimate import Estimate
from archsearch.models.gguf_file import kind_of_drafts
from archsearch.paths import shown
from archsearch.records import Maybe, as_data
from archsearch.runs.confirmed import Confirmed, Judged
from archsearch.runs.tables import EngineComparison
from archsearch.search.objective import MixScore, Score
from archsearch.traffic.mix import LoadPart, Mix
from archsearch.workload import MEMORY_FRACTION, Workload

# What the sources of an Estimate mean to a reader.
SOURCES: Final = {
    "measured": "counted or timed on this draft",
    "modelled": "from a model fitted to measurements of this device",
    "prior": "expected from published drafts of like shape; not measured here",
    "roofline": "from the device's datasheet; not measured here",
    "published": "from a publication",
    "given": "given on the command line",
}
# Bits after the leading one: the spacing of neighbouring numbers is 2^(exponent - bits).
MANTISSA_BITS: Final = {"bfloat16": 7, "float16": 10, "float32": 23}

UNPROFILED: Final = re.compile(r"WARNING:? (.+?)(?:[;.] |[;.]?$)")


def break_even_words(score: Score) -> str:
    """Above which alpha a draft pays."""
    needed = score.break_even_alpha
    if needed is None:
        return f"no alpha makes this draft pay at gamma {score.gamma}"
    if needed.value <= 0:
        return "it pays at any alpha"
    return f"it pays above alpha {needed.words()} ({needed.source})"


def launches(score: Score) -> str:
    """What the host launches of the draft in a round: `24 layers twice`."""
    drafter = score.proposer
    layers = drafter.architecture.num_hidden_layers
    if drafter.sharded is None or not layers:
        return "the drafter"
    times = {1: "once", 2: "twice"}.get(score.gamma, f"{score.gamma} times")
    return f"{layers} layer{'s' if layers > 1 else ''} {times}"


def host_words(score: Score) -> str:
    """What the host needs for a round: `the host's 21.8 ms to launch 24 layers twice; the kernels
    take 9.2`."""
    assert score.host_s is not None
    text = f"the host's {1e3 * score.host_s.value:.1f} ms to launch {launches(score)}"
    # its passes are the host's time too
    if score.engine in ENGINES and ENGINES[score.engine].in_process:
        return f"{text}, and the target"
    return f"{text}; the kernels take {1e3 * (score.draft_s.value + score.verify_s.value):.1f}"


def verdict(gain: Estimate, *, measured: bool = False) -> str:
    """Whether speculation pays, by the 5 to 95 % interval: `may` or `probably does not` where 1x
    lies inside."""
    low, high = gain.interval
    if low > 1.0:
        return "pays" if measured else "should pay"
    if high < 1.0:
        return "does not pay"
    return "may pay" if gain.value > 1.0 else "probably does not pay"


PAYS: Final = {
    "should pay": "yes",
    "may pay": "may",
    "probably does not pay": "unlikely",
    "does not pay": "no",
}
"""`verdict` in a column."""


def hub_name(target: str) -> str:
    """The hub id of a target of the catalogue; any other name as it is."""
    return (catalogue.load(target).hub_id or target) if target in catalogue.names() else target


def round_words(score: Score) -> str:
    """How long a round takes and what decides it; "" where the score does not say (files of version
    0.1.0)."""
    if score.round_s is None:
        return ""
    text = f"a round takes {1e3 * score.round_s.value:.1f} ms"
    if score.bound == "host":
        return f"{text}, bound by {host_words(score)}"
    if score.host_s is not None and score.host_s.value > 0:
        return f"{text}; the GPU decides, the host would need {1e3 * score.host_s.value:.1f} ms"
    return text


def speedup_words(confirmed: Judged) -> str:
    """The measured speed-up as both ways of counting give it."""
    pooled = confirmed.speedup_pooled
    words = "" if pooled is None else f" (pooled {pooled:.2f}x)"
    return f"{confirmed.speedup.value:.2f}x, measured{words}"


def unprofiled_words(found: Confirmed | EngineComparison) -> str:
    """What a prediction does without where the engine's own passes were never profiled; "" where it
    has them."""
    command = found.profile_first
    if not command:  # "": an earlier version wrote so where it could not measure an engine
        return ""
    return (
        f"The prediction knows nothing of {engine_title(found.engine)}'s own passes, which were"
        f" never profiled; measure them first: {command}"
    )


def gguf_dtype(found: Confirmed) -> str:
    """The precision of the draft as a GGUF that was run."""
    return found.draft_dtype or kind_of_drafts(found.dtype)


def exported_for(found: Judged) -> str:
    """The option of `export` for the engine that ran it, where the usual ones are not for that."""
    facts = ENGINES.get(found.engine)
    return f" --for {found.engine}" if facts is not None and facts.gguf else ""


def capital(text: str) -> str:
    """The first letter large."""
    return f"{text[:1].upper()}{text[1:]}"


def clipped(name: str, most: int) -> str:
    """At most so many characters of a name."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


def shell_path(path: Path) -> str:
    """As it is shown, quoted for a shell."""
    return shlex.quote(str(shown(path)))


def millions(count: int) -> str:
    """1,234,567,890 as `1.23B`, 24,000,000 as `24M`, 1,500,000 as `1.5M`."""
    if count >= 1e9:
        return f"{count / 1e9:.2f}B"
    return f"{count / 1e6:.{0 if count >= 1e7 else 1}f}M"


def count_words(count: float) -> str:
    """1,234 as `1.2k`, 5,800,000 as `5.8M`, 1.6e9 as `1.6B`."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= 0.9995 * size:
            return f"{count / size:.{1 if count < 9.95 * size else 0}f}{unit}"
    return f"{count:.0f}"


def latency_warning(latency: str, target: str) -> str:
    """What the words for the latency warn of: an engine whose own passes nobody measured, and the
    command; "" for nothing."""
    found = UNPROFILED.search(latency)
    return found[1].replace("--target T ", f"--target {shlex.quote(target)} ") if found else ""


UNITS: Final = {
    "speedup": "x",
    "tpot": " s a token",
    "throughput": " tokens/s",
    "tokens_per_device": " tokens/s a device",
}
PART_HEADER: Final = (
    "part | share | context | running | gamma | alpha | ms a token | without | first token ms |"
    " tokens/s | without | speed-up"
)


@dataclass(frozen=True)
class AskedPart:
    """A kind of request of a load, with the means of its lengths."""

    name: str
    weight: float
    concurrency: int | None
    context: int
    requests_per_second: float | None
    prefix_cache_hit: float
    prompt_tokens: float
    output_tokens: float
    refill: bool

    @classmethod
    def of(cls, part: LoadPart) -> AskedPart:
        own: dict[str, Any] = {each.name: getattr(part, each.name, None) for each in fields(cls)}
        lengths = {"prompt_tokens": part.prompt.mean, "output_tokens": part.output.mean}
        return cls(**own | lengths)

    def words(self, *, shared: bool = True) -> str:
        """`chat (70% of tokens): 4 in flight, prompts of 600 tokens, answers of 250`; `shared`:
        with others."""
        rate = self.requests_per_second or 0.0
        places = "in flight" if self.refill else "that start together"
        how = (
            f"{self.concurrency} {places}" if self.concurrency else f"{rate:.3g} requests a second"
        )
        cached = self.prefix_cache_hit
        hit = f", {cached:.0%} of prompts cached" if cached else ""
        share = f" ({self.weight:.0%} of tokens)" if shared else ""
        return (
            f"{self.name}{share}: {how}, prompts of"
            f" {self.prompt_tokens:,.0f} tokens, answers of {self.output_tokens:,.0f}{hit}"
        )


def mix_words(mix: Mix) -> list[str]:
    """`2 kinds of requests, each by itself on the device, best by throughput; tpot_ms at most 40`,
    and each part, where there are several."""
    limits = "".join(f"; {name} at most {most:g}" for name, most in as_data(mix.limits).items())
    parts = [AskedPart.of(part) for part in mix.parts]
    several = len(parts) > 1
    kinds = f"{len(parts)} kinds of requests, each by itself on the device"
    what = kinds if several else parts[0].words(shared=False)
    words = f"{what}, best by {mix.objective}{limits}"
    return [words, *(part.words() for part in parts if several)]


@dataclass(frozen=True)
class ServedBy:
    """The engine, its version, how it runs drafts (None on a CPU), and all of it in words."""

    engine: str
    engine_version: str | None
    engine_class: str | None
    served: str


@dataclass(frozen=True)
class AskedBudget:
    """The device-hours that drafters to be trained are given, whether they were `asked` for (else a
    default), and what a token costs (`needs.TrainingBudget`)."""

    gpu_hours: float
    asked: bool
    text_hours_per_token: float
    teacher_hours_per_token: float
    hours_per_parameter_token: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What an answer of `estimate`, `traffic` or `search` repeats of its question. `latency`: where
    times come from, in words; `weights`: their dtype where it is another than the workload's;
    `alpha`: `prior` or a number; `prior`: what is expected of acceptance, in words; `warnings`:
    what a reader must know of the engine's version."""

    target: str
    device: str
    latency: str
    weights: str | None
    workload: Workload
    alpha: Maybe[str] = None
    prior: str
    training_budget: AskedBudget | None
    warnings: tuple[str, ...]

    @property
    def warned(self) -> list[str]:
        """`warnings` as they are printed."""
        return [f"WARNING: {text}." for text in self.warnings]

    @property
    def dtype_words(self) -> str:
        """The dtype of a pass, and of its weights where they are in another: `bfloat16 with weights
        in int4`."""
        dtype = self.workload.dtype
        return dtype if self.weights in (None, dtype) else f"{dtype} with weights in {self.weights}"


@dataclass(frozen=True, kw_only=True)
class AskedOver(Asked):
    """The same over a mix of work, where there is one."""

    mix: Mix | None

    def words(self) -> str:
        """What is predicted for: `Batch 1, context 256, bfloat16, 2 devices`; the mix, where there
        is one."""
        work, ranks = self.workload, self.workload.tensor_parallel
        one = f"Batch {work.batch_size}, context {work.context_len}"
        devices = f", {ranks} devices" if ranks > 1 else ""
        over = one if self.mix is None else mix_words(self.mix)[0]
        return f"{capital(over)}, {self.dtype_words}{devices}"


def part_rows(mix: MixScore) -> list[tuple[str, ...]]:
    """The parts of a score, by PART_HEADER."""
    return [
        (
            part.name,
            f"{part.weight:.0%}",
            f"{part.context:,}",
            f"{part.running:.1f}",
            str(part.gamma or "off"),
            f"{part.alpha:.2f}",
            f"{1e3 * part.tpot_s:.2f}",
            f"{1e3 * part.plain_tpot_s:.2f}",
            "no end" if part.ttft_s is None else f"{1e3 * part.ttft_s:.0f}",
            f"{part.tokens_per_s:,.0f}",
            f"{part.plain_tokens_per_s:,.0f}",
            f"{part.speedup:.2f}x",
        )
        for part in mix.parts
    ]


def over_words(mix: Mix | MixScore | None) -> str:
    """` over the mix of work`; "" for requests of one kind."""
    return " over the mix of work" if mix is not None and len(mix.parts) > 1 else ""


def brings(mix: MixScore | None) -> str:
    """What the draft does to throughput; "" where that is not the objective."""
    if mix is None or mix.objective in ("speedup", "tpot"):
        return ""
    same = abs(mix.gain - 1.0) < 1e-6 and any(part.gamma for part in mix.parts)
    fixed = ", which the rate fixes," if same else ""
    rates = f"{mix.value:,.0f}{UNITS[mix.objective]}, {mix.plain:,.0f} without"
    return f"brings {mix.gain:.2f}x the throughput ({rates}){fixed}"


def objective_words(mix: MixScore) -> str:
    """`throughput 6,373 tokens/s, 5,704 tokens/s without the draft`; limits that are broken after
    it."""
    unit = UNITS[mix.objective]
    own = "" if mix.objective == "speedup" else f", {mix.plain:,.4g}{unit} without the draft"
    return f"{mix.objective} over the mix {mix.value:,.4g}{unit}{own}" + "".join(
        f"; breaks {text}" for text in mix.broken_limits
    )


# The defaults of `search`, in the order of its command; None: nothing.
USUAL: Final[dict[str, object]] = {
    **dict.fromkeys(("target", "gpu", "profile", "workload")),
    **{"batch_size": 1, "context": 256, "temperature": 0.0, "draft_tensor_parallel": None},
    **{"memory_fraction": MEMORY_FRACTION, "routing_skew": None, "tensor_parallel": None},
    **dict.fromkeys(("dtype", "mode", "engine", "engine_version", "domain", "space")),
    **dict.fromkeys(("prompts", "heldout", "text")),
    **{"answer_tokens": 96, "seed": 0, "trials": 300, "top": 5, "sampler": "auto"},
    **{"alpha": "prior", "confirm": 0, "finalists": 3, "confirm_prompts": 24},
}
# Arguments whose options have another name; None: those that are none, or follow from the rest.
OPTIONS: Final[dict[str, str | None]] = {
    "time_budget_s": "time-budget",
    "training_budget_s": "training-budget",
    "families": "family",
    "engine_options": "engine-option",
    "storage": None,
    "max_gamma": None,
}
_SEVERAL: Final = ("families", "engine_options")


def search_command(arguments: Mapping[str, object], workload: Path | None = None) -> str:
    """`archsearch search ...` with every option that differs from its default; `workload`: where
    the mix of the search lies, where it was given one."""
    asked = {name: arguments[name] for name in USUAL if name in arguments} | dict(arguments)
    usual = USUAL | {"domain": "narrow" if asked.get("prompts") else "chat"}
    if asked.get("workload"):  # whose parts say batch and context
        asked |= {"workload": workload, "batch_size": None, "context": None}
    if not asked.get("confirm"):
        asked["time_budget_s"] = None
    words = ["archsearch", "search"]
    for name, value in asked.items():
        option = OPTIONS.get(name, name.replace("_", "-"))
        if option is None or value is None or value == usual.get(name):
            continue
        for each in str(value).split() if name in _SEVERAL else [value]:
            seconds = name.endswith("budget_s")
            words += [f"--{option}", f"{value:g}s" if seconds else str(each)]
    return shlex.join(words)
