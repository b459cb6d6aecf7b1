"""`archsearch estimate`: price drafts that exist."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from archsearch.models.targets import resolve_target
from archsearch.pipeline.latency import acceptance_for, choose_latency, fitting_ranks
from archsearch.search.objective import Scorer
from archsearch.workload import Workload


def estimate_drafts(
    target: str,
    drafts: Sequence[str],
    *,
    gpu: str | None,
    profile_folder: Path | None,
    alpha: str,
    gamma: int | None,
    batch_size: int,
    context_len: int,
    tensor_parallel: int | None,
    temperature: float,
    dtype: str | None,
    mode: str | None,
    engine: str,
    domain: str,
) -> dict[str, Any]:
    """Price drafts that exist: a Score each, best first, and which of them the error bars cannot tell apart.

    Raises ArchsearchError for a draft of another vocabulary size, or one that does not fit the device beside the target.
    """
    from archsearch.capacity import fits, memory_bytes, usable_bytes

    ref = resolve_target(target)
    source = choose_latency(
        gpu,
        profile_folder,
        ref.architecture,
        dtype=dtype,
        mode=mode,
        engine=engine,
        batch_size=batch_size,
        context_len=context_len,
        tensor_parallel=tensor_parallel,
    )
    ranks = tensor_parallel or fitting_ranks(source.device, ref.architecture, batch_size, context_len, source.dtype)
    workload = Workload(batch_size, context_len, ranks, source.dtype, source.mode, temperature)
    acceptance, prior_words = acceptance_for(alpha, target)
    scorer = Scorer(ref.architecture, workload, source.latency, acceptance, gammas=[gamma] if gamma else None, domain=domain)
    priced = []
    for name in drafts:
        draft = resolve_target(name)
        notes = []
        if draft.architecture.vocab_size != ref.architecture.vocab_size:
            notes.append(
                f"vocabulary {draft.architecture.vocab_size}, target {ref.architecture.vocab_size}: "
                "engines need the same tokenizer"
            )
        if not fits(ref.architecture, draft.architecture, workload, source.device):
            need = memory_bytes(ref.architecture, draft.architecture, workload).total_bytes
            notes.append(
                f"needs {need / 2**30:.1f} GiB on one device, {usable_bytes(source.device) / 2**30:.1f} usable: "
                "raise --tensor-parallel"
            )
        priced.append((name, scorer(draft.architecture), notes))
    priced.sort(key=lambda item: -item[1].speedup.value)
    groups = scorer.indistinguishable([score for _, score, _ in priced])
    return {
        "target": ref.name,
        "device": source.device.key,
        "latency": source.words,
        "workload": asdict(workload),
        "alpha": alpha,
        "prior": prior_words,
        "drafts": [
            {
                "draft": name,
                "notes": notes,
                "pays": score.pays,
                "group": next(i for i, group in enumerate(groups, start=1) if score in group),
                **score.to_dict(),
            }
            for name, score, notes in priced
        ],
    }
