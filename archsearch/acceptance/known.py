"""What was measured for this target before: drafts of earlier runs, and alpha files of drafts that
exist.

A run folder keeps its finalists (training.json, trace.npz) and what an engine confirmed
(best/<rank>/confirmed.json beside score.json); beside the runs lies what `archsearch acceptance
--output runs/x.json` measured of drafts that exist. Each becomes an AcceptanceObservation in the
context it was measured in, for `PriorAcceptance.fit`: one of them on the asked text moves the
intercept almost wholly. Its training tokens go along, so that two minutes of training do not speak
for ten hours, and how alike its text is to the one asked about, which decides alpha more than any
shape.

Folders that are broken, unfinished or of another target are passed over: a search must not fail on
what another one left. `earlier` says on which texts they were, and how far they moved alpha.
"""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from archsearch.acceptance.estimator import (
    AcceptanceContext,
    AcceptanceObservation,
    VocabularyCoverage,
)
from archsearch.acceptance.measured import Trace, alpha
from archsearch.acceptance.prior import PriorAcceptance
from archsearch.acceptance.terms import REFERENCE_LAYERS
from archsearch.architecture.architecture import Architecture
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.files import read_json, read_yaml
from archsearch.models.targets import shape_here
from archsearch.records import Misfit, Stored, load_or_note
from archsearch.text.likeness import TextSketch, likeness, load_sketch, sketch_of_set
from archsearch.text.prompt_set import load_prompt_set

# Prompts this much alike are of one domain, whatever two people called it.
SAME_DOMAIN: Final = 0.5

# How the text of an earlier run is known to compare: the same prompts, others (likeness from their
# words), or nothing is kept of them, so that its domain's name is all there is.
Match = Literal["same", "other", "unknown"]


@dataclass(frozen=True, slots=True)
class AskedText:
    """The text that a search asks about: the sketch of its prompts, None where it has none, and its
    domain."""

    sketch: TextSketch | None = None
    domain: str = ""


@dataclass(frozen=True, slots=True)
class KnownDraft:
    """An observation (which says how alike its text is), its run, and how that text is known."""

    observation: AcceptanceObservation
    run: Path
    match: Match


def known_drafts(
    target: str | Architecture,
    roots: Sequence[Path] = (Path("runs"),),
    *,
    asked: AskedText = AskedText(),
    exclude: Path | None = None,
) -> list[KnownDraft]:
    """Every draft for `target` (its name, or its shape) that was measured: in the run folders under
    `roots` but `exclude` (the one that is asking), a draft both replayed and confirmed once; and
    by `archsearch acceptance --output`, right under `roots`, where other files are passed over."""
    found: list[KnownDraft] = []
    runs = [file.parent for root in roots for file in sorted(root.glob("*/run.yaml"))]
    for run in runs:
        if exclude is not None and run.resolve() == exclude.resolve():
            continue
        arguments, drafts = read_run(run)
        name = arguments.get("target")
        shape = _same_target(name, target) if isinstance(name, str) else None
        if shape is not None and drafts:
            found.extend(_drafts_of(run, arguments, drafts, shape, asked))
    for path in sorted(path for root in roots for path in root.glob("[!.]*.json")):
        file = load_or_note(path, "measured acceptance", _AlphaFile, [])
        shape = None if file is None else _same_target(file.target, target)
        if file is None or shape is None:
            continue
        sketch = _sketch_then(path, {"prompts": file.prompts_file})
        found.append(_on_text(file.observation(shape), path, sketch, asked))
    return found


@dataclass(frozen=True, slots=True)
class _Alpha:
    value: float
    std: float


@dataclass(frozen=True, slots=True)
class _AlphaFile:
    """What `archsearch acceptance --output` says of a draft."""

    target: str
    architecture: Architecture
    alpha: _Alpha
    temperature: float = 0.0
    domain: str = "narrow"
    training: str = "target"
    trained_tokens: float | None = None
    prompts_file: str | None = None

    def observation(self, target: Architecture) -> AcceptanceObservation:
        how = {name: getattr(self, name) for name in ("domain", "training", "trained_tokens")}
        context = AcceptanceContext(target, self.temperature, **how)
        alpha = Estimate(self.alpha.value, self.alpha.std, "measured")
        return AcceptanceObservation(self.architecture, alpha, context)


# --- targets


@lru_cache(maxsize=256)
def _shape(target: str | Architecture) -> Architecture | None:
    return target if isinstance(target, Architecture) else shape_here(target)


