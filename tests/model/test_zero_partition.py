"""Layout and structure against what DeepSpeed's zero.Init really does to the parameters of two ranks."""

from __future__ import annotations

from pathlib import Path

import deepspeed
import torch
import two_ranks
from torch import nn
from two_ranks import RANKS

from ds_slide.model.layout import ParameterInfo, build_layout, piece
from ds_slide.model.structure import find_structure, parameter_numel, parameter_shape


class Block(nn.Module):
    """Odd sizes, so that the last rank's partition is padded; one scalar, of which the last rank has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 5)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"embed": nn.Embedding(11, 7), "layers": nn.ModuleList(Block() for _ in range(3))})


def compare_with_deepspeed(rank: int, folder: Path) -> None:
    with two_ranks.as_rank(rank, folder) as seen:
        compare(rank)
        seen["agrees"] = True


def compare(rank: int) -> None:
    whole = dict(build_model().named_parameters())
    with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": RANKS, "zero_optimization": {"stage": 3}}):
        model = build_model()

    structure = find_structure(model)
    assert structure.lists == ("layers",)
    assert [block.numel for block in structure.blocks] == [41, 41, 41]
    assert [outer_unit.numel for outer_unit in structure.outer_units] == [77]
    for unit in structure.units:
        assert all(parameter.numel() == 0 for _, parameter in unit.parameters)
        infos = [ParameterInfo(name, parameter_shape(p), parameter_numel(p), 0) for name, p in unit.parameters]
        for entry, (name, parameter) in zip(build_layout(infos, RANKS).entries, unit.parameters, strict=True):
            assert entry.shape == tuple(whole[name].shape)
            assert entry.partition_numel == parameter.ds_tensor.numel()
            start, stop = piece(entry, rank)
            assert torch.equal(parameter.ds_tensor[: stop - start], whole[name].detach().flatten()[start:stop])


def test_two_ranks_hold_the_pieces_of_the_layout(tmp_path: Path) -> None:
    two_ranks.run(__file__, tmp_path)
    assert two_ranks.seen_by(tmp_path) == [{"agrees": True}] * RANKS


if __name__ == "__main__":
    two_ranks.fork_ranks(compare_with_deepspeed)
