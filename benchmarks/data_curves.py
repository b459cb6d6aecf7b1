"""Acceptance over distinct tokens and epochs: one draft shape trained on ever larger parts of a
target's text.

    python benchmarks/data_curves.py train --target smollm2-135m --text KIND=RUN/text \\
        --heldout KIND=RUN/heldout --work DIR
    python benchmarks/data_curves.py report --work DIR [DIR ...] --json FILE

`train` writes one file per kind of text, size of text and setting: held-out greedy acceptance of
the running mean of the weights at geometric marks, with the tokens seen until then (written ones,
without the prompts) and the training loss. Parts of a text are nested: every larger one holds the
smaller. Every stage resumes. Settings: `base`, and name=value pairs of DistillConfig joined by
commas (`weight_decay=0.1,lr=0.001`). Run it with one thread where the machine is shared.

`report` fits how much repeated tokens are worth (R of `training.curves`) to the `base` curves, one
level a kind and shape, with each kind of text left out in turn; foretells the best look of every
curve from its first FORETOLD_FROM tokens, with what the curves of other kinds share; and lays the
settings beside `base` in pairs over the held-out texts.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from archsearch.architecture.architecture import Architecture
from archsearch.files import read_json, write_json
from archsearch.speedup import clamped, logit
from archsearch.training.curves import (
    AlphaPoint,
    CurvePrior,
    effective_tokens,
    extrapolate,
    fit_prior,
)

HEAD_ROWS = 2048
FIRST_MARK = 8_000
MARK_RATIO = 1.35
FIT_FROM = 24_000  # tokens: before that the learning rate has hardly warmed up
FORETOLD_FROM = 50_000  # tokens: what a curve is foretold from
GRID = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0, 10.0, 15.0, 30.0)


def part_of(sequences: Sequence[Any], written_tokens: int) -> list[Any]:
    """The first texts, in an order that is the same for every size, that hold about
    `written_tokens` written tokens."""
    order = np.random.default_rng(7).permutation(len(sequences))
    chosen, total = [], 0
    for index in order.tolist():
        if total >= written_tokens:
            break
        chosen.append(sequences[index])
        total += int(sequences[index].greedy_ids.shape[0])
    return chosen


def marks(most: int) -> tuple[int, ...]:
    found, mark = [], float(FIRST_MARK)
    while mark < 0.95 * most:
        found.append(int(mark))
        mark *= MARK_RATIO
    return tuple(found)


def settings(text: str) -> dict[str, Any]:
    """`base` or `lr=0.001,weight_decay=0.1`."""
    if text == "base":
        return {}
    pairs = (part.split("=", 1) for part in text.split(","))
    return {name: ast.literal_eval(value) for name, value in pairs}


def train(arguments: argparse.Namespace) -> None:
    from archsearch.models.load import load_target
    from archsearch.models.targets import resolve_target
    from archsearch.text.cache import TextCache

    target = resolve_target(arguments.target)
    loaded = load_target(target, "float32")
    heldouts = dict(pair.split("=", 1) for pair in arguments.heldout)
    for kind, folder in (pair.split("=", 1) for pair in arguments.text):
        cache, heldout = TextCache.load(folder), TextCache.load(heldouts[kind]).sequences
        for layers, size in itertools.product(arguments.layers, arguments.sizes):
            part = cache.part(part_of(cache.sequences, size))
            if part.written_tokens < 0.8 * size:
                continue
            for setting, seed in itertools.product(arguments.settings, arguments.seeds):
                path = (
                    Path(arguments.work[0]) / f"{kind}-{layers}x576-{size}-{setting}-s{seed}.json"
                )
                if not path.exists():
                    row = {"kind": kind, "layers": layers, "setting": setting, "seed": seed}
                    found = row | train_one(
                        loaded,
                        shape_of(target.architecture, layers),
                        part,
                        heldout,
                        setting,
                        seed,
                        arguments,
                    )
                    write_json(path, found)
                    alphas = " ".join(
                        f"{look['epochs']:.1f}:{look['alpha']:.3f}" for look in found["looks"]
                    )
                    print(
                        f"{path.stem}: {found['distinct_tokens']} distinct tokens; alpha by epochs"
                        f" {alphas}",
                        flush=True,
                    )


def shape_of(target: Architecture, layers: int) -> Architecture:
    return Architecture(
        576,
        1536,
        layers,
        9,
        3,
        64,
        target.vocab_size,
        HEAD_ROWS,
        rope_theta=target.rope_theta,
        max_position_embeddings=target.max_position_embeddings,
    )


def train_one(
    loaded: Any,
    arch: Architecture,
    part: Any,
    heldout: Sequence[Any],
    setting: str,
    seed: int,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    import torch

    from archsearch.text.vocabulary import choose_draft_vocab, token_frequencies
    from archsearch.training.distill import DistillConfig, distill
    from archsearch.training.initialise import initialise_draft

    vocabulary = choose_draft_vocab(token_frequencies(part), HEAD_ROWS, loaded[1])
    calibration = torch.stack(
        [s.token_ids[:64] for s in part.sequences if len(s.token_ids) >= 64][:32]
    ).long()
    draft = initialise_draft(
        loaded[0],
        arch,
        draft_token_ids=vocabulary.token_ids,
        calibration_ids=calibration,
        seed=seed,
    )
    epoch = sum(len(s) - 1 for s in part.sequences)
    most = int(min(arguments.tokens, arguments.epochs * epoch))
    fixed = {
        "max_tokens": most,
        "evaluate_at": marks(most),
        "seed": seed,
        "heldout_sequences": 0,
        "anneal": 0.0,
    }
    begin, cpu = time.monotonic(), time.process_time()
    result = distill(draft, part, DistillConfig(**(fixed | settings(setting))), heldout=heldout)
    losses = [(p.tokens, p.value) for p in result.loss_curve]

    def look(point: Any) -> dict[str, Any]:
        near = [value for tokens, value in losses if 0.85 * point.tokens <= tokens <= point.tokens]
        return {
            "tokens": point.tokens,
            "epochs": point.tokens / epoch,
            "alpha": point.value,
            "weights": point.weights,
            "hits": list(point.hits),
            "loss": float(np.mean(near)),
        }

    return {
        "distinct_tokens": part.written_tokens,
        "epoch_tokens": epoch,
        "texts": len(part.sequences),
        "tokens": result.tokens,
        "seconds": time.monotonic() - begin,
        "process_s": time.process_time() - cpu,
        "heldout_tokens": list(result.heldout_tokens),
        "looks": [look(point) for point in result.alpha_curve if point.tokens],
    }


# ---- report


def read_rows(folders: Sequence[str]) -> list[dict[str, Any]]:
    rows = [
        read_json(path, "curve") | {"name": path.stem}
        for folder in folders
        for path in sorted(Path(folder).glob("*.json"))
    ]
    return [row for row in rows if "looks" in row]


def best_look(row: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = max(row["looks"], key=lambda look: look["alpha"])
    return found


def residuals(rows: Sequence[dict[str, Any]], repeats: float) -> tuple[np.ndarray, np.ndarray]:
    """(residuals of logit(alpha) of the best look so far, coefficients: slope, bend, a level for
    each kind and shape)."""
    groups = sorted({(row["kind"], row["layers"]) for row in rows})
    x, y = [], []
    for row in rows:
        best = -math.inf
        for look in row["looks"]:
            best = max(best, logit(clamped(look["alpha"])))
            if look["tokens"] >= FIT_FROM:
                at = math.log(
                    effective_tokens(look["tokens"], row["epoch_tokens"], repeats) / 64_000
                )
                x.append(
                    [
                        at,
                        0.5 * at * at,
                        *(float((row["kind"], row["layers"]) == group) for group in groups),
                    ]
                )
                y.append(best)
    table, values = np.array(x), np.array(y)
    weak = np.zeros(table.shape[1])
    weak[1] = 1.0  # the bend hardly shows over a decade
    found = np.linalg.solve(table.T @ table + np.diag(weak), table.T @ values)
    return values - table @ found, found


def fit_repeats(rows: Sequence[dict[str, Any]]) -> float:
    errors = {
        repeats: float(np.sqrt(np.mean(residuals(rows, repeats)[0] ** 2))) for repeats in GRID
    }
    return min(errors, key=lambda repeats: errors[repeats])


def points_of(row: dict[str, Any], until: float = math.inf) -> list[AlphaPoint]:
    return [
        AlphaPoint(look["tokens"], look["alpha"], False, row["epoch_tokens"])
        for look in row["looks"]
        if look["tokens"] <= until
    ]


def foretold(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """alpha of the best look, from the curve's first tokens and the curves of other kinds of
    text."""
    others = [points_of(other) for other in rows if other["kind"] != row["kind"]]
    prior = fit_prior(others, CurvePrior())
    end = row["looks"][-1]["tokens"]
    said = extrapolate(
        points_of(row, FORETOLD_FROM), end, prior, annealed=False, epoch_tokens=row["epoch_tokens"]
    )
    came = best_look(row)["alpha"]
    return {
        "name": row["name"],
        "foretold": said.value,
        "std": said.std,
        "came": came,
        "stds": (came - said.value) / said.std,
    }


def until(row: dict[str, Any], tokens: int) -> dict[str, Any]:
    """The same curve, cut."""
    return row | {"looks": [look for look in row["looks"] if look["tokens"] <= 1.02 * tokens]}


def paired(row: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """The best look of a setting less that of `base`, with the std over the held-out texts."""
    best, other = best_look(row), best_look(base)
    lengths = np.array(row["heldout_tokens"], dtype=float)
    gap = np.array(best["hits"], dtype=float) - np.array(other["hits"], dtype=float)
    chosen = np.random.default_rng(0).integers(0, len(lengths), (400, len(lengths)))
    std = float((gap[chosen].sum(1) / lengths[chosen].sum(1)).std())
    return {
        "name": row["name"],
        "alpha": best["alpha"],
        "base": other["alpha"],
        "gain": best["alpha"] - other["alpha"],
        "std": std,
    }


def reached(row: dict[str, Any], tokens: float) -> float:
    """alpha of the best look until `tokens`, between looks straight in ln(tokens)."""
    best = np.maximum.accumulate([look["alpha"] for look in row["looks"]])
    return float(
        np.interp(math.log(tokens), [math.log(look["tokens"]) for look in row["looks"]], best)
    )


def splits(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the division of minutes that `data_plan` would choose costs against the best of a grid,
    by the measured curves.

    For several total times and ratios of the two speeds: every size of text takes its part of the
    time to be written, the rest trains; the plan chooses by effective tokens, the curves say what
    each choice reaches. Only where all sizes were trained long enough to know.
    """
    found = []
    for kind, layers in sorted({(row["kind"], row["layers"]) for row in rows}):
        sizes = sorted(
            (row for row in rows if (row["kind"], row["layers"]) == (kind, layers)),
            key=lambda r: r["epoch_tokens"],
        )
        known = min(row["looks"][-1]["tokens"] for row in sizes)
        for ratio, share in itertools.product((4.0, 8.0, 16.0), (0.3, 0.5, 0.7, 0.9)):
            # In training tokens: a written token costs `ratio` of them; the largest text takes
            # `share` of all.
            total = ratio * sizes[-1]["epoch_tokens"] / share
            seen = [min(total - ratio * row["epoch_tokens"], known) for row in sizes]
            if min(seen) < FIRST_MARK:
                continue
            alphas = [reached(row, tokens) for row, tokens in zip(sizes, seen, strict=True)]
            worth = [
                effective_tokens(tokens, row["epoch_tokens"])
                for row, tokens in zip(sizes, seen, strict=True)
            ]
            chosen = alphas[int(np.argmax(worth))]
            found.append(
                {
                    "kind": kind,
                    "layers": layers,
                    "ratio": ratio,
                    "share": share,
                    "alphas": alphas,
                    "chosen": chosen,
                    "lost": 1.0 - chosen / max(alphas),
                }
            )
    return found


