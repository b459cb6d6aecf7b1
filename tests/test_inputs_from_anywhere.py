"""Files and names from anywhere: read, or refused in one line; no password is written down."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from archsearch.cli import main
from archsearch.errors import ArchsearchError, first_line
from archsearch.files import parse_json, read_json, read_yaml
from archsearch.profiles import Measurement, Profile, freeze_shape
from archsearch.search.storage import without_password
from archsearch.text.prompts import Prompt, encode_prompts


def test_what_a_library_says_is_one_line_also_where_it_says_nothing() -> None:
    assert first_line(ValueError("\nno such\nlayer")) == "no such"
    assert first_line(EOFError()) == "EOFError"


def row(n: int) -> Measurement:
    shape = freeze_shape({"m": 1, "n": n, "k": 64})
    return Measurement("gemm", shape, "float32", "eager", "cold", (1e-3,))


def made(folder: Path, text: str) -> Profile:
    written = Profile({"key": "x"}, {}, folder=folder)
    written.save_header()
    (folder / "rows.jsonl").write_text(text, encoding="utf-8")
    return written


@pytest.mark.parametrize(
    "change",
    [
        {"times_s": "123"},
        {"times_s": [True]},
        {"times_s": [10**400]},
        {"slowdown": 0},
        {"slowdown": -1},
        {"mode": None},
        {"slowdown": float("nan")},
        {"slowdown": "1"},
        {"shape": []},
        {"shape": None},
        {"shape": {"m": [1]}},
        {"dtype": 3},
        {"throttled": "no"},
        {"std_s": "1"},
    ],
)
def test_rows_that_cannot_be_are_refused_with_their_line(
    change: dict[str, object], tmp_path: Path
) -> None:
    made(tmp_path, json.dumps(row(1).to_dict() | change) + "\n")
    with pytest.raises(ArchsearchError, match="rows.jsonl:1 is broken"):
        Profile.load(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "1" * 5_000, '"\\ud800"', "{", ""],
    ids=["nested", "digits", "surrogate", "cut", "empty"],
)
def test_json_from_anywhere_is_read_or_refused_in_one_line(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        parse_json(text)
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ArchsearchError, match="x.json is not JSON"):
        read_json(tmp_path / "x.json", "thing")


def test_half_of_a_surrogate_pair_in_yaml_is_refused(tmp_path: Path) -> None:
    """It could be read, and no report that names it written."""
    (tmp_path / "x.yaml").write_text('a: ["\\ud800"]')
    with pytest.raises(ArchsearchError, match=r"x.yaml holds .* surrogate pair$"):
        read_yaml(tmp_path / "x.yaml", "thing")


def test_json_that_is_fine(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json(tmp_path / "x.json", "thing") == {"a": 1}
    assert parse_json('"\\ud83d\\ude00"') == "\U0001f600"


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.json")
    with pytest.raises(ArchsearchError, match="is no file"):
        read_json(tmp_path / "x.json", "thing")


@pytest.mark.parametrize(
    "url",
    [
        "mysql://me:topsecretpw@host/db",
        "sqlite:///s.db?password=topsecretpw",
        "postgresql://h/x?user=me&passwd=topsecretpw",
        "mysql://me:top@secretpw@host/db",
    ],
)
def test_no_password_of_a_storage_is_written_down(url: str) -> None:
    masked = without_password(url)
    assert (
        masked is not None
        and "secretpw" not in masked
        and masked.split(":")[0] == url.split(":")[0]
    )


@pytest.mark.parametrize("option", ["--target", "--draft"])
def test_a_path_that_is_too_long_is_one_line(option: str) -> None:
    asked = {"--target": "llama-65b", "--draft": "wide-796m", "--gpu": "a100"} | {
        option: "a/" + "x" * 5_000
    }
    result = CliRunner().invoke(
        main, ["estimate", *(word for pair in asked.items() for word in pair)]
    )
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    assert result.output.strip().count("\n") == 0 and result.output.startswith("Error: ")


class Tokenizer:
    """Words are tokens; a template that raises or renders nothing."""

    def __init__(self, template: str) -> None:
        self.chat_template = template

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": list(range(len(text.split())))}

    def apply_chat_template(self, turns: list[dict[str, str]], **_: object) -> str:
        from jinja2 import Environment

        return Environment().from_string(self.chat_template).render(messages=turns)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 1 / 0 }}", "refuses the prompt in line 3 .turns: system, user."),
        ("{% if %}", "refuses the prompt in line 3"),
        ("", "x"),
        ("{# #}", "makes no text of the prompt in line 3"),
    ],
)
def test_templates_that_refuse_a_prompt_name_it(template: str, words: str) -> None:
    prompt = Prompt((("system", "be kind"), ("user", "what is it")), line=3)
    if not template:
        assert len(encode_prompts([prompt], Tokenizer("{{ messages }}"))) == 1
        return
    with pytest.raises(ArchsearchError, match=words):
        encode_prompts([prompt], Tokenizer(template))
