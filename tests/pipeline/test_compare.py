"""Runs side by side: what differs, and why another draft won, one condition at a time."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import yaml

from archsearch import pipeline
from archsearch.errors import ArchsearchError
from archsearch.pipeline.compare import _lead, _Opened, _scorer, compare_runs
from archsearch.pipeline.session import SearchSession
from archsearch.records import from_data
from archsearch.report.compare import TERMS, Comparison, compare_section
from archsearch.report.page import html_page
from archsearch.report.terminal.layout import section_text
from archsearch.workload import WorkloadRequest
from tests.cli.commands import call, last_json, refused

SPACE = {  # a part of wide-shallow
    "dimensions": {
        "num_hidden_layers": [1, 2, 8],
        "hidden_size": [1024, 4096],
        "ffn_ratio": [2.6875],
        "num_key_value_heads": [4, 8],
        "kv_group_size": [2, 4],
        "head_dim": [64, 128],
        "window_pattern": ["L"],
        "sliding_window": [1024],
        "draft_vocab_size": [8192, "target"],
        "tie_word_embeddings": [False],
    },
    "constraints": {"max_parameters": "0.5x"},
}


def run(folder: Path, **asked: object) -> Path:
    """A ranking of independent drafts; alpha is given, so that times alone decide."""
    space = folder.parent / "space.yaml"
    space.write_text(yaml.safe_dump(SPACE))
    target = str(asked.pop("target", "llama-3.1-8b"))
    alpha = str(asked.pop("alpha", "prior"))
    known = {"gpu": "h100", "engine": "vllm", "engine_version": "0.33.0", "mode": "graph", **asked}
    request = WorkloadRequest(**known)  # type: ignore[arg-type]
    pipeline.search(
        pipeline.SearchRequest(
            target,
            request,
            trials=12,
            run=folder,
            families=("independent",),
            space=str(space),
            alpha=alpha,
        )
    )
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("runs")
    one = run(base / "one")
    return {
        "one": one,
        "many": run(base / "many", batch_size=64, context_len=2048),
        "again": shutil.copytree(one, base / "again"),
        "other": run(base / "other", target="llama-65b", tensor_parallel=4),
    }


def test_terms_add_up_and_each_condition_is_swapped_alone(runs: dict[str, Path]) -> None:
    found = compare_runs([runs["one"], runs["many"]])
    assert set(found.differing) == {"batch size", "context"} and found.conditions["batch size"] == (
        "1",
        "64",
    )
    (pair,) = found.pairs
    assert not pair.same and pair.here is not None and pair.there is not None, pair.why
    # Rank 1 need not be the fastest: inside a group that cannot be told apart what exists leads.
    assert pair.here.total <= 0.1 and pair.there.total >= -0.1
    for lead in (pair.here, pair.there, *(swap.lead for swap in pair.swaps)):
        assert lead is not None and math.fsum(lead.terms.values()) == pytest.approx(
            lead.total, abs=1e-12
        )
        assert lead.total == pytest.approx(math.log(lead.second / lead.first))
        assert set(lead.terms) == set(TERMS) and lead.terms["decode_s"] == pytest.approx(
            0.0, abs=1e-12
        )
    assert [swap.factor for swap in pair.swaps] == ["batch size", "context"]
    assert pair.here.first == pytest.approx(found.winners[0].speedup)
    assert pair.there.second == pytest.approx(found.winners[1].speedup)
    assert "What changed most in its favour" in pair.words()


def test_a_condition_that_is_the_same_changes_nothing(runs: dict[str, Path]) -> None:
    """Training budgets count in swapped conditions too."""
    first, second = (_Opened.of(runs[name]) for name in ("one", "many"))
    assert first.session is not None
    again = _scorer(first.session, first.session.request, first.asked, first.run.path)
    assert _lead(again, first, second) == _lead(first.session.scorer, first, second)


def test_the_same_winner_another_target_and_what_is_no_run(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = compare_runs([runs["one"], runs["again"], runs["other"]])
    assert found.pairs[0].same and found.pairs[0].words().startswith("again has the same winner")
    assert found.pairs[1].why == "they draft for different targets"
    assert section_text(compare_section(found)).count("\n") > 8
    same = compare_runs([runs["one"], runs["again"]])
    text = section_text(compare_section(same))
    assert (
        "Nothing that was asked differs." in text
        and "what differs" not in text
        and " -," not in text
    )
    with pytest.raises(ArchsearchError, match="two runs or more"):
        compare_runs([runs["one"]])
    monkeypatch.setattr(SearchSession, "reopen", None)  # nothing is priced before
    with pytest.raises(ArchsearchError, match="does not exist"):
        compare_runs([runs["one"], tmp_path / "nowhere"])


def test_the_command_its_json_and_its_page(runs: dict[str, Path], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = call("compare", str(runs["one"]), str(runs["many"]), "--html", str(page), "--json")
    data = last_json(result)
    assert (
        data == json.loads(json.dumps(data))
        and data["pairs"][0]["swaps"][0]["factor"] == "batch size"
    )
    assert "one" in page.read_text() and "<table>" in page.read_text()
    text = call("compare", str(runs["one"]), str(runs["many"])).stdout
    assert (
        "what differs" in text and "batch size" in text and max(map(len, text.splitlines())) < 160
    )
    data["runs"][0] = data["pairs"][0]["first"] = "<script>alert(1)</script>"
    assert "<script>alert" not in html_page("x", [compare_section(from_data(Comparison, data))])
    assert "holds no other run; name one" in refused("compare", str(runs["one"]))


def test_a_comparison_is_a_section_of_the_report(runs: dict[str, Path]) -> None:
    """With its chart, also when the report is written again; a broken file costs its own part
    only."""
    call("compare", str(runs["one"]), str(runs["many"]), "--report")
    report = runs["one"] / "report.html"
    call("report", str(runs["one"]))
    text = report.read_text(encoding="utf-8")
    assert (
        "Runs side by side" in text
        and 'data-chart="compare-1"' in text
        and "what the engine adds" in text
    )
    data = json.loads((runs["one"] / "compare.json").read_text(encoding="utf-8"))
    data["pairs"][0]["here"]["terms"]["tau"] = float("nan")
    for broken in ({"runs": ["a"]}, data):
        (runs["one"] / "compare.json").write_text(json.dumps(broken))
        call("report", str(runs["one"]))
        text = report.read_text(encoding="utf-8")
        assert (
            "Files that could not be read" in text
            and "Runs side by side" not in text
            and "The best candidates" in text
        )
    (runs["one"] / "compare.json").unlink()
