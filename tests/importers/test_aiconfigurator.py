"""Profiles composed from kernel tables: the right rows, honest labels, and words for every broken
table."""

from __future__ import annotations

import importlib.util
import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archsearch.architecture.ops import AllReduce, Attention, Gemm
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.hardware.device import load_device
from archsearch.importers import aiconfigurator
from archsearch.importers.aiconfigurator import (
    disagreement,
    find_tables,
    import_profile,
    import_tables,
    stack_folder,
)
from archsearch.importers.compact import Candidates, choose, compress
from archsearch.latency.ops import op_of
from archsearch.profiles import Measurement, Profile, find_profile, freeze_shape
from archsearch.workload import DTYPE_BYTES
from benchmarks.compose_profiles import errors, predict

A100 = load_device("a100")
ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("a100-sxm4-80gb", "h100-sxm5-80gb", "h200-sxm-141gb", "b200-sxm")
LABELS = {
    "framework": "VLLM",
    "version": "0.14.0",
    "device": A100.name,
    "op_name": "x",
    "kernel_source": "some_kernel",
}
Row = dict[str, Any]


def gemm(m: int, n: int, k: int, ms: float, **more: Any) -> Row:
    return LABELS | {"gemm_dtype": "bfloat16", "m": m, "n": n, "k": k, "latency": ms} | more


def attention(batch: int, isl: int, step: int, ms: float, **more: Any) -> Row:
    sizes = {
        "batch_size": batch,
        "isl": isl,
        "num_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "beam_width": 1,
    }
    types = {"attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}
    return LABELS | sizes | types | {"step": step, "latency": ms} | more


def all_reduce(ranks: int, size: int, ms: float, mode: str = "graph", **more: Any) -> Row:
    source = {
        "kernel_source": f"vLLM_custom_{mode}",
        "backend": f"vllm_{mode}",
        "allreduce_dtype": "bfloat16",
    }
    return LABELS | source | {"num_gpus": ranks, "message_size": size, "latency": ms} | more


GEMMS = [
    gemm(m, n, 4096, 0.004 + n * 4096 * 2 / 1.5e9)
    for m in (1, 2, 4, 8, 16)
    for n in (256, 1024, 4096, 16384)
]
DECODES = [
    attention(batch, 1, step, 0.01 + batch * step / 1e6)
    for batch in (1, 4)
    for step in (1, 127, 1023)
]
CONTEXTS = [attention(1, isl, 0, 0.02) for isl in (16, 128)]
REDUCES = [
    all_reduce(4, 2**power, 0.005 + 2**power / 1e8, mode)
    for power in range(7, 14)
    for mode in ("graph", "eager")
]
GEMM, DECODE, CONTEXT, REDUCE = (
    "gemm/vllm/0.14.0/gemm_perf.parquet",
    "attention/vllm/0.14.0/generation_attention_perf.parquet",
    "attention/vllm/0.14.0/context_attention_perf.parquet",
    "comm/vllm/0.14.0/custom_allreduce_perf.parquet",
)


def write(path: Path, rows: list[Row]) -> Path:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.Table.from_pylist(rows), path)
    return path


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """The tables of one small A100; its files are overwritten by the tests."""
    folder = tmp_path / "site/aiconfigurator_core/systems/data/a100_sxm"
    for file, rows in ((GEMM, GEMMS), (DECODE, DECODES), (CONTEXT, CONTEXTS), (REDUCE, REDUCES)):
        write(folder / file, rows)
    return folder


def read(system: Path, **options: Any) -> Profile:
    return import_tables(A100, data=system.parent, **options)


def times(profile: Profile) -> dict[tuple[Any, str, str], float]:
    make = {"gemm": Gemm, "attention": Attention, "all_reduce": AllReduce}
    return {
        (make[row.kind](**row.sizes()), row.mode, row.cache): row.median_s
        for row in profile.rows.values()
    }


