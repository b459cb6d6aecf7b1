"""Whole rounds of an engine on a GPU, timed by running it: random drafts of a few depths, a short
and a long gamma.

What the host of an engine needs per layer shows where drafts are deep and gamma is long; what it
adds to the GPU's side, where both are small. Each start of an engine takes a minute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from archsearch.architecture.architecture import Architecture
from archsearch.engines.engine import Engine, Sampling
from archsearch.engines.measure.rows import made_up, row_of, synthetic
from archsearch.errors import ArchsearchError, RunFailed
from archsearch.profiles import Measurement, RoundShape, Shape, freeze_shape
from archsearch.progress import Progress, silent

LAYERS: Final = (24, 2, 8)
GAMMAS: Final = (6, 1)
WIDTH: Final = 1024
CONTEXT: Final = 512  # tokens in the cache in mid-run
TOKENS: Final = 96  # written per request
REPEATS: Final = 2
BUDGET_S: Final = 600.0


@dataclass(frozen=True)
class RoundCase:
    """One start of the engine: its switches, a draft (None: the target alone) and gamma."""

    options: tuple[tuple[str, str], ...]
    draft: Architecture | None
    gamma: int

    def label(self) -> str:
        what = (
            "target alone"
            if self.draft is None
            else f"{self.draft.num_hidden_layers} layers, gamma {self.gamma}"
        )
        switches = ", ".join(f"{name}={value}" for name, value in self.options)
        return f"{what}{f' ({switches})' if switches else ''}"


@dataclass(frozen=True, kw_only=True)
class RoundRequest:
    """What is to be measured.

    `target`: what the engine loads, of `architecture`; `folder_of`: a draft's folder; `engine`: one
    with these switches, not started. `variants`: switches of the engine, the usual ones first.
    `recorded`: switches that every row names beside its own. `known`: shapes (`Measurement.shape`)
    that were measured before.
    """

    target: object
    architecture: Architecture
    engine: Callable[[Mapping[str, str]], Engine]
    folder_of: Callable[[Architecture], Path]
    dtype: str
    mode: str
    variants: Sequence[Mapping[str, str]] = ({},)
    recorded: Mapping[str, str] = field(default_factory=dict)
    tensor_parallel: int = 1
    budget_s: float = BUDGET_S
    known: frozenset[Shape] = frozenset()


@dataclass(frozen=True)
class RoundsMeasured:
    """`new_rows`: how many; `left`: cases that the budget did not reach; `failed`: by case,
    what the engine said."""

    new_rows: int
    left: tuple[str, ...]
    failed: Mapping[str, str]


def round_drafts(target: Architecture) -> list[Architecture]:
    """Drafts of LAYERS depths and one width with the target's vocabulary, that shard over up to 8
    devices."""
    return [Architecture(WIDTH, 2816, layers, 8, 8, 128, target.vocab_size) for layers in LAYERS]


def plan(drafts: Sequence[Architecture], variants: Sequence[Mapping[str, str]]) -> list[RoundCase]:
    """Cases, those first that tell most: of each variant the target alone and the corners, then
    what lies between."""
    deep, shallow, middle = drafts
    long, short = GAMMAS
    corners = [(None, 0), (deep, long), (shallow, long), (deep, short)]
    between = [(middle, long), (shallow, short), (middle, short)]
    options = [tuple(sorted(variant.items())) for variant in variants]
    return [
        RoundCase(switches, *case)
        for cases in (corners, between)
        for switches in options
        for case in cases
    ]


def measure_rounds(
    asked: RoundRequest,
    *,
    record: Callable[[Measurement], None] = lambda row: None,
    progress: Progress = silent,
    clock: Callable[[], float] = time.monotonic,
) -> RoundsMeasured:
    """Rows of kind `round`, each given to `record` as soon as it is there. Cases that the engine
    cannot run are reported.

    Raises RunFailed where it could run none.
    """
    cases = plan(round_drafts(asked.architecture), asked.variants)
    start, longest = clock(), 0.0
    new = 0
    failed: dict[str, str] = {}
    left: list[str] = []
    version = ""
    for number, case in enumerate(cases):
        spent = clock() - start
        if spent + longest > asked.budget_s:
            left.append(case.label())
            continue
        progress(case.label(), number, len(cases))
        try:
            engine = asked.engine(dict(case.options))
            version = version or engine.version
            options = tuple(sorted({**asked.recorded, **dict(case.options)}.items()))
            drafted, ranks = (asked.architecture, case.draft, case.gamma), asked.tensor_parallel
            shape = RoundShape(engine.name, version, options, *drafted, 1, CONTEXT, ranks)
            if freeze_shape(shape.to_dict()) in asked.known:
                continue
            row = _run(asked, case, engine, shape)
        except ArchsearchError as error:  # this version or these switches cannot: others may
            failed[case.label()] = str(error)
            continue
        finally:
            longest = max(longest, clock() - start - spent)
        record(row)
        new += 1
    if failed and not new and not asked.known:
        raise RunFailed(f"no round could be measured: {next(iter(failed.values()))}")
    return RoundsMeasured(new, tuple(left), failed)


def _run(asked: RoundRequest, case: RoundCase, engine: Engine, shape: RoundShape) -> Measurement:
    options: dict[str, Any] = {}
    if case.draft is not None and engine.facts.synthesises:
        options["synthetic"] = synthetic(case.gamma)
    folder = None if case.draft is None else asked.folder_of(case.draft)
    prompts = made_up(asked.architecture.vocab_size, CONTEXT - TOKENS // 2)
    times: list[float] = []
    engine.start(asked.target, folder, case.gamma, **options)
    try:
        engine.generate(prompts, Sampling(max_new_tokens=16 + case.gamma, ignore_end=True))
        sampling = Sampling(max_new_tokens=TOKENS, ignore_end=True)
        for _ in range(REPEATS):
            result = engine.generate(prompts, sampling)[0]
            times += result.gaps_s[: max(1, result.rounds - 1)] if case.gamma else result.gaps_s
    finally:
        engine.stop()
    if not times:
        raise RunFailed(f"{engine.name} handed over no tokens in {case.label()}")
    return row_of("round", shape, (asked.dtype, asked.mode, "warm"), times)
