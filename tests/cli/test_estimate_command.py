"""`estimate`: drafts that exist, priced; and options that it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands import ESTIMATE, call, last_json, refused
from tests.doubles.world import TINY, make_model_folder


def test_estimate(world: Path) -> None:
    make_model_folder(
        world / "draft",
        TINY.replace(num_hidden_layers=1, hidden_size=32, num_attention_heads=2),
        weights=False,
    )
    arguments = (
        "estimate",
        "--target",
        "target",
        "--draft",
        "draft",
        "--gpu",
        "cpu",
        "--context",
        "64",
        "--alpha",
        "0.7",
    )
    text = call(*arguments, "--explain").stdout
    assert "speed-up" in text and "Note" not in text and "profile" in text
    assert "archsearch acceptance" in text and "archsearch search" not in text
    result = last_json(call(*arguments, "--json"))
    (entry,) = result["drafts"]
    assert entry["alpha"] == {"value": 0.7, "std": 0.0, "source": "given"}
    # The formula of the design: tau decode / (draft + verify + overhead); the profile's engine adds
    # 1.5 + 0.7 gamma ms.
    round_s = (
        entry["draft_s"]["value"] + entry["verify_s"]["value"] + 1.5e-3 + entry["gamma"] * 0.7e-3
    )
    assert entry["speedup"]["value"] == pytest.approx(
        entry["tau"]["value"] * entry["decode_s"]["value"] / round_s
    )
    fixed = last_json(call(*arguments, "--gamma", "3", "--json"))["drafts"][0]
    assert fixed["gamma"] == 3 and fixed["tau"]["value"] == pytest.approx((1 - 0.7**4) / 0.3)


def test_estimate_on_a_gpu_nobody_profiled_is_marked(tmp_path: Path) -> None:
    arguments = (
        "estimate",
        "--target",
        "llama-13b",
        "--draft",
        "wide-796m",
        "--draft",
        "sheared-llama-1.3b",
        "--gpu",
        "a10",
    )
    text = call(*arguments).stdout
    assert (
        "roofline" in text
        and "2 devices" in text
        and "nobody has profiled" in " ".join(text.split())
    )
    result = last_json(call(*arguments, "--json"))
    assert {entry["draft_s"]["source"] for entry in result["drafts"]} == {"roofline"}
    assert result["drafts"][0]["speedup"]["value"] >= result["drafts"][1]["speedup"]["value"]


def test_estimate_from_shipped_tables_says_where_they_come_from(tmp_path: Path) -> None:
    arguments = (
        "estimate",
        "--target",
        "llama-13b",
        "--draft",
        "wide-796m",
        "--draft",
        "sheared-llama-1.3b",
        "--gpu",
        "a100",
    )
    text = call(*arguments, "--explain").stdout
    assert (
        "graph mode" in text
        and "aiconfigurator-core 0.12.0" in text
        and "not measured by archsearch" in text
    )
    result = last_json(call(*arguments, "--json"))
    assert {entry["draft_s"]["source"] for entry in result["drafts"]} == {"modelled"}
    assert result["workload"]["mode"] == "graph" and result["workload"]["tensor_parallel"] == 1
    eager = call(*arguments, "--mode", "eager", "--alpha", "0.7", "--explain").stdout
    assert "published constant of another stack" in eager


def test_estimate_notes_another_vocabulary(world: Path) -> None:
    make_model_folder(
        world / "draft", TINY.replace(num_hidden_layers=1, vocab_size=300), weights=False
    )
    text = call("estimate", "--target", "target", "--draft", "draft", "--gpu", "cpu").stdout
    assert (
        "Note: draft: vocabulary 300, target 320: if only padding differs, vLLM takes the draft once"
        in text
    )


def test_a_draft_with_another_tokenizer_is_never_the_best() -> None:
    asked = ("estimate", "--target", "qwen2.5-7b", "--gpu", "h100", "--draft", "llama-3.2-1b")
    text = call(*asked).stdout
    assert text.startswith("llama-3.2-1b has another tokenizer than qwen2.5-7b")
    assert any(line.endswith("other tokenizer") for line in text.splitlines())
    assert "should pay" not in text and "best" not in text and "gives" not in text
    assert "has another tokenizer than the target" in refused(*asked, "--sweep", "batch")
    both = (*asked, "--draft", "qwen2.5-0.5b")  # the same tokenizer, padded to other rows
    assert "best qwen2.5-0.5b" in call(*both).stdout
    first, last = last_json(call(*both, "--json"))["drafts"]
    assert (first["draft"], last["draft"]) == ("qwen2.5-0.5b", "llama-3.2-1b")
    assert last["other_tokenizer"] and not last["pays"] and not first["other_tokenizer"]


def test_what_has_no_room_is_said_first_and_comes_last() -> None:
    asked = ("estimate", "--target", "llama-3.1-8b", "--gpu", "h100", "--batch-size", "2")
    both = (*asked, "--draft", "llama-3.1-70b", "--draft", "llama-3.2-1b")
    text = call(*both).stdout
    assert text.startswith("Speculation ") and "best llama-3.2-1b" in text
    first, last = last_json(call(*both, "--json"))["drafts"]
    assert not first["no_room"] and last["no_room"].startswith("target, draft and caches need 1")
    alone = call(*asked, "--draft", "llama-3.1-70b").stdout
    assert alone.startswith("No room: ") and "Were there room:" in alone
    assert any(line.endswith("no room") for line in alone.splitlines())


def test_a_draft_on_one_of_several_devices_is_priced_and_said_to_run_nowhere() -> None:
    asked = ("estimate", "--target", "llama-3.1-70b", "--gpu", "h100", "--tensor-parallel", "4")
    both = (*asked, "--draft", "llama-3.2-1b", "--json")
    for more, said in (((), False), (("--draft-tensor-parallel", "1"), True)):
        warnings = last_json(call(*both, *more))["warnings"]
        assert any("shards a draft as its target" in each for each in warnings) == said


def test_a_draft_whose_positions_end_before_the_context_has_no_room() -> None:
    # vLLM stops beyond them (issue 48894)
    asked = ("estimate", "--target", "llama-3.1-8b", "--gpu", "h100", "--draft", "eagle3")
    short = ("--draft", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "--context", "8192")
    text = call(*asked, *short).stdout
    assert "best eagle3" in text and "RedHatAI" in text  # of the family the first that reaches it
    assert "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B has no room: its positions end at 2,048" in (
        " ".join(text.split())
    )


def test_random_prompts_are_no_domain() -> None:
    line = refused(*ESTIMATE, "--domain", "random")
    assert "'random' is not one of 'chat', 'code'" in line


def test_how_a_head_was_trained_is_not_asked() -> None:
    asked = ("estimate", "--target", "llama-3.1-8b", "--gpu", "h100", "--training", "other")
    both = ("--draft", "llama-3.2-1b", "--draft", "eagle3")
    assert "--training is of draft models, not of eagle3" in refused(*asked, *both)


def test_a_memory_fraction_counts(tmp_path: Path) -> None:
    asked = ("--target", "llama-3.1-8b", "--gpu", "h100", "--memory-fraction", "0.1")
    priced = (*asked, "--draft", "llama-3.2-1b", "--json")
    assert last_json(call("estimate", *priced))["workload"]["tensor_parallel"] == 4
    (only,) = last_json(call("estimate", *priced, "--tensor-parallel", "1"))["drafts"]
    assert "need 17 GiB on each device, 8 are usable" in only["no_room"] and not only["pays"]
    run = ("--tensor-parallel", "1", "--run", str(tmp_path / "run"))
    assert "7.9 usable" in refused("search", *asked, *run)


def test_estimate_knows_how_catalogue_drafts_were_trained(tmp_path: Path) -> None:
    arguments = (
        "estimate",
        "--target",
        "vicuna-7b",
        "--draft",
        "llama-160m",
        "--gpu",
        "a100",
        "--domain",
        "code",
        "--json",
    )
    (entry,) = last_json(call(*arguments))["drafts"]
    (distilled,) = last_json(call(*arguments, "--training", "target"))["drafts"]
    assert (entry["training"], distilled["training"]) == ("other", "target")
    assert (
        0.38 < entry["alpha"]["value"] < 0.75
        and distilled["alpha"]["value"] > entry["alpha"]["value"] + 0.1
    )
    assert "'mine' is not one of 'target', 'shared', 'other'" in refused(
        *arguments, "--training", "mine"
    )


def test_estimate_asks_about_a_draft_that_nobody_knows(world: Path) -> None:
    make_model_folder(world / "draft", TINY.replace(num_hidden_layers=1), weights=False)
    arguments = ("estimate", "--target", "target", "--draft", "draft", "--gpu", "cpu")
    assert "nobody says how it was trained" in call(*arguments).stdout
    assert "nobody says" not in call(*arguments, "--training", "other").stdout


def test_a_measured_alpha_is_taken_as_it_is(with_run: Path) -> None:
    """A draft of a run was priced with the prior's alpha, which its own score.json knew better."""
    score = json.loads(Path("runs/a/best/1/score.json").read_text())
    assert score["alpha"]["source"] == "measured"
    call("export", "runs/a", "--output", "out")
    asked = ("estimate", "--target", "target", "--gpu", "cpu", "--context", "64", "--json")
    for folder in ("runs/a/best/1", "out"):
        (found,) = last_json(call(*asked, "--draft", folder))["drafts"]
        assert found["alpha"] == score["alpha"] and "measured it" in found["notes"][0]
    for more in (("--training", "shared"), ("--temperature", "0.5"), ("--alpha", "0.5")):
        (found,) = last_json(call(*asked, "--draft", "out", *more))["drafts"]
        assert found["alpha"]["source"] != "measured"
    marker = json.loads(Path("out/export.json").read_text())
    marker["provenance"]["run"]["arguments"]["target"] = "another"
    Path("out/export.json").write_text(json.dumps(marker))
    (found,) = last_json(call(*asked, "--draft", "out"))["drafts"]
    assert found["alpha"]["source"] != "measured"