def test_rows_become_ops_in_seconds(system: Path) -> None:
    found = times(read(system, compact=False))
    assert len(found) == len(GEMMS) + len(DECODES) + len(CONTEXTS) + len(REDUCES)
    assert found[Gemm(8, 16384, 4096), "graph", "cold"] == pytest.approx(
        0.004e-3 + 16384 * 4096 * 2 / 1.5e12
    )
    # A decode row with `step` keys cached reads step + 1 of them; a context row starts from
    # nothing.
    assert found[Attention(4, 1, 1023, 32, 8, 128, None), "graph", "cold"] == pytest.approx(
        (0.01 + 4 * 1023 / 1e6) * 1e-3
    )
    assert found[Attention(1, 128, 0, 32, 8, 128, None), "graph", "cold"] == pytest.approx(2e-5)
    assert (
        found[AllReduce(8192, 4), "eager", "cold"]
        == found[AllReduce(8192, 4), "graph", "cold"]
        == pytest.approx((0.005 + 8192 / 1e8) * 1e-3)
    )


def test_small_weights_are_marked_warm_at_a_sixth_of_the_cache(system: Path) -> None:
    # A100: 40 MiB of L2 hold six copies of up to 6.67 MiB: 1024 x 3413 bfloat16 is just below, 1024
    # x 3414 above.
    write(system / GEMM, [gemm(1, 1024, 3413, 0.01), gemm(1, 1024, 3414, 0.01)])
    found = times(read(system, compact=False))
    assert (Gemm(1, 1024, 3413), "graph", "warm") in found
    assert (Gemm(1, 1024, 3414), "graph", "cold") in found
    assert read(system).provenance["weights_cached_below_bytes"] == 40 * 2**20 // 6


def test_rows_faster_than_the_memory_are_left_out(system: Path) -> None:
    # 16384 x 4096 x 2 bytes at 2.039 TB/s take 65.8 us.
    write(system / GEMM, [gemm(1, 16384, 4096, 0.0655), gemm(2, 16384, 4096, 0.0665)])
    profile = read(system, compact=False)
    assert [row.sizes()["m"] for row in profile.rows.values() if row.kind == "gemm"] == [2]
    assert profile.provenance["rows_ignored"]["gemm"] == {"faster than the memory": 1}


def test_rows_of_one_token_that_were_disturbed_are_left_out_where_most_were(system: Path) -> None:
    def table(slow: int) -> list[Row]:
        """Ten matrices; in the first `slow` of them one token takes 14 us more."""
        sizes = [(m, 256 * i) for i in range(1, 11) for m in (1, 2, 4, 8, 16)]
        return [
            gemm(m, n, 4096, 0.004 + n * 4096 * 2 / 1.5e9 + 0.014 * (m == 1 and n <= 256 * slow))
            for m, n in sizes
        ]

    write(system / GEMM, table(8))
    profile = read(system, compact=False)
    ones = {
        row.sizes()["n"]
        for row in profile.rows.values()
        if row.kind == "gemm" and row.sizes()["m"] == 1
    }
    assert ones == {256 * 9, 256 * 10} and profile.provenance["rows_ignored"]["gemm"] == {
        "one token, disturbed": 8
    }
    write(system / GEMM, table(4))  # few: a matrix may have a slow kernel for one token
    assert "gemm" not in read(system, compact=False).provenance["rows_ignored"]


def test_windows_and_other_dtypes(system: Path) -> None:
    windowed = [row | {"window_size": window} for row in DECODES for window in (0, 128)]
    write(
        system / DECODE,
        [*windowed, DECODES[0] | {"window_size": 0, "kv_cache_dtype": "fp8", "latency": 99.0}],
    )
    found = times(read(system, compact=False))
    assert (Attention(1, 1, 1023, 32, 8, 128, 128), "graph", "cold") in found
    assert (Attention(1, 1, 1023, 32, 8, 128, None), "graph", "cold") in found
    assert max(found.values()) < 1e-3, "an fp8 cache is another dtype"


