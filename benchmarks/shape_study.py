"""What width, depth, attention and vocabulary do to acceptance, measured: many draft shapes trained
alike on the same text.

    python benchmarks/shape_study.py text --plain FILE --work DIR
    python benchmarks/shape_study.py train --work DIR --text KIND=FOLDER --heldout KIND=FOLDER ...
    python benchmarks/shape_study.py report --work DIR [--json FILE] [--plots FILE.png]

`train` writes one file per kind of text, shape and seed: held-out greedy acceptance of the running
mean of the weights after LOOKS tokens. No token is seen twice (but with `--epochs`): shapes are
compared where repetition hides nothing. All shapes see the same texts in the same order. The list
of shapes is `study_shapes()`: hidden size at equal parameters, depth at equal parameters, KV heads,
FFN ratio, window, head rows. Every stage resumes.

`report` fits the prior's own regressors (acceptance/terms.py) to the study with one level a (kind,
seed, tokens), leaves every fold of shapes out in turn, and says how far differences of logit(alpha)
between shapes that were left out miss, beside the same with the terms of the published table alone.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from archsearch.acceptance.estimator import AcceptanceContext
from archsearch.acceptance.prior import trimmed_alpha
from archsearch.acceptance.terms import COEFFICIENTS, load_fit, regressors, shape_terms
from archsearch.architecture import catalogue
from archsearch.architecture.architecture import Architecture
from archsearch.files import read_json, write_json
from archsearch.speedup import clamped, logit
from published_levels import prior_of
from published_table import STUDY_SHAPE

VOCABULARY = 49_152  # SmolLM2's
HEAD_ROWS = 2048
LOOKS = (32_000, 64_000, 128_000, 256_000, 512_000, 1_000_000, 2_000_000)
HELDOUT_TEXTS = 40
HEAD_DIM = 64
TERMS: Final = (
    "size",
    "depth",
    "single_layer",
    "narrow",
    "overwide",
    "grouped",
    "single_kv_head",
    "cut_by_window",
    "window",
)
SHAPE_COLUMNS: Final = (*STUDY_SHAPE, "window_pattern", "sliding_window")
DOMAIN_OF: Final = {
    "maths": "narrow",
    "plain": "completion",
    "manuals": "completion",
}  # a kind of text, in the prior's words
DRAWN = (64_000, 128_000)  # tokens
FOLDS = 5
NOISE = 0.04  # logit: one look of one seed; assumed until a second seed says more


def shape(
    hidden: int,
    layers: int,
    ffn: int,
    kv_heads: int | None = None,
    *,
    rows: int = HEAD_ROWS,
    windows: tuple[str, int] | None = None,
) -> Architecture:
    """`kv_heads`: a third of the heads where that is whole, else all. `windows`: (pattern,
    tokens)."""
    heads = hidden // HEAD_DIM
    usual = heads // 3 if heads % 3 == 0 else heads
    pattern, window = windows or ("L", None)
    return Architecture(
        hidden,
        ffn,
        layers,
        heads,
        kv_heads or usual,
        HEAD_DIM,
        VOCABULARY,
        rows,
        window_pattern=pattern,
        sliding_window=window,
        max_position_embeddings=8192,
    )


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
    kv = [shape(576, 2, 1536, n) for n in (9, 3, 1)] + [
        shape(384, 4, 1024, n) for n in (6, 3, 2, 1)
    ]
    kv += [shape(768, 1, 2048, n) for n in (12, 4, 1)] + [shape(576, 4, 768, n) for n in (9, 3, 1)]
    ffn = [shape(576, 2, f) for f in (144, 384, 768, 1536, 3072, 4608)] + [
        shape(384, 2, f) for f in (256, 1024, 2048)
    ]
    ffn += [shape(576, 1, f) for f in (768, 1536, 4608)]
    windows = [shape(576, 2, 1536, windows=("S", tokens)) for tokens in (8, 16, 32, 64, 128)]
    windows += [shape(576, 2, 1536, windows=("SL", tokens)) for tokens in (8, 32)] + [
        shape(384, 4, 1024, windows=("S", 32))
    ]
    head = [shape(576, 2, 1536, rows=rows) for rows in (512, 1024, 2048, 4096, 8192)]
    groups = {
        "width": [filled(*one) for one in width],
        "depth": [filled(*one) for one in depth],
        "kv": kv,
        "ffn": ffn,
        "window": windows,
        "head": head,
    }
    return {group: {name_of(arch): arch for arch in shapes} for group, shapes in groups.items()}


def name_of(arch: Architecture) -> str:
    name = f"{arch.num_hidden_layers}x{arch.hidden_size}-f{arch.intermediate_size}"
    name += f"-kv{arch.num_key_value_heads}"
    window = "" if arch.sliding_window is None else f"-{arch.window_pattern}{arch.sliding_window}"
    return f"{name}-h{arch.head_rows}{window}"


def chosen_shapes(groups: list[str] | None) -> dict[str, Architecture]:
    """All shapes, each once, the groups dealt out in turn so that an interrupted study is a
    balanced one."""
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
    from archsearch.text.encode import encode_text
    from archsearch.text.prompt_files import read_texts

    loaded = load_target(resolve_target(arguments.target), arguments.dtype)
    texts = ["\n\n".join(read_texts(Path(arguments.plain)))]
    tokens = loaded[1](texts[0], add_special_tokens=False)["input_ids"]
    most, kept = arguments.tokens + 256, 256 * HELDOUT_TEXTS
    for name, ids in (
        ("heldout", tokens[-kept:]),
        ("text", tokens[: min(most, len(tokens) - kept)]),
    ):
        strings = [loaded[1].decode(ids[start : start + 256]) for start in range(0, len(ids), 256)]
        cache = encode_text(
            loaded[0], loaded[1], strings, cache_dir=Path(arguments.work[0]) / "plain" / name
        )
        print(f"{name}: {cache.written_tokens} tokens", flush=True)


def train(arguments: argparse.Namespace) -> None:
    from archsearch.models.load import load_target
    from archsearch.models.targets import resolve_target
    from archsearch.text.cache import TextCache

    loaded = load_target(resolve_target(arguments.target), "float32")
    heldouts = dict(pair.split("=", 1) for pair in arguments.heldout)
    for kind, folder in (pair.split("=", 1) for pair in arguments.text):
        cache, heldout = (
            TextCache.load(folder),
            TextCache.load(heldouts[kind]).sequences[:HELDOUT_TEXTS],
        )
        for seed in arguments.seeds:
            for name, arch in chosen_shapes(arguments.group).items():
                path = Path(arguments.work[0]) / f"{kind}-s{seed}-{name}.json"
                if not path.exists() and (not arguments.only or name in arguments.only):
                    found = train_one(
                        loaded, arch, cache, heldout, seed, arguments.tokens, arguments.epochs
                    )
                    write_json(
                        path,
                        {
                            "kind": kind,
                            "seed": seed,
                            "name": name,
                            "shape": arch.to_dict(),
                            **found,
                        },
                    )
                    looks = " ".join(
                        f"{look['tokens'] // 1000}k:{look['alpha']:.4f}" for look in found["looks"]
                    )
                    print(f"{path.stem}: {looks} ({found['seconds']:.0f} s)", flush=True)


def train_one(
    loaded: Any, arch: Architecture, cache: Any, heldout: Any, seed: int, tokens: int, epochs: float
) -> dict[str, Any]:
    import torch

    from archsearch.text.vocabulary import choose_draft_vocab, token_frequencies
    from archsearch.training.distill import DistillConfig, distill
    from archsearch.training.initialise import initialise_draft

    vocabulary = choose_draft_vocab(token_frequencies(cache), arch.head_rows, loaded[1])
    proposed = torch.tensor(sorted(vocabulary.token_ids))
    coverage = float(
        torch.isin(torch.cat([s.greedy_ids for s in heldout]), proposed).float().mean()
    )
    calibration = torch.stack(
        [s.token_ids[:64] for s in cache.sequences if len(s.token_ids) >= 64][:32]
    ).long()
    draft = initialise_draft(
        loaded[0],
        arch,
        draft_token_ids=vocabulary.token_ids,
        calibration_ids=calibration,
        seed=seed,
    )
    epoch = sum(len(s) - 1 for s in cache.sequences)
    most = min(tokens, int(epochs * epoch))  # nothing twice unless asked
    looks = tuple(look for look in LOOKS if look < 0.98 * most)
    fixed = {
        "max_tokens": most,
        "evaluate_at": looks,
        "seed": seed,
        "heldout_sequences": 0,
        "anneal": 0.0,
    }
    begin, cpu = time.monotonic(), time.process_time()
    result = distill(draft, cache, DistillConfig(**fixed), heldout=heldout)
    return {
        "coverage": coverage,
        "distinct_tokens": epoch,
        "tokens": result.tokens,
        "seconds": time.monotonic() - begin,
        "process_s": time.process_time() - cpu,
        "heldout_tokens": list(result.heldout_tokens),
        "looks": [
            {"tokens": p.tokens, "alpha": p.value, "weights": p.weights, "hits": list(p.hits)}
            for p in result.alpha_curve
        ],
    }


# ---- report


def read_rows(folders: Sequence[str]) -> list[dict[str, Any]]:
    """One row a look: its condition (kind, seed, tokens), shape, terms, and logit(alpha) as with a
    full head."""
    target = catalogue.load("smollm2-135m").architecture
    found = []
    for path in (path for folder in folders for path in sorted(Path(folder).glob("*.json"))):
        row = read_json(path, "row of the study")
        if "looks" not in row:
            continue
        arch = Architecture.from_dict(row["shape"])
        heldout = row["heldout_tokens"]
        context = AcceptanceContext(target, domain="narrow", context_len=round(np.mean(heldout)))
        for look in row["looks"]:
            if look["tokens"]:
                terms = shape_terms(arch, replace(context, trained_tokens=look["tokens"]))
                mark = min(LOOKS, key=lambda at, seen=look["tokens"]: abs(math.log(at / seen)))
                found.append(
                    {
                        "kind": row["kind"],
                        "seed": row["seed"],
                        "tokens": mark,
                        "name": row["name"],
                        "arch": arch,
                        "alpha": look["alpha"],
                        "y": logit(clamped(full_head(look["alpha"], row["coverage"]))),
                        "x": regressors(terms, TERMS),
                        "context_len": context.context_len,
                        "full_alpha": full_head(look["alpha"], row["coverage"]),
                    }
                )
    return found


def full_head(alpha: float, coverage: float) -> float:
    """alpha with every token to propose, by the prior's rule."""
    grid = np.linspace(alpha, 0.99, 400)
    return float(grid[int(np.argmin([abs(trimmed_alpha(a, coverage) - alpha) for a in grid]))])


