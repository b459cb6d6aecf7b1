"""`archsearch acceptance`: how much of what a draft proposes does its target accept, on the user's
own prompts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from archsearch.acceptance.early_exit import exit_traces
from archsearch.acceptance.estimator import AcceptanceContext, GivenAcceptance
from archsearch.acceptance.learnt import recorded_tokens, run_of, trained_as, training_of
from archsearch.acceptance.lookup import texts_of
from archsearch.acceptance.measured import Trace, agreement_trace, alpha_resampled, sampling_trace
from archsearch.acceptance.prior import PriorAcceptance
from archsearch.acceptance.replay import replay_tau, replays
from archsearch.acceptance.terms import READING_STD
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.hf_config import read_architecture
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.estimate import Estimate
from archsearch.files import digest, ensure_writable_dir, read_json, write_json
from archsearch.models.files import has_tokenizer, has_weights, is_gguf
from archsearch.models.targets import TargetRef, resolve_target
from archsearch.paths import cache_dir
from archsearch.pipeline.latency import choose_latency, served_target
from archsearch.pipeline.untrained import Untrained, exit_shape, lookup_figures, untrained
from archsearch.progress import ProgressLine
from archsearch.records import WRONG_SHAPE, save
from archsearch.report.terminal.acceptance import (
    DraftAcceptance,
    Exits,
    Explanation,
    Figures,
    Gains,
    Intervals,
    Measured,
    Model,
    OnText,
    Prices,
    Published,
    Replayed,
    Said,
)
from archsearch.search.objective import Score, Scorer
from archsearch.speedup import alpha_estimate, logit
from archsearch.text.prompt_set import distinct, load_prompt_set, spread
from archsearch.text.prompts import Prompt, encode_prompts, read_prompts
from archsearch.text.settings import Writing, check_sampling
from archsearch.workload import WorkloadRequest

if TYPE_CHECKING:
    from archsearch.text.cache import TextCache

MAX_GAMMA: Final = 8


@dataclass(frozen=True)
class AcceptanceRequest:
    """What `archsearch acceptance` was asked.

    `prompts` None: those held out that ship with archsearch. `top_p` counts where
    `asked.temperature` is above 0. `domain` None: `narrow`, as prompts of one kind are, or `chat`
    where nothing is measured. `training`: how the draft was trained, `trained_tokens`: on so many
    of the target's text (None: as is known of it). `tau`: published tokens a round at `gamma`,
    instead of a measurement. `dtype`: of target and draft while they are compared. `explain`: also
    the prior's terms; alone where the draft is a shape without weights. A device or profile in
    `asked`: also the modelled speed-up.
    """

    target: str
    draft: str
    asked: WorkloadRequest = WorkloadRequest()
    prompts: Path | None = None
    top_p: float = 1.0
    max_prompts: int = 64
    answer_tokens: int = 128
    dtype: str = "float32"
    explain: bool = False
    domain: str | None = None
    training: str | None = None
    cache: Path | None = None
    output: Path | None = None
    trace: Path | None = None
    seed: int = 0
    trained_tokens: float | None = None
    tau: float | None = None
    gamma: int | None = None

    def check(self) -> None:
        """Raise ArchsearchError for options that contradict each other, before anything is
        loaded."""
        if self.tau is not None:
            GivenAcceptance.of_tau(self.tau, self.gamma)
        elif self.gamma is not None:
            raise ArchsearchError("--gamma is of --tau: all of 1 to 8 are measured")
        check_sampling(self.asked.temperature, self.top_p)
        if self.output is not None:
            ensure_writable_dir(self.output.parent)

    def priced(
        self, target: TargetRef, context_len: int
    ) -> tuple[Prices, Scorer] | tuple[None, None]:
        """What prices speed-ups, at the texts' context, and where its latencies come from; nothing
        where nobody asked."""
        if self.asked.gpu is None and self.asked.profile is None:
            return None, None
        served = served_target(target, self.asked).architecture
        source, workload = choose_latency(replace(self.asked, context_len=context_len), served)
        scorer = Scorer(served, workload, source.latency, GivenAcceptance(0.5))
        return Prices(source.words, source.device.key, source.dtype), scorer

    def said(self) -> Said:
        """What every answer repeats."""
        return Said(self.target, self.draft, self.prompts, self.asked.temperature, self.top_p)


@dataclass(frozen=True)
class DraftRef:
    """A draft that was found but not loaded. `ref` None: nothing but a config.json. `at_hand`: its
    weights lie here, or were asked for by hub id; of a catalogue name some may be on the hub."""

    name: str
    architecture: Architecture
    ref: TargetRef | None
    at_hand: bool

    @property
    def has_weights(self) -> bool:
        return self.at_hand or (self.ref is not None and self.ref.hub_id is not None)


def find_draft(name: str) -> DraftRef:
    """The draft called `name`: a folder, a config.json, a GGUF file, a catalogue name or a hub id.
    Raises ArchsearchError for none of them."""
    path = Path(os.path.expanduser(name))
    if path.is_file() and not is_gguf(path):
        return DraftRef(name, read_architecture(path), None, False)
    ref = resolve_target(name)
    if ref.folder is not None:
        at_hand = has_weights(ref.folder)
    else:
        at_hand = ref.weights is not None or ref.hub_id == name
    return DraftRef(name, ref.architecture, ref, at_hand)


def measure_acceptance(request: AcceptanceRequest) -> DraftAcceptance:
    """alpha, acceptance by position and tau at gamma 1..8 of a draft, on text that the target
    writes for the prompts; also written to `request.output`. Raises ArchsearchError for models
    without weights, tokenizers that differ, prompts or answers that are too short."""
    request.check()
    target, kind = resolve_target(request.target), untrained(request.draft)
    if kind is not None and request.tau is not None:
        raise ArchsearchError(
            f"--tau of {request.draft}: archsearch estimate --tau prices it over all rounds"
        )
    result = (
        measure_draft(request, target) if kind is None else measure_untrained(request, target, kind)
    )
    if request.output is not None:
        save(request.output, result)
    return result


def measure_draft(request: AcceptanceRequest, target: TargetRef) -> DraftAcceptance:
    """`measure_acceptance` of a draft model, or what is published of it; with `explain` also the
    prior's terms."""
    draft = find_draft(request.draft)
    measures = request.tau is None and (draft.at_hand or not request.explain)
    domain = request.domain or ("narrow" if measures else "chat")
    training = request.training or (training_of(draft.ref, target)[0] if draft.ref else "target")
    folder = draft.ref.folder if draft.ref is not None else None
    tokens = request.trained_tokens or recorded_tokens(folder)
    on_text = alpha = published = explained = None
    if measures:
        trace, notes, context_len = record(request, target, draft)
        prices, scorer = request.priced(target, context_len)
        price = None if scorer is None else partial(scorer.measured, draft.architecture)
        on_text = OnText(request.dtype, context_len, notes, measured(trace, price), prices)
        if request.trace is not None:
            trace.save(request.trace)
    if request.tau is not None:
        level = logit(GivenAcceptance.of_tau(request.tau, request.gamma).alpha)
        alpha = alpha_estimate(level, READING_STD, "given")
        published = Published(request.tau, request.gamma)
    if request.explain or request.tau is not None:
        prior, shape = PriorAcceptance(), draft.architecture
        asked = AcceptanceContext(target.architecture, request.asked.temperature, domain=domain)
        context = trained_as(asked, draft.ref, training, tokens)
        explained = Explanation(prior.predict(shape, context).alpha, prior.parts(shape, context))
    model = Model(draft.architecture, draft.architecture.label(), domain, training, tokens)
    return DraftAcceptance(request.said(), model, None, on_text, alpha, published, explained)