def test_repeated_shapes_give_their_median_and_few_bad_rows_are_counted(system: Path) -> None:
    extra = [gemm(1, 256, 4096, 0.020), gemm(1, 256, 4096, 0.030), gemm(3, 256, 4096, math.nan)]
    write(system / GEMM, [*GEMMS, *extra])
    profile = read(system, compact=False)
    # 5.4 us of the formula, 20 and 30: the median is 20.
    assert times(profile)[Gemm(1, 256, 4096), "graph", "warm"] == pytest.approx(20e-6)
    assert profile.provenance["rows_ignored"]["gemm"] == {
        "unusable": 1,
        "repeated shapes (median taken)": 2,
    }
    assert profile.provenance["rows_available"]["gemm"] == len(GEMMS) + 3


def test_an_isolated_all_reduce_spike_is_left_out(system: Path) -> None:
    slow = [
        (
            row | {"latency": 0.0149}
            if (row["message_size"], row["backend"]) == (2048, "vllm_graph")
            else row
        )
        for row in REDUCES
    ]
    write(system / REDUCE, slow)
    profile = read(system, compact=False)
    found = times(profile)
    assert (AllReduce(2048, 4), "graph", "cold") not in found
    assert (AllReduce(2048, 4), "eager", "cold") in found
    assert profile.provenance["rows_ignored"]["all_reduce"] == {"spikes": 1}


def test_provenance_names_the_source_and_its_limits(system: Path) -> None:
    site = system.parents[3]
    (site / "aiconfigurator_core-0.12.0.dist-info").mkdir()
    (site / "aiconfigurator_core-0.12.0.dist-info/METADATA").write_text(
        "Name: aiconfigurator-core\nVersion: 0.12.0\n"
    )
    profile = read(system)
    told = profile.provenance
    assert profile.stack == {"aiconfigurator-core": "0.12.0", "vllm": "0.14.0"}
    assert stack_folder(profile) == "aiconfigurator-0.12.0-vllm-0.14.0"
    assert (told["package"], told["licence"], told["device_name"]) == (
        "aiconfigurator-core",
        "Apache-2.0",
        A100.name,
    )
    assert "NVIDIA" in told["copyright"] and "CUDA graphs" in told["how"]
    assert any("verification" in text for text in told["not_in_tables"])
    assert told["kernel_sources"]["gemm"] == ["some_kernel"]
    assert "not measured by archsearch" in profile.origin and "vLLM 0.14.0" in profile.origin
    json.dumps(profile.header())


def test_row_std_is_the_noise_of_one_row() -> None:
    # Two campaigns with 3 % noise each and a 10 % offset: the std of one row is 3 %, the offset is
    # told apart.
    noise = random.Random(1)
    keys = range(4000)
    ours = {key: 1e-3 * math.exp(noise.gauss(0, 0.03)) for key in keys}
    theirs = {key: 1.1e-3 * math.exp(noise.gauss(0, 0.03)) for key in keys}
    std, found = disagreement(ours, {"other 1.0": theirs}, lambda key: True)
    assert std == pytest.approx(0.03, rel=0.06)
    assert found["other 1.0"].ratio == pytest.approx(1.1, rel=0.01)
    assert disagreement(ours, {"other 1.0": {}}, lambda key: True) == (0.0, {})


def test_other_frameworks_give_the_std(system: Path) -> None:
    noise = random.Random(2)
    many = [
        gemm(m, n, 4096, 0.01 + n / 1e5) for m in (1, 2, 4, 8, 16) for n in range(256, 8192, 256)
    ]
    write(system / GEMM, many)
    factors = [math.exp(noise.gauss(0, 0.05)) for _ in many]
    other = [
        row | {"version": "1.0.0", "latency": row["latency"] * f}
        for row, f in zip(many, factors, strict=True)
    ]
    write(system / "gemm/trtllm/1.0.0/gemm_perf.parquet", other)
    profile = read(system, compact=False)
    assert profile.provenance["row_relative_std"]["gemm"] == pytest.approx(
        0.05 / math.sqrt(2), rel=0.25
    )
    assert profile.provenance["frameworks_compared"]["gemm"]["trtllm 1.0.0"]["shapes"] == len(many)


