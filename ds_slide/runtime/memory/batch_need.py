"""Learns from peaks how much GPU memory a batch needs beside what lies there all the time, without kept activations.

The peak since a warm-up tells what the largest batch has taken. Single batches of the first steps are measured, too:
two batches of different lengths tell what does not grow with tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ds_slide.plan.spare import Measured, Shape, fixed_bytes
from ds_slide.runtime.activations.activations import Activations
from ds_slide.runtime.memory.peaks import Peaked, Peaks

SINCE, SINGLE, EVALUATION = "since the last warm-up", "single batch", "evaluation"
"""Spans of peaks."""
BYTES_OF_LOGITS = 10
"""Of a number: as the head makes it, in fp32 for the loss, and the loss's own, as transformers computes it."""
GRADIENTS_ALIVE = 2
"""Blocks whose gradients are on the GPU at once in a backward: one computes its own while the ones before are on their
way."""
SQUARES_ALIVE = 3
"""Copies of what a block makes for each pair of tokens that its backward holds at once: the saved one, its gradient,
and one that an operator is making."""


@dataclass(frozen=True)
class Watched:
    """Of the forwards since the last warm-up: the least that was on the GPU when one began, the largest shape, the most
    that one of this shape kept beside what it needs (less than 0 where inputs were in host memory), and the most that
    any was expected to take, of which the peak has told already what it can."""

    base: int = 0
    shape: Shape | None = None
    beside: int = 0
    expected: float = 0.0

    def with_forward(self, allocated: int, shape: Shape, beside: int, needed: float) -> Watched:
        if self.shape is None:
            return Watched(allocated, shape, beside, needed + beside)
        is_larger = Measured(self.shape, 1, 1).growth(shape) > 1
        largest = shape if is_larger else self.shape
        if not is_larger:
            beside = max(self.beside, beside) if shape == self.shape else self.beside
        return Watched(min(self.base, allocated), largest, beside, max(self.expected, needed + beside))


