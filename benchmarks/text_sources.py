"""What each further source of text brings: held-out greedy acceptance of one shape on equal
training, and seconds of writing.

    python benchmarks/text_sources.py write --prompts FILE --heldout-prompts FILE \\
        --text RUN/text --work DIR [--plain FILE]
    python benchmarks/text_sources.py train --text RUN/text --heldout RUN/heldout --work DIR \\
        --only SOURCE ...
    python benchmarks/text_sources.py report --work DIR [DIR ...] --json FILE

The base is a part of a text that the target wrote for a user's prompts (the first `--base` written
tokens of the order of data_curves.py). Every source adds about as many written tokens again:
`answers` (greedy answers to further prompts of the user, what all others are measured by),
`sampled`, `magpie` (prompts from the bare chat template, greedy answers), `invented` (the same
behind three of the user's prompts), `plain`. All are trained for the same number of tokens, at the
same looks. Every stage resumes.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from archsearch.files import read_json, write_json

SOURCES = ("answers", "sampled", "magpie", "invented", "plain")
ANSWER_TOKENS = 256
ASKED = 160


def base_part(cache: Any, tokens: int) -> tuple[list[Any], list[Any]]:
    """(the base, the texts behind it) in the order of data_curves.part_of."""
    order = np.random.default_rng(7).permutation(len(cache.sequences)).tolist()
    total = count = 0
    while total < tokens and count < len(order):
        total += len(cache.sequences[order[count]].written)
        count += 1
    ordered = [cache.sequences[i] for i in order]
    return ordered[:count], ordered[count:]


class Sources:
    """Writes the sources of one base, each into folders of `work`."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import torch

        from archsearch.models.load import load_target
        from archsearch.models.targets import resolve_target
        from archsearch.text.cache import TextCache
        from archsearch.text.generate import eos_ids
        from archsearch.text.prompts import encode_prompts, read_prompts

        torch.set_num_threads(1)
        self.work, self.tokens = Path(arguments.work[0]), arguments.base
        self.plain = arguments.plain
        self.target, self.tokenizer = load_target(resolve_target("smollm2-135m"), arguments.dtype)
        self.ends = eos_ids(self.target, self.tokenizer)
        self.base, _ = base_part(TextCache.load(arguments.text), arguments.base)
        asked = {tuple(s.token_ids[: s.prompt_tokens].tolist()) for s in self.base}
        known = read_prompts(arguments.prompts)
        encoded = {
            e.id: e
            for e in encode_prompts([_named(p, i) for i, p in enumerate(known)], self.tokenizer)
        }
        self.users = [
            p
            for i, p in enumerate(known)
            if str(i) in encoded and encoded[str(i)].token_ids in asked
        ]
        self.encoded = [encoded[str(i)] for i, p in enumerate(known) if p in self.users]
        self.kept_apart = (
            read_prompts(arguments.heldout_prompts) if arguments.heldout_prompts else []
        )

    def answer(
        self,
        name: str,
        encoded: Any,
        temperature: float = 0.0,
        most: int = ANSWER_TOKENS,
        **more: Any,
    ) -> Any:
        from archsearch.text.generate import write_answers
        from archsearch.text.settings import Writing

        return write_answers(
            self.target,
            self.tokenizer,
            encoded,
            cache_dir=self.work / name,
            writing=Writing(most, temperature, **more),
        )

    def write(self, name: str) -> dict[str, Any]:
        from archsearch.text import supply
        from archsearch.text.encode import encode_text
        from archsearch.text.prompts import encode_prompts

        begin, cpu = time.monotonic(), time.process_time()
        found: dict[str, Any] = {}
        if name == "sampled":
            cache = self.answer(name, self.encoded, 0.7, seed=1)
        elif name == "plain":
            cache = encode_text(
                self.target, self.tokenizer, self._plain_pieces(), cache_dir=self.work / name
            )
        else:
            users = self.users if name != "magpie" else []
            openings = supply.askings(self.tokenizer, users, ASKED, seed=1)
            temperature, top_p = supply.INVENTING
            turns = self.answer(
                f"{name}-asked", openings, temperature, supply.PROMPT_TOKENS, top_p=top_p, seed=2
            )
            made = supply.invented(
                supply.turns_of(turns.sequences, self.tokenizer, self.ends),
                self.users,
                self.kept_apart,
            )
            found = {
                "asked": len(openings),
                "kept": len(made.prompts),
                "dropped": made.dropped,
                "examples": [p.text[:200] for p in made.prompts[:8]],
            }
            cache = self.answer(
                name, encode_prompts(made.prompts, self.tokenizer)[: round(1.2 * len(self.base))]
            )
        return found | {
            "texts": len(cache.sequences),
            "written_tokens": cache.written_tokens,
            "tokens": sum(len(s) - 1 for s in cache.sequences),
            "wall_s": time.monotonic() - begin,
            "cpu_s": time.process_time() - cpu,
        }

    def _plain_pieces(self) -> list[str]:
        from archsearch.text.prompt_files import read_texts

        texts = [t for t in read_texts(Path(self.plain)) if len(t) > 400]
        chosen = np.random.default_rng(3).permutation(len(texts))[: self.tokens // 120].tolist()
        return [texts[i] for i in chosen]


def _named(prompt: Any, number: int) -> Any:
    from dataclasses import replace

    return replace(prompt, id=str(number))


def write(arguments: argparse.Namespace) -> None:
    sources = Sources(arguments)
    for name in arguments.only:
        path = sources.work / f"{name}.json"
        if name == "answers" or path.exists() or (name == "plain" and not arguments.plain):
            continue
        sources.work.mkdir(parents=True, exist_ok=True)
        row = sources.write(name)
        write_json(path, row)
        print(name, row, flush=True)


def train(arguments: argparse.Namespace) -> None:
    import torch

    from archsearch.models.load import load_target
    from archsearch.models.targets import resolve_target
    from archsearch.text.cache import TextCache
    from archsearch.text.vocabulary import choose_draft_vocab, token_frequencies
    from archsearch.training.initialise import initialise_draft
    from data_curves import HEAD_ROWS, shape_of

    torch.set_num_threads(1)
    work = Path(arguments.work[0])
    target = resolve_target("smollm2-135m")
    model, tokenizer = load_target(target, "float32")
    text, heldout = TextCache.load(arguments.text), TextCache.load(arguments.heldout)
    base, rest = base_part(text, arguments.base)
    # The same head and start for all: only the text differs.
    ids = choose_draft_vocab(token_frequencies(text.part(base)), HEAD_ROWS, tokenizer).token_ids
    calibration = torch.stack(
        [s.token_ids[:64] for s in base if len(s.token_ids) >= 64][:32]
    ).long()
    for name in arguments.only:
        path = work / f"train-{name}.json"
        if path.exists() or (name not in ("base", "answers") and not (work / name).exists()):
            continue
        more = (
            []
            if name == "base"
            else rest
            if name == "answers"
            else TextCache.load(work / name).sequences
        )
        added: list[Any] = []
        for sequence in more:
            if sum(len(s.written) for s in added) >= arguments.base:
                break
            added.append(sequence)
        draft = initialise_draft(
            model,
            shape_of(target.architecture, 2),
            draft_token_ids=ids,
            calibration_ids=calibration,
            seed=0,
        )
        cpu = time.process_time()
        seen = trained_alike(
            draft, text.part(base + added), heldout.sequences, arguments.tokens, arguments.seed
        )
        row = {
            "source": name,
            "base_tokens": sum(len(s.written) for s in base),
            "added_tokens": sum(len(s.written) for s in added),
            "added_texts": len(added),
            **seen,
            "cpu_s": time.process_time() - cpu,
        }
        write_json(path, row)
        print(
            name,
            row["added_tokens"],
            [(look["tokens"], round(look["alpha"], 3)) for look in seen["looks"]],
            flush=True,
        )


def trained_alike(
    draft: Any, text: Any, heldout: list[Any], tokens: int, seed: int
) -> dict[str, Any]:
    """What a draft accepts of held-out texts at the looks that all have, trained for as many tokens
    as all."""
    from archsearch.training.distill import DistillConfig, distill
    from data_curves import marks

    config = DistillConfig(
        max_tokens=tokens, anneal=0.0, evaluate_at=marks(tokens), heldout_sequences=0, seed=seed
    )
    result = distill(draft, [text], config, heldout=heldout)
    return {
        "epoch_tokens": sum(len(s) - 1 for s in text.sequences),
        "tokens": result.tokens,
        "heldout_tokens": list(result.heldout_tokens),
        "looks": [
            {"tokens": p.tokens, "alpha": p.value, "hits": list(p.hits)}
            for p in result.alpha_curve
            if p.weights == "average"
        ],
    }


def report(arguments: argparse.Namespace) -> None:
    """One row per source: alpha over the last looks, what it gained over the base, std paired over
    texts, tokens and seconds."""
    rows = []
    for folder in map(Path, arguments.work):
        found = {
            path.stem[6:]: read_json(path, "training")
            for path in sorted(folder.glob("train-*.json"))
        }
        if "base" not in found:
            continue
        lengths = np.array(found["base"]["heldout_tokens"])
        for name, row in found.items():
            gain, std = paired(row, found["base"], lengths)
            wrote = (
                read_json(folder / f"{name}.json", "source")
                if (folder / f"{name}.json").exists()
                else {}
            )
            rows.append(
                {
                    "kind": folder.name,
                    "source": name,
                    "alpha": last(row, lengths),
                    "gain": gain,
                    "std": std,
                    "added_tokens": row["added_tokens"],
                    "texts": row["added_texts"],
                    "wrote": wrote,
                }
            )
            print(
                f"{folder.name:8} {name:10} {last(row, lengths):.3f} {gain:+.3f} ± {std:.3f}"
                f" {row['added_tokens']:6} tokens"
                f" {wrote.get('written_tokens', 0) / max(wrote.get('cpu_s', 0), 1e-9):6.0f}/s"
            )
    if arguments.json:
        write_json(Path(arguments.json), {"rows": rows})


def last(row: dict[str, Any], lengths: np.ndarray, looks: int = 3) -> float:
    return float(np.mean([np.sum(look["hits"]) / lengths.sum() for look in row["looks"][-looks:]]))


def paired(
    row: dict[str, Any], base: dict[str, Any], lengths: np.ndarray, looks: int = 3
) -> tuple[float, float]:
    """Mean difference of the last looks, and its std by drawing the held-out texts anew."""
    ours, other = (
        np.mean([look["hits"] for look in r["looks"][-looks:]], axis=0) for r in (row, base)
    )
    difference = ours - other
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, len(lengths), (1000, len(lengths)))
    return float(difference.sum() / lengths.sum()), float(
        np.std(difference[drawn].sum(1) / lengths[drawn].sum(1))
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=("write", "train", "report"))
    parser.add_argument("--prompts", help="the user's prompts that --text was written for")
    parser.add_argument("--heldout-prompts")
    parser.add_argument("--text")
    parser.add_argument("--heldout")
    parser.add_argument("--plain")
    parser.add_argument("--work", nargs="+", required=True)
    parser.add_argument("--only", nargs="+", default=["base", *SOURCES])
    parser.add_argument(
        "--base",
        type=int,
        default=6000,
        help="written tokens of the base, and of what each source adds",
    )
    parser.add_argument("--tokens", type=int, default=120_000)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    {"write": write, "train": train, "report": report}[arguments.stage](arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
