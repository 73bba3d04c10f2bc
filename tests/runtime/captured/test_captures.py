"""Blocks that replay recordings of several shapes have the bits of blocks that run as they are written, in any order of
forwards and backwards."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graph_pool import graph_pool
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ds_slide.plan.spare import Shape
from ds_slide.runtime.activations.block_state import BlockState
from ds_slide.runtime.activations.checkpointing import UNASKED, BlockCall
from ds_slide.runtime.captured.captures import Captures, Phase, Wanted
from ds_slide.runtime.captured.graphs import Graph
from ds_slide.runtime.captured.shapes import STEADY, WINDOW
from ds_slide.runtime.captured.trial import TRIAL
from ds_slide.runtime.core.device import Device, Marker
from ds_slide.runtime.memory.spare_memory import LOOKS

WIDTH, BLOCKS = 4, 3
SHAPES = [(1, 6), (1, 3), (2, 3)]
PAUSE = 64
"""More steps than any pause in these tests has."""
ROOM = 1e9


def launch_block(captures: Captures) -> None:
    """Do what the engine does when a block's forward begins."""
    captures.note_call()
    captures.note_begin()


class Block(nn.Module):
    """What a layer has: a norm and matrices, whose inputs are saved, a dropout, a mask, and a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.5)

    def forward(self, hidden: torch.Tensor, mask: Any) -> torch.Tensor:
        return hidden + self.drop(self.down(torch.tanh(self.up(self.norm(hidden))) * mask))


class Run:
    """A stack of recorded blocks, and its twin."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.twins = copy.deepcopy(self.blocks)
        states = {order: BlockState(f"block {order}", block) for order, block in enumerate(self.blocks)}
        for _ in range(STEADY):
            for state in states.values():
                state.before()
        self.captures = Captures(states, Device(torch.device("cpu")), **{"wanted": True, **options})
        self.waiting: list[tuple[torch.Tensor, ...]] = []
        """Input and loss of each forward, of the recorded blocks and of their twins."""
        self.forwards = self.replays = self.first = 0
        self.records_until_shortage = -1
        self.is_masked = True
        """Whether blocks share an input, whose place is kept for graphs that wait."""
        self.settle()

    def settle(self) -> None:
        for _ in range(PAUSE):
            self.captures.end_step(is_settled=True)

    def calls(self, hidden: torch.Tensor, mask: Any, room: float = ROOM) -> list[torch.Tensor]:
        found = []
        shape = Shape(hidden.shape[0] * hidden.shape[1], hidden.shape[1])
        if torch.is_grad_enabled():
            self.captures.begin(shape)
            self.captures.room_of(room, Wanted(100, 100, 1, streams=False))
        for order, block in enumerate(self.blocks):
            hidden = self.cut(order, hidden)
            unit: Any = SimpleNamespace(order=order, name=f"block {order}", is_streamed=False)
            function = functools.partial(Block.forward, block)
            call = BlockCall(unit, list(block.modules()), UNASKED, function, (hidden, mask))
            launch_block(self.captures)
            run = self.captures.block_of(call) if torch.is_grad_enabled() else None
            hidden = function(*call.inputs) if run is None else run(call)
            self.replays += run is not None and self.captures.has_replayed(order)
            found.append(hidden)
        self.captures.end_forward(completed=True)
        return found

    def twin(self, hidden: torch.Tensor, mask: Any) -> list[torch.Tensor]:
        found = []
        for order, block in enumerate(self.twins):
            found.append(hidden := block(self.cut(order, hidden), mask))
        return found

    def cut(self, order: int, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.detach().requires_grad_() if order == self.first > 0 and torch.is_grad_enabled() else hidden

    def forward(self, number: int, depth: int = BLOCKS, first: int = 0, room: float = ROOM) -> None:
        """The graph of the blocks from `first` to before `depth` waits for its backward."""
        self.forwards += 1
        self.first = min(first, depth - 1)
        batch, length = SHAPES[number]
        random = torch.Generator().manual_seed(self.forwards)
        given = torch.randn(batch, length, WIDTH, generator=random)
        mask = torch.randint(2, (batch, length, 1), generator=random).float() if self.is_masked else 1.0
        found: list[torch.Tensor] = []
        for run in (functools.partial(self.calls, room=room), self.twin):
            torch.manual_seed(self.forwards)
            hidden = given.clone().requires_grad_()
            found += [hidden, run(hidden, mask)[depth - 1].square().sum()]
        assert torch.equal(found[1], found[3])
        if torch.is_grad_enabled():
            self.waiting.append(tuple(found))

    def backward(self, place: int, *, twice: bool = False) -> None:
        if not self.waiting:
            return
        hidden, loss, of_twin, loss_of_twin = self.waiting.pop(place % len(self.waiting))
        for each in (loss, loss_of_twin):
            if twice:
                each.backward(retain_graph=True)
            each.backward()
        assert same(hidden.grad, of_twin.grad)
        self.compare()

    def compare(self) -> None:
        pairs = zip(self.blocks.parameters(), self.twins.parameters(), strict=True)
        assert all(same(own.grad, expected.grad) for own, expected in pairs)

    def step(self) -> None:
        """Graphs that wait are dropped: weights are written."""
        self.waiting.clear()
        for each in (*self.blocks.parameters(), *self.twins.parameters()):
            if each.grad is not None:
                with torch.no_grad():
                    each.sub_(0.1 * each.grad)
                each.grad = None
        self.settle()

    def evaluate(self, number: int) -> None:
        with torch.no_grad():
            self.forward(number)

    def run_out(self, after: int) -> None:
        """Let a recording after so many find no memory."""
        self.records_until_shortage = after

    def forget(self, place: int) -> None:
        if self.waiting:
            del self.waiting[place % len(self.waiting)]

    def give_up(self) -> None:
        self.captures.give_up()

    def record(self, *numbers: int) -> None:
        for number in numbers:
            for _ in range(STEADY + 1):
                self.forward(number)
                self.backward(0)


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return other is None if one is None else other is not None and torch.equal(one, other)


@contextmanager
def shortages(run: Run) -> Iterator[None]:
    record = Graph.record

    def limited(self: Graph, function: Any) -> Any:
        run.records_until_shortage -= 1
        if run.records_until_shortage == -1:
            function()  # it may have done much before
            raise torch.OutOfMemoryError("CUDA out of memory")
        return record(self, function)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Graph, "record", limited)
        yield


