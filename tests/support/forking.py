"""For processes that import once and are then forked for every run. Imports nothing that a run may ask about."""

import functools
import os

# Environment of a process that is to be forked: a library's threads would not be there in the forks.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def ask_cpu_once() -> None:
    """DeepSpeed asks which CPU it has at every engine, in a process of its own that takes a second."""
    import cpuinfo

    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    cpuinfo.get_cpu_info()


def require_one_thread() -> None:
    assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"
