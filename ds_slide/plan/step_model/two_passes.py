"""Whether deferred updates are done in two passes: the weights under the next forward, the states under its backward.

The next forward needs the new weights only. The first pass reads gradient, states and master and writes the master. The
second computes the same states from the same inputs and writes them, before the block's next gradient arrives. For
AdamW in fp32 each moves 18 bytes a parameter instead of 26. A step then takes max(forward, first pass) + max(backward,
second pass) instead of max(forward, update) + backward.
"""

from __future__ import annotations

from dataclasses import dataclass

PASS_SHARE = 18 / 26 / 0.95
"""Part of the time of a whole update that either pass takes: AdamW moves 18 of its 26 bytes, at little less than its
rate. 0.62 to 0.77 in trainings on two H100 hosts, 0.74 on one of an H200, and 0.79 to 0.85 on another
(benchmarks/results/2026-11-26_nvidia-h100_forecast.md, 2026-11-23_nvidia-h200_hand-sweep.md, page passes)."""
UPDATE_BOUND = 0.9
"""A forward that waits for updates is at most this much longer than they are."""


@dataclass(frozen=True)
class Updates:
    """Seconds of deferred updates in one pass, and of what hides them. `forward_s`: from the end of a step until the
    next backward begins, waits included. `left_s`: what is left of it when the updates that it waits for have ended.
    `reach_s`: from the begin of the backward until it comes to the last unit that the CPU updates."""

    whole_s: float
    forward_s: float
    left_s: float
    reach_s: float

    @classmethod
    def measured(cls, busy_s: float, forward_s: float, reach_s: float, *, in_two: bool) -> Updates:
        """Return the updates of a measured step. `busy_s`: of the update lane. `in_two`: in two passes."""
        whole, awaited = (busy_s / (2 * PASS_SHARE), busy_s / 2) if in_two else (busy_s, busy_s)
        return cls(whole, forward_s, max(0.0, forward_s - awaited), reach_s)

    @property
    def exceed_forward(self) -> bool:
        """Whether a forward does not hide them."""
        return self.whole_s > UPDATE_BOUND * self.forward_s

    @property
    def second_pass_pays(self) -> bool:
        """Whether two passes make the step shorter, where updates do not fit under the forward.

        One pass takes whole_s + left_s + reach_s until the backward is there, two take the first pass and then the
        second one or left_s + reach_s, whichever is longer.
        """
        return self.whole_s * (2 * PASS_SHARE - 1) < self.left_s + self.reach_s

    @property
    def two_passes_pay(self) -> bool:
        return self.exceed_forward and self.second_pass_pays


def mean_backward_s(seconds: float, backwards: int) -> float:
    """Seconds of one backward, from the total over `backwards`. A forward of half that time lies between each two."""
    return seconds / (backwards + (backwards - 1) / 2)
