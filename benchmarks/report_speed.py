"""How long the report of a run takes, and how large its page is.

    python benchmarks/report_speed.py [--trials 2000] [--run RUN]

Without --run: a search over 2,000 shapes for Llama-3.1-8B on an H100 is made first (in a folder of
its own). Measured are: curves.json worked out anew, the page written again (what `archsearch
report` does afterwards), and its figures as files. Aims: the page under 5 s and 6 MB. Processor
seconds are told beside wall seconds, for machines that do other things.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from archsearch.pipeline.candidates import write_report
from archsearch.pipeline.curves import renew_curves
from archsearch.report import write_figures, write_html
from archsearch.runs.run import open_run
from archsearch.runs.tables import CURVES_FILE


def timed(name: str, call: Callable[[], object]) -> None:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    print(
        f"{name:<44}{time.perf_counter() - wall:8.2f} s wall{time.process_time() - cpu:8.2f} s"
        " processor",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--run", type=Path)
    arguments = parser.parse_args()
    path = arguments.run
    if path is None:
        from archsearch.pipeline import SearchRequest, search
        from archsearch.workload import WorkloadRequest

        path = Path(tempfile.mkdtemp()) / "run"
        asked = WorkloadRequest(gpu="h100")
        request = SearchRequest(
            "llama-3.1-8b", asked, trials=arguments.trials, families=("independent",), run=path
        )
        timed(f"search, {arguments.trials} trials", lambda: search(request))
    run = open_run(path)
    (path / CURVES_FILE).unlink(missing_ok=True)
    timed("curves.json, profile loaded and fitted", lambda: renew_curves(run))
    timed("the page", lambda: write_html(run))
    timed("the page again, as archsearch report does", lambda: write_report(run))
    timed("figures as SVG, PNG, CSV", lambda: write_figures(run))
    print(f"{len(run.trials())} trials; page {run.report_file.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
