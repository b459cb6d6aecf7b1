"""`archsearch search`: score, rank, train the finalists, confirm the best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from archsearch.architecture.architecture import Architecture
from archsearch.files import read_json, write_json
from archsearch.finalists import TrainedDraft, Workshop, choose_finalists
from archsearch.pipeline.candidates import confirm_rank, write_best, write_report
from archsearch.pipeline.session import TEXT_SHARE, SearchRequest, SearchSession
from archsearch.progress import ProgressLine
from archsearch.search import study
from archsearch.search.objective import Score


def search(request: SearchRequest) -> dict[str, Any]:
    """Score, rank and, with `confirm`, train the finalists, run the best in the engine and write everything into the run folder.

    With `confirm` the target writes its text first, so that the search knows how much of it a trimmed head covers.
    """
    session = SearchSession.start(request)
    run, scorer = session.run, session.scorer
    shop = None
    if request.confirm:
        shop = session.workshop()
        written = run.path / "text" / "done.json"
        if not written.exists():  # a text that stopped at its budget is finished all the same: drafts must share it
            shop.write_text(TEXT_SHARE * request.time_budget_s)
            write_json(written, {"tokens": shop.text().written_tokens})
        scorer = session.scorer = scorer.with_coverage(shop.coverage())
    with ProgressLine("search") as line:
        result = study.search(
            session.space,
            scorer,
            trials=request.trials,
            seed=request.seed,
            storage=request.storage or run.storage_file,
            study_name="archsearch" if shop is None else "archsearch-coverage",  # scores that know the coverage stand apart
            progress=lambda p: line(f"best {p.best.speedup.value:.2f}x" if p.best else "", float(p.done), float(p.total)),
        )
    run.write_trials(result.trials)
    ranked = result.best
    trained: list[TrainedDraft] = []
    if shop is not None:
        trained = train_finalists(session, shop, ranked)
        measured = sorted(
            (scorer.measured(draft.architecture, draft.alpha, draft.tau) for draft in trained), key=lambda s: -s.speedup.value
        )
        shapes = {score.architecture for score in measured}
        ranked = [*measured, *(score for score in ranked if score.architecture not in shapes)]
    ranked = [score.with_rank(rank) for rank, score in enumerate(ranked[: max(request.top, len(trained))], start=1)]
    write_best(session, ranked, {draft.architecture: draft for draft in trained})
    confirmed = [confirm_rank(session, rank, shop=shop) for rank in range(1, min(request.confirm, len(trained)) + 1)]
    report = write_report(run)
    groups = scorer.indistinguishable(ranked)
    return {
        "run": str(run.path),
        "target": session.target.name,
        "device": session.source.device.key,
        "latency": session.source.words,
        "dtype": session.source.dtype,
        "space": session.space.name,
        "trials": result.finished,
        "invalid": result.invalid,
        "best": [score.to_dict() for score in ranked],
        "indistinguishable": [[s.rank for s in group] for group in groups],
        "confirmed": confirmed,
        "report": str(report),
    }


def train_finalists(session: SearchSession, shop: Workshop, ranked: Sequence[Score]) -> list[TrainedDraft]:
    """Half of the training time goes to all finalists alike, half to the one that stands best after it (successive halving).

    What is finished is used again when the run is continued.
    """
    request = session.request
    state_file = session.run.path / "finalists.json"
    if not state_file.exists():
        write_json(
            state_file, {"shapes": [score.architecture.to_dict() for score in choose_finalists(ranked, request.finalists)]}
        )
    shapes = [Architecture.from_dict(shape) for shape in read_json(state_file, "finalists")["shapes"]]
    training_s = (1 - TEXT_SHARE) * request.time_budget_s
    alone = len(shapes) == 1
    first_s = training_s if alone else 0.5 * training_s / len(shapes)
    drafts = [
        shop.train(shape, first_s, request.seed, f"finalist {number}/{len(shapes)}")
        for number, shape in enumerate(shapes, start=1)
    ]
    if alone:
        return drafts
    best = max(drafts, key=lambda draft: session.scorer.measured(draft.architecture, draft.alpha, draft.tau).speedup.value)
    longer = shop.train(best.architecture, first_s + 0.5 * training_s, request.seed, "the best finalist")
    return [longer if draft is best else draft for draft in drafts]
