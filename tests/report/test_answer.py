"""The first screen: what one can have today, what the budget buys, how sure, in rows that
differ."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from archsearch.architecture import catalogue
from archsearch.architecture.architecture import Architecture
from archsearch.drafters.models import Independent
from archsearch.drafters.registry import family
from archsearch.estimate import Estimate
from archsearch.needs import NOTHING, Needs
from archsearch.records import save
from archsearch.report.answer import (
    best_at_hand,
    fastest,
    rows_text,
    sentences,
    serve_command,
    shown_rows,
)
from archsearch.report.headline import edge_lines
from archsearch.report.phrases import verdict
from archsearch.report.reading import Shown
from archsearch.report.terminal.layout import WIDTH, wrapped
from archsearch.runs.run import Run
from archsearch.runs.tables import CURVES_FILE, Curves, Remedied

TARGET = catalogue.load("llama-3.1-8b").architecture
SHAPE = Architecture(1536, 7680, 2, 32, 32, 64, 128256)
TRAINING = Needs(
    "training",
    tokens=4.9e8,
    text_hours=19.5,
    teacher_hours=3.1,
    training_hours=1.4,
    source="modelled",
)


def gain(value: float, low: float, high: float) -> Estimate:
    return Estimate(value, 0.3, "modelled", low, high)


@dataclass(frozen=True)
class Option:
    """A rank as the first screen sees it."""

    rank: int
    drafter: Any
    gain: Estimate
    needs: Needs | None = TRAINING
    group: int = 1
    gamma: int = 4
    measured: bool = False
    assumed: str = ""
    has_weights: bool = False
    at_hand, ranked_by, name = Shown.at_hand, Shown.ranked_by, Shown.name
    hub_id, kind = Shown.hub_id, Shown.kind

    @property
    def score(self) -> SimpleNamespace:
        return SimpleNamespace(
            proposer=self.drafter,
            drafter=self.drafter,
            gamma=self.gamma,
            family=self.drafter.family,
            alpha=Estimate(0.7, 0.1, "prior"),
            needs=self.needs,
            mix=None,
            assumed=self.assumed,
            ranked_by=self.gain.interval[0] if self.assumed else self.gain.value,
        )


HEAD = family("eagle3").usual(TARGET)
EXISTS = Option(
    1, HEAD, gain(1.96, 1.5, 2.5), Needs("exists", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B")
)
DRAFTS = [
    Option(
        2 + number,
        Independent(replace(SHAPE, num_attention_heads=heads, num_key_value_heads=heads)),
        gain(1.9, 1.2, 2.6),
    )
    for number, heads in enumerate((32, 24, 16, 8))
]
LOOKUP = Option(6, family("ngram").usual(TARGET), gain(1.3, 0.8, 2.0), NOTHING, group=2)
OPTIONS = [EXISTS, *DRAFTS, LOOKUP]


@pytest.mark.parametrize(
    ("speedup", "words"),
    [
        (gain(2.0, 1.1, 3.0), "should pay"),
        (gain(3.7, 0.9, 6.0), "may pay"),
        (gain(0.8, 0.7, 0.95), "does not pay"),
        (gain(0.9, 0.6, 1.2), "probably does not pay"),
        (Estimate(1.5, 0.1, "modelled"), "should pay"),
        (Estimate(1.5, 0.5, "modelled"), "may pay"),
    ],
)
def test_the_interval_alone_decides_whether_it_pays(speedup: Estimate, words: str) -> None:
    assert verdict(speedup) == words
    assert verdict(speedup, measured=True) == words.replace("should pay", "pays")
    low, high = speedup.interval
    assert low < speedup.value < high


def test_rows_differ_in_more_than_head_counts_and_hold_what_exists() -> None:
    rows = shown_rows(OPTIONS)
    assert [row.rank for row in rows] == [1, 2, 6]
    wide = [
        replace(DRAFTS[0], rank=10 + n, drafter=Independent(replace(SHAPE, num_hidden_layers=n)))
        for n in range(3, 13)
    ]
    rows = shown_rows([*OPTIONS, *wide])
    assert len(rows) == 8 and {1, 2, 6} <= {row.rank for row in rows}
    assert [row.rank for row in rows] == sorted(row.rank for row in rows)


def test_the_table_keeps_to_a_hundred_columns_and_says_what_each_needs() -> None:
    lines = rows_text(OPTIONS, "GPU")
    assert max(map(len, lines)) <= WIDTH
    assert "download" in lines[2] and "24 GPU-h, 490M" in lines[3] and "nothing" in lines[4]
    assert (
        lines[2].endswith("=")
        and not lines[4].endswith("=")
        and "cannot be told apart" in lines[-1]
    )


def test_only_what_was_measured_is_said_to_be() -> None:
    seen = replace(Option(1, HEAD, gain(1.96, 1.8, 2.1)), measured=True)
    lines = rows_text([seen, *OPTIONS[1:]], "GPU")
    assert "speed-up, 5 to 95 %" in lines[0] and "measured" not in lines[0]
    assert [line for line in lines if "m=" in line or line.endswith("m")] == [lines[2]]
    assert "m measured, others predicted" in lines[-1]


def test_today_is_the_best_that_one_can_have() -> None:
    """A wide tie with the first does not make the worse of two downloads today's."""
    wide = replace(EXISTS, rank=2, gain=gain(1.5, 0.8, 2.6), assumed="no rows")
    sure = replace(EXISTS, rank=3, gain=gain(1.4, 1.1, 1.9), group=2)
    ranked = [replace(DRAFTS[0], rank=1), wide, sure]
    assert best_at_hand(ranked) is sure and best_at_hand([wide, sure]) is wide
    assert best_at_hand(DRAFTS) is None
    trained = replace(DRAFTS[0], has_weights=True)
    assert best_at_hand([trained, sure]) is trained
    assert best_at_hand([trained, sure], trained=False) is sure


