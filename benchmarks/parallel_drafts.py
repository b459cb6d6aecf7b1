"""How acceptance runs along the block of drafters that write it in one pass: the constants of
`acceptance/families.py`.

    python benchmarks/parallel_drafts.py

Fits the drift of P-EAGLE heads to the published sweeps of
`results/2026-11-22-families/parallel.csv` as `learn_drifts` fits those of the table, one study a
target, and shows where the first position stands beside an EAGLE-3 head of the same target.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path
from typing import Final

from acceptance_fit import Sweep, learn_drifts
from archsearch.acceptance.terms import FIT_FILE, Term, load_fit
from archsearch.speedup import alpha_from_tau, logit

ROWS: Final = Path(__file__).parent / "results/2026-11-22-families/parallel.csv"
Key = tuple[str, str, str]  # study, family, data set


def read_sweeps() -> dict[Key, Sweep]:
    """tau by gamma of each draft on each data set."""
    lines = [
        line for line in ROWS.read_text(encoding="utf-8").splitlines() if not line.startswith("#")
    ]
    taus: dict[Key, dict[int, float]] = defaultdict(dict)
    for row in csv.DictReader(lines):
        own = taus[row["study"], row["family"], row["dataset"]]
        reach = [float(value) for value in row["positions"].split()]
        own |= {count: 1.0 + sum(reach[:count]) for count in range(1, len(reach) + 1)} or {
            int(row["gamma"]): float(row["tau"])
        }
    return {
        key: Sweep(" ".join(key), key[0], "block", 0.0, dict(sorted(found.items())))
        for key, found in taus.items()
    }


def fitted_drift(sweeps: dict[Key, Sweep]) -> Term:
    """Mean and std of the drift of a new P-EAGLE head."""
    return learn_drifts([sweep for (_, family, _), sweep in sweeps.items() if family == "peagle"])[
        "block"
    ]


def main() -> None:
    sweeps = read_sweeps()
    drift, chain = fitted_drift(sweeps), load_fit(FIT_FILE).drift["feature"]
    studies = {study for study, family, _ in sweeps if family == "peagle"}
    print(
        f"P-EAGLE: {drift.mean:+.3f} ± {drift.std:.3f} logit a position, {len(studies)} targets;"
        f" EAGLE-3 {chain.mean:+.3f}"
    )
    for (study, family, dataset), sweep in sweeps.items():
        other = sweeps.get((study, "eagle3", dataset))
        if family == "peagle" and other is not None:
            gaps = [
                logit(alpha_from_tau(sweep.taus[gamma], gamma, drift.mean))
                - logit(alpha_from_tau(other.taus[gamma], gamma, chain.mean))
                for gamma in sweep.taus
            ]
            print(
                f"  {study}, {dataset}: {', '.join(f'{gap:+.2f}' for gap in gaps)} above its"
                " EAGLE-3 head (other training)"
            )


if __name__ == "__main__":
    main()
