"""What `acceptance` prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain, repeat

from archsearch.estimate import Estimate
from archsearch.records import from_data
from archsearch.report.terminal.layout import plus_minus, table

Interval = tuple[float, float] | None


@dataclass(frozen=True)
class Intervals:
    """Over prompts, by level in percent (`90`, `95`); of tau by gamma."""

    tau: Mapping[int, Mapping[int, Interval]] = field(default_factory=dict)
    alpha: Mapping[int, Interval] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was measured of all texts, or of those of a category; tau and the speed-up by gamma."""

    prompts: int = 0
    tokens: int = 0
    alpha: Estimate | None = None
    tau: Mapping[int, Estimate] = field(default_factory=dict)
    intervals: Intervals = Intervals()
    speedup: Mapping[int, Estimate] = field(default_factory=dict)
    best_gamma: int | None = None


@dataclass(frozen=True)
class Exit:
    """An early exit."""

    alpha: Estimate
    tau: Mapping[int, Estimate]
    speedup: Estimate | None = None
    best_gamma: int | None = None


@dataclass(frozen=True)
class Published:
    """Tokens a round that somebody published."""

    tau: float
    gamma: int


@dataclass(frozen=True)
class Term:
    """A term of the prior, in logit(alpha)."""

    term: str
    contribution: float
    std: float
    evidence: str


@dataclass(frozen=True)
class Explanation:
    """What the prior expects of a shape."""

    alpha: Estimate
    terms: tuple[Term, ...]


@dataclass(frozen=True, kw_only=True)
class Measured(Figures):
    """The answer of `acceptance`. `drafts_share`, `drafted`, `alpha_drafted`: by gamma, of drafters
    that do not draft in every round."""

    target: str
    draft: str
    temperature: float
    top_p: float
    shape: str = ""
    family: str | None = None
    dtype: str = ""
    notes: tuple[str, ...] = ()
    published: Published | None = None
    argmax_agreement: float = 0.0
    accepted_by_position: tuple[float, ...] = ()
    by_category: Mapping[str, Figures] = field(default_factory=dict)
    drafts_share: Mapping[int, Estimate] = field(default_factory=dict)
    drafted: Mapping[int, float] = field(default_factory=dict)
    alpha_drafted: Mapping[int, float] = field(default_factory=dict)
    exits: Mapping[int, Exit] | None = None
    explanation: Explanation | None = None
    latency: str = ""

    def best_lines(self, who: str, how: str) -> list[str]:
        """The best gamma; nothing where no device was named."""
        if not self.speedup:
            return []
        best = self.best_gamma
        never = f"{who} does not pay at any gamma: run the target alone."
        words = f"Speed-up modelled with the {how} tau; latency: {self.latency}."
        return ["", f"{f'Best gamma {best}.' if best else never} {words}"]


def acceptance_text(data: Mapping[str, object]) -> str:
    """What `acceptance` prints."""
    result = from_data(Measured, data)
    greedy = result.temperature == 0
    how = "greedy" if greedy else f"temperature {result.temperature:g}, top-p {result.top_p:g}"
    if result.family is not None:
        return "\n".join(_untrained_lines(result, how))
    lines = [f"Draft {result.draft} ({result.shape}) for {result.target}, {how}."]
    if result.published is not None:
        given = result.published
        lines.append(
            f"tau {given.tau:g} at gamma {given.gamma} is alpha"
            f" {plus_minus(result.alpha, digits=3)}."
        )
    elif result.alpha is not None:
        lines += _measured_lines(result)
    if result.explanation is not None:
        lines += _explanation_lines(result.explanation)
    return "\n".join(lines)


def _interval(values: Interval, digits: int = 3) -> str:
    return "-" if values is None else f"{values[0]:.{digits}f} to {values[1]:.{digits}f}"


