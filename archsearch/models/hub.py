"""config.json from the Hugging Face hub: asked once, without the retries that take minutes where
there is no network."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from archsearch.errors import ArchsearchError

TIMEOUT_S: Final = 10.0


def hub_config_folder(hub_id: str) -> Path:
    """The folder that holds config.json of a repository: of the local cache where it is there, else
    fetched.

    Raises ArchsearchError, after one request: no network, no such repository, a gated one.
    """
    from huggingface_hub import (
        get_hf_file_metadata,
        hf_hub_download,
        hf_hub_url,
        try_to_load_from_cache,
    )
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        known = try_to_load_from_cache(hub_id, "config.json")
        if isinstance(known, str):
            return Path(known).parent
        get_hf_file_metadata(
            hf_hub_url(hub_id, "config.json"), timeout=TIMEOUT_S, retry_on_errors=False
        )
        return Path(hf_hub_download(hub_id, "config.json")).parent
    except (
        OSError,
        ValueError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    ) as error:
        raise unreachable(hub_id, error) from error
    except Exception as error:  # httpx's connection errors are no OSError
        if not type(error).__module__.startswith(("httpx", "httpcore", "requests", "urllib3")):
            raise
        raise unreachable(hub_id, error) from error


def unreachable(hub_id: str, error: Exception) -> ArchsearchError:
    """What to tell where a repository's config cannot be had."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return ArchsearchError(
        f"cannot read the config of {hub_id!r} from the Hugging Face hub ({lines[0]}); check name"
        " and network, or give a folder"
    )
