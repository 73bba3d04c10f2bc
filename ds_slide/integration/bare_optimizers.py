"""DeepSpeed's optimizers without their compiled kernels.

With an Adam or a Lion in the JSON, DeepSpeed builds an optimizer of its own, and the constructor compiles an op: about
50 s on two cores, and a failure without a compiler. Here the object only carries hyper-parameters, so the op builder
is replaced for the length of the construction; type, parameter groups and attributes are the real ones.

accelerate turns a script's Adam into a DeepSpeedCPUAdam before it calls `initialize`. Where its config has the key that
one gets kernels that are compiled when they are first called, which nobody does who goes on to `initialize`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_BUILDERS = (
    ("deepspeed.ops.adam.cpu_adam", "CPUAdamBuilder"),
    ("deepspeed.ops.adam.fused_adam", "FusedAdamBuilder"),
    ("deepspeed.ops.lion.cpu_lion", "CPULionBuilder"),
    ("deepspeed.ops.lion.fused_lion", "FusedLionBuilder"),
)


class _NoKernels:
    """Op builder and op in one: nothing to compile, nothing to create, and nothing that could be called by mistake."""

    multi_tensor_adam = multi_tensor_lion = None

    def load(self) -> _NoKernels:
        return self

    def create_adam(self, *args: Any) -> None:
        """DeepSpeedCPUAdam makes its C++ object here."""

    def destroy_adam(self, *args: Any) -> None:
        """DeepSpeedCPUAdam frees it here."""

    create_lion, destroy_lion = create_adam, destroy_adam


class _KernelsOnUse:
    """The op of one DeepSpeedCPUAdam, compiled when it is first called."""

    def __init__(self, builder: Callable[[], Any]) -> None:
        self._builder = builder
        self._created: tuple[Any, ...] = ()
        self._op: Any = None

    def load(self) -> _KernelsOnUse:
        return self

    def create_adam(self, *args: Any) -> None:
        self._created = args

    def destroy_adam(self, *args: Any) -> None:
        if self._op is not None:
            self._op.destroy_adam(*args)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy and pickle ask for such
            raise AttributeError(name)
        if self._op is None:
            op = self._builder().load()
            op.create_adam(*self._created)
            self._op = op
        return getattr(self._op, name)


@contextmanager
def without_kernels() -> Iterator[None]:
    """Optimizers constructed inside have hyper-parameters and no kernels."""
    with _built(lambda _builder: _NoKernels):
        yield


@contextmanager
def kernels_on_use() -> Iterator[None]:
    """Each DeepSpeedCPUAdam constructed inside compiles its kernels when it first calls them."""
    with _built(lambda builder: lambda: _KernelsOnUse(builder), _BUILDERS[:1]):
        yield


@contextmanager
def _built(instead_of: Callable[[Any], Any], builders: Sequence[tuple[str, str]] = _BUILDERS) -> Iterator[None]:
    replaced: list[tuple[Any, str, Any]] = []
    for module_name, name in builders:
        module = importlib.import_module(module_name)
        if hasattr(module, name):  # elsewhere in this DeepSpeed: then the op is compiled, as in stock
            replaced.append((module, name, getattr(module, name)))
            setattr(module, name, instead_of(getattr(module, name)))
    try:
        yield
    finally:
        for module, name, original in replaced:
            setattr(module, name, original)
