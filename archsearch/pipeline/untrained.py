"""Drafters that nobody trains: n-gram lookup and suffix decoding, replayed on the target's text;
the target's own first layers, beside it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from archsearch.acceptance.estimator import Acceptance, GivenAcceptance
from archsearch.acceptance.families import FamilyAcceptance
from archsearch.acceptance.lookup import (
    LookupReplay,
    LookupText,
    NewestNgram,
    Ngram,
    Suffix,
    replay,
    texts_of,
)
from archsearch.architecture.architecture import Architecture
from archsearch.drafters.drafter import Drafter
from archsearch.drafters.lookup import NGram
from archsearch.drafters.lookup import Suffix as SuffixDrafter
from archsearch.drafters.models import EarlyExit
from archsearch.engine_facts import engine_facts
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.estimate import Estimate
from archsearch.pipeline.session import SearchSession
from archsearch.report.terminal.acceptance import Gains, Intervals, Lookup, Replayed, Texts
from archsearch.search.objective import Scorer
from archsearch.text.prompt_files import read_texts

LOOKUPS: Final[Mapping[str, Ngram | Suffix]] = {"ngram": Ngram(), "suffix": Suffix()}


def lookup_in(engine: str, name: str) -> Ngram | Suffix:
    """The lookup of the family `name` (a key of LOOKUPS) as `engine` does it."""
    facts = engine_facts(engine)
    shortest, newest = facts.shortest_ngram, facts.newest_ngram
    if name == "ngram" and newest is not None:
        return NewestNgram(newest, newest)
    return Ngram(shortest) if name == "ngram" and shortest is not None else LOOKUPS[name]


def drafter_of(lookup: Ngram | Suffix, target: Architecture) -> Drafter:
    """What is priced of a lookup."""
    if isinstance(lookup, Suffix):
        return SuffixDrafter(target)
    return NGram(target, lookup.shortest, lookup.longest)


def replayed(
    texts: Sequence[LookupText], lookup: Ngram | Suffix, gammas: Sequence[int]
) -> FamilyAcceptance:
    """What a lookup drafter does on `texts`. ArchsearchError where these are too short."""
    found = replay(lookup, texts, gammas)
    middle = found[sorted(found)[len(found) // 2]]
    taus = {gamma: each.tau for gamma, each in found.items()}
    share, alpha = middle.drafts_share, middle.alpha
    # of the tokens that were judged: the std of counting rounds that draft
    std = math.sqrt(max(alpha * (1.0 - alpha), 0.01) / max(middle.rounds * share.value, 1.0))
    known = Acceptance(Estimate(alpha, std, "measured"), Estimate(0.0, 0.0, "measured"))
    return FamilyAcceptance(known, share, taus=taus)


def texts_at_hand(session: SearchSession) -> list[LookupText]:
    """What the run's target has written for held-out prompts, else the user's own texts (`--text`);
    [] for none, or no tokenizer."""
    folder = session.run.path / "heldout"
    if (folder / "done.json").exists():
        from archsearch.text.cache import TextCache

        return texts_of(TextCache.load(folder).sequences)
    if session.request.text is None:
        return []
    # torch: seconds that a search without texts need not wait
    from archsearch.models.load import load_tokenizer

    try:
        tokenizer = load_tokenizer(session.target)
    except MissingDataError:
        return []
    ids = [
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in read_texts(session.request.text)
    ]
    return [LookupText((), tuple(each)) for each in ids if len(each) > 1]


def with_replays(session: SearchSession) -> tuple[SearchSession, str]:
    """The session that knows what lookup does on the text at hand, and what was replayed in words.
    An alpha that the user gave holds for every family."""
    given = isinstance(session.scorer.acceptance, GivenAcceptance)
    spaces = [space for space in session.families.spaces if space.family in LOOKUPS]
    texts = texts_at_hand(session) if spaces and not given else []
    known: dict[str, FamilyAcceptance] = {}
    for space in spaces if texts else ():
        if space.size(session.scorer.target) == 1:  # of other shapes nothing was replayed
            with suppress(ArchsearchError):  # no text is long enough for a round
                own = lookup_in(session.request.engine, space.family)
                known[space.family] = replayed(texts, own, session.scorer.gammas)
    if not known:
        return session, ""
    tokens = _tokens(texts)
    amount = f"{tokens / 1000:.0f}k tokens" if tokens >= 2000 else f"{tokens} tokens"
    words = f"{' and '.join(known)} replayed on {amount} of your text"
    return replace(session, scorer=session.scorer.with_families(known)), words


GAMMAS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
FORMS: Final = (
    "ngram, ngram:2-5 (shortest and longest n-gram), suffix, early_exit, early_exit:8,16 (after"
    " these layers)"
)


@dataclass(frozen=True)
class Untrained:
    """A drafter as `--draft` names it. `family`: `ngram`, `suffix` or `early_exit`; `numbers`: what
    follows the colon."""

    family: str
    numbers: tuple[int, ...] = ()

    @property
    def lookup(self) -> Ngram | Suffix | None:
        """What is replayed; None for early exit."""
        if self.family == "ngram":
            return Ngram(*self.numbers)
        return Suffix() if self.family == "suffix" else None

    def layers(self, count: int) -> tuple[int, ...]:
        """The exits of a target of `count` layers: as asked, else a quarter, half and three
        quarters of the way."""
        return self.numbers or tuple(
            sorted({max(1, round(share * count)) for share in (0.25, 0.5, 0.75)} - {count})
        )


def untrained(name: str) -> Untrained | None:
    """What `--draft NAME` means where it is no model; None for a model. Raises ArchsearchError for
    numbers that do not fit."""
    family, colon, rest = name.partition(":")
    family = {"n-gram": "ngram", "early-exit": "early_exit"}.get(family, family)
    if family not in ("ngram", "suffix", "early_exit"):
        return None
    numbers = tuple(int(part) for part in re.findall(r"\d+", rest))
    pattern = {"ngram": r"\d+-\d+|\d+", "suffix": "(?!)", "early_exit": r"\d+(,\d+)*"}[family]
    if colon and not re.fullmatch(pattern, rest):
        raise ArchsearchError(f"--draft {name}: write one of {FORMS}")
    found = Untrained(family, numbers * 2 if family == "ngram" and len(numbers) == 1 else numbers)
    _ = found.lookup  # n-grams of impossible lengths are refused here
    return found


def lookup_figures(
    lookup: Ngram | Suffix, texts: Sequence[LookupText], scorer: Scorer | None
) -> Replayed:
    """The figures of a lookup on a target's texts; `scorer`: of its modelled speed-ups."""
    whole = _figures(texts, replay(lookup, texts, GAMMAS), lookup, scorer)
    parts: dict[str, Texts] = {}
    for name in dict.fromkeys(text.category for text in texts if text.category):
        own = [text for text in texts if text.category == name]
        try:
            found = replay(lookup, own, GAMMAS)
        except ArchsearchError:  # no text of the category is long enough
            parts[name] = Texts(len(own), _tokens(own), {})
        else:
            parts[name] = _figures(own, found, lookup, scorer)
    return Replayed(whole, parts)


