"""`traffic`: rates, traces and mixes from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands import call, last_json, refused

DRAFTS = (
    "traffic",
    "--target",
    "llama-13b",
    "--draft",
    "wide-796m",
    "--gpu",
    "a100",
    "--alpha",
    "0.7",
    "--simulate",
    "200",
)


def test_rates_and_where_to_stop(tmp_path: Path) -> None:
    arguments = (
        *DRAFTS,
        "--requests-per-second",
        "0.5",
        "--requests-per-second",
        "2",
        "--prompt-tokens",
        "300",
    )
    text = call(*arguments).stdout
    assert "memory holds" in text
    assert (
        "simulated (200 requests)" in text
        and "requests a second" in text
        and "speed-up over the load" not in text
        and "% of tokens" not in text
    )
    first = text.splitlines()[0]
    assert " at 0.5 requests/s, " in first and first.endswith(" at 2 requests/s.")
    (entry,) = last_json(call(*arguments, "--json"))["drafts"]
    slow, quick = entry["parts"]
    assert quick["drafting"]["running"] > slow["drafting"]["running"]
    assert slow["simulated"]["plain"]["tpot_s"] == pytest.approx(slow["plain"]["tpot_s"], rel=0.1)
    assert slow["off_rate"] == pytest.approx(quick["off_rate"])


def test_a_server_that_is_full_in_closed_form_is_full_in_simulation() -> None:
    """Its simulation of 200 requests ends in finite time, and a token's time is of as many as
    run."""
    arguments = (*DRAFTS, "--requests-per-second", "40")
    (entry,) = last_json(call(*arguments, "--json"))["drafts"]
    (part,) = entry["parts"]
    assert part["drafting"]["full"] and part["simulated"]["drafting"]["full"]
    assert part["plain"]["full"] and part["simulated"]["plain"]["full"]
    gain = part["drafting"]["tokens_per_s"] / part["plain"]["tokens_per_s"]
    text = call(*arguments).stdout
    assert text.startswith(f"wide-796m: speed-up {gain:.2f} in tokens/s at 40 requests/s.\n")
    assert "with the draft does not keep up; without does not keep up." in text
    assert entry["pays"] == (gain > 1.0) and "no end ms" not in text


def test_a_mix_and_its_limits(tmp_path: Path) -> None:
    path = tmp_path / "mix.yaml"
    path.write_text(
        "limits: {tpot_ms: 1}\nparts:\n  - {name: chat, weight: 70, concurrency: 4, prompt_tokens:"
        " 300, output_tokens: 100}\n  - {name: code, weight: 30, concurrency: 32, prompt_tokens:"
        " 900, output_tokens: 200, temperature: 0.5}\n"
    )
    result = last_json(
        call(
            *DRAFTS,
            "--draft",
            "sheared-llama-1.3b",
            "--workload",
            str(path),
            "--objective",
            "throughput",
            "--json",
        )
    )
    assert result["objective"] == "throughput" and [part["weight"] for part in result["load"]] == [
        0.7,
        0.3,
    ]
    first, second = result["drafts"]
    assert not first["pays"]
    assert first["objective"] > second["objective"] > 0 and first["broken_limits"]


def test_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 600 * i, "input_length": 200 + i, "output_length": 60} for i in range(80)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    (entry,) = last_json(call(*DRAFTS, "--trace", str(path), "--json"))["drafts"]
    assert entry["parts"][0]["requests_per_second"] == pytest.approx(1 / 0.6)
    assert entry["parts"][0]["simulated"]["requests"] == 80
    path.write_text("\n".join(json.dumps(row) for row in reversed(rows)))
    assert "out of order" in refused(*DRAFTS, "--trace", str(path))


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ((), "give one of --workload"),
        (("--requests-per-second", "-1"), "positive number"),
        (("--requests-per-second", "1", "--trace", "x"), "--trace and --requests-per-second"),
        (("--workload", "nowhere.yaml"), "cannot read the workload"),
        (("--trace", "nowhere.jsonl"), "cannot read the trace"),
        (("--requests-per-second", "1", "--output-tokens", "1"), "nothing to draft"),
        (
            ("--requests-per-second", "1", "--prompt-tokens", "9000000", "--tensor-parallel", "1"),
            "fits no batch",
        ),
    ],
)
def test_what_it_refuses(extra: tuple[str, ...], words: str) -> None:
    assert words in refused(*DRAFTS, *extra)


def test_a_gamma_that_the_drafter_cannot_draft_is_refused() -> None:
    asked = ("traffic", "--target", "llama-3.1-8b", "--gpu", "h100", "--draft", "pard")
    assert "cannot draft gamma 15: at most 12 tokens" in refused(
        *asked, "--gamma", "15", "--requests-per-second", "8"
    )
