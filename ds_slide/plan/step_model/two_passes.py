"""Whether deferred updates are done in two passes: the weights under the next forward, the states under its backward.

The next forward needs only the new weights. The first pass reads gradient, states and master and writes the master. The
second computes the same states from the same inputs and writes them, before the block's next gradient arrives. For
AdamW in fp32 each pass moves 18 bytes a parameter instead of 26. A step then takes max(forward, first pass) +
max(backward, second pass) instead of max(forward, update) + backward.
"""

from __future__ import annotations

from dataclasses import dataclass

PASS_SHARE = 18 / 26 / 0.95
"""Time of either pass, as a part of a whole update's time: AdamW moves 18 of its 26 bytes, at little less than its
rate. It was 0.62 to 0.77 in trainings on two H100 hosts, 0.74 on one H200 host, and 0.79 to 0.85 on another
(benchmarks/results/2026-11-26_nvidia-h100_forecast.md, 2026-11-23_nvidia-h200_hand-sweep.md, page passes)."""
UPDATE_BOUND = 0.9
"""A forward that waits for updates is at most this much longer than they are."""


@dataclass(frozen=True)
class Updates:
    """Seconds of deferred updates in one pass, and of the work that hides them.

    `forward_s`: from the end of a step until the next backward begins, waits included. `left_s`: remaining seconds of
    the forward when the awaited updates have ended. `reach_s`: from the begin of the backward until it comes to the
    last unit that the CPU updates."""

    whole_s: float
    forward_s: float
    left_s: float
    reach_s: float

    @classmethod
    def measured(cls, busy_s: float, forward_s: float, reach_s: float, *, in_two: bool) -> Updates:
        """Return the updates of a measured step. `busy_s`: busy seconds of the update lane. `in_two`: in two passes."""
        whole, awaited = (busy_s / (2 * PASS_SHARE), busy_s / 2) if in_two else (busy_s, busy_s)
        return cls(whole, forward_s, max(0.0, forward_s - awaited), reach_s)

    @property
    def exceed_forward(self) -> bool:
        """Whether a forward does not hide them."""
        return self.whole_s > UPDATE_BOUND * self.forward_s

    @property
    def second_pass_pays(self) -> bool:
        """Whether two passes make the step shorter, where updates do not fit under the forward.

        With one pass the backward gets to that unit after whole_s + left_s + reach_s. With two it takes the first
        pass, and then the second pass or left_s + reach_s, whichever is longer.
        """
        return self.whole_s * (2 * PASS_SHARE - 1) < self.left_s + self.reach_s

    @property
    def two_passes_pay(self) -> bool:
        return self.exceed_forward and self.second_pass_pays


def mean_backward_s(seconds: float, backwards: int) -> float:
    """Return the mean seconds of one backward, from `seconds` over `backwards` of them. Between each two lies a forward
    of half that time."""
    return seconds / (backwards + (backwards - 1) / 2)
