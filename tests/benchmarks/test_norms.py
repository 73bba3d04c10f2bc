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
