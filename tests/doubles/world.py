"""Made-up worlds for tests: a profile written by a known cost law, and a tiny target with
tokenizer, prompts and search space."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import weight_bytes_per_pass
from archsearch.architecture.ops import Attention, Elementwise, Gemm, Op, forward_ops, layer_ops
from archsearch.hardware.identify import identify_cpu
from archsearch.profiles import Measurement, Profile, cpu_stack, freeze_shape, stack_key
from archsearch.workload import DTYPE_BYTES


@dataclass(frozen=True)
class CostLaw:
    """What everything costs in the made-up machine: kernels = constant + bytes / bandwidth, passes
    = constants + kernels."""

    kernel_s: float = 2e-6
    cold_bytes_per_s: float = 10e9
    warm_bytes_per_s: float = 40e9
    element_s: float = 2e-10
    pass_s: float = 150e-6
    layer_s: float = 60e-6
    cache_bytes: float = 32 * 2**20
    plain_s: float = 0.4e-3
    round_s: float = 1.5e-3
    token_s: float = 0.7e-3
    dtype: str = "float32"

    def op_s(self, op: Op, cold: bool) -> float:
        """Seconds of one kernel."""
        if isinstance(op, Elementwise):
            return self.kernel_s + self.element_s * op.elements
        bandwidth = self.cold_bytes_per_s if cold else self.warm_bytes_per_s
        if isinstance(op, Gemm):
            return self.kernel_s + op.weight_elements() * DTYPE_BYTES[self.dtype] / bandwidth
        assert isinstance(op, Attention)
        scores = op.batch * op.tokens * op.q_heads * op.keys()
        return (
            4 * self.kernel_s
            + op.kv_elements() * DTYPE_BYTES[self.dtype] / bandwidth
            + 1e-10 * scores
        )

    def forward_s(
        self, arch: Architecture, *, tokens: int = 1, context: int = 256, cold: bool = False
    ) -> float:
        """Seconds of a whole pass; in a loop the weights that do not fit the cache come from
        memory."""
        size = weight_bytes_per_pass(arch, DTYPE_BYTES[self.dtype])
        share = 1.0 if cold else 1.0 / (1.0 + (self.cache_bytes / size) ** 3.0)
        ops = forward_ops(arch, batch=1, tokens=tokens, context=context)
        kernels = sum(
            n * (share * self.op_s(op, True) + (1 - share) * self.op_s(op, False))
            for op, n in ops.items()
        )
        return self.pass_s + arch.num_hidden_layers * self.layer_s + kernels

    def layer_row_s(self, arch: Architecture, *, tokens: int, context: int) -> float:
        """Seconds per layer of a cold stack."""
        ops = layer_ops(arch, batch=1, tokens=tokens, context=context, window=None)
        return self.layer_s + sum(self.op_s(op, True) for op in ops)


def write_profile(
    folder: Path | None,
    drafts: Sequence[Architecture],
    target: Architecture | None,
    law: CostLaw | None = None,
    *,
    noise: float = 0.01,
    outliers: int = 0,
    noisy_rows: int = 0,
    every: int = 1,
    device: dict[str, Any] | None = None,
    seed: int = 0,
) -> Profile:
    """A profile of the points that a real sweep plans, with times from `law`, through
    `Profile.record`.

    noise: relative std of a row's level. outliers: that many forward rows are steady but three
    times too slow. noisy_rows: that many more rows swing wildly around a wrong time. every: keep
    every n-th op row.
    """
    from archsearch.profiling.cpu_sweep import plan

    law = law or CostLaw()
    rng = random.Random(seed)
    profile = Profile(
        device or identify_cpu().to_dict(), cpu_stack(), {"float32": 1e-3, "bfloat16": 1e-3}
    )
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        profile.folder = folder
        profile.save_header()
    points = plan(drafts, target, law.dtype, seed=seed)
    forwards = [point for point in points if point.kind == "forward" and point.arch != target]
    wrong = set(rng.sample(forwards, outliers)) if outliers else set()
    wild = (
        set(rng.sample([point for point in forwards if point not in wrong], noisy_rows))
        if noisy_rows
        else set()
    )
    lines = []
    for number, point in enumerate(points):
        if point.op is not None:
            if number % every and point.kind != "elementwise":
                continue
            seconds = law.op_s(point.op, point.cache == "cold")
        elif point.kind == "layer":
            seconds = law.layer_row_s(point.arch, tokens=point.tokens, context=point.context)
        else:
            seconds = law.forward_s(
                point.arch, tokens=point.tokens, context=point.context, cold=point.cache == "cold"
            )
        seconds *= math.exp(rng.gauss(0.0, noise))
        spread = 0.01
        if point in wrong:
            seconds *= 3.0
        if point in wild:
            seconds, spread = 2.0 * seconds, 0.6
        times = tuple(seconds * (1 + spread * step) for step in (-1.0, -0.5, 0.0, 0.5, 1.0))
        lines.append(
            Measurement(
                point.kind, freeze_shape(point.shape()), law.dtype, "eager", point.cache, times
            )
        )
    vocab = target.vocab_size if target else drafts[0].vocab_size
    for gamma in (0, 1, 2, 4, 7):
        extra = law.plain_s if gamma == 0 else law.round_s + gamma * law.token_s
        shape = {"engine": "transformers", "gamma": gamma, "vocab_size": vocab}
        lines.append(
            Measurement(
                "engine", freeze_shape(shape), law.dtype, "eager", "warm", (extra, extra, extra)
            )
        )
    if folder is None:
        profile.add(lines)
    else:
        profile.record(lines[0])
        profile.add(lines[1:])
        # One write for the rest: record() syncs the disk for every row, which a thousand rows need
        # not wait for.
        with (folder / "rows.jsonl").open("a", encoding="utf-8") as handle:
            handle.writelines(json.dumps(line.to_dict()) + "\n" for line in lines[1:])
    return profile


# --------------------------------------------------------------------------------------------------
# tiny world

TINY = Architecture(64, 128, 2, 4, 2, 16, 320, tie_word_embeddings=True)
WORDS = (
    "please send the red shoes back to our shop before friday and tell me what the new order for"
    " two tickets costs".split()
)
SPACE = """
description: tiny drafts
dimensions:
  num_hidden_layers: [1, 2]
  hidden_size: [32, 64]
  ffn_ratio: [1, 2]
  num_key_value_heads: [1, 2]
  kv_group_size: [1, 2]
  head_dim: [16]
  draft_vocab_size: [128, target]
