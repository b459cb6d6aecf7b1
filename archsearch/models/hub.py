"""What is asked of the Hugging Face hub: once, without the retries that take minutes where there is
no network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from archsearch.errors import ArchsearchError

TIMEOUT_S: Final = 10.0
_CLIENTS: Final = ("httpx", "httpcore", "requests", "urllib3")


@contextmanager
def hub_errors(message: str) -> Iterator[None]:
    """What keeps the hub from answering (no network, no such repository, a gated one) as one line:
    `message`, in which {} is the reason. Raises ArchsearchError."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except Exception as error:
        # The connection errors of some clients are no OSError.
        if not isinstance(error, OSError | ValueError | HfHubHTTPError) and not type(
            error
        ).__module__.startswith(_CLIENTS):
            raise
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ArchsearchError(message.replace("{}", said)) from error


def config_words(hub_id: str) -> str:
    """What is said where a repository's config cannot be had: see `hub_errors`."""
    return (
        f"cannot read the config of {hub_id!r} from the Hugging Face hub ({{}}); check name and"
        " network, or give a folder"
    )


def hub_config_folder(hub_id: str) -> Path:
    """The folder that holds config.json of a repository: of the local cache where it is there, else
    fetched. Raises ArchsearchError, after one request."""
    from huggingface_hub import (
        get_hf_file_metadata,
        hf_hub_download,
        hf_hub_url,
        try_to_load_from_cache,
    )

    with hub_errors(config_words(hub_id)):
        known = try_to_load_from_cache(hub_id, "config.json")
        if isinstance(known, str):
            return Path(known).parent
        url = hf_hub_url(hub_id, "config.json")
        get_hf_file_metadata(url, timeout=TIMEOUT_S, retry_on_errors=False)
        return Path(hf_hub_download(hub_id, "config.json")).parent
