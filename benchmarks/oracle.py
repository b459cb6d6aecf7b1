"""Does a search by modelled speed-up find the draft that a real engine would have found?

    archsearch engine install llama.cpp      # or vllm; transformers needs nothing
    archsearch profile --gpu cpu --target smollm2-135m        # for another engine: --engine E
    python benchmarks/oracle.py measure --engine transformers --minutes 20
    python benchmarks/oracle.py judge

Every shape of `registered.yaml` runs at gamma 1 to 6 in the engine, with random weights; its
tokens are accepted by chance (synthetic acceptance) at the rates that the acceptance prior says of
its shape, so that search and oracle have the same alpha. A visit is one short answer between plain
steps of the target alone, which say how fast the machine was. It shows the cost of a round in
plain steps; the speed-up is tau over that cost. `measure` predicts before it measures, keeps each
visit as a line of rows-*.jsonl and goes on where it was stopped. When every point was seen, the
rest of the time goes to the finalists: the best measured, the search's fives and what simpler rules
pick, again and in turn, so that the best is not the luckiest. `judge` writes figures.json,
figures.txt and the picture. `register` drew the shapes.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
import yaml

from archsearch.architecture import catalogue
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import parameters, weight_bytes_per_pass
from archsearch.engine_facts import engine_facts
from archsearch.engines.engine import Engine, EnginePrompt, EngineSettings, Sampling
from archsearch.engines.measure.passes import spread_drafts
from archsearch.engines.measure.turns import full_steps
from archsearch.engines.registry import make_engine
from archsearch.latency.model import LatencyModel
from archsearch.models.targets import resolve_target
from archsearch.pipeline.in_engine import engine_target, random_draft
from archsearch.pipeline.latency import acceptance_for, choose_latency
from archsearch.profiles import Profile
from archsearch.search.objective import Scorer
from archsearch.search.space import SearchSpace
from archsearch.speedup import accepted_by_position, drifting_positions, logit, sigmoid
from archsearch.workload import WorkloadRequest
from engine_figures import shape as read_shape

FOLDER: Final = Path(__file__).parent / "results" / "2026-11-25-oracle-quiet"
PICTURE: Final = Path(__file__).parents[1] / "docs" / "pictures" / "oracle.png"
GAMMAS: Final = (1, 2, 3, 4, 5, 6)
MADE_UP: Final = "made-up-360m"  # the shape of SmolLM2-360M, random weights
PROMPT, ROUNDS, PLAIN, CONTEXT = 32, 8, 7, 42  # tokens, rounds, plain steps, tokens on the mean
UNSTEADY: Final = 0.15  # by so much may the plain steps before and after differ
FINAL_VISITS: Final = 4
DRAWS: Final = 500

LEVELS: Final = {"narrow text": 1.5, "as the prior says": 0.0}
"""What is added to the logit of the prior's alpha: the demo's three drafts have 1.0 to 2.0 more
than the prior says. Visits accept at the first; the cost of a round hardly depends on it."""

HEADLINE: Final = next(iter(LEVELS))

Point = tuple[str, int]
"""(label of a shape, gamma)."""


# --------------------------------------------------------------------------------------------------
# registered


def register(space: dict[str, Any], count: int, seed: int = 0) -> dict[str, list[str]]:
    """Labels of `count` shapes for each target, far apart in depth, width and FFN, their head rows
    as they were drawn; the smallest of those drawn; and one of the target's own width with two
    layers."""
    found = {}
    for name in ("smollm2-135m", MADE_UP):
        target = architecture(name)
        whole = SearchSpace.from_dict(space, "oracle")
        most = whole.limits(target).max_parameters or math.inf
        drawn = [s for s in whole.sample(target, 4000, seed) if parameters(s) <= most]
        heads = {shape.replace(draft_vocab_size=None): shape for shape in drawn}
        own = target.replace(num_hidden_layers=2, tie_word_embeddings=False)
        shapes = [heads[each] for each in spread_drafts(drawn, count)]
        smallest = min(drawn, key=parameters)
        found[name] = [each.label() for each in dict.fromkeys((*shapes, smallest, own))]
    return found


def known_as(name: str) -> str:
    """The name of a target's shape in the catalogue."""
    return "smollm2-360m" if name == MADE_UP else name


