"""Engine environments: a finished install is found, a killed one is not, and every way to fail is
one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from archsearch.cli import main
from archsearch.engine_facts import ENGINES, EngineFacts, engines_that, has_recipe
from archsearch.engines.environments import environment, processes, recipes
from archsearch.engines.environments.environment import (
    MARKER,
    check,
    find_python,
    install,
    installed,
    overview,
    remove,
)
from archsearch.engines.environments.processes import PipWatch
from archsearch.engines.environments.recipes import Recipe
from archsearch.errors import ArchsearchError, MissingDataError, RunFailed

TINY = Recipe(
    "Tiny",
    "tinyengine",
    {"cpu": ("tinyengine==1.2.0",), "gpu": ("tinyengine==1.2.0",)},
    "1.2.0",
    "1.1",
    (11, 20),
    "9.0",
    {"cpu": 1000, "gpu": 1000},
)


@pytest.fixture(autouse=True)
def tiny_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        ENGINES,
        "tiny",
        EngineFacts(name="tiny", title="Tiny", make="x:y", recipe=f"{__name__}:TINY"),
    )
    for name in engines_that(has_recipe):
        monkeypatch.delenv(f"ARCHSEARCH_{name.upper()}_PYTHON", raising=False)


def wheel(folder: Path, name: str, version: str, code: str) -> None:
    """A wheel of one module, written by hand."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(path, text)


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def fake_python(path: Path, version: str, *, fails: str = "") -> Path:
    """Stands for an interpreter with tinyengine: answers the import check, and `-m venv` with a
    copy of itself."""
    facts = json.dumps(
        {
            "version": version,
            "python_version": "3.11.7",
            "packages": {"tinyengine": version},
            "seconds": 0.1,
        }
    )
    importing = f'echo "{fails}" >&2; exit 1' if fails else f"echo '{facts}'"
    return script(
        path,
        f"""case "$*" in
*"-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
*"-m pip"*) echo "Collecting x"; echo "ERROR: No matching distribution found for x"; echo "[notice] a new pip"; exit 1 ;;
*version_info*tinyengine*) {importing} ;;
*version_info*) echo 3 11 ;;
esac""",
    )


