"""Decides which blocks replay recordings, for batches of which shapes.

    WAITING    until the use of memory is settled; and for a while after recordings had to be freed
    RECORDING  shapes are recorded, each when it has come often enough
    OFF        no block can be recorded, or it is switched off

A shape is recorded if the device waited for the host in most blocks of its last forward (`Waits`). A device that is
behind by a block would not be done earlier with a recording. Before memory is shared out, the times of a step tell the
same (`CallTimes.wait_for_host`): then recordings are expected.

Recordings of blocks that keep their activations need memory beside these, which all shapes share. Where it is not
spare, or most blocks stream, all blocks are recomputed instead: their recordings need the memory of one block
(`RecomputedBlock`). If other batches need the memory, the recordings are freed, and begin anew after a pause that
doubles each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Literal

from ds_slide.plan.spare import Shape
from ds_slide.report.log import log, size
from ds_slide.runtime.activations.block_state import BlockState
from ds_slide.runtime.activations.checkpointing import BlockCall
from ds_slide.runtime.captured.checks import has_experts, have_hooks
from ds_slide.runtime.captured.graphs import Memory
from ds_slide.runtime.captured.recomputed import RecomputedBlock
from ds_slide.runtime.captured.recordings import Recordings
from ds_slide.runtime.captured.shapes import STEADY, SeenShape, Shapes
from ds_slide.runtime.captured.trial import Trial
from ds_slide.runtime.captured.waits import Waits
from ds_slide.runtime.core.device import Device

BESIDE = 0.3
"""Memory beside the kept activations, as a part of them: copies of inputs and results, and temporary tensors."""
MOST_PAUSE = 1000
"""The longest pause before recordings, in steps."""


class Phase(Enum):
    WAITING = auto()
    RECORDING = auto()
    OFF = auto()


@dataclass(frozen=True)
class Wanted:
    """What recordings of a batch would need. `nbytes`: of the activations of all blocks. `of_block`: of the block that
    has the most. `gradient_bytes`: of the gradients of one block. `streams`: whether most blocks stream. `keeps`:
    whether blocks have kept activations in the forward before."""

    nbytes: float
    of_block: float
    gradient_bytes: int
    streams: bool
    keeps: bool = False

    @property
    def kept(self) -> float:
        """Bytes where all blocks keep their activations."""
        return (1 + BESIDE) * self.nbytes + 3 * self.gradient_bytes

    @property
    def recomputed(self) -> float:
        """Bytes where all blocks are recomputed."""
        return (1 + BESIDE) * self.of_block + 3 * self.gradient_bytes


class Captures:
    """The thread that computes calls all methods."""

    def __init__(
        self,
        states: Mapping[int, BlockState],
        device: Device,
        wanted: Literal["auto"] | bool,
        *,
        several_ranks: bool = False,
        divides_sequences: bool = False,
    ) -> None:
        """`divides_sequences`: ranks have parts of one sequence, and communicate in each block."""
        self._states = states
        self._device = device
        self._wanted = wanted
        self._several_ranks = several_ranks
        is_off = wanted is False or divides_sequences or (wanted == "auto" and not device.is_cuda)
        self.phase = Phase.OFF if is_off else Phase.WAITING
        self._stream: Any = None
        """Of recordings; None before the first one."""
        self._memory: Memory | None = None
        self.shapes = Shapes()
        self.waits = Waits(device, self.shapes)
        self._current: SeenShape | None = None
        """The shape of the newest forward."""
        self.recomputes = False
        """Whether all blocks that are recorded are recomputed."""
        self.are_expected = False
        """Whether recordings of recomputed blocks are to come: the device waits for the host, and their memory is left
        free. No block keeps activations until then."""
        self._missed = 0
        """Steps that might have brought the expected recordings, and have not."""
        self._trial = Trial()
        self._is_stale = False
        """Whether the recordings are freed as soon as no graph needs them."""
        self._steps = 0
        """Steps since recordings were freed last."""
        self._pause = STEADY
        """Steps before recordings begin."""
        self._pushed = 0
        """The forwards of blocks that recordings had begun when the newest forward began."""
        self._might_replay = False
        """Whether the newest forward began with recordings, and while no graph waited for its backward."""
        self._has_said = False

    # ---- a forward ---------------------------------------------------------------------------------------------------

    def begin(self, shape: Shape | None) -> None:
        """Begin a forward with gradients, in a batch of `shape`."""
        if self.phase is Phase.OFF:
            return
        if self._current is not None and self._current.recordings is not None:
            self._settle(self._current, self._current.recordings)
        if self._is_idle and self._memory is not None and self._memory.has_erred:
            self._free()
            self.phase = Phase.OFF
            log.warning(
                "a recording of a block (CUDA graph) has given other numbers than its operators, which were used "
                "instead; no block is replayed any more. Please report this with the model, torch's version and the "
                'GPU; "ds_slide": {"captured_blocks": false} avoids the comparison'
            )
            return
        if self._is_stale and self._is_idle:
            self._free()
        self.waits.note_forward(shape, records=self.phase is Phase.RECORDING)
        self._current = None if shape is None else self.shapes.see(shape)
        recordings = None if self._current is None else self._current.recordings
        self._might_replay = recordings is not None and self._is_idle
        if self._memory is not None:
            self._pushed = self._memory.stack.pushed
            if recordings is not None:
                recordings.shared.forget()
            if self._is_idle:
                self._memory.lent.take_back()

    def keep_apart(self) -> None:
        """Note that a mode watches the operators of this forward: nothing can be recorded. Blocks keep activations
        where these can be given up, not in recordings."""
        self._might_replay &= self.recomputes
        shape, memory = self._current, self._memory
        if shape is not None and memory is not None and shape.recordings is not None and shape.recordings.is_new:
            shape.recordings = None
            memory.recorded_shapes -= 1
            if not self.shapes.recorded:
                self._memory, self.recomputes = None, False  # it holds nothing yet

    def end_forward(self, *, completed: bool) -> None:
        """End the forward. `completed`: no exception has ended it. Otherwise some blocks may lack their recordings."""
        recordings = None if self._current is None else self._current.recordings
        if recordings is not None:
            self._is_stale |= recordings.is_open and not completed
            recordings.is_open = self.are_expected = False
            self._missed = 0

    def _settle(self, shape: SeenShape, recordings: Recordings) -> None:
        """Free what the forward before, which had these recordings, has left."""
        self._is_stale |= recordings.lacks_memory
        has_replayed = self._memory is not None and self._memory.stack.pushed > self._pushed
        shape.unused = 0 if has_replayed or not self._might_replay else shape.unused + 1
        if self._is_idle:
            recordings.release()
            if shape.unused >= STEADY or not recordings.blocks:
                recordings.end()
                shape.drop()
                if not self.shapes.recorded:
                    self._close_memory()

    @property
    def _is_idle(self) -> bool:
        """Whether no graph waits for the backward of a recording, and no replay is under way."""
        return self._memory is None or (self._memory.stack.is_empty and not self._memory.running)

    def room_of(self, room: float, wanted: Wanted) -> tuple[float, int]:
        """Decide whether the forward that begins records its blocks. `room`: bytes that it may keep beside recordings.
        -> bytes that it may keep, and how many of these are in the memory of recordings."""
        shape, held = self._current, self.nbytes
        if self.phase is Phase.OFF or shape is None or not self._is_idle:
            return room, 0
        if shape.recordings is None and wanted.nbytes and room >= 0 and self._is_due(shape):
            kept, recomputed = room + held >= wanted.kept, room + held >= wanted.recomputed
            recomputes = self.recomputes
            if self._memory is None:
                recomputes = not self._trial.has_failed and (wanted.streams or not (kept or self._is_asked))
            if self._is_asked or (recomputed if recomputes else kept):
                if self._memory is None:
                    self._memory = self._own_memory()
                    if recomputes:
                        self._trial.begin(compares=wanted.keeps and not self._is_asked)
                    else:
                        self._trial.cancel()
                self._memory.recorded_shapes += 1
                self.recomputes = recomputes
                shape.recordings = Recordings(self._memory, self._memory.recorded_shapes)
                return (0.0, 0) if recomputes else (room + held, held)
        if shape.recordings is not None:
            return (min(room, 0.0) if self.recomputes else room), 0
        if held and room < (0 if self.recomputes else wanted.nbytes):
            log.info(f"recordings of blocks are freed: batches of another shape need their {size(held)}")
            self._free()
            return room + held, 0
        return (min(room, 0.0) if self.are_expected else room), 0

    def expect(self, wanted: Wanted, *, waits_for_host: bool) -> float:
        """Decide whether recordings of recomputed blocks are to come. -> bytes to be left for them. `waits_for_host`:
        whether the device waits for the host in blocks that can be recorded."""
        may_come = self.phase is not Phase.OFF and not self._trial.has_failed and not self.nbytes and wanted.nbytes > 0
        may_come &= (self._is_asked or waits_for_host) and self._missed < STEADY
        is_soon = self._steps + STEADY >= self._pause
        self.are_expected = may_come and wanted.streams and is_soon
        return wanted.recomputed if may_come else 0.0

    @property
    def recompute_all(self) -> bool:
        """Whether all blocks are recomputed from recordings, or will be soon."""
        return self.recomputes or self.are_expected

    def _is_due(self, shape: SeenShape) -> bool:
        is_slow = self._is_asked or self.are_expected or shape.waited
        return self.phase is Phase.RECORDING and is_slow and self.shapes.is_due(shape)

    @property
    def _is_asked(self) -> bool:
        """Whether the JSON asks for recordings."""
        return self._wanted is True

    def _own_memory(self) -> Memory:
        self._stream = self._stream or self._device.stream()
        return Memory(self._device, self._stream, several_ranks=self._several_ranks)

    @property
    def nbytes(self) -> int:
        """Bytes of the GPU that recordings have for the tensors of their blocks."""
        return 0 if self._memory is None else self._memory.nbytes

    @property
    def recorded(self) -> frozenset[int]:
        """The blocks that have a recording for the shape of the newest forward."""
        recordings = None if self._current is None else self._current.recordings
        return frozenset() if recordings is None else recordings.recorded

    @property
    def ready(self) -> frozenset[int]:
        """The blocks that keep their activations in recordings in the forward that begins: none while an older graph
        waits for its backward."""
        return self.recorded if self._is_idle and not self.recomputes else frozenset()

    def has_replayed(self, order: int) -> bool:
        """Whether the latest call of a block was a replay."""
        recordings = None if self._current is None else self._current.recordings
        return recordings is not None and order in recordings.blocks and recordings.blocks[order].has_replayed

    def block_of(self, call: BlockCall) -> Callable[[BlockCall], Any] | None:
        """Return what runs a call of a block that keeps all activations; None where it runs as it is written."""
        unit = call.unit
        recordings = self._recordings
        if unit.is_streamed or recordings is None or self.recomputes:
            return None
        if unit.order in recordings.blocks or recordings.lacks_memory:
            block = recordings.block_of(unit.order)
            return None if block is None else block.run
        if not recordings.is_open or (self._wanted == "auto" and has_experts(call.modules)):
            return None
        self._make_place(recordings)
        return recordings.add(call, self._states[unit.order]).run

    def recomputed(self, call: BlockCall) -> RecomputedBlock | None:
        """Return what runs a call of a block that is recomputed; None where it runs through its checkpoint."""
        recordings = self._recordings
        if recordings is None or not self.recomputes or recordings.lacks_memory or not self._can_recompute(call):
            return None
        self._make_place(recordings)
        block = recordings.recomputed(call, self._states[call.unit.order])
        return block if block.may_run(call) else None

    def _can_recompute(self, call: BlockCall) -> bool:
        """Whether a recomputed block may have recordings."""
        unit = call.unit
        # Weights that are not all in their places when the block begins.
        if unit.experts or unit.carried or unit.is_gathered:
            return False
        return call.mixing_form is not None and not (self._wanted == "auto" and has_experts(call.modules))

    def may_record(self, call: BlockCall) -> bool:
        """Whether a recomputed block can probably be recorded."""
        return self._can_recompute(call) and not have_hooks(call.modules[1:])

    def _make_place(self, recordings: Recordings) -> None:
        """Make place for recordings that begin."""
        if not recordings.blocks:
            if (gone := self.shapes.make_place()) is not None:
                gone.end()
            self._device.release_cached()  # the pools may grow, and torch frees no cached memory in a recording

    @property
    def _recordings(self) -> Recordings | None:
        """The recordings for calls in the newest forward."""
        if self.phase is Phase.OFF or self._is_stale or self._current is None:
            return None
        return self._current.recordings

    def note_call(self) -> None:
        """Note a call of a block in the newest forward, before the host may wait for its weights. Where the shape has
        no recordings, it counts whether the device waits for the host."""
        self.waits.note_call(self._watched)

    def note_begin(self) -> None:
        """Note that the block begins to compute, behind the device's wait for its weights."""
        self.waits.note_begin(self._watched)

    @property
    def _watched(self) -> SeenShape | None:
        """The shape of the newest forward, if it is to be found out whether its blocks wait for the host."""
        is_open = self._wanted == "auto" and self.phase is not Phase.OFF and not self._is_stale
        shape = self._current if is_open else None
        return None if shape is None or shape.recordings is not None else shape

    # ---- a step ------------------------------------------------------------------------------------------------------

    def end_step(self, *, is_settled: bool, seconds: float = 0.0) -> bool:
        """End a step of `seconds`. `is_settled`: no decision about memory is to come in the next steps. -> whether it
        has come out that all blocks are recomputed, so that what their activations took is spare, or that they are
        not, so that activations may be kept after all."""
        if self.phase is Phase.OFF:
            return False
        recomputed, might_come = self.recompute_all, self.are_expected and self.phase is Phase.RECORDING
        if self._memory is None:
            self._trial.note(seconds)
        self._steps += 1
        self.phase = Phase.RECORDING if is_settled and self._steps >= self._pause else Phase.WAITING
        self._missed += might_come
        if self._missed >= STEADY:
            self.are_expected = False  # batches of ever other shapes, or memory that is not there after all
        if not self._has_said and not self._is_stale:
            self._say([each.recordings for each in self.shapes.recorded if each.recordings is not None])
        elif self._trial.is_under_way and self._memory is not None and not self._is_stale:
            has_ended = self._trial.take(seconds)
            if self._trial.has_failed:
                self._free()
            return has_ended and not self._trial.has_failed
        return recomputed and not self.recompute_all

    def _say(self, made: Sequence[Recordings]) -> None:
        """Say that blocks are recorded, or give up where none can be. `made`: the recordings so far."""
        if not any(each.blocks for each in made) or any(each.lacks_memory for each in made):
            return
        whys = "; ".join(sorted({each.whys for each in made if each.whys}))
        if not any(each.recorded for each in made):
            self._give_up(f"no block could be recorded ({whys})")
        else:
            self._has_said = True
            rest = f"; others run as they are written ({whys})" if whys else ""
            log.info(
                f"{max(len(each.recorded) for each in made)} blocks replay recorded forwards and backwards (CUDA "
                f"graphs), in batches of the most frequent shapes; they hold {size(self.nbytes)} of the GPU{rest} "
                f'("ds_slide": {{"captured_blocks": false}} switches this off)'
            )

    def _give_up(self, why: str) -> None:
        log.info(f"blocks are not replayed from recordings (CUDA graphs): {why}")
        self._free()
        self.phase = Phase.OFF

    def note_second_derivative(self) -> None:
        """Note a backward with create_graph=True, which cannot be replayed."""
        if self.phase is not Phase.OFF and not self.shapes.recorded:
            self._give_up("a backward has create_graph=True")

    # ---- their memory ------------------------------------------------------------------------------------------------

    def take_gradients_back(self) -> None:
        """Let parameters hold copies of the gradients that are in the memory of recordings, which the next backward
        overwrites."""
        if self._memory is not None:
            self._memory.lent.take_back()

    def give_up(self) -> int:
        """Free the recordings, where no graph waits for its backward, and no parameter holds a gradient in their
        memory: an operator that reads it may have found none. -> bytes that have come free."""
        if self._memory is None or not self._is_idle or self._memory.lent.are_held:
            return 0
        before = self._device.allocated() if self._device.is_cuda else 0
        self._free()
        freed = before - self._device.allocated() if self._device.is_cuda else 0
        if freed:
            log.info(f"recordings of blocks have given {size(freed)} back")
        return freed

    def leave_weights(self) -> None:
        """Free the recordings because weights are about to move: now, or once no graph waits for its backward."""
        pause, are_expected = self._pause, self.are_expected or self.recomputes
        self.give_up()
        self._pause, self.are_expected = pause, are_expected  # memory is not short
        self._is_stale = self._memory is not None

    def _free(self) -> None:
        """Free the recordings. The pause before new ones doubles."""
        if self._memory is not None:
            self._memory.lent.take_back()
            for each in self.shapes.clear():
                each.end()
            self._close_memory()
            self._pause = min(2 * self._pause, MOST_PAUSE)
        self._is_stale = self._might_replay = self.are_expected = False
        self._steps = self._pushed = self._missed = 0
        self.phase = Phase.OFF if self.phase is Phase.OFF else Phase.WAITING

    def _close_memory(self) -> None:
        assert self._memory is not None
        self._memory.close()
        self._memory, self.recomputes = None, False
        self._device.release_cached()

    def close(self) -> None:
        """Free the recordings for good."""
        self._free()
        self.phase = Phase.OFF