def architecture(name: str) -> Architecture:
    return catalogue.load(known_as(name)).architecture


@dataclass(frozen=True)
class Setup:
    """One engine with one target; its files lie in `folder`. `which` predictions: "" for those of
    the last profile, "first-" for those of one before, where a disturbed one was made again."""

    engine: str
    target: str
    folder: Path = FOLDER
    which: str = ""

    @property
    def name(self) -> str:
        return f"{self.engine}-{self.target}"

    @property
    def rows_file(self) -> Path:
        return self.folder / f"rows-{self.name}.jsonl"

    @property
    def predicted_file(self) -> Path:
        return self.folder / f"{self.which}predicted-{self.name}.csv"

    @cached_property
    def shapes(self) -> dict[str, Architecture]:
        said = yaml.safe_load((self.folder / "registered.yaml").read_text(encoding="utf-8"))
        size = architecture(self.target).vocab_size
        return {label: read_shape(label, size) for label in said["shapes"][self.target]}

    @property
    def points(self) -> list[Point]:
        return [(label, gamma) for label in self.shapes for gamma in GAMMAS]

    def rows(self) -> list[dict[str, Any]]:
        """The visits so far."""
        if not self.rows_file.exists():
            return []
        lines = self.rows_file.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]


# --------------------------------------------------------------------------------------------------
# predicted


def predict(
    setup: Setup, profile: Path | None, dtype: str | None, kernels: Path | None = None
) -> pd.DataFrame:
    """A row for each point: what the search believes of it, and what the simpler rules do. Costs
    are of a round, in plain steps. `kernels`: a profile with torch's, where `profile` has none."""
    target = architecture(setup.target)
    asked = WorkloadRequest("cpu", profile, context_len=CONTEXT, engine=setup.engine, dtype=dtype)
    source, workload = choose_latency(asked, target)
    latency = source.latency
    assert isinstance(latency, LatencyModel)
    # Kernels alone: as torch runs them, nothing added by host or engine.
    torch_dtype = latency.dtype if latency.dtype in ("bfloat16", "float32") else "bfloat16"
    bare = LatencyModel(Profile.load(kernels) if kernels else latency.profile, torch_dtype)
    plain_work = replace(workload, dtype=torch_dtype)
    estimator, _ = acceptance_for("prior", known_as(setup.target))
    scorer = Scorer(target, workload, latency, estimator)
    full = weight_bytes_per_pass(target, workload.dtype_bytes)
    rows = []
    for label, draft in setup.shapes.items():
        known = scorer.predicted_acceptance(scorer(draft).proposer).acceptance
        for gamma in GAMMAS:
            costs = {
                "cost": latency.round(target, draft, workload, gamma).round_s.value
                / latency.decode_s(target, workload).value,
                "kernel_cost": bare.round(target, draft, plain_work, gamma).round_s.value
                / bare.decode_s(target, plain_work).value,
                "bytes_cost": 1 + gamma * weight_bytes_per_pass(draft, workload.dtype_bytes) / full,
            }
            rows.append(
                {
                    "shape": label,
                    "gamma": gamma,
                    "parameters": parameters(draft),
                    "alpha": known.alpha.value,
                    "drift": known.drift.value,
                    "dtype": latency.dtype,
                    "threads": source.threads,
                    **costs,
                }
            )
    return pd.DataFrame(rows)


def rates(alpha: float, drift: float, gamma: int) -> tuple[float, ...]:
    """The share of rounds in which each draft token is accepted."""
    return tuple(accepted_by_position(drifting_positions(alpha, drift, gamma)))


