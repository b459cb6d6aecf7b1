"""How far may what was measured on one text speak for another? Alpha of one shape on kinds of text,
and how alike they are.

    python benchmarks/text_likeness.py measure KIND.jsonl ... --target smollm2-135m --work DIR
    python benchmarks/text_likeness.py likeness KIND.jsonl ... --work DIR
    python benchmarks/text_likeness.py fit --work runs/likeness

`measure`: of every prompt file the target writes answers, every fourth prompt held out; one shape
is trained on the others, to the same tokens from the same number of distinct ones, and its alpha on
the held-out answers is a row of rows.json. Every file resumes. `likeness`: of every pair of files
by `archsearch.text.likeness`, likeness.json. `fit`: what a pair's likeness says of the difference
of the two logits of alpha: the std of a text's own effect, and the power of the likeness that is
its correlation, by marginal likelihood (mean open). Run it with one thread where the machine is
shared.
"""

from __future__ import annotations

import argparse
import itertools
import math
from pathlib import Path

import numpy as np

from archsearch.architecture.architecture import Architecture
from archsearch.estimate import Estimate
from archsearch.files import read_json, write_json
from archsearch.speedup import logit, logit_std

ANSWER_TOKENS = 96
DISTINCT_TOKENS = 8_000
TRAINED_TOKENS = 64_000
HELDOUT_EVERY = 4
SEED_STD = 0.08  # two runs of one sketch differed by this much
STDS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0, 1.2)
POWERS = (0.25, 0.5, 1.0, 2.0, 4.0)


def shape(target: Architecture) -> Architecture:
    """Two layers of the target's own width, 4,096 head rows."""
    return target.replace(num_hidden_layers=2, draft_vocab_size=4096)


def measure(target: str, files: list[Path], work: Path, dtype: str) -> None:
    """One row a file in WORK/rows.json."""
    from archsearch.acceptance.measured import agreement_trace, alpha
    from archsearch.drafts.trainer import DraftTrainer
    from archsearch.models.drafts import load_draft
    from archsearch.models.load import LoadedTarget
    from archsearch.models.targets import resolve_target
    from archsearch.text.prompt_set import PromptSet
    from archsearch.text.prompts import read_prompts

    ref = resolve_target(target)
    path = work / "rows.json"
    rows = read_json(path, "rows") if path.exists() else {}
    for file in files:
        if file.stem in rows:
            continue
        prompts = read_prompts(file)
        kept = [p for number, p in enumerate(prompts) if number % HELDOUT_EVERY]
        prompt_set = PromptSet(kept, prompts[::HELDOUT_EVERY], str(file))
        trainer = DraftTrainer(
            LoadedTarget(ref, dtype),
            prompt_set,
            work / file.stem,
            answer_tokens=ANSWER_TOKENS,
            threads=1,
        )
        trainer.texts.write_training_once(900.0)
        text = trainer.texts.training()
        enough, count = [], 0
        for sequence in text.sequences:  # the same distinct tokens for all
            if count >= DISTINCT_TOKENS:
                break
            enough.append(sequence)
            count += len(sequence.token_ids) - sequence.prompt_tokens
        trainer.texts._caches["text"] = text.part(enough)
        arch = shape(ref.architecture)
        trained = trainer.train(arch, 900.0, tokens=TRAINED_TOKENS)
        draft = load_draft(trained.folder)
        trace = agreement_trace(draft, trainer.texts.heldout())
        found = alpha(trace)
        curve = read_json(trained.folder / "training.json", "record")
        rows[file.stem] = {
            "prompts": len(prompts),
            "distinct": count,
            "tokens": trained.tokens,
            "alpha": found.to_dict(),
            "looks": [list(point) for point in trained.points],
            "seconds": curve["seconds"],
        }
        write_json(path, rows)
        print(file.stem, count, trained.tokens, f"{found.value:.3f} ± {found.std:.3f}", flush=True)


def likenesses(files: list[Path], work: Path) -> None:
    """likeness.json: kind -> kind -> likeness."""
    from archsearch.text.likeness import likeness, sketch_of
    from archsearch.text.prompts import read_prompts

    sketches = {file.stem: sketch_of(read_prompts(file)) for file in files}
    found = {
        a: {b: round(likeness(sketches[a], sketches[b]), 3) for b in sketches} for a in sketches
    }
    write_json(work / "likeness.json", found)
    for name, row in found.items():
        print(f"{name:14}", " ".join(f"{value:5.2f}" for value in row.values()))


def fit(work: Path) -> None:
    """The std of a text's effect and the power of its correlation, on a grid."""
    rows, alike = (
        read_json(work / "rows.json", "rows"),
        read_json(work / "likeness.json", "likeness"),
    )
    names = [name for name in rows if name in alike]
    alphas = [Estimate.from_dict(rows[name]["alpha"]) for name in names]
    levels = np.array([logit(alpha.value) for alpha in alphas])
    noise = np.array([math.hypot(logit_std(alpha), SEED_STD) for alpha in alphas])
    pairs = np.array([[alike[a][b] for b in names] for a in names])
    pairs = np.minimum((pairs + pairs.T) / 2, 1.0)

    def likelihood(std: float, power: float) -> float:
        correlation = np.where(np.eye(len(names)) > 0, 1.0, pairs**power)
        covariance = std**2 * correlation + np.diag(noise**2) + 4.0  # the mean: std 2
        return float(
            -0.5 * (levels @ np.linalg.solve(covariance, levels) + np.linalg.slogdet(covariance)[1])
        )

    for name, level, error in zip(names, levels, noise, strict=True):
        print(f"{name:14} logit(alpha) {level:+.2f} +- {error:.2f}")
    for a, b in itertools.combinations(range(len(names)), 2):
        print(
            f"{names[a]:12} {names[b]:12} likeness {pairs[a, b]:.2f}  apart by"
            f" {abs(levels[a] - levels[b]):.2f}"
        )
    print("log likelihood by std (down) and power (across)", *POWERS)
    for std in STDS:
        print(f"{std:.1f}", " ".join(f"{likelihood(std, power):7.2f}" for power in POWERS))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["measure", "likeness", "fit"])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--work", type=Path, required=True)
    asked = parser.parse_args()
    if asked.what == "measure":
        measure(asked.target, asked.files, asked.work, asked.dtype)
    elif asked.what == "likeness":
        likenesses(asked.files, asked.work)
    else:
        fit(asked.work)


if __name__ == "__main__":
    main()