def report(arguments: argparse.Namespace) -> None:
    rows = read_rows(arguments.work)
    base = [
        row
        for row in rows
        if row["setting"] == "base" and row["looks"][-1]["tokens"] > 1.5 * FORETOLD_FROM
    ]
    kinds = sorted({row["kind"] for row in base})
    repeats = {
        f"without {kind}": fit_repeats([row for row in base if row["kind"] != kind])
        for kind in kinds
        if len(kinds) > 1
    } | {"all": fit_repeats(base)}
    errors, fit = residuals(base, repeats["all"])
    told = [foretold(row, base) for row in base]
    bases = {(row["kind"], row["layers"], row["distinct_tokens"], row["seed"]): row for row in base}
    settings_found = []
    for row in rows:
        like = bases.get((row["kind"], row["layers"], row["distinct_tokens"], row["seed"]))
        if row["setting"] != "base" and like is not None:
            settings_found.append(paired(row, until(like, row["looks"][-1]["tokens"])))
    data = {
        "repeats": repeats,
        "slope": float(fit[0]),
        "bend": float(fit[1]),
        "rms": float(np.sqrt(np.mean(errors**2))),
        "best_looks": [
            {
                "name": row["name"],
                "distinct_tokens": row["distinct_tokens"],
                "epoch_tokens": row["epoch_tokens"],
                **{key: best_look(row)[key] for key in ("alpha", "epochs", "loss")},
            }
            for row in base
        ],
        "foretold": told,
        "mean_error": float(np.mean([abs(row["came"] - row["foretold"]) for row in told])),
        "settings": settings_found,
        "splits": splits(base),
    }
    print(f"R {repeats}; slope {fit[0]:.3f}, rms of logit(alpha) {data['rms']:.3f}")
    for row in data["best_looks"]:
        print(
            f"{row['name']}: best alpha {row['alpha']:.3f} after {row['epochs']:.1f} epochs of"
            f" {row['epoch_tokens']} tokens"
        )
    for row in told:
        print(
            f"{row['name']}: foretold {row['foretold']:.3f} ± {row['std']:.3f}, came"
            f" {row['came']:.3f} ({row['stds']:+.1f} std)"
        )
    print(f"mean error {data['mean_error']:.3f}")
    for row in settings_found:
        print(
            f"{row['name']}: {row['alpha']:.3f}, base {row['base']:.3f}: {row['gain']:+.4f} ±"
            f" {row['std']:.4f}"
        )
    for kind in kinds:
        lost = [row["lost"] for row in data["splits"] if row["kind"] == kind]
        if lost:
            print(
                f"{kind}: the plan loses {np.median(lost):.1%} of alpha (median of {len(lost)}), at"
                f" most {max(lost):.1%}"
            )
    if arguments.json:
        write_json(Path(arguments.json), data)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=("train", "report"))
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--text", nargs="+", default=[], metavar="KIND=FOLDER")
    parser.add_argument("--heldout", nargs="+", default=[], metavar="KIND=FOLDER")
    parser.add_argument(
        "--work", nargs="+", required=True, help="folder of curves; report reads several"
    )
    parser.add_argument("--json", help="report: write all of it there")
    parser.add_argument(
        "--sizes", nargs="+", type=int, default=[8_000, 16_000, 32_000, 64_000, 128_000]
    )
    parser.add_argument("--layers", nargs="+", type=int, default=[2])
    parser.add_argument("--settings", nargs="+", default=["base"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--tokens", type=int, default=600_000)
    parser.add_argument("--epochs", type=float, default=24.0)
    arguments = parser.parse_args()
    train(arguments) if arguments.stage == "train" else report(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
