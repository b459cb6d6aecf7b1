"""Hold predicted speed-ups of several families of drafters against published ones, tau given:
kernels and engine, not acceptance.

    python benchmarks/families.py                                                  # the tables
    python benchmarks/families.py --json --output benchmarks/results/2026-11-22-families
    python benchmarks/families.py --time llama-3.3-70b:b200 --json

- EAGLE-1 and EAGLE-3 of Llama-3.1-8B on one H100, vLLM of mid 2025, MT-Bench, batch 1, gamma 2 to 7
  (vLLM issue 20780): ms a token. What vLLM of that time adds to a round was fitted to rounds of
  this source too; `engine_rounds.py` leaves sources out.
- Llama-3.3-70B on B200, batch 32, gamma 3, T = 0 (SPEED-Bench, arXiv 2604.09557): n-gram,
  Llama-3.2-1B, EAGLE-3. It ran TensorRT-LLM or vLLM; version and number of GPUs are not told, so
  several are priced. It was submitted on 2026-02-10 and revised on 2026-05-28: vLLM was at 0.15 to
  0.19 then, TensorRT-LLM at 1.2 or a candidate of 1.3, so that vLLM 0.30 and 0.33 are told for what
  they would do, not to be judged. tau of n-gram is over all rounds; the share of rounds that draft
  is not told either: it is believed as for mixed text.
- EAGLE-3 of Llama-2-7B-chat and 13B-chat: published speed-up and tau; gamma, engine and GPU not
  told. Priced at gamma 3 and 5 in transformers and vLLM on an A100 and H100.

Nothing here was tuned to the published values.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import engine_rounds as published
from archsearch.acceptance.estimator import GivenAcceptance
from archsearch.acceptance.families import acceptance_of
from archsearch.acceptance.prior import PriorAcceptance
from archsearch.estimate import Estimate
from archsearch.models.targets import resolve_drafter, resolve_target
from archsearch.pipeline.latency import choose_latency
from archsearch.pipeline.serving import with_engine
from archsearch.search.objective import Score, Scorer
from archsearch.speedup import alpha_from_tau
from archsearch.workload import WorkloadRequest

ISSUE: Final = "github vllm-project/vllm issues/20780"
SPEED_BENCH: Final = (("ngram", 1.41, 0.88), ("llama-3.2-1b", 2.44, 1.60), ("eagle3", 2.44, 1.90))
SPEED_ENGINES: Final = (
    ("vllm", "0.17.0"),
    ("tensorrt-llm", "1.2.0"),
    ("tensorrt-llm", "1.3.0"),
    ("vllm", "0.30.0"),
    ("vllm", "0.33.0"),
)
CHAT: Final = (("llama-2-7b", 2.5, 1.92), ("llama-2-13b", 2.3, 1.81))
CHAT_SETTINGS: Final = (
    ("transformers", None, "a100"),
    ("vllm", "0.10.0", "a100"),
    ("vllm", "0.33.0", "h100"),
)


@dataclass(frozen=True)
class Row:
    """One published number beside the predicted one. `metric`: `ms a token` or `speed-up`."""

    group: str
    case: str
    metric: str
    published: float
    predicted: float
    std: float
    note: str = ""

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1.0


def priced(name: str, target: str, asked: WorkloadRequest, gamma: int, tau: float) -> Score:
    """The score of a drafter at a gamma whose tau is known."""
    ref = resolve_target(target)
    drafter = resolve_drafter(name, ref).drafter
    asked = with_engine(asked, drafter.rounds)
    source, workload = choose_latency(asked, ref.architecture, drafter.rounds)
    scorer = Scorer(
        ref.architecture,
        workload,
        source.latency,
        GivenAcceptance(0.5),
        gammas=[gamma],
        domain="mixed",
    )
    known = acceptance_of(drafter, PriorAcceptance(), scorer.context)
    if known.share is not None:
        drafter = drafter.with_share(known.share.value)
    alpha = Estimate(alpha_from_tau(tau, gamma), 0.0, "published")
    return scorer.measured(drafter, alpha, {gamma: Estimate(tau, 0.0, "published")})


def eagle_rows() -> Iterator[Row]:
    """vLLM issue 20780."""
    rows, _ = published.read_rows()
    for row in rows:
        if row.source != ISSUE or row.tau is None:
            continue
        asked = WorkloadRequest(
            gpu=row.device,
            batch_size=row.batch,
            context_len=row.context,
            tensor_parallel=1,
            dtype="bfloat16",
            engine="vllm",
            engine_version="0.10.0",
        )
        score = priced(row.kind, "llama-3.1-8b", asked, row.gamma, row.tau)
        case = (
            f"{'EAGLE-3' if row.kind == 'eagle3' else 'EAGLE-1'}, gamma {row.gamma}, tau {row.tau}"
        )
        ms = 1e3 * row.round_s / row.tau
        yield Row(
            "Llama-3.1-8B, H100, vLLM 0.10",
            case,
            "ms a token",
            ms,
            1e3 * score.tpot_s.value,
            1e3 * score.tpot_s.std,
        )


def speed_bench_rows() -> Iterator[Row]:
    """SPEED-Bench's Llama-3.3-70B."""
    for engine, version in SPEED_ENGINES:
        for ranks in (1, 2, 4, 8):
            for name, tau, gain in SPEED_BENCH:
                asked = WorkloadRequest(
                    gpu="b200",
                    batch_size=32,
                    context_len=1024,
                    tensor_parallel=ranks,
                    dtype="bfloat16",
                    engine=engine,
                    engine_version=version,
                )
                score = priced(name, "llama-3.3-70b", asked, 3, tau)
                share = score.proposer.drafts_share
                note = "" if share >= 1.0 else f"{share:.0%} of rounds draft (believed)"
                group = f"Llama-3.3-70B, B200 x {ranks}, batch 32, gamma 3, {engine} {version}"
                yield Row(
                    group,
                    f"{name}, tau {tau}",
                    "speed-up",
                    gain,
                    score.speedup.value,
                    score.speedup.std,
                    note,
                )


