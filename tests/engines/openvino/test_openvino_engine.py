"""OpenVINO GenAI: the pure parts quickly, the engine itself (slow) on tiny folders with random
weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import archsearch.engines.openvino.engine as openvino_module
from archsearch.architecture.architecture import Architecture
from archsearch.engines.engine import Engine, EnginePrompt, EngineSettings, Sampling
from archsearch.engines.environments.environment import find_python
from archsearch.engines.openvino.engine import WORKER, OpenVinoEngine
from archsearch.errors import ArchsearchError, RunFailed
from archsearch.models.drafts import build_draft, save_draft
from tests.doubles.worker_modules import worker_modules

TARGET = Architecture(32, 64, 2, 4, 2, 8, 50)
DRAFT = TARGET.replace(num_hidden_layers=1)
PROMPTS = [
    EnginePrompt(f"p{i}", tuple((11 * i + j) % 49 + 1 for j in range(3 + i))) for i in range(3)
]


with worker_modules(WORKER) as worker:  # its functions; OpenVINO itself is not loaded
    pass


# --------------------------------------------------------------------------------------------------
# pure parts


@pytest.mark.parametrize(("dtype", "told"), [("bfloat16", True), ("float32", False)])
def test_a_division_by_zero_in_bfloat16_is_explained(
    monkeypatch: pytest.MonkeyPatch, dtype: str, told: bool
) -> None:
    engine = OpenVinoEngine(EngineSettings(dtype=dtype, threads=1))

    class Killed:
        def ask(self, request: object) -> None:
            raise RunFailed("openvino was killed by signal 8 during 'start'")

    monkeypatch.setattr(engine, "_source", str)
    monkeypatch.setattr(engine, "_new_child", lambda sources: Killed())
    with pytest.raises(RunFailed, match="signal 8") as error:
        engine.start(Path("target"), None, 0)
    assert ("two CPUs" in str(error.value)) is told


def test_the_last_token_is_never_drafted() -> None:
    assert [worker.openvino_worker.asked(written, 3, 10) for written in (1, 6, 7, 8, 9)] == [
        3,
        3,
        2,
        1,
        0,
    ]


def test_only_rounds_that_were_asked_for_gamma_and_not_cut_are_whole() -> None:
    def lengths(handed: list[int], limit: int, ended: bool) -> list[int]:
        asked = worker.openvino_worker.Worker()
        asked.gamma = 3
        one = worker.openvino_worker.Request({"id": "p", "token_ids": [0]}, None, 0.0)
        one.token_ids, one.lengths = [0] * sum(handed), handed
        one.times = [float(number) for number in range(len(handed))]
        answer = asked.result(one, 9.0, limit, ended)
        return list(answer["round_lengths"])

    assert lengths([1, 4, 2, 1, 2], 10, ended=False) == [4, 2]
    assert lengths([1, 4, 2], 64, ended=True) == [4]
    assert lengths([1], 64, ended=False) == []


def test_draft_passes_are_told_apart_or_not_told() -> None:
    # 1 token by the target (an empty entry), rounds of 3, 3, then 1 draft token for the last two
    durations = [0.0, 5.0, 1.0, 1.1, 2.0, 1.2, 1.3, 3.0]
    assert worker.openvino_worker.draft_passes(durations, [1, 4, 3, 2], 3, 10) == [
        [],
        [5.0, 1.0, 1.1],
        [2.0, 1.2, 1.3],
        [3.0],
    ]
    assert worker.openvino_worker.draft_passes(durations[:-1], [1, 4, 3, 2], 3, 10) is None
    assert worker.openvino_worker.draft_passes([*durations, 0.0], [1, 4, 3, 2], 3, 10) is None
    # a last round for the target's token alone notes an empty entry
    assert worker.openvino_worker.draft_passes([0.0, 5.0, 1.0, 0.0], [1, 3, 1], 2, 5) == [
        [],
        [5.0, 1.0],
        [],
    ]


def test_the_draft_s_first_pass_takes_what_it_has_not_seen() -> None:
    assert worker.openvino_worker.draft_pass_tokens(3, True, 7, False) == [8, 1, 1]
    assert worker.openvino_worker.draft_pass_tokens(3, False, 7, True) == [2, 1, 1]
    assert worker.openvino_worker.draft_pass_tokens(3, False, 7, False) == [1, 1, 1]
    assert worker.openvino_worker.draft_pass_tokens(0, True, 7, False) == []


def test_tokens_behind_the_end_are_dropped() -> None:
    assert worker.openvino_worker.trimmed([1, 4, 4, 2], 7) == [1, 4, 2]
    assert worker.openvino_worker.trimmed([1, 4], 5) == [1, 4]


def test_precision_is_what_the_device_can() -> None:
    assert worker.convert.precision("float32", ["BF16", "FP16"]) == ("fp32", "f32")
    assert worker.convert.precision("bfloat16", ["FP32", "BF16"]) == ("fp16", "bf16")
    assert worker.convert.precision("float16", ["FP32", "BF16"]) == ("fp16", "bf16")
    assert worker.convert.precision("bfloat16", ["FP32"]) == ("fp16", "f32")
    with pytest.raises(worker.loop.UserError, match="int8"):
        worker.convert.precision("int8", ["FP32"])


def test_end_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    assert worker.openvino_worker.ends_of(tmp_path) == []
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    assert worker.openvino_worker.ends_of(tmp_path) == [2]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert worker.openvino_worker.ends_of(tmp_path) == [3, 4]


def test_the_cache_key_follows_the_content(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    key = worker.convert.content_key(tmp_path, "fp32", False)
    (tmp_path / "README.md").write_text("no part of the model")
    assert worker.convert.content_key(tmp_path, "fp32", False) == key
    assert worker.convert.content_key(tmp_path, "fp16", False) != key
    (tmp_path / "model.safetensors").write_bytes(b"abd")
    changed = worker.convert.content_key(tmp_path, "fp32", False)
    assert changed != key
    assert worker.convert.content_key(tmp_path, "fp32", True) != changed
    (tmp_path / "config.json").write_text("{ }")
    assert worker.convert.content_key(tmp_path, "fp32", False) != changed


def test_of_an_error_the_last_line_is_told() -> None:
    last_line = worker.convert.last_line
    assert (
        last_line(RuntimeError("Exception from core.cpp:1\n\n  Cannot read the model  \n"))
        == "Cannot read the model"
    )
    assert last_line(RuntimeError()) == "RuntimeError"


# ------------------------------------------------------------------------------------- what is
# refused before a child starts


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    for name, size in (("target", 50), ("draft", 51)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"vocab_size": size}))
    return tmp_path / "target", tmp_path / "draft"


def test_what_it_cannot_do_is_one_line(folders: tuple[Path, Path], tmp_path: Path) -> None:
    engine = OpenVinoEngine(EngineSettings(python=tmp_path / "no-python"))
    target, draft = folders
    cases: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((target, draft, 2), {"synthetic": (0.5, 0.4)}, "no synthetic acceptance"),
        ((target, draft, 2), {"schedule": ((1, 4, 2), (5, 8, 1))}, "one gamma for all batch sizes"),
        ((target, draft, 0), {}, "gamma"),
        ((target, draft, 2), {}, "51 tokens, the target's 50"),
        ((object(), None, 0), {}, "not a object"),
        ((tmp_path / "absent", None, 0), {}, "no config.json"),
        ((target, None, 0), {}, "cannot run"),
    ]
    for arguments, options, text in cases:
        with pytest.raises(ArchsearchError, match=text) as caught:
            engine.start(*arguments, **options)
        assert "\n" not in str(caught.value)
    with pytest.raises(ArchsearchError, match="one CPU"):
        OpenVinoEngine(EngineSettings(device="gpu")).start(target, None, 0)


def test_the_hub_is_left_alone_for_folders(folders: tuple[Path, Path]) -> None:
    assert (
        OpenVinoEngine(EngineSettings(threads=2)).child_environment([str(folders[0])])[
            "HF_HUB_OFFLINE"
        ]
        == "1"
    )
    assert "HF_HUB_OFFLINE" not in OpenVinoEngine(EngineSettings()).child_environment(
        ["someone/model"]
    )
    assert OpenVinoEngine(EngineSettings(threads=2)).child_environment([])["OMP_NUM_THREADS"] == "2"


# --------------------------------------------------------------------------------------------------
# the engine itself


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return find_python("openvino")
    except ArchsearchError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of random models whose logits are far apart, without end tokens that would come
    up."""
    root = tmp_path_factory.mktemp("models")
    shapes = {"target": TARGET, "draft": DRAFT, "trimmed": DRAFT.replace(draft_vocab_size=20)}
    for name, arch in shapes.items():
        model = build_draft(arch)
        model.generation_config.eos_token_id = model.config.eos_token_id = 1000
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(8.0)
        save_draft(model, root / name)
    return {name: root / name for name in shapes}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    patch = pytest.MonkeyPatch()
    patch.setattr(openvino_module, "cache_dir", lambda: folder)
    yield folder
    patch.undo()