NUMBERS = st.integers(0, len(SHAPES) - 1)
FORWARDS = st.tuples(st.just("forward"), NUMBERS, st.integers(1, BLOCKS), st.integers(0, BLOCKS - 1))
BACKWARDS = st.tuples(st.just("backward"), st.integers(0, 4))
EVENTS = st.one_of(
    FORWARDS, BACKWARDS, FORWARDS, BACKWARDS, FORWARDS, BACKWARDS,
    st.tuples(st.just("evaluate"), NUMBERS),
    st.tuples(st.just("forget"), st.integers(0, 4)),
    st.tuples(st.just("run_out"), st.integers(0, 5)),
    st.tuples(st.just("step")),
    st.tuples(st.just("give_up")),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(EVENTS, max_size=60), st.booleans())
def test_any_order_of_forwards_and_backwards(events: list[tuple[Any, ...]], is_masked: bool) -> None:
    run = Run()
    run.is_masked = is_masked
    with graph_pool(), shortages(run):
        run.record(0, 1)
        assert run.replays == 2 * BLOCKS
        for event, *given in events:
            getattr(run, event)(*given)
        while run.waiting:
            run.backward(-1)
        run.compare()


def test_shapes_in_turn_are_all_replayed() -> None:
    """As in the accumulation of gradients."""
    run = Run()
    run.record(0, 1, 2)
    run.replays = 0
    for number in (0, 1, 2, 2, 1, 0):
        run.forward(number)
        run.backward(0)
    assert run.replays == 6 * BLOCKS


def test_a_graph_that_waits_keeps_its_memory_from_other_shapes() -> None:
    run = Run()
    run.record(0, 1)
    run.replays = 0
    run.forward(0)
    run.forward(1)  # both wait, as for DPO
    assert run.replays == BLOCKS
    run.backward(1)
    run.backward(0, twice=True)
    run.forward(1)
    run.backward(0)
    assert run.replays == 2 * BLOCKS


def test_shapes_share_the_memory_of_saved_tensors() -> None:
    run = Run()
    with graph_pool() as pool:
        run.record(0)
        of_one = pool.most
        run.record(1, 2)
        assert pool.most == of_one > 0
        run.captures.begin(Shape(1, 1))
        assert not pool.ends


