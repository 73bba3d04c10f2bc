"""What `norms.py` says of the norms of a run."""

import math
import xml.etree.ElementTree as ElementTree

import norms

RUN = [0.5, 1.0, 2.0, math.inf, 0.0, math.nan]


def test_steps_within_the_limit_are_counted():
    found = norms.summarise(RUN, 1.0)
    assert (found["steps"], found["within"], found["share_within"], found["crossings"]) == (6, 3, 0.5, 3)
    assert found["followed"] == 1 / 3  # of the steps after 0.5, 1.0 and 0.0
    assert found["largest"] == 2.0


def test_the_picture_has_every_step():
    picture = ElementTree.fromstring(norms.svg(RUN, 1.0, "a & b"))
    _background, *dots = picture.iter("{http://www.w3.org/2000/svg}rect")
    colours = [dot.get("fill") for dot in dots]
    assert colours == [norms.WITHIN, norms.WITHIN, *[norms.ABOVE] * 2, norms.WITHIN, norms.ABOVE]


def test_what_became_of_updates_that_began_ahead():
    counts = [(0, 0), (1, 0), (2, 1), (2, 1), (3, 1)]
    steps = [{"slide": {"speculation": {"steps": begun, "taken_back": back}}} for begun, back in counts]
    assert norms.updates_of(steps) == ["held", "ahead", "taken_back", "held", "ahead"]
    assert norms.updates_of([{"slide": {}}]) == ["held"]


def test_the_picture_tells_them_apart():
    picture = ElementTree.fromstring(norms.svg([0.5, 0.5, 2.0], 1.0, "", ["held", "ahead", "taken_back"]))
    colours = [shape.get("fill") for shape in picture.iter("{http://www.w3.org/2000/svg}rect")]
    assert colours[-2:] == [norms.BANDS["ahead"], norms.BANDS["taken_back"]]