def settings(python: Path, **fields: Any) -> EngineSettings:
    return EngineSettings(
        **{"dtype": "float32", "max_len": 256, "threads": 1, "python": python, **fields}
    )


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [1, 2])
@pytest.mark.parametrize("draft", ["draft", "trimmed"])
@pytest.mark.parametrize("gamma", [1, 4])
def test_greedy_answers_are_the_target_s_and_counts_add_up(
    python: Path, models: dict[str, Path], cache: Path, concurrency: int, draft: str, gamma: int
) -> None:
    engine = OpenVinoEngine(settings(python, concurrency=concurrency))
    assert isinstance(engine, Engine) and engine.name == "openvino" and engine.version
    sampling = Sampling(max_new_tokens=20)
    engine.start(models["target"], None, 0)
    alone = engine.generate(PROMPTS, sampling)
    engine.stop()
    engine.start(models["target"], models[draft], gamma)
    helped, steps = engine.generate(PROMPTS, sampling), engine.steps()
    engine.stop()
    assert [result.prompt_id for result in helped] == [prompt.prompt_id for prompt in PROMPTS]
    for base, result in zip(alone, helped, strict=True):
        assert base.token_ids == result.token_ids and len(result.token_ids) == 20
        assert (base.rounds, base.drafted, base.accepted) == (0, 0, 0)
        assert (
            result.rounds == len(result.round_lengths) > 0
            and result.drafted == gamma * result.rounds
        )
        assert len(result.accepted_by_position) == gamma
        assert result.accepted + result.rounds == sum(result.round_lengths)
        assert 0 < result.decode_seconds <= result.seconds and 0 < result.first_s <= result.seconds
        assert base.decode_tokens == 19 and len(base.gaps_s) == 19 and result.decode_tokens <= 18
    assert sum(step.written for step in steps) == 60
    assert max(step.batch for step in steps) == concurrency
    assert all(
        step.target_s is not None and 0 < step.target_s <= step.seconds
        for step in steps
        if not step.prefill
    )


