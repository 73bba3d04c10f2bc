"""RLIMIT_MEMLOCK where a driver keeps to it, and where it does not: by a driver that counts what it registers."""

import json
import shutil
import subprocess
import textwrap

import pytest
import warm

from ds_slide.report.log import size

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
# Each case in a fork, with the compiled driver in place of libcuda.so.1.
SCRIPT = """
    import ctypes, json, os, resource, sys
    from ds_slide.errors import SlideError
    from ds_slide.store import host_memory

    ctypes.CDLL(sys.argv[1])
    for soft, needed, exempt, limit in json.loads(sys.argv[2]):
        print("case", flush=True)
        if os.fork():
            assert os.wait()[1] == 0
            continue
        if limit is not None:
            os.environ["LIMIT"] = str(limit)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]))
        host_memory._is_exempt = lambda: exempt
        try:
            host_memory.require_page_locks(needed)
            print("may")
        except SlideError as error:
            print(error)
        break
"""
MIB = 1 << 20


REFUSED = (1 * MIB, 50 * MIB, False, 1 * MIB)
BELIEVED = (1 * MIB, 50 * MIB, False, None)
NOT_ASKED = [(1 * MIB, MIB, False, 0), (MIB, 50 * MIB, True, 0)]
"""Limit of the process, what is needed, whether the process is exempt, and what the driver registers at most."""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What each case prints, the driver included."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.cpp").write_text(DRIVER)
    name, library = "libcuda.so.1", str(folder / "libcuda.so.1")
    command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", library, str(folder / "driver.cpp")]
    subprocess.run(command, check=True)
    cases = [REFUSED, BELIEVED, *NOT_ASKED]
    (folder / "script.py").write_text(textwrap.dedent(SCRIPT))
    run = warm.start(folder / "script.py", library, json.dumps(cases), folder=folder)
    assert run.end() == 0, run.log
    return dict(zip(cases, [each.splitlines() for each in run.log.split("case\n")[1:]], strict=True))


def test_a_driver_that_keeps_to_the_limit_refuses_by_its_name(said):
    asked, message = said[REFUSED]
    assert asked == f"asked {5 * MIB}"
    assert message.startswith(
        f"host tier: the GPU copies from up to {size(50 * MIB)} of page-locked memory, but RLIMIT_MEMLOCK "
        f"(ulimit -l) is {size(MIB)} and the driver keeps to it (cannot page-lock"
    )


def test_a_driver_that_does_not_is_believed(said):
    assert said[BELIEVED] == [f"asked {5 * MIB}", "unregistered", "may"]


@pytest.mark.parametrize("case", NOT_ASKED, ids=["needs no more", "exempt"])
def test_who_needs_no_more_or_has_no_limit_does_not_ask(said, case):
    assert said[case] == ["may"]
