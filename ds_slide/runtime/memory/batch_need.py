"""Learns from peaks how much GPU memory a batch needs, without permanent tensors and kept activations.

The peak since a warm-up tells the bytes of the largest batch. Single batches of the first steps are measured, too: two
batches of different lengths tell the part that does not grow with tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ds_slide.plan.spare import Measured, Shape, fixed_bytes
from ds_slide.runtime.activations.activations import Activations
from ds_slide.runtime.core.device import Device

SINCE, SINGLE, EVALUATION = "since the last warm-up", "single batch", "evaluation"
"""Spans of peaks."""


class Peaks:
    """The peaks of one GPU, in spans of time that overlap. Torch has one peak, which is reset for each span. The thread
    that computes calls all methods."""

    def __init__(self, gpu: Device | None) -> None:
        """`gpu`: None where the accelerator has no memory of its own; all peaks are 0 then."""
        self._gpu = gpu
        self._most: dict[str, int] = {}
        """The peak of each open span, as it was when torch's own was reset last."""

    def allocated(self) -> int:
        """Return the bytes that are on the GPU now."""
        return 0 if self._gpu is None else self._gpu.allocated()

    def begin(self, span: str) -> None:
        """Begin a span, or begin it anew."""
        if self._gpu is None:
            return
        peak = self._gpu.peak()
        self._most = {each: max(most, peak) for each, most in self._most.items()}
        self._gpu.reset_peak()
        self._most[span] = self._gpu.allocated()

    def of(self, span: str) -> int:
        """Return the peak of a span in bytes. A span that has not begun has torch's own peak."""
        return 0 if self._gpu is None else max(self._most.get(span, 0), self._gpu.peak())

    def end(self, span: str) -> int:
        """End a span and return its peak in bytes."""
        peak = self.of(span)
        self._most.pop(span, None)
        return peak


@dataclass(frozen=True)
class SeenForwards:
    """Bytes of the forwards since the last warm-up. `base`: the least on the GPU when one began. `shape`: the largest.
    `beside`: the most that a forward of this shape kept beyond its need; less than 0 where inputs were in host memory.
    `expected`: the most that any was expected to take, or the peak, once the peak has been used."""

    base: int = 0
    shape: Shape | None = None
    beside: int = 0
    expected: float = 0.0

    def with_forward(self, allocated: int, shape: Shape, beside: int, needed: float) -> SeenForwards:
        if self.shape is None:
            return SeenForwards(allocated, shape, beside, needed + beside)
        is_larger = Measured(self.shape, 1, 1).growth(shape) > 1
        largest = shape if is_larger else self.shape
        if not is_larger:
            beside = max(self.beside, beside) if shape == self.shape else self.beside
        return SeenForwards(min(self.base, allocated), largest, beside, max(self.expected, needed + beside))


