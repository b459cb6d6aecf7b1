"""The section of one confirmation: predicted beside measured, term by term."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from archsearch.engines.measure.results import Difference
from archsearch.estimate import Estimate
from archsearch.report.phrases import MANTISSA_BITS, unprofiled_words
from archsearch.report.section import Cell, Rows, Section, Table, text_cell, value_cell
from archsearch.runs.confirmed import REST, Confirmed, ConfirmedGamma
from archsearch.speedup import accepted_by_position

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
_GAPS: Final = (
    "Logit gap: the target's logit of the token it chose alone, minus that of the token chosen with"
    " the draft, in one pass over the common text. A gap of a few rounding steps of the number"
    " format is a tie that passes of 1 and of gamma + 1 tokens break differently; a large gap would"
    " be an error."
)


class _Term(NamedTuple):
    """A row of the table of terms; `brings`: its name in `error_by_term`."""

    name: str
    predicted: Estimate | None
    measured: Estimate | None
    scale: float = 1e3
    digits: int = 2
    brings: str = ""

    def cells(self) -> list[Cell | str]:
        expected, seen = self.predicted, self.measured
        error, sigmas = "", ""
        if expected is not None and seen is not None and seen.value:
            error = f"{expected.value / seen.value - 1:+.1%}"
            spread = math.hypot(expected.std, seen.std)
            if expected.std and spread:
                sigmas = f"{(expected.value - seen.value) / spread:+.1f}"
        values = (value_cell(each, self.digits, self.scale) for each in (expected, seen))
        return [text_cell(self.name), *values, error, sigmas]


def section_confirmed(
    confirmed: Confirmed,
    rank: int,
    label: str,
    alpha: Estimate | None = None,
    replayed: Sequence[float] = (),
) -> Section:
    """What was predicted beside what the engine measured, term by term. `alpha`: as it is known
    now; `replayed`: acceptance by position on held-out text."""
    ran = f"gamma {confirmed.gamma}, {confirmed.engine} {confirmed.engine_version}"
    draft = f", draft in {confirmed.draft_dtype}" if confirmed.draft_dtype else ""
    counts = ((name, getattr(confirmed, name)) for name in ("prompts", "tokens", "rounds"))
    counted = ", ".join(f"{count:,} {name}" for name, count in counts if count is not None)
    stale = alpha is not None and confirmed.is_stale(alpha)
    doubts = {
        "The draft was trained further after this confirmation; the figures are of the weights"
        " before.": stale,
        f"{confirmed.answer}.": confirmed.undecided,
        unprofiled_words(confirmed): True,
        f"Identity in float32 was not checked: {confirmed.identical_output_unchecked}": (
            confirmed.identical_output_unchecked
        ),
        confirmed.kept_earlier: True,
    }
    notes = [_terms_note(confirmed), *filter(None, [stopping_words(confirmed)])]
    if confirmed.prompts_seen:
        notes.insert(0, f"Not on unseen prompts: {confirmed.prompts_seen}.")
    notes += confirmed.pace_words
    if confirmed.speedup_end_to_end is not None:
        notes.append(
            f"With prefill the measured speed-up is {confirmed.speedup_end_to_end:.2f}x, pooled."
        )
    return Section(
        f"Predicted beside measured: rank {rank}, {confirmed.engine}, {confirmed.dtype}{draft}",
        [f"{label}; {ran}; {counted}."],
        [_term_table(confirmed)],
        notes=notes,
        doubts=[words for words, holds in doubts.items() if words and holds],
        parts=[
            _positions(confirmed, replayed),
            _categories(confirmed),
            _gammas(confirmed),
            _identity_part(confirmed),
        ],
    )


def stopping_words(confirmed: Confirmed) -> str:
    """What the draft did that stops where unsure; "" where it did not run."""
    row, gain = confirmed.stopping, confirmed.stopping_gain
    if row is None or gain is None or row.predicted_speedup is None:
        return ""
    served = "export writes it" if confirmed.stops is not None else "not faster, not exported"
    if confirmed.stops is not None and confirmed.padded_when_served:
        served = "not exported: engines load the full head"
    return (
        f"Stopping where its token has less than {row.stops_below:g}, gamma at most {row.gamma}:"
        f" {row.gain.words('x')} measured, {row.predicted_speedup:.2f}x"
        f" predicted ({gain.value:+.1%} ± {gain.std:.1%} over the best gamma by replay); {served}."
    )


def _terms_note(confirmed: Confirmed) -> str:
    times = {"draft": "draft_s", "verify": "verify_s", "overhead": "rest_s"}
    own = [name for name, field in times.items() if getattr(confirmed, field) is not None]
    missing = [name for name in times if name not in own]
    if not own:
        words = (
            "The engine times whole rounds, so draft, verify and overhead have no measured value of"
            " their own. "
        )
    else:
        words = (
            f"The engine timed the parts of its rounds: measured {', '.join(own)} are medians over"
            " whole rounds. "
        )
        words += "Overhead is what is neither draft nor verify. " if "overhead" in own else ""
        words += f"It did not report {', '.join(missing)}. " if missing else ""
    return _ERRORS + words + _WINDOW + (_BRINGS if _shares(confirmed) else "")


def _shares(confirmed: Confirmed) -> dict[str, float]:
    """What each term brings to the error of the speed-up; {} where the engine did not report every
    term."""
    terms, error = confirmed.error_by_term, confirmed.relative_error
    return terms.shares(error) if terms and error is not None else {}


def _sure(value: float | None, source: str = "measured") -> Estimate | None:
    return None if value is None else Estimate(value, 0.0, source)


def _terms(confirmed: Confirmed) -> list[_Term]:
    score, gain = confirmed.predicted, confirmed.speedup
    terms: list[_Term] = []
    expected = _sure(confirmed.predicted_speedup, "modelled")
    if score is not None:
        overhead, whole = confirmed.overhead_s, confirmed.predicted_round_s
        parts = [score.draft_s, score.verify_s, *([overhead] if overhead else [])]
        spread = math.hypot(*(part.std for part in parts))
        total = Estimate(whole, spread, score.verify_s.source) if whole is not None else None
        expected = score.speedup
        times = (
            ("target alone, ms/token (decode)", score.decode_s, "decode_s", "decode_s"),
            ("draft, ms for all gamma tokens", score.draft_s, "draft_s", "draft_s"),
            ("verify, ms", score.verify_s, "verify_s", "verify_s"),
            ("overhead of the engine, ms", overhead, "rest_s", "overhead_s"),
            ("round, ms (draft + verify + overhead)", total, "round_s", ""),
        )
        terms = [
            _Term(name, value, _sure(getattr(confirmed, field)), brings=brings)
            for name, value, field, brings in times
        ]
        terms += [
            _Term("alpha", score.alpha, confirmed.alpha, 1.0, 3),
            _Term("tau, tokens per round", score.tau, confirmed.tau, 1.0, brings="tau"),
        ]
    if expected is not None:
        terms.append(_Term("speed-up, x", expected, gain, 1.0, brings="all"))
    if confirmed.speedup_pooled is not None:
        pooled = _sure(confirmed.speedup_pooled)
        terms.append(_Term("speed-up, x, all tokens over all seconds", None, pooled, 1.0))
    if confirmed.predicted_at_measured_tau is not None:
        times_only = _sure(confirmed.predicted_at_measured_tau, "modelled")
        terms.append(_Term("speed-up, x, with the tau the engine counted", times_only, gain, 1.0))
    return terms


def _term_table(confirmed: Confirmed) -> Table:
    shares = _shares(confirmed)
    brought = {**shares, "all": math.fsum(shares.values())}
    rows: Rows = []
    for term in _terms(confirmed):
        if shares and term.brings == "all":
            rows.append([text_cell("rest"), "", "", "", "", f"{shares[REST]:+.1%}"])
        part = f"{brought[term.brings]:+.1%}" if term.brings in brought else ""
        rows.append([*term.cells(), *([part] if shares else [])])
    rates = f"{confirmed.baseline_tokens_per_s:.1f}, {confirmed.tokens_per_s:.1f}"
    name = text_cell("tokens/s: target alone, with draft")
    rows.append([name, "", Cell(rates, "measured"), *([""] * (3 if shares else 2))])
    header = "term | predicted | measured | relative error | in std"
    return Table(header + (" | part of the speed-up's error" if shares else ""), rows)


def _positions(confirmed: Confirmed, replayed: Sequence[float]) -> Section:
    measured, alpha = confirmed.accepted_by_position, confirmed.alpha.value
    if not measured:
        return Section()
    found: dict[str, Sequence[float]] = {"measured in the engine": measured}
    if len(replayed) == len(measured):
        found["replay of held-out text"] = replayed
    closed = accepted_by_position([alpha] * len(measured))
    found[f"closed form, alpha^i with alpha {alpha:.3f}"] = closed
    header = ["acceptance by position", *(str(i) for i in range(1, len(measured) + 1))]
    rows: Rows = [
        [text_cell(name), *(f"{share:.3f}" for share in shares)] for name, shares in found.items()
    ]
    note = "Share of rounds in which position i was accepted (all before it were too)."
    title = "Acceptance by position in the block"
    return Section(title, tables=[Table(header, rows)], notes=[note])


def _categories(confirmed: Confirmed) -> Section:
    if not confirmed.categories:
        return Section()
    rows: Rows = [
        [
            text_cell(name),
            str(row.prompts),
            f"{row.alpha:.2f}",
            f"{row.tau:.2f}",
            f"{row.speedup:.2f}x",
        ]
        for name, row in confirmed.categories.items()
    ]
    header = "category | prompts | alpha | tau, tokens | speed-up, median"
    return Section("By category of prompts, measured", tables=[Table(header, rows)])


def _gammas(confirmed: Confirmed) -> Section:
    if not confirmed.other_gammas:
        return Section()
    all_rows: list[ConfirmedGamma] = [confirmed, *confirmed.other_gammas]
    rows: Rows = [
        [
            str(row.gamma),
            value_cell(row.speedup, unit="x"),
            _pooled(row),
            f"{row.predicted_speedup:.2f}x",
            f"{row.relative_error:+.1%}",
            value_cell(row.tau),
            f"{row.tokens_per_s:.1f}",
        ]
        for row in sorted(all_rows, key=lambda row: row.gamma)
        if row.relative_error is not None and row.predicted_speedup is not None
    ]
    header = (
        "gamma | measured speed-up | pooled | predicted | relative error | tau measured, tokens"
        " | tokens/s measured"
    )
    return Section("Other gammas, same prompts", tables=[Table(header, rows)])


def _pooled(row: ConfirmedGamma) -> str:
    if row.speedup_pooled is None:
        return "-"
    return f"{row.speedup_pooled:.2f}x" + ("; not decided" if row.undecided is not None else "")


def _identity_part(confirmed: Confirmed) -> Section:
    words, differences = [confirmed.identity_words], confirmed.identical_output.differences
    tables = []
    if differences:
        rows: Rows = [
            [
                text_cell(row.prompt_id),
                str(row.position),
                str(row.alone_token),
                str(row.draft_token),
                "-" if row.logit_gap is None else f"{row.logit_gap:+.4f}",
                _rounding_steps(row, confirmed.dtype),
            ]
            for row in differences
        ]
        header = (
            "prompt | first different token | token alone | token with draft | logit gap"
            " | in rounding steps"
        )
        tables.append(Table(header, rows))
    title = "Is the output the target's own?"
    return Section(title, words, tables, notes=[_GAPS] if tables else [])


def _rounding_steps(row: Difference, dtype: str) -> str:
    bits = MANTISSA_BITS.get(dtype)
    if row.logit_gap is None or not bits or not row.alone_logit:
        return ""
    step = 2.0 ** (math.floor(math.log2(abs(row.alone_logit))) - bits)
    return f"{abs(row.logit_gap) / step:.1f}"
