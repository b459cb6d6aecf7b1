"""What archsearch knows of each engine: one row, asked by every room. The code that runs or exports
for it is named by path.

A fact is here, and not in the engine's class, where it is needed without loading the engine. Rows
hold for the version that they name; what changes from version to version on a GPU, and what a round
costs there, is in `engine_rounds`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final

from packaging.version import Version

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.ops import check_shards
from archsearch.drafters.drafter import Drafter
from archsearch.errors import ArchsearchError, InvalidShapeError
from archsearch.workload import Workload


def _since(always: str, **later: str) -> Mapping[str, str]:
    """The first version that runs each family: "" for those that `always` ran."""
    return dict.fromkeys(always.split(), "") | later


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """One engine. Paths are `module:name`, loaded by `load` when they are needed."""

    name: str  # as --engine and --for take it
    title: str  # as its makers write it
    version: str = ""  # that the facts were checked with

    # -- running it
    # path of (EngineSettings, tokenizer) -> Engine; "" where archsearch does not run it
    make: str = ""
    recipe: str = ""  # path of the Recipe of its environment; "" where it needs none
    # runs in archsearch's own process, on loaded modules and the kernels that a profile times
    in_process: bool = False
    server: bool = False  # a running server of it can be measured: --server-url
    cpu_only: bool = False  # does not run on GPUs
    nvidia_only: bool = False
    batches: bool = False  # runs several requests at once
    synthesises: bool = False  # accepts draft tokens by chance on request
    schedules: bool = False  # takes gamma by batch size
    dummy_weights: bool = False  # makes up weights for folders that hold a config.json only
    # what its --quantization calls a format into which it brings 16-bit weights as it loads them
    quantises: Mapping[str, str] = field(default_factory=dict, hash=False)
    # families of drafters that archsearch starts it with
    confirms: tuple[str, ...] = ("independent",)
    # tokens of the shortest n-gram that lookup goes down to, where that cannot be set
    shortest_ngram: int | None = None

    newest_ngram: int | None = None  # where lookup knows one length, and takes the newest match

    # -- how it runs a draft
    # computes the kept rows of a trimmed head; else it loads the padded one and pays for all rows
    trimmed_head: bool = False
    # shards the draft as it shards the target; else the draft runs on one device
    sharded_draft: bool = False
    # runs a pass of the draft over what the target verified, besides those that draft
    catches_up: bool = False
    drops_unsure: bool = False  # leaves out the token at which a draft stops when unsure
    idle_pass: bool = False  # runs a pass of the draft even where a schedule says gamma 0
    idle_round: bool = False  # what a round adds stays where a schedule says gamma 0

    # -- which drafters it runs
    # first version known to run each
    families: Mapping[str, str] = field(default_factory=lambda: _since("independent"), hash=False)
    # what is known to go wrong with its schedules, and what it has instead
    schedule_doubt: str = ""
    # first version that chooses step by step which draft tokens it verifies, and of which families
    adaptive_since: str = ""
    adaptive: frozenset[str] = frozenset()
    # switches under which it does not start so
    not_adaptive: Mapping[str, str] = field(default_factory=dict, hash=False)
    # families for which it takes one gamma only, although it schedules others
    unscheduled: frozenset[str] = frozenset()
    # (most layers, states) by family
    head_limits: Mapping[str, tuple[int, int | None]] = field(default_factory=dict, hash=False)
    # by a target's type: families that its class there has no interface for, as of `version`
    unread: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    # the first version that samples drafts where it is asked to
    sampled_since: str = ""
    greedy: bool = False  # drafts the likeliest at any temperature
    # writes a trimmed head's logits into rows of the whole vocabulary before choosing
    scattered_head: bool = False

    # -- exporting for it
    export: str = ""  # path of (Setup) -> Serving, the command and files that make it use a draft
    draft_folder: bool = False  # loads the draft's folder itself: only the model card says how
    # needs a copy of the weights as GGUF, and computes in the formats of such files
    gguf: bool = False
    speculative_config: bool = False  # reads vLLM's speculative_config.json
    not_exported: str = ""  # why there is nothing to export, where one might expect it

    @property
    def ngram_sizes(self) -> dict[str, int]:
        """Tokens of the n-grams that lookup goes through (`min_n`, `max_n`), as far as the engine
        decides."""
        if self.newest_ngram is not None:
            return {"min_n": self.newest_ngram, "max_n": self.newest_ngram}
        return {} if self.shortest_ngram is None else {"min_n": self.shortest_ngram}

    def gammas(self, drafter: Drafter, asked: Sequence[int]) -> tuple[int, ...]:
        """Those of `asked` that it drafts with a drafter; its newest n-gram drafts no fewer tokens
        than it has. Raises InvalidShapeError where it drafts none."""
        least = self.newest_ngram or 1 if drafter.family == "ngram" else 1
        able = tuple(gamma for gamma in drafter.gammas(asked) if gamma >= least)
        if not able:
            limit = f": at most {drafter.most} tokens a round" if drafter.most else ""
            raise InvalidShapeError(
                f"{drafter.title} ({drafter.label()}) cannot draft gamma"
                f" {', '.join(map(str, asked))}{limit}"
            )
        return able

    def draft_passes(self, gamma: int) -> int:
        """Passes of a draft model in a round of `gamma` tokens."""
        return gamma + self.catches_up

    def first_tokens(self, gamma: int) -> int:
        """Tokens that the first of them reads, where nothing else is known of the engine."""
        return gamma + 1 if self.catches_up else 1

    def served_draft(self, draft: Architecture) -> Architecture:
        """The draft as this engine computes it: with the full head where it knows no trimmed
        one."""
        return draft if self.trimmed_head else draft.replace(draft_vocab_size=None)

    def draft_ranks(self, tensor_parallel: int) -> int:
        """Devices that share the draft's passes, where `tensor_parallel` of them share the
        target's."""
        return tensor_parallel if self.sharded_draft else 1

    def ranks_of_draft(self, workload: Workload) -> int:
        """Devices that share the draft's passes under a workload: those that it names, else as the
        engine does it."""
        return workload.draft_tensor_parallel or self.draft_ranks(workload.tensor_parallel)

    def check_draft(self, draft: Architecture, tensor_parallel: int, name: str = "") -> None:
        """Raise InvalidShapeError, with what to do, where the engine shards the draft and its heads
        or FFN do not divide."""
        ranks = self.draft_ranks(tensor_parallel)
        try:
            check_shards(draft, ranks)
        except InvalidShapeError as error:
            raise InvalidShapeError(
                f"draft {name or draft.label()} cannot run in {self.name}, which shards it over"
                f" {ranks} devices: {error}; lower --tensor-parallel, or use an engine that keeps"
                " the draft on one device"
            ) from error

    def lacks(self, family: str, version: str | None = None, target: str = "") -> str:
        """Why it does not run drafters of a family; "" where it does. `version` None: the newest;
        `target`: its model_type, "" for any."""
        since = self.families.get(family)
        if since is None:
            able = ", ".join(row.title for row in ENGINES.values() if family in row.families)
            return f"{self.title} does not run {family} drafters; use {able}"
        if since and version is not None and Version(version) < Version(since):
            return (
                f"{self.title} {version} is not known to run {family} drafters: use"
                f" --engine-version {since} or later"
            )
        if family not in (lost := self.unread.get(target, ())):
            return ""
        able = "".join(
            f", or {name} in {row.title}"
            for row in ENGINES.values()
            for name in lost
            if row.unread and name in row.families.keys() - row.unread.get(target, ())
        )
        return (
            f"{self.title}'s class of {target} targets (as of {self.version}) has no interface for"
            f" {', '.join(lost)}; use independent drafts or n-grams{able}"
        )

    def samples(self, version: str | None) -> bool:
        """Whether a version (None: the newest) takes the option that samples drafts."""
        return Version(version or self.version or "0") >= Version(self.sampled_since or "0")

    def unscheduled_words(self, family: str) -> str:
        """Why it takes no gamma by batch size for a family; "" where it does."""
        if family not in self.unscheduled:
            return ""
        return f"{self.title} takes one gamma for {family} drafters, whatever the batch size"

    def check_drafter(
        self,
        drafter: Drafter,
        tensor_parallel: int,
        version: str | None = None,
        name: str = "",
        target: str = "",
    ) -> None:
        """Raise ArchsearchError, with what to do, where it does not run such a drafter, or cannot
        shard it."""
        if self.name and (why := self.lacks(drafter.family, version, target)):
            raise ArchsearchError(why)
        layers, states = self.head_limits.get(drafter.family, (None, None))
        runs, deep = f"{self.title} runs an {drafter.title}", drafter.architecture.num_hidden_layers
        if layers is not None and deep > layers:
            raise InvalidShapeError(f"{runs} of {layers} layer, not of {deep}")
        if states not in (None, read := drafter.states_read):
            raise InvalidShapeError(f"{runs} on {states} hidden states, not on {read}")
        if drafter.sharded is not None:
            self.check_draft(drafter.sharded, tensor_parallel, name)


