"""A thread that writes a checkpoint while training goes on, and what became of it.

The thread is no daemon, so the interpreter waits for it at its end; by then the pools of `concurrent.futures` take no
more work, which is why it uses none.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from ds_slide.checkpoint.archive import Wrote
from ds_slide.checkpoint.one_thread import take_one_thread
from ds_slide.errors import SlideError
from ds_slide.report.log import size

logger = logging.getLogger(__name__)


class BackgroundSave:
    """One asynchronous save of this rank. `write(wrote)` does it, in the thread; `complete()` publishes what all ranks
    have written and none has published; `release()` removes what is left when all ranks have ended."""

    def __init__(
        self,
        target: Path,
        nbytes: int,
        write: Callable[[Wrote], None],
        complete: Callable[[], None],
        release: Callable[[], None],
        *,
        alone: bool,
    ) -> None:
        self.complete = complete
        self.alone = alone
        self._target = target
        self._nbytes = nbytes
        self._write: Callable[[Wrote], None] | None = write
        self._release = release
        self._owner = os.getpid()
        self._written = 0
        self._awaited = False
        self._told = -1
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="ds_slide-checkpoint")
        self._thread.start()
        atexit.register(self._at_exit)

    def is_under_way(self) -> bool:
        return self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the thread has ended, and say how far it is."""
        if self.is_under_way():
            self._awaited = True
            self._tell()
            self._thread.join()

    def require(self) -> None:
        """Wait, and raise SlideError where the save has failed."""
        self.wait()
        if self._failure is not None:
            raise SlideError(self._failure)

    def close(self, *, all_have_ended: bool) -> None:
        """End the save, once. Where other ranks may still write, a failed save stays locked until this process ends,
        and the next one removes it. Harmless in a forked child, whose parent's save goes on."""
        if os.getpid() != self._owner:
            return
        self.wait()
        atexit.unregister(self._at_exit)
        if all_have_ended:
            self._release()

    def _run(self) -> None:
        write, self._write = self._write, None
        assert write is not None
        try:
            take_one_thread()
            write(self._wrote)
        except BaseException as error:  # as words: its traceback would keep the copy of the states
            cause = f"{error}" if isinstance(error, SlideError) else f"{type(error).__name__}: {error}"
            self._failure = f"the asynchronous save of {self._target} has failed: {cause}"
            # At once: nobody may ask. DeepSpeed ends an engine that is dropped, and keeps what that raises to itself.
            logger.error(self._failure)

    def _wrote(self, nbytes: int) -> None:
        self._written += nbytes
        # The main thread is not alive any more when it waits for this one at the interpreter's end.
        if self._awaited or not threading.main_thread().is_alive():
            self._tell()

    def _tell(self) -> None:
        tenth = 10 * self._written // max(1, self._nbytes)
        if tenth > self._told:
            self._told = tenth
            logger.warning(
                "waiting for the checkpoint %s: %s of %s are written",
                self._target,
                size(self._written),
                size(self._nbytes),
            )

    def _at_exit(self) -> None:
        """The program ends, and nobody has asked what became of the save."""
        self.close(all_have_ended=self.alone)
