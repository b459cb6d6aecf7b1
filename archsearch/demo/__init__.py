"""`archsearch demo`: every step on this machine's CPU, with the commands a user would type printed
as it goes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archsearch.errors import MissingDataError
from archsearch.hardware.identify import identify_cpu
from archsearch.profiles import Profile, cpu_stack, find_profile
from archsearch.progress import human_time, say
from archsearch.records import encoded
from archsearch.report.phrases import shell_path
from archsearch.workload import WorkloadRequest

if TYPE_CHECKING:
    from archsearch.report.terminal.search import Searched

TARGET = "smollm2-135m"
CONTEXT = 160
PROFILE_BUDGET_S = 130.0
ENOUGH_ROWS = 250  # of 372 planned for one dtype
FINALISTS = 2
CONFIRM_PROMPTS = 16
OTHER_S = 120.0  # what the engine adds, measured; loading


def run_demo(*, budget_s: float, output: Path, run_path: Path) -> dict[str, Any]:
    """Profile (unless a profile of this CPU and stack is there), search, train, confirm, export.

    Each step continues what it finds.
    """
    from archsearch import pipeline
    from archsearch.models.targets import resolve_target
    from archsearch.pipeline.profile.cpu import faster_dtype
    from archsearch.search.space import load_space

    start = time.monotonic()
    target = resolve_target(TARGET)
    pipeline.check_weights(target)
    say(f"This takes about {human_time(PROFILE_BUDGET_S + budget_s + OTHER_S)} on two quiet cores.")
    dtype, rows = "", 0
    while not profiled():  # a busy machine takes more than one budget
        dtype = dtype or faster_dtype(identify_cpu(), target.architecture, CONTEXT)
        say(
            f"$ archsearch profile --gpu cpu --target {TARGET} --dtype {dtype}"
            f" --budget {PROFILE_BUDGET_S:.0f}s"
        )
        request = pipeline.ProfileRequest(
            "cpu",
            target.architecture,
            load_space("demo"),
            dtypes=(dtype,),
            budget_s=PROFILE_BUDGET_S,
        )
        summary = pipeline.profile_device(request)
        say(f"{summary.rows} rows in {summary.folder}, at least {ENOUGH_ROWS} are asked for")
        if summary.rows == rows:
            break
        rows = summary.rows
    say(
        f"$ archsearch search --target {TARGET} --gpu cpu --context {CONTEXT} --confirm 1"
        f" --confirm-prompts {CONFIRM_PROMPTS} --finalists {FINALISTS} --run {run_path}"
        f" --time-budget {budget_s:.0f}s"
    )
    found = pipeline.search(
        pipeline.SearchRequest(
            TARGET,
            WorkloadRequest("cpu", context_len=CONTEXT),
            confirm=1,
            confirm_prompts=CONFIRM_PROMPTS,
            finalists=FINALISTS,
            time_budget_s=budget_s,
            run=run_path,
        ),
        anyway=True,  # the whole way is what is shown
    )
    say(f"$ archsearch export {run_path} --output {output}")
    exported = pipeline.export_rank(run_path, 1, output)
    seconds = time.monotonic() - start
    return {
        **encoded(found),
        "export": exported,
        "seconds": seconds,
        "text": demo_text(found, exported, run_path, seconds),
    }


def profiled() -> bool:
    """Whether this CPU, with this software, has a profile with enough rows to search with."""
    try:
        return len(Profile.load(find_profile(identify_cpu().key, cpu_stack())).rows) >= ENOUGH_ROWS
    except MissingDataError:
        return False


def demo_text(found: Searched, exported: dict[str, object], run_path: Path, seconds: float) -> str:
    """What the demo prints at its end."""
    from archsearch.report import summary_text
    from archsearch.report.terminal.search import family_lines
    from archsearch.runs.run import open_run

    run = shell_path(run_path)
    rows = [
        summary_text(open_run(run_path)),
        "",
        *family_lines(found.families, run_path, found.by.engine),
        "",
        f"Exported to {exported['output']}: {exported['note']}",
        "Confirmed in transformers only; before serving it elsewhere:"
        f" archsearch confirm {run} --engine NAME",
        f"All of it took {human_time(seconds)}.",
        "",
        "What to do next:",
        f"  open {shell_path(found.report)}",
        f"  archsearch confirm {run} --gamma 2 --gamma 4    other gammas, measured",
        f"  archsearch train {run} --budget 30m             more training",
        "  archsearch search --target YOUR-MODEL-FOLDER --prompts YOUR.jsonl --gpu cpu --confirm 1",
    ]
    rows[1:1] = [f"Note: {note}." for note in found.notes or ()]
    return "\n".join(rows)
