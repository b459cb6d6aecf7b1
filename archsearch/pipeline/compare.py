"""`archsearch compare`: what differs between runs, and why another draft won there.

Of two runs of one target the winner of each is priced under the conditions of both, and under those
of the first with one of the second's in place of its own (device, engine, ...). How far one leads
is given by term; the terms add up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from archsearch.errors import ArchsearchError
from archsearch.pipeline.candidates import write_report
from archsearch.pipeline.families import context_of
from archsearch.pipeline.latency import acceptance_for, choose_latency, served_target
from archsearch.pipeline.session import PRIOR_FILE, SearchRequest, SearchSession
from archsearch.progress import human_time
from archsearch.records import save
from archsearch.report.compare import Comparison, Lead, Pair, Swap, Winner
from archsearch.report.phrases import mix_words
from archsearch.runs.run import COMPARE_FILE, Run, open_run
from archsearch.search.objective import Score, Scorer
from archsearch.traffic.mix import mix_of
from archsearch.workload import WorkloadRequest

FACTORS: Final[Mapping[str, tuple[str, ...]]] = {
    "device": ("gpu", "profile"),
    "engine": ("engine", "engine_version", "engine_options"),
    "mode": ("mode",),
    "dtype": ("dtype", "draft_dtype"),
    "tensor parallel": ("tensor_parallel",),
    "batch size": ("batch_size",),
    "context": ("context_len",),
    "temperature": ("temperature",),
    "domain": (),
    "acceptance": (),
    "workload": (),
}
"""What a run's conditions are made of: names for people, and the fields of `WorkloadRequest` that
hold each."""


ALSO_ASKED: Final = (
    "families space trials max_gamma host routing_skew memory_fraction draft_tensor_parallel"
).split()
"""Of a run's arguments, what else changes its answer."""


@dataclass
class _Opened:
    """A run to compare. `session` None: its conditions can no longer be priced, `why` says why
    not."""

    name: str
    run: Run
    score: Score
    session: SearchSession | None = None
    why: str = ""
    asked: WorkloadRequest = field(default_factory=WorkloadRequest)

    @classmethod
    def of(cls, path: Path) -> _Opened:
        run = open_run(path)
        if not run.ranks():
            raise ArchsearchError(
                f"run {path} has no ranks: its search has not finished; run the same search again"
            )
        opened = cls(path.name or str(path), run, run.score(run.ranks()[0]))
        try:
            session = opened.session = SearchSession.reopen(path)
        except ArchsearchError as error:
            opened.why = str(error)
            return opened
        work, source = session.scorer.workload, session.source
        opened.asked = replace(
            session.request.asked,
            dtype=source.dtype,
            mode=source.mode,
            tensor_parallel=work.tensor_parallel,
            engine=session.request.engine,
            engine_version=source.version,
        )
        return opened

    def conditions(self) -> dict[str, str]:
        """What was asked and chosen, in words."""
        asked, profile, session = self.run.arguments, self.run.profile, self.session
        engine = self.score.engine or asked.get("engine") or "transformers"
        ranks = session.scorer.workload.tensor_parallel if session else asked.get("tensor_parallel")
        mix, options = asked.get("workload"), (asked.get("engine_options") or "").split()
        values: dict[str, object] = {
            "target": asked.get("target"),
            "device": self.run.device,
            "engine": " ".join(filter(None, (engine, self.score.engine_version, *options))),
            **{name: profile.get(name) or asked.get(name) for name in ("mode", "dtype")},
            "tensor parallel": ranks,
            "batch size": asked.get("batch_size"),
            **{name: asked.get(name) for name in ("context", "temperature", "domain")},
            "acceptance": asked.get("alpha"),
            "workload": "; ".join(mix_words(mix_of(json.loads(mix), "workload"))) if mix else None,
            **{name.replace("_", " "): asked.get(name) for name in ALSO_ASKED},
        }
        if (weights := profile.get("weights")) not in (None, values["dtype"]):
            values["dtype"] = f"{values['dtype']}, weights in {weights}"
        if drafts := profile.get("drafts"):
            values["dtype"] = f"{values['dtype']}, drafts in {drafts}"
        if budget := asked.get("training_budget_s"):
            values["training budget"] = human_time(float(budget))
        if asked.get("confirm"):  # else nothing was trained: neither counts
            values["time budget"] = human_time(float(asked["time_budget_s"]))
            for name in ("prompts", "text"):  # with its folder's name: enough to tell two apart
                values[name] = "/".join(Path(asked.get(name) or "").parts[-2:])
        return {name: "" if value is None else str(value) for name, value in values.items()}


