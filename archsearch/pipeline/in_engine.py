"""Something run in an engine: which one, with what settings and models, and the latencies that
predict it."""

from __future__ import annotations

import gc
import shlex
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.hf_config import to_hf_config
from archsearch.capacity import memory_bytes, usable_bytes
from archsearch.drafts.trainer import DraftTrainer
from archsearch.engine_facts import (
    engine_facts,
    engine_title,
    engines_that,
    names_of,
    runnable_engine,
)
from archsearch.engines import registry
from archsearch.engines.engine import (
    Chained,
    EnginePrompt,
    EngineSettings,
    ModelSource,
    Reached,
    Sampling,
    drafter_family,
)
from archsearch.engines.measure.figures import identities
from archsearch.engines.measure.turns import Plan, Trace, Turn, Variant, run_plan
from archsearch.errors import ArchsearchError, MissingDataError, RunFailed, Stopped
from archsearch.files import write_json
from archsearch.hardware.identify import resolve_device
from archsearch.models.files import has_weights
from archsearch.models.gguf_file import check_written, read_gguf
from archsearch.models.targets import TargetRef
from archsearch.pipeline.latency import choose_latency, machine_slowdown
from archsearch.pipeline.serving import check_dtype, check_engine, default_mode
from archsearch.pipeline.session import SearchSession, check_weights, has_gpu
from archsearch.progress import ProgressLine, say
from archsearch.runs.confirmed import Exact
from archsearch.search.objective import Scorer
from archsearch.workload import GGUF_DTYPES

ENGINE_BYTES: Final = 2 << 30  # an engine's own libraries and buffers, on a CPU
_R = TypeVar("_R")


@dataclass(frozen=True)
class EngineChoice(Reached):
    """Which engine runs, in which precision, and how it is reached; None and empty mean the run's
    own and the defaults."""

    name: str | None = None
    dtype: str | None = None


def check_choice(
    choice: EngineChoice,
    name: str,
    *,
    synthetic: bool = False,
    schedule: bool = False,
    concurrency: int = 1,
) -> None:
    """Raise ArchsearchError, before anything is loaded, for an engine that is not there or cannot
    do what is asked."""

    facts = runnable_engine(name)
    if choice.server_url is not None:
        if not facts.server:
            servers = " or ".join(map(engine_title, engines_that(lambda row: row.server)))
            raise ArchsearchError(
                f"--server-url is for a running {servers} server, not for {name}; leave one of the"
                " two out"
            )
        if synthetic:
            raise ArchsearchError(
                "a running server cannot take synthetic acceptance; leave --server-url out, or"
                " train the draft first"
            )
        if schedule:
            raise ArchsearchError(
                "a running server keeps the schedule it was started with; leave --schedule or"
                " --server-url out"
            )
        return
    if concurrency > 1 and not facts.batches:
        raise ArchsearchError(
            f"{name} runs one request at a time, so {concurrency} in flight cannot be confirmed in"
            f" it; use --concurrency 1, or --engine {names_of(lambda row: row.batches)}"
        )
    if schedule and not facts.schedules:
        raise ArchsearchError(
            f"{name} takes one gamma for all batch sizes; use --engine"
            f" {names_of(lambda row: row.schedules)} for --schedule"
        )
    if synthetic and not facts.synthesises:
        raise ArchsearchError(
            f"{name} cannot accept by chance, which a draft without weights needs; train the draft"
            f" first, or use --engine {names_of(lambda row: row.synthesises)} with --synthetic"
        )
    for option, given in (("engine-path", choice.path), ("draft-dtype", choice.draft_dtype)):
        if given is not None and not facts.gguf:
            raise ArchsearchError(
                f"--{option} is for --engine {names_of(lambda row: row.gguf)}, not for {name};"
                " leave it out"
            )
    check_written(choice.draft_dtype or "float16")
    if choice.path is None:
        registry.check_interpreter_choice(name, choice.python)
    check_dtype(choice.dtype or "", facts)


