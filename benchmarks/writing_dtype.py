"""Whether drafts learn less from text that the target wrote in bfloat16 than from its float32 text,
and what writing costs.

    python benchmarks/writing_dtype.py --prompts FILE --output FILE [--count 400] [--tokens 128000]
    [--seeds 0 1]

The target answers the same prompts in both dtypes (on a CPU a user's greedy text may be float32
where bfloat16 multiplies faster); drafts of one shape are trained alike on either text, and judged
on float32 text of held-out prompts. Written tokens a second of the processor, the share of written
tokens that the two texts share up to their first difference, held-out alpha and the paired
difference by text.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from archsearch.acceptance.measured import (
    RESAMPLES,
    Trace,
    agreement_trace,
    alpha,
    resampled_ratio,
)
from archsearch.architecture.architecture import Architecture
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.files import write_json
from archsearch.models.load import load_target
from archsearch.models.targets import resolve_target
from archsearch.text.cache import TextCache
from archsearch.text.generate import generate_text
from archsearch.text.prompts import read_prompts
from archsearch.text.settings import Writing
from archsearch.text.vocabulary import choose_draft_vocab, token_frequencies
from archsearch.training.distill import distill
from archsearch.training.initialise import initialise_draft
from archsearch.training.settings import DistillConfig

DTYPES = ("float32", "bfloat16")
HELDOUT = 48
HEAD_ROWS = 2048


def paired_difference(
    first: Trace, second: Trace, *, resamples: int = RESAMPLES, seed: int = 0
) -> Estimate:
    """alpha(first) - alpha(second) on the same texts, with the bootstrap std of the difference
    (half of the unpaired one).

    Raises ArchsearchError for traces of other texts than each other's, or without tokens.
    """
    lengths = [a.shape for a in first.agreements]
    settings = (first.temperature, first.top_p) == (second.temperature, second.top_p)
    if first.ids != second.ids or lengths != [a.shape for a in second.agreements] or not settings:
        raise ArchsearchError(
            "the two traces are not of the same texts; measure both drafts on one cache"
        )
    counts = np.array(
        [
            [float(a.sum()) - float(b.sum()), a.shape[0]]
            for a, b in zip(first.shares, second.shares, strict=True)
        ]
    )
    if counts.size == 0 or counts[:, 1].sum() == 0:
        raise ArchsearchError("the traces hold no tokens; measure on more text")
    return resampled_ratio(counts, resamples=resamples, seed=seed, fallback_std=1.0).estimate()


def shared_share(first: TextCache, second: TextCache) -> tuple[float, float]:
    """(share of answers that are equal, share of written tokens before the first difference)."""
    equal = same = total = 0
    for a, b in zip(first.sequences, second.sequences, strict=True):
        left, right = a.written.tolist(), b.written.tolist()
        equal += left == right
        agree = next(
            (i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y),
            min(len(left), len(right)),
        )
        same, total = same + agree, total + max(len(left), len(right))
    return equal / len(first.sequences), same / total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--answer-tokens", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=128_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ref = resolve_target(arguments.target)
    models = {dtype: load_target(ref, dtype) for dtype in DTYPES}
    prompts = read_prompts(arguments.prompts)[: arguments.count + HELDOUT]
    writing = Writing(arguments.answer_tokens)
    result: dict[str, Any] = {
        "arguments": {k: str(v) for k, v in vars(arguments).items()},
        "writing": {},
        "drafts": [],
    }
    with TemporaryDirectory() as folder:
        caches = {}
        for dtype, (model, tokenizer) in models.items():
            begin = time.process_time()
            caches[dtype] = generate_text(
                model, tokenizer, prompts[HELDOUT:], cache_dir=f"{folder}/{dtype}", writing=writing
            )
            spent = time.process_time() - begin
            result["writing"][dtype] = {
                "tokens": caches[dtype].written_tokens,
                "cpu_s": spent,
                "tokens_per_cpu_s": caches[dtype].written_tokens / spent,
            }
            print(dtype, result["writing"][dtype], flush=True)
        result["equal_answers"], result["equal_tokens"] = shared_share(
            *(caches[dtype] for dtype in DTYPES)
        )
        model, tokenizer = models["float32"]
        heldout = generate_text(
            model, tokenizer, prompts[:HELDOUT], cache_dir=f"{folder}/heldout", writing=writing
        )
        base = ref.architecture
        shape = Architecture(
            384,
            1536,
            2,
            6,
            2,
            64,
            base.vocab_size,
            HEAD_ROWS,
            max_position_embeddings=base.max_position_embeddings,
        )
        for seed in arguments.seeds:
            traces = {}
            for dtype in DTYPES:
                ids = choose_draft_vocab(
                    token_frequencies(caches[dtype]), HEAD_ROWS, tokenizer
                ).token_ids
                rows = torch.stack(
                    [s.token_ids[:64] for s in caches[dtype].sequences if len(s.token_ids) >= 64][
                        :32
                    ]
                ).long()
                draft = initialise_draft(
                    models["float32"][0],
                    shape,
                    draft_token_ids=ids,
                    calibration_ids=rows,
                    seed=seed,
                )
                config = DistillConfig(max_tokens=arguments.tokens, seed=seed)
                done = distill(draft, caches[dtype], config, heldout=heldout.sequences)
                traces[dtype] = agreement_trace(draft, heldout)
                row = {
                    "dtype": dtype,
                    "seed": seed,
                    "tokens": done.tokens,
                    "alpha": alpha(traces[dtype]).value,
                }
                result["drafts"].append(row)
                print(row, flush=True)
            gap = paired_difference(traces["bfloat16"], traces["float32"])
            result["drafts"].append(
                {"seed": seed, "bfloat16_minus_float32": gap.value, "std": gap.std}
            )
            print(result["drafts"][-1], flush=True)
            write_json(arguments.output, result)


if __name__ == "__main__":
    main()