def _measured_lines(result: Measured) -> list[str]:
    greedy, whole = result.temperature == 0, result.intervals.alpha
    what = "share of tokens on which both agree" if greedy else "mean overlap, sum of min(p, q)"
    lines = [
        f"Measured on {result.tokens} tokens of {result.prompts} answers that the target"
        f" wrote, {result.dtype}.",
        "",
        f"alpha {plus_minus(result.alpha, digits=3)} ({what})",
        f"  90 % {_interval(whole[90])}, 95 % {_interval(whole[95])}, over prompts",
    ]
    if not greedy:
        lines.append(
            f"  the most likely token is the same for {result.argmax_agreement:.3f} of the tokens"
        )
    gains = result.speedup
    shares = chain((f"{share:.3f}" for share in result.accepted_by_position), repeat("-"))
    rows = [
        (
            str(gamma),
            plus_minus(tau),
            *(_interval(result.intervals.tau[gamma][level], 2) for level in (90, 95)),
            share,
            *((plus_minus(gains[gamma]),) if gains else ()),
        )
        for (gamma, tau), share in zip(result.tau.items(), shares, strict=False)
    ]
    more = " | speed-up" if gains else ""
    lines += ["", table(rows, f"gamma | tau | 90 % | 95 % | position accepted{more}")]
    lines += result.best_lines("The draft", "measured")
    if result.by_category:
        lines += ["", _category_table(result)]
    lines += ["", *(f"Note: {note}." for note in result.notes)]
    lines.append(
        "tau: tokens per round, bonus included. Position accepted: share of rounds, at gamma"
        f" {len(result.tau)}."
    )
    return lines


def _category_table(result: Measured) -> str:
    priced = bool(result.speedup)
    rows = [
        (
            name,
            str(part.prompts),
            str(part.tokens),
            plus_minus(part.alpha, digits=3),
            _interval(part.intervals.alpha[95]),
            plus_minus(part.tau.get(4)),
            *((str(part.best_gamma),) if priced else ()),
        )
        for name, part in result.by_category.items()
    ]
    more = " | best gamma" if priced else ""
    return table(rows, f"category | prompts | tokens | alpha | 95 % | tau, gamma 4{more}")


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


def _untrained_lines(result: Measured, how: str) -> list[str]:
    lines = [f"{result.draft} for {result.target}, {how}."]
    notes = ["", *(f"Note: {note}." for note in result.notes)]
    if result.exits is not None:
        return [*lines, "", _exit_table(result.exits), *notes]
    lines += [
        f"Replayed on {result.tokens} tokens of {result.prompts} answers that the target wrote.",
        "",
    ]
    gains = result.speedup
    rows = [
        (
            str(gamma),
            plus_minus(result.drafts_share[gamma]),
            f"{result.drafted[gamma]:.1f}",
            f"{result.alpha_drafted[gamma]:.3f}",
            plus_minus(tau),
            _interval(result.intervals.tau[gamma][95], 2),
            *((plus_minus(gains[gamma]),) if gains else ()),
        )
        for gamma, tau in result.tau.items()
    ]
    header = "gamma | rounds that draft | tokens then | accepted | tau | 95 %"
    lines += [table(rows, header + " | speed-up" * bool(gains))]
    lines += result.best_lines("It", "replayed")
    parts = [
        (name, str(part.prompts), plus_minus(part.tau.get(4)))
        for name, part in result.by_category.items()
    ]
    lines += ["", table(parts, "category | prompts | tau, gamma 4")] if parts else []
    what = "tau: tokens per round, over all rounds. Accepted: share of the drafted tokens that were"
    return [*lines, *notes, f"{what} judged."]


def _exit_table(exits: Mapping[int, Exit]) -> str:
    rows = [
        (
            str(layer),
            plus_minus(part.alpha, digits=3),
            plus_minus(part.tau.get(4)),
            *((plus_minus(part.speedup), str(part.best_gamma)) if part.speedup else ()),
        )
        for layer, part in exits.items()
    ]
    more = " | speed-up | best gamma" if any(part.speedup for part in exits.values()) else ""
    return table(rows, f"exit after layer | alpha | tau, gamma 4{more}")
