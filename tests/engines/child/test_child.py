"""The child host: answers come back, and whatever a child does, one clear line comes out and no
process stays."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from archsearch.engines.child import child_engine
from archsearch.engines.child.child_engine import Child
from archsearch.errors import ArchsearchError, MissingDataError, RunFailed

WORKER = """
import sys
sys.path.insert(0, {loop!r})
import loop
answers = loop.claim_stdout()
import os, signal, subprocess, time
from types import SimpleNamespace

def grandchild(request):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    return {{"pid": process.pid}}

def user(request):
    raise loop.UserError("the vocabularies differ")

def memory(request):
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte")

def bug(request):
    return {{"x": 1 // 0}}

def die(request):
    print("RuntimeError: engine core died", file=sys.stderr, flush=True)
    os._exit(3)

def killed(request):
    os.kill(os.getpid(), signal.SIGKILL)

loop.serve(SimpleNamespace(**{{
    "echo": lambda request: print("noise of the engine") or {{"value": request["value"]}},
    "sleep": lambda request: time.sleep(60) or {{}},
    "env": lambda request: {{"value": os.environ.get(request["name"], "")}},
    "grandchild": grandchild, "user": user, "memory": memory, "bug": bug, "die": die, "killed": killed,
}}), answers)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "worker.py"
    path.write_text(textwrap.dedent(WORKER).format(loop=str(Path(child_engine.__file__).parent)))
    return path


def start(script: Path, **options: object) -> Child:
    return Child(Path(sys.executable), script, name="toy", timeout_s=120.0, **options)  # type: ignore[arg-type]


def gone(pid: int, wait_s: float = 60.0) -> bool:
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if (
            Path(f"/proc/{pid}/stat").exists()
            and Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0] == "Z"
        ):
            return True
        time.sleep(0.05)
    return False


def test_answers_come_back_and_prints_do_not_disturb_them(script: Path) -> None:
    child = start(script, env={"TOY": "7"})
    assert child.ask({"do": "echo", "value": "é\n"}) == {"value": "é\n"}
    assert child.ask({"do": "env", "name": "TOY"}) == {"value": "7"}
    child.close()
    assert not child.running and "noise of the engine" in child.log
    child.close()  # twice is fine


def test_a_user_s_error_leaves_it_running(script: Path) -> None:
    child = start(script)
    with pytest.raises(ArchsearchError, match="^the vocabularies differ$"):
        child.ask({"do": "user"})
    assert child.ask({"do": "echo", "value": 1}) == {"value": 1}
    child.close()


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ("memory", "toy is out of memory.*lower --concurrency"),
        ("bug", "toy failed: ZeroDivisionError(.|\n)*worker.py"),
        ("die", "toy ended with status 3 during 'die': RuntimeError: engine core died"),
        ("killed", r"toy was killed by signal 9 \(out of memory\?\)"),
    ],
)
def test_failures_end_it_with_one_line(script: Path, request_: str, words: str) -> None:
    child = start(script)
    with pytest.raises(RunFailed, match=words):
        child.ask({"do": request_})
    assert gone(child._process.pid)


def test_a_child_that_hangs_is_stopped(script: Path) -> None:
    child = start(script)
    child.timeout_s = 1.0
    with pytest.raises(RunFailed, match="toy did not answer 'sleep' within 1 s"):
        child.ask({"do": "sleep"})
    assert gone(child._process.pid)


def test_what_it_started_dies_with_it(script: Path) -> None:
    child = start(script)
    pid = child.ask({"do": "grandchild"})["pid"]
    child.close()
    assert gone(pid) and gone(child._process.pid)


def test_a_killed_parent_leaves_nothing_behind(script: Path, tmp_path: Path) -> None:
    parent = tmp_path / "parent.py"
    parent.write_text(
        "import sys, threading, time\nfrom pathlib import Path\nfrom"
        " archsearch.engines.child.child_engine import Child\nchild = Child(Path(sys.executable),"
        f" Path({str(script)!r}), name='toy')\nprint(child.pid, child.ask({{'do':"
        " 'grandchild'})['pid'], flush=True)\nthreading.Thread(target=child.ask, args=({'do':"
        " 'sleep'},)).start()\ntime.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, str(parent)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    process.kill()
    process.wait()
    process.stdout.close()
    assert all(gone(pid) for pid in pids)


def test_an_interpreter_that_is_not_there(script: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match="archsearch engine install toy"):
        Child(tmp_path / "python", script, name="toy")


@pytest.mark.parametrize(("engine", "package"), [("vllm", "vllm"), ("openvino", "openvino_genai")])
def test_each_worker_finds_what_it_imports_in_another_folder(
    engine: str, package: str, tmp_path: Path
) -> None:
    """The script itself, by a bare interpreter: it starts, finds `loop` and its siblings, and
    answers in one line."""
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed here")
    script = Path(child_engine.__file__).parents[1] / engine / "worker" / f"{engine}_worker.py"
    child = Child(Path(sys.executable), script, name=engine, timeout_s=60.0)
    for _ in range(2):  # what the user can mend leaves it running
        with pytest.raises(ArchsearchError, match=f"run: archsearch engine install {engine}"):
            child.ask({"do": "versions"})
    child.close()


def test_no_file_of_a_worker_hides_another_module() -> None:
    """A worker's folder and `loop`'s come first on its path: a file named as a module of Python or
    of an engine would hide it."""
    engines = Path(child_engine.__file__).parents[1]
    beside = [
        path.stem
        for folder in (engines / "child", *engines.glob("*/worker"))
        for path in folder.glob("*.py")
    ]
    names = [name for name in beside if name != "__init__"]
    packages = {
        "vllm",
        "openvino",
        "openvino_genai",
        "optimum",
        "torch",
        "transformers",
        "numpy",
        "requests",
    }
    assert "loop" in names and not set(names) & (sys.stdlib_module_names | packages)
    assert len(names) == len(set(names)), "tests load several workers into one process"
