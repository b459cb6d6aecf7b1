"""The figures: what curves.json holds is drawn, files can do no harm, and the same numbers are
written as SVG, PNG and CSV."""

from __future__ import annotations

import csv
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from archsearch.estimate import Estimate
from archsearch.needs import Needs
from archsearch.pipeline import curves as curves_of_runs
from archsearch.records import WRONG_SHAPE, from_data, save
from archsearch.report.best import section_best
from archsearch.report.chart_files import chart_csv, drawn, named_tables
from archsearch.report.chart_page import plotly_figure, scripts
from archsearch.report.charts import Chart, Series, depth_colour
from archsearch.report.learning import ladders
from archsearch.report.page import anchors, html_page, page_of, write_figures
from archsearch.report.phrases import search_command
from archsearch.report.plots import PlottedTrial, pareto_front
from archsearch.report.predicted import stops_words
from archsearch.report.reading import read_run
from archsearch.report.section import Cell, Section, Table, charts_of, text_cell
from archsearch.runs.state import ClimbState, RungRow
from archsearch.runs.tables import (
    BUDGETS_FILE,
    CURVES_FILE,
    Bar,
    BudgetDrafter,
    BudgetRow,
    Budgets,
    Curve,
    Curves,
    Point,
)
from archsearch.search.ranking import DecidingTerm, Rival
from tests.report.test_report import make_run

BAD = '</script><img src=x onerror="alert(1)"> & "quoted"'


def gain(value: float, std: float = 0.1) -> Estimate:
    return Estimate(value, std, "modelled")


def some_curves(label: str = "2x576 ffn1536") -> Curves:
    def curve(*pairs: tuple[float, float]) -> tuple[Curve, ...]:
        points = tuple(Point(x, 2, gain(value)) for x, value in pairs)
        return Curve(1, label, points), Curve(2, "other", points[:1])

    bar = Bar(
        f"draft of {label}",
        {"feed-forward": 0.002, "launches and the rest": 0.001},
        gain(0.003, 0.0),
    )
    rival = Rival("hidden_size", label, 2, 1.2, 0.05, -0.01, 0.04, (DecidingTerm("size", 0.2, 58),))
    sweeps = {
        "batch": curve((1, 1.6), (2, 1.4), (4, 0.8)),
        "context": curve((128, 1.6), (1024, 1.5)),
        "alpha": curve((0.1, 0.8), (0.5, 1.2), (0.9, 2.2)),
        "gamma": curve((1, 1.4), (2, 1.6), (3, 1.1), (4, 0.9)),
    }
    at = {"batch_size": 1, "context": 256, "gamma": 2}
    return Curves(
        "abc", at, sweeps, (bar,), (bar,), (bar,), (rival,), (f"Layers of {label}: as a whole.",)
    )


def test_curves_come_back_as_they_were_written(tmp_path: Path) -> None:
    run = make_run(tmp_path, trials=12)
    save(run.path / CURVES_FILE, some_curves())
    assert read_run(run).curves == some_curves()
    broken = json.loads((run.path / CURVES_FILE).read_text())
    for change in (
        {"format": 9},
        {"passes": [{"name": "x"}]},
        {"sweeps": {"batch": [{"rank": 1}]}},
        {"at": {"gamma": "two"}},
    ):
        with pytest.raises(WRONG_SHAPE):
            from_data(Curves, broken | change)
    (run.path / CURVES_FILE).write_text('{"format": 1}')
    page, _ = page_of(run)  # costs its own part only
    assert "Files that could not be read" in page and "The best candidates" in page


def test_where_speculation_stops_paying_and_why_it_won(tmp_path: Path) -> None:
    run = make_run(tmp_path, trials=12)
    save(run.path / CURVES_FILE, some_curves())
    page, sections = page_of(run)
    for words in (
        "batch size: it pays up to a batch of 3.",
        "context: it pays anywhere from 128 tokens to 1,024 tokens",
        "alpha: it pays from alpha 0.30 on.",
        "gamma: it pays up to gamma 3.",
        "Why this one won",
        "+5.1 %",
        "size +0.20 (58 rows)",
        "as a whole.",
    ):
        assert words in page, words
    assert [chart.key for chart in charts_of(sections)[:7]] == [
        "by-batch",
        "time-round",
        "time-passes",
        "time-layers",
        "by-context",
        "by-alpha",
        "by-gamma",
    ]


