"""DeepSpeed's operators: with the key none is compiled, and nothing waits in silence for a dead lock."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compilation_worker import CASES, STEPS, STOCK
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.op_builder import CPUAdamBuilder
from forking import ONE_THREAD
from harness import batches, ds_config, llama

pytestmark = pytest.mark.timeout(600)  # three clients, each in a process of its own

SUPPORT = Path(__file__).resolve().parents[1] / "support"
COLLECTIVES = "deepspeed_shm_comm"
"""DeepSpeed loads this operator for collectives on the CPU accelerator, and nowhere else."""
LAUNCHERS = {
    "trainer": (),
    "accelerate": (
        "-m accelerate.commands.launch --use_deepspeed --num_machines 1 --num_processes 1 --main_process_port 0".split()
    ),
    "plain": "-m deepspeed.launcher.runner --num_gpus 1 --master_port 0".split(),
}


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every loading of DeepSpeedCPUAdam's operator, which compiles it where that has not happened before."""
    loaded: list[str] = []
    load = CPUAdamBuilder.load

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        loaded.append(self.name)
        return load(self, *args, **kwargs)

    monkeypatch.setattr(CPUAdamBuilder, "load", counted)
    return loaded


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, Any]], Any]]:
    """Makes an Accelerator for a DeepSpeed config, as a script does; nothing of it is left at the end."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState, GradientState

    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.setenv(name, "")  # put back at the end, whatever accelerate makes of it

    def make(config: dict[str, Any]) -> Any:
        return Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))

    yield make
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.fixture(scope="module", params=LAUNCHERS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A client and the folder of its trainings (compilation_worker.py), in a process that finds no compiler.

    Nothing has been compiled before but the operator for collectives, which no GPU needs.
    """
    client, folder = request.param, tmp_path_factory.mktemp("clients")
    tools = folder / "bin"
    tools.mkdir()
    for name in ("env", "sh", "lscpu", "ldconfig", "uname", "ninja"):
        if there := shutil.which(name):
            (tools / name).symlink_to(there)
    built = Path(os.environ.get("TORCH_EXTENSIONS_DIR", "")) / COLLECTIVES
    if not built.is_dir():
        pytest.skip(f"{COLLECTIVES} is not compiled in TORCH_EXTENSIONS_DIR, as make install compiles it")
    shutil.copytree(built, folder / "extensions" / COLLECTIVES)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "CC", "CXX"))}
    search = [str(SUPPORT), str(SUPPORT.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = kept | {
        "PATH": str(tools),
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
        "PYTHONPATH": os.pathsep.join(search),
        "DS_ACCELERATOR": "cpu",
        **ONE_THREAD,
    }
    assert not any(shutil.which(name, path=str(tools)) for name in ("c++", "g++", "gcc", "cc", "clang", "nvcc"))
    command = [sys.executable, *LAUNCHERS[client], str(SUPPORT / "compilation_worker.py"), client, str(folder)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
    return client, folder


@pytest.mark.parametrize("case", CASES)
def test_a_training_with_the_key_compiles_nothing(trained: tuple[str, Path], case: str) -> None:
    client, folder = trained
    result, log = folder / f"{client}-{case}.json", folder / f"{client}-{case}.log"
    assert result.exists(), log.read_text()[-6000:]
    found = json.loads(result.read_text())
    assert found["optimizer"] == "SlideZeroOptimizer"
    assert len(found["losses"]) == STEPS and found["on_ssd"] == (case == "ssd")
    assert found["loaded"] == [COLLECTIVES]


def test_stock_alone_begins_to_compile(trained: tuple[str, Path]) -> None:
    """One process trains stock at its end, which fails. So the test above would see a compilation."""
    client, folder = trained
    begun = {path.name for path in (folder / "extensions").iterdir()}
    if client == "plain":
        assert "Error building extension 'cpu_adam'" in (folder / f"{client}-{STOCK}.log").read_text()
        assert not (folder / f"{client}-{STOCK}.json").exists()
        begun.remove("cpu_adam")
    assert begun == {COLLECTIVES}


def without_optimizer(slide: dict[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in ds_config(slide).items() if key != "optimizer"}


@pytest.mark.usefixtures("one_rank")
def test_an_optimizer_that_accelerate_replaces_is_not_compiled(accelerator, loads):
    model = llama(num_hidden_layers=2)
    accelerate = accelerator(without_optimizer({"window": 2}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99), weight_decay=0.2)
    engine, wrapped = accelerate.prepare(model, optimizer)
    try:
        assert type(engine.optimizer).__name__ == "SlideZeroOptimizer"
        carrier = engine.optimizer.optimizer
        assert type(carrier) is DeepSpeedCPUAdam
        assert (carrier.param_groups[0]["lr"], carrier.param_groups[0]["weight_decay"]) == (3e-3, 0.2)
        batch = batches(1)[0]
        before = engine(**batch).loss.item()
        for _ in range(3):
            accelerate.backward(engine(**batch).loss)
            wrapped.step()
            wrapped.zero_grad()
        assert engine(**batch).loss.item() < before - 0.1
        assert loads == []
    finally:
        engine.destroy()


@pytest.mark.usefixtures("one_rank")
def test_without_the_key_it_is_compiled_as_ever(accelerator, loads):
    accelerator(without_optimizer(None))
    DeepSpeedCPUAdam([torch.nn.Parameter(torch.ones(4))])
    assert loads == ["cpu_adam"]


@pytest.mark.usefixtures("one_rank")
def test_without_accelerate_it_is_compiled_as_ever(loads):
    DeepSpeedCPUAdam([torch.nn.Parameter(torch.ones(4))])
    assert loads == ["cpu_adam"]


@pytest.mark.usefixtures("one_rank")
def test_whoever_steps_it_all_the_same_has_the_kernels(accelerator, loads):
    """Compiled at the first step, with the hyper-parameters of the constructor; a copy does not compile."""
    expected, found = (torch.nn.Parameter(torch.linspace(-1, 1, 300)) for _ in range(2))
    gradient = torch.linspace(2, -3, 300)
    stock = DeepSpeedCPUAdam([expected], lr=1e-2, weight_decay=0.3)
    loads.clear()
    accelerator(without_optimizer({}))
    optimizer = DeepSpeedCPUAdam([found], lr=1e-2, weight_decay=0.3)
    copy.copy(optimizer.ds_opt_adam)
    assert loads == []
    for each, parameter in ((stock, expected), (optimizer, found)):
        for _ in range(2):
            parameter.grad = gradient.clone()
            each.step()
    assert loads == ["cpu_adam"]
    assert torch.equal(found, expected) and not torch.equal(found, torch.linspace(-1, 1, 300))