def serving_scorer(
    session: SearchSession, engine: str, dtype: str | None = None, draft_dtype: str | None = None
) -> tuple[Scorer, str]:
    """The session's scorer with the latencies of `engine` (at another precision, of target or
    draft), and where those come from in words."""
    dtype, chosen = dtype or served_dtype(session, engine), session.source
    own, drafts = session.request, session.scorer.workload.draft_dtype or chosen.dtype
    if (engine, dtype) == (own.engine, chosen.dtype) and draft_dtype in (None, drafts):
        return session.scorer, chosen.words
    if draft_dtype not in (None, dtype):
        scorer, words = serving_scorer(session, engine, dtype, dtype)
        latency: Any = scorer.latency
        try:
            scorer = scorer.with_latency(latency.with_drafts(draft_dtype))
        except MissingDataError as error:
            return scorer, f"{words}; drafts priced in {dtype}: {error}"
        return scorer, f"{words}; drafts in {draft_dtype}"
    folder, on_cpu = chosen.profile.get("folder"), chosen.device.is_cpu
    check_engine(engine_facts(engine), chosen.device)
    asked = replace(
        own.asked,
        profile=Path(folder) if folder else None,
        dtype=dtype,
        draft_dtype=draft_dtype or (None if on_cpu else own.asked.draft_dtype),
        mode=chosen.mode if on_cpu else default_mode(chosen.device, engine),
        # those asked for are of the run's own engine
        engine=engine,
        engine_version=None,
        engine_options=(),
    )
    source, _ = choose_latency(asked, session.target.architecture)
    words = source.words
    if dtype in GGUF_DTYPES and dtype != chosen.dtype:
        words += f"; alpha is predicted for the target in {chosen.dtype}"
    return session.scorer.with_latency(source.latency), words


def served_dtype(session: SearchSession, engine: str) -> str:
    """The precision of a run in an engine: a GGUF target's own in one on such files, else the
    run's."""
    return session.target.dtype_in(engine_facts(engine).gguf) or session.source.dtype


def profile_first(session: SearchSession, scorer: Scorer, engine: str, dtype: str) -> str | None:
    """The command that measures the engine's own passes, where `scorer` does without them; None
    where it has them. A profile's passes are those of transformers."""
    if engine == "transformers" or getattr(scorer.latency, "engine_", None) is not None:
        return None
    return profile_command(session, engine, dtype)


def profile_command(session: SearchSession, engine: str, dtype: str) -> str:
    """The command that measures what prices `engine`."""
    gpu, target = session.request.asked.gpu or session.source.device.key, session.request.target
    return (
        f"archsearch profile --gpu {shlex.quote(gpu)} --target {shlex.quote(target)} --engine"
        f" {engine} --dtype {dtype}"
    )


Drafters = Mapping[str, tuple[object, int]]
"""By name: what drafts (a folder, a lookup, an exit), and gamma."""