@pytest.mark.slow(own=True)
def test_install_from_nothing_and_everything_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real venv and a real pip, with packages out of a folder; the torch that is pinned lies in
    the other index only."""
    wheels, index = tmp_path / "wheels", tmp_path / "index"
    wheel(wheels, "tinyengine", "1.2.0", "__version__ = '1.2.0+cpu'\nprint('engines print')")
    wheel(index / "torch", "torch", "9.0+cpu", "")
    link = next((index / "torch").iterdir())
    (index / "torch" / "index.html").write_text(f'<a href="{link.name}">{link.name}</a>')
    (tmp_path / "none").mkdir()
    monkeypatch.setattr(processes, "CPU_TORCH_INDEX", index.as_uri())
    monkeypatch.setattr(processes.platform, "system", lambda: "Linux")
    monkeypatch.setattr(processes.platform, "machine", lambda: "x86_64")
    for name, value in {
        "CONFIG_FILE": os.devnull,
        "INDEX_URL": (tmp_path / "none").as_uri(),
        "FIND_LINKS": str(wheels),
    }.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    told: list[tuple[str, float, float]] = []
    done = install("tiny", device="cpu", progress=lambda *row: told.append(row))
    assert (done.version, done.device, done.packages) == ("1.2.0", "cpu", ("tinyengine==1.2.0",))
    assert done.seconds > 0 and done.bytes > 100_000
    assert (
        told[0][1] == 0
        and told[-1][0] == "importing tinyengine"
        and all(0 <= row[1] <= row[2] for row in told)
    )
    assert find_python("tiny") == done.python == tmp_path / "cache/engines/tiny/bin/python"
    found = check("tiny")
    assert found.facts.version == "1.2.0" and found.warning is None
    assert found.facts.packages == {"tinyengine": "1.2.0", "torch": "9.0+cpu"}
    log = (tmp_path / "cache/engines/tiny/install.log").read_text()
    assert "No matching distribution found for torch==9.0+cpu" in log and "--extra-index-url" in log
    assert install("tiny", device="cpu") == done, "a finished environment is kept"
    row = overview()[-1]
    assert (row.engine, row.installed, row.version, row.bytes) == (
        "tiny",
        True,
        "1.2.0",
        done.bytes,
    )
    (done.python.parent.parent / MARKER).unlink()
    assert installed("tiny") is None, "without the marker it is a killed install"
    assert "stopped" in overview()[-1].note
    assert remove("tiny") > 0 and not done.python.parent.parent.exists()
    with pytest.raises(MissingDataError, match="nothing to remove"):
        remove("tiny")


def test_a_missing_engine_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "visible_gpus", lambda: [])
    with pytest.raises(MissingDataError) as caught:
        find_python("vllm")
    assert (
        str(caught.value)
        == "vLLM is not installed; run: archsearch engine install vllm (about 3.5 GB), "
        "or name an interpreter that has it with --engine-python"
    )
    with pytest.raises(ArchsearchError, match="choose from: vllm, openvino"):
        find_python("tgi")


def test_the_variable_comes_first_and_must_be_an_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = fake_python(tmp_path / "env/bin/python", "1.2.0")
    monkeypatch.setenv("ARCHSEARCH_TINY_PYTHON", str(python))
    assert find_python("tiny") == python
    monkeypatch.setenv("ARCHSEARCH_TINY_PYTHON", str(tmp_path / "env"))
    with pytest.raises(
        ArchsearchError, match="ARCHSEARCH_TINY_PYTHON names .*a folder; name the interpreter"
    ):
        find_python("tiny")
    monkeypatch.setenv("ARCHSEARCH_TINY_PYTHON", str(tmp_path / "nothing"))
    with pytest.raises(ArchsearchError, match="no file that can be run"):
        find_python("tiny")


@pytest.mark.parametrize(
    ("version", "warning"), [("1.2", False), ("1.2.0rc1", False), ("1.3.1", True), ("1.1", True)]
)
def test_another_version_is_a_warning(tmp_path: Path, version: str, warning: bool) -> None:
    found = check("tiny", fake_python(tmp_path / "python", version)).warning
    assert (found is not None) == warning
    assert not warning or f"{version} is not the tested version 1.2.0" in found


def test_too_old_absent_and_broken_engines(tmp_path: Path) -> None:
    with pytest.raises(
        ArchsearchError, match="Tiny 1.0.9 in .* is too old, archsearch is written for 1.1 or newer"
    ):
        check("tiny", fake_python(tmp_path / "old", "1.0.9"))
    with pytest.raises(ArchsearchError, match="has no Tiny .* run: archsearch engine install tiny"):
        check(
            "tiny",
            fake_python(
                tmp_path / "none", "", fails="ModuleNotFoundError: No module named 'tinyengine'"
            ),
        )
    with pytest.raises(RunFailed, match="failed: ImportError: libcuda.so.1"):
        check("tiny", fake_python(tmp_path / "broken", "", fails="ImportError: libcuda.so.1"))


def test_pip_s_lines_become_a_growing_number(tmp_path: Path) -> None:
    packages = tmp_path / "lib/python3.11/site-packages"
    (packages / "pip-1.dist-info").mkdir(parents=True)
    watch = PipWatch(tmp_path, lambda what, done, planned: None)
    watch.run(20.0, 100.0, 4_000_000)
    seen = [watch.now()]
    for line in (
        "Collecting torch==2.13.0",
        "  Downloading torch-2.13.0.whl.metadata (29 kB)".strip(),
        "Downloading torch-2.13.0-cp311.whl (1.0 MB)",
        "Using cached https://index/numpy-2.4.whl (3.5 MB)",
        "Installing collected packages: numpy, torch",
    ):
        watch.line(line)
        seen.append(watch.now())
    (packages / "numpy-2.4.dist-info").mkdir()
    seen.append(watch.now())
    assert seen == [
        ("asking the package index", 20.0),
        ("1 packages found", 20.0),
        ("1 packages found", 20.0),
        ("torch (1.0 MB)", 35.0),
        ("numpy (3.5 MB)", 80.0),
        ("unpacking 0 of 2 packages", 80.0),
        ("unpacking 1 of 2 packages", 90.0),
    ]


def test_a_killed_install_leaves_the_lock_to_its_pip_only(tmp_path: Path) -> None:
    """SIGKILL on archsearch: its pip may live on, and until it is gone no other install starts.
    Then one does."""
    pytest.importorskip("fcntl")
    python = fake_python(tmp_path / "python", "1.2.0")
    slow = python.read_text().replace(
        'echo "Collecting x";', f"echo $$ > {tmp_path / 'pip'}; sleep 60;"
    )
    script(python, slow.removeprefix("#!/bin/sh\n"))
    code = (
        "import sys; from pathlib import Path; from archsearch.engines.environments import"
        " environment as e; from archsearch.engine_facts import ENGINES, EngineFacts;"
        " ENGINES['tiny'] = EngineFacts(name='tiny', title='Tiny', make='x:y',"
        " recipe='__main__:TINY'); TINY = e.Recipe('Tiny', 'tinyengine', {'cpu': ('x',), 'gpu':"
        " ('x',)}, '1', '1', (11, 20), '9', {'cpu': 1, 'gpu': 1}); e.install('tiny',"
        " python=Path(sys.argv[1]), device='gpu')"
    )
    archsearch = subprocess.Popen(
        [sys.executable, "-c", code, str(python)], cwd=Path(environment.__file__).parents[3]
    )
    pip = 0
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "pip").exists() or not (tmp_path / "pip").read_text().strip():
            assert archsearch.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        pip = int((tmp_path / "pip").read_text())
        archsearch.kill()
        archsearch.wait()
        with pytest.raises(ArchsearchError, match="another install of Tiny is running"):
            install("tiny", python=python, device="gpu")
        assert installed("tiny") is None
    finally:
        archsearch.kill()
        archsearch.wait()
        if pip:
            os.killpg(pip, signal.SIGKILL)
    fake_python(python, "1.2.0")
    deadline = time.monotonic() + 60
    while True:
        try:
            with pytest.raises(RunFailed, match="No matching distribution"):
                install("tiny", python=python, device="gpu")
            break
        except ArchsearchError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_an_import_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "CHECK_TIMEOUT_S", 0.3)
    python = script(tmp_path / "python", f"sleep 600 & echo $! > {tmp_path / 'pid'}; wait")
    begun = time.monotonic()
    with pytest.raises(RunFailed, match="took more than"):
        check("tiny", python)
    assert time.monotonic() - begun < 300
    child = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 60
    while (
        Path(f"/proc/{child}").exists()
        and "Z" not in Path(f"/proc/{child}/stat").read_text().split(")")[1][:3]
    ):
        assert time.monotonic() < deadline, "what the interpreter started lives on"
        time.sleep(0.02)


def test_a_failing_pip_is_one_line_and_leaves_no_environment(tmp_path: Path) -> None:
    python = fake_python(tmp_path / "python", "1.2.0")
    with pytest.raises(RunFailed) as caught:
        install("tiny", python=python, device="gpu")
    log = tmp_path / "cache/engines/tiny-install.log"
    assert (
        str(caught.value)
        == "pip install tinyengine==1.2.0 failed: No matching distribution found for x (the whole"
        f" log: {log})"
    )
    assert "[notice] a new pip" in log.read_text()
    assert installed("tiny") is None
    with pytest.raises(MissingDataError):
        find_python("tiny")


def test_what_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = fake_python(tmp_path / "python", "1.2.0")
    monkeypatch.setattr(sys.modules[__name__], "TINY", replace(TINY, pythons=(12, 13)))
    with pytest.raises(
        ArchsearchError, match="needs Python 3.12 to 3.13, .* is 3.11; name another with --python"
    ):
        install("tiny", python=python, device="cpu")
    with pytest.raises(ArchsearchError, match="does not run as a Python"):
        install("tiny", python=script(tmp_path / "cat", "echo meow"), device="cpu")
    monkeypatch.setattr(
        sys.modules[__name__],
        "TINY",
        replace(TINY, pythons=(11, 20), bytes={"cpu": 10**18, "gpu": 10**18}),
    )
    with pytest.raises(ArchsearchError, match="GB are free; free space or set ARCHSEARCH_CACHE"):
        install("tiny", python=python, device="cpu")
    assert not (tmp_path / "cache/engines/tiny").exists()


def test_a_second_install_at_the_same_time_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    (tmp_path / "cache/engines").mkdir(parents=True)
    code = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX);"
        " print('held'); time.sleep(60)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-u", "-c", code, str(tmp_path / "cache/engines/.tiny.lock")],
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(ArchsearchError, match="another install of Tiny is running"):
            install("tiny", device="cpu")
    finally:
        holder.kill()
        holder.communicate()


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "visible_gpus", lambda: [])
    listed = json.loads(
        CliRunner().invoke(main, ["engine", "list", "--json"]).stdout.splitlines()[-1]
    )["engines"]
    assert [(row["engine"], row["installed"]) for row in listed[:3]] == [
        ("transformers", True),
        ("vllm", False),
        ("openvino", False),
    ]
    missing = CliRunner().invoke(main, ["engine", "check", "vllm"])
    assert missing.exit_code == 2 and "run: archsearch engine install vllm" in missing.stderr
    assert CliRunner().invoke(main, ["engine", "remove", "openvino"]).exit_code == 2
    old = fake_python(tmp_path / "python", "0.33.0")
    monkeypatch.setattr(recipes, "VLLM", replace(recipes.VLLM, module="tinyengine"))
    checked = CliRunner().invoke(
        main, ["engine", "check", "vllm", "--engine-python", str(old), "--json"]
    )
    assert (
        checked.exit_code == 0
        and "Warning: vLLM 0.33.0 is not the tested version" in checked.stderr
    )
    assert json.loads(checked.stdout.splitlines()[-1])["version"] == "0.33.0"
