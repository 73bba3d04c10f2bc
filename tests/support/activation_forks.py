"""Processes for test_activation.py: what they import is imported once, then each case is a fork.

    python activation_forks.py FOLDER

Reads [[statements, {case: {"code": ..., "arguments": [...], "variables": {...}}}], ...] from stdin. The statements are
executed here, one stage after the other, and the cases of a stage in forks of what this process is by then: as scripts,
which end through the interpreter's exit. Leaves CASE.out, CASE.err and CASE.status in FOLDER. Imports only what no case
asks about.
"""

import gc
import json
import os
import signal
import sys
import traceback
from pathlib import Path

from forking import require_one_thread

# For what takes five seconds on an idle machine.
PATIENCE_S = 90


def begin(case, folder, name):
    """Make this process what `python -c CODE ARGUMENTS` would be, with its streams in files."""
    signal.alarm(PATIENCE_S)
    for stream, ending in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{name}.{ending}", os.O_WRONLY | os.O_CREAT, 0o600), stream)
    os.environ.update(case["variables"])
    sys.argv = ["-c", *case["arguments"]]


def main(folder):
    for statements, cases in json.load(sys.stdin):
        exec(statements, {"__name__": "activation_forks"})
        gc.collect()
        gc.freeze()  # a collection in a case would touch, and so copy, all that was made here
        require_one_thread()
        for name, case in cases.items():
            if child := os.fork():
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                (folder / f"{name}.status").write_text(str(status))
                continue
            begin(case, folder, name)
            try:
                exec(case["code"], {"__name__": "__main__"})
            except Exception:
                traceback.print_exc()
                sys.exit(1)
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]))
