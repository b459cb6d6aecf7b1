"""Which rung of the acceptance ladder ranks draft shapes like their final, longer training does?

    python benchmarks/rungs.py anchors --target smollm2-135m --text RUN/text \\
        --heldout RUN/heldout --work runs/rungs
    python benchmarks/rungs.py report ... --json FILE

`anchors` trains each anchor shape alone: a stable trunk to 75 % of the tokens, then an anneal; the
same batches in the same order for all. The first 10 to 25 % of the very same run, seen through the
running mean of the weights, is the short rung. `report` compares every rung with the final alphas
on the same held-out texts: Spearman's rho with a bootstrap over texts, paired errors, costs in
processor seconds. Every stage resumes; each anchor is a file in the work folder. Run it with one
thread (OMP_NUM_THREADS=1) where the machine is shared: costs are processor time, not wall time.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from archsearch.acceptance.estimator import AcceptanceContext, VocabularyCoverage
from archsearch.acceptance.prior import PriorAcceptance
from archsearch.acceptance.short_training import ExtrapolatedAcceptance
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import body_parameters
from archsearch.estimate import Estimate
from archsearch.files import read_json, write_json
from archsearch.pipeline.climb.belief import capacity_to_come
from archsearch.search.rungs import catch_up
from archsearch.speedup import clamped, logit
from archsearch.training.curves import AlphaPoint, CurvePrior, extrapolate, fit_prior, growth

TOKENS = 256_000
SHARES = (
    0.0625,
    0.1,
    0.15625,
    0.25,
    0.5,
    0.7,
)  # of the tokens: where the trunk's alpha is looked at
HEAD_ROWS = 2048
RESAMPLES = 400


def anchors(target: Architecture) -> list[Architecture]:
    """Shapes of the demo space with one head: depth, FFN, KV heads and width each varied. The first
    eight already mix all."""

    def shape(
        layers: int, ffn: int, heads: int = 9, kv: int = 3, hidden: int = 576
    ) -> Architecture:
        return Architecture(
            hidden,
            ffn,
            layers,
            heads,
            kv,
            64,
            target.vocab_size,
            HEAD_ROWS,
            rope_theta=target.rope_theta,
            max_position_embeddings=target.max_position_embeddings,
        )

    return [
        shape(2, 1536),
        shape(1, 1536),
        shape(4, 1536),
        shape(2, 384, 3, 1),
        shape(1, 3072),
        shape(3, 1152, 6, 2),
        shape(2, 1024, 6, 2, hidden=384),
        shape(6, 640, 4, 1, hidden=256),
        shape(4, 384, 3, 1),
        shape(6, 1024, 6, 2, hidden=384),
    ]


def file_name(arch: Architecture) -> str:
    return arch.label().replace("/", "-").replace(" ", "_")


class Bench:
    """Target, text and folders of one experiment."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from archsearch.text.cache import TextCache
        from archsearch.training.distill import split_heldout

        self.arguments = arguments
        self.work = Path(arguments.work)
        self.tokens = int(arguments.tokens)
        self.text = TextCache.load(arguments.text)
        self.heldout_file = TextCache.load(arguments.heldout).sequences
        self.heldout = [*self.heldout_file, *split_heldout(self.text.sequences, 64)[1]]
        self._target: Any = None

    @property
    def target(self) -> Any:
        if self._target is None:
            from archsearch.models.load import load_target
            from archsearch.models.targets import resolve_target

            self._target = load_target(resolve_target(self.arguments.target), "float32")
        return self._target

    @property
    def target_shape(self) -> Architecture:
        from archsearch.models.targets import resolve_target

        return resolve_target(self.arguments.target).architecture

    def vocabulary(self) -> Any:
        from archsearch.text.vocabulary import (
            DraftVocabulary,
            choose_draft_vocab,
            token_frequencies,
        )

        path = self.work / "vocabulary.json"
        if not path.exists():
            write_json(
                path,
                dataclasses.asdict(
                    choose_draft_vocab(token_frequencies(self.text), HEAD_ROWS, self.target[1])
                ),
            )
        return DraftVocabulary(**read_json(path, "vocabulary"))

    def draft(self, arch: Architecture) -> Any:
        from archsearch.training.initialise import initialise_draft

        return initialise_draft(
            self.target[0],
            arch,
            draft_token_ids=self.vocabulary().token_ids,
            calibration_ids=self.calibration(),
        )

    def calibration(self) -> Any:
        import torch

        return torch.stack(
            [s.token_ids[:64] for s in self.text.sequences if len(s.token_ids) >= 64][:32]
        ).long()

    def coverage(self) -> VocabularyCoverage:
        """Which share of the held-out tokens the trimmed head can propose."""
        kept = set(self.vocabulary().token_ids)
        written = [token for s in self.heldout for token in s.written.tolist()]
        return VocabularyCoverage(
            ((HEAD_ROWS, sum(token in kept for token in written) / len(written)),)
        )


