"""Targets and drafts as Hugging Face modules: find, build, load, save. What the folder of a draft
holds: docs/files.md."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    # Model cards of exported drafts name archsearch.models.load_draft; torch loads only when it is
    # asked for.
    if name == "load_draft":
        from archsearch.models.drafts import load_draft

        return load_draft
    raise AttributeError(f"module 'archsearch.models' has no attribute {name!r}")
