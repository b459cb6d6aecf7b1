"""The best candidates of a run as tables: what one decides on, and every rank in full."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from archsearch.report.answer import having_words, shown_rows
from archsearch.report.phrases import (
    PART_HEADER,
    SOURCES,
    launches,
    millions,
    objective_words,
    part_rows,
)
from archsearch.report.reading import Shown
from archsearch.report.section import Cell, Rows, Section, Table, text_cell, value_cell
from archsearch.search.objective import Score

_ALL: Final = (
    "Shape: layers x hidden size, ffn width, query heads / KV heads and head size, rows of the "
    "language-model head (t: tied). predicted, measured: speed-up. draft: all gamma tokens. round: "
    "drafting, verification and what the engine adds. "
    "tau: mean tokens per verification, the target's own included. ± one standard deviation. "
)
MIX_NOTE: Final = (
    "Speed-up and time per token are over the mix; gamma, alpha and the times of a round above are"
    " of its heaviest part. Seconds hold the prompts that are read in between."
)


def section_best(found: Sequence[Shown], unit: str) -> Section:
    """At most eight drafters that differ in more than head counts, by what one decides on; folded,
    every rank with all its numbers. `unit`: GPU or CPU, whose hours a training takes."""
    if not found:
        return Section()
    shown = shown_rows(found)
    ran = any(item.measured_speedup is not None for item in found)
    rows: Rows = []
    for item in shown:
        low, high = item.gain.interval
        how = "measured" if item.measured else item.gain.source
        gain = Cell(f"{item.gain.value:.2f}x", f"{low:.2f} to {high:.2f}, {how}")
        named = text_cell(item.name, item.stage, wrap=True)
        what = (named, text_cell(having_words(item, unit)), str(item.gamma))
        seen = [_measured_cell(item)] if ran else []
        rows.append([str(item.rank), gain, *seen, *what, value_cell(item.score.alpha)])
    header = f"# | speed-up, 5 to 95 %{' | measured' * ran} | drafter | needs | gamma | alpha"
    lead = next((number for number, item in enumerate(shown) if item.rank == 1), None)
    ranks: dict[int, list[str]] = {}
    for item in found:
        ranks.setdefault(item.group, []).append(str(item.rank))
    same = [f"ranks {', '.join(group)}" for group in ranks.values() if len(group) > 1]
    apart = (
        f"Cannot be told apart (same group): {'; '.join(same) or 'none'}. In a group each is slower"
        " than its first by less than one standard deviation of the difference; errors that both"
        " share, such as the target's own times, cancel."
    )
    table, parts = Table(header, rows, lead), [section_ranks(found)]
    return Section("The best candidates", tables=[table], notes=[apart], parts=parts)


def section_ranks(found: Sequence[Shown]) -> Section:
    """Every rank, with all its numbers."""
    rows: Rows = []
    ran = any(item.measured_speedup is not None for item in found)
    for item in found:
        score = item.score
        kind = score.architecture.attention_kind if score.drafter is None else score.family
        rows.append(
            [
                str(item.rank),
                value_cell(score.speedup, unit="x"),
                *([_measured_cell(item)] if ran else []),
                text_cell(score.label(), f"{kind}, {item.stage}"),
                millions(score.parameters),
                str(score.gamma),
                str(item.group),
                value_cell(score.alpha),
                value_cell(score.tau),
                value_cell(score.draft_s, 2, 1e3),
                value_cell(score.verify_s, 1, 1e3),
                _round_cell(score),
                value_cell(score.break_even_alpha),
                f"{score.kv_bytes_per_token:,}",
            ]
        )
    header = (
        f"rank | predicted{' | measured' * ran} | shape | parameters | gamma | group | alpha |"
        " tau, tokens | draft, ms | verify, ms | round, ms | break-even alpha | KV, bytes/token"
    )
    used = dict.fromkeys(
        getattr(item.score, name).source
        for item in found
        for name in ("alpha", "draft_s", "verify_s", "speedup")
    )
    legend = "; ".join(f"{name}: {SOURCES[name]}" for name in used)
    lead = next((number for number, item in enumerate(found) if item.rank == 1), None)
    notes = [f"{_ALL}Sources: {legend}. A combined number bears the weakest source of its parts."]
    table, title = Table(header, rows, lead), "Every rank, with all its numbers"
    return Section(title, tables=[table], notes=notes, folded=True)


def _round_cell(score: Score) -> Cell:
    if score.round_s is None:
        return Cell("-")
    cell = value_cell(score.round_s, 1, 1e3)
    if score.bound == "host":
        return Cell(cell.text, f"bound by the host: {launches(score)}")
    return cell if score.bound is None else Cell(cell.text, "bound by the GPU")


def _measured_cell(item: Shown) -> Cell:
    gain = item.measured_speedup
    pooled = item.confirmed.speedup_pooled if item.confirmed is not None else None
    if gain is None or pooled is None:
        return value_cell(gain, unit="x")
    doubt, why = ("", "") if item.undecided is None else ("?", "; not decided")
    return Cell(f"{gain.words('x')}{doubt}", f"pooled {pooled:.2f}x{why}")


def section_mix(found: Sequence[Shown]) -> Section:
    """What rank 1 does in each part of the mix that was searched for; empty where there was
    none."""
    mix = found[0].score.mix if found else None
    if mix is None:
        return Section()
    words = f"Rank {found[0].rank}: {objective_words(mix)}."
    return Section(
        "Over the mix of work", [words], [Table(PART_HEADER, part_rows(mix))], notes=[MIX_NOTE]
    )
