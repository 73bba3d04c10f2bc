"""One line where DeepSpeed waits for the lock of an operator that nobody compiles any more.

torch compiles DeepSpeed's operators under a lock file in the extension directory. A compilation that was killed leaves
the file behind, and every later process that needs the operator waits for its removal, for ever. Here that wait is as
long as it was, and after some seconds it says what it waits for. This happens before any config is read (a script may
build a DeepSpeedCPUAdam first, and the CPU accelerator compiles an operator when the process group is made), so it
holds for runs without the key as well.
"""

from __future__ import annotations

import functools
import importlib
import logging
import threading
from collections.abc import Callable
from typing import Any

# A compilation takes 20 to 60 s: whoever waits for a living one sees the line too, which says so.
PATIENCE_S = 10.0

logger = logging.getLogger(__name__)


def install_lock_line(builder_class: Any) -> None:
    """Wrap `OpBuilder.jit_load` of `deepspeed.ops.op_builder.builder`."""
    builder_class.jit_load = _saying(builder_class.jit_load)


def _saying(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def jit_load(self: Any, *args: Any, **kwargs: Any) -> Any:
        cpp_extension: Any = importlib.import_module("torch.utils.cpp_extension")
        stock = getattr(cpp_extension, "FileBaton", None)
        if stock is None:  # of a torch that locks otherwise: then the line is missing, and nothing else
            return original(self, *args, **kwargs)
        cpp_extension.FileBaton = _baton_of(stock, self.name)
        try:
            return original(self, *args, **kwargs)
        finally:
            cpp_extension.FileBaton = stock

    return jit_load


def _baton_of(stock: Any, operator: str) -> type:
    """torch's lock file, with a wait that says what it waits for."""

    class Baton(stock):
        def wait(self) -> None:
            timer = threading.Timer(PATIENCE_S, _say, (operator, self.lock_file_path))
            timer.daemon = True
            timer.start()
            try:
                super().wait()
            finally:
                timer.cancel()

    return Baton


def _say(operator: str, path: str) -> None:
    logger.warning(
        "DeepSpeed has waited for %.0f s for another process to compile its operator %s; if none does, one was killed "
        "and has left the lock file: remove %s",
        PATIENCE_S,
        operator,
        path,
    )
