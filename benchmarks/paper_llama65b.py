"""LLaMA-65B on four GPUs with the drafts of "Decoding Speculative Decoding" (arXiv 2402.01528), in
both modes.

    python benchmarks/paper_llama65b.py [--devices a100 h200] [--context 512] [--trials 400]
    [--seeds 3] [--json] [--output DIR]

From the profiles that ship with archsearch. Prints decode, verification and draft times, the cycle
at gamma 8 and what it says about the paper's main result (a 5-layer draft twice as fast as
Sheared-LLaMA-1.3B at equal tau), draws latency against depth and width, and lets archsearch's own
search name the best shape in each mode.

graph: composed of measured kernels (CUDA graphs, as engines serve today). eager: the same kernels
behind the published host time of the paper's stack of 2023; not measured on either device.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from archsearch.acceptance.prior import PriorAcceptance
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.catalogue import load
from archsearch.architecture.counts import parameters
from archsearch.architecture.ops import Part
from archsearch.hardware.device import load_device
from archsearch.latency.model import LatencyModel
from archsearch.profiles import Profile, find_profile
from archsearch.search.objective import Scorer, difference_std
from archsearch.search.space import load_space
from archsearch.search.study import search
from archsearch.workload import MODES, Workload

TARGET, RANKS, GAMMA = "llama-65b", 4, 8
DEEP, WIDE = "sheared-llama-1.3b", "wide-796m"
DRAFTS = (DEEP, "wide-1.3b", WIDE, "wide-543m", "wide-290m", "llama-68m")
RESULTS = Path(__file__).parent / "results" / "2026-11-21-tables"
LayerModels = Callable[[str, str], LatencyModel]


def shipped(device: str, mode: str) -> LatencyModel:
    """The model of the profile that ships with archsearch; float16 as in the paper."""
    return LatencyModel(Profile.load(find_profile(load_device(device).key)), "float16", mode)


def times(model: LatencyModel, workload: Workload) -> dict[str, Any]:
    """Target and drafts in one mode; seconds with std."""
    target = load(TARGET).architecture
    decode, verify = model.decode_s(target, workload), model.verify_s(target, workload, GAMMA)
    result: dict[str, Any] = {
        "decode_s": decode.to_dict(),
        "verify_s": verify.to_dict(),
        "target_terms_s": None,
        "drafts": {},
    }
    if model.composed_ is not None:
        terms = model.composed_.ops_terms(
            model.composed_.pass_ops(
                target, [Part(1, 1, workload.context_len)], workload.tensor_parallel
            )
        )
        result["target_terms_s"] = {name: value for name, (value, _) in terms.items()}
    for name in DRAFTS:
        arch = load(name).architecture
        draft = model.draft_s(arch, workload, GAMMA)
        result["drafts"][name] = {
            "layers": arch.num_hidden_layers,
            "hidden_size": arch.hidden_size,
            "parameters": parameters(arch),
            "token_s": draft.value / GAMMA,
            "token_std_s": draft.std / GAMMA,
            "cycle_s": draft.value + verify.value,
            "share_of_target": verify.value / (draft.value + verify.value),
            "tau_that_pays": (draft.value + verify.value) / decode.value,
        }
    drafts = result["drafts"]
    result["cycle_ratio"] = drafts[DEEP]["cycle_s"] / drafts[WIDE]["cycle_s"]
    # the target's time is in both cycles and cancels in part; the drafts' errors are taken as
    # independent
    shares = [
        GAMMA * drafts[name]["token_std_s"] / drafts[name]["cycle_s"] for name in (DEEP, WIDE)
    ]
    target_share = abs(verify.std / drafts[DEEP]["cycle_s"] - verify.std / drafts[WIDE]["cycle_s"])
    result["cycle_ratio_std"] = result["cycle_ratio"] * math.hypot(*shares, target_share)
    return result


def best_shape(model: LatencyModel, workload: Workload, trials: int, seeds: int) -> dict[str, Any]:
    """The search's best shape against the paper's 5 x 4096 draft, by modelled speed-up with the
    prior's alpha."""
    target, acceptance = load(TARGET).architecture, PriorAcceptance()
    scorer = Scorer(target, workload, model, acceptance, max_gamma=GAMMA)
    space = load_space("wide-shallow")
    started = time.perf_counter()
    found = [search(space, scorer, trials=trials, seed=seed).best[0] for seed in range(seeds)]
    best = max(found, key=lambda score: score.speedup.value)
    paper, deep = (scorer(load(name).architecture) for name in (WIDE, DEEP))
    gain = math.log(best.speedup.value / paper.speedup.value)
    return {
        "space": space.name,
        "trials": trials,
        "seconds_per_search": (time.perf_counter() - started) / seeds,
        "speedup_by_seed": [score.speedup.value for score in found],
        "best": best.to_dict(),
        "paper": paper.to_dict(),
        "sheared": deep.to_dict(),
        "gain_over_paper": math.expm1(gain),
        "gain_std": math.exp(gain) * difference_std(best, paper, acceptance, scorer.context),
        "paper_over_sheared": paper.speedup.value / deep.speedup.value,
    }