def test_old_all_reduce_rows_and_broken_rivals_stop_nobody(system: Path) -> None:
    write(system / REDUCE, [row | {"version": "0.9.1"} for row in REDUCES])
    (system / "gemm/trtllm/1.0.0").mkdir(parents=True)
    (system / "gemm/trtllm/1.0.0/gemm_perf.parquet").write_bytes(b"PAR1 cut short")
    told = read(system).provenance
    assert told["table_versions"] == {
        "gemm": "0.14.0",
        "decode": "0.14.0",
        "context": "0.14.0",
        "all_reduce": "0.9.1",
    }
    assert "gemm" not in told["frameworks_compared"]


def test_the_newest_complete_version_is_taken(system: Path) -> None:
    for version in ("0.9.1", "0.24.0"):
        write(
            system / GEMM.replace("0.14.0", version),
            [row | {"version": version, "latency": 1.0} for row in GEMMS],
        )
    write(
        system / DECODE.replace("0.14.0", "0.9.1"), [row | {"version": "0.9.1"} for row in DECODES]
    )
    assert (
        read(system).stack["vllm"] == "0.14.0"
    )  # 0.24.0 has no attention, 0.9.1 is older than 0.14.0
    write(
        system / DECODE.replace("0.14.0", "0.24.0"),
        [row | {"version": "0.24.0"} for row in DECODES],
    )
    assert read(system).stack["vllm"] == "0.24.0"


def test_a_folder_whose_name_is_no_version_is_never_the_newest(system: Path) -> None:
    for file, rows in ((GEMM, GEMMS), (DECODE, DECODES)):
        write(system / file.replace("0.14.0", "latest"), rows)
    assert read(system).stack["vllm"] == "0.14.0"


@pytest.mark.parametrize(
    ("file", "rows", "words"),
    [
        (GEMM, [row | {"latency": -1.0} for row in GEMMS], "20 of 20 rows are negative"),
        (GEMM, [row | {"latency": math.nan} for row in GEMMS], "NaN"),
        (GEMM, [row | {"n": 0} for row in GEMMS], "no whole sizes"),
        (GEMM, [row | {"latency": "fast"} for row in GEMMS], "column latency holds string"),
        (
            GEMM,
            [{key: value for key, value in row.items() if key != "n"} for row in GEMMS],
            "has no column n",
        ),
        (
            GEMM,
            [row | {"device": "NVIDIA H100 80GB HBM3"} for row in GEMMS],
            "was measured on NVIDIA H100 80GB HBM3",
        ),
        (GEMM, [row | {"version": "0.15.0"} for row in GEMMS], "rows of version 0.15.0"),
        (GEMM, [row | {"gemm_dtype": "int8_wo"} for row in GEMMS], "has no bfloat16 rows"),
        (DECODE, [row | {"latency": None} for row in DECODES[:-1]] + DECODES[-1:], "5 of 6 rows"),
        (REDUCE, [row | {"num_gpus": 2.5} for row in REDUCES], "no whole sizes"),
    ],
)
def test_broken_tables_are_one_line_with_the_file(
    system: Path, file: str, rows: list[Row], words: str
) -> None:
    path = write(system / file, rows)
    with pytest.raises(ArchsearchError) as caught:
        read(system)
    assert words in str(caught.value) and path.name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_truncated_empty_and_missing_files(system: Path) -> None:
    path = system / GEMM
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b""):
        path.write_bytes(content)
        with pytest.raises(ArchsearchError, match=r"gemm_perf.parquet cannot be read"):
            read(system)
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(GEMMS).slice(0, 0), path)
    with pytest.raises(ArchsearchError, match=r"gemm_perf.parquet is empty"):
        read(system)
    path.write_bytes(whole)
    (system / DECODE).unlink()
    with pytest.raises(ArchsearchError, match="no gemm and attention tables of vllm"):
        read(system)


def test_context_and_all_reduce_tables_may_be_absent(system: Path) -> None:
    (system / CONTEXT).unlink()
    (system / REDUCE).unlink()
    assert {row.kind for row in read(system).rows.values()} == {"gemm", "attention"}


