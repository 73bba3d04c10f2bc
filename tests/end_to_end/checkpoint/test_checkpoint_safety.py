"""Checkpoints are whole or not there: kill -9, full and read-only disks, broken files. And bounded memory."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_runs import Wide, leftovers, peak_growth
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from harness import batches, ds_config, engine_for, llama, same_bits, states_of, train, unequal
from torch import nn

from ds_slide.checkpoint import archive, publish
from ds_slide.checkpoint.archive import Planned
from ds_slide.checkpoint.manifest import NAME as MANIFEST
from ds_slide.checkpoint.state_buffers import read_weights
from ds_slide.errors import SlideConfigError, SlideError
from ds_slide.integration import checkpoint_save
from ds_slide.integration.checkpoint_load import attach

pytestmark = pytest.mark.usefixtures("one_rank")

MODEL = "zero_pp_rank_0_mp_rank_00_model_states.pt"
OPTIMIZER = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
WRITING = ("opened", f"wrote {MODEL}", f"wrote {OPTIMIZER}", "before the rename")
RENAMED = ("renamed", "before latest")
States = dict[str, dict[str, torch.Tensor]]


def freeze_a_matrix(model: nn.Module) -> nn.Module:
    model.model.layers[1].mlp.up_proj.weight.requires_grad_(False)
    return model


@pytest.fixture(scope="module")
def engine(one_rank) -> Iterator[Any]:  # noqa: ARG001
    """Shared: every test that depends on its states sets them by a step or by loading."""
    model = freeze_a_matrix(llama(num_hidden_layers=2))
    # Saves run in forked children, where no collective works: without tag validation there is none on one rank.
    config = ds_config({"window": 2}, checkpoint={"tag_validation": "Ignore"})
    with engine_for(model, config) as engine:
        yield engine


@pytest.fixture(scope="module")
def old(engine, tmp_path_factory) -> tuple[Path, States]:
    """A folder with the tag "old", and the states in it."""
    folder = tmp_path_factory.mktemp("old")
    train(engine, batches(1))
    engine.save_checkpoint(folder, "old", client_state={"note": "kept"})
    return folder, states_of(engine.module)


@pytest.fixture
def folder(engine, old, tmp_path) -> Path:
    """A copy of that folder; the engine has gone on since then."""
    shutil.copytree(old[0], tmp_path / "run")
    engine.load_checkpoint(tmp_path / "run")
    train(engine, batches(1, seed=2))
    return tmp_path / "run"


def copied_state_buffers(engine: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """The planned state and the frozen weights, read from ordinary memory: a forked child does not have the slabs."""

    def copied(value: Any) -> Any:
        if isinstance(value, Planned):
            tensor = value.tensor()
            return Planned(value.numel, value.dtype, lambda start, stop: tensor[start:stop])
        if isinstance(value, dict):
            return {key: copied(item) for key, item in value.items()}
        return [copied(item) for item in value] if isinstance(value, list) else value

    weights = {
        entry.name: read_weights(unit.state, entry, 0, entry.partition_numel).clone()
        for unit, entry in engine.optimizer.protocol.places.values()
        if not entry.trainable
    }
    return copied(engine.optimizer.planned_state_dict()), weights


def killed_while_saving(engine: Any, folder: Path, tag: str, prepare: Callable[[Callable[[], None]], None]) -> None:
    """Save in a forked child that kills itself with SIGKILL. `prepare` is given that deed, and places it."""
    state, weights = copied_state_buffers(engine)
    child = os.fork()
    if child == 0:
        try:
            engine.optimizer.planned_state_dict = lambda _states: state
            checkpoint_save.read_weights = lambda _state, entry, start, stop: weights[entry.name][start:stop]
            engine.optimizer.checkpoint_event_epilogue = lambda: None  # waits for threads that the child does not have
            prepare(lambda: os.kill(os.getpid(), signal.SIGKILL))
            engine.save_checkpoint(folder, tag)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(3)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def at_phase(phase: str, *, exchange: bool = True) -> Callable[[Callable[[], None]], None]:
    def prepare(die: Callable[[], None]) -> None:
        def reached(name: str) -> None:
            if name == phase:
                die()

        publish.reached = checkpoint_save.reached = reached
        if not exchange:
            publish._exchange = lambda *_: False

    return prepare


def at_write(number: int) -> Callable[[Callable[[], None]], None]:
    """In the middle of the `number`-th write to a file."""

    def prepare(die: Callable[[], None]) -> None:
        count = 0

        def write_all(descriptor: int, data: memoryview, offset: int) -> None:
            nonlocal count
            count += 1
            if count == number:
                os.pwrite(descriptor, data[: len(data) // 2], offset)
                die()
            os.pwrite(descriptor, data, offset)

        archive._write_all = write_all

    return prepare


def check_after_kill(engine: Any, folder: Path, expected: States, latest: str) -> None:
    """What `latest` names loads and is `expected`; the next save removes what the dead one has left."""
    assert (folder / "latest").read_text() == latest
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    assert unequal(states_of(engine.module), expected) == []
    engine.save_checkpoint(folder, "next")
    assert leftovers(folder) == []
    engine.load_checkpoint(folder, "next")
    assert unequal(states_of(engine.module), expected) == []


@pytest.mark.parametrize("phase", [*WRITING, *RENAMED, "published"])
def test_a_kill_leaves_the_last_checkpoint(phase, engine, old, folder):
    new = states_of(engine.module)
    killed_while_saving(engine, folder, "new", at_phase(phase))
    assert (folder / "new").exists() == (phase not in WRITING)
    if phase == "published":
        check_after_kill(engine, folder, new, "new")
    else:
        check_after_kill(engine, folder, old[1], "old")


@pytest.mark.parametrize(
    ("phase", "exchange"),
    [(phase, exchange) for exchange in (True, False) for phase in (*WRITING, *RENAMED)] + [("renamed away", False)],
)
def test_a_kill_while_a_tag_is_replaced_leaves_one_of_the_two(phase, exchange, engine, old, folder):
    new = states_of(engine.module)
    killed_while_saving(engine, folder, "old", at_phase(phase, exchange=exchange))
    check_after_kill(engine, folder, new if phase in RENAMED else old[1], "old")


@pytest.mark.parametrize("number", [1, 4, 9, 14, 20])
def test_a_kill_in_the_middle_of_a_write(number, engine, old, folder):
    killed_while_saving(engine, folder, "old", at_write(number))
    check_after_kill(engine, folder, old[1], "old")


def test_saving_twice_to_one_tag(engine, folder):
    engine.save_checkpoint(folder, "old")
    train(engine, batches(1, seed=3))
    new = states_of(engine.module)
    engine.save_checkpoint(folder, "old", save_latest=False)
    train(engine, batches(1, seed=4))
    engine.load_checkpoint(folder)
    assert unequal(states_of(engine.module), new) == []
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "old", "zero_to_fp32.py", "zero_to_torch.py"]
    assert sorted(path.name for path in (folder / "old").iterdir()) == sorted([MODEL, OPTIMIZER, MANIFEST])


def test_a_save_that_lives_is_not_removed(engine, folder):
    other = publish.Staging(folder, publish.new_name())
    other.open("other")
    engine.save_checkpoint(folder, "new")
    assert leftovers(folder) == [other.path.name]
    other.discard()
    assert leftovers(folder) == []


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage"),
    [(name, damage) for name in (MODEL, OPTIMIZER) for damage in (truncate, flip, Path.unlink)]
    + [(MANIFEST, truncate)],
)
def test_a_broken_checkpoint_is_refused_and_the_newest_whole_one_named(name, damage, engine, folder):
    engine.save_checkpoint(folder, "newer")
    engine.save_checkpoint(folder, "newest")
    before = states_of(engine.module)
    damage(folder / "newest" / name)
    flip(folder / "newer" / OPTIMIZER)
    with pytest.raises(SlideError, match=rf"{name} .*broken; load another tag.*newest whole tag there is 'old'"):
        engine.load_checkpoint(folder)
    assert unequal(states_of(engine.module), before) == []
    train(engine, batches(1))  # it still can
    assert engine.load_checkpoint(folder, "old")[1]["note"] == "kept"


def test_a_latest_that_names_nothing(engine, folder):
    (folder / "latest").write_text("gone")
    with pytest.raises(SlideError, match=r"no checkpoint .*gone.*newest whole tag there is 'old'"):
        engine.load_checkpoint(folder)
    (folder / "latest").write_text("")
    with pytest.raises(SlideError, match="newest whole tag there is 'old'"):
        engine.load_checkpoint(folder)
    (folder / "latest").unlink()
    assert engine.load_checkpoint(folder) == (None, None)


def test_a_checkpoint_without_manifest_loads(engine, old, folder):
    (folder / "old" / MANIFEST).unlink()
    engine.load_checkpoint(folder)
    assert unequal(states_of(engine.module), old[1]) == []
    truncate(folder / "old" / OPTIMIZER)
    with pytest.raises(SlideError, match=rf"{OPTIMIZER} cannot be loaded"):
        engine.load_checkpoint(folder)


@pytest.mark.parametrize("tag", ["", ".", "a/../b", "/a"])
def test_a_tag_that_is_no_directory_is_refused(tag, engine, tmp_path):
    with pytest.raises(SlideError, match="does not name a directory below save_dir"):
        engine.save_checkpoint(tmp_path, tag)
    assert not list(tmp_path.iterdir())


def test_tags_may_be_paths_and_numbers(engine, folder):
    engine.save_checkpoint(folder, "epoch/1")
    engine.save_checkpoint(folder, 2)
    assert engine.load_checkpoint(folder, "epoch/1")[0] == str(folder / "epoch/1" / MODEL)
    assert engine.load_checkpoint(folder)[0] == str(folder / "2" / MODEL)


@pytest.fixture
def small_disk(engine, old, tmp_path) -> Iterator[Path]:
    """A file system with the tag "old" and room for half another one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    nbytes = sum(path.stat().st_size for path in old[0].rglob("*") if path.is_file())
    command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes * 3 // 2}", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        shutil.copytree(old[0], disk, dirs_exist_ok=True)
        engine.load_checkpoint(disk)
        train(engine, batches(1, seed=2))
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def check_after_failure(engine: Any, disk: Path, old: States, before: States) -> None:
    assert leftovers(disk) == [] and not (disk / "new").exists()
    assert unequal(states_of(engine.module), before) == []
    train(engine, batches(1))
    engine.load_checkpoint(disk)
    assert unequal(states_of(engine.module), old) == []


