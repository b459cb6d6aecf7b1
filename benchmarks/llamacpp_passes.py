"""How well are llama.cpp's passes of drafts predicted whose shape is not in the profile?

    python benchmarks/llamacpp_passes.py measure FOLDER DTYPE.. [--seconds 110]
    python benchmarks/llamacpp_passes.py judge PROFILE..

`measure` times the target, the six drafts of a whole profile and three others in turn, in one
process on one thread, and writes them as rows of a profile; times are divided by how slow the
target's pass between them was. `judge` leaves the drafts of a profile out one shape at a time; of
one by `measure` it also predicts the three others from rows such as `archsearch profile` has.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import archsearch
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import parameters
from archsearch.architecture.ops import Part
from archsearch.engines.environments.environment import find_python
from archsearch.engines.measure.passes import ONE_REQUEST_GAMMAS, spread_drafts
from archsearch.hardware.identify import resolve_device
from archsearch.latency.engine_passes import EnginePasses
from archsearch.models.drafts import build_draft, save_draft
from archsearch.models.gguf_file import write_gguf
from archsearch.models.targets import resolve_target
from archsearch.pipeline.profile.engine import CONTEXTS
from archsearch.profiles import Measurement, PassShape, Profile, freeze_shape
from archsearch.search.space import load_space
from llamacpp_rounds import SHAPES, TARGET, draft_of

GAMMAS = range(1, 9)


def models() -> tuple[Architecture, list[Architecture], list[Architecture]]:
    """The target, a profile's six drafts, three that it has not seen."""
    target = resolve_target(TARGET).architecture
    drawn = [s.replace(draft_vocab_size=None) for s in load_space("demo").sample(target, 400, 0)]
    small = [shape for shape in drawn if parameters(shape) <= parameters(target) / 2]
    unseen = [draft_of(target, *shape) for shape in SHAPES]
    return target, spread_drafts(small, len(ONE_REQUEST_GAMMAS)), unseen


def measure(folder: Path, dtypes: Sequence[str], seconds: float) -> None:
    """A profile of the passes of all models."""
    device = {**resolve_device("cpu").to_dict(), "threads": 1}
    profile = Profile(device, {}, origin="benchmarks/llamacpp_passes.py", folder=folder)
    folder.mkdir(parents=True, exist_ok=True)
    profile.save_header()
    target, six, three = models()
    workers = Path(archsearch.__file__).parent / "engines"
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        for dtype in dtypes:
            files = []
            for number, shape in enumerate((target, *six, *three)):
                save_draft(build_draft(shape), base / "weights")
                files.append(str(base / f"{number}.gguf"))
                write_gguf(base / "weights", Path(files[-1]), dtype=dtype, tokens_needed=False)
            ask = {
                "folders": [str(workers / "child"), str(workers / "llamacpp" / "worker")],
                "files": files,
                "seconds": seconds,
                "contexts": CONTEXTS,
                "gammas": list(GAMMAS),
            }
            (base / "ask.json").write_text(json.dumps(ask), encoding="utf-8")
            worker = Path(__file__).with_name("llamacpp_turns.py")
            command = [find_python("llama.cpp"), worker, base / "ask.json", base / "answer.json"]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
            rounds = json.loads((base / "answer.json").read_text(encoding="utf-8"))
            for row in rows_of(rounds, dtype, target, [*six, *three]):
                profile.record(row)


