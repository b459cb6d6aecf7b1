"""What width, depth, attention and vocabulary do to acceptance, measured: many draft shapes trained alike on the same text.

    python benchmarks/shape_study.py text --plain FILE --work DIR            (the target reads plain text: kind `plain`)
    python benchmarks/shape_study.py train --work DIR --text KIND=FOLDER --heldout KIND=FOLDER [--group width ...] [--seeds 0 1]
    python benchmarks/shape_study.py report --work DIR [--json FILE] [--plots DIR]

`train` writes one file per kind of text, shape and seed: held-out greedy acceptance of the running mean of the weights after
LOOKS tokens. No token is seen twice: shapes are compared where repetition hides nothing. All shapes see the same texts in the
same order. The list of shapes is `study_shapes()`: hidden size at equal parameters, depth at equal parameters, KV heads, FFN
ratio, window, head rows. Every stage resumes.

`report` fits the prior's own regressors (acceptance/terms.py) to the study with one level a (kind, seed, tokens), leaves every
fold of shapes out in turn, and says how far differences of logit(alpha) between shapes that were left out miss, beside the same
with the terms of the published table alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from archsearch.architecture.architecture import Architecture
from archsearch.files import write_json

VOCABULARY = 49_152  # SmolLM2's
HEAD_ROWS = 2048
LOOKS = (32_000, 64_000, 128_000, 256_000)
HELDOUT_TEXTS = 40
HEAD_DIM = 64


def shape(
    hidden: int,
    layers: int,
    ffn: int,
    kv_heads: int | None = None,
    *,
    rows: int = HEAD_ROWS,
    windows: tuple[str, int] | None = None,
) -> Architecture:
    """`kv_heads`: a third of the heads where that is whole, else all. `windows`: (pattern, tokens)."""
    heads = hidden // HEAD_DIM
    usual = heads // 3 if heads % 3 == 0 else heads
    pattern, window = windows or ("L", None)
    return Architecture(
        hidden, ffn, layers, heads, kv_heads or usual, HEAD_DIM, VOCABULARY, rows, window_pattern=pattern, sliding_window=window,
        max_position_embeddings=8192,
    )  # fmt: skip


def filled(hidden: int, layers: int, body: float) -> Architecture:
    """The shape of this width and depth whose FFN fills up the body's parameters."""
    bare = shape(hidden, layers, 1)
    attention = 2 * hidden * (bare.q_size + bare.kv_size)
    ffn = round((body / layers - attention) / (3 * hidden) / 16) * 16
    return bare.replace(intermediate_size=max(ffn, 16))


def study_shapes() -> dict[str, dict[str, Architecture]]:
    """Shapes by the question that they answer."""
    width = [(h, 2, 4e6) for h in (192, 384, 576)] + [(h, 2, 8e6) for h in (384, 576, 768, 960)]
    width += [(h, 2, 16e6) for h in (576, 768, 1152)] + [(h, 1, 4e6) for h in (192, 384, 576, 768)]
    width += [(h, 1, 8e6) for h in (384, 576, 1152)] + [(h, 4, 8e6) for h in (256, 384, 576)]
    depth = [(576, n, 8e6) for n in (1, 2, 3, 4, 6)] + [(576, n, 4e6) for n in (1, 2, 3, 4)]
    depth += [(576, n, 16e6) for n in (1, 2, 4, 8)] + [(768, n, 16e6) for n in (1, 2, 4)]
    depth += [(384, n, 4e6) for n in (1, 2, 4, 6, 8)]
    kv = [shape(576, 2, 1536, n) for n in (9, 3, 1)] + [shape(384, 4, 1024, n) for n in (6, 3, 2, 1)]
    kv += [shape(768, 1, 2048, n) for n in (12, 4, 1)] + [shape(576, 4, 768, n) for n in (9, 3, 1)]
    ffn = [shape(576, 2, f) for f in (144, 384, 768, 1536, 3072, 4608)] + [shape(384, 2, f) for f in (256, 1024, 2048)]
    ffn += [shape(576, 1, f) for f in (768, 1536, 4608)]
    windows = [shape(576, 2, 1536, windows=("S", tokens)) for tokens in (8, 16, 32, 64, 128)]
    windows += [shape(576, 2, 1536, windows=("SL", tokens)) for tokens in (8, 32)] + [shape(384, 4, 1024, windows=("S", 32))]
    head = [shape(576, 2, 1536, rows=rows) for rows in (512, 1024, 2048, 4096, 8192)]
    groups = {
        "width": [filled(*one) for one in width], "depth": [filled(*one) for one in depth], "kv": kv, "ffn": ffn,
        "window": windows, "head": head,
    }  # fmt: skip
    return {group: {name_of(arch): arch for arch in shapes} for group, shapes in groups.items()}


def name_of(arch: Architecture) -> str:
    name = f"{arch.num_hidden_layers}x{arch.hidden_size}-f{arch.intermediate_size}-kv{arch.num_key_value_heads}"
    window = "" if arch.sliding_window is None else f"-{arch.window_pattern}{arch.sliding_window}"
    return f"{name}-h{arch.head_rows}{window}"


