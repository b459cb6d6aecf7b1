"""The ranked candidates of a run as folders: best/<rank>/, and the report of them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from archsearch.architecture.architecture import Architecture
from archsearch.drafters.forms import drafter_config, vllm_drafter_config
from archsearch.drafts.records import TrainedDraft
from archsearch.export.engines import Priced
from archsearch.files import atomic_path, read_json, write_json
from archsearch.models.files import DRAFT_FILES, TOKENIZER_FILES, WEIGHTS_FILE, gamma_settings
from archsearch.pipeline.session import SearchSession
from archsearch.report import write_html
from archsearch.runs.run import Run
from archsearch.search.objective import Score


def write_best(
    session: SearchSession, ranked: Sequence[Score], trained: Mapping[Architecture, TrainedDraft]
) -> None:
    """best/<rank>/: score, config, vLLM's speculative_config and, for trained drafts, the whole
    draft folder."""
    run = session.run
    stale = run.ranks()
    for score in ranked:
        assert score.rank is not None
        config = drafter_config(score.proposer, session.scorer.target)
        draft = trained.get(score.architecture)
        model = score.loaded_from(run.best_dir(score.rank), draft is not None)
        folder = run.write_best(score, config, served(session, score, model) or None)
        if score.drafter is None and draft is not None:
            copy_draft(draft.folder, folder, score.gamma)
    for rank in stale:
        if rank > len(ranked):
            run.drop_rank(rank)


def served(session: SearchSession, score: Score, model: str) -> dict[str, object]:
    """How vLLM serves a score's drafter, which lies in `model`, at the run's temperature."""
    how = score.gamma, (), None, Priced(**session.run.priced_as).drafts_at
    return vllm_drafter_config(score.proposer, model, *how)


def copy_draft(source: Path, destination: Path, gamma: int) -> None:
    """Copy the files of a draft folder, each by rename, weights last; gamma goes where transformers
    reads it (generation_config.json)."""
    (destination / WEIGHTS_FILE).unlink(missing_ok=True)
    more = ("generation_config.json", "trace.npz", "training.json")
    names = (*DRAFT_FILES, *TOKENIZER_FILES, *more)
    for name in sorted(names, key=lambda name: name == WEIGHTS_FILE):
        if (source / name).is_file():
            with atomic_path(destination / name) as temporary:
                shutil.copyfile(source / name, temporary)
    path = destination / "generation_config.json"
    current = read_json(path, "generation config") if path.exists() else {}
    write_json(path, {**current, **gamma_settings(gamma)})


def write_report(run: Run, session: SearchSession | None = None) -> Path:
    """report.html of a run, and curves.json, which it draws, where its scores have changed.
    `session`: the run's own, if at hand."""
    from archsearch.pipeline.curves import renew_curves

    renew_curves(run, session)
    return write_html(run)
