"""The headline of a run: does speculation pay, with which draft, how sure, what next."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from archsearch.engine_facts import ENGINES, engine_title
from archsearch.estimate import Estimate
from archsearch.models.files import HEAD_FAMILIES
from archsearch.report.phrases import (
    SOURCES,
    break_even_words,
    capital,
    exported_for,
    millions,
    objective_words,
    over_words,
    round_words,
    search_command,
    shell_path,
    speedup_words,
    unprofiled_words,
    verdict,
)
from archsearch.report.reading import Shown, target_shape
from archsearch.runs.confirmed import Confirmed, LoadRecord
from archsearch.runs.run import WORKLOAD_FILE, Run
from archsearch.runs.tables import Remedied, TextVerdict
from archsearch.schedule import ranges_words
from archsearch.search.space import SearchSpace
from archsearch.speedup import MAX_GAMMA

LOADS_SHOWN: Final = 2  # other candidates than the lead, measured under load, at the top
CONCURRENCIES_SHOWN: Final = 4
Steps = list[tuple[str, str]]
"""What to do: (why, command)."""


@dataclass(frozen=True)
class Headline:
    """The headline: `title` is one sentence; `lines` say which draft, how sure and what was
    confirmed; `next`: what to do, as (why, command); `switched`: what is faster than `lead`."""

    title: str
    lines: list[str]
    next: Steps
    lead: Shown | None
    switched: Remedied | None = None


def headline(run: Run, found: Sequence[Shown]) -> Headline:
    """Does speculation pay, with which draft, how much, how sure; and what to do next."""
    where = where_words(run)
    if not found:
        return _unfinished(run, where)
    seen = [(item.measured_speedup.value, item) for item in found if item.measured_speedup]
    seen = [pair for pair in seen if pair[1].undecided is None] or seen
    if seen:
        return _confirmed_headline(run, found, max(seen, key=lambda pair: pair[0])[1], where)
    lead = found[0]
    score, gain = lead.score, lead.score.speedup
    load = _own_load(run, lead)
    stated, how, timed = gain, "predicted", False
    if load is not None:
        stated = load.best(_batch_size(run)).speedup
        how, timed = "measured under load", True
        if load.synthetic:  # what acceptance the draft will reach stays as unsure as it was
            stated = Estimate(stated.value, math.hypot(stated.std, gain.std), gain.source)
            how, timed = "with synthetic acceptance", False
    where += over_words(score.mix)
    at_best = " at best" if load is None and stated.value <= 1.0 else ""
    answer = (
        f"Speculation {verdict(stated, measured=timed)} {where}: {stated.value:.2f}x {how}{at_best}"
    )
    alpha = score.alpha
    low, high = stated.interval
    lines = [
        _draft_words(lead, score.gamma),
        *([] if score.mix is None else [f"{capital(objective_words(score.mix))}."]),
        *_served_lines(run, lead),
        *_serving_lines(run, found, lead),
        f"How sure: {stated.words('x')} (one standard deviation; 5 to 95 %:"
        f" {low:.2f}x to {high:.2f}x)"
        + ("; 1x, no gain, lies inside" if low < 1.0 < high else "")
        + f". Weakest part: {stated.source} ({SOURCES[stated.source]})."
        + ("" if load is None else f" Predicted: {gain.words('x')}."),
        f"Acceptance: alpha {alpha.words()} ({alpha.source}); {break_even_words(score)}.",
        f"Not confirmed{_unconfirmed_words(lead)}.",
    ]
    ties = [str(item.rank) for item in found if item.group == lead.group and item is not lead]
    if ties:
        lines.append(
            f"Cannot be told apart from it: rank {', '.join(ties)}. Choose by size, or train and"
            " confirm more than one."
        )
    lines += edge_lines(run, lead)
    shapes = (item for item in found if item.score.drafter is None and not item.hub_id)
    independent = next((item.rank for item in shapes if item.score.speedup.value > 1.0), None)
    return Headline(answer + ".", lines, _next(run, lead, stated.value > 1.0, independent), lead)


def where_words(run: Run) -> str:
    """`for TARGET on DEVICE`."""
    target = str(run.arguments.get("target", "the target"))
    return f"for {target} on {run.info['device'].get('key', 'this device')}"


def _unconfirmed_words(lead: Shown) -> str:
    if lead.stage == "retrained":
        return ": this draft was trained further after its confirmation. Confirm it again"
    if lead.has_weights and any(not load.synthetic for load in lead.loads):
        return " prompt by prompt: output with and without this draft has not been compared"
    if lead.has_weights:
        return (
            ": the draft has weights, and alpha was measured on held-out text, but no engine has"
            " run it"
        )
    if lead.loads:
        return (
            ": this draft has no weights yet; how often its tokens are accepted is prediction from"
            " its shape"
        )
    if lead.hub_id:
        return f": {lead.hub_id} exists; how much of it is accepted is predicted"
    if lead.at_hand:
        return ": how often its tokens are accepted is predicted"
    return ": no draft has weights yet; all of this is prediction from shapes"


def with_text(head: Headline, text: TextVerdict | None) -> Headline:
    """The headline with what the run's text brought and what more of it would bring."""
    if text is None:
        return head
    faults = [f"Text is at fault: {fault}." for fault in text.faults]
    return replace(head, lines=[*head.lines, f"Text: {text.words()}", *faults])


