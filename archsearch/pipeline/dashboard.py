"""`archsearch dashboard`: Optuna's own dashboard on the studies of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.runs.run import open_run


def serve_dashboard(
    path: Path,
    port: int,
    ready: Callable[[str], None],
    *,
    storage: str | None = None,
    host: str = "127.0.0.1",
) -> None:
    """Serve the dashboard of a run until it is stopped; `ready` is called with its
    address once it answers.

    `storage`: the Optuna URL that the search was given, where it was given one: run.yaml keeps no
    password. Port 0: any that is free. Raises MissingDataError without optuna-dashboard or without
    a study, ArchsearchError for a port that is taken.
    """
    run = open_run(path)
    try:
        from optuna_dashboard import wsgi
    except ImportError:
        raise MissingDataError(
            'optuna-dashboard is not installed; run: pip install "archsearch[dashboard]"'
        ) from None
    where = storage or (run.storage_file if run.storage_file.is_file() else None)
    if where is None:
        asked = run.arguments.get("storage")
        used = f"its search used {asked}: name it with --storage"
        why = used if asked else "the search has not started"
        raise MissingDataError(f"{path} holds no journal.log; {why}")
    from archsearch.search.study import open_storage

    class Quiet(WSGIRequestHandler):
        def log_message(self, *_: Any) -> None:
            """No line a request."""

    try:
        server = make_server(host, port, wsgi(_storage(open_storage(where))), handler_class=Quiet)
    except OSError as error:
        raise ArchsearchError(
            f"port {port} cannot be used ({error.strerror}); choose another --port"
        ) from error
    with server:
        ready(f"http://{host}:{server.server_port}/dashboard/")
        server.serve_forever()


def _storage(storage: Any) -> Any:
    """What wsgi takes: a storage, not a URL."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.storages.get_storage(storage)
