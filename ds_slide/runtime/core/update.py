"""One update of a unit: which parameters it moves, the square sum of its gradient, and the futures that it keeps.

`requires_grad` is read when an update begins. A parameter without a gradient keeps its weight, master, states and
count: plain torch's optimizer counts per parameter, and AdamW corrects its moments by that count.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import nn

from ds_slide.compression.codec import SegmentStep
from ds_slide.model.layout import Entry, Segment, align_up
from ds_slide.optim.rule import Hyper, at_step
from ds_slide.runtime.core.futures import Failures, Future

if TYPE_CHECKING:
    from ds_slide.runtime.core.unit import Unit


@dataclass
class SquareSum:
    """The square sum of one held gradient. Each gradient has its own object: the update lane may add late to the sum of
    a gradient that `zero_grad` has dropped, and the next gradient must not count that."""

    place: Literal["device", "host"] | None = None
    """The place of the sum; None: it has not been computed yet."""
    on_host: float = 0.0


class Trained:
    """The trainable parameters of a unit. The compute thread, which begins updates, owns this object."""

    def __init__(self, parameters: Sequence[nn.Parameter], entries: Sequence[Entry], segments: Sequence[Segment]):
        """Begin without updates. `entries`, `segments`: places in the state buffers of the optimizer, in the order of
        `parameters`."""
        self.parameters = list(parameters)
        self._entries = list(entries)
        self._segments = tuple(segments)
        self.counts = [0] * len(self.parameters)
        """Updates that each parameter has had."""
        self.latest: tuple[SegmentStep, ...] = ()
        """The steps of the update that was begun last."""

    @property
    def is_off(self) -> bool:
        """Whether no parameter requires a gradient."""
        return not any(parameter.requires_grad for parameter in self.parameters)

    def begin(self, hypers: Sequence[Hyper]) -> tuple[SegmentStep, ...]:
        """Return the steps of the update that begins now, and count it."""
        self.latest = self.coming(hypers)
        self.counts = [
            count + parameter.requires_grad for count, parameter in zip(self.counts, self.parameters, strict=True)
        ]
        return self.latest

    def coming(self, hypers: Sequence[Hyper]) -> tuple[SegmentStep, ...]:
        """Return the steps of an update that would begin now. `hypers`: by optimizer group."""
        counts = set(self.counts)
        if len(counts) == 1 and all(parameter.requires_grad for parameter in self.parameters):
            step = counts.pop() + 1
            return tuple(SegmentStep(each, at_step(hypers[each.group], step)) for each in self._segments)
        return tuple(self._of_each_entry(hypers))

    def _of_each_entry(self, hypers: Sequence[Hyper]) -> list[SegmentStep]:
        """Return one step per run of neighbours with the same group and count, so that an update has fewer and longer
        runs."""
        runs: list[tuple[int, int, int, int]] = []  # group, count, start, stop
        for parameter, entry, count in zip(self.parameters, self._entries, self.counts, strict=True):
            start, stop = entry.offset, entry.offset + align_up(entry.partition_numel)
            if not parameter.requires_grad or start == stop:
                continue
            assert entry.group is not None
            if runs and runs[-1][:2] == (entry.group, count) and runs[-1][3] == start:
                start = runs.pop()[2]
            runs.append((entry.group, count, start, stop))
        return [
            SegmentStep(Segment(group, start, stop), at_step(hypers[group], count + 1))
            for group, count, start, stop in runs
        ]

    def covers(self, steps: Sequence[SegmentStep]) -> bool:
        """Whether `steps` have the segments of the unit, none missing and none cut."""
        return [each.segment for each in steps] == list(self._segments)


class Update:
    """The futures of one update of a unit. There is one for each span, complete when the span has its new weights;
    `done` is complete with the last of them. `completed` is complete when every span has its new states, too. An update
    in two passes writes the states in the second pass, and needs the held gradient until then."""

    def __init__(self, unit: Unit, failures: Failures, *, two_passes: bool) -> None:
        """Open the futures of the update to the present version of `unit`."""
        self.is_pressed = False
        """Whether a thread waits for the update, or has waited."""
        self._unit, self._version = unit, unit.version
        count = len(unit.spans)
        self.spans = [
            Future(failures, f"part {index + 1} of {count} of the update of {unit.name}", self)
            for index in range(count)
        ]
        self.done = Future(failures, f"the update of {unit.name}", self)
        self.two_passes = two_passes
        self.completed = Future(failures, f"the states of {unit.name}") if two_passes else self.done
        self._left = self._left_states = count
        self._lock = threading.Lock()

    def press(self) -> None:
        """Mark the update as urgent. Called when a wait begins: from then on less urgent work must not delay it."""
        self.is_pressed = True
        self._unit.state.written.press()

    def finish(self, index: int) -> None:
        """Record that span `index` has its new weights."""
        self.spans[index].complete()
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            if self._unit.shared is not None:
                self._unit.shared.publish(self._unit, self._version)
            self.done.complete()

    def finish_states(self) -> None:
        """Record that the second pass has written the states of one more span. Called by the update lane alone."""
        self._left_states -= 1
        if not self._left_states:
            self.completed.complete()
