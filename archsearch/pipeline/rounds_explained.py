"""What an engine's rounds mean for a draft: what sets two engines apart, and what a version without
graphs costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from archsearch.drafters.forms import SAMPLED
from archsearch.drafts.records import scored_by
from archsearch.engine_facts import engine_facts
from archsearch.engine_rounds import EngineRounds
from archsearch.report.phrases import host_words, launches
from archsearch.report.terminal.estimate import Difference
from archsearch.runs.tables import Remedied
from archsearch.search.objective import Score, Scorer
from archsearch.speedup import error_by_term

WORTH_SAYING = 1.03
"""A change of a time below this factor is none."""


def free_layers(scorer: Scorer, score: Score) -> float | None:
    """The latency's `free_layers` of a score; None also where layers cost the host nothing."""
    free = scorer.latency.free_layers(scorer.target, score.proposer, scorer.workload, score.gamma)
    return None if free is None or math.isinf(free) else free


def warnings_of(
    rounds: EngineRounds | None, latency: str, priced: Sequence[tuple[str, Scorer, Score]]
) -> list[str]:
    """What a reader must know of the engine's version: that its figures are another's, that it runs
    drafts, or many rows, without graphs, and what mends it. `latency`: where times come from, in
    words; `priced`: name, scorer and score of drafts; the one that would be fastest with graphs is
    mentioned."""
    if rounds is None:
        return []
    found = [rounds.note] if rounds.note else []
    unsure = any(words in latency for words in ("carried over", "weights in"))
    if unsure or any(score.draft_s.source == "roofline" for _, _, score in priced):
        found.append(f"latency: {latency}")
    if rounds.tree and not any(getattr(score.proposer, "tree", None) for _, _, score in priced):
        found.append(rounds.tree)
    works = (scorer.workload for _, scorer, _ in priced)
    alone = any(each.draft_tensor_parallel == 1 < each.tensor_parallel for each in works)
    if alone and engine_facts(rounds.engine).sharded_draft:
        found.append(f"{rounds.engine} shards a draft as its target, and runs none on one device")
    by = f"{rounds.engine} {rounds.version}"
    kind = "independent drafts" if rounds.drafter == "draft_model" else "such drafters"
    text = f"{by} runs {kind} without CUDA graphs ({rounds.without_graphs})"
    if rounds.without_graphs and rounds.remedy is None:
        own = any(score.proposer.rounds == rounds.drafter for _, _, score in priced)
        return found + [text] * own
    mended = [
        (*each, *with_graphs) for each in priced if (with_graphs := _mended(rounds, *each[1:]))
    ]
    if not mended:
        return found
    name, scorer, score, there, better = max(mended, key=lambda item: item[4].speedup.value)
    if not there.without_graphs:
        most = there.costs.largest_graph
        text = f"{by} has no CUDA graph of more than {most} rows (requests x (gamma + 1))"
    who = f"{name} " if len(priced) > 1 else ""
    gains = f"{better.speedup.value:.2f}x instead of {score.speedup.value:.2f}x"
    gains += f", at gamma {better.gamma}" if better.gamma != score.gamma else ""
    now, then = (scorer.workload.batch_size / each.decode_s.value for each in (score, better))
    if then > WORTH_SAYING * now:
        gains += f", over {then:,.0f} tokens/s without a draft instead of {now:,.0f}"
    return [*found, f"{text}: {there.remedy_words()}, which would bring {who}{gains}"]


def _mended(
    rounds: EngineRounds, scorer: Scorer, score: Score
) -> tuple[EngineRounds, Score] | None:
    """The engine with its `remedy` for a draft and its rows, and the score then; None where nothing
    is gained."""
    if score.proposer.rounds != rounds.drafter:
        rounds = replace(rounds, without_graphs="", remedy=None)
    batch = scorer.workload.batch_size
    graphs = rounds.for_rows(batch * (max(scorer.gammas) + 1)).remedied()
    if graphs is None:
        return None
    better = scored_by(scorer.with_latency(scorer.latency.with_rounds(graphs)), score)
    rounds = rounds.for_rows(batch * (better.gamma + 1))
    gains = score.tpot_s.value / better.tpot_s.value, score.decode_s.value / better.decode_s.value
    return (rounds, better) if rounds.remedy and max(gains) > WORTH_SAYING else None


def remedied(rounds: EngineRounds | None, scorer: Scorer, score: Score) -> Remedied | None:
    """A draft that runs without graphs, with them; None where it has them or gains nothing."""
    if rounds is None or (found := _mended(rounds, scorer, score)) is None:
        return None
    there, better = found
    version, own = there.remedy or ("", {})
    switches = (f"{name}={value}" for name, value in own.items() if version == there.version)
    now, then = (each.tpot_s.value * each.speedup.value for each in (score, better))
    alone = now / then if now > WORTH_SAYING * then else 1.0
    return Remedied(score.rank, " ".join(switches), better.gamma, better.speedup, alone)


def too_long(scorer: Scorer, context: int) -> list[str]:
    """That a context is longer than the target's positions."""
    most = scorer.target.max_position_embeddings
    text = f"{context:,} tokens are more than the target's {most:,} positions"
    return [text] * (context > most)


def drawn_greedily(engine: str | None, version: str | None, families: Iterable[str]) -> list[str]:
    """That drafts are not sampled, as alpha above temperature 0 counts on."""
    facts = engine_facts(engine)
    if SAMPLED.isdisjoint(families) or (facts.samples(version) and not facts.greedy):
        return []
    return [f"{engine} drafts greedily: above temperature 0 it accepts less than predicted here"]


def difference(draft: str, better: Score, worse: Score, worse_there: Score) -> Difference:
    """The term that sets two engines apart. `worse_there`: the worse engine at the better one's
    gamma."""
    parts = error_by_term(better.terms, worse_there.terms)
    terms = ("decode_s", "draft_s", "verify_s", "overhead_s")
    term = max(terms, key=lambda name: float(getattr(parts, name)))
    first, second = (f"{score.engine} {score.engine_version}" for score in (better, worse))
    if better.engine != worse.engine:
        first, second = str(better.engine), str(worse.engine)
    where = f"at gamma {better.gamma} " if better.gamma != worse.gamma else ""
    # of the rounds' times; alpha is the same for both
    stds = (time.relative_std for score in (better, worse) if (time := score.round_s))
    apart = math.log(better.speedup.value / worse.speedup.value) > math.hypot(*stds)
    doubt = "" if apart else " (less than the error bars)"
    gains = f"{first} {better.speedup.value:.2f}x, {second} {worse.speedup.value:.2f}x"
    why = _why(term, (first, better), (second, worse_there))
    return Difference(draft, first, second, term, f"{draft}: {gains}: {where}{why}{doubt}")


def _why(term: str, better: tuple[str, Score], worse: tuple[str, Score]) -> str:
    """With the engine's name at each number. `better`, `worse`: (name, score) of the two
    engines."""
    slow = worse[1]
    host = slow.bound == "host"
    if host and term == "overhead_s":
        return f"in {worse[0]} {host_words(slow)}"
    words = {
        "decode_s": "a plain step, which a draft is compared with, takes",
        # kernel by kernel the passes' time is the host's
        "draft_s": f"launching {launches(slow)} takes" if host else "the draft's passes take",
        "verify_s": "verification takes",
        "overhead_s": "beyond its passes a round takes",
    }
    times = (
        f"{1e3 * getattr(score.terms, term):.1f} ms in {name}" for name, score in (better, worse)
    )
    return f"{words[term]} {', '.join(times)}"
