"""Parameters that a module reads in its forward though a module of another block owns them.

DeepSpeed finds them by a dictionary in place of each module's `_parameters`, which gathers what is absent while a
forward runs. It visits every module before and after each forward, and each access makes six calls of Python, of a
parameter that is there, too: a quarter of the host's calls in a micro-batch of one sequence. Here the modules are
visited once a step, and a parameter that is there costs two calls, or none where all weights stay on the GPU.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any

from deepspeed.runtime.zero.parameter_offload import ZeROOrderedDict
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch.compiler import is_dynamo_compiling

from ds_slide.runtime.core.compiled_code import is_compiled, uncompiled


class _Parameters(ZeROOrderedDict):
    """The parameters of one module."""

    def __getitem__(self, key: str) -> Any:
        parameter: Any = OrderedDict.__getitem__(self, key)
        # A status that changes from forward to forward must not become a guard of compiled code.
        if is_dynamo_compiling() or getattr(parameter, "ds_status", None) is not ZeroParamStatus.NOT_AVAILABLE:
            return parameter
        return super().__getitem__(key)

    def __reduce__(self) -> Any:
        # A pickled module is read where DS-Slide may be missing.
        return (ZeROOrderedDict, *super().__reduce__()[1:])


class _Present(_Parameters):
    """The parameters of one module in an engine whose weights all stay on the GPU. A read makes no call of Python."""

    __getitem__ = OrderedDict.__getitem__  # type: ignore[assignment]


class ExternalParameters:
    """`DeepSpeedEngine._forward_prologue` and `_forward_epilogue` of one engine."""

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)  # not the engine itself, which would then own itself
        self._dictionaries: list[_Parameters] = []
        self._kind: type[_Parameters] = _Parameters
        self._step = -1
        """The step in which the modules were visited: a script may add modules."""
        self._has_compiled = False
        """Whether the script has asked `torch.compile` for a module, up to that visit."""
        engine.optimizer.protocol.external = weakref.ref(self)
        # `engine.compile()` compiles the engine's forward, which calls both. Dynamo would compile `before` again in
        # each step, whose number it reads: 10 s a step for 36 blocks, in the first 8 steps.
        engine._forward_prologue = uncompiled(self.before)
        engine._forward_epilogue = uncompiled(self.after)

    def before(self, inputs: Any, kwargs: Any) -> Any:
        """Begin a forward: parameters that are absent are gathered when they are read."""
        engine: Any = self._engine()
        if engine.global_steps != self._step:
            self._step = engine.global_steps
            modules = list(engine.module.modules())
            self._has_compiled = is_compiled(engine) or any(map(is_compiled, modules))
            self._dictionaries = [_dictionary_of(module) for module in modules]
            self.watch_reads(not engine.optimizer.protocol.all_stay)
        for each in self._dictionaries:
            each._in_forward = True
        with _WithoutVisits(engine):
            return type(engine)._forward_prologue(engine, inputs, kwargs)

    def watch_reads(self, wanted: bool) -> None:
        """Gather absent parameters that are read, or not: because there are none."""
        # The class is a guard of compiled code, which makes no call of Python here anyhow. Another class would compile
        # all blocks once more: when the last of them comes to stay on the GPU, or in the step after `compile()`.
        if wanted:
            self._kind = _Parameters
        elif not self._has_compiled:
            self._kind = _Present
        for each in self._dictionaries:
            each.__class__ = self._kind

    def after(self) -> None:
        """End a forward."""
        engine: Any = self._engine()
        for each in self._dictionaries:
            each._in_forward = False
        with _WithoutVisits(engine):
            type(engine)._forward_epilogue(engine)


class _WithoutVisits:
    """A context in which DeepSpeed's own prologue and epilogue of `engine` leave the modules alone."""

    def __init__(self, engine: Any) -> None:
        self._attributes = vars(engine)

    def __enter__(self) -> None:
        self._attributes["zero_optimization_partition_weights"] = _no

    def __exit__(self, *_: object) -> None:
        del self._attributes["zero_optimization_partition_weights"]


def _no() -> bool:
    return False


def _dictionary_of(module: Any) -> _Parameters:
    """Return the module's parameters, in a dictionary of our class."""
    present = module._parameters
    if not isinstance(present, _Parameters):
        if not hasattr(module, "_original_parameters"):  # DeepSpeed restores it
            module._original_parameters = present
        module._parameters = _Parameters(module, present)
    own: _Parameters = module._parameters
    return own
