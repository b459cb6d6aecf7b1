"""Tokens per second of distillation beside what the bare passes of the same module allow.

    python benchmarks/training_throughput.py --target smollm2-135m --text RUN/text [--layers 1,2,4]
    [--threads N] [--json FILE]

`distill` runs as it is (batches made, teacher's logits rebuilt, loss, clipping, optimizer, running
mean of weights), timed from step to step by its progress callback; looks at alpha are left out. The
bare passes take the very same batches, on the same module, in the same arithmetic: forward to the
logits of the written positions and backward from ones, nothing else (`passes`), or with the loss on
fixed teacher logits and the optimizer as well (`step`). Rounds of the three alternate, so drift and
other load hit all alike; times are processor seconds of the process divided by its threads' share,
the ratio is the median over rounds.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from archsearch.architecture.architecture import Architecture
from archsearch.files import write_json


def rates(draft: Any, cache: Any, rounds: int, steps: int) -> dict[str, float]:
    """tokens/s of distill, of the bare passes and of the bare step, and the median ratios."""
    import torch
    import torch.nn.functional as functional

    from archsearch.training import batches as training
    from archsearch.training.distill import DistillConfig, distill, distill_loss

    config = DistillConfig(max_steps=steps + 1, evaluate_at=(10**9,), anneal=0.0)
    sequences, _ = training.split_heldout(cache.sequences, config.heldout_sequences)
    plan = training.plan_epoch([len(s) - 1 for s in sequences], config.batch_tokens, config.seed, 0)
    batches = [
        training.make_batch([sequences[i] for i in indices]) for indices in plan[1 : steps + 1]
    ]
    tokens = sum(batch.tokens for batch in batches)
    kept = training.head_token_ids(draft)
    head = cache.head if kept is None else cache.head[kept]
    teachers = [functional.linear(batch.hidden.to(head.dtype), head) for batch in batches]

    def distilling() -> float:
        marks: list[float] = []
        distill(
            draft,
            cache,
            config,
            heldout=sequences[:1],
            progress=lambda *_: marks.append(time.process_time()),
        )
        return tokens / (marks[-1] - marks[0])  # from the end of the first step on

    def bare(step: bool) -> float:
        embedding = draft.get_input_embeddings().weight
        embedding.requires_grad_(False)
        weights = [p for p in draft.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            weights, lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        draft.train()

        def once(batch: Any, teacher: Any) -> None:
            with training.autocast(draft.lm_head.weight, None):
                states = training.draft_states(draft, batch)
                logits = functional.linear(states, draft.lm_head.weight)
            if step:
                features = (
                    (states, batch.hidden)
                    if states.shape[-1] == batch.hidden.shape[-1]
                    else (None, None)
                )
                loss = distill_loss(logits, teacher, config.feature_weight, *features)
                loss.backward()
                optimizer.step()
            else:
                logits.backward(torch.ones_like(logits))
            optimizer.zero_grad(set_to_none=True)

        once(batches[0], teachers[0])
        begin = time.process_time()
        for batch, teacher in zip(batches, teachers, strict=True):
            once(batch, teacher)
        seconds = time.process_time() - begin
        embedding.requires_grad_(True)
        return tokens / seconds

    found = []
    for number in range(rounds + 1):
        order = [distilling, lambda: bare(False), lambda: bare(True)]
        shift = number % 3
        values = {index: order[index]() for index in [*range(shift, 3), *range(shift)]}
        found.append([values[0], values[1], values[2]])
    columns = list(zip(*found[1:], strict=True))  # the first round warms up
    threads = torch.get_num_threads()
    return {
        "distill_tokens_per_s": median(columns[0]) * threads,
        "passes_tokens_per_s": median(columns[1]) * threads,
        "step_tokens_per_s": median(columns[2]) * threads,
        "ratio_to_passes": median(d / b for d, b, _ in found[1:]),
        "ratio_to_step": median(d / s for d, _, s in found[1:]),
        "rounds": rounds,
        "threads": threads,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--text", type=Path, required=True, help="a text cache of that target")
    parser.add_argument("--layers", default="1,2,4")
    parser.add_argument("--head", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    import torch

    from archsearch.models.drafts import build_draft
    from archsearch.models.runtime import tune_malloc
    from archsearch.models.targets import resolve_target
    from archsearch.text.cache import TextCache

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    tune_malloc()
    cache = TextCache.load(arguments.text)
    target = resolve_target(arguments.target).architecture
    print(
        f"{'draft':38} {'distill':>9} {'passes':>9} {'step':>9} tokens/s   distill/passes "
        " distill/step"
    )
    rows = []
    for layers in map(int, arguments.layers.split(",")):
        arch = Architecture(
            target.hidden_size,
            target.intermediate_size,
            layers,
            target.num_attention_heads,
            target.num_key_value_heads,
            target.head_dim,
            target.vocab_size,
            arguments.head,
            rope_theta=target.rope_theta,
        )
        row = rates(build_draft(arch), cache, arguments.rounds, arguments.steps)
        rows.append({"shape": arch.label()} | row)
        print(
            f"{arch.label():38} {row['distill_tokens_per_s']:9.0f}"
            f" {row['passes_tokens_per_s']:9.0f} {row['step_tokens_per_s']:9.0f}           "
            f" {row['ratio_to_passes']:14.1%} {row['ratio_to_step']:13.1%}",
            flush=True,
        )
    if arguments.json:
        write_json(arguments.json, {"rows": rows})


if __name__ == "__main__":
    sys.exit(main())
