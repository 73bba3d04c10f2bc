"""Structure discovery: the rules, on models small enough to read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ds_slide.errors import SlideConfigError
from ds_slide.model.structure import ModelStructure, find_structure

StructureOf = Callable[..., ModelStructure]


class Block(nn.Module):
    def __init__(self, width: int = 32, expansion: int = 2) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width * expansion)
        self.act = nn.ReLU()
        self.down = nn.Linear(width * expansion, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class OtherBlock(Block):
    """A second class of layer, as cross-attention layers among self-attention layers."""


class Model(nn.Module):
    """Embedding, layers, norm, head: the shape of every language model."""

    def __init__(self, layers: nn.Module | None = None, vocabulary: int = 64, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(3)) if layers is None else layers
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def block_names(structure: ModelStructure) -> list[str]:
    return [block.name for block in structure.blocks]


def outer_parameters(structure: ModelStructure) -> set[str]:
    return {name for outer_unit in structure.outer_units for name, _ in outer_unit.parameters}


OUTER = {"embed.weight", "norm.weight", "norm.bias", "head.weight"}


def test_plain_model(structure_of: StructureOf) -> None:
    structure = structure_of(Model())
    assert structure.lists == ("layers",)
    assert block_names(structure) == ["layers.0", "layers.1", "layers.2"]
    assert [name for name, _ in structure.blocks[1].parameters] == [
        f"layers.1.{name}" for name in ("norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias")
    ]
    assert [outer_unit.name for outer_unit in structure.outer_units] == ["outer"]
    assert outer_parameters(structure) == OUTER
    assert structure.units == structure.outer_units + structure.blocks


# Sharing -------------------------------------------------------------------------------------------------------------


def test_tied_head_is_one_outer_module_parameter_under_its_first_name(structure_of: StructureOf) -> None:
    model = Model()
    model.head.weight = model.embed.weight
    structure = structure_of(model)
    assert outer_parameters(structure) == OUTER - {"head.weight"}
    assert len(structure.blocks) == 3


def test_parameter_shared_between_blocks_is_an_outer_module(structure_of: StructureOf) -> None:
    model = Model()
    model.layers[2].up.weight = model.layers[0].up.weight
    structure = structure_of(model)
    assert outer_parameters(structure) == OUTER | {"layers.0.up.weight"}
    assert "layers.2.up.bias" in {name for name, _ in structure.blocks[2].parameters}


def test_parameter_shared_between_a_block_and_the_outside_is_an_outer_module(structure_of: StructureOf) -> None:
    model = Model()
    model.norm.weight = model.layers[1].norm.weight
    assert outer_parameters(structure_of(model)) == OUTER - {"norm.weight"} | {"layers.1.norm.weight"}


def test_submodule_of_a_block_that_is_also_used_outside_is_an_outer_module(structure_of: StructureOf) -> None:
    model = Model()
    model.norm = model.layers[2].norm
    outside = {"layers.2.norm.weight", "layers.2.norm.bias"}
    assert outer_parameters(structure_of(model)) == {"embed.weight", "head.weight"} | outside


def test_submodule_shared_by_all_blocks_is_an_outer_module(structure_of: StructureOf) -> None:
    """Zamba style: each layer calls the same attention."""
    model = Model()
    for layer in model.layers[1:]:
        layer.down = model.layers[0].down
    assert outer_parameters(structure_of(model)) == OUTER | {"layers.0.down.weight", "layers.0.down.bias"}


def test_second_name_of_a_block_does_not_make_it_shared(structure_of: StructureOf) -> None:
    model = Model()
    model.first = model.layers[0]
    model.same_list = model.layers
    model.other_list = nn.ModuleList(model.layers)
    structure = structure_of(model)
    assert structure.lists == ("layers",)
    assert block_names(structure) == ["layers.0", "layers.1", "layers.2"]
    assert outer_parameters(structure) == OUTER


def test_parameter_used_twice_inside_one_block_stays_in_the_block(structure_of: StructureOf) -> None:
    model = Model()
    for layer in model.layers:
        layer.second_norm = layer.norm
        layer.up.second_name = layer.up.weight
    structure = structure_of(model)
    assert outer_parameters(structure) == OUTER
    assert len(structure.blocks[0].parameters) == 6


def test_list_that_collects_parts_of_blocks_is_no_layer_list(structure_of: StructureOf) -> None:
    model = Model()
    model.expanders = nn.ModuleList(nn.Sequential(layer.up, nn.ReLU()) for layer in model.layers)
    structure = structure_of(model)
    assert structure.lists == ("layers",)
    # Usable from outside the block, so they cannot leave with the block.
    assert outer_parameters(structure) == OUTER | {
        f"layers.{i}.up.{kind}" for i in range(3) for kind in ("weight", "bias")
    }


def test_block_without_parameters_of_its_own_is_not_a_unit(structure_of: StructureOf) -> None:
    blocks = [Block() for _ in range(3)]
    model = Model(nn.ModuleList(blocks))
    model.tied = nn.ModuleDict({"norm": blocks[1].norm, "up": blocks[1].up, "down": blocks[1].down})
    assert block_names(structure_of(model)) == ["layers.0", "layers.2"]


def test_same_layer_run_several_times_is_no_layer_list(structure_of: StructureOf) -> None:
    layer = Block()
    structure = structure_of(Model(nn.ModuleList([layer] * 4)))
    assert structure.lists == ()
    assert [outer_unit.name for outer_unit in structure.outer_units] == ["outer"]


# What counts as a layer list -----------------------------------------------------------------------------------------


def test_small_list_is_no_layer_list(structure_of: StructureOf) -> None:
    """A two-layer head is below the share of a layer list, whatever its layers look like."""
    model = Model(nn.ModuleList(Block(width=128) for _ in range(4)), width=128)
    model.classifier = nn.Sequential(Block(width=32), Block(width=32))
    assert structure_of(model).lists == ("layers",)


def test_single_layer_is_no_list(structure_of: StructureOf) -> None:
    assert structure_of(Model(nn.ModuleList([Block()]))).lists == ()


def test_lists_of_an_undivided_module_are_no_layer_lists() -> None:
    """Experts in a leaf module of ZeRO-3, of which each rank may run another one."""
    model = nn.ModuleDict({"moe": Model(), "rest": nn.ModuleList(Block() for _ in range(3))})
    assert find_structure(model).lists == ("moe.layers", "rest")
    for undivided in (model["moe"], model["moe"].layers):
        structure = find_structure(model, undivided=[undivided])
        assert structure.lists == ("rest",)
        assert "moe.layers.0.up.weight" in outer_parameters(structure)


def test_layers_with_undivided_modules_inside_are_blocks() -> None:
    """DeepSpeed flags the experts of Mixtral and Qwen-MoE by itself."""
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), Model()) for _ in range(3))
    model = nn.ModuleDict({"embed": nn.Embedding(8, 32), "layers": blocks})
    for undivided in ([block[1] for block in blocks], [block[1].layers for block in blocks], list(blocks)):
        structure = find_structure(model, undivided=undivided)
        assert structure.lists == ("layers",)
        assert block_names(structure) == ["layers.0", "layers.1", "layers.2"]


def test_outermost_list_wins(structure_of: StructureOf) -> None:
    class ExpertBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(32, 4)
            self.experts = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.experts[int(self.router(x).sum(dim=(0, 1)).argmax())](x)

    assert structure_of(Model(nn.ModuleList(ExpertBlock() for _ in range(2)))).lists == ("layers",)


def test_layers_of_two_classes_and_uneven_shapes(structure_of: StructureOf) -> None:
    layers = nn.ModuleList([Block(), OtherBlock(), Block(expansion=8), Block(), OtherBlock()])
    assert len(structure_of(Model(layers)).blocks) == 5


def test_activation_module_may_be_reused_between_layers(structure_of: StructureOf) -> None:
    """Only a repeated layer with parameters makes a list unfit."""
    activation = nn.ReLU()
    structure = structure_of(nn.Sequential(Block(), activation, Block(), activation))
    assert block_names(structure) == ["0", "2"]


def test_everything_in_one_sequential(structure_of: StructureOf) -> None:
    model = nn.Sequential(nn.Embedding(64, 32), *(Block() for _ in range(3)), nn.LayerNorm(32), nn.Linear(32, 64))
    structure = structure_of(model)
    assert structure.lists == ("",)
    assert block_names(structure) == ["1", "2", "3"]
    assert outer_parameters(structure) == {"0.weight", "4.weight", "4.bias", "5.weight", "5.bias"}


def test_two_lists_in_registration_order(structure_of: StructureOf) -> None:
    model = nn.ModuleDict({"encoder": Model(), "decoder": Model()})
    structure = structure_of(model)
    assert structure.lists == ("encoder.layers", "decoder.layers")
    assert block_names(structure) == [f"{part}.layers.{i}" for part in ("encoder", "decoder") for i in range(3)]
    assert [block.index for block in structure.blocks] == list(range(6))


def test_lists_of_lists_are_searched(structure_of: StructureOf) -> None:
    """A ModuleList cannot be called, so it cannot be a block; its elements can."""
    stages = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2))
    structure = structure_of(Model(stages))
    assert structure.lists == ("layers.0", "layers.1")
    assert len(structure.blocks) == 4


def test_uniform_linear_layers_are_blocks_and_the_ends_are_outer_modules(structure_of: StructureOf) -> None:
    hidden = [module for _ in range(4) for module in (nn.Linear(32, 32), nn.ReLU())]
    structure = structure_of(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), *hidden, nn.Linear(32, 4)))
    assert block_names(structure) == ["2", "4", "6", "8"]
    assert outer_parameters(structure) == {"0.weight", "0.bias", "10.weight", "10.bias"}


def test_mlp_of_different_widths_is_one_outer_module(structure_of: StructureOf) -> None:
    structure = structure_of(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4)))
    assert (structure.lists, structure.blocks, len(structure.outer_units)) == ((), (), 1)


def test_convolutional_network_is_one_outer_module(structure_of: StructureOf) -> None:
    def stage(channels_in: int, channels_out: int) -> list[nn.Module]:
        return [nn.Conv2d(channels_in, channels_out, 3), nn.BatchNorm2d(channels_out), nn.ReLU(), nn.MaxPool2d(2)]

    features = nn.Sequential(*stage(3, 16), *stage(16, 32), *stage(32, 64))
    structure = structure_of(nn.Sequential(OrderedDict(features=features, head=nn.Linear(64, 10))))
    assert (structure.lists, structure.blocks) == ((), ())
    assert [outer_unit.name for outer_unit in structure.outer_units] == ["outer"]


def test_small_leaves_beside_the_layers_are_outer_modules(structure_of: StructureOf) -> None:
    """Equal norms between equal layers are repeated too, but 64 elements are not worth a transfer."""
    layers = [module for _ in range(3) for module in (nn.Linear(32, 32), nn.LayerNorm(32))]
    structure = structure_of(nn.Sequential(*layers))
    assert block_names(structure) == ["0", "2", "4"]


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_torch_transformer(structure_of: StructureOf) -> None:
    structure = structure_of(nn.Transformer(32, 2, 3, 2, 64))
    assert structure.lists == ("encoder.layers", "decoder.layers")
    assert len(structure.blocks) == 5
    assert outer_parameters(structure) == {
        f"{part}.norm.{kind}" for part in ("encoder", "decoder") for kind in ("weight", "bias")
    }


def test_wrapped_model(structure_of: StructureOf) -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    structure = structure_of(Wrapper(Wrapper(Model())))
    assert structure.lists == ("module.module.layers",)
    assert len(structure.blocks) == 3


def test_frozen_parameters_belong_to_units_too(structure_of: StructureOf) -> None:
    model = Model().requires_grad_(False)
    assert len(structure_of(model).blocks[0].parameters) == 6


def test_model_without_parameters(structure_of: StructureOf) -> None:
    structure = structure_of(nn.Sequential(nn.ReLU(), nn.ReLU()))
    assert structure.units == ()


# Outer modules
# ---------------------------------------------------------------------------------------------------------------


def test_large_outer_are_units_of_their_own(structure_of: StructureOf) -> None:
    with torch.device("meta"):
        model = Model(nn.ModuleList(Block(width=512) for _ in range(2)), vocabulary=2048, width=512)
    structure = structure_of(model)
    assert [(outer_unit.name, outer_unit.numel) for outer_unit in structure.outer_units] == [
        ("outer:embed", 2048 * 512),
        ("outer", 2 * 512),
        ("outer:head", 2048 * 512),
    ]


def test_outer_threshold_counts_only_outer_parameters(structure_of: StructureOf) -> None:
    """Just below a million elements: no unit of its own."""
    with torch.device("meta"):
        model = Model(nn.ModuleList(Block(width=512) for _ in range(2)), vocabulary=1953, width=512)
    assert [outer_unit.name for outer_unit in structure_of(model).outer_units] == ["outer"]


def test_model_without_list_is_one_outer_module_even_when_large(structure_of: StructureOf) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1024, 2048), nn.Linear(2048, 1024))
    assert [(outer_unit.name, outer_unit.numel) for outer_unit in structure_of(model).outer_units] == [
        ("outer", 2 * 1024 * 2048 + 3072)
    ]


def test_large_parameter_of_the_root_stays_in_the_common_outer(structure_of: StructureOf) -> None:
    model = Model()
    model.positions = nn.Parameter(torch.empty(1_000_000, device="meta"))
    assert "positions" in outer_parameters(structure_of(model, ["layers"]))
    assert [outer_unit.name for outer_unit in find_structure(model, ["layers"]).outer_units] == ["outer"]


def test_a_module_named_apart_is_an_outer_module_of_its_own_unless_it_is_a_block() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList(Block() for _ in range(3)), "head": nn.Linear(4, 4)})
    model["norm"] = nn.LayerNorm(4)
    found = find_structure(model, apart=["head", "layers.0"])
    assert [outer_unit.name for outer_unit in found.outer_units] == ["outer:head", "outer"]
    assert [block.name for block in found.blocks] == ["layers.0", "layers.1", "layers.2"]


# ds_slide.blocks -----------------------------------------------------------------------------------------------------


def test_named_list_overrides_discovery(structure_of: StructureOf) -> None:
    stages = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(2))
    structure = structure_of(Model(stages), ["layers.0", "layers.1"])
    assert structure.lists == ("layers.0", "layers.1")
    assert block_names(structure) == ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"]


def test_named_lists_come_in_registration_order(structure_of: StructureOf) -> None:
    model = nn.ModuleDict({"encoder": Model(), "decoder": Model()})
    structure = structure_of(model, ["decoder.layers", "encoder.layers"])
    assert structure.lists == ("encoder.layers", "decoder.layers")


def test_named_list_may_hold_anything_that_can_be_called(structure_of: StructureOf) -> None:
    layers = nn.ModuleList([Block(), nn.Dropout(), nn.Linear(32, 32)])
    assert block_names(structure_of(Model(layers), ["layers"])) == ["layers.0", "layers.2"]


NAMED: dict[str, tuple[list[str], list[str]]] = {
    "blocks": (["layers.0", "layers.2"], ["layers.0", "layers.2"]),
    "pattern of blocks": (["layers.[12]"], ["layers.1", "layers.2"]),
    "pattern of a list": (["lay*"], ["layers.0", "layers.1", "layers.2"]),
    "blocks of two kinds": (["head", "layers"], ["layers.0", "layers.1", "layers.2", "head"]),
    "a part of each layer": (["layers.*.up"], ["layers.0.up", "layers.1.up", "layers.2.up"]),
}


@pytest.mark.parametrize("paths, expected", NAMED.values(), ids=NAMED)
def test_any_module_can_be_named(paths: list[str], expected: list[str], structure_of: StructureOf) -> None:
    assert block_names(structure_of(Model(), paths)) == expected


def test_pattern_of_lists_in_several_places(structure_of: StructureOf) -> None:
    towers = nn.ModuleDict({"left": Model(), "right": Model(), "none": nn.Linear(2, 2)})
    structure = structure_of(nn.ModuleDict({"towers": towers}), ["towers.*.layers"])
    assert structure.lists == ("towers.left.layers", "towers.right.layers")


def test_named_list_of_lists_stands_for_all_in_it(structure_of: StructureOf) -> None:
    pairs = nn.ModuleList(nn.ModuleList([Block(), OtherBlock()]) for _ in range(2))
    assert block_names(structure_of(Model(pairs), ["layers"])) == [
        f"layers.{i}.{k}" for i in range(2) for k in range(2)
    ]


def test_no_named_lists_means_one_outer_module(structure_of: StructureOf) -> None:
    structure = structure_of(Model(), [])
    assert (structure.blocks, len(structure.outer_units)) == ((), 1)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["layer"], r'ds_slide\.blocks\[0\]: "layer" is no module .* did you mean "layers"\?'),
        (["model.layers"], r'ds_slide\.blocks\[0\]: "model.layers" is no module .* did you mean "layers"\?'),
        (["layer?.x*"], r'ds_slide\.blocks\[0\]: "layer\?\.x\*" is no module .* did you mean "layers"\?'),
        (["layers", "layers"], r'ds_slide\.blocks\[1\]: "layers" overlaps'),
        (["layers", "layers.1"], r'ds_slide\.blocks\[1\]: "layers.1" overlaps'),
        (["l*", "layers.*"], r'ds_slide\.blocks\[1\]: "layers.\*" overlaps'),
        (["layers.0.act"], r'ds_slide\.blocks\[0\]: .* names "layers\.0\.act", a ReLU without parameters; name layers'),
    ],
)
def test_wrong_path_is_refused_with_the_nearest(paths: list[str], message: str) -> None:
    with pytest.raises(SlideConfigError, match=message):
        find_structure(Model(), paths)


def test_path_in_a_model_without_lists() -> None:
    """What can be a block is meant then."""
    with pytest.raises(SlideConfigError, match=r'"onyl" is no module of this model; did you mean "only"\?'):
        find_structure(nn.ModuleDict({"only": Block()}), ["onyl"])
    with pytest.raises(SlideConfigError, match="no module of it has parameters and a forward"):
        find_structure(nn.ModuleDict({"only": nn.ReLU()}), ["layers"])


def test_one_block_that_holds_all_layers_cannot_be_named() -> None:
    with pytest.raises(SlideConfigError, match=r'names "model" alone, a Model; name "model\.layers", its layers'):
        find_structure(nn.ModuleDict({"model": Model()}), ["model"])


def test_module_that_is_not_called_cannot_be_named() -> None:
    model = Model()
    model.parts = nn.ParameterList([nn.Parameter(torch.zeros(2))])
    with pytest.raises(SlideConfigError, match=r'names "parts", a ParameterList without a forward; name layers'):
        find_structure(model, ["parts"])


def test_repeated_layer_cannot_be_named() -> None:
    with pytest.raises(SlideConfigError, match="holds the same layer more than once"):
        find_structure(Model(nn.ModuleList([Block()] * 2)), ["layers"])


def test_list_without_parameters_cannot_be_named() -> None:
    with pytest.raises(SlideConfigError, match="no element with parameters"):
        find_structure(Model(nn.ModuleList([nn.ReLU(), nn.ReLU()])), ["layers"])


def test_nested_lists_cannot_both_be_named() -> None:
    model = Model(nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(2)))
    for paths in (["layers", "layers.1"], ["layers.1", "layers"]):
        with pytest.raises(SlideConfigError, match=r"ds_slide\.blocks\[1\]: .* overlaps"):
            find_structure(model, paths)


def packed(linear: nn.Linear) -> nn.Linear:
    """A layer with a frozen int8 weight."""
    linear.weight = nn.Parameter(torch.zeros(linear.weight.shape, dtype=torch.int8), requires_grad=False)
    return linear


def test_packed_weights_move_as_bytes_of_their_block() -> None:
    """Most of a block decides: bytes, or the data type of what is not packed. Small frozen parameters stay parts."""
    model = Model(width=512, vocabulary=16).bfloat16().requires_grad_(False)
    packed(model.layers[0].up)
    packed(model.layers[0].down)
    packed(model.layers[1].up)
    model.layers[1].up.weight.data = torch.zeros(64, 512, dtype=torch.int8)
    adapter = nn.Parameter(torch.zeros(4, 512))
    for layer in model.layers:
        layer.adapter = nn.Parameter(torch.zeros_like(adapter))
    structure = find_structure(model)
    first, second, third = structure.blocks
    assert (first.precision.weight, second.precision.weight) == (torch.uint8, torch.bfloat16)
    assert first.as_bytes == {"layers.0.up.weight", "layers.0.down.weight"}
    assert second.as_bytes == {"layers.1.up.weight"} and not third.as_bytes
    assert [part.name for part in structure.parts] == [
        "layers.0 (float32)",
        "layers.0 (bfloat16)",
        "layers.1 (float32)",
        "layers.2 (float32)",
    ]
    assert all(unit.precision.weight != torch.uint8 for unit in structure.outer_units)


def test_large_frozen_weights_beside_packed_ones_move_with_them() -> None:
    model = Model(width=512, vocabulary=16).bfloat16().requires_grad_(False)
    for layer in model.layers:
        packed(layer.up)
        layer.up.weight.data = torch.zeros(8192, 512, dtype=torch.int8)
    assert [block.as_bytes for block in find_structure(model).blocks] == [
        {f"layers.{number}.up.weight", f"layers.{number}.down.weight"} for number in range(3)
    ]


class Buffers(nn.Module):
    """A layer without parameters: its weight is in an int32 buffer, with scales."""

    def __init__(self, width: int, *, saved: bool = True) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.zeros(width // 8, width, dtype=torch.int32), persistent=saved)
        self.register_buffer("scales", torch.zeros(width // 16, width).half())
        self.register_buffer("statistics", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_buffers_of_packed_weights_are_found_and_move_with_their_block() -> None:
    model = Model(width=128, vocabulary=16).bfloat16().requires_grad_(False)
    for layer in model.layers:
        layer.up = layer.down = nn.Identity()
        layer.packed = Buffers(128)
        layer.masks = Buffers(128, saved=False)
    blocks = find_structure(model).blocks
    assert block_names(find_structure(model)) == ["layers.0", "layers.1", "layers.2"]
    assert [each.name for each in blocks[1].carried] == ["layers.1.packed.qweight"]
    assert {"layers.1.norm.weight", "layers.1.norm.bias"} == blocks[1].as_bytes
    model.layers[2].packed = model.layers[1].packed
    assert not find_structure(model).blocks[2].carried
    assert not find_structure(model, carries_buffers=False).blocks[0].carried
