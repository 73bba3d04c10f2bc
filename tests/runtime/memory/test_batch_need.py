"""Peaks of spans that overlap, and what does not grow with a batch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ds_slide.plan.spare import Measured, Shape, fixed_bytes
from ds_slide.runtime.memory.batch_need import Peaks


class Gpu:
    """Torch's count of one."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def allocated(self) -> int:
        return self.now

    def peak(self) -> int:
        return self.most

    def reset_peak(self) -> None:
        self.most = self.now

    def take(self, nbytes: int) -> None:
        self.now += nbytes
        self.most = max(self.most, self.now)


@given(st.lists(st.one_of(st.integers(-50, 100), st.sampled_from(["begin a", "begin b", "end b"])), max_size=40))
def test_each_span_has_the_peak_since_it_began(events: list[int | str]) -> None:
    gpu, expected = Gpu(), dict[str, int]()
    peaks = Peaks(gpu)
    for event in events:
        if isinstance(event, int):
            gpu.take(max(event, -gpu.now))
            expected = {span: max(most, gpu.now) for span, most in expected.items()}
        elif event.startswith("begin"):
            peaks.begin(event[-1])
            expected[event[-1]] = gpu.now
        elif "b" in expected:
            assert peaks.end("b") == expected.pop("b")
        for span, most in expected.items():
            assert peaks.of(span) == most


def test_without_a_gpu_there_is_no_peak() -> None:
    peaks = Peaks(None)
    peaks.begin("a")
    assert peaks.of("a") == peaks.end("a") == 0


@given(st.integers(0, 1000), st.integers(1, 50), st.integers(1, 400), st.integers(1, 400))
def test_two_batches_tell_what_does_not_grow(fixed: int, each: int, few: int, many: int) -> None:
    points = [(Shape(tokens, tokens), fixed + each * tokens) for tokens in (few, many)]
    found = fixed_bytes(points, 500)
    tells = max(few, many) >= 1.25 * min(few, many)
    assert abs(found - (min(fixed, 500) if tells else 0)) <= 1


def test_what_does_not_grow_stays_in_a_longer_batch() -> None:
    """Gradients of 128 experts take 1.2 GB, however many tokens there are."""
    need = Measured(Shape(16, 16), 1_000, 100, fixed=500)
    assert need.at(Shape(32, 16)) == 500 + 2 * 400 + 2 * 100
    assert need.at(Shape(32, 32)) == 500 + 2 * 400 + 4 * 100
    assert need.at(Shape(16, 16)) == 1_000
