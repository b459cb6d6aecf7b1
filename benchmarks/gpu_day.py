"""A day on a GPU: all that could not be measured without one, by one command, in under ten minutes.

    python benchmarks/gpu_day.py [--output DIR] [--budget 570] [--engine vllm] [--retry] [--json]
    python benchmarks/gpu_day.py --compare-only --output DIR      the comparison again, anywhere
    python benchmarks/gpu_day.py --dry-run  a rehearsal on the CPU at tiny sizes

Steps: identity; host time of launching drafts of several depths; whole rounds of speculation in
CUDA graphs and without; verification attention; the shapes of arXiv 2402.01528 and a part of
LLaMA-65B; `archsearch profile` in both modes with its check; the same target and drafts in
transformers; with --engine, an engine itself (minutes more: raise --budget).

Each step leaves one JSON file in the output folder and is skipped where its file is there: killed
or out of time, the same command goes on. A step that fails, or finds no memory, is recorded as such
and the day goes on (--retry does those again). At the end all is compared with the profile that
ships for the device, or with its datasheet's roofline: compare.json and a table.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from pathlib import Path

from archsearch.errors import ArchsearchError
from archsearch.files import ensure_writable_dir, write_json, write_text
from archsearch.progress import say


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--output",
        type=Path,
        help="folder of the day (default: gpu-day/DEVICE; of a rehearsal gpu-day/rehearsal)",
    )
    made.add_argument(
        "--budget",
        type=float,
        default=570.0,
        help="seconds for everything; what is left over comes next time",
    )
    made.add_argument(
        "--check",
        type=int,
        default=20,
        help="whole drafts that the profile is checked with, per mode",
    )
    made.add_argument(
        "--allow-busy", action="store_true", help="measure although another process uses the GPU"
    )
    made.add_argument(
        "--engine",
        help=(
            "also run this engine itself, for example vllm (installed by: archsearch engine"
            " install)"
        ),
    )
    made.add_argument("--engine-python", type=Path, help="its interpreter")
    made.add_argument(
        "--retry", action="store_true", help="do steps again that failed or found no memory"
    )
    made.add_argument(
        "--compare-only",
        action="store_true",
        help="measure nothing, compare what lies in --output; needs no GPU",
    )
    made.add_argument("--dry-run", action="store_true", help="rehearse on the CPU at tiny sizes")
    made.add_argument(
        "--json", action="store_true", help="the comparison as JSON, last line of stdout"
    )
    made.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return made


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        return _child(options) if options.child else _day(options)
    except ArchsearchError as error:
        if str(error):
            say(f"Error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        say("stopped; the same command goes on")
        return 130


def _day(options: argparse.Namespace) -> int:
    """The watching process: never touches the GPU."""
    from gpuday.runner import Deadline, end_on_sigterm, forget_failed, result_of, supervise

    deadline = Deadline(options.budget)
    end_on_sigterm()
    left: list[str] = []
    folder = options.output or Path("gpu-day") / ("rehearsal" if options.dry_run else "")
    if not options.compare_only:
        if not options.dry_run:
            folder = options.output or folder / _claimed_device(options.allow_busy)
        ensure_writable_dir(folder)
        names = _step_names(options, folder)
        if options.retry:
            forget_failed(names, folder)

        def command(left_s: float) -> list[str]:
            kept = [f"--output={folder}", f"--budget={left_s:.1f}", f"--check={options.check}"]
            kept += [
                flag
                for flag, on in (
                    ("--allow-busy", options.allow_busy),
                    ("--dry-run", options.dry_run),
                )
                if on
            ]
            kept += [f"--engine={options.engine}"] if options.engine else []
            kept += [f"--engine-python={options.engine_python}"] if options.engine_python else []
            return [sys.executable, str(Path(__file__).resolve()), "--child", *kept]

        left = supervise(command, names, folder, deadline)
    from gpuday.compare import compare, text

    result = compare(folder)
    statuses = [
        entry
        for name in _step_names(options, folder)
        if (entry := result_of(folder, name)) is not None
    ]
    words = text(result, statuses)
    write_json(folder / "compare.json", result)
    write_text(folder / "compare.txt", words + "\n")
    print(words)
    say(f"all of it in {folder}")
    if left:
        say(f"left for want of time: {', '.join(left)}; the same command goes on with them")
    if options.json:
        print(json.dumps(result))
    return 0


def _claimed_device(allow_busy: bool) -> str:
    """Key of the GPU here. Raises ArchsearchError, one line, where there is none that can be used,
    or somebody is on it."""
    from archsearch.hardware.identify import idle_gpu
    from gpuday.day import placeholder, visible_device

    gpu, device = visible_device()
    device = device or placeholder(gpu)
    idle_gpu(device, allow_busy=allow_busy)
    return device.key


def _step_names(options: argparse.Namespace, folder: Path) -> list[str]:
    from gpuday.day import Day
    from gpuday.steps import steps

    return [
        step.name for step in steps(Day(folder, _sizes(options.dry_run), engine=options.engine))
    ]


def _sizes(rehearsal: bool):  # type: ignore[no-untyped-def]
    if rehearsal:
        from gpuday.rehearsal import tiny_sizes

        return tiny_sizes()
    from gpuday.day import real_sizes

    return real_sizes()


def _child(options: argparse.Namespace) -> int:
    """The measuring process: all that touches the GPU, and what may die of it."""
    import torch

    from gpuday.day import Day
    from gpuday.rehearsal import rehearsing
    from gpuday.runner import Deadline, run_steps, same_parent
    from gpuday.steps import steps

    day = Day(
        options.output,
        _sizes(options.dry_run),
        check=options.check,
        allow_busy=options.allow_busy,
        rehearsal=options.dry_run,
        engine=options.engine,
        engine_python=options.engine_python,
    )

    def device_answers() -> bool:
        """After a failure: whether CUDA still works in this process."""
        if not torch.cuda.is_available() or not torch.cuda.is_initialized():
            return True
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    with rehearsing() if options.dry_run else nullcontext():
        run_steps(
            steps(day),
            options.output,
            Deadline(options.budget),
            memory_errors=(MemoryError, torch.OutOfMemoryError),
            recover=device_answers,
            wanted=same_parent(),
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
