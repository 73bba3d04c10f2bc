"""Kernels and idle time are given to what the host did, in a trace as torch's profiler writes it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import step_causes
import warm
from step_causes import (
    AHEAD,
    FROM_HERE,
    RANGE,
    SCRIPT,
    UNKNOWN,
    WHOLE,
    Collectives,
    Row,
    collectives_of,
    rows_of,
    table,
    table_of_collectives,
    table_of_operators,
)


def event(category: str, name: str, start: float, duration: float, correlation: int | None = None) -> dict[str, Any]:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "tid": 1, "args": args}


def host(name: str, start: float, end: float) -> dict[str, Any]:
    return event("user_annotation", name, start, end - start)


TRACE = [
    {"ph": "M", "name": "process_name"},
    host(WHOLE, 0, 100),
    host(FROM_HERE + "head", 10, 11),
    host(RANGE + "outer", 20, 60),
    host(RANGE + "inner", 30, 40),
    event("cuda_runtime", "cudaLaunchKernel", 5, 1, 1),  # by the script
    event("cuda_runtime", "cudaGraphLaunch", 35, 2, 2),  # by the inner range
    event("cuda_driver", "cuLaunchKernel", 45, 1, 3),  # by the outer one
    event("cuda_runtime", "cudaMemcpyAsync", 70, 1, 4),  # by the head
    event("kernel", "of the script", 8, 4, 1),
    event("kernel", "first of the graph", 37, 5, 2),
    event("kernel", "second of the graph", 43, 7, 2),
    event("kernel", "another one", 48, 4, 3),  # beside the one before
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 60, 9, 4),
    event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 80, 1, 4),
    event("kernel", "nobody's", 90, 1, 99),
]


def test_what_a_step_goes_to() -> None:
    assert rows_of(TRACE) == {
        SCRIPT: Row(host=10, kernels=4, idle=5, count=1),  # it launched at 5
        "head": Row(host=10 + 40, kernels=1, idle=8 + 10, count=1),  # 12 to 20, and 60 to 70
        "outer": Row(host=30, kernels=4, idle=10 + 8, count=1),  # 20 to 30, and 52 to 60
        "inner": Row(host=10, kernels=12, idle=5, count=2),  # 30 to 35
        AHEAD: Row(idle=3 + 2 + 1 + 10 + 9),  # before 8, 37, 43, 80 and 90
        UNKNOWN: Row(kernels=1, count=1),
    }


def test_host_and_gpu_add_up() -> None:
    rows = rows_of(TRACE).values()
    assert sum(each.host for each in rows) == 100
    overlap = 2
    assert sum(each.idle + each.kernels for each in rows) == 91 + overlap  # until the last kernel's end


def test_the_table_has_a_row_for_each_cause() -> None:
    lines = table(rows_of(TRACE), steps=2).splitlines()
    assert len(lines) == 2 + 6 + 1
    assert lines[-1] == "| **all** | 0.05 | 0.01 | 0.04 | 3 |"


def test_a_trace_without_the_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="unpack"):
        rows_of(TRACE[2:])


def on_stream(stream: int, name: str, start: float, duration: float) -> dict[str, Any]:
    made = event("kernel", name, start, duration, 1)
    return made | {"args": made["args"] | {"stream": stream}}


def test_collectives_are_counted_apart() -> None:
    """With what else their stream runs, and with the time in which the computation has a kernel, too."""
    trace = [
        *TRACE[:2],
        event("cuda_runtime", "cudaLaunchKernel", 5, 1, 1),
        on_stream(7, "matrix", 10, 20),
        on_stream(7, "another", 25, 15),  # until 40
        on_stream(7, "matrix", 60, 10),
        on_stream(9, "divide<float>(int)", 8, 4),  # 2 beside
        on_stream(9, "ncclDevKernel_ReduceScatter", 12, 50),  # 28 and 2 beside
        on_stream(9, "divide<half>(int)", 80, 3),
    ]
    assert collectives_of(trace) == {
        "divide": Collectives(2, 7, 2),
        "ncclDevKernel_ReduceScatter": Collectives(1, 50, 30),
    }
    assert rows_of(trace)[SCRIPT].kernels == 45
    assert table_of_collectives(collectives_of(trace), 1).splitlines()[2:] == [
        "| ncclDevKernel_ReduceScatter | 0.05 | 0.03 | 1 |",
        "| divide | 0.01 | 0.00 | 2 |",
    ]


def test_operators_come_in_the_order_of_their_own_time_on_the_host() -> None:
    calls = [
        SimpleNamespace(key=key, self_cpu_time_total=spent, count=count)
        for key, spent, count in (("aten::mm", 4000.0, 8), ("cudaMalloc", 9000.0, 2), ("a|b", 1.0, 2))
    ]
    assert table_of_operators(calls, 2, most=2).splitlines()[2:] == [
        "| cudaMalloc | 4.50 | 1 |",
        "| aten::mm | 2.00 | 4 |",
    ]
    assert "a/b" in table_of_operators(calls, 2)


def test_the_engine_has_what_is_named(tmp_path: Path) -> None:
    """The script wraps methods of the engine's classes, so it runs in a process of its own."""
    folder, script = Path(step_causes.__file__).parent, tmp_path / "named.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(folder)!r})\nimport step_causes\nstep_causes.name_causes()\n"
    )
    run = warm.start(script, folder=tmp_path)
    assert run.end() == 0, run.log
