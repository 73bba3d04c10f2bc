"""What is explored, by how much effort it takes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import fields, replace

from liveness.tiny import Configuration
from liveness.weights import HAS_SHARED_WEIGHTS

HANG_1 = Configuration("everything on SSD, 3 slots", slots=3, chunk_buffers=3, checkpointing=True, steps=3)
"""As the engine once hung: held gradients, three blocks, two weight buffers, activation checkpointing."""

_MEMORY = Configuration("in memory", blocks=2, steps=2).in_memory()

EXHAUSTIVE = [
    replace(_MEMORY, name="in memory, held"),
    replace(_MEMORY, name="in memory, under backward", held=False, steps=1),
    replace(_MEMORY, name="in memory, an outer module", outer_units=1, steps=1),
    replace(_MEMORY, name="in memory, accumulation", accumulation=2, steps=1),
    replace(_MEMORY, name="in memory, accumulation unannounced", accumulation=2, announced=False, steps=1),
    Configuration("one step on SSD", blocks=2, steps=1),
    Configuration("one step on SSD, under backward", blocks=2, steps=1, held=False),
]
"""All schedules of these, without a bound."""

TWO_PASSES = [
    replace(_MEMORY, name="two passes", passes=2, blocks=3),
    replace(_MEMORY, name="two passes, an outer module, accumulation", passes=2, outer_units=1, accumulation=2),
    replace(_MEMORY, name="two passes, all states read between steps", passes=2, between="all", steps=3),
    replace(_MEMORY, name="two passes, sums on the GPU", passes=2, blocks=3, accumulation=2, sums=True),
    replace(_MEMORY, name="two passes, sums, unannounced", passes=2, accumulation=2, announced=False, sums=True),
]

MATRICES = [
    replace(_MEMORY, name="matrices, held", matrices=True, blocks=3, outer_units=1),
    replace(_MEMORY, name="matrices, under backward", matrices=True, blocks=3, held=False, steps=3),
    replace(_MEMORY, name="matrices, accumulation, all states read", matrices=True, accumulation=2, between="all"),
    replace(_MEMORY, name="matrices, weights on SSD", matrices=True, weights_on_ssd=True, held=False),
    replace(_MEMORY, name="matrices, two ranks", matrices=True, ranks=2),
    replace(_MEMORY, name="matrices, closed", matrices=True, ending="close"),
]

_SPECULATIVE = replace(_MEMORY, speculates=True, clips_first=False)

SPECULATIVE = [
    replace(_SPECULATIVE, name="speculation", blocks=3, steps=3),
    replace(_SPECULATIVE, name="speculation, two passes, an outer module", passes=2, outer_units=1),
    replace(_SPECULATIVE, name="speculation, accumulation", accumulation=2),
    replace(_SPECULATIVE, name="speculation, accumulation unannounced", accumulation=2, announced=False),
    replace(_SPECULATIVE, name="speculation, skipped steps", between="overflow", steps=3),
    replace(_SPECULATIVE, name="speculation, two ranks", ranks=2, outer_units=1),
]

_EXPERTS = replace(_MEMORY, experts=True, blocks=3)

IN_PARTS = [
    replace(_EXPERTS, name="experts in parts, inference", inference=True),
    replace(_EXPERTS, name="experts in parts, under backward", held=False, checkpointing=True),
    replace(_EXPERTS, name="experts in parts, weights written between steps", between="all", accumulation=2),
    replace(_EXPERTS, name="experts in parts, two ranks", ranks=2, shared=True),
]
if not HAS_SHARED_WEIGHTS:
    IN_PARTS.pop()

ON_SSD = [
    HANG_1,
    Configuration("everything on SSD, 2 slots, inference", steps=2, inference=True),
    Configuration("everything on SSD, under backward", held=False),
    Configuration("everything on SSD, accumulation", slots=3, accumulation=2, steps=3),
    Configuration("everything on SSD, 2 chunks a block", chunks=2, checkpointing=True),
    Configuration("4 blocks, 3 weight buffers, inference", blocks=4, weight_buffers=3, inference=True, steps=3),
    Configuration("states only on SSD", weights_on_ssd=False, chunks=2),
    Configuration("states only on SSD, under backward", weights_on_ssd=False, chunks=2, held=False),
    Configuration("weights only on SSD", chunks_on_ssd=False),
    Configuration("outer modules with states on SSD", blocks=2, outer_units=2, outer_chunks_on_ssd=True),
    Configuration(
        "outer modules with states on SSD, under backward",
        blocks=2,
        outer_units=2,
        outer_chunks_on_ssd=True,
        held=False,
    ),
    Configuration("gradients on SSD", gradients_on_ssd=True, inference=True),
    Configuration(
        "everything on SSD, accumulation unannounced", slots=3, accumulation=2, announced=False, outer_units=1
    ),
    Configuration("gradients on SSD, accumulation", blocks=2, gradients_on_ssd=True, accumulation=2),
    Configuration("every other block on SSD", blocks=4, only=(1, 3), inference=True),
    Configuration("a block's states read between steps", between="one", held=False),
    Configuration("checkpoints between steps", outer_units=1, between="all"),
    Configuration("checkpoints between steps, under backward", outer_units=1, between="all", held=False),
    Configuration("skipped steps", between="overflow"),
    Configuration("closed while updates are under way", outer_units=1, ending="close"),
    Configuration("closed while updates are under way, under backward", held=False, ending="close"),
]

DEFAULTS = [
    Configuration(
        f"default buffers, {blocks} blocks, {'held' if held else 'under backward'}",
        blocks=blocks,
        outer_units=2,
        outer_chunks_on_ssd=True,
        slots=3,
        weight_buffers=7,
        chunk_buffers=16,
        gradient_buffers=4,
        held=held,
        inference=True,
        steps=3,
    )
    for blocks, held in itertools.product((8, 10), (True, False))
]
"""With as many buffers as there are if nobody asks for another number."""

_TWO = Configuration("", ranks=2, blocks=2, outer_units=1)

TWO_RANKS = [
    replace(_TWO.in_memory(), name="two ranks in memory"),
    replace(_TWO.in_memory(), name="two ranks in memory, under backward", held=False),
    replace(_TWO, name="two ranks on SSD"),
    replace(_TWO, name="two ranks on SSD, under backward, inference", held=False, inference=True),
    replace(_TWO, name="two ranks on SSD, accumulation", accumulation=2),
    replace(_TWO, name="two ranks on SSD, checkpoints between steps", between="all"),
    replace(_TWO.in_memory(), name="two GPUs, one queue of collectives each", blocks=3, one_at_a_time=True),
    replace(
        _TWO.in_memory(), name="two GPUs, one queue of collectives each, under backward", one_at_a_time=True, held=False
    ),
    replace(_TWO, name="two ranks on SSD, closed", ending="close"),
    replace(_TWO, name="two ranks on SSD, read and closed", ending="read and close"),
    replace(_TWO.in_memory(), name="four ranks in memory", ranks=4),
]

_HOSTS = replace(_TWO, apart=True, blocks=3)

HOSTS = [
    replace(_HOSTS.in_memory(), name="two hosts"),
    replace(_HOSTS.in_memory(), name="two hosts, under backward", held=False),
    replace(_HOSTS.in_memory(), name="two hosts, accumulation, checkpointing", accumulation=2, checkpointing=True),
    replace(_HOSTS.in_memory(), name="two hosts, speculation", speculates=True, clips_first=False),
    replace(_HOSTS.in_memory(), name="two hosts, one queue of collectives each", one_at_a_time=True, held=False),
    replace(_HOSTS.in_memory(), name="two hosts, checkpoints between steps", between="all"),
    replace(_HOSTS, name="two hosts, everything on SSD, inference", inference=True),
    replace(_HOSTS, name="two hosts, everything on SSD, under backward", held=False),
    replace(_HOSTS.in_memory(), name="three hosts", ranks=3),
    replace(_HOSTS, name="two hosts, closed", ending="close"),
]
"""Ranks on a host each, which gather all weights, in the order of the program."""

_SHARED = replace(_TWO, shared=True)

SHARED = [
    replace(_SHARED.in_memory(), name="shared weights", shared=True),
    replace(_SHARED.in_memory(), name="shared weights, under backward", shared=True, held=False),
    replace(_SHARED.in_memory(), name="shared weights, speculation", shared=True, speculates=True, clips_first=False),
    replace(_SHARED.in_memory(), name="shared weights, 3 blocks, accumulation", shared=True, blocks=3, accumulation=2),
    replace(_SHARED.in_memory(), name="shared weights, one queue of collectives each", shared=True, one_at_a_time=True),
    replace(
        _SHARED.in_memory(),
        name="shared weights, inference on one rank",
        shared=True,
        blocks=3,
        inference=True,
        only_rank_0_infers=True,
    ),
    replace(_SHARED.in_memory(), name="shared weights, checkpoints between steps", shared=True, between="all"),
    replace(_SHARED, name="shared weights, states on SSD", weights_on_ssd=False),
    replace(_SHARED, name="shared weights, states on SSD, under backward", weights_on_ssd=False, held=False),
    replace(_SHARED, name="shared weights, one block's on SSD", blocks=3, only=(2,)),
    replace(_SHARED.in_memory(), name="shared weights, closed", shared=True, ending="close"),
    replace(_SHARED.in_memory(), name="shared weights, one rank closes", shared=True, ending="one closes"),
    replace(_SHARED, name="shared weights, states on SSD, closed", weights_on_ssd=False, ending="close"),
    replace(_SHARED, name="shared weights, states on SSD, one rank closes", weights_on_ssd=False, ending="one closes"),
    replace(_SHARED.in_memory(), name="shared weights, four ranks", shared=True, ranks=4),
]
"""Two ranks that read each other's weights. Those of blocks on SSD are gathered."""
if not HAS_SHARED_WEIGHTS:
    SHARED.clear()