def test_today_and_the_budget_are_named_with_their_price() -> None:
    text = sentences(OPTIONS, "for t on d", "GPU")
    assert text[0] == "Speculation should pay for t on d."
    assert text[1].startswith(
        "Today: eagle3: yuhuili/EAGLE3-LLaMA3.1-Instruct-8B, gamma 4: 1.96x (1.50 to 2.50)"
        " predicted"
    )
    assert "Training for 24 GPU-hours is not predicted to be faster: independent: 2x1536" in text[2]
    assert (
        "490M tokens of the target's text (81% of the hours to write it" in text[2]
        and "do not tell the two apart" in text[2]
    )
    better = replace(DRAFTS[0], gain=gain(2.4, 1.6, 3.0), group=3)
    # the price of the drafter itself: one that is tuned takes less than the budget
    short = replace(better, needs=Needs("training", tokens=1e5, text_hours=0.3, training_hours=0.2))
    assert sentences([short, EXISTS], "for t on d", "CPU")[2].startswith(
        "With 30 minutes of training: independent"
    )
    none = sentences([better], "for t on d", "GPU")
    assert none[1] == "Today: nothing that can be downloaded is known here."
    assert max(map(len, wrapped(text))) <= WIDTH


def test_beyond_the_graphs_all_is_compared_with_the_target_alone_as_it_is_best_served() -> None:
    """A switch that makes the target alone 2.7 times as fast leaves 1.96x slower than no draft."""
    switch, better = "max_cudagraph_capture_size=2048", replace(DRAFTS[0], gain=gain(2.5, 1.2, 3.0))
    ways = [
        Remedied(1, switch, 1, gain(0.89, 0.1, 1.8), 2.7),
        Remedied(2, switch, 3, gain(0.95, 0.2, 2.5), 2.7),
    ]
    verdict, today, trained = sentences([EXISTS, better], "for t on d", "GPU", ways)
    assert verdict == "Speculation probably does not pay for t on d."
    alone = "gamma 1: 0.89x (0.10 to 1.80); the target alone is 2.70x as fast."
    assert f"With {switch}: {EXISTS.name}, {alone}" in today
    # 0.95 of 2.7 is more than 0.89 of 2.7, which is more than 1.96
    assert trained.startswith("With 24 GPU-hours of training") and (
        f"2.50x (1.20 to 3.00) predicted, with {switch} 0.95x (0.20 to 2.50) at gamma 3;" in trained
    )
    assert fastest(EXISTS, ways) is ways[0] and fastest(EXISTS, ways[1:]).rate == 1.96
    # the best of what is trained is another rank with the switch than without
    other = replace(DRAFTS[1], gain=gain(2.4, 1.2, 3.0))
    ways.append(Remedied(3, switch, 4, gain(1.2, 0.2, 2.5), 2.7))
    verdict, _, trained = sentences([EXISTS, better, other], "for t on d", "GPU", ways)
    assert verdict == "Speculation may pay for t on d." and f"{switch} 1.20x" in trained
    # nothing to download: what serves without a draft is said all the same
    (_, none, _) = sentences([better], "for t on d", "GPU", ways)
    assert none.endswith(f"known here. With {switch}: the target alone is 2.70x as fast.")
    # a switch that serves the draft alone better: as ever
    (same, _, _) = sentences(OPTIONS, "for t on d", "GPU", [replace(ways[0], alone=1.0)])
    assert same == "Speculation should pay for t on d."