def edge_lines(run: Run, lead: Shown) -> list[str]:
    """In what the lead is at the end of what was searched."""
    target, most = target_shape(run), int(run.arguments.get("max_gamma") or MAX_GAMMA)
    lines = [f"Gamma {most} is the largest that was priced: a larger one may be better."]
    lines = lines if lead.score.gamma >= most else []
    if target is None or lead.score.drafter is not None:
        return lines
    space = SearchSpace.from_dict(dict(run.info["space"]), "space")
    edges = ", ".join(space.edges(lead.score.architecture, target))
    beyond = f"At the edge of the space: {edges}. A better one may lie beyond (--space FILE)."
    return [beyond, *lines] if edges else lines


def _batch_size(run: Run) -> int:
    return max(1, int(run.arguments.get("batch_size") or 1))


def _own_load(run: Run, lead: Shown) -> LoadRecord | None:
    """What the very engine that the run predicts for did at the run's batch size: synthetic
    acceptance for a lead without weights, its own for a trained one; None without such a
    measurement."""
    batch, engine = _batch_size(run), run.arguments.get("engine") or "transformers"
    for load in lead.loads:
        here = load.engine == engine and batch in load.concurrencies
        if here and load.synthetic != lead.has_weights:
            return None if load.is_stale(lead.score.alpha) else load
    return None


def _serving_lines(run: Run, found: Sequence[Shown], lead: Shown) -> list[str]:
    """What was measured under load, of the lead and of others that ran, and the lead's schedule.
    Never called a confirmation where acceptance was synthetic."""
    others = [item for item in found if item is not lead and item.loads]
    lines = [
        _load_words(run, item, load, "" if item is lead else f"rank {item.rank}, ")
        for item in (lead, *others[:LOADS_SHOWN])
        for load in item.loads
    ]
    if lead.schedule is not None:
        title, ranges = engine_title(lead.schedule.engine), ranges_words(lead.schedule.ranges)
        lines.append(f"Gamma by batch size, predicted for {title}: {ranges}.")
    return lines


def _load_words(run: Run, item: Shown, load: LoadRecord, who: str) -> str:
    where = f"in {engine_title(load.engine)} {load.engine_version}".rstrip()
    alpha = item.score.alpha
    if not load.synthetic:
        start = f"{who}under load {where}, with the draft's own acceptance"
    elif item.has_weights:
        start = f"{who}{where} with synthetic acceptance at predicted rates, not the draft's own"
    else:
        start = f"{who}not trained yet; {where} with synthetic acceptance at the predicted alpha"
        asked = load.asked_acceptance_by_position
        if asked and abs(asked[0] - alpha.value) > max(2 * alpha.std, 0.005):
            start += f" ({asked[0]:.2f}; its score now says {alpha.words()})"
    first = load.headline(_batch_size(run))
    others = [load.best(number) for number in load.concurrencies if number != first.concurrency]
    gains = []
    for row in [first, *others][:CONCURRENCIES_SHOWN]:
        said = f"gamma {row.gamma}" if row.gamma else "off"
        if row.predicted_speedup is not None and row.gamma:
            said += f", predicted {row.predicted_speedup.value:.2f}x"
        several = "s" if row.concurrency > 1 else ""
        flight = f"{row.concurrency}{f' request{several} in flight' if row is first else ''}"
        gains.append(f"{row.speedup.value:.2f}x at {flight} ({said})")
    more = ", best of the gammas that ran" if len({row.gamma for row in load.rows}) > 1 else ""
    stale = " Alpha was measured anew since." if load.is_stale(alpha) else ""
    return f"{capital(start)}: {', '.join(gains)}{more}.{stale}"


