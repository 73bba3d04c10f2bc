"""For processes that are to end by a signal."""

import signal


def heeds_signals() -> None:
    """Called in a new process: SIGHUP and SIGINT end it. Under nohup the one is ignored by all processes, and in a
    shell's background job the other."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
