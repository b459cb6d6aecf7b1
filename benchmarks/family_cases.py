"""Predicted against measured speed-up of 16 cases of drafters in vLLM on this CPU: kernels and
engine, not acceptance.

    archsearch engine install vllm
    archsearch profile --gpu cpu --target smollm2-135m --engine vllm --dtype bfloat16
    python benchmarks/family_cases.py measure --output DIR
    python benchmarks/family_cases.py judge --output DIR

EAGLE-3 heads of one and two layers and three vocabularies, Medusa heads, P-EAGLE heads, n-gram
lookup; gamma 1 to 5; 1 and 4 requests in flight. Heads are untrained and accepted by chance (vLLM's
synthetic acceptance, .7 of each token given those before); n-gram drafts what it finds. tau, and of
n-gram the share of requests and steps that had a draft, are what the engine counted, so that only
time is foretold. What the profile learnt of families, it learnt from other shapes, other gammas and
other text.

The cases of a group are alive at once, with the target alone, and run in turn. `--wait FILE`: begin
when that file is there, all engines having been started (a machine that is kept quiet need not be
so for that); `--done FILE`: written at the end. Wanted: median error at most 5 %, 90 % within 10 %.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from archsearch.acceptance.estimator import GivenAcceptance
from archsearch.acceptance.lookup import Ngram
from archsearch.drafters.drafter import Drafter
from archsearch.drafters.heads import Eagle3
from archsearch.drafters.lookup import NGram
from archsearch.engines.engine import (
    Engine,
    EnginePrompt,
    EngineSettings,
    EngineStep,
    GenerationResult,
    Sampling,
)
from archsearch.engines.measure.figures import token_s, under_load
from archsearch.engines.measure.turns import Plan, Variant, full_steps, run_plan
from archsearch.engines.registry import make_engine
from archsearch.estimate import Estimate
from archsearch.models.drafts import save_tokenizer
from archsearch.models.load import load_target, load_tokenizer, weights_source
from archsearch.models.targets import TargetRef, resolve_drafter, resolve_target
from archsearch.pipeline.latency import choose_latency
from archsearch.search.objective import Score, Scorer
from archsearch.workload import WorkloadRequest

RATE: Final = 0.7  # of each draft token, given those before
CONTEXT: Final = 160
MASK_TOKEN: Final = 3


@dataclass(frozen=True)
class Case:
    """`rows`: of an EAGLE-3 or P-EAGLE head's vocabulary. Medusa heads have the target's."""

    family: str
    gamma: int
    concurrency: int
    layers: int = 1
    rows: int = 4096

    def label(self) -> str:
        shape = (
            f" {self.layers} layers, {self.rows} rows"
            if self.family in ("eagle3", "peagle")
            else ""
        )
        return f"{self.family}{shape}, gamma {self.gamma}, {self.concurrency} in flight"

    def folder(self, work: Path) -> Path:
        own = (
            f"{self.layers}x{self.rows}" if self.family in ("eagle3", "peagle") else str(self.gamma)
        )
        return work / f"{self.family}-{own}"


CASES: Final = (
    Case("eagle3", 1, 1),
    Case("eagle3", 5, 1),
    Case("eagle3", 2, 1, rows=16384),
    Case("eagle3", 3, 1, rows=49152),
    Case("eagle3", 3, 1, layers=2),
    Case("medusa", 3, 1),
    Case("peagle", 3, 1, layers=4),
    Case("ngram", 3, 1),
    Case("eagle3", 3, 4),
    Case("eagle3", 4, 4, rows=16384),
    Case("eagle3", 2, 4, rows=49152),
    Case("eagle3", 5, 4, layers=2),
    Case("medusa", 3, 4),
    Case("medusa", 5, 4),
    Case("peagle", 5, 4, layers=4),
    Case("ngram", 3, 4),
)
GROUPS: Final = tuple(CASES[place : place + 4] for place in range(0, len(CASES), 4))


@dataclass(frozen=True)
class Row:
    """One case in one start of its engines. `tau` and `share` (of requests and steps with a draft)
    as the engine counted them; `alone_s`, `target_s`, `draft_s`, `rest_s`: seconds of a plain step,
    and of the parts of a round as the engine told them."""

    case: str
    tau: float
    share: float
    measured: float
    measured_std: float
    step_s: float
    target_s: float | None
    draft_s: float | None
    rest_s: float | None
    alone_s: float
    alone_target_s: float | None


@dataclass(frozen=True)
class Judged:
    """A case over all its starts beside what was foretold; times of the parts, measured and
    foretold, in seconds."""

    case: str
    tau: float
    measured: float
    measured_std: float
    predicted: float
    predicted_std: float
    parts: dict[str, tuple[float, float]]

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1.0


# --------------------------------------------------------------------------------------------------
# measuring


def make_head(case: Case, ref: TargetRef, folder: Path) -> None:
    """An untrained head that begins as the target's own layers."""
    from archsearch.drafters.forms import auxiliary_layers
    from archsearch.text.cache import target_fingerprint
    from archsearch.training.heads.eagle3 import initialise_eagle3
    from archsearch.training.heads.folder import (
        eagle3_config,
        save_eagle3,
        save_medusa,
        target_facts,
    )
    from archsearch.training.heads.medusa import initialise_medusa

    target, tokenizer = load_target(ref, "float32")
    facts = target_facts(ref.architecture, ref.name, target_fingerprint(target))
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, folder)
    if case.family == "medusa":
        save_medusa(
            initialise_medusa(target, case.gamma, range(ref.architecture.vocab_size)), folder, facts
        )
        return
    decoder = Eagle3.usual(ref.architecture).architecture
    decoder = decoder.replace(num_hidden_layers=case.layers, draft_vocab_size=case.rows)
    layers, mask = (
        auxiliary_layers(ref.architecture.num_hidden_layers),
        MASK_TOKEN if case.family == "peagle" else None,
    )
    head = initialise_eagle3(
        target, eagle3_config(decoder, target), layers, range(case.rows), mask_token_id=mask
    )
    save_eagle3(head, folder, facts)