def asked(quantise: str = "", path: Path | None = None, **arguments: Any) -> Run:
    """A run of which only what was asked for is looked at."""
    device = {"kind": arguments.pop("kind", "gpu")}
    profile = {"quantise": quantise}
    return Run(path or Path(), {"arguments": arguments, "profile": profile, "device": device})


def test_the_command_that_serves_what_exists_is_one_that_vllm_reads() -> None:
    command = serve_command(EXISTS, asked(), "meta-llama/Llama-3.1-8B-Instruct", 2)
    assert command is not None and max(map(len, command.splitlines())) <= WIDTH - 2
    words = shlex.split(command.replace("\\\n", " "))  # a shell joins such lines
    assert words[:5] == [
        "vllm",
        "serve",
        "meta-llama/Llama-3.1-8B-Instruct",
        "--tensor-parallel-size",
        "2",
    ]
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert config == {
        "method": "eagle3",
        "model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
        "num_speculative_tokens": 4,
    }
    assert (
        serve_command(DRAFTS[0], asked(), "t", 1) is None
        and serve_command(EXISTS, asked(engine="tensorrt-llm"), "t", 1) is None
        and serve_command(EXISTS, asked(engine="vllm", kind="cpu"), "t", 1) is None
    )


def test_a_drafter_is_served_at_the_temperature_of_the_run() -> None:
    for engine, words in (
        ("vllm", '"draft_sample_method": "probabilistic"'),
        ("sglang", "--speculative-use-rejection-sampling"),
    ):
        greedy, sampled = (
            serve_command(EXISTS, asked(engine=engine, temperature=each), "org/t", 1) or ""
            for each in (0.0, 1.0)
        )
        assert words in sampled and words not in greedy
        assert max(map(len, sampled.splitlines())) <= WIDTH - 2
    lookup = serve_command(LOOKUP, asked(temperature=1.0), "org/t", 1)
    assert lookup is not None and "sample" not in lookup


