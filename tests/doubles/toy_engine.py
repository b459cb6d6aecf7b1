"""An engine as somebody else would add it: this file, and one row of facts that names `make` and
`serving`."""

from __future__ import annotations

from archsearch.engine_facts import EngineFacts
from archsearch.engines.engine import EngineSettings
from archsearch.export.engines import Serving, Setup
from tests.doubles.made_up_engine import MadeUpEngine

ROW = EngineFacts(
    name="toy",
    title="Toy Serve",
    version="1",
    make=f"{__name__}:make",
    export=f"{__name__}:serving",
    in_process=True,
    batches=True,
    synthesises=True,
)


def make(settings: EngineSettings, tokenizer: object = None) -> MadeUpEngine:
    return MadeUpEngine(name="toy", schedules=False)


def serving(setup: Setup) -> Serving:
    return Serving(
        "toy", ("toy-serve", setup.target, "--draft", str(setup.folder)), notes=("It is a toy.",)
    )
