"""Training processes for test_ssd_faults.py that may be killed.

    python ssd_fault_worker.py '{"folder": path, "actions": [...]}'

A run performs its actions (methods of `Run`) one after the other and then ends as a script does, through the
interpreter's exit; an exception ends it with a traceback in the log.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import damage
import deepspeed
import pytest
import torch
from activation_runs import handle_of
from harness import batches, ds_config, llama, on_ssd, states_of

import ds_slide  # noqa: F401 - switches the "ds_slide" key on where the package is not installed
from ds_slide.errors import SlideError
from ds_slide.plan import ssd_settings
from ds_slide.store.ssd import unit as ssd_unit

# Of 4096 parameters each, so that a block of the small model has 11, as a real one has.
CHUNK_NUMEL = 4096


def attribute(name: str) -> tuple[Any, str]:
    """Owner and last name of "module:Class.method"."""
    module, _, path = name.partition(":")
    *owners, last = path.split(".")
    return functools.reduce(getattr, owners, importlib.import_module(module)), last


def replace_call(owner: Any, name: str, count: int, instead: Callable[..., Any]) -> None:
    """The `count`-th call of `owner.name` from now on, on any thread, becomes `instead(original, *arguments)`."""
    original: Callable[..., Any] = getattr(owner, name)
    lock, calls = threading.Lock(), 0

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        with lock:
            calls += 1
            due = calls == count
        return instead(original, *args, **kwargs) if due else original(*args, **kwargs)

    setattr(owner, name, call)


class Run:
    """`actions`: (name of a method, arguments...). What the run has seen is in `result`, and in the file `out`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engine: Any = None
        self.result: dict[str, Any] = {"losses": {}, "digests": {}, "errors": []}

    def act(self, actions: list[list[Any]]) -> None:
        for name, *arguments in actions:
            getattr(self, name)(*arguments)

    def note(self, key: str, value: Any) -> None:
        """Written at once: the run may be killed at any time."""
        self.result[key] = value
        (self.folder / "result.json").write_text(json.dumps(self.result))

    # ---- training ------------------------------------------------------------------------------------------------

    def start(self, disk: str, slide: dict[str, Any], options: dict[str, Any]) -> None:
        """Make the engine: both devices on SSD in `disk`, nothing in host memory. `options`: of `ds_config`."""
        config = on_ssd(ds_config({"host_memory": 0, **slide}, **options), disk)
        model = llama(num_hidden_layers=6)  # as many requests as the faults are counted by
        self.engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
        self.disk = Path(disk)
        self.note("entries", sorted(path.name for path in self.disk.iterdir()))
        ssd = self.engine.optimizer.runtime.parts.ssd
        self.note("paths", [] if ssd is None else ssd.store.statistics()["paths"])

    def move_inputs(self, count: int) -> None:
        """From now on the inputs of so many blocks leave the GPU."""
        handle_of(pytest.MonkeyPatch())(0, count)

    def train(self, steps: int) -> None:
        """Each step has its own batch, so that a run that resumes sees what an uninterrupted one sees."""
        for _ in range(steps):
            number = self.engine.global_steps
            for batch in batches(self.engine.gradient_accumulation_steps(), seed=number):
                loss = self.engine(**batch).loss
                self.engine.backward(loss)
                self.engine.step()
            self.result["losses"][number] = loss.item()

    def train_to(self, step: int) -> None:
        self.train(step - self.engine.global_steps)

    def digest(self, name: str) -> None:
        """Every bit of weights, masters and moments."""
        sha = hashlib.sha256()
        for parameter, tensors in sorted(states_of(self.engine.module).items()):
            for key, tensor in sorted(tensors.items()):
                sha.update(f"{parameter} {key}".encode())
                sha.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        self.note("digests", {**self.result["digests"], name: sha.hexdigest()})

    def save(self, folder: str, tag: str) -> None:
        self.engine.save_checkpoint(folder, tag)

    def load(self, folder: str) -> None:
        assert self.engine.load_checkpoint(folder)[0] is not None
        self.note("loaded_step", self.engine.global_steps)

    def destroy(self) -> None:
        self.engine.destroy()

    def failing(self, *actions: list[Any]) -> None:
        """These actions must end with a SlideError, which the script catches."""
        try:
            self.act(list(actions))
        except SlideError as error:
            self.note("errors", [*self.result["errors"], str(error)])
        else:
            raise AssertionError(f"{actions} did not fail")

    # ---- faults --------------------------------------------------------------------------------------------------

    def slow_disk(self, milliseconds: int, requests: int) -> None:
        """By fault_shim.c: each of the next `requests` takes so long (backend "threads")."""
        ctypes.CDLL(None).fault_slow(ctypes.c_long(milliseconds * 1_000_000), ctypes.c_long(requests))

    def faults(self, every: int, keep: int, error: int) -> None:
        """By fault_shim.c: every n-th I/O moves `keep` bytes only, or fails with `error`; 0: none."""
        shim = ctypes.CDLL(None)
        shim.fault_set.argtypes = (ctypes.c_int, ctypes.c_long, ctypes.c_long, ctypes.c_int)
        self.note("fault_at", time.monotonic())
        shim.fault_set(every, keep, 0, error)

    def repeated(self) -> None:
        """How many requests the I/O engine had to send again."""
        self.note("repeated", self.engine.optimizer.runtime.parts.ssd.store.statistics()["repeated_requests"])

    def at(self, name: str, count: int, *action: Any) -> None:
        """Before the `count`-th call of the function "module:Class.method" from now on, on its thread: an action."""

        def before(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self.note("interrupted", name)
            self.act([list(action)])
            return original(*args, **kwargs)

        replace_call(*attribute(name), count, before)

    def at_chunk(self, which: int | str, *action: Any) -> None:
        """Before the chunk number `which` of the coming update is written, or the "last" one, which ends the file."""
        on_ssd = self.engine.optimizer.runtime.parts.ssd.units.optimizer
        last = max(chunk.offset for states in on_ssd.values() for chunk in states.chunks)
        owner = ssd_unit.SsdOptimizerStates
        original, calls, done = owner.put_back, itertools.count(1), False

        def put_back(states: Any, index: int, *arguments: Any) -> None:
            nonlocal done
            due = states.chunks[index].offset == last if which == "last" else next(calls) == which
            if due and not done:
                done = True
                self.act([list(action)])
            original(states, index, *arguments)

        setattr(owner, "put_back", put_back)  # noqa: B010

    def kill(self, number: int) -> None:
        """This process, by signal `number`."""
        os.kill(os.getpid(), number)

    def tell(self, fifo: str) -> None:
        """Somebody waits for this instant."""
        self.note("told", time.monotonic())
        Path(fifo).write_text("x")

    def hear(self, fifo: str) -> None:
        """Wait for somebody."""
        Path(fifo).read_text()

    def truncate(self, nbytes: int) -> None:
        """The state file, to `nbytes`."""
        (descriptor,) = self.engine.optimizer.runtime.parts.ssd.store.files.descriptors
        self.note("fault_at", time.monotonic())
        os.truncate(f"/proc/self/fd/{descriptor}", nbytes)

    def damage(self, kind: str, block: int, chunk: int) -> None:
        """Change the optimizer states of a chunk of a block in the state file, in a way of `damage.KINDS`."""
        runtime = self.engine.optimizer.runtime
        for unit in runtime.units:
            runtime.access.settle(unit)
        chunks = runtime.blocks[block].state.optimizer.chunks
        extent, other = (damage.Extent(each.offset, each.nbytes) for each in (chunks[chunk], chunks[chunk - 1]))
        with damage.state_file_of(runtime.parts.ssd.store) as file:
            file.damage(kind, extent, other, file.read(other))
        self.note("fault_at", time.monotonic())

    def fill_disk(self) -> None:
        """Take all that is left on the disk."""
        with (self.disk / "other").open("wb", buffering=0) as stream:
            try:
                while True:
                    stream.write(b"\1" * 65536)
            except OSError as error:
                self.note("filled", error.errno)


def main(make: type[Run] = Run) -> None:
    request = json.loads(sys.argv[1])
    folder, rank, size = Path(request["folder"]), request.get("rank", 0), request.get("size", 1)
    torch.set_num_threads(1)
    ssd_settings.CHUNK_NUMEL = CHUNK_NUMEL
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_SIZE=str(size))
    store = torch.distributed.FileStore(request.get("store", str(folder / "store")), size)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    deepspeed.init_distributed("gloo")
    make(folder).act(request["actions"])


if __name__ == "__main__":
    main()
