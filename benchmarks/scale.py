"""How a search scales: scoring all shapes at once, what samplers miss of the exact best, what a
recorded trial costs.

    python benchmarks/scale.py exact [--target llama-3.1-8b] [--gpu h100-sxm5-80gb] [--layers 16]
    python benchmarks/scale.py large [--layers 64] [--trials 300]
    python benchmarks/scale.py samplers [--trials 300] [--seeds 5]
    python benchmarks/scale.py overhead
    python benchmarks/scale.py mix

Times are seconds of the processor (one thread), so that what else runs matters little; `exact`
prints wall seconds too.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, get_args

import numpy as np

from archsearch.acceptance.prior import PriorAcceptance
from archsearch.architecture import catalogue
from archsearch.errors import ArchsearchError
from archsearch.hardware.device import load_device
from archsearch.latency.model import LatencyModel
from archsearch.paths import data_dir
from archsearch.profiles import Profile
from archsearch.search.exact import exact_grid, grid_of, rank_all
from archsearch.search.objective import Scorer
from archsearch.search.samplers import Sampler
from archsearch.search.space import SearchSpace, load_space
from archsearch.search.study import How, search
from archsearch.traffic.mix import mix_of
from archsearch.traffic.mix_scorer import MixScorer
from archsearch.workload import Workload


def million(layers: int) -> SearchSpace:
    """About a million valid shapes for a target of 4,096."""
    return SearchSpace.from_dict(
        {
            "dimensions": {
                "num_hidden_layers": {"min": 1, "max": layers},
                "hidden_size": {"min": 1024, "max": 4096, "step": 256},
                "ffn_ratio": [1, 1.5, 2, 2.5, 3, 3.5, 4, 5],
                "num_key_value_heads": [1, 2, 4, 8],
                "kv_group_size": [1, 2, 4, 8],
                "head_dim": [64, 128],
                "window_pattern": ["L", "S", "SSSL"],
                "sliding_window": [256, 512],
                "draft_vocab_size": [4096, 8192, 16384, 32768, 65536, "target"],
                "tie_word_embeddings": [False],
            },
            "constraints": {"attention_width": [0.125, 2.0]},
        },
        "million",
    )


def scorer_of(target: str, gpu: str, space: SearchSpace) -> Scorer:
    """A scorer on a shipped profile, batch 1, 512 tokens, graph mode, vLLM."""
    architecture = catalogue.load(target).architecture
    profile = Profile.load(next((data_dir("profiles") / gpu).iterdir()))
    latency = LatencyModel(profile, "bfloat16", "graph", "vllm")
    work = Workload(1, 512, 1, "bfloat16", "graph")
    scorer = Scorer(architecture, work, latency, PriorAcceptance())
    return scorer.with_limits(space.limits(architecture))


def exact(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every shape of a large space: its rate, its memory, and how far a sample lies from scores of
    one shape alone."""
    space = million(arguments.layers).served(1, 608)
    scorer = scorer_of(arguments.target, arguments.gpu, space)
    first = next(space.enumerate(scorer.target))
    scorer(first)  # the prior reads its table once
    before, wall = time.process_time(), time.perf_counter()
    grid = grid_of(space, scorer.target)
    assert grid is not None
    made = time.process_time()
    ranking = rank_all(scorer, grid, 300)
    seconds, elapsed = time.process_time() - before, time.perf_counter() - wall
    rng, worst, alone = np.random.default_rng(0), 0.0, time.process_time()
    sample = scorer.grid_scores(grid.grid, 0)
    alone = time.process_time()
    for flat in rng.integers(0, sample.speedup.size, 200):
        score = scorer(grid.grid.at(sample.found(int(flat))[0]))
        worst = max(worst, abs(sample.speedup.flat[flat] / score.speedup.value - 1.0))
    return {
        "target": arguments.target,
        "gpu": arguments.gpu,
        "points": space.size(scorer.target),
        "shapes": ranking.size,
        "cpu_s": round(seconds, 2),
        "of_it_grid_s": round(made - before, 2),
        "wall_s": round(elapsed, 2),
        "shapes_per_cpu_s": round(ranking.size / seconds),
        "points_per_cpu_s": round(space.size(scorer.target) / seconds),
        "one_by_one_per_cpu_s": round(200 / (time.process_time() - alone)),
        "largest_relative_difference": worst,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "best": scorer(grid.grid.at(ranking.best[0][1])).architecture.label(),
        "best_speedup": ranking.best[0][0],
    }


def large(arguments: argparse.Namespace) -> dict[str, Any]:
    """A default search of a space that is too large to score in full, and what it says it
    missed."""
    space = million(arguments.layers).served(1, 608)
    scorer = scorer_of(arguments.target, arguments.gpu, space)
    scorer(next(space.enumerate(scorer.target)))
    before, wall = time.process_time(), time.perf_counter()
    result = search(space, scorer, trials=arguments.trials, how=How(regret=True))
    (regret,) = result.regrets
    return {
        "target": arguments.target,
        "gpu": arguments.gpu,
        "points": space.size(scorer.target),
        "trials": result.finished,
        "cpu_s": round(time.process_time() - before, 2),
        "wall_s": round(time.perf_counter() - wall, 2),
        "best": result.best[0].architecture.label(),
        **regret.to_dict(),
    }


SPACES = (("smollm2-135m", "demo"), ("llama-3.1-8b", "default"), ("llama-3.1-8b", "wide-shallow"))


