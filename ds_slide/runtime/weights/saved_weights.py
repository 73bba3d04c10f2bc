"""Handles what autograd saves while a block computes: weights are saved as references to their place, other tensors as
usual.

A weight that has changed before backward raises autograd's own error. Without hooks autograd compares versions itself.

A weight lies in a slot of the window, and so do its views (`weight.t()`, which a linear layer saves). Autograd would
read whatever block occupies the slot when backward comes. So hooks for saved tensors enclose each streamed block, and
only these. Tensors saved by other modules are in no slot, and each hook costs the host 2 us a tensor and direction.
Autograd returns a parameter as the same object only without hooks (an autograd.Function may look for `ds_status` on its
saved parameter).

Torch applies only the innermost hooks. A block's hooks are the innermost, so they hand other tensors than weights to
the hooks around them: activation checkpointing's, `save_on_cpu`, a trainer's. A block that is recomputed for such hooks
is hooked as in its first forward, because checkpointing counts the saved tensors in both.

With `create_graph=True` a backward makes a graph of its own, which saves the weights that it computes with. Hooks for
that graph are opened when a node of the backward needs a weight. They end with the node: for each node autograd uses
the hooks of the thread that has called backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn

from ds_slide.model.subclasses import Recipe
from ds_slide.report.host import HostTrace
from ds_slide.runtime.core.calls import add_tensors, in_backward, mapped, unwrapped
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.weights.passed import fields_in, put, tensors_of
from ds_slide.runtime.weights.window import Slot

if TYPE_CHECKING:
    from ds_slide.runtime.engine import SlideRuntime

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]


# These classes are NamedTuples: an object is made for every saved tensor, and a frozen dataclass takes twice as long.
# `_made` makes them without a call of Python, which a NamedTuple's own constructor is.
_made = tuple.__new__
_WHOLE = frozenset((torch.Tensor, nn.Parameter))
"""Types that are made of no other tensors. This saves two calls of Python for each of 38 saved tensors of a block."""


class SlotReference(NamedTuple):
    """A reference to a saved tensor in a slot, by unit and place: when backward needs it, other blocks have used the
    slot and the unit may be in another one."""

    unit: Unit
    dtype: torch.dtype
    """The data type of the saved tensor, which may be another view of the weight's bytes."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    parameter: torch.Tensor | None
    """The parameter whose view it is, if autograd knows."""
    version: int | None
    """The version of the parameter when it was saved; None where a change is no error."""


class ParameterReference(NamedTuple):
    """A saved tensor that is a whole parameter of `unit`. Backward gets the parameter itself or a tensor on its memory,
    because torch copies a hook's result that requires a gradient."""

    unit: Unit
    parameter: nn.Parameter
    version: int | None


class SavedTensor(NamedTuple):
    """A saved tensor as it is, with its version: autograd compares versions only without hooks."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> SavedTensor:
        # A result that its own node saves would hold that node, and a graph without a backward would live for ever.
        return cls(tensor if tensor.is_leaf else tensor.detach(), tensor._version)

    def unchanged(self) -> torch.Tensor:
        """Return the tensor. Raises RuntimeError, like autograd's own, if it has been modified since."""
        if self.tensor._version != self.version:
            raise _modified(self.tensor, list(self.tensor.shape), self.version)
        return self.tensor


def _modified(tensor: torch.Tensor, shape: Sequence[int], expected: int) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(shape)}] is at version {tensor._version}; expected version {expected} instead. Hint: "
        "enable anomaly detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )


def _require_unchanged(saved: SlotReference | ParameterReference) -> None:
    """Raise RuntimeError, like autograd's own, if the weight has been updated or modified since it was saved."""
    parameter = saved.parameter
    if saved.version is not None and parameter is not None and parameter._version != saved.version:
        of = zip(saved.unit.parameters, saved.unit.layout.entries, strict=True)
        shape = next(entry.shape for each, entry in of if each is parameter)
        raise _modified(parameter, shape, saved.version)


class _Packed(NamedTuple):
    """The result of the outer hooks for a saved tensor."""

    value: Any


class _Apart(NamedTuple):
    """A saved tensor subclass that is made of other tensors, which are saved each for itself: they may be in a slot."""

    recipe: Recipe
    tensors: dict[str, Any]


class References(Protocol):
    """Saves tensors as references to their place, and finds them again."""

    def reference(self, tensor: torch.Tensor) -> SlotReference | ParameterReference | None:
        """Return a reference to a tensor, None for a tensor that is saved as usual."""

    def restore(self, saved: Any) -> torch.Tensor:
        """Return the tensor of a reference."""


