"""A training step of a model on the meta device: what it computes and what it keeps, with nothing computed or kept.

The model's own forward and backward run, with the kernels that were put into it. So all that autograd saves, recomputes
and frees is counted by storages, without the weights' storages. `scaled_dot_product_attention` is counted as the fused
kernel that GPUs have. On the meta device torch would take the plain one, which keeps matrices of length x length.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_slide.errors import SlideError
from ds_slide.plan.keeping import Kept
from ds_slide.plan.mixtures import Mixture, Run, run_of
from ds_slide.plan.operations import Operation, operations_of

FUNCTION = "_gradient_checkpointing_func"
"""The attribute of a layer of transformers that is called where it checkpoints."""
ALLOCATION = 512
"""Bytes. torch's allocator of GPU memory rounds up to a multiple."""


@dataclass
class Segment:
    """A part of a step. `unit`: the unit whose forward it is, or whose gradients are complete at its end; None: no
    unit."""

    unit: int | None
    operations: Counter[Operation] = field(default_factory=Counter)
    kept_bytes: int = 0
    """Bytes of a forward's segment: what lives at its end beyond what lived at its begin."""


@dataclass(frozen=True)
class Again:
    """An operator's run in the recomputation of a block."""

    run: Run
    operations: tuple[Operation, ...]


@dataclass(frozen=True)
class StepTrace:
    """One micro-batch. Bytes leave out weights: they are activations, and gradients until their unit has all."""

    forward: tuple[Segment, ...]
    backward: tuple[Segment, ...]
    saved_bytes: int
    """Bytes at the end of the forward."""
    peak_bytes: int
    moved_bytes: int = 0
    """Bytes of inputs of blocks that wait elsewhere from their forward until their backward."""
    on_ssd_bytes: int = 0
    """The part of `moved_bytes` that waits on SSD."""
    again: Mapping[int, Sequence[Again]] = field(default_factory=dict)
    """The runs in each block's recomputation, by the index of the block."""

    @property
    def flops(self) -> int:
        segments = (*self.forward, *self.backward)
        return sum(each.flops * count for segment in segments for each, count in segment.operations.items())

    def with_moved(self, nbytes: int, on_ssd: int = 0) -> StepTrace:
        """Return a copy with `nbytes` of inputs that wait in host memory, or `on_ssd` of them on SSD. Memory is at its
        peak in the loss or in the first backward of a block, while all of them wait."""
        return replace(
            self,
            saved_bytes=self.saved_bytes - nbytes,
            peak_bytes=self.peak_bytes - nbytes,
            moved_bytes=self.moved_bytes + nbytes,
            on_ssd_bytes=self.on_ssd_bytes + on_ssd,
        )


def kept_by_block(plain: StepTrace, checkpointed: StepTrace) -> dict[int, int]:
    """Return the bytes that each block saves without checkpointing, beyond what it saves with it."""
    found: Counter[int] = Counter()
    for segments, sign in ((plain.forward, 1), (checkpointed.forward, -1)):
        block = None
        for segment in segments:
            # The block's input may be freed in the next segment, which has no unit. Other modules keep the same in
            # both.
            block = block if segment.unit is None else segment.unit
            if block is not None:
                found[block] += sign * segment.kept_bytes
    return dict(found)


def with_kept(checkpointed: StepTrace, plain: StepTrace, kept: Kept) -> StepTrace:
    """Return the step that recomputes all blocks except for what `kept` keeps, from the steps that recompute all blocks
    and none.

    Memory is at its peak in the loss, where all that is kept lives, or in the backward of the last block. That block
    then has all that it saves, beside what the others keep."""
    saved = kept_by_block(plain, checkpointed)
    of_kept: dict[int | None, Segment] = {
        segment.unit: segment for segment in plain.backward if segment.unit in kept.whole
    }
    recomputed = sum(nbytes for unit, nbytes in saved.items() if unit not in kept.whole)
    recomputed -= sum(mixture.nbytes for mixture in kept.mixed.values())
    for segment in checkpointed.backward:
        if segment.unit is not None and segment.unit in kept.mixed:
            of_kept[segment.unit] = _without(segment, checkpointed.again[segment.unit], kept.mixed[segment.unit])
    saved_bytes, last = plain.saved_bytes - recomputed, max(saved, default=0)
    of_last = saved[last] if last in kept.whole else kept.mixed[last].nbytes if last in kept.mixed else 0
    of_others = saved_bytes - checkpointed.saved_bytes - of_last
    return replace(
        checkpointed,
        backward=tuple(of_kept.get(segment.unit, segment) for segment in checkpointed.backward),
        saved_bytes=saved_bytes,
        peak_bytes=max(plain.peak_bytes - recomputed, checkpointed.peak_bytes + max(0, of_others)),
    )


