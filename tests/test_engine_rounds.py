"""Which version of an engine runs drafts how: the table's rows, versions and switches, against what
the engines' sources say."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from archsearch import engine_rounds as table
from archsearch.engine_facts import ENGINES
from archsearch.engine_rounds import (
    BEYOND,
    COSTS,
    EngineRounds,
    engine_rounds,
    known_engines,
    newest_version,
    parse_options,
    round_costs,
)
from archsearch.errors import ArchsearchError

DATA = yaml.safe_load(Path(table.__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
ROWS = [(engine, row) for engine, known in DATA["versions"].items() for row in known["rows"]]


def rounds(
    engine: str, version: str | None = None, *, drafter: str = "draft_model", **options: str
) -> EngineRounds:
    found = engine_rounds(engine, version, options, drafter)  # type: ignore[arg-type]
    assert found is not None
    return found


@pytest.mark.parametrize("name", DATA["classes"])
def test_a_class_is_whole_used_and_says_where_it_comes_from(name: str) -> None:
    costs = round_costs(name)
    assert len(costs.source) > 40 or costs.source.startswith("as "), costs.source
    assert len(costs.title) > 10 and costs.largest_batch >= 1
    assert any(row.get("class") == name for _, row in ROWS), "no version is of this class"
    for cost in COSTS:
        estimate = getattr(costs, f"{cost}_s")
        assert (
            0.0 <= estimate.value < 0.01 and 0.0 <= estimate.std < 0.01
        )  # milliseconds in the file, seconds here
    row = DATA["classes"][name]
    lookups = {"padded", "ragged_layer", "waits"}  # of drafters that do not propose in every round
    assert set(row) <= {
        "like",
        "assumed",
        "title",
        "graph",
        "order",
        "first_tokens",
        "largest_batch",
        "source",
        "row",
        "row_token",
        "expands",
        "tree_step",
        "gap",
        "host_scatter",
        "ungraphed_layer",
        *COSTS,
        *lookups,
    }
    assert "like" in row or set(COSTS) - set(row) <= {"host_target_layer"}, (
        "a class without a model says every cost"
    )


@pytest.mark.parametrize("engine", known_engines())
@pytest.mark.parametrize("drafter", ["draft_model", "feature_head"])
def test_every_version_has_a_row(engine: str, drafter: str) -> None:
    known = DATA["versions"][engine]
    assert engine in ENGINES and len(known["source"]) > 20
    bounds = {str(row["below"]) for row in known["rows"] if "below" in row}
    for version in sorted({*bounds, known["oldest"], known["newest"], "0.0.1", "999.0"}):
        try:
            found = rounds(engine, version, drafter=drafter)
        except ArchsearchError as error:
            assert "does not run such drafts" in str(error) and version in str(error)
        else:
            assert found.version == version and found.costs.name in DATA["classes"]
    for _, row in (item for item in ROWS if item[0] == engine):
        assert set(row) <= {
            "drafter",
            "below",
            "options",
            "class",
            "refused",
            "eager",
            "why",
            "remedy",
            "remedy_options",
            "tree",
        }
        assert set(row.get("options", {})) <= set(known.get("options", {}))


# Graphs of a draft in vLLM by version, and whether scheduling runs ahead of the GPU (from the
# sources that the table names).
@pytest.mark.parametrize(
    ("version", "draft", "head"),
    [
        ("0.10.1", None, "vllm-head-serial"),  # drafting waits for the accepted tokens
        ("0.10.2", None, "vllm-head-none-sync"),
        ("0.11.0", None, "vllm-head-piecewise-sync"),
        ("0.14.1", None, "vllm-head-piecewise-async"),
        ("0.15.0", "vllm-none-sync", "vllm-head-piecewise-async"),
        ("0.16.0", "vllm-none-sync", "vllm-head-piecewise-async"),
        ("0.25.1", "vllm-none-sync", "vllm-head-full"),
        ("0.26.0", "vllm-piecewise-sync", "vllm-head-full"),
        ("0.27.1", "vllm-piecewise-async", "vllm-head-full"),
        ("0.30.0", "vllm-piecewise-async", "vllm-head-full"),
        ("0.31.0", "vllm-none-async", "vllm-head-full"),
        ("0.33.0", "vllm-none-async", "vllm-head-full"),
    ],
)
def test_vllm_by_version(version: str, draft: str | None, head: str) -> None:
    assert rounds("vllm", version, drafter="feature_head").costs.name == head
    if draft is None:
        with pytest.raises(
            ArchsearchError,
            match=r"from 0\.15 on, before that EAGLE heads; choose another --engine-version",
        ):
            engine_rounds("vllm", version)
    else:
        assert rounds("vllm", version).costs.name == draft


@pytest.mark.parametrize(
    ("engine", "version", "options", "name"),
    [
        ("vllm", "0.33.0", {"VLLM_USE_V2_MODEL_RUNNER": "0"}, "vllm-piecewise-async"),
        ("vllm", "0.33.0", {"VLLM_USE_V2_MODEL_RUNNER": "1"}, "vllm-none-async"),
        (
            "vllm",
            "0.33.0",
            {"VLLM_USE_V2_MODEL_RUNNER": "0", "async_scheduling": "0"},
            "vllm-piecewise-sync",
        ),
        (
            "vllm",
            "0.33.0",
            {"VLLM_USE_V2_MODEL_RUNNER": "1", "async_scheduling": "0"},
            "vllm-none-sync",
        ),
        ("vllm", "0.20.0", {"async_scheduling": "1"}, "vllm-none-async"),
        ("vllm", "0.28.0", {"async_scheduling": "0"}, "vllm-piecewise-sync"),
        ("vllm", "0.26.0", {"enforce_eager": "1"}, "vllm-none-sync"),
        ("vllm", "0.26.0", {"enforce_eager": "1", "async_scheduling": "1"}, "vllm-none-async"),
        (
            "vllm",
            "0.28.0",
            {"enforce_eager": "1"},
            "vllm-none-async",
        ),  # scheduling is asynchronous by default from 0.27.1 on
        ("vllm", "0.33.0", {"enforce_eager": "1", "async_scheduling": "0"}, "vllm-none-sync"),
        ("sglang", "0.5.9", {}, "sglang-sync"),
        ("sglang", "0.5.9", {"SGLANG_ENABLE_SPEC_V2": "1"}, "sglang-overlap"),
        ("sglang", "0.5.23", {}, "sglang-overlap"),
        ("sglang", "0.5.23", {"disable_overlap_schedule": "1"}, "sglang-sync"),
        ("sglang", "0.5.23", {"disable_cuda_graph": "1"}, "sglang-none"),
        ("tensorrt-llm", "1.0", {}, "tensorrt-llm-two-model"),
        ("tensorrt-llm", "1.3.0", {}, "tensorrt-llm-one-model"),
        ("transformers", "4.50", {}, "transformers"),
        ("llama.cpp", "2025.1", {}, "llama-cpp"),
    ],
)
def test_switches_and_other_engines(
    engine: str, version: str, options: dict[str, str], name: str
) -> None:
    assert rounds(engine, version, **options).costs.name == name


def test_without_graphs_there_is_a_remedy_and_it_has_graphs() -> None:
    newest = rounds("vllm")
    assert newest.version == newest_version("vllm") and newest.costs.graph == "none"
    assert (
        "runner" in newest.without_graphs
        and newest.remedy_words() == "set VLLM_USE_V2_MODEL_RUNNER=0"
    )
    mended = newest.remedied()
    assert (
        mended is not None
        and mended.costs.graph == "piecewise"
        and mended.version == newest.version
    )
    old = rounds("vllm", "0.16.0")
    assert old.remedy_words() == "use vllm 0.30.0"
    assert old.remedied() == rounds("vllm", "0.30.0")
    for engine, row in ROWS:  # a remedy of the table mends what it is for
        if "remedy" in row or "remedy_options" in row:
            version = row.get("remedy", newest_version(engine))
            found = rounds(
                engine,
                str(version),
                drafter=row.get("drafter", "draft_model"),
                **row.get("remedy_options", {}),
            )
            assert found.costs.graph != "none" and not found.without_graphs
    eager = rounds("vllm", enforce_eager="1")
    assert (
        eager.without_graphs == "enforce_eager"
        and eager.remedied() is None
        and eager.remedy_words() == ""
    )


def test_rows_beyond_the_largest_graph_have_a_remedy() -> None:
    newest = rounds("vllm", drafter="feature_head")
    assert newest.for_rows(512) == newest and newest.remedy is None
    beyond = newest.for_rows(515)
    assert beyond.remedy_words() == "set max_cudagraph_capture_size=1024"
    mended = beyond.remedied()
    assert mended is not None and mended.costs.largest_graph == 1024
    both = rounds("vllm").for_rows(1200).remedy_words()
    assert both == "set VLLM_USE_V2_MODEL_RUNNER=0 and set max_cudagraph_capture_size=2048"
    eager = rounds("vllm", enforce_eager="1")
    older = rounds("vllm", "0.11.0", drafter="feature_head")  # the option came with 0.11.1
    sglang = rounds("sglang", drafter="feature_head")
    assert all(each.for_rows(1200) == each for each in (eager, older, sglang))


def test_an_eager_engine_launches_the_target_too() -> None:
    eager, graphs = rounds("vllm", "0.28.0", enforce_eager="1"), rounds("vllm", "0.28.0")
    assert eager.eager and "target" in eager.costs.title
    assert (
        eager.costs.host_target_layer_s == eager.costs.host_layer_s
        and graphs.costs.host_target_layer_s.value == 0.0
    )


def test_an_unknown_version_is_answered_by_the_nearest_and_says_so() -> None:
    assert rounds("vllm", "0.33.4").note == "", "a patch release is no news"
    newer = rounds("vllm", "0.40.0")
    assert (
        newer.costs == rounds("vllm").costs
        and "newer than what is known here (0.33.0)" in newer.note
    )
    older = rounds(
        "sglang", "0.3.0", drafter="feature_head"
    )  # independent drafts are refused there
    assert (
        older.costs == rounds("sglang", "0.4.4", drafter="feature_head").costs
        and "older than what is known here (0.4.4)" in older.note
    )
    assert rounds("vllm", "0.32.0+cu129").costs.name == "vllm-none-async"
    assert engine_rounds("openvino") is None and engine_rounds("mine", "1.0") is None


@pytest.mark.parametrize("text", ["newest", "v-1", "", "0.3x3"])
def test_what_is_no_version(text: str) -> None:
    with pytest.raises(
        ArchsearchError, match=r"is no version of vllm; write it as in --engine-version 0\.33\.0"
    ):
        table.parse_version("vllm", text)


def test_an_empty_version_is_none_and_no_default() -> None:
    with pytest.raises(ArchsearchError, match=r"'' is no version of vllm"):
        engine_rounds("vllm", "")


def test_a_switch_given_two_values_is_refused() -> None:
    with pytest.raises(
        ArchsearchError, match=r"async_scheduling was given as 1 and as 0; leave one out"
    ):
        table.parse_options("vllm", ("async_scheduling=true", "async_scheduling=0"))
    assert table.parse_options("vllm", ("async_scheduling=true", "async_scheduling=1")) == {
        "async_scheduling": "1"
    }


def test_vllm_0_15_refuses_independent_drafts_with_asynchronous_scheduling() -> None:
    with pytest.raises(
        ArchsearchError, match=r"vllm 0\.15\.1 does not run such drafts: 0\.15 refuses asynchronous"
    ):
        engine_rounds("vllm", "0.15.1", {"async_scheduling": "1"})
    assert rounds("vllm", "0.16.0", async_scheduling="1").costs.name == "vllm-none-async"


@pytest.mark.parametrize(
    ("engine", "version", "options", "fused"),
    [
        ("vllm", "0.16.0", {}, False),
        ("vllm", "0.16.0", {"fuse_allreduce_rms": "1"}, True),
        ("vllm", "0.17.0", {}, True),
        ("vllm", "0.33.0", {"fuse_allreduce_rms": "0"}, False),
        ("tensorrt-llm", "1.0", {}, False),
        ("tensorrt-llm", "1.3.0", {}, True),
        ("sglang", "0.5.23", {}, False),
        ("transformers", "5.23.0", {}, False),
    ],
)
def test_who_runs_an_all_reduce_and_a_norm_as_one_kernel(
    engine: str, version: str, options: dict[str, str], fused: bool
) -> None:
    assert rounds(engine, version, **options).fuses_reduces is fused


def test_sglang_quantises_by_a_kernel_of_its_own() -> None:
    assert rounds("sglang", "0.5.23").quantise_s.value == pytest.approx(5.1e-6)
    assert rounds("vllm", "0.33.0").quantise_s.value == 0.0


def test_switches_are_checked() -> None:
    assert table.parse_options("vllm", ("async_scheduling=True", "VLLM_USE_V2_MODEL_RUNNER=0")) == {
        "async_scheduling": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
    with pytest.raises(
        ArchsearchError,
        match="vllm has no switch 'cuda_graphs' here; it knows VLLM_USE_V2_MODEL_RUNNER",
    ):
        table.parse_options("vllm", ("cuda_graphs=1",))
    with pytest.raises(ArchsearchError, match="enforce_eager is 0 or 1, not 'maybe'"):
        table.parse_options("vllm", ("enforce_eager=maybe",))
    with pytest.raises(ArchsearchError, match="none is known for llama.cpp"):
        table.parse_options("llama.cpp", ("graphs=1",))


@pytest.mark.parametrize(
    ("text", "version"), [("vllm 0.32.0+cpu", "0.32.0"), ("0.5.9", "0.5.9"), ("no version", None)]
)
def test_the_version_in_what_an_engine_prints(text: str, version: str | None) -> None:
    assert table.version_in(text) == version


def test_the_first_pass_of_a_round() -> None:
    assert rounds("vllm").costs.first_pass_tokens(4) == 6, "the verified block and one more"
    assert rounds("vllm", drafter="feature_head").costs.first_pass_tokens(4) == 5
    assert rounds("transformers").costs.first_pass_tokens(4) == 1


def test_bands_grow_beyond_the_batches_that_were_measured() -> None:
    costs, plain = rounds("vllm").costs, rounds("vllm").plain
    assert (
        costs.band(1) == costs.band(costs.largest_batch) == 1.0
        and costs.band(2 * costs.largest_batch)
        == BEYOND
        > costs.band(costs.largest_batch + 1)
        > 1.0
    )
    assert plain.at(256).std > BEYOND * plain.at(64).std
    assert rounds("llama.cpp").plain.at(8).value == 0.0


def test_where_an_engine_drafts_trees_it_is_said() -> None:
    older, chain, newer = (
        engine_rounds("sglang", version, options, drafter="feature_head")
        for version, options in (
            ("0.4.5", None),
            ("0.5.9", {"SGLANG_ENABLE_SPEC_V2": "1"}),
            ("0.5.23", None),
        )
    )
    assert older is not None and chain is not None and newer is not None
    assert "tree" in older.tree and not chain.tree and not newer.tree


def test_a_cache_is_of_16_bits_unless_told() -> None:
    fp8 = "float8_e4m3fn"
    for engine, options, cache in (
        ("vllm", {}, "bfloat16"),
        ("vllm", {"kv_cache_dtype": "fp8"}, fp8),
        ("sglang", {"kv_cache_dtype": "auto"}, "bfloat16"),
        ("tensorrt-llm", {}, fp8),
    ):
        found = engine_rounds(engine, options=options)
        assert (
            found is not None
            and found.cache_dtype(fp8) == cache
            and found.cache_dtype("bfloat16") == (fp8 if "fp8" in options.values() else "bfloat16")
        )


@pytest.mark.parametrize("text", ["quick", "0", "-1", "nan", "1e9"])
def test_a_host_is_a_name_or_a_factor(text: str) -> None:
    with pytest.raises(ArchsearchError, match="a host is fast, usual, slow or a factor"):
        engine_rounds("vllm", options={"host": text})


def test_a_number_of_rows_is_a_number() -> None:
    assert parse_options("vllm", ("max_cudagraph_capture_size=1024",)) == {
        "max_cudagraph_capture_size": "1024"
    }
    with pytest.raises(ArchsearchError, match="number of rows"):
        parse_options("vllm", ("max_cudagraph_capture_size=all",))
