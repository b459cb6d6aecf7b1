"""What a search was asked, and everything that its later steps need."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from archsearch.acceptance import registry
from archsearch.acceptance.estimator import AcceptanceContext, AcceptanceEstimator
from archsearch.acceptance.known import AskedText
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import parameters
from archsearch.capacity import memory_bytes, usable_bytes
from archsearch.drafters.drafter import RoundKind
from archsearch.drafters.registry import family
from archsearch.drafts.trainer import DraftTrainer
from archsearch.engine_facts import engine_facts, runnable_engine
from archsearch.engines.environments.environment import find_python
from archsearch.errors import ArchsearchError
from archsearch.files import ensure_writable_dir, read_json
from archsearch.hardware.device import Device
from archsearch.hardware.identify import resolve_device
from archsearch.models.targets import TargetRef, resolve_target
from archsearch.pipeline.families import (
    Alternative,
    FamilySpaces,
    choose_families,
    context_of,
    family_spaces,
    kind_of,
)
from archsearch.pipeline.latency import LatencySource, acceptance_for, choose_latency, served_target
from archsearch.pipeline.serving import check_batch, with_engine
from archsearch.pipeline.shared_work import ExecutorName
from archsearch.pipeline.training_budget import budget_s, with_budget
from archsearch.profiles import find_profile
from archsearch.progress import say
from archsearch.records import save
from archsearch.runs.run import WORKLOAD_FILE, Run, create_run, open_run, resume_run
from archsearch.search import study
from archsearch.search.objective import Score, Scorer, grouped
from archsearch.search.samplers import AUTO, Sampler
from archsearch.search.space import Limits, SearchSpace, load_space
from archsearch.search.storage import open_storage, without_password
from archsearch.speedup import MAX_GAMMA
from archsearch.text.likeness import SKETCH_FILE, load_sketch, sketch_of_set
from archsearch.text.prompt_files import read_texts
from archsearch.text.prompt_set import load_prompt_set
from archsearch.traffic.mix import Mix, mix_of
from archsearch.traffic.mix_scorer import MixScorer, held_alone
from archsearch.workload import WEIGHT_BYTES, Workload, WorkloadRequest

PRIOR_FILE = "prior.json"


@dataclass(frozen=True)
class SearchRequest:
    """What `archsearch search` was asked. `confirm`: how many of the best to run in the engine,
    after `finalists` drafts were trained; 0 ends with the ranking. `domain`: "" for one that
    follows from the rest (`settled`). `climb`: short trainings decide which shapes are trained in
    full, and `time_budget_s` holds everything. `families`: none named: all that the engine runs
    where nothing is trained, else independent drafts. `sampler`: see `search.study.How`; `workers`:
    processes that score and train, 0: this one only, and none may join; `executor`: where they run;
    `pareto`: goals of a set (`search.pareto`); `mix`: what scores are over, with `asked` of its
    heaviest part (`serving.asked_mix`); `training_budget_s`: device-seconds that alphas of drafters
    to be trained assume (None: `training_budget.budget_s`)."""

    target: str
    asked: WorkloadRequest = WorkloadRequest()
    space: str | None = None
    trials: int = 300
    alpha: str = "prior"
    domain: str = ""
    prompts: Path | None = None
    heldout: Path | None = None
    text: Path | None = None
    answer_tokens: int = 96
    confirm: int = 0
    finalists: int = 3
    confirm_prompts: int = 24
    time_budget_s: float = 780.0
    storage: str | None = None
    run: Path | None = None
    seed: int = 0
    top: int = 5
    max_gamma: int = MAX_GAMMA
    climb: bool = False
    families: tuple[str, ...] = ()
    sampler: Sampler = AUTO
    workers: int = 0
    executor: ExecutorName = "local"
    pareto: tuple[str, ...] = ()
    mix: Mix | None = None
    training_budget_s: float | None = None

    @property
    def engine(self) -> str:
        """Which engine serves."""
        return self.asked.engine or "transformers"

    @property
    def temperature(self) -> float:
        """0 is greedy."""
        return self.asked.temperature

    @property
    def kind(self) -> RoundKind:
        """The kind of drafter that the engine's version must run: heads' where nobody named a
        family and it runs no draft model."""
        for name in () if self.families else ("independent", "eagle3"):
            with suppress(ArchsearchError):
                with_engine(self.asked, kind := family(name).rounds)
                return kind
        return kind_of([family(name).rounds for name in self.families])

    def spaces(
        self, source: LatencySource, target: TargetRef, ranks: int, longest: int
    ) -> FamilySpaces:
        """The families with their spaces, for drafters served on `ranks` devices (see
        `SearchSpace.served`). A space that was named is its family's, the only one unless others
        are named."""
        own = load_space(self.space or default_space(target.architecture))
        named = self.families or ((own.family,) if self.space is not None else ())
        facts, trains = engine_facts(source.engine), self.confirm > 0
        families = choose_families(named, facts, source.version, target, trains=trains)
        known = {own.family: own}
        spaces = (known.get(name) or load_space(name) for name in families)
        served = [space.served(ranks, longest) for space in spaces]
        rounds, optional = source.rounds, not (named or trains)
        return family_spaces(served, facts, target.architecture, rounds, optional=optional)

    def check(self) -> None:
        """Raise ArchsearchError, before a run folder is made, for prompts or text that cannot be
        read, a storage that cannot be used, and what is of workers where there are none."""
        if self.prompts is not None or self.heldout is not None or self.confirm:
            load_prompt_set(self.prompts, self.heldout).check_apart()
        if self.text is not None:
            read_texts(self.text)
        if self.executor != "local" and self.workers < 1:
            raise ArchsearchError(
                f"--executor {self.executor} is for workers; add --workers N, 1 for those of others"
            )
        if self.storage:
            open_storage(self.storage)

    @property
    def continued(self) -> Path | None:
        """The folder that was named, where it holds a run already."""
        return self.run if self.run is not None and (self.run / "run.yaml").exists() else None

    def settled(self) -> SearchRequest:
        """The same request with what nobody said: the run's domain and largest gamma where it
        continues one; else the domain `narrow` where prompts of one kind decide (the user's, or
        those that drafts learn from), `chat` where not."""
        narrow = self.prompts is not None or self.confirm > 0
        before: Mapping[str, Any] = {}
        if self.continued is not None:
            before, narrow = open_run(self.continued).arguments, True
        gamma = before.get("max_gamma") if self.max_gamma == MAX_GAMMA else None
        return replace(
            self,
            domain=self.domain or str(before.get("domain") or ("narrow" if narrow else "chat")),
            max_gamma=int(gamma) if gamma else self.max_gamma,
            families=tuple(dict.fromkeys(family(name).family for name in self.families)),
        )

    def arguments(self) -> dict[str, object]:
        """What run.yaml keeps and a continued run must repeat, under the names of the options."""
        said = asdict(self.asked).items()
        asked = {"context" if name == "context_len" else name: value for name, value in said}
        flat = vars(self) | asked
        for name in ("asked", "mix", "run", "profile", "climb", "workers", "executor", "pareto"):
            del flat[name]  # what is kept otherwise, and what a continued run may change
        flat["storage"] = without_password(self.storage)
        flat["workload"] = None if self.mix is None else json.dumps(self.mix.to_dict())
        for name in ("families", "engine_options"):
            flat[name] = " ".join(flat[name]) or None
        plain = (int, float, str, bool, type(None))
        return {name: v if isinstance(v, plain) else str(v) for name, v in flat.items()}

    @classmethod
    def decide(
        cls,
        target: str,
        asked: WorkloadRequest,
        *,
        confirm: int | None = None,
        alpha: str | None = None,
        finalists: int | None = None,
        time_budget_s: float | None = None,
        **fields: Any,
    ) -> tuple[SearchRequest, str]:
        """(the request with what was left open, None, decided; why it only ranks although it had
        time to train, or ""). A time budget is meant for training unless alpha was given as a
        number or no weights are at hand. It climbs where nobody fixed how many finalists there
        are."""
        trains = alpha is not None and registry.trains(alpha)
        count, note = confirm or 0, ""
        if confirm is None and (trains or (time_budget_s is not None and alpha is None)):
            note = "" if trains else cannot_train(target, asked.gpu, asked.engine)
            count = 0 if note else 1
        climb = count > 0 and (trains or alpha is None) and finalists is None
        if time_budget_s is not None:
            fields["time_budget_s"] = time_budget_s
        request = cls(
            target,
            asked,
            alpha=alpha or cls.alpha,
            confirm=count,
            finalists=max(finalists or cls.finalists, count),
            climb=climb,
            **fields,
        )
        return request, note

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any], **changes: Any) -> SearchRequest:
        """The request that wrote these `arguments`; names it does not know are left out. `changes`:
        fields set otherwise."""
        mix = arguments.get("workload")
        known = {**arguments, "context_len": arguments.get("context", cls.asked.context_len)}
        known |= {
            name: Path(arguments[name]) if arguments.get(name) else None
            for name in ("prompts", "heldout", "text", "profile")
        }
        known |= {
            name: tuple(str(arguments.get(name) or "").split())
            for name in ("families", "engine_options")
        }
        known |= {
            "engine": arguments.get("engine") or "transformers",  # what runs of 0.1.0 were for
            "mix": mix_of(json.loads(mix), "the workload of the run") if mix else None,
        }
        asked = WorkloadRequest(
            **{name: known[name] for name in WorkloadRequest.__dataclass_fields__ if name in known}
        )
        own = {name: value for name, value in known.items() if name in cls.__dataclass_fields__}
        return cls(**{**own, "asked": asked, **changes})


@dataclass(frozen=True)
class Setting:
    """What a search chooses before anything is scored. `longest`: tokens in the KV cache at the end
    of an answer; `budget_s`: device-seconds that alphas of drafters to be trained assume; None:
    runs of earlier versions knew none."""

    target: TargetRef
    source: LatencySource
    workload: Workload
    families: FamilySpaces
    limits: Limits
    longest: int
    budget_s: float | None

    @classmethod
    def of(cls, request: SearchRequest, *, new: bool) -> Setting:
        """Resolve names and load the profile. `new`: a training budget that nobody named is the
        usual one. Raises ArchsearchError for what cannot be."""
        mix, asked = request.mix, request.asked
        target = served_target(resolve_target(request.target), asked)
        engine = engine_facts(request.engine)
        asked = replace(asked, dtype=asked.dtype or target.dtype_in(engine.gguf))
        if request.confirm:
            runnable_engine(request.engine)
            check_weights(target)
            if not engine.in_process:
                find_python(engine.name)
        lone = asked if mix is None else replace(asked, batch_size=1, context_len=mix.longest)
        source, workload = choose_latency(lone, target.architecture, request.kind)
        device, held = source.device, workload
        longest = asked.context_len + request.answer_tokens if mix is None else mix.longest
        if mix is not None:  # how much of a load fits is the mix's to say
            held = replace(workload, context_len=1)
            check_batch(engine, device, mix.in_flight)
            held_alone(mix, target.architecture, workload, source.latency, device)
        ranks = engine.ranks_of_draft(workload)
        families = request.spaces(source, target, ranks, longest)
        limits = memory_limits(families.spaces[0], target.architecture, held, device)
        budget = request.training_budget_s
        if new:
            spent = request.time_budget_s if request.confirm and device.is_cpu else None
            budget = budget_s(budget or spent, device)
        return cls(target, source, workload, families, limits, longest, budget)

    def recorded(self, request: SearchRequest) -> dict[str, object]:
        """`arguments`, with the training budget that was chosen."""
        return request.arguments() | {"training_budget_s": self.budget_s}

    def scorer(self, request: SearchRequest, acceptance: AcceptanceEstimator) -> Scorer:
        """What scores drafts by what is known of acceptance."""
        device = self.source.device
        scorer = Scorer(
            self.target.architecture,
            self.workload,
            self.source.latency,
            acceptance,
            max_gamma=request.max_gamma,
            domain=request.domain,
        ).with_limits(self.limits)
        # A window that does not reach the end of an answer costs alpha there, also where it holds
        # the context.
        context = replace(scorer.context, context_len=self.longest)
        scorer = scorer.with_acceptance(acceptance, context)
        if self.budget_s is not None:
            scorer = with_budget(scorer, device, self.budget_s)
        return scorer if request.mix is None else MixScorer(scorer, request.mix, device)


@dataclass(frozen=True)
class SearchSession:
    """A search in progress or reopened: what was asked (`request`), what was chosen for it
    (`setting`) and what scores (`scorer`). A step that learns hands on another one. `besides`:
    drafters other than those of the spaces."""

    request: SearchRequest
    setting: Setting
    scorer: Scorer
    run: Run
    prior_words: str = ""
    asked_text: AskedText = AskedText()
    besides: tuple[Alternative, ...] = ()

    @property
    def target(self) -> TargetRef:
        return self.setting.target

    @property
    def source(self) -> LatencySource:
        return self.setting.source

    @property
    def families(self) -> FamilySpaces:
        return self.setting.families

    def groups(self, scores: Sequence[Score]) -> list[list[Score]]:
        """Groups of tied `scores`, best first."""
        return grouped(scores, self.scorer.acceptance, self.context_of)

    def scorer_of(self, score: Score) -> Scorer:
        """The scorer that asks of acceptance as a score was asked for."""
        return self.scorer.with_acceptance(self.scorer.acceptance, self.context_of(score))

    def context_of(self, score: Score) -> AcceptanceContext:
        """Where acceptance was asked for."""
        for each in self.besides:
            if (each.score.proposer, each.score.needs) == (score.proposer, score.needs):
                return each.context
        return context_of(self.scorer.context, score, self.target)

    @classmethod
    def start(cls, request: SearchRequest) -> SearchSession:
        """Choose what was left open and open or create the run folder: all that can be wrong,
        first."""
        request = request.settled()
        request.check()
        request = replace(request, asked=with_engine(request.asked, request.kind))
        request = _with_fastest_drafts(request)
        setting = Setting.of(request, new=True)
        arguments = setting.recorded(request)
        described: dict[str, Any] = {
            "space": setting.families.spaces[0].to_dict(),
            "profile": setting.source.profile,
        }
        if request.continued is not None:
            run = resume_run(request.continued, arguments, **described)
        else:
            ensure_writable_dir(request.run or Path("runs"))
            device = setting.source.device.to_dict()
            run = create_run(Path("runs"), arguments, device=device, path=request.run, **described)
            if request.mix is not None:
                save(run.path / WORKLOAD_FILE, request.mix)
        sketch = load_sketch(run.path)  # of the user's prompts, or those that drafts are trained on
        if sketch is None and (request.prompts is not None or request.confirm):
            sketch = sketch_of_set(load_prompt_set(request.prompts, request.heldout))
            save(run.path / SKETCH_FILE, sketch)
        return cls._of(request, setting, run, AskedText(sketch, request.domain))

    @classmethod
    def reopen(cls, path: Path) -> SearchSession:
        """The session of an existing run, as it was made. Raises MissingDataError where its profile
        is not here."""
        run = open_run(path)
        profile = run.info["profile"]
        folder, weights = profile.get("folder"), profile.get("weights")
        folder = Path(folder) if folder else None
        if folder is not None and not folder.is_dir():  # moved, or made on another machine
            folder = find_profile(run.device, own=folder.name)
        request = SearchRequest.from_arguments(run.arguments, confirm=0, run=path, storage=None)
        asked = replace(
            request.asked,
            # beside weights in a format of their own `dtype` is that of the pass
            dtype=weights if weights in WEIGHT_BYTES else profile.get("dtype", request.asked.dtype),
            mode=profile.get("mode", request.asked.mode),
            profile=folder,
        )
        request = replace(request, asked=asked).settled()
        text = AskedText(load_sketch(run.path), request.domain)
        return cls._of(request, Setting.of(request, new=False), run, text)

    @classmethod
    def _of(
        cls, request: SearchRequest, setting: Setting, run: Run, text: AskedText
    ) -> SearchSession:
        """The session with its scorer, by the prior that the run keeps."""
        acceptance, words = acceptance_for(
            request.alpha,
            request.target,
            asked=text,
            temperature=request.temperature,
            state=run.path / PRIOR_FILE,
        )
        scorer = setting.scorer(request, acceptance)
        return cls(request, setting, scorer, run, words, text)

    def earlier(self) -> dict[str, object] | None:
        """What earlier runs moved (`acceptance.known.Earlier`); None where none did."""
        path = self.run.path / PRIOR_FILE
        return read_json(path, "prior of the run").get("earlier") if path.exists() else None

    def about(self) -> dict[str, object]:
        """What scores depend on besides space and scorer, for the storage."""
        profile, rounds, mix = self.source.profile, self.source.rounds, self.request.mix
        known = {name: profile.get(name) for name in ("hash", "source", "dtype", "mode")}
        known |= {"drafts": profile["drafts"]} if "drafts" in profile else {}
        known |= {"device": self.source.device.key, "engine": self.request.engine}
        known |= {} if rounds is None else {"rounds": rounds.label()}
        return known if mix is None else known | {"mix": mix.to_dict()}

    def trainer(self, threads: int | None = None) -> DraftTrainer:
        """Where this run's drafts are trained, on `threads` (default: the profile's)."""
        from archsearch.models.load import LoadedTarget  # needs torch, which ranking does not

        # for a GPU of another machine on the CPU
        device = "cuda" if not self.source.device.is_cpu and has_gpu() else "cpu"
        least = int(self.run.info.get("heldout_least", 0))
        prompts = load_prompt_set(self.request.prompts, self.request.heldout, least)
        return DraftTrainer(
            LoadedTarget(self.target, self.source.dtype, device),
            prompts,
            self.run.path,
            answer_tokens=self.request.answer_tokens,
            plain_text=self.request.text,
            threads=threads or self.source.threads,
        )


def _with_fastest_drafts(request: SearchRequest) -> SearchRequest:
    """The request with one precision of drafts: that in which the best drafter that has one (not
    lookup) is fastest, else the first; a continued run's own. Acceptance is predicted the same in
    all."""
    names = (request.asked.draft_dtype or "").split(",")
    if len(names) == 1:
        return request
    each = {name: replace(request.asked, draft_dtype=name) for name in names}
    if request.continued is not None:
        known = open_run(request.continued).arguments.get("draft_dtype")
        return replace(request, asked=each.get(str(known)) or each[names[0]])
    acceptance, _ = acceptance_for(request.alpha, request.target, temperature=request.temperature)

    def best(asked: WorkloadRequest) -> float:
        own = replace(request, asked=asked)
        setting = Setting.of(own, new=True)
        scorer = setting.scorer(own, acceptance)
        ranked = (
            score.ranked_by
            for space in setting.families.spaces
            if family(space.family).trains
            for score in study.search(space, scorer, trials=own.trials, seed=own.seed).best
        )
        return max(ranked, default=0.0)

    reached = {name: best(asked) for name, asked in each.items()}
    chosen = max(names, key=reached.__getitem__)
    words = ", ".join(f"{worth:.2f}x in {name}" for name, worth in reached.items())
    say(f"Precision of drafts: {chosen} (the best: {words}; acceptance taken to be the same).")
    return replace(request, asked=each[chosen])


def has_gpu() -> bool:
    """Whether torch finds a GPU here."""
    import torch

    return bool(torch.cuda.is_available())


def default_space(target: Architecture) -> str:
    """The space that suits a target's size."""
    size = parameters(target)
    return "demo" if size < 400e6 else "wide-shallow" if size > 5e9 else "default"


