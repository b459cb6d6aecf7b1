"""Profiles on disk: nothing half-written, nothing silently wrong."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from archsearch.architecture.architecture import Architecture
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.profiles import (
    EngineShape,
    ForwardShape,
    Measurement,
    PassShape,
    Profile,
    RestShape,
    find_profile,
    freeze_shape,
    stack_key,
)

STACK = {"torch": "2.13.0+cpu", "transformers": "5.23.0"}


def row(
    n: int = 576, times: tuple[float, ...] = (1e-3, 1.1e-3, 1.05e-3), cache: str = "cold"
) -> Measurement:
    return Measurement(
        "gemm", freeze_shape({"m": 1, "n": n, "k": 576}), "bfloat16", "eager", cache, times, 1.25
    )


def profile(folder: Path) -> Profile:
    return Profile.open(folder, {"key": "cpu-test"}, STACK)


def test_rows_survive_a_round_trip(tmp_path: Path) -> None:
    written = profile(tmp_path / "p")
    written.record(row())
    assert (
        "kernel" not in row().to_dict()
    )  # rows without it keep their line, and profiles their fingerprint
    written.record(replace(row(n=64), kernel="FlashAttention 2"))
    written.record(row(cache="warm"))
    read = Profile.load(tmp_path / "p")
    assert read.rows == written.rows
    assert read.fingerprint() == written.fingerprint()


SMALL = Architecture(64, 128, 4, 4, 2, 16, 320, draft_vocab_size=64)


@pytest.mark.parametrize(
    ("kind", "shape", "on_disk"),
    [
        (
            "forward",
            ForwardShape(SMALL, 1, 3, 256),
            {"batch": 1, "tokens": 3, "context": 256, **SMALL.to_dict()},
        ),
        (
            "pass",
            PassShape("vllm", "draft", SMALL, 4, 2, 192),
            {
                "engine": "vllm",
                "role": "draft",
                "architecture": SMALL.to_dict(),
                "batch": 4,
                "tokens": 2,
                "context": 192,
            },
        ),
        (
            "rest",
            RestShape("vllm", 3, 4, 5),
            {"engine": "vllm", "gamma": 3, "batch": 4, "first_tokens": 5},
        ),
        (
            "engine",
            EngineShape("transformers", 3, 320, 6),
            {"engine": "transformers", "gamma": 3, "draft_layers": 6, "vocab_size": 320},
        ),
    ],
)
def test_what_a_row_is_about_is_on_disk_as_before(
    kind: str, shape: ForwardShape, on_disk: dict
) -> None:
    assert shape.to_dict() == on_disk
    row = Measurement(kind, freeze_shape(on_disk), "bfloat16", "eager", "warm", (1e-3,))
    assert type(shape).of(Measurement.from_dict(json.loads(json.dumps(row.to_dict())))) == shape


def test_fingerprint_changes_with_a_row(tmp_path: Path) -> None:
    one = profile(tmp_path / "p")
    before = one.fingerprint()
    one.record(row())
    assert one.fingerprint() != before


def test_same_key_is_replaced_not_doubled(tmp_path: Path) -> None:
    written = profile(tmp_path / "p")
    written.record(row())
    written.record(row(times=(2e-3,)))
    read = Profile.load(tmp_path / "p")
    assert len(read.rows) == 1
    assert read.rows[row().key].median_s == 2e-3


def test_a_line_cut_by_a_kill_is_dropped_and_the_file_can_go_on(tmp_path: Path) -> None:
    written = profile(tmp_path / "p")
    written.record(row(n=64))
    path = tmp_path / "p" / "rows.jsonl"
    with path.open("a") as handle:
        handle.write('{"kind": "gemm", "sha')
    again = Profile.load(tmp_path / "p")
    assert len(again.rows) == 1
    again.record(row(n=128))
    assert len(Profile.load(tmp_path / "p").rows) == 2


@pytest.mark.parametrize("times", [[-1.0], [], [math.nan], [0.0]])
def test_impossible_times_are_refused_with_the_line(tmp_path: Path, times: list[float]) -> None:
    profile(tmp_path / "p")
    data = row().to_dict() | {"times_s": times}
    (tmp_path / "p" / "rows.jsonl").write_text(json.dumps(data) + "\n")
    with pytest.raises(ArchsearchError, match=r"rows.jsonl:1 is broken"):
        Profile.load(tmp_path / "p")


def test_another_schema_version_is_refused(tmp_path: Path) -> None:
    profile(tmp_path / "p")
    header = json.loads((tmp_path / "p" / "profile.json").read_text())
    (tmp_path / "p" / "profile.json").write_text(json.dumps(header | {"schema_version": 99}))
    with pytest.raises(ArchsearchError, match="schema version 99"):
        Profile.load(tmp_path / "p")


def test_another_device_is_refused(tmp_path: Path) -> None:
    profile(tmp_path / "p")
    with pytest.raises(ArchsearchError, match="belongs to cpu-test"):
        Profile.open(tmp_path / "p", {"key": "cpu-other"}, STACK)


def test_missing_profile_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match="archsearch profile --gpu"):
        Profile.load(tmp_path / "none")
    with pytest.raises(MissingDataError, match="archsearch profile --gpu cpu"):
        find_profile("cpu-nowhere")


def test_the_users_profile_is_found_and_the_same_stack_preferred(tmp_path: Path) -> None:
    other = Profile.open(tmp_path / "profiles" / "cpu-test" / "torch-1", {"key": "cpu-test"}, STACK)
    other.record(row())
    same = tmp_path / "profiles" / "cpu-test" / stack_key(STACK)
    Profile.open(same, {"key": "cpu-test"}, STACK)
    assert find_profile("cpu-test", STACK) == same
    assert find_profile("cpu-test", {"torch": "9", "transformers": "9"}) == other.folder


def test_the_working_directorys_profile_goes_before_a_larger_one_that_ships(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("archsearch.profiles.data_dir", lambda name: tmp_path / "ships" / name)
    own, shipped = (
        Profile.open(root / "profiles" / "cpu-test" / stack_key(STACK), {"key": "cpu-test"}, STACK)
        for root in (tmp_path, tmp_path / "ships")
    )
    own.record(row())
    for n in (64, 128, 256):
        shipped.record(row(n=n))
    assert find_profile("cpu-test", STACK) == own.folder


def test_statistics_and_noise() -> None:
    quiet = row(times=(1.0, 1.01, 1.02, 1.03, 1.04))
    assert quiet.median_s == 1.02 and not quiet.noisy
    wide = row(times=(1.0, 1.0, 1.2, 1.4, 1.4))
    assert wide.noisy and not replace(wide, kind="rest").noisy  # a difference


def test_a_last_row_without_its_line_end_is_kept_and_added_to(tmp_path: Path) -> None:
    """A file joined with `cat` or edited by hand: reading loses no row and changes nothing,
    recording ends the line first."""
    written = profile(tmp_path / "p")
    for n in (64, 128):
        written.record(row(n=n))
    rows = tmp_path / "p" / "rows.jsonl"
    rows.write_bytes(rows.read_bytes().rstrip(b"\n"))
    before = rows.read_bytes()
    read = Profile.load(tmp_path / "p")
    assert len(read.rows) == 2 and rows.read_bytes() == before
    read.record(row(n=256))
    assert len(Profile.load(tmp_path / "p").rows) == 3


def test_a_row_cut_by_a_kill_is_left_out_and_cut_off_by_the_next(tmp_path: Path) -> None:
    written = profile(tmp_path / "p")
    written.record(row(n=64))
    rows = tmp_path / "p" / "rows.jsonl"
    rows.write_bytes(rows.read_bytes() + b'{"kind": "gemm", "sha')
    read = Profile.load(tmp_path / "p")
    assert len(read.rows) == 1
    read.record(row(n=128))
    assert len(Profile.load(tmp_path / "p").rows) == 2