def test_what_the_tables_do_not_have_is_said(system: Path) -> None:
    for options, words in (
        ({"framework": "ollama"}, "unknown framework 'ollama'"),
        ({"framework": "sglang"}, "one of vllm"),
        ({"dtypes": ("fp8",)}, "no kernel tables of a100-sxm4-80gb in float8_e4m3fn"),
        ({"dtypes": ("float32",)}, "use one of bfloat16, float16"),
    ):
        with pytest.raises(ArchsearchError, match=words):
            read(system, **options)
    with pytest.raises(ArchsearchError, match="no measured kernel tables of t4"):
        import_tables(load_device("t4"), data=system.parent)


def test_tables_are_found_from_any_folder_above_and_no_other(system: Path, tmp_path: Path) -> None:
    for folder in (system.parents[0], system.parents[1], system.parents[2], system.parents[3]):
        assert find_tables(folder) == (system.parent, "unknown")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArchsearchError, match="no kernel tables in"):
        find_tables(tmp_path / "empty")
    with pytest.raises(ArchsearchError, match="no folder"):
        find_tables(tmp_path / "nowhere")
    info = system.parents[3] / "aiconfigurator_core-0.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: aiconfigurator-core\nVersion: 0.13.0\n")
    with pytest.raises(
        ArchsearchError,
        match="is aiconfigurator-core 0.13.0; its tables are read in version 0.12.0",
    ):
        find_tables(system.parent)


def test_without_the_package_or_pyarrow_the_extra_is_named(
    system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        MissingDataError, match=r'pip install "archsearch\[aiconfigurator\]", or pass --tables'
    ):
        find_tables()
    for name in [name for name in sys.modules if name.split(".")[0] == "pyarrow"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingDataError, match=r"needs pyarrow; run pip install"):
        read(system)


def test_a_profile_is_written_whole_and_only_over_its_own_kind(
    system: Path, tmp_path: Path
) -> None:
    root = tmp_path / "profiles"
    first = import_profile("a100", data=system.parent, root=root)
    assert first.folder == root / "a100-sxm4-80gb" / "aiconfigurator-unknown-vllm-0.14.0"
    read_back = Profile.load(first.folder)
    assert read_back.provenance == first.provenance
    assert {key: float(f"{row.median_s:.4g}") for key, row in first.rows.items()} == {
        key: row.median_s for key, row in read_back.rows.items()
    }
    write(system / GEMM, GEMMS[:10])
    again = import_profile("a100", data=system.parent, root=root)
    assert len(Profile.load(first.folder).rows) == len(again.rows) < len(first.rows)
    assert [path.name for path in first.folder.parent.iterdir()] == [first.folder.name], (
        "nothing is left beside it"
    )

    measured = tmp_path / "measured"
    Profile.open(measured, A100.to_dict(), {"torch": "2"}).record(
        Measurement(
            "gemm", freeze_shape({"m": 1, "n": 64, "k": 64}), "bfloat16", "graph", "cold", (1e-5,)
        )
    )
    before = (measured / "rows.jsonl").read_bytes(), (measured / "profile.json").read_bytes()
    with pytest.raises(ArchsearchError, match="measured by archsearch; pass another --output"):
        import_profile("a100", data=system.parent, output=measured)
    assert before == (
        (measured / "rows.jsonl").read_bytes(),
        (measured / "profile.json").read_bytes(),
    )
    with pytest.raises(ArchsearchError, match="is not a profile"):
        import_profile("a100", data=system.parent, output=system)


