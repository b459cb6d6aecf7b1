"""What `acceptance` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from archsearch.acceptance.prior import Part
from archsearch.architecture.architecture import Architecture
from archsearch.estimate import Estimate
from archsearch.records import Inline, Maybe, Stored
from archsearch.report.terminal.layout import plus_minus, table

Levels = Mapping[int, tuple[float, float] | None]
"""Central intervals over prompts by their share in per cent; None of a single prompt."""


@dataclass(frozen=True)
class Gains:
    """Modelled speed-ups by gamma, and the best gamma (0: none pays)."""

    ALSO: ClassVar = ("best_gamma",)
    speedup: Mapping[int, Estimate]

    @property
    def best_gamma(self) -> int:
        best = max(self.speedup, key=lambda gamma: self.speedup[gamma].value)
        return best if self.speedup[best].value > 1.0 else 0


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """Of alpha, and of tau by gamma."""

    alpha: Annotated[Levels, Stored(omit=True)] = field(default_factory=dict)
    tau: Mapping[int, Levels]


@dataclass(frozen=True)
class Figures:
    """A draft model on texts, at each gamma that they are long enough for."""

    alpha: Estimate
    prompts: int
    tokens: int
    tau: Mapping[int, Estimate]
    intervals: Intervals
    gains: Inline[Gains | None]


@dataclass(frozen=True)
class Measured:
    """A draft model on all texts, and on each category of them; of an exit that is priced also its
    best gamma."""

    whole: Inline[Figures]
    argmax_agreement: float
    accepted_by_position: tuple[float, ...]
    by_category: Mapping[str, Figures]
    best_gamma: Maybe[int] = None
    speedup: Maybe[Estimate] = None


@dataclass(frozen=True)
class Exits:
    """By the layer after which the target is left."""

    exits: Mapping[int, Measured]


@dataclass(frozen=True)
class Texts:
    """Texts that lookup was replayed on; `tau` {}: none is long enough for a round."""

    prompts: int
    tokens: int
    tau: Mapping[int, Estimate]


@dataclass(frozen=True)
class Lookup(Texts):
    """What lookup did there, by gamma; by position: at the largest."""

    drafts_share: Mapping[int, Estimate]
    drafted: Mapping[int, float]
    alpha_drafted: Mapping[int, float]
    accepted_by_position: tuple[float, ...]
    drafted_by_position: tuple[float, ...]
    intervals: Intervals
    gains: Inline[Gains | None]


@dataclass(frozen=True)
class Replayed:
    """Lookup on all texts, and on each category of them."""

    whole: Inline[Lookup]
    by_category: Mapping[str, Texts]


@dataclass(frozen=True)
class Prices:
    """Where the latencies of a speed-up come from."""

    latency: str
    device: str
    latency_dtype: str


@dataclass(frozen=True)
class OnText:
    """What was done on the text that the target wrote; `context_len`: mean tokens in its cache."""

    dtype: str
    context_len: int
    notes: Sequence[str]
    figures: Inline[Measured | Replayed | Exits]
    prices: Inline[Prices | None]


@dataclass(frozen=True)
class Said:
    """What every answer repeats of the request."""

    target: str
    draft: str
    prompts_file: Path | None
    temperature: float
    top_p: float


@dataclass(frozen=True)
class Model:
    """A draft that is a model."""

    architecture: Architecture
    shape: str
    domain: str
    training: str
    trained_tokens: float | None


@dataclass(frozen=True)
class Published:
    """Tokens a round that somebody reports."""

    tau: float
    gamma: int | None


@dataclass(frozen=True)
class Explanation:
    """The prior's alpha of a shape, and its terms."""

    alpha: Estimate
    terms: Sequence[Part]


@dataclass(frozen=True)
class DraftAcceptance:
    """The answer of `acceptance`: of a `model`, or of a `family` that nobody trains. `alpha`: by
    what is `published`."""

    said: Inline[Said]
    model: Inline[Model | None] = None
    family: Maybe[str] = None
    on_text: Inline[OnText | None] = None
    alpha: Maybe[Estimate] = None
    published: Maybe[Published] = None
    explanation: Maybe[Explanation] = None

    def __str__(self) -> str:
        said, text = self.said, self.on_text
        sampled = f"temperature {said.temperature:g}, top-p {said.top_p:g}"
        who = said.draft if self.model is None else f"Draft {said.draft} ({self.model.shape})"
        lines = [f"{who} for {said.target}, {sampled if said.temperature else 'greedy'}."]
        if self.published is not None:
            words = f"tau {self.published.tau:g} at gamma {self.published.gamma} is alpha"
            lines.append(f"{words} {plus_minus(self.alpha, digits=3)}.")
        elif text is not None:
            notes = ["", *(f"Note: {note}." for note in text.notes)]
            if isinstance(text.figures, Exits):
                lines += ["", _exit_table(text.figures.exits), *notes]
            elif isinstance(text.figures, Replayed):
                lines += _replayed_lines(text, text.figures, notes)
            else:
                lines += _measured_lines(text, text.figures, notes, sampled=said.temperature > 0)
        if self.explanation is not None:
            lines += _explanation_lines(self.explanation)
        return "\n".join(lines)