ffn_multiple: 32
"""


def sentence(rng: random.Random, words: int = 8) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def make_tokenizer(vocab_size: int = TINY.vocab_size, seed: int = 0) -> Any:
    """A byte-level BPE tokenizer with at most `vocab_size` tokens, trained on made-up sentences."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    rng = random.Random(seed)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([sentence(rng) for _ in range(200)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def make_model_folder(
    folder: Path, arch: Architecture = TINY, *, seed: int = 0, weights: bool = True
) -> Path:
    """A Hugging Face folder with random weights (sharp enough for clear argmaxes) and a
    tokenizer."""
    import torch

    from archsearch.models.drafts import build_draft, save_draft

    model = build_draft(arch, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    tokenizer = make_tokenizer(arch.vocab_size)
    save_draft(model, folder, tokenizer=tokenizer)
    config = json.loads((folder / "config.json").read_text())
    del config["archsearch"]  # a target from elsewhere says nothing of us
    (folder / "config.json").write_text(json.dumps(config))
    if not weights:
        (folder / "model.safetensors").unlink()
    return folder


def make_prompts(path: Path, count: int = 48, seed: int = 1) -> Path:
    rng = random.Random(seed)
    rows = [
        {"prompt": sentence(rng, 6 + i % 5), "category": "orders" if i % 2 else "travel"}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tiny_drafts() -> list[Architecture]:
    """Shapes of SPACE for the tiny target."""
    import yaml

    from archsearch.search.space import SearchSpace

    return SearchSpace.from_dict(yaml.safe_load(SPACE), "tiny").sample(TINY, 60)


def make_world(folder: Path) -> Path:
    """`target/`, `profiles/<this cpu>/<stack>/`, `tiny.yaml`, `prompts.jsonl` in `folder`."""
    make_model_folder(folder / "target")
    (folder / "tiny.yaml").write_text(SPACE)
    make_prompts(folder / "prompts.jsonl")
    device = identify_cpu()
    write_profile(folder / "profiles" / device.key / stack_key(cpu_stack()), tiny_drafts(), TINY)
    return folder


def give_weights(run: Path, rank: int, alpha: float = 0.6) -> Path:
    """Random weights and a made-up trace for a ranked candidate, as if it had been trained; its
    folder."""
    import numpy as np

    from archsearch.acceptance.measured import Trace
    from archsearch.models.drafts import build_draft, save_draft
    from archsearch.runs.run import open_run

    opened = open_run(run)
    folder = opened.best_dir(rank)
    save_draft(build_draft(opened.score(rank).architecture), folder)
    rng = np.random.default_rng(0)
    texts = tuple(rng.random(60) < alpha for _ in range(40))
    Trace(texts, ("orders",) * 40, tuple(map(str, range(40)))).save(folder / "trace.npz")
    return folder