def measure_untrained(
    request: AcceptanceRequest, target: TargetRef, kind: Untrained
) -> DraftAcceptance:
    """`measure_acceptance` of a drafter that nobody trains: lookup is replayed on the text alone,
    early exit takes one pass of the target. Raises ArchsearchError as that does, and for options
    that are for models only."""
    if request.explain or request.trace is not None:
        raise ArchsearchError(
            f"--draft {request.draft} is no model: leave --explain and --trace out"
        )
    greedy = request.asked.temperature == 0
    if kind.lookup is None and not greedy:
        raise ArchsearchError("early exit is measured on greedy text; leave --temperature out")
    exits = () if kind.lookup else kind.layers(target.architecture.num_hidden_layers)
    for layer in exits:
        exit_shape(target.architecture, layer)  # the target has such an exit
    prompts, source = _prompts(request)

    from archsearch.models.load import load_target, load_tokenizer

    texts, end_ids, more = written_text(request, target, load_tokenizer(target), prompts)
    context_len = _mean_context(texts)
    prices, scorer = request.priced(target, context_len)
    figures: Replayed | Exits
    if kind.lookup is not None:
        figures = lookup_figures(kind.lookup, texts_of(texts.sequences, end_ids), scorer)
    else:
        with ProgressLine("measure") as line:
            model = load_target(target, request.dtype)[0]
            traces = exit_traces(model, texts.sequences, exits, end_ids=end_ids, progress=line)
        figures = Exits({layer: _exit(trace, layer, scorer) for layer, trace in traces.items()})
    notes = [f"prompts: {source}", *more]
    on_text = OnText(request.dtype, context_len, notes, figures, prices)
    return DraftAcceptance(request.said(), family=kind.family, on_text=on_text)