def _without(segment: Segment, again: Sequence[Again], mixture: Mixture) -> Segment:
    stays = [each.operations for each in again if each.run.result in mixture.results]
    return Segment(segment.unit, segment.operations - Counter(chain.from_iterable(stays)), segment.kept_bytes)


@dataclass(frozen=True)
class TracedUnit:
    """A unit of the model: its parameters, and the module of a block."""

    parameters: Sequence[nn.Parameter]
    block: nn.Module | None = None


def trace_step(model: nn.Module, units: Sequence[TracedUnit], batch: int, seq: int, gpu_memory: int) -> StepTrace:
    """Run a step of `batch` sequences of `seq` tokens. `model`: a causal language model on the meta device, in training
    mode. `gpu_memory`: bytes of the planned GPU; kernels choose their temporary memory by it. Raises SlideError where
    the forward needs to see values."""
    tracer = _Tracer(model, gpu_memory)
    tokens = torch.zeros(batch, seq, dtype=torch.long, device="meta")
    try:
        # A mode holds for one thread, and autograd has another thread for the meta device.
        alone = torch.autograd.set_multithreading_enabled(False)
        with alone, _listening(units, tracer), _fused_attention(), tracer:
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            saved = tracer.live
            tracer.begin_backward()
            loss.backward()
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError) as error:
        raise SlideError(
            f"the step of {type(model).__name__} cannot be traced without its values ({_first_line(error)}); plan with "
            "a model that is close to it in shape"
        ) from error
    again = {unit: tuple(runs) for unit, runs in tracer.again.items()}
    return StepTrace(tuple(tracer.forward), tuple(tracer.backward), saved, tracer.peak, again=again)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


@contextmanager
def _listening(units: Sequence[TracedUnit], tracer: _Tracer) -> Iterator[None]:
    """Tell `tracer` when the forward of a block begins and ends, and when the gradients of a unit are complete.

    Gradients are freed when the engine would free them. A block's gradients are freed when they are packed. An outer
    module's gradients are copied down or averaged in place, and freed when the next block's are complete."""
    handles: list[Any] = []
    copied: list[nn.Parameter] = []
    checkpoints: list[tuple[nn.Module, Any]] = []
    for index, unit in enumerate(units):
        trained = [parameter for parameter in unit.parameters if parameter.requires_grad]
        waiting = set(trained)

        def accumulated(
            parameter: torch.Tensor, waiting: set[nn.Parameter] = waiting, trained: Any = trained, index: int = index
        ) -> None:
            waiting.discard(parameter)
            if not waiting:
                waiting.update(trained)
                copied.extend(trained)
                if units[index].block is not None:
                    while copied:
                        copied.pop().grad = None
                tracer.complete(index)

        # Hooks on gradients, on the block's forward, and on its checkpoint.
        handles += [parameter.register_post_accumulate_grad_hook(accumulated) for parameter in trained]
        if unit.block is not None:
            handles.append(unit.block.register_forward_pre_hook(lambda *_, index=index: tracer.enter(index)))
            handles.append(unit.block.register_forward_hook(lambda *_: tracer.enter(None)))
            if (written := vars(unit.block).get(FUNCTION)) is not None:
                checkpoints.append((unit.block, written))
                vars(unit.block)[FUNCTION] = partial(_checkpoint, written, index, tracer)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for block, written in checkpoints:
            vars(block)[FUNCTION] = written
        for each in copied:
            each.grad = None


def _checkpoint(written: Any, index: int, tracer: _Tracer, function: Callable[..., Any], *inputs: Any) -> Any:
    """Run the script's own checkpoint on a function that tells `tracer` of each call, also in the recomputation."""

    def run(*given: Any) -> Any:
        with tracer.running(index):
            return function(*given)

    return written(run, *inputs)