def condition(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["kind"], row["seed"], row["tokens"]


def fit(rows: Sequence[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """(coefficients, stds) of TERMS: ridge towards zero with the prior's width, a free level for
    each condition."""
    conditions = sorted({condition(row) for row in rows})
    x = np.array(
        [[*row["x"], *(float(condition(row) == one) for one in conditions)] for row in rows]
    )
    penalty = np.diag(
        [(NOISE / prior_of(name).std) ** 2 for name in TERMS] + [1e-9] * len(conditions)
    )
    information = x.T @ x + penalty
    found = np.linalg.solve(information, x.T @ np.array([row["y"] for row in rows]))
    left = np.array([row["y"] for row in rows]) - x @ found
    stds = np.sqrt(np.diag(np.linalg.inv(information))) * max(float(left.std()), NOISE)
    return found[: len(TERMS)], stds[: len(TERMS)]


def misses(rows: Sequence[dict[str, Any]], said: np.ndarray) -> tuple[list[float], list[float]]:
    """(errors of differences between the shapes of one condition, Spearman's rank correlation in
    each condition)."""
    from scipy.stats import spearmanr

    gaps, ranks = [], []
    for one in sorted({condition(row) for row in rows}):
        chosen = [i for i, row in enumerate(rows) if condition(row) == one]
        y, guess = np.array([rows[i]["y"] for i in chosen]), said[chosen]
        gaps += [
            abs((y[i] - y[j]) - (guess[i] - guess[j]))
            for i, j in itertools.combinations(range(len(chosen)), 2)
        ]
        if len(chosen) > 4:
            ranks.append(float(spearmanr(y, guess).statistic))
    return gaps, ranks


def left_out(rows: Sequence[dict[str, Any]]) -> np.ndarray:
    """What the other folds of shapes say of each row."""
    names = sorted({row["name"] for row in rows})
    order = np.random.default_rng(3).permutation(len(names))
    fold = {names[place]: number % FOLDS for number, place in enumerate(order.tolist())}
    said = np.zeros(len(rows))
    for number in range(FOLDS):
        found, _ = fit([row for row in rows if fold[row["name"]] != number])
        for i, row in enumerate(rows):
            if fold[row["name"]] == number:
                said[i] = row["x"] @ found
    return said


def seeds_apart(rows: Sequence[dict[str, Any]]) -> list[float]:
    """Differences between the seeds of a shape, each seed's own level taken off."""
    levels: dict[Any, list[float]] = {}
    pairs = {}
    for row in rows:
        pairs[(row["kind"], row["tokens"], row["name"], row["seed"])] = row["y"]
    for (kind, tokens, name, seed), y in pairs.items():
        if seed == 0 and (kind, tokens, name, 1) in pairs:
            levels.setdefault((kind, tokens), []).append(pairs[(kind, tokens, name, 1)] - y)
    return [gap - float(np.mean(group)) for group in levels.values() for gap in group]


def report(arguments: argparse.Namespace) -> None:
    rows = read_rows(arguments.work)
    table = load_fit()
    published = np.array([table.mean[COEFFICIENTS.index(name)] for name in TERMS])
    published_std = np.array(
        [math.sqrt(table.covariance[COEFFICIENTS.index(n), COEFFICIENTS.index(n)]) for n in TERMS]
    )
    found, stds = fit(rows)
    by_kind = {
        kind: fit([row for row in rows if row["kind"] == kind])[0]
        for kind in sorted({row["kind"] for row in rows})
    }
    own, table_says = (
        misses(rows, left_out(rows)),
        misses(rows, np.array([row["x"] @ published for row in rows])),
    )
    nothing = misses(rows, np.zeros(len(rows)))
    apart = seeds_apart(rows)
    data = {
        "shapes": len({row["name"] for row in rows}),
        "looks": len(rows),
        "conditions": sorted({condition(row) for row in rows}),
        "terms": {
            name: {
                "study": float(found[i]),
                "std": float(stds[i]),
                "table": float(published[i]),
                "table_std": float(published_std[i]),
                **{kind: float(c[i]) for kind, c in by_kind.items()},
            }
            for i, name in enumerate(TERMS)
        },
        "left_out": {"difference_mae": float(np.mean(own[0])), "spearman": float(np.mean(own[1]))},
        "table_alone": {
            "difference_mae": float(np.mean(table_says[0])),
            "spearman": float(np.mean(table_says[1])),
        },
        "no_difference_mae": float(np.mean(nothing[0])),
        "seed_std": float(np.std(apart) / math.sqrt(2)) if apart else None,
        "rows": [
            {key: row[key] for key in ("kind", "seed", "tokens", "name", "alpha", "y")}
            for row in rows
        ],
    }
    print(
        f"{data['shapes']} shapes, {data['looks']} looks in {len(data['conditions'])} conditions"
        " (text, seed, tokens)"
    )
    for name, row in data["terms"].items():
        kinds = ", ".join(f"{kind} {row[kind]:+.3f}" for kind in by_kind)
        said = f"study {row['study']:+.3f} ± {row['std']:.3f} ({kinds})"
        print(f"  {name:16s}{said}   stored fit {row['table']:+.3f} ± {row['table_std']:.3f}")
    print(
        f"differences of shapes left out: {data['left_out']['difference_mae']:.3f}, Spearman"
        f" {data['left_out']['spearman']:.2f}"
    )
    print(
        f"  by the stored fit: {data['table_alone']['difference_mae']:.3f}, Spearman"
        f" {data['table_alone']['spearman']:.2f}; no difference: {data['no_difference_mae']:.3f};"
        f" between seeds: {data['seed_std']}"
    )
    if arguments.json:
        write_json(Path(arguments.json), data)
    if arguments.table:
        write_table(rows, Path(arguments.table), max(data["seed_std"] or NOISE, NOISE))
    if arguments.plots:
        draw(rows, Path(arguments.plots))


def write_table(rows: Sequence[dict[str, Any]], path: Path, std: float) -> None:
    """The rows that the prior is fitted with (data/shape_study.csv): first and last look of
    drafts with the usual head."""
    columns = ("domain", "target", "seed", "tokens", "context_len", *SHAPE_COLUMNS, "alpha", "std")
    looks: dict[tuple[str, int, str], dict[int, dict[str, Any]]] = {}
    for row in rows:
        if row["arch"].head_rows == HEAD_ROWS:
            looks.setdefault((row["kind"], row["seed"], row["name"]), {})[row["tokens"]] = row
    lines = [
        (
            "# Drafts of many shapes for one target, trained alike on one pass over the same texts"
            " (benchmarks/shape_study.py; rows"
        ),
        (
            "# and page: benchmarks/results/2026-11-22-shapes). alpha: greedy agreement on held-out"
            " text, as with a full head;"
        ),
        (
            "# tokens: seen in training, none twice; context_len: mean length of the held-out"
            " texts; std: assumed."
        ),
        ",".join(columns),
    ]
    chosen = [
        (key, of[tokens])
        for key, of in sorted(looks.items())
        for tokens in sorted({min(of), max(of)})
    ]
    for (kind, seed, _), row in chosen:
        shape_values = row["arch"].to_dict() | {"sliding_window": row["arch"].sliding_window or ""}
        values = {
            "domain": DOMAIN_OF[kind],
            "target": "smollm2-135m",
            "seed": seed,
            "tokens": row["tokens"],
            "std": round(std, 3),
            "context_len": row["context_len"],
            "alpha": round(row["full_alpha"], 4),
            **shape_values,
        }
        lines.append(",".join(str(values[name]) for name in columns))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A panel for each question: alpha of seed 0 after DRAWN tokens, by kind of text; lines of one
    shape are left out."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter, NullLocator

    drawn = {
        (row["kind"], row["tokens"], row["name"]): row["alpha"]
        for row in rows
        if row["seed"] == 0 and row["tokens"] in DRAWN
    }
    axes_of = {
        "width": ("hidden size", lambda a: a.hidden_size),
        "depth": ("layers", lambda a: a.num_hidden_layers),
        "kv": ("KV heads / heads", lambda a: a.num_key_value_heads / a.num_attention_heads),
        "ffn": ("FFN / hidden size", lambda a: a.intermediate_size / a.hidden_size),
        "window": ("window, tokens", lambda a: a.sliding_window or 256),
        "head": ("head rows", lambda a: a.head_rows),
    }
    figure, panels = plt.subplots(2, 3, figsize=(13, 9.5), constrained_layout=True)
    for panel, (group, shapes) in zip(panels.flat, study_shapes().items(), strict=True):
        label, value = axes_of[group]
        lines: dict[str, list[tuple[float, float]]] = {}
        for (kind, tokens, name), alpha in drawn.items():
            if name in shapes:
                line = f"{kind}, {same_but(group, shapes[name])}, {tokens // 1000}k tokens"
                lines.setdefault(line, []).append((value(shapes[name]), alpha))
        lines = {name: points for name, points in lines.items() if len(points) > 1}
        for name, points in sorted(lines.items()):
            panel.plot(
                *zip(*sorted(points), strict=True),
                marker="o",
                markersize=3.5,
                linewidth=1,
                label=name,
            )
        ticks = sorted({x for points in lines.values() for x, _ in points})
        panel.set(xlabel=label, ylabel="held-out alpha", xscale="log", title=group, xticks=ticks)
        panel.set_xticks(ticks, [f"{tick:.4g}" for tick in ticks], fontsize=7, rotation=45)
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_minor_formatter(NullFormatter())
        if lines:
            panel.legend(
                fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=2, frameon=False
            )
    figure.savefig(path, dpi=110)


def same_but(group: str, arch: Architecture) -> str:
    """What the shapes of one line have in common."""
    from archsearch.architecture.counts import body_parameters

    body = f"{round(body_parameters(arch) / 1e6)}M"
    if group == "width":
        return f"{arch.num_hidden_layers} layers, {body}"
    if group == "depth":
        return f"hidden {arch.hidden_size}, {body}"
    pattern = f" {arch.window_pattern}" if group == "window" and arch.sliding_window else ""
    return f"{arch.num_hidden_layers}x{arch.hidden_size}{pattern}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=("text", "train", "report"))
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--plain", help="text: the file to read")
    parser.add_argument("--text", nargs="+", default=[], metavar="KIND=FOLDER")
    parser.add_argument("--heldout", nargs="+", default=[], metavar="KIND=FOLDER")
    parser.add_argument(
        "--work", nargs="+", required=True, help="folder of results; report reads several"
    )
    parser.add_argument(
        "--group", nargs="+", choices=("width", "depth", "kv", "ffn", "window", "head")
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="train: these shapes")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--tokens", type=int, default=64_000)
    parser.add_argument(
        "--epochs", type=float, default=1.0, help="train: at most so often through the text"
    )
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16"),
        help="text: what the target reads it in",
    )
    parser.add_argument("--json", help="report: write all of it there")
    parser.add_argument("--table", help="report: write the rows of the prior's table there")
    parser.add_argument("--plots", help="report: draw alpha by each question there (.png)")
    arguments = parser.parse_args()
    {"text": read_plain, "train": train, "report": report}[arguments.stage](arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