def train_anchors(bench: Bench) -> None:
    """One file per anchor: its curve on the held-out texts and the processor seconds at every
    point."""
    from archsearch.progress import ProgressLine
    from archsearch.training.distill import DistillConfig, distill

    marks = tuple(int(share * bench.tokens) for share in SHARES)
    for arch in anchors(bench.target_shape)[: bench.arguments.count]:
        name = file_name(arch)
        path = bench.work / "anchors" / f"{name}.json"
        if path.exists():
            continue
        draft = bench.draft(arch)
        clock: list[tuple[int, float]] = []
        begin = time.process_time()
        with ProgressLine(f"train {arch.label()}") as line:

            def report(
                what: str,
                done: float,
                total: float,
                clock: list[tuple[int, float]] = clock,
                line: ProgressLine = line,
            ) -> None:
                clock.append((round(done * bench.tokens), time.process_time()))
                line(what, done, total)

            result = distill(
                draft,
                bench.text,
                DistillConfig(max_tokens=bench.tokens, evaluate_at=marks),
                heldout=bench.heldout,
                checkpoint_dir=bench.work / "checkpoints" / name,
                progress=report,
            )
        at = dict(clock)
        write_json(
            path,
            {
                "architecture": arch.to_dict(),
                "tokens": result.tokens,
                "steps": result.steps,
                "cpu_s": time.process_time() - begin,
                "resumed": bool(clock) and clock[0][0] > 2000,
                "heldout_tokens": result.heldout_tokens,
                "heldout_file_texts": len(bench.heldout_file),
                "curve": [
                    {
                        "tokens": p.tokens,
                        "alpha": p.value,
                        "weights": p.weights,
                        "cpu_s": at.get(p.tokens, begin) - begin,
                        "hits": p.hits,
                    }
                    for p in result.alpha_curve
                ],
            },
        )


def trained_anchors(bench: Bench) -> list[tuple[Architecture, dict[str, Any]]]:
    """The anchors whose training is complete, in the order of `anchors`."""
    found = []
    for arch in anchors(bench.target_shape):
        path = bench.work / "anchors" / f"{file_name(arch)}.json"
        if path.exists():
            found.append((arch, read_json(path, "anchor")))
    return found


def rank_correlation(first: Any, second: Any) -> float:
    """Spearman's rank correlation."""
    return float(spearmanr(first, second).statistic)


def rank_with_band(
    predicted: np.ndarray, final_hits: np.ndarray, lengths: np.ndarray, hits: np.ndarray | None
) -> dict[str, float]:
    """Spearman with the final alphas and its 2.5 and 97.5 percentiles over resampled texts.

    `final_hits` [shapes, texts]; `hits`: likewise where the prediction was measured on the same
    texts (resampled together), else `predicted` [shapes] stands.
    """
    rng = np.random.default_rng(0)
    final = final_hits.sum(1) / lengths.sum()
    rhos = []
    for _ in range(RESAMPLES):
        texts = rng.integers(len(lengths), size=len(lengths))
        sample = lengths[texts].sum()
        ours = predicted if hits is None else hits[:, texts].sum(1) / sample
        rhos.append(rank_correlation(ours, final_hits[:, texts].sum(1) / sample))
    low, high = np.percentile(rhos, [2.5, 97.5])
    return {"spearman": rank_correlation(predicted, final), "low": float(low), "high": float(high)}