def _same_target(name: str, target: str | Architecture) -> Architecture | None:
    """The shape behind `name` where it is `target`: by name, folder or shape. None where it is
    another or unknown."""
    wanted, shape = _shape(target), _shape(name)
    if isinstance(target, str) and name == target:
        return wanted
    return shape if shape is not None and shape == wanted else None


# --- drafts of one run


def _drafts_of(
    run: Path,
    arguments: Mapping[str, object],
    drafts: Sequence[DraftFact],
    target: Architecture,
    asked: AskedText,
) -> list[KnownDraft]:
    sketch = load_sketch(run) or _sketch_then(run / "run.yaml", arguments)
    found: dict[Architecture, KnownDraft] = {}
    for draft in drafts:
        try:
            context = _context(arguments, target, draft)
            seen = AcceptanceObservation(draft.architecture, draft.alpha, context)
            known = _on_text(seen, run, sketch, asked)
        except (TypeError, ValueError):
            continue  # asked with values that another version knew
        found.setdefault(draft.architecture, known)
    return list(found.values())


def _on_text(
    observation: AcceptanceObservation, run: Path, sketch: TextSketch | None, asked: AskedText
) -> KnownDraft:
    text, alike, context = str(run), 0.0, observation.context
    match: Match = "unknown"
    if sketch is not None:
        text = sketch.digest
        if asked.sketch is not None:
            alike = likeness(sketch, asked.sketch)
            match = "same" if text == asked.sketch.digest else "other"
    if alike >= SAME_DOMAIN and asked.domain:
        context = replace(context, domain=asked.domain)
    known = replace(observation, likeness=alike, text=text, context=context)
    return KnownDraft(known, run, match)


def _sketch_then(written: Path, arguments: Mapping[str, object]) -> TextSketch | None:
    """The sketch of a run that kept none, from its prompt files where they still are as they were
    when `written` was."""
    files = [
        Path(value) if isinstance(value := arguments.get(name), str) else None
        for name in ("prompts", "heldout")
    ]
    try:
        began = written.stat().st_mtime
        changed = [path.stat().st_mtime for path in files if path is not None]
        if any(time > began for time in changed):
            return None
        return _sketch_of_files(files[0], files[1], max(changed, default=0.0))
    except (OSError, ArchsearchError):
        return None


@lru_cache(maxsize=64)
def _sketch_of_files(prompts: Path | None, heldout: Path | None, _changed: float) -> TextSketch:
    return sketch_of_set(load_prompt_set(prompts, heldout))


def _context(
    arguments: Mapping[str, Any], target: Architecture, draft: DraftFact
) -> AcceptanceContext:
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


TEXTS_SHOWN: Final = 3
RUNS_SHOWN: Final = 2


@dataclass(frozen=True, slots=True)
class EarlierText:
    """One text of earlier runs: the runs, how many drafts were measured on it, how alike it is to
    the asked one (0 to 1; `match` says how that is known), and alpha of the reference draft with
    these measurements alone."""

    runs: tuple[str, ...]
    drafts: int
    match: Match
    likeness: float
    alpha: Estimate

    def words(self) -> str:
        more = f" and {len(self.runs) - RUNS_SHOWN} more" if len(self.runs) > RUNS_SHOWN else ""
        runs = f"run{'s' if len(self.runs) > 1 else ''} {', '.join(self.runs[:RUNS_SHOWN])}{more}"
        text = {
            "same": "the same prompts",
            "other": f"other text (likeness {self.likeness:.2f})",
            "unknown": "text that could not be compared",
        }[self.match]
        return f"{self.drafts} draft{'s' if self.drafts > 1 else ''} of {runs} on {text}"


@dataclass(frozen=True, slots=True)
class Earlier:
    """What all earlier runs did to alpha of a reference draft, a shape of `layers` layers: `before`
    any of them, `after` all."""

    layers: int
    before: Annotated[Estimate, Stored("alpha_before")]
    after: Annotated[Estimate, Stored("alpha_after")]
    texts: tuple[EarlierText, ...]

    def words(self) -> str:
        """One line for people."""
        shown = [
            f"{text.words()} {_moved(self.before, text.alpha, self.layers if not number else None)}"
            for number, text in enumerate(self.texts[:TEXTS_SHOWN])
        ]
        more = len(self.texts) - TEXTS_SHOWN
        rest = f"; {more} more text{'s' if more > 1 else ''}" if more > 0 else ""
        together = f"; together to {self.after.value:.2f}" if len(self.texts) > 1 else ""
        return f"earlier runs: {'; '.join(shown)}{rest}{together}"


