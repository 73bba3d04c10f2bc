"""Checkpoints of two ranks over gloo: both succeed or both fail, and the file of either is checked."""

from __future__ import annotations

import json

import pytest
from harness import same_bits, unequal

from ds_slide.checkpoint.manifest import NAME as MANIFEST

WORKER = "checkpoint_worker.py"


def test_the_manifest_has_the_files_of_both_ranks(folder):
    files = json.loads((folder / "saves" / "whole" / MANIFEST).read_text())["files"]
    names = [path.name for path in (folder / "saves" / "whole").iterdir() if path.name != MANIFEST]
    assert sorted(files) == sorted(names) and len(names) == 4
    assert {name: (folder / "saves" / "whole" / name).stat().st_size for name in names} == {
        name: entry["bytes"] for name, entry in files.items()
    }


@pytest.mark.parametrize("failing", [0, 1])
def test_a_save_that_fails_on_one_rank_fails_on_both(failing, seen):
    for rank in range(2):
        prefix = "" if rank == failing else f"rank {failing}: "
        assert seen[rank][f"save, {failing} fails"] == f"{prefix}the disk of this rank is gone"
    assert seen[0]["left"] == ["latest", "whole", "zero_to_fp32.py", "zero_to_torch.py"]


def test_the_old_checkpoint_of_that_tag_loads(seen):
    for rank in range(2):
        assert unequal(seen[rank]["loaded"], seen[rank]["states"]) == []


def test_a_broken_file_of_one_rank_stops_both(seen):
    for rank in range(2):
        assert "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt has CRC-32" in seen[rank]["load"]
        assert "newest whole tag there is 'whole'" in seen[rank]["load"]


def test_weights_without_optimizer_states(seen):
    for rank in range(2):
        for name, tensors in seen[rank]["states"].items():
            assert same_bits(seen[rank]["weights"][name]["weight"], tensors["weight"]), name


def test_a_file_of_one_rank_that_would_run_something_stops_both_before_anything_is_changed(seen, folder):
    for rank in range(2):
        prefix = "rank 1: " if rank == 0 else ""
        path = folder / "saves" / "hostile" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
        assert seen[rank]["hostile"].startswith(f"{prefix}the checkpoint file {path} holds posix.system")
        assert unequal(seen[rank]["unchanged"], seen[rank]["weights"]) == []
    assert not (folder / "marker").exists()
