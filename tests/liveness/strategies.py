"""Who goes on when several can: an order of the lanes, departures from it, a random order, or a list of choices."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from liveness.scheduler import Choice, Scheduler

LANES = (
    "compute",
    "ds_slide-h2d",
    "ds_slide-h2d of outer modules",
    "ds_slide-d2h",
    "ds_slide-update",
    "ds_slide-ssd",
    "ds_slide-products",
    "ds_slide-d2h of matrices",
)
ORDERS: dict[str, tuple[str, ...]] = {
    # Each is the order of a machine on which one thing is slow.
    "slow disk": ("compute", "d2h", "update", "products", "d2h of matrices", "h2d of outer modules", "h2d", "ssd"),
    "slow compute": ("ssd", "d2h of matrices", "products", "update", "d2h", "h2d of outer modules", "h2d", "compute"),
    "slow update": ("compute", "ssd", "d2h", "h2d of outer modules", "h2d", "update", "products", "d2h of matrices"),
    "slow copies": ("compute", "ssd", "update", "products", "h2d of outer modules", "d2h", "d2h of matrices", "h2d"),
}


def place_of(name: str, order: Sequence[str]) -> int:
    short = name.removeprefix("ds_slide-")
    return order.index(short) if short in order else len(order) - 2


def by_order(order: Sequence[str]) -> Callable[[Scheduler, list[Choice]], int]:
    """Always the first that can, in this order of lanes."""
    places: dict[str, int] = {}

    def choose(_scheduler: Scheduler, choices: list[Choice]) -> int:
        best, least = 0, 1 << 30
        for index, choice in enumerate(choices):
            name = choice.thread.name
            if (place := places.get(name)) is None:
                place = places[name] = place_of(name, order)
            if place < least:
                best, least = index, place
        return best

    return choose


def with_departures(order: Sequence[str], departures: Mapping[int, int]) -> Callable[[Scheduler, list[Choice]], int]:
    """As `by_order`, but at the choice number k of `departures` the choice `departures[k]`."""
    base, count = by_order(order), -1

    def choose(scheduler: Scheduler, choices: list[Choice]) -> int:
        nonlocal count
        count += 1
        return departures[count] if count in departures else base(scheduler, choices)

    return choose


def listed(choices_made: Sequence[int]) -> Callable[[Scheduler, list[Choice]], int]:
    """Choices of an earlier run; the first possible after their end."""
    count = -1

    def choose(_scheduler: Scheduler, choices: list[Choice]) -> int:
        nonlocal count
        count += 1
        index = choices_made[count] if count < len(choices_made) else 0
        return min(index, len(choices) - 1)

    return choose


def by_chance(seed: int) -> Callable[[Scheduler, list[Choice]], int]:
    """Each with the same probability, at every point."""
    generator = random.Random(seed)
    return lambda _scheduler, choices: generator.randrange(len(choices))


def by_priorities(seed: int, changes: int = 3, horizon: int = 400) -> Callable[[Scheduler, list[Choice]], int]:
    """PCT: threads, and transfers by their names, have random priorities, the highest goes on; at `changes` random
    places among `horizon` the one that would go on becomes the lowest. A bug of depth d is found with probability
    1 / (threads * horizon^(d-1)) at least, whatever the probability of its timing."""
    generator = random.Random(seed)
    priorities: dict[str, float] = {}
    places = {generator.randrange(horizon) for _ in range(changes)}
    count, lowest = -1, 0.0

    def choose(_scheduler: Scheduler, choices: list[Choice]) -> int:
        nonlocal count, lowest
        count += 1
        for choice in choices:
            if choice.label not in priorities:
                # All transfers together are about as likely to be slow as any one thread.
                disk = priorities.setdefault(choice.thread.name, generator.random())
                own = disk if choice.option is None else disk + 0.01 * generator.random()
                priorities.setdefault(choice.label, own)
        best = max(range(len(choices)), key=lambda index: priorities[choices[index].label])
        if count in places:
            lowest -= 1.0
            priorities[choices[best].label] = lowest
            best = max(range(len(choices)), key=lambda index: priorities[choices[index].label])
        return best

    return choose
