"""Projectors that are learned while the run goes on: checked on a gradient every `check_every` steps, and fitted to it
anew where they lose too much of it.

A fit takes the last gradient of a step on the GPU, before it is compressed, and waits for it. The projectors are
replaced, and the moments carried into their subspace, when the step's updates have been queued: the gradient, its
update and the change that this makes are all in one subspace. No replacement is pending between two steps, so
checkpoints never hold half of one.

Each of several ranks fits other matrices of a unit, to the mean of all ranks' gradients, and all get the same bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf
from typing import Any

import torch

from ds_slide.compression.codec import CHANGE_DTYPE
from ds_slide.compression.lsp.codec import Lsp, Pair
from ds_slide.compression.lsp.learning import Fit, carry_moments, refit
from ds_slide.model.layout import piece
from ds_slide.runtime.core.context import Context
from ds_slide.runtime.core.unit import Unit

FIT_STEPS = 50
"""Steps of a fit at most: the next hundreds of steps would hardly improve it, at a millisecond each."""
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class _Fitted:
    unit: Unit
    codec: Lsp
    number: int
    """Number of the matrix."""
    pair: Pair


class Learning:
    """Called by the compute thread."""

    def __init__(self, units: Sequence[Unit], context: Context) -> None:
        self._codecs = {unit.order: unit.codec for unit in units if isinstance(unit.codec, Lsp)}
        self._units = {order: units[order] for order in self._codecs}
        self._ranks = context.ranks
        self._device = context.device
        self.next_check = {unit.name: 0 for unit in self._units.values()}
        """The step before which each unit is checked next; the first step is 0."""
        self._looked: list[str] = []
        """Units that have been checked since the last step."""
        self._fitted: list[_Fitted] = []
        self._biases: dict[tuple[int, int], float] = {}
        self._checks = self._refits = 0

    def resume(self, next_check: Mapping[str, int]) -> None:
        """Go on as the run of a checkpoint."""
        self._fitted.clear()
        self._looked.clear()
        self.next_check.update(next_check)

    def look(self, unit: Unit, step: int) -> None:
        """Check the projectors of `unit` on its parameters' gradients, the last before step `step`, if it is time.
        Collective then."""
        codec = self._codecs.get(unit.order)
        if codec is None or step < self.next_check[unit.name]:
            return
        means = [self._mean(unit, number, gradient) for number, gradient in enumerate(unit.gradients())]
        fits = self._fits(codec, {number: mean for number, mean in enumerate(means) if mean is not None}, step)
        given = self._ranks.exchange(fits, f"the projectors of {unit.name}")
        if not any(given):  # no rank has used the unit, whose check waits for a step that uses it
            return
        every = codec.settings.check_every
        self.next_check[unit.name] = (step // every + 1) * every
        self._looked.append(unit.name)
        self._checks += 1
        for number, (bias, pair) in sorted(chain.from_iterable(each.items() for each in given)):
            self._biases[unit.order, number] = bias
            if pair is not None:
                self._fitted.append(_Fitted(unit, codec, number, pair.to(self._device.torch)))

    def _mean(self, unit: Unit, number: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Return the gradient on which this rank checks the projectors of matrix `number`. None where another rank
        checks them, or no rank has a gradient."""
        ranks, (parameter, entry) = self._ranks, unit.trainable[number]
        if ranks.world_size == 1:
            return None if gradient is None else gradient.contiguous()
        mean = torch.zeros(entry.shape, dtype=parameter.dtype, device=self._device.torch)
        if gradient is not None:
            torch.div(gradient, ranks.world_size, out=mean)
        ranks.sum_(mean, f"the gradient that the projectors of {entry.name} are checked on", self._device.mark())
        ranks.join()
        return mean if number % ranks.world_size == ranks.rank and mean.any() else None

    def _fits(
        self, codec: Lsp, gradients: Mapping[int, torch.Tensor], step: int
    ) -> dict[int, tuple[float, Pair | None]]:
        """Return (bias of the projectors, new projectors if they were fitted) by number of the matrix. With several
        ranks the new projectors are in host memory."""
        pairs, settings = codec.pairs, codec.settings

        def fit(number: int, gradient: torch.Tensor) -> Fit:
            name = f"{codec.matrices[number].entry.name} {step}"
            generator = torch.Generator().manual_seed(settings.seed ^ zlib.crc32(name.encode()))
            return Fit(gradient, pairs[number].left, pairs[number].right, generator)

        fits = [fit(*each) for each in gradients.items()]
        threshold = inf if settings.threshold is None else settings.threshold
        # The weight of the projectors' norms, which are a few tens, only keeps unused columns from growing.
        fitted = refit(fits, threshold=threshold, steps=FIT_STEPS, beta=1e-5)
        found: dict[int, tuple[float, Pair | None]] = {}
        for number, (left, right, bias) in zip(gradients, fitted, strict=True):
            pair = None
            if left is not pairs[number].left or right is not pairs[number].right:
                pair = Pair(left, right) if self._ranks.world_size == 1 else Pair(left, right).to("cpu")
            found[number] = float(bias), pair
        return found

    def fitted_units(self) -> list[Unit]:
        """Return the units whose projectors `adopt` will replace."""
        return list(dict.fromkeys(each.unit for each in self._fitted))

    def adopt(self) -> None:
        """Replace the projectors that were fitted, after the step's updates have been queued and `fitted_units` have
        settled. Collective then."""
        fitted, self._fitted = self._fitted, []
        self._looked.clear()
        for each in fitted:
            self._carry(each)
            each.codec.replace(each.number, each.pair)
            each.unit.state.drain()
        self._refits += len(fitted)

    def _carry(self, fitted: _Fitted) -> None:
        """Bring the moments of a matrix, whose unit has settled, into the subspace of its new projectors. Collective:
        each rank has a part of the moments."""
        state, matrix, old = fitted.unit.state, fitted.codec.matrices[fitted.number], fitted.codec.pairs[fitted.number]
        part = matrix.encoded
        own, (start, stop) = slice(part.offset, part.offset + part.partition_numel), piece(part, self._ranks.rank)

        def whole(name: str) -> torch.Tensor:
            mine = state.read(name, own).to(self._device.torch)
            return self._ranks.gather(mine, f"{name} of {part.name}")[: part.numel].view(part.shape)

        exp_avg, exp_avg_sq = map(whole, MOMENTS)
        carried = carry_moments(exp_avg, exp_avg_sq, old.left, old.right, fitted.pair.left, fitted.pair.right)
        for name, moment in zip(MOMENTS, carried, strict=True):
            state.write(name, slice(part.offset, part.offset + stop - start), moment.view(-1)[start:stop].cpu())

    def discard(self) -> None:
        """Discard the fits of a step that was not taken: its gradients may not have been finite. The next step's
        gradients are checked."""
        self._fitted.clear()
        self.next_check.update(dict.fromkeys(self._looked, 0))
        self._looked.clear()

    def statistics(self) -> dict[str, Any]:
        """Return figures of the whole run: checks of units and fits of matrices; the mean bias by kind of matrix in the
        newest checks, on the checked gradient, with the projectors after the check; bytes of a micro-batch's compressed
        gradients, and of a step's changes."""
        if not self._codecs:
            return {}
        settings = next(iter(self._codecs.values())).settings
        return {
            "d": settings.d,
            "r": settings.r,
            "matrices": sum(len(codec.matrices) for codec in self._codecs.values()),
            "checks": self._checks,
            "refits": self._refits,
            "bias": dict(self._mean_biases()),
            "bytes_down": sum(codec.nbytes for codec in self._codecs.values()),
            "bytes_up": sum(codec.whole_numel * CHANGE_DTYPE.itemsize for codec in self._codecs.values()),
        }

    def _mean_biases(self) -> Iterator[tuple[str, float]]:
        by_kind: dict[str, list[float]] = {}
        for (order, number), bias in self._biases.items():
            by_kind.setdefault(_kind(self._codecs[order].matrices[number].entry.name), []).append(bias)
        return ((kind, sum(biases) / len(biases)) for kind, biases in by_kind.items())


def _kind(name: str) -> str:
    """Return the part of the name that a matrix shares with all blocks: "self_attn.q_proj" of
    "model.layers.7.self_attn.q_proj.weight"."""
    parts = name.removesuffix(".weight").split(".")
    last = max((place for place, part in enumerate(parts) if part.isdecimal()), default=-1)
    return ".".join(parts[last + 1 :])