def _confirmed_headline(run: Run, found: Sequence[Shown], lead: Shown, where: str) -> Headline:
    assert lead.confirmed is not None
    confirmed = lead.confirmed
    gain, interval = confirmed.speedup, confirmed.interval
    if lead.undecided is not None:
        answer = f"Not decided whether speculation pays {where}: {lead.undecided}"
    else:
        answer = f"{confirmed.answer} {where}: {speedup_words(confirmed)}"
    rates = (
        f"{confirmed.baseline_tokens_per_s:.1f} tokens/s alone, {confirmed.tokens_per_s:.1f} with"
        " the draft"
    )
    ran = "Confirmed" if lead.undecided is None else "Ran"
    nothing = (
        "This confirmation counts for nothing. Confirm again, on many prompts, with nothing else"
        " running."
    )
    lines = [
        _draft_words(lead, confirmed.gamma),
        f"{ran} in {confirmed.engine} {confirmed.engine_version} on {confirmed.prompts_words},"
        f" interleaved: {rates}.",
        _how_sure(confirmed) if lead.undecided is None else nothing,
    ]
    expected, error = confirmed.predicted_speedup, confirmed.relative_error
    if expected is not None and error is not None and lead.undecided is None:
        how = "high" if error > 0 else "low"
        lines.append(f"Predicted: {expected:.2f}x, {abs(error):.0%} too {how}.")
    lines += _served_lines(run, lead)
    lines += [words] if (words := unprofiled_words(confirmed)) else []
    if confirmed.prompts_seen:
        lines.append(f"Not on unseen prompts: {confirmed.prompts_seen}.")
    lines.append(confirmed.identity_words)
    lines += _serving_lines(run, found, lead)
    doubtful = [str(item.rank) for item in found if item is not lead and item.undecided is not None]
    if doubtful:
        lines.append(f"Not decided either way, confirm again: rank {', '.join(doubtful)}.")
    faster = [
        f"rank {item.rank} ({item.score.speedup.words('x')})"
        for item in found
        if item.measured_speedup is None and item.score.speedup.value > gain.value
    ]
    if faster and lead.undecided is None:
        lines.append(f"Predicted above that but not confirmed: {', '.join(faster[:3])}.")
    return Headline(answer + ".", lines, _next(run, lead, interval[0] > 1.0), lead)


def _how_sure(confirmed: Confirmed) -> str:
    median, pooled = confirmed.speedup.value, confirmed.speedup_pooled
    low, high = confirmed.interval
    ways = f"median over prompts {median:.2f}x, all tokens over all seconds {pooled or 0.0:.2f}x; "
    words = (
        f"How sure: {'' if pooled is None else ways}5-95 % of the bootstrap over prompts lie"
        f" between {low:.2f}x and {high:.2f}x."
    )
    if best_of := confirmed.best_of:  # what picking the best of several gammas costs
        words += (
            f" Best of gamma {', '.join(map(str, best_of.gammas))}: being picked flatters it by"
            f" {best_of.optimism:.2f}x, which the lower end bears."
        )
    return words


def _unfinished(run: Run, where: str) -> Headline:
    trials = run.trial_rows("COMPLETE")
    asked = run.arguments.get("trials")
    lines = ["Nothing is ranked yet: best/ is empty, so there is no answer to show."]
    if trials:
        lines.append(f"{len(trials)} scored trials are in trials.csv.")
    elif run.storage_file.is_file():
        of = f" (of {asked} asked for)" if asked else ""
        lines.append(f"journal.log holds the trials that were finished{of}.")
    trained = len(list(run.path.glob("finalists/*/training.json")))
    if trained:
        lines.append(f"{trained} finalists have been trained (finalists/).")
    folder = None if run.arguments.get("gpu") else run.profile.get("folder")
    asked = run.arguments | {"profile": folder}
    command = search_command(asked, run.path / WORKLOAD_FILE)
    if storage := asked.get("storage"):
        command += f" --storage {shlex.quote(str(storage))}"
    command += f" --run {shell_path(run.path)}"
    why = "Continue the search with the arguments it was started with"
    return Headline(f"This search {where} has not finished.", lines, [(why, command)], None)


def _draft_words(lead: Shown, gamma: int) -> str:
    score, exists = lead.score, lead.hub_id
    return (
        f"Draft: rank {lead.rank}, {f'{exists}, ' if exists else ''}{score.label()},"
        f" {millions(score.parameters)} parameters, gamma {gamma}."
    )


def _served_lines(run: Run, lead: Shown) -> list[str]:
    """The engine that the prediction is for, and what decides a round in it; nothing for runs of
    version 0.1.0."""
    ran = lead.confirmed.predicted if lead.confirmed is not None and lead.measured else None
    score, served = ran or lead.score, run.profile.get("served")
    if served and score.drafter is not None and score.engine_version:
        # not how independent drafts run
        served = f"{score.engine} {score.engine_version}"
    parts = [f"Predicted for {served}."] if served else []
    parts += [f"{capital(words)}."] if (words := round_words(score)) else []
    return [" ".join(parts)] if parts else []


