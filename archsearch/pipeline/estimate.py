"""`archsearch estimate`: price drafters that exist, of any family, in one engine or in several side
by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from archsearch.acceptance.estimator import Acceptance, AcceptanceEstimator, GivenAcceptance
from archsearch.acceptance.families import FamilyAcceptance
from archsearch.acceptance.known import AskedText
from archsearch.acceptance.learnt import (
    HEAD_GUESS,
    HEAD_GUESS_DECADES,
    measured_alpha,
    recorded_tokens,
    trained_as,
    training_of,
)
from archsearch.architecture.published_drafters import published_as
from archsearch.capacity import memory_bytes, usable_bytes
from archsearch.drafters.heads import ChainHead
from archsearch.drafters.models import Independent
from archsearch.drafters.registry import short_of
from archsearch.engine_facts import engine_facts, shared_by
from archsearch.errors import ArchsearchError
from archsearch.models.targets import NamedDrafter, TargetRef, resolve_drafter, resolve_target
from archsearch.needs import Needs, TrainingBudget
from archsearch.pipeline.families import kind_of
from archsearch.pipeline.latency import LatencySource, acceptance_for, choose_latency, served_target
from archsearch.pipeline.rounds_explained import (
    difference,
    drawn_greedily,
    free_layers,
    remedied,
    too_long,
    warnings_of,
)
from archsearch.pipeline.serving import (
    ANSWER,
    check_batch,
    device_of,
    engine_requests,
    reach_of,
    served_words,
)
from archsearch.pipeline.training_budget import asked_budget, budget_s, with_budget
from archsearch.report.phrases import Asked
from archsearch.report.terminal.estimate import Difference, Entry, Estimated, WithPrompts
from archsearch.search.objective import Score, Scorer, grouped
from archsearch.speedup import Tree
from archsearch.traffic.mix import LoadPart, Mix
from archsearch.traffic.mix_scorer import MixScorer
from archsearch.traffic.traces import Lengths
from archsearch.workload import DTYPE_BYTES, WEIGHT_BYTES, Workload, WorkloadRequest

PADDED: Final = (
    "if only padding differs, vLLM takes the draft once its rows are padded to the target's (vLLM"
    " issue 5203)"
)
PADDING: Final = 512
"""Rows by which vocabularies of one tokenizer differ, at most (Qwen2.5: 151,936 and 152,064)."""


@dataclass(frozen=True)
class EstimateRequest:
    """What `archsearch estimate` was asked.

    `drafts`: names as `models.targets.resolve_drafter` takes them. `alpha`: `prior`, or a number;
    `gamma` None: the best of 1 to 16. `tau` (at `gamma`), `trained_tokens`, `training`: as of
    `AcceptanceRequest`. `engines` and `engine_versions` (`0.16.0`, or `vllm=0.16.0`): instead of
    that of `asked`; each pair is priced in each. `mix`, `training_budget_s`: as of `SearchRequest`.
    `tree`: `topk,steps,tokens` that heads draft; None: a chain.
    """

    target: str
    drafts: tuple[str, ...]
    asked: WorkloadRequest = WorkloadRequest()
    alpha: str = "prior"
    gamma: int | None = None
    domain: str = "chat"
    training: str | None = None
    tau: float | None = None
    trained_tokens: float | None = None
    engines: tuple[str, ...] = ()
    engine_versions: tuple[str, ...] = ()
    mix: Mix | None = None
    training_budget_s: float | None = None
    tree: str | None = None


def tree_of(text: str) -> Tree:
    """`4,5,8`: top-k, steps and tokens of a draft tree. Raises ArchsearchError for what is none."""
    try:
        topk, steps, tokens = (int(part) for part in text.split(","))
        return Tree(topk, steps, tokens)
    except ValueError as error:
        why = f": {error}" if "tree" in str(error) else ""
        raise ArchsearchError(
            f"a tree is top-k, steps, tokens verified, as in 4,5,8, not {text!r}{why}"
        ) from error


def _as_trees(named: Sequence[NamedDrafter], text: str) -> list[NamedDrafter]:
    """ArchsearchError for a drafter that cannot draft a tree."""
    tree, found = tree_of(text), []
    for each in named:
        if not isinstance(each.drafter, ChainHead):
            raise ArchsearchError(
                f"{each.name}: only heads that draft token by token (eagle, eagle3, mtp) draft"
                " trees; leave out --tree"
            )
        found.append(replace(each, drafter=replace(each.drafter, tree=tree)))
    return found


def _in_format(
    named: Sequence[NamedDrafter], name: str, request: EstimateRequest
) -> list[NamedDrafter]:
    """Independent drafts with the weights of their layers in a format. Raises ArchsearchError for
    another drafter, on a CPU, and in an engine of GGUF files."""
    elsewhere = device_of(request.asked).is_cpu or any(
        engine_facts(engine).gguf for engine in request.engines
    )
    note = (
        f"{WEIGHT_BYTES[name]:g} bytes a weight of its layers, modelled as a target's, once"
        " quantised; what that costs in acceptance is not known"
    )
    found = []
    for each in named:
        if elsewhere or not isinstance(each.drafter, Independent):
            raise ArchsearchError(
                f"{each.name}: --draft-dtype {name} prices the weights of independent drafts on a"
                " GPU; heads take bfloat16 or fp8, drafts on a CPU or in llama.cpp a GGUF's"
            )
        drafter = replace(each.drafter, architecture=each.drafter.architecture.in_format(name))
        title, notes = f"{each.name} in {name}", [*each.notes, note]
        found.append(replace(each, name=title, drafter=drafter, notes=notes))
    return found


@dataclass(frozen=True)
class Priced:
    """One draft in one engine, in a group of its own, and what priced it. `budget`: what a drafter
    that nobody has published would be trained with."""

    entry: Entry
    scorer: Scorer
    source: LatencySource
    budget: TrainingBudget | None

    @property
    def score(self) -> Score:
        return self.entry.score


def estimate_drafts(request: EstimateRequest) -> Estimated:
    """A Score of each draft in each engine, best first, and which of them the error bars cannot
    tell apart. Raises ArchsearchError for an engine that does not run such drafts, or cannot shard
    one."""
    priced, asked = price_drafts(request)
    best = priced[0]
    group_of = {
        id(item): number
        for found in _by_engine(priced)
        for number, group in enumerate(_groups(found), start=1)
        for item in found
        if item.score in group
    }
    return Estimated(
        **vars(asked),
        by=best.source.by,
        drafts=tuple(replace(item.entry, group=group_of[id(item)]) for item in priced),
        mix=request.mix,
        differences=_differences(priced),
        with_prompts=_with_prompts(best) if request.mix is None else None,
    )


def _by_engine(priced: Sequence[Priced]) -> list[list[Priced]]:
    found: dict[str, list[Priced]] = {}
    for item in priced:
        found.setdefault(item.source.served, []).append(item)
    return list(found.values())


def _with_prompts(item: Priced) -> WithPrompts | None:
    """What the best draft's gain becomes once prompts are read: tokens/s over those without a
    draft, as many requests in flight as the batch has, followed by others or not; a prompt and half
    an answer fill its context. None on a CPU, and where it cannot be priced."""
    work = item.scorer.workload
    tree = getattr(item.score.proposer, "tree", None)
    if any(item.entry.barred) or item.source.device.is_cpu or tree:
        return None
    prompt = max(1, work.context_len - ANSWER // 2)
    base = item.scorer.with_gammas((item.score.gamma,))
    part = LoadPart("prompts", 1.0, Lengths.of([prompt]), Lengths.of([ANSWER]), work.batch_size)
    gains = []
    for load in (part, replace(part, refill=False)):
        try:
            mix = MixScorer(base, Mix((load,)), item.source.device)(item.score.proposer).mix
        except ArchsearchError:
            return None
        assert mix is not None
        gains.append(mix.parts[0].tokens_per_s / mix.parts[0].plain_tokens_per_s)
    return WithPrompts(work.batch_size, ANSWER, prompt, item.entry.draft, *gains)


def _groups(priced: Sequence[Priced]) -> list[list[Score]]:
    """Groups of tied drafts in one engine; each is judged in the context it was priced in."""
    contexts = {id(item.score): item.scorer.context for item in priced}
    scores = [item.score for item in priced]
    prior = priced[0].scorer.acceptance
    return grouped(scores, prior, lambda score: contexts[id(score)])


def price_drafts(request: EstimateRequest) -> tuple[list[Priced], Asked]:
    """Each draft in each engine, best first, and what was asked of them in words and numbers.
    Raises as `estimate_drafts`."""
    ref = served_target(resolve_target(request.target), request.asked)
    if request.tree is not None:
        if request.gamma is not None or request.mix is not None:
            raise ArchsearchError(
                "--tree says its steps and is priced at one batch size; leave out"
                f" {'--gamma' if request.mix is None else '--workload'}"
            )
        request = replace(request, gamma=tree_of(request.tree).steps)
    published = None if request.tau is None else GivenAcceptance.of_tau(request.tau, request.gamma)
    if published is not None:
        if request.alpha != "prior":
            raise ArchsearchError("--tau and --alpha say the same: leave one out")
        request = replace(request, alpha=f"{published.alpha:.4g}")
    asked_text = AskedText(domain=request.domain)  # nobody says which prompts
    acceptance, prior_words = acceptance_for(
        request.alpha, request.target, asked=asked_text, temperature=request.asked.temperature
    )
    if published is not None:
        acceptance, prior_words = published, f"tau {request.tau:g} at gamma {request.gamma} given"
    priced: list[Priced] = []
    workloads: dict[str, Workload] = {}
    named = [
        resolve_drafter(name, ref, reach_of(request.asked, request.mix)) for name in request.drafts
    ]
    other = [each.name for each in named if each.model is None]
    if request.training and other:
        raise ArchsearchError(f"--training is of draft models, not of {other[0]}: leave one out")
    if request.tree is not None:
        named = _as_trees(named, request.tree)
    narrow = (request.asked.draft_dtype or "").lower()
    if narrow in WEIGHT_BYTES.keys() - DTYPE_BYTES.keys():  # a format of weights alone
        named = _in_format(named, narrow, request)
        request = replace(request, asked=replace(request.asked, draft_dtype=None))
    kind, mix = kind_of([each.drafter.rounds for each in named]), request.mix
    versions, left = request.engine_versions, list[str]()
    each_asked = list(engine_requests(request.asked, request.engines, versions, kind))

    def lacks(each: NamedDrafter, asked: WorkloadRequest) -> str:
        version, model_type = asked.engine_version, ref.architecture.model_type
        return engine_facts(asked.engine).lacks(each.drafter.family, version, model_type)

    for each in named:
        whys = [lacks(each, asked) for asked in each_asked]
        if all(whys):
            raise ArchsearchError(whys[0])
        left += filter(None, whys)
    for asked in each_asked:
        facts, able = engine_facts(asked.engine), [e for e in named if not lacks(e, asked)]
        if not able:
            continue
        if mix is not None:
            asked = replace(asked, batch_size=1, context_len=mix.longest)
        if asked.dtype is None:
            asked = replace(asked, dtype=ref.dtype_in(facts.gguf))
        source, workload = choose_latency(asked, ref.architecture, kind)
        if mix is not None:
            check_batch(facts, source.device, mix.in_flight)
        if any(each.drafter.rounds != kind for each in able):  # each draft has its own way then
            words = served_words(source.engine, source.rounds, source.device, how=False)
            source = replace(source, served=words)
        workloads[source.served] = workload
        priced += _priced(request, able, ref, source, workload, acceptance)
    # what is assumed by the lower end, as in a search; what cannot be served last
    priced.sort(key=lambda item: (*item.entry.barred, *item.score.sort_key))
    best = priced[0]
    return priced, Asked(
        target=ref.name,
        device=best.source.device.key,
        latency=best.source.words,
        weights=best.source.profile["weights"],
        workload=workloads[best.source.served],
        alpha=request.alpha,
        prior=prior_words,
        warnings=(*dict.fromkeys(left), *switch_warnings(priced)),
        training_budget=asked_budget(best.budget, request.training_budget_s is not None),
    )


def _priced(
    request: EstimateRequest,
    named: Sequence[NamedDrafter],
    ref: TargetRef,
    source: LatencySource,
    workload: Workload,
    acceptance: AcceptanceEstimator,
) -> list[Priced]:
    gammas, target = [request.gamma] if request.gamma else None, ref.architecture
    device = source.device
    scorer = Scorer(
        target, workload, source.latency, acceptance, gammas=gammas, domain=request.domain
    )
    if request.mix is not None:
        scorer = MixScorer(scorer, request.mix, device)
    scorer = with_budget(scorer, device, budget_s(request.training_budget_s, device))
    budget, facts, found = scorer.context.budget, engine_facts(source.engine), list[Priced]()
    usable = usable_bytes(device, workload)
    for each in named:
        facts.check_drafter(each.drafter, shared_by(workload), source.version, each.name)
        training, doubt, known = request.training or "target", "", None
        folder = Path(each.hub_id).expanduser() if each.hub_id else None
        tokens = request.trained_tokens or recorded_tokens(folder)
        if each.model is not None and not request.training and request.trained_tokens is None:
            training, doubt = training_of(each.model, ref)
            if folder and request.alpha == "prior":
                known = measured_alpha(folder, ref, request.asked.temperature)
            if known is not None:
                doubt = f"alpha as the run that trained it measured it, {known.words()}"
        head = each.drafter.trains and not each.drafter.is_model and each.hub_id
        unknown = head and tokens is None and not published_as(each.hub_id)
        if unknown:
            doubt = (
                "nobody says how this head was trained: on 3M to 300M tokens as far as its band"
                " knows (else --trained-tokens, or --tau of what was published)"
            )
        notes = [*each.notes, *([doubt] if doubt and request.alpha == "prior" else [])]
        rows, own_rows = target.vocab_size, each.drafter.architecture.vocab_size
        other = abs(rows - own_rows) > PADDING
        if rows != own_rows:
            why = "engines need the same tokenizer" if other else PADDED
            notes.append(f"vocabulary {own_rows}, target {rows}: {why}")
        notes += too_long(scorer, workload.context_len)
        if scorer.workload.temperature:
            notes += drawn_greedily(source.engine, source.version, [each.drafter.family])
        need, no_room = memory_bytes(target, each.drafter, workload).total_bytes, ""
        if need > usable:
            no_room = (
                f"target, draft and caches need {need / 2**30:.0f} GiB on each device,"
                f" {usable / 2**30:.0f} are usable: raise --tensor-parallel, or lower --batch-size"
                " or --context"
            )
        reach = reach_of(request.asked, request.mix)
        if short_of(each.drafter, target, reach):
            no_room = (
                f"its positions end at {each.drafter.architecture.max_position_embeddings:,} of"
                f" {reach:,} tokens of context; beyond, engines stop or do not draft"
            )
        bought = None if each.hub_id or request.trained_tokens is not None else budget
        context = replace(trained_as(scorer.context, each.model, training, tokens), budget=bought)
        if unknown:
            context = replace(context, trained_tokens=HEAD_GUESS, tokens_std=HEAD_GUESS_DECADES)
        own = scorer.with_acceptance(acceptance, context)
        if known is not None:
            counted = FamilyAcceptance(Acceptance(known))
            own = own.with_families({each.drafter.family: counted})
        score = replace(own(each.drafter), engine_version=source.version)
        if each.hub_id:
            score = replace(score, needs=Needs("exists", each.hub_id))
        rounds, better = source.rounds, remedied(source.rounds, own, score)
        entry = Entry(
            draft=each.name,
            training=training,
            notes=(*notes, *_share_notes(score)),
            no_room=no_room,
            other_tokenizer=other,
            group=len(found),
            served=source.served,
            engine_class=rounds.running(each.drafter.rounds).costs.title if rounds else None,
            score=score,
            free_layers=free_layers(own, score),
            remedied=better if better is not None and better.switches else None,
        )
        found.append(Priced(entry, own, source, budget))
    return found


def _share_notes(score: Score) -> list[str]:
    """That a drafter does not propose in every round; that its acceptance is assumed."""
    share, assumed = score.proposer.drafts_share, score.assumed
    if share >= 1.0:
        ranked = "so the lower end of its speed-up ranks it"
        return [f"its acceptance is assumed ({assumed}), {ranked}"] if assumed else []
    return [
        f"assumed to propose in {share:.0%} of rounds; alpha counts those rounds, tau all; measure"
        " both on your text"
    ]


def _differences(priced: Sequence[Priced]) -> tuple[Difference, ...]:
    """For each draft, why the engine it gains most in beats each other one."""
    found = []
    for name in dict.fromkeys(item.entry.draft for item in priced):
        best, *others = (item for item in priced if item.entry.draft == name)
        for other in others:
            there = other.scorer.with_gammas((best.score.gamma,))(other.score.proposer)
            found.append(difference(name, best.score, other.score, there))
    return tuple(found)


def switch_warnings(priced: Sequence[Priced], batches: Sequence[float] = ()) -> tuple[str, ...]:
    """`warnings_of` each engine, at these batch sizes where any are given."""
    found = []
    for items in _by_engine(priced):
        able = [item for item in items if not item.entry.other_tokenizer]
        drafts = [(item.entry.draft, item.scorer, item.score) for item in able]
        if batches:
            drafts = [
                (f"{draft} at batch size {x:g}", there, there(score.proposer))
                for draft, scorer, score in drafts
                for x in batches
                for there in [scorer.at_batch(int(x))]
            ]
        found += warnings_of(items[0].source.rounds, items[0].source.words, drafts)
    return tuple(found)