class SavedWeights:
    """The `References` of each block's forward. `slots`: all slots, by the address of their memory. `bound`: the slots
    that parameters point to, by `Unit.order`. `engine` binds the weights that backward needs."""

    def __init__(self, slots: Mapping[int, Slot], bound: Mapping[int, Slot], engine: SlideRuntime) -> None:
        self._slots = slots
        self._bound = bound
        self._engine = engine
        self._unchecked = _Unchecked(self)
        self._of_backward = _OfBackward(self)

    def open(self, host: HostTrace | None, order: int) -> OpenHooks:
        """Open hooks for block `order` that are in force until they are closed. `host`: measures what they cost."""
        # A checkpoint computes with the weights at the time of its recomputation, and torch does not compare versions.
        around = hooks_around()
        recomputes = around is not None and around[0].__module__ == "torch.utils.checkpoint"
        references = self._unchecked if recomputes else self
        return OpenHooks(references) if host is None else _MeasuredHooks(references, host, order)

    def has_raw(self) -> bool:
        """Whether a graph has saved weights of a bound block as they are."""
        return any(slot.unit is not None and slot.unit.uses.raw for slot in self._bound.values())

    def _slot_of(self, tensor: torch.Tensor) -> Slot | None:
        if tensor.layout is not torch.strided or tensor._is_zerotensor():  # forward mode saves zeros without memory
            return None
        return self._slots.get(tensor.untyped_storage().data_ptr())

    def copied(self, output: Any) -> Any:
        """Return a block's output, with copies in place of weights and their views. Their slot will hold another block
        when the model reads them: a linear layer may return its bias, for example, which the next layer adds."""
        tensors: list[torch.Tensor] = []
        add_tensors(tensors, output)
        fields = [] if tensors else fields_in(output)  # beside tensors, an object is mostly a cache of all blocks
        tensors += tensors_of(fields)
        copies = {id(each): each.clone() for each in tensors if self._slot_of(unwrapped(each)) is not None}
        if not copies:
            return output
        put(fields, copies)
        return mapped(lambda leaf: copies.get(id(leaf), leaf), output)

    def reference(self, tensor: torch.Tensor) -> SlotReference | ParameterReference | None:
        slot = self._slot_of(tensor)
        if slot is None or slot.unit is None:
            return None
        version = tensor._version  # a view has its parameter's
        base = tensor._base
        if type(base) is not nn.Parameter:  # mostly a linear layer has saved its transposed weight
            if isinstance(tensor, nn.Parameter):
                return _made(ParameterReference, (slot.unit, tensor, version))
            base = _parameter_at(slot.unit, tensor)
            version = 0 if base is None else base._version
        place = tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset())
        return _made(SlotReference, (slot.unit, tensor.dtype, *place, base, version))

    def restore(self, saved: SlotReference | ParameterReference) -> torch.Tensor:
        if saved.parameter is not None and saved.version != saved.parameter._version:
            _require_unchanged(saved)
        # Mostly the block is bound already, for another saved tensor: a block has nine or more.
        unit = saved.unit
        slot = self._bound.get(unit.order) if unit.uses.in_backward else None
        if slot is None:
            slot = self._engine.enter_backward(unit)
        return self.at(saved, slot)

    def restore_again(self, saved: SlotReference | ParameterReference) -> torch.Tensor:
        """Give a weight to the graph of a backward. Its nodes run before the block's own nodes."""
        _require_unchanged(saved)
        return self.at(saved, self._bound.get(saved.unit.order) or self._engine.visit(saved.unit))

    def at(self, saved: SlotReference | ParameterReference, slot: Slot | None) -> torch.Tensor:
        """Return the tensor of a reference, in the slot that is bound to its unit."""
        if torch.is_grad_enabled() and not _is_open(self._of_backward):  # in backward: with create_graph
            OpenHooks(self._of_backward)
        if isinstance(saved, ParameterReference):
            return saved.parameter
        assert slot is not None
        return slot.elements(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)


class _Unchecked:
    """The references of a forward under a checkpoint, which may change weights before it recomputes."""

    def __init__(self, saved: SavedWeights) -> None:
        self._saved = saved
        self.restore = saved.restore

    def reference(self, tensor: torch.Tensor) -> SlotReference | ParameterReference | None:
        reference = self._saved.reference(tensor)
        return None if reference is None else reference._replace(version=None)


class _OfBackward:
    """The references of the graph that a backward with `create_graph` makes."""

    def __init__(self, saved: SavedWeights) -> None:
        self.reference, self.restore = saved.reference, saved.restore_again


def _parameter_at(unit: Unit, tensor: torch.Tensor) -> nn.Parameter | None:
    """Return the parameter of `unit` on the memory of `tensor`, which is no view of it for autograd."""
    start = tensor.storage_offset() * tensor.element_size()
    for parameter, entry in zip(unit.parameters, unit.layout.entries, strict=True):
        if 0 <= start - entry.slot_offset * unit.dtype.itemsize < entry.items(entry.numel) * unit.dtype.itemsize:
            return parameter
    return None


