"""The C interface of the library, and what keeps `ds_slide/_native` and csrc/bindings together."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import platform
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ds_slide import _native
from ds_slide._native import library

SOURCES = Path(library.__file__).parent
CALL = re.compile(r'function\("(\w+)", "([pqd:]+)"')


def test_each_function_of_the_library_is_called_with_its_types():
    """`function` compares the types of those that are called; here none may be left over."""
    called = dict(match for path in SOURCES.glob("*.py") for match in CALL.findall(path.read_text("utf-8")))
    assert {name: types.replace(":", "") for name, types in called.items()} == library._SIGNATURES


@pytest.mark.parametrize(("name", "types"), [("update", "q:pq"), ("no_such_function", "q:p"), ("page_sums", "q:pppqq")])
def test_a_library_of_other_sources_is_refused(name, types):
    with pytest.raises(ImportError, match=f"was built from other sources: its function '{name}' has the types"):
        library.function(name, types)


def test_a_missing_library_is_an_import_error(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "PATH", tmp_path / "libds_slide.so")
    with pytest.raises(ImportError, match=r"libds_slide\.so is not there"):
        library._load()
    library.PATH.write_bytes(b"not a library")
    with pytest.raises(ImportError, match="libds_slide"):
        library._load()


def test_nothing_of_cpp_is_visible():
    """torch has a C++ library of its own: names of ours would be mixed with its."""
    if not (nm := next((path for path in ("/usr/bin/nm", "/usr/local/bin/nm") if os.path.exists(path)), None)):
        pytest.skip("needs nm")
    done = subprocess.run([nm, "-D", "--defined-only", library.PATH], capture_output=True, text=True, check=True)
    names = {line.split()[-1] for line in done.stdout.splitlines()}
    drops = [f"{kind}_drop" for kind in ("generations", "io", "lease", "pool", "slab", "turns", "workers")]
    assert names == {f"slide_{name}" for name in (*library._SIGNATURES, "functions", *drops)}


def test_an_object_lives_until_the_finalizers_of_its_cycle_have_run():
    """The garbage collector calls all finalizers of a cycle first, and that of an engine uses its pools."""
    seen = []

    class Owner:
        def __init__(self):
            self.pool = _native.Pool(4096, 1, False, False)
            self.pool.owner = self

        def __del__(self):
            lease = self.pool.try_lease()
            lease.memory[:] = b"x" * 4096
            seen.append(self.pool.stats()["free"])
            self.pool.close()

    for _ in range(20):
        Owner()
    gc.collect()
    assert seen == [0] * 20


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda workers: _native.copy(workers, 4096, 4096, -1), "nbytes is -1 but must not be negative"),
        (lambda workers: _native.sum_of_squares(workers, 4096, "fp32", -1), "numel is -1 but must not be negative"),
        (lambda workers: _native.sum_of_squares(workers, 4096, "fp8", 1), 'dtype is "fp8" but must be one of bf16'),
        (lambda workers: _native.page_sums(workers, 0, 5, 0), "5 bytes are not a multiple of 4096"),
        (lambda workers: _native.page_sums(workers, 0, 0, 0, "avx"), 'isa is "avx" but must be one of auto, portable'),
        (lambda _: _native.Generations.bytes(-1), "count is -1"),
        (lambda _: _native.Generations(_native.Slab(4096, False, False), 1 << 20), "too small"),
    ],
)
def test_values_that_cannot_be(call, words):
    with pytest.raises(ValueError, match=words):
        call(_native.Workers(1, []))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the others have portable kernels only")
def test_the_best_instruction_set_is_used():
    """By the kernel's list of what the processor can do: a library that falls back to less would be right, but slow."""
    flags = set(re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.M)[1].split())
    best = "portable"
    if {"avx2", "f16c"} <= flags:
        best = "avx512" if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags else "avx2"
    assert (_native.isa(), _native.sum_isa()) == (best, "sse42" if "sse4_2" in flags else "portable")


@pytest.mark.parametrize("rule", ["adamw", "lion", "sgd_momentum"])
def test_an_update_without_torch(rule):
    """The best instruction set and the portable kernels give the same bits, and other ones than before."""
    numel, states, numbers = 1003, {"adamw": 2}.get(rule, 1), {"adamw": 10, "lion": 7}.get(rule, 5)
    workers = _native.Workers(2, [])

    def after(isa: str) -> bytes:
        arrays = [(ctypes.c_float * numel)(*(math.sin(index * (1 + k)) for index in range(numel))) for k in range(4)]
        arrays[3][:] = [abs(value) for value in arrays[3]]
        weight, gradient, *kept = map(ctypes.addressof, arrays)
        numbers_of_step = [0.5 / (1 + k) for k in range(numbers)]
        state_ptrs = kept[:states]
        call = _native.UpdateCall(rule, "fp32", weight, 0, state_ptrs, gradient, "fp32", numel, numbers_of_step)
        _native.update(workers, call._replace(isa=isa))  # type: ignore[arg-type]
        return b"".join(bytes(each) for each in arrays)

    assert after("portable") == after(_native.isa()) == after("auto")


def test_ctrl_c_ends_a_wait():
    """With nothing to come, `next` waits for minutes; Python's handler runs within it."""
    script = """
        import os, signal, threading
        from ds_slide import _native
        engine = _native.IoEngine("threads", 1, 4096)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what is in its background without

        def press():
            def asleep():
                return open(f"/proc/self/task/{os.getpid()}/stat").read().rsplit(")", 1)[1].split()[0] == "S"

            while not (waits and asleep()):
                os.sched_yield()
            os.kill(os.getpid(), signal.SIGINT)

        waits = []
        try:
            threading.Thread(target=press).start()
            waits.append(True)
            engine.next(200.0)
        except KeyboardInterrupt:
            print("interrupted")
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("interrupted\n", 0), done.stderr


def test_an_interrupt_loses_no_lease():
    """Ctrl-C at any instruction of `try_lease`: the buffer is free again once the frames are gone."""
    pool = _native.Pool(4096, 1, False, False)
    events = 0

    def interrupt_at(number: int) -> bool:
        """Whether the call was interrupted, at line or return `number`."""
        nonlocal events
        events = 0

        def trace(_frame, event, _argument):
            nonlocal events
            if event in ("line", "return"):
                events += 1
                if events == number:
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            pool.try_lease()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    number = 1
    while interrupt_at(number):
        assert pool.stats()["free"] == 1, f"interrupted at event {number}"
        number += 1
    assert number > 3
