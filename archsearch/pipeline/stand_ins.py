"""Models for an engine where weights are missing: a draft with random ones, a target's shape
alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from archsearch.architecture.architecture import Architecture
from archsearch.engine_facts import engine_facts, engines_that
from archsearch.errors import MissingDataError
from archsearch.files import write_json
from archsearch.models.files import has_weights
from archsearch.models.targets import TargetRef
from archsearch.pipeline.engine_choice import engine_target
from archsearch.pipeline.session import SearchSession, check_weights


class DraftFolders:
    """The folders that an engine loads: the trained draft, or one of its shape with random weights;
    the target's likewise."""

    def __init__(self, session: SearchSession, engine: str) -> None:
        self.session, self.engine = session, engine
        self.inside = engine_facts(engine).in_process
        self.base = session.run.path / "engine"

    def draft(self, arch: Architecture, folder: Path, synthetic: bool) -> Any:
        """The draft as the engine takes it."""
        dtype = self.session.source.dtype
        if not synthetic:
            from archsearch.models.drafts import load_draft

            return load_draft(folder, dtype) if self.inside else folder
        return random_draft(
            arch if self.inside else arch.replace(draft_vocab_size=None),
            dtype,
            self.base,
            load=self.inside,
        )

    def target(self, synthetic: bool) -> tuple[Any, bool]:
        """The target as the engine takes it, and whether its weights (and the draft's) are to be
        made up."""
        ref = self.session.target
        if not synthetic:
            check_weights(ref)
        elif not can_run(self.engine, ref):
            return write_shape(ref.architecture, self.base / "target"), True
        if self.inside:
            return self.session.trainer().model(self.session.source.dtype), False
        return engine_target(ref), False


def random_draft(arch: Architecture, dtype: str, base: Path, *, load: bool = False) -> Any:
    """A draft of `arch` with random weights: the module (`load`), or its folder under `base`, made
    once."""
    from archsearch.models.drafts import build_draft, save_draft

    if load:
        return build_draft(arch, dtype)
    folder = base / arch.label().replace(" ", "_").replace("/", "-")
    if not has_weights(folder):  # weights are written last
        save_draft(build_draft(arch, dtype), folder)
    return folder


def write_shape(arch: Architecture, folder: Path) -> Path:
    """A folder with a config.json only, for engines that make weights up."""
    from archsearch.architecture.hf_config import to_hf_config

    write_json(folder / "config.json", to_hf_config(arch))
    return folder


def can_run(name: str, ref: TargetRef) -> bool:
    """Whether the target's weights are here; False where the engine makes them up. MissingDataError
    where it cannot."""
    try:
        check_weights(ref)
    except MissingDataError as error:
        if engine_facts(name).dummy_weights:
            return False
        raise MissingDataError(
            f"target {ref.name!r} has no weights here and {name} needs them; give a folder that has"
            f" them, or use --engine {' or '.join(engines_that(lambda row: row.dummy_weights))},"
            " which makes them up"
        ) from error
    return True