def folder_of(case: Case, ref: TargetRef, work: Path) -> Path:
    """The head of a case, made once."""
    folder = case.folder(work)
    if not (folder / "model.safetensors").exists():
        make_head(case, ref, folder)
    return folder


class _Counting:
    """An engine that keeps the steps at full load of what it generates."""

    def __init__(self, inner: Engine, concurrency: int) -> None:
        self.inner, self.concurrency = inner, concurrency
        self.kept: list[EngineStep] = []

    def generate(
        self, prompts: Sequence[EnginePrompt], sampling: Sampling
    ) -> list[GenerationResult]:
        found = self.inner.generate(prompts, sampling)
        if sampling.max_new_tokens > 16:  # no warm-up
            self.kept += full_steps(self.inner.steps(), self.concurrency, ragged=True)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def share(self, gamma: int) -> float:
        """Of requests and steps that had a draft: verified tokens beyond one of each request, over
        gamma."""
        requests = sum(step.batch for step in self.kept)
        return sum(step.target_tokens - step.batch for step in self.kept) / max(gamma * requests, 1)


@dataclass(frozen=True)
class Measuring:
    """How a group is run. `ready`: called when all its engines have been started. `engine`: another
    one than vLLM."""

    ref: TargetRef
    work: Path
    repeats: int = 8
    tokens: int = 64
    ready: Callable[[], None] = lambda: None
    engine: Callable[[EngineSettings], Engine] | None = None
    profile: Path | None = None


def run_group(cases: Sequence[Case], how: Measuring) -> list[Row]:
    """Measure the cases of a group, which have one number of requests in flight, in one start of
    their engines."""
    number = cases[0].concurrency
    asked = WorkloadRequest(
        "cpu", batch_size=number, context_len=CONTEXT, engine="vllm", profile=how.profile
    )
    source, _ = choose_latency(asked, how.ref.architecture)
    variants, engines = [], {}
    for case in cases:
        if case.family == "ngram":
            variants.append(Variant(case.label(), Ngram(2, 5), case.gamma))
        else:
            rates = tuple(RATE ** (place + 1) for place in range(case.gamma))
            variants.append(
                Variant(case.label(), folder_of(case, how.ref, how.work), case.gamma, rates)
            )
    settings = EngineSettings(
        dtype=source.dtype,
        concurrency=number,
        max_len=2 * CONTEXT + how.tokens,
        threads=source.threads,
    )
    tokenizer = load_tokenizer(how.ref)

    def make(variant: Variant) -> Engine:
        inner = how.engine(settings) if how.engine else make_engine("vllm", settings, tokenizer)
        engines[variant.name] = _Counting(inner, number)
        return engines[variant.name]

    def progress(what: str, done: float, planned: float) -> None:
        print(f"{what} ({done:.0f}/{planned:.0f})", flush=True)
        if done == len(cases) + 1:
            how.ready()

    plan = Plan(
        weights_source(how.ref),
        variants,
        made_up_prompts(how.ref, number * how.repeats),
        Sampling(how.tokens, ignore_end=True),
        [number],
        how.repeats,
    )
    found = run_plan(make, plan, under_load, look=token_s, progress=progress)
    alone = found[plan.alone.name, number]
    rows = []
    for case in cases:
        result = found[case.label(), number]
        assert result.speedup is not None
        rows.append(
            Row(
                case.label(),
                result.tau,
                engines[case.label()].share(case.gamma),
                result.speedup.value,
                result.speedup.std,
                result.step_s,
                result.target_s,
                result.draft_s,
                result.rest_s,
                alone.step_s,
                alone.target_s,
            )
        )
    return rows