_DIVIDED = replace(_SHARED.in_memory(), shared=True, exchanges=True, blocks=3)

SEQUENCES = [
    replace(_DIVIDED, name="divided sequences"),
    replace(_DIVIDED, name="divided sequences, under backward", held=False),
    replace(_DIVIDED, name="divided sequences, accumulation, checkpointing", accumulation=2, checkpointing=True),
    replace(_DIVIDED, name="divided sequences, speculation", speculates=True, clips_first=False),
    replace(_DIVIDED, name="divided sequences, one queue of collectives each", one_at_a_time=True, held=False),
    replace(_DIVIDED, name="divided sequences, checkpoints between steps", between="all", checkpointing=True),
    replace(_DIVIDED, name="divided sequences, states on SSD, inference", chunks_on_ssd=True, inference=True),
    replace(_DIVIDED, name="divided sequences, everything on SSD", weights_on_ssd=True, chunks_on_ssd=True),
    replace(_DIVIDED, name="divided sequences, gathered weights", shared=False, apart=True),
    replace(_DIVIDED, name="divided sequences, four ranks", ranks=4, held=False),
    replace(_DIVIDED, name="divided sequences, closed", ending="close"),
]
"""Ranks that read each other's weights, and whose blocks have collectives."""
if not HAS_SHARED_WEIGHTS:
    SEQUENCES.clear()