def _best_lines(gains: Gains | None, prices: Prices | None, who: str, how: str) -> list[str]:
    if gains is None or prices is None:
        return []
    best = gains.best_gamma
    never = f"{who} does not pay at any gamma: run the target alone."
    words = f"Speed-up modelled with the {how} tau; latency: {prices.latency}."
    return ["", f"{f'Best gamma {best}.' if best else never} {words}"]


def _interval(values: tuple[float, float] | None, digits: int = 3) -> str:
    return "-" if values is None else f"{values[0]:.{digits}f} to {values[1]:.{digits}f}"


def _measured_lines(
    text: OnText, figures: Measured, notes: Sequence[str], *, sampled: bool
) -> list[str]:
    what = "mean overlap, sum of min(p, q)" if sampled else "share of tokens on which both agree"
    whole, gains = figures.whole, figures.whole.gains
    written = f"{whole.tokens} tokens of {whole.prompts} answers that the target wrote"
    lines = [
        f"Measured on {written}, {text.dtype}.",
        "",
        f"alpha {plus_minus(whole.alpha, digits=3)} ({what})",
        "  90 % {}, 95 % {}, over prompts".format(*map(_interval, whole.intervals.alpha.values())),
    ]
    if sampled:
        same = f"{figures.argmax_agreement:.3f} of the tokens"
        lines.append(f"  the most likely token is the same for {same}")
    rows = [
        (
            str(gamma),
            plus_minus(tau),
            *(_interval(each, 2) for each in whole.intervals.tau[gamma].values()),
            f"{share:.3f}",
            *((plus_minus(gains.speedup[gamma]),) if gains else ()),
        )
        for (gamma, tau), share in zip(whole.tau.items(), figures.accepted_by_position, strict=True)
    ]
    more = " | speed-up" if gains else ""
    lines += ["", table(rows, f"gamma | tau | 90 % | 95 % | position accepted{more}")]
    lines += _best_lines(gains, text.prices, "The draft", "measured")
    if parts := figures.by_category:
        rows = [
            (
                name,
                str(part.prompts),
                str(part.tokens),
                plus_minus(part.alpha, digits=3),
                _interval(part.intervals.alpha[95]),
                plus_minus(part.tau.get(4)),
                *((str(part.gains.best_gamma) if part.gains else "-",) if gains else ()),
            )
            for name, part in parts.items()
        ]
        more = " | best gamma" if gains else ""
        header = f"category | prompts | tokens | alpha | 95 % | tau, gamma 4{more}"
        lines += ["", table(rows, header)]
    return [
        *lines,
        *notes,
        "tau: tokens per round, bonus included. Position accepted: share of rounds, at gamma"
        f" {len(whole.tau)}.",
    ]


def _explanation_lines(explanation: Explanation) -> list[str]:
    rows = [
        # The space keeps evidence that begins with a number from being set to the right as one.
        (row.term, f"{row.contribution:+.2f}", f"± {row.std:.2f}", f" {row.evidence}")
        for row in explanation.terms
        if abs(row.contribution) >= 0.005 or row.std >= 0.005
    ]
    silent = len(explanation.terms) - len(rows)
    more = f"({silent} more terms say nothing about this shape: --json has them.)"
    return [
        "",
        f"The prior expects alpha {plus_minus(explanation.alpha)} for this shape. Its terms add"
        " up in logit(alpha):",
        "",
        table(rows, "term | logit | std |  evidence"),
        *([more] if silent else []),
    ]


def _replayed_lines(text: OnText, figures: Replayed, notes: Sequence[str]) -> list[str]:
    whole, gains = figures.whole, figures.whole.gains
    rows = [
        (
            str(gamma),
            plus_minus(whole.drafts_share[gamma]),
            f"{whole.drafted[gamma]:.1f}",
            f"{whole.alpha_drafted[gamma]:.3f}",
            plus_minus(tau),
            _interval(whole.intervals.tau[gamma][95], 2),
            *((plus_minus(gains.speedup[gamma]),) if gains else ()),
        )
        for gamma, tau in whole.tau.items()
    ]
    more = " | speed-up" if gains else ""
    parts = [
        (name, str(part.prompts), plus_minus(part.tau.get(4)))
        for name, part in figures.by_category.items()
    ]
    return [
        f"Replayed on {whole.tokens} tokens of {whole.prompts} answers that the target wrote.",
        "",
        table(rows, f"gamma | rounds that draft | tokens then | accepted | tau | 95 %{more}"),
        *_best_lines(gains, text.prices, "It", "replayed"),
        *(["", table(parts, "category | prompts | tau, gamma 4")] if parts else []),
        *notes,
        "tau: tokens per round, over all rounds. Accepted: share of the drafted tokens that were"
        " judged.",
    ]


def _exit_table(exits: Mapping[int, Measured]) -> str:
    rows = [
        (
            str(layer),
            plus_minus(part.whole.alpha, digits=3),
            plus_minus(part.whole.tau.get(4)),
            *((plus_minus(part.speedup), str(part.best_gamma)) if part.speedup else ()),
        )
        for layer, part in exits.items()
    ]
    more = " | speed-up | best gamma" * any(part.speedup for part in exits.values())
    return table(rows, f"exit after layer | alpha | tau, gamma 4{more}")