@pytest.mark.parametrize("checked", [True, False], ids=["seen_before", "while_writing"])
@pytest.mark.parametrize("tag", ["new", "old"])
def test_a_full_disk(checked, tag, engine, old, small_disk, monkeypatch):
    if not checked:  # as when others fill the disk meanwhile
        monkeypatch.setattr(publish.Staging, "free_bytes", lambda _self: 1 << 60)
    before = states_of(engine.module)
    sentence = "needs [0-9.]+ MB, but [0-9,]+ bytes are free" if checked else r"MB \(No space left on device\)"
    with pytest.raises(SlideError, match=f"{small_disk}.*{sentence}"):
        engine.save_checkpoint(small_disk, tag)
    check_after_failure(engine, small_disk, old[1], before)


def test_a_read_only_disk(engine, old, small_disk):
    before = states_of(engine.module)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(SlideError, match=rf"saving {small_disk}/new \([0-9.]+ MB\) failed .*Read-only file system"):
        engine.save_checkpoint(small_disk, "new")
    check_after_failure(engine, small_disk, old[1], before)


def test_client_state_that_cannot_be_pickled(engine, old, folder):
    before = states_of(engine.module)
    with pytest.raises(Exception, match="pickle"):
        engine.save_checkpoint(folder, "new", client_state={"function": lambda: None})
    check_after_failure(engine, folder, old[1], before)


