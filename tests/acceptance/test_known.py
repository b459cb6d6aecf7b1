"""What was measured for a target before: found, told apart, and never in the way."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from archsearch.acceptance.estimator import AcceptanceObservation
from archsearch.acceptance.known import (
    AskedText,
    earlier,
    known_drafts,
    read_alpha_file,
)
from archsearch.acceptance.measured import Trace
from archsearch.acceptance.prior import PriorAcceptance
from archsearch.architecture import catalogue
from archsearch.architecture.architecture import Architecture
from archsearch.errors import ArchsearchError
from archsearch.records import as_data, save
from archsearch.text.likeness import SKETCH_FILE, sketch_of_set
from archsearch.text.prompt_set import load_prompt_set

TARGET = catalogue.load("smollm2-135m").architecture
DRAFT = Architecture(576, 1536, 2, 9, 3, 64, 49152)
SMALL_HEAD = DRAFT.replace(num_hidden_layers=3, draft_vocab_size=8192)


def seen(*args, **more) -> list[AcceptanceObservation]:
    return [draft.observation for draft in known_drafts(*args, **more)]


def make_run(root: Path, name: str = "r1", target: str = "smollm2-135m", **arguments) -> Path:
    run = root / name
    run.mkdir(parents=True)
    asked = {
        "target": target,
        "domain": "narrow",
        "context": 160,
        "temperature": 0.0,
        "prompts": None,
    } | arguments
    lines = "\n".join(f"  {key}: {json.dumps(value)}" for key, value in asked.items())
    (run / "run.yaml").write_text(f"schema_version: 1\narguments:\n{lines}\n")
    return run


def add_finalist(
    run: Path,
    arch: Architecture = DRAFT,
    alpha: float = 0.7,
    name: str = "a",
    tokens: int = 300_000,
) -> Path:
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
    (folder / "confirmed.json").write_text(
        json.dumps({"alpha": {"value": alpha, "std": 0.02, "source": "measured"}})
    )
    return folder


def test_finalists_and_confirmations_of_the_same_target(tmp_path) -> None:
    run = make_run(tmp_path, temperature=0.7)
    add_finalist(run, SMALL_HEAD, 0.7)
    add_confirmed(run, DRAFT, 0.61)
    make_run(tmp_path, "other", target="llama-65b")
    add_finalist(tmp_path / "other")
    replayed, confirmed = seen("smollm2-135m", [tmp_path])
    assert replayed.architecture == SMALL_HEAD and replayed.alpha.value == pytest.approx(0.7)
    assert (
        replayed.context.trained_tokens == 300_000
        and replayed.context.target == TARGET
        and replayed.context.context_len == 160
    )
    assert replayed.context.coverage.share(8192) == pytest.approx(0.99)
    assert replayed.context.temperature == 0.0  # a trace is greedy, whatever the run was asked
    assert (
        confirmed.architecture == DRAFT
        and confirmed.alpha.value == 0.61
        and confirmed.context.temperature == 0.7
    )
    assert len(seen(TARGET, [tmp_path])) == 2 and seen("llama-2-7b", [tmp_path]) == []


def test_a_draft_replayed_and_confirmed_counts_once(tmp_path) -> None:
    run = make_run(tmp_path)
    add_finalist(run, DRAFT, 0.7)
    add_confirmed(run, DRAFT, 0.65)
    (found,) = known_drafts("smollm2-135m", [tmp_path])
    assert found.observation.alpha.value == pytest.approx(0.7)


SHOP = [
    f"A customer asks when order number {n} will arrive. Write a short, polite reply."
    for n in range(40)
]
MATHS = [
    f"Ann has {n} apples and gives {n // 2} of them to Bob. How many apples are left for Ann?"
    for n in range(40)
]


def prompt_file(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    os.utime(path, (0, 0))  # older than any run
    return str(path)


def asked_for(path: str, domain: str = "narrow") -> AskedText:
    return AskedText(sketch_of_set(load_prompt_set(Path(path), None)), domain)


def test_the_asking_run_is_left_out(tmp_path) -> None:
    run = make_run(tmp_path)
    add_finalist(run)
    assert seen("smollm2-135m", [tmp_path], exclude=run) == []


def test_how_alike_the_texts_are_goes_along(tmp_path) -> None:
    shop, same, like, maths = (
        prompt_file(tmp_path / f"{name}.jsonl", texts)
        for name, texts in (
            ("shop", SHOP),
            ("same", SHOP[::-1]),
            ("like", SHOP[5:30]),
            ("maths", MATHS),
        )
    )
    root = tmp_path / "runs"
    add_finalist(
        make_run(root, prompts=shop), DRAFT
    )  # keeps no sketch, but its file is still there
    (known,) = known_drafts("smollm2-135m", [root], asked=asked_for(same))
    assert known.match == "same" and known.observation.likeness == 1.0
    (known,) = known_drafts("smollm2-135m", [root], asked=asked_for(like, "code"))
    assert known.match == "other" and known.observation.likeness > 0.9
    assert (
        known.observation.context.domain == "code"
    )  # one kind of text, whatever two people called it
    (known,) = known_drafts("smollm2-135m", [root], asked=asked_for(maths, "math"))
    assert (
        known.match == "other"
        and known.observation.likeness < 0.2
        and known.observation.context.domain == "narrow"
    )
    (known,) = known_drafts("smollm2-135m", [root])  # who asks has no text
    assert known.match == "unknown" and known.observation.likeness == 0.0


def test_a_sketch_outlives_its_prompts_and_a_changed_file_does_not_speak(tmp_path) -> None:
    shop, root = prompt_file(tmp_path / "shop.jsonl", SHOP), tmp_path / "runs"
    asked = asked_for(shop)
    kept, gone, changed = (
        make_run(root, name, prompts=str(tmp_path / f"{name}.jsonl"))
        for name in ("kept", "gone", "changed")
    )
    save(kept / SKETCH_FILE, asked.sketch)
    (tmp_path / "changed.jsonl").write_text(Path(shop).read_text())  # written after the run began
    os.utime(tmp_path / "changed.jsonl", (2**31, 2**31))
    for run in (kept, gone, changed):
        add_finalist(run)
    found = {
        draft.run.name: draft.match for draft in known_drafts("smollm2-135m", [root], asked=asked)
    }
    assert found == {"kept": "same", "gone": "unknown", "changed": "unknown"}
    assert {
        draft.run.name: draft.match for draft in known_drafts("smollm2-135m", [root], asked=asked)
    } == found


def test_what_earlier_runs_moved_is_told(tmp_path) -> None:
    shop, maths = (
        prompt_file(tmp_path / "shop.jsonl", SHOP),
        prompt_file(tmp_path / "maths.jsonl", MATHS),
    )
    root = tmp_path / "runs"
    for name, alpha in (("a", 0.79), ("b", 0.75)):
        add_finalist(
            make_run(root, name, prompts=shop), DRAFT if name == "a" else SMALL_HEAD, alpha
        )
    assert earlier(TARGET, [], AskedText(), 0.0) is None
    on_shop, on_maths = asked_for(shop), asked_for(maths)
    same = earlier(TARGET, known_drafts("smollm2-135m", [root], asked=on_shop), on_shop, 0.0)
    other = earlier(TARGET, known_drafts("smollm2-135m", [root], asked=on_maths), on_maths, 0.0)
    assert same.before == other.before and same.after.value > same.before.value + 0.1
    # Most of what shop letters say about maths is that they are shop letters.
    assert other.after.value - other.before.value < 0.35 * (same.after.value - same.before.value)
    assert other.after.std > 2.0 * same.after.std
    assert same.words().startswith(
        "earlier runs: 2 drafts of runs a, b on the same prompts moved alpha of a 2-layer draft"
        " from "
    )
    assert "on other text (likeness 0." in other.words()
    add_finalist(make_run(root, "c", prompts=maths), DRAFT, 0.5)
    both = earlier(TARGET, known_drafts("smollm2-135m", [root], asked=on_maths), on_maths, 0.0)
    assert [text.runs for text in both.texts] == [
        ("c",),
        ("a", "b"),
    ] and "; together to 0." in both.words()
    assert json.loads(json.dumps(as_data(both)))["texts"][1]["drafts"] == 2
    assert both.after.value == pytest.approx(
        both.texts[0].alpha.value, abs=0.03
    )  # the asked text's own draft decides


@pytest.mark.parametrize(
    "damage",
    [
        "no trace",
        "half a trace",
        "half json",
        "no architecture",
        "old shape",
        "no run.yaml",
        "yaml",
    ],
)
def test_broken_folders_are_left_out_and_named(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
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
    assert [o.alpha.value for o in seen("smollm2-135m", [tmp_path])] == pytest.approx([0.7])
    for _ in range(2):  # each time
        if damage != "no run.yaml":  # no run at all
            where = "run.yaml (" if damage == "yaml" else "finalists/a ("
            assert caplog.text.count(f"left out: {run}/{where}") == 1
        caplog.clear()
        assert len(seen("smollm2-135m", [tmp_path])) == 1
    assert seen("smollm2-135m", [tmp_path / "nowhere"]) == []


def test_an_alpha_file(tmp_path) -> None:
    path = tmp_path / "alpha.json"
    data = {
        "architecture": DRAFT.to_dict(),
        "alpha": {"value": 0.64, "std": 0.03},
        "domain": "code",
        "target": "smollm2-135m",
    }
    path.write_text(json.dumps(data))
    found = read_alpha_file(path, "smollm2-135m")
    assert (
        found.alpha.value == 0.64
        and found.context.domain == "code"
        and found.context.target == TARGET
    )
    with pytest.raises(ArchsearchError, match="target 'smollm2-135m', not for this one"):
        read_alpha_file(path, "llama-65b")
    path.write_text(json.dumps({"alpha": 0.64}))
    with pytest.raises(ArchsearchError, match="no measured acceptance.*archsearch acceptance"):
        read_alpha_file(path, "smollm2-135m")
    with pytest.raises(ArchsearchError, match="nowhere.json"):
        read_alpha_file(tmp_path / "nowhere.json", "smollm2-135m")


def test_one_known_draft_sharpens_the_prior(tmp_path) -> None:
    add_finalist(make_run(tmp_path), DRAFT, 0.75)
    asked = AskedText(
        sketch_of_set(load_prompt_set(None, None)), "narrow"
    )  # a run without --prompts was on the demo's
    observations = seen("smollm2-135m", [tmp_path], asked=asked)
    context = observations[0].context
    before = PriorAcceptance().predict(DRAFT.replace(num_hidden_layers=4), context).alpha
    after = (
        PriorAcceptance()
        .fit(observations)
        .predict(DRAFT.replace(num_hidden_layers=4), context)
        .alpha
    )
    assert after.value > before.value + 0.05 and after.std < 0.35 * before.std
