"""Prompts in the forms in which people have them; all that is wrong with a file at once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from archsearch.errors import ArchsearchError
from archsearch.text.prompts import read_prompts
from tests.cli.commands import invoke

HUMAN = {"from": "human", "value": "How are you?"}


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_as_sharegpts(tmp_path: Path, indent: int | None) -> None:
    rows = [
        {"id": "a", "conversations": [HUMAN, {"from": "gpt", "value": "well"}]},
        {"prompt": "Hi"},
    ]
    first, second = read_prompts(written(tmp_path / "s.json", json.dumps(rows, indent=indent)))
    assert (first.messages, first.id, second.text) == ((("user", "How are you?"),), "a", "Hi")


def test_openai_parts_tools_and_batches(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"q": "x"}'}}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Look"}, {"type": "text", "text": "here"}],
        },
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "found"},
        {"role": "user", "content": "And now?"},
    ]
    batch = {
        "custom_id": "r7",
        "method": "POST",
        "url": "/v1/x",
        "body": {"model": "m", "messages": messages},
    }
    path = written(
        tmp_path / "b.jsonl", json.dumps({"messages": messages}) + "\n" + json.dumps(batch)
    )
    plain, asked = read_prompts(path)
    assert asked.messages == plain.messages and asked.id == "r7"
    assert plain.messages[:2] == (("system", "Be kind."), ("user", "Look\nhere"))
    assert (
        plain.messages[2][0] == "assistant" and json.loads(plain.messages[2][1]) == call["function"]
    )
    assert plain.messages[3:] == (("tool", "found"), ("user", "And now?"))


def test_csv_and_parquet(tmp_path: Path) -> None:
    csv = written(
        tmp_path / "p.csv", '\ufeffprompt,category\r\n"one,\r\ntwo\u2028three",chat\r\nfour,\r\n'
    )
    assert [(p.text, p.category) for p in read_prompts(csv)] == [
        ("one,\ntwo\u2028three", "chat"),
        ("four", ""),
    ]
    rows: list[dict[str, Any]] = [{"conversations": [HUMAN], "category": None}] * 3
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    assert [p.text for p in read_prompts(tmp_path / "p.parquet")] == ["How are you?"] * 3


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("x.csv", b'prompt\n"open', "line 1: not CSV"),
        ("x.csv", b"prompt,category\nfine,a\none,b,c\n", "line 3: not 2 columns"),
        ("x.csv", b"text\nfine\n", "line 1: a CSV file begins with the names of its columns, one"),
        ("x.jsonl", b'{"prompt": null, "id": 1}', "line 1: 'prompt' is null; remove the row"),
        ("x.parquet", b"PAR1", "cannot read the prompt file"),
        ("x.json", b'[{"prompt": "ok then"}, 7]', "entry 2: a int, not an object"),
        (
            "x.json",
            b'[{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}]',
            "no text .'image_url'",
        ),
        ("x.jsonl", b'{"body": {"input": "x"}}', "none of the fields"),
        (
            "x.jsonl",
            b'{"messages": [{"role": "assistant", "content": null}]}',
            "without the text field 'content'",
        ),
    ],
)
def test_what_is_none_is_one_line(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ArchsearchError, match=says) as caught:
        read_prompts(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_all_faulty_lines_are_named_at_once(tmp_path: Path) -> None:
    lines = ['{"prompt": "fine"}', "no json", '{"prompt": 7}', "[1]", '{"a": 1}', '{"prompt": ""}']
    with pytest.raises(ArchsearchError) as caught:
        read_prompts(written(tmp_path / "x.jsonl", "\n".join(lines)))
    said = str(caught.value)
    assert "5 of 6 prompts are faulty: line 2: not JSON" in said and "\n" not in said
    assert "line 3: 'prompt' must be text" in said and said.endswith("lines 5, 6")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.jsonl")
    with pytest.raises(ArchsearchError, match="is no file"):
        read_prompts(tmp_path / "x.jsonl")


def test_a_data_set_of_the_hub_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    held = tmp_path / "datasets--us--chats"
    files = held / "snapshots" / ("a" * 40)
    (files / "data").mkdir(parents=True)
    (held / "refs").mkdir()
    (held / "refs" / "main").write_text("a" * 40)
    (files / "data" / "test.jsonl").write_text("broken")
    (files / "data" / "train.jsonl").write_text("broken too")
    ask = [
        "acceptance",
        "--target",
        "smollm2-135m",
        "--draft",
        "ngram",
        "--gpu",
        "cpu",
        "--prompts",
    ]
    result = invoke(*ask, "us/chats")
    assert result.exit_code == 2 and "data/train.jsonl, line 1: not JSON" in result.stderr
    result = invoke(*ask, "us/nothing")
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert "no prompt file us/nothing, and no data set of that name" in result.stderr
