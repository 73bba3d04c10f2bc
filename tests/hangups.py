"""For processes that are to end by a signal."""

import signal


def heeds_hangups() -> None:
    """Called in a new process: SIGHUP ends it, also where the tests run under nohup, which ignores it for all."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
