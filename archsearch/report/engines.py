"""The verdict over engines: the fastest way to run the target on this machine, with or without a
draft.

A speed-up is over the same engine alone, and engines differ by more than drafts bring: compared are
tokens per second, at one precision. What was measured takes a prediction's place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from archsearch.engine_facts import engine_title
from archsearch.estimate import Estimate
from archsearch.report.answer import at_hand_switched, best_alone, sentences, unit_of
from archsearch.report.charts import SERIES, Chart, line
from archsearch.report.families import led_by_rival, title_of, with_heads
from archsearch.report.headline import Headline, headline, where_words, with_text
from archsearch.report.phrases import over_words
from archsearch.report.reading import Reading
from archsearch.report.section import Rows, Section, Table, text_cell, value_cell
from archsearch.runs.confirmed import Exact, Judged
from archsearch.runs.run import Run
from archsearch.runs.tables import Way

NOTABLE: Final = 1.1
"""Assumed: a machine slower than the profile's by more has that said beside what it measured."""


def ways_of(reading: Reading) -> list[Way]:
    """Every engine alone and with its best drafter (of the largest speed-up), fastest first: as
    measured, else as predicted.

    What else a machine does only slows: alone is the quickest run alone, and with a drafter that
    times what the drafter brought in turns with it.
    """
    ran: dict[tuple[str, str], list[tuple[Judged, str]]] = {}
    for item in reading.candidates:
        for each in filter(None, (item.confirmed, *item.elsewhere)):
            if not each.is_stale(item.score.alpha):
                who = f"rank {item.rank}{each.draft_dtype and f' in {each.draft_dtype}'}"
                runs = ran.setdefault((each.engine, each.dtype), [])
                runs.append((each, who))
                if (unsure := each.stops) is not None:
                    runs.append((unsure, f"{who}, which stops below {unsure.stops_below:g},"))
    for compared in reading.compared:
        for row in compared.rivals:
            runs = ran.setdefault((compared.engine, compared.dtype), [])
            runs.append((row, title_of(row.family)))
    ways: list[Way] = []
    measured = set()
    for (engine, dtype), runs in ran.items():
        decided = [(each, drafter) for each, drafter in runs if each.undecided is None]
        if not decided:
            continue
        measured.add((engine, dtype))
        best, drafter = max(decided, key=lambda pair: pair[0].speedup.value)
        alone = max(each.baseline_tokens_per_s for each, _ in decided)
        rate = alone * best.tokens_per_s / best.baseline_tokens_per_s
        same = best.identical_output
        own = Way(
            engine=engine,
            dtype=dtype,
            tokens_per_s=Estimate(alone, 0.0, "measured"),
            slowdown=getattr(best, "slowdown", None),  # side by side nobody looked
        )
        drafted = replace(
            own,
            tokens_per_s=Estimate(rate, rate * best.speedup.relative_std, "measured"),
            drafter=drafter,
            gamma=best.gamma,
            same=Exact(same.prompts, same.identical) if same.prompts else None,
        )
        ways += [own, drafted]
    predicted = reading.engines.ways if reading.engines is not None else ()
    # without an engine's own passes it is another engine's number
    known = (way for way in predicted if not way.profile_first)
    ways += [way for way in known if (way.engine, way.dtype) not in measured]
    return sorted(ways, key=lambda way: -way.tokens_per_s.value)


def way_words(way: Way) -> str:
    """`llama.cpp alone: 38.6` tokens/s, and how sure where they are predicted."""
    how = f"with {way.drafter} at gamma {way.gamma}" if way.drafter else "alone"
    rate = way.tokens_per_s
    words = f"{engine_title(way.engine)} {how}: {rate.value:.1f}"
    return words if way.measured else f"{words} ± {rate.std:.1f} (predicted)"


def _kinds(ways: Sequence[Way]) -> set[tuple[str, str]]:
    return {(way.engine, way.dtype) for way in ways}


def _unpriced(reading: Reading, ways: Sequence[Way]) -> dict[str, str]:
    if reading.engines is None:
        return {}
    known = {way.engine for way in ways}
    own = {way.engine: way.profile_first for way in reading.engines.ways if way.profile_first}
    return {**reading.engines.missing, **{name: own[name] for name in own if name not in known}}