def shared_by(workload: Workload) -> int:
    """Devices over which an engine that shards drafts is to shard one: as many as the target's
    unless the workload says."""
    return workload.draft_tensor_parallel or workload.tensor_parallel


ANY_ENGINE: Final = EngineFacts(name="", title="any engine", trimmed_head=True)
"""Where no engine is named: a draft as archsearch itself runs it."""

_ROWS: Final = (
    EngineFacts(
        name="transformers",
        title="transformers",
        version="5.20",
        make="archsearch.engines.transformers.engine:make",
        in_process=True,  # generate(assistant_model=...) on the modules that were loaded here
        synthesises=True,  # a logits processor of archsearch steers both models
        confirms=("independent", "ngram", "early_exit", "chain"),
        shortest_ngram=1,  # PromptLookupCandidateGenerator
        trimmed_head=True,  # archsearch.models.drafts computes the kept rows only
        draft_folder=True,
        # prompt_lookup_num_tokens; assistant_early_exit (its own cache); use_mtp needs a target
        # with such a layer
        families={"independent": "", "ngram": "", "early_exit": "", "mtp": "5.23", "chain": ""},
    ),
    EngineFacts(
        name="vllm",
        title="vLLM",
        version="0.32.0",
        make="archsearch.engines.vllm.engine:make",
        recipe="archsearch.engines.environments.recipes:VLLM",
        server=True,  # its Prometheus counters tell rounds and acceptance
        batches=True,  # continuous batching
        synthesises=True,  # rejection_sample_method "synthetic" (config/speculative.py)
        sampled_since="0.22",
        quantises={"float8_e4m3fn": "fp8_per_tensor"},  # "fp8" before 0.20 (config/quantization.py)
        schedules=True,  # num_speculative_tokens_per_batch_size (config/speculative.py)
        dummy_weights=True,  # load_format "dummy"
        confirms=("independent", "eagle3", "medusa", "ngram", "peagle", "pard", "dflash"),
        # draft_tensor_parallel_size must equal the target's (config/speculative.py)
        sharded_draft=True,
        idle_pass=True,  # seen in its steps: at gamma 0 the draft still reads the written token
        export="archsearch.export.engines:vllm",
        speculative_config=True,
        # speculative_config["method"], and parallel_drafting for P-EAGLE and PARD (pull request
        # 32887). Suffix: pull request 25784, in 0.12.0 (RBLN-SW/vllm-rbln issue 324) with
        # arctic-inference; model runner V2 of 0.32 and later has its own on the GPU, which pads
        # every slot (docs v0.32.0). DFlash: in none of February 2026 (pull request 34014), in 0.19
        # (vllm-ascend, pull request 7307).
        families=_since(
            "independent eagle3 eagle mtp medusa ngram",
            **{"suffix": "0.12", "peagle": "0.16", "pard": "0.16", "dflash": "0.19"},
        ),
        schedule_doubt=(
            "num_speculative_tokens_per_batch_size counts prefills in the batch, runs the drafter"
            " at 0 too, and has been seen to collapse under load (vLLM issue 49548): measure it"
            " beside one gamma. Where vLLM 0.32 and later start with"
            ' "enable_adaptive_verification": true (model runner V2, attention with graphs for'
            " unequal rows; refused at start elsewhere), that is the safer: it chooses by step"
            " from costs profiled at start, at one context"
            " (VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN); archsearch schedule prices both"
        ),
        # docs/features/speculative_decoding/adaptive_verification.md of v0.32.0; pull request 52228
        adaptive_since="0.32",
        adaptive=frozenset({"independent", "eagle3", "eagle", "mtp", "dflash"}),
        not_adaptive={"VLLM_USE_V2_MODEL_RUNNER": "0"},
        # num_speculative_tokens_per_batch_size: Medusa and suffix assert one number, parallel
        # drafting reshapes by a fixed one
        unscheduled=frozenset({"medusa", "suffix", "peagle", "pard"}),
        # SupportsEagle3 (model_executor/models; extract_hidden_states needs it too), nor in 0.33;
        # EAGLE-1 looks for model.embed_tokens (v1/spec_decode/llm_base_proposer.py)
        unread=dict.fromkeys(("gemma3_text", "glm4_moe", "mixtral"), ("eagle3", "peagle", "dflash"))
        | {"opt": ("eagle3", "eagle", "peagle", "dflash")},
        scattered_head=True,  # compute_logits of llama_eagle3.py
    ),
    EngineFacts(
        name="openvino",
        title="OpenVINO GenAI",
        version="2026.4.1.0",
        make="archsearch.engines.openvino.engine:OpenVinoEngine",
        recipe="archsearch.engines.environments.recipes:OPENVINO",
        cpu_only=True,
        batches=True,  # continuous batching; it has neither synthetic acceptance nor a schedule
        # prompt lookup runs, but reports no rounds (extended_perf_metrics is None)
        confirms=("independent", "eagle3"),
        families=_since("independent eagle3 dflash ngram"),  # prompt_lookup=True
        shortest_ngram=1,
        head_limits={"eagle3": (1, 3)},
    ),
    EngineFacts(
        name="sglang",
        title="SGLang",
        version="0.5.23",
        batches=True,  # continuous batching
        quantises={"float8_e4m3fn": "fp8"},
        sampled_since="0.5.14",  # --speculative-use-rejection-sampling
        # StandaloneWorker passes the target's tp_rank; DraftTPExecution.TARGET_LAYOUT in 0.5.23
        sharded_draft=True,
        export="archsearch.export.engines:sglang",
        # --speculative-algorithm STANDALONE, EAGLE3, EAGLE, NEXTN, NGRAM, DFLASH; no P-EAGLE or
        # PARD found
        families=_since("independent eagle3 eagle mtp ngram", dflash="0.5.9"),
        # set_eagle3_, set_dflash_layers_to_capture, get_embed_and_head (srt/models)
        unread=dict.fromkeys(("gemma3_text", "glm4_moe", "llama4_text", "qwen2"), ("dflash",))
        | dict.fromkeys(("mixtral", "opt"), ("eagle3", "eagle", "dflash")),
    ),
    EngineFacts(
        name="tensorrt-llm",
        title="TensorRT-LLM",
        version="1.3",
        nvidia_only=True,
        batches=True,  # in-flight batching
        schedules=True,  # draft_len_schedule
        greedy=True,  # unless use_rejection_sampling, which is not exported
        # speculative per-step costs remain at draft length 0 (pull request 18837, open in 2026-09)
        idle_round=True,
        # the one-model worker runs the draft in the target's mapping
        # (_torch/speculative/draft_target.py)
        sharded_draft=True,
        export="archsearch.export.engines:tensorrt_llm",
        # DraftTarget-, Eagle3-, MTP-, NGram-, PARD-, DFlashDecodingConfig
        families=_since("independent eagle3 mtp ngram", pard="1.3", dflash="1.3"),
    ),
    EngineFacts(
        name="llama.cpp",
        title="llama.cpp",
        version="2026.10.11549",  # of the package xllamacpp: build 11549
        make="archsearch.engines.llamacpp.engine:LlamaCppEngine",
        recipe="archsearch.engines.environments.recipes:LLAMA_CPP",
        confirms=("independent", "eagle3", "ngram", "chain"),
        batches=True,  # slots, which write in one pass (server-context.cpp)
        greedy=True,  # common/speculative.cpp takes the first of its candidates
        newest_ngram=2,  # ngram-simple; its own default of 12 finds next to nothing in answers
        synthesises=True,  # --spec-synth-rates (ggml-org/llama.cpp pull request 27711)
        catches_up=True,  # common_speculative_process
        drops_unsure=True,  # --spec-draft-p-min
        export="archsearch.export.engines:llama_cpp",
        gguf=True,
        # --spec-type draft-*, ngram-*, several with commas
        families=_since("independent eagle3 dflash mtp ngram chain"),
        head_limits={"eagle3": (1, None)},
    ),
    EngineFacts(
        name="speculators",
        title="speculators",
        version="0.7",
        not_exported=(  # src/speculators/models
            "speculators (0.7) describes eagle3, peagle, dflash, dspark and mtp heads, not"
            " independent draft models; vLLM loads this draft without it: use --for vllm"
        ),
    ),
)

