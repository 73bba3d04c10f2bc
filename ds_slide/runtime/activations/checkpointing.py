"""The places where a layer of transformers checkpoints, taken over for the length of a forward.

Such a layer calls `self._gradient_checkpointing_func(function, *inputs)`, torch's checkpoint with its options filled
in, where `self.gradient_checkpointing` is set. While the whole model's forward runs, each block has our function in
that place, which decides call by call. Where the script has set the flag it stays, so that the layer does all else that
it does under checkpointing (it passes no key-value cache on, for example). Where it has not (`unasked`), the flag is
set for the length of the forward, unless the forward is to fill or to read a key-value cache. All of this is undone
when the forward has ended.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from ds_slide.plan.trace import FUNCTION
from ds_slide.runtime.core.calls import add_tensors
from ds_slide.runtime.core.compiled_code import apart, is_compiled, uncompiled
from ds_slide.runtime.core.unit import Unit

FLAG = "gradient_checkpointing"
# Options that leave the results of a block as they are without checkpointing. `context_fn` and `debug` do more than
# recompute, and without `preserve_rng_state` the recomputation draws another dropout than the forward.
UNDERSTOOD = frozenset(("use_reentrant", "determinism_check", "early_stop", "preserve_rng_state"))

Checkpoint = Callable[..., Any]
UNASKED: Checkpoint = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=True)
"""The checkpoint of blocks whose script has none. The re-entrant checkpoint would give no gradients to a block whose
inputs have none, as after frozen embeddings."""
_LAYER = ("transformers.modeling_layers", "GradientCheckpointingLayer")
_OFFLOADING = (
    "transformers.modeling_utils",
    "PreTrainedModel._activation_checkpointing_enable.<locals>.checkpoint_func",
)
"""The function of a layer where a script asks transformers 5.24 for `offload`: torch's checkpoint, with copies of its
inputs to host memory and back on the compute stream. The engine moves inputs only where memory is short, on another
stream."""
_CAPTURING = "transformers.utils.output_capturing"
"""The module of the hooks that a model gets once a forward was asked for hidden states, attentions or router logits.
They add their module's result to the whole model's output."""
_SUPPORTS = "supports_gradient_checkpointing"
_ABSENT = object()


@dataclass
class BlockCall:
    """A call of a block that its layer checkpoints: `written(function, *inputs)`. `written`: the script's checkpoint;
    `UNASKED` where it has none. `modules`: the block's own and all in it. The object lives as long as the block's
    forward, because it holds the inputs."""

    unit: Unit
    modules: Sequence[nn.Module]
    written: Checkpoint
    function: Callable[..., Any]
    inputs: tuple[Any, ...]

    @property
    def goes_through(self) -> bool:
        """Whether a backward goes through the block exactly as it would without checkpointing.

        Re-entrant checkpointing gives no gradients to a block whose inputs have none. Nor does it give any to results
        that a hook of transformers takes out of the block (router logits, for a loss of their own). Where the block
        uses tensors that are no inputs, the backward of the re-entrant form goes on through their graph by itself.
        """
        if not self._is_reentrant:
            return True
        beside = getattr(self.function, "keywords", {})
        return _has_gradient(self.inputs) and not _has_gradient(beside) and _CAPTURING not in _hook_owners(self.modules)

    @property
    def has_gradient(self) -> bool:
        """Whether the block's results need a gradient. Those of re-entrant checkpointing need one where inputs do."""
        if self._is_reentrant:
            return _has_gradient(self.inputs)
        given = self.inputs, getattr(self.function, "keywords", {})
        return any(each.requires_grad for each in self.parameters) or _has_gradient(given)

    @functools.cached_property
    def mixing_form(self) -> Checkpoint | None:
        """The checkpoint, not re-entrant, that takes a `context_fn` and replaces the script's. None where a backward
        would go through the two differently, or where a hook of the script runs inside: it may call operators in one of
        the two runs only.

        The re-entrant form does not compare a recomputation with its forward, and neither does its replacement, unless
        the script asks for it."""
        if not self.goes_through or any(map(_is_foreign, _hook_owners(self.modules))):
            return None
        if not self._is_reentrant:
            return self.written
        asked = {name: self._options[name] for name in ("determinism_check", "early_stop") if name in self._options}
        return functools.partial(UNASKED, **{"determinism_check": "none", **asked})

    @property
    def recomputing_form(self) -> Checkpoint:
        """The checkpoint that recomputes the block: the script's, or torch's other form instead of the re-entrant.

        The other form ends a recomputation at the last tensor that is needed. The re-entrant form also does the last
        product of a block again: 38 of 520 ms of the backward of 3 B
        (benchmarks/results/2026-11-26_nvidia-h100_host-and-kernels.md). The other form is used where `mixing_form` is
        one, for the same reasons."""
        return self.written if not self._is_reentrant else self.mixing_form or self.written

    @property
    def ends_early(self) -> bool:
        """Whether a recomputation ends earlier than in the script's form."""
        return self.recomputing_form is not self.written

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the block and of its parts."""
        return [parameter for each in (self.unit, *self.unit.parts) for parameter in each.parameters]

    @property
    def _options(self) -> dict[str, Any]:
        return self.written.keywords if isinstance(self.written, functools.partial) else {}

    @property
    def _is_reentrant(self) -> bool:
        return self._options.get("use_reentrant") is not False


class RunsBlocks(Protocol):
    """`ds_slide.runtime.activations.activations.Activations`."""

    def run(self, call: BlockCall) -> Any:
        """Return what the block returns."""

    def leave_unasked(self) -> None:
        """Run the script's model as it is written in this forward."""

    def leave_compiled(self, order: int) -> None:
        """Run a compiled block as it is written, from this forward on."""


