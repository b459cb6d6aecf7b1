"""Every command of README and docs that needs more than Python says beside it what, in one of a few
words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WRITTEN = ("cli.md",)  # the commands' own help
PAGES = [
    ROOT / "README.md",
    *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in WRITTEN),
]
FIRST_WORDS = ("archsearch", "make", "pip", "python", "podman", "srun", "kubectl", "eval", "git")
NEEDS = re.compile(r"#.*\bneeds (.+)$")
# What a reader may be told to have. Anything else a test would have to run.
KNOWN_NEEDS = re.compile(
    r"an? (GPU|H100)\b|vLLM|PostgreSQL|Ray|SLURM|Kubernetes|podman|two running servers|3\.5 GB|some"
    r" minutes|25 to 30 minutes"
)
# Lines that are no command of archsearch, and what runs them.
ELSEWHERE = {
    "make install": ".ci/run",
    "make test": ".ci/run",
    "make docs": ".ci/run",
    "podman run": "needs podman, above it",
    "pip wheel": "tests/test_examples.py",
    "pip install dist/": "tests/test_examples.py",
    "python benchmarks/gpu_day.py": "tests/benchmarks/test_gpu_day.py",
}


@dataclass(frozen=True)
class Line:
    """A command as a page shows it, its continuation lines joined; `needs`: what stands beside it,
    "" for nothing."""

    page: str
    text: str
    needs: str


def lines_of(page: Path) -> list[Line]:
    """The commands in a page's blocks, in order."""
    text = page.read_text(encoding="utf-8")
    fenced = re.findall(r"^```(?:bash|sh)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    indented = re.findall(
        r"(?:^    .*\n)+",
        re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE),
        re.MULTILINE,
    )
    found = []
    for line in "\n".join(fenced + indented).replace("\\\n", " ").splitlines():
        told = re.sub(r"^(?:[A-Z_0-9]+=\S+ )+", "", line.strip())
        if told.split(" ")[0] in FIRST_WORDS and (
            page.name != "README.md" or not told.startswith("archsearch/")
        ):
            needs = NEEDS.search(told)
            found.append(Line(page.name, line.strip(), needs[1] if needs else ""))
    return found


def test_what_a_command_needs_is_one_of_a_few_things() -> None:
    lines = [line for page in PAGES for line in lines_of(page)]
    assert len(lines) > 60 and len({line.page for line in lines}) > 8
    for line in lines:
        assert not line.needs or KNOWN_NEEDS.search(line.needs), f"{line.page}: {line.text}"
        own = "archsearch" in line.text and not line.text.startswith("podman")
        assert own or line.needs or any(line.text.startswith(start) for start in ELSEWHERE), (
            f"{line.page}: who runs {line.text}?"
        )
