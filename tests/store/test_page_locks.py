"""RLIMIT_MEMLOCK where a driver keeps to it, and where it does not: by a driver that counts what it registers."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
# Refuses what is longer than LIMIT bytes, where that is set.
DRIVER = r"""
#include <cstdio>
#include <cstdlib>
#define ENTRY(name, parameters, body) extern "C" int name parameters { body; return 0; }
ENTRY(cuInit, (unsigned), )
ENTRY(cuCtxGetCurrent, (void** context), *context = (void*)1)
ENTRY(cuCtxPushCurrent_v2, (void*), )
ENTRY(cuCtxPopCurrent_v2, (void**), )
ENTRY(cuDeviceGet, (int*, int), )
ENTRY(cuDevicePrimaryCtxRetain, (void**, int), )
ENTRY(cuMemHostUnregister, (void*), puts("unregistered"); fflush(stdout))
extern "C" int cuMemHostRegister_v2(void*, size_t nbytes, unsigned) {
  printf("asked %zu\n", nbytes);
  fflush(stdout);
  char const* limit = getenv("LIMIT");
  return limit && nbytes > strtoull(limit, nullptr, 10) ? 2 : 0;
}
extern "C" int cuGetErrorName(int, char const** name) { *name = "CUDA_ERROR_OUT_OF_MEMORY"; return 0; }
"""
SCRIPT = """
    import resource, sys
    from ds_slide.errors import SlideError
    from ds_slide.store import host_memory
    soft, needed, exempt = map(int, sys.argv[1:])
    if soft >= 0:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]))
    host_memory._is_exempt = lambda: bool(exempt)
    try:
        host_memory.require_page_locks(needed)
        print("may")
    except SlideError as error:
        print(error)
"""
MIB = 1 << 20


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.cpp").write_text(DRIVER)
    command = [compiler, "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), str(folder / "driver.cpp")]
    subprocess.run(command, check=True)
    return str(folder)


def ask(driver, soft, needed, exempt=0, **variables):
    environment = os.environ | {"LD_LIBRARY_PATH": driver, "PYTHONPATH": str(REPOSITORY)} | variables
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(soft), str(needed), str(exempt)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.splitlines()


def test_a_driver_that_keeps_to_the_limit_refuses_by_its_name(driver):
    asked, message = ask(driver, 1 * MIB, 50 * MIB, LIMIT=str(1 * MIB))
    assert asked == f"asked {5 * MIB}"
    assert message.startswith(
        f"host tier: the GPU copies from up to {50 * MIB:,} bytes of page-locked memory, but RLIMIT_MEMLOCK "
        f"(ulimit -l) is {MIB:,} and the driver keeps to it (cannot page-lock"
    )


def test_a_driver_that_does_not_is_believed(driver):
    assert ask(driver, 1 * MIB, 50 * MIB) == [f"asked {5 * MIB}", "unregistered", "may"]


@pytest.mark.parametrize(("soft", "needed", "exempt"), [(1 * MIB, MIB, 0), (MIB, 50 * MIB, 1)])
def test_who_needs_no_more_or_has_no_limit_does_not_ask(driver, soft, needed, exempt):
    assert ask(driver, soft, needed, exempt, LIMIT="0") == ["may"]
