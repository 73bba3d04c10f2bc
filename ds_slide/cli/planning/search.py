"""What else would fit: the largest batch, the largest model, and the smallest change that makes a run fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ds_slide.cli.planning.planner import Planner, Request
from ds_slide.config import CONFIG_KEY
from ds_slide.errors import DoesNotFit, SlideConfigError, SlideError
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


def smallest_change(planner: Planner, request: Request, short: DoesNotFit) -> Change | None:
    """Return the first change that makes the run fit, the cheapest changes first; None where none does."""
    candidates = {"gpu": _for_gpu, "host": _for_host, "ssd": _for_ssd}[short.tier]
    for make in candidates(planner, request):
        try:
            change = make()
            if change is not None and fits(planner, change.request):
                return change
        except SlideConfigError:  # not for this model or JSON
            continue
        except SlideError:
            continue
    return None


def _for_gpu(planner: Planner, request: Request) -> Iterator[Callable[[], Change | None]]:
    least = {"window": 3, "gpu_states": 0}
    small = request.with_block(**least)
    yield lambda: Change('set "ds_slide": {"window": 3, "gpu_states": 0}', small)
    if not request.checkpointing:
        yield lambda: Change("use gradient checkpointing", replace(request, checkpointing=True))
        small = replace(small, checkpointing=True)
        yield lambda: Change('use gradient checkpointing and "ds_slide": {"window": 3, "gpu_states": 0}', small)

    if compression := request.raw.get(CONFIG_KEY, {}).get("compression"):
        rounded = request.with_block(compression={**compression, "master_dtype": "bf16"})
        yield lambda: Change('set "ds_slide": {"compression": {"master_dtype": "bf16"}}', rounded)

    # A smaller batch comes after changes of the JSON that cost less.
    def smaller_batch() -> Change | None:
        batch = largest_batch(planner, request)
        best, block = (batch, request) if batch else (largest_batch(planner, small), small)
        if not best:
            return None
        also = "" if batch else ' with "ds_slide": {"window": 3, "gpu_states": 0}'
        return Change(
            f"use a micro-batch of {best}{also} and accumulate gradients over more of them",
            replace(without_whole_batch(block), batch=best),
        )

    yield smaller_batch
    yield lambda: Change('set "ds_slide": {"stream_head": true}', request.with_block(stream_head=True))
    yield lambda: _more(planner, request, "gpu")


def _for_host(planner: Planner, request: Request) -> Iterator[Callable[[], Change | None]]:
    states = request.with_sections_on_ssd("offload_optimizer")
    yield lambda: Change('set zero_optimization.offload_optimizer.device to "nvme", with its nvme_path', states)
    both = request.with_sections_on_ssd("offload_optimizer", "offload_param")
    yield lambda: Change(
        'set zero_optimization.offload_optimizer.device and offload_param.device to "nvme", with their nvme_path', both
    )
    eight = both.with_block(state_dtype="8bit", gpu_states=0)
    yield lambda: Change('put states and weights on nvme and set "ds_slide": {"state_dtype": "8bit"}', eight)
    yield lambda: _more(planner, request, "host")


def _for_ssd(planner: Planner, request: Request) -> Iterator[Callable[[], Change | None]]:
    yield lambda: Change(
        'set "ds_slide": {"state_dtype": "8bit"}', request.with_block(state_dtype="8bit", gpu_states=0)
    )
    yield lambda: _more(planner, request, "ssd")


def _more(planner: Planner, request: Request, tier: str) -> Change | None:
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