def test_shapes_share_the_memory_of_their_inputs() -> None:
    run = Run()
    run.record(0, 1)
    memory = run.captures._memory
    assert memory is not None
    sizes = [each.nbytes for each in memory.inputs._bytes.values()]
    assert sizes == [6 * WIDTH * 4] * BLOCKS


def test_recorded_graphs_are_dropped() -> None:
    """Their saved tensors leave their memory to other shapes."""
    run = Run()
    run.record(0)
    run.captures.begin(Shape(1, 1))
    (recorded,) = run.captures.shapes.recorded
    assert recorded.recordings is not None
    for block in recorded.recordings.blocks.values():
        assert block.recording is not None and block.recording.made == [] and not block.may_release
        assert [each is not None and each.grad_fn for each in block.recording.results] == [None]


def test_a_graph_whose_backward_is_not_recorded_stays() -> None:
    run = Run()
    for _ in range(STEADY + 1):
        run.forward(0)
        run.forget(0)
    run.captures.begin(Shape(1, 1))
    (recorded,) = run.captures.shapes.recorded
    assert recorded.recordings is not None
    assert all(each.recording and each.recording.made for each in recorded.recordings.blocks.values())
    run.forward(0)
    assert run.replays == 2 * BLOCKS
    run.backward(0)


def test_forwards_that_could_not_replay_do_not_count_as_unused() -> None:
    run = Run()
    run.record(0)
    run.forward(0, depth=BLOCKS)
    for _ in range(2 * STEADY):
        run.forward(0)
    while run.waiting:
        run.backward(0)
    run.replays = 0
    run.forward(0)
    assert run.replays == BLOCKS


def test_forwards_in_tight_memory_do_not_count_as_unused() -> None:
    """Their blocks keep what can be given up, and recordings cannot."""
    run = Run()
    run.record(0)
    batch, length = SHAPES[0]
    for _ in range(2 * STEADY):
        run.captures.begin(Shape(batch * length, length))
        run.captures.keep_apart()
        run.captures.end_forward(completed=True)
    run.replays = 0
    run.forward(0)
    assert run.replays == BLOCKS
    run.backward(0)


def test_a_recording_that_has_failed_is_freed() -> None:
    """Of a block whose backward cannot be recorded."""
    run = Run()
    with shortages(run):
        run.run_out(BLOCKS)
        run.record(0)
    ended = [each.recordings for each in run.captures.shapes.recorded if each.recordings is not None]
    assert [block.has_ended for block in ended[0].blocks.values()] == [False, False, True]
    run.captures._is_stale = False
    ended[0].release()
    assert [block.recording is None for block in ended[0].blocks.values()] == [False, False, True]


def test_a_shortage_frees_the_recordings_and_a_pause_follows() -> None:
    run = Run()
    with shortages(run):
        run.record(0)
        run.run_out(1)
        run.record(1)  # its second block finds no memory
        run.replays = 0
        run.forward(0)
        run.backward(0)
        assert not run.replays and not run.captures.shapes.recorded
        assert run.captures.phase is Phase.WAITING
        run.settle()
        run.record(0)
    assert run.replays >= BLOCKS


def test_calls_of_a_shape_that_differ_are_recorded_ever_later() -> None:
    run = Run()
    run.record(0)
    records = []
    for number in range(40):
        for block in run.blocks:
            block.changes = number
        run.forward(0)
        run.backward(0)
        records.append(len(run.captures.recorded))
    # Three forwards do not replay a recording. It takes 6 forwards until the next one, then 12.
    lasted = "".join("x" if each else "." for each in records)
    assert lasted == "xxx" + 5 * "." + "xxxx" + 11 * "." + "xxxx" + 13 * "."


class SlowHost(Device):
    """A device that waits for the host, or that is behind it by a block whenever `works`."""

    works = False

    def mark(self, *_: Any, **__: Any) -> Marker:
        return Marker(SimpleNamespace(query=lambda: not self.works))


@pytest.mark.parametrize("works", [False, True])
def test_shapes_are_recorded_where_the_device_waits_for_the_host(works: bool) -> None:
    run = Run(wanted="auto")
    run.captures.phase, run.captures.waits.device = Phase.RECORDING, SlowHost(torch.device("cpu"))
    run.captures.waits.device.works = works
    run.record(0)
    assert run.replays == (0 if works else BLOCKS)


