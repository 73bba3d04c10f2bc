"""Errors that DS-Slide raises itself, and how an uncaught one ends a process.

Every message is one sentence: what is wrong, where (JSON path, file, tier, bytes), and what to do about it. It is the
last line that the process prints. Above it stands the line of the script that the error came from, if there is one. The
frames of DS-Slide, DeepSpeed and other installed packages are left out, and so are earlier errors that led to it: the
sentence says what they meant. DS_SLIDE_TRACEBACK=1 in the environment shows all of it. A hook that the script has
installed (for a service that collects errors, for instance) gets the error with all of it, too. The sentence then
stands below the hook's output.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Literal


class SlideError(RuntimeError):
    """Something DS-Slide cannot do, refused before it could change a result."""


class SlideConfigError(SlideError, ValueError):
    """A value in the DeepSpeed config, or an argument of the same kind, that DS-Slide cannot use."""


class SlideAttributeError(SlideError, AttributeError):
    """An attribute of a stock object that DS-Slide's has not; `hasattr` and `getattr` with a default work as ever."""


class DoesNotFit(SlideError):
    """A tier is too small for the plan. `needed`, `available`: bytes of the tier."""

    def __init__(self, tier: Literal["gpu", "host", "ssd"], needed: int, available: int, sentence: str) -> None:
        super().__init__(sentence)
        self.tier, self.needed, self.available = tier, needed, available


TRACEBACK_VARIABLE = "DS_SLIDE_TRACEBACK"

# Folders of packages: the user's, the system Python's below a virtual environment, and Debian's.
_SITES = {"site-packages", "dist-packages"}

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
_previous: _Hook | None = None


def end_in_one_sentence() -> None:
    """Make refusals end this process in one sentence. Other exceptions, and their hooks, stay unchanged. Idempotent."""
    global _previous
    if _previous is None:
        _previous, sys.excepthook = sys.excepthook, _show


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    assert _previous is not None
    if not isinstance(error, SlideError) or os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0"):
        _previous(kind, error, trace)
    elif _previous is sys.__excepthook__ or getattr(_previous, "__module__", "").startswith("torch."):
        # torch's hook puts the rank before the output of the hook below it. A process group installs it.
        _say(kind, error, _only(list(_of_the_script(trace))))
    else:
        try:
            _previous(kind, error, trace)
        finally:
            _say(kind, error, None)


def _say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the error without the earlier errors that led to it. The error is not changed: others may hold it."""
    told = traceback.TracebackException(kind, error, trace)
    lines = list(told.format_exception_only() if trace is None else told.format(chain=False))
    # A closed stream raises a ValueError, a pipe without a reader an OSError.
    with suppress(OSError, ValueError):
        if sys.stdout is not None:
            sys.stdout.flush()  # where both streams go to one file, what the script has printed comes before
    with suppress(OSError, ValueError):
        if sys.stderr is not None:
            sys.stderr.write("".join(lines))
            sys.stderr.flush()


def _of_the_script(trace: TracebackType | None) -> Iterator[TracebackType]:
    """Yield the frames that lie neither in this package nor in an installed one."""
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    packages = tuple(os.path.join(folder, "") for folder in (*installed, str(Path(__file__).parent)))
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith((*packages, "<frozen ")) and _SITES.isdisjoint(Path(name).parts):
            yield trace
        trace = trace.tb_next


def _only(frames: list[TracebackType]) -> TracebackType | None:
    """Return a traceback of these frames only."""
    chain: TracebackType | None = None
    for frame in reversed(frames):
        chain = TracebackType(chain, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return chain
