"""How idle OpenMP threads wait: the user's choice, by libgomp's variables, before torch loads. It
is part of what a CPU profile was measured under, because it moves latencies.

archsearch sets none. libgomp's own way (threads spin at every barrier) is the fastest on a machine
that is not shared. Beside one other busy process a short spin or none is about twice as fast, but
on a virtual machine whose host is busy a thread that sleeps may wait long for its core: decoding
ran at 0.54 of its speed in quiet (benchmarks/thread_waiting.py). Training takes fewer threads
instead (`archsearch.training.pace`).
"""

from __future__ import annotations

import os
from typing import Final

POLICY_VARIABLES: Final = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
DEFAULT: Final = "default"


def waiting_policy() -> str:
    """The policy of this process in words; "default" where the user set none."""
    return (
        " ".join(f"{name}={os.environ[name]}" for name in POLICY_VARIABLES if name in os.environ)
        or DEFAULT
    )
