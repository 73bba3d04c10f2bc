"""Blocks that are all mixed, for tests of bits and counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from ds_slide.plan.keeping import Keepable, Kept
from ds_slide.plan.mixtures import Mixture, Run
from ds_slide.runtime.activations import activations, measuring


@contextmanager
def all_mixed() -> Iterator[None]:
    """Meanwhile all blocks keep what their products and attention have made, whatever that brings and whatever there is
    room for."""
    with patch.object(measuring, "mixtures", all_of), patch.object(activations, "kept_within", _kept):
        yield


def all_of(runs: Sequence[Run], _whole: int) -> tuple[Mixture, ...]:
    """All results of products and attention can stay, whatever that brings."""
    stay = [each for each in runs if each.nbytes]
    return (Mixture(frozenset(each.result for each in stay), sum(each.nbytes for each in stay), 0.9),)


def _kept(_room: float, blocks: Sequence[Keepable], **_: Any) -> Kept:
    return Kept(mixed={each.order: each.mixtures[0] for each in blocks})