class BatchNeed:
    """The thread that computes calls all methods, between backwards."""

    def __init__(self, activations: Activations, gpu: Device | None, vocabulary: int = 0) -> None:
        """`gpu`: None where the accelerator has no memory of its own. `vocabulary`: the number of logits of a token."""
        self._activations = activations
        self.peaks = Peaks(gpu)
        self._vocabulary = vocabulary
        self._evaluated: Measured | None = None
        """The most that a forward without gradients has taken, at the largest shape."""
        self._known: Measured | None = None
        """The most that batches have taken, at the largest shape. Its `square` is learnt apart (`_parts`)."""
        self._seen = SeenForwards()
        self._begun: tuple[Shape | None, int] = None, 0
        """The shape of the forward under way, and the bytes on the GPU when it began."""
        self._latest: tuple[Shape | None, int] = None, 0
        """The same of the forward that has begun last."""
        self._evaluating: tuple[Shape, int] | None = None
        """The same of a forward without gradients that is measured."""
        self._single: tuple[Shape, int] | None = None
        """The same of the batch that is measured apart."""
        self._singles: list[tuple[Shape, int]] = []
        """Shapes and bytes of the batches that were measured apart."""

    @property
    def is_known(self) -> bool:
        return self._known is not None

    @property
    def shape(self) -> Shape | None:
        """The largest shape so far; None as long as nothing has been measured."""
        return None if self._known is None else self._known.shape

    @property
    def under_way(self) -> Shape | None:
        """The shape of the batch that has begun last."""
        return self._latest[0]

    @property
    def began_with(self) -> int:
        """The bytes that were on the GPU when the last batch began."""
        return self._latest[1]

    @property
    def nbytes(self) -> int:
        """The bytes that a batch of the largest shape takes."""
        return 0 if self._known is None else self._known.nbytes

    def at(self, shape: Shape | None, *, with_gradient: bool = True) -> float:
        """Return the most bytes that a batch of `shape` takes beyond those on the GPU when it begins, with nothing kept
        and nothing moved. 0 as long as nothing has been measured."""
        if self._known is None:
            return 0.0
        needed = self._known.nbytes if shape is None else self._parts(self._known).at(shape)
        if not with_gradient:
            return needed if shape is None else self._of_evaluation(shape, needed)
        if needed >= self._known.nbytes:
            return needed
        # Only the inputs of blocks certainly shrink with the batch.
        inputs = self._activations.costs.input_bytes
        return self._known.nbytes - max(0, inputs(self._known.shape) - inputs(shape))

    def _of_evaluation(self, shape: Shape, trained: float) -> float:
        """Return the most bytes that a forward without gradients takes. `trained`: bytes of a forward with gradients.
        An evaluation may make all logits and their loss, where training makes some logits at a time. It takes no more
        than an evaluation of more tokens."""
        # A logit takes 10 bytes: as the head makes it, in fp32 for the loss, and the loss's own, as transformers
        # computes it.
        most = max(trained, float(10 * self._vocabulary * shape.tokens))
        if self._evaluated is not None and shape.tokens <= self._evaluated.shape.tokens:
            return min(most, self._evaluated.nbytes)
        return most

    def _parts(self, need: Measured) -> Measured:
        """Return `need` with its part that may grow with tokens times length. Where the blocks have not been measured,
        all of it may grow so."""
        of_a_block = self._activations.costs.square_bytes(need.shape)
        # Of a tensor with an element for each pair of tokens, a block's backward holds three at once: the saved tensor,
        # its gradient, and the result of an operator.
        square = need.nbytes if of_a_block is None else min(need.nbytes, int(3 * of_a_block))
        return replace(need, square=square)

    # ---- a batch -----------------------------------------------------------------------------------------------------

    def begin_forward(self, shape: Shape | None, *, alone: bool) -> None:
        """Begin a forward with gradients, after `end_batch`. `alone`: measure its batch apart."""
        self._begun = self._latest = shape, allocated = shape, self.peaks.allocated()
        if alone and shape is not None:
            self.peaks.begin(SINGLE)
            self._single = shape, allocated

    def begin_evaluation(self, shape: Shape | None) -> None:
        """Begin a forward without gradients, after `end_batch`."""
        self._latest = shape, allocated = shape, self.peaks.allocated()
        known = self._evaluated
        if shape is not None and (known is None or shape.tokens > known.shape.tokens):
            self.peaks.begin(EVALUATION)
            self._evaluating = shape, allocated

    def end_forward(self, *, completed: bool) -> None:
        """End the forward. `completed`: no exception has ended it."""
        evaluating, self._evaluating = self._evaluating, None
        if evaluating is not None:
            taken = max(0, self.peaks.end(EVALUATION) - evaluating[1])
            self._evaluated = Measured(evaluating[0], taken, 0) if completed else self._evaluated
        (shape, allocated), self._begun = self._begun, (None, 0)
        if shape is not None:
            beside = self._activations.kept_bytes - self._activations.inputs.bytes  # with the bytes that were given up
            self._seen = self._seen.with_forward(allocated, shape, beside, self.at(shape))

    def end_batch(self) -> None:
        """End the batch, whose backward has run if it was to have one. Harmless when called twice."""
        single, self._single = self._single, None
        if single is not None:
            shape, base = single
            taken = self.peaks.end(SINGLE) - base + self._activations.inputs.bytes
            self._singles.append((shape, max(0, taken)))

    # ---- several -----------------------------------------------------------------------------------------------------

    @property
    def peak(self) -> int:
        """The most bytes that were on the GPU since the last warm-up began."""
        return self.peaks.of(SINCE)

    def change_of_base(self) -> int:
        """Return how many bytes more or fewer are on the GPU than when the latest batches began; 0: none have begun."""
        return 0 if self._seen.shape is None else abs(self.peaks.allocated() - self._seen.base)

    def watch_anew(self) -> None:
        """Begin a warm-up: forget the peaks so far."""
        self._seen = SeenForwards()
        self.peaks.begin(SINCE)

    def measure(self) -> None:
        """Learn the need of the batches since the last warm-up, where one needed more than earlier batches."""
        seen, known = self._seen, self._known
        if seen.shape is None:
            return
        peak = max(0, self.peak - seen.base)
        if known is None:
            # Two blocks have gradients on the GPU: one computes while the one before is on its way.
            fixed = fixed_bytes(self._singles, 2 * self._activations.costs.gradient_bytes)
            self._known = Measured(seen.shape, max(0, peak - seen.beside), 0, fixed)
        elif (most := self._parts(known).at(seen.shape)) > known.nbytes:
            # The peak may be an earlier batch's, which kept more; the prediction is the upper limit of the need.
            measured = max(known.nbytes, peak - seen.beside)
            self._known = replace(known, shape=seen.shape, nbytes=int(min(most, measured)))
        elif peak > seen.expected:
            more = peak - seen.expected  # more images with the same number of tokens
            self._known = replace(known, nbytes=int(known.nbytes + more))
        self._seen = replace(seen, expected=max(seen.expected, peak))