def made_up_prompts(ref: TargetRef, count: int) -> list[EnginePrompt]:
    """Prompts of random frequent tokens, each half said twice, so that n-grams occur."""
    chance = random.Random(7)
    found = []
    for number in range(count):
        half = tuple(
            chance.randrange(min(1000, ref.architecture.vocab_size)) for _ in range(CONTEXT // 3)
        )
        found.append(EnginePrompt(str(number), half + half))
    return found


# --------------------------------------------------------------------------------------------------
# judging


def judge(
    rows: Sequence[Row], ref: TargetRef, work: Path, profile: Path | None = None
) -> list[Judged]:
    """Every case that was measured, the mean of its starts beside what is foretold."""
    found = []
    for case in CASES:
        own = [row for row in rows if row.case == case.label()]
        if own:
            found.append(_judged(case, own, ref, work, profile))
    return found


def _judged(
    case: Case, rows: Sequence[Row], ref: TargetRef, work: Path, profile: Path | None
) -> Judged:
    tau, share = (statistics.fmean(getattr(row, name) for row in rows) for name in ("tau", "share"))
    score, alone_s = foretold(case, tau, share, ref, work, profile)
    values = [row.measured for row in rows]
    std = statistics.fmean(row.measured_std for row in rows) / len(rows) ** 0.5
    std = max(std, statistics.stdev(values) / len(rows) ** 0.5 if len(rows) > 1 else 0.0)
    mean = {
        name: statistics.fmean(getattr(row, name) or 0.0 for row in rows)
        for name in ("alone_s", "step_s", "target_s")
    }
    round_s = score.tau.value * score.tpot_s.value
    parts = {
        "alone": (mean["alone_s"], alone_s),
        "verification": (mean["target_s"], score.verify_s.value),
        "all else": (mean["step_s"] - mean["target_s"], round_s - score.verify_s.value),
    }
    return Judged(
        case.label(),
        tau,
        statistics.fmean(values),
        std,
        score.speedup.value,
        score.speedup.std,
        parts,
    )


def foretold(
    case: Case, tau: float, share: float, ref: TargetRef, work: Path, profile: Path | None
) -> tuple[Score, float]:
    """The score of a case at the tau that was counted, and the seconds of a plain step."""
    asked = WorkloadRequest(
        "cpu", batch_size=case.concurrency, context_len=CONTEXT, engine="vllm", profile=profile
    )
    source, workload = choose_latency(asked, ref.architecture)
    drafter: Drafter
    if case.family == "ngram":
        drafter = NGram.usual(ref.architecture).with_share(min(1.0, share))
    else:
        drafter = resolve_drafter(str(folder_of(case, ref, work)), ref).drafter
    scorer = Scorer(ref.architecture, workload, source.latency, GivenAcceptance(RATE))
    score = scorer.measured(
        drafter, Estimate(RATE, 0.0, "given"), {case.gamma: Estimate(tau, 0.0, "measured")}
    )
    return score, scorer.decode_s.value


def text(rows: Sequence[Judged]) -> str:
    errors = [abs(row.error) for row in rows]
    lines = [
        f"{'':48} {'tau':>5} {'measured':>13} {'predicted':>13} {'error':>7}   ms of a plain step,"
        " verification, all else"
    ]
    for row in rows:
        said = (
            f"{row.measured:.2f} ± {row.measured_std:.2f}",
            f"{row.predicted:.2f} ± {row.predicted_std:.2f}",
        )
        parts = ", ".join(
            f"{1e3 * seen:.1f} ({1e3 * told:.1f})" for seen, told in row.parts.values()
        )
        lines.append(
            f"{row.case:48} {row.tau:5.2f} {said[0]:>13} {said[1]:>13} {row.error:+7.1%}   {parts}"
        )
    near = sum(error <= 0.10 for error in errors) / len(errors)
    median = statistics.median(errors)
    return "\n".join(
        [
            *lines,
            (
                f"median {median:.1%}, within 10 %: {near:.0%} of {len(rows)} cases; in brackets"
                " what was foretold"
            ),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["measure", "judge"])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("runs/family-cases"),
        help="where untrained heads are kept",
    )
    parser.add_argument(
        "--group",
        type=int,
        choices=range(len(GROUPS)),
        action="append",
        help="of cases; all by default",
    )
    parser.add_argument(
        "--start", type=int, default=0, help="number of the start, part of the file's name"
    )
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--wait", type=Path)
    parser.add_argument("--done", type=Path)
    parser.add_argument("--profile", type=Path, help="folder of the profile; by default this CPU's")
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        help="folder of measured-*.json, cases.json and cases.txt",
    )
    asked = parser.parse_args()
    ref = resolve_target(asked.target)
    asked.output.mkdir(parents=True, exist_ok=True)

    def ready() -> None:
        while asked.wait and not asked.wait.exists():
            time.sleep(0.2)

    if asked.what == "measure":
        how = Measuring(ref, asked.work, asked.repeats, asked.tokens, ready, profile=asked.profile)
        for group in asked.group or range(len(GROUPS)):
            rows = run_group(GROUPS[group], how)
            name = f"measured-{group}-{asked.start}.json"
            (asked.output / name).write_text(
                json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8"
            )
        if asked.done:
            asked.done.touch()
        return
    files = sorted(asked.output.glob("measured-*.json"))
    judged = judge(
        [Row(**row) for file in files for row in json.loads(file.read_text(encoding="utf-8"))],
        ref,
        asked.work,
        asked.profile,
    )
    print(text(judged))
    data = [asdict(row) | {"error": row.error} for row in judged]
    (asked.output / "cases.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    (asked.output / "cases.txt").write_text(text(judged) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