def test_loaded_client_state_is_no_map_of_the_file(engine, folder):
    engine.save_checkpoint(folder, "new", client_state={"table": torch.arange(100_000)})
    _, client_state = engine.load_checkpoint(folder, "new")
    (folder / "new" / MODEL).write_bytes(b"")
    assert client_state["table"].sum() == sum(range(100_000))


def test_a_frozen_parameter_is_saved_without_its_neighbours(engine, old):
    frozen = engine.module.model.layers[1].mlp.up_proj.weight
    assert (old[0] / "old" / MODEL).stat().st_size < frozen.ds_numel * 2 + (64 << 10)
    exported = get_fp32_state_dict_from_zero_checkpoint(str(old[0]))
    name = "model.layers.1.mlp.up_proj.weight"
    assert same_bits(exported[name].contiguous(), old[1][name]["weight"])


def test_weights_of_a_tag_that_is_not_the_latest(engine, old, folder):
    """Stock loads those of `latest` instead, and with load_module_only alone none."""
    engine.save_checkpoint(folder, "new")
    before = states_of(engine.module)
    for arguments in ({"load_optimizer_states": False}, {"load_module_only": True}):
        engine.load_checkpoint(folder, "new")
        engine.load_checkpoint(folder, "old", **arguments)
        loaded = states_of(engine.module)
        for name, tensors in old[1].items():
            assert same_bits(loaded[name]["weight"], tensors["weight"]), name
            if "master" in tensors:
                assert same_bits(loaded[name]["master"], tensors["weight"].float()), name
                assert same_bits(loaded[name]["exp_avg"], before[name]["exp_avg"]), name


