"""The rows of a prompt file, whatever form people have it in, and of a data set on the hub; the
texts of a file of plain text."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.files import parse_json
from archsearch.models.targets import hub_errors

SUFFIXES: Final = (".jsonl", ".json", ".parquet", ".csv")
PROMPT_FIELDS: Final = ("prompt", "messages", "conversations", "question", "instruction", "turns")
FORMS: Final = "JSON lines, a JSON array, CSV or Parquet"
_DATASET: Final = re.compile(r"[\w.-]+/[\w.-]+")
SHOWN: Final = 3  # faults with their words
NUMBERED: Final = 20  # further ones by their number


class Faulty(ValueError):
    """A row that is no prompt; the message says why."""


def all_faults(path: Path, found: list[tuple[str, int, Faulty]], rows: int) -> ArchsearchError:
    """What is wrong with some of the `rows` of a file (what a row is called, which one it is, why),
    said at once: who mends one row should not meet the next only then."""
    words = [f"{place} {number}: {why}" for place, number, why in found[:SHOWN]]
    if len(found) == 1:
        return ArchsearchError(f"prompt file {path}, {words[0]}")
    others = [str(number) for _, number, _ in found[SHOWN:]]
    if others:
        more = ", ..." if len(others) > NUMBERED else ""
        words.append(f"{found[0][0]}s {', '.join(others[:NUMBERED])}{more}")
    return ArchsearchError(
        f"prompt file {path}: {len(found)} of {rows} prompts are faulty: {'; '.join(words)}"
    )


def rows_of(path: Path) -> Iterator[tuple[str, int, Any]]:
    """What a row is called ("line", "entry", "row"), its number from 1, and the row: an object, or
    a Faulty where it is none. Parquet by its suffix, CSV too; else a JSON array or JSON lines.

    Raises MissingDataError without the file, ArchsearchError for one that cannot be read at all.
    """
    if path.exists() and not path.is_file():  # a FIFO would be waited for, for ever
        raise ArchsearchError(f"prompt file {path} is no file")
    if path.suffix == ".parquet":
        yield from _parquet(path)
        return
    text = _content(path, "prompt file", "utf-8-sig", f": {FORMS}")  # a byte order mark is no text
    if path.suffix == ".csv":
        yield from _csv(path, text)
    elif (entries := _array(text)) is not None:
        for number, row in enumerate(entries, start=1):
            yield "entry", number, _object(row)
    else:
        yield from _lines(text)


def _content(path: Path, what: str, encoding: str, forms: str = "") -> str:
    try:
        return path.read_text(encoding=encoding)
    except FileNotFoundError:
        raise MissingDataError(f"{what} not found: {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ArchsearchError(
            f"cannot read the {what} {path}: {error}; it must be UTF-8{forms}"
        ) from error


def _object(row: object) -> object:
    if isinstance(row, dict | Faulty):
        return row
    kind = type(row).__name__
    return Faulty(f'a {kind}, not an object; write each as {{"prompt": "..."}}')


def _array(text: str) -> list[object] | None:
    """The entries of a file that is one JSON array with objects in it, as ShareGPT's is; None of
    another."""
    if not text.lstrip().startswith("["):
        return None
    try:
        data = parse_json(text)
    except ValueError:  # lines may be lists by mistake: those are named one by one
        return None
    return data if any(isinstance(row, dict) for row in data) else None


def _lines(text: str) -> Iterator[tuple[str, int, object]]:
    for number, row in _json_lines(text):
        if isinstance(row, Faulty):
            row = Faulty(f'{row}; each line must be one object such as {{"prompt": "..."}}')
        yield "line", number, _object(row)


def _json_lines(text: str) -> Iterator[tuple[int, object]]:
    """Number and content of every line but blank ones; Faulty for one that is not JSON."""
    # Of lines only "\n" is one: U+2028 and its like are text inside a JSON string.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield number, parse_json(line)
            except ValueError as error:
                yield number, Faulty(f"not JSON ({error})")


def _csv(path: Path, text: str) -> Iterator[tuple[str, int, object]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        columns = reader.fieldnames or ()
        if columns and not set(columns) & set(PROMPT_FIELDS):
            known = " or ".join(PROMPT_FIELDS)
            yield "line", 1, Faulty(f"a CSV file begins with the names of its columns, one {known}")
            return
        for row in reader:
            if None in row or None in row.values():
                wanted = len(columns)
                yield "line", reader.line_num, Faulty(f"not {wanted} columns, as the first line")
            else:
                yield "line", reader.line_num, {key: row[key] for key in row if row[key]}
    except csv.Error as error:
        raise ArchsearchError(
            f"prompt file {path}, line {reader.line_num}: not CSV ({error})"
        ) from None


def _parquet(path: Path) -> Iterator[tuple[str, int, object]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise MissingDataError(
            f"reading {path} needs pyarrow: pip install pyarrow; or write JSON lines"
        ) from None
    try:
        with ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches() for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                yield "row", number, row
    except FileNotFoundError:
        raise MissingDataError(f"prompt file not found: {path}") from None
    except (OSError, ArrowException) as error:
        said = " ".join(str(error).split())[:200]
        raise ArchsearchError(f"cannot read the prompt file {path}: {said}") from error


def text_of(turn: object, key: str) -> str:
    """The text of a turn: of OpenAI's content parts the texts joined, of an answer that only calls
    tools the calls as JSON, one a line. Raises Faulty."""
    value = turn.get(key) if isinstance(turn, dict) else None
    if isinstance(value, list) and value:
        return "\n".join(_part(part) for part in value)
    calls = turn.get("tool_calls") if isinstance(turn, dict) and key == "content" else None
    if isinstance(calls, list) and calls and not value:
        # As most templates write them: the name and the arguments.
        called = [call.get("function", call) if isinstance(call, dict) else call for call in calls]
        return "\n".join(json.dumps(call, ensure_ascii=False, default=str) for call in called)
    if not isinstance(value, str):
        raise Faulty(f"a turn without the text field {key!r}: {str(turn)[:60]}")
    return value


def _part(part: object) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise Faulty(f"a turn with a part that is no text ({kind!r}); a draft reads text alone")
    return text


def read_texts(path: Path) -> list[str]:
    """The texts of a file. Raises MissingDataError where there is none, ArchsearchError with the
    line for what is no text."""
    content = _content(path, "text file", "utf-8")
    texts = _json_texts(path, content) if path.suffix == ".jsonl" else content.split("\n\n")
    texts = [part for part in texts if part.strip()]
    if not texts:
        raise ArchsearchError(
            f"text file {path} holds no text; give paragraphs between blank lines, or leave"
            " --text out"
        )
    return texts


def _json_texts(path: Path, content: str) -> list[str]:
    texts = []
    for number, row in _json_lines(content):
        text = row.get("text") if isinstance(row, dict) else None
        if not isinstance(text, str):
            why = row if isinstance(row, Faulty) else 'no text field; write {"text": "..."}'
            raise ArchsearchError(f"text file {path}, line {number}: {why}")
        texts.append(text)
    return texts


def dataset_name(path: Path) -> bool:
    """Whether `path` is no file but may be the name of a data set on the hub: owner/name."""
    return (
        not path.exists()
        and not path.parent.exists()
        and path.suffix not in SUFFIXES
        and _DATASET.fullmatch(str(path)) is not None
    )


def dataset_file(name: str) -> Path:
    """The file of prompts of a data set on the hub, from the local cache or fetched: the first by
    name, of those of a split called train where there are any.

    Raises ArchsearchError where it cannot be had or holds no such file.
    """
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, repo_type="dataset", local_files_only=True))
        if cached := _chosen([str(path.relative_to(folder)) for path in folder.rglob("*")]):
            return folder / cached
    except (LocalEntryNotFoundError, HFValidationError):
        pass
    with hub_errors(
        f"no prompt file {name}, and no data set of that name can be had from the Hugging Face hub "
        "({}); check name and network, or give a file"
    ):
        if chosen := _chosen(HfApi().list_repo_files(name, repo_type="dataset")):
            return Path(hf_hub_download(name, chosen, repo_type="dataset"))
    raise ArchsearchError(
        f"data set {name!r} on the Hugging Face hub has no file of {', '.join(SUFFIXES)}; "
        "give a prompt file"
    )


def _chosen(files: list[str]) -> str:
    """The file of prompts among those of a repository, "" without one."""
    found = sorted(file for file in files if Path(file).suffix in SUFFIXES)
    found = [file for file in found if Path(file).name not in ("dataset_infos.json", "state.json")]
    return next((file for file in found if "train" in file), found[0] if found else "")