def believed(setup: Setup, level: str) -> pd.DataFrame:
    """The predictions, with alphas at a level."""
    table = pd.read_csv(setup.predicted_file)
    return table.assign(alpha=[sigmoid(logit(a) + LEVELS[level]) for a in table.alpha])


def speedups(table: pd.DataFrame, cost: pd.Series, alpha: pd.Series | None = None) -> np.ndarray:
    """tau over the cost of a round, of every point."""
    alphas = table.alpha if alpha is None else alpha
    taus = [
        1 + sum(rates(a, drift, gamma))
        for a, drift, gamma in zip(alphas, table.drift, table.gamma, strict=True)
    ]
    return np.array(taus) / cost.to_numpy()


# --------------------------------------------------------------------------------------------------
# measured


class Bench:
    """The engine with the target alone, and with one draft after the other."""

    def __init__(self, setup: Setup, table: pd.DataFrame, work: Path) -> None:
        self.setup, self.work, self.dtype = setup, work, str(table.dtype[0])
        self.inside = engine_facts(setup.engine).in_process
        self.table = table.set_index(["shape", "gamma"])
        settings = EngineSettings(
            dtype=self.dtype, max_len=256, threads=int(table.threads[0]), mode="eager"
        )
        self.alone: Engine = make_engine(setup.engine, settings)
        self.drafting: Engine = make_engine(setup.engine, settings)
        self.drafts: dict[str, Any] = {}
        self.target = self._target()
        if self.inside:
            import torch

            torch.set_num_threads(int(table.threads[0]))
        self.alone.start(self.target, None, 0)
        self.plain_s(0)

    def _target(self) -> Any:
        ref = resolve_target(self.setup.target) if self.setup.target != MADE_UP else None
        if not self.inside:
            made_up = architecture(MADE_UP)
            if ref:
                return engine_target(ref, self.setup.engine, self.dtype)
            return random_draft(made_up, self.dtype, self.work)
        from archsearch.models.load import load_target

        if ref:
            return load_target(ref, self.dtype)[0]
        return random_draft(architecture(MADE_UP), self.dtype, self.work, load=True)

    def draft(self, label: str) -> Any:
        """Random weights, made once."""
        if label not in self.drafts:
            draft = self.setup.shapes[label]
            draft = draft if self.inside else draft.replace(draft_vocab_size=None)
            self.drafts[label] = random_draft(draft, self.dtype, self.work, load=self.inside)
        return self.drafts[label]

    def prompt(self, visit: int) -> EnginePrompt:
        chance = random.Random(visit)
        return EnginePrompt(str(visit), tuple(chance.randrange(10, 1000) for _ in range(PROMPT)))

    def plain_s(self, visit: int) -> float:
        """Median seconds of a plain step now."""
        self.alone.generate([self.prompt(visit)], Sampling(PLAIN + 1, ignore_end=True))
        return statistics.median(s.seconds for s in self.alone.steps() if not s.prefill)

    def visit(self, point: Point, visit: int) -> dict[str, Any]:
        """One short answer at a point, between plain steps."""
        own = self.table.loc[point]
        chances = rates(own.alpha, own.drift, point[1])
        draft, (_, gamma) = self.draft(point[0]), point
        self.drafting.start(self.target, draft, gamma, synthetic=chances)
        if not self.inside:  # a process of its own, which is cold
            self.drafting.generate([self.prompt(0)], Sampling(3 * gamma + 3, ignore_end=True))
        before = self.plain_s(visit)
        length = round(ROUNDS * (1 + sum(chances))) + gamma + 2
        self.drafting.generate([self.prompt(visit)], Sampling(length, ignore_end=True))
        steps = [s for s in full_steps(self.drafting.steps(), 1) if s.gamma == gamma]
        after = self.plain_s(visit)
        return {
            "visit": visit,
            "shape": point[0],
            "gamma": gamma,
            "plain_s": [round(before, 6), round(after, 6)],
            "round_s": [round(s.seconds, 6) for s in steps],
            "written": sum(s.written for s in steps),
            "at": time.strftime("%Y-%m-%dT%H:%M:%S"),
        }

    def stop(self) -> None:
        self.drafting.stop()
        self.alone.stop()