def bought(family: str, needs: Needs, speedup: float) -> BudgetDrafter:
    expected = Estimate(speedup, 0.2, "prior", speedup - 0.3, speedup + 0.4)
    return BudgetDrafter(family, f"{family} shape", needs, 4, gain(0.7), expected)


def test_what_a_budget_buys_is_the_first_picture(tmp_path: Path) -> None:
    run = make_run(tmp_path, trials=12)
    there = bought("eagle3", Needs("exists", hub_id="a/head"), 1.9)
    lookup = bought("ngram", Needs("nothing"), 1.2)
    trained = bought(
        "independent", Needs("training", tokens=4e8, text_hours=60.0, training_hours=40.0), 2.2
    )
    rows = (
        BudgetRow(0.0, (there, lookup)),
        BudgetRow(10.0, (there, lookup)),
        BudgetRow(100.0, (trained, there, lookup)),
    )
    save(run.path / BUDGETS_FILE, Budgets("h100", rows))
    save(run.path / CURVES_FILE, some_curves())
    page, sections = page_of(run)
    charts = charts_of(sections)
    assert [chart.key for chart in charts[:2]] == ["costs", "by-batch"]
    best, *marks = charts[0].series
    assert best.y == (1.9, 1.9, 2.2) and best.low == pytest.approx((1.6, 1.6, 1.9))
    shown = {series.name: (series.x, series.symbol) for series in marks}
    # One mark a drafter: zero stands at a tenth of the smallest budget.
    there_at = ((1.0,), "circle")
    assert shown == {
        "independent draft": ((100.0,), "ring"),
        "EAGLE-3 head": there_at,
        "n-gram lookup": there_at,
    }
    assert charts[0].ticks == (1.0, 10.0, 100.0) and charts[0].tick_names == ("0", "10", "100")
    assert "EAGLE-3 head: a/head" in page and "100 CPU-h, 400M" in page
    (run.path / "budgets.json").write_text('{"device": 1}')
    page, sections = page_of(run)
    assert "Files that could not be read" in page and charts_of(sections)[0].key == "by-batch"


def test_the_table_says_what_each_drafter_needs(tmp_path: Path) -> None:
    found = read_run(make_run(tmp_path, trials=12)).candidates
    kinds = (Needs("exists", hub_id="a/head"), Needs("training", tokens=4e8, training_hours=24.0))
    shown = [
        replace(item, score=replace(item.score, needs=needs))
        for item, needs in zip(found, kinds, strict=False)
    ]
    table = section_best(shown, "GPU").tables[0]
    assert [row[2:4] for row in table.rows] == [
        [text_cell("independent: a/head", "searched", wrap=True), text_cell("download")],
        [
            text_cell(f"independent: {shown[1].score.label()}", "searched", wrap=True),
            text_cell("24 GPU-h, 400M"),
        ],
    ]


def test_where_the_lower_edge_crosses_is_said_beside_where_the_value_does() -> None:
    rows = ((1, 1.8, 1.5), (2, 1.6, 1.2), (4, 1.4, 0.8))
    sure = [Point(x, 2, Estimate(y, 0.1, "modelled", low, y + 0.2)) for x, y, low in rows]
    assert (
        stops_words("batch", [Curve(1, "x", tuple(sure))])
        == "batch size: it pays anywhere from a batch of 1 to a batch of 4; not computed beyond."
        " The lower edge of its interval falls below 1x at a batch of 3."
    )
    doubtful = stops_words("batch", [Curve(1, "x", tuple(sure[2:]))])
    assert "Nowhere for sure" in doubtful


def test_every_section_has_an_anchor_and_a_link() -> None:
    sections = [Section(title, ["x"]) for title in ("A & B", "A & B", "C")]
    page, names = html_page("x", sections), ["part-a-b", "part-a-b-1", "part-c"]
    assert (
        re.findall(r'href="#([^"]+)"', page)
        == re.findall(r'<h2 id="([^"]+)"', page)
        == names
        == anchors(sections)
    )
    assert page.index("<nav") < page.index("<h2")


