"""Does replay of one recorded trace tell the tau that an engine then measures, at every gamma?

    python benchmarks/replay_vs_engine.py smollm2-135m DRAFT_FOLDER [DRAFT_FOLDER ...] [--prompts
    FILE] [--temperatures 0,0.7,1]

For each draft: one teacher-forced pass over the text that the target wrote gives a trace; replayed,
it predicts tau at every gamma. Then transformers' assisted generation runs the same prompts at each
gamma, float32, and counts its rounds. Both count whole rounds in the same way
(`engines.child.answers.drafting_rounds`): a round is left out when max_new_tokens leaves it less
room than gamma + 1 tokens, or when it writes the end token.

Greedy: the engine writes the same text as the target alone but for ties that a pass over 1 token
and one over gamma + 1 tokens break differently, so the two tau should be equal. Sampled: the engine
writes other text than the recorded one, so the two agree within their errors over prompts; the
sharper test replays the engine's own text (`expected_on_its_text`), where only the coin flips of
acceptance are left: `z` is the difference in standard deviations of those.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from archsearch import speedup
from archsearch.acceptance import measured
from archsearch.acceptance.measured import RESAMPLES, Trace
from archsearch.acceptance.replay import replay_tau
from archsearch.architecture.hf_config import from_hf_config
from archsearch.engines.engine import EnginePrompt, GenerationResult, Sampling
from archsearch.engines.transformers.engine import TransformersEngine
from archsearch.files import write_json
from archsearch.models.drafts import load_draft
from archsearch.models.load import load_target
from archsearch.models.targets import resolve_target
from archsearch.text.cache import CachedSequence
from archsearch.text.generate import eos_ids, generate_text, plain_head
from archsearch.text.prompt_set import load_prompt_set, spread
from archsearch.text.prompts import EncodedPrompt, encode_prompts, read_prompts
from archsearch.text.settings import Writing

GOAL = 0.015


def with_states(
    target: Any, prompts: Sequence[EncodedPrompt], answers: Sequence[Sequence[int]]
) -> list[CachedSequence]:
    """`answers` to `prompts`, by whomever, with the target's state and argmax at every answered
    token: one pass over each."""
    head = plain_head(target)
    sequences = []
    for prompt, tokens in zip(prompts, answers, strict=True):
        ids = torch.tensor([*prompt.token_ids, *tokens])
        start = len(prompt.token_ids)
        with torch.inference_mode():
            output = target.base_model(input_ids=ids[None, :-1].to(head.device), use_cache=False)
            states = output.last_hidden_state[0, start - 1 :]  # [answer, hidden]
            greedy = torch.nn.functional.linear(states, head).argmax(-1).cpu()
        sequences.append(
            CachedSequence(ids, start, states.cpu().clone(), greedy, prompt.category, prompt.id)
        )
    return sequences


def engine_tau(results: list[GenerationResult]) -> measured.Resampled:
    """Tokens per whole round, with its bootstrap over prompts."""
    totals = np.array([[sum(r.round_lengths), r.rounds] for r in results], dtype=float)
    return measured.resampled_ratio(totals, resamples=RESAMPLES)


def run_engine(
    target: Any, draft: Any, gamma: int, prompts: list[EnginePrompt], sampling: Sampling
) -> list[GenerationResult]:
    engine = TransformersEngine(dtype="float32")
    engine.start(target, draft, gamma)
    try:
        return engine.generate(prompts, sampling)
    finally:
        engine.stop()


def flips_z(
    results: list[GenerationResult], trace: Trace, gamma: int, limit: int, draws: int = 200
) -> float:
    """(tau counted - tau expected on these texts) / its std, from walks through the same chances
    with other coins."""
    expected = replay_tau(trace, gamma, limit=limit, resamples=0).tau
    rng = np.random.default_rng(0)
    taus = []
    for _ in range(draws):
        tokens = rounds = 0
        for i, chances in enumerate(trace.accepted):
            passed = rng.random(chances.shape[0]) < chances
            walked = Trace((passed,), ("",), ("",), (trace.ends(i),))
            try:
                outcome = replay_tau(walked, gamma, limit=limit, resamples=0)
            except ValueError:
                continue
            tokens, rounds = tokens + outcome.tau * outcome.rounds, rounds + outcome.rounds
        taus.append(tokens / rounds)
    return float((engine_tau(results).value - expected) / max(np.std(taus, ddof=1), 1e-12))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("drafts", nargs="+", type=Path)
    parser.add_argument(
        "--prompts",
        type=Path,
        help="JSON lines (default: the held-out prompts that ship with archsearch)",
    )
    parser.add_argument("--max-prompts", type=int, default=12)
    parser.add_argument("--answer-tokens", type=int, default=80)
    parser.add_argument("--gammas", default="1,2,3,4,5,6,7,8")
    parser.add_argument("--temperatures", default="0,0.7,1", help="0 is greedy")
    parser.add_argument("--sampled-gammas", default="1,3,6")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="written after every row")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target, tokenizer = load_target(resolve_target(options.target), "float32")
    chosen = (
        read_prompts(options.prompts) if options.prompts else load_prompt_set(None, None).heldout
    )
    prompts = spread(chosen, options.max_prompts)
    encoded = encode_prompts(prompts, tokenizer)
    requests = [
        EnginePrompt(item.id or str(i), item.token_ids, item.category or None)
        for i, item in enumerate(encoded)
    ]
    ends, limit = eos_ids(target, tokenizer), options.answer_tokens
    rows: list[dict[str, Any]] = []
    began = time.process_time()
    print(
        f"{'draft':34s} {'T':>4s} {'gamma':>5s} {'alpha':>6s} {'replay':>14s} {'engine':>14s}"
        f" {'error':>7s} {'rounds':>6s} {'closed':>7s} {'own text':>8s} {'z':>5s} {'same text':>9s}"
    )
    for temperature in [float(value) for value in options.temperatures.split(",")]:
        with tempfile.TemporaryDirectory() as folder:
            writing = Writing(limit, temperature, seed=1)
            texts = generate_text(target, tokenizer, prompts, cache_dir=folder, writing=writing)
        alone = {
            tuple(s.token_ids[: s.prompt_tokens].tolist()): tuple(s.written.tolist())
            for s in texts.sequences
        }
        for folder in options.drafts:
            draft = load_draft(folder, "float32")
            if temperature == 0:
                trace = measured.agreement_trace(draft, texts, end_ids=ends)
            else:
                trace = measured.sampling_trace(draft, texts, temperature=temperature, end_ids=ends)
            alpha = measured.alpha(trace)
            for gamma in [
                int(value)
                for value in (options.gammas if temperature == 0 else options.sampled_gammas).split(
                    ","
                )
            ]:
                predicted = replay_tau(trace, gamma, limit=limit)
                results = run_engine(
                    target, draft, gamma, requests, Sampling(limit, temperature, seed=7)
                )
                counted = engine_tau(results)
                row: dict[str, Any] = {
                    "draft": from_hf_config(draft.config.to_dict()).label(),
                    "temperature": temperature,
                    "gamma": gamma,
                    "alpha": alpha.to_dict(),
                    "replay_tau": predicted.estimate().to_dict(),
                    "engine_tau": counted.estimate().to_dict(),
                    "engine_interval_95": counted.resampled.interval(),
                    "error": predicted.tau / counted.value - 1,
                    "rounds": sum(r.rounds for r in results),
                    "replay_rounds": predicted.rounds,
                    "closed_form_error": speedup.tau(alpha.value, gamma) / counted.value - 1,
                    "prompts": len(requests),
                }
                if temperature == 0:
                    row["same_text"] = sum(
                        alone[r.token_ids] == got.token_ids
                        for r, got in zip(requests, results, strict=True)
                    )
                else:
                    doubt = math.hypot(predicted.resampled.std, counted.std)
                    row["difference_in_stds"] = (predicted.tau - counted.value) / doubt
                    own = with_states(target, encoded, [r.token_ids for r in results])
                    own_trace = measured.sampling_trace(
                        draft, own, temperature=temperature, head=texts.head, end_ids=ends
                    )
                    row["expected_on_its_text"] = replay_tau(
                        own_trace, gamma, limit=limit, resamples=0
                    ).tau
                    row["z"] = flips_z(results, own_trace, gamma, limit)
                rows.append(row)
                own_text = (
                    f"{row['expected_on_its_text']:8.3f} {row['z']:5.1f}"
                    if temperature
                    else f"{'':8s} {'':5s}"
                )
                same = f"{row['same_text']}/{len(requests)}" if temperature == 0 else ""
                print(
                    f"{row['draft']:34s} {temperature:4.1f} {gamma:5d} {alpha.value:6.3f}"
                    f" {predicted.tau:6.3f} ± {predicted.resampled.std:5.3f} {counted.value:6.3f} ±"
                    f" {counted.std:5.3f} {100 * row['error']:+6.2f}% {row['rounds']:6d}"
                    f" {100 * row['closed_form_error']:+6.2f}% {own_text} {same:>9s}",
                    flush=True,
                )
                if options.json:
                    write_json(
                        options.json,
                        {
                            **summary(rows),
                            "target": options.target,
                            "answer_tokens": limit,
                            "prompts": str(options.prompts or "shipped, held out"),
                            "rows": rows,
                        },
                    )
    result = summary(rows)
    print(f"{time.process_time() - began:.0f} CPU-seconds", file=sys.stderr)
    print(json.dumps(result))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figure: share of greedy rows within the goal; for sampled rows how far apart in standard
    deviations."""
    greedy = [abs(row["error"]) for row in rows if row["temperature"] == 0]
    sampled = [row for row in rows if row["temperature"] > 0]
    return {
        "goal": GOAL,
        "greedy_rows": len(greedy),
        "greedy_within_goal": sum(e <= GOAL for e in greedy),
        "greedy_largest_error": max(greedy, default=None),
        "sampled_rows": len(sampled),
        "sampled_largest_error": max((abs(row["error"]) for row in sampled), default=None),
        "sampled_rms_difference_in_stds": _rms([row["difference_in_stds"] for row in sampled]),
        "sampled_rms_z_on_its_text": _rms([row["z"] for row in sampled]),
    }


def _rms(values: list[float]) -> float | None:
    return float(np.sqrt(np.mean(np.square(values)))) if values else None


if __name__ == "__main__":
    main()
