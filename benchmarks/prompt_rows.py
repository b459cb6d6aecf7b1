"""Do the rows of the prompts teach a draft too? Their passes are paid, and today nothing is learnt
there.

    python benchmarks/prompt_rows.py PROMPTS.jsonl WORK [--count 240] [--shares 0 0.3 1]

The target answers `--count` prompts greedily (a sixth are held out); one shape is trained on the
answers alone, and on answers and a share of the prompts (drawn by text, what all prompts begin with
left out), for as many tokens of passes, over two seeds. Printed: greedy acceptance on the held-out
answers over the last looks, the gain with its std over texts.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from archsearch.files import read_json, write_json
from archsearch.models.load import load_target
from archsearch.models.targets import resolve_target
from archsearch.text.cache import CachedSequence, TextCache
from archsearch.text.generate import write_answers
from archsearch.text.prompts import encode_prompts, read_prompts
from archsearch.text.settings import Writing, by_length
from archsearch.text.vocabulary import choose_draft_vocab, token_frequencies
from archsearch.training.initialise import initialise_draft
from data_curves import HEAD_ROWS, shape_of
from text_sources import last, paired, trained_alike

ANSWER_TOKENS = 96


def with_prompt(target: Any, sequences: list[CachedSequence], begin: int) -> list[CachedSequence]:
    """The texts as if the target had written all behind their first `begin` tokens."""
    found: list[CachedSequence | None] = [None] * len(sequences)
    head = target.lm_head.weight.float()
    with torch.inference_mode():
        for places in by_length([len(s) for s in sequences], 2048):
            ids = pad_sequence([sequences[i].token_ids.long() for i in places], batch_first=True)
            states = target.base_model(input_ids=ids, use_cache=False).last_hidden_state
            for row, place in enumerate(places):
                own = sequences[place]
                hidden = states[row, begin - 1 : own.prompt_tokens - 1].float()
                found[place] = replace(
                    own,
                    prompt_tokens=begin,
                    hidden=torch.cat([hidden.to(own.hidden.dtype), own.hidden]),
                    greedy_ids=torch.cat(
                        [(hidden @ head.T).argmax(-1).to(own.greedy_ids.dtype), own.greedy_ids]
                    ),
                )
    return [each for each in found if each is not None]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompts", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--count", type=int, default=240)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.3, 1.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--tokens", type=int, default=100_000)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    ref = resolve_target("smollm2-135m")
    writer, tokenizer = load_target(ref, "bfloat16")
    prompts = read_prompts(asked.prompts)[: asked.count]
    encoded = encode_prompts(prompts, tokenizer)
    cache = write_answers(
        writer, tokenizer, encoded, cache_dir=asked.work / "text", writing=Writing(ANSWER_TOKENS)
    )
    cache = TextCache.load(asked.work / "text")
    target, _ = load_target(ref, "float32")
    order = np.random.default_rng(7).permutation(len(cache.sequences)).tolist()
    held = [cache.sequences[i] for i in order[: len(order) // 6]]
    train = [cache.sequences[i] for i in order[len(order) // 6 :]]
    columns = zip(*(s.prompt_ids for s in train), strict=False)
    begin = max(1, int(np.argmin([len(set(column)) == 1 for column in columns])))
    whole = with_prompt(target, train, begin)
    ids = choose_draft_vocab(token_frequencies(cache.part(train)), HEAD_ROWS, tokenizer).token_ids
    calibration = torch.stack([s.token_ids[:64] for s in train if len(s) >= 64][:32]).long()
    for seed in asked.seeds:
        rows: dict[float, dict[str, Any]] = {}
        for share in asked.shares:
            path = asked.work / f"share-{share:g}-seed-{seed}.json"
            if not path.exists():
                chance = np.random.default_rng(1).random(len(train))
                text = [
                    both if luck < share else own
                    for own, both, luck in zip(train, whole, chance, strict=True)
                ]
                draft = initialise_draft(
                    target,
                    shape_of(ref.architecture, 2),
                    draft_token_ids=ids,
                    calibration_ids=calibration,
                    seed=0,
                )
                seen = trained_alike(draft, cache.part(text), held, asked.tokens, seed)
                known = {
                    "share": share,
                    "seed": seed,
                    "answer_tokens": sum(len(s.written) for s in train),
                    "taught_tokens": sum(len(s.written) for s in text),
                }
                write_json(path, known | seen)
            rows[share] = read_json(path, "training")
            lengths = np.array(rows[share]["heldout_tokens"])
            gain, std = paired(rows[share], rows[asked.shares[0]], lengths)
            print(
                f"{asked.work.name} seed {seed} share {share:g}: {last(rows[share], lengths):.3f}"
                f" {gain:+.3f} ± {std:.3f}",
                [round(look["alpha"], 3) for look in rows[share]["looks"]],
                flush=True,
            )


if __name__ == "__main__":
    main()
