"""Host memory: exact, aligned, page-locked or clearly not."""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from ds_slide import _native

MIB = 1 << 20
PAGE = 4096


def run_python(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        timeout=60,
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )


@pytest.mark.parametrize("huge_pages", [False, True])
@pytest.mark.parametrize("nbytes", [1, PAGE, PAGE + 1, 130 * MIB + 17])
def test_a_zeroed_writable_buffer_of_the_size_asked_for(nbytes, huge_pages):
    slab = _native.Slab(nbytes, False, huge_pages)
    tensor = torch.frombuffer(slab.memory, dtype=torch.uint8)
    assert (slab.nbytes, slab.pinned, tensor.numel(), tensor.data_ptr()) == (nbytes, False, nbytes, slab.ptr)
    assert slab.ptr % (2 * MIB if huge_pages else PAGE) == 0
    assert not tensor.any()
    tensor.fill_(7)
    assert tensor[-1] == 7


@pytest.mark.parametrize("huge_pages", [False, True])
def test_no_more_is_mapped_than_asked_for(huge_pages):
    """A power-of-two allocator would map 256 MiB here."""
    script = f"""
        from ds_slide import _native
        def mapped():
            return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize:"))
        mapped()
        before = mapped()
        slab = _native.Slab(130 * {MIB} + 1, False, {huge_pages})
        print(mapped() - before)
    """
    done = run_python(script)
    assert done.returncode == 0, done.stderr
    assert 0 <= int(done.stdout) - (130 * 1024 + 4) <= 64, "one page more than 130 MiB, in KiB"


def test_tensors_keep_the_memory():
    tensor = torch.frombuffer(_native.Slab(MIB, False, False).memory, dtype=torch.float32)
    gc.collect()
    tensor.fill_(1.0)
    assert tensor.sum() == MIB / 4


def test_close_unmaps_and_may_be_repeated():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE

    slab = _native.Slab(64 * MIB, False, False)
    torch.frombuffer(slab.memory, dtype=torch.uint8).fill_(1)
    full = resident()
    slab.close()
    assert full - resident() > 60 * MIB
    slab.close()
    assert (slab.ptr, slab.pinned, slab.nbytes) == (0, False, 64 * MIB)
    with pytest.raises(ValueError, match="closed"):
        slab.memory  # noqa: B018


def test_nothing_of_no_bytes():
    slab = _native.Slab(0, True, False)
    assert (slab.ptr, slab.nbytes, slab.pinned) == (0, 0, False)


@pytest.mark.parametrize("nbytes", [1 << 62, (1 << 64) - 1])
def test_more_than_there_is(nbytes):
    with pytest.raises(RuntimeError, match=f"cannot map {nbytes} bytes .*lower the host memory budget"):
        _native.Slab(nbytes, False, False)


def test_forked_children_do_not_inherit_it():
    """Else every write of the parent, while a data-loader child lives, would copy a page: up to twice the states."""
    script = """
        import os, sys
        from ds_slide import _native
        slab = _native.Slab(64 << 20, False, False)
        def is_mapped():
            ranges = (line.split()[0].split("-") for line in open("/proc/self/maps"))
            return any(int(low, 16) <= slab.ptr < int(high, 16) for low, high in ranges)
        assert is_mapped()
        child = os.fork()
        if child == 0:
            os._exit(1 if is_mapped() else 0)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    done = run_python(script)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine can pin")
def test_pinning_without_a_driver_says_so():
    with pytest.raises(RuntimeError, match=r"cannot page-lock 8192 bytes of host memory: the CUDA driver .*pin=False"):
        _native.Slab(5000, True, False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_memory_is_pinned_for_torch():
    torch.cuda.init()
    slab = _native.Slab(5 * MIB + 3, True, False)
    tensor = torch.frombuffer(slab.memory, dtype=torch.uint8)
    assert slab.pinned and tensor.is_pinned()
    tensor.fill_(3)
    assert tensor.to("cuda", non_blocking=True).sum().item() == 3 * (5 * MIB + 3)
    slab.close()


# A driver with the entry points that pinning uses and a log of the calls. No machine of the test suite has the real
# one, and the order of calls and the texts of failures are what is tested here.
FAKE_DRIVER = r"""
#include <cstdio>
#include <cstdlib>
#include <cstring>
static int fails(char const* name) {
  char const* which = getenv("FAIL");
  return which && !strcmp(which, name) ? 2 : 0;
}
static void* current = nullptr;
#define ENTRY(name, parameters, body) \
  extern "C" int name parameters { puts(#name); body; fflush(stdout); return fails(#name); }
ENTRY(cuInit, (unsigned), )
ENTRY(cuCtxGetCurrent, (void** context), *context = getenv("CURRENT") ? (void*)1 : current)
ENTRY(cuCtxPushCurrent_v2, (void* context), current = context)
ENTRY(cuCtxPopCurrent_v2, (void** context), *context = current; current = nullptr)
ENTRY(cuDeviceGet, (int* device, int), *device = 0)
ENTRY(cuDevicePrimaryCtxRetain, (void** context, int), *context = (void*)2)
ENTRY(cuMemHostRegister_v2, (void*, size_t nbytes, unsigned flags), printf("%zu bytes, flags %u\n", nbytes, flags))
ENTRY(cuMemHostUnregister, (void*), )
extern "C" int cuGetErrorName(int, char const** name) { *name = "CUDA_ERROR_OUT_OF_MEMORY"; return 0; }
"""


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.cpp").write_text(FAKE_DRIVER)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), str(folder / "driver.cpp")], check=True
    )
    return str(folder)


PIN_TWO = """
    from ds_slide import _native
    a, b = _native.Slab(5000, True, False), _native.Slab(100, True, False)
    assert a.pinned and b.pinned
    a.close(); a.close()
    print("closed", flush=True)
    del b
"""


def test_calls_of_the_driver(fake_driver):
    done = run_python(PIN_TWO, LD_LIBRARY_PATH=fake_driver)
    push_register = ["cuCtxPushCurrent_v2", "cuMemHostRegister_v2", "{} bytes, flags 1", "cuCtxPopCurrent_v2"]
    first = [line.format(8192) for line in push_register]
    second = ["cuCtxGetCurrent", *(line.format(4096) for line in push_register)]
    unregister = ["cuCtxPushCurrent_v2", "cuMemHostUnregister", "cuCtxPopCurrent_v2"]
    retain = ["cuInit", "cuCtxGetCurrent", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]
    assert done.stdout.split("\n")[:-1] == [*retain, *first, *second, *unregister, "closed", *unregister], done.stderr


def test_a_current_context_is_used(fake_driver):
    done = run_python(PIN_TWO, LD_LIBRARY_PATH=fake_driver, CURRENT="1")
    assert done.returncode == 0 and "cuDevicePrimaryCtxRetain" not in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("cuInit", "cuInit failed with CUDA_ERROR_OUT_OF_MEMORY"),
        ("cuDevicePrimaryCtxRetain", "that of device 0 could not be made: CUDA_ERROR_OUT_OF_MEMORY"),
        ("cuMemHostRegister_v2", "cuMemHostRegister failed with CUDA_ERROR_OUT_OF_MEMORY (2); free host memory"),
    ],
)
def test_refusals_of_the_driver(fake_driver, entry, words):
    done = run_python(PIN_TWO, LD_LIBRARY_PATH=fake_driver, FAIL=entry)
    error = done.stderr.strip().split("\n")[-1]
    assert error.startswith("RuntimeError: cannot page-lock 8192 bytes of host memory: ") and words in error
    assert "ulimit -l" in error or entry != "cuMemHostRegister_v2"
