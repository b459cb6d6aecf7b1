"""Is the searched draft faster than drafts one would have built by hand, with the same training?
And does the prediction hold?

    python benchmarks/demo_rivals.py runs/demo [--prompts 12] [--gammas 2,4,6] [--budget SECONDS]
    [--json FILE]

Takes a confirmed run. Rivals of the run's best draft, each with the same trimmed head, trained from
the same target on the same text for the same seconds: the conventional draft of equal parameters
(deep and narrow), the target-shaped one, and the llama-68m shape. Every draft then runs in the
engine, interleaved with the target alone, at each gamma; the table puts the prediction (latency
from the profile, tau from held-out text) beside the measurement. Trained rivals are kept in the
run, so a second call only measures.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import body_parameters
from archsearch.drafts.records import load_trained
from archsearch.engines.engine import EnginePrompt, Sampling
from archsearch.engines.measure.figures import best_of_gammas
from archsearch.engines.measure.turns import Plan, Variant, run_plan
from archsearch.engines.transformers.engine import TransformersEngine
from archsearch.files import read_json, write_json
from archsearch.models.drafts import load_draft
from archsearch.pipeline import SearchSession
from archsearch.progress import ProgressLine
from archsearch.text.prompt_set import spread
from archsearch.text.prompts import encode_prompts


def rivals_of(best: Architecture, target: Architecture) -> dict[str, Architecture]:
    """The hand-picked shapes, with the best draft's head so that only the layers differ."""
    common = {
        "vocab_size": target.vocab_size,
        "draft_vocab_size": best.draft_vocab_size,
        "rope_theta": target.rope_theta,
        "max_position_embeddings": target.max_position_embeddings,
    }
    body = body_parameters(best)

    def deep(hidden: int) -> Architecture:
        heads = hidden // 64
        return Architecture(hidden, 4 * hidden * 2 // 3 // 64 * 64, 8, heads, heads, 64, **common)

    narrow = min(
        (deep(hidden) for hidden in range(64, 1025, 64)),
        key=lambda arch: abs(body_parameters(arch) - body),
    )
    shaped = Architecture(
        target.hidden_size,
        target.intermediate_size,
        1,
        target.num_attention_heads,
        target.num_key_value_heads,
        target.head_dim,
        **common,
    )
    layers = max(1, round(body / body_parameters(shaped)))
    return {
        "deep and narrow, equal parameters": narrow,
        "target-shaped, equal parameters": shaped.replace(num_hidden_layers=layers),
        "llama-68m shape": Architecture(768, 3072, 2, 12, 12, 64, **common),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--gammas", default="2,4,6")
    parser.add_argument(
        "--budget",
        type=float,
        help="training seconds of each rival (default: as many as the best draft had)",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    session = SearchSession.reopen(options.run)
    trainer, scorer = session.trainer(), session.scorer
    best = session.run.score(1).architecture
    budget = options.budget or float(
        read_json(session.run.best_dir(1) / "training.json", "training record")["seconds"]
    )
    drafts = {"searched (rank 1)": load_trained(best, session.run.best_dir(1))}
    for name, arch in rivals_of(best, session.target.architecture).items():
        if arch == best:
            print(f"{name}: is the searched shape itself", file=sys.stderr)
            continue
        folder = trainer.draft_folder(arch)
        done = folder / "training.json"
        if done.exists() and float(read_json(done, "training record")["seconds"]) >= 0.98 * budget:
            drafts[name] = load_trained(arch, folder)
        else:
            (
                trainer.texts.write_training(1.0)
                if not (options.run / "text" / "cache.json").exists()
                else trainer.texts.training()
            )
            drafts[name] = trainer.train(arch, budget, session.request.seed, name)

    encoded = encode_prompts(spread(trainer.prompts.confirming, options.prompts), trainer.tokenizer)
    prompts = [
        EnginePrompt(item.id or str(i), item.token_ids, item.category or None)
        for i, item in enumerate(encoded)
    ]
    sampling = Sampling(max_new_tokens=session.request.answer_tokens)
    context = round(
        sum(len(p.token_ids) for p in prompts) / len(prompts) + session.request.answer_tokens / 2
    )
    local = scorer.at_context(context)
    rows = []
    for name, trained in drafts.items():
        predicted_gamma = local.measured(trained.architecture, trained.alpha, trained.tau).gamma
        wanted = sorted({int(g) for g in options.gammas.split(",")} | {predicted_gamma})
        draft = load_draft(trained.folder, session.source.dtype)
        with ProgressLine(name) as line:
            variants = [Variant(f"gamma {gamma}", draft, gamma) for gamma in wanted]
            plan = Plan(trainer.loaded.model(), variants, prompts, sampling)
            results = run_plan(
                lambda _: TransformersEngine(dtype=session.source.dtype),
                plan,
                best_of_gammas,
                progress=line,
            )
        for gamma, outcome in ((each.gamma, each) for each in results.values()):
            predicted = local.measured(
                trained.architecture, trained.alpha, trained.tau, gammas=[gamma]
            )
            counted = local.measured(
                trained.architecture, outcome.alpha, {gamma: outcome.tau}, gammas=[gamma]
            )
            rows.append(
                {
                    "draft": name,
                    "shape": trained.architecture.label(),
                    "body_parameters": body_parameters(trained.architecture),
                    "heldout_alpha": trained.alpha.value,
                    "gamma": gamma,
                    "alpha": outcome.alpha.value,
                    "tau": outcome.tau.value,
                    "predicted_tau": trained.tau[gamma].value,
                    "speedup": outcome.speedup.value,
                    "interval": outcome.speedup_interval,
                    "predicted": predicted.speedup.value,
                    "error": predicted.speedup.value / outcome.speedup.value - 1,
                    "error_at_measured_tau": counted.speedup.value / outcome.speedup.value - 1,
                    "round_s": outcome.round_s,
                    "decode_s": outcome.decode_s,
                    "predicted_decode_s": predicted.decode_s.value,
                }
            )
    report(rows, budget)
    if options.json:
        write_json(options.json, {"budget_s": budget, "context": context, "rows": rows})
    print(json.dumps({"rows": len(rows), **summary(rows)}))


def summary(rows: list[dict]) -> dict:
    """Share of predictions within 10 %, and the best gamma of each draft."""
    errors = [abs(row["error"]) for row in rows]
    counted = [abs(row["error_at_measured_tau"]) for row in rows]
    names = dict.fromkeys(row["draft"] for row in rows)
    best = {name: max(row["speedup"] for row in rows if row["draft"] == name) for name in names}
    return {
        "within_10_percent": sum(e <= 0.10 for e in errors) / len(errors),
        "median_error": median(errors),
        "within_10_percent_at_measured_tau": sum(e <= 0.10 for e in counted) / len(counted),
        "median_error_at_measured_tau": median(counted),
        "best_speedup": best,
    }


def report(rows: list[dict], budget: float) -> None:
    print(
        f"Each draft trained {budget:.0f} s on the same text. Speed-up: median over prompts, 5-95 %"
        " by bootstrap.\n"
    )
    print(
        f"{'draft':36s} {'shape':38s} {'gamma':>5s} {'alpha':>6s} {'tau':>5s} {'speed-up':>17s}"
        f" {'predicted':>9s} {'error':>7s} {'at tau':>7s}"
    )
    for row in rows:
        low, high = row["interval"]
        print(
            f"{row['draft']:36s} {row['shape']:38s} {row['gamma']:5d} {row['alpha']:6.3f}"
            f" {row['tau']:5.2f} {row['speedup']:5.2f} ({low:.2f}-{high:.2f})"
            f" {row['predicted']:9.2f} {100 * row['error']:+6.1f}%"
            f" {100 * row['error_at_measured_tau']:+6.1f}%"
        )
    result = summary(rows)
    print(
        f"\nPredicted within 10 %: {result['within_10_percent']:.0%} of {len(rows)} (draft, gamma)"
        f" pairs, median error {result['median_error']:.1%}; at the tau the engine counted:"
        f" {result['within_10_percent_at_measured_tau']:.0%},"
        f" {result['median_error_at_measured_tau']:.1%}."
    )


if __name__ == "__main__":
    main()