@pytest.mark.slow
def test_the_target_as_draft_is_accepted_whole_and_steps_tell_every_pass(
    python: Path, models: dict[str, Path], cache: Path
) -> None:
    engine = OpenVinoEngine(settings(python))
    engine.start(models["target"], models["target"], 3)
    (result,) = engine.generate(PROMPTS[:1], Sampling(max_new_tokens=20, ignore_end=True))
    steps = engine.steps()
    engine.stop()
    assert set(result.round_lengths) == {4} and result.rejected == 0
    assert [step.written for step in steps] == [1, 4, 4, 4, 4, 3]
    assert [step.gamma for step in steps] == [0, 3, 3, 3, 3, 2]
    assert [len(step.draft_s) for step in steps] == [0, 3, 3, 3, 3, 2]
    assert [step.draft_tokens for step in steps] == [
        (),
        (4, 1, 1),
        (2, 1, 1),
        (2, 1, 1),
        (2, 1, 1),
        (2, 1),
    ]
    assert [step.prefill for step in steps] == [True, True, False, False, False, False]
    assert [step.context for step in steps] == [0.0, 4.0, 8.0, 12.0, 16.0, 20.0]
    assert [step.target_tokens for step in steps] == [3, 4, 4, 4, 4, 3]
    for step in steps[1:]:
        assert step.target_s is not None and step.other_s is not None and step.other_s > 0


