"""Targets and drafts as Hugging Face modules: find, build, load, save.

Draft folder: `config.json` (any engine reads it), `model.safetensors` (always a full head), and
where the head is trimmed `draft_vocab.json` with the ids of the kept tokens. Rows of dropped tokens
are padding rows (`drafts.padding_row`), so an engine that knows nothing of trimming loads the
folder; `load_draft` takes the kept rows out again and computes only those (`drafts.TrimmedHead`).
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    # Model cards of exported drafts name archsearch.models.load_draft; torch loads only when it is
    # asked for.
    if name == "load_draft":
        from archsearch.models.drafts import load_draft

        return load_draft
    raise AttributeError(f"module 'archsearch.models' has no attribute {name!r}")