def earlier(
    target: Architecture, known: Sequence[KnownDraft], asked: AskedText, temperature: float
) -> Earlier | None:
    """What `known` did to alpha of a draft of the target's width with two layers, on the asked
    text; None where nothing is known.

    The texts that are most alike come first.
    """
    if not known:
        return None
    shape = target.replace(num_hidden_layers=min(REFERENCE_LAYERS, target.num_hidden_layers))
    context = AcceptanceContext(target, temperature, domain=asked.domain or "chat")
    by_text: dict[str, list[KnownDraft]] = {}
    for draft in known:
        by_text.setdefault(draft.observation.text, []).append(draft)

    def alpha(drafts: Sequence[KnownDraft]) -> Estimate:
        prior = PriorAcceptance().about(target).fit([draft.observation for draft in drafts])
        return prior.predict(shape, context).alpha

    texts = []
    for drafts in by_text.values():
        names, first = tuple(dict.fromkeys(draft.run.name for draft in drafts)), drafts[0]
        alike = first.observation.likeness
        texts.append(EarlierText(names, len(drafts), first.match, alike, alpha(drafts)))
    texts.sort(key=lambda text: (-text.likeness, text.match == "unknown", text.runs))
    return Earlier(shape.num_hidden_layers, alpha([]), alpha(known), tuple(texts))


def _moved(before: Estimate, after: Estimate, layers: int | None) -> str:
    what = f"alpha of a {layers}-layer draft " if layers is not None else ""
    if abs(after.value - before.value) < 0.005:
        return f"left {what or 'it '}at {before.value:.2f}"
    return f"moved {what or 'it '}from {before.value:.2f} to {after.value:.2f}"


# --- what a run folder says


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DraftFact:
    """What one folder of a run says of a draft. `greedy`: measured by a greedy trace, not at the
    run's temperature; `coverage`: share of the text that its head's rows cover, where known."""

    architecture: Architecture
    alpha: Estimate
    greedy: bool
    trained_tokens: float | None
    coverage: float | None


def read_run(run: Path) -> tuple[Mapping[str, object], list[DraftFact]]:
    """What a run was asked, and its drafts. What is broken or of another version is left out and
    named in the log."""
    drafts, broken, info = [], [], None
    try:
        info = read_yaml(run / "run.yaml", "the run's file")
    except ArchsearchError as error:
        broken = [f"run.yaml ({error})"]
    arguments = info.get("arguments") if isinstance(info, dict) else None
    for read, pattern in (
        (_finalist, "finalists/*/training.json"),
        (_confirmed, "best/[0-9]*/confirmed.json"),
    ):
        for path in sorted(run.glob(pattern)):
            try:
                drafts.append(read(path.parent))
            except (KeyError, TypeError, ValueError, AttributeError, OSError) as e:
                name = path.parent.relative_to(run).as_posix()
                broken.append(f"{name} ({Misfit.at('', e)})")
    for words in broken:
        log.warning("an earlier run cannot be read and is left out: %s/%s", run, words)
    return arguments if isinstance(arguments, dict) else {}, drafts


def _fact(
    arch: Architecture, alpha: Estimate, training: Mapping[str, Any], *, greedy: bool
) -> DraftFact:
    share, tokens = (training.get(name) for name in ("vocabulary_coverage", "tokens"))
    coverage = min(float(share), 1.0) if arch.trimmed and share is not None else None
    return DraftFact(arch, alpha, greedy, float(tokens) if tokens else None, coverage)


def _finalist(folder: Path) -> DraftFact:
    """alpha of a trained finalist: greedy agreement on the held-out text."""
    training = read_json(folder / "training.json", "training record")
    arch = Architecture.from_dict(training["architecture"])
    trace = folder / "trace.npz"
    if not zipfile.is_zipfile(trace):  # numpy leaks the open file of half an archive
        raise ArchsearchError(f"{trace} is missing or broken; measure the draft again")
    return _fact(arch, alpha(Trace.load(trace)), training, greedy=True)


def _confirmed(folder: Path) -> DraftFact:
    """alpha that the engine counted, at the run's temperature."""
    confirmed = read_json(folder / "confirmed.json", "confirmation")
    arch = Architecture.from_dict(read_json(folder / "score.json", "score")["architecture"])
    record = folder / "training.json"
    training = read_json(record, "training record") if record.is_file() else {}
    value, std = (float(confirmed["alpha"][name]) for name in ("value", "std"))
    return _fact(arch, Estimate(value, std, "measured"), training, greedy=False)
