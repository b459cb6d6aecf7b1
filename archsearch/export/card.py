"""What is exported: a draft folder, how it is to be served, what its run knows of it, and its
README.md, which says all of that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import archsearch
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import parameters, weight_bytes_per_pass
from archsearch.drafters.registry import family as family_class
from archsearch.drafts.heads import HeadRecord
from archsearch.engine_facts import ENGINES, engine_title
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.export.engines import Priced, Serving
from archsearch.progress import human_time
from archsearch.records import encoded
from archsearch.runs.candidate import TrainingRecord
from archsearch.runs.confirmed import Confirmed, LoadRecord
from archsearch.schedule import GammaSchedule
from archsearch.search.objective import Score
from archsearch.workload import DTYPE_BYTES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class HeadCost:
    """Weight bytes read per draft token: with the kept rows of the head, and with a full one as
    most engines compute it."""

    trimmed_bytes: float
    padded_bytes: float

    @property
    def ratio(self) -> float:
        """About the ratio of the times, where reading weights is what takes time; 1 where the head
        is not trimmed."""
        return self.padded_bytes / self.trimmed_bytes


def padded_head_cost(arch: Architecture, dtype: str) -> HeadCost:
    """What an engine pays that computes the full head of a draft trained with a trimmed one."""
    heads = (arch, arch.replace(draft_vocab_size=None))
    return HeadCost(*(weight_bytes_per_pass(each, DTYPE_BYTES[dtype]) for each in heads))


@dataclass(frozen=True)
class FullHead:
    """Predicted speed-up in engines that compute the full head, and the gamma (with its predicted
    speed-up) that suits them better than the export's; None where none does. `kept_rows`: with the
    trimmed head, at the same gamma."""

    speedup: float
    better_gamma: tuple[int, float] | None = None
    kept_rows: float = 0.0


@dataclass(frozen=True)
class ExportTarget:
    """The target beside which the draft is served. `name`: folder or hub id in the commands;
    `tokenizer`: used where the draft folder has none; `gguf`: the target's own GGUF."""

    name: str | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    gguf: Path | None = None


