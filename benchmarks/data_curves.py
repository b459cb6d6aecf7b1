"""Acceptance over distinct tokens and epochs: one draft shape trained on ever larger parts of a target's text.

    python benchmarks/data_curves.py train --target smollm2-135m --text KIND=RUN/text --heldout KIND=RUN/heldout --work DIR
    python benchmarks/data_curves.py fit --work DIR --json FILE

`train` writes one file per kind of text, size of text and setting: held-out greedy acceptance of the running mean of the weights
at geometric marks, with the tokens seen until then (written ones, without the prompts) and the training loss. Parts of a text are
nested: every larger one holds the smaller. Every stage resumes. Settings: `base`, and name=value pairs of DistillConfig joined by
commas (`weight_decay=0.1,lr=0.001`). Run it with one thread where the machine is shared.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from archsearch.architecture.architecture import Architecture
from archsearch.files import write_json

HEAD_ROWS = 2048
FIRST_MARK = 8_000
MARK_RATIO = 1.35


def part_of(sequences: Sequence[Any], written_tokens: int) -> list[Any]:
    """The first texts, in an order that is the same for every size, that hold about `written_tokens` written tokens."""
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
                path = Path(arguments.work) / f"{kind}-{layers}x576-{size}-{setting}-s{seed}.json"
                if not path.exists():
                    row = {"kind": kind, "layers": layers, "setting": setting, "seed": seed}
                    found = row | train_one(
                        loaded, shape_of(target.architecture, layers), part, heldout, setting, seed, arguments
                    )
                    write_json(path, found)
                    alphas = " ".join(f"{look['epochs']:.1f}:{look['alpha']:.3f}" for look in found["looks"])
                    print(f"{path.stem}: {found['distinct_tokens']} distinct tokens; alpha by epochs {alphas}", flush=True)


def shape_of(target: Architecture, layers: int) -> Architecture:
    return Architecture(
        576, 1536, layers, 9, 3, 64, target.vocab_size, HEAD_ROWS, rope_theta=target.rope_theta,
        max_position_embeddings=target.max_position_embeddings,
    )  # fmt: skip


def train_one(
    loaded: Any, arch: Architecture, part: Any, heldout: Sequence[Any], setting: str, seed: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    import torch

    from archsearch.text.vocabulary import choose_draft_vocab, token_frequencies
    from archsearch.training.distill import DistillConfig, distill
    from archsearch.training.initialise import initialise_draft

    vocabulary = choose_draft_vocab(token_frequencies(part), HEAD_ROWS, loaded[1])
    calibration = torch.stack([s.token_ids[:64] for s in part.sequences if len(s.token_ids) >= 64][:32]).long()
    draft = initialise_draft(loaded[0], arch, draft_token_ids=vocabulary.token_ids, calibration_ids=calibration, seed=seed)
    epoch = sum(len(s) - 1 for s in part.sequences)
    most = int(min(arguments.tokens, arguments.epochs * epoch))
    fixed = {"max_tokens": most, "evaluate_at": marks(most), "seed": seed, "heldout_sequences": 0, "anneal": 0.0}
    begin, cpu = time.monotonic(), time.process_time()
    result = distill(draft, part, DistillConfig(**(fixed | settings(setting))), heldout=heldout)
    losses = [(p.tokens, p.value) for p in result.loss_curve]

    def look(point: Any) -> dict[str, Any]:
        near = [value for tokens, value in losses if 0.85 * point.tokens <= tokens <= point.tokens]
        return {
            "tokens": point.tokens, "epochs": point.tokens / epoch, "alpha": point.value, "weights": point.weights,
            "hits": list(point.hits), "loss": float(np.mean(near)),
        }  # fmt: skip

    return {
        "distinct_tokens": part.written_tokens, "epoch_tokens": epoch, "texts": len(part.sequences), "tokens": result.tokens,
        "seconds": time.monotonic() - begin, "process_s": time.process_time() - cpu,
        "heldout_tokens": list(result.heldout_tokens), "looks": [look(point) for point in result.alpha_curve if point.tokens],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("train",))
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--text", nargs="+", default=[], metavar="KIND=FOLDER")
    parser.add_argument("--heldout", nargs="+", default=[], metavar="KIND=FOLDER")
    parser.add_argument("--work", required=True)
    parser.add_argument("--sizes", nargs="+", type=int, default=[8_000, 16_000, 32_000, 64_000, 128_000])
    parser.add_argument("--layers", nargs="+", type=int, default=[2])
    parser.add_argument("--settings", nargs="+", default=["base"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--tokens", type=int, default=600_000)
    parser.add_argument("--epochs", type=float, default=24.0)
    arguments = parser.parse_args()
    train(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