def test_a_section_without_content_is_shown_by_nobody() -> None:
    assert not Section("title", parts=[Section("part")]) and Section(parts=[Section(words=["x"])])
    assert "never" not in html_page("x", [Section("A", ["x"], parts=[Section("never")])])


def test_nothing_from_files_becomes_markup_or_script(tmp_path: Path) -> None:
    run = make_run(tmp_path, trials=12, target="smollm2-135m")
    save(run.path / CURVES_FILE, some_curves(BAD))
    run.info["arguments"]["target"] = BAD
    page, sections = page_of(run)
    assert "<img" not in page and page.count("</script>") == 3 and page.count("<script") == 3
    data = re.search(r'id="chart-data"[^>]*>(.*?)</script>', page, re.DOTALL)
    assert data is not None and set(json.loads(data[1])) == {
        chart.key for chart in charts_of(sections)
    }
    assert "<" not in data[1] and "&lt;img" in json.dumps(
        json.loads(data[1])
    )  # Plotly reads tags in its texts: none are left


def test_a_chart_draws_bands_bars_and_two_scales() -> None:
    line = Series("a<b>", (1.0, 2.0), (1.0, 3.0), low=(0.5, 2.0), high=(1.5, 4.0), band=True)
    bars = Series("bars", ("x, y", "z"), (1.0, math.nan), "bar")
    points = Series(
        "points", (1.0,), (2.0,), "points", low=(1.5,), high=(2.2,), right=True, notes=("here",)
    )
    chart = Chart(
        "k",
        "t",
        "c",
        "x",
        "y",
        (line, points),
        x_scale="log2",
        right_label="r",
        level=1.0,
        ticks=(1.0, 2048.0),
    )
    figure = plotly_figure(chart)
    assert [trace.get("fill") for trace in figure["data"]] == [None, "tonexty", None, None]
    assert figure["data"][2]["name"] == "a&lt;b&gt;" and figure["data"][3]["yaxis"] == "y2"
    assert figure["data"][3]["error_y"]["array"] == [pytest.approx(0.2)] and figure["layout"][
        "xaxis"
    ]["ticktext"] == ["1", "2k"]
    stacked = plotly_figure(Chart("k", "t", "c", "", "y", (bars,), stacked=True))
    assert stacked["data"][0]["x"] == ["x,<br>y", "z"] and stacked["data"][0]["y"] == [1.0, None]
    assert (
        scripts([], "n") == "" and depth_colour(0.0) == "#2f86b5" and depth_colour(1.0) == "#9a4fa0"
    )


def test_bars_stand_at_their_own_names() -> None:
    """Two engines alone, and the second one with a drafter too."""
    alone = Series("alone", ("a", "b"), (1.0, 2.0), kind="bar")
    drafted = Series("drafted", ("b",), (3.0,), kind="bar")
    (axes,) = drawn(Chart("k", "t", "", "x", "y", (alone, drafted))).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "b"]
    *_, bar = axes.patches
    assert bar.get_height() == 3.0 and round(bar.get_x() + bar.get_width() / 2) == 1


def test_pictures_and_tables_as_files(tmp_path: Path) -> None:
    run = make_run(tmp_path, "confirmed", trials=20)
    save(run.path / CURVES_FILE, some_curves("=cmd|' /C calc'!A0"))
    written = write_figures(run)
    names = {path.name for path in written}
    for key in ("by-batch", "time-passes", "trials", "ladder", "positions"):
        assert {f"{key}.svg", f"{key}.png", f"{key}.csv"} <= names
        with Image.open(run.path / "figures" / f"{key}.png") as picture:
            assert picture.size[0] > 600
        assert (run.path / "figures" / f"{key}.svg").read_text().lstrip().startswith("<?xml")
    rows = list(csv.reader((run.path / "figures" / "by-batch.csv").read_text().splitlines()))
    assert (
        rows[1][0].startswith("rank 1: =cmd")
        and rows[1][1:3] == ["1", "1.6"]
        and [float(cell) for cell in rows[1][3:5]] == [1.5, 1.7]
    )
    bars = (run.path / "figures" / "table-why-this-one-won.csv").read_text()
    assert "\n'=cmd" in bars  # a spreadsheet would run it
    best = list(
        csv.reader(
            (run.path / "figures" / "table-the-best-candidates.csv").read_text().splitlines()
        )
    )
    assert (
        best[0][:2] == ["#", "speed-up, 5 to 95 %"]
        and len(best[0]) <= 7
        and best[1][0] == "1"
        and len(best) <= 1 + 8
    )
    every = list(
        csv.reader(
            (run.path / "figures" / "table-the-best-candidates-2.csv").read_text().splitlines()
        )
    )
    assert every[0][0] == "rank" and every[1][0] == "1" and len(every) == 1 + len(run.ranks())


