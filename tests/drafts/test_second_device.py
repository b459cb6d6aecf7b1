"""The target writes and drafts are trained on another device than the CPU: a stand-in that refuses
tensors of the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from archsearch.drafts.heads import HeadPlan, HeadTrainer
from archsearch.drafts.trainer import DraftTrainer
from archsearch.models.drafts import load_draft
from archsearch.models.files import HeadFamily
from archsearch.models.load import LoadedTarget
from archsearch.models.targets import resolve_target
from archsearch.text.prompt_set import load_prompt_set
from archsearch.training.batches import Batch
from archsearch.training.heads.train import HeadRun
from tests.doubles.second_device import second_device
from tests.doubles.world import TINY, make_model_folder, make_prompts

SHAPE = TINY.replace(  # trimmed and narrow
    num_hidden_layers=1,
    hidden_size=TINY.hidden_size // 2,
    tie_word_embeddings=False,
    draft_vocab_size=128,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("second")
    make_model_folder(folder / "target")
    make_prompts(folder / "prompts.jsonl", 24)
    return folder


def trainer(folder: Path, run: str, device: str) -> DraftTrainer:
    prompts = load_prompt_set(folder / "prompts.jsonl", None)
    return DraftTrainer(
        LoadedTarget(resolve_target(str(folder / "target")), "float32", device),
        prompts,
        folder / run,
        answer_tokens=8,
        threads=1,
    )


def test_the_stand_in_refuses_tensors_of_the_cpu() -> None:
    with second_device() as device:
        there = torch.ones(3, device=device)
        assert (there + 1).device.type == device and float(there.sum()) == 3.0
        assert there.cpu().device.type == "cpu" and torch.ones(2).to(device).device.type == device
        with pytest.raises(RuntimeError, match="two devices"):
            there + torch.ones(3)
        with pytest.raises(RuntimeError, match="indexed"):
            torch.ones(3)[there.long()]


def test_a_draft_is_trained_elsewhere(folder: Path) -> None:
    with second_device() as device:
        there = trainer(folder, "there", device)
        there.texts.write_training(60.0)
        there.texts.growth.grow(0.2)
        # Each limit is more than a step of 512 tokens above the last: how much text 0.2 s brought,
        # and so how long a step is, is the machine's.
        short = there.train_short(SHAPE, 300)
        again = there.train_short(SHAPE, 900)  # goes on from its checkpoint
        done = there.train(SHAPE, 60.0, tokens=1500)
    assert short.tokens < again.tokens <= done.tokens and 0.0 <= done.alpha.value <= 1.0
    assert {p.device.type for p in load_draft(done.folder).parameters()} == {"cpu"}
    here = trainer(folder, "here", "cpu")
    here.texts.write_training(60.0)
    assert (
        here.texts.training().sequences[0].token_ids.tolist()
        == there.texts.training().sequences[0].token_ids.tolist()
    )


@pytest.mark.parametrize("family", ["eagle3", "medusa"])
def test_a_head_reads_and_is_judged_elsewhere(
    folder: Path, family: HeadFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the backward pass, in which torch gives up on a stand-in with chains."""

    def forward_only(run: HeadRun, batch: Batch, lr: float) -> float:
        loss = run._loss(batch)
        assert loss.device.type == run.device.type != "cpu"
        return float(loss.detach())

    monkeypatch.setattr(HeadRun, "_update", forward_only)
    with second_device() as device:
        there = trainer(folder, f"head-{family}", device)
        there.texts.write_training(60.0)
        found = HeadTrainer(there).train(HeadPlan(family, gamma=2, rows=128), 0.3)
    assert found.folder.joinpath("model.safetensors").exists()


def test_early_exits_are_measured_elsewhere(folder: Path) -> None:
    from archsearch.acceptance.early_exit import exit_traces

    here = trainer(folder, "exits", "cpu")
    texts = here.texts.heldout().sequences
    want = exit_traces(here.loaded.model(), texts, [1], end_ids=[0])
    with second_device() as device:
        assert exit_traces(here.loaded.model(device=device), texts, [1], end_ids=[0])[1].agreements[
            0
        ].tolist() == (want[1].agreements[0].tolist())