def rank_rungs(
    chosen: list[int],
    shapes: list[Architecture],
    rows: list[dict[str, Any]],
    prior: np.ndarray,
    final_hits: np.ndarray,
    lengths: np.ndarray,
) -> dict[str, Any]:
    """Every rung but the supernet on the `chosen` shapes; short trainings with their processor
    seconds, looks included."""
    sizes = np.array([body_parameters(shapes[i]) for i in chosen])
    final = final_hits[chosen]
    ranks: dict[str, Any] = {
        "log of the body's parameters": rank_with_band(sizes, final, lengths, None),
        "prior": rank_with_band(prior[chosen], final, lengths, None),
    }
    for point, share in enumerate(SHARES):
        hits = np.array([rows[i]["curve"][point]["hits"] for i in chosen])
        found = rank_with_band(hits.sum(1) / lengths.sum(), final, lengths, hits)
        cost = sum(rows[i]["curve"][point]["cpu_s"] for i in chosen)
        ranks[f"short training, {share:.0%} of the tokens"] = found | {
            "cpu_s": cost,
            "shapes": len(chosen),
        }
    return ranks


def report(bench: Bench) -> None:
    """Everything that the work folder holds, as a table on stdout and as JSON."""
    done = trained_anchors(bench)
    shapes = [arch for arch, _ in done]
    rows = [row for _, row in done]
    lengths = np.array(rows[0]["heldout_tokens"])
    final_hits = np.array([row["curve"][-1]["hits"] for row in rows])
    final = final_hits.sum(1) / lengths.sum()
    context = AcceptanceContext(
        target=bench.target_shape, domain="narrow", coverage=bench.coverage()
    )
    prior = np.array([PriorAcceptance().predict(arch, context).alpha.value for arch in shapes])
    ranks = rank_rungs(list(range(len(shapes))), shapes, rows, prior, final_hits, lengths)
    predictions = predicted_finals(bench, shapes, rows, final, context)
    errors = paired_errors(final_hits, lengths)
    out = {
        "target": bench.arguments.target,
        "tokens": bench.tokens,
        "texts": len(lengths),
        "text_tokens": int(lengths.sum()),
        "cpu_s_final": sum(row["cpu_s"] for row in rows),
        "shapes": [
            {
                "shape": arch.label(),
                "body_parameters": body_parameters(arch),
                "alpha": float(alpha),
                "prior": float(guess),
                "curve": [
                    {key: p[key] for key in ("tokens", "alpha", "weights", "cpu_s")}
                    for p in row["curve"]
                ],
                "cpu_s": row["cpu_s"],
            }
            for arch, row, alpha, guess in zip(shapes, rows, final, prior, strict=True)
        ],
        "paired_std": errors,
        "rank_correlation": ranks,
        "predictions": predictions,
    }
    print_report(out)
    if bench.arguments.json:
        write_json(bench.arguments.json, out)


def paired_errors(hits: np.ndarray, lengths: np.ndarray) -> dict[str, float]:
    """Std over texts of one alpha and, in pairs, of the difference of two (median over pairs)."""
    rng = np.random.default_rng(0)
    texts = rng.integers(len(lengths), size=(RESAMPLES, len(lengths)))
    alphas = hits[:, texts].sum(-1) / lengths[texts].sum(-1)  # [shapes, resamples]
    pairs = [float((alphas[i] - alphas[j]).std()) for i in range(len(hits)) for j in range(i)]
    return {"alone": float(np.median(alphas.std(1))), "difference": float(np.median(pairs))}


def short_levels(
    alphas: dict[Architecture, float], tokens: int, full: AcceptanceContext
) -> dict[Architecture, tuple[float, float]]:
    """Where shapes will stand among each other after the full training, by what the climb knows of
    catching up."""
    to_come = capacity_to_come(PriorAcceptance().fit([]), full)
    come = {arch: to_come(arch, tokens) for arch in alphas}
    logits = {arch: logit(clamped(alpha)) for arch, alpha in alphas.items()}
    centre, (spread, std) = float(np.mean(list(logits.values()))), catch_up(tokens)
    mean = float(np.mean(list(come.values())))
    return {
        arch: (centre + (level - centre) / spread + come[arch] - mean, std)
        for arch, level in logits.items()
    }