def steady(row: dict[str, Any]) -> bool:
    """Whether the machine kept its pace during a visit."""
    before, after = row["plain_s"]
    return abs(before / after - 1.0) <= UNSTEADY and len(row["round_s"]) >= 3


def cost(row: dict[str, Any]) -> float:
    """A round in plain steps."""
    return statistics.median(row["round_s"]) / statistics.fmean(row["plain_s"])


def costs(rows: Sequence[dict[str, Any]], finals: bool = False) -> dict[Point, list[float]]:
    """Costs of each point, visit by visit: the steady ones; `finals`: of the last part only. Where
    no visit was steady, all."""
    found: dict[Point, dict[bool, list[float]]] = {}
    for row in rows:
        if not finals or row["visit"] >= 100:
            kinds = found.setdefault((row["shape"], row["gamma"]), {True: [], False: []})
            kinds[steady(row)].append(cost(row))
    return {point: kinds[True] or kinds[False] for point, kinds in found.items()}


def agenda(setup: Setup, sweeps: int) -> Iterator[tuple[Point, int]]:
    """(point, visit) in the order that they are run, as long as somebody asks: `sweeps` over all
    points, then the finalists in turn. Visits that were unsteady are made once more after their
    sweep."""
    for visit in range(1, sweeps + 1):
        order = setup.points
        random.Random(visit).shuffle(order)
        for again in (False, True):
            rows = [row for row in setup.rows() if row["visit"] == visit]
            seen = {(row["shape"], row["gamma"]) for row in rows if again <= steady(row)}
            if again:
                tries = [(row["shape"], row["gamma"]) for row in rows]
                seen |= {point for point in tries if tries.count(point) > 1}
            yield from ((point, visit) for point in order if point not in seen)
    best = finalists(setup)
    for visit in range(101, 101 + 10 * FINAL_VISITS):
        seen = {(row["shape"], row["gamma"]) for row in setup.rows() if row["visit"] == visit}
        random.Random(visit).shuffle(best)
        yield from ((point, visit) for point in best if point not in seen)


def finalists(setup: Setup) -> list[Point]:
    """The ten best by the sweeps; and at each level the best, the search's fives, and what each
    rule picks."""
    found: list[Point] = []
    for level in LEVELS:
        table = believed(setup, level)
        first = [row for row in setup.rows() if row["visit"] < 100]
        measured = value_of(table, costs(first))
        best = sorted(measured, key=lambda point: -measured[point])
        found += best[: 10 if level == HEADLINE else 3]
        found += [point for picked in picks(table, measured).values() for point in picked]
    return list(dict.fromkeys(found))


def measure(setup: Setup, arguments: argparse.Namespace) -> None:
    """Predict, then measure until the time is over."""
    if not setup.predicted_file.exists():
        table = predict(setup, arguments.profile, arguments.dtype, arguments.kernels)
        table.to_csv(setup.predicted_file, index=False, float_format="%.6g")
    table = believed(setup, HEADLINE)
    bench = Bench(setup, table, arguments.work)
    ends = time.monotonic() + 60 * arguments.minutes
    try:
        for number, (point, visit) in enumerate(agenda(setup, arguments.sweeps)):
            if time.monotonic() > ends:
                break
            row = bench.visit(point, visit)
            with setup.rows_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            if number % 20 == 0:
                left = (ends - time.monotonic()) / 60
                print(f"visit {visit}, {number + 1} made, {left:.1f} min left", flush=True)
    finally:
        bench.stop()


# --------------------------------------------------------------------------------------------------
# judged


def value_of(table: pd.DataFrame, found: dict[Point, list[float]]) -> dict[Point, float]:
    """Measured speed-up of every point that was seen."""
    points = list(zip(table["shape"], table.gamma, strict=True))
    median = pd.Series([statistics.median(found.get(point) or [np.nan]) for point in points])
    values = speedups(table, median)
    return {point: float(v) for point, v in zip(points, values, strict=True) if np.isfinite(v)}


