"""Writes docs/engine-rounds.md, how engines run rounds on GPUs, from archsearch/engine_rounds.yaml.

python docs/generate_engines.py            (or: make docs)
"""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap
from typing import Any

import yaml
from packaging.version import Version

from archsearch import engine_rounds
from archsearch.engine_rounds import round_costs
from archsearch.estimate import Estimate
from archsearch.files import write_text

FILE = Path(__file__).with_name("engine-rounds.md")
DATA = Path(engine_rounds.__file__).with_suffix(".yaml")
BEGIN, END = (
    "<!-- engine_rounds.yaml: written by make docs -->",
    "<!-- end of engine_rounds.yaml -->",
)
DRAFTERS = {
    "draft_model": "draft",
    "feature_head": "EAGLE, MTP",
    "parallel_head": "P-EAGLE",
    "parallel_draft": "PARD",
    "block": "DFlash",
    "medusa": "Medusa",
    "lookup": "n-gram, suffix",
    None: "any",
}


def milliseconds(cost: Estimate) -> str:
    return f"{1e3 * cost.value:.3g} ± {1e3 * cost.std:.2g}" if cost.value or cost.std else "0"


def version_rows(engine: str, known: dict[str, Any]) -> list[str]:
    """One line per row of an engine, in its order: the first that fits counts."""
    lines: list[str] = []
    since: dict[tuple[str | None, str], str] = {}  # of a drafter under switches, "" for any
    for row in known["rows"]:
        drafter, below = row.get("drafter"), row.get("below")
        switches = ", ".join(f"`{name}={value}`" for name, value in row.get("options", {}).items())
        starts = [since[key] for key in ((drafter, ""), (drafter, switches)) if key in since]
        oldest = known.get("oldest_of", {}).get(drafter, known["oldest"])
        first = max([str(oldest), *starts], key=Version)
        versions = f"{first} to before {below}" if below else f"{first} on"
        if below:
            since[drafter, switches] = str(below)
        way = f"`{row['class']}`" if "class" in row else f"refused: {row['refused']}"
        way += "; target too" if row.get("eager") else ""
        mend = [f"`{name}={value}`" for name, value in row.get("remedy_options", {}).items()]
        mend += [f"version {row['remedy']}"] if "remedy" in row else []
        lines.append(
            f"| {engine} | {DRAFTERS[drafter]} | {versions} | {switches} | {way} |"
            f" {', '.join(mend)} |"
        )
    return lines


def tables() -> str:
    """Both tables as Markdown."""
    data = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    lines = [
        "| engine | drafter | versions | switches | class | graphs by |",
        "|---|---|---|---|---|---|",
    ]
    for engine, known in data["versions"].items():
        lines += version_rows(engine, known)
    lines += [
        "",
        "## What a class adds",
        "",
        "Milliseconds. GPU: what a round, a draft token, each of its layers (gap) and",
        "a sequence add.",
        "Host: a round, a draft pass, each of its layers.",
        "",
        (
            "| class | draft | order | round | token | gap | sequence | host round | host pass |"
            " host layer |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    sources = ["", "## Sources", ""]
    for name in data["classes"]:
        costs = round_costs(name)
        times = (
            costs.round_s,
            costs.token_s,
            costs.gap_s,
            costs.sequence_s,
            costs.host_round_s,
            costs.host_token_s,
            costs.host_layer_s,
        )
        cells = [f"`{name}`", costs.title, costs.order, *map(milliseconds, times)]
        lines.append(f"| {' | '.join(cells)} |")
        source = f"- `{name}`: {costs.source}"
        sources += wrap(source, 100, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines + sources)


def page(text: str) -> str:
    """The page with fresh tables."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


if __name__ == "__main__":
    write_text(FILE, page(FILE.read_text(encoding="utf-8")))
