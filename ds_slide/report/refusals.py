"""How a SlideError that nobody catches ends a process: with its sentence, as the last line that the process prints.

Above it stands the line of the script that the error came from, if there is one; the frames of DS-Slide, DeepSpeed and
other installed packages, and the errors that led to this one, are left out, because the sentence says what they meant.
DS_SLIDE_TRACEBACK=1 in the environment shows all of it. Who has put a hook of their own there (such as a service that
collects errors) gets the error with all of it, too, and the sentence stands below what that hook prints.
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

from ds_slide.errors import SlideError

TRACEBACK_VARIABLE = "DS_SLIDE_TRACEBACK"

# Of the user, of the system's Python below a virtual environment, and of Debian.
_SITES = {"site-packages", "dist-packages"}

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
_previous: _Hook | None = None


def end_in_one_sentence() -> None:
    """Let refusals end this process in one sentence. Other exceptions, and their hooks, are left as they are.
    Idempotent."""
    global _previous
    if _previous is None:
        _previous, sys.excepthook = sys.excepthook, _show


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    assert _previous is not None
    if not isinstance(error, SlideError) or os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0"):
        _previous(kind, error, trace)
    elif _previous is sys.__excepthook__ or getattr(_previous, "__module__", "").startswith("torch."):
        # torch's puts the rank before what the hook below it prints, and is there as soon as there is a process group.
        _say(kind, error, _only(list(_of_the_script(trace))))
    else:
        try:
            _previous(kind, error, trace)
        finally:
            _say(kind, error, None)


def _say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the error without those that led to this one, and without a change to it: others may hold it."""
    told = traceback.TracebackException(kind, error, trace)
    lines = list(told.format_exception_only() if trace is None else told.format(chain=False))
    # A closed stream is a ValueError, a pipe that nobody reads an OSError.
    with suppress(OSError, ValueError):
        if sys.stdout is not None:
            sys.stdout.flush()  # where both streams go to one file, what the script has printed comes before
    with suppress(OSError, ValueError):
        if sys.stderr is not None:
            sys.stderr.write("".join(lines))
            sys.stderr.flush()


def _of_the_script(trace: TracebackType | None) -> Iterator[TracebackType]:
    """The frames that lie neither in this package nor among what is installed."""
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    packages = tuple(os.path.join(folder, "") for folder in (*installed, str(Path(__file__).parents[1])))
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith((*packages, "<frozen ")) and _SITES.isdisjoint(Path(name).parts):
            yield trace
        trace = trace.tb_next


def _only(frames: list[TracebackType]) -> TracebackType | None:
    """A traceback of these frames only."""
    chain: TracebackType | None = None
    for frame in reversed(frames):
        chain = TracebackType(chain, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return chain
