"""What `estimate` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from archsearch.records import Inline, Maybe
from archsearch.report.answer import (
    SCREEN,
    gain_words,
    hours_words,
    needs_words,
    switched_words,
    unit_of,
)
from archsearch.report.phrases import (
    PART_HEADER,
    PAYS,
    AskedOver,
    ServedBy,
    brings,
    latency_warning,
    mix_words,
    objective_words,
    part_rows,
    round_words,
    verdict,
)
from archsearch.report.section import columns
from archsearch.report.terminal.layout import plus_minus, table, wrapped
from archsearch.runs.tables import Remedied, pays_beside
from archsearch.search.objective import Score

OVER_MIX = (
    "Speed-up, time per token: over the mix; the other numbers of the first table: of its heaviest"
    " part"
)
TIES = (
    "Drafts of one group cannot be told apart by these error bars. draft ms: all gamma tokens of a"
    " round."
)
ONE_ENGINE = (
    "draft | parameters | gamma | alpha | tau | draft ms | verify ms | break-even alpha |"
    " speed-up | pays | group"
)
SIDE_BY_SIDE = (
    "draft | engine | gamma | alpha | round ms | host ms | bound | free layers | ms a token |"
    " speed-up | pays"
)
FREE = (
    "free layers: how many a draft of these kernel times may have before the host decides the"
    " round. A speed-up is against\nthe same engine without a draft."
)


@dataclass(frozen=True)
class Entry:
    """A draft in one engine. `engine_class`: how it runs there, None where nothing is known;
    `group`: those whose error bars tell none apart; `free_layers`: how many it may have before the
    host decides the round; `other_tokenizer`: its vocabulary cannot be the target's; `remedied`: by
    a switch of this version."""

    ALSO: ClassVar = ("pays",)
    draft: str
    training: str
    notes: tuple[str, ...]
    no_room: str
    other_tokenizer: bool
    group: int
    served: str
    engine_class: str | None
    score: Inline[Score]
    free_layers: float | None
    remedied: Maybe[Remedied] = None

    @property
    def barred(self) -> tuple[bool, bool, bool]:
        """Whether it has another tokenizer, no room, or breaks a limit."""
        return self.other_tokenizer, bool(self.no_room), bool(self.score.broken_limits)

    @property
    def verdict(self) -> str:
        """As it is served the fastest, over the target alone as that is."""
        gain, better = self.score.speedup, self.remedied
        if better is not None and better.rate > gain.value:
            return verdict(better.speedup)
        return verdict(gain, least=1.0 if better is None else better.alone)

    @property
    def pays(self) -> bool:
        return pays_beside(self.score.speedup.value, self.remedied) and not any(self.barred)

    @property
    def answer(self) -> str:
        words = ("other tokenizer", "no room", "over limit")
        why = (word for word, barred in zip(words, self.barred, strict=True) if barred)
        return next(why, PAYS[self.verdict])

    @property
    def cells(self) -> dict[str, str]:
        """What tables show, by their headers."""
        score, free = self.score, "-" if self.score.host_s is None else "all"
        return {
            "draft": self.draft,
            "engine": f"{score.engine} {score.engine_version or ''}".rstrip(),
            "parameters": f"{score.parameters / 1e6:,.0f}M",
            "gamma": str(score.gamma),
            "alpha": plus_minus(score.alpha),
            "tau": plus_minus(score.tau),
            "draft ms": plus_minus(score.draft_s, 1e3),
            "verify ms": plus_minus(score.verify_s, 1e3),
            "break-even alpha": plus_minus(score.break_even_alpha),
            "round ms": plus_minus(score.round_s, 1e3),
            "host ms": plus_minus(score.host_s, 1e3),
            "bound": score.bound or "-",
            "free layers": free if self.free_layers is None else f"{self.free_layers:.1f}",
            "ms a token": f"{1e3 * score.tpot_s.value:.2f}",
            "speed-up": plus_minus(score.speedup),
            "pays": self.answer,
            "group": str(self.group),
        }


@dataclass(frozen=True)
class Difference:
    """Why a draft gains more in one engine than in another: `term` of the round at the same gamma,
    in `words`."""

    draft: str
    engine: str
    other: str
    term: str
    words: str


@dataclass(frozen=True)
class WithPrompts:
    """What the best draft gains once prompts are read too; `together`: where they start together
    and nobody takes a finished one's place."""

    concurrency: int
    output_tokens: int
    prompt_tokens: int
    draft: str
    gain: float
    together: float