def _next_of_existing(run: Run, lead: Shown) -> Steps:
    if lead.score.drafter is not None:
        return _schedule_step(run, lead)
    asked = run.arguments
    prompts = f" --prompts {shell_path(Path(asked['prompts']))}" if asked.get("prompts") else ""
    target = shlex.quote(str(asked.get("target", "")))
    measure = f"archsearch acceptance --target {target} --draft {shlex.quote(lead.hub_id)}{prompts}"
    words = "Measure how much of it the target accepts (needs both weights)"
    return [(words, measure), *_schedule_step(run, lead)]


def _schedule_step(run: Run, lead: Shown) -> Steps:
    facts = ENGINES.get(lead.score.engine or "")
    if facts is None or not facts.batches or lead.score.family in facts.unscheduled:
        return []
    if run.on_cpu and not facts.schedules:  # known at one request
        return []
    command = f"archsearch schedule {shell_path(run.path)} --rank {lead.rank}"
    return [("Its best gamma by batch size", command)]


def _next_of_family(run: Run, lead: Shown, independent: int | None) -> Steps:
    """What can be done with a lead that is no independent draft; `independent`: the best rank that
    is a shape of one and is predicted to pay."""
    steps, train = _schedule_step(run, lead), f"archsearch train {shell_path(run.path)}"
    family, gamma = lead.score.family, lead.score.gamma
    facts, here = ENGINES.get(lead.score.engine or ""), run.on_cpu
    measurable = facts and here and family in facts.confirms and not lead.measured
    if measurable and family not in HEAD_FAMILIES:  # no training
        command = f"archsearch confirm {shell_path(run.path)} --family {family}"
        steps.append(("Measure it beside the target alone", command))
    elif family in HEAD_FAMILIES:
        words = (
            "Train a head of this family (its layer has the target's shape) on text the target"
            " writes"
        )
        steps.append((words, f"{train} --family {family} --gamma {gamma} --budget 30m"))
    elif independent is not None:
        words = (
            "archsearch trains independent drafts, EAGLE-3, P-EAGLE and Medusa heads; the best"
            " independent draft"
        )
        steps.append((words, f"{train} --rank {independent} --budget 30m"))
    return steps


def _next(run: Run, lead: Shown, pays: bool, independent: int | None = None) -> Steps:
    if lead.score.drafter is not None and not lead.hub_id:
        return _next_of_family(run, lead, independent)
    path, rank = shell_path(run.path), f"--rank {lead.rank}"
    train = f"archsearch train {path} {rank} --budget 30m"
    confirm = f"archsearch confirm {path} {rank}"
    export = f"archsearch export {path} {rank} --output draft-rank-{lead.rank}"
    export += "" if lead.confirmed is None else exported_for(lead.confirmed)
    write = "rite a folder that engines load"
    further, by = "rain it further; alpha may rise", lead.trained_by
    held = by.record["prompts"] if by and by.taken_from else ""
    confirm += held and f" --prompts {shlex.quote(held)}"
    if lead.has_weights and lead.measured_speedup is not None:
        ran = lead.confirmed.engine if lead.confirmed is not None else ""
        default = run.arguments.get("engine") or "transformers"
        again = confirm + (f" --engine {shlex.quote(ran)}" if ran not in ("", default) else "")
        if lead.undecided is not None:
            return [("Measure it again, on many prompts, with nothing else running", again)]
        steps = [(f"W{write}", export)] if pays else []
        steps += [] if held else [(f"T{further}", train)]
        return [*steps, ("Then measure it again", again)]
    asked = ENGINES.get(str(run.arguments.get("engine")))
    if asked is not None and not asked.make:  # archsearch does not run it
        confirm += " --engine vllm"
    then_export = (f"Then w{write}", export)
    if lead.has_weights:
        other = [then_export] if pays else [] if held else [(f"Or t{further}", train)]
        return [("Measure it in the engine", confirm), *other]
    if lead.hub_id:
        return _next_of_existing(run, lead)
    able = asked is not None and asked.synthesises and asked.dummy_weights
    proves = able and not lead.loads and pays
    shape = "Prove the shape before training it: its real cycle, at the predicted alpha"
    weights = (
        "Give the draft weights, distilled from the target (needs the target's weights; on"
        f" {run.device or 'the device'})"
    )
    return [
        *([(shape, f"{confirm} --synthetic")] if proves else []),
        (weights, train),
        *([("Then measure it in the engine", confirm), then_export] if pays else []),
    ]