def beliefs(table: pd.DataFrame) -> dict[Point, float]:
    """Predicted speed-up of every point."""
    points = zip(table["shape"], table.gamma, strict=True)
    return dict(zip(points, speedups(table, table.cost).tolist(), strict=True))


def ranked(table: pd.DataFrame, values: np.ndarray) -> list[Point]:
    """Every shape at its best gamma by `values`, the best first."""
    order = table.assign(value=values).sort_values("value", ascending=False)
    order = order.drop_duplicates("shape")
    return list(zip(order["shape"], order.gamma, strict=True))


def picks(table: pd.DataFrame, measured: dict[Point, float]) -> dict[str, list[Point]]:
    """What the search and each rule would run. Rules that name a shape get the gamma that was
    measured to be its best."""

    def best_gamma(label: str) -> Point:
        own = {point: value for point, value in measured.items() if point[0] == label}
        return max(own, key=lambda point: own[point])

    smallest = str(table["shape"][table.parameters.idxmin()])
    three = table[table.gamma == 3]
    search = ranked(table, speedups(table, table.cost))
    predicted = beliefs(table)
    return {
        "search, top 1": search[:1],
        "search, top 5": search[:5],
        "five best points": sorted(predicted, key=lambda point: -predicted[point])[:5],
        "kernels only": ranked(table, speedups(table, table.kernel_cost))[:1],
        "bytes only": ranked(table, speedups(table, table.bytes_cost))[:1],
        "gamma 3 always": ranked(three, speedups(three, three.cost))[:1],
        "target-shaped": [best_gamma(str(table["shape"].iloc[-1]))],  # registered as the last
        "smallest draft": [best_gamma(smallest)],
    }


def regret(picked: Sequence[Point], measured: dict[Point, float]) -> float:
    """By which share the best of `picked` lies below the best of all."""
    best = max(measured.values())
    return 1.0 - max(measured[point] for point in picked) / best


def noise(table: pd.DataFrame, finals: dict[Point, list[float]]) -> dict[str, float | None]:
    """What the oracle loses to itself: the finalist that is best by one half of its visits, valued
    by the other half; and the spread of one visit."""
    chance, lost = random.Random(0), []
    shortest = min(map(len, finals.values()), default=0)
    for _ in range(DRAWS if shortest >= 2 else 0):
        halves: tuple[dict[Point, list[float]], dict[Point, list[float]]] = ({}, {})
        for point, values in finals.items():
            mixed = chance.sample(values, len(values))
            halves[0][point], halves[1][point] = mixed[::2], mixed[1::2]
        one, other = (value_of(table, half) for half in halves)
        lost.append(regret([max(one, key=lambda point: one[point])], other))
    spread = [statistics.stdev(v) / statistics.fmean(v) for v in finals.values() if len(v) > 1]
    return {
        "regret_of_the_oracle": statistics.fmean(lost) if lost else None,
        "spread_of_a_visit": statistics.median(spread) if spread else None,
    }