@contextmanager
def _fused_attention() -> Iterator[None]:
    """Replace attention by the kernel that GPUs have: it keeps its inputs, its output and a number for each row. The
    function is replaced by name, because a mode of torch's functions does not reach recomputation in backward."""
    plain = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = _attention  # type: ignore[assignment]
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = plain


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, **_: Any
) -> torch.Tensor:
    if attn_mask is None and value.shape[-1] == query.shape[-1]:  # DeepSeek's values are shorter than its keys
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal)[0]
    if key.shape[1] != query.shape[1]:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    mask = None if attn_mask is None else attn_mask.expand(*query.shape[:3], key.shape[2])
    return efficient(query, key, value, mask, True, dropout_p, is_causal)[0]


class _Tracer(TorchDispatchMode):
    """Counts operations by segment, and the storages that live."""

    def __init__(self, model: nn.Module, gpu_memory: int) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.forward: list[Segment] = [Segment(None)]
        self.backward: list[Segment] = []
        self.again: defaultdict[int, list[Again]] = defaultdict(list)
        self._recomputed: int | None = None
        """The block whose recomputation is under way."""
        self._counts: Counter[str] = Counter()
        """Runs of each operator in it."""
        self._memory = gpu_memory
        self._at_begin = 0
        """`live` when the newest segment began."""
        tensors = (*model.parameters(), *model.buffers())
        self._known: dict[int, Any] = {_key(each): None for each in tensors}

    def enter(self, unit: int | None) -> None:
        if not self.backward:  # where blocks are recomputed their forwards run again
            self._end_forward()
            self.forward.append(Segment(unit))

    @contextmanager
    def running(self, block: int) -> Iterator[None]:
        """Mark that the checkpointed function of a block runs, in forward or again."""
        self._recomputed = block if self.backward else None
        self._counts.clear()
        try:
            yield
        finally:
            self._recomputed = None

    def _end_forward(self) -> None:
        """End the newest segment of the forward."""
        self.forward[-1].kept_bytes, self._at_begin = self.live - self._at_begin, self.live

    def begin_backward(self) -> None:
        self._end_forward()
        self.backward.append(Segment(None))

    def complete(self, unit: int) -> None:
        if self.backward:
            self.backward[-1].unit = unit
            self.backward.append(Segment(None))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            # The model asks whether the batch has no packing and no padding; here it has none.
            return True
        kwargs = kwargs or {}
        made = function(*args, **kwargs)
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        outputs = [each for each in tree_leaves(made) if isinstance(each, torch.Tensor)]
        new = [self._keep(each) for each in outputs]
        if any(new) or function._schema.is_mutable:
            name, count = function._schema.name, WORKSPACES.get(function._schema.name)
            self.peak = max(self.peak, self.live + (count(args, self._memory) if count else 0))
            segment = (self.backward or self.forward)[-1]
            operations = operations_of(name, function, args, kwargs, made, inputs, outputs, self._memory)
            segment.operations.update(operations)
            if self._recomputed is not None:
                run = run_of(function, self._counts[str(function)], operations, args, kwargs, made)
                self.again[self._recomputed].append(Again(run, tuple(operations)))
                self._counts[str(function)] += 1
        return made

    def _keep(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor has brought a new storage, which is then counted as long as it lives."""
        key = _key(tensor)
        if key in self._known or not tensor.is_meta:
            return False
        storage = tensor.untyped_storage()
        nbytes = -(-storage.nbytes() // ALLOCATION) * ALLOCATION

        def gone(_: Any) -> None:
            if self._known.pop(key, None) is not None:
                self.live -= nbytes

        self._known[key] = weakref.ref(storage, gone)
        self.live += nbytes
        return True


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _loss_workspace(args: Sequence[Any], memory: int) -> int:
    from ds_slide.kernels.loss.linear_cross_entropy import workspace_bytes

    hidden, weight = args[:2]
    return workspace_bytes(hidden, weight.shape[0], args[-2], memory)


WORKSPACES: dict[str, Callable[[Sequence[Any], int], int]] = {"ds_slide::linear_cross_entropy": _loss_workspace}
"""Bytes that operators take beside their results and free again, from their arguments and the memory of the GPU."""