def _is_open(references: References) -> bool:
    """Whether the topmost hooks use these references."""
    top = hooks_around()
    owner = None if top is None else getattr(top[0], "__self__", None)
    return isinstance(owner, OpenHooks) and owner.references is references


def hooks_around() -> tuple[Pack, Unpack] | None:
    """Return the innermost hooks for saved tensors in this thread."""
    around: tuple[Pack, Unpack] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return around


def only_hooks_of_block(pair: tuple[Pack, Unpack]) -> bool:
    """Whether `pair` are a block's hooks, with no other hooks around them."""
    owner = getattr(pair[0], "__self__", None)
    return isinstance(owner, OpenHooks) and owner.are_alone


def _stack() -> list[tuple[Pack, Unpack]]:
    """Return all hooks in force, with the last opened at the end."""
    above = []
    while (top := hooks_around()) is not None:
        above.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    above.reverse()
    for pair in above:
        torch._C._autograd._push_saved_tensors_default_hooks(*pair)
    return above


class OpenHooks:
    """Hooks that are in force from their construction to `close`."""

    def __init__(self, references: References) -> None:
        self.references = references
        self._reference, self._restore = references.reference, references.restore
        self._below = _stack()
        self._around = self._below[-1] if self._below else None
        torch._C._autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)

    @property
    def are_alone(self) -> bool:
        """Whether there are no other hooks around these."""
        return self._around is None

    def close(self) -> None:
        """Take away these hooks only. A forward hook of the block that opened other hooks closes them later.

        An interrupt (Ctrl-C) leaves these hooks open. Then the contexts around the block exit, and each pops the top of
        the stack: the first one pops these hooks, and each later one the hooks of the context inside it. So if these
        hooks are gone, one entry too many is left below them. It belongs to a context that has exited, and is removed
        instead.
        """
        if (top := hooks_around()) is not None and top[0] == self._pack:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            return
        stack = _stack()
        stale = next((place for place, pair in enumerate(stack) if pair[0] == self._pack), None)
        if stale is None:
            pairs = zip(stack, self._below, strict=False)
            stale = sum(1 for _ in itertools.takewhile(lambda both: both[0] == both[1], pairs)) - 1
        if stale < 0:
            return
        for _ in stack[stale:]:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        for pair in stack[stale + 1 :]:
            torch._C._autograd._push_saved_tensors_default_hooks(*pair)

    def _pack(self, tensor: torch.Tensor) -> SavedTensor | SlotReference | ParameterReference | _Packed | _Apart:
        recipe = None if type(tensor) in _WHOLE else Recipe.of(tensor)
        if recipe is not None and self._has_reference(recipe, tensor):
            return _Apart(recipe, {name: self._pack(getattr(tensor, name)) for name in recipe.names})
        if tensor.is_conj() or tensor.is_neg():  # a view with a flag, which its place does not show
            tensor = tensor.resolve_conj().resolve_neg()
        reference = self._reference(tensor) if recipe is None else None
        if reference is not None:
            return reference
        if self._around is not None:
            return _made(_Packed, (self._around[0](tensor),))
        return _made(SavedTensor, (tensor if tensor.is_leaf else tensor.detach(), tensor._version))  # `SavedTensor.of`

    def _has_reference(self, recipe: Recipe, tensor: torch.Tensor) -> bool:
        """Whether a subclass is made of a tensor that is in a slot."""
        for each in (getattr(tensor, name) for name in recipe.names):
            inner = Recipe.of(each)
            if self._reference(each) is not None if inner is None else self._has_reference(inner, each):
                return True
        return False

    def _unpack(self, saved: SavedTensor | SlotReference | ParameterReference | _Packed | _Apart) -> torch.Tensor:
        if type(saved) is SavedTensor:
            return saved.tensor if saved.tensor._version == saved.version else saved.unchanged()
        if type(saved) is _Apart:
            return saved.recipe.made({name: self._unpack(each) for name, each in saved.tensors.items()})
        if type(saved) is _Packed:
            assert self._around is not None
            return self._around[1](saved.value)
        return self._restore(saved)


class _MeasuredHooks(OpenHooks):
    """Hooks whose own time counts as the block's. The time of hooks around them does not: these may recompute it."""

    def __init__(self, references: References, host: HostTrace, order: int) -> None:
        self._host, self._order = host, order
        super().__init__(references)

    def _pack(self, tensor: torch.Tensor) -> SavedTensor | SlotReference | ParameterReference | _Packed | _Apart:
        if self._around is not None:
            return super()._pack(tensor)
        with self._host.own("backward" if in_backward() else "forward", self._order):
            return super()._pack(tensor)

    def _unpack(self, saved: SavedTensor | SlotReference | ParameterReference | _Packed | _Apart) -> torch.Tensor:
        if isinstance(saved, _Packed):
            return super()._unpack(saved)
        with self._host.own("backward", self._order):
            return super()._unpack(saved)
