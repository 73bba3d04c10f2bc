"""DeepSpeed's optimizers without their compiled kernels.

With an Adam in the JSON, DeepSpeed builds DeepSpeedCPUAdam or FusedAdam, and their constructors compile an op: about
50 s on two cores, and a failure without a compiler. Here the object only carries hyper-parameters, so the op builder
is replaced for the length of the construction; type, parameter groups and attributes are the real ones.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_BUILDERS = (("deepspeed.ops.adam.cpu_adam", "CPUAdamBuilder"), ("deepspeed.ops.adam.fused_adam", "FusedAdamBuilder"))


class _NoKernels:
    """Op builder and op in one: nothing to compile, nothing to create, and nothing that could be called by mistake."""

    multi_tensor_adam = None

    def load(self) -> _NoKernels:
        return self

    def create_adam(self, *args: Any) -> None:
        """DeepSpeedCPUAdam makes its C++ object here."""

    def destroy_adam(self, *args: Any) -> None:
        """And frees it here."""


@contextmanager
def without_kernels() -> Iterator[None]:
    """Optimizers constructed inside have hyper-parameters and no kernels."""
    replaced: list[tuple[Any, str, Any]] = []
    for module_name, name in _BUILDERS:
        module = importlib.import_module(module_name)
        if hasattr(module, name):  # elsewhere in this DeepSpeed: then the op is compiled, as in stock
            replaced.append((module, name, getattr(module, name)))
            setattr(module, name, _NoKernels)
    try:
        yield
    finally:
        for module, name, original in replaced:
            setattr(module, name, original)
