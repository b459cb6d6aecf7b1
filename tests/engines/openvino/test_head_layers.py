"""Which heads OpenVINO GenAI can be given: those that read the states it hands over."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from archsearch.engines.openvino.engine import WORKER
from tests.doubles.worker_modules import worker_modules
from tests.engines.child.test_families import folder_of


@pytest.fixture(scope="module")
def worker() -> SimpleNamespace:
    with worker_modules(WORKER) as modules:
        yield modules


def test_a_head_on_other_layers_is_refused(tmp_path: Path, worker: SimpleNamespace) -> None:
    def head(name: str, *ids: int) -> Path:
        return folder_of(
            tmp_path / name, eagle_config={"eagle_aux_hidden_state_layer_ids": list(ids)}
        )

    target, small = (
        folder_of(tmp_path / str(layers), num_hidden_layers=layers) for layers in (30, 8)
    )
    worker.convert.check_layers(head("usual", 2, 15, 27), target)
    for wrong, of in (
        (head("other", 1, 15, 27), target),
        (head("none"), target),
        (head("small", 2, 4, 5), small),
    ):
        with pytest.raises(
            worker.loop.UserError, match="hands the states of layers .*: use --engine vllm"
        ):
            worker.convert.check_layers(wrong, of)