def predicted_finals(
    bench: Bench,
    shapes: list[Architecture],
    rows: list[dict[str, Any]],
    final: np.ndarray,
    context: AcceptanceContext,
) -> dict[str, Any]:
    """alpha of each anchor at the full budget before it is trained that far; whatever is learnt, is
    learnt from the others."""
    curves = {
        arch: [
            AlphaPoint(p["tokens"], p["alpha"], p["weights"] == "annealed") for p in row["curve"]
        ]
        for arch, row in zip(shapes, rows, strict=True)
    }
    out: dict[str, Any] = {}
    for share in (0.1, 0.25):
        early = {
            arch: [p for p in curve if p.tokens <= 1.02 * share * bench.tokens]
            for arch, curve in curves.items()
        }
        ways: dict[str, list[Estimate]] = {"own early curve": [], "never trained": []}
        for arch in shapes:
            others = fit_prior(
                [curve for other, curve in curves.items() if other != arch], CurvePrior()
            )
            ways["own early curve"].append(extrapolate(early[arch], bench.tokens, others))
            at = min(curve[-1].tokens for curve in early.values())
            asked = dataclasses.replace(context, trained_tokens=float(bench.tokens))
            levels = short_levels(
                {other: curve[-1].alpha for other, curve in early.items() if other != arch},
                at,
                asked,
            )
            rung = ExtrapolatedAcceptance(levels, growth(others, at, bench.tokens), asked)
            ways["never trained"].append(rung.predict(arch, asked).alpha)
        for way, found in ways.items():
            inside = [
                abs(e.value - truth) <= 2 * e.std for e, truth in zip(found, final, strict=True)
            ]
            out[f"{way}, {share:.0%} of the tokens"] = {
                "within_two_std": int(sum(inside)),
                "of": len(inside),
                "mean_absolute_error": float(
                    np.mean([abs(e.value - truth) for e, truth in zip(found, final, strict=True)])
                ),
                "mean_std": float(np.mean([e.std for e in found])),
                "spearman": rank_correlation([e.value for e in found], final.tolist()),
                "values": [
                    [e.value, e.std, float(truth)] for e, truth in zip(found, final, strict=True)
                ],
            }
    return out


def print_report(out: dict[str, Any]) -> None:
    print(
        f"{len(out['shapes'])} shapes, {out['tokens']} tokens each, {out['cpu_s_final']:.0f}"
        f" processor seconds; held out: {out['texts']} texts, {out['text_tokens']} tokens; std of"
        f" one alpha {out['paired_std']['alone']:.4f}, of a paired difference"
        f" {out['paired_std']['difference']:.4f}"
    )
    marks = [f"{point['tokens'] / 1000:.0f}k" for point in out["shapes"][0]["curve"]]
    print(
        f"\n{'shape':38} {'body':>6} {'prior':>6}  "
        + " ".join(f"{mark:>6}" for mark in marks)
        + "   cpu s"
    )
    for row in sorted(out["shapes"], key=lambda row: -row["alpha"]):
        curve = " ".join(f"{point['alpha']:6.3f}" for point in row["curve"])
        print(
            f"{row['shape']:38} {row['body_parameters'] / 1e6:5.1f}M {row['prior']:6.3f}  {curve} "
            f" {row['cpu_s']:6.0f}"
        )
    print(f"\n{'rung':62} Spearman [95 % over texts]  processor s")
    for name, row in out["rank_correlation"].items():
        cost = f"{row['cpu_s']:9.0f}" if "cpu_s" in row else ""
        print(f"{name:62} {row['spearman']:6.3f}  [{row['low']:.2f}, {row['high']:.2f}]  {cost}")
    print(
        f"\n{'alpha predicted before the full training':48} within two std   mean |error|   mean"
        " std   Spearman"
    )
    for name, row in out["predictions"].items():
        print(
            f"{name:48} {row['within_two_std']:4} of {row['of']:<8}"
            f" {row['mean_absolute_error']:12.4f} {row['mean_std']:10.4f} {row['spearman']:10.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=["anchors", "report"])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument(
        "--text", type=Path, required=True, help="text cache the target wrote for training prompts"
    )
    parser.add_argument(
        "--heldout", type=Path, required=True, help="text cache of the held-out prompts"
    )
    parser.add_argument("--work", type=Path, default=Path("runs/rungs"))
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--count", type=int, default=10, help="how many of the anchors to train")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    bench = Bench(arguments)
    stages = {"anchors": train_anchors, "report": report}
    stages[arguments.stage](bench)


if __name__ == "__main__":
    sys.exit(main())
