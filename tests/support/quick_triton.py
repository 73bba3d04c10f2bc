"""Triton's interpreter with less work around each operation: the same numbers in about half of the time.

Each operation of a kernel makes types, shapes and their names anew, which takes longer than its work in NumPy on the
small tiles of the tests. Here a shape is made once, and a name only where somebody reads it.
"""

from __future__ import annotations

import builtins
import functools
from typing import Any

import numpy
import pytest
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def use(patch: pytest.MonkeyPatch) -> None:
    """Until `patch` is undone."""
    _prepare_once_a_launch(patch)
    _keep_shapes(patch)
    _compare_quickly(patch)
    _name_types_late(patch)
    _keep_numpy_types(patch)
    _multiply_bf16(patch)


def _prepare_once_a_launch(patch: pytest.MonkeyPatch) -> None:
    """The interpreter prepares its language once a launch, not for every function within a kernel. The preparation
    stays as it is until the launch ends, so another one from within does nothing."""
    prepare, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    prepared: set[int] = set()

    def prepare_once(function: Any) -> Any:
        if id(function.__globals__) in prepared:
            return None
        prepared.add(id(function.__globals__))
        return prepare(function)

    def launch_prepared(self: Any, *arguments: Any, **options: Any) -> Any:
        prepared.clear()
        return launch(self, *arguments, **options)

    patch.setattr(interpreter, "_patch_lang", prepare_once)
    patch.setattr(interpreter.GridExecutor, "__call__", launch_prepared)


def _keep_shapes(patch: pytest.MonkeyPatch) -> None:
    """Types and tensors of one shape have the same tuples of it. Nobody changes these."""
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    of_types: dict[builtins.tuple[int, ...], builtins.tuple[Any, int]] = {}
    of_tensors: dict[builtins.tuple[int, ...], builtins.tuple[Any, Any]] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = builtins.tuple(each.value if isinstance(each, core.constexpr) else each for each in shape)
        if (known := of_types.get(key)) is None:
            make_type(self, element_ty, shape)
            of_types[key] = self.shape, self.numel
        else:
            self.element_ty = element_ty
            self.shape, self.numel = known

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        key = builtins.tuple(type.shape.values) if type.is_block() else ()
        if (known := of_tensors.get(key)) is None:
            make_tensor(self, handle, type)
            of_tensors[key] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known

    patch.setattr(core.block_type, "__init__", init_type)
    patch.setattr(core.tensor, "__init__", init_tensor)


def _compare_quickly(patch: pytest.MonkeyPatch) -> None:
    """Whatever is compared with itself is equal, which the interpreter finds out element by element."""
    equal_types, equal_shapes = core.dtype.__eq__, core.tuple.__eq__
    broadcast = TritonSemantic.broadcast_impl_value

    def same_type(self: Any, other: Any) -> bool:
        if other is self:
            return True
        return self.name == other.name if type(other) is core.dtype else equal_types(self, other)

    def same_shape(self: Any, other: Any) -> Any:
        return core.constexpr(True) if other is self else equal_shapes(self, other)

    def broadcast_others(self: Any, left: Any, right: Any) -> Any:
        if left.type.is_block() and right.type.is_block() and left.type.shape is right.type.shape:
            return left, right
        return broadcast(self, left, right)

    patch.setattr(core.dtype, "__eq__", same_type)
    patch.setattr(core.tuple, "__eq__", same_shape)
    patch.setattr(TritonSemantic, "broadcast_impl_value", broadcast_others)


def _name_types_late(patch: pytest.MonkeyPatch) -> None:
    def set_nothing(self: Any, name: str) -> None:
        pass

    def init_tuple(self: Any, types: Any, fields: Any = None) -> None:
        self.types = types
        self.fields = fields or [""] * len(types)

    def tuple_name(self: Any) -> str:
        return "[" + ",".join(f"{key}:{each}" for key, each in zip(self.fields, self.types, strict=True)) + "]"

    patch.setattr(core.tuple_type, "__init__", init_tuple)
    patch.setattr(core.tuple_type, "name", property(tuple_name), raising=False)
    block_name = property(lambda self: f"<{self.shape}, {self.element_ty}>", set_nothing)
    patch.setattr(core.block_type, "name", block_name, raising=False)


def _keep_numpy_types(patch: pytest.MonkeyPatch) -> None:
    of_scalar = functools.cache(interpreter._get_np_dtype)
    of_pointer = interpreter._get_np_dtype

    def numpy_type(of: Any) -> Any:
        scalar = of.scalar
        return of_pointer(scalar) if isinstance(scalar, core.pointer_type) else of_scalar(scalar)

    patch.setattr(interpreter, "_get_np_dtype", numpy_type)


def _multiply_bf16(patch: pytest.MonkeyPatch) -> None:
    """A product of bf16 matrices. The interpreter keeps them as 16-bit integers, and multiplies those."""
    dot = interpreter.InterpreterBuilder.create_dot

    def widened(factor: Any) -> Any:
        if factor.dtype.scalar != core.bfloat16:
            return factor
        values = (factor.data.view(numpy.uint16).astype(numpy.uint32) << 16).view(numpy.float32)
        return interpreter.TensorHandle(values, core.float32)

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return dot(self, widened(a), widened(b), *others)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
