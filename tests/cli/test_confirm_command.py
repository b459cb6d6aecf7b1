"""`confirm`: by prompt and under load, and what it refuses."""

from __future__ import annotations

import json
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from archsearch.acceptance.measured import Trace
from archsearch.drafts.records import load_trained
from archsearch.pipeline.chains import Replays
from archsearch.pipeline.export import _confirmed_in
from archsearch.pipeline.session import SearchSession
from archsearch.pipeline.shared_work import Job
from archsearch.pipeline.workers import confirm_job
from archsearch.records import from_data
from archsearch.report.terminal.run import confirm_text, families_text, load_text
from archsearch.runs.confirmed import Confirmed, LoadRecord
from archsearch.runs.run import open_run
from archsearch.runs.tables import EngineComparison
from tests.cli.commands import UNDER_LOAD, call, files_in, last_json, refused
from tests.doubles.world import TINY, make_model_folder, make_tokenizer


@pytest.fixture
def stops_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft stops when unsure, whether or not that gains here."""
    monkeypatch.setattr(Replays, "stopping", property(lambda own: own._replayed(0, 3, 0.2)))


def test_confirm_two_gammas(with_run: Path, stops_here: None) -> None:
    arguments = ("confirm", "runs/a", "--gamma", "1", "--gamma", "3", "--count", "2")
    result = last_json(call(*arguments, "--prompts", "prompts.jsonl", "--json"))
    assert sorted([result["gamma"], *(row["gamma"] for row in result["other_gammas"])]) == [1, 3]
    kept = json.loads((with_run / "runs/a/best/1/confirmed.json").read_text())
    # One that a busy machine disturbed does not take the place of one that decided.
    assert result["prompts"] == 2 and (kept == result or "kept_earlier" in result)
    assert result["stopping"] is None, "a gamma that was asked for is fixed"
    text = confirm_text(from_data(Confirmed, result), Path("runs/a"), 1)
    assert "2 held-out prompts" in text or "2 prompts" in text


def test_a_prompt_file_for_confirm(with_run: Path) -> None:
    (with_run / "bad.jsonl").write_text("no json\n")
    assert "line 1: not JSON" in refused("confirm", "runs/a", "--prompts", "bad.jsonl")
    assert "absent.jsonl" in refused("confirm", "runs/a", "--prompts", "absent.jsonl")


def test_prompts_that_changed_since_the_text_was_written_are_refused(with_run: Path) -> None:
    """The first line moved to the end: all that confirmed had trained the draft."""
    file = with_run / "prompts.jsonl"
    first, *rest = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*rest, first]))
    for asked in (("confirm", "runs/a"), ("train", "runs/a", "--budget", "1s")):
        assert "written for other prompts than are held out now" in refused(*asked)


def test_a_prompt_file_is_never_called_held_out(with_run: Path) -> None:
    """What trained the draft was reported as held-out prompts."""
    lines = (with_run / "prompts.jsonl").read_text().splitlines(keepends=True)
    new = [json.dumps({"prompt": f"A question that nobody asked, {number}?"}) for number in (1, 2)]
    (with_run / "mine.jsonl").write_text("".join(lines[1:4]) + "\n".join(new))
    asked = ("confirm", "runs/a", "--count", "5", "--prompts", "mine.jsonl", "--json")
    found = from_data(Confirmed, last_json(call(*asked)))
    assert "trained or chosen on 3 of these 5 prompts" in str(found.prompts_seen)
    text = confirm_text(found, Path("runs/a"), 1)
    call("export", "runs/a", "--output", "out")
    report = Path("runs/a/report.html").read_text()
    for said in (text, report, Path("out/README.md").read_text()):
        assert "held-out prompts, interleaved" not in said and "5 held-out prompts" not in said
    assert "5 prompts of mine.jsonl" in report and "3 of these 5 prompts" in report
    assert "5 prompts of mine.jsonl" in Path("out/README.md").read_text()
    measured = ("acceptance", "--target", "target", "--draft", "runs/a/best/1", "--prompts")
    assert "chosen on 3 of these 5 prompts" in call(*measured, "mine.jsonl").stdout
    (with_run / "new.jsonl").write_text("\n".join(new))
    assert "which flatters it" not in call(*measured, "new.jsonl").stdout


def test_figures_of_earlier_weights_are_not_exported(with_run: Path) -> None:
    score = json.loads((with_run / "runs/a/best/1/score.json").read_text())
    call("export", "runs/a", "--output", "out")
    assert "In the engine: transformers" in (with_run / "out/README.md").read_text()
    score["alpha"] = {**score["alpha"], "value": score["alpha"]["value"] + 0.01}
    (with_run / "runs/a/best/1/score.json").write_text(json.dumps(score))
    call("export", "runs/a", "--output", "out")
    card = (with_run / "out/README.md").read_text()
    assert "Nothing was measured in an engine yet with these weights" in card
    assert "In the engine" not in card


def test_the_full_head_is_compared_at_the_gamma_that_is_written(with_run: Path) -> None:
    scorer = SearchSession.reopen(Path("runs/a")).scorer
    candidate = open_run(Path("runs/a")).candidate(1)
    known = load_trained(candidate.architecture, candidate.folder)
    other = candidate.score.gamma + 2
    own = scorer.measured(candidate.architecture, known.alpha, known.tau, gammas=[other])
    note = call("export", "runs/a", "--output", "out", "--gamma", str(other)).stdout
    assert f"instead of {own.speedup.value:.2f})" in note
    assert f"{own.speedup.value:.2f}" != f"{candidate.score.speedup.value:.2f}"


def test_a_tokenizer_that_differs(with_run: Path) -> None:
    """The draft's folder has the same vocabulary size and other tokens: its ids mean something
    else."""
    from tokenizers import Tokenizer

    folder = with_run / "runs/a/best/1"
    other = json.loads(make_tokenizer().backend_tokenizer.to_str())
    vocabulary = other["model"]["vocab"]
    names = sorted(vocabulary, key=vocabulary.get)
    vocabulary[names[5]], vocabulary[names[6]] = 6, 5
    Tokenizer.from_str(json.dumps(other)).save(str(folder / "tokenizer.json"))
    before = (folder / "confirmed.json").read_bytes()
    line = refused("confirm", "runs/a", "--count", "2")
    assert "tokenizer" in line and "differs" in line and "!=" in line
    assert (folder / "confirmed.json").read_bytes() == before


def test_a_vocabulary_that_differs(with_run: Path) -> None:
    make_model_folder(with_run / "other", TINY.replace(vocab_size=300, num_hidden_layers=1))
    folder = with_run / "runs/a/best/1"
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(with_run / "other" / name, folder / name)
    (folder / "draft_vocab.json").unlink(missing_ok=True)
    line = refused("confirm", "runs/a", "--count", "2")
    assert "vocabulary" in line or "tokenizer" in line


def test_confirm_under_load_and_its_words(with_ranks: Path, made_up: None) -> None:
    arguments = (
        *UNDER_LOAD,
        "--concurrency",
        "1",
        "--concurrency",
        "2",
        "--gamma",
        "2",
        "--repeats",
        "2",
    )
    data = last_json(call(*arguments, "--json"))
    assert [(row["gamma"], row["concurrency"]) for row in data["rows"]] == [(2, 1), (2, 2)]
    text = " ".join(load_text(from_data(LoadRecord, data), Path("runs/a"), 1).split())
    assert "Under load in vLLM 1: rank 1" in text and "float32; context" in text
    assert "Acceptance was synthetic" in text and "the text is not the target's" in text
    assert (
        "vllm's own kernels were not measured (archsearch profile --gpu cpu --target T --engine"
        " vllm --dtype float32)" in text
    )
    assert "Next: archsearch train runs/a --rank 1" in text
    trained = call(
        *UNDER_LOAD[:2], "--rank", "2", *UNDER_LOAD[3:], "--concurrency", "1", "--repeats", "2"
    ).stdout
    assert "Acceptance was real" in trained and "Next: archsearch export runs/a --rank 2" in trained


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--rank", "1"),
            (
                "archsearch train runs/a --rank 1), or prove its shape without (archsearch confirm"
                " runs/a --rank 1"
            ),
        ),
        (("--rank", "1", "--engine", "vllm"), "--synthetic"),
        (
            ("--rank", "2", "--engine", "vllm"),
            "vLLM is not installed; run: archsearch engine install vllm",
        ),
        (
            ("--synthetic", "--engine", "vllm"),
            "vLLM is not installed; run: archsearch engine install vllm",
        ),
        (
            ("--rank", "2", "--engine", "openvino", "--concurrency", "2"),
            "run: archsearch engine install openvino",
        ),
        (("--synthetic", "--engine", "openvino"), "openvino cannot accept by chance"),
        (("--synthetic", "--engine", "warp"), "unknown engine 'warp'"),
        (
            ("--rank", "2", "--engine", "vllm", "--engine-python", "nowhere"),
            "/nowhere, which is no file that can be run",
        ),
        (
            ("--synthetic", "--engine-python", "nowhere"),
            "transformers runs in archsearch's own interpreter",
        ),
        (("--server-url", "http://127.0.0.1:1"), "--baseline-url (without)"),
        (("--baseline-url", "http://127.0.0.1:1"), "give --server-url (with the draft)"),
        (
            ("--rank", "2", "--engine", "openvino", "--server-url", "a", "--baseline-url", "b"),
            "for a running vLLM server",
        ),
        (
            ("--synthetic", "--server-url", "http://a", "--baseline-url", "http://b"),
            "server cannot take synthetic acceptance",
        ),
        (
            ("--rank", "2", "--schedule", "--server-url", "http://a", "--baseline-url", "http://b"),
            "keeps the schedule",
        ),
        (("--rank", "2", "--gamma", "17"), "17 is not in the range 1<=x<=16"),
        (("--synthetic", "--gamma", "20"), "20 is not in the range 1<=x<=16"),
        (
            ("--synthetic", "--concurrency", "4"),
            "use --concurrency 1, or --engine vllm or openvino",
        ),
        (("--synthetic", "--schedule"), "use --concurrency 1"),
        (
            ("--rank", "2", "--engine", "openvino", "--schedule"),
            "openvino takes one gamma for all batch sizes; use",
        ),
        (
            ("--rank", "2", "--concurrency", "1", "--schedule"),
            "transformers takes one gamma for all batch sizes",
        ),
        (("--synthetic", "--concurrency", "0"), "--concurrency"),
        (("--synthetic", "--timeout", "soon"), "write 90s"),
        (("--synthetic", "--tokens", "2"), "--tokens"),
    ],
)
def test_what_confirm_refuses_of_engines(
    with_ranks: Path, arguments: tuple[str, ...], words: str
) -> None:
    before = files_in(with_ranks)
    assert words in refused("confirm", "runs/a", *arguments)
    assert files_in(with_ranks) == before


def test_a_server_that_does_not_answer(with_ranks: Path) -> None:
    line = refused(
        "confirm",
        "runs/a",
        "--rank",
        "2",
        "--server-url",
        "http://127.0.0.1:9",
        "--baseline-url",
        "http://127.0.0.1:9",
        code=2,
    )
    assert "127.0.0.1:9" in line and not list(with_ranks.rglob("confirmed.json"))


BY_PROMPT = ("confirm", "runs/a", "--rank", "2")
TOYS = {
    "hangs": (
        "cat > /dev/null",
        "vllm did not answer 'start' within 1 s and was stopped; allow more time with --timeout",
        1,
    ),
    "dies": (
        "read line; echo 'ImportError: libnuma.so.1 is missing' >&2; exit 3",
        "vllm ended with status 3 during 'start'",
        1,
    ),
    "is killed": ("read line; kill -9 $$", "vllm was killed by signal 9 (out of memory?)", 1),
    "is old": (
        """read line; echo '{"error": "vLLM 0.9 is too old", "kind": "user"}'""",
        "too old",
        2,
    ),
    "babbles": ("read line; echo hello; cat > /dev/null", "no JSON: 'hello'", 1),
}


@pytest.mark.parametrize(
    ("toy", "how"),
    [*((toy, ("confirm", "runs/a", "--synthetic")) for toy in TOYS), ("dies", BY_PROMPT)],
)
def test_an_engine_that_fails_leaves_no_process(
    with_ranks: Path, toy: str, how: tuple[str, ...]
) -> None:
    program, words, code = TOYS[toy]
    python = with_ranks / "python"
    python.write_text(f"#!/bin/sh\nsleep 600 &\necho $$ $! > pids\n{program}\n")
    python.chmod(0o755)
    line = refused(
        *how, "--engine", "vllm", "--engine-python", "python", "--timeout", "1s", code=code
    )
    assert words in line
    for pid in (with_ranks / "pids").read_text().split():
        deadline = time.monotonic() + 60
        while is_running(int(pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not is_running(int(pid))
    assert not list(with_ranks.rglob("load-*.json")) and not list(
        with_ranks.rglob("confirmed.json")
    )


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie that its new parent has not buried yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_full_disk_under_load(with_ranks: Path, made_up: None, full_disk: list[str]) -> None:
    (with_ranks / "runs" / "a" / "engine").mkdir()
    before = files_in(with_ranks)
    assert "No space left" in refused(*UNDER_LOAD, "--repeats", "1", "--concurrency", "1")
    assert full_disk and not {
        name for name in files_in(with_ranks) - before if name.endswith(".json")
    }


def test_a_chain_beside_its_halves(with_run: Path) -> None:
    families = ("--family", "chain", "--family", "independent", "--family", "ngram")
    arguments = ("confirm", "runs/a", *families, "--count", "2")
    found = last_json(call(*arguments, "--json"))
    chain = next(row for row in found["rows"] if row["family"] == "chain")
    assert "alone by replay; the lookup drafts in" in chain["note"] and "n-gram of" in chain["note"]
    exact = chain["identical_output_float32"]
    assert chain["predicted_speedup"] > 0 and exact["identical"] == exact["prompts"] == 2
    assert (with_run / "runs/a/heads/chain/confirmed-transformers.json").is_file()
    assert "alone by replay" in families_text(from_data(EngineComparison, found), Path("runs/a"))
    table = json.loads((with_run / "runs/a/families.json").read_text())["families"]
    row = next(row for row in table if row["family"] == "chain")
    assert "by replay" in row["note"] and row["gamma"] == chain["gamma"]
    own = next(row for row in table if row["family"] == "independent")
    assert row["seconds"] == own["seconds"] > 0, "a chain needs its draft's training"


def test_what_chains_need_is_said_in_one_line(with_run: Path) -> None:
    chain = ("--family", "chain")
    own = ("--engine", "openvino", "--engine-python", sys.executable)
    line = refused("confirm", "runs/a", *chain, *own)
    assert "not started with chain drafters here" in line and line.endswith("--family")
    assert "has no weights" in refused("confirm", "runs/a", *chain, "--rank", "2")
    searched = ("search", "--target", "target", "--gpu", "cpu", *chain)
    assert "archsearch confirm RUN --family chain" in refused(*searched)
    assert "leave out --family" in refused(*searched, "--confirm", "1")
    trace = with_run / "runs/a/best/1/trace.npz"
    known = Trace.load(trace)
    replace(known, ids=tuple(f"other {each}" for each in known.ids)).save(trace)
    assert "not of the run's held-out text" in refused("confirm", "runs/a", *chain)


def test_a_draft_that_stops_when_unsure_is_exported_as_it_was_measured(
    with_run: Path, stops_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = Path("runs/a/best/1")
    for file in best.glob("confirmed*.json"):  # an earlier one might keep its place
        file.unlink()
    session = SearchSession.reopen(Path("runs/a"))  # as a search with --confirm does it
    shape = session.run.score(1).architecture
    confirm_job(session, Job("confirm", shape, rank=1, prompts=2), session.trainer())
    found = json.loads((best / "confirmed.json").read_text())
    stopping = found["stopping"]
    assert (found["stops_below"], stopping["stops_below"], stopping["gamma"]) == (0.0, 0.2, 3)
    assert stopping["predicted_speedup"] > 0 and found["stopping_gain"]["source"] == "modelled"
    assert "Stopping where its token has less than 0.2" in confirm_text(
        from_data(Confirmed, found), Path("runs/a"), 1
    )
    path = with_run / "runs/a/best/1/confirmed-transformers.json"
    asked = ("export", "runs/a", "--output", "out")
    schedule, own = {"ranges": [[1, 2, 2], [3, 16, 0]]}, Confirmed.padded_when_served
    for faster, more, padded in (
        (True, (), False),
        (True, (), True),
        (False, (), False),
        (True, ("--gamma", "2"), False),
        (True, (), False),  # with a schedule
    ):
        monkeypatch.setattr(Confirmed, "padded_when_served", padded)
        row = {**stopping, "undecided": None, "speedup": {**stopping["speedup"], "value": 9.0}}
        row["speedup_pooled"] = 9.0 if faster else 0.1
        for each in (path, path.with_name("confirmed.json")):
            each.write_text(json.dumps({**found, "stopping": row}))
        made = last_json(call(*asked, *more, "--json"))
        settings = json.loads((with_run / "out/generation_config.json").read_text())
        served = faster and not more and not padded
        assert settings["assistant_confidence_threshold"] == served * stopping["stops_below"]
        assert settings["num_assistant_tokens"] == (stopping["gamma"] if served else made["gamma"])
        assert made["stops"] == (
            {"transformers": [stopping["gamma"], stopping["stops_below"]]} if served else {}
        )
        card = (with_run / "out/README.md").read_text()
        least = "confidence threshold 0.2" if served else "no confidence threshold"
        written = f"holds gamma {settings['num_assistant_tokens']} (constant, {least})"
        assert written in card
        assert ("in transformers up to 3 while each has at least 0.2" in card) == served
        assert ("so no file here sets it" in card) == (faster and padded)
        unsure = f"(gamma {made['gamma']}; in transformers up to 3, stopping below 0.2)"
        assert (unsure in call(*asked, *more).stdout) == served
        if more:
            (with_run / "runs/a/best/1/schedule.json").write_text(json.dumps(schedule))
    monkeypatch.setattr(Confirmed, "padded_when_served", own)
    assert from_data(Confirmed, found).padded_when_served, "of a trimmed head"
    in_q8 = {**found, "engine": "llama.cpp", "draft_dtype": "q8_0"}
    row = {**stopping, "undecided": None, "speedup": {**stopping["speedup"], "value": 9.0}}
    (with_run / "runs/a/best/1/confirmed-llama.cpp-q8_0.json").write_text(
        json.dumps({**in_q8, "stopping": {**row, "speedup_pooled": 9.0}})
    )
    candidate = open_run(Path("runs/a")).candidate(1)
    measured = (stopping["gamma"], stopping["stops_below"])
    in_it = _confirmed_in(candidate, "q8_0")["llama.cpp"].stops
    assert in_it is not None and (in_it.gamma, in_it.stops_below) == measured
    assert "llama.cpp" not in _confirmed_in(candidate, "q4_0"), "another precision"
    row["gamma"] += 1  # measured last, and by name the first
    path = with_run / "runs/a/best/1/confirmed-llama.cpp-float16.json"
    own = {**in_q8, "draft_dtype": "", "dtype": "float16", "stopping": row}
    path.write_text(json.dumps({**own, "stopping": {**row, "speedup_pooled": 9.0}}))
    path.with_name("confirmed-llama.cpp.json").write_text(
        json.dumps({**in_q8, "draft_dtype": "", "dtype": "float32"})
    )
    candidate = open_run(Path("runs/a")).candidate(1)
    as_float16 = _confirmed_in(candidate, "float16")["llama.cpp"].stops
    assert as_float16 is not None and as_float16.gamma == row["gamma"]


def test_an_export_for_one_engine_has_the_gamma_and_figures_of_that_engine(with_run: Path) -> None:
    """llama.cpp was served with the gamma that transformers likes, and its README quoted it."""
    found = last_json(call("confirm", "runs/a", "--count", "2", "--json"))
    elsewhere = {**found, "engine": "vllm", "gamma": found["gamma"] + 1, "prompts": 77}
    (with_run / "runs/a/best/1/confirmed-vllm.json").write_text(json.dumps(elsewhere))
    for engines, gamma in ((["vllm"], elsewhere["gamma"]), ([], found["gamma"])):
        asked = [word for name in engines for word in ("--for", name)]
        made = last_json(call("export", "runs/a", "--output", "out", *asked, "--json"))
        assert made["gamma"] == gamma
        assert ("77 held-out prompts" in (with_run / "out/README.md").read_text()) == bool(engines)
