"""`archsearch profile --host`: how fast this machine's host is, in the words that `--host`
takes."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from archsearch.engine_rounds import HOSTS
from archsearch.errors import MissingDataError


def profile_host(budget_s: float) -> dict[str, Any]:
    """Measured seconds of launching a decoder layer, the factor on the engines' host times, and the
    name of HOSTS that is nearest. Raises MissingDataError without torch and transformers."""
    try:
        from archsearch.profiling.timer import REFERENCE_S, measure_host

        found = measure_host(budget_s)
    except ImportError as error:
        raise MissingDataError(
            f"measuring the host needs torch and transformers: {error}"
        ) from None
    name = min(HOSTS, key=lambda each: abs(math.log(HOSTS[each][0] / found.factor)))
    where = "on the GPU" if found.device == "cuda" else "no GPU here: kernels run on the thread"
    words = (
        f"This host launches a decoder layer in {1e3 * found.layer_s:.2f} ms (quartiles "
        f"{1e3 * found.low_s:.2f} to {1e3 * found.high_s:.2f}, {found.repeats} passes, {where}); "
        f"published: {1e3 * REFERENCE_S:.2f}.\n"
        f"Nearest: --host {name}; as measured: --host {found.factor:.2f}"
    )
    return {
        **asdict(found),
        "factor": found.factor,
        "host": name,
        "source": "measured",
        "words": words,
    }
