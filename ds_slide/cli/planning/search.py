"""What else would fit: the largest batch, model and subspace, and the smallest change that makes a run fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ds_slide.cli.planning.planner import Planner, Request
from ds_slide.config import CONFIG_KEY
from ds_slide.config.json_types import AUTO
from ds_slide.errors import DoesNotFit, SlideError
from ds_slide.plan.forecast import Forecast

MOST_BATCH = 1 << 16
ENOUGH = 0.98
"""Part of the most tokens a second: a larger batch for the rest is not worth its memory."""


@dataclass(frozen=True)
class Change:
    """`sentence`: what to do, in words that follow a semicolon."""

    sentence: str
    request: Request


def shortage(planner: Planner, request: Request) -> DoesNotFit | None:
    """Return the tier that is too small for a run; None where the run fits."""
    try:
        return planner.forecast(request).shortage()
    except DoesNotFit as error:
        return error


def fits(planner: Planner, request: Request) -> bool:
    return shortage(planner, request) is None


def largest_batch(planner: Planner, request: Request) -> int:
    """Return the most sequences of a micro-batch, to an eighth, the precision of a forecast; 0 where not even one
    fits."""
    request = without_whole_batch(request)

    def fitting(batch: int) -> bool:
        return fits(planner, replace(request, batch=batch))

    def taken(batch: int) -> int:
        forecast = planner.forecast(replace(request, batch=batch))
        return sum((forecast.host if request.room.gpu is None else forecast.gpu).values())

    room = request.room.host if request.room.gpu is None else request.room.gpu

    def bracket(low: int) -> tuple[int, int]:
        """Return a batch that fits and a batch that does not. `low`: a batch that fits."""
        high = low + 1 if low == 1 else 2 * low
        while high <= MOST_BATCH and fitting(high):
            # Only activations grow with the tokens: the last two batches tell how fast.
            each = (taken(high) - taken(low)) / (high - low)
            further = high + int((room - taken(high)) / max(each, 1.0)) + 1
            low, high = high, max(2 * high, min(further, 16 * high))
        return low, high

    if not fitting(1):
        return 0
    low = 1
    while True:
        low, high = bracket(low)
        interpolates = True
        while high - low > max(1, low // 8):
            share = (room - taken(low)) / max(taken(high) - taken(low), 1) if interpolates else 0.5
            middle = min(max(low + int(share * (high - low)), low + 1), high - 1)
            low, high = (middle, high) if fitting(middle) else (low, middle)
            interpolates = not interpolates
        # A larger batch may fit again: the first batch whose inputs of blocks wait in host memory does.
        further = high + high // 8
        if further > MOST_BATCH or not fitting(further):
            return low
        low = further


def without_whole_batch(request: Request) -> Request:
    """Return a copy that keeps the number of micro-batches of a step, whatever their size."""
    return replace(request, raw={key: value for key, value in request.raw.items() if key != "train_batch_size"})


def recommended(planner: Planner, request: Request, largest: int) -> Forecast:
    """Return the forecast of the smallest batch with nearly the most tokens a second, from the powers of two and
    `largest`."""
    request = without_whole_batch(request)
    batches = [1 << power for power in range(largest.bit_length()) if 1 << power < largest] + [largest]
    forecasts = [planner.steady(replace(request, batch=batch)) for batch in batches[-5:]]
    most = max(each.tokens_per_s for each in forecasts)
    return next(each for each in forecasts if each.tokens_per_s >= ENOUGH * most)


def largest_model(planner: Planner, request: Request) -> str | None:
    """Return the name of the largest preset of the model's kind that fits with the same batch."""
    for shape in request.shape.family():
        if fits(planner, replace(request, shape=shape)):
            return shape.name
    return None


def smallest_change(planner: Planner, request: Request, short: DoesNotFit) -> str | None:
    """Return the first change that makes the run fit, as a sentence, the cheapest changes first; None where none
    does."""
    candidates = {"gpu": _for_gpu, "host": _for_host, "ssd": _for_ssd}[short.tier]
    for change in candidates(planner, request):
        with suppress(SlideError):  # the change is not for this model or JSON
            if fits(planner, change.request):
                return change.sentence
    return None


def _for_gpu(planner: Planner, request: Request) -> Iterator[Change]:
    least = {"window": 3, "gpu_states": 0}
    small = request.with_block(**least)
    yield Change('set "ds_slide": {"window": 3, "gpu_states": 0}', small)
    if not request.checkpointing:
        yield Change("use gradient checkpointing", replace(request, checkpointing=True))
        small = replace(small, checkpointing=True)
        yield Change('use gradient checkpointing and "ds_slide": {"window": 3, "gpu_states": 0}', small)

    if compression := request.raw.get(CONFIG_KEY, {}).get("compression"):
        rounded = request.with_block(compression={**compression, "master_dtype": "bf16"})
        yield Change('set "ds_slide": {"compression": {"master_dtype": "bf16"}}', rounded)

    # A smaller batch comes after changes of the JSON that cost less.
    yield from _smaller_batch(planner, request, small)
    yield Change('set "ds_slide": {"stream_head": true}', request.with_block(stream_head=True))
    yield _more(planner, request, "gpu")


