"""Rows of a Profile out of an engine's own steps: its passes of target and draft, and what a step
takes beside them.

An engine that serves has kernels of its own, so its passes are measured in it: the target alone at
several batch sizes, then a few drafts with random weights of shapes that span the space, each at
other gammas for each batch size. Where the engine can, acceptance is synthetic, so that the caches
fill as they do in use.

What an engine runs around a drafter that is no model (the states it hands over, the scatter of
trimmed logits, a loop over heads, a search through the text) lies outside of the passes that it
times. Of such rounds all that is not the target's pass is taken, as rows of kind `drafted`.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import body_parameters
from archsearch.drafters.drafter import Drafter
from archsearch.engine_facts import ANY_ENGINE, ENGINES
from archsearch.engines.engine import Engine, EngineStep, ModelSource, Sampling
from archsearch.engines.measure.rows import made_up, row_of, synthetic
from archsearch.errors import RunFailed
from archsearch.profiles import DraftedShape, Measurement, PassShape, RestShape
from archsearch.progress import Progress, silent

BATCHES: Final = (1, 2, 4, 8)
GAMMAS: Final = ((1, 3, 5, 2), (4, 2, 1, 3), (6, 5, 3, 1), (2, 4, 2, 5), (3, 1, 4, 2), (5, 6, 2, 4))
"""For each draft its gamma at each of BATCHES: between them they cover the pairs."""
ONE_REQUEST_GAMMAS: Final = (
    *((1, 3, 5, 8), (4, 2, 7, 6), (6, 1, 3, 2)),
    *((2, 7, 4, 5), (5, 8, 1, 3), (3, 6, 2, 7)),
)
"""The same of an engine that runs one request at a time: between them gamma 1 to 8 behind two
contexts in turn."""
QUICK_GAMMAS: Final = ((1, 3, 5), (4, 2), (3,))
"""The same in about a minute."""
CONTEXT_STEP: Final = 64
MIN_STEPS: Final = 16
UNSTEADY: Final = 0.15  # by so much may the machine's pace change during a call, else once more


class _Times(NamedTuple):
    """What is timed: a row's kind, shape (of `drafted` rows without the context) and cache
    state."""

    kind: str
    shape: Any
    cache: str


@dataclass(frozen=True)
class Case:
    """One draft in an engine. `draft`: a model's shape, a drafter that is no model, None for the
    target alone; `source`: what the engine loads of it; `pairs`: (batch, gamma); `tokens`: written
    per request; `place`: at which of the contexts it begins."""

    pairs: Sequence[tuple[int, int]]
    draft: Architecture | Drafter | None = None
    source: ModelSource | None = None
    tokens: int = 32
    place: int = 0

    def label(self) -> str:
        if isinstance(self.draft, Drafter):
            return self.draft.title
        return "target alone" if self.draft is None else self.draft.label()

    def starts(self, engine: Engine) -> list[list[tuple[int, int]]]:
        """The pairs that one start of the engine can run: all with a schedule, else those of one
        gamma."""
        groups: dict[int, list[tuple[int, int]]] = {}
        for batch, gamma in self.pairs:
            groups.setdefault(0 if engine.facts.schedules else gamma, []).append((batch, gamma))
        return list(groups.values())

    def options(self, engine: Engine, pairs: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """Synthetic acceptance (of weights that are made up) and schedule of a start, where the
        engine has them."""
        options: dict[str, object] = {}
        trained = isinstance(self.draft, Drafter) and not self.draft.trains
        if self.draft is None:
            return options
        if engine.facts.synthesises and not trained:
            options["synthetic"] = synthetic(max(gamma for _, gamma in pairs))
        if len({gamma for _, gamma in pairs}) > 1:
            starts = [1, *(batch + 1 for batch, _ in pairs[:-1])]
            options["schedule"] = tuple(
                (first, *pair) for first, pair in zip(starts, pairs, strict=True)
            )
        return options


@dataclass(frozen=True, kw_only=True)
class PassRequest:
    """What is to be measured in an engine.

    `target`: what the engine loads, of `architecture`; `contexts`: tokens in the cache in mid-run,
    in turn; `rounds`: in place of a case's tokens, whole rounds of every answer.
    `slowdown()`: how much slower than its reference the machine is now, asked before and after
    every call. Where steps have passes for comparison, those say it, against `references`, by
    engine, tokens and dtype, which the first call fills in.
    """

    target: object
    architecture: Architecture
    dtype: str
    mode: str
    contexts: Sequence[int] = (192,)
    repeats: int = 3
    slowdown: Callable[[], float] = lambda: 1.0
    rounds: int | None = None
    references: dict[str, float] = field(default_factory=dict)


@dataclass
class StepRows:
    """Runs the cases of a request in one engine and collects its steps into rows; times are divided
    by the slowdown of the machine while they were taken.

    Times of one thing add up over all drafts it was seen with; `rows` gives those of the things
    that are new or grew.
    """

    engine: str
    asked: PassRequest
    # seconds, slowdown and context of each
    times: dict[_Times, list[tuple[float, float, float]]] = field(default_factory=dict)
    grown: set[_Times] = field(default_factory=set)
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def run(self, engine: Engine, case: Case, tell: Callable[[str, float], None]) -> None:
        """Each batch size of a case with its gamma, back and forth."""
        starts, repeats = case.starts(engine), self.asked.repeats
        for start, pairs in enumerate(starts):
            options = case.options(engine, pairs)
            engine.start(self.asked.target, case.source, max(g for _, g in pairs), **options)
            for repeat in range(repeats):
                for place, (batch, gamma) in enumerate(pairs[:: -1 if repeat % 2 else 1]):
                    about = f"gamma {gamma}" if self.asked.rounds else f"batch {batch}"
                    share = (start + repeat / repeats) / len(starts)
                    tell(f"{case.label()}, {about}", share)
                    self.call(engine, case, batch, gamma, case.place + start + place)
            engine.stop()

    def call(self, engine: Engine, case: Case, batch: int, gamma: int, place: int) -> None:
        """`batch` requests at once, their steps collected. A drafter that is no model sees a text
        twice, so that lookup finds something. Raises RunFailed where the engine does not tell its
        steps."""
        asked, tokens = self.asked, case.tokens
        before = asked.slowdown()
        if asked.rounds is not None:  # one token comes with the prompt, the last rounds may be cut
            tokens = 1 + math.ceil(asked.rounds * (1.0 + math.fsum(synthetic(gamma)))) + gamma
        context = asked.contexts[place % len(asked.contexts)]
        times = 2 if isinstance(case.draft, Drafter) else 1
        length = max(8, context - tokens // 2) // times
        prompts = [
            replace(prompt, token_ids=times * prompt.token_ids)
            for prompt in made_up(asked.architecture.vocab_size, length, batch, rng=self.rng)
        ]
        for again in (True, False):
            engine.generate(prompts, Sampling(max_new_tokens=tokens, ignore_end=True))
            steps = engine.steps()
            if all(step.target_s is None for step in steps):
                raise RunFailed(
                    f"{engine.name} does not tell what its steps take, so they cannot be profiled"
                )
            known = compared(steps, f"{self.engine} {asked.dtype}", asked.references)
            after = before if known else asked.slowdown()
            both = 0.5 * (before + after)
            if abs(before / after - 1.0) <= UNSTEADY or not again:
                break
            before = after  # the pace changed meanwhile
        self.add(steps, batch, gamma, case.draft, known or (lambda tokens: both))

    def add(
        self,
        steps: Sequence[EngineStep],
        batch: int,
        gamma: int,
        draft: Architecture | Drafter | None,
        slower: Callable[[float], float],
    ) -> None:
        """Take the steps at full `batch` that read no prompt and had `gamma` tokens of every
        request judged: the last rounds of a request may be shorter. `slower`: how much slower than
        its reference the machine was, by tokens that a weight meets in a pass."""
        facts = ENGINES.get(self.engine, ANY_ENGINE)
        passes = gamma + facts.catches_up if gamma else 0
        for step in steps:
            full = step.batch == batch and step.target_tokens == batch * (gamma + 1)
            if step.prefill or not full or step.gamma != gamma or step.target_s is None:
                continue
            if isinstance(draft, Drafter):
                shape = DraftedShape(self.engine, draft, gamma, batch, 0)
                seconds = step.seconds - step.target_s
                self._keep(_Times("drafted", shape, "cold"), seconds, slower(1), step.context)
                continue
            if len(step.draft_s) != passes:
                continue
            each = [max(1, round(tokens / batch)) for tokens in step.draft_tokens]
            timed: list[Any] = [("target", self.asked.architecture, gamma + 1, step.target_s)]
            timed += [("draft", draft, *one) for one in zip(each, step.draft_s, strict=True)]
            for number, (role, arch, tokens, seconds) in enumerate(timed):
                sizes = (batch, tokens, _rounded(step.context))
                cache = "warm" if number > 1 else "cold"  # the first of each model is cold
                key = _Times("pass", PassShape(self.engine, role, arch, *sizes), cache)
                met = tokens if role == "target" else _tokens_met(arch, tokens)
                self._keep(key, seconds, slower(met), step.context)
            rest = RestShape(self.engine, gamma, batch, each[0] if each else 0)
            assert step.other_s is not None
            self._keep(_Times("rest", rest, "warm"), step.other_s, slower(1), step.context)

    def _keep(self, key: _Times, seconds: float, slowdown: float, context: float) -> None:
        self.times.setdefault(key, []).append((seconds / slowdown, slowdown, context))
        self.grown.add(key)

    def rows(self) -> list[Measurement]:
        """What is new; things seen fewer than MIN_STEPS times are left out. The row that
        `measured_models` looks for comes last, so that a model half of whose rows were written is
        measured again."""
        found = []
        for key, kept in self.times.items():
            if len(kept) < MIN_STEPS or key not in self.grown:
                continue
            times, slowdowns, contexts = zip(*kept, strict=True)
            shape, how = key.shape, (self.asked.dtype, self.asked.mode, key.cache)
            if key.kind == "drafted":
                shape = replace(shape, context=_rounded(statistics.fmean(contexts)))
            found.append(row_of(key.kind, shape, how, times, statistics.median(slowdowns)))
        self.grown.clear()
        return sorted(found, key=lambda row: 2 * _marks(row) or row.kind == "pass")


def compared(
    steps: Sequence[EngineStep], key: str, references: dict[str, float]
) -> Callable[[float], float] | None:
    """How much slower than `references` the machine was, by tokens that a weight meets in a pass:
    the steps' passes for comparison, medians, with a straight line between their sizes. None where
    there are none."""
    took: dict[int, list[float]] = {}
    for tokens, seconds in (step.compared for step in steps if step.compared):
        took.setdefault(tokens, []).append(seconds)
    if not took:
        return None
    now = {tokens: statistics.median(took[tokens]) for tokens in sorted(took)}
    quiet = [references.setdefault(f"{key} pass of {size}", now[size]) for size in now]
    sizes, found = list(now), list(now.values())
    return lambda tokens: float(np.interp(tokens, sizes, found) / np.interp(tokens, sizes, quiet))


def _tokens_met(draft: Architecture, tokens: int) -> float:
    """Tokens that a weight of a draft meets in a pass over `tokens`, in the mean: those of its head
    meet the last one alone."""
    body, head = body_parameters(draft), draft.head_rows * draft.hidden_size
    return (body * tokens + head) / (body + head)


def _rounded(context: float) -> int:
    return CONTEXT_STEP * max(1, round(context / CONTEXT_STEP))


def _marks(row: Measurement) -> bool:
    """Whether this row says that its model was measured: the first pass of a round, or the target
    alone, of one request."""
    if row.kind != "pass" or row.cache != "cold":
        return False
    shape = PassShape.of(row)
    return shape.batch == 1 and (shape.role == "draft" or shape.tokens == 1)


def measured_models(rows: Sequence[Measurement], engine: str) -> set[Architecture]:
    """The models that were measured in `engine`, by `rows` of kind `pass`."""
    passes = [PassShape.of(row) for row in rows if _marks(row)]
    return {shape.architecture for shape in passes if shape.engine == engine}


def spread_drafts(shapes: Sequence[Architecture], count: int) -> list[Architecture]:
    """`count` of `shapes`, full heads, far apart in depth, width and FFN: each next one is the
    farthest from those chosen."""
    unique = list(dict.fromkeys(shape.replace(draft_vocab_size=None) for shape in shapes))

    def place(shape: Architecture) -> tuple[float, ...]:
        wide = math.log2(shape.intermediate_size / shape.hidden_size)
        return math.log2(shape.num_hidden_layers), 1.5 * math.log2(shape.hidden_size), wide

    def nearest(shape: Architecture) -> float:
        return min(math.dist(place(shape), place(other)) for other in chosen)

    chosen = [max(unique, key=lambda shape: (shape.num_hidden_layers, shape.hidden_size))]
    while len(chosen) < min(count, len(unique)):
        chosen.append(max(unique, key=nearest))
    return chosen


def measure_passes(
    make_engine: Callable[[Case], Engine],
    asked: PassRequest,
    cases: Sequence[Case],
    *,
    record: Callable[[Measurement], None],
    progress: Progress = silent,
) -> None:
    """Rows of kind `pass` and `rest`, of drafters that are no models `drafted`, out of steps; each
    is given to `record` as soon as its case is done. Raises RunFailed where the engine does not
    tell its steps."""
    collected, count = None, len(cases)
    for number, case in enumerate(cases):

        def tell(what: str, share: float, number: int = number) -> None:
            progress(what, number + share, count)

        engine = make_engine(case)
        collected = collected or StepRows(engine.name, asked)
        try:
            collected.run(engine, case, tell)
        finally:
            engine.stop()
        for row in collected.rows():
            record(row)