def test_shapes_are_recorded_where_memory_is_spare() -> None:
    """1.3 times the activations, and three gradients of a block. The memory of recordings counts."""
    run = Run(wanted="auto")
    run.captures.phase = Phase.RECORDING
    for number, room, held, fits in ((0, 132, 0, False), (0, 133, 0, True), (1, 102, 30, False), (1, 103, 30, True)):
        run.replays = 0
        for _ in range(STEADY + 1):
            run.forward(number, room=room)
            run.backward(0)
            if run.captures._memory is not None:
                run.captures._memory.nbytes = held
        assert bool(run.replays) == fits, (number, room)


@pytest.mark.parametrize(
    ("room", "streams", "recomputes", "left"),
    [
        (132.9, False, True, 0.0),  # 1.3 times the activations of a block, and three gradients
        (133.0, False, False, 133.0),
        (133.0, True, True, 0.0),
        (16.0, False, True, 0.0),
        (15.9, False, None, 15.9),
    ],
)
def test_all_blocks_are_recomputed_where_their_activations_find_no_room(
    room: float, streams: bool, recomputes: bool | None, left: float
) -> None:
    run, shape, wanted = Run(wanted="auto"), Shape(8, 4), Wanted(100, 10, 1, streams=streams)
    run.captures.phase = Phase.RECORDING
    for _ in range(STEADY):
        run.captures.begin(shape)
        launch_block(run.captures)
        run.captures.end_forward(completed=True)
    run.captures.begin(shape)
    assert run.captures.room_of(room, wanted)[0] == left
    assert (run.captures._memory is not None) == (recomputes is not None)
    assert run.captures.recomputes == bool(recomputes)


