"""`archsearch schedule`."""

from __future__ import annotations

from pathlib import Path

from archsearch.cli import options as o
from archsearch.cli.app import main
from archsearch.cli.output import emit


@main.command()
@o.run_argument
@o.rank_option
@o.options(
    "",
    o.opt("--engine", "Whose latencies (default: the search's).", o.PRICED),
    o.opt("--batch-size batch_sizes", "Default: 1, 2, 4, ..., 256.", o.COUNT, multiple=True),
    o.opt("--family", "A trained head of the run instead.", o.FAMILY, "independent"),
)
@o.json_option
def schedule(
    run: Path,
    rank: int,
    engine: str | None,
    batch_sizes: tuple[int, ...],
    family: str,
    as_json: bool,
) -> None:
    """The best gamma of a candidate at each batch size, and where speculation should be off; export
    writes it for the engines.

    \b
    archsearch schedule runs/llama --engine vllm
    archsearch schedule runs/demo --engine vllm --batch-size 1 --batch-size 4 --batch-size 16
    archsearch schedule runs/demo --engine vllm --family eagle3
    """
    from archsearch.pipeline import SearchSession, schedule_rank
    from archsearch.pipeline.schedule import schedule_head
    from archsearch.report.terminal.schedule import schedule_text

    session = SearchSession.reopen(run)
    if family != "independent":
        result = schedule_head(session, family, engine, batch_sizes)
    else:
        result = schedule_rank(session, rank, engine, batch_sizes)
    emit(result, schedule_text(result, run, rank), as_json)
