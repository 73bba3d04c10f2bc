"""What must hold for the structure of any model, checked wherever a test asks for one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from torch import nn

from ds_slide.model.structure import ModelStructure, Precision, find_structure


@pytest.fixture
def structure_of() -> Callable[..., ModelStructure]:
    """`structure_of(model, blocks)`: find_structure, with the rules of every structure checked."""

    def find(model: nn.Module, blocks: Sequence[str] | None = None) -> ModelStructure:
        structure = find_structure(model, "auto" if blocks is None else blocks)
        check_structure(model, structure)
        return structure

    return find


def check_structure(model: nn.Module, structure: ModelStructure) -> None:
    """Every parameter is in exactly one unit under its own name, and units describe themselves correctly."""
    named = dict(model.named_parameters())
    positions = {name: position for position, name in enumerate(named)}
    assert sorted(name for unit in structure.units for name, _ in unit.parameters) == sorted(named)
    assert len({unit.name for unit in structure.units}) == len(structure.units)
    for unit in structure.units:
        assert unit.parameters
        assert all(named[name] is parameter for name, parameter in unit.parameters)
        assert unit.numel == sum(parameter.numel() for _, parameter in unit.parameters)
        order = [positions[name] for name, _ in unit.parameters]
        assert order == sorted(order)
        assert {Precision.declared(parameter) for _, parameter in unit.parameters} == {unit.precision}
    for kind, units in (("block", structure.blocks), ("part", structure.parts), ("outer", structure.outer_units)):
        assert [unit.index for unit in units] == list(range(len(units)))
        assert all(unit.kind == kind for unit in units)
    for block in structure.blocks:
        assert block.module is model.get_submodule(block.name)
        assert any(block.name.startswith(f"{path}." if path else "") for path in structure.lists)
        inside = {id(parameter) for parameter in block.module.parameters()}
        assert all(id(parameter) in inside for _, parameter in block.parameters)
    assert all(outer_unit.module is None for outer_unit in structure.outer_units)
    block_of = {block.module: block for block in structure.blocks}
    for part in structure.parts:
        assert part.precision != block_of[part.module].precision
        inside = {id(parameter) for parameter in part.module.parameters()}
        assert all(id(parameter) in inside for _, parameter in part.parameters)