def test_custom_load_fn_is_given_the_whole_model(engine, old, folder):
    seen = {}

    def load(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
        seen.update(src)
        dst.load_state_dict(src)

    engine.save_checkpoint(folder, "new")  # stock takes the weights of `latest`, whatever tag it is given
    engine.load_checkpoint(folder, "old", load_optimizer_states=False, custom_load_fn=load)
    assert seen.keys() == old[1].keys()
    loaded = states_of(engine.module)
    for name, tensors in old[1].items():
        # The function casts the masters as torch does, which in a tie may be another weight than the engine's own.
        assert same_bits(loaded[name]["weight"], tensors.get("master", tensors["weight"]).bfloat16()), name


def test_the_universal_conversion_reads_it(old, tmp_path):
    from deepspeed.checkpoint import ds_to_universal

    arguments = ["--input_folder", str(old[0] / "old"), "--output_folder", str(tmp_path / "universal")]
    arguments += ["--num_extract_workers", "1", "--num_merge_workers", "1", "--no_strict"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["ds_to_universal.py", *arguments])
        ds_to_universal.main(ds_to_universal.parse_arguments())
    for name, tensors in old[1].items():
        folder = tmp_path / "universal" / "zero" / name
        for key, file in (("master", "fp32.pt"), ("exp_avg", "exp_avg.pt"), ("exp_avg_sq", "exp_avg_sq.pt")):
            if key in tensors:
                saved = torch.load(folder / file)
                assert torch.equal(saved.view(-1), tensors[key].view(-1)), f"{name} {key}"


def test_an_engine_without_the_key_has_none_of_it(tmp_path):
    with engine_for(llama(num_hidden_layers=1), ds_config(None)) as stock:
        assert {"save_checkpoint", "load_checkpoint"}.isdisjoint(vars(stock))
        assert type(stock.checkpoint_engine).__name__ == "TorchCheckpointEngine"
        stock.save_checkpoint(tmp_path, "a")
        assert not (tmp_path / "a" / MANIFEST).exists()


def test_another_checkpoint_engine_is_refused():
    class FastCheckpointEngine(TorchCheckpointEngine):  # the real one compiles an extension
        pass

    other = SimpleNamespace(checkpoint_engine=FastCheckpointEngine())
    with pytest.raises(SlideConfigError, match=r"FastCheckpointEngine, .*remove checkpoint\.writer"):
        attach(other)
    assert type(other.checkpoint_engine) is FastCheckpointEngine


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_memory_does_not_grow_with_the_model(tmp_path, device):
    config = ds_config({"window": 2, "host_memory": 0} if device == "nvme" else {"window": 2})
    for section in ("offload_optimizer", "offload_param"):
        config["zero_optimization"][section] = {"device": device, "nvme_path": str(tmp_path / "disk")}
    with engine_for(Wide().bfloat16(), config) as engine:
        engine.backward(engine(torch.ones(1, 2048, dtype=torch.bfloat16)).float().mean())
        engine.step()
        engine.save_checkpoint(tmp_path, "warm")
        engine.load_checkpoint(tmp_path, "warm")
        shutil.rmtree(tmp_path / "warm")
        assert peak_growth(lambda: engine.save_checkpoint(tmp_path)) < 64 << 20
        assert peak_growth(lambda: engine.load_checkpoint(tmp_path)) < 64 << 20
        assert peak_growth(lambda: engine.load_checkpoint(tmp_path, load_module_only=True)) < 64 << 20
