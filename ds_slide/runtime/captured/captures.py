"""Decides whether blocks replay recordings: it is tried where all batches have one shape, and kept where a step is
shorter with it.

    WAITING    until some steps in a row had one shape, with activations kept
    RECORDING  the next step records the blocks that keep all of their activations
    TRYING     some steps are timed, and compared with those before
    KEPT       the recordings stay, until a batch has another shape or memory is short
    OFF        a step is not shorter with recordings, or it is switched off

Recordings hold the kept activations of their blocks for ever, and some memory beside them. A batch of another shape
frees them, and recordings begin anew after a pause that doubles each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any, Literal

from ds_slide.plan.spare import Shape
from ds_slide.report.log import log, size
from ds_slide.runtime.activations.block_state import BlockState
from ds_slide.runtime.activations.checkpointing import BlockCall
from ds_slide.runtime.captured.block import CapturedBlock
from ds_slide.runtime.captured.checks import has_experts
from ds_slide.runtime.captured.graphs import Memory
from ds_slide.runtime.captured.inputs import SharedPlaces
from ds_slide.runtime.core.device import Device

STEADY = 3
"""Steps of one shape that are timed before a recording, and after it."""
SHORTER = 0.98
"""Recordings stay where a step takes at most this part of the time before."""
BESIDE = 0.3
"""Memory beside the kept activations, as a part of them: copies of inputs and results, and temporary tensors."""
MOST_PAUSE = 1000
"""The longest pause before a recording, in steps."""


class Phase(Enum):
    WAITING = auto()
    RECORDING = auto()
    TRYING = auto()
    KEPT = auto()
    OFF = auto()


class Captures:
    """The thread that computes calls all methods."""

    def __init__(
        self,
        states: Mapping[int, BlockState],
        device: Device,
        wanted: Literal["auto"] | bool,
        *,
        copies: bool,
    ) -> None:
        """`copies`: gradients may be kept until after the next block's backward."""
        self._states = states
        self._device = device
        self._wanted = wanted
        self._copies = copies
        # With several ranks (`copies`) recordings have been run on the CPU accelerator alone.
        is_off = wanted is False or (wanted == "auto" and (copies or not device.is_cuda))
        self.phase = Phase.OFF if is_off else Phase.WAITING
        self._stream: Any = None
        """Of recordings; None before the first one."""
        self._memory: Memory | None = None
        self._shared = SharedPlaces()
        self._blocks: dict[int, CapturedBlock] = {}
        self._shape: Shape | None = None
        self._is_stale = False
        """Whether a batch has another shape than the recordings, which are freed as soon as no graph needs them."""
        self._whole: frozenset[int] = frozenset()
        """Blocks that keep all activations in the forward under way."""
        self._seconds: list[float] = []
        """Of the newest steps of one shape."""
        self._before_s = 0.0
        self._pause = STEADY
        """Steps of one shape before a recording."""
        self._pushed = 0
        """The forwards that recordings had begun when the last step ended."""
        self._unused = 0
        """The number of the last steps in a row without a replay."""

    # ---- a forward ---------------------------------------------------------------------------------------------------

    def begin(self, shape: Shape | None) -> None:
        """Begin a forward with gradients. Another shape frees the recordings, before anything is kept."""
        if self.phase is Phase.OFF:
            return
        if shape != self._shape:
            self._is_stale |= bool(self._blocks)
            self._shape, self._seconds = shape, []
        self._shared.forget()
        if self._memory is None or not self._memory.stack.is_empty:
            return
        if self._is_stale:
            self._free()
            return
        self._memory.lent.take_back()
        for block in self._blocks.values():
            if block.has_ended:
                block.end(block.why)

    def note_kept(self, whole: frozenset[int]) -> None:
        """Note which blocks keep all activations in this forward."""
        self._whole = whole

    @property
    def recorded(self) -> frozenset[int]:
        """The blocks whose activations have their memory already."""
        recorded = ((order, block) for order, block in self._blocks.items() if block.recording is not None)
        return frozenset(order for order, block in recorded if not block.has_ended)

    @property
    def ready(self) -> frozenset[int]:
        """The blocks that the forward that begins may replay: none while an older graph waits for its backward."""
        return self.recorded if self._memory is not None and self._memory.stack.is_empty else frozenset()

    def has_replayed(self, order: int) -> bool:
        """Whether the latest call of a block was a replay."""
        return order in self._blocks and self._blocks[order].has_replayed

    def block_of(self, call: BlockCall) -> Callable[[BlockCall], Any] | None:
        """Return what runs a call of a block that keeps all activations; None where it runs as it is written."""
        unit = call.unit
        if self.phase is Phase.OFF or self._is_stale or unit.is_streamed:
            return None
        block = self._blocks.get(unit.order)
        if block is None and self.phase is Phase.RECORDING and (self._wanted is True or not has_experts(call.modules)):
            block = self._blocks[unit.order] = CapturedBlock(
                call.modules,
                unit.name,
                self._states[unit.order],
                self._own_memory(),
                self._shared,
                len(self._blocks),
                copies=self._copies,
            )
        if block is None or block.has_ended or (block.recording is None and self.phase is not Phase.RECORDING):
            return None
        return block.run

    def _own_memory(self) -> Memory:
        if self._memory is None:
            self._device.release_cached()  # recordings take memory of their own, which torch does not free meanwhile
            self._stream = self._stream or self._device.stream()
            self._memory = Memory(self._device, self._stream)
        return self._memory

    # ---- a step ------------------------------------------------------------------------------------------------------

    def end_step(self, seconds: float, room: float, kept_bytes: int, gradient_bytes: int, *, is_settled: bool) -> None:
        """End a step of `seconds`. `room`: bytes free beside the `kept_bytes` of activations. `gradient_bytes`: of one
        block. `is_settled`: no decision about memory is to come in the next steps."""
        if self.phase is Phase.OFF or self._shape is None:
            return
        self._seconds = [*self._seconds[-MOST_PAUSE:], seconds]
        latest = self._seconds[-STEADY:]
        if self.phase is Phase.RECORDING:
            self._seconds, self.phase = [], Phase.TRYING
            if not self.recorded:
                self._give_up(f"no block could be recorded ({self._whys() or 'they have experts'})")
        elif self.phase is Phase.TRYING and len(self._seconds) >= STEADY:
            if self._memory is not None and self._memory.stack.is_empty:
                self._judge(min(latest))
        elif self.phase is Phase.KEPT and self._memory is not None:
            self._unused = self._unused + 1 if self._memory.stack.pushed == self._pushed else 0
            self._pushed = self._memory.stack.pushed
            self._is_stale |= self._unused >= STEADY
        elif self.phase is Phase.WAITING and self._whole and is_settled and len(self._seconds) >= self._pause:
            fits = room >= BESIDE * kept_bytes + 3 * gradient_bytes
            if fits or self._wanted is True:
                self._before_s, self.phase = min(latest), Phase.RECORDING

    def _judge(self, seconds: float) -> None:
        count = len(self.recorded)
        if self._wanted is not True and seconds > SHORTER * self._before_s:
            self._give_up(f"a step takes {seconds:.3f} s with them and {self._before_s:.3f} s without")
            return
        self.phase = Phase.KEPT
        whys = self._whys()
        rest = f"; others run as they are written ({whys})" if whys else ""
        log.info(
            f"{count} blocks replay recorded forwards and backwards (CUDA graphs): {seconds:.3f} s a step, after "
            f'{self._before_s:.3f} s{rest} ("ds_slide": {{"captured_blocks": false}} switches this off)'
        )

    def _whys(self) -> str:
        """Return why blocks are not recorded."""
        return "; ".join(sorted({block.why for block in self._blocks.values() if block.why}))

    def _give_up(self, why: str) -> None:
        log.info(f"blocks are not replayed from recordings (CUDA graphs): {why}")
        self._free()
        self.phase = Phase.OFF

    def note_second_derivative(self) -> None:
        """Note a backward with create_graph=True, which cannot be replayed."""
        if self.phase is not Phase.OFF and not self._blocks:
            self._give_up("a backward has create_graph=True")

    # ---- their memory ------------------------------------------------------------------------------------------------

    def give_up(self) -> int:
        """Free the recordings, where no graph waits for its backward. -> bytes that have come free."""
        if self._memory is None or not self._memory.stack.is_empty:
            return 0
        before = self._device.allocated() if self._device.is_cuda else 0
        self._free()
        freed = before - self._device.allocated() if self._device.is_cuda else 0
        if freed:
            log.info(f"recordings of blocks have given {size(freed)} back")
        return freed

    def leave_weights(self) -> None:
        """Free the recordings because weights are about to move: now, or once no graph waits for its backward."""
        self.give_up()
        self._is_stale = bool(self._blocks)

    def _free(self) -> None:
        """Free the recordings. The pause before new ones doubles."""
        if self._memory is not None:
            self._memory.lent.take_back()
        for block in self._blocks.values():
            block.end()
        self._blocks.clear()
        self._shared.clear()
        self._memory = None
        if self._device.is_cuda and self.phase is not Phase.WAITING:
            self._device.release_cached()
        if self.phase is not Phase.OFF:
            self.phase = Phase.WAITING
        self._seconds, self._is_stale = [], False
        self._pause = min(2 * self._pause, MOST_PAUSE)
        self._pushed = self._unused = 0

    def close(self) -> None:
        """Free the recordings for good."""
        self._free()
        self.phase = Phase.OFF
