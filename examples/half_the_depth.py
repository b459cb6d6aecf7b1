"""Same parameters, half the depth: what a draft's depth costs in three ways of running it.

    python examples/half_the_depth.py [--picture docs/pictures/half-the-depth.svg]

"Decoding Speculative Decoding" (arXiv 2402.01528) found that a draft's latency decides the
speed-up, and depth the latency. Here two drafts of 1.3 billion parameters for LLaMA-65B on four
A100: Sheared-LLaMA with 24 layers, and 12 wider ones. Both are given the same alpha, so that
nothing but time differs. Launched kernel by kernel the host pays for every layer, and half of them
bring a third more; inside CUDA graphs depth costs less, and they bring a tenth. Runs in about a
minute, without a GPU; everything is predicted from measured kernels and published host times.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from archsearch.pipeline.estimate import EstimateRequest, estimate_drafts
from archsearch.report.chart_files import drawn, write_picture
from archsearch.report.charts import SERIES, Chart, Series
from archsearch.search.objective import Score
from archsearch.workload import WorkloadRequest

TARGET, DEVICE, RANKS, ALPHA, GAMMA = "llama-65b", "a100", 4, "0.8", 4
DRAFTS = {"sheared-llama-1.3b": "24 layers of 2048", "wide-1.3b": "12 layers of 2560"}
WAYS = {
    "transformers, eager": {"engine": "transformers", "mode": "eager"},
    "vLLM, no graphs for drafts": {"engine": "vllm"},
    "vLLM, graphs for drafts": {
        "engine": "vllm",
        "engine_options": ("VLLM_USE_V2_MODEL_RUNNER=0",),
    },
    "SGLang, one graph": {"engine": "sglang"},
}


def rows() -> dict[str, dict[str, Score]]:
    """Scores by way and draft."""
    found: dict[str, dict[str, Score]] = {}
    for way, how in WAYS.items():
        asked = WorkloadRequest(gpu=DEVICE, tensor_parallel=RANKS, **how)  # type: ignore[arg-type]
        answer = estimate_drafts(
            EstimateRequest(TARGET, tuple(DRAFTS), asked, alpha=ALPHA, gamma=GAMMA)
        )
        found[way] = {entry.draft: entry.score for entry in answer.drafts}
    return found


def chart(found: dict[str, dict[str, Score]]) -> Chart:
    """Speed-up of both drafts in each way, side by side."""
    series = tuple(
        Series(
            shape,
            tuple(way.replace(", ", ",\n") for way in found),
            tuple(scores[draft].speedup.value for scores in found.values()),
            "bar",
            SERIES[number],
        )
        for number, (draft, shape) in enumerate(DRAFTS.items())
    )
    title = (
        f"Same parameters, half the depth: {TARGET} on {RANKS} {DEVICE.upper()}, alpha {ALPHA},"
        f" gamma {GAMMA}"
    )
    return Chart(
        "half-the-depth",
        title,
        "",
        "",
        "speed-up, x (predicted)",
        series,
        level=1.0,
        y_from_zero=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--picture", type=Path, help="where to draw it (.svg or .png)")
    arguments = parser.parse_args()
    found = rows()
    print(
        f"{'':<28}"
        + "".join(f"{shape:>32}" for shape in DRAFTS.values())
        + "   half the depth brings"
    )
    for way, scores in found.items():
        cells = [scores[draft] for draft in DRAFTS]
        told = [
            f"{s.speedup.value:.2f}x ± {s.speedup.std:.2f}, draft {1e3 * s.draft_s.value:.1f} ms"
            for s in cells
        ]
        print(
            f"{way:<28}"
            + "".join(f"{text:>32}" for text in told)
            + f"   {cells[1].speedup.value / cells[0].speedup.value:.2f} times"
        )
    if arguments.picture is not None:
        arguments.picture.parent.mkdir(parents=True, exist_ok=True)
        print(f"\n{write_picture(arguments.picture, drawn(chart(found), size=(7.6, 4.2)))}")


if __name__ == "__main__":
    main()
