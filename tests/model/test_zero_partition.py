"""Layout and structure against what DeepSpeed's zero.Init really does to the parameters of two ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import warm
from torch import nn

from ds_slide.model import ParameterInfo, build_layout, find_structure, parameter_numel, parameter_shape, piece

WORLD_SIZE = 2
SUCCESS = "layout and partitions agree"


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


def compare_with_deepspeed(rank: int, rendezvous: str) -> None:
    """Runs in a process of its own on each rank, so that no process group outlives the test."""
    import deepspeed

    # Gloo alone does: DeepSpeed's shared-memory collectives would first be compiled, half a minute on two cores.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        "gloo", auto_mpi_discovery=False, init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD_SIZE
    )
    whole = dict(build_model().named_parameters())
    with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": WORLD_SIZE, "zero_optimization": {"stage": 3}}):
        model = build_model()

    structure = find_structure(model)
    assert structure.lists == ("layers",)
    assert [block.numel for block in structure.blocks] == [41, 41, 41]
    assert [outer_unit.numel for outer_unit in structure.outer_units] == [77]
    for unit in structure.units:
        assert all(parameter.numel() == 0 for _, parameter in unit.parameters)
        infos = [ParameterInfo(name, parameter_shape(p), parameter_numel(p), 0) for name, p in unit.parameters]
        for entry, (name, parameter) in zip(build_layout(infos, WORLD_SIZE).entries, unit.parameters, strict=True):
            assert entry.shape == tuple(whole[name].shape)
            assert entry.partition_numel == parameter.ds_tensor.numel()
            start, stop = piece(entry, rank)
            assert torch.equal(parameter.ds_tensor[: stop - start], whole[name].detach().flatten()[start:stop])
    torch.distributed.destroy_process_group()


def test_two_ranks_hold_the_pieces_of_the_layout(tmp_path: Path) -> None:
    runs = []
    for rank in range(WORLD_SIZE):
        (folder := tmp_path / str(rank)).mkdir()
        runs.append(warm.start(__file__, str(rank), tmp_path / "rendezvous", folder=folder, LOCAL_RANK=str(rank)))
    assert [run.end() for run in runs] == [0] * WORLD_SIZE, "\n".join(run.log for run in runs)
    assert all(run.log.rstrip().endswith(SUCCESS) for run in runs)


if __name__ == "__main__":
    compare_with_deepspeed(int(sys.argv[1]), sys.argv[2])
    print(SUCCESS)
