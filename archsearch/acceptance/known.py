"""What was measured for this target before: drafts of earlier runs, and alpha files of drafts that exist.

A run folder keeps its finalists (training.json, trace.npz) and what an engine confirmed (best/<rank>/confirmed.json beside
score.json); beside the runs lies what `archsearch acceptance --output runs/x.json` measured of drafts that exist. Each becomes an
AcceptanceObservation in the context it was measured in, for `PriorAcceptance.fit`: one of them moves the intercept almost wholly.
The training tokens go along, so that two minutes of training do not speak for ten hours.

Folders that are broken, unfinished or of another target are passed over: a search must not fail on what another one left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from archsearch.acceptance import run_index
from archsearch.acceptance.estimator import AcceptanceContext, AcceptanceObservation, VocabularyCoverage
from archsearch.architecture.architecture import Architecture
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.files import read_json
from archsearch.models.targets import resolve_target

# What other text under the same domain's name may differ by, logit: a study's domains spread by this much (published_fit.json).
OTHER_TEXT_STD: Final = 0.22


@dataclass(frozen=True, slots=True)
class KnownDraft:
    """An observation and where it lies; `prompts`: the text it was measured on, as the run was asked (None: the shipped one)."""

    observation: AcceptanceObservation
    path: Path
    prompts: str | None


def known_observations(
    target: str | Architecture,
    roots: Iterable[Path] = (Path("runs"),),
    *,
    files: Iterable[Path] = (),
    prompts: str | None = None,
    exclude: Path | None = None,
) -> list[AcceptanceObservation]:
    """What runs and alpha files under `roots`, and `files`, measured of drafts for `target` (its name, or its shape).

    `prompts`: the text of the search that asks; what was measured on other text counts with OTHER_TEXT_STD more doubt.
    `exclude`: a run folder to leave out (the one that is asking). Raises ArchsearchError for a file of `files` that cannot be
    read or is of another target; never for what lies in a run folder.
    """
    roots = tuple(roots)
    found = []
    for known in [*known_drafts(target, roots, exclude=exclude), *alpha_files(target, roots)]:
        observation = known.observation
        found.append(observation if known.prompts == prompts else _doubted(observation))
    return [*found, *(read_alpha_file(path, target) for path in files)]


def alpha_files(target: str | Architecture, roots: Iterable[Path]) -> list[KnownDraft]:
    """The drafts for `target` whose alpha `archsearch acceptance --output` wrote right under `roots`; other files are passed
    over."""
    found = []
    for path in sorted(path for root in roots for path in root.glob("*.json") if not path.name.startswith(".")):
        try:
            data = read_json(path, "measured acceptance")
            if not isinstance(data, dict) or "target" not in data:  # of which target, nobody knows
                continue
            observation = read_alpha_file(path, target)
        except ArchsearchError:
            continue
        prompts = data.get("prompts_file")
        found.append(KnownDraft(observation, path, prompts if isinstance(prompts, str) else None))
    return found


def known_drafts(
    target: str | Architecture, roots: Iterable[Path] = (Path("runs"),), *, exclude: Path | None = None
) -> list[KnownDraft]:
    """Every draft for `target` in the run folders under `roots`; a draft both replayed and confirmed once."""
    found: list[KnownDraft] = []
    left_out = exclude.resolve() if exclude else None
    for root in roots:
        for run, facts in run_index.runs_under(root).items():
            if run.resolve() == left_out:
                continue
            shape = _target_of(facts.arguments, target)
            if shape is not None:
                found.extend(_drafts_of(run, facts, shape))
    return found


def read_alpha_file(path: Path, target: str | Architecture) -> AcceptanceObservation:
    """A draft's measured alpha: JSON with `architecture`, `alpha` {value, std} and, where known, `target`, `domain`,
    `temperature`, `trained_tokens`, as `archsearch acceptance --json` writes it."""
    data = read_json(path, "measured acceptance")
    try:
        arch = Architecture.from_dict(dict(data["architecture"]))
        alpha = Estimate(float(data["alpha"]["value"]), float(data["alpha"]["std"]), "measured")
        other = data.get("target")
        shape = _same_target(str(other), target) if other is not None else _shape(target)
        context = AcceptanceContext(
            shape,
            float(data.get("temperature") or 0.0),
            domain=str(data.get("domain") or "narrow"),
            trained_tokens=None if data.get("trained_tokens") is None else float(data["trained_tokens"]),
            training=str(data.get("training") or "target"),
        )
    except (KeyError, TypeError, ValueError, AttributeError, ArchsearchError) as error:
        raise ArchsearchError(
            f"{path} is no measured acceptance of a draft ({error}); write one with: archsearch acceptance --json"
        ) from error
    if other is not None and shape is None:
        raise ArchsearchError(f"{path} was measured for target {other!r}, not for this one; leave it out")
    return AcceptanceObservation(arch, alpha, context)


def _doubted(observation: AcceptanceObservation) -> AcceptanceObservation:
    alpha = observation.alpha
    extra = OTHER_TEXT_STD * alpha.value * (1.0 - alpha.value)
    return replace(observation, alpha=Estimate(alpha.value, (alpha.std**2 + extra**2) ** 0.5, alpha.source))


# --- targets ---------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _shape(target: str | Architecture) -> Architecture | None:
    """The target's shape; None for a name that is not on this machine (nothing is asked of the network)."""
    if isinstance(target, Architecture):
        return target
    if "/" in target and not Path(target).expanduser().is_dir():
        return None
    try:
        return resolve_target(target).architecture
    except ArchsearchError:
        return None


