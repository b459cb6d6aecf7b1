"""Lookup drafters (n-gram, suffix decoding) replayed on a run's own text, untrained."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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
from archsearch.engine_facts import engine_facts
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.estimate import Estimate
from archsearch.pipeline.session import SearchSession

LOOKUPS: Final[Mapping[str, Ngram | Suffix]] = {"ngram": Ngram(), "suffix": Suffix()}


def lookup_in(engine: str, name: str) -> Ngram | Suffix:
    """The lookup of the family `name` (a key of LOOKUPS) as `engine` does it."""
    facts = engine_facts(engine)
    shortest, newest = facts.shortest_ngram, facts.newest_ngram
    if name == "ngram" and newest is not None:
        return NewestNgram(newest, newest)
    return Ngram(shortest) if name == "ngram" and shortest is not None else LOOKUPS[name]


def replayed(
    texts: Sequence[LookupText], lookup: Ngram | Suffix, gammas: Sequence[int]
) -> FamilyAcceptance:
    """What a lookup drafter does on `texts`. ArchsearchError where these are too short."""
    found = replay(lookup, texts, gammas)
    middle = found[sorted(found)[len(found) // 2]]
    taus = {gamma: each.tau for gamma, each in found.items()}
    return FamilyAcceptance(
        Acceptance(_alpha(middle), Estimate(0.0, 0.0, "measured")), middle.drafts_share, taus=taus
    )


def _alpha(found: LookupReplay) -> Estimate:
    """Of the tokens that were judged; the std is that of counting rounds that draft."""
    counted = max(found.rounds * found.drafts_share.value, 1.0)
    return Estimate(
        found.alpha, math.sqrt(max(found.alpha * (1.0 - found.alpha), 0.01) / counted), "measured"
    )


def replayed_families(
    session: SearchSession, texts: Sequence[LookupText]
) -> dict[str, FamilyAcceptance]:
    """The lookup families that the search looks at, in the one shape that was replayed; those with
    other shapes are left out."""
    found = {}
    for space in session.families.spaces:
        if space.family in LOOKUPS and space.size(session.scorer.target) == 1:
            try:
                found[space.family] = replayed(
                    texts, lookup_in(session.request.engine, space.family), session.scorer.gammas
                )
            except ArchsearchError:  # no text is long enough for a round
                continue
    return found


def texts_at_hand(session: SearchSession) -> list[LookupText]:
    """What the run's target has written for held-out prompts, else the user's own texts (`--text`);
    [] where there is none, or no tokenizer to read them."""
    folder = session.run.path / "heldout"
    if (folder / "done.json").exists():
        from archsearch.text.cache import TextCache

        return texts_of(TextCache.load(folder).sequences)
    if session.request.text is None:
        return []
    from archsearch.models.load import (
        load_tokenizer,
    )  # torch: seconds that a search without texts need not wait
    from archsearch.text.prompt_files import read_texts

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
    """The session that knows what lookup does on the text at hand, and what was replayed in words,
    "" for nothing. An alpha that the user gave holds for every family."""
    given = isinstance(session.scorer.acceptance, GivenAcceptance)
    if given or not any(space.family in LOOKUPS for space in session.families.spaces):
        return session, ""
    texts = texts_at_hand(session)
    known = replayed_families(session, texts) if texts else {}
    if not known:
        return session, ""
    words = f"{' and '.join(known)} replayed on {_size(texts)} of your text"
    return session.with_scorer(session.scorer.with_families(known)), words


def _size(texts: Iterable[LookupText]) -> str:
    tokens = sum(len(text.answer) for text in texts)
    return f"{tokens / 1000:.0f}k tokens" if tokens >= 2000 else f"{tokens} tokens"
