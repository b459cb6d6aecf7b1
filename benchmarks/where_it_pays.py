"""Where verification is cheap in llama.cpp: tokens verified per pass-time, by size of the target
and precision.

Passes over several tokens of targets with random weights, measured as `archsearch profile --engine
llama.cpp --quick` measures them. On a quiet machine, with as many threads as will serve:

    python benchmarks/where_it_pays.py OUTPUT.csv [SIZE ...] [--dtype q8_0] [--threads 2]
    python benchmarks/where_it_pays.py OUTPUT.csv --picture docs/pictures/where-it-pays.png

SIZE: of SHAPES (default: all). A row is a size, precision, number of threads and of tokens: seconds
of the pass, and tokens that it verifies in the time of a pass over one.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from pathlib import Path

from archsearch.architecture.architecture import Architecture
from archsearch.models.drafts import build_draft, save_draft
from archsearch.models.targets import resolve_target
from archsearch.pipeline.profile import profile_device
from archsearch.pipeline.profile.run import ProfileRequest
from archsearch.profiles import PassShape, Profile
from archsearch.search.space import load_space

SHAPES = {  # hidden size, FFN, layers, query heads, KV heads, head size, vocabulary
    "tiny": Architecture(64, 128, 2, 2, 2, 32, 512),
    "135m": Architecture(576, 1536, 30, 9, 3, 64, 49152),
    "360m": Architecture(960, 2560, 32, 15, 5, 64, 49152),
    "1b": Architecture(2048, 8192, 16, 32, 8, 64, 128256),
    "3b": Architecture(3072, 8192, 28, 24, 8, 128, 128256),
}
"""Of SmolLM2-135M and 360M, Llama-3.2-1B and 3B (their config.json); `tiny` for a try."""


def main() -> None:
    """Measure every size and write the rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("sizes", nargs="*", default=[name for name in SHAPES if name != "tiny"])
    parser.add_argument("--dtype", default="q8_0")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--picture", type=Path, help="draw what was measured")
    asked = parser.parse_args()
    if asked.picture:
        draw(asked.output, asked.picture)
        return
    with asked.output.open("a", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        if not file.tell():
            names = ["size", "dtype", "threads", "context", "tokens", "seconds", "verified"]
            rows.writerow(names)
        for size in asked.sizes:
            for row in measured(size, asked.dtype, asked.threads):
                rows.writerow([size, asked.dtype, asked.threads, *row])
                file.flush()


def draw(table: Path, picture: Path) -> None:
    """Tokens verified per pass-time over tokens in the pass; a panel for each precision and number
    of threads."""
    import matplotlib.pyplot as plt
    import pandas as pd

    rows = pd.read_csv(table).groupby(["dtype", "threads"], sort=False)
    figure, axes = plt.subplots(1, len(rows), figsize=(4.2 * len(rows), 3.8), squeeze=False)
    for axis, ((dtype, threads), panel) in zip(axes[0], rows, strict=True):
        for size, line in panel.groupby("size", sort=False):
            line = line.sort_values("tokens").groupby("tokens").verified.mean()
            axis.plot(line.index, line.values, marker="o", markersize=4, label=size.upper())
        most = panel.tokens.max()
        axis.plot([1, most], [1, most], color="0.7", linewidth=0.8, linestyle="--")
        axis.text(most, most, "free", color="0.5", ha="right", va="top", fontsize=8)
        title = f"{dtype.upper()}, {threads} thread{'s' if threads > 1 else ''}"
        axis.set(title=title, xlabel="tokens in the pass", ylim=(0.8, most))
    axes[0][0].set_ylabel("tokens verified in the time of one")
    most_lines = max(axes[0], key=lambda axis: len(axis.get_legend_handles_labels()[0]))
    most_lines.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(picture, dpi=140)


def measured(size: str, dtype: str, threads: int | None) -> list[tuple[int, int, float, float]]:
    """(context, tokens, seconds, tokens verified per pass-time) of each pass of a target."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, profiled = Path(temporary) / size, Path(temporary) / "profile"
        save_draft(build_draft(SHAPES[size], "float16"), folder)
        ref = resolve_target(str(folder))
        more = {"engine_name": "llama.cpp", "target_ref": ref, "quick": True, "threads": threads}
        space = load_space("demo")
        profile_device(
            ProfileRequest("cpu", ref.architecture, space, dtypes=(dtype,), output=profiled, **more)
        )
        passes = {}
        for row in Profile.load(profiled).select("pass", dtype, "eager"):
            shape = PassShape.of(row)
            if shape.role == "target":
                passes[shape.context, shape.tokens] = row.median_s
    found = []
    for (context, tokens), seconds in sorted(passes.items()):
        one = passes.get((context, 1))
        if one is not None:
            found.append((context, tokens, seconds, tokens * one / seconds))
    return found


if __name__ == "__main__":
    main()
