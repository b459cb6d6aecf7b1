"""A second device in this machine's memory: tensors that lie "elsewhere" and refuse to meet those
of the CPU, as a GPU's do.

For code that must run on a GPU, tested where there is none: who forgets to move a tensor gets an
error here. Values are computed by the CPU, so results are the CPU's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = "elsewhere"
# What moves between devices, and what a GPU takes an index from the CPU for.
MOVES = ("aten::copy_", "aten::_to_copy")
INDEXES = ("aten::index.", "aten::index_put", "aten::_index_put", "aten::_unsafe_index")


class Elsewhere(torch.Tensor):
    """A tensor of the second device; `inner` holds its values."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Elsewhere:
        outer = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(DEVICE, 0),
        )
        outer.inner = inner
        return outer

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Elsewhere({self.inner!r})"

    def tolist(self) -> Any:
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _check(name: str, args: Any, ours: list[Any], others: list[torch.Tensor]) -> None:
    """RuntimeError where tensors of both devices meet (numbers in tensors of no dimension may)."""
    if name.startswith(INDEXES):
        if not isinstance(args[0], Elsewhere):
            raise RuntimeError(f"{name}: a tensor of the CPU indexed by one that lies elsewhere")
        others = (
            []
            if name.startswith("aten::index.")
            else [x for x in tree_leaves(args[2:]) if x in others]
        )
    met = [x for x in others if x.dim() > 0]
    if met and not name.startswith(MOVES):
        raise RuntimeError(
            f"{name}: tensors on two devices, shapes {[tuple(x.shape) for x in (*met, *ours)]}"
        )


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if torch.is_inference_mode_enabled():  # there ops come whole that elsewhere come in their parts
        with _Mode():
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
    name = func.name()
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    ours = [x for x in tensors if isinstance(x, Elsewhere)]
    if ours:
        _check(name, args, ours, [x for x in tensors if not isinstance(x, Elsewhere)])
    device = kwargs.get("device")
    lands_here = not ours if device is None else torch.device(device).type != DEVICE
    if name.startswith("aten::copy_"):
        lands_here = not isinstance(args[0], Elsewhere)

    def bare(x: Any) -> Any:
        return (
            x.inner
            if isinstance(x, Elsewhere)
            else torch.device("cpu")
            if isinstance(x, torch.device)
            else x
        )

    found = func(*tree_map(bare, args), **tree_map(bare, kwargs))
    if name == "aten::_local_scalar_dense":
        return found
    same = {id(x.inner): x for x in ours} | {
        id(x): x for x in tensors if not isinstance(x, Elsewhere)
    }

    def outer(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return same[id(x)] if id(x) in same else x if lands_here else Elsewhere(x)

    return tree_map(outer, found)


@cache
def _register() -> None:
    from torch.utils import backend_registration

    class Module(backend_registration._DummyBackendModule):
        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.bfloat16]

    backend_registration._setup_privateuseone_for_python_backend(DEVICE, backend_module=Module())


@contextmanager
def second_device() -> Iterator[str]:
    """While it lasts `torch.device("elsewhere")` is one."""
    _register()
    tensor = torch.tensor

    def made(
        data: Any, *, device: Any = None, **kwargs: Any
    ) -> torch.Tensor:  # torch.tensor passes modes by
        return tensor(data, **kwargs) if device is None else tensor(data, **kwargs).to(device)

    torch.tensor = made
    try:
        with (
            _Mode(),
            torch.autograd.set_multithreading_enabled(False),
        ):  # a device's own thread knows no modes
            yield DEVICE
    finally:
        torch.tensor = tensor
