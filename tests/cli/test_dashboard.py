"""`archsearch dashboard` answers with the studies of a run; `report --open` opens the page."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import click
import pytest

from archsearch import files
from archsearch.acceptance.prior import PriorAcceptance
from archsearch.report import chart_files
from archsearch.search import study
from archsearch.search.objective import Scorer
from archsearch.workload import Workload
from tests.cli.commands import call, refused
from tests.report.test_report import SPACE, TARGET, Latency, make_run


def test_the_dashboard_shows_the_studies_of_a_run(tmp_path: Path) -> None:
    pytest.importorskip("optuna_dashboard", reason="the extra `dashboard` is not installed")
    run = make_run(tmp_path, trials=12)
    scorer = Scorer(TARGET, Workload(1, 256), Latency(), PriorAcceptance())
    study.search(SPACE, scorer, trials=6, storage=run.storage_file)
    command = [sys.executable, "-m", "archsearch.cli", "dashboard", str(run.path), "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            address = re.search(r"(http://127\.0\.0\.1:\d+)/dashboard/", process.stdout.readline())
            assert address is not None
            with urllib.request.urlopen(f"{address[1]}/api/studies", timeout=60) as answer:
                studies = json.load(answer)
            assert [
                row["study_name"].startswith("archsearch-") for row in studies["study_summaries"]
            ] == [True]
            with urllib.request.urlopen(f"{address[1]}/dashboard/", timeout=60) as answer:
                assert b"<html" in answer.read().lower()
        finally:
            process.terminate()


def test_what_cannot_be_shown_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, "unfinished")
    if importlib.util.find_spec("optuna_dashboard") is not None:
        assert "holds no journal.log; the search has not started" in refused(
            "dashboard", str(run.path)
        )
    monkeypatch.setitem(sys.modules, "optuna_dashboard", None)
    assert 'pip install "archsearch[dashboard]"' in refused("dashboard", str(run.path))
    refused("dashboard", str(tmp_path / "nothing"))


def test_report_open_opens_the_page_and_figures_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, trials=12)

    def named(path: Path, _figure: object) -> Path:  # pictures: tests/report/test_figures.py
        files.write_text(path, "")
        return path

    monkeypatch.setattr(chart_files, "write_picture", named)
    opened: list[str] = []
    monkeypatch.setattr(click, "launch", lambda address: opened.append(address) or 0)
    text = call("report", str(run.path), "--open", "--figures").stdout
    assert opened == [run.report_file.resolve().as_uri()] and "Figures and tables:" in text
    assert (run.path / "figures" / "trials.svg").is_file() and (
        run.path / "figures" / "table-the-best-candidates.csv"
    ).is_file()
    monkeypatch.setattr(click, "launch", lambda address: 1)
    assert "open file://" in call("report", str(run.path), "--open").stderr