@pytest.mark.parametrize("alpha", ["often", "1.5", "-0.1", "nan", "supernet", "distilled"])
def test_an_alpha_that_is_none(alpha: str) -> None:
    assert "--alpha" in refused(*ESTIMATE, "--alpha", alpha)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (("--context", "-1"), "--context"),
        (("--batch-size", "0"), "--batch-size"),
        (("--gamma", "0"), "--gamma"),
        (("--temperature", "-1"), "temperature must lie between 0 and 5, got -1"),
        (("--temperature", "hot"), "--temperature"),
        (("--dtype", "int3"), "unknown dtype 'int3'"),
        (
            ("--dtype", "gguf"),
            "nvfp4",
        ),  # the line lists what there is; fp8 on an A100 is a format of weights
        (("--mode", "magic"), "--mode"),
        (("--tensor-parallel", "0"), "--tensor-parallel"),
        (
            ("--tensor-parallel", "3"),
            "tensor_parallel=3",
        ),  # 40 heads of llama-13b do not divide by 3
        (("--colour", "red"), "--colour"),
        (("--engine", "warp"), "unknown engine 'warp'"),
        (("--profile", "nowhere"), "nowhere"),
    ],
    ids=lambda value: value if isinstance(value, str) else "=".join(value),
)
def test_options_out_of_range(extra: tuple[str, str], words: str) -> None:
    """Each refusal names its own option or value."""
    assert words in refused(*ESTIMATE, *extra)