def _tokens(texts: Sequence[LookupText]) -> int:
    return sum(len(text.answer) for text in texts)


def _figures(
    texts: Sequence[LookupText],
    found: Mapping[int, LookupReplay],
    lookup: Ngram | Suffix,
    scorer: Scorer | None,
) -> Lookup:
    longest = found[max(found)]
    return Lookup(
        len(texts),
        _tokens(texts),
        {gamma: each.tau for gamma, each in found.items()},
        {gamma: each.drafts_share for gamma, each in found.items()},
        {gamma: each.drafted for gamma, each in found.items()},
        {gamma: each.alpha for gamma, each in found.items()},
        longest.accepted_by_position,
        longest.drafted_by_position,
        Intervals(tau={gamma: each.resampled.intervals() for gamma, each in found.items()}),
        Gains({g: _speedup(lookup, each, scorer) for g, each in found.items()}) if scorer else None,
    )


def _speedup(lookup: Ngram | Suffix, found: LookupReplay, scorer: Scorer) -> Estimate:
    """Modelled, of what the rounds of a lookup did."""
    alpha = Estimate(found.alpha, 0.0, "measured")
    known = drafter_of(lookup, scorer.target).with_share(found.drafts_share.value)
    return scorer.measured(known, alpha, {found.gamma: found.tau}).speedup


def exit_shape(target: Architecture, layer: int) -> EarlyExit:
    """The drafter that leaves the target after `layer`."""
    return EarlyExit.of(target, None, {"exit_layer": layer})