def chosen_shapes(groups: list[str] | None) -> dict[str, Architecture]:
    """All shapes, each once, the groups dealt out in turn so that an interrupted study is a balanced one."""
    found = study_shapes()
    piles = [list(found[group].items()) for group in groups or found]
    shapes: dict[str, Architecture] = {}
    while any(piles):
        for pile in piles:
            if pile:
                name, arch = pile.pop(len(pile) // 2)
                shapes.setdefault(name, arch)
    return shapes


# ---- text and training


def read_plain(arguments: argparse.Namespace) -> None:
    """The target's view of a plain text, split into training and held-out text at the end."""
    from archsearch.models.load import load_target
    from archsearch.models.targets import resolve_target
    from archsearch.text.encode import encode_text, read_texts

    loaded = load_target(resolve_target(arguments.target), "float32")
    texts = ["\n\n".join(read_texts(Path(arguments.plain)))]
    tokens = loaded[1](texts[0], add_special_tokens=False)["input_ids"]
    most, kept = arguments.tokens + 256, 256 * HELDOUT_TEXTS
    for name, ids in (("heldout", tokens[-kept:]), ("text", tokens[: min(most, len(tokens) - kept)])):
        strings = [loaded[1].decode(ids[start : start + 256]) for start in range(0, len(ids), 256)]
        cache = encode_text(loaded[0], loaded[1], strings, cache_dir=Path(arguments.work[0]) / "plain" / name)
        print(f"{name}: {cache.written_tokens} tokens", flush=True)


def train(arguments: argparse.Namespace) -> None:
    from archsearch.models.load import load_target
    from archsearch.models.targets import resolve_target
    from archsearch.text.cache import TextCache

    loaded = load_target(resolve_target(arguments.target), "float32")
    heldouts = dict(pair.split("=", 1) for pair in arguments.heldout)
    for kind, folder in (pair.split("=", 1) for pair in arguments.text):
        cache, heldout = TextCache.load(folder), TextCache.load(heldouts[kind]).sequences[:HELDOUT_TEXTS]
        for seed in arguments.seeds:
            for name, arch in chosen_shapes(arguments.group).items():
                path = Path(arguments.work[0]) / f"{kind}-s{seed}-{name}.json"
                if not path.exists():
                    found = train_one(loaded, arch, cache, heldout, seed, arguments.tokens)
                    write_json(path, {"kind": kind, "seed": seed, "name": name, "shape": arch.to_dict(), **found})
                    looks = " ".join(f"{look['tokens'] // 1000}k:{look['alpha']:.4f}" for look in found["looks"])
                    print(f"{path.stem}: {looks} ({found['seconds']:.0f} s)", flush=True)


def train_one(loaded: Any, arch: Architecture, cache: Any, heldout: Any, seed: int, tokens: int) -> dict[str, Any]:
    import torch

    from archsearch.text.vocabulary import choose_draft_vocab, token_frequencies
    from archsearch.training.distill import DistillConfig, distill
    from archsearch.training.initialise import initialise_draft

    vocabulary = choose_draft_vocab(token_frequencies(cache), arch.head_rows, loaded[1])
    calibration = torch.stack([s.token_ids[:64] for s in cache.sequences if len(s.token_ids) >= 64][:32]).long()
    draft = initialise_draft(loaded[0], arch, draft_token_ids=vocabulary.token_ids, calibration_ids=calibration, seed=seed)
    epoch = sum(len(s) - 1 for s in cache.sequences)
    most = min(tokens, epoch)  # nothing twice
    looks = tuple(look for look in LOOKS if look < 0.98 * most)
    fixed = {"max_tokens": most, "evaluate_at": looks, "seed": seed, "heldout_sequences": 0, "anneal": 0.0}
    begin, cpu = time.monotonic(), time.process_time()
    result = distill(draft, cache, DistillConfig(**fixed), heldout=heldout)
    return {
        "distinct_tokens": epoch, "tokens": result.tokens, "seconds": time.monotonic() - begin,
        "process_s": time.process_time() - cpu, "heldout_tokens": list(result.heldout_tokens),
        "looks": [{"tokens": p.tokens, "alpha": p.value, "weights": p.weights, "hits": list(p.hits)}
                  for p in result.alpha_curve],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("text", "train", "report"))
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--plain", help="text: the file to read")
    parser.add_argument("--text", nargs="+", default=[], metavar="KIND=FOLDER")
    parser.add_argument("--heldout", nargs="+", default=[], metavar="KIND=FOLDER")
    parser.add_argument("--work", nargs="+", required=True, help="folder of results; report reads several")
    parser.add_argument("--group", nargs="+", choices=("width", "depth", "kv", "ffn", "window", "head"))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--tokens", type=int, default=64_000)
    arguments = parser.parse_args()
    {"text": read_plain, "train": train}[arguments.stage](arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
