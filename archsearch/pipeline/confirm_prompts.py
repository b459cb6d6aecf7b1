"""`archsearch confirm`: a trained candidate in a real engine, one request at a time, beside its prediction, term by term.

Every prompt runs with and without the draft, back to back.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archsearch.architecture.hf_config import read_architecture
from archsearch.drafts.records import load_trained
from archsearch.drafts.trainer import Workshop
from archsearch.engine_facts import engine_facts
from archsearch.errors import ArchsearchError, MissingDataError, RunFailed
from archsearch.files import write_json
from archsearch.models.files import has_tokenizer, has_weights
from archsearch.models.targets import TargetRef
from archsearch.pipeline.candidates import write_report
from archsearch.pipeline.comparison import explain, predicted_terms
from archsearch.pipeline.engine_choice import (
    PARTIAL_FILE,
    EngineChoice,
    check_choice,
    engine_settings,
    engine_target,
    keep_partial,
    serving_scorer,
    take_turns,
)
from archsearch.pipeline.latency import machine_slowdown
from archsearch.pipeline.session import SearchSession, check_weights
from archsearch.progress import ProgressLine

if TYPE_CHECKING:
    from archsearch.engines.engine import Engine


def confirm_rank(
    session: SearchSession,
    rank: int,
    *,
    gammas: Sequence[int] = (),
    prompt_count: int | None = None,
    prompts: Path | None = None,
    shop: Workshop | None = None,
    choice: EngineChoice | None = None,
) -> dict[str, Any]:
    """Run target alone and target + draft in the engine, interleaved, on held-out prompts; write confirmed.json.

    The prediction beside it is the score's: latency from the profile, tau from the trace on held-out text; and once more with the
    tau that the engine counted, which leaves only the latency's error.
    """
    import gc

    from archsearch.engines.engine import EnginePrompt, Sampling
    from archsearch.engines.measure.by_prompt import confirm, exactness_check
    from archsearch.engines.registry import make_engine
    from archsearch.models.drafts import load_draft
    from archsearch.text.prompts import encode_prompts, read_prompts

    run = session.run
    choice = choice or EngineChoice()
    name = choice.name or session.request.engine
    score = run.score(rank)
    folder = run.best_dir(rank)
    if not has_weights(folder):
        raise MissingDataError(
            f"rank {rank} of {run.path} has no weights; train it (archsearch train {run.path} --rank {rank}), or prove its shape "
            f"without (archsearch confirm {run.path} --rank {rank} --synthetic)"
        )
    check_weights(session.target)
    check_choice(choice, name)
    trained = load_trained(score.architecture, folder)
    shop = shop or session.workshop()
    check_tokenizer(shop.tokenizer, folder)
    scorer, words = serving_scorer(session, name)
    engine_facts(name).check_draft(score.architecture, scorer.workload.tensor_parallel)
    chosen = read_prompts(prompts) if prompts else shop.prompts.heldout
    count = prompt_count or session.request.confirm_prompts
    encoded = encode_prompts(spread_prompts(chosen, count), shop.tokenizer)
    asked = [EnginePrompt(item.id or str(number), item.token_ids, item.category or None) for number, item in enumerate(encoded)]
    sampling = Sampling(
        max_new_tokens=session.request.answer_tokens, temperature=session.request.temperature, seed=session.request.seed
    )
    wanted = list(gammas) or [score.gamma]
    unknown = [gamma for gamma in wanted if gamma not in trained.tau]
    if unknown:
        raise ArchsearchError(
            f"gamma {unknown[0]} was not measured on held-out text (1 to {max(trained.tau)}); use a smaller gamma"
        )
    longest = max(len(prompt.token_ids) for prompt in asked) + sampling.max_new_tokens
    inside = engine_facts(name).in_process

    def factory(dtype: str) -> Callable[[], Engine]:
        settings = engine_settings(session, choice, concurrency=1, max_len=longest, dtype=dtype)
        return lambda: make_engine(name, settings, shop.tokenizer)

    def sources(dtype: str) -> tuple[Any, Any]:
        return (shop.model(dtype), load_draft(folder, dtype)) if inside else (engine_target(session.target), folder)

    slowdowns = [machine_slowdown(session.source)]
    started = time.monotonic()
    try:
        with ProgressLine(f"confirm in {name}") as line:
            results = confirm(
                factory(session.source.dtype),
                *sources(session.source.dtype),
                wanted,
                asked,
                sampling,
                apart=not inside and choice.server_url is None and take_turns(session, score.architecture, len(wanted) + 1, 1),
                progress=line,
            )
    except RunFailed as error:
        raise keep_partial(error, folder / PARTIAL_FILE.format(what="confirmed", engine=name), "prompts") from error
    slowdowns.append(machine_slowdown(session.source))
    known_slowdowns = [value for value in slowdowns if value is not None]
    slowdown = statistics.fmean(known_slowdowns or [1.0])
    exact, unchecked = None, None
    if session.request.temperature == 0 and choice.server_url is None:
        gc.collect()
        few = asked[:4] if inside else asked  # an engine of its own loads as quickly for all
        try:
            with ProgressLine("identical output in float32") as line:
                exact = exactness_check(
                    factory("float32"), *sources("float32"), wanted[0], few, max_new_tokens=32 if inside else 64, progress=line
                )
        except RunFailed as error:  # what was measured stands without it
            unchecked = str(error)
    context = round(statistics.fmean(len(item.token_ids) for item in encoded) + session.request.answer_tokens / 2)
    local = scorer.at_context(context)
    rows = []
    for gamma, outcome in results.items():
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
            "error_by_term": explain(
                predicted_terms(predicted, overhead),
                {
                    "tau": outcome.tau.value,
                    "decode_s": outcome.decode_s,
                    "draft_s": outcome.draft_s,
                    "verify_s": outcome.verify_s,
                    "overhead_s": outcome.rest_s,
                },
                slowdown,
            ),
            "context": context,
            "slowdown": slowdown if known_slowdowns else None,
            "dtype": session.source.dtype,
            "latency": words,
        }
        rows.append(row)
    best = max(rows, key=lambda row: row["speedup"]["value"])
    identical = None
    if exact is not None:
        identical = {"prompts": exact.prompts, "identical": exact.identical, "alpha": exact.alpha}
    best = {
        **best,
        "rank": rank,
        "architecture": score.architecture.label(),
        "identical_output_float32": identical,
        "identical_output_unchecked": unchecked,
        "other_gammas": [row for row in rows if row is not best],
        "seconds": time.monotonic() - started,
    }
    before = run.confirmed(rank)
    if name == session.request.engine or before is None or before.get("engine") == name:
        run.write_confirmed(rank, best)  # the engine that the run predicts for keeps this place
    write_json(folder / f"confirmed-{name}.json", best)
    write_report(run)
    return best


def check_tokenizer(ours: Any, folder: Path) -> None:
    """Raise ArchsearchError where the draft in `folder` has a tokenizer and it is not the target's: its ids mean other tokens."""
    from archsearch.models.load import load_tokenizer, tokenizers_differ

    if not has_tokenizer(folder):
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
