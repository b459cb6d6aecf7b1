"""Rows of a Profile out of an engine's own steps: its passes of target and draft, and what a step
takes beside them.

An engine that serves has kernels of its own, so its passes are measured in it: the target alone at
several batch sizes, then a few drafts with random weights of shapes that span the space, each at
other gammas for each batch size. Time does not depend on what the numbers are; where the engine
can, acceptance is synthetic, so that the caches fill as they do in use.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from archsearch.architecture.architecture import Architecture
from archsearch.engine_facts import ANY_ENGINE, ENGINES
from archsearch.engines.engine import Engine, EnginePrompt, EngineStep, Sampling
from archsearch.errors import RunFailed
from archsearch.estimate import Estimate
from archsearch.profiles import EngineShape, Measurement, PassShape, RestShape, freeze_shape
from archsearch.progress import Progress, silent

PassPrice = Callable[[Architecture | None, EngineStep], Estimate]
"""Seconds of the passes of a step with that draft (None: the target alone), by the profile."""
BATCHES: Final = (1, 2, 4, 8)
GAMMAS: Final = ((1, 3, 5, 2), (4, 2, 1, 3), (6, 5, 3, 1), (2, 4, 2, 5), (3, 1, 4, 2), (5, 6, 2, 4))
"""For each draft its gamma at each of BATCHES: between them they cover the pairs."""
ONE_REQUEST_GAMMAS: Final = ((1, 3, 5, 8), (4, 2, 7, 6), (6, 1, 3, 2), (2, 7, 4, 5))
"""The same of an engine that runs one request at a time: between them gamma 1 to 8 behind two
contexts in turn."""
QUICK_GAMMAS: Final = ((1, 3, 5), (4, 2))
"""The same in about a minute."""
RATE: Final = 0.7  # synthetic acceptance of each draft token, given those before
CONTEXT_STEP: Final = 64
MIN_STEPS: Final = 16
MOST_TIMES: Final = 200  # of a row that are kept, evenly over the run


@dataclass
class StepRows:
    """Collects steps of one engine into rows; times are divided by the slowdown of the machine
    while they were taken.

    Times of one case add up over all drafts it was seen with; `rows` gives those of the cases that
    are new or grew.
    """

    engine: str
    dtype: str
    mode: str
    passes: dict[tuple[Any, ...], list[float]] = field(default_factory=dict)
    rests: dict[tuple[int, int, int], list[float]] = field(default_factory=dict)
    extras: dict[tuple[int, int, int], list[float]] = field(default_factory=dict)
    price_stds: dict[tuple[int, int, int], float] = field(
        default_factory=dict
    )  # of the passes taken off `extras`
    catches_up: bool = (
        False  # a round has one pass of the draft more than tokens (`EngineFacts.catches_up`)
    )
    slowdowns: list[float] = field(default_factory=list)
    grown: set[tuple[Any, ...]] = field(default_factory=set)

    def add(
        self,
        steps: Sequence[EngineStep],
        batch: int,
        gamma: int,
        target: Architecture,
        draft: Architecture | None,
        slowdown: float,
    ) -> int:
        """Take the steps at full `batch` that read no prompt and drafted `gamma` tokens; returns
        how many there were."""
        self.slowdowns.append(slowdown)
        passes = gamma + self.catches_up if gamma else 0
        taken = 0
        for step in steps:
            rest_s = step.other_s
            if step.prefill or step.batch != batch or rest_s is None or step.target_s is None:
                continue
            if (
                step.gamma != gamma
                or step.target_tokens != batch * (gamma + 1)
                or len(step.draft_s) != passes
            ):
                continue  # the last rounds of a request may be shorter
            context = CONTEXT_STEP * max(1, round(step.context / CONTEXT_STEP))
            self._pass(
                "target",
                target,
                batch,
                step.target_tokens // batch,
                context,
                "cold",
                step.target_s / slowdown,
            )
            first = 0
            for number, (seconds, tokens) in enumerate(
                zip(step.draft_s, step.draft_tokens, strict=True)
            ):
                assert draft is not None
                per_sequence = max(1, round(tokens / batch))
                first = per_sequence if number == 0 else first
                cache = "warm" if number else "cold"
                self._pass("draft", draft, batch, per_sequence, context, cache, seconds / slowdown)
            self._keep(self.rests, (gamma, batch, first), rest_s / slowdown)
            taken += 1
        return taken

    def add_whole(
        self,
        steps: Sequence[EngineStep],
        batch: int,
        target: Architecture,
        draft: Architecture | None,
        passes_s: PassPrice,
    ) -> None:
        """Steps of an engine that does not tell its passes (a GPU runs ahead of its host): what
        they take beyond `passes_s`, the passes as the profile prices them. Batch 1 only, as the
        rows of kind `engine` are."""
        layers = draft.num_hidden_layers if draft else 0
        for step in steps:
            if (
                batch == 1
                and not step.prefill
                and step.batch == 1
                and step.target_tokens == step.gamma + 1
            ):
                case, passes = (step.gamma, layers, target.vocab_size), passes_s(draft, step)
                self._keep(self.extras, case, step.seconds - passes.value)
                self.price_stds[case] = passes.std

    def _pass(
        self,
        role: str,
        arch: Architecture,
        batch: int,
        tokens: int,
        context: int,
        cache: str,
        seconds: float,
    ) -> None:
        self._keep(self.passes, (role, arch, batch, tokens, context, cache), seconds)

    def _keep(self, kind: dict[Any, list[float]], case: tuple[Any, ...], seconds: float) -> None:
        kind.setdefault(case, []).append(seconds)
        self.grown.add(case)

    def rows(self) -> list[Measurement]:
        """Rows of kind `rest` and `pass`; cases seen fewer than MIN_STEPS times are left out. The
        row that `measured_models` looks for comes last, so that a model half of whose rows were
        written is measured again."""
        slowdown = statistics.median(self.slowdowns) if self.slowdowns else 1.0
        rows = []
        passes = []
        for (role, arch, batch, tokens, context, cache), times in self.passes.items():
            if (
                len(times) >= MIN_STEPS
                and (role, arch, batch, tokens, context, cache) in self.grown
            ):
                shape = PassShape(self.engine, role, arch, batch, tokens, context).to_dict()
                passes.append(self._row("pass", shape, cache, times, slowdown))
        for (gamma, batch, first), times in self.rests.items():
            if len(times) >= MIN_STEPS and (gamma, batch, first) in self.grown:
                shape = RestShape(self.engine, gamma, batch, first).to_dict()
                rows.append(self._row("rest", shape, "warm", times, slowdown))
        for (gamma, layers, vocabulary), times in self.extras.items():
            if len(times) >= MIN_STEPS and (gamma, layers, vocabulary) in self.grown:
                shape = EngineShape(self.engine, gamma, layers, vocabulary).to_dict()
                row = self._row("engine", shape, "warm", times, slowdown)
                std_s = math.hypot(row.error_s or 0.0, self.price_stds[gamma, layers, vocabulary])
                rows.append(replace(row, std_s=std_s or None))
        self.grown.clear()
        return [*rows, *sorted(passes, key=_marks)]

    def _row(
        self, kind: str, shape: dict[str, Any], cache: str, times: Sequence[float], slowdown: float
    ) -> Measurement:
        step = -(-len(times) // MOST_TIMES)
        return Measurement(
            kind, freeze_shape(shape), self.dtype, self.mode, cache, tuple(times[::step]), slowdown
        )


def _marks(row: Measurement) -> bool:
    """Whether this row says that its model was measured: the first pass of a round, or the target
    alone, of one request."""
    shape = PassShape.of(row)
    return row.cache == "cold" and shape.batch == 1 and (shape.role == "draft" or shape.tokens == 1)


def measured_models(
    rows: Sequence[Measurement], engine: str, target: Architecture, drafts: Sequence[Architecture]
) -> set[Architecture | None]:
    """Which of `drafts` (None: the target alone) were measured in `engine`, by `rows` of kind
    `pass` (or `engine`, where the engine tells whole steps only)."""
    passes = [PassShape.of(row) for row in rows if row.kind == "pass" and _marks(row)]
    found = {shape.architecture for shape in passes if shape.engine == engine}
    extras = [EngineShape.of(row) for row in rows if row.kind == "engine"]
    whole = {
        (shape.gamma, shape.draft_layers, shape.vocab_size)
        for shape in extras
        if shape.engine == engine
    }
    known: set[Architecture | None] = set()
    if target in found or (0, 0, target.vocab_size) in whole:
        known.add(None)
    for number, draft in enumerate(drafts):
        first = (GAMMAS[number % len(GAMMAS)][0], draft.num_hidden_layers, target.vocab_size)
        if draft in found or first in whole:
            known.add(draft)
    return known


def spread_drafts(shapes: Sequence[Architecture], count: int) -> list[Architecture]:
    """`count` of `shapes`, full heads, far apart in depth, width and FFN: each next one is the
    farthest from those chosen."""
    unique = list(dict.fromkeys(shape.replace(draft_vocab_size=None) for shape in shapes))

    def place(shape: Architecture) -> tuple[float, ...]:
        return (
            math.log2(shape.num_hidden_layers),
            1.5 * math.log2(shape.hidden_size),
            math.log2(shape.intermediate_size / shape.hidden_size),
        )

    chosen = [max(unique, key=lambda shape: (shape.num_hidden_layers, shape.hidden_size))]
    while len(chosen) < min(count, len(unique)):
        chosen.append(
            max(
                unique,
                key=lambda shape: min(math.dist(place(shape), place(other)) for other in chosen),
            )
        )
    return chosen


@dataclass(frozen=True, kw_only=True)
class PassRequest:
    """What is to be measured in an engine.

    `target`: what the engine loads, of `architecture`; `drafts`: shapes with the folders of their
    random weights. `vocabulary`: token ids of the made-up prompts lie below it. `context`: tokens
    in the cache in mid-run; `tokens`: written per request. `slowdown()`: how much slower than its
    reference the machine is now, asked before and after every call. `passes_s`: seconds of a step's
    passes by the profile, for engines that tell whole steps only; what is beyond them becomes rows
    of kind `engine`. `known`: drafts (None: the target alone) that were measured before; they keep
    their place in `drafts`, which decides their gammas, a line of `gammas` each. `contexts`: in
    place of `context`, in turn. `rounds`: in place of `tokens`, whole rounds of every answer.
    """

    target: Any
    architecture: Architecture
    drafts: Sequence[tuple[Architecture, Path]]
    dtype: str
    mode: str
    vocabulary: int
    context: int = 192
    tokens: int = 32
    repeats: int = 3
    batches: Sequence[int] = BATCHES
    slowdown: Callable[[], float] = lambda: 1.0
    passes_s: PassPrice | None = None
    known: Collection[Architecture | None] = ()
    gammas: Sequence[Sequence[int]] = GAMMAS
    contexts: Sequence[int] = ()
    rounds: int | None = None


class _PassTrial:
    """One engine that runs the cases of a request, and what its steps told."""

    def __init__(self, engine: Engine, asked: PassRequest) -> None:
        self.engine, self.asked = engine, asked
        self.rng = random.Random(0)
        catches_up = ENGINES.get(engine.name, ANY_ENGINE).catches_up
        self.collected = StepRows(engine.name, asked.dtype, asked.mode, catches_up=catches_up)

    def run_model(
        self,
        draft: Architecture | None,
        folder: Path | None,
        number: int,
        tell: Callable[[str, float], None],
    ) -> list[Measurement]:
        """Rows of the target with the `number`th draft (None: alone), at each batch size with its
        gamma."""
        lines = self.asked.gammas
        gammas = (0,) * len(self.asked.batches) if draft is None else lines[number % len(lines)]
        pairs = list(zip(self.asked.batches, gammas, strict=False))
        repeats = self.asked.repeats
        starts = _starts(self.engine, pairs)
        for start, group in enumerate(starts):
            largest = max(gamma for _, gamma in group)
            self.engine.start(
                self.asked.target, folder, largest, **_options(self.engine, draft, group)
            )
            for repeat in range(repeats):
                for place, (batch, gamma) in enumerate(
                    group if repeat % 2 == 0 else list(reversed(group))
                ):
                    about = f"gamma {gamma}" if self.asked.rounds else f"batch {batch}"
                    tell(
                        f"{draft.label() if draft else 'target alone'}, {about}",
                        (start + repeat / repeats) / len(starts),
                    )
                    self.run_case(draft, batch, gamma, number + start + place)
            self.engine.stop()
        return self.collected.rows()

    def run_case(self, draft: Architecture | None, batch: int, gamma: int, place: int) -> None:
        """`batch` requests at once, their steps collected. Raises RunFailed where the engine does
        not tell them."""
        asked, engine = self.asked, self.engine
        before = asked.slowdown()
        tokens = asked.tokens
        if asked.rounds is not None:  # one token comes with the prompt, the last rounds may be cut
            tokens = (
                1
                + math.ceil(
                    asked.rounds * math.fsum(RATE**position for position in range(gamma + 1))
                )
                + gamma
            )
        context = asked.contexts[place % len(asked.contexts)] if asked.contexts else asked.context
        engine.generate(
            self.prompts(batch, context - tokens // 2),
            Sampling(max_new_tokens=tokens, ignore_end=True),
        )
        steps = engine.steps()
        told = any(step.target_s is not None for step in steps)
        if not steps or not (told or asked.passes_s):
            raise RunFailed(
                f"{engine.name} does not tell what its steps take, so they cannot be profiled"
            )
        if told:
            self.collected.add(
                steps, batch, gamma, asked.architecture, draft, 0.5 * (before + asked.slowdown())
            )
        elif asked.passes_s is not None:
            self.collected.add_whole(steps, batch, asked.architecture, draft, asked.passes_s)

    def prompts(self, count: int, length: int) -> list[EnginePrompt]:
        """Made-up prompts of `length` tokens."""
        length = max(8, length)
        most = min(1000, self.asked.vocabulary)
        return [
            EnginePrompt(str(i), tuple(self.rng.randrange(most) for _ in range(length)))
            for i in range(count)
        ]


def measure_passes(
    make_engine: Callable[[], Engine],
    asked: PassRequest,
    *,
    record: Callable[[Measurement], None] = lambda row: None,
    progress: Progress = silent,
) -> list[Measurement]:
    """Rows of kind `pass` and `rest` (or `engine`) from `make_engine()`'s own steps; each is given
    to `record` as soon as its model is done. Raises RunFailed where the engine does not tell its
    steps.
    """
    plans: list[tuple[Architecture | None, Path | None, int]] = [(None, None, 0)]
    plans += [(arch, folder, number) for number, (arch, folder) in enumerate(asked.drafts)]
    rows: dict[Any, Measurement] = {}
    engine = make_engine()
    trial = _PassTrial(engine, asked)
    try:
        for number, (arch, folder, line) in enumerate(plans):
            if arch in asked.known:
                continue
            tell = partial(_tell, progress, number, len(plans))
            for row in trial.run_model(arch, folder, line, tell):
                record(row)
                rows[row.key] = row
    finally:
        engine.stop()
    return list(rows.values())


def _tell(progress: Progress, number: int, count: int, what: str, share: float) -> None:
    """Progress of the `number`th of `count` models, `share` of which is done."""
    progress(what, number + share, count)


def _starts(engine: Engine, pairs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """(batch, gamma) pairs that one start of the engine can run: all with a schedule, else those of
    one gamma."""
    if engine.schedules or len({gamma for _, gamma in pairs}) == 1:
        return [list(pairs)]
    groups: dict[int, list[tuple[int, int]]] = {}
    for batch, gamma in pairs:
        groups.setdefault(gamma, []).append((batch, gamma))
    return list(groups.values())


def _options(
    engine: Engine, draft: Architecture | None, pairs: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    """Synthetic acceptance and schedule of a start, where the engine has them."""
    if draft is None:
        return {}
    largest = max(gamma for _, gamma in pairs)
    options: dict[str, Any] = {}
    if engine.synthesises:
        options["synthetic"] = tuple(RATE ** (position + 1) for position in range(largest))
    if len({gamma for _, gamma in pairs}) > 1:
        ends = [batch for batch, _ in pairs]
        options["schedule"] = tuple(
            (1 if number == 0 else ends[number - 1] + 1, batch, gamma)
            for number, (batch, gamma) in enumerate(pairs)
        )
    return options