def draw(
    models: LayerModels, devices: list[str], workload: dict[str, Workload], path: Path
) -> None:
    """Latency per draft token against depth (hidden 2048 and 4096) and against width (5 layers), a
    row per mode."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def shape(layers: int, hidden: int) -> Architecture:
        return Architecture(
            hidden,
            64 * round(2.6875 * hidden / 64),
            layers,
            hidden // 128,
            hidden // 128,
            128,
            32000,
        )

    figure, axes = plt.subplots(2, 2, figsize=(11, 8), constrained_layout=True)
    depths, widths = (
        (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24),
        (512, 768, 1024, 1536, 2048, 2560, 3072, 4096, 5120),
    )
    for row, mode in enumerate(("graph", "eager")):
        by_depth, by_width = axes[row]
        for colour, device in zip(
            ("tab:blue", "tab:orange", "tab:green", "tab:red"), devices, strict=False
        ):
            model = models(device, mode)

            def token_ms(
                arch: Architecture, model: LatencyModel = model, mode: str = mode
            ) -> tuple[float, float]:
                estimate = model.draft_s(arch, workload[mode], 1)
                return 1e3 * estimate.value, 1e3 * estimate.std

            for hidden, style in ((2048, "--"), (4096, "-")):
                values = [token_ms(shape(layers, hidden)) for layers in depths]
                _band(by_depth, depths, values, colour, style, f"{device}, hidden size {hidden}")
            _band(
                by_width,
                widths,
                [token_ms(shape(5, hidden)) for hidden in widths],
                colour,
                "-",
                f"{device}, 5 layers",
            )
            for name in (DEEP, "wide-1.3b", WIDE, "llama-68m"):
                arch = load(name).architecture
                value = token_ms(arch)[0]
                by_depth.plot(arch.num_hidden_layers, value, "o", color=colour, markersize=4)
                if device == devices[0]:
                    place, side = (
                        ((-4, 6), "right") if arch.num_hidden_layers > 4 else ((7, -4), "left")
                    )
                    by_depth.annotate(
                        name,
                        (arch.num_hidden_layers, value),
                        place,
                        textcoords="offset points",
                        ha=side,
                        fontsize=8,
                    )
        words = (
            "graph mode (from kernel tables)"
            if mode == "graph"
            else "eager mode (published host time; curves coincide)"
        )
        by_depth.set_title(f"Depth, {words}", fontsize=10)
        by_width.set_title(f"Width, {words}", fontsize=10)
        by_depth.set(xlabel="layers", ylabel="ms per draft token", xlim=(0, 25), ylim=(0, None))
        by_width.set(xlabel="hidden size", ylabel="ms per draft token", ylim=(0, None))
        for axis in (by_depth, by_width):
            axis.grid(alpha=0.3)
            axis.legend(fontsize=8, loc="upper left")
    figure.suptitle("A draft token of Llama-shaped drafts, batch 1; bands: one std")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _band(
    axis: Any,
    x: tuple[int, ...],
    values: list[tuple[float, float]],
    colour: str,
    style: str,
    label: str,
) -> None:
    axis.plot(x, [value for value, _ in values], style, color=colour, label=label)
    axis.fill_between(
        x,
        [v - s for v, s in values],
        [v + s for v, s in values],
        color=colour,
        alpha=0.12,
        linewidth=0,
    )


def _shape_words(score: dict[str, Any]) -> str:
    arch = score["architecture"]
    window = (
        ""
        if set(arch["window_pattern"]) == {"L"}
        else f", window {arch['sliding_window']} ({arch['window_pattern']})"
    )
    return (
        f"{arch['num_hidden_layers']} x {arch['hidden_size']}, FFN {arch['intermediate_size']},"
        f" heads {arch['num_attention_heads']}/{arch['num_key_value_heads']} x {arch['head_dim']},"
        f" vocabulary {arch['draft_vocab_size'] or arch['vocab_size']}{window}"
    )


def text(result: dict[str, Any]) -> str:
    lines = [
        f"{TARGET}, tensor parallel {RANKS}, context {result['context']}, batch 1, gamma {GAMMA};"
        " times in ms"
    ]
    for key, part in result["results"].items():
        decode, verify = part["decode_s"], part["verify_s"]
        lines += [
            "",
            (
                f"{key}: decode {1e3 * decode['value']:.2f} ± {1e3 * decode['std']:.2f}, "
                f"verify {1e3 * verify['value']:.2f} ± {1e3 * verify['std']:.2f} ({part['words']})"
            ),
        ]
        if part["target_terms_s"]:
            lines.append(
                "  decode = "
                + " + ".join(
                    f"{name} {1e3 * value:.2f}" for name, value in part["target_terms_s"].items()
                )
            )
        lines.append(
            f"  {'draft':<20} {'shape':>9} {'per token':>16} {'cycle':>7} {'pays above tau':>15}"
        )
        for name, row in part["drafts"].items():
            lines.append(
                f"  {name:<20} {row['layers']:>3} x {row['hidden_size']:<5}"
                f"{1e3 * row['token_s']:>8.3f} ± {1e3 * row['token_std_s']:<5.3f} "
                f"{1e3 * row['cycle_s']:>7.2f} {row['tau_that_pays']:>15.2f}"
            )
        lines.append(
            f"  cycle of {DEEP} / cycle of {WIDE} at equal tau: {part['cycle_ratio']:.2f} ±"
            f" {part['cycle_ratio_std']:.2f}"
        )
        found = part.get("search")
        if found:
            best, paper = found["best"], found["paper"]
            lines += [
                f"  best of {found['space']}: {_shape_words(best)}",
                (
                    f"  {best['speedup']['value']:.2f}x at gamma {best['gamma']}, alpha"
                    f" {best['alpha']['value']:.2f}; paper's 5 x 4096:"
                    f" {paper['speedup']['value']:.2f}x at gamma {paper['gamma']}, alpha"
                    f" {paper['alpha']['value']:.2f}; Sheared-1.3B:"
                    f" {found['sheared']['speedup']['value']:.2f}x"
                ),
                (
                    f"  the best beats the paper's by {found['gain_over_paper']:+.0%} ±"
                    f" {found['gain_std']:.0%} (modelled, prior alpha;"
                    f" {found['seconds_per_search']:.0f} s a search, speed-up by seed"
                    f" {[round(v, 3) for v in found['speedup_by_seed']]})"
                ),
            ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None, models: LayerModels = shipped) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", nargs="+", default=["a100", "h200"])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--trials", type=int, default=400, help="of each search; 0 skips it")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    loaded: dict[tuple[str, str], LatencyModel] = {}

    def model(device: str, mode: str) -> LatencyModel:
        if (device, mode) not in loaded:
            loaded[device, mode] = models(device, mode)
        return loaded[device, mode]

    workloads = {mode: Workload(1, options.context, RANKS, "float16", mode) for mode in MODES}
    result: dict[str, Any] = {
        "target": TARGET,
        "ranks": RANKS,
        "gamma": GAMMA,
        "context": options.context,
        "results": {},
    }
    for device in options.devices:
        for mode in ("graph", "eager"):
            part = times(model(device, mode), workloads[mode])
            profile = model(device, mode).profile
            part["words"] = (
                "composed of kernel tables"
                if mode == "graph"
                else "published host time, std 30 %: not measured"
            )
            part["profile"] = {
                "origin": profile.origin,
                "folder": str(profile.folder.name) if profile.folder else None,
            }
            if options.trials:
                part["search"] = best_shape(
                    model(device, mode), workloads[mode], options.trials, options.seeds
                )
            result["results"][f"{device} {mode}"] = part
    options.output.mkdir(parents=True, exist_ok=True)
    draw(model, options.devices, workloads, options.output / "paper_llama65b.png")
    (options.output / "paper_llama65b.json").write_text(
        json.dumps(result, indent=1) + "\n", encoding="utf-8"
    )
    print(text(result))
    if options.json:
        print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