ENGINES: Final = {row.name: row for row in _ROWS}
"""The engines by name; docs/engines.md says how to add one."""


def engine_facts(name: str | None) -> EngineFacts:
    """The row of the engine `name`; ANY_ENGINE for None. Raises ArchsearchError, with the names
    there are, for an unknown one."""
    if name is None:
        return ANY_ENGINE
    if name not in ENGINES:
        raise ArchsearchError(f"unknown engine {name!r}; choose one of {', '.join(ENGINES)}")
    return ENGINES[name]


def runnable_engine(name: str) -> EngineFacts:
    """The row of an engine that archsearch runs. Raises ArchsearchError, with the names there are,
    for any other."""
    able = engines_that(lambda row: True)
    if name not in ENGINES:
        raise ArchsearchError(f"unknown engine {name!r}; choose one of {', '.join(able)}")
    if not ENGINES[name].make:
        gpu = [other for other in able if not ENGINES[other].cpu_only]
        raise ArchsearchError(
            f"archsearch does not run {ENGINES[name].title}: it ranks drafts for it and exports"
            f" them; confirm with --engine {' or '.join(gpu)}"
        )
    return ENGINES[name]


def engines_that(can: Callable[[EngineFacts], bool]) -> tuple[str, ...]:
    """Names of the engines that archsearch runs and that `can`."""
    return tuple(name for name, row in ENGINES.items() if row.make and can(row))


def names_of(can: Callable[[EngineFacts], bool]) -> str:
    """The same as a choice: `vllm or openvino`."""
    return " or ".join(engines_that(can))


def has_recipe(row: EngineFacts) -> bool:
    """Whether the engine runs in an environment of its own, which archsearch can make."""
    return bool(row.recipe)


def engine_title(name: str) -> str:
    """An engine as its makers write it; the name itself where it is unknown (a file that another
    version wrote)."""
    return ENGINES[name].title if name in ENGINES else name


def load(path: str) -> Any:
    """What `module:name` names."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
