"""For all tests: without a GPU, Triton's interpreter runs the kernels on the CPU.

Set here and not beside the kernels' tests, because triton reads it when it is first imported, and transformers or
DeepSpeed may import it long before.
"""

import functools
import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Test files import `harness`, `warm`, `loops` and the other helpers by these names, and the package `liveness`.
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "support")]

import quick_bf16  # noqa: E402

quick_bf16.use()

# torch lists the functions that `with torch.device(...)` acts on when it is first entered, and keeps the list. Entered
# first inside of zero.Init, which replaces some of them, it never acts on torch.empty again.
with torch.device("cpu"):
    torch.empty(0)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave most parameter sets of some tests to the slow run.

    `thinned(n)` keeps every n-th one. A step that has no common divisor with the sizes of a grid leaves each of its
    values in. `by_turns(n)` keeps one of each n, the first of the first n, the second of the next, and so on: where a
    case has n settings, each case stays in, and so does each setting.
    """
    seen: dict[str, int] = {}
    for item in items:
        if (marker := item.get_closest_marker("by_turns") or item.get_closest_marker("thinned")) is None:
            continue
        test = item.nodeid.partition("[")[0]
        number, step = seen.get(test, 0), marker.args[0]
        seen[test] = number + 1
        kept = number // step % step if marker.name == "by_turns" else 0
        if number % step != kept:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module", autouse=True)
def own_linear() -> Iterator[None]:
    """`zero.Init` puts a linear function of its own in the place of torch's for good. It rounds otherwise, so the bits
    of a module's trainings would depend on the modules that ran before."""
    linear = torch.nn.functional.linear
    yield
    torch.nn.functional.linear = linear


@pytest.fixture
def over_fuse(tmp_path: Path) -> Iterator[Path]:
    """A directory of another file system, which a process of its own serves: it has no nameless files, and one that is
    unlinked while it is open gets another name. Skips where FUSE cannot be mounted."""
    if shutil.which("bindfs") is None:
        pytest.skip("bindfs, which serves a directory through FUSE, is not installed")
    beneath, seen = tmp_path / "beneath", tmp_path / "seen"
    beneath.mkdir()
    seen.mkdir()
    done = subprocess.run(["bindfs", str(beneath), str(seen)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"FUSE cannot be mounted here: {done.stderr.strip()}")
    yield seen
    subprocess.run(["fusermount3", "-u", "-z", str(seen)], check=True)


@pytest.fixture
def nearest_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: fp32 becomes bf16 by rounding to the nearest, as GPUs do; Triton's interpreter cuts it off."""
    if torch.cuda.is_available():
        return
    from triton import language as tl
    from triton.runtime import interpreter

    cast = interpreter.InterpreterBuilder.cast_impl

    def rounding(builder, source, target):
        if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return cast(builder, source, target)
        bits = torch.from_numpy(source.data).to(torch.bfloat16).view(torch.int16).numpy().view("uint16")
        return interpreter.TensorHandle(bits, target.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", rounding)


@pytest.fixture(scope="module")
def quick_interpreter() -> Iterator[None]:
    """Without a GPU: Triton's interpreter without most of the work around each operation (quick_triton.py)."""
    if torch.cuda.is_available():
        yield
        return
    import quick_triton

    with pytest.MonkeyPatch.context() as patch:
        quick_triton.use(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def _known_cpu() -> Iterator[None]:
    """DeepSpeed asks which CPU it has at every engine, and `ds-slide` does at every plan for this machine. The answer
    comes from a process of its own that takes longer than most tests do, so it is asked for once."""
    import cpuinfo

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpuinfo, "get_cpu_info", functools.cache(cpuinfo.get_cpu_info))
        yield


@pytest.fixture(scope="session")
def _process_group(tmp_path_factory: pytest.TempPathFactory) -> None:
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    import ds_slide  # noqa: F401 - switches the "ds_slide" key on where the package is not installed

    if get_accelerator().device_name() != "cpu":
        pytest.skip("these tests run on the CPU accelerator: set DS_ACCELERATOR=cpu")
    if not torch.distributed.is_initialized():
        # A store in a file needs no port, and nothing goes to the environment of the processes that other tests start.
        store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("ranks") / "store"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    deepspeed.init_distributed("gloo")


@pytest.fixture(scope="module")
def one_rank(_process_group: None) -> Iterator[None]:
    """A process group of one rank, and one torch thread: the models are too small for two, and bits must repeat.

    A garbage collection passes over all that was made before: over the modules' million objects it takes a third of a
    second, and some tests ask for many.
    """
    gc.collect()
    gc.freeze()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")
        yield
    torch.set_num_threads(threads)
