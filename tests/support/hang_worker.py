"""Training processes for test_hangs.py: those of ssd_fault_worker.py, with hand-overs that can be broken."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from harness import batches, ds_config, llama
from ssd_fault_worker import Run, main, replace_call

from ds_slide.runtime.core.update import Update
from ds_slide.store.ssd.store import SsdStore

SECONDS = 30.0


class HangRun(Run):
    def start_in_memory(self, slide: dict[str, Any], options: dict[str, Any]) -> None:
        """Make the engine, with all states in host memory."""
        model = llama()
        config = ds_config(slide, **options)
        self.engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))

    def train(self, steps: int) -> None:
        """Each rank has its own batches."""
        rank, size = dist.get_rank(), dist.get_world_size()
        for _ in range(steps):
            number = self.engine.global_steps
            for batch in batches(size, seed=number)[rank::size]:
                loss = self.engine(**batch).loss
                self.engine.backward(loss)
                self.engine.step()
            self.result["losses"][number] = loss.item()

    # ---- a second engine ------------------------------------------------------------------------------------------

    def start_reference(self, slide: dict[str, Any]) -> None:
        """Make an engine without an optimizer, of another model."""
        self.reference, *_ = deepspeed.initialize(model=llama(seed=3), config=ds_config(slide, optimizer=None))
        self.reference.eval()

    def train_beside(self, steps: int) -> None:
        """A forward of the reference before each of the training."""
        for _ in range(steps):
            number = self.engine.global_steps
            batch = self.own_batch(number)
            self.refer(number)
            loss = self.engine(**batch).loss
            self.engine.backward(loss)
            self.engine.step()
            self.result["losses"][number] = loss.item()

    def own_batch(self, number: int) -> dict[str, torch.Tensor]:
        rank, size = dist.get_rank(), dist.get_world_size()
        return batches(size, seed=number)[rank]

    def refer(self, number: int) -> None:
        with torch.no_grad():
            self.result.setdefault("referred", {})[number] = self.reference(**self.own_batch(number)).loss.item()

    def infer(self, number: int) -> None:
        """A forward without backward of the engine that trains."""
        with torch.no_grad():
            self.engine(**self.own_batch(number))

    def in_the_reference(self, *action: Any) -> None:
        """This action once, in the middle of the reference's next forward."""
        self._once_in(self.reference, action)

    def destroy_reference(self) -> None:
        self.reference.destroy()

    # ---- hand-overs that are broken ------------------------------------------------------------------------------

    def small_requests(self, nbytes: int) -> None:
        """The disk is asked for so much at once, one request after the other."""
        original = SsdStore.__init__

        def init(store: SsdStore, *arguments: Any, **options: Any) -> None:
            io = dataclasses.replace(options["io"], request_bytes=nbytes, queue_depth=1)
            original(store, *arguments, **{**options, "io": io})

        SsdStore.__init__ = init  # type: ignore[method-assign]

    def drop_completion(self, which: int) -> None:
        """Nobody hears that the `which`-th read from now on is there."""
        self._nth(SsdStore, "read", which, lambda call, store, parts, _then, **how: call(store, parts, int, **how))

    def drop_finish(self, which: int) -> None:
        """The end of the `which`-th span that is updated from now on is not recorded."""

        def instead(_call: Any, update: Update, _index: int) -> None:
            self.note("dropped", update.done.what)

        self._nth(Update, "finish", which, instead)

    def skip_reduction(self) -> None:
        """This rank does not take part in the next sum over the ranks, which is the norm's. Without one of a gradient,
        the sizes of those that meet would differ, and gloo would end the process (std::terminate)."""
        # As if the other rank had given the same: otherwise this rank would notice by the digest in the sum.
        self._nth(dist, "all_reduce", 1, lambda _call, values, **_: values.mul_(dist.get_world_size()))

    def _nth(self, owner: Any, name: str, which: int, instead: Callable[..., Any]) -> None:
        def broken(original: Any, *arguments: Any, **options: Any) -> Any:
            self.note("broken", name)
            return instead(original, *arguments, **options)

        replace_call(owner, name, which, broken)

    # ---- in the middle of a step ---------------------------------------------------------------------------------

    def in_forward(self, *action: Any) -> None:
        """This action once, in the middle of the next forward."""
        self._once_in(self.engine, action)

    def _once_in(self, engine: Any, action: tuple[Any, ...]) -> None:
        block = engine.module.model.layers[3]

        def act(*_: Any) -> None:
            handle.remove()
            self.act([list(action)])

        handle = block.register_forward_pre_hook(act)

    def interrupt_backward(self, index: int) -> None:
        """The script catches an exception out of the next backward, which comes when that has reached this block."""

        def fail(_: torch.Tensor) -> None:
            raise KeyError("the script has failed")

        def watch(_module: Any, _args: Any, output: Any) -> None:
            handle.remove()
            (output[0] if isinstance(output, tuple) else output).register_hook(fail)

        handle = self.engine.module.model.layers[index].register_forward_hook(watch)
        loss = self.engine(**self.own_batch(self.engine.global_steps)).loss
        try:
            self.engine.backward(loss)
        except KeyError as error:
            self.note("caught", str(error))

    def stop_while_waiting(self) -> None:
        """This process is stopped while the training stands still for a read, and stands still a little longer."""
        original, done = SsdStore.read, threading.Event()
        watchdog = self.engine.optimizer.runtime.parts.watchdog
        moment = threading.Event()

        def has_stood(seconds: float) -> bool:
            for _ in range(int(SECONDS / 0.001)):
                if watchdog._since > seconds:
                    return True
                moment.wait(0.001)
            return False

        def read(*arguments: Any, **options: Any) -> Any:
            main_thread = threading.current_thread() is threading.main_thread()
            if not main_thread and not done.is_set():
                done.set()
                if has_stood(0.0):
                    before = watchdog._since
                    self.note("stopped", True)
                    os.kill(os.getpid(), signal.SIGSTOP)
                    has_stood(before + watchdog._times.look_s)
            return original(*arguments, **options)

        SsdStore.read = read  # type: ignore[method-assign]


if __name__ == "__main__":
    main(HangRun)