_DIFFER = replace(_SHARED.in_memory(), shared=True, differ=True, blocks=3, steps=3)
_FICKLE = replace(_DIFFER, differ=False, fickle=True, steps=4)

DIFFERENT = [
    replace(_DIFFER, name="ranks that differ"),
    replace(_DIFFER, name="ranks that differ, under backward", held=False),
    replace(_DIFFER, name="ranks that differ, accumulation", accumulation=2),
    replace(_DIFFER, name="ranks that differ, speculation", speculates=True, clips_first=False),
    replace(_DIFFER, name="ranks that differ, three ranks", ranks=3),
    replace(_DIFFER, name="ranks that differ, three ranks, under backward", ranks=3, held=False),
    replace(_DIFFER, name="ranks that differ, four ranks", ranks=4),
    replace(_DIFFER, name="ranks that differ, four ranks, under backward", ranks=4, held=False),
    replace(_DIFFER, name="ranks that differ, one queue of collectives each", one_at_a_time=True),
    replace(_DIFFER, name="ranks that differ, skipped steps", between="overflow"),
    replace(_DIFFER, name="ranks that differ, checkpoints between steps", between="all", held=False),
    replace(_DIFFER, name="ranks that differ, inference on one rank", inference=True, only_rank_0_infers=True),
    replace(_DIFFER, name="ranks that differ, states on SSD", chunks_on_ssd=True, held=False),
    replace(_DIFFER, name="ranks that differ, gradients on SSD", gradients_on_ssd=True, chunks_on_ssd=True),
    replace(_DIFFER, name="ranks that differ, closed", ending="close"),
    replace(_FICKLE, name="gradients that are expected in vain"),
    replace(_FICKLE, name="gradients that are expected in vain, under backward", held=False),
    replace(_FICKLE, name="gradients that are expected in vain, three ranks", ranks=3, accumulation=2),
    replace(_FICKLE, name="gradients that are expected in vain, one queue of collectives each", one_at_a_time=True),
]
"""Ranks that read each other's weights, and use other blocks than the others."""
if not HAS_SHARED_WEIGHTS:
    DIFFERENT.clear()

BESIDE = [
    replace(configuration, name=f"{configuration.name}, beside a reference", reference=True)
    for configuration in (
        replace(EXHAUSTIVE[0].in_memory(), name="in memory"),
        replace(_TWO, name="two ranks on SSD", held=False),
        replace(_TWO.in_memory(), name="two GPUs, one queue of collectives each", one_at_a_time=True),
        replace(_TWO.in_memory(), name="two ranks in memory, closed", ending="close"),
        replace(_SHARED.in_memory(), name="shared weights", shared=True),
        replace(_DIFFER, name="ranks that differ"),
        replace(_SHARED, name="shared weights, states on SSD, closed", weights_on_ssd=False, ending="close"),
    )
]
"""Two engines, one of which trains."""
if not HAS_SHARED_WEIGHTS:
    BESIDE.clear()

LARGER = [
    *TWO_PASSES,
    *MATRICES,
    *SPECULATIVE,
    *IN_PARTS,
    *ON_SSD,
    *DEFAULTS,
    *TWO_RANKS,
    *HOSTS,
    *SHARED,
    *SEQUENCES,
    *DIFFERENT,
    *BESIDE,
]

ALL = [*EXHAUSTIVE, *LARGER]


def with_each_setting(configurations: Sequence[Configuration]) -> list[Configuration]:
    """A few of them, in which each setting has each of its values: a quarter of all."""

    def settings_of(configuration: Configuration) -> set[tuple[str, object]]:
        return {(each.name, getattr(configuration, each.name)) for each in fields(configuration) if each.name != "name"}

    missing, chosen = set().union(*map(settings_of, configurations)), []
    while missing:
        chosen.append(max(configurations, key=lambda each: len(settings_of(each) & missing)))
        missing -= settings_of(chosen[-1])
    return chosen