@dataclass(frozen=True)
class Bench:
    """The engine that a session's drafters run in."""

    session: SearchSession
    choice: EngineChoice
    known_trainer: DraftTrainer | None = None

    @cached_property
    def trainer(self) -> DraftTrainer:
        """Where the run's texts, tokenizer and target are."""
        return self.known_trainer or self.session.trainer()

    @property
    def name(self) -> str:
        return self.choice.name or self.session.request.engine

    @property
    def dtype(self) -> str:
        return self.choice.dtype or served_dtype(self.session, self.name)

    @property
    def _drafts(self) -> str | None:
        facts, run = engine_facts(self.name), self.session.run
        asked = str(run.arguments.get("draft_dtype") or "")
        return run.draft_dtype if facts.gguf else asked if asked in facts.quantises else None

    @property
    def draft_dtype(self) -> str | None:
        """The precision of drafts that was asked for, here or of the run."""
        return self.choice.draft_dtype or self._drafts

    @property
    def shape(self) -> Architecture:
        """Of its largest drafter, at most."""
        return self.session.target.architecture

    @property
    def scorer(self) -> Scorer:
        """What predicts its rounds."""
        return self._priced[0]

    @property
    def latency_words(self) -> str:
        """Where its latencies come from."""
        return self._priced[1]

    @cached_property
    def _priced(self) -> tuple[Scorer, str]:
        scorer, words = serving_scorer(self.session, self.name, self.dtype, self.draft_dtype)
        device = self.session.source.device
        try:
            if device.is_cpu and not self.choice.server_url:
                resolve_device(device.key)
        except ArchsearchError as error:  # what differs is no error of the prediction
            other = f"predicted for another machine: {str(error).split(';')[0]}"
            say(f"WARNING: {other}.")
            words += f"; {other}"
        return scorer, words

    @property
    def own_dtype(self) -> bool:
        """Whether it runs at the run's precision."""
        dtype = self.session.source.dtype
        return (self.dtype, self.draft_dtype or self.dtype) == (dtype, self._drafts or dtype)

    @property
    def file_name(self) -> str:
        """What its files are called by."""
        drafts = self.draft_dtype
        named = f"{self.name}-{self.dtype}" + (f"-{drafts}" if drafts else "")
        return self.name if self.own_dtype else named

    @property
    def inside(self) -> bool:
        """Whether the engine runs in this process and takes modules, not folders."""
        return engine_facts(self.name).in_process

    def target(self, dtype: str) -> ModelSource:
        if self.inside:
            return self.trainer.loaded.model(dtype)
        return engine_target(self.session.target, self.name, dtype)

    def draft(self, source: ModelSource, dtype: str) -> ModelSource:
        """A draft model's folder as the engine takes it; any other drafter as it is."""
        from archsearch.models.drafts import load_draft

        if isinstance(source, Chained):
            return replace(source, draft=self.draft(source.draft, dtype))
        if self.inside and isinstance(source, Path) and drafter_family(source) == "independent":
            return load_draft(source, dtype)
        return source

    def by_prompt(
        self,
        drafters: Drafters,
        asked: Sequence[EnginePrompt],
        sampling: Sampling,
        summary: Callable[[Trace], _R],
    ) -> _R:
        """`summary` of every drafter on every prompt, back to back with the target alone."""
        plan = self._plan(drafters, asked, sampling, self.dtype)
        return self.run(plan, summary, f"confirm in {self.name}")

    def exactness(
        self, drafters: Drafters, asked: Sequence[EnginePrompt], tokens: int
    ) -> dict[str, Exact]:
        """How many greedy answers are the target's own in float32, by drafter. Raises RunFailed."""
        gc.collect()
        plan = self._plan(drafters, asked, Sampling(tokens), "float32")
        plan = replace(plan, apart=True, starts=1)
        found = self.run(plan, identities, "identical output in float32", dtype="float32")
        return {
            name: Exact(each.prompts, each.identical, each.alpha) for name, each in found.items()
        }

    def _plan(
        self, drafters: Drafters, asked: Sequence[EnginePrompt], sampling: Sampling, dtype: str
    ) -> Plan:
        loaded = {source: self.draft(source, dtype) for source, _ in drafters.values()}
        variants = [
            Variant(name, loaded[source], gamma) for name, (source, gamma) in drafters.items()
        ]
        return Plan(self.target(dtype), variants, asked, sampling)

    def run(
        self,
        plan: Plan,
        summary: Callable[[Trace], _R],
        words: str,
        *,
        dtype: str | None = None,
        dummy: bool = False,
        look: Callable[[Turn], object] = lambda turn: None,
    ) -> _R:
        """`summary` of what the plan came to; `words`: above its progress. One engine at a time is
        alive where those of the plan do not fit together. `dummy`: the target's weights are made
        up."""
        most = max(plan.concurrencies)
        longest = max(len(prompt.token_ids) for prompt in plan.prompts)
        settings = self._settings(
            concurrency=most,
            max_len=longest + plan.sampling.max_new_tokens,
            dtype=dtype or self.dtype,
            dummy_weights=dummy,
        )
        synthetic = any(variant.synthetic for variant in plan.variants)
        tokenizer = None if synthetic else self.trainer.tokenizer
        own_process = not self.inside and self.choice.server_url is None
        if own_process and self._crowded(len(plan.variants), most):
            plan = replace(plan, apart=True)
        with ProgressLine(words) as line:
            return run_plan(
                lambda _: registry.make_engine(self.name, settings, tokenizer),
                plan,
                summary,
                look=look,
                progress=line,
            )

    def _settings(self, **own: Any) -> EngineSettings:
        """The session's device and ranks as an engine takes them. Raises ArchsearchError where the
        device is a GPU and this machine has none."""
        source, reached = self.session.source, asdict(self.choice)
        del reached["name"], reached["dtype"]
        facts = engine_facts(self.name)
        # vLLM: 8 bits beside 16 only
        same = facts.gguf or own["dtype"] == self.dtype
        reached["draft_dtype"] = self.draft_dtype if same else None
        device = source.device
        if not device.is_cpu and self.choice.server_url is None and not has_gpu():
            raise ArchsearchError(
                f"confirming on {device.key} takes a machine with that GPU, and this one has none;"
                " copy the run there, or name a running server (--server-url)"
            )
        return EngineSettings(
            mode=source.mode,
            tensor_parallel=self.session.scorer.workload.tensor_parallel,
            threads=source.threads,
            device="cpu" if device.is_cpu else "gpu",
            **reached,
            **own,
        )

    def _crowded(self, engines: int, concurrency: int) -> bool:
        """Whether the engines take turns: together they would need more memory than there is."""
        session, device = self.session, self.session.source.device
        if not device.is_cpu:
            return True
        workload = replace(session.scorer.workload, batch_size=concurrency)
        each = memory_bytes(session.target.architecture, self.shape, workload).total_bytes
        return engines * (each + ENGINE_BYTES) > usable_bytes(device, workload)


