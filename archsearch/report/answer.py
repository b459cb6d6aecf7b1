"""The first screen: what one can have today, what the training budget buys, how sure that is, what
next."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from archsearch.architecture.published_drafters import made_for
from archsearch.drafters.forms import vllm_drafter_config
from archsearch.engine_facts import engine_facts
from archsearch.estimate import Estimate
from archsearch.export.engines import HEADS, VLLM_SIZES, Setup, serving
from archsearch.needs import Needs
from archsearch.report.phrases import brings, clipped, count_words, hub_name, verdict
from archsearch.report.reading import Reading, Shown
from archsearch.report.terminal.layout import WIDTH, table
from archsearch.runs.run import Run
from archsearch.runs.tables import Remedied, longest_of

SCREEN: Final = 25
"""Lines of the first screen, whatever there is to say."""
MOST_ROWS: Final = 8
SOURCE_WORDS: Final = {
    "prior": "by published drafts",
    "measured": "measured",
    "published": "published",
    "given": "given",
}
LONGEST_NAME: Final = 40
SUFFIX_NEEDS: Final = (
    "before vLLM 0.32 and with VLLM_USE_V2_MODEL_RUNNER=0 first: pip install arctic-inference"
)


def gain_words(gain: Estimate) -> str:
    """`1.96x (1.50 to 2.56)`: the value, and 5 to 95 %."""
    low, high = gain.interval
    return f"{gain.value:.2f}x ({low:.2f} to {high:.2f})"


def unit_of(device: str) -> str:
    """Whose hours a training takes, by the key of the searched device."""
    return "CPU" if device.startswith("cpu") else "GPU"


def hours_words(hours: float, unit: str) -> str:
    """`24 GPU-hours`, `30 minutes`: of the searched device."""
    if unit == "CPU" and hours < 2:
        return f"{60 * hours:.0f} minutes"
    return f"{hours:.3g} {unit}-hour{'s' if hours != 1 else ''}"


def needs_words(needs: Needs | None, unit: str) -> str:
    """What it takes to have a drafter, for a column of a table: hours of the searched device,
    tokens."""
    if needs is None:
        return "-"
    if needs.kind == "training":
        hours = re.sub("-hours?", "-h", hours_words(needs.gpu_hours, unit))
        return f"{hours.replace('minutes', 'min')}, {count_words(needs.tokens or 0.0)}"
    here = needs.hub_id is None or Path(needs.hub_id).expanduser().exists()
    return "nothing" if here else "download"


def best_at_hand(options: Sequence[Shown], trained: bool = True) -> Shown | None:
    """The best that one can have today, with or without what was `trained` in this run: the first
    of all where that is at hand, else by `ranked_by`."""
    found = [each for each in options if each.at_hand and (trained or not each.has_weights)]
    return max(found, key=lambda each: (each is options[0], each.ranked_by), default=None)


def shown_rows(options: Sequence[Shown], most: int = MOST_ROWS) -> list[Shown]:
    """At most `most` options that differ in more than head counts: the best of each kind of what
    needs training, and what one can have today; in the order of the ranking."""
    seen: dict[tuple[object, ...], Shown] = {}
    for option in options:
        seen.setdefault(option.kind, option)
    distinct = list(seen.values())
    best: dict[tuple[str, bool], Shown] = {}
    for option in distinct:
        best.setdefault((option.score.family, option.at_hand), option)
    first_ones = list(best.values())[:most]
    rest = [option for option in distinct if option not in first_ones][: most - len(first_ones)]
    return sorted([*first_ones, *rest], key=lambda option: option.rank)


def rows_text(options: Sequence[Shown], unit: str, most: int = MOST_ROWS) -> list[str]:
    """The table of at most `most` rows, with what its marks mean."""
    rows = shown_rows(options, most)
    lead = rows[0].group
    tied = sum(option.group == lead for option in rows) > 1
    cells = []
    for option in rows:
        known = "m" if option.measured else "*" if option.score.assumed else " "
        marks = f"{known}{'=' if tied and option.group == lead else ' '}"
        what = (f" {clipped(option.name, LONGEST_NAME)}", f" {having_words(option, unit)}")
        alpha = f"{option.score.alpha.value:.2f}"
        gain = gain_words(option.gain) + marks
        cells.append((str(option.rank), *what, str(option.gamma), alpha, gain))
    header = "# |  drafter |  needs (tokens) | gamma | alpha | speed-up, 5 to 95 %"
    said = ["= cannot be told apart from the first"] * tied
    said += ["m measured, others predicted"] * any(option.measured for option in rows)
    assumed = any(option.score.assumed for option in rows)
    said += ["* acceptance assumed, ranked at the lower end"] * assumed
    return [*table(cells, header).splitlines(), *([". ".join(said) + "."] if said else [])]


def having_words(option: Shown, unit: str) -> str:
    """What it takes to have the drafter of an option, which may have been trained in this run."""
    return "trained here" if option.has_weights else needs_words(option.score.needs, unit)


def best_alone(remedied: Sequence[Remedied]) -> float:
    """How many times as fast a switch makes the target alone."""
    return max([1.0, *(each.alone for each in remedied if each.switches)])


def fastest(option: Shown, remedied: Sequence[Remedied]) -> Remedied:
    """An option with what remedies it, or, where that is no faster, as it is."""
    as_is = Remedied(option.rank, "", option.gamma, option.gain)
    ways = [as_is, *(each for each in remedied if each.rank == option.rank)]
    return max(ways, key=lambda way: way.rate)


def switched_words(better: Remedied | None) -> str:
    """` With X=1: gamma 2, 0.98x (0.90 to 1.07), the target alone 1.28x as fast.`"""
    if better is None:
        return ""
    alone = f", the target alone {better.alone:.2f}x as fast" if better.alone > 1.0 else ""
    return f" With {better.switches}: gamma {better.gamma}, {gain_words(better.speedup)}{alone}."


def at_hand_switched(
    options: Sequence[Shown], remedied: Sequence[Remedied]
) -> tuple[Shown | None, Remedied | None]:
    """The fastest that one can have today, untrained, and the switches that make it so; without
    any `best_at_hand`."""
    today = best_at_hand(options, trained=False)
    by_rank = {each.rank: each for each in remedied if each.switches}
    mine = (each for each in options if each.at_hand and not each.has_weights)
    there = [(each, by_rank[each.rank]) for each in mine if each.rank in by_rank]
    best = max(there, key=lambda pair: pair[1].rate, default=None)
    least = today.gain.value if today is not None and today.rank not in by_rank else 0.0
    return best if best is not None and best[1].rate > least else (today, None)


def sentences(
    options: Sequence[Shown], where: str, unit: str, remedied: Sequence[Remedied] = ()
) -> list[str]:
    """The verdict, what one can have today, also by a switch, and the best that the budget buys."""
    lead, alone = options[0], best_alone(remedied)
    ways = {option.rank: fastest(option, remedied) for option in options}
    today, (option, better) = best_at_hand(options), at_hand_switched(options, remedied)
    to_train = [option for option in options if not option.at_hand]
    best = today if today is not None and (today is lead or today.measured) else lead
    rates = "" if best.measured else brings(best.score.mix)
    pays = rates or verdict(best.gain, measured=best.measured)
    # ranks are over a target alone that is slower than it need be, or pay with a switch only
    if alone > 1.0 or (better is not None and best.gain.value <= 1.0 < better.rate):
        to_train.sort(key=lambda each: (bool(each.score.assumed), -ways[each.rank].rate))
        named = [ways[best.rank], *(ways[each.rank] for each in to_train[:1])]
        way = max([*named, better or named[0]], key=lambda way: way.rate)
        pays = verdict(way.speedup, least=alone / way.alone)
    lines = [f"Speculation {pays} {where}."]
    if today is not None:
        known = SOURCE_WORDS.get(today.score.alpha.source, "modelled")
        source = "assumed" if today.score.assumed else known
        how = "measured" if today.measured else f"predicted, acceptance {source}"
        own = made_for(today.hub_id)
        name = f"{today.name} (made for {own})" if own else today.name
        lines.append(f"Today: {name}, gamma {today.gamma}: {gain_words(today.gain)} {how}.")
    else:
        lines.append("Today: nothing that can be downloaded is known here.")
    brought = [f"the target alone is {alone:.2f}x as fast"] * (alone > 1.0)
    if option is not None and better is not None:
        brought.insert(0, f"{option.name}, gamma {better.gamma}: {gain_words(better.speedup)}")
    if brought:
        with_it = better or max(remedied, key=lambda each: (each.switches > "", each.alone))
        lines[-1] += f" With {with_it.switches}: {'; '.join(brought)}."
    if not to_train:
        return lines
    bought, way = to_train[0], ways[to_train[0].rank]
    gain = f"{bought.name}, gamma {bought.gamma}: {gain_words(bought.gain)} predicted"
    if way.switches:
        gain += f", with {way.switches} {gain_words(way.speedup)} at gamma {way.gamma}"
    if (needs := bought.score.needs) is None:
        return [*lines, f"Trained: {gain}."]
    spent = hours_words(needs.gpu_hours, unit)
    have = [0.0] if today is None else [today.gain.value]
    have += [] if better is None else [better.rate]
    slower = max(have) >= way.rate
    never = f"Training for {spent} is not predicted to be faster"
    whole = max(needs.gpu_hours, 1e-12)
    often = f", each seen {needs.epochs:.0f} times" if needs.epochs > 1 else ""
    over = f", {needs.teacher_hours / whole:.0%} for the target's passes over it"
    tied = today is not None and bought.group == today.group
    return [
        *lines,
        f"{never if slower else f'With {spent} of training'}: {gain};"
        f" {count_words((needs.tokens or 0.0) / needs.epochs)} tokens of the target's text"
        f"{often} ({needs.text_hours / whole:.0%} of the hours to write it"
        f"{over if needs.teacher_hours else ''}, the rest to train)."
        f"{' The error bars do not tell the two apart.' if tied else ''}",
    ]


def serve_today(run: Run, reading: Reading) -> list[tuple[str, str]]:
    """What to serve today, with the switch that makes it the fastest, as (why, command); [] where
    nothing pays, or no command says it."""
    option, better = at_hand_switched(reading.candidates, reading.remedied)
    at = reading.curves.at if reading.curves is not None else {}
    ranks = run.arguments.get("tensor_parallel") or at.get("tensor_parallel")
    target = hub_name(str(run.arguments.get("target", "")))
    # the name of a folder or a GGUF file is nothing that an engine finds
    if option is None or ranks is None or "/" not in target:
        return []
    pays = (better.rate if better else option.gain.value) > best_alone(reading.remedied)
    command = serve_command(option, run, target, int(ranks), better)
    return [(f"Serve it today, with {option.name}", command)] if pays and command else []


def serve_command(
    option: Shown, run: Run, target: str, ranks: int, remedied: Remedied | None = None
) -> str | None:
    """The command that serves `target` as a run priced it, or as `remedied`, on `ranks` devices,
    with a drafter that one can have today; None where that takes more than a command of vLLM or
    SGLang on a GPU: vLLM's builds for CPUs do not start so."""
    needs, drafter = option.score.needs, option.score.proposer
    target = made_for(option.hub_id) or target
    if needs is None or needs.kind == "training" or run.on_cpu:
        return None
    engine, family = str(run.arguments.get("engine") or "vllm"), drafter.family
    what = (Path(option.hub_id), target, option.gamma, str(run.profile.get("dtype")))
    cut = longest_of(run.path, option.rank)
    setup = Setup(*what, tensor_parallel=ranks, longest=cut, family=family, **run.priced_as)
    setup = replace(setup, mixed=drafter.is_model and drafter.architecture.mixed)
    if remedied is not None and remedied.switches:
        switches = f"{setup.switches} {remedied.switches}"
        setup = replace(setup, switches=switches, gamma=remedied.gamma)
    precision, lacking = setup.precision(engine)
    above = f"# in the place of {target} name its weights in {setup.quantise}\n" if lacking else ""
    if cut is not None:
        above += f"# longest request, by memory or the drafter's positions: {cut:,} tokens\n"
    if engine == "sglang" and option.hub_id and family in ("independent", *HEADS[engine]):
        words = shlex.join(serving(engine, setup).command)
        return above + " \\\n    ".join(_folded(words))
    at = setup.drafts_at
    config = vllm_drafter_config(drafter, option.hub_id, setup.gamma, temperature=at)
    if engine != "vllm" or not config:
        return None
    if drafter.trains and (own := engine_facts(engine).quantises.get(setup.drafts)):
        config["quantization"] = own
    variables, flags = setup.switched("vllm")
    if family == "suffix":  # docs/features/speculative_decoding/suffix.md of vLLM 0.32
        above += f"# {SUFFIX_NEEDS}\n"
    # vLLM takes 16 bits from the weights
    flags = [*setup.sized(*VLLM_SIZES), *(precision if setup.quantise else ()), *flags]
    words = shlex.join([*variables, "vllm", "serve", target, *flags, "--speculative-config"])
    # Line breaks between the fields of the JSON are white space to vLLM and to the shell inside the
    # quotes.
    quoted = shlex.quote("\n     ".join(_folded(json.dumps(config))))
    return above + " \\\n    ".join([*_folded(words), quoted])


def _folded(text: str) -> list[str]:
    text = re.sub(r"(--[\w-]+) (?!-)", "\\1\N{NO-BREAK SPACE}", text)
    lines = textwrap.wrap(text, WIDTH - 8, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]