@pytest.mark.parametrize(("works", "advises"), [(False, 1), (True, 0)])
def test_a_script_whose_lengths_never_repeat_is_told_once_to_pad(
    works: bool, advises: int, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(wanted="auto")
    run.captures.waits.device, run.captures.phase = SlowHost(torch.device("cpu")), Phase.RECORDING
    run.captures.waits.device.works = works
    with caplog.at_level(logging.INFO, "ds_slide"):
        for length in range(1, 3 * WINDOW):
            run.captures.begin(Shape(length, length))
            for _ in range(3):
                launch_block(run.captures)
            run.captures.end_forward(completed=True)
    assert sum("pad_to_multiple_of=128" in record.message for record in caplog.records) == advises


def test_memory_is_left_for_recordings_of_blocks_that_wait_for_the_host() -> None:
    run, wanted = Run(wanted="auto"), Wanted(100, 10, 1, streams=True)
    run.captures.phase = Phase.WAITING
    assert run.captures.expect(wanted, waits_for_host=False) == 0
    assert run.captures.expect(wanted, waits_for_host=True) == wanted.recomputed
    assert run.captures.expect(replace(wanted, streams=False), waits_for_host=True) == wanted.recomputed
    assert not run.captures.are_expected  # they may keep their activations
    assert run.captures.expect(replace(wanted, nbytes=0), waits_for_host=True) == 0  # no block is taken over
    assert not run.captures.are_expected
    run.captures.close()
    assert run.captures.expect(wanted, waits_for_host=True) == 0


def test_expected_recordings_are_made_and_no_activations_are_kept_until_then() -> None:
    """Whatever the device does when a block begins: it may wait for weights then, and for the host all the same."""
    run, shape, wanted = Run(wanted="auto"), Shape(8, 4), Wanted(100, 10, 1, streams=True)
    run.captures.waits.device = SlowHost(torch.device("cpu"))
    run.captures.waits.device.works = True
    run.captures.phase = Phase.WAITING
    run.captures.expect(wanted, waits_for_host=True)
    for _ in range(STEADY + 1):
        run.captures.begin(shape)
        assert run.captures.room_of(133.0, wanted) == (0.0, 0) and run.captures.recompute_all
        launch_block(run.captures)
        run.captures.end_forward(completed=True)
        run.captures.end_step(is_settled=True)
    assert run.captures.recomputes and not run.captures.are_expected
    run.captures.leave_weights()  # states move, and the recordings come back
    assert not run.captures.recomputes and run.captures.are_expected


def test_recordings_expected_at_the_decisions_come_in_the_first_step_that_records() -> None:
    """As in `SpareMemory.end_step`: a decision comes before the end of its step is noted."""
    run, shape, wanted = Run(wanted="auto"), Shape(8, 4), Wanted(100, 10, 1, streams=True)
    run.captures.phase = Phase.WAITING
    last, again = LOOKS[-1], LOOKS[-1] + 20
    for step in range(1, again + 2):
        run.captures.begin(shape)
        run.captures.room_of(133.0, wanted)
        assert run.captures.recomputes == (step in (last + 2, again + 1)), step
        run.captures.end_forward(completed=True)
        if step in (*LOOKS, again):
            run.captures.expect(wanted, waits_for_host=True)
        run.captures.end_step(is_settled=step > last)
        if step == last + 2:
            run.captures.give_up()


@pytest.mark.parametrize("is_tight", [[True, True, False], [True] * STEADY])
def test_recordings_wait_for_a_forward_that_no_mode_watches(is_tight: list[bool]) -> None:
    """They would stay empty, and none would come any more."""
    run, shape, wanted = Run(wanted="auto"), Shape(8, 4), Wanted(100, 10, 1, streams=True)
    run.captures.phase = Phase.WAITING
    run.captures.expect(wanted, waits_for_host=True)
    for _ in range(STEADY):
        run.captures.begin(shape)
        run.captures.end_step(is_settled=True)
    for each in is_tight:
        run.captures.begin(shape)
        assert run.captures.room_of(133.0, wanted) == (0.0, 0)
        if each:
            run.captures.keep_apart()
        assert run.captures.recomputes == (not each) and run.captures.recompute_all
        run.captures.end_forward(completed=True)
        run.captures.end_step(is_settled=True)
    assert not run.captures.are_expected and run.captures.recomputes == (not is_tight[-1])


@pytest.mark.parametrize("wanted", ["auto", True])
def test_activations_are_kept_where_no_block_can_be_recorded(wanted: Any) -> None:
    """As with layers of experts, whose weights are not all in their places when a block begins."""
    run, shape, kept = Run(wanted=wanted), Shape(8, 4), []
    run.captures.waits.device, run.captures.phase = SlowHost(torch.device("cpu")), Phase.RECORDING
    for _ in range(20):
        run.captures.begin(shape)
        kept.append(run.captures.room_of(133.0, Wanted(100, 10, 1, streams=True))[0])
        launch_block(run.captures)
        run.captures.end_forward(completed=True)
        run.captures.end_step(is_settled=True)
    assert kept.count(0.0) == 2


def test_recordings_are_not_expected_while_a_pause_is_long() -> None:
    """Blocks keep activations until it is over: it may have hundreds of steps."""
    run, wanted = Run(wanted="auto"), Wanted(100, 10, 1, streams=True)
    run.captures.phase, run.captures._pause = Phase.WAITING, 3 * STEADY
    for _ in range(2 * STEADY):
        assert run.captures.expect(wanted, waits_for_host=True) == wanted.recomputed
        assert not run.captures.are_expected
        run.captures.end_step(is_settled=True)
    run.captures.expect(wanted, waits_for_host=True)
    assert run.captures.are_expected


def test_recordings_that_do_not_come_are_not_expected_for_ever() -> None:
    """Batches of ever other shapes, for one. Then memory is shared out once more, without them."""
    run, wanted = Run(wanted="auto"), Wanted(100, 10, 1, streams=True)
    run.captures.phase = Phase.WAITING
    run.captures.expect(wanted, waits_for_host=True)
    ends = []
    for number in range(2 * STEADY + 1):
        run.captures.begin(Shape(8 + number, 4))
        assert run.captures.room_of(50.0, wanted)[0] == (50.0 if number == 2 * STEADY else 0.0)
        run.captures.end_forward(completed=True)
        ends.append(run.captures.end_step(is_settled=True))
    assert ends == [False] * (2 * STEADY - 1) + [True, False]
    assert run.captures.expect(wanted, waits_for_host=True) == 0 and not run.captures.are_expected


def test_recordings_stay_while_a_replay_is_under_way() -> None:
    run, shape, wanted = Run(wanted="auto"), Shape(8, 4), Wanted(100, 10, 1, streams=True)
    run.captures.phase = Phase.RECORDING
    run.captures.expect(wanted, waits_for_host=True)
    for _ in range(STEADY + 1):
        run.captures.begin(shape)
        run.captures.room_of(133.0, wanted)
        run.captures.end_forward(completed=True)
    memory = run.captures._memory
    assert memory is not None
    with memory.in_use():
        run.captures.give_up()
        assert run.captures._memory is memory
    run.captures.give_up()
    assert run.captures._memory is None


def test_recordings_stay_while_a_gradient_lies_in_their_memory() -> None:
    """The operator that packs the gradient may have found no memory. It runs again, on the same tensor."""
    run = Run()
    run.record(0)
    run.blocks.zero_grad()
    run.twins.zero_grad()
    run.forward(0)
    run.backward(0)
    memory = run.captures._memory
    assert memory is not None and memory.lent.are_held
    run.captures.give_up()
    assert run.captures._memory is memory
    run.blocks.zero_grad()  # the gradient has been packed
    run.captures.give_up()
    assert run.captures._memory is None


def test_a_batch_that_needs_the_memory_of_recordings_frees_them() -> None:
    run = Run()
    run.record(0)
    assert run.captures._memory is not None
    run.captures._memory.nbytes = 50
    run.forward(1, room=99)
    assert run.captures._memory is None and not run.captures.shapes.recorded
    run.backward(0)


def test_a_part_of_a_graph_that_waits_keeps_the_memory_from_other_shapes() -> None:
    """A loss on the first block's results: only its graph waits."""
    run = Run()
    with graph_pool():
        run.record(0, 1)
        run.forward(0, depth=1)
        run.forward(1)
        run.backward(0)
        run.backward(0)


def test_a_part_of_a_graph_that_waits_keeps_the_memory_from_earlier_blocks() -> None:
    """The last block's graph waits, without those before."""
    run = Run()
    run.is_masked = False
    with graph_pool():
        run.record(0)
        run.forward(0, first=BLOCKS - 1)
        run.forward(0)
        run.backward(0)
        run.backward(0)


def test_ranks_that_divide_a_sequence_record_nothing() -> None:
    """They communicate in each block, and one of them might replay it alone."""
    assert Run(wanted=True, divides_sequences=True).captures.phase is Phase.OFF
    assert Run(wanted=True, several_ranks=True).captures.phase is not Phase.OFF


@pytest.mark.parametrize(
    ("seconds", "keeps", "stays"),
    [([9, 1.9, 2.5, 2.5], True, True), ([9, 2.1, 2.2, 2.3], True, False), ([9, 9, 9, 9], False, True)],
)
def test_recomputed_recordings_stay_where_steps_become_no_longer(
    seconds: list[float], keeps: bool, stays: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps before take 2 s or more."""
    run, shape, wanted = Run(wanted="auto"), Shape(8, 4), Wanted(100, 10, 1, streams=True, keeps=keeps)
    captures = run.captures
    captures.phase, captures._has_said = Phase.WAITING, True  # it says so behind the step that records
    replayed: Any = SimpleNamespace(may_release=False, lacks_memory=False, recording=True, has_ended=False)
    replayed.end = lambda: None

    def step(took: float) -> bool:
        captures.begin(shape)
        captures.room_of(50.0, wanted)
        if captures._memory is not None and captures._current is not None and captures._current.recordings is not None:
            captures._current.recordings.blocks[0] = replayed
            captures._memory.stack.pushed += 1
        launch_block(captures)
        captures.end_forward(completed=True)
        return captures.end_step(is_settled=True, seconds=took)

    with caplog.at_level(logging.INFO, "ds_slide"):
        for took in (3.0, 2.0, 2.5):
            assert not step(took)
        assert not captures.recomputes
        ended_well = [step(took) for took in seconds]
    assert ended_well == [False] * (TRIAL - 1) + [stays]
    assert captures.recomputes == stays
    assert ("keep activations again" in caplog.text) != stays
    for _ in range(20):
        step(2.0)
    assert captures.recomputes == stays
    captures.leave_weights()  # the decision behind the trial has moved states
    assert not any(step(2.0) for _ in range(20)), "recordings that come back bring no decision, which would free them"
    assert captures.recomputes == stays