@contextmanager
def kept_partial(path: Path, what: str) -> Iterator[None]:
    """Where an engine fails or is stopped in the block and had come to something, that is in `path`
    and the message says so; else the file goes. Raises RunFailed, Stopped."""
    try:
        yield
        path.unlink(missing_ok=True)
    except (RunFailed, Stopped) as error:
        if not error.results:
            raise
        found = [asdict(result) for result in error.results.values()]
        write_json(path, {"stopped": str(error), "results": found})
        whole = max(int(result.get("prompts") or result.get("repeats") or 0) for result in found)
        raise type(error)(f"{error}; {what} before it, kept in {path}: {whole}") from error


def at_pace(session: SearchSession, run: Callable[[], _R]) -> tuple[_R, float | None]:
    """What `run` returns, and the machine's mean slowdown before and after (None: not known)."""
    before = machine_slowdown(session.source)
    found = run()
    known = [each for each in (before, machine_slowdown(session.source)) if each is not None]
    return found, statistics.fmean(known) if known else None


def mid_answer(prompts: Sequence[EnginePrompt], tokens: int) -> int:
    """Tokens in the KV cache in the middle of an answer of `tokens`, of the mean prompt."""
    return round(statistics.fmean(len(prompt.token_ids) for prompt in prompts) + tokens / 2)


def engine_target(ref: TargetRef, engine: str, dtype: str) -> Path | str:
    """What an engine outside this process loads as the target: a folder, a hub id, or, where it is
    of the precision `dtype`, the target's own GGUF file."""
    from archsearch.models.load import packaged_gguf, weights_source

    if ref.weights and engine_facts(engine).gguf:
        file = packaged_gguf(ref.name, ref.weights)
        if read_gguf(file).dtype == dtype:
            return file
    return weights_source(ref)


def random_draft(arch: Architecture, dtype: str, base: Path, *, load: bool = False) -> object:
    """A draft of `arch` with random weights: the module (`load`), or its folder under `base`, made
    once."""
    from archsearch.models.drafts import build_draft, save_draft

    if load:
        return build_draft(arch, dtype)
    folder = shape_folder(arch, base)
    if not has_weights(folder):  # weights are written last
        save_draft(build_draft(arch, dtype), folder)
    return folder


def shape_folder(arch: Architecture, base: Path) -> Path:
    """Where a shape's files lie under `base`."""
    return base / arch.label().replace(" ", "_").replace("/", "-")


def write_shape(arch: Architecture, folder: Path) -> Path:
    """A folder with a config.json only, for engines that make weights up."""
    write_json(folder / "config.json", to_hf_config(arch))
    return folder


def can_run(name: str, ref: TargetRef) -> bool:
    """Whether the target's own weights run; False where the engine makes them up, as it does for
    dense ones of a hub (experts of random weights are not chosen as a model's own).
    MissingDataError where it cannot."""
    of_hub = ref.folder is None and not ref.weights and not ref.architecture.num_experts
    if of_hub and engine_facts(name).dummy_weights:
        return False
    try:
        check_weights(ref)
    except MissingDataError as error:
        if engine_facts(name).dummy_weights:
            return False
        raise MissingDataError(
            f"target {ref.name!r} has no weights here and {name} needs them; give a folder that has"
            f" them, or use --engine {names_of(lambda row: row.dummy_weights)},"
            " which makes them up"
        ) from error
    return True