class BatchNeed:
    """The thread that computes calls all methods, between backwards."""

    def __init__(self, activations: Activations, gpu: Peaked | None, vocabulary: int = 0) -> None:
        """`vocabulary`: logits of a token."""
        self._activations = activations
        self._peaks = Peaks(gpu)
        self._vocabulary = vocabulary
        self._evaluated: Measured | None = None
        """The most that a forward without gradients has taken, at the largest shape."""
        self._known: Measured | None = None
        """The most that batches have taken, at the largest shape. Its `square` is learnt apart (`_parts`)."""
        self._watched = Watched()
        self._begun: tuple[Shape | None, int] = None, 0
        """The shape of the forward under way, and what was on the GPU when it began."""
        self._latest: tuple[Shape | None, int] = None, 0
        """The same of the one that has begun last."""
        self._evaluating: tuple[Shape, int] | None = None
        """The same of a forward without gradients that is measured."""
        self._single: tuple[Shape, int] | None = None
        """The same of the batch that is measured apart."""
        self._singles: list[tuple[Shape, int]] = []
        """What those have taken."""

    @property
    def is_known(self) -> bool:
        return self._known is not None

    @property
    def shape(self) -> Shape | None:
        """The largest so far; None as long as nothing has been measured."""
        return None if self._known is None else self._known.shape

    @property
    def under_way(self) -> Shape | None:
        """The shape of the batch that has begun last."""
        return self._latest[0]

    @property
    def began_with(self) -> int:
        """The bytes that were on the GPU when it began."""
        return self._latest[1]

    @property
    def nbytes(self) -> int:
        """The bytes that a batch of the largest shape takes."""
        return 0 if self._known is None else self._known.nbytes

    def at(self, shape: Shape | None, *, with_gradient: bool = True) -> float:
        """The most bytes that a batch of `shape` takes beside what is on the GPU when it begins, with nothing kept and
        nothing moved; 0 as long as nothing has been measured."""
        if self._known is None:
            return 0.0
        needed = self._known.nbytes if shape is None else self._parts(self._known).at(shape)
        if not with_gradient:
            return needed if shape is None else self._of_evaluation(shape, needed)
        if needed >= self._known.nbytes:
            return needed
        # Of what it needs, the inputs of blocks certainly shrink with it.
        inputs = self._activations.input_bytes
        return self._known.nbytes - max(0, inputs(self._known.shape) - inputs(shape))

    def _of_evaluation(self, shape: Shape, trained: float) -> float:
        """The most bytes that a forward without gradients takes. `trained`: of one with gradients. It may make all
        logits, where training makes some at a time, and a loss of them; it takes no more than one of more tokens."""
        most = max(trained, float(BYTES_OF_LOGITS * self._vocabulary * shape.tokens))
        if self._evaluated is not None and shape.tokens <= self._evaluated.shape.tokens:
            return min(most, self._evaluated.nbytes)
        return most

    def _parts(self, need: Measured) -> Measured:
        """`need` with the part of it that may grow with tokens times length. Where the blocks have not been measured,
        all of it may grow so."""
        of_a_block = self._activations.square_bytes(need.shape)
        square = need.nbytes if of_a_block is None else min(need.nbytes, int(SQUARES_ALIVE * of_a_block))
        return replace(need, square=square)

    # ---- a batch -----------------------------------------------------------------------------------------------------

    def begin_forward(self, shape: Shape | None, allocated: int, *, alone: bool) -> None:
        """Begin a forward with gradients, after `end_batch`. `allocated`: bytes on the GPU. `alone`: measure its batch
        apart."""
        self._begun = self._latest = shape, allocated
        if alone and shape is not None:
            self._peaks.begin(SINGLE)
            self._single = shape, allocated

    def begin_evaluation(self, shape: Shape | None, allocated: int) -> None:
        """Begin a forward without gradients, after `end_batch`. `allocated`: bytes on the GPU."""
        self._latest = shape, allocated
        known = self._evaluated
        if shape is not None and (known is None or shape.tokens > known.shape.tokens):
            self._peaks.begin(EVALUATION)
            self._evaluating = shape, allocated

    def end_forward(self, *, completed: bool) -> None:
        """It has ended, with an exception where it is not `completed`."""
        evaluating, self._evaluating = self._evaluating, None
        if evaluating is not None:
            taken = max(0, self._peaks.end(EVALUATION) - evaluating[1])
            self._evaluated = Measured(evaluating[0], taken, 0) if completed else self._evaluated
        (shape, allocated), self._begun = self._begun, (None, 0)
        if shape is not None:
            beside = self._activations.kept_bytes - self._activations.moved_bytes  # what was given up, too
            self._watched = self._watched.with_forward(allocated, shape, beside, self.at(shape))

    def end_batch(self) -> None:
        """End the batch, whose backward has run if it was to have one. Harmless when called twice."""
        single, self._single = self._single, None
        if single is not None:
            shape, base = single
            taken = self._peaks.end(SINGLE) - base + self._activations.moved_bytes
            self._singles.append((shape, max(0, taken)))

    # ---- several -----------------------------------------------------------------------------------------------------

    @property
    def peak(self) -> int:
        """The most bytes that were on the GPU since the last warm-up began."""
        return self._peaks.of(SINCE)

    def change_of_base(self, allocated: int) -> int | None:
        """Return how many bytes lie between `allocated` and what was on the GPU when the latest batches began."""
        return None if self._watched.shape is None else abs(allocated - self._watched.base)

    def watch_anew(self) -> None:
        """Begin a warm-up: forget the peaks so far."""
        self._watched = Watched()
        self._peaks.begin(SINCE)

    def measure(self) -> None:
        """Learn what the batches since the last warm-up have needed, where one needed more than those before."""
        watched, known = self._watched, self._known
        if watched.shape is None:
            return
        peak = max(0, self.peak - watched.base)
        if known is None:
            fixed = fixed_bytes(self._singles, GRADIENTS_ALIVE * self._activations.gradient_bytes)
            self._known = Measured(watched.shape, max(0, peak - watched.beside), 0, fixed)
        elif (most := self._parts(known).at(watched.shape)) > known.nbytes:
            # The peak may be that of an earlier batch, which kept more; the prediction is the most that it can be.
            measured = max(known.nbytes, peak - watched.beside)
            self._known = replace(known, shape=watched.shape, nbytes=int(min(most, measured)))
        elif peak > watched.expected:
            more = peak - watched.expected  # as many tokens, more images
            self._known = replace(known, nbytes=int(known.nbytes + more))
        self._watched = replace(watched, expected=max(watched.expected, peak))
