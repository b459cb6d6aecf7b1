"""How idle OpenMP threads wait: set before torch loads, because libgomp reads it once.

By default libgomp's threads spin at every barrier. Beside one busy process they spin away the very core that the last thread
needs: on two cores, training a small draft ran at 0.58 and decoding at 0.49 of the speed that the short spin below gives; in
quiet the short spin costs 6 % and 12 % (medians of two interleaved rounds of benchmarks/thread_waiting.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Final

SPIN_COUNT: Final = "1000"  # turns before a thread sleeps
POLICY_VARIABLES: Final = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # whoever set one of them has chosen
DEFAULT: Final = "default"
_OURS: Final = "ARCHSEARCH_SET_SPINCOUNT"


def set_waiting_policy() -> None:
    """Let idle threads of this process sleep soon; nothing where the user chose, torch is loaded or libgomp is not used."""
    chosen = any(name in os.environ for name in POLICY_VARIABLES)
    if chosen or "torch" in sys.modules or not sys.platform.startswith("linux"):
        return
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
    os.environ[_OURS] = "1"


def waiting_policy() -> str:
    """The policy of this process in words, part of what a CPU profile was measured under; "default" where none was set."""
    return " ".join(f"{name}={os.environ[name]}" for name in POLICY_VARIABLES if name in os.environ) or DEFAULT


def engine_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables for an engine in a process of its own: without the policy that archsearch chose for itself, because the
    engine will serve without it. What the user set goes along."""
    ours = ("GOMP_SPINCOUNT", _OURS) if _OURS in environment else ()
    return {name: value for name, value in environment.items() if name not in ours}
