"""What training leaves behind: a short training's curve, a trained draft with what it was measured
at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from archsearch.acceptance.measured import Trace, alpha, alpha_by_category, resampled_ratio
from archsearch.acceptance.replay import replay_tau, replays
from archsearch.architecture.architecture import Architecture
from archsearch.engine_facts import engine_facts
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.models.files import has_weights
from archsearch.records import load
from archsearch.search.objective import Score, Scorer
from archsearch.speedup import MAX_GAMMA, accepted_by_position, drifting_positions

CURVE_FILE: Final = "curve.json"


@dataclass(frozen=True)
class ShortTraining:
    """A draft's first tokens of training: `points` (tokens, alpha) of its curve, `hits` and
    `heldout_tokens` per kept-out text at the last of them. `seconds`: of training in all; `wall_s`:
    of the last call, looks included; `epoch_tokens`: of one pass over the text it was trained on, 0
    where that is not known."""

    architecture: Architecture
    tokens: int
    seconds: float
    tokens_per_s: float
    points: tuple[tuple[int, float], ...]
    hits: tuple[int, ...]
    heldout_tokens: tuple[int, ...]
    wall_s: float = 0.0
    epoch_tokens: int = 0


def read_curve(draft_folder: Path) -> ShortTraining | None:
    """curve.json of a draft's short training, None where there is none. Raises ArchsearchError
    where it is broken."""
    return load(draft_folder / CURVE_FILE, "learning curve", ShortTraining)


def paired_logit_std(first: ShortTraining, second: ShortTraining) -> float:
    """Std over texts of logit(alpha of first) - logit(alpha of second), measured on the same
    kept-out texts (paired bootstrap).

    Raises ArchsearchError where the texts differ.
    """
    import numpy as np

    if first.heldout_tokens != second.heldout_tokens or not first.hits or not second.hits:
        raise ArchsearchError(
            "two learning curves were measured on different texts; delete them and search again"
        )
    counts = np.array([first.heldout_tokens, first.hits, second.hits], dtype=np.float64)
    alphas = np.clip(counts[1:].sum(1) / counts[0].sum(), 0.01, 0.99)
    # by text: each one's hits in logit, d logit / d alpha = 1 / (alpha (1 - alpha))
    ours, theirs = (1.0 / (alphas * (1.0 - alphas)))[:, None] * counts[1:]
    totals = np.stack([ours - theirs, counts[0]], axis=1)
    return resampled_ratio(totals, resamples=200).std


@dataclass(frozen=True)
class TrainedDraft:
    """A draft with weights and what it was measured at: greedy alpha on held-out text and, for each
    gamma by replay, tau and `rates`, the acceptance of its positions.

    `tokens`: of its training; `points` (tokens, alpha): its curve before the anneal, on texts that
    no draft is trained on; both empty where that is not known. `stopped`: why its training ended
    before its limits.
    """

    architecture: Architecture
    folder: Path
    alpha: Estimate
    alpha_by_category: dict[str, Estimate]
    tau: dict[int, Estimate]
    rates: dict[int, list[float]]
    tokens: int = 0
    points: tuple[tuple[int, float], ...] = ()
    stopped: str = ""

    def score(self, scorer: Scorer) -> Score:
        """By what was measured of it."""
        return scorer.measured(self.architecture, self.alpha, self.tau)

    def check_gammas(self, gammas: Iterable[int]) -> None:
        """Raise ArchsearchError for a gamma whose tau was not measured."""
        unknown = [gamma for gamma in gammas if gamma not in self.tau]
        if unknown:
            raise ArchsearchError(
                f"gamma {unknown[0]} was not measured on held-out text (1 to {max(self.tau)}); use"
                " a smaller gamma"
            )


def trained_draft(arch: Architecture, folder: Path, trace: Trace) -> TrainedDraft:
    """Acceptance figures out of a trace.

    Raises ArchsearchError where the held-out answers are too short to say anything.
    """
    found = replays(MAX_GAMMA, partial(replay_tau, trace))
    if not found:
        raise ArchsearchError(
            "the held-out answers are too short to measure acceptance; use prompts with longer"
            " answers"
        )
    taus = {gamma: each.estimate() for gamma, each in found.items()}
    rates = {gamma: list(each.accepted_by_position) for gamma, each in found.items()}
    return TrainedDraft(arch, folder, alpha(trace), alpha_by_category(trace), taus, rates)


def load_trained(arch: Architecture, folder: Path) -> TrainedDraft:
    """A draft that was trained before. Raises MissingDataError where its trace is missing."""
    return trained_draft(arch, folder, Trace.load(folder / "trace.npz"))


Rates = dict[int, list[float]]
"""For each gamma the unconditional acceptance of its positions. A larger gamma starts more rounds
right after a refusal, at hard places, so its first position is accepted less often."""


def acceptance_of(
    scorer: Scorer, score: Score, folder: Path | None = None
) -> tuple[Estimate, dict[int, Estimate], Rates]:
    """alpha, tau by gamma and acceptance by position of a candidate: from its trace where it was
    trained, else as its score predicts."""
    if folder is not None and has_weights(folder) and (folder / "trace.npz").is_file():
        trained = load_trained(score.architecture, folder)
        rates = {gamma: trained.rates[gamma] for gamma in scorer.gammas if gamma in trained.rates}
        return trained.alpha, trained.tau, rates
    # The score knows alpha best (a climb learns it from short trainings); how it changes along a
    # block is the estimator's.
    known = scorer.predicted_acceptance(score.proposer)
    drift = known.acceptance.drift
    positions = drifting_positions(score.alpha.value, drift.value, max(scorer.gammas))
    able = engine_facts(scorer.latency.engine).gammas(score.proposer, scorer.gammas)
    known = replace(known, acceptance=replace(known.acceptance, alpha=score.alpha))
    taus = {gamma: known.tau_at(gamma) for gamma in able}
    reach = accepted_by_position(positions)
    return score.alpha, taus, {gamma: reach[:gamma] for gamma in able}


def scored_by(scorer: Scorer, score: Score, folder: Path | None = None) -> Score:
    """What another scorer says of a candidate, by what is known of its acceptance."""
    alpha, taus, _ = acceptance_of(scorer, score, folder)
    return replace(scorer.measured(score.proposer, alpha, taus), assumed=score.assumed)
