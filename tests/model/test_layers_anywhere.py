"""Layers that repeat are found wherever they are: in a dictionary, as attributes, in pairs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ds_slide.model.structure import ModelStructure

StructureOf = Callable[..., ModelStructure]


OUTER = {"embed.weight", "norm.weight", "norm.bias", "head.weight"}


class Block(nn.Module):
    def __init__(self, width: int = 32, expansion: int = 2) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, width * expansion)
        self.down = nn.Linear(width * expansion, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class OtherBlock(Block):
    """A layer of another class."""


class Model(nn.Module):
    def __init__(self, layers: nn.Module | None = None, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(3)) if layers is None else layers
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def block_names(structure: ModelStructure) -> list[str]:
    return [block.name for block in structure.blocks]


def outer_parameters(structure: ModelStructure) -> set[str]:
    return {name for outer_unit in structure.outer_units for name, _ in outer_unit.parameters}


class Attributes(nn.Module):
    """Its layers are attributes; `made` makes the one at a place."""

    def __init__(self, names: list[str], made: Callable[[int], nn.Module] = lambda _: Block()) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(64, 32), nn.LayerNorm(32), nn.Linear(32, 64, bias=False)
        for place, name in enumerate(names):
            self.add_module(name, made(place))
        self.names = names

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for name in self.names:
            x = getattr(self, name)(x)
        return self.head(self.norm(x))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(32, 4), nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[int(self.router(x).sum(dim=(0, 1)).argmax())](x)


class Heads(nn.Module):
    """A list of modules that are not most of it."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(2))
        self.mlp = Block(expansion=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(sum(head(x) for head in self.heads))


def pairs(depth: int, kinds: tuple[type[nn.Module], ...] = (Block, OtherBlock)) -> nn.ModuleList:
    return nn.ModuleList(nn.ModuleList([kind() for kind in kinds]) for _ in range(depth))


FOUND: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "dictionary": (
        lambda: Model(nn.ModuleDict({name: Block() for name in ("first", "second", "third")})),
        ["layers.first", "layers.second", "layers.third"],
    ),
    "numbered": (lambda: Attributes([f"layer{i}" for i in (1, 2, 3)]), ["layer1", "layer2", "layer3"]),
    "numbered with a line": (lambda: Attributes(["block_0", "block_1"]), ["block_0", "block_1"]),
    "without numbers": (lambda: Attributes(["first", "second", "third"]), ["first", "second", "third"]),
    "of two classes": (
        lambda: Attributes([f"layer{i}" for i in range(4)], lambda i: OtherBlock() if i % 2 else Block()),
        [f"layer{i}" for i in range(4)],
    ),
    "deeper": (lambda: nn.ModuleDict({"net": Attributes(["h0", "h1", "h2"])}), ["net.h0", "net.h1", "net.h2"]),
    "pairs": (lambda: Model(pairs(3)), [f"layers.{i}.{k}" for i in range(3) for k in range(2)]),
    "many pairs of one class": (
        lambda: Model(pairs(12, (Block, Block))),
        [f"layers.{i}.{k}" for i in range(12) for k in range(2)],
    ),
    "dictionaries of two": (
        lambda: Model(
            nn.ModuleDict({f"{i}": nn.ModuleDict({"attention": Block(), "mlp": OtherBlock()}) for i in range(3)})
        ),
        [f"layers.{i}.{name}" for i in range(3) for name in ("attention", "mlp")],
    ),
    "pairs as attributes": (
        lambda: Attributes([f"layer{i}" for i in range(3)], lambda _: nn.ModuleList([Block(), OtherBlock()])),
        [f"layer{i}.{k}" for i in range(3) for k in range(2)],
    ),
    "with experts": (
        lambda: Attributes(["layer1", "layer2", "layer3"], lambda _: Experts()),
        ["layer1", "layer2", "layer3"],
    ),
    "with heads": (
        lambda: Attributes(["layer1", "layer2", "layer3"], lambda _: Heads()),
        ["layer1", "layer2", "layer3"],
    ),
}


@pytest.mark.parametrize("build, expected", FOUND.values(), ids=FOUND)
def test_layers_are_found(build: Callable[[], nn.Module], expected: list[str], structure_of: StructureOf) -> None:
    structure = structure_of(build())
    assert block_names(structure) == expected
    assert {name.removeprefix("net.") for name in outer_parameters(structure)} == OUTER


def test_the_order_is_that_of_registration(structure_of: StructureOf) -> None:
    assert block_names(structure_of(Attributes(["layer2", "layer1", "layer3"]))) == ["layer2", "layer1", "layer3"]


def test_layers_beside_a_list_are_found_too(structure_of: StructureOf) -> None:
    model = Attributes(["layer1", "layer2"])
    model.encoder = nn.ModuleList(Block() for _ in range(2))
    assert block_names(structure_of(model)) == ["layer1", "layer2", "encoder.0", "encoder.1"]


NOT_BLOCKS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "towers": (lambda: Attributes(["encoder1", "encoder2"], lambda _: Model()), ["encoder1", "encoder2"]),
    "towers by name": (lambda: nn.ModuleDict({"student": Model(), "teacher": Model()}), ["student", "teacher"]),
}


@pytest.mark.parametrize("build, towers", NOT_BLOCKS.values(), ids=NOT_BLOCKS)
def test_towers_are_no_blocks_but_their_layers(
    build: Callable[[], nn.Module], towers: list[str], structure_of: StructureOf
) -> None:
    assert structure_of(build()).lists == tuple(f"{tower}.layers" for tower in towers)


def test_the_same_layer_run_several_times_is_no_block(structure_of: StructureOf) -> None:
    layer = Block()
    assert structure_of(Attributes([f"layer{i}" for i in range(4)], lambda _: layer)).blocks == ()


def test_stages_of_very_different_sizes_are_no_blocks(structure_of: StructureOf) -> None:
    """Two slots of the largest would take more than all of them."""
    stages = Attributes([f"stage{i}" for i in range(4)], lambda i: Block(expansion=4**i))
    assert structure_of(stages).blocks == ()


@pytest.mark.parametrize("name", ["heads", "adapters"])
def test_a_small_dictionary_is_left_alone(name: str, structure_of: StructureOf) -> None:
    model = Model(nn.ModuleList(Block(width=128) for _ in range(4)), width=128)
    setattr(model, name, nn.ModuleDict({task: Block() for task in ("first", "second")}))
    assert structure_of(model).lists == ("layers",)


def test_two_parts_of_one_class_are_no_blocks(structure_of: StructureOf) -> None:
    """There would be as much on the GPU at once as without blocks."""
    assert structure_of(Attributes(["left", "right"])).blocks == ()
