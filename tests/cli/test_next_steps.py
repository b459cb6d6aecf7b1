"""What to measure next, as a search says it: of every kind what fits, with commands that the
command line understands."""

from __future__ import annotations

import json
import shlex

import pytest

from archsearch.acceptance.known import AskedText, known_drafts
from archsearch.cli import main
from archsearch.engine_facts import ENGINES
from archsearch.models.targets import resolve_target
from archsearch.pipeline import SearchRequest, search
from archsearch.pipeline.next_steps import existing_drafts
from archsearch.records import as_data, from_data
from archsearch.report.terminal.search import Step, next_lines
from archsearch.text.likeness import sketch_of_set
from archsearch.text.prompt_set import load_prompt_set
from archsearch.workload import WorkloadRequest
from tests.cli.commands import SEARCH, call, last_json


def parsed(command: str) -> dict:
    """What the command line makes of a command; raises where it would refuse it."""
    program, name, *rest = shlex.split(command)
    assert program == "archsearch"
    # click keeps a command's help option as it is first made
    return main.commands[name].make_context(name, rest, help_option_names=["-h", "--help"]).params


def steps_of(target, tmp_path, **asked):
    # What can be measured of heads is less: their ranks have no weights and no synthetic cycle
    # here.
    request = SearchRequest(
        target, WorkloadRequest(**asked), trials=24, run=tmp_path / "run", families=("independent",)
    )
    result = as_data(search(request))
    assert json.loads(json.dumps(result["next"])) == result["next"]
    return result, {step["kind"]: step for step in result["next"]}


@pytest.mark.parametrize(
    ("target", "asked"),
    [
        pytest.param("llama-65b", {"gpu": "a100"}, marks=pytest.mark.slow),
        pytest.param(
            "llama-3.1-8b",
            {"gpu": "h100", "engine": "sglang", "temperature": 0.7},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "qwen3-8b",
            {"gpu": "h200", "engine": "tensorrt-llm", "batch_size": 4},
            marks=pytest.mark.slow,
        ),
        ("opt-13b", {"gpu": "l40s", "engine": "transformers"}),
    ],
    ids=lambda value: value if isinstance(value, str) else value["gpu"],
)
def test_commands_of_every_kind_are_understood(target, asked, tmp_path):
    result, steps = steps_of(target, tmp_path, **asked)
    assert [step["value_per_minute"] for step in result["next"]] == sorted(
        (step["value_per_minute"] for step in result["next"]), reverse=True
    )
    lead = max((score["speedup"] for score in result["best"]), key=lambda speedup: speedup["value"])
    for kind, step in steps.items():
        options = parsed(step["command"])
        assert step["std_after"] < step["std"] and step["minutes"] > 0
        assert step["speedup"] == pytest.approx(lead["value"])
        assert step["std"] == pytest.approx(lead["std"], rel=0.05)
        if kind in ("acceptance", "profile", "training"):
            assert options["target"] == target
        if kind == "profile":
            assert options["budget_s"] == 60 * step["minutes"]
        if kind == "synthetic":
            assert (
                options["synthetic"]
                and result["best"][options["rank"] - 1]["family"] == "independent"
            )
            assert ENGINES[options["name"] or asked.get("engine", "vllm")].synthesises
        if kind == "acceptance":
            assert (
                options["temperature"] == asked.get("temperature", 0.0) and "GiB" in step["needs"]
            )
    # Which of a cycle and a profile narrows the answer depends on the device; imported tables are
    # no profile of one's own, and what is downloaded is proved by neither.
    first = result["best"][0]["needs"]["kind"]
    narrowing = {"synthetic", "profile"} | ({"training"} if first == "exists" else set())
    assert "acceptance" in steps and narrowing & set(steps)
    assert any("a machine with NVIDIA" in step["needs"] for step in steps.values())
    told = next_lines([from_data(Step, step) for step in result["next"]])
    assert any(result["next"][0]["command"] in line for line in told)


def test_a_climb_is_named_with_the_least_budget_that_trains(world):
    call_next = {
        step["kind"]: step for step in last_json(call(*SEARCH, "--run", "run", "--json"))["next"]
    }
    options = parsed(call_next["training"]["command"])
    assert (
        options["target"] == "target"
        and options["time_budget"] == 60 * call_next["training"]["minutes"]
    )
    assert (
        call_next["training"]["needs"] == ""
        and "acceptance" not in call_next
        and "profile" not in call_next
    )
    text = call(*SEARCH, "--run", "run", "--explain").stdout
    assert "What to measure next" in text and call_next["training"]["command"] in text
    given = last_json(call(*SEARCH, "--alpha", "0.7", "--run", "given", "--json"))
    assert "training" not in {step["kind"] for step in given["next"]}


def test_what_acceptance_writes_into_runs_is_known_to_the_next_search(tmp_path):
    draft = resolve_target("llama-3.2-1b").architecture
    alpha = {"value": 0.71, "std": 0.02, "source": "measured"}
    row = {
        "target": "llama-3.1-8b",
        "architecture": draft.to_dict(),
        "alpha": alpha,
        "domain": "chat",
        "training": "shared",
    }
    mine = tmp_path / "mine.jsonl"
    mine.write_text(
        "".join(json.dumps({"prompt": f"What is {n} and {n}?"}) + "\n" for n in range(20))
    )
    (tmp_path / "alpha-x.json").write_text(json.dumps({**row, "prompts_file": str(mine)}))
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "other.json").write_text(json.dumps({**row, "target": "qwen3-8b"}))
    (tmp_path / "of-whom.json").write_text(
        json.dumps({k: v for k, v in row.items() if k != "target"})
    )
    asked = AskedText(sketch_of_set(load_prompt_set(mine, None)), "chat")
    (draft_known,) = known_drafts("llama-3.1-8b", [tmp_path], asked=asked)
    found = draft_known.observation
    assert (
        found.architecture == draft
        and found.alpha.std == 0.02
        and found.context.training == "shared"
    )
    doubted = known_drafts("llama-3.1-8b", [tmp_path])[0].observation
    assert (
        found.likeness == 1.0 and doubted.likeness == 0.0
    )  # who asks without prompts asks about other text


def test_drafts_that_exist_have_the_targets_tokens_and_are_small():
    names = {draft.name for draft in existing_drafts(resolve_target("llama-65b"))}
    assert {"wide-796m", "sheared-llama-1.3b"} <= names and not names & {
        "llama-65b",
        "llama-33b",
        "llama-68m",
        "qwama-0.5b",
    }
    assert existing_drafts(resolve_target("smollm2-135m")) == []