def memory_limits(
    space: SearchSpace, target: Architecture, workload: Workload, device: Device
) -> Limits:
    """The space's own limits, and what the target leaves free. Raises ArchsearchError where it
    alone does not fit the device."""
    limits = space.limits(target)
    needed = memory_bytes(target, None, workload).total_bytes
    usable = usable_bytes(device, workload)
    free = usable - needed
    if free <= 0:
        raise ArchsearchError(
            f"the target alone needs {needed / 2**30:.1f} GiB per device and {device.key} has"
            f" {usable / 2**30:.1f} usable; raise --tensor-parallel or lower --batch-size/--context"
        )
    most = free if limits.max_memory_bytes is None else min(free, limits.max_memory_bytes)
    return Limits(limits.max_parameters, int(most))


def check_weights(target: TargetRef) -> None:
    """Raise MissingDataError where a target's weights cannot be had here (a hub is asked by
    loading)."""
    from archsearch.models.load import packaged_gguf, weights_source

    if target.folder is None and target.weights:  # converted by loading
        packaged_gguf(target.name, target.weights)
    else:
        weights_source(target)


def cannot_train(target: str, gpu: str | None, engine: str | None) -> str:
    """Why drafts of a target cannot be trained and confirmed here, in the engine that was named; ""
    where nothing speaks against it."""
    ref = resolve_target(target)
    try:
        if engine is not None:
            runnable_engine(engine)
        check_weights(ref)
    except ArchsearchError as error:
        return str(error)
    if gpu is not None and not resolve_device(gpu).is_cpu and not has_gpu():
        return f"drafts for {gpu} are trained and confirmed on it, and this machine has no GPU"
    return ""
