"""Parameters between forwards: a script that computes with a parameter gets its present value, or an error.

Outside of forward and backward a parameter has a class with `__torch_function__`, made once for each class of
parameters. Inside it has its own class, so nothing is intercepted there. Instead of such a parameter, a torch function
gets:

    a question (shape, dtype, grad, repr, ...)      the parameter as it is
    a small parameter                               a copy of its value, whose gradient comes back to the parameter
    a larger one that is on the accelerator         the parameter as it is
    a larger one that is not                        a SlideError
    a function that writes (`clamp_`, `out=`, ...)  a copy, which then becomes the weights and the masters

`p.data`, `p.detach()` and views are an `Alias`: it reads the present value of its parameter and writes to it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ds_slide.runtime.core.context import AS_THEY_ARE

if TYPE_CHECKING:
    from ds_slide.integration.parameters import ParameterProtocol

PROTOCOL = "ds_slide_protocol"
"""Attribute of a parameter: the ParameterProtocol of its engine, which has the parameter's value."""


# ---- classes ---------------------------------------------------------------------------------------------------------


class _ThroughDispatch:
    """A tensor whose torch functions go through `_dispatch`."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented if _is_for_others(types) else _dispatch(func, args, kwargs or {})

    def __hash__(self) -> int:
        return id(self)


class Intercepted(_ThroughDispatch):
    """Mixed into the class of a parameter between forwards."""

    __slots__ = ()

    def __repr__(self) -> str:
        leave((self,))  # torch writes the class of other tensors before their elements
        try:
            return repr(self)
        finally:
            intercept((self,))

    def __reduce_ex__(self, protocol: Any) -> Any:
        with AS_THEY_ARE():
            own: Any = OWN[type(self)]
            return own.__reduce_ex__(self, protocol)


class _Classes(dict[type, type]):
    """The intercepted class, or the own class, for each class of parameters: for an intercepted class too."""

    def __missing__(self, own: type) -> type:
        names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__new__": _make_plain}
        intercepted: type = type(own)(own.__name__, (Intercepted, own), names)
        for kind in (own, intercepted):
            OWN[kind], INTERCEPTED[kind] = own, intercepted
        return self[own]


OWN, INTERCEPTED = _Classes(), _Classes()


def _make_plain(cls: type, *args: Any, **kwargs: Any) -> Any:
    """Make an ordinary parameter where a script calls the class of another one."""
    own = OWN[cls]
    return own.__new__(own, *args, **kwargs)


def intercept(parameters: Iterable[Any]) -> None:
    """Intercept all computations with the parameters from now on. Intercepted parameters stay as they are."""
    for parameter in parameters:
        parameter.__class__ = INTERCEPTED[parameter.__class__]


def leave(parameters: Iterable[Any]) -> None:
    """Give the parameters their own class back. Parameters that have it stay as they are."""
    for parameter in parameters:
        parameter.__class__ = OWN[parameter.__class__]


class Alias(_ThroughDispatch, torch.Tensor):
    """A view of a parameter. Its own elements are a snapshot, which only says what the view covers."""

    parameter: Any
    start: int | None
    """Bytes from the first element of the parameter. None: the whole parameter, whose shape the snapshot lacks."""

    def __repr__(self) -> str:  # type: ignore[override]
        if _without_value(self) is None:
            text: str = _dispatch(torch.Tensor.__repr__, (self,), {})
            return text
        return repr(self.as_subclass(torch.Tensor))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), self.clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


def _alias(snapshot: torch.Tensor, parameter: Any, start: int | None) -> Alias:
    alias = snapshot.as_subclass(Alias)
    alias.parameter, alias.start = parameter, start
    return alias


def _parameter_of(original: Any) -> Any:
    """Return the parameter of an alias; a parameter is returned itself."""
    return original.parameter if isinstance(original, Alias) else original


def _is_for_others(types: Sequence[type]) -> bool:
    """Whether a tensor with its own `__torch_function__`, such as logits not computed yet, is to come first."""
    default = torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
    others: list[Any] = [each for each in types if not issubclass(each, _ThroughDispatch)]
    return any(getattr(each.__torch_function__, "__func__", default) is not default for each in others)


# ---- kinds of functions ----------------------------------------------------------------------------------------------

_GET_DATA, _SET_DATA = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # type: ignore[attr-defined]
_COMPUTED = {getattr(torch.Tensor, name).__get__ for name in ("data", "T", "mT", "H", "mH", "real", "imag")}
_QUESTIONS = frozenset(
    "size dim ndimension numel nelement stride storage_offset is_contiguous is_floating_point is_complex is_signed "
    "is_inference is_pinned is_shared is_same_size is_set_to element_size data_ptr untyped_storage storage "
    "storage_type _typed_storage get_device __len__ __dir__ __dlpack_device__ __setstate__ register_hook "
    "register_post_accumulate_grad_hook retain_grad requires_grad_ detach_ share_memory_ pin_memory is_coalesced "
    "dense_dim sparse_dim dim_order is_conj is_neg is_distributed _is_view _is_zerotensor _use_count "
    "_has_compatible_shallow_copy_type".split()
)
_KEEPING_ELEMENTS = frozenset("detach to type float double half bfloat16 cuda cpu".split())
_BACKWARD = {torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward}
_IN_PLACE = {
    f"__i{name}__" for name in "add sub mul matmul truediv floordiv div mod pow and or xor lshift rshift".split()
} | {"__setitem__"}
_BY_MODULES = {
    nn.Module._apply.__code__,
    nn.Module._save_to_state_dict.__code__,
    nn.Module._load_from_state_dict.__code__,
}


def _is_question(func: Any, name: str) -> bool:
    if name in ("__get__", "__set__", "__delete__"):
        return func not in _COMPUTED and func != _SET_DATA
    return name in _QUESTIONS


def _is_called_by_module() -> bool:
    """Whether `nn.Module.to`, `state_dict` or `load_state_dict` calls: they go with parameters as they are, which are
    empty in ZeRO-3."""
    frame = sys._getframe(3)  # the frame that has called the torch function
    caller = frame.f_back
    return frame.f_code in _BY_MODULES or (caller is not None and caller.f_code in _BY_MODULES)


def _writes(name: str, kwargs: dict[str, Any]) -> bool:
    in_place = name in _IN_PLACE if name.startswith("__") else name.endswith("_")
    return in_place or kwargs.get("out") is not None or kwargs.get("inplace") is True


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", "")
    loads = name == "copy_" and args[0].numel()  # also `load_state_dict`, of a parameter that is there
    if _is_question(func, name) or (not loads and _is_called_by_module()):
        with AS_THEY_ARE():
            return func(*args, **kwargs)
    if func in _BACKWARD:
        return _backward(func, args, kwargs)
    if func == _SET_DATA:
        return _set_data(*args)
    if (name in _KEEPING_ELEMENTS or func == _GET_DATA) and (parameter := _without_value(args[0])) is not None:
        with AS_THEY_ARE():
            result = func(*args, **kwargs)
            return _alias(result.detach(), parameter, None) if isinstance(result, torch.Tensor) else result
    call = _Call(writes=_writes(name, kwargs))
    with AS_THEY_ARE():
        given, named = call.given(args), call.given(kwargs)
        result = func(*given, **named)
        call.write_back()
        return call.result(result)


def _without_value(of: Any) -> Any:
    """Return the parameter behind `of`, a parameter or an alias, if it is large and absent; otherwise None."""
    parameter = _parameter_of(of)
    if not isinstance(parameter, Intercepted):
        return None
    protocol: ParameterProtocol | None = vars(parameter).get(PROTOCOL)
    return None if protocol is None or protocol.is_readable(parameter) else parameter


def _backward(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call `func` with the parameters themselves, which graphs know by these objects. Torch functions go on being
    intercepted in the backward."""
    found = [each for each in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(each, Intercepted)]
    leave(found)
    try:
        return func(*args, **kwargs)
    finally:
        intercept(found)


