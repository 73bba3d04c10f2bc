"""The shapes of batches: how often each has come, and which of them are recorded.

Few shapes are recorded and twice as many are counted. A recorded shape makes place for one that has come often enough
since the recorded one came last. So recordings follow the batches, and a run whose batches all differ records nothing.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from ds_slide.plan.spare import Shape
from ds_slide.runtime.captured.recordings import Recordings

RECORDED = 16
"""The most shapes that are recorded. Batches that are padded to multiples of 128 tokens have 16 shapes up to 2,048."""
STEADY = 3
"""Forwards of a shape before one that is recorded."""
WINDOW = 64
"""Forwards by which it is judged whether shapes come again."""


@dataclass
class SeenShape:
    """A shape of batches.

    `first`, `last`: the numbers of its first forward that counts, and of its last one. `count`: its forwards before the
    last one. `wanted`: how many it takes. `issued`: blocks of the last forward that could have been recorded, and
    `early`: before how many of these the device had begun the block before. `waited`: whether it had before most, in
    the forward before."""

    first: int
    last: int
    count: int = 0
    wanted: int = STEADY
    issued: int = 0
    early: int = 0
    waited: bool = False
    recordings: Recordings | None = None
    unused: int = 0
    """The number of its last forwards in a row that might have replayed the recordings, and did not."""

    def come(self, number: int) -> None:
        """Note the forward `number`."""
        self.count, self.last = self.count + 1, number
        self.waited = self.waits
        self.issued = self.early = 0

    @property
    def waits(self) -> bool:
        """Whether most blocks of the last forward have waited for the host, as far as they have begun."""
        return 2 * self.early > self.issued

    def note_issue(self, *, is_behind: bool) -> None:
        """Note a block that the host begins to launch. `is_behind`: whether the device has not begun the block before,
        all of which has been launched."""
        self.issued += 1
        self.early += not is_behind

    def drop(self) -> None:
        """Drop recordings that were not used. New ones take twice as many forwards."""
        self.recordings, self.unused = None, 0
        self.first, self.count, self.wanted = self.last, 0, 2 * self.wanted


class Shapes:
    """The shapes that have come lately, the latest last."""

    def __init__(self) -> None:
        self._seen: OrderedDict[Shape, SeenShape] = OrderedDict()
        self._forwards = 0
        self._waited: deque[tuple[Shape, bool]] = deque(maxlen=WINDOW)
        """The shapes of the latest forwards, and whether these waited for the host without a recording."""

    def see(self, shape: Shape) -> SeenShape:
        """Note a forward of `shape`."""
        self._forwards += 1
        if (found := self._seen.get(shape)) is None:
            if len(self._seen) == 2 * RECORDED:
                del self._seen[next(each for each, seen in self._seen.items() if seen.recordings is None)]
            self._seen[shape] = found = SeenShape(self._forwards, self._forwards)
        else:
            self._seen.move_to_end(shape)
            found.come(self._forwards)
        return found

    def note(self, shape: Shape) -> None:
        """Note that the forward of `shape` has ended."""
        seen = self._seen[shape]
        self._waited.append((shape, seen.recordings is None and seen.waits))

    @property
    def strangers(self) -> int:
        """The number of shapes among the latest forwards, if there are too many to be recorded and most of these
        forwards waited for the host, else 0."""
        if 2 * sum(waited for _, waited in self._waited) <= WINDOW:
            return 0  # the common case, asked before each forward: no shape is hashed for it
        count = len({shape for shape, _ in self._waited})
        return count if count > 2 * RECORDED else 0

    @property
    def recorded(self) -> list[SeenShape]:
        """The shapes with recordings, the latest last."""
        return [each for each in self._seen.values() if each.recordings is not None]

    def is_due(self, shape: SeenShape) -> bool:
        """Whether a shape without recordings has come often enough, and there is a place for it."""
        recorded = self.recorded
        return shape.count >= shape.wanted and (len(recorded) < RECORDED or recorded[0].last < shape.first)

    def make_place(self) -> Recordings | None:
        """Return the recordings that make place, if more shapes have some than may have."""
        recorded = self.recorded
        if len(recorded) <= RECORDED:
            return None
        oldest = recorded[0]
        gone, oldest.recordings = oldest.recordings, None
        oldest.first, oldest.count = oldest.last, 0
        return gone

    def clear(self) -> list[Recordings]:
        """Take all recordings away. The counts stay."""
        gone = [each.recordings for each in self.recorded if each.recordings is not None]
        for each in self.recorded:
            each.recordings, each.unused = None, 0
        return gone