def _call(function: Callable[..., Any], *inputs: Any) -> Any:
    return function(*inputs)


@dataclass(frozen=True)
class _Taken:
    """A block that is taken over: its checkpoint, and the values of its module's own dictionary before."""

    checkpoint: Checkpoint
    before: dict[str, Any]


class TakenOver:
    """The blocks whose checkpointing is ours while a forward runs; called by the thread that computes."""

    def __init__(self, blocks: Sequence[Unit], unasked: Collection[int], runner: RunsBlocks) -> None:
        """`unasked`: the blocks, by `Unit.order`, that are taken over also where no checkpointing is set."""
        self._runner = runner
        self._unasked = unasked
        self._modules = {
            unit.order: list(unit.spec.module.modules()) for unit in blocks if unit.spec.module is not None
        }
        """The module of each block, and those in it."""
        # One object for each block, for ever: torch.compile compiles anew for a new one.
        self._ours = {unit.order: self._ours_of(unit) for unit in blocks if unit.order in self._modules}
        self._taken: dict[int, _Taken] = {}
        self._left: set[int] = set()
        """Blocks that stay as they are written."""

    @property
    def orders(self) -> frozenset[int]:
        """Blocks that are taken over at present."""
        return frozenset(self._taken)

    @property
    def unasked(self) -> list[int]:
        """Blocks that are taken over at present though the script has not asked for it."""
        return [order for order, taken in self._taken.items() if taken.checkpoint is UNASKED]

    def begin(self) -> None:
        """Take over all blocks that may be. Blocks that an interrupt has left taken are given back first."""
        self.end()
        for order, (module, *inside) in self._modules.items():
            if order in self._left:
                continue
            ours: dict[str, Any] = {FUNCTION: self._ours[order]}
            if (written := _as_written(module)) is None:
                if order not in self._unasked or not _is_plain(module, inside):
                    continue
                written, ours[FLAG] = UNASKED, True
            own = vars(module)
            self._taken[order] = _Taken(written, {name: own.get(name, _ABSENT) for name in ours})
            own.update(ours)

    def leave(self, order: int) -> None:
        """Leave this block as it is written from the next forward on."""
        self._left.add(order)

    def leave_at_once(self, order: int) -> None:
        """Leave this block as it is written, and give it back."""
        self._left.add(order)
        self._give_back((order,))

    def leave_unasked(self) -> None:
        """Give back the blocks whose script has no checkpointing: this forward is not the same with it."""
        self._give_back(self.unasked)

    def end(self) -> None:
        """Give all of it back. Harmless when called twice."""
        self._give_back(self.orders)

    def _give_back(self, orders: Iterable[int]) -> None:
        for order in orders:
            taken, own = self._taken.pop(order), vars(self._modules[order][0])
            if own.get(FUNCTION) is self._ours[order]:
                own.update(taken.before)
                for name in [name for name, value in taken.before.items() if value is _ABSENT]:
                    del own[name]

    def _ours_of(self, unit: Unit) -> Callable[..., Any]:
        """Return what stands for the layer's checkpoint."""

        def run(function: Callable[..., Any], *inputs: Any) -> Any:
            written = self._taken[unit.order].checkpoint
            return self._runner.run(BlockCall(unit, self._modules[unit.order], written, function, inputs))

        def as_written(*_: Any) -> Checkpoint:
            # Traced code would record events of the GPU in a graph, and decide once for all forwards.
            written = self._taken[unit.order].checkpoint
            self._runner.leave_compiled(unit.order)
            return _call if written is UNASKED else written

        return apart(run, as_written)


