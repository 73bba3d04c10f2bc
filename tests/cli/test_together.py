"""The processes of ranks that are measured at once: they meet, and none waits for a rank that has failed."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import pytest

from ds_slide.cli.doctor import together
from ds_slide.errors import SlideError

pytestmark = pytest.mark.slow  # each process imports torch


@dataclass(frozen=True)
class Rank:
    """Stands in the place of a rank with lanes. `act`: what rank 1 does instead of its second meeting."""

    rank: int
    act: str = ""

    def measure(self) -> Any:
        together._meet()
        begin = time.monotonic()
        if self.rank == 1 and self.act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.rank == 1 and self.act == "raise":
            raise RuntimeError("no memory\n  for it")
        together._meet()
        return begin, time.monotonic()


def in_processes(act: str = "") -> Any:
    return together._in_processes([Rank(rank, act) for rank in range(3)])  # type: ignore[list-item]


def test_all_work_between_the_same_two_meetings() -> None:
    windows = in_processes()
    assert max(begin for begin, _ in windows) < min(end for _, end in windows)


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        ("raise", "^rank 1: no memory for it$"),
        ("kill", "^the process of a rank was ended, perhaps because memory is short$"),
    ],
)
def test_a_rank_that_fails_ends_the_others(act: str, sentence: str) -> None:
    begin = time.monotonic()
    with pytest.raises(SlideError, match=sentence):
        in_processes(act)
    assert time.monotonic() - begin < together.PATIENCE_S
