"""What is done with one ranked candidate: train it further, confirm it in the engine, export it."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.hf_config import read_architecture
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.export import DRAFT_FILES, TOKENIZER_FILES, export, padded_head_cost, vllm_config
from archsearch.files import atomic_path, read_json, write_json
from archsearch.finalists import TrainedDraft, Workshop, load_trained
from archsearch.pipeline.latency import machine_slowdown
from archsearch.pipeline.session import TEXT_SHARE, SearchSession, check_weights
from archsearch.progress import ProgressLine
from archsearch.runs import Run, open_run
from archsearch.search.objective import Score
from archsearch.targets import TargetRef, resolve_target


def write_best(session: SearchSession, ranked: Sequence[Score], trained: Mapping[Architecture, TrainedDraft]) -> None:
    """best/<rank>/: score, config, vLLM's speculative_config and, for trained drafts, the whole draft folder."""
    from archsearch.architecture.hf_config import to_hf_config

    run = session.run
    stale = run.ranks()
    for score in ranked:
        assert score.rank is not None
        config = to_hf_config(score.architecture)
        folder = run.write_best(score, config, vllm_config(str(run.best_dir(score.rank)), score.gamma))
        draft = trained.get(score.architecture)
        if draft is not None:
            copy_draft(draft.folder, folder)
            set_gamma(folder, score.gamma)
    for rank in stale:
        if rank > len(ranked):
            shutil.rmtree(run.best_dir(rank))


COPIED_TO_RANK = (*DRAFT_FILES, *TOKENIZER_FILES, "generation_config.json", "trace.npz", "training.json")


def copy_draft(source: Path, destination: Path) -> None:
    """Copy the files of a draft folder, each by rename; weights last, so that a folder with weights is whole."""
    (destination / "model.safetensors").unlink(missing_ok=True)
    for name in sorted(COPIED_TO_RANK, key=lambda name: name == "model.safetensors"):
        if (source / name).is_file():
            with atomic_path(destination / name) as temporary:
                shutil.copyfile(source / name, temporary)


def set_gamma(folder: Path, gamma: int) -> None:
    """Write gamma where transformers reads it: the draft's generation_config.json."""
    from archsearch.models import gamma_settings

    path = folder / "generation_config.json"
    current = read_json(path, "generation config") if path.exists() else {}
    write_json(path, {**current, **gamma_settings(gamma)})


def train_rank(path: Path, rank: int, budget_s: float) -> dict[str, Any]:
    """Distil one candidate for `budget_s` seconds more, measure it and score it again. Continues its checkpoint."""
    session = SearchSession.reopen(path)
    check_weights(session.target)
    score = session.run.score(rank)
    shop = session.workshop()
    try:
        shop.text()
    except MissingDataError:
        shop.write_text(TEXT_SHARE * budget_s)
        budget_s *= 1 - TEXT_SHARE
    training = shop.draft_folder(score.architecture) / "training.json"
    before = float(read_json(training, "training record")["seconds"]) if training.exists() else 0.0
    draft = shop.train(score.architecture, before + budget_s, session.request.seed, f"rank {rank}")
    renewed = session.scorer.measured(draft.architecture, draft.alpha, draft.tau).with_rank(rank)
    session.run.write_best(renewed, None, vllm_config(str(session.run.best_dir(rank)), renewed.gamma))
    copy_draft(draft.folder, session.run.best_dir(rank))
    set_gamma(session.run.best_dir(rank), renewed.gamma)
    write_report(session.run)
    return {
        "run": str(path),
        "rank": rank,
        "before": score.to_dict(),
        "after": renewed.to_dict(),
        "training": read_json(training, "training record"),
        "alpha_by_category": {name: value.to_dict() for name, value in draft.alpha_by_category.items()},
    }