@dataclass(frozen=True)
class DraftRecord:
    """What is known of a draft, as the files of its run hold it: score.json, confirmed.json,
    training.json, every load-<engine>.json. `provenance`: `run` is what run.yaml holds."""

    score: Score | None = None
    confirmed: Confirmed | None = None
    training: TrainingRecord | HeadRecord | None = None
    loads: tuple[LoadRecord, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ExportSource(Priced):
    """A draft folder, or that of a head, to export with `gamma` draft tokens a round.

    `schedule`: gamma by batch size, for engines that take one. `dtype`: what engines compute in.
    `full_head`: of a trained draft with a trimmed head.
    """

    draft: Path
    gamma: int
    schedule: GammaSchedule = GammaSchedule()
    target: ExportTarget = ExportTarget()
    record: DraftRecord = DraftRecord()
    full_head: FullHead | None = None
    dtype: str = "float32"


_SCORE_ROWS: Final = (  # (field of score.json, words, factor, digits)
    ("alpha", "alpha (chance that the next draft token is accepted)", 1.0, 3),
    ("tau", "tau (tokens a round)", 1.0, 2),
    ("speedup", "speed-up", 1.0, 2),
    ("break_even_alpha", "alpha below which it does not pay", 1.0, 3),
    ("decode_s", "target step, ms", 1e3, 1),
    ("draft_s", "drafting a round, ms", 1e3, 1),
    ("verify_s", "verifying a round, ms", 1e3, 1),
    ("tpot_s", "time per token, ms", 1e3, 1),
)


@dataclass(frozen=True)
class ExportPlan:
    """An export that was checked. `output`: where it will lie; `architecture`: of an independent
    draft; `served`: how each engine with a server is set up; `trained`: it has weights; `head`: of
    a trimmed head."""

    source: ExportSource
    output: Path
    architecture: Architecture | None
    engines: tuple[str, ...]
    served: tuple[Serving, ...] = ()
    trained: bool = True
    head: HeadCost | None = None


def model_card(made: ExportPlan) -> str:
    """The text of README.md. What is not known is left out; every number says whether it was
    predicted or measured."""
    source, record, arch = made.source, made.source.record, made.architecture
    full = source.full_head if made.head is not None else None
    text = filled(
        files("archsearch.export") / "card.md",
        {"number": _number},
        made=made,
        # an engine that takes the draft folder as it is; it computes in nothing below 16 bits
        in_transformers=any(ENGINES[name].draft_folder for name in made.engines),
        stops={name: each for name, each in source.stops.items() if name in made.engines},
        loaded=source.dtype if DTYPE_BYTES[source.dtype] >= 2 else "bfloat16",
        source=source,
        arch=arch,
        full=full,
        title=engine_title,
        version=archsearch.__version__,
        target=source.target.name or "TARGET",
        drafter=family_class(source.family).title,
        parameters=parameters(arch) / 1e6 if arch is not None else 0.0,
        rows=_numbers(record, source.gamma, full.speedup if full is not None else None),
        record=record,
        words=_confirmed_words(record.confirmed) if record.confirmed else "",
        provenance=_provenance(record),
        **_held_out(record.training, source.gamma),
    )
    return text.strip() + "\n"


def filled(template: Traversable, filters: Mapping[str, Any], **values: object) -> str:
    """A template's text; a value that it names and nobody gives is an error."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= filters
    return environment.from_string(template.read_text(encoding="utf-8")).render(values)


def _number(entry: Estimate | float | None, digits: int = 2, factor: float = 1.0) -> str:
    if isinstance(entry, Estimate):
        std = f" ± {factor * entry.std:.{digits}f}" if entry.std else ""
        return f"{factor * entry.value:.{digits}f}{std}"
    return "" if entry is None else f"{factor * entry:.{digits}f}"


def _numbers(record: DraftRecord, gamma: int, padded_speedup: float | None) -> list[Sequence[str]]:
    """(what, predicted, its source, measured): the score's numbers beside the engine's."""
    held = record.confirmed
    rows: list[Sequence[str]] = []
    for name, words, factor, digits in _SCORE_ROWS:
        ours, theirs = (getattr(each, name, None) for each in (record.score, held))
        seen = _number(theirs, digits, factor)
        if isinstance(theirs, Estimate) and theirs.source != "measured":
            seen += f" ({theirs.source})"
        if name == "speedup" and held is not None:
            if interval := held.speedup_interval:
                seen = f"{held.speedup.value:.2f} (5-95 %: {interval[0]:.2f} to {interval[1]:.2f})"
            if held.speedup_pooled is not None:
                seen += f"; all tokens over all seconds {held.speedup_pooled:.2f}"
        if ours is not None or seen:
            source = "" if ours is None else ours.source
            rows.append((words, _number(ours, digits, factor), source, seen))
    if padded_speedup:
        words = f"speed-up at gamma {gamma} in engines that compute the full head (all below)"
        rows.append((words, f"{padded_speedup:.2f}", "modelled", ""))
    return rows


def _confirmed_words(found: Confirmed) -> str:
    engine = f"{found.engine} {found.engine_version}".rstrip()
    ran = (engine, found.dtype, found.prompts_words, f"gamma {found.gamma}")
    parts = [f"In the engine: {', '.join(filter(None, ran))}."]
    if found.padded_when_served:
        parts.append("archsearch ran it with the kept rows of the head only (see The head).")
    alone, together = found.baseline_tokens_per_s, found.tokens_per_s
    parts.append(f"{alone:.1f} tokens/s alone, {together:.1f} with the draft. {found.answer}.")
    if found.predicted_speedup is not None:
        error = found.relative_error
        off = f" ({100 * error:+.1f} % off)" if error is not None else ""
        parts.append(f"Predicted for this run: {found.predicted_speedup:.2f}{off}.")
    return " ".join([*parts, found.identity_words])


def _held_out(training: TrainingRecord | HeadRecord | None, gamma: int) -> dict[str, object]:
    """Of a head `tau`, the `shares` of its tokens that are right and the `first` position's
    acceptance on held-out text at `gamma`."""
    if not isinstance(training, HeadRecord):
        return {}
    held = training.heldout
    if gamma not in held.tau:
        raise ArchsearchError(f"the head was not measured at gamma {gamma}; train it again")
    shares = ", ".join(f"{share:.2f}" for share in held.conditional[:gamma])
    return {"tau": held.tau[gamma], "shares": shares, "first": held.accepted_by_position[gamma][0]}


def _provenance(record: DraftRecord) -> list[str]:
    run, training = record.provenance.get("run") or {}, record.training
    sections = ("arguments", "code", "device", "profile", "packages")
    arguments, code, device, profile, packages = (run.get(name) or {} for name in sections)
    rows = []
    if code:
        commit = f" ({code['commit'][:12]})" if code.get("commit") else ""
        asked = ("trials", "batch_size", "context", "temperature")
        trials, batch, context, temperature = (arguments.get(name, "?") for name in asked)
        rows.append(
            f"Searched by archsearch {code.get('version', '?')}{commit} on"
            f" {str(run.get('created', '?'))[:10]}, seed {run.get('seed')}, {trials} trials at"
            f" batch size {batch}, context {context}, temperature {temperature}."
        )
    if device:
        rows.append(
            f"Device: {device.get('name')} (`{device.get('key')}`). Times:"
            f" {profile.get('origin', 'unknown')}, {profile.get('dtype', '?')},"
            f" {profile.get('mode', '?')}, profile {profile.get('hash', '?')}."
        )
    if training is not None and training.tokens:
        told = encoded(training)
        rows.append(
            f"Trained by distillation on the target's own text: {training.tokens:,} tokens in"
            f" {human_time(training.seconds)}, seed {told.get('seed')}. Prompts:"
            f" {told.get('prompts', 'not recorded')}."
        )
    shown = [
        f"{name} {packages[name]}"
        for name in ("python", "torch", "transformers")
        if name in packages
    ]
    exported = f"xported by archsearch {archsearch.__version__}."
    return [*rows, f"Made with {', '.join(shown)}; e{exported}" if shown else f"E{exported}"]
