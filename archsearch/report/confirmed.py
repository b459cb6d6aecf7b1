"""The section of one confirmation: predicted beside measured, term by term."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from archsearch.estimate import Estimate
from archsearch.report.phrases import (
    MANTISSA_BITS,
    identity_words,
    slowdown_words,
    unprofiled_words,
)
from archsearch.report.reading import Shown
from archsearch.report.section import Cell, Section, Table, text_cell, value_cell
from archsearch.runs.confirmed import Confirmed
from archsearch.runs.fields import as_estimate
from archsearch.runs.terms import REST
from archsearch.search.objective import Score
from archsearch.speedup import accepted_by_position


def _overhead(score: Score) -> Estimate | None:
    """What the engine adds to a round, from the score's own numbers: tpot * tau = draft + verify +
    overhead."""
    rest = score.tpot_s.value * score.tau.value - score.draft_s.value - score.verify_s.value
    return Estimate(rest, 0.0, score.verify_s.source) if rest > 1e-7 else None


_MEASURED_TERMS: Final = {"draft": "draft_s", "verify": "verify_s", "overhead": "rest_s"}
_ERRORS: Final = (
    "Relative error: predicted / measured - 1. In std: (predicted - measured) / both standard"
    " deviations added in squares. "
)
_WINDOW: Final = (
    "tau predicted: replay of the held-out text. Decode window only: times after the first tokens"
    " of a request have arrived. Speed-up measured: median over prompts."
)
_BRINGS: Final = (
    " Part of the speed-up's error: what the term brings to it, positive where it makes the"
    " prediction too high; they add up to the error. Rest: the speed-up is a median over prompts,"
    " which medians of terms do not give exactly."
)


_DECODE: Final = "target alone, ms/token (decode)"
_DRAFT: Final = "draft, ms for all gamma tokens"
_VERIFY: Final = "verify, ms"
_OVERHEAD: Final = "overhead of the engine, ms"
_TAU: Final = "tau, tokens per round"
_SPEEDUP: Final = "speed-up, x"
_POOLED: Final = "speed-up, x, all tokens over all seconds"
_BROUGHT_BY: Final = {
    "decode_s": _DECODE,
    "draft_s": _DRAFT,
    "verify_s": _VERIFY,
    "overhead_s": _OVERHEAD,
    "tau": _TAU,
}


def _terms_note(confirmed: Confirmed) -> str:
    """What the columns of the term table are, true of what this engine told."""
    data = confirmed.record
    told = [name for name, key in _MEASURED_TERMS.items() if _timed(data, key) is not None]
    untold = [name for name in _MEASURED_TERMS if name not in told]
    if not told:
        times = (
            "The engine times whole rounds, so draft, verify and overhead have no measured value of"
            " their own. "
        )
    else:
        times = (
            f"The engine timed the parts of its rounds: measured {', '.join(told)} are medians over"
            " whole rounds. "
        )
        times += "Overhead is what is neither draft nor verify. " if "overhead" in told else ""
        times += f"It did not tell {', '.join(untold)}. " if untold else ""
    return (
        _ERRORS
        + times
        + _WINDOW
        + (_BRINGS + slowdown_words(data.get("slowdown")) if _shares(confirmed) else "")
    )


def _timed(data: Mapping[str, Any], name: str) -> Estimate | None:
    """A measured time in seconds, None where the engine did not tell it."""
    value = data.get(name)
    return (
        Estimate(float(value), 0.0, "measured")
        if value is not None and math.isfinite(value)
        else None
    )


def _shares(confirmed: Confirmed) -> dict[str, float]:
    """What each term brings to the error of the speed-up; {} where the engine did not tell every
    term."""
    terms, error = confirmed.error_by_term, confirmed.relative_error
    return terms.shares(error) if terms and error is not None else {}


def section_confirmed(item: Shown) -> Section:
    """What was predicted beside what the engine measured, term by term."""
    assert item.confirmed is not None
    confirmed, data = item.confirmed, item.confirmed.record
    gains = (
        f"gamma {confirmed.gamma}, {confirmed.engine} {confirmed.engine_version},"
        f" {data.get('dtype', '')}"
    )
    counted = ", ".join(
        f"{data[key]:,} {key}"
        for key in ("prompts", "tokens", "rounds")
        if isinstance(data.get(key), int)
    )
    label = item.score.label()
    doubts = []
    if item.stale:
        doubts.append(
            "The draft was trained further after this confirmation; the figures are of the weights"
            " before."
        )
    if confirmed.undecided is not None:
        doubts.append(
            f"Not decided: {confirmed.undecided}. Confirm it again with nothing else running."
        )
    if unprofiled_words(data):
        doubts.append(unprofiled_words(data))
    notes = [_terms_note(confirmed)]
    if data.get("prompts_seen"):
        notes.insert(0, f"Not on unseen prompts: {data['prompts_seen']}.")
    if data.get("slowdown") is not None:
        slower = f"{data['slowdown']:.2f} times slower than the profile's reference"
        notes.append(
            f"The machine ran {slower}, which predicted times are for; a speed-up does not feel it."
        )
    if data.get("speedup_pooled") is not None:
        notes.append(
            f"With prefill the measured speed-up is {data['speedup_end_to_end']:.2f}x, pooled."
        )
    parts = [_positions(item, confirmed)]
    categories = data.get("categories") or {}
    if categories:
        rows: list[list[Cell | str]] = [
            [
                text_cell(name),
                str(row["prompts"]),
                f"{row['alpha']:.2f}",
                f"{row['tau']:.2f}",
                f"{row['speedup']:.2f}x",
            ]
            for name, row in categories.items()
        ]
        header = ("category", "prompts", "alpha", "tau, tokens", "speed-up, median")
        parts.append(Section("By category of prompts, measured", tables=[Table(header, rows)]))
    if confirmed.other_gammas:
        rows = [
            [
                str(row.gamma),
                value_cell(row.speedup, 2, unit="x"),
                _pooled(row),
                f"{row.predicted_speedup.value:.2f}x",
                f"{row.relative_error:+.1%}",
                value_cell(row.tau),
                f"{row.tokens_per_s:.1f}",
            ]
            for row in sorted([confirmed, *confirmed.other_gammas], key=lambda row: row.gamma)
            if row.relative_error is not None and row.predicted_speedup is not None
        ]
        measures = (
            "gamma",
            "measured speed-up",
            "pooled",
            "predicted",
            "relative error",
            "tau measured, tokens",
            "tokens/s measured",
        )
        parts.append(Section("Other gammas, same prompts", tables=[Table(measures, rows)]))
    return Section(
        f"Predicted beside measured: rank {item.rank}",
        [f"{label}; {gains}; {counted}."],
        [_term_table(confirmed)],
        notes=notes,
        doubts=doubts,
        parts=[*parts, _identity_part(data)],
    )


def _pooled(row: Confirmed) -> str:
    return (
        "-"
        if row.pooled is None
        else f"{row.pooled:.2f}x" + ("; not decided" if row.undecided is not None else "")
    )


def _term_table(confirmed: Confirmed) -> Table:
    data, predicted = confirmed.record, confirmed.predicted
    terms: list[tuple[str, Estimate | None, Estimate | None, float, int]] = []
    shares = _shares(confirmed)
    if predicted is not None:
        overhead = (
            as_estimate(data["overhead_s"])
            if data.get("overhead_s") is not None
            else _overhead(predicted)
        )
        total = data.get("predicted_round_s")
        parts = [predicted.draft_s, predicted.verify_s, *([overhead] if overhead else [])]
        spread = math.hypot(*(part.std for part in parts))
        whole = Estimate(total, spread, predicted.verify_s.source) if total is not None else None
        terms += [
            (_DECODE, predicted.decode_s, _timed(data, "decode_s"), 1e3, 2),
            (_DRAFT, predicted.draft_s, _timed(data, "draft_s"), 1e3, 2),
            (_VERIFY, predicted.verify_s, _timed(data, "verify_s"), 1e3, 2),
            (_OVERHEAD, overhead, _timed(data, "rest_s"), 1e3, 2),
            ("round, ms (draft + verify + overhead)", whole, _timed(data, "round_s"), 1e3, 2),
            ("alpha", predicted.alpha, confirmed.alpha, 1.0, 3),
            (_TAU, predicted.tau, confirmed.tau, 1.0, 2),
        ]
    gain = confirmed.speedup
    if predicted is not None:
        terms.append((_SPEEDUP, predicted.speedup, gain, 1.0, 2))
    elif confirmed.predicted_speedup is not None:
        bare = Estimate(confirmed.predicted_speedup.value, 0.0, "modelled")
        terms.append((_SPEEDUP, bare, gain, 1.0, 2))
    if confirmed.pooled is not None:
        terms.append((_POOLED, None, Estimate(confirmed.pooled, 0.0, "measured"), 1.0, 2))
    if data.get("predicted_at_measured_tau") is not None:
        times_only = Estimate(data["predicted_at_measured_tau"], 0.0, "modelled")
        terms.append(("speed-up, x, with the tau the engine counted", times_only, gain, 1.0, 2))
    rows: list[list[Cell | str]] = []
    for name, expected, seen, scale, digits in terms:
        error, sigmas = "", ""
        if expected is not None and seen is not None and seen.value:
            error = f"{expected.value / seen.value - 1:+.1%}"
            spread = math.hypot(expected.std, seen.std)
            sigmas = (
                f"{(expected.value - seen.value) / spread:+.1f}" if expected.std and spread else ""
            )
        rows.append(
            [
                text_cell(name),
                value_cell(expected, digits, scale),
                value_cell(seen, digits, scale),
                error,
                sigmas,
            ]
        )
    if shares:
        brought = {
            _BROUGHT_BY[name]: share for name, share in shares.items() if name in _BROUGHT_BY
        }
        brought[_SPEEDUP] = math.fsum(shares.values())
        for row, term in zip(rows, terms, strict=True):
            row.append(f"{brought[term[0]]:+.1%}" if term[0] in brought else "")
        rows.insert(
            [term[0] for term in terms].index(_SPEEDUP),
            [text_cell("rest"), "", "", "", "", f"{shares[REST]:+.1%}"],
        )
    rates = f"{confirmed.baseline_tokens_per_s:.1f}, {confirmed.tokens_per_s:.1f}"
    last: list[Cell | str] = [
        text_cell("tokens/s: target alone, with draft"),
        "",
        Cell(rates, "measured"),
        "",
        "",
    ]
    rows.append([*last, ""] if shares else last)
    header = (
        "term",
        "predicted",
        "measured",
        "relative error",
        "in std",
        *(["part of the speed-up's error"] if shares else []),
    )
    return Table(header, rows)


def _positions(item: Shown, confirmed: Confirmed) -> Section:
    measured, alpha = confirmed.accepted_by_position, confirmed.alpha.value
    if not measured:
        return Section()
    closed = accepted_by_position([alpha] * len(measured))
    header = ["acceptance by position", *(str(i) for i in range(1, len(measured) + 1))]
    rows: list[list[Cell | str]] = [
        [text_cell("measured in the engine"), *(f"{share:.3f}" for share in measured)]
    ]
    if len(item.replayed) == len(measured):
        rows.append(
            [text_cell("replay of held-out text"), *(f"{share:.3f}" for share in item.replayed)]
        )
    rows.append(
        [
            text_cell(f"closed form, alpha^i with alpha {alpha:.3f}"),
            *(f"{share:.3f}" for share in closed),
        ]
    )
    note = "Share of rounds in which position i was accepted (all before it were too)."
    return Section(
        "Acceptance by position in the block", tables=[Table(header, rows)], notes=[note]
    )


_GAPS: Final = (
    "Logit gap: the target's logit of the token it chose alone, minus that of the token chosen with"
    " the draft, in one pass over the common text. A gap of a few rounding steps of the number"
    " format is a tie that passes of 1 and of gamma + 1 tokens break differently; a large gap would"
    " be an error."
)


def _identity_part(data: Mapping[str, Any]) -> Section:
    identity = data.get("identical_output")
    title, words = "Is the output the target's own?", [identity_words(data)]
    differences = identity.get("differences") if isinstance(identity, Mapping) else None
    if differences:
        bits = MANTISSA_BITS.get(str(data.get("dtype")))
        rows: list[list[Cell | str]] = []
        for row in differences:
            gap, logit_alone = row.get("logit_gap"), row.get("alone_logit")
            steps = ""
            if gap is not None and bits and logit_alone:
                steps = f"{abs(gap) / 2.0 ** (math.floor(math.log2(abs(logit_alone))) - bits):.1f}"
            rows.append(
                [
                    text_cell(row["prompt_id"]),
                    str(row["position"]),
                    str(row["alone_token"]),
                    str(row["draft_token"]),
                    "-" if gap is None else f"{gap:+.4f}",
                    steps,
                ]
            )
        header = (
            "prompt",
            "first different token",
            "token alone",
            "token with draft",
            "logit gap",
            "in rounding steps",
        )
        return Section(title, words, [Table(header, rows)], notes=[_GAPS])
    return Section(title, words)
