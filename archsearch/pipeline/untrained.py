"""`archsearch acceptance` of drafters that nobody trains: n-gram lookup and suffix decoding,
replayed on the target's text; the target's own first layers, beside it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from archsearch.acceptance.lookup import LookupReplay, LookupText, Ngram, Suffix, replay, texts_of
from archsearch.architecture.architecture import Architecture
from archsearch.drafters.drafter import Drafter
from archsearch.drafters.lookup import NGram
from archsearch.drafters.lookup import Suffix as SuffixDrafter
from archsearch.drafters.models import EarlyExit
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.search.objective import Scorer

if TYPE_CHECKING:
    from archsearch.text.cache import TextCache

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
            return Ngram(*self.numbers) if self.numbers else Ngram()
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


def replayed(drafter: Ngram | Suffix, texts: TextCache, end_ids: Sequence[int]) -> dict[str, Any]:
    """The figures of a looked-up drafter on a target's text, as they stand in the JSON file."""
    found = texts_of(texts.sequences, end_ids)
    whole = _figures(replay(drafter, found, GAMMAS))
    names = [name for name in dict.fromkeys(text.category for text in found) if name]
    parts: dict[str, Any] = {}
    for name in names:
        own = [text for text in found if text.category == name]
        try:
            parts[name] = {**_size(own), **_figures(replay(drafter, own, GAMMAS))}
        except ArchsearchError:  # no text of the category is long enough
            parts[name] = {**_size(own), "tau": {}}
    return {**_size(found), **whole, "by_category": parts}


def _size(texts: Sequence[LookupText]) -> dict[str, int]:
    return {"prompts": len(texts), "tokens": sum(len(text.answer) for text in texts)}


def _figures(found: Mapping[int, LookupReplay]) -> dict[str, Any]:
    def of(name: str) -> dict[str, Any]:
        values = ((gamma, getattr(each, name)) for gamma, each in found.items())
        return {
            str(gamma): value.to_dict() if isinstance(value, Estimate) else value
            for gamma, value in values
        }

    longest = found[max(found)]
    return {
        "tau": of("tau"),
        "drafts_share": of("drafts_share"),
        "drafted": of("drafted"),
        "alpha_drafted": of("alpha"),
        "accepted_by_position": list(longest.accepted_by_position),
        "drafted_by_position": list(longest.drafted_by_position),
        "intervals": {"tau": {str(gamma): _intervals(each) for gamma, each in found.items()}},
    }


def _intervals(found: LookupReplay) -> dict[str, tuple[float, float] | None]:
    return {f"{100 * level:.0f}": found.interval(level) for level in (0.90, 0.95)}


def lookup_speedups(
    result: Mapping[str, Any], drafter: Untrained, scorer: Scorer
) -> dict[str, Any]:
    """Modelled speed-up at each gamma with the replayed tau, and the best gamma (0: it does not
    pay)."""
    target = scorer.target
    ngram = drafter.family == "ngram"
    shape: Drafter = NGram(target, *drafter.numbers) if ngram else SuffixDrafter(target)

    def gain(part: Mapping[str, Any], gamma: int, tau: Estimate) -> Estimate:
        alpha = Estimate(part["alpha_drafted"][str(gamma)], 0.0, "measured")
        known = shape.with_share(part["drafts_share"][str(gamma)]["value"])
        return scorer.measured(known, alpha, {gamma: tau}, gammas=[gamma]).speedup

    return with_gains(result, gain)


def with_gains(
    result: Mapping[str, Any], gain: Callable[[Mapping[str, Any], int, Estimate], Estimate]
) -> dict[str, Any]:
    """The modelled speed-up at each gamma of the figures `result` and of each of its categories,
    and the best gamma (0: none pays). `gain`: of figures, at a gamma and its tau."""

    def priced(part: Mapping[str, Any]) -> dict[str, Any]:
        taus = {int(gamma): Estimate.from_dict(tau) for gamma, tau in part["tau"].items()}
        gains = {gamma: gain(part, gamma, tau) for gamma, tau in taus.items()}
        best = max(gains, key=lambda gamma: gains[gamma].value, default=0)
        pays = bool(gains) and gains[best].value > 1.0
        speedups = {str(gamma): each.to_dict() for gamma, each in gains.items()}
        return {"speedup": speedups, "best_gamma": best if pays else 0} if gains else {}

    categories = {name: {**part, **priced(part)} for name, part in result["by_category"].items()}
    return priced(result) | {"by_category": categories}


def exit_shape(target: Architecture, layer: int) -> EarlyExit:
    """The drafter that leaves the target after `layer`."""
    return EarlyExit.of(target, None, {"exit_layer": layer})


def with_exits(
    figures: Mapping[int, dict[str, Any]], target: Architecture, scorer: Scorer | None
) -> dict[str, Any]:
    """The exits' figures beside each other, priced where a scorer is given."""
    exits = {}
    for layer, part in figures.items():
        exits[str(layer)] = dict(part)
        if scorer is not None:
            alpha = Estimate.from_dict(part["alpha"])
            taus = {int(gamma): Estimate.from_dict(tau) for gamma, tau in part["tau"].items()}
            best = scorer.measured(exit_shape(target, layer), alpha, taus)
            exits[str(layer)] |= {
                "best_gamma": best.gamma if best.pays else 0,
                "speedup": best.speedup.to_dict(),
            }
    return {"exits": exits}