def _as_written(module: nn.Module) -> Checkpoint | None:
    """Return the checkpoint of a block if leaving it out does not change the results, otherwise None."""
    # transformers sets it in the module's own dictionary: `getattr` on a module is slow, and there are 100 of them.
    written = vars(module).get(FUNCTION)
    if written is None or not vars(module).get(FLAG) or not module.training or is_compiled(module):
        return None
    plain, options = written, {}
    if isinstance(written, functools.partial):
        plain, options = written.func, written.keywords
        if written.args:
            return None
    if not options.keys() <= UNDERSTOOD or not options.get("preserve_rng_state", True):
        return None
    if (getattr(plain, "__module__", ""), getattr(plain, "__qualname__", "")) == _OFFLOADING:
        return functools.partial(checkpoint, **options)
    return written if plain is checkpoint else None


def _is_plain(module: nn.Module, inside: Sequence[nn.Module]) -> bool:
    """Whether a block without checkpointing computes the same with it: a second forward would call the script's own
    hooks a second time."""
    if vars(module).get(FLAG) or not module.training or is_compiled(module):
        return False
    return not any(map(_is_foreign, _hook_owners(inside)))


def _hook_owners(modules: Iterable[nn.Module]) -> Iterator[str]:
    """Yield the module of Python of each hook."""
    for each in modules:
        for hooks in (each._forward_pre_hooks, each._forward_hooks):
            for hook in hooks.values():
                yield getattr(hook, "__module__", None) or ""


def _is_foreign(owner: str) -> bool:
    return not owner.startswith(("ds_slide.", "transformers."))


def may_be_unasked(root: nn.Module, blocks: Sequence[Unit]) -> frozenset[int]:
    """Return the blocks below `root`, by `Unit.order`, that can be checkpointed though their script does not do it:
    layers of transformers whose model supports it, and that keep no running statistics."""
    supports: dict[int, bool] = {}
    for model in root.modules():  # outer ones first, so that the innermost decides
        if (supported := getattr(type(model), _SUPPORTS, None)) is not None:
            supports.update((id(module), bool(supported)) for module in model.modules())
    return frozenset(
        unit.order
        for unit in blocks
        if (module := unit.spec.module) is not None
        and supports.get(id(module))
        and any((base.__module__, base.__name__) == _LAYER for base in type(module).__mro__)
        and not any(isinstance(each, _NormBase) and each.track_running_stats for each in module.modules())
    )


class CacheHooks:
    """A hook of a model of transformers, which finds forwards that fill or read a key-value cache: there the blocks run
    as they are written."""

    NAMES = ("cache", "past_key_values", "past_key_value", "layer_past", "cache_params")
    """Names of the argument that holds the cache; "cache" since transformers 5.24."""

    def __init__(self, model: nn.Module, runner: RunsBlocks) -> None:
        self._runner = runner
        self._names = list(inspect.signature(type(model).forward).parameters)[1:]
        self._handle = model.register_forward_pre_hook(uncompiled(self._before), with_kwargs=True)

    @classmethod
    def on(cls, root: nn.Module, runner: RunsBlocks) -> list[CacheHooks]:
        """Return a hook for each model: a wrapper may ask its model for a cache, unknown to the wrapper's caller."""
        return [cls(module, runner) for module in root.modules() if hasattr(type(module), _SUPPORTS)]

    def remove(self) -> None:
        self._handle.remove()

    def _before(self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        if given.get("use_cache") or any(given.get(name) is not None for name in self.NAMES):
            self._runner.leave_unasked()


def _has_gradient(tree: Any) -> bool:
    """Whether a tensor in `tree` requires a gradient."""
    found: list[torch.Tensor] = []
    add_tensors(found, tree)
    return any(tensor.requires_grad for tensor in found)