@pytest.mark.slow
def test_a_text_ends_at_its_end_token_with_and_without_a_draft(
    python: Path, models: dict[str, Path], cache: Path
) -> None:
    whole = OpenVinoEngine(settings(python))
    whole.start(models["target"], None, 0)
    (text,) = whole.generate(PROMPTS[:1], Sampling(max_new_tokens=20))
    whole.stop()
    end = text.token_ids[9]
    expected = text.token_ids[: text.token_ids.index(end) + 1]
    file = models["target"] / "generation_config.json"
    before = file.read_text()
    file.write_text(json.dumps({"eos_token_id": end}))
    try:
        for concurrency in (1, 2):
            for draft, gamma in ((None, 0), (models["target"], 3)):
                engine = OpenVinoEngine(settings(python, concurrency=concurrency))
                engine.start(models["target"], draft, gamma)
                first, again = engine.generate(
                    [PROMPTS[0], EnginePrompt("q", PROMPTS[0].token_ids)], Sampling(20)
                )
                assert first.token_ids == again.token_ids == expected
                assert sum(step.written for step in engine.steps()) == 2 * len(expected)
                (ignored,) = engine.generate(PROMPTS[:1], Sampling(20, ignore_end=True))
                assert ignored.token_ids == text.token_ids
                engine.stop()
    finally:
        file.write_text(before)


@pytest.mark.slow
def test_sampling_repeats_with_its_seed_and_is_refused_with_a_draft(
    python: Path, models: dict[str, Path], cache: Path
) -> None:
    engine = OpenVinoEngine(settings(python))
    engine.start(models["target"], None, 0)
    first, again, other = (
        engine.generate(PROMPTS, Sampling(16, temperature=3.0, seed=seed)) for seed in (1, 1, 2)
    )
    assert (
        [r.token_ids for r in first] == [r.token_ids for r in again] != [r.token_ids for r in other]
    )
    with pytest.raises(ArchsearchError, match="max_len is 256"):
        engine.generate(PROMPTS, Sampling(300))
    engine.start(models["target"], models["draft"], 2)
    with pytest.raises(ArchsearchError, match="temperature 1 "):
        engine.generate(PROMPTS, Sampling(16, temperature=1.0))
    engine.stop()


@pytest.mark.slow
def test_token_logits_are_the_target_s(python: Path, models: dict[str, Path], cache: Path) -> None:
    from archsearch.models.drafts import load_draft

    ids = [3, 1, 4, 1, 5]
    with torch.no_grad():
        expected = load_draft(models["target"])(torch.tensor([ids])).logits[0, -1]
    engine = OpenVinoEngine(settings(python))
    engine.start(models["target"], None, 0)
    for _ in range(2):
        assert engine.token_logits(ids, [7, 2]) == pytest.approx(
            [float(expected[7]), float(expected[2])], abs=1e-3
        )
    engine.stop()


@pytest.mark.slow
def test_folders_are_converted_once_and_bad_ones_are_one_line(
    python: Path, models: dict[str, Path], cache: Path, tmp_path: Path
) -> None:
    engine = OpenVinoEngine(settings(python))
    engine.start(models["target"], None, 0)
    entries = {path: path.stat().st_mtime_ns for path in (cache / "openvino").iterdir()}
    engine.start(models["target"], None, 0)
    engine.stop()
    assert {path: path.stat().st_mtime_ns for path in (cache / "openvino").iterdir()} == entries
    config = json.loads((models["target"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArchsearchError, match="no weights in"):
        engine.start(tmp_path, None, 0)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(RunFailed, match="cannot convert") as caught:
        engine.start(tmp_path, None, 0)
    assert "\n" not in str(caught.value)
    assert not list((cache / "openvino").glob(".building.*"))
    dummy = OpenVinoEngine(settings(python, dummy_weights=True))
    dummy.start(tmp_path, None, 0)
    assert len(dummy.generate(PROMPTS[:1], Sampling(8, ignore_end=True))[0].token_ids) == 8
    dummy.stop()
