"""The file of a checkpoint with the states of a client's optimizer: of each unit, what its copy of it keeps.

DeepSpeed's own file has flat tensors of one size only. An optimizer keeps what it likes: factors of a matrix, codes of
8 bits, counters. So each rank saves its copies as they are, in a file of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ds_slide.errors import SlideError
from ds_slide.optim.client import ClientRule, UnitOptimizer
from ds_slide.runtime.core.unit import Unit
from ds_slide.store.in_memory import ClientStates

_FORMAT = 1


def name_of(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"ds_slide_optimizer_{rank}.pt"


def copies(units: Sequence[Unit]) -> Iterator[tuple[str, UnitOptimizer]]:
    """Yield the unit's name and its copy of the client's optimizer, for each unit that has one."""
    for unit in units:
        if isinstance(unit.state.optimizer, ClientStates):
            yield unit.name, unit.state.optimizer.client


def planned(units: Sequence[Unit], rule: Any) -> dict[str, Any] | None:
    """Return the content of this rank's file. The units have settled. None without a client's optimizer."""
    if not isinstance(rule, ClientRule):
        return None
    return {"format": _FORMAT, "optimizer": rule.name, "units": {name: each.content() for name, each in copies(units)}}


def check(units: Sequence[Unit], rule: ClientRule, saved: Any, path: str) -> None:
    """Raise SlideError where `saved`, the content of the file at `path`, is not of this optimizer for these units."""
    known = isinstance(saved, Mapping) and saved.get("format") == _FORMAT
    name = saved.get("optimizer") if known else "unknown"
    if name != rule.name:
        raise SlideError(
            f"{path} has the states of the optimizer {name}, but this run has {rule.name}; load it with the optimizer "
            "that it was saved with, or pass load_optimizer_states=False to load_checkpoint"
        )
    found = {name: set(own["states"]) for name, own in saved["units"].items()}
    wanted = {name: {member.name for member in each.members} for name, each in copies(units)}
    if found != wanted:
        raise SlideError(
            f"{path} does not hold the states of this run's parameters; load it with the model that it was saved with, "
            "or pass load_optimizer_states=False to load_checkpoint"
        )


def load(units: Sequence[Unit], saved: Mapping[str, Any]) -> None:
    """Set the states of the settled units."""
    for name, each in copies(units):
        each.load(saved["units"][name])
