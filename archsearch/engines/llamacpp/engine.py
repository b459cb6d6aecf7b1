"""llama.cpp: its own HTTP server in a process of its own, on GGUF files written from model
folders."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from archsearch.acceptance.lookup import NewestNgram
from archsearch.engines.child.child_engine import ChildEngine
from archsearch.engines.engine import Chained, ModelSource
from archsearch.errors import ArchsearchError
from archsearch.files import scratch_dir, writing
from archsearch.models.files import is_gguf
from archsearch.models.gguf_file import GGUF_KINDS, kind_of_drafts, write_gguf
from archsearch.paths import cache_dir
from archsearch.schedule import Ranges
from archsearch.workload import GGUF_DTYPES

WORKER: Final = Path(__file__).parent / "worker" / "llamacpp_worker.py"
SERVER_VARIABLE: Final = "ARCHSEARCH_LLAMA_SERVER"
"""Names a llama-server of the user's own (a build for this CPU, or for a GPU)."""
WRITER: Final = 1
"""Part of the cache key: raise it when the same folder must be written again."""


class LlamaCppEngine(ChildEngine):
    """llama.cpp's server, with as many slots as requests in flight; a server for each gamma, which
    llama.cpp fixes when it starts.

    Folders become GGUF once, in the precision of `settings.dtype` (drafts `settings.draft_dtype`),
    and are kept in the cache by content; GGUF files are taken as they are. Greedy answers are the
    target's own in the same precision, where passes of several tokens take the same kernels as
    passes of one. Rounds and their seconds are the server's own clock; the first token comes with
    the prompt.
    """

    name = "llama.cpp"
    worker = WORKER
    told = ("threads", "time_passes")

    def check(self, draft: ModelSource | None, gamma: int, schedule: Ranges) -> None:
        if isinstance(draft, Chained):
            if draft.rule.least and draft.rule.with_last:
                raise ArchsearchError(
                    "llama.cpp drops the token that a draft is unsure of; give a rule without it"
                )
            if draft.lookup is not None and not isinstance(draft.lookup, NewestNgram):
                raise ArchsearchError("a chain in llama.cpp begins with its own n-gram lookup")
        if isinstance(draft, NewestNgram) and gamma < 2:
            raise ArchsearchError("llama.cpp's n-grams draft nothing below gamma 2; give --gamma 2")
        for dtype in (self.settings.dtype, self.draft_dtype):
            if dtype not in GGUF_KINDS and dtype not in GGUF_DTYPES:
                known = ", ".join(dict.fromkeys([*GGUF_KINDS, *GGUF_DTYPES]))
                raise ArchsearchError(f"llama.cpp runs {known} here, got dtype {dtype!r}")
        if self.settings.dummy_weights or self.settings.server_url is not None:
            raise ArchsearchError(
                "archsearch starts llama.cpp itself, on weights: train the draft first, without"
                " --server-url"
            )
        server, who = self.own_server, "--engine-path" if self.settings.path else SERVER_VARIABLE
        if server and not (os.path.isfile(server) and os.access(server, os.X_OK)):
            raise ArchsearchError(f"{who} names {server}, which cannot be run; name a llama-server")
        if server and self.settings.time_passes:
            raise ArchsearchError(
                f"llama.cpp's passes are timed in the library of its package, not in {server};"
                f" unset {SERVER_VARIABLE}"
            )

    def prepared(self, sources: Sequence[str]) -> list[str]:
        """The models as GGUF files. Raises ArchsearchError where one cannot be written.

        Made-up drafts that passes are timed with are written into their own folder: nobody asks for
        them again.
        """
        target, *drafts = (Path(source) for source in sources)
        first, timed = gguf_of(target, self.settings.dtype), self.settings.time_passes
        rest = [
            gguf_of(draft, self.draft_dtype, like=first, into=draft if timed else None)
            for draft in drafts
        ]
        return [str(path) for path in (first, *rest)]

    @property
    def draft_dtype(self) -> str:
        """The precision of drafts: what was asked for, else `kind_of_drafts`."""
        return self.settings.draft_dtype or kind_of_drafts(self.settings.dtype)

    def _source(self, model: ModelSource) -> str:
        if isinstance(model, Path) and is_gguf(model):
            return str(model.resolve())
        return super()._source(model)

    def _interpreter(self) -> Path:
        """A llama-server of the user's own needs nothing but Python beside it."""
        return Path(sys.executable) if self.own_server else super()._interpreter()

    @property
    def own_server(self) -> str | None:
        """A llama-server of the user's own; None for the package's."""
        return str(self.settings.path or os.environ.get(SERVER_VARIABLE) or "") or None

    def child_environment(self, sources: Sequence[str]) -> dict[str, str]:
        own = {SERVER_VARIABLE: self.own_server} if self.own_server else {}
        return {**super().child_environment(sources), **own}


def gguf_of(
    folder: Path, dtype: str, *, like: Path | None = None, into: Path | None = None
) -> Path:
    """`folder` as a GGUF file of precision `dtype`, written once, in the cache by content or in the
    folder `into`. A GGUF file is taken as it is. A draft takes the tokenizer of `like`, the
    target's file: llama.cpp refuses one with another.

    Raises ArchsearchError for a hub id, a shape or a precision that `write_gguf` does not write, or
    a full disk.
    """
    if is_gguf(folder):
        return folder
    if dtype not in GGUF_KINDS:
        raise ArchsearchError(
            f"archsearch writes no GGUF in {dtype}: give a GGUF file of it in the place of {folder}"
            " (llama-quantize makes one)"
        )
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise ArchsearchError(
            f"llama.cpp needs a folder with one model.safetensors, or a GGUF file; {folder} is"
            " neither"
        )
    kept = f"{dtype} {like}" if like is not None else dtype
    path = (
        into / f"{dtype}.gguf"
        if into is not None
        else _kept(folder / "config.json", weights, dtype, kept)
    )
    if path.is_file():
        return path
    with writing(path, "free space or set ARCHSEARCH_CACHE"), scratch_dir(path) as scratch:
        file = scratch / path.name
        write_gguf(folder, file, dtype=dtype, tokenizer_gguf=like, tokens_needed=False)
        os.replace(file, path)  # whole or not there
    return path


def _kept(config: Path, weights: Path, dtype: str, how: str) -> Path:
    digest = hashlib.blake2b(f"{WRITER} {how} ".encode(), digest_size=16)
    for file in (config, weights):
        with file.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return cache_dir() / "llama.cpp" / f"{digest.hexdigest()}-{dtype}.gguf"