def samplers(arguments: argparse.Namespace) -> dict[str, Any]:
    """What each sampler's best lies behind the exact best, by seed; percent of speed-up."""
    found: dict[str, Any] = {}
    for target, name in SPACES[: arguments.spaces]:
        space = load_space(name).served(1, 608)
        scorer = scorer_of(target, arguments.gpu, space)
        grid = exact_grid(space, scorer)
        assert grid is not None
        best = rank_all(scorer, grid, 10).best[0][0]
        for sampler in arguments.samplers:
            regrets, seconds = [], []
            for seed in range(arguments.seeds):
                start = time.process_time()
                try:
                    result = search(
                        space, scorer, trials=arguments.trials, seed=seed, how=How(sampler)
                    )
                except ArchsearchError as error:
                    found[f"{target} {name} {sampler}"] = str(error)
                    break
                seconds.append(time.process_time() - start)
                regrets.append(100.0 * (1.0 - result.best[0].speedup.value / best))
            else:
                found[f"{target} {name} {sampler}"] = {
                    "shapes": grid.grid.size,
                    "exact": best,
                    "regret_percent": [round(regret, 3) for regret in regrets],
                    "median_cpu_s": round(statistics.median(seconds), 1),
                }
            print(target, name, sampler, found[f"{target} {name} {sampler}"], flush=True)
    return found


MIXES: dict[str, tuple[str, dict[str, Any]]] = {
    "4 and 32 in flight": ("speedup", {"concurrency": 4}),
    "300 in flight, more than some drafts leave room for": ("throughput", {"concurrency": 300}),
    "2 requests a second": ("tpot", {"requests_per_second": 2.0}),
}
"""What its first part asks; the second is code, 32 in flight."""


def mixed(arguments: argparse.Namespace) -> dict[str, Any]:
    """Spaces scored in full over mixes of two kinds of work, and how far a sample lies from scores
    one by one."""
    space = load_space("default").served(1, 2000)
    scorer, found = scorer_of(arguments.target, arguments.gpu, space), {}
    scorer(next(space.enumerate(scorer.target)))
    for name, (objective, load) in MIXES.items():
        chat = {
            "name": "chat",
            "weight": 70,
            "prompt_tokens": 600,
            "output_tokens": 250,
            "temperature": 0.7,
            **load,
        }
        code = {
            "name": "code",
            "weight": 30,
            "concurrency": 32,
            "prompt_tokens": 1500,
            "output_tokens": 300,
            "domain": "code",
        }
        mix = mix_of(
            {"objective": objective, "limits": {"ttft_ms": 900}, "parts": [chat, code]}, name
        )
        own, before = MixScorer(scorer, mix, load_device(arguments.gpu)), time.process_time()
        grid = exact_grid(space, own)
        assert grid is not None
        chunks = list(own.over_grid(grid.grid))
        seconds, worst, alone = time.process_time() - before, 0.0, time.process_time()
        rng = np.random.default_rng(0)
        for scores in rng.choice(np.arange(len(chunks)), 12):
            flat = int(rng.integers(0, chunks[scores].speedup.size))
            one = own(grid.grid.at(chunks[scores].place(flat)))
            worst = max(worst, abs(float(chunks[scores].ranked_by.flat[flat]) / one.worth - 1.0))
        found[name] = {
            "objective": objective,
            "shapes": grid.grid.size,
            "cpu_s": round(seconds, 1),
            "one_by_one_cpu_ms": round(1e3 * (time.process_time() - alone) / 12),
            "largest_relative_difference": worst,
        }
        print(name, found[name], flush=True)
    return found


def overhead(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the processor that a recorded trial costs beside its score, at 100 and at 10,000
    trials."""
    import optuna

    from archsearch.search.storage import open_storage

    found: dict[str, Any] = {}
    space = load_space("demo").served(1, 608)
    scorer = scorer_of("smollm2-135m", arguments.gpu, space)
    row = scorer(next(space.enumerate(scorer.target))).to_dict()
    for count in (100, 10_000):
        with tempfile.TemporaryDirectory() as folder:
            study = optuna.create_study(
                storage=open_storage(Path(folder) / "journal.log"), direction="maximize"
            )
            start = time.process_time()
            for number in range(count):
                study.add_trial(
                    optuna.trial.create_trial(
                        value=float(number), user_attrs={"origin": "exact", "score": row}
                    )
                )
            each = (time.process_time() - start) / count
            start = time.process_time()
            trials = len(study.get_trials(deepcopy=False))
            found[f"{count} trials"] = {
                "ms_each": round(1e3 * each, 3),
                "read_ms": round(1e3 * (time.process_time() - start), 1),
            }
            assert trials == count
    found["ratio"] = round(found["10000 trials"]["ms_each"] / found["100 trials"]["ms_each"], 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["exact", "large", "samplers", "overhead", "mix"])
    parser.add_argument("--target", default="llama-3.1-8b")
    parser.add_argument("--gpu", default="h100-sxm5-80gb")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--spaces", type=int, default=len(SPACES), help="only the first so many spaces"
    )
    parser.add_argument(
        "--samplers", nargs="+", default=[name for name in get_args(Sampler) if name != "auto"]
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    found = {
        "exact": exact,
        "large": large,
        "samplers": samplers,
        "overhead": overhead,
        "mix": mixed,
    }[arguments.what](arguments)
    text = json.dumps(found, indent=1)
    if arguments.output:
        arguments.output.write_text(f"{text}\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