def compare_runs(paths: Sequence[Path]) -> Comparison:
    """Runs side by side, and the first against each of the others. Raises ArchsearchError for fewer
    than two, and for one whose search has not finished."""
    if len(paths) < 2:
        raise ArchsearchError("compare needs two runs or more: archsearch compare runs/a runs/b")
    for path in paths:
        open_run(path)  # before the first one is priced
    opened = [_Opened.of(path) for path in paths]
    names = [item.name for item in opened]
    if len(set(names)) < len(names):
        for item, path in zip(opened, paths, strict=True):
            item.name = str(path)
    found = [item.conditions() for item in opened]
    every = dict.fromkeys(name for each in found for name in each)
    conditions = {name: tuple(each.get(name, "") for each in found) for name in every}
    pairs = tuple(
        _pair(
            opened[0], other, {name: (all_[0], all_[number]) for name, all_ in conditions.items()}
        )
        for number, other in enumerate(opened[1:], start=1)
    )
    notes = tuple(
        f"{item.name} cannot be priced any more: {item.why}" for item in opened if item.why
    )
    winners = tuple(Winner.of(item.score, item.run.decided(item.run.ranks()[0])) for item in opened)
    return Comparison(tuple(item.name for item in opened), conditions, winners, pairs, notes)


def write_into_report(path: Path, found: Comparison) -> None:
    """Keep a comparison in a run's folder and write its report again."""
    run = open_run(path)
    save(run.path / COMPARE_FILE, found)
    write_report(run)


def _pair(first: _Opened, second: _Opened, values: Mapping[str, tuple[str, str]]) -> Pair:
    """`values`: their conditions."""
    names = first.name, second.name
    if first.score.proposer == second.score.proposer:
        return Pair(*names, True)
    if values["target"][0] != values["target"][1]:
        return Pair(*names, False, why="they draft for different targets")
    if first.session is None or second.session is None:
        return Pair(*names, False, why="one of the two cannot be priced any more")
    try:
        here, there = (
            _lead(session.scorer, first, second) for session in (first.session, second.session)
        )
    except ArchsearchError as error:
        return Pair(*names, False, why=str(error))
    differ = [name for name in FACTORS if values[name][0] != values[name][1]]
    swaps = tuple(_swap(first, second, name, values[name]) for name in differ)
    return Pair(*names, False, here, there, swaps)


def _lead(scorer: Scorer, first: _Opened, second: _Opened) -> Lead:
    """Both winners under the same conditions: as predicted, also where one was trained."""
    assert first.session is not None
    target = first.session.target
    here, there = (
        scorer.with_acceptance(scorer.acceptance, context_of(scorer.context, each.score, target))(
            each.score.proposer
        )
        for each in (first, second)
    )
    return Lead.of(here, there)


def _swap(first: _Opened, second: _Opened, factor: str, values: tuple[str, str]) -> Swap:
    """The first run with `factor` as it was in the second."""
    assert first.session is not None and second.session is not None
    asked = replace(first.asked, **{name: getattr(second.asked, name) for name in FACTORS[factor]})
    if factor == "device" and asked.profile is None and second.asked.gpu is None:
        asked = replace(asked, gpu=second.session.source.device.key)
    request, prior_of = first.session.request, second if factor == "acceptance" else first
    if own := {"domain": "domain", "acceptance": "alpha", "workload": "mix"}.get(factor):
        theirs: Any = getattr(second.session.request, own)
        request = replace(request, **{own: theirs})
    try:
        scorer = _scorer(first.session, request, asked, prior_of.run.path)
        return Swap(factor, *values, _lead(scorer, first, second))
    except ArchsearchError as error:
        return Swap(factor, *values, None, str(error))


def _scorer(
    session: SearchSession, request: SearchRequest, asked: WorkloadRequest, prior_of: Path
) -> Scorer:
    target, mix = served_target(session.target, asked), request.mix
    source, workload = choose_latency(asked, target.architecture, request.kind)
    longest = asked.context_len + request.answer_tokens if mix is None else mix.longest
    acceptance, _ = acceptance_for(
        request.alpha, request.target, temperature=asked.temperature, state=prior_of / PRIOR_FILE
    )
    setting = replace(
        session.setting, target=target, source=source, workload=workload, longest=longest
    )
    return setting.scorer(request, acceptance)
