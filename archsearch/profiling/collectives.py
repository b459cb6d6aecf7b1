"""All-reduce where several GPUs are present: one process per GPU, NCCL. Apart from the benches,
which hold one device each.

Where fewer GPUs are present nothing is measured, and the latency model takes a shipped table and
says `modelled`. Serving engines sum small messages over NVLink by kernels of their own: rows say
that they are NCCL's, and the model takes them for a wide answer.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from archsearch.architecture.ops import AllReduce
from archsearch.errors import RunFailed
from archsearch.profiles import Measurement, freeze_shape

NAMES: Final = {"nccl": "NCCL", "gloo": "Gloo"}
CALLS: Final = 32
REPEATS: Final = 9


def measurable(ops: Sequence[AllReduce]) -> list[AllReduce]:
    """Those of `ops` for which enough GPUs are present here."""
    count = torch.cuda.device_count()
    return [op for op in ops if 1 < op.ranks <= count]


def measure_all_reduces(
    ops: Sequence[AllReduce], dtype: str, mode: str, backend: str = "nccl"
) -> list[Measurement]:
    """A row for each of `ops`: seconds of one sum over `op.ranks` devices, of the slowest of them.

    `mode` graph: CALLS sums in one CUDA graph; eager: one call after the other. `backend` gloo runs
    on CPUs (tests). Raises RunFailed where a process died.
    """
    from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, spawn

    rows = []
    for ranks in sorted({op.ranks for op in ops}):
        sizes = [op.elements for op in ops if op.ranks == ranks]
        with tempfile.TemporaryDirectory(prefix="archsearch-allreduce-") as folder:
            try:
                spawn(_worker, (ranks, sizes, dtype, mode, backend, folder), nprocs=ranks)
            except (ProcessRaisedException, ProcessExitedException) as error:
                words = str(error).strip().rpartition("\n")[2]
                raise RunFailed(
                    f"measuring all-reduce over {ranks} devices failed: {words}"
                ) from error
            found = [
                json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)
            ]
        for number, size in enumerate(sizes):
            times = tuple(map(max, zip(*(times[number] for times in found), strict=True)))
            shape = freeze_shape({"elements": size, "ranks": ranks})
            how, kernel = (dtype, mode, "cold"), NAMES.get(backend, backend)
            rows.append(Measurement("all_reduce", shape, *how, times, kernel=kernel))
    return rows


def _worker(
    rank: int, ranks: int, sizes: list[int], dtype: str, mode: str, backend: str, folder: str
) -> None:
    """One process: joins the others, times each size, writes its times."""
    import torch.distributed

    on_gpu = backend == "nccl"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        backend, init_method=f"file://{folder}/meet", rank=rank, world_size=ranks
    )
    try:
        times = [
            _times(torch.zeros(size, dtype=getattr(torch, dtype), device=device), mode, on_gpu)
            for size in sizes
        ]
    finally:
        torch.distributed.destroy_process_group()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(times))


def _times(block: torch.Tensor, mode: str, on_gpu: bool) -> list[float]:
    """REPEATS times of one all-reduce of `block`, each over CALLS of them."""
    import torch.distributed

    def calls() -> None:
        for _ in range(CALLS):
            torch.distributed.all_reduce(block)

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    run = calls
    calls()
    wait()
    if mode == "graph" and on_gpu:
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog thread queries events meanwhile, which the default (global) mode would
        # take for an error.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            calls()
        run = graph.replay
        run()
    times = []
    for _ in range(REPEATS):
        torch.distributed.barrier()
        wait()
        start = time.perf_counter()
        for _ in range(3):
            run()
        wait()
        times.append((time.perf_counter() - start) / (3 * CALLS))
    return times
