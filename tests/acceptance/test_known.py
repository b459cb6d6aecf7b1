"""What was measured for a target before: found, told apart, and never in the way."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from archsearch.acceptance import run_index
from archsearch.acceptance.known import OTHER_TEXT_STD, known_drafts, known_observations, read_alpha_file, summary
from archsearch.acceptance.measured import Trace
from archsearch.acceptance.prior import PriorAcceptance
from archsearch.architecture import catalogue
from archsearch.architecture.architecture import Architecture
from archsearch.errors import ArchsearchError

TARGET = catalogue.load("smollm2-135m").architecture
DRAFT = Architecture(576, 1536, 2, 9, 3, 64, 49152)
SMALL_HEAD = DRAFT.replace(num_hidden_layers=3, draft_vocab_size=8192)


def make_run(root: Path, name: str = "r1", target: str = "smollm2-135m", **arguments) -> Path:
    run = root / name
    run.mkdir(parents=True)
    asked = {"target": target, "domain": "narrow", "context": 160, "temperature": 0.0, "prompts": None} | arguments
    lines = "\n".join(f"  {key}: {json.dumps(value)}" for key, value in asked.items())
    (run / "run.yaml").write_text(f"schema_version: 1\narguments:\n{lines}\n")
    return run


def add_finalist(run: Path, arch: Architecture = DRAFT, alpha: float = 0.7, name: str = "a", tokens: int = 300_000) -> Path:
    folder = run / "finalists" / name
    folder.mkdir(parents=True)
    record = {"architecture": arch.to_dict(), "tokens": tokens, "vocabulary_coverage": 0.99}
    (folder / "training.json").write_text(json.dumps(record))
    matches = tuple(np.arange(100) < 100 * alpha for _ in range(10))
    Trace(matches, ("x",) * 10, tuple(map(str, range(10)))).save(folder / "trace.npz")
    return folder


def add_confirmed(run: Path, arch: Architecture, alpha: float, rank: int = 1) -> Path:
    folder = run / "best" / str(rank)
    folder.mkdir(parents=True)
    (folder / "score.json").write_text(json.dumps({"architecture": arch.to_dict()}))
    (folder / "confirmed.json").write_text(json.dumps({"alpha": {"value": alpha, "std": 0.02, "source": "measured"}}))
    return folder


def test_finalists_and_confirmations_of_the_same_target(tmp_path) -> None:
    run = make_run(tmp_path, temperature=0.7)
    add_finalist(run, SMALL_HEAD, 0.7)
    add_confirmed(run, DRAFT, 0.61)
    make_run(tmp_path, "other", target="llama-65b")
    add_finalist(tmp_path / "other")
    replayed, confirmed = known_observations("smollm2-135m", [tmp_path])
    assert replayed.architecture == SMALL_HEAD and replayed.alpha.value == pytest.approx(0.7)
    assert (
        replayed.context.trained_tokens == 300_000 and replayed.context.target == TARGET and replayed.context.context_len == 160
    )
    assert replayed.context.coverage.share(8192) == pytest.approx(0.99)
    assert replayed.context.temperature == 0.0  # a trace is greedy, whatever the run was asked
    assert confirmed.architecture == DRAFT and confirmed.alpha.value == 0.61 and confirmed.context.temperature == 0.7
    assert len(known_observations(TARGET, [tmp_path])) == 2 and known_observations("llama-2-7b", [tmp_path]) == []
    assert "2 drafts" in summary([replayed, confirmed]) and "nothing" in summary([])


def test_a_draft_replayed_and_confirmed_counts_once(tmp_path) -> None:
    run = make_run(tmp_path)
    add_finalist(run, DRAFT, 0.7)
    add_confirmed(run, DRAFT, 0.65)
    (found,) = known_drafts("smollm2-135m", [tmp_path])
    assert found.observation.alpha.value == pytest.approx(0.7) and found.path.name == "a"


def test_the_asking_run_is_left_out_and_other_text_is_doubted(tmp_path) -> None:
    run = make_run(tmp_path)
    add_finalist(run)
    assert known_observations("smollm2-135m", [tmp_path], exclude=run) == []
    (same,) = known_observations("smollm2-135m", [tmp_path])
    (other,) = known_observations("smollm2-135m", [tmp_path], prompts="mine.jsonl")
    assert other.alpha.value == same.alpha.value
    assert other.alpha.std == pytest.approx((same.alpha.std**2 + (OTHER_TEXT_STD * 0.7 * 0.3) ** 2) ** 0.5)


@pytest.mark.parametrize(
    "damage", ["no trace", "half a trace", "half json", "no architecture", "old shape", "no run.yaml", "yaml"]
)
def test_broken_folders_are_passed_over(tmp_path, damage: str) -> None:
    good = make_run(tmp_path, "good")
    add_finalist(good)
    run = make_run(tmp_path, "bad")
    folder = add_finalist(run, alpha=0.1)
    training = folder / "training.json"
    if damage == "no trace":
        (folder / "trace.npz").unlink()
    elif damage == "half a trace":
        (folder / "trace.npz").write_bytes((folder / "trace.npz").read_bytes()[:60])
    elif damage == "half json":
        training.write_text(training.read_text()[:40])
    elif damage == "no architecture":
        training.write_text("{}")
    elif damage == "old shape":
        training.write_text('{"architecture": {"width": 3}, "tokens": 5}')
    elif damage == "no run.yaml":
        (run / "run.yaml").unlink()
    else:
        (run / "run.yaml").write_text("arguments: [not, a, mapping")
    assert [o.alpha.value for o in known_observations("smollm2-135m", [tmp_path])] == pytest.approx([0.7])
    assert known_observations("smollm2-135m", [tmp_path / "nowhere"]) == []


def test_an_alpha_file(tmp_path) -> None:
    path = tmp_path / "alpha.json"
    data = {"architecture": DRAFT.to_dict(), "alpha": {"value": 0.64, "std": 0.03}, "domain": "code", "target": "smollm2-135m"}
    path.write_text(json.dumps(data))
    (found,) = known_observations("smollm2-135m", [], files=[path])
    assert found == read_alpha_file(path, "smollm2-135m")
    assert found.alpha.value == 0.64 and found.context.domain == "code" and found.context.target == TARGET
    with pytest.raises(ArchsearchError, match="target 'smollm2-135m', not for this one"):
        read_alpha_file(path, "llama-65b")
    path.write_text(json.dumps({"alpha": 0.64}))
    with pytest.raises(ArchsearchError, match="no measured acceptance.*archsearch acceptance"):
        read_alpha_file(path, "smollm2-135m")
    with pytest.raises(ArchsearchError, match="nowhere.json"):
        read_alpha_file(tmp_path / "nowhere.json", "smollm2-135m")


def test_one_known_draft_sharpens_the_prior(tmp_path) -> None:
    add_finalist(make_run(tmp_path), DRAFT, 0.75)
    observations = known_observations("smollm2-135m", [tmp_path])
    context = observations[0].context
    before = PriorAcceptance().predict(DRAFT.replace(num_hidden_layers=4), context).alpha
    after = PriorAcceptance().fit(observations).predict(DRAFT.replace(num_hidden_layers=4), context).alpha
    assert after.value > before.value + 0.05 and after.std < 0.35 * before.std


def test_runs_that_did_not_change_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        add_finalist(make_run(tmp_path, f"r{number}"), alpha=0.5 + number / 20)
    read: list[str] = []
    original = run_index.read_run
    monkeypatch.setattr(run_index, "read_run", lambda run: read.append(run.name) or original(run))
    first = known_observations("smollm2-135m", [tmp_path])
    assert len(first) == len(read) == 5
    read.clear()
    opened: list[Path] = []
    whole = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, *args, **rest: opened.append(path) or whole(path, *args, **rest))
    assert known_observations("smollm2-135m", [tmp_path]) == first
    assert read == [] and opened == [tmp_path / run_index.INDEX]
    add_finalist(tmp_path / "r2", SMALL_HEAD, 0.9, "b")
    make_run(tmp_path, "r7")
    assert len(known_observations("smollm2-135m", [tmp_path])) == 6 and read == ["r2", "r7"]


@pytest.mark.parametrize(
    "damage", ["not json", '{"format": 99, "runs": {}}', '{"format": 1, "runs": {"r1": {"stamp": 3}}}', "[]"]
)
def test_a_broken_index_is_made_again(tmp_path: Path, damage: str) -> None:
    add_finalist(make_run(tmp_path))
    first = known_observations("smollm2-135m", [tmp_path])
    (tmp_path / run_index.INDEX).write_text(damage)
    assert known_observations("smollm2-135m", [tmp_path]) == first
    (tmp_path / run_index.INDEX).unlink()
    (tmp_path / run_index.INDEX).mkdir()  # cannot be read nor written
    assert known_observations("smollm2-135m", [tmp_path]) == first
