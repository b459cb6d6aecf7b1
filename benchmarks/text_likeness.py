"""How far may what was measured on one text speak for another? Alpha of one shape on many kinds of text, and how alike they are.

    python benchmarks/text_likeness.py measure --target smollm2-135m --work runs/likeness KIND.jsonl ...
    python benchmarks/text_likeness.py fit --work runs/likeness --json FILE

`measure`: of every prompt file the target writes answers, every fourth prompt held out; one shape is trained on the others, to
the same tokens from the same number of distinct ones, and its alpha on the held-out answers is a row. Every file resumes. `fit`:
what two texts' likeness (`archsearch.text.likeness`) says of the difference of their logit(alpha): the text effect's std, and
the power of the likeness that is its correlation, by marginal likelihood.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from archsearch.architecture.architecture import Architecture
from archsearch.files import read_json, write_json

ANSWER_TOKENS = 96
DISTINCT_TOKENS = 8_000
TRAINED_TOKENS = 64_000
HELDOUT_EVERY = 4


def shape(target: Architecture) -> Architecture:
    """Two layers of the target's own width, 4,096 head rows."""
    return target.replace(num_hidden_layers=2, draft_vocab_size=4096)


def measure(target: str, files: list[Path], work: Path, dtype: str) -> None:
    """One row a file in WORK/rows.json."""
    from archsearch.acceptance.measured import agreement_trace
    from archsearch.drafts.trainer import DraftTrainer
    from archsearch.models.drafts import load_draft
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
        trainer = DraftTrainer(ref, dtype, prompt_set, work / file.stem, answer_tokens=ANSWER_TOKENS, threads=1)
        text = trainer.texts.write_training_once(900.0)
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
        from archsearch.acceptance.measured import alpha

        found = alpha(trace)
        curve = read_json(trained.folder / "training.json", "record")
        rows[file.stem] = {
            "prompts": len(prompts), "distinct": count, "tokens": trained.tokens, "alpha": found.to_dict(),
            "looks": [list(point) for point in trained.points], "seconds": curve["seconds"],
        }  # fmt: skip
        write_json(path, rows)
        print(file.stem, count, trained.tokens, f"{found.value:.3f} ± {found.std:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "fit"])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.what == "measure":
        measure(asked.target, asked.files, asked.work, asked.dtype)


if __name__ == "__main__":
    main()
