"""Minutes of heads: what reading the text for their states takes beside keeping them while it is
written, and what stopping where held-out acceptance is flat gives back.

    python benchmarks/head_minutes.py states PROMPTS.jsonl WORK [--count 96] [--repeats 3]
    python benchmarks/head_minutes.py stop PROMPTS.jsonl WORK --family eagle3 [--count 240]

`states`: the target writes the same answers in turn with states kept and without, then reads them
where they are missing; seconds of the processor. `stop`: a sixth of the answers is held out; a head
is trained as in a climb, to a quarter of `--tokens`, then to all of them, and does not end where it
would have stopped: the weights that stopping keeps and those of the whole run are judged on the
held-out answers, paired by text, over `--seeds`. One thread; rows go to WORK/rows.jsonl.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from archsearch.acceptance.replay import replay_chains
from archsearch.drafters.forms import auxiliary_layers
from archsearch.drafters.heads import Eagle3
from archsearch.drafts.heads import HEAD_LAYERS, HEAD_ROWS
from archsearch.drafts.trainer import LOOK_RATIO, PATIENCE
from archsearch.models.load import load_target
from archsearch.models.targets import resolve_target
from archsearch.text.auxiliary import auxiliary_states
from archsearch.text.cache import TextCache
from archsearch.text.generate import write_answers
from archsearch.text.prompts import encode_prompts, read_prompts
from archsearch.text.settings import Writing
from archsearch.text.vocabulary import choose_draft_vocab, token_frequencies
from archsearch.training.heads import train as training
from archsearch.training.heads.chains import chain_matches, count_chains
from archsearch.training.heads.eagle3 import initialise_eagle3
from archsearch.training.heads.folder import eagle3_config
from archsearch.training.heads.medusa import initialise_medusa
from archsearch.training.heads.train import HeadRun, head_config, train_head
from archsearch.training.looks import Looks, Place

ANSWER_TOKENS = 96
GAMMA = 3


def keep(folder: Path, row: dict[str, Any]) -> None:
    with open(folder / "rows.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print({name: value for name, value in row.items() if name != "looks"}, flush=True)


def states(asked: argparse.Namespace, target: Any, tokenizer: Any, encoded: list[Any]) -> None:
    layers = auxiliary_layers(int(target.config.num_hidden_layers))

    def once(kept: bool, folder: Path) -> dict[str, Any]:
        shutil.rmtree(folder, ignore_errors=True)
        writing = Writing(ANSWER_TOKENS, layers=layers if kept else ())
        begin = time.process_time()
        cache = write_answers(target, tokenizer, encoded, cache_dir=folder, writing=writing)
        wrote = time.process_time()
        cache = auxiliary_states(target, cache, layers)
        seconds = {"write_s": wrote - begin, "read_s": time.process_time() - wrote}
        tokens = sum(len(s) - 1 for s in cache.sequences)
        return {"kept": kept, **seconds, "tokens": tokens, "written": cache.written_tokens}

    rows = []
    for number in range(asked.repeats):
        for kept in (number % 2 == 0, number % 2 == 1):
            row = once(kept, asked.work / f"text-{kept}")
            rows.append(row)
            keep(asked.work, {"what": "states", "repeat": number, **row})
    for kept in (False, True):
        own = [row for row in rows if row["kept"] == kept]
        write, read = (float(np.median([row[k] for row in own])) for k in ("write_s", "read_s"))
        print(f"kept {kept}: writes {write:.1f} s, reads {read:.1f} s, {write + read:.1f} in all")
    read, ours = (
        auxiliary_states(target, TextCache.load(asked.work / f"text-{kept}"), layers).sequences
        for kept in (False, True)
    )
    same = [
        (a.states.float() - b.states.float()).norm() / a.states.float().norm()
        for a, b in zip(read, ours, strict=True)
        if torch.equal(a.token_ids, b.token_ids)
    ]
    print(f"{len(same)} of {len(read)} texts equal; states apart by {np.mean(same):.4f} of their"
          f" norm, {max(same):.4f} at most")  # fmt: skip


class NotedLooks(Looks):
    """Do not stop, but note where they would have, and the best weights then."""

    noted: dict[str, Any] | None = None

    def stop_where_flat(self, place: Place) -> None:
        super().stop_where_flat(place)
        if self.stopped and NotedLooks.noted is None and self.best is not None:
            NotedLooks.noted = {
                "tokens": place.tokens,
                "cpu_s": time.process_time(),
                "looks": len(self.points),
                "best_tokens": self.best.tokens,
                "weights": {name: p.clone() for name, p in self.best_weights.items()},
            }
        self.stopped = ""


class Noted(HeadRun):
    """A run with such looks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.looks = NotedLooks(self.config)