def fastest_lines(reading: Reading, dtype: str) -> list[str]:
    """The fastest way at the run's precision, measured where any was, and what is predicted to be
    faster; [] where there is one way's worth of engines."""
    ways = ways_of(reading)
    unpriced = _unpriced(reading, ways)
    own = [way for way in ways if way.dtype == dtype]
    each = "; ".join(f"{engine_title(name)}: {command}" for name, command in unpriced.items())
    missing = [f"Not compared, not profiled in {dtype} here ({each})."] if each else []
    if not own or (len(_kinds(ways)) < 2 and not missing):
        return missing
    best = next((way for way in own if way.measured), own[0])
    none = best.measured and not best.drafter and best is own[0]
    start = "No draft is faster than none" if none else f"Fastest{' measured' * best.measured}"
    low = best.tokens_per_s.interval[0]
    if best.measured and any(w.measured and low < w.tokens_per_s.value for w in own if w != best):
        start = "Too close to call"
    words, rate = f"{start} in {dtype} here: {way_words(best)} tokens/s", best.tokens_per_s.value
    if best.drafter and best.same is not None:
        words += f", {best.same.words(' of ')} answers the target's own"
    others = [way_words(way) for way in own if way is not best]
    lines = [f"{words}.", f"Others: {', '.join(others) or 'none'}."]
    if best.measured and (best.slowdown or 1.0) > NOTABLE and not all(way.measured for way in own):
        lines[1] += (
            " Predictions are for a quiet machine; what was measured ran on one"
            f" {best.slowdown:.1f} times slower."
        )
    faster = [way for way in ways if way.dtype != dtype and way.tokens_per_s.value > rate]
    if faster:  # `ways` come fastest first; what was measured before what was predicted
        other = next((way for way in faster if way.measured), faster[0])
        lines[1] += f" In {other.dtype}, another model, {way_words(other)}."
    lines[1] = " ".join([lines[1], *missing])
    return lines


def whole_headline(run: Run, reading: Reading) -> Headline:
    """The headline: the fastest engine, where several are here and one was measured, then whether
    speculation pays, also by a switch, the verdict on the text and the best head."""
    head = headline(run, reading.candidates)
    _, better = at_hand_switched(reading.candidates, reading.remedied)
    title, where = head.title, where_words(run)
    if head.lead and " predicted" in title:
        where += over_words(head.lead.score.mix)
        title = sentences(reading.candidates, where, unit_of(run.device), reading.remedied)[0]
    if head.lead and (alone := best_alone(reading.remedied)) > 1.0:
        # over a target alone that is slower than it need be
        with_it = max((each.alone, each.switches) for each in reading.remedied if each.switches)[1]
        title = f"{title} With {with_it} the target alone is {alone:.2f}x as fast."
        head = replace(head, title=title)
    elif better and head.lead and better.speedup.value > head.lead.gain.value:
        how = f"{better.switches}, rank {better.rank} at gamma {better.gamma}"
        title = title if head.lead.gain.value <= 1.0 else head.title
        title = f"{title} With {how}: {better.speedup.value:.2f}x."
        head = replace(head, title=title, switched=better)
    head = with_text(head, reading.text)
    head = with_heads(head, run, reading.families, reading.compared)
    head = led_by_rival(head, run, reading.compared)
    lines = fastest_lines(reading, run.dtype)
    if len(lines) < 2:
        return replace(head, lines=[*head.lines, *lines])
    if any(way.measured for way in ways_of(reading) if way.dtype == run.dtype):
        lines[:2], head = [lines[1], head.title], replace(head, title=lines[0])
    return replace(head, lines=[*lines[:2], *head.lines, *lines[2:]])


def section_engines(reading: Reading, dtype: str) -> Section:
    """Every engine in tokens per second; empty where there is one way's worth of engines."""
    ways = ways_of(reading)
    if len(_kinds(ways)) < 2:
        return Section()
    rows: Rows = [
        [
            text_cell(engine_title(way.engine)),
            way.dtype,
            text_cell(way.drafter or "none"),
            str(way.gamma or "-"),
            value_cell(way.tokens_per_s, 1),
            "-" if way.same is None else way.same.words(" of "),
        ]
        for way in ways
    ]
    both = {
        ("alone", SERIES[4]): [way for way in ways if not way.drafter],
        ("with its best drafter", SERIES[0]): [way for way in ways if way.drafter],
    }
    series = [
        line(
            title,
            [(f"{engine_title(way.engine)}, {way.dtype}", way.tokens_per_s.value) for way in own],
            kind="bar",
            colour=colour,
        )
        for (title, colour), own in both.items()
        if own
    ]
    caption = (
        "Tokens per second of one request, alone and with the best drafter of each engine; measured"
        " or predicted as the table says. Another precision is another model."
    )
    title, axis = "Engines on this machine", "engine and precision"
    chart = Chart("engines", title, caption, axis, "tokens/s", series, y_from_zero=True)
    lines = fastest_lines(reading, dtype)
    return Section(
        title,
        lines[:2],
        [Table("engine | precision | drafter | gamma | tokens/s | same text", rows)],
        [chart],
        [
            "Best drafter: the largest speed-up in that engine, of what was run or is ranked here"
            " (assumed: by its lower end)."
            " Alone is the quickest run alone; with the drafter, that times what it brought."
        ],
        lines[2:],
    )