def rows_of(
    rounds: Sequence[tuple[int, int, int, list[float], float, float, float | None]],
    dtype: str,
    target: Architecture,
    drafts: Sequence[Architecture],
) -> list[Measurement]:
    """Rows of kind `pass` from what llamacpp_turns.py answers."""
    times: dict[tuple[str, Architecture, int, int, str], list[float]] = {}

    def keep(role: str, arch: Architecture, tokens: int, at: int, cache: str, s: float) -> None:
        times.setdefault((role, arch, tokens, at, cache), []).append(round(s, 6))

    for _, gamma, at, _, verify, _, plain in rounds:
        keep("target", target, gamma + 1, at, "cold", verify)
        if plain is not None:
            keep("target", target, 1, at, "cold", plain)
    usual = {(key[2], key[3]): statistics.median(found) for key, found in times.items()}
    for number, gamma, at, singles, verify, behind, _ in rounds:
        slow = verify / usual[gamma + 1, at]
        for single in singles:
            keep("draft", drafts[number], 1, at, "warm", single / slow)
        keep("draft", drafts[number], gamma + 1, at, "cold", behind / slow)
    found = []
    for (role, arch, tokens, at, cache), each in times.items():
        shape = PassShape("llama.cpp", role, arch, 1, tokens, at)
        kept = tuple(each[:: -(-len(each) // 40)])
        found.append(
            Measurement("pass", freeze_shape(shape.to_dict()), dtype, "eager", cache, kept)
        )
    return found


def errors(
    passes: EnginePasses, train: list[Measurement], judged: Sequence[Measurement]
) -> list[float]:
    """Relative errors of `judged` by what `train` teaches."""
    learnt = copy.copy(passes)
    learnt._fit_passes(train)
    found = []
    for row in judged:
        shape = PassShape.of(row)
        part = Part(shape.batch, shape.tokens, shape.context)
        value = learnt.forward_s(shape.architecture, part, cold=row.cache == "cold").value
        found.append(value / row.median_s - 1.0)
    return found


def judge(folder: Path) -> None:
    """Print what left-out shapes were predicted as."""
    profile, (target, six, three) = Profile.load(folder), models()
    for dtype in ("q4_0", "q8_0", "float16"):
        rows = profile.select("pass", dtype, "eager")
        if not rows:
            continue
        passes = EnginePasses(profile, dtype, "eager", "llama.cpp")
        shapes = [PassShape.of(row) for row in rows]
        drafts = list(dict.fromkeys(s.architecture for s in shapes if s.role == "draft"))
        left_out = []
        for draft in drafts:
            parts: tuple[list[Measurement], list[Measurement]] = ([], [])
            for row, shape in zip(rows, shapes, strict=True):
                parts[shape.architecture == draft].append(row)
            left_out += errors(passes, *parts)
        tell(f"{folder}, {dtype}: {len(drafts)} drafts left out in turn", left_out)
        if set(three) <= set(drafts):
            wanted = {(target, 1, at) for at in CONTEXTS}
            for place, (draft, gammas) in enumerate(zip(six, ONE_REQUEST_GAMMAS, strict=True)):
                for start, gamma in enumerate(gammas):
                    at = CONTEXTS[(place + start) % len(CONTEXTS)]
                    wanted |= {(target, gamma + 1, at), (draft, gamma + 1, at), (draft, 1, at)}
            train, judged = [], []
            for row, shape in zip(rows, shapes, strict=True):
                if shape.architecture in three:
                    judged.append(row)
                elif (shape.architecture, shape.tokens, shape.context) in wanted:
                    train.append(row)
            tell("  three by the rows of a whole profile", errors(passes, train, judged))


def tell(what: str, found: Sequence[float]) -> None:
    sizes = np.abs(found)
    print(
        f"{what}: {len(sizes)} passes, median {np.median(sizes):.1%}, within 15 %"
        f" {np.mean(sizes <= 0.15):.0%}, worst {sizes.max():.0%}, bias {np.median(found):+.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("folder", type=Path)
    measuring.add_argument("dtypes", nargs="+")
    measuring.add_argument("--seconds", type=float, default=110.0, help="of each precision")
    judging = commands.add_parser("judge")
    judging.add_argument("profiles", type=Path, nargs="+")
    asked = parser.parse_args()
    if asked.command == "measure":
        measure(asked.folder, asked.dtypes, asked.seconds)
    else:
        for folder in asked.profiles:
            judge(folder)


if __name__ == "__main__":
    main()