def _smaller_batch(planner: Planner, request: Request, small: Request) -> Iterator[Change]:
    """Yield the change to a smaller batch, of `request` or of `small`, which needs less beside the batch."""
    with suppress(SlideError):
        for block, also in ((request, ""), (small, ' with "ds_slide": {"window": 3, "gpu_states": 0}')):
            if batch := largest_batch(planner, block):
                sentence = f"use a micro-batch of {batch}{also} and accumulate gradients over more of them"
                yield Change(sentence, replace(without_whole_batch(block), batch=batch))
                return


def _for_host(planner: Planner, request: Request) -> Iterator[Change]:
    states = request.with_sections_on_ssd("offload_optimizer")
    yield Change('set zero_optimization.offload_optimizer.device to "nvme", with its nvme_path', states)
    both = request.with_sections_on_ssd("offload_optimizer", "offload_param")
    yield Change(
        'set zero_optimization.offload_optimizer.device and offload_param.device to "nvme", with their nvme_path', both
    )
    eight = both.with_block(state_dtype="8bit", gpu_states=0)
    yield Change('put states and weights on nvme and set "ds_slide": {"state_dtype": "8bit"}', eight)
    yield _more(planner, request, "host")


def _for_ssd(planner: Planner, request: Request) -> Iterator[Change]:
    yield Change('set "ds_slide": {"state_dtype": "8bit"}', request.with_block(state_dtype="8bit", gpu_states=0))
    yield _more(planner, request, "ssd")


def _more(planner: Planner, request: Request, tier: str) -> Change:
    """Return the change to the least memory of `tier` that fits. The bytes are doubled until the run fits, and then
    narrowed down by halving."""
    have: int = getattr(request.room, tier)
    low, high = have, 2 * have
    while high < 1 << 50 and not fits(planner, replace(request, room=replace(request.room, **{tier: high}))):
        low, high = high, 2 * high
    while high - low > max(1 << 28, low // 16):
        middle = (low + high) // 2
        enough = fits(planner, replace(request, room=replace(request.room, **{tier: middle})))
        low, high = (low, middle) if enough else (middle, high)
    option = {"gpu": "--gpu-memory", "host": "--host-memory", "ssd": "--nvme-memory"}[tier]
    gigabytes = -(-high // (1 << 30))
    return Change(
        f"it takes a machine with {gigabytes} GiB ({option})",
        replace(request, room=replace(request.room, **{tier: gigabytes << 30})),
    )


# ----------------------------------------------------------------------------------------------------------------------
# The subspace of compressed gradients that `"d": "auto"` stands for: the largest whose work is still hidden.

STEP = 64
"""d is a multiple of this number: rows have whole cache lines."""
HIDDEN = 1.02
"""Factor on the GPU's computing time: transfers and updates of a step that takes no longer are hidden. Where not even
the smallest d hides them (a vocabulary matrix on a slow link), the factor applies to the step with the smallest d."""


def with_subspace(planner: Planner, request: Request) -> tuple[Request, list[str]]:
    """Return the request with a number in the place of `"d": "auto"`, and a sentence that names the number; a request
    without "auto" is unchanged. Raises what `Planner.steady` raises."""
    compression: Any = request.raw.get(CONFIG_KEY, {}).get("compression")
    if not isinstance(compression, dict) or compression.get("d", AUTO) != AUTO:
        return request, []

    def with_d(d: int) -> Request:
        return request.with_block(compression={**compression, "d": d})

    def hides(d: int) -> bool:
        time = planner.steady(with_d(d)).time
        return time.step_s <= HIDDEN * max(time.lanes["compute"], least)

    low, high = STEP, _most(planner, with_d(STEP))
    least = planner.steady(with_d(low)).time.step_s
    if hides(high):
        low = high
    while high - low > STEP:  # the work to hide grows with d
        middle = (low + high) // 2 // STEP * STEP
        low, high = (middle, high) if hides(middle) else (low, middle)
    note = f'ds_slide.compression.d is "auto" and taken for {low}, the largest that hides at this batch; write it'
    return with_d(low), [note]


def _most(planner: Planner, request: Request) -> int:
    """Return half of the smaller side of the largest compressed matrix, as a multiple of `STEP`."""
    plans = [unit for unit in planner.planned(request).unit_plans if unit.spec.compressed]
    side = max(min(entry.shape) for unit in plans for entry in unit.layout.entries)
    return max(STEP, side // 2 // STEP * STEP)
