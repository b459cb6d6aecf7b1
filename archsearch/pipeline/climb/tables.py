"""What a climb did as rows: columns of trials.csv, the table of the report, what was measured of
each draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from archsearch.acceptance.estimator import VocabularyCoverage
from archsearch.architecture.architecture import Architecture
from archsearch.drafts.records import TrainedDraft
from archsearch.records import as_data
from archsearch.runs.state import ClimbState, RungRow
from archsearch.search.objective import Score

_SHAPE: Final = tuple(Architecture.__dataclass_fields__)
_WHAT: Final = ("prior", "short training", "full training")


def measured_row(score: Score, draft: TrainedDraft, coverage: VocabularyCoverage) -> dict[str, Any]:
    """What a prompt file decides, measured on its held-out answers: alpha (by category), tau,
    gamma, coverage of the head. `score`: the draft's, by what was measured."""
    return {
        "label": draft.architecture.label(),
        "shape": draft.architecture.to_dict(),
        "alpha": draft.alpha.to_dict(),
        "alpha_by_category": {
            name: value.to_dict() for name, value in draft.alpha_by_category.items()
        },
        "gamma": score.gamma,
        "tau": score.tau.to_dict(),
        "tau_by_gamma": {gamma: value.to_dict() for gamma, value in draft.tau.items()},
        "speedup": score.speedup.to_dict(),
        "coverage": coverage.share(draft.architecture.head_rows),
        "head_rows": draft.architecture.head_rows,
    }


def trial_rows(rows: Sequence[Mapping[str, Any]], state: ClimbState) -> list[dict[str, Any]]:
    """Rows of trials.csv with what each rung said of a shape: the rung it reached, its state, alpha
    with its source per rung."""
    found: dict[str, list[RungRow]] = {}
    for record in state.rungs:
        found.setdefault(_key(record.shape.to_dict()), []).append(record)
    result: list[dict[str, Any]] = []
    seen: set[str] = set()
    for row in rows:
        if row.get("state") != "COMPLETE":
            result.append(dict(row))
            continue
        key = _key(row)
        result.append(_with_rungs(row, found.get(key, [])))
        seen.add(key)
    for key, records in found.items():
        if key not in seen:  # a neighbour that the search over all shapes did not try
            result.append(_with_rungs(_climb_row(len(result), records[-1]), records))
    return result


def _climb_row(number: int, record: RungRow) -> dict[str, Any]:
    known = {
        "number": number,
        "state": "COMPLETE",
        "origin": "climb",
        "feasible": True,
        "invalid": "",
    }
    return {
        **known,
        **record.shape.to_dict(),
        "speedup": record.score.value,
        "speedup_std": record.score.std,
    }


def _with_rungs(row: Mapping[str, Any], records: Sequence[RungRow]) -> dict[str, Any]:
    """A row with the columns of the rungs its shape reached."""
    merged = {**row, "rung": max((record.rung for record in records), default=0)}
    for record in records:
        name = f"rung_{record.rung}" + (f"_{record.round}" if record.rung == 1 else "")
        merged |= {
            f"{name}_state": record.state,
            f"{name}_alpha": record.alpha.value,
            f"{name}_alpha_std": record.alpha.std,
            f"{name}_alpha_source": record.alpha.source,
            f"{name}_speedup": record.score.value,
        }
    return merged


def _key(shape: Mapping[str, Any]) -> str:
    """A shape as trials.csv has it: a row of the study's own, whose fields may be of other number
    types."""
    return repr([shape.get(name) for name in _SHAPE])


def summary(state: ClimbState) -> list[dict[str, Any]]:
    """One entry per rung and round: how many candidates, minutes, the best score, what was
    dropped."""
    groups: dict[tuple[int, int], list[RungRow]] = {}
    for record in state.rungs:
        groups.setdefault((record.rung, record.round), []).append(record)
    return [
        _rung_entry(state, rung, number, records)
        for (rung, number), records in sorted(groups.items())
    ]


def _rung_entry(
    state: ClimbState, rung: int, number: int, records: Sequence[RungRow]
) -> dict[str, Any]:
    best = max(records, key=lambda record: record.score.value)
    scored = len(records)
    if rung == 0:
        scored = state.rung0.scored if state.rung0 else scored
        seconds = state.steps.get("search", 0.0)
        over = scored - len(records)
        dropped = [{"label": f"{over} shapes", "why": "cannot win"}] if over > 0 else []
    else:
        entry = state.round(number)
        seconds = (
            (entry and entry.seconds) or 0.0 if rung == 1 else state.steps.get("finalists", 0.0)
        )
        gone = (record for record in records if record.state in ("pruned", "dropped"))
        dropped = [{"label": record.label, "why": record.why} for record in gone]
    return {
        "rung": rung,
        "round": number,
        "what": _WHAT[rung],
        "candidates": scored,
        "tokens": max(record.tokens for record in records),
        "seconds": seconds,
        "best": best.label,
        "score": best.score.to_dict(),
        "alpha": best.alpha.to_dict(),
        "dropped": dropped,
        "records": [as_data(record) for record in records],
    }
