"""What `norms.py` says of the norms of a run."""

import math

import norms
import pytest

colors = pytest.importorskip("matplotlib.colors")

RUN = [0.5, 1.0, 2.0, math.inf, 0.0, math.nan]


def test_steps_within_the_limit_are_counted():
    found = norms.summarise(RUN, 1.0)
    assert (found["steps"], found["within"], found["share_within"], found["crossings"]) == (6, 3, 0.5, 3)
    assert found["followed"] == 1 / 3  # of the steps after 0.5, 1.0 and 0.0
    assert found["largest"] == 2.0


def colours_of(figure):
    """Of each collection that was drawn: the dots, then bands."""
    return [[colors.to_hex(each) for each in drawn.get_facecolors()] for drawn in figure.axes[0].collections]


def test_the_picture_has_every_step():
    (dots,) = colours_of(norms.picture(RUN, 1.0, "a & b"))
    assert dots == [norms.WITHIN, norms.WITHIN, *[norms.ABOVE] * 2, norms.WITHIN, norms.ABOVE]


def test_what_became_of_updates_that_began_ahead():
    counts = [(0, 0), (1, 0), (2, 1), (2, 1), (3, 1)]
    steps = [{"slide": {"speculation": {"steps": begun, "taken_back": back}}} for begun, back in counts]
    assert norms.updates_of(steps) == ["held", "ahead", "taken_back", "held", "ahead"]
    assert norms.updates_of([{"slide": {}}]) == ["held"]


def test_the_picture_tells_them_apart():
    _dots, *bands = colours_of(norms.picture([0.5, 0.5, 2.0], 1.0, "", ["held", "ahead", "taken_back"]))
    assert bands == [[norms.BANDS["ahead"]], [norms.BANDS["taken_back"]]]
