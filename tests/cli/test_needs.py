"""What drafters need, as `search` and `estimate` say it: what exists competes, what trains has its
price."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from archsearch.report.reading import read_run
from archsearch.runs.run import open_run
from tests.cli.commands import call, last_json, refused

SEARCH = ("search", "--target", "llama-65b", "--gpu", "a100", "--trials", "12", "--json")
SEARCH += ("--family", "independent", "--family", "eagle3", "--family", "ngram")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("needs") / "run"


@pytest.fixture(scope="module")
def known(run: Path) -> dict[str, Any]:
    return last_json(call(*SEARCH, "--run", str(run)))


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_papers_drafts_are_in_the_table_of_llama_65b(known: dict[str, Any]) -> None:
    best = known["best"]
    found = {score["needs"]["hub_id"] for score in best if score["needs"]["kind"] == "exists"}
    assert {f"minghaoyan/Wide-Sheared-LLaMA-{size}" for size in ("796M", "543M", "1.3B")} <= found
    assert all(score["needs"]["kind"] in ("exists", "nothing", "training") for score in best)
    for score in best:
        needs = score["needs"]
        if needs["kind"] == "training":
            parts = [needs[name] for name in ("text_hours", "teacher_hours", "training_hours")]
            assert needs["gpu_hours"] == pytest.approx(sum(parts)) and min(parts) > 0
            assert needs["gpu_hours"] <= 24.001 and needs["tokens"] > 0


def test_what_exists_leads_the_group_of_the_best(searched: Path) -> None:
    result = json.loads((searched / "result.json").read_text())
    first = result["indistinguishable"][0]
    kinds = {score["rank"]: score["needs"]["kind"] for score in result["best"]}
    assert first[0] == 1 and len(first) > 1
    assert kinds[1] == "exists" and "training" in {kinds[rank] for rank in first}
    for score in result["best"]:  # an engine loads what exists from the hub, not an empty folder
        folder = searched / "runs" / "gpu" / "best" / str(score["rank"])
        served = json.loads((folder / "speculative_config.json").read_text())
        if score["needs"]["kind"] == "exists":
            assert served["model"] == score["needs"]["hub_id"]
        elif score["needs"]["kind"] == "training":
            assert served["model"].endswith(f"runs/gpu/best/{score['rank']}")


def test_the_table_ties_what_json_ties(tmp_path: Path) -> None:
    """Published heads were asked for as they were made, so their errors are their own."""
    asked = ("search", "--target", "gpt-oss-20b", "--gpu", "h100", "--family", "eagle3")
    result = last_json(call(*asked, "--trials", "12", "--json", "--run", str(tmp_path / "run")))
    ties: dict[int, list[int]] = {}
    for option in read_run(open_run(tmp_path / "run")).candidates:
        ties.setdefault(option.group, []).append(option.rank)
    told = [sorted(group) for group in result["indistinguishable"]]
    assert [sorted(ranks) for _, ranks in sorted(ties.items())] == told


def test_budgets_begin_with_what_exists_and_buy_no_less_for_more(
    known: dict[str, Any],
) -> None:
    rows = known["budgets"]["rows"]
    assert [row["gpu_hours"] for row in rows] == [0, 1, 10, 100, 1000]
    assert {drafter["needs"]["kind"] for drafter in rows[0]["drafters"]} <= {"exists", "nothing"}
    for row in rows:
        assert all(
            drafter["needs"].get("gpu_hours", 0.0) <= 1.001 * row["gpu_hours"]
            for drafter in row["drafters"]
        )
    for family in {drafter["family"] for drafter in rows[1]["drafters"]}:
        of = [
            max(d["speedup"]["value"] for d in row["drafters"] if d["family"] == family)
            for row in rows[1:]
        ]
        assert all(later >= 0.999 * earlier for earlier, later in zip(of, of[1:], strict=False)), (
            family
        )


def test_the_file_holds_what_json_says(known: dict[str, Any], run: Path) -> None:
    assert json.loads((run / "budgets.json").read_text()) == known["budgets"]


def test_a_budget_is_what_training_assumes(known: dict[str, Any]) -> None:
    asked = ("--family", "eagle3", "--training-budget", "3h")
    small = last_json(call(*SEARCH[: SEARCH.index("--family")], *asked))
    assert small["training_budget"]["gpu_hours"] == 3.0 and small["training_budget"]["asked"]
    trained = [score["needs"] for score in small["best"] if score["needs"]["kind"] == "training"]
    assert trained and all(needs["gpu_hours"] <= 3.001 for needs in trained)
    assert not known["training_budget"]["asked"]


def test_estimate_says_what_each_draft_needs() -> None:
    drafts = ("eagle3", "llama-3.2-1b", "ngram", "medusa", "meta-llama/Llama-3.2-3B-Instruct")
    asked = [part for draft in drafts for part in ("--draft", draft)]
    target = "meta-llama/Llama-3.1-8B-Instruct"
    result = last_json(
        call(
            "estimate",
            "--target",
            target,
            *asked,
            "--gpu",
            "h100",
            "--max-training",
            "5h",
            "--json",
        )
    )
    assert result["target"] == "llama-3.1-8b"
    needs = {row["draft"]: row["needs"] for row in result["drafts"]}
    assert needs["eagle3"] == {"kind": "exists", "hub_id": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"}
    assert needs["llama-3.2-1b"]["hub_id"] == "meta-llama/Llama-3.2-1B-Instruct"
    assert needs["meta-llama/Llama-3.2-3B-Instruct"]["kind"] == "exists" and needs["ngram"] == {
        "kind": "nothing"
    }
    assert needs["medusa"]["kind"] == "training" and needs["medusa"]["gpu_hours"] == pytest.approx(
        5.0
    )


@pytest.mark.parametrize("budget", ["0", "0h", "-3h", "nan", "24", "soon", "1e400h"])
def test_a_budget_that_is_none_is_refused_in_one_line(budget: str) -> None:
    for command in (
        tuple(word for word in SEARCH if word != "--json"),
        ("estimate", "--target", "llama-65b", "--draft", "wide-796m", "--gpu", "a100"),
    ):
        line = refused(*command, f"--training-budget={budget}")
        assert "is no training budget" in line and "24h" in line
    assert not Path("runs").exists()


def test_a_rank_that_exists_is_not_trained(known: dict[str, Any], run: Path) -> None:
    line = refused("train", str(run), "--rank", "1", "--budget", "1m")
    assert "exists" in line and "download" in line


def test_a_head_for_another_target_is_refused_without_a_network() -> None:
    head = "eagle3:yuhuili/EAGLE3-LLaMA3.3-Instruct-70B"
    line = refused("estimate", "--target", "llama-3.1-8b", "--draft", head, "--gpu", "h100")
    assert "was made for llama-3.3-70b, not for llama-3.1-8b" in line