def test_what_a_run_was_priced_with_is_in_the_command() -> None:
    served = serve_command(EXISTS, asked("float8_e4m3fn"), "org/t", 1)
    assert served is not None
    assert served.startswith("vllm serve org/t --quantization fp8_per_tensor --speculative-config")
    named = serve_command(EXISTS, asked("nvfp4"), "org/t", 1)
    assert named is not None and "--quantization" not in named
    assert named.splitlines()[0] == "# in the place of org/t name its weights in nvfp4"
    switches = (
        "VLLM_USE_V2_MODEL_RUNNER=0 kv_cache_dtype=fp8 async_scheduling=0"  # as runs keep them
    )
    command = serve_command(EXISTS, asked(engine_options=switches), "org/t", 1)
    assert command is not None and command.replace(" \\\n   ", "").startswith(
        "VLLM_USE_V2_MODEL_RUNNER=0 vllm serve org/t --kv-cache-dtype fp8 --no-async-scheduling --s"
    )
    assert max(map(len, command.splitlines())) <= WIDTH - 2
    remedied = Remedied(1, "VLLM_USE_V2_MODEL_RUNNER=0", 8, gain(2.7, 2.0, 3.0))
    named = serve_command(EXISTS, asked("int4"), "org/t", 1, remedied)
    assert named is not None and named.splitlines()[1].startswith("VLLM_USE_V2_MODEL_RUNNER=0 vllm")
    assert '"num_speculative_tokens": 8' in named
    newer = serve_command(EXISTS, asked(), "org/t", 1, replace(remedied, switches=""))
    assert newer is not None and '"num_speculative_tokens": 4' in newer  # as it was priced
    sglang = serve_command(EXISTS, asked("float8_e4m3fn", engine="sglang"), "org/t", 2)
    assert sglang is not None and max(map(len, sglang.splitlines())) <= WIDTH - 2
    assert sglang.replace(" \\\n   ", "").startswith(
        "python -m sglang.launch_server --model-path org/t --quantization fp8 --tp-size 2"
        " --speculative-algorithm EAGLE3 --speculative-draft-model-path yuhuili"
    )
    switches = "SGLANG_ENABLE_SPEC_V2=1 disable_overlap_schedule=1 disable_cuda_graph=0"
    sglang = serve_command(EXISTS, asked(engine="sglang", engine_options=switches), "org/t", 1)
    assert sglang is not None and sglang.startswith("SGLANG_ENABLE_SPEC_V2=1 python -m sglang.")
    assert " --disable-overlap-schedule --spec" in sglang and "cuda" not in sglang


def test_a_context_that_memory_does_not_hold_is_cut(tmp_path: Path) -> None:
    """vLLM starts for no shorter one than the models have positions for, unless it is told."""
    run = tmp_path / "run"
    run.mkdir()
    save(run / CURVES_FILE, Curves("", {}, {}, longest={str(EXISTS.rank): 20224}))
    flags = {"vllm": "--max-model-len 20224 ", "sglang": "--context-length 20224 "}
    for engine, flag in flags.items():
        told, untold = (
            serve_command(EXISTS, asked(engine=engine, path=path), "org/t", 1) or ""
            for path in (run, None)
        )
        assert flag in told and flag.split()[0] not in untold
        assert "positions: 20,224 tokens\n" in told and "longest request" not in untold


def test_suffix_decoding_says_what_older_vllm_lacks() -> None:
    suffix = replace(LOOKUP, drafter=family("suffix").usual(TARGET))
    command = serve_command(suffix, asked(), "org/t", 1)
    assert command is not None and command.splitlines()[0].endswith("pip install arctic-inference")
    assert max(map(len, command.splitlines())) <= WIDTH - 2
    assert "#" not in (serve_command(LOOKUP, asked(), "org/t", 1) or "#")


@pytest.mark.parametrize(("gamma", "said"), [(16, True), (15, False)])
def test_the_largest_gamma_is_said_to_be_the_last_priced(gamma: int, said: bool) -> None:
    lead = replace(LOOKUP, gamma=gamma)
    lines = edge_lines(asked(target="llama-3.1-8b"), lead)  # type: ignore[arg-type]
    assert bool(lines) == said and all("16 is the largest" in line for line in lines)


def test_a_head_made_for_another_checkpoint_is_served_with_that() -> None:
    """The weights of a catalogue's shape may be the base model's, the head's the chat model's."""
    chat = "meta-llama/Llama-2-7b-chat-hf"
    head = replace(EXISTS, needs=Needs("exists", "yuhuili/EAGLE-llama2-chat-7B"))
    assert f" {chat} --spec" in (serve_command(head, asked(), "meta-llama/Llama-2-7b-hf", 1) or "")
    lines = sentences([head], "for t on d", "GPU-hours")
    assert f"(made for {chat})" in lines[1]
    same = serve_command(EXISTS, asked(), "org/t", 1)
    assert (
        same is not None
        and " org/t " in same
        and "made for" not in " ".join(sentences([EXISTS], "for t on d", "GPU-hours"))
    )
