"""How right the acceptance prior is on studies that it has not seen: leave one source out.

    python benchmarks/prior_figures.py [--output
    benchmarks/results/2026-11-23-acceptance/prior_figures.json] [--quick]

(a) logit(alpha) of every row of a study from the other studies alone: coefficients, random effects,
    their spreads (marginal likelihood of the other studies) and the drift along the block are all
    fitted without the study; what it shares with others (target, its family, data set) is known
    from them.
(b) the rest of the study after one of its rows was measured (each row in turn).
(c) tau at larger gamma from tau at the smallest gamma of a sweep; the drift learnt from other
    studies only, beside it the closed form.
(d) logit(alpha) of a draft from the other drafts of its target: with those of its kind, and from
other kinds only.
(f) of (a) what independent drafts say: the mean over studies and over rows, the 80 % band,
    differences; the same with log-linear terms in the columns in the place of the law of excess
    loss (`log_linear`).
(g) the order of families: of all pairs in which one study ran two kinds on one target and text,
    which are predicted in the published order (their study left out), and which are told apart
    (1.64 std of the difference) the wrong way.
(e) alpha of drafts as they come from their vendor (`shared` or `other` training, nothing
distilled), their study left out.

Each row's prediction is kept beside the output (rows.csv). Rows, groups and what is a "difference
between drafts trained alike" are fixed by the table's columns (study, draft, target, data set,
temperature, recipe), not chosen here. `--quick` keeps the spreads of all studies (faster, slightly
optimistic). About two minutes of one core, without `--quick` twenty. (d) keeps the spreads of all
studies.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from acceptance_fit import Fitted, best_spread, learn_drifts, sweep_errors, sweeps, where
from archsearch.acceptance.learnt import Learning
from archsearch.acceptance.prior import SHAPE_NOISE_STD
from archsearch.acceptance.published import Design, design, lot_of
from archsearch.acceptance.table import OWN_STUDY, Published, load_published
from archsearch.acceptance.terms import load_fit
from archsearch.files import write_json
from archsearch.speedup import sigmoid

GOALS = {
    "level_mae": 0.45,
    "level_mae_independent": 0.38,
    "difference_mae": 0.20,
    "difference_mae_independent": 0.12,
    "known_target_mae_same_kind": 0.20,
    "known_target_mae_other_kinds": 0.35,
    "off_the_shelf_mae_alpha": 0.08,
    "independent_mae_of_studies": 0.55,
    "one_blind_study_mae": 0.80,
    "independent_differences_mae": 0.39,
    "families_in_order": 0.80,
    "within_two_std": 0.95,
    "tau_rms_independent": 0.02,
    "tau_rms_feature": 0.06,
}
# Sweeps in which nearly every token is accepted: they cannot tell one drift from another and
# flatter any rule.
DEGENERATE_ALPHA = 0.98


def after_one(levels: Fitted, rows: Design) -> tuple[np.ndarray, np.ndarray]:
    """(errors, stds) of all other rows after each row in turn was measured."""
    mean, covariance = levels.joint(rows)
    errors, stds = [], []
    for i in range(len(rows)):
        gain = covariance[:, i] / covariance[i, i]
        updated = mean + gain * (rows.y[i] - mean[i])
        variance = np.diag(covariance) - gain * covariance[:, i]
        others = np.arange(len(rows)) != i
        errors.append((rows.y - updated)[others])
        stds.append(np.sqrt(variance[others]))
    return np.concatenate(errors), np.concatenate(stds)


def pairs(rows: Design, error: np.ndarray) -> list[tuple[float, float, bool]]:
    """Drafts of one study that differ in the draft only (same target, text, temperature and
    recipe): (error of the difference, the difference, same kind of drafter)."""
    return [
        (
            float(error[i] - error[j]),
            float(rows.y[i] - rows.y[j]),
            rows.groups["kind"][i] == rows.groups["kind"][j],
        )
        for i in range(len(rows))
        for j in range(i)
        if rows.groups["condition"][i] == rows.groups["condition"][j]
        and rows.groups["draft"][i] != rows.groups["draft"][j]
    ]


def mae(values: Any) -> float:
    return float(np.mean(np.abs(np.array(values, dtype=float)))) if len(values) else math.nan


def rms(values: Any) -> float:
    return (
        float(np.sqrt(np.mean(np.square(np.array(values, dtype=float)))))
        if len(values)
        else math.nan
    )


def levels_left_out(found: Sequence[Published], quick: bool) -> dict[str, Any]:
    """Figures (a) and (b)."""
    everything = design(drifts=learn_drifts(sweeps(found)))
    start = best_spread(everything)
    studies = [study for study in sorted(set(everything.study)) if study != OWN_STUDY]
    error, std, zero, later, later_std = ([], [], [], [], [])
    family: list[str] = []
    domain: list[str] = []
    unseen: list[bool] = []
    differences: list[tuple[float, float, bool, str, str]] = []
    per_study = {}
    for study in studies:
        drifts = learn_drifts([sweep for sweep in sweeps(found) if sweep.study != study])
        rows = design(drifts=drifts)
        inside = np.array([name == study for name in rows.study])
        train, test = where(rows, ~inside), where(rows, inside)
        levels = Fitted(train, start if quick else best_spread(train, start))
        mean, sigma = levels.predict(test)
        gap = test.y - mean
        error.append(gap)
        std.append(sigma)
        zero.append(test.y - train.y.mean())
        family.extend(test.groups["kind"])
        domain.extend(test.groups["of_domain"])
        unseen.extend(name not in train.groups["kind"] for name in test.groups["kind"])
        rest, rest_std = after_one(levels, test) if len(test) > 1 else (np.zeros(0), np.zeros(0))
        later.append(rest)
        later_std.append(rest_std)
        found_pairs = pairs(test, gap)
        differences.extend((*pair, study, test.groups["kind"][0]) for pair in found_pairs)
        per_study[study] = {
            "rows": len(test),
            "mae": mae(gap),
            "bias": float(gap.mean()),
            "after_one_mae": mae(rest),
            "difference_mae": mae([pair[0] for pair in found_pairs]),
            "differences": len(found_pairs),
        }
    errors, stds, nothing = np.concatenate(error), np.concatenate(std), np.concatenate(zero)
    kinds, texts, new = np.array(family), np.array(domain), np.array(unseen)
    same = [pair for pair in differences if pair[2]]
    own = [pair for pair in same if pair[4] == "independent"]
    by_pair_study = {
        s: mae([pair[0] for pair in same if pair[3] == s])
        for s in sorted({pair[3] for pair in same})
    }
    rest, rest_std = np.concatenate(later), np.concatenate(later_std)
    return {
        "spread": asdict(start),
        "rows": len(errors),
        "studies": len(studies),
        "level_mae": mae(errors),
        "level_mae_of_a_constant": mae(nothing),
        "level_mae_kinds_seen_elsewhere": mae(errors[~new]),
        "rows_of_kinds_seen_nowhere_else": int(new.sum()),
        "level_mae_mean_of_studies": float(np.mean([item["mae"] for item in per_study.values()])),
        "level_mae_median_of_studies": float(
            np.median([item["mae"] for item in per_study.values()])
        ),
        "within_two_std": float(np.mean(np.abs(errors) < 2 * stds)),
        "within_0.67_std": float(np.mean(np.abs(errors) < 0.67 * stds)),
        "mean_std": float(stds.mean()),
        "by_family": {
            k: {"rows": int((kinds == k).sum()), "mae": mae(errors[kinds == k])}
            for k in sorted(set(family))
        },
        "by_domain": {
            k: {"rows": int((texts == k).sum()), "mae": mae(errors[texts == k])}
            for k in sorted(set(domain))
        },
        "by_study": per_study,
        "differences": {
            "one_kind_pairs": len(same),
            "one_kind_mae": mae([pair[0] for pair in same]),
            "one_kind_mae_of_no_difference": mae([pair[1] for pair in same]),
            "one_kind_mae_by_study": by_pair_study,
            "independent_pairs": len(own),
            "independent_mae": mae([pair[0] for pair in own]),
            "independent_mae_of_no_difference": mae([pair[1] for pair in own]),
            "all_kinds_pairs": len(differences),
            "all_kinds_mae": mae([pair[0] for pair in differences]),
            "all_kinds_mae_of_no_difference": mae([pair[1] for pair in differences]),
        },
        "after_one": {
            "predictions": len(rest),
            "mae": mae(rest),
            "mae_mean_of_studies": float(
                np.nanmean([item["after_one_mae"] for item in per_study.values()])
            ),
            "within_two_std": float(np.mean(np.abs(rest) < 2 * rest_std)),
            "mean_std": float(rest_std.mean()),
        },
    }


BAND_80 = 1.2816
BLIND_STUDY = (  # the one that trained a blind layer from random weights for a target of 8B
    "arXiv:2604.26412"
)


def left_out(found: Sequence[Published], quick: bool) -> dict[str, Any]:
    """Figures (f) and (g), and the rows that they rest on."""
    everything = design(drifts=learn_drifts(sweeps(found)))
    start = best_spread(everything)
    raw: list[dict[str, Any]] = []
    differences: list[float] = []
    orders: list[tuple[bool, bool]] = []
    for study in sorted(set(everything.study) - {OWN_STUDY}):
        inside = np.array([name == study for name in everything.study])
        train, test = where(everything, ~inside), where(everything, inside)
        mean, covariance = Fitted(train, start if quick else best_spread(train, start)).joint(test)
        for i in range(len(test)):
            std = math.sqrt(covariance[i, i])
            raw.append(
                {
                    "study": study,
                    "kind": test.groups["kind"][i],
                    "draft": test.groups["draft"][i],
                    "domain": test.groups["of_domain"][i],
                    "logit": round(float(test.y[i]), 3),
                    "predicted": round(float(mean[i]), 3),
                    "std": round(std, 3),
                }
            )
            for j in range(i):
                true, said = float(test.y[i] - test.y[j]), float(mean[i] - mean[j])
                if test.groups["kind"][i] == test.groups["kind"][j] == "independent":
                    if (
                        test.groups["condition"][i] == test.groups["condition"][j]
                        and test.groups["draft"][i] != test.groups["draft"][j]
                    ):
                        differences.append(said - true)
                elif (
                    test.groups["kind"][i] != test.groups["kind"][j]
                    and _where(test.groups["condition"][i]) == _where(test.groups["condition"][j])
                    and true
                ):
                    gap = math.sqrt(covariance[i, i] + covariance[j, j] - 2 * covariance[i, j])
                    orders.append((said * true > 0, abs(said) > 1.645 * gap))
    own = [row for row in raw if row["kind"] == "independent"]
    errors = {
        study: [row["logit"] - row["predicted"] for row in own if row["study"] == study]
        for study in sorted({row["study"] for row in own})
    }
    inside_band = [abs(row["logit"] - row["predicted"]) < BAND_80 * row["std"] for row in own]
    return {
        "by_study": {
            study: {"rows": len(gaps), "mae": mae(gaps), "bias": float(np.mean(gaps))}
            for study, gaps in errors.items()
        },
        "mean_of_studies": float(np.mean([mae(gaps) for gaps in errors.values()])),
        "rms_of_study_levels": rms([np.mean(gaps) for gaps in errors.values()]),
        "mean_of_rows": mae([gap for gaps in errors.values() for gap in gaps]),
        "blind_study": mae(errors[BLIND_STUDY]),
        "within_80_band": float(np.mean(inside_band)),
        "differences": {"pairs": len(differences), "mae": mae(differences)},
        "families": {
            "pairs": len(orders),
            "in_order": float(np.mean([right for right, _ in orders])),
            "told_apart": sum(told for _, told in orders),
            "told_apart_wrongly": sum(told and not right for right, told in orders),
        },
        "raw": raw,
    }


def families_as_shipped() -> dict[str, Any]:
    """Figure (g) of the stored fit, which has read these studies, asked about a target that nobody
    measured."""
    fit = load_fit()
    rows = design(drifts=fit.drift, anchors=False)
    orders = []
    for i in range(len(rows)):
        for j in range(i):
            true = float(rows.y[i] - rows.y[j])
            if (
                rows.groups["kind"][i] != rows.groups["kind"][j]
                and _where(rows.groups["condition"][i]) == _where(rows.groups["condition"][j])
                and true
            ):
                apart = rows.x[i] - rows.x[j]
                said = float(apart @ fit.mean)
                gap = math.sqrt(float(apart @ fit.covariance @ apart) + 2 * SHAPE_NOISE_STD**2)
                orders.append((said * true > 0, abs(said) > 1.645 * gap))
    return {
        "pairs": len(orders),
        "in_order": float(np.mean([right for right, _ in orders])),
        "told_apart": sum(told for _, told in orders),
        "told_apart_wrongly": sum(told and not right for right, told in orders),
    }


def _where(condition: str) -> str:
    """The study, target, text and temperature of a condition, whatever the recipe."""
    return condition.rpartition("|")[0]


def log_linear(found: Sequence[Published], quick: bool) -> dict[str, Any]:
    """Figure (f) with log-linear terms in the same columns (fitted to independent drafts of these
    studies, so in its favour) where drafts that see tokens only have the law."""
    law = Learning.terms

    def terms(
        self: Learning, body: Any, target_body: float, target_tokens: float
    ) -> dict[str, Any]:
        size = 0.36 * math.log10(min(body, target_body) / 1e8) - 0.17 * math.log10(
            target_body / 1e10
        )
        return {
            **law(self, body, target_body, target_tokens),
            "learnt": 0.16 + size + 0.32 * math.log10(self.tokens / 1e10),
        }

    with mock.patch.object(Learning, "terms", terms):
        return left_out(found, quick)


def known_targets(found: Sequence[Published]) -> dict[str, Any]:
    """Figure (d)."""
    rows = design(drifts=learn_drifts(sweeps(found)), anchors=False)
    spread = best_spread(rows)
    target, kind, draft = (
        np.array(labels)
        for labels in (rows.groups["target"], rows.groups["kind"], rows.groups["draft"])
    )
    result: dict[str, Any] = {}
    for name in ("same_kind", "other_kinds"):
        errors, stds, by_target = [], [], {}
        for one in sorted(set(draft)):
            out = draft == one
            relatives = (target == target[out][0]) & ~out
            alike = relatives & (kind == kind[out][0])
            if not (alike.any() if name == "same_kind" else (relatives & ~alike).any()):
                continue
            kept = ~out if name == "same_kind" else ~out & ~alike
            test = where(rows, out)
            mean, std = Fitted(where(rows, kept), spread).predict(test)
            errors.append(test.y - mean)
            stds.append(std)
            by_target.setdefault(str(target[out][0]), []).append(test.y - mean)
        gaps, widths = np.concatenate(errors), np.concatenate(stds)
        result[name] = {
            "drafts": len(errors),
            "rows": len(gaps),
            "mae": mae(gaps),
            "mae_mean_of_drafts": float(np.mean([mae(item) for item in errors])),
            "within_two_std": float(np.mean(np.abs(gaps) < 2 * widths)),
            "within_0.67_std": float(np.mean(np.abs(gaps) < 0.67 * widths)),
            "mean_std": float(widths.mean()),
            "by_target": {
                key: {"rows": len(np.concatenate(v)), "mae": mae(np.concatenate(v))}
                for key, v in by_target.items()
            },
        }
    paper = []
    for one in sorted(
        {label for label, name in zip(draft, target, strict=True) if name == "llama-65b"}
    ):
        test = where(rows, draft == one)
        mean, std = Fitted(where(rows, draft != one), spread).predict(test)
        paper += [
            {
                "draft": one.rpartition("|")[2],
                "alpha": sigmoid(y),
                "predicted": sigmoid(m),
                "logit_std": float(s),
            }
            for y, m, s in zip(test.y, mean, std, strict=True)
        ]
    return result | {"spread": asdict(spread), "llama-65b": paper}


def off_the_shelf(found: Sequence[Published], quick: bool) -> dict[str, Any]:
    """Figure (e)."""
    untuned = {
        lot_of(row)
        for row in found
        if row.level
        and row.family == "independent"
        and row.training != "target"
        and row.init != "pruned"
    }
    everything = design(drifts=learn_drifts(sweeps(found)))
    start = best_spread(everything)
    lots = np.array(everything.groups["lot"])
    result: dict[str, Any] = {"by_study": {}}
    gaps = []
    for study in sorted({lot.partition("|")[0] for lot in untuned}):
        inside = np.array([name == study for name in everything.study])
        test = where(everything, inside & np.isin(lots, sorted(untuned)))
        train = where(everything, ~inside)
        mean, _ = Fitted(train, start if quick else best_spread(train, start)).predict(test)
        errors = np.array([sigmoid(y) - sigmoid(m) for y, m in zip(test.y, mean, strict=True)])
        result["by_study"][study] = {
            "rows": len(errors),
            "mae_alpha": mae(errors),
            "bias": float(errors.mean()),
        }
        gaps.append(errors)
    return result | {"rows": sum(map(len, gaps)), "mae_alpha": mae(np.concatenate(gaps))}


def sweeps_left_out(found: Sequence[Published]) -> dict[str, Any]:
    """Figure (c)."""
    members = sweeps(found)
    result: dict[str, Any] = {"by_study": {}}
    predicted: dict[str, list[tuple[np.ndarray, np.ndarray, bool, bool]]] = {}
    for study in sorted({sweep.study for sweep in members}):
        drifts = learn_drifts([sweep for sweep in members if sweep.study != study])
        for sweep in (s for s in members if s.study == study):
            errors, closed = sweep_errors(sweep, drifts[sweep.kind].mean), sweep_errors(sweep, 0.0)
            smallest = min(sweep.taus)
            flat = sweep.taus[smallest] - 1 > DEGENERATE_ALPHA * smallest
            group = "independent" if sweep.family == "independent" else "feature"
            predicted.setdefault(group, []).append(
                (errors, closed, flat, study == "archsearch demo")
            )
            entry = result["by_study"].setdefault(
                f"{study} ({sweep.kind})", {"drift": drifts[sweep.kind].mean, "e": [], "c": []}
            )
            entry["e"].append(errors)
            entry["c"].append(closed)
    for entry in result["by_study"].values():
        learnt, closed = np.concatenate(entry.pop("e")), np.concatenate(entry.pop("c"))
        entry |= {
            "predictions": len(learnt),
            "rms": rms(learnt),
            "bias": float(learnt.mean()),
            "rms_closed_form": rms(closed),
        }

    def gather(items: list[tuple[np.ndarray, np.ndarray, bool, bool]]) -> dict[str, float]:
        if not items:
            return {"predictions": 0}
        learnt, closed = (np.concatenate([item[k] for item in items]) for k in (0, 1))
        return {
            "predictions": len(learnt),
            "rms": rms(learnt),
            "bias": float(learnt.mean()),
            "rms_closed_form": rms(closed),
        }

    for group, items in predicted.items():
        result[group] = gather(items)
        result[f"{group}_published_only"] = gather([item for item in items if not item[3]])
        result[f"{group}_without_degenerate"] = gather([item for item in items if not item[2]])
    kinds = {name: [term.mean, term.std] for name, term in learn_drifts(members).items()}
    return result | {"drift_from_all_studies": kinds}


def report(figures: dict[str, Any]) -> str:
    """For people: each figure beside its goal."""
    levels, along = figures["levels"], figures["along_the_block"]
    after, gaps = levels["after_one"], levels["differences"]

    def verdict(value: float, goal: float) -> str:
        return f"goal {goal:g}: {'met' if value <= goal else 'NOT met'}"

    lines = [
        f"(a) {levels['rows']} rows of {levels['studies']} studies, each left out whole",
        (
            f"    |error| of logit alpha      {levels['level_mae']:.3f} "
            f" ({verdict(levels['level_mae'], GOALS['level_mae'])}; a constant:"
            f" {levels['level_mae_of_a_constant']:.3f})"
        ),
        (
            f"      kinds seen elsewhere      {levels['level_mae_kinds_seen_elsewhere']:.3f} "
            f" (without {levels['rows_of_kinds_seen_nowhere_else']} rows whose kind of drafter no"
            " other study has)"
        ),
        (
            f"      mean / median of studies  {levels['level_mae_mean_of_studies']:.3f}"
            f" / {levels['level_mae_median_of_studies']:.3f}"
        ),
        (
            f"    within two std              {100 * levels['within_two_std']:.1f} %  (goal about"
            f" 95 %; mean std {levels['mean_std']:.2f}); within 0.67 std"
            f" {100 * levels['within_0.67_std']:.0f} % (goal 40 to 60)"
        ),
        "    by family                   "
        + ", ".join(f"{k} {v['mae']:.2f} ({v['rows']})" for k, v in levels["by_family"].items()),
        "    by domain                   "
        + ", ".join(f"{k} {v['mae']:.2f} ({v['rows']})" for k, v in levels["by_domain"].items()),
        (
            f"    differences, one kind       {gaps['one_kind_mae']:.3f} "
            f" ({verdict(gaps['one_kind_mae'], GOALS['difference_mae'])}; {gaps['one_kind_pairs']}"
            f" pairs; no difference: {gaps['one_kind_mae_of_no_difference']:.3f})"
        ),
        (
            f"      independent drafts        {gaps['independent_mae']:.3f} "
            f" ({gaps['independent_pairs']} pairs; no difference:"
            f" {gaps['independent_mae_of_no_difference']:.3f})"
        ),
        (
            f"      also between kinds        {gaps['all_kinds_mae']:.3f} "
            f" ({verdict(gaps['all_kinds_mae'], GOALS['difference_mae'])};"
            f" {gaps['all_kinds_pairs']} pairs; no difference:"
            f" {gaps['all_kinds_mae_of_no_difference']:.3f})"
        ),
        (
            f"(b) after one measurement       {after['mae']:.3f}  ({after['predictions']}"
            f" predictions; mean of studies {after['mae_mean_of_studies']:.3f}; within two std"
            f" {100 * after['within_two_std']:.1f} %, mean std {after['mean_std']:.2f})"
        ),
        "(c) tau at larger gamma, rms",
    ]
    for group, goal in (
        ("independent", GOALS["tau_rms_independent"]),
        ("feature", GOALS["tau_rms_feature"]),
    ):
        for label, key in (
            ("", group),
            (", published only", f"{group}_published_only"),
            (", not degenerate", f"{group}_without_degenerate"),
        ):
            item = along[key]
            lines.append(
                f"    {group + label:32s}{100 * item['rms']:.2f} %  ({verdict(item['rms'], goal)};"
                f" closed form {100 * item['rms_closed_form']:.2f} %; {item['predictions']}"
                " predictions)"
            )
    for study, item in along["by_study"].items():
        lines.append(
            f"      {study:48s}drift {item['drift']:+.2f}: {100 * item['rms']:5.2f} %,"
            f" closed {100 * item['rms_closed_form']:5.2f} % ({item['predictions']})"
        )
    lines.append("(d) a draft from the other drafts of its target")
    for name in ("same_kind", "other_kinds"):
        item, goal = figures["known_targets"][name], GOALS[f"known_target_mae_{name}"]
        lines.append(
            f"    {name:26s}  {item['mae']:.3f}  ({verdict(item['mae'], goal)}; {item['drafts']}"
            f" drafts, {item['rows']} rows; within two std {100 * item['within_two_std']:.0f} %,"
            f" 0.67 std {100 * item['within_0.67_std']:.0f} %, mean std {item['mean_std']:.2f})"
        )
    lines += [
        f"      LLaMA-65B, {item['draft']}: {item['predicted']:.2f}, published {item['alpha']:.2f}"
        f" (± {item['logit_std']:.2f})"
        for item in figures["known_targets"]["llama-65b"]
    ]
    shelf = figures["off_the_shelf"]
    lines.append(
        f"(e) drafts as they come, |error| of alpha {shelf['mae_alpha']:.3f}"
        f"  ({verdict(shelf['mae_alpha'], GOALS['off_the_shelf_mae_alpha'])}; {shelf['rows']} rows)"
    )
    lines += [
        f"      {k}: {v['mae_alpha']:.3f}, bias {v['bias']:+.3f} ({v['rows']})"
        for k, v in shelf["by_study"].items()
    ]
    return "\n".join(lines)


def report_independent(figures: dict[str, Any]) -> str:
    """For people: (f) and (g)."""
    lines = []
    for name in ("law", "log_linear"):
        item = figures[name]
        lines.append(
            f"(f) independent drafts, {name}: |error| {item['mean_of_studies']:.3f} (mean of"
            f" {len(item['by_study'])} studies, goal {GOALS['independent_mae_of_studies']}),"
            f" {item['mean_of_rows']:.3f} (of rows), rms of a study's level"
            f" {item['rms_of_study_levels']:.2f}; blind layer {item['blind_study']:.2f} (goal"
            f" {GOALS['one_blind_study_mae']}); 80 % band holds {item['within_80_band']:.0%} (goal"
            f" 75 to 92); differences {item['differences']['mae']:.3f}"
            f" ({item['differences']['pairs']} pairs, goal {GOALS['independent_differences_mae']})"
        )
    lines += [
        f"      {k}: {v['mae']:.2f}, bias {v['bias']:+.2f} ({v['rows']})"
        for k, v in figures["law"]["by_study"].items()
    ]
    for name, order in (
        ("as shipped", figures["families_as_shipped"]),
        ("study left out", figures["law"]["families"]),
    ):
        lines.append(
            f"(g) families, {name}: {order['in_order']:.0%} of {order['pairs']} pairs in order"
            f" (goal {GOALS['families_in_order']:.0%});"
            f" {order['told_apart']} told apart, {order['told_apart_wrongly']} the wrong way"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("benchmarks/results/2026-11-23-acceptance/prior_figures.json"),
    )
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    found = load_published()
    new = {
        "law": left_out(found, arguments.quick),
        "log_linear": log_linear(found, arguments.quick),
    }
    new["families_as_shipped"] = families_as_shipped()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with (arguments.output.parent / "rows.csv").open("w", newline="", encoding="utf-8") as handle:
        rows = new["law"].pop("raw")
        new["log_linear"].pop("raw")
        writer = csv.DictWriter(handle, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(report_independent(new), flush=True)
    figures = new | {
        "goals": GOALS,
        "levels": levels_left_out(found, arguments.quick),
        "along_the_block": sweeps_left_out(found),
        "known_targets": known_targets(found),
        "off_the_shelf": off_the_shelf(found, arguments.quick),
    }
    write_json(arguments.output, figures)
    print(report(figures))


if __name__ == "__main__":
    main()