def chat_rows() -> Iterator[Row]:
    """EAGLE-3 of the Llama-2 chat models."""
    for target, tau, gain in CHAT:
        for engine, version, gpu in CHAT_SETTINGS:
            for gamma in (3, 5):
                asked = WorkloadRequest(
                    gpu=gpu,
                    context_len=400,
                    tensor_parallel=1,
                    dtype="bfloat16",
                    engine=engine,
                    engine_version=version,
                )
                group = f"{target} chat, EAGLE-3, {engine} {version or ''} on {gpu}"
                score = priced("eagle3", target, asked, gamma, tau)
                yield Row(
                    group,
                    f"gamma {gamma}, tau {tau}",
                    "speed-up",
                    gain,
                    score.speedup.value,
                    score.speedup.std,
                )


def in_order(rows: list[Row]) -> bool:
    """Whether the predictions rank as the published values do."""
    return sorted(rows, key=lambda row: row.published) == sorted(
        rows, key=lambda row: row.predicted
    )


def text(rows: list[Row]) -> str:
    lines = []
    for group in dict.fromkeys(row.group for row in rows):
        members = [row for row in rows if row.group == group]
        lines += [group, f"  {'':32} {'published':>10} {'predicted':>16} {'error':>7}"]
        for row in members:
            said = f"{row.predicted:.2f} ± {row.std:.2f}"
            lines.append(
                f"  {row.case:32} {row.published:10.2f} {said:>16} {row.error:+7.1%}"
                f"  {row.note}".rstrip()
            )
        errors = [abs(row.error) for row in members]
        order = (
            ""
            if len({row.published for row in members}) < 3 or "0.10" in group
            else f"; in order: {in_order(members)}"
        )
        lines.append(f"  median {statistics.median(errors):.1%}, largest {max(errors):.1%}{order}")
        lines.append("")
    return "\n".join(lines)


def timed(case: str) -> dict[str, Any]:
    """Seconds (wall and CPU) of one search over all families for `target:gpu`, report and files
    included, imports not."""
    from archsearch import pipeline
    from archsearch.pipeline.session import SearchRequest

    target, _, gpu = case.partition(":")
    folder = Path(tempfile.mkdtemp()) / "run"
    wall, cpu = time.perf_counter(), time.process_time()
    result = pipeline.search(SearchRequest(target, WorkloadRequest(gpu=gpu), run=folder))
    seconds = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    shutil.rmtree(folder.parent)
    best = {item.family: round(item.speedup.value, 3) for item in result.families}
    return {"case": case, "trials": result.trials, **seconds, "best": best}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--output",
        type=Path,
        help="folder for families.json and families.txt (or search_time.json)",
    )
    parser.add_argument(
        "--time",
        action="append",
        default=[],
        metavar="TARGET:GPU",
        help="time a search instead; repeat",
    )
    asked = parser.parse_args()
    if asked.time:
        data: Any = [timed(case) for case in asked.time]
        words, name = (
            "\n".join(
                f"{row['case']}: {row['wall_s']:.1f} s, {row['cpu_s']:.1f} s CPU" for row in data
            ),
            "search_time",
        )
    else:
        rows = [*eagle_rows(), *speed_bench_rows(), *chat_rows()]
        data = [asdict(row) | {"error": row.error} for row in rows]
        words, name = text(rows), "families"
    print(json.dumps(data) if asked.json else words)
    if asked.output:
        asked.output.mkdir(parents=True, exist_ok=True)
        (asked.output / f"{name}.json").write_text(
            json.dumps(data, indent=1) + "\n", encoding="utf-8"
        )
        (asked.output / f"{name}.txt").write_text(words + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