@dataclass(frozen=True, kw_only=True)
class Estimated(AskedOver):
    """The answer of `estimate`; `by`: of the best."""

    by: Inline[ServedBy]
    drafts: tuple[Entry, ...]
    differences: tuple[Difference, ...]
    with_prompts: WithPrompts | None

    @property
    def engines(self) -> list[str]:
        return list(dict.fromkeys(entry.served for entry in self.drafts))

    def notes(self) -> list[str]:
        """Of every draft, each once."""
        return list(
            dict.fromkeys(
                f"Note: {entry.draft}: {note}" for entry in self.drafts for note in entry.notes
            )
        )

    def prompts_words(self) -> list[str]:
        """That prompts are left out, and what they change."""
        served = self.with_prompts
        if served is None:
            return []
        alone = f", {served.together:.2f}x where they start together and none follows"
        return [
            f"Decoding only. With prompts of {served.prompt_tokens:,} tokens and answers of"
            f" {served.output_tokens}, {served.concurrency} in flight, {served.draft} gives"
            f" {served.gain:.2f}x the tokens/s"
            f"{'' if served.concurrency == 1 else alone} (others: --workload FILE)."
        ]


def estimate_text(result: Estimated, *, explain: bool) -> str:
    """The answer in at most SCREEN lines of 100 columns; with `explain` all that it rests on behind
    it."""
    entries, engines, unit = result.drafts, result.engines, unit_of(result.device)
    best = entries[0]
    budget, gain, broken = result.training_budget, best.score.speedup, best.score.broken_limits
    hours = "" if budget is None else hours_words(budget.gpu_hours, unit)
    trained = any(entry.score.needs_kind == "training" for entry in entries)
    given = f" Drafters to be trained are given {hours}." if hours and trained else ""
    several, rates = len(engines) > 1, brings(best.score.mix)
    above = [
        *([f"No room: {best.no_room}. Were there room:"] if best.no_room else []),
        *([f"Breaks a limit: {'; '.join(broken)}. Without that:"] if broken else []),
        f"{best.draft} has another tokenizer than {result.target}: engines need the same."
        if best.other_tokenizer
        else f"Speculation {rates or best.verdict} for {result.target} on {result.device}: best"
        f" {best.draft}{' in ' + best.served if several else ''}, gamma {_gammas(best.score)},"
        f" {gain_words(gain)}{' a token' if rates else ''}."
        f"{switched_words(best.remedied)}",
        f"{result.words()}, {' and '.join(engines)}.{given}",
    ]
    rows = [
        (
            entry.draft,
            *([entry.cells["engine"]] if several else []),
            needs_words(entry.score.needs, unit),
            _gammas(entry.score),
            f"{entry.score.alpha.value:.2f}",
            entry.cells["ms a token"],
            gain_words(entry.score.speedup),
            entry.answer,
        )
        for entry in entries
    ]
    header = (
        f"draft{' | engine' * several} | needs (tokens) | gamma | alpha | ms a token |"
        " speed-up, 5-95 % | pays"
    )
    below = [
        "Acceptance on your text: archsearch acceptance; give it with --alpha or --tau. More:"
        " --explain."
    ]
    lines = [*wrapped(above), "", *table(rows, header).splitlines(), ""]
    room = SCREEN - len(lines) - len(below)
    others = [entry for entry in entries if entry is not best]
    over = [
        f"{entry.draft} breaks a limit: {text}."
        for entry in others
        for text in entry.score.broken_limits
    ]
    over += [
        f"{entry.draft} has no room: {entry.no_room}."
        for entry in others
        if entry.no_room not in ("", best.no_room)
    ]
    for text in [*over, *_said(result)]:
        said = wrapped([text])
        lines, room = (lines + said, room - len(said)) if len(said) <= room else (lines, room)
    text = "\n".join([*lines, *below])
    return f"{text}\n\n{_explained(result)}" if explain else text


