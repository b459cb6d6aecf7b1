"""Which families of drafters a search looks at, each in its own space, and what is not done yet for
one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from archsearch.architecture.architecture import Architecture
from archsearch.drafters.drafter import RoundKind
from archsearch.drafters.models import Independent
from archsearch.drafters.registry import family
from archsearch.drafts.heads import trained_heads
from archsearch.engine_facts import EngineFacts
from archsearch.engine_rounds import EngineRounds
from archsearch.errors import ArchsearchError
from archsearch.models.files import HEAD_FAMILIES
from archsearch.models.targets import TargetRef
from archsearch.report.phrases import shell_path
from archsearch.runs.run import open_run
from archsearch.runs.tables import RankedFamily
from archsearch.search.objective import Score
from archsearch.search.ranking import best_of_each
from archsearch.search.space import SearchSpace

INDEPENDENT: Final = Independent.family
OTHER_TRIALS: Final = 48
"""Recorded shapes of a family other than independent drafts: all of their spaces are scored, fewer
of their dimensions matter."""


@dataclass(frozen=True)
class FamilySpaces:
    """The space of each family of a search, in the order in which they are searched; `left_out`:
    those that have none for this target, and why."""

    spaces: tuple[SearchSpace, ...]
    left_out: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(space.family for space in self.spaces)


def kind_of(kinds: Sequence[RoundKind]) -> RoundKind:
    """The kind of drafter by which an engine's version is judged: a draft model's where one is
    asked for, or nothing is; else the first's."""
    return "draft_model" if not kinds or "draft_model" in kinds else kinds[0]


def choose_families(
    asked: Sequence[str],
    facts: EngineFacts,
    version: str | None,
    target: TargetRef,
    *,
    trains: bool,
) -> tuple[str, ...]:
    """The families that a search ranks: those that were named, else all that the engine runs and
    the target can have, where nothing is trained, and independent drafts where something is (heads
    that were named are trained beside them).

    Raises ArchsearchError for one that the engine does not run, that the target cannot have, or
    that a search does not train.
    """
    if trains:
        others = [name for name in asked if name not in (INDEPENDENT, *HEAD_FAMILIES)]
        if others:
            raise ArchsearchError(
                f"a search trains independent drafts and {', '.join(HEAD_FAMILIES)} heads, not"
                f" {', '.join(others)}: leave out --family, or rank only (--no-confirm)"
            )
        if asked and INDEPENDENT not in asked:
            raise ArchsearchError(
                "a search that trains climbs by independent drafts and trains heads beside them:"
                f" add --family {INDEPENDENT}, or train a head alone (archsearch train RUN"
                " --family)"
            )
    for name in asked:
        if why := facts.lacks(name, version):
            raise ArchsearchError(why)
        if why := family(name).lacking(target.architecture):
            raise ArchsearchError(
                f"{target.name} cannot be served with {name}: {why}; leave out --family {name}"
            )
    if trains:
        return (INDEPENDENT,)
    if asked:
        return tuple(sorted(asked, key=lambda name: name != INDEPENDENT))
    served = facts.serves(version)
    return tuple(name for name in served if not family(name).lacking(target.architecture))


def family_spaces(
    spaces: Iterable[SearchSpace],
    facts: EngineFacts,
    target: Architecture,
    rounds: EngineRounds | None = None,
    *,
    optional: bool,
) -> FamilySpaces:
    """The space of each family within what the engine runs; `rounds`: those of its version.

    `optional`: nobody named the families, so one without a valid shape for this target, or that the
    version does not run, is left out and named. Raises ArchsearchError where none is left.
    """
    found: list[SearchSpace] = []
    left: list[str] = []
    for space in spaces:
        name = space.family
        layers, states = facts.head_limits.get(name, (None, None))
        space = space.within(layers, states, facts.ngram_sizes)
        try:
            space.check(target)
            if rounds is not None:
                rounds.running(family(name).rounds)
        except ArchsearchError as error:
            if not optional:
                raise
            left.append(f"{name} is left out: {error}")
            continue
        found.append(space)
    if not found:
        raise ArchsearchError("; ".join(left))
    return FamilySpaces(tuple(found), tuple(left))


def family_rows(ranked: Sequence[Score]) -> list[RankedFamily]:
    """The best of each family, with what it takes to have it."""
    found = []
    for score in best_of_each(ranked):
        needs = score.needs
        trains = score.proposer.trains if needs is None else needs.kind == "training"
        found.append(RankedFamily.of(score, needs=needs, trains=trains))
    return found


def check_independent(score: Score, what: str, run: Path, more: str = "") -> None:
    """Raise ArchsearchError where a rank is of a family for which `what` ("training", "confirming"
    or "exporting") is not done by rank, with the command that can be run next where there is one:
    that of `what`, which takes `more`, or the training of a head without weights."""
    if score.needs is not None and score.is_found:
        raise ArchsearchError(
            f"rank {score.rank} exists, {score.needs.hub_id}: download it and name it where a draft"
            f" is asked for (archsearch estimate --draft {score.needs.hub_id}); {what} is for"
            " drafts of this run"
        )
    if score.family == INDEPENDENT:
        return
    name = f"rank {score.rank} is of the family {score.family} ({score.proposer.label()})"
    if score.family in HEAD_FAMILIES or (score.family == "ngram" and what == "confirming"):
        command = {"training": "train", "confirming": "confirm", "exporting": "export"}[what]
        lacks = score.family != "ngram" and score.family not in trained_heads(run)
        if lacks or what == "training":
            command, more = "train", f" --gamma {score.gamma}"
        raise ArchsearchError(
            f"{name}: such drafters are named by their family, not by rank"
            f"{', and this one has no weights yet' * lacks}: archsearch {command}"
            f" {shell_path(run)} --family {score.family}{more}"
        )
    own = [each for each in open_run(run).scores() if each.family == INDEPENDENT]
    other = f"; rank {own[0].rank} is one: --rank {own[0].rank}" if own else ""
    raise ArchsearchError(
        f"{name}: {what} is done for independent drafts, EAGLE-3, P-EAGLE and Medusa heads"
        f" only{other}"
    )