def _exit(trace: Trace, layer: int, scorer: Scorer | None) -> Measured:
    found = measured(trace)
    if scorer is None:
        return found
    best = scorer.measured(exit_shape(scorer.target, layer), found.whole.alpha, found.whole.tau)
    return replace(found, best_gamma=best.gamma if best.pays else 0, speedup=best.speedup)


# --- recording


def record(
    request: AcceptanceRequest, target: TargetRef, draft: DraftRef
) -> tuple[Trace, list[str], int]:
    """The trace of the draft over the target's text, notes for the user, and the mean tokens in the
    KV cache. Raises MissingDataError for a draft without weights."""
    if not draft.has_weights or draft.ref is None:
        raise MissingDataError(
            f"draft {draft.name!r} has no weights to measure; give a folder with model.safetensors"
            " (or ask with --explain alone)"
        )
    prompts, source = _prompts(request)

    from archsearch.models.drafts import load_draft
    from archsearch.models.load import best_device, load_target, load_tokenizer

    tokenizer = load_tokenizer(target)
    notes = _check_tokens(tokenizer, target, draft.ref)
    texts, end_ids, more = written_text(request, target, tokenizer, prompts)
    seen = _seen_words(request.prompts, draft.ref.folder)
    notes += [f"prompts: {source}", *filter(None, [seen]), *more]
    if draft.ref.folder is not None:
        model = load_draft(draft.ref.folder, request.dtype)
        model.to(best_device(draft.ref, request.dtype))  # type: ignore[arg-type]
    else:
        model = load_target(draft.ref, request.dtype)[0]
    with ProgressLine("measure") as line:
        measure: Callable[..., Trace] = agreement_trace
        if (temperature := request.asked.temperature) > 0:
            measure = partial(sampling_trace, temperature=temperature, top_p=request.top_p)
        trace = measure(model, texts, end_ids=end_ids, progress=line)
    return trace, notes, _mean_context(texts)


def _mean_context(texts: TextCache) -> int:
    """Tokens in the KV cache in the middle of an answer."""
    lengths = [s.prompt_tokens + int(s.greedy_ids.shape[0]) / 2 for s in texts.sequences]
    return round(sum(lengths) / len(lengths))


def _check_tokens(tokenizer: Any, target: TargetRef, draft: TargetRef) -> list[str]:
    """Raise for a draft whose token ids are not the target's; padding rows alone are a note."""
    from archsearch.models.load import check_tokenizer, load_tokenizer

    ours, theirs = target.architecture.vocab_size, draft.architecture.vocab_size
    if draft.folder is None or has_tokenizer(draft.folder):
        check_tokenizer(tokenizer, load_tokenizer(draft), f"of {draft.name}")
    elif ours != theirs:
        raise ArchsearchError(
            f"the draft's vocabulary has {theirs} tokens, the target's {ours}, and {draft.folder}"
            " has no tokenizer to compare; use a draft made for this target"
        )
    if ours == theirs:
        return []
    return [
        f"the draft's vocabulary is padded to {theirs} rows, the target's to {ours}: some engines"
        " refuse such a pair"
    ]


def _prompts(request: AcceptanceRequest) -> tuple[list[Prompt], str]:
    """The prompts, and where they come from: read before torch is, which takes seconds."""
    if request.prompts is None:
        found = load_prompt_set(None, None).heldout
        source = "the held-out ones that ship with archsearch; yours tell more: --prompts"
    else:
        found, left_out = distinct(read_prompts(request.prompts))
        source = f"{request.prompts}{left_out}"
    return spread(found, request.max_prompts), source