def _gammas(score: Score) -> str:
    parts = score.mix.parts if score.mix is not None else ()
    each = dict.fromkeys(part.gamma for part in parts)
    return "/".join(map(str, each)) if len(each) > 1 else str(score.gamma)


def _waiting(result: Estimated) -> list[str]:
    best = result.drafts[0].score.mix
    if best is None or result.mix is None:
        return []
    pairs = zip(best.parts, result.mix.parts, strict=True)
    return [
        f"{part.name}: {part.running:.0f} of {asked.concurrency} in flight run at once, the others"
        " wait."
        for part, asked in pairs
        if asked.refill and part.running < 0.95 * (asked.concurrency or 0)
    ]


def _said(result: Estimated) -> list[str]:
    unprofiled = latency_warning(result.latency, result.target)
    said = [f"WARNING: {unprofiled}."] if unprofiled else []
    said += [*result.warned, *_waiting(result), *result.prompts_words()]
    return [*said, *result.notes(), *(f"{row.words}." for row in result.differences)]


def _explained(result: Estimated) -> str:
    work, entries, mix, engines = result.workload, result.drafts, result.mix, result.engines
    given = result.prior if "given" in result.prior else f"the prior ({result.prior})"
    one, over = len(engines) == 1, mix_words(mix) if mix else []
    where = [
        f"Target {result.target} on {result.device}",
        result.dtype_words,
        *([f"{work.mode} mode"] if one else []),
        *([] if mix else [f"batch size {work.batch_size}", f"context {work.context_len}"]),
        f"tensor parallel {work.tensor_parallel}",
        *([f"served by {engines[0]}"] if one else []),
    ]
    step = f" Target decode step {1e3 * entries[0].score.decode_s.value:.2f} ms."
    lines = [
        f"{', '.join(where)}.",
        *([] if one else [f"Served by {engine}." for engine in engines]),
        *([f"Load: {over[0]}."] if over else []),
        *(f"  {part}." for part in over[1:]),
        f"Latency: {result.latency}.",
        f"Acceptance: {given}.{step if one and not mix else ''}",
        "",
        *(_one_engine(entries) if one else [_table(entries, SIDE_BY_SIDE), "", FREE]),
        "",
    ]
    for entry in entries:
        if (scored := entry.score.mix) is not None:
            lines.append(f"{entry.draft} in {entry.served}: {objective_words(scored)}")
            lines += [table(part_rows(scored), PART_HEADER), ""]
    lines += [f"{OVER_MIX}.", ""] if any(entry.score.mix for entry in entries) else []
    lines += [f"{row.words}." for row in result.differences]
    lines += result.prompts_words()
    return "\n".join([*lines, *result.warned, *result.notes()])


def _one_engine(entries: Sequence[Entry]) -> list[str]:
    lines = [_table(entries, ONE_ENGINE), "", TIES]
    alike = len({entry.engine_class for entry in entries}) < 2
    return lines + [f"{entry.draft}: {_round(entry, alike)}." for entry in entries]


def _table(entries: Sequence[Entry], header: str) -> str:
    return table([[entry.cells[name] for name in columns(header)] for entry in entries], header)


def _round(entry: Entry, alike: bool) -> str:
    free, how = entry.free_layers, entry.engine_class
    parts = [
        round_words(entry.score),
        *([] if free is None else [f"{free:.1f} layers are free"]),
        *([how] if how and not alike else []),
    ]
    return "; ".join(parts)