def test_a_failed_write_leaves_the_old_profile(
    system: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = import_profile("a100", data=system.parent, output=tmp_path / "p")
    before = (tmp_path / "p/rows.jsonl").read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(ArchsearchError, match="No space left on device"):
        aiconfigurator.write_profile(profile, tmp_path / "p")
    assert (tmp_path / "p/rows.jsonl").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p", "site"]


# --- choosing rows
# --------------------------------------------------------------------------------------------------


def smooth_table(seed: int = 0, noise: float = 0.0) -> dict[tuple[Any, str], float]:
    """Weights at 80 % of 2 TB/s plus 3 us, with a step in n and a bump in m that no base time
    knows."""
    draw = random.Random(seed)
    sizes = (64, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384)
    return {
        (Gemm(m, n, k), "graph"): (
            (3e-6 + n * k * 2 / 1.6e12)
            * (1.25 if n >= 4096 else 1.0)
            * (1 + 0.1 * math.sin(math.log2(m)))
            * math.exp(draw.gauss(0, noise))
        )
        for m in (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
        for n in sizes
        for k in sizes
    }


def test_chosen_rows_tell_the_rest_better_than_random_ones() -> None:
    table = smooth_table(noise=0.01)
    keys = list(table)
    random.Random(3).shuffle(keys)
    seen, unseen = {key: table[key] for key in keys[:800]}, {key: table[key] for key in keys[800:]}
    kept = compress(seen, 120)
    assert len(kept) == 120 and kept.items() <= seen.items()
    rest = {key: seconds for key, seconds in seen.items() if key not in kept}
    assert errors(kept, rest)["all"].rows == 680
    rivals = [
        errors({key: table[key] for key in random.Random(seed).sample(keys[:800], 120)}, unseen)
        for seed in range(3)
    ]
    ours = errors(kept, unseen)["all"]
    assert ours.median_error < 0.03
    assert ours.median_error <= min(rival["all"].median_error for rival in rivals)


def test_choose_keeps_what_must_come_first_and_never_repeats() -> None:
    whole = Candidates.of(smooth_table())
    rows = Candidates(whole.inputs[::4], whole.features[::4], whole.times_s[::4])
    first = np.zeros(len(rows.times_s), dtype=bool)
    first[[5, 170, 270]] = True
    chosen = choose(rows, first, 30)
    assert {5, 170, 270} <= set(chosen) and len(set(chosen)) == 30
    assert list(choose(rows, first, 30)) == list(chosen), "the choice is repeatable"
    assert list(choose(rows, first, 2)) == [5, 170]
    assert len(choose(rows, first, 10**6)) == len(rows.times_s)


def test_prediction_returns_known_rows() -> None:
    rows = Candidates.of(smooth_table())
    part = Candidates(rows.inputs[::5], rows.features[::5], rows.times_s[::5])
    assert predict(part, part) == pytest.approx(part.times_s, rel=0.05)


# --- the profiles that ship
# ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shipped() -> dict[str, Profile]:
    found = {}
    for key in SHIPPED:
        folders = list((ROOT / "profiles" / key).glob("aiconfigurator-*"))
        assert len(folders) == 1, f"{key}: {folders}"
        found[key] = Profile.load(folders[0])
    return found


@pytest.mark.parametrize("key", SHIPPED)
def test_shipped_profiles_say_where_they_come_from(shipped: dict[str, Profile], key: str) -> None:
    profile = shipped[key]
    told = profile.provenance
    assert profile.device["key"] == key and told["device_name"] == load_device(key).name
    assert (told["package"], told["version"], told["licence"]) == (
        "aiconfigurator-core",
        "0.12.0",
        "Apache-2.0",
    )
    assert (
        "NVIDIA CORPORATION" in told["copyright"] and "not measured by archsearch" in profile.origin
    )
    assert profile.folder is not None and profile.folder.name == stack_folder(profile)
    assert set(told["row_relative_std"]) == {"gemm", "attention", "all_reduce"}
    assert all(0.005 < std < 0.3 for std in told["row_relative_std"].values())
    # 2,200 rows of a dtype, and of Hopper and Blackwell fp8, experts and latent attention: 1.3 MB
    # where it was 0.4
    assert len(profile.rows) == sum(told["rows_kept"].values()) <= 6500
    assert 100e3 < (profile.folder / "rows.jsonl").stat().st_size < 1.4e6
    assert find_profile(key).parent.name == key
    readme = (ROOT / "profiles/README.md").read_text(encoding="utf-8")
    assert key in readme and "Apache License" in readme and "NVIDIA CORPORATION" in readme


@pytest.mark.parametrize("key", SHIPPED)
def test_shipped_rows_obey_physics(shipped: dict[str, Profile], key: str) -> None:
    device = load_device(key)
    for row in shipped[key].rows.values():
        assert 1e-6 < row.median_s < 10 and row.dtype in ("bfloat16", "float8_e4m3fn")
        size, peak = DTYPE_BYTES[row.dtype], device.peak_flops_per_s(row.dtype)
        if row.kind == "all_reduce":
            continue
        assert row.mode == "graph"
        if row.kind in ("experts", "latent_attention"):
            whole = op_of(row)
            # causal: half of the products
            prompt = row.kind == "latent_attention" and whole.context == 0
            assert whole.flops() * (0.5 if prompt else 1.0) < row.median_s * peak, row
            if size * whole.weight_elements() > 2 * (device.last_level_cache_bytes or 0):
                # power laws are drawn: a row's five draws may touch fewer experts than the mean of
                # more draws
                assert (
                    size * whole.weight_elements()
                    < 1.05 * row.median_s * device.bandwidth_bytes_per_s
                ), row
            continue
        op = Gemm(**row.sizes()) if row.kind == "gemm" else Attention(**row.sizes())
        # A causal prompt needs half of the products.
        flops = op.flops() if isinstance(op, Gemm) or op.tokens == 1 else op.flops() / 2
        if not (isinstance(op, Attention) and op.window):
            assert flops < row.median_s * peak, row
        if isinstance(op, Gemm) and row.cache == "cold":
            assert (
                size * op.weight_elements() <= 1.0001 * row.median_s * device.bandwidth_bytes_per_s
            ), row
            assert (
                device.last_level_cache_bytes is not None
                and 6 * size * op.weight_elements() > device.last_level_cache_bytes
            )
        if (
            isinstance(op, Attention)
            and op.tokens == 1
            and size * op.kv_elements() > (device.last_level_cache_bytes or 0)
        ):
            assert size * op.kv_elements() < row.median_s * device.bandwidth_bytes_per_s, row


@pytest.mark.parametrize(
    ("key", "us", "band"),
    [
        ("a100-sxm4-80gb", 167.2, 0.13),
        ("h100-sxm5-80gb", 88.5, 0.01),
        ("h200-sxm-141gb", 72.4, 0.01),
    ],
)
def test_a_shard_of_llama_65b_costs_what_was_measured(
    shipped: dict[str, Profile], key: str, us: float, band: float
) -> None:
    # The gate and up projection of LLaMA-65B over four GPUs: 268 MB of weights. The A100 figure is
    # SGLang's on the same GPU (TensorRT-LLM: 172.6); vLLM 0.14 took 186.2.
    rows = {
        row.shape: row.median_s
        for row in shipped[key].rows.values()
        if row.kind == "gemm" and row.dtype == "bfloat16"
    }
    assert rows[freeze_shape({"m": 1, "n": 16384, "k": 8192})] == pytest.approx(us * 1e-6, rel=band)


@pytest.mark.parametrize("key", SHIPPED)
def test_shipped_all_reduce_has_both_modes_and_all_sizes(
    shipped: dict[str, Profile], key: str
) -> None:
    rows = {
        (row.sizes()["elements"], row.sizes()["ranks"], row.mode): row.median_s
        for row in shipped[key].rows.values()
        if row.kind == "all_reduce"
    }
    assert {ranks for _, ranks, _ in rows} == {2, 4, 8}
    # 16 KB: hidden 8192, one token, four GPUs. The eager call costs more than most kernels.
    assert (
        rows[8192, 4, "graph"] < 10e-6 and rows[8192, 4, "eager"] > rows[8192, 4, "graph"] + 10e-6
    )


# --- provenance in the profile's header
# ------------------------------------------------------------------------------


def test_old_headers_load_and_empty_provenance_keeps_the_fingerprint(tmp_path: Path) -> None:
    profile = Profile.open(tmp_path / "p", {"key": "cpu-test"}, {"torch": "2"})
    before = profile.fingerprint()
    header = json.loads((tmp_path / "p/profile.json").read_text())
    assert header.pop("provenance") == {}
    (tmp_path / "p/profile.json").write_text(json.dumps(header))
    old = Profile.load(tmp_path / "p")
    assert old.provenance == {} and old.fingerprint() == before
    old.provenance = {"package": "x"}
    assert old.fingerprint() != before
    old.save_header()
    assert Profile.load(tmp_path / "p").provenance == {"package": "x"}