def _seen_words(file: Path | None, folder: Path | None) -> str | None:
    """How many prompts of a file the run of a draft's folder trained or chose it on; None where
    nobody knows."""
    if file is None or folder is None:
        return None
    try:
        run = run_of(folder)
        asked = (run["arguments"].get(name) for name in ("prompts", "heldout"))
        own, heldout = (Path(each) if each else None for each in asked)
        known = load_prompt_set(own, heldout, int(run.get("heldout_least", 0)))
    except WRONG_SHAPE:
        return None
    return known.seen_words(read_prompts(file))


def written_text(
    request: AcceptanceRequest, target: TargetRef, tokenizer: Any, prompts: Sequence[Prompt]
) -> tuple[TextCache, list[int], list[str]]:
    """(text of the target, ids that end an answer, notes): from the cache, or written now and kept
    there, by what the target is (name, files): a second draft needs no target at all."""
    from archsearch.models.load import load_target
    from archsearch.text.cache import TextCache
    from archsearch.text.generate import eos_ids, generate_text

    request.priced(target, 1)  # before it writes
    encoded = encode_prompts(prompts, tokenizer)
    identity = {
        "target": [
            target.name,
            str(target.folder),
            target.hub_id,
            dict(target.weights or {}),
            _files_of(target.folder),
        ],
        "prompts": [[item.token_ids, item.category, item.id] for item in encoded],
        "settings": [
            request.answer_tokens,
            request.asked.temperature,
            request.top_p if request.asked.temperature else 1.0,
            request.seed,
            request.dtype,
        ],
    }
    key = digest(identity)[:16]
    folder = (request.cache or cache_dir() / "acceptance") / key
    ends_file = folder / "end_ids.json"
    left_out = len(prompts) - len(encoded)
    notes = [f"the target's text is kept in {folder}"]
    if left_out:
        notes.append(f"{left_out} of {len(prompts)} prompts are too long and were left out")
    if (folder / "cache.json").is_file() and ends_file.is_file():
        texts = TextCache.load(folder)
        if texts.complete:
            return texts, list(read_json(ends_file, "end tokens")), notes
    ensure_writable_dir(folder)
    model, _ = load_target(target, request.dtype)
    ends = list(eos_ids(model, tokenizer))
    with ProgressLine("target writes") as line:
        writing = Writing(
            request.answer_tokens, request.asked.temperature, request.top_p, request.seed
        )
        texts = generate_text(
            model, tokenizer, prompts, cache_dir=folder, writing=writing, progress=line
        )
    write_json(ends_file, ends)
    return texts, ends, notes


def _files_of(folder: Path | None) -> list[list[object]]:
    """Name, size and time of change of a local model's files: other weights, another cache."""
    if folder is None:
        return []
    files = sorted(p for p in folder.iterdir() if p.suffix in (".json", ".safetensors", ".bin"))
    return [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in files]


# --- summaries


Price = Callable[[Estimate, Mapping[int, Estimate]], Score]
"""By alpha, and tau by gamma."""


def measured(trace: Trace, price: Price | None = None) -> Measured:
    """The figures of all texts and of each category. Raises ArchsearchError where no text is long
    enough for a round."""
    whole = _figures(trace, price)
    longest = replay_tau(trace, max(whole.tau, default=1), resamples=0)  # of no rounds: says why
    parts = {name: trace.of_category(name) for name in trace.categories if name}
    return Measured(
        whole,
        sum(int(a.sum()) for a in trace.agreements) / max(1, trace.tokens),
        longest.accepted_by_position,
        {name: _figures(part, price) for name, part in parts.items()},
    )


def _figures(trace: Trace, price: Price | None) -> Figures:
    rounds = replays(MAX_GAMMA, partial(replay_tau, trace))
    resampled = alpha_resampled(trace)
    alpha, taus = resampled.estimate(), {g: each.estimate() for g, each in rounds.items()}
    levels = {gamma: each.resampled.intervals() for gamma, each in rounds.items()}
    return Figures(
        alpha,
        len(trace.agreements),
        trace.tokens,
        taus,
        Intervals(alpha=resampled.intervals(), tau=levels),
        Gains({g: price(alpha, {g: taus[g]}).speedup for g in taus}) if price and taus else None,
    )
