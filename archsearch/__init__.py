"""archsearch: hardware-aware draft-model architecture search for speculative decoding.

    from archsearch import Architecture, Workload, Profile, LatencyModel, SearchSpace, Scorer

The names load on first use, so that `import archsearch` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.2.0"

_PUBLIC = {
    "Architecture": "archsearch.architecture.architecture",
    "ArchsearchError": "archsearch.errors",
    "Device": "archsearch.hardware.device",
    "Estimate": "archsearch.estimate",
    "LatencyModel": "archsearch.latency.model",
    "Measurement": "archsearch.profiles",
    "PriorAcceptance": "archsearch.acceptance.prior",
    "Profile": "archsearch.profiles",
    "RooflineLatency": "archsearch.latency.roofline",
    "Score": "archsearch.search.objective",
    "Scorer": "archsearch.search.objective",
    "SearchSpace": "archsearch.search.space",
    "Workload": "archsearch.workload",
    "load_space": "archsearch.search.space",
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'archsearch' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