def confirm_rank(
    session: SearchSession,
    rank: int,
    *,
    gammas: Sequence[int] = (),
    prompt_count: int | None = None,
    prompts: Path | None = None,
    shop: Workshop | None = None,
) -> dict[str, Any]:
    """Run target alone and target + draft in the engine, interleaved, on held-out prompts; write confirmed.json.

    The prediction beside it is the score's: latency from the profile, tau from the trace on held-out text; and once more with the
    tau that the engine counted, which leaves only the latency's error.
    """
    import gc

    from archsearch.engines.confirm import confirm, exactness_check
    from archsearch.engines.engine import EnginePrompt, Sampling
    from archsearch.engines.transformers import TransformersEngine
    from archsearch.models import load_draft
    from archsearch.training.data import encode_prompts, read_prompts

    run, scorer = session.run, session.scorer
    check_weights(session.target)
    score = run.score(rank)
    folder = run.best_dir(rank)
    trained = load_trained(score.architecture, folder)
    shop = shop or session.workshop()
    check_tokenizer(shop.tokenizer, folder)
    chosen = read_prompts(prompts) if prompts else shop.prompts.heldout
    count = prompt_count or session.request.confirm_prompts
    encoded = encode_prompts(spread_prompts(chosen, count), shop.tokenizer)
    asked = [EnginePrompt(item.id or str(number), item.token_ids, item.category or None) for number, item in enumerate(encoded)]
    sampling = Sampling(
        max_new_tokens=session.request.answer_tokens, temperature=session.request.temperature, seed=session.request.seed
    )
    draft = load_draft(folder, session.source.dtype)
    wanted = list(gammas) or [score.gamma]
    slowdowns = [machine_slowdown(session.source)]
    with ProgressLine("confirm") as line:
        results = confirm(
            lambda: TransformersEngine(shop.tokenizer, session.source.dtype),
            shop.model(),
            draft,
            wanted,
            asked,
            sampling,
            progress=line,
        )
    slowdowns.append(machine_slowdown(session.source))
    known_slowdowns = [value for value in slowdowns if value is not None]
    exact = None
    if session.request.temperature == 0:
        gc.collect()
        with ProgressLine("identical output in float32") as line:
            exact = exactness_check(
                lambda: TransformersEngine(shop.tokenizer, "float32"),
                shop.model("float32"),
                load_draft(folder, "float32"),
                wanted[0],
                asked[:4],
                progress=line,
            )
    context = round(statistics.fmean(len(item.token_ids) for item in encoded) + session.request.answer_tokens / 2)
    local = scorer.at_context(context)
    rows = []
    for gamma, outcome in results.items():
        if gamma not in trained.tau:
            raise ArchsearchError(
                f"gamma {gamma} was not measured on held-out text (1 to {max(trained.tau)}); use a smaller gamma"
            )
        predicted = local.measured(score.architecture, trained.alpha, trained.tau, gammas=[gamma])
        counted = local.measured(score.architecture, outcome.alpha, {gamma: outcome.tau}, gammas=[gamma])
        row = outcome.to_dict(predicted.speedup.value)
        overhead = local.latency.overhead_s(local.target, local.workload, gamma)
        row |= {
            "predicted": predicted.to_dict(),
            "predicted_at_measured_tau": counted.speedup.value,
            "relative_error_at_measured_tau": counted.speedup.value / outcome.speedup.value - 1.0,
            "predicted_round_s": predicted.draft_s.value + predicted.verify_s.value + overhead.value,
            "overhead_s": overhead.to_dict(),
            "context": context,
            "slowdown": statistics.fmean(known_slowdowns) if known_slowdowns else None,
            "dtype": session.source.dtype,
        }
        rows.append(row)
    best = max(rows, key=lambda row: row["speedup"]["value"])
    identical = {"prompts": exact.prompts, "identical": exact.identical} if exact is not None else None
    best = {
        **best,
        "rank": rank,
        "architecture": score.architecture.label(),
        "identical_output_float32": identical,
        "other_gammas": [row for row in rows if row is not best],
    }
    run.write_confirmed(rank, best)
    write_report(run)
    return best


def check_tokenizer(ours: Any, folder: Path) -> None:
    """Raise ArchsearchError where the draft in `folder` has a tokenizer and it is not the target's: its ids mean other tokens."""
    from archsearch.models import TOKENIZER_FILES, load_tokenizer, tokenizers_differ

    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return
    theirs = load_tokenizer(TargetRef(folder.name, read_architecture(folder), folder=folder))
    differences = tokenizers_differ(ours, theirs, limit=2)
    if differences:
        raise ArchsearchError(
            f"the tokenizer in {folder} differs from the target's ({'; '.join(differences)}); use a draft made for this target"
        )


def spread_prompts(prompts: Sequence[Any], count: int) -> list[Any]:
    """`count` prompts at equal distances, so that every category of a sorted file is represented."""
    if len(prompts) <= count:
        return list(prompts)
    return [prompts[round(i * (len(prompts) - 1) / (count - 1))] for i in range(count)] if count > 1 else list(prompts[:1])


def export_rank(path: Path, rank: int, output: Path) -> dict[str, Any]:
    """Export a trained candidate; says what engines pay that compute the padded head."""
    run = open_run(path)
    score = run.score(rank)
    folder = run.best_dir(rank)
    if not (folder / "model.safetensors").is_file():
        raise MissingDataError(f"rank {rank} of {path} has no weights; train it first: archsearch train {path} --rank {rank}")
    confirmed = run.confirmed(rank)
    gamma = confirmed["gamma"] if confirmed else score.gamma
    note, padded = "The head holds the full vocabulary.", None
    ref = resolve_target(run.arguments["target"])
    if score.architecture.trimmed:
        session = SearchSession.reopen(path)
        full = score.architecture.replace(draft_vocab_size=None)
        trained = load_trained(score.architecture, folder)
        # The padding rows never win, so acceptance is the trimmed head's; only the time changes.
        padded = session.scorer.measured(full, trained.alpha, trained.tau, gammas=[gamma]).speedup.value
        cost = padded_head_cost(score.architecture, session.source.dtype)
        note = (
            f"The head proposes {score.architecture.head_rows:,} of {score.architecture.vocab_size:,} tokens. Engines that need "
            f"a full head load the padded one and read {cost['ratio']:.1f} times the weights per draft token (predicted speed-up "
            f"{padded:.2f} instead of {score.speedup.value:.2f}); archsearch.models.load_draft keeps it trimmed."
        )
    written = export(
        folder,
        output,
        gamma=gamma,
        score=score.to_dict(),
        provenance={"run": run.info, "confirmed": confirmed},
        target=str(ref.folder or ref.hub_id or ref.name),
        confirmed=confirmed,
        padded_speedup=padded,
    )
    return {"output": str(written), "gamma": gamma, "rank": rank, "note": note, "padded_speedup": padded}


def write_report(run: Run) -> Path:
    """report.html of a run."""
    from archsearch.report import write_html

    return write_html(run)