def _set_data(to: Any, value: torch.Tensor) -> None:
    """Do `to.data = value`. An empty value changes the data type alone, as `module.to` does."""
    protocol: ParameterProtocol | None = vars(to).get(PROTOCOL) if isinstance(to, Intercepted) else None
    with AS_THEY_ARE():
        if protocol is None or not value.numel() or protocol.is_gathered(to):
            torch.Tensor.data.__set__(to, value)  # type: ignore[attr-defined]
            return
        there = bool(to.numel())
        value = _Call(writes=False).given(value)
        protocol.write(to, value.detach())
        if value.dtype != to.dtype:
            to.data = value if there else value.new_empty(0, device=to.device)


# ---- computing -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _StandIn:
    """The tensor that a torch function gets in place of a parameter or an alias."""

    original: Any
    parameter: Any
    given: torch.Tensor
    whole: torch.Tensor
    """The whole parameter; `given` may be a view of it."""
    version: int | None
    """The version of `whole` before the call. None where views and writes are plain torch's."""


class _Call:
    """One call of a torch function, with stand-ins in its arguments."""

    def __init__(self, *, writes: bool) -> None:
        self._writes = writes
        self._stand_ins: list[_StandIn] = []

    def given(self, node: Any) -> Any:
        """Return `node`, an argument or a container of arguments, with stand-ins for parameters and aliases."""
        if isinstance(node, _ThroughDispatch):
            for known in self._stand_ins:
                if known.original is node:
                    return known.given
            self._stand_ins.append(self._stand_in(node))
            return self._stand_ins[-1].given
        if type(node) in (tuple, list):
            return type(node)([self.given(each) for each in node])
        if type(node) is dict:
            return {key: self.given(each) for key, each in node.items()}
        return node

    def _stand_in(self, original: Any) -> _StandIn:
        is_alias = isinstance(original, Alias)
        parameter = _parameter_of(original)
        protocol: ParameterProtocol | None = vars(parameter).get(PROTOCOL)
        is_intercepted = issubclass(type(parameter), Intercepted)
        if protocol is None or not is_intercepted or protocol.is_gathered(parameter):
            whole = parameter.data if is_alias else parameter
            return _StandIn(original, parameter, _seen(original, whole), whole, None)
        if is_alias and original.requires_grad and (torch.is_grad_enabled() or not self._writes):
            snapshot = original.as_subclass(torch.Tensor)  # a graph has this snapshot
            return _StandIn(original, parameter, snapshot, snapshot, None)
        whole, in_use = protocol.present(parameter, together=self._writes)
        gets_gradient = not is_alias and parameter.requires_grad and torch.is_grad_enabled()
        if in_use and not self._writes and not (gets_gradient and protocol.is_small(parameter)):
            here: torch.Tensor = whole if is_alias else parameter
            return _StandIn(original, parameter, _seen(original, here), here, here._version)
        with torch.inference_mode(False), torch.no_grad():
            whole = whole.clone() if in_use else whole
        if gets_gradient:
            whole.requires_grad_().register_post_accumulate_grad_hook(protocol.bringer(parameter))
        return _StandIn(original, parameter, _seen(original, whole), whole, whole._version)

    def write_back(self) -> None:
        """Write the values that the function has written to the weights."""
        for each in self._stand_ins:
            if each.version is not None and each.version != each.whole._version:
                vars(each.parameter)[PROTOCOL].write(each.parameter, each.whole.detach())

    def result(self, node: Any) -> Any:
        """Return `node`, a result, with the originals of stand-ins, and aliases for views of them."""
        if isinstance(node, torch.Tensor):
            return self._result(node)
        if type(node) in (tuple, list):
            return type(node)([self.result(each) for each in node])
        if isinstance(node, np.ndarray):
            node.setflags(write=False)  # a write there would reach a copy
        return node

    def _result(self, tensor: torch.Tensor) -> torch.Tensor:
        for each in self._stand_ins:
            if tensor is each.given:
                original: torch.Tensor = each.original
                return original
        if tensor.layout is not torch.strided or not tensor.numel():
            return tensor
        for each in self._stand_ins:
            start = tensor.data_ptr() - each.whole.data_ptr()
            if each.version is not None and 0 <= start < each.whole.nbytes:
                return _alias(tensor, each.parameter, start)
        return tensor


def _seen(original: Any, whole: torch.Tensor) -> torch.Tensor:
    """Return the elements of `whole` that `original`, a parameter or an alias, covers."""
    if not isinstance(original, Alias) or original.start is None:
        return whole
    flat = whole.reshape(-1).view(original.dtype)
    start = flat.storage_offset() + original.start // flat.element_size()
    return flat.as_strided(original.size(), original.stride(), start)
