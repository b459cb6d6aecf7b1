"""Does a climb find a better draft than five hand-picked shapes that share the same time?

    python benchmarks/climb_rivals.py train RUN [--seconds 340] [--head 2048]
    python benchmarks/climb_rivals.py measure RUN [--prompts 16] [--gammas 2,4,6] [--json FILE]

Takes a run of `archsearch search --time-budget` that ended. The rivals (1, 2 and 4 layers of the
target's shape, 8 narrow layers, the llama-68m shape) have the head of the climb's best draft, are
initialised from the same target and distilled on the same text. Together they train as long as the
climb's rungs and finalists did together. `measure` runs all six in the engine, interleaved with the
target alone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import body_parameters
from archsearch.drafts.records import TrainedDraft, load_trained
from archsearch.drafts.trainer import DraftTrainer
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

TEXTS = ("text", "more", "plain", "heldout")


def rivals_of(best: Architecture, target: Architecture) -> dict[str, Architecture]:
    """The hand-picked shapes, with the best draft's head so that only the layers differ."""
    common = {
        "vocab_size": target.vocab_size,
        "draft_vocab_size": best.draft_vocab_size,
        "rope_theta": target.rope_theta,
        "max_position_embeddings": target.max_position_embeddings,
    }
    shaped = Architecture(
        target.hidden_size,
        target.intermediate_size,
        1,
        target.num_attention_heads,
        target.num_key_value_heads,
        target.head_dim,
        **common,
    )
    return {
        "1 layer, target-shaped": shaped,
        "2 layers, target-shaped": shaped.replace(num_hidden_layers=2),
        "4 layers, target-shaped": shaped.replace(num_hidden_layers=4),
        "8 narrow layers": Architecture(256, 640, 8, 4, 4, 64, **common),
        "llama-68m shape": Architecture(768, 3072, 2, 12, 12, 64, **common),
    }


def trainer_beside(session: SearchSession, run: Path) -> DraftTrainer:
    """A trainer beside the climb's own, with the same text."""
    folder = run / "rivals"
    folder.mkdir(exist_ok=True)
    for name in TEXTS:
        if (run / name).is_dir() and not (folder / name).exists():
            (folder / name).symlink_to((run / name).resolve(), target_is_directory=True)
    trainer = session.trainer()
    trainer.folder = trainer.texts.folder = folder
    return trainer


def trained_s(run: Path) -> float:
    """Seconds that the climb trained, all shapes together."""
    seconds = 0.0
    for folder in (run / "finalists").iterdir():
        for name in ("training.json", "curve.json"):
            if (folder / name).exists():
                seconds += float(read_json(folder / name, "training record")["seconds"])
                break
    return seconds


def train(run: Path, only: list[int], seconds: float | None, head: int | None) -> None:
    session = SearchSession.reopen(run)
    trainer = trainer_beside(session, run)
    target = session.target.architecture
    rivals = rivals_of(
        target.replace(draft_vocab_size=head) if head else session.run.score(1).architecture, target
    )
    each = seconds or trained_s(run) / len(rivals)
    for number, (name, arch) in enumerate(rivals.items(), start=1):
        if only and number not in only:
            continue
        done = trainer.draft_folder(arch) / "training.json"
        if done.exists() and float(read_json(done, "training record")["seconds"]) >= 0.98 * each:
            continue
        trainer.texts.training()
        draft = trainer.train(arch, each, session.request.seed, name)
        print(f"{name}: alpha {draft.alpha.value:.3f} after {each:.0f} s", flush=True)


def measure(run: Path, count: int, gammas: list[int], only: list[int], out: Path | None) -> None:
    session = SearchSession.reopen(run)
    trainer = trainer_beside(session, run)
    best = session.run.score(1).architecture
    drafts: dict[str, TrainedDraft] = {
        "found by the climb": load_trained(best, session.run.best_dir(1))
    }
    for number, (name, arch) in enumerate(
        rivals_of(best, session.target.architecture).items(), start=1
    ):
        if only and number not in only:
            continue
        drafts[name] = load_trained(arch, trainer.draft_folder(arch))
    encoded = encode_prompts(spread(trainer.prompts.confirming, count), trainer.tokenizer)
    prompts = [
        EnginePrompt(item.id or str(i), item.token_ids, item.category or None)
        for i, item in enumerate(encoded)
    ]
    sampling = Sampling(max_new_tokens=session.request.answer_tokens)
    rows: list[dict[str, Any]] = []
    for name, trained in drafts.items():
        predicted = session.scorer.measured(trained.architecture, trained.alpha, trained.tau)
        with ProgressLine(name) as line:
            draft = load_draft(trained.folder, session.source.dtype)
            variants = [
                Variant(f"gamma {gamma}", draft, gamma)
                for gamma in sorted({*gammas, predicted.gamma})
            ]
            plan = Plan(trainer.loaded.model(), variants, prompts, sampling)
            results = run_plan(
                lambda _: TransformersEngine(dtype=session.source.dtype),
                plan,
                best_of_gammas,
                progress=line,
            )
        for gamma, outcome in ((each.gamma, each) for each in results.values()):
            rows.append(
                {
                    "draft": name,
                    "shape": trained.architecture.label(),
                    "body_parameters": body_parameters(trained.architecture),
                    "heldout_alpha": trained.alpha.value,
                    "gamma": gamma,
                    "alpha": outcome.alpha.value,
                    "tau": outcome.tau.value,
                    "speedup": outcome.speedup.value,
                    "std": outcome.speedup.std,
                    "interval": outcome.speedup_interval,
                    "predicted_gamma": predicted.gamma,
                    "predicted": predicted.speedup.value,
                }
            )
    tops = {
        name: max((row for row in rows if row["draft"] == name), key=lambda row: row["speedup"])
        for name in drafts
    }
    for name, row in tops.items():
        low, high = row["interval"]
        print(
            f"{name:26s} {row['shape']:38s} held-out alpha {row['heldout_alpha']:.3f}  gamma"
            f" {row['gamma']}  {row['speedup']:.2f} ({low:.2f}-{high:.2f})"
        )
    found = tops["found by the climb"]["speedup"]
    rival = max(
        (row for name, row in tops.items() if name != "found by the climb"),
        key=lambda row: row["speedup"],
    )
    reached = found >= rival["speedup"]
    result = {
        "climb": found,
        "best_rival": rival["speedup"],
        "best_rival_name": rival["draft"],
        "reached": reached,
    }
    if out:
        write_json(
            out, {"trained_s_in_all": trained_s(run), "prompts": count, **result, "rows": rows}
        )
    print(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["train", "measure"])
    parser.add_argument("run", type=Path)
    parser.add_argument(
        "--only", default="", help="numbers of the rivals to train or measure, 1 to 5"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help="training of each rival (default: a fifth of what the climb has trained)",
    )
    parser.add_argument(
        "--head",
        type=int,
        help=(
            "rows of the rivals' heads (default: as the climb's best; for a climb that still runs)"
        ),
    )
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--gammas", default="2,4,6")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    only = [int(number) for number in options.only.split(",") if number]
    if options.what == "train":
        train(options.run, only, options.seconds, options.head)
    else:
        gammas = [int(gamma) for gamma in options.gammas.split(",") if gamma]
        measure(options.run, options.prompts, gammas, only, options.json)


if __name__ == "__main__":
    main()