def test_a_target_that_does_not_fit(tmp_path: Path) -> None:
    line = refused(
        "search", "--target", "llama-65b", "--gpu", "a100-sxm4-40gb", "--tensor-parallel", "1"
    )
    assert "--tensor-parallel" in line and not list(tmp_path.iterdir())
    line = refused("search", "--target", "llama-3.1-405b", "--gpu", "t4")
    assert "eight t4" in line and not list(tmp_path.iterdir())


def test_estimate_compares_families(tmp_path: Path) -> None:
    """The best existing drafters of three families side by side, each run as its engine runs that
    kind."""
    asked = (
        "estimate",
        "--target",
        "llama-3.1-8b",
        "--gpu",
        "h100",
        "--draft",
        "eagle3",
        "--draft",
        "llama-3.2-1b",
        "--draft",
        "ngram",
    )
    text = call(*asked, "--engine", "vllm", "--explain").stdout
    assert "Note: eagle3: the shape of yuhuili/EAGLE3-LLaMA3.1-Instruct-8B" in text
    assert "the draft's loop in one CUDA graph" in text and "drafting on the host" in text
    assert "served by vllm 0.33.0 (the newest known)." in text
    entries = {
        entry["draft"]: entry
        for entry in last_json(call(*asked, "--engine", "vllm", "--json"))["drafts"]
    }
    assert {name: entry["family"] for name, entry in entries.items()} == {
        "eagle3": "eagle3",
        "llama-3.2-1b": "independent",
        "ngram": "ngram",
    }
    assert entries["ngram"]["parameters"] == 0 and 0 < entries["ngram"]["drafter"]["share"] < 1
    assert (
        entries["eagle3"]["parameters"] == 424_689_664
        and entries["eagle3"]["drafter"]["states"] == 3
    )
    given = last_json(call(*asked, "--alpha", "0.7", "--gamma", "3", "--json"))["drafts"]
    assert {entry["gamma"] for entry in given} == {3} and {
        entry["alpha"]["value"] for entry in given
    } == {0.7}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--draft", "medusa", "--engine", "sglang"),
            "SGLang does not run medusa drafters; use vLLM",
        ),
        (("--draft", "medusa", "--gamma", "7"), "cannot draft gamma 7: at most"),
        (("--draft", "pard", "--gamma", "13"), "cannot draft gamma 13: at most 12 tokens a round"),
        (("--draft", "ngram", "--gpu", "gb10", "--tensor-parallel", "2"), "2 gb10 are 2 machines"),
        (
            ("--draft", "ngram", "--dtype", "q4_k_m"),
            "float16 prices the model in 16 bits, int4 weights",
        ),
        (("--draft", "ngram", "--dtype", "q8_0"), "int8 weights of about as many bits"),
        (
            ("--draft", "peagle", "--engine-version", "vllm=0.15.0"),
            "not known to run peagle drafters",
        ),
        (
            (
                "--draft",
                "eagel3",
            ),
            "did you mean eagle3",
        ),
        (
            ("--draft", "early_exit", "--engine", "vllm"),
            "vLLM does not run early_exit drafters; use transformers",
        ),
    ],
)
def test_estimate_refuses_families_in_one_line(
    arguments: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    assert words in refused("estimate", "--target", "llama-3.1-8b", "--gpu", "h100", *arguments)


def test_estimate_prices_heads_in_versions_without_independent_drafts(tmp_path: Path) -> None:
    """vLLM 0.10 ran EAGLE heads and refused draft models; asked for one of those it says so."""
    asked = (
        "estimate",
        "--target",
        "llama-3.1-8b",
        "--gpu",
        "h100",
        "--engine-version",
        "vllm=0.10.0",
        "--draft",
        "eagle3",
    )
    (entry,) = last_json(call(*asked, "--json"))["drafts"]
    assert (
        entry["engine_version"] == "0.10.0"
        and "waits for the accepted tokens" in entry["engine_class"]
    )
    assert "does not run such drafts" in refused(*asked, "--draft", "llama-3.2-1b")


H100 = ("estimate", "--target", "llama-3.1-8b", "--gpu", "h100")


def test_published_tokens_a_round_are_taken_as_they_are() -> None:
    given = ("--tau", "1.86", "--gamma", "3")
    drafts = last_json(call(*H100, "--draft", "eagle3", "--draft", "ngram", *given, "--json"))[
        "drafts"
    ]
    for draft in drafts:  # of lookups too, over all rounds
        assert draft["tau"]["value"] == pytest.approx(1.86, abs=1e-6) and draft["gamma"] == 3
    assert (
        "tau 1.86 at gamma 3 given" in call(*H100, "--draft", "eagle3", *given, "--explain").stdout
    )
    few = last_json(call(*H100, "--draft", "ngram", "--tau", "3.9", "--gamma", "3", "--json"))[
        "drafts"
    ]
    assert few[0]["tau"]["value"] == pytest.approx(
        3.9, abs=1e-6
    )  # more than usual matches would give in every round


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (("--tau", "1.86"), "--tau is of one gamma: say it"),
        (("--tau", "5", "--gamma", "3"), "--tau 5 at --gamma 3 must lie between 1 and 4"),
        (("--tau", "2", "--gamma", "3", "--alpha", "0.5"), "say the same"),
        (("--tau", "2", "--gamma", "3", "--sweep", "gamma"), "leave out --sweep gamma"),
        (("--trained-tokens", "0"), "--trained-tokens"),
        (("--trained-tokens", "many"), "--trained-tokens"),
    ],
)
def test_what_cannot_be_published_is_refused(more: tuple[str, ...], why: str) -> None:
    assert why in refused(*H100, "--draft", "eagle3", *more)


def test_a_head_of_unknown_training_is_wide_downwards(tmp_path: Path) -> None:
    """Heads that a course trained on 3,000 samples had tau 1.33 to 1.52, published ones 1.6 to
    2.1."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "draft_vocab_size": 32000,
    }
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    asked = (
        "estimate",
        "--target",
        "qwen3-8b",
        "--gpu",
        "h100",
        "--draft",
        str(tmp_path / "head"),
        "--gamma",
        "3",
        "--json",
    )
    unknown, told = (
        last_json(call(*asked, *more))["drafts"][0] for more in ((), ("--trained-tokens", "3e6"))
    )
    assert "--trained-tokens" in " ".join(unknown["notes"]) and "--trained-tokens" not in " ".join(
        told["notes"]
    )
    assert unknown["tau"]["low"] < 1.33 and unknown["tau"]["high"] > 2.1
    assert (
        told["tau"]["value"] < unknown["tau"]["value"]
        and told["tau"]["std"] < unknown["tau"]["std"]
    )
    (tmp_path / "head" / "training.json").write_text(json.dumps({"tokens": 3e6}))
    recorded = last_json(call(*asked))["drafts"][0]
    assert recorded["tau"]["value"] == pytest.approx(told["tau"]["value"])