def test_tables_are_named_by_their_heading() -> None:
    first, second = Table(("x",), []), Table(("x",), [[Cell("1", "one")]])
    folded = Section("the same", tables=[first], folded=True)
    sections = [
        Section("A & B", tables=[first, second], parts=[folded, Section("Part", tables=[second])])
    ]
    assert [name for name, _ in named_tables(sections)] == ["a-b", "a-b-2", "a-b-3", "part"]
    assert (
        chart_csv(Chart("k", "t", "c", "x", "y", (Series("+1 up", (1.0,), (-2.0,)),))).splitlines()[
            1
        ]
        == "+1 up,1,-2,,,"
    )


def test_the_pareto_front_holds_what_nothing_smaller_beats() -> None:
    def trial(parameters: int, speedup: float, feasible: bool = True) -> PlottedTrial:
        return PlottedTrial(1, 64, parameters, 0.001, speedup, feasible, "independent", "x")

    trials = [
        trial(30, 1.4),
        trial(10, 1.2),
        trial(20, 1.1),
        trial(5, 1.5, False),
        trial(40, 1.3),
        trial(10, 1.25),
    ]
    assert [(t.parameters, t.speedup) for t in pareto_front(trials)] == [(10, 1.25), (30, 1.4)]


def test_ladders_climb_from_prior_to_confirmed(tmp_path: Path) -> None:
    run = make_run(tmp_path, "confirmed", trials=20)
    label = run.score(1).label()
    record = RungRow(
        rung=1,
        round=1,
        shape=run.score(1).architecture,
        label=label,
        gamma=2,
        tokens=100,
        seconds=1.0,
        measured=None,
        alpha=gain(0.6),
        tau=gain(2.0),
        score=gain(1.3),
        state="kept",
        why="",
    )
    climb = ClimbState(60.0, rungs=[replace(record, rung=0, score=gain(1.9)), record])
    found = ladders(replace(read_run(run), climb=climb), [])
    assert {name: value.value for name, value in found[label].items()} == {
        "prior": 1.9,
        "short training 1": 1.3,
        "full training": run.score(1).speedup.value,
        "confirmed": 1.47,
    }


def test_the_command_that_makes_a_run_again() -> None:
    arguments = {
        "target": "my model",
        "gpu": "cpu",
        "trials": 300,
        "confirm": 1,
        "time_budget_s": 2700.0,
        "families": "eagle3 ngram",
        "storage": None,
        "context": 512,
        "domain": "chat",
        "max_gamma": 16,
        "engine": "vllm",
    }
    assert (
        search_command(arguments)
        == "archsearch search --target 'my model' --gpu cpu --context 512 --engine vllm"
        " --confirm 1 --time-budget 2700s --family eagle3 --family ngram"
    )


def test_a_run_that_cannot_be_reopened_says_why(tmp_path: Path) -> None:
    run = make_run(
        tmp_path, trials=12
    )  # of a device that is not this one, with a profile that is not here
    curves_of_runs.renew_curves(run)
    reading = read_run(run)
    assert reading.curves is not None and "Speed-up along batch" in reading.curves.notes[0]
    assert "cpu-epyc-9b14-2t" in reading.curves.notes[0] or "profile" in reading.curves.notes[0]
    page, _ = page_of(run)
    assert "Missing. Speed-up along batch" in page and "nothing was confirmed" in page