def wrong_alpha(table: pd.DataFrame, measured: dict[Point, float]) -> dict[str, float]:
    """Regret of a search that believes alphas that are off by 0.05: all to one side, or each shape
    to a side of its own by chance (mean, and 90 %)."""
    found = {}

    def tries(shift: pd.Series | float) -> tuple[float, float]:
        order = ranked(table, speedups(table, table.cost, (table.alpha + shift).clip(0.01, 0.99)))
        return regret(order[:1], measured), regret(order[:5], measured)

    for name, shift in (("all + 0.05", 0.05), ("all - 0.05", -0.05)):
        found[f"{name}, top 1"], found[f"{name}, top 5"] = tries(shift)
    chance = np.random.default_rng(0)
    shapes = table["shape"].unique()
    drawn = []
    for _ in range(DRAWS // 5):
        signs = dict(zip(shapes, chance.choice([-0.05, 0.05], len(shapes)), strict=True))
        drawn.append(tries(table["shape"].map(signs)))
    for place, top in enumerate(("top 1", "top 5")):
        values = [each[place] for each in drawn]
        found[f"each ± 0.05, {top}"] = float(np.mean(values))
        found[f"each ± 0.05, {top}, 90 %"] = float(np.quantile(values, 0.9))
    return found


def judge(setup: Setup, level: str) -> dict[str, Any]:
    """All figures of a set-up at a level of alpha. Finalists are valued by their final visits,
    where they have enough."""
    table, rows = believed(setup, level), setup.rows()
    first = value_of(table, costs([row for row in rows if row["visit"] < 100]))
    finals = costs(rows, finals=True)
    finals = {point: values for point, values in finals.items() if len(values) >= FINAL_VISITS}
    measured = value_of(table, finals) if finals else first
    chosen = picks(table, first)
    if not all(point in measured for picked in chosen.values() for point in picked):
        measured = first
    predicted = beliefs(table)
    frame = pd.DataFrame({"predicted": predicted, "measured": first})
    by_shape = frame.groupby(level=0).max()
    best = max(measured, key=lambda point: measured[point])
    error = (frame.predicted / frame.measured - 1.0).abs()
    return {
        "setup": setup.name,
        "predictions": setup.which + "predicted",
        "level": level,
        "alpha": [float(table.alpha.min()), float(table.alpha.max())],
        "points": len(first),
        "shapes": len(by_shape),
        "visits": len(rows),
        "unsteady": sum(not steady(row) for row in rows),
        "best": {"shape": best[0], "gamma": best[1], "speedup": measured[best]},
        "valued_by": "final visits" if measured is not first else "sweeps",
        "regret": {name: regret(picked, measured) for name, picked in chosen.items()},
        "regret_by_sweeps": {name: regret(picked, first) for name, picked in chosen.items()},
        "picks": chosen,
        "spearman_points": float(frame.corr(method="spearman").iloc[0, 1]),
        "spearman_shapes": float(by_shape.corr(method="spearman").iloc[0, 1]),
        "median_error": float(error.median()),
        "within_10_percent": float((error <= 0.1).mean()),
        "noise": noise(table, finals),
        "wrong_alpha_by_sweeps": wrong_alpha(table, first),
    }


def text(found: dict[str, Any]) -> str:
    best = found["best"]
    lines = [
        f"{found['setup']}, {found['predictions']}, alpha {found['level']}"
        f" ({found['alpha'][0]:.2f} to"
        f" {found['alpha'][1]:.2f}): {found['shapes']} shapes, {found['points']} points,"
        f" {found['visits']} visits ({found['unsteady']} unsteady); regrets by"
        f" {found['valued_by']} (by sweeps)",
        f"  best measured: {best['shape']}, gamma {best['gamma']}: {best['speedup']:.2f}x",
    ]
    for name, picked in found["picks"].items():
        where = f"{picked[0][0]}, gamma {picked[0][1]}" if len(picked) == 1 else ""
        both = f"{found['regret'][name]:6.1%} ({found['regret_by_sweeps'][name]:5.1%})"
        lines.append(f"  {name:16} {both}  {where}".rstrip())
    own = found["noise"]
    lines += [
        "  the oracle against itself: too few final visits"
        if own["regret_of_the_oracle"] is None
        else f"  the oracle against itself {own['regret_of_the_oracle']:.1%}, spread of a visit"
        f" {own['spread_of_a_visit']:.1%}",
        f"  Spearman {found['spearman_points']:.3f} over points, {found['spearman_shapes']:.3f}"
        f" over shapes; error of the speed-up: median {found['median_error']:.1%},"
        f" {found['within_10_percent']:.0%} within 10 %",
        "  alpha off: "
        + ", ".join(f"{k} {v:.1%}" for k, v in found["wrong_alpha_by_sweeps"].items()),
    ]
    return "\n".join(lines)


def draw(setups: Sequence[Setup], path: Path) -> None:
    """Predicted against measured speed-up of every shape at the gamma that the search chose."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(setups), figsize=(5.2 * len(setups), 4.8), squeeze=False)
    marks = {
        "search, top 1": ("*", 190, "tab:red"),
        "kernels only": ("s", 60, "tab:orange"),
        "bytes only": ("D", 50, "tab:brown"),
        "gamma 3 always": ("v", 70, "tab:purple"),
        "target-shaped": ("^", 70, "tab:green"),
        "smallest draft": ("P", 80, "tab:cyan"),
    }
    for axis, setup in zip(axes[0], setups, strict=True):
        table = believed(setup, HEADLINE)
        measured = value_of(table, costs(setup.rows()))
        predicted, values = beliefs(table), speedups(table, table.cost)
        shown = [point for point in ranked(table, values) if point in measured]
        axis.scatter(
            [predicted[p] for p in predicted if p in measured],
            [measured[p] for p in predicted if p in measured],
            s=6,
            color="0.8",
            label="every shape and gamma",
        )
        axis.scatter(
            [predicted[p] for p in shown],
            [measured[p] for p in shown],
            s=22,
            color="tab:blue",
            label="every shape, the search's gamma",
        )
        for name, picked in picks(table, measured).items():
            if name in marks:
                mark, size, colour = marks[name]
                axis.scatter(
                    predicted[picked[0]],
                    measured[picked[0]],
                    marker=mark,
                    s=size,
                    facecolor="none" if mark != "*" else colour,
                    edgecolor=colour,
                    linewidth=1.6,
                    label=name,
                    zorder=3,
                )
        ends = [min(measured.values()), max(*measured.values(), *values)]
        axis.plot(ends, ends, color="0.6", linewidth=0.8, zorder=0)
        axis.axhline(max(measured.values()), color="0.6", linewidth=0.8, linestyle=":")
        axis.set(xlabel="predicted speed-up", title=f"{setup.target} in {setup.engine}")
    axes[0][0].set_ylabel("measured speed-up")
    axes[0][0].legend(fontsize=7, loc="upper left", frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=140)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["register", "measure", "judge"])
    parser.add_argument("--engine", default="transformers")
    parser.add_argument("--target", default="smollm2-135m", choices=["smollm2-135m", MADE_UP])
    parser.add_argument("--profile", type=Path, help="folder (default: this machine's)")
    parser.add_argument("--kernels", type=Path, help="a profile with torch's kernels, for rules")
    parser.add_argument("--dtype")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--sweeps", type=int, default=2, help="visits of every point")
    parser.add_argument("--work", type=Path, default=Path("runs/oracle"), help="for made-up drafts")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    asked = parser.parse_args()
    file = asked.folder / "registered.yaml"
    if asked.what == "register":
        said = yaml.safe_load(file.read_text(encoding="utf-8"))
        shapes = register(said["space"], said["count"], said.get("seed", 0))
        print(yaml.safe_dump({"shapes": shapes}, width=100))
        return
    if asked.what == "measure":
        measure(Setup(asked.engine, asked.target, asked.folder), asked)
        return
    names = [path.stem.removeprefix("rows-") for path in asked.folder.glob("rows-*.jsonl")]
    pairs = [name.split("-", 1) for name in sorted(names, reverse=True)]
    setups = [Setup(engine, target, asked.folder) for engine, target in pairs]
    setups = [each for each in setups if set(each.points) == set(costs(each.rows()))]  # whole
    before = [replace(each, which="first-") for each in setups]
    both = [*setups, *(each for each in before if each.predicted_file.exists())]
    found = [judge(setup, level) for setup in both for level in LEVELS]
    (asked.folder / "figures.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    shown = "\n\n".join(map(text, found))
    (asked.folder / "figures.txt").write_text(shown + "\n", encoding="utf-8")
    print(shown)
    draw(setups, asked.picture)


if __name__ == "__main__":
    main()
