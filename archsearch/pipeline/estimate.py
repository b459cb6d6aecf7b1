"""`archsearch estimate`: price drafts that exist."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from archsearch.acceptance.training import training_of
from archsearch.engine_facts import engine_facts
from archsearch.models.targets import resolve_target
from archsearch.pipeline.latency import acceptance_for, choose_latency
from archsearch.search.objective import Scorer
from archsearch.workload import WorkloadRequest


@dataclass(frozen=True)
class EstimateRequest:
    """What `archsearch estimate` was asked. `alpha`: `prior`, or a number; `gamma` None: the best of 1 to
    Scorer's most. `training`: how the drafts were trained, see `acceptance.estimator.TRAININGS`; None: as is known of each."""

    target: str
    drafts: tuple[str, ...]
    asked: WorkloadRequest = WorkloadRequest()
    alpha: str = "prior"
    gamma: int | None = None
    domain: str = "chat"
    training: str | None = None


def estimate_drafts(request: EstimateRequest) -> dict[str, Any]:
    """Price drafts that exist: a Score each, best first, and which of them the error bars cannot tell apart.

    Raises ArchsearchError for a draft of another vocabulary size, or one that does not fit the device beside the target.
    """
    from archsearch.capacity import fits, memory_bytes, usable_bytes

    ref = resolve_target(request.target)
    source, workload = choose_latency(request.asked, ref.architecture)
    acceptance, prior_words = acceptance_for(request.alpha, request.target)
    gammas = [request.gamma] if request.gamma else None
    scorer = Scorer(ref.architecture, workload, source.latency, acceptance, gammas=gammas, domain=request.domain)
    priced = []
    for name in request.drafts:
        draft = resolve_target(name)
        engine_facts(request.asked.engine).check_draft(draft.architecture, workload.tensor_parallel, name)
        training, doubt = (request.training, "") if request.training else training_of(draft, ref)
        notes = [doubt] if doubt and request.alpha == "prior" else []
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
        asked = scorer.with_acceptance(acceptance, replace(scorer.context, training=training))
        priced.append((name, asked(draft.architecture), training, notes))
    priced.sort(key=lambda item: -item[1].speedup.value)
    groups = scorer.indistinguishable([score for _, score, _, _ in priced])
    return {
        "target": ref.name,
        "device": source.device.key,
        "latency": source.words,
        "workload": asdict(workload),
        "alpha": request.alpha,
        "prior": prior_words,
        "drafts": [
            {
                "draft": name,
                "training": training,
                "notes": notes,
                "pays": score.pays,
                "group": next(i for i, group in enumerate(groups, start=1) if score in group),
                **score.to_dict(),
            }
            for name, score, training, notes in priced
        ],
    }
