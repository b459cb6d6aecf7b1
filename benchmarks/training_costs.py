"""Training hours by the cost model of `archsearch.pipeline.training_budget` beside what
publications say.

    python benchmarks/training_costs.py

`fitted`: the constants WRITING_SHARE and TRAINING_SHARE rest on that row; the others were not used.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from archsearch.architecture import catalogue
from archsearch.drafters.heads import DFlash
from archsearch.pipeline.latency import choose_latency
from archsearch.pipeline.training_budget import TRAINING_SHARE, training_budget
from archsearch.workload import WorkloadRequest

MI250, GAUDI2 = 362.1e12, 432e12  # peaks in bfloat16, datasheets


@dataclass(frozen=True)
class Case:
    """A published cost. `written`, `read`: tokens that the target wrote, and passed over once more;
    `trained`: that the drafter saw; `parameters` that a token runs through (`rows` times); hours
    `low` to `high`, None where the publication says only "fewer than"."""

    name: str
    target: str
    gpu: str
    written: float
    read: float
    trained: float
    parameters: float
    rows: float
    low: float | None
    high: float
    source: str
    fitted: bool = False
    peak: float | None = None


BLOCK = DFlash.training_rows
APERTUS = "github swiss-ai/apertus-speculative-decoding, two sheets"
CASES = (
    Case("answers, 9.3e8 tokens", "llama-3.1-8b", "h200", 9.3e8, 0, 0, 0, 1, 25, 33, APERTUS, True),
    Case("answers, 6e7 tokens", "llama-3.1-8b", "h200", 6e7, 0, 0, 0, 1, 1.5, 1.5, APERTUS, True),
    Case(
        "DSpark, 0.90B, 9 epochs of 6e7",
        "llama-3.1-8b",
        "h200",
        6e7,
        6e7,
        5.4e8,
        0.9e9,
        BLOCK,
        15.5,
        15.5,
        APERTUS,
    ),
    Case(
        "DSpark, an epoch of 1.63e9",
        "llama-3.1-8b",
        "h200",
        0,
        1.63e9,
        1.63e9,
        0.9e9,
        BLOCK,
        80,
        80,
        APERTUS,
    ),
    Case(
        "EAGLE-1, 0.99B, 2 to 4e9",
        "llama-2-70b",
        "a100",
        0,
        1e8,
        3e9,
        0.99e9,
        1,
        96,
        192,
        "arXiv 2401.15077; 1e8 distinct assumed",
    ),
    Case(
        "Medusa-1, 0.74B, 60k dialogues",
        "vicuna-7b",
        "a100",
        0,
        1.2e8,
        1.2e8,
        0.74e9,
        1,
        5,
        5,
        "arXiv 2401.10774; 1,000 tokens a dialogue and 2 epochs assumed",
    ),
    Case(
        "FastDraft, 150M, 1e10",
        "llama-3.1-8b",
        "h100",
        0,
        0,
        1e10,
        150e6,
        1,
        None,
        192,
        "arXiv 2411.11055",
        peak=GAUDI2,
    ),
    Case(
        "AMD-135M, 6.7e11",
        "llama-3.1-8b",
        "h100",
        0,
        0,
        6.7e11,
        135e6,
        1,
        2304,
        2304,
        "github AMD-AIG-AIMA/AMD-LLM",
        True,
        MI250,
    ),
    Case(
        "TinyLlama, 1.1B, 3e12",
        "llama-3.1-8b",
        "a100",
        0,
        0,
        3e12,
        1.1e9,
        1,
        34_560,
        34_560,
        "github jzhang38/TinyLlama",
        True,
    ),
)


def predicted(case: Case) -> tuple[float, float, float]:
    """Device-hours of writing, of the teacher's passes and of the training."""
    target = catalogue.load(case.target).architecture
    source, workload = choose_latency(WorkloadRequest(gpu=case.gpu), target)
    budget = training_budget(source.latency, target, source.device, workload, 1.0)
    passes = budget.hours_per_parameter_token
    if case.peak is not None:
        passes = 6.0 / (TRAINING_SHARE * case.peak) / 3600.0
    return (
        case.written * budget.text_hours_per_token,
        case.read * budget.teacher_hours_per_token,
        case.trained * case.parameters * case.rows * passes,
    )


def main() -> None:
    errors = []
    for case in CASES:
        parts = predicted(case)
        whole = sum(parts)
        said = f"{case.low:g} to {case.high:g}" if case.low is not None else f"< {case.high:g}"
        row = (
            f"{case.name:32} {' + '.join(f'{part:.1f}' for part in parts):>22} = {whole:9.1f} "
            f" published {said:>16}"
        )
        if case.low is not None:
            error = whole / math.sqrt(case.low * case.high) - 1.0
            row += f"  {error:+.0%}"
            if not case.fitted:
                errors.append(abs(math.log1p(error)))
        print(row + ("  (fitted)" if case.fitted else ""))
    factor = math.exp(statistics.median(errors))
    print(
        f"not fitted: {len(errors)} rows, off by a factor of {factor:.2f} in the median,"
        f" {math.exp(max(errors)):.2f} at most"
    )


if __name__ == "__main__":
    main()
