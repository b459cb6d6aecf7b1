"""`search` over all families of drafters: which compete, what is written of each, what is not done
yet in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from archsearch.models.targets import resolve_drafter, resolve_target
from archsearch.report.phrases import shell_path
from archsearch.search.objective import Score
from tests.cli.commands import GPU_SEARCH, call, last_json, refused


@pytest.fixture
def found(searched: Path, tmp_path: Path) -> tuple[dict, Path]:
    """The answer of the search and a copy of its run."""
    shutil.copytree(searched, tmp_path, dirs_exist_ok=True)
    return json.loads((searched / "result.json").read_text()), tmp_path / "runs/gpu"


def rank_of(result: dict, family: str) -> int:
    return next(item["rank"] for item in result["families"] if item["family"] == family)


def test_all_families_that_the_engine_runs_compete(found: tuple[dict, Path]) -> None:
    """vLLM's, less what the target cannot have (Llama has no MTP layer); the two best, and the best
    of each family."""
    result, run = found
    families = {item["family"] for item in result["families"]}
    assert families == {
        "independent",
        "eagle3",
        "eagle",
        "medusa",
        "ngram",
        "suffix",
        "peagle",
        "pard",
        "dflash",
    }
    # what is assumed of a family ranks it by the lower end of its interval inside a group that
    # cannot be told apart what takes least to have leads (tests/search/test_ranking.py)
    gains = [score["speedup"]["low" if score["assumed"] else "value"] for score in result["best"]]
    assert result["best"][0]["needs"]["kind"] == "exists" and gains[0] > gains[-1]
    assert [score["rank"] for score in result["best"]] == list(range(1, len(gains) + 1))
    assert sum(len(group) for group in result["indistinguishable"]) == len(gains)
    for item in result["families"]:
        folder = run / "best" / str(item["rank"])
        score = Score.from_dict(json.loads((folder / "score.json").read_text()))
        assert score.family == item["family"]
        assert (
            json.loads((folder / "speculative_config.json").read_text())["num_speculative_tokens"]
            == score.gamma
        )
    text = (run / "report.html").read_text(encoding="utf-8")
    assert "EAGLE-3 head:" in text and "n-gram lookup:" in text
    assert "pard" in (run / "trials.csv").read_text(encoding="utf-8")


@pytest.mark.usefixtures("whole_curves")
def test_every_family_is_drawn_as_far_as_memory_holds_it(found: tuple[dict, Path]) -> None:
    _, run = found
    (run / "curves.json").unlink()
    call("report", str(run))
    drawn = json.loads((run / "curves.json").read_text())
    assert not any(note.startswith("Speed-up along") for note in drawn["notes"]), drawn["notes"]
    for axis, sweep in drawn["sweeps"].items():
        assert len({curve["rank"] for curve in sweep}) == len(sweep) == 6, axis
    for batch, context, alpha in zip(
        *(drawn["sweeps"][axis] for axis in ("batch", "context", "alpha")), strict=True
    ):
        sizes = [point["x"] for point in batch["points"]]
        assert sizes[:4] == [1, 2, 4, 8] and sizes[-1] >= 64
        usual = [128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768]  # and the run's own
        assert [point["x"] for point in context["points"]] == usual
        assert [point["x"] for point in alpha["points"]] == [
            pytest.approx(0.05 * step) for step in range(1, 20)
        ]


def test_a_head_that_was_found_reads_back_from_its_config(found: tuple[dict, Path]) -> None:
    result, run = found
    target = resolve_target("llama-3.1-8b")
    for family in ("eagle3", "dflash", "medusa"):
        folder = run / "best" / str(rank_of(result, family))
        score = Score.from_dict(json.loads((folder / "score.json").read_text()))
        found = resolve_drafter(str(folder), target).drafter
        assert found.family == family and found.parameters() == score.parameters
    config = json.loads((run / "best" / str(rank_of(result, "eagle3")) / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 16, 29]


def test_what_is_not_done_by_rank_is_one_line_that_names_the_command(
    found: tuple[dict, Path], tmp_path: Path
) -> None:
    result, run = found
    ngram, medusa = (str(rank_of(result, name)) for name in ("ngram", "medusa"))
    made = [
        score
        for score in result["best"]
        if score["family"] == "eagle3" and score["needs"]["kind"] == "training"
    ]
    eagle3 = str(made[0]["rank"])
    for arguments in (("train", str(run)), ("export", str(run), "--output", str(tmp_path / "out"))):
        assert (
            "is done for independent drafts, EAGLE-3, P-EAGLE and Medusa heads only; rank"
            in refused(*arguments, "--rank", ngram)
        )
    assert f"archsearch confirm {shell_path(run)} --family ngram" in refused(
        "confirm", str(run), "--rank", ngram
    )
    assert f"archsearch train {shell_path(run)} --family eagle3 --gamma " in refused(
        "train", str(run), "--rank", eagle3
    )
    # it has no weights yet
    assert f"archsearch train {shell_path(run)} --family medusa --gamma 2" in refused(
        "export", str(run), "--output", "x", "--rank", medusa
    )
    assert "takes one gamma for medusa drafters" in refused("schedule", str(run), "--rank", medusa)
    assert "does not run medusa" in refused(
        "schedule", str(run), "--rank", medusa, "--engine", "sglang"
    )


def test_a_schedule_for_a_family_that_has_one(found: tuple[dict, Path]) -> None:
    result, run = found
    rank = rank_of(result, "ngram")
    text = call(
        "schedule", str(run), "--rank", str(rank), "--batch-size", "1", "--batch-size", "64"
    ).stdout
    assert "n-gram lookup" in text
    config = json.loads((run / "best" / str(rank) / "speculative_config.json").read_text())
    assert (
        config["method"] == "ngram" and "model" not in config and config["prompt_lookup_max"] == 5
    )


def test_families_that_are_named_compete_alone(tmp_path: Path) -> None:
    asked = (
        *GPU_SEARCH,
        "--run",
        str(tmp_path / "run"),
        "--family",
        "ngram",
        "--family",
        "eagle-1",
        "--json",
    )
    result = last_json(call(*asked))
    assert {item["family"] for item in result["families"]} == {"ngram", "eagle"} and result[
        "space"
    ] == "ngram, eagle"
    again = last_json(call(*asked))
    assert [score["speedup"] for score in again["best"]] == [
        score["speedup"] for score in result["best"]
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--family", "egale"), "unknown family of drafters 'egale'"),
        (
            ("--family", "medusa", "--engine", "sglang"),
            "SGLang does not run medusa drafters; use vLLM",
        ),
        (
            ("--family", "mtp"),
            "llama-3.1-8b cannot be served with mtp: its checkpoint (llama) holds no MTP layer",
        ),
        (
            ("--family", "pard", "--confirm", "1"),
            "a search trains independent drafts and eagle3, medusa, peagle heads, not pard",
        ),
        (("--family", "eagle3", "--confirm", "1"), "add --family independent"),
        (("--family", "peagle", "--engine-version", "0.15.0"), "not known to run peagle"),
    ],
)
def test_families_that_cannot_be_are_one_line(
    arguments: tuple[str, ...], words: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("archsearch.pipeline.session.check_weights", lambda target: None)
    monkeypatch.setattr("archsearch.pipeline.session.find_python", lambda name: None)
    assert words in refused(*GPU_SEARCH, "--run", str(tmp_path / "run"), *arguments)


def test_a_space_of_a_family_searches_that_family(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(
        "family: medusa\ndrafter: {heads: [2, 3]}\n", encoding="utf-8"
    )
    result = last_json(
        call(
            *GPU_SEARCH,
            "--run",
            str(tmp_path / "run"),
            "--space",
            str(tmp_path / "small.yaml"),
            "--json",
        )
    )
    assert [item["family"] for item in result["families"]] == ["medusa"]
    (tmp_path / "wrong.yaml").write_text(
        "family: medusa\ndrafter: {states: [2]}\n", encoding="utf-8"
    )
    line = refused(
        *GPU_SEARCH, "--run", str(tmp_path / "other"), "--space", str(tmp_path / "wrong.yaml")
    )
    assert "wrong.yaml: unknown choice of the family medusa: 'states'; allowed are heads" in line


def test_a_schedule_has_only_gammas_that_the_engine_drafts(tmp_path: Path) -> None:
    """llama.cpp's newest n-gram drafts no fewer tokens than it has: gamma 1 was asked for all the
    same."""
    asked = ("--target", "llama-3.1-8b", "--gpu", "h100", "--engine", "llama.cpp")
    call("search", *asked, "--family", "ngram", "--run", str(tmp_path / "a"))
    points = last_json(call("schedule", str(tmp_path / "a"), "--json"))["points"]
    assert points and min(int(gamma) for gamma in points[0]["by_gamma"]) == 2
