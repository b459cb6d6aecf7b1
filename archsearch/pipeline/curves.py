"""`archsearch estimate --sweep`: what drafts are worth over a range of batch sizes, contexts,
gammas or acceptances."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from archsearch.capacity import memory_plan
from archsearch.engine_facts import engine_facts
from archsearch.files import write_text
from archsearch.pipeline.estimate import EstimateRequest, Priced, price_drafts
from archsearch.pipeline.rounds_explained import engine_data
from archsearch.pipeline.serving import check_batch
from archsearch.traffic.curve import Curve, Sweep, curve, sweep_of
from archsearch.traffic.times import held_by

COLUMNS: Final = (
    "draft engine engine_version x gamma alpha tau speedup speedup_low speedup_high speedup_off"
    " ideal tpot_ms plain_tpot_ms tokens_per_s plain_tokens_per_s running plain_running"
    " throughput_gain pays"
).split()


def estimate_curves(request: EstimateRequest, axis: str, span: str | None = None) -> dict[str, Any]:
    """The drafts of `request` over `axis`; `span`: `LOW:HIGH` or `LOW:HIGH:POINTS`.

    Raises ArchsearchError for what is no range, or an engine that does not run what it asks for.
    """
    sweep_of(axis, span, 2)  # what is no range is refused before anything is priced
    priced, about = price_drafts(request)
    target = priced[0].scorer.target
    sweep = sweep_of(axis, span, max(target.max_position_embeddings, 256))
    if sweep.axis == "batch":
        for item in priced:
            check_batch(engine_facts(item.source.engine), item.source.device, int(sweep.values[-1]))
    curves = [(item, _curve(item, sweep)) for item in priced]
    return {
        **about,
        "sweep": sweep.axis,
        "gamma": request.gamma,
        "curves": [_told(item, found, sweep) for item, found in curves],
    }


def _curve(item: Priced, sweep: Sweep) -> Curve:
    facts, scorer, device = engine_facts(item.source.engine), item.scorer, item.source.device
    return curve(
        scorer,
        item.score.proposer,
        sweep,
        lambda workload, drafter: held_by(facts, scorer.target, device, workload, drafter),
    )


def _told(item: Priced, found: Curve, sweep: Sweep) -> dict[str, Any]:
    largest = item.scorer.latency.largest_batch
    notes = list(item.notes)
    if largest is not None:
        notes.append(
            f"passes were measured up to batch size {largest}; beyond twice that the curve is a"
            " guess"
        )
    memory = memory_of(
        item, int(sweep.values[-1]) if sweep.axis == "context" else item.scorer.workload.context_len
    )
    return {
        "draft": item.name,
        **engine_data(item.source),
        "notes": notes,
        "memory": memory,
        **found.to_dict(),
    }


def memory_of(item: Priced, context: int) -> dict[str, Any] | None:
    """What the fullest device holds with the draft and without, for requests of `context` tokens;
    None on a CPU."""
    device, scorer = item.source.device, item.scorer
    if device.kind == "cpu":
        return None
    ranks = engine_facts(item.source.engine).ranks_of_draft(scorer.workload)
    served = replace(scorer.workload, draft_tensor_parallel=ranks, context_len=context)
    with_draft, alone = (
        asdict(memory_plan(scorer.target, each, served, device))
        for each in (item.score.proposer, None)
    )
    return {"with_draft": with_draft, "alone": alone, "draft_ranks": ranks, "context": context}


def curve_rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The points of all curves, a row each, by COLUMNS."""
    rows = []
    for item in result["curves"]:
        for point in item["points"]:
            gain = point["speedup"]
            values = {
                name: value["value"] if isinstance(value, Mapping) and "value" in value else value
                for name, value in {**item, **point}.items()
            }
            values |= {
                "speedup_low": gain.get("low"),
                "speedup_high": gain.get("high"),
                "tpot_ms": 1e3 * values["tpot_s"],
                "plain_tpot_ms": 1e3 * values["plain_tpot_s"],
            }
            rows.append({name: values[name] for name in COLUMNS})
    return rows


def write_curves(result: Mapping[str, Any], path: Path) -> None:
    """The curves as CSV."""
    import pandas as pd

    rows = pd.DataFrame(curve_rows(result), columns=COLUMNS)
    write_text(path, rows.to_csv(index=False, lineterminator="\n", float_format="%.6g"))