def _same_target(name: str, target: str | Architecture) -> Architecture | None:
    """The shape behind `name` where it is `target`: by name, folder or shape. None where it is another or cannot be told."""
    wanted, shape = _shape(target), _shape(name)
    if isinstance(target, str) and name == target:
        return wanted
    return shape if shape is not None and shape == wanted else None


def _target_of(arguments: Mapping[str, Any], target: str | Architecture) -> Architecture | None:
    name = arguments.get("target")
    return _same_target(name, target) if isinstance(name, str) else None


# --- drafts of one run -----------------------------------------------------------------------------------------------------


def _drafts_of(run: Path, facts: run_index.RunFacts, target: Architecture) -> list[KnownDraft]:
    asked = facts.arguments.get("prompts")
    prompts = asked if isinstance(asked, str) else None
    found: dict[Architecture, KnownDraft] = {}
    for draft in facts.drafts:
        try:
            observation = AcceptanceObservation(draft.architecture, draft.alpha, _context(facts.arguments, target, draft))
        except (ArchsearchError, TypeError, ValueError):
            continue  # asked with values that another version knew
        found.setdefault(draft.architecture, KnownDraft(observation, run / draft.folder, prompts))
    return list(found.values())


def _context(arguments: Mapping[str, Any], target: Architecture, draft: run_index.DraftFact) -> AcceptanceContext:
    arch, coverage = draft.architecture, None
    if draft.coverage is not None:
        coverage = VocabularyCoverage(((arch.head_rows, draft.coverage), (arch.vocab_size, 1.0)))
    return AcceptanceContext(
        target,
        0.0 if draft.greedy else float(arguments.get("temperature") or 0.0),
        context_len=int(arguments.get("context") or 512),
        domain=str(arguments.get("domain") or "narrow"),
        coverage=coverage,
        trained_tokens=draft.trained_tokens,
    )


def summary(observations: Sequence[AcceptanceObservation]) -> str:
    """One line for people: how many drafts, and their alphas."""
    if not observations:
        return "nothing was measured for this target before"
    values = ", ".join(f"{o.architecture.label()} {o.alpha.value:.2f}" for o in observations[:3])
    more = f" and {len(observations) - 3} more" if len(observations) > 3 else ""
    return f"{len(observations)} drafts measured for this target before: {values}{more}"
