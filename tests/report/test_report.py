"""The report says what the run folder holds, in every state a run can be in, and nothing else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archsearch import report
from archsearch.acceptance.measured import Trace
from archsearch.acceptance.prior import PriorAcceptance
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import weight_bytes_per_pass
from archsearch.estimate import Estimate
from archsearch.files import write_json
from archsearch.latency.draft_passes import LatencyOfRounds
from archsearch.records import save
from archsearch.report.headline import headline
from archsearch.report.reading import groups, read_run
from archsearch.runs.run import Run, create_run, list_runs, open_run
from archsearch.runs.state import ClimbState, Look, RungRow
from archsearch.search import study
from archsearch.search.objective import Scorer
from archsearch.search.space import SearchSpace
from archsearch.speedup import speedup_estimate, tau_estimate, tpot_estimate
from archsearch.workload import Workload

TARGET = Architecture(576, 1536, 30, 9, 3, 64, 49152, tie_word_embeddings=True)
SPACE = SearchSpace.from_dict(
    {
        "dimensions": {
            "num_hidden_layers": {"min": 1, "max": 5},
            "hidden_size": [256, 384, 576, 768],
            "ffn_ratio": [1, "target", 4],
            "num_key_value_heads": [1, 3],
            "kv_group_size": [1, 3],
            "draft_vocab_size": [4096, 8192, "target"],
        }
    },
    "small",
)


class Latency(LatencyOfRounds):
    """25 GB/s and a constant per layer; what the engine adds is measured."""

    def _pass(self, arch: Architecture, tokens: int) -> float:
        return (
            weight_bytes_per_pass(arch, 2) / 25e9
            + arch.num_hidden_layers * 0.6e-3
            + 1.2e-3 * (tokens > 1)
        )

    def decode_s(self, target, workload):
        return Estimate(self._pass(target, 1), 0.001, "modelled")

    def verify_s(self, target, workload, gamma):
        return Estimate(self._pass(target, gamma + 1), 0.0012, "modelled")

    def draft_s(self, draft, workload, gamma):
        return Estimate(
            gamma * self._pass(draft, 1), 0.05 * gamma * self._pass(draft, 1), "modelled"
        )

    def added_s(self, target, workload, gamma):
        return Estimate(0.002 + 0.0004 * gamma, 0.0002, "measured")


@cache
def searched(trials: int) -> study.SearchResult:
    """What all runs rank."""
    scorer = Scorer(TARGET, Workload(1, 256), Latency(), PriorAcceptance())
    return study.search(SPACE, scorer, trials=trials)


def make_run(
    base: Path,
    state: str = "searched",
    *,
    trials: int = 60,
    keep: int = 5,
    target: str = "smollm2-135m",
) -> Run:
    """A run folder in one of the states unfinished, searched, trained, confirmed, retrained."""
    arguments = {
        "target": target,
        "gpu": "cpu",
        "space": "demo",
        "trials": 300,
        "context": 256,
        "domain": "narrow",
        "seed": 0,
    }
    device = {
        "key": "cpu-epyc-9b14-2t",
        "name": "AMD EPYC 9B14",
        "threads": 2,
        "memory_bytes": 8 << 30,
    }
    profile = {
        "folder": "profiles/cpu-epyc-9b14-2t/torch-2.13.0-transformers-5.23.0",
        "hash": "0123456789abcdef",
    }
    run = create_run(base, arguments, space=SPACE.to_dict(), device=device, profile=profile)
    if state == "unfinished":
        return run
    result = searched(trials)
    run.write_trials(result.trials)
    for score in result.best[:keep]:
        run.write_best(score, {"model_type": "llama"})
    if state != "searched":
        train(run)
    if state in ("confirmed", "retrained"):
        confirm(run)
    if state == "retrained":
        score = run.score(1)
        run.write_best(replace(score, alpha=Estimate(0.66, 0.012, "measured")))
    return run


def train(run: Run) -> None:
    """What training leaves at ranks 1 and 2: weights, a trace, a record, a score with a measured
    alpha."""
    rng = np.random.default_rng(0)
    for rank, alpha in ((1, 0.62), (2, 0.58)):
        before, measured = run.score(rank), Estimate(alpha, 0.014, "measured")
        tau = replace(tau_estimate(measured, before.gamma), source="measured")
        gain = speedup_estimate(tau, before.decode_s, before.round_s)
        tpot = tpot_estimate(tau, before.round_s)
        folder = run.write_best(replace(before, alpha=measured, tau=tau, speedup=gain, tpot_s=tpot))
        (folder / "model.safetensors").write_bytes(b"weights")
        texts = tuple(rng.random(80) < alpha for _ in range(40))
        Trace(texts, ("sums",) * 40, tuple(map(str, range(40)))).save(folder / "trace.npz")
        curve = [[30.0 * i, alpha * (1 - 0.75 * 0.7**i)] for i in range(1, 11)]
        record = {
            "architecture": before.architecture.to_dict(),
            "seconds": 300.0,
            "alpha_curve": curve,
        }
        write_json(folder / "training.json", record)


def keep(run: Run, rank: int, data: Any) -> None:
    """confirmed.json as anybody may have written it."""
    (run.best_dir(rank) / "confirmed.json").write_text(json.dumps(data))


def kept(run: Run) -> dict[str, Any]:
    return json.loads((run.best_dir(1) / "confirmed.json").read_text())


def confirm(run: Run, rank: int = 1, speedup: float = 1.47) -> None:
    score = run.score(rank)
    overhead = Latency().added_s(TARGET, Workload(), score.gamma)
    row = {
        "engine": "transformers",
        "engine_version": "5.23.0",
        "prompts": 24,
        "gamma": score.gamma,
        "tokens": 1980,
        "rounds": 930,
        "alpha": Estimate(0.605, 0.02, "measured").to_dict(),
        "accepted_by_position": [0.61 * 0.66**i for i in range(score.gamma)],
        "tau": Estimate(score.tau.value * 0.99, 0.05, "measured").to_dict(),
        "baseline_tokens_per_s": 40.1,
        "tokens_per_s": 59.0,
        "speedup": Estimate(speedup, 0.04, "measured").to_dict(),
        "speedup_interval": [speedup - 0.07, speedup + 0.06],
        "speedup_pooled": speedup - 0.01,
        "speedup_end_to_end": speedup - 0.09,
        "decode_s": 0.02485,
        "round_s": 1.03 * (score.draft_s.value + score.verify_s.value + overhead.value),
        "identical_output": {
            "prompts": 24,
            "identical": 23,
            "differences": [
                {
                    "prompt_id": "maths-<17>",
                    "position": 41,
                    "alone_token": 284,
                    "draft_token": 732,
                    "alone_logit": 18.25,
                    "draft_logit": 18.125,
                    "logit_gap": 0.125,
                }
            ],
        },
        "identical_output_float32": {"prompts": 4, "identical": 4},
        "categories": {
            "sums": {"prompts": 12, "alpha": 0.64, "tau": 2.3, "speedup": 1.55},
            "money": {"prompts": 12, "alpha": 0.57, "tau": 2.0, "speedup": 1.39},
        },
        "per_prompt_speedup": [1.4, 1.5],
        "predicted_speedup": score.speedup.value,
        "relative_error": score.speedup.value / speedup - 1,
        "predicted": score.to_dict(),
        "predicted_at_measured_tau": 1.5,
        "relative_error_at_measured_tau": 1.5 / speedup - 1,
        "predicted_round_s": score.draft_s.value + score.verify_s.value + overhead.value,
        "overhead_s": overhead.to_dict(),
        "context": 140,
        "dtype": "bfloat16",
        "rank": rank,
        "architecture": score.architecture.label(),
    }
    other = {
        **row,
        "gamma": score.gamma + 1,
        "speedup": Estimate(speedup - 0.1, 0.04, "measured").to_dict(),
    }
    keep(run, rank, {**row, "other_gammas": [other]})


class Page(HTMLParser):
    """What a browser would do: nesting checked, ids and text collected."""

    VOID = frozenset({"meta", "br", "img", "link"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.refs: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.charts = 0
        self.text, self.spaced = "", ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        self._attributes(attributes)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self._attributes(attributes)

    def _attributes(self, attributes):
        self.attributes += [name for name, _ in attributes]
        self.charts += any(name == "data-chart" for name, _ in attributes)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("href", "src"):
                self.refs.append(value)
            self.refs += re.findall(r"url\(([^)]+)\)", value or "")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            return
        self.text += data
        self.spaced += f" {data}"


def page_of(run: Run) -> Page:
    path = report.write_html(run)
    assert path == run.report_file
    return Page(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("state", ["unfinished", "searched", "trained", "confirmed", "retrained"])
def test_the_page_stands_alone_in_every_state(tmp_path, state):
    run = make_run(tmp_path, state)
    page = page_of(run)
    text = run.report_file.read_text(encoding="utf-8")
    # The figures are drawn by the page's own scripts, which a browser is told to run and nothing
    # else; nothing is fetched.
    assert (
        "link" not in page.tags
        and "http" not in page.text
        and not {"src", "srcset"} & set(page.attributes)
    )
    policy = re.search(
        r"default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-(\w+)'; img-src data:"
        r" blob:",
        text,
    )
    assert policy is not None and text.count(f'nonce="{policy[1]}"') == page.tags.count("script")
    assert len(page.ids) == len(set(page.ids)) and all(
        ref.startswith("#") and ref[1:] in page.ids for ref in page.refs
    )
    assert "nan" not in page.text.lower().split()
    assert run.path.name in page.text and "0123456789abcdef" in page.text
    pictures = {"unfinished": 0, "searched": 2, "trained": 5, "confirmed": 6, "retrained": 6}[
        state
    ]  # with the ladder
    assert page.charts == pictures and page.tags.count("script") == (3 if pictures else 0)
    assert not [p for p in run.path.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize(
    ("state", "title", "words", "command"),
    [
        (
            "unfinished",
            "has not finished",
            "Nothing is ranked yet",
            "archsearch search --target smollm2-135m --gpu cpu --domain narrow --space demo --run ",
        ),
        ("searched", "x predicted", "Not confirmed: no draft has weights", "archsearch train"),
        ("trained", "x predicted", "no engine has run it", "archsearch confirm"),
        (
            "confirmed",
            (
                "Speculation pays for smollm2-135m on cpu-epyc-9b14-2t: 1.47x, measured (pooled"
                " 1.46x)."
            ),
            "23 of 24 answers identical in bfloat16",
            "archsearch export",
        ),
        (
            "retrained",
            "x predicted",
            "trained further after its confirmation",
            "archsearch confirm",
        ),
    ],
)
def test_headline_and_next_step(tmp_path, state, title, words, command):
    run = make_run(tmp_path, state)
    text = report.summary_text(run)
    assert title in text.splitlines()[0] and words in " ".join(text.split())
    todo = text[text.index("Next:") :]
    assert command in todo.splitlines()[2] and str(run.path.relative_to(tmp_path)) in todo
    assert all(len(line) <= 100 for line in text[: text.index("Next:")].splitlines())
    page = page_of(run)
    assert title in page.text and words in page.text and command in page.text


def test_numbers_and_sources_on_the_page_are_those_of_the_files(tmp_path):
    run = make_run(tmp_path, "confirmed")
    page = page_of(run)
    score = run.score(1)
    for text in (
        score.architecture.label(),
        f"{score.speedup.value:.2f}x ± {score.speedup.std:.2f}",
        "1.47x ± 0.04",
        "0.605 ± 0.020",
        f"{score.speedup.value / 1.47 - 1:+.1%}",
        f"{1e3 * 0.02485:.2f}",
        "40.1, 59.0",
        "maths-<17>",
        "modelled",
        "prior",
        "measured",
        "between 1.40x and 1.53x",
    ):
        assert text in page.text, text
    assert re.search(
        r"\d+\.\d\d\s*measured\s*-2\.9%", page.text
    )  # the round was measured 1.03 times as long as predicted
    # bfloat16 numbers between 16 and 32 lie 2^(4 - 7) = 0.125 apart: the gap of 0.125 is one step.
    assert re.search(r"\+0\.1250\s*1\.0", page.text)
    assert "<17>" not in run.report_file.read_text(encoding="utf-8").partition("<script")[0]


def test_a_climb_is_shown_round_by_round(tmp_path):
    run = make_run(tmp_path, "trained")
    assert "The climb" not in page_of(run).text
    alpha, tau, score = (Estimate(value, 0.03, "modelled") for value in (0.713, 2.0, 1.93))
    record = RungRow(
        rung=1,
        round=1,
        shape=run.score(1).architecture,
        label="2x96 ffn<3>",
        gamma=2,
        tokens=45_103,
        seconds=72.0,
        measured=Look(45_103, 0.512),
        alpha=alpha,
        tau=tau,
        score=score,
        state="pruned",
        why="behind 3x96",
    )
    state = ClimbState(
        2700.0,
        steps={"text": 600.0},
        notes=["prior: nothing was measured before"],
        rungs=[replace(record, rung=0, label="never shown"), record],
    )
    save(run.path / "rungs.json", state)
    text = page_of(run).text
    for words in (
        "The climb",
        "short training 1",
        "2x96 ffn<3>",
        "45k",
        "0.512",
        "0.71 ± 0.03",
        "1.93x ± 0.03",
        "pruned: behind 3x96",
        "nothing was measured before",
    ):
        assert words in text, words
    assert "never shown" not in text


def test_long_shapes_keep_the_table_within_100_columns(tmp_path):
    run = make_run(tmp_path, "confirmed", trials=20)
    score = run.score(1)
    shape = score.architecture.replace(
        hidden_size=16384, intermediate_size=53248, window_pattern="SSSSL", sliding_window=1024
    )
    data = kept(run)
    (run.best_dir(1) / "confirmed.json").rename(tmp_path / "kept.json")
    run.write_best(replace(score, architecture=shape))
    keep(run, 1, data)
    lines = report.summary_text(run).splitlines()
    row = next(line for line in lines if line.lstrip().startswith("1  "))
    assert (
        shape.label() in " ".join(lines)
        and "1.47x (1.40 to 1.53)m" in row
        and max(map(len, lines[: lines.index("Next:")])) <= 100
    )


def test_a_search_stopped_while_its_finalists_train(tmp_path):
    run = make_run(tmp_path, "trained", trials=20)
    (run.path / "best").rename(run.path / "finalists")
    page = page_of(run)
    assert (
        "has not finished" in page.text
        and "20 scored trials" in page.text
        and "2 finalists have been trained" in page.text
    )
    assert page.charts == 3


def test_a_continued_search_does_not_make_a_confirmation_stale(tmp_path):
    run = make_run(tmp_path, "confirmed", trials=20)
    run.write_best(replace(run.score(1), alpha=Estimate(0.5, 0.15, "prior")))
    assert "1.47x, measured" in report.summary_text(run)


def test_a_draft_that_does_not_pay_is_called_that(tmp_path):
    run = make_run(tmp_path, "confirmed")
    confirm(run, speedup=0.8)
    assert "Speculation does not pay" in report.summary_text(run).splitlines()[
        0
    ] and "export" not in report.summary_text(run)
    confirm(run, speedup=1.02)
    assert "Too close to call" in report.summary_text(run).splitlines()[0]


@pytest.mark.parametrize("written", [True, False])
def test_a_disturbed_confirmation_decides_nothing(tmp_path, written):
    """Median 1.78x over 32.5 tokens/s alone, 31.2 with the draft; also in a file of before
    `undecided` was written."""
    run = make_run(tmp_path, "trained", trials=40)
    confirm(run, speedup=1.78)
    why = (
        "the machine was disturbed: the median over prompts is 1.78x, all tokens over all seconds"
        " give 0.96x"
    )
    field = {"undecided": why} if written else {}
    figures = {
        "baseline_tokens_per_s": 32.5,
        "tokens_per_s": 31.2,
        "speedup_pooled": 0.96,
        "disturbed": True,
        **field,
    }
    keep(run, 1, {**kept(run), **figures, "speedup_interval": [1.54, 1.90]})
    head = headline(run, read_run(run).candidates)
    assert head.title.startswith("Not decided whether speculation pays") and why in head.title
    assert [command.split()[1] for _, command in head.next] == ["confirm"]
    text, page = report.summary_text(run), report.write_html(run).read_text()
    for shown in (text, page):
        assert (
            "Speculation pays" not in shown
            and "archsearch export" not in shown
            and "0.96x" in shown
        )
    assert "x (" in text and "m measured" not in text, "the table shows what was predicted"
    assert "32.5 tokens/s alone, 31.2 with the draft" in " ".join(text.split())
    assert run.summary_row()[-1] == "not decided"


@pytest.mark.parametrize(("engine", "option"), [("transformers", ""), ("vllm", " --engine vllm")])
def test_measuring_again_means_in_the_same_engine(tmp_path, engine, option):
    run = make_run(tmp_path, "trained", trials=40)
    confirm(run)
    keep(run, 1, {**kept(run), "engine": engine, "speedup_pooled": 0.96, "speedup": 1.78})
    ((why, command),) = headline(run, read_run(run).candidates).next
    assert why.startswith("Measure it again") and command.endswith(f" --rank 1{option}")
    keep(run, 1, {**kept(run), "speedup_pooled": 1.7})
    assert headline(run, read_run(run).candidates).next[-1][1].endswith(f" --rank 1{option}")


def test_what_ran_in_llamacpp_is_exported_for_it(tmp_path):
    """The usual export holds no GGUF: what had been confirmed was not in it."""
    run = make_run(tmp_path, "trained", trials=40)
    confirm(run)
    keep(run, 1, {**kept(run), "engine": "llama.cpp", "dtype": "q8_0"})
    command = headline(run, read_run(run).candidates).next[0][1]
    assert command.startswith("archsearch export") and command.endswith(" --for llama.cpp")


def test_a_decided_rank_leads_before_a_faster_one_that_was_disturbed(tmp_path):
    run = make_run(tmp_path, "trained", trials=40)
    confirm(run, 1, 1.9)
    keep(run, 1, {**kept(run), "speedup_pooled": 1.2})
    confirm(run, 2, 1.4)
    head = headline(run, read_run(run).candidates)
    assert (
        head.lead.rank == 2 and head.title.startswith("Speculation pays") and "1.39x" in head.title
    )
    assert "Not decided either way, confirm again: rank 1." in head.lines


def test_candidates_that_cannot_be_told_apart(tmp_path):
    run = make_run(tmp_path, "searched")
    found = read_run(run).candidates
    assert found[0].group == 1
    same = [item.rank for item in found if item.group == 1]
    assert len(same) > 1 and "= cannot be told apart from the first" in report.summary_text(run)
    sharp = [
        replace(
            score,
            alpha=replace(score.alpha, source="measured", std=1e-6),
            draft_s=replace(score.draft_s, std=0.0),
            speedup=replace(score.speedup, value=2.0 - 0.1 * (score.rank or 0)),
        )
        for score in run.scores()
    ]
    assert set(groups(run, sharp).values()) == {1, 2, 3, 4, 5}


def test_confirmed_without_the_extra_fields_and_sampling(tmp_path):
    run = make_run(tmp_path, "trained")
    score = run.score(1)
    keep(
        run,
        1,
        {
            "engine": "vllm",
            "engine_version": "1",
            "prompts": 3,
            "gamma": 2,
            "alpha": 0.5,
            "accepted_by_position": [0.5, 0.25],
            "tau": 1.75,
            "baseline_tokens_per_s": 10,
            "tokens_per_s": 15,
            "speedup": 1.5,
            "predicted_speedup": None,
            "relative_error": None,
            "identical_output": {"prompts": 0, "identical": 0, "differences": []},
        },
    )
    page = page_of(run)
    assert (
        "1.50x, measured" in page.text
        and "sampled" in page.text
        and score.architecture.label() in page.text
    )


def test_a_roofline_run_without_profile_and_a_hub_target(tmp_path):
    run = make_run(tmp_path, "searched", target="nobody/nothing", trials=12)
    run.info["profile"] = {"hash": None, "source": "roofline"}
    assert "none: latencies from the roofline" in page_of(run).text


def test_summary_row_and_list_runs(tmp_path, monkeypatch):
    runs = tmp_path / "runs"
    first = make_run(runs, "unfinished")
    assert first.summary_row() == (
        f"runs/{first.path.name}",
        "smollm2-135m",
        "cpu-epyc-9b14-2t",
        "0",
        "none yet",
        "no",
    )
    second = make_run(runs, "confirmed", trials=20)
    best = max(score.speedup.value for score in second.scores())
    assert open_run(second.path).summary_row()[3:] == ("20", f"{best:.2f}x", "1.47x")
    assert {run.path.name for run in list_runs()} == {first.path.name, second.path.name}
    (second.best_dir(1) / "score.json").write_text("{")
    assert second.summary_row()[4:] == ("broken", "broken")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert first.summary_row()[0] == str(first.path)


def test_nothing_heavy_is_imported_with_the_module():
    code = (
        "import sys, archsearch.report; print(*[m for m in ('matplotlib', 'torch', 'pandas',"
        " 'optuna') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


def test_a_wide_table_wraps_between_a_value_and_its_std(tmp_path):
    run = make_run(tmp_path, "confirmed", trials=12)
    page = report.write_html(run).read_text().partition("<script")[0]
    score = run.score(1)
    assert f"{score.speedup.value:.2f}x <span>± {score.speedup.std:.2f}</span>" in page
    assert "white-space: nowrap" in page and "vertical-align: top; white-space" not in page
    assert (
        page.count("nowrap") == 1
    )  # of that span alone: no cell keeps a table wider than the page