def head_of(family: str, ref: Any, target: Any, kept: Any, layers: Any, seed: int) -> Any:
    if family == "medusa":
        return initialise_medusa(target, GAMMA, kept)
    decoder = Eagle3.usual(ref.architecture).architecture
    decoder = decoder.replace(num_hidden_layers=HEAD_LAYERS[family], draft_vocab_size=len(kept))
    mask = 0 if family == "peagle" else None
    return initialise_eagle3(target, eagle3_config(decoder, target), layers, kept, seed, mask)


def judged(head: Any, texts: list[Any]) -> dict[str, Any]:
    """By text: rounds and tokens of them at GAMMA; all together."""
    matches = chain_matches(head, texts, GAMMA)
    counts = count_chains(matches)
    return {
        "tau": replay_chains(matches, GAMMA).tau,
        "conditional": counts.conditional,
        "right": [int(np.logical_and.accumulate(rows, axis=1).sum()) for rows in matches],
        "places": [len(rows) for rows in matches],
    }


def stop(asked: argparse.Namespace, target: Any, tokenizer: Any, encoded: list[Any]) -> None:
    layers = auxiliary_layers(int(target.config.num_hidden_layers))
    writing = Writing(ANSWER_TOKENS, layers=layers)
    cache = write_answers(
        target, tokenizer, encoded, cache_dir=asked.work / "text", writing=writing
    )
    if asked.family != "medusa":
        cache = auxiliary_states(target, cache, layers)
    ref = resolve_target("smollm2-135m")
    whole, _ = load_target(ref, "float32")
    usable = [s for s in cache.sequences if len(s.written) > 1]
    order = np.random.default_rng(7).permutation(len(usable)).tolist()
    held = [usable[i] for i in order[: len(order) // 6]]
    text = cache.part([usable[i] for i in order[len(order) // 6 :][: asked.texts]])
    rows = HEAD_ROWS[asked.family]
    kept = choose_draft_vocab(token_frequencies(text), rows, tokenizer).token_ids
    training.HeadRun = Noted
    for seed in asked.seeds:
        folder = asked.work / f"{asked.family}-{seed}"
        shutil.rmtree(folder, ignore_errors=True)
        NotedLooks.noted, begin = None, time.process_time()
        for share in (0.25, 1.0):
            head = head_of(asked.family, ref, whole, kept, layers, seed)
            config = head_config(
                max_tokens=int(share * asked.tokens),
                seed=seed,
                look_ratio=LOOK_RATIO,
                patience=PATIENCE,
            )
            result = train_head(head, [text], GAMMA, config, checkpoint_dir=folder)
        noted: dict[str, Any] | None = NotedLooks.noted
        row = {
            "what": "stop",
            "family": asked.family,
            "prompts": asked.work.name,
            "seed": seed,
            "epoch_tokens": result.run.epoch_tokens,
            "tokens": result.run.tokens,
            "tokens_per_s": result.run.tokens_per_s,
            "cpu_s": time.process_time() - begin,
            "best_tokens": result.best.tokens,
            "end": judged(head, held),
            "looks": [
                (p.tokens, p.weights, p.counts.tokens_a_round, p.counts.conditional)
                for p in result.curve
            ],
        }
        if noted is not None:
            own = dict(head.named_parameters())
            with torch.no_grad():
                for name, value in noted.pop("weights").items():
                    own[name].copy_(value)
            noted["cpu_s"] -= begin
            row["stopped"] = noted | judged(head, held)
            both = (row["stopped"], row["end"])
            places = np.array(row["end"]["places"], dtype=float)
            first, last = (1 + np.array(each["right"]) / places for each in both)
            gain = float((first - last) @ places / places.sum())
            std = float(np.sqrt((places**2 * (first - last - gain) ** 2).sum()) / places.sum())
            row["gain"], row["gain_std"] = gain, std
        keep(asked.work, row)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("states", "stop"))
    parser.add_argument("prompts", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--family", choices=tuple(HEAD_ROWS), default="eagle3")
    parser.add_argument("--count", type=int, default=240)
    parser.add_argument("--texts", type=int, default=10_000, help="answers to train on, at most")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=400_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    asked = parser.parse_args()
    asked.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    target, tokenizer = load_target(resolve_target("smollm2-135m"), "bfloat16")
    encoded = encode_prompts(read_prompts(asked.prompts)[: asked.count], tokenizer)
    {"states": states, "stop": stop}[asked.what](asked, target, tokenizer, encoded)


if __name__ == "__main__":
    main()
